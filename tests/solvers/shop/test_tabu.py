"""The engine `tabu`: conformance, refusals, reproducible runs, cooperation, and how good it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from depth import seeds
from test_neighbourhoods import shop, started

import optsched
from optsched import InputError, JobArray, JobShop, Rows, Schedule, UnsupportedProblem, verify
from optsched.model.graph import evaluate, scheduled
from optsched.model.schedule import NO_DEADLINE
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing.brute_force import best_makespan
from optsched.testing.random_problems import random_array, random_graph, random_shop
from optsched_solvers.shop.tabu import solver as tabu
from optsched_solvers.shop.tabu.arrays import order_of
from optsched_solvers.shop.tabu.solver import Tabu
from optsched_solvers.shop.tabu.walk import Walk

FT10 = Path(__file__).parents[3] / "instances" / "jobshop" / "ft10.txt"


def array_of(seed: int, jobs: int = 8, stages: int = 4, **rest: object) -> JobArray:
    """A mixed array."""
    rng = Random(seed)
    rows = [[rng.randint(1, 99) for _ in range(stages)] for _ in range(jobs)]
    return JobArray(rows, rows, **rest)  # type: ignore[arg-type]


@seeds(1, 3)
def test_never_below_the_optimum_and_mostly_there(seed: int) -> None:
    """On tiny graphs of every kind: verified schedules, objective >= optimum, usually equal."""
    rng = Random(seed)
    met = tried = 0
    while tried < 40:
        kind = rng.randrange(3)
        if kind == 0:
            problem: optsched.Schedule | JobShop | JobArray = random_graph(
                rng, 7, gangs=False, deadlines=False
            )
        else:
            problem = random_shop(rng, 3, 2) if kind == 1 else random_array(rng, 2, 2)
        graph = problem.graph()
        if (graph.deadline != NO_DEADLINE).any() or graph.n_operations > 8:
            continue
        optimum = best_makespan(graph)
        result = optsched.solve(problem, Tabu(), iterations=400, seed=seed)
        if result.schedule is None:
            continue
        tried += 1
        assert verify(result.schedule) == []
        assert optimum is not None and result.objective is not None
        assert result.objective >= optimum
        met += result.objective == optimum
    assert met >= 34


def test_refusals_are_sentences() -> None:
    """Deadlines, gangs and periods are refused, each with its reason."""
    late = JobShop([[(0, 3), (1, 2)]], deadline=[9])
    assert "deadline" in Tabu().supports(late).reason
    with pytest.raises(UnsupportedProblem, match="deadline"):
        optsched.solve(late, Tabu(), time_limit=0.1)
    period = JobArray([[1]], [[1]], objective="period")
    assert "period" in Tabu().supports(period).reason
    rng, refused = Random(1), 0
    for _ in range(200):
        graph = random_graph(rng, 6, gangs=True, deadlines=False)
        if (np.diff(graph.op_resources.indptr) > 1).any():
            assert "resources at once" in Tabu().supports(graph).reason
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    "options",
    [{"elites": 1}, {"elites": 2.5}, {"elites": True}, {"patience": 0}, {"patience": "long"}],
)
def test_wrong_options_are_refused_by_name(options: dict[str, object]) -> None:
    """`InputError` names the option, what was expected and what came."""
    name = next(iter(options))
    with pytest.raises(InputError, match=rf"options\.{name}: expected an integer"):
        optsched.solve(shop(Random(1), 3, 2), Tabu(), time_limit=0.1, options=options)


@pytest.mark.parametrize("kind", ["shop", "array", "capped"])
def test_moves_decide_not_the_clock(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of any length give the same bits, across restarts of the pool."""
    problem = {
        "shop": shop(Random(3), 6, 5),
        "array": array_of(4, switch=3),
        "capped": array_of(5, activation=3, memory=9, lag_forward=2, lag_backward=1),
    }[kind]
    results = []
    for seconds in (1e-4, 3e-3, 0.5):
        monkeypatch.setattr(tabu, "SLICE", seconds)
        results.append(
            optsched.solve(
                problem, Tabu(), iterations=8000, seed=5, options={"patience": 300, "elites": 4}
            )
        )
    first = results[0]
    assert all(other.schedule == first.schedule for other in results)


def test_another_process_gives_the_same_bits() -> None:
    """Neither hash seed nor process matters."""
    code = (
        "import optsched; from optsched_solvers.shop.tabu.solver import Tabu;"
        "a = optsched.JobArray([[3, 5, 2], [4, 1, 6]] * 4, [[2, 6, 3], [5, 2, 4]] * 4, switch=1);"
        "r = optsched.solve(a, Tabu(), iterations=5000, seed=3);"
        "print(r.objective, r.schedule.start.tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1 and "[" in outputs.pop()


def test_seeds_differ() -> None:
    """Another seed, another walk."""
    problem = JobShop.read(FT10)
    results = [optsched.solve(problem, Tabu(), iterations=3000, seed=seed) for seed in range(3)]
    assert any(other.schedule != results[0].schedule for other in results[1:])


def test_ft10_is_solved() -> None:
    """930, the optimum, within a given number of moves."""
    problem = JobShop.read(FT10)
    result = optsched.solve(problem, Tabu(), iterations=2_000_000, target=930, seed=1)
    assert result.objective == 930


def test_a_target_ends_the_run_at_the_first_schedule_that_meets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not a slice later: long slices stop where short ones do."""
    problem = JobShop.read(FT10)
    found = []
    for seconds in (1e-6, 0.5):
        monkeypatch.setattr(tabu, "SLICE", seconds)
        found.append(optsched.solve(problem, Tabu(), iterations=20_000, seed=2, target=1000))
    assert found[0].schedule == found[1].schedule
    assert found[0].objective is not None and 951 < found[0].objective <= 1000


def polish(graph: Schedule, sequences: Rows, moves: int, seed: int = 0) -> tuple[Rows, int]:
    """The best orders of a short walk, those given included, and their makespan."""
    walk = Walk(graph, seed)
    walk.load(order_of(graph, sequences))
    walk.run(moves)
    return walk.best_sequences(), walk.best


def test_better_schedules_of_others_become_elites() -> None:
    """Under a time limit the pool takes what another engine reports."""
    problem = shop(Random(12), 8, 6)
    graph = problem.graph()
    sequences = started(graph)
    assert sequences is not None
    better, value = polish(graph, sequences, 20_000, seed=4)
    limits = Limits(time_limit=600.0)
    monitor = Monitor(limits)
    monitor.incumbent(sequences, evaluate(graph, sequences).makespan, "rule")
    search = tabu._Search(graph, limits, monitor, 8, 500)
    assert search.take_over()
    monitor.incumbent(better, value, "another engine")
    assert search.explore(search.elites.best.order, 500)
    assert value in [elite.value for elite in search.elites.members]


def test_polish_never_worsens_and_repeats() -> None:
    """The schedule given is the floor; the value belongs to the orders; seeds repeat."""
    for seed in range(15):
        rng = Random(seed)
        graph = (random_array(rng, 5, 3) if seed % 2 else shop(rng, 7, 5)).graph()
        sequences = started(graph)
        if sequences is None:
            continue
        before = scheduled(graph, sequences).makespan
        orders, value = polish(graph, sequences, 500, seed)
        schedule = scheduled(graph, orders)
        assert verify(schedule) == [] and schedule.makespan == value <= before
        assert polish(graph, sequences, 500, seed) == (orders, value)
        assert polish(graph, sequences, 0) == (sequences, before)


def test_a_warm_start_is_the_first_elite() -> None:
    """No rule is tried; what comes out is never worse."""
    problem = array_of(7, activation=2, memory=6)
    first = optsched.solve(problem, Tabu(), iterations=3000, seed=1)
    again = optsched.solve(problem, Tabu(), iterations=50, seed=2, warm_start=first.schedule)
    assert again.objective is not None and first.objective is not None
    assert again.objective <= first.objective
    assert not any(event.source.startswith("dispatch") for event in again.history)


def test_nothing_to_order() -> None:
    """No operation, one operation, one chain: the walk has no move, the run still ends."""
    for problem in (JobShop([[(0, 3)]]), JobShop([[(0, 3), (1, 2), (0, 1)]])):
        result = optsched.solve(problem, Tabu(), iterations=100)
        assert result.status == "optimal"
    empty = SimpleNamespace(answers="orders", graph=lambda: optsched.Schedule(
        resources=(), duration=np.zeros(0, np.int64), op_resources=optsched.Rows.of([])
    ))  # fmt: skip
    monitor = Monitor(Limits(iterations=10))
    Tabu().solve(empty, monitor.limits, monitor)  # type: ignore[arg-type]
    assert monitor.objective == 0


def test_pipelines_get_better_than_rules_and_job_orders() -> None:
    """Moves gain on what the search on job orders found, under memory caps too."""
    gained = 0
    for seed in range(2):
        problem = array_of(seed, 12, 5, activation=4, memory=[20, 20, 16, 16, 12])
        result = optsched.solve(problem, Tabu(), iterations=10_000, seed=seed)
        gained += any(event.source == "tabu" for event in result.history)
    assert gained


def test_a_pool_that_is_never_full() -> None:
    """So many elites cannot be found, let alone counted, before the limit."""
    result = optsched.solve(
        JobShop.read(FT10), "tabu", iterations=2000, options={"elites": 10**9, "patience": 10}
    )  # fmt: skip
    assert result.objective is not None


def test_no_move_at_all() -> None:
    """Every walk is stuck at once: they cost steps all the same, so the search ends."""
    limits = Limits(iterations=10_000)
    monitor = Monitor(limits)
    Tabu().solve(JobShop([[(0, 3), (1, 2)]]), limits, monitor)
    assert monitor.objective == 5 and monitor.iteration >= 10_000
