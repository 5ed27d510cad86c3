"""A table of measured patterns and nothing else: what was not measured is not guessed."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from optsched.bandwidth.models.measurements import MeasurementTable
from optsched.bandwidth.models.model import CountModel, Which
from optsched.bandwidth.topology.cluster import Cluster
from optsched.bandwidth.topology.rates import UNMEASURED
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.bandwidth.models.measurements import Measurement
    from optsched.model.schedule import IntArray

Repeated = Literal["first", "median"]


class MeasuredBandwidth(CountModel):
    """B(S) = T[counts of S], on one host too.

    Which GPUs of a host S has makes no difference. Patterns that are not in the table are
    unmeasured: `predict` raises `UnmeasuredPattern`, and searches leave them out.

    Parameters
    ----------
    cluster
        Whose GPUs they are.
    table
        The measurements; those seen beside other traffic are left out, for they say only that
        the bandwidth is at least that.
    repeated
        Of several measurements of a pattern the first counts, or the median.

    Raises
    ------
    InputError
        A pattern that does not fit the cluster.
    """

    def __init__(
        self, cluster: Cluster, table: MeasurementTable, repeated: Repeated = "first"
    ) -> None:
        if repeated not in ("first", "median"):
            raise InputError(f"repeated: expected first or median, got {repeated!r:.60}")
        check_parts(cluster, table)
        self.cluster = cluster
        self.table = table
        self.repeated = repeated
        self.op, self.payload, self.mixed = table.op, table.payload, table.mixed
        check_patterns(cluster, table)

    @cached_property
    def known(self) -> dict[tuple[int, ...], int]:
        """kB/s by pattern."""
        found = by_pattern(row for row in self.table if not row.censored)
        if self.repeated == "first":
            return {pattern: values[0] for pattern, values in found.items()}
        return {pattern: median(values) for pattern, values in found.items()}

    def network(self, patterns: IntArray, which: Which = "value") -> IntArray:
        """The table; `UNMEASURED` or, as interval, 0 and the largest value of the table."""
        missing = {"value": UNMEASURED, "low": 0, "high": max(self.known.values(), default=0)}
        # lists of integers are looked up ten times faster than arrays
        found = [
            self.known.get(tuple(c for c in row if c), missing[which]) for row in patterns.tolist()
        ]
        values = np.array(found, np.int64)
        values[np.asarray(patterns).sum(axis=1) <= 1] = 0
        return values

    def update(self, measurements: Iterable[Measurement]) -> MeasuredBandwidth:
        """A model with these measurements behind its own."""
        more = as_table(self.table, measurements)
        return MeasuredBandwidth(self.cluster, self.table.joined(more), self.repeated)

    def __repr__(self) -> str:
        return f"<MeasuredBandwidth of {len(self.known)} patterns>"


def check_parts(cluster: object, table: object) -> None:
    """Refuse what is no cluster, or no table of measurements."""
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster: expected a Cluster, got {cluster!r:.60}")
    if not isinstance(table, MeasurementTable):
        raise InputError(f"table: expected a MeasurementTable, got {table!r:.60}")


def check_patterns(cluster: Cluster, rows: Iterable[Measurement]) -> None:
    """Refuse measurements of patterns, hosts or GPUs that the cluster has not.

    Raises
    ------
    InputError
        With the position of the measurement.
    """
    sizes = sorted(cluster.sizes.tolist(), reverse=True)
    for i, row in enumerate(rows):
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


def as_table(like: MeasurementTable, rows: Iterable[Measurement]) -> MeasurementTable:
    """Measurements as a table; those that are none yet are of the same collective and payload."""
    if isinstance(rows, MeasurementTable):
        return rows
    return MeasurementTable(tuple(rows), like.op, like.payload, like.mixed)


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
