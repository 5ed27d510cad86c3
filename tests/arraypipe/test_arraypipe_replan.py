"""Re-planning in a thread: answers, failures reported once, and the newest problem counts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest
from arraypipe_plans import random_rolling

import optsched
from optsched import JobArray, verify
from optsched.arraypipe.plan.orders import without
from optsched.arraypipe.rescheduling import Replanner

if TYPE_CHECKING:
    from collections.abc import Iterator

ARRAY = JobArray([[3, 4], [5, 2], [2, 2]], [[6, 4], [5, 7], [2, 2]], objective="period")
START = random_rolling(ARRAY, spread=0, seed=1)
HARD = optsched.JobShop.read("ta41")
"""Open since 1993: a solver works until it is stopped."""


def answer(replanner: Replanner) -> Any:
    """The answer, as soon as there is one."""
    until = time.monotonic() + 300
    while (found := replanner.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


@pytest.fixture
def replanner() -> Iterator[Replanner]:
    """One that is stopped afterwards."""
    found = Replanner()
    yield found
    found.cancel()


def test_the_repaired_order_is_improved(replanner: Replanner) -> None:
    """The answer is a schedule of the smaller problem, verified, no worse, and given out once."""
    smaller, start = ARRAY.without(1), without(START, [1])
    assert replanner.poll() is None
    replanner.submit(HARD, HARD.scheduled(HARD.graph().users), 3000)
    replanner.submit(smaller, start, 0.3)  # instead
    found = answer(replanner)
    assert replanner.poll() is None
    assert not verify(found)
    assert smaller.evaluate(found) <= start.period == smaller.evaluate(start)


def test_a_failing_solver_is_reported_once(replanner: Replanner) -> None:
    """A start of another problem is the solver's failure; a cancelled answer is forgotten."""
    replanner.submit(ARRAY.without(1), START, 5)
    assert answer(replanner).startswith("InputError: ")
    assert replanner.poll() is None


def test_exit_is_not_blocked() -> None:
    """A script ends while a solver works."""
    script = textwrap.dedent("""
        from optsched.arraypipe.rescheduling import Replanner
        from optsched.problems.jobshop import published
        hard = published.instance("ta41")
        Replanner().submit(hard, hard.scheduled(hard.graph().users), 3000)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
