"""Stopping criteria beside the limits of `optsched.solve`: tests of a `Progress`.

Any function of a `Progress` that returns true to stop is a criterion. The criteria here are values
without state: one may serve several searches at once.

Examples
--------
>>> from optsched import stop
>>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
>>> enough = stop.AnyOf(stop.Gap(0.01), stop.NoImprovement(seconds=5))
>>> optsched.solve(shop, stop=enough).objective
6
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.io.values import integer, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.solving.progress import Criterion, Progress


@dataclass(frozen=True)
class Gap:
    """Stop as soon as the gap (`Progress.gap`) is at most this: 0.01 is one percent.

    Examples
    --------
    >>> optsched.stop.Gap(0.05)(optsched.Progress(1.0, 0, 104, 100, "incumbent"))
    True
    """

    relative: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "relative", number("Gap: relative", self.relative))

    def __call__(self, progress: Progress) -> bool:
        """Whether the proved gap is small enough."""
        return progress.gap is not None and progress.gap <= self.relative


@dataclass(frozen=True)
class NoImprovement:
    """Stop after so many steps, or seconds, since the last better schedule.

    Counting starts with the first schedule. Steps are those that the solver reports
    (`optsched.Monitor.advance`), in slices, so the search may end up to a slice later; a solver
    that reports none is never stopped by steps.

    Parameters
    ----------
    iterations
        Steps of the solver.
    seconds
        Seconds; exactly one of the two.

    Examples
    --------
    >>> state = optsched.Progress(9.0, 500, 104, 100, "tick", best_elapsed=3.0, best_iteration=100)
    >>> optsched.stop.NoImprovement(seconds=5)(state), optsched.stop.NoImprovement(1000)(state)
    (True, False)
    """

    iterations: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.iterations is None) == (self.seconds is None):
            raise InputError("NoImprovement: expected either iterations or seconds")
        if self.iterations is not None:
            steps = integer("NoImprovement: iterations", self.iterations)
            object.__setattr__(self, "iterations", steps)
        if self.seconds is not None:
            object.__setattr__(self, "seconds", number("NoImprovement: seconds", self.seconds))

    def __call__(self, progress: Progress) -> bool:
        """Whether the last better schedule is too long ago."""
        if progress.objective is None:
            return False
        if self.iterations is not None:
            return progress.iteration - progress.best_iteration >= self.iterations
        return progress.elapsed - progress.best_elapsed >= (self.seconds or 0.0)


@dataclass(frozen=True)
class FirstFeasible:
    """Stop at the first schedule.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> optsched.solve(shop, stop=optsched.stop.FirstFeasible()).status in ("feasible", "optimal")
    True
    """

    def __call__(self, progress: Progress) -> bool:
        """Whether a schedule is known."""
        return progress.objective is not None


@dataclass(frozen=True, init=False)
class AnyOf:
    """Stop as soon as one of several criteria is met.

    Examples
    --------
    >>> enough = optsched.stop.AnyOf(optsched.stop.Gap(0.01), lambda now: now.elapsed > 60)
    >>> enough(optsched.Progress(61.0, 0, 104, 100, "tick"))
    True
    """

    criteria: tuple[Criterion, ...]

    def __init__(self, *criteria: Criterion) -> None:
        if not criteria:
            raise InputError("AnyOf: expected at least one criterion")
        for k, criterion in enumerate(criteria):
            check_criterion(f"AnyOf: criteria[{k}]", criterion)
        object.__setattr__(self, "criteria", criteria)

    def __call__(self, progress: Progress) -> bool:
        """Whether any of them is met."""
        return any(criterion(progress) for criterion in self.criteria)


def check_criterion(name: str, criterion: Any) -> None:
    """Refuse what cannot be called, such as a number or a class that was not instantiated."""
    if isinstance(criterion, type) or not callable(criterion):
        what = "a class" if isinstance(criterion, type) else repr(criterion)
        raise InputError(
            f"{name}: expected a criterion such as optsched.stop.Gap(0.01), or a function of a "
            f"Progress, got {what:.60}"
        )


def split(criterion: Criterion | None) -> tuple[tuple[Criterion, ...], tuple[Criterion, ...]]:
    """Criteria of this module, which any thread may call, and functions of the user."""
    parts = tuple(_parts(criterion)) if criterion is not None else ()
    ours = [type(part) in (Gap, NoImprovement, FirstFeasible) for part in parts]
    return (
        tuple(part for part, known in zip(parts, ours, strict=True) if known),
        tuple(part for part, known in zip(parts, ours, strict=True) if not known),
    )


def _parts(criterion: Criterion) -> Iterator[Criterion]:
    """The criteria that `AnyOf` joins, however nested."""
    if isinstance(criterion, AnyOf):
        for part in criterion.criteria:
            yield from _parts(part)
    else:
        yield criterion


__all__ = ["AnyOf", "FirstFeasible", "Gap", "NoImprovement"]
