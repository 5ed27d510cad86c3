"""The realised history of a simulation as a schedule: which GPUs every stay had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.cluster.world.log import HALF_B, WHOLE
from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry
from optsched.model.schedule import Arcs, Objective, Resource, Rows, Schedule

if TYPE_CHECKING:
    from optsched.cluster.results.run import Run
    from optsched.cluster.world.log import Log
    from optsched.model.schedule import IntArray


def history(run: Run) -> Schedule:
    """The history: an operation ``run`` per stay, and one ``restart`` before it if that took time.

    Operations go by job, then by start; `job` is the number in the workload, whose names are in
    ``provenance["jobs"]``; the release is the submit time; arcs join the stays of a job. GPUs of a
    node are given out lowest first. If any GPU was shared, each is two unary resources
    (``n3g1/a``, ``n3g1/b``): a stay of its own holds both, a sharing one holds one. A task without
    GPUs has no resource.

    Raises
    ------
    InputError
        The log has more GPUs of a node in use than there are, or does not say who shares.
    """
    log, nodes = run.log, run.nodes
    shared = bool((log.half != WHOLE).any())
    offset = np.concatenate(([0], np.cumsum(nodes.gpus))).astype(np.int64)
    gpu_ptr, gpu = _assigned(log, np.array(nodes.gpus, np.int64), offset)
    names = [
        f"{name}g{k}" for name, c in zip(nodes.names, nodes.gpus, strict=True) for k in range(c)
    ]
    if shared:
        names = [f"{name}/{half}" for name in names for half in "ab"]
        gpu_ptr, gpu = _halves(gpu_ptr, gpu, log.half)
    order = np.lexsort((log.start, log.job))
    restart = np.minimum(log.restart, log.end - log.start)[order]
    # a stay becomes its restart, its run, or both
    parts = np.where(restart > 0, 1, 0) + np.where(
        log.start[order] + restart < log.end[order], 1, 0
    )
    parts = np.maximum(parts, 1)
    stay = np.repeat(np.arange(len(order)), parts)
    first = np.concatenate(([True], stay[1:] != stay[:-1])) if len(stay) else np.zeros(0, np.bool_)
    is_restart = first & (restart[stay] > 0)
    row = order[stay]
    begin = np.where(
        is_restart | ~(restart[stay] > 0), log.start[row], log.start[row] + restart[stay]
    )
    end = np.where(is_restart, log.start[row] + restart[stay], log.end[row])
    op_resources = _rows(gpu_ptr, gpu, row)
    job = log.job[row]
    after = np.flatnonzero(job[1:] == job[:-1])
    zero = np.zeros(len(after), np.int64)
    last = int(end.max(initial=0))
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
        objective=Objective("makespan", last, None, "feasible"),
        provenance=_provenance(run),
    )


def _assigned(log: Log, capacity: IntArray, offset: IntArray) -> tuple[IntArray, IntArray]:
    """GPUs of every stay, numbered through the cluster, in CSR form."""
    row = np.repeat(np.arange(len(log.job)), np.diff(log.node_ptr))
    partner = np.full(len(row), -1, np.int64)
    if log.partner is not None and (log.half != WHOLE).any():
        partner = _partner_entries(log, row)
    elif (log.half != WHOLE).any():
        raise InputError("log.partner: missing, but there are shared GPUs")
    order = np.lexsort((row, partner >= 0, log.start[row], log.node))
    entry_ptr = np.concatenate(([0], np.cumsum(log.count))).astype(np.int64)
    gpu = np.zeros(int(entry_ptr[-1]), np.int64)
    bad = _colour(
        order, log.node, log.start[row], log.end[row], entry_ptr, log.half[row], partner, capacity,
        np.zeros(2 * int(capacity.max(initial=1)), np.int64), gpu,
    )  # fmt: skip
    if bad >= 0:
        i = int(row[bad])
        raise InputError(
            f"log[{i}]: node {log.node[bad]} has no {log.count[bad]} GPUs free at {log.start[i]} "
            f"for job {log.job[i]}"
        )
    gpu += np.repeat(offset[log.node], log.count)
    return entry_ptr[log.node_ptr], gpu


def _partner_entries(log: Log, row: IntArray) -> IntArray:
    """For every entry (stay and node) that of the partner on the same node, or -1."""
    partner = np.full(len(row), -1, np.int64)
    assert log.partner is not None
    for i in np.flatnonzero(log.partner >= 0).tolist():
        p = int(log.partner[i])
        mine = slice(int(log.node_ptr[i]), int(log.node_ptr[i + 1]))
        its = slice(int(log.node_ptr[p]), int(log.node_ptr[p + 1]))
        same = np.array_equal(log.node[mine], log.node[its]) and np.array_equal(
            log.count[mine], log.count[its]
        )
        if not same:
            raise InputError(f"log.partner[{i}]: stay {p} is on other GPUs")
        partner[mine] = np.arange(its.start, its.stop)
    return partner


@entry(INT, READ, READ, READ, READ, READ, READ, READ, READ, INTS, INTS)
def _colour(
    order: Any,
    node: Any,
    start: Any,
    end: Any,
    ptr: Any,
    half: Any,
    partner: Any,
    capacity: Any,
    until: Any,
    gpu: Any,
) -> int:
    """Interval colouring per node: entries in (node, start) order take the lowest free GPUs.

    ``until[2 k + h]`` is when half h of GPU k is free; gpu[ptr[e]:ptr[e + 1]] is written. Returns
    an entry that found no GPU, or -1.
    """
    at = -1
    for e in order:
        if node[e] != at:
            at = node[e]
            until[:] = -1
        found = ptr[e]
        if partner[e] >= 0:
            h = 1 if half[e] == HALF_B else 0
            for k in range(ptr[partner[e]], ptr[partner[e] + 1]):
                g = gpu[k]
                if until[2 * g + h] > start[e]:
                    return int(e)
                until[2 * g + h] = end[e]
                gpu[found] = g
                found += 1
            continue
        for g in range(capacity[at]):
            if found == ptr[e + 1]:
                break
            if until[2 * g] <= start[e] and until[2 * g + 1] <= start[e]:
                if half[e] != HALF_B:
                    until[2 * g] = end[e]
                if half[e] == HALF_B or half[e] == WHOLE:
                    until[2 * g + 1] = end[e]
                gpu[found] = g
                found += 1
        if found < ptr[e + 1]:
            return int(e)
    return -1


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


def _rows(ptr: IntArray, values: IntArray, rows: IntArray) -> Rows:
    """These rows of a CSR table, maybe several times."""
    length = np.diff(ptr)[rows]
    out = np.concatenate(([0], np.cumsum(length))).astype(np.int64)
    inside = np.arange(int(out[-1])) - np.repeat(out[:-1], length)
    return Rows(out, values[np.repeat(ptr[rows], length) + inside])


def _sequences(rows: Rows, begin: IntArray, end: IntArray, n_resources: int) -> Rows:
    operation = np.repeat(np.arange(len(begin)), np.diff(rows.indptr))
    order = np.lexsort((operation, end[operation], begin[operation], rows.ids))
    ptr = np.zeros(n_resources + 1, np.int64)
    np.cumsum(np.bincount(rows.ids, minlength=n_resources), out=ptr[1:])
    return Rows(ptr, operation[order])


def _provenance(run: Run) -> dict[str, Any]:
    settings = {
        key: getattr(run.settings, key)
        for key in ("restart_cost", "resize", "checkpoint", "timing", "round", "seed")
    }
    return {
        "policy": run.policy,
        "options": {key: _shown(value) for key, value in run.options.items()},
        "settings": settings,
        "workload": run.workload.name,
        "jobs": list(run.workload.names),
    }


def _shown(value: Any) -> Any:
    """Options as a document can hold them."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else f"{value!r:.200}"
