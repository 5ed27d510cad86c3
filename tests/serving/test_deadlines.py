"""Deadlines: legal logs, exact accounts, the order of requests, overload, and what is refused."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import depth, seeds
from serving_cases import GONE, Resident, Says, mutated, plain, random_scenario, resident, routers

import optsched
from optsched.errors import InputError
from optsched.serving import check, compare, plan_instances, reference, simulate
from optsched.serving.log import Log
from optsched.serving.routers import (
    JSED,
    Decision,
    MarginalCost,
    RoundRobin,
    Router,
    Static,
    View,
)
from optsched.serving.scenario import Settings
from optsched.serving.simulator import front_of, new_world
from optsched.serving.tables import Server
from optsched.serving.world import advance

if TYPE_CHECKING:
    from optsched.serving.scenario import Scenario

ONE = Router(Static((0,)), JSED(), 1)
HOSTED = Resident([(0, 0, 0)])


def limits(dice: random.Random, n: int) -> Any:
    """One deadline for all requests, or one each, some without."""
    if dice.random() < 0.3:
        return dice.choice((0.5, 2, 8.0, 20.0))
    return [dice.choice((0.0, 1.0, 3.0, 10.0, 30.0, None)) for _ in range(n)]


@seeds(40)
def test_histories_are_legal(seed: int) -> None:
    """Logs pass the check, round-trip, and account for every request."""
    dice = random.Random(seed)
    scenario = random_scenario(seed)
    scenario = scenario.replace(deadline_ms=limits(dice, scenario.n_requests))
    chosen = [*dice.sample(routers(scenario, seed), 3), MarginalCost(group=dice.choice((1, 4)))]
    for router in chosen:
        plan = dice.choice((None, resident(scenario, seed)))
        own = Settings(shed=dice.random() < 0.8)
        run = simulate(
            scenario, router, plan=plan, settings=own, seed=seed,
            horizon_ms=dice.choice((None, None, 5.0)),
        )  # fmt: skip
        assert run.log is not None
        assert check(scenario, run.log) == [], router
        assert optsched.verify(run.schedule) == []
        assert Log.read(json.loads(run.log.to_json()), scenario).to_json() == run.log.to_json()
        assert own.shed or run.summary.shed == 0
        if run.log.horizon is None:
            assert run.summary.shed + run.summary.completed == scenario.n_requests
        if hasattr(router, "compiled"):  # Little's law
            state = new_world(scenario, router, plan, own, seed)
            advance(state)
            left = np.maximum(state.request["finish"], state.request["shed"])
            assert state.trace["area"][0] == (left - scenario.arrival).sum()


@seeds(20)
def test_deadlines_that_are_far(seed: int) -> None:
    """All are kept."""
    scenario = random_scenario(seed, deadline_ms=1e9)
    summary = simulate(scenario, MarginalCost(group=1)).summary
    assert (summary.shed, summary.late) == (0, 0)
    assert summary.attainment == (100 if scenario.n_requests else None)


def test_the_earliest_deadline_is_first() -> None:
    """Of requests that wait at the router; without a deadline, after all others."""
    scenario = plain([0.0] * 4, router_ms=0.5, deadline_ms=[None, 30, 10, 20])
    run = simulate(scenario, ONE, plan=HOSTED)
    assert np.argsort(run.finish).tolist() == [2, 3, 1, 0]


def test_requests_that_would_end_too_late_are_shed() -> None:
    """By hand: a batch of one takes 1 ms; the third of three cannot end before 2.5 ms."""
    scenario = plain([0.0] * 3, max_batch=1, deadline_ms=2.5)
    own = Settings(cap=1)
    run = simulate(scenario, ONE, plan=HOSTED, settings=own)
    assert (run.finish / 1e6).tolist() == [1.0, 2.0, -1e-6]
    assert (run.summary.shed, run.summary.late) == (1, 0)
    assert run.summary.attainment == pytest.approx(200 / 3)
    assert run.summary.completion == pytest.approx(2 / 3)
    late = simulate(scenario, ONE, plan=HOSTED, settings=Settings(cap=1, shed=False)).summary
    expected = (3, 0, 1, run.summary.attainment)
    assert (late.completed, late.shed, late.late, late.attainment) == expected
    # an answer that is not given costs the whole accuracy
    assert run.cost == (1.0 + 2.0 + 50 * 4) * 1e6


@pytest.mark.parametrize(
    "router",
    [MarginalCost(), Router(Static((0, 1, 2, 3))), Router(Static((0, 0, 0, 0)), RoundRobin(), 8)],
)
def test_cold_servers_load_although_a_load_takes_longer_than_any_deadline(router: Any) -> None:
    """A load takes 20 ms; requests that wait for the first one are late, all others need not be."""
    scenario = reference(rate=200, seconds=2, deadline_ms=15)
    summary = simulate(scenario, router).summary
    assert summary.attainment is not None and summary.attainment > 75


def test_requests_that_nobody_could_answer_in_time_are_no_overload() -> None:
    """Widths of the others are as wide as without them."""
    alone = reference(rate=500, seconds=2, deadline_ms=50)
    limits = [0.0 if i % 3 == 0 else 50.0 for i in range(alone.n_requests)]
    plan = plan_instances(alone)
    mixed = simulate(alone.replace(deadline_ms=limits), plan=plan).summary
    whole = simulate(alone, plan=plan).summary
    assert mixed.shed == limits.count(0.0) and whole.shed == 0
    assert mixed.accuracy == pytest.approx(whole.accuracy, abs=0.1)


def test_a_router_in_python_sees_deadlines() -> None:
    """Times of the requests in the queue, the earliest first."""
    seen: list[Any] = []

    def route(view: View) -> Decision:
        seen.append(view.deadline.tolist())
        return Decision(0, 0, 8)

    simulate(plain([0.0, 0.0, 0.0], deadline_ms=[9.0, None, 5.0]), Says(route), plan=HOSTED)
    assert seen == [[5.0, 9.0, math.inf]]


SHORT = [Server(str(i), 40_000, 0.7, 6e-5 + i * 1e-5, 0, 0, 2.0, parallel=1) for i in range(2)]
"""Batches of these servers are mostly launches."""
ALONE = [Server("0", 40_000, 0.1, 1e-4, 0, 0, 2.0, parallel=1)]
"""It runs requests one by one: few are in the system, and accuracy is dear beside their work."""


@pytest.mark.parametrize(
    ("rate", "deadline", "servers"),
    [(77_000, 8.0, None), (77_000, 12.0, None), (16_000, 12.0, slice(2, None)),
     (42_000, 12.0, SHORT), (42_000, 20.0, SHORT), (3_000, 2.5, ALONE)],
)  # fmt: skip
def test_overload(rate: float, deadline: float, servers: Any) -> None:
    """At 1.2 times what the narrowest static tuple serves, `auto` attains as much as statics."""

    def make(seed: int) -> Scenario:
        found = reference(rate=rate, seconds=n / rate, seed=seed, deadline_ms=deadline)
        if servers is None:
            return found
        if servers is SHORT:
            return found.replace(servers=SHORT, router_ms=None)
        if servers is ALONE:
            return found.replace(servers=ALONE, router_ms=None, max_batch=1)
        return found.replace(servers=found.servers[servers])

    n = depth(12_000, 60_000)
    plan = plan_instances(make(0), rate=2500)
    named: dict[str, Any] = {"auto": MarginalCost()}
    for row in ((0, 0, 0, 0), (0, 0, 0, 1), (1, 1, 1, 1)):
        groups = [1] if servers is ALONE else [8, 32, 64]
        named |= {f"{row} {g}": Router(Static(row), JSED(), g) for g in groups}
    points = compare(make, named, seeds=[1, 2], plan=plan)
    auto, *static = [point.mean["attainment"] for point in points]
    assert auto >= max(static) - 1.0, (auto, static)
    assert front_of(points, "accuracy", "attainment")


# what is refused

SCENARIO = plain(
    [0.0, 0.0, 0.0, 9.0], max_batch=1, deadline_ms=[2.5, 2.5, 2.5, None], ids=["a", "b", "c", "d"]
)
RUN = simulate(SCENARIO, ONE, plan=HOSTED, settings=Settings(cap=1))
LOG = json.loads(RUN.log.to_json())  # type: ignore[union-attr]
MUTATIONS: dict[str, dict[str, Any]] = {
    "request 'c' never runs segment 0": {"shed": GONE},
    "request 'c', shed at 0 ms, was shed before": {"shed.+": LOG["shed"][0]},
    "request 'd', shed at 9 ms, has no deadline": {"shed.+": {"id": "d", "at_ms": 9.0}},
    "request 'd', shed at 9 ms, runs all segments": {"shed.+": {"id": "d", "at_ms": 9.0}},
    "request 'd', shed at 1 ms, is in a batch until 10 ms": {"shed.+": {"id": "d", "at_ms": 1.0}},
    "shed after the horizon, 20 ms": {"shed.0.at_ms": 21.0, "horizon_ms": 20.0},
    "summary.shed: says 0, the log comes to 1": {"summary.shed": 0},
    "summary.late: says 1, the log comes to 0": {"summary.late": 1},
    "summary.attainment: says 100.0, the log": {"summary.attainment": 100.0},
    "summary.attainment: says None": {"summary.attainment": None},
}  # fmt: skip


@pytest.mark.parametrize("says", MUTATIONS)
def test_every_mutation_is_rejected(says: str) -> None:
    """With a sentence of its own."""
    assert check(SCENARIO, LOG) == []
    found = check(SCENARIO, mutated(LOG, MUTATIONS[says]))
    assert any(says in sentence for sentence in found), found


@pytest.mark.parametrize("wrong", [math.nan, -1.0, True, "5", [1.0], [1.0, 2.0, -3.0], 10**30])
def test_wrong_deadlines_are_refused(wrong: Any) -> None:
    """With the field."""
    with pytest.raises(InputError, match=r"^deadline_ms"):
        plain([0.0, 1.0, 2.0], deadline_ms=wrong)


def test_copies_with_other_arrivals() -> None:
    """One deadline for all is kept; of different ones, none."""
    one = plain([0.0, 1.0], deadline_ms=5).replace(arrival_ms=[2.0])
    assert one.deadline.tolist() == [7_000_000]
    with pytest.raises(InputError, match="deadline_ms: give those of the new arrivals"):
        plain([0.0, 1.0], deadline_ms=[1, 2]).replace(arrival_ms=[2.0])
    point = compare(plain([0.0], deadline_ms=0), {"auto": MarginalCost()}, seeds=[0])[0]
    assert point.saturated and point.mean["attainment"] == 0


def test_points_without_deadlines_have_no_attainment() -> None:
    """They cannot be compared by it."""
    points = compare(plain([0.0, 1.0]), {"one": ONE}, seeds=[0])
    with pytest.raises(InputError, match="attainment: the points do not have it"):
        front_of(points, "accuracy", "attainment")
