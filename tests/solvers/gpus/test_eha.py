"""EHA: its picks are those of a slow twin, and never above the optimum."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from depth import depth
from subset_cases import WithoutTables, judged, optimum, problem_of, solved

import optsched
from optsched.bandwidth import Cluster, ClusterState, Contention, Host, HostType, Policy
from optsched.bandwidth.ask import ask
from optsched.errors import InputError, UnsupportedProblem
from optsched.testing.best_gpus import Tables
from optsched_solvers.gpus.eha import Eha, candidates, fewest


def fastest(problem, model, host, count):  # type: ignore[no-untyped-def]
    """The best free GPUs of a host by their own bandwidth; the first of equals."""
    free = [g for g in problem.state.free if problem.cluster.host_of[g] == host]

    def within(gpus):  # type: ignore[no-untyped-def]
        first = int(problem.cluster.first[host])
        mask = sum(1 << (g - first) for g in gpus)
        return problem.cluster.type(host).intra.of(mask) if len(gpus) > 1 else 0

    return max(combinations(free, count), key=within)


def evenly(room, k):  # type: ignore[no-untyped-def]
    """All vectors >= 1 within `room` that sum to k and in which no unit can even them out more."""
    found: list[tuple[int, ...]] = []

    def extend(counts, left):  # type: ignore[no-untyped-def]
        if len(counts) == len(room):
            if left == 0:
                found.append(tuple(counts))
            return
        for c in range(1, min(room[len(counts)], left) + 1):
            extend([*counts, c], left - c)

    extend([], k)
    return [
        counts
        for counts in found
        if not any(a >= b + 2 and b < r for a in counts for b, r in zip(counts, room, strict=True))
    ]


def twin(problem, model, most=200):  # type: ignore[no-untyped-def]
    """EHA in plain Python, from its description; value and GPUs, or None."""
    room = {}
    for g in problem.state.free:
        h = int(problem.cluster.host_of[g])
        room[h] = room.get(h, 0) + 1
    k = problem.k

    def best(rows):  # type: ignore[no-untyped-def]
        top = None
        for hosts, counts in rows:
            gpus = [
                g for h, c in zip(hosts, counts, strict=True) for g in fastest(problem, model, h, c)
            ]
            value = judged(problem, model, gpus)
            if value is not None and (top is None or value > top[0]):
                top = value, tuple(sorted(gpus))
        return top

    first = best([((h,), (k,)) for h in sorted(room) if room[h] >= k])
    if first is not None:
        return first
    for m in range(1, len(room) + 1):
        sets = [some for some in combinations(sorted(room), m) if sum(room[h] for h in some) >= k]
        if sets and m > 1:
            rows = [
                (some, counts)
                for some in sets
                for counts in sorted(evenly([room[h] for h in some], k))
            ]
            return best(rows[:most])
    return None


def test_picks_of_the_twin():  # type: ignore[no-untyped-def]
    """Same GPUs and values as the twin; never above the best of all subsets."""
    several = 0
    for seed in range(depth(200, 400)):
        problem, model = problem_of(seed)
        most = random.Random(seed).choice([200, 200, 1, 2, 5])
        found = solved(problem, Eha(), max_candidates=most)
        assert found == twin(problem, model, most), seed
        if found is not None:
            several += len({problem.cluster.host_of[g] for g in found[1]}) > 1
        if seed % 4 == 0 and found is not None:
            assert found[0] <= optimum(problem)
    assert several > 20


def test_models_without_tables():  # type: ignore[no-untyped-def]
    """The plain path picks the same; also with exact joint allocations."""
    for seed in range(60):
        problem, model = problem_of(seed, 9)
        plain = problem.changed(model=WithoutTables(model))
        assert plain.tables is None
        if problem.contention.fill == "first":
            assert solved(plain, Eha()) == solved(problem, Eha()), seed
        exact, model = problem_of(seed, 9, contention=Contention(fill="exact"))
        assert solved(exact, Eha()) == twin(exact, model), seed


def test_one_host_is_enough():  # type: ignore[no-untyped-def]
    """A slow host that has room is taken although two hosts would be faster, as printed."""
    alone = 0
    for seed in range(40):
        problem, _ = problem_of(seed)
        found = solved(problem, Eha())
        if problem.state.room.max() >= problem.k and not problem.model.gaps:
            assert len({problem.cluster.host_of[g] for g in found[1]}) == 1
            alone += 1
    assert alone > 10


def test_policies():  # type: ignore[no-untyped-def]
    """`required` and `exclude` are obeyed, other rules are refused by name."""
    obeyed = 0
    for seed in range(60):
        problem, _ = problem_of(seed)
        names = [host.name for host in problem.cluster.hosts]
        rules = [{"required": "rack"}, {"exclude": (names[-1],)}, {"required": "host"}]
        policy = Policy(**random.Random(seed).choice(rules))
        k = max(1, problem.k // 2)
        narrow = optsched.GpuPlacement(
            problem.state, problem.model, k, policy=policy, traffic="idle"
        )
        found = solved(narrow, Eha())
        if found is not None:
            obeyed += 1
            assert found[0] <= optimum(narrow)
        elif problem.model.gaps == 0 and policy.required is None:
            assert optimum(narrow) is None
    assert obeyed > 20
    for rule in ({"balance": "even"}, {"max_hosts": 1}, {"preferred": "rack"}, {"same_type": True}):
        other = problem.changed(
            requests=(optsched.problems.gpus.problem.Request("a", 1, Policy(**rule)),)
        )
        with pytest.raises(UnsupportedProblem, match=next(iter(rule))):
            optsched.solve(other, Eha())


@pytest.mark.parametrize("given", [0, -1, 1.5, "many", True, None, 10**9])
def test_hostile_options(given):  # type: ignore[no-untyped-def]
    """A number of candidates that cannot be is named."""
    problem, _ = problem_of(1)
    with pytest.raises(InputError, match="max_candidates"):
        optsched.solve(problem, Eha(), options={"max_candidates": given})


def test_candidates_are_all_even_spreads():  # type: ignore[no-untyped-def]
    """Every even spread over every set of m hosts, in lexicographic order, cut at any length."""
    for seed in range(300):
        rng = random.Random(seed)
        room = np.array([rng.randint(1, 6) for _ in range(rng.randint(1, 6))])
        k = rng.randint(1, int(room.sum()))
        m = fewest(room, k)
        expected = [
            (some, counts)
            for some in combinations(range(len(room)), m)
            for counts in sorted(evenly([int(room[h]) for h in some], k))
        ]
        most = rng.choice([1, 3, 1000])
        hosts, counts = candidates(room, range(len(room)), k, m, most)
        listed = list(zip(map(tuple, hosts.tolist()), map(tuple, counts.tolist()), strict=True))
        assert listed == expected[:most], seed


def test_classes():  # type: ignore[no-untyped-def]
    """Beyond 16 hosts: of sets and spreads that are alike exactly the first is listed."""
    for seed in range(25):
        rng = random.Random(seed)
        kinds = [rng.randint(0, 2) for _ in range(rng.randint(17, 19))]
        size = [rng.randint(1, 4) for _ in range(3)]
        room = np.array([size[kind] for kind in kinds])
        k = rng.randint(1, min(11, int(room.sum())))
        m = fewest(room, k)
        seen, expected = set(), []
        for some in combinations(range(len(room)), m):
            if sum(room[h] for h in some) < k:
                continue
            for counts in sorted(evenly([int(room[h]) for h in some], k)):
                look = tuple(sorted((kinds[h], c) for h, c in zip(some, counts, strict=True)))
                if look not in seen:
                    seen.add(look)
                    expected.append((some, counts))
        hosts, counts = candidates(room, kinds, k, m, 10_000)
        listed = list(zip(map(tuple, hosts.tolist()), map(tuple, counts.tolist()), strict=True))
        assert listed == expected, seed


def test_many_like_hosts():  # type: ignore[no-untyped-def]
    """Hundreds of hosts that are alike make few candidates, at once."""
    room = np.full(400, 8)
    hosts, counts = candidates(room, ["a"] * 400, 1500, 188, 200)
    assert hosts.tolist() == [list(range(188))]
    assert sorted(set(counts[0].tolist())) == [7, 8] and counts.sum() == 1500
    assert (np.diff(counts[0]) >= 0).all()
    kinds = [i % 40 for i in range(400)]
    hosts, _ = candidates(room, kinds, 1500, 188, 200)
    assert len(hosts) == 200


def test_hosts_beyond_masks():  # type: ignore[no-untyped-def]
    """Hosts of 20 GPUs, where only numbers are chosen."""
    kind = HostType("rack", 20, tray=4)
    cluster = Cluster((Host("a", "rack"), Host("b", "rack")), (kind,))

    class Flat(Tables):
        def __init__(self) -> None:
            self.cluster, self.limits, self.gaps = cluster, {}, 0
            self.values = list(range(3, 60))

        def intra_of(self, kind, which="value"):  # type: ignore[no-untyped-def]
            return np.arange(21) * 7_000_000

    state = ClusterState.with_free(cluster, [*range(3, 15), *range(22, 40)])
    for k in (1, 5, 18, 19, 30):
        found = solved(optsched.GpuPlacement(state, Flat(), k), Eha())
        best = ask(Flat().tables(), state.masks, state.held, (), k)
        assert found is not None and best is not None and found[0] <= best.value
        on = [sum(g < 20 for g in found[1]), sum(g >= 20 for g in found[1])]
        assert min(on) == 0 if k <= 18 else max(on) - min(on) <= 1 or k == 30
