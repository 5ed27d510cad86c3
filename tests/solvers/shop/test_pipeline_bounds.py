"""Bounds of pipelines against exact optima, random schedules, and slow twins of the kernel."""

from __future__ import annotations

from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import pytest
from depth import depth

import optsched
from optsched import JobArray, JobShop, Schedule
from optsched.model.bounds import makespan_bound
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched_solvers.shop.proof.common_routes import Routes, common_routes, held_bytes
from optsched_solvers.shop.proof.order_relaxations import Relaxation, growing, relaxations
from optsched_solvers.shop.proof.order_states import BETWEEN, BYTES, FIRST, LAST, NEVER, OUT
from optsched_solvers.shop.proof.pipeline_bounds import Probe, improve, improved, pipeline_bound

NOWHERE = 10**9


def pipeline(rng: Random, most_jobs: int = 5, most_stages: int = 4) -> JobArray:
    """A small pipeline with a random mix of features; identical jobs often, routes all alike."""
    k, v = rng.randint(2, most_jobs), rng.randint(1, most_stages)
    of = [rng.randrange(rng.randint(1, k)) for _ in range(k)]
    low, high = rng.choice([(0, 4), (1, 6), (1, 20)])

    def table(a: int, b: int, width: int = v) -> list[list[int]]:
        rows = [[rng.randint(a, b) for _ in range(width)] for _ in range(k)]
        if rng.random() < 0.3 and width:
            rows = [[row[0]] * width for row in rows]
        return [rows[i] for i in of]

    fields: dict[str, Any] = {"forward": table(low, high), "backward": table(low, high)}
    if v > 1 and rng.random() < 0.5:
        top = rng.choice([1, 5, 20])
        fields["lag_forward"], fields["lag_backward"] = table(0, top, v - 1), table(0, top, v - 1)
        if rng.random() < 0.3:
            early = [[-rng.randint(0, x) for x in row[: v - 1]] for row in fields["forward"]]
            fields["lag_forward"] = [early[of.index(i)] for i in of]
    if rng.random() < 0.4:
        fields["switch"] = table(0, rng.choice([2, 10]))
        fields["switch_on"] = rng.choice(["in", "out"])
        fields["trailing_switch"] = rng.random() < 0.2
    if rng.random() < 0.4:
        fields["update"] = table(0, 4)
        fields["update_mode"] = rng.choice(["fused", "block", "global"])
        fields["update_blocks_gradient"] = rng.random() < 0.3
    if rng.random() < 0.2:
        fields["weight"] = table(0, 4)
    if rng.random() < 0.5:
        fields["activation"] = table(1, 4)
        fields["memory"] = [rng.choice([0, 4, 5, 6, 8]) for _ in range(v)]
        if rng.random() < 0.4:
            fields["recompute"], fields["recompute_workspace"] = table(0, 3), table(0, 2)
            fields["checkpoint"] = table(1, 2)
            fields["recompute_as_block"] = rng.random() < 0.5
            fields["recompute_mode"] = [rng.random() < 0.5 for _ in range(k)]
    if rng.random() < 0.2:
        fields["release"] = [rng.choice([0, 0, 5, 12]) for _ in range(k)]
    if k * v <= 6 and rng.random() < 0.3:
        fields["micro_batches"] = 2
    if v > 2 and rng.random() < 0.15:  # chunks
        fields["place"] = [stage % 2 for stage in range(v)]
        fields["memory"] = fields.get("memory", [0, 0])[:2]
        if "switch" in fields:
            fields["switch"] = [[row[0]] * v for row in fields["switch"]]
    return JobArray(**fields)


def random_start(rng: Random, graph: Schedule) -> tuple[list[list[int]], list[int]]:
    """Orders and starts of a schedule with random dispatch and idle time; memory is ignored."""
    waiting = np.bincount(graph.arcs.head, minlength=graph.n_operations).tolist()
    ready = [i for i, n in enumerate(waiting) if n == 0]
    start = graph.release.tolist()
    orders: list[list[int]] = [[] for _ in range(graph.n_resources)]
    into, out = graph.predecessors, graph.successors
    lazy = rng.random() < 0.3
    jobs = rng.random() < 0.5
    rank = [rng.random() for _ in range(graph.n_operations)]
    while ready:
        i = max(ready, key=lambda i: rank[graph.job[i]] if jobs else rank[i])
        if rng.random() < 0.2:
            i = rng.choice(ready)
        ready.remove(i)
        for e in range(into.indptr[i], into.indptr[i + 1]):
            start[i] = max(start[i], start[into.other[e]] + int(into.weight[e]))
        for r in graph.op_resources[i].tolist():
            if orders[r]:
                last = orders[r][-1]
                after = start[last] + int(graph.duration[last]) + graph.setup(last, i)
                start[i] = max(start[i], after)
            orders[r].append(i)
        start[i] += rng.randint(0, 3) if lazy else 0
        for e in range(out.indptr[i], out.indptr[i + 1]):
            k = int(out.other[e])
            waiting[k] -= 1
            if waiting[k] == 0:
                ready.append(k)
    return orders, start


def optimum(graph: Schedule, seconds: float = 2.0) -> int | None:
    """Proved optimal makespan; None if infeasible or not proved soon."""
    result = optsched.solve(graph, solver="cpsat", time_limit=seconds, workers=1)
    return result.objective if result.status == "optimal" else None


def all_relaxations(graph: Schedule) -> list[Relaxation]:
    """Exact ones, and ones whose kinds had to be merged."""
    return [*relaxations(graph, 1 << 14, 1 << 14), *relaxations(graph, 8, 60)]


def against_optima(seeds: range) -> int:
    """How often a bound beat the plain ones; fails where one exceeds the optimum."""
    better = 0
    for seed in seeds:
        graph = pipeline(Random(seed)).graph()
        if common_routes(graph) is None:
            continue
        best = optimum(graph)
        if best is None:
            continue
        for relaxation in all_relaxations(graph):
            value = improved(relaxation, 0)
            assert value <= best, (seed, relaxation.name, value, best)
        better += pipeline_bound(graph) > makespan_bound(graph)
    return better


def test_never_above_the_optimum() -> None:
    """Every relaxation of small pipelines with all features."""
    assert against_optima(range(depth(40, 40))) >= 1


@pytest.mark.slow
def test_never_above_the_optimum_deep() -> None:
    """The same, more of them."""
    assert against_optima(range(1000, 1100)) >= 5


def test_growing_heads_and_tails_hold_in_every_schedule() -> None:
    """The lemma itself, on schedules with much overtaking."""
    touched = 0
    for seed in range(250):
        rng = Random(seed)
        graph = pipeline(rng, 6, 4).graph()
        routes = common_routes(graph)
        if routes is None:
            continue
        heads, tails = growing(routes), growing(routes.reversed())
        last = len(routes.machine) - 1
        for _ in range(4):
            orders, start = random_start(rng, graph)
            place = {i: n for row in orders for n, i in enumerate(row)}
            begin = np.array(start)[routes.operation]
            end = begin + routes.duration
            total = int((np.array(start) + graph.duration).max())
            at = np.vectorize(place.__getitem__)(routes.operation)
            for p in range(last + 1):
                ahead = at[:, p][:, None] > at[:, p][None, :]  # [k, j]: j is ahead of k
                for family in heads[p]:
                    assert (begin[:, p] >= family.base + ahead @ family.weight).all(), seed
                for family in tails[last - p]:
                    assert (end[:, p] + family.base + ahead.T @ family.weight <= total).all(), seed
                    touched += 1
    assert touched > 5000


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
    for seed in range(120):
        graph = pipeline(Random(seed), 4, 3).graph()
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


def test_slices_do_not_matter() -> None:
    """Three states at a time or all at once."""
    graph = pipeline(Random(5), 6, 4).graph()
    for relaxation in relaxations(graph):
        for deadline in range(0, 200, 7):
            whole = np.empty(relaxation.states, np.int64)
            cut = np.empty(relaxation.states, np.int64)
            expected = Probe(relaxation, deadline, whole).advance(relaxation.states)
            probe, answer = Probe(relaxation, deadline, cut), None
            while answer is None:
                answer = probe.advance(3)
            assert answer == expected
            assert (whole == cut).all()


def test_proportionate_flow_shop_is_solved() -> None:
    """Sum of all times + (machines - 1) x longest, in any order."""
    for seed in range(20):
        rng = Random(seed)
        times = [rng.randint(0, 9) for _ in range(rng.randint(2, 7))]
        machines = rng.randint(1, 5)
        shop = JobShop([[(m, t) for m in range(machines)] for t in times])
        assert pipeline_bound(shop.graph()) == sum(times) + (machines - 1) * max(times)


def test_one_large_job_among_small_ones() -> None:
    """Wherever it goes, small jobs wait before or behind it; one machine alone does not see that.

    All machines have load 2 * 8 + 2 * 30; the large job's chain takes 4 * 60.
    """
    array = JobArray([[1] * 4] * 8 + [[30] * 4], [[1] * 4] * 8 + [[30] * 4])
    assert makespan_bound(array.graph()) == 240
    assert pipeline_bound(array.graph()) == optimum(array.graph(), 600) == 248


def test_long_lags_let_others_pass_for_nothing() -> None:
    """The long one travels while the short ones overtake it: no time is lost."""
    array = JobArray([[1, 1]] * 4, [[1, 1]] * 4, lag_forward=[[20], [0], [0], [0]])
    best = optimum(array.graph(), 600)
    assert best is not None
    assert makespan_bound(array.graph()) <= pipeline_bound(array.graph()) <= best


def test_never_above_random_schedules() -> None:
    """Many tiny pipelines; the best of eighty random schedules is mostly the optimum."""
    for seed in range(depth(50, 150)):
        rng = Random(seed)
        array = pipeline(rng, 4, 3)
        graph = array.replace(memory=0).graph()  # random schedules know no memory
        if common_routes(graph) is None:
            continue
        best = NOWHERE
        for _ in range(80):
            _, start = random_start(rng, graph)
            best = min(best, int((np.array(start) + graph.duration).max()))
        for relaxation in all_relaxations(graph):
            assert improved(relaxation, 0) <= best, (seed, relaxation.name)


def test_a_fixed_head_does_not_count_the_blocks_of_those_ahead() -> None:
    """Once wrong: forward blocks used the idle time before a job that was released late."""
    array = JobArray(
        [[0, 2], [5, 3], [2, 0], [4, 5]], [[1, 4], [2, 2], [5, 7], [4, 5]],
        lag_forward=[[0], [-5], [-2], [-4]], lag_backward=[[1], [3], [4], [1]],
        release=[7, 0, 7, 3],
    )  # fmt: skip
    best = optimum(array.graph(), 600)
    assert best is not None
    assert all(improved(r, 0) <= best for r in all_relaxations(array.graph()))


def test_setups_count_once_per_family() -> None:
    """Three jobs on one machine, 5 behind each but the last."""
    for where in ("out", "in"):
        array = JobArray([[2]] * 3, [[3]] * 3, switch=5, switch_on=where)
        assert pipeline_bound(array.graph()) == optimum(array.graph(), 600) == 25


def test_memory_is_known_in_pairs() -> None:
    """Room for one: the next forward block waits for the gradient of the one before."""
    array = JobArray([[2, 9]] * 3, [[2, 9]] * 3, activation=1, memory=[1, 0])
    routes = common_routes(array.graph())
    assert routes is not None
    assert held_bytes(array.graph(), routes, 0, 3).tolist() == [1, 1, 1]
    assert held_bytes(array.graph(), routes, 1, 2).tolist() == [0, 0, 0]
    values = [improved(r, 0) for r in relaxations(array.graph()) if r.pairs]
    assert max(values) <= 66 == optimum(array.graph(), 600)


@pytest.mark.slow
def test_thirty_jobs_on_sixteen_stages() -> None:
    """What all this is for: the bound of one machine is a quarter below."""
    kinds = [(13, 37), (15, 43), (17, 49), (19, 59), (23, 74), (29, 96), (36, 120)]
    jobs = [kinds[j % 7] for j in range(30)]
    array = JobArray([[f] * 16 for f, _ in jobs], [[b] * 16 for _, b in jobs])
    graph, monitor = array.graph(), Monitor(Limits(iterations=60))
    monitor.bound(makespan_bound(graph))
    tried = improve(graph, monitor, iterations=60)
    found = optsched.solve(array, solver="dispatch", iterations=1)
    assert tried <= 60
    assert found.objective is not None
    assert monitor.lower_bound is not None
    assert 1.2 * makespan_bound(graph) < monitor.lower_bound <= found.objective
    assert monitor.lower_bound > 0.9 * found.objective
    again = Monitor(Limits(iterations=60))
    again.bound(makespan_bound(graph))
    improve(graph, again, iterations=60)
    assert [e.lower_bound for e in again.history] == [e.lower_bound for e in monitor.history]


def test_improve_stops() -> None:
    """A user, the clock and the number of deadlines."""
    graph = pipeline(Random(5), 6, 4).graph()
    stopped = Monitor(Limits(time_limit=600))
    stopped.stop()
    improve(graph, stopped)
    assert stopped.lower_bound is None
    late = Monitor(Limits(time_limit=600))
    improve(graph, late, seconds=0)
    assert late.lower_bound is None
    assert improve(graph, Monitor(Limits(time_limit=600)), iterations=3) == 3


def test_improve_proves_an_incumbent() -> None:
    """The first deadline below the incumbent is refuted."""
    array = JobArray([[1] * 4] * 8 + [[30] * 4], [[1] * 4] * 8 + [[30] * 4])
    result = optsched.solve(array, solver="cpsat", time_limit=600)
    monitor = Monitor(Limits(time_limit=600))
    assert result.schedule is not None
    assert result.schedule.sequences is not None
    monitor.incumbent(result.schedule.sequences, result.schedule.makespan)
    improve(array.graph(), monitor)
    assert monitor.proved


def test_memory_in_which_nothing_fits() -> None:
    """No deadline is ever met; that must not grow for ever."""
    graph = JobArray([[1, 1]] * 2, [[1, 1]] * 2, activation=3, memory=2).graph()
    monitor = Monitor(Limits(time_limit=600))
    improve(graph, monitor)
    assert monitor.elapsed < 60
    assert all(improved(r, 0) >= 0 for r in relaxations(graph))


@pytest.mark.parametrize(
    "problem",
    [
        JobShop([[(0, 1), (1, 2)], [(1, 1), (0, 2)]]),
        JobShop([[(0, 1), (1, 2)]]),
        JobShop([[(0, 1), (1, 2)], [(0, 1)]], ["a", "b"]),
        JobArray([[1, 1]] * 2, [[1, 1]] * 2, place=[[[0, 1]], [[1, 0]]]),
    ],
)
def test_no_common_route(problem: Any) -> None:
    """Then the given bound comes back."""
    assert common_routes(problem.graph()) is None
    assert list(relaxations(problem.graph())) == []
    assert pipeline_bound(problem.graph(), 7) == 7


def test_routes_of_an_array() -> None:
    """Updates and weight gradients hang beside the chain."""
    array = JobArray(
        [[1, 2]] * 2, [[3, 4]] * 2, weight=[[5, 6]] * 2, update=1, update_mode="block",
        lag_forward=7, lag_backward=8, micro_batches=2,
    )  # fmt: skip
    routes = common_routes(array.graph())
    assert routes is not None
    assert routes.machine.tolist() == [0, 1, 1, 0]
    assert routes.duration.tolist() == [[1, 2, 4, 3]] * 4
    assert routes.lag.tolist() == [[7, 0, 8]] * 4
    check_reversal(routes)


def test_recomputation_beside_the_chain_counts() -> None:
    """As a lag between F and B of the last stage."""
    array = JobArray(
        [[1, 2]] * 2, [[3, 4]] * 2, recompute=5, recompute_as_block=True, recompute_mode="always"
    )
    routes = common_routes(array.graph())
    assert routes is not None
    assert routes.lag.tolist() == [[0, 5, 0]] * 2


def check_reversal(routes: Routes) -> None:
    """Twice backwards is forwards."""
    twice = routes.reversed().reversed()
    assert all((a == b).all() for a, b in zip(routes, twice, strict=True))
    assert NEVER > NOWHERE
