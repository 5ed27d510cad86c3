"""`rocm-smi --showtopo`, `amd-smi topology`: links of AMD GPUs of a host, and their NUMA nodes."""

from __future__ import annotations

import re
from typing import Final

from optsched.errors import InputError

_TITLE = re.compile(r"=* ?(weight|hops|link type|numa)\b.*(?:=|table:)", re.IGNORECASE)
_OTHER = re.compile(r"=+ .* =+|[A-Z -]+ TABLE:|Legend.*")
_GPU = re.compile(r"GPU\d{1,3}|[\da-f]{4,8}:[\da-f]{2}:[\da-f]{2}\.\d", re.IGNORECASE)
_NUMA = re.compile(r"\s*GPU ?\[?(\d{1,3})\]?\s*:\s*\(Topology\) Numa Node:\s*(-?\d{1,4})")
_JSON = re.compile(r'"\(Topology\) |"link_type"\s*:|^gpu,(bdf,)?.*(link|weight)', re.MULTILINE)

XGMI: Final = ("NV2", "NV1")
"""XGMI over one hop, and over more: stand-ins of 40 and 20 GB/s until something is measured."""

_HOP: Final = 15
"""Weight of a hop of XGMI. Hops are printed as 1 for any number, since no CPU is on the way."""

_DIRECT: Final = (13, _HOP, 41)
"""Weights of one hop: within a socket, between packages, between partitions of one GPU."""

_Table = dict[str, dict[str, str]]
"""Cell of every row and column."""


def recognises(text: str) -> bool:
    """Whether the text is output of `rocm-smi` or `amd-smi`."""
    titles = r"ROCm System Management|between two GPUs|^(WEIGHT|HOPS|LINK TYPE|ACCESS) TABLE:"
    return re.search(titles, text, re.MULTILINE) is not None or _JSON.search(text) is not None


def as_nvidia(text: str, file: str) -> str:
    """Return the table of links as `nvidia-smi topo -m` writes it, in the same lines.

    XGMI becomes ``NV2`` over one hop and ``NV1`` over more, by its weight; PCIe over two hops (one
    bridge of the CPU) ``PHB``, over more ``SYS``. Other cells are kept, to be refused.
    """
    if _JSON.search(text):
        raise InputError(
            f"{file}: expected tables: print the topology without --json and --csv (this looks "
            "like JSON or CSV of rocm-smi or amd-smi)"
        )
    lines, title = text.splitlines(), ""
    tables: dict[str, _Table] = {"weight": {}, "hops": {}, "link type": {}}
    columns: dict[str, list[str]] = {}
    place: dict[str, int] = {}
    for at, line in enumerate(lines):
        cells = line.split()
        if found := _TITLE.match(line.strip()):
            title = found[1].lower()
            if tables.get(title):
                raise InputError(f"{file}:{at + 1}: the table of {title} is there twice")
        elif _OTHER.fullmatch(line.strip()):
            title = ""
        elif title in tables and cells and _GPU.fullmatch(cells[0]):
            if title not in columns:
                columns[title] = cells
                place |= {"": at} if title == "link type" else {}
            else:
                tables[title][cells[0]] = dict(zip(columns[title], cells[1:], strict=False))
                place |= {cells[0]: at} if title == "link type" else {}
    if not place:
        raise InputError(
            f"{file}: has no table of link types: expected all of `rocm-smi --showtopo` or "
            "`amd-smi topology`"
        )
    names = {gpu: f"GPU{i}" for i, gpu in enumerate(columns["link type"]) if ":" in gpu}
    nodes = {f"GPU{found[1]}": found[2] for line in lines if (found := _NUMA.match(line))}
    written = [""] * len(lines)
    for row, at in place.items():
        if not row:
            heads = [names.get(gpu, gpu) for gpu in columns["link type"]]
            written[at] = "\t" + "\t".join([*heads, "NUMA Affinity"])
            continue
        links = [
            "X" if column == row else _link(tables, row, column, f"{file}:{at + 1}: row {row}")
            for column in tables["link type"][row]
        ]
        end = [nodes.get(row, "")] * (len(links) == len(columns["link type"]))
        written[at] = "\t".join([names.get(row, row), *links, *end])
    return "\n".join(written)


def _link(tables: dict[str, _Table], row: str, column: str, place: str) -> str:
    link = tables["link type"][row][column]
    if link not in ("XGMI", "PCIE"):
        return link
    key = "weight" if link == "XGMI" else "hops"
    got = tables[key].get(row, {}).get(column, "")
    count = int(got) if re.fullmatch(r"[1-9]\d{0,3}", got) else 0
    if link == "PCIE" and 0 < count < 100:
        return "PHB" if count <= 2 else "SYS"
    if link == "XGMI" and (count in _DIRECT or (count and count % _HOP == 0)):
        steps = tables["hops"].get(row, {}).get(column, "1")
        return XGMI[count not in _DIRECT or steps != "1"]
    known = "hops 1..99" if link == "PCIE" else f"a weight of 13, 41 or {_HOP} a hop"
    lost = f" (the file has no table of {key}: print all of them)" * (not tables[key])
    raise InputError(f"{place}, column {column}: expected {known}, got {got!r:.20}{lost}")
