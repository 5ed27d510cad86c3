"""A `World` is made from jobs, nodes and settings, which are checked against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.workload.job import WORK
from optsched.cluster.world import layout
from optsched.cluster.world.layout import World, addressed, frozen
from optsched.cluster.world.start import restored
from optsched.errors import InputError
from optsched.io.values import format_value

if TYPE_CHECKING:
    from optsched.cluster.policies.packing_table import PackingTable
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

MOST_TIME: Final = 2**53
"""Behind it no event may lie."""

_KINDS: Final = {"add": layout.ADD, "drain": layout.DRAIN, "remove": layout.REMOVE}


def check_fits(workload: Workload, nodes: Nodes, settings: Settings) -> None:
    """Refuse jobs that could never run on these nodes, and changes of nodes that make no sense."""
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
        available = np.array([fit[types == kind].sum() for fit in fits])[which.reshape(-1)]
        runs = workload.rates_on(kind)[workload.size_ptr[:-1]] > 0
        most = np.maximum(most, np.where(runs, available, 0))
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
    n, count, total = len(workload), len(nodes.gpus), nodes.total
    given = np.zeros(n, layout.GIVEN)
    for name in ("submit", "pass_work", "estimate", "preemptible", "group", "priority", "template"):
        given[name] = getattr(workload, name)[:]
    given["work_total"] = workload.work
    given["first_size"], given["end_size"] = workload.size_ptr[:-1], workload.size_ptr[1:]
    given["first_seen"], given["end_seen"] = workload.observed_ptr[:-1], workload.observed_ptr[1:]
    given["weight"] = np.array(workload.weight[:], np.float64).view(np.int64)
    cost = workload.restart_cost
    given["cost"] = np.where(cost < 0, settings.restart_cost, cost)
    pair = np.zeros((0, 2), np.int64)
    if table is not None:
        given["kind"], pair = table.kinds(workload)
        given["kinds"] = np.sqrt(len(pair))
    job = np.zeros(n, layout.JOB)
    for column in ("pass_end", "slot", "first_start", "row", "partner"):
        job[column] = -1
    changes = sorted(
        (change.time, index, change.node, _KINDS[change.kind])
        for index, change in enumerate(settings.changes)
    )
    node = np.zeros(count, layout.NODE)
    node["free"] = node["capacity"] = nodes.gpus
    node["free_units"] = node["units"] = nodes.zero_slots
    node["takes"] = 1
    for _, _, which, kind in reversed(changes):  # the first change of a node has the last word
        node["takes"][which] = kind != layout.ADD
    supply, demand, rate = _types(workload, nodes)
    group = np.zeros(max(1, len(workload.groups)), layout.GROUP)
    group["limit"] = group["head"] = group["tail"] = -1
    for g, about in enumerate(workload.groups):
        if about.max_concurrent is not None:
            group["limit"][g] = about.max_concurrent
    state = np.zeros(1, layout.STATE)
    first = {
        "time": -1, "wake": -1, "unfinished": n, "round": settings.round,
        "free_gpus": node["free"][node["takes"] == 1].sum(),
        "pass_only": settings.resize == "pass", "loses_pass": settings.checkpoint == "pass",
        "horizon": min(MOST_TIME, 2**62 // max(1, total)),
    }  # fmt: skip
    for name, value in first.items():
        state[name] = value
    tasks = int((workload.size[workload.size_ptr[:-1]] == 0).sum())
    pool = 2 * total + min(tasks, count * nodes.zero_slots) + 1  # stays and rows of their nodes
    rows = {name: np.zeros(n, np.int64) for name in ("active", "assigned", "quota", "order",
                                                     "changed", "share")}  # fmt: skip
    made = World(
        state=state, given=frozen(given), size=frozen(np.array(workload.size, np.int64)),
        rate=frozen(rate), observed=frozen(np.array(workload.observed, np.float64)), job=job,
        node=node, supply=supply, demand=frozen(demand), group=group,
        change=frozen(np.array([(t, k, e) for t, _, k, e in changes], layout.CHANGE)),
        pair=frozen(pair), named_ptr=np.zeros(n + 1, np.int64), named=np.zeros((pool, 2), np.int64),
        present=np.zeros((len(layout.PRESENT), n), np.int64),
        heap=np.zeros((min(n, pool), 2), np.int64), finished=np.full(n, -1, np.int64),
        log=np.zeros(4 * n + min(n, pool) + 64, layout.LOG),
        log_node=np.zeros((8 * n + 2 * pool + 64, 2), np.int64),
        table=np.zeros(0, np.int64), address=0, **rows,
    )  # fmt: skip
    if settings.start is not None:
        made = restored(made, workload, nodes, settings.start)
    return addressed(made)


def _types(workload: Workload, nodes: Nodes) -> tuple[IntArray, IntArray, IntArray]:
    """`World.supply`, `demand` and `rate`."""
    kinds = list(dict.fromkeys(nodes.types)) if is_limited(workload, nodes) else []
    rates = [workload.rate, *map(workload.rates_on, kinds)]
    rate = np.concatenate([np.where(workload.size == 0, WORK, one) for one in rates])
    if not kinds:
        return np.zeros((0, 3), np.int64), np.zeros((0, 2), np.int64), rate.astype(np.int64)
    block = np.array([1 + kinds.index(kind) for kind in nodes.types])
    supply = np.stack([block, _thousandths(nodes.cpus), _thousandths(nodes.memory_gb)], axis=1)
    demands = (workload.cpus_per_gpu, workload.memory_per_gpu_gb)
    demand = np.stack([_thousandths(need) for need in demands], axis=1)
    return supply.astype(np.int64), demand, rate.astype(np.int64)
