"""Compiled functions run as the Python that they are, while they are not compiled yet."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_ready(entry: Any) -> bool:
    """Whether a compiled function answers at once: it is compiled, or lies in the cache."""
    return bool(getattr(entry, "ready", True))


def run(entry: Any, *arguments: Any, is_small: bool = True) -> Any:
    """The answer of a compiled function; where it is not ready, that of its source as Python.

    Both are the same. Lists take the place of arrays, whose elements Python reads five times as
    slowly; what the source writes to writable arrays is copied back.

    Parameters
    ----------
    entry
        The compiled function.
    arguments
        Its arguments, by position.
    is_small
        Whether there is little enough to do for Python; else the function is compiled first.
    """
    if is_ready(entry) or not is_small:
        return entry(*arguments)
    given = [value.tolist() if isinstance(value, np.ndarray) else value for value in arguments]
    found = entry.py_func(*given)
    for array, values in zip(arguments, given, strict=True):
        if isinstance(array, np.ndarray) and array.flags.writeable:
            array[:] = values
    return found
