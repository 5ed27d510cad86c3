"""Lucid's packing: short jobs first, and two jobs on the same GPUs where that is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optsched.cluster.policies.gangs import checked_gang
from optsched.cluster.policies.rigid import NEVER, size_index
from optsched.cluster.world.packing_table import packable, type_of
from optsched.cluster.world.policy import Decision
from optsched.errors import InputError
from optsched.io.values import format_value, number

if TYPE_CHECKING:
    from optsched.cluster.world.packing_table import PackingTable
    from optsched.cluster.world.policy import ClusterView
    from optsched.model.schedule import IntArray


class Lucid:
    """Order by estimated duration times GPUs; nobody blocks; jobs within a node are packed.

    A pending job first seeks a partner: the first running job, by start, that shares its GPUs with
    nobody, has as many, and with which the memory is below the limit, the share scores sum up to
    at most 2, and the own estimated duration times GPUs is at most twice the partner's. If there is
    none, it takes GPUs of its own if they are free. (Hu et al., *Lucid*, ASPLOS 2023; the profiler,
    which runs short jobs on nodes of its own first, and the estimator are not part of the policy.)

    Parameters
    ----------
    table
        Speeds of pairs, and memory and share score by type; types or pairs that it does not name
        are never packed. None: no packing. With ``timing="event"`` give the same table to
        `simulate` as `contention`, or packed jobs run at full speed.
    memory_limit
        Of a GPU, in the table's unit (Lucid's: 24 GiB in MiB).
    gang
        As for `Fifo`.

    Raises
    ------
    InputError
        An option is wrong.
    """

    name: ClassVar[str] = "lucid"
    clairvoyant: bool = False
    options: ClassVar[tuple[str, ...]] = ("gang", "memory_limit", "table")

    def __init__(
        self,
        *,
        table: PackingTable | None = None,
        memory_limit: float = 24576.0,
        gang: int | None = None,
    ) -> None:
        self.table = _checked_table(table)
        self.memory_limit = number("memory_limit", memory_limit, above=True)
        self.gang = checked_gang(gang)

    def decide(self, view: ClusterView) -> Decision:
        """Start, and pair, what may start."""
        jobs, limit = view.workload, min(self.gang or NEVER, int(view.capacity.sum()))
        most = np.where(view.running, view.gpus, limit)
        at = [
            size_index(jobs.size_ptr, jobs.size, j, m) for j, m in zip(view.job, most, strict=True)
        ]
        size, rate = jobs.size[at], jobs.rate[at]
        estimate = np.maximum(view.workload.estimate[view.job], 1)
        cost = -(-estimate // rate) * size
        zero_slot = np.diff(view.size_ptr) == 0
        quota = np.where(zero_slot, -1, np.where(view.running, view.gpus, 0))
        pending = np.flatnonzero(~view.running & ~zero_slot)
        pending = pending[np.argsort(cost[pending], kind="stable")]
        hosts = self._hosts(view)
        node, free = int(view.capacity.max(initial=0)), int(view.free.sum())
        share: dict[int, int] = {}
        for i in pending.tolist():
            partner = self._partner(view, i, hosts, size, cost) if size[i] <= node else -1
            if partner >= 0:
                share[i] = partner
                hosts.remove(partner)
            elif size[i] <= free:
                free -= int(size[i])
            else:
                continue
            quota[i] = size[i]
        return Decision(quota, order=pending, share=share, best_effort=bool(zero_slot.any()))

    def _hosts(self, view: ClusterView) -> list[int]:
        """Running jobs that share their GPUs with nobody, by start."""
        if self.table is None:
            return []
        alone = view.running & (view.gpus > 0)
        if len(view.partner):
            alone &= view.partner < 0
        found = np.flatnonzero(alone)
        return [int(i) for i in found[np.argsort(view.entered[found], kind="stable")]]

    def _partner(
        self, view: ClusterView, i: int, hosts: list[int], size: IntArray, cost: IntArray
    ) -> int:
        """The first host of a pending job; -1 if there is none."""
        for k in hosts:
            if view.gpus[k] != size[i] or cost[i] > 2 * cost[k]:
                continue
            kinds = (
                type_of(view.workload, int(view.job[i])),
                type_of(view.workload, int(view.job[k])),
            )
            if packable(self.table, self.memory_limit, *kinds):
                return k
        return -1


def _checked_table(table: Any) -> PackingTable | None:
    """The option ``table``."""
    from optsched.cluster.world.packing_table import PackingTable

    if table is not None and not isinstance(table, PackingTable):
        raise InputError(
            f"table: expected a PackingTable, such as PackingTable.read(pairs, types), "
            f"got {format_value(table)}"
        )
    return table
