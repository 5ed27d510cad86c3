"""Crossover and mutation against their descriptions, in plain Python."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from random_problems import random_array, random_shop

from optsched_solvers.literature import crossover
from optsched_solvers.literature.operation_based import Encoding

if TYPE_CHECKING:
    from random import Random

    from optsched import Schedule
    from optsched.model.schedule import IntArray

MASK = 2**64 - 1


def draw(seed: int, k: int, n: int) -> int:
    """The k-th output of splitmix64, below n."""
    x = (seed + (k + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) % n


def parents(rng: Random) -> tuple[IntArray, IntArray]:
    """Two permutations of the same genes."""
    genes = [g for g in range(rng.randint(1, 5)) for _ in range(rng.randint(1, 5))]
    return np.array(rng.sample(genes, len(genes))), np.array(rng.sample(genes, len(genes)))


def slow_pox(first: IntArray, second: IntArray, keeps: set[int]) -> list[int]:
    """Genes of the set stay where they are in `first`; the rest comes as in `second`."""
    rest = iter([g for g in second.tolist() if g not in keeps])
    return [g if g in keeps else next(rest) for g in first.tolist()]


@given(st.randoms(use_true_random=False))
def test_pox(rng: Random) -> None:
    """Both children, for any seed."""
    first, second = parents(rng)
    before = first.tolist(), second.tolist()
    seed = rng.getrandbits(62)
    keeps = {g for g in range(int(first.max()) + 1) if draw(seed, g, 2)}
    one, other = np.empty_like(first), np.empty_like(first)
    crossover.pox(first, second, seed, one, other)
    assert one.tolist() == slow_pox(first, second, keeps)
    assert other.tolist() == slow_pox(second, first, keeps)
    assert (first.tolist(), second.tolist()) == before


def orders(graph: Schedule, encoding: Encoding, genes: IntArray) -> dict[int, list[int]]:
    """Operations on each resource in the order of genes; those without have one of their own."""
    found: dict[int, list[int]] = {}
    for i in encoding.operations(genes).tolist():
        found.setdefault(lane(graph, i), []).append(i)
    return found


def lane(graph: Schedule, i: int) -> int:
    """The resource of an operation, or a number of its own."""
    return int(graph.single_resource[i]) if graph.single_resource[i] >= 0 else -1 - i


def slow_jox(
    graph: Schedule, encoding: Encoding, first: IntArray, second: IntArray, keeps: set[int]
) -> list[int]:
    """Orders crossed resource by resource, then Giffler and Thompson guided by them."""
    rank: dict[int, int] = {}
    theirs = orders(graph, encoding, second)
    ours = orders(graph, encoding, first)
    for r in sorted(ours, key=lambda r: (r < 0, abs(r))):
        row = ours[r]
        rest = iter([i for i in theirs[r] if int(encoding.gene[i]) not in keeps])
        mixed = [i if int(encoding.gene[i]) in keeps else next(rest) for i in row]
        rank.update({i: k for k, i in enumerate(mixed, len(rank))})
    chains = [
        encoding.operation[a:b].tolist()
        for a, b in zip(encoding.indptr, encoding.indptr[1:], strict=False)
    ]
    weight = dict(zip(encoding.operation.tolist(), encoding.chain_weight.tolist(), strict=True))
    ready = [int(graph.release[chain[0]]) for chain in chains]
    busy: dict[int, int] = {}
    child = []
    while any(chains):
        live = [g for g, chain in enumerate(chains) if chain]

        def start(g: int) -> int:
            return max(ready[g], busy.get(lane(graph, chains[g][0]), 0))

        def end(g: int) -> int:
            return start(g) + int(graph.duration[chains[g][0]])

        loose = [g for g in live if lane(graph, chains[g][0]) < 0]
        star = min(loose or live, key=lambda g: (end(g), rank[chains[g][0]]))
        r, least = lane(graph, chains[star][0]), end(star)
        rivals = [g for g in live if lane(graph, chains[g][0]) == r and start(g) < least]
        chosen = min({star, *rivals}, key=lambda g: rank[chains[g][0]])
        i = chains[chosen].pop(0)
        at = max(ready[chosen], busy.get(r, 0))
        busy[r] = at + int(graph.duration[i])
        ready[chosen] = at + weight[i]
        if chains[chosen]:
            ready[chosen] = max(ready[chosen], int(graph.release[chains[chosen][0]]))
        child.append(chosen)
    return child


@given(st.randoms(use_true_random=False))
def test_jox(rng: Random) -> None:
    """Both children, on job shops and job arrays."""
    shop = rng.random() < 0.6
    graph = random_shop(rng, 5, 4).graph() if shop else random_array(rng).graph()
    encoding = Encoding.of(graph)
    genes = encoding.gene.tolist()
    first, second = (np.array(rng.sample(genes, len(genes)), np.int64) for _ in range(2))
    seed = rng.getrandbits(62)
    keeps = {g for g in range(encoding.n_genes) if draw(seed, g, 2)}
    one, other = np.empty_like(first), np.empty_like(first)
    crossover.jox(encoding, first, second, seed, one, other)

    def ordered(genes: IntArray) -> dict[int, list[int]]:
        return orders(graph, encoding, genes)  # not who comes first where no resource is shared

    assert ordered(one) == ordered(np.array(slow_jox(graph, encoding, first, second, keeps)))
    assert ordered(other) == ordered(np.array(slow_jox(graph, encoding, second, first, keeps)))


@given(st.randoms(use_true_random=False))
def test_mutations(rng: Random) -> None:
    """Each changes what it says, and never which genes there are."""
    before, _ = parents(rng)
    seed = rng.getrandbits(62)
    for operator in (crossover.swap, crossover.insert, crossover.invert):
        after = before.copy()
        operator(after, seed)
        assert Counter(after.tolist()) == Counter(before.tolist())
        changed = np.flatnonzero(after != before)
        if operator is crossover.swap:
            assert len(changed) == (0 if len(set(before.tolist())) == 1 else 2)
        elif len(changed):
            a, b = int(changed[0]), int(changed[-1])
            old, new = before[a : b + 1].tolist(), after[a : b + 1].tolist()
            if operator is crossover.invert:
                assert new == old[::-1] and b - a < crossover.LONGEST_BLOCK
            else:
                assert new in (old[1:] + old[:1], old[-1:] + old[:-1])


def test_all_places_are_reached() -> None:
    """Over many seeds every place is drawn, by every mutation."""
    before = np.arange(9)
    for operator in (crossover.swap, crossover.insert, crossover.invert):
        moved = np.zeros(9, bool)
        for seed in range(200):
            after = before.copy()
            operator(after, seed)
            moved |= after != before
        assert moved.all()
