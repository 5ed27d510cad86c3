"""What a file about hosts and links looks like, for messages that refuse it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

from optsched.errors import InputError
from optsched.io.files import read_text
from optsched.io.strict_json import parse, read_json

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

T = TypeVar("T")

# colours and underlines, with ESC as a character, as written by `cat -v` and others, or lost
_ESCAPES: Final = re.compile(
    r"(?:\x1b|\^\[|\\033|\\e|\\x1b|\u241b)(?:\[[0-9;?]*[A-Za-z]|[()][A-Z0-9])|\[\d{0,2}(?:;\d{1,2})*m"
)
_FIRST: Final = 1 << 16  # characters that decide

_KINDS: Final = {
    r'"format"\s*:\s*"(optsched\.\w+)/': r"a document \1",
    r"Status Ok$|^ *GPU\d+\s+((X|OK|CNS|GNS|TNS|NS|U)\s+)*(OK|CNS|GNS|TNS|NS)\b":
        "`nvidia-smi topo -p2p`: print `topo -m`",
    r"ROCm System Management|^(ACCESS|WEIGHT|HOPS|LINK TYPE) TABLE:": "rocm-smi or amd-smi",
    r"^\s*(gpu\s+)?GPU0\s+GPU1\b|^GPU\d+\s+X\s": "a matrix of `nvidia-smi topo`",
    r"have an affinity with CPU|^NUMA IDs of closest CPU": "`nvidia-smi topo -c`: print `topo -m`",
    r"\| NVIDIA-SMI |NVSMI LOG|^GPU \d+: .*UUID": "`nvidia-smi`: print `nvidia-smi topo -m`",
    r"#\s*nThread \d+ nGpus \d|#\s*nccl-tests version": "a log of nccl-tests",
    r"# OSU ": "a log of OSU's benchmarks", r"MPI Benchmarks": "a log of Intel's MPI benchmarks",
    r"^ *#bytes +#iterations": "a log of perftest, such as ib_write_bw",
    r"^nvbandwidth": "a log of nvbandwidth", r"\bNCCL (INFO|WARN) ": "a log of NCCL, no test in it",
    r"<html|<!DOCTYPE html": "a web page", r"^\s*<(\?xml|system )": "XML",
    r"^NAME +STATUS +ROLES": "the table of `kubectl get nodes`: add `-o json`",
    r"^Name: +\S+\s+(Roles|Namespace): ": "`kubectl describe`: print `kubectl get nodes -o json`",
    r"^\s*apiVersion: ": "YAML of kubectl: print it with `-o json`",
    r'"apiVersion"\s*:': "JSON of kubectl",
    r"^NodeName=\S+ (Arch|CoresPerSocket)=": "`scontrol show node`",
    r"^(Switch|Block)Name=\S+ .*(Level|BlockIndex)=": "`scontrol show topology`",
    r"(?i)^(ClusterName|SlurmctldHost|NodeName|PartitionName) *=": "slurm.conf",
    r"(?i)^(SwitchName|BlockName) *=": "Slurm's topology.conf",
    r"^ *JOBID +\S": "the table of `squeue`: print `squeue --json`",
    r"^(- +|  )topology: ": "Slurm's topology.yaml", r"^PARTITION +AVAIL": "`sinfo`",
    r"^op,payload_bytes,": "measurements of `optsched gpus bandwidth import`",
    r"^host,": "a CSV of hosts and levels",
    r"\A\s*\d+[ \t]+\d+.*\n\s*\d+([ \t]+\d+)+\s*$": "an instance of a job shop",
}  # fmt: skip
"""Patterns of lines, the more specific first, and what has them."""


def looks_like(text: str) -> str:
    """``"; this looks like ..."``, if the kind of the text is recognised, else ``""``."""
    if not text.strip():
        return "; the file is empty"
    for pattern, kind in _KINDS.items():
        if found := re.search(pattern, text[:_FIRST], re.MULTILINE):
            return f"; this looks like {found.expand(kind)}"
    return ""


def without_escapes(text: str) -> str:
    """Remove the escape sequences of terminals."""
    return _ESCAPES.sub("", text)


def parsed(given: Any, file: str) -> Any:
    """Parse JSON unless it is parsed; the message for another text says what it looks like."""
    try:
        return parse(given, file) if isinstance(given, str) else given
    except InputError as error:
        error.args = (f"{error}{looks_like(given)}",)
        raise


def read_document(path: str | os.PathLike[str], read: Callable[..., T], *rest: Any) -> T:
    """Read a document of JSON; the message for another file says what it looks like."""
    try:
        return read_json(path, read, *rest)
    except InputError as error:
        if '"format"' not in (text := read_text(path)[:_FIRST]):
            error.args = (f"{error}{looks_like(text)}",)
        raise
