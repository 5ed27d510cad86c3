"""No bound above the optimum, ever; and the bounds that the literature gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_shops import random_shop
from state_oracle import best_by_states

from optsched import Arcs, Csr, JobArray, Resource, Schedule
from optsched.model import bounds
from optsched.model.bounds import jackson_preemptive, makespan_bound, makespan_bounds
from optsched.model.cycles import disjoint_cycles
from optsched.model.memory_bounds import dual_feasible
from optsched.testing import best_makespan
from optsched.testing.random_problems import random_array, random_graph

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

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


@given(TRIPLES)
def test_jackson_equals_its_simulation(jobs: list[tuple[int, int, int]]) -> None:
    """Event by event = unit by unit, where every job takes time."""
    jobs = [(r, p + 1, q) for r, p, q in jobs]
    tails = [(r, p, p + q) for r, p, q in jobs]
    assert jackson_preemptive(*zip(*tails, strict=True)) == by_time_steps(jobs)


def test_jackson_takes_arrays_and_negative_deliveries() -> None:
    """NumPy columns are welcome; a negative delivery time counts as such."""
    columns = [np.array(c, np.int64) for c in ([0, 0], [5, 1], [0, 4])]
    assert jackson_preemptive(*columns) == 4
    assert jackson_preemptive([], [], []) == 0


def check(graph: Schedule, optimum: int | None) -> None:
    """Every bound is below the optimum; nothing feasible is called infeasible."""
    if optimum is None:
        return
    assert bounds.infeasibility(graph) == ""
    for name, value in makespan_bounds(graph).items():
        assert value <= optimum, f"{name} {value} > {optimum}"
    assert makespan_bound(graph) == max(makespan_bounds(graph).values())


@pytest.mark.parametrize(
    "draw",
    [lambda rng: random_graph(rng, 6), lambda rng: random_array(rng, 3, 2), random_shop],
    ids=["graph", "array", "shop"],
)
@given(st.randoms(use_true_random=False))
def test_never_above_the_optimum(draw: Callable[[Random], Any], rng: Random) -> None:
    """Setups of any kind, lags, gangs, memory of any kind, windows, chunks, split backward."""
    problem = draw(rng)
    assume(problem.graph().n_operations <= 12)
    optimum = best_by_states(problem.graph())
    check(problem.graph(), optimum)
    if optimum is not None and not isinstance(problem, Schedule):
        assert problem.infeasibility() == "" and problem.lower_bound() <= optimum


def ones(switch: object, **rest: object) -> JobArray:
    """Two jobs on two stages, all blocks 1."""
    block = [[1, 1], [1, 1]]
    return JobArray(block, block, switch=switch, **rest)  # type: ignore[arg-type]


def test_the_switch_trap() -> None:
    """A device may idle and keep its job: 108, not the 304 of one switch per block."""
    array = ones([[100, 0], [100, 0]])
    assert best_makespan(array.graph()) == 108
    assert array.lower_bound() == 108


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


# memory x time


def capped(size: int, memory: int, jobs: int = 3, **rest: object) -> JobArray:
    """Jobs that hold `size` bytes from F to B on one device, with a long way in between."""
    return JobArray(
        [[1, 8]] * jobs, [[1, 1]] * jobs, activation=[[size, 0]] * jobs, memory=[memory, 0],
        **rest,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "jobs", "energy"),
    [
        (4, 3, 33),  # each holds all of it for its residence of 11: three in a row
        (12, 5, 19),  # ceil(5 jobs x 4 bytes x 11 / 12)
        (9, 3, 17),  # two of 4 bytes fit, not two and a quarter: ceil(3 x 11 / 2)
        (7, 3, 33),  # only one does
        (0, 3, 0),  # no limit
    ],
)
def test_energy(memory: int, jobs: int, energy: int) -> None:
    """Bytes times time over the memory, rounded up, of what fits together."""
    graph = capped(4, memory, jobs).graph()
    assert makespan_bounds(graph)["energy"] == energy
    assert jobs > 3 or best_by_states(graph) >= energy  # type: ignore[operator]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True), st.data())
def test_weights_of_what_fits_together(sizes: list[int], data: st.DataObject) -> None:
    """No set of at most the capacity weighs more than the functions say; the first is the bytes."""
    capacity = data.draw(st.integers(max(sizes), 60))
    functions = list(dual_feasible(sizes, capacity))
    assert functions[0] == (sizes, capacity)
    for weights, most in functions:
        best = {0: 0}
        for room in range(1, capacity + 1):
            pairs = [(s, w) for s, w in zip(sizes, weights, strict=True) if s <= room]
            best[room] = max([best[room - 1], *(best[room - s] + w for s, w in pairs)])
        assert best[capacity] <= most, (weights, most)


def test_energy_counts_what_stays_for_the_weight_block() -> None:
    """I leaves 3 of 4 bytes for W: the residence of those reaches to the end of W."""
    array = JobArray(
        [[1]] * 4, [[2]] * 4, weight=[[3]] * 4, activation=4, weight_memory=3, memory=[12]
    )
    work = 4 * (1 * 3 + 3 * 6)
    assert makespan_bounds(array.graph())["energy"] == work // 12


def test_bytes_freed_by_whoever_comes_first_prove_nothing() -> None:
    """In the order 0 3 1 2 nothing is held for long: no residence may be counted (regression)."""
    graph = Schedule(
        resources=(Resource("gpu", 2),),
        duration=np.ones(8, np.int64),
        op_resources=Csr.of([[0]] * 8),
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
        resources=(Resource("gpu", 5),), duration=np.array([3]), op_resources=Csr.of([[0]]),
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


def test_the_bound_of_a_choice_holds_for_every_choice() -> None:
    """Times without recomputation, bytes with it."""
    array = JobArray(
        [[2], [3]], [[2], [3]], recompute=[[2], [3]], activation=4, checkpoint=1, memory=5,
        recompute_mode="choose",
    )  # fmt: skip
    made = [array.replace(recompute_mode=[a, b]) for a in (False, True) for b in (False, True)]
    assert 0 < array.lower_bound() <= min(one.lower_bound() for one in made)


# the search for cycles in arbitrary directed graphs

VERTEX = st.integers(0, 7)


def has_cycle(edges: list[tuple[int, int]]) -> bool:
    """Whether anything is left once vertices that nothing enters are taken away repeatedly."""
    left = {i for edge in edges for i in edge}
    while True:
        edges = [(i, j) for i, j in edges if i in left and j in left]
        entered = {j for _, j in edges}
        if entered >= left:
            return bool(left)
        left &= entered


def search(edges: list[tuple[int, int]]) -> list[list[int]]:
    """Cycles as lists of edge numbers."""
    table = np.array(edges, np.int64).reshape(-1, 2)
    return disjoint_cycles(table[:, 0], table[:, 1])


@given(st.lists(st.tuples(VERTEX, VERTEX), max_size=20))
def test_cycles_are_closed_disjoint_and_leave_none(edges: list[tuple[int, int]]) -> None:
    """Each is a closed walk of distinct vertices; without those vertices no cycle is left."""
    used: set[int] = set()
    for cycle in search(edges):
        walk = [edges[e] for e in cycle]
        assert [j for _, j in walk] == [i for i, _ in walk[1:] + walk[:1]]
        vertices = {i for i, _ in walk}
        assert len(vertices) == len(walk)
        assert used.isdisjoint(vertices)
        used |= vertices
    assert not has_cycle([(i, j) for i, j in edges if i not in used and j not in used])


def test_a_graph_with_many_paths_is_searched_once() -> None:
    """2^200 paths through 200 diamonds, yet every edge is looked at once; and no recursion."""
    ladder = [
        (3 * k + a, 3 * k + b) for k in range(200) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))
    ]
    assert search(ladder) == []
    chain = [(i, i + 1) for i in range(5000)]
    assert search([*chain, (5000, 0)]) == [list(range(5001))]
