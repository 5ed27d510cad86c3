"""`nvidia-smi topo -m`: links between the GPUs of a host, NUMA groups, network cards.

`rocm-smi --showtopo` is read too, as `optsched.formats.rocm_topo` translates it.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, Final

from optsched.bandwidth.topology.cluster import MOST_PER_HOST, HostType
from optsched.bandwidth.topology.foreign import without_escapes
from optsched.bandwidth.topology.links import PCIE, SELF, is_link, nvlinks
from optsched.errors import InputError
from optsched.formats import rocm_topo
from optsched.formats.registry import looks_like
from optsched.io.values import is_integer

if TYPE_CHECKING:
    from collections.abc import Sequence

_GPU = re.compile(r"GPU(\d{1,3})")
_AFFINITY: Final = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_LEGEND = re.compile(r"(NIC\d{1,3}):\s*(\S+)")
_OLD: Final = {"SOC": "SYS"}
"""Names of older drivers."""

_PEERS: Final = ("OK", "CNS", "GNS", "TNS", "NS", "U", "DR")
"""Cells of `nvidia-smi topo -p2p`."""

_SPANS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def from_text(
    text: str,
    name: str,
    file: str = "topology",
    nics: int | Sequence[str] | None = None,
    nic_rate: float | None = None,
) -> HostType:
    """Read a host type from `nvidia-smi topo -m`, its matrix alone, or `rocm-smi`.

    Text before the header line and from the legend on is passed over.

    Parameters
    ----------
    nics
        Network cards a host: their number, or their names (``NIC0``, or ``mlx5_0`` of the
        legend). By default those that share a PCIe switch with a GPU (``PIX``, ``PXB``), or all
        if none does; of devices that are ``PIX`` to each other, but to no GPU, the first (they
        are ports of one card). A warning names what was left out. 1 where there are none.
    nic_rate
        GB/s of a card, of all its ports: of both if they are bonded.
    """
    if amd := rocm_topo.recognises(text):
        text = rocm_topo.as_nvidia(text, file)
    lines = without_escapes(text).splitlines()
    start, devices, affinities = _header(lines, file)
    gpus = [device for device in devices if _GPU.fullmatch(device)]
    if gpus != [f"GPU{i}" for i in range(len(gpus))] or len(gpus) > MOST_PER_HOST:
        raise InputError(
            f"{file}:{start + 1}: expected columns GPU0, GPU1, ... in order, "
            f"got {', '.join(gpus)[:60]}"
        )
    rows = _rows(lines, start, devices, file)
    for gpu in gpus:
        if gpu not in rows:
            raise InputError(f"{file}: the row of {gpu} is missing (cut off?)")
    cells = {row: _cells(line, row, devices, f"{file}:{at}") for row, (at, line) in rows.items()}
    for row, line in cells.items():
        for column, link in zip(devices, line, strict=True):
            if column in cells and cells[column][devices.index(row)] != link:
                raise InputError(
                    f"{file}:{rows[row][0]}: row {row}, column {column}: {link}, but row {column}, "
                    f"column {row} is {cells[column][devices.index(row)]}: links have no direction"
                )
    if not amd and not any(nvlinks(link) for gpu in gpus[1:] for link in cells[gpu]):
        _check_legend(text, len(gpus), file)
    numa = _numa([rows[gpu][1] for gpu in gpus], len(devices), affinities)
    names = {found[1]: found[2] for line in lines if (found := _LEGEND.fullmatch(line.strip()))}
    cards = _cards(devices, cells, names, nics, file)
    links = tuple(
        tuple(cells[gpu][k] for k, device in enumerate(devices) if device in gpus) for gpu in gpus
    )
    count: Any = nics if is_integer(nics) else len(cards) or 1
    return HostType(name, len(gpus), links, numa, count, nic_rate)


def _cards(
    devices: list[str], cells: dict[str, list[str]], names: dict[str, str], given: Any, file: str
) -> list[str]:
    """Return the network cards: those given (all, by a number), or those near GPUs."""
    cards = [device for device in devices if not _GPU.fullmatch(device)]
    if is_integer(given):
        return cards
    if given is not None:
        by_name = {names.get(card, card): card for card in cards}
        chosen = [by_name.get(name, name) for name in given]
        lost = [name for name in chosen if name not in cards]
        if lost or isinstance(given, str) or len(set(chosen)) < len(chosen):
            got = given if isinstance(given, str) else ", ".join(map(str, lost or given))
            raise InputError(
                f"{file}: nics: expected a number, or names of cards, each once, among "
                f"{', '.join(by_name) or '(none)'}, got {got!r:.60}"
            )
        return chosen
    if not cards:
        warnings.warn(f"{file}: lists no network card: 1 is taken (nics=, --nics)", stacklevel=3)
    near = {card: {row[devices.index(card)] for gpu, row in cells.items() if _GPU.fullmatch(gpu)}
            for card in cards}  # fmt: skip
    kept = [card for card in cards if near[card] & {"PIX", "PXB"}] or cards
    ports = {
        card for i, card in enumerate(kept) if "PIX" not in near[card] and card in cells
        and any(cells[card][devices.index(other)] == "PIX" for other in kept[:i])
    }  # fmt: skip
    left_out = [card for card in cards if card in ports or card not in kept]
    if left_out:
        named = ", ".join(names.get(card, card) for card in left_out)
        warnings.warn(
            f"{file}: {len(cards) - len(left_out)} of {len(cards)} network devices count; left "
            f"out: {named} (on no PCIe switch of a GPU, or second ports of a card; nics=, --nics "
            "say otherwise)",
            stacklevel=3,
        )
    return [card for card in cards if card not in left_out]


def _header(lines: list[str], file: str) -> tuple[int, list[str], list[str]]:
    """Return the line of the header, the devices, and the columns of affinities."""
    for at, line in enumerate(lines):
        affinities = [column for column in _AFFINITY if column in line]
        for column in _AFFINITY:
            line = line.replace(column, "")
        cells = line.split()
        if cells[:1] == ["gpu"]:
            cells = cells[1:]
        if cells[:1] != ["GPU0"]:
            continue
        if len(cells) > 1 and (cells[1] == SELF or is_link(cells[1])):
            raise InputError(f"{file}:{at + 1}: the header with the names GPU0, ... is missing")
        twice = next((cell for cell in cells if cells.count(cell) > 1), None)
        if twice is not None:
            raise InputError(f"{file}:{at + 1}: column {twice!r:.20} is there twice")
        return at, cells, affinities
    raise InputError(
        f"{file}: expected the output of nvidia-smi topo -m (a header GPU0 GPU1 ...)"
        f"{looks_like(chr(10).join(lines))}"
    )


def _rows(
    lines: list[str], start: int, devices: list[str], file: str
) -> dict[str, tuple[int, str]]:
    """Return line number and cells of every row, by device."""
    rows: dict[str, tuple[int, str]] = {}
    at = start + 1
    for at, line in enumerate(lines[start + 1 :], start + 2):
        cells = line.split(maxsplit=1)
        if not cells:
            continue
        if cells[0].startswith("Legend") or cells[0] not in devices:
            if _GPU.fullmatch(cells[0]):
                raise InputError(f"{file}:{at}: row {cells[0]} has no column of that name")
            break
        if cells[0] in rows:
            raise InputError(f"{file}:{at}: row {cells[0]} is there twice")
        rows[cells[0]] = (at, cells[1] if len(cells) > 1 else "")
    for after, line in enumerate(lines[at:], at + 1):
        if re.match(rf"\s*GPU0\s+{SELF}\s+({'|'.join(PCIE)}|NV\d)", line):
            raise InputError(f"{file}:{after}: a second matrix: expected that of one host a file")
    return rows


def _check_legend(text: str, gpus: int, file: str) -> None:
    """Refuse, or warn of, a matrix that may lack NVLinks.

    A legend has ``NV#`` with or without NVLinks, but ``Path traverses`` of a driver without NVLink.
    """
    if gpus < 2 or "Path traverses" in text:
        return
    if re.search(r"^\W*Legend|^\s*(X|SYS|PIX) +=", text, re.MULTILINE):
        if "NV#" not in text:
            raise InputError(
                f"{file}: expected `nvidia-smi topo -m` with NV# in its legend (this looks like "
                "`nvidia-smi topo -mp`, which prints PCIe instead of NVLink, or is cut off)"
            )
        return
    warnings.warn(
        f"{file}: has neither an NVLink nor a legend: right for GPUs without NVLink; others need "
        "all of `nvidia-smi topo -m` (`topo -mp` prints PCIe alone)",
        stacklevel=3,
    )


def _cells(line: str, row: str, devices: list[str], place: str) -> list[str]:
    cells = [_OLD.get(cell, cell) for cell in line.split()[: len(devices)]]
    for column, cell in zip(devices, cells, strict=False):
        if (row == column) != (cell == SELF) or not (cell == SELF or is_link(cell)):
            known = SELF if row == column else f"one of {', '.join(PCIE)}, NV1..NV99"
            hint = looks_like(f"{row} {line}") if cell in _PEERS else ""
            raise InputError(
                f"{place}: row {row}, column {column}: expected {known}, got {cell!r:.20}{hint}"
            )
    if len(cells) < len(devices):
        raise InputError(
            f"{place}: row {row}, column {devices[len(cells)]}: the cell is missing (cut off?)"
        )
    return cells


def _numa(lines: list[str], devices: int, affinities: list[str]) -> tuple[tuple[int, ...], ...]:
    """Group GPUs by NUMA node, or by cores; empty if unknown."""
    # tabs may be decoration or empty cells, but GPU NUMA ID is never empty: align from the right
    cells = [line.split()[devices:] for line in lines]
    short = [max(0, len(affinities) - len(row)) for row in cells]
    if len(set(short)) > 1:
        return ()
    found = [
        dict(zip(affinities[skip:], row, strict=False))
        for skip, row in zip(short, cells, strict=True)
    ]
    for column in ("NUMA Affinity", "CPU Affinity"):
        spans = [row.get(column, "") for row in found]
        if all(_SPANS.fullmatch(cell) for cell in spans):
            groups = dict.fromkeys(spans)
            return tuple(tuple(i for i, w in enumerate(spans) if w == cell) for cell in groups)
    return ()
