"""`optsched cluster decide` and `manifest` as users and other programs call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import optsched
from optsched.problems.quota import document as quota_json

if TYPE_CHECKING:
    from program import Cli

STATE: dict[str, Any] = {
    "format": "optsched.decide/1",
    "scheduler": "priority",
    "preemption": True,
    "agents": [{"name": "n1", "slots": 8}, {"name": "n2", "slots": 4}],
    "groups": [{"name": "urgent", "priority": 1}],
    "tasks": [
        {"name": "old", "slots": 8, "allocation": {"n1": 8}},
        {"name": "new", "slots": 8, "group": "urgent", "submitted": 1.5},
        {"name": "small", "slots": 2, "submitted": 2, "blocked": ["n1"], "position": None},
        {"name": "board", "slots": 0, "submitted": 3},
    ],
}


def put(name: str, tree: Any) -> str:
    """A file with this JSON."""
    Path(name).write_text(json.dumps(tree))
    return name


def test_an_answer(cli: Cli) -> None:
    """One JSON object on one line; from a file or stdin; options go before the state's settings."""
    ran = cli("cluster", "decide", put("s.json", STATE))
    assert ran.code == 0 and ran.out.count("\n") == 1
    answer = json.loads(ran.out)
    board = answer["start"][0]
    assert answer["format"] == "optsched.decision/1" and answer["release"] == ["old"]
    assert board["task"] == "board" and list(board["agents"].values()) == [0]
    cli.feed(json.dumps(STATE))
    assert cli("cluster", "decide", "-").out == ran.out
    assert cli("cluster", "decide", "s.json", "-o", "d.json").out == "wrote d.json\n"
    assert Path("d.json").read_text() == ran.out
    kept = json.loads(cli("cluster", "decide", "s.json", "--no-preemption").out)
    assert kept["release"] == [] and [row["task"] for row in kept["start"]] == ["board"]
    plain = {key: value for key, value in STATE.items() if key != "preemption"}
    off = json.loads(cli("cluster", "decide", put("s.json", plain)).out)
    assert off["release"] == [], "off by default, as in Determined"
    assert json.loads(cli("cluster", "decide", "s.json", "--preemption").out) == answer
    put("s.json", STATE)
    shared = json.loads(cli("cluster", "decide", "s.json", "--scheduler", "fair_share").out)
    assert [row["task"] for row in shared["start"]] == ["board", "small"]
    assert shared["start"][1] == {"task": "small", "agents": {"n2": 2}, "slots": 2}


def test_pools(cli: Cli) -> None:
    """Every pool decides for itself; starts name it."""
    pool = {key: value for key, value in STATE.items() if key != "format"}
    other = {
        "name": "cpu", "agents": [{"name": "c1", "slots": 1}],
        "tasks": [{"name": "x", "slots": 1}],
    }  # fmt: skip
    tree = {"format": "optsched.decide/1", "pools": [{**pool, "name": "gpu"}, other]}
    answer = json.loads(cli("cluster", "decide", put("p.json", tree)).out)
    assert answer["release"] == ["old"]
    assert [(row["task"], row["pool"]) for row in answer["start"]] == [
        ("board", "gpu"), ("x", "cpu"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"agents": [{"name": "n", "slots": -1}]}, "agent n: slots: expected an integer in 0.."),
        (
            {"tasks": [{"name": "t", "slots": 10**30}]},
            "task t: slots: expected an integer in 0..2^53",
        ),
        ({"scheduler": "round_robin"}, "scheduler"),
        ({"pools": []}, "pools: excludes agents"),
    ],
)
def test_refused_states(cli: Cli, change: dict[str, Any], said: str) -> None:
    """One sentence with the file, the path and the value."""
    path = put("s.json", {**STATE, **change})
    text = cli.refused("cluster", "decide", path)
    assert text.startswith("s.json: ") and said in text


def test_refused_calls(cli: Cli) -> None:
    """No file, wrong words, no JSON."""
    put("s.json", STATE)
    assert "no such file" in cli.refused("cluster", "decide", "nowhere.json")
    assert "scheduler: expected one of" in cli.refused(
        "cluster", "decide", "s.json", "--scheduler", "fifo"
    )
    cli.feed(b"\xff{")
    assert "stdin:1: not a text file in UTF-8" in cli.refused("cluster", "decide", "-")
    twice = {"format": "optsched.decide/1", "pools": [{"agents": []}, {"agents": []}]}
    assert 'duplicate name "default"' in cli.refused("cluster", "decide", put("p.json", twice))


def jobs_of(out: str) -> dict[str, dict[str, Any]]:
    """Items of kind Job by name."""
    tree = json.loads(out)
    assert tree["kind"] == "List" and tree["apiVersion"] == "v1"
    return {i["metadata"]["name"]: i for i in tree["items"] if i["kind"] == "Job"}


def test_a_manifest_of_a_plan(cli: Cli) -> None:
    """Solved, or by a schedule that is given; pods, minima, nodes."""
    plan = optsched.QuotaPlan(
        [
            optsched.QuotaJob("none", sizes=[2], utility=[-1]),
            optsched.QuotaJob("big", sizes=[4, 8, 12], utility=[1, 2, 9]),
            optsched.QuotaJob("one", sizes=[1], utility=[1], must_run=True),
        ],
        nodes=[8, 4, 1],
    )
    Path("q.json").write_bytes(quota_json.to_json(plan))
    ran = cli("cluster", "manifest", "q.json", "--gang", "podgroup", "--pin")
    assert ran.code == 0 and ran.err == ""
    jobs = jobs_of(ran.out)
    assert set(jobs) == {"big", "one"}
    spec = jobs["big"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 3  # 8 + 4 GPUs in pods of 4
    groups = [i for i in json.loads(ran.out)["items"] if i["kind"] == "PodGroup"]
    assert [g["spec"]["minMember"] for g in groups] == [1, 1]  # 4 GPUs are enough
    hosts = json.dumps(spec["template"]["spec"]["affinity"])
    assert '"values": ["n0", "n1"]' in hosts
    result = optsched.solve(plan)
    result.schedule.write("q.schedule.json")  # type: ignore[union-attr]
    given = cli("cluster", "manifest", "q.json", "--schedule", "q.schedule.json", "--pin")
    assert given.out == ran.out
    cli("cluster", "manifest", "q.json", "-o", "m.json")
    assert set(jobs_of(Path("m.json").read_text())) == {"big", "one"}


def test_a_manifest_of_a_decision(cli: Cli) -> None:
    """Priorities are inverted, equal in a group; released tasks are told."""
    state = {
        "format": "optsched.decide/1", "scheduler": "priority",
        "agents": [{"name": "n1", "slots": 8}, {"name": "n2", "slots": 8}],
        "groups": [{"name": "u", "priority": 2}, {"name": "v", "priority": 98}],
        "tasks": [
            {"name": "wide", "slots": 16, "group": "u"},
            {"name": "zero", "slots": 0, "group": "v"},
        ],
    }  # fmt: skip
    Path("a.json").write_text(cli("cluster", "decide", put("s.json", state)).out)
    ran = cli("cluster", "manifest", "a.json", "--gang", "podgroup", "--pin", "--image", "img:1",
              "--command", "python train.py --x '1 2'")  # fmt: skip
    jobs = jobs_of(ran.out)
    pod = jobs["wide"]["spec"]["template"]["spec"]
    assert jobs["wide"]["spec"]["completions"] == 2
    assert pod["containers"][0] == {
        "name": "main", "image": "img:1", "command": ["python", "train.py", "--x", "1 2"],
        "resources": {"limits": {"nvidia.com/gpu": 8}},
    }  # fmt: skip
    assert "resources" not in jobs["zero"]["spec"]["template"]["spec"]["containers"][0]
    classes = {i["metadata"]["name"]: i["value"] for i in json.loads(ran.out)["items"]
               if i["kind"] == "PriorityClass"}  # fmt: skip
    assert classes == {"optsched-98": 98, "optsched-2": 2}
    assert pod["priorityClassName"] == "optsched-98"
    Path("a.json").write_text(cli("cluster", "decide", put("s.json", STATE)).out)
    ran = cli("cluster", "manifest", "a.json")
    assert ran.err == "note: to be released, so delete these jobs: old\n" and set(
        jobs_of(ran.out)
    ) == {"board"}


def test_refused_manifests(cli: Cli) -> None:
    """Files of other kinds, names, options that do not go together."""
    plan = optsched.QuotaPlan([optsched.QuotaJob("A_b", sizes=[1], utility=[1])], budget=2)
    Path("q.json").write_bytes(quota_json.to_json(plan))
    assert 'job "A_b": "A_b" is not a Kubernetes name' in cli.refused(
        "cluster", "manifest", "q.json"
    )
    assert "format: expected optsched.quota/1" in cli.refused(
        "cluster", "manifest", put("s.json", STATE)
    )
    assert "command" in cli.refused("cluster", "manifest", "q.json", "--command", "'")
    good = optsched.QuotaPlan([optsched.QuotaJob("ab", sizes=[1], utility=[1])], budget=2)
    Path("q.json").write_bytes(quota_json.to_json(good))
    assert "no nodes are chosen" in cli.refused("cluster", "manifest", "q.json", "--pin")
    assert "choose another name" in cli.refused("cluster", "manifest", "q.json", "-o", "q.json")
    assert "goes with a quota plan" in cli.refused(
        "cluster", "manifest", "plan.json", "--schedule", "q.json"
    )
    never = optsched.QuotaPlan(
        [optsched.QuotaJob("ab", sizes=[4], utility=[1], must_run=True)], budget=2
    )
    Path("q.json").write_bytes(quota_json.to_json(never))
    ran = cli("cluster", "manifest", "q.json")
    assert ran.code == 1 and ran.out == "" and "infeasible" in ran.err
