"""`rocm-smi --showtopo`: how the AMD GPUs of a host are joined, and their NUMA nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TITLE = re.compile(r"=+ (Weight|Hops|Link Type|Numa)\b.*")
_NUMA = re.compile(r"\s*GPU ?\[?(\d{1,3})\]?\s*:\s*\(Topology\) Numa Node:\s*(-?\d{1,4})")

XGMI: Final = ("NV2", "NV1")
"""XGMI over one hop, and over more: stand-ins of 40 and 20 GB/s until something is measured."""


def recognises(text: str) -> bool:
    """Whether the text is of `rocm-smi`."""
    return "Link Type between two GPUs" in text


def as_nvidia(text: str, file: str) -> str:
    """The table of links as `nvidia-smi topo -m` writes it, in the same lines of the file.

    XGMI stands as ``NV2`` over one hop and ``NV1`` over more; PCIe over two hops (one bridge of
    the CPU) as ``PHB``, over more as ``SYS``. What is no link stays, to be refused.

    Raises
    ------
    InputError
        With ``file:line``, row and column: no number of hops for a link.
    """
    lines, title = text.splitlines(), ""
    tables: dict[str, dict[str, list[str]]] = {"Hops": {}, "Link Type": {}}
    place: dict[str, int] = {}
    for at, line in enumerate(lines):
        words = line.split()
        if found := _TITLE.match(line.strip()):
            title = found[1]
        elif title in tables and words and words[0].startswith("GPU"):
            head = words[1:2] == [] or words[1].startswith("GPU")
            tables[title].setdefault("" if head else words[0], words if head else words[1:])
            place |= {"" if head else words[0]: at} if title == "Link Type" else {}
    nodes = {f"GPU{found[1]}": found[2] for line in lines if (found := _NUMA.match(line))}
    columns = tables["Link Type"].get("", [])
    written = [""] * len(lines)
    for row, at in place.items():
        if not row:
            written[at] = "\t" + "\t".join([*columns, "NUMA Affinity"])
            continue
        cells = tables["Link Type"][row]
        hops = dict(zip(columns, tables["Hops"].get(row, ()), strict=False))
        ways = [
            "X" if column == row else _way(cell, hops, column, f"{file}:{at + 1}: row {row}")
            for column, cell in zip(columns, cells, strict=False)
        ]
        written[at] = "\t".join([row, *ways, *[nodes.get(row, "")] * (len(ways) == len(columns))])
    return "\n".join(written)


def _way(link: str, hops: Mapping[str, str], column: str, place: str) -> str:
    if link not in ("XGMI", "PCIE"):
        return link
    steps = hops.get(column, "")
    if not re.fullmatch(r"[1-9]\d?", steps):
        raise InputError(f"{place}, column {column}: expected hops 1..99, got {steps!r:.20}")
    near = int(steps) <= (1 if link == "XGMI" else 2)
    return XGMI[not near] if link == "XGMI" else "PHB" if near else "SYS"
