"""The examples that train something: run as people run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from program import PATIENCE

import optsched
from optsched.model.schedule import Schedule

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

SWEEP = Path(__file__).parents[2] / "examples" / "sweep_gpt.py"
SMALL = ["--width", "16", "--depth", "2", "--context", "12", "--time-limit", "0.5", "--steps", "3"]


def sweep(*words: str, processes: int = 0) -> subprocess.CompletedProcess[str]:
    """The sweep over learning rates, small, in the current folder."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [sys.executable, *start * bool(processes), str(SWEEP), *SMALL, *words],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def check_files(folder: Path) -> None:
    """Plan, trace and replay are schedules without violations."""
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["plan.schedule.json", "replay.schedule.json", "trace.schedule.json"]
    for name in names:
        assert optsched.verify(Schedule.read(folder / name)) == []


@pytest.mark.slow
def test_sweep_in_one_process(tmp_path: Path) -> None:
    """Losses, report, files, and the proof that every job has the bits of training it alone."""
    done = sweep("--lr", "1e-3", "1e-2", "--stages", "3", "--check", "--out", str(tmp_path / "o"))
    assert done.returncode == 0, done.stderr
    assert "bit-identical" in done.stdout and "<- best" in done.stdout
    assert "with measured durations" in done.stdout
    check_files(tmp_path / "o")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "stages"), [(4, "4"), (2, "3")])
def test_sweep_in_several_processes(tmp_path: Path, processes: int, stages: str) -> None:
    """The same under torchrun; with fewer processes than stages neighbours share one."""
    done = sweep("--lr", "1e-3", "1e-2", "--stages", stages, "--check", "--out",
                 str(tmp_path / "o"), processes=processes)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bit-identical") == 1
    check_files(tmp_path / "o")


@pytest.mark.slow
def test_sweep_by_the_command(tmp_path: Path) -> None:
    """`optsched arraypipe run` takes the example's trainer."""
    words = ["arraypipe", "run", f"{SWEEP}:make_trainer", "--steps", "2", "--time-limit", "0.5"]
    code = "from optsched.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "lr0.0003  done" in done.stdout
