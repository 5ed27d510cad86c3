"""`optsched gpus choose` and `bandwidth`, `optsched generate cluster` as users call them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import optsched
from optsched.bandwidth import BottleneckBandwidth, Cluster, ClusterState, Dispatcher, Policy
from optsched.model.verify import verify

if TYPE_CHECKING:
    from program import Cli


@pytest.fixture
def site(cli: Cli) -> Cli:
    """A folder with a cluster, its state, measurements and a model."""
    ran = cli("generate", "cluster", "-o", "c.json", "--state", "s.json", "--measurements", "m.csv")
    assert ran.code == 0, ran.err
    header, *rows = Path("m.csv").read_text().splitlines()
    assert len(rows) == 493
    Path("m.csv").write_text("\n".join([header, *rows[::10]]) + "\n")
    ran = cli(
        "gpus", "bandwidth", "fit", "--cluster", "c.json", "--measurements", "m.csv", "-o", "b.json"
    )
    assert ran.code == 0 and "50 measurements of 50 patterns" in ran.out
    return cli


def stream(site: Cli, lines: list[str]) -> list[dict[str, Any]]:
    """Answers to the lines of a stream."""
    site.feed("".join(line + "\n" for line in lines))
    ran = site("gpus", "choose", "--cluster", "c.json", "--state", "s.json", "--stream")
    assert ran.code == 0
    return [json.loads(line) for line in ran.out.splitlines()]


def test_one_request(site: Cli) -> None:
    """GPUs on one line; JSON, explanation, hostfile; a schedule that verifies."""
    given = ("gpus", "choose", "--model", "b.json", "--state", "s.json", "--gpus", "6")
    plain = site(*given, "-o", "x.schedule.json")
    assert plain.code == 0
    cluster = Cluster.read("c.json")
    state = ClusterState.read("s.json", cluster)
    gpus = cluster.parse(plain.out.strip())
    expected, bandwidth = Dispatcher(cluster, BottleneckBandwidth.read("b.json")).choose(state, 6)
    assert gpus == expected
    answer = json.loads(site(*given, "--json").out)
    assert answer["format"] == "optsched.dispatch/1" and answer["status"] == "optimal"
    assert round(answer["bandwidth"] * 1e6) == bandwidth and answer["gpus"] == plain.out.strip()
    assert answer["upper_bound"] == answer["bandwidth"] and len(answer["ranks"]) == 6
    text = site(*given, "--explain").out
    assert "limited by" in text and "one GPU more" in text
    hosts = site(*given, "--hostfile").out.splitlines()
    assert sum(int(line.split("slots=")[1]) for line in hosts) == 6
    schedule = optsched.Schedule.read("x.schedule.json")
    assert verify(schedule) == [] and schedule.objective.value == -bandwidth  # type: ignore[union-attr]
    assert "GB/s" in site("show", "x.schedule.json").out


def test_an_instance_is_solved(site: Cli) -> None:
    """A subset document goes through `solve`, with its natural unit."""
    cluster = Cluster.read("c.json")
    state = ClusterState.read("s.json", cluster)
    model = BottleneckBandwidth.read("b.json")
    optsched.GpuPlacement(state, model, 5).write("p.subset.json")
    ran = site("solve", "p.subset.json", "--solver", "counts")
    assert ran.code == 0 and "bandwidth   " in ran.out and "GB/s" in ran.out
    gpus, _ = Dispatcher(cluster, model).choose(state, 5)
    assert f"GPUs        {cluster.written(gpus)}\n" in ran.out
    ran = site("solve", "p.subset.json", "--solver", "counts", "--json")
    assert json.loads(ran.out)["GPUs"] == cluster.written(gpus)
    beside = optsched.GpuPlacement(state, model, 5)
    beside.write("q.subset.json", "b.json")
    assert optsched.GpuPlacement.read("q.subset.json") == beside
    Path("b.json").write_text(Path("b.json").read_text().replace("\n", "\n ", 1))
    assert "the model has changed" in site.refused("solve", "q.subset.json")


def test_other_commands_know_choices(site: Cli) -> None:
    """Bounds in GB/s, benchmarks with gaps of negative objectives, no conversion."""
    cluster = Cluster.read("c.json")
    state = ClusterState.read("s.json", cluster)
    optsched.GpuPlacement(state, BottleneckBandwidth(cluster), 9).write("p.subset.json")
    ran = site("show", "p.subset.json")
    assert ran.code == 0 and "best pattern" in ran.out and ran.out.count("GB/s") == 2
    assert "has one format only" in site.refused("convert", "p.subset.json", "x.schedule.json")
    site.patch.setattr("optsched.bench.run.missing_kernels", lambda tasks: [])
    ran = site(
        "bench", "p.subset.json", "--solvers", "counts,random_subset", "--time-limit", "20", "-o",
        "r.csv",
    )  # fmt: skip
    assert ran.code == 0 and "0.00%" in ran.out
    rows = list(csv.DictReader(io.StringIO(Path("r.csv").read_text())))
    assert rows[0]["status"] == "optimal" and all(int(row["objective"]) < 0 for row in rows)


def test_impossible(site: Cli) -> None:
    """No choice: exit code 1 and the rule; nothing is written."""
    given = ("gpus", "choose", "--model", "b.json", "--state", "s.json", "--gpus", "9")
    ran = site(*given, "--policy", "required=host", "-o", "y.json")
    assert ran.code == 1 and "required: requested 9 GPUs in one host" in ran.err
    assert not Path("y.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "0"), "gpus: expected an integer"),
        (("--gpus", "4", "--stream"), "request: the requests have the numbers"),
        (("--gpus", "4", "--policy", "balance=odd"), "balance: expected one of free, even, exact"),
        (("--gpus", "4", "-o", "no/where.json"), "no/where.json: cannot be written"),
    ],
)
def test_refused(site: Cli, words: tuple[str, ...], said: str) -> None:
    """One sentence with the field; exit code 2; no file."""
    assert said in site.refused(
        "gpus", "choose", "--cluster", "c.json", "--state", "s.json", *words
    )


BAD = {
    "not json": "line 1:1:1: not valid JSON: expecting value",
    '{"gpus": 2, "colour": "red"}': "colour",
    '{"give": "nobody"}': "there is no job 'nobody'; running: a, b",
    '{"gpus": 2, "give": "new"}': "expected one of gpus, scores, what_if, gang",
    '{"gpus": 2, "demand": 1}': "demand: goes with the name of the job",
    "[1]": "top level: expected an object, got a list",
    '{"move": "a"}': "to: move needs GPUs such as 'n01:0-3 n02'",
    '{"restore": {"format": "optsched.state/1"}}': "32 GPUs are neither free",
    '{"scores": 0}': "gpus: expected an integer in 1..",
    "[" * 3000: "nested too deeply",
    "\udcff\udcfe": "",
}


def test_stream(site: Cli) -> None:
    """Every verb does what it does in Python; bad lines get an error, and the stream goes on."""
    cluster = Cluster.read("c.json")
    first = ClusterState.parse(
        cluster, "n01 n02 n03:0-3", {"a": "n03:4-7 n04:0-3", "b": "n04:4,5"}, "n04:6,7"
    )
    first.write("s.json")
    fast = Dispatcher(cluster, BottleneckBandwidth(cluster))
    gpus, bandwidth = fast.choose(first, 3)
    started = first.take(fast.choose(first, 4)[0], "new")
    few = Dispatcher(cluster, fast.model, policy=Policy(max_per_host=2, apart=("b",)))
    what = fast.what_if(started, "n03:0-1 n02:0-2")
    failed = started.fail("n04:0 n03")
    grown = failed.repair("n04:6").resize("b", "n04:4-6").move("b", "n02:5-7")
    free = [len(state.free) for state in (started, failed, failed.repair("n04:6"), grown)]
    document = json.loads((site.folder / "s.json").read_text())
    lines: dict[str, dict[str, Any]] = {
        '{"gpus": 3, "id": 7}': {
            "id": 7, "gpus": cluster.written(gpus), "bandwidth": bandwidth / 1e6
        },
        '{"gpus": 3, "deadline": 1e300}': {
            "gpus": cluster.written(gpus), "bandwidth": bandwidth / 1e6
        },
        '{"give": "x", "id": 8, "to": ""}': {"id": 8, "error": "to: does not go with give"},
        '{"give": 1, "id": 8}': {
            "id": 8, "error": f"line {len(BAD) + 4}: give: expected a string or null, got 1"
        },
        '{"state": true}': {"state": document},
        '{"gpus": 400}': {"infeasible": "gpus: requested 400, free 20"},
        '{"gpus": 4, "name": "new"}': {
            "gpus": cluster.written(started.jobs[-1].gpus),
            "bandwidth": fast.choose(first, 4)[1] / 1e6,
        },
        '{"scores": 5, "policy": {"max_per_host": 2, "apart": ["b"]}}': {
            "scores": few.scores(started, 5)
        },
        '{"gpus": 5, "best": 3, "deadline": 5}': {
            "choices": [
                {"gpus": cluster.written(one.gpus), "bandwidth": one.value / 1e6}
                for one in fast.best(started, 5, 3)
            ]
        },
        '{"what_if": "n03:0-1 n02:0-2"}': {
            "gpus": "n02:0-2 n03:0,1", "bandwidth": what.share.value / 1e6,
            "alone": what.share.standalone / 1e6, "best": (what.best or 0) / 1e6,
            "victims": {name: lost / 1e6 for name, lost in what.victims.items()},
            "regret": (what.regret or 0) / 1e6, "fault": "",
        },
        '{"fail": "n04:0 n03"}': {"jobs": ["a"], "free": free[1]},
        '{"repair": "n04:6"}': {"free": free[2]},
        '{"resize": "b", "to": "n04:4-6"}': {"free": free[2] - 1},
        '{"move": "b", "to": "n02:5-7"}': {"free": free[3]},
        '{"give": "new"}': {"free": free[3] + 4},
        json.dumps({"restore": document}): {"free": 20},
    }  # fmt: skip
    asked = [*BAD, *lines]
    answers = stream(site, asked)
    assert answers[len(BAD) :] == [*lines.values()]
    for (line, words), answer in zip(BAD.items(), answers, strict=False):
        assert set(answer) == {"error"} and words in answer["error"], (line, answer)
        assert "`" not in answer["error"] and "$" not in answer["error"]
    assert what.victims and few.scores(started, 5).keys() == {"n01", "n02", "n03"}


def test_bandwidth_commands(site: Cli) -> None:
    """Check says how far measurements are off; plan writes a script; both refuse nonsense."""
    ran = site("gpus", "bandwidth", "check", "--model", "b.json", "--measurements", "m.csv")
    assert ran.code == 0 and "off by 0.00% in the mean" in ran.out
    site("gpus", "bandwidth", "fit", "--cluster", "c.json", "-o", "prior.json")
    ran = site("gpus", "bandwidth", "check", "--model", "prior.json", "--measurements", "m.csv")
    assert ran.code == 0 and "not measured before: 50 patterns" in ran.out
    ran = site(
        "gpus", "bandwidth", "plan", "--model", "prior.json", "--budget", "3", "-o", "plan.sh"
    )
    assert ran.code == 0 and "3 across" in ran.out
    assert Path("plan.sh").read_text().startswith("#!")
    assert "expected one of them" in site.refused("gpus", "bandwidth", "plan", "--budget", "3")


def test_no_output_replaces_what_is_read(site: Cli) -> None:
    """The state, the cluster, the model and measurements are as they were."""
    kept = {path.name: path.read_bytes() for path in Path().iterdir()}
    once = ("gpus", "choose", "--state", "s.json", "--cluster", "c.json", "--model", "b.json")
    fit = ("gpus", "bandwidth", "fit", "--cluster", "c.json", "--measurements", "m.csv")
    for words, name in (
        *(((*once, "--gpus", 4), name) for name in ("s.json", "c.json", "b.json")),
        (fit, "c.json"),
        (fit, "m.csv"),
        (("gpus", "bandwidth", "import", "m.csv"), "m.csv"),
        (("gpus", "bandwidth", "plan", "--model", "b.json"), "b.json"),
    ):
        line = site.refused(*words, "-o", name)
        assert line == f"{name}: is the file that is read; choose another name"
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == kept
