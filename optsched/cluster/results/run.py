"""What came of a simulation: the log, metrics, and the history as a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.cluster.results.metrics import Metrics
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.reasons import Reason
    from optsched.cluster.world.settings import Settings
    from optsched.cluster.world.start import Start
    from optsched.model.schedule import IntArray, Schedule


@dataclass(frozen=True, eq=False)
class Run:
    """A finished simulation."""

    workload: Workload
    nodes: Nodes
    settings: Settings
    policy: str
    options: Mapping[str, Any]
    log: Log
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """What the policy says of these jobs on these nodes."""

    def __post_init__(self) -> None:
        for column in self.log:
            if column is not None:
                column.flags.writeable = False

    @cached_property
    def jct(self) -> IntArray:
        """Completion minus submit time of every job, -1 if it did not end; shape (jobs,)."""
        ended = self.log.finished >= 0
        found = np.where(ended, self.log.finished - self.workload.submit, -1)
        found.flags.writeable = False
        return found

    @cached_property
    def metrics(self) -> Metrics:
        """All numbers; see `optsched.cluster.results.metrics`."""
        from optsched.cluster.results.metrics import metrics

        return metrics(self.workload, self.nodes, self.settings.changes, self.log)

    def waiting(self, time: int | None = None) -> dict[str, Reason]:
        """Why every job that has come and not ended has no GPUs, by name.

        At this time, after all that happens then; by default when the log ends, after a Ctrl-C.
        """
        from optsched.cluster.results.waiting import reasons

        changes = self.settings.changes
        return reasons(self.workload, self.nodes, changes, self.log, self.policy, time)

    def at(self, time: int) -> Start:
        """The state just before the decisions of an instant, to simulate from there.

        The settings of the run have to be given again. Not for GPUs that jobs share.
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
