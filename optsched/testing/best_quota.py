"""The best quotas by trying all of them, from the jobs' own fields; shares no code with solvers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.problems.quota.job import QuotaJob
    from optsched.problems.quota.problem import QuotaPlan

Option = tuple[str, int]
"""Type and GPUs; ``("", 0)`` for none."""


def best_quota(plan: QuotaPlan) -> int | None:
    """The least cost of any answer to a small plan, as `QuotaPlan.evaluate` counts; None: none."""
    found = list(answers(plan))
    if not found:
        return None
    cost = cost_of(plan)
    least: int = min(cost(choice) for choice in found)
    return least


def answers(plan: QuotaPlan) -> Iterator[tuple[Option, ...]]:
    """All choices of type and size that respect budgets, bounds, nodes and localities."""
    budget = dict(zip(plan.kinds, plan.budgets, strict=True))
    options = [list(_options(job, budget)) for job in plan.jobs]
    wanted = None
    if plan.objective == "proportional":
        wanted = min(sum(budget.values()), sum(rows[-1][1] for rows in options if rows))
    for choice in product(*options):
        used = dict.fromkeys(budget, 0)
        for kind, gpus in choice:
            if gpus:
                used[kind] += gpus
        if any(used[kind] > budget[kind] for kind in used):
            continue
        if wanted is not None and sum(used.values()) != wanted:
            continue
        if _placeable(plan, choice):
            yield choice


def _options(job: QuotaJob, budget: dict[str, int]) -> Iterator[Option]:
    if not job.must_run:
        yield "", 0
    for kind, gpus in budget.items():
        for size in range(1, gpus + 1):
            if index(job, kind, size) is not None:
                yield kind, size


def index(job: QuotaJob, kind: str, size: int) -> int | None:
    """Where in the job's tables a size on a type is; None if it is not allowed."""
    one = {key: _pick(getattr(job, key), kind)
           for key in ("sizes", "minimum", "maximum", "utility", "rates")}  # fmt: skip
    if one["sizes"] is _ABSENT or one["minimum"] is _ABSENT or one["maximum"] is _ABSENT:
        return None
    if one["utility"] is _ABSENT or one["rates"] is _ABSENT:
        return None
    if one["sizes"] is not None:
        return one["sizes"].index(size) if size in one["sizes"] else None
    at = size - one["minimum"]
    table = one["utility"] or one["rates"]
    inside = at >= 0 and (one["maximum"] is None or size <= one["maximum"])
    return at if inside and (table is None or at < len(table)) else None


_ABSENT: Any = object()


def _pick(given: Any, kind: str) -> Any:
    return given.get(kind, _ABSENT) if isinstance(given, Mapping) else given


def cost_of(plan: QuotaPlan) -> Any:
    """The cost of a choice as a function, by the definition of the objective."""
    unit = plan.resolution
    if plan.objective == "proportional":
        exact = shares(plan)
        floors = [math.floor(unit * q) for q in exact]
        return lambda choice: sum(
            abs(unit * gpus - q) for (_, gpus), q in zip(choice, floors, strict=True)
        )

    def one(job: QuotaJob, option: Option) -> int:
        kind, gpus = option
        if gpus == 0:
            return -round(job.idle * (job.weight * unit))
        at = index(job, kind, gpus)
        if plan.objective == "makespan":
            rate = _pick(job.rates, kind)[at]
            return math.ceil(Fraction((job.work or 0) * unit, round(unit * rate)))
        utility = gpus if job.utility is None else _pick(job.utility, kind)[at]
        if plan.objective == "sum":
            return -round(utility * (job.weight * unit))
        level: float = unit * utility / job.weight
        return -math.floor(level)

    def all_of(choice: tuple[Option, ...]) -> int:
        costs = [one(job, option) for job, option in zip(plan.jobs, choice, strict=True)]
        if plan.objective == "sum":
            return sum(costs)
        return max(costs, default=0)

    return all_of


def shares(plan: QuotaPlan) -> list[Fraction]:
    """Clipped shares mu S with the sum min(G, sum hi), by walking over the breakpoints of mu."""
    budget = plan.budgets[0]
    bounds = []
    for job in plan.jobs:
        sizes = [g for g in range(1, budget + 1) if index(job, plan.kinds[0], g) is not None]
        bounds.append((Fraction(sizes[0]), Fraction(sizes[-1])))
    scores = [Fraction(job.score or 0) for job in plan.jobs]
    if not any(scores):
        scores = [Fraction(1)] * len(scores)
    total = min(Fraction(budget), sum((hi for _, hi in bounds), Fraction(0)))
    rated = [j for j, s in enumerate(scores) if s > 0]
    others = [j for j, s in enumerate(scores) if s == 0]
    least = sum((bounds[j][0] for j in others), Fraction(0))
    most = sum((bounds[j][1] for j in rated), Fraction(0))
    first = min(total - least, most)
    found = [Fraction(0)] * len(scores)
    for group, amount, weight in (
        (rated, first, scores), (others, total - first, [Fraction(1)] * len(scores)),
    ):  # fmt: skip
        marks = sorted({bounds[j][side] / weight[j] for j in group for side in (0, 1)})
        for left, right in zip(marks, [*marks[1:], marks[-1]] if marks else [], strict=True):
            at_left = [min(max(left * weight[j], bounds[j][0]), bounds[j][1]) for j in group]
            moving = [j for j in group if bounds[j][0] / weight[j] <= left < bounds[j][1]
                      / weight[j]]  # fmt: skip
            speed = sum((weight[j] for j in moving), Fraction(0))
            rest = amount - sum(at_left)
            level = left + rest / speed if speed else left
            if rest == 0 or (speed and left <= level <= right):
                for j in group:
                    found[j] = min(max(level * weight[j], bounds[j][0]), bounds[j][1])
                break
    return found


def _placeable(plan: QuotaPlan, choice: tuple[Option, ...]) -> bool:
    """Whether the choice can be put on the nodes under all localities, by trying everything."""
    if not plan.nodes or all(job.locality == "any" for job in plan.jobs):
        return True
    free = tuple(node.gpus for node in plan.nodes)
    kinds = tuple(node.type for node in plan.nodes)
    asked = tuple(
        (kind, gpus, job.locality)
        for (kind, gpus), job in zip(choice, plan.jobs, strict=True)
        if gpus
    )
    return _fits(asked, free, free, kinds)


@cache
def _fits(asked: Any, left: Any, free: Any, kinds: Any) -> bool:
    if not asked:
        return True
    (kind, gpus, locality), rest = asked[0], asked[1:]
    largest = max((f for f, k in zip(free, kinds, strict=True) if k == kind), default=0)
    ranges = [range(min(room, gpus) + 1) if k == kind else range(1)
              for room, k in zip(left, kinds, strict=True)]  # fmt: skip
    for parts in product(*ranges):
        if sum(parts) != gpus:
            continue
        used = [n for n, c in enumerate(parts) if c]
        if len(used) > 1 and locality == "single" and gpus <= largest:
            continue
        shared = [n for n in used if parts[n] < free[n]]
        if len(used) > 1 and locality == "whole" and len(shared) > 1:
            continue
        after = tuple(room - c for room, c in zip(left, parts, strict=True))
        if _fits(rest, after, free, kinds):
            return True
    return False


__all__ = ["answers", "best_quota", "cost_of", "index", "shares"]
