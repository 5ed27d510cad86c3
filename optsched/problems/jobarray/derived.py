"""Job arrays derived from another: neighbouring stages merged, iterations balanced by epochs."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import integer
from optsched.problems.jobarray.checks import table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray
    from optsched.problems.jobarray.fields import JobArrayFields

A = TypeVar("A", bound="JobArrayFields")

_SUMS: Final = (
    "forward", "backward", "recompute", "update", "switch", "activation", "weight_memory", "state",
)  # fmt: skip

TOLERATED: Final = Fraction(1, 100)
"""Epoch error at which larger multiplicities are not worth their larger graph."""


def merged(array: A, cuts: Sequence[int], **changes: Any) -> A:
    """Make the array in which stages ``cuts[v] .. cuts[v + 1] - 1`` are stage v.

    Times and bytes add up; with recomputation a stage keeps the input of its first part. Memory,
    place and names of devices are dropped unless they are among the `changes`.
    """
    first, ends = np.array(cuts[:-1]), np.array(cuts[1:-1], np.int64) - 1
    fields: dict[str, Any] = {
        key: np.add.reduceat(getattr(array, key), first, axis=1) for key in _SUMS
    }
    if array.weight is not None:
        fields["weight"] = np.add.reduceat(array.weight, first, axis=1)
    fields["checkpoint"] = array.checkpoint[:, first]
    again = np.maximum(fields["activation"] - fields["checkpoint"], 0)
    fields["recompute_workspace"] = again if array.recompute_workspace.any() else 0 * again
    fields |= {key: getattr(array, key)[:, ends] for key in ("lag_forward", "lag_backward")}
    fields |= {"memory": 0, "place": None, "devices": None, "servers": None}
    return array.replace(**fields | changes)


def epoch_multiplicity(
    array: JobArrayFields, samples: int | Sequence[int], max_copies: int
) -> IntArray:
    """Return the smallest multiplicities of tolerated error, else the best; shape (K,)."""
    integer("max_copies", max_copies, 1, MAX_INTEGER)
    epochs = _iterations(array, samples)
    longest = max(epochs)
    best, least = [1] * len(epochs), _spread(epochs, [1] * len(epochs))
    for copies in range(1, max_copies + 1):
        found = [_nearest(Fraction(copies * one, longest)) for one in epochs]
        error = _spread(epochs, found)
        if error < least:
            best, least = found, error
        if least <= TOLERATED:
            break
    return np.array(best, np.int64)


def epoch_error(array: JobArrayFields, samples: int | Sequence[int]) -> float:
    """Longest epoch over the shortest, in cycles, minus 1."""
    return float(_spread(_iterations(array, samples), array.multiplicity.tolist()))


def _iterations(array: JobArrayFields, samples: int | Sequence[int]) -> list[int]:
    """Iterations of one epoch of every job; the last one may be a smaller batch."""
    if not array.batch_size.all():
        j = int(np.argmin(array.batch_size))
        raise InputError(
            f"jobs[{j}].batch_size: missing, the number of iterations of an epoch follows from it; "
            "give JobArray(batch_size=[...])"
        )
    counts = table_of("samples", samples, (array.n_jobs,), 1).tolist()
    sizes = zip(counts, array.batch_size.tolist(), strict=True)
    return [-(-count // batch) for count, batch in sizes]


def _spread(epochs: Sequence[int], copies: Sequence[int]) -> Fraction:
    """Largest over smallest number of cycles that an epoch takes, minus 1."""
    cycles = [Fraction(one, n) for one, n in zip(epochs, copies, strict=True)]
    return max(cycles) / min(cycles) - 1


def _nearest(share: Fraction) -> int:
    """Return the integer >= 1 of nearest ratio to a share."""
    below = max(1, int(share))
    return below if share * share <= below * (below + 1) else below + 1
