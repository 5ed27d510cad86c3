"""The compiled longest path gives the numbers and the refusals of `optsched.model.graph`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import schedules

from optsched import Csr, CyclicOrder, JobArray, Schedule
from optsched.errors import InputError
from optsched.kernels import longest_path
from optsched.model.graph import evaluate as by_python
from optsched.testing.random_problems import random_graph

if TYPE_CHECKING:
    from random import Random


def agree(graph: Schedule, sequences: Csr) -> None:
    """Same heads, tails and makespan, or the same cycle."""
    try:
        expected = by_python(graph, sequences)
    except CyclicOrder as error:
        with pytest.raises(CyclicOrder) as caught:
            longest_path.evaluate(graph, sequences)
        assert caught.value.cycle == error.cycle
        return
    found = longest_path.evaluate(graph, sequences)
    assert np.array_equal(found.heads, expected.head)
    assert np.array_equal(found.tails, expected.tail)
    assert found.makespan == expected.makespan


@given(schedules(max_operations=9))
def test_equals_python_on_feasible_orders(schedule: Schedule) -> None:
    """Gangs, lags, setups, releases, zero durations, operations without resource."""
    assert schedule.sequences is not None
    agree(schedule, schedule.sequences)


@given(st.randoms(use_true_random=False))
def test_equals_python_on_any_orders(rng: Random) -> None:
    """Shuffled orders: the same numbers, or the same cycle."""
    graph = random_graph(rng, 8)
    agree(graph, Csr.of(rng.sample(row, len(row)) for row in graph.users.to_lists()))


def test_wrong_orders_are_refused() -> None:
    """No permutation, no period: the sentences of the Python version."""
    graph = JobArray([[1]], [[1]]).graph()
    with pytest.raises(InputError, match="operation 1 is missing"):
        longest_path.evaluate(graph, Csr.of([[0]]))
