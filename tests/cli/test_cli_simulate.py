"""`optsched cluster simulate` as users call it."""

from __future__ import annotations

import json
import re
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import optsched
from optsched.cluster import policies
from optsched.cluster.simulate import simulate
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.workload.synthetic import synthetic
from optsched.cluster.workload.trace import read_trace, write_trace
from optsched.errors import InputError

if TYPE_CHECKING:
    from program import Cli


@pytest.fixture
def site(cli: Cli) -> Cli:
    """A folder with a small trace."""
    write_trace(synthetic(60, 1.2, 1, gpus=16), "t.csv")
    return cli


def test_every_named_policy(site: Cli) -> None:
    """Each runs by its name."""
    every = policies.names()
    ran = site(
        "cluster", "simulate", "t.csv", "--policy", ",".join(every), "--nodes", "2x8", "--json"
    )
    assert ran.code == 0, ran.err
    assert set(json.loads(ran.out)["runs"]) == set(every)


def test_several_policies_and_all_files(site: Cli) -> None:
    """One row each; histories that verify, metrics that read back, a page."""
    ran = site(
        "cluster", "simulate", "t.csv", "--policy", "fifo,sjf", "--policy", "srtf",
        "--nodes", "8,8,4", "--restart", "40", "--estimate-error", "0.5", "--seed", "3",
        "-o", "h.schedule.json", "--metrics", "m.json", "--plot", "p.html",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    for name in ("fifo", "sjf", "srtf"):
        history = optsched.Schedule.read(f"h.{name}.schedule.json")
        assert optsched.verify(history) == [] and history.n_resources == 20
        assert site("verify", f"h.{name}.schedule.json").code == 0
        assert f"wrote h.{name}.schedule.json" in ran.out
    document = json.loads(Path("m.json").read_bytes())
    assert list(document["runs"]) == ["fifo", "sjf", "srtf"] and document["nodes"] == [8, 8, 4]
    jobs = read_trace("t.csv").with_estimate_error(0.5, 3)
    run = simulate(jobs, "srtf", Nodes.of([8, 8, 4]), restart_cost=40, seed=3)
    assert document["runs"]["srtf"]["metrics"]["jct_mean"] == run.metrics.jct_mean
    assert document["runs"]["srtf"]["settings"]["restart_cost"] == 40
    assert document["version"] == optsched.__version__
    assert document["inputs"] == {"trace": "t.csv", "estimate_error": 0.5, "packing": None}
    page = Path("p.html").read_text()
    assert (
        page.count("<td>") == 3 * 14 and "<svg" in page and "http://" not in page.split("<svg")[0]
    )


def test_policy_of_another_package(site: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point's policy is used by name; one that cannot be loaded is named."""
    mine = EntryPoint("mine", "toy_policies:Greedy", policies.GROUP)
    broken = EntryPoint("broken", "no_such_module:Policy", policies.GROUP)
    shadow = EntryPoint("fifo", "toy_policies:Greedy", policies.GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [mine, broken, shadow])
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "cluster")
    ran = site("cluster", "simulate", "t.csv", "--policy", "mine,fifo", "--nodes", "2x8")
    assert ran.code == 0, ran.err
    jobs, nodes = read_trace("t.csv"), Nodes(2, gpus=8)
    run = simulate(jobs, "mine", nodes)
    assert run.policy == "greedy" and (run.log.finished >= 0).all()
    assert "mine" in policies.names() and len(policies.names()) == len(set(policies.names()))
    assert simulate(jobs, "fifo", nodes).policy == "fifo"
    with pytest.raises(InputError, match="'broken' of the entry points"):
        policies.get("broken")
    with pytest.raises(InputError, match="no option 'gang'"):
        policies.get("mine", gang=2)


def test_variants_of_one_policy(site: Cli) -> None:
    """Options in the name tell them apart everywhere; they go before `--option`."""
    names = ["las:thresholds=[5,60],round=0", "las", "fifo"]
    words = ("cluster", "simulate", "t.csv", "--policy", ",".join(names), "--nodes", "2x8")
    words = (*words, "-o", "h.json")
    ran = site(*words, "--option", "las.round=7", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)["runs"]
    assert list(found) == [run["policy"] for run in found.values()] == names
    assert found[names[0]]["options"] == {"gang": None, "round": 0, "thresholds": [5, 60]}
    assert Path("h.las-thresholds=-5-60--round=0.json").exists()
    for wrong, message in [
        ("las:rounds=0", r"no option 'rounds'; it has: gang, round, thresholds"),
        ("las:round=0,round=1", "each key once"), (":a=1", "expected NAME:KEY"),
    ]:  # fmt: skip
        ran = site("cluster", "simulate", "t.csv", "--policy", wrong, "--nodes", "2x8")
        assert ran.code == 2 and message in ran.err, ran.err


@pytest.mark.parametrize(
    "words",
    [
        ("synthetic:30:1.5", "--nodes", "1x8"),
        ("entropy:12:0.9", "--nodes", "1x4"),
        ("t.csv", "--nodes", "2x8", "--change", "100:drain:0", "--change", "9000:add:0"),
    ],
)
def test_workloads_and_settings(site: Cli, words: tuple[str, ...]) -> None:
    """Every kind of input runs, all jobs end, and the history verifies."""
    name = "fifo" if "entropy" not in words[0] else "elastic"
    ran = site(
        "cluster", "simulate", *words, "--policy", name, "-o", "h.json", "--metrics", "m.json"
    )
    assert ran.code == 0, ran.err
    (run,) = json.loads(Path("m.json").read_bytes())["runs"].values()
    assert run["metrics"]["unfinished"] == 0
    if "--change" in words:
        assert run["settings"]["changes"] == [
            {"time": 100, "node": 0, "kind": "drain"},
            {"time": 9000, "node": 0, "kind": "add"},
        ]
    assert optsched.verify(optsched.Schedule.read("h.json")) == []


def test_packing(site: Cli) -> None:
    """Pairs that share GPUs: two resources each."""
    jobs = synthetic(60, 3.0, 1, gpus=8)
    write_trace(jobs.changed(source=["a", "b"] * 30), "p.csv")
    Path("pairs.csv").write_text("type_a,type_b,speed_a,speed_b\na,a,.9,.8\na,b,.9,.9\nb,b,.8,.8\n")
    Path("types.csv").write_text("type,memory,share_score\na,1,.5\nb,2,.5\n")
    words = ("--policy", "lucid", "--nodes", "1x8", "--packing", "pairs.csv,types.csv")
    ran = site("cluster", "simulate", "p.csv", *words, "-o", "h.json")
    assert ran.code == 0, ran.err
    history = optsched.Schedule.read("h.json")
    assert history.n_resources == 16 and optsched.verify(history) == []
    assert (np.diff(history.op_resources.indptr) % 2).any(), "nobody has an odd half"
    assert site("cluster", "simulate", "p.csv", *words, "--metrics", "m.json").code == 0
    document = json.loads(Path("m.json").read_bytes())
    assert document["inputs"]["packing"] == ["pairs.csv", "types.csv"]
    assert "not named" in site.refused(
        "cluster", "simulate", "p.csv", "--policy", "fifo", *words[2:]
    )
    assert "two files" in site.refused("cluster", "simulate", "p.csv", *words[:-1], "pairs.csv")


BASE = ("t.csv", "--policy", "fifo", "--nodes", "2x8")


BAD_INPUT: list[tuple[tuple[Any, ...], str]] = [
    (("none.csv", *BASE[1:]), "none.csv: no such file"),
    (("t.csv", "--policy", "fivo", "--nodes", "2x8"), "did you mean fifo"),
    (("t.csv", "--policy", "fifo", "--nodes", "9999999999x8"), "1048576, got 9999999999"),
    (("synthetic:10:1e-300", *BASE[1:]), "load: so low that"),
    (("synthetic:-3", *BASE[1:]), "trace: expected synthetic:JOBS"),
    (("t.csv", "--policy", "fifo", "--nodes", "1x1"), "but the cluster has 1"),
    ((*BASE, "--option", "colour=1"), "no option 'colour'"),
    ((*BASE, "--option", "sjf.backfill=none"), "none of the policies"),
    ((*BASE, "--change", "5:explode:0"), "TIME:KIND:NODE"),
    ((*BASE, "--plot", "x.gif"), "x.gif: expected a file ending in"),
    ((*BASE, "-o", "t.csv"), "is the file that is read"),
    ((*BASE, "--spread", "1"), "spread: expected only with --expected"),
]


def test_bad_input(site: Cli) -> None:
    """Exit code 2, one sentence, no file."""
    for words, message in BAD_INPUT:
        assert message in site.refused("cluster", "simulate", *words)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("job_id,submit_time_s,num_gpus,duration_s\na,0,1,-5\n", "bad.csv:2 .*duration_s"),
        ("job_id,submit_time_s,num_gpus,duration_s,x\na,3,1,5,1\n", "optsched cluster workload"),
    ],
)
def test_bad_traces(site: Cli, body: str, message: str) -> None:
    """Exit code 2 with row and field; the command that is named helps."""
    Path("bad.csv").write_text(body)
    assert re.search(message, site.refused("cluster", "simulate", "bad.csv", *BASE[1:]))
    if message.startswith("optsched"):
        assert site("cluster", "workload", "bad.csv", "-o", "good.csv").code == 0
        assert site("cluster", "simulate", "good.csv", *BASE[1:]).code == 0


class Slow:
    """First come, first served, with a pause at every decision."""

    name = "slow"
    clairvoyant = False
    options = ()

    def decide(self, view: Any) -> Any:
        """As fifo, but it takes its time, and interrupts after a while."""
        from optsched.cluster.policies import get

        if view.time > 0 and (view.running.sum() > 2 or view.time > 50_000):
            raise KeyboardInterrupt
        return get("fifo").decide(view)


@pytest.fixture
def interrupted(site: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The policy las is interrupted in the middle."""
    from optsched.cli import progress
    from optsched.cluster import policies

    real = policies.get
    monkeypatch.setattr(progress, "FIRST_AFTER", 0.0)
    monkeypatch.setattr(
        policies, "get", lambda name, **rest: Slow() if name == "las" else real(name, **rest)
    )
    return site


def test_ctrl_c_keeps_what_is_there(interrupted: Cli) -> None:
    """Exit code 130; the policies that are done, and the part of the open one, are written."""
    ran = interrupted(
        "cluster", "simulate", "t.csv", "--policy", "fifo,las,sjf", "--nodes", "2x8",
        "--metrics", "m.json", "-o", "h.json", "--plot", "p.png",
    )  # fmt: skip
    assert ran.code == 130 and "interrupted" in ran.err
    found = json.loads(Path("m.json").read_bytes())
    assert list(found["runs"]) == ["fifo", "las"]
    left = found["runs"]["las"]["metrics"]["unfinished"]
    assert left is not None and 0 < left <= 60 and "of 60 ended" in ran.out
    assert found["runs"]["fifo"]["metrics"]["unfinished"] == 0
    assert "fifo: 60 jobs in" in ran.err and "las: 60 jobs" not in ran.err
    assert f"las: {60 - int(left)} of 60 jobs in" in ran.err
    for path in Path().glob("h.*.json"):
        assert optsched.verify(optsched.Schedule.read(path)) == []
    assert Path("p.png").stat().st_size > 1000
    words = ("cluster", "simulate", "t.csv", "--nodes", "2x8", "--quiet", "--policy")
    ran = interrupted(*words, "las")
    assert ran.code == 130 and re.fullmatch(r"interrupted: \d+ of 60 jobs ended in las\n", ran.err)

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    interrupted.patch.setattr("optsched.cli.simulate.fan_out", press)
    ran = interrupted(*words, "fifo")
    assert (ran.code, ran.err) == (130, "interrupted: 0 of 1 simulations are done\n")


def test_from_now(cli: Cli) -> None:
    """A running cluster goes on; waiting jobs get reasons and intervals of their starts."""
    Path("q.csv").write_text(
        "job_id,submit_time_s,num_gpus,duration_s\na,0,8,4000\nb,100,4,9000\nc,200,8,1000\n"
    )
    Path("r.csv").write_text("job_id,start_s,nodes\na,0,n0:8\nb,150,n1:4\n")
    base = ("cluster", "simulate", "q.csv", "--policy", "fifo", "--nodes", "2x8")
    now = (*base, "--running", "r.csv", "--now", "1000")
    ran = cli(*now, "--metrics", "m.json", "--plot", "r.html")
    assert ran.code == 0, ran.err
    found = json.loads(Path("m.json").read_text())["runs"]["fifo"]
    assert found["jobs"]["jct"] == [4000, 9050, 4800]
    assert "<td>fifo</td><td>c</td><td>needs 8 GPUs, 4 are free</td>" in Path("r.html").read_text()
    assert found["waiting"] == {"c": {"why": "room", "text": "needs 8 GPUs, 4 are free"}}
    ran = cli(*now, "--policy", "sjf", "--expected", "9", "--spread", "0", "--json")
    found = json.loads(ran.out)["expected"]
    assert [(name, one["c"]["times"]) for name, one in found.items()] == [
        ("fifo", [4000] * 3), ("sjf", [4000] * 3),
    ]  # fmt: skip
    table = cli(*now, "--expected", "9", "--spread", "0").out.split()
    assert table[table.index("c") :][:2] == ["c", "4,000"]
    for given, message in (
        (("--now", "5"), "only with --running"), (("--expected", "5"), "give --running and --now"),
        (("--running", "r.csv"), "give --now too"),
        ((*now[len(base) :], "--expected", "5", "--metrics", "n.json"), "prints starts only"),
        ((*now[len(base) :], "--metrics", "r.csv"), "r.csv: is the file that is read"),
    ):  # fmt: skip
        ran = cli(*base, *given)
        assert ran.code != 0 and message in ran.err


def test_clock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Work without reports shows its seconds, on one line, which is erased at its end."""
    from optsched.cli import progress

    monkeypatch.setattr(progress, "FIRST_AFTER", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.Bar().clock("planning") as bar:
        time.sleep(1.2)
    assert not bar._ticker.is_alive()
    shown = capsys.readouterr().err
    assert "planning, 1 s" in shown and shown.endswith("\r\x1b[2K") and "\n" not in shown
