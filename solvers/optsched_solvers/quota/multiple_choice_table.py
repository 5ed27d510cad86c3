"""Multiple-choice knapsack by the full table of budgets: the exact fall-back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

BYTES = types.Array(types.uint8, 1, "C")
MEMORY: Final = 1 << 28
"""Bytes of back-pointers at once; beyond it the rows are halved, and solved twice."""


def cells(ptr: Ints, room: int) -> int:
    """Steps that the table takes: options times budgets."""
    return int(ptr[-1]) * (room + 1)


def table(ptr: Ints, size: Ints, value: Ints, room: int, memory: int = MEMORY) -> Ints:
    """Position of every row's option in a best solution of at most `room`.

    Parameters
    ----------
    ptr, size, value
        Options by row, sizes ascending; every row's first has size 0.
    room
        Budget.
    memory
        Bytes of back-pointers at once.

    Returns
    -------
    int64 array, shape (rows,)
        Chosen positions in `size`; among equals that of the smaller size in later rows.
    """
    rows = len(ptr) - 1
    wide = 1 if int(np.diff(ptr).max(initial=0)) > 256 else 0
    need = rows * (room + 1) * (2 if wide else 1)
    chosen = np.empty(rows, np.int64)
    if rows <= 1 or need <= memory:
        back = np.empty(need, np.uint8)
        _fill(ptr, size, value, room, wide, back, chosen)
        return chosen
    half = rows // 2
    left, right = ptr[: half + 1], ptr[half:] - ptr[half]
    size_right, value_right = size[ptr[half] :], value[ptr[half] :]
    nothing = np.empty(0, np.uint8)
    worth, other = np.empty(room + 1, np.int64), np.empty(room + 1, np.int64)
    _fill(left, size, value, room, -1, nothing, worth)
    _fill(right, size_right, value_right, room, -1, nothing, other)
    share = int(np.argmax(worth + other[::-1]))
    chosen[:half] = table(left, size, value, share, memory)
    chosen[half:] = table(right, size_right, value_right, room - share, memory) + ptr[half]
    return chosen


@entry(INT, READ, READ, READ, INT, INT, BYTES, INTS)
def _fill(ptr, size, value, room, wide, back, out):  # type: ignore[no-untyped-def]
    """Best value of every budget, row by row.

    wide: options of a row as one byte (0) or two (1) in `back`, then out: chosen positions; or -1:
    no back-pointers, out: best value of every budget from 0 to `room`.
    """
    rows = len(ptr) - 1
    best, new = np.zeros(room + 1, np.int64), np.empty(room + 1, np.int64)
    which = np.zeros(room + 1, np.int32)
    after = np.zeros(rows + 1, np.int64)  # what the rows from here on can use at most
    for j in range(rows - 1, -1, -1):
        after[j] = after[j + 1] + size[ptr[j + 1] - 1]
    for j in range(rows):
        first = ptr[j]
        low = max(0, room - after[j + 1]) if wide >= 0 else 0
        for b in range(low, room + 1):
            new[b] = best[b] + value[first]
            which[b] = 0
        for i in range(first + 1, ptr[j + 1]):
            s, v = size[i], value[i]
            for b in range(max(low, s), room + 1):
                other = best[b - s] + v
                better = other > new[b]
                new[b] = other if better else new[b]
                which[b] = i - first if better else which[b]
        if wide >= 0:
            at = j * (room + 1)
            for b in range(low, room + 1):
                back[at + b] = which[b] & 255
            if wide == 1:
                at += rows * (room + 1)
                for b in range(low, room + 1):
                    back[at + b] = which[b] >> 8
        best, new = new, best
    if wide < 0:
        for b in range(room + 1):
            out[b] = best[b]
        return 0
    b = room
    for j in range(rows - 1, -1, -1):
        o = np.int64(back[j * (room + 1) + b])
        if wide == 1:
            o += np.int64(back[(rows + j) * (room + 1) + b]) << 8
        out[j] = ptr[j] + o
        b -= size[out[j]]
    return 0
