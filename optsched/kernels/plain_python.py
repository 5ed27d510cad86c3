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
    slowly, of objects where there are records, also within a named tuple; what the source writes to
    writable arrays is copied back.

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
    """What was written to the lists goes to the arrays."""
    if isinstance(value, tuple):
        for own, its in zip(value, given, strict=True):
            _copy_back(own, its)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        names = value.dtype.names
        value[:] = given if names is None else list(map(attrgetter(*names), given))


@cache
def _record(names: tuple[str, ...]) -> type:
    """Objects with these attributes, at least two."""
    return make_dataclass("Record", names, slots=True, eq=False)
