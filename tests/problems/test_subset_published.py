"""Optimal choices on the measured H100 cluster; needs OPTSCHED_BANDPILOT_DATA."""

from __future__ import annotations

import os

import pytest

from benchmarks.bandwidth.measured_data import load_measured
from optsched.bandwidth import ClusterState, Dispatcher, MeasuredBandwidth

pytestmark = pytest.mark.skipif(
    "OPTSCHED_BANDPILOT_DATA" not in os.environ, reason="OPTSCHED_BANDPILOT_DATA is not set"
)


@pytest.mark.parametrize(
    ("free", "k", "pattern", "rate"),
    [
        ((8, 8, 8, 8), 8, (8,), 473.40),
        ((8, 8, 8, 8), 10, (5, 5), 412.49),
        ((8, 8, 8, 8), 12, (6, 6), 440.20),
        ((8, 8, 8, 8), 16, (8, 8), 459.82),
        ((8, 8, 8, 8), 24, (8, 8, 8), 299.40),
        ((8, 8, 8, 8), 32, (8, 8, 8, 8), 316.63),
        ((6, 6, 0, 0), 8, (4, 4), 337.17),
        ((7, 7, 7, 7), 8, (4, 4), 337.17),
        ((4, 4, 4, 0), 12, (4, 4, 4), 195.04),
    ],
)
def test_measured_optima(
    free: tuple[int, ...], k: int, pattern: tuple[int, ...], rate: float
) -> None:
    """Values of the measured table at 2 GiB, as published."""
    data = load_measured()
    cluster = data.h100()
    model = MeasuredBandwidth(cluster, data.table())
    words = [f"{host.name}:0-{n - 1}" for host, n in zip(cluster.hosts, free, strict=True) if n]
    state = ClusterState.with_free(cluster, cluster.parse(" ".join(words)))
    gpus, bandwidth = Dispatcher(cluster, model).choose(state, k)
    hosts = [int(cluster.host_of[gpu]) for gpu in gpus]
    counts = tuple(sorted((hosts.count(h) for h in set(hosts)), reverse=True))
    assert (counts, bandwidth) == (pattern, round(rate * 1e6))
