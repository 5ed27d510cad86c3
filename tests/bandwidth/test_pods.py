"""The bandwidth model of pods: its definition, its rounding, and what it refuses."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_pods import TableModel, host_types, plain_bandwidth, random_case

from optsched.bandwidth.models.model import UnmeasuredPattern
from optsched.bandwidth.models.pods import PodBandwidth
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError

KIND = HostType("h", 2, intra=IntraTable(2, [0, 0, 100]))
OTHER = HostType("g", 3, intra=IntraTable(3, [0, 0, 70, 80]))


def cluster_of(*pods: str, pod: str | None = "pod") -> Cluster:
    """One string a pod, its letters the types of its hosts."""
    hosts = [
        Host(f"p{i}n{k}", kind, (f"p{i}",))
        for i, kinds in enumerate(pods)
        for k, kind in enumerate(kinds)
    ]
    return Cluster(tuple(hosts), (KIND, OTHER), ("pod",), pod=pod)


@given(st.integers(0, 10**9), st.sampled_from([0.0, 0.3]))
def test_predictions_are_those_of_the_definition(seed: int, missing: float) -> None:
    """Random selections of random clusters, in one batch; unmeasured ones are refused."""
    case = random_case(seed, gpus=14, missing=missing)
    rng = random.Random(seed)
    rows = np.array([[rng.random() < share for _ in range(14)] for share in (0, 0.1, 0.3, 0.6, 1)])
    plain = [plain_bandwidth(case.model, np.flatnonzero(row).tolist()) for row in rows]
    known = np.array([value is not None for value in plain])
    values = case.model.predict(rows[known])
    assert values.tolist() == [value for value in plain if value is not None]
    assert case.model.interval(rows[known])[0].tolist() == values.tolist()
    for row in rows[~known]:
        with pytest.raises(UnmeasuredPattern):
            case.model.predict(row[None])


@given(st.floats(1e-6, 1, exclude_min=True))
def test_powers_are_rounded_down(factor: float) -> None:
    """Every power is the exact one's floor, whatever the machine's own powers give."""
    cluster = cluster_of(*["h"] * 8)
    powers = PodBandwidth(TableModel, cluster, factor).powers
    exact = [int(Fraction(factor) ** e * 2**30) for e in range(15)]
    assert powers.tolist() == exact


@given(st.integers(0, 10**9))
def test_hosts_of_a_pod_may_be_renamed_and_moved(seed: int) -> None:
    """The order of hosts within a pod does not matter; that of pods does."""
    rng = random.Random(seed)
    kinds = host_types(rng, (1, 2, 3), 50)
    hosts = [Host(f"n{i}", f"h{rng.randint(1, 3)}", (f"p{i % 3}",)) for i in range(7)]
    cluster = Cluster(tuple(hosts), kinds, ("pod",), pod="pod")
    order = [0, 1, 2, *rng.sample(range(3, 7), 4)]
    moved = Cluster(tuple(hosts[i] for i in order), kinds, ("pod",), pod="pod")
    a, b = (PodBandwidth(lambda pod: TableModel(pod, seed), c, 0.8) for c in (cluster, moved))
    row = np.array([rng.random() < 0.6 for _ in range(cluster.n_gpus)])
    parts = np.split(row, cluster.first[1:-1])
    assert a.predict(row[None]) == b.predict(np.concatenate([parts[i] for i in order])[None])


def test_pods_of_a_kind_share_a_local_model() -> None:
    """The function is called once a kind, with the pod as a cluster of its own."""
    made: list[str] = []

    def make(pod: Cluster) -> TableModel:
        made.append("+".join(host.type for host in pod.hosts))
        return TableModel(pod)

    model = PodBandwidth(make, cluster_of("hg", "gh", "hh", "hg", "h"))
    assert made == ["h+g", "h+h", "h"]
    assert model.local_of.tolist() == [0, 0, 1, 0, 2]
    assert model.hosts_of[1] == (3, 2)  # in the order of the local model: h, then g
    assert model.pods == ("p0", "p1", "p2", "p3", "p4")


def test_local_models_may_be_given() -> None:
    """One for all pods, or one a kind; equal to those that are made."""
    cluster = cluster_of("hg", "gh", "hh")
    mixed = Cluster((Host("a", "h"), Host("b", "g")), (KIND, OTHER))
    pair = Cluster.uniform(KIND, 2)
    given_models = PodBandwidth([TableModel(pair), TableModel(mixed)], cluster)
    made = PodBandwidth(TableModel, cluster)
    rows = np.array(
        [[random.Random(i * 99 + g).random() < 0.5 for g in range(14)] for i in range(50)]
    )
    assert given_models.predict(rows).tolist() == made.predict(rows).tolist()
    alike = cluster_of("hg", "gh")
    assert PodBandwidth(TableModel(mixed), alike).local_of.tolist() == [0, 0]


def test_one_gpu_in_a_pod() -> None:
    """Beside other pods it has the limit of 1+1, or nothing as published; alone it has none."""

    class Sixty(TableModel):
        def value(self, pattern: tuple[int, ...]) -> int:
            return 60

    cluster = cluster_of("h", "h", "h")
    for way, value in (("nic", 30), ("zero", 0)):
        model = PodBandwidth(Sixty, cluster, 0.5, way)  # type: ignore[arg-type]
        assert model.of([0, 1, 2]) == value
        assert model.of([0]) == 0
        assert model.of([0, 1]) == 100
        assert model.of([0, 1, 4, 5]) == 25


def test_a_pod_without_any_limit() -> None:
    """No table within a host: the value is the most that there can be, and no overflow."""
    bare = HostType("bare", 2)
    cluster = Cluster(
        tuple(Host(f"n{i}", "bare", (f"p{i}",)) for i in range(2)), (bare,), ("pod",), pod="pod"
    )
    model = PodBandwidth(TableModel, cluster, 1.0)
    assert model.of([0, 1, 2, 3]) == MOST - 1


@pytest.mark.parametrize("factor", [0, -0.1, 1.0001, float("nan"), float("inf"), "0.7", None, True])
def test_wrong_factors(factor: Any) -> None:
    """The factor is in (0, 1]."""
    with pytest.raises(InputError, match="factor: expected a number above 0 and up to 1"):
        PodBandwidth(TableModel, cluster_of("h"), factor)


def test_hostile_arguments() -> None:
    """No pods, local models that do not fit, too many, none, or of two payloads."""
    cluster = cluster_of("h", "g")
    with pytest.raises(InputError, match="has no level of pods"):
        PodBandwidth(TableModel, cluster_of("h", pod=None))
    with pytest.raises(InputError, match="one_gpu_pod: expected 'nic' or 'zero'"):
        PodBandwidth(TableModel, cluster, 0.7, "none")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"there is no model for pod 'p1' \(1 x g\)"):
        PodBandwidth(TableModel(Cluster.uniform(KIND, 1)), cluster)
    both = [TableModel(Cluster.uniform(kind, 1)) for kind in (KIND, OTHER)]
    with pytest.raises(InputError, match="models 0 and 2 are for the same kind"):
        PodBandwidth([*both, TableModel(Cluster.uniform(KIND, 1))], cluster)
    with pytest.raises(InputError, match="no pod has the hosts of model 2"):
        PodBandwidth([*both, TableModel(Cluster.uniform(KIND, 3))], cluster)
    with pytest.raises(InputError, match="expected a CountModel, got str"):
        PodBandwidth(lambda pod: "model", cluster)  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match="the model made for pod 'p0' has other hosts"):
        PodBandwidth(lambda pod: both[1], cluster)
    both[1].payload = 16
    with pytest.raises(InputError, match="do not go together"):
        PodBandwidth(both, cluster)
    with pytest.raises(InputError, match="selection: expected booleans"):
        PodBandwidth(TableModel, cluster).predict(np.zeros((1, 3), np.bool_))


def test_pods_too_large_for_tables() -> None:
    """Predictions need no table; the search refuses with a sentence."""
    eight = HostType("e", 8, intra=IntraTable(8, [0, 0, *range(2, 9)]))
    hosts = tuple(Host(f"n{i}", "e", (f"p{i // 40}",)) for i in range(80))
    model = PodBandwidth(TableModel, Cluster(hosts, (eight,), ("pod",), pod="pod"))
    assert model.of(range(640)) >= 0
    with pytest.raises(InputError, match="a pod of 40 hosts has too many patterns"):
        _ = model.pod_tables
