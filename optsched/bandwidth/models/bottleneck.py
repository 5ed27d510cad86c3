"""The default model: the least of what the network and each host allow; the network is learnt."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from optsched.bandwidth.models.fallback import assumptions, intra_estimate, measured_types
from optsched.bandwidth.models.gaussian import NOISE, GaussianProcess
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable, check_table
from optsched.bandwidth.models.model import CountModel, Which, alone, unlimited
from optsched.bandwidth.models.observations import Observations, observations
from optsched.bandwidth.models.patterns import automaton, n_patterns
from optsched.bandwidth.models.prior import host_rates, inputs, line_rate
from optsched.bandwidth.models.shrinkage import beside_line_rate, pooled
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

    Floats = npt.NDArray[np.float64]

COMPILED: Final = 20_000
"""Patterns of a cluster up to which all are predicted at once, in some 0.1 s."""

_QUANTILE: Final = 1.96


class BottleneckBandwidth(CountModel):
    """B(S) = min(T(counts of S) if it has several hosts, intra of every host with two or more).

    T is the line rate of the network cards (`optsched.bandwidth.models.prior`) until `fit` has seen
    measurements: measured patterns then keep the median of their values, and the others follow a
    Gaussian process on log T. Bandwidths within a host are the tables of the host types; see
    `optsched.bandwidth.models.fallback` for a type that has none.

    Parameters
    ----------
    cluster
        Whose GPUs they are.
    table
        Measurements to begin with; `fit` is the usual way to give them.

    Raises
    ------
    InputError
        A measurement of a pattern, host or GPU that the cluster has not.
    """

    def __init__(self, cluster: Cluster, table: MeasurementTable | None = None) -> None:
        self.cluster = cluster
        self.table = MeasurementTable(()) if table is None else table
        check_table(cluster, self.table)
        self.op, self.payload, self.mixed = self.table.op, self.table.payload, self.table.mixed

    # learning

    def fit(self, table: MeasurementTable) -> BottleneckBandwidth:
        """A new model that knows these measurements only; their order makes no difference."""
        return BottleneckBandwidth(self.cluster, table)

    def update(self, measurements: Iterable[Measurement]) -> BottleneckBandwidth:
        """A new model that knows these measurements too.

        Raises
        ------
        MixedMeasurements
            A table of another collective or payload.
        """
        more = self.table.with_rows(measurements)
        if not len(more):
            return self
        return BottleneckBandwidth(self.cluster, self.table.joined(more) if self.table else more)

    @cached_property
    def observations(self) -> Observations:
        """Limits of the network that were measured, and those known from below."""
        return observations(self.cluster, self.table, self.ceiling)

    # predictions

    def network(self, patterns: IntArray, which: Which = "value") -> IntArray:
        """Limit of the network, or an end of its 95 % interval."""
        given = np.asarray(patterns, np.int64)
        limit = unlimited(given)
        several = np.flatnonzero(~alone(given))
        if len(several) and self._compiles:
            limit[several] = self._compiled(which)[self._states(given[several])]
        elif len(several):
            limit[several] = self._predicted(given[several], which)
        return limit

    def line_rates(self) -> Floats | None:
        """What GPUs of a host bring to the network, while no limit of it has been measured."""
        known, least, _ = self.observations
        return None if known or least else host_rates(self.cluster)

    def intra_of(self, kind: int, which: Which = "value") -> IntArray | None:
        """The table of the type; without one, fallbacks and what was measured on single hosts."""
        return intra_estimate(self.cluster, kind, self.table, which)

    @cached_property
    def predicted_types(self) -> tuple[str, ...]:
        """Host types whose intra bandwidths are fallbacks, not measured."""
        return tuple(kind.name for kind in self.cluster.types if kind.intra is None)

    @cached_property
    def assumed(self) -> tuple[str, ...]:
        """What is assumed of links and network cards, where neither they nor runs are known."""
        measured = measured_types(self.cluster, self.table)
        across = any(len(row.pattern) > 1 for row in self.table)
        return tuple(assumptions(self.cluster, measured, across=across))

    def is_measured(self, patterns: IntArray) -> npt.NDArray[np.bool_]:
        """Which patterns need no measurement, shape (n,): known, settled, or of a single host."""
        known = self.observations.known.keys() | self.observations.settled.keys()
        return np.array([
            sum(c > 0 for c in row) < 2 or tuple(c for c in row if c) in known
            for row in np.asarray(patterns).tolist()
        ], np.bool_)  # fmt: skip

    def ceiling(self, patterns: IntArray) -> Floats:
        """The most that hosts of this cluster allow a pattern, kB/s; infinite if nothing limits."""
        given = np.asarray(patterns, np.int64)
        limits = np.where(given >= 2, self._best_within[given], np.inf)
        return np.asarray(limits.min(axis=1, initial=np.inf))

    def draw(self, patterns: IntArray, seed: int) -> IntArray:
        """A table of the network that the measurements allow: one sample, measured values kept.

        Above 2,000 patterns their errors are drawn independently (a joint draw takes cubic time).
        """
        given = np.asarray(patterns, np.int64)
        rng = np.random.default_rng(seed)
        limit = unlimited(given)
        several = np.flatnonzero(~alone(given))
        if not len(several):
            return limit
        rows = given[several]
        expected, process, seen = self._line(rows), self._process, inputs(self.cluster, rows)
        if len(rows) <= 2_000:
            sample = process.draw(*seen, rng)
        else:
            middle, deviation = process.predict(*seen)
            sample = middle + deviation * rng.standard_normal(len(rows))
        limit[several] = self._with_known(rows, _rounded(expected + sample), "value")
        return limit

    def believing(self, patterns: Iterable[tuple[int, ...]]) -> BottleneckBandwidth:
        """As if these patterns had been measured and were as the process expects."""
        wanted = [tuple(int(c) for c in pattern) for pattern in patterns if len(pattern) >= 2]
        if not wanted:
            return self
        width = max(map(len, wanted))
        rows = np.array([[*pattern, *[0] * (width - len(pattern))] for pattern in wanted])
        expected = self._process.predict(*inputs(self.cluster, rows))[0] + self._line(rows)
        values = self._with_known(rows, _rounded(expected), "value").tolist()
        believed = [Measurement(p, value) for p, value in zip(wanted, values, strict=True)]
        return BottleneckBandwidth(self.cluster, self.table.joined(self.table.with_rows(believed)))

    # how

    @property
    def _compiles(self) -> bool:
        """Whether all patterns are predicted at once, and then only looked up."""
        cluster = self.cluster
        return n_patterns(cluster.n_hosts, int(cluster.sizes.max())) <= COMPILED

    def _compiled(self, which: Which) -> IntArray:
        if which not in self._tables_of_network:
            rows = automaton(self.cluster.n_hosts, int(self.cluster.sizes.max())).patterns
            several = ~alone(rows)
            values = unlimited(rows)
            values[several] = self._predicted(rows[several], which)
            self._tables_of_network[which] = values
        return self._tables_of_network[which]

    @cached_property
    def _tables_of_network(self) -> dict[Which, IntArray]:
        return {}

    def _states(self, rows: IntArray) -> IntArray:
        """States of the automaton of falling counts."""
        step = automaton(self.cluster.n_hosts, int(self.cluster.sizes.max())).step
        state = np.zeros(len(rows), np.int64)
        for column in rows.T:
            state = step[state, column]
        return state

    def _predicted(self, rows: IntArray, which: Which) -> IntArray:
        if not len(self._points[0]) and which == "value":
            values = np.minimum(np.rint(line_rate(self.cluster, rows)), MOST - 1).astype(np.int64)
            return self._with_known(rows, values, which)
        middle, deviation = self._process.predict(*inputs(self.cluster, rows))
        rate = self._line(rows)
        middle += rate
        low, high = middle - _QUANTILE * deviation, middle + _QUANTILE * deviation
        logs = {"value": middle, "low": low, "high": high}[which]
        if which == "value":
            patterns, known = self._points
            logs = beside_line_rate(middle, deviation, rate, known - self._line(patterns))
            if self._compiles:  # all patterns are there: what is predicted depends on no batch
                logs = pooled(logs, deviation, rate)
            logs -= NOISE  # of equals a search takes the one that was measured
            logs = np.clip(logs, low, high)
        return self._with_known(rows, _rounded(logs), which)

    def _with_known(self, rows: IntArray, values: IntArray, which: Which) -> IntArray:
        known, least, settled = self.observations
        values[line_rate(self.cluster, rows) == 0] = 0  # hosts without network cards
        if not known and not least:
            return values
        for i, row in enumerate(rows.tolist()):
            pattern = tuple(c for c in row if c)
            exact = known.get(pattern, settled.get(pattern))
            if exact is not None:
                values[i] = exact
            elif pattern in least:
                values[i] = max(int(values[i]), least[pattern])
        return values

    @cached_property
    def _process(self) -> GaussianProcess:
        rows, values = self._points
        return GaussianProcess(*inputs(self.cluster, rows), values - self._line(rows))

    @cached_property
    def _points(self) -> tuple[IntArray, Floats]:
        """Patterns that were measured, sorted, and the logs of their limits."""
        return _logs({p: v for p, v in self.observations.known.items() if v > 0})

    def _line(self, rows: IntArray) -> Floats:
        """Logs of line rates, which are expected before any run."""
        return np.asarray(np.log(np.maximum(line_rate(self.cluster, rows), 1.0)))

    @cached_property
    def _best_within(self) -> Floats:
        """kB/s by count: the best subset of the best host that has so many GPUs."""
        most = int(self.cluster.sizes.max())
        best = np.zeros(most + 1)
        for t in set(self.cluster.type_of):
            kind = self.cluster.types[t]
            values = self.intra_of(t)
            assert values is not None
            if len(values) == kind.gpus + 1:
                by_count = values.astype(np.float64)
            else:
                by_count = np.zeros(kind.gpus + 1)
                np.maximum.at(by_count, [mask.bit_count() for mask in range(len(values))], values)
            best[: kind.gpus + 1] = np.maximum(best[: kind.gpus + 1], by_count)
        return best

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
        from optsched.bandwidth.models.model_document import to_json
        from optsched.io.files import write_atomic

        write_atomic(path, to_json(self))

    def __repr__(self) -> str:
        known = len(self.observations.known)
        return f"<BottleneckBandwidth of {self.cluster!r}, {known} patterns measured>"


def _rounded(logs: Floats) -> IntArray:
    """Logs of kB/s as kB/s."""
    return np.rint(np.minimum(np.exp(np.minimum(logs, 30.0)), MOST - 1)).astype(np.int64)


def _logs(limits: dict[tuple[int, ...], int]) -> tuple[IntArray, Floats]:
    """Patterns in order, as rows, and the logs of their values."""
    order = sorted(limits)
    width = max(map(len, order), default=2)
    rows = np.array([[*p, *[0] * (width - len(p))] for p in order], np.int64)
    return rows.reshape(len(order), width), np.log([float(limits[p]) for p in order])
