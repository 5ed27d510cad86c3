"""Compiled deciders of policies that run every job at one size: in order, or by walking all jobs.

`in_order` starts pending jobs and preempts nobody. `by_remaining` and `by_service` walk all jobs in
order with a counter that starts at all GPUs: who fits it is selected, others do not run. Between
arrivals and ends the selection cannot change: a selected job that moves ahead of one that is not
leaves the counters of both as they were or smaller. Running jobs ahead of all pending ones are
selected anyway, so a walk begins at the first pending job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.policies.gangs import gangs
from optsched.cluster.policies.waiting import (
    PLACE,
    WAITING,
    before,
    first_fitting,
    push,
    take,
    waiting,
)
from optsched.cluster.world.advance import attained_now, release, remaining_now, start, step
from optsched.cluster.world.build import world
from optsched.cluster.world.compiled import run
from optsched.cluster.world.layout import ARRIVED, ASK, COMPLETED, LOST, LUCID_NODE, WORLD
from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry, helper, record, records

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

STOP: Final = 0
FIRST_FIT: Final = 1
EASY: Final = 2
"""What happens behind the first job that does not fit."""

NEVER: Final = 1 << 62
_QUEUE: Final = 1 << 54
"""Between the keys of two queues; more than any time."""
MOST_QUEUES: Final = 100
_LUCID_COST: Final = (40, 60)
"""Seconds of a restart, within a node and on more."""

RUN: Final = record("key job gang")
"""A running job, its order and its GPUs."""
JOB: Final = record("gang rate estimate key tie change")
"""Its one size, its speed there, how long it is believed to take; while it runs, its order by
(key, tie), and the round at which it will be in a later queue."""


class Rigid(NamedTuple):
    """What the deciders know beside the world."""

    job: npt.NDArray[np.void]
    """`JOB`."""
    waiting: Any
    run: npt.NDArray[np.void]
    """`RUN`, last in order first; jobs that must not be preempted are not in it."""
    n: IntArray
    """See `_RUNS` and below."""
    chosen: npt.NDArray[np.void]
    """`PLACE`: selected pending jobs, in order."""
    out: IntArray
    """Places in `run` of jobs to be preempted, in order."""


RIGID: Final[Any] = types.NamedTuple(
    [records(JOB), WAITING, records(RUN), INTS, records(PLACE), INTS], Rigid
)
_RUNS: Final = 0
"""Length of `Rigid.run`."""
_NUMBER: Final = 1
"""Numbers given out to jobs that enter a list."""
_STUCK: Final = 2
"""Jobs that were selected and could not be placed."""
_CHOSEN: Final = 3
_OUT: Final = 4
_DUE: Final = 5
"""The round at which to select; `NEVER` if nothing has changed."""
_CROSSING: Final = 6
"""The round at which some running job will be in a later queue."""


def rigid(
    workload: Workload, nodes: Nodes, settings: Settings, gang: int | None, removals: bool = False
) -> Rigid | None:
    """Before the first event; None for what is not compiled.

    Not compiled are contention, zero-slot tasks, and changes of nodes, but for `removals` (and
    additions) beside jobs that have one size: others take what is there at the time.
    """
    total = nodes.total
    limit = total if gang is None else min(gang, total)
    size, rate = gangs(workload.size_ptr, workload.size, workload.rate, limit)
    if settings.timing == "lucid":
        check_lucid(workload, nodes, settings, size)
    if settings.contention is not None or size.min(initial=1) < 1:
        return None
    one_size = len(workload.size) == len(workload)
    if settings.changes and not (removals and one_size and settings.without_drains):
        return None
    job = np.zeros(len(workload), JOB)
    job["gang"], job["rate"] = size, rate
    job["estimate"] = -(-np.maximum(workload.estimate, 1) // rate)
    once = min(len(workload), total) + 1
    return Rigid(
        job, waiting(size), np.zeros(once, RUN), np.array([0, 0, 0, 0, 0, NEVER, NEVER]),
        np.zeros(once, PLACE), np.zeros(once, np.int64),
    )  # fmt: skip


def check_lucid(workload: Workload, nodes: Nodes, settings: Settings, size: IntArray) -> None:
    """Refuse what Lucid's simulator does not have.

    Raises
    ------
    InputError
        Names it.
    """
    total = nodes.total
    way = 'use timing="event"'
    for node, gpus in enumerate(nodes.gpus):
        if gpus != LUCID_NODE:
            raise InputError(
                f'timing: "lucid" wants nodes of {LUCID_NODE} GPUs, node {node} has {gpus}; {way}'
            )
    for name, wrong in (("changes", settings.changes), ("round", settings.round)):
        if wrong:
            raise InputError(f'{name}: timing="lucid" does not have it; leave it out or {way}')
    if settings.contention is not None:
        raise InputError(f'contention: timing="lucid" does not have it; leave it out or {way}')
    if any(group.max_concurrent is not None for group in workload.groups):
        raise InputError(f'max_concurrent: timing="lucid" does not have it; {way}')
    for what, bad in (("GPUs", size < 1), ("work", workload.work < 1)):
        if bad.any():
            name = workload.names[int(np.argmax(bad))]
            raise InputError(f'job {name!r:.60}: timing="lucid" wants 1 {what} or more; {way}')
    if (size > total).any():
        worst = int(np.argmax(size > total))
        raise InputError(
            f"job {workload.names[worst]!r:.60}: {int(size[worst])} GPUs are more than the "
            f"cluster's {total}; give more nodes"
        )


def simulate_in_order(
    workload: Workload, nodes: Nodes, settings: Settings, gang: int | None, key: str,
    backfill: int, name: str,
) -> Log | None:  # fmt: skip
    """The log of a policy that starts pending jobs in order; None if not compiled.

    Parameters
    ----------
    key
        ``"arrival"``, ``"estimate"`` or ``"area"`` (estimate times GPUs).
    backfill
        `STOP`, `FIRST_FIT` or `EASY`.
    """
    r = rigid(workload, nodes, settings, gang, backfill != EASY and key != "area")
    if r is None:
        return None
    first = np.arange(len(workload)) if key == "arrival" else r.job["estimate"].copy()
    if key == "area":
        first *= r.job["gang"]
    return run(
        lambda w: in_order(w, r, first, backfill, int(key == "estimate")),
        world(workload, nodes, settings), workload, name,
    )  # fmt: skip


def simulate_walk(
    workload: Workload, nodes: Nodes, settings: Settings, gang: int | None,
    queues: tuple[Sequence[int], int] | None, name: str,
) -> Log | None:  # fmt: skip
    """The log of `Srtf`, or with thresholds and a round that of `Las`; None if not compiled."""
    r = rigid(workload, nodes, settings, gang)
    if r is None or (queues and len(queues[0]) > MOST_QUEUES):
        return None
    if settings.timing == "lucid":
        within = r.job["gang"] <= LUCID_NODE
        workload = workload.changed(restart_cost=np.where(within, *_LUCID_COST))
    thresholds = np.array([*(queues[0] if queues else ()), NEVER], np.int64)

    def loop(w: World) -> Any:
        w.state["late"] = w.state["consolidated"]
        return by_service(w, r, thresholds, queues[1]) if queues else by_remaining(w, r)

    return run(loop, world(workload, nodes, settings), workload, name)


# running jobs in order


@helper(INT, RIGID, INT, INT, INT, counted=False)
def _place(r, end, key, tie):  # type: ignore[no-untyped-def]
    """First place in ``run[:end]`` of a job that is not behind (key, tie)."""
    low = 0
    while low < end:
        middle = (low + end) >> 1
        other = r.run[middle].key
        if other > key or (other == key and r.job[r.run[middle].job].tie > tie):
            low = middle + 1
        else:
            end = middle
    return low


@helper(INT, RIGID, INT, INT, INT, INT, counted=False)
def _enter(r, job, key, tie, change):  # type: ignore[no-untyped-def]
    """A job runs."""
    run, at = r.run, r.n[_RUNS]
    r.n[_RUNS] = at + 1
    while at > 0 and (
        run[at - 1].key < key or (run[at - 1].key == key and r.job[run[at - 1].job].tie < tie)
    ):
        run[at] = run[at - 1]
        at -= 1
    run[at].key, run[at].job, run[at].gang = key, job, r.job[job].gang
    r.job[job].key, r.job[job].tie, r.job[job].change = key, tie, change
    return at


@helper(INT, WORLD, RIGID, counted=False)
def _drop_ended(w, r):  # type: ignore[no-untyped-def]
    """Jobs that have ended run no more; 1 if there were any."""
    if w.state[0].running_now == 0:
        r.n[_RUNS] = 0  # an instant that left no active job was not told
        return 1
    ended = 0
    for i in range(w.state[0].events):
        if w.event[i, 0] == COMPLETED:
            ended = 1
            _leave(r, w.event[i, 1])
    return ended


@helper(INT, RIGID, INT, counted=False)
def _leave(r, job):  # type: ignore[no-untyped-def]
    """A job runs no more; one that must not be preempted was not listed."""
    run, n = r.run, r.n[_RUNS]
    at = _place(r, n, r.job[job].key, r.job[job].tie)
    if at < 0 or at >= n or run[at].job != job:
        return 0
    for i in range(at + 1, n):
        run[i - 1] = run[i]
    r.n[_RUNS] = n - 1
    return 1


# one queue


@helper(INT, WORLD, RIGID, INT, INT, INT, counted=False)
def _start(w, r, kind, at, backfill):  # type: ignore[no-untyped-def]
    """Start the job at a place of the heap of a size; 0 if it cannot be placed."""
    job = r.waiting.heap[r.waiting.size[kind].first + at].job
    if start(w, job, r.job[job].gang) == 0:
        return 0
    take(r.waiting, kind, at)
    if backfill == EASY:
        _enter(r, job, w.state[0].time + r.job[job].estimate, job, 0)
    return 1


@helper(INT, RIGID, INT, INT, INT, INT, counted=False)
def _first_done(r, free, extra, time, shortest):  # type: ignore[no-untyped-def]
    """Place in the heaps of the first job that fits, and is done in `time` or fits `extra`; -1."""
    q, best = r.waiting, -1
    for kind in range(q.size.shape[0]):
        if q.size[kind].gpus > free:
            break
        first, end = q.size[kind].first, q.size[kind].first + q.size[kind].length
        if shortest == 1 or q.size[kind].gpus <= extra:
            end = min(end, first + 1)  # the first job of this size goes before the others
        for i in range(first, end):
            if q.size[kind].gpus > extra and q.heap[i].time > time:
                continue
            if best < 0 or before(q.heap, i, best) == 1:
                best = i
    return best


@helper(INT, WORLD, RIGID, INT, INT, counted=False)
def _reserve(w, r, need, shortest):  # type: ignore[no-untyped-def]
    """EASY: start whoever fits and does not delay the first job, which needs more than is free."""
    now, there, shadow = w.state[0].time, w.state[0].free_gpus, NEVER
    for i in range(r.n[_RUNS] - 1, -1, -1):
        end = max(r.run[i].key, now + 1)  # who outlives its estimate is believed to end at once
        if there >= need and end > shadow:
            break
        there += r.run[i].gang
        if there >= need:
            shadow = end
    extra = there - need
    while w.state[0].free_gpus > 0:
        at = _first_done(r, w.state[0].free_gpus, extra, shadow - now, shortest)
        if at < 0:
            break
        job = r.waiting.heap[at].job
        if r.waiting.heap[at].time > shadow - now:
            extra -= r.job[job].gang
        kind = r.waiting.kind[job]
        _start(w, r, kind, at - r.waiting.size[kind].first, EASY)
    return 0


@entry(INT, WORLD, RIGID, INTS, INT, INT, counted=False)
def in_order(w, r, first, backfill, shortest):  # type: ignore[no-untyped-def]
    """Start pending jobs by the column `first`, ties by arrival; `shortest`: it is the estimate."""
    s = w.state[0]
    while True:
        status = step(w)
        if status != ASK:
            return status
        for i in range(s.events):
            job = w.event[i, 1]
            if w.event[i, 0] == LOST and shortest == 1:
                left, rate = remaining_now(w, job, 0), r.job[job].rate
                first[job] = (left + rate - 1) // rate
            if w.event[i, 0] == ARRIVED or w.event[i, 0] == LOST:
                push(r.waiting, job, first[job], job, r.job[job].estimate)
        if backfill == EASY:
            _drop_ended(w, r)
        kind = first_fitting(r.waiting, NEVER)
        while kind >= 0 and _start(w, r, kind, 0, backfill) == 1:
            kind = first_fitting(r.waiting, NEVER)
        if kind >= 0 and backfill == EASY and s.free_gpus > 0:
            _reserve(w, r, r.waiting.size[kind].gpus, shortest)
        elif kind >= 0 and backfill == FIRST_FIT:
            kind = first_fitting(r.waiting, s.free_gpus)
            while kind >= 0:
                _start(w, r, kind, 0, backfill)
                kind = first_fitting(r.waiting, s.free_gpus)


# walks


@helper(INT, WORLD, RIGID, INT, counted=False)
def _number(w, r, job):  # type: ignore[no-untyped-def]
    """Order among equals: by arrival, in Lucid's simulator that of entering a list."""
    if w.state[0].late == 0:
        return job
    r.n[_NUMBER] += 1
    return r.n[_NUMBER]


@helper(INT, WORLD, RIGID, INT, INT, INT, counted=False)
def _fits(w, r, gang, key, shift):  # type: ignore[no-untyped-def]
    """1 if a pending job fits the counter at its place: what is free and what runs behind it."""
    at, room = 0, w.state[0].free_gpus
    while room < gang and at < r.n[_RUNS] and r.run[at].key >= key + shift:
        room += r.run[at].gang
        at += 1
    return 1 if gang <= room else 0


@helper(INT, WORLD, RIGID, INT, counted=False)
def _first(w, r, shift):  # type: ignore[no-untyped-def]
    """Key of the first pending job that fits the counter at its place; `NEVER` if none does."""
    q, key = r.waiting, NEVER
    for kind in range(q.size.shape[0]):
        if q.size[kind].length > 0:
            own = q.heap[q.size[kind].first].key
            if own < key and _fits(w, r, q.size[kind].gpus, own, shift) == 1:
                key = own
    return key


@helper(INT, WORLD, RIGID, INT, INT, counted=False)
def _select(w, r, key, shift):  # type: ignore[no-untyped-def]
    """Walk all jobs from a key on: fills `chosen` and `out`.

    A running job is ahead of a pending one if its key is less than the other's + `shift`.
    """
    q, run = r.waiting, r.run
    at = behind = chosen = out = 0
    while at < r.n[_RUNS] and run[at].key >= key + shift:
        behind += run[at].gang
        at += 1
    counter = w.state[0].free_gpus + behind
    while True:
        kind = first_fitting(q, counter)
        if kind < 0 and behind <= counter:
            break  # all that run behind stay
        need, ahead = 0, NEVER
        if kind >= 0:
            need, ahead = q.size[kind].gpus, q.heap[q.size[kind].first].key + shift
        while at > 0 and counter >= need and run[at - 1].key < ahead:
            at -= 1
            gang = run[at].gang
            behind -= gang
            if gang <= counter:
                counter -= gang
            else:
                r.out[out] = at
                out += 1
        if kind >= 0 and counter >= need:
            r.chosen[chosen] = q.heap[q.size[kind].first]
            chosen += 1
            take(q, kind, 0)
            counter -= need
    r.n[_CHOSEN], r.n[_OUT] = chosen, out
    return chosen


@helper(INT, WORLD, RIGID, INT, counted=False)
def _preempt(w, r, by_time):  # type: ignore[no-untyped-def]
    """Take the jobs of `out` off their GPUs; they wait, by remaining time or in their queues."""
    run, out = r.run, r.n[_OUT]
    if out == 0:
        return 0
    for i in range(out):
        job, key = run[r.out[i]].job, run[r.out[i]].key
        release(w, job, 0)
        if by_time == 1:
            left, rate = remaining_now(w, job, 1), r.job[job].rate
            key = (left + rate - 1) // rate + w.given[job].cost + w.job[job].owed
        push(r.waiting, job, key, _number(w, r, job), 0)
    kept, end = r.out[out - 1], r.n[_RUNS]
    for i in range(out - 1, -1, -1):  # `out` falls
        for k in range(r.out[i] + 1, r.out[i - 1] if i > 0 else end):
            run[kept] = run[k]
            kept += 1
    r.n[_RUNS] = kept
    return out


@helper(INT, WORLD, RIGID, INT, counted=False)
def _start_chosen(w, r, i):  # type: ignore[no-untyped-def]
    """Start a selected job; -1 if it cannot be placed (it waits, and is selected again)."""
    job = r.chosen[i].job
    if start(w, job, r.job[job].gang) == 1:
        return job
    push(r.waiting, job, r.chosen[i].key, r.chosen[i].tie, 0)
    r.n[_STUCK] += 1
    return -1


@helper(INT, WORLD, INT, counted=False)
def _last(w, job):  # type: ignore[no-untyped-def]
    """When a job that starts now will have done its work."""
    left, rate = w.given[job].work_total - w.job[job].done, w.job[job].rate
    return w.job[job].since + (left + rate - 1) // rate


@entry(INT, WORLD, RIGID, counted=False)
def by_remaining(w, r):  # type: ignore[no-untyped-def]
    """All jobs by true remaining time, restarts included; ties: pending first."""
    s, q = w.state[0], r.waiting
    while True:
        status = step(w)
        if status != ASK:
            return status
        come, key = 0, NEVER
        for i in range(s.events):
            if w.event[i, 0] == ARRIVED:
                job, come = w.event[i, 1], come + 1
                key = (w.given[job].work_total + r.job[job].rate - 1) // r.job[job].rate
                push(q, job, key, _number(w, r, job), 0)
        ended = _drop_ended(w, r)
        if q.count[0] == 0 or (ended == 0 and come == 0):
            continue
        if ended == 0 and come == 1 and r.n[_STUCK] == 0:  # nobody else can be selected
            if _fits(w, r, r.job[job].gang, key, s.time) == 0:
                continue
        else:
            key = _first(w, r, s.time)
            if key == NEVER:
                continue
        r.n[_STUCK] = 0
        _select(w, r, key, s.time)
        _preempt(w, r, 1)
        for i in range(r.n[_CHOSEN]):
            job = _start_chosen(w, r, i)
            if job >= 0 and w.given[job].preemptible == 1:
                _enter(r, job, _last(w, job), _number(w, r, job), 0)


@helper(INT, WORLD, RIGID, READ, INT, INT, INT, counted=False)
def _queue(w, r, thresholds, every, job, tie):  # type: ignore[no-untyped-def]
    """A job runs, in the queue of its GPU-time."""
    attained, queue, change = attained_now(w, job), 0, NEVER
    while attained > thresholds[queue]:
        queue += 1
    if thresholds[queue] != NEVER:
        when = w.state[0].time + (thresholds[queue] - attained) // r.job[job].gang + 1
        if when <= _last(w, job):
            change = -(-when // every) * every
    key = job if w.state[0].late == 0 else w.given[job].submit
    return _enter(r, job, queue * _QUEUE + key, tie, change)


@entry(INT, WORLD, RIGID, READ, INT, counted=False)
def by_service(w, r, thresholds, every):  # type: ignore[no-untyped-def]
    """All jobs by queue, then arrival, at rounds; ties in Lucid's simulator: running first."""
    s, q = w.state[0], r.waiting
    while True:
        status = step(w)
        if status != ASK:
            return status
        now = s.time
        changed = _drop_ended(w, r)
        for i in range(s.events):
            if w.event[i, 0] == ARRIVED:
                job, changed = w.event[i, 1], 1
                push(q, job, job if s.late == 0 else w.given[job].submit, _number(w, r, job), 0)
        if changed == 1:
            r.n[_DUE] = -(-now // every) * every
        moved = r.n[_CROSSING] <= now
        if moved:
            for i in range(r.n[_RUNS]):
                job = r.run[i].job
                if r.job[job].change <= now:
                    _leave(r, job)
                    _queue(w, r, thresholds, every, job, r.job[job].tie)
                    r.n[_DUE] = now
        if r.n[_DUE] == now:
            r.n[_DUE], moved = NEVER, True
            if q.count[0] > 0:
                _select(w, r, _first(w, r, s.late), s.late)
                _preempt(w, r, 0)
                for i in range(r.n[_CHOSEN]):
                    job = _start_chosen(w, r, i)
                    if job >= 0 and w.given[job].preemptible == 1:
                        _queue(w, r, thresholds, every, job, _number(w, r, job))
        if moved:
            r.n[_CROSSING] = NEVER
            for i in range(r.n[_RUNS]):
                r.n[_CROSSING] = min(r.n[_CROSSING], r.job[r.run[i].job].change)
        wake = min(r.n[_DUE], r.n[_CROSSING])
        s.wake = wake if wake < NEVER else -1
