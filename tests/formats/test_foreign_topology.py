"""Files of others given to every reader of clusters and measurements: refused by what they are."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

from optsched.bandwidth.models.measurements import MeasurementTable
from optsched.bandwidth.topology.cluster import Cluster
from optsched.errors import InputError
from optsched.formats.nccl_tests import read_logs
from optsched.formats.nvidia_topo import from_text
from optsched.formats.topology import read_domains
from optsched.io.files import read_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MATRIX = "\tGPU0\tGPU1\tNIC0\nGPU0\tX\tNV4\tPIX\nGPU1\tNV4\tX\tPIX\nNIC0\tPIX\tPIX\tX\n"
LOG = """# nThread 1 nGpus 1 minBytes 8 maxBytes 8
#  Rank  0 Group  0 Pid 10 on    n01 device  0 [0x07] NVIDIA H100
#  Rank  1 Group  0 Pid 11 on    n02 device  0 [0x07] NVIDIA H100
#  Rank  2 Group  0 Pid 11 on    n03 device  0 [0x07] NVIDIA H100
#  size   count  type  redop  root   time   algbw  busbw #wrong  time  algbw  busbw #wrong
   4096    1024  float   sum    -1  12.30   10.00  13.33      0  12.3  10.00  10.00    N/A
# Avg bus bandwidth    : 10.0
"""
ROCM = (
    "============================ ROCm System Management Interface ============================\n"
    "=========================== Weight between two GPUs ============================\n"
    " GPU0 GPU1\nGPU0 0 15\nGPU1 15 0\n"
    "========================== Link Type between two GPUs ==========================\n"
    " GPU0 GPU1\nGPU0 0 XGMI\nGPU1 XGMI 0\n"
)
NODES = (
    '{"apiVersion": "v1", "kind": "List", "items": [{"kind": "Node", "metadata": {"name": "a"}, '
    '"status": {"capacity": {"nvidia.com/gpu": "8"}}}]}'
)
READERS: dict[str, Callable[[Path], object]] = {
    "links": lambda path: from_text(read_text(path), "h", str(path), nics=1),
    "domains": read_domains,
    "log": read_logs,
    "measurements": MeasurementTable.read,
    "cluster": Cluster.read,
}
FILES: dict[str, tuple[str, str, str]] = {
    "nvidia-smi topo -m": (MATRIX, "links", "a matrix of `nvidia-smi topo`"),
    "nvidia-smi topo -mp": (
        MATRIX.replace("NV4", "SYS") + "\nLegend:\n\n  X    = Self\n  SYS  = Connection\n", "",
        "a matrix of `nvidia-smi topo`|`nvidia-smi topo -mp`"),
    "nvidia-smi topo -p2p": (
        " \tGPU0\tGPU1\t\n GPU0\tX\tNS\t\n GPU1\tNS\tX\t\n\nLegend:\n\n  OK   = Status Ok\n", "",
        "`nvidia-smi topo -p2p`: print `topo -m`"),
    "nvidia-smi": (
        "+----+\n| NVIDIA-SMI 570.86   Driver Version: 570.86 |\n", "", "`nvidia-smi`: print"),
    "rocm-smi": (ROCM, "links", "rocm-smi or amd-smi"),
    "nccl-tests": (LOG, "log", "a log of nccl-tests"),
    "topology.conf": ("SwitchName=s0 Nodes=n[1-2]\n", "domains", "Slurm's topology.conf"),
    "topology.yaml": ("- topology: a\n  block:\n    blocks: [{block: b, nodes: n1}]\n", "domains",
                      "Slurm's topology.yaml"),
    "scontrol show node": (
        "NodeName=n1 Arch=x86_64 CoresPerSocket=32\n   State=IDLE+DRAIN Gres=gpu:h100:8\n", "",
        "`scontrol show node`"),
    "kubectl YAML": ("apiVersion: v1\nitems:\n- apiVersion: v1\n  kind: Node\n", "",
                     "YAML of kubectl: print it with `-o json`"),
    "kubectl JSON": (NODES, "domains", "JSON of kubectl"),
    "CSV of labels": ("host,rack\nn1,r1\n", "domains", "a CSV of hosts and levels"),
    "CSV of measurements": (
        "op,payload_bytes,hosts,pattern,gpus,busbw_GBps\nreduce,8,2,2+1,,4.5\n", "measurements",
        "measurements of `optsched gpus bandwidth import`"),
    "state": ('{"format": "optsched.state/1", "free": "n1"}', "", r"optsched\.state"),
    "job shop": ("2 2\n0 5 1 7\n1 4 0 6\n", "", "an instance of a job shop"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_foreign(name: str, tmp_path: Path) -> None:
    """A file goes to the reader that it is for; others name the file and what it looks like."""
    text, own, kind = FILES[name]
    path = tmp_path / "x.txt"
    path.write_text(text)
    for reader, read in READERS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if reader == own:
                read(path)
                continue
            with pytest.raises(InputError) as error:
                read(path)
        assert str(error.value).startswith(f"{path}") and "\n" not in str(error.value)
        if reader in ("measurements", "cluster") and name in ("squeue", "sacct", "Tiresias"):
            continue  # tables of jobs are not known so far down
        message = str(error.value).removeprefix(f"{path}")
        guess = [f"looks like {word}" for word in kind.split("|")] + kind.split("|")
        assert any(word.replace("\\", "") in message for word in guess), (reader, message)
