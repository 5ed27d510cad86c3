"""Placement plans: against enumeration, as documents, and under the routers that need them."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import seeds
from routing_problems import mutated, plain

import optsched
from optsched.errors import InputError
from optsched.model.verify import verify
from optsched.serving import Fluid, MarginalCost, Plan, Router, check_log, plan_instances, simulate
from optsched.testing.router_checks import random_routing
from optsched_solvers.routing import routers
from optsched_solvers.routing.plan import (
    BATCH,
    BUSY,
    WAITING,
    TooLate,
    _weights,
    fluid_shares,
)  # fmt: skip

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.problems.routing import Routing

GRID = np.array(
    [(a, b, c, 20 - a - b - c) for a in range(21) for b in range(21 - a) for c in range(21 - a - b)]
) / 20  # fmt: skip


def one_server(seed: int) -> Routing:
    """Two segments, two widths, memory for some instances."""
    dice = np.random.default_rng([seed, 9])
    mmac = np.sort(dice.uniform(0.2, 2.0, (2, 2, 2)), axis=2)
    return plain(
        k=2, n=2, mmac=[mmac[0, :1].tolist(), mmac[1].tolist()], launch_ms=1.0,
        accuracy=np.sort(dice.uniform(50, 60, 4)).tolist(), vram_mb=float(dice.integers(6, 16)),
        instance_mb=[[2.0, 3.0], [2.0, 3.0]], arrival_ms=[0.0],
    )  # fmt: skip


def by_hand(problem: Routing, rate: float, counts: Any, weight: Any = None) -> float:
    """The least cost of a request in ms with these instances; shares of tuples on a grid."""
    whole = problem.servers[0].launch_ms + BATCH * problem.cost[0] / 1e6
    first, second = problem.tuples.T
    took = np.stack([whole[0, 0, first], whole[1, first, second]])
    reserve = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1] * BUSY
    able = np.full(len(GRID), True)
    for k, least in product(range(2), range(2)):  # who needs at least this width
        busy = took[k] * (problem.tuples[:, k] >= least) * rate / 1e3 / BATCH
        able &= GRID @ busy <= reserve[k, least] + 1e-9
    lost = (problem.accuracy.max() - problem.accuracy) / 1e4 * problem.ms_per_point
    found = float(np.min(GRID @ (took.sum(axis=0) + lost), where=able, initial=np.inf))
    for k, v in np.argwhere(weight > 0) if weight is not None else ():
        hosts = min(int(counts[k, v:].sum()), len(WAITING) - 1)
        found += WAITING[hosts] * float(whole[k, :, v].mean() * weight[k, v])
    return found


@seeds(6)
def test_the_plan_is_the_best_of_all(seed: int) -> None:
    """Of all numbers of instances that fit into memory, with the best shares of tuples."""
    problem, rate = one_server(seed), 250.0
    plan = plan_instances(problem, rate=rate, headroom=1.0)
    assert plan.status == "optimal" and plan.rate == rate and plan.objective_ms is not None
    plan.check(problem)
    relaxed = fluid_shares(problem, None, rate=rate)
    named = dict(zip(map(tuple, problem.tuples.tolist()), relaxed.tolist(), strict=True))
    weight = _weights(problem, named)
    able = []
    for row in product(range(6), repeat=4):
        counts = np.array(row).reshape(2, 2)
        if (counts * problem.vram).sum() <= problem.servers[0].vram_mb * 1000:
            able.append(counts)
    best = min(by_hand(problem, rate, counts, weight) for counts in able)
    assert plan.objective_ms <= best + 1e-6, (plan.objective_ms, best)
    own = np.zeros((2, 2), int)
    for _, k, w in plan.instances:
        own[k, w] += 1
    assert by_hand(problem, rate, own, weight) >= plan.objective_ms - 1e-6
    assert plan.objective_ms >= best - 0.05 * best  # the grid is coarse


@seeds(10)
def test_fluid_shares_are_the_best_of_a_grid(seed: int) -> None:
    """No share of tuples on a grid costs less."""
    problem, rate = one_server(seed), 250.0
    rows = [(0, 0, 1), (0, 0, 0), (0, 1, 1), (0, 1, 0)]
    found = fluid_shares(problem, Plan.of(rows), rate=rate)
    assert abs(found.sum() - 1) < 1e-9 and (found >= 0).all()
    whole = 1.0 + BATCH * problem.cost[0] / 1e6
    lost = (problem.accuracy.max() - problem.accuracy) / 1e4 * problem.ms_per_point
    cost = sum(
        one * (whole[0, 0, a] + whole[1, a, b] + less)
        for one, (a, b), less in zip(found, problem.tuples.tolist(), lost, strict=True)
    )
    best = by_hand(problem, rate, np.ones((2, 2), int))
    assert cost <= best + 1e-6 and (best == np.inf or cost >= 0.95 * best)


@seeds(6)
def test_histories_on_a_plan(seed: int) -> None:
    """Plans fit every server; the routers that need a plan are legal on it."""
    problem = random_routing(seed)
    plan = plan_instances(problem)
    plan.check(problem)
    for router in (MarginalCost(), Router(Fluid(), group=1)):
        run = simulate(problem, router, plan=plan, seed=seed)
        assert check_log(problem, run.log) == [] and verify(run.schedule) == []


def test_a_rate_that_nothing_serves() -> None:
    """The plan is for the highest rate that fits, found by halving."""
    problem = one_server(0)
    plan = plan_instances(problem, rate=1e6, headroom=1e9)
    assert plan.rate is not None and 0 < plan.rate < 2e3 and plan.instances
    with pytest.raises(InputError, match="cannot hold an instance of every segment"):
        plan_instances(plain(k=2, n=1, vram_mb=1.5))


def test_too_little_time_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner says so; a solver starts cold instead."""
    problem = random_routing(0)
    with pytest.raises(TooLate, match="time_limit"):
        plan_instances(problem, time_limit=0)
    cold = optsched.solve(problem, "marginal", options={"plan": "cold"}).objective
    planned = optsched.solve(problem, "marginal").objective
    monkeypatch.setattr(routers, "PLANNING", 0)
    assert optsched.solve(problem, "marginal").objective == cold != planned


def test_documents(tmp_path: Path) -> None:
    """They round-trip; every flaw is named with its place."""
    problem = one_server(1)
    plan = plan_instances(problem, rate=100.0)
    plan.write(tmp_path / "p.json", problem)
    assert Plan.read(tmp_path / "p.json", problem) == plan
    tree = json.loads((tmp_path / "p.json").read_text())
    for edits, says in (
        ({"instances.0.server": "b"}, "instances[0].server: there is no 'b'"),
        ({"instances.0.count": -1}, "instances[0].count: expected"),
        ({"instances.0.count": 12}, "its instances take"),
        ({"instances.0.width": 2}, "width: expected an integer in 0..1, got 2"),
        ({"instances.0.x": 2}, "x"),
        ({"status": "proved"}, "status: expected one of optimal, feasible"),
        ({"shares": {"0,2": 1.0}}, "shares: expected widths of every segment"),
        ({"format": "optsched.routing-plan/2"}, "optsched.routing-plan/2"),
    ):
        with pytest.raises(InputError) as caught:
            Plan.from_tree(mutated(tree, edits), "p.json", problem)
        assert says in str(caught.value), caught.value
