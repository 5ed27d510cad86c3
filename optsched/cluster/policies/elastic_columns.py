"""The active jobs of a compiled elastic simulation: columns, their order, and its upkeep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.policies.elastic_rule import (
    BY_GAIN,
    COLUMNS,
    FREE,
    HOLDS,
    LAST,
    NEVER,
    columns_of,
    pays,
    share,
)
from optsched.cluster.world.advance import release, start
from optsched.cluster.world.layout import ARRIVED, COMPLETED, ENDED, LOST, PASSED, WORLD
from optsched.kernels.compile import INT, helper

if TYPE_CHECKING:
    from optsched.cluster.policies.elastic_rule import Columns
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings

_FEW: Final = 64
"""So many jobs out of place are put right one by one."""


def columns(
    workload: Workload, nodes: Nodes, settings: Settings, clairvoyant: bool = False,
    weight: Any = None,
) -> Columns | None:  # fmt: skip
    """Columns before the first event; None for what is not compiled. `weight` goes before theirs.

    Not compiled are contention, nodes that are drained, and zero-slot tasks.
    """
    if settings.contention is not None or not settings.without_drains or settings.timing != "event":
        return None
    if bool((workload.size == 0).any()):
        return None
    own = workload.restart_cost
    work = workload.work if clairvoyant else workload.estimate
    passes = np.where(np.isnan(workload.target), workload.passes, -(-work // workload.pass_work))
    return columns_of(
        len(workload), 0, nodes.total,
        preemptible=workload.preemptible, size_ptr=workload.size_ptr, size=workload.size,
        rate=workload.rate, weight=workload.weight if weight is None else weight, final=passes - 1,
        restart=np.where(own < 0, settings.restart_cost, own),
    )  # fmt: skip


@helper(INT, COLUMNS, INT, INT, counted=False)
def before(c, a, b):  # type: ignore[no-untyped-def]
    """1 if job a comes before job b."""
    if c.key[a] != c.key[b]:
        return 1 if c.key[a] < c.key[b] else 0
    if (c.held[a] > 0) != (c.held[b] > 0):
        return 1 if c.held[a] > 0 else 0
    return 1 if a < b else 0


@helper(INT, COLUMNS, counted=False)
def sort(c):  # type: ignore[no-untyped-def]
    """Restore the order after changes of few keys, or of many (then by Shell's method)."""
    n = c.count[0]
    falls = 0
    for at in range(1, n):
        falls += before(c, c.order[at], c.order[at - 1])
    if falls == 0:
        return 0
    gap = 1
    while falls > _FEW and gap < n // 3:
        gap = 3 * gap + 1  # Knuth's gaps
    while gap >= 1:
        for at in range(gap, n):
            job = c.order[at]
            to = at
            while to >= gap and before(c, job, c.order[to - gap]) == 1:
                c.order[to] = c.order[to - gap]
                to -= gap
            c.order[to] = job
        gap //= 3
    return falls


@helper(INT, WORLD, COLUMNS, counted=False)
def some_ended(w, c):  # type: ignore[no-untyped-def]
    """1 if jobs of the order have ended; called before this instant's arrivals join it."""
    s = w.state[0]
    come = 0
    for i in range(s.events):
        if w.event[i, 0] == COMPLETED:
            return 1
        if w.event[i, 0] == ARRIVED:
            come += 1
    # an instant that left no active job was not told
    return 1 if c.count[0] + come != s.active else 0


@helper(INT, WORLD, COLUMNS, counted=False)
def notice(w, c):  # type: ignore[no-untyped-def]
    """Take over this instant's events; 1 if a decision could change something.

    Nothing changes without preemption while no GPU is free and who may be resized (only those
    whose pass has just ended, else it is 1 always) has its least.
    Arrived jobs stand last in the order, to be sorted.
    """
    s = w.state[0]
    worth = some_ended(w, c)
    if worth == 1:
        to = 0
        for at in range(c.count[0]):
            job = c.order[at]
            if w.job[job].phase != ENDED:
                c.order[to] = job
                to += 1
        c.count[0] = to
    for i in range(s.events):
        kind, job = w.event[i, 0], w.event[i, 1]
        if kind == PASSED:
            c.fixed[job] = FREE
            if c.held[job] > c.size[c.size_ptr[job]]:
                worth = 1
        elif kind == ARRIVED:
            c.order[c.count[0]] = job
            c.count[0] += 1
        elif kind == LOST:
            c.held[job], c.fixed[job] = 0, FREE
    if s.changes != c.count[2]:
        worth, c.count[1], c.count[2] = 1, 0, s.changes
        for node in range(w.node.shape[0]):
            c.count[1] += w.node[node].takes * w.node[node].capacity
    return worth | (1 - (s.pass_only | s.loses_pass))


@helper(INT, COLUMNS, INT, counted=False)
def settled(c, preempt):  # type: ignore[no-untyped-def]
    """1 if the sorted jobs stay as they are, given that no GPU is free and nobody may shrink."""
    if preempt == NEVER:
        return 1
    least = 0
    pending = -1
    last = -1
    for at in range(c.count[0]):
        job = c.order[at]
        if c.held[job] > 0:
            least += c.size[c.size_ptr[job]]
            if c.preemptible[job] == 1:
                last = at
        elif pending < 0:
            pending = at
    if least != c.count[1]:
        return 0
    if pending < 0 or last < pending:
        return 1
    if preempt != BY_GAIN:
        return 0
    job, victim = c.order[pending], c.order[last]
    return 1 - pays(c, job, victim)


@helper(INT, WORLD, COLUMNS, INT, counted=False)
def _hold(w, c, job):  # type: ignore[no-untyped-def]
    """A running job keeps its size until its pass ends, or until it ends."""
    c.fixed[job] = LAST if w.job[job].passes >= c.final[job] else HOLDS
    return 0


@helper(INT, WORLD, COLUMNS, INT, INT, counted=False)
def act(w, c, preempt, surplus):  # type: ignore[no-untyped-def]
    """Decide for the sorted jobs and change the world."""
    n = c.count[0]
    by_pass = w.state[0].pass_only | w.state[0].loses_pass
    share(c, preempt, surplus)
    for at in range(n):
        job = c.order[at]
        if c.held[job] > 0 and c.quota[job] != c.held[job]:
            release(w, job, 1 if c.quota[job] > 0 else 0)
    for at in range(n):
        job = c.order[at]
        if c.quota[job] > 0 and c.quota[job] != c.held[job]:
            start(w, job, c.quota[job])
            c.cost[job] = c.restart[job]
        c.held[job] = c.quota[job]
        c.fixed[job] = FREE
        if c.quota[job] > 0 and by_pass == 1:
            _hold(w, c, job)
    return 0


@helper(INT, WORLD, COLUMNS, counted=False)
def hold(w, c):  # type: ignore[no-untyped-def]
    """Nothing changes at this instant: whose pass has ended goes on at its size."""
    for i in range(w.state[0].events):
        job = w.event[i, 1]
        if w.event[i, 0] == PASSED and (w.state[0].pass_only | w.state[0].loses_pass) == 1:
            _hold(w, c, job)
    return 0
