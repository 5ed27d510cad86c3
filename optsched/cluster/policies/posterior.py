"""Posterior of the passes of a job: from its estimate, its uncertainty curve and its template.

T is the number of passes of a job that ends at a target, else the work of one pass (its number of
passes is then known). Prior: lognormal around the user's estimate. A curve is
U(p) - U* = A (exp(-k p/T) - exp(-k)) with shape k and amplitude A >= 0 in closed form, on a grid of
`POINTS` values of log T times `SHAPES`. Jobs of one template are pooled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.world.layout import frozen
from optsched.kernels.compile import INT, entry, helper

if TYPE_CHECKING:
    from optsched.cluster.workload.workload import Workload

POINTS: Final = 90
SHAPES: Final = (0.5, 1.0, 2.0, 3.0, 4.5, 6.5)
REACH: Final = 4.0
"""The grid reaches so many prior standard deviations to either side."""
NOISE: Final = 0.02
"""Prior noise of a reported uncertainty, with the weight of `NOISE_WEIGHT` reports."""
NOISE_WEIGHT: Final = 4.0
BETWEEN: Final = 0.02
"""Variance of log T between jobs of one template before any has ended (tau squared)."""
BETWEEN_WEIGHT: Final = 4.0
LEAST_VARIANCE: Final = 1e-6
"""Lower bound on the posterior variance (the grid is no finer)."""

CELLS: Final = POINTS * len(SHAPES)
_N: Final = len(SHAPES)
_K = np.tile(np.array(SHAPES), POINTS)
_END = np.exp(-_K)
_X = np.linspace(-REACH, REACH, POINTS)
_PRIOR = np.exp(-0.5 * _X**2)
_PRUNE: Final = 40.0  # cells below e^-40 of the best do not count

FLOAT: Final = types.float64


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


@entry(types.UniTuple(FLOAT, 2), types.Array(FLOAT, 1, "C", readonly=True), FLOAT, FLOAT, FLOAT)
def log_passes(gaps, first, centre, sigma):  # type: ignore[no-untyped-def]
    """Mean and variance of log T after ``len(gaps)`` passes.

    `gaps`: uncertainty above the target after every pass; `first`: before the first one, NaN if
    unknown; `centre`, `sigma`: prior of log T.
    """
    base, power = np.empty(CELLS), np.ones(CELLS)
    ff, fy = np.zeros(CELLS), np.zeros(CELLS)
    squares, seen = 0.0, float(len(gaps))
    for cell in range(CELLS):
        base[cell] = math.exp(-_K[cell] / math.exp(centre + sigma * _X[cell // _N]))
    if first == first:
        squares, seen = first * first, seen + 1.0
        for cell in range(CELLS):
            model = 1.0 - _END[cell]
            ff[cell], fy[cell] = model * model, model * first
    for gap in gaps:
        for cell in range(CELLS):
            power[cell] *= base[cell]
            model = power[cell] - _END[cell]
            ff[cell] += model * model
            fy[cell] += model * gap
        squares += gap * gap
    # squared residuals at the best amplitude, with those of the prior noise
    misfit, best = base, math.inf
    for cell in range(CELLS):
        residual = squares
        if fy[cell] > 0.0 and ff[cell] > 0.0:
            residual -= fy[cell] * fy[cell] / ff[cell]
        misfit[cell] = max(residual, 0.0) + NOISE_WEIGHT * NOISE * NOISE
        best = min(best, misfit[cell])
    halves = int(seen + NOISE_WEIGHT - 1.0)
    limit = best * math.exp(2.0 * _PRUNE / halves)
    done = float(len(gaps))
    total, mean, square = 0.0, 0.0, 0.0
    for i in range(POINTS):
        x = sigma * _X[i]
        if x <= math.log(done) - centre:  # T is larger than the passes completed
            continue
        likelihood = 0.0
        for cell in range(i * _N, (i + 1) * _N):
            if misfit[cell] < limit:
                likelihood += _root_power(best / misfit[cell], halves)
        weight = likelihood * _PRIOR[i]
        total += weight
        mean += weight * x
        square += weight * x * x
    if total == 0.0:  # beyond the grid
        return math.log(done + 1.0), sigma * sigma
    mean /= total
    return centre + mean, max(square / total - mean * mean, LEAST_VARIANCE)


class Prior(NamedTuple):
    """Columns of a workload that do not change, by number of the job."""

    aims: Any
    """Whether it ends at a target."""
    number: Any
    """Of its passes, where that is known; else 0."""
    work_of_pass: Any
    centre: Any
    """Log T by its estimate."""
    certain: Any
    """Log T once it is known: the job has ended, or a pass of known number was timed."""
    target: Any
    gap: Any
    """Uncertainty before the first pass, above the target; NaN if unknown."""
    report_ptr: Any
    report: Any
    pool: Any
    """Number of its pool: jobs of one template, with a target or without; -1: alone."""
    member_ptr: Any
    member: Any
    """Jobs of every pool, ascending (CSR)."""
    submit: Any


class Memory(NamedTuple):
    """What the views so far have determined: the same from any earlier view of a simulation."""

    now: Any
    """Time of the last view, jobs that had arrived, length of `open`."""
    open: Any
    """Jobs of pools that have arrived and not ended."""
    known: Any
    """Whether T is certain."""
    seen: Any
    """Passes after which `mean` and `variance` of log T were computed; -1: never."""
    mean: Any
    variance: Any
    changed: Any
    """Whether a pool has members whose T became certain."""
    count: Any
    total: Any
    spread: Any
    """Of every pool: jobs with a certain T, sum of log T, squared deviations from its mean."""


def prior(workload: Workload, pooling: bool) -> Prior:
    """Columns of a workload."""
    aims = ~np.isnan(workload.target)
    pool = np.where((workload.template < 0) | (not pooling), -1, 2 * workload.template + aims)
    size = np.bincount(pool[pool >= 0])
    units = np.where(aims, workload.pass_work, workload.passes)
    columns = (
        aims, np.where(aims, 0, workload.passes), workload.pass_work,
        np.log(workload.estimate / units),
        np.log(np.where(aims, workload.passes, workload.pass_work)),
        workload.target, workload.initial - workload.target, workload.observed_ptr,
        workload.observed, pool, np.append(0, np.cumsum(size)),
        np.argsort(pool, kind="stable")[int((pool < 0).sum()) :], workload.submit,
    )  # fmt: skip
    return Prior(*(frozen(np.array(column)) for column in columns))


def memory(jobs: int, pools: int, sigma: float) -> Memory:
    """Before the first view."""
    return Memory(
        np.array([-1, 0, 0]), np.zeros(jobs, np.int64), np.zeros(jobs, np.bool_),
        np.full(jobs, -1), np.zeros(jobs), np.full(jobs, sigma**2),
        np.zeros(pools, np.bool_), np.zeros(pools, np.int64), np.zeros(pools), np.zeros(pools),
    )  # fmt: skip


@helper()
def find_ended(view, prior, memory):  # type: ignore[no-untyped-def]
    """Mark the jobs of pools that have ended, also after a step back in time."""
    now = memory.now
    if view.time < now[0]:
        now[1] = now[2] = 0
        for j in range(len(memory.known)):
            memory.known[j] = False
        for k in range(len(memory.changed)):
            memory.changed[k] = True
    now[0] = view.time
    while now[1] < len(prior.submit) and prior.submit[now[1]] <= view.time:
        if prior.pool[now[1]] >= 0:
            memory.open[now[2]] = now[1]
            now[2] += 1
        now[1] += 1
    kept = 0
    for k in range(now[2]):
        j = memory.open[k]
        if view.finished[j] >= 0:
            make_certain(prior, memory, j)
        else:
            memory.open[kept] = j
            kept += 1
    now[2] = kept


@helper()
def make_certain(prior, memory, j):  # type: ignore[no-untyped-def]
    """Note that T of a job is known."""
    if not memory.known[j]:
        memory.known[j] = True
        memory.mean[j], memory.seen[j] = prior.certain[j], -1
        if prior.pool[j] >= 0:
            memory.changed[prior.pool[j]] = True


@helper()
def learn(view, prior, memory, sigma):  # type: ignore[no-untyped-def]
    """Mean and variance of log T of every active job, by itself."""
    for i in range(len(view.job)):
        j, passes = view.job[i], view.passes[i]
        if not prior.aims[j] and passes > 0:
            make_certain(prior, memory, j)
        elif memory.seen[j] != passes:
            memory.seen[j] = passes
            memory.mean[j], memory.variance[j] = prior.centre[j], sigma**2
            if passes > 0:
                first = prior.report_ptr[j]
                gaps = prior.report[first : first + passes] - prior.target[j]
                memory.mean[j], memory.variance[j] = log_passes(
                    gaps, prior.gap[j], prior.centre[j], sigma
                )


@helper()
def sum_certain(prior, memory, k):  # type: ignore[no-untyped-def]
    """Number, sum and spread of the certain log T of a pool."""
    count, total = 0, 0.0
    members = prior.member[prior.member_ptr[k] : prior.member_ptr[k + 1]]
    for j in members:
        if memory.known[j]:
            count += 1
            total += memory.mean[j]
    spread = BETWEEN_WEIGHT * BETWEEN
    for j in members:
        if memory.known[j]:
            spread += (memory.mean[j] - total / count) ** 2
    memory.count[k], memory.total[k], memory.spread[k] = count, total, spread
    memory.changed[k] = False


@helper()
def pooled(view, prior, memory):  # type: ignore[no-untyped-def]
    """Log T of every active job, pooled by template.

    The precision-weighted mean of the other jobs is a second witness for each job, with the
    variance between jobs. Certain ones have the variance `LEAST_VARIANCE`.
    """
    pools = len(memory.count)
    between, precision, total = np.empty(pools), np.zeros(pools), np.zeros(pools)
    for k in range(pools):
        if memory.changed[k]:
            sum_certain(prior, memory, k)
        certain, between[k] = memory.count[k], BETWEEN
        if certain > 0:
            between[k] = memory.spread[k] / (BETWEEN_WEIGHT + certain - 1)
            each = 1.0 / (LEAST_VARIANCE + between[k])
            precision[k], total[k] = certain * each, memory.total[k] * each
    members = memory.count.copy()
    for j in view.job:
        k = prior.pool[j]
        if k >= 0 and not memory.known[j]:
            each = 1.0 / (memory.variance[j] + between[k])
            precision[k] += each
            total[k] += each * memory.mean[j]
            members[k] += 1
    found = np.empty(len(view.job))
    for i in range(len(found)):
        j = view.job[i]
        found[i], k = memory.mean[j], prior.pool[j]
        if k >= 0 and not memory.known[j]:
            each = 1.0 / (memory.variance[j] + between[k])
            others = max(precision[k] - each, 0.0)
            # the job's mean, and that of the others with variance 1 / others + between
            trust = memory.variance[j] / (1.0 + between[k] * others)
            theirs = total[k] - each * memory.mean[j] if members[k] > 1 else 0.0
            found[i] = (memory.mean[j] + trust * theirs) / (1.0 + trust * others)
    return found


@helper()
def work_left(view, prior, log_t):  # type: ignore[no-untyped-def]
    """R = pass work * max(1/2, T - passes completed).

    Of a job of a single pass the work done counts: it completes none before its end.
    """
    left = np.empty(len(log_t))
    for i in range(len(left)):
        j, value = view.job[i], math.exp(log_t[i])
        if prior.aims[j]:
            left[i] = prior.work_of_pass[j] * max(0.5, value - view.passes[i])
        elif prior.number[j] == 1:
            left[i] = max(0.5 * value, value - view.done[i])
        else:
            left[i] = value * max(0.5, float(prior.number[j] - view.passes[i]))
    return left
