"""A `World` is made from jobs, nodes and settings; and read as a log, or as a reason to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.workload.job import WORK
from optsched.cluster.world.errors import Stalled
from optsched.cluster.world.layout import (
    ADD,
    CHANGE,
    DRAIN,
    GIVEN,
    GROUP,
    JOB,
    LOG,
    NODE,
    PENDING,
    PRESENT,
    REMOVE,
    STATE,
    World,
    addressed,
)
from optsched.cluster.world.log import Log
from optsched.cluster.world.reasons import of_free_gpus
from optsched.cluster.world.start import restored
from optsched.errors import InputError
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.packing_table import PackingTable
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

MOST_TIME: Final = 2**53
"""Behind it no event may lie."""

_LISTED: Final = 5
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
    if is_limited(workload, nodes):
        _check_limits(workload, nodes)
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


def is_limited(workload: Workload, nodes: Nodes) -> bool:
    """Whether more than the number of GPUs bounds where jobs run, or their speed depends on it."""
    kinds = set(nodes.types)
    demands = ((workload.cpus_per_gpu, nodes.cpus), (workload.memory_per_gpu_gb, nodes.memory_gb))
    return (
        len(kinds) > 1
        or bool(kinds & set(workload.types))
        or any(bool(need.any()) and min(offers) < np.inf for need, offers in demands)
    )


def _thousandths(amounts: Any) -> IntArray:
    whole: IntArray = np.rint(np.minimum(amounts, 2.0**40) * 1000).astype(np.int64)
    return whole


def _check_limits(workload: Workload, nodes: Nodes) -> None:
    """Refuse a size that no type of GPU has room for, with the job's CPUs and memory, when idle."""
    need = np.stack([_thousandths(workload.cpus_per_gpu), _thousandths(workload.memory_per_gpu_gb)])
    offers = np.stack([_thousandths(nodes.cpus), _thousandths(nodes.memory_gb)])
    distinct, which = np.unique(need, axis=1, return_inverse=True)
    types, most = np.array(nodes.types), np.zeros(len(workload), np.int64)
    fits = [np.minimum((offers // np.maximum(one, 1)[:, None] + (one == 0)[:, None] * 2**40).min(0),
                       nodes.gpus) for one in distinct.T]  # fmt: skip
    for kind in dict.fromkeys(nodes.types):
        room = np.array([fit[types == kind].sum() for fit in fits])[which.reshape(-1)]
        runs = workload.rates_on(kind)[workload.size_ptr[:-1]] > 0
        most = np.maximum(most, np.where(runs, room, 0))
    largest = workload.size[workload.size_ptr[1:] - 1]
    for j in np.flatnonzero(largest > most)[:1].tolist():
        raise InputError(
            f"job {format_value(workload.names[j])}: sizes: {largest[j]} GPUs do not fit, no type "
            f"of GPU that it runs on has more than {most[j]} with its CPUs and memory; leave the "
            "size out"
        )


def world(
    workload: Workload, nodes: Nodes, settings: Settings, table: PackingTable | None = None
) -> World:
    """The cluster before the first event; with speeds of jobs that share GPUs."""
    n, count = len(workload), len(nodes.gpus)
    state = np.zeros(1, STATE)
    given = np.zeros(n, GIVEN)
    given["submit"], given["work_total"] = workload.submit, workload.work
    given["pass_work"], given["estimate"] = workload.pass_work, workload.estimate
    given["first_size"], given["end_size"] = workload.size_ptr[:-1], workload.size_ptr[1:]
    cost = workload.restart_cost
    given["cost"] = np.where(cost < 0, settings.restart_cost, cost)
    for name in ("preemptible", "group", "priority", "template"):
        given[name] = getattr(workload, name)[:]
    given["weight"] = np.array(workload.weight[:], np.float64).view(np.int64)
    given["first_seen"], given["end_seen"] = workload.observed_ptr[:-1], workload.observed_ptr[1:]

    pair = np.zeros((0, 2), np.int64)
    if table is not None:
        given["kind"], pair = table.kinds(workload)
        given["kinds"] = np.sqrt(len(pair))
    job = np.zeros(n, JOB)
    for column in ("pass_end", "slot", "first_start", "row", "partner"):
        job[column] = -1

    node = np.zeros(count, NODE)
    node["free"] = node["capacity"] = nodes.gpus
    zero_slot = int((workload.size[workload.size_ptr[:-1]] == 0).sum())
    node["free_units"] = node["units"] = nodes.zero_slots
    node["takes"] = 1
    kinds = list(dict.fromkeys(nodes.types)) if is_limited(workload, nodes) else []
    rates = [workload.rate, *map(workload.rates_on, kinds)]
    rates = [np.where(workload.size == 0, WORK, rate) for rate in rates]
    supply, demand = np.zeros((0, 3), np.int64), np.zeros((0, 2), np.int64)
    if kinds:
        of = [1 + kinds.index(kind) for kind in nodes.types]
        offers = of, _thousandths(nodes.cpus), _thousandths(nodes.memory_gb)
        supply = np.stack(offers, axis=1).astype(np.int64)
        demands = workload.cpus_per_gpu, workload.memory_per_gpu_gb
        demand = np.stack([_thousandths(need) for need in demands], axis=1)
    changes = sorted(
        (change.time, index, change.node, _KINDS[change.kind])
        for index, change in enumerate(settings.changes)
    )
    for _, _, which, kind in reversed(changes):  # the first change of a node has the last word
        node["takes"][which] = 0 if kind == ADD else 1

    pool = 2 * nodes.total + min(zero_slot, count * nodes.zero_slots) + 1
    group = np.zeros(max(1, len(workload.groups)), GROUP)
    group["limit"] = group["head"] = group["tail"] = -1
    for g, about in enumerate(workload.groups):
        if about.max_concurrent is not None:
            group["limit"][g] = about.max_concurrent

    takes = node["takes"] == 1
    state["time"][0] = state["wake"][0] = -1
    state["unfinished"][0] = n
    state["free_gpus"][0] = node["free"][takes].sum()
    state["round"][0] = settings.round
    state["pass_only"][0] = settings.resize == "pass"
    state["loses_pass"][0] = settings.checkpoint == "pass"
    state["horizon"][0] = min(MOST_TIME, 2**62 // max(1, nodes.total))
    made = World(
        state=state,
        given=frozen(given),
        size=frozen(np.array(workload.size, np.int64)),
        rate=frozen(np.concatenate(rates).astype(np.int64)),
        observed=frozen(np.array(workload.observed, np.float64)),
        job=job,
        active=np.zeros(n, np.int64),
        assigned=np.zeros(n, np.int64),
        heap=np.zeros((min(n, pool), 2), np.int64),
        node=node,
        supply=supply,
        demand=frozen(demand),
        group=group,
        change=frozen(np.array([(t, k, e) for t, _, k, e in changes], CHANGE)),
        pair=frozen(pair),
        quota=np.zeros(n, np.int64),
        order=np.zeros(n, np.int64),
        named_ptr=np.zeros(n + 1, np.int64),
        named=np.zeros((pool, 2), np.int64),
        present=np.zeros((len(PRESENT), n), np.int64),
        changed=np.zeros(n, np.int64),
        share=np.full(n, -1, np.int64),
        finished=np.full(n, -1, np.int64),
        log=np.zeros(4 * n + min(n, pool) + 64, LOG),
        log_node=np.zeros((8 * n + 2 * pool + 64, 2), np.int64),
        table=np.zeros(0, np.int64),
        address=0,
    )
    if settings.start is not None:
        made = restored(made, workload, nodes, settings.start)
    return addressed(made)


def frozen(array: Any) -> Any:
    """The same, C-contiguous and read-only, as kernels take it."""
    array = np.ascontiguousarray(array)
    array.setflags(write=False)
    return array


def grown(w: World) -> World:
    """The same world with twice the room for the log."""
    return addressed(w._replace(
        log=np.concatenate((w.log, np.zeros_like(w.log))),
        log_node=np.concatenate((w.log_node, np.zeros_like(w.log_node))),
    ))  # fmt: skip


def log_of(w: World) -> Log:
    """What has happened so far; stays that are still open end now.

    Stays are sorted by start, ties by job.
    """
    rows = int(w.state["log_rows"][0])
    log = w.log[:rows]
    open_rows = np.flatnonzero(log["end"] < 0)
    if len(open_rows):
        log = log.copy()
        _close(w, log, open_rows)
    instant = np.cumsum(np.diff(log["start"], prepend=0) != 0)  # starts never fall
    order = np.argsort(instant * len(w.job) + log["job"], kind="stable")
    first = log["first"][order]
    length = log["end_node"][order] - first
    ptr = np.zeros(rows + 1, np.int64)
    np.cumsum(length, out=ptr[1:])
    source = np.repeat(first - ptr[:-1], length) + np.arange(ptr[-1])
    names = ("job", "start", "end", "restart", "gpus", "half", "work")
    values = {name: frozen(log[name][order]) for name in names}
    if bool((values["half"] > 0).any()):
        place = np.empty(rows + 1, np.int64)
        place[order] = np.arange(rows)
        place[-1] = -1
        values["partner"] = frozen(place[log["partner"][order]])
    return Log(
        **values,
        node_ptr=frozen(ptr),
        node=frozen(w.log_node[source, 0]),
        count=frozen(w.log_node[source, 1]),
        finished=frozen(w.finished.copy()),
        preemptions=frozen(w.job["preempted"]),
    )


def _close(w: World, log: Any, rows: IntArray) -> None:
    """Let open stays end at the present time in this copy of the log (an interrupted run)."""
    now = int(w.state["time"][0])
    job = w.job[log["job"][rows]]
    done = job["done"] + job["rate"] * np.maximum(0, now - job["since"])
    done = np.minimum(done, w.given["work_total"][log["job"][rows]])
    log["end"][rows] = now
    log["restart"][rows] = np.minimum(log["restart"][rows], now - log["start"][rows])
    log["work"][rows] = done - job["stay_done"]


def stalled(w: World, workload: Workload, policy: str) -> Stalled:
    """The exception with the jobs that wait for nothing."""
    waiting = [int(j) for j in w.active[: w.state["active"][0]] if w.job["phase"][j] == PENDING]
    total = int(w.node["capacity"][w.node["takes"] == 1].sum())
    least = int(workload.size[workload.size_ptr[waiting[0]]])
    reason = of_free_gpus(least, int(w.state["free_gpus"][0]), total, policy)
    return Stalled(
        f"policy {policy!r:.60} starts none of {len(waiting)} pending jobs at time "
        f"{w.state['time'][0]}, nothing runs, and no event is left: {_listed(workload, waiting)} "
        f"(the first {reason.text})"
    )


def too_late(w: World, workload: Workload, policy: str) -> InputError:
    """The exception that says that time would be too large for exact arithmetic."""
    running = w.heap[: w.state["running_now"][0], 1].tolist()
    return InputError(
        f"time: the next event under policy {policy!r:.60} lies behind {w.state['horizon'][0]}; "
        f"running then: {_listed(workload, running) or 'nothing'} (use a coarser unit of time)"
    )


def _listed(workload: Workload, jobs: Iterable[int]) -> str:
    """Some names."""
    every = list(jobs)
    listed = ", ".join(f"{workload.names[j]!s:.40}" for j in every[:_LISTED])
    return listed + (f" and {len(every) - _LISTED} more" if len(every) > _LISTED else "")


__all__ = [
    "MOST_TIME", "check_fits", "frozen", "grown", "is_limited", "log_of", "stalled", "too_late",
    "world",
]  # fmt: skip
