"""Gangs of elastic jobs in an order, then the GPUs that are left: the rule of all elastic policies.

Plain functions of arrays, which numba takes too. Three steps: admission (one smallest gang for
every job, counted over all GPUs), realisation (jobs within a pass keep their size, and a displaced
job goes on until its GPUs are used), surplus (GPUs that would idle).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.cluster.world.build import is_limited
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings

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
"""In proportion to `Gangs.work`, by the divisor method of Webster (bounded apportionment)."""
WORST: Final = 4
"""Each step to the job with the largest scale * (elapsed + work / pace), of equals to the one that
falls lowest. It has to get that step in every allocation whose largest value is smaller, so the
largest value is the smallest possible one whatever the sizes."""

# how free the size of a job is
FREE: Final = 0
HOLDS: Final = 1
"""Within a pass: it keeps its size, or loses all."""
LAST: Final = 2
"""Likewise, until it ends."""
PINNED: Final = 3
"""It stays as it is, and its GPUs are not in the budget: they are on a node that is drained."""


class Gangs(NamedTuple):
    """Jobs as the rule takes them, by position in the view, and arrays that it fills."""

    order: Any
    """Positions of the jobs that take part, the most important first."""
    work: Any
    """Remaining work, or a score."""
    scale: Any
    elapsed: Any
    cost: Any
    """Restart cost of the next start."""
    pace: Any
    """Speed, or another rising number, at each of ``size``."""
    gpus: Any
    size_ptr: Any
    size: Any
    preemptible: Any
    fixed: Any
    """`FREE`, `HOLDS`, `LAST` or `PINNED`."""
    quota: Any
    step: Any
    """Index of the quota in ``size``."""
    admitted: Any
    some: Any
    """Some positions of the order."""


class Sizing(NamedTuple):
    """When sizes of running jobs may change in a simulation."""

    by_pass: Any
    """At the ends of passes only."""
    last_pass: Any
    """Passes of every job of the workload; before a target those of its (estimated) work."""
    keeps: Any
    """Never, if the job is not preemptible: with several types of GPUs, or limited CPUs or memory,
    another size may fit nowhere once the job has left its GPUs."""


def sizing(workload: Workload, nodes: Nodes, settings: Settings, clairvoyant: bool) -> Sizing:
    """Sizes change within a pass only if neither the settings nor a lost pass forbid it."""
    work = workload.work if clairvoyant else workload.estimate
    aims = ~np.isnan(workload.target)
    passes = np.where(aims, -(-work // workload.pass_work), workload.passes)
    by_pass = settings.resize == "pass" or settings.checkpoint == "pass"
    several = len(set(nodes.types)) > 1
    demands = workload.cpus_per_gpu.any() or workload.memory_per_gpu_gb.any()
    keeps = is_limited(workload, nodes) and bool(several or demands)
    return Sizing(by_pass, passes.astype(np.int64), keeps)


@helper()
def integers(n):  # type: ignore[no-untyped-def]
    """Zeros; every array that NumPy makes costs time to compile."""
    return np.zeros(n, np.int64)


@helper()
def floats(n):  # type: ignore[no-untyped-def]
    """Zeros."""
    return np.zeros(n)


@helper(counted=False)
def total(values):  # type: ignore[no-untyped-def]
    """Sum of integers."""
    found = 0
    for i in range(len(values)):
        found += values[i]
    return found


@helper()
def positions(n):  # type: ignore[no-untyped-def]
    """0 to n - 1."""
    order = integers(n)
    for i in range(n):
        order[i] = i
    return order


@helper()
def by_key(order, key):  # type: ignore[no-untyped-def]
    """Sort positions in place by key, equal keys as they were."""
    _merge_sort(order, key, integers(len(order)))
    return order


@helper(counted=False)
def _merge_sort(order, key, merged):  # type: ignore[no-untyped-def]
    n, width = len(order), 1
    while width < n:
        for first in range(0, n, 2 * width):
            left, right = first, min(first + width, n)
            middle, end = right, min(first + 2 * width, n)
            if right == end or key[order[right - 1]] <= key[order[right]]:
                continue
            for k in range(first, end):
                if right == end or (left < middle and key[order[left]] <= key[order[right]]):
                    merged[k] = order[left]
                    left += 1
                else:
                    merged[k] = order[right]
                    right += 1
            for k in range(first, end):
                order[k] = merged[k]
        width *= 2
    return 0


@helper()
def in_order(view, key):  # type: ignore[no-untyped-def]
    """Positions by ascending key; of equal keys the running jobs first, then by arrival."""
    order, at = integers(len(key)), 0
    for pending in range(2):
        for i in range(len(key)):
            if (view.gpus[i] == 0) == (pending == 1):
                order[at] = i
                at += 1
    return by_key(order, key)


@helper()
def fixed_sizes(view, sizing):  # type: ignore[no-untyped-def]
    """How free the size of every job is."""
    fixed = integers(len(view.gpus))
    for i in range(len(fixed)):
        if view.gpus[i] == 0:
            continue
        if len(view.draining) > 0 and view.draining[i]:
            fixed[i] = PINNED
        elif sizing.keeps and not view.preemptible[i]:
            fixed[i] = LAST
        elif sizing.by_pass and not view.at_pass_end[i]:
            last = view.passes[i] + 1 >= sizing.last_pass[view.job[i]]
            fixed[i] = LAST if last else HOLDS
    return fixed


@helper()
def gangs(view, sizing, order, work, scale, elapsed, cost, pace):  # type: ignore[no-untyped-def]
    """Jobs of an order as `share` takes them."""
    n = len(view.gpus)
    return Gangs(
        order, work, scale, elapsed, cost, pace, view.gpus, view.size_ptr, view.size,
        view.preemptible, fixed_sizes(view, sizing), view.gpus.copy(), integers(n), integers(n),
        integers(n),
    )  # fmt: skip


@helper(counted=False)
def _least(jobs, i):  # type: ignore[no-untyped-def]
    """GPUs that a job needs until it ends: its smallest size, or what it cannot give back."""
    return jobs.gpus[i] if jobs.fixed[i] == LAST else jobs.size[jobs.size_ptr[i]]


@helper(counted=False)
def _pays(jobs, i, victim):  # type: ignore[no-untyped-def]
    """Whether job i gains more than both restart costs by going before a running one."""
    loses = jobs.scale[victim] * (jobs.work[i] / jobs.pace[jobs.size_ptr[i]])
    gains = jobs.scale[i] * (jobs.work[victim] / jobs.pace[jobs.size_ptr[victim]])
    costs = jobs.scale[victim] * jobs.cost[victim] + jobs.scale[victim] * jobs.cost[i]
    return gains - loses - costs > _NOISE * gains


@helper(counted=False)
def _may_go(jobs, i):  # type: ignore[no-untyped-def]
    """Whether a job runs, has not been displaced yet, and may be."""
    return (
        jobs.gpus[i] > 0
        and jobs.admitted[i] == 1
        and jobs.preemptible[i]
        and jobs.fixed[i] != PINNED
    )


@helper(counted=False)
def _displace(jobs, at, last, missing):  # type: ignore[no-untyped-def]
    """Take out running jobs of the order, from place `last` upwards, for the job at place `at`.

    Returns the next place to take from and the GPUs that are more than `missing`; -1 and nothing
    is changed where some job does not give way with a gain (later jobs gain less).
    """
    freed, back = 0, last
    while back > at and freed < missing:
        victim = jobs.order[back]
        back -= 1
        if _may_go(jobs, victim):
            if not _pays(jobs, jobs.order[at], victim):
                return -1, 0
            freed += _least(jobs, victim)
    if freed < missing:
        return -1, 0
    left, following = freed - missing, back
    for place in range(back + 1, last + 1):
        victim = jobs.order[place]
        if _may_go(jobs, victim):
            need = _least(jobs, victim)
            jobs.admitted[victim] = 0  # where a larger one that stood before it is enough
            if need <= left:
                jobs.admitted[victim] = 1
                left, following = left - need, place
    return following, left


@helper(counted=False)
def _admit(jobs, preempt, left):  # type: ignore[no-untyped-def]
    """Note which jobs shall run: their least GPUs fit `left` together."""
    n = len(jobs.order)
    for at in range(n):
        i = jobs.order[at]
        pinned = jobs.fixed[i] == PINNED
        if jobs.gpus[i] > 0 and (pinned or preempt != BY_ORDER or not jobs.preemptible[i]):
            jobs.admitted[i] = 1
            left -= 0 if pinned else _least(jobs, i)
    last = n - 1 if preempt == BY_GAIN else -1
    for at in range(n):
        i = jobs.order[at]
        if left == 0 and last < 0:
            break
        runs = jobs.admitted[i] == 1 or (jobs.gpus[i] > 0 and preempt != BY_ORDER)
        if runs or jobs.size_ptr[i] == jobs.size_ptr[i + 1]:
            continue
        gang = _least(jobs, i)
        if gang <= left:
            jobs.admitted[i] = 1
            left -= gang
        elif last >= 0:
            last, spare = _displace(jobs, at, last, gang - left)
            if last >= 0:
                jobs.admitted[i] = 1
                left = spare
    return left


@helper(counted=False)
def share(jobs, left, preempt, surplus):  # type: ignore[no-untyped-def]
    """Set `Gangs.quota` of the jobs of the order, from free GPUs and their own.

    Returns how many are left over and may be given to the jobs that run.
    """
    n, changes = len(jobs.order), left > 0 or preempt != NEVER
    for at in range(n):
        i = jobs.order[at]
        jobs.quota[i], jobs.step[i] = jobs.gpus[i], jobs.size_ptr[i]
        if jobs.fixed[i] != PINNED:
            left += jobs.gpus[i]
        if jobs.gpus[i] > 0 and jobs.fixed[i] == FREE and not changes:
            changes = jobs.gpus[i] > jobs.size[jobs.step[i]]
    if not changes:
        return 0
    _admit(jobs, preempt, left)
    for at in range(n):
        i = jobs.order[at]
        if jobs.admitted[i] == 1 and jobs.gpus[i] > 0:
            if jobs.fixed[i] == FREE:
                jobs.quota[i] = jobs.size[jobs.step[i]]
            left -= 0 if jobs.fixed[i] == PINNED else jobs.quota[i]
    reserved = 0
    for at in range(n):
        i = jobs.order[at]
        held = jobs.gpus[i]
        if (jobs.admitted[i] == 1) == (held > 0):
            continue
        if held == 0:
            need = jobs.size[jobs.step[i]]
            if need > left:  # until another job ends its pass
                reserved += need
                continue
            jobs.quota[i] = need
        else:  # it goes on while no job starts in its place
            jobs.quota[i] = held if jobs.fixed[i] != FREE and held <= left else 0
            for k in range(jobs.size_ptr[i], jobs.size_ptr[i + 1]):
                if jobs.fixed[i] == FREE and jobs.size[k] <= min(held, left):
                    jobs.step[i], jobs.quota[i] = k, jobs.size[k]
        left -= jobs.quota[i]
    return _hand_out(jobs, surplus, max(left - reserved, 0))


@helper(counted=False)
def _hand_out(jobs, surplus, spare):  # type: ignore[no-untyped-def]
    """Give each step up to the job where it is most urgent; returns what is left."""
    count = 0
    for at in range(len(jobs.order)):
        i = jobs.order[at]
        if jobs.quota[i] > 0 and jobs.fixed[i] == FREE:
            jobs.some[count], jobs.admitted[i] = i, 0  # from now on the number of its steps
            count += 1
    while spare > 0 and surplus != IDLE:
        best, most, second, kept = -1, 0.0, 0.0, 0
        for at in range(count):
            i = jobs.some[at]
            k = jobs.step[i]
            if k + 1 == jobs.size_ptr[i + 1] or jobs.size[k + 1] - jobs.size[k] > spare:
                continue  # nor will it fit later
            jobs.some[kept] = i
            kept += 1
            first, after = _urgency(jobs, surplus, i, k)
            if best < 0 or first > most or (first == most and after > second):
                best, most, second = i, first, after
        count = kept
        if best < 0 or (surplus == MARGINAL and most <= 0.0):
            break
        jobs.step[best] += 1
        jobs.admitted[best] += 1
        following = jobs.size[jobs.step[best]]
        spare -= following - jobs.quota[best]
        jobs.quota[best] = following
    return spare


@helper(counted=False)
def _urgency(jobs, surplus, i, k):  # type: ignore[no-untyped-def]
    """Urgency of a step up from option k of job i, and a second value for equal ones."""
    now, following = float(jobs.size[k]), float(jobs.size[k + 1])
    if surplus == ROUND:
        return -float(jobs.admitted[i]), 0.0
    if surplus == APPORTION:  # without a score: equal shares of what others cannot take
        return (jobs.work[i] / (now + following) if jobs.work[i] > 0.0 else -following), 0.0
    before, after = jobs.work[i] / jobs.pace[k], jobs.work[i] / jobs.pace[k + 1]
    if surplus == MARGINAL:
        return jobs.scale[i] * (before - after) / (following - now), 0.0
    return jobs.scale[i] * (jobs.elapsed[i] + before), -jobs.scale[i] * (jobs.elapsed[i] + after)


@helper(counted=False)
def placed(jobs):  # type: ignore[no-untyped-def]
    """Put the jobs that start or change their size into `Gangs.some`, in the order; how many."""
    count = 0
    for at in range(len(jobs.order)):
        i = jobs.order[at]
        if jobs.quota[i] > 0 and jobs.quota[i] != jobs.gpus[i]:
            jobs.some[count] = i
            count += 1
    return count
