"""Residency without torch: replacement is optimal, copies are in order, times are as calculated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from arraypipe_plans import in_turn, random_rolling
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.executor.memory_engine import Simulated, SimulatedEngine, simulate
from optsched import InputError, JobArray
from optsched.arraypipe import compile_plan
from optsched.arraypipe.memory.budget import (
    Access,
    DeviceBytes,
    Limits,
    Residency,
    StageBytes,
    budget,
)
from optsched.arraypipe.memory.transfers import IN

if TYPE_CHECKING:
    from collections.abc import Sequence


def reads(row: Sequence[int]) -> list[Access]:
    """Accesses that change nothing."""
    return [Access(s, "R", operation=i) for i, s in enumerate(row)]


def loaded(accesses: Sequence[Access], slots: int, horizon: int = 30) -> list[int]:
    """States in the order in which they are copied in, from empty slots."""
    engine = SimulatedEngine(1, 1)
    transfers = Simulated([(1, 1)] * 9, (slots, 1), horizon, engine, 1)
    transfers.announce(iter(accesses))
    for access in accesses:
        transfers.take(access)
        transfers.release()
    return [row[3] for row in engine.queued if row[0] == IN]


def fewest_by_search(row: Sequence[int], slots: int) -> int:
    """Fewest loads to get through the sequence, by brute force; the last state used stays."""
    reached = {(frozenset[int](), -1): 0}
    for state in row:
        following: dict[Any, int] = {}
        for (held, last), cost in reached.items():
            options = [held - {v} | {state} for v in held if v != last or len(held) == 1]
            if state in held:
                options = [held]
            elif len(held) < slots:
                options = [held | {state}]
            for option in options:
                least = following.get((option, state), math.inf)
                following[option, state] = int(min(least, cost + (state not in held)))
        reached = following
    return min(reached.values())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 3))
def test_no_order_of_replacement_loads_less(row: list[int], slots: int) -> None:
    """Brute force over all replacements of up to four states that keep the last one used."""
    assert len(loaded(reads(row), slots)) == fewest_by_search(row, slots)


def test_a_state_between_forward_and_backward_stays() -> None:
    """Although another one is needed later."""
    first, last = Access(0, "F", 1, True, 0), Access(0, "B", -1, operation=9)
    assert loaded([first, *reads([1, 2, 1]), last], 2) == [0, 1, 2, 1]


# copies are in order


class Ledger(Simulated):
    """Version numbers instead of bytes: every byte of a slot or store says whose and how new."""

    def __init__(self, rows: Sequence[tuple[int, int]], *given: Any) -> None:
        super().__init__(rows, *given)
        self.store = {
            (s, p, b): 0 for s, row in enumerate(rows) for p in (0, 1) for b in range(row[p])
        }
        self.slot: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.latest = dict(self.store)

    def move(
        self, direction: str, piece: int, slot: int, state: int, start: int, stop: int
    ) -> None:
        """Move version numbers."""
        for b in range(start, stop):
            if direction == IN:
                self.slot[piece, slot, b] = state, self.store[state, piece, b]
            else:
                owner, self.store[state, piece, b] = self.slot[piece, slot, b]
                assert owner == state

    def run(self, access: Access, slots: Sequence[int]) -> None:
        """The block: what it needs is there, newest version; an update makes a newer one."""
        for piece, slot in enumerate(slots):
            for b in range(self.rows[access.state][piece]):
                at, key = (piece, slot, b), (access.state, piece, b)
                assert self.slot[at] == (access.state, self.latest[key])
                if access.kind == "U":
                    self.latest[key] += 1
                    self.slot[at] = access.state, self.latest[key]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[Access], list[int]]:
    """Random sequences of whole iterations with recompute, in random order."""
    n = draw(st.integers(2, 5))
    rows = [(draw(st.integers(1, 9)), draw(st.integers(0, 9))) for _ in range(n)]
    lines = [[k for _ in range(draw(st.integers(1, 3))) for k in ("F", "B", "U")] for _ in rows]
    turns = draw(st.permutations([j for j, line in enumerate(lines) for _ in line]))
    accesses = [Access(j, lines[j].pop(0), operation=i) for i, j in enumerate(turns)]
    return rows, accesses, [draw(st.integers(1, n)) for _ in range(2)]


@given(runs(), st.data())
def test_every_block_finds_the_newest_bytes(drawn: Any, data: st.DataObject) -> None:
    """Whatever is skipped or comes unannounced; at the end the stores have everything.

    On the clock no range of a slot is overwritten before its block or its copy out is over.
    """
    rows, accesses, slots = drawn
    flags = st.lists(st.booleans(), min_size=len(accesses), max_size=len(accesses))
    known = data.draw(st.sampled_from(["all", "some"]))
    announced = [True] * len(accesses) if known == "all" else data.draw(flags)
    done = [True] * len(accesses) if known == "all" else data.draw(flags)
    engine = SimulatedEngine(1e9, 2e9)
    ledger = Ledger(rows, slots, data.draw(st.integers(1, 30)), engine, 1)
    ledger.announce(iter([a for a, known in zip(accesses, announced, strict=True) if known]))
    uses: list[tuple[str, int, int, int, int, float, float]] = []
    for access, runs in zip(accesses, done, strict=True):
        if runs:
            found = ledger.take(access)
            ledger.run(access, found)
            began = engine.now_ns
            engine.block(data.draw(st.integers(0, 9)))
            ledger.release()
            for piece, slot in enumerate(found):
                kind = "change" if access.kind == "U" else "use"
                uses.append((kind, piece, slot, 0, 99, began, engine.now_ns))
    ledger.flush()
    assert ledger.store == ledger.latest
    uses += [(*row[:3], *row[4:]) for row in engine.queued]
    for first in [use for use in uses if use[0] in (IN, "change")]:
        for second in uses:
            if first is not second and first[1:3] == second[1:3]:
                apart = first[4] <= second[3] or second[4] <= first[3]
                assert apart or first[6] <= second[5] or second[6] <= first[5]


def test_a_state_made_in_a_slot_waits_for_the_copy_of_a_skipped_block() -> None:
    """The state of job 0 is still on its way when the first state of job 1 is made there."""
    engine = SimulatedEngine(1e9, 2e9)
    ledger = Ledger([(1, 8), (8, 0)], [2, 1], 2, engine, 1)
    first, skipped, update = Access(1, "B"), Access(0, "U"), Access(1, "U", operation=2)
    ledger.announce(iter([first, skipped, update]))
    ledger.take(first)
    engine.block(1)
    ledger.release()
    ledger.take(update)
    assert engine.now_ns >= max(row[-1] for row in engine.queued if row[:3] == (IN, 1, 0))


@given(st.integers(3, 6), st.integers(1, 9), st.integers(0, 30))
def test_closed_forms(n: int, size: int, block: int) -> None:
    """One slot: copies and blocks add up; with two the longer of both, exactly."""
    rows, accesses = [(size, 0)] * n, reads(range(n))
    changed = [access._replace(kind="U") for access in accesses]

    def time_ns(row: list[Access], slots: int) -> float:
        return simulate(rows, row, [block] * n, (slots, 1), 1e9, least_chunk=99).time_ns

    assert time_ns(changed, 1) == n * (2 * size + block)
    assert time_ns(accesses, 1) == n * (size + block)
    assert time_ns(accesses, 2) == n * max(size, block)


# residence, refusals and the budget


def decided(
    n: int, limit: int, row: StageBytes, breadth: bool = False, **changes: Any
) -> tuple[Residency, Limits, Any]:
    """What is decided for so many equal jobs of one stage, to check other plans against."""
    problem = JobArray([[1]] * n, [[1]] * n, objective="period")
    plan = compile_plan(in_turn(problem, breadth))
    known = {(j, 0): row._replace(title=f"job{j}") for j in range(n)}
    device = DeviceBytes("gpu7", limit, **changes).first(plan, 0, known)
    assert device.decided is not None
    return device.decided, Limits({0: device}, known), plan


STATE = StageBytes(10, 30, recompute=True)


def test_slots_of_a_device() -> None:
    """What fits is never copied; else one slot for moments, and the others for weights."""
    assert decided(6, 240, STATE)[0] == Residency()
    rows = {239: (6, 5), 100: (6, 1), 40: (1, 1)}
    assert {limit: decided(6, limit, STATE)[0].slots for limit in rows} == rows
    kept = STATE._replace(resident=5)  # stays, in no slot
    assert decided(6, 99, kept)[0] == ((3, 1), (10, 30))
    assert decided(6, 135, kept, windows=20, outboxes=7, shared=9)[0].slots == (3, 1)


KEEPS = STATE._replace(recompute=False)


@pytest.mark.parametrize(
    ("row", "limit", "sentence"),
    [
        (STATE, 39, r"gpu7 has 39 bytes for states, slots take 40 \(the largest state: job job0, "
                    r"stage 0\); 0 of 4 jobs would fit\ngradients"),
        (KEEPS, 60, "at F of job job3, stage 0, 4 states are between a forward and its backward "
                    "on gpu7, which has 3 slots; use recompute=True; 3 of 4 jobs would fit"),
        (KEEPS._replace(saved=50), 140, "gpu7 needs 200 bytes in addition to the states and has "
                                        "140; 1 of 4 jobs would fit"),
        (STATE._replace(problem="cannot be moved"), 100, "cannot be moved; 0 of 4 jobs"),
    ],
)  # fmt: skip
def test_refusals_say_how_many_jobs_would_fit(row: StageBytes, limit: int, sentence: str) -> None:
    """Too little for one state, more pinned states than slots, too little beside the states."""
    with pytest.raises(InputError, match=sentence):
        decided(4, limit, row, breadth=True)


@pytest.mark.parametrize(
    ("limit", "changed", "sentence"),
    [
        (60, STATE, ""),
        (60, STATE._replace(moments=31), "the moments of job late, stage 0 take 31 bytes, a slot "
                                         "has 30"),
        (60, KEEPS, "at F of job late, stage 0, 4 states are between"),
        (60, STATE._replace(gradients=61), "gpu7 needs 61 bytes in addition to the states"),
        (60, STATE._replace(resident=1), "gpu7 has 59 bytes for states, slots take 60"),
        (160, STATE._replace(resident=1), "gpu7 has 160 bytes for states, which take 161"),
    ],
)  # fmt: skip
def test_later_jobs_are_checked(limit: int, changed: StageBytes, sentence: str) -> None:
    """Against the slots that there are; what has ended does not count."""
    _, limits, plan = decided(4, limit, STATE, breadth=True)
    limits.known |= {(j, 0): changed._replace(title="late") for j in range(4, 8)}
    segment: Any = type("Segment", (), {"plan": plan, "slots": (4, 1, 2, 3)})()
    if changed == KEEPS:
        segment.slots = (4, 5, 6, 7)
    refusal = limits.refusal(segment, range(4))
    assert sentence in refusal and bool(sentence) == bool(refusal)
    assert limits.refusal(segment, [1, 2, 3]) == "" or changed == KEEPS


@given(st.sampled_from(["fused", "block"]), st.integers(1, 3), st.integers(0, 10**6))
def test_gradients_are_held_from_the_first_backward_to_the_update(
    mode: str, parts: int, seed: int
) -> None:
    """The budget has the peak that going through many cycles finds, job by job."""
    problem = JobArray(
        [[2, 2]] * 3, [[4, 4]] * 3, update=[[1, 1]] * 3, update_mode=mode, micro_batches=parts,
        objective="period",
    )  # fmt: skip
    plan = compile_plan(random_rolling(problem, seed=seed))
    known = {
        (j, s): StageBytes(gradients=10**j, tied=5, masters=7) for j in range(3) for s in range(2)
    }
    table = budget(plan, 0, known)
    held: set[int] = set()
    peak = 0
    for cycle_number in range(max(plan.latest) + 3):
        for b in (plan.blocks[i] for i in plan.sequences[0]):
            if cycle_number < b.offset:
                continue
            held |= {b.job} if b.kind == "B" else set()
            last = b.kind == "B" and b.microbatch + 1 == parts
            ends = b.kind == "U" or (last and mode == "fused")
            passing = max(5 * (b.kind == "B"), 7 * ends)
            peak = max(peak, sum(10**j for j in held) + passing)
            held -= {b.job} if ends else set()
    assert table.gradients == table.total == peak >= 100
