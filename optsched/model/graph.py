"""Heads, tails and the longest path of a selected disjunctive graph, in plain Python.

The same numbers as the compiled `optsched.kernels.longest_path`, without importing a compiler: for
single evaluations, cold starts and cycle reports.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.errors import CyclicOrder, InputError
from optsched.model.schedule import COLUMNS, Csr, IntArray, Objective, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    import networkx


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
    """Heads, tails and makespan of a graph under the given machine orders.

    Parameters
    ----------
    graph
        The disjunctive graph (one-shot: without period).
    sequences
        One order of operations per resource; without it only the conjunctive arcs count, so that
        heads and tails are lower bounds for every schedule.

    Raises
    ------
    CyclicOrder
        The orders contradict the arcs; ``.cycle`` lists the operations on one cycle.
    InputError
        A sequence is not a permutation of the users of its resource, or the graph is periodic.
    """
    if graph.period is not None:
        raise InputError("a periodic schedule has no single longest path; unroll it first")
    if sequences is not None:
        check_permutations(graph, sequences)
        return _evaluate(graph, sequences)
    kept: Evaluation | None = graph.__dict__.get("_evaluation")  # all bounds ask for it
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
    for i in order:  # grows while it is walked: Kahn's algorithm
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
    """The semi-active schedule of the given orders: every operation starts at its head.

    Raises `CyclicOrder` or `InputError` like `evaluate`.
    """
    found = evaluate(graph, sequences)
    objective = Objective("makespan", found.makespan, None, "feasible")
    return graph.with_orders(sequences, found.head, objective, provenance)


def machine_orders(graph: Schedule, operations: IntArray) -> Csr:
    """One order of all operations, cut into the order on each resource.

    Every operation holds at most one resource; those that hold none are left out.
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
        given, wanted = sequences[r].tolist(), set(graph.users[r].tolist())
        foreign = next((i for i in given if i not in wanted), None)
        if foreign is not None:
            raise InputError(f"sequences[{r}]: operation {foreign} does not use this resource")
        doubled = next((i for i in given if given.count(i) > 1), None)
        if doubled is not None:
            raise InputError(f"sequences[{r}]: operation {doubled} appears twice")
        missing = min(wanted - set(given))
        raise InputError(f"sequences[{r}]: operation {missing} is missing")


def cyclic_order(graph: Schedule, sequences: Csr | None, among: list[int]) -> CyclicOrder:
    """A `CyclicOrder` that tells a shortest cycle in words.

    Parameters
    ----------
    graph, sequences
        The graph and the orders that contradict it.
    among
        Operations that hold all cycles, such as those Kahn's algorithm could not place.
    """
    weighted = _weighted_successors(graph, sequences)
    best = shortest_cycle(among, [[j for j, _ in row] for row in weighted])
    conjunctive = set(zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True))
    steps = [
        _step(graph, sequences, i, j, (i, j) in conjunctive)
        for i, j in zip(best, best[1:] + best[:1], strict=True)
    ]
    told = "; ".join(steps[:_SHOWN_STEPS])
    more = f"; and {len(steps) - _SHOWN_STEPS} more" if len(steps) > _SHOWN_STEPS else ""
    return CyclicOrder(f"the orders contradict each other: {told}{more}", best)


def shortest_cycle(among: list[int], after: list[list[int]]) -> list[int]:
    """A cycle of fewest operations; at worst, in a huge graph, a short one.

    Parameters
    ----------
    among
        Operations that hold all cycles.
    after
        Heads of the arcs of every operation.
    """
    stuck = set(among)
    best: list[int] = []
    for source in among[:_CYCLE_SOURCES]:
        cycle = _cycle_through(source, after, stuck, len(best))
        if cycle:
            best = cycle
    return best


def describe(graph: Schedule, i: int) -> str:
    """An operation in words: ``F(job 3, stage 2)``, with the name of the job if it has one."""
    kind = str(graph.kind[i]) or "operation"
    words = f"{kind}(job {graph.job_name(int(graph.job[i]))}, stage {graph.stage[i]}"
    if graph.microbatch.any():
        words += f", micro-batch {graph.microbatch[i]}"
    return words + ")"


def to_networkx(schedule: Schedule) -> networkx.DiGraph[int]:
    """The graph as a `networkx.DiGraph`: operations as nodes with all their fields.

    Conjunctive arcs carry ``kind="conjunctive"``, ``lag``, ``distance`` and the start-to-start
    ``weight``; of a scheduled graph, neighbours on a resource carry ``kind="machine"``,
    ``resource`` and ``weight`` (duration plus setup). Of parallel arcs the heavier one is kept.
    Every edge of a periodic schedule has ``tokens``, the number of cycles it spans, and the last
    operation of a resource precedes the first again; the heavier arc is the one with the larger
    ``weight - tokens * period``.

    Raises
    ------
    MissingExtra
        networkx is not installed.
    """
    try:
        import networkx as nx
    except ImportError:
        from optsched.errors import MissingExtra

        raise MissingExtra("the networkx export", "all") from None
    graph = nx.DiGraph(name=schedule.name, time_unit=schedule.time_unit, period=schedule.period)
    columns = {key: getattr(schedule, key).tolist() for key in COLUMNS if key != "deadline"}
    if schedule.start is not None:
        columns["start"] = schedule.start.tolist()
    for i in range(schedule.n_operations):
        fields = {key: column[i] for key, column in columns.items()}
        graph.add_node(i, resources=schedule.op_resources[i].tolist(), **fields)

    turn, offset = schedule.period or 0, columns["offset"]
    heaviest: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}

    def add(i: int, j: int, weight: int, tokens: int, **fields: Any) -> None:
        needed = weight - tokens * turn
        if (i, j) not in heaviest or needed > heaviest[i, j][0]:
            spans = {"tokens": tokens} if turn else {}
            heaviest[i, j] = needed, {"weight": weight, **spans, **fields}

    for i, j, lag, distance in zip(*(c.tolist() for c in schedule.arcs), strict=True):
        weight = columns["duration"][i] + lag
        tokens = distance + offset[j] - offset[i]
        add(i, j, weight, tokens, kind="conjunctive", lag=lag, distance=distance)
    if schedule.sequences is not None:
        for r, row in enumerate(schedule.sequences.to_lists()):
            wraps = row[:1] if turn else []
            for k, (i, j) in enumerate(pairwise([*row, *wraps]), start=1):
                weight = columns["duration"][i] + schedule.setup(i, j)
                add(i, j, weight, int(k == len(row)), kind="machine", resource=r)
    graph.add_edges_from((i, j, fields) for (i, j), (_, fields) in heaviest.items())
    return graph


_SHOWN_STEPS = 12  # of a cycle in words; the error has all its operations
_CYCLE_SOURCES = 500  # enough to find a shortest cycle in practice; keeps hopeless orders quick


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
    setup = np.where(
        graph.family[left] == graph.family[right], 0, graph.setup_out[left] + graph.setup_in[right]
    )
    weights = (graph.duration[left] + setup).tolist()
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
    words = f"{describe(graph, i)} before {describe(graph, j)}"
    if conjunctive or sequences is None:
        return f"by an arc {words}"
    for r in graph.op_resources[i].tolist():
        row = sequences[r].tolist()
        if j in row and row.index(j) == row.index(i) + 1:
            return f"{graph.resources[r].name}: {words}"
    return words
