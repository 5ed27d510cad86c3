"""What to measure: classes of subsets, wanted patterns, the script, and learning with feedback."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bandwidth.measured_data import VARIABLE, load_measured
from optsched.bandwidth import synthetic
from optsched.bandwidth.measure.planner import (
    Plan,
    learn,
    plan_measurements,
    plan_next,
    subset_classes,
)
from optsched.bandwidth.measure.value_of_information import (
    Scenario,
    every_pattern,
    patterns_that_may_bind,
    simulated,
)
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.contention import demands, share
from optsched.bandwidth.models.measured import MeasuredBandwidth
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable
from optsched.bandwidth.search.ask import ask
from optsched.bandwidth.topology.cluster import Cluster, HostType
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = synthetic.cluster("nvswitch", 3)
TABLE = synthetic.network(CLUSTER)
ENTRIES = {row.pattern: row.value for row in TABLE}
TRUE = MeasuredBandwidth(CLUSTER, TABLE)


def measure(patterns: tuple[tuple[int, ...], ...]) -> MeasurementTable:
    """Runs on the synthetic network."""
    rows = tuple(Measurement(pattern, ENTRIES[pattern]) for pattern in patterns)
    return MeasurementTable(rows, TABLE.op, TABLE.payload)


# subsets of a host


def links_of(kind: HostType, mask: int) -> list[list[str]]:
    """Of every GPU of a subset its links to the others of it, sorted both ways."""
    ids = [i for i in range(kind.gpus) if mask >> i & 1]
    return sorted(sorted(kind.links[i][k] for k in ids if k != i) for i in ids)


@given(st.lists(st.sampled_from(["SYS", "NV1", "NV2"]), min_size=10, max_size=10))
def test_subsets_with_the_same_links_are_alike(words: list[str]) -> None:
    """And no others, of five GPUs with any links."""
    links = [["X"] * 5 for _ in range(5)]
    for (i, k), word in zip(itertools.combinations(range(5), 2), words, strict=True):
        links[i][k] = links[k][i] = word
    kind = HostType("h", 5, tuple(tuple(row) for row in links))
    found = [[links_of(kind, mask) for mask in alike] for alike in subset_classes(kind)]
    assert all(rows == [rows[0]] * len(rows) for rows in found)
    assert len({str(rows[0]) for rows in found}) == len(found)


@pytest.mark.parametrize("kind", ["nvswitch", "cube_mesh", "nvlink_pairs", "pcie"])
def test_classes_of_eight_gpus(kind: str) -> None:
    """They part the 247 subsets; behind a switch all subsets of a size are alike."""
    classes = subset_classes(synthetic.host_type(kind))
    masks = [mask for alike in classes for mask in alike]
    assert sorted(masks) == [mask for mask in range(256) if mask.bit_count() >= 2]
    assert all(len({mask.bit_count() for mask in alike}) == 1 for alike in classes)
    assert (len(classes) == 7) == (kind == "nvswitch")


@pytest.mark.skipif(VARIABLE not in os.environ, reason="needs the published measurements")
def test_classes_of_the_measured_hosts() -> None:
    """7 behind a switch; 19 and 26 over PCIe with and without pairs; 50 in a cube mesh."""
    data = load_measured()
    kinds = {kind.name: kind for kind in data.het_4mix().types}
    found = {name: len(subset_classes(kinds[name])) for name in ("A6000", "4090", "V100")}
    assert found == {"A6000": 19, "4090": 26, "V100": 50}
    assert len(subset_classes(data.h100().types[0])) == 7


def test_sixteen_gpus_behind_a_switch() -> None:
    """2^16 subsets, 15 classes; hosts of unknown links and large ones stand by count."""
    links = tuple(tuple("X" if i == k else "NV12" for k in range(16)) for i in range(16))
    assert len(subset_classes(HostType("h", 16, links))) == 15
    assert subset_classes(HostType("h", 3)) == ((0b11,), (0b111,))
    assert len(subset_classes(HostType("h", 72))) == 71


def test_two_of_every_class_where_nothing_is_known() -> None:
    """On two hosts where there are two; none for types with a table."""
    bare = HostType("bare", 8, synthetic.host_type("nvlink_pairs").links, nics=2)
    cluster = Cluster.uniform(bare, 2)
    plan = plan_measurements(cluster, BottleneckBandwidth(cluster), 0)
    assert plan.patterns == ()
    times = Counter()
    for _, ids in plan.subsets:
        mask = sum(1 << i for i in ids)
        times[next(i for i, alike in enumerate(subset_classes(bare)) if mask in alike)] += 1
    assert len(times) == len(subset_classes(bare))
    assert set(times.values()) == {2}
    assert {host for host, _ in plan.subsets} == {"n01", "n02"}
    assert len(set(plan.subsets)) == len(plan.subsets)
    assert plan_measurements(CLUSTER, BottleneckBandwidth(CLUSTER), 0).subsets == ()


# patterns across hosts


@pytest.mark.slow
def test_a_plan_holds_distinct_unmeasured_patterns_within_its_budget() -> None:
    """And is the same for the same seed."""
    known = measure(((4, 4), (8, 8), (2, 2, 2)))
    model = BottleneckBandwidth(CLUSTER).fit(known)
    asked = simulated(CLUSTER, 30)
    plan = plan_measurements(CLUSTER, model, 12, asked, seed=2)
    assert len(plan.patterns) == len(set(plan.patterns)) == 12
    assert not set(plan.patterns) & {row.pattern for row in known}
    assert set(plan.patterns) <= {tuple(c for c in row if c) for row in every_pattern(CLUSTER)}
    assert sum(map(len, plan.rounds)) == 12
    assert plan_measurements(CLUSTER, model, 12, asked, seed=2).patterns == plan.patterns
    assert plan_measurements(CLUSTER, model, 12, asked, seed=3).patterns != plan.patterns
    assert plan_measurements(CLUSTER, model, 3).patterns != plan.patterns[:3]


def test_a_budget_beyond_all_patterns_ends_with_them() -> None:
    """Everything that may bind is planned once."""
    small = synthetic.cluster("pcie", 2)
    model = BottleneckBandwidth(small)
    plan = plan_measurements(small, model, 1_000)
    assert sorted(plan.patterns) == sorted(patterns_that_may_bind(model))


def test_patterns_that_can_never_bind_are_left_out() -> None:
    """A network far above what hosts over PCIe can use needs no run."""
    slow = synthetic.host_type("pcie")
    fast = HostType("fast", 8, slow.links, nics=8, nic_rate=300.0, intra=slow.intra)
    cluster = Cluster.uniform(fast, 3)
    left = patterns_that_may_bind(BottleneckBandwidth(cluster))
    assert 0 < len(left) < len(every_pattern(cluster))
    assert all(min(pattern) <= 2 for pattern in left)
    host = Cluster.uniform(slow, 1)
    assert plan_measurements(host, BottleneckBandwidth(host), 10).patterns == ()


def test_what_requests_need_comes_first() -> None:
    """One request that only 5+3 can answer: that pattern, and the joint ones with a running job."""
    free = [*range(5), *range(8, 11)]
    job = [5, 6, 11]
    down = [g for g in range(24) if g not in free and g not in job]
    state = ClusterState(CLUSTER, tuple(free), (), tuple(sorted(down + job)))
    model = BottleneckBandwidth(CLUSTER)
    assert plan_next(CLUSTER, model, 1, (Scenario(state, 8),)) == ((5, 3),)
    running = ClusterState.parse(
        CLUSTER, free="n01:0-4 n02:0-2", jobs={"a": "n01:5,6 n02:3"}, down="n01:7 n02:4-7 n03"
    )
    asked = (Scenario(running, 8),)
    found = plan_next(CLUSTER, model, 3, asked)
    assert set(found) == {(5, 3), (7, 4), (2, 1)}
    idle = plan_next(CLUSTER, model, 1, (Scenario(running, 8, heavy=False),))
    assert idle == ((5, 3),)
    plan = plan_measurements(CLUSTER, model, 1, [(running, 8)])
    assert plan.patterns[0] in found


def efficiency(model: BottleneckBandwidth, scenarios: tuple[Scenario, ...]) -> list[float]:
    """GBE of a model's choices on the true network."""
    found = []
    mine, true = model.tables(), TRUE.tables()
    assert mine is not None
    assert true is not None
    for scenario in scenarios:
        state, profile = scenario.state, "heavy" if scenario.heavy else "idle"
        real = demands(TRUE, state, profile)  # type: ignore[arg-type]
        thought = demands(model, state, profile)  # type: ignore[arg-type]
        best = ask(true, state, real, scenario.gpus)
        choice = ask(mine, state, thought, scenario.gpus)
        assert best is not None
        assert choice is not None
        value = share(TRUE, state, choice.gpus, real).value
        found.append(value / best.value if best.value else 1.0)
    return found


@pytest.mark.slow
def test_learning_by_plan_makes_choices_right() -> None:
    """Planned runs leave less than a third of the prior's loss, and beat as many random ones."""
    scenarios = simulated(CLUSTER, 250, seed=77)
    prior = BottleneckBandwidth(CLUSTER)
    planned = learn(CLUSTER, prior, measure, 60)
    assert len(planned.table) == 60
    rng = np.random.default_rng(0)
    rows = every_pattern(CLUSTER)
    random_ones = tuple(
        tuple(int(c) for c in row if c) for row in rows[rng.permutation(len(rows))[:60]]
    )
    loss = [
        1 - np.mean(efficiency(model, scenarios))
        for model in (prior, planned, prior.update(measure(random_ones)))
    ]
    assert loss[1] < loss[0] / 3
    assert loss[1] < loss[2]


def test_random_runs_are_never_worse_than_none() -> None:
    """What was measured by chance may not lead astray: states of all kinds, several seeds."""
    scenarios = simulated(CLUSTER, 150, seed=78)
    prior = BottleneckBandwidth(CLUSTER)
    without = np.mean(efficiency(prior, scenarios))
    rows = every_pattern(CLUSTER)
    for seed in range(5):
        some = rows[np.random.default_rng(seed).permutation(len(rows))[:110]]
        table = measure(tuple(tuple(int(c) for c in row if c) for row in some))
        assert np.mean(efficiency(prior.fit(table), scenarios)) >= without, seed


def test_everything_measured_is_exact() -> None:
    """Then choices are optimal, and nothing is left to plan."""
    full = BottleneckBandwidth(CLUSTER).update(measure(tuple(p for p in ENTRIES if len(p) > 1)))
    assert min(efficiency(full, simulated(CLUSTER, 60, seed=5))) > 0.995
    assert plan_next(CLUSTER, full, 10) == ()
    assert learn(CLUSTER, full, measure, 10) is full


def test_simulated_requests_are_of_all_kinds() -> None:
    """Fragmented and packed, idle and heavy, few and many GPUs; seeded."""
    scenarios = simulated(CLUSTER, 201, 1)
    assert len(scenarios) == 201
    assert all(2 <= s.gpus <= len(s.state.free) for s in scenarios)
    assert {s.heavy for s in scenarios} == {True, False}
    broken = [int(((s.state.room > 0) & (s.state.room < 8)).sum()) for s in scenarios]
    assert np.mean(broken[2::3]) < np.mean(broken[::3])
    assert max(len(s.state.jobs) for s in scenarios[::3]) == 1
    assert max(len(s.state.jobs) for s in scenarios[1::3]) > 1
    again = simulated(CLUSTER, 201, 1)
    assert [s.state for s in again] == [s.state for s in scenarios]


# refusals


def test_what_cannot_be_planned_is_refused() -> None:
    """With the field and a way out."""
    model = BottleneckBandwidth(CLUSTER)
    other = synthetic.cluster("pcie", 2)
    with pytest.raises(InputError, match="model: is of <Cluster"):
        plan_measurements(other, model, 5)
    with pytest.raises(InputError, match="budget: expected an integer"):
        plan_measurements(CLUSTER, model, -1)
    with pytest.raises(InputError, match=r"scenarios\[0\]: expected a state and a number"):
        plan_measurements(CLUSTER, model, 5, [(3, 3)])  # type: ignore[list-item]
    with pytest.raises(InputError, match="scenarios: expected at least one"):
        plan_measurements(CLUSTER, model, 5, [])
    huge = Cluster.uniform(HostType("h", 8), 128)
    with pytest.raises(InputError, match="plan for a part of the cluster"):
        plan_measurements(huge, BottleneckBandwidth(huge), 5)


# the script


def test_runs_use_the_fastest_subsets_of_distinct_hosts() -> None:
    """So that the network, not a host, shows."""
    mixed = synthetic.cluster(["pcie", "nvswitch"], 4)
    plan = Plan(mixed, (), (((3, 2, 1),),))
    placed = plan.placement((3, 2, 1))
    assert [len(ids) for _, ids in placed] == [3, 2, 1]
    assert [mixed.type(mixed.host_index(host)).name for host, _ in placed[:2]] == ["nvswitch"] * 2
    assert len({host for host, _ in placed}) == 3
    for host, ids in placed[:2]:
        table = mixed.type(mixed.host_index(host)).intra
        assert table is not None
        assert table.of(sum(1 << i for i in ids)) == table.by_count[len(ids)]
    with pytest.raises(InputError, match=r"9\+1 does not fit"):
        plan.placement((9, 1))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_runs_resumes_and_its_logs_read_back(tmp_path: Path) -> None:
    """With a stand-in for mpirun that writes a log, and fails for one run at first."""
    bare = Cluster.uniform(HostType("bare", 2, nics=2), 2)
    plan = Plan(bare, (("n01", (0, 1)),), (((2, 1),), ((1, 1),)), "all_reduce", 1 << 20)
    (tmp_path / "plan.sh").write_text(plan.script())
    fake = tmp_path / "mpirun"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    environment = {**os.environ, "MPIRUN": str(fake), "FAIL": "n02:1"}

    def go() -> str:
        done = subprocess.run(
            ["bash", "plan.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        return done.stdout + done.stderr

    first = go()
    assert first.count("failed") == 2
    assert len(list((tmp_path / "logs").glob("*.log"))) == 1
    environment["FAIL"] = "nothing"
    second = go()
    assert second.count("done before") == 1
    assert len(list((tmp_path / "logs").glob("*.log"))) == 3
    assert go().count("done before") == 3
    table = MeasurementTable.from_nccl_logs(str(tmp_path / "logs" / "*.log"), payload=1 << 20)
    measured = {row.pattern: row.gpus for row in table}
    assert measured == {
        (2,): (("n01", (0, 1)),),
        (2, 1): (("n01", (0, 1)), ("n02", (0,))),
        (1, 1): (("n01", (0,)), ("n02", (0,))),
    }
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 5
    assert all("-b 1048576 -e 1048576" in call and "all_reduce_perf" in call for call in calls)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_names_in_the_script_are_quoted_and_short(tmp_path: Path) -> None:
    """Folders with spaces and dollars, and runs over a hundred hosts."""
    wide = Cluster.uniform(HostType("bare", 2), 100)
    patterns = (((2,) * 100,), ((2,) * 99 + (1,),))
    plan = Plan(wide, (), patterns, "all_reduce", 1 << 20)
    (tmp_path / "plan.sh").write_text(plan.script("my $(touch broken) logs"))
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    subprocess.run(
        ["bash", "plan.sh"], cwd=tmp_path, env={**os.environ, "MPIRUN": str(fake)}, check=True,
        capture_output=True,
    )  # fmt: skip
    assert not (tmp_path / "broken").exists()
    assert len(list((tmp_path / "my $(touch broken) logs").glob("*.log"))) == 2
    with pytest.raises(InputError, match="logs: expected the name of a folder"):
        plan.script("a\nb")


FAKE = r"""#!/usr/bin/env bash
# writes what nccl-tests would: the ranks of all contexts, one row of results
echo "$@" >> "$(dirname "$0")/calls"
case "$*" in *"$FAIL"*) exit 1 ;; esac
echo "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1048576 step: 1048576(bytes) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0"
echo "#"
echo "# Using devices"
rank=0
previous=
for word in "$@"; do
  if [ "$previous" = -host ]; then
    for ((i = 0; i < ${word#*:}; i++)); do
      printf '#  Rank %2d Group  0 Pid %6d on %10s device %2d [0x%02x] NVIDIA H100\n' \
        $rank $((1000 + rank)) "${word%:*}" $i $((16 * i + 1))
      rank=$((rank + 1))
    done
  fi
  previous=$word
done
echo "#                                                              out-of-place                       in-place"
echo "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"
echo "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"
ALG=10.00
BUS=$(awk "BEGIN { printf \"%.2f\", $ALG * 2 * ($rank - 1) / $rank }")
echo "     1048576        262144     float     sum      -1   104.86   $ALG   $BUS      0   104.86   $ALG   $BUS      0"
echo "# Out of bounds values : 0 OK"
echo "# Avg bus bandwidth    : $BUS"
"""  # noqa: E501
