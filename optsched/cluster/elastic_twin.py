"""Whole simulations of the elastic controls in compiled code, equal to their `decide`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.elastic_twin_columns import (
    COLUMNS,
    act,
    columns,
    hold,
    notice,
    settled,
    sort,
)
from optsched.cluster.elastic_twin_rule import BY_ORDER, NEVER, ROUND
from optsched.cluster.world import remaining_now, step, tidy
from optsched.cluster.world_build import grown, log_of, stalled, too_late, world
from optsched.cluster.world_layout import (
    ACTIVE,
    ASK,
    FREE_GPUS,
    LOSES_PASS,
    NO_ROOM,
    RUNNING_NOW,
    STALLED,
    TOO_LATE,
    WORLD,
)
from optsched.kernels.compile import INT, entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload
    from optsched.cluster.world_layout import World

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
        if worth == 1 or w.state[FREE_GPUS] > 0:
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
        if w.state[LOSES_PASS] == 1:  # who was preempted has more to do than it had
            tidy(w)
            for i in range(w.state[ACTIVE]):
                c.key[w.active[i]] = remaining_now(w, w.active[i], clairvoyant)
        else:
            for i in range(w.state[RUNNING_NOW]):
                c.key[w.heap[i, 1]] = remaining_now(w, w.heap[i, 1], clairvoyant)
        sort(c)
        if worth == 1 or w.state[FREE_GPUS] > 0 or settled(c, BY_ORDER) == 0:
            act(w, c, BY_ORDER, ROUND)
        else:
            hold(w, c)
