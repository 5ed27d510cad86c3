"""Runs that are killed at any instant, in one process or several: complete checkpoints are left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
import runs
import torch
from arraypipe_lives import PARTS, STEPS, Halves, jobs_of, killed_before, same, saved_is_exact
from arraypipe_models import trainer

from optsched.arraypipe import Job, random_schedule, training_run
from optsched.arraypipe.checkpoint.files import numbered

JOBS = 2


def write_many(folder: Path) -> None:
    """A run that does little else than to write checkpoints, for half a second at least."""
    torch.set_num_threads(1)
    rows = jobs_of(JOBS)
    runs.run(trainer(rows), 
        random_schedule(PARTS[:JOBS], 3, seed=9), 12, checkpoint=folder, checkpoint_every=1,
        resume=True, on_step=lambda job, iteration, loss: time.sleep(0.02),
    )  # fmt: skip


def check_killed(folder: Path) -> list[int]:
    """Every job has a complete checkpoint, or none; their iterations."""
    return [saved_is_exact(folder, j) for j in range(JOBS)]


def finish_killed(folder: Path) -> None:
    """Resume to the end: exact, and nothing half done is left."""
    before = check_killed(folder)
    result = runs.run(
        trainer(jobs_of(JOBS)),
        random_schedule(PARTS[:JOBS], 3, seed=1),
        12,
        checkpoint=folder,
        resume=True,
    )
    for j in range(JOBS):
        assert same(result.trained[j], j, 12, start=before[j])
    assert not list(folder.rglob(".*"))


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """SIGKILL to a process that writes: what is there is complete; the rest is trained exactly."""
    draw = random.Random(0)
    for _ in range(8):
        child = os.fork()
        if child == 0:
            try:
                write_many(tmp_path)
                time.sleep(600)  # should it be done before the kill comes
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0.02, 0.25))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        check_killed(tmp_path)
    finish_killed(tmp_path)


def kill_at(moment: int, folder: Path, halves: bool) -> bool:
    """Run in a child that is killed before its n-th change of the file system; whether it was."""

    def run() -> None:
        if halves:
            training_run.CheckpointFolder = Halves  # type: ignore[attr-defined,misc]
        runs.run(
            trainer(jobs_of(1)),
            random_schedule([1], 3),
            3,
            checkpoint=folder,
            checkpoint_every=1,
            resume=True,
        )

    return killed_before(moment, run)


def kill_everywhere(folder: Path, moments: range, halves: bool) -> None:
    """After a kill at any of these moments: what is there is whole, and is gone on from."""
    for moment in moments:
        place = folder / str(moment)
        if not kill_at(moment, place, halves):
            assert moment > 20
            return
        done = saved_is_exact(place, 0)
        result = runs.run(
            trainer(jobs_of(1)), random_schedule([1], 3), 3, checkpoint=place, resume=True
        )
        assert same(result.trained[0], 0, 3, start=done)
        assert not list(place.rglob(".*"))
    raise AssertionError("it should have come to its end")


@pytest.mark.parametrize("halves", [False, True])
def test_kills_at_every_step_of_writing(tmp_path: Path, halves: bool) -> None:
    """Also where several processes leave their parts: every eleventh step."""
    kill_everywhere(tmp_path, range(3, 300, 11), halves)


@pytest.mark.slow
@pytest.mark.parametrize("halves", [False, True])
def test_kills_at_really_every_step_of_writing(tmp_path: Path, halves: bool) -> None:
    """The same, all of them (every second one with several processes)."""
    kill_everywhere(tmp_path, range(0, 300, 1 + halves), halves)


@pytest.mark.slow
def test_kills_of_a_program(tmp_path: Path) -> None:
    """The same with a program of its own, killed within its writing too."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_arraypipe_kills import write_many
        print("ready", flush=True)
        write_many(Path({str(tmp_path)!r}))
    """
    draw = random.Random(1)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(draw.uniform(0.05, 0.6))
        child.kill()
        child.communicate()
        check_killed(tmp_path)
    finish_killed(tmp_path)


# several processes

RANKS = 3


def run_ranks(folder: Path, store: Path, steps: int, stops: dict[int, int]) -> None:
    """Fork the ranks, train with them, and wait; exit code 1 if one of them fails."""
    import torch.distributed as dist

    def on_step(job: Job, t: int, value: float) -> None:
        for j, when in stops.items():
            if (job.seed, t) == (0, when):
                jobs[j].stop()

    torch.set_num_threads(1)
    jobs = jobs_of()
    children = []
    for rank in range(RANKS):
        children.append(os.fork())
        if children[-1] == 0:
            code = 1
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
                )
                runs.run(trainer(jobs), 
                    random_schedule(PARTS, 3, seed=steps, update=[0]), steps, checkpoint=folder,
                    checkpoint_every=1, resume=True, on_step=on_step, backend="process",
                )  # fmt: skip
                code = 0
            except Exception as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr)
            finally:
                sys.stdout.flush()
                os._exit(code)
    print(*children, flush=True)
    sys.exit(max(os.waitpid(child, 0)[1] for child in children) != 0)


def start_ranks(
    folder: Path, steps: int, stops: dict[int, int] | None = None
) -> subprocess.Popen[str]:
    """A program that does so; its first line has the numbers of the processes."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_arraypipe_kills import run_ranks
        store = Path({str(folder)!r} + ".store")
        store.unlink(missing_ok=True)
        run_ranks(Path({str(folder)!r}), store, {steps}, {stops or {}})
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_ranks_save_and_resume(tmp_path: Path) -> None:
    """Stops reach all ranks; what they save is exact and is resumed by any backend."""
    folder = tmp_path / "ckpt"
    with start_ranks(folder, STEPS, {0: 1, 1: 2}) as program:
        assert program.communicate()[1].count("rank ") == 0
    assert program.returncode == 0
    assert saved_is_exact(folder, 0) == 2
    assert 2 <= saved_is_exact(folder, 1) <= STEPS
    assert saved_is_exact(folder, 2) == STEPS
    before = [saved_is_exact(folder, j) for j in range(3)]
    with start_ranks(folder, 7) as program:
        assert program.communicate()[1].count("rank ") == 0
    assert [saved_is_exact(folder, j) for j in range(3)] == [7] * 3
    assert min(before) < 7
    result = runs.run(
        trainer(jobs_of()), random_schedule(PARTS, 3), 8, checkpoint=folder, resume=True
    )
    for j in range(3):
        assert same(result.trained[j], j, 8, start=7)
    assert not list(folder.rglob(".*"))


@pytest.mark.slow
def test_killed_ranks_leave_complete_checkpoints(tmp_path: Path) -> None:
    """All ranks at once, or one of them first: the next run goes on from what is complete."""
    folder, draw = tmp_path / "ckpt", random.Random(3)
    for first in (None, 2):
        with start_ranks(folder, 10**6) as program:  # they never come to the end
            assert program.stdout is not None
            ranks = [int(word) for word in program.stdout.readline().split()]
            before = sum(check_three(folder))
            while program.poll() is None:
                now = check_three(folder)
                if all(now) and sum(now) >= before + 3:
                    break
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.1))
            if first is not None:
                os.kill(ranks[first], signal.SIGKILL)
                time.sleep(draw.uniform(0, 0.05))
            for rank in ranks:
                with suppress(ProcessLookupError):  # it has noticed that another one is dead
                    os.kill(rank, signal.SIGKILL)
            program.communicate()
        done = [saved_is_exact(folder, j) for j in range(3)]
        assert sum(done) >= before + 3
    result = runs.run(
        trainer(jobs_of()), random_schedule(PARTS, 3), max(done) + 1, checkpoint=folder, resume=True
    )
    for j in range(3):
        assert same(result.trained[j], j, max(done) + 1, start=done[j])
    assert not list(folder.rglob(".*"))


def check_three(folder: Path) -> list[int]:
    """Newest iterations of all jobs, without a look into the files."""
    return [max(numbered(folder / f"job{j}"), default=0) for j in range(3)]
