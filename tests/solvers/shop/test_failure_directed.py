"""Failure-directed search against brute force; nothing that is optimal is ever cut off."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from math import factorial, prod
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import depth, seeds
from hypothesis import given
from hypothesis import strategies as st
from random_shops import random_shop

from optsched import Arcs, CyclicOrder, JobArray, JobShop, Schedule
from optsched.model.bounds import makespan_bound
from optsched.model.graph import evaluate, scheduled
from optsched.model.schedule import Csr
from optsched.model.verify import verify
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing.brute_force import best_makespan
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.shop.proof import failure_directed, state, symmetry
from optsched_solvers.shop.proof import tree as disjunctive_tree
from optsched_solvers.shop.proof.destructive import Climb
from optsched_solvers.shop.proof.state import TRUE
from optsched_solvers.shop.proof.symmetry import identical_jobs
from optsched_solvers.shop.proof.tree import REFUTED, DisjunctiveTree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.solving.result import Result

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"
KINDS = ("graph", "array", "shop", "ties")


def small_graph(kind: str, seed: int, most: int = 6000) -> Schedule | None:
    """A random graph that brute force can do; `ties`: all durations 0 or 1, many jobs alike."""
    rng = Random(f"{kind} {seed}")
    if kind == "graph":
        graph = random_graph(rng, most=7)
    elif kind == "array":
        graph = random_array(rng, 3, 2).graph()
    elif kind == "shop":
        graph = random_shop(rng, 4, 3).graph()
    else:
        machines = rng.randint(1, 3)
        chain = [(rng.randrange(machines), rng.randint(0, 1)) for _ in range(rng.randint(1, 4))]
        jobs = [
            chain if rng.random() < 0.5 else [(m, rng.randint(0, 1)) for m, _ in chain]
            for _ in range(rng.randint(1, 4))
        ]
        graph = JobShop(jobs, [f"m{r}" for r in range(machines)]).graph()
    orders = prod(factorial(min(20, len(on))) for on in graph.users.to_lists())
    return graph if orders <= most else None


def searched(
    graph: Schedule, *, rules: bool = True, iterations: int = 50_000
) -> tuple[Monitor, Result]:
    """Monitor and result of a search; without rules the tree must find schedules itself."""
    limits = Limits(iterations=iterations)
    monitor = Monitor(limits)
    if rules:
        return monitor, failure_directed.search(graph, limits, monitor, polish=False)
    return monitor, failure_directed._Search(graph, 0, iterations, monitor, polish=False).run()


def check(graph: Schedule, monitor: Monitor, result: Result) -> None:
    """Optimal and proved, or proved infeasible, as brute force says."""
    best = best_makespan(graph)
    assert monitor.objective == best
    if best is None:
        assert result.status == "infeasible"
        return
    assert result.status == "unknown"
    assert monitor.lower_bound == best
    assert monitor.solution is not None
    schedule = scheduled(graph, monitor.solution)
    assert schedule.makespan == best and not verify(schedule)


@pytest.mark.parametrize("kind", KINDS)
def test_brute_force(kind: str) -> None:
    """Every feature: lags, setups that are not triangular, memory, windows, gangs, zeros."""
    for seed in range(depth(60, 1500)):
        graph = small_graph(kind, seed)
        if graph is not None and graph.n_operations:
            check(graph, *searched(graph, rules=bool(seed % 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_restarts_and_nogoods_lose_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a restart after every failure nearly all refutations are remembered as nogoods."""
    monkeypatch.setattr(disjunctive_tree, "FIRST_RESTART", 1.0)
    monkeypatch.setattr(disjunctive_tree, "RESTART_GROWTH", 1.02)
    for seed in range(depth(30, 100)):
        graph = small_graph(kind, seed)
        best = None if graph is None else best_makespan(graph)
        if graph is None or best is None:
            continue
        found: list[int] = []
        tree = DisjunctiveTree(graph, on_leaf=lambda _, value, found=found: found.append(value))
        assert not tree.reset(best - 1) or tree.search() == REFUTED
        assert not found
        assert tree.reset(tree.horizon)  # without shaving: all is left to the tree
        assert tree.search() == REFUTED and found[-1] == best


def feasible_schedules(graph: Schedule, most: int) -> Iterator[tuple[np.ndarray, list[list[int]]]]:
    """Semi-active starts and orders of every schedule that ends by `most`."""
    for rows in product(*(permutations(on) for on in graph.users.to_lists())):
        orders = [list(row) for row in rows]
        try:
            found = evaluate(graph, Csr.of(orders))
        except CyclicOrder:
            continue
        schedule = graph.with_orders(Csr.of(orders), found.head)
        if found.makespan <= most and not verify(schedule):
            yield found.head, orders


@pytest.mark.parametrize("kind", KINDS)
def test_no_start_of_a_good_schedule_is_removed(kind: str) -> None:
    """Propagation and shaving keep the windows and orders of every schedule within the target."""
    checked = 0
    for seed in range(depth(40, 100)):
        graph = small_graph(kind, seed, most=800)
        best = None if graph is None else best_makespan(graph)
        if graph is None or best is None or identical_jobs(graph):
            continue
        target = best + seed % 3
        tree = DisjunctiveTree(graph)
        assert tree.reset(target)
        assert tree.shave(gain=0.0) != REFUTED
        for start, orders in feasible_schedules(graph, target):
            keeps(tree, graph, start, orders)
        checked += 1
    assert checked > 3


def keeps(
    tree: DisjunctiveTree, graph: Schedule, start: np.ndarray, orders: list[list[int]]
) -> None:
    """The root of a tree admits this schedule."""
    op, literal = tree.state.op, tree.state.literal
    assert (op["est"][:-1] <= start).all() and (start <= op["lst"][:-1]).all()
    place = [{i: k for k, i in enumerate(row)} for row in orders]
    for m in np.flatnonzero(tree.state.value == TRUE):
        row = place[literal["machine"][m]]
        first, second = (
            tree.state.slot["operation"][literal[side][m]] for side in ("before", "after")
        )
        assert row[first] < row[second]


@seeds(30, 120)
def test_symmetry_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Identical jobs, switch times on single stages: the same optimum without ordering them."""
    rng = Random(seed)
    stages, jobs = rng.randint(1, 3), rng.randint(2, 3)
    forward = [rng.randint(0, 4) for _ in range(stages)]
    backward = [rng.randint(0, 4) for _ in range(stages)]
    switch = [rng.choice([0, 0, 1, 3, 9]) for _ in range(stages)]
    array = JobArray(
        [forward] * jobs, [backward] * jobs, switch=[switch] * jobs,
        lag_forward=rng.choice([0, 2]),
        lag_backward=rng.choice([0, 3]), activation=1, memory=rng.choice([0, 1, 2]),
        trailing_switch=rng.random() < 0.3,
        micro_batches=2 if stages == 1 and rng.random() < 0.5 else 1,
    )  # fmt: skip
    graph = array.graph()
    assert symmetry.ordered_alike(graph)
    monitor, result = searched(graph)
    with monkeypatch.context() as patch:
        patch.setattr(state, "ordered_alike", lambda graph: [])
        plain, _ = searched(graph)
    assert result.status == "unknown"
    assert monitor.objective == monitor.lower_bound == plain.objective == plain.lower_bound


def test_slices_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same nodes whatever the length of a slice, and whatever the machine does meanwhile."""
    graph = JobShop.read(INSTANCES / "ft10.txt").graph()
    runs = []
    for seconds in (1e-9, 1.0):
        monkeypatch.setattr(disjunctive_tree, "SLICE", seconds)
        monitor, _ = searched(graph, iterations=5000)
        events = [(e.objective, e.lower_bound, e.source) for e in monitor.history]
        runs.append((events, monitor.iteration, monitor.solution))
    assert runs[0] == runs[1]
    assert runs[0][1] == 5000


# destructive bounds: never above the optimum, exact with time, better with more work


def climbed(graph: Schedule, upper: int, nodes: int | None = None) -> int:
    """The bound of a climb towards `upper`."""
    lower = makespan_bound(graph)
    if lower >= upper:
        return upper
    climb = Climb(DisjunctiveTree(graph), lower, upper)
    climb.work(nodes)
    return climb.lower


@seeds(30, 150)
def test_never_above_the_optimum_and_exact_in_the_end(seed: int) -> None:
    """Any limit gives a bound, no limit the optimum, `upper` never matters from above."""
    graph = small_graph(KINDS[seed % 3], seed)
    if graph is None:
        return
    best = best_makespan(graph)
    if best is None:
        assert climbed(graph, 60) == 60  # nothing is feasible
        return
    for nodes in (0, 7, 50):
        assert makespan_bound(graph) <= climbed(graph, best + 5, nodes) <= best
    assert climbed(graph, best + 5) == best
    assert climbed(graph, best - 1) == best - 1 or best == 0


def test_bounds_rise_until_stopped() -> None:
    """Every new bound is reported once, ascending; `stop` is called between slices."""
    bounds: list[int] = []
    graph = JobShop.read(INSTANCES / "ft06.txt").graph()
    climb = Climb(DisjunctiveTree(graph), 0, 70, on_bound=bounds.append)
    assert climb.work() and climb.lower == 55
    assert bounds == sorted(set(bounds)) and bounds[-1] == 55
    calls: list[int] = []
    graph = JobShop.read(INSTANCES / "ft10.txt").graph()
    tree = DisjunctiveTree(graph, stop=lambda: len(calls) > 9 or bool(calls.append(1)))
    assert not Climb(tree, makespan_bound(graph), 930).work()
    assert len(calls) == 10


# which jobs may change places


def jobs_of(problem: Any) -> list[list[int]]:
    """Groups as job numbers."""
    graph = problem.graph()
    return [[int(graph.job[rows[0]]) for rows in group] for group in identical_jobs(graph)]


def test_groups() -> None:
    """Jobs that agree in every field, machines and their order included."""
    rows = [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2], [9, 9]]
    assert jobs_of(JobArray(rows, rows)) == [[0, 2, 4], [1, 3]]
    assert jobs_of(JobShop([[(0, 1), (1, 1)], [(1, 1), (0, 1)], [(0, 1), (1, 1)]])) == [[0, 2]]
    assert jobs_of(JobShop([[(0, 1)], [(0, 1)]], deadline=[5, None])) == []


@pytest.mark.parametrize(
    "field",
    [
         {"lag_forward": [[1], [2]]}, {"activation": [[1, 1], [1, 2]]},
         {"switch": [[0, 0], [1, 0]]}, {"micro_batches": [1, 2]},
        {"place": [[[0, 1]], [[1, 0]]]},
        {"checkpoint": 3, "activation": 2, "recompute_mode": [True, False]},
    ],
)  # fmt: skip
def test_any_difference_counts(field: dict[str, Any]) -> None:
    """A single differing number makes two jobs different."""
    assert jobs_of(JobArray([[1, 2]] * 2, [[3, 4]] * 2)) == [[0, 1]]
    assert jobs_of(JobArray([[1, 2]] * 2, [[3, 4]] * 2, **field)) == []


def test_arcs_and_families_between_jobs() -> None:
    """Who waits for another job, or shares its family where setups cost, changes with nobody."""
    graph = JobArray([[1]] * 3, [[1]] * 3, switch=2).graph()
    assert jobs_of(graph) == [[0, 1, 2]]
    arcs = [*zip(*(c.tolist() for c in graph.arcs[:3]), strict=True), (0, 3, 0)]
    assert jobs_of(replace(graph, arcs=Arcs.of(arcs))) == []
    assert jobs_of(replace(graph, family=np.array([0, 0, 0, 0, 2, 2]))) == []


@given(st.randoms(use_true_random=False))
def test_groups_are_classes_of_equal_rows(rng: Random) -> None:
    """Exactly the jobs whose data agree are grouped; positions match operation by operation."""
    array = random_array(rng)
    graph = array.graph()
    keys = (
        "duration", "stage", "microbatch", "release", "acquire", "free", "workspace", "setup_out",
        "single_resource",
    )  # fmt: skip
    for group in identical_jobs(graph):
        assert len(group) > 1
        for rows in group:
            for key in keys:
                values = getattr(graph, key)
                assert values[rows].tolist() == values[group[0]].tolist()
