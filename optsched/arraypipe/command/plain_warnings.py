"""Warnings as people read them: one line on stderr, without the file and line that warned."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def plain_warnings(speaks: bool = True) -> Iterator[None]:
    """Print every warning once, as ``warning: <sentence>``; which count the filters decide.

    Parameters
    ----------
    speaks
        False: say none of them, such as on ranks above 0.
    """
    told: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        sentence = " ".join(str(message).split())
        if speaks and sentence not in told:
            told.add(sentence)
            print(f"warning: {sentence}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
