"""Lucid's packing: short jobs first, and two jobs on the same GPUs where that is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optsched.cluster.policies.elastic_rule import by_key, integers, positions, total
from optsched.cluster.policies.packing_table import PackingTable
from optsched.cluster.policies.rigid import Rigid, size_index
from optsched.cluster.world.compiled import Choice
from optsched.errors import InputError
from optsched.io.values import format_value, number
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray


@helper()
def hosts_of(view):  # type: ignore[no-untyped-def]
    """Positions of running jobs alone on their GPUs, by start, then position; their number."""
    hosts, n = integers(len(view.job)), 0
    for i in range(len(view.job)):
        shares = len(view.partner) > 0 and view.partner[i] >= 0
        if view.gpus[i] == 0 or shares:
            continue
        k = n
        while k > 0 and view.entered[hosts[k - 1]] > view.entered[i]:
            hosts[k] = hosts[k - 1]
            k -= 1
        hosts[k] = i
        n += 1
    return hosts, n


@helper()
def host_of(view, i, hosts, size, cost, kind, fits):  # type: ignore[no-untyped-def]
    """Place in `hosts` of the first job that pending job i may join; -1: none."""
    this = kind[view.job[i]]
    for h in range(len(hosts)):
        k = hosts[h]
        if k < 0 or view.gpus[k] != size or cost[i] > 2 * cost[k]:
            continue
        if fits[this, kind[view.job[k]]]:
            return h
    return -1


def pack(view, ptr, size, rate, gang, estimate, kind, fits):  # type: ignore[no-untyped-def]
    """Start pending jobs by estimated duration times GPUs, beside a running job or alone."""
    n, limit = len(view.job), min(gang, total(view.capacity))
    need, cost = integers(n), integers(n)
    for i in range(n):
        job = view.job[i]
        at = size_index(ptr, size, job, view.gpus[i] if view.running[i] else limit)
        need[i] = size[at]
        cost[i] = -(-max(estimate[job], 1) // rate[at]) * need[i]
    quota, share = view.gpus.copy(), np.full(n, -1, np.int64)
    found, number_of_hosts = hosts_of(view)
    hosts = found[: number_of_hosts if fits.any() else 0]
    free, node = total(view.free), view.capacity.max()
    order = by_key(positions(n), cost)
    # hosts only become fewer in one decision, and later jobs cost more: no second search
    closed = np.zeros((len(fits), node + 1), np.bool_)
    for i in order:
        gpus = need[i]
        if view.running[i] or gpus == 0:
            continue
        h = -1
        if gpus <= node and not closed[kind[view.job[i]], gpus]:
            h = host_of(view, i, hosts, gpus, cost, kind, fits)
            closed[kind[view.job[i]], gpus] = h < 0
        if h >= 0:
            share[i], hosts[h] = hosts[h], -1
        elif gpus <= free:
            free -= gpus
        else:
            continue
        quota[i] = gpus
    return Choice(quota, order, 0, share)


class Lucid(Rigid):
    """Order by estimated duration times GPUs; no job blocks; jobs within a node are packed.

    A pending job first looks for a partner: the first running job, by start, that shares its GPUs
    with no other, has as many, and with which the memory is below the limit, the share scores sum
    up to at most 2, and the estimated duration times GPUs is at most twice the partner's. If there
    is none, it takes free GPUs. (Hu et al., *Lucid*, ASPLOS 2023; the profiler, which runs short
    jobs on separate nodes first, and the estimator are not part of the policy.)

    Parameters
    ----------
    table
        Speeds of pairs, and memory and share score by type; types or pairs that it does not name
        are never packed. None: no packing. `simulate` slows packed jobs down by it.
    memory_limit
        Of a GPU, in the table's unit (Lucid's: 24 GiB in MiB).
    gang
        As for `Fifo`.
    """

    name = "lucid"
    options: ClassVar[tuple[str, ...]] = ("gang", "memory_limit", "table")
    rule = staticmethod(pack)

    def __init__(
        self, *, table: PackingTable | None = None, memory_limit: float = 24576.0,
        gang: int | None = None,
    ) -> None:  # fmt: skip
        if table is not None and not isinstance(table, PackingTable):
            raise InputError(
                f"table: expected a PackingTable, such as PackingTable.read(pairs, types), "
                f"got {format_value(table)}"
            )
        self.table = table
        self.memory_limit = number("memory_limit", memory_limit, above=True)
        super().__init__(gang=gang)

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """Arguments of `Rigid`, estimated work, kinds of jobs, and which may be packed."""
        kind: IntArray = np.zeros(len(workload), np.int64)
        fits = np.zeros((1, 1), bool)
        if self.table is not None:
            kind, fits = self.table.packable(workload, self.memory_limit)
        return *super().arguments(workload, nodes, settings), workload.estimate, kind, fits
