"""The genetic algorithm: conformance, its selection operators, and what it promises."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import JobArray, JobShop, MissingExtra, UnsupportedProblem, verify
from optsched.errors import InputError
from optsched.model.graph import scheduled
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing import best_makespan
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.literature.genetic import Genetic, pox, seeded_selection


def shop_of(jobs: int, machines: int, seed: int) -> JobShop:
    """A classic shop of this size."""
    rng = random.Random(seed)
    return JobShop(
        [
            [(k, rng.randint(1, 30)) for k in rng.sample(range(machines), machines)]
            for _ in range(jobs)
        ]
    )


SHOP = shop_of(8, 8, 1)
"""No rule comes near its optimum."""


def one(makespan: int) -> Any:
    """An individual of this makespan, as the selection operators see it."""
    from deap import base

    class Fitness(base.Fitness):  # type: ignore[misc]
        weights = (-1,)

    return SimpleNamespace(makespan=makespan, fitness=Fitness((makespan,)))


def test_selection_is_deaps_with_another_generator() -> None:
    """The same choices as DEAP's from the global generator, whose state stays untouched."""
    from deap import tools

    population = [one(makespan) for makespan in (5, 9, 2, 7, 7, 3)]
    saved = random.getstate()
    try:
        random.seed(11)
        expected = tools.selTournament(population, 20, 3)
        middle = random.getstate()
        mine = seeded_selection(random.Random(11))
        assert mine["selTournament"](population, 20, tournsize=3) == expected
        assert random.getstate() == middle
        assert tools.selTournament.__globals__["random"] is random
    finally:
        random.setstate(saved)


@given(st.randoms(use_true_random=False))
def test_every_incumbent_is_a_schedule(rng: random.Random) -> None:
    """Whatever it offers is feasible and worth what it says, and never below the optimum."""
    array = rng.random() < 0.5
    problem = random_array(rng, 2, 2) if array else random_graph(
        rng, 6, gangs=False, deadlines=False
    )  # fmt: skip
    graph = problem.graph()

    class Checked(Monitor):
        def incumbent(self, sequences: optsched.Rows, objective: int, source: str = "") -> bool:
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


def test_never_worse_than_the_best_rule() -> None:
    """With as many individuals as there are rules, it has their best; capped arrays too."""
    rng = random.Random(3)
    rows = [[rng.randint(1, 20) for _ in range(4)] for _ in range(9)]
    capped = JobArray(rows, rows, activation=1, memory=[4, 3, 2, 2], switch=2)
    for problem in (SHOP, capped):
        rules = optsched.solve(problem, "dispatch", iterations=500)
        found = optsched.solve(problem, Genetic(), iterations=200)
        assert found.objective is not None and rules.objective is not None
        assert found.objective <= rules.objective


def test_seeds() -> None:
    """The same seed gives the same bits, another one another search."""
    runs = [optsched.solve(SHOP, Genetic(), iterations=3000, seed=seed) for seed in (4, 4, 5)]
    assert runs[0].schedule == runs[1].schedule
    assert [(e.objective, e.iteration) for e in runs[2].history] != [
        (e.objective, e.iteration) for e in runs[0].history
    ]


@pytest.mark.parametrize("iterations", [0, 1, 35, 36, 37, 38, 100, 101, 250])
def test_iterations_are_individuals(iterations: int) -> None:
    """List schedules of rules, insertion, and individuals."""
    limits = Limits(iterations=iterations)
    monitor = Monitor(limits)
    Genetic().solve(SHOP, limits, monitor)
    assert iterations - 1 <= monitor.iteration <= iterations  # insertion is not counted by all


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
    with pytest.raises(MissingExtra, match=r'pip install "optsched\[genetic\]"'):
        optsched.solve(SHOP, Genetic(), iterations=10)


def test_supports_loads_nothing() -> None:
    """Asking whether a problem is supported imports neither DEAP nor the compiler."""
    import subprocess

    code = (
        "import sys, optsched; from optsched_solvers.literature.genetic import Genetic; "
        "assert Genetic().supports(optsched.JobShop([[(0, 1)]])); "
        "assert not {'deap', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_global_generators_are_untouched() -> None:
    """Neither Python's nor NumPy's."""
    state, legacy = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    optsched.solve(SHOP, Genetic(), iterations=2000)
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == legacy  # noqa: NPY002
