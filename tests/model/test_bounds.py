"""No bound above the optimum, ever; and the bounds that the literature gives."""

from __future__ import annotations

from itertools import permutations
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from state_oracle import best_by_states

from optsched import Arcs, JobArray, JobShop, Resource, Rows, Schedule
from optsched.model import bounds
from optsched.model.bounds import jackson_preemptive, makespan_bound, makespan_bounds
from optsched.testing import best_makespan
from optsched.testing.random_problems import random_array, random_graph, random_shop

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

TRIPLES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=6
)


def by_time_steps(jobs: list[tuple[int, int, int]]) -> int:
    """Jackson's preemptive schedule, one unit of time after the other."""
    left, end = [p for _, p, _ in jobs], [r for r, _, _ in jobs]
    now = 0
    while any(left):
        ready = [j for j, (r, _, _) in enumerate(jobs) if left[j] and r <= now]
        now += 1
        if ready:
            j = max(ready, key=lambda j: jobs[j][2])
            left[j] -= 1
            end[j] = now
    # an empty job waits for nobody: it may preempt
    return max(e + q for e, (_, _, q) in zip(end, jobs, strict=True))


def by_permutations(jobs: list[tuple[int, int, int]]) -> int:
    """Optimum of 1 | r_j, q_j | Cmax."""
    best = 2**60
    for order in permutations(jobs):
        now = value = 0
        for r, p, q in order:
            now = max(now, r) + p
            value = max(value, now + q)
        best = min(best, value)
    return best


@given(TRIPLES)
def test_jackson_equals_its_simulation(jobs: list[tuple[int, int, int]]) -> None:
    """Event by event = unit by unit, where every job takes time."""
    jobs = [(r, p + 1, q) for r, p, q in jobs]
    assert jackson_preemptive(*zip(*jobs, strict=True)) == by_time_steps(jobs)


@given(TRIPLES)
def test_jackson_is_a_bound_of_one_machine(jobs: list[tuple[int, int, int]]) -> None:
    """At least every job alone, at most the best order; empty jobs included."""
    value = jackson_preemptive(*zip(*jobs, strict=True))
    assert max(r + p + q for r, p, q in jobs) <= value <= by_permutations(jobs)


def test_jackson_takes_arrays_and_negative_deliveries() -> None:
    """NumPy columns are welcome; a negative delivery time counts as such."""
    columns = [np.array(c, np.int64) for c in ([0, 0], [5, 1], [-5, 3])]
    assert jackson_preemptive(*columns) == 4
    assert jackson_preemptive([], [], []) == 0


@given(st.randoms(use_true_random=False))
def test_jackson_of_few_delivery_times(rng: Random) -> None:
    """Large arrays with few different delivery times take another way to the same number."""
    n, top = rng.randint(64, 90), rng.choice([5, 400])
    columns = [
        [rng.randint(0, top) for _ in range(n)],
        [rng.choice([0, rng.randint(0, 9)]) for _ in range(n)],
        [rng.choice([-7, 0, 3, 50, 51]) for _ in range(n)],
    ]
    assert jackson_preemptive(*map(np.array, columns)) == jackson_preemptive(*columns)


def check(graph: Schedule, optimum: int | None) -> None:
    """Every bound is below the optimum; nothing feasible is called infeasible."""
    if optimum is None:
        return
    assert bounds.infeasibility(graph) == ""
    for name, value in makespan_bounds(graph).items():
        assert value <= optimum, f"{name} {value} > {optimum}"
    assert makespan_bound(graph) == max(makespan_bounds(graph).values())


@given(st.randoms(use_true_random=False))
def test_bounds_of_graphs(rng: Random) -> None:
    """Setups of any kind, lags, gangs, memory of any kind, windows: never above the optimum."""
    graph = random_graph(rng, 6)
    check(graph, best_by_states(graph))


@given(st.randoms(use_true_random=False))
def test_bounds_of_job_arrays(rng: Random) -> None:
    """Switches, lags, caps, workspaces, chunks, split backward: never above the optimum."""
    array = random_array(rng, 3, 2)
    assume(array.graph().n_operations <= 12)
    optimum = best_by_states(array.graph())
    check(array.graph(), optimum)
    assert optimum is None or (array.infeasibility() == "" and array.lower_bound() <= optimum)


@given(st.randoms(use_true_random=False))
def test_bounds_of_job_shops(rng: Random) -> None:
    """Classic and re-entrant shops with windows."""
    shop = random_shop(rng)
    check(shop.graph(), best_by_states(shop.graph()))


@given(st.randoms(use_true_random=False))
def test_the_two_oracles_agree(rng: Random) -> None:
    """All orders one by one, and dynamic programming over sets, give the same optimum."""
    graph = random_graph(rng, 5)
    assert best_by_states(graph) == best_makespan(graph)


@pytest.mark.slow
def test_bounds_in_depth() -> None:
    """Thousands of graphs, hundreds of arrays."""
    for seed in range(8000):
        graph = random_graph(Random(seed), 7)
        check(graph, best_by_states(graph))
    for seed in range(400):
        graph = random_array(Random(seed), 3, 2).graph()
        if graph.n_operations <= 14:
            check(graph, best_by_states(graph))


def ones(switch: object, **rest: object) -> JobArray:
    """Two jobs on two stages, all blocks 1."""
    block = [[1, 1], [1, 1]]
    return JobArray(block, block, switch=switch, **rest)  # type: ignore[arg-type]


def test_the_switch_trap() -> None:
    """A device may idle and keep its job: 108, not the 304 of one switch per block."""
    array = ones([[100, 0], [100, 0]])
    assert best_makespan(array.graph()) == 108
    assert array.lower_bound() == 108
    assert ones([[100, 0], [100, 0]], switch_on="in").lower_bound() == 108


def test_setup_loss_is_the_smaller_of_switch_and_wait() -> None:
    """Behind F: min(w, chain to B); behind B: w; with two micro-batches nothing behind F."""
    array = ones([[100, 0], [100, 0]])
    loss = bounds.setup_loss(array.graph())
    assert [row.tolist() for row in loss] == [[2, 100, 2, 100], [0, 0, 0, 0]]
    assert bounds.setup_loss(ones(0).graph())[0].tolist() == [0, 0, 0, 0]
    small = bounds.setup_loss(ones([[1, 0], [1, 0]]).graph())[0]
    assert small.tolist() == [1, 1, 1, 1]
    several = JobArray([[1, 1]] * 2, [[1, 1]] * 2, switch=5, micro_batches=2).graph()
    kinds = several.kind[several.users[0]]
    assert (bounds.setup_loss(several)[0][kinds == "F"] == 0).all()


def test_every_family_but_one_is_left() -> None:
    """`load` counts a switch per job but the last one."""
    array = JobArray([[3]] * 4, [[2]] * 4, switch=10)
    assert makespan_bounds(array.graph())["load"] == 4 * 5 + 3 * 10 == best_by_states(array.graph())


def test_jackson_beats_the_simple_bound() -> None:
    """A late job of short tail: min head + load + min tail is weaker."""
    shop = JobShop([[(0, 4), (1, 9)], [(2, 9), (0, 4)]], ["a", "b", "c"])
    found = makespan_bounds(shop.graph())
    assert found["one_machine"] >= found["load"]
    unequal = Schedule(
        resources=(Resource("m"), Resource("other")),
        duration=np.array([5, 5, 6]),
        op_resources=Rows.of([[0], [0], [1]]),
        release=np.array([0, 10, 0]),
        arcs=Arcs.of([(0, 2)]),
    )
    found = makespan_bounds(unequal)
    assert found["one_machine"] == 15 > found["load"] == 11


# memory x time


def capped(size: int, memory: int, jobs: int = 3, **rest: object) -> JobArray:
    """Jobs that hold `size` bytes from F to B on one device, with a long way in between."""
    return JobArray(
        [[1, 8]] * jobs, [[1, 1]] * jobs, activation=[[size, 0]] * jobs, memory=[memory, 0],
        **rest,  # type: ignore[arg-type]
    )  # fmt: skip


def test_energy_with_room_for_one() -> None:
    """Each job holds the device's memory for its whole residence of 11: three in a row take 33."""
    array = capped(4, 4)
    assert makespan_bounds(array.graph())["energy"] == 33 == best_by_states(array.graph())


def test_energy_is_rounded_up_and_scales_with_memory() -> None:
    """ceil(3 jobs x 4 bytes x 11 / 9) = 15; without a limit there is none."""
    assert makespan_bounds(capped(4, 9).graph())["energy"] == 15
    assert makespan_bounds(capped(4, 0).graph())["energy"] == 0


def test_energy_of_workspaces() -> None:
    """Workspace counts while its block runs: 12 bytes for 2, of 12, twice."""
    array = JobArray(
        [[1], [1]], [[1], [1]], recompute=1, recompute_mode="always", recompute_workspace=12,
        memory=[12],
    )  # fmt: skip
    assert makespan_bounds(array.graph())["energy"] == 2 * 2 + 1


def test_energy_counts_what_stays_for_the_weight_block() -> None:
    """I leaves 3 of 4 bytes for W: the residence of those reaches to the end of W."""
    array = JobArray(
        [[1]] * 2, [[2]] * 2, weight=[[3]] * 2, activation=4, weight_memory=3, memory=[4]
    )
    work = 2 * (1 * 3 + 3 * 6)
    assert makespan_bounds(array.graph())["energy"] == -(-work // 4)


def test_bytes_freed_by_whoever_comes_first_prove_nothing() -> None:
    """In the order 0 3 1 2 nothing is held for long: no residence may be counted (regression)."""
    graph = Schedule(
        resources=(Resource("gpu", 2),),
        duration=np.ones(8, np.int64),
        op_resources=Rows.of([[0]] * 8),
        job=np.array([0] * 4 + [1] * 4),
        acquire=np.array([2, 2, 0, 0] * 2),
        free=np.array([0, 0, 2, 2] * 2),
        arcs=Arcs.of([(0, 2, 18), (4, 6, 18)]),
    )
    assert best_by_states(graph) == 22
    check(graph, 22)


# infeasibility


def one(**columns: IntArray) -> Schedule:
    """One operation of duration 3 on a device of 5 bytes."""
    return Schedule(
        resources=(Resource("gpu", 5),), duration=np.array([3]), op_resources=Rows.of([[0]]),
        **{key: np.array([value]) for key, value in columns.items()},
    )  # fmt: skip


def test_infeasibility_names_operation_and_numbers() -> None:
    """A deadline below the head, or bytes beyond the memory."""
    assert bounds.infeasibility(one(deadline=2)) == (  # type: ignore[arg-type]
        "operation(job 0, stage 0), operation 0, cannot end before 3, its deadline is 2"
    )
    assert bounds.infeasibility(one(deadline=3)) == ""  # type: ignore[arg-type]
    assert "needs 6 bytes alone, gpu has 5" in bounds.infeasibility(one(acquire=4, workspace=2))  # type: ignore[arg-type]
    assert bounds.infeasibility(one(acquire=5)) == ""  # type: ignore[arg-type]


def test_the_makespans_bound_is_none_of_the_period() -> None:
    """The makespan's bound of two equal jobs is 6; as a period 4 is possible."""
    array = ones(0, objective="period")
    assert array.bounds() == {"load": 4, "chain": 4, "lap": 0, "energy": 0}
    assert array.lower_bound() == 4
    assert array.with_objective("makespan").lower_bound() >= 5


def test_the_bound_of_a_choice_holds_for_every_choice() -> None:
    """Times without recomputation, bytes with it."""
    array = JobArray(
        [[2], [3]], [[2], [3]], recompute=[[2], [3]], activation=4, checkpoint=1, memory=5,
        recompute_mode="choose",
    )  # fmt: skip
    made = [array.replace(recompute_mode=[a, b]) for a in (False, True) for b in (False, True)]
    assert 0 < array.lower_bound() <= min(one.lower_bound() for one in made)
