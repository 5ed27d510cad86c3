"""Heads, tails and the longest path of a graph with given orders, in pure Python.

The same numbers as the compiled `optsched.kernels.longest_path`, for single evaluations without
the import of a compiler.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.errors import CyclicOrder, InputError
from optsched.model.objectives import objective_name, objective_value
from optsched.model.schedule import Csr, IntArray, Objective, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping


class Evaluation(NamedTuple):
    """Longest paths of a graph under given orders.

    ``head[i]`` is the longest path from the source to the start of i (Pinedo, Scheduling, 7.1),
    ``tail[i]`` the longest path from the start of i to the sink, the duration of i included;
    i is critical iff ``head[i] + tail[i] == makespan``. ``order`` is one topological order.
    """

    head: IntArray
    tail: IntArray
    makespan: int
    order: IntArray


def evaluate(graph: Schedule, sequences: Csr | None = None) -> Evaluation:
    """Heads, tails and makespan of a one-shot graph under the given machine orders.

    Without `sequences` only the conjunctive arcs count, so that heads and tails are lower bounds
    for every schedule. `CyclicOrder`: the orders contradict the arcs; ``.cycle`` lists the
    operations on one cycle.
    """
    if graph.period is not None:
        raise InputError("a periodic schedule has no single longest path; unroll it first")
    if sequences is not None:
        check_permutations(graph, sequences)
        return _evaluate(graph, sequences)
    kept: Evaluation | None = graph.__dict__.get("_evaluation")  # used by every bound
    if kept is None:
        kept = graph.__dict__["_evaluation"] = _evaluate(graph, None)
        for column in (kept.head, kept.tail, kept.order):
            column.flags.writeable = False
    return kept


def _evaluate(graph: Schedule, sequences: Csr | None) -> Evaluation:
    n = graph.n_operations
    after = _weighted_successors(graph, sequences)
    waiting = [0] * n
    for row in after:
        for j, _ in row:
            waiting[j] += 1
    head = graph.release.tolist()
    order = [i for i in range(n) if not waiting[i]]
    # Kahn's algorithm; invariant: head[i] is final when i enters `order`, which grows in the loop
    for i in order:
        h = head[i]
        for j, weight in after[i]:
            if h + weight > head[j]:
                head[j] = h + weight
            waiting[j] -= 1
            if not waiting[j]:
                order.append(j)
    if len(order) < n:
        raise cyclic_order(graph, sequences, [i for i in range(n) if waiting[i]])
    tail = graph.duration.tolist()
    for i in reversed(order):
        for j, weight in after[i]:
            if weight + tail[j] > tail[i]:
                tail[i] = weight + tail[j]
    makespan = max((h + p for h, p in zip(head, graph.duration.tolist(), strict=True)), default=0)
    return Evaluation(
        np.array(head, np.int64), np.array(tail, np.int64), makespan, np.array(order, np.int64)
    )


def scheduled(
    graph: Schedule, sequences: Csr, provenance: Mapping[str, Any] | None = None
) -> Schedule:
    """Make the semi-active schedule of the given orders: every operation starts at its head.

    Raises like `evaluate`.
    """
    found = evaluate(graph, sequences)
    reached = objective_value(graph, found.head + graph.duration)
    objective = Objective(objective_name(graph), reached, None, "feasible")
    return graph.with_orders(sequences, found.head, objective, provenance)


def machine_orders(graph: Schedule, operations: IntArray) -> Csr:
    """The order on each resource from one order of all operations.

    Operations hold at most one resource; those without are left out.
    """
    resource = graph.single_resource[operations]
    used = operations[resource >= 0]
    order = np.argsort(resource[resource >= 0], kind="stable")
    return Csr(graph.users.indptr, used[order])


def check_permutations(graph: Schedule, sequences: Csr) -> None:
    """Refuse orders that do not hold exactly the users of each resource, once."""
    if len(sequences) != graph.n_resources:
        raise InputError(
            f"sequences: expected {graph.n_resources} rows, one per resource, got {len(sequences)}"
        )
    for r in range(graph.n_resources):
        if np.array_equal(np.sort(sequences[r]), graph.users[r]):
            continue
        given, users = sequences[r].tolist(), set(graph.users[r].tolist())
        foreign = next((i for i in given if i not in users), None)
        if foreign is not None:
            raise InputError(f"sequences[{r}]: operation {foreign} does not use this resource")
        doubled = next((i for i in given if given.count(i) > 1), None)
        if doubled is not None:
            raise InputError(f"sequences[{r}]: operation {doubled} appears twice")
        missing = min(users - set(given))
        raise InputError(f"sequences[{r}]: operation {missing} is missing")


def cyclic_order(graph: Schedule, sequences: Csr | None, among: list[int]) -> CyclicOrder:
    """The error for contradicting orders, with a shortest cycle.

    `among` are operations that contain all cycles, such as those Kahn's algorithm could not place.
    """
    weighted = _weighted_successors(graph, sequences)
    best = shortest_cycle(among, [[j for j, _ in row] for row in weighted])
    conjunctive = set(zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True))
    steps = [
        _step(graph, sequences, i, j, (i, j) in conjunctive)
        for i, j in zip(best, best[1:] + best[:1], strict=True)
    ]
    listed = "; ".join(steps[:_LISTED])
    more = f"; and {len(steps) - _LISTED} more" if len(steps) > _LISTED else ""
    return CyclicOrder(f"the orders contradict each other: {listed}{more}", best)


def shortest_cycle(among: list[int], after: list[list[int]]) -> list[int]:
    """A cycle of fewest operations, approximately in graphs with over 500 candidates.

    `among` are operations that contain all cycles, `after` the successors of every operation.
    """
    stuck = set(among)
    best: list[int] = []
    for source in among[:_CYCLE_SOURCES]:
        cycle = _cycle_through(source, after, stuck, len(best))
        if cycle:
            best = cycle
    return best


def describe(graph: Schedule, i: int) -> str:
    """Name an operation, ``F(job 3, stage 2)``, with the name of the job if it has one."""
    kind = str(graph.kind[i]) or "operation"
    name = f"{kind}(job {graph.job_name(int(graph.job[i]))}, stage {graph.stage[i]}"
    if graph.microbatch.any():
        name += f", micro-batch {graph.microbatch[i]}"
    return name + ")"


_LISTED = 12  # steps of a cycle in a message; the error holds all operations
_CYCLE_SOURCES = 500  # limits the time for a shortest cycle


def _weighted_successors(graph: Schedule, sequences: Csr | None) -> list[list[tuple[int, int]]]:
    after: list[list[tuple[int, int]]] = [[] for _ in range(graph.n_operations)]
    weights = (graph.duration[graph.arcs.tail] + graph.arcs.lag).tolist()
    for i, j, weight in zip(
        graph.arcs.tail.tolist(), graph.arcs.head.tolist(), weights, strict=True
    ):
        after[i].append((j, weight))
    if sequences is None or len(sequences.ids) == 0:
        return after
    left, right = sequences.ids[:-1], sequences.ids[1:]
    inside = np.ones(len(left), bool)
    ends = sequences.indptr[1:-1]
    inside[ends[(ends > 0) & (ends <= len(left))] - 1] = False  # last of one row, first of the next
    left, right = left[inside], right[inside]
    weights = (graph.duration[left] + graph.setups(left, right)).tolist()
    for i, j, weight in zip(left.tolist(), right.tolist(), weights, strict=True):
        after[i].append((j, weight))
    return after


def _cycle_through(source: int, after: list[list[int]], allowed: set[int], below: int) -> list[int]:
    """A shortest cycle through source by breadth-first search; [] if none is shorter than below."""
    parent = {source: -1}
    queue = deque([(source, 1)])
    while queue:
        i, length = queue.popleft()
        if below and length >= below:
            return []
        for j in after[i]:
            if j == source:
                path = [i]
                while parent[path[-1]] != -1:
                    path.append(parent[path[-1]])
                return path[::-1]
            if j in allowed and j not in parent:
                parent[j] = i
                queue.append((j, length + 1))
    return []


def _step(graph: Schedule, sequences: Csr | None, i: int, j: int, conjunctive: bool) -> str:
    step = f"{describe(graph, i)} before {describe(graph, j)}"
    if conjunctive or sequences is None:
        return f"by an arc {step}"
    for r in graph.op_resources[i].tolist():
        row = sequences[r].tolist()
        if j in row and row.index(j) == row.index(i) + 1:
            return f"{graph.resources[r].name}: {step}"
    return step
