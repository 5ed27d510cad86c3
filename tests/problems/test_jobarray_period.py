"""Job arrays that repeat: the graph of a cycle, bounds, multiplicities, reports."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError, JobArray, verify
from optsched.analysis.rolling import rolling
from optsched.model.graph import scheduled
from optsched.solving.result import PeriodicOrders
from optsched.testing.brute_force import best_makespan, best_period
from optsched.testing.random_problems import random_rolling

if TYPE_CHECKING:
    from random import Random

BLOCKS = [[2, 3], [4, 1]]


@given(st.randoms(use_true_random=False))
def test_the_cycle_has_every_copy_once(rng: Random) -> None:
    """Blocks of one iteration, as often as the multiplicity says, chained one behind the other."""
    array = random_rolling(rng)
    graph = array.graph()
    once = array.with_objective("makespan").graph()
    for j in range(array.n_jobs):
        mine, base = np.flatnonzero(graph.job == j), np.flatnonzero(once.job == j)
        copies = int(array.multiplicity[j])
        assert graph.duration[mine].tolist() == once.duration[base].tolist() * copies
        assert graph.iteration[mine].tolist() == np.repeat(np.arange(copies), len(base)).tolist()
    tail, head, _, distance = graph.arcs
    between = (graph.iteration[tail] != graph.iteration[head]) | (distance > 0)
    assert (graph.kind[head[between]] == "F").all()
    assert (graph.stage[tail[between]] == graph.stage[head[between]]).all()
    assert (graph.job[tail] == graph.job[head]).all()
    for i, k, h in zip(tail[between], head[between], distance[between], strict=True):
        behind = graph.iteration[i] + 1 - h * array.multiplicity[graph.job[i]]
        assert graph.iteration[k] == behind


@given(st.randoms(use_true_random=False))
def test_the_barrier_is_no_faster(rng: Random) -> None:
    """A barrier schedule repeats once the last switch is over; the bounds hold for what is best."""
    array = random_rolling(rng).replace(multiplicity=1, trailing_switch=False)
    graph = array.graph()
    if graph.n_operations > 8:
        return
    best = best_period(graph)
    makespan = best_makespan(array.with_objective("makespan").graph())
    if best is None or makespan is None:
        assert array.infeasibility()
        return
    assert array.lower_bound() <= best <= max(1, makespan + int(array.switch.max()))


def test_answers_there_and_back() -> None:
    """A schedule's answer stands for a schedule that is no worse; others are refused."""
    array = JobArray(BLOCKS, BLOCKS, objective="period")
    plan = rolling(array.graph(), array.graph().users)
    answer = array.answer(plan)
    assert isinstance(answer, PeriodicOrders)
    assert answer.sequences == plan.sequences and (answer.offset == plan.offset).all()
    again = array.scheduled(array.answer(plan))
    assert verify(again) == [] and array.evaluate(again) == plan.period
    with pytest.raises(InputError, match="no starts"):
        array.evaluate(array.graph())
    with pytest.raises(InputError, match="no period"):
        array.evaluate(scheduled(array.with_objective("makespan").graph(),
                                 array.with_objective("makespan").graph().users))  # fmt: skip
    with pytest.raises(InputError, match="another instance"):
        array.evaluate(rolling(array.replace(switch=1).graph(), array.graph().users))
    with pytest.raises(InputError, match="expected PeriodicOrders"):
        array.scheduled(array.graph().users)


def test_multiplicities_that_no_graph_can_hold() -> None:
    """A typing error is refused before the memory is full; a makespan ignores them."""
    with pytest.raises(InputError, match=r"jobs\[1\].multiplicity: all .*got 1000000000001"):
        JobArray([[0], [0]], [[0], [0]], multiplicity=[1, 10**12], objective="period")
    with pytest.raises(InputError, match="multiplicity"):
        JobArray([[0]], [[0]], multiplicity=2**53, objective="period")


def test_epochs_of_equal_length() -> None:
    """Batch 8 beside 32: 4 iterations beside 1; the smallest numbers within 1 %."""
    array = JobArray([[1]] * 3, [[1]] * 3, batch_size=[8, 16, 32], objective="period")
    found = array.with_epoch_multiplicity(50_000)
    assert found.multiplicity.tolist() == [4, 2, 1]
    assert 0 < found.epoch_error(50_000) < 0.001  # 6250, 3125, 1563 iterations
    assert found.epoch_error(64_000) == 0
    assert array.epoch_error(64_000) == 3
    thirds = array.replace(batch_size=[10, 25, 10]).with_epoch_multiplicity(100_000)
    assert thirds.multiplicity.tolist() == [5, 2, 5] and thirds.epoch_error(100_000) == 0
    few = array.replace(batch_size=[7, 11, 13]).with_epoch_multiplicity(10**6, max_copies=2)
    assert few.multiplicity.max() <= 2 and few.epoch_error(10**6) > 0.01
    apart = array.with_epoch_multiplicity([8_000, 16_000, 64_000])
    assert apart.multiplicity.tolist() == [1, 1, 2]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.integers(1, 20))
def test_no_smaller_multiplicities_would_do(batches: list[int], most: int) -> None:
    """Within 1 %, or else no worse than proportions of any smaller size, rounded."""
    array = JobArray([[1]] * len(batches), [[1]] * len(batches), batch_size=batches)
    found = array.with_epoch_multiplicity(10_000, most)
    epochs = [math.ceil(10_000 / b) for b in batches]
    assert found.multiplicity.min() >= 1 and found.multiplicity.max() <= most
    for n in range(1, int(found.multiplicity.max())):
        rounded = [max(1, round(n * e / max(epochs))) for e in epochs]
        cycles = [e / m for e, m in zip(epochs, rounded, strict=True)]
        assert max(cycles) / min(cycles) - 1 > 0.01 - 1e-9


def test_hostile_epochs() -> None:
    """Unknown batch sizes, and arguments out of range."""
    array = JobArray([[1], [1]], [[1], [1]], batch_size=[8, 0])
    with pytest.raises(InputError, match=r"jobs\[1\].batch_size: missing"):
        array.with_epoch_multiplicity(100)
    known = array.replace(batch_size=8)
    wrong: list[tuple[Any, Any, str]] = [
        (0, 64, "samples"), (1.5, 64, "samples"), ([1, 2, 3], 64, "samples"),
        (100, 0, "max_copies"), (100, True, "max_copies"), (True, 64, "samples"),
    ]  # fmt: skip
    for samples, copies, field in wrong:
        with pytest.raises(InputError, match=field):
            known.with_epoch_multiplicity(samples, copies)


def test_batch_sizes_in_the_document() -> None:
    """Written where known, left out where not: older files keep their hash."""
    from optsched.problems.jobarray import document as jobarray_json

    array = JobArray(BLOCKS, BLOCKS)
    assert b"batch_size" not in jobarray_json.write(array)
    known = array.replace(batch_size=[8, 0])
    text = jobarray_json.write(known).decode()
    assert text.count('"batch_size":8') == 1 and text.count("batch_size") == 1
    assert jobarray_json.read(text) == known != array
    old = text.replace('"jobs":', '"options": {"switch_on": "in"}, "jobs":')
    with pytest.raises(InputError, match=r"options\.switch_on: no longer supported.*setup_in"):
        jobarray_json.read(old)
    assert JobArray.from_profile("vgg19", 2, [128, 256], micro_batches=4).batch_size.tolist() == [
        128, 256,
    ]  # fmt: skip


def test_as_printed() -> None:
    """The paper's settings, and no others."""
    array = JobArray.as_printed(BLOCKS, BLOCKS, switch=5, update=1)
    assert array == JobArray(BLOCKS, BLOCKS, switch=5, update=1, trailing_switch=True)
    for key in ("micro_batches", "update_mode", "trailing_switch", "objective", "weight"):
        with pytest.raises(InputError, match=f"{key}: settled by the paper"):
            JobArray.as_printed(BLOCKS, BLOCKS, **{key: 1})
