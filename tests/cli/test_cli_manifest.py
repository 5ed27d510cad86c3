"""`optsched cluster manifest`: answers that contradict themselves, pods that fit, stdin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from program import Cli

START: dict[str, Any] = {"task": "a", "agents": {"n1": 5, "n2": 3}, "slots": 8}
ANSWER: dict[str, Any] = {"format": "optsched.decision/1", "start": [START], "release": []}


def answer(*, drop: str = "", **change: Any) -> str:
    """A file with this answer; `start` is what changes of its only start."""
    start = {**START, **change.pop("only", {})}
    tree = {**ANSWER, "start": [start], **change}
    tree.pop(drop, None)
    Path("a.json").write_text(json.dumps(tree))
    return "a.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"only": {"agents": {"n1": -1}}},
            'start[0]: task a: allocation["n1"]: expected an integer in 1..2^53, got -1',
        ),
        ({"only": {"agents": {"n1": 5}}}, "task a: allocation: holds 5 slots, but requests 8"),
        ({"only": {"agents": {}}}, "start[0]: agents: expected at least one, got none"),
        ({"postponed": ["a"]}, 'duplicate task "a"'),
        ({"drop": "start"}, 'the field "start" is missing'),
        ({"error": "line 3: no"}, 'error: this state was refused: "line 3: no"'),
    ],
)
def test_refused_answers(cli: Cli, change: dict[str, Any], said: str) -> None:
    """The field, the rule and the value, and exit code 2."""
    text = cli.refused("cluster", "manifest", answer(**change))
    assert text.startswith("a.json: ") and said in text


def test_pods_fit_the_nodes_they_are_pinned_to(cli: Cli) -> None:
    """With --pin pods divide what every node gives; without, equal pods may ask for more."""
    loose = cli("cluster", "manifest", answer(only={"agents": {"n1": 8}}), "--gpus-per-pod", "3")
    assert loose.err == "note: job a: its equal pods need 1 GPUs beyond the quota\n"
    tight = cli("cluster", "manifest", "a.json", "--gpus-per-pod", "3", "--pin")
    (job,) = (item for item in json.loads(tight.out)["items"] if item["kind"] == "Job")
    assert tight.err == "" and job["spec"]["parallelism"] == 4


def test_wrong_schedules(cli: Cli) -> None:
    """The file and the rule of the plan that the schedule breaks."""
    jobs: list[dict[str, Any]] = [{"name": "a", "maximum": 1, "utility": [2]},
                                  {"name": "b", "maximum": 1, "utility": [1]}]  # fmt: skip
    tree = {"format": "optsched.quota/1", "budget": 1, "jobs": jobs}
    Path("p.json").write_text(json.dumps(tree))
    assert cli("solve", "p.json", "-o", "s.json").code == 0
    words = ("cluster", "manifest", "p.json", "--schedule", "s.json")
    assert cli(*words).code == 0
    jobs[1]["must_run"] = True
    Path("p.json").write_text(json.dumps(tree))
    assert cli.refused(*words) == "s.json: job 'b' gets 0 GPUs, which is not allowed"


def test_stdin(cli: Cli) -> None:
    """What `optsched cluster decide` prints can be piped."""
    expected = cli("cluster", "manifest", answer())
    cli.feed(Path("a.json").read_bytes())
    assert cli("cluster", "manifest", "-").out == expected.out
    cli.feed("{")
    assert cli.refused("cluster", "manifest", "-").startswith("stdin")
