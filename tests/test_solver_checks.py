"""The conformance suite catches solvers that are wrong in one way each, and says in which."""

from __future__ import annotations

import os
import random
import sys
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from optsched import Result, verify
from optsched.graph import scheduled
from optsched.testing import best_makespan, check_solver, solver_checks
from optsched.testing.solver_checks import check_leaves_no_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched import Limits, Monitor

TIME_LIMIT = 0.1


class InOrder:
    """A correct solver: operations in the order of ids, where that is feasible."""

    name = "in order"
    options = MappingProxyType[str, str]({})

    def supports(self, problem: Any) -> bool:
        """A plain bool will do."""
        if problem.infeasibility():
            return True
        graph = problem.graph()
        return not verify(scheduled(graph, graph.users))

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Report one schedule."""
        graph = problem.graph()
        monitor.incumbent(graph.users, scheduled(graph, graph.users).makespan, self.name)
        return Result("unknown")


class ClaimsOptimal(InOrder):
    """Proved nothing."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Lie."""
        super().solve(problem, limits, monitor)
        return Result("optimal")


class ClaimsFeasible(InOrder):
    """Found nothing in no time, and calls that feasible."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Lie when there is no time."""
        if limits.time_limit == 0:
            return Result("feasible")
        return super().solve(problem, limits, monitor)


class ClaimsInfeasible(InOrder):
    """Takes a time limit for a proof."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Lie when there is no time."""
        if limits.time_limit == 0:
            return Result("infeasible", reason="no time")
        return super().solve(problem, limits, monitor)


class SeedsRandom(InOrder):
    """Always leaves the same state behind."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Seed with 0."""
        random.seed(0)
        return super().solve(problem, limits, monitor)


class SeedsNumpy(InOrder):
    """Always leaves the same state behind."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Seed with 0."""
        np.random.seed(0)  # noqa: NPY002
        return super().solve(problem, limits, monitor)


class DrawsFromNumpy(InOrder):
    """Moves the position in the state by one, nothing else."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Draw."""
        np.random.random_sample()  # noqa: NPY002
        return super().solve(problem, limits, monitor)


class Prints(InOrder):
    """Talks."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """To stdout."""
        print("hello")
        return super().solve(problem, limits, monitor)


class PrintsErrors(InOrder):
    """Talks."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """To stderr."""
        print("hello", file=sys.stderr)
        return super().solve(problem, limits, monitor)


class PrintsLikeC(InOrder):
    """Talks as compiled code does."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """To the file descriptor."""
        os.write(1, b"hello")
        return super().solve(problem, limits, monitor)


class FindsNothing(InOrder):
    """Never reports."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Give up."""
        return Result("unknown")


class Overruns(InOrder):
    """Late by 0.6 s wherever time is very short."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Sleep too long."""
        found = super().solve(problem, limits, monitor)
        if limits.time_limit == 0.05:
            time.sleep(limits.time_limit + 0.6)
        return found


class IgnoresTarget(InOrder):
    """Works until the time limit when given a target."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Poll nothing."""
        found = super().solve(problem, limits, monitor)
        if limits.target is not None:
            time.sleep(monitor.remaining)
        return found


BAD = [
    (ClaimsOptimal, "check_status: two jobs: returned status optimal with objective"),
    (ClaimsFeasible, "check_status: 8x6: returned status feasible with objective None"),
    (ClaimsInfeasible, "check_status: 8x6: returned status infeasible"),
    (SeedsRandom, "check_leaves_no_trace: 8x6: global state of random changed"),
    (SeedsNumpy, "check_leaves_no_trace: 8x6: global state of numpy.random changed"),
    (DrawsFromNumpy, "check_leaves_no_trace: 8x6: global state of numpy.random changed"),
    (Prints, "check_silent: 8x6: printed 'hello"),
    (PrintsErrors, "check_silent: 8x6: printed 'hello"),
    (PrintsLikeC, "check_silent: 8x6: printed 'hello"),
    (FindsNothing, "check_feasible_and_bounded: found nothing on any tiny problem"),
    (Overruns, "check_limits: 8x6: "),
    (IgnoresTarget, "target ignored"),
]


@pytest.fixture(scope="module", autouse=True)
def brute_force_once() -> Iterator[None]:
    """The optima of the tiny problems are the same for every solver: compute them once."""
    known: dict[str, int | None] = {}

    def remembered(graph: Any) -> int | None:
        if graph.sha256 not in known:
            known[graph.sha256] = best_makespan(graph)
        return known[graph.sha256]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver_checks, "best_makespan", remembered)
        yield


def test_a_correct_solver_passes() -> None:
    """Simple, honest, and with a plain bool for `supports`."""
    check_solver(InOrder(), time_limit=TIME_LIMIT)


@pytest.mark.parametrize(
    ("bad", "diagnosis"), BAD, ids=lambda given: getattr(given, "__name__", "")
)
def test_a_bad_solver_is_caught(bad: type[InOrder], diagnosis: str) -> None:
    """One wrong, one failure, with the true diagnosis and nothing else."""
    with pytest.raises(AssertionError) as caught:
        check_solver(bad(), time_limit=TIME_LIMIT)
    failures = str(caught.value).splitlines()[1:]
    assert len(failures) == 1 and diagnosis in failures[0], failures


def test_the_callers_random_state_comes_back() -> None:
    """The check itself leaves no trace either, whatever the solver does."""
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    expected = random.random(), np.random.random_sample()  # noqa: NPY002
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    with pytest.raises(AssertionError, match="global state of random"):
        check_leaves_no_trace(SeedsRandom(), (), TIME_LIMIT)
    assert (random.random(), np.random.random_sample()) == expected  # noqa: NPY002
