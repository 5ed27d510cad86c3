"""`auto` for quota plans: special algorithm, multiple choice, branch and bound, then CP-SAT."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.problems.quota.problem import QuotaPlan
from optsched.solving.result import Result
from optsched_solvers.quota import cpsat as quota_cpsat
from optsched_solvers.quota.exact import QuotaExact
from optsched_solvers.quota.greedy import GreedyQuota
from optsched_solvers.quota.plans import supported

if TYPE_CHECKING:
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.problem import Problem
    from optsched.solving.solver import Support

FIRST: Final = 10_000
"""Iterations of CP-SAT at least, for a first answer where localities defeat greedy placement."""


def supports(problem: Problem) -> Support:
    """Every plan: what nothing proves, the greedy answer bounds."""
    return supported(problem, None)


def instant(problem: Problem) -> bool:
    """Whether the special algorithm answers at once."""
    return QuotaExact().instant(problem)


def solve(problem: Problem, limits: Limits, monitor: Monitor) -> Result:
    """With one type the exact algorithm; else, or if a locality fails, greedy, then CP-SAT.

    The option ``joint`` asks CP-SAT at once, for the fewest nodes spanned and GPUs moved as well.
    """
    assert isinstance(problem, QuotaPlan)
    joint = limits.options.get("joint", False)
    if not isinstance(joint, bool):
        raise InputError(f"options.joint: expected true or false, got {joint!r:.60}")
    given = _without(limits)
    if joint and quota_cpsat.supports(problem):
        return quota_cpsat.solve(problem, given, monitor)
    for engine in (QuotaExact(), GreedyQuota()):
        if engine.supports(problem):
            found = engine.solve(problem, given, monitor)
            if monitor.should_stop():
                return found
            break
    if quota_cpsat.supports(problem):
        if limits.iterations is not None and monitor.objective is None:
            given = replace(given, iterations=max(limits.iterations, FIRST))
        return quota_cpsat.solve(problem, given, monitor)
    return Result("unknown", reason=quota_cpsat.supports(problem).reason)


def _without(limits: Limits) -> Limits:
    """The same limits; the options are those of `auto`, not of its parts."""
    return replace(limits, options={})


__all__ = ["instant", "solve", "supports"]
