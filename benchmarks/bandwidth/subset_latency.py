"""Latency of exact choices on 4x8 GPUs beside tenants: a `Dispatcher`, and `solve`.

python -m benchmarks.bandwidth.subset_latency [--data DIR] [--requests 2000]

CPU time of single calls. `fresh`: a state that no call has seen, with jobs of unknown demands;
`take, or give`: a random request is answered and taken, or a random job ends, as a scheduler does;
`again`: the same question to the same state, least of three.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import TYPE_CHECKING

import numpy as np

import optsched
from benchmarks.bandwidth.measured_data import VARIABLE
from benchmarks.bandwidth.scenarios import uniform
from benchmarks.bandwidth.subset_surrogate import truth
from benchmarks.machine import machine
from optsched.bandwidth import ClusterState, Dispatcher

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Print percentiles in microseconds."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", default=os.environ.get(VARIABLE))
    options.add_argument("--requests", type=int, default=2000)
    given = options.parse_args()
    print(machine("numpy", "numba"))
    for name in ["h100-2g", "het-4mix"] if given.data else ["synthetic"]:
        known = truth(name, given.data)
        asked = list(uniform(known.cluster, busy="tenants", repeats=70, seed=3))
        order = np.random.default_rng(0).permutation(len(asked))[: given.requests]
        asked = [asked[i] for i in order]
        fast = Dispatcher(known.cluster, known.model, traffic="heavy")
        fast.choose(*asked[0])
        show(f"{name}: Dispatcher.choose, fresh", [fresh(fast, *one) for one in asked])
        show(f"{name}: Dispatcher.choose and take, or give", loop(fast, given.requests))
        show(f"{name}: Dispatcher.choose, again", [timed(fast.choose, *one) for one in asked])
        some = asked[:300]
        show(f"{name}: Dispatcher.scores", [timed(fast.scores, *one) for one in some])
        show(f"{name}: Dispatcher.best, five", [timed(fast.best, *one, 5) for one in some])
        problems = [
            optsched.GpuPlacement(s, known.model, k, traffic="heavy") for s, k in asked[:500]
        ]
        show(
            f"{name}: optsched.solve",
            [timed(optsched.solve, problem, "counts") for problem in problems],
        )


def fresh(fast: Dispatcher, state: ClusterState, k: int) -> float:
    """Seconds of the first call on a state."""
    state = ClusterState(state.cluster, state.free, state.jobs, state.down)
    begin = time.thread_time()
    fast.choose(state, k)
    return time.thread_time() - begin


def loop(fast: Dispatcher, steps: int) -> list[float]:
    """Seconds of jobs that begin and end."""
    rng, state, times = random.Random(1), ClusterState.idle(fast.cluster), []
    for step in range(steps):
        k = rng.choice([1, 2, 4, 8, 12])
        begin = time.thread_time()
        if k <= len(state.free):
            found = fast.answer(state, k)
            state = state.take(found.gpus, f"job{step}", found.standalone)
        else:
            state = state.give(rng.choice(state.jobs).name)
        times.append(time.thread_time() - begin)
    return times


def timed(call: Callable[..., object], *given: object) -> float:
    """Least seconds of three calls, after one to warm up."""
    call(*given)
    best = float("inf")
    for _ in range(3):
        begin = time.thread_time()
        call(*given)
        best = min(best, time.thread_time() - begin)
    return best


def show(what: str, seconds: list[float]) -> None:
    """One line of percentiles."""
    times = 1e6 * np.array(seconds)
    p50, p99 = np.percentile(times, [50, 99])
    print(f"{what}: {len(times)} requests, p50 {p50:.1f} us, p99 {p99:.1f} us, "
          f"max {times.max():.1f} us")  # fmt: skip


if __name__ == "__main__":
    main()
