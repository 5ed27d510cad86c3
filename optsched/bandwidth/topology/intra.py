"""Bandwidths within one host: for every subset of its GPUs, or for every number of them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.topology.rates import MOST, kilobytes
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import IntArray

MOST_BY_SUBSET: Final = 16
"""GPUs a host up to which every subset has its own value."""


class IntraTable:
    """Bandwidth of the subsets of one host in kB/s; 0 for less than two GPUs.

    Parameters
    ----------
    gpus
        GPUs of the host.
    values
        ``values[mask]`` for all 2^gpus subsets, bit i is GPU i (up to 16 GPUs), or
        ``values[count]`` for 0..gpus where subsets of a size are alike.

    Raises
    ------
    InputError
        Another length, or a value out of range.
    """

    __slots__ = ("__dict__", "gpus", "values")

    def __init__(self, gpus: int, values: Any) -> None:
        self.gpus = gpus
        try:
            given = np.array(values)
            table = given.astype(np.int64)
        except (TypeError, ValueError, OverflowError):
            raise InputError("intra: expected integers in kB/s") from None
        if given.dtype.kind not in "iu":
            raise InputError(f"intra: expected integers in kB/s, got {given.dtype}")
        lengths = {gpus + 1} | ({1 << gpus} if gpus <= MOST_BY_SUBSET else set())
        if table.ndim != 1 or len(table) not in lengths:
            raise InputError(
                f"intra: expected {' or '.join(map(str, sorted(lengths)))} values, "
                f"got shape {table.shape}"
            )
        if (table < 0).any() or (table >= MOST).any():
            worst = int(table[np.argmax((table < 0) | (table >= MOST))])
            raise InputError(f"intra: expected kB/s in 0..{MOST - 1}, got {worst}")
        alone = [0, 1] if len(table) == gpus + 1 else [0, *(1 << i for i in range(gpus))]
        table[alone] = 0
        table.flags.writeable = False
        self.values = table

    @property
    def by_subset(self) -> bool:
        """Whether every subset has a value of its own (else every count)."""
        return self.gpus > 1 and len(self.values) == 1 << self.gpus

    @classmethod
    def from_subsets(
        cls, gpus: int, given: Mapping[str, float], place: str = "intra"
    ) -> IntraTable:
        """From ``{"0,1": GB/s, ...}``; every subset of two or more GPUs must be there.

        Raises
        ------
        InputError
            Subsets that are missing (some are listed), unknown, or given twice; a wrong value.
        """
        if gpus > MOST_BY_SUBSET:
            raise InputError(f"{place}: subsets are listed for at most {MOST_BY_SUBSET} GPUs")
        values = np.full(1 << gpus, -1, np.int64)
        for key, rate in given.items():
            try:
                ids = [int(part) for part in str(key).split(",")]
            except ValueError:
                ids = [-1]
            if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= gpus:
                raise InputError(
                    f"{place}: expected GPU ids in 0..{gpus - 1} such as '0,1', got {key!r:.60}"
                )
            mask = sum(1 << i for i in ids)
            if values[mask] >= 0:
                raise InputError(f"{place}: subset {key!r:.60} is given twice")
            values[mask] = kilobytes(f"{place}[{key!r}]", rate)
        missing = [m for m in range(1 << gpus) if values[m] < 0 and m.bit_count() > 1]
        if missing:
            some = "; ".join(
                ",".join(str(i) for i in range(gpus) if m >> i & 1) for m in missing[:5]
            )
            raise InputError(
                f"{place}: {len(missing)} of the subsets are missing, the first: {some}"
            )
        return cls(gpus, np.maximum(values, 0))

    @classmethod
    def from_counts(cls, given: Mapping[int, float], gpus: int, place: str = "intra") -> IntraTable:
        """From ``{2: GB/s, 3: GB/s, ...}``: one value for all subsets of a size."""
        values = np.zeros(gpus + 1, np.int64)
        missing = [c for c in range(2, gpus + 1) if c not in given]
        if missing or any(not 0 <= c <= gpus for c in given):
            raise InputError(
                f"{place}: expected a value for each count 2..{gpus}, missing: {missing}"
            )
        for count, rate in given.items():
            values[count] = kilobytes(f"{place}[{count}]", rate)
        return cls(gpus, values)

    @cached_property
    def by_count(self) -> IntArray:
        """Best value of every number of GPUs, shape (gpus + 1,)."""
        if not self.by_subset:
            return self.values
        best = np.zeros(self.gpus + 1, np.int64)
        np.maximum.at(best, subset_sizes(self.gpus), self.values)
        return best

    def of(self, mask: int) -> int:
        """Value of a subset, bit i is GPU i; 0 for less than two GPUs."""
        return int(self.values[mask if self.by_subset else mask.bit_count()])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntraTable):
            return NotImplemented
        return self.gpus == other.gpus and np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash((self.gpus, self.values.tobytes()))

    def __repr__(self) -> str:
        kind = "subset" if self.by_subset else "count"
        return f"<IntraTable of {self.gpus} GPUs by {kind}>"


def subset_sizes(gpus: int) -> IntArray:
    """Number of bits of 0 .. 2^gpus - 1."""
    sizes = np.zeros(1 << gpus, np.int64)
    for i in range(gpus):
        sizes[1 << i : 2 << i] = sizes[: 1 << i] + 1
    return sizes
