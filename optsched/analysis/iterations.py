"""Iterations of training jobs in a schedule: number, latency and waiting time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from optsched.io.text import NANOSECONDS
from optsched.model.graph import evaluate
from optsched.model.schedule import Arcs, Csr, Schedule

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

BLOCKS: Final = frozenset({"F", "B", "I", "W", "R", "U", "end"})
"""Kinds of operations that make up an iteration of a training job."""


@dataclass(frozen=True)
class JobReport:
    """Iterations of one job; times in the schedule's unit.

    ``iterations`` counts those of a cycle (or of the whole one-shot schedule). ``latency`` is the
    longest time from the first start of an iteration to its last end, ``wait`` the part of it
    beyond the longest chain of blocks and lags: time lost to other jobs and micro-batches.
    ``cycles`` is the latency in periods, None for a one-shot schedule; ``recompute`` whether the
    solver chose recomputation, None if unknown; ``name`` is "" for a job without one.
    """

    job: int
    iterations: int
    latency: int
    wait: int
    cycles: float | None
    recompute: bool | None
    name: str = ""


def has_iterations(schedule: Schedule) -> bool:
    """Whether every operation is a block of a training iteration, some of them forward."""
    kinds = set(schedule.kind.tolist())
    return "F" in kinds and kinds <= BLOCKS


def job_reports(schedule: Schedule) -> tuple[JobReport, ...]:
    """Iterations of every job of a scheduled job array, in order of job; () for other schedules.

    In a periodic schedule one iteration spans several cycles: its blocks start at
    ``start + offset * period``. Operations without resource (end marks) do not count.
    """
    if schedule.start is None or not has_iterations(schedule):
        return ()
    held = np.flatnonzero(np.diff(schedule.op_resources.indptr))
    if not len(held):
        return ()
    labels = np.stack((schedule.job[held], schedule.iteration[held]))
    (jobs, _), group = np.unique(labels, axis=1, return_inverse=True)
    group = group.ravel()
    begin = _begin(schedule)[held]
    latency = _most(group, begin + schedule.duration[held]) + _most(group, -begin)
    chain = _most(group, (evaluate(_inner_arcs(schedule)).head + schedule.duration)[held])
    chosen = _recompute(schedule)
    found = []
    for job in np.unique(jobs).tolist():
        mine = np.flatnonzero(jobs == job)
        worst = mine[int(np.argmax(latency[mine]))]
        longest = int(latency[worst])
        found.append(
            JobReport(
                job, len(mine), longest, longest - int(chain[worst]),
                None if schedule.period is None else longest / schedule.period,
                chosen[job] if 0 <= job < len(chosen) else None,
                schedule.job_names[job] if schedule.job_names else "",
            )
        )  # fmt: skip
    return tuple(found)


def throughput(schedule: Schedule, jobs: tuple[JobReport, ...], span: int) -> float | None:
    """Iterations per second of all jobs together: those of one span (a period, or the makespan)."""
    if not jobs or span <= 0 or not schedule.time_unit:
        return None
    return sum(job.iterations for job in jobs) * 10**9 / NANOSECONDS[schedule.time_unit] / span


def _begin(schedule: Schedule) -> npt.NDArray[Any]:
    """Starts of the blocks of one iteration; Python integers where int64 could overflow."""
    assert schedule.start is not None  # checked by `job_reports`
    turn = schedule.period or 0
    exact = turn * int(schedule.offset.max(initial=0)) > 1 << 61
    cycles: npt.NDArray[Any] = schedule.offset.astype(object if exact else np.int64)
    return cycles * turn + schedule.start


def _most(group: IntArray, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The largest value of every group."""
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    most: npt.NDArray[Any] = np.maximum.reduceat(values[order], first)
    return most


def _inner_arcs(schedule: Schedule) -> Schedule:
    """The graph of arcs within iterations alone: no resources, releases or repetition."""
    tail, head, lag, distance = schedule.arcs
    inner = (
        (schedule.job[tail] == schedule.job[head])
        & (schedule.iteration[tail] == schedule.iteration[head])
        & (distance == 0)
    )
    return Schedule(
        resources=(),
        duration=schedule.duration,
        op_resources=Csr(np.zeros(schedule.n_operations + 1, np.int64), []),
        arcs=Arcs(tail[inner], head[inner], lag[inner], distance[inner]),
    )


def _recompute(schedule: Schedule) -> list[bool]:
    """Which jobs recompute according to the provenance; [] if unknown."""
    flags = schedule.provenance.get("recompute")
    if not isinstance(flags, (list, tuple)) or not all(isinstance(one, bool) for one in flags):
        return []
    return list(flags)
