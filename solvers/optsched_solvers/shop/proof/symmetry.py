"""Symmetry of job arrays: jobs that differ in nothing but their number may change places."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from optsched.model.objectives import per_job

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule


def identical_jobs(graph: Schedule) -> list[list[list[int]]]:
    """Groups of at least two identical jobs: lists of operation ids, of which position k matches.

    Jobs are identical if their operations, in the order of ids, agree in every field but `job`
    (and `family`, where each job has one family of its own), and so do the arcs inside; a job with
    an arc to another job is identical to none.
    """
    members: dict[int, list[int]] = {}
    for i, job in enumerate(graph.job.tolist()):
        members.setdefault(job, []).append(i)
    crossing = graph.job[graph.arcs.tail] != graph.job[graph.arcs.head]
    joined = set(graph.job[graph.arcs.tail[crossing]].tolist())
    joined |= set(graph.job[graph.arcs.head[crossing]].tolist())
    families = _single_families(graph, members) if graph.has_setups else set(members)
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
    weight = None if graph.goal is None else per_job(graph)
    groups: dict[object, list[list[int]]] = {}
    for job, rows in members.items():
        if job in joined or job not in families:
            continue
        signature = (
            columns[rows].tobytes(),
            tuple(tuple(resources[i]) for i in rows),
            tuple(kinds[i] for i in rows),
            tuple(sorted(inner.get(job, []))),
            None if weight is None else weight[job],
        )
        groups.setdefault(signature, []).append(rows)
    return [group for group in groups.values() if len(group) > 1]


def _single_families(graph: Schedule, members: dict[int, list[int]]) -> set[int]:
    """Jobs with exactly one family, of their operations alone."""
    sizes: dict[int, int] = {}
    for family in graph.family.tolist():
        sizes[family] = sizes.get(family, 0) + 1
    found = set()
    for job, rows in members.items():
        first = int(graph.family[rows[0]])
        if sizes[first] == len(rows) and (graph.family[rows] == first).all():
            found.add(job)
    return found


def ordered_alike(graph: Schedule) -> list[tuple[int, int]]:
    """Pairs (i, k): some optimal schedule has i before k on their resources, for all pairs at once.

    Without setups every position of identical jobs may be sorted over the jobs. This keeps arcs
    (the k-th smallest start of one position is an arc's weight above the k-th smallest of another),
    machines and memory (equal blocks change places). With setups the neighbors of a block count, so
    whole jobs change places, and only their first operations are sorted.
    """
    pairs: list[tuple[int, int]] = []
    for group in identical_jobs(graph):
        positions = 1 if graph.has_setups else len(group[0])
        for earlier, later in pairwise(group):
            pairs += zip(earlier[:positions], later[:positions], strict=True)
    return pairs
