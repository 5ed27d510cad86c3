"""Where hosts are: Slurm's trees and blocks, labels as CSV, and clusters made of all files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.cluster import Cluster
from optsched.errors import InputError
from optsched.formats.topology import from_labels, from_slurm

if TYPE_CHECKING:
    from pathlib import Path

TREE = """# a fabric of two tiers
SwitchName=s0 Nodes=dev[08-10]
switchname=s1 nodes=dev11,dev[012-013] LinkSpeed=100   # zeros are kept
SwitchName=top \\
  Switches=s[0-1]
"""
BLOCKS = """BlockName=b1 Nodes=n[1-2]
BlockName=b2 Nodes=n[3-4]
BlockName=b3 Nodes=n[5-6]
BlockSizes=2,4
"""


def test_tree() -> None:
    """Levels widest first; brackets, comments, continued lines, any case of keys, CRLF."""
    for text in (TREE, TREE.replace("\n", "\r\n"), TREE.replace("=s0", ' = "s0"')):
        found = from_slurm(text)
        assert found.levels == ("spine", "leaf")
        assert found.of == {
            "dev08": ("top", "s0"), "dev09": ("top", "s0"), "dev10": ("top", "s0"),
            "dev11": ("top", "s1"), "dev012": ("top", "s1"), "dev013": ("top", "s1"),
        }  # fmt: skip


def test_uneven_tree() -> None:
    """A short branch repeats its lowest switch; switches without a common top are a forest."""
    text = (
        "SwitchName=a Nodes=x\nSwitchName=b Switches=a\nSwitchName=c Nodes=y\n"
        "SwitchName=t Switches=b,c\nSwitchName=lone Nodes=z\n"
    )
    found = from_slurm(text)
    assert found.levels == ("core", "spine", "leaf")
    ways = {"x": ("t", "b", "a"), "y": ("t", "c", "c"), "z": ("lone", "lone", "lone")}
    assert found.of == ways
    deep = "SwitchName=s0 Nodes=x\n" + "".join(
        f"SwitchName=s{i} Switches=s{i - 1}\n" for i in range(1, 5)
    )
    assert from_slurm(deep).levels == ("tier5", "tier4", "core", "spine", "leaf")


def test_blocks() -> None:
    """Blocks, and above them those that Slurm joins to larger sizes; the last may be alone."""
    found = from_slurm(BLOCKS)
    assert found.levels == ("block4", "block")
    assert (found.of["n4"], found.of["n5"]) == (("b1..b2", "b2"), ("b3", "b3"))
    assert from_slurm(BLOCKS.replace("2,4", "2")).levels == ("block",)
    assert from_slurm(BLOCKS.partition("BlockSizes")[0]).of["n6"] == ("b3",)


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_tree(racks: list[list[int]]) -> None:
    """A generated fabric gives every host its way back, and a cluster takes it."""
    lines, wanted = [], {}
    for s, leaves in enumerate(racks):
        for k, size in enumerate(leaves):
            hosts = [f"h{s}-{k}-{i:03}" for i in range(size)]
            lines.append(f"SwitchName=l{s}.{k} Nodes=h{s}-{k}-[000-{size - 1:03}]")
            wanted.update(dict.fromkeys(hosts, (f"sp{s}", f"l{s}.{k}")))
        lines.append(
            f"SwitchName=sp{s} Switches=" + ",".join(f"l{s}.{k}" for k in range(len(leaves)))
        )
    found = from_slurm("\n".join(lines))
    assert (found.levels, found.of) == (("spine", "leaf"), wanted)
    csv = "host,spine,leaf\n" + "".join(f"{h},{','.join(way)}\n" for h, way in wanted.items())
    assert from_labels(csv) == found


BAD = {
    "": "t: there are neither",
    "# nothing\n": "t: there are neither",
    "Nodes=a\n": "t:1: expected SwitchName",
    "SwitchName=a\n": "t:1: a switch has either",
    "SwitchName=a Nodes=x Switches=b\n": "t:1: a switch has either",
    "SwitchName=a Nodes=x\nSwitchName=a Nodes=y\n": "t:2: SwitchName=a is in line 1",
    "SwitchName=a Nodes=x Speed=9\n": "t:1: unknown key 'Speed'",
    "SwitchName=a Nodes=x Nodes=y\n": "t:1: Nodes is there twice",
    "SwitchName=a Nodes=x nonsense\n": "t:1: expected KEY=VALUE, got 'nonsense'",
    "SwitchName=a Nodes=x[1-\n": "t:1: expected a list of hosts",
    "SwitchName=a Nodes=x[3-1]\n": "t:1: expected a range",
    "SwitchName=a Nodes=x\nSwitchName=b Switches=c\n": "t:2: Switches: there is no SwitchName=c",
    "SwitchName=a Nodes=x\nSwitchName=b Nodes=x\n": "t:2: host x is below a and b",
    "SwitchName=a Nodes=x,x\n": "t:1: host x is below a and a",
    "SwitchName=a Nodes=x\nSwitchName=b Switches=a\nSwitchName=c Switches=a\n":
        "t:3: switch a is below b and c",
    "SwitchName=a Switches=b\nSwitchName=b Switches=a\n": "t:1: a loop of switches: a below b",
    "SwitchName=a Switches=a\n": "t:1: a loop of switches: a below a",
    "SwitchName=a Nodes=x\nBlockName=b Nodes=y\n": "t:2: a file has switches or blocks",
    "BlockName=b Nodes=y\nSwitchName=a Nodes=x\n": "t:2: a file has switches or blocks",
    "BlockName=b\n": "t:1: BlockName=b has no Nodes",
    "BlockName=b Nodes=y LinkSpeed=1\n": "t:1: linkspeed does not belong",
    "BlockName=a Nodes=y\n\nBlockName=b Nodes=y\n": "t:3: host y is in a and b",
    "BlockName=a Nodes=y\nBlockName=a Nodes=z\n": "t:2: BlockName=a is in line 1",
    "BlockName=a Nodes=y\nBlockSizes=2,6\n": "t:2: BlockSizes: expected rising",
    "BlockName=a Nodes=y\nBlockSizes=4,2\n": "t:2: BlockSizes: expected rising",
    "BlockName=a Nodes=y\nBlockSizes=0\n": "t:2: BlockSizes: expected rising",
    "BlockName=a Nodes=y\nBlockSizes=2\nBlockSizes=2\n": "t:3: BlockSizes is in line 2",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_refused(text: str) -> None:
    """Each fault is found, and named with its line."""
    with pytest.raises(InputError, match=BAD[text]):
        from_slurm(text, "t")


LABELS = "host,zone,rack\nn[01-02],z1,r1\nn03,z1,r2\n"
BAD_LABELS = {
    "": "t: expected a header",
    "host,zone\n": "t: expected a header host,LEVEL,... and a line",
    "node,zone\na,b\n": "t:1: expected a header",
    "host\na\n": "t:1: expected a header",
    "host,rack,rack\na,b,c\n": 't:1: column "rack" is there twice',
    "host,rack,host\na,b,c\n": 't:1: column "host" is there twice',
    LABELS + "n04,z1\n": "t:4: expected a host and a label for each of zone, rack",
    LABELS + "n04,z1,\n": "t:4: expected a host and a label",
    LABELS + "n02,z1,r1\n": "t:4: host 'n02' is there twice",
    LABELS + "n04,z2,r1\n": "t:4: rack 'r1' lies in 'z1' and in 'z2': give it two names",
    LABELS + 'n04,z2,"r1\n': "t:4: not valid CSV",
}


def test_labels() -> None:
    """Host lists too; BOM, CRLF and empty lines are no matter."""
    found = from_labels(LABELS.replace("\n", "\r\n") + "\r\n")
    assert found.levels == ("zone", "rack")
    assert found.of == {"n01": ("z1", "r1"), "n02": ("z1", "r1"), "n03": ("z1", "r2")}


@pytest.mark.parametrize("text", BAD_LABELS)
def test_labels_refused(text: str) -> None:
    """Each fault is found, and named with its line."""
    with pytest.raises(InputError, match=BAD_LABELS[text]):
        from_labels(text, "t")


def test_cluster_from_files(tmp_path: Path) -> None:
    """Matrices, host lists and switches make a cluster; what does not fit is said."""
    topo, conf, labels = tmp_path / "a.txt", tmp_path / "topology.conf", tmp_path / "l.csv"
    topo.write_text("\tGPU0\tGPU1\tNIC0\nGPU0\tX\tNV4\tPIX\nGPU1\tNV4\tX\tPIX\nNIC0\tPIX\tPIX\tX\n")
    conf.write_text(TREE)
    labels.write_text(LABELS)
    lists = {"dev[08-11]": "a", "dev[012-013]": "b"}
    cluster = Cluster.from_files({"a": topo, "b": topo}, lists, slurm=conf, pod="spine", name="c")
    assert [host.name for host in cluster.hosts][2:5] == ["dev10", "dev11", "dev012"]
    assert (cluster.hosts[4].type, cluster.hosts[4].domains) == ("b", ("top", "s1"))
    assert (cluster.levels, cluster.pod, cluster.n_gpus) == (("spine", "leaf"), "spine", 12)
    assert (cluster.type(0).nics, cluster.type(0).nic_rate) == (1, 50.0)
    more = Cluster.from_files({"a": topo}, {"n03,n01": "a"}, labels=labels, nics=3, nic_rate=25.0)
    assert [host.domains for host in more.hosts] == [("z1", "r2"), ("z1", "r1")]
    assert (more.type(0).nics, more.type(0).nic_rate) == (3, 25.0)
    assert Cluster.from_files({"a": topo}, {"x": "a"}).levels == ()

    def refused(message: str, hosts: dict[str, str], **rest: object) -> None:
        with pytest.raises(InputError, match=message):
            Cluster.from_files({"a": topo}, hosts, **rest)  # type: ignore[arg-type]

    refused("slurm, labels: give one", {"n01": "a"}, slurm=conf, labels=labels)
    refused("hosts: expected host lists", {})
    refused(r"hosts\['n01'\]: there is no type 'b'; known: a", {"n01": "b"})
    refused(r"hosts\['n\[01-02\]'\]: host 'n01' is given twice", {"n01": "a", "n[01-02]": "a"})
    refused(r"topology\.conf: does not say where 2 .*: n04, n05", {"n[04-05]": "a"}, slurm=conf)
    refused("pod: expected one of the levels zone, rack", {"n01": "a"}, labels=labels, pod="leaf")
    refused(r"none\.conf: no such file", {"n01": "a"}, slurm=tmp_path / "none.conf")
    refused("100000 hosts", {"n[000000-099999]": "a", "m": "a"})
