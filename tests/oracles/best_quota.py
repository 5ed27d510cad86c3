"""Random little quota plans, and the best one by trying all quotas; shares no code."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from optsched.problems.quota.job import LOCALITIES, QuotaJob
from optsched.problems.quota.problem import OBJECTIVES, Node, QuotaPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

Option = tuple[str, int]
"""Type and GPUs; ``("", 0)`` for none."""


def random_plan(rng: random.Random, objective: str | None = None, name: str = "") -> QuotaPlan:
    """A plan of at most four jobs and ten GPUs; it may have no answer at all."""
    goal = objective or rng.choice(OBJECTIVES)
    kinds = ["a", "b"] if goal != "proportional" and rng.random() < 0.3 else [""]
    with_nodes = rng.random() < 0.5
    where: dict[str, Any] = {}
    if with_nodes:
        sizes = [rng.choice([1, 2, 3, 4, 4]) for _ in range(rng.randint(1, 3))]
        where["nodes"] = [Node(gpus, rng.choice(kinds)) for gpus in sizes]
        kinds = sorted({node.type for node in where["nodes"]})
    else:
        budget = {kind: rng.choice([0, 2, 3, 4, 5, 6, 7, 8]) for kind in kinds}
        where["budget"] = budget[""] if kinds == [""] else budget
    strict = with_nodes and rng.random() < 0.6
    jobs = [_job(rng, goal, kinds, f"j{i}", strict) for i in range(rng.randint(0, 4))]
    if with_nodes and rng.random() < 0.5:
        jobs = _running(rng, jobs, where["nodes"])
    made = [QuotaJob(**fields) for fields in jobs]
    unit = rng.choice([2 if goal == "sum" else 10, 10, 10**6])  # no utility counts as 0
    return QuotaPlan(made, objective=goal, resolution=unit, name=name, **where)  # type: ignore[arg-type]


def _job(
    rng: random.Random, goal: str, kinds: list[str], name: str, strict: bool
) -> dict[str, Any]:
    """Fields of a job; `_running` may add where it is now."""
    by_type = len(kinds) > 1 and rng.random() < 0.6
    fields: dict[str, Any] = {
        "name": name, "weight": rng.choice([1, 1, 2, 3, 0.5]),
        "must_run": goal != "sum" or rng.random() < 0.4,
    }  # fmt: skip
    if strict:
        fields["locality"] = rng.choice(LOCALITIES)
    tables: dict[str, dict[str, Any]] = {}
    gaps = goal != "proportional" and rng.random() < 0.5
    listed = rng.random() < 0.5
    for kind in rng.sample(kinds, rng.randint(1, len(kinds))) if by_type else [""]:
        low = rng.choice([1, 1, 1, 1, 2])
        sizes = sorted(rng.sample(range(1, 7), rng.randint(1, 4)))
        n = len(sizes) if gaps else rng.randint(1, 5)
        own: dict[str, Any] = {}
        own.update({"sizes": sizes} if gaps else {"minimum": low, "maximum": low + n - 1})
        values = [rng.randint(-3, 12) for _ in range(n)]
        if rng.random() < 0.5:
            values = sorted(values)
        if goal == "sum" or (goal == "max_min" and listed):
            own["utility"] = values
        if goal == "makespan":
            rates = [rng.choice([0.5, 1, 1.5, 2, 3, 4]) for _ in range(n)]
            own["rates"] = sorted(rates) if rng.random() < 0.7 else rates
        tables[kind] = own
    for key in next(iter(tables.values())):
        fields[key] = {k: own[key] for k, own in tables.items()} if by_type else tables[""][key]
    if goal == "sum":
        fields["idle"] = rng.choice([0, 0, 0, -2, 3])
    if goal == "makespan":
        fields["work"] = rng.randint(0, 20)
        fields["pass_work"] = rng.choice([None, 3])
    if goal == "proportional":
        fields["score"] = rng.choice([0, 0.25, 1, 1, 2, 3, 7])
    return fields


def _running(
    rng: random.Random, jobs: list[dict[str, Any]], nodes: list[Node]
) -> list[dict[str, Any]]:
    left = [node.gpus for node in nodes]
    for fields in jobs:
        n = rng.randrange(len(nodes))
        if left[n] and rng.random() < 0.5:
            fields["current"] = {f"n{n}": rng.randint(1, left[n])}
            left[n] -= fields["current"][f"n{n}"]
    return jobs


@cache
def quota_problems(n: int, seed: int = 0) -> tuple[QuotaPlan, ...]:
    """Random plans by seed, all objectives in turn."""
    return tuple(
        random_plan(random.Random(k), OBJECTIVES[k % len(OBJECTIVES)], f"quota plan {k}")
        for k in range(seed, seed + n)
    )


@cache
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
