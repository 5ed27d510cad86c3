"""Gangs of elastic jobs in an order, then the GPUs that are left: what all elastic policies share.

Plain functions of a view, which numba takes too. Three steps: admission (one smallest gang for
every job, counted over all GPUs), realisation (jobs within a pass keep their size, and a displaced
job goes on until its GPUs are used), surplus (GPUs that would idle).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.workload.workload import Workload
    from optsched.model.schedule import IntArray

# when a running job loses its GPUs
NEVER: Final = 0
BY_ORDER: Final = 1
"""To a job before it in the order."""
BY_GAIN: Final = 2
"""Likewise, where the saved weighted time exceeds both restart costs."""
_NOISE: Final = 1e-9
"""A gain of less than this share of the time it is taken from is rounding."""

# which job gets the GPUs that would idle
IDLE: Final = 0
"""No job."""
ROUND: Final = 1
"""One step up for each in order, again and again."""
MARGINAL: Final = 2
"""Each step to the largest saving of weighted time per GPU."""
APPORTION: Final = 3
"""In proportion to `Jobs.work`, by the divisor method of Webster (bounded apportionment)."""
WORST: Final = 4
"""Each step to the job with the largest scale * (elapsed + work / pace), of equals to the one that
falls lowest. It has to get that step in every allocation whose largest value is smaller, so the
largest value is the smallest possible one whatever the sizes."""

# how free the size of a job is
FREE: Final = 0
HOLDS: Final = 1
"""Within a pass: it keeps its size, or loses all."""
LAST: Final = 2
"""Likewise, in what is estimated to be its last pass: it holds its GPUs until it ends."""
PINNED: Final = 3
"""It stays as it is, and its GPUs are not in the budget: they are on a node that is drained."""


class Jobs(NamedTuple):
    """What a policy makes of the active jobs, by position (`order`: positions)."""

    order: Any
    fixed: Any
    """`FREE`, `HOLDS`, `LAST` or `PINNED`."""
    work: Any
    """Remaining work, or a score."""
    scale: Any
    elapsed: Any
    cost: Any
    """Restart cost of the next start."""
    pace: Any
    """Speed, or another rising number, at each of ``view.size``."""


def last_passes(workload: Workload, clairvoyant: bool) -> IntArray:
    """Number of passes by job; of one that ends at a target by its work as the policy sees it."""
    work = workload.work if clairvoyant else workload.estimate
    aims = ~np.isnan(workload.target)
    passes = np.where(aims, -(-work // workload.pass_work), workload.passes)
    return passes.astype(np.int64)


@helper()
def fixed_sizes(view, last_pass, by_pass):  # type: ignore[no-untyped-def]
    """How free the size of every job is; `by_pass`: a size changes at the end of a pass only."""
    fixed = np.zeros(len(view.job), np.int64)
    for i in range(len(fixed)):
        if view.gpus[i] == 0:
            continue
        if len(view.draining) > 0 and view.draining[i]:
            fixed[i] = PINNED
        elif by_pass and not view.at_pass_end[i]:
            fixed[i] = LAST if view.passes[i] + 1 >= last_pass[view.job[i]] else HOLDS
    return fixed


@helper()
def in_order(view, key):  # type: ignore[no-untyped-def]
    """Positions by ascending key; of equal keys the running jobs first, then by arrival."""
    if np.all(key[1:] > key[:-1]):
        return np.arange(len(key))
    order = np.concatenate((np.flatnonzero(view.gpus > 0), np.flatnonzero(view.gpus == 0)))
    by_key = key[order]
    if np.all(by_key[1:] >= by_key[:-1]):
        return order
    return order[np.argsort(by_key, kind="mergesort")]


@helper()
def least(view, jobs, i):  # type: ignore[no-untyped-def]
    """GPUs that a job needs until it ends: its smallest size, or what it cannot give back."""
    return view.gpus[i] if jobs.fixed[i] == LAST else view.size[view.size_ptr[i]]


@helper()
def _pays(view, jobs, i, victim):  # type: ignore[no-untyped-def]
    """Whether job i gains more than both restart costs by going before a running one."""
    loses = jobs.scale[victim] * (jobs.work[i] / view.rate[view.size_ptr[i]])
    gains = jobs.scale[i] * (jobs.work[victim] / view.rate[view.size_ptr[victim]])
    costs = jobs.scale[victim] * jobs.cost[victim] + jobs.scale[victim] * jobs.cost[i]
    return gains - loses - costs > _NOISE * gains


@helper()
def _may_go(view, jobs, admitted, i):  # type: ignore[no-untyped-def]
    """Whether a job runs, has not been displaced yet, and may be."""
    return view.gpus[i] > 0 and admitted[i] and view.preemptible[i] and jobs.fixed[i] != PINNED


@helper()
def _displace(view, jobs, admitted, at, last, missing):  # type: ignore[no-untyped-def]
    """Take out running jobs of the order, from place `last` upwards, for the job at place `at`.

    Returns the next place to take from and the GPUs that are more than `missing`; -1 and nothing
    is changed where some job does not give way with a gain (later jobs gain less).
    """
    freed, back = 0, last
    while back > at and freed < missing:
        victim = jobs.order[back]
        back -= 1
        if _may_go(view, jobs, admitted, victim):
            if not _pays(view, jobs, jobs.order[at], victim):
                return -1, 0
            freed += least(view, jobs, victim)
    if freed < missing:
        return -1, 0
    left, following = freed - missing, back
    for place in range(back + 1, last + 1):
        victim = jobs.order[place]
        if _may_go(view, jobs, admitted, victim):
            need = least(view, jobs, victim)
            admitted[victim] = need <= left  # a larger one that stood before it is enough
            if admitted[victim]:
                left, following = left - need, place
    return following, left


@helper()
def _admit(view, jobs, preempt, left):  # type: ignore[no-untyped-def]
    """Which jobs shall run: their least GPUs fit `left` together."""
    n = len(jobs.order)
    admitted = np.zeros(n, np.bool_)
    for i in range(n):
        if view.gpus[i] > 0 and jobs.fixed[i] == PINNED:
            admitted[i] = True
        elif view.gpus[i] > 0 and (preempt != BY_ORDER or not view.preemptible[i]):
            admitted[i] = True
            left -= least(view, jobs, i)
    last = n - 1 if preempt == BY_GAIN else -1
    for at in range(n):
        i = jobs.order[at]
        if left == 0 and last < 0:
            break
        if admitted[i] or (view.gpus[i] > 0 and preempt != BY_ORDER):
            continue
        if view.size_ptr[i] == view.size_ptr[i + 1]:
            continue
        gang = least(view, jobs, i)
        if gang <= left:
            admitted[i] = True
            left -= gang
        elif last >= 0:
            last, spare = _displace(view, jobs, admitted, at, last, gang - left)
            if last >= 0:
                admitted[i] = True
                left = spare
    return admitted


@helper()
def _may_shrink(view, jobs):  # type: ignore[no-untyped-def]
    """Whether some running job could run on fewer GPUs now."""
    for i in range(len(view.job)):
        more = view.gpus[i] > 0 and view.gpus[i] > view.size[view.size_ptr[i]]
        if more and jobs.fixed[i] == FREE:
            return True
    return False


@helper()
def share(view, jobs, preempt, surplus):  # type: ignore[no-untyped-def]
    """GPUs of every job, and how many of those left over may be given to the jobs that run."""
    left = view.free.sum()
    if left == 0 and preempt == NEVER and not _may_shrink(view, jobs):
        return view.gpus.copy(), 0
    for i in range(len(view.job)):
        if jobs.fixed[i] != PINNED:
            left += view.gpus[i]
    admitted = _admit(view, jobs, preempt, left)
    live = jobs.order[(admitted | (view.gpus > 0))[jobs.order]]
    quota, step = np.zeros(len(admitted), np.int64), view.size_ptr[:-1].copy()
    for i in live:
        if admitted[i] and view.gpus[i] > 0:
            quota[i] = view.gpus[i] if jobs.fixed[i] != FREE else view.size[step[i]]
            if jobs.fixed[i] != PINNED:
                left -= quota[i]
    waiting = 0
    for i in live:
        if admitted[i] and view.gpus[i] == 0:
            if view.size[step[i]] <= left:
                quota[i] = view.size[step[i]]
                left -= quota[i]
            else:  # until another job ends its pass
                waiting += view.size[step[i]]
        elif not admitted[i]:  # it goes on while no job starts in its place
            if jobs.fixed[i] != FREE:
                quota[i] = view.gpus[i] if view.gpus[i] <= left else 0
            else:
                for k in range(view.size_ptr[i], view.size_ptr[i + 1]):
                    if view.size[k] <= min(view.gpus[i], left):
                        step[i], quota[i] = k, view.size[k]
            left -= quota[i]
    spare = max(left - waiting, 0)
    if spare > 0 and surplus != IDLE:
        able = live[(quota[live] > 0) & (jobs.fixed[live] == FREE)]
        if surplus == ROUND:
            spare = _round(view, able, quota, step, spare)
        else:
            spare = _most_urgent_first(view, jobs, surplus, able, quota, step, spare)
    return quota, spare


@helper()
def placed(view, order, quota):  # type: ignore[no-untyped-def]
    """Positions of the jobs that start or change their size, in the order."""
    found, count = np.empty(len(order), np.int64), 0
    for i in order:
        if quota[i] > 0 and quota[i] != view.gpus[i]:
            found[count] = i
            count += 1
    return found[:count]


@helper()
def _round(view, able, quota, step, spare):  # type: ignore[no-untyped-def]
    """One step up for each in order, again and again; returns what is left."""
    moved = True
    while moved and spare > 0:
        moved = False
        for i in able:
            if step[i] + 1 < view.size_ptr[i + 1]:
                more = view.size[step[i] + 1] - quota[i]
                if more <= spare:
                    step[i] += 1
                    quota[i] += more
                    spare -= more
                    moved = True
    return spare


@helper()
def _most_urgent_first(view, jobs, surplus, able, quota, step, spare):  # type: ignore[no-untyped-def]
    """Each step to the job where it is most urgent; returns what is left."""
    while spare > 0:
        best, most, second = -1, 0.0, 0.0
        for i in able:
            k = step[i]
            if k + 1 == view.size_ptr[i + 1] or view.size[k + 1] - view.size[k] > spare:
                continue
            first, after = _urgency(view, jobs, surplus, i, k)
            if best < 0 or first > most or (first == most and after > second):
                best, most, second = i, first, after
        if best < 0 or (surplus == MARGINAL and most <= 0.0):
            break
        step[best] += 1
        spare -= view.size[step[best]] - quota[best]
        quota[best] = view.size[step[best]]
    return spare


@helper()
def _urgency(view, jobs, surplus, i, k):  # type: ignore[no-untyped-def]
    """Urgency of a step up from option k of job i, and a second value for equal ones."""
    now, following = view.size[k], view.size[k + 1]
    if surplus == APPORTION:  # without a score: equal shares of what others cannot take
        return (jobs.work[i] / (now + following) if jobs.work[i] > 0.0 else -float(following)), 0.0
    if surplus == MARGINAL:
        saved = jobs.work[i] / jobs.pace[k] - jobs.work[i] / jobs.pace[k + 1]
        return jobs.scale[i] * saved / (following - now), 0.0
    worst = jobs.scale[i] * (jobs.elapsed[i] + jobs.work[i] / jobs.pace[k])
    return worst, -jobs.scale[i] * (jobs.elapsed[i] + jobs.work[i] / jobs.pace[k + 1])
