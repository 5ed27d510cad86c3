"""Re-planning in another process: answers, failures told once, and nothing that lingers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import optsched
from optsched import JobArray, Schedule, verify
from optsched.arraypipe.life.replanner import _CHILD, Replanner, gain
from optsched.arraypipe.plan.edits import without
from optsched.arraypipe.plan.orders import random_rolling
from optsched.model.schedule import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

ARRAY = JobArray([[3, 4], [5, 2], [2, 2]], [[6, 4], [5, 7], [2, 2]], objective="period")
START = random_rolling(ARRAY, spread=0, seed=1)
HARD = optsched.formats.taillard.instance("ta41")
"""Open since 1993: whoever solves it works until told to stop."""
PATIENCE = 300
"""Seconds for what should come at once; long enough for any machine."""


def wait(done: Callable[[], bool]) -> None:
    """Until something is so."""
    until = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def settle(replanner: Replanner) -> None:
    """Until the problem is solved, or has failed."""
    wait(lambda: not replanner.busy)


def process_of(replanner: Replanner) -> Any:
    """The solver's process, as soon as there is one."""
    wait(lambda: bool(replanner._running))
    return next(iter(replanner._running.values()))


def test_the_repaired_order_is_improved() -> None:
    """The answer is a schedule of the smaller problem, verified, no worse, and given out once."""
    smaller, start = ARRAY.without(1), without(START, [1])
    with closing(Replanner()) as replanner:
        assert replanner.poll() is None and replanner.failure() == "" and not replanner.busy
        replanner.submit(smaller, start, 0.3)
        assert replanner.busy
        settle(replanner)
        found = replanner.poll()
        assert replanner.poll() is None and replanner.failure() == ""
    assert found is not None and not verify(found)
    assert smaller.evaluate(found) <= start.period == smaller.evaluate(start)


@pytest.mark.slow
def test_the_newest_problem_counts() -> None:
    """A problem submitted later replaces the one before, also a cancelled or answered one."""
    smaller, start = ARRAY.without(1), without(START, [1])
    with closing(Replanner()) as replanner:
        replanner.submit(HARD, None, 3000)
        first = process_of(replanner)
        replanner.submit(smaller, None, 0.2)
        settle(replanner)
        wait(lambda: first.poll() is not None)
        replanner.submit(smaller, start, 0.2)  # the answer that nobody has fetched is void
        replanner.cancel()
        assert replanner.poll() is None and replanner.failure() == "" and not replanner.busy
        replanner.submit(smaller, start, 0.2)
        settle(replanner)
        found = replanner.poll()
    assert found is not None and smaller.evaluate(found) <= smaller.evaluate(start)


def test_a_failing_solver_is_told_once() -> None:
    """A start of another problem is the solver's failure, not the training's."""
    with closing(Replanner()) as replanner:
        replanner.submit(ARRAY.without(1), START, 5)
        settle(replanner)
        assert replanner.poll() is None
        said = replanner.failure()
        assert said.startswith(
            "re-planning failed, the present plan stays: InputError: the schedule"
        )
        assert replanner.failure() == ""


def test_a_dead_process_is_told_once() -> None:
    """Killed from outside, the process leaves a sentence with its exit code; one can go on."""
    with closing(Replanner()) as replanner:
        replanner.submit(HARD, None, 3000)
        process_of(replanner).kill()
        settle(replanner)
        assert replanner.poll() is None
        assert "the solver's process ended with exit code" in replanner.failure()
        assert replanner.failure() == ""
        replanner.submit(HARD, None, 3000)
        assert replanner.busy


def test_a_problem_that_cannot_be_sent_is_told() -> None:
    """Nothing that goes wrong in the thread is lost."""

    class Here(Problem):
        """A problem that no other process knows."""

        name, sha256 = "here", "0" * 64

        def graph(self) -> Schedule:
            return ARRAY.graph()

    with closing(Replanner()) as replanner:
        replanner.submit(Here(), None, 300)
        settle(replanner)
        assert replanner.poll() is None and "re-planning failed" in replanner.failure()


def test_closing_ends_the_process() -> None:
    """Afterwards nothing runs, nothing is answered, and nothing is begun."""
    replanner = Replanner()
    with closing(replanner):
        replanner.submit(HARD, None, 3000)
        process = process_of(replanner)
    wait(lambda: process.poll() is not None)
    assert not replanner.busy and replanner.poll() is None and replanner.failure() == ""
    replanner.submit(ARRAY, START, 1)
    assert not replanner.busy


def test_exit_is_not_blocked_and_leaves_no_process() -> None:
    """A script without a guard runs once, ends while a solver works, and takes it along."""
    script = textwrap.dedent("""
        import time
        print("begin", flush=True)
        from optsched.arraypipe.life.replanner import Replanner
        from optsched.formats import taillard
        replanner = Replanner()
        replanner.submit(taillard.instance("ta41"), None, 3000)
        while not replanner._running:
            time.sleep(0.01)
        print(next(iter(replanner._running.values())).pid)
    """)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    begin, pid = ended.stdout.split()
    assert begin == "begin" and ended.stderr == ""
    wait(lambda: not _runs(int(pid)))


def test_a_solver_whose_training_is_gone_stops() -> None:
    """Also if that was killed before the solver had begun to look."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    answered = subprocess.run(
        [sys.executable, "-c", _CHILD, str(gone.pid)], input=pickle.dumps((HARD, None, 3000.0)),
        capture_output=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert pickle.loads(answered.stdout)


def _runs(pid: int) -> bool:
    """Whether a process is alive (one that has ended but is not yet waited for is not)."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_gain() -> None:
    """What is saved in the cycles that are left, less the time in which the pipeline drains."""
    assert gain(100, 90, 20, 150) == 50
    assert gain(100, 90, 15, 150) == 0
    assert gain(90, 100, 5, 0) == -50
