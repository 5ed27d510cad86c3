"""What a policy of elastic jobs may dispose of at one instant, and the decision from an order."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.cluster.world.policy import Decision
from optsched.errors import InputError
from optsched.io.values import boolean

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from optsched.cluster.world.policy import ClusterView
    from optsched.model.schedule import IntArray

    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

# as in `optsched.cluster.policies.elastic_rule`, which is compiled where it is used
_FREE, _HOLDS, _PINNED, _LAST = 0, 1, 2, 3


@dataclass(frozen=True, eq=False)
class Room:
    """GPUs to be shared out, and by whom.

    Running jobs in the middle of a pass keep their size (``resize="pass"``), and their GPUs are
    not in `budget`; the other jobs that shall run are `movable`.
    """

    total: int
    """GPUs of all nodes that take work, but for those of jobs that are partly elsewhere."""
    fixed: IntArray
    """By position: see `fixed_jobs`."""
    movable: IntArray
    """Positions, ascending: jobs to be given at least their smallest size each."""
    budget: int
    """GPUs for them; at least the sum of their smallest sizes."""

    @classmethod
    def of(cls, view: ClusterView) -> Room:
        """Admit by arrival: who runs goes on, then first fit of smallest sizes.

        A pending job that fits only after somebody's pass has ended waits, and the GPUs it will
        need are not given to others meanwhile. Who is in its last pass gives nothing back.
        """
        from optsched_solvers.quota import admit

        fixed = fixed_jobs(view)
        total = int(view.free.sum() + view.gpus[fixed != _PINNED].sum())
        least = smallest(view)
        slots = least > 0
        holds = view.running & slots & (fixed != _PINNED)
        pending = np.flatnonzero(~view.running & slots)
        left = total - int(np.where(fixed == _LAST, view.gpus, least)[holds].sum())
        admitted = pending[admit(np.arange(len(pending)), least[pending], left)]
        budget = total - int(view.gpus[holds & (fixed != _FREE)].sum())
        flexible = np.flatnonzero(holds & (fixed == _FREE))
        now = budget - int(least[flexible].sum())
        starts = admitted[admit(np.arange(len(admitted)), least[admitted], now)]
        reserved = int(least[admitted].sum() - least[starts].sum())
        movable = np.sort(np.concatenate([flexible, starts]))
        needed = int(least[movable].sum())
        return cls(total, fixed, movable, max(budget - reserved, needed))

    def decision(self, view: ClusterView, given: IntArray) -> Decision:
        """Quotas of all jobs, `given` those of the movable ones."""
        quota = np.where(self.fixed != _FREE, view.gpus, 0)
        quota[self.movable] = given
        quota[np.diff(view.size_ptr) == 0] = -1
        return decision(view, quota, None)


def fixed_jobs(view: ClusterView) -> IntArray:
    """By position: 0 free, 1 keeps its size or is preempted, 2 stays as it is, 3 is 1 to its end.

    Where a stop loses the open pass, nobody is resized in it either. A job keeps its size to its
    end in its last pass: of jobs with a target by the remaining work that the policy sees.
    """
    fixed = np.zeros(len(view.job), np.int64)
    if view.settings.resize == "pass" or view.settings.checkpoint == "pass":
        inside = view.running & ~view.at_pass_end
        jobs, following = view.workload, view.passes + 1
        aims = ~np.isnan(jobs.target[view.job])
        last = np.where(
            aims,
            view.remaining <= following * view.pass_work - view.done,
            jobs.passes[view.job] <= following,
        )
        fixed[inside] = np.where(last[inside], _LAST, _HOLDS)
    closed: set[int] = set()
    for change in sorted(view.settings.changes, key=lambda change: change.time):
        if change.time <= view.time:
            (closed.discard if change.kind == "add" else closed.add)(change.node)
    if closed:
        outside = np.isin(view.held_node, np.array(sorted(closed), np.int64))
        fixed[np.repeat(np.arange(len(view.job)), np.diff(view.held_ptr))[outside]] = _PINNED
        fixed[view.gpus == 0] = _FREE  # zero-slot tasks have a row of no GPUs
    return fixed


def smallest(view: ClusterView) -> IntArray:
    """Smallest size of every active job; 0 for a zero-slot task."""
    least = np.zeros(len(view.job), np.int64)
    has = np.diff(view.size_ptr) > 0
    least[has] = view.size[view.size_ptr[:-1][has]]
    return least


def decision(view: ClusterView, quota: IntArray, order: IntArray | None) -> Decision:
    """Zero-slot tasks run as units are free."""
    return Decision(quota, order=order, best_effort=bool((quota < 0).any()))


def in_order(
    view: ClusterView, key: npt.NDArray[Any], preempt: int, surplus: int, remaining: FloatArray,
    cost: IntArray | None = None, weight: FloatArray | None = None,
) -> Decision:  # fmt: skip
    """One minimum gang each by ascending key (ties: who runs, then by arrival), then the surplus.

    `preempt` and `surplus` are those of `optsched.cluster.policies.elastic_rule.share`, `remaining`
    work, `cost` (of the next start) and `weight` (the jobs' own) serve its gains.
    """
    from optsched.cluster.policies.elastic_rule import columns_of, share

    n, fixed = len(view.job), fixed_jobs(view)
    order = np.lexsort((~view.running, key)).astype(np.int64)
    c = columns_of(
        n, n, int(view.free.sum() + view.gpus[fixed != _PINNED].sum()),
        order=order, held=view.gpus, fixed=fixed, preemptible=view.preemptible,
        size_ptr=view.size_ptr, size=view.size, rate=view.rate, remaining=remaining,
        weight=view.weight if weight is None else weight,
        cost=np.zeros(n) if cost is None else cost,
    )  # fmt: skip
    share(c, preempt, surplus)
    c.quota[np.diff(view.size_ptr) == 0] = -1
    return decision(view, c.quota, order)


def flag(name: str, value: object) -> bool:
    """An option that is True or False."""
    return boolean(f"options.{name}", value)


def number(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """An option that is a number in low..high (above: not low itself)."""
    good = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not good or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        bounds = f"{'above' if above else 'at least'} {low:g} and at most {high:g}"
        raise InputError(f"options.{name}: expected a number {bounds}, got {value!r:.60}")
    return float(value)  # type: ignore[arg-type]


def choice_of(name: str, value: object, known: tuple[str, ...]) -> str:
    """An option that is one of some words."""
    if not isinstance(value, str) or value not in known:
        raise InputError(f"options.{name}: expected {' or '.join(known)}, got {value!r:.60}")
    return value


def tables(
    view: ClusterView, room: Room, value: Callable[[int, int], int], sign: int = 1
) -> tuple[IntArray, IntArray, IntArray]:
    """CSR rows of value(position, index into view.size) at minimum, minimum + 1, ... GPUs.

    Between two allowed sizes stands the value of the smaller one, and never one that is worse
    (lower for sign 1, higher for -1) than on fewer GPUs. Returns pointers, values, and minima; rows
    end at the largest size that fits the budget.
    """
    ptr = [0]
    flat: list[int] = []
    least = smallest(view)[room.movable]
    spare = room.budget - int(least.sum())
    for position in room.movable.tolist():
        low, high = int(view.size_ptr[position]), int(view.size_ptr[position + 1])
        row = view.size[low:high].tolist()
        last = min(row[-1], row[0] + spare)
        best = value(position, low)
        for k in range(len(row)):
            end = row[k + 1] if k + 1 < len(row) else last + 1
            if row[k] > last:
                break
            best = sign * max(sign * best, sign * value(position, low + k))
            flat.extend([best] * (min(end, last + 1) - row[k]))
        ptr.append(len(flat))
    return np.array(ptr, np.int64), np.array(flat, np.int64), least


def fitted(view: ClusterView, room: Room, given: IntArray) -> IntArray:
    """The same rounded down to allowed sizes; what that frees goes round, the smallest first."""
    rows = [
        view.size[view.size_ptr[p] : view.size_ptr[p + 1]].tolist() for p in room.movable.tolist()
    ]
    step = [max(bisect_right(row, g) - 1, 0) for row, g in zip(rows, given.tolist(), strict=True)]
    short = given.sum() - sum(row[k] for row, k in zip(rows, step, strict=True))
    spare = int(min(short, room.budget))
    waiting = [
        (row[k + 1], j)
        for j, (row, k) in enumerate(zip(rows, step, strict=True))
        if k + 1 < len(row)
    ]
    heapify(waiting)
    while waiting and spare > 0:
        size, j = heappop(waiting)
        more = size - rows[j][step[j]]
        if more <= spare:
            step[j] += 1
            spare -= more
            if step[j] + 1 < len(rows[j]):
                heappush(waiting, (rows[j][step[j] + 1], j))
    return np.array([row[k] for row, k in zip(rows, step, strict=True)], np.int64)
