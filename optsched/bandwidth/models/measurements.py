"""Measured bandwidths of sets of GPUs, all of one collective and one payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optsched.bandwidth.models.model import OPERATIONS
from optsched.bandwidth.topology.cluster import Cluster
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic
from optsched.io.values import integer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping


class MixedMeasurements(InputError):
    """Two collectives or two payloads in one table; they rank sets of GPUs differently."""


@dataclass(frozen=True)
class Measurement:
    """One run: bus bandwidth in kB/s of a pattern, and whose GPUs they were, if that is known."""

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

    Parameters
    ----------
    rows
        The measurements.
    op
        One of `optsched.bandwidth.models.model.OPERATIONS`.
    payload
        Bytes; None if unknown.
    mixed
        Whether it was said that they are not all of that payload: answers repeat it.
    """

    rows: tuple[Measurement, ...]
    op: str = "all_reduce"
    payload: int | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rows, (list, tuple)) or not all(
            isinstance(row, Measurement) for row in self.rows
        ):
            raise InputError(f"rows: expected a list of Measurements, got {self.rows!r:.60}")
        object.__setattr__(self, "rows", tuple(self.rows))
        if self.op not in OPERATIONS:
            raise InputError(f"op: expected one of {', '.join(OPERATIONS)}, got {self.op!r:.60}")
        if self.payload is not None:
            integer("payload", self.payload, 1, 2**53)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.rows)

    def with_rows(self, rows: Iterable[Measurement]) -> MeasurementTable:
        """Measurements as a table; if they are none yet, of this collective and payload."""
        if isinstance(rows, MeasurementTable):
            return rows
        return MeasurementTable(tuple(rows), self.op, self.payload, self.mixed)

    def joined(self, other: MeasurementTable, *, mixed: bool = False) -> MeasurementTable:
        """Both, these first.

        Raises
        ------
        MixedMeasurements
            They are of different collectives or payloads, and `mixed` was not said.
        """
        same = (self.op, self.payload) == (other.op, other.payload)
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
        """Read a CSV ``op,payload_bytes,hosts,pattern,gpus,busbw_GBps``."""
        from optsched.bandwidth.models.measurements_csv import from_text

        return from_text(read_text(path), str(path), op, payload)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the CSV, all of it or nothing."""
        from optsched.bandwidth.models.measurements_csv import to_csv

        write_atomic(path, to_csv(self))


def check_table(cluster: Cluster, table: MeasurementTable) -> None:
    """Refuse what is no table, and measurements of patterns, hosts or GPUs that are not there.

    Raises
    ------
    InputError
        With the position of the measurement.
    """
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster: expected a Cluster, got {cluster!r:.60}")
    if not isinstance(table, MeasurementTable):
        raise InputError(f"table: expected a MeasurementTable, got {table!r:.60}")
    sizes = sorted(cluster.sizes.tolist(), reverse=True)
    for i, row in enumerate(table):
        place = f"measurements[{i}]"
        fits = len(row.pattern) <= len(sizes)
        if not fits or any(c > n for c, n in zip(row.pattern, sizes, strict=False)):
            raise InputError(
                f"{place}.pattern: {'+'.join(map(str, row.pattern)):.60} does not fit "
                f"{len(sizes)} hosts of at most {sizes[0]} GPUs"
            )
        for name, ids in row.gpus:
            h = cluster.host_index(name, f"{place}.gpus")
            if any(not 0 <= gpu < int(cluster.sizes[h]) for gpu in ids):
                raise InputError(
                    f"{place}.gpus: expected ids in 0..{int(cluster.sizes[h]) - 1} on {name}, "
                    f"got {','.join(map(str, ids)):.60}"
                )


def by_pattern(rows: Iterable[Measurement]) -> dict[tuple[int, ...], list[int]]:
    """Values of every pattern, in order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        found.setdefault(row.pattern, []).append(row.value)
    return found


def median(values: list[int]) -> int:
    """Median, of an even number the mean of the middle two, rounded down."""
    ranked = sorted(values)
    n = len(ranked)
    return (ranked[(n - 1) // 2] + ranked[n // 2]) // 2
