"""The demo and the examples that train something, run as people run them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from program import PATIENCE, PROGRAM

from optsched import InputError, Schedule, verify
from optsched.arraypipe import demo, random_schedule, run_demo, tiny_gpt
from optsched.arraypipe.profile import measure
from optsched.arraypipe.train_alone import NotIdentical


def test_demo_solves_trains_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: measure, solve, train, compare, write everything, tell the story."""
    monkeypatch.setattr(measure, "NOISY_NS", 0)  # what scatters is not repeated here
    threads, lines = torch.get_num_threads(), []
    result = run_demo(tmp_path / "out", steps=4, time_limit=0.5, say=lines.append)
    assert result.profile is not None
    assert result.schedule.period is not None
    trace = Schedule.read(tmp_path / "out" / "measured.schedule.json")
    assert verify(trace) == []
    assert trace.n_operations == 4 * (3 * 8 + 16)
    assert str(result).count("bit-identical") == 4
    assert {"measuring", "solving", "predicted:", "training"} <= {line.split()[0] for line in lines}
    for name in ("demo.schedule.json", "measured.html", "measured.trace.json", "demo.profile.json"):
        assert (tmp_path / "out" / name).stat().st_size > 1000
    for part in ("cpu3 |", "a cycle: predicted", "one job per GPU", "bit-identical"):
        assert part in result.story
    assert not list((tmp_path / "out").glob("plan.*"))  # those of `examples/main_job.py`
    assert torch.get_num_threads() == threads


def test_demo_refuses_what_does_not_fit(tmp_path: Path) -> None:
    """Another array's schedule and an unusable folder: one sentence."""
    (tmp_path / "file").write_text("")
    for sentence, given in (
        ("job 3: the schedule has 1", {"schedule": random_schedule([1, 1, 1, 1], 4)}),
        ("cannot be made", {"out": tmp_path / "file"}),
    ):
        with pytest.raises(InputError, match=sentence):
            run_demo(**given)  # type: ignore[arg-type]


def test_demo_ends_at_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that were interrupted are not compared with whole ones."""
    steps: list[Any] = []

    def loss(scores: Any, target: Any) -> Any:
        steps.append(target)
        if len(steps) == 9:
            signal.raise_signal(signal.SIGINT)
        return tiny_gpt.next_byte_loss(scores, target)

    monkeypatch.setattr(demo, "next_byte_loss", loss)
    with pytest.raises(KeyboardInterrupt):
        run_demo(steps=8, schedule=random_schedule([1, 1, 1, 2], 4))


def test_demo_fails_when_a_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is real: other random numbers are noticed."""
    from optsched.arraypipe.runtime import blocks

    monkeypatch.setattr(
        blocks, "seed_generator", lambda key: torch.default_generator.manual_seed(0)
    )
    with pytest.raises(NotIdentical, match="differs from training alone"):
        run_demo(steps=2, schedule=random_schedule([1, 1, 1, 2], 4))


# examples

SWEEP = Path(__file__).parents[2] / "examples" / "sweep_gpt.py"
SMALL = ["--width", "16", "--depth", "2", "--context", "12", "--time-limit", "0.5", "--steps", "3"]


def run(*words: str, **more: Any) -> str:
    """What a program prints."""
    done = subprocess.run(
        [*words], capture_output=True, text=True, timeout=PATIENCE, check=False, **more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "stages"), [(0, "3"), (4, "4"), (2, "3")])
def test_sweep(tmp_path: Path, processes: int, stages: str) -> None:
    """Report, files, and proof; with fewer processes than stages neighbours share one."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    said = run(
        sys.executable, *start * bool(processes), str(SWEEP), *SMALL, "--lr", "1e-3", "1e-2",
        "--stages", stages, "--check", "--out", str(tmp_path / "o"),
    )  # fmt: skip
    assert said.count("bit-identical") == 1 and "<- best" in said
    assert "a cycle: predicted" in said
    names = sorted(path.name for path in (tmp_path / "o").iterdir())
    assert names == ["plan.schedule.json", "trace.schedule.json"]
    for name in names:
        assert verify(Schedule.read(tmp_path / "o" / name)) == []


@pytest.mark.slow
def test_sweep_by_the_command(tmp_path: Path) -> None:
    """`optsched arraypipe run` takes the example's trainer."""
    words = ["run", f"{SWEEP}:make_trainer", "--steps", "2", "--time-limit", "0.5"]
    assert "lr0.0003  done" in run(*PROGRAM, "arraypipe", *words, cwd=tmp_path)
