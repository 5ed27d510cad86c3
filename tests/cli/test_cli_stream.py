"""`optsched stream`: the answers of Python, line by line; a bad line does not end the stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import optsched
from optsched.bandwidth import BottleneckBandwidth, Cluster, ClusterState, Dispatcher, Policy
from optsched.plan import ClusterSnapshot
from optsched.service.queries import QUERIES
from optsched.service.stream import VERBS

if TYPE_CHECKING:
    from program import Cli

BAD = {
    "not json": ("body", "not valid JSON: expecting value"),
    "[1]": ("body", "expected an object, got a list"),
    "[" * 3000: ("body", "nested too deeply"),
    "\udcff\udcfe": ("body", "UTF-8"),
    '{"do": "choose", "gpus": 1, "gpus": 2}': ("body", 'key "gpus" appears twice'),
    '{"do": "choose", "gpus": NaN}': ("body", "NaN is not a JSON number"),
    '{"gpus": 2}': ("do", f"do: expected one of {', '.join(VERBS)}, got nothing"),
    '{"do": "choos"}': ("do", "(did you mean choose?)"),
    '{"do": ["choose"]}': ("do", "got a list"),
    '{"do": "choose"}': ("body", 'the field "gpus" is missing'),
    '{"do": "choose", "gpus": 2, "colour": "red"}': ("body", "expected one of id, state, cluster"),
    '{"do": "choose", "gpus": true}': ("gpus", "gpus: expected an integer, got true"),
    '{"do": "choose", "gpus": 2, "state": "prod"}': ("state", "the name of an open cluster"),
    '{"do": "choose", "gpus": 2, "cluster": {}}': ("cluster", "state, cluster and model together"),
    '{"do": "choose", "gpus": 2, "policy": {"max_host": 1}}': (
        "policy",
        "expected one of required",
    ),
    '{"do": "scores", "gpus": 0}': ("gpus", "gpus: expected an integer in 1.."),
    '{"do": "plan", "model": {}}': ("snapshot", "snapshot and model together"),
    '{"do": "change", "give": ["nobody"]}': (
        "give[0]",
        "expected a job, got 'nobody'; known: a, b",
    ),
    '{"do": "change", "place": {"c": "n04:0"}}': (
        "start",
        "expected a waiting job, got 'c' (submit it",
    ),
    '{"do": "change", "submit": [{"name": "c", "gpus": 1}], "place": {"c": "n04:0"}}': (
        "place.c",
        "GPU n04/0 is not free",
    ),
    '{"do": "change", "place": {"b": "n01:0"}}': ("place.b", "expected 2 GPUs, got 1"),
    '{"do": "change", "submit": [{"name": "b", "gpus": 3}]}': ("jobs['b'].gpus", "it holds 2"),
    '{"do": "change", "fail": ""}': ("change", "expected repair, fail, give"),
    '{"do": "change", "fail": "n01", "demand": {"x": 1}}': ("demand", "jobs of place or start"),
    '{"do": "change", "fail": "n01", "demand": {"x": -1}}': ("demand.x", "expected GB/s"),
    '{"do": "change", "fail": "n01", "version": 7}': ("version", "expected 0, got 7"),
    '{"do": "open", "name": "x", "state": {}}': ("cluster", "expected either cluster or model"),
    '{"do": "open", "state": {"format": "optsched.state/1"}}': ("state", "neither free"),
    '{"do": "decide", "format": "optsched.decide/1", "agent": []}': (
        "body",
        "did you mean agents?",
    ),
    '{"do": "verify", "schedule": {"format": "optsched.schedule/9"}}': ("schedule.format", "newer"),
}
"""Lines, the refused field, and a part of the sentence."""


@pytest.fixture
def site(cli: Cli) -> Cli:
    """A folder with a cluster and its state."""
    assert cli("generate", "cluster", "-o", "c.json").code == 0
    first().write("s.json")
    return cli


def first() -> ClusterState:
    """Two jobs on four hosts of eight GPUs."""
    held = {"a": "n03:4-7 n04:0-3", "b": "n04:4,5"}
    return ClusterState.parse(Cluster.read("c.json"), "n01 n02 n03:0-3", held, "n04:6,7")


def stream(site: Cli, lines: list[str], *words: object, code: int = 0) -> list[dict[str, Any]]:
    """Answers to lines on stdin."""
    site.feed("".join(line + "\n" for line in lines))
    ran = site("stream", *words)
    assert ran.code == code, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


ON_FILES = ("--cluster", "c.json", "--state", "s.json")


def test_a_state_and_its_changes(site: Cli) -> None:
    """Every request does what its verb does in Python."""
    cluster, state = Cluster.read("c.json"), first()
    fast = Dispatcher(cluster, BottleneckBandwidth(cluster))
    gpus, bandwidth = fast.choose(state, 3)
    choice = {"gpus": cluster.written(gpus), "bandwidth": bandwidth / 1e6}
    taken, _ = fast.choose(state, 4)
    started = state.take(taken, "new", 5_000_000)
    few = Dispatcher(cluster, fast.model, policy=Policy(max_per_host=2, apart=("b",)))
    what = fast.what_if(started, "n03:0-1 n02:0-2")
    failed = started.fail("n04:0 n03")
    fixed = failed.repair("n04:6")
    grown = fixed.resize("b", "n04:4-6").move("b", "n02:5-7")
    gang = fast.gang(grown.give("new"), {"x": 2, "y": 3})
    best = fast.best(started, 5, 3)
    document = json.loads(Path("s.json").read_text())

    def sized(name: str, gpus: int, place: str) -> dict[str, Any]:
        return {"do": "change", "submit": [{"name": name, "gpus": gpus}], "place": {name: place}}

    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"do": "choose", "gpus": 3, "id": 7}, {"id": 7, **choice}),
        ({"do": "choose", "gpus": 3, "deadline": 1e300}, choice),
        ({**sized("new", 4, cluster.written(taken)), "demand": {"new": 5}},
         {"version": 1, "free": 16}),
        ({"do": "scores", "gpus": 5, "policy": {"max_per_host": 2, "apart": ["b"]}},
         {"scores": few.scores(started, 5)}),
        ({"do": "choose", "gpus": 5, "best": 3, "deadline": 5}, {
            "gpus": cluster.written(best[0].gpus), "bandwidth": best[0].value / 1e6,
            "choices": [{"gpus": cluster.written(one.gpus), "bandwidth": one.value / 1e6}
                        for one in best]}),
        ({"do": "what_if", "gpus": "n03:0-1 n02:0-2"}, {
            "gpus": "n02:0-2 n03:0,1", "bandwidth": what.share.value / 1e6,
            "alone": what.share.standalone / 1e6, "best": (what.best or 0) / 1e6,
            "regret": (what.regret or 0) / 1e6, "fault": "",
            "victims": {name: lost / 1e6 for name, lost in what.victims.items()}}),
        ({"do": "change", "fail": "n04:0 n03"},
         {"version": 2, "free": len(failed.free), "hit": ["a"]}),
        ({"do": "change", "repair": "n04:6", "id": ""},
         {"id": "", "version": 3, "free": len(fixed.free)}),
        (sized("b", 3, "n04:4-6"), {"version": 4, "free": len(fixed.free) - 1}),
        ({"do": "change", "place": {"b": "n02:5-7"}}, {"version": 5, "free": len(grown.free)}),
        ({"do": "change", "give": ["new"]}, {"version": 6, "free": len(grown.free) + 4}),
        ({"do": "gang", "jobs": {"x": 2, "y": 3}}, {"jobs": {
            name: {"gpus": cluster.written(one.gpus), "bandwidth": one.value / 1e6}
            for name, one in gang.items()}}),
        ({"do": "change", "start": [{"name": "x", "gpus": 2}], "demand": {"x": 1}},
         {"version": 7, "free": len(grown.free) + 2, "started": {}}),
        ({"do": "open", "name": "past", "state": document,
          "cluster": json.loads(Path("c.json").read_text())}, {"version": 0, "free": 20}),
        ({"do": "choose", "gpus": 3, "state": "past"}, choice),
        ({"do": "choose", "gpus": 3, "state": document, "id": 1,
          "cluster": json.loads(Path("c.json").read_text())}, {"id": 1, **choice}),
        ({"do": "open", "state": document}, {"version": 0, "free": 20}),
    ]  # fmt: skip
    rows[12][1]["started"]["x"] = {"gpus": cluster.written(gang["x"].gpus),
                                   "bandwidth": gang["x"].value / 1e6}  # fmt: skip
    lines = [json.dumps(row) for row, _ in rows]
    assert stream(site, ["", *lines], *ON_FILES, "-o", "after.json") == [one for _, one in rows]
    assert ClusterState.read("after.json", cluster) == first()
    assert what.victims and few.scores(started, 5).keys() == {"n01", "n02", "n03"}
    Path("r.jsonl").write_text("".join(line + "\n" for line in lines[:-1]))
    assert site("stream", "r.jsonl", *ON_FILES, "-o", "after.json").code == 0
    after = ClusterState.read("after.json", cluster)
    assert {job.name for job in after.jobs} == {"a", "b", "x"} and len(after.down) == 10


def test_bad_lines(site: Cli) -> None:
    """Field, value, sentence, and the id; nothing changes, the next line is answered, code 1."""
    cannot = '{"do": "choose", "gpus": 400, "id": "big"}'
    lines = [*BAD, cannot, '{"do": "read"}']
    answers = stream(site, lines, *ON_FILES, "-o", "after.json", code=1)
    for (line, (field, words)), answer in zip(BAD.items(), answers, strict=False):
        code = 409 if field == "version" else 400
        assert set(answer) == {"code", "error"} and answer["code"] == code, (line, answer)
        error = answer["error"]
        assert error["field"] == field and words in error["message"], (line, answer)
        assert "`" not in error["message"] and "$" not in error["message"]
    assert answers[-2]["id"] == "big" and answers[-2]["code"] == 409
    assert answers[-2]["error"]["message"] == "gpus: requested 400, free 20"
    assert answers[-1]["snapshot"]["state"] == json.loads(Path("s.json").read_text())
    assert not Path("after.json").exists()


def test_a_snapshot_and_its_changes(cli: Cli) -> None:
    """Plans, moves and changes of the present state; what knows no facts of jobs is refused."""
    snapshot = QUERIES["plan"].example["snapshot"]
    Path("now.json").write_text(json.dumps(snapshot))
    moved = {"do": "change", "place": {"b": "n0:2,3"}, "version": 0}
    rows: list[tuple[dict[str, Any], str | int, Any]] = [
        ({"do": "clear", "request": "c"}, "plans", 1),
        ({"do": "change", "start": ["c"]}, "code", 409),
        (moved, "version", 1), (moved, "code", 409),
        ({"do": "change", "start": ["c"], "id": "s"}, "version", 2),
        ({"do": "plan"}, "plan", 0),
        ({"do": "open", "name": "b", "snapshot": snapshot}, "free", 4),
        ({"do": "plan", "state": "b"}, "plan", 1), ({"do": "plan", "state": "c"}, "code", 400),
    ]  # fmt: skip
    lines = [json.dumps(row) for row, *_ in rows]
    answers = stream(cli, lines, "--snapshot", "now.json", code=1)
    for (row, key, expected), answer in zip(rows, answers, strict=True):
        found = answer[key]
        assert (len(found) if isinstance(found, list) else found) == expected, (row, answer)
    answers = stream(cli, [lines[2], lines[4]], "--snapshot", "now.json", "-o", "then.json")
    assert answers[-1]["started"]["c"]["gpus"] == "n1:0-3" and answers[-1]["id"] == "s"
    held = {job.name: job.gpus for job in ClusterSnapshot.read("then.json").state.jobs}
    assert held == {"a": (0, 1), "b": (2, 3), "c": (4, 5, 6, 7)}


def test_queries_without_a_state(cli: Cli) -> None:
    """An instance is solved, its schedule verified, pools are decided; every answer is a line."""
    optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]]).write("shop.json")
    shop = json.loads(Path("shop.json").read_text())
    pool = {"format": "optsched.decide/1", "agents": [{"name": "n0", "slots": 4}],
            "tasks": [{"name": "a", "slots": 4}]}  # fmt: skip
    rows = [{"do": "solve", "problem": shop}, {"do": "decide", "id": 4, **pool}]
    solved, decided = stream(cli, [json.dumps(row) for row in rows])
    assert solved["status"] == "optimal" and solved["objective"] == 6
    assert decided["id"] == 4 and decided["start"][0]["agents"] == {"n0": 4}
    schedule = solved["schedule"]
    schedule["starts"] = [0] * 4
    rows = [{"do": "verify", "schedule": one, "problem": shop, "id": i}
            for i, one in enumerate((solved["schedule"], shop))]  # fmt: skip
    wrong, refused = stream(cli, [json.dumps(row) for row in rows], code=1)
    assert not wrong["valid"] and wrong["violations"] and wrong["id"] == 0
    assert refused["id"] == 1 and refused["error"]["field"] == "schedule.format"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none.jsonl",), "none.jsonl: no such file"),
        ((".",), ".: is a directory"),
        (("--cluster", "c.json"), "state: missing"),
        (("--state", "s.json"), "cluster, model: give"),
        ((*ON_FILES, "-o", "s.json"), "is the file that is read"),
    ],
)
def test_refused_options(site: Cli, words: tuple[str, ...], said: str) -> None:
    """One sentence before any line is read."""
    assert said in site.refused("stream", *words)
