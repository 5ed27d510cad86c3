"""Free GPUs of every node in buckets with bitmaps: where a gang goes, in a few machine words.

A *board* is one int64 array: a header, the free GPUs of every node, the number of nodes in every
bucket, a bitmap of the buckets in use, and for every bucket a bitmap of its nodes with a summary
of the words that are not zero. Fullest node that fits and emptiest node cost a few instructions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import types
from numba.core.cgutils import true_bit
from numba.extending import intrinsic

from optsched.kernels.compile import INT, INTS, entry, helper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray

ANYWHERE: Final = 0
"""Fullest node that fits, else emptiest nodes wholly and the rest on the fullest that fits."""
CONSOLIDATED: Final = 1
"""As Lucid's simulator, on nodes of 8: at most one node that is not taken wholly."""

NODES: Final = 0
FREE_TOTAL: Final = 1
_WORDS: Final = 2
_TOPS: Final = 3
_LEVEL_WORDS: Final = 4
_COUNT: Final = 5
_LEVEL: Final = 6
_TOP: Final = 7
_BIT: Final = 8
FREE: Final = 10
"""Where the free GPUs of node 0 stand."""

INNER: Final = {"counted": False}


def _lowest_bit(typing: Any, value: Any) -> Any:
    """Position of the lowest bit of a word that is not zero."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], true_bit)

    return types.int64(types.int64), code


def _zeros_above(typing: Any, value: Any) -> Any:
    """Number of zeros above the highest bit of a word that is not zero."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], true_bit)

    return types.int64(types.int64), code


lowest_bit: Final[Any] = intrinsic(_lowest_bit)
_leading_zeros: Final[Any] = intrinsic(_zeros_above)


@helper(INT, INTS, INT, INT, **INNER)
def _enter(board, node, level):  # type: ignore[no-untyped-def]
    """Put a node into a bucket."""
    word = node >> 6
    board[board[_BIT] + level * board[_WORDS] + word] |= 1 << (node & 63)
    board[board[_TOP] + level * board[_TOPS] + (word >> 6)] |= 1 << (word & 63)
    board[board[_LEVEL] + (level >> 6)] |= 1 << (level & 63)
    board[board[_COUNT] + level] += 1
    return 0


@entry(INT, INTS, INTS)
def _fill(board, gpus):  # type: ignore[no-untyped-def]
    """Put every node into its bucket."""
    for node in range(len(gpus)):
        board[FREE + node] = gpus[node]
        _enter(board, node, gpus[node])
    return 0


def board(gpus: Sequence[int]) -> IntArray:
    """All nodes idle.

    Parameters
    ----------
    gpus
        GPUs of every node.
    """
    n, most = len(gpus), max(gpus)
    words = (n + 63) // 64
    tops, levels = (words + 63) // 64, (most + 64) // 64
    made = np.zeros(FREE + n + (most + 1) * (1 + words + tops) + levels, np.int64)
    made[NODES], made[_WORDS], made[_TOPS], made[_LEVEL_WORDS] = n, words, tops, levels
    made[_COUNT] = FREE + n
    made[_LEVEL] = made[_COUNT] + most + 1
    made[_TOP] = made[_LEVEL] + levels
    made[_BIT] = made[_TOP] + (most + 1) * tops
    made[FREE_TOTAL] = sum(gpus)
    _fill(made, np.array(gpus, np.int64))
    return made


@helper(INT, INTS, INT, INT, **INNER)
def shift(board, node, change):  # type: ignore[no-untyped-def]
    """Add (or with a negative change take) free GPUs of a node."""
    level, word = board[FREE + node], node >> 6
    at = board[_BIT] + level * board[_WORDS] + word
    board[at] &= ~(1 << (node & 63))
    if board[at] == 0:
        board[board[_TOP] + level * board[_TOPS] + (word >> 6)] &= ~(1 << (word & 63))
    board[board[_COUNT] + level] -= 1
    if board[board[_COUNT] + level] == 0:
        board[board[_LEVEL] + (level >> 6)] &= ~(1 << (level & 63))
    board[FREE + node] = level + change
    board[FREE_TOTAL] += change
    return _enter(board, node, level + change)


@helper(INT, INTS, INT, **INNER)
def _first(board, level):  # type: ignore[no-untyped-def]
    """Lowest node of a bucket that is not empty."""
    at = board[_TOP] + level * board[_TOPS]
    top = 0
    while board[at + top] == 0:
        top += 1
    word = (top << 6) + lowest_bit(board[at + top])
    return (word << 6) + lowest_bit(board[board[_BIT] + level * board[_WORDS] + word])


@helper(INT, INTS, INT, **INNER)
def fullest(board, gpus):  # type: ignore[no-untyped-def]
    """Among nodes with so many free GPUs the one with the fewest (lowest number); -1 if none."""
    word = gpus >> 6
    if word >= board[_LEVEL_WORDS]:
        return -1
    levels = board[board[_LEVEL] + word] & (-1 << (gpus & 63))
    while levels == 0:
        word += 1
        if word == board[_LEVEL_WORDS]:
            return -1
        levels = board[board[_LEVEL] + word]
    return _first(board, (word << 6) + lowest_bit(levels))


@helper(INT, INTS, **INNER)
def emptiest(board):  # type: ignore[no-untyped-def]
    """Node with the most free GPUs (lowest number)."""
    word = board[_LEVEL_WORDS] - 1
    while board[board[_LEVEL] + word] == 0:
        word -= 1
    return _first(board, (word << 6) + 63 - _leading_zeros(board[board[_LEVEL] + word]))


@helper(INT, INTS, INTS, INTS, INT, INT, INT, **INNER)
def _take(board, nodes, counts, begin, at, node):  # type: ignore[no-untyped-def]
    """Write one part, ``counts[at]`` GPUs of a node; parts from `begin` on stay in node order."""
    gpus = counts[at]
    while at > begin and nodes[at - 1] > node:
        nodes[at], counts[at] = nodes[at - 1], counts[at - 1]
        at -= 1
    nodes[at], counts[at] = node, gpus
    return shift(board, node, -gpus)


@helper(INT, INTS, INT, INT, INTS, INTS, INT, **INNER)
def place(board, gpus, rule, nodes, counts, begin):  # type: ignore[no-untyped-def]
    """Take GPUs by a rule; the parts go to ``nodes, counts[begin:end]``.

    Returns `end`, or `begin` if the gang does not fit (then nothing changes).
    """
    if board[FREE_TOTAL] < gpus:
        return begin
    at = begin
    if rule == CONSOLIDATED and gpus > 8:
        whole, rest = gpus >> 3, gpus & 7
        idle = board[board[_COUNT] + 8]
        if idle < whole:
            return begin
        if rest > 0 and idle == whole:
            below = board[board[_LEVEL]] & 0xFF
            if below >> rest == 0:
                return begin
        for _ in range(whole):
            counts[at] = 8
            _take(board, nodes, counts, begin, at, _first(board, 8))
            at += 1
        if rest > 0:
            counts[at] = rest
            _take(board, nodes, counts, begin, at, emptiest(board))
            at += 1
        return at
    node = fullest(board, gpus)
    if rule == CONSOLIDATED and node < 0:
        return begin
    while node < 0:
        most = emptiest(board)
        counts[at] = board[FREE + most]
        gpus -= counts[at]
        _take(board, nodes, counts, begin, at, most)
        at += 1
        node = fullest(board, gpus)
    counts[at] = gpus
    _take(board, nodes, counts, begin, at, node)
    return at + 1


@helper(INT, INTS, INTS, INTS, INT, INT, **INNER)
def release(board, nodes, counts, begin, end):  # type: ignore[no-untyped-def]
    """Give the GPUs of these parts back."""
    for at in range(begin, end):
        shift(board, nodes[at], counts[at])
    return 0
