"""When a job will be done: beliefs about log T from estimates, uncertainty curves and templates.

T is the number of passes of a job that ends at a target, else the work of one pass (its number of
passes is then known). Prior: lognormal around the user's estimate. A curve is
U(p) - U* = A (exp(-k p/T) - exp(-k)) with shape k and amplitude A >= 0 in closed form; beliefs
live on a grid of `POINTS` values of log T times `SHAPES`. Jobs of one template are pooled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import types

from optsched.kernels.compile import INT, READ, entry, helper

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.cluster.workload.workload import Workload

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

VOID = types.void
FLOAT = types.float64
FLOATS = types.Array(types.float64, 1, "C")
GIVEN = types.Array(types.float64, 1, "C", readonly=True)
TABLE = types.Array(types.float64, 2, "C")


def logarithms(jobs: Workload) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Log T by job as believed at its start, and as known afterwards."""
    target = ~np.isnan(jobs.target)
    units = np.where(target, jobs.pass_work, jobs.passes)
    return np.log(jobs.believed / units), np.log(np.where(target, jobs.passes, jobs.pass_work))


@entry(VOID, TABLE, INT, FLOAT, FLOAT, FLOAT, counted=False)
def start(state, row, centre, sigma, gap):  # type: ignore[no-untyped-def]
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


@helper(VOID, TABLE, INT, FLOAT, counted=False)
def observe(state, row, gap):  # type: ignore[no-untyped-def]
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


@entry(VOID, TABLE, INT, FLOAT, FLOAT, FLOAT, FLOATS, FLOATS, INT, counted=False)
def moments(state, row, centre, sigma, done, mean, variance, to):  # type: ignore[no-untyped-def]
    """Mean and variance of log T given prior, curve and T > done, written at `to`."""
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
        mean[to] = centre + first
        variance[to] = max(second / total - first * first, LEAST_VARIANCE)
    else:  # longer than anybody believed
        mean[to] = math.log(done + 1.0) if done > 0.0 else centre
        variance[to] = sigma * sigma


@entry(VOID, READ, INT, INT, READ, GIVEN, GIVEN, FLOATS, counted=False)
def pool(members, first, end, known, mean, variance, pooled):  # type: ignore[no-untyped-def]
    """Pooled log T of the jobs ``members[first:end]`` of one template, written at their places.

    known: 1 if T is certain (the job has ended, or a pass of known number was timed). The others'
    precision-weighted mean is a second witness for each job, with the variance between jobs. Known
    ones have the variance `LEAST_VARIANCE`.
    """
    certain = 0
    centre = 0.0
    for at in range(first, end):
        if known[members[at]] == 1:
            certain += 1
            centre += mean[members[at]]
    spread = BETWEEN_WEIGHT * BETWEEN
    precision = 0.0
    total = 0.0
    between = BETWEEN
    if certain > 0:
        total = centre
        centre /= certain
        for at in range(first, end):
            if known[members[at]] == 1:
                spread += (mean[members[at]] - centre) ** 2
                pooled[members[at]] = mean[members[at]]
        between = spread / (BETWEEN_WEIGHT + certain - 1)
        own = 1.0 / (LEAST_VARIANCE + between)
        precision = certain * own
        total *= own
    for at in range(first, end):
        job = members[at]
        if known[job] == 0:
            own = 1.0 / (variance[job] + between)
            pooled[job] = own
            precision += own
            total += own * mean[job]
    for at in range(first, end):
        job = members[at]
        if known[job] == 0:
            own = pooled[job]
            others = max(precision - own, 0.0)
            # precision-weighted: the job's own, and the others' with variance 1/others + between
            trust = variance[job] / (1.0 + between * others)
            theirs = total - own * mean[job] if end > first + 1 else 0.0
            pooled[job] = (mean[job] + trust * theirs) / (1.0 + trust * others)


@entry(FLOAT, FLOAT, INT, INT, INT, INT, INT, counted=False)
def work_left(pooled, target, per_pass, passes, completed, done):  # type: ignore[no-untyped-def]
    """R = pass work * max(1/2, T - passes completed).

    Of a job of a single pass the work done counts: it completes none before its end.
    """
    value = math.exp(pooled)
    if target == 1:
        return per_pass * max(0.5, value - completed)
    if passes == 1:
        return max(0.5 * value, value - done)
    return value * max(0.5, float(passes - completed))


@entry(VOID, TABLE, INT, GIVEN, INT, INT, FLOAT, counted=False)
def replay(state, row, observed, first, end, target):  # type: ignore[no-untyped-def]
    """All passes ``observed[first:end]`` (uncertainty after each)."""
    for at in range(first, end):
        observe(state, row, observed[at] - target)
