"""`optsched gpus choose` and `bandwidth`, `optsched generate cluster` as users call them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import optsched
from optsched.bandwidth import BottleneckBandwidth, Cluster, ClusterState, Dispatcher
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


def test_one_request(site: Cli) -> None:
    """GPUs on one line; JSON, explanation, hostfile; a schedule that verifies."""
    given = ("gpus", "choose", "--model", "b.json", "--state", "s.json", "--gpus", "6")
    plain = site(*given, "-o", "x.schedule.json")
    assert plain.code == 0
    cluster = Cluster.read("c.json")
    state = ClusterState.read("s.json", cluster)
    chosen, wrote = plain.out.splitlines()
    assert wrote == "wrote x.schedule.json"
    gpus = cluster.parse(chosen)
    expected, bandwidth = Dispatcher(cluster, BottleneckBandwidth.read("b.json")).choose(state, 6)
    assert gpus == expected
    answer = json.loads(site(*given, "--json").out)
    assert answer["format"] == "optsched.dispatch/1" and answer["status"] == "optimal"
    assert round(answer["bandwidth"] * 1e6) == bandwidth and answer["gpus"] == chosen
    assert answer["upper_bound"] == answer["bandwidth"] and len(answer["ranks"]) == 6
    text = site(*given, "--explain").out
    assert "limited by" in text and "one GPU more" in text
    hosts = site(*given, "--hostfile", "-o", "y.schedule.json").out.splitlines()
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
        "bench", "p.subset.json", "--solvers", "counts,random_subset", "--time", "20", "-o",
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
        (("--gpus", "4", "--policy", "balance=odd"), "balance: expected one of free, even, exact"),
        (("--gpus", "4", "-o", "no/where.json"), "no/where.json: cannot be written"),
    ],
)
def test_refused(site: Cli, words: tuple[str, ...], said: str) -> None:
    """One sentence with the field; exit code 2; no file."""
    assert said in site.refused(
        "gpus", "choose", "--cluster", "c.json", "--state", "s.json", *words
    )


def test_bandwidth_commands(site: Cli) -> None:
    """Check says how far measurements are off; plan writes a script; both refuse nonsense."""
    words = ("gpus", "topology", "show", "c.json", "--state", "s.json", "--json")
    shown = site(*words)
    assert site(*words, "-o", "map.svg").out == shown.out and Path("map.svg").stat().st_size
    cluster, state = Cluster.read("c.json"), ClusterState.read("s.json", Cluster.read("c.json"))
    found = json.loads(shown.out)
    assert (found["hosts"], found["gpus"]) == (cluster.n_hosts, cluster.n_gpus)
    assert found["state"] == {"free": len(state.free), "jobs": len(state.jobs), "down": 0}
    words = ("gpus", "bandwidth", "check", "--model", "b.json", "--measurements", "m.csv")
    assert json.loads(site(*words, "--json").out)["deviations"][0].startswith("all: ")
    ran = site(*words)
    assert ran.code == 0 and "off by 0.00% in the mean" in ran.out
    words = ("gpus", "bandwidth", "fit", "--cluster", "c.json", "--mixed", "-o", "prior.json")
    assert site.refused(*words) == "mixed: expected only with --measurements"
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
