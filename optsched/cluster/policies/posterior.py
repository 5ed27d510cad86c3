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
"""Half of the grid's width, in prior standard deviations."""
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


@entry(
    types.UniTuple(FLOAT, 2), types.Array(FLOAT, 1, "C", readonly=True), INT, INT, FLOAT, FLOAT,
    FLOAT, types.Array(FLOAT, 2, "C"), counted=False,
)  # fmt: skip
def log_passes(gaps, begin, passes, first, centre, sigma, cells):  # type: ignore[no-untyped-def]
    """Mean and variance of log T after some passes.

    ``gaps[begin:]``: uncertainty above the target after every pass; `first`: before the first one,
    NaN if unknown; `centre`, `sigma`: prior of log T; `cells`: scratch, (4, `CELLS`): decay in a
    pass, its power (later the misfit), sums of model times model and of model times gap.
    """
    squares, seen = 0.0, float(passes)
    if first == first:
        squares, seen = first * first, seen + 1.0
    for cell in range(CELLS):
        cells[0, cell] = math.exp(-_K[cell] / math.exp(centre + sigma * _X[cell // _N]))
        model = 1.0 - _END[cell] if first == first else 0.0
        cells[1, cell], cells[2, cell] = 1.0, model * model
        cells[3, cell] = model * first if first == first else 0.0
    for at in range(begin, begin + passes):
        gap = gaps[at]
        for cell in range(CELLS):
            cells[1, cell] *= cells[0, cell]
            model = cells[1, cell] - _END[cell]
            cells[2, cell] += model * model
            cells[3, cell] += model * gap
        squares += gap * gap
    best = math.inf
    for cell in range(CELLS):  # squared residuals at the best amplitude, with the prior noise
        residual, ff, fy = squares, cells[2, cell], cells[3, cell]
        if fy > 0.0 and ff > 0.0:
            residual -= fy * fy / ff
        cells[1, cell] = max(residual, 0.0) + NOISE_WEIGHT * NOISE * NOISE
        best = min(best, cells[1, cell])
    halves, done = int(seen + NOISE_WEIGHT - 1.0), float(passes)
    limit = best * math.exp(2.0 * _PRUNE / halves)
    total, mean, square = 0.0, 0.0, 0.0
    for i in range(POINTS):
        x = sigma * _X[i]
        if x <= math.log(done) - centre:  # T is larger than the passes completed
            continue
        likelihood = 0.0
        for cell in range(i * _N, (i + 1) * _N):
            if cells[1, cell] < limit:
                likelihood += _root_power(best / cells[1, cell], halves)
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
    gap: Any
    """Uncertainty before the first pass, above the target; NaN if unknown."""
    report_ptr: Any
    gaps: Any
    """Uncertainty after every pass, above the target (CSR)."""
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
    """Whether a pool has members with a T that became certain."""
    count: Any
    total: Any
    spread: Any
    """Of every pool: jobs with a certain T, sum of log T, squared deviations from its mean."""
    between: Any
    """Of every pool at this view: variance of log T between jobs, ..."""
    precision: Any
    weighted: Any
    members: Any
    """... sum of precisions, of precision times mean, and number of jobs."""
    cells: Any
    """Scratch of `log_passes`."""


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
        workload.initial - workload.target, workload.observed_ptr,
        workload.observed - np.repeat(workload.target, np.diff(workload.observed_ptr)), pool,
        np.append(0, np.cumsum(size)),
        np.argsort(pool, kind="stable")[int((pool < 0).sum()) :], workload.submit,
    )  # fmt: skip
    return Prior(*(frozen(np.array(column)) for column in columns))


def memory(jobs: int, pools: int, sigma: float) -> Memory:
    """Before the first view."""
    return Memory._make([
        np.array([-1, 0, 0]), np.zeros(jobs, np.int64), np.zeros(jobs, np.bool_),
        np.full(jobs, -1), np.zeros(jobs), np.full(jobs, sigma**2),
        np.zeros(pools, np.bool_), np.zeros(pools, np.int64), *np.zeros((5, pools)),
        np.zeros(pools, np.int64), np.zeros((4, CELLS)),
    ])  # fmt: skip


@helper(counted=False)
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
    return kept


@helper(counted=False)
def make_certain(prior, memory, j):  # type: ignore[no-untyped-def]
    """Note that T of a job is known."""
    if not memory.known[j]:
        memory.known[j] = True
        memory.mean[j], memory.seen[j] = prior.certain[j], -1
        if prior.pool[j] >= 0:
            memory.changed[prior.pool[j]] = True
    return 0


@helper(counted=False)
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
                memory.mean[j], memory.variance[j] = log_passes(
                    prior.gaps,
                    prior.report_ptr[j],
                    passes,
                    prior.gap[j],
                    prior.centre[j],
                    sigma,
                    memory.cells,
                )
    return 0


@helper(counted=False)
def sum_certain(prior, memory, k):  # type: ignore[no-untyped-def]
    """Number, sum and spread of the certain log T of a pool."""
    count, total = 0, 0.0
    first, end = prior.member_ptr[k], prior.member_ptr[k + 1]
    for m in range(first, end):
        j = prior.member[m]
        if memory.known[j]:
            count += 1
            total += memory.mean[j]
    spread = BETWEEN_WEIGHT * BETWEEN
    for m in range(first, end):
        j = prior.member[m]
        if memory.known[j]:
            spread += (memory.mean[j] - total / count) ** 2
    memory.count[k], memory.total[k], memory.spread[k] = count, total, spread
    memory.changed[k] = False
    return count


@helper(counted=False)
def pooled(view, prior, memory, found):  # type: ignore[no-untyped-def]
    """Set log T of every active job, pooled by template.

    The precision-weighted mean of the other jobs is a second witness for each job, with the
    variance between jobs. Certain ones have the variance `LEAST_VARIANCE`.
    """
    between, precision, total = memory.between, memory.precision, memory.weighted
    for k in range(len(between)):
        if memory.changed[k]:
            sum_certain(prior, memory, k)
        certain, between[k] = memory.count[k], BETWEEN
        memory.members[k], precision[k], total[k] = certain, 0.0, 0.0
        if certain > 0:
            between[k] = memory.spread[k] / (BETWEEN_WEIGHT + certain - 1)
            each = 1.0 / (LEAST_VARIANCE + between[k])
            precision[k], total[k] = certain * each, memory.total[k] * each
    for i in range(len(found)):
        j = view.job[i]
        k = prior.pool[j]
        if k >= 0 and not memory.known[j]:
            each = 1.0 / (memory.variance[j] + between[k])
            precision[k] += each
            total[k] += each * memory.mean[j]
            memory.members[k] += 1
    for i in range(len(found)):
        j = view.job[i]
        found[i], k = memory.mean[j], prior.pool[j]
        if k >= 0 and not memory.known[j]:
            each = 1.0 / (memory.variance[j] + between[k])
            others = max(precision[k] - each, 0.0)
            # the job's mean, and that of the others with variance 1 / others + between
            trust = memory.variance[j] / (1.0 + between[k] * others)
            theirs = total[k] - each * memory.mean[j] if memory.members[k] > 1 else 0.0
            found[i] = (memory.mean[j] + trust * theirs) / (1.0 + trust * others)
    return 0


@helper(counted=False)
def work_left(view, prior, left):  # type: ignore[no-untyped-def]
    """Replace log T by R = pass work * max(1/2, T - passes completed).

    Of a job of a single pass the work done counts: it completes none before its end.
    """
    for i in range(len(left)):
        j, value = view.job[i], math.exp(left[i])
        if prior.aims[j]:
            left[i] = prior.work_of_pass[j] * max(0.5, value - view.passes[i])
        elif prior.number[j] == 1:
            left[i] = max(0.5 * value, value - view.done[i])
        else:
            left[i] = value * max(0.5, float(prior.number[j] - view.passes[i]))
    return 0
