"""Random little quota plans of every kind, and their optima by brute force."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from optsched.problems.quota.job import LOCALITIES, QuotaJob
from optsched.problems.quota.problem import OBJECTIVES, Node, QuotaPlan
from optsched.testing.best_quota import best_quota


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
def optimum(plan: QuotaPlan) -> int | None:
    """The least cost by trying everything; None if there is no answer."""
    return best_quota(plan)


__all__ = ["optimum", "quota_problems", "random_plan"]
