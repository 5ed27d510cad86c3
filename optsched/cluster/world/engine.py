"""The generic simulation: kernels move the world, and any policy is decisions at every instant."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.cluster.world.apply import turn
from optsched.cluster.world.build import world
from optsched.cluster.world.enact import check_end, failed, read
from optsched.cluster.world.layout import DECIDE, LOG_FULL, RUNS
from optsched.cluster.world.log import Log, grown, log_of
from optsched.cluster.world.policy import Stalled
from optsched.cluster.world.viewer import Viewer
from optsched.errors import InputError
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.policy import ClusterView, Decision, Policy
    from optsched.cluster.world.settings import Settings

_EVERY: Final = 0.05
"""Seconds between two reports of progress."""
MOST_VAIN: Final = 100_000
"""Decisions in a row that may start jobs of which none works, and from check to check."""
MOST_LOST: Final = 10
"""So many times as long all work may be lost again (``checkpoint="pass"``)."""


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
    """Simulate with a decision of the policy at every instant; the arguments have been checked.

    `watch` is called with every view and decision before it is applied.
    """
    w = world(workload, nodes, settings, getattr(policy, "table", None))
    w.state["clairvoyant"] = int(policy.clairvoyant)
    viewer, progress, reported = Viewer(w, workload, nodes, settings), Progress(), time.monotonic()

    def report() -> None:
        finished = len(workload) - int(w.state["unfinished"][0])
        if on_progress is not None:
            on_progress(max(0, int(w.state["time"][0])), finished, len(workload))

    complete = False
    try:
        while (status := turn(w.address, 0)) in (DECIDE, LOG_FULL):
            if status == LOG_FULL:
                viewer.world = w = grown(w)
                continue
            view = viewer.look()
            progress.check(w, viewer.decisions, policy.name)
            try:
                decision = policy.decide(view)
            except InputError:
                raise
            except (Exception, SystemExit) as error:
                raise failed(w, policy.name, error) from error
            if watch is not None:
                watch(view, decision)
            viewer.world = w = read(w, workload, policy.name, decision)
            if on_progress is not None and time.monotonic() > reported + _EVERY:
                reported = time.monotonic()
                report()
        check_end(w, workload, policy.name, status)
        complete = True
    except KeyboardInterrupt:
        pass  # what has happened so far is worth having
    decisions, viewer.decisions = viewer.decisions, -1  # views are over
    report()
    return Simulated(log_of(w), decisions, complete)


def first_view(workload: Workload, nodes: Nodes, settings: Settings) -> ClusterView | None:
    """The view of the first instant at which a policy decides; None: there is no such instant."""
    w = world(workload, nodes, settings)
    w.state["clairvoyant"] = 1
    while (status := turn(w.address, 0)) == LOG_FULL:
        w = grown(w)
    return Viewer(w, workload, nodes, settings).look() if status == DECIDE else None


class Progress:
    """Whether a policy gets anywhere, or starts and stops jobs for ever before they do any work.

    It holds what had happened at the last check; between two checks nothing is counted.
    """

    def __init__(self) -> None:
        self.every = MOST_VAIN
        self.time = self.since = -1
        self.rows = self.started = self.lost = 0
        self.events: tuple[int, ...] = ()

    def check(self, w: World, decisions: int, policy: str) -> None:
        """Raise `Stalled` if all that was started since the last check stopped before it worked.

        A stay that began before the last check is progress: it works, or pays a restart cost that
        ends one day. So is a sleep in which nothing is started: it ends, or `advance` says so.
        """
        if decisions % self.every:
            return
        now, rows, *events = (
            int(w.state[name][0])
            for name in ("time", "log_rows", "arrivals", "changes", "unfinished")
        )
        log, active = w.log[:rows], w.job[w.active[: w.state["active"][0]]]
        runs = active["phase"] == RUNS
        older = runs & (active["stay"] <= self.time)
        recent = log["end"] > self.time
        kept = recent & (log["work"] > 0)
        if tuple(events) != self.events or rows == self.rows or older.any() or kept.any():
            self.since, self.started, self.lost = now, rows, 0
        else:
            self.lost += 1
            worked = recent & (log["end"] - log["start"] > log["restart"])
            lost = bool(worked.any() or (runs & (active["since"] < now)).any())
            if not lost or self.lost >= MOST_LOST:
                first, before = (self.since, self.started) if lost else (self.time, self.rows)
                without = "a pass, whose work is lost" if lost else "their restart cost"
                raise Stalled(
                    f"policy {format_value(policy)} makes no progress: from time {first} to {now} "
                    f"it started jobs {rows - before} times and stopped them all before the end of "
                    f"{without}; nothing arrived, ended or changed ({len(active)} jobs are active)"
                    "; set the restart cost to 0, or use a policy or variant that preempts less"
                )
        self.time, self.rows, self.events = now, rows, tuple(events)
