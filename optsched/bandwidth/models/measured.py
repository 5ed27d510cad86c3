"""A table of measured patterns and nothing else: what was not measured is not guessed."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.models.measurements import MeasurementTable, by_pattern, check_table
from optsched.bandwidth.models.model import CountModel, Which
from optsched.bandwidth.models.observations import without_factor
from optsched.bandwidth.topology.rates import UNMEASURED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.bandwidth.models.measurements import Measurement
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray


class MeasuredBandwidth(CountModel):
    """B(S) = T[counts of S], on one host too.

    Which GPUs of a host S has makes no difference. Patterns that are not in the table are
    unmeasured: `predict` raises `UnmeasuredPattern`, and searches leave them out.
    Of several measurements of a pattern the first counts; those beside other traffic are left out:
    the bandwidth is only known to be no less.

    Examples
    --------
    >>> from optsched.bandwidth import MeasuredBandwidth, Measurement, MeasurementTable, synthetic
    >>> table = MeasurementTable((Measurement((2, 1), 90_000_000),))
    >>> MeasuredBandwidth(synthetic.cluster("nvswitch", 2), table).of([0, 1, 8])
    90000000
    """

    def __init__(self, cluster: Cluster, table: MeasurementTable) -> None:
        self.cluster, self.table = cluster, check_table(cluster, table)
        self.op, self.payload, self.mixed = table.op, table.payload, table.mixed

    @cached_property
    def known(self) -> dict[tuple[int, ...], int]:
        """Return kB/s by pattern."""
        rows = (row for row in self.table if not row.censored)
        found = by_pattern(without_factor(self.cluster, row) for row in rows)
        return {pattern: values[0] for pattern, values in found.items()}

    def network(self, patterns: IntArray, which: Which = "value") -> IntArray:
        """Look up patterns: `UNMEASURED`, or as interval 0 and the largest value of the table."""
        missing = {"value": UNMEASURED, "low": 0, "high": max(self.known.values(), default=0)}
        rows = [tuple(c for c in row if c) for row in patterns.tolist()]
        values = np.array([self.known.get(row, missing[which]) for row in rows], np.int64)
        values[np.asarray(patterns).sum(axis=1) <= 1] = 0
        return values

    def update(self, measurements: Iterable[Measurement]) -> MeasuredBandwidth:
        """Return a model with these measurements after its own."""
        more = self.table.joined(self.table.with_rows(measurements))
        return MeasuredBandwidth(self.cluster, more)

    def __repr__(self) -> str:
        return f"<MeasuredBandwidth of {len(self.known)} patterns>"
