"""The realised history of a simulation as a schedule: which GPUs every stay had."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.results.document import described
from optsched.cluster.workload.columns import picked
from optsched.cluster.world.log import HALF_B, WHOLE
from optsched.model.schedule import Arcs, Csr, Objective, Resource, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.results.run import Run
    from optsched.cluster.world.log import Log
    from optsched.model.schedule import IntArray


def history(run: Run) -> Schedule:
    """Make an operation ``run`` of every stay, and a ``restart`` before it if that took time.

    Operations go by job, then by start; `job` is the number in the workload, whose names are in
    ``provenance["jobs"]``; the release is the submit time; arcs join the stays of a job. GPUs of a
    node are given out lowest first. If any GPU was shared, each is two unary resources
    (``n3g1/a``, ``n3g1/b``): an exclusive stay holds both, a sharing one holds one. A task without
    GPUs has no resource.
    """
    log, nodes = run.log, run.nodes
    shared = bool((log.half != WHOLE).any())
    gpu_ptr, gpu = _assigned(log, nodes.gpus)
    names = [
        f"{name}g{k}" for name, c in zip(nodes.names, nodes.gpus, strict=True) for k in range(c)
    ]
    if shared:
        names = [f"{name}/{half}" for name in names for half in "ab"]
        gpu_ptr, gpu = _halves(gpu_ptr, gpu, log.half)
    order = np.lexsort((log.start, log.job))
    restart = np.minimum(log.restart, log.end - log.start)[order]
    begins, ends = log.start[order], log.end[order]
    # a stay becomes its restart, its run, or both
    parts = np.maximum((restart > 0) * 1 + (begins + restart < ends), 1)
    stay = np.repeat(np.arange(len(order)), parts)
    is_restart = (np.diff(stay, prepend=-1) > 0) & (restart[stay] > 0)
    row = order[stay]
    begin = begins[stay] + np.where(is_restart, 0, restart[stay])
    end = np.where(is_restart, begin + restart[stay], ends[stay])
    op_resources = Csr(*picked(gpu_ptr, gpu, row))
    job = log.job[row]
    after = np.flatnonzero(job[1:] == job[:-1])
    zero = np.zeros(len(after), np.int64)
    return Schedule(
        resources=tuple(Resource(name) for name in names),
        duration=end - begin,
        op_resources=op_resources,
        arcs=Arcs(after, after + 1, zero, zero),
        name=f"{run.workload.name} {run.policy}".strip()[:200],
        time_unit=run.workload.time_unit,
        job=job,
        kind=np.where(is_restart, "restart", "run"),
        release=run.workload.submit[job],
        sequences=_sequences(op_resources, begin, end, len(names)),
        start=begin,
        objective=Objective("makespan", int(end.max(initial=0)), None, "feasible"),
        provenance={**described(run), "workload": run.workload.name,
                    "jobs": list(run.workload.names)},
    )  # fmt: skip


def _assigned(log: Log, capacity: Sequence[int]) -> tuple[IntArray, IntArray]:
    """GPUs of every stay, numbered through the cluster, in CSR form.

    On every node, stays by start take the free GPUs of lowest number; a stay that shares takes
    those of its partner, which are free again when both have ended.
    """
    row = np.repeat(np.arange(len(log.job)), np.diff(log.node_ptr))
    partner = _partner_entries(log, row)
    ptr = np.concatenate(([0], np.cumsum(log.count))).astype(np.int64)
    first = np.concatenate(([0], np.cumsum(capacity))).tolist()
    gpu: list[list[int]] = [[] for _ in row]
    at, free, busy, users = -1, [0], [(0, 0)], Counter[int]()
    for e in np.lexsort((row, partner >= 0, log.start[row], log.node)).tolist():
        start, end = int(log.start[row[e]]), int(log.end[row[e]])
        if log.node[e] != at:
            at = int(log.node[e])
            free, busy, users = list(range(first[at], first[at + 1])), [], Counter()
        while busy and busy[0][0] <= start:
            for g in gpu[heappop(busy)[1]]:
                users[g] -= 1
                if users[g] == 0:
                    heappush(free, g)
        shares = int(partner[e])
        if shares >= 0:
            gpu[e] = gpu[shares]
        else:
            gpu[e] = [heappop(free) for _ in range(log.count[e])]
        users.update(gpu[e])
        heappush(busy, (end, e))
    return ptr[log.node_ptr], np.array([g for held in gpu for g in held], np.int64)


def _partner_entries(log: Log, row: IntArray) -> IntArray:
    """For every entry (stay and node) that of the partner on the same node, or -1."""
    partner = np.full(len(row), -1, np.int64)
    if log.partner is not None:
        for i in np.flatnonzero(log.partner >= 0).tolist():
            entries = slice(*log.node_ptr[log.partner[i] :][:2].tolist())
            partner[slice(*log.node_ptr[i : i + 2].tolist())] = np.arange(len(row))[entries]
    return partner


def _halves(ptr: IntArray, gpu: IntArray, half: IntArray) -> tuple[IntArray, IntArray]:
    """GPUs as pairs of half GPUs; a stay of its own holds both halves."""
    each = np.where(half == WHOLE, 2, 1)
    owner = np.repeat(np.arange(len(half)), np.diff(ptr))
    times = each[owner]
    found = 2 * np.repeat(gpu, times)
    second = np.zeros(len(found), np.int64)
    last = np.cumsum(times) - 1
    second[last[times == 2]] = 1
    second[last[half[owner] == HALF_B]] = 1
    return np.concatenate(([0], np.cumsum(np.diff(ptr) * each))).astype(np.int64), found + second


def _sequences(rows: Csr, begin: IntArray, end: IntArray, n_resources: int) -> Csr:
    operation = np.repeat(np.arange(len(begin)), np.diff(rows.indptr))
    order = np.lexsort((operation, end[operation], begin[operation], rows.ids))
    ptr = np.zeros(n_resources + 1, np.int64)
    np.cumsum(np.bincount(rows.ids, minlength=n_resources), out=ptr[1:])
    return Csr(ptr, operation[order])
