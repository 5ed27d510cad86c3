"""Exact joint allocations: the search over candidate subsets against all subsets."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from depth import depth
from random_subsets import Tables, contention_of, policy_of, sizes_of, state_of

from optsched.bandwidth.ask import ask, gpus_of
from optsched.bandwidth.contention import Contention, share
from optsched.bandwidth.policy import Policy
from optsched.bandwidth.state import ClusterState, Job
from optsched.bandwidth.subset_search import pareto, sizes, submasks
from optsched.bandwidth.subsets import SubsetSearch, ask_exact
from optsched.testing.best_gpus import all_subsets

CASES = depth(80, 240)


def case(seed: int, most: int = 10) -> tuple:  # type: ignore[type-arg]
    """Model, state, demands, k, contention with exact joint allocations, and policy."""
    rng = random.Random(seed)
    model = Tables(rng, sizes_of(rng, rng.randint(2, most)), gaps=rng.choice([0, 0, 0.2]))
    state = state_of(rng, model.cluster) if rng.random() < 0.5 else crowded(rng, model)
    rule = replace(contention_of(rng), fill="exact")
    wanted = tuple(rng.choice([0, 1, 2]) * rng.randint(1, 400) * 1_000_000 for _ in state.jobs)
    return (
        model,
        state,
        wanted,
        rng.randint(1, len(state.free)),
        rule,
        policy_of(rng, model.cluster),
    )


def crowded(rng: random.Random, model: Tables) -> ClusterState:
    """Half of the GPUs free, the others held by two jobs across hosts."""
    gpus = list(range(model.cluster.n_gpus))
    rng.shuffle(gpus)
    half = (len(gpus) + 1) // 2
    held = [gpus[half::2], gpus[half + 1 :: 2]]
    jobs = tuple(Job(f"j{j}", tuple(part)) for j, part in enumerate(held) if part)
    return ClusterState(model.cluster, tuple(gpus[:half]), jobs)


def test_optimum():  # type: ignore[no-untyped-def]
    """The value is the best of all subsets, and the choice has it by the definition."""
    for seed in range(CASES):
        model, state, wanted, k, rule, policy = case(seed)
        found = ask_exact(model.tables(), state, wanted, k, policy, rule)
        best = max(
            (v for v, _ in all_subsets(state, model.known, wanted, k, rule, policy)), default=None
        )
        assert (None if found is None else found.value) == best, seed
        if found is None:
            continue
        gpus = gpus_of(state, found.parts)
        counts = {h: part.bit_count() for h, part in found.parts}
        assert found.exact and found.optimum == best
        assert len(gpus) == k and set(gpus) <= set(state.free)
        assert not policy.broken_by(state.cluster, counts), seed
        got = share(model, state, gpus, wanted, rule)
        assert (got.value, got.standalone, got.capacity, got.demand) == (
            best, found.standalone, found.capacity, found.demand,
        ), seed  # fmt: skip


def test_other_fills_agree_with_the_counts():  # type: ignore[no-untyped-def]
    """With joint allocations by counts it finds what the kernel over counts finds, weights too."""
    for seed in range(150):
        model, state, wanted, k, rule, policy = case(seed, 14)
        by_counts = replace(rule, fill=random.Random(seed).choice(["first", "best"]))
        one = ask_exact(model.tables(), state, wanted, k, policy, by_counts)
        other = ask(model.tables(), state.masks, state.held, wanted, k, policy, by_counts)
        assert (one is None) == (other is None), seed
        if one is not None and other is not None:
            assert (one.value, one.exact) == (other.value, True), seed
            if one.parts == other.parts:
                assert one[6:8] == other[6:8], seed


def test_exact_is_not_first():  # type: ignore[no-untyped-def]
    """Some answers differ between exact and first joint allocations, else this tests nothing."""
    differ = 0
    for seed in range(CASES):
        model, state, wanted, k, rule, policy = case(seed)
        one = ask_exact(model.tables(), state, wanted, k, policy, rule)
        other = ask_exact(model.tables(), state, wanted, k, policy, replace(rule, fill="first"))
        differ += one is not None and other is not None and one.value != other.value
    assert differ


def test_limit_and_continuation():  # type: ignore[no-untyped-def]
    """A limit of leaves ends the search early and says so; bounds enclose the optimum."""
    stopped = 0
    for seed in range(40):
        model, state, wanted, k, rule, policy = case(seed, 12)
        policy = replace(policy, preferred=None)
        best = ask_exact(model.tables(), state, wanted, k, policy, rule)
        some = ask_exact(model.tables(), state, wanted, k, policy, rule, leaves=1)
        if some is not None:
            assert best is not None and some.value <= best.value
            assert not some.exact or some.value == best.value
            stopped += not some.exact
        if best is None or policy.required is not None:
            continue
        search = SubsetSearch(model.tables(), state, wanted, k, policy, rule)
        uppers = []
        while not search.finished:
            search.run(2)
            assert search.value <= best.value <= search.upper
            uppers.append(search.upper)
        assert search.value == best.value and uppers == sorted(uppers, reverse=True)
    assert stopped >= 3


def test_levels_of_a_preference():  # type: ignore[no-untyped-def]
    """A preferred level is tried first, wider ones when it has no room."""
    for seed in range(60):
        model, state, wanted, k, rule, _ = case(seed)
        tables = model.tables()
        racks = ask_exact(tables, state, wanted, k, Policy(required="rack"), rule)
        wish = ask_exact(tables, state, wanted, k, Policy(preferred="rack"), rule)
        free = ask_exact(tables, state, wanted, k, Policy(), rule)
        if racks is not None:
            assert wish is not None and wish.value == racks.value
        assert (wish is None) == (free is None)


def test_large_hosts_by_count():  # type: ignore[no-untyped-def]
    """Hosts beyond 16 GPUs have one candidate a count, also beside jobs on them."""
    from optsched.bandwidth.cluster import Cluster, HostType
    from optsched.bandwidth.intra import IntraTable
    from optsched.bandwidth.model import CountModel, unlimited

    class Model(CountModel):
        def network(self, patterns, which="value"):  # type: ignore[no-untyped-def]
            limit = unlimited(patterns)
            return np.where((patterns > 0).sum(axis=1) > 1, patterns.max(axis=1) * 7_000_000, limit)

        def intra_of(self, kind, which="value"):  # type: ignore[no-untyped-def]
            return self.cluster.types[kind].intra.values

    table = IntraTable(18, [0, 0, *(900_000_000 - 11_000_000 * c for c in range(17))])
    model = Model()
    model.cluster = Cluster.uniform(HostType("big", 18, intra=table), 3)
    job = Job("a", (0, 1, 2, 18, 19), 40_000_000)
    free = tuple(g for g in range(54) if g not in job.gpus)
    state = ClusterState(model.cluster, free, (job,))
    for k in (1, 2, 17, 20, 40, 49):
        found = ask_exact(model.tables(), state, (40_000_000,), k)
        other = ask(model.tables(), state.masks, state.held, (40_000_000,), k)
        assert found is not None and other is not None and found.value == other.value
        gpus = gpus_of(state, found.parts)
        assert share(model, state, gpus, (40_000_000,), Contention()).value == found.value


def test_pareto_against_a_plain_twin():  # type: ignore[no-untyped-def]
    """Kept is one of each front, and nothing that another row of its group beats or equals."""
    for seed in range(40):
        rng = random.Random(seed)
        width = rng.randint(2, 4)
        rows = [
            (rng.randint(0, 2), *(rng.randint(0, 3) for _ in range(width - 1)))
            for _ in range(rng.randint(1, 30))
        ]
        rows.sort(key=lambda row: (row[0], [-x for x in row[1:]]))
        flags = pareto(np.array(rows, np.int64).reshape(-1), width).tolist()
        kept = {row for row, flag in zip(rows, flags, strict=True) if flag}
        assert sum(flags) == len(kept)
        expected = {
            row
            for row in rows
            if not any(
                other != row
                and other[0] == row[0]
                and all(a >= b for a, b in zip(other[1:], row[1:], strict=True))
                for other in rows
            )
        }
        assert kept == expected


def test_masks():  # type: ignore[no-untyped-def]
    """Numbers of bits, and all subsets of a mask once each."""
    assert sizes(5).tolist() == [m.bit_count() for m in range(32)]
    for mask in (0, 1, 0b1011, 0b110100):
        assert sorted(submasks(mask).tolist()) == [m for m in range(64) if m & mask == m]


def test_nothing_possible():  # type: ignore[no-untyped-def]
    """More than are free, or an included host without room: None, not an error."""
    model, state, wanted, _, rule, _ = case(1)
    assert ask_exact(model.tables(), state, wanted, len(state.free) + 1, None, rule) is None
    none_free = ClusterState(state.cluster, (), (), tuple(range(state.cluster.n_gpus)))
    assert ask_exact(model.tables(), none_free, (), 1, None, rule) is None
