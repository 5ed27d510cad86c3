"""What a simulation was worth: times of jobs, use of the GPUs, fairness."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.cluster.workload.job import PER_SECOND, WORK
from optsched.errors import InputError
from optsched.io.values import format_value, one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from optsched.cluster.workload.nodes import NodeChange, Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import FloatArray
    from optsched.model.schedule import IntArray

PER_JOB: Final = ("jct", "queueing", "service", "waiting", "gpu_time", "rho")
"""Per-job metrics that have percentiles."""

SUMMARY: Final = (
    "jobs", "unfinished", "jct_mean", "queueing_mean", "service_mean", "waiting_mean",
    "waiting_for_room_mean", "makespan", "utilisation", "effective_utilisation", "gpu_hours",
    "restarts", "restart_time", "preemptions", "interruptions", "lost_time", "rho_mean", "rho_max",
)  # fmt: skip
"""Single numbers, in the order of tables; percentiles of the JCT follow the makespan."""


class _Mean:
    """Mean of a column over the jobs that ended; NaN without one."""

    def __set_name__(self, _: type, name: str) -> None:
        self.column = name.removesuffix("_mean")

    def __get__(self, run: Metrics, _: object = None) -> float:
        chosen = getattr(run, self.column)[run.ended].tolist()
        return sum(chosen) / len(chosen) if chosen else math.nan


@dataclass(frozen=True, eq=False, kw_only=True)
class Metrics:
    """Hold the numbers of a run; times in `time_unit`, means over the jobs that ended.

    Per job (in the workload's order; -1 or NaN for a job that did not end): `jct` = end - submit,
    `queueing` = first start - submit, `service` = JCT - queueing, `waiting` = JCT - time running
    (also between preemption and restart), `waiting_for_room` = the part of it in which fewer GPUs
    were free than the job's smallest size (the remainder is the policy's order), `gpu_time` = GPUs
    held times time (a shared GPU counts for both jobs), `restarts_by_job`, `preemptions_by_job`,
    `rho` = JCT / T_iso with
    T_iso = work / f(s) * max(1, n s / G), n the mean number of active jobs with GPUs in the job's
    life, s its largest size <= G / n, else its smallest (Mahajan et al., Themis, NSDI 2020).

    Examples
    --------
    >>> from optsched.cluster import Job, Nodes, simulate
    >>> queue = [Job(name=name, sizes=(8,), work=8 * 10**8) for name in "ab"]
    >>> numbers = simulate(queue, "fifo", Nodes(1, gpus=8)).metrics
    >>> numbers.jct_mean, numbers.makespan, numbers.percentile(50)
    (150.0, 200, 100)
    """

    time_unit: str
    makespan: int
    """Last end minus first submit."""
    utilisation: float
    """GPU-time held over the GPU-time that was there: G * makespan without node changes.

    A GPU is there while its node takes work, and on a drained node as long as it is held.
    """
    effective_utilisation: float
    """Work done over the same: a GPU-time at speed f(g)/g counts so much only."""
    restart_time: int
    """GPU-time spent in restarts."""
    interruptions: int
    """Times that a removed or failed node took a running job with it."""
    lost_time: int
    """GPU-time since their last end of a pass or stop that these jobs had to do again."""
    jct: IntArray
    queueing: IntArray
    service: IntArray
    waiting: IntArray
    waiting_for_room: IntArray
    gpu_time: IntArray
    restarts_by_job: IntArray
    preemptions_by_job: IntArray
    rho: FloatArray
    ended: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        for value in self.__dict__.values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    jobs = property(lambda self: len(self.ended))
    unfinished = property(lambda self: int((~self.ended).sum()))
    jct_mean, queueing_mean, service_mean = _Mean(), _Mean(), _Mean()
    waiting_mean, waiting_for_room_mean, rho_mean = _Mean(), _Mean(), _Mean()

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all jobs, also of those that did not end."""
        return int(self.gpu_time.sum()) / (3600 * PER_SECOND[self.time_unit])

    @property
    def restarts(self) -> int:
        """Starts and resizes beyond every job's first."""
        return int(self.restarts_by_job.sum())

    @property
    def preemptions(self) -> int:
        """Times that a running job lost all its GPUs."""
        return int(self.preemptions_by_job.sum())

    @property
    def rho_max(self) -> float:
        """Finish-time fairness of the job that is worst off."""
        return float(self.rho[self.ended].max()) if self.ended.any() else math.nan

    def percentile(self, p: float, of: str = "jct") -> float:
        """Nearest rank, 0 < p <= 100, of one of `PER_JOB`: the smallest x with F(x) >= p/100."""
        return nearest_rank(getattr(self, one_of("of", of, PER_JOB))[self.ended], p)

    def summary(self) -> dict[str, float]:
        """All single numbers by name, in the order of tables."""
        found: dict[str, float] = {key: getattr(self, key) for key in SUMMARY[:8]}
        if self.ended.any():
            found |= {f"jct_p{p}": self.percentile(p) for p in (50, 90, 95, 99, 100)}
        return found | {key: getattr(self, key) for key in SUMMARY[8:]}

    def __repr__(self) -> str:
        mean = f"mean JCT {self.jct_mean:.6g} {self.time_unit}"
        return f"<Metrics of {self.jobs} jobs: {mean}, {self.utilisation:.1%} of the GPUs in use>"


def nearest_rank(values: npt.NDArray[Any], p: float) -> float:
    """Smallest value x of these with a share >= p/100 of them at or below x."""
    number = isinstance(p, (int, float, np.number)) and not isinstance(p, bool)
    if not number or not 0 < p <= 100:
        raise InputError(f"percentile: expected 0 < p <= 100, got {format_value(p)}")
    if len(values) == 0:
        return math.nan
    share = Decimal(str(p))  # 99.9 is meant, not the nearest binary number
    rank = math.ceil(share * len(values) / 100)
    found: float = np.partition(values, rank - 1)[rank - 1].item()
    return found


def metrics(w: Workload, nodes: Nodes, changes: Sequence[NodeChange], log: Log) -> Metrics:
    """All metrics of a finished simulation."""
    ended = log.finished >= 0
    lasts = log.end - log.start
    first = np.full(len(w), np.iinfo(np.int64).max)
    np.minimum.at(first, log.job, log.start)
    jct, queueing = log.finished - w.submit, first - w.submit
    gpu_time, stays, running = np.zeros((3, len(w)), np.int64)
    np.add.at(gpu_time, log.job, log.gpus * lasts)
    np.add.at(stays, log.job, 1)
    np.add.at(running, log.job, lasts)
    begin, finish = span(w, log)
    taken = held(log)
    away = absences(nodes, changes, taken, begin, finish)
    capacity = nodes.total * (finish - begin) - int((away.count * (away.end - away.start)).sum())
    hit = interrupted(changes, log)
    done = float(log.work[log.gpus > 0].sum(dtype=np.float64)) / WORK
    allocated = int((taken.count * (taken.end - taken.start)).sum())
    columns = {
        "jct": jct, "queueing": queueing, "service": jct - queueing, "waiting": jct - running,
        "waiting_for_room": _for_room(w, nodes, log, taken, away),
    }  # fmt: skip
    return Metrics(
        time_unit=w.time_unit,
        makespan=finish - begin,
        utilisation=allocated / max(capacity, 1),
        effective_utilisation=done / max(capacity, 1),
        restart_time=int((np.minimum(log.restart, lasts) * log.gpus).sum()),
        interruptions=len(hit),
        lost_time=_lost_time(w, nodes, log, hit),
        gpu_time=gpu_time,
        restarts_by_job=np.maximum(stays - 1, 0),
        preemptions_by_job=log.preemptions,
        rho=np.where(ended, jct / _isolated(w, log.finished, nodes.total), np.nan),
        ended=ended,
        **{key: np.where(ended, column, -1) for key, column in columns.items()},
    )


def _lost_time(w: Workload, nodes: Nodes, log: Log, stays: IntArray) -> int:
    """GPU-time of these stays in which progress was made that does not count; jobs alone."""
    lost = 0
    rates = {kind: w.rates_on(kind) for kind in set(nodes.types)}
    for i in stays.tolist():
        row = slice(w.size_ptr[log.job[i]], w.size_ptr[log.job[i] + 1])
        kind = nodes.types[log.node[log.node_ptr[i]]]
        rate = int(rates[kind][row][np.searchsorted(w.size[row], log.gpus[i])])
        kept = -(-int(log.work[i]) // rate)
        lost += int(log.gpus[i]) * max(0, int(log.end[i] - log.start[i] - log.restart[i]) - kept)
    return lost


def _for_room(w: Workload, nodes: Nodes, log: Log, taken: Held, away: Held) -> IntArray:
    """Time of every job without GPUs while fewer were free than its smallest size.

    From its arrival to its end, or to that of the log. The rest of its waiting is the policy's.
    """
    begin, finish = span(w, log)
    time = np.concatenate((taken.start, away.start, taken.end, away.end, [begin, finish]))
    change = np.concatenate((taken.count, away.count, -taken.count, -away.count, [0, 0]))
    order = np.argsort(time, kind="stable")
    free = nodes.total - np.cumsum(change[order])
    least = w.size[w.size_ptr[:-1]]
    end = np.where(log.finished >= 0, log.finished, np.maximum(finish, w.submit))
    found = np.zeros(len(w), np.int64)
    for size in np.unique(least).tolist():
        short = _integral(time[order], (free < size).astype(np.int64))
        jobs, stays = least == size, least[log.job] == size
        found[jobs] = short(end[jobs]) - short(w.submit[jobs])
        on_gpus = short(log.end[stays]) - short(log.start[stays])
        np.subtract.at(found, log.job[stays], on_gpus)
    return found


def _integral(time: IntArray, level: npt.NDArray[Any]) -> Callable[[IntArray], npt.NDArray[Any]]:
    """Integral, from the first time to any moment, of a function that steps at these times."""
    area = np.concatenate(([0], np.cumsum(level[:-1] * np.diff(time))))

    def up_to(moment: IntArray) -> npt.NDArray[Any]:
        k = np.clip(np.searchsorted(time, moment, side="right") - 1, 0, None)
        return np.where(moment < time[0], 0, area[k] + level[k] * (moment - time[k]))

    return up_to


def _isolated(w: Workload, finished: IntArray, gpus: int) -> FloatArray:
    """T_iso of every job that ended: its time on its fair share of so many GPUs."""
    end = np.where(finished >= 0, finished, max(int(finished.max(initial=0)), int(w.submit[-1])))
    active = np.ones(len(w))  # mean number of active jobs with GPUs in the life of every job
    with_gpus = w.size[w.size_ptr[1:] - 1] > 0
    if with_gpus.any():
        time = np.concatenate((w.submit[with_gpus], end[with_gpus]))
        order = np.argsort(time, kind="stable")
        change = np.repeat((1.0, -1.0), int(with_gpus.sum()))  # int64 areas could overflow
        area = _integral(time[order], np.cumsum(change[order]))
        lives = np.maximum(end - w.submit, 1)
        active = np.maximum((area(end) - area(w.submit)) / lives, 1.0)
    fits = w.size * np.repeat(active, np.diff(w.size_ptr)) <= gpus
    begin = w.size_ptr[:-1]
    at = begin + np.maximum(np.add.reduceat(fits.astype(np.int64), begin) - 1, 0)
    share = np.maximum(1.0, active * w.size[at] / max(gpus, 1))
    return np.asarray(w.work / w.rate[at] * share)


# GPUs of nodes by time: held by jobs, or absent


class Held(NamedTuple):
    """So many GPUs of a node, from start to end."""

    node: IntArray
    count: IntArray  # type: ignore[assignment]  # tuple.count
    start: IntArray
    end: IntArray


def held(log: Log) -> Held:
    """GPUs held by jobs; those that two jobs share count once."""
    start = _counted_from(log)
    row = np.repeat(np.arange(len(log.job)), np.diff(log.node_ptr))
    begins, ends = start[row], log.end[row]
    counted = begins < ends
    return Held(log.node[counted], log.count[counted], begins[counted], ends[counted])


def _counted_from(log: Log) -> IntArray:
    """Start of every stay, for one on shared GPUs not before those before it there have ended."""
    if log.partner is None:
        return log.start
    start, reach = log.start.copy(), log.end.copy()
    root = np.arange(len(log.job))
    joined = np.flatnonzero(log.partner >= 0)
    for i in joined[np.argsort(log.start[joined], kind="stable")].tolist():
        r = root[i] = root[log.partner[i]]
        start[i] = min(max(start[i], reach[r]), log.end[i])
        reach[r] = max(reach[r], log.end[i])
    return start


def absences(
    nodes: Nodes, changes: Sequence[NodeChange], taken: Held, begin: int, finish: int
) -> Held:
    """GPUs of nodes that take no work, without those that jobs still hold there.

    A node takes no work from a drain or a removal to the next addition, and before its first
    change if that is an addition. Rows of a count below zero give back what is held meanwhile.
    """
    order = np.argsort(taken.node, kind="stable")
    sorted_nodes = taken.node[order]
    node, count, start, end = [], [], [], []
    for n, since, until in _closed(changes, begin, finish):
        a, b = np.searchsorted(sorted_nodes, [n, n + 1])
        rows = order[a:b]
        rows = rows[(taken.start[rows] < until) & (taken.end[rows] > since)]
        node.append(np.full(1 + len(rows), n))
        count.append(np.concatenate(([nodes.gpus[n]], -taken.count[rows])))
        start.append(np.concatenate(([since], np.maximum(taken.start[rows], since))))
        end.append(np.concatenate(([until], np.minimum(taken.end[rows], until))))
    none = np.zeros(0, np.int64)
    return Held(*(np.concatenate((none, *rows)) for rows in (node, count, start, end)))


def _closed(changes: Sequence[NodeChange], begin: int, finish: int) -> list[tuple[int, int, int]]:
    """Nodes with the times, within begin and finish, between which they take no work."""
    since: dict[int, int] = {}
    found = []
    seen: set[int] = set()
    for change in sorted(changes, key=lambda c: c.time):  # stable, as in the engine
        n, time = change.node, min(max(change.time, begin), finish)
        if change.kind != "add":
            since.setdefault(n, time)
        elif n in since or n not in seen:
            found.append((n, since.pop(n, begin), time))
        seen.add(n)
    found += [(n, time, finish) for n, time in since.items()]
    return [row for row in found if row[1] < row[2]]


def interrupted(changes: Sequence[NodeChange], log: Log) -> IntArray:
    """Stays that ended because one of their nodes was removed, ascending."""
    removed = {(change.time, change.node) for change in changes if change.kind == "remove"}
    times = np.array(sorted({time for time, _ in removed}), np.int64)
    cut = np.isin(log.end, times) & (log.end != log.finished[log.job])
    return np.array([
        i for i in np.flatnonzero(cut).tolist()
        if any((int(log.end[i]), node) in removed
               for node in log.node[log.node_ptr[i] : log.node_ptr[i + 1]].tolist())
    ], np.int64)  # fmt: skip


def span(w: Workload, log: Log) -> tuple[int, int]:
    """First submit, and when the log ends."""
    begin = int(w.submit[0])
    return begin, max(int(log.end.max(initial=begin)), int(log.finished.max(initial=begin)))
