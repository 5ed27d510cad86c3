"""When waiting jobs will start: simulations from now over seeds of durations."""

from __future__ import annotations

from contextlib import closing
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.cluster.results.metrics import nearest_rank
from optsched.cluster.simulate import Case
from optsched.cluster.workload.job import MOST_WORK
from optsched.cluster.world.start import Start, rows_of
from optsched.errors import InputError
from optsched.io.values import format_value, integer, number
from optsched.solving.fan_out import fan_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.results.run import Run
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import FloatArray, Policy, Reason
    from optsched.model.schedule import IntArray
    from optsched.solving.fan_out import Engine


class ExpectedStart(NamedTuple):
    """Hold percentiles of the start of a waiting job, and the reason of its waiting.

    Examples
    --------
    >>> optsched.cluster.ExpectedStart(times=(60, 90, 300), reason=None).times[1]
    90
    """

    times: tuple[int, ...]
    """Percentiles of its start (nearest rank), in the order in which they were given."""
    reason: Reason | None
    """After the decisions of now, if all estimates are right; None: it starts now."""


def expected_starts(
    workload: Workload,
    policy: Policy | str,
    nodes: Nodes,
    start: Start,
    *,
    sigma: float = 0.5,
    factors: Sequence[float] | None = None,
    samples: int = 100,
    seed: int = 0,
    percentiles: Sequence[float] = (10, 50, 90),
    parallel: Engine | None = None,
    **settings: Any,
) -> dict[str, ExpectedStart]:
    """Simulate a running cluster on with drawn durations, and collect starts of waiting jobs.

    The work of every job that has not ended is its estimate times exp(sigma * normal), given that
    it is more than the work that is done already. Policies see the estimates, as ever.

    Parameters
    ----------
    workload, policy, nodes, start
        As for `simulate`; the true work of unfinished jobs is not used.
    sigma
        Standard deviation of the logarithm of true over estimated work; 0: estimates are right.
    factors
        Samples of true over estimated work, such as those of past jobs, in place of the lognormal
        distribution. Work beyond all of them is up to twice what is done.
    samples, seed
        Simulations, and the seed of all draws.
    percentiles
        In (0, 100].
    parallel
        Where draws are simulated, and how many at once; the result does not depend on it.
    settings
        Other arguments of `simulate`.

    Returns
    -------
    dict
        By name, for jobs that were submitted up to now, have not ended and do not run; in order of
        arrival.

    Examples
    --------
    >>> from optsched.cluster import Job, Nodes, Start, Stay, Workload, expected_starts
    >>> jobs = Workload.of([Job(name=name, sizes=(8,), work=8 * 10**8) for name in "ab"])
    >>> start = Start(10, [Stay(job="a", start=0, nodes={0: 8})])
    >>> expected_starts(jobs, "fifo", Nodes(1, gpus=8), start, sigma=0)["b"].times
    (100, 100, 100)
    """
    if not isinstance(start, Start):
        raise InputError(f"start: expected Start(now, stays), got {format_value(start)}")
    sigma = number("sigma", sigma, 0.0, 10.0)
    known = None if factors is None else _ascending(factors)
    count = 1 if sigma == 0 and known is None else integer("samples", samples, 1, 10**6)
    random = np.random.default_rng(integer("seed", seed))
    done, runs = np.zeros(len(workload), np.int64), np.zeros(len(workload), np.bool_)
    for row in rows_of(start, workload, nodes, overdue=True):
        done[row.job], runs[row.job] = row.done, row.stay.end is None
    left = runs | (done < workload.work)
    waiting = np.flatnonzero(left & ~runs & (workload.submit <= start.now))

    def case(sigma: float, known: FloatArray | None = None) -> Case:
        drawn = _drawn(workload, done, known if known is not None else sigma, random)
        work = np.where(left, drawn, workload.work)
        return Case(workload.changed(work=work), policy, nodes, {"start": start, **settings})

    likely = _complete(case(0.0))
    reasons = likely.waiting(start.now)
    found = np.empty((count, len(waiting)), np.int64)
    if sigma == 0 and known is None:
        found[0] = _starts(likely, start.now)[waiting]
    else:
        cases = (case(sigma, known) for _ in range(count))
        with closing(fan_out(_first_starts, cases, parallel)) as outcomes:
            for k, first, error in outcomes:
                if error is not None:
                    raise type(error)(f"draw {k}: {error}")
                found[k] = first[waiting]
    return {
        workload.names[j]: ExpectedStart(
            tuple(int(nearest_rank(found[:, i], p)) for p in percentiles),
            reasons.get(workload.names[j]),
        )
        for i, j in enumerate(waiting.tolist())
    }


def _first_starts(case: Case) -> IntArray:
    """Simulate, and return the first start of every job from now on."""
    return _starts(_complete(case), case.settings["start"].now)


def _complete(case: Case) -> Run:
    run, _ = case.run()
    if run.log.finished.min() < 0:  # after Ctrl-C
        raise KeyboardInterrupt
    return run


def _starts(run: Run, now: int) -> IntArray:
    first = np.full(len(run.workload), np.iinfo(np.int64).max)
    since = run.log.start >= now
    np.minimum.at(first, run.log.job[since], run.log.start[since])
    return first


def _ascending(factors: Sequence[float]) -> FloatArray:
    """Check and sort the samples of true over estimated work."""
    try:
        found = np.sort(np.asarray(factors, np.float64))
    except (TypeError, ValueError):
        raise InputError(f"factors: expected numbers, got {format_value(factors)}") from None
    if found.ndim != 1 or not len(found) or not 0 < found[0] <= found[-1] < np.inf:
        raise InputError("factors: expected positive finite numbers, at least one")
    return found


def _drawn(
    workload: Workload, done: IntArray, spread: float | FloatArray, random: np.random.Generator
) -> IntArray:
    """True work of every job: estimate times a random factor, given that it exceeds what is done.

    `spread` is the sigma of a lognormal factor, or ascending samples of it.
    """
    estimate = workload.estimate.astype(np.float64)
    if not isinstance(spread, float):
        drawn, longest = random.random(len(workload)), len(spread)
        first = np.searchsorted(spread, done / estimate, side="right")
        index = np.minimum(first + (drawn * (longest - first)).astype(np.int64), longest - 1)
        estimate = np.where(first < longest, estimate * spread[index], done * (1 + drawn))
    elif spread > 0:
        normal, drawn = NormalDist(), random.random(len(workload))
        least = np.log(np.maximum(done, 1e-300) / estimate) / spread  # of the normal
        factor = np.ones(len(workload))
        for j, (x, u) in enumerate(zip(least.tolist(), drawn.tolist(), strict=True)):
            above = normal.cdf(-x) * (1 - u)  # the upper tail, where it is exact
            factor[j] = np.exp(spread * (-normal.inv_cdf(above) if 0 < above < 1 else max(x, 0.0)))
        estimate *= factor
    work = np.rint(np.minimum(estimate, float(MOST_WORK // 2))).astype(np.int64)
    if isinstance(spread, float) and spread == 0:
        work = workload.estimate
    return np.maximum(work, np.maximum(done + 1, workload.passes))
