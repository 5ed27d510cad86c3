"""Whole simulations of the elastic controls in compiled code, equal to their `decide`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.policies.elastic_columns import (
    COLUMNS,
    act,
    columns,
    hold,
    notice,
    settled,
    sort,
)
from optsched.cluster.policies.elastic_rule import BY_ORDER, NEVER, PAIRWISE, ROUND
from optsched.cluster.world.advance import remaining_now, step, tidy
from optsched.cluster.world.build import grown, log_of, stalled, too_late, world
from optsched.cluster.world.layout import ASK, NO_ROOM, STALLED, TOO_LATE, WORLD
from optsched.kernels.compile import INT, entry, helper

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.settings import Settings

FIFO: Final = 0
SJF: Final = 1
SJF_TRUE: Final = 2
SRTF: Final = 3
SRTF_TRUE: Final = 4


def ordered(
    workload: Workload, nodes: Nodes, settings: Settings, kind: int, name: str
) -> Log | None:
    """The log of `elastic_fifo`, `elastic_sjf` or `elastic_srtf`; None if not compiled."""
    c = columns(workload, nodes, settings, kind == SRTF_TRUE)
    if c is None:
        return None
    if kind == FIFO:
        c.key[:] = np.arange(len(workload))
    else:
        c.key[:] = workload.work if kind in (SJF_TRUE, SRTF_TRUE) else workload.believed
    if kind in (SRTF, SRTF_TRUE):
        return run(
            lambda w: _by_remaining(w, c, int(kind == SRTF_TRUE)),
            world(workload, nodes, settings), workload, name,
        )  # fmt: skip
    return run(lambda w: _by_key(w, c), world(workload, nodes, settings), workload, name)


def by_gain(
    workload: Workload, nodes: Nodes, settings: Settings, surplus: int, name: str
) -> Log | None:
    """The log of `optimus` (`MARGINAL`, without weights) or `afs` (`PAIRWISE`)."""
    c = columns(workload, nodes, settings)
    if c is None:
        return None
    c.remaining[:] = np.maximum(workload.believed, 1)
    c.key[:] = np.arange(len(workload))
    if surplus == PAIRWISE:
        c.key[:] = c.remaining / workload.rate[workload.size_ptr[:-1]]
    else:
        c = c._replace(weight=np.ones(len(workload)))
        c.weight.setflags(write=False)
    w = world(workload, nodes, settings)
    return run(lambda w: _by_gain(w, c, surplus), w, workload, name)


def run(loop: Callable[[World], Any], w: World, workload: Workload, name: str) -> Log:
    """Call a compiled loop until all jobs have ended.

    Raises
    ------
    Stalled, InputError
        As the generic engine does.
    """
    status = NO_ROOM
    while status == NO_ROOM:
        status = loop(w)
        if status == NO_ROOM:
            w = grown(w)
    if status == STALLED:
        raise stalled(w, workload, name)
    if status == TOO_LATE:
        raise too_late(w, workload, name)
    return log_of(w)


@entry(INT, WORLD, COLUMNS, counted=False)
def _by_key(w, c):  # type: ignore[no-untyped-def]
    """By a key that never changes, without preemption."""
    while True:
        status = step(w)
        if status != ASK:
            return status
        worth = notice(w, c)
        if worth == 1 or w.state[0].free_gpus > 0:
            sort(c)
            act(w, c, NEVER, ROUND)
        else:
            hold(w, c)


@entry(INT, WORLD, COLUMNS, INT, counted=False)
def _by_remaining(w, c, clairvoyant):  # type: ignore[no-untyped-def]
    """By remaining work, with preemption at every event."""
    while True:
        status = step(w)
        if status != ASK:
            return status
        worth = notice(w, c)
        if w.state[0].loses_pass == 1:  # who was preempted has more to do than it had
            tidy(w)
            for i in range(w.state[0].active):
                c.key[w.active[i]] = remaining_now(w, w.active[i], clairvoyant)
        else:
            for i in range(w.state[0].running_now):
                c.key[w.heap[i, 1]] = remaining_now(w, w.heap[i, 1], clairvoyant)
        sort(c)
        if worth == 1 or w.state[0].free_gpus > 0 or settled(c, BY_ORDER) == 0:
            act(w, c, BY_ORDER, ROUND)
        else:
            hold(w, c)


@entry(INT, WORLD, COLUMNS, INT, counted=False)
def _by_gain(w, c, surplus):  # type: ignore[no-untyped-def]
    """By arrival, or by estimated remaining time (`PAIRWISE`), without preemption."""
    while True:
        status = step(w)
        if status != ASK:
            return status
        worth = notice(w, c)
        if worth == 1 or w.state[0].free_gpus > 0:
            for i in range(w.state[0].running_now):
                _foresee(w, c, w.heap[i, 1], surplus)
            if w.state[0].loses_pass == 1:
                tidy(w)
                for i in range(w.state[0].active):
                    _foresee(w, c, w.active[i], surplus)
            sort(c)
            act(w, c, NEVER, surplus)
        else:
            hold(w, c)


@helper(INT, WORLD, COLUMNS, INT, INT, counted=False)
def _foresee(w, c, job, surplus):  # type: ignore[no-untyped-def]
    """Remaining work of a job by its estimate, and its order if that goes by it."""
    c.remaining[job] = remaining_now(w, job, 0)
    if surplus == PAIRWISE:
        c.key[job] = c.remaining[job] / c.rate[c.size_ptr[job]]
    return 0
