"""The document ``optsched.state/1``: free GPUs, running jobs, GPUs that are down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from optsched.bandwidth.topology.foreign import read_document
from optsched.bandwidth.topology.rates import KILOBYTES, kilobytes
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.io.strict_json import check_format, decode, lines, placed, rows

if TYPE_CHECKING:
    import os

    from optsched.bandwidth.topology.cluster import Cluster

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
    return read_document(path, lambda tree, name: from_tree(tree, cluster, name))


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
    with placed(f"{name}: "):
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


def to_json(state: ClusterState) -> bytes:
    """The document ``optsched.state/1``: one job a line, fields at their default left out."""
    written = state.cluster.written
    members: dict[str, Any] = {"format": FORMAT, "free": written(state.free)}
    if state.down:
        members["down"] = written(state.down)
    if state.jobs:
        rates = [None if job.demand is None else job.demand / KILOBYTES for job in state.jobs]
        jobs = zip(state.jobs, rates, strict=True)
        members["jobs"] = rows(_Job(job.name, written(job.gpus), rate) for job, rate in jobs)
    return lines(members)


__all__ = ["FORMAT", "from_tree", "read", "to_json"]
