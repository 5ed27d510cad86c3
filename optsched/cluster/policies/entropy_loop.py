"""Whole simulations of `entropy` in compiled code, equal to its `decide`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from optsched.cluster.policies.elastic_columns import (
    COLUMNS,
    GIVEN,
    act,
    columns,
    hold,
    notice,
    settled,
    sort,
)
from optsched.cluster.policies.elastic_loops import run
from optsched.cluster.policies.elastic_rule import APPORTION, BY_ORDER, NEVER
from optsched.cluster.world.advance import remaining_now, step, tidy
from optsched.cluster.world.build import world
from optsched.cluster.world.layout import ARRIVED, ASK, PASSED, WORLD
from optsched.kernels.compile import INT, READ, entry, helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.settings import Settings


def by_score(
    workload: Workload, nodes: Nodes, settings: Settings, lam: float, initial: float,
    resolved: bool, preemptive: bool, name: str,
) -> Log | None:  # fmt: skip
    """The log of `entropy`; None if not compiled."""
    c = columns(workload, nodes, settings)
    if c is None:
        return None
    ptr = np.array(workload.observed_ptr, np.int64)
    seen = np.array(workload.observed, np.float64)
    preempt = BY_ORDER if preemptive else NEVER
    return run(
        lambda w: _loop(w, c, ptr, seen, lam, initial, int(resolved), preempt),
        world(workload, nodes, settings), workload, name,
    )  # fmt: skip


@helper(INT, WORLD, COLUMNS, INT, READ, GIVEN, types.float64, types.float64, INT, counted=False)
def _score(w, c, job, ptr, seen, lam, initial, resolved):  # type: ignore[no-untyped-def]
    """Score and key of a job now."""
    last = min(ptr[job] + w.job[job].passes, ptr[job + 1]) - 1
    level = seen[last] if last >= ptr[job] else initial
    fall = max(seen[last - 1] - seen[last], 0.0) if last > ptr[job] else 0.0
    score = lam * level + (1.0 - lam) * fall
    if resolved == 1:
        score /= remaining_now(w, job, 0)
    c.remaining[job] = score
    c.key[job] = -score
    return 0


@entry(INT, WORLD, COLUMNS, READ, GIVEN, types.float64, types.float64, INT, INT, counted=False)
def _loop(w, c, ptr, seen, lam, initial, resolved, preempt):  # type: ignore[no-untyped-def]
    """By falling score, GPUs that are left apportioned to the scores."""
    while True:
        status = step(w)
        if status != ASK:
            return status
        worth = notice(w, c)
        for i in range(w.state[0].events):
            if w.event[i, 0] == ARRIVED or w.event[i, 0] == PASSED:
                _score(w, c, w.event[i, 1], ptr, seen, lam, initial, resolved)
        if w.state[0].free_gpus > 0:
            worth = 1
        if resolved == 1 and w.state[0].loses_pass == 1:
            tidy(w)
            for i in range(w.state[0].active):
                _score(w, c, w.active[i], ptr, seen, lam, initial, resolved)
        elif resolved == 1 and (worth == 1 or preempt != NEVER):
            for i in range(w.state[0].running_now):
                _score(w, c, w.heap[i, 1], ptr, seen, lam, initial, resolved)
        if worth == 1 or preempt != NEVER:
            sort(c)
        if worth == 1 or settled(c, preempt) == 0:
            act(w, c, preempt, APPORTION)
        else:
            hold(w, c)
