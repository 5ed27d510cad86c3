"""`fair_share` and `priority` as policies: for simulations and live training."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from optsched.cluster.determined.decisions import VARIANTS
from optsched.cluster.determined.fair_share_scheduler import share_reasons, share_slots
from optsched.cluster.determined.fitting import Agents, Kind, Tasks, by_hash
from optsched.cluster.determined.priority_scheduler import level_reasons, place_by_level
from optsched.cluster.determined.state import FITS
from optsched.cluster.policies.gangs import checked_gang
from optsched.cluster.world.policy import Decision
from optsched.io.values import boolean, format_value, one_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.determined.fitting import Outcome
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import ClusterView
    from optsched.cluster.world.reasons import Reason
    from optsched.model.schedule import IntArray

_UNITS = 2**40
"""Zero-slot units of a node without a limit."""


class _Every(NamedTuple):
    """All jobs of a workload on nodes of these sizes."""

    workload: Callable[[], Workload | None]
    sizes: list[int]
    tasks: Tasks
    rank: IntArray
    zero_slot: bool
    """Whether some jobs need no slots."""


class Scheduler:
    """What both share: jobs as tasks, nodes as agents ``n0``, ``n1``, ...

    A job is a gang of its largest size up to `gang`, the cluster and its group's `max_slots`; one
    without a group is a group of its own. Released slots are given out one unit of time later, for
    the scheduler decides before they are free; after every start and release it decides again one
    unit later, as Determined does at its next tick. A gang that even idle agents cannot serve, such
    as 12 GPUs on nodes of 8, would wait for ever in Determined: here it is cut in pieces.

    Parameters
    ----------
    variant
        ``"code"``: as Determined's master decides, ``"docs"``: as its documentation says.
    fit
        ``"best"``: fullest nodes first; ``"worst"``: emptiest first.
    heterogeneous
        Whether a gang may be spread over idle nodes of different sizes.
    gang
        Upper bound of the size of elastic jobs; None: none.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ("variant", "fit", "heterogeneous", "gang")
    clairvoyant: bool = False
    preemption: bool = False

    def __init__(
        self, *, variant: str = "code", fit: str = "best", heterogeneous: bool = False,
        gang: int | None = None,
    ) -> None:  # fmt: skip
        self.variant = one_of("variant", variant, VARIANTS)
        self.fit = one_of("fit", fit, FITS)
        self.heterogeneous = boolean("heterogeneous", heterogeneous)
        self.gang = checked_gang(gang)
        self._known: _Every | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is derived from a workload: other processes derive it anew."""
        return {**self.__dict__, "_known": None}

    def outcome(self, agents: Agents, tasks: Tasks) -> Outcome:
        """The scheduler's decision."""
        raise NotImplementedError

    def explain(self, agents: Agents, tasks: Tasks, names: list[str]) -> dict[int, Reason]:
        """Why tasks wait after the scheduler's decision."""
        raise NotImplementedError

    def decide(self, view: ClusterView) -> Decision:
        """Start and release jobs now."""
        quota = np.where(view.running & (view.gpus == 0), -1, view.gpus)
        # then no job starts, and none is released, before slots are free
        waits = not (self.preemption or self.variant == "docs" or self._every(view).zero_slot)
        if view.running.all() or (waits and not view.free.any()):
            return Decision(quota)
        agents, tasks = self._table(view)
        kinds = {*tasks.kind[~tasks.running].tolist()}
        if waits and not any(agents.fits(tasks.kinds[k]) for k in kinds):
            return Decision(quota)
        outcome = self.outcome(agents, tasks)
        start = outcome.start
        for i, places in start.items():
            quota[i] = sum(slots for _, slots in places) or -1
        quota[outcome.release] = 0
        # without a change, the same state gets the same decision until the next event
        wake = view.time + 1 if start or outcome.release else None
        nodes = {i: dict(places) for i, places in start.items()}
        order = np.array([*start], np.int64) if len(start) > 1 else None
        return Decision(quota, nodes=nodes, wake_at=wake, order=order)

    def reasons(self, view: ClusterView) -> dict[int, Reason]:
        """Reason of every waiting job that does not start now, by its position."""
        return self.explain(*self._table(view), [view.workload.names[j] for j in view.job.tolist()])

    def notes(self, workload: Workload, nodes: Nodes) -> list[str]:
        """Jobs that would wait for ever in Determined."""
        tasks = _tasks(workload, list(nodes.gpus), self.gang, self.heterogeneous)
        cut = np.flatnonzero([tasks.kinds[k].in_pieces for k in tasks.kind.tolist()])
        if not len(cut):
            return []
        more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        return [
            f"job {format_value(workload.names[cut[0]])} of {tasks.slots[cut[0]]} GPUs{more} would "
            "wait for ever in Determined, for no idle agents make up the gang: cut in pieces"
        ]

    def _every(self, view: ClusterView) -> _Every:
        """What the workload and the sizes of the nodes determine; derived once."""
        sizes, known = view.capacity.tolist(), self._known
        if known is None or known.workload() is not view.workload or known.sizes != sizes:
            tasks = _tasks(view.workload, sizes, self.gang, self.heterogeneous)
            rank, tasks.first = by_hash([f"n{a}" for a in range(len(sizes))], view.workload.names)
            zero_slot = any(kind.slots == 0 for kind in tasks.kinds)
            known = _Every(weakref.ref(view.workload), sizes, tasks, rank, zero_slot)
            self._known = known
        return known

    def _table(self, view: ClusterView) -> tuple[Agents, Tasks]:
        """Nodes and active jobs as the schedulers read them."""
        _, _, every, rank, zero_slot = self._every(view)
        jobs = view.job
        tasks = Tasks(
            slots=np.where(view.gpus > 0, view.gpus, every.slots[jobs]), group=every.group[jobs],
            kind=every.kind[jobs], kinds=every.kinds, preemptible=view.preemptible,
            running=view.running, submitted=every.submitted[jobs], level=every.level[jobs],
            weight=every.weight[jobs], limit=every.limit[jobs], first=every.first[jobs],
        )  # fmt: skip

        def held(i: int) -> list[tuple[int, int]]:
            rows = slice(view.held_ptr[i], view.held_ptr[i + 1])
            nodes, counts = view.held_node[rows].tolist(), view.held_count[rows].tolist()
            return list(zip(nodes, counts, strict=True))

        agents = Agents(
            view.capacity, view.free, view.zero_free, view.zero_free, view.capacity > 0, rank,
            held, self.fit == "best", self.heterogeneous,
        )  # fmt: skip
        return _with_units(agents, view, zero_slot), tasks


class FairShare(Scheduler):
    """Slots are divided among groups; see `Scheduler` and `optsched.cluster.determined.Pool`."""

    name: ClassVar[str] = "fair_share"
    honours_max_slots: ClassVar[bool] = True

    def outcome(self, agents: Agents, tasks: Tasks) -> Outcome:
        """The scheduler's decision."""
        return share_slots(agents, tasks, self.variant == "docs")[0]

    def explain(self, agents: Agents, tasks: Tasks, names: list[str]) -> dict[int, Reason]:
        """Why tasks wait after the scheduler's decision."""
        docs = self.variant == "docs"
        return share_reasons(agents, tasks, names, *share_slots(agents, tasks, docs), docs)


class Priority(Scheduler):
    """Better levels first; a group's priority decides before the job's. See `Scheduler`.

    Parameters
    ----------
    preemption
        Whether jobs of worse levels are released for one that does not fit (and, in ``code``,
        backfilled); off by default, as in Determined.
    **others
        See `Scheduler`.
    """

    name: ClassVar[str] = "priority"
    options: ClassVar[tuple[str, ...]] = ("preemption", *Scheduler.options)

    def __init__(self, *, preemption: bool = False, **others: Any) -> None:
        self.preemption = boolean("preemption", preemption)
        super().__init__(**others)

    def outcome(self, agents: Agents, tasks: Tasks) -> Outcome:
        """The scheduler's decision."""
        return place_by_level(agents, tasks, self.preemption, self.variant == "code")

    def explain(self, agents: Agents, tasks: Tasks, names: list[str]) -> dict[int, Reason]:
        """Why tasks wait after the scheduler's decision."""
        return level_reasons(agents, tasks, names, self.outcome(agents, tasks))


def _tasks(w: Workload, sizes: list[int], gang: int | None, heterogeneous: bool) -> Tasks:
    """All jobs of a workload, on idle nodes of these GPUs; `first` is not filled."""
    slots, count = _gangs(w, sum(sizes) if gang is None else min(gang, sum(sizes))), len(w.groups)
    distinct, kind = np.unique(slots, return_inverse=True)
    gpus = np.array(sizes, np.int64)
    idle = Agents(gpus, gpus, gpus, gpus, gpus > 0, gpus, lambda _: [], True, heterogeneous)
    kinds = [
        Kind(n, in_pieces=0 < n <= sum(sizes) and not idle.fits(Kind(n)))
        for n in distinct.tolist()
    ]  # fmt: skip
    alone = np.array([not group.name for group in w.groups], bool)[w.group]
    level = np.array([-1 if g.priority is None else g.priority for g in w.groups])[w.group]
    limit = np.array([-1 if g.max_slots is None else g.max_slots for g in w.groups])[w.group]
    return Tasks(
        slots=slots, group=np.where(alone, count + np.arange(len(w)), w.group), kind=kind,
        kinds=kinds, preemptible=w.preemptible, running=np.zeros(len(w), bool),
        submitted=w.submit.astype(float), level=np.where(level < 0, w.priority, level),
        weight=np.where(alone, w.weight, np.array([group.weight for group in w.groups])[w.group]),
        limit=np.where(alone, -1, limit), first=np.zeros(0, np.int64),
    )  # fmt: skip


def _gangs(w: Workload, limit: int) -> IntArray:
    """Slots of every job: its largest size within the limits, else its smallest."""
    most = [limit if g.max_slots is None else min(limit, g.max_slots) for g in w.groups]
    each = np.array(most, np.int64)[w.group]
    fits = w.size <= np.repeat(each, np.diff(w.size_ptr))
    largest = np.maximum.reduceat(np.where(fits, w.size, -1), w.size_ptr[:-1])
    return np.where(largest < 0, w.size[w.size_ptr[:-1]], largest)


def _with_units(agents: Agents, view: ClusterView, zero_slot: bool) -> Agents:
    """Agents with zero-slot units, and with the used slots of nodes that take no work."""
    n, closed = len(view.capacity), view.capacity == 0
    if not zero_slot and not closed.any():
        none = np.zeros(n, np.int64)
        return replace(agents, units=none, free_units=none)
    used = np.bincount(view.held_node, view.held_count, n).astype(np.int64)
    busy = np.bincount(view.held_node, view.held_count == 0, n).astype(np.int64)
    free = view.zero_free if len(view.zero_free) else np.full(n, _UNITS)
    # a node without GPUs still takes zero-slot tasks
    takes_work = ~closed | ((free > 0) & (len(view.zero_free) > 0))
    return replace(agents, capacity=np.where(takes_work, view.capacity, used), units=free + busy,
                   free=np.where(takes_work, view.free, 0), free_units=free,
                   takes_work=takes_work)  # fmt: skip
