"""Which processor cores a call may keep busy, and threads confined to them."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def chosen_cores(workers: int) -> tuple[int, ...]:
    """So many cores of those this process may use; () where threads cannot be confined.

    Processes side by side begin at different cores, so that a fan-out does not crowd on the first.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = sorted(os.sched_getaffinity(0))
    first = os.getpid() * workers % len(cores)
    return tuple((cores[first:] + cores[:first])[:workers])


@contextlib.contextmanager
def confined(cores: tuple[int, ...]) -> Iterator[None]:
    """Keep this thread, and the threads it starts meanwhile, on these cores; () = no change."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
