"""Time of exact allocation on bare arrays, proofs included, beside greedies and Gavel's LP.

python -m benchmarks.cluster.quota_allocation [--jobs 10000] [--gpus 100000] [--peer-jobs 1000]

CPU seconds, median of 5 blocks of calls after one to warm up. Peers answer the same instances in
the same process: `heapq` greedies in plain Python (equal quotas are checked), and max-min as a
linear programme, as Gavel states it, by `scipy.optimize.linprog` (HiGHS) if SciPy is there.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.machine import machine
from optsched_solvers import quota

if TYPE_CHECKING:
    from collections.abc import Callable

GOAL = 15.0
"""Milliseconds, proofs included, at 10,000 jobs and 100,000 GPUs."""
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
    """Print a table of milliseconds with goals and ratios to peers."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--gpus", type=int, default=100_000)
    options.add_argument("--peer-jobs", type=int, default=1_000)
    given = options.parse_args()
    print(machine("numpy", "numba"))
    for kind in ("lognormal", "equal", "small integers"):
        show(kind, instance(kind, given.jobs, given.gpus))
    against_linear_programme(given.peer_jobs)


def instance(kind: str, jobs: int, gpus: int, seed: int = 0) -> Instance:
    """Random jobs of 1..64 GPUs with Amdahl utilities, weighted by the scores."""
    rng = np.random.default_rng(seed)
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
    """Time all functions on one instance, with and without proofs, beside the plain greedies."""
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
    plain = {"max_min": lambda: plain_max_min(*shares)}
    jobs = len(one.scores)
    print(f"\n{jobs} jobs, {one.budget} GPUs, scores {kind}, {len(one.value)} table entries")
    print(f"{'scores':15} {'function':24} {'ms':>8} {'with proof':>11} {'goal':>5}  {'':4} "
          f"{'plain ms':>9} ratio")  # fmt: skip
    for name, (call, arguments, extra) in calls.items():
        g, proof = call(*arguments, **extra)
        assert proof.holds, name
        bare = timed(lambda c=call, a=arguments, e=extra: c(*a, **e))
        proved = timed(lambda c=call, a=arguments, e=extra: c(*a, **e)[1].holds)
        line = f"{kind:15} {name:24} {1e3 * bare:8.3f} {1e3 * proved:11.3f}"
        if (jobs, one.budget) == (10_000, 100_000):
            line += f" {GOAL:5.1f}  {'met' if 1e3 * proved < GOAL else 'MISS'}"
        if name in plain:
            assert (plain[name]() == g).all(), name
            slow = timed(plain[name], least=0.0)
            line = f"{line:73} {1e3 * slow:9.1f} {slow / proved:.0f}x"
        print(line)


def against_linear_programme(jobs: int) -> None:
    """Max-min of 1,000 jobs by a linear programme: one solve for the lowest level only."""
    one = instance("lognormal", jobs, 10 * jobs)
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix
    except ImportError:
        print("\nSciPy is not installed: the linear programme is left out (pip install scipy).")
        return
    # max t: t <= g_j / w_j, sum g <= G, bounds; the lexicographic rest would take further solves
    row = np.repeat(np.arange(jobs), 2)
    column = np.stack([np.arange(jobs), np.full(jobs, jobs)], 1).ravel()
    entry = np.stack([-1 / one.scores, np.ones(jobs)], 1).ravel()
    matrix = csr_matrix(
        (
            np.concatenate([entry, np.ones(jobs)]),
            (
                np.concatenate([row, np.full(jobs, jobs)]),
                np.concatenate([column, np.arange(jobs)]),
            ),
        ),
        shape=(jobs + 1, jobs + 1),
    )
    right = np.append(np.zeros(jobs), one.budget)
    limits = [*zip(one.minimum.tolist(), one.maximum.tolist(), strict=True), (0, None)]
    cost = np.append(np.zeros(jobs), -1.0)

    def solve() -> Any:
        return linprog(cost, matrix, right, bounds=limits, method="highs")

    level = -solve().fun
    shares = (one.scores, one.budget, one.minimum, one.maximum)
    g, proof = quota.max_min(*shares)
    assert proof.holds
    assert proof.value <= level * (1 + 1e-9)
    slow = timed(solve, least=0.0)
    fast = timed(lambda: quota.max_min(*shares)[1].holds)
    print(f"\nmax-min of {jobs} jobs, {one.budget} GPUs")
    print(
        f"linear programme: {1e3 * slow:.2f} ms, level {level:.4f} (fractional, lowest level only)"
    )
    lowest = (g / one.scores).min()
    print(f"max_min:          {1e3 * fast:.3f} ms, level {lowest:.4f} (whole GPUs, all levels)")
    print(f"ratio:            {slow / fast:.0f}x")


def plain_max_min(
    weights: np.ndarray, budget: int, minimum: np.ndarray, maximum: np.ndarray
) -> np.ndarray:
    """GPUs one by one to the lowest level (floats; ties to the lighter job), by `heapq`."""
    g, w, top = minimum.tolist(), weights.tolist(), maximum.tolist()
    heap = [(g[j] / w[j], w[j], j) for j in range(len(w)) if g[j] < top[j]]
    heapq.heapify(heap)
    for _ in range(budget - sum(g)):
        if not heap:
            break
        _, weight, j = heap[0]
        g[j] += 1
        if g[j] < top[j]:
            heapq.heapreplace(heap, (g[j] / weight, weight, j))
        else:
            heapq.heappop(heap)
    return np.array(g)


def timed(call: Callable[[], object], least: float = BLOCK) -> float:
    """CPU seconds of a call: median of 5 blocks of calls, each of at least so many seconds."""
    call()
    begin = time.process_time()
    call()
    times = max(1, int(least / max(time.process_time() - begin, 1e-6)))
    blocks = []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(times):
            call()
        blocks.append((time.process_time() - begin) / times)
    return statistics.median(blocks)


if __name__ == "__main__":
    main()
