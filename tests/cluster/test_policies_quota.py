"""Policies that solve a quota problem at every event: their decisions are its optima."""

from __future__ import annotations

import itertools

import elastic_workloads as cases
import numpy as np
import pytest
from depth import depth, few_examples
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster import Goodput, Job, Nodes, Workload, simulate
from optsched.cluster.policies import get
from optsched.cluster.policies.allocation import isolated
from optsched.cluster.policies.room import Room
from optsched.cluster.workload.job import WORK
from optsched.errors import InputError
from optsched.testing import check_policy
from optsched.testing.policy_worlds import policy_worlds
from optsched_solvers import quota

CASES = [
    ("max_min", {}), ("max_min", {"of": "speed"}), ("proportional", {}),
    ("proportional", {"score": "remaining", "method": "largest_remainder"}), ("makespan", {}),
    ("makespan", {"clairvoyant": True}), ("finish_time_fairness", {}), ("optimus", {}),
    ("afs", {}), ("goodput", {}), ("goodput", {"p": 0.0}), ("goodput", {"p": 1.0}), ("sia", {}),
]  # fmt: skip


class Watched:
    """A policy that keeps (what `look` says of) its views and decisions."""

    def __init__(self, name, look, **options):
        self.policy, self.look, self.seen = get(name, **options), look, []
        self.name, self.clairvoyant = name, self.policy.clairvoyant

    def decide(self, view):
        """Keep what is to be seen."""
        decision = self.policy.decide(view)
        self.seen.append(self.look(self.policy, view, decision))
        return decision


def watch(name, seed, look, sizes=None, **options):
    """What is seen in one random simulation."""
    policy = Watched(name, look, **options)
    fixed = {} if sizes is None else {"sizes": sizes}
    simulate(cases.workload(seed, 8, **fixed), policy, cases.nodes(seed), **cases.settings(seed))
    return policy.seen


@pytest.mark.parametrize(("name", "options"), CASES)
def test_conformance(name, options):
    """Legal, pure, complete, and not clairvoyant unless it says so."""
    check_policy(get(name, **options), worlds=policy_worlds(depth(4, 40), zero_slot=True))


def rows(view, position):
    """Sizes and speeds of a job."""
    at = slice(view.size_ptr[position], view.size_ptr[position + 1])
    return view.size[at].tolist(), view.rate[at].tolist()


def options_of(view, room):
    """All ways to give the movable jobs allowed sizes within the budget."""
    every = itertools.product(*(rows(view, p)[0] for p in room.movable.tolist()))
    return [ways for ways in every if sum(ways) <= room.budget]


@few_examples
@given(st.integers(0, 10**6))
def test_max_min_is_the_kernel(seed):
    """With contiguous sizes."""

    def look(policy, view, decision):
        room = Room.of(view)
        if len(room.movable):
            one, _ = quota.max_min(view.weight[room.movable], room.budget, 1, 4)
            assert decision.quota[room.movable].tolist() == one.tolist()
        return len(room.movable)

    assert sum(watch("max_min", seed, look, sizes=(1, 2, 3, 4)))


@few_examples
@given(st.integers(0, 10**6))
def test_proportional_is_the_kernel(seed):
    """With contiguous sizes."""

    def look(policy, view, decision):
        room = Room.of(view)
        if len(room.movable):
            weight = view.weight[room.movable]
            one, _ = quota.proportional(weight, room.budget, 1, 4, method="webster")
            assert decision.quota[room.movable].tolist() == one.tolist()
        return len(room.movable)

    assert sum(watch("proportional", seed, look, sizes=(1, 2, 3, 4)))


@few_examples
@given(st.integers(0, 10**6), st.sampled_from([None, (1, 2, 3, 4)]))
def test_makespan_is_smallest(seed, sizes):
    """Brute force over all sizes."""

    def look(policy, view, decision):
        room = Room.of(view)

        def last(ways):
            ends = []
            for p, g in zip(room.movable.tolist(), ways, strict=True):
                size, rate = rows(view, p)
                ends.append(-(-int(view.remaining[p]) // rate[size.index(g)]))
            return max(ends)

        if len(room.movable):
            best = min(map(last, options_of(view, room)))
            assert last(decision.quota[room.movable].tolist()) == best
        return len(room.movable)

    assert sum(watch("makespan", seed, look, sizes=sizes))


@few_examples
@given(st.integers(0, 10**6))
def test_fairness_is_smallest(seed):
    """The largest rho, in millionths, against brute force."""

    def look(policy, view, decision):
        room = Room.of(view)

        def worst(ways):
            found = []
            for p, g in zip(room.movable.tolist(), ways, strict=True):
                size, rate = rows(view, p)
                left = int(view.remaining[p]) / rate[size.index(g)]
                whole = view.time - int(view.submit[p]) + left
                found.append(round(10**6 * whole / isolated(view, p)))
            return max(found)

        if len(room.movable):
            best = min(map(worst, options_of(view, room)))
            assert worst(decision.quota[room.movable].tolist()) == best
        return len(room.movable)

    assert sum(watch("finish_time_fairness", seed, look))


@few_examples
@given(st.integers(0, 10**6), st.sampled_from([-1.0, 0.0, 1.0, -3.0]))
def test_goodput_is_largest(seed, p):
    """The multiple choice finds what brute force finds, and a genetic search nothing better."""

    def look(policy, view, decision):
        room = Room.of(view)
        if len(room.movable) == 0:
            return 0
        ptr, size, value = policy.table(view, room)
        worth = [
            dict(zip(size[a:b].tolist(), value[a:b].tolist(), strict=True))
            for a, b in itertools.pairwise(ptr.tolist())
        ]

        def total(ways):
            return sum(w[g] for w, g in zip(worth, ways, strict=True))

        chosen = decision.quota[room.movable].tolist()
        assert total(chosen) == max(map(total, options_of(view, room)))
        assert total(chosen) >= genetic([list(w) for w in worth], total, room.budget, seed)
        return len(room.movable)

    assert sum(watch("goodput", seed, look, p=p))


def genetic(sizes, total, budget, seed, population=16, generations=8):
    """Pollux's way: crossover, mutation, and repair of rows of sizes."""
    random = np.random.default_rng(seed)

    def repaired(ways):
        ways = list(ways)
        while sum(ways) > budget:
            j = int(random.choice([j for j, g in enumerate(ways) if g > min(sizes[j])]))
            ways[j] = max(g for g in sizes[j] if g < ways[j])
        return tuple(ways)

    crowd = [repaired([int(random.choice(s)) for s in sizes]) for _ in range(population)]
    for _ in range(generations):
        for _ in range(population):
            a, b = (crowd[int(k)] for k in random.integers(population, size=2))
            child = [x if random.random() < 0.5 else y for x, y in zip(a, b, strict=True)]
            j = int(random.integers(len(child)))
            child[j] = int(random.choice(sizes[j]))
            crowd.append(repaired(child))
        crowd = sorted(set(crowd), key=total, reverse=True)[:population]
        crowd += [crowd[0]] * (population - len(crowd))
    return total(crowd[0])


def test_goodput_follows_the_model():
    """A job of small noise scale gains nothing from GPUs; the other gets them."""
    small, large = (
        Goodput(grad=(0.01, 0.01), sync=(0.05, 0.01), batch=8, noise_scale=n, max_batch=256)
        for n in (1, 5000)
    )
    jobs = Workload.of([
        Job(name=n, sizes=(1, 2, 3, 4), work=500 * WORK, speedup=s)
        for n, s in (("small", small), ("large", large))
    ])  # fmt: skip
    log = simulate(jobs, get("goodput", p=1.0), Nodes(1, 5)).log
    assert log.gpus[:2].tolist() == [1, 4]


# Sia


def sia_view(look, **job):
    """One job that starts at 0 and is looked at when a pass of 10 s has ended."""
    policy = Watched("sia", look)
    fields = {"name": "a", "sizes": (1, 2, 3, 4, 8), "work": 40 * WORK, "passes": 4}
    simulate([Job(**(fields | job))], policy, Nodes(2, 4), restart_cost=30)
    return policy.seen


def test_sia_costs_are_rounded_as_the_peer_does():
    """(f r / f_min)^-.5 to two decimals, 1.1 for a job left out, sizes 1, 2, 4, whole nodes."""
    seen = sia_view(lambda policy, view, _: policy.costs(view, 0, 4))
    assert seen[0] == [(1, 1.0), (2, 0.71), (4, 0.5), (8, 0.35)]
    seen = sia_view(lambda policy, view, _: policy.table(view))
    positions, ptr, sizes, values, budget = seen[0]
    assert (positions.tolist(), ptr.tolist(), budget) == ([0], [0, 5], 8)
    assert sizes.tolist() == [0, 1, 2, 4, 8]
    assert values.tolist() == [-110, -100, -71, -50, -35]


def test_sia_discounts_changes():
    """R = 1 while younger than the restart cost, else (age - restarts cost) / (age + cost)."""
    seen = sia_view(lambda policy, view, _: (view.time, int(view.gpus[0]),
                                             policy.costs(view, 0, 4)),
                    sizes=(1, 2), work=200 * WORK, passes=5)  # fmt: skip
    assert [t for t, _, _ in seen] == [0, 20, 40, 60, 80]
    assert seen[1][2] == [(1, 1.0), (2, 0.71)]
    discount = 40 / 70
    assert seen[2][1] == 2
    assert seen[2][2] == [(1, round(discount**-0.5, 2)), (2, 0.71)]


@few_examples
@given(st.integers(0, 10**6), st.sampled_from([cases.SIZES, cases.GANGS]))
def test_sia_is_smallest(seed, choices):
    """The rounded objective against brute force, then the fewest changes."""

    def look(policy, view, decision):
        positions, ptr, size, value, budget = policy.table(view)
        every = [
            list(zip(size[a:b].tolist(), value[a:b].tolist(), strict=True))
            for a, b in itertools.pairwise(ptr.tolist())
        ]
        held = view.gpus[positions].tolist()
        best = max(
            (sum(v for _, v in ways), sum(g == h for (g, _), h in zip(ways, held, strict=True)))
            for ways in itertools.product(*every)
            if sum(g for g, _ in ways) <= budget
        )
        chosen = decision.quota[positions].tolist()
        value_of = [dict(row) for row in every]
        total = sum(row[g] for row, g in zip(value_of, chosen, strict=True))
        assert (total, sum(g == h for g, h in zip(chosen, held, strict=True))) == best
        return len(chosen)

    policy = Watched("sia", look)
    simulate(cases.workload(seed, 5, choices), policy, cases.nodes(seed), **cases.settings(seed))
    assert policy.seen


# rules of their own


def test_optimus_serves_the_largest_gain():
    """The longer job gets the GPUs."""
    jobs = [Job(name=n, sizes=(1, 2, 3), work=w * WORK) for n, w in (("a", 10), ("b", 90))]
    assert simulate(jobs, "optimus", Nodes(1, 4)).log.gpus[:2].tolist() == [1, 3]


def test_afs_balances_short_and_elastic():
    """Of two equally elastic jobs the earlier finisher wins while its gain is the larger."""
    jobs = [Job(name=n, sizes=(1, 2), work=w * WORK) for n, w in (("a", 10), ("b", 90))]
    assert simulate(jobs, "afs", Nodes(1, 3)).log.gpus[:2].tolist() == [2, 1]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_running_jobs_keep_their_size_within_a_pass(name, options):
    """A job that arrives later starts when the other's pass has ended."""
    jobs = [
        Job(name="a", sizes=(1, 2, 3, 4), work=400 * WORK, passes=4),
        Job(name="b", submit=5, sizes=(1, 2, 3, 4), work=10 * WORK),
    ]
    run = simulate(jobs, get(name, **options), Nodes(1, 4))
    assert run.log.gpus[0] == 4
    if name != "sia":
        assert run.log.start[run.log.job == 1].tolist()[0] == 25
        assert run.log.preemptions.sum() == 0


# options


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("entropy", {"lam": 1.5}, "options.lam"), ("entropy", {"lam": float("nan")}, "options.lam"),
        ("entropy", {"lam": True}, "options.lam"), ("entropy", {"lam": "x"}, "options.lam"),
        ("entropy", {"score": "printed"}, "options.score"), ("entropy", {"score": 3}, "score"),
        ("entropy", {"preemptive": 1}, "options.preemptive"),
        ("entropy", {"initial": -1}, "options.initial"),
        ("entropy", {"rank_normalise": None}, "rank_normalise"),
        ("elastic_sjf", {"clairvoyant": "yes"}, "options.clairvoyant"),
        ("elastic_fifo", {"clairvoyant": True}, "no option"),
        ("time_to_target", {"sigma": 0}, "options.sigma"),
        ("time_to_target", {"sigma": float("inf")}, "options.sigma"),
        ("time_to_target", {"pool": 0}, "options.pool"),
        ("time_to_target", {"surplus": "all"}, "options.surplus"),
        ("max_min", {"of": []}, "options.of"), ("proportional", {"score": "S"}, "options.score"),
        ("proportional", {"method": "hamilton"}, "options.method"),
        ("makespan", {"clairvoyant": 1.0}, "options.clairvoyant"),
        ("goodput", {"p": 2}, "options.p"), ("goodput", {"p": None}, "options.p"),
        ("sia", {"p": 0}, "options.p"), ("sia", {"p": 10**400}, "options.p"),
    ],
)  # fmt: skip
def test_wrong_options(name, options, told):
    """One sentence that names the option."""
    with pytest.raises(InputError, match=told) as error:
        get(name, **options)
    assert "\n" not in str(error.value)
