"""Checks of solvers that decide quotas (`QuotaPlan`), against all choices of small plans."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import optsched
from optsched.errors import UnsupportedProblem
from optsched.limits import Limits
from optsched.monitor import Monitor
from optsched.registry import answers
from optsched.testing.quota_problems import optimum, quota_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.quota import QuotaPlan
    from optsched.registry import Solver
    from optsched.result import Result

CASES = 60
SHORT = 0.2
"""Seconds for a plan of a few jobs, which searches without proof use up."""

STEPS = 500
"""Iterations for runs that must repeat."""


def decides_quotas(engine: Solver) -> bool:
    """Whether the solver is for quota plans at all."""
    return "quotas" in answers(engine)


_warm: set[int] = set()


def warm_up(engine: Solver) -> None:
    """Solve something of each kind once: compiling at the first call must not count below."""
    if id(engine) in _warm:
        return
    _warm.add(id(engine))
    for problem in quota_problems(16):
        with contextlib.suppress(Exception):  # what is wrong here, the checks find and name
            if engine.supports(problem):
                optsched.solve(problem, engine, time_limit=60, iterations=100)


def supported(engine: Solver, cases: int = CASES) -> list[QuotaPlan]:
    """Those of the suite's plans that the engine takes."""
    return [problem for problem in quota_problems(cases) if engine.supports(problem)]


def judged(problem: QuotaPlan, result: Result) -> None:
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


def check_quota_plans(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Random plans of every objective against brute force; refusals have a reason."""
    for problem in quota_problems(CASES):
        support = engine.supports(problem)
        if not support:
            assert getattr(support, "reason", "?"), f"{problem.name}: refused without a reason"
            try:
                optsched.solve(problem, engine, time_limit=0)
            except UnsupportedProblem:
                continue
            raise AssertionError(f"{problem.name}: refused by supports(), but solve() takes it")
        judged(problem, optsched.solve(problem, engine, time_limit=min(time_limit, SHORT)))


def check_quota_runs(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Same seed and iterations, same quotas; a warm start is never lost; a stop is obeyed."""
    for problem in supported(engine)[:8]:
        first, again = (optsched.solve(problem, engine, iterations=STEPS, seed=3) for _ in "ab")
        assert first.schedule == again.schedule, f"{problem.name}: two runs differ"
        judged(problem, first)
        best = optsched.solve(problem, "cpsat", time_limit=10)
        if best.schedule is not None:
            held = optsched.solve(problem, engine, warm_start=best.schedule, iterations=1)
            assert held.objective == best.objective, f"{problem.name}: lost its warm start"
        judged(problem, optsched.solve(problem, engine, time_limit=0))


def check_quota_status(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The engine's own bounds and reasons hold, without what `optsched.solve` would put right."""
    for problem in supported(engine):
        if problem.infeasibility():
            continue  # engines are never asked
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


def check_quota_order(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The order of the jobs does not matter to what is proved."""
    rng = random.Random(5)
    for problem in supported(engine)[:20]:
        jobs = list(problem.jobs)
        rng.shuffle(jobs)
        other = problem.changed(jobs=jobs)
        one, two = (
            optsched.solve(p, engine, time_limit=min(time_limit, SHORT)) for p in (problem, other)
        )
        judged(problem, one)
        if one.status == two.status == "optimal":
            assert one.objective == two.objective, f"{problem.name}: the order of jobs matters"


def check_quota_exact(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Every plan is proved within the limit."""
    warm_up(engine)
    for problem in supported(engine):
        expected = "infeasible" if optimum(problem) is None else "optimal"
        for limit in (time_limit, 8 * time_limit):  # the machine may be busy: a second try
            result = optsched.solve(problem, engine, time_limit=limit)
            if result.status == expected:
                break
        assert result.status == expected, (
            f"{problem.name}: {result.status} after {result.seconds:.2f} s, expected {expected}"
        )
        judged(problem, result)


def check_quota_traces(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The plan and the global random state are as before."""
    for problem in supported(engine)[:4]:
        before, state = problem.sha256, random.getstate()
        optsched.solve(problem, engine, iterations=STEPS)
        assert random.getstate() == state, f"{problem.name}: drew from the global generator"
        assert problem.changed().sha256 == before, f"{problem.name}: was modified"


QUOTA_CHECKS = (
    check_quota_plans, check_quota_runs, check_quota_status, check_quota_order, check_quota_traces,
)  # fmt: skip
