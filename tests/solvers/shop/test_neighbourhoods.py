"""Kernels of the tabu search: exact after every move, never a cycle, never beyond the memory."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np
from depth import seeds
from random_shops import random_shop

import optsched
from optsched import JobShop, Schedule
from optsched.model.graph import evaluate, machine_orders
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.shop.rules import order_of, supported_graph, try_rules
from optsched_solvers.shop.tabu import neighbourhoods as nb
from optsched_solvers.shop.tabu.state import TABU_ENTRIES
from optsched_solvers.shop.tabu.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched import Csr


def started(graph: Schedule) -> Csr | None:
    """Orders of some dispatching rule."""
    monitor = Monitor(Limits(iterations=40))
    try_rules(graph, monitor.limits, monitor)
    return monitor.solution


def graphs(seed: int, count: int) -> Iterator[tuple[Schedule, Csr]]:
    """Random graphs with every feature that the walk takes, and feasible orders of them."""
    rng = Random(seed)
    while count:
        kind = rng.randrange(4)
        if kind == 0:
            graph = random_graph(rng, 14, gangs=False, deadlines=False)
        elif kind == 1:
            graph = random_array(rng, 6, 4).graph()
        elif kind == 2:
            graph = random_shop(rng, 6, 5).graph()
        else:
            graph = shop(rng, 8, 5).graph()
        sequences = started(graph) if supported_graph(graph) else None
        if sequences is None or (graph.deadline != optsched.model.schedule.NO_DEADLINE).any():
            continue
        count -= 1
        yield graph, sequences


def shop(rng: Random, jobs: int, machines: int) -> JobShop:
    """A classic job shop."""
    return JobShop(
        [[(k, rng.randint(0, 9)) for k in rng.sample(range(machines), machines)]
         for _ in range(jobs)]
    )  # fmt: skip


def levels(graph: Schedule, sequences: Csr) -> list[int]:
    """Bytes held before each operation; asserts that they fit."""
    found = [0] * graph.n_operations
    for r, row in enumerate(sequences.to_lists()):
        level = 0
        for i in row:
            found[i] = level
            used = level + int(graph.acquire[i] + graph.workspace[i])
            assert not graph.memory[r] or used <= graph.memory[r]
            level += int(graph.acquire[i] - graph.free[i])
            assert level >= 0
    return found


def check_state(graph: Schedule, walk: Walk) -> None:
    """Links, order, heads, tails and levels are those of the orders, computed afresh."""
    sequences = machine_orders(graph, walk.order)
    found = evaluate(graph, sequences)  # raises on a cycle
    assert walk.value == found.makespan
    time, link = walk.state.time[:-1], walk.state.link
    assert np.array_equal(time["end"] - time["duration"], found.head)
    assert np.array_equal(time["tail"], found.tail)
    position = np.argsort(walk.order)
    assert (position[graph.arcs.tail] < position[graph.arcs.head]).all()
    assert np.array_equal(link["place"][:-1], position) and not link["mark"].any()
    n, expected = graph.n_operations, levels(graph, sequences)
    for row in sequences.to_lists():
        assert link["machine_after"][row].tolist() == [*row[1:], n][: len(row)]
        assert link["machine_before"][row].tolist() == [n, *row][: len(row)]
        assert time["level"][row].tolist() == [expected[i] for i in row]


@seeds(1, 4)
def test_every_move_is_exact(seed: int) -> None:
    """After each of many moves the state equals a full evaluation, on graphs of every kind."""
    moved = 0
    for graph, sequences in graphs(seed, 60):
        walk = Walk(graph, seed)
        walk.load(order_of(graph, sequences))
        check_state(graph, walk)
        for _ in range(25):
            if walk.run(1) != nb.RUNNING:
                break
            check_state(graph, walk)
        moved += walk.moves
        best = evaluate(graph, walk.best_sequences())
        assert best.makespan == walk.best
        levels(graph, walk.best_sequences())
    assert moved > 300


def test_long_blocks_and_shared_tabu_entries() -> None:
    """Blocks longer than `REACH` and more arcs than `TABU_ENTRIES`: still exact."""
    rng = Random(8)
    jobs = [[(0, rng.randint(1, 9)), (1, rng.randint(1, 9))] for _ in range(nb.REACH + 200)]
    graph = JobShop(jobs).graph()
    assert graph.n_operations * len(jobs) > TABU_ENTRIES
    order = np.array([2 * j for j in range(len(jobs))] + [2 * j + 1 for j in range(len(jobs))])
    walk = Walk(graph, 1)
    start = walk.load(order)
    for _ in range(30):
        walk.run(1)
        check_state(graph, walk)
    assert walk.best < start
