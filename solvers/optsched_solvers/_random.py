"""Random numbers in kernels, and the rule of simulated annealing that draws them."""

from __future__ import annotations

import math

from optsched.kernels.compile import helper


def random_state(seed: int) -> int:
    """Make a first value, odd and positive, for the field `random` of a record."""
    return (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**62 | 1


@helper(counted=False, inline=True)
def random_below(c, n):  # type: ignore[no-untyped-def]
    """A number in 0..n-1 (xorshift64*, Vigna 2016); the state is the field `random` of c."""
    x = c.random
    x ^= (x >> 12) & 0xFFFFFFFFFFFFF
    x ^= x << 25
    x ^= (x >> 27) & 0x1FFFFFFFFF
    c.random = x
    return ((((x * 0x2545F4914F6CDD1D) >> 33) & 0x7FFFFFFF) * n) >> 31


@helper(counted=False, inline=True)
def accepted_rise(c, temperature):  # type: ignore[no-untyped-def]
    """By how much a value may rise: -temperature ln(u), u uniform (Metropolis et al. 1953)."""
    return int(-temperature * math.log((random_below(c, 1 << 30) + 1) / (1 << 30)))
