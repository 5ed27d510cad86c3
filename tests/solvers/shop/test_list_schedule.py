"""List scheduling: every rule and mode gives correct schedules, and memory does not deadlock."""

from __future__ import annotations

from itertools import product
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_shops import random_shop

from optsched import JobArray, Schedule, verify
from optsched.errors import InputError
from optsched.kernels import list_schedule, plain_python
from optsched.model.graph import evaluate
from optsched.model.schedule import Objective
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.shop.rules import (
    PIPELINE_RULES,
    SHOP_RULES,
    Dispatcher,
    Variant,
    is_pipeline,
    order_of,
)

MODES = list(product((False, True), (False, True), (False, True)))  # active, backwards, defer


def by_rule(
    graph: Schedule, rule: str, active: bool = False, backwards: bool = False, defer: bool = False,
    seed: int = 0,
) -> Schedule | None:  # fmt: skip
    """The list schedule of a rule; None if it gets stuck."""
    found = Dispatcher(graph, seed).sequences(Variant(rule, active, backwards, defer))
    if found is None:
        return None
    value = int((found[1] + graph.duration).max(initial=0))
    return graph.with_orders(*found, Objective("makespan", value, None, "feasible"), {})


def all_schedules(graph: Schedule) -> list[Schedule]:
    """What every rule gives in every mode, without the failures."""
    rules = (*PIPELINE_RULES, *SHOP_RULES) if is_pipeline(graph) else SHOP_RULES
    found = [
        by_rule(graph, rule, active, backwards, defer)
        for rule in rules
        for active, backwards, defer in MODES
    ]
    return [schedule for schedule in found if schedule is not None]


def check(graph: Schedule) -> list[Schedule]:
    """Each is feasible and semi-active, and worth what it says."""
    schedules = all_schedules(graph)
    for schedule in schedules:
        assert verify(schedule) == []
        assert np.array_equal(schedule.start, evaluate(graph, schedule.sequences).head)
    return schedules


@given(st.randoms(use_true_random=False))
def test_job_shops(rng: Random) -> None:
    """Without deadlines every rule succeeds."""
    graph = random_shop(rng, 5, 4).graph()
    schedules = check(graph)
    if graph.deadline.min(initial=2**62) == graph.deadline.max(initial=2**62):
        assert len(schedules) == len(SHOP_RULES) * len(MODES)


@given(st.randoms(use_true_random=False))
def test_job_arrays(rng: Random) -> None:
    """Switches, lags, caps, chunks, split backward; some rule succeeds wherever each job fits."""
    array = random_array(rng)
    assert check(array.graph()) or array.infeasibility() or array.memory.any()


@given(st.randoms(use_true_random=False))
def test_any_graph(rng: Random) -> None:
    """Zero durations, windows, bytes freed by anybody: correct, or nothing."""
    check(random_graph(rng, 7, gangs=False))


@given(st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_the_source_as_python_is_the_same(rng: Random, active: bool, first_come: bool) -> None:
    """What is not compiled yet runs as Python: the same order and starts, or the same failure."""
    graph = list_schedule.DispatchGraph.of(
        rng.choice([random_array(rng).graph(), random_graph(rng, 7, gangs=False)])
    )
    priority = np.array(rng.sample(range(len(graph.operation)), len(graph.operation)), np.int64)
    mode = list_schedule.Mode.ACTIVE if active else list_schedule.Mode.NON_DELAY
    limit = None if rng.random() < 0.5 else np.array([1, 2])
    expected = list_schedule.run(graph, priority, mode, first_come=first_come, slot_limit=limit)
    with mock.patch.object(plain_python, "is_ready", lambda _: False):
        found = list_schedule.run(graph, priority, mode, first_come=first_come, slot_limit=limit)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert np.array_equal(found, expected)


@given(st.randoms(use_true_random=False))
def test_a_given_order_is_kept(rng: Random) -> None:
    """Decoded, the orders of a schedule give that schedule again."""
    graph = rng.choice([random_array(rng).graph(), random_graph(rng, 7, gangs=False)])
    schedule = by_rule(graph, "random", seed=rng.randrange(99))
    assume(schedule is not None)
    assert schedule is not None and schedule.sequences is not None and schedule.start is not None
    rank = np.argsort(order_of(graph, schedule.sequences))
    found = list_schedule.run(
        list_schedule.DispatchGraph.of(graph), rank, list_schedule.Mode.IN_ORDER
    )
    assert found is not None and np.array_equal(found[1], schedule.start)


@pytest.mark.parametrize(
    "array",
    [  # filling device 0 with chunk 0 leaves no room for chunk 2
        JobArray([[1] * 4], [[1] * 4], place=[0, 1, 0, 1], activation=1, memory=[2, 2],
                 micro_batches=4),
        # each F keeps 4 of 10, recomputation needs 3 more: two held leave room for no B
        JobArray([[1, 1]] * 4, [[1, 1]] * 4, checkpoint=4, recompute=1, recompute_workspace=3,
                 recompute_mode="always", memory=[10, 10]),
    ],
    ids=["wrapped chunks", "workspaces"],
)  # fmt: skip
def test_traps(array: JobArray) -> None:
    """Greedy orders deadlock here."""
    assert array.infeasibility() == ""
    assert check(array.graph())
    assert check(array.replace(recompute_as_block=True).graph())


def test_gangs_are_refused() -> None:
    """Operations on several resources at once are CP-SAT's."""
    graph = next(
        g
        for s in range(99)
        if len((g := random_graph(Random(s))).op_resources.ids) > g.n_operations
    )
    with pytest.raises(InputError, match="resources at once"):
        by_rule(graph, "spt")
