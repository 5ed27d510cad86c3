"""One schedule under tabu search, as records: neighbors, exact heads and tails, one order.

Operation n, behind the last one, is a *dummy*: the neighbor of operations without one. Its times
are 0. Helpers take a constant `general`: False is for classic chains, where lags, setups, releases
and memory vanish at compile time; True is for any graph with at most one resource per operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, entry, helper, records
from optsched_solvers._random import random_state

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray, Schedule

    Records = npt.NDArray[np.void]

NO_LIMIT: Final = np.iinfo(np.int64).max
TABU_ENTRIES: Final = 2**17
"""Length of the tabu list at most; machine arcs beyond share entries."""


def _record(indices: str, integers: str = "") -> np.dtype[np.void]:
    """A record of indices (uint32, which need no check of the sign) and integers."""
    fields = [(name, np.uint32) for name in indices.split()]
    return np.dtype([*fields, *((name, np.int64) for name in integers.split())], align=True)


OPERATION: Final = _record(
    "arcs_in arcs_in_end arcs_out arcs_out_end",
    "machine release least family setup_in setup_out acquire free workspace capacity unused more",
)
"""Facts of an operation. `least`: smallest start-to-start weight of any arc out of it, machine arcs
included. `capacity`: bytes of its resource, `NO_LIMIT` where unlimited. `machine`: -1 for none.
`arcs_in` .. `arcs_in_end` and `arcs_out` .. `arcs_out_end`: rows of `State.arc`."""

ARC: Final = _record("other unused", "weight")
"""Arcs by head as (tail, lag), then by tail as (head, start-to-start weight)."""

LINK: Final = _record(
    "job_before job_after machine_before machine_after place rank mark unused"
)  # fmt: skip
"""Neighbors in the job and on the machine, place in `State.order`, number among the operations of
the machine (for the tabu list), scratch. Half a cache line."""

TIME: Final = _record("", "end tail duration level")
"""Head plus duration; tail, which includes the duration; bytes held on the machine before it."""

BLOCK: Final = _record("op unused", "head tail duration old_tail old_end new_head more")
"""A place of a critical block: operation, head and tail by arcs alone, times before the move, head
after the move that is being estimated. Places 1..K; 0 and K + 1 are the machine neighbors."""

CONTROL: Final = _record(
    "",
    "moves stale best value random patience target tenure spread columns has_setups "
    "estimate equal tabus u v step",
)
"""What a walk carries from slice to slice, and the best move found so far: its estimate, moves as
good, tabu moves seen, and what it does (`step` 1 puts u right behind v, -1 v right before u)."""


class State(NamedTuple):
    """A graph, a schedule of it, and what the walk works with."""

    op: Records
    arc: Records
    ends: IntArray  # operations that can be the last to end
    link: Records
    time: Records
    order: npt.NDArray[np.uint32]  # topological
    best_order: IntArray
    until: IntArray  # per machine arc, the number of moves up to which it is tabu
    block: Records
    path: npt.NDArray[np.uint32]  # critical path
    window: npt.NDArray[np.uint32]  # scratch of `shift`
    control: Records  # one


INDICES: Final = types.Array(types.uint32, 1, "C")
STATE: Final[Any] = types.NamedTuple(
    (
        records(OPERATION), records(ARC), INTS, records(LINK), records(TIME), INDICES, INTS, INTS,
        records(BLOCK), INDICES, INDICES, records(CONTROL),
    ),
    State,
)  # fmt: skip


def state_of(graph: Schedule, seed: int) -> State:
    """Arrays of a graph, without a schedule yet."""
    n = graph.n_operations
    op, arc = _facts(graph)
    link, time = np.zeros(n + 1, LINK), np.zeros(n + 1, TIME)
    for name in LINK.names[:4]:  # type: ignore[index]
        link[name] = n
    link["job_before"][graph.arcs.head] = graph.arcs.tail
    link["job_after"][graph.arcs.tail] = graph.arcs.head
    for r in range(graph.n_resources):
        link["rank"][graph.users[r]] = np.arange(len(graph.users[r]))
    time["duration"][:n] = graph.duration
    covered = np.zeros(n, bool)  # some successor never ends earlier
    late = graph.arcs.lag + graph.duration[graph.arcs.head] >= 0
    covered[graph.arcs.tail[late]] = True
    columns = int(np.diff(graph.users.indptr).max(initial=1))
    arcs = max(1, min(n * columns, TABU_ENTRIES))
    control = np.zeros(1, CONTROL)
    control["random"] = random_state(seed)
    control["columns"] = columns
    control["tenure"], control["spread"] = _tenure(graph)
    control["has_setups"] = graph.has_setups
    return State(
        op, arc, np.flatnonzero(~covered), link, time, np.arange(n, dtype=np.uint32), np.arange(n),
        np.zeros(1 << (arcs - 1).bit_length(), np.int64), np.zeros(n + 3, BLOCK),
        np.zeros(n + 3, np.uint32), np.zeros(n + 3, np.uint32), control,
    )  # fmt: skip


def _facts(graph: Schedule) -> tuple[Records, Records]:
    before, after = graph.predecessors, graph.successors
    machine = graph.single_resource
    memory = np.append(graph.memory, 0)[machine]
    op = np.zeros(graph.n_operations, OPERATION)
    for name in ("release", "family", "setup_in", "setup_out", "acquire", "free", "workspace"):
        op[name] = getattr(graph, name)
    op["least"] = graph.duration
    weight = graph.duration[graph.arcs.tail] + graph.arcs.lag
    np.minimum.at(op["least"], graph.arcs.tail, weight)
    op["machine"], op["capacity"] = machine, np.where(memory == 0, NO_LIMIT, memory)
    op["arcs_in"], op["arcs_in_end"] = before.indptr[:-1], before.indptr[1:]
    first = len(before.other)
    op["arcs_out"], op["arcs_out_end"] = first + after.indptr[:-1], first + after.indptr[1:]
    arc = np.zeros(first + len(after.other), ARC)
    arc["other"] = np.concatenate([before.other, after.other])
    lag = before.weight - graph.duration[before.other]
    arc["weight"] = np.concatenate([lag, after.weight])
    return op, arc


def _tenure(graph: Schedule) -> tuple[int, int]:
    """Least tabu tenure, and by how much it may be longer (Zhang, Li, Guan & Rao 2007)."""
    jobs, machines = len(np.unique(graph.job)), max(1, graph.n_resources)
    least = 10 + jobs // machines
    longest = 1.4 * least if jobs <= 2 * machines else 1.5 * least
    return least, int(longest) - least


def is_classic(graph: Schedule) -> bool:
    """Whether every operation has at most one arc in and out, and no field but duration counts.

    Such graphs get kernels without releases, lags, setups and memory.
    """
    one_in = np.diff(graph.predecessors.indptr).max(initial=0) <= 1
    one_out = np.diff(graph.successors.indptr).max(initial=0) <= 1
    timed = graph.arcs.lag.any() or graph.release.any() or graph.has_setups
    memory = graph.acquire.any() or graph.free.any() or graph.workspace.any()
    return bool(one_in and one_out and not timed and not memory)


# longest paths


@helper(counted=False, inline=True)
def setup_of(s, i, j):  # type: ignore[no-untyped-def]
    """Setup between machine neighbors i, j; 0 next to the dummy."""
    n = len(s.order)
    if i == n or j == n or s.op[i].family == s.op[j].family:
        return 0
    return s.op[i].setup_out + s.op[j].setup_in


@helper(counted=False, inline=True)
def arc_head(general, s, i):  # type: ignore[no-untyped-def]
    """Head of i from its release and conjunctive arcs alone."""
    if not general:
        return s.time[s.link[i].job_before].end
    h = s.op[i].release
    for e in range(s.op[i].arcs_in, s.op[i].arcs_in_end):
        h = max(h, s.time[s.arc[e].other].end + s.arc[e].weight)
    return h


@helper(counted=False, inline=True)
def arc_tail(general, s, i):  # type: ignore[no-untyped-def]
    """Tail of i from its duration and conjunctive arcs alone."""
    p = s.time[i].duration
    if not general:
        return p + s.time[s.link[i].job_after].tail
    q = p
    for e in range(s.op[i].arcs_out, s.op[i].arcs_out_end):
        q = max(q, s.time[s.arc[e].other].tail + s.arc[e].weight)
    return q


@helper(counted=False, inline=True)
def machine_head(general, s, i):  # type: ignore[no-untyped-def]
    """Head of i from its machine predecessor alone."""
    before = s.link[i].machine_before
    h = s.time[before].end
    if general:
        h += setup_of(s, before, i)
    return h


@helper(counted=False, inline=True)
def machine_tail(general, s, i):  # type: ignore[no-untyped-def]
    """Tail of i from its machine successor alone."""
    after = s.link[i].machine_after
    q = s.time[i].duration + s.time[after].tail
    if general:
        q += setup_of(s, i, after)
    return q


@helper(counted=False, inline=True)
def level_behind(op, level):  # type: ignore[no-untyped-def]
    """Bytes held behind an operation that begins at a level; negative if that is impossible."""
    if level + op.acquire + op.workspace > op.capacity:
        return -1
    return level + op.acquire - op.free


@helper(counted=False, inline=True)
def makespan_of(s):  # type: ignore[no-untyped-def]
    """Latest end."""
    value = 0
    for k in range(len(s.ends)):
        value = max(value, s.time[s.ends[k]].end)
    return value


# one move


@helper(counted=False, inline=True)
def move(general, s, u, v, step):  # type: ignore[no-untyped-def]
    """Put u right behind v (step 1), or v right before u (-1); heads, tails and levels follow."""
    first, last = u, v
    level = s.time[u].level
    if step == 1:
        first = np.int64(s.link[u].machine_after)
        last = u
        shift(general, s, u, v, 1)
    else:
        first = v
        last = np.int64(s.link[v].machine_before)
        shift(general, s, u, v, -1)
    if general:
        _update_levels(s, first, last, level)
    _reschedule(general, s, first, last)


@helper(counted=False, inline=True)
def exchange_fits(s, u, v):  # type: ignore[no-untyped-def]
    """Whether the bytes stay within the limit when v comes right before its neighbor u."""
    level = level_behind(s.op[v], s.time[u].level)
    return level >= 0 and level_behind(s.op[u], level) >= 0


@helper(counted=False, inline=True)
def exchange(s, u, v):  # type: ignore[no-untyped-def]
    """Put u right behind its machine neighbor v; levels follow, heads and tails do not."""
    s.time[v].level = s.time[u].level
    s.time[u].level += s.op[v].acquire - s.op[v].free
    shift(True, s, u, v, 1)


@helper(counted=False, inline=True)
def shift(general, s, u, v, step):  # type: ignore[no-untyped-def]
    """Change the links and the topological order for a move.

    No path may lead from an arc successor of u to v (step 1), or from u to an arc predecessor of v
    (step -1). Then only the window between their places changes: operations to which a path leads
    from the moved one, x, are placed behind (before) all others. The sweep goes from x outwards.
    """
    link, order = s.link, s.order
    x, before, after = u, v, np.int64(link[v].machine_after)
    if step < 0:
        x, before, after = v, np.int64(link[u].machine_before), u
    size = np.int64(link[v].place) - np.int64(link[u].place)
    a, b = link[x].machine_before, link[x].machine_after
    link[a].machine_after, link[b].machine_before = b, a
    link[before].machine_after, link[x].machine_before = x, before
    link[x].machine_after, link[after].machine_before = after, x
    start = np.int64(link[x].place)
    kept, moved = start, 1
    s.window[0] = x
    link[x].mark = 1
    # invariant: of the places swept so far, marked operations (reached from x) are in `window`, in
    # order, and all others fill the places from `start` up to `kept`
    for k in range(start + step, start + step * (size + 1), step):
        i = order[k]
        near = link[i].machine_before if step > 0 else link[i].machine_after
        hit = link[near].mark
        if general:
            first, last = s.op[i].arcs_in, s.op[i].arcs_in_end
            if step < 0:
                first, last = s.op[i].arcs_out, s.op[i].arcs_out_end
            for e in range(first, last):
                hit |= link[s.arc[e].other].mark
        elif step > 0:
            hit |= link[link[i].job_before].mark
        else:
            hit |= link[link[i].job_after].mark
        if hit:
            link[i].mark = 1
            s.window[moved] = i
            moved += 1
        else:
            order[kept] = i
            link[i].place = kept
            kept += step
    for k in range(moved):
        i = s.window[k]
        order[kept + step * k] = i
        link[i].place = kept + step * k
        link[i].mark = 0


@helper(counted=False, inline=True)
def _reschedule(general, s, first, last):  # type: ignore[no-untyped-def]
    """Exact heads and tails after the machine segment first..last has been reordered.

    All operations behind (before) are computed again without a test of what changed: about half of
    them change, and mispredicted branches cost more than the arithmetic they save.
    """
    # invariant of both loops: times of all operations at earlier (later) places are exact, since
    # `order` is topological and nothing before first (behind last) has changed
    for k in range(np.int64(s.link[first].place), len(s.order)):
        i = s.order[k]
        s.time[i].end = s.time[i].duration + max(
            arc_head(general, s, i), machine_head(general, s, i)
        )  # fmt: skip
    for k in range(np.int64(s.link[last].place), -1, -1):
        i = s.order[k]
        s.time[i].tail = max(arc_tail(general, s, i), machine_tail(general, s, i))


@helper(counted=False, inline=True)
def _update_levels(s, first, last, level):  # type: ignore[no-untyped-def]
    """Bytes held before each operation of the machine segment first..last."""
    i = first
    while True:
        s.time[i].level = level
        level += s.op[i].acquire - s.op[i].free
        if i == last:
            break
        i = s.link[i].machine_after


@entry(INT, STATE, INTS, counted=False)
def load(s, machine_last):  # type: ignore[no-untyped-def]
    """Links, heads, tails and levels of `State.order`; returns the makespan.

    `machine_last`: scratch, one entry per resource, filled with n.
    """
    link, time, op = s.link, s.time, s.op
    n = len(s.order)
    for i in range(n):
        link[i].machine_before = n
        link[i].machine_after = n
    for k in range(n):
        i = s.order[k]
        link[i].place = k
        m = op[i].machine
        if m >= 0:
            before = machine_last[m]
            link[i].machine_before = before
            link[before].machine_after = i
            level = 0
            if before != n:
                level = time[before].level + op[before].acquire - op[before].free
            time[i].level = level
            machine_last[m] = i
        time[i].end = time[i].duration + max(arc_head(True, s, i), machine_head(True, s, i))
    for k in range(n - 1, -1, -1):
        i = s.order[k]
        time[i].tail = max(arc_tail(True, s, i), machine_tail(True, s, i))
    return makespan_of(s)
