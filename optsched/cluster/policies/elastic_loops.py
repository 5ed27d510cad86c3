"""Whole simulations of the elastic controls in compiled code, equal to their `decide`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.policies.elastic_columns import act, columns, hold, notice, settled, sort
from optsched.cluster.policies.elastic_rule import COLUMNS, GIVEN, NEVER
from optsched.cluster.world.advance import remaining_now, step, tidy
from optsched.cluster.world.build import frozen, world
from optsched.cluster.world.compiled import run
from optsched.cluster.world.layout import ASK, COMPLETED, WORLD
from optsched.kernels.compile import INT, READ, entry, helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.settings import Settings

# what the order goes by
GIVEN_KEY: Final = 0
REMAINING: Final = 1
TIME: Final = 2
"""Remaining work at the speed of the smallest size."""
SCORE: Final = 3
"""Falling score of `entropy`."""


class Rule(NamedTuple):
    """An elastic policy."""

    by: int
    changes: int
    """1 if keys or remaining work of running jobs change while they run."""
    clairvoyant: int
    preempt: int
    surplus: int
    lam: float = 0.0
    initial: float = 0.0
    observed_ptr: Any = frozen(np.zeros(1, np.int64))
    observed: Any = frozen(np.zeros(0))


RULE: Final[Any] = types.NamedTuple([INT] * 5 + [types.float64] * 2 + [READ, GIVEN], Rule)


def simulate_by_rule(
    workload: Workload, nodes: Nodes, settings: Settings, rule: Rule, name: str, key: Any = None,
    weight: Any = None,
) -> Log | None:  # fmt: skip
    """The log of an elastic policy; None if not compiled.

    Parameters
    ----------
    workload, nodes, settings, name
        As in `simulate`; the policy's name.
    rule
        What it does.
    key
        What jobs are ordered by where that never changes.
    weight
        Of jobs, instead of their own.
    """
    c = columns(workload, nodes, settings, rule.clairvoyant == 1, weight)
    if c is None:
        return None
    if key is not None:
        c.key[:] = key
    return run(lambda w: _loop(w, c, rule), world(workload, nodes, settings), workload, name)


@helper(INT, WORLD, COLUMNS, RULE, INT, counted=False)
def _key(w, c, rule, job):  # type: ignore[no-untyped-def]
    """Remaining work or score of a job now, and its place in the order if that goes by it."""
    if rule.by == SCORE:
        ptr, seen = rule.observed_ptr, rule.observed
        last = min(ptr[job] + w.job[job].passes, ptr[job + 1]) - 1
        level = seen[last] if last >= ptr[job] else rule.initial
        fall = max(seen[last - 1] - seen[last], 0.0) if last > ptr[job] else 0.0
        score = rule.lam * level + (1.0 - rule.lam) * fall
        if rule.changes == 1:
            score /= remaining_now(w, job, 0)
        c.remaining[job] = score
        c.key[job] = -score
        return 0
    c.remaining[job] = remaining_now(w, job, rule.clairvoyant)
    if rule.by == REMAINING:
        c.key[job] = c.remaining[job]
    elif rule.by == TIME:
        c.key[job] = c.remaining[job] / c.rate[c.size_ptr[job]]
    return 0


@entry(INT, WORLD, COLUMNS, RULE, counted=False)
def _loop(w, c, rule):  # type: ignore[no-untyped-def]
    """At every event: keys, order, decision."""
    s = w.state[0]
    while True:
        status = step(w)
        if status != ASK:
            return status
        worth = notice(w, c)
        if s.free_gpus > 0:
            worth = 1
        for i in range(s.events):  # keys of jobs that wait change only where a stop loses work
            if w.event[i, 0] != COMPLETED:
                _key(w, c, rule, w.event[i, 1])
        if worth == 1 or rule.preempt != NEVER:
            if rule.changes == 1 and s.loses_pass == 1:
                tidy(w)
                for i in range(s.active):
                    _key(w, c, rule, w.active[i])
            elif rule.changes == 1:
                for i in range(s.running_now):
                    _key(w, c, rule, w.heap[i, 1])
            sort(c)
        if worth == 1 or settled(c, rule.preempt) == 0:
            act(w, c, rule.preempt, rule.surplus)
        else:
            hold(w, c)
