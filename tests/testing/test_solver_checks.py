"""`check_solver` reports solvers that are wrong in one respect each, with the right diagnosis."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import fuzz
import pytest

import optsched
from optsched import InputError, JobShop, Limits, Monitor, Result, verify
from optsched.model.graph import scheduled
from optsched.solving.solver import KINDS, Support, solver, solvers
from optsched.testing import SolverTests, check_solver, checks, common, repeatability
from optsched.testing.checks import check_brute_force, check_proofs

if TYPE_CHECKING:
    from optsched import Limits, Monitor

TIME_LIMIT = 0.1


class FakeClock:
    """Stands in for the module `time`, so that the load of the machine does not count."""

    seconds = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        """Return the fake time."""
        return cls.seconds


class InOrder:
    """A correct solver: operations in the order of ids, where that is feasible."""

    name = "in order"
    options = MappingProxyType[str, str]({})

    def supports(self, problem: Any) -> bool:
        """Return a bool, as simple solvers do."""
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


class FindsNothing(InOrder):
    """Never reports."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:  # noqa: D102
        return Result("unknown")


class Overruns(InOrder):
    """Exceeds very short limits by 0.6 s."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:  # noqa: D102
        found = super().solve(problem, limits, monitor)
        if limits.time_limit == 0.05:
            FakeClock.seconds += limits.time_limit + 0.6
        return found


class IgnoresTarget(InOrder):
    """Works until the time limit when given a target."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:  # noqa: D102
        found = super().solve(problem, limits, monitor)
        if limits.target is not None:
            FakeClock.seconds += monitor.remaining
        return found


class DependsOnHashes(InOrder):
    """Proves something else where strings have other hashes."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:  # noqa: D102
        found = super().solve(problem, limits, monitor)
        if os.environ.get("PYTHONHASHSEED") == "0" and limits.iterations:
            monitor.bound((monitor.lower_bound or 0) + 1)
        return found


class IgnoresIterations(InOrder):
    """Ends for every limit but that of iterations."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:  # noqa: D102
        found = super().solve(problem, limits, monitor)
        while limits.iterations is not None and not monitor.should_stop():
            time.sleep(0.01)
        return found


class FalseBound(InOrder):
    """Claims that its only schedule is optimal."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:  # noqa: D102
        found = super().solve(problem, limits, monitor)
        monitor.bound(monitor.objective or 0)
        return found


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the fresh process, which takes longer than all other checks together."""
    monkeypatch.setattr(repeatability, "_in_fresh_process", lambda engine, steps: None)


def test_a_solver_that_ignores_iterations_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails; the suite does not wait for ever."""
    monkeypatch.setattr(common, "PATIENCE", 0.6)
    monkeypatch.setattr(checks, "OVERRUN", 60)
    with pytest.raises(AssertionError, match="did not end within"):
        checks.check_limits(IgnoresIterations(), (), 0.1)


def test_a_correct_solver_passes() -> None:
    """One schedule and no proof is enough."""
    report = check_solver(InOrder(), time_limit=TIME_LIMIT)
    assert not report.skipped and "check_limits" in str(report)


@pytest.mark.parametrize(
    ("bad", "only", "diagnosis"),
    [
        (FindsNothing, "check_feasible_and_bounded", "found nothing on any tiny"),
        (Overruns, "check_limits", "8x6: 0.65 s with limit 0.05"),
        (IgnoresTarget, "check_limits", "target ignored"),
    ],
)
@pytest.mark.usefixtures("one_process")
def test_a_wrong_solver_fails_one_check(
    bad: type[InOrder], only: str, diagnosis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fault, one line, by the limits that other packages get."""
    monkeypatch.setattr(checks, "OVERRUN", 0.5)
    monkeypatch.setattr(common, "time", FakeClock)
    with pytest.raises(AssertionError) as caught:
        check_solver(bad(), time_limit=TIME_LIMIT)
    failures = str(caught.value).splitlines()[1:]
    assert len(failures) == 1 and re.search(f"{only}: .*{diagnosis}", failures[0]), failures


@pytest.mark.parametrize(
    ("bad", "check", "diagnosis"),
    [
        (FalseBound, check_brute_force, "bound"),
        (InOrder, check_proofs, "expected optimal"),
        (DependsOnHashes, repeatability.check_reproducible, "in this process and a fresh one"),
    ],
)
def test_one_check_is_enough(bad: type[InOrder], check: Any, diagnosis: str) -> None:
    """Other checks may fail too, but not instead."""
    with pytest.raises(AssertionError, match=diagnosis):
        check(bad(), (), TIME_LIMIT)


def test_errors_name_their_problem() -> None:
    """Also those that a solver raises; a class instead of a solver is refused."""

    class Raises(InOrder):
        def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
            raise KeyError("oops")

    for check in ("check_brute_force", "check_feasible_and_bounded"):
        with pytest.raises(AssertionError, match=rf"{check}: \S.*: raised KeyError: 'oops'"):
            check_solver(Raises(), time_limit=TIME_LIMIT, only=[check])
    with pytest.raises(InputError, match="expected a name or a solver object, got <class"):
        check_solver(InOrder)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected a name or a solver object, got <class"):
        optsched.solve(JobShop([[(0, 1)]]), InOrder)  # type: ignore[arg-type]


class ShopsOnly(InOrder):
    """Supports job shops without windows."""

    def supports(self, problem: Any) -> Support:  # noqa: D102
        if not isinstance(problem, JobShop):
            return Support(False, "only shops")
        return Support(not problem.has_windows, "no deadlines")


class Nothing(InOrder):
    """Supports no problem."""

    def supports(self, problem: Any) -> Support:  # noqa: D102
        return Support(False, "on strike")


class Slow(ShopsOnly):
    """Takes 5 ms for every iteration."""

    iterations: ClassVar[list[int]] = []

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:  # noqa: D102
        self.iterations.append(limits.iterations or 0)
        time.sleep(0.005 * (limits.iterations or 0))
        return super().solve(problem, limits, monitor)


@pytest.mark.usefixtures("one_process")
def test_checks_of_unsupported_problems_are_skipped() -> None:
    """With the solver's reasons; a solver of which nothing was checked fails."""
    only = ["check_infeasible", "check_hostile_limits"]
    report = check_solver(ShopsOnly(), time_limit=TIME_LIMIT, only=only)
    assert set(report.skipped) == {"check_infeasible"} and len(report.seconds) == 2
    assert "no deadlines" in report.skipped["check_infeasible"]
    with pytest.raises(AssertionError, match=r"nothing of in order was checked:\n.*on strike"):
        check_solver(Nothing(), time_limit=TIME_LIMIT)

    class Tests(SolverTests):
        solver = ShopsOnly()

    with pytest.raises(pytest.skip.Exception, match="no deadlines"):
        Tests().test_infeasible()


def test_checks_are_chosen_by_name() -> None:
    """`only`, `exclude`, and unknown names."""
    bad = FindsNothing()
    both = ["check_infeasible", "check_feasible_and_bounded"]
    check_solver(bad, time_limit=TIME_LIMIT, only=both, exclude=both[1:])
    with pytest.raises(InputError, match=r"only: unknown check 'silent'; .*check_limits"):
        check_solver(bad, only=["silent"])
    with pytest.raises(InputError, match="exclude: expected a list of names"):
        check_solver(bad, exclude="check_limits")


@pytest.mark.usefixtures("one_process")
def test_slow_solvers_repeat_few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as take a moment, and equally many in every run."""
    monkeypatch.setattr(repeatability, "REPEATED", 0.04)
    Slow.iterations.clear()
    repeatability.check_reproducible(Slow(), (), TIME_LIMIT)
    repeated = Slow.iterations[-4:]
    assert 1 <= repeated[0] <= 16 and len(set(repeated)) == 1
    assert sum(Slow.iterations) <= 100


def test_a_solver_that_cannot_be_pickled_is_checked_in_this_process() -> None:
    """A local class fails no check for being local."""

    class Local(InOrder):
        pass

    assert repeatability._in_fresh_process(Local(), [1]) is None


# every installed solver passes the conformance suite, whatever kind of problem it is for

ENGINES = [
    (kind, name)
    for kind in KINDS
    for name in solvers(kind)
    if kind != "jobarray"  # its engines are those of job shops
]

PROVE = {"auto", "branch_and_bound", "cpsat", "counts"}
"""These close every tiny problem, but for periodic ones: there `cpsat` alone does."""

BY_DAY = {
    ("jobshop", "auto"), ("jobshop", "dispatch"), ("periodic", "cpsat"), ("quota", "auto"),
    ("gpus", "counts"),
}  # fmt: skip
"""An engine of each make: a portfolio of compiled searches, a rule, CP-SAT, NumPy."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*e, marks=[] if e in BY_DAY else pytest.mark.slow) for e in ENGINES],
)
def test_conformance(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    """All checks; those with processes and clocks only in the long run."""
    long = request.config.option.markexpr != "not slow"
    exclude = [] if long else ["check_reproducible", "check_limits"]
    exact = name in PROVE and (kind, name) != ("periodic", "auto")
    print(check_solver(solver(name, kind), time_limit=0.3, exact=exact, exclude=exclude))


def test_the_names_of_the_design() -> None:
    """Every kind by `auto` and `cpsat`, and but for periods by `genetic`."""
    for kind in KINDS:
        names = {"auto", "cpsat"} | ({"genetic"} if kind != "periodic" else set())
        missing = names - set(solvers(kind))
        assert not missing, kind
    assert "branch_and_bound" in solvers("jobshop") and "dispatch" in solvers("jobarray")
    assert "dispatch" in solvers("periodic") and "greedy_quota" in solvers("quota")
    assert {"eha", "pts", "hybrid", "counts", "branch_and_bound"} <= set(solvers("gpus"))


# a small part of the fuzzing that ``make fuzz`` does, far from the seeds it begins with

SEEDS = {"recompute": 2, "period": 10}


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_no_false_claims(kind: str) -> None:
    """Bounds, proofs and schedules of all solvers against brute force."""
    found: list[str] = []
    judged = 0
    for seed in range(10**6, 10**6 + SEEDS.get(kind, 12)):
        try:
            found += fuzz.failures(kind, seed, Counter())
            judged += 1
        except fuzz.TooLarge:
            continue
    assert not found, "\n".join(found)
    assert judged


class Lies:
    """A solver that proves too much, or finds nothing."""

    name = "lies"
    options: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, claim: str) -> None:
        self.claim = claim

    def supports(self, problem: Any) -> bool:
        """Whatever there is."""
        return True

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Claim it."""
        if self.claim == "bound":
            monitor.bound(10**6, self.name)
        return Result("infeasible" if self.claim == "infeasible" else "unknown", reason="so I say")


@pytest.mark.parametrize(
    ("claim", "said"),
    [("bound", "bound 1000000 >"), ("infeasible", "called infeasible"), ("nothing", "no answer")],
)
def test_every_false_claim_is_seen(claim: str, said: str) -> None:
    """A bound above the optimum, a refuted instance that has a schedule, no answer at all."""
    problem = fuzz.draw("shop", 0)
    best = fuzz.best_order(problem)
    run = fuzz.Run(Lies(claim), {"time_limit": 60}, must_answer=True)  # type: ignore[arg-type]
    assert best is not None and said in fuzz.fault(problem, run, best)
