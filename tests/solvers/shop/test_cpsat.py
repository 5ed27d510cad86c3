"""CP-SAT finds and proves the optimum, with every feature of the format; it never lies."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_shops import random_shop
from state_oracle import best_by_states

import optsched
from optsched import JobArray, JobShop
from optsched.errors import InputError
from optsched.testing import best_makespan
from optsched.testing.random_problems import random_array, random_graph

if TYPE_CHECKING:
    from collections.abc import Callable


def solved(problem: Any, **options: Any) -> optsched.Result:
    """One worker, no clock."""
    return optsched.solve(
        problem, "cpsat", workers=1, iterations=60_000_000, options=options or None
    )


def check(problem: Any, **options: Any) -> None:
    """The optimum with proof, or the proof that there is none."""
    best = best_by_states(problem.graph())
    result = solved(problem, **options)
    if best is None:
        assert result.status == "infeasible" and result.reason
        return
    assert result.objective == best
    assert result.status == "optimal" and result.lower_bound == best


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: random_graph(rng, 6),  # gangs, setups that are not triangular, windows, lags
        lambda rng: random_array(rng, 2, 3),  # switches, caps, split backward, recomputation
        lambda rng: random_shop(rng, 3, 3),  # classic and re-entrant, windows
    ],
    ids=["graph", "array", "shop"],
)
@given(st.randoms(use_true_random=False))
def test_the_optimum_is_proved(draw: Callable[[Random], Any], rng: Random) -> None:
    """Or that there is none, whatever the format has; zero durations abound."""
    problem = draw(rng)
    assume(problem.graph().n_operations <= 12)
    check(problem)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [290, 3, 19, 30, 47])
def test_three_by_three(seed: int) -> None:
    """Three jobs on up to three stages; 290 has zero durations, on which CP-SAT once lied."""
    check(random_array(Random(seed), 3, 3))


def no_strong_propagation() -> JobArray:
    """Zero durations: with strong propagation and a hint of 22 CP-SAT 9.15 proves 22 here."""
    return JobArray(
        [[1, 1], [0, 4], [3, 0]], [[0, 0], [5, 5], [4, 3]], update=[[3, 1], [2, 2], [2, 2]],
        update_mode="block", activation=[[2, 3], [1, 2], [1, 4]], memory=[0, 6],
    )  # fmt: skip


def test_zero_durations_switch_strong_propagation_off() -> None:
    """The optimum is 21 (regression)."""
    result = solved(no_strong_propagation())
    assert (result.objective, result.lower_bound, result.status) == (21, 21, "optimal")


# symmetry


@given(st.randoms(use_true_random=False), st.integers(0, 2))
def test_symmetry_changes_nothing(rng: Random, where: int) -> None:
    """Identical jobs with a switch on one stage, the trap: the same optimum with and without."""
    stages = rng.randint(1, 3)
    forward = [rng.randint(1, 4) for _ in range(stages)]
    backward = [rng.randint(1, 4) for _ in range(stages)]
    switch = [rng.choice([1, 3, 20]) if v == where % stages else 0 for v in range(stages)]
    jobs = rng.randint(2, 3 if stages < 3 else 2)
    array = JobArray(
        [forward] * jobs, [backward] * jobs, switch=[switch] * jobs,
        activation=1, memory=rng.choice([None, [2] * stages]),
    )  # fmt: skip
    with_it, without = solved(array), solved(array, symmetry=False)
    assert with_it.status == without.status == "optimal"
    assert with_it.objective == without.objective


# fixtures


def test_memory_makes_early_forwards_wrong() -> None:
    """Room for one on the middle stage: a schedule without a left shift wins, for all provers."""
    array = JobArray(
        [[25, 1, 50], [2, 1, 1]], [[1, 1, 50], [20, 1, 1]], lag_forward=[[0, 0], [28, 0]],
        activation=[[0, 1, 0], [0, 1, 0]], memory=[0, 1, 0],
    )  # fmt: skip
    assert best_by_states(array.graph()) == 137
    for result in (solved(array), optsched.solve(array, "branch_and_bound", iterations=50_000)):
        assert (result.objective, result.status) == (137, "optimal")


# limits


def test_parameters_that_cp_sat_refuses() -> None:
    """Its own reason is told."""
    with pytest.raises(InputError, match=r"options.parameters: .*num_workers"):
        optsched.solve(
            JobShop.read("ta01"), "cpsat", time_limit=5,
            options={"parameters": {"num_workers": -3}},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "options.mode"),
         ({"parameters": 3}, "options.parameters"),
        ({"parameters": {"no_such": 1}}, "no_such"),
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    """Each is refused by name."""
    with pytest.raises(InputError, match=message):
        optsched.solve(no_strong_propagation(), "cpsat", time_limit=1, options=options)


def test_beyond_the_range_of_cp_sat() -> None:
    """Values up to 2^52 are solved exactly or refused with a sentence, never wrapped."""
    huge = 2**51
    shop = JobShop([[(0, huge), (1, 1)], [(1, 3), (0, huge)]])
    try:
        result = solved(shop)
    except InputError as error:
        assert "range" in str(error)
    else:
        assert result.objective == best_makespan(shop.graph())
