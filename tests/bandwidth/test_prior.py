"""The line rate of network cards as a table of the network."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.models.prior import line_rate
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType


def by_hand(kinds: list[HostType], pattern: list[int]) -> float:
    """The formula in exact fractions, a pattern at a time."""
    rates = []
    for count in pattern:
        ways = [Fraction(0)]
        for kind in kinds:
            if kind.gpus >= count:
                share = max(Fraction(1), Fraction(count * kind.nics, kind.gpus))
                ways.append(kind.nic_kilobytes * min(Fraction(kind.nics), share))
        rates.append(max(ways))
    n, m = sum(pattern), len(pattern)
    return float(min(rates) * Fraction(n - 1, n) * Fraction(m, m - 1))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, list[HostType]]:
    """Hosts of up to three types with different cards."""
    kinds = [
        HostType(f"t{i}", draw(st.sampled_from([1, 2, 4, 8])), nics=draw(st.integers(0, 8)),
                 nic_rate=draw(st.sampled_from([12.5, 25.0, 50.0])))
        for i in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    hosts = [Host(f"n{i}", kinds[i % len(kinds)].name) for i in range(4)]
    used = kinds[: len({host.type for host in hosts})]
    return Cluster(tuple(hosts), tuple(kinds)), used


@given(clusters(), st.lists(st.integers(1, 8), min_size=2, max_size=4))
def test_it_is_the_formula(made: tuple[Cluster, list[HostType]], counts: list[int]) -> None:
    """Equal to exact fractions, on clusters of one type and of several."""
    cluster, kinds = made
    most = max(kind.gpus for kind in kinds)
    pattern = sorted((min(c, most) for c in counts), reverse=True)
    row = np.array([[*pattern, *[0] * (4 - len(pattern))]])
    assert line_rate(cluster, row)[0] == pytest.approx(by_hand(kinds, pattern), rel=1e-12)


def test_a_single_host_is_not_limited_and_a_single_gpu_has_nothing() -> None:
    """Infinite within a host; 0 for no GPU and for one."""
    cluster = Cluster.uniform(HostType("h", 8), 2)
    found = line_rate(cluster, np.array([[0, 0], [1, 0], [2, 0], [8, 0]]))
    assert found.tolist() == [0.0, 0.0, np.inf, np.inf]
