"""The published measurements of BandPilot as clusters and tables (arXiv 2506.15595)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.models.measurements import Measurement, MeasurementTable
from optsched.bandwidth.models.patterns import parse_pattern
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.rates import kilobytes
from optsched.errors import InputError
from optsched.io.csv_rows import csv_records
from optsched.io.files import read_text

if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLE: Final = "OPTSCHED_BANDPILOT_DATA"
SMALL: Final = 16 << 20
"""Payload of 16 MiB."""
LARGE: Final = 2 << 30
"""Payload of 2 GiB."""
H100_HOSTS: Final = ("H100-26", "H100-27", "H100-28", "H100-29")
MIXED_HOSTS: Final = ("4090", "V100", "A6000", "A800")

_CROSS = "h100_cross_host.csv"
_INTRA = "h100_intra_host_raw.csv"
# not published; where links over PCIe show them, the sockets have four GPUs each
_SOCKETS = ((0, 1, 2, 3), (4, 5, 6, 7))


@dataclass(frozen=True)
class MeasuredData:
    """Four hosts of eight H100, and four hosts of different GPUs, measured by all-reduce.

    Parameters
    ----------
    folder
        With ``h100_cross_host.csv``, ``h100_intra_host_raw.csv``, ``intra_host/*.json`` and
        ``topology/*.tsv``.
    """

    folder: Path

    def h100(self, payload: int = LARGE) -> Cluster:
        """The four hosts of eight H100; bandwidths within hosts measured with 16 MiB or 2 GiB."""
        found: dict[str, dict[str, str]] = {}
        for row in self._intra_rows:
            if row["payload_bytes"] == str(payload):
                found.setdefault(row["host"], {})[row["local_gpus"]] = row["busbw_GBps"]
        if not found:
            raise _unknown(self.folder / _INTRA, self._intra_rows, payload)
        tables = {}
        for name in H100_HOSTS:
            place = f"{self.folder / _INTRA}: {name}"
            given = {
                ",".join(ids.split()): _number(rate, place)
                for ids, rate in found.get(name, {}).items()
            }
            tables[name] = IntraTable.from_rates(8, given, place)
        topology = [("H100", name) for name in H100_HOSTS]
        return self._cluster(topology, tables, "h100")

    def het_4mix(self) -> Cluster:
        """The published mix: hosts of 4090, V100, A6000 and A800, eight GPUs each.

        As published, these hosts lie behind the network of the H100 hosts at 2 GiB,
        ``table(2 << 30, mixed=True)``, while the bandwidths within them are of 16 MiB: the
        sources differ, and so do hardware and payload. The network cards are those of the H100
        hosts therefore.
        """
        from optsched.io.strict_json import parse

        tables = {}
        for name in MIXED_HOSTS:
            path = self.folder / "intra_host" / f"{name}.json"
            tree = parse(read_text(path), str(path))
            given = tree.get("bandwidth") if isinstance(tree, dict) else None
            if not isinstance(given, dict):
                raise InputError(f"{path}: bandwidth: expected a table of subsets")
            tables[name] = IntraTable.from_rates(8, given, f"{path}: bandwidth")
        return self._cluster([(name, name) for name in MIXED_HOSTS], tables, "het-4mix")

    def table(self, payload: int = LARGE, *, mixed: bool = False) -> MeasurementTable:
        """Runs on the H100 hosts, of one host and across, in the order of the source.

        All 493 patterns of 1 to 4 hosts with up to 8 GPUs; at 2 GiB ``1+1`` was measured twice. The
        source does not name the hosts of a run. `mixed`: the table is used beside bandwidths of
        another payload; see `het_4mix`.
        """
        rows = [row for row in self._cross_rows if row["payload_bytes"] == str(payload)]
        path = self.folder / _CROSS
        if not rows:
            raise _unknown(path, self._cross_rows, payload)
        found = []
        for row in rows:
            place = f"{path}: row {row['row']}"
            rate = kilobytes(place, _number(row["busbw_GBps"], place))
            found.append(Measurement(parse_pattern(row["pattern"], place), rate))
        return MeasurementTable(tuple(found), "all_reduce", payload, mixed)

    @cached_property
    def _cross_rows(self) -> list[dict[str, str]]:
        return _rows(self.folder / _CROSS, ("payload_bytes", "row", "op", "pattern", "busbw_GBps"))

    @cached_property
    def _intra_rows(self) -> list[dict[str, str]]:
        columns = ("host", "op", "local_gpus", "payload_bytes", "busbw_GBps")
        return _rows(self.folder / _INTRA, columns)

    def _cluster(
        self, topology: Sequence[tuple[str, str]], tables: dict[str, IntraTable], name: str
    ) -> Cluster:
        from optsched.formats import nvidia_topo

        types: list[HostType] = []
        for matrix, host in topology:
            text = (self.folder / "topology" / f"{matrix}.tsv").read_text()
            bare = nvidia_topo.from_text(text, host, nics=8, nic_rate=50.0)
            kind = replace(bare, intra=tables[host])
            types.append(replace(kind, numa=_SOCKETS))
        return Cluster(tuple(Host(t.name, t.name) for t in types), tuple(types), name=name)


def load_measured(path: str | os.PathLike[str] | None = None) -> MeasuredData:
    """The published measurements in a folder, by default ``OPTSCHED_BANDPILOT_DATA``."""
    given = path if path is not None else os.environ.get(VARIABLE)
    if not given:
        raise InputError(f"path: give the folder of the measurements, or set {VARIABLE}")
    if not isinstance(given, (str, os.PathLike)):
        raise InputError(f"path: expected the name of a folder, got {given!r:.60}")
    folder = Path(given)
    if not folder.is_dir():
        raise InputError(f"path: there is no folder {str(folder)!r:.200} ({VARIABLE}?)")
    for part in (_CROSS, _INTRA, "intra_host", "topology"):
        if not (folder / part).exists():
            raise InputError(f"{folder}: is not the folder of the measurements: no {part} in it")
    return MeasuredData(folder)


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    rows = []
    for place, row in csv_records(read_text(path), str(path), (), columns):
        if row["op"] != "all_reduce_perf":
            raise InputError(f"{place}: op: expected all_reduce_perf, got {row['op']!r:.60}")
        rows.append(row)
    return rows


def _number(text: str, place: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{place}: expected GB/s, got {text!r:.60}") from None


def _unknown(path: Path, rows: list[dict[str, str]], payload: int) -> InputError:
    there = ", ".join(sorted({row["payload_bytes"] for row in rows}, key=len)) or "nothing"
    return InputError(f"{path}: payload: no runs of {payload} bytes, there is {there}")
