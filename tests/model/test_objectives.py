"""Objectives of one iteration: definition, reduction, bounds, documents, refusals."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import pytest
from random_shops import random_shop

import optsched
from optsched import Goal, InputError, JobArray, JobShop
from optsched.errors import CyclicOrder
from optsched.formats.read_problem import read_problem
from optsched.model.document import read, write
from optsched.model.graph import evaluate, machine_orders, scheduled
from optsched.model.objective_bounds import completion_bounds, preemptive_bound
from optsched.model.objectives import LATENESS, TOTAL, as_makespan, objective_value
from optsched.model.schedule import Csr
from optsched.testing.brute_force import best_makespan
from optsched.testing.random_problems import random_array, random_graph, with_goal

CHAINS = [[(0, 3), (1, 2)], [(1, 4), (0, 1)]]
LATE = JobShop(CHAINS, objective=LATENESS, due=[4, 12], job_weight=[3, 1], name="late")


def drawn(seed: int) -> Any:
    """A small shop, graph or array with an objective that counts the ends of jobs."""
    rng = Random(seed)
    draw = rng.choice([random_shop, random_graph, lambda rng: random_array(rng, 2, 2)])
    return with_goal(rng, draw(rng))


def by_definition(graph: Any, end: Any) -> int:
    """The objective in words of the textbook."""
    completion: dict[int, int] = {}
    for job, time in zip(graph.job.tolist(), end.tolist(), strict=True):
        completion[job] = max(completion.get(job, 0), time)
    if graph.goal.objective == LATENESS:
        return max(c - graph.goal.due[j] for j, c in completion.items())
    weight = graph.goal.job_weight or [1] * (max(completion) + 1)
    return sum(weight[j] * c for j, c in completion.items())


@pytest.mark.parametrize("seed", range(60))
def test_values_agree_with_the_definition_and_the_reduction(seed: int) -> None:
    """For any orders; the graph with tails has the same value as a makespan."""
    problem, rng = drawn(seed), Random(seed)
    graph = problem.graph()
    orders = Csr.of(rng.sample(row, len(row)) for row in graph.users.to_lists())
    try:
        found = scheduled(graph, orders)
    except CyclicOrder:
        orders = None
    end = evaluate(graph, orders).head + graph.duration
    value = by_definition(graph, end)
    assert objective_value(graph, end) == value
    if orders is not None:
        assert problem.evaluate(found) == value
    if problem.objective_name == LATENESS:
        reduced, shift = as_makespan(problem)
        assert evaluate(reduced.graph(), orders).makespan - shift == value


@pytest.mark.parametrize("seed", range(20))
def test_preemption_bounds_one_machine(seed: int) -> None:
    """No order of jobs with releases is better than the preemptive bound; without it is exact."""
    rng = Random(seed)
    n, alike = rng.randint(1, 5), rng.random() < 0.5
    release = [rng.choice([0, 0, 3, 7]) for _ in range(n)] if seed % 2 else [0] * n
    shop = JobShop(
        [[(0, rng.randint(0, 6))] for _ in range(n)], release=release, objective=TOTAL,
        job_weight=[2] * n if alike else [rng.randint(0, 4) for _ in range(n)],
    )  # fmt: skip
    best = best_makespan(shop.graph())
    assert best is not None and shop.lower_bound() <= best
    if not any(release):  # Smith's rule
        assert shop.lower_bound() == best


def test_shortest_remaining_time_is_the_preemptive_optimum() -> None:
    """A short job that arrives late interrupts the long one, if all weights are equal."""
    shop = JobShop([[(0, 10)], [(0, 1)]], release=[0, 3], objective=TOTAL)
    assert completion_bounds(shop.graph())["one_machine"] == 11 + 4
    assert preemptive_bound([]) == 0
    orders = [scheduled(shop.graph(), Csr.of([row])) for row in permutations([0, 1])]
    assert min(shop.evaluate(one) for one in orders) == 4 + 14


def test_the_verifier_needs_the_document_alone() -> None:
    """Weights and due dates are in it, and a wrong value of either objective is found."""
    for shop, value in ((LATE, 1), (LATE.with_objective(TOTAL), 23)):
        found = optsched.solve(shop, time_limit=30)
        assert (found.objective, found.status) == (value, "optimal")
        assert found.schedule is not None
        text = write(found.schedule).decode()
        assert read(text) == found.schedule and not optsched.verify(read(text))
        wrong = text.replace(f'"value":{value},', f'"value":{value + 1},')
        (violation,) = optsched.verify(read(wrong.replace('"optimal"', '"feasible"')))
        assert violation.kind == "objective" and shop.objective in violation.message
        assert optsched.verify(found.schedule, JobShop(CHAINS))[0].kind == "instance"


def test_documents_of_shops_and_arrays_keep_weights_and_due_dates(tmp_path: Any) -> None:
    """Written, read, pickled and named by hash; other objectives are other instances."""
    array = JobArray([[2, 3], [4, 1]], 2, objective=TOTAL, job_weight=[1, 4], due=[9, 3])
    for problem in (LATE, array):
        problem.write(tmp_path / "x.json")
        again = read_problem(tmp_path / "x.json")
        assert again == problem == pickle.loads(pickle.dumps(problem))
        assert again.graph().goal == problem.graph().goal
        assert problem.with_objective("makespan") != problem
    with pytest.raises(InputError, match="write json"):
        LATE.write(tmp_path / "x.txt", "standard")


def test_targets_and_progress_are_in_the_values_of_the_problem() -> None:
    """Negative ones too: engines work with a makespan, callers never see it."""
    early = JobShop(CHAINS, objective=LATENESS, due=[40, 42])
    seen: list[Any] = []
    found = optsched.solve(
        early, "cpsat", iterations=100_000, on_progress=lambda now: seen.append(now.objective)
    )
    assert found.objective == -34 == found.lower_bound and seen[-1] == -34
    assert all(step.lower_bound is None or step.lower_bound <= -34 for step in found.history)
    stopped = optsched.solve(early, "tabu", target=-20, iterations=10**6)
    assert stopped.objective is not None and stopped.objective <= -20
    again = optsched.solve(early, "tabu", iterations=0, warm_start=found.schedule)
    assert again.objective == -34


def test_annealing_keeps_exact_values() -> None:
    """The compiled value of the present schedule is that of its orders."""
    from optsched_solvers.shop.rules import Dispatcher, Variant
    from optsched_solvers.shop.tabu.annealing import _Total

    rng = Random(3)
    for _ in range(6):
        array = with_goal(rng, random_array(rng, 3, 3)).with_objective(TOTAL)
        graph = array.graph()
        listed = Dispatcher(graph, 0).sequences(Variant("spt"))
        if listed is None:
            continue
        walk = _Total(graph, seed=1)
        walk.begin(listed[0])
        for temperature in (50.0, 5.0, 0.1):
            walk.run(200, temperature)
            end = evaluate(graph, machine_orders(graph, walk.walk.order)).head
            assert walk.walk.value == objective_value(graph, end + graph.duration)
            assert walk.best <= walk.walk.value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": LATENESS}, "due: objective"),
        ({"objective": LATENESS, "due": [0, 0]}, "due: objective"),
        ({"objective": "tardiness"}, "objective: expected one of makespan"),
        ({"due": [1]}, r"one value per job \(2 values\), got 1"),
        ({"due": {0: 9, 1: 4}}, "one value per job, got .0: 9, 1: 4"),
        ({"job_weight": [1, -1]}, r"job_weight\[1\]"),
        ({"objective": TOTAL, "job_weight": [2**50, 1]}, "job_weight: weights times durations"),
        ({"objective": LATENESS, "due": [2**53, 1]}, "due: times and due dates add up"),
    ],
)
def test_wrong_goals_of_shops_are_refused(fields: dict[str, Any], message: str) -> None:
    """With the field and the way out."""
    with pytest.raises(InputError, match=message):
        JobShop(CHAINS, **fields)


def test_what_a_goal_does_not_go_with() -> None:
    """Periods, open choices of recomputation, and solvers that do not minimise it."""
    with pytest.raises(InputError, match="recompute_mode"):
        JobArray([[1, 1]], 1, recompute_mode="choose", objective=TOTAL)
    cycle = JobArray([[1, 1]], 1, objective="period").graph()
    with pytest.raises(InputError, match="periodic schedule"):
        replace(cycle, goal=Goal(TOTAL))
    with pytest.raises(optsched.UnsupportedProblem, match="these do: auto, cpsat"):
        optsched.solve(LATE.with_objective(TOTAL), "branch_and_bound")
    with pytest.raises(InputError, match="use tabu"):
        optsched.solve(LATE.with_objective(TOTAL), "dispatch", options={"search": True})
    assert np.array_equal(LATE.due, [4, 12])
