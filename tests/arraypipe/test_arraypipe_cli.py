"""``optsched arraypipe``: what its commands write, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from program import PATIENCE, PROGRAM, Cli, start

import optsched
from optsched import JobArray
from optsched.arraypipe import random_schedule
from optsched.model.schedule import Schedule
from optsched.pipelines import gpipe

SCRIPT = Path(__file__).parent / "cli_script.py"
ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from optsched.cli import main; main()"
RESULTS = ["plan.schedule.json", "summary.json", "trace.schedule.json"]


@pytest.fixture
def shop(cli: Cli) -> Cli:
    """The program in a folder with trainers and schedules for them."""
    shutil.copy(SCRIPT, "t.py")
    random_schedule([1, 1, 1], 2, seed=1).write("x.schedule.json")
    orders = random_schedule([1, 1, 1], 2, seed=3)
    rows = orders.sequences.to_lists()  # type: ignore[union-attr]
    rows[0].reverse()
    cyclic = orders.with_orders(optsched.Rows.of(rows), orders.start)
    cyclic.write("cyclic.schedule.json")
    free = JobArray([[1, 1]], [[2, 2]], micro_batches=[3], microbatch_order="free")
    gpipe(free, reverse=True).write("free.schedule.json")  # would not be training alone
    return cli


@pytest.fixture
def quick_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that scatter are not repeated: the machine may be busy, and times do not matter."""
    monkeypatch.setattr("optsched.arraypipe.profile.measure.SHORT_NS", 0)


# commands that need no PyTorch


def without_torch(*words: object) -> subprocess.CompletedProcess[str]:
    """A command in a process where PyTorch cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, words)], capture_output=True, text=True
    )


def test_plan_explains(shop: Cli) -> None:
    """One line; on demand period, bound, device lists and channels."""
    ran = shop("arraypipe", "plan", "x.schedule.json")
    assert ran.code == 0 and ran.out.count("\n") == 1
    assert "can be run: 3 jobs in 2 stages on 2 devices" in ran.out
    text = shop("arraypipe", "plan", "x.schedule.json", "--explain").out
    for part in ("longest chain", "device0: stage 0, 6 blocks"):
        assert part in text, part


KNOWN = ROOT / "instances" / "profiles" / "gpt2_xl-4.profile.json"
REFUSED: list[tuple[str, str]] = [
    ("plan cyclic.schedule.json --explain", "cyclic.schedule.json: sequences: the orders can"),
    ("plan plan.json", "plan.json: "),  # of a job shop
    ("plan graph.json", "no sequences"),
    ("plan nowhere.json", "no such file"),
    ("plan free.schedule.json", "must ascend"),
    ("advise x.schedule.json", "optsched.profile/2"),
    ("advise in.json --devices 0", "devices: "),
    *((f"advise in.json --memory {m}", "memory: ") for m in ("much", "-5", "0", "9" * 5000)),
    ("problem in.json --memory 1GB", "memory: device 0 has 1073741824 bytes"),
    ("problem in.json --memory much", "memory: expected bytes or a size"),
    ("problem in.json --objective speed", "objective: expected one of"),
    ("problem in.json -o no/z.json", "there is no folder no"),
    ("problem in.json -o in.json", "is the file that is read"),
    ("problem nowhere.json", "no such file"),
    ("problem x.schedule.json", "optsched.profile/2"),
    ("report .", "summary.json: no such file; `optsched arraypipe run --out` writes it"),
    *((f"report s{k}.json", f"s{k}.json:") for k in range(4)),
]


def test_refusals_without_torch(shop: Cli) -> None:
    """Exit code 2 and one sentence, which names the file or the option; nothing is written."""
    shutil.copy(KNOWN, "in.json")
    formats = (f'{{"format": "optsched.run/{k}"}}' for k in (1, 2))
    for k, text in enumerate(("", "{}", *formats)):
        Path(f"s{k}.json").write_text(text)
    before = sorted(os.listdir())
    for words, sentence in REFUSED:
        assert sentence in shop.refused("arraypipe", *words.split()), words
    assert sorted(os.listdir()) == before
    cycle = shop.refused("arraypipe", "plan", "cyclic.schedule.json")
    assert "can never be run" in cycle and "of job 1" in cycle


def test_commands_without_torch(shop: Cli) -> None:
    """Plans are explained without it; what needs it says what to install."""
    done = without_torch("arraypipe", "plan", "x.schedule.json", "--explain")
    assert done.returncode == 0 and "predicted period" in done.stdout, done.stderr
    done = without_torch("arraypipe", "run", "t.py:make_trainer", "x.schedule.json")
    assert done.returncode == 2
    assert 'pip install ".[torch]"' in done.stderr and done.stderr.count("\n") == 1


def test_help_is_quick() -> None:
    """Help for any command imports neither PyTorch nor solvers."""
    code = (
        "import sys\nfrom optsched.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'numba', 'ortools') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "arraypipe", "run", "--help"], capture_output=True, text=True
    )
    assert "--checkpoint" in done.stdout and done.stdout.endswith("[]\n"), done.stdout


# the whole way


@pytest.mark.torch
@pytest.mark.usefixtures("quick_profiles")
def test_from_profile_to_report(shop: Cli) -> None:
    """Profile, advise, run without and with a schedule, resume, report."""
    done = shop("arraypipe", "profile", "t.py:make_trainer", "--out", "x.profile.json")
    assert done.code == 0 and "wrote x.profile.json" in done.out
    words = ("--devices", 2, "--memory", "40GB", "--json")
    advice = json.loads(shop("arraypipe", "advise", "x.profile.json", *words).out)
    assert (advice["jobs"], advice["devices"], advice["memory"]) == (3, 2, 40 * 2**30)
    assert "job array" in shop("arraypipe", "advise", "x.profile.json").out

    run = ("arraypipe", "run", "t.py:make_trainer")
    done = shop(*run, "--steps", 4, "--out", "a", "--checkpoint", "ck")
    assert done.code == 0, done.err
    assert sorted(os.listdir("a")) == RESULTS and "solving for the order" in done.err
    assert optsched.verify(Schedule.read("a/trace.schedule.json")) == []
    known = shop("arraypipe", "plan", "a/plan.schedule.json", "--explain").out
    assert "predicted period" in known and "of activations" in known

    again = shop(*run, "a/plan.schedule.json", "--steps", 6, "--checkpoint", "ck", "--resume",
                 "--every", 1, "--quiet", "--out", "b/c")  # fmt: skip
    assert again.code == 0 and again.err == ""
    summary = json.loads(shop("arraypipe", "report", "b/c", "--json").out)
    assert [job["iterations"] for job in summary["jobs"]] == [2, 2, 2]
    assert [job["status"] for job in summary["jobs"]] == ["done"] * 3
    assert sorted(os.listdir("ck/job0")) == ["5", "6"]
    shown = shop("arraypipe", "report", "b/c/summary.json").out
    assert shown in again.out and "a cycle: predicted" in shown


@pytest.mark.torch
def test_demo(shop: Cli) -> None:
    """Report and proof; with a given schedule nothing is measured."""
    random_schedule([1, 1, 1, 2], 4, seed=5).write("demo.schedule.json")
    done = shop("arraypipe", "demo", "--steps", 2, "--schedule", "demo.schedule.json")
    assert done.code == 0, done.err
    assert "every job is bit-identical to training it alone" in done.out
    assert "measuring" not in done.out


@pytest.mark.torch
def test_failed_job(shop: Cli) -> None:
    """The others go on, results are written, the exit code is 1 and says who."""
    done = shop("arraypipe", "run", "t.py:not_finite", "x.schedule.json", "--steps", 6,
                "--out", "out")  # fmt: skip
    assert done.code == 1
    assert done.err.endswith("failed: job job1, stage 1, iteration 3: the loss is nan\n")
    summary = json.loads(shop("arraypipe", "report", "out", "--json").out)
    assert [job["status"] for job in summary["jobs"]] == ["done", "failed", "done"]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("t.py", "script: expected FILE.py:FUNCTION"),
        ("t.py:", "script: expected FILE.py:FUNCTION"),
        (":make_trainer", "script: expected FILE.py:FUNCTION"),
        ("nowhere.py:make_trainer", "nowhere.py: no such file"),
        (".:make_trainer", ".: is a directory"),
        ("shop.txt:make_trainer", "shop.txt: expected a Python file"),
        ("t.py:make", 't.py: has no function "make"; there are build_model'),
        ("t.py:number", "t.py:number: expected a function, got 5"),
        ("t.py:gives_a_number", "t.py:gives_a_number: expected it to return an ArrayTrainer"),
        ("t.py:raises", "raises KeyError: 'learning rate'"),
        ("t.py:refuses", "jobs: expected at least one"),
        ("t.py:bare", "t.py:bare: expected a trainer with jobs"),
        ("t.py:leaves", "ends the program"),
        ("torn.py:make_trainer", "torn.py:2: is not Python"),
        ("needs.py:make_trainer", "needs.py:1: No module named 'no_such_module'"),
    ],
)
def test_scripts_refused(shop: Cli, script: str, sentence: str) -> None:
    """Whatever is wrong with a script is a sentence, and nothing is written."""
    Path("torn.py").write_text("x = 1\ndef (:\n")
    Path("needs.py").write_text("import no_such_module\n")
    assert sentence in shop.refused("arraypipe", "run", script, "x.schedule.json", "--out", "o")
    if script != "t.py:bare":
        assert sentence in shop.refused("arraypipe", "profile", script)


@pytest.mark.torch
def test_scripts_that_cannot_be_measured(shop: Cli) -> None:
    """What the script's functions raise then is a sentence with their line, and no file."""
    line = 1 + Path("t.py").read_text().split("\n").index(
        '        raise ValueError("no such loss")'
    )
    for words in (["profile"], ["run", "--quiet", "--out", "o"]):
        told = shop.refused("arraypipe", words[0], "t.py:wrong_loss", *words[1:])
        assert told == f"t.py:{line}: raises ValueError: no such loss"


@pytest.mark.torch
def test_orders_refused(shop: Cli) -> None:
    """Options that are wrong or mean nothing, schedules that do not fit: nothing is trained."""
    x, good = "x.schedule.json", "t.py:make_trainer"
    for script, schedule, words, sentence in (
        (good, x, "--steps 0", "steps: "),
        (good, x, "--every 0 --checkpoint c", "every: "),
        (good, x, "--resume", "checkpoint: expected a folder"),
        (good, x, "--out shop.txt", "shop.txt: cannot be made"),
        (good, x, "--out shop.txt/x", "shop.txt/x: cannot be made"),
        (good, "cyclic.schedule.json", "--out o", "can never be run"),
        (good, "nowhere.json", "--out o", "no such file"),
        ("t.py:strict", "free.schedule.json", "--out o", "must ascend"),
        ("t.py:two_jobs", x, "--out o", "the schedule has 3 jobs, the trainer 2"),
    ):
        said = shop.refused("arraypipe", "run", script, schedule, *words.split())
        assert sentence in said, words
    for words, sentence in (
        ("--sizes 2;4", "sizes: "), ("--repeats 2", "repeats: "),
        ("--out t.py", "is the file that is read"),
    ):  # fmt: skip
        assert sentence in shop.refused("arraypipe", "profile", good, *words.split())


@pytest.mark.torch
def test_refused_run_leaves_no_folder(shop: Cli) -> None:
    """What only the run itself refuses leaves no empty folders for its results behind."""
    Path("file").write_text("")
    os.mkdir("there")
    run = ("arraypipe", "run", "t.py:make_trainer", "x.schedule.json", "--steps", "1")
    assert shop(*run, "--checkpoint", "c", "--quiet").code == 0
    for checkpoint, sentence in (("file", "file"), ("c", "already has checkpoints")):
        for out in ("new", "deep/er", "there", "there/o"):
            assert sentence in shop.refused(*run, "--checkpoint", checkpoint, "--out", out)
    demo = ("arraypipe", "demo", "--schedule", "x.schedule.json", "--out", "there/d")
    assert "the schedule has 2 stages, the model 4" in shop.refused(*demo)
    assert os.listdir("there") == [] and not Path("new").exists() and not Path("deep").exists()


@pytest.mark.torch
def test_names_in_reports_cannot_talk_to_the_terminal(shop: Cli) -> None:
    """Nor those of a summary that somebody has changed."""
    tree = json.loads(Path("x.schedule.json").read_text())
    tree["resources"][0]["name"] = "\x1b[2Jgpu"
    Path("named.schedule.json").write_text(json.dumps(tree))
    ran = shop("arraypipe", "run", "t.py:make_trainer", "named.schedule.json", "--steps", 2,
               "--out", "o")  # fmt: skip
    assert ran.code == 0 and "[2Jgpu" in ran.out and "\x1b" not in ran.out + ran.err
    place = Path("o/summary.json")
    tree = json.loads(place.read_text())
    tree["report"]["devices"][0]["name"] = "\x1b[2Jblock"
    place.write_text(json.dumps(tree))
    ran = shop("arraypipe", "report", "o")
    assert ran.code == 0 and "[2Jblock" in ran.out
    assert "\x1b" not in ran.out


def test_problem_of_a_profile(shop: Cli) -> None:
    """Beside the profile, or where one says; solvable; without PyTorch."""
    os.mkdir("in")
    shutil.copy(KNOWN, "in/x.profile.json")
    problem = ("arraypipe", "problem", "in/x.profile.json")
    assert without_torch(*problem).stdout.startswith("wrote in/x.jobarray.json: 4 jobs")
    assert shop("solve", "in/x.jobarray.json", "--solver", "dispatch", "-o", "s.json").code == 0
    given = ("--memory", "80GB", "--objective", "makespan", "-o", "y.jobarray.json")
    assert shop(*problem, *given).code == 0
    array = optsched.JobArray.read("y.jobarray.json")
    assert array.objective == "makespan" and 0 < max(array.memory) < 80 * 2**30


@pytest.mark.slow
@pytest.mark.torch
def test_interrupted(shop: Cli) -> None:
    """Ctrl-C: whole iterations, checkpoints from which the run goes on, exit code 0."""
    run = ("arraypipe", "run", "t.py:make_trainer", "x.schedule.json", "--checkpoint", "ck")
    process = start(*run, "--steps", 10**6, "--out", "o")
    assert process.stderr is not None
    for line in process.stderr:
        if "  iteration" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "interrupted: jobs ended with whole iterations" in out and "Traceback" not in err
    assert sorted(os.listdir("o")) == RESULTS
    jobs = json.loads(Path("o/summary.json").read_text())["jobs"]
    assert {job["status"] for job in jobs} == {"stopped"}
    steps = 2 + max(job["iterations"] for job in jobs)
    more = shop(*run, "--steps", steps, "--resume", "--quiet", "--out", "p")
    assert more.code == 0, more.err
    resumed = json.loads(Path("p/summary.json").read_text())["jobs"]
    for before, after in zip(jobs, resumed, strict=True):
        assert before["iterations"] + after["iterations"] == steps


@pytest.mark.slow
@pytest.mark.torch
def test_ranks(shop: Cli) -> None:
    """`--ranks 2` gives the losses of one process; a third rank is refused."""
    run = ("arraypipe", "run", "t.py:make_trainer", "x.schedule.json", "--quiet")
    assert shop(*run, "--steps", 6, "--out", "o").code == 0
    done = subprocess.run(
        [*PROGRAM, *run, "--ranks", "2", "--steps", "6", "--out", "p"],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir("p")) == RESULTS
    last = [
        [job["last_loss"] for job in json.loads(Path(folder, "summary.json").read_text())["jobs"]]
        for folder in "op"
    ]
    assert last[0] == last[1]
    done = subprocess.run(
        [*PROGRAM, *run, "--ranks", "3"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode != 0
    assert "error: backend: the schedule has 2 devices, there are 3" in done.stderr
