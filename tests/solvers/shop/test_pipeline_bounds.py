"""Bounds of pipelines against exact optima, random schedules, and slow twins of the kernel."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from depth import depth
from hypothesis import assume, given
from hypothesis import strategies as st
from state_oracle import best_by_states
from test_list_schedule import by_rule

import optsched
from optsched import JobArray, JobShop, Schedule
from optsched.model import bounds
from optsched.model.bounds import makespan_bound
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.shop.proof.common_routes import common_routes
from optsched_solvers.shop.proof.one_machine import carlier, one_machine_bound
from optsched_solvers.shop.proof.order_relaxations import Relaxation, growing, relaxations
from optsched_solvers.shop.proof.order_states import BETWEEN, BYTES, FIRST, LAST, NEVER, OUT
from optsched_solvers.shop.proof.pipeline_bounds import Probe, improve

NOWHERE = 10**9


def pipeline(seed: int, jobs: int = 5, stages: int = 4) -> JobArray:
    """A small pipeline with a random mix of features, all of whose jobs have one route."""
    for k in range(99):
        array = random_array(Random(f"{seed} {k}"), jobs, stages)
        if common_routes(array.graph()) is not None:
            return array
    raise AssertionError


def optimum(graph: Schedule, iterations: int = 300_000) -> int | None:
    """Proved optimal makespan; None if infeasible or not proved soon."""
    result = optsched.solve(graph, solver="cpsat", iterations=iterations, workers=1)
    return result.objective if result.status == "optimal" else None


def all_relaxations(graph: Schedule) -> list[Relaxation]:
    """Exact ones, and ones whose kinds had to be merged."""
    return [*relaxations(graph, 1 << 14, 1 << 14), *relaxations(graph, 8, 60)]


def improved(relaxation: Relaxation, lower_bound: int) -> int:
    """The larger of a bound and what a relaxation proves, by bisection."""
    space = np.empty(relaxation.states, np.int64)

    def met(deadline: int) -> bool:
        return bool(Probe(relaxation, deadline, space).advance(relaxation.states))

    if met(lower_bound):
        return lower_bound
    low, step = lower_bound + 1, 1 + lower_bound // 1000
    while not met(low + step):
        low, step = low + step + 1, 2 * step
        if low > NEVER:  # nothing fits into the memory
            return lower_bound
    high = low + step  # met; everything below low is not
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if met(middle) else (middle + 1, high)
    return low


def pipeline_bound(graph: Schedule) -> int:
    """The best bound of the small single relaxations."""
    return max((improved(r, 0) for r in relaxations(graph, 1 << 13, 0)), default=0)


def test_never_above_the_optimum() -> None:
    """Every relaxation of small pipelines with all features (`test_by_hand`: some are better)."""
    for seed in range(depth(30, 140)):
        graph = pipeline(seed).graph()
        best = optimum(graph)
        if best is None:
            continue
        for relaxation in all_relaxations(graph):
            value = improved(relaxation, 0)
            assert value <= best, (seed, relaxation.name, value, best)


def test_growing_heads_and_tails_hold_in_every_schedule() -> None:
    """The lemma itself, on random schedules, which overtake much."""
    touched = 0
    for seed in range(depth(200, 500)):
        graph = pipeline(seed, 6, 4).replace(memory=None).graph()
        routes = common_routes(graph)
        assert routes is not None
        heads, tails = growing(routes), growing(routes.reversed())
        last = len(routes.machine) - 1
        for k in range(4):
            schedule = by_rule(graph, "random", seed=k)
            assert schedule is not None and schedule.sequences is not None
            place = np.zeros(graph.n_operations, np.int64)
            for row in schedule.sequences:
                place[row] = np.arange(len(row))
            begin, at = schedule.start[routes.operation], place[routes.operation]  # type: ignore[index]
            end = begin + routes.duration
            for p in range(last + 1):
                ahead = at[:, p][:, None] > at[:, p][None, :]  # [k, j]: j is ahead of k
                for family in heads[p]:
                    assert (begin[:, p] >= family.base + ahead @ family.weight).all(), seed
                for family in tails[last - p]:
                    bound = end[:, p] + family.base + ahead.T @ family.weight
                    assert (bound <= schedule.makespan).all(), seed
                    touched += 1
    assert touched > 1000


def least(relaxation: Relaxation, rows: tuple[int, ...]) -> int:
    """Deadline that one order of kinds meets: the twin of the kernel for single relaxations."""
    table, (heads, tails, far_heads, far_tails) = relaxation.table, relaxation.groups
    now = value = 0
    for n, k in enumerate(rows):
        ahead, behind = list(rows[:n]), list(rows[n + 1 :])
        begin = now + int(table[k, BETWEEN]) if n else 0
        begin = max([begin, *(int(f.base[k] + f.weight[ahead].sum()) for f in heads)])
        end = begin + int(table[k, FIRST])
        value = max([value, *(end + int(f.base[k] + f.weight[behind].sum()) for f in tails)])
        far = max([0, *(int(f.base[k] + f.weight[ahead].sum()) for f in far_heads)])
        for f in far_tails:
            value = max(value, far + int(table[k, LAST] + f.base[k] + f.weight[behind].sum()))
        now = end + int(table[k, OUT])
    return value


def least_of_pairs(relaxation: Relaxation) -> int:
    """The least deadline over all pairs of orders, by depth-first search."""
    table, copies = relaxation.table, relaxation.copies.tolist()
    heads, tails, far_heads, far_tails = relaxation.groups
    n = len(copies)
    best = NOWHERE

    def grow(now: int, value: int, first: list[int], last: list[int]) -> None:
        nonlocal best
        if value >= best:
            return
        if sum(last) == sum(copies):
            best = value
            return
        level = sum((first[k] - last[k]) * int(table[k, BYTES]) for k in range(n))
        for k in range(n):
            for done, column, start, rest, allowed in (
                (first, FIRST, heads, tails, first[k] < copies[k] and not (
                    relaxation.capacity and level + table[k, BYTES] > relaxation.capacity)),
                (last, LAST, far_heads, far_tails, last[k] < first[k]),
            ):  # fmt: skip
                if not allowed:
                    continue
                ahead = np.array(done)
                behind = np.array(copies) - ahead
                behind[k] -= 1
                begin = max([now, *(int(f.base[k] + ahead @ f.weight) for f in start)])
                end = begin + int(table[k, column])
                worst = max([value, *(end + int(f.base[k] + behind @ f.weight) for f in rest)])
                done[k] += 1
                grow(end, worst, first, last)
                done[k] -= 1

    grow(0, 0, [0] * n, [0] * n)
    return best


def test_states_give_the_best_of_all_orders() -> None:
    """The kernel against enumeration."""
    seen = {True: 0, False: 0}
    for seed in range(depth(120, 240)):
        graph = pipeline(seed, 4, 3).graph()
        for relaxation in all_relaxations(graph):
            rows = np.repeat(np.arange(len(relaxation.copies)), relaxation.copies).tolist()
            if len(rows) > (3 if relaxation.pairs else 5):
                continue
            if relaxation.pairs:
                expected = least_of_pairs(relaxation)
            else:
                expected = min(least(relaxation, order) for order in set(permutations(rows)))
            if expected < NOWHERE:  # else nothing fits into the memory
                assert improved(relaxation, 0) == expected, (seed, relaxation.name)
                seen[relaxation.pairs] += 1
    assert min(seen.values()) > 50


def test_proportionate_flow_shop_is_solved() -> None:
    """Sum of all times + (machines - 1) x longest, in any order."""
    for seed in range(20):
        rng = Random(seed)
        times = [rng.randint(0, 9) for _ in range(rng.randint(2, 7))]
        machines = rng.randint(1, 5)
        shop = JobShop([[(m, t) for m in range(machines)] for t in times])
        assert pipeline_bound(shop.graph()) == sum(times) + (machines - 1) * max(times)


@pytest.mark.parametrize(
    ("array", "plain", "found", "best"),
    [
        # wherever the large job goes, small ones wait for it; one machine alone does not see that
        (JobArray([[1] * 4] * 8 + [[30] * 4], [[1] * 4] * 8 + [[30] * 4]), 240, 248, 248),
        # the long one travels while the short ones overtake it: no time is lost
        (JobArray([[1, 1]] * 4, [[1, 1]] * 4, lag_forward=[[20], [0], [0], [0]]), 24, 24, 24),
        # 5 behind each family but the last
        (JobArray([[2]] * 3, [[3]] * 3, switch=5), 25, 25, 25),
        # once forward blocks used the idle time before a job that was released late
        (JobArray([[0, 2], [5, 3], [2, 0], [4, 5]], [[1, 4], [2, 2], [5, 7], [4, 5]],
                  lag_forward=[[0], [-5], [-2], [-4]], lag_backward=[[1], [3], [4], [1]],
                  release=[7, 0, 7, 3]), 30, 30, 31),
    ],
    ids=["one large job", "long lags", "setups", "a fixed head"],
)  # fmt: skip
def test_by_hand(array: JobArray, plain: int, found: int, best: int) -> None:
    """The bound of one machine, the pipeline's, and the optimum."""
    graph = array.graph()
    values = makespan_bound(graph), pipeline_bound(graph), optimum(graph, 60_000_000)
    assert values == (plain, found, best)
    assert all(improved(relaxation, 0) <= best for relaxation in all_relaxations(graph))


def test_memory_in_which_nothing_fits() -> None:
    """No deadline is ever met; that must not grow for ever."""
    graph = JobArray([[1, 1]] * 2, [[1, 1]] * 2, activation=3, memory=2).graph()
    monitor = Monitor(Limits(time_limit=600))
    improve(graph, monitor)
    assert all(improved(r, 0) >= 0 for r in relaxations(graph))


@pytest.mark.parametrize(
    "problem",
    [
        JobShop([[(0, 1), (1, 2)], [(1, 1), (0, 2)]]),
        JobArray([[1, 1]] * 2, [[1, 1]] * 2, place=[[[0, 1]], [[1, 0]]]),
    ],
)
def test_no_common_route(problem: Any) -> None:
    """Then there is nothing to relax."""
    assert common_routes(problem.graph()) is None
    assert list(relaxations(problem.graph())) == []


# carlier's exact one-machine bound against permutations and searches over states

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"

Jobs = list[tuple[int, int, int]]  # head, duration, delivery time

JOBS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(-4, 12)), min_size=1, max_size=6
)


def value_of(jobs: Jobs, order: list[int] | tuple[int, ...]) -> int:
    """Makespan of one order, deliveries included; at least 0."""
    now = value = 0
    for j in order:
        now = max(now, jobs[j][0]) + jobs[j][1]
        value = max(value, now + jobs[j][2])
    return value


@given(JOBS)
def test_one_machine(jobs: Jobs) -> None:
    """Equal to the best permutation; valid at every limit; zero durations, negative deliveries."""
    optimum = min(value_of(jobs, order) for order in permutations(range(len(jobs))))
    head, duration, delivery = np.array(jobs, np.int64).reshape(-1, 3).T.copy()
    for limit in (1, 2, 3, 20_000):
        found = carlier(head, duration, duration + delivery, limit)
        assert found.lower_bound <= optimum <= found.value == value_of(jobs, found.order.tolist())
        assert sorted(found.order) == list(range(len(jobs)))
        assert found.optimal == (found.value == found.lower_bound)
    assert found.optimal
    once = carlier(head, duration, duration + delivery, 1)  # at least Jackson's bound
    assert once.lower_bound >= bounds.jackson_preemptive(head, duration, duration + delivery)


def test_hundreds_of_jobs_are_solved() -> None:
    """Carlier's method closes large random machines within few nodes; times of 2^50 are exact."""
    rng = np.random.default_rng(5)
    for n in (50, 300):
        head, tail = rng.integers(0, 30 * n, n), rng.integers(0, 30 * n, n)
        duration = rng.integers(1, 99, n)
        assert carlier(head, duration, tail + duration).optimal
    large = np.array([0, 2**49, 2**51]), np.array([2**50, 2**50, 1])
    assert carlier(*large, large[1] + [2**51, 2**52, 0]).value == 2**49 + 2**50 + 2**52


@given(st.randoms(use_true_random=False))
def test_one_machine_bound_is_a_bound(rng: Random) -> None:
    """Never above the optimum, never below the bounds of plain Python."""
    graph = random_graph(rng, 6) if rng.random() < 0.6 else random_array(rng, 2, 3).graph()
    assume(graph.n_operations <= 12)
    optimum, found = best_by_states(graph), bounds.makespan_bounds(graph)
    for limit in (1, 1000):
        bound = one_machine_bound(graph, limit)
        assert max(found["chain"], found["one_machine"]) <= bound
        assert optimum is None or bound <= optimum


def test_known_bounds() -> None:
    """Bounds of the literature; one machine without preemption, where Jackson's bound is 12."""
    for name, expected in (("ft06", 52), ("ft10", 808), ("ft20", 1164)):
        graph = JobShop.read(INSTANCES / f"{name}.txt").graph()
        assert expected <= one_machine_bound(graph) <= 1165
    shop = JobShop([[(0, 6), (1, 1)], [(0, 2), (2, 9)], [(0, 3), (3, 4)]], release=[0, 1, 2])
    assert bounds.makespan_bounds(shop.graph())["one_machine"] == 12
    assert one_machine_bound(shop.graph()) == 13 == best_by_states(shop.graph())
