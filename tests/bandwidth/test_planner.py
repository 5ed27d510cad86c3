"""What to measure: classes of subsets, patterns, and the script with its logs."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth import BottleneckBandwidth, Cluster, Host, HostType, synthetic
from optsched.bandwidth.measure.planner import Plan, plan_measurements, subset_classes
from optsched.bandwidth.models.gaussian import GaussianProcess
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable
from optsched.bandwidth.models.patterns import automaton
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = synthetic.cluster("nvswitch", 3)
TABLE = synthetic.network(CLUSTER)
ENTRIES = {row.pattern: row.value for row in TABLE}


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
def test_subsets_with_the_same_links_are_alike(links_given: list[str]) -> None:
    """And no others, of five GPUs with any links."""
    links = [["X"] * 5 for _ in range(5)]
    for (i, k), link in zip(itertools.combinations(range(5), 2), links_given, strict=True):
        links[i][k] = links[k][i] = link
    kind = HostType("h", 5, tuple(tuple(row) for row in links))
    found = [[links_of(kind, int(mask)) for mask in alike] for alike in subset_classes(kind)]
    assert sum(map(len, found)) == 26
    assert all(rows == [rows[0]] * len(rows) for rows in found)
    assert len({str(rows[0]) for rows in found}) == len(found)


@pytest.mark.parametrize("kind", [
    HostType("bare", 8, synthetic.host_type("nvlink_pairs").links, nics=2), HostType("unknown", 6),
])  # fmt: skip
def test_one_of_every_class_where_nothing_is_known(kind: HostType) -> None:
    """None for types with a table, nor for classes of which a subset is measured."""
    cluster = Cluster.uniform(kind, 2)
    plan = plan_measurements(BottleneckBandwidth(cluster), 0)
    assert plan.patterns == ()
    masks = [sum(1 << i for i in ids) for ((_, ids),) in plan.runs]
    assert masks == [int(alike[0]) for alike in subset_classes(kind)]
    rows = [Measurement((len(run[0][1]),), 20_000_000, run) for run in plan.runs]
    learnt = BottleneckBandwidth(cluster).fit(MeasurementTable(tuple(rows[2:])))
    assert plan_measurements(learnt, 0).runs == plan.runs[:2]
    assert plan_measurements(BottleneckBandwidth(CLUSTER), 0).runs == ()


# patterns across hosts


def test_a_plan_holds_distinct_unmeasured_patterns_within_its_budget() -> None:
    """Each plan begins as a shorter one; what is measured, or can never bind, is left out."""
    known = measure(((4, 4), (8, 8), (2, 2, 2)))
    model = BottleneckBandwidth(CLUSTER).fit(known)
    patterns = plan_measurements(model, 12).patterns
    assert len(patterns) == len(set(patterns)) == 12
    assert not set(patterns) & {row.pattern for row in known}
    assert plan_measurements(model, 5).patterns == patterns[:5]
    rows = automaton(3, 8).patterns
    every = {tuple(c for c in row if c) for row in rows.tolist() if row[1]}
    assert set(plan_measurements(model, 1_000).patterns) == every - {row.pattern for row in known}
    slow = synthetic.host_type("pcie")
    fast = HostType("fast", 8, slow.links, nics=8, nic_rate=300.0, intra=slow.intra)
    left = plan_measurements(BottleneckBandwidth(Cluster.uniform(fast, 3)), 1_000).patterns
    assert 0 < len(left) < len(every) and all(min(pattern) <= 2 for pattern in left)
    assert plan_measurements(BottleneckBandwidth(Cluster.uniform(slow, 1)), 10).runs == ()


def test_each_run_narrows_the_weighted_intervals_most() -> None:
    """By trying every candidate, after the runs before it, whatever they showed."""
    rng = np.random.default_rng(1)
    x, trend = rng.uniform(0, 2, (14, 2)), rng.uniform(-1, 1, (14, 1))
    weight = rng.uniform(0, 1, 14)
    runs = [0, 1]
    found = GaussianProcess(x[runs], trend[runs], np.zeros(2)).informative(x, trend, weight, 6)
    for i, row in enumerate(found):
        left = {}
        for one in set(range(14)) - set(found[:i]):
            known = [*runs, one]
            process = GaussianProcess(x[known], trend[known], rng.normal(size=len(known)))
            deviation = process.predict(x, trend)[1] / process.inflation
            left[one] = weight @ deviation**2
        assert left[row] == pytest.approx(min(left.values()), rel=1e-6)
        runs.append(row)


def test_what_cannot_be_planned_is_refused() -> None:
    """With the field and a way out."""
    with pytest.raises(InputError, match="model: expected one that learns"):
        plan_measurements(CLUSTER, 5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="budget: expected an integer"):
        plan_measurements(BottleneckBandwidth(CLUSTER), -1)


# the script


def test_runs_use_the_fastest_subsets_of_distinct_hosts() -> None:
    """So that the network, not a host, shows; of a clique its machines are addressed."""
    mixed = synthetic.cluster(["pcie", "nvswitch"], 4)
    plan = plan_measurements(BottleneckBandwidth(mixed), 30)
    assert {len(run) for run in plan.runs} >= {2, 3}
    for run in plan.runs:
        counts = [len(ids) for _, ids in run]
        assert counts == sorted(counts, reverse=True)
        assert len({host for host, _ in run}) == len(run)
        large = [mixed.host_index(host) for host, ids in run[:2] if len(ids) > 1]
        assert {mixed.type(host).name for host in large} <= {"nvswitch"}
        for host, ids in run:
            table = mixed.type(mixed.host_index(host)).intra
            assert table is not None
            assert table.of(sum(1 << i for i in ids)) == table.by_count[len(ids)]
    rack = HostType("rack", 4, tray=2)
    clique = Cluster((Host("r", "rack", (), ("t1", "t2")),), (rack,))
    script = Plan(clique, ((("r", (0, 1, 2)),),)).script()
    assert " r:0-2 -np 2 -host t1:2 -x CUDA_VISIBLE_DEVICES=0,1 " in script
    assert " : -np 1 -host t2:1 -x CUDA_VISIBLE_DEVICES=0 " in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_runs_resumes_and_its_logs_read_back(tmp_path: Path) -> None:
    """With a stand-in for mpirun that writes a log, and fails for one run at first."""
    bare = Cluster.uniform(HostType("bare", 2, nics=2), 2)
    pairs = (("n01", (0, 1)), ("n02", (0,))), (("n01", (0,)), ("n02", (0,)))
    plan = Plan(bare, ((("n01", (0, 1)),), *pairs), "all_reduce", 1 << 20)
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
