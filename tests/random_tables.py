"""A model with a table that is not monotone, and types of hosts with random tables."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bandwidth.models.model import CountModel, alone, unlimited
from optsched.bandwidth.topology.cluster import HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.rates import UNMEASURED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.bandwidth.topology.cluster import Cluster


class TableModel(CountModel):
    """A network value for every pattern, drawn from a seed; some patterns are not measured."""

    def __init__(
        self, cluster: Cluster, seed: int = 0, most: int = 60, missing: float = 0.0
    ) -> None:
        self.cluster = cluster
        self.seed, self.most, self.missing = seed, most, missing

    def value(self, pattern: tuple[int, ...]) -> int:
        """Limit of falling counts on two hosts or more; `UNMEASURED` where there is none."""
        rng = random.Random(f"{self.seed} {pattern}")
        return UNMEASURED if rng.random() < self.missing else rng.randint(0, self.most)

    def network(self, patterns: Any, which: str = "value") -> Any:
        """Limits by pattern."""
        limits = unlimited(patterns)
        for i in np.flatnonzero(~alone(patterns)):
            limits[i] = self.value(tuple(int(c) for c in patterns[i] if c))
        return limits

    def intra_of(self, kind: int, which: str = "value") -> Any:
        """The measured table of the type."""
        table = self.cluster.types[kind].intra
        return None if table is None else table.values


def host_types(rng: random.Random, sizes: Iterable[int], most: int) -> tuple[HostType, ...]:
    """A type of every size, with a value for every subset, or for every count."""
    kinds = []
    for n in sizes:
        length = n + 1 if rng.random() < 0.3 else 1 << n
        values = [rng.randint(0, most) for _ in range(length)]
        kinds.append(HostType(f"h{n}", n, intra=IntraTable(n, values)))
    return tuple(kinds)
