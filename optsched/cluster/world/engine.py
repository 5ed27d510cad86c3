"""The generic simulation: kernels move the world, and any policy is asked at every instant."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.cluster.world import columns as world_view
from optsched.cluster.world.apply import apply
from optsched.cluster.world.build import grown, log_of, stalled, too_late, world
from optsched.cluster.world.enact import failed, read, refused
from optsched.cluster.world.layout import ASK, FINISHED_ALL, LEGAL, NO_ROOM, RUNS, STALLED
from optsched.cluster.world.placement import Placement, rates
from optsched.cluster.world.progress import Progress
from optsched.cluster.world.viewer import Viewer
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.placement import Contention
    from optsched.cluster.world.policy import ClusterView, Decision, Policy
    from optsched.cluster.world.settings import Settings

_EVERY: Final = 0.05
"""Seconds between two reports of progress."""


class Simulated(NamedTuple):
    """What the generic engine returns."""

    log: Log
    asked: int
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
    w = world(workload, nodes, settings)
    viewer = Viewer(w, workload, nodes, settings)
    w.state["clairvoyant"] = int(policy.clairvoyant)
    report = _Report(on_progress, len(workload))
    progress = Progress()
    complete = False
    try:
        while True:
            status = world_view.turn(w)
            if status == NO_ROOM:
                viewer.world = w = grown(w)
                continue
            if status != ASK:
                break
            view = viewer.look()
            progress.check(w, viewer.asked, policy.name)
            try:
                decision = policy.decide(view)
            except InputError:
                raise
            except Exception as error:
                raise failed(w, policy.name, error) from error
            if watch is not None:
                watch(view, decision)
            viewer.world = w = read(w, workload, policy.name, view, decision)
            if settings.contention is not None:
                w.state["decided"], status = 0, -apply(w)
                if status != -LEGAL:
                    break
                _slow_down(w, workload, settings.contention)
            report.tell(w)
        if status < 0:
            raise refused(w, workload, policy.name, -status)
        if status == STALLED:
            raise stalled(w, workload, policy.name)
        if status != FINISHED_ALL:
            raise too_late(w, workload, policy.name)
        complete = True
    except KeyboardInterrupt:
        pass  # what has happened so far is worth having
    viewer.asked += 1
    report.tell(w, last=True)
    return Simulated(log_of(w), viewer.asked - 1, complete)


class _Report:
    """Tells progress now and then."""

    def __init__(self, tell: Callable[[int, int, int], None] | None, total: int) -> None:
        self.callback, self.total = tell, total
        self.next = time.monotonic() + _EVERY

    def tell(self, w: World, last: bool = False) -> None:
        if self.callback is None or (not last and time.monotonic() < self.next):
            return
        self.next = time.monotonic() + _EVERY
        finished = self.total - int(w.state["unfinished"][0])
        self.callback(max(0, int(w.state["time"][0])), finished, self.total)


def _slow_down(w: World, workload: Workload, model: Contention) -> None:
    """Set all speeds by what the model says of the present placement."""
    jobs = w.active[: w.state["active"][0]]
    jobs = jobs[w.job["phase"][jobs] == RUNS]
    if len(jobs) == 0:
        return
    placement = placement_of(w, workload, jobs)
    world_view.set_rates(w, placement.job, rates(model, placement))


def placement_of(w: World, workload: Workload, jobs: Any) -> Placement:
    """Where these running jobs are, ascending."""
    ptr = np.empty(int(w.state["active"][0]) + 1, np.int64)
    total = world_view.held_rows(w, ptr)
    node, count = np.empty(total, np.int64), np.empty(total, np.int64)
    world_view.held(w, node, count)
    every = w.active[: w.state["active"][0]]
    position = np.searchsorted(every, jobs)
    # pending jobs have empty rows, so that the rows of the others follow each other
    own = np.append(ptr[position], total)
    partner = w.job["partner"][jobs]
    row = np.where(partner < 0, -1, np.searchsorted(jobs, partner))
    joined = (partner >= 0) & (w.log["partner"][w.job["row"][jobs]] == w.job["row"][partner])
    return Placement(
        job=np.ascontiguousarray(jobs), gpus=w.job["gpus"][jobs], rate=w.job["alone"][jobs],
        node_ptr=own, node=node, count=count, partner=row, joined=joined, workload=workload,
    )  # fmt: skip
