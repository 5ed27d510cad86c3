"""Re-planning in another process: answers, failures told once, and nothing that lingers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from arraypipe_plans import random_rolling

import optsched
from optsched import JobArray, Schedule, verify
from optsched.arraypipe.life.replanner import _CHILD, Replanner
from optsched.arraypipe.plan.orders import without
from optsched.model.schedule import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ARRAY = JobArray([[3, 4], [5, 2], [2, 2]], [[6, 4], [5, 7], [2, 2]], objective="period")
START = random_rolling(ARRAY, spread=0, seed=1)
HARD = optsched.JobShop.read("ta41")
"""Open since 1993: whoever solves it works until told to stop."""
ANY = HARD.scheduled(HARD.graph().users)
PATIENCE = 300
"""Seconds for what should come at once; long enough for any machine."""


def wait(done: Callable[[], Any]) -> Any:
    """What is there as soon as something is."""
    until = time.monotonic() + PATIENCE
    while not (found := done()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def process_of(replanner: Replanner) -> Any:
    """The solver's process, as soon as there is one."""
    return wait(lambda: replanner._running)[-1]


@pytest.fixture
def replanner() -> Iterator[Replanner]:
    """Of which nothing is left afterwards."""
    found = Replanner()
    yield found
    found.cancel()
    wait(lambda: not found._running)


def test_the_repaired_order_is_improved(replanner: Replanner) -> None:
    """The answer is a schedule of the smaller problem, verified, no worse, and given out once."""
    smaller, start = ARRAY.without(1), without(START, [1])
    assert replanner.poll() is None
    replanner.submit(smaller, start, 0.3)
    found = wait(replanner.poll)
    assert replanner.poll() is None
    assert not verify(found)
    assert smaller.evaluate(found) <= start.period == smaller.evaluate(start)


@pytest.mark.slow
def test_the_newest_problem_counts(replanner: Replanner) -> None:
    """A problem submitted later replaces the one before, also a cancelled or answered one."""
    smaller, start = ARRAY.without(1), without(START, [1])
    replanner.submit(HARD, ANY, 3000)
    first = process_of(replanner)
    replanner.submit(smaller, start, 0.2)
    wait(lambda: "answer" in replanner._request)
    wait(lambda: first.poll() is not None)
    replanner.submit(smaller, start, 0.2)  # the answer that nobody has fetched is void
    replanner.cancel()
    assert replanner.poll() is None
    replanner.submit(smaller, start, 0.2)
    assert smaller.evaluate(wait(replanner.poll)) <= smaller.evaluate(start)


class Here(Problem):
    """A problem that no other process knows."""

    name, sha256 = "here", "0" * 64

    def graph(self) -> Schedule:
        """As `ARRAY`."""
        return ARRAY.graph()

    def __reduce__(self) -> Any:
        raise TypeError("not for others")


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [(ARRAY.without(1), "InputError: "), (Here(), "TypeError: not for others")],
)
def test_a_failing_solver_is_told_once(
    problem: Problem, sentence: str, replanner: Replanner
) -> None:
    """A start of another problem, or one that cannot be sent, is the solver's failure."""
    replanner.submit(problem, START, 5)
    assert wait(replanner.poll).startswith(sentence)
    assert replanner.poll() is None


def test_a_dead_process_is_told_once(replanner: Replanner) -> None:
    """Killed from outside, the process leaves a sentence with its exit code; one can go on."""
    replanner.submit(HARD, ANY, 3000)
    process_of(replanner).kill()
    assert "the solver's process ended with exit code" in wait(replanner.poll)
    assert replanner.poll() is None
    replanner.submit(HARD, ANY, 3000)
    process_of(replanner)


def test_exit_is_not_blocked_and_leaves_no_process() -> None:
    """A script without a guard runs once, ends while a solver works, and takes it along."""
    script = textwrap.dedent("""
        import time
        print("begin", flush=True)
        from optsched.arraypipe.life.replanner import Replanner
        from optsched.problems.jobshop import published
        replanner, hard = Replanner(), published.instance("ta41")
        replanner.submit(hard, hard.scheduled(hard.graph().users), 3000)
        while not replanner._running:
            time.sleep(0.01)
        print(replanner._running[0].pid)
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
        [sys.executable, "-c", _CHILD, str(gone.pid)], input=pickle.dumps((HARD, ANY, 3000.0)),
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
