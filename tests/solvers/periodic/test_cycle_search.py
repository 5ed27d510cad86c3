"""Local search on ordered cycles: its arithmetic against the core's, its moves, its answers."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from depth import seeds
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import JobArray, pipelines
from optsched.errors import CyclicOrder
from optsched.kernels.cycle_ratio import cycle_time
from optsched.model.schedule import Rows, Schedule
from optsched.problems.jobarray.cycle import answer_rows
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched_solvers.periodic.estimates import HEADS, SCRATCH, TAILS, heads_from, tails_to
from optsched_solvers.periodic.search import CycleWalk
from optsched_solvers.periodic.shifts import shift_left, shift_right
from optsched_solvers.periodic.state import (
    AFTER,
    BEFORE,
    CYCLE,
    LEVEL,
    ORDER,
    START,
    TOKENS,
    CycleOrder,
    least_period,
)
from optsched_solvers.shop import hand_made

SEEDS = st.integers(0, 10**6)


def random_array(seed: int, shortest: int = 0, **changes: Any) -> JobArray:
    """2 or 3 jobs on 2 or 3 devices: lags, switches, updates, memory, workspaces, zero times."""
    rng = random.Random(seed)
    k, s = rng.randint(2, 3), rng.randint(2, 3)

    def table(low: int, high: int, width: int = s) -> list[list[int]]:
        return [[rng.randint(low, high) for _ in range(width)] for _ in range(k)]

    kept, workspace = table(0, 5), rng.choice([0, 3])
    room = [max(row[v] for row in kept) + workspace + rng.randint(0, 6) for v in range(s)]
    fields: dict[str, Any] = {
        "forward": table(shortest, 9), "backward": table(1, 9), "update": table(0, 3),
        "lag_forward": table(0, 4, s - 1), "lag_backward": table(0, 4, s - 1),
        "switch": rng.choice([0, 3]), "recompute_mode": "always", "checkpoint": kept,
        "recompute_workspace": workspace, "memory": room,
        "micro_batches": [rng.randint(1, 2) for _ in range(k)], "objective": "period",
    }  # fmt: skip
    return JobArray(**{**fields, **changes})


def random_orders(graph: Schedule, rng: random.Random) -> tuple[Rows, np.ndarray[Any, Any]]:
    """Any permutations, and any small offsets."""
    rows = [graph.users[r].tolist() for r in range(graph.n_resources)]
    for row in rows:
        rng.shuffle(row)
    return Rows.of(rows), np.array([rng.randint(0, 2) for _ in range(graph.n_operations)])


def serial(array: JobArray) -> tuple[Rows, np.ndarray[Any, Any]]:
    """One job after the other, which always fits: ids are job-major and topological."""
    graph = array.graph()
    return graph.users, np.zeros(graph.n_operations, np.int64)


def feasible_orders(array: JobArray, rng: random.Random) -> CycleOrder:
    """A loaded order that random moves led away from the serial one."""
    walk = CycleWalk(array.graph(), rng.randrange(1000), 1)
    walk.load(*serial(array), noise=rng.randint(0, 30))
    walk.run(rng.randint(0, 30))
    return walk.order


def levels(order: CycleOrder) -> dict[int, int]:
    """Bytes held before every operation, anew from orders and offsets."""
    fresh = CycleOrder(order.graph)
    fresh.load(*CycleOrder.orders(order.graph, order.state[AFTER], order.state[TOKENS]))
    return dict(enumerate(fresh.state[LEVEL].tolist()))


@given(SEEDS)
def test_least_period_is_the_cycle_ratio(seed: int) -> None:
    """Any orders and offsets: the core's exact value, or both see that nothing can ever run."""
    graph = random_array(seed, 1).graph()
    sequences, offset = random_orders(graph, random.Random(seed))
    order = CycleOrder(graph)
    order.load(sequences, offset)
    found = least_period(order.arrays, order.state, 1)
    try:
        assert found == cycle_time(graph, sequences, offset).period
    except CyclicOrder:
        assert found == 0
        return
    start, cycle = order.state[START], order.state[CYCLE]
    back = CycleOrder.orders(graph, order.state[AFTER], order.state[TOKENS])
    assert cycle_time(graph, *back).period == found
    for tail, head, lag, distance in zip(*graph.arcs, strict=True):
        assert start[head] + distance * found >= start[tail] + graph.duration[tail] + lag
    assert found == 1 or 1 <= cycle[0] <= graph.n_operations


@given(SEEDS)
def test_a_floor_changes_nothing_above_it(seed: int) -> None:
    """From any starts and any floor the same period, or the floor itself."""
    rng = random.Random(seed)
    order = feasible_orders(random_array(seed), rng)
    period = least_period(order.arrays, order.state, 1)
    for floor in (period - 1, period, period + 7):
        order.state[START][:] = [rng.randint(-50, 50) for _ in order.state[START]]
        assert least_period(order.arrays, order.state, max(1, floor)) == max(1, floor, period)


@given(SEEDS)
def test_shifts_are_undone_and_keep_count_of_memory(seed: int) -> None:
    """An operation moved along its device, across the end of the cycle too, and back."""
    rng = random.Random(seed)
    order = feasible_orders(random_array(seed, 1), rng)
    arrays, state = order.arrays, order.state
    for _ in range(10):
        before = [state[k].copy() for k in (BEFORE, AFTER, TOKENS, LEVEL)]
        u = rng.randrange(order.graph.n_operations)
        ring = [u]
        while (x := int(state[AFTER][ring[-1]])) != u:
            ring.append(x)
        if len(ring) == 1:
            continue
        v = ring[rng.randint(1, max(1, len(ring) - 2))]
        first, last = int(state[AFTER][u]), int(state[BEFORE][v])
        right = rng.random() < 0.5
        (shift_right if right else shift_left)(arrays, state, u, v)
        assert state[AFTER][v] == u or len(ring) == 2
        assert dict(enumerate(state[LEVEL].tolist())) == levels(order)
        assert state[TOKENS][ring].sum() == 1
        if right:
            shift_left(arrays, state, first, u)
        else:
            shift_right(arrays, state, v, last)
        after = [state[k] for k in (BEFORE, AFTER, TOKENS, LEVEL)]
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
        shift_right(arrays, state, u, v)


@given(SEEDS)
def test_heads_and_tails_are_longest_paths(seed: int) -> None:
    """Against plain Bellman-Ford at the least period."""
    order = feasible_orders(random_array(seed, switch=0), random.Random(seed))
    graph, state = order.graph, order.state
    period = least_period(order.arrays, state, 1)
    arcs = [
        (t, h, int(graph.duration[t]) + lag - d * period)
        for t, h, lag, d in zip(*(column.tolist() for column in graph.arcs), strict=True)
    ]
    for i, j in enumerate(state[AFTER].tolist()):
        if j >= 0:
            arcs.append((i, j, int(graph.duration[i]) - int(state[TOKENS][i]) * period))
    n, r = graph.n_operations, int(state[CYCLE][1])
    far = -(10**15)
    head, tail = [far] * n, [far] * n
    head[r] = tail[r] = 0
    for _ in range(n):
        for i, j, weight in arcs:
            head[j] = max(head[j], head[i] + weight)
            tail[i] = max(tail[i], tail[j] + weight)
    scratch = [np.zeros(n, np.int64) for _ in range(2)]
    heads_from(order.arrays, state, period, r, scratch[HEADS])
    tails_to(order.arrays, state, period, r, scratch[TAILS])
    reached = [i for i in range(n) if head[i] > far // 2]
    assert [head[i] for i in reached] == scratch[HEADS][reached].tolist()
    reached = [i for i in range(n) if tail[i] > far // 2]
    assert [tail[i] for i in reached] == scratch[TAILS][reached].tolist()
    assert sorted(state[ORDER].tolist()) == list(range(n)) and len(SCRATCH) == 7


@given(SEEDS)
def test_walks_stay_feasible_and_count_right(seed: int) -> None:
    """Every best order of a walk is worth what the walk says, and keeps to the memory."""
    array = random_array(seed)
    graph = array.graph()
    walk = CycleWalk(graph, seed, array.lower_bound())
    period = walk.load(*serial(array), noise=seed % 50)
    assert period == array.evaluate_orders(*serial(array))
    capacity = np.where(graph.memory == 0, 10**9, graph.memory)[graph.single_resource]
    for _ in range(10):
        walk.run(10)
        held = np.array(list(levels(walk.order).values()))
        assert (held + graph.acquire + graph.workspace <= capacity).all()
        if walk.moves == 0:
            break
        orders = walk.best_orders()
        try:
            assert cycle_time(graph, *orders).period == walk.best
        except CyclicOrder:
            assert (graph.duration == 0).any()
            continue
        schedule = array.scheduled(answer_rows(*orders))
        assert optsched.verify(schedule) == [] and schedule.period == walk.best


def test_a_walk_does_not_depend_on_slices() -> None:
    """The same moves in one call or in many."""
    array = in_flight_array().replace(memory=None)
    graph = array.graph()
    zero = np.zeros(graph.n_operations, np.int64)
    ends = []
    for cut in (200, 50, 1):
        walk = CycleWalk(graph, 3, 1)
        walk.load(graph.users, zero, noise=4)
        for _ in range(200 // cut):
            walk.run(cut)
        ends.append((walk.value, walk.best, walk.moves, walk.order.state[AFTER].tolist()))
    assert ends[0] == ends[1] == ends[2]


def least_of_all(array: JobArray) -> int:
    """The least period of all cyclic orders and offsets up to 1."""
    graph = array.graph()
    rows = [graph.users[r].tolist() for r in range(graph.n_resources)]
    orders = [
        Rows.of(list(choice))
        for choice in product(
            *([[row[0], *rest] for rest in permutations(row[1:])] for row in rows)
        )
    ]
    best = 10**9
    for offset in product((0, 1), repeat=graph.n_operations):
        if any(offset[i] for i in range(graph.n_operations) if graph.stage[i] + offset[0] == 0):
            continue
        for sequences in orders:
            try:
                found = cycle_time(graph, sequences, np.array(offset))
            except CyclicOrder:
                continue
            if found.period < best:
                schedule = array.scheduled(answer_rows(sequences, np.array(offset)))
                if not optsched.verify(schedule):
                    best = found.period
                    if best == array.lower_bound():
                        return best
    return best


@seeds(1, 3)
def test_small_arrays_are_solved(seed: int) -> None:
    """Two jobs on two devices: the best of all orders and offsets, with and without memory."""
    rng = random.Random(seed)
    times = [[[rng.randint(1, 6) for _ in range(2)] for _ in range(2)] for _ in range(2)]
    array = JobArray(*times, lag_forward=rng.randint(0, 2), switch=seed % 2, activation=2,
                     memory=None if seed else [4, 3], objective="period")  # fmt: skip
    best = least_of_all(array)
    for solver in ("tabu", "auto"):
        assert optsched.solve(array, solver, iterations=2000).objective == best, solver


@pytest.mark.parametrize(("jobs", "stages"), [(6, 3), (3, 3), (3, 6), (1, 4)])
def test_equal_jobs_are_proved(jobs: int, stages: int) -> None:
    """max(K, S)(f + b), the oracle of equal jobs."""
    array = JobArray([[3] * stages] * jobs, [[6] * stages] * jobs, objective="period")
    result = optsched.solve(array, "auto", time_limit=600)
    assert result.status == "optimal" and result.objective == max(jobs, stages) * 9


def test_zero_bubble_needs_the_period() -> None:
    """One job of F, I and W blocks with 2(S - s) - 1 activations: no device ever idles."""
    stages, n = 4, 8
    array = JobArray([[5] * stages], [[5] * stages], weight=[[5] * stages], micro_batches=n,
                     activation=1, memory=[2 * (stages - v) - 1 for v in range(stages)],
                     objective="period")  # fmt: skip
    result = optsched.solve(array, "auto", time_limit=600)
    assert result.status == "optimal" and result.objective == 15 * n


@pytest.mark.parametrize("solver", ["tabu", "auto"])
def test_counted_runs_repeat(solver: str) -> None:
    """Same seed and number of iterations: the same schedule."""
    array = in_flight_array()
    found = [optsched.solve(array, solver, iterations=300, seed=7).schedule for _ in range(2)]
    assert found[0] == found[1] and found[0] is not None


def in_flight_array() -> JobArray:
    """Six jobs on four devices with little memory."""
    rng = random.Random(1)
    forward = [[10 * rng.randint(1, 4)] * 4 for _ in range(6)]
    return JobArray(forward, [[3 * f for f in row] for row in forward], activation=forward,
                    memory=[40 * (4 - v) for v in range(4)], objective="period")  # fmt: skip


def test_search_improves_on_a_start_and_keeps_it() -> None:
    """Far from serial after some moves, and never worse than a warm start."""
    array = in_flight_array()
    sequences, offset = serial(array)
    start = array.scheduled(answer_rows(sequences, offset))
    found = optsched.solve(array, "tabu", iterations=2000, warm_start=start)
    assert found.objective is not None and start.period is not None
    assert found.objective < 0.5 * start.period
    again = optsched.solve(array, "tabu", iterations=1, warm_start=found.schedule, seed=1)
    assert again.objective == found.objective


def test_search_stops_when_told() -> None:
    """`on_progress` ends it, and the best so far comes back."""
    array = in_flight_array()
    result = optsched.solve(array, "auto", time_limit=600, on_progress=lambda _: True)
    assert result.schedule is not None and result.seconds < 300


def test_operations_without_duration_do_not_wait_for_ever() -> None:
    """Blocks that take no time: what is found can run, and is worth what is said."""
    array = JobArray([[0, 0], [0, 3]], [[0, 2], [0, 0]], micro_batches=2, objective="period")
    for solver in ("tabu", "auto"):
        result = optsched.solve(array, solver, iterations=500)
        assert result.schedule is not None
        assert array.evaluate_orders(result.schedule.sequences, result.schedule.offset) == 10


@pytest.mark.slow
def test_the_benchmark_prints_its_tables() -> None:
    """As a user types it: one array a row."""
    script = Path(__file__).parents[3] / "benchmarks" / "rolling.py"
    command = [sys.executable, str(script), "gaps", "--set", "equal", "--time", "1", "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("| 1 of 1 |") == 3 and "| equal | equal-19x8 |" in done.stdout
    wrong = subprocess.run([*command, "--set", "plane"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "there is no 'plane'" in wrong.stderr


def test_hand_made_schedules_are_repeated() -> None:
    """For one job each pipeline that fits is an order of the cycle; several jobs have none."""
    job = JobArray([[2, 3, 2]], [[4, 4, 5]], micro_batches=6, activation=1, memory=[3, 2, 1],
                   objective="period")  # fmt: skip
    monitor = Monitor(Limits())
    hand_made.offer(job, monitor)
    assert monitor.solution is not None
    assert job.scheduled(monitor.solution).period == monitor.objective
    once = pipelines.one_f_one_b(job.with_objective("makespan"))
    assert monitor.objective == job.evaluate_orders(once.sequences)
    several = Monitor(Limits())
    hand_made.offer(JobArray([[2]] * 2, [[4]] * 2, objective="period"), several)
    assert several.objective is None
