"""Groups of jobs that differ in nothing but their number: they may change places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
