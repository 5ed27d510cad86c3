"""Jobs deleted from schedules: what is left is still feasible, in order, no longer."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from arraypipe_plans import random_array, random_rolling
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError, JobArray, Rows, Schedule, verify
from optsched.arraypipe import compile_plan, random_schedule
from optsched.arraypipe.memory.budget import budget
from optsched.arraypipe.plan.plan import topological, without
from optsched.solving.solution import PeriodicOrders

if TYPE_CHECKING:
    from optsched.arraypipe import ExecutionPlan

SEEDS = st.integers(0, 10**6)


def random_document(seed: int) -> tuple[JobArray, Schedule]:
    """An array and a feasible schedule of it, periodic or not, with just enough memory."""
    draw = Random(seed)
    array = random_array(draw, draw.randint(2, 5), draw.choice(["period", "makespan"]))
    if array.objective == "period":
        schedule = random_rolling(array, seed=seed)
    else:
        graph = array.graph()
        arcs = zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True)
        order = topological(graph.n_operations, arcs, draw)
        rows = [sorted(row, key=order.index) for row in graph.users.to_lists()]
        schedule = array.scheduled(Rows.of(rows))
    plan, resources = compile_plan(schedule), []
    for d, resource in enumerate(schedule.resources):
        held = budget(plan, d, {}).activations
        resources.append(resource._replace(memory=held + draw.choice([0, 5])))
    return array, dataclasses.replace(schedule, resources=tuple(resources), objective=None)


def length(schedule: Schedule) -> int:
    """Period or makespan."""
    return schedule.period or schedule.makespan


def laps(plan: ExecutionPlan, names: list[int], jobs: list[int]) -> list[list[tuple[Any, ...]]]:
    """What every device repeats of some jobs, by the names given to all, from the least block on.

    Where a cycle begins is a matter of words: re-timing may turn it on one device.
    """
    rows = []
    for sequence in plan.sequences:
        blocks = [b for b in (plan.blocks[i] for i in sequence) if names[b.job] in jobs]
        row = [(b.kind, names[b.job], b.stage, b.microbatch, b.copy) for b in blocks]
        k = row.index(min(row)) if row else 0
        rows.append(row[k:] + row[:k])
    return rows


@given(SEEDS)
def test_deletion_keeps_feasible_and_order_and_never_lengthens(seed: int) -> None:
    """Without some jobs: verified, not longer, the others in their order, the smaller instance."""
    array, schedule = random_document(seed)
    assert not verify(schedule)
    draw = Random(seed)
    gone = draw.sample(range(array.n_jobs), draw.randint(1, array.n_jobs - 1))
    left = [j for j in range(array.n_jobs) if j not in gone]
    small = without(schedule, gone)
    assert not verify(small)
    assert length(small) <= length(schedule)
    before = laps(compile_plan(schedule), list(range(array.n_jobs)), left)
    assert laps(compile_plan(small), left, left) == before
    memory = [resource.memory for resource in schedule.resources]
    instance = array.replace(memory=memory).subset(left)
    orders = small.sequences
    assert orders is not None
    start = instance.scheduled(
        orders if small.period is None else PeriodicOrders(orders, small.offset)
    )
    instance.answer(start)  # raises if it is no feasible schedule of the instance
    assert length(start) == length(small)


def test_families_that_are_no_jobs_stay() -> None:
    """Setups between batch sizes, say: the numbers of the families mean something else."""
    schedule = random_schedule([1, 1, 1], 2)
    other = dataclasses.replace(schedule, family=schedule.job % 2 + 5)
    assert set(without(other, [0]).family.tolist()) == {5, 6}
    assert set(without(dataclasses.replace(schedule, family=schedule.job), [0]).family) == {0, 1}


def test_refused_repairs() -> None:
    """What cannot be deleted is refused with a sentence."""
    base = random_schedule([1, 1], 2)
    for schedule, jobs, sentence in (
        (base, [2], "jobs: the schedule has no job 2"),
        (base, [True], "no job True"),
        (base, [0, 1], "none would be left of 2"),
        (base.graph(), [0], "not scheduled"),
    ):
        with pytest.raises(InputError, match=sentence):
            without(schedule, jobs)
