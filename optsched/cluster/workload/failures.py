"""Nodes that fail and are repaired: renewal processes as changes of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.cluster.workload.nodes import NodeChange
from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes

MOST_FAILURES: Final = 10**6
_AT_ONCE: Final = 64
"""Failures of a node that are drawn together; part of what a seed means."""


@dataclass(frozen=True)
class NodeFailures:
    """Every node fails and is repaired, again and again, independently of the others.

    Times between a repair and the next failure, and those of repairs, are exponential with these
    means, rounded up to whole units. A failed node loses its jobs as by ``"remove"`` (see
    `NodeChange`), and takes work again when it is repaired. `simulate` takes it as its `changes`.

    Parameters
    ----------
    mtbf
        Mean time between a repair and the next failure of a node, in the workload's unit.
    repair
        Mean time of a repair.
    seed
        Of the times; those of a node depend on nothing else.

    Raises
    ------
    InputError
        No whole number, or one below 1 (seed: 0).
    """

    mtbf: int
    repair: int
    seed: int = 0

    def __post_init__(self) -> None:
        integer("failures: mtbf", self.mtbf, 1, 2**48)
        integer("failures: repair", self.repair, 1, 2**48)
        integer("failures: seed", self.seed, 0, 2**63)

    def changes(self, nodes: Nodes, until: int) -> tuple[NodeChange, ...]:
        """All failures before a time, with their repairs, by time.

        Raises
        ------
        InputError
            There would be more than a million.
        """
        if len(nodes) * until > MOST_FAILURES * (self.mtbf + self.repair):
            raise InputError(
                f"failures: more than {MOST_FAILURES:,} before time {until:,}, with a mean of "
                f"{self.mtbf:,} between them; raise mtbf, or let jobs lose less by more passes"
            )
        found = []
        for node in range(len(nodes)):
            random, now = np.random.default_rng([self.seed, node]), 0
            while now < until:
                drawn = random.exponential((self.mtbf, self.repair), (_AT_ONCE, 2))
                for up, down in np.maximum(np.ceil(drawn), 1).astype(np.int64).tolist():
                    if now + up >= until:
                        now = until
                        break
                    found.append(NodeChange(now + up, node, "remove"))
                    now += up + down
                    found.append(NodeChange(now, node, "add"))
        return tuple(sorted(found, key=lambda change: (change.time, change.node)))
