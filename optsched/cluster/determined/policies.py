"""`fair_share` and `priority` as policies: for simulations and live training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from optsched.cluster.determined.decisions import VARIANTS
from optsched.cluster.determined.fair_share_scheduler import share_slots
from optsched.cluster.determined.fitting import Agents, Kind, Tasks, by_hash
from optsched.cluster.determined.priority_scheduler import place_by_level
from optsched.cluster.determined.state import FITS
from optsched.cluster.policies.rigid import checked_gang
from optsched.cluster.world.policy import Decision
from optsched.io.values import boolean, format_value, one_of

if TYPE_CHECKING:
    from optsched.cluster.determined.fitting import Explain, Outcome
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import ClusterView, Reason
    from optsched.model.schedule import IntArray

_UNITS = 2**40
"""Zero-slot units of a node without a limit."""


class _Known(NamedTuple):
    """All jobs of a workload as tasks, and the ranks of nodes of these sizes."""

    workload: Workload
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
        self._known: _Known | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is derived from a workload: other processes derive it anew."""
        return {**self.__dict__, "_known": None}

    def scheduled(self, agents: Agents, tasks: Tasks) -> tuple[Outcome, Explain]:
        """The scheduler's decision, and a function that explains it."""
        raise NotImplementedError

    def decide(self, view: ClusterView) -> Decision:
        """Start and release jobs now."""
        quota = np.where(view.running & (view.gpus == 0), -1, view.gpus)
        known = self._jobs(view)
        # then no job starts, and none is released, before slots are free
        waits = not (self.preemption or self.variant == "docs" or known.zero_slot)
        if view.running.all() or (waits and not view.free.any()):
            return Decision(quota)
        agents, tasks = self._table(view, known)
        kinds = {*tasks.kind[~tasks.running].tolist()}
        if waits and not any(agents.fits(tasks.kinds[k]) for k in kinds):
            return Decision(quota)
        outcome, _ = self.scheduled(agents, tasks)
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
        _, explain = self.scheduled(*self._table(view, self._jobs(view)))
        return explain([view.workload.names[j] for j in view.job.tolist()])

    def notes(self, workload: Workload, nodes: Nodes) -> list[str]:
        """Jobs that would wait for ever in Determined."""
        tasks = self._tasks(workload, list(nodes.gpus))
        cut = np.flatnonzero([tasks.kinds[k].in_pieces for k in tasks.kind.tolist()])
        if not len(cut):
            return []
        more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        return [
            f"job {format_value(workload.names[cut[0]])} of {tasks.slots[cut[0]]} GPUs{more} would "
            "wait for ever in Determined, for no idle agents make up the gang: cut in pieces"
        ]

    def _jobs(self, view: ClusterView) -> _Known:
        """What the workload and the sizes of the nodes determine; derived once."""
        w, sizes = view.workload, view.capacity.tolist()
        if self._known is None or self._known.workload is not w or self._known.sizes != sizes:
            tasks = self._tasks(w, sizes)
            rank, tasks.first = by_hash([f"n{a}" for a in range(len(sizes))], w.names)
            zero_slot = any(kind.slots == 0 for kind in tasks.kinds)
            self._known = _Known(w, sizes, tasks, rank, zero_slot)
        return self._known

    def _tasks(self, w: Workload, sizes: list[int]) -> Tasks:
        """All jobs of a workload, on idle nodes of these GPUs; `first` is not filled."""
        total, count = sum(sizes), len(w.groups)
        largest = total if self.gang is None else min(self.gang, total)
        limit = np.array([-1 if g.max_slots is None else g.max_slots for g in w.groups])[w.group]
        most = np.where(limit < 0, largest, np.minimum(largest, limit))
        fits = w.size <= np.repeat(most, np.diff(w.size_ptr))
        slots = np.maximum.reduceat(np.where(fits, w.size, -1), w.size_ptr[:-1])
        slots = np.where(slots < 0, w.size[w.size_ptr[:-1]], slots)
        distinct, kind = np.unique(slots, return_inverse=True)
        gpus = np.array(sizes, np.int64)
        idle = Agents(gpus, gpus, gpus, gpus, gpus > 0, gpus, lambda _: [], True,
                      self.heterogeneous)  # fmt: skip
        pieces = [0 < n <= total and not idle.fits(Kind(n)) for n in distinct.tolist()]
        alone = np.array([not group.name for group in w.groups], bool)[w.group]
        level = np.array([g.priority or -1 for g in w.groups])[w.group]
        weight = np.array([group.weight for group in w.groups])[w.group]
        return Tasks(
            slots=slots, group=np.where(alone, count + np.arange(len(w)), w.group), kind=kind,
            kinds=[Kind(n, in_pieces=p) for n, p in zip(distinct.tolist(), pieces, strict=True)],
            preemptible=w.preemptible, running=np.zeros(len(w), bool),
            submitted=w.submit.astype(float), level=np.where(level < 0, w.priority, level),
            weight=np.where(alone, w.weight, weight), limit=np.where(alone, -1, limit),
            first=np.zeros(0, np.int64),
        )  # fmt: skip

    def _table(self, view: ClusterView, known: _Known) -> tuple[Agents, Tasks]:
        """Nodes and active jobs as the schedulers read them."""
        _, _, every, rank, zero_slot = known
        jobs = view.job
        tasks = replace(
            every, preemptible=view.preemptible, running=view.running,
            slots=np.where(view.gpus > 0, view.gpus, every.slots[jobs]),
            **{key: getattr(every, key)[jobs]
               for key in ("group", "kind", "submitted", "level", "weight", "limit", "first")},
        )  # fmt: skip

        def held(i: int) -> list[tuple[int, int]]:
            rows = slice(view.held_ptr[i], view.held_ptr[i + 1])
            nodes, counts = view.held_node[rows].tolist(), view.held_count[rows].tolist()
            return list(zip(nodes, counts, strict=True))

        n = len(view.capacity)
        used, busy = np.zeros((2, n), np.int64)
        if (view.capacity == 0).any() or zero_slot:  # what jobs hold is slow to read
            used = np.bincount(view.held_node, view.held_count, n).astype(np.int64)
            busy = np.bincount(view.held_node, view.held_count == 0, n).astype(np.int64)
        units = view.zero_free if len(view.zero_free) else np.full(n, _UNITS)
        # a node without GPUs still takes zero-slot tasks
        takes_work = (view.capacity > 0) | ((units > 0) & (len(view.zero_free) > 0))
        agents = Agents(
            np.where(takes_work, view.capacity, used), np.where(takes_work, view.free, 0),
            units + busy, units, takes_work, rank, held, self.fit == "best", self.heterogeneous,
        )  # fmt: skip
        return agents, tasks


class FairShare(Scheduler):
    """Slots are divided among groups; see `Scheduler` and `optsched.cluster.determined.Pool`.

    Determined's code can exclude a group as soon as its small task has started, release the task,
    and include the group again, at every tick: ``synthetic(80, 1.5, gpus=16, groups=8,
    sizes=dict.fromkeys((1, 2, 4, 8), 1))`` on two nodes of 8 has 7,736 preemptions with
    ``variant="code"``, 19 with ``"docs"``. So ``"docs"`` is the default of the policy.
    """

    name: ClassVar[str] = "fair_share"
    honours_max_slots: ClassVar[bool] = True

    def __init__(self, *, variant: str = "docs", **others: Any) -> None:
        super().__init__(variant=variant, **others)

    def scheduled(self, agents: Agents, tasks: Tasks) -> tuple[Outcome, Explain]:
        """The scheduler's decision, and a function that explains it."""
        return share_slots(agents, tasks, self.variant == "docs")


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

    def scheduled(self, agents: Agents, tasks: Tasks) -> tuple[Outcome, Explain]:
        """The scheduler's decision, and a function that explains it."""
        return place_by_level(agents, tasks, self.preemption, self.variant == "code")
