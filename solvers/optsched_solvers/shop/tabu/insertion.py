"""Schedules by best insertion: Nowicki and Smutnicki's INSA.

Nowicki & Smutnicki 1996, "A fast taboo search algorithm for the job shop problem", section 4:
operations enter the order of their resource one by one, each where the longest path through it is
shortest. Here with lags, setups and releases; held bytes are left to the decoder's repair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.kernels import list_schedule, longest_path
from optsched.kernels.compile import INT, INTS, READ, entry, helper, record, records
from optsched.kernels.list_schedule import ARC, OPERATION, DispatchGraph
from optsched.model.graph import evaluate, machine_orders
from optsched.model.schedule import NO_DEADLINE, Csr, Objective

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import IntArray, Schedule

LINK = record("after before head tail waiting place is_behind leads")
"""Of an operation: its neighbours on the machine, and what the last step knew of it."""

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
    order = order[graph.single_resource[order] >= 0]
    listed, before = DispatchGraph.of(graph), graph.predecessors
    link = np.empty(graph.n_operations, LINK)
    link["after"] = link["before"] = -1
    first = np.full(graph.n_resources, -1, np.int64)
    topological = np.empty(graph.n_operations, np.int64)
    slice_size = max(1, _STEPS // max(1, graph.n_operations))
    for at in range(0, max(1, len(order)), slice_size):
        if at and stop():
            return None
        _insert(
            order[at : at + slice_size], first, link, topological, listed.operation, listed.arc,
            before.indptr, before.other,
        )  # fmt: skip
    sequences, heads = machine_orders(graph, topological), link["head"]
    if graph.memory.any() or graph.free.any():
        repaired = _with_memory(graph, listed, sequences, heads)
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


def _with_memory(
    graph: Schedule, listed: DispatchGraph, sequences: Csr, heads: IntArray
) -> tuple[Csr, IntArray] | None:
    """Orders whose bytes fit, and their heads: these, or the list scheduler's repair of them."""
    found = list_schedule.run(listed, ranks(graph, sequences, heads), list_schedule.Mode.IN_ORDER)
    if found is None:
        return None
    repaired = machine_orders(graph, found[0])
    if repaired == sequences:
        return sequences, heads
    return repaired, longest_path.evaluate(graph, repaired).heads


def ranks(graph: Schedule, sequences: Csr, heads: IntArray) -> IntArray:
    """A priority of the operations by which the list scheduler makes these orders again."""
    place = np.arange(graph.n_operations)
    if not ((graph.duration > 0).all() and (graph.successors.weight > 0).all()):
        # of operations that start together some must still go first
        place[evaluate(graph, sequences).order] = np.arange(graph.n_operations)
    rank = np.empty(graph.n_operations, np.int64)
    rank[np.lexsort((place, heads))] = np.arange(graph.n_operations)
    return rank


@helper(counted=False, inline=True)
def _setup(op, i, j):  # type: ignore[no-untyped-def]
    """Between i and j, its successor on the machine."""
    return 0 if op[i].family == op[j].family else op[i].setup_out + op[j].setup_in


@helper(counted=False, inline=True)
def _reach(link, topological, placed, j, head):  # type: ignore[no-untyped-def]
    """Over an arc to j, of which this may be the last."""
    link[j].head = max(link[j].head, head)
    link[j].waiting -= 1
    if link[j].waiting > 0:
        return 0
    topological[placed] = j
    return 1


@helper(counted=False, inline=True)
def _heads(op, arc, link, topological):  # type: ignore[no-untyped-def]
    """Heads, by Kahn over arcs and lists; returns how many operations are reached."""
    placed = 0
    for i in range(len(op)):
        link[i].head = op[i].release
        link[i].waiting = op[i].n_before + (1 if link[i].before >= 0 else 0)
        if link[i].waiting == 0:
            topological[placed] = i
            placed += 1
    at = 0
    while at < placed:
        i = topological[at]
        link[i].place = at
        at += 1
        for e in range(op[i].first_arc, op[i].end_arc):
            placed += _reach(link, topological, placed, arc[e].head, link[i].head + arc[e].weight)
        j = link[i].after
        if j >= 0:
            head = link[i].head + op[i].duration + _setup(op, i, j)
            placed += _reach(link, topological, placed, j, head)
    return placed


@helper(counted=False, inline=True)
def _tails_and_reach(op, arc, back, predecessor, link, topological, x, step):  # type: ignore[no-untyped-def]
    """Tails; who is behind x, and who leads to it."""
    link[x].is_behind = step
    for at in range(link[x].place, len(op)):
        i = topological[at]
        if link[i].is_behind == step:
            for e in range(op[i].first_arc, op[i].end_arc):
                link[arc[e].head].is_behind = step
            if link[i].after >= 0:
                link[link[i].after].is_behind = step
    link[x].leads = step
    for at in range(len(op) - 1, -1, -1):
        i = topological[at]
        tail = op[i].duration
        for e in range(op[i].first_arc, op[i].end_arc):
            tail = max(tail, arc[e].weight + link[arc[e].head].tail)
        j = link[i].after
        if j >= 0:
            tail = max(tail, op[i].duration + _setup(op, i, j) + link[j].tail)
        link[i].tail = tail
        if link[i].leads == step:
            for e in range(back[i], back[i + 1]):
                link[predecessor[e]].leads = step
            if link[i].before >= 0:
                link[link[i].before].leads = step


@helper(counted=False, inline=True)
def _best_place(op, link, first, x, step):  # type: ignore[no-untyped-def]
    """Behind whom x comes (-1: first), so that the longest path through it is shortest.

    Behind all that lead to x and before all that are behind it every place is possible.
    """
    left, right = -1, first
    best_left, best = -2, 0
    while True:
        if right < 0 or link[right].leads != step:
            head = link[x].head
            if left >= 0:
                head = max(head, link[left].head + op[left].duration + _setup(op, left, x))
            tail = link[x].tail
            if right >= 0:
                tail = max(tail, op[x].duration + _setup(op, x, right) + link[right].tail)
            if best_left == -2 or head + tail < best:
                best_left = left
                best = head + tail
        if right < 0 or link[right].is_behind == step:
            return best_left
        left = right
        right = link[right].after


@entry(
    INT, READ, INTS, records(LINK), INTS, records(OPERATION, True), records(ARC, True), READ, READ,
    counted=False,
)  # fmt: skip
def _insert(order, first, link, topological, op, arc, back, predecessor):  # type: ignore[no-untyped-def]
    """Insert the operations of `order` into the linked lists (`first` per machine; -1 = none).

    Fills the heads and `topological`; returns how many operations are in it.
    ``predecessor[back[i]:back[i + 1]]`` are those of i.
    """
    for i in range(len(op)):
        link[i].is_behind = -1
        link[i].leads = -1
    for step in range(len(order)):
        _heads(op, arc, link, topological)
        x = order[step]
        _tails_and_reach(op, arc, back, predecessor, link, topological, x, step)
        r = op[x].resource
        left = _best_place(op, link, first[r], x, step)
        right = first[r] if left < 0 else link[left].after
        link[x].before = left
        link[x].after = right
        if left < 0:
            first[r] = x
        else:
            link[left].after = x
        if right >= 0:
            link[right].before = x
    return _heads(op, arc, link, topological)
