"""A job of a quota plan: how many GPUs it may get, and the utility of each number."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, shortened
from optsched.io.values import boolean, integer, label, listed, number, one_of

if TYPE_CHECKING:
    from collections.abc import Callable

LOCALITIES: Final = ("any", "single", "whole")
MOST_GPUS: Final = 10**7
"""Of one job; a plan may have `optsched.problems.quota.checks.MOST_GPUS`."""

Numbers: TypeAlias = "tuple[float, ...]"


@dataclass(frozen=True, repr=False)
class QuotaJob:
    """Allowed sizes of a job and their utilities.

    Fields of a heterogeneous plan may be mappings from type to value.

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
        Utility of each allowed size, any finite numbers; objectives ``"sum"`` and
        ``"max_min"`` (there the number of GPUs itself if it is left out).
    idle
        Utility of no GPU at all.
    score
        Claim to a share under ``"proportional"``, >= 0; below about 2^-32 of the largest it
        counts as 0.
    work
        Remaining work under ``"makespan"``: time that it takes at rate 1.
    rates
        Work done per unit of time with each allowed size, > 0.
    weight
        w > 0: multiplies utilities (``"sum"``), divides them (``"max_min"``).
    must_run
        No GPU at all is not allowed.
    current
        Node name to GPUs held now; of equally good placements the one with fewest moves is chosen.
    locality
        ``"any"``; ``"single"``: within one node whenever it fits an empty one; ``"whole"``: of
        several nodes all but one are held wholly.
    pass_work
        Work of one pass: with `rates` it gives the duration in schedules.

    Examples
    --------
    >>> optsched.QuotaJob("a", sizes=[1, 2, 4], utility=[1, 1.8, 3.1]).name
    'a'
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
    weight: float = 1.0
    must_run: bool = False
    current: Mapping[str, int] = field(default_factory=dict)
    locality: str = "any"
    pass_work: int | None = None

    kinds: ClassVar[tuple[str, ...] | None]
    """Types it may run on; None: all of the plan's."""

    def __post_init__(self) -> None:
        label("job", self.name)
        if not self.name:
            raise InputError("job: expected a name, got an empty text")
        place = f"job {self.name!r}"
        if self.sizes is None and self.minimum is None:
            self.__dict__["minimum"] = 1
        elif self.sizes is not None and not self.minimum is self.maximum is None:
            raise InputError(f"{place}.sizes: give sizes or bounds, not both")
        for key, check in _CHECKS.items():
            value = getattr(self, key)
            if value is not None or key not in _OPTIONAL:
                self.__dict__[key] = check(f"{place}.{key}", value)
        self.__dict__["kinds"] = self._kinds()
        for kind in self.kinds or ("",):
            self._check_lengths(kind, f" on {kind}" if kind else "")
        if self.pass_work is not None and self.rates is None:
            raise InputError(f"{place}.pass_work: needs rates")

    def allowed(self, kind: str, budget: int = MOST_GPUS) -> Sequence[int]:
        """Return the allowed numbers of GPUs of this type within a budget, ascending."""
        if self.kinds is not None and kind not in self.kinds:
            return ()
        sizes: tuple[int, ...] | None = of_kind(self.sizes, kind)
        if sizes is not None:
            return sizes[: bisect_right(sizes, budget)]
        low, high = of_kind(self.minimum, kind), of_kind(self.maximum, kind)
        if high is None:
            table = of_kind(self.utility, kind) or of_kind(self.rates, kind)
            high = budget if table is None else low + len(table) - 1
        return range(low, min(high, budget) + 1)

    def _kinds(self) -> tuple[str, ...] | None:
        """Return the types that all mappings name."""
        first = ""
        for key in PER_TYPE:
            if isinstance(value := getattr(self, key), Mapping):
                kinds, first = sorted(value), first or key
                if kinds != (known := sorted(getattr(self, first))):
                    raise InputError(
                        f"job {self.name!r}.{key}: names the types {shortened(kinds)}, but "
                        f"{first} names {shortened(known)}"
                    )
        return tuple(sorted(getattr(self, first))) if first else None

    def _check_lengths(self, kind: str, on: str) -> None:
        sizes = self.allowed(kind)
        if not sizes:
            low, high = of_kind(self.minimum, kind), of_kind(self.maximum, kind)
            raise InputError(f"job {self.name!r}.minimum: {low} is above the maximum {high}{on}")
        for key in ("utility", "rates"):
            table = of_kind(getattr(self, key), kind)
            if table is not None and len(table) != len(sizes):
                raise InputError(
                    f"job {self.name!r}.{key}: expected {len(sizes)} numbers, one per allowed "
                    f"size{on}, got {len(table)}"
                )

    def given(self) -> dict[str, Any]:
        """Return the arguments of an equal job that are not at their default."""
        found = {}
        for key, default in DEFAULTS.items():
            value = getattr(self, key)
            value = dict(value) if isinstance(value, Mapping) else value
            if value not in (None, {}, default) and (key, value) != ("minimum", 1):
                found[key] = value
        return found

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(QuotaJob, **self.given()), ()

    def __repr__(self) -> str:
        return f"<QuotaJob {self.name!r}>"


def of_kind(given: Any, kind: str) -> Any:
    """Return the value for one type, of a value for all or a mapping."""
    return given.get(kind) if isinstance(given, Mapping) else given


def _list(place: str, given: Any, what: str) -> list[Any]:
    found = listed(place, given, f"a list of {what}s")
    if not found:
        raise InputError(f"{place}: expected at least one {what}, got an empty list")
    return found


def _sizes(place: str, given: Any) -> tuple[int, ...]:
    rows = enumerate(_list(place, given, "size"))
    sizes = tuple(_gpus(f"{place}[{i}]", value) for i, value in rows)
    for last, size in pairwise(sizes):
        if size <= last:
            raise InputError(f"{place}: expected ascending sizes, got {size} after {last}")
    return sizes


def _numbers(place: str, given: Any) -> Numbers:
    given = _list(place, given, "number")
    if all(type(v) in (int, float) and abs(v) <= MAX_INTEGER for v in given):
        return tuple(map(float, given))  # ten times as fast as one by one
    return tuple(_finite(f"{place}[{i}]", value) for i, value in enumerate(given))


def _rates(place: str, given: Any) -> Numbers:
    found = _numbers(place, given)
    if min(found) <= 0:
        raise InputError(f"{place}: expected numbers > 0, got {min(found)}")
    return found


def _per_type(check: Callable[[str, Any], Any], place: str, given: Any) -> Any:
    """Check one value, or one per type."""
    if not isinstance(given, Mapping):
        return check(place, given)
    if not given:
        raise InputError(f"{place}: expected at least one type, got an empty mapping")
    return MappingProxyType({
        label(f"{place} type", kind): check(f"{place}[{kind!r}]", value)
        for kind, value in given.items()
    })  # fmt: skip


def _current(place: str, given: Any) -> Mapping[str, int]:
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise InputError(f"{place}: expected a mapping node -> GPUs, got {given!r:.60}")
    return MappingProxyType(
        {label(place, node): _gpus(f"{place}[{node!r}]", gpus) for node, gpus in given.items()}
    )


_finite = partial(number, least=-math.inf)
_gpus = partial(integer, least=1, most=MOST_GPUS)

PER_TYPE: Final[dict[str, Callable[[str, Any], Any]]] = {
    "sizes": _sizes, "minimum": _gpus, "maximum": _gpus, "utility": _numbers, "rates": _rates,
}  # fmt: skip
"""Fields that may differ by type."""

_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    **{key: partial(_per_type, check) for key, check in PER_TYPE.items()},
    "idle": _finite, "score": number, "work": integer, "weight": partial(number, above=True),
    "must_run": boolean, "current": _current, "locality": partial(one_of, choices=LOCALITIES),
    "pass_work": partial(integer, least=1, most=MAX_INTEGER),
}  # fmt: skip

DEFAULTS: Final[dict[str, Any]] = {
    one.name: None if one.default is MISSING else one.default for one in fields(QuotaJob)
}
"""All fields that a document may hold; a minimum left out is 1."""

_OPTIONAL: Final = {key for key in _CHECKS if DEFAULTS[key] is None} - {"current"}
