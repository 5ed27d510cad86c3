"""EHA, PTS and their hybrid: their picks are those of slow twins, never above the optimum."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from depth import depth
from subset_cases import WithoutTables, judged, optimum, problem_of, solved

import optsched
from optsched.bandwidth import Policy
from optsched.bandwidth.search.by_counts import fewest
from optsched.errors import InputError, UnsupportedProblem
from optsched_solvers.gpus.bandpilot import Eha, Hybrid, Pts
from optsched_solvers.gpus.even_spreads import candidates


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


def eha(problem, model, most=200):  # type: ignore[no-untyped-def]
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


def pts(problem, model):  # type: ignore[no-untyped-def]
    """PTS in plain Python, from its description: value, GPUs, and sets evaluated."""
    cluster, free, k = problem.cluster, list(problem.state.free), problem.k

    def alone(gpus):  # type: ignore[no-untyped-def]
        value = model.known(tuple(gpus))
        return -1 if value is None else value

    def worth(gpus):  # type: ignore[no-untyped-def]
        value = judged(problem, model, gpus)
        return -1 if value is None else value

    groups = [[g for g in free if cluster.host_of[g] == h] for h in range(cluster.n_hosts)]
    groups = [group for group in groups if len(group) >= k]
    chosen = max(groups, key=alone) if groups else free
    evaluated = 0
    while len(chosen) > k:
        best = None
        for gpu in chosen:
            rest = [g for g in chosen if g != gpu]
            evaluated += 1
            if best is None or worth(rest) > best[0]:
                best = worth(rest), rest
        chosen = best[1]
    value = worth(chosen)
    return (None if value < 0 else (value, tuple(chosen))), evaluated, len(groups) == 0


@pytest.mark.parametrize("solver", [Eha(), Pts()], ids=["eha", "pts"])
def test_picks_of_the_twins(solver):  # type: ignore[no-untyped-def]
    """Same GPUs and values as the twin; never above the best of all subsets."""
    several = 0
    for seed in range(depth(120, 400)):
        problem, model = problem_of(seed)
        if isinstance(solver, Eha):
            most = random.Random(seed).choice([200, 200, 1, 2, 5])
            found, expected = (
                solved(problem, solver, max_candidates=most),
                eha(problem, model, most),
            )
        else:
            seen = []
            optsched.solve(problem, solver, on_progress=lambda p, s=seen: s.append(p.iteration))
            found, (expected, evaluated, everywhere) = solved(problem, solver), pts(problem, model)
            assert not any(seen) or seen[-1] == evaluated  # iterations are sets evaluated
            n, k = len(problem.state.free), problem.k
            assert not everywhere or evaluated == (n * (n + 1) - k * (k + 1)) // 2
        assert found == expected, seed
        if found is not None:
            several += len({problem.cluster.host_of[g] for g in found[1]}) > 1
            assert seed % 4 or found[0] <= optimum(problem)
    assert several > 10


def test_models_without_tables():  # type: ignore[no-untyped-def]
    """The plain path picks the same."""
    for seed in range(depth(60, 100)):
        problem, model = problem_of(seed, 9)
        plain = problem.changed(model=WithoutTables(model))
        assert plain.tables is None
        for solver in (Eha(), Pts()):
            assert solved(plain, solver) == solved(problem, solver), seed


@pytest.mark.parametrize("solver", [Eha(), Pts()], ids=["eha", "pts"])
def test_policies(solver):  # type: ignore[no-untyped-def]
    """`required` and `exclude` are obeyed, other rules are refused by name."""
    obeyed = 0
    for seed in range(60):
        problem, _ = problem_of(seed)
        names = [host.name for host in problem.cluster.hosts]
        rules = [{"required": "rack"}, {"exclude": (names[-1],)}, {"required": "host"}]
        policy = Policy(**random.Random(seed).choice(rules))
        narrow = optsched.GpuPlacement(
            problem.state, problem.model, max(1, problem.k // 2), policy=policy, traffic="idle"
        )
        found = solved(narrow, solver)
        if found is not None:
            obeyed += 1
            assert found[0] <= optimum(narrow)
    assert obeyed > 20
    for rule in (
        {"balance": "even"}, {"max_hosts": 1}, {"preferred": "rack"}, {"same_type": True},
        {"min_hosts": 2}, {"include": (names[0],)},
    ):  # fmt: skip
        other = problem.changed(gpus=2, policy=Policy(**rule))
        with pytest.raises(UnsupportedProblem, match=next(iter(rule))):
            optsched.solve(other, solver)


def test_hybrid():  # type: ignore[no-untyped-def]
    """The better of both, EHA's on ties; options reach the part they belong to."""
    both = 0
    for seed in range(depth(100, 150)):
        problem, _ = problem_of(seed)
        first, second = solved(problem, Eha(), max_candidates=2), solved(problem, Pts())
        found = solved(problem, Hybrid(), max_candidates=2)
        known = [one for one in (first, second) if one is not None]
        assert found == (max(known, key=lambda one: one[0]) if known else None), seed
        both += first is not None and second is not None and second[0] > first[0]
    assert both


@pytest.mark.parametrize("given", [0, 1.5, 10**9])
def test_hostile_options(given):  # type: ignore[no-untyped-def]
    """A number of candidates that cannot be is named."""
    problem, _ = problem_of(1)
    with pytest.raises(InputError, match="max_candidates"):
        optsched.solve(problem, Eha(), options={"max_candidates": given})


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
