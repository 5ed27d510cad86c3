"""`quota`: the special exact algorithm that fits a plan, then placement; and `greedy_quota`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.kernels.plain_python import in_python
from optsched.problems.quota.options import MOST_OPTIONS
from optsched.problems.quota.problem import QuotaPlan
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load, load_behind, loaded
from optsched_solvers.quota.plans import (
    NOT_LOADED,
    PLACEMENT,
    fill,
    first_answer,
    greedy,
    is_few,
    offer,
    ready,
    supported,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        if not offer(problem, monitor, sizes, np.zeros(len(sizes), np.int64), self.name):
            return Result("unknown", reason="no placement was found that keeps the localities")
        if few and kernels:
            load_behind(*kernels)  # for the next question
        return Result("unknown")


class GreedyQuota:
    """A good answer to any quota plan at once; what it proves is the plan's own bound.

    Sums: every job takes what is best at the prices of the Lagrangian dual, the best bargains
    first, then the best gain per GPU while any fits. Levels: the smallest sizes at the lowest
    level that packs. Shares: largest remainders, which are optimal.
    """

    name = "greedy_quota"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """Small plans."""
        return isinstance(problem, QuotaPlan) and not problem.nodes and len(problem.jobs) <= 200

    def supports(self, problem: Problem) -> Support:
        """Every plan."""
        most = None if isinstance(problem, QuotaPlan) and problem.is_plain else MOST_OPTIONS
        return supported(problem, most)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Decide once; iterations are not counted."""
        assert isinstance(problem, QuotaPlan)
        monitor.advance(1)
        if not ready(problem, monitor):
            first_answer(problem, monitor)
            return Result("unknown", reason=NOT_LOADED)
        found = greedy(problem)
        if found is None:
            return Result("unknown", reason="the jobs that must run found no place together")
        if not offer(problem, monitor, *found, self.name):
            return Result("unknown", reason="no placement was found that keeps the localities")
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
    chosen = algorithm(plan)
    with in_python(is_few(plan)):
        if chosen == "choice":
            from optsched_solvers.quota.multiple_choice import options, solve

            given = options(*_arguments(plan, chosen))
            solved = solve(given)
            return given.size[solved.position], -solved.bound
        if chosen != "bisect":
            found = _solved(plan, chosen)[0]
    if chosen == "concave_sum":
        return found, plan.worth(found)
    best = plan.lower_bound()
    if chosen == "bisect" or (plan.highest and plan.worth(found) > best):
        found = _smallest(plan)  # kernels round weights that are far apart
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
    with in_python(is_few(plan)):
        proof = _solved(plan, chosen)[1]
        proof.found  # noqa: B018 (it is checked now)
    return proof


def _solved(plan: QuotaPlan, chosen: str) -> tuple[IntArray, Certificate]:
    """The answer of a function on bare arrays."""
    from optsched_solvers import quota

    found: tuple[IntArray, Certificate] = getattr(quota, chosen)(*_arguments(plan, chosen))
    return found


def _arguments(plan: QuotaPlan, chosen: str) -> tuple[Any, ...]:
    if chosen in ("proportional", "max_min"):
        first = plan.scores if chosen == "proportional" else plan.weights
        return first, plan.n_gpus, *plan.required_bounds
    table = plan.table
    value = table.cost if chosen == "makespan" else -table.cost
    if chosen == "choice":
        return table.ptr, table.size, value, plan.n_gpus
    return table.ptr, value, plan.required_bounds[0], plan.n_gpus


def _smallest(plan: QuotaPlan) -> IntArray:
    """The smallest sizes that reach the best level, then the worst off first."""
    smallest = plan.sizes_within(plan.level)
    return fill(plan, smallest, np.zeros(len(smallest), np.int64))[0]


def _modules(algorithm: str) -> tuple[str, ...]:
    """Where the kernels are, to load them without missing a limit."""
    return ("optsched_solvers.quota.multiple_choice_core",) if algorithm == "choice" else ()
