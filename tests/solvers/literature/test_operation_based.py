"""Decoding of permutations with repetition, against a slow twin; every repair is a schedule."""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_problems import random_array, random_graph, random_shop

from optsched import JobArray, JobShop, Schedule, verify
from optsched.model.graph import evaluate, scheduled
from optsched_solvers.literature.operation_based import STUCK, Encoding, decode
from optsched_solvers.shop import dispatch
from optsched_solvers.shop.list_schedule import DispatchGraph
from optsched_solvers.shop.list_schedule import run as list_schedule

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray


def random_population(encoding: Encoding, rng: Random, rows: int = 6) -> IntArray:
    """Random chromosomes."""
    genes = [g for g in range(encoding.n_genes) for _ in range(*encoding.indptr[g : g + 2])]
    return np.array([rng.sample(genes, len(genes)) for _ in range(rows)], np.int64)


def slow_decode(graph: Schedule, encoding: Encoding, genes: list[int]) -> list[int] | None:
    """Operations in the order of placement, late genes tried again after every placement."""
    rows = encoding.operation.tolist()
    chains = [rows[a:b] for a, b in zip(encoding.indptr, encoding.indptr[1:], strict=False)]
    before: dict[int, list[int]] = {}
    for i, k in zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True):
        before.setdefault(k, []).append(i)
    level = [0] * graph.n_resources
    placed: list[int] = []
    late: list[int] = []

    def place(g: int) -> bool:
        i = chains[g][0]
        if any(k not in placed for k in before.get(i, [])):
            return False
        for r in graph.op_resources[i].tolist():
            then, limit = level[r] + int(graph.acquire[i]), graph.resources[r].memory
            if then < graph.free[i] or (limit and then + graph.workspace[i] > limit):
                return False
            level[r] = then - int(graph.free[i])
        placed.append(chains[g].pop(0))
        return True

    for g in genes:
        if g in late or not place(g):
            late.append(g)
            continue
        k = 0
        while k < len(late):
            if place(late[k]):
                del late[k]
                k = -1
            k += 1
    return None if late else placed


def check(graph: Schedule, rng: Random) -> int:
    """Kernel = twin, every repair verifies and is stable; returns how many were stuck."""
    encoding = Encoding.of(graph)
    population = random_population(encoding, rng)
    given_genes = population.tolist()
    values = decode(encoding, population)
    stuck = 0
    for genes, row, value in zip(given_genes, population, values.tolist(), strict=True):
        expected = slow_decode(graph, encoding, genes)
        if value == STUCK:
            assert expected is None and row.tolist() == genes
            stuck += 1
            continue
        if expected is not None:
            assert encoding.operations(row).tolist() == expected
        schedule = scheduled(graph, encoding.sequences(graph, row))
        assert verify(schedule) == [] and schedule.makespan == value
    again = population.copy()
    assert decode(encoding, again).tolist() == values.tolist()
    assert np.array_equal(again, population)
    return stuck


@given(st.randoms(use_true_random=False))
def test_any_graph(rng: Random) -> None:
    """Lags, setups, releases, bytes freed by anybody, zero durations, arcs between jobs."""
    check(random_graph(rng, 9, gangs=False, deadlines=False), rng)


@given(st.randoms(use_true_random=False))
def test_arrays_and_shops(rng: Random) -> None:
    """Where each job fits alone, no chromosome of an array stays stuck."""
    array = random_array(rng, 4, 3)
    stuck = check(array.graph(), rng)
    assert not stuck or array.infeasibility() or array.memory.any()
    shop = random_shop(rng, 5, 4)
    assert check(JobShop(shop.jobs, release=shop.release).graph(), rng) == 0


@pytest.mark.slow
def test_in_depth() -> None:
    """The same on many more, and larger."""
    for seed in range(1500):
        rng = Random(seed)
        check(random_graph(rng, 14, gangs=False, deadlines=False), rng)
    for seed in range(300):
        rng = Random(seed)
        check(random_array(rng, 5, 4).graph(), rng)


@given(st.randoms(use_true_random=False))
def test_every_schedule_is_some_chromosome(rng: Random) -> None:
    """Encoded and decoded, the orders of a rule are the same orders."""
    for graph in (random_array(rng).graph(), random_graph(rng, 8, gangs=False, deadlines=False)):
        encoding = Encoding.of(graph)
        for rule in ("mwkr", "spt", "random"):
            for active, backwards in ((False, False), (True, False), (False, True)):
                schedule = dispatch.run(graph, rule, active, backwards=backwards)
                if schedule is None or schedule.sequences is None:
                    continue
                genes = encoding.encode(graph, schedule.sequences)
                population = genes.reshape(1, -1).copy()
                assert decode(encoding, population).tolist() == [schedule.makespan]
                assert np.array_equal(population[0], genes)
                assert encoding.sequences(graph, genes) == schedule.sequences


def test_genes_of_a_shop_are_its_jobs() -> None:
    """One chain a job, numbered like the jobs."""
    graph = random_shop(Random(5), 6, 4).graph()
    encoding = Encoding.of(graph)
    assert encoding.gene.tolist() == graph.job.tolist()
    assert encoding.operation.tolist() == list(range(graph.n_operations))


@given(st.randoms(use_true_random=False))
def test_chains_are_paths_of_one_job(rng: Random) -> None:
    """Each chain follows arcs of the graph inside a job, and every operation is in one."""
    graph = random_array(rng).graph()
    encoding = Encoding.of(graph)
    arcs = set(zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True))
    assert sorted(encoding.operation.tolist()) == list(range(graph.n_operations))
    for g in range(encoding.n_genes):
        chain = encoding.operation[encoding.indptr[g] : encoding.indptr[g + 1]].tolist()
        assert {int(graph.job[i]) for i in chain} == {int(graph.job[chain[0]])}
        assert all(pair in arcs for pair in itertools.pairwise(chain))
        assert (encoding.gene[chain] == g).all()


@given(st.randoms(use_true_random=False))
def test_active_is_giffler_thompson(rng: Random) -> None:
    """The order of genes is the priority; what comes back decodes to the same schedule."""
    graph = random_graph(rng, 9, gangs=False, deadlines=False)
    if rng.random() < 0.5:  # chains alone, which another kernel decodes
        shop = random_shop(rng, 5, 4)
        graph = JobShop(shop.jobs, release=shop.release).graph()
        if rng.random() < 0.5:
            graph = JobArray([[3, 4, 2]] * 3, [[2, 0, 5]] * 3, lag_forward=rng.choice([-2, 4]))
            graph = graph.replace(trailing_switch=True, switch=0).graph()
    encoding = Encoding.of(graph)
    population = random_population(encoding, rng)
    given_genes = population.copy()
    values = decode(encoding, population, active=True)
    arrays = DispatchGraph.of(graph)
    for genes, row, value in zip(given_genes, population, values.tolist(), strict=True):
        priority = np.empty(graph.n_operations, np.int64)
        priority[encoding.operations(genes)] = np.arange(graph.n_operations)
        found = list_schedule(arrays, priority, active=True)
        if found is None:
            assert value == STUCK and np.array_equal(row, genes)
            continue
        resource = graph.single_resource
        orders = encoding.sequences(graph, row).to_lists()
        assert orders == [
            [i for i in found[0].tolist() if resource[i] == r] for r in range(graph.n_resources)
        ]
        assert value == int((found[1] + graph.duration).max())
        assert decode(encoding, row.reshape(1, -1).copy()).tolist() == [value]
        assert verify(scheduled(graph, encoding.sequences(graph, row))) == []


@pytest.mark.parametrize("active", [False, True])
def test_memory_does_not_deadlock(active: bool) -> None:
    """Wrapped chunks, and workspaces: the two traps, from random chromosomes."""
    chunks = JobArray(
        [[1] * 4] * 2, [[1] * 4] * 2, place=[0, 1, 0, 1], activation=1, memory=[2, 2],
        micro_batches=3,
    )  # fmt: skip
    workspace = JobArray(
        [[1, 1]] * 4, [[1, 1]] * 4, checkpoint=4, recompute=1, recompute_workspace=3,
        recompute_mode="always", memory=[10, 10],
    )  # fmt: skip
    for array in (chunks, workspace, workspace.replace(recompute_as_block=True)):
        graph = array.graph()
        encoding = Encoding.of(graph)
        population = random_population(encoding, Random(1), 200)
        greedy = [slow_decode(graph, encoding, row) for row in population.tolist()]
        assert active or None in greedy  # without the banker's check some would be stuck
        values = decode(encoding, population, active=active)
        assert values.max() < STUCK
        for row, value in zip(population[::20], values[::20].tolist(), strict=True):
            schedule = scheduled(graph, encoding.sequences(graph, row))
            assert verify(schedule) == [] and schedule.makespan == value


def test_early_frees_count_without_any_limit() -> None:
    """Bytes freed by another chain: an operation that frees waits for them."""
    for seed in range(200):
        graph = random_graph(Random(seed), 8, gangs=False, deadlines=False)
        if graph.free.any() and not Encoding.of(graph).plain:
            check(graph, Random(seed))
    held = JobArray([[2, 3]] * 3, [[1, 4]] * 3, activation=5)
    assert held.graph().free.any() and Encoding.of(held.graph()).plain


def test_heads_are_the_starts() -> None:
    """The makespan is the longest path's, at sizes near 2^53 too."""
    array = JobArray([[2**49, 1]] * 2, [[2**48, 2**47]] * 2, lag_forward=-1)
    graph = array.graph()
    encoding = Encoding.of(graph)
    population = random_population(encoding, Random(0), 20)
    values = decode(encoding, population)
    for row, value in zip(population, values.tolist(), strict=True):
        assert evaluate(graph, encoding.sequences(graph, row)).makespan == value
