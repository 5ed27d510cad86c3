"""The planner of slots: its plans are close to the best, bounds hold."""

from __future__ import annotations

from depth import depth
from exact_residency import Device, Phase, TooLarge, drawn

from benchmarks.executor.copy_bound import copy_bound
from optsched.arraypipe.memory.engines import HostLink
from optsched.arraypipe.memory.residency import ResidencyPlan

ONE = HostLink(1.0, 1.0)


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
        compute = sum(v.duration for v in visits)
        plan = ResidencyPlan.compile(states, visits, None, ONE, slots=slots, chunk=1)
        assert max(compute, copy_bound(states, visits, slots, ONE)) <= best + 1e-6
        assert best - 1e-9 <= plan.simulate(ONE).time <= 1.15 * best
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
