"""How much faster a job is on g GPUs than on one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np

from optsched.errors import InputError
from optsched.io.values import format_value, integer, number

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_GPUS: Final = 2**24
"""GPUs of one job."""


@runtime_checkable
class Speedup(Protocol):
    """f(g), with f(1) = 1; equal speed-ups compare and hash equal."""

    def of(self, gpus: int) -> float:
        """Speed on so many GPUs relative to one."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Linear:
    """f(g) = g."""

    def of(self, gpus: int) -> float:
        """Speed on so many GPUs relative to one."""
        return float(gpus)


@dataclass(frozen=True)
class Amdahl:
    """f(g) = g / (1 + c (g - 1)): every GPU more adds the share c of a step.

    Raises
    ------
    InputError
        c is not in [0, 1]: 0 is linear, 1 gains nothing.
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
    """Measured speeds: ``Table({1: 1.0, 2: 1.8, 4: 3.1})``.

    Parameters
    ----------
    speeds
        Speed relative to one GPU by number of GPUs; nothing is interpolated.

    Raises
    ------
    InputError
        No number of GPUs, a speed that is not positive, or ``f(1)`` that is not 1.
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


_FULL_RANGE: Final = 4096  # batch sizes tried one by one; beyond, as many of them log-spaced


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Samples per second times statistical efficiency, at the best batch for every g.

    A step of batch m on g GPUs takes ``T = (T_grad^gamma + T_sync^gamma)^(1/gamma)`` with
    ``T_grad = grad[0] + grad[1] m/g`` and ``T_sync = sync[0] + sync[1] (g - 2)`` for g >= 2 (other
    coefficients beyond one node); its samples are worth ``(phi + m_0) / (phi + m)`` each.
    Source: Qiao et al., Pollux, OSDI 2021, eq. 5-11 (without gradient accumulation).

    Parameters
    ----------
    grad
        Seconds per step and per sample of one GPU.
    sync, sync_nodes
        Seconds for two GPUs and per further one, within a node and across nodes.
    batch
        m_0, the batch the efficiency is relative to, and the smallest that is used.
    noise_scale
        phi, the gradient noise scale in samples.
    max_batch
        Largest batch of all GPUs together.
    max_local
        Largest batch of one GPU (its memory); None: only `max_batch` limits.
    gamma
        Overlap: 1 adds the two times, a large one takes their maximum.
    per_node
        GPUs of a node.

    Raises
    ------
    InputError
        Negative or NaN numbers; a first batch that does not fit one GPU.
    """

    grad: tuple[float, float]
    sync: tuple[float, float] = (0.0, 0.0)
    sync_nodes: tuple[float, float] | None = None
    batch: int
    noise_scale: float
    max_batch: int
    max_local: int | None = None
    gamma: float = 1.0
    per_node: int = 8

    def __post_init__(self) -> None:
        for key in ("grad", "sync", "sync_nodes"):
            pair = getattr(self, key)
            if pair is None and key == "sync_nodes":
                continue
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InputError(
                    f"Goodput.{key}: expected (constant, slope), got {format_value(pair)}"
                )
            for value in pair:
                number(f"Goodput.{key}", value)
        if self.grad[0] + self.grad[1] <= 0:
            raise InputError("Goodput.grad: a step takes no time; give a positive number")
        number("Goodput.noise_scale", self.noise_scale)
        number("Goodput.gamma", self.gamma, 1.0)
        integer("Goodput.per_node", self.per_node, 1)
        integer("Goodput.max_batch", self.max_batch, 1, 2**40)
        integer("Goodput.batch", self.batch, 1, self.max_batch)
        if self.max_local is not None:
            integer("Goodput.max_local (at least the batch)", self.max_local, self.batch, 2**40)

    def of(self, gpus: int) -> float:
        """Goodput on so many GPUs relative to one."""
        return self.best(gpus)[0] / self.best(1)[0]

    def best(self, gpus: int) -> tuple[float, int]:
        """Largest goodput, in samples per second worth those at `batch`, and its batch."""
        return _best(self, integer("gpus", gpus, 1, MOST_GPUS))

    def at(self, gpus: int, batch: int) -> float:
        """Goodput of one choice of batch."""
        return float(_goodput(self, gpus, np.array([batch], np.float64))[0])


@lru_cache(maxsize=65536)
def _best(model: Goodput, gpus: int) -> tuple[float, int]:
    last = model.max_batch
    if model.max_local is not None:
        last = min(last, model.max_local * gpus)
    first = max(model.batch, gpus)
    if last < first:
        raise InputError(f"Goodput: no batch up to {last} gives {gpus} GPUs a sample each")
    if last - first < _FULL_RANGE:
        batches = np.arange(first, last + 1, dtype=np.float64)
    else:
        batches = np.unique(np.rint(np.geomspace(first, last, _FULL_RANGE)))
    value = _goodput(model, gpus, batches)
    best = int(np.argmax(value))
    return float(value[best]), int(batches[best])


def _goodput(
    model: Goodput, gpus: int, batch: np.typing.NDArray[np.float64]
) -> np.typing.NDArray[np.float64]:
    grad = model.grad[0] + model.grad[1] * batch / gpus
    wide = model.sync_nodes is not None and gpus > model.per_node
    constant, slope = model.sync_nodes if wide and model.sync_nodes else model.sync
    sync = 0.0 if gpus == 1 else constant + slope * (gpus - 2)
    top = np.maximum(grad, sync)  # divided out: powers of the times themselves could overflow
    step = top * ((grad / top) ** model.gamma + (sync / top) ** model.gamma) ** (1 / model.gamma)
    worth = (model.noise_scale + model.batch) / (model.noise_scale + batch)
    return np.asarray(batch / step * worth)
