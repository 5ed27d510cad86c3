"""Local search on ordered cycles: its arithmetic against the core's, its moves, its answers."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import JobArray, pipelines
from optsched.errors import CyclicOrder
from optsched.kernels.cycle_ratio import cycle_time
from optsched.model.schedule import Csr, Schedule
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.solving.result import PeriodicOrders
from optsched.testing.random_problems import random_rolling
from optsched_solvers.periodic.orders import Cycle, State, least_period, load
from optsched_solvers.periodic.search import CycleWalk
from optsched_solvers.periodic.walk import longest_paths
from optsched_solvers.shop import hand_made

SEEDS = st.integers(0, 10**6)


def random_array(seed: int, shortest: int = 0, **changes: Any) -> JobArray:
    """Up to 3 jobs on 3 devices with any option, and no block shorter than that."""
    for k in count():
        array = random_rolling(random.Random(f"{seed} {k}"), 3, 3).replace(**changes)
        blocks = array.graph()
        if not array.infeasibility() and blocks.duration.min() >= shortest:
            return array
    raise AssertionError


def random_orders(graph: Schedule, rng: random.Random) -> PeriodicOrders:
    """Any permutations, and any small offsets."""
    rows = [graph.users[r].tolist() for r in range(graph.n_resources)]
    for row in rows:
        rng.shuffle(row)
    offset = np.array([rng.randint(0, 2) for _ in range(graph.n_operations)])
    return PeriodicOrders(Csr.of(rows), offset)


def serial(array: JobArray) -> PeriodicOrders:
    """One job after the other, which always fits: ids are job-major and topological."""
    graph = array.graph()
    return PeriodicOrders(graph.users, np.zeros(graph.n_operations, np.int64))


def feasible_walk(array: JobArray, rng: random.Random) -> CycleWalk:
    """A loaded walk that random moves led away from the serial order."""
    walk = CycleWalk(array.graph(), rng.randrange(1000), 1)
    walk.load(serial(array), noise=rng.randint(0, 30))
    walk.run(rng.randint(0, 30))
    return walk


def levels(graph: Schedule, state: State) -> list[int]:
    """Bytes held before every operation, anew from orders and offsets."""
    fresh = State.of(graph)
    node = state.node.copy()
    node.best_after, node.best_tokens = node.after, node.tokens
    loaded(graph, fresh, state._replace(node=node).best(graph))
    found: list[int] = fresh.node.level.tolist()
    return found


def loaded(graph: Schedule, state: State, orders: PeriodicOrders) -> int:
    """The least period of orders that a state takes over."""
    state.order[:] = np.arange(graph.n_operations)
    zeros = np.zeros(graph.n_operations, np.int64)
    period: int = load(Cycle.of(graph), state, orders.sequences.ids, orders.offset, zeros, 1)
    return period


def value_of(graph: Schedule, orders: PeriodicOrders) -> int:
    """The least period, by the core."""
    return cycle_time(graph, orders.sequences, orders.offset).period


@given(SEEDS)
def test_least_period_is_the_cycle_ratio(seed: int) -> None:
    """Any orders and offsets: the core's exact value, or both see that nothing can ever run."""
    graph = random_array(seed, 1).graph()
    orders = random_orders(graph, random.Random(seed))
    state = State.of(graph)
    found = loaded(graph, state, orders)
    try:
        assert found == value_of(graph, orders)
    except CyclicOrder:
        assert found == 0
        return
    assert value_of(graph, state.best(graph)) == found
    for tail, head, lag, distance in zip(*graph.arcs, strict=True):
        start, end = state.node.start[tail] + graph.duration[tail], state.node.start[head]
        assert end + distance * found >= start + lag
    assert found == 1 or 1 <= state.critical[0] <= graph.n_operations


@given(SEEDS)
def test_heads_and_tails_are_longest_paths(seed: int) -> None:
    """Against plain Bellman-Ford at the least period."""
    walk = feasible_walk(random_array(seed, switch=0), random.Random(seed))
    graph, cycle, state = walk.graph, walk.cycle, walk.state
    period = least_period(cycle, state, 1)
    arcs = [
        (t, h, int(graph.duration[t]) + lag - d * period)
        for t, h, lag, d in zip(*(column.tolist() for column in graph.arcs), strict=True)
    ]
    for i, j in enumerate(state.node.after.tolist()):
        if j >= 0:
            arcs.append((i, j, int(graph.duration[i]) - int(state.node.tokens[i]) * period))
    n, r = graph.n_operations, int(state.critical[1])
    far = -(10**15)
    head, tail = [far] * n, [far] * n
    head[r] = tail[r] = 0
    for _ in range(n):
        for i, j, weight in arcs:
            head[j] = max(head[j], head[i] + weight)
            tail[i] = max(tail[i], tail[j] + weight)
    longest_paths(cycle, state, period, r, True)
    longest_paths(cycle, state, period, r, False)
    for right, found in ((head, state.head), (tail, state.tail)):
        reached = [i for i in range(n) if right[i] > far // 2]
        assert [right[i] for i in reached] == found[reached].tolist()
    assert sorted(state.order.tolist()) == list(range(n))


@given(SEEDS)
def test_walks_stay_feasible_and_count_right(seed: int) -> None:
    """Every best order of a walk is worth what the walk says, and keeps to the memory."""
    array = random_array(seed)
    graph = array.graph()
    walk = CycleWalk(graph, seed, array.lower_bound())
    period = walk.load(serial(array), noise=seed % 50)
    assert period == value_of(graph, serial(array))
    capacity = np.where(graph.memory == 0, 10**9, graph.memory)[graph.single_resource]
    for _ in range(10):
        walk.run(10)
        held = np.array(levels(graph, walk.state))
        assert (held + graph.acquire + graph.workspace <= capacity).all()
        if walk.moves == 0:
            break
        orders = walk.best_orders()
        try:
            assert value_of(graph, orders) == walk.best
        except CyclicOrder:
            assert (graph.duration == 0).any()
            continue
        schedule = array.scheduled(orders)
        assert optsched.verify(schedule) == [] and schedule.period == walk.best


def test_a_walk_does_not_depend_on_slices() -> None:
    """The same moves in one call or in many."""
    array = in_flight_array().replace(memory=None)
    graph = array.graph()
    ends = []
    for cut in (200, 50, 1):
        walk = CycleWalk(graph, 3, 1)
        walk.load(serial(array), noise=4)
        for _ in range(200 // cut):
            walk.run(cut)
        ends.append((walk.value, walk.best, walk.moves, walk.state.node.after.tolist()))
    assert ends[0] == ends[1] == ends[2]


def in_flight_array() -> JobArray:
    """Six jobs on four devices with little memory."""
    rng = random.Random(1)
    forward = [[10 * rng.randint(1, 4)] * 4 for _ in range(6)]
    return JobArray(forward, [[3 * f for f in row] for row in forward], activation=forward,
                    memory=[40 * (4 - v) for v in range(4)], objective="period")  # fmt: skip


def test_operations_without_duration_do_not_wait_for_ever() -> None:
    """Blocks that take no time: what is found can run, and is worth what is said."""
    array = JobArray([[0, 0], [0, 3]], [[0, 2], [0, 0]], micro_batches=2, objective="period")
    for solver in ("tabu", "auto"):
        result = optsched.solve(array, solver, iterations=500)
        assert result.schedule is not None
        assert array.evaluate_orders(result.schedule.sequences, result.schedule.offset) == 10


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
