"""Bandwidths within one host: for every subset of its GPUs, or for every number of them."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.topology.rates import MOST, kilobytes
from optsched.errors import InputError
from optsched.io.strict_json import format_json

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

    Examples
    --------
    >>> from optsched.bandwidth import IntraTable
    >>> IntraTable.from_rates(4, {"2": 200.0, "3": 150.0, "4": 300.0}).of(0b0111)
    150000000
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
    def from_rates(cls, gpus: int, given: Mapping[str, float], place: str = "intra") -> IntraTable:
        """Make a table from ``{"0,1": GB/s, ...}``, or by number of GPUs ``{"2": GB/s, ...}``."""
        by_subset = any("," in key for key in given)
        if by_subset and gpus > MOST_BY_SUBSET:
            raise InputError(f"{place}: subsets are listed for at most {MOST_BY_SUBSET} GPUs")
        values = np.full(1 << gpus if by_subset else gpus + 1, -1, np.int64)
        for key, rate in given.items():
            ids = [int(part) for part in key.split(",") if re.fullmatch("0|[1-9][0-9]{0,2}", part)]
            if len(ids) != key.count(",") + 1:
                raise InputError(
                    f'{place}: expected subsets such as "0,1" or numbers of GPUs such as "2", '
                    f"got {format_json(key)}"
                )
            if by_subset and (len(set(ids)) < len(ids) or max(ids) >= gpus):
                known = f"0..{gpus - 1} such as '0,1'"
                raise InputError(f"{place}: expected GPU ids in {known}, got {key!r:.60}")
            at = sum(1 << i for i in ids) if by_subset else min(ids[0], gpus + 1)
            if at < len(values) and values[at] >= 0:
                raise InputError(f"{place}: subset {key!r:.60} is given twice")
            if at > gpus and not by_subset:
                raise InputError(f"{place}: expected a value for each count 2..{gpus}, got {key}")
            values[at] = kilobytes(f"{place}[{key!r}]", rate)
        lost = [at for at in np.flatnonzero(values < 0).tolist()
                if (at.bit_count() if by_subset else at) > 1]  # fmt: skip
        if lost and not by_subset:
            raise InputError(f"{place}: expected a value for each count 2..{gpus}, missing: {lost}")
        if lost:
            sets = (",".join(str(i) for i in range(gpus) if at >> i & 1) for at in lost[:5])
            some = "; ".join(sets)
            raise InputError(f"{place}: {len(lost)} of the subsets are missing, the first: {some}")
        return cls(gpus, np.maximum(values, 0))

    @cached_property
    def by_count(self) -> IntArray:
        """Return the best value of every number of GPUs, shape (gpus + 1,)."""
        if not self.by_subset:
            return self.values
        best = np.zeros(self.gpus + 1, np.int64)
        np.maximum.at(best, subset_sizes(self.gpus), self.values)
        return best

    def of(self, mask: int) -> int:
        """Return the value of a subset, bit i is GPU i; 0 for less than two GPUs."""
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
