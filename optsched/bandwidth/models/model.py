"""What every bandwidth model offers: predictions, intervals, and tables that kernels read."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from optsched.bandwidth.models.patterns import MOST_STATES, automaton, n_patterns, written_pattern
from optsched.bandwidth.topology.rates import NO_LIMIT, UNMEASURED
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.models.tables import CountTables
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

Selection: TypeAlias = npt.NDArray[np.bool_]
Which: TypeAlias = Literal["value", "low", "high"]

OPERATIONS: Final = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
)  # fmt: skip


class UnmeasuredPattern(InputError):
    """A table has no value for this pattern of counts; ``.pattern`` is it.

    Examples
    --------
    >>> from optsched import bandwidth
    >>> cluster, table = bandwidth.synthetic.cluster("nvswitch", 2), bandwidth.MeasurementTable(())
    >>> try:
    ...     bandwidth.MeasuredBandwidth(cluster, table).of([0, 1, 8])
    ... except bandwidth.UnmeasuredPattern as error:
    ...     print(error.pattern)
    2+1
    """

    def __init__(self, pattern: str, what: str) -> None:
        super().__init__(f"pattern {pattern} is not measured ({what})")
        self.pattern = pattern


class BandwidthModel(ABC):
    """Standalone bandwidth B(S) of every set S of GPUs, in kB/s; 0 for less than two GPUs.

    Models are values: learning returns a new one.

    Examples
    --------
    >>> import numpy as np
    >>> from optsched.bandwidth import BandwidthModel, synthetic
    >>> class Constant(BandwidthModel):
    ...     def __init__(self, cluster):
    ...         self.cluster = cluster
    ...
    ...     def predict(self, selection):
    ...         return np.where(self.checked(selection).sum(axis=1) > 1, 10**6, 0)
    >>> Constant(synthetic.cluster("nvswitch", 2)).of([0, 1])
    1000000
    """

    cluster: Cluster
    op: str = "all_reduce"
    """Collective that the bandwidths are of."""
    payload: int | None = None
    """Bytes that they were measured with; None if unknown."""
    mixed: bool = False
    """Whether it was learnt from several collectives or payloads together."""
    intra_monotone: bool = True
    """Whether B(S) never falls when the bandwidth within one of its hosts rises."""

    @abstractmethod
    def predict(self, selection: Selection) -> IntArray:
        """Predict B(S) of every row.

        Parameters
        ----------
        selection
            Shape (n, GPUs of the cluster).

        Raises
        ------
        InputError
            Another shape or dtype. `UnmeasuredPattern` where nothing is known.
        """

    def known_values(self, selection: Selection) -> IntArray:
        """Predict B(S) of every row, `UNMEASURED` where nothing is known."""
        try:
            return self.predict(selection)
        except UnmeasuredPattern:
            if len(selection) == 1:
                return np.array([UNMEASURED])
            return np.concatenate([self.known_values(row[None]) for row in selection])

    def interval(self, selection: Selection) -> tuple[IntArray, IntArray]:
        """Return lower and upper ends of B(S); both are `predict` where nothing is uncertain."""
        known = self.predict(selection)
        return known, known

    def tables(self, which: Which = "value") -> CountTables | None:
        """Return tables by counts with the same numbers, or None if the model has none."""
        return None

    def update(self, measurements: Iterable[Any]) -> BandwidthModel:
        """Return a new model with these measurements added."""
        raise NotImplementedError(f"{type(self).__name__} does not learn")

    @cached_property
    def assumed(self) -> tuple[str, ...]:
        """List what is assumed where nothing is known, a sentence each; answers repeat it."""
        return ()

    @cached_property
    def sha256(self) -> str:
        """Return a hash of all predictions, 64 hexadecimal digits; here of its tables."""
        tables = self.tables()
        text = f"{type(self).__name__} {self.cluster.sha256} {self.op} {self.payload}".encode()
        numbers = b"" if tables is None else tables.sha256.encode()
        return hashlib.sha256(text + numbers).hexdigest()

    def of(self, gpus: Iterable[int]) -> int:
        """Predict B(S) of one set of global numbers."""
        return self.of_sets([self.cluster.gpus(gpus)])[0]

    def of_sets(self, sets: Sequence[tuple[int, ...]]) -> list[int]:
        """Predict B(S) of several sets of global numbers, or raise `UnmeasuredPattern`."""
        rows = np.zeros((len(sets), self.cluster.n_gpus), np.bool_)
        for row, gpus in zip(rows, sets, strict=True):
            row[list(gpus)] = True
        found: list[int] = self.predict(rows).tolist()
        return found

    def checked(self, selection: Selection) -> Selection:
        """Check shape and type of a selection and return it."""
        given = np.asarray(selection)
        if given.dtype != np.bool_ or given.ndim != 2 or given.shape[1] != self.cluster.n_gpus:
            raise InputError(
                f"selection: expected booleans of shape (n, {self.cluster.n_gpus}), "
                f"got {given.dtype} of shape {given.shape}"
            )
        return given


class CountModel(BandwidthModel):
    """B(S) = min(network(counts), intra of every host with two GPUs or more), after `Levels`.

    Subclasses give `network`, and `intra_of` if bandwidths within a host limit; what uplinks and
    factors of the cluster's levels leave is computed here.

    Examples
    --------
    >>> import numpy as np
    >>> from optsched.bandwidth import ClusterState, CountModel, Dispatcher, synthetic
    >>> class PerHost(CountModel):
    ...     def __init__(self, cluster):
    ...         self.cluster = cluster
    ...
    ...     def network(self, patterns, which="value"):
    ...         return 10**8 // np.maximum(1, (patterns > 0).sum(axis=1))
    >>> cluster = synthetic.cluster("nvswitch", 2)
    >>> Dispatcher(cluster, PerHost(cluster)).choose(ClusterState.idle(cluster), 2)
    ((0, 1), 100000000)
    """

    @abstractmethod
    def network(self, patterns: IntArray, which: Which = "value") -> IntArray:
        """Return the limit of the network for falling counts, shape (n, m), padded with zeros.

        `NO_LIMIT` where there is none (usually on a single host), `UNMEASURED` where unknown.
        """

    def intra_of(self, kind: int, which: Which = "value") -> IntArray | None:
        """Return bandwidths within a host of a type, as `IntraTable.values`; None: no limit."""
        return None

    def line_rates(self) -> npt.NDArray[np.float64] | None:
        """Return `prior.host_rates` if `network` is `prior.line_rate`, rounded; else None."""
        return None

    def predict(self, selection: Selection) -> IntArray:
        """Predict B(S) of every row; see `BandwidthModel.predict`."""
        value, patterns = self._values(selection, "value")
        if (value == UNMEASURED).any():
            row = int(np.argmax(value == UNMEASURED))
            what = self.op if self.payload is None else f"{self.op}, {self.payload} bytes"
            raise UnmeasuredPattern(written_pattern(patterns[row]), what)
        return value

    def known_values(self, selection: Selection) -> IntArray:
        """Predict B(S) of every row; see `BandwidthModel.known_values`."""
        return self._values(selection, "value")[0]

    def interval(self, selection: Selection) -> tuple[IntArray, IntArray]:
        """Return lower and upper ends of B(S)."""
        return self._values(selection, "low")[0], self._values(selection, "high")[0]

    def _values(self, selection: Selection, which: Which) -> tuple[IntArray, IntArray]:
        given = self.checked(selection)
        cluster = self.cluster
        n = len(given)
        row, gpu = np.nonzero(given)  # faster than `reduceat` for many rows on large clusters
        cell = row * cluster.n_hosts + cluster.host_of[gpu]
        counts = np.bincount(cell, minlength=n * cluster.n_hosts).reshape(n, cluster.n_hosts)
        patterns = -np.sort(-counts, axis=1)
        width = max(1, int((patterns > 0).sum(axis=1).max(initial=0)))
        patterns = np.ascontiguousarray(patterns[:, :width])
        distinct, row = np.unique(patterns, axis=0, return_inverse=True)
        value = self.network(distinct, which)[row.reshape(-1)] if n else np.zeros(0, np.int64)
        unmeasured = value == UNMEASURED
        for h in range(cluster.n_hosts):
            table = self._intra[which][cluster.type_of[h]]
            several = counts[:, h] >= 2
            if table is None or not several.any():
                continue
            if len(table) == int(cluster.sizes[h]) + 1:
                limit = table[counts[several, h]]
            else:
                first = int(cluster.first[h])
                bits = 1 << np.arange(int(cluster.sizes[h]))
                limit = table[given[several, first : first + len(bits)] @ bits]
            value[several] = np.minimum(value[several], limit)
        levels, gpus = cluster.network_levels, counts.sum(axis=1)
        if levels.matter:
            value = levels.limited(value, gpus, (counts > 0).sum(axis=1), levels.lowest(counts))
        value[gpus <= 1] = 0
        value[unmeasured] = UNMEASURED
        return value, patterns

    @cached_property
    def _intra(self) -> dict[str, list[IntArray | None]]:
        kinds = range(len(self.cluster.types))
        ends: tuple[Which, ...] = ("value", "low", "high")
        return {which: [self.intra_of(kind, which) for kind in kinds] for which in ends}

    @property
    def has_tables(self) -> bool:
        """Whether the cluster is small enough for a table of all patterns."""
        cluster = self.cluster
        return n_patterns(cluster.n_hosts, int(cluster.sizes.max())) <= MOST_STATES

    def tables(self, which: Which = "value") -> CountTables | None:
        """Return tables by counts; None for clusters with more than 400,000 patterns."""
        if not self.has_tables:
            return None
        if which not in self._tables:
            from optsched.bandwidth.models.tables import CountTables

            most = int(self.cluster.sizes.max())
            patterns = automaton(self.cluster.n_hosts, most).patterns
            network = np.where(patterns.sum(axis=1) > 1, self.network(patterns, which), 0)
            self._tables[which] = CountTables.of(self.cluster, network, self._intra[which])
        return self._tables[which]

    @cached_property
    def _tables(self) -> dict[str, CountTables]:
        return {}


class Interval(BandwidthModel):
    """A model as if the lower, or the upper, end of every interval were true."""

    def __init__(self, model: BandwidthModel, end: Literal["low", "high"]) -> None:
        self.model, self.end, self.cluster = model, end, model.cluster
        self.op, self.payload, self.assumed = model.op, model.payload, model.assumed
        self.intra_monotone = model.intra_monotone

    def predict(self, selection: Selection) -> IntArray:
        """That end of B(S)."""
        return self.model.interval(selection)[0 if self.end == "low" else 1]

    def tables(self, which: Which = "value") -> CountTables | None:
        """Tables of that end."""
        return self.model.tables(self.end)


def alone(patterns: IntArray) -> npt.NDArray[np.bool_]:
    """Which rows of falling counts are on one host, or empty."""
    if patterns.shape[1] == 1:
        return np.ones(len(patterns), np.bool_)
    return np.asarray(patterns[:, 1] == 0)


def unlimited(patterns: IntArray) -> IntArray:
    """`NO_LIMIT` for every row but those of less than two GPUs, which have 0."""
    limit = np.full(len(patterns), NO_LIMIT, np.int64)
    limit[patterns.sum(axis=1) <= 1] = 0
    return limit
