"""How much faster a job is on g GPUs than on one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from optsched.errors import InputError
from optsched.io.values import format_value, integer, number

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_GPUS: Final = 2**24
"""GPUs of one job."""


@runtime_checkable
class Speedup(Protocol):
    """Give the speed f(g) on g GPUs, f(1) = 1; equal speed-ups compare and hash equal.

    Examples
    --------
    >>> from optsched.cluster import Amdahl, Speedup
    >>> isinstance(Amdahl(0.1), Speedup)
    True
    """

    def of(self, gpus: int) -> float:
        """Speed on so many GPUs relative to one."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Linear:
    """Scale linearly: f(g) = g.

    Examples
    --------
    >>> optsched.cluster.Linear().of(4)
    4.0
    """

    def of(self, gpus: int) -> float:
        """Speed on so many GPUs relative to one."""
        return float(gpus)


@dataclass(frozen=True)
class Amdahl:
    """Scale as f(g) = g / (1 + c (g - 1)): every GPU more adds the share c of a step, 0 to 1.

    Examples
    --------
    >>> optsched.cluster.Amdahl(0.5).of(3)
    1.5
    """

    c: float

    def __post_init__(self) -> None:
        if number("Amdahl.c", self.c) > 1:
            raise InputError(f"Amdahl.c: expected a share in [0, 1], got {format_value(self.c)}")

    def of(self, gpus: int) -> float:
        """Speed on so many GPUs relative to one."""
        return gpus / (1.0 + self.c * (gpus - 1))


@dataclass(frozen=True, init=False)
class Table:
    """Scale as measured: speeds relative to one GPU, of exactly these sizes.

    Examples
    --------
    >>> optsched.cluster.Table({1: 1.0, 2: 1.8}).of(2)
    1.8
    """

    gpus: tuple[int, ...]
    speed: tuple[float, ...]

    def __init__(self, speeds: Mapping[int, float]) -> None:
        if not hasattr(speeds, "items") or not speeds:
            raise InputError(f"Table: expected {{GPUs: speed}}, got {format_value(speeds)}")
        rows = {
            integer("Table: GPUs", g, 1, MOST_GPUS): number(
                f"Table[{format_value(g)}]", f, above=True
            )
            for g, f in speeds.items()
        }
        if rows.get(1, 1.0) != 1.0:
            raise InputError(f"Table[1]: speeds are relative to one GPU, got {rows[1]} (divide)")
        self.__dict__.update(gpus=tuple(sorted(rows)), speed=tuple(rows[g] for g in sorted(rows)))

    def of(self, gpus: int) -> float:
        """Speed on so many GPUs relative to one; `InputError` if it was not given."""
        try:
            return self.speed[self.gpus.index(gpus)]
        except ValueError:
            known = ", ".join(map(str, self.gpus[:12]))
            raise InputError(
                f"Table: no speed for {format_value(gpus)} GPUs (there are {known}); add it"
            ) from None
