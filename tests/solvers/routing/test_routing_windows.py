"""Clairvoyant routing by CP-SAT: against enumeration, every router, and what it refuses."""

from __future__ import annotations

import random
import tempfile
from functools import cache
from itertools import combinations, product
from math import ceil
from typing import Any

import numpy as np
import pytest
from routing_problems import plain, routers

import optsched
from optsched import serving
from optsched.errors import InputError
from optsched.problems.routing import Contention, Link, Routing, Server
from optsched.problems.routing.log import Log
from optsched_solvers.routing.routers import online_runs
from optsched_solvers.routing.windows_bound import hosts_of, one_segment_bound
from optsched_solvers.shop.cpsat import CpSat


def scenario(seed: int, requests: int, servers: int) -> tuple[Routing, serving.Plan]:
    """Two segments and widths; servers have room for nothing but the plan."""
    dice = random.Random(f"windows {seed}")
    rows = [(s, k, 1 if s == 0 else dice.randint(0, 1)) for s in range(servers) for k in range(2)]
    size = np.array([[1.0, 2.0], [1.0, 2.0]])
    problem = Routing(
        widths=(0.5, 1.0),
        mmac=[np.round(np.reshape([dice.uniform(0.1, 1) for _ in range(2 + 2 * k)], (-1, 2)), 3)
              for k in range(2)],
        vram_mb=size, accuracy=[[50.0, 50.3], [50.2, 50.9]], max_batch=dice.choice((2, 3)),
        servers=[
            Server(f"s{s}", sum(size[k, w] for s2, k, w in rows if s2 == s),
                   dice.choice((0.0, 0.4, 1.1)), 1.0 + s, 1, 2) for s in range(servers)
        ],
        arrival_ms=np.cumsum([dice.choice((0, 0.2, 0.9)) for _ in range(requests)]),
    )  # fmt: skip
    return problem, serving.Plan.of(rows)


def least_cost(problem: Routing, plan: serving.Plan) -> int:
    """Over all sequences of batches that start in this order, each as early as it can."""
    best_accuracy = int(problem.accuracy.max())
    price = problem.ms_per_point * 1e6 / 10_000

    @cache
    def rest(now: int, free: tuple[int, ...], state: tuple[tuple[int, int, int], ...]) -> float:
        """`state`: of requests the segment, when their input is there, the tuple; in any order."""
        if state[0][0] == 2:
            return 0.0
        found = float("inf")
        for i, (s, k, widest) in enumerate(plan.instances):
            there = [one for one in state if one[0] == k]
            for size in range(1, min(len(there), problem.max_batch) + 1):
                for some, w in product(set(combinations(there, size)), range(widest + 1)):
                    start = max(now, free[i], *(one[1] for one in some))
                    wide = max(one[2] for one in some) if k else 0
                    work = size * float(problem.cost[s, k, wide, w])
                    end = start + ceil(int(problem.launch[s]) + work)
                    after, cost = list(state), 0.0
                    for one in some:
                        after.remove(one)
                        after.append((2, 0, 0) if k else (1, end, w))
                        if k:
                            lost = best_accuracy - int(problem.accuracy[one[2] * 2 + w])
                            cost += end + lost * price
                    later = tuple(max(at, start) for at in (*free[:i], end, *free[i + 1 :]))
                    found = min(found, cost + rest(start, later, tuple(sorted(after))))
        return found

    state = tuple((0, at, 0) for at in problem.arrival.tolist())
    return round(rest(0, (0,) * len(plan.instances), state)) - int(problem.arrival.sum())


def solved(problem: Routing, plan: serving.Plan, **given: Any) -> optsched.Result:
    """By CP-SAT; the history is legal."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/plan.json"
        plan.write(file, problem)
        result = optsched.solve(problem, CpSat(), options={"plan": file}, workers=1, **given)
    assert result.schedule is not None and not result.contradiction
    assert optsched.verify(result.schedule) == []
    assert serving.check_log(problem, Log.of_schedule(problem, result.schedule)) == []
    return result


@pytest.mark.parametrize(("requests", "servers"), [(4, 1), (3, 2)])
def test_against_enumeration(requests: int, servers: int) -> None:
    """The optimum, proved; no router is better, no bound is above it."""
    for seed in range(5 - requests):
        problem, plan = scenario(seed, requests, servers)
        least = least_cost(problem, plan)
        result = solved(problem, plan, time_limit=20)
        assert result.status == "optimal" and abs(result.objective - least) <= 4, seed
        for router in routers(problem, seed):
            run = serving.simulate(problem, router, plan=plan)
            assert run.cost >= least - 4, (seed, router)


def test_one_segment_bound() -> None:
    """It is never above the optimum, and above what requests take alone where they must wait."""
    better = 0
    for seed in range(12):
        problem, plan = scenario(seed, 3, 1)
        bound, roomy = (
            one_segment_bound(problem, hosts_of(problem, plan, [room]), 2**60, lambda: False)
            for room in (0, 10_000)
        )
        assert roomy <= bound <= least_cost(problem, plan) + 4, seed
        better += bound > problem.lower_bound()
    assert better >= 6


def test_one_segment_is_exact() -> None:
    """With one segment, one width and one instance the bound is the optimum."""
    problem = plain([0.0, 0.1, 0.2, 1.5, 1.5], launch_ms=1.0, ms_per_mmac=0.1)
    plan = serving.Plan.of([(0, 0, 0)])
    problem = problem.replace(servers=[Server("a", 1.0, 1.0, 0.1, 0, 0)])
    result = solved(problem, plan, time_limit=20)
    assert result.status == "optimal"
    bound = one_segment_bound(problem, hosts_of(problem, plan, [0]), 2**60, lambda: False)
    assert bound == result.objective
    assert solved(plain([]), plan, time_limit=5).status == "optimal"


def test_never_worse_than_the_hint() -> None:
    """Not than the best router, nor than a warm start, however little time there is."""
    base = serving.reference(rate=7500, seconds=0.0008, seed=3, router_ms=None)
    problem = base.replace(servers=[Server("a", 7200.0, 1.2, 1 / 1600, 0, 0)])
    plan = serving.Plan.of([(0, k, 3) for k in range(4)])
    online = min(log.cost for log in online_runs(problem, plan))
    first = solved(problem, plan, iterations=20_000)
    assert first.objective <= online
    again = solved(problem, plan, iterations=1, warm_start=first.schedule)
    assert again.objective <= first.objective == solved(problem, plan, iterations=20_000).objective
    cold = serving.simulate(problem, serving.MarginalCost(), plan=serving.Plan.of([])).schedule
    other = solved(problem, plan, iterations=1, warm_start=cold)
    assert other.lower_bound == problem.lower_bound()  # the plan's bound says nothing here


def test_refusals() -> None:
    """In a sentence that names the field."""
    server = Server("a", 10.0, 1.0, 1.0, 0, 0)
    slowed = Server("a", 10.0, 1.0, 1.0, 0, 0, sat_mmac=1.0, contention=Contention(0.9, 1, 1))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("contention", {"servers": [slowed]}),
        ("link", {"link": Link(1.0, 1.0, [[1.0]])}),
        ("router_ms", {"router_ms": 0.1}),
        ("ms_per_joule", {"ms_per_joule": 1.0}),
        ("30000", {"arrival_ms": np.zeros(30_001)}),
    ]
    problem = plain(servers=[server])
    for word, fields in cases:
        said = CpSat().supports(problem.replace(**fields))
        assert not said and word in said.reason, word
    assert CpSat().supports(problem)
    with pytest.raises(InputError, match="needs a plan"):
        optsched.solve(problem, CpSat(), options={"plan": "cold"})
    with pytest.raises(InputError, match="no instance of segment 0"):
        optsched.solve(problem, CpSat(), options={"plan": serving.Plan.of([])})


def test_a_wider_input_that_costs_less() -> None:
    """It is not made up: the proof is of what a history can be."""
    mmac = [[[1.671, 4.523]], [[2.928, 4.771], [1.908, 3.969]]]
    given = {"vram_mb": 40.0, "instance_mb": [[10, 20]] * 2, "launch_ms": 0.5}
    problem = plain(
        k=2, n=2, mmac=mmac, accuracy=[50, 55, 55, 60], max_batch=2, ms_per_point=0.1, **given
    )
    result = solved(problem, serving.Plan.of([(0, 0, 1), (0, 1, 1)]), time_limit=20)
    assert result.status == "optimal" and result.objective == 6_599_000
