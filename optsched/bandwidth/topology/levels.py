"""Levels of a network as arrays: domains, factors and uplinks, the lowest level first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.topology.rates import MOST

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

WHOLE: Final = 1_000_000
"""A factor of 1, in millionths."""


@dataclass(frozen=True)
class Levels:
    """What the network costs a set of GPUs by the lowest level of which one domain holds it.

    ``B(S) = factor(level) * min(within hosts, network(pattern), line(uplink(level)))`` for sets of
    several hosts; on one host the levels cost nothing. The lowest level is the first, the last is
    ``"cluster"``: all that the network joins.
    """

    names: tuple[str, ...]
    domain: IntArray  # [level, host]; hosts that differ in the last row are not joined
    factor: IntArray  # [level], in millionths, not rising
    uplink: IntArray  # [level], kB/s as a rate of cards, not rising; `MOST`: no limit

    @cached_property
    def matter(self) -> bool:
        """Whether a factor or an uplink limits a set of GPUs, or hosts are not joined."""
        limit = (self.factor < WHOLE).any() or (self.uplink < MOST).any()
        return bool(limit or self.domain[-1].any())

    def lowest(self, counts: IntArray) -> IntArray:
        """Lowest level of which one domain holds all hosts of counts of shape (n, hosts).

        -1 for rows on a single host, the number of levels for hosts that are not joined.
        """
        used = counts > 0
        level = np.full(len(counts), len(self.names), np.int64)
        for row in range(len(self.names) - 1, -1, -1):
            of = self.domain[row]
            low = np.where(used, of, MOST).min(axis=1, initial=MOST)
            same = low == np.where(used, of, -1).max(axis=1, initial=-1)
            level[same] = row
        level[used.sum(axis=1) < 2] = -1
        return level

    def limited(
        self, value: IntArray, gpus: IntArray, hosts: IntArray, level: IntArray
    ) -> IntArray:
        """Bandwidths after uplinks and factors; `level` is `lowest`, negative values are kept."""
        found = value.copy()
        across = (level >= 0) & (level < len(self.names)) & (value >= 0)
        n, m, at = gpus[across], hosts[across], level[across]
        found[across] = (
            np.minimum(value[across], line(self.uplink[at], n, m)) * self.factor[at] // WHOLE
        )
        found[(level == len(self.names)) & (value >= 0)] = 0
        return found


def line(rate: IntArray | np.ndarray, gpus: IntArray, hosts: IntArray) -> IntArray:
    """Line rate of a hierarchical ring over two hosts or more, each of which brings `rate`."""
    limit = rate * ((gpus - 1) / gpus) * (hosts / (hosts - 1))
    return np.minimum(np.rint(limit), MOST - 1).astype(np.int64)
