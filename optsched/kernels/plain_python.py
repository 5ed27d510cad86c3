"""Compiled functions run as the Python that they are, while they are not compiled yet."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import make_dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

WORTH_COMPILING = 3.0
"""Seconds that a function has run as Python before somebody who calls it often is better off."""

_spent: dict[int, float] = {}
_thread = threading.local()


@contextmanager
def in_python(is_small: bool = True) -> Iterator[None]:
    """Compiled functions that this thread calls run as Python in the block, unless they are ready.

    Parameters
    ----------
    is_small
        Whether there is little enough to do for Python; else they are compiled first.
    """
    before = is_in_python()
    _thread.is_in_python = is_small
    try:
        yield
    finally:
        _thread.is_in_python = before


def is_in_python() -> bool:
    """Whether this thread is in a block of `in_python`."""
    return getattr(_thread, "is_in_python", False)


def is_ready(entry: Any) -> bool:
    """Whether a compiled function answers at once: it is compiled, or lies in the cache."""
    return bool(getattr(entry, "ready", True))


def run(entry: Any, *arguments: Any, is_small: bool = True) -> Any:
    """The answer of a compiled function; where it is not ready, that of its source as Python.

    Both are the same. Lists take the place of arrays, whose elements Python reads five times as
    slowly, of objects where there are records; what the source writes to writable arrays is copied
    back.

    Parameters
    ----------
    entry
        The compiled function.
    arguments
        Its arguments, by position.
    is_small
        Whether there is little enough to do for Python; else the function is compiled first.
    """
    spent = _spent.get(id(entry), 0.0)
    if is_ready(entry) or not is_small or spent > WORTH_COMPILING:
        return entry(*arguments)
    begin = time.perf_counter()
    given = [_listed(value) if isinstance(value, np.ndarray) else value for value in arguments]
    with in_python():
        found = entry.py_func(*given)
    for array, values in zip(arguments, given, strict=True):
        if isinstance(array, np.ndarray) and array.flags.writeable:
            names = array.dtype.names
            array[:] = values if names is None else list(map(attrgetter(*names), values))
    _spent[id(entry)] = spent + time.perf_counter() - begin
    return found


def _listed(array: Any) -> list[Any]:
    """The array as lists, its records as objects."""
    rows: list[Any] = array.tolist()
    if array.dtype.names is None:
        return rows
    record = _record(array.dtype.names)
    return [record(*row) for row in rows]


@cache
def _record(names: tuple[str, ...]) -> type:
    """Objects with these attributes, at least two."""
    return make_dataclass("Record", names, slots=True, eq=False)
