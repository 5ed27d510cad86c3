"""Periodic schedules: the verifier against explicit unrolling, and mutations of a tight plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import periodic_schedules, schedules, spoilt

from optsched.analysis.unroll import unroll
from optsched.errors import InputError
from optsched.model.schedule import Arcs, Csr, Objective, Resource, Schedule
from optsched.model.verify import Violation, verify

# two jobs through two devices for ever, both busy or switching all the time (18 + 2 * 2)
ROLLING = Schedule(
    resources=(Resource("gpu0", 20), Resource("gpu1", 10)),
    duration=np.array([3, 3, 6, 6] * 2),
    op_resources=Csr.of([[0], [1], [1], [0]] * 2),
    arcs=Arcs.of(
        [
            *[(0, 1, 1), (1, 2), (2, 3, 1), (4, 5, 1), (5, 6), (6, 7, 1)],
            *[(3, 0, 0, 1), (2, 1, 0, 1), (7, 4, 0, 1), (6, 5, 0, 1), (6, 0, 0, 1)],
        ]
    ),
    job=np.repeat([0, 1], 4),
    family=np.repeat([0, 1], 4),
    kind=np.array(["F", "F", "B", "B"] * 2),
    stage=np.array([0, 1, 1, 0] * 2),
    setup_out=np.full(8, 2),
    acquire=np.array([10, 10, 0, 0] * 2),
    free=np.array([0, 0, 10, 10] * 2),
    period=22,
    offset=np.array([0, 0, 1, 1, 0, 0, 0, 1]),
    sequences=Csr.of([[7, 4, 3, 0], [2, 5, 6, 1]]),
    start=np.array([17, 21, 2, 11, 6, 10, 13, 0]),
    objective=Objective("period", 22),
)


def facts(found: list[Violation]) -> set[tuple]:
    """Violations without their messages."""
    return {(v.kind, v.operations, v.resource, v.amount) for v in found}


def cycles_to_see(s: Schedule) -> int:
    """Cycles after which every constraint between operations has shown itself."""
    return int(s.offset.max(initial=0)) + 3


@given(periodic_schedules())
def test_correct_plans_are_accepted(plan: Schedule) -> None:
    """Plans laid out on a circle have no violation, nor have their cycles written out."""
    assert verify(plan) == []
    assert verify(unroll(plan, cycles_to_see(plan))) == []


@given(spoilt(periodic_schedules()))
def test_silent_exactly_if_silent_unrolled(plan: Schedule) -> None:
    """A plan can be repeated for ever if and only if its first cycles are correct one-shot."""
    found = [v for v in verify(plan) if v.kind != "objective"]
    drift = [v for v in found if v.kind == "balance"]
    if not drift:
        assert bool(found) == bool(verify(unroll(plan, cycles_to_see(plan))))
        return
    # what a resource gains or loses shows only after enough cycles, a gain only under a limit
    for v in drift:
        memory = plan.resources[v.resource].memory
        if memory or " loses " in v.message:
            held = cycles_to_see(plan) * int(plan.acquire.sum())  # at most, before the drift
            late = unroll(plan, cycles_to_see(plan) + (memory + held) // v.amount + 1)
            # an operation missing from its sequence does not count there
            assert any(w.kind in ("memory", "free", "sequence") for w in verify(late))


@given(spoilt(periodic_schedules()))
def test_same_rules_broken_as_unrolled(plan: Schedule) -> None:
    """What is wrong with a cycle is wrong in the cycles written out: operations and amounts."""
    found = facts(verify(plan))
    kinds = {"sequence", "order", "setup", "precedence"}
    if {"balance", "sequence"}.isdisjoint(f[0] for f in found):
        kinds |= {"memory", "free"}
    cycles = cycles_to_see(plan)
    _, operation = np.nonzero(np.arange(cycles)[:, None] >= plan.offset)
    flat = {
        (kind, tuple(int(operation[i]) for i in ids), r, amount)
        for kind, ids, r, amount in facts(verify(unroll(plan, cycles)))
    }
    assert {f for f in found if f[0] in kinds} <= flat


def with_arc_distance(tail: int, head: int, distance: int) -> Schedule:
    """The rolling plan with one other arc."""
    rows = np.stack(ROLLING.arcs, axis=1).tolist()
    rows = [[*r[:3], distance] if r[:2] == [tail, head] else r for r in rows]
    return replace(ROLLING, arcs=Arcs.of(rows))


def with_column(key: str, i: int, value: int) -> Schedule:
    """The rolling plan with one other number."""
    column = getattr(ROLLING, key).copy()
    column[i] = value
    return replace(ROLLING, **{key: column})


MUTATIONS = {
    "start moved": (
        with_column("start", 4, 5),
        {("overlap", (7, 4), 0, 1), ("precedence", (7, 4), None, 1)},
    ),
    "wrap setup ignored": (
        with_column("start", 0, 18),
        {("setup", (0, 7), 0, 1), ("precedence", (0, 1), None, 1)},
    ),
    "offset lowered": (
        with_column("offset", 7, 0),
        {("precedence", (6, 7), None, 20), ("liveness", (4, 5, 6, 7), None, 0)},
    ),
    "distance dropped": (
        with_arc_distance(6, 0, 0),
        {("precedence", (6, 0), None, 2)},
    ),
    "sequence rotated": (
        replace(ROLLING, sequences=Csr.of([[4, 3, 0, 7], [2, 5, 6, 1]])),
        {("order", (0, 7), 0, 22), ("liveness", (0, 3, 4, 7), None, 0)}
        | {("memory", (i,), 0, 10) for i in (4, 3, 0, 7)},
    ),
    "one free halved": (
        with_column("free", 6, 5),
        {("balance", (5, 6), 1, 5), ("memory", (1,), 1, 5)},
    ),
    "memory reduced": (
        replace(ROLLING, resources=(Resource("gpu0", 19), Resource("gpu1", 10))),
        {("memory", (i,), 0, 1) for i in (7, 4, 3, 0)},
    ),
    "another period claimed": (
        replace(ROLLING, objective=Objective("period", 21)),
        {("objective", (), None, 1)},
    ),
    "a makespan claimed": (
        replace(ROLLING, objective=Objective("makespan", 22)),
        {("objective", (), None, 0)},
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations(mutation: str) -> None:
    """Each is rejected with the operations and the amount."""
    plan, expected = MUTATIONS[mutation]
    found = facts(verify(plan))
    # a cycle may be told from any of its operations on
    assert {
        (k, tuple(sorted(i)) if k == "liveness" else i, r, a) for k, i, r, a in found
    } == expected


MESSAGES = {
    "wrap setup ignored": (
        "operation 7 (job 1, B, stage 0) of the next cycle starts 1 us after operation 0 (job 0, "
        "F, stage 0) ends on gpu0, but the setup between them takes 2 us: 1 us missing"
    ),
    "offset lowered": (
        "operation 7 (job 1, B, stage 0) starts at 0 us, but operation 6 (job 1, B, stage 1) must"
        " precede it and ends at 19 us and the lag is 1 us: 20 us missing (arc 5)"
    ),
    "one free halved": (
        "gpu1 gains 5 bytes a cycle: operation 5 (job 1, F, stage 1) acquires 10 and frees 0, "
        "operation 6 (job 1, B, stage 1) acquires 0 and frees 5"
    ),
}


@pytest.mark.parametrize("mutation", MESSAGES)
def test_messages(mutation: str) -> None:
    """They name operations, cycle and amount."""
    assert MESSAGES[mutation] in [v.message for v in verify(MUTATIONS[mutation][0])]


def test_balance_of_a_byte() -> None:
    """A byte that is kept is gained, one that was never taken is lost."""
    for freed, text in ((9, "gpu1 gains 1 byte a cycle: "), (11, "gpu1 loses 1 byte a cycle: ")):
        (found,) = [v for v in verify(with_column("free", 6, freed)) if v.kind == "balance"]
        assert found.message.startswith(text) and found.amount == 1


def circle(duration: list[int], start: list[int], period: int) -> Schedule:
    """Operations on one resource that repeat."""
    n = len(duration)
    return Schedule(
        resources=(Resource("gpu0"),),
        duration=np.array(duration),
        op_resources=Csr.of([[0]] * n),
        period=period,
        sequences=Csr.of([range(n)]),
        start=np.array(start),
    )


def test_an_operation_longer_than_the_period_meets_itself() -> None:
    """As long as the period is the most."""
    assert verify(circle([10], [0], 10)) == []
    assert facts(verify(circle([12], [0], 10))) == {("overlap", (0, 0), 0, 2)}


def test_overlap_of_no_neighbours() -> None:
    """Named once each: inside a cycle and, the other way round, across its end."""
    assert sorted(facts(verify(circle([9, 1, 1], [0, 2, 4], 20)))) == [
        ("overlap", (0, 1), 0, 7),
        ("overlap", (0, 2), 0, 5),
    ]
    assert len(verify(circle([9, 1, 1], [0, 2, 4], 20))) == 2
    found = verify(circle([4, 18, 1], [0, 3, 10], 20))
    assert facts(found) == {
        ("overlap", (0, 1), 0, 1),
        ("overlap", (1, 2), 0, 11),
        ("overlap", (1, 0), 0, 1),
    }
    across = {v.operations: v.message for v in found if "of the next cycle starts" in v.message}
    assert [*across] == [(1, 0)] and across[1, 0].startswith("operation 0 ")


def test_deadlock_without_tokens() -> None:
    """Empty operations at one instant: all times hold, yet each waits for the other."""
    plan = Schedule(
        resources=(Resource("gpu0"),),
        duration=np.array([0, 0]),
        op_resources=Csr.of([[0], [0]]),
        arcs=Arcs.of([(0, 1)]),
        period=5,
        sequences=Csr.of([[1, 0]]),
        start=np.array([2, 2]),
    )
    assert facts(verify(plan)) == {("liveness", (0, 1), None, 0)}
    waits_a_cycle = replace(plan, offset=np.array([0, 1]))
    assert verify(waits_a_cycle) == []


def test_huge_offsets_are_exact() -> None:
    """Offsets and distances up to 2^53 times periods up to 2^53 do not wrap round."""
    most = 2**53
    plan = Schedule(
        resources=(Resource("gpu0", most),),
        duration=np.array([1, 1]),
        op_resources=Csr.of([[0], [0]]),
        arcs=Arcs.of([(0, 1)]),
        acquire=np.array([most, 0]),
        free=np.array([0, most]),
        period=most,
        offset=np.array([0, most]),
        sequences=Csr.of([[0, 1]]),
        start=np.array([0, 1]),
    )
    held = most * most
    assert facts(verify(plan)) == {("memory", (0,), 0, held), ("memory", (1,), 0, held)}
    backwards = replace(plan, offset=np.array([most, 0]))
    assert ("precedence", (0, 1), None, held) in facts(verify(backwards))


@given(periodic_schedules(), st.integers(1, 4))
def test_unroll_repeats_everything(plan: Schedule, cycles: int) -> None:
    """Every operation is there once a cycle from its offset on, with its own iteration number."""
    flat = unroll(plan, cycles)
    seen = sorted(
        zip(flat.stage.tolist(), flat.start.tolist(), flat.iteration.tolist(), strict=True)
    )
    assert seen == sorted(
        (i, int(plan.start[i]) + c * plan.period, c - int(plan.offset[i]))
        for i in range(plan.n_operations)
        for c in range(int(plan.offset[i]), cycles)
    )
    assert [[int(flat.stage[i]) for i in row] for row in flat.sequences.to_lists()] == [
        [i for c in range(cycles) for i in row if c >= plan.offset[i]]
        for row in plan.sequences.to_lists()
    ]


@given(schedules())
@few_examples
def test_unroll_refuses(schedule: Schedule) -> None:
    """One-shot schedules, instances and silly numbers of cycles get a sentence."""
    with pytest.raises(InputError, match="no period"):
        unroll(schedule, 2)
    with pytest.raises(InputError, match="no sequences"):
        unroll(ROLLING.graph(), 2)
    for cycles in (0, -1, True, 1.5, 10**18):
        with pytest.raises(InputError, match="cycles"):
            unroll(ROLLING, cycles)
