"""Time of exact allocation on bare arrays, with and without proofs: 10,000 jobs, 100,000 GPUs.

python -m benchmarks.cluster.quota_allocation

CPU seconds, median of 5 blocks of calls after one to warm up.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.machine import machine
from optsched_solvers import quota

if TYPE_CHECKING:
    from collections.abc import Callable

JOBS, GPUS = 10_000, 100_000
GOAL = 15.0
"""Milliseconds, proofs included."""
BLOCK = 0.03
"""Seconds that a block of calls takes at least."""


class Instance(NamedTuple):
    """Jobs with scores, bounds, and tables of utilities in millionths."""

    scores: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray
    ptr: np.ndarray
    value: np.ndarray
    budget: int


def main() -> None:
    """Print a table of milliseconds with goals."""
    print(machine("numpy", "numba"))
    for kind in ("lognormal", "equal", "small integers"):
        show(kind, instance(kind, JOBS, GPUS))


def instance(kind: str, jobs: int, gpus: int) -> Instance:
    """Random jobs of 1..64 GPUs with Amdahl utilities, weighted by the scores."""
    rng = np.random.default_rng(0)
    scores = {
        "lognormal": rng.lognormal(0, 1, jobs),
        "equal": np.ones(jobs),
        "small integers": rng.integers(1, 5, jobs).astype(float),
    }[kind]
    maximum = rng.integers(8, 65, jobs)
    ptr = np.concatenate([[0], np.cumsum(maximum)])
    serial = np.repeat(rng.uniform(0.05, 0.95, jobs), maximum)
    g = np.arange(ptr[-1]) - np.repeat(ptr[:-1], maximum) + 1
    value = np.rint(1e6 * np.repeat(scores, maximum) * g / (1 + serial * (g - 1))).astype(np.int64)
    return Instance(scores, np.ones(jobs, np.int64), maximum, ptr, value, gpus)


def show(kind: str, one: Instance) -> None:
    """Time all functions on one instance, with and without proofs."""
    shares = (one.scores, one.budget, one.minimum, one.maximum)
    table = (one.ptr, one.value, one.minimum, one.budget)
    times = (one.ptr, (10**12 / np.maximum(one.value, 1)).astype(np.int64), *table[2:])
    calls: dict[str, tuple[Callable[..., Any], tuple, dict[str, str]]] = {
        "max_min": (quota.max_min, shares, {}),
        "proportional": (quota.proportional, shares, {}),
        "proportional, webster": (quota.proportional, shares, {"method": "webster"}),
        "max_min_table": (quota.max_min_table, table, {}),
        "makespan": (quota.makespan, times, {}),
    }
    print(f"\n{JOBS} jobs, {GPUS} GPUs, scores {kind}, {len(one.value)} table entries")
    print(f"{'scores':15} {'function':24} {'ms':>8} {'with proof':>11} {'goal':>5}")
    for name, (call, arguments, extra) in calls.items():
        _, proof = call(*arguments, **extra)
        assert proof.holds, name
        bare = timed(lambda c=call, a=arguments, e=extra: c(*a, **e))
        proved = timed(lambda c=call, a=arguments, e=extra: c(*a, **e)[1].holds)
        met = "met" if 1e3 * proved < GOAL else "MISS"
        print(f"{kind:15} {name:24} {1e3 * bare:8.3f} {1e3 * proved:11.3f} {GOAL:5.1f}  {met}")


def timed(call: Callable[[], object]) -> float:
    """CPU seconds of a call: median of 5 blocks of calls of `BLOCK` seconds or more."""
    call()
    begin = time.process_time()
    call()
    times = max(1, int(BLOCK / max(time.process_time() - begin, 1e-6)))
    blocks = []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(times):
            call()
        blocks.append((time.process_time() - begin) / times)
    return statistics.median(blocks)


if __name__ == "__main__":
    main()
