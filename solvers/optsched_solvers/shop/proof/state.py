"""A graph as arrays for tree search: who may precede whom, windows, and a trail to take back.

For every ordered pair of operations on one machine there is a *literal*, "the first before the
second"; the literal of the opposite order is its *negation*. A machine's users have *slots*,
numbered machine by machine, so that an operation of several machines has several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import INTS
from optsched.model import bounds
from optsched_solvers.shop.proof.edge_finding import FAR, TABLE
from optsched_solvers.shop.proof.symmetry_order import ordered_alike

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray, Schedule

    SmallArray = npt.NDArray[np.int8]
    FloatArray = npt.NDArray[np.float64]

MOST_LITERALS: Final = 1_000_000
"""Ordered pairs of operations that share a machine; more would fill the memory."""

# rows of Arrays.op; EST and LST are earliest and latest start
(
    EST, LST, EST_LEVEL, LST_LEVEL, QUEUED, QUEUE, DURATION, AFTER_PTR, BEFORE_PTR, SLOT_PTR,
    OP_ROWS,
) = range(11)  # fmt: skip
# rows of Arrays.arc: other end and start-to-start weight, by tail and by head
AFTER_OP, AFTER_WEIGHT, BEFORE_OP, BEFORE_WEIGHT = range(4)
# rows of Arrays.slot; SLOT_OPEN: open pairs, LENGTH: duration and setup time lost in any case
(
    OPERATION, LENGTH, WORKSPACE, MACHINE, BY_HEAD, BY_DEADLINE, SLOT_OF, SLOT_OPEN, SLOT_ROWS,
) = range(9)  # fmt: skip
# rows of Arrays.machine
(
    FIRST, SIZE, MATRIX, PAIRS, SETUPS, MEMORY, PART, PART_END, N_OPEN, IN_LIGHT, IN_HEAVY, LIGHT,
    HEAVY, MACHINE_ROWS,
) = range(14)  # fmt: skip
# rows of Arrays.literal; BEFORE and AFTER are slots, GAP the least time between the two starts
NEGATION, BEFORE, AFTER, ON, GAP, OPEN, PLACE, FRESH, WATCHED, LITERAL_ROWS = range(10)
# values of literals
TRUE, FALSE = 1, 2
# rows of Arrays.part
HOLDER, FREER, BYTES = range(3)
# rows of Arrays.entry: literal, trail mark (-1 for a refuted decision), level, target then
DECISION, MARK, LEVEL_OF, TARGET_OF = range(4)
# places in Arrays.number
(
    TRAIL, LEVEL, LEVELS, QUEUE_HEAD, QUEUE_SIZE, FRESH_HEAD, FRESH_SIZE, LIGHT_HEAD, LIGHT_SIZE,
    HEAVY_HEAD, HEAVY_SIZE, N_PAIRS, ENTRIES, TARGET, NODES, FAILURES, RESTART_AT, NOGOODS,
    NOGOOD_LITERALS, ROOT_TARGET, CURSOR, CURSOR_END, PROBE, STEP, GOOD, FAILED, NUMBERS,
) = range(27)  # fmt: skip


class Arrays(NamedTuple):
    """One problem and one search; int64 tables of the rows named above, few of them for speed."""

    op: IntArray
    arc: IntArray
    slot: IntArray
    machine: IntArray
    literal: IntArray
    part: IntArray  # bytes on a machine, places of holder and freer there (-1: nobody)
    value: SmallArray  # per literal: 0 open, TRUE, FALSE
    trail: IntArray  # what changed, old value
    entry: IntArray  # the path from the root
    rating: FloatArray  # per literal
    average: FloatArray  # sum and count of local ratings, per depth
    nogood: IntArray  # literals that are not all true; the first two are watched
    nogood_ptr: IntArray
    next_watch: IntArray  # per watch 2k, 2k+1 of nogood k
    scratch: IntArray
    number: IntArray


ARRAYS: Final[Any] = types.NamedTuple(
    (
        TABLE, TABLE, TABLE, TABLE, TABLE, TABLE, types.Array(types.int8, 1, "C"), TABLE,
        TABLE, types.Array(types.float64, 1, "C"), types.Array(types.float64, 2, "C"), INTS, INTS,
        INTS, TABLE, INTS,
    ),
    Arrays,
)  # fmt: skip


def n_literals(graph: Schedule) -> int:
    """Ordered pairs of operations that share a machine."""
    sizes = np.diff(graph.users.indptr)
    return int((sizes * sizes).sum())


def arrays(graph: Schedule) -> Arrays:
    """A fresh state: releases as heads, nothing decided, no target; gangs have pairs everywhere."""
    n, slots = graph.n_operations, len(graph.users.ids)
    slot = np.zeros((SLOT_ROWS, slots), np.int64)
    machine = _machines(graph)
    _fill_slots(graph, slot, machine)
    op = np.zeros((OP_ROWS, n + 1), np.int64)
    op[EST, :n], op[DURATION, :n] = graph.release, graph.duration
    op[EST_LEVEL] = op[LST_LEVEL] = -1
    op[AFTER_PTR], op[BEFORE_PTR] = graph.successors.indptr, graph.predecessors.indptr
    op[SLOT_PTR, 1:] = np.cumsum(np.bincount(graph.users.ids, minlength=n))
    arc = np.stack(
        [
            graph.successors.other, graph.successors.weight,
            graph.predecessors.other, graph.predecessors.weight,
        ]
    )  # fmt: skip
    literal = _literals(graph, machine, slot[LENGTH])
    literals, pairs = literal.shape[1], int(machine[N_OPEN].sum())
    number = np.zeros(NUMBERS, np.int64)
    number[N_PAIRS] = pairs
    part = _parts(graph, machine)
    return Arrays(
        op, np.ascontiguousarray(arc), slot, machine, literal, part, np.zeros(literals, np.int8),
        np.zeros((2, 1 << 14), np.int64), np.zeros((4, 64), np.int64), np.ones(literals),
        np.zeros((2, pairs + 2)), np.zeros(0, np.int64), np.zeros(2, np.int64),
        np.zeros(0, np.int64), np.zeros((10, int(machine[SIZE].max(initial=0)) + 1), np.int64),
        number,
    )  # fmt: skip


def root_orders(graph: Schedule, machine: IntArray) -> IntArray:
    """Literals that every schedule (of one representative of symmetric ones) has true."""
    found: list[IntArray] = []
    reach = _reachable(graph)
    place = []
    for r in range(graph.n_resources):
        on = graph.users[r]
        a, b = np.nonzero(reach[np.ix_(on, on)])
        found.append(machine[MATRIX, r] + a * len(on) + b)
        place.append({i: k for k, i in enumerate(on.tolist())})
    chosen = [
        int(machine[MATRIX, r]) + place[r][i] * len(place[r]) + place[r][k]
        for i, k in ordered_alike(graph)
        for r in graph.op_resources[i].tolist()
    ]
    return np.concatenate([*found, np.array(chosen, np.int64)])


def latest_starts(graph: Schedule, target: int) -> IntArray:
    """Of schedules that end by target, before any propagation."""
    return np.minimum(target, graph.deadline) - graph.duration


def _machines(graph: Schedule) -> IntArray:
    machine = np.zeros((MACHINE_ROWS, graph.n_resources + 1), np.int64)
    if graph.n_resources:
        sizes = np.diff(graph.users.indptr)
        pairs = sizes * (sizes - 1) // 2
        machine[FIRST, :-1], machine[SIZE, :-1] = graph.users.indptr[:-1], sizes
        machine[MATRIX, :-1] = np.cumsum(sizes * sizes) - sizes * sizes
        machine[PAIRS, :-1], machine[N_OPEN, :-1] = np.cumsum(pairs) - pairs, pairs
        machine[MEMORY, :-1] = np.where(graph.memory == 0, FAR, graph.memory)
    return machine


def _fill_slots(graph: Schedule, slot: IntArray, machine: IntArray) -> None:
    users, sizes = graph.users, machine[SIZE, :-1]
    losses = bounds.setup_loss(graph)
    slot[OPERATION] = users.ids
    slot[LENGTH] = graph.duration[users.ids]
    if losses:
        slot[LENGTH] += np.concatenate(losses)
    slot[WORKSPACE] = graph.workspace[users.ids]
    slot[MACHINE] = np.repeat(np.arange(graph.n_resources), sizes)
    slot[BY_HEAD] = np.arange(len(users.ids)) - np.repeat(machine[FIRST, :-1], sizes)
    slot[BY_DEADLINE] = slot[BY_HEAD]
    slot[SLOT_OPEN] = np.repeat(sizes - 1, sizes)
    slot[SLOT_OF] = np.argsort(users.ids, kind="stable")


def _literals(graph: Schedule, machine: IntArray, length: IntArray) -> IntArray:
    literal = np.zeros((LITERAL_ROWS, n_literals(graph)), np.int64)
    for r in range(graph.n_resources):
        n, at, first = machine[SIZE, r], machine[MATRIX, r], machine[FIRST, r]
        a, b = np.divmod(np.arange(n * n), max(n, 1))
        literal[NEGATION, at : at + n * n] = at + b * n + a
        literal[BEFORE, at : at + n * n] = first + a
        literal[AFTER, at : at + n * n] = first + b
        literal[ON, at : at + n * n] = r
    literal[GAP] = _gaps(graph, machine, length)
    pairs = np.flatnonzero(literal[BEFORE] < literal[AFTER])  # machine by machine
    literal[OPEN, : len(pairs)] = pairs
    literal[PLACE, pairs] = np.arange(len(pairs))
    literal[WATCHED] = -1
    return literal


def _gaps(graph: Schedule, machine: IntArray, length: IntArray) -> IntArray:
    """Least time from start to start if one comes before the other, not always directly.

    With setups: shortest paths through whatever may come between (Floyd & Warshall), so setups
    need not be triangular.
    """
    gap = np.zeros(n_literals(graph), np.int64)
    for r in range(graph.n_resources):
        on = graph.users[r]
        n, at, first = len(on), machine[MATRIX, r], machine[FIRST, r]
        least = np.repeat(length[first : first + n][:, None], n, axis=1)
        if graph.setup_out[on].any() or graph.setup_in[on].any():
            machine[SETUPS, r] = 1
            shortest = _direct_gaps(graph, on)
            for via in range(n):
                np.minimum(shortest, shortest[:, via, None] + shortest[None, via], out=shortest)
            least = np.maximum(least, np.where(shortest >= FAR // 4, 0, shortest))
        gap[at : at + n * n] = least.ravel()
    return gap


def _direct_gaps(graph: Schedule, on: IntArray) -> IntArray:
    """Least start-to-start time of neighbours; FAR // 4 where the arcs forbid this order."""
    same = graph.family[on][:, None] == graph.family[on][None]
    setup = np.where(same, 0, graph.setup_out[on][:, None] + graph.setup_in[on][None])
    direct = graph.duration[on][:, None] + setup
    for a, i in enumerate(on.tolist()):
        path = bounds.paths_from(graph, i)
        for b, k in enumerate(on.tolist()):
            if k in path and a != b:
                direct[a, b] = max(int(direct[a, b]), path[k])
                direct[b, a] = FAR // 4
        direct[a, a] = 0
    return direct


def _reachable(graph: Schedule) -> npt.NDArray[np.bool_]:
    """reach[i, k]: there is a path of arcs from i to k."""
    n = graph.n_operations
    reach = np.zeros((n, n), np.bool_)
    waiting = np.diff(graph.successors.indptr).copy()
    ready = np.flatnonzero(waiting == 0).tolist()
    for i in ready:  # grows: from the sinks backwards
        a, b = graph.successors.indptr[i : i + 2]
        for k in graph.successors.other[a:b].tolist():
            reach[i] |= reach[k]
            reach[i, k] = True
        a, b = graph.predecessors.indptr[i : i + 2]
        for k in graph.predecessors.other[a:b].tolist():
            waiting[k] -= 1
            if not waiting[k]:
                ready.append(k)
    return reach


def _parts(graph: Schedule, machine: IntArray) -> IntArray:
    """Acquired and freed bytes of the capped machines, taken apart; fills PART and PART_END.

    Bytes that i acquires and k frees are one part only if the arcs put k behind i: then the level
    is the sum of all parts whatever else happens. All other bytes are parts of their own: a holder
    that nobody frees, a freer that nobody holds for.
    """
    reach: dict[int, dict[int, int]] = {}
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(graph.n_resources)]
    if graph.memory.any():
        place = [{i: k for k, i in enumerate(row)} for row in graph.users.to_lists()]
        unfreed = [
            {i: int(graph.free[i]) for i in row if graph.free[i]} for row in graph.users.to_lists()
        ]
        for r, size, i, k in bounds.holdings(graph):
            if i not in reach:
                reach[i] = bounds.paths_from(graph, i)
            joined = k >= 0 and k in reach[i]  # k == i: for the time of its own processing
            rows[r].append((place[r][i], place[r][k] if joined else -1, size))
            if joined:
                unfreed[r][k] -= size
        for r, left in enumerate(unfreed):
            rows[r] += [(-1, place[r][k], size) for k, size in left.items() if size]
    flat: list[tuple[int, int, int]] = []
    for r, row in enumerate(rows):
        machine[PART, r] = len(flat)
        flat += row if graph.memory[r] else []
        machine[PART_END, r] = len(flat)
    return np.array(flat, np.int64).reshape(-1, 3).T.copy()
