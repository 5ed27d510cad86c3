"""The machines of a simulated cluster, and when they come and go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from optsched.errors import InputError
from optsched.io.values import format_value, integer, label, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_NODES: Final = 2**20
MOST_TOTAL: Final = 2**22
"""GPUs of all nodes together."""

KINDS: Final = ("add", "drain", "remove")


@dataclass(frozen=True, init=False)
class Nodes:
    """Nodes with GPUs: ``Nodes(16, gpus=8)``, or ``Nodes.of([8, 8, 4])``.

    Parameters
    ----------
    count
        Nodes of equal size, at least 1.
    gpus
        GPUs of each; 0 for nodes that take zero-slot tasks only.
    zero_slots
        Tasks without GPUs that a node takes at once.

    Raises
    ------
    InputError
        A number is negative, no integer or too large.
    """

    gpus: tuple[int, ...]
    zero_slots: int = 100
    names: tuple[str, ...] = field(default=())

    def __init__(self, count: int, gpus: int = 8, *, zero_slots: int = 100) -> None:
        count = integer("nodes", count, 1, MOST_NODES)
        self._fill((integer("gpus", gpus, 0, MOST_TOTAL),) * count, zero_slots, None)

    @classmethod
    def of(
        cls, gpus: Iterable[int], *, zero_slots: int = 100, names: Sequence[str] | None = None
    ) -> Nodes:
        """Nodes of these sizes, called ``n0``, ``n1``, ... or by distinct `names`."""
        if isinstance(gpus, (str, bytes)) or not hasattr(gpus, "__iter__"):
            raise InputError(f"nodes: expected GPUs of every node, got {format_value(gpus)}")
        sizes = tuple(integer(f"nodes[{i}]", g, 0, MOST_TOTAL) for i, g in enumerate(gpus))
        made = cls.__new__(cls)
        made._fill(sizes, zero_slots, names)
        return made

    def _fill(self, gpus: tuple[int, ...], zero_slots: Any, names: Sequence[str] | None) -> None:
        """Check what concerns all nodes."""
        if not 1 <= len(gpus) <= MOST_NODES:
            raise InputError(f"nodes: expected 1..{MOST_NODES} nodes, got {len(gpus)}")
        units = integer("zero_slots", zero_slots, 0, MOST_TOTAL)
        if sum(gpus) > MOST_TOTAL:
            raise InputError(f"nodes: {sum(gpus)} GPUs in all, more than {MOST_TOTAL}")
        if names is None:
            named = tuple(f"n{i}" for i in range(len(gpus)))
        else:
            named = tuple(label(f"names[{i}]", name) for i, name in enumerate(names))
            if len(named) != len(gpus):
                raise InputError(f"names: {len(named)} names for {len(gpus)} nodes")
            if len(set(named)) < len(named):
                twice = next(name for i, name in enumerate(named) if name in named[:i])
                raise InputError(f"names: {format_value(twice)} is there twice")
        self.__dict__.update(gpus=gpus, zero_slots=units, names=named)

    @property
    def total(self) -> int:
        """All GPUs."""
        return sum(self.gpus)

    def __len__(self) -> int:
        return len(self.gpus)


@dataclass(frozen=True)
class NodeChange:
    """At a time a node is added, drained, or removed.

    A node whose first change is ``"add"`` is not there before. A drained node takes no new work;
    what runs there goes on. The jobs of a removed node lose what they did since their last end of
    a pass or stop, and are pending again, preemptible or not. Either may be added again; `simulate`
    refuses to add a node that takes work. Changes of one instant happen in the order given.

    Parameters
    ----------
    time
        When, in the workload's unit.
    node
        Its number.
    kind
        ``"add"``, ``"drain"`` or ``"remove"``.

    Raises
    ------
    InputError
        A negative time or node, or another word.
    """

    time: int
    node: int
    kind: Literal["add", "drain", "remove"]

    def __post_init__(self) -> None:
        integer("changes: time", self.time)
        integer("changes: node", self.node, 0, MOST_NODES)
        one_of("changes: kind", self.kind, KINDS)
