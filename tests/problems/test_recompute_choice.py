"""Recomputation chosen by the solver: answers, schedules, bounds, and the best of all choices."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from depth import depth
from random_shops import random_choice

import optsched
from optsched import JobArray, UnsupportedProblem, verify
from optsched.errors import InputError
from optsched.problems.jobarray.recompute import settled, tradeoff, with_choice
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing import best_makespan
from optsched.testing.brute_force import best_period
from optsched_solvers.shop import recompute_choice
from optsched_solvers.shop.dispatch import Dispatch

if TYPE_CHECKING:
    from optsched.model.schedule import Problem
    from optsched.solving.result import Result


def optimum_of_choices(array: JobArray) -> int | None:
    """By an exact solver, choice by choice."""
    found = []
    for choice in product([False, True], repeat=array.n_jobs):
        result = optsched.solve(array.replace(recompute_mode=list(choice)), "cpsat", workers=1)
        assert result.status in ("optimal", "infeasible")
        if result.objective is not None:
            found.append(result.objective)
    return min(found, default=None)


def test_the_best_of_all_choices() -> None:
    """Bound <= optimum over the choices = what `auto` finds, and it says which jobs recompute."""
    chosen = set()
    for seed in range(depth(12, 12)):
        array = random_choice(Random(seed), jobs=1 + seed % 3, micro_batches=1 + seed % 2)
        best = optimum_of_choices(array)
        result = optsched.solve(array, "auto", iterations=2000, workers=1)
        if best is None:
            assert result.status == "infeasible" and result.reason
            continue
        assert array.lower_bound() <= best == result.objective
        assert result.lower_bound is not None and result.lower_bound <= best
        schedule = result.schedule
        assert schedule is not None and verify(schedule) == []
        recompute = schedule.provenance["recompute"]
        concrete = array.replace(recompute_mode=recompute)
        assert concrete.graph().same_graph(schedule) and concrete.evaluate(schedule) == best
        chosen.add(tuple(recompute))
    assert {True, False} <= {flag for choice in chosen for flag in choice}


def allowed(array: JobArray) -> list[list[bool]]:
    """All choices but those that cannot fit."""
    must, never = settled(array)
    every = [list(choice) for choice in product([False, True], repeat=array.n_jobs)]
    return [c for c in every if not (must & ~np.array(c)).any() and not (never & np.array(c)).any()]


@pytest.mark.parametrize("objective", ["makespan", "period"])
def test_bounds_hold_for_every_choice(objective: str) -> None:
    """A relaxation: no choice has a lower bound below it."""
    sharper = 0
    for seed in range(20):
        array = random_choice(Random(seed), jobs=3, micro_batches=2).with_objective(objective)
        mine = array.bounds()
        share = mine.pop("tradeoff")
        sharper += share > max(mine.values())
        for choice in allowed(array):
            theirs = array.replace(recompute_mode=choice).bounds()
            assert all(mine[key] <= theirs[key] for key in mine), (seed, choice)
            assert share <= max(theirs.values()), (seed, choice)
    assert sharper


@pytest.mark.parametrize("objective", ["makespan", "period"])
def test_no_schedule_beats_the_tradeoff(objective: str) -> None:
    """Brute force over all choices and all orders; bytes times time decide in many of these."""
    exact = best_period if objective == "period" else best_makespan
    sharp = 0
    for seed in range(depth(14, 40)):
        rng = Random(seed)
        tables = [[[rng.randint(1, 4)] * 2 for _ in range(3)] for _ in range(3)]
        array = JobArray(
            tables[0], tables[1], recompute=tables[2], switch=rng.choice([0, 0, 1]),
            activation=[[rng.randint(2, 5)] * 2 for _ in range(3)], checkpoint=rng.choice([0, 1]),
            recompute_workspace=rng.choice([0, 1]), memory=[rng.randint(5, 7)] * 2,
            multiplicity=[1, 1, 1 + seed % 2],
            objective=objective, recompute_mode="choose",
        )  # fmt: skip
        array = array.subset([1, 2] if seed % 4 else [0, 1])
        costs = tradeoff(array)
        values = []
        for choice in allowed(array):
            best = exact(array.graph(choice))
            if best is not None:
                assert costs.bound(choice) <= best, (seed, choice)
                values.append(best)
        assert array.lower_bound() <= min(values), seed
        sharp += array.bounds()["tradeoff"] == array.lower_bound()
    assert sharp >= 2


def test_round_trip_and_warm_start() -> None:
    """A schedule starts the next search; the result is never worse."""
    array = random_choice(Random(3), jobs=4)
    first = optsched.solve(array, "auto", iterations=50, workers=1).schedule
    assert first is not None and first.sequences is not None
    answer = array.answer(first)
    again = array.scheduled(answer)
    assert again.sequences == first.sequences and array.evaluate(again) == first.makespan
    assert again.provenance["recompute"] == first.provenance["recompute"]
    result = optsched.solve(array, "auto", iterations=1, workers=1, warm_start=first)
    assert result.objective is not None and result.objective <= first.makespan


def test_wrong_answers_are_refused() -> None:
    """A schedule that does not say what it chose, and solutions that hold no choice."""
    array = random_choice(Random(3), jobs=4)
    schedule = optsched.solve(array, "auto", iterations=50, workers=1).schedule
    assert schedule is not None and schedule.sequences is not None and schedule.start is not None
    for provenance in ({}, {"recompute": [True]}, {"recompute": "yes"}, {"recompute": [1] * 4}):
        mute = schedule.with_orders(schedule.sequences, schedule.start, None, provenance)
        with pytest.raises(InputError, match="which jobs recompute"):
            array.answer(mute)
        with pytest.raises(InputError, match="which jobs recompute"):
            array.evaluate(mute)
        with pytest.raises(InputError, match="warm_start"):
            optsched.solve(array, "auto", iterations=1, warm_start=mute)
    with pytest.raises(InputError, match="4 times true or false"):
        array.scheduled(schedule.sequences)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="4 times true or false"):
        array.scheduled(with_choice(schedule.sequences, [True]))


@pytest.mark.parametrize("solver", ["dispatch", "tabu", "cpsat", "branch_and_bound", "genetic"])
def test_others_refuse(solver: str) -> None:
    """One sentence that names `auto`."""
    with pytest.raises(UnsupportedProblem, match=r"which jobs recompute; these do: auto"):
        optsched.solve(random_choice(Random(1)), solver, iterations=1)


def test_mixed_choices_are_found() -> None:
    """Where memory is short, some jobs recompute, and the answer is near the bound."""
    array = JobArray.from_profile(
        "gpt2_xl", stages=4, batch_sizes=[8, 16, 24, 32] * 2, memory="80GB",
        recompute_mode="choose", objective="period",
    )  # fmt: skip
    result = optsched.solve(array, "auto", iterations=500, workers=1)
    assert result.objective is not None and result.schedule is not None
    assert verify(result.schedule) == []
    assert 0 < sum(result.schedule.provenance["recompute"]) < array.n_jobs
    for way in ("never", "always"):
        assert result.objective < array.replace(recompute_mode=way).lower_bound()


def test_a_refuted_bound_of_one_choice_costs_no_schedule() -> None:
    """What the engine finds for a choice comes through, and that it contradicted itself."""

    class Liar(Dispatch):
        def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
            super().solve(problem, limits, monitor)
            if monitor.objective is not None:
                monitor.bound(monitor.objective + 1, "liar")
            return optsched.Result("unknown")

    array, limits = random_choice(Random(1), jobs=6, micro_batches=2), Limits(iterations=20)
    monitor = Monitor(limits)
    recompute_choice.solve(Liar(), Dispatch(), array, limits, monitor)
    assert monitor.objective is not None and "liar proved the bound" in monitor.contradiction
