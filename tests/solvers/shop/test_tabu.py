"""The engine `tabu`: conformance, refusals, reproducible runs, cooperation, and how good it is."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from depth import seeds
from random_shops import random_shop
from test_neighbourhoods import shop

import optsched
from optsched import InputError, JobArray, JobShop, UnsupportedProblem, verify
from optsched.model.schedule import NO_DEADLINE
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing.brute_force import best_makespan
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.shop.tabu import solver as tabu
from optsched_solvers.shop.tabu.solver import Tabu

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
    [{"elites": 1}, {"patience": "long"}],
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


def test_ft10_is_solved() -> None:
    """930, the optimum, within a given number of moves."""
    problem = JobShop.read(FT10)
    result = optsched.solve(problem, Tabu(), iterations=2_000_000, target=930, seed=1)
    assert result.objective == 930


def test_nothing_to_order() -> None:
    """No operation, one operation, one chain: the walk has no move, the run still ends."""
    for problem in (JobShop([[(0, 3)]]), JobShop([[(0, 3), (1, 2), (0, 1)]])):
        result = optsched.solve(problem, Tabu(), iterations=100)
        assert result.status == "optimal"
    empty = SimpleNamespace(answers="orders", graph=lambda: optsched.Schedule(
        resources=(), duration=np.zeros(0, np.int64), op_resources=optsched.Csr.of([])
    ))  # fmt: skip
    monitor = Monitor(Limits(iterations=10))
    Tabu().solve(empty, monitor.limits, monitor)  # type: ignore[arg-type]
    assert monitor.objective == 0
    monitor = Monitor(Limits(iterations=10_000))  # walks that are stuck at once cost steps too
    Tabu().solve(JobShop([[(0, 3), (1, 2)]]), monitor.limits, monitor)
    assert monitor.objective == 5 and monitor.iteration >= 10_000
