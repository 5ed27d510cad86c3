"""Every exception a caller may want to catch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class OptschedError(Exception):
    """Base of all errors raised on purpose by optsched."""


class InputError(OptschedError, ValueError):
    """A document, a file or an argument is wrong; the message names the place and the value."""


class Infeasible(OptschedError):
    """What is asked cannot be had, such as more GPUs than are free; the input is in order."""


class CyclicOrder(InputError):
    """The chosen orders contradict the arcs, or the arcs each other.

    Parameters
    ----------
    message
        The cycle in words.
    cycle
        Operation ids on one cycle, in order; each must precede the next, the last the first.
    """

    def __init__(self, message: str, cycle: Sequence[int]) -> None:
        super().__init__(message)
        self.cycle = tuple(int(i) for i in cycle)


class UnsupportedProblem(OptschedError):
    """The chosen solver cannot solve this problem; the message names those that can."""


class MissingExtra(OptschedError, ImportError):
    """An optional dependency is not installed; the message gives the command."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f'{what} needs the extra {extra}: pip install ".[{extra}]" in a checkout of optsched'
        )
        self.extra = extra


class InternalError(OptschedError):
    """What a solver returned is wrong: a bug, never the caller's fault."""
