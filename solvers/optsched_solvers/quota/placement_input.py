"""Arrays as they come from callers, checked: what all placement functions share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Ints: TypeAlias = npt.NDArray[np.int64]
    IntsLike: TypeAlias = npt.NDArray[np.integer] | Sequence[int]

LARGEST: Final = 2**31 - 1


def vector(name: str, given: Any, *, kinds: str = "iu", way_out: str = "") -> npt.NDArray[Any]:
    """A one-dimensional array of integers of one of the `kinds`, of any width.

    Raises
    ------
    InputError
        It is not that; the message ends with `way_out`.
    """
    try:
        array = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: not an array of integers") from error
    if array.ndim == 1 and array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise InputError(
            f"{name}: expected a one-dimensional array of integers, got {array.ndim} dimensions of "
            f"{array.dtype}{way_out}"
        )
    return array


def counts(name: str, given: IntsLike, largest: int = LARGEST) -> Ints:
    """A one-dimensional int64 array of numbers from 0 to `largest`, contiguous.

    Raises
    ------
    InputError
        It is not that; the message names array, position and value.
    """
    array = vector(name, given)
    for wrong, why in ((array < 0, "is negative"), (array > largest, f"is above {largest}")):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(f"{name}: entry {at} {why} ({array[at]})")
    return np.ascontiguousarray(array, np.int64)


def row_pointers(name: str, given: IntsLike, rows: int | None = None) -> Ints:
    """Where the rows of a CSR array begin, and the last one ends.

    Raises
    ------
    InputError
        It does not begin at 0, descends, or is not of ``rows + 1`` numbers.
    """
    ptr = counts(name, given, 2**62)
    if len(ptr) == 0 or ptr[0] != 0:
        raise InputError(f"{name}: must begin with 0")
    if rows is not None and len(ptr) != rows + 1:
        raise InputError(f"{name}: has {len(ptr)} entries, {rows + 1} are needed")
    if (ptr[1:] < ptr[:-1]).any():
        row = int(np.argmax(ptr[1:] < ptr[:-1]))
        raise InputError(f"{name}: row {row} ends at {ptr[row + 1]}, before it begins ({ptr[row]})")
    return ptr


def arrivals(events: Any, tasks: int) -> Ints:
    """Order of tasks that come (i) and go (~i); each comes at most once, and goes after that.

    Raises
    ------
    InputError
        It is not that; the message names the event.
    """
    if events is None:
        return np.arange(tasks, dtype=np.int64)
    array = vector("events", events, kinds="i")
    state = np.zeros(tasks, np.int8)
    for at, event in enumerate(array.tolist()):
        task = event if event >= 0 else ~event
        if task >= tasks:
            raise InputError(f"events: entry {at} is of task {task}, there are {tasks}")
        if state[task] != (0 if event >= 0 else 1):
            what = "comes twice" if event >= 0 else "ends without having come"
            raise InputError(f"events: entry {at}: task {task} {what}")
        state[task] += 1
    return np.ascontiguousarray(array, np.int64)
