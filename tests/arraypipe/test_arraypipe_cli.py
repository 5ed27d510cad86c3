"""``optsched arraypipe``: what its commands write, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from program import PATIENCE, PROGRAM, Cli

import optsched
from optsched import JobArray
from optsched.arraypipe import random_schedule
from optsched.arraypipe.from_plan import launch
from optsched.model.schedule import Schedule
from optsched.pipelines import gpipe

SCRIPT = Path(__file__).parent / "cli_script.py"
KNOWN = Path(__file__).parents[2] / "instances" / "profiles" / "gpt2_xl-4.profile.json"
RESULTS = ["plan.schedule.json", "summary.json", "summary.txt", "trace.schedule.json"]
RUN = ("arraypipe", "run", "t.py:make_trainer", "x.schedule.json")


@pytest.fixture
def shop(cli: Cli) -> Cli:
    """The program in a folder with trainers and schedules for them."""
    shutil.copy(SCRIPT, "t.py")
    shutil.copy(KNOWN, "in.profile.json")
    random_schedule([1, 1, 1], 2, seed=1).write("x.schedule.json")
    orders = random_schedule([1, 1, 1], 2, seed=3)
    rows = orders.sequences.to_lists()  # type: ignore[union-attr]
    rows[0].reverse()
    cyclic = orders.with_orders(optsched.Csr.of(rows), orders.start)
    cyclic.write("cyclic.schedule.json")
    free = JobArray([[1, 1]], [[2, 2]], micro_batches=[3], microbatch_order="free")
    gpipe(free, reverse=True).write("free.schedule.json")  # would not be training alone
    return cli


WITHOUT_TORCH = """
import shlex, sys
from optsched.cli import main

def called(line):
    sys.argv = ["optsched", *shlex.split(line)]
    try:
        main()
    except SystemExit as end:
        print("code", end.code)

called("arraypipe run --help")
print([m for m in ("torch", "numba", "ortools") if m in sys.modules])
sys.modules["torch"] = None
called("arraypipe plan x.schedule.json")
called("arraypipe problem in.profile.json")
called("arraypipe run t.py:make_trainer x.schedule.json")
called("arraypipe run t.py:make_trainer x.schedule.json --ranks 2")
"""


def test_commands_without_torch(shop: Cli) -> None:
    """Help is quick, plans and problems need no PyTorch; what needs it says what to install."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=PATIENCE
    )
    for part in ("--checkpoint", "\n[]\n", "can be run: 3 jobs in 2 stages on 2 devices",
                 "predicted period", "wrote in.jobarray.json: 4 jobs"):  # fmt: skip
        assert part in done.stdout, part
    assert done.stdout.endswith("code 2\ncode 2\n")
    assert done.stderr.count('pip install ".[torch]"') == done.stderr.count("\n") == 2
    given = ("--memory", "80GB", "--objective", "makespan", "-o", "y.jobarray.json")
    assert shop("arraypipe", "problem", "in.profile.json", *given).code == 0
    array = JobArray.read("y.jobarray.json")
    assert array.objective == "makespan" and 0 < max(array.memory) < 80 * 2**30


REFUSED: list[tuple[str, str]] = [
    ("plan cyclic.schedule.json", "cyclic.schedule.json: sequences: the orders can never be run"),
    ("plan plan.json", "plan.json: "),  # of a job shop
    ("plan graph.json", "no sequences"),
    ("plan free.schedule.json", "must ascend"),
    ("advise x.schedule.json", "optsched.profile/2"),
    ("advise in.profile.json --devices 0", "devices: "),
    ("advise in.profile.json --memory much", "memory: "),
    ("problem in.profile.json --memory 1GB", "memory: device 0 has 1073741824 bytes"),
    ("problem in.profile.json --objective speed", "objective: expected one of"),
    ("problem in.profile.json -o in.profile.json", "is the file that is read"),
    ("problem nowhere.json", "no such file"),
    ("run t.py:make_trainer --array a", "array: expected only with SCHEDULE"),
    ("run t.py:make_trainer --every 2", "every: expected only with --checkpoint"),
    ("report .", "summary.txt: no such file; `optsched arraypipe run -o` writes it"),
]


def test_refusals_without_torch(shop: Cli) -> None:
    """Exit code 2 and one sentence, which names the file or the option; nothing is written."""
    before = sorted(os.listdir())
    for words, sentence in REFUSED:
        assert sentence in shop.refused("arraypipe", *words.split()), words
    assert sorted(os.listdir()) == before


@pytest.mark.torch
def test_from_profile_to_report(shop: Cli) -> None:
    """Profile, advise, run without and with a schedule, resume, report."""
    Path("sub").mkdir()
    shutil.copy(SCRIPT, "sub/t.py")
    done = shop("arraypipe", "profile", "sub/t.py:make_trainer")
    assert done.code == 0 and "wrote sub/t.profile.json" in done.out
    words = ("--devices", 2, "--memory", "40GB", "--json")
    advice = json.loads(shop("arraypipe", "advise", "sub/t.profile.json", *words).out)
    assert (advice["jobs"], advice["devices"], advice["memory"]) == (3, 2, 40 * 2**30)
    assert "job array" in shop("arraypipe", "advise", "sub/t.profile.json").out

    run = ("arraypipe", "run", "t.py:make_trainer")
    done = shop(*run, "--steps", 4, "-o", "a", "--checkpoint", "ck")
    assert done.code == 0, done.err
    assert sorted(os.listdir("a")) == RESULTS and "solving for the order" in done.err
    assert optsched.verify(Schedule.read("a/trace.schedule.json")) == []
    assert "predicted period" in shop("arraypipe", "plan", "a/plan.schedule.json").out
    ran = shop("arraypipe", "plan", "a/plan.schedule.json", "--json")
    assert json.loads(ran.out)["period_ns"] > 0

    again = shop(*run, "a/plan.schedule.json", "--steps", 6, "--checkpoint", "ck", "--resume",
                 "--every", 1, "--quiet", "-o", "b/c")  # fmt: skip
    assert again.code == 0 and again.err == ""
    summary = json.loads(shop("arraypipe", "report", "b/c", "--json").out)
    assert [(job["iterations"], job["status"]) for job in summary["jobs"]] == [(2, "done")] * 3
    assert sorted(os.listdir("ck/job0")) == ["5", "6"]
    shown = shop("arraypipe", "report", "b/c").out
    assert shown in again.out and "a cycle: predicted" in shown


@pytest.mark.torch
def test_demo(shop: Cli) -> None:
    """Report and proof; with a given schedule nothing is measured."""
    random_schedule([1, 1, 1, 2], 4, seed=5).write("demo.schedule.json")
    done = shop("arraypipe", "demo", "--steps", 1, "--schedule", "demo.schedule.json")
    assert done.code == 0, done.err
    assert "every job is bit-identical to training it alone" in done.out
    assert "measuring" not in done.out


@pytest.mark.torch
def test_failed_job_and_names_that_talk_to_the_terminal(shop: Cli) -> None:
    """The other jobs go on, results are written, the exit code is 1; names are made plain."""
    tree = json.loads(Path("x.schedule.json").read_text())
    tree["resources"][0]["name"] = "\x1b[2Jgpu"
    Path("named.schedule.json").write_text(json.dumps(tree))
    done = shop("arraypipe", "run", "t.py:not_finite", "named.schedule.json", "--steps", 6,
                "-o", "o")  # fmt: skip
    assert done.code == 1
    assert done.err.endswith("failed: job job1, stage 1, iteration 3: the loss is nan\n")
    summary = json.loads(shop("arraypipe", "report", "o", "--json").out)
    assert [job["status"] for job in summary["jobs"]] == ["done", "failed", "done"]
    again = shop("arraypipe", "report", "o")
    for ran in (done, again):
        assert "[2Jgpu" in ran.out and "\x1b" not in ran.out + ran.err


SCRIPTS = [
    ("t.py", "script: expected FILE.py:FUNCTION"),
    ("nowhere.py:make_trainer", "nowhere.py: no such file"),
    ("shop.txt:make_trainer", "shop.txt: expected a Python file"),
    ("t.py:make", 't.py: has no function "make"; there are'),
    ("t.py:gives_a_number", "t.py:gives_a_number: expected it to return an ArrayTrainer"),
    ("t.py:bare", "t.py:bare: expected it to return an ArrayTrainer with jobs"),
    ("t.py:raises", "raises KeyError: 'learning rate'"),
    ("t.py:refuses", "jobs: expected at least one"),
    ("t.py:leaves", "ends the program"),
    ("torn.py:make_trainer", "torn.py:2: is not Python"),
    ("needs.py:make_trainer", "needs.py:1: raises ModuleNotFoundError: No module named 'no_such"),
]


@pytest.mark.torch
def test_scripts_refused(shop: Cli) -> None:
    """Whatever is wrong with a script is a sentence with its line, and nothing is written."""
    Path("torn.py").write_text("x = 1\ndef (:\n")
    Path("needs.py").write_text("import no_such_module\n")
    for script, sentence in SCRIPTS:
        assert sentence in shop.refused("arraypipe", "run", script, "x.schedule.json", "-o", "o")
    lines = Path("t.py").read_text().split("\n")
    line = 1 + lines.index('        raise ValueError("no such loss")')
    found = shop.refused("arraypipe", "profile", "t.py:wrong_loss")
    assert found == f"t.py:{line}: raises ValueError: no such loss"


@pytest.mark.torch
def test_orders_refused(shop: Cli) -> None:
    """Wrong options, schedules that do not fit: nothing is trained, no folder is left.

    Without --every that of the script stays.
    """
    Path("file").write_text("")
    often = ("arraypipe", "run", "t.py:often", "x.schedule.json", "--quiet")
    assert shop(*often, "--steps", 2, "--checkpoint", "c").code == 0
    assert sorted(os.listdir("c/job0")) == ["1", "2"]
    before = sorted(os.listdir())
    x, good = "x.schedule.json", "t.py:make_trainer"
    for script, schedule, words, sentence in (
        (good, x, "--steps 0", "steps: "),
        (good, x, "--ranks 7", "ranks: expected "),
        (good, x, "--resume", "checkpoint: expected a folder"),
        (good, x, "-o file/x", "file/x: cannot be made"),
        (good, x, "--checkpoint c -o deep/er", "already has checkpoints"),
        (good, "cyclic.schedule.json", "-o o", "can never be run"),
        ("t.py:strict", "free.schedule.json", "-o o", "must ascend"),
        ("t.py:two_jobs", x, "-o o", "the schedule has 3 jobs, the trainer 2"),
    ):
        found = shop.refused("arraypipe", "run", script, schedule, *words.split())
        assert sentence in found, words
    for words, sentence in (("--sizes 2;4", "sizes: "), ("-o t.py", "is the file that is")):
        assert sentence in shop.refused("arraypipe", "profile", good, *words.split())
    assert sorted(os.listdir()) == before


@pytest.mark.slow
@pytest.mark.torch
def test_ranks(shop: Cli) -> None:
    """`--ranks 2` gives the losses of one process."""
    assert shop(*RUN, "--quiet", "--steps", 6, "-o", "o").code == 0
    done = subprocess.run(
        [*PROGRAM, *RUN, "--quiet", "--ranks", "2", "--steps", "6", "-o", "p"],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir("p")) == RESULTS
    one, two = (json.loads(Path(folder, "summary.json").read_text())["jobs"] for folder in "op")
    assert [job["last_loss"] for job in one] == [job["last_loss"] for job in two]
    for name in ("raises", "raises_on_rank_0"):
        words = [*PROGRAM, *RUN[:2], f"t.py:{name}", "--ranks", "2", "--steps", "6"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 2, done.stderr
        assert {*done.stderr.splitlines()} == {done.stderr.splitlines()[0]}, name
        assert "raises KeyError: 'learning rate'" in done.stderr


@pytest.mark.torch
@pytest.mark.parametrize(
    ("codes", "said", "code"),
    [
        ({0: 2, 1: -15}, [], 2),  # torchrun ends the others when a rank has failed
        ({1: 2, 0: 2}, [], 2),
        ({2: -9, 0: -15, 1: 1}, ["failed: rank 2 ended with code -9"], 1),
        ({1: -15, 0: -15}, ["failed: rank 1 ended with code -15"], 1),  # by somebody else
        ({0: 1, 1: -11}, ["failed: rank 1 ended with code -11"], 1),
    ],
)
def test_ranks_that_have_not_failed(
    codes: dict[int, int], said: list[str], code: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Are not reported; `codes` are in the order in which torchrun saw them."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import errors

    def main(_: object) -> None:
        found = {rank: errors.ProcessFailure(rank, 1, one, "none") for rank, one in codes.items()}
        raise errors.ChildFailedError("optsched", found)

    monkeypatch.setattr(run, "main", main)
    with pytest.raises(SystemExit) as caught:
        launch()
    assert (capsys.readouterr().err.splitlines(), caught.value.code) == (said, code)
