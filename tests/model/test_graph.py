"""Heads, tails, cycles and the networkx export of `optsched.model.graph`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import periodic_schedules

from optsched import Csr, CyclicOrder, JobArray, Schedule
from optsched.analysis.links import to_networkx
from optsched.errors import InputError
from optsched.model.graph import describe, evaluate, scheduled
from optsched.testing.random_problems import random_graph

if TYPE_CHECKING:
    from random import Random


def edges_of(graph: Schedule, sequences: Csr | None) -> list[tuple[int, int, int]]:
    """Every arc and every pair of neighbours, with its start-to-start weight."""
    edges = [
        (int(i), int(k), int(graph.duration[i] + lag))
        for i, k, lag, _ in zip(*graph.arcs, strict=True)
    ]
    for row in sequences.to_lists() if sequences is not None else []:
        for i, k in itertools.pairwise(row):
            edges.append((i, k, int(graph.duration[i]) + graph.setup(i, k)))
    return edges


def relaxed(
    graph: Schedule, edges: list[tuple[int, int, int]]
) -> tuple[list[int], list[int], bool]:
    """Heads and tails by Bellman-Ford; the last value says whether they settled."""
    head, tail = graph.release.tolist(), graph.duration.tolist()
    changed = True
    for _ in range(graph.n_operations + 1):
        changed = False
        for i, k, weight in edges:
            for values, target, value in ((head, k, head[i] + weight), (tail, i, tail[k] + weight)):
                if value > values[target]:
                    values[target], changed = value, True
        if not changed:
            break
    return head, tail, not changed


def shuffled(graph: Schedule, rng: Random) -> Csr:
    """Any orders at all: often cyclic."""
    return Csr.of(rng.sample(row, len(row)) for row in graph.users.to_lists())


def consistent(graph: Schedule, rng: Random) -> Csr:
    """Orders cut from one topological order of the arcs."""
    order: list[int] = []
    waiting = {
        k: {i for i, h in zip(*graph.arcs[:2], strict=True) if h == k}
        for k in range(graph.n_operations)
    }
    while waiting:
        i = rng.choice([k for k, before in waiting.items() if not before - set(order)])
        order.append(i)
        del waiting[i]
    return Csr.of(
        [i for i in order if r in graph.op_resources[i]] for r in range(graph.n_resources)
    )


@given(st.randoms(use_true_random=False))
def test_evaluate_is_the_longest_path(rng: Random) -> None:
    """Heads and tails equal repeated relaxation, with gangs, lags, setups, releases and zeros."""
    graph = random_graph(rng, 9)
    for sequences in (None, consistent(graph, rng)):
        found = evaluate(graph, sequences)
        edges = edges_of(graph, sequences)
        head, tail, settled = relaxed(graph, edges)
        assert settled
        assert (found.head.tolist(), found.tail.tolist()) == (head, tail)
        assert found.makespan == max(
            h + p for h, p in zip(head, graph.duration.tolist(), strict=True)
        )
        place = {i: at for at, i in enumerate(found.order.tolist())}
        assert sorted(place) == list(range(graph.n_operations))
        assert all(place[i] < place[k] for i, k, _ in edges)


@given(st.randoms(use_true_random=False))
def test_a_cycle_is_named_and_shortest(rng: Random) -> None:
    """`CyclicOrder` exactly where the orders contradict; its cycle is real and as short as any."""
    graph = random_graph(rng, 8)
    sequences = shuffled(graph, rng)
    pairs = {(i, k) for i, k, _ in edges_of(graph, sequences)}
    cycles = list(nx.simple_cycles(nx.DiGraph(pairs)))
    try:
        evaluate(graph, sequences)
    except CyclicOrder as error:
        cycle = error.cycle
        assert len(set(cycle)) == len(cycle)
        assert all(step in pairs for step in zip(cycle, cycle[1:] + cycle[:1], strict=True))
        assert len(cycle) == min(map(len, cycles))
        assert all(describe(graph, i) in str(error) for i in cycle)
    else:
        assert not cycles


def test_cycle_in_words() -> None:
    """The message names the device, both blocks and the arcs."""
    graph = JobArray([[1, 1], [1, 1]], [[1, 1], [1, 1]]).graph()
    rows = [[3, 0, 4, 7], [1, 2, 5, 6]]
    with pytest.raises(CyclicOrder) as caught:
        evaluate(graph, Csr.of(rows))
    assert "gpu0: B(job 0, stage 0) before F(job 0, stage 0)" in str(caught.value)
    assert "by an arc F(job 0, stage 0) before F(job 0, stage 1)" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 3, 4, 7]], "sequences: expected 2 rows, one per resource, got 1"),
        ([[0, 3, 4], [1, 2, 5, 6]], r"sequences\[0\]: operation 7 is missing"),
        ([[0, 3, 4, 7, 7], [1, 2, 5, 6]], r"sequences\[0\]: operation 7 appears twice"),
        ([[0, 3, 4, 7], [1, 2, 5, 0]], r"sequences\[1\]: operation 0 does not use this resource"),
        ([[0, 3, 4, 99], [1, 2, 5, 6]], r"sequences\[0\]: operation 99 does not use"),
        ([[0, 3, 4, -1], [1, 2, 5, 6]], r"sequences\[0\]: operation -1 does not use"),
    ],
)
def test_wrong_orders_are_refused(rows: list[list[int]], message: str) -> None:
    """Orders that are no permutation of the users of a resource are refused by name."""
    graph = JobArray([[1, 1], [1, 1]], [[1, 1], [1, 1]]).graph()
    with pytest.raises(InputError, match=message):
        evaluate(graph, Csr.of(rows))


@given(periodic_schedules())
def test_a_period_has_no_longest_path(schedule: Schedule) -> None:
    """Periodic schedules are refused, not evaluated as if they were one-shot."""
    with pytest.raises(InputError, match="periodic"):
        evaluate(schedule)


@given(st.randoms(use_true_random=False))
def test_networkx_holds_the_same_graph(rng: Random) -> None:
    """Nodes carry all fields; the heaviest of parallel arcs; longest paths agree."""
    graph = random_graph(rng, 8)
    sequences = consistent(graph, rng)
    schedule = scheduled(graph, sequences)
    exported = to_networkx(schedule)
    heaviest: dict[tuple[int, int], int] = {}
    for i, k, weight in edges_of(graph, sequences):
        heaviest[i, k] = max(weight, heaviest.get((i, k), weight))
    assert {(i, k): e["weight"] for i, k, e in exported.edges(data=True)} == heaviest
    assert sorted(exported) == list(range(graph.n_operations))
    for i, fields in exported.nodes(data=True):
        for key in ("duration", "job", "family", "acquire", "free", "workspace", "release"):
            assert fields[key] == getattr(graph, key)[i]
        assert fields["start"] == schedule.start[i]  # type: ignore[index]
        assert fields["resources"] == graph.op_resources[i].tolist()
    kinds = {e["kind"] for _, _, e in to_networkx(graph).edges(data=True)}
    assert kinds <= {"conjunctive"}


@given(periodic_schedules())
def test_networkx_of_a_cycle_knows_its_tokens(plan: Schedule) -> None:
    """Starts keep every edge, resources go round, and no edge is missing."""
    exported = to_networkx(plan)
    for i, j, e in exported.edges(data=True):
        assert plan.start[j] - plan.start[i] >= e["weight"] - e["tokens"] * plan.period
    for row in plan.sequences.to_lists():  # type: ignore[union-attr]
        for k, i in enumerate(row):
            assert exported.has_edge(i, row[(k + 1) % len(row)])
    arcs = zip(*(column.tolist() for column in plan.arcs), strict=True)
    for i, j, lag, distance in arcs:
        tokens = distance + plan.offset[j] - plan.offset[i]
        e = exported.edges[i, j]
        needed = plan.duration[i] + lag - tokens * plan.period
        assert e["weight"] - e["tokens"] * plan.period >= needed
