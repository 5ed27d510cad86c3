"""List scheduling on a graph: non-delay, active or in a given order; memory never deadlocks.

Every step chooses an operation with all predecessors placed and appends it to the order of its
machine (serial schedule generation). `Mode` says which.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.io.values import frozen
from optsched.kernels import plain_python
from optsched.kernels.compile import BOOL, INT, INTS, entry, helper, record, records

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray, Schedule

NO_LIMIT = np.iinfo(np.int64).max


class Mode(IntEnum):
    """Which operation is chosen; ties are broken by priority."""

    NON_DELAY = 0
    """The one that can start first."""
    ACTIVE = 1
    """Giffler & Thompson 1960: of those that can start before the earliest end, by priority."""
    IN_ORDER = 2
    """Of those that can be placed at all, by priority: the decoder of an order."""


ACTIVE, IN_ORDER = int(Mode.ACTIVE), int(Mode.IN_ORDER)


OPERATION = record(
    "duration resource release family setup_in setup_out acquire free need chain next_in_chain"
    " slot_in slot_out first_arc end_arc n_before"
)
ARC = record("head weight")
MACHINE = record(
    "memory level first_ready n_ready free_at last changed best best_time best_key unused used"
)
CHAIN = record("first before left begun is_open pending")
SLOT = record("limit used")
STATE = record("priority available waiting start blocked place is_placed")


class DispatchGraph(NamedTuple):
    """The graph as the kernel reads it.

    A *chain* is a set of memory-holding operations of one (job, micro-batch): the unit of the
    banker's check. ``slot_in`` / ``slot_out`` of an operation name the virtual stage whose number
    of micro-batches in flight it raises or lowers (-1: none).
    """

    operation: npt.NDArray[np.void]
    arc: npt.NDArray[np.void]  # sorted by tail
    machine: npt.NDArray[np.void]
    chain: npt.NDArray[np.void]

    @classmethod
    def of(cls, graph: Schedule) -> DispatchGraph:
        """Make the records of a graph with at most one resource an operation."""
        n, after, resource = graph.n_operations, graph.successors, graph.single_resource
        chain_of, next_in_chain, chain = _chains(graph)
        stage = np.where(resource >= 0, graph.stage, -1)
        gradient = (graph.kind == "B") | (graph.kind == "I")
        operation = _table(
            OPERATION, n,
            duration=graph.duration, resource=resource, release=graph.release,
            family=graph.family, setup_in=graph.setup_in, setup_out=graph.setup_out,
            acquire=graph.acquire, free=graph.free, need=graph.acquire + graph.workspace,
            chain=chain_of, next_in_chain=next_in_chain,
            slot_in=np.where(graph.kind == "F", stage, -1), slot_out=np.where(gradient, stage, -1),
            first_arc=after.indptr[:-1], end_arc=after.indptr[1:],
            n_before=np.bincount(graph.arcs.head, minlength=n),
        )  # fmt: skip
        machine = _table(
            MACHINE, graph.n_resources, first_ready=graph.users.indptr[:-1],
            memory=np.where(graph.memory == 0, NO_LIMIT, graph.memory),
        )  # fmt: skip
        arc = _table(ARC, len(after.other), head=after.other, weight=after.weight)
        return cls(frozen(operation), frozen(arc), machine, chain)

    def reversed(self) -> DispatchGraph:
        """Mirror the time: orders found here, read backwards, are orders of the original."""
        op, n = self.operation, len(self.operation)
        tail = np.repeat(np.arange(n), op["end_arc"] - op["first_arc"])
        by_head = np.argsort(self.arc["head"], kind="stable")
        head = self.arc["head"][by_head]
        lag = (self.arc["weight"] - op["duration"][tail])[by_head]
        weight = np.maximum(op["duration"][head] + lag, 0)
        end_arc = np.cumsum(op["n_before"])
        turned = op.copy()
        turned["release"] = 0
        turned["n_before"] = op["end_arc"] - op["first_arc"]
        turned["first_arc"], turned["end_arc"] = end_arc - op["n_before"], end_arc
        for one, other in (("setup_in", "setup_out"), ("acquire", "free"), ("slot_in", "slot_out")):
            turned[one], turned[other] = op[other], op[one]
        turned["need"] = op["need"] - op["acquire"] + op["free"]
        machine = self.machine.copy()  # bytes that are never freed are held from the start
        on = op["resource"] >= 0
        np.add.at(machine["level"], op["resource"][on], (op["acquire"] - op["free"])[on])
        # a chain runs backwards too
        follows = np.flatnonzero(op["next_in_chain"] >= 0)
        turned["next_in_chain"] = -1
        turned["next_in_chain"][op["next_in_chain"][follows]] = follows
        chain = self.chain.copy()
        chain["before"] = -1
        known = np.flatnonzero(self.chain["before"] >= 0)
        chain["before"][self.chain["before"][known]] = known
        last = np.flatnonzero((op["chain"] >= 0) & (op["next_in_chain"] < 0))
        chain["first"][op["chain"][last]] = last
        arc = _table(ARC, len(tail), head=tail[by_head], weight=weight)
        return DispatchGraph(frozen(turned), frozen(arc), machine, chain)


class Run(NamedTuple):
    """One run of the kernel: the graph, which is only read, and the state, which is written.

    `order` receives the placed operations from the front; operations without a machine that are
    ready are stacked at its end. `ready` has the ready operations of every machine, unsorted, from
    the machine's `first_ready` on. `held` are bytes per (chain, machine).
    """

    operation: npt.NDArray[np.void]
    arc: npt.NDArray[np.void]
    machine: npt.NDArray[np.void]
    chain: npt.NDArray[np.void]
    held: IntArray
    state: npt.NDArray[np.void]
    ready: IntArray
    order: IntArray
    slot: npt.NDArray[np.void]


def run(
    graph: DispatchGraph,
    priority: IntArray,
    mode: Mode = Mode.NON_DELAY,
    *,
    first_come: bool = False,
    slot_limit: IntArray | None = None,
) -> tuple[IntArray, IntArray] | None:
    """Make one list schedule.

    Parameters
    ----------
    graph
        Records of the problem.
    priority
        A permutation: the smallest value wins.
    mode
        Which operation is chosen.
    first_come
        Compare by the time an operation became available first, then by priority.
    slot_limit
        Micro-batches allowed in flight per virtual stage.

    Returns
    -------
    (operations, start) or None
        Operations in the order of dispatch, and the start of every operation; None if the rule
        got stuck (memory, or a limit that this graph cannot keep).
    """
    n = len(priority)
    limits: Any = [] if slot_limit is None else slot_limit
    # an order that keeps the memory limits is accepted, even if the banker would refuse it
    for is_banked in (False, True) if mode == Mode.IN_ORDER else (True,):
        state = np.empty(n, STATE)
        state["priority"] = priority
        given = Run(
            graph.operation, graph.arc, graph.machine.copy(), graph.chain.copy(),
            np.zeros(len(graph.chain) * len(graph.machine), np.int64), state,
            np.empty(n, np.int64), np.empty(n, np.int64), _table(SLOT, len(limits), limit=limits),
        )  # fmt: skip
        if plain_python.run(dispatch, given, int(mode), first_come, is_banked) == n:
            return given.order, state["start"].copy()
        if not len(graph.chain):
            break
    return None


def _table(dtype: np.dtype[np.void], n: int, **columns: Any) -> npt.NDArray[np.void]:
    table = np.zeros(n, dtype)
    for name, values in columns.items():
        table[name] = values
    return table


def _chains(graph: Schedule) -> tuple[IntArray, IntArray, npt.NDArray[np.void]]:
    """Memory-holding operations by (job, micro-batch, iteration): chain, next in it, chains."""
    n = graph.n_operations
    chain, following = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    touching = np.flatnonzero((graph.acquire > 0) | (graph.free > 0) | (graph.workspace > 0))
    if not graph.memory.any() or not len(touching):
        return chain, following, np.zeros(0, CHAIN)
    labels = np.stack([graph.job, graph.microbatch, graph.iteration])[:, touching]
    found, number = np.unique(labels, axis=1, return_inverse=True)
    chain[touching] = number.ravel()
    members = touching[np.argsort(chain[touching], kind="stable")]
    begins = np.diff(chain[members], prepend=-1) > 0
    following[members[:-1][~begins[1:]]] = members[1:][~begins[1:]]
    before = np.full(found.shape[1], -1, np.int64)
    tail, head = chain[graph.arcs.tail], chain[graph.arcs.head]
    across = (tail >= 0) & (head >= 0) & (tail != head)
    np.maximum.at(before, head[across], tail[across])
    left = np.bincount(chain[members])
    return chain, following, _table(
        CHAIN, len(left), first=members[begins], before=before, left=left
    )  # fmt: skip


RUN: Final[Any] = types.NamedTuple(
    (
        records(OPERATION, True), records(ARC, True), records(MACHINE), records(CHAIN), INTS,
        records(STATE), INTS, INTS, records(SLOT),
    ),
    Run,
)  # fmt: skip


@helper(counted=False, inline=True)
def _fits(s, machine, i, epoch):  # type: ignore[no-untyped-def]
    """Whether memory and slots allow i on its machine now; the banker check follows.

    `blocked` is the last epoch in which the banker refused i: since then nothing was freed.
    """
    op = s.operation[i]
    if s.state[i].blocked == epoch or machine.level + op.need > machine.memory:
        return False
    at = op.slot_in
    return at < 0 or at >= len(s.slot) or s.slot[at].used < s.slot[at].limit


@helper(counted=False, inline=True)
def _earliest_start(s, machine, i):  # type: ignore[no-untyped-def]
    """The earliest start of i after the last operation of its machine."""
    op, at = s.operation, machine.free_at
    if machine.last >= 0 and op[machine.last].family != op[i].family:
        at += op[machine.last].setup_out + op[i].setup_in
    return max(at, s.state[i].available)


@helper(counted=False, inline=True)
def _select(s, machine, epoch, mode, first_come):  # type: ignore[no-untyped-def]
    """Find the machine's best operation by (start, or end if active; key; priority)."""
    state = s.state
    machine.best = -1
    for k in range(machine.first_ready, machine.first_ready + machine.n_ready):
        i = s.ready[k]
        if not _fits(s, machine, i, epoch):
            continue
        at = 0
        if mode != IN_ORDER:
            at = _earliest_start(s, machine, i)
            if mode == ACTIVE:
                at += s.operation[i].duration
        key = state[i].available if first_come else 0
        if machine.best < 0 or _precedes(
            at, key, state[i].priority,
            machine.best_time, machine.best_key, state[machine.best].priority,
        ):  # fmt: skip
            machine.best = i
            machine.best_time = at
            machine.best_key = key


@helper(counted=False, inline=True)
def _precedes(time, key, priority, other_time, other_key, other_priority):  # type: ignore[no-untyped-def]
    if time != other_time:
        return time < other_time
    if key != other_key:
        return key < other_key
    return priority < other_priority


@helper(counted=False, inline=True)
def _of_conflict(s, machine, epoch, first_come):  # type: ignore[no-untyped-def]
    """Giffler-Thompson: by priority one that could start before the machine's earliest end."""
    state = s.state
    chosen = machine.best
    key = state[chosen].available
    for k in range(machine.first_ready, machine.first_ready + machine.n_ready):
        i = s.ready[k]
        if not _fits(s, machine, i, epoch):
            continue
        if _earliest_start(s, machine, i) >= machine.best_time:
            continue
        if first_come and state[i].available != key:
            better = state[i].available < key
        else:
            better = state[i].priority < state[chosen].priority
        if better:
            chosen = i
            key = state[i].available
    return chosen


@helper(counted=False)
def _is_safe(op, machine, chain, held, state, i):  # type: ignore[no-untyped-def]
    """Banker's check: after i, all open chains can still end one after the other."""
    n_machines = len(machine)
    state[i].is_placed = 1
    for r in range(n_machines):
        machine[r].unused = machine[r].memory - machine[r].level
    machine[op[i].resource].unused -= op[i].acquire - op[i].free
    n_pending = 0
    for c in range(len(chain)):
        chain[c].is_open = chain[c].begun or c == op[i].chain
        if chain[c].is_open:
            chain[n_pending].pending = c
            n_pending += 1
    k = 0
    n_failed = 0  # in a row
    # invariant: the chains that left `pending` can end in this order; `unused` has their bytes
    while n_failed < n_pending:
        if k >= n_pending:
            k = 0
        c = chain[k].pending
        if not _can_end(op, machine, chain, state, c):
            k += 1
            n_failed += 1
            continue
        for r in range(n_machines):
            machine[r].unused += held[c * n_machines + r]
        if c == op[i].chain:
            machine[op[i].resource].unused += op[i].acquire - op[i].free
        chain[c].is_open = 0
        n_pending -= 1
        chain[k].pending = chain[n_pending].pending
        n_failed = 0
    state[i].is_placed = 0
    return n_pending == 0


@helper(counted=False, inline=True)
def _can_end(op, machine, chain, state, c):  # type: ignore[no-untyped-def]
    """Whether the remaining operations of a chain fit into the unused bytes."""
    if chain[c].before >= 0 and chain[chain[c].before].is_open:
        return False
    for r in range(len(machine)):
        machine[r].used = 0
    i = chain[c].first
    while i >= 0:
        if not state[i].is_placed:
            m = machine[op[i].resource]
            if m.memory != NO_LIMIT and m.used + op[i].need > m.unused:
                return False
            m.used += op[i].acquire - op[i].free
        i = op[i].next_in_chain
    return True


@helper(counted=False, inline=True)
def _offer(s, n_loose, i):  # type: ignore[no-untyped-def]
    """Add i to the ready operations; return the number of those without a machine."""
    resource = s.operation[i].resource
    if resource < 0:
        s.order[len(s.order) - 1 - n_loose] = i
        return n_loose + 1
    m = s.machine[resource]
    s.state[i].place = m.first_ready + m.n_ready
    s.ready[s.state[i].place] = i
    m.n_ready += 1
    m.changed = 1
    return n_loose


@helper(counted=False, inline=True)
def _book(s, i):  # type: ignore[no-untyped-def]
    """Place i at the end of its machine; return whether a blocked operation may fit now."""
    op, state, chain, slot = s.operation[i], s.state, s.chain, s.slot
    m = s.machine[op.resource]
    start = _earliest_start(s, m, i)
    state[i].start = start
    m.free_at = start + op.duration
    m.last = i
    m.changed = 1
    m.n_ready -= 1
    moved = s.ready[m.first_ready + m.n_ready]
    s.ready[state[i].place] = moved
    state[moved].place = state[i].place
    taken = op.acquire - op.free
    m.level += taken
    helps = taken < 0
    c = op.chain
    if c >= 0:
        s.held[c * len(s.machine) + op.resource] += taken
        chain[c].left -= 1
        chain[c].begun = chain[c].left > 0
        helps = helps or chain[c].left == 0
    if 0 <= op.slot_in < len(slot):
        slot[op.slot_in].used += 1
    if 0 <= op.slot_out < len(slot):
        slot[op.slot_out].used -= 1
        helps = True
    return helps


@helper(counted=False, inline=True)
def _best_machine(s, epoch, mode, first_come):  # type: ignore[no-untyped-def]
    """The machine whose best operation precedes all others; -1 if nothing fits."""
    machine, state = s.machine, s.state
    best = -1
    for r in range(len(machine)):
        m = machine[r]
        if m.changed:
            m.changed = 0
            _select(s, m, epoch, mode, first_come)
        if m.best >= 0 and (
            best < 0
            or _precedes(
                m.best_time, m.best_key, state[m.best].priority, machine[best].best_time,
                machine[best].best_key, state[machine[best].best].priority,
            )
        ):  # fmt: skip
            best = r
    return best


@entry(INT, RUN, INT, BOOL, BOOL, counted=False)
def dispatch(s, mode, first_come, is_banked):  # type: ignore[no-untyped-def]
    """Dispatch all operations into `order` and ``state.start``; return the number placed.

    `machine`, `chain` and `slot` are copies for this run, `held` is zero, of `state` only the
    priority is given.
    """
    op, arc, machine, state, order = s.operation, s.arc, s.machine, s.state, s.order
    n = len(op)
    n_loose = 0
    for r in range(len(machine)):
        machine[r].last = -1
        machine[r].changed = 1
    for i in range(n):
        state[i].available = op[i].release
        state[i].waiting = op[i].n_before
        state[i].blocked = -1
        state[i].is_placed = 0
        if op[i].n_before == 0:
            n_loose = _offer(s, n_loose, i)
    epoch = 0  # blocked operations are tried again in the next one
    is_starved = False  # an operation is blocked because it frees bytes that are not held yet
    # invariant: order[:count] is a feasible partial schedule, in which `available` is the earliest
    # start after all placed predecessors, and `best` is up to date where `changed` is 0
    for count in range(n):
        i = -1
        if n_loose > 0:
            i = order[n - n_loose]
            n_loose -= 1
            state[i].start = state[i].available
        while i < 0:
            best = _best_machine(s, epoch, mode, first_come)
            if best < 0:
                return count  # stuck
            m = machine[best]
            i = m.best
            if mode == ACTIVE:
                i = _of_conflict(s, m, epoch, first_come)
            is_early = m.level + op[i].acquire < op[i].free
            is_starved = is_starved or is_early
            admitted = not is_early and _fits(s, m, i, epoch)
            if admitted and is_banked and len(s.chain) > 0 and op[i].acquire > op[i].free:
                admitted = _is_safe(op, machine, s.chain, s.held, state, i)
            if not admitted:
                state[i].blocked = epoch
                m.changed = 1
                i = -1
                continue
            helps = _book(s, i)
            if is_starved and op[i].acquire > op[i].free:
                is_starved = False
                helps = True
            if helps:
                epoch += 1
                for r in range(len(machine)):
                    machine[r].changed = 1
        state[i].is_placed = 1
        order[count] = i
        for e in range(op[i].first_arc, op[i].end_arc):
            j = arc[e].head
            state[j].available = max(state[j].available, state[i].start + arc[e].weight)
            state[j].waiting -= 1
            if state[j].waiting == 0:
                n_loose = _offer(s, n_loose, j)
    return n
