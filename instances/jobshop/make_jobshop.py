"""Make the generated job shops of this folder, and on request Taillard's ta01-ta80.

    python make_jobshop.py                 # rewrite the *.jobshop.json files beside this script
    python make_jobshop.py --taillard DIR  # write ta01.txt ... ta80.txt into DIR

Same seed, same bytes: all random numbers come from one Lehmer stream in exact integers. Tune
engines on these families, never on the published ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from optsched.errors import InputError
from optsched.formats import standard
from optsched.problems.jobshop import document, published
from optsched.problems.jobshop.generator import Lehmer
from optsched.problems.jobshop.problem import JobShop

VERSION: Final = 1
HERE: Final = Path(__file__).parent

Chain = list[tuple[int, int]]
Maker = Callable[[Lehmer, int, int], list[Chain]]


def uniform(stream: Lehmer, n: int, m: int) -> list[Chain]:
    """Every job visits all machines in random order, durations 1..99 (like Taillard's)."""
    return [_timed(stream, shuffled(stream, list(range(m)))) for _ in range(n)]


def two_sets(stream: Lehmer, n: int, m: int) -> list[Chain]:
    """All machines of the first half before any of the second (like Storer, Wu & Vaccari's)."""
    half = m // 2
    return [
        _timed(
            stream,
            shuffled(stream, list(range(half))) + shuffled(stream, list(range(half, m))),
        )
        for _ in range(n)
    ]


def flow_like(stream: Lehmer, n: int, m: int) -> list[Chain]:
    """Nearly the same order for all jobs: m // 3 swaps of neighbours each."""
    chains = []
    for _ in range(n):
        order = list(range(m))
        for _ in range(m // 3):
            i = stream.uniform(0, m - 2)
            order[i], order[i + 1] = order[i + 1], order[i]
        chains.append(_timed(stream, order))
    return chains


def reentrant(stream: Lehmer, n: int, m: int) -> list[Chain]:
    """Chains of random machines, m to 2m steps: some machines repeat, some are skipped."""
    return [
        _timed(stream, [stream.uniform(0, m - 1) for _ in range(stream.uniform(m, 2 * m))])
        for _ in range(n)
    ]


def ties(stream: Lehmer, n: int, m: int) -> list[Chain]:
    """Durations 1..3 only: thousands of equal moves."""
    return [_timed(stream, shuffled(stream, list(range(m))), 1, 3) for _ in range(n)]


def zeros(stream: Lehmer, n: int, m: int) -> list[Chain]:
    """About a third of the durations are 0."""
    return [
        [(k, max(0, p)) for k, p in _timed(stream, shuffled(stream, list(range(m))), -4, 9)]
        for _ in range(n)
    ]


def huge(stream: Lehmer, n: int, m: int) -> list[Chain]:
    """Durations of 1..99 times 2^40: sums far beyond 32 bits, still below 2^53."""
    return [[(k, p << 40) for k, p in chain] for chain in uniform(stream, n, m)]


FAMILIES: Final[dict[str, tuple[Maker, list[tuple[int, int]]]]] = {
    "uniform": (uniform, [(10, 5), (10, 10), (20, 10)]),
    "two-sets": (two_sets, [(10, 6), (20, 10)]),
    "flow-like": (flow_like, [(10, 6), (15, 10)]),
    "reentrant": (reentrant, [(6, 4), (10, 8)]),
    "ties": (ties, [(8, 6), (15, 10)]),
    "zeros": (zeros, [(6, 6), (10, 8)]),
    "huge": (huge, [(6, 6)]),
    # small enough (12 operations at most) to try all orders
    "tiny": (uniform, [(3, 4), (4, 3), (6, 2)]),
    "tiny-reentrant": (reentrant, [(2, 3)]),
    "tiny-zeros": (zeros, [(3, 4)]),
}


def make(family: str, n: int, m: int, seed: int) -> JobShop:
    """One shop of a family: n jobs, m machines."""
    maker = FAMILIES[family][0]
    facts = {"generator": "make_jobshop.py", "version": VERSION, "family": family, "seed": seed}
    stream = Lehmer(seed)
    for _ in range(10):  # small seeds start with small numbers
        stream.uniform(0, 1)
    chains = maker(stream, n, m)
    names = [f"m{k}" for k in range(m)]
    return JobShop(chains, names, name=f"{family}-{n}x{m}", metadata=facts)


def documents() -> dict[str, bytes]:
    """File name and content of every generated instance."""
    files = {}
    for f, (family, (_, sizes)) in enumerate(FAMILIES.items()):
        for i, (n, m) in enumerate(sizes):
            shop = make(family, n, m, seed=1000 * (f + 1) + i + 1)
            files[f"{shop.name}.jobshop.json"] = document.to_json(shop)
    return files


def shuffled(stream: Lehmer, items: list[int]) -> list[int]:
    """A random permutation."""
    for i in range(len(items)):
        other = stream.uniform(i, len(items) - 1)
        items[i], items[other] = items[other], items[i]
    return items


def _timed(stream: Lehmer, order: list[int], low: int = 1, high: int = 99) -> Chain:
    return [(machine, stream.uniform(low, high)) for machine in order]


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="make the job-shop instances")
    parser.add_argument("--taillard", metavar="DIR", type=Path, help="write ta01.txt ... there")
    folder = parser.parse_args().taillard
    if folder is None:
        for name, content in documents().items():
            (HERE / name).write_bytes(content)
        return
    if not folder.is_dir():
        raise InputError(f"{folder}: no such directory")
    for i in range(1, 81):
        name = f"ta{i:02d}"
        (folder / f"{name}.txt").write_text(standard.to_text(published.instance(name)))


if __name__ == "__main__":
    main()
