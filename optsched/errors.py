"""Every exception a caller may want to catch."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class OptschedError(Exception):
    """Base of all errors raised on purpose by optsched."""


class InputError(OptschedError, ValueError):
    """A document, a file or an argument is wrong; the message names the place and the value."""


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
    """An optional dependency is not installed; the message says which ``pip install`` to type."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f'{what} needs an optional dependency: pip install "optsched[{extra}]"')
        self.extra = extra


class InternalError(OptschedError):
    """Two proofs contradict each other: a bug in a solver, never the caller's fault.

    If a bound and a schedule do, ``witnesses`` holds both; see `optsched.Monitor.bound`.
    """

    witnesses: Mapping[str, object] = MappingProxyType({})
