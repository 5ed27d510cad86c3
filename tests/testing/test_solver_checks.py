"""The conformance suite catches solvers that are wrong in one way each, and says in which."""

from __future__ import annotations

import os
import random
import re
import sys
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from optsched import InputError, JobShop, Result, verify
from optsched.model.graph import scheduled
from optsched.solving.solver import Support
from optsched.testing import SolverTests, check_solver, common, run_checks, watching_checks
from optsched.testing.solver_checks import (
    check_exact,
    check_feasible_and_bounded,
    check_leaves_no_trace,
    check_metamorphic,
    check_progress,
    check_random,
    check_stopping,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched import Limits, Monitor

TIME_LIMIT = 0.1


class Asleep:
    """The clock of solvers that take too long: what others do to the machine does not count."""

    seconds = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        """As that of the module `time`."""
        return cls.seconds


class InOrder:
    """A correct solver: operations in the order of ids, where that is feasible."""

    name = "in order"
    options = MappingProxyType[str, str]({})

    def supports(self, problem: Any) -> bool:
        """A plain bool will do."""
        if problem.infeasibility():
            return True
        graph = problem.graph()
        try:
            return not verify(scheduled(graph, graph.users))
        except InputError:  # the order of ids contradicts an arc
            return False

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Report one schedule."""
        graph = problem.graph()
        monitor.incumbent(graph.users, scheduled(graph, graph.users).makespan, self.name)
        return Result("unknown")


class Does(InOrder):
    """Correct but for something it does first."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Do it."""
        self.act()
        return super().solve(problem, limits, monitor)


class Claims(InOrder):
    """Has a status of its own, everywhere or where it found nothing because there was no time."""

    def __init__(self, status: str, always: bool = False) -> None:
        self.status, self.always = status, always

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Lie."""
        if limits.time_limit == 0 and not self.always:
            return Result(self.status, reason="no time")
        found = super().solve(problem, limits, monitor)
        return Result(self.status) if self.always else found


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
            Asleep.seconds += limits.time_limit + 0.6
        return found


class IgnoresTarget(InOrder):
    """Works until the time limit when given a target."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Poll nothing."""
        found = super().solve(problem, limits, monitor)
        if limits.target is not None:
            Asleep.seconds += monitor.remaining
        return found


class DependsOnHashes(InOrder):
    """Another process, with other hashes of strings, proves something else."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Of the two processes of the check exactly one has the seed 0."""
        found = super().solve(problem, limits, monitor)
        if os.environ.get("PYTHONHASHSEED") == "0" and limits.iterations:
            monitor.bound((monitor.lower_bound or 0) + 1)
        return found


class ReportsAtTheEnd(InOrder):
    """Keeps its only schedule until the time is over."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Wait first."""
        while not monitor.should_stop() and limits.time_limit:
            time.sleep(0.005)
        return super().solve(problem, limits, monitor)


class IgnoresCriteria(InOrder):
    """Looks only at the clock when nobody has a target."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Go on."""
        found = super().solve(problem, limits, monitor)
        while limits.stop is not None and monitor.remaining > 0 and not monitor.interrupted:
            time.sleep(0.005)
        return found


class RunsBackwards(InOrder):
    """Takes back steps that it has reported."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Two reports, the second negative."""
        graph = problem.graph()
        value = scheduled(graph, graph.users).makespan
        monitor.advance(5)
        monitor.bound(0)
        if value > (monitor.lower_bound or 0) + 1 and graph.n_operations > 20:
            monitor.bound((monitor.lower_bound or 0) + 1)
            monitor.advance(-3)
        return super().solve(problem, limits, monitor)


class FalseBound(InOrder):
    """Believes that its only schedule is the best: often wrong, and then `optimal` is a lie."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Prove it."""
        found = super().solve(problem, limits, monitor)
        monitor.bound(monitor.objective or 0)
        return found


class SevensMatter(InOrder):
    """A false bound, but only where all times are multiples of 7."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Claim that the only schedule is the best."""
        found = super().solve(problem, limits, monitor)
        duration = problem.graph().duration
        if duration.any() and not (duration % 7).any():
            monitor.bound(monitor.objective or 0)
        return found


BAD = {
    "optimal": (Claims("optimal", True), "check_status: two jobs: returned status optimal"),
    "feasible": (Claims("feasible"), "check_status: 8x6: returned status feasible with obj"),
    "infeasible": (Claims("infeasible"), "check_status: 8x6: returned status infeasible"),
    "seeds random": (
        Does(lambda: random.seed(0)), "check_leaves_no_trace: 8x6: global state of random changed",
    ),
    "seeds numpy": (
        Does(lambda: np.random.seed(0)),  # noqa: NPY002
        "check_leaves_no_trace: 8x6: global state of numpy.random changed",
    ),
    "draws from numpy": (
        Does(lambda: np.random.random_sample()),  # noqa: NPY002
        "check_leaves_no_trace: 8x6: global state of numpy.random changed",
    ),
    "sets the environment": (
        Does(lambda: os.environ.update(OPTSCHED_TEST_LEFT_BEHIND=str(time.perf_counter()))),
        "check_leaves_no_trace: 8x6: the environment changed",
    ),
    "prints": (Does(lambda: print("hello")), "check_silent: 8x6: printed 'hello"),
    "prints errors": (
        Does(lambda: print("hello", file=sys.stderr)), "check_silent: 8x6: printed 'hello",
    ),
    "prints as C does": (Does(lambda: os.write(1, b"hello")), "check_silent: 8x6: printed 'hello"),
    "finds nothing": (FindsNothing(), "check_feasible_and_bounded: found nothing on any tiny"),
    "overruns": (Overruns(), "check_limits: 8x6: "),
    "ignores the target": (IgnoresTarget(), "check_limits: .* target ignored"),
    "runs backwards": (RunsBackwards(), "check_monitor: 8x6: iterations run backwards"),
    "sevens matter": (SevensMatter(), "check_metamorphic: "),
}  # fmt: skip


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the fresh process, which takes longer than all other checks together."""
    monkeypatch.setattr(run_checks, "_in_fresh_process", lambda engine, steps: None)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the suite as others meet them, by a clock that no load of the machine turns."""
    monkeypatch.setattr(run_checks, "OVERRUN", 0.5)
    monkeypatch.setattr(common, "time", Asleep)


def test_a_correct_solver_passes() -> None:
    """Simple, honest, and with a plain bool for `supports`."""
    check_solver(InOrder(), time_limit=TIME_LIMIT)


@pytest.mark.parametrize(
    "alone",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["its check", "all checks"],
)
@pytest.mark.parametrize("wrong", BAD)
@pytest.mark.usefixtures("one_process", "strict")
def test_a_bad_solver_is_caught(wrong: str, alone: bool) -> None:
    """One wrong, one failure, with the true diagnosis and, of all checks, nothing else."""
    bad, diagnosis = BAD[wrong]
    only = [diagnosis.split(":")[0]] if alone else None
    with pytest.raises(AssertionError) as caught:
        check_solver(bad, time_limit=TIME_LIMIT, only=only)
    failures = str(caught.value).splitlines()[1:]
    assert len(failures) == 1 and re.search(diagnosis, failures[0]), failures


@pytest.mark.parametrize(
    ("bad", "check", "diagnosis"),
    [
        (FalseBound, check_feasible_and_bounded, "bound"),
        (FalseBound, check_random, "bound"),
        (FalseBound, check_metamorphic, "bound"),
        (ReportsAtTheEnd, check_progress, "the first incumbent came after"),
        (IgnoresCriteria, check_stopping, "should have stopped it"),
        (InOrder, check_exact, "expected optimal"),
        (DependsOnHashes, run_checks.check_reproducible, "in this process and a fresh one"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_one_check_is_enough(
    bad: type[InOrder], check: Any, diagnosis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other checks may fail too; this one must."""
    monkeypatch.setattr(watching_checks, "LONG", 0.8)
    monkeypatch.setattr(watching_checks, "SOON", 0.25)
    with pytest.raises(AssertionError, match=diagnosis):
        check(bad(), (), 0.6)


class ShopsOnly(InOrder):
    """Honest about what it does not take."""

    def supports(self, problem: Any) -> Support:
        """Plain job shops."""
        if not isinstance(problem, JobShop):
            return Support(False, "only shops")
        return Support(not problem.has_windows, "no deadlines")


class Nothing(InOrder):
    """Refuses all."""

    def supports(self, problem: Any) -> Support:
        """Never."""
        return Support(False, "on strike")


class Slow(ShopsOnly):
    """An interpreted solver: every iteration takes a while."""

    asked: ClassVar[list[int]] = []

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Count the iterations of all runs."""
        self.asked.append(limits.iterations or 0)
        for _ in range(limits.iterations or 0):
            time.sleep(0.005)
        return super().solve(problem, limits, monitor)


@pytest.mark.usefixtures("one_process")
def test_checks_of_problems_that_are_refused_are_skipped() -> None:
    """With the solver's own reasons, and without blame; the others are run."""
    report = check_solver(ShopsOnly(), time_limit=TIME_LIMIT)
    skipped = report.skipped
    assert set(report.seconds) > set(skipped) and "check_random " in str(report)
    assert set(skipped) == {"check_infeasible", "check_equal_jobs", "check_random"}
    assert "no deadlines" in skipped["check_infeasible"]
    assert "only shops" in skipped["check_random"]


def test_a_solver_of_which_nothing_is_checked_fails() -> None:
    """Whether it refuses all, finds what nobody asks, or is asked only what it refuses."""
    with pytest.raises(AssertionError, match=r"nothing of in order was checked:\n.*on strike"):
        check_solver(Nothing(), time_limit=TIME_LIMIT)

    class Poet(InOrder):
        kinds = ("verses",)

    with pytest.raises(AssertionError, match=r"of its kinds: verses"):
        check_solver(Poet(), time_limit=TIME_LIMIT)
    with pytest.raises(AssertionError, match="no deadlines"):
        check_solver(ShopsOnly(), time_limit=TIME_LIMIT, only=["check_infeasible"])


def test_checks_are_chosen_by_name() -> None:
    """Only some, or all but some; a name that is none is refused with those that are."""
    bad = BAD["prints errors"][0]
    check_solver(bad, time_limit=TIME_LIMIT, only=["check_interface", "check_degenerate"])
    with pytest.raises(AssertionError, match=r"fails 1 checks:\n  check_silent"):
        check_solver(bad, time_limit=TIME_LIMIT, only={"check_interface", "check_silent"})
    check_solver(
        bad, time_limit=TIME_LIMIT, only=["check_degenerate", "check_silent"],
        exclude=["check_silent"],
    )  # fmt: skip
    with pytest.raises(InputError, match=r"only: there is no check 'silent'; .*check_silent"):
        check_solver(bad, only=["silent"])
    with pytest.raises(InputError, match="exclude: expected a list of names"):
        check_solver(bad, exclude="check_silent")


@pytest.mark.usefixtures("one_process")
def test_slow_solvers_repeat_few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as take a moment, the same in every run; at the full number it would take minutes."""
    monkeypatch.setattr(run_checks, "REPEATED", 0.04)
    Slow.asked.clear()
    run_checks.check_reproducible(Slow(), (), TIME_LIMIT)
    repeated = Slow.asked[-4:]
    assert 1 <= repeated[0] <= 16 and len(set(repeated)) == 1
    assert sum(Slow.asked) <= 100


def test_the_pytest_class_skips_too() -> None:
    """A check without a problem is no success."""

    class Tests(SolverTests):
        solver = ShopsOnly()

    with pytest.raises(pytest.skip.Exception, match="no deadlines"):
        Tests().test_infeasible()


def test_a_solver_that_cannot_be_sent_is_not_blamed() -> None:
    """A class made on the fly is checked in this process only."""

    class Local(InOrder):
        pass

    assert run_checks._in_fresh_process(Local(), [1]) is None
    run_checks.check_reproducible(Local(), (), TIME_LIMIT)


def test_the_callers_random_state_comes_back() -> None:
    """The check itself leaves no trace either, whatever the solver does."""
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    expected = random.random(), np.random.random_sample()  # noqa: NPY002
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    with pytest.raises(AssertionError, match="global state of random"):
        check_leaves_no_trace(BAD["seeds random"][0], (), TIME_LIMIT)
    assert (random.random(), np.random.random_sample()) == expected  # noqa: NPY002
