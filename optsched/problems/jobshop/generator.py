"""Taillard's generator of random job shops.

E. Taillard, Benchmarks for basic scheduling problems, EJOR 64 (1993) 278-285.
"""

from __future__ import annotations

from typing import Final

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.problems.jobshop.problem import JobShop

_MODULUS: Final = 2**31 - 1
_MAX_OPERATIONS: Final = 10_000_000


class Lehmer:
    """The generator x <- 16807 x mod (2^31 - 1) of Lewis, Goodman & Miller, in exact integers."""

    def __init__(self, seed: int, place: str = "seed") -> None:
        self.state = integer(place, seed, 1, _MODULUS - 1)

    def uniform(self, low: int, high: int) -> int:
        """The next integer, uniform in low..high (Taillard 1993, U[a, b])."""
        self.state = 16807 * self.state % _MODULUS
        return low + self.state * (high - low + 1) // _MODULUS


def generate(
    jobs: int, machines: int, time_seed: int, machine_seed: int, name: str = ""
) -> JobShop:
    """Make a random shop: durations uniform in 1..99, every job a random order of all machines.

    Durations and machines are drawn from two streams, with seeds in 1 .. 2^31 - 2.
    """
    n = integer("jobs", jobs, 1, _MAX_OPERATIONS)
    m = integer("machines", machines, 1, _MAX_OPERATIONS)
    if n * m > _MAX_OPERATIONS:
        raise InputError(f"jobs x machines: expected at most {_MAX_OPERATIONS}, got {n * m}")
    times, places = Lehmer(time_seed, "time_seed"), Lehmer(machine_seed, "machine_seed")
    durations = [[times.uniform(1, 99) for _ in range(m)] for _ in range(n)]
    rows = []
    for _ in range(n):
        row = list(range(m))
        for i in range(m):
            other = places.uniform(i, m - 1)
            row[i], row[other] = row[other], row[i]
        rows.append(row)
    chains = [list(zip(r, d, strict=True)) for r, d in zip(rows, durations, strict=True)]
    seeds = {"time_seed": int(time_seed), "machine_seed": int(machine_seed)}
    return JobShop(chains, [f"m{k}" for k in range(m)], name=name, metadata=seeds)
