"""Which jobs may change places."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import Arcs, JobArray, JobShop
from optsched.testing.random_problems import random_array
from optsched_solvers.shop.proof.symmetry import identical_jobs

if TYPE_CHECKING:
    from random import Random


def jobs_of(problem: Any) -> list[list[int]]:
    """Groups as job numbers."""
    graph = problem.graph()
    return [[int(graph.job[rows[0]]) for rows in group] for group in identical_jobs(graph)]


def test_groups() -> None:
    """Jobs that agree in every field, machines and their order included."""
    rows = [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2], [9, 9]]
    assert jobs_of(JobArray(rows, rows)) == [[0, 2, 4], [1, 3]]
    assert jobs_of(JobShop([[(0, 1), (1, 1)], [(1, 1), (0, 1)], [(0, 1), (1, 1)]])) == [[0, 2]]
    assert jobs_of(JobShop([[(0, 1)], [(0, 1)]], deadline=[5, None])) == []


@pytest.mark.parametrize(
    "field",
    [
         {"lag_forward": [[1], [2]]}, {"activation": [[1, 1], [1, 2]]},
         {"switch": [[0, 0], [1, 0]]}, {"micro_batches": [1, 2]},
        {"place": [[[0, 1]], [[1, 0]]]},
        {"checkpoint": 3, "activation": 2, "recompute_mode": [True, False]},
    ],
)  # fmt: skip
def test_any_difference_counts(field: dict[str, Any]) -> None:
    """A single differing number makes two jobs different."""
    assert jobs_of(JobArray([[1, 2]] * 2, [[3, 4]] * 2)) == [[0, 1]]
    assert jobs_of(JobArray([[1, 2]] * 2, [[3, 4]] * 2, **field)) == []


def test_arcs_and_families_between_jobs() -> None:
    """Who waits for another job, or shares its family where setups cost, changes with nobody."""
    graph = JobArray([[1]] * 3, [[1]] * 3, switch=2).graph()
    assert jobs_of(graph) == [[0, 1, 2]]
    arcs = [*zip(*(c.tolist() for c in graph.arcs[:3]), strict=True), (0, 3, 0)]
    assert jobs_of(replace(graph, arcs=Arcs.of(arcs))) == []
    assert jobs_of(replace(graph, family=np.array([0, 0, 0, 0, 2, 2]))) == []


@given(st.randoms(use_true_random=False))
def test_groups_are_classes_of_equal_rows(rng: Random) -> None:
    """Exactly the jobs whose data agree are grouped; positions match operation by operation."""
    array = random_array(rng)
    graph = array.graph()
    keys = (
        "duration", "stage", "microbatch", "release", "acquire", "free", "workspace", "setup_out",
        "single_resource",
    )  # fmt: skip
    for group in identical_jobs(graph):
        assert len(group) > 1
        for rows in group:
            for key in keys:
                values = getattr(graph, key)
                assert values[rows].tolist() == values[group[0]].tolist()
