"""What the learned surrogate sees of a set of GPUs: one token for every host that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.bandwidth.models.fallback import intra_estimate
from optsched.bandwidth.models.measurements import MeasurementTable, check_table
from optsched.bandwidth.topology.intra import IntraTable
from optsched.errors import InputError
from optsched.io.strict_json import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from optsched.bandwidth.models.measurements import Measurement
    from optsched.bandwidth.models.model import Selection
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

    Floats = npt.NDArray[np.float32]

COUNT: Final = 1 << 32
"""A token is count * COUNT + bandwidth within the host in kB/s (0 for one GPU); 0 is no host."""

ALIKE: Final = 1.25
"""Types whose bandwidths for a count differ by no more than this factor can stand for another."""


LEAST_SPREAD: Final = 0.1
"""Of logarithms within hosts: what a per cent is to the network does not grow without bound."""


class Samples(NamedTuple):
    """What is learned from, in an order that does not depend on that of the measurements."""

    tokens: IntArray
    """Falling, with zeros behind: shape (n, hosts)."""
    values: IntArray
    """kB/s, positive."""
    censored: npt.NDArray[np.bool_]
    """Whether the true bandwidth may be higher."""

    def joined(self, other: Samples) -> Samples:
        """Both, in order."""
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        parts = [side.widened(width).tokens for side in (self, other)]
        return ordered(
            np.concatenate(parts),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.censored, other.censored]),
        )

    def widened(self, width: int) -> Samples:
        """The same with room for so many hosts."""
        return self._replace(
            tokens=np.pad(self.tokens, ((0, 0), (0, width - self.tokens.shape[1])))
        )


@dataclass(frozen=True)
class Scaling:
    """Means and deviations of what the network reads and writes."""

    intra: tuple[float, float]
    """Of the logarithm of bandwidths within a host (kB/s)."""
    count: tuple[float, float]
    """Of the GPUs of a host."""
    total: tuple[float, float]
    """Of all GPUs of a set."""
    value: tuple[float, float]
    """Of the logarithm of the bandwidth (kB/s)."""

    @classmethod
    def of(cls, samples: Samples) -> Scaling:
        """That of samples; a deviation of 0 becomes 1."""
        used = samples.tokens[samples.tokens > 0]
        counts = samples.tokens // COUNT
        several = used[used // COUNT > 1]
        mean, deviation = moments(np.log(np.maximum(several % COUNT, 1)))
        return cls(
            (mean, max(deviation, LEAST_SPREAD)),
            moments(used // COUNT),
            moments(counts.sum(axis=1)),
            moments(np.log(samples.values)),
        )

    def read(self, tokens: IntArray) -> tuple[Floats, Floats]:
        """Inputs of the network, shapes (3, hosts, n) and (n,); zeros where a host is absent."""
        counts, intra = tokens // COUNT, tokens % COUNT
        present, several = tokens > 0, counts > 1
        seen = (
            np.where(several, scaled(np.log(np.maximum(intra, 1)), self.intra), 0),
            np.where(present, scaled(counts, self.count), 0),
            counts == 1,  # no limit within the host, which is neither a low bandwidth nor absence
        )
        hosts = np.stack([part.astype(np.float32).T for part in seen])
        return hosts, scaled(counts.sum(axis=1), self.total).astype(np.float32)

    def written(self, values: IntArray) -> Floats:
        """What the network shall write for these bandwidths."""
        return scaled(np.log(values), self.value).astype(np.float32)

    def bandwidth(self, outputs: Floats) -> npt.NDArray[np.float64]:
        """kB/s that the network means."""
        mean, deviation = self.value
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp(outputs.astype(np.float64) * deviation + mean)


def tokens_of(cluster: Cluster, intra: Sequence[IntraTable], selection: Selection) -> IntArray:
    """Tokens of every row, falling: the order of the hosts is forgotten here.

    Parameters
    ----------
    cluster
        Whose GPUs they are.
    intra
        Bandwidths within a host, by type.
    selection
        Shape (n, GPUs).

    Returns
    -------
    IntArray
        Shape (n, most hosts that a row uses, at least 1).
    """
    tokens = np.zeros((len(selection), cluster.n_hosts), np.int64)
    for h in range(cluster.n_hosts):
        first, size = int(cluster.first[h]), int(cluster.sizes[h])
        chosen = selection[:, first : first + size]
        count = chosen.sum(axis=1, dtype=np.int64)
        table = intra[cluster.type_of[h]]
        key = chosen @ (1 << np.arange(size)) if table.by_subset else count
        tokens[:, h] = count * COUNT + np.where(count > 1, table.values[key], 0)
    tokens = -np.sort(-tokens, axis=1)
    width = int((tokens > 0).sum(axis=1).max(initial=1))
    return np.ascontiguousarray(tokens[:, :width])


def samples_of(
    cluster: Cluster, intra: Sequence[IntraTable], rows: Sequence[Measurement]
) -> Samples:
    """Measurements across hosts as samples; those on one host are left to the intra tables.

    A measurement that does not say whose GPUs they were stands for hosts whose subsets are
    average: the median of all subsets of a size.

    Raises
    ------
    InputError
        A pattern or GPU that the cluster has not, a bandwidth of 0, or a pattern without GPUs on
        a cluster whose types of hosts differ too much to stand for each other.
    """
    check_table(cluster, MeasurementTable(tuple(rows)))
    tokens, values, censored = [], [], []
    average: dict[int, int] = {}
    for i, row in enumerate(rows):
        if len(row.pattern) < 2:
            continue
        if row.value == 0:
            raise InputError(f"measurements[{i}].value: expected more than 0 between hosts, got 0")
        place = f"measurements[{i}].gpus"
        if row.gpus:
            found = _tokens_there(cluster, intra, row, place)
        else:
            for count in row.pattern:
                if count not in average:
                    average[count] = _average(cluster, intra, count, place)
            found = [average[count] for count in row.pattern]
        tokens.append(sorted(found, reverse=True))
        values.append(row.value)
        censored.append(row.censored)
    width = max((len(part) for part in tokens), default=1)
    table = np.zeros((len(tokens), width), np.int64)
    for i, part in enumerate(tokens):
        table[i, : len(part)] = part
    return ordered(table, np.array(values, np.int64), np.array(censored, np.bool_))


def ordered(tokens: IntArray, values: IntArray, censored: npt.NDArray[np.bool_]) -> Samples:
    """Samples by tokens, then value: the order in which they were measured is forgotten."""
    order = np.lexsort((censored, values, *tokens.T[::-1]))
    return Samples(tokens[order], values[order], censored[order])


def patterns_of(samples: Samples) -> IntArray:
    """Number of the pattern of counts of every sample: the same for the same pattern."""
    counts = samples.tokens // COUNT
    _, number = np.unique(counts, axis=0, return_inverse=True)
    return np.asarray(number.reshape(-1), np.int64)


def intra_tables(
    cluster: Cluster, given: Mapping[str, IntraTable] | None, rows: Sequence[Measurement]
) -> tuple[IntraTable, ...]:
    """Bandwidths within a host by type: those given, else those of the type, else a stand-in.

    Raises
    ------
    InputError
        Tables for another number of GPUs, or for an unknown type.
    """
    names = [kind.name for kind in cluster.types]
    for name in given or {}:
        if name not in names:
            raise InputError(f"intra: there is no type {name!r:.60}; known: {shortened(names)}")
    tables = []
    for t, kind in enumerate(cluster.types):
        table = (given or {}).get(kind.name, kind.intra)
        if table is None:
            table = IntraTable(kind.gpus, intra_estimate(cluster, t, rows))
        if not isinstance(table, IntraTable) or table.gpus != kind.gpus:
            got = f"one of {table.gpus}" if isinstance(table, IntraTable) else f"{table!r:.60}"
            raise InputError(
                f"intra[{kind.name!r:.60}]: expected an IntraTable of {kind.gpus} GPUs, got {got}"
            )
        tables.append(table)
    return tuple(tables)


def _tokens_there(
    cluster: Cluster, intra: Sequence[IntraTable], row: Measurement, place: str
) -> list[int]:
    """Tokens of the GPUs that a measurement names."""
    found = []
    hosts = [cluster.host_index(name) for name, _ in row.gpus]
    for h, (name, ids) in zip(hosts, row.gpus, strict=True):
        if hosts.count(h) > 1 or len(set(ids)) < len(ids):
            raise InputError(f"{place}: host {name!r:.60} or one of its GPUs is given twice")
        mask = sum(1 << i for i in ids)
        limit = intra[cluster.type_of[h]].of(mask) if len(ids) > 1 else 0
        found.append(len(ids) * COUNT + limit)
    return found


def _average(cluster: Cluster, intra: Sequence[IntraTable], count: int, place: str) -> int:
    """Token of so many GPUs of a host that is not known."""
    if count == 1:
        return COUNT
    roomy = sorted({t for t in cluster.type_of if cluster.types[t].gpus >= count})
    medians = []
    for t in roomy:
        table = intra[t]
        if table.by_subset:
            sizes = np.array([mask.bit_count() for mask in range(len(table.values))])
            medians.append(int(np.median(table.values[sizes == count])))
        else:
            medians.append(int(table.values[count]))
    if max(medians) > ALIKE * min(medians):
        raise InputError(
            f"{place}: {count} GPUs of a host may be of types as different as "
            f"{', '.join(cluster.types[t].name for t in roomy[:4])}: say which GPUs were measured"
        )
    return count * COUNT + int(np.median(medians))


def moments(values: npt.NDArray[np.generic]) -> tuple[float, float]:
    """Mean and deviation; a deviation of 0 becomes 1."""
    if not len(values):
        return 0.0, 1.0
    numbers = values.astype(np.float64)
    deviation = float(np.std(numbers))
    return float(np.mean(numbers)), deviation if deviation > 1e-9 else 1.0


def scaled(
    values: npt.NDArray[np.generic], moments: tuple[float, float]
) -> npt.NDArray[np.float64]:
    """Values minus their mean, over their deviation."""
    return np.asarray((values.astype(np.float64) - moments[0]) / moments[1])
