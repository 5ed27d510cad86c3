"""What came of a simulation: the log, metrics, and the history as a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.cluster.results.metrics import absences, held, span
from optsched.cluster.world.engine import first_view
from optsched.cluster.world.policy import Reason, Why, of_free_gpus
from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas

    from optsched.cluster.results.metrics import Metrics
    from optsched.cluster.workload.nodes import NodeChange, Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView
    from optsched.cluster.world.settings import Settings
    from optsched.cluster.world.start import Start
    from optsched.model.schedule import IntArray, Schedule


@dataclass(frozen=True, eq=False)
class Run:
    """Hold a finished simulation: its log, metrics, and history as a schedule.

    Examples
    --------
    >>> from optsched.cluster import Job, Nodes, simulate
    >>> run = simulate([Job(name="a", sizes=(8,), work=8 * 10**8)], "fifo", Nodes(1, gpus=8))
    >>> run.jct.tolist(), optsched.verify(run.history)
    ([100], [])
    """

    workload: Workload
    nodes: Nodes
    settings: Settings
    policy: str
    options: Mapping[str, Any]
    log: Log
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """What the policy says of these jobs on these nodes."""
    reasons: Callable[[ClusterView], Mapping[int, Reason]] | None = field(
        default=None, kw_only=True, repr=False
    )
    """The policy's method `reasons`, if it has one: why jobs of a view wait, by position."""

    def __post_init__(self) -> None:
        for column in self.log:
            if column is not None:
                column.flags.writeable = False

    @property
    def jct(self) -> IntArray:
        """Completion minus submit time of every job, -1 if it did not end; shape (jobs,)."""
        return self.metrics.jct

    @cached_property
    def metrics(self) -> Metrics:
        """All numbers; see `optsched.cluster.results.metrics`."""
        from optsched.cluster.results.metrics import metrics

        return metrics(self.workload, self.nodes, self.settings.changes, self.log)

    def waiting(self, time: int | None = None) -> dict[str, Reason]:
        """Why every job that has come and not ended has no GPUs, by name.

        At this time, after all that happens then; by default when the log ends, after a Ctrl-C.
        """
        changes = self.settings.changes
        found = _reasons(self.workload, self.nodes, changes, self.log, self.policy, time)
        if self.reasons is None or all(why is not Why.ORDER for why, _ in found.values()):
            return found
        now = int(self.log.end.max()) if time is None else time
        settings = replace(self.settings, start=self.at(now))
        if (view := first_view(self.workload, self.nodes, settings)) is not None:
            for i, reason in self.reasons(view).items():
                name = self.workload.names[view.job[i]]
                if name in found and found[name].why is Why.ORDER:
                    found[name] = reason
        return found

    def reported_waiting(self) -> dict[str, Reason]:
        """Waiting jobs for reports: at the start of a simulation from now, or after a Ctrl-C."""
        start = self.settings.start
        if start is None and not self.metrics.unfinished:
            return {}
        return self.waiting(None if start is None else start.now)

    def at(self, time: int) -> Start:
        """The state just before the decisions of an instant, to simulate from present.

        The settings of the run have to be given again. Not for GPUs that jobs share; zero-slot
        tasks may get units of other nodes than theirs, which a later change of nodes may show.
        """
        from optsched.cluster.world.start import Start, Stay

        now, log = integer("time", time), self.log
        if log.half.any():
            raise InputError("run.at: jobs share GPUs, which a Start cannot hold")
        stays = []
        for i in np.flatnonzero(log.start < now).tolist():
            over, rows = bool(log.end[i] < now), slice(log.node_ptr[i], log.node_ptr[i + 1])
            held = zip(log.node[rows].tolist(), log.count[rows].tolist(), strict=True)
            stays.append(Stay(
                job=self.workload.names[log.job[i]], start=int(log.start[i]), nodes=dict(held),
                end=int(log.end[i]) if over else None, restart=int(log.restart[i]),
                work=int(log.work[i]) if over else None,
            ))  # fmt: skip
        return Start(now, tuple(stays))

    @cached_property
    def history(self) -> Schedule:
        """The realised history as a schedule that the verifier accepts."""
        from optsched.cluster.results.history import history

        return history(self)

    def to_pandas(self) -> pandas.DataFrame:
        """Make a data frame with one row per job, in the order of the workload.

        Times are in the unit of the column ``unit``; ``end`` and ``jct`` are -1 for a job that did
        not end. The other columns are those of `Metrics`.
        """
        from optsched.plots.notebook import frame

        w, m = self.workload, self.metrics
        keys = ("jct", "queueing", "service", "waiting", "gpu_time", "restarts_by_job",
                "preemptions_by_job", "rho")  # fmt: skip
        return frame({
            "job": list(w.names), "submit": w.submit, "end": self.log.finished,
            **{key: getattr(m, key) for key in keys}, "unit": [w.time_unit] * len(w),
        })  # fmt: skip

    def _repr_html_(self) -> str:
        from optsched.plots.notebook import simulation_view

        return simulation_view(self)

    def __repr__(self) -> str:
        size = f"{len(self.workload)} jobs on {self.nodes.total} GPUs"
        return (
            f"<{type(self).__name__} of {self.workload.name!r:.60}: {size}, "
            f"policy {self.policy!r:.40}, {len(self.log.start)} stays>"
        )


def _reasons(
    w: Workload, nodes: Nodes, changes: Sequence[NodeChange], log: Log, policy: str,
    time: int | None,
) -> dict[str, Reason]:  # fmt: skip
    """Why every job that has come and not ended is without GPUs; see `Run.waiting`."""
    begin, finish = span(w, log)
    now = finish if time is None else integer("time", time)
    ended = (log.finished >= 0) & (log.finished <= now)
    # stays that a Ctrl-C left open end with the log
    last = (log.end == finish) & (now >= finish) & ~ended[log.job]
    stays = np.flatnonzero((log.start <= now) & ((log.end > now) | last))
    away = absences(nodes, changes, held(log), begin, max(finish, now + 1))
    here = (away.start <= now) & (away.end > now)
    present = np.array(nodes.gpus) - np.bincount(away.node[here], away.count[here], len(nodes))
    visible, used = np.zeros((2, len(w.groups)), np.int64)
    np.add.at(used, w.group[log.job[stays]], log.gpus[stays])
    fitting = _fitting(w, nodes, log, stays, present)
    running, answer = {*log.job[stays].tolist()}, {}
    for j in np.flatnonzero((w.submit <= now) & ~ended).tolist():
        g = int(w.group[j])
        group, visible[g], least = w.groups[g], visible[g] + 1, int(w.size[w.size_ptr[j]])
        if j in running:
            continue
        free, most = fitting(j)
        reason = of_free_gpus(least, free, most, policy)
        if group.max_concurrent is not None and visible[g] > group.max_concurrent:
            text = f"only {group.max_concurrent} jobs of its group may be active at once"
            reason = Reason(Why.SHARE, text)
        elif group.max_slots is not None and used[g] + least > group.max_slots:
            text = f"its group holds {used[g]} of the {group.max_slots} GPUs it may have"
            reason = Reason(Why.SHARE, text)
        answer[w.names[j]] = reason
    return answer


def _fitting(
    w: Workload, nodes: Nodes, log: Log, stays: IntArray, present: IntArray
) -> Callable[[int], tuple[int, int]]:
    """GPUs of one type that a job could have now, with its CPUs and memory, and if none ran."""
    rows = np.concatenate([np.arange(*log.node_ptr[i : i + 2]) for i in stays] or [stays])
    job = np.repeat(log.job[stays], np.diff(log.node_ptr)[stays])
    count = log.count[rows].astype(np.float64)
    needs = (w.cpus_per_gpu, w.memory_per_gpu_gb)
    limits = [np.array(limit, np.float64) for limit in (nodes.cpus, nodes.memory_gb)]
    taken = [np.bincount(log.node[rows], count * need[job], len(nodes)) for need in needs]
    if log.partner is not None:  # its partner's GPUs
        count[np.repeat(np.isin(log.partner[stays], stays), np.diff(log.node_ptr)[stays])] = 0
    held_gpus = np.bincount(log.node[rows], count, len(nodes))
    of_type = {kind: np.array([x == kind for x in nodes.types]) for kind in set(nodes.types)}

    def fitting(j: int) -> tuple[int, int]:
        answer = []
        for gpus, busy in ((present - held_gpus, 1), (present, 0)):
            for limit, need, used in zip(limits, needs, taken, strict=True):
                if need[j] > 0:
                    gpus = np.minimum(gpus, np.floor((limit - busy * used) / need[j]))
            speeds = dict(zip(w.types, w.speeds[j].tolist(), strict=True))
            kinds = [kind for kind in of_type if speeds.get(kind, 1.0) > 0]
            answer.append(max((int(gpus[of_type[kind]].sum()) for kind in kinds), default=0))
        return answer[0], answer[1]

    return fitting
