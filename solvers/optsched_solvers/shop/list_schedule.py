"""List scheduling on a graph, compiled: non-delay or Giffler-Thompson, memory never deadlocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import types

from optsched.kernels import plain_python
from optsched.kernels.compile import BOOL, INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule

NO_LIMIT = np.iinfo(np.int64).max


class DispatchGraph(NamedTuple):
    """The arrays that the kernel reads; one value per operation unless said otherwise.

    A *chain* is a set of memory-holding operations of one (job, micro-batch): the unit of the
    banker's check. ``slot_in`` / ``slot_out`` name the virtual stage whose number of micro-batches
    in flight an operation raises or lowers (-1: none).
    """

    duration: IntArray
    resource: IntArray
    release: IntArray
    indptr: IntArray
    successor: IntArray
    weight: IntArray
    n_before: IntArray
    family: IntArray
    setup_in: IntArray
    setup_out: IntArray
    acquire: IntArray
    free: IntArray
    workspace: IntArray
    memory: IntArray  # per resource, NO_LIMIT = unlimited
    level: IntArray  # per resource: bytes held at the beginning
    chain: IntArray
    chain_indptr: IntArray  # per chain
    chain_operations: IntArray
    chain_before: IntArray  # per chain: the chain that must end first, -1 for none
    users_indptr: IntArray  # per resource
    slot_in: IntArray
    slot_out: IntArray

    @classmethod
    def of(cls, graph: Schedule) -> DispatchGraph:
        """Arrays of a graph whose operations hold at most one resource each."""
        after = graph.successors
        chain, chain_indptr, chain_operations, chain_before = _chains(graph)
        stage = np.where(graph.single_resource >= 0, graph.stage, -1)
        return cls(
            graph.duration, graph.single_resource, graph.release,
            after.indptr, after.other, after.weight,
            np.bincount(graph.arcs.head, minlength=graph.n_operations).astype(np.int64),
            graph.family, graph.setup_in, graph.setup_out,
            graph.acquire, graph.free, graph.workspace,
            np.where(graph.memory == 0, NO_LIMIT, graph.memory),
            np.zeros(graph.n_resources, np.int64),
            chain, chain_indptr, chain_operations, chain_before, graph.users.indptr,
            np.where(graph.kind == "F", stage, -1),
            np.where((graph.kind == "B") | (graph.kind == "I"), stage, -1),
        )  # fmt: skip

    def reversed(self) -> DispatchGraph:
        """Time mirrored: arcs turned, setups and memory exchanged, releases dropped.

        Orders found here, read backwards, are orders of the original (start times differ).
        """
        n = len(self.duration)
        tail = np.repeat(np.arange(n), np.diff(self.indptr))
        lag = self.weight - self.duration[tail]
        order = np.argsort(self.successor, kind="stable")
        indptr = np.zeros(n + 1, np.int64)
        np.cumsum(np.bincount(self.successor, minlength=n), out=indptr[1:])
        # a chain runs backwards too: its operations are listed ascending, so turn each row
        operations = self.chain_operations.copy()
        for a, b in zip(self.chain_indptr, self.chain_indptr[1:], strict=False):
            operations[a:b] = operations[a:b][::-1]
        before = np.full(len(self.chain_before), -1, np.int64)
        known = np.flatnonzero(self.chain_before >= 0)
        before[self.chain_before[known]] = known
        weight = np.maximum(self.duration[self.successor[order]] + lag[order], 0)
        kept = np.zeros(len(self.memory), np.int64)  # what nobody frees is there from the start
        placed = self.resource >= 0
        np.add.at(kept, self.resource[placed], (self.acquire - self.free)[placed])
        return self._replace(
            release=np.zeros(n, np.int64), indptr=indptr, successor=tail[order], weight=weight,
            n_before=np.diff(self.indptr), setup_in=self.setup_out, setup_out=self.setup_in,
            acquire=self.free, free=self.acquire, level=kept, chain_operations=operations,
            chain_before=before, slot_in=self.slot_out, slot_out=self.slot_in,
        )  # fmt: skip


def run(
    graph: DispatchGraph,
    priority: IntArray,
    *,
    active: bool = False,
    first_come: bool = False,
    slot_limit: IntArray | None = None,
) -> tuple[IntArray, IntArray] | None:
    """One list schedule.

    Parameters
    ----------
    graph
        Arrays of the problem.
    priority
        A permutation: the smallest value wins.
    active
        Giffler-Thompson instead of non-delay.
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
    limit = np.zeros(0, np.int64) if slot_limit is None else slot_limit
    operations, start, count = plain_python.run(
        _dispatch, *graph, priority, limit, active, first_come
    )
    return (operations, start) if count == len(graph.duration) else None


def _chains(graph: Schedule) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Memory-holding operations grouped by (job, micro-batch, iteration), ascending."""
    n = graph.n_operations
    chain = np.full(n, -1, np.int64)
    touching = np.flatnonzero((graph.acquire > 0) | (graph.free > 0) | (graph.workspace > 0))
    if not graph.memory.any() or not len(touching):
        empty = np.zeros(0, np.int64)
        return chain, np.zeros(1, np.int64), empty, empty
    labels = np.stack([graph.job, graph.microbatch, graph.iteration])[:, touching]
    found, number = np.unique(labels, axis=1, return_inverse=True)
    chain[touching] = number.ravel()
    order = np.argsort(chain[touching], kind="stable")
    indptr = np.zeros(found.shape[1] + 1, np.int64)
    np.cumsum(np.bincount(chain[touching], minlength=found.shape[1]), out=indptr[1:])
    before = np.full(found.shape[1], -1, np.int64)
    tail, head = chain[graph.arcs.tail], chain[graph.arcs.head]
    across = (tail >= 0) & (head >= 0) & (tail != head)
    np.maximum.at(before, head[across], tail[across])
    return chain, indptr, touching[order], before


@helper(BOOL, INT, READ, READ, READ, READ, READ, READ, READ, READ, READ, INTS, INTS, INTS, INTS)
def _safe(  # type: ignore[no-untyped-def]
    i, resource, acquire, free, workspace, memory, chain, chain_indptr, chain_operations,
    chain_before, level, held, scheduled, in_flight,
):  # fmt: skip
    """Banker's check: after i, all chains in flight can still end one after the other.

    `level` bytes per resource, `held` bytes per (chain, resource), `scheduled` per operation,
    `in_flight` per chain (1 = begun and not ended); nothing is changed on return.
    """
    n_resources = len(memory)
    n_chains = len(chain_before)
    scheduled[i] = 1
    room = np.empty(n_resources, np.int64)
    for r in range(n_resources):
        room[r] = memory[r] - level[r]
    room[resource[i]] -= acquire[i] - free[i]
    pending = np.empty(n_chains, np.int64)
    n_pending = 0
    for c in range(n_chains):
        if in_flight[c] or c == chain[i]:
            pending[n_pending] = c
            n_pending += 1
    open_chain = np.zeros(n_chains, np.int64)
    for k in range(n_pending):
        open_chain[pending[k]] = 1
    used = np.zeros(n_resources, np.int64)
    progress = True
    while n_pending > 0 and progress:
        progress = False
        k = 0
        while k < n_pending:
            c = pending[k]
            if chain_before[c] >= 0 and open_chain[chain_before[c]]:
                k += 1
                continue
            used[:] = 0
            fits = True
            for at in range(chain_indptr[c], chain_indptr[c + 1]):
                o = chain_operations[at]
                if scheduled[o]:
                    continue
                r = resource[o]
                if memory[r] != NO_LIMIT and used[r] + acquire[o] + workspace[o] > room[r]:
                    fits = False
                    break
                used[r] += acquire[o] - free[o]
            if not fits:
                k += 1
                continue
            for r in range(n_resources):
                room[r] += held[c * n_resources + r]
            if c == chain[i]:
                room[resource[i]] += acquire[i] - free[i]
            open_chain[c] = 0
            n_pending -= 1
            pending[k] = pending[n_pending]
            progress = True
    scheduled[i] = 0
    return n_pending == 0


@entry(types.Tuple((INTS, INTS, INT)), *[READ] * 24, BOOL, BOOL)
def _dispatch(  # type: ignore[no-untyped-def]
    duration, resource, release, indptr, successor, weight, n_before, family, setup_in, setup_out,
    acquire, free, workspace, memory, held_before, chain, chain_indptr, chain_operations,
    chain_before, users_indptr, slot_in, slot_out, priority, slot_limit, active, first_come,
):  # fmt: skip
    """Dispatch all operations; returns (order of dispatch, starts, how many were placed).

    One long function on purpose: with its scans split off, inlined by force or not, it took 1.6
    times as long (`benchmarks/core.py`, "one rule").
    """
    n, n_resources, n_chains = len(duration), len(memory), len(chain_before)
    start = np.zeros(n, np.int64)
    order = np.empty(n, np.int64)
    available = release.copy()
    waiting = n_before.copy()
    ready = np.empty(max(1, users_indptr[-1]), np.int64)  # ready operations per resource
    n_ready = np.zeros(n_resources, np.int64)
    place = np.zeros(n, np.int64)
    machine_free = np.zeros(n_resources, np.int64)
    last = np.full(n_resources, -1, np.int64)
    best_op = np.full(n_resources, -1, np.int64)
    best_time = np.zeros(n_resources, np.int64)
    best_key = np.zeros(n_resources, np.int64)
    dirty = np.ones(n_resources, np.int64)
    level = held_before.copy()
    held = np.zeros(max(1, n_chains * n_resources), np.int64)
    in_flight = np.zeros(n_chains, np.int64)
    left_in_chain = np.zeros(n_chains, np.int64)
    for c in range(n_chains):
        left_in_chain[c] = chain_indptr[c + 1] - chain_indptr[c]
    limited = len(slot_limit) > 0
    slots = np.zeros(len(slot_limit), np.int64)
    slot = np.empty(n, np.int64)
    need = np.empty(n, np.int64)
    for i in range(n):
        slot[i] = slot_in[i] if slot_in[i] < len(slot_limit) else -1
        need[i] = acquire[i] + workspace[i]
    scheduled = np.zeros(n, np.int64)
    blocked = np.full(n, -1, np.int64)
    epoch = 0
    starved = False  # somebody waits to free what is not held yet
    count = 0
    # operations without a resource start as soon as they are available
    free_stack = np.empty(n, np.int64)
    n_free = 0
    for i in range(n):
        if waiting[i] == 0:
            if resource[i] < 0:
                free_stack[n_free] = i
                n_free += 1
            else:
                r = resource[i]
                place[i] = users_indptr[r] + n_ready[r]
                ready[place[i]] = i
                n_ready[r] += 1
    while count < n:
        chosen = -1
        if n_free > 0:
            n_free -= 1
            chosen = free_stack[n_free]
            start[chosen] = available[chosen]
        while chosen < 0:
            # per resource: the earliest start (or, active, the earliest end), ties by key
            for r in range(n_resources):
                if not dirty[r]:
                    continue
                dirty[r] = 0
                best_op[r] = -1
                for k in range(users_indptr[r], users_indptr[r] + n_ready[r]):
                    i = ready[k]
                    if blocked[i] == epoch or level[r] + need[i] > memory[r]:
                        continue
                    if limited and slot[i] >= 0 and slots[slot[i]] >= slot_limit[slot[i]]:
                        continue
                    at = machine_free[r]
                    if last[r] >= 0 and family[last[r]] != family[i]:
                        at += setup_out[last[r]] + setup_in[i]
                    at = max(at, available[i])
                    if active:
                        at += duration[i]
                    key = available[i] if first_come else 0
                    b = best_op[r]
                    if (
                        b < 0
                        or at < best_time[r]
                        or (
                            at == best_time[r]
                            and (
                                key < best_key[r]
                                or (key == best_key[r] and priority[i] < priority[b])
                            )
                        )
                    ):
                        best_op[r] = i
                        best_time[r] = at
                        best_key[r] = key
            r_star = -1
            for r in range(n_resources):
                if best_op[r] < 0:
                    continue
                if (
                    r_star < 0
                    or best_time[r] < best_time[r_star]
                    or (
                        best_time[r] == best_time[r_star]
                        and (
                            best_key[r] < best_key[r_star]
                            or (
                                best_key[r] == best_key[r_star]
                                and priority[best_op[r]] < priority[best_op[r_star]]
                            )
                        )
                    )
                ):
                    r_star = r
            if r_star < 0:
                return order, start, count  # stuck
            r = r_star
            i = best_op[r]
            if active:  # Giffler-Thompson: anyone who could start before the earliest end
                end = best_time[r]
                key = available[i]
                for k in range(users_indptr[r], users_indptr[r] + n_ready[r]):
                    o = ready[k]
                    if blocked[o] == epoch or level[r] + need[o] > memory[r]:
                        continue
                    if limited and slot[o] >= 0 and slots[slot[o]] >= slot_limit[slot[o]]:
                        continue
                    at = machine_free[r]
                    if last[r] >= 0 and family[last[r]] != family[o]:
                        at += setup_out[last[r]] + setup_in[o]
                    at = max(at, available[o])
                    if at >= end:
                        continue
                    if first_come and available[o] != key:
                        better = available[o] < key
                    else:
                        better = priority[o] < priority[i]
                    if better:
                        i = o
                        key = available[o]
            admitted = True
            if level[r] + need[i] > memory[r]:
                admitted = False
            if level[r] + acquire[i] < free[i]:
                admitted = False
                starved = True
            if admitted and limited and slot[i] >= 0:
                admitted = slots[slot[i]] < slot_limit[slot[i]]
            if admitted and n_chains > 0 and acquire[i] > free[i]:
                admitted = _safe(
                    i, resource, acquire, free, workspace, memory, chain, chain_indptr,
                    chain_operations, chain_before, level, held, scheduled, in_flight,
                )  # fmt: skip
            if not admitted:
                blocked[i] = epoch
                dirty[r] = 1
                continue
            chosen = i
            at = machine_free[r]
            if last[r] >= 0 and family[last[r]] != family[i]:
                at += setup_out[last[r]] + setup_in[i]
            start[i] = max(at, available[i])
            machine_free[r] = start[i] + duration[i]
            last[r] = i
            dirty[r] = 1
            n_ready[r] -= 1
            moved = ready[users_indptr[r] + n_ready[r]]
            ready[place[i]] = moved
            place[moved] = place[i]
            level[r] += acquire[i] - free[i]
            c = chain[i]
            if c >= 0:
                held[c * n_resources + r] += acquire[i] - free[i]
                left_in_chain[c] -= 1
                in_flight[c] = left_in_chain[c] > 0
            if limited and slot[i] >= 0:
                slots[slot[i]] += 1
            freed = free[i] > acquire[i] or (c >= 0 and left_in_chain[c] == 0)
            if starved and acquire[i] > free[i]:
                starved = False
                freed = True
            if slot_out[i] >= 0 and slot_out[i] < len(slot_limit):
                slots[slot_out[i]] -= 1
                freed = True
            if freed:
                epoch += 1
                for q in range(n_resources):
                    dirty[q] = 1
        i = chosen
        scheduled[i] = 1
        order[count] = i
        count += 1
        for e in range(indptr[i], indptr[i + 1]):
            j = successor[e]
            available[j] = max(available[j], start[i] + weight[e])
            waiting[j] -= 1
            if waiting[j] == 0:
                if resource[j] < 0:
                    free_stack[n_free] = j
                    n_free += 1
                else:
                    q = resource[j]
                    place[j] = users_indptr[q] + n_ready[q]
                    ready[place[j]] = j
                    n_ready[q] += 1
                    dirty[q] = 1
    return order, start, count
