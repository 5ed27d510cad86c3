"""Random job shops, and job arrays with a choice of who recomputes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched import JobArray, JobShop

if TYPE_CHECKING:
    from random import Random


def random_choice(rng: Random, jobs: int = 2, micro_batches: int = 1) -> JobArray:
    """Jobs on two devices with room for little; some fit only one way."""

    def table(low: int, high: int) -> list[list[int]]:
        return [[rng.randint(low, high) for _ in range(2)] for _ in range(jobs)]

    kept = table(2, 6)
    return JobArray(
        table(1, 9), table(1, 9), recompute=table(1, 5), activation=kept, checkpoint=table(1, 3),
        recompute_workspace=rng.choice([0, 0, 3]), micro_batches=micro_batches,
        memory=[rng.randint(5, 9)] * 2, recompute_as_block=rng.random() < 0.3,
        update=rng.choice([0, 2]), recompute_mode="choose",
    )  # fmt: skip


def random_shop(rng: Random, jobs: int = 4, machines: int = 3) -> JobShop:
    """A job shop, classic or re-entrant, with zero durations, releases and deadlines at times."""
    n, m = rng.randint(1, jobs), rng.randint(1, machines)
    low = rng.choice([0, 1])
    if rng.random() < 0.5:
        chains = [[(k, rng.randint(low, 6)) for k in rng.sample(range(m), m)] for _ in range(n)]
    else:
        chains = [
            [(rng.randrange(m), rng.randint(low, 6)) for _ in range(rng.randint(1, 4))]
            for _ in range(n)
        ]
    windows: dict[str, Any] = {}
    if rng.random() < 0.3:
        windows["release"] = [rng.choice([0, 0, 3, 8]) for _ in range(n)]
    if rng.random() < 0.15:
        windows["deadline"] = [rng.choice([None, 12, 20]) for _ in range(n)]
    return JobShop(chains, [f"m{k}" for k in range(m)], **windows)
