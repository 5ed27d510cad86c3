"""``optsched convert``: between all formats, nothing lost unless told, no half results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from program import Cli, Ran

import optsched
from optsched.model.schedule import Schedule


@pytest.mark.parametrize("route", [("a.json", "b.txt"), ("a.schedule.json", "b.jobshop.json"),
                                   ("a.tai", "b.schedule.json")])  # fmt: skip
def test_convert_there_and_back(cli: Cli, route: tuple[str, ...]) -> None:
    """Any chain of formats ends with the same problem."""
    previous = "shop.txt"
    for name in (*route, "end.txt"):
        format = "taillard" if name.endswith(".tai") else "auto"
        ran = cli("convert", previous, name, "--to", format)
        assert ran == Ran(0, f"wrote {name}\n", ""), ran
        previous = name
    ours, theirs = optsched.JobShop.read("shop.txt"), optsched.JobShop.read("end.txt")
    assert ours.sha256 == theirs.sha256 and ours.graph().same_graph(theirs.graph())


def test_convert_arrays(cli: Cli) -> None:
    """A published file or a job array becomes an array or its graph."""
    optsched.JobArray([[2, 3]], [[4, 1]], name="one").write("one.jobarray.json")
    assert cli("convert", "one.jobarray.json", "graph.json", "--to", "schedule").code == 0
    assert cli("convert", "one.jobarray.json", "two.json").code == 0
    assert Path("two.json").read_bytes() == Path("one.jobarray.json").read_bytes()
    Path("arraypipe.json").write_text(
        '{"name": "p", "n_stages": 2, "jobs": [{"route": [0, 1, 1, 0], "dur": [2, 3, 1, 4]}]}'
    )
    assert cli("convert", "arraypipe.json", "three.jobarray.json").code == 0
    three = optsched.JobArray.read("three.jobarray.json")
    assert three.graph().same_graph(optsched.JobArray.read("two.json").graph())


def test_convert_keeps_schedules(cli: Cli) -> None:
    """From document to document with orders and starts; to an instance only if told so."""
    assert cli("convert", "plan.json", "again.schedule.json").code == 0
    assert Schedule.read("again.schedule.json") == Schedule.read("plan.json")
    line = cli.refused("convert", "plan.json", "out.txt")
    assert line.startswith("plan.json: out.txt would lose its orders and starts (it is solved)")
    ran = cli("convert", "plan.json", "out.txt", "--lossy")
    assert ran.out == "wrote out.txt, without its orders and starts (it is solved)\n"
    assert optsched.JobShop.read("out.txt").sha256 == optsched.JobShop.read("shop.txt").sha256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"machines": ["saw", "mill"]}, "would lose the names of its machines"),
        ({"names": ["a", "b"]}, "would lose the names of its jobs"),
        ({"metadata": {"year": 1993}}, "would lose its metadata (year)"),
    ],
)
def test_convert_refuses_to_lose(cli: Cli, fields: dict[str, Any], message: str) -> None:
    """What a text format has no place for is named; `--lossy` drops just that."""
    optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], **fields).write("full.json")
    for target in ("standard", "taillard"):
        line = cli.refused("convert", "full.json", "out.txt", "--to", target)
        assert message in line and line.endswith("(--lossy drops them)")
    ran = cli("convert", "full.json", "out.txt", "--lossy")
    assert ran.code == 0 and ran.out.startswith("wrote out.txt, without ")
    assert cli("convert", "full.json", "same.json").code == 0
    assert Path("same.json").read_bytes() == Path("full.json").read_bytes()


def test_convert_refuses(cli: Cli) -> None:
    """Formats that cannot hold the problem at all, unknown ones, wrong input."""
    optsched.JobShop([[(0, 3)]], deadline=[6]).write("late.json")
    line = cli.refused("convert", "late.json", "out.txt", "--lossy")
    assert line == "late.json: the standard format has no releases and deadlines: write it as json"
    assert "only job arrays" in cli.refused("convert", "shop.txt", "x.jobarray.json")
    optsched.JobArray([[2, 3]], [[4, 1]], lag_forward=2).write("one.json")
    assert "the graph is not a job shop" in cli.refused("convert", "one.json", "out.txt")
    optsched.JobShop([[(0, 3), (0, 1)]]).write("twice.json")
    assert "every machine once" in cli.refused("convert", "twice.json", "x.txt", "--to", "taillard")
    assert cli("convert", "twice.json", "twice.txt").code == 0
    assert cli("convert", "twice.txt", "back.json", "--reentrant").code == 0
    assert optsched.JobShop.read("back.json").sha256 == optsched.JobShop.read("twice.json").sha256
    assert "its ending names no format" in cli.refused("convert", "shop.txt", "out.dat")
    assert cli.refused("convert", "shop.txt", "x.txt", "--to", "x").startswith("to: expected one")
    assert cli.refused("convert", "shop.txt", "x.txt", "--from", "x").startswith("from: expected")
    assert "shop.txt:" in cli.refused("convert", "shop.txt", "x.json", "--from", "taillard")
    period = optsched.JobArray([[2, 3]], [[4, 1]], objective="period")
    period.write("rolling.json")
    line = cli.refused("convert", "rolling.json", "x.schedule.json")
    assert "would lose its objective (period)" in line
