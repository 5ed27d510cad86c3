"""Times without a unit are shown without one, everywhere; those with one keep it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import optsched
from optsched.analysis.report import report
from optsched.model.document import read, write

if TYPE_CHECKING:
    from program import Cli

UNIT = re.compile(r"[0-9.](?:\s|\u202f)?(?:ns|µs|us|ms|s|min|h|days)\b|time in ")
"""A time with its unit, as any of our texts has it."""

HUGE = 10**9
"""Times so long that seconds would be shown as minutes and days."""


@pytest.mark.parametrize(("source", "scale"), [("text", 1), ("json", HUGE), ("python", 945)])
def test_no_unit_is_invented(cli: Cli, source: str, scale: int) -> None:
    """solve, verify, show, HTML page and trace of a shop that has none."""
    shop = optsched.JobShop([[(0, 3 * scale), (1, 2 * scale)], [(1, 4 * scale), (0, scale)]])
    name = "u.txt" if source == "text" else "u.jobshop.json"
    shop.write(name, format="standard" if source == "text" else "json")
    assert optsched.JobShop.read(name).time_unit == ""
    if source == "python":
        optsched.solve(shop, "dispatch").schedule.write("x.json")  # type: ignore[union-attr]
    else:
        solved = cli("solve", name, "--solver", "dispatch", "-o", "x.json").out
        assert not UNIT.search(re.sub(r"time +[0-9.]+ s", "", solved)), solved
    for words in (("show", name), ("verify", "x.json", "--problem", name), ("show", "x.json")):
        out = cli(*words).out
        assert out and not UNIT.search(out), out
    assert cli("show", "x.json", "-o", "x.html").code == 0
    data = re.search(r'"unit":(\{.*?\})', Path("x.html").read_text())
    assert data and json.loads(data[1]) == {"own": "", "name": "", "ticks": 1}
    assert cli("show", "x.json", "-o", "t.json").code == 0
    trace = json.loads(Path("t.json").read_text())
    assert trace["otherData"]["time_unit"] == ""
    assert max(e["ts"] + e.get("dur", 0) for e in trace["traceEvents"] if "ts" in e) == 6 * scale
    late = optsched.JobShop([[(0, 9)]], deadline=[5])
    assert late.infeasibility() == "job 0 needs 9 for its chain, but its deadline is 5"


@pytest.mark.parametrize("unit", ["", "us"])
def test_documents_keep_the_unit(unit: str, tmp_path: Path) -> None:
    """Of shops, graphs and schedules; no rate per second without a unit."""
    shop = optsched.JobShop([[(0, 3)]], time_unit=unit)
    shop.write(tmp_path / "s.json")
    assert optsched.JobShop.read(tmp_path / "s.json") == shop
    schedule = optsched.solve(shop, "dispatch").schedule
    assert schedule is not None and schedule.time_unit == unit
    assert read(write(schedule).decode()) == schedule
    assert report(schedule).time_unit == unit
    with pytest.raises(optsched.InputError, match="time_unit: expected one of ns, us, ms, s"):
        optsched.JobShop([[(0, 3)]], time_unit=unit + "x")
