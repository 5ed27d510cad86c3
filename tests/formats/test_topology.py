"""Where hosts are: Slurm's trees and blocks, labels as CSV, and clusters made of all files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.topology.cluster import Cluster
from optsched.errors import InputError
from optsched.formats.host_domains import from_labels, from_nodes
from optsched.formats.slurm_topology import from_slurm
from optsched.formats.topology import read_domains
from optsched.io.strict_json import parse

if TYPE_CHECKING:
    from pathlib import Path

TREE = """# a fabric of two tiers
SwitchName=s0 Nodes=dev[08-10]
switchname=s1 nodes=dev11,\\
dev[012-013] LinkSpeed=100   # zeros are kept
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


def test_all() -> None:
    """`ALL` means what no other line names."""
    text = "SwitchName=a Nodes=x\nSwitchName=b Nodes=all\nSwitchName=top Switches=ALL\n"
    found = from_slurm(text, hosts=["x", "y", "z"])
    assert found.levels == ("spine", "leaf")
    assert found.of == {"x": ("top", "a"), "y": ("top", "b"), "z": ("top", "b")}


def test_include(tmp_path: Path) -> None:
    """Files are read from the folder of the file that names them; faults name their file."""
    conf, leaves = tmp_path / "topology.conf", tmp_path / "racks" / "leaves.conf"
    leaves.parent.mkdir()
    leaves.write_text('INCLUDE "more.conf"  # the other rack\nSwitchName=s0 Nodes=dev[08-10]\n')
    (leaves.parent / "more.conf").write_text("SwitchName=s1 Nodes=dev11,dev[012-013]\n")
    conf.write_text("Include racks/leaves.conf\nSwitchName=top Switches=s[0-1]\n")
    assert read_domains(conf) == from_slurm(TREE)
    leaves.write_text("SwitchName=s0 Nodes=x Speed=1\n")
    with pytest.raises(InputError, match=r"leaves\.conf:1: unknown key 'speed'"):
        read_domains(conf)
    leaves.write_text("Include leaves.conf\n")
    with pytest.raises(InputError, match=r"leaves\.conf:1: Include: 20 files in each other"):
        read_domains(conf)


YAML = """---
- topology: wide
  tree:
    switches:
      - {switch: s0, nodes: "dev[08-10]"}
      - switch: s1   # zeros are kept
        nodes: dev11,dev[012-013]
      - switch: top
        children: s[0-1]
- topology: racks
  cluster_default: true
  block:
    block_sizes: [2, 4]
    blocks:
      - {block: b1, nodes: "n[1-2]"}
      - {block: b2, nodes: "n[3-4]"}
      - {block: b3, nodes: "n[5-6]"}
"""
BAD_YAML = {
    "- topology: a\n  flat: true\n": r"t: \[0\]: has neither tree nor block",
    "- topology: a\n  tre: 1\n": r"t: .*tre",
    "- topology: a\n   tree: 1\n": r"t:2: not valid YAML",
    "- topology: a\n  tree:\n    switches:\n    - {switch: s, nodes: x}\n    - {switch: s}\n":
        r"t: \[0\]\.tree\.switches\[1\]: SwitchName=s is at t: \[0\]\.tree\.switches\[0\]",
    YAML.replace("  cluster_default: true\n", ""):
        "t: has 2 topologies: mark one .*, or name it behind the file as t:NAME: wide, racks",
}  # fmt: skip


def test_yaml() -> None:
    """The same trees and blocks in Slurm's newer file; the default topology counts."""
    assert from_slurm(YAML) == from_slurm(BLOCKS)
    alone = YAML[: YAML.index("- topology: racks")]
    for text in (alone, alone.replace("topology", '"topology"'), f"# tree\n{alone}"):
        assert from_slurm(text) == from_slurm(TREE)


def test_topology_by_name(tmp_path: Path) -> None:
    """Of several topologies one is named behind the file; the default counts otherwise."""
    path = tmp_path / "topology.yaml"
    path.write_text(YAML + "- topology: flat\n  flat: true\n")
    assert read_domains(f"{path}:wide") == from_slurm(TREE)
    assert read_domains(f"{path}:racks") == read_domains(path) == from_slurm(BLOCKS)
    path.write_text(YAML.replace("  cluster_default: true\n", ""))
    assert read_domains(f"{path}:wide") == from_slurm(TREE)
    for name, message in (
        ("deep", "has 0 topologies 'deep': .*: wide, racks"), ("", "has 0 topologies '':"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            read_domains(f"{path}:{name}")
    path.write_text(YAML + "- topology: flat\n  flat: true\n")
    with pytest.raises(InputError, match=r"has neither tree nor block: .*: wide, racks, flat"):
        read_domains(f"{path}:flat")
    path.write_text(TREE)
    with pytest.raises(InputError, match=r"topology\.yaml:wide: no such file"):
        read_domains(f"{path}:wide")


@pytest.mark.parametrize("text", BAD_YAML)
def test_yaml_refused(text: str) -> None:
    """Each fault is found, and named with its line or its path."""
    with pytest.raises(InputError, match=BAD_YAML[text]):
        from_slurm(text, "t")


@given(st.data())
def test_any_spelling(data: st.DataObject) -> None:
    """Trees and blocks, some of them empty, mean the same however their lines are written."""
    tree = data.draw(st.booleans())
    kind, children = ("SwitchName", "switches") if tree else ("BlockName", "")
    counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=7))
    names = [f"b{i}" for i in range(len(counts))]
    hosts = {name: [f"n{i}-{k:02d}" for k in range(count)]
             for i, (name, count) in enumerate(zip(names, counts, strict=True))}  # fmt: skip
    joined = [name for name in names if tree and data.draw(st.booleans())]  # others are alone
    size, factor = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 4]))

    def listed(name: str) -> str:
        brackets = f"n{names.index(name)}-[00-{len(hosts[name]) - 1:02d}]"
        return data.draw(st.sampled_from([brackets, ",".join(hosts[name]), ", ".join(hosts[name])]))

    entries = [
        {kind: name} | ({"nodes": listed(name)} if hosts[name] else data.draw(
            st.sampled_from([{}, {"nodes": ""}]))) for name in names
    ]  # fmt: skip
    entries += [{kind: "top", children: ",".join(joined)}] * bool(joined)
    entries += [{"BlockSizes": f"{size},{size * factor}" if factor > 1 else str(size)}] * (not tree)
    case = st.sampled_from([str.lower, str.upper, str.title, str])
    lines = []
    for entry in entries:
        quote = data.draw(st.sampled_from(['"%s"', '"%s"', "%s"]))
        words = [
            f"{data.draw(case)(key)}{data.draw(st.sampled_from(['=', ' = ']))}"
            + (quote if value and " " not in value else '"%s"') % value
            for key, value in entry.items()
        ]  # fmt: skip
        lines.append(data.draw(st.sampled_from([" ", "  ", " \\\n "])).join(words))
        lines[-1] += data.draw(st.sampled_from(["", "  # a comment = here", "\n\n# x=y"]))
    found = from_slurm("\n".join(lines) + "\n")
    want = {}
    for i, name in enumerate(names):
        first = i - i % factor
        last = min(first + factor, len(names)) - 1
        span = names[i] if first == last else f"{names[first]}..{names[last]}"
        upper = (("top" if name in joined else name),) if joined else ()
        upper = upper if tree else (span,) * (factor > 1)
        want |= {host: (*upper, name) for host in hosts[name]}
    if not any(hosts[name] for name in joined):
        want = {host: way[-1:] if tree else way for host, way in want.items()}
    assert found.of == want
    key = {"SwitchName": "switch", "BlockName": "block", "switches": "children"}
    rows = [{key.get(k, k): v for k, v in e.items()} for e in entries if "BlockSizes" not in e]
    sizes = [size, size * factor] if factor > 1 else [size]
    body = {"tree": {"switches": rows}} if tree else {
        "block": {"block_sizes": sizes, "blocks": rows}}  # fmt: skip
    assert from_slurm("# \n- topology: a\n  " + (
        f"{'tree' if tree else 'block'}: {json.dumps(body['tree' if tree else 'block'])}\n"
    )).of == want  # fmt: skip


BAD = {
    "": "t: has neither",
    "Nodes=a\n": "t:1: expected SwitchName",
    "SwitchName=a Nodes=x Switches=b\n": "t:1: a switch has either",
    "SwitchName=a Nodes=x Speed=9\n": "t:1: unknown key 'speed'",
    "SwitchName=a Nodes=x nonsense\n": "t:1: expected KEY=VALUE, got 'nonsense'",
    "SwitchName=a Nodes=x[1-\n": "t:1: expected a list of hosts",
    "SwitchName=a Nodes=x\nSwitchName=b Switches=c\n": "t:2: Switches: there is no SwitchName=c",
    "SwitchName=a Nodes=x\nSwitchName=b Nodes=x\n": "t:2: host x is below a and b",
    "SwitchName=a Nodes=x\nSwitchName=b Switches=a\nSwitchName=c Switches=a\n":
        "t:3: switch a is below b and c",
    "SwitchName=a Switches=b\nSwitchName=b Switches=a\n": "t:1: a loop of switches: a below b",
    "SwitchName=a Nodes=x\nBlockName=b Nodes=y\n": "t:2: a file has switches or blocks",
    "SwitchName=a Nodes=ALL\n": "t:1: Nodes=ALL: name the hosts",
    "include other.conf\n": "t:1: Include: other.conf: no such file",
    "BlockName=a Nodes=y\nBlockSizes=2,6\n": "t:2: BlockSizes: expected rising",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_refused(text: str) -> None:
    """Each fault is found, and named with its line."""
    with pytest.raises(InputError, match=BAD[text]):
        from_slurm(text, "t")


LABELS = "host,zone,rack\nn[01-02],z1,r1\nn03,z1,r2\n"
BAD_LABELS = {
    "": "t:1: expected a header host,LEVEL",
    "host,zone\n": "t: expected a line for every host",
    LABELS + "n04,z1,\n": "t:4: expected a host and a label",
    LABELS + "n02,z1,r1\n": "t:4: host 'n02' is there twice",
    LABELS + 'n04,z2,"r1\n': "t:4: not valid CSV",
}


def test_labels() -> None:
    """Host lists too; BOM, CRLF and empty lines are no matter."""
    found = from_labels(LABELS.replace("\n", "\r\n") + "\r\n")
    assert found.levels == ("zone", "rack")
    assert found.of == {"n01": ("z1", "r1"), "n02": ("z1", "r1"), "n03": ("z1", "r2")}


def test_names_in_two_parents(tmp_path: Path) -> None:
    """Names are unique within their parent only: two racks of one name are two domains."""
    labels = tmp_path / "l.csv"
    labels.write_text("host,block,rack\na,b1,rack-1\nb,b1,rack-2\nc,b2,rack-1\n")
    items = [(name, {"nvidia.com/gpu": "8"}, {"kueue/block": block, "kueue/rack": rack})
             for name, block, rack in (("a", "b1", "rack-1"), ("b", "b1", "rack-2"),
                                       ("c", "b2", "rack-1"))]  # fmt: skip
    of_nodes = from_nodes(parse(nodes(*items), "f"), "f", ["kueue/block", "kueue/rack"])
    assert of_nodes.of == from_labels(labels.read_text()).of
    topo = tmp_path / "t.txt"
    topo.write_text("\tGPU0\tGPU1\tNIC0\nGPU0\tX\tNV4\tPIX\nGPU1\tNV4\tX\tPIX\nNIC0\tPIX\tPIX\tX\n")
    cluster = Cluster.from_files({"h": topo}, {"a,b,c": "h"}, domains=labels)
    racks = cluster.domains(cluster.level("rack"))
    assert list(racks.values()) == [(0,), (1,), (2,)] and "b1/rack-1" in racks


@pytest.mark.parametrize("text", BAD_LABELS)
def test_labels_refused(text: str) -> None:
    """Each fault is found, and named with its line."""
    with pytest.raises(InputError, match=BAD_LABELS[text]):
        from_labels(text, "t")


def nodes(*given: tuple[str, dict[str, str], dict[str, str]]) -> str:
    """What `kubectl get nodes -o json` prints: name, capacity and labels of every node."""
    items = [
        {
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "uid": "7", "labels": {"kubernetes.io/os": "l"} | labels},
            "status": {"capacity": {"cpu": "96", "pods": "110"} | capacity, "phase": "Running"},
        }
        for name, capacity, labels in given
    ]  # fmt: skip
    return json.dumps({"apiVersion": "v1", "items": items, "kind": "List"})


ZONE, RACK = "topology.kubernetes.io/zone", "example.com/r"
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100", ZONE: "z1"}
FLEET = nodes(
    ("login", {}, {}),
    ("n1.lab", {"nvidia.com/gpu": "8"}, H100 | {RACK: "r1"}),
    ("n2.lab", {"nvidia.com/gpu": "8"}, H100 | {RACK: "r2"}),
    ("m1", {"amd.com/gpu": "4"}, {ZONE: "z2", RACK: "r3"}),
)


def test_nodes() -> None:
    """GPUs by resource, types by product and number, levels by labels; others are passed over."""
    found = from_nodes(parse(FLEET, "f"), "f", [ZONE, f"rack={RACK}"])
    assert found.levels == ("zone", "rack")
    assert found.of == {"n1.lab": ("z1", "r1"), "n2.lab": ("z1", "r2"), "m1": ("z2", "r3")}
    assert found.kinds == {
        "n1.lab": ("NVIDIA-H100-x8", 8), "n2.lab": ("NVIDIA-H100-x8", 8), "m1": ("gpu-x4", 4)
    }  # fmt: skip
    one = json.loads(FLEET)["items"][1]
    assert from_nodes(one, "f").kinds == {"n1.lab": ("NVIDIA-H100-x8", 8)}


BAD_NODES = {
    "no name": (FLEET.replace('"name": "n2.lab", ', ""), [], r"f: .*items\[2\].*name"),
    "twice": (FLEET.replace("n2.lab", "n1.lab"), [], r"\(node n1.lab\): is there twice"),
    "no GPUs": (nodes(("login", {}, {})), [], "f: no node has nvidia.com/gpu or amd.com/gpu"),
    "number": (FLEET.replace('gpu": "4"', 'gpu": "4k"'), [], r"\(node m1\): amd.com/gpu: .*'4k'"),
    "label": (FLEET, ["nope"], r"f: items\[1\] .*: has no label 'nope'; labels: exam"),
}


@pytest.mark.parametrize("case", BAD_NODES)
def test_nodes_refused(case: str) -> None:
    """Each fault is found, and named with its place."""
    text, levels, message = BAD_NODES[case]
    with pytest.raises(InputError, match=message):
        from_nodes(parse(text, "f"), "f", levels)


def test_cluster_from_files(tmp_path: Path) -> None:
    """Matrices, host lists and switches make a cluster; what does not fit is said."""
    topo, conf, labels = tmp_path / "a.txt", tmp_path / "topology.conf", tmp_path / "l.csv"
    topo.write_text("\tGPU0\tGPU1\tNIC0\nGPU0\tX\tNV4\tPIX\nGPU1\tNV4\tX\tPIX\nNIC0\tPIX\tPIX\tX\n")
    conf.write_text(TREE)
    labels.write_text(LABELS)
    lists = {"dev[08-11]": "a", "dev[012-013]": "b"}
    cluster = Cluster.from_files({"a": topo, "b": topo}, lists, domains=conf)
    assert [host.name for host in cluster.hosts][2:5] == ["dev10", "dev11", "dev012"]
    assert (cluster.hosts[4].type, cluster.hosts[4].domains) == ("b", ("top", "s1"))
    assert (cluster.levels, cluster.n_gpus) == (("spine", "leaf"), 12)
    assert (cluster.type(0).nics, cluster.type(0).nic_rate) == (1, None)
    more = Cluster.from_files({"a": topo}, {"n03,n01": "a"}, domains=labels, nics=3, nic_rate=25.0)
    assert [host.domains for host in more.hosts] == [("z1", "r2"), ("z1", "r1")]
    assert (more.type(0).nics, more.type(0).nic_rate) == (3, 25.0)
    assert Cluster.from_files({"a": topo}, {"x": "a"}).levels == ()

    def refused(message: str, hosts: dict[str, str], **rest: object) -> None:
        with pytest.raises(InputError, match=message):
            Cluster.from_files({"a": topo}, hosts, **rest)  # type: ignore[arg-type]

    refused("hosts: expected host lists", {})
    refused(r"hosts\['n01'\]: there is no type 'b'; known: a", {"n01": "b"})
    refused(r"hosts\['n\[01-02\]'\]: host 'n01' is given twice", {"n01": "a", "n[01-02]": "a"})
    refused(r"topology\.conf: does not say where 2 .*: n04, n05", {"n[04-05]": "a"}, domains=conf)
    fleet = tmp_path / "nodes.json"
    fleet.write_text(FLEET)
    auto = Cluster.from_files({}, {}, domains=fleet, levels=[ZONE], nics=8)
    assert [(kind.name, kind.gpus, kind.nics) for kind in auto.types] == [
        ("NVIDIA-H100-x8", 8, 8), ("gpu-x4", 4, 8),
    ]  # fmt: skip
    assert [(host.name, host.type, host.domains) for host in auto.hosts] == [
        ("n1.lab", "NVIDIA-H100-x8", ("z1",)), ("n2.lab", "NVIDIA-H100-x8", ("z1",)),
        ("m1", "gpu-x4", ("z2",)),
    ]  # fmt: skip
    fleet.write_text(FLEET.replace('"nvidia.com/gpu": "8"', '"nvidia.com/gpu": "2"'))
    with pytest.warns(UserWarning, match=r"nodes.json: names no network card: 1 a host is taken"):
        linked = Cluster.from_files({"NVIDIA-H100-x2": topo}, {}, domains=fleet)
    assert linked.types[0].links == (("X", "NV4"), ("NV4", "X"))
    refused("topo: 'a' has 2 GPUs; types of the nodes: NVIDIA-H100-x2 of 2", {}, domains=fleet)
    refused("nodes.json: does not say where 1 of the hosts .*: q", {"q": "a"}, domains=fleet)
