"""Distances, relabelled copies, the pool of elites and paths between schedules."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from test_neighbourhoods import graphs, levels, shop, started

from optsched.model.graph import evaluate, machine_orders, scheduled
from optsched.testing.random_problems import random_array
from optsched_solvers.shop.rules import order_of
from optsched_solvers.shop.tabu.path_relinking import LEAST_APART, Elites, Relabelling, relink
from optsched_solvers.shop.tabu.walk import Walk

if TYPE_CHECKING:
    from optsched import Csr, Schedule
    from optsched.model.schedule import IntArray


def pairs(graph: Schedule, order: IntArray) -> set[tuple[int, int]]:
    """All ordered pairs on one machine."""
    return {
        pair for row in machine_orders(graph, order).to_lists() for pair in combinations(row, 2)
    }


def two_schedules(graph: Schedule, sequences: Csr, seed: int) -> tuple[IntArray, IntArray]:
    """The given one and one that a walk reached from it."""
    start = order_of(graph, sequences)
    walk = Walk(graph, seed)
    walk.load(start)
    walk.run(40)
    return start, walk.order.copy()


def test_distance_counts_pairs() -> None:
    """Equal to counting reversed pairs one by one; symmetric, zero to itself."""
    for seed, (graph, sequences) in enumerate(graphs(11, 60)):
        first, second = two_schedules(graph, sequences, seed)
        elites = Elites(graph, 4)
        expected = len(pairs(graph, first) - pairs(graph, second))
        assert elites.distance(first, second) == expected == elites.distance(second, first)
        assert elites.distance(first, first) == 0


def test_relinking_walks_straight_and_stays_feasible() -> None:
    """Every exchange comes one pair nearer to the guide; orders stay acyclic and within memory."""
    complete = 0
    for seed, (graph, sequences) in enumerate(graphs(12, 80)):
        start, guide = two_schedules(graph, sequences, seed)
        elites = Elites(graph, 4)
        apart = elites.distance(start, guide)
        walk = Walk(graph, seed)
        for swaps in (0, 1, apart // 2, apart + 5):
            between, made = relink(walk, start, guide, swaps)
            assert made <= swaps
            assert elites.distance(start, between) == made
            assert elites.distance(between, guide) == apart - made
            evaluate(graph, machine_orders(graph, between))  # raises on a cycle
            levels(graph, machine_orders(graph, between))
            position = np.argsort(between)
            assert (position[graph.arcs.tail] < position[graph.arcs.head]).all()
        if not (graph.acquire.any() or graph.workspace.any()):
            assert made == apart  # nothing but memory can block the path
        complete += made == apart and apart > 0
    assert complete > 20


def test_relabelling_keeps_the_schedule_and_joins_copies() -> None:
    """Same makespan; schedules that differ by exchanged identical jobs become one."""
    rng = Random(4)
    joined = 0
    for seed in range(40):
        array = random_array(rng, 4, 3)
        graph = array.graph()
        sequences = started(graph)
        if sequences is None:
            continue
        order, renamed = order_of(graph, sequences), Relabelling(graph)
        kept = renamed(order)
        value = scheduled(graph, sequences).makespan
        assert scheduled(graph, machine_orders(graph, kept)).makespan == value
        levels(graph, machine_orders(graph, kept))
        for group in renamed.groups:
            exchange = np.arange(graph.n_operations)
            shuffled = np.random.default_rng(seed).permutation(len(group))
            exchange[group] = group[shuffled]
            assert np.array_equal(renamed(exchange[order]), kept)
            joined += 1
    assert joined > 5


def test_elites_keep_their_distance() -> None:
    """Never more than the size, never two too close, the best one never lost."""
    graph = shop(Random(1), 8, 6).graph()
    sequences = started(graph)
    assert sequences is not None
    elites = Elites(graph, 5)
    walk = Walk(graph, 3)
    walk.load(order_of(graph, sequences))
    best = 10**9
    for _ in range(150):
        walk.run(3)
        elites.add(walk.value, walk.order)
        best = min(best, walk.value)
        assert elites.best.value == best
        assert len(elites.members) <= 5
        for a, b in combinations(elites.members, 2):
            assert elites.distance(a.order, b.order) >= LEAST_APART
    assert len(elites.members) > 1
