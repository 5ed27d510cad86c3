"""Multiplicities of a job array: as many iterations a cycle as epochs have, in proportion."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import integer
from optsched.problems.jobarray.checks import table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray
    from optsched.problems.jobarray.problem import JobArray

TOLERATED: Final = Fraction(1, 100)
"""Error at which larger multiplicities are not worth their larger graph."""


def epoch_multiplicity(array: JobArray, samples: int | Sequence[int], max_copies: int) -> IntArray:
    """The smallest multiplicities of tolerated error, else the best; shape (K,).

    The best may be far off where `max_copies` binds (batches of 1 and 1000): `epoch_error` tells.
    """
    integer("max_copies", max_copies, 1, MAX_INTEGER)
    epochs = iterations(array, samples)
    longest = max(epochs)
    best, least = [1] * len(epochs), spread(epochs, [1] * len(epochs))
    for copies in range(1, max_copies + 1):
        found = [_nearest(Fraction(copies * one, longest)) for one in epochs]
        error = spread(epochs, found)
        if error < least:
            best, least = found, error
        if least <= TOLERATED:
            break
    return np.array(best, np.int64)


def epoch_error(array: JobArray, samples: int | Sequence[int]) -> float:
    """Longest epoch over the shortest, in cycles, minus 1."""
    return float(spread(iterations(array, samples), array.multiplicity.tolist()))


def iterations(array: JobArray, samples: int | Sequence[int]) -> list[int]:
    """Iterations of one epoch of every job; the last one may be a smaller batch."""
    if not array.batch_size.all():
        j = int(np.argmin(array.batch_size))
        raise InputError(
            f"jobs[{j}].batch_size: not said, and without it nobody knows how many iterations an "
            "epoch has; give JobArray(batch_size=[...])"
        )
    sizes = zip(
        table_of("samples", samples, (array.n_jobs,), 1).tolist(),
        array.batch_size.tolist(),
        strict=True,
    )
    return [-(-count // batch) for count, batch in sizes]


def spread(epochs: Sequence[int], copies: Sequence[int]) -> Fraction:
    """Largest over smallest number of cycles that an epoch takes, minus 1."""
    cycles = [Fraction(one, n) for one, n in zip(epochs, copies, strict=True)]
    return max(cycles) / min(cycles) - 1


def _nearest(share: Fraction) -> int:
    """The integer >= 1 of nearest ratio to a share."""
    below = max(1, int(share))
    return below if share * share <= below * (below + 1) else below + 1
