"""Whole simulations of `time_to_target` in compiled code, equal to its `decide`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
from optsched.cluster.policies.elastic_rule import BY_GAIN, COLUMNS
from optsched.cluster.policies.posterior import BELIEFS, beliefs, join, learn, pool, work_left
from optsched.cluster.world.advance import done_now, step, tidy
from optsched.cluster.world.build import world
from optsched.cluster.world.compiled import run
from optsched.cluster.world.layout import ARRIVED, ASK, ENDED, PASSED, RUNS, WORLD
from optsched.kernels.compile import INT, entry, helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.settings import Settings

MOST_CURVES: Final = 50_000
"""Jobs with a target that are simulated in compiled code: each has a grid of 22 kB."""


def to_target(
    workload: Workload, nodes: Nodes, settings: Settings, sigma: float, pooling: bool,
    surplus: int, name: str,
) -> Log | None:  # fmt: skip
    """The log of `time_to_target`; None if not compiled."""
    c = columns(workload, nodes, settings)
    aims = ~np.isnan(workload.target)
    if c is None or settings.changes or int(aims.sum()) > MOST_CURVES:
        return None
    b = beliefs(workload, sigma, pooling)
    single = int(bool((~aims & (workload.passes == 1)).any()))
    return run(
        lambda w: _loop(w, c, b, sigma, single, surplus),
        world(workload, nodes, settings),
        workload,
        name,
    )


@helper(INT, WORLD, COLUMNS, BELIEFS, INT, counted=False)
def _value(w, c, b, job):  # type: ignore[no-untyped-def]
    """Remaining work and key of a job, from what is believed."""
    c.remaining[job] = work_left(b, job, w.job[job].passes, done_now(w, job))
    c.key[job] = c.remaining[job] / c.weight[job]
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
                    learn(b, c.order[at], w.job[c.order[at]].passes, 1, sigma)
        for i in range(s.events):
            job = w.event[i, 1]
            if w.event[i, 0] == PASSED:
                learn(b, job, w.job[job].passes, 0, sigma)
                _value(w, c, b, job)
            elif w.event[i, 0] == ARRIVED:
                join(b, job)
                _value(w, c, b, job)
        worth = notice(w, c)
        for k in range(len(b.pool)):
            if b.pool[k].touched == 1:
                pool(b, k)
                for at in range(b.pool[k].first, b.pool[k].first + b.pool[k].members):
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
