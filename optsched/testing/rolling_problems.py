"""Small periodic job arrays that the solver checks run on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from optsched.model.schedule import Problem


def tiny_rolling() -> list[Problem]:
    """At most twelve operations a cycle, so that `best_period` knows the optimum."""
    blocks, unlike = [[2, 3], [4, 1]], [[3, 4], [2, 2]]

    def rolling(name: str, forward: Any, backward: Any, **options: Any) -> JobArray:
        return JobArray(forward, backward, objective="period", name=name, **options)

    return [
        rolling("rolling", blocks, unlike),
        rolling("rolling, one job", [[2, 3]], [[4, 1]]),
        rolling("rolling, lags", blocks, blocks, lag_forward=2, lag_backward=1),
        rolling("rolling, switches", blocks, blocks, switch=3),
        rolling("rolling, may idle", [[1, 1]] * 2, [[1, 1]] * 2, switch=[[100, 0]] * 2),
        rolling("rolling, room for one", blocks, blocks, activation=5, memory=5),
        rolling("rolling, room for two", [*blocks, [1, 1]], [*unlike, [2, 3]], activation=1,
                memory=2),
        rolling("rolling, copies", blocks, blocks, multiplicity=[2, 1]),
        rolling("rolling, micro-batches", blocks, blocks, micro_batches=[2, 1]),
        rolling("rolling, split backward", blocks, blocks, weight=[[1, 1], [2, 1]], activation=3,
                weight_memory=1, memory=5),
        rolling("rolling, chunks", [[1, 2, 1], [1, 1, 2]], [[2, 1, 2], [1, 1, 1]], place=[0, 1, 0]),
        rolling("rolling, updates", blocks, blocks, update=1, update_mode="block"),
        rolling("rolling, nothing but zeros", [[0, 0]] * 2, [[0, 0]] * 2),
    ]  # fmt: skip


def small_rolling(seed: int = 0) -> list[Problem]:
    """Periodic arrays with something to search: plain, and with caps, lags and switches."""
    rng = random.Random(seed)

    def table(jobs: int, stages: int) -> list[list[int]]:
        return [[rng.randint(1, 20) for _ in range(stages)] for _ in range(jobs)]

    return [
        JobArray(
            table(5, 3), table(5, 3), lag_forward=3, lag_backward=3, switch=5, activation=4,
            memory=[12, 8, 4], objective="period", name="5 rolling jobs with everything",
        ),
        JobArray(table(6, 4), table(6, 4), objective="period", name="6 rolling jobs"),
    ]  # fmt: skip


def random_rolling(count: int, seed: int = 0) -> list[Problem]:
    """Two rolling jobs on two stages with features at random, against brute force."""
    rng = random.Random(seed)
    return [_random_array(rng, f"random rolling {k}") for k in range(count)]


def _random_array(rng: random.Random, name: str) -> JobArray:
    def table(low: int, high: int, width: int = 2) -> list[list[int]]:
        return [[rng.randint(low, high) for _ in range(width)] for _ in range(2)]

    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options |= {"lag_forward": table(0, 4, 1), "lag_backward": table(0, 4, 1)}
    if rng.random() < 0.4:
        options |= {"switch": table(0, 5), "switch_on": rng.choice(["out", "in"])}
    if rng.random() < 0.5:
        options |= {"activation": table(1, 3), "memory": [rng.choice([0, 3, 4, 6]) for _ in "ab"]}
    if rng.random() < 0.3:
        options["weight"] = table(0, 3)
    elif rng.random() < 0.3:
        options |= {"update": table(0, 3), "update_mode": rng.choice(["fused", "block", "global"])}
    elif rng.random() < 0.5:
        options["multiplicity"] = rng.choice([[2, 1], [1, 2]])
    return JobArray(table(0, 5), table(0, 5), objective="period", name=name, **options)


def equal_jobs(jobs: int, stages: int) -> tuple[JobArray, int]:
    """Equal jobs on equal stages, and their least period: nobody ever waits."""
    array = JobArray(
        [[1] * stages] * jobs, [[2] * stages] * jobs, objective="period",
        name=f"{jobs} equal rolling jobs, {stages} stages",
    )  # fmt: skip
    return array, max(jobs, stages) * 3
