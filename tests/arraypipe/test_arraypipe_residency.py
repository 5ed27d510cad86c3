"""Residency without torch: replacement is optimal, copies are in order, times are as calculated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from arraypipe_plans import random_rolling
from depth import depth
from exact_residency import Device, Phase, TooLarge, drawn
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.executor.copy_bound import copy_bound
from optsched import InputError, JobArray, solve
from optsched.arraypipe import compile
from optsched.arraypipe.memory.budget import Room, StageBytes, budget
from optsched.arraypipe.memory.copies import Carrier, OutOfSlots, Rule, Transfers
from optsched.arraypipe.memory.engines import IN, HostLink, SimulatedEngine
from optsched.arraypipe.memory.residency import ResidencyPlan, divide
from optsched.arraypipe.memory.types import CHANGES, NEEDS, POOLS, State, Visit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ONE = HostLink(1e9, 1e9)  # a byte a nanosecond


def states(n: int, weights: int = 1, moments: int = 0) -> list[State]:
    """Equal states."""
    return [State(j, 0, (weights, 0, 0, moments)) for j in range(n)]


def reads(row: Sequence[int], duration: float = 1.0) -> list[Visit]:
    """Visits that change nothing that has bytes."""
    return [Visit(s, "R", duration_ns=duration) for s in row]


def updates(row: Sequence[int], duration: float = 1.0) -> list[Visit]:
    """Visits that change the weights."""
    return [Visit(s, "U", duration_ns=duration) for s in row]


# replacement


def moves(visits: Sequence[Visit], *rules: Rule, horizon: int = 30) -> list[Any]:
    """What every visit took in the first pool."""
    transfers = Transfers(rules, horizon, SimulatedEngine(ONE), Carrier(states(9)))
    transfers.renew(iter(visits))
    found = []
    for visit in visits:
        found.append(transfers.enter(visit).moves[0])
        transfers.leave()
    return found


def fewest_by_search(row: Sequence[int], slots: int) -> int:
    """Fewest loads to get through the sequence from empty slots."""
    reached = {frozenset[int](): 0}
    for state in row:
        following: dict[frozenset[int], int] = {}
        for held, cost in reached.items():
            options = [held - {victim} | {state} for victim in held]
            if state in held:
                options = [held]
            elif len(held) < slots:
                options = [held | {state}]
            for option in options:
                least = following.get(option, math.inf)
                following[option] = int(min(least, cost + (state not in held)))
        reached = following
    return min(reached.values())


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 3))
def test_no_residency_plan_loads_less(row: list[int], slots: int) -> None:
    """Brute force over all plans of up to three jobs and eight visits: Belady's rule is optimal."""
    loads = sum(bool(move.fetch) for move in moves(reads(row), Rule(slots), Rule(1)))
    assert loads == fewest_by_search(row, slots)


FORWARD = [Visit(s, "F", 1, True) for s in range(3)]
BACKWARD = [Visit(0, "B", -1), Visit(1, "B", -1)]


@pytest.mark.parametrize(
    ("visits", "rule", "victims"),
    [
        # of two that are never needed again the one that need not be written back
        ([*updates([0]), *reads([1, 2])], Rule(2), [-1, -1, 1]),
        # what is needed last; with a lead the state of the turn before stays
        (reads([0, 1, 2, 3] * 3), Rule(2), [-1, -1, 1, 2, -1, 0, 1, -1]),
        (reads([0, 1, 2, 3] * 2), Rule(2, 1), [-1, -1, 0, 1, 2, 3, 0, 1]),
        (reads([0, 1, 2, 3] * 3), Rule(2, 0, (0,)), [-1, -1, 1, 2, -1, 3]),
        # between F and B a state cannot leave
        ([FORWARD[0], *reads([1, 2, 1]), BACKWARD[0]], Rule(2), [-1, -1, 1, 2, -1]),
    ],
)  # fmt: skip
def test_victims(visits: list[Visit], rule: Rule, victims: list[int]) -> None:
    """Which states leave for those that are visited."""
    assert [move.victim for move in moves(visits, rule, Rule(1))][: len(victims)] == victims


def test_more_graphs_than_slots() -> None:
    """No state may leave: that is an error of the plan."""
    with pytest.raises(OutOfSlots, match="all 2 slots"):
        moves([*FORWARD, *BACKWARD], Rule(2), Rule(1))


# copies are in order


class Ledger(Carrier):
    """A carrier of version numbers: the place of every piece says whose and which version it is."""

    def __init__(self, rows: Sequence[State]) -> None:
        super().__init__(rows)
        self.store = {(s, piece): 0 for s in range(len(rows)) for piece in range(4)}
        self.slot: dict[tuple[int, int], tuple[int, int]] = {}
        self.latest = dict(self.store)

    def mover(
        self, direction: str, slot: int, state: int, piece: int, start: int, stop: int
    ) -> Callable[[], None]:
        """Move a version number."""

        def move() -> None:
            if direction == IN:
                self.slot[slot, piece] = state, self.store[state, piece]
            else:
                owner, version = self.slot[slot, piece]
                assert owner == state
                self.store[state, piece] = version

        move.place = (slot, piece, start, stop)  # type: ignore[attr-defined]
        return move

    def run(self, visit: Visit, slots: dict[int, int]) -> None:
        """The block: what it needs is there, newest version; what it changes gets a newer one."""
        for piece in NEEDS[visit.kind]:
            if self.states[visit.state].bytes[piece]:
                place = slots[piece], piece
                assert self.slot[place] == (visit.state, self.latest[visit.state, piece])
                if piece in CHANGES[visit.kind]:
                    self.latest[visit.state, piece] += 1
                    self.slot[place] = visit.state, self.latest[visit.state, piece]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[State], list[Visit], list[Rule]]:
    """Random sequences of whole iterations with recompute, in random order."""
    n = draw(st.integers(2, 5))
    rows = [
        State(j, 0, (draw(st.integers(1, 5)), 0, draw(st.integers(0, 2)), draw(st.integers(0, 9))))
        for j in range(n)
    ]
    lines = [
        [kind for _ in range(draw(st.integers(1, 3))) for kind in ("F", "B", "U")] for _ in rows
    ]
    turns = draw(st.permutations([j for j, line in enumerate(lines) for _ in line]))
    visits = [
        Visit(j, lines[j].pop(0), duration_ns=draw(st.integers(0, 9)), operation=i)
        for i, j in enumerate(turns)
    ]
    rules = []
    for _ in POOLS:
        slots = draw(st.integers(1, n))
        fixed = tuple(range(draw(st.integers(0, slots - 1))))
        rules.append(Rule(slots, draw(st.integers(0, 3)), fixed))
    return rows, visits, rules


class Witness(SimulatedEngine):
    """Notes when every range of bytes of a slot is written and read."""

    def __init__(self) -> None:
        super().__init__(HostLink(1e9, 2e9))
        self.uses: list[tuple[str, Any, float, float]] = []

    def copy(self, direction: str, size: int, action: Any, after: Any, state: int = -1) -> float:
        """Note it."""
        end = super().copy(direction, size, action, after, state)
        self.uses.append(
            (direction, action.place, end - size * 1e9 / self.bandwidth[direction], end)
        )
        return end

    def run(self, visit: Visit, slots: dict[int, int], sizes: Sequence[int]) -> None:
        """A block."""
        begin = self.now_ns
        self.block(visit.duration_ns)
        for piece in NEEDS[visit.kind]:
            kind = "change" if piece in CHANGES[visit.kind] else "use"
            self.uses.append((kind, (slots[piece], piece, 0, sizes[piece]), begin, self.now_ns))


@given(runs(), st.data())
def test_every_block_finds_the_newest_bytes(
    drawn: tuple[list[State], list[Visit], list[Rule]], data: st.DataObject
) -> None:
    """Whatever is passed over or comes unannounced; at the end the stores have everything.

    On the clock nothing is overwritten before its block or its copy out is over.
    """
    rows, visits, rules = drawn
    told = data.draw(st.lists(st.booleans(), min_size=len(visits), max_size=len(visits)))
    done = data.draw(st.lists(st.booleans(), min_size=len(visits), max_size=len(visits)))
    if data.draw(st.booleans()):
        told = done = [True] * len(visits)
    ledger, engine = Ledger(rows), Witness()
    chunk, horizon = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 30))
    transfers = Transfers(rules, horizon, engine, ledger, chunk)
    transfers.renew(iter([v for v, known in zip(visits, told, strict=True) if known]))
    for visit, runs in zip(visits, done, strict=True):
        if runs:
            decision = transfers.enter(visit)
            assert decision.visit.operation == visit.operation
            slots = {p: m.slot.index for m in decision.moves for p in POOLS[m.slot.pool]}
            ledger.run(visit, slots)
            engine.run(visit, slots, rows[visit.state].bytes)
            transfers.leave()
    transfers.flush()
    assert ledger.store == ledger.latest
    for first in [use for use in engine.uses if use[0] in (IN, "change")]:
        for second in engine.uses:
            if first is not second and first[1][:2] == second[1][:2]:
                apart = first[1][3] <= second[1][2] or second[1][3] <= first[1][2]
                assert apart or first[3] <= second[2] or second[3] <= first[2]


# closed forms and bounds


def period(rows: list[State], visits: list[Visit], rules: list[Rule], link: HostLink) -> float:
    """Time of a late cycle, pieces copied whole."""
    return ResidencyPlan(tuple(rows), tuple(visits), tuple(rules)).simulate(link, 40).time_ns


@given(st.integers(2, 6), st.integers(1, 9), st.integers(0, 30))
def test_closed_forms(n: int, size: int, block: int) -> None:
    """One slot: copies and blocks add up; with more the longer of both, exactly."""
    rows, row = states(n, size), list(range(n))
    one, two, three = ([Rule(k, k - 1), Rule(1)] for k in (1, 2, 3))
    changed, read = updates(row, block), reads(row, block)
    assert period(rows, changed, one, ONE) == n * (2 * size + block)
    assert period(rows, read, one, ONE) == n * (size + block)
    if n > 2:
        assert period(rows, read, two, ONE) == n * max(size, block)
    if n > 3:
        assert period(rows, changed, three, ONE) == n * max(size, block)


def test_chunks_overlap_both_directions_of_a_swap() -> None:
    """In two slots cut copies reach, but for one chunk, what whole ones need three slots for."""
    rows, visits = states(6, 64), updates(range(6), 64.0)
    plan = ResidencyPlan(tuple(rows), tuple(visits), (Rule(2, 1), Rule(1)), 1)
    assert 6 * 64 <= plan.simulate(ONE, 40).time_ns <= 6 * 66


# residency, refusals and the budget


def test_what_fits_is_never_copied() -> None:
    """With room for all states there are no slots and no copies."""
    rows, visits = states(4, 10, 20), updates(range(4))
    plan = ResidencyPlan.compile(rows, visits, 120, ONE)
    assert plan.rules == ()
    assert ResidencyPlan.compile(rows, visits, 119, ONE).rules


def test_room_goes_to_weights_first() -> None:
    """One slot for moments leaves room for weights; all divisions are maximal."""
    rows = states(6, 10, 30)
    ways = divide(rows, reads(range(6)), 100, "gpu0")
    assert ways == [(6, 1), (4, 2), (1, 3)]
    plan = ResidencyPlan.compile(rows, updates(range(6)), 100, ONE)
    weights, moments = (rule.slots for rule in plan.rules)
    assert weights * 10 + moments * 30 <= 100


def test_refusals_say_how_many_jobs_would_fit() -> None:
    """Too little for one state; more pinned states than slots: device, block, bytes, jobs."""
    rows = states(4, 10, 30)
    with pytest.raises(InputError, match=r"gpu7 has 39 bytes .* take 40; 0 jobs would fit"):
        ResidencyPlan.compile(rows, reads(range(4)), 39, ONE, device="gpu7")
    large = [*rows[:2], State(2, 5, (10, 0, 0, 31)), State(3, 5, (10, 0, 0, 0))]
    with pytest.raises(
        InputError, match=r"\(at U of job 2, stage 5: 41\) take 41; 2 jobs would fit"
    ):
        ResidencyPlan.compile(large, updates(range(4)), 40, ONE)
    visits = [Visit(s, "F", 1, True) for s in range(4)] + [Visit(s, "B", -1) for s in range(4)]
    with pytest.raises(
        InputError,
        match=r"at F of job 3, stage 0, 4 states are between a forward and its backward on gpu7 "
        r"\(40 bytes of weights\), .* 60 bytes .* 3 slots; 3 jobs would fit, or use recompute=True",
    ):
        ResidencyPlan.compile(rows, visits, 60, ONE, device="gpu7")


def plan_of(jobs: int = 3, **options: Any) -> Any:
    """A compiled plan of two stages with bytes."""
    problem = JobArray([[2, 2]] * jobs, [[4, 4]] * jobs, activation=[[100, 50]] * jobs, **options)
    return compile(solve(problem, "dispatch").schedule)


def test_budget_adds_up() -> None:
    """Activations are the peak of a prefix sum; what a device has less of all is for states."""
    plan = plan_of()
    table = budget(plan, 0, {})
    assert 100 <= table.activations <= 300
    assert table.total == table.activations + table.workspace
    assert "receive windows" in table._replace(windows=7).table()
    room = Room(1000)
    assert room.for_states(plan, 0, {}, None) == 1000 - table.total
    assert room.for_states(plan, 0, {}, lambda jobs: (7, 5)) == 1000 - table.total - 12
    gpu = Room(10**11, cuda=1)
    assert gpu.needs(plan, 0, {}, None, range(3)).reserve > 5 * 10**9
    sentence = r"needs \d+ bytes beside the states and has 120; 1 of 3 jobs would fit\ngradients"
    with pytest.raises(InputError, match=sentence):
        Room(120).for_states(plan, 0, {}, None)


@given(st.sampled_from(["fused", "block"]), st.integers(1, 3), st.integers(0, 10**6))
def test_gradients_are_held_from_the_first_backward_to_the_update(
    mode: str, parts: int, seed: int
) -> None:
    """The budget has the peak that going through many cycles finds, job by job."""
    problem = JobArray(
        [[2, 2]] * 3, [[4, 4]] * 3, update=[[1, 1]] * 3, update_mode=mode, micro_batches=parts,
        objective="period",
    )  # fmt: skip
    plan = compile(random_rolling(problem, seed=seed))
    beside = {(j, s): StageBytes(10**j, 5, 7) for j in range(3) for s in range(2)}
    table = budget(plan, 0, beside)
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
    assert table.gradients == peak >= 100
    assert table.total == peak


def test_activations_are_those_measured_if_the_schedule_has_none() -> None:
    """Held counts are those of the order; recomputation keeps inputs and needs the rest once."""
    with_bytes = plan_of()
    problem = JobArray([[2, 2]] * 3, [[4, 4]] * 3)
    bare = compile(solve(problem, "dispatch").schedule)
    beside = {(j, s): StageBytes(saved=100, inputs=30) for j in range(3) for s in range(2)}
    table = budget(bare, 0, beside)
    kept = table.activations
    assert table.workspace == 0
    assert kept % 100 == 0 < kept <= 300
    again = {pair: row._replace(recompute=True) for pair, row in beside.items()}
    assert budget(bare, 0, again)[1:3] == (kept * 30 // 100, 100)
    assert budget(with_bytes, 0, beside) == budget(with_bytes, 0, {})


def test_moments_have_a_pool_of_their_own() -> None:
    """Only updates copy moments, however often weights come and go."""
    rows = states(4, 1, 100)
    visits = [v for j in range(4) for v in (*reads([j]), *reads([(j + 2) % 4]), *updates([j]))]
    plan = ResidencyPlan(tuple(rows), tuple(visits), (Rule(2), Rule(1)))
    assert 4 * 100 < plan.simulate(ONE, 6).inward < 5 * 100


# plans are close to the best, which a search finds


def test_plans_of_tiny_devices_are_close_to_the_best() -> None:
    """Bounds <= the best of all plans, found by search <= the plan <= 1.15 x the best."""
    seen = 0
    for seed in range(depth(10, 48)):
        states, visits, slots, device = drawn(seed, most=6_000)
        try:
            best = device.least_period()
        except TooLarge:
            continue
        seen += 1
        compute = sum(v.duration_ns for v in visits)
        plan = ResidencyPlan.compile(states, visits, None, ONE, slots=slots, chunk=1)
        assert max(compute, copy_bound(states, visits, slots, ONE)) <= best + 1e-6
        assert best - 1e-9 <= plan.simulate(ONE).time_ns <= 1.15 * best
    assert seen >= 3


def test_the_search_of_all_plans_in_closed_form() -> None:
    """The oracle itself: one slot, two slots, and all states in slots."""
    phases = [Phase(j, 3, False) for j in range(4)]
    assert Device(phases, 1, 5, late=False).least_period() == 4 * 8
    assert Device(phases, 2, 5, late=False).least_period() == 4 * 5
    assert Device(phases, 4, 2, late=False).least_period() == 4 * 3
    changed = [Phase(j, 3, True) for j in range(4)]
    assert Device(changed, 1, 1, late=False).least_period() == 4 * 5
    # moments are needed at the end of a block only: copies hide behind it even in one slot
    assert Device(changed, 1, 1, late=True).least_period() == 4 * 3
