"""The document ``optsched.state/1``: free GPUs, running jobs, GPUs that are down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from optsched.bandwidth.rates import KILOBYTES, kilobytes
from optsched.bandwidth.state import ClusterState, Job
from optsched.errors import InputError
from optsched.io.files import read_text
from optsched.io.strict_json import check_format, decode, parse, without_collector

if TYPE_CHECKING:
    import os

    from optsched.bandwidth.cluster import Cluster

FORMAT = "optsched.state/1"


class _Job(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    gpus: str
    demand: float | None = None


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    free: str = ""
    down: str = ""
    jobs: list[_Job] = []


def read(path: str | os.PathLike[str], cluster: Cluster) -> ClusterState:
    """Read the state of a cluster from a file; see `from_tree`."""
    name = str(path)
    with without_collector():
        return from_tree(parse(read_text(path), name), cluster, name)


def from_tree(tree: Any, cluster: Cluster, name: str) -> ClusterState:
    """Read the state of a cluster from parsed JSON.

    Parameters
    ----------
    tree
        ``optsched.state/1``: GPUs in words such as ``"n01:0-5 n02"`` (see `Cluster.parse`), what
        a job asks for in GB/s; without `demand`, as much as it can get.
    cluster
        Whose GPUs they are.
    name
        File name for messages.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    check_format(tree, FORMAT, name)
    found = decode(tree, _Document, name)
    try:
        jobs = tuple(
            Job(
                job.name,
                cluster.parse(job.gpus, f"jobs[{i}].gpus"),
                None if job.demand is None else kilobytes(f"jobs[{i}].demand", job.demand),
            )
            for i, job in enumerate(found.jobs)
        )
        return ClusterState(
            cluster, cluster.parse(found.free, "free"), jobs, cluster.parse(found.down, "down")
        )
    except InputError as error:
        error.args = (f"{name}: {error.args[0]}",)
        raise


def to_json(state: ClusterState) -> bytes:
    """The document ``optsched.state/1``: one job a line, fields at their default left out."""
    encode = msgspec.json.encode
    written = state.cluster.written
    members = [("format", encode(FORMAT)), ("free", encode(written(state.free)))]
    if state.down:
        members.append(("down", encode(written(state.down))))
    if state.jobs:
        jobs = [
            encode(
                _Job(
                    job.name,
                    written(job.gpus),
                    None if job.demand is None else job.demand / KILOBYTES,
                )
            )
            for job in state.jobs
        ]
        members.append(("jobs", b"[\n    " + b",\n    ".join(jobs) + b"\n  ]"))
    body = b",\n".join(b'  "%s": %s' % (key.encode(), value) for key, value in members)
    return b"{\n" + body + b"\n}\n"


__all__ = ["FORMAT", "from_tree", "read", "to_json"]
