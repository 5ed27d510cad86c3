"""The line rate of network cards as a table of the network."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.models.prior import host_rates, line_rate
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.rates import KILOBYTES


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


def test_one_card_a_gpu_gives_the_rate_times_the_least_count() -> None:
    """5+3 with eight cards of 40 GB/s: 3 * 40 * 7/8 * 2."""
    cluster = Cluster.uniform(HostType("h", 8, nics=8, nic_rate=40.0), 4)
    assert line_rate(cluster, np.array([[5, 3]]))[0] == pytest.approx(210 * KILOBYTES)


def test_a_single_host_is_not_limited_and_a_single_gpu_has_nothing() -> None:
    """Infinite within a host; 0 for no GPU and for one."""
    cluster = Cluster.uniform(HostType("h", 8), 2)
    found = line_rate(cluster, np.array([[0, 0], [1, 0], [2, 0], [8, 0]]))
    assert found.tolist() == [0.0, 0.0, np.inf, np.inf]


def test_a_gpu_alone_has_a_whole_card_where_cards_are_few() -> None:
    """Two cards for eight GPUs: 1..4 GPUs bring one card, 8 bring both."""
    cluster = Cluster.uniform(HostType("h", 8, nics=2, nic_rate=10.0), 2)
    rates = host_rates(cluster) / (10 * KILOBYTES)
    assert rates.tolist() == [0, 1, 1, 1, 1, 1.25, 1.5, 1.75, 2]


def test_of_several_types_the_best_that_is_large_enough_counts() -> None:
    """A small host with a fast card does not lend it to counts that it cannot hold."""
    small = HostType("small", 2, nics=2, nic_rate=100.0)
    large = HostType("large", 4, nics=1, nic_rate=10.0)
    cluster = Cluster((Host("a", "small"), Host("b", "large")), (small, large))
    assert (host_rates(cluster) / KILOBYTES).tolist() == [0, 100, 200, 10, 10]


def test_hosts_without_cards_have_no_network() -> None:
    """Nothing across hosts then."""
    cluster = Cluster.uniform(HostType("h", 4, nics=0), 2)
    assert line_rate(cluster, np.array([[2, 2]]))[0] == 0
