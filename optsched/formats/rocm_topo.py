"""`rocm-smi --showtopo`: how the AMD GPUs of a host are joined, and their NUMA nodes."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.topology.cluster import MOST_PER_HOST, HostType
from optsched.errors import InputError
from optsched.io.values import is_integer

if TYPE_CHECKING:
    from collections.abc import Sequence

_TITLE = re.compile(r"=+ (Weight|Hops|Link Type|Numa)\b.*")
_ROW = re.compile(r"GPU(\d{1,3})((?:\s+\S+)+)")
_NUMA = re.compile(r"GPU ?\[?(\d{1,3})\]?\s*:\s*\(Topology\) Numa Node:\s*(-?\d{1,4})")

_XGMI: Final = ("NV2", "NV1")
"""XGMI over one hop, and over more: stand-ins of 40 and 20 GB/s until something is measured."""


def recognises(text: str) -> bool:
    """Whether the text is of `rocm-smi`."""
    return "Link Type between two GPUs" in text


def from_text(
    text: str,
    name: str,
    file: str = "topology",
    nics: int | Sequence[str] | None = None,
    nic_rate: float = 50.0,
) -> HostType:
    """A host type from the tables of `rocm-smi --showtopo`.

    XGMI stands as ``NV2`` over one hop and ``NV1`` over more; PCIe over two hops (one bridge of
    the CPU) as ``PHB``, over more as ``SYS``.

    Parameters
    ----------
    text
        The output; what stands before and after the tables is passed over.
    name, file
        Name of the type, and of the file for messages.
    nics, nic_rate
        Network cards a host, which `rocm-smi` does not list (by default 1, with a warning), and
        GB/s of each.

    Raises
    ------
    InputError
        With ``file:line``: a table without GPUs, a row that is cut off, an unknown link, or two
        cells of one pair that differ.
    """
    links, hops = (_table(text, title, file) for title in ("Link Type", "Hops"))
    n = len(links)
    node = {int(found[1]): found[2] for found in _NUMA.finditer(text)}
    if hops and len(hops) != n:
        raise InputError(f"{file}: {n} GPUs have a link type, {len(hops)} have hops (cut off?)")
    rows = [["X"] * n for _ in range(n)]
    for i, (line, cells) in enumerate(links):
        for k, link in enumerate(cells):
            place = f"{file}:{line}: row GPU{i}, column GPU{k}"
            if i == k:
                continue
            if link not in ("XGMI", "PCIE"):
                raise InputError(f"{place}: expected XGMI or PCIE, got {link!r:.20}")
            far = node.get(i) != node.get(k)
            steps = hops[i][1][k] if hops else "1" if link == "XGMI" else "3" if far else "2"
            if not steps.isdecimal() or not 0 < int(steps) < 100:
                where = f"{file}:{hops[i][0]}: row GPU{i}, column GPU{k}"
                raise InputError(f"{where}: expected hops, got {steps!r:.20}")
            near = int(steps) <= (1 if link == "XGMI" else 2)
            rows[i][k] = _XGMI[not near] if link == "XGMI" else "PHB" if near else "SYS"
            if k < i and rows[k][i] != rows[i][k]:
                raise InputError(
                    f"{place}: {link} over {steps} hops, the other way is another: links have no "
                    "direction"
                )
    groups: dict[str, list[int]] = {}
    for i in range(n):
        groups.setdefault(node.get(i, "-1"), []).append(i)
    numa = () if "-1" in groups else tuple(map(tuple, groups.values()))
    if nics is None:
        warnings.warn(
            f"{file}: rocm-smi lists no network cards: 1 is taken (nics=, --nics)", stacklevel=2
        )
    elif not is_integer(nics):
        raise InputError(f"nics: rocm-smi names no cards: give their number, got {nics!r:.60}")
    return HostType(name, n, tuple(map(tuple, rows)), numa, 1 if nics is None else nics, nic_rate)  # type: ignore[arg-type]


def _table(text: str, title: str, file: str) -> list[tuple[int, list[str]]]:
    """Line and cells of every row below a title."""
    found: list[tuple[int, list[str]]] = []
    inside = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("=="):
            head = _TITLE.fullmatch(line)
            inside = head is not None and head[1] == title
        elif inside and (row := _ROW.fullmatch(line)) and not row[2].split()[0].startswith("GPU"):
            if int(row[1]) != len(found) or len(found) == MOST_PER_HOST:
                raise InputError(f"{file}:{number}: expected the row of GPU{len(found)}")
            found.append((number, row[2].split()))
    for i, (number, cells) in enumerate(found):
        if len(cells) != len(found):
            raise InputError(
                f"{file}:{number}: row GPU{i} has {len(cells)} cells, there are {len(found)} rows "
                "(cut off?)"
            )
    if not found and title == "Link Type":
        raise InputError(f"{file}: expected the output of rocm-smi --showtopo (a table Link Type)")
    return found
