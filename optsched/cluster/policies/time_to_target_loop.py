"""Whole simulations of `time_to_target` in compiled code, equal to its `decide`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.policies.elastic_columns import (
    act,
    columns,
    hold,
    notice,
    settled,
    some_ended,
    sort,
)
from optsched.cluster.policies.elastic_rule import BY_GAIN, COLUMNS, FLOATS, GIVEN
from optsched.cluster.policies.posterior import (
    LEAST_VARIANCE,
    STATE,
    TABLE,
    logarithms,
    moments,
    pool,
    replay,
    start,
    work_left,
)
from optsched.cluster.world.advance import done_now, step, tidy
from optsched.cluster.world.build import frozen, world
from optsched.cluster.world.compiled import run
from optsched.cluster.world.layout import ARRIVED, ASK, ENDED, PASSED, RUNS, WORLD
from optsched.kernels.compile import INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

    FloatArray = npt.NDArray[np.float64]

MOST_CURVES: Final = 50_000
"""Jobs with a target that are simulated in compiled code: each has a grid of 22 kB."""


class Beliefs(NamedTuple):
    """What is believed of every job of the workload."""

    state: FloatArray
    """Curves, one row for each job that has ended a pass and not all; see `posterior`."""
    row: IntArray
    """Row of a job; -1: none."""
    spare: IntArray
    """``spare[1:1 + spare[0]]``: unused rows."""
    seen: IntArray
    """Reports of a job that are in its row."""
    centre: FloatArray
    certain: FloatArray
    mean: FloatArray
    variance: FloatArray
    pooled: FloatArray
    known: IntArray
    kind: IntArray
    """Pool of a job; -1: by itself."""
    first: IntArray
    """Members of pool k stand from ``first[k]`` in `member`."""
    members: IntArray
    """How many have arrived."""
    member: IntArray
    """By number of job."""
    touched: IntArray
    """1 for pools that are to be computed anew."""
    aims: IntArray
    """1 for jobs with a target."""
    passes: IntArray
    """Number of passes where it is known, else 0."""
    target: FloatArray
    gap: FloatArray
    """Uncertainty before the first pass, above the target; NaN if unknown."""
    observed_ptr: IntArray
    observed: FloatArray


BELIEFS: Final[Any] = types.NamedTuple(
    [TABLE, INTS, INTS, INTS, GIVEN, GIVEN, FLOATS, FLOATS, FLOATS, INTS, READ, READ, INTS, INTS,
     INTS, READ, READ, GIVEN, GIVEN, READ, GIVEN],
    Beliefs,
)  # fmt: skip


def to_target(
    workload: Workload, nodes: Nodes, settings: Settings, sigma: float, pooling: bool,
    surplus: int, name: str,
) -> Log | None:  # fmt: skip
    """The log of `time_to_target`; None if not compiled."""
    c = columns(workload, nodes, settings)
    aims = ~np.isnan(workload.target)
    if c is None or int(aims.sum()) > MOST_CURVES:
        return None
    b = _beliefs(workload, sigma, pooling)
    single = int(bool((~aims & (workload.passes == 1)).any()))
    return run(
        lambda w: _loop(w, c, b, sigma, single, surplus),
        world(workload, nodes, settings),
        workload,
        name,
    )


def _beliefs(workload: Workload, sigma: float, pooling: bool) -> Beliefs:
    """Before the first event."""
    n = len(workload)
    aims = ~np.isnan(workload.target)
    centre, certain = logarithms(workload)
    kind = np.where((workload.template < 0) | (not pooling), -1, 2 * workload.template + aims)
    pools = int(kind.max(initial=-1)) + 1
    size = np.bincount(kind[kind >= 0], minlength=pools)
    rows = int(aims.sum())
    return Beliefs(
        state=np.empty((max(rows, 1), STATE)),
        row=np.full(n, -1, np.int64),
        spare=np.concatenate(([rows], np.arange(rows)[::-1])).astype(np.int64),
        seen=np.zeros(n, np.int64),
        centre=frozen(centre),
        certain=frozen(certain),
        mean=centre.copy(),
        variance=np.full(n, sigma**2),
        pooled=centre.copy(),
        known=np.zeros(n, np.int64),
        kind=frozen(kind.astype(np.int64)),
        first=frozen(np.concatenate(([0], np.cumsum(size))).astype(np.int64)),
        members=np.zeros(pools + 1, np.int64),
        member=np.zeros(n, np.int64),
        touched=np.zeros(pools + 1, np.int64),
        aims=frozen(aims.astype(np.int64)),
        passes=frozen(np.where(aims, 0, workload.passes).astype(np.int64)),
        target=frozen(workload.target.astype(np.float64)),
        gap=frozen((workload.initial - workload.target).astype(np.float64)),
        observed_ptr=frozen(workload.observed_ptr.astype(np.int64)),
        observed=frozen(workload.observed.astype(np.float64)),
    )


@helper(INT, WORLD, COLUMNS, BELIEFS, INT, counted=False)
def _value(w, c, b, job):  # type: ignore[no-untyped-def]
    """Remaining work and key of a job, from what is believed."""
    left = work_left(b.pooled[job], b.aims[job], w.given[job].pass_work, b.passes[job],
                     w.job[job].passes, done_now(w, job))  # fmt: skip
    c.remaining[job] = left
    c.key[job] = left / c.weight[job]
    return 0


@helper(INT, BELIEFS, INT, counted=False)
def _join(b, job):  # type: ignore[no-untyped-def]
    """A job has become visible for the first time: a member of its pool."""
    k = b.kind[job]
    if k >= 0:
        at = b.first[k] + b.members[k]
        while at > b.first[k] and b.member[at - 1] > job:
            b.member[at] = b.member[at - 1]
            at -= 1
        b.member[at] = job
        b.members[k] += 1
        b.touched[k] = 1
    return 0


@helper(INT, WORLD, BELIEFS, INT, types.float64, counted=False)
def _learn(w, b, job, sigma):  # type: ignore[no-untyped-def]
    """A job has ended a pass, or all of them."""
    if b.kind[job] >= 0:
        b.touched[b.kind[job]] = 1
    over = w.job[job].phase == ENDED
    if over or b.aims[job] == 0:
        b.mean[job], b.variance[job], b.known[job] = b.certain[job], LEAST_VARIANCE, 1
        if over and b.row[job] >= 0:
            b.spare[0] += 1
            b.spare[b.spare[0]] = b.row[job]
            b.row[job] = -1
    else:
        row = b.row[job]
        if row < 0:
            row = b.row[job] = b.spare[b.spare[0]]
            b.spare[0] -= 1
            start(b.state, row, b.centre[job], sigma, b.gap[job])
        first = b.observed_ptr[job]
        replay(b.state, row, b.observed, first + b.seen[job], first + w.job[job].passes,
               b.target[job])  # fmt: skip
        b.seen[job] = w.job[job].passes
        moments(b.state, row, b.centre[job], sigma, float(w.job[job].passes), b.mean, b.variance,
                job)  # fmt: skip
    b.pooled[job] = b.mean[job]
    return 0


@entry(INT, WORLD, COLUMNS, BELIEFS, types.float64, INT, INT, counted=False)
def _loop(w, c, b, sigma, single, surplus):  # type: ignore[no-untyped-def]
    """By believed remaining work, displacing where the gain exceeds both restart costs."""
    s = w.state[0]
    while True:
        status = step(w)
        if status != ASK:
            return status
        if some_ended(w, c) == 1:
            for at in range(c.count[0]):
                if w.job[c.order[at]].phase == ENDED:
                    _learn(w, b, c.order[at], sigma)
        for i in range(s.events):
            job = w.event[i, 1]
            if w.event[i, 0] == PASSED:
                _learn(w, b, job, sigma)
                _value(w, c, b, job)
            elif w.event[i, 0] == ARRIVED:
                _join(b, job)
                _value(w, c, b, job)
        worth = notice(w, c)
        for k in range(len(b.touched)):
            if b.touched[k] == 1:
                b.touched[k] = 0
                end = b.first[k] + b.members[k]
                pool(b.member, b.first[k], end, b.known, b.mean, b.variance, b.pooled)
                for at in range(b.first[k], end):
                    if w.job[b.member[at]].phase != ENDED:
                        _value(w, c, b, b.member[at])
        if single == 1 or s.loses_pass == 1:
            tidy(w)
            for i in range(s.active):
                job = w.active[i]
                _value(w, c, b, job)
                cost = c.restart[job] if w.job[job].starts > 0 else 0
                if s.loses_pass == 1 and w.job[job].phase == RUNS:
                    open_work = done_now(w, job) - w.job[job].passes * w.given[job].pass_work
                    cost += open_work // c.rate[c.size_ptr[job]]
                c.cost[job] = max(cost, 0)
        sort(c)
        if worth == 1 or s.free_gpus > 0 or settled(c, BY_GAIN) == 0:
            act(w, c, BY_GAIN, surplus)
        else:
            hold(w, c)
