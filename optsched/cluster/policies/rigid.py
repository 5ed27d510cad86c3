"""Policies that run every job at one size: `fifo`, `sjf`, `srtf` and `las`.

An elastic job runs on its largest allowed size up to the option ``gang`` and to the GPUs of the
nodes that take work; a running job stays at its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from optsched.cluster.policies.elastic_rule import by_key, integers, positions, total
from optsched.cluster.workload.job import PER_SECOND
from optsched.cluster.workload.speedup import MOST_GPUS
from optsched.cluster.world.compiled import Choice, RulePolicy
from optsched.errors import InputError
from optsched.io.values import format_value, integer, one_of
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings

Backfill = Literal["none", "first_fit", "easy"]
BACKFILLS: Final = ("none", "first_fit", "easy")
_EASY: Final = 2
BY_ARRIVAL: Final = 0
BY_ESTIMATE: Final = 1
"""Keys of pending jobs: position, or estimated duration."""
NEVER: Final = 2**62
_ROUND: Final = 60
_THRESHOLD: Final = 18_000
"""Seconds."""


def checked_gang(gang: int | None) -> int | None:
    """The option ``gang``."""
    return None if gang is None else integer("gang", gang, 1, MOST_GPUS)


class Rigid(RulePolicy):
    """A policy with the option `gang`; its rule takes the sizes and rates of all jobs."""

    options: ClassVar[tuple[str, ...]] = ("gang",)

    def __init__(self, *, gang: int | None = None) -> None:
        self.gang = checked_gang(gang)

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """Sizes and rates of all jobs in CSR form, and the largest size to take."""
        limit = NEVER if self.gang is None else self.gang
        return workload.size_ptr, workload.size, workload.rate, limit


@helper()
def size_index(ptr, size, job, limit):  # type: ignore[no-untyped-def]
    """Index of the largest size of a job up to a limit, or of its smallest size."""
    k = ptr[job + 1] - 1
    while k > ptr[job] and size[k] > limit:
        k -= 1
    return k


@helper()
def duration(view, i, ptr, size, rate, limit):  # type: ignore[no-untyped-def]
    """Time to completion of a job at its size, by `remaining`."""
    most = view.gpus[i] if view.running[i] else limit
    return -(-view.remaining[i] // rate[size_index(ptr, size, view.job[i], most)])


@helper()
def durations(view, ptr, size, rate, limit, only_running):  # type: ignore[no-untyped-def]
    """Time to completion of every active job, or of every running job, at its size."""
    time = integers(len(view.job))
    for i in range(len(view.job)):
        if view.running[i] or not only_running:
            time[i] = duration(view, i, ptr, size, rate, limit)
    return time


# pending jobs start in an order, and no job is preempted


@helper()
def reservation(quota, time, free, need):  # type: ignore[no-untyped-def]
    """When the first blocked job can start at the earliest, and the GPUs that it leaves then."""
    shadow = 0
    while free < need:
        following = NEVER
        for i in range(len(quota)):
            if quota[i] > 0 and shadow < time[i] < following:
                following = time[i]
        if following == NEVER:
            return NEVER, 0
        shadow = following
        for i in range(len(quota)):
            if quota[i] > 0 and time[i] == shadow:
                free += quota[i]
    return shadow, free - need


@helper()
def next_job(view, quota, key, by_key, sizes, free, blocked, allowed):  # type: ignore[no-untyped-def]
    """Position of the first pending job in order; after a blocked one of those that may pass it.

    `allowed`: latest end of such a job (time from now), and GPUs for jobs that end later.
    """
    ptr, size, rate, limit = sizes
    best = -1
    for i in range(len(quota)):
        if quota[i] > 0 or (best >= 0 and key[i] >= key[best]):
            continue
        gpus = size[size_index(ptr, size, view.job[i], limit)]
        if gpus == 0 or (blocked and gpus > free):
            continue
        late = blocked and gpus > allowed[1]
        if late and duration(view, i, ptr, size, rate, limit) > allowed[0]:
            continue
        best = i
        if not by_key:
            break
    return best


def in_order(view, ptr, size, rate, gang, by, backfill):  # type: ignore[no-untyped-def]
    """Start pending jobs in order; what passes the first that does not fit goes by `backfill`.

    EASY: a job passes if it does not delay the first one by the estimates (Lifka, JSSPP 1995).
    """
    n = len(view.gpus)
    quota, free, limit = view.gpus.copy(), total(view.free), min(gang, total(view.capacity))
    order, started = integers(n), 0
    if free == 0:
        return Choice(quota, order[:0])
    by_key, time, key = by != BY_ARRIVAL, order, view.job
    if by_key or backfill == _EASY:
        time = durations(view, ptr, size, rate, limit, not by_key)
        key = time if by_key else key
    blocked, allowed, sizes = False, (NEVER, 0), (ptr, size, rate, limit)
    while free > 0:
        best = next_job(view, quota, key, by_key, sizes, free, blocked, allowed)
        if best < 0:
            break
        gpus = size[size_index(ptr, size, view.job[best], limit)]
        if gpus > free:
            if backfill == 0:
                break
            blocked = True
            if backfill == _EASY:
                allowed = reservation(quota, time, free, gpus)
            continue
        if backfill == _EASY:
            end = duration(view, best, ptr, size, rate, limit)
            if blocked and end > allowed[0]:
                allowed = (allowed[0], allowed[1] - gpus)
            if not by_key:
                time[best] = end
        quota[best] = gpus
        free -= gpus
        order[started] = best
        started += 1
    return Choice(quota, order[:started])


class InOrder(Rigid):
    """Pending jobs start in an order and run to their ends."""

    options: ClassVar[tuple[str, ...]] = ("backfill", "gang")
    rule = staticmethod(in_order)
    order: ClassVar[int]

    def __init__(self, *, backfill: Backfill = "none", gang: int | None = None) -> None:
        self.backfill = one_of("backfill", backfill, BACKFILLS)
        super().__init__(gang=gang)

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """Arguments of `Rigid`, and the options as numbers."""
        given = super().arguments(workload, nodes, settings)
        return *given, self.order, BACKFILLS.index(self.backfill)


class Fifo(InOrder):
    """Jobs start in order of arrival, at one size, and run to their ends.

    Parameters
    ----------
    backfill
        ``"none"``: no job passes the first one that does not fit; ``"first_fit"``: every job that
        fits starts; ``"easy"``: every job that fits and, by the estimates, does not delay that
        first job.
    gang
        Elastic jobs run on their largest allowed size up to this; None: their largest.
    """

    name = "fifo"
    order = BY_ARRIVAL


class Sjf(InOrder):
    """Pending jobs start in order of estimated duration; options as of `Fifo`."""

    name = "sjf"
    order = BY_ESTIMATE


# all jobs in an order, with a counter of GPUs; the others are preempted


@helper()
def walk(view, order, ptr, size, limit):  # type: ignore[no-untyped-def]
    """Select jobs in order while they fit a counter that starts at all GPUs; others do not run.

    A job takes the GPUs of running jobs behind it; one that does not fit is passed over. Running
    jobs that are not preemptible are selected first. GPUs held on drained nodes are of use to
    their holders only.
    """
    n = len(view.job)
    quota, need = integers(n), integers(n)
    counter = total(view.free)
    for i in range(n):
        most = view.gpus[i] if view.running[i] else limit
        need[i] = size[size_index(ptr, size, view.job[i], most)]
        for k in range(view.held_ptr[i], view.held_ptr[i + 1]):
            if view.capacity[view.held_node[k]] == 0:
                need[i] -= view.held_count[k]
            else:
                counter += view.held_count[k]
        if view.running[i] and not view.preemptible[i]:
            quota[i] = view.gpus[i]
            counter -= need[i]
    for i in order:
        if quota[i] == 0 and need[i] <= counter:
            quota[i] = view.gpus[i]
            if not view.running[i]:
                quota[i] = size[size_index(ptr, size, view.job[i], limit)]
            counter -= need[i]
    return quota


def shortest_remaining(view, ptr, size, rate, gang):  # type: ignore[no-untyped-def]
    """Walk all jobs by remaining time with restarts, pending before running jobs."""
    limit = min(gang, total(view.capacity))
    key = durations(view, ptr, size, rate, limit, False)
    for i in range(len(key)):
        begun = view.starts[i] > 1 or (view.starts[i] == 1 and not view.running[i])
        served = view.time - view.entered[i] if view.running[i] else 0
        if begun and served < view.restart_cost[i]:
            key[i] += view.restart_cost[i] - served
        key[i] = 2 * key[i] + (1 if view.running[i] else 0)
    order = by_key(positions(len(key)), key)
    return Choice(walk(view, order, ptr, size, limit), order)


class Srtf(Rigid):
    """All jobs by true remaining time, restarts included; a job that does not fit is preempted.

    Equal times: pending jobs first, then by arrival. No decision is needed when a running job
    overtakes a pending one: the running job was selected with the pending one ahead of it, so it
    still is, and the other still is not.
    """

    name = "srtf"
    clairvoyant = True
    rule = staticmethod(shortest_remaining)


def least_attained(view, ptr, size, rate, gang, thresholds, every):  # type: ignore[no-untyped-def]
    """Walk all jobs by queue of GPU-time received, then by arrival, at rounds only."""
    n, last = len(view.job), len(thresholds)
    now = view.time
    if now % every != 0:
        return Choice(view.gpus.copy(), integers(0), (now // every + 1) * every)
    queue = integers(n)
    for i in range(n):
        while queue[i] < last and thresholds[queue[i]] < view.attained[i]:
            queue[i] += 1
    order = by_key(positions(n), queue)
    quota = walk(view, order, ptr, size, min(gang, total(view.capacity)))
    soonest = NEVER
    for i in range(n):
        if quota[i] > 0 and queue[i] < last:
            soonest = min(soonest, (thresholds[queue[i]] - view.attained[i]) // quota[i] + 1)
    wake = 0 if soonest == NEVER else -(-(now + soonest) // every) * every
    return Choice(quota, order, wake)


class Las(Rigid):
    """2D-LAS of Tiresias (Gu et al., NSDI 2019): queues by GPU-time received, FIFO inside.

    Parameters
    ----------
    thresholds
        GPU-time, in the workload's unit, beyond which a job is in the next queue; ascending. None:
        one, 18,000 s.
    round
        Decisions are made at multiples of this time, in the workload's unit; 0: at every event;
        None: 60 s.
    gang
        As for `Fifo`.
    """

    name = "las"
    options: ClassVar[tuple[str, ...]] = ("gang", "round", "thresholds")
    rule = staticmethod(least_attained)

    def __init__(
        self, *, thresholds: Sequence[int] | None = None, round: int | None = None,
        gang: int | None = None,
    ) -> None:  # fmt: skip
        self.thresholds = None if thresholds is None else _checked_thresholds(thresholds)
        self.round = None if round is None else integer("round", round)
        super().__init__(gang=gang)

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """Arguments of `Rigid`, thresholds, and round in the unit of the workload."""
        second = PER_SECOND[workload.time_unit]
        thresholds = (_THRESHOLD * second,) if self.thresholds is None else self.thresholds
        every = _ROUND * second if self.round is None else self.round
        given = super().arguments(workload, nodes, settings)
        return *given, np.array(thresholds, np.int64), max(every, 1)


def _checked_thresholds(thresholds: Sequence[int]) -> tuple[int, ...]:
    """The option ``thresholds``."""
    if isinstance(thresholds, (str, bytes)) or not hasattr(thresholds, "__iter__"):
        raise InputError(
            "thresholds: expected ascending integers such as (18000,), got "
            f"{format_value(thresholds)}"
        )
    found: list[int] = []
    for value in thresholds:
        found.append(integer("thresholds", value, found[-1] + 1 if found else 0))
    return tuple(found)
