"""Schedules changed as documents: without some jobs, and blocks alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.arraypipe.plan.types import MESSAGES
from optsched.errors import InputError
from optsched.model.graph import scheduled
from optsched.model.schedule import Rows, Schedule

if TYPE_CHECKING:
    from collections.abc import Collection


def without(schedule: Schedule, jobs: Collection[int]) -> Schedule:
    """The schedule without some jobs: the others keep their order, and start as early as it allows.

    It is feasible if the schedule was, and its period (or makespan) is no longer, as long as no
    family of setups spans two jobs. Jobs, and families if they are jobs, are numbered anew.
    `InputError` if there is no such job, or none would be left.
    """
    if schedule.sequences is None:
        raise InputError("this graph is not scheduled: it has no sequences")
    there = set(schedule.job.tolist())
    for job in jobs:
        if isinstance(job, bool) or job not in there:
            raise InputError(f"jobs: the schedule has no job {job!r}")
    if there <= set(jobs):
        raise InputError(f"jobs: none would be left of {len(there)}")
    kept = schedule.subset(~np.isin(schedule.job, np.array([*jobs], np.int64)))
    number = np.unique(kept.job, return_inverse=True)[1].astype(np.int64)
    family = number if np.array_equal(kept.family, kept.job) else kept.family
    kept = replace(kept, job=number, family=family)
    assert kept.sequences is not None
    provenance = {"order": "jobs deleted", "jobs": sorted(set(jobs))}
    if kept.period is None:
        return scheduled(kept.graph(), kept.sequences, provenance)
    from optsched.analysis.rolling import rolling  # compiled

    return rolling(kept.graph(), kept.sequences, kept.offset, provenance)


COPIES: Final = {"in": "copy in", "out": "copy out"}
"""Kinds of copies of states, by direction."""


def blocks_only(schedule: Schedule) -> Schedule:
    """A scheduled document without messages and copies of states, and without their links.

    What a message joined is joined by an arc of its own. Documents without links are given back as
    they are.
    """
    carried = np.isin(schedule.kind, [*MESSAGES, *COPIES.values()])
    if not carried.any():
        return schedule
    kept = schedule.subset(~carried)
    used = [r for r in range(len(kept.users)) if not len(schedule.users[r]) or len(kept.users[r])]
    at = np.full(schedule.n_resources, -1)
    at[used] = np.arange(len(used))
    assert kept.sequences is not None
    return replace(
        kept,
        resources=tuple(schedule.resources[r] for r in used),
        op_resources=Rows(kept.op_resources.indptr, at[kept.op_resources.ids]),
        sequences=Rows.of(kept.sequences[r] for r in used),
    )
