"""Best insertion against a slow twin, as a rule, and as completion of partial orders."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import CyclicOrder, JobArray, JobShop, Rows, Schedule, verify
from optsched.errors import InputError
from optsched.model.graph import evaluate
from optsched.testing.random_problems import random_array, random_graph, random_shop
from optsched_solvers.shop import dispatch
from optsched_solvers.shop.tabu import insertion
from optsched_solvers.shop.tabu.insertion import complete


def shop_of(jobs: int, machines: int, seed: int) -> JobShop:
    """A classic shop of this size."""
    rng = Random(seed)
    orders = [rng.sample(range(machines), machines) for _ in range(jobs)]
    return JobShop([[(k, rng.randint(1, 30)) for k in order] for order in orders])


def longest_through(graph: Schedule, rows: list[list[int]], x: int) -> int | None:
    """Longest path through x with only the neighbours of these orders; None with a cycle."""
    n = graph.n_operations
    edges = [
        (i, j, int(graph.duration[i]) + lag)
        for i, j, lag in zip(*(column.tolist() for column in graph.arcs[:3]), strict=True)
    ]
    for row in rows:
        for i, j in itertools.pairwise(row):
            edges.append((i, j, int(graph.duration[i]) + graph.setup(i, j)))
    head, tail = graph.release.tolist(), graph.duration.tolist()
    for _ in range(n + 1):
        changed = False
        for i, j, weight in edges:
            if head[i] + weight > head[j]:
                head[j], changed = head[i] + weight, True
            if weight + tail[j] > tail[i]:
                tail[i], changed = weight + tail[j], True
        if not changed:
            break
    if _cyclic(n, edges):
        return None
    return int(head[x] + tail[x])


def _cyclic(n: int, edges: list[tuple[int, int, int]]) -> bool:
    waiting = [0] * n
    for _, j, _ in edges:
        waiting[j] += 1
    ready = [i for i in range(n) if not waiting[i]]
    for i in ready:
        for a, j, _ in edges:
            if a == i:
                waiting[j] -= 1
                if not waiting[j]:
                    ready.append(j)
    return len(ready) < n


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


def without_bytes(graph: Schedule) -> Schedule:
    """The same graph with neither limits nor held bytes."""
    zeros = np.zeros(graph.n_operations, np.int64)
    return Schedule(
        resources=tuple(optsched.Resource(r.name) for r in graph.resources),
        duration=graph.duration, op_resources=graph.op_resources, arcs=graph.arcs, job=graph.job,
        kind=graph.kind, stage=graph.stage, family=graph.family, setup_in=graph.setup_in,
        setup_out=graph.setup_out, release=graph.release, acquire=zeros,
    )  # fmt: skip


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
    shop = rng.random() < 0.4
    graph = (
        random_shop(rng, 4, 3).graph() if shop
        else without_bytes(random_graph(rng, 8, gangs=False, deadlines=False))
    )  # fmt: skip
    graph = without_bytes(graph)
    schedule = insertion.insertion(graph)
    assert schedule is not None and schedule.sequences is not None
    empty: list[list[int]] = [[] for _ in graph.resources]
    expected = slow_complete(graph, empty, insa_order(graph))
    assert schedule.sequences.to_lists() == expected
    assert np.array_equal(schedule.start, evaluate(graph, schedule.sequences).head)
    assert verify(schedule) == []


@given(st.randoms(use_true_random=False))
def test_completion_keeps_what_is_given(rng: Random) -> None:
    """Removed operations come back at their best places; the others stay in order."""
    graph = without_bytes(random_graph(rng, 8, gangs=False, deadlines=False))
    start = dispatch.run(graph, "random", seed=rng.randint(0, 9))
    assert start is not None and start.sequences is not None
    gone = {i for i in range(graph.n_operations) if rng.random() < 0.4}
    kept = [[i for i in row if i not in gone] for row in start.sequences.to_lists()]
    schedule = complete(graph, Rows.of(kept))
    assert schedule is not None and schedule.sequences is not None and verify(schedule) == []
    after = schedule.sequences.to_lists()
    assert [[i for i in row if i not in gone] for row in after] == kept
    order = sorted(gone, key=lambda i: (-graph.duration[i], i))
    assert after == slow_complete(graph, kept, order)


@given(st.randoms(use_true_random=False))
def test_bytes_and_deadlines(rng: Random) -> None:
    """Correct, or nothing."""
    for graph in (random_array(rng).graph(), random_graph(rng, 8, gangs=False)):
        schedule = dispatch.run(graph, "insertion")
        assert schedule is None or verify(schedule) == []


def test_memory_is_repaired() -> None:
    """Where each job fits alone there is a schedule, although insertion looks at times only."""
    array = JobArray(
        [[1, 1]] * 4, [[1, 1]] * 4, checkpoint=4, recompute=1, recompute_workspace=3,
        recompute_mode="always", memory=[10, 10],
    )  # fmt: skip
    schedule = dispatch.run(array.graph(), "insertion")
    assert schedule is not None and verify(schedule) == []


def test_bad_partial_orders() -> None:
    """Refused with the place: a cycle, a stranger, a double, a wrong number of rows."""
    graph = JobShop([[(0, 1), (1, 1)], [(1, 1), (0, 1)]]).graph()
    with pytest.raises(CyclicOrder) as caught:
        complete(graph, Rows.of([[3, 0], [1, 2]]))
    assert sorted(caught.value.cycle) == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"partial\[0\]: operation 1 does not use"):
        complete(graph, Rows.of([[1], []]))
    with pytest.raises(InputError, match=r"partial\[0\]: operation 0 appears twice"):
        complete(graph, Rows.of([[0, 0], []]))
    with pytest.raises(InputError, match="expected 2 rows"):
        complete(graph, Rows.of([[0]]))


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
