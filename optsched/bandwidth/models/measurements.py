"""Measured bandwidths of sets of GPUs, all of one collective and one payload, and their CSV.

The CSV has columns ``op,payload_bytes,hosts,pattern,gpus,busbw_GBps``: `hosts` (how many, checked
against the pattern), `gpus` (``n01:0-3 n02:4,5``), `censored` (1 where other traffic ran) and
`mixed` (1 where values are not all of the payload given) may be missing; an empty `payload_bytes`
is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.models.model import OPERATIONS
from optsched.bandwidth.models.patterns import parse_pattern, written_pattern
from optsched.bandwidth.topology.cluster import Cluster
from optsched.bandwidth.topology.foreign import looks_like
from optsched.bandwidth.topology.names import parse_gpus, written_gpus
from optsched.bandwidth.topology.rates import KILOBYTES, MOST, kilobytes
from optsched.errors import InputError
from optsched.io.csv_rows import csv_records, csv_text
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import placed
from optsched.io.values import integer, one_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

COLUMNS: Final = ("op", "payload_bytes", "hosts", "pattern", "gpus", "busbw_GBps")
_KNOWN: Final = (*COLUMNS, "censored", "mixed")
_NEEDED: Final = ("op", "payload_bytes", "pattern", "busbw_GBps")
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
_BYTES = re.compile(r"[1-9]\d{0,15}")


class MixedMeasurements(InputError):
    """Two collectives or two payloads in one table; they rank sets of GPUs differently.

    Examples
    --------
    >>> from optsched.bandwidth import MeasurementTable, MixedMeasurements
    >>> try:
    ...     MeasurementTable((), payload=1 << 20).joined(MeasurementTable((), payload=1 << 30))
    ... except MixedMeasurements:
    ...     print("two payloads")
    two payloads
    """


@dataclass(frozen=True)
class Measurement:
    """One run: bus bandwidth in kB/s of a pattern, and its GPUs, if they are known.

    Examples
    --------
    >>> from optsched.bandwidth import Measurement
    >>> Measurement((2, 4), 300_000_000).pattern
    (4, 2)
    """

    pattern: tuple[int, ...]
    """GPUs a host, falling, without zeros."""
    value: int
    """kB/s."""
    gpus: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Host names with local ids."""
    censored: bool = False
    """Seen beside other traffic: the bandwidth alone is at least this."""

    def __post_init__(self) -> None:
        pattern = tuple(sorted(integer("pattern", c, 1, 4096) for c in self.pattern))[::-1]
        object.__setattr__(self, "pattern", pattern)
        if not pattern:
            raise InputError("pattern: expected at least one host")
        integer("value", self.value, 0, MOST - 1)
        if self.gpus and tuple(sorted(len(ids) for _, ids in self.gpus))[::-1] != pattern:
            raise InputError(f"gpus: are not of the pattern {'+'.join(map(str, pattern))}")


@dataclass(frozen=True)
class MeasurementTable:
    """Measurements of one collective and payload, in the order in which they were made.

    Iterates over its rows.

    Examples
    --------
    >>> from optsched.bandwidth import Measurement, MeasurementTable
    >>> table = MeasurementTable((Measurement((4, 2), 300_000_000),), payload=1 << 30)
    >>> print(table.to_csv(), end="")
    op,payload_bytes,hosts,pattern,gpus,busbw_GBps
    all_reduce,1073741824,2,4+2,,300
    """

    rows: tuple[Measurement, ...]
    op: str = "all_reduce"
    """One of `optsched.bandwidth.models.model.OPERATIONS`."""
    payload: int | None = None
    """Bytes; None if unknown."""
    mixed: bool = False
    """Whether they are declared to be of several payloads: answers repeat it."""

    def __post_init__(self) -> None:
        if not isinstance(self.rows, (list, tuple)) or not all(
            isinstance(row, Measurement) for row in self.rows
        ):
            raise InputError(f"rows: expected a list of Measurements, got {self.rows!r:.60}")
        object.__setattr__(self, "rows", tuple(self.rows))
        one_of("op", self.op, OPERATIONS)
        if self.payload is not None:
            integer("payload", self.payload, 1, 2**53)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.rows)

    def with_rows(self, rows: Iterable[Measurement]) -> MeasurementTable:
        """Return measurements as a table; a list gets this collective and payload."""
        if isinstance(rows, MeasurementTable):
            return rows
        return MeasurementTable(tuple(rows), self.op, self.payload, self.mixed)

    def joined(self, other: MeasurementTable, *, mixed: bool = False) -> MeasurementTable:
        """Append another table; refuse another collective or payload unless `mixed`."""
        same = self.payload == other.payload and self.op == other.op
        if not same and not mixed:
            raise MixedMeasurements(
                f"one table is {self.op} of {self.payload} bytes, the other {other.op} of "
                f"{other.payload}: say mixed=True if that is meant"
            )
        either = self.mixed or other.mixed or not same
        return MeasurementTable(self.rows + other.rows, self.op, self.payload, either)

    @classmethod
    def from_nccl_logs(
        cls,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        op: str = "all_reduce",
        payload: int | None = None,
        hosts: Mapping[str, str] | None = None,
    ) -> MeasurementTable:
        """Read logs of nccl-tests; see `optsched.formats.nccl_tests.read_logs`."""
        from optsched.formats.nccl_tests import read_logs

        return read_logs(paths, op, payload, hosts)

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], op: str | None = None, payload: int | None = None
    ) -> MeasurementTable:
        """Read the CSV from a file; see `parse`."""
        return cls.parse(read_text(path), str(path), op, payload)

    @classmethod
    def parse(
        cls, text: str, name: str, op: str | None = None, payload: int | None = None
    ) -> MeasurementTable:
        """Read the CSV; the order of the lines is kept.

        Lines of another `op` or `payload` than given are left out; by default all must agree.
        Errors begin with ``name:line``.
        """
        try:
            lines = [_line(*row) for row in csv_records(text, name, _KNOWN, _NEEDED)]
        except InputError as error:
            if "busbw_GBps" not in text.partition("\n")[0]:
                error.args = (f"{error}{looks_like(text)}",)
            raise
        if not lines:
            raise InputError(f"{name}: there are no measurements in it")
        groups: dict[str, list[tuple[str, MeasurementTable]]] = {}
        for place, one in lines:
            if op in (None, one.op) and payload in (None, one.payload):
                groups.setdefault(_kind(one), []).append((place, one))
        if not groups:
            present = ", ".join(sorted({_kind(one) for _, one in lines})[:6])
            size = f"{payload} bytes" if payload else "any size"
            raise InputError(f"{name}: no {op or 'measurement'} of {size}; there are {present}")
        (kind, chosen), *others = groups.items()
        for other, ((place, _), *_) in others:
            raise MixedMeasurements(
                f"{place}: {other}, but {chosen[0][0]} is {kind}: choose op and payload, or a file "
                "each"
            )
        rows, mixed = tuple(one.rows[0] for _, one in chosen), any(one.mixed for _, one in chosen)
        return cls(rows, chosen[0][1].op, chosen[0][1].payload, mixed)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the CSV, all of it or nothing."""
        write_atomic(path, self.to_csv())

    def to_csv(self) -> str:
        """Return the CSV that `parse` reads; optional columns only where a row needs them."""
        censored = any(row.censored for row in self.rows)
        rows: list[list[object]] = []
        for i, row in enumerate(self.rows):
            whole, part = divmod(row.value, KILOBYTES)
            rows.append([
                self.op, "" if self.payload is None else self.payload, len(row.pattern),
                written_pattern(row.pattern), written_gpus(row.gpus, f"rows[{i}].gpus"),
                f"{whole}.{part:06d}".rstrip("0").rstrip("."),
                *[int(row.censored)] * censored, *[1] * self.mixed,
            ])  # fmt: skip
        return csv_text([*COLUMNS, *["censored"] * censored, *["mixed"] * self.mixed], rows)


def check_table(cluster: Cluster, table: MeasurementTable) -> MeasurementTable:
    """Refuse measurements of patterns, hosts or GPUs that a cluster has not, or does not join.

    Rows that name machines of a host (trays) are returned with its name, ids and pattern.
    """
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster: expected a Cluster, got {cluster!r:.60}")
    if not isinstance(table, MeasurementTable):
        raise InputError(f"table: expected a MeasurementTable, got {table!r:.60}")
    if any(host.machines for host in cluster.hosts):
        rows = [_by_host(cluster, row, f"measurements[{i}]") for i, row in enumerate(table)]
        table = replace(table, rows=tuple(rows))
    sizes = sorted(cluster.sizes.tolist(), reverse=True)
    fabric = cluster.network_levels.domain[-1]
    for i, row in enumerate(table):
        place = f"measurements[{i}]"
        fits = len(row.pattern) <= len(sizes)
        if not fits or any(c > n for c, n in zip(row.pattern, sizes, strict=False)):
            raise InputError(
                f"{place}.pattern: {'+'.join(map(str, row.pattern)):.60} does not fit "
                f"{len(sizes)} hosts of at most {sizes[0]} GPUs"
            )
        hosts = [cluster.host_index(name, f"{place}.gpus") for name, _ in row.gpus]
        for h, (name, ids) in zip(hosts, row.gpus, strict=True):
            size = int(cluster.sizes[h])
            if any(not 0 <= gpu < size for gpu in ids):
                raise InputError(
                    f"{place}.gpus: expected ids in 0..{size - 1} on {name}, "
                    f"got {','.join(map(str, ids)):.60}"
                )
            if fabric[h] != fabric[hosts[0]]:
                raise InputError(
                    f"{place}.gpus: {row.gpus[0][0]} and {name} are in two domains of level "
                    f"{cluster.levels[0]}, which nothing joins: give a factor for level cluster "
                    "if a network does"
                )
    return table


def _by_host(cluster: Cluster, row: Measurement, place: str) -> Measurement:
    found: dict[str, list[int]] = {}
    for name, ids in row.gpus:
        gpus = cluster.machine(name, f"{place}.gpus")
        if any(not 0 <= i < len(gpus) for i in ids):
            got = ",".join(map(str, ids))
            known = f"ids in 0..{len(gpus) - 1} on {name}"
            raise InputError(f"{place}.gpus: expected {known}, got {got:.60}")
        h = int(cluster.host_of[gpus[0]])
        local = [gpus[i] - int(cluster.first[h]) for i in ids]
        found.setdefault(cluster.hosts[h].name, []).extend(local)
    if not found:
        return row
    parts = tuple((name, tuple(sorted(ids))) for name, ids in found.items())
    return replace(row, pattern=tuple(len(ids) for _, ids in parts), gpus=parts)


def by_pattern(rows: Iterable[Measurement]) -> dict[tuple[int, ...], list[int]]:
    """Values of every pattern, in order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        found.setdefault(row.pattern, []).append(row.value)
    return found


def _kind(table: MeasurementTable) -> str:
    return f"{table.op} of {table.payload or 'unknown size'}{' bytes' * bool(table.payload)}"


def _line(place: str, cells: dict[str, str]) -> tuple[str, MeasurementTable]:
    """Place of a line, and a table of the line alone."""
    with placed(f"{place}: "):
        size, pattern = cells["payload_bytes"], parse_pattern(cells["pattern"])
        if size and not _BYTES.fullmatch(size):
            raise InputError(f"payload_bytes: expected bytes >= 1 or nothing, got {size!r:.60}")
        if cells.get("hosts", "") not in ("", str(len(pattern))):
            raise InputError(
                f"hosts: expected {len(pattern)} as in the pattern {cells['pattern']}, "
                f"got {cells['hosts']!r:.60}"
            )
        if not _NUMBER.fullmatch(rate := cells["busbw_GBps"]):
            raise InputError(f"busbw_GBps: expected GB/s >= 0, got {rate!r:.60}")
        for key in ("censored", "mixed"):
            if cells.get(key, "") not in ("", "0", "1"):
                raise InputError(f"{key}: expected 0 or 1, got {cells[key]!r:.60}")
        gpus = parse_gpus(cells.get("gpus", ""), "gpus")
        value = kilobytes("busbw_GBps", float(rate))
        row = Measurement(pattern, value, gpus, cells.get("censored") == "1")
        mixed = cells.get("mixed") == "1"
        return place, MeasurementTable((row,), cells["op"], int(size) if size else None, mixed)
