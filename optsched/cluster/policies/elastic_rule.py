"""Who runs and on how many GPUs, for jobs in a given order: the kernel of the elastic policies.

Every job is an index into the columns, so that the same code serves a policy's view (positions)
and a compiled simulation (numbers of jobs). Three steps: admission (one minimum gang each, over
all GPUs), realisation (jobs in the middle of a pass keep their size, and whoever is displaced goes
on until its GPUs are really used), surplus (GPUs that would idle go round, or to the largest gain).
"""

from __future__ import annotations

from typing import Final

from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry, helper

FLOATS = types.Array(types.float64, 1, "C", readonly=True)

# when a running job loses its GPUs
NEVER: Final = 0
BY_ORDER: Final = 1
"""Whoever comes first in the order runs."""
BY_GAIN: Final = 2
"""Only where the gain exceeds both restart costs."""
_NOISE: Final = 1e-9
"""A gain of less than this share of the time it is taken from is rounding."""

# what becomes of GPUs that would idle
ROUND: Final = 0
"""One step up for each in order, again and again."""
MARGINAL: Final = 1
"""Each step to the largest saving of weighted time per GPU."""
APPORTION: Final = 2
"""In proportion to scores (eq. 31), by the divisor method of Webster, which never takes a GPU from
a job because there are more; scores stand in the column `remaining`."""
PAIRWISE: Final = 3
"""To the winner of comparisons in the sense of AFS-L (Hwang et al., NSDI 2021)."""

# how free a job's size is
FREE: Final = 0
HOLDS: Final = 1
"""In the middle of a pass: it keeps its size, or loses all."""
PINNED: Final = 2
"""It stays as it is, and its GPUs are not in the budget (they are on a node that is drained)."""
LAST: Final = 3
"""As `HOLDS`, in what is believed to be its last pass: it holds its GPUs until it ends."""

_VIEW = (READ, READ, READ, READ, READ, READ, READ, FLOATS, FLOATS, READ)
"""held, fixed, preemptible, size_ptr, size, rate, order; remaining, weight; restart cost."""


@helper(INT, READ, READ, READ, INTS, INT, counted=False)
def _may_go(held, fixed, preemptible, taken, job):  # type: ignore[no-untyped-def]
    """1 if a job runs, has not been displaced yet, and may be."""
    if held[job] > 0 and taken[job] == 1 and preemptible[job] == 1 and fixed[job] != PINNED:
        return 1
    return 0


@helper(INT, READ, READ, READ, READ, INT, counted=False)
def _least(held, fixed, size_ptr, size, job):  # type: ignore[no-untyped-def]
    """GPUs that a job needs until it ends: its smallest size, or what it cannot give back."""
    if held[job] > 0 and fixed[job] == LAST:
        return held[job]
    return size[size_ptr[job]]


@helper(INT, READ, READ, FLOATS, FLOATS, READ, INT, INT, counted=False)
def pays(size_ptr, rate, remaining, weight, cost, job, victim):  # type: ignore[no-untyped-def]
    """1 if a job gains more than both restart costs by going before a running one."""
    own = weight[victim] * (remaining[job] / rate[size_ptr[job]])
    its = weight[job] * (remaining[victim] / rate[size_ptr[victim]])
    both = weight[victim] * cost[victim] + weight[victim] * cost[job]
    return 1 if its - own - both > _NOISE * its else 0


@helper(INT, *_VIEW, INT, INT, INT, INTS, counted=False)
def _admit(held, fixed, preemptible, size_ptr, size, rate, order, remaining, weight, cost,  # type: ignore[no-untyped-def]
           n, budget, preempt, taken):  # fmt: skip
    """Mark (taken = 1) the jobs that shall run; their least GPUs fit the budget together."""
    left = budget
    for at in range(n):
        job = order[at]
        taken[job] = 0
        if fixed[job] == PINNED and held[job] > 0:
            taken[job] = 1
        elif held[job] > 0 and (preempt != BY_ORDER or preemptible[job] == 0):
            taken[job] = 1
            left -= _least(held, fixed, size_ptr, size, job)
    last = n - 1
    displace = preempt == BY_GAIN
    for at in range(n):
        if left == 0 and not displace:
            break
        job = order[at]
        if taken[job] == 1 or (held[job] > 0 and preempt != BY_ORDER):
            continue
        if size_ptr[job] == size_ptr[job + 1]:
            continue
        gang = _least(held, fixed, size_ptr, size, job)
        if gang <= left:
            taken[job] = 1
            left -= gang
        elif displace:
            freed = left
            back = last  # from the last running job upwards, as long as each gives way with a gain
            while displace and back > at and freed < gang:
                victim = order[back]
                if _may_go(held, fixed, preemptible, taken, victim) == 1:
                    if pays(size_ptr, rate, remaining, weight, cost, job, victim) == 1:
                        freed += _least(held, fixed, size_ptr, size, victim)
                    else:
                        displace = False  # whoever comes later gains less
                back -= 1
            if freed < gang:
                displace = False
                continue
            taken[job] = 1
            left = freed - gang
            for between in range(back + 1, last + 1):
                victim = order[between]
                if _may_go(held, fixed, preemptible, taken, victim) == 1:
                    least = _least(held, fixed, size_ptr, size, victim)
                    if least <= left:  # a larger one that stood before it is enough
                        left -= least
                        back = max(back, between)
                    else:
                        taken[victim] = 0
            last = back
    return left


@helper(INT, READ, INT, READ, READ, READ, INT, INTS, INTS, counted=False)
def _go_round(order, n, fixed, size_ptr, size, spare, step, quota):  # type: ignore[no-untyped-def]
    """One step up for each in order, again and again."""
    moved = True
    while moved and spare > 0:
        moved = False
        for at in range(n):
            job = order[at]
            if quota[job] > 0 and fixed[job] == FREE and step[job] + 1 < size_ptr[job + 1]:
                more = size[step[job] + 1] - size[step[job]]
                if more <= spare:
                    step[job] += 1
                    quota[job] += more
                    spare -= more
                    moved = True
                    if spare == 0:
                        break
    return spare


@helper(INT, READ, FLOATS, INTS, INT, INT, counted=False)
def _beats(rate, remaining, step, job, other):  # type: ignore[no-untyped-def]
    """1 if the next step rather goes to `job` than to `other`, which stands before it.

    a ends earlier as they are; b is preferred iff its gain over its *later* speed exceeds the gain
    of a over its *present* speed.
    """
    own, its = rate[step[job]], rate[step[other]]
    own_next, its_next = rate[step[job] + 1], rate[step[other] + 1]
    if remaining[job] / own < remaining[other] / its:
        return 0 if (its_next - its) / its_next > (own_next - own) / own else 1
    return 1 if (own_next - own) / own_next > (its_next - its) / its else 0


@helper(INT, READ, INT, READ, READ, READ, READ, FLOATS, FLOATS, INT, INT, INTS, INTS, counted=False)
def _by_gain(order, n, fixed, size_ptr, size, rate, remaining, weight, rule, spare, step, quota):  # type: ignore[no-untyped-def]
    """Each step to the largest gain; ties to the first in order."""
    while spare > 0:
        best = -1
        most = 0.0
        for at in range(n):
            job = order[at]
            if quota[job] > 0 and fixed[job] == FREE and step[job] + 1 < size_ptr[job + 1]:
                now = size[step[job]]
                then = size[step[job] + 1]
                if then - now <= spare:
                    if rule == PAIRWISE:
                        if rate[step[job] + 1] > rate[step[job]] and (
                            best < 0 or _beats(rate, remaining, step, job, best) == 1
                        ):
                            best = job
                        continue
                    if rule == MARGINAL:
                        saved = remaining[job] / rate[step[job]]
                        saved -= remaining[job] / rate[step[job] + 1]
                        gain = weight[job] * saved / (then - now)
                    elif remaining[job] > 0.0:
                        gain = remaining[job] / (now + then)
                    else:  # who has no score shares equally, when all others have their most
                        gain = -float(then)
                    if best < 0 or gain > most:
                        most = gain
                        best = job
        if best < 0 or (rule == MARGINAL and most <= 0.0):
            break
        more = size[step[best] + 1] - size[step[best]]
        step[best] += 1
        quota[best] += more
        spare -= more
    return spare


@entry(INT, *_VIEW, INT, INT, INT, INT, INTS, INTS, INTS, counted=False)
def share(held, fixed, preemptible, size_ptr, size, rate, order, remaining, weight, cost,  # type: ignore[no-untyped-def]
          n, budget, preempt, surplus, taken, step, quota):  # fmt: skip
    """Quotas of the jobs ``order[:n]``; returns the GPUs left over.

    held: GPUs now (0 pending); fixed: FREE, HOLDS, LAST or PINNED; budget: all GPUs except those of
    pinned jobs; remaining: work; cost: restart cost at the next start. taken, step: scratch.
    """
    _admit(held, fixed, preemptible, size_ptr, size, rate, order, remaining, weight, cost,
           n, budget, preempt, taken)  # fmt: skip
    left = budget
    for at in range(n):
        job = order[at]
        quota[job] = 0
        step[job] = size_ptr[job]
        if taken[job] == 1 and held[job] > 0:
            quota[job] = held[job] if fixed[job] != FREE else size[step[job]]
            if fixed[job] != PINNED:
                left -= quota[job]
    waiting = 0
    for at in range(n):
        job = order[at]
        if taken[job] == 1 and held[job] == 0:
            if size[step[job]] <= left:
                quota[job] = size[step[job]]
                left -= quota[job]
            else:
                waiting += size[step[job]]
        elif taken[job] == 0 and held[job] > 0:  # goes on while nobody starts in its place
            if fixed[job] != FREE:
                quota[job] = held[job] if held[job] <= left else 0
            elif size[step[job]] <= left:
                most = min(held[job], left)
                while step[job] + 1 < size_ptr[job + 1] and size[step[job] + 1] <= most:
                    step[job] += 1
                quota[job] = size[step[job]]
            left -= quota[job]
    spare = left - waiting  # those who wait for the end of somebody's pass come first
    if spare > 0 and surplus == ROUND:
        _go_round(order, n, fixed, size_ptr, size, spare, step, quota)
    elif spare > 0:
        _by_gain(order, n, fixed, size_ptr, size, rate, remaining, weight, surplus, spare, step,
                 quota)  # fmt: skip
    return left
