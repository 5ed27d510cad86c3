"""Answers to quota plans as schedules, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.errors import InputError
from optsched.model.schedule import Rows, Schedule
from optsched.problems.quota.job import of_kind
from optsched.problems.quota.table import scaled_rates, times_of

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray
    from optsched.problems.quota.problem import QuotaPlan


def snapshot(plan: QuotaPlan, answer: Rows, kind: str) -> Schedule:
    """One operation for every job with GPUs, without orders."""
    sizes, kinds = plan.sizes(answer)
    jobs = np.flatnonzero(sizes)
    indptr = np.zeros(len(jobs) + 1, np.int64)
    np.cumsum(sizes[jobs], out=indptr[1:])
    return Schedule(
        name=plan.name,
        time_unit=plan.time_unit,
        resources=plan.resources,
        duration=_durations(plan, jobs, sizes, kinds, running=kind == "running"),
        op_resources=Rows(indptr, _ascending(answer).ids),
        job=jobs,
        kind=np.full(len(jobs), kind),
    )


def with_sequences(graph: Schedule) -> Schedule:
    """All operations at time 0, each alone on its GPUs."""
    owner = np.full(graph.n_resources, -1, np.int64)
    rows = np.repeat(np.arange(graph.n_operations), np.diff(graph.op_resources.indptr))
    owner[graph.op_resources.ids] = rows
    indptr = np.zeros(graph.n_resources + 1, np.int64)
    np.cumsum(owner >= 0, out=indptr[1:])
    sequences = Rows(indptr, owner[owner >= 0])
    return graph.with_orders(sequences, np.zeros(graph.n_operations, np.int64))


def chosen(plan: QuotaPlan, schedule: Schedule) -> Rows:
    """GPUs of every job in a schedule; see `QuotaPlan.chosen`."""
    if not isinstance(schedule, Schedule):
        raise InputError(f"schedule: expected a Schedule, got {schedule!r:.60}")
    if schedule.resources is not plan.resources and schedule.resources != plan.resources:
        raise InputError("the schedule belongs to another plan: it has other GPUs")
    job, rows = schedule.job, schedule.op_resources
    n = len(plan.jobs)
    strange = (schedule.kind != "epoch").any() or (np.diff(job) <= 0).any()
    if strange or (len(job) and not 0 <= int(job[0]) <= int(job[-1]) < n):
        raise InputError(
            f"the schedule belongs to another plan: expected at most one epoch of each of {n} jobs"
        )
    sizes = np.zeros(n, np.int64)
    sizes[job] = np.diff(rows.indptr)
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(sizes, out=indptr[1:])
    found = _ascending(Rows(indptr, rows.ids))
    kinds = plan.sizes(found)[1]
    try:
        expected = _durations(plan, job, sizes, kinds)
    except (IndexError, InputError):
        raise InputError("the schedule belongs to another plan: it has other sizes") from None
    if not np.array_equal(schedule.duration, expected):
        raise InputError("the schedule belongs to another plan: its passes take other times")
    return found


def number(
    plan: QuotaPlan, ptr: IntArray, node: IntArray, count: IntArray, holding: Rows | None = None
) -> Rows:
    """GPU numbers for so many GPUs of each node (CSR by job).

    Every job keeps of its GPUs in `holding` the lowest; all others get the lowest that are left.
    """
    first = plan.pools[2]
    sizes = np.zeros(len(ptr) - 1, np.int64)
    row = np.repeat(np.arange(len(sizes)), np.diff(ptr))
    np.add.at(sizes, row, count)
    indptr = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=indptr[1:])
    if holding is not None:
        return _keeping(plan, holding, indptr, row, node, count)
    by_node = np.argsort(node, kind="stable")
    before = np.cumsum(count[by_node]) - count[by_node]
    opens = np.ones(len(by_node), np.bool_)
    opens[1:] = np.diff(node[by_node]) != 0
    group = np.cumsum(opens) - 1
    begin = np.zeros(len(node), np.int64)
    begin[by_node] = first[node[by_node]] + before - before[opens][group]
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return _ascending(Rows(indptr, np.repeat(begin, count) + within))


def _keeping(
    plan: QuotaPlan, holding: Rows, indptr: IntArray, row: IntArray, node: IntArray, count: IntArray
) -> Rows:
    _, gpus, first = plan.pools
    taken = np.zeros(plan.n_gpus, np.bool_)
    kept = []
    for j, n, c in zip(row.tolist(), node.tolist(), count.tolist(), strict=True):
        own = holding[j]
        own = own[(own >= first[n]) & (own < first[n] + gpus[n])][:c]
        taken[own] = True
        kept.append(own)
    ids: list[IntArray] = []
    for own, n, c in zip(kept, node.tolist(), count.tolist(), strict=True):
        free = first[n] + np.flatnonzero(~taken[first[n] : first[n] + gpus[n]])
        new = free[: c - len(own)]
        taken[new] = True
        ids += [own, new]
    return _ascending(Rows(indptr, np.concatenate(ids) if ids else np.zeros(0, np.int64)))


def counts(plan: QuotaPlan, answer: Rows) -> tuple[IntArray, IntArray, IntArray]:
    """GPUs by node (or budget) of every job (CSR): row pointers, nodes ascending, numbers."""
    first = plan.pools[2]
    row = np.repeat(np.arange(len(answer)), np.diff(answer.indptr))
    pool = np.searchsorted(first, answer.ids, side="right") - 1
    key, count = np.unique(row * len(first) + pool, return_counts=True)
    ptr = np.zeros(len(answer) + 1, np.int64)
    np.cumsum(np.bincount(key // len(first), minlength=len(answer)), out=ptr[1:])
    return ptr, key % len(first), count


def tidiness(plan: QuotaPlan, answer: Rows) -> tuple[int, int, int]:
    """Nodes spanned, GPUs moved, free GPUs on partly used nodes; see `QuotaPlan.tidiness`."""
    ptr, pool, count = counts(plan, answer)
    gpus = plan.pools[1]
    used = np.bincount(pool, weights=count, minlength=len(gpus)).astype(np.int64)
    part = (used > 0) & (used < gpus)
    held_ptr, held_node, held_count = plan.held
    here = {
        (j, int(pool[i])): int(count[i])
        for j in range(len(plan.jobs))
        if held_ptr[j] < held_ptr[j + 1]
        for i in range(ptr[j], ptr[j + 1])
    }
    moved = 0
    for j in np.flatnonzero(np.diff(held_ptr)).tolist():
        some = range(held_ptr[j], held_ptr[j + 1])
        held = sum(int(held_count[i]) for i in some)
        kept = sum(min(here.get((j, int(held_node[i])), 0), int(held_count[i])) for i in some)
        moved += min(held, int(count[ptr[j] : ptr[j + 1]].sum())) - kept
    return len(pool), moved, int((gpus - used)[part].sum())


def _ascending(answer: Rows) -> Rows:
    """Rows with sorted numbers."""
    steps = np.diff(answer.ids) <= 0
    inner = answer.indptr[1:-1]
    steps[inner[(inner > 0) & (inner < len(answer.ids))] - 1] = False
    if not steps.any():
        return answer
    row = np.repeat(np.arange(len(answer)), np.diff(answer.indptr))
    return Rows(answer.indptr, answer.ids[np.lexsort((answer.ids, row))])


def _durations(
    plan: QuotaPlan, jobs: IntArray, sizes: IntArray, kinds: IntArray, *, running: bool = False
) -> IntArray:
    """Time of one pass with so many GPUs; 1 for jobs without `pass_work`."""
    found = np.ones(len(jobs), np.int64)
    for i, j in enumerate(jobs.tolist()):
        job = plan.jobs[j]
        if job.pass_work is None or running:
            continue
        kind = plan.kinds[int(kinds[j])]
        low, _, listed = job.allowed(kind) or (1, None, None)
        at = int(sizes[j]) - low if listed is None else listed.index(int(sizes[j]))
        rates = of_kind(job.rates, kind)
        rate = scaled_rates(plan.resolution, rates[at : at + 1])
        found[i] = times_of(plan.resolution, np.array([job.pass_work]), rate)[0]
    return found


__all__ = ["chosen", "counts", "number", "snapshot", "tidiness", "with_sequences"]
