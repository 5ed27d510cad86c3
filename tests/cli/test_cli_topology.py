"""``optsched gpus topology``: import, show and state, through the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from optsched.bandwidth import synthetic
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType

if TYPE_CHECKING:
    from program import Cli

MATRIX = "\tGPU0\tGPU1\tNIC0\nGPU0\tX\tNV4\tPIX\nGPU1\tNV4\tX\tPIX\nNIC0\tPIX\tPIX\tX\n"
CONF = "SwitchName=s0 Nodes=n[01-02]\nSwitchName=s1 Nodes=n[03-04]\nSwitchName=t Switches=s[0-1]\n"


@pytest.fixture
def site(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A folder with one matrix and one fabric."""
    monkeypatch.setenv("COLUMNS", "160")
    Path("topo.txt").write_text(MATRIX)
    Path("topology.conf").write_text(CONF)
    Path("labels.csv").write_text("host,rack\nn[01-04],r1\n")
    return cli


IMPORT = (
    *("gpus", "topology", "import", "--topo", "h=topo.txt"),
    *("--hosts", "n[01-04]=h", "-o", "c.json"),
)


def test_import(site: Cli) -> None:
    """Matrix, hosts and switches become one document with what the options say."""
    out = site(*IMPORT, "--domains", "topology.conf", "--nic-rate", "25",
              "--name", "lab").out  # fmt: skip
    assert out == "wrote c.json: 4 hosts, 8 GPUs\n"
    cluster = Cluster.read("c.json")
    assert (cluster.name, cluster.levels) == ("lab", ("spine", "leaf"))
    assert [host.domains for host in cluster.hosts] == [("t", "s0")] * 2 + [("t", "s1")] * 2
    assert (cluster.type(0).nics, cluster.type(0).nic_rate) == (1, 25.0)
    site(*IMPORT, "--topo", "k=topo.txt", "--hosts", "m9,m7=k", "--nics", "4")
    cluster = Cluster.read("c.json")
    assert [(host.name, host.type) for host in cluster.hosts[3:]] == [
        ("n04", "h"), ("m9", "k"), ("m7", "k"),
    ]  # fmt: skip
    assert (cluster.levels, cluster.type(5).nics) == ((), 4)


def test_import_of_nodes(site: Cli) -> None:
    """Kubernetes' nodes need neither matrices nor host lists; cards have numbers or names."""
    node = {"metadata": {"name": "n1", "labels": {"example.com/r": "r1"}},
            "status": {"capacity": {"nvidia.com/gpu": "2"}}}  # fmt: skip
    Path("nodes.json").write_text(json.dumps({"kind": "List", "items": [node]}))
    words = (
        "gpus",
        "topology",
        "import",
        "--domains",
        "nodes.json",
        "--level",
        "rack=example.com/r",
        "-o",
        "c.json",
    )
    assert site(*words, "--nics", "2").out == "wrote c.json: 1 hosts, 2 GPUs\n"
    cluster = Cluster.read("c.json")
    assert (cluster.levels, cluster.hosts) == (("rack",), (Host("n1", "gpu-x2", ("r1",)),))
    site(*words, "--topo", "gpu-x2=topo.txt", "--nics", "NIC0")
    assert (Cluster.read("c.json").type(0).nics, cluster.type(0).nics) == (1, 2)


def test_logs_of_pods(site: Cli) -> None:
    """Names of pods become hosts, and a log that was cut off is told."""
    Path("run.log").write_text(
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 8\n"
        "#  Rank  0 Group  0 Pid 10 on  pod-a device  0 [0x07] NVIDIA H100\n"
        "#  Rank  1 Group  0 Pid 11 on  pod-b device  0 [0x07] NVIDIA H100\n"
        "#  size   count  type  redop  root   time   algbw  busbw #wrong  time  algbw  busbw\n"
        "   4096    1024  float   sum    -1  12.30   10.00  10.00      0  12.3  10.00  10.00\n"
    )
    Path("pods.txt").write_text("POD NODE\npod-a n01\npod-b n02\n")
    words = ("gpus", "bandwidth", "import", "run.log", "-o", "m.csv", "--host-map", "pods.txt")
    ran = site(*words, "--payload", "4K")
    assert ran.code == 0 and ran.err.startswith("warning: run.log:1: the run is cut off")
    assert Path("m.csv").read_text().splitlines()[1] == "all_reduce,4096,2,1+1,n01:0 n02:0,10"
    assert "choose a payload" in site(*words).err


BAD: list[tuple[tuple[str, ...], str]] = [
    (("--nics", "mlx5_9"), "topo.txt: nics: expected a number, or names of cards, each once, "
     "among NIC0, got 'mlx5_9'"),
    (("--domains", "labels.csv", "--hosts", "m=h"),
     "labels.csv: does not say where 1 of the hosts are, the first: m"),
    (("-o", "topo.txt"), "topo.txt: is the file that is read; choose another name"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(BAD)))
def test_import_refused(site: Cli, at: int) -> None:
    """One sentence, and no file."""
    words, message = BAD[at]
    assert site.refused(*IMPORT, *words) == message
    assert not Path("c.json").exists() and Path("topo.txt").read_text() == MATRIX


def test_show(site: Cli) -> None:
    """Types, links, domains and hosts; names are text, never markup; no host is left out."""
    kinds = (HostType("[red]h", 2, (("X", "NV4"), ("NV4", "X"))), synthetic.host_type("nvl72"))
    hosts = [Host(f"n{i}", "[red]h", (f"rack{i // 3}",)) for i in range(6)]
    hosts.append(Host("big", "nvl72", ("rack9",)))
    Cluster(tuple(hosts), kinds, ("rack",), "lab[/]").write("c.json")
    out = site("gpus", "topology", "show", "c.json").out
    for text in ("lab[/]", "[red]h", "7 hosts, 84 GPUs", "1 NV4", "not measured", "by count, pair",
                 "72 x 50 GB/s", "rack", "rack9", "n0 .. n2", "n3 .. n5", "big"):  # fmt: skip
        assert text in out, (text, out)


def notes(site: Cli, *words: str) -> list[str]:
    """Notes below the tables."""
    lines = site("gpus", "topology", "show", "c.json", *words).out.splitlines()
    return [line for line in lines if line.startswith("note: ")]


def test_notes(site: Cli) -> None:
    """Says what is missing, and what answers would have to guess."""
    cluster = synthetic.cluster("pcie", 2)
    cluster.write("c.json")
    assert not notes(site)
    state: dict[str, Any] = {"format": "optsched.state/1", "free": "n01:0-5", "down": "n02",
                             "jobs": [{"name": "a", "gpus": "n01:6,7"}]}  # fmt: skip
    Path("s.json").write_text(json.dumps(state))
    out = site("gpus", "topology", "show", "c.json", "--state", "s.json").out
    assert "6 GPUs free, 2 held by 1 jobs, 8 down: . free  # held" in out
    Path("s.json").write_text(json.dumps({**state, "down": ""}))
    message = site.refused("gpus", "topology", "show", "c.json", "--state", "s.json")
    assert message.startswith("s.json: 8 GPUs are neither free")
    bare = (HostType("h", 2, nics=0), HostType("spare", 4))
    Cluster((Host("a", "h"), Host("b", "h")), bare).write("c.json")
    assert [note.split(": ")[1:] for note in notes(site)] == [
        ["types[h]", "no network cards", "nothing goes across hosts"],
        ["types[spare]", "no host is of this type"],
        [
            "links within host type h are unknown",
            "assumed at least as good as the network; --topo or measurements settle it",
        ],
    ]
