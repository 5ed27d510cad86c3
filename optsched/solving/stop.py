"""When to stop: tiny criteria on the `Progress` of a search, joined by `AnyOf`.

``optsched.solve(problem, stop=stop.AnyOf(stop.Gap(0.01), stop.NoImprovement(seconds=5)))``. Any
function of a `Progress` that returns true to stop will do as well. The criteria here are values
without state: one may serve several searches at once.
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
class Time:
    """Stop after so many seconds since the call; the same as ``time_limit``."""

    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", number("Time: seconds", self.seconds))

    def __call__(self, progress: Progress) -> bool:
        """Whether the time is over."""
        return progress.elapsed >= self.seconds


@dataclass(frozen=True)
class Iterations:
    """Stop after so many steps of the solver; the same as ``iterations``, and as reproducible."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", integer("Iterations: count", self.count))

    def __call__(self, progress: Progress) -> bool:
        """Whether the steps are done."""
        return progress.iteration >= self.count


@dataclass(frozen=True)
class Target:
    """Stop at the first schedule whose objective is at most this; the same as ``target``."""

    objective: int

    def __post_init__(self) -> None:
        value = integer("Target: objective", self.objective, -(2**53), 2**53)
        object.__setattr__(self, "objective", value)

    def __call__(self, progress: Progress) -> bool:
        """Whether the schedule is good enough."""
        return progress.objective is not None and progress.objective <= self.objective


@dataclass(frozen=True)
class Gap:
    """Stop as soon as ``objective / lower_bound - 1`` is at most this: 0.01 is one percent."""

    relative: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "relative", number("Gap: relative", self.relative))

    def __call__(self, progress: Progress) -> bool:
        """Whether the proved gap is small enough."""
        return progress.gap is not None and progress.gap <= self.relative


@dataclass(frozen=True)
class NoImprovement:
    """Stop after so many steps, or seconds, since the last better schedule.

    Nothing is counted before the first schedule. Steps are what the solver reports while it works
    (`optsched.Monitor.advance`), slice by slice, so the search may go on for a slice; a solver that
    reports none never stops by them.

    Parameters
    ----------
    iterations
        Steps of the solver, as in `Iterations`.
    seconds
        Seconds; exactly one of the two.
    """

    iterations: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.iterations is None) == (self.seconds is None):
            raise InputError("NoImprovement: expected either iterations or seconds")
        if self.iterations is not None:
            object.__setattr__(
                self, "iterations", integer("NoImprovement: iterations", self.iterations)
            )
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
    """Stop at the first schedule."""

    def __call__(self, progress: Progress) -> bool:
        """Whether there is a schedule."""
        return progress.objective is not None


@dataclass(frozen=True, init=False)
class AnyOf:
    """Stop as soon as one of several criteria says so."""

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
    """Refuse what cannot be asked, such as a number or a class that was not instantiated."""
    if isinstance(criterion, type) or not callable(criterion):
        what = "a class" if isinstance(criterion, type) else repr(criterion)
        raise InputError(
            f"{name}: expected a criterion such as optsched.stop.Gap(0.01), or a function of a "
            f"Progress, got {what:.60}"
        )


def parts(criterion: Criterion) -> Iterator[Criterion]:
    """The criteria of which any one stops the search: what `AnyOf` joins, however nested."""
    if isinstance(criterion, AnyOf):
        for part in criterion.criteria:
            yield from parts(part)
    else:
        yield criterion


def split(criterion: Criterion) -> tuple[tuple[Criterion, ...], tuple[Criterion, ...]]:
    """What to ask while a search runs: ours, which any thread may call, and the user's own.

    `Time`, `Iterations` and `Target` are left out: `Limits` holds them as numbers.
    """
    asked = [c for c in parts(criterion) if type(c) not in (Time, Iterations, Target)]
    ours = (Gap, NoImprovement, FirstFeasible)
    return (
        tuple(c for c in asked if type(c) in ours),
        tuple(c for c in asked if type(c) not in ours),
    )


__all__ = ["AnyOf", "FirstFeasible", "Gap", "Iterations", "NoImprovement", "Target", "Time"]
