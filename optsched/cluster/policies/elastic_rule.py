"""Who runs and on how many GPUs, for jobs in a given order: the kernel of the elastic policies.

Every job is an index into the columns, so that the same code serves a policy's view (positions)
and a compiled simulation (numbers of jobs). Three steps: admission (one minimum gang each, over
all GPUs), realisation (jobs in the middle of a pass keep their size, and whoever is displaced goes
on until its GPUs are really used), surplus (GPUs that would idle go round, or to the largest gain).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray

    FloatArray = npt.NDArray[np.float64]

FLOATS: Final = types.Array(types.float64, 1, "C")
GIVEN: Final = types.Array(types.float64, 1, "C", readonly=True)


class Columns(NamedTuple):
    """One value per job: of a whole workload by number, or of a view by position."""

    count: IntArray  # type: ignore[assignment]  # tuple.count
    """Number of active jobs, the length of `order` in use; GPUs for all but `PINNED` jobs; changes
    of nodes that have been seen, -1 before the first look."""
    order: IntArray
    """Active jobs by key, then running before pending, then by number."""
    key: FloatArray
    held: IntArray
    fixed: IntArray
    preemptible: IntArray
    size_ptr: IntArray
    size: IntArray
    rate: IntArray
    remaining: FloatArray
    weight: FloatArray
    restart: IntArray
    """Restart cost of a job."""
    cost: IntArray
    """Restart cost of its next start: 0 before the first."""
    final: IntArray
    """Passes completed from which on a job is in its last one, as is believed."""
    taken: IntArray
    step: IntArray
    quota: IntArray


COLUMNS: Final[Any] = types.NamedTuple(
    [INTS, INTS, FLOATS, INTS, INTS, READ, READ, READ, READ, FLOATS, GIVEN, READ, INTS, READ,
     INTS, INTS, INTS],
    Columns,
)  # fmt: skip


def columns_of(jobs: int, active: int, budget: int, **given: Any) -> Columns:
    """Columns of so many jobs, copies of what is given; the others are zero."""
    made: dict[str, Any] = {"count": np.array([active, budget, -1], np.int64)}
    for name, kind in zip(Columns._fields[1:], COLUMNS.types[1:], strict=True):
        dtype = np.int64 if kind.dtype == INT else np.float64
        made[name] = np.array(given[name], dtype) if name in given else np.zeros(jobs, dtype)
        made[name].setflags(write=kind.mutable)
    return Columns(**made)


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


@helper(INT, COLUMNS, INT, counted=False)
def _may_go(c, job):  # type: ignore[no-untyped-def]
    """1 if a job runs, has not been displaced yet, and may be."""
    if c.held[job] > 0 and c.taken[job] == 1 and c.preemptible[job] == 1 and c.fixed[job] != PINNED:
        return 1
    return 0


@helper(INT, COLUMNS, INT, counted=False)
def _least(c, job):  # type: ignore[no-untyped-def]
    """GPUs that a job needs until it ends: its smallest size, or what it cannot give back."""
    if c.held[job] > 0 and c.fixed[job] == LAST:
        return c.held[job]
    return c.size[c.size_ptr[job]]


@helper(INT, COLUMNS, INT, INT, counted=False)
def pays(c, job, victim):  # type: ignore[no-untyped-def]
    """1 if a job gains more than both restart costs by going before a running one."""
    own = c.weight[victim] * (c.remaining[job] / c.rate[c.size_ptr[job]])
    its = c.weight[job] * (c.remaining[victim] / c.rate[c.size_ptr[victim]])
    both = c.weight[victim] * c.cost[victim] + c.weight[victim] * c.cost[job]
    return 1 if its - own - both > _NOISE * its else 0


@helper(INT, COLUMNS, INT, counted=False)
def _admit(c, preempt):  # type: ignore[no-untyped-def]
    """Mark (taken = 1) the jobs that shall run; their least GPUs fit the budget together."""
    left = c.count[1]
    for at in range(c.count[0]):
        job = c.order[at]
        c.taken[job] = 0
        if c.fixed[job] == PINNED and c.held[job] > 0:
            c.taken[job] = 1
        elif c.held[job] > 0 and (preempt != BY_ORDER or c.preemptible[job] == 0):
            c.taken[job] = 1
            left -= _least(c, job)
    last = c.count[0] - 1
    displace = preempt == BY_GAIN
    for at in range(c.count[0]):
        if left == 0 and not displace:
            break
        job = c.order[at]
        if c.taken[job] == 1 or (c.held[job] > 0 and preempt != BY_ORDER):
            continue
        if c.size_ptr[job] == c.size_ptr[job + 1]:
            continue
        gang = _least(c, job)
        if gang <= left:
            c.taken[job] = 1
            left -= gang
        elif displace:
            freed = left
            back = last  # from the last running job upwards, as long as each gives way with a gain
            while displace and back > at and freed < gang:
                victim = c.order[back]
                if _may_go(c, victim) == 1:
                    if pays(c, job, victim) == 1:
                        freed += _least(c, victim)
                    else:
                        displace = False  # whoever comes later gains less
                back -= 1
            if freed < gang:
                displace = False
                continue
            c.taken[job] = 1
            left = freed - gang
            for between in range(back + 1, last + 1):
                victim = c.order[between]
                if _may_go(c, victim) == 1:
                    least = _least(c, victim)
                    if least <= left:  # a larger one that stood before it is enough
                        left -= least
                        back = max(back, between)
                    else:
                        c.taken[victim] = 0
            last = back
    return left


@helper(INT, COLUMNS, INT, counted=False)
def _go_round(c, spare):  # type: ignore[no-untyped-def]
    """One step up for each in order, again and again."""
    moved = True
    while moved and spare > 0:
        moved = False
        for at in range(c.count[0]):
            job = c.order[at]
            if c.quota[job] > 0 and c.fixed[job] == FREE and c.step[job] + 1 < c.size_ptr[job + 1]:
                more = c.size[c.step[job] + 1] - c.size[c.step[job]]
                if more <= spare:
                    c.step[job] += 1
                    c.quota[job] += more
                    spare -= more
                    moved = True
                    if spare == 0:
                        break
    return spare


@helper(INT, COLUMNS, INT, INT, counted=False)
def _beats(c, job, other):  # type: ignore[no-untyped-def]
    """1 if the next step rather goes to `job` than to `other`, which stands before it.

    a ends earlier as they are; b is preferred iff its gain over its *later* speed exceeds the gain
    of a over its *present* speed.
    """
    own, its = c.rate[c.step[job]], c.rate[c.step[other]]
    own_next, its_next = c.rate[c.step[job] + 1], c.rate[c.step[other] + 1]
    if c.remaining[job] / own < c.remaining[other] / its:
        return 0 if (its_next - its) / its_next > (own_next - own) / own else 1
    return 1 if (own_next - own) / own_next > (its_next - its) / its else 0


@helper(INT, COLUMNS, INT, INT, counted=False)
def _by_gain(c, rule, spare):  # type: ignore[no-untyped-def]
    """Each step to the largest gain; ties to the first in order."""
    while spare > 0:
        best = -1
        most = 0.0
        for at in range(c.count[0]):
            job = c.order[at]
            if c.quota[job] > 0 and c.fixed[job] == FREE and c.step[job] + 1 < c.size_ptr[job + 1]:
                now = c.size[c.step[job]]
                then = c.size[c.step[job] + 1]
                if then - now <= spare:
                    if rule == PAIRWISE:
                        if c.rate[c.step[job] + 1] > c.rate[c.step[job]] and (
                            best < 0 or _beats(c, job, best) == 1
                        ):
                            best = job
                        continue
                    if rule == MARGINAL:
                        saved = c.remaining[job] / c.rate[c.step[job]]
                        saved -= c.remaining[job] / c.rate[c.step[job] + 1]
                        gain = c.weight[job] * saved / (then - now)
                    elif c.remaining[job] > 0.0:
                        gain = c.remaining[job] / (now + then)
                    else:  # who has no score shares equally, when all others have their most
                        gain = -float(then)
                    if best < 0 or gain > most:
                        most = gain
                        best = job
        if best < 0 or (rule == MARGINAL and most <= 0.0):
            break
        more = c.size[c.step[best] + 1] - c.size[c.step[best]]
        c.step[best] += 1
        c.quota[best] += more
        spare -= more
    return spare


@entry(INT, COLUMNS, INT, INT, counted=False)
def share(c, preempt, surplus):  # type: ignore[no-untyped-def]
    """Quotas of the jobs in order; returns the GPUs left over."""
    _admit(c, preempt)
    left = c.count[1]
    for at in range(c.count[0]):
        job = c.order[at]
        c.quota[job] = 0
        c.step[job] = c.size_ptr[job]
        if c.taken[job] == 1 and c.held[job] > 0:
            c.quota[job] = c.held[job] if c.fixed[job] != FREE else c.size[c.step[job]]
            if c.fixed[job] != PINNED:
                left -= c.quota[job]
    waiting = 0
    for at in range(c.count[0]):
        job = c.order[at]
        if c.taken[job] == 1 and c.held[job] == 0:
            if c.size[c.step[job]] <= left:
                c.quota[job] = c.size[c.step[job]]
                left -= c.quota[job]
            else:
                waiting += c.size[c.step[job]]
        elif c.taken[job] == 0 and c.held[job] > 0:  # goes on while nobody starts in its place
            if c.fixed[job] != FREE:
                c.quota[job] = c.held[job] if c.held[job] <= left else 0
            elif c.size[c.step[job]] <= left:
                most = min(c.held[job], left)
                while c.step[job] + 1 < c.size_ptr[job + 1] and c.size[c.step[job] + 1] <= most:
                    c.step[job] += 1
                c.quota[job] = c.size[c.step[job]]
            left -= c.quota[job]
    spare = left - waiting  # those who wait for the end of somebody's pass come first
    if spare > 0 and surplus == ROUND:
        _go_round(c, spare)
    elif spare > 0:
        _by_gain(c, surplus, spare)
    return left
