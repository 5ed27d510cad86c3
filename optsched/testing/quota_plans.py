"""Random small quota plans for the solver checks, and their optimum by brute force."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.problems.quota.job import QuotaJob
from optsched.problems.quota.problem import OBJECTIVES, QuotaPlan

if TYPE_CHECKING:
    from collections.abc import Iterator


def tiny_plans(n: int) -> list[QuotaPlan]:
    """Draw plans of up to four jobs and ten GPUs, all objectives in turn."""
    return [_random_plan(random.Random(k), OBJECTIVES[k % len(OBJECTIVES)], k) for k in range(n)]


def _random_plan(rng: random.Random, objective: str, number: int) -> QuotaPlan:
    kinds = ["a", "b"] if objective != "proportional" and rng.random() < 0.3 else [""]
    budget = {kind: rng.randint(2, 8 // len(kinds)) for kind in kinds}
    jobs = [_random_job(rng, objective, f"j{i}") for i in range(rng.randint(0, 4))]
    return QuotaPlan(
        jobs, budget=budget if len(kinds) > 1 else budget[""],
        objective=objective,  # type: ignore[arg-type]
        resolution=rng.choice([10, 10**6]), name=f"quota plan {number}",
    )  # fmt: skip


def _random_job(rng: random.Random, objective: str, name: str) -> QuotaJob:
    n, low = rng.randint(1, 4), rng.choice([1, 1, 2])
    fields: dict[str, Any] = {"minimum": low, "maximum": low + n - 1}
    if objective != "proportional" and rng.random() < 0.5:
        fields = {"sizes": sorted(rng.sample(range(1, 7), n))}
    if objective in ("sum", "max_min"):
        fields["utility"] = [rng.randint(-3, 12) for _ in range(n)]
    if objective == "sum":
        fields["idle"] = rng.choice([0, 0, -2, 3])
    if objective == "makespan":
        fields["work"] = rng.randint(0, 20)
        fields["rates"] = [rng.choice([0.5, 1, 1.5, 2, 3, 4]) for _ in range(n)]
    if objective == "proportional":
        fields["score"] = rng.choice([0, 0.25, 1, 1, 2, 3, 7])
    must_run = objective != "sum" or rng.random() < 0.4
    return QuotaJob(name, weight=rng.choice([1, 1, 2, 0.5]), must_run=must_run, **fields)


def best_plan(plan: QuotaPlan) -> int | None:
    """Return the least cost over all choices of type and size; None if none is feasible.

    For plans with budgets; the placement on nodes is not enumerated.
    """
    best = None
    for choice in product(*(list(_options(plan, job)) for job in plan.jobs)):
        kinds, sizes = np.array(choice, np.int64).reshape(-1, 2).T
        used = np.bincount(kinds, sizes, len(plan.kinds))
        if (used > plan.budgets).any() or (plan.hands_out_all and sizes.sum() != plan.total):
            continue
        value = plan.worth(sizes, kinds)
        best = value if best is None else min(best, value)
    return best


def _options(plan: QuotaPlan, job: QuotaJob) -> Iterator[tuple[int, int]]:
    """Yield pairs of type and GPUs; (0, 0) if the job may wait."""
    if not job.must_run:
        yield 0, 0
    for k, (kind, budget) in enumerate(zip(plan.kinds, plan.budgets, strict=True)):
        yield from ((k, size) for size in job.allowed(kind, budget))
