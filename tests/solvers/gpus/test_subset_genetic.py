"""The genetic algorithm on count vectors: operators, limits, seeds, and what it finds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_subset_tree import best_of, four_by_eight, problem_of, replace_policy

import optsched
from optsched.bandwidth.contention import Contention
from optsched.bandwidth.policy import Policy
from optsched.errors import InputError, MissingExtra
from optsched_solvers.literature import genetic_gpus as subset_genetic
from optsched_solvers.literature.genetic_gpus import between, move, swap

pytest.importorskip("deap")


class Evolve(subset_genetic.Genetic):
    """With options of other kinds, which are refused by name."""

    options = dict.fromkeys(("population", "crossover", "mutation", "decoder", "local_search"), "")


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
    rng = random.Random(seed)
    for operator in (move, swap):
        vector = list(first)
        operator(vector, room, rng)
        assert sum(vector) == sum(first)
        assert all(0 <= count <= most for count, most in zip(vector, room, strict=True))
    assert sorted(vector) == sorted(first)  # a swap changes no pattern
    child = between(first, second, rng)
    assert sum(child) == sum(first)
    for a, b, c in zip(first, second, child, strict=True):
        assert min(a, b) <= c <= max(a, b)


def test_move_and_swap_change_something():  # type: ignore[no-untyped-def]
    """Where they can they do, and every neighbour can be reached."""
    room, rng, seen = [3, 3, 2], random.Random(1), set()
    for _ in range(300):
        vector = [3, 1, 0]
        move(vector, room, rng)
        assert vector != [3, 1, 0]
        seen.add(tuple(vector))
    assert seen == {(2, 2, 0), (1, 3, 0), (2, 1, 1), (1, 1, 2), (3, 0, 1)}
    vector = [3, 1, 0]
    while vector == [3, 1, 0]:
        swap(vector, room, rng)
    assert vector in ([1, 3, 0], [3, 0, 1])


def test_finds_the_optimum_of_small_clusters():  # type: ignore[no-untyped-def]
    """Never better than all subsets, with all of these as good; nothing where nothing is."""
    for seed in range(60):
        problem = problem_of(seed)
        if problem.contention.fill == "exact":
            continue
        result = optsched.solve(problem, Evolve(), iterations=1500, seed=seed)
        best = best_of(problem)
        assert result.objective == (None if best is None else -best), seed
        if result.schedule is not None:
            assert problem.check(result.schedule) == []


def test_near_the_optimum_on_four_by_eight():  # type: ignore[no-untyped-def]
    """On four hosts of eight it finds nearly always what the exact kernel finds."""
    same = total = 0
    for seed in range(12):
        problem = four_by_eight(seed)
        exact = optsched.solve(problem, "counts")
        result = optsched.solve(problem, Evolve(), iterations=2000, seed=1)
        assert result.lower_bound is None or result.lower_bound <= (exact.objective or 0)
        if exact.objective is not None and result.objective is not None:
            assert result.objective >= exact.objective
            same += result.objective == exact.objective
            total += 1
    assert same >= total - 1 and total >= 5


def test_seeds_and_iterations():  # type: ignore[no-untyped-def]
    """Same seed, same answer; never more individuals than allowed; more are never worse."""
    problem = replace_policy(four_by_eight(7))
    last = 0
    for iterations in (0, 1, 5, 60, 61, 500):
        runs = [optsched.solve(problem, Evolve(), iterations=iterations, seed=3) for _ in range(2)]
        assert runs[0].objective == runs[1].objective
        if runs[0].schedule is not None:
            assert problem.chosen(runs[0].schedule) == problem.chosen(runs[1].schedule)
        assert all(event.iteration <= iterations for event in runs[0].history)
        value = runs[0].objective or 0
        assert value <= last
        last = value
    assert last < 0


def test_time_limit_and_start():  # type: ignore[no-untyped-def]
    """It ends in time, and a start is never lost."""
    problem = replace_policy(four_by_eight(9))
    start = optsched.solve(problem, "counts")
    result = optsched.solve(problem, Evolve(), time_limit=0.2, warm_start=start.schedule)
    assert result.objective == start.objective and result.seconds < 60


def test_preferred_levels():  # type: ignore[no-untyped-def]
    """The narrowest level in which it finds a choice decides."""
    for seed in range(40):
        problem = problem_of(seed, policy=Policy(preferred="host"))
        if problem.contention.fill == "exact":
            continue
        result = optsched.solve(problem, Evolve(), iterations=3000)
        assert result.objective == optsched.solve(problem, "counts").objective, seed


def test_refusals():  # type: ignore[no-untyped-def]
    """What it cannot judge is refused in a sentence."""
    exact = four_by_eight(0).changed(contention=Contention(fill="exact"))
    assert "exact GPUs" in subset_genetic.supports(exact).reason


@pytest.mark.parametrize(
    "options",
    [{"population": 3}, {"population": True}, {"crossover": "pox"}, {"decoder": "active"}],
)
def test_wrong_options(options):  # type: ignore[no-untyped-def]
    """Refused with the field; so are options that belong to orders."""
    with pytest.raises(InputError, match=f"options.{next(iter(options))}"):
        optsched.solve(four_by_eight(7), Evolve(), options=options)


def test_without_deap(monkeypatch):  # type: ignore[no-untyped-def]
    """The error says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "deap", None)
    with pytest.raises(MissingExtra, match="genetic"):
        optsched.solve(replace_policy(four_by_eight(7)), Evolve())
