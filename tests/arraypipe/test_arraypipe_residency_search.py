"""The planner of slots: its clock is the engine's, its plans are close to the best, bounds hold."""

from __future__ import annotations

import math
from itertools import cycle, islice

import pytest
from depth import depth
from exact_residency import Device, Phase, TooLarge, drawn
from hypothesis import given
from hypothesis import strategies as st

from optsched.arraypipe.residency import (
    HostLink,
    ResidencyPlan,
    copy_bound,
    simulate,
)
from optsched.arraypipe.states.replacement import (
    OutOfSlots,
    Replacement,
    Rule,
    mark,
)
from optsched.arraypipe.states.rule_search import RuleSearch
from optsched.arraypipe.states.visits import State, Visit

ONE = HostLink(1.0, 1.0)


@st.composite
def cycles(draw: st.DrawFn) -> tuple[list[State], list[Visit], tuple[int, int]]:
    """States of any sizes, an order of their blocks with or without recompute, slots."""
    n = draw(st.integers(2, 5))
    states = [
        State(j, 0, (draw(st.integers(1, 6)), *(draw(st.integers(0, 5)) for _ in range(3))))
        for j in range(n)
    ]
    kept = [draw(st.booleans()) for _ in range(n)]
    turns = draw(st.permutations([j for j in range(n) for _ in range(2)]))
    visits, seen = [], set()
    for i, j in enumerate(turns):
        time = {"duration": draw(st.integers(0, 9)), "gap": draw(st.sampled_from([0, 0, 3]))}
        if j not in seen:
            seen.add(j)
            visits.append(Visit(j, "F", int(kept[j]), True, **time, operation=i))
        else:
            visits.append(Visit(j, "B", -int(kept[j]), **time, operation=i))
            visits.append(Visit(j, "U", operation=i))
    return states, visits, (draw(st.integers(1, n)), draw(st.integers(1, n)))


@given(cycles(), st.data())
def test_the_compiled_clock_is_that_of_the_engine(
    drawn: tuple[list[State], list[Visit], tuple[int, int]], data: st.DataObject
) -> None:
    """Any rules, marks included: the kernel has the times of `simulate`, or refuses as it does."""
    states, visits, slots = drawn
    rules = []
    for count in slots:
        fixed = tuple(range(data.draw(st.integers(0, count - 1))))
        marked = data.draw(st.lists(st.booleans(), min_size=len(visits), max_size=len(visits)))
        leaving = frozenset(mark(v) for v, yes in zip(visits, marked, strict=True) if yes)
        rules.append(Rule(count, data.draw(st.integers(0, 2)), fixed, leaving))
    chunk = data.draw(st.integers(0, 4))
    link = HostLink(1.0, data.draw(st.sampled_from([0.5, 1.0, 4.0])), data.draw(st.integers(0, 1)))
    tried = RuleSearch(states, visits, link.engine()).tried(tuple(rules), chunk)
    try:
        ends, _ = simulate(states, visits, rules, chunk, link, 9)
    except OutOfSlots:
        assert tried.time == math.inf
    else:
        assert tried.time == pytest.approx((ends[5] - ends[2]) / 3, rel=1e-5)


def test_marked_states_leave_first() -> None:
    """Of those the one used longest ago; without marks it is Belady's rule again."""
    row = [Visit(s, "R", operation=i) for i, s in enumerate([0, 1, 2, 3])]
    leaving = frozenset(mark(visit) for visit in row[:2])
    marked = Replacement(islice(cycle(row), 40), [Rule(3, 0, (), leaving), Rule(1)], 9)
    victims = [d.moves[0].victim for d in islice(iter(marked.decide, None), 6)]
    assert victims == [-1, -1, -1, 0, 1, 0]
    marked.unmark()
    plain = Replacement(islice(cycle(row), 40), [Rule(3), Rule(1)], 9)
    for decisions in (marked, plain):
        last = [d.moves[0].victim for d in islice(iter(decisions.decide, None), 24)][-12:]
        assert sum(victim >= 0 for victim in last) == 4  # one of three visits, the fewest


def test_a_job_that_has_ended_does_not_keep_its_slot() -> None:
    """Its state leaves before marked ones that were used after it."""
    row = [Visit(s, "R", operation=i) for i, s in enumerate([3, 0, 1, 2])]
    leaving = frozenset(mark(visit) for visit in row[1:])
    future = [row[0], *row[1:] * 4]
    decisions = Replacement(iter(future), [Rule(3, 0, (), leaving), Rule(1)], 9)
    assert [d.moves[0].victim for d in islice(iter(decisions.decide, None), 8)] == [
        -1, -1, -1, 3, -1, -1, -1, -1,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "size", "slots"), [(16, 64, 6), (12, 40, 4), (12, 64, 5)])
def test_marks_pay_where_the_link_is_busy(jobs: int, size: int, slots: int) -> None:
    """All F, then all B: no lead without marks is as fast, and the choice is always the same."""
    states = [State(j, 0, (size, 0, 0, 0)) for j in range(jobs)]
    visits = [Visit(j, "F", duration=14) for j in range(jobs)]
    visits += [v for j in range(jobs) for v in (Visit(j, "B", duration=42), Visit(j, "U"))]
    plan = ResidencyPlan.compile(states, visits, None, ONE, slots=(slots, 1))
    assert plan.rules[0].leaving
    for lead in range(slots):
        ends, _ = simulate(states, visits, [Rule(slots, lead), Rule(1)], plan.chunk, ONE, 40)
        assert plan.period < 0.99 * (ends[-1] - ends[9]) / 30
    again = ResidencyPlan.compile(states, visits, None, ONE, slots=(slots, 1))
    assert again.rules == plan.rules


def test_plans_of_tiny_devices_are_close_to_the_best() -> None:
    """Bounds <= the best of all plans, found by search <= the plan <= 1.1 x the best."""
    seen = 0
    for seed in range(depth(10, 48)):
        states, visits, slots, device = drawn(seed, most=6_000)
        try:
            best = device.least_period()
        except TooLarge:
            continue
        seen += 1
        compute = sum(v.duration for v in visits)
        plan = ResidencyPlan.compile(states, visits, None, ONE, slots=slots, chunk=1)
        assert max(compute, plan.bound) <= best + 1e-6
        assert best - 1e-9 <= plan.period <= 1.1 * best
    assert seen >= 3


def test_the_bound_of_the_copies_in_closed_form() -> None:
    """One slot: all are copied; four: none; between, as many as cannot be kept."""
    states, visits = (
        [State(j, 0, (5, 0, 0, 0)) for j in range(4)],
        [Visit(j, "R", duration=3) for j in range(4)],
    )
    bounds = [copy_bound(states, visits, (slots, 1), ONE) for slots in (1, 2, 4)]
    assert bounds == pytest.approx([5 * 4, 5 * 8 / 3, 0])


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
