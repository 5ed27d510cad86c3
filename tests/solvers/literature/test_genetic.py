"""The genetic algorithm: conformance, its selection operators, and what it promises."""

from __future__ import annotations

import random
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_problems import random_array, random_graph

import optsched
from optsched import JobArray, JobShop, MissingExtra, UnsupportedProblem, verify
from optsched.errors import InputError
from optsched.model.graph import scheduled
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing import best_makespan
from optsched_solvers.literature import genetic, operation_based
from optsched_solvers.literature.genetic import STUCK, Genetic, roulette, seeded_selection


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


def test_roulette_prefers_short_schedules() -> None:
    """Chances in proportion to Cworst - C + 1; individuals without schedule are never drawn."""
    population = [one(10), one(12), one(13), one(STUCK)]
    drawn = Counter(x.makespan for x in roulette(population, 7000, random.Random(1)))
    assert set(drawn) == {10, 12, 13}
    for makespan, share in ((10, 4), (12, 2), (13, 1)):
        assert drawn[makespan] == pytest.approx(1000 * share, rel=0.15)
    hopeless = roulette([one(STUCK)] * 3, 5, random.Random(1))
    assert len(hopeless) == 5


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


@given(st.randoms(use_true_random=False), st.sampled_from(genetic.DECODERS))
def test_every_incumbent_is_a_schedule(rng: random.Random, decoder: str) -> None:
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

    options = {"decoder": decoder, "population": 8, "local_search": rng.random() < 0.3}
    limits = Limits(iterations=400, options=options)
    monitor = Checked(limits)
    Genetic().solve(problem, limits, monitor)
    if graph.n_operations <= 8:
        optimum = best_makespan(graph)
        assert monitor.objective is None or (optimum is not None and monitor.objective >= optimum)


@pytest.mark.parametrize("crossover", genetic.CROSSOVERS)
@pytest.mark.parametrize("mutation", genetic.MUTATIONS)
@pytest.mark.parametrize("decoder", genetic.DECODERS)
def test_it_evolves(crossover: str, mutation: str, decoder: str) -> None:
    """Every combination of options betters the best rule on a shop that rules do not solve."""
    rules = optsched.solve(SHOP, "dispatch", iterations=500)
    options = {"crossover": crossover, "mutation": mutation, "decoder": decoder}
    found = optsched.solve(SHOP, Genetic(), iterations=2000, options=options)
    assert found.objective is not None and rules.objective is not None
    assert found.objective < rules.objective


def test_local_search_helps() -> None:
    """With the same number of individuals, polished ones are better."""
    plain = optsched.solve(SHOP, Genetic(), iterations=600)
    polished = optsched.solve(SHOP, Genetic(), iterations=600, options={"local_search": True})
    assert polished.objective is not None and plain.objective is not None
    assert polished.objective < plain.objective


def test_never_worse_than_the_best_rule() -> None:
    """With as many individuals as there are rules, it has their best; capped arrays too."""
    rng = random.Random(3)
    rows = [[rng.randint(1, 20) for _ in range(4)] for _ in range(9)]
    capped = JobArray(rows, rows, activation=1, memory=[4, 3, 2, 2], switch=2)
    for problem in (SHOP, capped):
        rules = optsched.solve(problem, "dispatch", iterations=500)
        for decoder in genetic.DECODERS:
            found = optsched.solve(problem, Genetic(), iterations=200, options={"decoder": decoder})
            assert found.objective is not None and rules.objective is not None
            assert found.objective <= rules.objective


def test_slices_do_not_change_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time, or all at once: the same bits."""
    whole = optsched.solve(SHOP, Genetic(), iterations=3000, seed=4)
    options = {"local_search": True}
    walked = optsched.solve(SHOP, Genetic(), iterations=300, seed=4, options=options)
    monkeypatch.setattr(genetic, "_SLICE", 0.0)
    assert optsched.solve(SHOP, Genetic(), iterations=3000, seed=4).schedule == whole.schedule
    again = optsched.solve(SHOP, Genetic(), iterations=300, seed=4, options=options)
    assert again.schedule == walked.schedule
    other = optsched.solve(SHOP, Genetic(), iterations=3000, seed=5)
    assert [event.objective for event in other.history] != [
        event.objective for event in whole.history
    ] or other.schedule != whole.schedule


@pytest.mark.parametrize("iterations", [0, 1, 35, 36, 37, 38, 100, 101, 250])
def test_iterations_are_individuals(iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """List schedules of rules plus decoded rows, seeds counted once."""
    counts = {"rows": 0, "rules": 0}
    decode, tried = operation_based.decode, genetic.try_rules

    def counted(encoding: Any, population: Any, **rest: Any) -> Any:
        counts["rows"] += len(population)
        return decode(encoding, population, **rest)

    def rules(*given: Any, **rest: Any) -> int:
        counts["rules"] = tried(*given, **rest)
        return counts["rules"]

    monkeypatch.setattr(operation_based, "decode", counted)
    monkeypatch.setattr(genetic, "try_rules", rules)
    optsched.solve(SHOP, Genetic(), iterations=iterations)
    assert counts["rules"] == min(36, iterations)
    seeds = min(37, iterations)  # and insertion
    # the rules' schedules are decoded twice: to choose the best of them, and as individuals
    again = counts["rows"] - (iterations - seeds)
    assert 0 <= again <= 2 * seeds


def test_others_incumbents_are_taken_in() -> None:
    """With a time limit, a better schedule of another engine becomes an individual at once."""
    best = optsched.solve(SHOP, Genetic(), iterations=5000, seed=9)
    assert best.schedule is not None and best.schedule.sequences is not None
    limits = Limits(time_limit=60, options={"population": 4})
    seen: list[int] = []

    class Another(Monitor):
        def should_stop(self) -> bool:
            if seen:
                self.incumbent(best.schedule.sequences, best.objective, "another")  # type: ignore[union-attr, arg-type]
            return len(seen) > 1

    monitor = Another(limits)
    join = genetic._Run._join

    def watched(run: Any) -> None:
        join(run)
        seen.append(run.best[0].makespan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(genetic._Run, "_join", watched)
        Genetic().solve(SHOP, limits, monitor)
    assert len(seen) == 2 and seen[0] > seen[1] == best.objective


def test_large_times_are_exact() -> None:
    """Makespans near 2^53 pass through DEAP's fitness unchanged."""
    shop = JobShop([[(0, 2**50 + 1), (1, 2**49 + 3)], [(1, 2**50 - 1), (0, 7)]])
    found = optsched.solve(shop, Genetic(), iterations=300)
    assert found.objective == best_makespan(shop.graph())


@pytest.mark.parametrize(
    "options",
    [
        {"population": 3}, {"population": 2001}, {"population": True}, {"population": "many"},
        {"crossover": "ox"}, {"mutation": None}, {"decoder": "semi"}, {"decoder": ["active"]},
        {"local_search": 1},
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
