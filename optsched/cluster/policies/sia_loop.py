"""Sia's choice where every job has one size, and whole simulations of it in compiled code.

All jobs are worth the same then: as many run as the GPUs allow, and of all such choices the one
with the fewest changes; of jobs of one size those that came first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.policies.waiting import WAITING, push, take, waiting
from optsched.cluster.world.advance import release, start, step
from optsched.cluster.world.build import frozen, world
from optsched.cluster.world.compiled import run
from optsched.cluster.world.layout import ARRIVED, ASK, COMPLETED, WORLD
from optsched.kernels.compile import INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

    BoolArray = npt.NDArray[np.bool_]


def one_size(held: IntArray, preemptible: BoolArray, gang: IntArray, budget: int) -> IntArray:
    """GPUs of every job, by arrival; those that hold some and must not be preempted keep them."""
    loose = np.where((held > 0) & ~preemptible, -1, held > 0)
    size, kind = np.unique(gang, return_inverse=True)
    waits, runs = (np.bincount(kind[loose == held], minlength=len(size)) for held in (0, 1))
    most_jobs(size, runs, waits, budget - int(gang[loose < 0].sum()))
    quota = np.where(loose < 0, gang, 0)
    for k in range(len(size)):
        for runs_now, number in enumerate((waits, runs)):
            quota[np.flatnonzero((kind == k) & (loose == runs_now))[: number[k]]] = size[k]
    return quota


def simulate_one_size(
    workload: Workload, nodes: Nodes, settings: Settings, name: str
) -> Log | None:
    """The log of `Sia`; None if jobs have several sizes, or if it is not compiled."""
    if settings.contention is not None or settings.changes or settings.timing != "event":
        return None
    if len(workload.size) != len(workload) or bool((workload.size == 0).any()):
        return None
    q = waiting(workload.size)
    size, chosen = frozen(q.size["gpus"].copy()), np.zeros(nodes.total + 1, np.int64)
    running, runs, waits = np.zeros((3, len(size)), np.int64)
    w = world(workload, nodes, settings)
    return run(lambda w: _loop(w, q, size, running, runs, waits, chosen), w, workload, name)


@helper(INT, READ, INTS, INT, counted=False)
def _least(size, number, most):  # type: ignore[no-untyped-def]
    """GPUs of so many of the smallest jobs."""
    gpus = 0
    for k in range(len(size)):
        gpus += min(number[k], most) * size[k]
        most -= min(number[k], most)
    return gpus


@helper(INT, READ, INTS, INTS, INT, counted=False)
def most_jobs(size, runs, waits, budget):  # type: ignore[no-untyped-def]
    """How many jobs of every size, ascending, go on and start, of those that run and wait now."""
    most = running = 0
    left = budget
    for k in range(len(size)):
        fits = min(runs[k] + waits[k], left // size[k])
        left -= fits * size[k]
        most += fits
        running += runs[k]
    kept = min(running, most)
    while _least(size, runs, kept) + _least(size, waits, most - kept) > budget:
        kept -= 1
    starts = most - kept
    for k in range(len(size)):
        runs[k], waits[k] = min(runs[k], kept), min(waits[k], starts)
        kept -= runs[k]
        starts -= waits[k]
    return most


@helper(INT, WORLD, WAITING, INT, counted=False)
def _last(w, q, kind):  # type: ignore[no-untyped-def]
    """The running job of a size that came last and may be preempted."""
    last = -1
    for i in range(w.state[0].running_now):
        job = w.heap[i, 1]
        if job > last and q.kind[job] == kind and w.given[job].preemptible == 1:
            last = job
    return last


@entry(INT, WORLD, WAITING, READ, INTS, INTS, INTS, INTS, counted=False)
def _loop(w, q, size, running, runs, waits, chosen):  # type: ignore[no-untyped-def]
    """When jobs have come or ended; else the choice is the same."""
    s = w.state[0]
    while True:
        status = step(w)
        if status != ASK:
            return status
        worth = s.running_now == 0
        if worth:
            for k in range(len(size)):
                running[k] = 0  # an instant that left no active job was not told
        for i in range(s.events):
            job = w.event[i, 1]
            if w.event[i, 0] == ARRIVED:
                push(q, job, job, 0, 0)
            elif w.event[i, 0] == COMPLETED and w.given[job].preemptible == 1:
                running[q.kind[job]] = max(0, running[q.kind[job]] - 1)
            worth = worth or w.event[i, 0] == ARRIVED or w.event[i, 0] == COMPLETED
        if not worth:
            continue
        budget = s.free_gpus
        for k in range(len(size)):
            runs[k], waits[k] = running[k], q.size[k].length
            budget += running[k] * size[k]
        most_jobs(size, runs, waits, budget)
        n = 0
        for k in range(len(size)):
            for _ in range(waits[k]):
                at, job = n, take(q, k, 0)
                while at > 0 and chosen[at - 1] > job:
                    chosen[at] = chosen[at - 1]
                    at -= 1
                chosen[at] = job
                n += 1
        for k in range(len(size)):
            for _ in range(running[k] - runs[k]):
                job = _last(w, q, k)
                release(w, job, 0)
                push(q, job, job, 0, 0)
            running[k] = runs[k]
        for i in range(n):
            job = chosen[i]
            start(w, job, size[q.kind[job]])
            running[q.kind[job]] += w.given[job].preemptible
