"""A simulated cluster as a pool of Determined, and its answers as quotas."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.cluster.determined.board import Board
from optsched.cluster.determined.columns import AgentColumns, Columns, TaskColumns
from optsched.cluster.determined.shares import in_order
from optsched.cluster.world.policy import Decision

if TYPE_CHECKING:
    from optsched.cluster.determined.columns import Fits, Kind
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import ClusterView


class _Jobs(NamedTuple):
    """What never changes of the jobs of a workload, and of their groups."""

    names: tuple[str, ...]
    slots: list[int]
    submit: list[int]
    group: list[int]
    priority: list[int]
    kind: list[Kind]
    weight: list[float]
    max_slots: list[int]
    gangs: frozenset[int]
    """All numbers of slots that occur."""


class Cluster:
    """Reads views as pools; keeps what the view's workload never changes.

    A job is a gang of its largest size up to `gang` (None: up to the cluster), or of its smallest
    if all are larger; 0 for a zero-slot task. Jobs of one group share its weight, limit and
    priority; one without a group is a group of its own. Node k is agent ``nk``, ties go by the md5
    of these names and of the jobs'. Determined would never start a gang that even idle agents
    cannot serve, such as 12 GPUs on nodes of 8: here it is cut in pieces, as under other policies.
    """

    def __init__(self, best: bool, heterogeneous: bool, gang: int | None = None) -> None:
        self.best, self.heterogeneous, self.gang = best, heterogeneous, gang
        self._known: tuple[Any, int, _Jobs] | None = None
        self._spread: dict[tuple[int, ...], frozenset[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is kept of a workload stays behind: other processes read it anew."""
        return {**self.__dict__, "_known": None, "_spread": {}}

    def columns(self, view: ClusterView) -> Columns:
        """The pool at this instant; task i is the job at position i."""
        limit = int(view.capacity.sum())
        jobs = self._jobs(view.workload, limit if self.gang is None else min(self.gang, limit))
        rows = view.job.tolist()
        held, agents = _held(view)
        slots = [jobs.slots[j] for j in rows]
        kind = [jobs.kind[j] for j in rows]
        for i in np.flatnonzero(view.gpus).tolist():
            slots[i] = int(view.gpus[i])  # also if another size is the largest by now
        tasks = TaskColumns(
            [jobs.names[j] for j in rows], slots,
            view.preemptible.tolist(), [jobs.submit[j] for j in rows],
            [jobs.group[j] for j in rows], [jobs.priority[j] for j in rows],
            [None] * len(rows), kind, view.running.tolist(), held,
        )  # fmt: skip
        cols = Columns(agents, tasks, jobs.weight, jobs.max_slots, self.best, self.heterogeneous)
        return cols._replace(spread=self._pieces(cols, jobs))

    def _pieces(self, cols: Columns, jobs: _Jobs) -> frozenset[int]:
        """Gangs that fit the cluster, but not Determined's rule, were it idle."""
        agents = cols.agents
        sizes = [0 if d else n for n, d in zip(agents.slots, agents.drained, strict=True)]
        key = tuple(sorted(sizes))
        if key not in self._spread:
            idle = Board(cols, agents._replace(used=[0] * len(sizes)))
            self._spread[key] = frozenset(
                s for s in jobs.gangs if 0 < s <= sum(sizes) and not idle.has((s, False, None))
            )
        return self._spread[key]

    def _jobs(self, workload: Workload, limit: int) -> _Jobs:
        known = self._known
        if known is None or known[0]() is not workload or known[1] != limit:
            self._spread = {}
            self._known = known = (weakref.ref(workload), limit, _jobs_of(workload, limit))
        return known[2]


def decision(
    view: ClusterView,
    cols: Columns,
    start: list[int],
    release: list[int],
) -> Decision:
    """Quotas and nodes. Released jobs stop now; what they held is given out one unit of time later.

    Whatever changes makes Determined look again at its next tick, for one answer need not use all
    the room there is: here it is asked again one unit of time later, until nothing changes.

    Parameters
    ----------
    view, cols
        The instant.
    start, release
        What Determined's scheduler answers. Starts are looked at again one after the other, on the
        cluster before anything is released, as its resource pool does; who comes too late waits.
    """
    tasks = cols.tasks
    quota = np.where(view.running & (view.gpus == 0), -1, view.gpus)
    nodes: dict[int, dict[int, int]] = {}
    for i, fits in in_order(cols, start)[0]:
        nodes[i] = dict(fits)
        quota[i] = tasks.slots[i] or -1
    quota[release] = 0
    # if nothing changes now, the same question gets the same answer: the next event asks again
    wake = view.time + 1 if nodes or release else None
    return Decision(quota, nodes=nodes, wake_at=wake, order=np.array(list(nodes), np.int64))


def _jobs_of(w: Workload, limit: int) -> _Jobs:
    first = w.size_ptr[:-1]
    most = [limit if g.max_slots is None else min(limit, g.max_slots) for g in w.groups]
    room = np.array(most, np.int64)[w.group]  # a gang beyond its group's slots would never start
    fits = w.size <= np.repeat(room, np.diff(w.size_ptr))
    largest = np.maximum.reduceat(np.where(fits, w.size, -1), first)
    slots = np.where(largest < 0, w.size[first], largest).tolist()
    group, priority = w.group.tolist(), w.priority.tolist()
    weight = [group.weight for group in w.groups]
    max_slots = [-1 if group.max_slots is None else group.max_slots for group in w.groups]
    for j, g in enumerate(group):
        if not w.groups[g].name:
            group[j] = len(weight)
            weight.append(float(w.weight[j]))
            max_slots.append(-1)
        if w.groups[g].priority is not None:
            priority[j] = w.groups[g].priority
    kinds: dict[int, Kind] = {s: (s, False, None) for s in set(slots)}
    return _Jobs(
        w.names, slots, w.submit.tolist(), group, priority,
        [kinds[s] for s in slots], weight, max_slots, frozenset(kinds),
    )  # fmt: skip


def _held(view: ClusterView) -> tuple[list[Fits], AgentColumns]:
    """Where every job runs, and the agents; a node that takes no work is a drained agent."""
    ptr, node, count = view.held_ptr.tolist(), view.held_node.tolist(), view.held_count.tolist()
    capacity, free_units = view.capacity.tolist(), view.zero_free.tolist()
    n = len(capacity)
    used, zero_used = [0] * n, [0] * n
    for a, slots in zip(node, count, strict=True):
        used[a] += slots
        zero_used[a] += slots == 0
    rows = list(zip(node, count, strict=True))
    held = [rows[a:b] for a, b in pairwise(ptr)]
    units = (
        [f + z for f, z in zip(free_units, zero_used, strict=True)] if free_units else [2**40] * n
    )
    idle_units = free_units or [0] * n  # a node without GPUs still takes zero-slot tasks
    drained = [c == 0 and f == 0 for c, f in zip(capacity, idle_units, strict=True)]
    slots = [u if d else c for u, d, c in zip(used, drained, capacity, strict=True)]
    return held, AgentColumns(
        [f"n{a}" for a in range(n)], slots, used, units, zero_used, drained, [False] * n
    )
