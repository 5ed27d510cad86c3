"""What all functions on bare arrays share: certificates, and checks of their arguments.

The checks are strict about types, shapes and sizes, and cheap where all is right.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float64]

MOST_GPUS: Final = 2**30
"""Largest budget: products with scores of 32 bits then fit into 63 bits."""
MOST_JOBS: Final = 2**24
"""Largest number of jobs: sums of scores then stay below 2**56."""
NAMED: Final = 5
"""How many jobs a message names."""


class Proof(NamedTuple):
    """What a certificate finds; see there."""

    value: float
    bound: float
    price: float | None
    holds: bool
    proof: str


class Certificate:
    """A proof of optimality, checked on the answer alone and not on how it was found.

    It is checked when it is first looked at; until then do not change the arrays given.

    Attributes
    ----------
    what
        What is optimal, in words.
    value
        What the answer reaches.
    bound
        What no answer can beat; equal to `value` for sums and levels.
    price
        The multiplier of the budget: marginal utility, level or share of a score; None if the
        budget does not bind or has no price.
    holds
        Whether the check succeeded.
    proof
        The kind of check: ``"exchange"``, ``"dual bound"``, ``"dynamic programme"``, ...
    """

    def __init__(self, what: str, check: Callable[[], Proof]) -> None:
        self.what = what
        self._check = check

    @cached_property
    def found(self) -> Proof:
        """All that the check finds."""
        return self._check()

    @property
    def value(self) -> float:
        """What the answer reaches."""
        return self.found.value

    @property
    def bound(self) -> float:
        """What no answer can beat."""
        return self.found.bound

    @property
    def price(self) -> float | None:
        """The multiplier of the budget."""
        return self.found.price

    @property
    def holds(self) -> bool:
        """Whether the check succeeded."""
        return self.found.holds

    @property
    def proof(self) -> str:
        """The kind of check."""
        return self.found.proof

    def __bool__(self) -> bool:
        return self.holds

    def __repr__(self) -> str:
        return f"<Certificate of the {self.what}: {self.found}>"


def gpus(budget: Any) -> int:
    """The budget, a whole number in 0..2**30."""
    return integer("budget", budget, 0, MOST_GPUS)


def integers(name: str, given: Any, size: int | None = None, most: int | None = None) -> IntArray:
    """A contiguous int64 vector; one number stands for `size` equal ones if a size is known.

    With `most` its entries are 0 to so many.
    """
    if type(given) is np.ndarray and given.dtype == np.int64 and given.ndim == 1:
        array = given
    else:
        array = _plain(name, given, "iu", "whole numbers")
        if array.ndim == 0 and size is not None:
            array = np.full(size, array)
        if array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63:
            raise InputError(f"{name}: expected whole numbers below 2**63, got {array.max()}")
        array = array.astype(np.int64)
    array = np.ascontiguousarray(_vector(name, array, size))
    if most is not None and len(array) and (array.min() < 0 or array.max() > most):
        at = int(np.argmax((array < 0) | (array > most)))
        raise InputError(f"{name}: entry {at} is not in 0..{most} ({array[at]})")
    return array


def reals(name: str, given: Any, size: int | None = None) -> FloatArray:
    """A contiguous float64 vector, not yet checked for signs and NaN."""
    if type(given) is np.ndarray and given.dtype == np.float64 and given.ndim == 1:
        array = given
    else:
        array = _plain(name, given, "iuf", "numbers")
        if array.ndim == 0 and size is not None:
            array = np.full(size, array)
        array = array.astype(np.float64)
    array = np.ascontiguousarray(_vector(name, array, size))
    if len(array) > MOST_JOBS:
        raise InputError(f"{name}: at most {MOST_JOBS} jobs, got {len(array)}")
    return array


def row_pointers(name: str, given: Any, entries: int, rows: int | None = None) -> IntArray:
    """Where the rows of a CSR array of so many entries begin, and the last one ends."""
    ptr = integers(name, given)
    if len(ptr) == 0 or ptr[0] != 0 or ptr[-1] != entries:
        raise InputError(
            f"{name}: expected offsets from 0 to {entries} (the number of entries), "
            f"got {ptr.tolist()[:2]}..{ptr.tolist()[-1:]}"
        )
    if rows is not None and len(ptr) != rows + 1:
        raise InputError(f"{name}: has {len(ptr)} entries, {rows + 1} are needed")
    if len(ptr) > MOST_JOBS:
        raise InputError(f"{name}: at most {MOST_JOBS} rows, got {len(ptr) - 1}")
    for j in np.flatnonzero(ptr[1:] < ptr[:-1])[:1]:
        raise InputError(f"{name}: row {j} ends at {ptr[j + 1]}, before it begins ({ptr[j]})")
    return ptr


def too_much(minimum: IntArray, budget: int) -> str:
    """Why a budget cannot serve the minima of all jobs, naming those that want most."""
    large = np.argsort(-minimum, kind="stable")[:NAMED]
    named = ", ".join(f"job {j} wants {minimum[j]}" for j in large if minimum[j] > 0)
    more = "" if np.count_nonzero(minimum) <= NAMED else ", ..."
    total = sum(minimum.tolist())
    return (
        f"minimum: all jobs together need {total} GPUs of a budget of {budget} "
        f"({named}{more}); choose jobs first, as `admit` does"
    )


def _plain(name: str, given: Any, kinds: str, what: str) -> Any:
    """An array of one of the kinds; truth values and texts are not numbers."""
    if isinstance(given, (list, tuple)) and any(isinstance(x, (bool, np.bool_)) for x in given):
        raise InputError(f"{name}: expected {what}, got a truth value")
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, object)
    if array.size == 0 and array.ndim == 1 and array.dtype.kind == "f":
        return array
    if array.dtype.kind not in kinds:
        shown = f"{given!r:.60}" if array.dtype.kind in "OUSb" else str(array.dtype)
        raise InputError(f"{name}: expected {what} (at most 63 bits), got {shown}")
    return array


def _vector(name: str, array: Any, size: int | None) -> Any:
    if array.ndim != 1:
        raise InputError(f"{name}: expected one dimension, got shape {array.shape}")
    if size is not None and len(array) != size:
        raise InputError(f"{name}: expected {size} values, one a job, got {len(array)}")
    return array
