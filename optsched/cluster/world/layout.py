"""How the state of a simulated cluster is packed: columns of integer arrays, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from numba import types

from optsched.kernels.compile import INTS, READ

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from optsched.model.schedule import IntArray

    Table = npt.NDArray[np.int64]

# one number each: `World.state`
TIME: Final = 0
"""The instant whose events have been applied; -1 before the first."""
ARRIVALS: Final = 1
"""Jobs before this one have arrived."""
ACTIVE: Final = 2
"""Length of `World.active`."""
UNFINISHED: Final = 3
RUNNING_NOW: Final = 4
"""Jobs that run, which is the length of `World.heap`."""
CHANGES: Final = 5
"""Rows of `World.change` before this one have happened."""
EVENTS: Final = 6
"""Length of `World.event`."""
LOG_ROWS: Final = 7
LOG_NODES: Final = 8
SPARE: Final = 9
"""First unused row of `World.held`."""
FREE_GPUS: Final = 10
"""Free GPUs of all nodes that take work."""
FREE_ZERO: Final = 11
"""Free zero-slot units of all nodes that take work."""
WAKE: Final = 12
"""Ask the policy then at the latest; -1: no wish. The caller of `advance` sets it."""
ROUND: Final = 13
RESTART: Final = 14
PASS_ONLY: Final = 15
"""1: sizes > 0 change at the ends of passes only."""
LOSES_PASS: Final = 16
"""1: a stop loses the open pass."""
BEST_EFFORT: Final = 17
ORDERED: Final = 18
"""1: `World.order` says in which order jobs are placed."""
NAMED: Final = 19
"""1: `World.named_ptr`, `World.named` hold chosen nodes."""
SHARING: Final = 20
"""1: `World.share` is to be read."""
AT: Final = 21
"""After a refusal: the position of the active job."""
ABOUT: Final = 22
"""After a refusal: the number that the message tells."""
BESIDE: Final = 23
"""After a refusal: the other number."""
IDLE: Final = 24
"""Times in a row that the policy was asked though nothing ran and only its own wish was left."""
VERSION: Final = 25
"""Counts the changes of the set of active jobs."""
HORIZON: Final = 26
"""No event may lie behind it."""
LATE: Final = 27
"""1: an end is seen a unit of time late, and what is left of a restart is owed (Lucid)."""
CONSOLIDATED: Final = 28
"""1: jobs are placed as by Lucid's simulator, on nodes of `LUCID_NODE` GPUs."""
LISTED: Final = 29
"""Rows of `World.active` in use: some may have ended since it was tidied."""
STATE: Final = 30

LUCID_NODE: Final = 8

# what never changes about a job: `World.given`
SUBMIT: Final = 0
WORK_TOTAL: Final = 1
PASS_WORK: Final = 2
FIRST_SIZE: Final = 3
END_SIZE: Final = 4
"""Its sizes, ascending: ``World.size[FIRST_SIZE:END_SIZE]``, the speeds beside them."""
COST: Final = 5
"""Restart cost, that of the simulation put in."""
PREEMPTIBLE: Final = 6
GROUP: Final = 7
BELIEVED: Final = 8
GIVEN: Final = 9

# what changes: `World.job`, by groups of eight that are used together (lines of the cache)
PHASE: Final = 0
GPUS: Final = 1
LEAVES: Final = 2
"""Scratch of `apply`: bits for leaving and coming; 0 outside it."""
SLOT: Final = 3
"""Row of the running job in `World.heap`; -1 for one that does not run."""
PASS_END: Final = 4
"""When the last pass ended; -1 if none did."""
DONE: Final = 5
"""Work done until `SINCE`; now it is done + rate * max(0, now - since), see `done_now`."""
RATE: Final = 6
SINCE: Final = 7
"""When progress at `RATE` began: in the future while the job restarts."""
PASSES: Final = 8
STARTS: Final = 9
FIRST_START: Final = 10
ENTERED: Final = 11
ATTAINED: Final = 12
"""GPU-time of closed stays; now it is attained + gpus * (now - stay)."""
STAY: Final = 13
"""Start of the open stay."""
KEPT: Final = 14
"""Work that a lost node leaves: that of the last end of a pass or stop."""
PREEMPTED: Final = 15
NEXT: Final = 16
"""Of a running job: its next end of a pass or of all work."""
ROW: Final = 17
"""Row of its open stay in `World.log`; -1 for a job that does not run."""
STAY_DONE: Final = 18
"""Work done at the start of the stay."""
HELD: Final = 19
"""First row in `World.held`; -1: none."""
PARTNER: Final = 20
"""The job that shares its GPUs; -1: none. Of a hidden job: the next hidden one of its group."""
ALONE: Final = 21
"""Speed at its size without contention."""
FINISHED: Final = 22
OWED: Final = 23
"""What was left of the last restart when it was stopped, if ``state[LATE]``."""
JOB: Final = 24

# `PHASE`
UNBORN: Final = 0
HIDDEN: Final = 1
"""Arrived, but its group shows only its first unfinished jobs."""
PENDING: Final = 2
RUNS: Final = 3
ENDED: Final = 4

# `World.node`
FREE: Final = 0
"""Free GPUs, also those of a node that takes no work."""
CAPACITY: Final = 1
FREE_UNITS: Final = 2
UNITS: Final = 3
TAKES: Final = 4
"""1: the node takes work; 0: it is drained, removed, or not yet added."""
NODE: Final = 5

# `World.held`, lists of what a job holds; `World.group`; `World.change`
WHERE: Final = 0
COUNT: Final = 1
FOLLOWING: Final = 2
"""Next row of the job; -1 behind the last."""

LIMIT: Final = 0
"""Most jobs of the group that are shown; -1: all."""
SHOWN: Final = 1
HEAD: Final = 2
TAIL: Final = 3
"""First and last hidden job; the next hidden one is in `PARTNER`."""

WHEN: Final = 0
WHICH: Final = 1
KIND: Final = 2
ADD: Final = 0
DRAIN: Final = 1
REMOVE: Final = 2

# `World.event`: what happened at this instant (kind, job)
COMPLETED: Final = 0
PASSED: Final = 1
LOST: Final = 2
"""Its node was removed: it is pending again."""
ARRIVED: Final = 3
"""Has become visible."""

# `World.log`, one row per stay
LOG_JOB: Final = 0
LOG_START: Final = 1
LOG_END: Final = 2
LOG_RESTART: Final = 3
LOG_GPUS: Final = 4
LOG_HALF: Final = 5
LOG_WORK: Final = 6
LOG_FIRST: Final = 7
"""First row in `World.log_node` (node, count), nodes ascending."""
LOG_END_NODE: Final = 8
LOG_PARTNER: Final = 9
"""Row of the stay on whose GPUs it was put; -1."""
LOG: Final = 10

# answers of `advance`
ASK: Final = 0
"""Something happened and jobs are active: the policy is to be asked."""
FINISHED_ALL: Final = 1
STALLED: Final = 2
NO_ROOM: Final = 3
"""The log may not hold another instant: `grown`, and call again."""
TOO_LATE: Final = 4
"""The next event lies behind the horizon."""

# answers of `apply`: the rule that a decision breaks (nothing has been changed then)
LEGAL: Final = 0
SIZE: Final = 1
NOT_PREEMPTIBLE: Final = 2
MID_PASS: Final = 3
TOO_MANY: Final = 4
"""More GPUs (or zero-slot units) than there are."""
UNKNOWN_NODE: Final = 5
NODE_SUM: Final = 6
"""Named nodes do not sum up to the quota."""
NODE_FULL: Final = 7
SHARE: Final = 8
"""A partner that does not run alone on as many GPUs."""
ORDER: Final = 9


class World(NamedTuple):
    """All of a simulation under way; every array is C-contiguous int64.

    Compiled loops take it as one argument of type `WORLD`. Jobs are numbers in the workload.
    """

    state: IntArray
    """Single numbers, shape (STATE,)."""
    given: Table
    """(jobs, GIVEN), read-only."""
    size: IntArray
    """Read-only; the row of a zero-slot task is (0,)."""
    rate: IntArray
    """Read-only: speed at every size."""
    job: Table
    """(jobs, JOB)."""
    active: IntArray
    """``active[:state[ACTIVE]]``: visible jobs that have arrived and not ended, ascending; after
    `step`, before `tidy`, some that have ended may stand between them."""
    heap: Table
    """(jobs, 2): next event and job of every running job, least first."""
    node: Table
    """(nodes, NODE)."""
    held: Table
    """(pool, 3): where jobs run; see `HELD`, `FOLLOWING`."""
    group: Table
    """(groups, 4)."""
    change: Table
    """(changes, 3) by time; read-only."""
    event: Table
    """``event[:state[EVENTS]]``: kind and job, for what happened at this instant."""
    quota: IntArray
    """Decision: GPUs by *position* in `active`; 0 = it does not run, -1 runs a zero-slot task."""
    order: IntArray
    """Decision: positions in order of placement, if ``state[ORDERED]``."""
    named_ptr: IntArray
    named: Table
    """Decision, if ``state[NAMED]``: chosen (node, GPUs) by position; an empty row: best fit."""
    present: Table
    """(6, jobs): what `optsched.cluster.world.columns.turn` fills."""
    share: IntArray
    """Decision, if ``state[SHARING]``: position of the job whose GPUs are shared; -1."""
    log: Table
    """(capacity, LOG)."""
    log_node: Table
    """(capacity, 2)."""


INTS2: Final = types.Array(types.int64, 2, "C")
READ2: Final = types.Array(types.int64, 2, "C", readonly=True)

WORLD: Final[Any] = types.NamedTuple(
    [INTS, READ2, READ, READ, INTS2, INTS, INTS2, INTS2, INTS2, INTS2, READ2, INTS2,
     INTS, INTS, INTS, INTS2, INTS2, INTS, INTS2, INTS2],
    World,
)  # fmt: skip
"""Type of a `World` in the signatures of kernels."""
