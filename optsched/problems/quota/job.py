"""One job of a quota plan: how many GPUs it may get, and what each number is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import shortened
from optsched.io.values import integer, label, number, one_of

LOCALITIES: Final = ("any", "single", "whole")

MOST_GPUS: Final = 10**7
"""Of one job; a plan may have `optsched.problems.quota.problem.MOST_GPUS`."""

MOST_WORK: Final = 2**53

Numbers: TypeAlias = "tuple[float, ...]"


@dataclass(frozen=True, repr=False)
class QuotaJob:
    """What one job may get. Fields of a heterogeneous plan may be mappings from type to value.

    Parameters
    ----------
    name
        Distinct within a plan.
    sizes
        Allowed numbers of GPUs, ascending; or give bounds instead.
    minimum, maximum
        All numbers between them are allowed; the default is 1 to the budget of the plan (or to
        the end of `utility` or `rates`).
    utility
        What each allowed size is worth, any finite numbers; objectives ``"sum"`` and
        ``"max_min"`` (there the number of GPUs itself if it is left out).
    idle
        Utility of no GPU at all.
    score
        Share asked for under ``"proportional"``, >= 0; below about 2^-32 of the
        largest it counts as 0.
    work
        Remaining work under ``"makespan"``: time that it takes at rate 1.
    rates
        Work done per unit of time with each allowed size, > 0.
    speedup
        Instead of rates: an object whose ``of(gpus)`` gives them (`optsched.cluster.Amdahl`),
        or a function; needs `sizes` or `maximum`.
    weight
        w > 0: multiplies utilities (``"sum"``), divides them (``"max_min"``).
    must_run
        No GPU at all is not allowed.
    current
        Node name to GPUs held now; ties are broken for fewest moves.
    locality
        ``"any"``; ``"single"``: within one node whenever it fits an empty one; ``"whole"``: of
        several nodes all but one are held wholly.
    pass_work
        Work of one pass: with `rates` it gives the duration in schedules.

    Raises
    ------
    InputError
        A field of a wrong type or value; the message names job, field and value.
    """

    name: str
    sizes: Sequence[int] | Mapping[str, Sequence[int]] | None = None
    _: KW_ONLY
    minimum: int | Mapping[str, int] | None = None
    maximum: int | Mapping[str, int] | None = None
    utility: Sequence[float] | Mapping[str, Sequence[float]] | None = None
    idle: float = 0.0
    score: float | None = None
    work: int | None = None
    rates: Sequence[float] | Mapping[str, Sequence[float]] | None = None
    speedup: InitVar[Any] = None
    weight: float = 1.0
    must_run: bool = False
    current: Mapping[str, int] = field(default_factory=dict)
    locality: str = "any"
    pass_work: int | None = None

    def __post_init__(self, speedup: Any) -> None:
        label("job", self.name)
        if not self.name:
            raise InputError("job: expected a name, got an empty text")
        place = f"job {self.name!r}"
        if self.sizes is not None and (self.minimum is not None or self.maximum is not None):
            raise InputError(f"{place}.sizes: give sizes or bounds, not both")
        if not isinstance(self.must_run, (bool, np.bool_)):
            raise InputError(f"{place}.must_run: expected true or false, got {self.must_run!r:.60}")
        one_of(f"{place}.locality", self.locality, LOCALITIES)
        self.__dict__.update(
            {key: check(f"{place}.{key}", getattr(self, key)) for key, check in _CHECKS.items()}
        )
        self.__dict__["kinds"] = self._kinds()
        if speedup is not None:
            self.__dict__["rates"] = self._rates_of(speedup)
        self._check_lengths()
        if self.pass_work is not None and self.rates is None:
            raise InputError(f"{place}.pass_work: needs rates or a speedup")

    kinds: ClassVar[tuple[str, ...] | None]
    """Types it may run on; None: all of the plan's."""

    def allowed(self, kind: str) -> tuple[int, int | None, tuple[int, ...] | None] | None:
        """Smallest and largest size on this type, and the list if it is one.

        The largest is None if only the budget limits it; all is None where the job may not run.
        """
        if self.kinds is not None and kind not in self.kinds:
            return None
        sizes = of_kind(self.sizes, kind)
        if sizes is not None:
            return sizes[0], sizes[-1], sizes
        low, high = of_kind(self.minimum, kind), of_kind(self.maximum, kind)
        if high is None:
            table = of_kind(self.utility, kind) or of_kind(self.rates, kind)
            high = None if table is None else low + len(table) - 1
        return low, high, None

    def _kinds(self) -> tuple[str, ...] | None:
        given = {
            key: tuple(sorted(value))
            for key in ("sizes", "minimum", "maximum", "utility", "rates")
            if isinstance(value := getattr(self, key), Mapping)
        }
        if not given:
            return None
        first = next(iter(given.items()))
        for key, kinds in given.items():
            if kinds != first[1]:
                ours, theirs = shortened(list(kinds)), shortened(list(first[1]))
                raise InputError(
                    f"job {self.name!r}.{key}: names the types {ours}, but {first[0]} names "
                    f"{theirs}"
                )
        return first[1]

    def _rates_of(self, speedup: Any) -> Numbers | Mapping[str, Numbers]:
        place = f"job {self.name!r}.speedup"
        of = getattr(speedup, "of", speedup)
        if self.rates is not None:
            raise InputError(f"{place}: give rates or a speedup, not both")
        if not callable(of):
            raise InputError(f"{place}: expected an object with of(gpus), got {speedup!r:.60}")
        found: dict[str, Numbers] = {}
        for kind in self.kinds or ("",):
            low, high, sizes = self.allowed(kind) or (1, None, None)
            if high is None:
                raise InputError(f"{place}: needs sizes or a maximum")
            found[kind] = _numbers(place, _called(place, of, sizes or range(low, high + 1)))
        return MappingProxyType(found) if self.kinds is not None else found[""]

    def _check_lengths(self) -> None:
        for kind in self.kinds or ("",):
            low, high, sizes = self.allowed(kind) or (1, None, None)
            on = f" on {kind}" if kind else ""
            if high is not None and high < low:
                raise InputError(
                    f"job {self.name!r}.minimum: {low} is above the maximum {high}{on}"
                )
            expected = len(sizes) if sizes is not None else None if high is None else high - low + 1
            for key in ("utility", "rates"):
                table = of_kind(getattr(self, key), kind)
                if table is not None and len(table) != expected:
                    raise InputError(
                        f"job {self.name!r}.{key}: expected {expected} numbers, one per allowed "
                        f"size{on}, got {len(table)}"
                    )
                if key == "rates" and table is not None and min(table) <= 0:
                    raise InputError(
                        f"job {self.name!r}.rates: expected numbers > 0, got {min(table)}{on}"
                    )

    def given(self) -> dict[str, Any]:
        """The fields in plain types: ``QuotaJob(**job.given())`` is the same job."""
        found = {
            one.name: dict(value) if isinstance(value, Mapping) else value
            for one in fields(self)
            for value in [getattr(self, one.name)]
        }
        if self.sizes is not None:
            del found["minimum"]
        return found

    def __hash__(self) -> int:
        return hash((self.name, self.sizes if isinstance(self.sizes, tuple) else None))

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.given(),)

    def __repr__(self) -> str:
        return f"<QuotaJob {self.name!r}>"


def _made(given: dict[str, Any]) -> QuotaJob:
    return QuotaJob(**given)


def of_kind(given: Any, kind: str) -> Any:
    """The value for one type, of a value for all or a mapping."""
    return given.get(kind) if isinstance(given, Mapping) else given


def _finite(place: str, given: Any) -> float:
    try:
        return number(place, given, -math.inf)
    except InputError:
        raise InputError(f"{place}: expected a finite number, got {given!r:.60}") from None


def _list(place: str, given: Any, what: str) -> Sequence[Any]:
    if isinstance(given, np.ndarray) and given.ndim == 1:
        given = given.tolist()
    if not isinstance(given, (list, tuple, range)):
        raise InputError(f"{place}: expected a list of {what}s, got {given!r:.60}")
    if not given:
        raise InputError(f"{place}: expected at least one {what}, got an empty list")
    return given


def _numbers(place: str, given: Any) -> Numbers:
    """A table of finite numbers, at least one."""
    given = _list(place, given, "number")
    if {type(v) for v in given} <= {int, float}:  # all at once is ten times as fast
        try:
            found = tuple(map(float, given))
        except OverflowError:
            found = ()
        if found and math.isfinite(sum(map(abs, found))):
            return found
    return tuple(_finite(f"{place}[{i}]", value) for i, value in enumerate(given))


def _each(place: str, given: Any, check: Callable[[str, Any], Any]) -> Any:
    """Check one value, or one per type."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return check(place, given)
    if not given:
        raise InputError(f"{place}: expected at least one type, got an empty mapping")
    return MappingProxyType({
        label(f"{place} type", kind): check(f"{place}[{kind!r}]", value)
        for kind, value in given.items()
    })  # fmt: skip


def _called(place: str, of: Callable[[int], Any], sizes: Sequence[int]) -> list[Any]:
    """What a user's function gives for each size; whatever it raises is an `InputError`."""
    found = []
    for gpus in sizes:
        try:
            found.append(of(gpus))
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(f"{place}: the function fails for {gpus} GPUs, {what:.200}") from error
    return found


def _sizes(place: str, given: Any) -> tuple[int, ...]:
    rows = enumerate(_list(place, given, "size"))
    sizes = tuple(integer(f"{place}[{i}]", value, 1, MOST_GPUS) for i, value in rows)
    for last, size in pairwise(sizes):
        if size <= last:
            raise InputError(f"{place}: expected ascending sizes, got {size} after {last}")
    return sizes


def _gpus(place: str, given: Any) -> int:
    return integer(place, given, 1, MOST_GPUS)


def _current(place: str, given: Any) -> Mapping[str, int]:
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"{place}: expected a mapping node -> GPUs, got {given!r:.60}")
    held = (given or {}).items()
    return MappingProxyType(
        {label(place, node): _gpus(f"{place}[{node!r}]", gpus) for node, gpus in held}
    )


_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "sizes": lambda place, given: _each(place, given, _sizes),
    "minimum": lambda place, given: _each(place, 1 if given is None else given, _gpus),
    "maximum": lambda place, given: _each(place, given, _gpus),
    "utility": lambda place, given: _each(place, given, _numbers),
    "idle": _finite,
    "score": lambda place, given: None if given is None else number(place, given),
    "work": lambda place, given: None if given is None else integer(place, given, 0, MOST_WORK),
    "rates": lambda place, given: _each(place, given, _numbers),
    "weight": lambda place, given: number(place, given, above=True),
    "must_run": lambda _, given: bool(given),
    "current": _current,
    "pass_work": lambda place, given: None if given is None
    else integer(place, given, 1, MOST_WORK),
}  # fmt: skip
"""What each field must be, and becomes."""


__all__ = ["LOCALITIES", "MOST_GPUS", "QuotaJob", "of_kind"]
