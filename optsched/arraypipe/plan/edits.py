"""Schedules changed as documents: without some jobs, with one more, blocks alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.arraypipe.plan.checks import check_memory, identify
from optsched.arraypipe.plan.types import KINDS, MESSAGES
from optsched.errors import InputError
from optsched.model.schedule import COLUMNS, Arcs, Rows, Schedule
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
    kept = _kept(schedule, _stays(schedule, jobs))
    return _retimed(kept, {"order": "jobs deleted", "jobs": sorted(set(jobs))})


def with_job(schedule: Schedule, like: int) -> Schedule | None:
    """The schedule with one more job, which has the blocks of a job that is in it already.

    See `with_graph`; the numbers of that job's blocks, its bytes, setups and inner arcs are copied.
    """
    _require_orders(schedule)
    if isinstance(like, bool) or not isinstance(like, int) or not (schedule.job == like).any():
        raise InputError(f"like: the schedule has no job {like!r}")
    return with_graph(schedule, _kept(schedule, schedule.job == like).graph())


def with_graph(schedule: Schedule, job: Schedule) -> Schedule | None:
    """The schedule with one more job, at the end of the order of every device.

    The blocks of the new job come in the order in which it would run alone, all in one cycle, so
    that no block that was there waits for it within a cycle: what was live stays so.

    Parameters
    ----------
    schedule
        A scheduled document, periodic or not.
    job
        The graph of one job on the same resources, such as that of a `JobArray` with one job;
        periodic if the schedule is. The new job gets the next number.

    Returns
    -------
    Schedule or None
        None if the memory of some device does not allow it: the job has to wait.

    Raises
    ------
    InputError
        `job` has other resources, another unit of time or several jobs, or does not fit into the
        schedule otherwise.
    CyclicOrder
        The orders could not be run before either.
    """
    _require_orders(schedule)
    _check_guest(schedule, job)
    if schedule.period is not None:  # no arc with negative tokens may be left
        schedule = _retimed(schedule, {})
    joined = _joined(schedule, job)
    blocks = identify(joined).blocks
    assert joined.sequences is not None
    try:
        check_memory(joined, blocks, tuple(map(tuple, joined.sequences.to_lists())))
    except InputError:
        return None
    return _retimed(joined, {"order": "job added", "job": len(np.unique(joined.job)) - 1})


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


def _kept(schedule: Schedule, stays: npt.NDArray[np.bool_]) -> Schedule:
    """The document of some operations only; orders, starts, offsets and period as they are."""
    assert schedule.sequences is not None and schedule.start is not None
    number = np.where(stays, np.cumsum(stays) - 1, -1)
    tail, head, lag, distance = schedule.arcs
    inner = stays[tail] & stays[head]
    columns = {key: getattr(schedule, key)[stays] for key in (*COLUMNS, "start")}
    job = np.unique(columns["job"], return_inverse=True)[1].astype(np.int64)
    if np.array_equal(columns["family"], columns["job"]):
        columns["family"] = job
    columns["job"] = job
    of = np.repeat(np.arange(len(stays)), np.diff(schedule.op_resources.indptr))
    rows = _rows(schedule.op_resources, stays[of])
    listed = _rows(schedule.sequences, stays[schedule.sequences.ids])
    return Schedule(
        name=schedule.name,
        time_unit=schedule.time_unit,
        resources=schedule.resources,
        op_resources=Rows(np.append(rows.indptr[:-1][stays], rows.indptr[-1]), rows.ids),
        arcs=Arcs(number[tail[inner]], number[head[inner]], lag[inner], distance[inner]),
        period=schedule.period,
        sequences=Rows(listed.indptr, number[listed.ids]),
        provenance=schedule.provenance,
        **columns,
    )


def _rows(rows: Rows, stays: npt.NDArray[np.bool_]) -> Rows:
    """Those entries of all rows that stay."""
    before = np.concatenate([[0], np.cumsum(stays)])
    return Rows(before[rows.indptr], rows.ids[stays])


def _retimed(schedule: Schedule, provenance: dict[str, Any]) -> Schedule:
    """The same orders with the earliest starts, and the least period if there is one."""
    assert schedule.sequences is not None
    if schedule.period is None:
        from optsched.model.graph import scheduled

        return scheduled(schedule.graph(), schedule.sequences, provenance)
    from optsched.analysis.rolling import rolling

    return rolling(schedule.graph(), schedule.sequences, schedule.offset, provenance)


def _check_guest(schedule: Schedule, job: Schedule) -> None:
    """A job can only join where its resources, its unit and its kind of time are known."""
    names = [[resource.name for resource in s.resources] for s in (schedule, job)]
    if names[0] != names[1]:
        raise InputError(f"job: expected the resources {names[0]}, got {names[1]}")
    if schedule.time_unit != job.time_unit:
        raise InputError(f"job: times are in {job.time_unit}, expected {schedule.time_unit}")
    if (schedule.period is None) != (job.period is None):
        has = "has no period" if job.period is None else "has a period"
        raise InputError(f"job: {has}, unlike the schedule")
    if len(np.unique(job.job)) != 1:
        raise InputError(f"job: expected the graph of one job, got {len(np.unique(job.job))}")


def _joined(schedule: Schedule, job: Schedule) -> Schedule:
    """Both graphs in one document, the blocks of the job at the end of all orders."""
    assert schedule.sequences is not None and schedule.start is not None
    n, guest = schedule.n_operations, int(schedule.job.max(initial=-1)) + 1
    columns = {key: np.concatenate([getattr(schedule, key), getattr(job, key)]) for key in COLUMNS}
    columns["job"][n:] = guest
    columns["offset"][n:] = 0
    by_job = all(np.array_equal(s.family, s.job) for s in (schedule, job))
    columns["family"][n:] = guest if by_job else schedule.family.max(initial=-1) + 1 + job.family
    tail, head, lag, distance = (
        np.concatenate(pair) for pair in zip(schedule.arcs, job.arcs, strict=True)
    )
    tail[len(schedule.arcs.tail) :] += n
    head[len(schedule.arcs.head) :] += n
    # arcs between iterations last, as `JobArray` lists them: so it knows the graph as its own
    copy = columns["iteration"]
    order = np.argsort((distance > 0) | (copy[tail] != copy[head]), kind="stable")
    rows = schedule.sequences.to_lists()
    for i in _alone(job):
        rows[int(job.single_resource[i])].append(n + i)
    return Schedule(
        name=schedule.name,
        time_unit=schedule.time_unit,
        resources=schedule.resources,
        op_resources=Rows.of([*schedule.op_resources.to_lists(), *job.op_resources.to_lists()]),
        arcs=Arcs(tail[order], head[order], lag[order], distance[order]),
        period=schedule.period,
        sequences=Rows.of(rows),
        start=np.append(schedule.start, np.zeros(job.n_operations, np.int64)),
        **columns,  # type: ignore[arg-type]
    )


def _alone(job: Schedule) -> list[int]:
    """Blocks of one job in the order in which it runs alone; marks are left out.

    Micro-batches one after the other, forward down the stages and back up; then the updates.
    """
    blocks = [i for i, kind in enumerate(job.kind.tolist()) if kind in KINDS]

    def turn(i: int) -> tuple[int, bool, int, bool, int, bool]:
        stage, forward = int(job.stage[i]), str(job.kind[i]) in ("F", "U")
        return (
            int(job.iteration[i]),
            str(job.kind[i]) == "U",
            int(job.microbatch[i]),
            not forward,
            stage if forward else -stage,
            str(job.kind[i]) == "B",  # after R
        )

    return sorted(blocks, key=turn)


COPIES: Final = {"in": "copy in", "out": "copy out"}
"""Kinds of copies of states, by direction."""
CARRIED: Final = frozenset((*MESSAGES, *COPIES.values()))
"""Kinds of operations of links."""
_COLUMNS: Final = (
    "duration", "kind", "job", "stage", "microbatch", "iteration", "offset", "family", "release",
    "deadline", "setup_in", "setup_out", "acquire", "free", "workspace", "start",
)  # fmt: skip


def blocks_only(schedule: Schedule) -> Schedule:
    """A scheduled document without messages and copies, and without their links.

    What a message joined is joined by an arc of its own. Documents without links are given back as
    they are.
    """
    if CARRIED.isdisjoint(schedule.kind.tolist()):
        return schedule
    assert schedule.sequences is not None
    stays = ~np.isin(schedule.kind, sorted(CARRIED))
    users = schedule.users
    kept = [r for r in range(len(users)) if not len(users[r]) or stays[users[r]].any()]
    at = np.full(schedule.n_resources, -1)
    at[kept] = np.arange(len(kept))
    number = np.cumsum(stays) - 1
    tail, head, lag, distance = schedule.arcs
    inner = stays[tail] & stays[head]
    columns: dict[str, Any] = {key: getattr(schedule, key)[stays] for key in _COLUMNS}
    return Schedule(
        name=schedule.name,
        time_unit=schedule.time_unit,
        resources=tuple(schedule.resources[r] for r in kept),
        op_resources=Rows.of(at[schedule.op_resources[i]] for i in np.flatnonzero(stays).tolist()),
        arcs=Arcs(number[tail[inner]], number[head[inner]], lag[inner], distance[inner]),
        period=schedule.period,
        sequences=Rows.of(number[_of(schedule.sequences[r], stays)] for r in kept),
        provenance=schedule.provenance,
        **columns,
    )


def _of(row: npt.NDArray[np.int64], stays: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return row[stays[row]]
