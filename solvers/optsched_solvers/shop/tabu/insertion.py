"""Schedules by best insertion: Nowicki and Smutnicki's INSA, and completion of partial orders.

Nowicki & Smutnicki 1996, "A fast taboo search algorithm for the job shop problem", section 4:
operations enter the order of their resource one by one, each where the longest path through it is
shortest. Here with lags, setups and releases; held bytes are left to the decoder's repair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry
from optsched.model.graph import cyclic_order
from optsched.model.schedule import NO_DEADLINE, Objective, Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import IntArray, Schedule

_STEPS = 1_000_000
"""Operations looked at between two questions whether to stop: order of 20 ms."""


def insertion(graph: Schedule, stop: Callable[[], bool] = lambda: False) -> Schedule | None:
    """Insert the job of most work first, then operation by operation, the longest first.

    Takes time in proportion to the square of the number of operations.

    Parameters
    ----------
    graph
        A disjunctive graph (or schedule: its orders are ignored) whose operations hold at most one
        resource each.
    stop
        Asked now and then; true gives up.

    Returns
    -------
    Schedule or None
        The semi-active schedule; None where memory or a deadline cannot be kept, or when stopped.
    """
    work = np.zeros(int(graph.job.max(initial=-1)) + 1, np.int64)
    np.add.at(work, graph.job, graph.duration)
    operations = np.arange(graph.n_operations)
    others = graph.job != (int(np.argmax(work)) if len(work) else 0)
    order = operations[np.lexsort((operations, np.where(others, -graph.duration, 0), others))]
    return _completed(graph, Rows.of([[]] * graph.n_resources), order, stop)


def complete(
    graph: Schedule, partial: Rows, stop: Callable[[], bool] = lambda: False
) -> Schedule | None:
    """Fill the operations that orders lack in, the longest first, each at its best place.

    Parameters
    ----------
    graph
        A disjunctive graph (or schedule: its orders are ignored) whose operations hold at most one
        resource each.
    partial
        Per resource an order of some of its users.
    stop
        Asked now and then; true gives up.

    Returns
    -------
    Schedule or None
        The semi-active schedule, in which the given operations keep their order, unless held bytes
        force another; None where memory or a deadline cannot be kept, or when stopped.

    Raises
    ------
    CyclicOrder
        The partial orders contradict the arcs.
    InputError
        They hold an operation twice, or on a resource that it does not use.
    """
    _check(graph, partial)
    missing = np.setdiff1d(np.arange(graph.n_operations), partial.ids)
    order = missing[np.argsort(-graph.duration[missing], kind="stable")]
    return _completed(graph, partial, order, stop)


def _completed(
    graph: Schedule, partial: Rows, order: IntArray, stop: Callable[[], bool]
) -> Schedule | None:
    """Orders after insertion in this order, repaired for memory, as a schedule."""
    resource = graph.single_resource
    first = np.full(graph.n_resources, -1, np.int64)
    after = np.full(graph.n_operations, -1, np.int64)
    before = np.full(graph.n_operations, -1, np.int64)
    for r in range(graph.n_resources):
        row = partial[r]
        if len(row):
            first[r] = row[0]
            after[row[:-1]], before[row[1:]] = row[1:], row[:-1]
    waiting = np.bincount(graph.arcs.head, minlength=graph.n_operations).astype(np.int64)
    order = order[resource[order] >= 0]
    slice_size = max(1, _STEPS // max(1, graph.n_operations))
    for at in range(0, max(1, len(order)), slice_size):
        if at and stop():
            return None
        heads, topological, placed = _insert(
            order[at : at + slice_size], first, after, before, resource, graph.duration,
            graph.release, graph.family, graph.setup_in, graph.setup_out, *graph.successors,
            *graph.predecessors, waiting,
        )  # fmt: skip
        if placed < graph.n_operations:
            stuck = np.setdiff1d(np.arange(graph.n_operations), topological[:placed])
            raise cyclic_order(graph, partial, stuck.tolist())
    operations = topological[resource[topological] >= 0]
    sequences = Rows(
        graph.users.indptr, operations[np.argsort(resource[operations], kind="stable")]
    )
    if graph.memory.any() or graph.free.any():
        repaired = _with_memory(graph, sequences, heads)
        if repaired is None:
            return None
        sequences, heads = repaired
    if (heads + graph.duration > graph.deadline)[graph.deadline != NO_DEADLINE].any():
        return None
    value = int((heads + graph.duration).max(initial=0))
    return graph.with_orders(
        sequences, heads, Objective("makespan", value, None, "feasible"),
        {"solver": "dispatch", "rule": "insertion"},
    )  # fmt: skip


def _with_memory(graph: Schedule, sequences: Rows, heads: IntArray) -> tuple[Rows, IntArray] | None:
    """Orders whose bytes fit, and their heads: these, or the decoder's repair of them."""
    from optsched.kernels import longest_path
    from optsched_solvers.literature.operation_based import STUCK, Encoding, decode

    encoding = Encoding.of(graph)
    genes = encoding.encode(graph, sequences).reshape(1, -1)
    if decode(encoding, genes)[0] == STUCK:
        return None
    repaired = encoding.sequences(graph, genes[0])
    if repaired == sequences:
        return sequences, heads
    return repaired, longest_path.evaluate(graph, repaired).heads


def _check(graph: Schedule, partial: Rows) -> None:
    if len(partial) != graph.n_resources:
        raise InputError(
            f"partial: expected {graph.n_resources} rows, one per resource, got {len(partial)}"
        )
    seen: set[int] = set()
    for r, row in enumerate(partial.to_lists()):
        users = set(graph.users[r].tolist())
        for i in row:
            if i not in users:
                raise InputError(f"partial[{r}]: operation {i} does not use this resource")
            if i in seen:
                raise InputError(f"partial[{r}]: operation {i} appears twice")
            seen.add(i)


@entry(types.Tuple((INTS, INTS, INT)), READ, INTS, INTS, INTS, *[READ] * 13)
def _insert(  # type: ignore[no-untyped-def]
    order, first, after, before, resource, duration, release, family, setup_in, setup_out,
    succ_ptr, successor, succ_weight, pred_ptr, predecessor, pred_weight, n_before,
):  # fmt: skip
    """Insert the operations of `order` into the linked lists (first, after, before; -1 = none).

    Returns heads, a topological order, and how many operations are in it: fewer than all if the
    lists contradict the arcs.
    """
    n = len(duration)
    heads = np.empty(n, np.int64)
    tails = np.empty(n, np.int64)
    topological = np.empty(n, np.int64)
    waiting = np.empty(n, np.int64)
    place = np.empty(n, np.int64)
    reached = np.empty(n, np.int64)  # step in which x is known to go before
    reaches = np.empty(n, np.int64)
    reached[:] = -1
    reaches[:] = -1
    for step in range(len(order) + 1):
        placed = 0
        for i in range(n):
            heads[i] = release[i]
            waiting[i] = n_before[i] + (before[i] >= 0)
            if waiting[i] == 0:
                topological[placed] = i
                placed += 1
        at = 0
        while at < placed:
            i = topological[at]
            place[i] = at
            at += 1
            for e in range(succ_ptr[i], succ_ptr[i + 1]):
                j = successor[e]
                heads[j] = max(heads[j], heads[i] + succ_weight[e])
                waiting[j] -= 1
                if waiting[j] == 0:
                    topological[placed] = j
                    placed += 1
            j = after[i]
            if j >= 0:
                setup = 0 if family[i] == family[j] else setup_out[i] + setup_in[j]
                heads[j] = max(heads[j], heads[i] + duration[i] + setup)
                waiting[j] -= 1
                if waiting[j] == 0:
                    topological[placed] = j
                    placed += 1
        if placed < n or step == len(order):
            return heads, topological, placed
        x = order[step]
        reached[x] = step
        for at in range(place[x], n):
            i = topological[at]
            if reached[i] == step:
                for e in range(succ_ptr[i], succ_ptr[i + 1]):
                    reached[successor[e]] = step
                if after[i] >= 0:
                    reached[after[i]] = step
        reaches[x] = step
        for at in range(n - 1, -1, -1):
            i = topological[at]
            tails[i] = duration[i]
            for e in range(succ_ptr[i], succ_ptr[i + 1]):
                tails[i] = max(tails[i], succ_weight[e] + tails[successor[e]])
            j = after[i]
            if j >= 0:
                setup = 0 if family[i] == family[j] else setup_out[i] + setup_in[j]
                tails[i] = max(tails[i], duration[i] + setup + tails[j])
            if reaches[i] == step:
                for e in range(pred_ptr[i], pred_ptr[i + 1]):
                    reaches[predecessor[e]] = step
                if before[i] >= 0:
                    reaches[before[i]] = step
        # behind all that lead to x, before all that x leads to: there every place is possible
        r = resource[x]
        left = -1
        right = first[r]
        best_left = -2
        best = 0
        while True:
            if right < 0 or reaches[right] != step:
                head = heads[x]
                if left >= 0:
                    setup = 0 if family[left] == family[x] else setup_out[left] + setup_in[x]
                    head = max(head, heads[left] + duration[left] + setup)
                tail = tails[x]
                if right >= 0:
                    setup = 0 if family[x] == family[right] else setup_out[x] + setup_in[right]
                    tail = max(tail, duration[x] + setup + tails[right])
                if best_left == -2 or head + tail < best:
                    best_left = left
                    best = head + tail
            if right < 0 or reached[right] == step:
                break
            left = right
            right = after[right]
        left = best_left
        right = first[r] if left < 0 else after[left]
        before[x] = left
        after[x] = right
        if left < 0:
            first[r] = x
        else:
            after[left] = x
        if right >= 0:
            before[right] = x
    return heads, topological, 0
