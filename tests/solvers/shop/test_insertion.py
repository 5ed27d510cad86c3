"""Best insertion against a slow reference, and as a rule."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from random_shops import random_shop

import optsched
from optsched import Arcs, CyclicOrder, JobArray, JobShop, Schedule, verify
from optsched.model.graph import evaluate
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.shop import dispatch
from optsched_solvers.shop.tabu import insertion

if TYPE_CHECKING:
    import pytest


def shop_of(jobs: int, machines: int, seed: int) -> JobShop:
    """A classic shop of this size."""
    rng = Random(seed)
    orders = [rng.sample(range(machines), machines) for _ in range(jobs)]
    return JobShop([[(k, rng.randint(1, 30)) for k in order] for order in orders])


def longest_through(graph: Schedule, rows: list[list[int]], x: int) -> int | None:
    """Longest path through x with only the neighbours of these orders; None with a cycle."""
    arcs = [*zip(*(column.tolist() for column in graph.arcs[:3]), strict=True)]
    arcs += [(i, j, graph.setup(i, j)) for row in rows for i, j in itertools.pairwise(row)]
    try:
        found = evaluate(replace(graph, arcs=Arcs.of(arcs)))
    except CyclicOrder:
        return None
    return int(found.head[x] + found.tail[x])


def slow_complete(graph: Schedule, rows: list[list[int]], order: list[int]) -> list[list[int]]:
    """Each operation at the first of its best places, by trying them all."""
    for x in order:
        if graph.single_resource[x] < 0:
            continue
        row = rows[int(graph.single_resource[x])]
        values = {}
        for k in range(len(row) + 1):
            row.insert(k, x)
            value = longest_through(graph, rows, x)
            if value is not None:
                values[k] = value
            row.pop(k)
        row.insert(min(values, key=lambda k: (values[k], k)), x)
    return rows


def timed_graph(rng: Random) -> Schedule:
    """A random graph without what insertion does not look at."""
    return random_graph(rng, 8, gangs=False, deadlines=False, memory=False)


def insa_order(graph: Schedule) -> list[int]:
    """The job of most work in its order, then the longest operations first."""
    work: dict[int, int] = {}
    for job, duration in zip(graph.job.tolist(), graph.duration.tolist(), strict=True):
        work[job] = work.get(job, 0) + duration
    most = min((job for job in work), key=lambda job: (-work[job], job))
    operations = range(graph.n_operations)
    ours = [i for i in operations if graph.job[i] == most]
    rest = [i for i in operations if graph.job[i] != most]
    return ours + sorted(rest, key=lambda i: (-graph.duration[i], i))


@given(st.randoms(use_true_random=False))
def test_equals_the_slow_twin(rng: Random) -> None:
    """Lags, setups, releases, zero durations, arcs between jobs, operations without resource."""
    shop = replace(random_shop(rng, 4, 3).graph(), deadline=None)
    graph = rng.choice([shop, timed_graph(rng)])
    schedule = insertion.insertion(graph)
    assert schedule is not None and schedule.sequences is not None
    empty: list[list[int]] = [[] for _ in graph.resources]
    expected = slow_complete(graph, empty, insa_order(graph))
    assert schedule.sequences.to_lists() == expected
    assert np.array_equal(schedule.start, evaluate(graph, schedule.sequences).head)
    assert verify(schedule) == []


@given(st.randoms(use_true_random=False))
def test_bytes_and_deadlines(rng: Random) -> None:
    """Correct, or nothing."""
    tight = JobArray(  # each job fits alone, although insertion looks at times only
        [[1, 1]] * 4, [[1, 1]] * 4, checkpoint=4, recompute=1, recompute_workspace=3,
        recompute_mode="always", memory=[10, 10],
    ).graph()  # fmt: skip
    assert dispatch.run(tight, "insertion") is not None
    for graph in (random_array(rng).graph(), random_graph(rng, 8, gangs=False), tight):
        schedule = dispatch.run(graph, "insertion")
        assert schedule is None or verify(schedule) == []


def test_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked between slices; slicing changes nothing."""
    graph = shop_of(6, 4, 2).graph()
    whole = insertion.insertion(graph)
    monkeypatch.setattr(insertion, "_STEPS", 1)
    assert insertion.insertion(graph) == whole
    asked = []
    assert insertion.insertion(graph, lambda: len(asked) > 3 or asked.append(1)) is None  # type: ignore[func-returns-value, arg-type, return-value]
    assert len(asked) == 4


def test_as_a_rule_of_the_engine() -> None:
    """Alone it is one iteration; by default it is tried behind the rules."""
    shop = shop_of(8, 5, 4)
    alone = optsched.solve(shop, "dispatch", iterations=1, options={"rules": ["insertion"]})
    schedule = dispatch.run(shop.graph(), "insertion")
    assert schedule is not None and alone.objective == schedule.makespan
    assert alone.history[-1].source == "dispatch insertion"
    listed = {"rules": list(dispatch.RULES)}
    rules = optsched.solve(shop, "dispatch", iterations=999, options=listed)
    both = optsched.solve(shop, "dispatch", iterations=999)
    assert both.objective == min(rules.objective, schedule.makespan)  # type: ignore[type-var]
