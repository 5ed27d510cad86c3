"""The simulator: legal histories, exact accounts, oracles, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from depth import depth, seeds
from routing_problems import (
    Anything,
    Resident,
    arrays,
    for_python,
    plain,
    resident,
    routers,
    settings,
)

import optsched
from optsched.errors import InputError
from optsched.problems.routing import Contention
from optsched.serving.check import check_log
from optsched.serving.core import Settings
from optsched.serving.routers import (
    JSED,
    Backlog,
    Decision,
    InfeasibleRoute,
    PowerOfTwo,
    RandomWidth,
    Router,
    Static,
)
from optsched.serving.scenario import arrivals, reference
from optsched.serving.simulator import new_world, simulate
from optsched.serving.world import DRAINED, advance
from optsched.testing.routing_problems import random_routing

if TYPE_CHECKING:
    from optsched.serving.view import View

ONE = Router(Static((0,)), JSED(), 1)


class Fixed:
    """A router that always says the same."""

    def __init__(self, decision: Any) -> None:
        self._decision = decision

    def route(self, view: View) -> Any:
        """Say it."""
        return self._decision


# properties


@seeds(40)
def test_histories_are_legal(seed: int) -> None:
    """By the judge of logs and the verifier of schedules; their price is no less than the bound."""
    problem = random_routing(seed)
    dice = random.Random(seed)
    for router in dice.sample(routers(problem, seed), 5):
        plan = dice.choice((None, resident(problem, seed)))
        knobs = settings(seed, strict=dice.random() < 0.5)
        horizon = dice.choice((None, None, 5.0))
        run = simulate(
            problem, router, plan=plan, settings=knobs, seed=seed, horizon_ms=horizon
        )  # fmt: skip
        assert check_log(problem, run.log) == [], (router, horizon)  # type: ignore[arg-type]
        assert optsched.verify(run.schedule) == []
        assert problem.evaluate(run.schedule) == run.cost
        assert horizon is not None or problem.lower_bound() <= run.cost
        for row in run.telemetry:
            for there, server in zip(row["servers"], problem.servers, strict=True):
                assert -1e-9 <= there["vram_mb"] <= server.vram_mb + 1e-9


@pytest.mark.slow
def test_every_router_is_legal_everywhere() -> None:
    """200 scenarios x every router x {cold, plan} x {strict, bypass}, and the same bits again."""
    for seed in range(200):
        problem = random_routing(seed)
        plan = resident(problem, seed)
        choices = product(range(len(routers(problem, seed))), (None, plan), (False, True))
        for index, there, strict in choices:
            router, again = (routers(problem, seed)[index] for _ in range(2))
            knobs = settings(seed, strict=strict)
            run = simulate(problem, router, plan=there, settings=knobs, seed=seed)
            place = f"seed {seed}, router {index}, plan {there}, strict {strict}"
            assert run.summary.completed == problem.n_requests, place
            assert check_log(problem, run.log) == [], place  # type: ignore[arg-type]
            if strict:
                other = simulate(problem, again, plan=there, settings=knobs, seed=seed)
                assert run.log.to_json() == other.log.to_json(), place  # type: ignore[union-attr]


@seeds(40)
def test_the_kernel_counts_what_the_log_comes_to(seed: int) -> None:
    """Little's law is exact; the summary without a log is that of the log; the same bits again."""
    problem = random_routing(seed)
    for router in routers(problem, seed)[1::3]:
        state = new_world(problem, router, seed=seed)
        assert advance(state) == DRAINED
        latency = state.request["finish"] - problem.arrival
        assert state.trace["area"][0] == latency.sum()
        for horizon in (None, 4.0):
            runs = [
                simulate(problem, router, seed=seed, horizon_ms=horizon, log=log)
                for log in (True, True, False)
            ]
            assert runs[0].log.to_json() == runs[1].log.to_json()  # type: ignore[union-attr]
            logged, counted = (msgspec.structs.asdict(runs[i].summary) for i in (0, 2))
            for key, value in logged.items():
                if value is not None:
                    value = pytest.approx(value, rel=1e-9, abs=1e-7)
                assert counted[key] == value, key
            assert abs(runs[0].cost - runs[2].cost) <= 1
            assert (runs[0].finish == runs[2].finish).all()


@seeds(16, 40)
def test_compiled_or_not(seed: int) -> None:
    """The source of the kernels, run as Python, leaves the same state bit by bit."""
    problem = random_routing(seed)
    for router in routers(problem, seed)[1 + seed % 3 :: 6]:
        plan, knobs = resident(problem, seed), settings(seed, strict=seed % 2 == 0)
        one, other = (new_world(problem, router, plan, knobs, seed, log=True) for _ in range(2))
        assert advance(one) == advance.py_func(for_python(other)) == DRAINED  # type: ignore[attr-defined]
        for a, b in zip(arrays(one), arrays(other), strict=True):
            assert a.tobytes() == b.tobytes()


@seeds(20)
def test_more_room_is_never_illegal(seed: int) -> None:
    """Ten times the VRAM, and more instances for one key."""
    problem = random_routing(seed)
    large = problem.replace(
        servers=[dataclasses.replace(one, vram_mb=10 * one.vram_mb) for one in problem.servers]
    )
    run = simulate(large, routers(large, seed)[seed % 17], settings=Settings(cap=12))
    assert check_log(large, run.log) == []  # type: ignore[arg-type]


def test_arrivals_have_random_numbers_of_their_own() -> None:
    """Whatever routers draw, before or meanwhile."""
    first = reference(rate=300, burst=3, seconds=0.2, seed=5)
    dull, wasteful = (simulate(first, Anything(0, spare=n), seed=5) for n in (0, 40))
    assert dull.log.to_json() == wasteful.log.to_json()  # type: ignore[union-attr]
    few = simulate(first, Router(RandomWidth(), PowerOfTwo(), 0), seed=5)
    again = reference(rate=300, burst=3, seconds=0.2, seed=5)
    assert (first.arrival == again.arrival).all()
    assert first.sha256 == again.sha256 == few.problem.sha256
    assert not np.array_equal(
        first.arrival, reference(rate=300, burst=3, seconds=0.2, seed=6).arrival
    )


class Twin:
    """`JSED` and a static tuple in Python."""

    def __init__(self, tuple_of_widths: tuple[int, ...], group: int) -> None:
        self._widths, self._group = tuple_of_widths, group

    def route(self, view: View) -> Decision:
        """The server that would be done first."""
        w = self._widths[view.segment]
        while not view.feasible[:, view.segment, w].any():
            w -= 1
        delay = view.expected_delay(w, self._group)
        assert np.isinf(delay)[~view.feasible[:, view.segment, w]].all()
        return Decision(int(delay.argmin()), w, self._group)


@seeds(20)
def test_a_router_in_python_is_as_good_as_a_compiled_one(seed: int) -> None:
    """The same rule gives the same history."""
    problem, plan = random_routing(seed), None
    if seed % 2:
        plan = resident(problem, seed)
    widest, group = (problem.n_widths - 1,) * problem.n_segments, min(3, problem.max_batch)
    one = simulate(problem, Router(Static(widest), JSED(), group), plan=plan)
    other = simulate(problem, Twin(widest, group), plan=plan)
    assert one.log.to_json() == other.log.to_json()  # type: ignore[union-attr]


# oracles


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_queue_and_constant_service(load: float) -> None:
    """M/D/1: the mean wait is load * D / (2 (1 - load))."""
    problem = plain(arrivals(1000 * load, seconds=depth(1600, 4000), seed=2), max_batch=1)
    run = simulate(problem, ONE, plan=Resident([(0, 0, 0)]), settings=Settings(cap=1), log=False)
    assert run.summary.mean_ms == pytest.approx(1 + load / (2 * (1 - load)), rel=0.02 / (1 + load))


class Follows:
    """A router that takes given choices, then the first; it writes down how many there were."""

    def __init__(self, choices: list[int]) -> None:
        self._choices, self.options = choices, []  # type: ignore[var-annotated]

    def route(self, view: View) -> Decision:
        """The next choice of server, width and group."""
        n, w = len(view.problem.servers), view.problem.n_widths
        every = list(product(range(n), range(w), range(1, len(view.head) + 1)))
        step = len(self.options)
        self.options.append(len(every))
        return Decision(*every[self._choices[step] if step < len(self._choices) else 0])


def test_no_router_beats_all_decisions() -> None:
    """4 requests, 2 segments, 2 widths: the bound is below the best, every router above."""
    problem = plain(
        [0.0, 0.1, 0.2, 0.2], k=2, n=2, launch_ms=0.5, router_ms=0.3, max_batch=3, load_ms=0.2,
        mmac=[[[0.5, 1.0]], [[0.3, 0.9], [0.5, 1.2]]], accuracy=[60.0, 60.2, 60.1, 60.6],
    )  # fmt: skip
    best, choices, tried = math.inf, [], 0
    while True:
        router = Follows(choices)
        best = min(best, simulate(problem, router, log=False).cost)
        tried += 1
        choices += [0] * (len(router.options) - len(choices))
        while choices and choices[-1] + 1 == router.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            break
        choices[-1] += 1
    assert tried > 1000
    assert problem.lower_bound() <= best
    found = [simulate(problem, router).cost for router in routers(problem, 0)]
    assert min(found) >= best
    assert max(found) > best


def test_contention_and_power() -> None:
    """Phi and watts at no load, at the knee and at 1, by hand."""
    for u, slowdown, watts in ((0.92, 1.46, 198.6), (1.0, 1 + 0.46 + 12 * 0.08, 260 * 1.25)):
        x = (u - 0.02) / (1 - (u - 0.02))
        problem = plain(
            mmac=[[[x * 100]]], sat_mmac=100, contention=Contention(0.92, 0.5, 12.0),
            idle_w=0, peak_w=260 if u == 1 else 198.6 / 0.92, launch_ms=2.0, ms_per_mmac=0.01,
        )  # fmt: skip
        run = simulate(problem, ONE)
        assert run.finish[0] / 1e6 == pytest.approx(2 + x * slowdown, rel=1e-6)
        assert run.summary.energy_j == pytest.approx(watts * run.finish[0] * 1e-9, rel=1e-6)
    log = simulate(plain(idle_w=55, peak_w=260), ONE, horizon_ms=4.0).log
    assert log is not None
    assert log.energy == pytest.approx((260 * 1 + 55 * 0) * 1e-3)  # it ends when all is done
    assert log.watts(0, np.array([0.0, 0.92, 1.0])).tolist() == pytest.approx([55, 243.6, 260])


# the core's rules, where they were once broken


def test_a_load_robs_nobody_of_room() -> None:
    """Who made room gets it, though younger requests fit in sooner: else they go on for ever."""
    problem = random_routing(2)
    for idle in (0.0, 2.0):
        knobs = Settings(cap=1, idle_ms=idle)
        run = simulate(problem, Router(Backlog(), JSED(), 0), settings=knobs, seed=2)
        assert run.summary.completed == problem.n_requests


def test_random_groups_are_no_larger_than_batches() -> None:
    """Of up to 32 requests where a batch holds 4."""
    run = simulate(plain([0.0] * 64, max_batch=4), Router(Static((0,)), JSED(), 0))
    assert run.log is not None
    assert run.log.batches["images"].max() == 4
    assert run.summary.completed == 64


def test_a_log_of_many_instances() -> None:
    """One for every request: the log grows on the way."""
    problem = plain(np.arange(1500) * 5.0)
    run = simulate(problem, ONE, settings=Settings(idle_ms=0.5))
    assert run.log is not None
    assert len(run.log.instances) == 1500
    assert check_log(problem, run.log) == []


def test_utilisation_of_servers_without_saturation() -> None:
    """It is 1 however many batches run."""
    seen: list[float] = []

    class Watches:
        def route(self, view: View) -> Decision:
            seen.append(float(view.utilisation[0]))
            return Decision(0, 0, 1)

    simulate(plain([0.0, 0.1, 0.2, 0.3]), Watches())
    assert seen == [0.0, 1.0, 1.0, 1.0]


def test_an_empty_trace() -> None:
    """Nothing is done, and nothing is divided by."""
    run = simulate(plain([]), ONE)
    assert run.summary.completed == run.cost == 0
    assert run.summary.mean_ms is run.summary.throughput_per_s is run.summary.completion is None
    assert check_log(run.problem, run.log) == []  # type: ignore[arg-type]
    assert run.schedule.n_operations == 0 and run.telemetry[0]["t_ms"] == 0


def test_a_horizon() -> None:
    """What began before it is there; what ends later is not done."""
    problem = plain([0.0, 0.0, 3.0], max_batch=1)
    plan = Resident([(0, 0, 0)])
    knobs = Settings(cap=1)
    run = simulate(problem, ONE, plan=plan, settings=knobs, horizon_ms=1.5)
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
        (Decision(-1, 0, 1), "server: expected an integer in 0..0, got -1"),
        (Decision(0, 2, 1), "width: expected an integer in 0..1, got 2"),
        (Decision(0, 0, 0), "group: expected an integer in 1..4, got 0"),
        (Decision(0, 0, 5), "group: expected an integer in 1..4, got 5"),
        (Decision(0, 0.5, 1), "width: expected an integer in 0..1, got 0.5"),  # type: ignore[arg-type]
        (None, "server: expected an integer in 0..0, got None"),
        (Decision(0, 1, 1), "server 'a' can never run segment 0 at width 1 (1)"),
    ],
)
def test_decisions_that_cannot_be(decision: Any, says: str) -> None:
    """They are named."""
    problem = plain([0.0], n=2, max_batch=4, instance_mb=[[60, 70]])
    with pytest.raises(InfeasibleRoute) as caught:
        simulate(problem, Fixed(decision), plan=Resident([(0, 0, 0)]))
    assert "decision 0" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"horizon_ms": -5}, "horizon_ms"),
        ({"horizon_ms": math.nan}, "horizon_ms"),
        ({"horizon_ms": "soon"}, "horizon_ms"),
        ({"seed": -1}, "seed"),
        ({"router": 7}, "router: expected a Router or route(view), got 7"),
        ({"router": Router(Static((0,)), JSED(), 65)}, "group: 65 is above max_batch, 64"),
        ({"router": Router(Static((0, 0)))}, "widths: expected 1 indices"),
        ({"router": Router(Static((1,)))}, "widths"),
        ({"problem": plain(n=64)}, "vram_mb: 64 pairs of segment and width"),
        ({"problem": "x.json"}, "problem: expected a Routing"),
    ],
)
def test_arguments_that_cannot_be(given: dict[str, Any], says: str) -> None:
    """They are named, and nothing is simulated."""
    with pytest.raises(InputError, match=r"^" + says.replace("(", r"\(").replace(")", r"\)")):
        simulate(**{"problem": plain(), "router": ONE, **given})
