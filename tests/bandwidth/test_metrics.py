"""Quality of choices and predictions, and the samples that they are taken on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bandwidth.metrics import (
    coverage,
    gbe,
    mape,
    r_squared,
)
from benchmarks.bandwidth.samples import held_out_samples, training_samples
from optsched.bandwidth import synthetic
from optsched.bandwidth.topology.cluster import Cluster, HostType
from optsched.errors import InputError

VALUES = st.lists(st.integers(1, 50), min_size=2, max_size=12)


@given(VALUES, st.randoms(use_true_random=False))
def test_they_are_their_definitions(true: list[int], random: object) -> None:
    """Against plain sums."""
    predicted = list(true)
    random.shuffle(predicted)  # type: ignore[attr-defined]
    n, mean = len(true), sum(true) / len(true)
    errors = [p - y for y, p in zip(true, predicted, strict=True)]
    total = sum((y - mean) ** 2 for y in true)
    relative = sum(abs(e) / y for y, e in zip(true, errors, strict=True)) / n
    assert mape(true, predicted) == pytest.approx(relative)
    if total:
        assert r_squared(true, predicted) == pytest.approx(1 - sum(e * e for e in errors) / total)


def test_constant_values() -> None:
    """All hit, or not."""
    assert r_squared([3, 3], [3, 3]) == 1
    assert r_squared([3, 3], [3, 4]) == -math.inf
    assert mape([0, 2], [5, 1]) == 0.5
    with pytest.raises(InputError, match="other than 0"):
        mape([0], [1])
    with pytest.raises(InputError, match="two lists of one length"):
        r_squared([1, 2], [1])


def test_efficiency_is_of_the_exact_optimum() -> None:
    """1 where nothing can be had; above the optimum is an error."""
    assert gbe(80, 100) == 0.8
    assert gbe(0, 0) == 1
    with pytest.raises(InputError, match="no optimum"):
        gbe(101, 100)
    assert coverage([1, 2, 3, 4], [0, 2, 4, 0], [1, 2, 5, 3]) == 0.5


@pytest.mark.parametrize("kinds", ["nvswitch", ["pcie", "nvlink_pairs"]])
def test_samples_follow_the_protocol(kinds: str | list[str]) -> None:
    """Sizes 10-88 %, across hosts, every other one balanced over two to four hosts; seeded."""
    cluster = synthetic.cluster(kinds, 4)
    rows = training_samples(cluster, 120, 3)
    counts = np.add.reduceat(rows, cluster.first[:-1], axis=1, dtype=np.int64)
    assert rows.shape == (120, 32)
    assert rows.sum(axis=1).min() >= 3
    assert rows.sum(axis=1).max() <= 28
    assert ((counts > 0).sum(axis=1) >= 2).all()
    for balanced in counts[::2]:
        used = balanced[balanced > 0]
        assert used.max() - used.min() <= 1
    assert any(c[c > 0].max() - c[c > 0].min() > 1 for c in counts[1::2])
    assert np.array_equal(rows, training_samples(cluster, 120, 3))
    assert not np.array_equal(rows, training_samples(cluster, 120, 4))
    tested = held_out_samples(cluster, 300, 3)
    assert np.unique(cluster.host_of).size == 4
    crossing = np.add.reduceat(tested, cluster.first[:-1], axis=1, dtype=np.int64) > 0
    assert (crossing.sum(axis=1) >= 2).all()
    assert 0.4 < tested.mean() < 0.6


def test_hosts_of_one_gpu_and_of_many() -> None:
    """Where no balanced split has room, a uniform one is taken; one host has no samples."""
    kinds = (HostType("large", 8), HostType("small", 1))
    from optsched.bandwidth.topology.cluster import Host

    cluster = Cluster((Host("a", "large"), Host("b", "small")), kinds)
    for row in training_samples(cluster, 40, 0):
        assert row[:8].any()
        assert row[8]
    with pytest.raises(InputError, match="at least two hosts"):
        training_samples(Cluster.uniform(HostType("h", 8), 1), 3)
