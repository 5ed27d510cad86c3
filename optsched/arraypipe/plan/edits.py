"""Schedules changed as documents: without some jobs, as orders of another problem, blocks alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.arraypipe.plan.types import MESSAGES
from optsched.errors import InputError
from optsched.model.schedule import Rows, Schedule
from optsched.solving.solution import PeriodicOrders

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from optsched.model.schedule import Problem


def without(schedule: Schedule, jobs: Collection[int]) -> Schedule:
    """The schedule without some jobs: the others keep their order, and start as early as it allows.

    It is feasible if the schedule was, and its period (or makespan) is no longer, as long as no
    family of setups spans two jobs.

    Parameters
    ----------
    schedule
        A scheduled document.
    jobs
        Numbers of the jobs to delete. The others are numbered anew, 0, 1, ..., in their order, and
        so are their operations; if families are jobs, they follow.

    Raises
    ------
    InputError
        There is no such job, none would be left, or the document has no orders.
    CyclicOrder
        The orders could not be run before either.
    """
    _require_orders(schedule)
    kept = schedule.subset(_stays(schedule, jobs))
    job = np.unique(kept.job, return_inverse=True)[1].astype(np.int64)
    family = job if np.array_equal(kept.family, kept.job) else kept.family
    kept = replace(kept, job=job, family=family)
    return _retimed(kept, {"order": "jobs deleted", "jobs": sorted(set(jobs))})


def for_problem(problem: Problem, schedule: Schedule) -> Schedule:
    """The orders of a schedule as one of this problem: for a search to begin with.

    Times, bytes and arcs are those of the problem, which may have been profiled anew; a one-shot
    schedule serves a periodic problem, repeated.

    Raises
    ------
    InputError
        The problem has other blocks, or other blocks on the devices; or no orders are given.
    CyclicOrder
        The problem's arcs do not allow the orders.
    """
    _require_orders(schedule)
    assert schedule.sequences is not None
    graph = problem.graph()
    for key in ("kind", "job", "stage", "microbatch", "iteration"):
        ours, theirs = getattr(graph, key), getattr(schedule, key)
        if not np.array_equal(ours, theirs):
            raise InputError(
                f"the schedule has other blocks than the problem: their {key} differs "
                f"({len(theirs)} blocks, expected {len(ours)})"
            )
    if graph.period is None:
        return problem.scheduled(schedule.sequences)
    return problem.scheduled(PeriodicOrders(schedule.sequences, schedule.offset))


def _stays(schedule: Schedule, jobs: Collection[int]) -> npt.NDArray[np.bool_]:
    """Which operations belong to other jobs; refuses jobs that are not there, and all of them."""
    there = set(schedule.job.tolist())
    for job in jobs:
        if isinstance(job, bool) or job not in there:
            raise InputError(f"jobs: the schedule has no job {job!r}")
    if there <= set(jobs):
        raise InputError(f"jobs: none would be left of {len(there)}")
    return ~np.isin(schedule.job, np.array([*jobs], np.int64))


def _require_orders(schedule: Schedule) -> None:
    if schedule.sequences is None:
        raise InputError("this graph is not scheduled: it has no sequences")


def _retimed(schedule: Schedule, provenance: dict[str, Any]) -> Schedule:
    """The same orders with the earliest starts, and the least period if there is one."""
    assert schedule.sequences is not None
    if schedule.period is None:
        from optsched.model.graph import scheduled

        return scheduled(schedule.graph(), schedule.sequences, provenance)
    from optsched.analysis.rolling import rolling

    return rolling(schedule.graph(), schedule.sequences, schedule.offset, provenance)


COPIES: Final = {"in": "copy in", "out": "copy out"}
"""Kinds of copies of states, by direction."""
CARRIED: Final = frozenset((*MESSAGES, *COPIES.values()))
"""Kinds of operations of links."""


def blocks_only(schedule: Schedule) -> Schedule:
    """A scheduled document without messages and copies, and without their links.

    What a message joined is joined by an arc of its own. Documents without links are given back as
    they are.
    """
    if CARRIED.isdisjoint(schedule.kind.tolist()):
        return schedule
    assert schedule.sequences is not None
    stays = ~np.isin(schedule.kind, sorted(CARRIED))
    kept = schedule.subset(stays)
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
