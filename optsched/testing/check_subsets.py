"""Checks of solvers that choose GPUs (`SubsetChoice`), against all subsets of small clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optsched
from optsched.errors import UnsupportedProblem
from optsched.limits import Limits
from optsched.monitor import Monitor
from optsched.registry import answers
from optsched.testing.subset_problems import optimum, subset_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.subset import SubsetChoice
    from optsched.registry import Solver
    from optsched.result import Result

CASES = 40
SHORT = 0.2
"""Seconds for a choice of a few GPUs."""

STEPS = 500
"""Iterations for runs that must repeat."""


def chooses_gpus(engine: Solver) -> bool:
    """Whether the solver is for subset choice at all."""
    return "resources" in answers(engine)


def supported(engine: Solver) -> list[SubsetChoice]:
    """Those of the suite's problems that the engine takes."""
    return [problem for problem in subset_problems(CASES) if engine.supports(problem)]


def judged(problem: SubsetChoice, result: Result) -> None:
    """Allowed, verified, worth what it says, bounded from below by no more than the optimum."""
    name, best = problem.name, optimum(problem)
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


def check_subset_choices(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Random clusters, tenants and policies against brute force; refusals have a reason."""
    for problem in subset_problems(CASES):
        support = engine.supports(problem)
        if not support:
            assert getattr(support, "reason", "?"), f"{problem.name}: refused without a reason"
            try:
                optsched.solve(problem, engine, time_limit=0)
            except UnsupportedProblem:
                continue
            raise AssertionError(f"{problem.name}: refused by supports(), but solve() takes it")
        judged(problem, optsched.solve(problem, engine, time_limit=min(time_limit, SHORT)))


def check_subset_runs(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Same seed and iterations, same choice; a warm start is never lost; a stop is obeyed."""
    for problem in supported(engine)[:8]:
        first, again = (optsched.solve(problem, engine, iterations=STEPS, seed=3) for _ in "ab")
        assert first.schedule == again.schedule, f"{problem.name}: two runs differ"
        judged(problem, first)
        if first.schedule is not None:
            best = optsched.solve(problem, "counts")
            held = optsched.solve(problem, engine, warm_start=best.schedule, iterations=1)
            assert held.objective == best.objective, f"{problem.name}: lost its warm start"
        none = optsched.solve(problem, engine, time_limit=0)
        judged(problem, none)


def check_subset_status(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The engine's own bounds and reasons hold, without what `optsched.solve` would put right."""
    for problem in supported(engine):
        limits = Limits(time_limit=min(time_limit, SHORT))
        monitor = Monitor(limits)
        returned = engine.solve(problem, limits, monitor)
        best = optimum(problem)
        if returned is not None and returned.status == "infeasible":
            assert best is None, f"{problem.name}: called infeasible, it is not"
            assert returned.reason, f"{problem.name}: infeasible without a reason"
        if monitor.objective is not None:
            assert best is not None and monitor.objective >= best, f"{problem.name}: too good"
        if monitor.lower_bound is not None and best is not None:
            assert monitor.lower_bound <= best, f"{problem.name}: bound above the optimum"


def check_subset_exact(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Every choice is proved within the limit."""
    for problem in supported(engine):
        expected = "infeasible" if optimum(problem) is None else "optimal"
        for limit in (time_limit, 4 * time_limit):  # the machine may be busy: a second try
            result = optsched.solve(problem, engine, time_limit=limit)
            if result.status == expected:
                break
        assert result.status == expected, (
            f"{problem.name}: {result.status} after {result.seconds:.2f} s, expected {expected}"
        )
        judged(problem, result)


SUBSET_CHECKS = (check_subset_choices, check_subset_runs, check_subset_status)
