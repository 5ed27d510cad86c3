"""What all functions on bare arrays share: certificates, and checks of their arguments.

The checks are strict about types, shapes and sizes, and cheap where all is right.
"""

from __future__ import annotations

from operator import attrgetter
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
_INT: Final = np.dtype(np.int64)
_FLOAT: Final = np.dtype(np.float64)


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

    value: float
    bound: float
    price: float | None
    holds: bool
    proof: str

    def __init__(self, what: str, check: Callable[[], Proof]) -> None:
        self.what = what
        self._check = check
        self._found: Proof | None = None

    @property
    def found(self) -> Proof:
        """All that the check finds."""
        if self._found is None:
            self._found = self._check()
        return self._found

    def __bool__(self) -> bool:
        return self.holds

    def __repr__(self) -> str:
        return f"<Certificate of the {self.what}: {self.found}>"


for _name in Proof._fields:
    setattr(Certificate, _name, property(attrgetter(f"found.{_name}")))


def gpus(budget: Any) -> int:
    """The budget, a whole number in 0..2**30."""
    return integer("budget", budget, 0, MOST_GPUS)


def integers(name: str, given: Any, size: int | None = None) -> IntArray:
    """A contiguous int64 vector; one number stands for `size` equal ones if a size is known."""
    array: IntArray = _vector(name, given, size, "iu", "whole numbers", _INT)
    return array


def reals(name: str, given: Any, size: int | None = None) -> FloatArray:
    """A contiguous float64 vector, not yet checked for signs and NaN."""
    array: FloatArray = _vector(name, given, size, "iuf", "numbers", _FLOAT)
    if len(array) > MOST_JOBS:
        raise InputError(f"{name}: at most {MOST_JOBS} jobs, got {len(array)}")
    return array


def row_pointers(name: str, given: Any, entries: int) -> IntArray:
    """Where the rows of a CSR array of so many entries begin, none empty, and the last one ends."""
    ptr = integers(name, given)
    if len(ptr) == 0 or ptr[0] != 0 or ptr[-1] != entries:
        raise InputError(
            f"{name}: expected offsets from 0 to {entries} (the number of entries), "
            f"got {ptr.tolist()[:2]}..{ptr.tolist()[-1:]}"
        )
    if len(ptr) > MOST_JOBS:
        raise InputError(f"{name}: at most {MOST_JOBS} rows, got {len(ptr) - 1}")
    for j in np.flatnonzero(ptr[1:] <= ptr[:-1])[:1]:
        if ptr[j + 1] == ptr[j]:
            raise InputError(f"{name}: row {j} is empty; give it an entry (size 0 for none)")
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


def _vector(
    name: str, given: Any, size: int | None, kinds: str, what: str, dtype: np.dtype[Any]
) -> Any:
    """A contiguous vector of a type."""
    if type(given) is np.ndarray and given.dtype == dtype and given.ndim == 1:
        array = given
    else:
        array = _plain(name, given, kinds, what)
        if array.ndim == 0 and size is not None:
            array = np.full(size, array)
        if array.dtype.kind == "u" and dtype.kind == "i" and array.size and array.max() >= 2**63:
            raise InputError(f"{name}: expected whole numbers below 2**63, got {array.max()}")
        array = array.astype(dtype)
    if array.ndim != 1:
        raise InputError(f"{name}: expected one dimension, got shape {array.shape}")
    if size is not None and len(array) != size:
        raise InputError(f"{name}: expected {size} values, one a job, got {len(array)}")
    return np.ascontiguousarray(array)
