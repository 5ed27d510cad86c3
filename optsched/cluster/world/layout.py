"""How the state of a simulated cluster is packed: records of integers, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from numba import types

from optsched.kernels.compile import INTS, READ, record, records

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from optsched.model.schedule import IntArray

    Table = npt.NDArray[np.int64]
    Records = npt.NDArray[np.void]

# `World`'s records

STATE: Final = record(
    "time arrivals active unfinished running_now changes events log_rows log_nodes spare free_gpus "
    "free_zero wake round restart pass_only loses_pass best_effort ordered named sharing at about "
    "beside idle version horizon late consolidated listed decided columns clairvoyant"
)
"""One row of single numbers.

`time`: the instant whose events have been applied, -1 before the first. `arrivals`, `changes`:
jobs and rows of `World.change` before this one have come. `active`: length of `World.active`,
`listed`: with those that have ended since it was tidied. `running_now`: length of `World.heap`.
`events`: of `World.event`. `spare`: first unused row of `World.held`. `free_gpus`, `free_zero`:
of all nodes that take work. `wake`: ask the policy then at the latest (-1: no wish; the caller of
`advance` sets it). `pass_only`: sizes > 0 change at the ends of passes only. `loses_pass`: a stop
loses the open pass. `ordered`: length of the order in `World.order`; `named`, `sharing`: whether
`World.named`, `share` are to be read. `at`, `about`, `beside`: after a refusal, the position of
the job and the numbers of the message. `idle`: decisions in a row while no job ran and only the
policy's `wake` was left. `version` counts the changes of the set of active jobs. `horizon`: no
event may lie behind it. `late`: an end is seen a unit of time late, and what is left of a restart
is owed (Lucid). `consolidated`: jobs are placed on nodes of `LUCID_NODE` GPUs as by Lucid.
`decided`: `World.quota` and its companions are a decision that `turn` has to apply.
`columns`: rows of `World.present` that `turn` fills, as bits; `clairvoyant`: with true work.
"""

LUCID_NODE: Final = 8

GIVEN: Final = record(
    "submit work_total pass_work first_size end_size cost preemptible group estimate"
)
"""What never changes about a job. Its sizes: ``World.size[first_size:end_size]``, ascending, the
speeds beside them; `cost` of a restart, that of the simulation put in."""

JOB: Final = record(
    "phase gpus leaves slot pass_end done rate since passes starts first_start entered attained "
    "stay kept preempted next row stay_done held partner alone finished owed"
)
"""What changes, by groups of eight that are used together (lines of the cache).

`leaves`: scratch of `apply`, 0 outside it. `slot`: row of a running job in `World.heap`, -1 for
one that does not run. `pass_end`: when the last pass ended, -1 if none did. `done`: work done
until `since`; now it is done + rate * max(0, now - since). `since`: when progress at `rate`
began, in the future while the job restarts. `attained`: GPU-time of closed stays; now it is
attained + gpus * (now - stay). `stay`: start of the open stay, `stay_done` the work done then.
`kept`: work that a lost node leaves: that of the last end of a pass or stop. `next`: of a running
job its next end of a pass or of all work. `row`: of its open stay in `World.log`; -1. `held`: its
first row in `World.held`; -1. `partner`: the job that shares its GPUs; -1; of a hidden job the
next hidden one of its group. `alone`: speed at its size without contention. `owed`: what was left
of the last restart when it was stopped, if ``state.late``.
"""

# `JOB.phase`
UNBORN: Final = 0
HIDDEN: Final = 1
"""Arrived, but its group shows only its first unfinished jobs."""
PENDING: Final = 2
RUNS: Final = 3
ENDED: Final = 4

NODE: Final = record("free capacity free_units units takes")
"""`free`: also of a node that takes no work. `takes`: 1; 0 if it is drained, removed, or not yet
added."""
HELD: Final = record("where count following")
"""GPUs of a node that a job holds; `following`: its next row, -1 behind the last."""
GROUP: Final = record("limit shown head tail")
"""Most jobs that are shown (-1: all), how many are, first and last hidden one."""
CHANGE: Final = record("when which kind")
ADD: Final = 0
DRAIN: Final = 1
REMOVE: Final = 2
LOG: Final = record("job start end restart gpus half work first end_node partner")
"""One row per stay: its rows ``first:end_node`` of `World.log_node` (node, count), nodes ascending;
`partner`: row of the stay on whose GPUs it was put; -1."""

# `World.event`: what happened at this instant (kind, job)
COMPLETED: Final = 0
PASSED: Final = 1
LOST: Final = 2
"""Its node was removed: it is pending again."""
ARRIVED: Final = 3
"""Has become visible."""

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
    """All of a simulation under way; every array is C-contiguous, of int64 or records of them.

    Compiled loops take it as one argument of type `WORLD`. Jobs are numbers in the workload.
    """

    state: Records
    """`STATE`, one row."""
    given: Records
    """`GIVEN` of every job; read-only."""
    size: IntArray
    """Read-only; the row of a zero-slot task is (0,)."""
    rate: IntArray
    """Read-only: speed at every size; with `supply`, then that on every type of GPU."""
    job: Records
    """`JOB`."""
    active: IntArray
    """``active[:state.active]``: visible jobs that have arrived and not ended, ascending; after
    `step`, before `tidy`, some that have ended may stand between them."""
    heap: Table
    """(jobs, 2): next event and job of every running job, least first."""
    node: Records
    """`NODE`."""
    supply: Table
    """(nodes, 3): block of `rate` for its type of GPU; free CPUs and memory, in thousandths.
    Without rows GPUs alone bound where jobs run; with them a job without room stays pending."""
    demand: Table
    """(jobs, 2): CPUs and memory by GPU, likewise; read-only."""
    held: Records
    """`HELD`: where jobs run."""
    group: Records
    """`GROUP`."""
    change: Records
    """`CHANGE` by time; read-only."""
    event: Table
    """``event[:state.events]``: kind and job, for what happened at this instant."""
    quota: IntArray
    """Decision: GPUs by *position* in `active`; 0 = it does not run, -1 runs a zero-slot task."""
    order: IntArray
    """Decision: ``order[:state.ordered]``: positions in order of placement; others follow."""
    named_ptr: IntArray
    named: Table
    """Decision, if ``state.named``: chosen (node, GPUs) by position; an empty row: best fit."""
    present: Table
    """(11, jobs): what `optsched.cluster.world.columns.turn` fills."""
    share: IntArray
    """Decision, if ``state.sharing``: position of the job whose GPUs are shared; -1."""
    log: Records
    """`LOG`."""
    log_node: Table
    """(capacity, 2)."""


INTS2: Final = types.Array(types.int64, 2, "C")

READ2: Final = types.Array(types.int64, 2, "C", readonly=True)

WORLD: Final[Any] = types.NamedTuple(
    [records(STATE), records(GIVEN, readonly=True), READ, READ, records(JOB), INTS, INTS2,
     records(NODE), INTS2, READ2, records(HELD), records(GROUP), records(CHANGE, readonly=True),
     INTS2, INTS, INTS, INTS, INTS2, INTS2, INTS, records(LOG), INTS2],
    World,
)  # fmt: skip
"""Type of a `World` in the signatures of kernels."""
