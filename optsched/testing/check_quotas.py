"""Checks of solvers that decide quotas (`QuotaPlan`), against all choices of small plans."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import optsched
from optsched.solving.solver import kinds
from optsched.testing.check_answers import (
    SHORT,
    STEPS,
    check_exact,
    check_runs,
    check_status,
    check_support,
    judge,
)
from optsched.testing.check_common import supported as taken_by
from optsched.testing.quota_problems import optimum, quota_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.quota.problem import QuotaPlan
    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

CASES = 60


def decides_quotas(engine: Solver) -> bool:
    """Whether the solver is for quota plans at all."""
    return "quota" in kinds(engine)


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
    return taken_by(engine, quota_problems(cases))


def judged(problem: QuotaPlan, result: Result) -> None:
    """Allowed, verified, worth what it says, bounded from below by no more than the optimum."""
    judge(problem, result, optimum(problem))


def check_quota_plans(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Random plans of every objective against brute force; refusals have a reason."""
    check_support(engine, quota_problems(CASES), judged, time_limit)


def check_quota_runs(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Same seed and iterations, same quotas; a warm start is never lost; a stop is obeyed."""

    def reference(problem: QuotaPlan, first: Result) -> Result:
        return optsched.solve(problem, "cpsat", time_limit=10)

    check_runs(engine, supported(engine)[:8], judged, reference)


def check_quota_status(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The engine's own bounds and reasons hold, without what `optsched.solve` would put right."""
    # of what is plainly infeasible engines are never asked
    asked = [problem for problem in supported(engine) if not problem.infeasibility()]
    check_status(engine, asked, optimum, time_limit)


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
    check_exact(engine, supported(engine), optimum, (time_limit, 8 * time_limit))


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
