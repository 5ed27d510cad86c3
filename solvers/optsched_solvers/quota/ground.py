"""What backends for quota plans share: placement, repair, filling up, and reporting."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.kernels.plain_python import in_python
from optsched.problems.quota.problem import QuotaPlan
from optsched.solving.solver import Support
from optsched_solvers._loading import load

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Problem, Rows
    from optsched.solving.monitor import Monitor

LOCALITY: Final = {"any": 0, "single": 1, "whole": 2}

PLACEMENT: Final = "optsched_solvers.quota.placement_quotas"

NOT_LOADED: Final = "the limit came before compiled code was loaded (see `optsched warmup`)"

MOST_OPTIONS: Final = 200_000
"""Of a plan that is searched option by option."""

FEW_JOBS: Final = 50
FEW_NODES: Final = 64
FEW_OPTIONS: Final = 2000
"""Jobs, nodes and allowed sizes (or GPUs) up to which plain Python takes a tenth of a second."""


def supported(problem: Problem, most: int | None = MOST_OPTIONS) -> Support:
    """Whether it is a quota plan with at most so many options."""
    if not isinstance(problem, QuotaPlan):
        return Support(False, "it only decides quotas (QuotaPlan)")
    if most is not None and problem.n_options > most:
        return Support(
            False, f"it takes up to {most} allowed sizes, this plan has {problem.n_options}"
        )
    return Support(True)


def is_few(plan: QuotaPlan) -> bool:
    """Whether plain Python can do what is not compiled yet."""
    some = 0 if plan.is_plain else plan.n_options
    small = len(plan.jobs) <= FEW_JOBS and len(plan.nodes or ()) <= FEW_NODES
    return small and max(some, plan.n_gpus) <= FEW_OPTIONS


def ready(plan: QuotaPlan, monitor: Monitor) -> bool:
    """Load what placing needs; False if told to stop first."""
    return not plan.nodes or is_few(plan) or load(monitor, PLACEMENT)


def place(plan: QuotaPlan, sizes: IntArray, kinds: IntArray) -> tuple[Rows, int]:
    """GPUs for quotas that fit the budgets, and the first job that found no place, or -1."""
    with in_python(is_few(plan)):
        return _placed(plan, sizes, kinds)


def _placed(plan: QuotaPlan, sizes: IntArray, kinds: IntArray) -> tuple[Rows, int]:
    if not plan.nodes:
        ptr = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes > 0, out=ptr[1:])
        return plan.numbered(ptr, kinds[sizes > 0], sizes[sizes > 0]), -1
    from optsched_solvers.quota.placement_quotas import place_quotas

    locality = np.array([LOCALITY[job.locality] for job in plan.jobs], np.int64)
    kind, gpus, _ = plan.pools
    if len(plan.kinds) == 1:
        ptr, node, count, failed = place_quotas(sizes, gpus, *plan.held, locality)
        return plan.numbered(ptr, node, count), int(failed)
    jobs, nodes, counts, failed = [], [], [], -1
    for k in range(len(plan.kinds)):
        here = np.flatnonzero(kind == k)
        wanted = np.where(kinds == k, sizes, 0)
        ptr, node, count, lost = place_quotas(wanted, gpus[here], *_held_on(plan, here), locality)
        jobs.append(np.repeat(np.arange(len(sizes)), np.diff(ptr)))
        nodes.append(here[node])
        counts.append(count)
        failed = int(lost) if lost >= 0 else failed
    row = np.concatenate(jobs)
    order = np.argsort(row, kind="stable")
    ptr = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=len(sizes)), out=ptr[1:])
    return plan.numbered(ptr, np.concatenate(nodes)[order], np.concatenate(counts)[order]), failed


def _held_on(plan: QuotaPlan, here: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Where the jobs are now, among some nodes."""
    ptr, node, count = plan.held
    some = np.isin(node, here)
    row = np.repeat(np.arange(len(plan.jobs)), np.diff(ptr))[some]
    found = np.zeros(len(plan.jobs) + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=len(plan.jobs)), out=found[1:])
    return found, np.searchsorted(here, node[some]), count[some]


def offer(
    plan: QuotaPlan, monitor: Monitor, sizes: IntArray, kinds: IntArray | None, source: str
) -> bool:
    """Place quotas and report them; if a locality fails, shrink who failed. False if in vain."""
    of = np.zeros(len(sizes), np.int64) if kinds is None else kinds
    rows, failed = place(plan, sizes, of)
    if failed >= 0:
        repaired = _repaired(plan, monitor, sizes, of, failed)
        if repaired is None:
            return False
        rows = repaired
        sizes, of = plan.sizes(rows)
    monitor.incumbent(rows, plan.worth(sizes, of), source)
    return True


def _repaired(
    plan: QuotaPlan, monitor: Monitor, sizes: IntArray, kinds: IntArray, failed: int
) -> Rows | None:
    """Give who finds no place its next smaller size, again and again."""
    if plan.hands_out_all:
        return None
    sizes, kinds = sizes.copy(), kinds.copy()
    while not monitor.should_stop():
        smaller = _smaller(plan, failed, int(sizes[failed]), int(kinds[failed]))
        if smaller < 0:
            return None
        sizes[failed] = smaller
        rows, failed = place(plan, sizes, kinds)
        if failed < 0:
            return rows
    return None


def _smaller(plan: QuotaPlan, job: int, size: int, kind: int) -> int:
    """The next smaller allowed size on the same type, 0 if it need not run, else -1."""
    found = -1 if plan.jobs[job].must_run else 0
    for k, low, high, listed in plan.spans[job]:
        if k == kind:
            some = range(low, min(high, size - 1) + 1) if listed is None else listed
            found = max([found, *(g for g in some if g < size)])
    return found


def fill(plan: QuotaPlan, sizes: IntArray, kinds: IntArray) -> tuple[IntArray, IntArray]:
    """Use GPUs that are left: best gain per GPU first, or for the job that is worst off.

    Nobody gets a worse size than before; the arrays are not modified.
    """
    sizes, kinds = sizes.copy(), kinds.copy()
    if plan.hands_out_all or plan.is_plain:
        return sizes, kinds
    left = list(plan.budgets)
    for k in range(len(left)):
        left[k] -= int(sizes[kinds == k].sum())
    table = plan.table
    ptr = table.ptr.tolist()
    cost = plan.costs(sizes, kinds).tolist()

    def best(j: int) -> tuple[float, int, int] | None:
        """How urgent it is, the job, and its best option that fits; None if there is none."""
        some = slice(ptr[j], ptr[j + 1])
        gain = cost[j] - table.cost[some]
        room = np.array(left)[table.kind[some]]
        more = table.size[some] - sizes[j]
        room = np.where(table.kind[some] == kinds[j], room + sizes[j], room)
        good = (gain > 0) & (table.size[some] <= room)
        if not good.any():
            return None
        rate = np.where(good, gain / np.maximum(more, 0.5), -1.0)
        pick = int(np.argmax(rate))
        urgency = -float(cost[j]) if plan.highest else -float(rate[pick])
        return urgency, j, ptr[j] + pick

    heap = [found for j in range(len(sizes)) if (found := best(j)) is not None]
    heapify(heap)
    while heap and max(left) > 0:
        _, j, at = heappop(heap)
        now = best(j)
        if now is None:
            continue
        if now[2] != at:  # what it wanted does not fit any more
            heappush(heap, now)
            continue
        left[kinds[j]] += int(sizes[j])
        sizes[j], kinds[j] = table.size[at], table.kind[at]
        left[kinds[j]] -= int(sizes[j])
        cost[j] = int(table.cost[at])
        again = best(j)
        if again is not None:
            heappush(heap, again)
    return sizes, kinds


__all__ = [
    "LOCALITY", "MOST_OPTIONS", "NOT_LOADED", "PLACEMENT", "fill", "is_few", "offer", "place",
    "ready", "supported",
]  # fmt: skip
