"""Factors of levels: fitted to runs across a level, kept with the model, planned for, refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth import (
    BottleneckBandwidth,
    Cluster,
    Host,
    MeasuredBandwidth,
    Measurement,
    MeasurementTable,
    plan_measurements,
    read_model,
    synthetic,
    write_model,
)
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

KIND = synthetic.host_type("nvswitch")
LEVELS = ("rack", "spine", "leaf")
TRUTH = {"spine": 0.8, "rack": 0.5}


def cluster(factors: dict[str, float] | None = None) -> Cluster:
    """16 hosts, two a leaf, two leaves a spine, two spines a rack; a network joins the racks."""
    hosts = tuple(
        Host(f"n{h:02}", KIND.name, (f"r{h // 8}", f"s{h // 4}", f"l{h // 2}")) for h in range(16)
    )
    return Cluster(hosts, (KIND,), LEVELS, factors=factors or {})


def runs(
    truth: BottleneckBandwidth, across: dict[str, int], seed: int, noise: float = 0.03
) -> list[Measurement]:
    """Noisy runs of random GPUs on two hosts of the lowest level that holds both, per level."""
    rng = np.random.default_rng(seed)
    second = {"leaf": 1, "spine": 2, "rack": 4, "cluster": 8}  # differs from host 0 there
    found = []
    for level, n in across.items():
        for _ in range(n):
            counts = rng.integers(1, 9, 2).tolist()
            gpus = tuple(
                (truth.cluster.hosts[h].name, tuple(range(c)))
                for h, c in zip((0, second[level]), counts, strict=True)
            )
            chosen = [8 * h + i for h, c in zip((0, second[level]), counts, strict=True)
                      for i in range(c)]  # fmt: skip
            value = truth.of(chosen) * (1 + noise * rng.standard_normal())
            found.append(Measurement(tuple(counts), round(value), gpus))
    return found


@few_examples
@given(st.integers(0, 10**6))
def test_factors_are_found_again(seed: int) -> None:
    """Five runs a level with 3 % noise: near the truth, above runs in leaves or without."""
    truth = BottleneckBandwidth(cluster({**TRUTH, "cluster": 0.5}))
    for leaves in (5, 0):
        table = runs(truth, {"leaf": leaves, "spine": 5, "rack": 5}, seed)
        model = BottleneckBandwidth(cluster()).fit(MeasurementTable(tuple(table)))
        assert model.cluster.factors == {
            fit.level: fit.factor for fit in model.level_fits if fit.factor is not None
        }
        for fit in model.level_fits[:2]:
            assert fit.factor == pytest.approx(TRUTH[fit.level], rel=0.2)
            assert fit.runs == 5
            assert fit.lowest <= fit.factor <= fit.highest or fit.factor == 1
        assert model.level_fits[2][:3] == ("cluster", 0, None)


@few_examples
@given(st.lists(st.integers(1, 2_000), min_size=12, max_size=12), st.integers(0, 9))
def test_factors_never_rise(permille: list[int], given_at: int) -> None:
    """Nor exceed 1, whatever is measured; given ones are kept, fewer than three runs fit none."""
    line = BottleneckBandwidth(cluster())
    table = runs(line, {"leaf": 1, "spine": 4, "rack": 4, "cluster": 3}, given_at, 0.0)
    table = [
        replace(row, value=row.value * share // 1_000)
        for row, share in zip(table, permille, strict=True)
    ]
    known = {"rack": 0.25} if given_at < 3 else {}
    model = BottleneckBandwidth(cluster(known)).fit(MeasurementTable(tuple(table)))
    found = [1.0, *(model.cluster.factors[level] for level in ("spine", "rack", "cluster"))]
    if known:
        assert found[2] == 0.25 and [fit.level for fit in model.level_fits] == ["spine", "cluster"]
        found[2] = min(found[1], 0.25)
    assert found == sorted(found, reverse=True) and min(found) > 0
    few = BottleneckBandwidth(cluster()).fit(MeasurementTable(tuple(table[:3])))
    assert not few.cluster.factors and few.level_fits[0][:3] == ("spine", 2, None)


def test_measured_sets_keep_their_value() -> None:
    """A limit learnt across a level gives the run back, and more within the lower level."""
    given = cluster({"spine": 0.7})
    row = Measurement((3, 2), 40_000_001, (("n00", (0, 1, 2)), ("n02", (0, 1))))
    model = BottleneckBandwidth(given).fit(MeasurementTable((row,)))
    measured = MeasuredBandwidth(given, MeasurementTable((row,)))
    assert model.of([0, 1, 2, 16, 17]) == measured.of([0, 1, 2, 16, 17]) == row.value
    assert model.of([0, 1, 2, 8, 9]) == round(row.value / 0.7)


def test_documents_and_updates(tmp_path: Path) -> None:
    """Fitted factors come back with the model, also for the cluster that had none."""
    truth = BottleneckBandwidth(cluster({**TRUTH, "cluster": 0.5}))
    table = runs(truth, {"leaf": 5, "spine": 5, "rack": 2}, 4)
    model = BottleneckBandwidth(cluster()).fit(MeasurementTable(tuple(table)))
    write_model(model, tmp_path / "m.json")
    rng = np.random.default_rng(0)
    chosen = rng.random((300, 128)) < rng.uniform(0, 0.3, (300, 1))
    for known in (None, cluster(), model.cluster):
        read = read_model(tmp_path / "m.json", known)
        assert read.cluster == model.cluster != cluster()
        assert read.predict(chosen).tolist() == model.predict(chosen).tolist()
    with pytest.raises(InputError, match="cluster: is <Cluster"):
        read_model(tmp_path / "m.json", cluster({"spine": 0.123}))
    more = runs(truth, {"rack": 3}, 5)
    assert set(model.update(more).cluster.factors) == {"spine", "rack"}
    assert model.fit(MeasurementTable(tuple(table[:5]))).cluster == cluster()


def test_runs_across_fabrics_are_refused() -> None:
    """Where nothing joins the domains of the top level; with a factor for the cluster it does."""
    hosts = tuple(Host(f"n{h}", KIND.name, (f"s{h // 2}",)) for h in range(4))
    apart = Cluster(hosts, (KIND,), ("spine",))
    row = Measurement((1, 1), 9_000_000, (("n1", (0,)), ("n2", (0,))))
    with pytest.raises(InputError, match=r"measurements\[0\]\.gpus: n1 and n2 are in two domains"):
        BottleneckBandwidth(apart).fit(MeasurementTable((row,)))
    joined = BottleneckBandwidth(replace(apart, factors={"cluster": 0.5}))
    assert joined.fit(MeasurementTable((row,))).of([8, 16]) == row.value


def test_plans_cross_levels_without_a_factor() -> None:
    """Three runs each on top of the budget; the others stay in a leaf as far as they fit."""
    plan = plan_measurements(BottleneckBandwidth(cluster({"rack": 0.5})), 6)
    assert len(plan.patterns) == 6 + 2 * 3
    domain = {host.name: host.domains for host in cluster().hosts}
    for run in plan.runs[:6]:
        assert len({domain[host][1:] for host, _ in run}) == 1 or len(run) > 2
    for run, level in zip(plan.runs[6:], [1] * 3 + [None] * 3, strict=True):
        below = {domain[host][: None if level is None else level + 2] for host, _ in run}
        assert len(below) > 1
        assert level is None or len({domain[host][level] for host, _ in run}) == 1
    hosts = {"n00": (0,), "n09": (0,)}
    assert all(len({domain[h][0] for h, _ in run}) == 2 for run in plan.runs[9:]), hosts
