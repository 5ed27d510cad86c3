"""Rows of options as they come from callers, checked for the multiple-choice kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry
from optsched_solvers.quota.multiple_choice_hull import HEADROOM
from optsched_solvers.quota.placement_input import vector

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

LARGEST_SIZE: Final = 2**31 - 1
LARGEST_VALUE: Final = 2**59

# what `_check` finds wrong, besides the position or row
_FINE: Final = 0
_POINTER: Final = 1
_EMPTY: Final = 2
_NEGATIVE: Final = 3
_LARGE: Final = 4
_UNSORTED: Final = 5
_VALUE: Final = 6
_SUM: Final = 7


class Options(NamedTuple):
    """Checked options, and the budget above the smallest ones."""

    ptr: Ints
    size: Ints
    value: Ints
    spare: int
    """Budget above the smallest options, cut to a multiple of what all sizes are multiples of."""
    smallest: int
    """Value of all rows' first options."""


def options(ptr: Any, size: Any, value: Any, budget: Any) -> Options:
    """Check everything once.

    Raises
    ------
    InputError
        What is wrong, where, and how to mend it.
    """
    if isinstance(budget, (bool, np.bool_)) or not isinstance(budget, (int, np.integer)):
        raise InputError(f"budget: expected an integer, got {budget!r:.60}")
    if budget < 0:
        raise InputError(f"budget: must not be negative, got {budget}")
    starts, sizes = _integers("ptr", ptr), _integers("size", size)
    values = _integers("value", value)
    if len(starts) == 0 or starts[0] != 0:
        raise InputError("ptr: must begin with 0")
    if not starts[-1] == len(sizes) == len(values):
        raise InputError(
            f"ptr: ends with {starts[-1]}, but there are {len(sizes)} sizes and {len(values)} "
            "values; all three must be equal"
        )
    out = np.zeros(7, np.int64)
    _check(starts, sizes, values, out)
    code, row, at, least, most, first, step = (int(number) for number in out)
    if code != _FINE:
        raise InputError(_wrong(code, row, at, starts, sizes, values))
    if least > budget:
        raise InputError(_infeasible(starts, sizes, least, int(budget)))
    spare = min(int(budget), most) - least
    return Options(starts, sizes, values, spare - spare % max(step, 1), first)


def _integers(name: str, given: Any) -> Ints:
    array = vector(name, given, way_out="; scale and round utilities first")
    if array.dtype.kind == "u" and int(array.max()) > 2**63 - 1:
        raise InputError(f"{name}: {int(array.max())} does not fit into 64 bits")
    return np.ascontiguousarray(array, np.int64)


def _wrong(code: int, row: int, at: int, ptr: Ints, size: Ints, value: Ints) -> str:
    if code == _POINTER:
        return f"ptr: row {row} ends at {ptr[row + 1]}, before it begins ({ptr[row]})"
    if code == _EMPTY:
        return f"ptr: row {row} is empty; give every row an option (size 0 for none)"
    here = f"size: row {row}, option {at - ptr[row]}"
    if code == _NEGATIVE:
        return f"{here} is negative ({size[at]})"
    if code == _LARGE:
        return f"{here} is above {LARGEST_SIZE} ({size[at]})"
    if code == _UNSORTED:
        return (
            f"{here} ({size[at]}) is not above the one before it ({size[at - 1]}); sizes of a row "
            "must be ascending and distinct"
        )
    if code == _VALUE:
        return (
            f"value: row {row}, option {at - ptr[row]} is beyond 2^59 in size ({value[at]}); use a "
            "coarser resolution"
        )
    return f"value: the sum up to row {row} is beyond 2^59 in size; use a coarser resolution"


def _infeasible(ptr: Ints, size: Ints, least: int, budget: int) -> str:
    """Name the rows that need most."""
    needs = size[ptr[:-1]]
    order = np.argsort(-needs, kind="stable")
    named = [f"{j} ({needs[j]})" for j in order[:5].tolist() if needs[j] > 0]
    more = int((needs > 0).sum()) - len(named)
    rest = f" and {more} more" if more > 0 else ""
    return (
        f"budget: the smallest sizes need {least} in sum, the budget is {budget}; leave out some "
        f"of the rows {', '.join(named)}{rest}"
    )


@entry(INT, READ, READ, READ, INTS)
def _check(ptr, size, value, out):  # type: ignore[no-untyped-def]
    """out: what is wrong, row, position; sums of smallest, largest sizes, first values; step."""
    least = most = first = spread = reach = step = 0
    rows = len(ptr) - 1
    out[0] = _FINE
    for j in range(rows):
        out[1] = j
        if ptr[j + 1] < ptr[j] or ptr[j + 1] > len(size):
            out[0] = _POINTER
            return 0
        if ptr[j + 1] == ptr[j]:
            out[0] = _EMPTY
            return 0
        low = high = value[ptr[j]]
        for i in range(ptr[j], ptr[j + 1]):
            out[2] = i
            if size[i] < 0:
                out[0] = _NEGATIVE
                return 0
            if size[i] > LARGEST_SIZE:
                out[0] = _LARGE
                return 0
            if i > ptr[j] and size[i] <= size[i - 1]:
                out[0] = _UNSORTED
                return 0
            if value[i] > LARGEST_VALUE or value[i] < -LARGEST_VALUE:
                out[0] = _VALUE
                return 0
            low, high = min(low, value[i]), max(high, value[i])
            if step != 1:
                rest = size[i] - size[ptr[j]]
                while rest > 0:
                    step, rest = rest, step % rest
        least += size[ptr[j]]
        most += size[ptr[j + 1] - 1]
        first += value[ptr[j]]
        spread += high - low
        reach += max(abs(low), abs(high))
        if spread >= HEADROOM or reach >= LARGEST_VALUE:
            out[0] = _SUM
            return 0
    out[3], out[4], out[5], out[6] = least, most, first, step
    return 0
