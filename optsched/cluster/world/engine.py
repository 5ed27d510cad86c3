"""The generic simulation: kernels move the world, and any policy is decisions at every instant."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.cluster.world.apply import turn
from optsched.cluster.world.build import grown, log_of, stalled, too_late, world
from optsched.cluster.world.enact import failed, read, refused
from optsched.cluster.world.layout import DECIDE, FINISHED_ALL, LOG_FULL, STALLED
from optsched.cluster.world.progress import Progress
from optsched.cluster.world.viewer import Viewer
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView, Decision, Policy
    from optsched.cluster.world.settings import Settings

_EVERY: Final = 0.05
"""Seconds between two reports of progress."""


class Simulated(NamedTuple):
    """What the generic engine returns."""

    log: Log
    decisions: int
    """How often the policy decided."""
    complete: bool
    """False: interrupted, jobs without an end have ``finished`` -1."""


def simulate_generic(
    workload: Workload,
    policy: Policy,
    nodes: Nodes,
    settings: Settings,
    on_progress: Callable[[int, int, int], None] | None = None,
    watch: Callable[[ClusterView, Decision], None] | None = None,
) -> Simulated:
    """Simulate by asking the policy at every instant.

    Parameters
    ----------
    workload, policy, nodes, settings
        Checked before.
    on_progress
        Called now and then with the time, the jobs that have ended, and all jobs; and at the end.
    watch
        Called with every view and decision before it is applied.

    Raises
    ------
    PolicyError
        A decision breaks a rule, or the policy's code raises.
    Stalled
        Jobs are pending for ever, or only started and stopped before they work.
    """
    w = world(workload, nodes, settings, getattr(policy, "table", None))
    viewer = Viewer(w, workload, nodes, settings)
    w.state["clairvoyant"] = int(policy.clairvoyant)
    report = _Report(on_progress, len(workload))
    progress = Progress()
    complete = False
    try:
        while True:
            status = turn(w.address, 0)
            if status == LOG_FULL:
                viewer.world = w = grown(w)
                continue
            if status != DECIDE:
                break
            view = viewer.look()
            progress.check(w, viewer.decisions, policy.name)
            try:
                decision = policy.decide(view)
            except InputError:
                raise
            except Exception as error:
                raise failed(w, policy.name, error) from error
            if watch is not None:
                watch(view, decision)
            viewer.world = w = read(w, workload, policy.name, view, decision)
            report.report(w)
        if status < 0:
            raise refused(w, workload, policy.name, -status)
        if status == STALLED:
            raise stalled(w, workload, policy.name)
        if status != FINISHED_ALL:
            raise too_late(w, workload, policy.name)
        complete = True
    except KeyboardInterrupt:
        pass  # what has happened so far is worth having
    viewer.decisions += 1
    report.report(w, last=True)
    return Simulated(log_of(w), viewer.decisions - 1, complete)


def first_view(workload: Workload, nodes: Nodes, settings: Settings) -> ClusterView | None:
    """The view of the first instant at which a policy decides; None: there is no such instant."""
    w = world(workload, nodes, settings, None)
    viewer = Viewer(w, workload, nodes, settings)
    w.state["clairvoyant"] = 1
    while (status := turn(w.address, 0)) == LOG_FULL:
        viewer.world = w = grown(w)
    return viewer.look() if status == DECIDE else None


class _Report:
    """Tells progress now and then."""

    def __init__(self, report: Callable[[int, int, int], None] | None, total: int) -> None:
        self.callback, self.total = report, total
        self.next = time.monotonic() + _EVERY

    def report(self, w: World, last: bool = False) -> None:
        if self.callback is None or (not last and time.monotonic() < self.next):
            return
        self.next = time.monotonic() + _EVERY
        finished = self.total - int(w.state["unfinished"][0])
        self.callback(max(0, int(w.state["time"][0])), finished, self.total)
