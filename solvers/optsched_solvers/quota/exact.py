"""`quota`: the special exact algorithm that fits a quota plan, then placement."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.kernels.plain_python import in_python
from optsched.problems.quota.bounds import level, sizes_within
from optsched.problems.quota.problem import QuotaPlan
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load, load_behind, loaded
from optsched_solvers.quota.first import first_answer
from optsched_solvers.quota.ground import (
    NOT_LOADED,
    PLACEMENT,
    fill,
    is_few,
    offer,
    ready,
    supported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched_solvers.quota import Certificate

INSTANT: Final = 50_000
"""Allowed sizes, or GPUs, up to which an answer takes milliseconds."""


class QuotaExact:
    """Exact in milliseconds for one type of GPU, whatever the objective.

    Apportionment (largest remainder), marginal greedy for concave utilities when all jobs run,
    lexicographic max-min, bisection on the makespan, and multiple-choice knapsack for all other
    sums; which one fits is detected. Node placement comes afterwards: it never costs utility
    unless a locality cannot be kept; then the quotas are shrunk, and only the bound is proved.
    """

    name = "quota"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """Small plans: the smallest in plain Python, the others once the kernels are loaded."""
        if not isinstance(problem, QuotaPlan) or len(problem.kinds) != 1:
            return False
        some = 0 if problem.is_plain else problem.n_options
        small = max(some, problem.n_gpus) <= INSTANT
        needed = [*_modules(algorithm(problem)), *([PLACEMENT] if problem.nodes else [])]
        return small and (is_few(problem) or loaded(*needed))

    def supports(self, problem: Problem) -> Support:
        """Plans with one type of GPU."""
        said = supported(problem, None)
        if said and len(problem.kinds) > 1:  # type: ignore[attr-defined]
            return Support(
                False, "it takes one type of GPU; cpsat decides types and quotas jointly"
            )
        return said

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Decide once; iterations are not counted."""
        assert isinstance(problem, QuotaPlan)
        monitor.advance(1)
        few, kernels = is_few(problem), _modules(algorithm(problem))
        if not (few or load(monitor, *kernels)) or not ready(problem, monitor):
            first_answer(problem, monitor)
            return Result("unknown", reason=NOT_LOADED)
        sizes, bound = allocate(problem)
        monitor.bound(bound, self.name)
        if not offer(problem, monitor, sizes, None, self.name):
            return Result("unknown", reason="no placement was found that keeps the localities")
        if few:
            load_behind(*kernels)  # for the next question
        return Result("unknown")


def algorithm(plan: QuotaPlan) -> str:
    """Name of the kernel of `optsched_solvers.quota` that solves a plan with one type, or `bisect`.

    The last one is for levels of sizes with gaps, or that more GPUs make worse.
    """
    if plan.objective == "proportional":
        return "proportional"
    if plan.objective == "max_min" and plan.is_plain:
        return "max_min"
    within = plan.bounds is not None
    if plan.objective == "sum":
        everybody = within and all(job.must_run for job in plan.jobs)
        return "concave_sum" if everybody and is_concave(plan) else "choice"
    if within and _is_monotone(plan):
        return "max_min_table" if plan.objective == "max_min" else "makespan"
    return "bisect"


def is_concave(plan: QuotaPlan) -> bool:
    """Whether no job gains more by a GPU than by the one before, with no gap among its sizes.

    A gang minimum beside "not at all", {0} and [lo, hi], is such a gap.
    """
    table = plan.table
    inside = np.diff(table.rows()) == 0
    if bool((inside & (np.diff(table.size) != 1)).any()):
        return False
    gain = np.diff(-table.cost)
    both = inside[1:] & inside[:-1]
    return not bool((both & (np.diff(gain) > 0)).any())


def _is_monotone(plan: QuotaPlan) -> bool:
    """Whether no job is worse off with more GPUs."""
    table = plan.table
    return not bool(((np.diff(table.rows()) == 0) & (np.diff(table.cost) > 0)).any())


def allocate(plan: QuotaPlan) -> tuple[IntArray, int]:
    """Optimal quotas of a feasible plan with one type, and what no answer can beat."""
    if not plan.jobs:
        return np.zeros(0, np.int64), 0
    with in_python(is_few(plan)):
        return _allocated(plan)


def _allocated(plan: QuotaPlan) -> tuple[IntArray, int]:
    chosen = algorithm(plan)
    if chosen == "bisect":
        return _smallest(plan), level(plan)
    kernel, arguments = _kernel(plan, chosen)
    if chosen == "choice":
        from optsched_solvers.quota.multiple_choice import HardChoice

        try:
            found = kernel(*arguments)
        except HardChoice as hard:
            return np.asarray(hard.chosen, np.int64), -hard.bound
        return found, plan.worth(found)
    found = kernel(*arguments)
    if chosen == "concave_sum":
        return found, plan.worth(found)
    best = plan.lower_bound()
    if plan.highest and plan.worth(found) > best:  # weights far apart are rounded in kernels
        found = _smallest(plan)
    return found, best


def certificate(plan: QuotaPlan) -> Certificate | None:
    """A proof that the quotas of `allocate` are optimal, checked on the answer alone.

    None where no kernel gives one: sizes with gaps under ``"max_min"`` and ``"makespan"`` (there
    the plan's own bound is exact), or no jobs.

    Raises
    ------
    InputError
        The plan has no answer, or several types of GPU.
    """
    if len(plan.kinds) != 1:
        raise InputError(f"plan: expected one type of GPU, got {len(plan.kinds)}")
    if reason := plan.infeasibility():
        raise InputError(f"plan: {reason}")
    chosen = algorithm(plan)
    if chosen == "bisect" or not plan.jobs:
        return None
    kernel, arguments = _kernel(plan, chosen)
    with in_python(is_few(plan)):
        proof: Certificate = kernel(*arguments, certificate=True)[1]
    return proof


def _kernel(plan: QuotaPlan, chosen: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function on bare arrays, and its arguments."""
    from optsched_solvers import quota

    kernel: Callable[..., Any] = getattr(quota, chosen)
    if chosen in ("proportional", "max_min"):
        first = plan.scores if chosen == "proportional" else plan.weights
        return kernel, (first, plan.n_gpus, *plan.required_bounds)
    table = plan.table
    value = table.cost if chosen == "makespan" else -table.cost
    if chosen == "choice":
        return kernel, (table.ptr, table.size, value, plan.n_gpus)
    return kernel, (table.ptr, value, plan.required_bounds[0], plan.n_gpus)


def _smallest(plan: QuotaPlan) -> IntArray:
    """The smallest sizes that reach the best level, then the worst off first."""
    smallest = sizes_within(plan, level(plan))
    return fill(plan, smallest, np.zeros(len(smallest), np.int64))[0]


def _modules(algorithm: str) -> tuple[str, ...]:
    """Where the kernels are, to load them without missing a limit."""
    from optsched_solvers import quota

    home = quota._HOME.get(algorithm)
    others = ("inputs", "scores", "multiple_choice_input", "climbing:climb")
    return tuple(f"optsched_solvers.quota.{name}" for name in (home, *others) if name)


__all__ = ["QuotaExact", "algorithm", "allocate", "certificate", "is_concave"]
