"""The schedule as a value: read-only, comparable, and refusing what is no graph."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from strategies import periodic_schedules, schedules

from optsched import Csr, CyclicOrder, InputError, Objective, Resource, Schedule
from optsched.model.schedule import NO_DEADLINE, Arcs

COLUMNS = (
    "duration", "job", "stage", "microbatch", "iteration", "offset", "family", "release",
    "deadline", "setup_in", "setup_out", "acquire", "free", "workspace", "kind",
)  # fmt: skip


def two(**changes: Any) -> Schedule:
    """Two operations on one resource, with some fields changed."""
    fields: dict[str, Any] = {
        "resources": (Resource("gpu0", 9),),
        "duration": [3, 4],
        "op_resources": [[0], [0]],
        "arcs": [(0, 1)],
    }
    return Schedule(**{**fields, **changes})


def solved(**changes: Any) -> Schedule:
    """The two operations, scheduled."""
    return two(sequences=[[0, 1]], start=[0, 3], **changes)


def test_views() -> None:
    """Ends, makespan, users, neighbours and setups follow from the arrays."""
    s = solved(setup_out=[2, 0], setup_in=[0, 5], family=[0, 1])
    assert s.end.tolist() == [3, 7]
    assert s.makespan == 7
    assert s.setup(0, 1) == 7
    assert s.setup(0, 0) == 0
    assert s.users.to_lists() == [[0, 1]]
    assert s.single_resource.tolist() == [0, 0]
    assert [c.tolist() for c in s.successors] == [[0, 1, 1], [1], [3]]
    assert s.has_setups and not two().has_setups
    assert "makespan 7" in repr(s)


@given(periodic_schedules())
def test_another_cycle_has_another_hash(s: Schedule) -> None:
    """The hash is that of the period and the offsets, whether the graph knew its hash or not."""
    assert s.sha256 and s.period is not None and s.start is not None and s.sequences is not None
    longer = s.with_cycle(s.period + 1, s.offset, s.sequences, s.start)
    assert longer.sha256 == dataclasses.replace(s, period=s.period + 1).sha256 != s.sha256


@given(schedules() | periodic_schedules())
def test_arrays_are_read_only(s: Schedule) -> None:
    """No array of a schedule can be written to."""
    arrays = [getattr(s, key) for key in COLUMNS] + [*s.arcs, s.start, s.memory]
    arrays += [s.op_resources.ids, s.op_resources.indptr, s.sequences.ids, s.sequences.indptr]
    for array in arrays:
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_arrays_are_copies() -> None:
    """Changing what a schedule was made of does not change the schedule."""
    duration, extra = np.array([3, 4]), {"a": [1]}
    s = two(duration=duration, provenance=extra)
    duration[0] = 9
    extra["a"].append(2)
    assert s.duration.tolist() == [3, 4]
    assert s.provenance == {"a": [1]}


@given(schedules() | periodic_schedules())
def test_equality(s: Schedule) -> None:
    """Equal to a copy and to its pickle; not equal to its graph, which is the same graph."""
    copy = dataclasses.replace(s)
    assert s == copy == pickle.loads(pickle.dumps(s))
    assert s != s.graph()
    assert s.same_graph(s.graph())
    assert s.sha256 == s.graph().sha256
    assert dataclasses.replace(s, name="other") != s
    longer = (
        dataclasses.replace(s.graph(), duration=s.duration + 1, period=None)
        if (s.period is None)
        else dataclasses.replace(s.graph(), period=s.period + 1)
    )
    assert not s.same_graph(longer)
    assert s != 5


def test_rows() -> None:
    """Rows compress lists, empty ones included, and give them back."""
    rows = Csr.of([[3, 1], [], [2]])
    assert rows.to_lists() == [[3, 1], [], [2]]
    assert (len(rows), rows[1].tolist(), rows[2].tolist()) == (3, [], [2])
    assert rows == Csr([0, 2, 2, 3], [3, 1, 2])
    assert rows != Csr.of([[3, 1], [2], []])
    with pytest.raises(IndexError):
        rows[3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Csr.of([[0.5]]), "expected an integer, got 0.5"),
        (lambda: Csr.of([[True]]), "expected an integer, got True"),
        (lambda: Csr.of([[10**30]]), "ids: expected integers, got object values"),
        (lambda: Csr.of([1]), "rows: expected a list of lists of integers"),
        (lambda: Csr.of(5), "rows: expected a list of lists of integers"),
        (lambda: Csr([], []), "indptr: expected an ascending array that starts with 0"),
        (lambda: Csr([0, 2, 1], [0, 0]), "indptr: expected an ascending array"),
        (lambda: Csr([0, 1], [0, 0]), "indptr: ends with 1, but there are 2 ids"),
        (lambda: Arcs.of([(0, 1, 0.5)]), "arcs: expected integers, got float64 values"),
        (lambda: Arcs.of([(0, 1), (0,)]), "arcs[1]: expected 2 to 4 integers, got 1"),
        (lambda: Arcs.of([(0, 1, 0, 0, 0)]), "arcs[0]: expected 2 to 4 integers, got 5"),
        (lambda: Arcs.of([3]), "arcs: expected rows (tail, head[, lag[, distance]])"),
        (lambda: Arcs.of([([1], [2])]), "arcs: expected"),
        (lambda: Arcs.of([(0, 2**63)]), "arcs: expected integers"),
    ],
)
def test_rows_and_arcs_refuse(make: Any, message: str) -> None:
    """Ragged and foreign values are refused, never rounded or cut."""
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(message)


BIG = 2**53
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"duration": [3, -1]}, "operations[1].duration: expected an integer >= 0, got -1"),
    (
        {"duration": [3, BIG + 1]},
        "operations[1].duration: expected an integer <= 2^53, got 9007199254740993",
    ),
    ({"duration": [3.0, 4.0]}, "duration: expected integers, got float64 values"),
    ({"duration": [True, False]}, "duration: expected integers, got true or false"),
    ({"duration": [[3, 4]]}, "duration: expected a flat array, got shape (1, 2)"),
    ({"job": [1]}, "job: expected 2 values, one per operation, got 1"),
    (
        {"deadline": [5, BIG + 1]},
        f"operations[1].deadline: expected an integer <= 2^53, got {BIG + 1}",
    ),
    ({"kind": ["F", 1]}, "operations[1].kind: expected a string, got 1"),
    ({"kind": "FB"}, 'kind: expected a list of strings, got "FB"'),
    ({"kind": ["F", "B" * 17]}, "operations[1].kind: longer than 16 characters"),
    ({"kind": ["F", "B\0"]}, 'operations[1].kind: ends with U+0000, got "B\\u0000"'),
    ({"op_resources": [[0]]}, "op_resources: expected 2 rows, one per operation, got 1"),
    (
        {"op_resources": [[0], [1]]},
        "operations[1].resources: there is no resource 1 (there are 1)",
    ),
    ({"op_resources": [[0], [0, 0]]}, "operations[1].resources: names resource 0 twice"),
    ({"resources": None}, "resources: expected a list of Resource(name, memory), got None"),
    ({"resources": ("ab",)}, 'resources[0]: expected Resource(name, memory), got "ab"'),
    (
        {"resources": (("\ud800", 1),)},
        "resources[0].name: half a surrogate pair, U+D800, is no character",
    ),
    (
        {"resources": (("a", True),)},
        "resources[0].memory: expected an integer in 0..2^53, got True",
    ),
    ({"resources": (("a",), ("a",))}, 'resources[1].name: "a" is also the name of resources[0]'),
    ({"arcs": [(0, 2)]}, "arcs[0]: head 2 is no operation (there are 2)"),
    ({"arcs": [(1, 1)]}, "arcs[0]: operation 1 before itself"),
    ({"arcs": [(0, 1, -4)]}, "arcs[0]: lag -4 is outside -3..2^53"),
    ({"arcs": [(0, 1, 0, 1)]}, "arcs[0]: distance 1, but the schedule has no period"),
    ({"arcs": [(0, 1, 0, -1)], "period": 9}, "arcs[0]: expected a distance >= 0, got -1"),
    ({"arcs": [(0, 1), (1, 0)]}, "arcs: operations 0 -> 1 -> 0 form a cycle"),
    ({"time_unit": "h"}, 'time_unit: expected one of ns, us, ms, s, got "h"'),
    ({"name": "x" * 201}, "name: longer than 200 characters"),
    ({"period": 0}, "period: expected an integer in 1..2^53, got 0"),
    ({"period": 9, "release": [0, 1]}, "operations[1].release: not allowed in a periodic schedule"),
    (
        {"period": 9, "deadline": [NO_DEADLINE, 1]},
        "operations[1].deadline: not allowed in a periodic schedule",
    ),
    ({"offset": [0, 1]}, "operations[1].offset: 1, but the schedule has no period"),
    (
        {"op_resources": [[0], []], "workspace": [0, 5]},
        "operations[1].workspace: 5 bytes, but the operation has no resource",
    ),
    ({"duration": [BIG, 1]}, f"operations: times add up to {BIG + 1}, more than 2^53"),
    ({"acquire": [BIG, 1]}, f"operations: acquire adds up to {BIG + 1} bytes, more than 2^53"),
    ({"sequences": [[0, 1]]}, "starts: missing, but sequences are given (give both or neither)"),
    ({"start": [0, 3]}, "sequences: missing, but starts are given (give both or neither)"),
    (
        {"sequences": [[0, 1], []], "start": [0, 3]},
        "sequences: expected 1 rows, one per resource, got 2",
    ),
    ({"sequences": [[0, 2]], "start": [0, 3]}, "sequences[0]: 2 is no operation (there are 2)"),
    ({"sequences": [[0, 1]], "start": [0, -3]}, "starts[1]: expected 0..2^53, got -3"),
    (
        {"sequences": [[0, 1]], "start": [0, 9], "period": 9},
        "starts[1]: expected 0..8 (below the period), got 9",
    ),
    ({"objective": ("makespan", 3)}, "objective: expected an Objective, got ('makespan', 3)"),
    (
        {"objective": Objective("makespan", 3.5)},  # type: ignore[arg-type]
        "objective.value: expected an integer in -2^53..2^53, got 3.5",
    ),
    (
        {"objective": Objective("makespan", 3, 4)},
        "objective.lower_bound: 4 is above the value 3",
    ),
    (
        {"objective": Objective("makespan", 3, 2, "optimal")},
        'objective.status: "optimal" needs lower_bound == value, got 2, 3',
    ),
    (
        {"objective": Objective("makespan", 3, 2, "best")},
        'objective.status: expected one of optimal, feasible, infeasible, unknown, got "best"',
    ),
    ({"provenance": {1: 2}}, "provenance: expected keys that are strings, got 1"),
    (
        {"provenance": {"a": {"b": float("nan")}}},
        "provenance.a.b: expected a finite number, got nan",
    ),
    ({"provenance": {"a": object()}}, "provenance.a: expected plain JSON values, got a object"),
    (
        {"provenance": {"a": [BIG + 1]}},
        f"provenance.a[0]: expected an integer in -2^53..2^53, got {BIG + 1}",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[text[:60] for _, text in REFUSED])
def test_constructor_refuses(changes: dict[str, Any], message: str) -> None:
    """One sentence that names the field, the index, the value and what is legal."""
    with pytest.raises(InputError) as caught:
        two(**changes)
    text = str(caught.value)
    assert text.startswith(message)
    assert len(text) < 300 and "\n" not in text


def test_message_of_a_long_cycle_is_short() -> None:
    """A cycle of thousands is complete in the exception, and short in its message."""
    n = 3000
    with pytest.raises(CyclicOrder) as caught:
        Schedule(
            resources=(),
            duration=[1] * n,  # type: ignore[arg-type]
            op_resources=Csr.of([[]] * n),
            arcs=Arcs.of([(i, (i + 1) % n) for i in range(n)]),
        )
    assert sorted(caught.value.cycle) == list(range(n))
    assert len(str(caught.value)) < 200
