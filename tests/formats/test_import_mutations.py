"""Files that somebody's editor, shell or disk has damaged: read, or refused in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth import MeasurementTable
from optsched.bandwidth.topology import documents
from optsched.bandwidth.topology.cluster import Cluster, HostType
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import InputError
from optsched.formats import (
    host_domains,
    nccl_tests,
    nvidia_topo,
    slurm_topology,
)
from optsched.io.strict_json import parse

if TYPE_CHECKING:
    from collections.abc import Callable

PAIR = Cluster.uniform(HostType("h", 2, (("X", "NV4"), ("NV4", "X"))), 2, name="c")
LOG = """# nThread 1 nGpus 1 minBytes 8 maxBytes 8
#  Rank  0 Group  0 Pid 10 on    n01 device  0 [0x07] NVIDIA H100
#  Rank  1 Group  0 Pid 11 on    n02 device  0 [0000:07:00] NVIDIA H100
#  size   count  type  redop  root   time   algbw  busbw #wrong  time  algbw  busbw #wrong
   4096    1024  float   sum    -1  12.30   10.00  10.00      0  12.3  10.00  10.00    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 10.0
"""


def _nccl(text: str, folder: Any) -> object:
    path = folder / "x.log"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return nccl_tests.read_logs(path)


READERS: dict[str, tuple[str, Callable[[str, Any], object]]] = {
    "nccl-tests": (LOG, _nccl),
    "topology": (
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV4\tPIX\t0-3\nGPU1\tNV4\t X \tPIX\t4-7\n"
        "NIC0\tPIX\tPIX\t X \t\n\nLegend:\n",
        lambda text, _: nvidia_topo.from_text(text, "h"),
    ),
    "tree": (
        "SwitchName=s0 Nodes=n[08-10] # a\nSwitchName=s1 \\\n Switches=s0\n",
        lambda text, _: slurm_topology.from_slurm(text),
    ),
    "blocks": (
        "BlockName=b0 Nodes=n[1-2]\nBlockName=b1 Nodes=n3,n4\nBlockSizes=2,4\n",
        lambda text, _: slurm_topology.from_slurm(text),
    ),
    "labels": (
        'host,zone,rack\nn[1-2],z1,"r1"\nn3,z1,r2\n',
        lambda text, _: host_domains.from_labels(text),
    ),
    "yaml": (
        "- topology: a\n  cluster_default: true\n  tree:\n    switches:\n"
        "    - {switch: s0, nodes: 'n[08-10]'}\n    - {switch: t, children: s0}\n",
        lambda text, _: slurm_topology.from_slurm(text),
    ),
    "nodes": (
        '{"items": [{"kind": "Node", "metadata": {"name": "a", "labels": {"z": "1"}}, '
        '"status": {"capacity": {"amd.com/gpu": "8"}}}]}',
        lambda text, _: host_domains.from_nodes(parse(text, "n"), "n", ["z"]),
    ),
    "rocm": (
        "== Weight ==\n GPU0 GPU1\nGPU0 0 15\nGPU1 15 0\n"
        "== Hops ==\n GPU0 GPU1\nGPU0 0 1\nGPU1 1 0\n== Link Type between two GPUs ==\n"
        " GPU0 GPU1\nGPU0 0 XGMI\nGPU1 XGMI 0\n== Numa Nodes ==\n"
        "GPU[0] : (Topology) Numa Node: 0\nGPU[1] : (Topology) Numa Node: 1\n",
        lambda text, _: nvidia_topo.from_text(text, "h", nics=1),
    ),
    "measurements": (
        'op,payload_bytes,hosts,pattern,gpus,busbw_GBps\nreduce,8,2,2+1,"a:0,1 b:3",4.5\n',
        lambda text, _: MeasurementTable.parse(text, "m"),
    ),
    "cluster": (
        documents.cluster_json(PAIR).decode(),
        lambda text, _: documents.cluster_from_tree(parse(text, "c"), "c"),
    ),
    "state": (
        documents.state_json(ClusterState.idle(PAIR).take((0, 3), "a", 5)).decode(),
        lambda text, _: documents.state_from_tree(parse(text, "s"), PAIR, "s"),
    ),
}
PIECES = st.sampled_from(
    [*"0123456789,;:=[]-\\#\"'\n\r\t\0\x1b+.{} ", "NV", "X", "GPU1", "\u0661", "\u2028", "9" * 30]
)  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
def test_damaged(kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """The whole file is read; with pieces lost, doubled or added it is read or refused."""
    text, reader = READERS[kind]
    folder = tmp_path_factory.getbasetemp()
    reader(text, folder)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 30)))
        middle = data.draw(st.sampled_from(["", text[start:end] * 2]) | PIECES)
        text = text[:start] + middle + text[end:]
    try:
        reader(text, folder)
    except InputError as error:
        assert str(error) and "\n" not in str(error)
