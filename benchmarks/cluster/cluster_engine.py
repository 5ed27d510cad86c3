"""What the generic engine costs beside a policy's `decide`, and its kernels chained without Python.

python -m benchmarks.cluster.cluster_engine [--repeat 5]

Three parts, CPU microseconds, warm, median of the repeats. (1) An instant with 2,000 active jobs,
512 of them running: next event, view, decision read and applied (beside: the columns that are read
on demand). (2) Whole simulations of 2,000 elastic jobs of ten passes on 512 GPUs under a policy
that decides at once. (3) First come, first served, compiled: 80,000 rigid jobs on 512 GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.machine import machine
from optsched.cluster import Amdahl, Decision, Job, Nodes, Settings, Workload, synthetic
from optsched.cluster.engine import simulate_generic
from optsched.cluster.engine_decision import enact
from optsched.cluster.engine_view import Viewer
from optsched.cluster.world import advance, apply, start
from optsched.cluster.world_build import world
from optsched.cluster.world_layout import (
    ARRIVED,
    ASK,
    EVENTS,
    FIRST_SIZE,
    FREE_GPUS,
    WORLD,
)
from optsched.kernels.compile import INT, entry

if TYPE_CHECKING:
    from collections.abc import Callable

ACTIVE, RUNNING, JOBS = 2_000, 512, 80_000


@entry(INT, WORLD, counted=False)
def first_come(w):  # type: ignore[no-untyped-def]
    """Start jobs in order of arrival while the next one fits; the instants."""
    waiting = following = asked = 0
    while advance(w) == ASK:
        asked += 1
        for k in range(w.state[EVENTS]):
            if w.event[k, 0] == ARRIVED:
                w.order[waiting] = w.event[k, 1]
                waiting += 1
        while following < waiting:
            j = w.order[following]
            gpus = w.size[w.given[j, FIRST_SIZE]]
            if gpus > w.state[FREE_GPUS] or start(w, j, gpus) == 0:
                break
            following += 1
    return asked


class Head:
    """The first 512 active jobs on one GPU each; counts the time that it takes itself."""

    name = "head"
    clairvoyant = False

    def __init__(self) -> None:
        self.spent = 0.0

    def decide(self, view: Any) -> Decision:
        """By position."""
        begin = time.process_time()
        quota = np.zeros(len(view.job), np.int64)
        quota[:RUNNING] = 1
        self.spent += time.process_time() - begin
        return Decision(quota)


def main() -> None:
    """Print one line per part."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--repeat", type=int, default=5)
    repeat = options.parse_args().repeat
    print(machine("numpy", "numba"))
    jobs, nodes = elastic(), Nodes(RUNNING // 8)
    for what, spent in instant(jobs, nodes, repeat).items():
        print(f"instant, {ACTIVE} active jobs: {what:34} {spent:6.2f} us")
    told = []
    for _ in range(repeat):
        policy, begin = Head(), time.process_time()
        asked = simulate_generic(jobs, policy, nodes, Settings()).asked
        told.append((time.process_time() - begin - policy.spent) / asked * 1e6)
    print(f"generic engine, whole run: {asked} instants, {statistics.median(told):.1f} us each")
    rigid = synthetic(JOBS, 0.9, 0, gpus=RUNNING)
    told = []
    for _ in range(repeat + 1):
        w = world(rigid, nodes, Settings())
        begin = time.process_time()
        asked = first_come(w)
        told.append((time.process_time() - begin) / asked * 1e6)
    print(f"kernels chained: {asked} instants, {statistics.median(told[1:]):.2f} us each")


def elastic() -> Workload:
    """Jobs that all wait at time 0."""
    lengths = np.random.default_rng(0).lognormal(7, 1.5, ACTIVE).astype(int) + 10
    return Workload.of(
        Job(name=str(i), sizes=(1, 2, 3, 4), work=int(d) * 10**6, passes=10, speedup=Amdahl(0.5))
        for i, d in enumerate(lengths)
    )


def instant(jobs: Workload, nodes: Nodes, repeat: int) -> dict[str, float]:
    """Parts of one instant, each alone and repeated (an event: one pass of one job)."""
    w = world(jobs, nodes, Settings())
    viewer = Viewer(w, jobs, Settings(), False)
    advance(w)
    w.quota[:RUNNING] = 1
    apply(w)
    view = viewer.look()
    decision = Decision(w.quota[: len(view.job)].copy())

    def later() -> None:
        seen = viewer.look()
        viewer.kept.clear()
        _ = seen.starts, seen.size, seen.free, seen.held_ptr, seen.running

    return {
        "next event": each(lambda: advance(w), 200, repeat),
        "view": each(viewer.look, 500, repeat),
        "decision read and applied": each(
            lambda: enact(w, jobs, "head", view, decision), 500, repeat
        ),
        "view with all columns (on demand)": each(later, 200, repeat),
    }


def each(work: Callable[[], Any], times: int, repeat: int) -> float:
    """Median microseconds of a call."""
    told = []
    for _ in range(repeat):
        begin = time.process_time()
        for _ in range(times):
            work()
        told.append((time.process_time() - begin) / times * 1e6)
    return statistics.median(told)


if __name__ == "__main__":
    main()
