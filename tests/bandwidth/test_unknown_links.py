"""Links and network cards that are unknown: hosts are never taken for worse than the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched.bandwidth import (
    BottleneckBandwidth,
    Cluster,
    ClusterState,
    Dispatcher,
    HostType,
    Measurement,
)
from optsched.bandwidth.topology.products import product_of

if TYPE_CHECKING:
    from program import Cli


SOLVERS = ("auto", "counts", "cpsat", "branch_and_bound")

NAMES: list[tuple[str, int, str | None, str]] = [
    ("NVIDIA-H100-80GB-HBM3-x8", 8, "NV18", "NVLink"), ("dgx-h100", 8, "NV18", "NVLink"),
    ("h100_sxm5", 8, "NV18", "NVLink"), ("H100 SXM", 4, None, "NVLink"),
    ("NVIDIA-H100-PCIe-x8", 8, None, "PCIe"), ("NVIDIA-H100-NVL-x4", 4, None, "PCIe"),
    ("h100", 8, None, "NVLink on SXM"), ("NVIDIA-H200-x8", 8, "NV18", "NVLink"),
    ("NVIDIA-H200-NVL-x8", 8, None, "PCIe"), ("h200", 8, None, "NVLink on SXM"),
    ("NVIDIA-H20-x8", 8, "NV18", "NVLink"), ("NVIDIA-H800-x8", 8, "NV8", "NVLink"),
    ("NVIDIA-B200-x8", 8, "NV18", "NVLink"), ("b200", 8, "NV18", "NVLink"),
    ("NVIDIA-GB200-x4", 4, "NV18", "NVLink, also"), ("gb200", 72, None, "NVLink, also"),
    ("NVIDIA-A100-SXM4-80GB-x8", 8, "NV12", "NVLink"), ("A100-SXM4-40GB-x16", 16, "NV12", "NVLink"),
    ("NVIDIA-A100-PCIE-40GB-x8", 8, None, "PCIe"), ("a100", 8, None, "NVLink on SXM"),
    ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-x8", 8, None, ""), ("Tesla-T4-SHARED-x8", 8, None, ""),
    ("Tesla-V100-SXM2-16GB-x8", 8, None, "NVLink, not all"), ("dgx2-v100", 16, "NV6", "NVLink"),
    ("Tesla-V100-PCIE-32GB-x4", 4, None, "PCIe"), ("NVIDIA-L40S-x8", 8, None, "PCIe"),
    ("Tesla-T4-x4", 4, None, "PCIe"), ("NVIDIA-A10G-x4", 4, None, "PCIe"), ("l4", 4, None, "PCIe"),
    ("NVIDIA-GeForce-RTX-4090-x8", 8, None, "PCIe"), ("NVIDIA-RTX-A6000-x4", 4, None, "PCIe, bri"),
    ("NVIDIA-RTX-6000-Ada-Generation-x4", 4, None, "PCIe"), ("NVIDIA-A40-x8", 8, None, "PCIe, bri"),
    ("AMD_Instinct_MI300X_OAM-x8", 8, "NV2", "XGMI"), ("mi250x", 8, None, "XGMI"),
    ("p3.16xlarge-x8", 8, None, "NVLink, not all"), ("p4d.24xlarge-x8", 8, "NV12", "NVLink"),
    ("p5en.48xlarge-x8", 8, "NV18", "NVLink"), ("p6-b200.48xlarge-x8", 8, "NV18", "NVLink"),
    ("g4dn.12xlarge-x4", 4, None, "PCIe"), ("g6e.48xlarge-x8", 8, None, "PCIe"),
    ("a2-highgpu-8g-x8", 8, "NV12", "NVLink"), ("a2-megagpu-16g-x16", 16, "NV12", "NVLink"),
    ("a2-highgpu-4g-x4", 4, None, "NVLink"), ("a3-highgpu-8g-x8", 8, "NV18", "NVLink"),
    ("a3-highgpu-2g-x2", 2, None, "PCIe, or part"), ("a4-highgpu-8g-x8", 8, "NV18", "NVLink"),
    ("g2-standard-48-x4", 4, None, "PCIe"), ("nvidia-h100-mega-80gb-x8", 8, "NV18", "NVLink"),
    ("nvidia-tesla-a100-x16", 16, "NV12", "NVLink"), ("nvidia-l4-x8", 8, None, "PCIe"),
    ("Standard_ND96asr_v4-x8", 8, "NV12", "NVLink"), ("Standard_ND40rs_v2", 8, None, "NVLink, not"),
    ("Standard_ND96isr_H100_v5-x8", 8, "NV18", "NVLink"),
    ("Standard_NC96ads_A100_v4-x4", 4, None, "PCIe"),
    ("Standard_NC80adis_H100_v5-x2", 2, None, "PCIe"), ("BM.GPU4.8-x8", 8, "NV12", "NVLink"),
    ("Standard_ND96isr_MI300X_v5", 8, "NV2", "XGMI"), ("BM.GPU.H100.8-x8", 8, "NV18", "NVLink"),
    ("gpu-x8", 8, None, ""), ("node-type-1", 8, None, ""), ("a1000", 8, None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gpus", "link", "way"), NAMES)
def test_products(name: str, gpus: int, link: str | None, way: str) -> None:
    """A name that tells all pairs gives links; others give at most a hint, and say so."""
    kind = HostType(name, gpus)
    assert (None if kind.links is None else kind.links[0][1]) == link
    assert kind.links is None or {len(set(row)) for row in kind.links} == {2}
    product = product_of(name)
    assert ("" if product is None else product.way).startswith(way) and bool(way) == bool(product)
    said = BottleneckBandwidth(Cluster.uniform(kind, 2)).assumed
    unknown = f"links within host type {name} are unknown: assumed at least as good as the network"
    assert any(text.startswith(unknown) for text in said) == (link is None)
    assert any("NVLink between hosts" in text for text in said) == ("gb200" in name.lower())
    given = HostType(name, gpus, tuple(
        tuple("X" if i == k else "SYS" for k in range(gpus)) for i in range(gpus)
    ))  # fmt: skip
    assert given.links is not None and given.links[0][1] == "SYS"  # what is given counts


def fewest(state: ClusterState, k: int) -> int:
    """Hosts that k GPUs need at least."""
    room = sorted(state.room.tolist(), reverse=True)
    return next(n for n in range(1, len(room) + 1) if sum(room[:n]) >= k)


def used(cluster: Cluster, gpus: Any) -> int:
    """Hosts of a choice."""
    return len({int(cluster.host_of[gpu]) for gpu in gpus})


@st.composite
def states(draw: st.DrawFn, kind: HostType, most: int = 4) -> ClusterState:
    """Some GPUs of up to four hosts of a type are free."""
    cluster = Cluster.uniform(kind, draw(st.integers(2, most)))
    every = range(cluster.n_gpus)
    return ClusterState.with_free(cluster, draw(st.sets(st.sampled_from(every), min_size=1)))


@st.composite
def kinds(draw: st.DrawFn) -> HostType:
    """Types of one to eight GPUs with cards of some or an unknown rate, and unknown links."""
    rate = draw(st.sampled_from([None, 0.0, 3.0, 12.5, 50.0, 100.0, 400.0]))
    return HostType("h", draw(st.integers(1, 8)), nics=draw(st.integers(0, 10)), nic_rate=rate)


@given(st.data())
def test_never_more_hosts_than_needed(data: st.DataObject) -> None:
    """With unknown links a choice takes the fewest hosts, for all solvers."""
    state = data.draw(states(data.draw(kinds())))
    model, k = BottleneckBandwidth(state.cluster), data.draw(st.integers(1, len(state.free)))
    found = Dispatcher(state.cluster, model).answer(state, k)
    assert used(state.cluster, found.gpus) == fewest(state, k)
    assert found.assumed == model.assumed
    problem = optsched.GpuPlacement(state, model, k)
    result = optsched.solve(problem, data.draw(st.sampled_from(SOLVERS)))
    if fewest(state, k) == 1 and state.cluster.type(0).nics and state.cluster.type(0).nic_rate:
        assert used(state.cluster, problem.chosen(result.schedule)) == 1  # type: ignore[arg-type]


@given(st.data())
def test_cards_of_unknown_rate_are_never_faster_than_hosts(data: st.DataObject) -> None:
    """Where the links are known and the rate of cards is not, one host is never given up."""
    ways = st.sampled_from(["SYS", "PHB", "PIX", "NV1", "NV2", "NV12"])
    n = data.draw(st.integers(2, 6))
    pair = {(i, k): data.draw(ways) for i in range(n) for k in range(i)}
    links = [["X" if i == k else pair[max(i, k), min(i, k)] for k in range(n)] for i in range(n)]
    kind = HostType("h", n, tuple(map(tuple, links)), nics=data.draw(st.integers(1, 8)))
    state = data.draw(states(kind))
    k = data.draw(st.integers(1, min(n, len(state.free))))
    model = BottleneckBandwidth(state.cluster)
    found = Dispatcher(state.cluster, model).answer(state, k)
    if fewest(state, k) == 1:
        assert used(state.cluster, found.gpus) == 1
    assert any("rate of network cards of host type h is unknown" in text for text in found.assumed)


def test_measurements_settle_it() -> None:
    """A run on one host ends the assumption, for its type; regret is known again."""
    cluster = Cluster.uniform(HostType("h", 4, nics=4, nic_rate=50.0), 3)
    bare = BottleneckBandwidth(cluster)
    state = ClusterState.idle(cluster)
    assert len(bare.assumed) == 1 and Dispatcher(cluster, bare).what_if(state, "n01").regret is None
    across = bare.update([Measurement((2, 2), 400_000_000)])  # above the line rate
    assert across.assumed == bare.assumed
    assert Dispatcher(cluster, across).choose(state, 4)[0] == (0, 1, 2, 3)
    inside = bare.update([Measurement((4,), 300_000_000)])
    assert inside.assumed == () and inside.of(range(4)) == 300_000_000
    what = Dispatcher(cluster, inside).what_if(state, "n01")
    assert what.regret is not None and what.assumed == ()


def test_commands_say_so(cli: Cli) -> None:
    """Import, dispatch in every way, and solve: one host, a warning, and the sentence."""
    labels, gpus = {"nvidia.com/gpu.product": "Tesla-T4"}, {"nvidia.com/gpu": "4"}
    nodes = [
        {
            "metadata": {"name": f"n{i}", "labels": labels},
            "status": {"capacity": gpus, "allocatable": gpus},
        }
        for i in range(1, 5)
    ]
    Path("nodes.json").write_text(json.dumps({"kind": "List", "items": nodes}))
    Path("s.json").write_text('{"format": "optsched.state/1", "free": "n1 n2 n3 n4", "jobs": []}')
    said = "links within host type Tesla-T4-x4 are unknown: assumed at least as good as the network"
    ran = cli(
        "gpus", "topology", "import", "--domains", "nodes.json", "--nics", "1", "-o", "c.json"
    )
    assert ran.code == 0 and f"warning: {said}" in ran.err
    assert f"note: {said}" in cli("gpus", "topology", "show", "c.json").out
    given = ("gpus", "choose", "--cluster", "c.json", "--state", "s.json", "--gpus", "4")
    plain, text = cli(*given), cli(*given, "--explain").out
    assert plain.out == "n1:0-3\n" and f"warning: {said}" in plain.err
    assert said in text and "assumed" in text.split("limited by")[1].splitlines()[0]
    answer = json.loads(cli(*given, "--json").out)
    assert answer["counts"] == {"n1": 4} and answer["assumed"][0].startswith(said)
    assert "regret" not in answer
    verbs = ("choose", 4), ("what_if", "n1"), ("gang", None), ("scores", 4)
    rows = [{"do": verb, "gpus": gpus} if gpus else {"do": verb, "jobs": {"x": 4}}
            for verb, gpus in verbs]  # fmt: skip
    cli.feed("".join(json.dumps(row) + "\n" for row in rows))
    ran = cli("stream", *given[2:6])
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line.get("assumed", [""])[0].startswith(said) for line in lines] == [True] * 3 + [False]
    assert lines[1]["regret"] is None and said in ran.err
    cluster = Cluster.read("c.json")
    state = ClusterState.read("s.json", cluster)
    optsched.GpuPlacement(state, BottleneckBandwidth(cluster), 4).write("p.subset.json")
    out = cli("solve", "p.subset.json").out
    assert "GPUs        n1:0-3\n" in out and f"assumed     {said}" in out
