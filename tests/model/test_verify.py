"""The verifier against a slow oracle, and every mutation of a correct schedule named rightly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from strategies import graphs, schedules, spoilt

from optsched.errors import InputError
from optsched.model.schedule import NO_DEADLINE, Arcs, Csr, Objective, Resource, Schedule
from optsched.model.verify import KINDS, Violation, verify

# two jobs through two devices: F, F, B, B each; activations of both fit
PIPELINE = Schedule(
    resources=(Resource("gpu0", 20), Resource("gpu1", 20)),
    duration=np.array([3, 3, 6, 6] * 2),
    op_resources=Csr.of([[0], [1], [1], [0]] * 2),
    arcs=Arcs.of([(0, 1, 1), (1, 2), (2, 3, 1), (4, 5, 1), (5, 6), (6, 7, 1)]),
    job=np.repeat([0, 1], 4),
    family=np.repeat([0, 1], 4),
    kind=np.array(["F", "F", "B", "B"] * 2),
    stage=np.array([0, 1, 1, 0] * 2),
    setup_out=np.full(8, 2),
    acquire=np.array([10, 10, 0, 0] * 2),
    free=np.array([0, 0, 10, 10] * 2),
    sequences=Csr.of([[0, 4, 3, 7], [1, 2, 5, 6]]),
    start=np.array([0, 4, 7, 14, 5, 15, 18, 25]),
    objective=Objective("makespan", 31),
)


def broken_rules(s: Schedule) -> set[tuple]:
    """(kind, operations, resource, amount) of all but overlaps and deadlocks, one by one."""
    start, p = s.start.tolist(), s.duration.tolist()
    end = [t + d for t, d in zip(start, p, strict=True)]
    rules: set[tuple] = set()
    for r, row in enumerate(clean_rows(s)):
        times = Counter(s.sequences.to_lists()[r])
        users = [i for i in range(s.n_operations) if r in s.op_resources[i].tolist()]
        for i in range(s.n_operations):
            surplus = times[i] - (i in users)
            if surplus:
                rules.add(("sequence", (i,), r, abs(surplus)))
        for i, j in pairwise(row):
            missing = end[i] + setup_time(s, i, j) - start[j]
            if 0 < missing <= setup_time(s, i, j):
                rules.add(("setup", (i, j), r, missing))
            elif missing > 0 and (start[j] < start[i] or end[j] <= start[i]):
                rules.add(("order", (i, j), r, missing))
        held = 0
        for i in row:
            held += int(s.acquire[i])
            if s.memory[r] and held + s.workspace[i] > s.memory[r]:
                rules.add(("memory", (i,), r, int(held + s.workspace[i] - s.memory[r])))
            held -= int(s.free[i])
            if held < 0 < s.free[i]:
                rules.add(("free", (i,), r, -held))
    for i, j, lag, _ in zip(*(column.tolist() for column in s.arcs), strict=True):
        if start[j] < end[i] + lag:
            rules.add(("precedence", (i, j), None, end[i] + lag - start[j]))
    for i in range(s.n_operations):
        if start[i] < s.release[i]:
            rules.add(("release", (i,), None, int(s.release[i]) - start[i]))
        if end[i] > s.deadline[i]:
            rules.add(("deadline", (i,), None, end[i] - int(s.deadline[i])))
    if s.objective is not None and s.objective.value != max(end):
        rules.add(("objective", (), None, abs(s.objective.value - max(end))))
    return rules


def setup_time(s: Schedule, i: int, j: int) -> int:
    """What the format says about immediate neighbours."""
    return 0 if s.family[i] == s.family[j] else int(s.setup_out[i]) + int(s.setup_in[j])


def clean_rows(s: Schedule) -> list[list[int]]:
    """The sequences without foreign and repeated entries."""
    return [
        list(dict.fromkeys(i for i in row if r in s.op_resources[i].tolist()))
        for r, row in enumerate(s.sequences.to_lists())
    ]


def occupants(s: Schedule) -> dict[tuple, set[int]]:
    """Who holds a resource in every time step, and who lies at a point strictly inside another."""
    held: dict[tuple, set[int]] = {}
    for i, row in enumerate(s.op_resources.to_lists()):
        for r in row:
            for t in range(s.start[i], s.start[i] + s.duration[i]):
                held.setdefault((r, t), set()).add(i)
            if s.duration[i] == 0:
                inside = {
                    k
                    for k in range(s.n_operations)
                    if r in s.op_resources[k]
                    and s.start[k] < s.start[i] < s.start[k] + s.duration[k]
                }
                for k in inside:
                    held[r, (i, k)] = {i, k}
    return {place: who for place, who in held.items() if len(who) > 1}


def can_be_executed(s: Schedule) -> bool:
    """Whether devices that obey their sequences, and arcs, get all operations done."""
    rows = clean_rows(s)
    done: set[int] = set()
    while True:
        for i in set(range(s.n_operations)) - done:
            waits = {int(t) for t, h in zip(s.arcs.tail, s.arcs.head, strict=True) if h == i}
            for row in rows:
                waits |= set(row[: row.index(i)]) if i in row else set()
            if waits <= done:
                done.add(i)
                break
        else:
            return len(done) == s.n_operations


def facts(found: list[Violation]) -> set[tuple]:
    """Violations without their messages."""
    return {(v.kind, v.operations, v.resource, v.amount) for v in found}


@given(schedules())
def test_correct_schedules_are_accepted(schedule: Schedule) -> None:
    """A semi-active schedule within memory and windows has no violation."""
    assert verify(schedule) == []


@given(graphs())
def test_an_instance_cannot_be_verified(graph: Schedule) -> None:
    """Without sequences and starts there is nothing to check."""
    with pytest.raises(InputError, match="not scheduled"):
        verify(graph)


def test_repeated_entries_count() -> None:
    """The amount is by how many entries an operation is in a sequence too often."""
    for order, extra in (([0, 1, 1], 1), ([0, 1, 1, 1], 2)):
        found = verify(single([4, 4], [0, 4], order))
        assert ("sequence", (1,), 0, extra) in facts(found)


def test_other_types_are_refused() -> None:
    """The message names what was given."""
    with pytest.raises(InputError, match=r"expected a Schedule, got 'a\.schedule\.json'"):
        verify("a.schedule.json")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"problem: expected a JobShop, .* got 'a\.txt'"):
        verify(EXAMPLES["order"], problem="a.txt")  # type: ignore[arg-type]


@given(spoilt(schedules()))
def test_agrees_with_oracle(schedule: Schedule) -> None:
    """All violations but overlaps and deadlocks, with operations and amounts, no more, no fewer."""
    found = verify(schedule)
    exact = facts([v for v in found if v.kind not in ("overlap", "liveness")])
    assert exact == broken_rules(schedule)
    once = [v for v in found if v.kind != "precedence"]  # of which parallel arcs give two alike
    assert len(once) == len(set(once))
    assert all(v.kind in KINDS and v.amount >= 0 for v in found)


@given(spoilt(schedules()))
def test_overlaps_are_those_of_a_step_by_step_simulation(schedule: Schedule) -> None:
    """Where k operations hold a resource at once, k - 1 pairs of them are named, and no other."""
    named = {(v.resource, frozenset(v.operations)) for v in verify(schedule) if v.kind == "overlap"}
    shared = occupants(schedule)
    for (r, *_), who in shared.items():
        assert sum(where == r and pair <= who for where, pair in named) >= len(who) - 1
    for r, pair in named:
        assert any(where == r and pair <= who for (where, *_), who in shared.items())


@given(spoilt(schedules()))
def test_deadlock_is_named_exactly_if_devices_get_stuck(schedule: Schedule) -> None:
    """Cycles of arcs and sequences = execution by the sequences stops; each one is a cycle."""
    cycles = [v.operations for v in verify(schedule) if v.kind == "liveness"]
    assert bool(cycles) != can_be_executed(schedule)
    steps = set(zip(schedule.arcs.tail.tolist(), schedule.arcs.head.tolist(), strict=True))
    steps |= {pair for row in clean_rows(schedule) for pair in pairwise(row)}
    for cycle in cycles:
        assert set(pairwise((*cycle, cycle[0]))) <= steps


def changed(**columns: list[int]) -> Schedule:
    """The pipeline with other columns."""
    return replace(PIPELINE, **{key: np.array(value) for key, value in columns.items()})


EXAMPLES = {
    "sequence": replace(PIPELINE, sequences=Csr.of([[0, 4, 3, 7], [1, 2, 6]])),
    "order": replace(PIPELINE, sequences=Csr.of([[4, 0, 3, 7], [1, 2, 5, 6]])),
    "overlap": changed(start=[0, 4, 7, 14, 2, 15, 18, 25]),
    "setup": changed(start=[0, 4, 7, 14, 4, 15, 18, 25]),
    "precedence": changed(start=[0, 4, 7, 13, 5, 15, 18, 25]),
    "release": changed(release=[0, 0, 0, 0, 6, 0, 0, 0]),
    "deadline": changed(deadline=[NO_DEADLINE] * 7 + [30]),
    "memory": changed(workspace=[0, 0, 0, 4, 0, 0, 0, 0]),
    "free": changed(free=[0, 0, 10, 12, 0, 0, 10, 10]),
    "liveness": replace(PIPELINE, sequences=Csr.of([[0, 4, 3, 7], [2, 1, 5, 6]])),
    "objective": replace(PIPELINE, objective=Objective("makespan", 30)),
}

EXPECTED = {
    "sequence": {("sequence", (5,), 1, 1), ("free", (6,), 1, 10)},
    "order": {("order", (4, 0), 0, 10)},
    "overlap": {("overlap", (0, 4), 0, 3)},
    "setup": {("setup", (0, 4), 0, 1)},
    "precedence": {("precedence", (2, 3), None, 1)},
    "release": {("release", (4,), None, 1)},
    "deadline": {("deadline", (7,), None, 1)},
    "memory": {("memory", (3,), 0, 4)},
    "free": {("free", (7,), 0, 2)},
    "liveness": {("order", (2, 1), 1, 9), ("free", (2,), 1, 10), ("liveness", (1, 2), None, 0)},
    "objective": {("objective", (), None, 1)},
}

MESSAGES = {
    "sequence": (
        "the sequence of gpu1 misses operation 5 (job 1, F, stage 1), which uses that resource"
    ),
    "order": (
        "operation 0 (job 0, F, stage 0) comes after operation 4 (job 1, F, stage 0) in the "
        "sequence of gpu0, but starts 8 us before that ends (starts 0 and 5), and 2 us of setup "
        "follow: 10 us missing"
    ),
    "overlap": (
        "operation 4 (job 1, F, stage 0) starts 1 us before operation 0 (job 0, F, stage 0) ends "
        "on gpu0, and 2 us of setup follow: 3 us missing"
    ),
    "setup": (
        "operation 4 (job 1, F, stage 0) starts 1 us after operation 0 (job 0, F, stage 0) ends "
        "on gpu0, but the setup between them takes 2 us: 1 us missing"
    ),
    "precedence": (
        "operation 3 (job 0, B, stage 0) starts at 13 us, but operation 2 (job 0, B, stage 1) "
        "must precede it and ends at 13 us and the lag is 1 us: 1 us missing (arc 2)"
    ),
    "release": "operation 4 (job 1, F, stage 0) starts 1 us before its release at 6 us",
    "deadline": "operation 7 (job 1, B, stage 0) ends 1 us after its deadline at 30 us",
    "memory": (
        "operation 3 (job 0, B, stage 0) needs 24 bytes on gpu0 (20 held, 0 acquired, 4 "
        "workspace), 4 bytes more than its memory of 20"
    ),
    "free": (
        "operation 7 (job 1, B, stage 0) frees 10 bytes on gpu0, where only 8 are held: 2 bytes "
        "too many"
    ),
    "liveness": (
        "deadlock: operation 1 (job 0, F, stage 1) comes before operation 2 (job 0, B, stage 1) "
        "by arc 1, before operation 1 (job 0, F, stage 1) by the sequence of gpu1"
    ),
    "objective": "the claimed makespan is 30 us, but it is 31 us",
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples(kind: str) -> None:
    """Every kind on a schedule that can be checked by hand; the page lists it."""
    found = verify(EXAMPLES[kind])
    assert facts(found) == EXPECTED[kind]
    assert next(v.message for v in found if v.kind == kind) == MESSAGES[kind]
    page = (Path(__file__).parents[2] / "docs" / "orders" / "verifier.md").read_text()
    assert f"`{kind}`" in page


def single(duration: list[int], start: list[int], order: list[int] | None = None) -> Schedule:
    """Operations on one resource."""
    n = len(duration)
    return Schedule(
        resources=(Resource("gpu0"),),
        duration=np.array(duration, np.int64),
        op_resources=Csr.of([[0]] * n),
        sequences=Csr.of([range(n) if order is None else order]),
        start=np.array(start, np.int64),
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (single([9, 1, 1, 1], [0, 2, 8, 9]),
         {("overlap", (0, 1), 0, 7), ("overlap", (0, 2), 0, 1)}),  # no neighbours
        (single([10, 5], [0, 0]), {("overlap", (0, 1), 0, 10)}),
        (replace(single([4, 4], [0, 2]), sequences=Csr.of([[0]])),  # 1 still holds the resource
         {("sequence", (1,), 0, 1), ("overlap", (0, 1), 0, 2)}),
        (single([0, 5, 0], [0, 0, 5]), set()),  # empty operations touch, but never lie inside
        (single([5, 0], [0, 3]), {("overlap", (0, 1), 0, 2)}),
        (single([5, 0], [0, 0]), {("order", (0, 1), 0, 5)}),
        (single([0, 0], [7, 7], [1, 0]), set()),
        (replace(single([0, 0], [0, 0], [1, 0]), arcs=Arcs.of([(0, 1)])),  # no time shows it
         {("liveness", (0, 1), None, 0)}),
    ],
)  # fmt: skip
def test_corners(schedule: Schedule, expected: set[tuple]) -> None:
    """Operations of no time, and those that meet others than their neighbours: each named once."""
    found = verify(schedule)
    assert facts(found) == expected and len(found) == len(expected)


def test_setups_of_both_operations_count() -> None:
    """What the first one puts down and the second one puts up; the gap may be nothing at all."""
    for gap, missing in ((0, 5), (1, 4), (4, 1), (5, 0)):
        pair = replace(
            single([4, 4], [0, 4 + gap]), family=np.array([0, 1]),
            setup_out=np.array([2, 9]), setup_in=np.array([9, 3]),
        )  # fmt: skip
        expected = {("setup", (0, 1), 0, missing)} if missing else set()
        assert facts(verify(pair)) == expected


def test_messages_without_setups_and_of_no_neighbours() -> None:
    """They name no setup, and no cycle where there is none."""
    first = "before operation 0 (job 0, stage 0) ends on gpu0"
    (late,) = verify(single([10, 5], [0, 7]))
    assert late.message == f"operation 1 (job 0, stage 0) starts 3 us {first}"
    (early,) = verify(single([5, 5], [5, 0]))
    assert early.message.endswith(" but starts 10 us before that ends (starts 0 and 5)")
    far = {v.operations: v.message for v in verify(single([9, 1, 1, 1], [0, 2, 8, 9]))}[0, 2]
    assert far == f"operation 2 (job 0, stage 0) starts 1 us {first}"


def test_bytes_of_an_operation_itself_are_held() -> None:
    """The message counts what the operation acquires before it frees too much."""
    greedy = replace(single([1, 1], [0, 1]), acquire=np.array([2, 3]), free=np.array([0, 7]))
    (found,) = verify(greedy)
    assert (found.kind, found.amount) == ("free", 2)
    assert found.message.endswith("frees 7 bytes on gpu0, where only 5 are held: 2 bytes too many")


def test_claims() -> None:
    """Only a correct schedule can refute a lower bound; other names and no value claim nothing."""
    below = Objective("makespan", None, 9)
    late = single([4, 4], [0, 4])
    assert facts(verify(replace(late, objective=below))) == {("objective", (), None, 1)}
    assert {v.kind for v in verify(replace(late, start=[0, 3], objective=below))} == {"overlap"}
    assert verify(replace(late, objective=Objective("mean_completion", 1))) == []
    none = Objective("makespan", None, None, "infeasible")
    assert facts(verify(replace(late, objective=none))) == {("objective", (), None, 0)}
    assert facts(verify(replace(late, objective=Objective("period", 8)))) == {
        ("objective", (), None, 0)
    }
    assert verify(single([], [])) == []


def test_huge_numbers() -> None:
    """Exact at the largest times and bytes that a document may hold."""
    most = 2**53
    far = single([0, 0], [most, most - 1])
    assert facts(verify(far)) == {("order", (0, 1), 0, 1)}
    full = replace(
        single([1, 1], [0, 1]),
        resources=(Resource("gpu0", most),),
        acquire=np.array([most, 0]),
        workspace=np.array([0, most]),
    )
    assert facts(verify(full)) == {("memory", (1,), 0, most)}


def test_messages_are_safe_to_print() -> None:
    """Characters that a name may hold but nobody sees never rearrange a line on a terminal."""
    graph = replace(
        single([4, 4], [0, 2]),
        resources=(Resource("gpu\u202e0"),),  # from here on right to left
        kind=np.array(["F", "\u200bF"]),
    )
    (found,) = verify(graph)
    assert found.message.isprintable()
    assert "\\u202e" in found.message
    assert "\\u200b" in found.message
