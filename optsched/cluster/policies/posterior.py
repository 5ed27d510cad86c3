"""When a job will be done: beliefs about log T from estimates, uncertainty curves and templates.

T is the number of passes of a job that ends at a target, else the work of one pass (its number of
passes is then known). Prior: lognormal around the user's estimate. A curve is
U(p) - U* = A (exp(-k p/T) - exp(-k)) with shape k and amplitude A >= 0 in closed form; beliefs
live on a grid of `POINTS` values of log T times `SHAPES`. Jobs of one template are pooled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.world.build import frozen
from optsched.kernels.compile import INT, INTS, READ, entry, helper, record, records

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.cluster.workload.workload import Workload
    from optsched.model.schedule import IntArray

POINTS: Final = 90
SHAPES: Final = (0.5, 1.0, 2.0, 3.0, 4.5, 6.5)
REACH: Final = 4.0
"""The grid reaches so many prior standard deviations to either side."""
NOISE: Final = 0.02
"""Believed noise of a reported uncertainty, as much as `NOISE_WEIGHT` reports tell."""
NOISE_WEIGHT: Final = 4.0
BETWEEN: Final = 0.02
"""Variance of log T between jobs of one template before any has ended (tau squared)."""
BETWEEN_WEIGHT: Final = 4.0
LEAST_VARIANCE: Final = 1e-6
"""Nothing is believed more firmly: the grid is no finer."""

CELLS: Final = POINTS * len(SHAPES)
_BASE: Final = 0
_POWER: Final = CELLS
_FF: Final = 2 * CELLS
_FY: Final = 3 * CELLS
_YY: Final = 4 * CELLS
_SEEN: Final = _YY + 1
_MISFIT: Final = _SEEN + 1
STATE: Final = _MISFIT + CELLS
"""Length of the state of one job's curve."""

_N: Final = len(SHAPES)
_K = np.array(SHAPES)
_END = np.exp(-_K)
_X = np.linspace(-REACH, REACH, POINTS)
_PRIOR = np.exp(-0.5 * _X**2)
_PRUNE: Final = 40.0  # cells below e^-40 of the best tell nothing

FLOAT: Final = types.float64
TABLE: Final = types.Array(FLOAT, 2, "C")

_INTEGERS: Final = ("row", "seen", "known", "kind", "aims", "per_pass", "passes")
_NUMBERS: Final = ("centre", "certain", "mean", "variance", "pooled", "target", "gap")
BELIEF: Final = np.dtype([(n, np.int64) for n in _INTEGERS] + [(n, np.float64) for n in _NUMBERS])
"""What is believed of a job.

`row`: of its curve, -1: none; `seen`: reports in it. `known`: 1 if T is certain (it has ended, or a
pass of known number was timed), then `certain`. `kind`: its pool, -1: by itself. `aims`: 1 if it
has a target. `per_pass`: work of a pass. `passes`: their number where it is known, else 0.
`centre`, `mean`, `variance`, `pooled`: log T by its estimate, by its curve, and by all of its kind.
`gap`: uncertainty before the first pass, above the target; NaN if unknown.
"""
POOL: Final = record("first members touched")
"""Members stand from `first` in `Beliefs.member`; `touched`: it is to be computed anew."""


class Beliefs(NamedTuple):
    """What is believed of every job of the workload."""

    state: npt.NDArray[np.float64]
    """Curves, one row for each job that has ended a pass and not all."""
    spare: IntArray
    """``spare[1:1 + spare[0]]``: unused rows."""
    job: npt.NDArray[np.void]
    """`BELIEF`."""
    pool: npt.NDArray[np.void]
    """`POOL`."""
    member: IntArray
    """By number of job."""
    observed_ptr: IntArray
    observed: npt.NDArray[np.float64]


BELIEFS: Final[Any] = types.NamedTuple(
    [TABLE, INTS, records(BELIEF), records(POOL), INTS, READ,
     types.Array(FLOAT, 1, "C", readonly=True)],
    Beliefs,
)  # fmt: skip


def beliefs(workload: Workload, sigma: float, pooling: bool, rows: int | None = None) -> Beliefs:
    """Before the first event; `rows`: how many curves are remembered at once (None: all)."""
    n, aims = len(workload), ~np.isnan(workload.target)
    kind = np.where((workload.template < 0) | (not pooling), -1, 2 * workload.template + aims)
    size = np.bincount(kind[kind >= 0])
    rows = int(aims.sum()) if rows is None else rows
    job, pools = np.zeros(n, BELIEF), np.zeros(len(size), POOL)
    units = np.where(aims, workload.pass_work, workload.passes)
    known = np.log(np.where(aims, workload.passes, workload.pass_work))
    for name, values in (
        ("row", -1), ("kind", kind), ("aims", aims), ("per_pass", workload.pass_work),
        ("passes", np.where(aims, 0, workload.passes)), ("variance", sigma**2), ("certain", known),
        ("target", workload.target), ("gap", workload.initial - workload.target),
    ):  # fmt: skip
        job[name] = values
    job["centre"] = job["mean"] = job["pooled"] = np.log(workload.estimate / units)
    pools["first"] = np.cumsum(size) - size
    return Beliefs(
        np.empty((max(rows, 1), STATE)), np.append(rows, np.arange(rows)[::-1]), job, pools,
        np.zeros(n, np.int64), frozen(workload.observed_ptr.astype(np.int64)),
        frozen(workload.observed.astype(np.float64)),
    )  # fmt: skip


@helper(INT, TABLE, INT, FLOAT, FLOAT, FLOAT, counted=False)
def _start(state, row, centre, sigma, gap):  # type: ignore[no-untyped-def]
    """An empty curve around log T = centre; gap: U_0 - U*, NaN if unknown."""
    for i in range(POINTS):
        passes = math.exp(centre + sigma * _X[i])
        for k in range(_N):
            cell = i * _N + k
            state[row, _BASE + cell] = math.exp(-_K[k] / passes)
            state[row, _POWER + cell] = 1.0
            state[row, _FF + cell] = 0.0
            state[row, _FY + cell] = 0.0
            if gap == gap:
                model = 1.0 - _END[k]
                state[row, _FF + cell] = model * model
                state[row, _FY + cell] = model * gap
    state[row, _YY] = gap * gap if gap == gap else 0.0
    state[row, _SEEN] = 1.0 if gap == gap else 0.0
    return row


@helper(INT, TABLE, INT, FLOAT, counted=False)
def _observe(state, row, gap):  # type: ignore[no-untyped-def]
    """One pass more; gap: U - U* after it."""
    for i in range(POINTS):
        for k in range(_N):
            cell = i * _N + k
            power = state[row, _POWER + cell] * state[row, _BASE + cell]
            state[row, _POWER + cell] = power
            model = power - _END[k]
            state[row, _FF + cell] += model * model
            state[row, _FY + cell] += model * gap
    state[row, _YY] += gap * gap
    state[row, _SEEN] += 1.0
    return row


@helper(FLOAT, TABLE, INT, INT, counted=False)
def _misfit(state, row, cell):  # type: ignore[no-untyped-def]
    """Sum of squared residuals at the best amplitude >= 0, and what is believed of the noise."""
    left = state[row, _YY]
    both = state[row, _FY + cell]
    if both > 0.0 and state[row, _FF + cell] > 0.0:
        left -= both * both / state[row, _FF + cell]
    return max(left, 0.0) + NOISE_WEIGHT * NOISE * NOISE


@helper(FLOAT, FLOAT, INT, counted=False)
def _root_power(base, halves):  # type: ignore[no-untyped-def]
    """Half-integer power, base ** (halves / 2): a third of the time of logarithms."""
    square = math.sqrt(base)
    found = 1.0
    while halves > 0:
        if halves & 1:
            found *= square
        square *= square
        halves >>= 1
    return found


@helper(INT, TABLE, records(BELIEF), INT, FLOAT, FLOAT, counted=False)
def _moments(state, beliefs, to, sigma, done):  # type: ignore[no-untyped-def]
    """Mean and variance of log T given prior, curve and T > done."""
    job = beliefs[to]
    row, centre = job.row, job.centre
    halves = int(state[row, _SEEN] + NOISE_WEIGHT - 1.0)
    best = math.inf
    for cell in range(CELLS):
        misfit = _misfit(state, row, cell)
        state[row, _MISFIT + cell] = misfit
        best = min(best, misfit)
    limit = best * math.exp(2.0 * _PRUNE / halves)
    least = math.log(done) - centre if done > 0.0 else -math.inf
    total = 0.0
    first = 0.0
    second = 0.0
    for i in range(POINTS):
        x = sigma * _X[i]
        if x <= least:
            continue
        likelihood = 0.0
        for k in range(_N):
            misfit = state[row, _MISFIT + i * _N + k]
            if misfit < limit:
                likelihood += _root_power(best / misfit, halves)
        weight = likelihood * _PRIOR[i]
        total += weight
        first += weight * x
        second += weight * x * x
    if total > 0.0:
        first /= total
        job.mean = centre + first
        job.variance = max(second / total - first * first, LEAST_VARIANCE)
    else:  # longer than anybody believed
        job.mean = math.log(done + 1.0) if done > 0.0 else centre
        job.variance = sigma * sigma
    return row


@entry(INT, BELIEFS, INT, INT, INT, FLOAT, counted=False)
def learn(b, j, passes, over, sigma):  # type: ignore[no-untyped-def]
    """A job has ended so many passes, or all of them (over = 1)."""
    job = b.job[j]
    if job.kind >= 0:
        b.pool[job.kind].touched = 1
    if over == 1 or job.aims == 0:
        job.mean, job.variance, job.known = job.certain, LEAST_VARIANCE, 1
        if over == 1 and job.row >= 0:
            b.spare[0] += 1
            b.spare[b.spare[0]] = job.row
            job.row = -1
    else:
        if job.row < 0:
            job.row = b.spare[b.spare[0]]
            b.spare[0] -= 1
            _start(b.state, job.row, job.centre, sigma, job.gap)
        for at in range(b.observed_ptr[j] + job.seen, b.observed_ptr[j] + passes):
            _observe(b.state, job.row, b.observed[at] - job.target)
        job.seen = passes
        _moments(b.state, b.job, j, sigma, float(passes))
    job.pooled = job.mean
    return 0


@entry(INT, BELIEFS, INT, counted=False)
def join(b, j):  # type: ignore[no-untyped-def]
    """A job has become visible for the first time: a member of its pool."""
    if b.job[j].kind < 0:
        return 0
    pool = b.pool[b.job[j].kind]
    at = pool.first + pool.members
    while at > pool.first and b.member[at - 1] > j:
        b.member[at] = b.member[at - 1]
        at -= 1
    b.member[at] = j
    pool.members += 1
    pool.touched = 1
    return 1


@entry(INT, BELIEFS, INT, counted=False)
def pool(b, k):  # type: ignore[no-untyped-def]
    """Pooled log T of the members of pool k.

    The others' precision-weighted mean is a second witness for each job, with the variance between
    jobs. Known ones have the variance `LEAST_VARIANCE`.
    """
    first, end = b.pool[k].first, b.pool[k].first + b.pool[k].members
    b.pool[k].touched = 0
    certain = 0
    centre = 0.0
    for at in range(first, end):
        job = b.job[b.member[at]]
        if job.known == 1:
            certain += 1
            centre += job.mean
    spread = BETWEEN_WEIGHT * BETWEEN
    precision = 0.0
    total = 0.0
    between = BETWEEN
    if certain > 0:
        total = centre
        centre /= certain
        for at in range(first, end):
            job = b.job[b.member[at]]
            if job.known == 1:
                spread += (job.mean - centre) ** 2
                job.pooled = job.mean
        between = spread / (BETWEEN_WEIGHT + certain - 1)
        own = 1.0 / (LEAST_VARIANCE + between)
        precision = certain * own
        total *= own
    for at in range(first, end):
        job = b.job[b.member[at]]
        if job.known == 0:
            job.pooled = 1.0 / (job.variance + between)
            precision += job.pooled
            total += job.pooled * job.mean
    for at in range(first, end):
        job = b.job[b.member[at]]
        if job.known == 0:
            own = job.pooled
            others = max(precision - own, 0.0)
            # precision-weighted: the job's own, and the others' with variance 1/others + between
            trust = job.variance / (1.0 + between * others)
            theirs = total - own * job.mean if end > first + 1 else 0.0
            job.pooled = (job.mean + trust * theirs) / (1.0 + trust * others)
    return end - first


@entry(FLOAT, BELIEFS, INT, INT, INT, counted=False)
def work_left(b, j, completed, done):  # type: ignore[no-untyped-def]
    """R = pass work * max(1/2, T - passes completed).

    Of a job of a single pass the work done counts: it completes none before its end.
    """
    job = b.job[j]
    value = math.exp(job.pooled)
    if job.aims == 1:
        return job.per_pass * max(0.5, value - completed)
    if job.passes == 1:
        return max(0.5 * value, value - done)
    return value * max(0.5, float(job.passes - completed))
