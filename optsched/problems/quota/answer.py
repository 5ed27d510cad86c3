"""Answers to quota plans: what is wrong with them, and schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.errors import InputError
from optsched.model.schedule import Rows, Schedule
from optsched.problems.quota.data import PlanData, Quotas, scaled_rates, times_of
from optsched.problems.quota.job import of_kind

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray


def kept_gpus(quotas: Quotas, held: Quotas) -> IntArray:
    """GPUs of every job that stay: on every node the smaller of what it holds and what it gets."""
    kept: IntArray = np.zeros(len(held.ptr) - 1, np.int64)
    width = 1 + max(int(quotas.node.max(initial=0)), int(held.node.max(initial=0)))
    before, now = held.rows * width + held.node, quotas.rows * width + quotas.node
    _, i, k = np.intersect1d(before, now, assume_unique=True, return_indices=True)
    np.add.at(kept, held.rows[i], np.minimum(held.count[i], quotas.count[k]))
    return kept


def tidiness(plan: PlanData, quotas: Quotas) -> tuple[int, int, int]:
    """Nodes spanned, GPUs moved, free GPUs on partly used nodes; see `QuotaPlan.tidiness`."""
    gpus = plan.pools[1]
    used = np.zeros(len(gpus), np.int64)
    np.add.at(used, quotas.node, quotas.count)
    part = (used > 0) & (used < gpus)
    moved = np.minimum(plan.held.gpus, quotas.gpus) - kept_gpus(quotas, plan.held)
    return len(quotas.node), int(moved.sum()), int((gpus - used)[part].sum())


def faults(plan: PlanData, quotas: Quotas) -> list[str]:
    """What is wrong with an answer, a sentence each."""
    if not isinstance(quotas, Quotas):
        raise InputError(f"answer: expected Quotas, got {quotas!r:.60}")
    kind, gpus, _ = plan.pools
    if len(quotas.ptr) - 1 != len(plan.jobs):
        return [f"expected a row for each of {len(plan.jobs)} jobs, got {len(quotas.ptr) - 1}"]
    for n in quotas.node[(quotas.node < 0) | (quotas.node >= len(gpus))][:1]:
        return [f"there is no node {n}, the plan has 0..{len(gpus) - 1}"]
    used = np.bincount(quotas.node, quotas.count, len(gpus)).astype(np.int64)
    where = [node.name for node in plan.nodes] or [kind or "the budget" for kind in plan.kinds]
    found = [f"{used[n]} GPUs of {where[n]} are given away, it has {gpus[n]}"
             for n in np.flatnonzero(used > gpus).tolist()]  # fmt: skip
    sizes, kinds = plan.sizes(quotas)
    for j in np.flatnonzero(~plan.allowed(sizes, kinds)).tolist():
        name = plan.kinds[int(kinds[j])] if sizes[j] else ""
        of = f" of type {name}" if name else ""
        found.append(f"job {plan.jobs[j].name!r} gets {sizes[j]} GPUs{of}, which is not allowed")
    if plan.hands_out_all and int(sizes.sum()) != plan.total:
        found.append(f"{int(sizes.sum())} GPUs are handed out, all {plan.total} must be")
    for j in np.unique(quotas.rows[kind[quotas.node] != kinds[quotas.rows]]).tolist():
        found.append(f"job {plan.jobs[j].name!r} gets GPUs of several types")
    largest = [int(gpus[kind == k].max(initial=0)) for k in range(len(plan.kinds))]
    for j in np.flatnonzero(np.diff(quotas.ptr) > 1).tolist():
        name, rule = plan.jobs[j].name, plan.jobs[j].locality
        here = slice(quotas.ptr[j], quotas.ptr[j + 1])
        if rule == "single" and sizes[j] <= largest[int(kinds[j])]:
            on = here.stop - here.start
            found.append(f"job {name!r} must be within one node, it is on {on}")
        part = quotas.node[here][quotas.count[here] < gpus[quotas.node[here]]].tolist()
        if rule == "whole" and len(part) > 1:
            names = " and ".join(plan.nodes[n].name for n in part[:2])
            found.append(f"job {name!r} must hold its nodes wholly, {names} are shared")
    return found


# schedules


def snapshot(plan: PlanData, quotas: Quotas, kind: str) -> Schedule:
    """One operation ``epoch`` (or ``running``) for every job with GPUs, without orders."""
    running = kind == "running"
    numbers = gpu_numbers(plan, quotas, None if running else plan.held)
    sizes, kinds = plan.sizes(quotas)
    jobs = np.flatnonzero(sizes)
    indptr = np.zeros(len(jobs) + 1, np.int64)
    np.cumsum(sizes[jobs], out=indptr[1:])
    duration = np.ones(len(jobs), np.int64) if running else _durations(plan, jobs, sizes, kinds)
    return Schedule(
        name=plan.name, time_unit=plan.time_unit, resources=plan.resources, duration=duration,
        op_resources=Rows(indptr, numbers.ids), job=jobs, kind=np.full(len(jobs), kind),
    )  # fmt: skip


def with_sequences(graph: Schedule) -> Schedule:
    """All operations at time 0, each alone on its GPUs."""
    owner = np.full(graph.n_resources, -1, np.int64)
    rows = np.repeat(np.arange(graph.n_operations), np.diff(graph.op_resources.indptr))
    owner[graph.op_resources.ids] = rows
    indptr = np.zeros(graph.n_resources + 1, np.int64)
    np.cumsum(owner >= 0, out=indptr[1:])
    sequences = Rows(indptr, owner[owner >= 0])
    return graph.with_orders(sequences, np.zeros(graph.n_operations, np.int64))


def chosen(plan: PlanData, schedule: Schedule) -> Quotas:
    """GPUs of every job in a schedule; see `QuotaPlan.answer`."""
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
    first = plan.pools[2]
    pool = np.searchsorted(first, rows.ids, side="right") - 1
    key, count = np.unique(
        np.repeat(job, np.diff(rows.indptr)) * len(first) + pool, return_counts=True
    )
    found = Quotas.of(n, key // len(first), key % len(first), count)
    sizes, kinds = plan.sizes(found)
    try:
        expected = _durations(plan, job, sizes, kinds)
    except (IndexError, ValueError):
        raise InputError("the schedule belongs to another plan: it has other sizes") from None
    if not np.array_equal(schedule.duration, expected):
        raise InputError("the schedule belongs to another plan: its passes take other times")
    return found


def gpu_numbers(plan: PlanData, quotas: Quotas, held: Quotas | None) -> Rows:
    """Numbers of every job's GPUs: of those it holds the lowest, then the lowest left."""
    first = plan.pools[2]
    row, node, count = quotas.rows, quotas.node, quotas.count
    indptr = np.zeros(len(quotas.ptr), np.int64)
    np.cumsum(quotas.gpus, out=indptr[1:])
    if held is not None and len(held.node):
        ids = _keeping(plan, gpu_numbers(plan, held, None), quotas)
    else:
        by_node = np.argsort(node, kind="stable")
        before = np.cumsum(count[by_node]) - count[by_node]
        opens = np.ones(len(by_node), np.bool_)
        opens[1:] = np.diff(node[by_node]) != 0
        begin = np.zeros(len(node), np.int64)
        begin[by_node] = first[node[by_node]] + before - before[opens][np.cumsum(opens) - 1]
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        ids = np.repeat(begin, count) + within
    return Rows(indptr, ids[np.lexsort((ids, np.repeat(row, count)))])


def _keeping(plan: PlanData, holding: Rows, quotas: Quotas) -> IntArray:
    _, gpus, first = plan.pools
    taken = np.zeros(plan.n_gpus, np.bool_)
    rows = list(zip(quotas.rows.tolist(), quotas.node.tolist(), quotas.count.tolist(), strict=True))
    kept = []
    for j, n, c in rows:
        own = holding[j]
        own = own[(own >= first[n]) & (own < first[n] + gpus[n])][:c]
        taken[own] = True
        kept.append(own)
    ids: list[IntArray] = []
    for own, (_, n, c) in zip(kept, rows, strict=True):
        free = first[n] + np.flatnonzero(~taken[first[n] : first[n] + gpus[n]])
        new = free[: c - len(own)]
        taken[new] = True
        ids += [own, new]
    return np.concatenate(ids) if ids else np.zeros(0, np.int64)


def _durations(plan: PlanData, jobs: IntArray, sizes: IntArray, kinds: IntArray) -> IntArray:
    """Time of one pass with so many GPUs; 1 for jobs without `pass_work`."""
    found = np.ones(len(jobs), np.int64)
    for i, j in enumerate(jobs.tolist()):
        job = plan.jobs[j]
        if job.pass_work is None:
            continue
        kind = plan.kinds[int(kinds[j])]
        low, _, listed = job.allowed(kind) or (1, None, None)
        at = int(sizes[j]) - low if listed is None else listed.index(int(sizes[j]))
        if at < 0:
            raise IndexError(at)
        rate = scaled_rates(plan.resolution, of_kind(job.rates, kind)[at : at + 1])
        found[i] = times_of(plan.resolution, np.array([job.pass_work]), rate)[0]
    return found
