"""The machines of a simulated cluster, and when they come and go."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from optsched.cluster.workload.job import MOST_AMOUNT, line
from optsched.errors import InputError
from optsched.io.values import format_value, integer, number, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_NODES: Final = 2**20
MOST_TOTAL: Final = 2**22
"""GPUs of all nodes together."""

MOST_FAILURES: Final = 10**6
_AT_ONCE: Final = 64
"""Failures of a node that are drawn together; part of what a seed means."""

_GROUP: Final = re.compile(
    r"(?:([0-9]{1,16})[xX])?([0-9]{1,16})(?::([^:,]*)(?::([0-9.]*)(?::([0-9.]*))?)?)?", re.ASCII
)


@dataclass(frozen=True, init=False)
class Nodes:
    """Describe nodes: ``Nodes(16, gpus=8)``, ``Nodes.of([8, 8, 4])``, ``Nodes.parse("16x8")``.

    `gpus` may be 0, for nodes that take zero-slot tasks only, `zero_slots` of them at once. A job
    never spans GPUs of several types. `cpus` and `memory_gb` are those of each node, for jobs that
    request them by GPU; infinite: no limit.

    Examples
    --------
    >>> from optsched.cluster import Nodes
    >>> Nodes(2, gpus=8, type="A100").total, Nodes.parse("1x8:A100,2x4:V100").gpus
    (16, (8, 4, 4))
    """

    gpus: tuple[int, ...]
    zero_slots: int = 100
    names: tuple[str, ...] = field(default=())
    types: tuple[str, ...] = ()
    """GPU type of every node."""
    cpus: tuple[float, ...] = ()
    memory_gb: tuple[float, ...] = ()

    def __init__(
        self, count: int, gpus: int = 8, *, zero_slots: int = 100, type: str = "",
        cpus: float = math.inf, memory_gb: float = math.inf,
    ) -> None:  # fmt: skip
        n = integer("nodes", count, 1, MOST_NODES)
        made = Nodes.of(
            [integer("gpus", gpus, 0, MOST_TOTAL)] * n, zero_slots=zero_slots, types=[type] * n,
            cpus=[cpus] * n, memory_gb=[memory_gb] * n,
        )  # fmt: skip
        self.__dict__.update(made.__dict__)

    @classmethod
    def of(
        cls,
        gpus: Iterable[int],
        *,
        zero_slots: int = 100,
        names: Sequence[str] | None = None,
        types: Sequence[str] | None = None,
        cpus: Sequence[float] | None = None,
        memory_gb: Sequence[float] | None = None,
    ) -> Nodes:
        """Nodes of these sizes, called ``n0``, ``n1``, ... or by distinct `names`."""
        if isinstance(gpus, (str, bytes)) or not hasattr(gpus, "__iter__"):
            raise InputError(f"nodes: expected GPUs of every node, got {format_value(gpus)}")
        sizes = tuple(integer(f"nodes[{i}]", g, 0, MOST_TOTAL) for i, g in enumerate(gpus))
        n, total = len(sizes), sum(sizes)
        if not 1 <= n <= MOST_NODES:
            raise InputError(f"nodes: expected 1..{MOST_NODES} nodes, got {n}")
        if total > MOST_TOTAL:
            raise InputError(f"nodes: {total} GPUs in all, more than {MOST_TOTAL}")
        found: dict[str, tuple[Any, ...]] = {
            "names": tuple(f"n{i}" for i in range(n)) if names is None else tuple(names),
            "types": ("",) * n if types is None else tuple(types),
            "cpus": (math.inf,) * n if cpus is None else tuple(cpus),
            "memory_gb": (math.inf,) * n if memory_gb is None else tuple(memory_gb),
        }
        for key, column in found.items():
            if len(column) != n:
                raise InputError(f"{key}: {len(column)} {key} for {n} nodes")
            for value in dict.fromkeys(column):
                if key in ("names", "types"):
                    line(key, value)
                elif value != math.inf:
                    number(key, value, 0.0, MOST_AMOUNT)
        if twice := [name for name, times in Counter(found["names"]).items() if times > 1]:
            raise InputError(f"names: {format_value(twice[0])} appears twice")
        units = integer("zero_slots", zero_slots, 0, MOST_TOTAL)
        made = cls.__new__(cls)
        made.__dict__.update(gpus=sizes, zero_slots=units, **found)
        return made

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """``16x8`` (16 nodes of 8 GPUs), ``8,8,4``, or groups ``COUNTxGPUS:TYPE:CPUS:MEMORY_GB``.

        Of a group the end may be missing, and a type, CPUs or memory be empty:
        ``4x8:A100:96:1024,2x4:V100``.
        """
        rows: list[tuple[Any, ...]] = []
        for part in text.split(","):
            try:
                count, gpus, kind, *limits = _GROUP.fullmatch(part.strip()).groups()  # type: ignore[union-attr]
                row = (int(gpus), kind or "", *(float(x) if x else math.inf for x in limits))
            except (AttributeError, ValueError):
                raise InputError(
                    f"nodes: expected 16x8, 8,8,4 or 4x8:A100:96:1024,2x4:V100 (CPUs, GB), got "
                    f"{format_value(part)}"
                ) from None
            times = int(count or 1)
            integer("nodes", times and times + len(rows), 1, MOST_NODES)
            rows += [row] * times
        of, types, cpus, memory = zip(*rows, strict=True)
        return cls.of(of, types=types, cpus=cpus, memory_gb=memory)

    @property
    def total(self) -> int:
        """All GPUs."""
        return sum(self.gpus)

    def __len__(self) -> int:
        return len(self.gpus)


@dataclass(frozen=True)
class NodeChange:
    """Add, drain or remove a node at a time, in the workload's unit.

    A node whose first change is ``"add"`` is not there before. A drained node takes no new work;
    what runs there goes on. The jobs of a removed node lose what they did since their last end of
    a pass or stop, and are pending again, preemptible or not. Either may be added again; `simulate`
    refuses to add a node that takes work. Changes of one instant happen in the order given.

    Examples
    --------
    >>> from optsched.cluster import Job, NodeChange, Nodes, simulate
    >>> change = NodeChange(time=50, node=0, kind="remove")
    >>> jobs = [Job(name="a", sizes=(4,), work=4 * 10**8)]
    >>> simulate(jobs, "fifo", Nodes(2, gpus=4), changes=[change]).jct.tolist()
    [150]
    """

    time: int
    node: int
    kind: Literal["add", "drain", "remove"]

    def __post_init__(self) -> None:
        integer("changes: time", self.time)
        integer("changes: node", self.node, 0, MOST_NODES)
        one_of("changes: kind", self.kind, ("add", "drain", "remove"))


@dataclass(frozen=True)
class NodeFailures:
    """Let every node fail and be repaired, again and again, independently of other nodes.

    Times between a repair and the next failure, and those of repairs, are exponential with the
    means `mtbf` and `repair` in the workload's unit, rounded up. A failed node loses its jobs as by
    ``"remove"`` (see `NodeChange`), and takes work again when it is repaired. `simulate` takes it
    as its `changes`. The times of a node depend on its number and the `seed` only.

    Examples
    --------
    >>> from optsched.cluster import NodeFailures, Nodes
    >>> changes = NodeFailures(mtbf=1000, repair=100).changes(Nodes(2), until=2000)
    >>> [(change.node, change.kind) for change in changes][:2]
    [(0, 'remove'), (0, 'add')]
    """

    mtbf: int
    repair: int
    seed: int = 0

    def __post_init__(self) -> None:
        integer("failures: mtbf", self.mtbf, 1, 2**48)
        integer("failures: repair", self.repair, 1, 2**48)
        integer("failures: seed", self.seed, 0, 2**63)

    def changes(self, nodes: Nodes, until: int) -> tuple[NodeChange, ...]:
        """All failures before a time, at most a million, with their repairs, by time."""
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
