"""Quota plans as values: fields, refusals, schedules, documents, bounds."""

from __future__ import annotations

import math
import pickle
import random
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.best_quota import answers, cost_of, quota_problems, random_plan, shares

import optsched
from optsched import InputError, QuotaJob, QuotaPlan
from optsched.formats.read_problem import read_problem
from optsched.problems.quota import document as quota_json
from optsched.problems.quota.problem import Node, Quotas

if TYPE_CHECKING:
    from pathlib import Path

JOBS = [
    QuotaJob("a", [1, 2, 4, 8], utility=[1, 1.8, 3.1, 4.9]),
    QuotaJob("b", [1, 2], utility=[2, 3], must_run=True, current={"n0": 2}),
    QuotaJob("c", minimum=2, maximum=4, utility=[1, 1.8, 3.1], locality="single"),
]


def plan(**fields: Any) -> QuotaPlan:
    """Three jobs on three nodes."""
    return QuotaPlan(**{"jobs": JOBS, "nodes": [4, 4, 2], **fields})


def quotas(*jobs: dict[int, int]) -> Quotas:
    """GPUs by node of every job."""
    rows = [(j, n, c) for j, job in enumerate(jobs) for n, c in job.items()]
    return Quotas.of(len(jobs), *np.array(rows, np.int64).reshape(-1, 3).T)


def test_an_answer_as_a_schedule_and_back() -> None:
    """One operation per job that runs; value, quota, placement, answer are read from it."""
    problem = plan()
    schedule = problem.scheduled(quotas({}, {0: 2}, {1: 4}))
    assert optsched.verify(schedule) == []
    assert problem.quota(schedule) == {"a": 0, "b": 2, "c": 4}
    assert problem.placement(schedule) == {"b": {"n0": 2}, "c": {"n1": 4}}
    assert schedule.job.tolist() == [1, 2]
    assert set(schedule.kind.tolist()) == {"epoch"}
    assert problem.evaluate(schedule) == -6_100_000
    assert problem.value(schedule) == 6_100_000
    assert problem.describe(-6_100_000) == "utility 6.1"
    assert problem.answer(schedule) == quotas({}, {0: 2}, {1: 4})
    assert schedule.op_resources.to_lists() == [[0, 1], [4, 5, 6, 7]]
    assert problem.check(schedule) == []
    assert problem.tidiness(schedule) == (2, 0, 2)
    assert [r.name for r in schedule.resources][3:5] == ["n0/g3", "n1/g0"]


def test_durations_are_those_of_a_pass() -> None:
    """ceil(pass work / rate), with the rate of the size that the job got."""
    job = QuotaJob("a", [1, 3], utility=[1, 2], rates=[1, 2.5], pass_work=101)
    problem = QuotaPlan([job], budget=3)
    assert problem.scheduled(quotas({0: 3})).duration.tolist() == [math.ceil(101 / 2.5)]
    assert problem.scheduled(quotas({0: 1})).duration.tolist() == [101]


def test_the_graph_is_what_runs_now() -> None:
    """Jobs hold the lowest GPUs of their nodes, and keep them when they stay."""
    problem = plan(jobs=[JOBS[0], JOBS[1], QuotaJob("d", [1], utility=[1], current={"n0": 1})])
    assert problem.graph().op_resources.to_lists() == [[0, 1], [2]]
    schedule = problem.scheduled(quotas({0: 2}, {0: 2}, {}))
    assert schedule.op_resources.to_lists() == [[2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("jobs", "fault"),
    [
        ([{0: 1}, {0: 2}], "row for each of 3 jobs"),
        ([{}, {0: 2}, {9: 2}], "no node 9"),
        ([{0: 4}, {0: 2}, {}], "6 GPUs of n0 are given away, it has 4"),
        ([{0: 3}, {1: 1}, {}], "job 'a' gets 3 GPUs"),
        ([{0: 1}, {}, {}], "job 'b' gets 0 GPUs"),
        ([{}, {0: 1}, {0: 1, 1: 1}], "job 'c' must be within one node"),
    ],
)
def test_faults(jobs: list[dict[int, int]], fault: str) -> None:
    """What the verifier cannot know is said in a sentence, and refused."""
    with pytest.raises(InputError, match=fault):
        plan().scheduled(quotas(*jobs))


def test_faults_of_types_totals_and_whole_nodes() -> None:
    """Two types in one job, GPUs left over, two nodes shared; rows are no answer."""
    two = QuotaPlan([QuotaJob("a", [2], utility=[1])], nodes=[Node(2, "x"), Node(1, "y")])
    with pytest.raises(InputError, match="several types"):
        two.scheduled(quotas({0: 1, 1: 1}))
    fair = QuotaPlan([QuotaJob("a", score=1, must_run=True)], budget=3, objective="proportional")
    with pytest.raises(InputError, match="2 GPUs are handed out, all 3 must be"):
        fair.scheduled(quotas({0: 2}))
    with pytest.raises(InputError, match="expected Quotas"):
        fair.scheduled([[0, 1]])  # type: ignore[arg-type]
    whole = QuotaPlan([QuotaJob("a", [2], utility=[1], locality="whole")], nodes=[2, 2])
    with pytest.raises(InputError, match="hold its nodes wholly, n0 and n1"):
        whole.scheduled(quotas({0: 1, 1: 1}))
    assert whole.scheduled(quotas({1: 2})).is_scheduled


def test_schedules_of_others_are_refused() -> None:
    """Other GPUs, other jobs, other durations."""
    schedule = plan().scheduled(quotas({}, {0: 2}, {1: 4}))
    for other in (plan(nodes=[4, 4, 3]), plan(jobs=JOBS[:2])):
        with pytest.raises(InputError, match="belongs to another plan"):
            other.evaluate(schedule)
    with pytest.raises(InputError, match="expected a Schedule"):
        plan().evaluate("x")  # type: ignore[arg-type]


BAD_JOBS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "expected a name"),
    ({"name": 3}, "job"),
    ({"sizes": []}, "sizes: expected at least one"),
    ({"sizes": [2, 1]}, "sizes: expected ascending"),
    ({"sizes": [0, 1]}, r"sizes\[0\]: expected an integer in 1"),
    ({"sizes": [True]}, r"sizes\[0\]"),
    ({"sizes": [1], "minimum": 1}, "not both"),
    ({"minimum": 3, "maximum": 2}, "minimum: 3 is above the maximum 2"),
    ({"minimum": 2**70}, "minimum: expected an integer"),
    ({"sizes": [1, 2], "utility": [1]}, "utility: expected 2 numbers"),
    ({"sizes": [1], "utility": [math.nan]}, r"utility\[0\]: expected a finite number"),
    ({"sizes": [1], "utility": [10**400]}, r"utility\[0\]: expected a finite number"),
    ({"sizes": [1], "rates": [0]}, "rates: expected numbers > 0"),
    ({"score": -1}, "score: expected a finite number >= 0"),
    ({"weight": 0}, "weight: expected a finite number > 0"),
    ({"work": -1}, "work: expected an integer"),
    ({"must_run": 1}, "must_run: expected True or False"),
    ({"locality": "rack"}, "locality: expected one of"),
    ({"current": [1]}, "current: expected a mapping"),
    ({"pass_work": 3}, "pass_work: needs rates"),
    ({"sizes": {"x": [1]}, "utility": {"y": [1]}}, "utility: names the types y, but sizes"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "rule"), BAD_JOBS, ids=lambda v: str(v)[:40])
def test_bad_jobs(fields: dict[str, Any], rule: str) -> None:
    """One sentence with job, field and value."""
    with pytest.raises(InputError, match=rule) as caught:
        QuotaJob(**{"name": "a", **fields})
    assert "\n" not in str(caught.value)


RUN = QuotaJob("a", must_run=True)
BAD_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"jobs": [3]}, r"jobs\[0\]: expected a QuotaJob"),
    ({"jobs": [JOBS[0], JOBS[0]]}, 'name: "a" is also'),
    ({"budget": 3}, "budget, nodes: expected one"),
    ({"nodes": [-1]}, r"nodes\[0\].gpus"),
    ({"nodes": [Node(1, "", "x"), Node(1, "", "x")]}, "also the name of another node"),
    ({"nodes": None, "budget": {}}, "budget: expected at least one type"),
    ({"nodes": None, "budget": {"x": 10**6, "y": 1}}, "budget: .* at most 1000000, got 1000001"),
    ({"nodes": None, "budget": 10**7}, "budget: .* got 10000000; .* bare arrays"),
    ({"objective": "best"}, "objective: expected one of"),
    ({"resolution": 0}, "resolution: expected an integer"),
    ({"jobs": [QuotaJob("a")]}, "utility: missing"),
    ({"objective": "makespan", "jobs": [RUN]}, "work: missing"),
    ({"objective": "proportional", "jobs": [RUN]}, "score: missing"),
    ({"objective": "max_min", "jobs": [QuotaJob("a")]}, "quota.admit"),
    ({"jobs": [QuotaJob("a", [1], utility=[1], current={"x": 1})]}, 'no node "x"'),
    ({"jobs": [QuotaJob("a", [1], utility=[1], current={"n2": 3})]}, "n2.* has 2 GPUs"),
    ({"jobs": [QuotaJob("a", {"x": [1]}, utility={"x": [1]})]}, 'names the type "x"'),
    ({"nodes": None, "budget": 3, "jobs": JOBS[1:2]}, "current: needs a plan with nodes"),
    ({"nodes": None, "budget": 3, "jobs": JOBS[2:]}, "locality: needs a plan with nodes"),
    ({"jobs": [QuotaJob("a", [1], utility=[1e300])]},
     r"'a'.utility: 1e\+300 times the weight 1 is beyond 2.53"),
    ({"jobs": [QuotaJob("a", [1], utility=[1], idle=1e18)]},
     r"'a'.idle: 1e\+18 times the weight 1 is beyond 2.53"),
    ({"jobs": [QuotaJob("a", [1], utility=[1e18], must_run=True)], "objective": "max_min"},
     r"'a'.utility: 1e\+18 divided by the weight 1 is beyond 2.53"),
    ({"jobs": [QuotaJob("a", [1, 2], utility=[1e-7, 4e-7])]},
     "'a'.utility: 4e-07 times the weight 1 counts as 0 at resolution 1000000; raise"),
    ({"jobs": [JOBS[0], QuotaJob("b", [1], utility=[1], weight=1e-300)]},
     "'b'.utility: 1 times the weight 1e-300 counts as 0"),
    ({"jobs": [QuotaJob("a", [1], utility=[0], idle=-1e-9)]}, "'a'.idle: -1e-09 .* counts as 0"),
    ({"jobs": [QuotaJob("a", [1], utility=[1], weight=1e300, must_run=True)],
      "objective": "max_min"}, r"'a'.utility: 1 divided by the weight 1e\+300 counts as 0"),
    ({"jobs": [RUN, QuotaJob("b", weight=1e300, must_run=True)], "objective": "max_min"},
     r"'b'.weight: 10 GPUs divided by the weight 1e\+300 counts as 0"),
    ({"jobs": [QuotaJob("a", [1], work=1, rates=[1e308], must_run=True)], "objective": "makespan"},
     r"'a'.rates: 1e\+308 is beyond 2.62 parts"),
    ({"jobs": [QuotaJob("a", [1], work=2**53, rates=[0.5], must_run=True)], "resolution": 10,
      "objective": "makespan"}, "work: the longest job would take 18014398509481984 s"),
    ({"jobs": [QuotaJob(n, [1], utility=[8e9]) for n in "ab"]}, "together are worth"),
    ({"jobs": [QuotaJob("a", [1, 3], score=1, must_run=True)], "objective": "proportional"},
     "needs all numbers between"),
    ({"jobs": [QuotaJob("a", [1], work=2**50, rates=[1], must_run=True)],
      "objective": "makespan"}, "work: .* beyond 2.62"),
    ({"jobs": [QuotaJob("a", [1], work=1, rates=[1e-9], must_run=True)],
      "objective": "makespan"}, "rates: .* below half a part"),
    ({"jobs": [RUN], "objective": "max_min", "resolution": 10**12, "nodes": [10**6]},
     r"'a'.weight: 1e\+06 GPUs divided by the weight 1 is beyond 2.53 .* lower the resolution"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "rule"), BAD_PLANS, ids=lambda v: str(v)[:40])
def test_bad_plans(fields: dict[str, Any], rule: str) -> None:
    """One sentence with place, field and value."""
    with pytest.raises(InputError, match=rule) as caught:
        plan(**fields)
    assert "\n" not in str(caught.value)


def test_infeasible_plans_name_their_jobs() -> None:
    """Too small a budget is no error, but no answer either."""
    jobs = [QuotaJob(f"j{i}", minimum=3, utility=[1], must_run=True) for i in range(7)]
    result = optsched.solve(QuotaPlan(jobs, budget=20))
    assert result.status == "infeasible"
    assert "'j0', 'j1'" in result.reason
    assert "at least 21 GPUs together, there are 20" in result.reason
    one = QuotaPlan([QuotaJob("x", [9], utility=[1], must_run=True)], budget=8)
    assert "job 'x' must run and needs at least 9 of 8 GPUs" in optsched.solve(one).reason


def test_jobs_are_values() -> None:
    """Equal fields are equal jobs; they cannot be changed, but copied and pickled."""
    for job in (*JOBS, QuotaJob("t", {"x": [1, 2]}, utility={"x": [1, 2]}, idle=-1)):
        again = pickle.loads(pickle.dumps(job))
        assert again == job == QuotaJob(**job.given())
        assert hash(again) == hash(job)
        with pytest.raises(AttributeError):
            job.name = "z"  # type: ignore[misc]
        with pytest.raises(TypeError):
            job.current["n0"] = 1  # type: ignore[index]
    assert pickle.loads(pickle.dumps(plan())) == plan()


def test_changed_and_identity() -> None:
    """The hash depends on what is asked, not on the name; unknown fields are refused."""
    problem = plan()
    assert problem.changed(name="x").sha256 == problem.sha256
    assert problem.changed(resolution=10) != problem
    assert problem.changed(budget=10, jobs=JOBS[:1]).nodes == ()
    with pytest.raises(InputError, match="x: a QuotaPlan has no such field"):
        problem.changed(x=1)


def test_documents_round_trip(tmp_path: Path) -> None:
    """What is written is what is read, by itself and by `read_problem`."""
    path = tmp_path / "p.json"
    for problem in (*quota_problems(60), plan(name="three")):
        problem.write(path)
        for again in (QuotaPlan.read(path), read_problem(path)):
            assert isinstance(again, QuotaPlan)
            assert (again.name, again.sha256) == (problem.name, problem.sha256)
            assert quota_json.to_json(again) == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"jobs": [{"name": "a", "sizes": [2, 1]}]}, "x.json: job 'a'.sizes"),
        ({"jobs": [{"name": "a", "sise": [1]}]}, "x.json"),
        ({"format": "optsched.quota/2"}, "newer"),
        ({"budget": {"h": 1.5}}, r"x.json: budget\['h'\]: expected an integer .* got 1.5"),
        ({"jobs": [{"name": "a", "sizes": {"h": [1.5]}}]}, r"sizes\['h'\]\[0\]: .* got 1.5"),
        ({"jobs": [{"name": "a", "sizes": [1], "utility": {"h": ["x"]}}]},
         r"utility\['h'\]\[0\]: .* got \"x\""),
        ({"jobs": [{"name": "a", "rates": {"h": [True]}}]}, r"rates\['h'\]\[0\]: .* got True"),
        ({"jobs": [{"name": "a", "minimum": {"h": "1"}}]}, "minimum\\['h'\\]: .* got \"1\""),
        ({"jobs": [{"name": "a", "current": {"n0": 1.5}}]}, r"current\['n0'\]: .* got 1.5"),
        ({"nodes": [{"gpus": 1}]}, "x.json"),
    ],
)  # fmt: skip
def test_hostile_documents(change: dict[str, Any], rule: str) -> None:
    """The file is named, with the place and the rule."""
    tree: dict[str, Any] = {"format": "optsched.quota/1", "budget": 2, "jobs": []}
    with pytest.raises(InputError, match=rule):
        quota_json.from_tree({**tree, **change}, "x.json")


@given(st.randoms(use_true_random=False))
def test_costs_are_those_of_the_definition(rng: Any) -> None:
    """Every answer that brute force allows costs what the plan says; the bound is below all."""
    problem = random_plan(rng)
    if problem.infeasibility():
        assert next(answers(problem), None) is None
        return
    found, cost = list(answers(problem)), None
    bound = problem.lower_bound()
    of = {kind: k for k, kind in enumerate(problem.kinds)}
    for choice in found[:50]:
        cost = cost or cost_of(problem)
        sizes = np.array([gpus for _, gpus in choice], np.int64)
        kinds = np.array([of[kind] if gpus else 0 for kind, gpus in choice], np.int64)
        assert problem.worth(sizes, kinds) == cost(choice) >= bound


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 5)), min_size=1,
             max_size=7),
    st.integers(0, 30),
)  # fmt: skip
def test_shares_are_exact(jobs: list[tuple[int, int, int]], extra: int) -> None:
    """Shares clip(mu S, lo, hi) to the last part, against fractions found in another way."""
    rows = [
        QuotaJob(f"j{i}", minimum=low, maximum=low + more, score=score, must_run=True)
        for i, (score, low, more) in enumerate(jobs)
    ]
    budget = sum(low for _, low, _ in jobs) + extra
    problem = QuotaPlan(rows, budget=budget, objective="proportional")
    expected = [math.floor(10**6 * q) for q in shares(problem)]
    assert problem.share.tolist() == expected


def _hull_relaxation(problem: QuotaPlan) -> Fraction:
    """The linear relaxation of a sum with one type: steepest edges of the lower hulls first."""
    table, edges, total, left = problem.table, [], Fraction(0), problem.n_gpus
    for a, b in pairwise(table.ptr.tolist()):
        points = sorted(zip(table.size[a:b].tolist(), table.cost[a:b].tolist(), strict=True))
        size, cost = points[0]
        total, left = total + cost, left - size
        while True:  # the steepest descent from here is the next edge of the hull
            steps = [(Fraction(c - cost, g - size), -g, c) for g, c in points if g > size]
            if not steps or min(steps)[0] >= 0:
                break
            slope, g, c = min(steps)
            edges.append((slope, -g - size))
            size, cost = -g, c
    for slope, gpus in sorted(edges):
        taken = min(gpus, left)
        total, left = total + slope * taken, left - taken
    return total


@given(st.integers(0, 10**6))
def test_the_bound_of_sums_is_that_of_the_hull(seed: int) -> None:
    """Integer prices lose less than one part a GPU against the linear relaxation."""
    problem = random_plan(random.Random(seed), "sum")
    if len(problem.kinds) > 1 or problem.infeasibility() or not problem.jobs:
        return
    exact, bound = _hull_relaxation(problem), problem.lower_bound()
    assert exact - problem.n_gpus <= bound <= exact


@pytest.mark.parametrize(("n", "worth"), [(6, 7), (100, 116), (1000, 1166)])
def test_the_bound_of_equal_jobs_on_two_types(n: int, worth: int) -> None:
    """That of the linear relaxation, whose best prices, 2 and 1, lie where the dual has an edge."""
    sizes, utility = {"a": [1, 2], "b": [1, 2, 4]}, {"a": [2, 3.5], "b": [1, 1.5, 2.5]}
    jobs = [QuotaJob(f"j{i}", sizes=sizes, utility=utility) for i in range(n)]
    budget = {"a": n // 3, "b": n // 2}
    assert QuotaPlan(jobs, budget=budget).lower_bound() == -worth * 10**6
