"""Factors, uplinks, rails and NVLink cliques of a cluster: given, imported, kept, printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optsched.bandwidth import (
    BottleneckBandwidth,
    ClusterState,
    Dispatcher,
    Measurement,
    MeasurementTable,
)
from optsched.bandwidth.models.fallback import assumptions
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.domain_trees import uplink_rates
from optsched.bandwidth.topology.levels import WHOLE
from optsched.bandwidth.topology.ranks import hostfile, visible_devices
from optsched.bandwidth.topology.rates import KILOBYTES, MOST
from optsched.errors import InputError

if TYPE_CHECKING:
    from program import Cli


def leaves(sizes: list[int], rates: list[float]) -> Cluster:
    """Leaves of so many hosts, each of a type with one card of this rate."""
    kinds = tuple(HostType(f"k{i}", 2, nics=2, nic_rate=rate) for i, rate in enumerate(rates))
    hosts = [
        Host(f"n{leaf}-{i}", kinds[leaf].name, ("s", f"l{leaf}"))
        for leaf, size in enumerate(sizes)
        for i in range(size)
    ]
    return Cluster(tuple(hosts), kinds, ("spine", "leaf"))


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([12.5, 25.0, 50.0])), min_size=1,
                max_size=4), st.sampled_from([1.0, 1.5, 2.0, 4.0]))  # fmt: skip
def test_oversubscription(parts: list[tuple[int, float]], over: float) -> None:
    """The least of a level's domains counts; as GB/s it says the same."""
    cluster = leaves([size for size, _ in parts], [rate for _, rate in parts])
    bring = [size * 2 * rate for size, rate in parts]
    found = uplink_rates(cluster, {"leaf": f"{over:g}:1", "spine": f"{over:g}:1"})
    assert found == {"leaf": min(bring) / over, "spine": sum(bring) / over}
    assert uplink_rates(cluster, {"leaf": f"{found['leaf']:.6f}"})["leaf"] == pytest.approx(
        found["leaf"]
    )
    same = Cluster(cluster.hosts, cluster.types, cluster.levels, uplinks=found, factors={"leaf": 1})
    levels = same.network_levels
    rates = [MOST, *(min(MOST, round(found[key] * KILOBYTES)) for key in ("leaf", "spine"))]
    assert levels.uplink.tolist() == np.minimum.accumulate(rates).tolist()
    assert (levels.factor == WHOLE).all()


BAD: list[tuple[dict[str, str | float], str]] = [
    ({"rack": "2:1"}, r"uplinks\[rack\]: expected one of the levels spine, leaf"),
    ({"host": "2:1"}, r"uplinks\[host\]: expected one of the levels"),
    ({"leaf": "2:3"}, r"uplinks\[leaf\]: expected 2:1, or GB/s such as 400, got '2:3'"),
    ({"leaf": "-4"}, r"uplinks\[leaf\]: expected 2:1, or GB/s"),
    ({"leaf": "0.5:1"}, r"uplinks\[leaf\]: expected an oversubscription \(o:1\) >= 1, got 0.5"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(BAD)))
def test_uplinks_refused(at: int) -> None:
    """With the level and the value; unknown rates with the way out."""
    bad, message = BAD[at]
    with pytest.raises(InputError, match=message):
        uplink_rates(leaves([2, 2], [25.0, 50.0]), bad)
    kind = HostType("h", 2)
    unknown = Cluster((Host("a", "h", ("l",)), Host("b", "h", ("m",))), (kind,), ("leaf",))
    with pytest.raises(InputError, match=r"unknown rate for host type h: give it \(--nic-rate"):
        uplink_rates(unknown, {"leaf": "2:1"})
    assert uplink_rates(unknown, {"leaf": 9000.0}) == {"leaf": 9000.0}  # above any card: no limit


def test_commands(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors and uplinks go into the document, and are printed by `show` and `check`."""
    monkeypatch.setenv("COLUMNS", "160")
    Path("topo.txt").write_text("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\n")
    Path("t.conf").write_text(
        "SwitchName=s0 Nodes=n[1-2]\nSwitchName=s1 Nodes=n[3-4]\nSwitchName=t Switches=s[0-1]\n"
    )
    words = ("gpus", "topology", "import", "--topo", "h=topo.txt", "--hosts", "n[1-4]=h",
             "--domains", "t.conf", "--nics", 2, "--nic-rate", 50, "-o", "c.json")  # fmt: skip
    cli(*words, "--uplink", "leaf=2:1", "--factor", "spine=0.8", "--factor", "leaf=0.9")
    cluster = Cluster.read("c.json")
    assert cluster.factors == {"spine": 0.8, "leaf": 0.9} and cluster.uplinks == {"leaf": 100.0}
    bare = Cluster(cluster.hosts, cluster.types, cluster.levels)
    assert bare != cluster and bare.sha256 != cluster.sha256
    assert cluster == Cluster.from_files(
        {"h": "topo.txt"}, {"n[1-4]": "h"}, domains="t.conf", nics=2, nic_rate=50.0
    ).limited({"spine": 0.8, "leaf": 0.9}, {"leaf": "2:1"}, rails=False)
    rows = [line.split() for line in cli("gpus", "topology", "show", "c.json").out.splitlines()]
    assert ["spine", "t", "4", "8", "0.8"] in rows
    assert ["leaf", "s0", "2", "4", "0.9", "100", "GB/s"] in rows and ["s1", "2", "4"] in rows
    notes = cli("gpus", "topology", "show", "c.json").out
    assert "leaf: uplinks of 100 GB/s a domain do not limit a single job" in notes
    assert "jobs that share uplinks are not modelled" in notes and "spine: factor 0.8" in notes
    assert "factors[leaf]: expected a share" in cli.refused(*words, "--factor", "leaf=1/2")


def node(name: str, gpus: int, clique: str, **labels: str) -> Any:
    """A node of a GB200 rack, as kubectl prints it."""
    labels |= {"nvidia.com/gpu.product": "NVIDIA-GB200", "nvidia.com/gpu.clique": clique}
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"capacity": {"nvidia.com/gpu": str(gpus)}},
    }


def imported(folder: Path, nodes: list[Any], *levels: str) -> Cluster:
    """The cluster of a list of nodes."""
    (folder / "nodes.json").write_text(json.dumps({"items": nodes}))
    return Cluster.from_files(
        {}, {}, domains=folder / "nodes.json", levels=levels, nics=4, nic_rate=50.0
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["", "0000-00.0", "u1.1", "u1.2", "u2.1"]), min_size=1,
                max_size=12), st.data())  # fmt: skip
def test_cliques(tmp_path: Path, cliques: list[str], data: st.DataObject) -> None:
    """A clique is one host with its machines as trays; names, documents and ranks keep them."""
    nodes = [node(f"t{i}", 4, clique) for i, clique in enumerate(cliques)]
    cluster = imported(tmp_path, nodes)
    by: dict[str, list[str]] = {}
    for i, clique in enumerate(cliques):
        by.setdefault(clique if clique.startswith("u") else f"t{i}", []).append(f"t{i}")
    want = {names[0] if len(names) == 1 else key: names for key, names in by.items()}
    assert {host.name: [*host.machines] or [host.name] for host in cluster.hosts} == want
    for h, host in enumerate(cluster.hosts):
        kind, n = cluster.type(h), 4 * len(want[host.name])
        assert (kind.gpus, kind.nics, kind.tray) == (n, n, 4 * bool(host.machines))
        assert kind.links is not None and {*kind.links[0][1:]} == {"NV18"}
        assert kind.numa == tuple(tuple(range(i, i + 4)) for i in range(0, n, 4))
    (tmp_path / "c.json").unlink(missing_ok=True)
    cluster.write(tmp_path / "c.json")
    assert Cluster.read(tmp_path / "c.json") == cluster
    gpus = data.draw(st.sets(st.integers(0, cluster.n_gpus - 1), min_size=1))
    text = cluster.written(gpus)
    assert cluster.parse(text) == tuple(sorted(gpus))
    by_name = dict(part.split(":") for part in text.split())
    assert by_name.keys() <= {f"t{i}" for i in range(len(cliques))}
    files = dict(line.split(" slots=") for line in hostfile(cluster, gpus).splitlines())
    devices = visible_devices(cluster, gpus)
    assert files.keys() == devices.keys() == by_name.keys()
    for name, ids in devices.items():
        local = sorted(map(int, ids.split(",")))
        assert len(local) == int(files[name]) and max(local) < 4
        assert {cluster.machine(name)[i] for i in local} <= gpus
    alone = sum(not host.machines for host in cluster.hosts)
    noted = [line for line in assumptions(cluster) if "NVLink between hosts" in line]
    assert len(noted) == (alone > 1)


def test_cliques_of_slurm_and_refused(tmp_path: Path) -> None:
    """Slurm's blocks are cliques of products that NVLink joins across machines, and no others."""
    row = ["NV18"] * 4
    lines = ["\t" + "\t".join(f"GPU{i}" for i in range(4))]
    lines += ["\t".join([f"GPU{i}", *row[:i], "X", *row[i + 1 :]]) for i in range(4)]
    (tmp_path / "topo.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "t.conf").write_text(
        "BlockName=b1 Nodes=n[01-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18,36\n"
    )
    for kind, sizes in (("gb200", [72, 72]), ("h100", [4] * 36)):
        cluster = Cluster.from_files(
            {kind: tmp_path / "topo.txt"}, {"n[01-36]": kind}, domains=tmp_path / "t.conf", nics=4
        )
        assert cluster.sizes.tolist() == sizes and cluster.levels == ("block36", "block")
    big = "BlockName=b1 Nodes=n[01-36]\nBlockSizes=36\n"
    (tmp_path / "t.conf").write_text(big)
    with pytest.warns(UserWarning, match="clique b1: it has 144 GPUs, more than the 72 that NVL"):
        Cluster.from_files({"gb200": tmp_path / "topo.txt"}, {"n[01-36]": "gb200"},
                           domains=tmp_path / "t.conf", nics=4)  # fmt: skip
    with pytest.warns(UserWarning, match="clique u.1: its machines differ"):
        assert imported(tmp_path, [node("a", 4, "u.1"), node("b", 2, "u.1")]).n_hosts == 2
    racks = [node("a", 4, "u.1", r="r1"), node("b", 4, "u.1", r="r2")]
    with pytest.raises(InputError, match=r"clique 'u.1': .* several rs \(r1, r2\): leave"):
        imported(tmp_path, racks, "r")
    kind = HostType("k", 8, tray=4)
    for machines, message in (
        (("a",), r"hosts\[0\]\.machines: 1 machines, but type 'k' has 8 GPUs in trays of 4"),
        (("a", "a"), r"hosts\[0\]\.machines\[1\]: there are two hosts 'a'"),
        (("a", "h"), r"hosts\[0\]\.machines\[1\]: there are two hosts 'h'"),
        (("a", "x:y"), r"hosts\[0\]\.machines\[1\]: expected a name without"),
    ):
        with pytest.raises(InputError, match=message):
            Cluster((Host("h", "k", (), machines),), (kind,))
    whole = Cluster((Host("h", "k", (), ("a", "b")),), (kind,), rails=True)
    assert whole.parse("b") == whole.parse("b:*") == (4, 5, 6, 7) and len(whole.parse("h")) == 8
    assert whole != Cluster(whole.hosts, whole.types)
    state = ClusterState.parse(whole, free="b:1-3", down="a b:0")
    assert [*Dispatcher(whole, BottleneckBandwidth(whole)).scores(state, 2)] == ["b"]
    rows = [Measurement((2, 1), 300_000_000, (("b", (0, 3)), ("a", (1,))))]
    model = BottleneckBandwidth(whole, MeasurementTable(tuple(rows)))
    assert model.table.rows == (Measurement((3,), 300_000_000, (("h", (1, 4, 7)),)),)
    with pytest.raises(InputError, match=r"measurements\[0\]\.gpus: expected ids in 0\.\.3 on a"):
        BottleneckBandwidth(whole, MeasurementTable((Measurement((1,), 9, (("a", (4,)),)),)))
    with pytest.raises(InputError, match="'a' is a machine of the host 'h'"):
        whole.host_index("a")
