"""Periodic schedules from orders: correct whatever the orders are, and nothing but the orders."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import seeds
from hypothesis import given
from hypothesis import strategies as st
from rolling_problems import circular_orders, random_orders

from optsched import CyclicOrder, JobArray, Resource, Schedule, verify
from optsched.analysis.iterations import job_reports
from optsched.analysis.rolling import rolling
from optsched.analysis.unroll import unroll
from optsched.kernels.cycle_ratio import cycle_arcs, cycle_time
from optsched.model.schedule import Csr
from optsched.testing.brute_force import best_period
from optsched.testing.problems import random_problems, tiny_problems
from optsched.testing.random_problems import random_rolling

if TYPE_CHECKING:
    from random import Random


def with_orders(rng: Random, graph: Schedule) -> tuple[Csr, np.ndarray]:
    """Orders without a deadlock: of a random layout, else one block after the other."""
    for attempt in range(8):
        make = circular_orders if attempt % 2 else random_orders
        rows, offset = make(rng, graph)
        try:
            cycle_time(graph, rows, offset)
        except CyclicOrder:
            continue
        return rows, offset
    return graph.users, np.zeros(graph.n_operations, np.int64)


def unlimited(graph: Schedule) -> Schedule:
    """Without memory limits, which orders alone may exceed."""
    return replace(graph, resources=tuple(Resource(r.name) for r in graph.resources))


@given(st.randoms(use_true_random=False))
def test_correct_and_of_least_period(rng: Random) -> None:
    """No violation in the cycle nor written out; the period of the orders that came in."""
    graph = unlimited(random_rolling(rng, 3, 3).graph())
    rows, offset = with_orders(rng, graph)
    plan = rolling(graph, rows, offset)
    assert verify(plan) == []
    assert verify(unroll(plan, int(plan.offset.max(initial=0)) + 3)) == []
    assert plan.period == cycle_time(graph, rows, offset).period
    least = {j: int(plan.offset[graph.job == j].min()) for j in np.unique(graph.job)}
    assert set(least.values()) == {0}
    # the orders of the schedule are worth the same, and it is what they stand for
    assert plan.sequences is not None
    assert rolling(graph, plan.sequences, plan.offset).period == plan.period


@given(st.randoms(use_true_random=False))
def test_same_events_in_the_same_order(rng: Random) -> None:
    """Rows are the given ones seen from another cycle, arcs span as many cycles as they did.

    Written out, every device runs the same blocks of the same iterations one after the other; and
    no iteration takes longer than with earliest starts.
    """
    graph = random_rolling(rng, 3, 3).graph()
    rows, offset = with_orders(rng, graph)
    plan = rolling(graph, rows, offset)
    turns = plan.offset - offset
    found = cycle_time(graph, rows, offset)
    assert plan.sequences is not None and plan.start is not None
    for row, new in zip(rows.to_lists(), plan.sequences.to_lists(), strict=True):
        if row:
            at = row.index(new[0])
            assert new == row[at:] + row[:at]
    # start in the lap of the given offsets: equal for the ends of iterations, else later
    absolute = plan.start + turns * found.period
    earliest = found.start - found.late * found.period
    for j in np.unique(graph.job):
        mine = np.flatnonzero(graph.job == j)
        delay = absolute[mine] - earliest[mine]
        assert (delay - delay.min() >= 0).all() and delay.min() % found.period == 0
        for a in np.unique(graph.iteration[mine]):
            copy = mine[graph.iteration[mine] == a]
            before = (earliest + graph.duration)[copy].max() - earliest[copy].min()
            after = (absolute + graph.duration)[copy].max() - absolute[copy].min()
            assert after <= before
            assert (absolute + graph.duration)[copy].max() == (
                (earliest + graph.duration)[copy].max() + delay.min()
            )


def test_nothing_can_begin_later() -> None:
    """An idle pipeline: the first job's blocks do not wait on a device longer than they must."""
    array = JobArray([[1, 1, 1], [9, 9, 9]], [[1, 1, 1], [9, 9, 9]], objective="period")
    graph = array.graph()
    rows = Csr.of([[6, 0, 5, 11], [7, 1, 4, 10], [8, 2, 3, 9]])
    plan = rolling(graph, rows, np.zeros(12, np.int64))
    assert verify(plan) == []
    arcs = cycle_arcs(plan, plan.sequences, plan.offset)
    spare = plan.start[arcs.head] + arcs.tokens * plan.period - plan.start[arcs.tail] - arcs.weight
    assert (spare >= 0).all()
    ends = {5, 11}  # B on stage 0: what an iteration ends with
    for i in set(range(12)) - ends:
        assert spare[arcs.tail == i].min() == 0
    assert job_reports(plan)[0].latency < plan.period


@given(st.randoms(use_true_random=False))
def test_where_rows_are_cut_does_not_matter(rng: Random) -> None:
    """A row that begins later, its first blocks an offset earlier: the same events."""
    graph = unlimited(random_rolling(rng, 3, 3).graph())
    rows, offset = with_orders(rng, graph)
    lists, moved = rows.to_lists(), offset.copy()
    for row in lists:
        for _ in range(rng.randint(0, len(row))):
            moved[row[0]] -= 1
            row.append(row.pop(0))
    plan = rolling(graph, Csr.of(lists), moved)
    assert verify(plan) == []
    assert plan.period == cycle_time(graph, rows, offset).period


# brute force of periods against equal jobs, bounds, orders and the verifier


@seeds(8, 30)
def test_bounds_hold_and_orders_are_no_better(seed: int) -> None:
    """Every bound <= optimum <= every feasible order."""
    every = [*tiny_problems(), *random_problems()]
    arrays: list[Any] = [one for one in every if one.problem_kind == "periodic"]
    array = arrays[7 * seed % len(arrays)]
    best = best_period(array.graph())
    assert (best is None) == bool(array.infeasibility())
    if best is None:
        return
    assert max(array.bounds().values()) <= best, array.bounds()
    import random

    rng = random.Random(seed)
    for attempt in range(60):
        make = circular_orders if attempt % 2 else random_orders
        try:
            plan = rolling(array.graph(), *make(rng, array.graph()))
        except CyclicOrder:
            continue
        if not verify(plan):
            assert plan.period is not None and plan.period >= best


@pytest.mark.parametrize("memory", [0, 2, 3])
def test_brute_force_equals_all_orders_and_offsets(memory: int) -> None:
    """Two jobs on one device, every permutation and every offset, judged by the verifier."""
    from itertools import permutations, product

    array = JobArray(
        [[2], [1]], [[1], [3]], activation=[[2], [1]], memory=[memory], switch=1,
        update=2, update_mode="fused", objective="period",
    )  # fmt: skip
    graph = array.graph()
    found = []
    for row in permutations(range(4)):
        for offset in product(range(2), repeat=4):
            try:
                plan = rolling(graph, type(graph.users).of([row]), np.array(offset))
            except CyclicOrder:
                continue
            if not verify(plan):
                found.append(plan.period)
    assert min(found) == best_period(graph)
