"""Collectives as programs of nccl-tests name, print and rate them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, TypeAlias

from optsched.bandwidth.models.model import OPERATIONS
from optsched.errors import InputError

Rates: TypeAlias = tuple[float, float]
"""Algorithm and bus bandwidth of a row."""

Columns: TypeAlias = tuple[str, str]
"""Columns redop and root of a row; empty if it has none."""

_NAME = re.compile(
    r"(?<![A-Za-z0-9_])(?:[nr]ccl[_-])?(all_reduce|all_gather|reduce_scatter|all_?to_?allv?|"
    r"broadcast|reduce|sendrecv|gather|scatter|hypercube)_perf(?![A-Za-z])"
)
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")


class _Program(NamedTuple):
    op: str
    """The collective; empty if it is not supported."""
    reduces: bool
    rooted: bool
    scale: int
    """Bus over algorithm bandwidth is this times (n - 1)/n for n ranks; 0: it is 1."""

    def factor(self, ranks: int) -> float:
        return self.scale * (ranks - 1) / ranks if self.scale else 1.0


_PROGRAMS: Final = {
    "all_reduce": _Program("all_reduce", True, False, 2),
    "all_gather": _Program("all_gather", False, False, 1),
    "reduce_scatter": _Program("reduce_scatter", True, False, 1),
    "alltoall": _Program("all_to_all", False, False, 1),
    "broadcast": _Program("broadcast", False, True, 0),
    "reduce": _Program("reduce", True, True, 0),
    "sendrecv": _Program("", True, False, 0),
    "gather": _Program("", False, True, 1),
    "scatter": _Program("", False, True, 1),
    "hypercube": _Program("", False, False, 0),
    "alltoallv": _Program("", False, False, 1),
}
"""Programs of nccl-tests and rccl-tests, with the factors of doc/PERFORMANCE.md."""


def program_of(op: str) -> str:
    """The program of nccl-tests that runs a collective."""
    return next(name for name, program in _PROGRAMS.items() if program.op == op) + "_perf"


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth of a collective on so many ranks."""
    return _PROGRAMS[program_of(op).removesuffix("_perf")].factor(ranks)


def named_in(line: str, place: str) -> str | None:
    """The collective of a line that names one program of nccl-tests, else None."""
    found = {name.replace("_to_", "to") for name in _NAME.findall(line)}
    if not found and (begun := _STARTING.search(line)):
        found = {begun[1].removesuffix("_perf")}
    if len(found) != 1:  # a loop over programs names none
        return None
    (name,) = found
    if name not in _PROGRAMS or not _PROGRAMS[name].op:
        raise InputError(
            f"{place}: {name:.60}_perf is none of the collectives {', '.join(OPERATIONS)}"
        )
    return _PROGRAMS[name].op


def check_rates(rates: Rates, columns: Columns, op: str, ranks: int, place: str) -> None:
    """Refuse a row that cannot be of the collective."""
    alike, (redop, root), (algbw, busbw) = _alike(columns), columns, rates
    if op not in [_PROGRAMS[name].op for name in alike]:
        raise InputError(
            f"{place}: redop {redop:.20} and root {root:.20} are of {', '.join(alike)}, not of {op}"
        )
    if not _fits(rates, factor := bus_factor(op, ranks)):
        raise InputError(
            f"{place}: busbw is {busbw:g}, but algbw {algbw:g} of {op} on {ranks} ranks makes "
            f"{algbw * factor:.2f}: another collective, or other ranks than the {ranks} listed"
        )


def others_alike(rates: Rates, columns: Columns, op: str, ranks: int) -> list[str]:
    """Other programs that would print such a row."""
    others = [name for name in _alike(columns) if _PROGRAMS[name].op != op]
    return [name for name in others if _fits(rates, _PROGRAMS[name].factor(ranks))]


def _alike(columns: Columns) -> list[str]:
    """Programs with such columns."""
    redop, root = columns
    seen = redop not in ("none", ""), root not in ("-1", "")
    return [
        name for name, one in _PROGRAMS.items() if not root or (one.reduces, one.rooted) == seen
    ]


def _fits(rates: Rates, factor: float) -> bool:
    """Whether rates, rounded to two decimals or four digits, have this quotient."""
    bus = rates[0] * factor
    return abs(rates[1] - bus) <= 0.01 * (1 + factor) + 0.001 * bus
