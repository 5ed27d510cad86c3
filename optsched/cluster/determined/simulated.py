"""A simulated cluster as a pool of Determined: asked at an instant, or in compiled code."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.cluster.determined.columns import COLUMNS, Columns, empty, listed, ring
from optsched.cluster.determined.decisions import decide_columns, decide_steps, started
from optsched.cluster.world.advance import release, step
from optsched.cluster.world.build import world
from optsched.cluster.world.compiled import PAUSE, run
from optsched.cluster.world.layout import ARRIVED, ASK, COMPLETED, WORLD
from optsched.cluster.world.policy import Decision
from optsched.cluster.world.progress import MOST_VAIN
from optsched.cluster.world.stays import start_on
from optsched.io.values import format_value
from optsched.kernels.compile import INT, INTS, entry, helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

_UNITS = 2**40
"""Zero-slot units of a node without a limit."""


class Cluster:
    """Jobs and nodes as tasks and agents; keeps what the workload never changes.

    A job is a gang of its largest size up to `gang` (None: up to the cluster), or of its smallest
    if all are larger; 0 for a zero-slot task. Jobs of one group share its weight, limit and
    priority; one without a group is a group of its own. Node k is agent ``nk``, ties go by the md5
    of these names and of the jobs'. Determined would never start a gang that even idle agents
    cannot serve, such as 12 GPUs on nodes of 8: here it is cut in pieces, as under other policies.
    """

    def __init__(
        self, best: bool, heterogeneous: bool, gang: int | None, *, by_level: bool,
        preemption: bool = False, backfill: bool = False,
    ) -> None:  # fmt: skip
        self.fit, self.gang, self.by_level = (best, heterogeneous), gang, by_level
        self.preemption, self.backfill = preemption, backfill
        self._known: tuple[Any, list[int], Columns] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What is kept of a workload stays behind: other processes read it anew."""
        return {**self.__dict__, "_known": None}

    def columns(self, view: ClusterView) -> Columns:
        """The pool at this instant; task i is the job of this number."""
        capacity, known = view.capacity.tolist(), self._known
        if known is None or known[0]() is not view.workload or known[1] != capacity:
            made = self.of(view.workload, capacity)
            self._known = known = (weakref.ref(view.workload), capacity, made)
        c = known[2]
        if len(view.held_node) > len(c.held):
            rows = 2 * len(view.held_node)
            c = c._replace(held=np.zeros(rows, c.held.dtype), undo=np.zeros(rows + 1, c.undo.dtype))
            self._known = (*known[:2], c)
        _agents(c, view)
        jobs, gpus = view.job, view.gpus
        held = gpus > 0  # also if another size is the largest by now
        c.task["slots"][jobs[held]] = gpus[held]
        c.task["runs"][jobs], c.task["preemptible"][jobs] = view.running, view.preemptible
        order = self.order(c, jobs)
        running = c.task["runs"][order] == 1
        listed(c, order[~running], order[running])
        _held(c, view)
        return c

    def order(self, c: Columns, jobs: IntArray) -> IntArray:
        """Jobs as the scheduler looks at them."""
        if not self.by_level:
            return jobs
        return np.asarray(jobs[np.argsort(c.task["level"][jobs], kind="stable")])

    def of(self, w: Workload, capacity: list[int]) -> Columns:
        """The pool before anything has arrived, on nodes of these GPUs."""
        limit = sum(capacity)
        slots = _gangs(w, limit if self.gang is None else min(self.gang, limit))
        sizes, kind = np.unique(slots, return_inverse=True)
        n, groups = len(w), len(w.groups)
        alone = np.array([not group.name for group in w.groups], bool)[w.group]
        level = np.array([-1 if g.priority is None else g.priority for g in w.groups])[w.group]
        c = empty(len(capacity), len(sizes), n, groups + n, limit, self.fit)
        c.pool["preemption"], c.pool["backfill"] = self.preemption, self.backfill
        c.kind["slots"] = sizes
        c.kind["pieces"] = [s > 0 and not _serves(s, capacity, self.fit[1]) for s in sizes.tolist()]
        c.weight[:groups], c.weight[groups:] = [group.weight for group in w.groups], w.weight
        limits = [-1 if group.max_slots is None else group.max_slots for group in w.groups]
        c.group["limit"][:groups] = limits
        c.ring[:], first = ring([f"n{a}" for a in range(len(capacity))], w.names)
        for name, values in (
            ("slots", slots), ("kind", kind), ("registered", w.submit), ("held", -1),
            ("group", np.where(alone, groups + np.arange(n), w.group)), ("first", first),
            ("preemptible", w.preemptible), ("level", np.where(level < 0, w.priority, level)),
        ):  # fmt: skip
            c.task[name] = values
        return c

    def notes(self, w: Workload, capacity: list[int]) -> list[str]:
        """Names jobs whose gang not even idle agents serve."""
        c = self.of(w, capacity)
        cut = np.flatnonzero(c.kind["pieces"][c.task["kind"]] == 1)
        some = [f"job {format_value(w.names[j])} of {c.task['slots'][j]} GPUs" for j in cut[:1]]
        some += [f"and {len(cut) - 1} more"] * (len(cut) > 1)
        rest = (
            "would wait for ever in Determined, for no idle agents make up the gang: cut in pieces"
        )
        return [f"{' '.join(some)} {rest}"] if some else []

    def log(
        self, workload: Workload, nodes: Nodes, settings: Settings, steps: int, name: str
    ) -> Log | None:
        """The whole simulation in compiled code; None if not compiled.

        Not compiled are contention, changes of nodes, and zero-slot tasks.
        """
        if settings.contention is not None or settings.changes or settings.timing != "event":
            return None
        if bool((workload.size == 0).any()):
            return None
        w = world(workload, nodes, settings)
        c = self.of(workload, list(nodes.gpus))
        undo = np.zeros(len(w.held) + 1, c.undo.dtype)
        c = c._replace(held=w.held, undo=undo)
        for column in ("capacity", "units", "takes"):
            c.given[column] = w.node[column]
        if not self.by_level:
            c.task["level"] = 0
        return run(lambda w: _simulate(w, c, steps), w, workload, name)


def _gangs(w: Workload, limit: int) -> IntArray:
    """Slots of every job."""
    first = w.size_ptr[:-1]
    most = [limit if g.max_slots is None else min(limit, g.max_slots) for g in w.groups]
    room = np.array(most, np.int64)[w.group]  # a gang beyond its group's slots would never start
    fits = w.size <= np.repeat(room, np.diff(w.size_ptr))
    largest = np.maximum.reduceat(np.where(fits, w.size, -1), first)
    return np.where(largest < 0, w.size[first], largest)


def _serves(slots: int, capacity: list[int], heterogeneous: bool) -> bool:
    """Whether idle nodes serve a gang by Determined's rule; also one that is too large at all."""
    sizes = sorted({n for n in capacity if n > 0}, reverse=True)
    if slots > sum(capacity) or (sizes and slots <= sizes[0]):
        return True
    if any(slots % n == 0 and capacity.count(n) * n >= slots for n in sizes):
        return True
    for n in sizes if heterogeneous else ():
        slots -= n * min(slots // n, capacity.count(n))
    return heterogeneous and slots == 0


def _agents(c: Columns, view: ClusterView) -> None:
    """The nodes now; one that takes no work is a drained agent."""
    node, given = view.held_node, c.given
    used = np.bincount(node, view.held_count, len(given)).astype(np.int64)
    busy = np.bincount(node, view.held_count == 0, len(given)).astype(np.int64)
    free = view.zero_free if len(view.zero_free) else np.full(len(given), _UNITS)
    # a node without GPUs still takes zero-slot tasks
    given["takes"] = (view.capacity > 0) | ((free > 0) & (len(view.zero_free) > 0))
    given["capacity"] = np.where(given["takes"] == 1, view.capacity, used)
    given["free"] = given["capacity"] - used
    given["units"], given["free_units"] = free + busy, free


def _held(c: Columns, view: ClusterView) -> None:
    """Where jobs run: every row is followed by the next one of its job."""
    rows = np.arange(len(view.held_node))
    ends = np.zeros(len(rows) + 1, bool)
    ends[view.held_ptr[1:]] = True
    held = c.held[: len(rows)]
    held["where"], held["count"] = view.held_node, view.held_count
    held["following"] = np.where(ends[1:], -1, rows + 1)
    c.task["held"][view.job] = np.where(np.diff(view.held_ptr) > 0, view.held_ptr[:-1], -1)


def decision(view: ClusterView, c: Columns, steps: int, variant: str = "code") -> Decision:
    """Quotas and nodes. Released jobs stop now; what they held is given out one unit of time later.

    Whatever changes makes Determined look again at its next tick, for one answer need not use all
    the room there is: here it is asked again one unit of time later, until nothing changes. Starts
    are looked at again one after the other, on the cluster before anything is released; who comes
    too late waits.
    """
    decide_columns(c, steps, variant)
    quota = np.where(view.running & (view.gpus == 0), -1, view.gpus)
    found = {job: where for job, where in started(c).items() if where}
    at = np.searchsorted(view.job, np.array(list(found), np.int64))
    slots = c.task["slots"][list(found)]
    quota[at] = np.where(slots == 0, -1, slots)
    released = c.release[: int(c.pool["releases"][0])]
    quota[np.searchsorted(view.job, released)] = 0
    # if nothing changes now, the same question gets the same answer: the next event asks again
    wake = view.time + 1 if found or len(released) else None
    nodes = dict(zip(at.tolist(), found.values(), strict=True))
    return Decision(quota, nodes=nodes, wake_at=wake, order=at)


@helper(INT, COLUMNS, INTS, INT, INT, counted=False)
def _place(c, jobs, n, job):  # type: ignore[no-untyped-def]
    """Where a job stands, or is to be put, among the first n: by level, then number."""
    low, level = 0, c.task[job].level
    while low < n:
        middle = (low + n) >> 1
        other = c.task[jobs[middle]].level
        if other < level or (other == level and jobs[middle] < job):
            low = middle + 1
        else:
            n = middle
    return low


@helper(INT, COLUMNS, INT, INT, counted=False)
def _wait(c, job, step):  # type: ignore[no-untyped-def]
    """A job waits (step = 1), or no longer does (-1)."""
    jobs, n = c.pending, c.pool[0].pending
    c.pool[0].pending += step
    c.kind[c.task[job].kind].pending += step
    return _shift(jobs, n, _place(c, jobs, n, job), job, step)


@helper(INT, COLUMNS, INT, INT, INT, counted=False)
def _run(c, job, held, step):  # type: ignore[no-untyped-def]
    """A job runs (step = 1) where the rows from `held` on say, or no longer does (-1)."""
    jobs, n = c.running, c.pool[0].running
    c.pool[0].running += step
    c.task[job].held, c.task[job].runs = held, 1 if step == 1 else 0
    return _shift(jobs, n, _place(c, jobs, n, job), job, step)


@helper(INT, INTS, INT, INT, INT, INT, counted=False)
def _shift(jobs, n, at, job, step):  # type: ignore[no-untyped-def]
    """Put a job at a place among the first n, or take away what is there."""
    if step == 1:
        for i in range(n, at, -1):
            jobs[i] = jobs[i - 1]
        jobs[at] = job
    else:
        for i in range(at, n - 1):
            jobs[i] = jobs[i + 1]
    return at


@helper(INT, WORLD, COLUMNS, counted=False)
def _notice(w, c):  # type: ignore[no-untyped-def]
    """Take over what happened at this instant, and what is free."""
    if w.state[0].running_now == 0:
        c.pool[0].running = 0  # an instant that left no active job was not told
    for e in range(w.state[0].events):
        job = w.event[e, 1]
        if w.event[e, 0] == ARRIVED:
            _wait(c, job, 1)
        elif w.event[e, 0] == COMPLETED and c.pool[0].running > 0:
            _run(c, job, -1, -1)
    for a in range(len(c.given)):
        c.given[a].free, c.given[a].free_units = w.node[a].free, w.node[a].free_units
    return 0


@helper(INT, WORLD, COLUMNS, counted=False)
def _act(w, c):  # type: ignore[no-untyped-def]
    """Make an answer true; 1 if anything changes."""
    pool, first, changed = c.pool[0], 0, 1 if c.pool[0].releases > 0 else 0
    for i in range(pool.releases):
        job = c.release[i]
        release(w, job, 0)
        _run(c, job, -1, -1)
        _wait(c, job, 1)
    for s in range(pool.starts):
        job, rows = c.start[s], c.end[s] - first
        for r in range(rows):
            w.named[r, 0], w.named[r, 1] = c.rows[first + r].where, c.rows[first + r].count
        first = c.end[s]
        if rows > 0:
            changed = 1
            start_on(w, job, c.task[job].slots, 0, rows)
            _wait(c, job, -1)
            _run(c, job, w.job[job].held, 1)
    return changed


@entry(INT, WORLD, COLUMNS, INT, counted=False)
def _simulate(w, c, steps):  # type: ignore[no-untyped-def]
    """At every event, and one unit of time after every change."""
    for _ in range(MOST_VAIN):
        status = step(w)
        if status != ASK:
            return status
        _notice(w, c)
        decide_steps(c, steps)
        w.state[0].wake = w.state[0].time + 1 if _act(w, c) == 1 else -1
    return PAUSE
