"""How the state of a simulated cluster is packed: records of integers, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.kernels.compile import record

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray

    FloatArray = npt.NDArray[np.float64]
    Table = npt.NDArray[np.int64]
    Records = npt.NDArray[np.void]

# `World`'s records

STATE: Final = record(
    "time arrivals active unfinished running_now changes log_rows log_nodes free_gpus wake round "
    "pass_only loses_pass best_effort decided ordered named sharing at about other idle version "
    "horizon columns clairvoyant"
)
"""One row of single numbers.

`time`: the instant whose events have been applied, -1 before the first. `arrivals`, `changes`:
jobs and rows of `World.change` before this one have come. `active`: length of `World.active`.
`running_now`: length of `World.heap`. `free_gpus`: of all nodes that take work. `wake`: the policy
decides then at the latest; -1: at the next event. `pass_only`: sizes > 0 change at the ends of
passes only. `loses_pass`: a stop loses the open pass. `decided`: `World.quota` and its companions
are a decision that `turn` has to apply. `ordered`: length of the order in `World.order`; `named`,
`sharing`: whether `World.named`, `share` are to be read. `at`, `about`, `other`: after a refusal,
the position of the job and the numbers of the message. `idle`: decisions in a row while no job ran
and only a wake-up was left. `version` counts the changes of the set of active jobs. `horizon`:
latest time of an event. `columns`: rows of `World.present` that are kept up to date, as bits;
`clairvoyant`: with true work.
"""

GIVEN: Final = record(
    "submit work_total pass_work first_size end_size first_seen end_seen cost preemptible group "
    "priority template weight estimate kind kinds"
)
"""What never changes about a job. Its sizes: ``World.size[first_size:end_size]``, ascending, the
speeds beside them; ``World.observed[first_seen:end_seen]``; `cost` of a restart; `weight`: bits of
a float; `kind`: row and column of `World.pair`, and how many."""

JOB: Final = record(
    "phase gpus leaves slot pass_end done rate since passes starts first_start entered attained "
    "stay kept preempted next row stay_done unit partner alone"
)
"""What changes.

`leaves`: scratch of `apply`, 0 outside it. `slot`: row of a running job in `World.heap`, -1 for
one that does not run. `pass_end`: when the last pass ended, -1 if none did. `done`: work done
until `since`; now it is done + rate * max(0, now - since). `since`: when progress at `rate`
began, in the future while the job restarts. `attained`: GPU-time of closed stays; now it is
attained + gpus * (now - stay). `stay`: start of the open stay, `stay_done` the work done then.
`kept`: work that a lost node leaves: that of the last end of a pass or stop. `next`: of a running
job its next end of a pass or of all work. `row`: of its open stay in `World.log`, which says what
nodes it holds; -1. `unit`: node of a running zero-slot task. `partner`: the job that shares its
GPUs; -1; of a hidden job the next hidden one of its group. `alone`: speed at its size without a
partner.
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
GROUP: Final = record("limit visible head tail")
"""Most jobs that are visible (-1: all), how many are, first and last hidden one."""
CHANGE: Final = record("when which kind")
ADD: Final = 0
DRAIN: Final = 1
REMOVE: Final = 2
LOG: Final = record("job start end restart gpus half work first end_node partner")
"""One row per stay: its rows ``first:end_node`` of `World.log_node` (node, count), nodes ascending;
`partner`: row of the stay on whose GPUs it was put; -1."""

# answers of `advance`
DECIDE: Final = 0
"""Something happened and jobs are active: the policy is to decide."""
FINISHED_ALL: Final = 1
STALLED: Final = 2
LOG_FULL: Final = 3
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

    Kernels take its `address`, and have it as a `WORLD` by `at`. Jobs are numbers in the workload.
    """

    state: Records
    """`STATE`, one row."""
    given: Records
    """`GIVEN` of every job; read-only."""
    size: IntArray
    """Read-only; the row of a zero-slot task is (0,)."""
    rate: IntArray
    """Read-only: speed at every size; with `supply`, then that on every type of GPU."""
    observed: FloatArray
    """Uncertainty after every pass of every job; read-only."""
    job: Records
    """`JOB`."""
    active: IntArray
    """``active[:state.active]``: visible jobs that have arrived and not ended, ascending."""
    assigned: IntArray
    """GPUs of every active job by *position* in `active`; -1 for a running zero-slot task."""
    heap: Table
    """Next event and job of every running job, least first."""
    node: Records
    """`NODE`."""
    supply: Table
    """Of every node: block of `rate` for its type of GPU; free CPUs and memory, in thousandths.
    Without rows GPUs alone bound where jobs run; with them a job without room stays pending."""
    demand: Table
    """CPUs and memory by GPU of every job, likewise; read-only."""
    group: Records
    """`GROUP`."""
    change: Records
    """`CHANGE` by time; read-only."""
    pair: Table
    """Speeds in millionths of a job that joins another one on its GPUs, and of that one, by kind
    times number of kinds plus kind there; 0: not measured. Read-only."""
    quota: IntArray
    """Decision: GPUs by *position* in `active`; 0 = it does not run, -1 runs a zero-slot task."""
    order: IntArray
    """Decision: ``order[:state.ordered]``: positions in order of placement; others follow."""
    named_ptr: IntArray
    named: Table
    """Decision, if ``state.named``: chosen (node, GPUs) by position; an empty row: best fit."""
    changed: IntArray
    """Scratch of `apply`: positions of which the decision changes something."""
    share: IntArray
    """Decision, if ``state.sharing``: position of the job that shares its GPUs; -1."""
    finished: IntArray
    """When every job ended; -1 before."""
    present: Table
    """Rows `PRESENT` of the active jobs; bit k of ``state.columns``: row k is kept up to date."""
    log: Records
    """`LOG`."""
    log_node: Table
    """Node and GPUs of stays."""
    table: IntArray
    """Address and number of rows of each array, as kernels read it; made by `addressed`."""
    address: int
    """Where `table` lies."""


PRESENT: Final = (
    "gpus", "running", "done", "remaining", "at_pass_end", "passes", "starts", "first_start",
    "entered", "attained", "partner",
)  # fmt: skip
"""Columns of a `ClusterView` that change from instant to instant."""

WHOLE: Final = 0
HALF_A: Final = 1
HALF_B: Final = 2
"""`LOG.half`: the job has its GPUs alone, or one half of each."""


def _columns(record: np.dtype[np.void]) -> tuple[str, ...]:
    return tuple(record.names or ())


ARRAYS: Final[dict[str, tuple[str, ...]]] = {
    "state": _columns(STATE), "given": _columns(GIVEN), "size": (), "rate": (), "observed": (),
    "job": _columns(JOB), "active": (), "assigned": (), "heap": ("time", "job"),
    "node": _columns(NODE), "supply": ("block", "cpus", "memory"), "demand": ("cpus", "memory"),
    "group": _columns(GROUP), "change": _columns(CHANGE), "pair": ("joining", "host"),
    "quota": (), "order": (), "named_ptr": (), "named": ("node", "gpus"), "changed": (),
    "share": (), "finished": (), "present": (), "log": _columns(LOG), "log_node": ("node", "gpus"),
}  # fmt: skip
"""Names of the columns of every array of a `World` in kernels; none: it holds bare integers."""


def addressed(w: World) -> World:
    """The same with the addresses of its present arrays, as `at` reads them."""
    rows = []
    for name, columns in ARRAYS.items():
        array = getattr(w, name)
        width = 8 * max(1, len(columns))
        if array.dtype.itemsize not in (8, width) or not array.flags.c_contiguous:
            raise TypeError(f"World.{name}: {array.dtype}")
        rows += [array.ctypes.data, array.nbytes // width]
    table = np.array(rows, np.int64)
    return w._replace(table=table, address=int(table.ctypes.data))


def frozen(array: Any) -> Any:
    """The same, C-contiguous and read-only, as kernels take it."""
    array = np.ascontiguousarray(array)
    array.setflags(write=False)
    return array
