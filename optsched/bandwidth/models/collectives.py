"""Collectives as programs of nccl-tests name, print and rate them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.bandwidth.models.model import OPERATIONS
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    Rates = tuple[float, float]
    """Algorithm and bus bandwidth of a row."""

    Columns = tuple[str, str]
    """Columns redop and root of a row; empty if it has none."""

_WORD = re.compile(
    r"(?<![A-Za-z0-9_])(?:[nr]ccl[_-])?(all_reduce|all_gather|reduce_scatter|all_?to_?allv?|"
    r"broadcast|reduce|sendrecv|gather|scatter|hypercube)_perf(?![A-Za-z])"
)
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")


class _Program(NamedTuple):
    """The collective of a program, empty if it is not supported, and what its rows hold."""

    op: str
    reduces: bool
    rooted: bool
    factor: Callable[[int], float]


def _whole(_: int) -> float:
    return 1.0


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks


_PROGRAMS: Final = {
    "all_reduce": _Program("all_reduce", True, False, lambda n: 2 * _part(n)),
    "all_gather": _Program("all_gather", False, False, _part),
    "reduce_scatter": _Program("reduce_scatter", True, False, _part),
    "alltoall": _Program("all_to_all", False, False, _part),
    "broadcast": _Program("broadcast", False, True, _whole),
    "reduce": _Program("reduce", True, True, _whole),
    "sendrecv": _Program("", True, False, _whole),
    "gather": _Program("", False, True, _part),
    "scatter": _Program("", False, True, _part),
    "hypercube": _Program("", False, False, _whole),
    "alltoallv": _Program("", False, False, _part),
}
"""Programs of nccl-tests and rccl-tests, with the factors of doc/PERFORMANCE.md."""


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth of a collective on so many ranks."""
    return next(one for one in _PROGRAMS.values() if one.op == op).factor(ranks)


def named_in(line: str, place: str) -> str | None:
    """The collective of a line that names one program of nccl-tests, else None.

    Raises
    ------
    InputError
        A program of no supported collective.
    """
    found = {word.replace("_to_", "to") for word in _WORD.findall(line)}
    if not found and (begun := _STARTING.search(line)):
        found = {begun[1].removesuffix("_perf")}
    if len(found) != 1:  # a loop over programs names none
        return None
    (word,) = found
    if word not in _PROGRAMS or not _PROGRAMS[word].op:
        raise InputError(
            f"{place}: {word:.60}_perf is none of the collectives {', '.join(OPERATIONS)}"
        )
    return _PROGRAMS[word].op


def check_rates(rates: Rates, columns: Columns, op: str, ranks: int, place: str) -> None:
    """Refuse a row that cannot be of the collective."""
    if op not in (alike := _alike(columns)).values():
        raise InputError(
            f"{place}: redop {columns[0]:.20} and root {columns[1]:.20} are of "
            f"{', '.join(alike)}, not of {op}"
        )
    if not _fits(rates, factor := bus_factor(op, ranks)):
        raise InputError(
            f"{place}: busbw is {rates[1]:g}, but algbw {rates[0]:g} of {op} on {ranks} ranks "
            f"makes {rates[0] * factor:.2f}: another collective, or other ranks than the {ranks} "
            "listed"
        )


def others_alike(rates: Rates, columns: Columns, op: str, ranks: int) -> list[str]:
    """Other programs that would print such a row."""
    alike = _alike(columns)
    return [
        word for word in alike if alike[word] != op and _fits(rates, _PROGRAMS[word].factor(ranks))
    ]


def _alike(columns: Columns) -> dict[str, str]:
    """Programs with such columns, and their collectives."""
    redop, root = columns
    held = redop not in ("none", ""), root not in ("-1", "")
    return {
        word: one.op for word, one in _PROGRAMS.items()
        if not root or (one.reduces, one.rooted) == held
    }  # fmt: skip


def _fits(rates: Rates, factor: float) -> bool:
    """Whether rates, rounded to two decimals or four digits, have this quotient."""
    wanted = rates[0] * factor
    return abs(rates[1] - wanted) <= 0.01 * (1 + factor) + 0.001 * wanted
