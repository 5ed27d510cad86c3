"""A small trained surrogate, its cluster, and the made-up measurements that it learnt from."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth import samples, synthetic
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable
from optsched.bandwidth.models.surrogate import HierarchicalTransformer

if TYPE_CHECKING:
    from optsched.bandwidth.models.model import Selection
    from optsched.bandwidth.topology.cluster import Cluster

GB = 1_000_000
HOSTS = ("nvswitch", "nvlink_pairs")
N = 24
SEED = 3
EPOCHS = 8


@cache
def small_cluster() -> Cluster:
    """Four hosts of two types, whose subsets differ in bandwidth."""
    return synthetic.cluster(HOSTS, 4)


@cache
def small_table() -> MeasurementTable:
    """Some sets with their GPUs."""
    cluster = small_cluster()
    return measured(cluster, samples.training_samples(cluster, N, 1), 3)


@cache
def small_model() -> HierarchicalTransformer:
    """Trained for a moment; models are values, so that all tests may share it."""
    return HierarchicalTransformer.fit(small_cluster(), small_table(), seed=SEED, epochs=EPOCHS)


def measured(cluster: Cluster, selection: Selection, seed: int) -> MeasurementTable:
    """Made-up bandwidths of sets: they depend on counts and on the weakest host."""
    draw = np.random.default_rng(seed)
    rows = []
    for row in selection:
        gpus, limit = [], 10**9
        for h, host in enumerate(cluster.hosts):
            first, last = int(cluster.first[h]), int(cluster.first[h + 1])
            ids = tuple(np.flatnonzero(row[first:last]).tolist())
            if ids:
                gpus.append((host.name, ids))
            intra = cluster.type(h).intra
            if len(ids) > 1 and intra is not None:
                limit = min(limit, intra.of(sum(1 << i for i in ids)))
        pattern = tuple(len(ids) for _, ids in gpus)
        network = 40 * GB * min(pattern)
        value = round(min(network, limit) * draw.uniform(0.98, 1.02))
        rows.append(Measurement(pattern, value, tuple(gpus)))
    return MeasurementTable(tuple(rows), payload=1 << 24)


def some_sets(cluster: Cluster, n: int = 60, seed: int = 5) -> Selection:
    """Sets of all sizes, on one host too."""
    draw = np.random.default_rng(seed)
    rows = draw.random((n, cluster.n_gpus)) < draw.uniform(0, 1, (n, 1))
    for row in rows[::3]:
        row[cluster.host_of != draw.integers(cluster.n_hosts)] = False
    return rows


def same_weights(a: HierarchicalTransformer, b: HierarchicalTransformer) -> bool:
    """Whether all bits are equal."""
    return a.weights.keys() == b.weights.keys() and all(
        np.array_equal(a.weights[key], b.weights[key]) for key in a.weights
    )
