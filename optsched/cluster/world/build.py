"""A `World` is made from jobs, nodes and settings; and read as a log, or as a reason to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.workload.job import WORK
from optsched.cluster.world.errors import Stalled
from optsched.cluster.world.layout import (
    ACTIVE,
    ADD,
    BELIEVED,
    CAPACITY,
    CONSOLIDATED,
    COST,
    DRAIN,
    END_SIZE,
    FINISHED,
    FIRST_SIZE,
    FIRST_START,
    FREE,
    FREE_GPUS,
    FREE_UNITS,
    FREE_ZERO,
    GIVEN,
    GROUP,
    HEAD,
    HELD,
    HORIZON,
    JOB,
    LIMIT,
    LOG,
    LOG_END,
    LOG_END_NODE,
    LOG_FIRST,
    LOG_GPUS,
    LOG_HALF,
    LOG_JOB,
    LOG_PARTNER,
    LOG_RESTART,
    LOG_ROWS,
    LOG_START,
    LOG_WORK,
    LOSES_PASS,
    NODE,
    PARTNER,
    PASS_END,
    PASS_ONLY,
    PASS_WORK,
    PENDING,
    PHASE,
    PREEMPTED,
    PREEMPTIBLE,
    REMOVE,
    RESTART,
    ROUND,
    ROW,
    RUNNING_NOW,
    SLOT,
    STATE,
    SUBMIT,
    TAIL,
    TAKES,
    TIME,
    UNFINISHED,
    UNITS,
    WAKE,
    WORK_TOTAL,
    World,
)
from optsched.cluster.world.log import Log
from optsched.errors import InputError
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

MOST_TIME: Final = 2**53
"""Behind it no event may lie."""

_SHOWN: Final = 5
_KINDS: Final = {"add": ADD, "drain": DRAIN, "remove": REMOVE}


def check_fits(workload: Workload, nodes: Nodes, settings: Settings) -> None:
    """Refuse jobs that could never run on these nodes, and changes of nodes that make no sense.

    Raises
    ------
    InputError
        Names the job and both numbers, or the change of a node that does not exist, or the addition
        of one that is there and takes work.
    """
    smallest = workload.size[workload.size_ptr[:-1]]
    total = nodes.total
    for j in np.flatnonzero(smallest > total)[:1].tolist():
        raise InputError(
            f"job {format_value(workload.names[j])}: needs {smallest[j]} GPUs, the cluster has "
            f"{total}"
        )
    if bool((smallest == 0).any()) and not nodes.zero_slots:
        j = int(np.argmax(smallest == 0))
        raise InputError(
            f"job {format_value(workload.names[j])}: is a zero-slot task, and the nodes have "
            "zero_slots=0"
        )
    for change in settings.changes:
        if change.node >= len(nodes.gpus):
            raise InputError(
                f"changes: there is no node {change.node}, nodes are 0 to {len(nodes.gpus) - 1}"
            )
    takes: dict[int, bool] = {}
    for change in sorted(settings.changes, key=lambda change: change.time):
        if change.kind == "add" and takes.get(change.node, False):
            raise InputError(
                f"changes: node {change.node} is added at time {change.time}, but it is there and "
                "takes work; drain or remove it before, or leave the addition out"
            )
        takes[change.node] = change.kind == "add"


def world(workload: Workload, nodes: Nodes, settings: Settings) -> World:
    """The cluster before the first event."""
    n, count = len(workload), len(nodes.gpus)
    state = np.zeros(STATE, np.int64)
    given = np.zeros((n, GIVEN), np.int64)
    given[:, SUBMIT], given[:, WORK_TOTAL] = workload.submit, workload.work
    given[:, PASS_WORK], given[:, BELIEVED] = workload.pass_work, workload.believed
    given[:, FIRST_SIZE], given[:, END_SIZE] = workload.size_ptr[:-1], workload.size_ptr[1:]
    own = workload.restart_cost
    given[:, COST] = np.where(own < 0, settings.restart_cost, own)
    given[:, PREEMPTIBLE], given[:, GROUP] = workload.preemptible, workload.group

    job = np.zeros((n, JOB), np.int64)
    for column in (PASS_END, SLOT, FIRST_START, FINISHED, ROW, HELD, PARTNER):
        job[:, column] = -1

    node = np.zeros((count, NODE), np.int64)
    node[:, FREE] = node[:, CAPACITY] = nodes.gpus
    zero_slot = int((workload.size[workload.size_ptr[:-1]] == 0).sum())
    node[:, FREE_UNITS] = node[:, UNITS] = nodes.zero_slots
    node[:, TAKES] = 1
    changes = sorted(
        (change.time, index, change.node, _KINDS[change.kind])
        for index, change in enumerate(settings.changes)
    )
    for _, _, which, kind in reversed(changes):  # the first change of a node has the last word
        node[which, TAKES] = 0 if kind == ADD else 1

    pool = 2 * nodes.total + min(zero_slot, count * nodes.zero_slots) + 1
    held = np.full((pool, 3), -1, np.int64)
    held[:-1, 2] = np.arange(1, pool)
    group = np.full((max(1, len(workload.groups)), 4), -1, np.int64)
    group[:, 1] = 0
    for g, about in enumerate(workload.groups):
        group[g, LIMIT] = -1 if about.max_concurrent is None else about.max_concurrent
        group[g, HEAD] = group[g, TAIL] = -1

    takes = node[:, TAKES] == 1
    state[TIME] = state[WAKE] = -1
    state[UNFINISHED] = n
    state[FREE_GPUS], state[FREE_ZERO] = node[takes, FREE].sum(), node[takes, FREE_UNITS].sum()
    state[ROUND], state[RESTART] = settings.round, settings.restart_cost
    state[PASS_ONLY] = settings.resize == "pass"
    state[LOSES_PASS] = settings.checkpoint == "pass"
    state[CONSOLIDATED] = settings.timing == "lucid"
    state[HORIZON] = min(MOST_TIME, 2**62 // max(1, nodes.total))
    return World(
        state=state,
        given=frozen(given),
        size=frozen(np.array(workload.size, np.int64)),
        rate=frozen(np.where(workload.size == 0, WORK, workload.rate).astype(np.int64)),
        job=job,
        active=np.zeros(n, np.int64),
        heap=np.zeros((min(n, pool), 2), np.int64),
        node=node,
        held=held,
        group=group,
        change=frozen(np.array([(t, k, e) for t, _, k, e in changes], np.int64).reshape(-1, 3)),
        event=np.zeros((4 * n + 1, 2), np.int64),
        quota=np.zeros(n, np.int64),
        order=np.zeros(n, np.int64),
        named_ptr=np.zeros(n + 1, np.int64),
        named=np.zeros((pool, 2), np.int64),
        present=np.zeros((6, n), np.int64),
        share=np.full(n, -1, np.int64),
        log=np.zeros((4 * n + min(n, pool) + 64, LOG), np.int64),
        log_node=np.zeros((8 * n + 2 * pool + 64, 2), np.int64),
    )


def frozen(array: Any) -> Any:
    """The same, C-contiguous and read-only, as kernels take it."""
    array = np.ascontiguousarray(array)
    array.setflags(write=False)
    return array


def grown(w: World) -> World:
    """The same world with twice the room for the log."""
    return w._replace(
        log=np.concatenate((w.log, np.zeros_like(w.log))),
        log_node=np.concatenate((w.log_node, np.zeros_like(w.log_node))),
    )


def log_of(w: World) -> Log:
    """What has happened so far; stays that are still open end now.

    Stays are sorted by start, ties by job.
    """
    rows = int(w.state[LOG_ROWS])
    log = w.log[:rows]
    open_rows = np.flatnonzero(log[:, LOG_END] < 0)
    if len(open_rows):
        log = log.copy()
        _close(w, log, open_rows)
    instant = np.cumsum(np.diff(log[:, LOG_START], prepend=0) != 0)  # starts never fall
    order = np.argsort(instant * len(w.job) + log[:, LOG_JOB], kind="stable")
    first = log[order, LOG_FIRST]
    length = log[order, LOG_END_NODE] - first
    ptr = np.zeros(rows + 1, np.int64)
    np.cumsum(length, out=ptr[1:])
    source = np.repeat(first - ptr[:-1], length) + np.arange(ptr[-1])
    columns = {
        "job": LOG_JOB, "start": LOG_START, "end": LOG_END, "restart": LOG_RESTART,
        "gpus": LOG_GPUS, "half": LOG_HALF, "work": LOG_WORK,
    }  # fmt: skip
    values = {key: frozen(log[order, column]) for key, column in columns.items()}
    if bool((values["half"] > 0).any()):
        place = np.empty(rows + 1, np.int64)
        place[order] = np.arange(rows)
        place[-1] = -1
        values["partner"] = frozen(place[log[order, LOG_PARTNER]])
    return Log(
        **values,
        node_ptr=frozen(ptr),
        node=frozen(w.log_node[source, 0]),
        count=frozen(w.log_node[source, 1]),
        finished=frozen(w.job[:, FINISHED]),
        preemptions=frozen(w.job[:, PREEMPTED]),
    )


def _close(w: World, log: Any, rows: IntArray) -> None:
    """Let open stays end at the present time in this copy of the log (an interrupted run)."""
    from optsched.cluster.world.layout import STAY_DONE
    from optsched.cluster.world.stays import done_now

    now = int(w.state[TIME])
    for row in rows.tolist():
        j = int(log[row, LOG_JOB])
        log[row, LOG_END] = now
        log[row, LOG_RESTART] = min(log[row, LOG_RESTART], now - log[row, LOG_START])
        log[row, LOG_WORK] = done_now(w, j) - w.job[j, STAY_DONE]


def stalled(w: World, workload: Workload, policy: str) -> Stalled:
    """The exception that says who waits for nothing."""
    waiting = [int(j) for j in w.active[: w.state[ACTIVE]] if w.job[j, PHASE] == PENDING]
    return Stalled(
        f"policy {policy!r:.60} starts none of {len(waiting)} pending jobs at time "
        f"{w.state[TIME]}, nothing runs, and no event is left: {_listed(workload, waiting)}"
    )


def too_late(w: World, workload: Workload, policy: str) -> InputError:
    """The exception that says that time would be too large for exact arithmetic."""
    running = w.heap[: w.state[RUNNING_NOW], 1].tolist()
    return InputError(
        f"time: the next event under policy {policy!r:.60} lies behind {w.state[HORIZON]}; "
        f"running then: {_listed(workload, running) or 'nothing'} (use a coarser unit of time)"
    )


def _listed(workload: Workload, jobs: Iterable[int]) -> str:
    """Some names."""
    every = list(jobs)
    told = ", ".join(f"{workload.names[j]!s:.40}" for j in every[:_SHOWN])
    return told + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")


__all__ = [
    "MOST_TIME", "check_fits", "frozen", "grown", "log_of", "stalled", "too_late", "world",
]  # fmt: skip
