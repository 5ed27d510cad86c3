"""How the state of a simulated cluster is packed: records of integers, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from llvmlite.ir import IntType
from numba import types
from numba.core.cgutils import pointer_add
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numba.np.numpy_support import as_dtype

from optsched.kernels.compile import INT, INTS, READ, record, records

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray

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
    "submit work_total pass_work first_size end_size cost preemptible group estimate kind kinds"
)
"""What never changes about a job. Its sizes: ``World.size[first_size:end_size]``, ascending, the
speeds beside them; `cost` of a restart; `kind`: row and column of `World.pair`, and how many."""

JOB: Final = record(
    "phase gpus leaves slot pass_end done rate since passes starts first_start entered attained "
    "stay kept preempted next row stay_done unit partner alone finished"
)
"""What changes.

`leaves`: scratch of `apply`, 0 outside it. `slot`: row of a running job in `World.heap`, -1 for
one that does not run. `pass_end`: when the last pass ended, -1 if none did. `done`: work done
until `since`; now it is done + rate * max(0, now - since). `since`: when progress at `rate`
began, in the future while the job restarts. `attained`: GPU-time of closed stays; now it is
attained + gpus * (now - stay). `stay`: start of the open stay, `stay_done` the work done then.
`kept`: work that a lost node leaves: that of the last end of a pass or stop. `next`: of a running
job its next end of a pass or of all work. `row`: of its open stay in `World.log`, whose nodes it
holds; -1. `unit`: node of a running zero-slot task. `partner`: the job that shares its GPUs; -1;
of a hidden job the next hidden one of its group. `alone`: speed at its size without a partner.
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
    job: Records
    """`JOB`."""
    active: IntArray
    """``active[:state.active]``: visible jobs that have arrived and not ended, ascending."""
    assigned: IntArray
    """GPUs of every active job by *position* in `active`; -1 for a running zero-slot task."""
    heap: Table
    """(jobs, 2): next event and job of every running job, least first."""
    node: Records
    """`NODE`."""
    supply: Table
    """(nodes, 3): block of `rate` for its type of GPU; free CPUs and memory, in thousandths.
    Without rows GPUs alone bound where jobs run; with them a job without room stays pending."""
    demand: Table
    """(jobs, 2): CPUs and memory by GPU, likewise; read-only."""
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
    present: Table
    """(11, jobs): columns that policies see, see `optsched.cluster.world.columns`."""
    changed: IntArray
    """Scratch of `apply`: positions of which the decision changes something."""
    share: IntArray
    """Decision, if ``state.sharing``: position of the job whose GPUs are shared; -1."""
    log: Records
    """`LOG`."""
    log_node: Table
    """(capacity, 2)."""
    table: IntArray
    """Where these arrays lie, as kernels read it; made by `addressed`."""
    address: int
    """Where `table` lies."""


WHOLE: Final = 0
HALF_A: Final = 1
HALF_B: Final = 2
"""`LOG.half`: the job has its GPUs alone, or one half of each."""

INTS2: Final = types.Array(types.int64, 2, "C")

READ2: Final = types.Array(types.int64, 2, "C", readonly=True)

_FIELDS: Final[dict[str, Any]] = {
    "state": records(STATE), "given": records(GIVEN, readonly=True), "size": READ, "rate": READ,
    "job": records(JOB), "active": INTS, "assigned": INTS, "heap": INTS2, "node": records(NODE),
    "supply": INTS2, "demand": READ2, "group": records(GROUP),
    "change": records(CHANGE, readonly=True), "pair": READ2, "quota": INTS, "order": INTS,
    "named_ptr": INTS, "named": INTS2, "present": INTS2, "changed": INTS, "share": INTS,
    "log": records(LOG), "log_node": INTS2,
}  # fmt: skip
"""Types of the arrays of a `World` for kernels."""


def addressed(w: World) -> World:
    """The same with the addresses of its present arrays, as `at` reads them."""
    rows = []
    for name, kind in _FIELDS.items():
        array = getattr(w, name)
        same = array.ndim == kind.ndim and array.dtype == as_dtype(kind.dtype)
        if not same or not array.flags.c_contiguous:
            raise TypeError(f"World.{name}: {array.dtype}")
        rows += [array.ctypes.data, *array.shape]
    table = np.array(rows, np.int64)
    return w._replace(table=table, address=int(table.ctypes.data))


class _Kind(types.Opaque):
    """A `World` in kernels: the address of its table."""


WORLD: Final = _Kind(f"World of data and shapes ({_FIELDS})")
register_default(_Kind)(models.OpaqueModel)


def _at(_typing, address):  # type: ignore[no-untyped-def]
    """The world whose table has this address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(WORLD))

    return WORLD(INT), generate


at: Final[Any] = intrinsic(_at)


@infer_getattr
class _Attributes(AttributeTemplate):
    key = _Kind

    def generic_resolve(self, _kind: Any, name: str) -> Any:  # type: ignore[override]
        return _FIELDS.get(name)


@lower_getattr_generic(_Kind)  # type: ignore[untyped-decorator]
def _read(context: Any, builder: Any, _kind: Any, pointer: Any, name: str) -> Any:
    """Load an array of the world."""
    kind = _FIELDS[name]
    before = list(_FIELDS)[: list(_FIELDS).index(name)]
    place = sum(1 + _FIELDS[one].ndim for one in before)
    fields = []
    for k in range(1 + kind.ndim):
        at_field = pointer_add(builder, pointer, 8 * (place + k), IntType(64).as_pointer())
        fields.append(builder.load(at_field))
        # so that loops need not load it again after they have written to an array
        fields[k].set_metadata("invariant.load", builder.module.add_metadata([]))
    array = make_array(kind)(context, builder)
    size = IntType(64)(as_dtype(kind.dtype).itemsize)
    strides = [size] if kind.ndim == 1 else [builder.mul(size, fields[2]), size]
    data = builder.inttoptr(fields[0], array.data.type)
    populate_array(array, data=data, shape=fields[1:], strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()
