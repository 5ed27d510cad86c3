"""Inputs of the learned surrogate: a token for every used host (naive variant: for every GPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.bandwidth.models.measurements import MeasurementTable, check_table
from optsched.bandwidth.topology.intra import subset_sizes
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.bandwidth.models.model import Selection
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.intra import IntraTable
    from optsched.model.schedule import IntArray

    Floats = npt.NDArray[np.float32]

COUNT: Final = 1 << 32
"""A token is count * COUNT + bandwidth within the host in kB/s (0 for one GPU); 0 is no host."""

ALIKE: Final = 1.25
"""Host types are averaged if their bandwidths for a count differ by no more than this factor."""

LEAST_SPREAD: Final = 0.1
"""Of logarithms within hosts: what a per cent is to the network does not grow without bound."""

Moments = tuple[float, float]


class Samples(NamedTuple):
    """What is learned from, in an order that does not depend on that of the measurements."""

    tokens: IntArray
    """Falling, with zeros behind: shape (n, most tokens of a set)."""
    values: IntArray
    """kB/s, positive."""
    censored: npt.NDArray[np.bool_]
    """Whether the true bandwidth may be higher."""


class Scaling(NamedTuple):
    """Means and deviations of what the network reads and writes."""

    intra: Moments
    """Of the logarithm of bandwidths within a host (kB/s)."""
    gpus: Moments
    """Of the GPUs of a host."""
    total: Moments
    """Of all GPUs of a set."""
    value: Moments
    """Of the logarithm of the bandwidth (kB/s)."""
    features: Floats | None = None
    """Naive variant: scaled numbers of host, GPU in it and host type by GPU, shape (GPUs, 3)."""

    @classmethod
    def of(cls, samples: Samples, cluster: Cluster | None = None) -> Scaling:
        """Scaling of samples (naive variant: of this cluster); a deviation of 0 becomes 1."""
        value = _moments(np.log(samples.values))
        if cluster is not None:
            host, kind = cluster.host_of, np.array(cluster.type_of)
            local = np.arange(cluster.n_gpus) - cluster.first[host]
            columns = [_scaled(part, _moments(part)) for part in (host, local, kind[host])]
            total = _moments((samples.tokens > 0).sum(axis=1))
            features = np.stack(columns, axis=1).astype(np.float32)
            return cls((0.0, 1.0), (0.0, 1.0), total, value, features)
        used = samples.tokens[samples.tokens > 0]
        several = used[used // COUNT > 1]
        mean, deviation = _moments(np.log(np.maximum(several % COUNT, 1)))
        return cls(
            (mean, max(deviation, LEAST_SPREAD)),
            _moments(used // COUNT),
            _moments((samples.tokens // COUNT).sum(axis=1)),
            value,
        )

    def read(self, tokens: IntArray) -> tuple[Floats, Floats]:
        """Inputs of the network, shapes (n, tokens, 3) and (n,); zeros where a token is absent."""
        if self.features is not None:
            used = tokens > 0
            gpus = self.features[np.maximum(tokens - 1, 0)] * used[:, :, None]
            return gpus, _scaled(used.sum(axis=1), self.total).astype(np.float32)
        counts, intra = tokens // COUNT, tokens % COUNT
        seen = (
            np.where(counts > 1, _scaled(np.log(np.maximum(intra, 1)), self.intra), 0),
            np.where(tokens > 0, _scaled(counts, self.gpus), 0),
            counts == 1,  # no limit within the host, which is neither a low bandwidth nor absence
        )
        hosts = np.stack([part.astype(np.float32) for part in seen], axis=2)
        return hosts, _scaled(counts.sum(axis=1), self.total).astype(np.float32)

    def written(self, values: IntArray) -> Floats:
        """Outputs for these bandwidths."""
        return _scaled(np.log(values), self.value).astype(np.float32)

    def bandwidth(self, outputs: Floats) -> npt.NDArray[np.float64]:
        """Bandwidths of outputs, kB/s."""
        mean, deviation = self.value
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp(outputs.astype(np.float64) * deviation + mean)


def gpu_tokens_of(selection: Selection) -> IntArray:
    """Tokens of the naive variant (number of a GPU + 1) of every row, falling."""
    numbers = np.where(selection, np.arange(1, selection.shape[1] + 1), 0)
    width = int(selection.sum(axis=1).max(initial=1))
    return np.ascontiguousarray(np.sort(numbers, axis=1)[:, : -width - 1 : -1])


def tokens_of(cluster: Cluster, intra: Sequence[IntraTable], selection: Selection) -> IntArray:
    """Tokens of every row, falling, shape (n, most hosts of a row): hosts have no order here.

    `intra` are bandwidths within a host, by type; the selection has shape (n, GPUs).
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
    cluster: Cluster, intra: Sequence[IntraTable], table: MeasurementTable, by_gpu: bool = False
) -> Samples:
    """Measurements across hosts as samples; runs on one host are left to the intra tables.

    One without GPUs stands for average hosts. `by_gpu`: with the tokens of the naive variant.
    """
    table = check_table(cluster, table)
    found = []
    for i, row in enumerate(table):
        if len(row.pattern) < 2:
            continue
        if row.value == 0:
            raise InputError(f"measurements[{i}].value: expected more than 0 between hosts, got 0")
        place = f"measurements[{i}].gpus"
        names = [name for name, _ in row.gpus]
        if len(set(names)) < len(names) or any(len(set(ids)) < len(ids) for _, ids in row.gpus):
            raise InputError(f"{place}: a host or one of its GPUs is given twice")
        if by_gpu and not row.gpus:
            raise InputError(f"{place}: expected the measured GPUs: the naive variant needs them")
        tokens = [_average(cluster, intra, count, place) for count in row.pattern * (not row.gpus)]
        for name, ids in row.gpus:
            if by_gpu:
                first = int(cluster.first[cluster.host_index(name)])
                tokens += [first + i + 1 for i in ids]
                continue
            limit = intra[cluster.type_of[cluster.host_index(name)]].of(sum(1 << i for i in ids))
            tokens.append(len(ids) * COUNT + limit)
        found.append((sorted(tokens, reverse=True), row.value, row.censored))
    rows = np.zeros((len(found), max((len(part) for part, _, _ in found), default=1)), np.int64)
    for i, (part, _, _) in enumerate(found):
        rows[i, : len(part)] = part
    values = np.array([value for _, value, _ in found], np.int64)
    censored = np.array([flag for _, _, flag in found], np.bool_)
    order = np.lexsort((censored, values, *rows.T[::-1]))
    return Samples(rows[order], values[order], censored[order])


def _average(cluster: Cluster, intra: Sequence[IntraTable], count: int, place: str) -> int:
    """Token of so many GPUs of a host that is not known."""
    if count == 1:
        return COUNT
    roomy = sorted({t for t in cluster.type_of if cluster.types[t].gpus >= count})
    sizes = [
        (intra[t].values, subset_sizes(intra[t].gpus) if intra[t].by_subset else None)
        for t in roomy
    ]
    medians = [
        int(np.median(values[count if size is None else size == count])) for values, size in sizes
    ]
    if max(medians) > ALIKE * min(medians):
        raise InputError(
            f"{place}: {count} GPUs of a host may be of types as different as "
            f"{', '.join(cluster.types[t].name for t in roomy[:4])}: say which GPUs were measured"
        )
    return count * COUNT + int(np.median(medians))


def _moments(values: npt.NDArray[np.generic]) -> Moments:
    """Mean and deviation; a deviation of 0 becomes 1."""
    if not len(values):
        return 0.0, 1.0
    numbers = values.astype(np.float64)
    deviation = float(np.std(numbers))
    return float(np.mean(numbers)), deviation if deviation > 1e-9 else 1.0


def _scaled(values: npt.NDArray[np.generic], moments: Moments) -> npt.NDArray[np.float64]:
    """Values minus their mean, over their deviation."""
    return np.asarray((values.astype(np.float64) - moments[0]) / moments[1])
