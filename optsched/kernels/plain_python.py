"""Run compiled functions as Python while they are not compiled yet."""

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
"""Seconds in Python after which a function is compiled."""

_spent: dict[int, float] = {}
_thread = threading.local()


@contextmanager
def in_python() -> Iterator[None]:
    """Run entries that this thread calls in the block as Python, unless they are ready."""
    before = is_in_python()
    _thread.is_in_python = True
    try:
        yield
    finally:
        _thread.is_in_python = before


def is_in_python() -> bool:
    """Whether this thread is in a block of `in_python`."""
    return getattr(_thread, "is_in_python", False)


def is_ready(entry: Any) -> bool:
    """Whether a compiled function is in memory or on disk."""
    return bool(getattr(entry, "ready", True))


def run(entry: Any, *arguments: Any, is_small: bool = True) -> Any:
    """Call a compiled function, or its source if it is not ready; the result is the same.

    The source gets lists instead of arrays, because Python reads their elements five times as fast,
    with objects for records, also within named tuples. Writable arrays are copied back.

    Parameters
    ----------
    entry
        The compiled function.
    arguments
        Its arguments, by position.
    is_small
        Whether Python is fast enough; else the function is compiled first.
    """
    spent = _spent.get(id(entry), 0.0)
    if is_ready(entry) or not is_small or spent > WORTH_COMPILING:
        return entry(*arguments)
    begin = time.perf_counter()
    given = _listed(arguments)
    with in_python():
        found = entry.py_func(*given)
    _copy_back(arguments, given)
    _spent[id(entry)] = spent + time.perf_counter() - begin
    return found


def _listed(value: Any) -> Any:
    """An array as lists, its records as objects."""
    if isinstance(value, tuple):
        rows = map(_listed, value)
        return type(value)(*rows) if hasattr(value, "_fields") else tuple(rows)
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.names is None:
        return value.tolist()
    record = _record(value.dtype.names)
    return [record(*row) for row in value.tolist()]


def _copy_back(value: Any, given: Any) -> None:
    """Copy the lists back to the writable arrays."""
    if isinstance(value, tuple):
        for array, values in zip(value, given, strict=True):
            _copy_back(array, values)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        names = value.dtype.names
        value[:] = given if names is None else list(map(attrgetter(*names), given))


@cache
def _record(names: tuple[str, ...]) -> type:
    """Objects with these attributes, at least two."""
    return make_dataclass("Record", names, slots=True, eq=False)
