"""The genetic algorithm on orders, cycles and counts: its operators, and what it promises."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
from depth import depth
from hypothesis import given
from hypothesis import strategies as st
from subset_cases import ruled_problem

import optsched
from optsched import JobArray, JobShop, MissingExtra, UnsupportedProblem, verify
from optsched.bandwidth.topology.policy import Policy
from optsched.errors import InputError
from optsched.model.graph import scheduled
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing import best_makespan
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.literature.genetic import Counts, Genetic, GpuGenetic, pox
from optsched_solvers.literature.genetic_periodic import JobOrders, PeriodicGenetic


def shop_of(jobs: int, machines: int, seed: int) -> JobShop:
    """A classic shop of this size."""
    rng = random.Random(seed)
    orders = [rng.sample(range(machines), machines) for _ in range(jobs)]
    return JobShop([[(k, rng.randint(1, 30)) for k in order] for order in orders])


SHOP = shop_of(8, 8, 4)
"""No rule comes near its optimum."""


@given(st.randoms(use_true_random=False))
def test_every_incumbent_is_a_schedule(rng: random.Random) -> None:
    """Whatever it offers is feasible and worth what it says, and never below the optimum."""
    array = rng.random() < 0.5
    problem = random_array(rng, 2, 2) if array else random_graph(
        rng, 6, gangs=False, deadlines=False
    )  # fmt: skip
    graph = problem.graph()

    class Checked(Monitor):
        def incumbent(self, sequences: optsched.Csr, objective: int, source: str = "") -> bool:
            schedule = scheduled(graph, sequences)
            assert verify(schedule) == [] and schedule.makespan == objective
            return super().incumbent(sequences, objective, source)

    limits = Limits(iterations=400, options={"population": 8})
    monitor = Checked(limits)
    Genetic().solve(problem, limits, monitor)
    if graph.n_operations <= 8:
        optimum = best_makespan(graph)
        assert monitor.objective is None or (optimum is not None and monitor.objective >= optimum)


def test_it_evolves() -> None:
    """It betters the best rule on a shop that rules do not solve."""
    rules = optsched.solve(SHOP, "dispatch", iterations=500)
    found = optsched.solve(SHOP, Genetic(), iterations=2000)
    assert found.objective is not None and rules.objective is not None
    assert found.objective < rules.objective


@given(st.randoms(use_true_random=False))
def test_pox_keeps_genes_and_places(rng: random.Random) -> None:
    """A child has its parents' genes; each gene keeps its places, or the other parent's order."""
    first = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
    second = rng.sample(first, len(first))
    child = pox(first, second, rng)
    assert sorted(child) == sorted(first)
    moved = {gene for gene, own in zip(child, first, strict=True) if gene != own}
    moved |= {own for gene, own in zip(child, first, strict=True) if gene != own}
    rest = [gene for gene in second if gene in moved]
    assert [gene for gene in child if gene in moved] == rest


@pytest.mark.parametrize("iterations", [0, 1, 35, 36, 37, 38, 100, 101, 250])
def test_iterations_are_individuals(iterations: int) -> None:
    """List schedules of rules, and individuals."""
    limits = Limits(iterations=iterations)
    monitor = Monitor(limits)
    Genetic().solve(SHOP, limits, monitor)
    assert monitor.iteration == iterations


def test_large_times_are_exact() -> None:
    """Makespans near 2^53 pass through DEAP's fitness unchanged."""
    shop = JobShop([[(0, 2**50 + 1), (1, 2**49 + 3)], [(1, 2**50 - 1), (0, 7)]])
    found = optsched.solve(shop, Genetic(), iterations=300)
    assert found.objective == best_makespan(shop.graph())


@pytest.mark.parametrize(
    "options",
    [
        {"population": 3}, {"population": 2001}, {"population": True}, {"population": "many"},
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any]) -> None:
    """Refused by name, with what was expected."""
    field = next(iter(options))
    with pytest.raises(InputError, match=rf"options\.{field}: expected"):
        optsched.solve(SHOP, Genetic(), iterations=10, options=options)


def test_deadlines_are_refused() -> None:
    """With a sentence."""
    with pytest.raises(UnsupportedProblem, match="deadlines are not kept"):
        optsched.solve(JobShop([[(0, 1)]], deadline=[9]), Genetic())


def test_without_deap(monkeypatch: pytest.MonkeyPatch) -> None:
    """`supports` needs nothing; `solve` says what to install."""
    monkeypatch.setitem(sys.modules, "deap", None)
    assert Genetic().supports(SHOP)
    with pytest.raises(MissingExtra, match=r'pip install "\.\[genetic\]"'):
        optsched.solve(SHOP, Genetic(), iterations=10)


# periodic arrays


def test_finds_what_constructions_miss() -> None:
    """Evolution gets below the constructions that it begins with."""
    sizes = np.array([1, 2, 3, 4, 1, 2])
    f = np.repeat(sizes[:, None] * 100, 4, axis=1)
    array = JobArray(f, 3 * f, objective="period")
    few = optsched.solve(array, "genetic", iterations=60)
    many = optsched.solve(array, "genetic", iterations=3000)
    assert few.objective is not None and many.objective is not None
    assert many.objective <= few.objective
    assert many.status == "optimal"


def test_counts_its_own_iterations() -> None:
    """What others have reported to the monitor before takes nothing away."""
    f = np.random.default_rng(5).integers(3, 30, (5, 3))
    array = JobArray(f, 2 * f, activation=f, memory=[70, 60, 60], objective="period")
    made = []
    for others in (0, 10**6):
        limits = Limits(iterations=400)
        monitor = Monitor(limits)
        monitor.advance(others)
        PeriodicGenetic().solve(array, limits, monitor)
        made.append((monitor.iteration - others, monitor.objective))
    assert made[0] == made[1] and made[0][0] == 400


def test_genes_name_units() -> None:
    """The n-th occurrence of a job is its n-th unit, whatever the order."""
    array = JobArray([[1, 1]] * 2, [[2, 2]] * 2, multiplicity=[2, 1], objective="period")
    decoder = JobOrders(array.graph(), Monitor(Limits(iterations=10)))
    assert decoder.jobs == [0, 0, 1]
    values = [decoder.value([60, *order]) for order in ([1, 0, 0], [0, 1, 0], [0, 0, 1])]
    assert min(values) >= array.lower_bound() and max(values) < 100


# choices of GPUs


@st.composite
def two_vectors(draw):  # type: ignore[no-untyped-def]
    """Room of hosts, and two vectors of one sum that fit."""
    room = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    k = draw(st.integers(1, sum(room)))
    rng = random.Random(draw(st.integers(0, 10**6)))
    found = []
    for _ in range(2):
        slots = [u for u, most in enumerate(room) for _ in range(most)]
        chosen = rng.sample(slots, k)
        found.append([chosen.count(u) for u in range(len(room))])
    return room, *found


@given(two_vectors(), st.integers(0, 1000))
def test_operators_keep_k_and_room(case, seed):  # type: ignore[no-untyped-def]
    """Whatever they do: exactly k GPUs, and no host beyond its room; no repair is needed."""
    room, first, second = case
    rng, operators = random.Random(seed), Counts.__new__(Counts)
    operators.room = room
    vector = list(first)
    operators.mutate(vector, rng)
    assert sum(vector) == sum(first)
    assert all(0 <= count <= most for count, most in zip(vector, room, strict=True))
    child = operators.mate(first, second, rng)
    assert sum(child) == sum(first)
    for a, b, c in zip(first, second, child, strict=True):
        assert min(a, b) <= c <= max(a, b)


def test_finds_the_optimum_of_small_clusters():  # type: ignore[no-untyped-def]
    """Never better than all subsets, with all of these as good; the preferred level decides."""
    for seed in range(depth(90, 150)):
        narrow = {"policy": Policy(preferred="host")} if seed % 3 == 0 else {}
        problem = ruled_problem(seed, **narrow)
        result = optsched.solve(problem, GpuGenetic(), iterations=2000, seed=seed)
        assert result.objective == optsched.solve(problem, "counts").objective, seed
        if result.schedule is not None:
            assert problem.check(result.schedule) == []
