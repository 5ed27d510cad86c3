"""`priority` where all jobs have one level: nobody is displaced, whoever fits starts, compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.determined.board import ring
from optsched.cluster.determined.columns import hash_of
from optsched.cluster.policies.elastic_loops import run
from optsched.cluster.policies.rigid import rigid
from optsched.cluster.policies.waiting import WAITING, before, push, take
from optsched.cluster.world.advance import start, step
from optsched.cluster.world.build import frozen, world
from optsched.cluster.world.layout import ARRIVED, ASK, WORLD
from optsched.cluster.world.stays import start_on
from optsched.kernels.compile import INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray


class Fitting(NamedTuple):
    """How Determined puts a gang on nodes; see `Board`."""

    waiting: Any
    gang: IntArray
    ring: IntArray
    """Nodes in the order in which ties are broken."""
    first: IntArray
    """Where the ring begins for a job."""
    pieces: IntArray
    """By size of gang: 1 if Determined would never start it, and it is cut in pieces."""
    worst: IntArray
    """1: emptiest nodes first, shape (1,)."""
    failed: IntArray
    """By size of gang: 1 if its first job did not fit at this instant."""


FITTING: Final[Any] = types.NamedTuple([WAITING, READ, READ, READ, INTS, READ, INTS], Fitting)


def simulate_one_level(
    workload: Workload, nodes: Nodes, settings: Settings, gang: int | None, best: bool, name: str
) -> Log | None:
    """The log of `Priority`; None if jobs are on several levels, or if it is not compiled."""
    group = np.array([-1 if g.priority is None else g.priority for g in workload.groups], np.int64)
    level = group[workload.group]
    r = rigid(workload, nodes, settings, gang)
    if r is None or len(np.unique(np.where(level < 0, workload.priority, level))) > 1:
        return None
    names = tuple(f"n{a}" for a in range(len(nodes.gpus)))
    order, _, hashes = ring(names)
    own = [-hash_of(job) for job in workload.names]
    first = np.searchsorted(np.array(hashes, dtype=object), np.array(own, dtype=object))
    size = r.waiting.size["gpus"]
    f = Fitting(
        r.waiting, frozen(r.job["gang"].copy()), frozen(np.array(order, np.int64)),
        frozen(first.astype(np.int64)), np.zeros(len(size), np.int64),
        frozen(np.array([not best], np.int64)), np.zeros(len(size), np.int64),
    )  # fmt: skip
    kinds, times = np.unique(nodes.gpus, return_counts=True)
    for k, gpus in enumerate(size.tolist()):
        if gpus > max(nodes.gpus):
            serve = (gpus % kinds == 0) & (times * kinds >= gpus)
            f.pieces[k] = not serve.any()
    w = world(workload, nodes, settings)
    return run(lambda w: first_fit(w, f), w, workload, name)


@helper(INT, WORLD, FITTING, INT, counted=False)
def _shared(w, f, job):  # type: ignore[no-untyped-def]
    """The node that Determined likes best for all of a job; -1 if none holds it."""
    n, best = f.ring.shape[0], -1
    for i in range(n):
        at = f.first[job] + i
        node = f.ring[at - n if at >= n else at]
        free = w.node[node].free
        if free < f.gang[job]:
            continue
        if best < 0:
            best = node
        elif f.worst[0] == 0:
            best = node if free < w.node[best].free else best
        elif free * w.node[best].capacity > w.node[best].free * w.node[node].capacity:
            best = node
    return best


@helper(INT, WORLD, FITTING, INT, counted=False)
def _idle(w, f, gang):  # type: ignore[no-untyped-def]
    """The largest size of idle nodes of which enough serve a gang wholly; 0 if there is none."""
    largest = 0
    for node in range(w.node.shape[0]):
        size = w.node[node].capacity
        if size <= largest or w.node[node].free < size or gang % size != 0:
            continue
        there = 0
        for other in range(w.node.shape[0]):
            if w.node[other].capacity == size and w.node[other].free == size:
                there += size
        if there >= gang:
            largest = size
    return largest


@helper(INT, WORLD, FITTING, INT, INT, counted=False)
def _try_start(w, f, job, pieces):  # type: ignore[no-untyped-def]
    """Start a job where Determined puts it; 0 if it fits nowhere."""
    gang, n = f.gang[job], f.ring.shape[0]
    if pieces == 1:
        return start(w, job, gang)
    node, rows = _shared(w, f, job), 0
    if node >= 0:
        w.named[0, 0], w.named[0, 1] = node, gang
        return start_on(w, job, gang, 0, 1)
    size = _idle(w, f, gang) if gang > 1 else 0
    if size == 0:
        return 0
    for i in range(n):
        at = f.first[job] + i
        node = f.ring[at - n if at >= n else at]
        if rows * size < gang and w.node[node].capacity == size and w.node[node].free == size:
            w.named[rows, 0], w.named[rows, 1] = node, size
            rows += 1
    return start_on(w, job, gang, 0, rows)


@entry(INT, WORLD, FITTING, counted=False)
def first_fit(w, f):  # type: ignore[no-untyped-def]
    """By arrival; a size of which a job does not fit waits for the next instant."""
    q = f.waiting
    while True:
        status = step(w)
        if status != ASK:
            return status
        for i in range(w.state[0].events):
            if w.event[i, 0] == ARRIVED:
                push(q, w.event[i, 1], w.event[i, 1], 0)
        for kind in range(q.size.shape[0]):
            f.failed[kind] = 0
        while True:
            best = -1
            for kind in range(q.size.shape[0]):
                if q.size[kind].length == 0 or f.failed[kind] == 1:
                    continue
                at = q.size[kind].first
                if best < 0 or before(q.heap, at, q.size[best].first) == 1:
                    best = kind
            if best < 0:
                break
            job = q.heap[q.size[best].first].job
            if _try_start(w, f, job, f.pieces[best]) == 1:
                take(q, best, 0)
            else:
                f.failed[best] = 1
