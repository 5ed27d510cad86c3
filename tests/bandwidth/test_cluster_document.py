"""The document ``optsched.cluster/1``: nothing is lost, nothing wrong is read."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.documents import cluster_from_tree as from_tree
from optsched.bandwidth.topology.documents import cluster_json as to_json
from optsched.bandwidth.topology.feasibility import impossible
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.rates import MOST
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import InputError
from optsched.io.strict_json import parse

if TYPE_CHECKING:
    from pathlib import Path

RATE = st.integers(0, MOST - 1)
NAME = st.text("ab-Ü_.01 '\"\\", min_size=1, max_size=5)


@st.composite
def host_types(draw: st.DrawFn, name: str) -> HostType:
    """Types with everything the document holds."""
    n = draw(st.integers(1, 5))
    ways = st.sampled_from(["SYS", "PIX", "NV4"])
    pairs = {(i, k): draw(ways) for i in range(n) for k in range(i)}
    links = tuple(
        tuple("X" if i == k else pairs[max(i, k), min(i, k)] for k in range(n)) for i in range(n)
    )
    size = draw(st.sampled_from([n + 1, 1 << n]))
    rates = draw(st.lists(RATE, min_size=size, max_size=size))
    order = draw(st.permutations(range(n)))
    cut = draw(st.integers(0, n))
    groups = tuple(group for group in (tuple(order[:cut]), tuple(order[cut:])) if group)
    return HostType(
        name, n,
        links=draw(st.sampled_from([None, links])),
        numa=draw(st.sampled_from([(), groups])),
        nics=draw(st.integers(0, 9)),
        nic_rate=draw(RATE) / 1e6,
        intra=draw(st.sampled_from([None, IntraTable(n, rates)])),
        tray=draw(st.sampled_from([t for t in range(n + 1) if not t or n % t == 0])),
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """One to three types, up to six hosts, up to two levels."""
    names = draw(st.lists(NAME, min_size=1, max_size=3, unique=True))
    types = [draw(host_types(name)) for name in names]
    levels = draw(st.sampled_from([(), ("rack",), ("block", "rack")]))
    hosts = []
    for h in range(draw(st.integers(1, 6))):
        way = tuple(f"d{h // (3 - k)}" for k in range(len(levels)))
        hosts.append(Host(f"n{h:02}", draw(st.sampled_from(names)), way))
    try:
        return Cluster(tuple(hosts), tuple(types), levels, draw(st.text("aü ", max_size=3)))
    except InputError:  # a rack in two blocks
        return Cluster(tuple(Host(h.name, h.type) for h in hosts), tuple(types))


@given(clusters())
def test_round_trip(cluster: Cluster) -> None:
    """The same cluster, to the kB/s, and the same text again."""
    text = to_json(cluster)
    again = from_tree(json.loads(text), "c")
    assert again == cluster and again.name == cluster.name
    assert (again.types, again.hosts) == (cluster.types, cluster.hosts)
    assert to_json(again) == text


def test_files(tmp_path: Path) -> None:
    """By way of a file; faults name it."""
    path = tmp_path / "c.json"
    cluster = Cluster.uniform(HostType("h", 2), 3)
    cluster.write(path)
    assert Cluster.read(path) == cluster
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"c\.json:\d+:\d+: not valid JSON"):
        Cluster.read(path)


BASE: dict[str, Any] = {
    "format": "optsched.cluster/1",
    "levels": ["block", "rack"],
    "types": [
        {
            "name": "h", "gpus": 2, "links": [["X", "NV4"], ["NV4", "X"]], "intra": {"0,1": 3.5},
        }
    ],
    "hosts": [
        {"name": "a", "type": "h", "domains": ["b1", "r1"]},
        {"name": "b", "type": "h", "domains": ["b1", "r2"]},
    ],
}  # fmt: skip

BAD: list[tuple[tuple[Any, ...], Any, str]] = [
    (("format",), "optsched.cluster/2", "c: format: .* is newer"),
    (("format",), "optsched.state/1", "c: format: expected"),
    (("hots",), [], 'c: top level: unknown field "hots"'),
    (("types", 0, "gpu"), 4, r'c: types\[0\]: unknown field "gpu"'),
    (("hosts", 0, "rack"), "r", r'c: hosts\[0\]: unknown field "rack"'),
    (("hosts",), [], "c: hosts: expected"),
    (("types",), [], "c: types: expected"),
    (("types", 0, "gpus"), 0, r"c: types\[0\]\.gpus: expected an integer >= 1, got 0"),
    (("types", 0, "gpus"), 2.0, r"c: types\[0\]\.gpus: expected an integer"),
    (("types", 0, "gpus"), 10**9, r"c: types\[0\]\.gpus: expected an integer <= 256"),
    (("types", 0, "gpus"), 3, r"c: types\[h\]\.intra: 3 of the subsets are missing"),
    (("types", 0, "tray"), 3, r"c: types\[h\]\.tray: expected an integer in 0\.\.2"),
    (("types", 0, "nic_rate"), -1.0, r"c: types\[h\]\.nic_rate: expected GB/s >= 0"),
    (("types", 0, "nic_rate"), 50000.0, r"c: types\[h\]\.nic_rate: .*MB/s\?"),
    (("types", 0, "numa"), [[0]], r"c: types\[h\]\.numa: expected every GPU"),
    (("types", 0, "links"), [["X", "NV4"]], r"c: types\[h\]\.links: expected 2 rows of 2"),
    (("types", 0, "links", 0, 1), "SYS", r"c: types\[h\]\.links\[0\]\[1\]: SYS, but \[1\]\[0\]"),
    (("types", 0, "links", 0, 1), "NV?", r"c: types\[h\]\.links\[0\]\[1\]: expected one of"),
    (("types", 0, "intra"), {}, r"c: types\[h\]\.intra: expected a value for each count"),
    (("types", 0, "intra"), {"0,1": "3"}, r'c: types\[h\]\.intra\["0,1"\]: expected GB/s, got "3"'),
    (("types", 0, "intra"), {"0,1": True}, r"expected GB/s, got true"),
    (("types", 0, "intra"), {"0,2": 3.0}, r"c: types\[h\]\.intra: expected GPU ids in 0\.\.1"),
    (("types", 0, "intra"), {"0,1": -3.0}, r"c: types\[h\]\.intra\['0,1'\]: expected GB/s >= 0"),
    (("types", 0, "intra"), {"0,1": 9.0, "1,0": 9.0}, r"'1,0' is given twice"),
    (("types", 0, "intra"), {"pair": 3.0}, r'c: types\[h\]\.intra: expected subsets .* got "pair"'),
    (("types", 0, "intra"), {"02": 3.0}, r'c: types\[h\]\.intra: expected subsets .* got "02"'),
    (
        ("types", 0, "intra"),
        {"2": 3.0, "3": 4.0},
        r"c: types\[h\]\.intra: expected a value for eac",
    ),
    (("hosts", 1, "name"), "a", r"c: hosts\[1\]\.name: there are two hosts 'a'"),
    (("hosts", 1, "name"), "a/b", r"c: hosts\[1\]\.name: expected a name without"),
    (("hosts", 1, "type"), "z", r"c: hosts\[1\]\.type: there is no type 'z'; known: h"),
    (("hosts", 1, "domains"), ["b1"], r"c: hosts\[1\]\.domains: expected one name for each"),
    (("factors",), {"row": 0.5}, "c: factors: expected one of block, rack, cluster, got 'row'"),
    (("factors",), {"rack": 0.5, "block": 0.9}, "c: factors\\[block\\]: expected 0.5 at most"),
    (("factors",), {"rack": 0}, "c: factors\\[rack\\]: expected a share"),
    (("uplinks",), {"rack": 0}, "c: uplinks\\[rack\\]: expected GB/s > 0, got 0"),
    (("levels",), ["rack", "rack"], "c: levels: expected distinct names"),
]


@pytest.mark.parametrize("at", range(len(BAD)))
def test_refused(at: int) -> None:
    """One field changed: the message has the file, the path and the rule."""
    path, value, message = BAD[at]
    tree = copy.deepcopy(BASE)
    from_tree(tree, "c")
    node: Any = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(InputError, match=message):
        from_tree(tree, "c")


def test_intra_by_count() -> None:
    """Keys without commas are numbers of GPUs; single GPUs may be listed among subsets."""
    tree = copy.deepcopy(BASE)
    tree["types"][0]["intra"] = {"2": 7}
    table = from_tree(tree, "c").types[0].intra
    assert table is not None and not table.by_subset and table.of(3) == 7_000_000
    tree["types"][0]["intra"] = {"0": 0, "1": 0.0, "0,1": 7.25}
    table = from_tree(tree, "c").types[0].intra
    assert table is not None and table.by_subset and table.of(3) == 7_250_000


def test_no_object() -> None:
    """Something else than an object is refused in one sentence."""
    for tree in ([], 3, None, "optsched.cluster/1"):
        with pytest.raises(InputError, match="c: expected a JSON object"):
            from_tree(tree, "c")


FABRICS = [
    ((), 1), (("leaf",), 2), (("spine", "leaf"), 2), (("zone", "rack"), 2), (("fabric",), 2),
    (("rack",), 1), (("block", "rack"), 1), (("block4", "block"), 1), (("topology-block",), 1),
    (("network-node-layer-1",), 1), (("pod",), 1), (("superblock_pod", "x"), 1), (("site",), 2),
]  # fmt: skip


@pytest.mark.parametrize(("levels", "fabrics"), FABRICS)
def test_fabrics(levels: tuple[str, ...], fabrics: int) -> None:
    """Domains of the top level are not joined, unless they are parts of one fabric."""
    ways = [("a",) * len(levels), ("b",) * len(levels)]
    hosts = tuple(Host(f"n{i}", "h", way) for i, way in enumerate(ways))
    assert len(Cluster(hosts, (HostType("h", 2),), levels).fabrics) == fabrics
    if levels:
        made = Cluster(hosts, (HostType("h", 2),), levels, factors={"cluster": 0.5})
        assert len(made.fabrics) == 1


def test_names_of_domains_repeat_in_other_parents() -> None:
    """They stay apart, and are called by their way where the name alone says too little."""
    ways = [("b1", "r1"), ("b1", "r2"), ("b2", "r1"), ("b2", "r3"), ("b1", "r1")]
    hosts = tuple(Host(f"n{i}", "h", way) for i, way in enumerate(ways))
    cluster = Cluster(hosts, (HostType("h", 2),), ("block", "rack"))
    assert cluster.domains(1) == {"b1/r1": (0, 4), "r2": (1,), "b2/r1": (2,), "r3": (3,)}
    state = ClusterState.idle(cluster)
    assert Policy(required="rack").broken_by(cluster, {0: 1, 2: 1}) != ""
    assert impossible(state, Policy(required="rack"), 5).endswith("is 'b1/r1' with 4")
    assert from_tree(parse(to_json(cluster).decode(), "c"), "c") == cluster
