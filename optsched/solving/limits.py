"""Limits of one solve: time, steps, target, cores, seed and options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.io.values import integer, number
from optsched.solving.stop import check_criterion

if TYPE_CHECKING:
    from optsched.solving.progress import Criterion

_RANGES = (
    ("iterations", 0, 2**53),  # documents hold integers up to that
    ("target", -(2**53), 2**53),
    ("seed", 0, 2**31 - 1),
    ("workers", 1, 1024),
)

DEFAULT_TIME_LIMIT = 10.0
"""Seconds, when no limit at all is given."""


def default_workers() -> int:
    """Two, or one on a single core."""
    return min(2, available_cores())


def available_cores() -> int:
    """Cores this process may use (affinity and container limits respected where known)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@dataclass(frozen=True)
class Limits:
    """When a solver must stop, and which resources it may use.

    Parameters
    ----------
    time_limit
        Seconds from the call to the return; None = unlimited.
    iterations
        Solver-specific steps (see each solver); results depend on them, never on the clock.
    target
        Stop at the first schedule with at most this objective.
    workers
        Cores that may be busy; default ``min(2, available)``.
    seed
        0 <= seed < 2^31; the same (instance, solver, seed, iterations) gives the same schedule.
    options
        Named options of the solver.
    stop
        Further stopping criterion, of `optsched.stop` or any function of a `Progress`. The search
        ends with the first of time limit, target and criterion.

    Raises
    ------
    InputError
        A limit is out of range.

    Examples
    --------
    >>> optsched.Limits(iterations=1000).time_limit is None
    True
    >>> optsched.Limits().time_limit  # without any limit
    10.0
    """

    time_limit: float | None = None
    iterations: int | None = None
    target: int | None = None
    workers: int = field(default_factory=default_workers)
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    stop: Criterion | None = None
    by_default: bool = field(default=False, init=False, compare=False)
    """Whether the user gave no limit: then time to compile kernels does not count."""

    def __post_init__(self) -> None:
        if self.time_limit is not None:
            seconds = number("time_limit", self.time_limit, infinite=True, what="seconds")
            object.__setattr__(self, "time_limit", seconds)
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if value is not None or name in ("seed", "workers"):
                object.__setattr__(self, name, integer(name, value, least, most))
        if not isinstance(self.options, Mapping):
            raise InputError(f"options: expected a mapping, got {self.options!r:.60}")
        if self.stop is not None:
            check_criterion("stop", self.stop)
        elif self.time_limit is None and self.iterations is None and self.target is None:
            object.__setattr__(self, "time_limit", DEFAULT_TIME_LIMIT)
            object.__setattr__(self, "by_default", True)
