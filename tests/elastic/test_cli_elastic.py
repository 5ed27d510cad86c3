"""`optsched cluster elastic` as users call it."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from program import PATIENCE, start

import optsched
from optsched.elastic import read_jobs

if TYPE_CHECKING:
    from program import Cli

pytest.importorskip("torch")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]
GOOD = {"name": '"a"', "model": '"logistic"', "data": '"digits"', "optimizer": '"sgd"'}


def table(**fields: str | None) -> str:
    """A job as TOML; None leaves a field out."""
    given = {key: value for key, value in (GOOD | fields).items() if value is not None}
    return "[[jobs]]\n" + "".join(f"{key} = {value}\n" for key, value in given.items())


LINEAR = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

def broken():
    raise ValueError("no such thing\\nas this")
"""
THREE = (
    table(name='"one"', passes="2", sizes="[1, 2]", micro="{}")
    + table(name='"bad"', model='"own.py:broken"')
    + table(name='"own"', model='"own.py:model"', passes="9", target="0.5", submit="0.1")
)


def test_all_outputs(cli: Cli) -> None:
    """A job that fails: a sentence, exit code 1, and the results of the others."""
    Path("own.py").write_text(LINEAR)
    Path("jobs.toml").write_text(THREE)
    ran = cli(
        "cluster", "elastic", "jobs.toml", "--slots", "2", "--policy", "elastic",
        "-o", "h.schedule.json", "--metrics", "m.json", "--plot", "p.html", "--folder", "kept",
        "--devices", "cpu,cpu",
    )  # fmt: skip
    assert ran.code == 1
    assert ran.err == "failed: job 'bad': ValueError: no such thing as this\n"
    assert "2 of 3 jobs ended" in ran.out and "elastic, 2 workers, 3 jobs" in ran.out
    rows = {line.split()[0]: line for line in ran.out.splitlines() if re.match(" *\\w+ .*/", line)}
    assert "2/2" in rows["one"] and "failed" in rows["bad"] and "of 0.5" in rows["own"]
    assert "makespan" in ran.out
    for name in ("h.schedule.json", "m.json", "p.html"):
        assert f"wrote {name}" in ran.out
    history = optsched.Schedule.read("h.schedule.json")
    assert optsched.verify(history) == [] and history.n_resources == 2
    assert set(history.provenance["jobs"]) == {"one", "bad", "own"}
    document = json.loads(Path("m.json").read_bytes())
    assert document["inputs"] == {"jobs": "jobs.toml"}
    assert document["runs"]["elastic"]["metrics"]["unfinished"] == 1
    page = Path("p.html").read_text()
    assert "<svg" in page and "elastic training" in page and "http:" not in page.split("<svg")[0]
    assert Path("kept/one/checkpoint.pt").exists()
    error = cli.refused("cluster", "elastic", "jobs.toml", "--slots", "2", "--folder", "kept")
    assert "has a run in it" in error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (table(batchsize="3"), 'jobs[0]: there is no field "batchsize" (did you mean batch_size?)'),
        (table(model='"no_module:f"'), 'there is no module "no_module"'),
        (table(model='"__main__:f"'), 'there is no module "__main__"'),
        (table(seed="1" * 5000), "jobs.toml: no TOML ("),
        (table(micro="[" * 5000 + "]" * 5000), "jobs.toml: no TOML ("),
        (table(micro="{step = 1}"), 'micro: no "step"; it has alpha'),
        (table(micro="{alpha = 2}"), "micro: alpha"),
        (table() + table(), 'jobs[1].name: "a" is there twice'),
    ],
)
def test_bad_jobs(cli: Cli, monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    """One sentence, exit code 2, nothing started."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as of a script
    Path("jobs.toml").write_text(text)
    assert says in cli.refused("cluster", "elastic", "jobs.toml", "--slots", "2", "-o", "h.json")


BAD_OPTIONS: list[tuple[tuple[Any, ...], str]] = [
    ((), "jobs: name a file JOBS.toml, or give --demo"),
    (("jobs.toml",), "slots: missing"),
    (
        ("jobs.toml", "--devices", "cpu,cpu", "--listen", "127.0.0.1:9", "--quiet"),
        "remote: name a folder",
    ),
    (("jobs.toml", "--devices", "tpu"), 'devices: expected cpu, got "tpu"'),
    (("jobs.toml", "--slots", 2, "--policy", "fifo,las"), "policy: expected one"),
    (("jobs.toml", "--slots", 2, "--resume"), "resume: name the folder"),
    (("jobs.toml", "--slots", 2, "-o", "jobs.toml"), "is the file that is read"),
    *(
        (("--join", "10.0.0.1:29400", *words), f"leave out {words[0]}")
        for words in (
            ("--policy", "fifo"),
            ("--option", "a=1"),
            ("--preempt", "anytime"),
            ("--resume",),
        )
    ),
]


def test_bad_options(cli: Cli) -> None:
    """Before any worker is started."""
    for words, says in BAD_OPTIONS:
        Path("jobs.toml").write_text(table())
        assert says in cli.refused("cluster", "elastic", *words).replace("cpu or cuda:0", "cpu")


def test_interrupted(cli: Cli) -> None:
    """Ctrl-C: code 130, the results so far are written, and ``--resume`` continues."""
    Path("jobs.toml").write_text(table(passes="100000", data='{call = "digits", repeat = 3}'))
    words = ("cluster", "elastic", "jobs.toml", "--slots", "1", "--folder", "kept")
    process = start(*words, "-o", "h.schedule.json", "--metrics", "m.json", "--plot", "p.html")
    assert process.stdout is not None
    next(line for line in process.stdout if re.search(r"pass [1-9]", line))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err == "interrupted: continue with --folder kept --resume\n"
    assert "0 of 1 job ended" in out and "p.html is not written" in out
    assert optsched.verify(optsched.Schedule.read("h.schedule.json")) == []
    document = json.loads(Path("m.json").read_bytes())
    assert document["runs"]["time_to_target"]["metrics"]["unfinished"] == 1
    assert not Path("p.html").exists()
    done = json.loads(Path("kept/run.json").read_text())
    assert [job[1] for job in done["jobs"].values()] == [-1] and done["stays"][0][5] >= 1
    Path("jobs.toml").write_text(table(passes="1", data='{call = "digits", repeat = 3}'))
    ran = cli(*words, "--resume", "--plot", "p.svg", "--quiet")  # it is done
    assert (ran.code, ran.out) == (0, "") and Path("p.svg").exists()


def test_the_demo_is_that_of_the_page() -> None:
    """docs/clusters/elastic-pool.md shows the jobs of ``--demo``."""
    text = (ROOT / "optsched/elastic/demo.toml").read_text()
    assert f"```toml\n{text}```" in (ROOT / "docs/clusters/elastic-pool.md").read_text()
    jobs = read_jobs(ROOT / "optsched/elastic/demo.toml")
    assert 4 <= len(jobs) <= 6 and any(job.micro == {} for job in jobs)
    assert {re.sub(r".*:", "", job.model.place) for job in jobs} == {"logistic", "mlp", "cnn"}  # type: ignore[attr-defined]
