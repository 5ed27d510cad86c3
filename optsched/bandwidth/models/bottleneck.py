"""The default model: the least of what the network and each host allow; the network is learnt."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from optsched.bandwidth.models.fallback import assumptions, intra_estimate, measured_types
from optsched.bandwidth.models.gaussian import NOISE, QUANTILE, GaussianProcess
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable, check_table
from optsched.bandwidth.models.model import CountModel, Which, alone, unlimited
from optsched.bandwidth.models.observations import Observations, fitted_factors, observations
from optsched.bandwidth.models.patterns import Automaton, automaton, n_patterns, rows_of
from optsched.bandwidth.models.prior import host_rates, inputs, line_rate, near_line_rate
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

    Floats = npt.NDArray[np.float64]

COMPLETE: Final = 20_000
"""Patterns of a cluster up to which all are predicted at once, in some 0.1 s."""


class BottleneckBandwidth(CountModel):
    """B(S) = factor(level) * min(network(counts of S), intra of every host with two GPUs or more).

    The network limit is the line rate of the network cards (`optsched.bandwidth.models.prior`)
    until `fit` has seen measurements: measured patterns then keep the median of their values, and
    the others follow a Gaussian process on its log. Bandwidths within a host are the tables of the
    host types; see `optsched.bandwidth.models.fallback` for a type that has none. Factors of levels
    are those of the cluster, or fitted to three or more runs of known GPUs across the level.
    The attribute `cluster` is then a copy that has them.

    Examples
    --------
    >>> from optsched.bandwidth import BottleneckBandwidth, Measurement, synthetic
    >>> model = BottleneckBandwidth(synthetic.cluster("nvswitch", 2))
    >>> model.update([Measurement((2, 1), 90_000_000)]).of([0, 1, 8])
    90000000
    """

    def __init__(self, cluster: Cluster, table: MeasurementTable | None = None) -> None:
        self.table = check_table(cluster, MeasurementTable(()) if table is None else table)
        self.given = cluster
        self.cluster, self.level_fits = fitted_factors(cluster, self.table, _without_factors)
        self.op, self.payload, self.mixed = self.table.op, self.table.payload, self.table.mixed

    # learning

    def fit(self, table: MeasurementTable) -> BottleneckBandwidth:
        """Return a new model of these measurements alone, in any order."""
        return BottleneckBandwidth(self.given, table)

    def update(self, measurements: Iterable[Measurement]) -> BottleneckBandwidth:
        """Return a new model with these measurements added; refuse another collective."""
        more = self.table.with_rows(measurements)
        if not len(more):
            return self
        return BottleneckBandwidth(self.given, self.table.joined(more) if self.table else more)

    @cached_property
    def observations(self) -> Observations:
        """Return measured limits of the network, and lower bounds."""
        return observations(self.cluster, self.table)

    # predictions

    def network(self, patterns: IntArray, which: Which = "value") -> IntArray:
        """Return the limit of the network, or an end of its 95 % interval."""
        given = np.asarray(patterns, np.int64)
        limit = unlimited(given)
        several = np.flatnonzero(~alone(given))
        if len(several):
            rows = given[several]
            if self._complete is None:
                limit[several] = self._predicted(rows)[which]
            else:
                limit[several] = self._complete[which][self._automaton.states(rows)]
        return limit

    def line_rates(self) -> Floats | None:
        """Return rates of hosts into the network; None once a limit of it is measured."""
        known, least = self.observations
        return None if known or least else host_rates(self.cluster)

    def intra_of(self, kind: int, which: Which = "value") -> IntArray:
        """Return the table of the type, or one from links and runs on single hosts."""
        return intra_estimate(self.cluster, kind, self.table, which)

    @cached_property
    def predicted_types(self) -> tuple[str, ...]:
        """List host types without a table of measured bandwidths."""
        return tuple(kind.name for kind in self.cluster.types if kind.intra is None)

    @cached_property
    def assumed(self) -> tuple[str, ...]:
        """List assumptions about links and network cards that are unknown."""
        measured = measured_types(self.cluster, self.table)
        across = any(len(row.pattern) > 1 for row in self.table)
        return tuple(assumptions(self.cluster, measured, across=across))

    def is_measured(self, patterns: IntArray) -> npt.NDArray[np.bool_]:
        """Return which patterns are measured, or of a single host; shape (n,)."""
        known = self.observations.known
        rows = [tuple(c for c in row if c) for row in np.asarray(patterns).tolist()]
        return np.array([len(row) < 2 or row in known for row in rows], np.bool_)

    def informative(self, rows: IntArray, weight: Floats, count: int) -> list[int]:
        """Choose patterns to measure next; see `GaussianProcess.informative`."""
        return self._process.informative(*inputs(self.cluster, rows), weight, count)

    @property
    def _automaton(self) -> Automaton:
        return automaton(self.cluster.n_hosts, int(self.cluster.sizes.max()))

    @cached_property
    def _complete(self) -> dict[Which, IntArray] | None:
        """Predictions for all patterns, by state, if they are few: those depend on no batch."""
        if n_patterns(self.cluster.n_hosts, int(self.cluster.sizes.max())) > COMPLETE:
            return None
        rows = self._automaton.patterns
        several = ~alone(rows)
        found: dict[Which, IntArray] = {}
        for which, values in self._predicted(rows[several], every=True).items():
            found[which] = unlimited(rows)
            found[which][several] = values
        return found

    def _predicted(self, rows: IntArray, *, every: bool = False) -> dict[Which, IntArray]:
        rates, line = line_rate(self.cluster, rows), self._line(rows)
        patterns, seen = self._points
        middle, deviation = self._process.predict(*inputs(self.cluster, rows))
        middle += line
        low, high = (np.exp(middle + sign * QUANTILE * deviation) for sign in (-1, 1))
        expected = rates
        if len(patterns):
            seen = seen - self._line(patterns)
            logs = near_line_rate(middle, deviation, line, seen, every=every)
            logs -= NOISE  # so that of equals a search takes the measured one
            expected = np.exp(logs).clip(low, high)
        exact, least = self.observations
        found: dict[Which, IntArray] = {}
        given: dict[Which, Floats] = {"value": expected, "low": low, "high": high}
        for which, rate in given.items():
            values = np.rint(np.minimum(rate, MOST - 1)).astype(np.int64)
            values[rates == 0] = 0  # hosts without network cards
            for i, row in enumerate(rows.tolist() if exact or least else ()):
                pattern = tuple(c for c in row if c)
                values[i] = exact.get(pattern, max(int(values[i]), least.get(pattern, 0)))
            found[which] = values
        return found

    @cached_property
    def _process(self) -> GaussianProcess:
        rows, values = self._points
        return GaussianProcess(*inputs(self.cluster, rows), values - self._line(rows))

    @cached_property
    def _points(self) -> tuple[IntArray, Floats]:
        """Patterns that were measured, sorted, and the logs of their limits."""
        limits = dict(sorted(row for row in self.observations.known.items() if row[1] > 0))
        return rows_of(limits), np.log(np.array([*limits.values()], np.float64))

    def _line(self, rows: IntArray) -> Floats:
        """Logs of line rates, which are expected before any run."""
        return np.asarray(np.log(np.maximum(line_rate(self.cluster, rows), 1.0)))

    # files

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], cluster: Cluster | None = None
    ) -> BottleneckBandwidth:
        """Read a document ``optsched.bandwidth/1``; see `model_document.read_model`."""
        from optsched.bandwidth.models.model_document import read_model

        model = read_model(path, cluster)
        if not isinstance(model, BottleneckBandwidth):
            raise InputError(f"{path}: kind: expected bottleneck, it is a {type(model).__name__}")
        return model

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a document ``optsched.bandwidth/1``, all of it or nothing."""
        from optsched.bandwidth.models.model_document import write_model

        write_model(self, path)

    def __repr__(self) -> str:
        known = len(self.observations.known)
        return f"<BottleneckBandwidth of {self.cluster!r}, {known} patterns measured>"


def _without_factors(
    cluster: Cluster, table: MeasurementTable, runs: Sequence[Measurement]
) -> IntArray:
    """Bandwidths of runs by a model of a cluster that has a factor of 1 for every level."""
    chosen = np.zeros((len(runs), cluster.n_gpus), np.bool_)
    for row, run in zip(chosen, runs, strict=True):
        for name, ids in run.gpus:
            row[int(cluster.first[cluster.host_index(name)]) + np.array(ids)] = True
    return BottleneckBandwidth(cluster, table).predict(chosen)
