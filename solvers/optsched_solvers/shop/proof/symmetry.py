"""Symmetry of job arrays: jobs that differ in nothing but their number may change places."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from optsched.model import memory_bounds

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule


def identical_jobs(graph: Schedule) -> list[list[list[int]]]:
    """Groups of at least two identical jobs.

    Jobs are identical if their operations, in the order of ids, agree in every field but `job`
    (and `family`, where each job has one family of its own), and so do the arcs inside; a job with
    an arc to another job is identical to none.

    Returns
    -------
    list
        Per group a list of jobs in the order of their numbers, each a list of operation ids;
        position k of all jobs of a group matches.
    """
    members: dict[int, list[int]] = {}
    for i, job in enumerate(graph.job.tolist()):
        members.setdefault(job, []).append(i)
    crossing = graph.job[graph.arcs.tail] != graph.job[graph.arcs.head]
    joined = set(graph.job[graph.arcs.tail[crossing]].tolist())
    joined |= set(graph.job[graph.arcs.head[crossing]].tolist())
    families = _own_families(graph, members) if graph.has_setups else set(members)
    columns = np.stack(
        [
            graph.duration, graph.stage, graph.microbatch, graph.iteration, graph.release,
            graph.deadline, graph.setup_in, graph.setup_out, graph.acquire, graph.free,
            graph.workspace,
        ],
        axis=1,
    )  # fmt: skip
    resources, kinds = graph.op_resources.to_lists(), graph.kind.tolist()
    inner: dict[int, list[tuple[int, int, int]]] = {}
    place = {i: k for rows in members.values() for k, i in enumerate(rows)}
    arcs = zip(*(column.tolist() for column in graph.arcs[:3]), strict=True)
    for tail, head, lag in arcs:
        inner.setdefault(int(graph.job[tail]), []).append((place[tail], place[head], lag))
    groups: dict[object, list[list[int]]] = {}
    for job, rows in members.items():
        if job in joined or job not in families:
            continue
        signature = (
            columns[rows].tobytes(),
            tuple(tuple(resources[i]) for i in rows),
            tuple(kinds[i] for i in rows),
            tuple(sorted(inner.get(job, []))),
        )
        groups.setdefault(signature, []).append(rows)
    return [group for group in groups.values() if len(group) > 1]


def _own_families(graph: Schedule, members: dict[int, list[int]]) -> set[int]:
    """Jobs whose operations form exactly one family."""
    sizes: dict[int, int] = {}
    for family in graph.family.tolist():
        sizes[family] = sizes.get(family, 0) + 1
    own = set()
    for job, rows in members.items():
        first = int(graph.family[rows[0]])
        if sizes[first] == len(rows) and (graph.family[rows] == first).all():
            own.add(job)
    return own


def ordered_alike(graph: Schedule) -> list[tuple[int, int]]:
    """Pairs (i, k): some optimal schedule has i before k on their resources, for all pairs at once.

    Identical jobs are numbered by one operation z, which is always allowed: renaming. All further
    operations of a job split in two: those that stay with z's job (its *core*), and those that are
    sorted over the jobs, position by position, in the order of z. Sorting keeps arcs (the k-th
    smallest start of one position is an arc's weight above the k-th smallest of another), machines
    and memory (equal blocks change places), but a block may meet another neighbour of its own job.
    So where there are setups, two blocks of one job on one resource, one of them sorted, must be so
    far apart by arcs that a setup fits between them.
    """
    pairs: list[tuple[int, int]] = []
    for group in identical_jobs(graph):
        for k in _sortable(graph, group[0]):
            pairs += [(a[k], b[k]) for a, b in pairwise(group)]
    return pairs


def _sortable(graph: Schedule, job: list[int]) -> list[int]:
    """Positions within the job that are ordered alike, z included; as many as possible."""
    reach = [memory_bounds.paths_from(graph, i) for i in job]
    everything = list(range(len(job)))
    close = _too_close(graph, job, reach)
    if not close:
        return everything
    place = {i: k for k, i in enumerate(job)}
    arcs = [
        (place[i], place[k])
        for i, k in zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True)
        if i in place and k in place
    ]
    best: list[int] = []
    for z in everything:
        behind = {k for k in everything if k != z and job[k] in reach[z]}
        before = {k for k in everything if k != z and job[z] in reach[k]}
        for core in (behind, before, set(everything) - {z}):
            if _valid_core(z, core, close, arcs):
                found = [k for k in everything if k not in core]
                best = max(best, found, key=len)
    return best


def _valid_core(
    z: int, core: set[int], close: set[tuple[int, int]], arcs: list[tuple[int, int]]
) -> bool:
    """Whether all outside the core of z may be sorted."""
    inside = core | {z}
    if not all(a in inside and b in inside for a, b in close):
        return False
    # sorted operations and the core may be joined through z only
    return not any((a in core) != (b in core) and z not in (a, b) for a, b in arcs)


def _too_close(
    graph: Schedule, job: list[int], reach: list[dict[int, int]]
) -> set[tuple[int, int]]:
    """Positions a, b on one resource between which the arcs do not leave time for a setup."""
    close = set()
    resources = [set(graph.op_resources[i].tolist()) for i in job]
    for a, i in enumerate(job):
        for b, k in enumerate(job):
            if a == b or not resources[a] & resources[b]:
                continue
            setup = int(graph.setup_out[i] + graph.setup_in[k])
            if setup == 0 or i in reach[b]:
                continue  # no setup, or the other order is looked at
            if k not in reach[a] or reach[a][k] - int(graph.duration[i]) < setup:
                close.add((a, b))
    return close
