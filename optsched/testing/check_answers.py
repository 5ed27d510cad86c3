"""What the checks of solvers for quotas and for GPUs share: their answers, whatever these are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optsched
from optsched.errors import UnsupportedProblem
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

SHORT = 0.2
"""Seconds for a problem of a few jobs or GPUs, which searches without proof use up."""

STEPS = 500
"""Iterations for runs that must repeat."""


def judge(problem: Any, result: Result, best: int | None) -> None:
    """Allowed, verified, worth what it says, bounded from below by no more than the optimum."""
    name = problem.name
    assert not result.contradiction, f"{name}: {result.contradiction}"
    if result.schedule is None:
        assert result.objective is None, f"{name}: an objective without a schedule"
        assert result.status in ("infeasible", "unknown"), f"{name}: {result.status}, no schedule"
        assert result.status == "unknown" or best is None, f"{name}: called infeasible, it is not"
        return
    assert best is not None, f"{name}: solved the unsolvable"
    violations = optsched.verify(result.schedule)
    assert not violations, f"{name}: {violations[0].message}"
    faults = problem.check(result.schedule)
    assert not faults, f"{name}: {faults[0]}"
    assert problem.evaluate(result.schedule) == result.objective, f"{name}: objective is wrong"
    assert result.objective is not None and result.objective >= best, (
        f"{name}: {result.objective} below the optimum {best}"
    )
    bound = result.lower_bound
    assert bound is None or bound <= best, f"{name}: bound {bound} above the optimum {best}"
    expected = "optimal" if bound == result.objective else "feasible"
    assert result.status == expected, f"{name}: status {result.status}, should be {expected}"


def check_support(
    engine: Solver,
    problems: Iterable[Any],
    judged: Callable[[Any, Result], None],
    time_limit: float,
) -> None:
    """What it takes is answered rightly; refusals have a reason."""
    for problem in problems:
        support = engine.supports(problem)
        if not support:
            assert getattr(support, "reason", "?"), f"{problem.name}: refused without a reason"
            try:
                optsched.solve(problem, engine, time_limit=0)
            except UnsupportedProblem:
                continue
            raise AssertionError(f"{problem.name}: refused by supports(), but solve() takes it")
        judged(problem, optsched.solve(problem, engine, time_limit=min(time_limit, SHORT)))


def check_runs(
    engine: Solver,
    problems: Iterable[Any],
    judged: Callable[[Any, Result], None],
    reference: Callable[[Any, Result], Result],
) -> None:
    """Same seed and iterations, same answer; a warm start is never lost; a stop is obeyed.

    `reference` gives the warm start of a problem, knowing the engine's own result.
    """
    for problem in problems:
        first, again = (optsched.solve(problem, engine, iterations=STEPS, seed=3) for _ in "ab")
        assert first.schedule == again.schedule, f"{problem.name}: two runs differ"
        judged(problem, first)
        best = reference(problem, first)
        if best.schedule is not None:
            held = optsched.solve(problem, engine, warm_start=best.schedule, iterations=1)
            assert held.objective == best.objective, f"{problem.name}: lost its warm start"
        judged(problem, optsched.solve(problem, engine, time_limit=0))


def check_status(
    engine: Solver,
    problems: Iterable[Any],
    optimum: Callable[[Any], int | None],
    time_limit: float,
) -> None:
    """The engine's own bounds and reasons hold, without what `optsched.solve` would put right."""
    for problem in problems:
        limits = Limits(time_limit=min(time_limit, SHORT))
        monitor = Monitor(limits)
        returned = engine.solve(problem, limits, monitor)
        assert not monitor.contradiction, f"{problem.name}: {monitor.contradiction}"
        best = optimum(problem)
        if returned is not None and returned.status == "infeasible":
            assert best is None, f"{problem.name}: called infeasible, it is not"
            assert returned.reason, f"{problem.name}: infeasible without a reason"
        if monitor.objective is not None:
            assert best is not None and monitor.objective >= best, f"{problem.name}: too good"
        if monitor.lower_bound is not None and best is not None:
            assert monitor.lower_bound <= best, f"{problem.name}: bound above the optimum"


def check_exact(
    engine: Solver,
    problems: Iterable[Any],
    optimum: Callable[[Any], int | None],
    time_limits: tuple[float, ...],
) -> None:
    """Every problem is proved within the first limit; or the next, as the machine may be busy."""
    for problem in problems:
        best = optimum(problem)
        expected = "optimal" if best is not None else "infeasible"
        for limit in time_limits:
            result = optsched.solve(problem, engine, time_limit=limit)
            if result.status == expected:
                break
        assert result.status == expected, (
            f"{problem.name}: {result.status} after {result.seconds:.2f} s, expected {expected}"
        )
        judge(problem, result, best)
