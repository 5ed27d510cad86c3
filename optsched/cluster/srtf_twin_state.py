"""What a compiled preemptive simulation of rigid jobs holds: a few integer arrays.

Few, because kernels hand all of them on at every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.queue_twin_input import Columns, columns
from optsched.cluster.queue_twin_log import Record, grown, log, record
from optsched.cluster.queue_twin_nodes import ANYWHERE, CONSOLIDATED, board
from optsched.cluster.srtf_twin_pending import line_for
from optsched.kernels.compile import INTS

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

NEVER: Final = 1 << 62

# `Walk.state`
ARRIVED: Final = 0
LOW: Final = 1
"""Running jobs are at ``LOW:LOW + RUNNING`` of their arrays, the last in order first."""
RUNNING: Final = 2
PENDING: Final = 3
STAYS: Final = 4
USED: Final = 5
"""Parts used."""
SEQUENCE: Final = 6
"""Numbers given out: jobs enter a list in this order."""
SLACK: Final = 7
"""The counter after the last selected job."""
STUCK: Final = 8
"""Selected pending jobs that could not be placed."""
CHOSEN: Final = 9
OUT: Final = 10
UNFINISHED: Final = 11
TOTAL: Final = 12
RULE: Final = 13
LATE: Final = 14
"""1: an end is seen one tick late, and restart costs not served yet stay owed (Lucid)."""
QUEUES: Final = 15
"""1: ordered by queue and arrival (las), 0: by remaining time (srtf)."""
ENDS: Final = 16
CROSSINGS: Final = 17
DUE: Final = 18
JOBS: Final = 19
ROOM: Final = 20
"""Length of the running arrays: keys, then jobs with their sizes."""
CHOSEN_AT: Final = 21
"""Where in `Walk.run` the pending jobs selected by the last walk are, in order."""
STUCK_AT: Final = 22
OUT_AT: Final = 23
"""Places of running jobs to be preempted, in order."""
STATE: Final = 24

# `Walk.job`, so many numbers each
GANG: Final = 0
REMAINING: Final = 1
"""Time of progress left at the job's size."""
OWED: Final = 2
"""Time without progress at the next start."""
ROW: Final = 3
"""Its open stay; -1."""
LAST: Final = 4
"""When a running job will have done its work."""
KEY_NOW: Final = 5
SEQUENCE_NOW: Final = 6
KIND: Final = 7
"""Record of its size in the line."""
LEFT: Final = 8
"""Work left."""
RATE: Final = 9
COST: Final = 10
ATTAINED: Final = 11
FINISHED: Final = 12
PREEMPTED: Final = 13
SUBMIT: Final = 14
JOB_WIDTH: Final = 16

_MOST_GPU_TIME: Final = 2**58
_MOST_COST: Final = 2**32
BITS: Final = 31
"""A running job is its number times 2^31 plus its GPUs."""


class Walk(NamedTuple):
    """A preemptive simulation under way."""

    state: IntArray
    job: IntArray
    board: IntArray
    line: IntArray
    run: IntArray
    rows: IntArray
    nodes: IntArray
    counts: IntArray


WALK: Final[Any] = types.NamedUniTuple(INTS, len(Walk._fields), Walk)


def preemptive_columns(
    workload: Workload, nodes: Nodes, settings: Settings, gang: int | None
) -> Columns | None:
    """Columns of the jobs if a preemptive twin can simulate this."""
    cols = columns(workload, nodes, settings, gang)
    if cols is None or sum(nodes.gpus) >> BITS or len(cols.gang) >> BITS:
        return None
    # GPU-time has to fit 64 bits, with room for restarts
    span = float(cols.submit[-1]) + cols.duration.sum(dtype=np.float64)
    if span * float(cols.gang.max()) > _MOST_GPU_TIME:
        return None
    if settings.timing == "lucid":
        return cols
    if max(settings.restart_cost, int(workload.restart_cost.max())) > _MOST_COST:
        return None
    plain = settings.checkpoint == "immediate" and workload.preemptible.all()
    return cols if plain else None


def walk_of(
    cols: Columns, work: IntArray, own_cost: IntArray, nodes: Nodes, settings: Settings
) -> Walk:
    """A simulation before its first event.

    Lucid's restart costs go by the size of the gang.
    """
    n, total, lucid = len(cols.gang), sum(nodes.gpus), settings.timing == "lucid"
    once = min(n, total) + 2
    state = np.zeros(STATE, np.int64)
    state[UNFINISHED], state[JOBS], state[TOTAL], state[SLACK] = n, n, total, total
    state[RULE], state[LATE] = (CONSOLIDATED, 1) if lucid else (ANYWHERE, 0)
    state[LOW], state[ROOM] = once, 3 * once
    state[CHOSEN_AT], state[STUCK_AT], state[OUT_AT] = 6 * once, 7 * once, 8 * once
    line, kind = line_for(cols.gang)
    job = np.zeros((n, JOB_WIDTH), np.int64)
    job[:, REMAINING], job[:, LEFT], job[:, ROW] = cols.duration, work, -1
    job[:, GANG], job[:, RATE], job[:, KIND] = cols.gang, cols.rate, kind
    job[:, SUBMIT], job[:, FINISHED] = cols.submit, -1
    if lucid:
        job[:, COST] = np.where(cols.gang <= 8, 40, 60)
    else:
        job[:, COST] = np.where(own_cost < 0, settings.restart_cost, own_cost)
    kept = record(2 * max(n, total), 2 * max(n, total))
    return Walk(state, job.reshape(-1), board(nodes.gpus), line, np.empty(9 * once, np.int64),
                *kept)  # fmt: skip


def longer(w: Walk) -> Walk:
    """The same with twice the room for stays."""
    kept = grown(Record(w.rows, w.nodes, w.counts))
    return w._replace(rows=kept.rows, nodes=kept.nodes, counts=kept.counts)


def log_of(w: Walk) -> Log:
    """The log of a simulation that has ended."""
    job = w.job.reshape(-1, JOB_WIDTH)
    kept = Record(w.rows, w.nodes, w.counts)
    finished, preempted = job[:, FINISHED].copy(), job[:, PREEMPTED].copy()
    return log(kept, int(w.state[STAYS]), int(w.state[USED]), finished, preempted)
