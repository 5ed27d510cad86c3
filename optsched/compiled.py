"""How kernels are compiled: once, cached on disk, without holding the interpreter lock."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba
from numba import types

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

INT = types.int64
BOOL = types.boolean
INTS = types.Array(types.int64, 1, "C")
READ = types.Array(types.int64, 1, "C", readonly=True)
"""Input arrays: writable ones are accepted too."""


def kernel(*signature: Any, counted: bool = True) -> Callable[[F], F]:
    """Compile a function for one signature (result first), or load it from the cache.

    Without a writable cache directory the kernel is compiled anew in every process.

    Parameters
    ----------
    signature
        Type of the result and types of the arguments.
    counted
        False leaves out all reference counting (a third of the time of kernels with many inlined
        callees); such a kernel makes no arrays, and indexes no slices.
    """
    result, *arguments = signature
    settings: dict[str, Any] = {"nogil": True} if counted else {"nogil": True, "_nrt": False}

    def compile_it(function: F) -> F:
        try:
            return cast("F", numba.njit(result(*arguments), cache=True, **settings)(function))
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            warnings.warn(
                "no writable cache directory: kernels are compiled in every process "
                "(set NUMBA_CACHE_DIR)",
                RuntimeWarning,
                stacklevel=2,
            )
            return cast("F", numba.njit(result(*arguments), **settings)(function))

    return compile_it
