"""FIFO and SJF that stop at the first misfit: whole simulations in compiled code.

Nothing is preempted, so a job's stay is fixed when it starts: events are arrivals and ends. The
jobs of one queue go by a pointer (FIFO) or a heap (SJF), ends by a heap, placement by buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.cluster.queue_twin_backfill import backfill_twin
from optsched.cluster.queue_twin_heap import pop, push
from optsched.cluster.queue_twin_input import columns
from optsched.cluster.queue_twin_log import (
    END,
    GPUS,
    JOB,
    PARTS,
    RESTART,
    START,
    WIDTH,
    WORK_DONE,
    grown,
    log,
    record,
)
from optsched.cluster.queue_twin_nodes import ANYWHERE, CONSOLIDATED, board, place, release
from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload

# where a simulation stands, so that it can go on with longer arrays
_NEXT: Final = 0
_HEAD: Final = 1
"""First pending job (FIFO), or number of pending jobs (SJF)."""
_RUNNING: Final = 2
_STAYS: Final = 3
_USED: Final = 4
"""Parts used."""
_STATE: Final = 5

NEVER: Final = 1 << 62


def queue_twin(
    workload: Workload, nodes: Nodes, settings: Settings, *, shortest: bool,
    gang: int | None = None, backfill: str = "none",
) -> Log | None:  # fmt: skip
    """Simulate jobs in one queue; None if only the generic engine can.

    Parameters
    ----------
    shortest
        By estimated duration (SJF), else by arrival (FIFO).
    gang, backfill
        See `Fifo`.
    """
    if settings.timing == "lucid" and backfill != "none":
        raise InputError(
            'backfill: timing="lucid" stops at the first job that does not fit; '
            'take backfill="none" or timing="event"'
        )
    cols = columns(workload, nodes, settings, gang)
    if cols is None:
        return None
    if backfill != "none":
        return backfill_twin(workload, nodes, settings, cols, shortest, backfill == "easy")
    n = len(cols.gang)
    rule = CONSOLIDATED if settings.timing == "lucid" else ANYWHERE
    total = sum(nodes.gpus)
    at_once = min(n, total)
    place_of, state = board(nodes.gpus), np.zeros(_STATE, np.int64)
    kept = record(n, 2 * max(n, total))
    finished = np.full(n, -1, np.int64)
    keys, values = np.empty((2, at_once + 1), np.int64)
    waiting_keys, waiting = np.empty((2, n + 1 if shortest else 1), np.int64)
    while not _advance(
        int(shortest), rule, total, cols.submit, cols.gang, cols.duration, cols.estimate,
        workload.work, state, place_of, keys, values, waiting_keys, waiting, *kept, finished,
    ):  # fmt: skip
        more = grown(kept)
        kept = kept._replace(nodes=more.nodes, counts=more.counts)
    return log(kept, n, int(state[_USED]), finished, np.zeros(n, np.int64))


@entry(INT, INT, INT, INT, READ, READ, READ, READ, READ, INTS, INTS, INTS, INTS, INTS, INTS, INTS,
        INTS, INTS, INTS, counted=False)  # fmt: skip
def _advance(  # type: ignore[no-untyped-def]
    shortest, rule, total, submit, gang, duration, estimate, work, state, board, keys, values,
    waiting_keys, waiting, rows, nodes, counts, finished,
):  # fmt: skip
    """Simulate to the end (1), or until an instant's starts may lack room (0)."""
    n = len(submit)
    arrived, head, running = state[_NEXT], state[_HEAD], state[_RUNNING]
    stays, used = state[_STAYS], state[_USED]
    while stays < n or running > 0:
        if used + total > len(nodes):
            state[_NEXT], state[_HEAD], state[_RUNNING] = arrived, head, running
            state[_STAYS], state[_USED] = stays, used
            return 0
        time = submit[arrived] if arrived < n else NEVER
        if running > 0 and keys[0] < time:
            time = keys[0]
        while running > 0 and keys[0] == time:
            at = values[0] * WIDTH
            running = pop(keys, values, running)
            end = rows[at + WIDTH + PARTS] if at // WIDTH + 1 < stays else used
            release(board, nodes, counts, rows[at + PARTS], end)
            finished[rows[at + JOB]] = time
        while arrived < n and submit[arrived] == time:
            if shortest == 1:
                head = push(waiting_keys, waiting, head, estimate[arrived], arrived)
            arrived += 1
        while head > 0 if shortest == 1 else head < arrived:
            job = waiting[0] if shortest == 1 else head
            end = place(board, gang[job], rule, nodes, counts, used)
            if end == used:
                break
            if shortest == 1:
                head = pop(waiting_keys, waiting, head)
            else:
                head += 1
            at = stays * WIDTH
            rows[at + JOB], rows[at + START], rows[at + END] = job, time, time + duration[job]
            rows[at + RESTART], rows[at + GPUS], rows[at + PARTS] = 0, gang[job], used
            rows[at + WORK_DONE] = work[job]
            running = push(keys, values, running, time + duration[job], stays)
            stays += 1
            used = end
    state[_STAYS], state[_USED] = stays, used
    return 1
