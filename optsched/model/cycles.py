"""Cycles in directed graphs: deadlocks of a schedule, contradictions of arcs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

_NEW, _OPEN, _DONE = 0, 1, 2


def disjoint_cycles(tail: IntArray, head: IntArray) -> list[list[int]]:
    """A maximal set of cycles without a common vertex; empty exactly if the graph has no cycle.

    Depth-first search (Tarjan 1972) that removes the vertices of every cycle it closes: linear in
    the number of edges. Returns the edge numbers of every cycle, in order.
    """
    leaving: dict[int, list[int]] = {}
    for e, i in enumerate(tail.tolist()):
        leaving.setdefault(i, []).append(e)
    heads = head.tolist()
    state: dict[int, int] = {}
    cycles = []
    for root in leaving:
        if state.get(root, _NEW) == _NEW:
            cycles += _search(root, leaving, heads, state)
    return cycles


def cycle_of(tail: IntArray, head: IntArray) -> list[int]:
    """Vertices on one cycle of the edges tail -> head, or ``[]`` if there is none."""
    if bool((tail < head).all()):  # ids in a topological order: the usual case
        return []
    cycles = disjoint_cycles(tail, head)
    return tail[cycles[0]].tolist() if cycles else []


def _search(
    root: int, leaving: dict[int, list[int]], heads: list[int], state: dict[int, int]
) -> list[list[int]]:
    """Cycles found from one vertex; marks every vertex it visits as done."""
    cycles = []
    path, place, state[root] = [root], {root: 0}, _OPEN
    entered: list[int] = []  # entered[k] leads from path[k] to path[k + 1]
    pending = [iter(leaving[root])]
    while path:
        edge = next(pending[-1], None)
        if edge is None:
            state[path.pop()] = _DONE
            pending.pop()
            del entered[-1:]
            continue
        vertex = heads[edge]
        now = state.get(vertex, _NEW)
        if now == _NEW:
            place[vertex], state[vertex] = len(path), _OPEN
            path.append(vertex)
            entered.append(edge)
            pending.append(iter(leaving.get(vertex, ())))
        elif now == _OPEN:
            k = place[vertex]
            cycles.append([*entered[k:], edge])
            for passed in path[k:]:
                state[passed] = _DONE
            del path[k:], pending[k:], entered[max(k - 1, 0) :]
    return cycles
