"""The simulator: legal histories, exact accounts, oracles, and what it refuses."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import depth, seeds
from serving_cases import (
    Resident,
    Says,
    arrays,
    for_python,
    knobs,
    plain,
    random_scenario,
    resident,
    routers,
)

import optsched
from optsched.errors import InputError
from optsched.serving.log_check import check
from optsched.serving.routers import JSED, Decision, InfeasibleRoute, Router, Static
from optsched.serving.scenario import Contention, Settings
from optsched.serving.simulator import new_world, simulate
from optsched.serving.workload import arrivals
from optsched.serving.world import DRAINED, advance

if TYPE_CHECKING:
    from optsched.serving.routers import View

ONE = Router(Static((0,)), JSED(), 1)


# properties


@seeds(40)
def test_histories_are_legal(seed: int) -> None:
    """By the check of logs, which computes the summary again, and the verifier of schedules."""
    scenario = random_scenario(seed)
    dice = random.Random(seed)
    for router in dice.sample(routers(scenario, seed), 5):
        plan = dice.choice((None, resident(scenario, seed)))
        own = knobs(seed, strict=dice.random() < 0.5)
        horizon = dice.choice((None, None, 5.0))
        run = simulate(scenario, router, plan=plan, settings=own, seed=seed, horizon_ms=horizon)
        assert check(scenario, run.log) == [], (router, horizon)  # type: ignore[arg-type]
        assert optsched.verify(run.schedule) == []


@seeds(40)
def test_runs_repeat_with_or_without_a_log(seed: int) -> None:
    """Little's law is exact; the same seed gives the same bits."""
    scenario = random_scenario(seed)
    for router in routers(scenario, seed)[1::3]:
        state = new_world(scenario, router, seed=seed)
        assert advance(state) == DRAINED
        latency = state.request["finish"] - scenario.arrival
        assert state.trace["area"][0] == latency.sum()
        for horizon in (None, 4.0):
            runs = [
                simulate(scenario, router, seed=seed, horizon_ms=horizon, log=log)
                for log in (True, True, False)
            ]
            assert runs[0].log.to_json() == runs[1].log.to_json()  # type: ignore[union-attr]
            assert runs[0].summary == runs[2].summary and runs[0].cost == runs[2].cost


@seeds(16, 40)
def test_compiled_or_not(seed: int) -> None:
    """The source of the kernels, run as Python, leaves the same state bit by bit."""
    scenario = random_scenario(seed)
    for router in routers(scenario, seed)[1 + seed % 3 :: 6]:
        plan, own = resident(scenario, seed), knobs(seed, strict=seed % 2 == 0)
        one, other = (new_world(scenario, router, plan, own, seed, log=True) for _ in range(2))
        assert advance(one) == advance.py_func(for_python(other)) == DRAINED  # type: ignore[attr-defined]
        for a, b in zip(arrays(one), arrays(other), strict=True):
            assert a.tobytes() == b.tobytes()


@seeds(20)
def test_a_router_in_python_is_as_good_as_a_compiled_one(seed: int) -> None:
    """The same rule gives the same history."""
    scenario = random_scenario(seed)
    plan = resident(scenario, seed) if seed % 2 else None
    widest, group = scenario.n_widths - 1, min(3, scenario.max_batch)

    def soonest(view: View) -> Decision:
        w = max(np.flatnonzero(view.feasible[:, view.segment].any(axis=0)))
        delay = view.expected_delay(w, group)
        assert (np.isinf(delay) == ~view.feasible[:, view.segment, w]).all()
        return Decision(int(delay.argmin()), w, group)

    rule = Router(Static((widest,) * scenario.n_segments), JSED(), group)
    one, other = (simulate(scenario, router, plan=plan) for router in (rule, Says(soonest)))
    for name in ("batches", "entries", "instances"):
        assert getattr(one.log, name).tolist() == getattr(other.log, name).tolist()


def test_what_a_router_sees() -> None:
    """Two requests at 0, one 2 ms later on an instance of its own, all three done at 4 ms."""
    seen: list[dict[str, Any]] = []

    def route(view: View) -> Decision:
        seen.append({
            "now": view.now, "segment": view.segment, "head": view.head.tolist(),
            "waiting": view.waiting.tolist(), "prefix": view.prefix,
            "queued": view.queued.tolist(), "running": view.running.tolist(),
            "free": view.free_instances.tolist(), "there": view.resident_instances.tolist(),
            "vram": view.free_vram_mb.tolist(), "watts": view.watts.tolist(),
        })  # fmt: skip
        return Decision(0, 1, 2)

    scenario = plain([0.0, 0.0, 2.0], k=2, n=2, ms_per_mmac=2.0, vram_mb=10.0)
    plan = Resident([(0, 0, 1), (0, 1, 1)])
    simulate(scenario, Says(route), plan=plan)
    instances = [[[0, 1], [0, 1]]]
    nothing = {"prefix": (), "segment": 0, "queued": [0.0], "there": instances, "vram": [8.0]}
    idle = {"running": [0.0], "free": instances, "watts": [10.0]}
    busy = {"running": [4.0], "free": [[[0, 0], [0, 1]]], "watts": [100.0]}
    at_0 = {"now": 0.0, "head": [0, 1], "waiting": [2, 0]}
    at_2 = {"now": 2.0, "head": [2], "waiting": [1, 0]}
    assert seen[:2] == [nothing | idle | at_0, nothing | busy | at_2]
    later = {"now": 4.0, "segment": 1, "head": [0, 1, 2], "prefix": (1,)}
    assert seen[2] == seen[2] | later | {"waiting": [0, 3]}


# oracles


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_queue_and_constant_service(load: float) -> None:
    """M/D/1: the mean wait is load * D / (2 (1 - load))."""
    scenario = plain(arrivals(1000 * load, seconds=depth(1600, 4000), seed=2), max_batch=1)
    run = simulate(scenario, ONE, plan=Resident([(0, 0, 0)]), settings=Settings(cap=1), log=False)
    assert run.summary.mean_ms == pytest.approx(1 + load / (2 * (1 - load)), rel=0.02 / (1 + load))


def test_no_router_beats_all_decisions() -> None:
    """4 requests, 2 segments, 2 widths: every router is above the best of all decisions."""
    scenario = plain(
        [0.0, 0.1, 0.2, 0.2], k=2, n=2, launch_ms=0.5, router_ms=0.3, max_batch=3, load_ms=0.2,
        mmac=[[[0.5, 1.0]], [[0.3, 0.9], [0.5, 1.2]]], accuracy=[60.0, 60.2, 60.1, 60.6],
    )  # fmt: skip
    best, tried, choices, options = math.inf, 0, list[int](), list[int]()

    def follow(view: View) -> Decision:
        every = list(product(range(2), range(1, len(view.head) + 1)))
        at = choices[len(options)] if len(options) < len(choices) else 0
        options.append(len(every))
        return Decision(0, *every[at])

    while True:
        options.clear()
        best = min(best, simulate(scenario, Says(follow), log=False).cost)
        tried += 1
        choices += [0] * (len(options) - len(choices))
        while choices and choices[-1] + 1 == options[len(choices) - 1]:
            choices.pop()
        if not choices:
            break
        choices[-1] += 1
    assert tried > 1000
    found = [simulate(scenario, router).cost for router in routers(scenario, 0)]
    assert max(found) > min(found) >= best


def test_contention_and_power() -> None:
    """Phi and watts at no load, at the knee and at 1, by hand."""
    for u, slowdown, watts in ((0.92, 1.46, 198.6), (1.0, 1 + 0.46 + 12 * 0.08, 260 * 1.25)):
        x = (u - 0.02) / (1 - (u - 0.02))
        scenario = plain(
            mmac=[[[x * 100]]], sat_mmac=100, contention=Contention(0.92, 0.5, 12.0),
            idle_w=0, peak_w=260 if u == 1 else 198.6 / 0.92, launch_ms=2.0, ms_per_mmac=0.01,
        )  # fmt: skip
        run = simulate(scenario, ONE)
        assert run.finish[0] / 1e6 == pytest.approx(2 + x * slowdown, rel=1e-6)
        assert run.summary.energy_j == pytest.approx(watts * run.finish[0] * 1e-9, rel=1e-6)
    run = simulate(plain(idle_w=55, peak_w=260), ONE)
    assert run.summary.energy_j == pytest.approx(0.26)


# the core's rules, where they were once broken


def test_a_load_robs_nobody_of_room() -> None:
    """Who made room gets it, though a younger request would fit in before."""
    vram = {"vram_mb": 2.0, "instance_mb": [[1.0], [2.0]], "load_ms": 3.0}
    scenario = plain([0.0, 3.5, 4.5], k=2, max_batch=1, **vram)
    patient = Settings(cap=1, starve_ms=1000.0)
    run = simulate(scenario, Router(Static((0, 0)), JSED(), 1), settings=patient)
    assert (run.finish / 1e6).tolist() == [9.0, 17.0, 18.0]


def test_a_horizon() -> None:
    """What began before it is there; what ends later is not done."""
    plan, own = Resident([(0, 0, 0)]), Settings(cap=1)
    run = simulate(plain([0.0, 0.0, 3.0]), ONE, plan=plan, settings=own, horizon_ms=1.5)
    assert run.finish.tolist() == [1_000_000, -1, -1]
    assert (run.summary.completed, run.summary.completion) == (1, pytest.approx(1 / 3))
    assert run.summary.throughput_per_s == pytest.approx(1 / 1.5e-3)
    assert run.log is not None and run.log.batches["end"].tolist() == [1_000_000, 2_000_000]
    assert run.log.horizon == 1_500_000


# what is refused


@pytest.mark.parametrize(
    ("decision", "says"),
    [
        (Decision(1, 0, 1), "server: expected an integer in 0..0, got 1"),
        (Decision(0, 0.5, 1), "width: expected an integer in 0..1, got 0.5"),  # type: ignore[arg-type]
        (None, "expected a Decision(server, width, group), got None"),
        (Decision(0, 1, 1), "server 'a' can never run segment 0 at width 1 (1)"),
    ],
)
def test_decisions_that_cannot_be(decision: Any, says: str) -> None:
    """They are named."""
    scenario = plain([0.0], n=2, max_batch=4, instance_mb=[[60, 70]])
    with pytest.raises(InfeasibleRoute) as caught:
        simulate(scenario, Says(lambda view: decision), plan=Resident([(0, 0, 0)]))
    assert "decision 0" in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"horizon_ms": -5}, "horizon_ms"),
        ({"router": 7}, "router: expected a Router or route(view), got 7"),
        ({"router": Router(Static((0,)), JSED(), 65)}, "group: 65 is above max_batch, 64"),
        ({"router": Router(Static((0, 0)))}, "widths: expected 1 indices"),
        ({"scenario": plain(n=64)}, "vram_mb: 64 pairs of segment and width"),
    ],
)
def test_arguments_that_cannot_be(given: dict[str, Any], says: str) -> None:
    """They are named, and nothing is simulated."""
    with pytest.raises(InputError, match=r"^" + says.replace("(", r"\(").replace(")", r"\)")):
        simulate(**{"scenario": plain(), "router": ONE, **given})
