"""Binary heaps of (key, value) pairs in two arrays, smallest first, for compiled simulations."""

from __future__ import annotations

from optsched.kernels.compile import INT, INTS, helper


@helper(INT, INTS, INTS, INT, INT, INT, counted=False)
def push(keys, values, size, key, value):  # type: ignore[no-untyped-def]
    """Add a pair to a heap of `size`; returns the new size."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if keys[up] < key or (keys[up] == key and values[up] < value):
            break
        keys[at], values[at] = keys[up], values[up]
        at = up
    keys[at], values[at] = key, value
    return size + 1


@helper(INT, INTS, INTS, INT, counted=False)
def pop(keys, values, size):  # type: ignore[no-untyped-def]
    """Remove the first pair; returns the new size."""
    size -= 1
    key, value = keys[size], values[size]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        other = down + 1
        if other < size and (
            keys[other] < keys[down] or (keys[other] == keys[down] and values[other] < values[down])
        ):
            down = other
        if key < keys[down] or (key == keys[down] and value < values[down]):
            break
        keys[at], values[at] = keys[down], values[down]
        at = down
    keys[at], values[at] = key, value
    return size
