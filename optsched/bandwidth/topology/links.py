"""How two GPUs of a host are joined, in the words of `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

SELF: Final = "X"
PCIE: Final = ("SYS", "NODE", "PHB", "PXB", "PIX")
"""Ways over PCIe, from the slowest: between sockets to one switch."""

_NVLINK = re.compile(r"NV([1-9]\d?)")

RATES: Final = {"SYS": 10.0, "NODE": 15.0, "PHB": 15.0, "PXB": 20.0, "PIX": 20.0}
NVLINK_RATE: Final = 20.0
"""GB/s of one NVLink, and of the ways over PCIe: stand-ins where nothing is measured."""


def nvlinks(link: str) -> int:
    """Number of NVLinks that join two GPUs; 0 for PCIe."""
    match = _NVLINK.fullmatch(link)
    return int(match[1]) if match else 0


def is_link(text: Any) -> bool:
    """Whether the text names a way between two different GPUs."""
    return isinstance(text, str) and (text in PCIE or _NVLINK.fullmatch(text) is not None)


def weight(link: str) -> int:
    """Rank of a way: the higher, the nearer; NVLinks above all of PCIe."""
    return len(PCIE) + nvlinks(link) if nvlinks(link) else 1 + PCIE.index(link)


def link_rate(link: str) -> float:
    """Stand-in for an unmeasured bandwidth in GB/s."""
    return NVLINK_RATE * nvlinks(link) if nvlinks(link) else RATES[link]


def check_links(place: str, given: Sequence[Sequence[str]], n: int) -> tuple[tuple[str, ...], ...]:
    """A symmetric matrix of known ways."""
    rows = tuple(tuple(row) for row in given)
    if len(rows) != n or any(len(row) != n for row in rows):
        raise InputError(f"{place}: expected {n} rows of {n} links")
    for i, row in enumerate(rows):
        for k, link in enumerate(row):
            if i == k:
                if link != SELF:
                    raise InputError(f"{place}[{i}][{k}]: expected X, got {link!r:.20}")
            elif not is_link(link):
                known = f"{', '.join(PCIE)}, NV1..NV99"
                raise InputError(f"{place}[{i}][{k}]: expected one of {known}, got {link!r:.20}")
            elif rows[k][i] != link:
                raise InputError(
                    f"{place}[{i}][{k}]: {link}, but [{k}][{i}] is {rows[k][i]!r:.20}: "
                    "links have no direction"
                )
    return rows
