"""A graph as arrays for tree search: orders of pairs, time windows, and a trail for backtracking.

For every ordered pair of operations on one machine there is a *literal*, "the first before the
second"; the literal of the opposite order is its *negation*. A machine's users have *slots*,
numbered machine by machine, so that an operation of several machines has several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import from_dtype, types

from optsched.kernels.compile import INTS
from optsched.model import bounds, memory_bounds
from optsched_solvers.shop.proof.symmetry import ordered_alike

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray, Schedule

    Records = npt.NDArray[np.void]
    SmallArray = npt.NDArray[np.int8]
    FloatArray = npt.NDArray[np.float64]

MOST_LITERALS: Final = 1_000_000
"""Ordered pairs of operations that share a machine; more would fill the memory."""

FAR: Final = 2**62
"""Beyond every time; sums of all durations stay below 2^53."""

TRUE, FALSE = 1, 2
"""Values of literals; 0 is open."""

DECIDED, MOVED, LIGHT, HEAVY = range(4)
"""Queues: literals just decided, operations whose window changed, machines for cheap
and for costly rules."""

BY_HEAD, BY_DEADLINE = 0, 1
"""Rows of `State.order`."""


def _record(*fields: str) -> np.dtype[np.void]:
    """A record of integers."""
    return np.dtype([(field, np.int64) for field in fields], align=True)


# est, lst: earliest and latest start, and the levels at which they were last put on the trail;
# after, before, slots: where the arcs and slots of an operation begin, the next one's are their end
OPERATION: Final = _record(
    "est", "lst", "est_level", "lst_level", "changed", "duration", "after", "before", "slots"
)
# arcs by tail (where to, start-to-start weight), and beside them by head (where from, weight)
ARC: Final = _record("to", "weight", "origin", "weight_back")
# length: duration and setup time lost in any case; open: pairs still open; of: slots by operation
SLOT: Final = _record("operation", "length", "workspace", "machine", "open", "of")
# first: its slots; matrix: its literals, row by row; pairs, open: where in `State.open` its pairs
# are, and how many; light, heavy: what has changed since the rules were last tried
MACHINE: Final = _record(
    "first", "size", "matrix", "pairs", "open", "setups", "memory", "part", "part_end", "light",
    "heavy",
)  # fmt: skip
# before, after: slots; place: in `State.open`; watched: the
# first nogood that watches it
LITERAL: Final = _record("before", "after", "machine", "place", "watched")
# bytes on a machine, places of holder and freer there (-1: none)
PART: Final = _record("holder", "freer", "bytes")
# what changed (start, latest start, literal: one number for all), its old value
CHANGE: Final = _record("what", "old")
# a step from the root: literal, trail mark (-1 for a refuted decision), level, target then
ENTRY: Final = _record("decision", "mark", "level", "target")
# a ring buffer: where it begins in `State.ring`, its capacity
QUEUE: Final = _record("first", "capacity", "head", "size")
# failed: the last branch is refuted, but time was up; good and the last four: see `tree_search`
SEARCH: Final = _record(
    "target", "root_target", "nodes", "failures", "restart_at", "level", "levels", "entries",
    "trail", "pairs", "nogoods", "nogood_literals", "failed", "good", "probe", "step", "cursor",
    "cursor_end",
)  # fmt: skip


class State(NamedTuple):
    """One problem and one search: records as named above, few arrays, since all are passed on."""

    op: Records
    arc: Records
    slot: Records
    order: IntArray  # slots of every machine by head, and by deadline
    machine: Records
    literal: Records
    negation: IntArray  # of every literal
    gap: IntArray  # per literal, least time between the two starts
    open: IntArray  # pairs of every machine, open pairs first
    part: Records
    value: SmallArray  # per literal: 0 open, TRUE, FALSE
    trail: Records
    entry: Records  # the path from the root
    queue: Records
    ring: IntArray
    rating: FloatArray  # per literal
    average: FloatArray  # sum and count of local ratings, per depth
    nogood: IntArray  # literals that are not all true; the first two are watched
    nogood_ptr: IntArray
    next_watch: IntArray  # per watch 2k, 2k+1 of nogood k
    scratch: IntArray
    search: Records  # one


def _array(of: Any, dimensions: int = 1) -> Any:
    return types.Array(of, dimensions, "C")


STATE: Final[Any] = types.NamedTuple(
    (
        *(_array(from_dtype(record)) for record in (OPERATION, ARC, SLOT)),
        _array(types.int64, 2),
        *(_array(from_dtype(record)) for record in (MACHINE, LITERAL)),
        INTS, INTS, INTS, _array(from_dtype(PART)), _array(types.int8),
        *(_array(from_dtype(record)) for record in (CHANGE, ENTRY, QUEUE)),
        INTS, _array(types.float64), _array(types.float64, 2), INTS, INTS, INTS,
        _array(types.int64, 2), _array(from_dtype(SEARCH)),
    ),
    State,
)  # fmt: skip


def n_literals(graph: Schedule) -> int:
    """Ordered pairs of operations that share a machine."""
    sizes = np.diff(graph.users.indptr)
    return int((sizes * sizes).sum())


def state_of(graph: Schedule) -> State:
    """A fresh state: releases as heads, nothing decided, no target; gangs have pairs everywhere."""
    n, slots = graph.n_operations, len(graph.users.ids)
    machine = _machines(graph)
    slot = _slots(graph, machine)
    op = np.zeros(n + 1, OPERATION)
    op["est"][:n], op["duration"][:n] = graph.release, graph.duration
    op["est_level"] = op["lst_level"] = -1
    op["after"], op["before"] = graph.successors.indptr, graph.predecessors.indptr
    op["slots"][1:] = np.cumsum(np.bincount(graph.users.ids, minlength=n))
    arc = np.zeros(len(graph.arcs.tail), ARC)
    arc["to"], arc["weight"] = graph.successors.other, graph.successors.weight
    arc["origin"], arc["weight_back"] = graph.predecessors.other, graph.predecessors.weight
    by_slot = np.arange(slots) - np.repeat(machine["first"][:-1], machine["size"][:-1])
    literal, negation, pairs = _literals(graph, machine)
    gap = _gaps(graph, machine, slot["length"])
    search = np.zeros(1, SEARCH)
    search["pairs"] = len(pairs)
    sizes = np.maximum(1, [len(literal), n + 1, len(machine), len(machine)])
    queue = np.zeros(4, QUEUE)
    queue["capacity"], queue["first"] = sizes, np.cumsum(sizes) - sizes
    part = _parts(graph, machine)
    return State(
        op, arc, slot, np.stack([by_slot, by_slot]), machine, literal, negation, gap, pairs, part,
        np.zeros(len(literal), np.int8), np.zeros(1 << 14, CHANGE), np.zeros(64, ENTRY), queue,
        np.zeros(sizes.sum(), np.int64), np.ones(len(literal)), np.zeros((2, len(pairs) + 2)),
        np.zeros(0, np.int64), np.zeros(2, np.int64), np.zeros(0, np.int64),
        np.zeros((10, int(machine["size"].max(initial=0)) + 1), np.int64), search,
    )  # fmt: skip


def root_orders(graph: Schedule, machine: Records) -> IntArray:
    """Literals that every schedule (in which identical jobs are in order) has true."""
    found: list[IntArray] = []
    reach = _reachable(graph)
    place = []
    for r in range(graph.n_resources):
        on = graph.users[r]
        a, b = np.nonzero(reach[np.ix_(on, on)])
        found.append(machine[r]["matrix"] + a * len(on) + b)
        place.append({i: k for k, i in enumerate(on.tolist())})
    chosen = [
        int(machine[r]["matrix"]) + place[r][i] * len(place[r]) + place[r][k]
        for i, k in ordered_alike(graph)
        for r in graph.op_resources[i].tolist()
    ]
    return np.concatenate([*found, np.array(chosen, np.int64)])


def latest_starts(graph: Schedule, target: int) -> IntArray:
    """Of schedules that end by target, before any propagation."""
    return np.minimum(target, graph.deadline) - graph.duration


def _machines(graph: Schedule) -> Records:
    machine = np.zeros(graph.n_resources + 1, MACHINE)
    if graph.n_resources:
        sizes = np.diff(graph.users.indptr)
        pairs = sizes * (sizes - 1) // 2
        machine["first"][:-1], machine["size"][:-1] = graph.users.indptr[:-1], sizes
        machine["matrix"][:-1] = np.cumsum(sizes * sizes) - sizes * sizes
        machine["pairs"][:-1], machine["open"][:-1] = np.cumsum(pairs) - pairs, pairs
        machine["memory"][:-1] = np.where(graph.memory == 0, FAR, graph.memory)
    return machine


def _slots(graph: Schedule, machine: Records) -> Records:
    users, sizes = graph.users, machine["size"][:-1]
    slot = np.zeros(len(users.ids), SLOT)
    losses = bounds.setup_loss(graph)
    slot["operation"] = users.ids
    slot["length"] = graph.duration[users.ids]
    if losses:
        slot["length"] += np.concatenate(losses)
    slot["workspace"] = graph.workspace[users.ids]
    slot["machine"] = np.repeat(np.arange(graph.n_resources), sizes)
    slot["open"] = np.repeat(sizes - 1, sizes)
    slot["of"] = np.argsort(users.ids, kind="stable")
    return slot


def _literals(graph: Schedule, machine: Records) -> tuple[Records, IntArray, IntArray]:
    """All literals, their negations, and the first of every pair, machine by machine."""
    literal = np.zeros(n_literals(graph), LITERAL)
    negation = np.zeros(len(literal), np.int64)
    for r in range(graph.n_resources):
        n, at = machine[r]["size"], machine[r]["matrix"]
        a, b = np.divmod(np.arange(n * n), max(n, 1))
        on = literal[at : at + n * n]
        negation[at : at + n * n] = at + b * n + a
        on["before"], on["after"] = machine[r]["first"] + a, machine[r]["first"] + b
        on["machine"] = r
    pairs = np.flatnonzero(literal["before"] < literal["after"])
    literal["place"][pairs] = np.arange(len(pairs))
    literal["watched"] = -1
    return literal, negation, pairs


def _gaps(graph: Schedule, machine: Records, length: IntArray) -> IntArray:
    """Least time from start to start if one comes before the other, not always directly.

    With setups: shortest paths through whatever may come between (Floyd & Warshall), so setups
    need not be triangular.
    """
    gap = np.zeros(n_literals(graph), np.int64)
    for r in range(graph.n_resources):
        on = graph.users[r]
        n, at, first = len(on), machine[r]["matrix"], machine[r]["first"]
        least = np.repeat(length[first : first + n][:, None], n, axis=1)
        if graph.setup_out[on].any() or graph.setup_in[on].any():
            machine["setups"][r] = 1
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
        path = memory_bounds.paths_from(graph, i)
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


def _parts(graph: Schedule, machine: Records) -> Records:
    """Split acquired and freed bytes of the capped machines into parts; fills `MACHINE.part`.

    Bytes that i acquires and k frees are one part only if the arcs put k behind i: then the level
    is the sum of all parts in every order. All other bytes are parts
    with a holder or a freer alone.
    """
    reach: dict[int, dict[int, int]] = {}
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(graph.n_resources)]
    if graph.memory.any():
        place = [{i: k for k, i in enumerate(row)} for row in graph.users.to_lists()]
        unfreed = [
            {i: int(graph.free[i]) for i in row if graph.free[i]} for row in graph.users.to_lists()
        ]
        for r, size, i, k in memory_bounds.holdings(graph):
            if i not in reach:
                reach[i] = memory_bounds.paths_from(graph, i)
            joined = k >= 0 and k in reach[i]  # k == i: for the time of its own processing
            rows[r].append((place[r][i], place[r][k] if joined else -1, size))
            if joined:
                unfreed[r][k] -= size
        for r, left in enumerate(unfreed):
            rows[r] += [(-1, place[r][k], size) for k, size in left.items() if size]
    flat: list[tuple[int, int, int]] = []
    for r, row in enumerate(rows):
        machine["part"][r] = len(flat)
        flat += row if graph.memory[r] else []
        machine["part_end"][r] = len(flat)
    return np.array(flat, PART)
