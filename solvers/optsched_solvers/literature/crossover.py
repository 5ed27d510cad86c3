"""Crossover and mutation of permutations with repetition, compiled; children are written in place.

Every operator draws from a generator of its own, started by `seed`: the same arguments give the
same children, whoever else draws random numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched_solvers.literature.operation_based import guided

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray
    from optsched_solvers.literature.operation_based import Encoding

LONGEST_BLOCK: Final = 12
"""Genes that `invert` turns round at most: longer blocks destroy what was good."""


def pox(first: IntArray, second: IntArray, seed: int, one: IntArray, other: IntArray) -> None:
    """Precedence preserving order-based crossover (Zhang, Lee, Gen 2005).

    Genes of a random set of chains keep their places; the remaining places are filled with the
    other genes in the order of the other parent.

    Parameters
    ----------
    first, second
        Parents: permutations of the same genes.
    seed
        0 <= seed < 2^63.
    one, other
        The children; `one` takes the places of the set from `first`, `other` from `second`. They
        must not share memory with the parents.
    """
    _pox(first, second, seed, one, other)


def jox(
    encoding: Encoding,
    first: IntArray,
    second: IntArray,
    seed: int,
    one: IntArray,
    other: IntArray,
) -> None:
    """Job-order crossover (Ono, Yamamura, Kobayashi 1996): as `pox`, but on every resource.

    On each resource the operations of a random set of chains keep their places from one parent,
    and the others follow in the other parent's order. Such orders may contradict the arcs, so
    Giffler and Thompson's algorithm, which they guide, makes the child.

    Parameters
    ----------
    encoding
        Of the graph; arcs between chains, setups and bytes are left to the decoder.
    first, second, seed, one, other
        As for `pox`.
    """
    ranks = np.empty((2, len(first)), np.int64)
    _crossed_ranks(
        first, second, seed, ranks[0], ranks[1], encoding.indptr, encoding.chain_resource
    )
    guided(encoding, ranks[0], one)
    guided(encoding, ranks[1], other)


def swap(chromosome: IntArray, seed: int) -> None:
    """Exchange two different genes at random places; nothing if all genes are equal."""
    _mutate(chromosome, seed, 0)


def insert(chromosome: IntArray, seed: int) -> None:
    """Move a gene from one random place to another; the genes between move up."""
    _mutate(chromosome, seed, 1)


def invert(chromosome: IntArray, seed: int) -> None:
    """Turn a random block of at most `LONGEST_BLOCK` genes round."""
    _mutate(chromosome, seed, 2)


@helper(types.uint64, types.uint64)
def _mixed(x):  # type: ignore[no-untyped-def]
    """The output function of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@helper(INT, INT, INT, INT)
def _draw(seed, k, n):  # type: ignore[no-untyped-def]
    """The k-th random number below n of a seed."""
    x = _mixed(np.uint64(seed) + np.uint64(k + 1) * np.uint64(0x9E3779B97F4A7C15))
    return np.int64(x % np.uint64(n))


@entry(types.void, READ, READ, INT, INTS, INTS)
def _pox(first, second, seed, one, other):  # type: ignore[no-untyped-def]
    n = len(first)
    n_genes = 0
    for k in range(n):
        n_genes = max(n_genes, first[k] + 1)
    keeps = np.empty(n_genes, np.int64)
    for g in range(n_genes):
        keeps[g] = _draw(seed, g, 2)
    a = 0
    b = 0
    for k in range(n):
        if keeps[first[k]]:
            one[k] = first[k]
        else:
            while keeps[second[a]]:
                a += 1
            one[k] = second[a]
            a += 1
        if keeps[second[k]]:
            other[k] = second[k]
        else:
            while keeps[first[b]]:
                b += 1
            other[k] = first[b]
            b += 1


@entry(types.void, INTS, INT, INT)
def _mutate(chromosome, seed, kind):  # type: ignore[no-untyped-def]
    n = len(chromosome)
    if n < 2:
        return
    a = _draw(seed, 0, n)
    if kind == 0:
        # from a random place on, the next gene that differs
        b = _draw(seed, 1, n)
        for _ in range(n):
            if chromosome[b] != chromosome[a]:
                break
            b = b + 1 if b + 1 < n else 0
        gene = chromosome[a]
        chromosome[a] = chromosome[b]
        chromosome[b] = gene
    elif kind == 1:
        b = _draw(seed, 1, n)
        gene = chromosome[a]
        while a < b:
            chromosome[a] = chromosome[a + 1]
            a += 1
        while a > b:
            chromosome[a] = chromosome[a - 1]
            a -= 1
        chromosome[b] = gene
    else:
        b = min(n - 1, a + 1 + _draw(seed, 1, LONGEST_BLOCK - 1))
        while a < b:
            gene = chromosome[a]
            chromosome[a] = chromosome[b]
            chromosome[b] = gene
            a += 1
            b -= 1


@entry(types.void, READ, READ, INT, INTS, INTS, READ, READ)
def _crossed_ranks(first, second, seed, one, other, indptr, resource):  # type: ignore[no-untyped-def]
    """Ranks on every resource by place in the chains, for both children of `jox`."""
    n = len(first)
    n_genes = len(indptr) - 1
    n_lanes = 0
    for p in range(n):
        n_lanes = max(n_lanes, resource[p] + 1)
    begin = np.zeros(n_lanes + 1, np.int64)
    for p in range(n):
        begin[resource[p] + 1] += 1
    for r in range(n_lanes):
        begin[r + 1] += begin[r]
    keeps = np.empty(n, np.int64)  # by place
    for g in range(n_genes):
        for p in range(indptr[g], indptr[g + 1]):
            keeps[p] = _draw(seed, g, 2)
    # both parents' places in the order on each resource
    orders = np.empty((2, n), np.int64)
    following = np.empty(n_genes, np.int64)
    fill = np.empty(n_lanes, np.int64)
    for parent in range(2):
        for g in range(n_genes):
            following[g] = indptr[g]
        for r in range(n_lanes):
            fill[r] = begin[r]
        for k in range(n):
            g = first[k] if parent == 0 else second[k]
            p = following[g]
            following[g] += 1
            orders[parent, fill[resource[p]]] = p
            fill[resource[p]] += 1
    for r in range(n_lanes):
        a = begin[r]
        b = begin[r]
        for k in range(begin[r], begin[r + 1]):
            p = orders[0, k]
            if not keeps[p]:
                while keeps[orders[1, a]]:
                    a += 1
                p = orders[1, a]
                a += 1
            one[p] = k
            p = orders[1, k]
            if not keeps[p]:
                while keeps[orders[0, b]]:
                    b += 1
                p = orders[0, b]
                b += 1
            other[p] = k
