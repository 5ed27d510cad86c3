"""`allocation` and `sia`: their decisions at every event are the optima that they promise."""

from __future__ import annotations

import itertools

import elastic_workloads as cases
import numpy as np
import pytest
from depth import depth, few_examples
from hypothesis import given
from hypothesis import strategies as st
from oracles.policy_checks import check_policy
from oracles.policy_worlds import policy_worlds

from optsched.cluster import Job, Nodes, simulate
from optsched.cluster.policies import get
from optsched.cluster.policies.allocation import all_jobs, best_options, isolated_time
from optsched.cluster.policies.elastic_rule import (
    FREE,
    IDLE,
    NEVER,
    fixed_sizes,
    gangs,
    share,
    sizing,
)
from optsched.cluster.policies.gpu_types import one_type
from optsched.cluster.policies.sia import costs
from optsched.cluster.workload.job import WORK
from optsched.errors import InputError
from optsched_solvers import quota

CASES = [
    ("allocation", {}), ("allocation", {"of": "speed"}),
    ("allocation", {"objective": "proportional"}),
    ("allocation", {"objective": "proportional", "score": "remaining"}),
    ("allocation", {"objective": "makespan"}),
    ("allocation", {"objective": "makespan", "clairvoyant": True}),
    ("allocation", {"objective": "finish_time_fairness"}),
    ("allocation", {"objective": "goodput"}), ("allocation", {"objective": "goodput", "p": 0.0}),
    ("allocation", {"objective": "goodput", "p": 1.0}), ("sia", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CASES)
def test_conformance(name, options):
    """Legal, pure, complete, and not clairvoyant unless it says so."""
    check_policy(get(name, **options), worlds=policy_worlds(depth(4, 40), zero_slot=True))


class Watched:
    """A policy that keeps what `look` returns for its views and decisions."""

    def __init__(self, name, look, **options):
        self.policy, self.look, self.seen = get(name, **options), look, []
        self.name, self.clairvoyant = name, self.policy.clairvoyant

    def decide(self, view):
        """Keep what is looked at."""
        decision = self.policy.decide(view)
        self.seen.append(self.look(view, decision))
        return decision


def fixed_of(view):
    """How free every job's size is."""
    return fixed_sizes(view, sizing(view.workload, view.nodes, view.settings, False))


def movable_of(view):
    """Positions of the jobs whose size is to be chosen, and GPUs for them."""
    n, known = len(view.job), sizing(view.workload, view.nodes, view.settings, False)
    jobs = gangs(view, known, np.arange(n), *[np.zeros(n)] * 4, view.rate)
    spare, least, fixed = share(jobs, int(view.free.sum()), NEVER, IDLE), jobs.quota, jobs.fixed
    movable = np.flatnonzero((least > 0) & (fixed == FREE))
    return movable, int(least[movable].sum() + spare)


def rows(view, position):
    """Sizes and speeds of a job."""
    at = slice(view.size_ptr[position], view.size_ptr[position + 1])
    return view.size[at].tolist(), view.rate[at].tolist()


def against_brute_force(seed, value, sizes=None, **options):
    """The largest ``value(view, position, rate)`` of the jobs is the smallest possible one."""

    def look(view, decision):
        movable, budget = movable_of(view)
        tables = [dict(zip(*rows(view, p), strict=True)) for p in movable.tolist()]

        def worst(ways):
            every = zip(movable.tolist(), tables, ways, strict=True)
            return max((value(view, p, table[g]) for p, table, g in every), default=0)

        best = min(worst(ways) for ways in itertools.product(*tables) if sum(ways) <= budget)
        found = worst(decision.quota[movable].tolist())
        assert found == pytest.approx(best, rel=1e-9)
        return len(movable)

    watched = Watched("allocation", look, **options)
    fixed = {} if sizes is None else {"sizes": sizes}
    work = cases.workload(seed, 8, **fixed)
    simulate(work, watched, cases.nodes(seed), **cases.settings(seed))
    assert sum(watched.seen)


@few_examples
@given(st.integers(0, 10**6), st.sampled_from([None, (1, 2, 3, 4)]))
def test_makespan_is_smallest(seed, sizes):
    """Of the jobs that run, by estimated remaining work."""
    against_brute_force(
        seed, lambda view, p, rate: int(view.remaining[p]) / rate, sizes, objective="makespan"
    )


@few_examples
@given(st.integers(0, 10**6))
def test_fairness_is_smallest(seed):
    """The largest rho."""

    def rho(view, p, rate):
        whole = view.time - int(view.submit[p]) + int(view.remaining[p]) / rate
        return whole / isolated_time(view, all_jobs(view), p)

    against_brute_force(seed, rho, objective="finish_time_fairness")


@few_examples
@given(st.integers(0, 10**6))
def test_lowest_speed_is_largest(seed):
    """Max-min fairness of f(g)/w."""
    against_brute_force(seed, lambda view, p, rate: float(view.weight[p]) / rate, of="speed")


@few_examples
@given(st.integers(0, 10**6), st.sampled_from(["max_min", "proportional"]))
def test_shares_are_those_of_the_quota_solvers(seed, objective):
    """With all sizes up to four."""

    def look(view, decision):
        movable, budget = movable_of(view)
        weight = view.weight[movable]
        if len(movable) and objective == "max_min":
            given, _ = quota.max_min(weight, budget, 1, 4)
            assert decision.quota[movable].tolist() == given.tolist()
        elif len(movable):
            given, _ = quota.proportional(weight, budget, 1, 4, method="webster")
            assert decision.quota[movable].tolist() == given.tolist()
        return len(movable)

    watched = Watched("allocation", look, objective=objective)
    work = cases.workload(seed, 8, sizes=(1, 2, 3, 4))
    simulate(work, watched, cases.nodes(seed), **cases.settings(seed))
    assert sum(watched.seen)


@given(st.integers(0, 2**32))
def test_best_options_against_brute_force(seed):
    """One option of every row; the smallest ones fit."""
    random = np.random.default_rng(seed)
    sizes = [np.unique(random.integers(0, 7, random.integers(1, 4))) for _ in range(4)]
    values = [random.integers(-20, 20, len(row)) for row in sizes]
    budget = int(sum(row[0] for row in sizes) + random.integers(0, 12))
    ptr = np.append(0, np.cumsum([len(row) for row in sizes]))
    size = np.concatenate(sizes)
    found = size[best_options(ptr, size, np.concatenate(values), budget)]
    worth = [
        dict(zip(s.tolist(), v.tolist(), strict=True)) for s, v in zip(sizes, values, strict=True)
    ]
    assert found.sum() <= budget
    assert sum(w[g] for w, g in zip(worth, found.tolist(), strict=True)) == max(
        sum(w[g] for w, g in zip(worth, ways, strict=True))
        for ways in itertools.product(*worth)
        if sum(ways) <= budget
    )


# Sia


def sia_costs(view):
    """Configurations of all jobs that the choice is made of: rows of {GPUs: hundredths}."""
    fixed = fixed_of(view)
    loose = np.flatnonzero((np.diff(view.size_ptr) > 0) & (fixed != 3))
    cost = costs(view, one_type(view), loose, fixed, -0.5)
    rows = [range(*view.size_ptr[i : i + 2]) for i in loose]
    allowed = cost < 2**61
    cost = -((-cost) // (len(loose) + 1))  # without the trace of changes
    table = [
        {0: 110} | {int(view.size[k]): int(cost[k]) for k in row if allowed[k]} for row in rows
    ]
    for row, i in zip(table, loose.tolist(), strict=True):
        if view.gpus[i] and not view.preemptible[i]:
            del row[0]
    return loose, table


def sia_tables(**job):
    """Time, GPUs and configurations of one job, at every pass of 10 s."""
    watched = Watched("sia", lambda view, _: (view.time, int(view.gpus[0]), sia_costs(view)[1][0]))
    fields = {"name": "a", "sizes": (1, 2, 3, 4, 8), "work": 40 * WORK, "passes": 4}
    simulate([Job(**(fields | job))], watched, Nodes(2, 4), restart_cost=30)
    return watched.seen


def test_sia_costs_are_rounded_as_published():
    """(f r / f_min)^-.5 to two decimals, 1.1 for a job left out, sizes 1, 2, 4, whole nodes."""
    assert sia_tables()[0] == (0, 0, {0: 110, 1: 100, 2: 71, 4: 50, 8: 35})


def test_sia_discounts_changes():
    """R = 1 while younger than the restart cost, else (age - restarts cost) / (age + cost)."""
    seen = sia_tables(sizes=(1, 2), work=200 * WORK, passes=5)
    assert [t for t, _, _ in seen] == [0, 20, 40, 60, 80]
    assert seen[1][2] == {0: 110, 1: 100, 2: 71}
    assert seen[2][1:] == (2, {0: 110, 1: round(100 * (40 / 70) ** -0.5), 2: 71})


@few_examples
@given(st.integers(0, 10**6), st.sampled_from([cases.SIZES, cases.GANGS]))
def test_sia_is_smallest(seed, choices):
    """The rounded objective against brute force, then the fewest changes."""

    def look(view, decision):
        loose, table = sia_costs(view)
        held = view.gpus[loose].tolist()
        budget = int(view.free.sum()) + sum(held)

        def value(ways):
            total = sum(row[g] for row, g in zip(table, ways, strict=True))
            return total, sum(g != h for g, h in zip(ways, held, strict=True))

        every = [ways for ways in itertools.product(*table) if sum(ways) <= budget]
        assert value(decision.quota[loose].tolist()) == min(map(value, every))
        return len(loose)

    watched = Watched("sia", look)
    simulate(cases.workload(seed, 5, choices), watched, cases.nodes(seed), **cases.settings(seed))
    assert watched.seen


# rules and options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("entropy", {"lam": 1.5}, "options.lam"), ("entropy", {"lam": float("nan")}, "options.lam"),
        ("entropy", {"lam": True}, "options.lam"), ("entropy", {"lam": "x"}, "options.lam"),
        ("entropy", {"score": "printed"}, "options.score"), ("entropy", {"score": 3}, "score"),
        ("entropy", {"preemptive": 1}, "options.preemptive"),
        ("entropy", {"initial": -1}, "options.initial"),
        ("elastic", {"clairvoyant": "yes"}, "options.clairvoyant"),
        ("elastic", {"order": "lifo"}, "options.order"), ("elastic", {"lam": 1}, "no option"),
        ("elastic", {"preempt": True}, "options.preempt"),
        ("time_to_target", {"sigma": 0}, "options.sigma"),
        ("time_to_target", {"sigma": float("inf")}, "options.sigma"),
        ("time_to_target", {"pool": 0}, "options.pool"),
        ("time_to_target", {"surplus": "all"}, "options.surplus"),
        ("allocation", {"of": []}, "options.of"), ("allocation", {"objective": "min"}, "objective"),
        ("allocation", {"objective": "proportional", "score": "S"}, "options.score"),
        ("allocation", {"objective": "makespan", "p": 1.0}, "objective=goodput, not of makespan"),
        ("allocation", {"objective": "goodput", "p": 2}, "options.p"),
        ("sia", {"p": 0}, "options.p"), ("sia", {"p": 10**400}, "options.p"),
        ("elastic_srtf", {}, r"elastic with order=srtf, clairvoyant=True, preempt=order"),
        ("max_min", {}, "allocation with objective=max_min"), ("afs", {}, "elastic with surplus="),
    ],
)  # fmt: skip
def test_wrong_options(name, options, message):
    """One sentence that names the option, or the policy that has taken the place of a name."""
    with pytest.raises(InputError, match=message) as error:
        get(name, **options)
    assert "\n" not in str(error.value)
