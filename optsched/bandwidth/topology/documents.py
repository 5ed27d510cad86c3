"""The documents ``optsched.cluster/1`` and ``optsched.state/1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from optsched.bandwidth.topology.cluster import MOST_PER_HOST, Cluster, Host, HostType
from optsched.bandwidth.topology.foreign import read_document
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.rates import KILOBYTES, kilobytes
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import InputError
from optsched.io.strict_json import check_format, decode, format_json, lines, placed, rows

if TYPE_CHECKING:
    import os

CLUSTER: Final = "optsched.cluster/1"
STATE: Final = "optsched.state/1"

Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_PER_HOST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1024)]


class _Type(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    name: str
    gpus: Size
    nics: Count = 1
    nic_rate: float | None = None
    tray: Count = 0
    numa: list[list[Count]] = []
    links: list[list[str]] | None = None
    intra: dict[str, Any] | None = None


class _Host(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    name: str
    type: str
    domains: list[str] = []
    machines: list[str] = []


class _Cluster(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    name: str = ""
    levels: list[str] = []
    factors: dict[str, float] = {}
    uplinks: dict[str, float] = {}
    rails: bool = False
    types: Annotated[list[_Type], msgspec.Meta(min_length=1)]
    hosts: Annotated[list[_Host], msgspec.Meta(min_length=1)]


class _Job(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    gpus: str
    demand: float | None = None


class _State(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    free: str = ""
    down: str = ""
    unknown: list[str] = []
    jobs: list[_Job] = []


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster from a file; see `cluster_from_tree`."""
    return read_document(path, cluster_from_tree)


def cluster_from_tree(tree: Any, name: str) -> Cluster:
    """Read a cluster from parsed JSON, ``optsched.cluster/1``; `name` is the file in messages."""
    check_format(tree, CLUSTER, name)
    found = decode(tree, _Cluster, name)
    with placed(f"{name}: "):
        return Cluster(
            tuple(
                Host(host.name, host.type, tuple(host.domains), tuple(host.machines))
                for host in found.hosts
            ),
            tuple(_type(given) for given in found.types),
            tuple(found.levels),
            found.name,
            found.factors,
            found.uplinks,
            found.rails,
        )


def cluster_json(cluster: Cluster) -> bytes:
    """Write ``optsched.cluster/1``: one host a line, fields at their default left out."""
    members: dict[str, Any] = {"format": CLUSTER, "name": cluster.name}
    for key in ("levels", "factors", "uplinks", "rails"):
        if given := getattr(cluster, key):
            members[key] = given
    members["types"] = rows(map(_type_json, cluster.types))
    members["hosts"] = rows(
        _Host(h.name, h.type, list(h.domains), list(h.machines)) for h in cluster.hosts
    )
    return lines(members)


def read_state(path: str | os.PathLike[str], cluster: Cluster) -> ClusterState:
    """Read the state of a cluster from a file; see `state_from_tree`."""
    return read_document(path, lambda tree, name: state_from_tree(tree, cluster, name))


def state_from_tree(tree: Any, cluster: Cluster, name: str) -> ClusterState:
    """Read the state of a cluster from parsed JSON, ``optsched.state/1``.

    ``"free": "rest"``: all GPUs that are neither held nor down.
    """
    check_format(tree, STATE, name)
    found = decode(tree, _State, name)
    with placed(f"{name}: "):
        jobs = tuple(
            Job(
                job.name,
                cluster.parse(job.gpus, f"jobs[{i}].gpus"),
                None if job.demand is None else kilobytes(f"jobs[{i}].demand", job.demand),
            )
            for i, job in enumerate(found.jobs)
        )
        down = cluster.parse(found.down, "down")
        if found.free == "rest":
            used = set(down).union(*(job.gpus for job in jobs))
            free = tuple(gpu for gpu in range(cluster.n_gpus) if gpu not in used)
        else:
            free = cluster.parse(found.free, "free")
        return ClusterState(cluster, free, jobs, down, frozenset(found.unknown))


def state_json(state: ClusterState) -> bytes:
    """Write ``optsched.state/1``: one job a line, fields at their default left out."""
    written = state.cluster.written
    members: dict[str, Any] = {"format": STATE, "free": written(state.free)}
    if state.down:
        members["down"] = written(state.down)
    if state.unknown:
        members["unknown"] = sorted(state.unknown)
    if state.jobs:
        rates = [None if job.demand is None else job.demand / KILOBYTES for job in state.jobs]
        jobs = zip(state.jobs, rates, strict=True)
        members["jobs"] = rows(_Job(job.name, written(job.gpus), rate) for job, rate in jobs)
    return lines(members)


def _type(given: _Type) -> HostType:
    fields = msgspec.structs.asdict(given)
    if given.intra is not None:
        place = f"types[{given.name}].intra"
        for key, rate in given.intra.items():
            if isinstance(rate, bool) or not isinstance(rate, (int, float)):
                got = format_json(rate)
                raise InputError(f"{place}[{format_json(key)}]: expected GB/s, got {got}")
        fields["intra"] = IntraTable.from_rates(given.gpus, given.intra, place)
    if given.links is not None:
        fields["links"] = tuple(map(tuple, given.links))
    return HostType(**fields | {"numa": tuple(map(tuple, given.numa))})


def _type_json(kind: HostType) -> bytes:
    """A type over several lines: a row of links, or the subsets of a size, on one each."""
    members: dict[str, Any] = {"name": kind.name, "gpus": kind.gpus, "nics": kind.nics}
    if kind.nic_rate is not None:
        members["nic_rate"] = float(kind.nic_rate)
    if kind.tray:
        members["tray"] = kind.tray
    if kind.numa != (tuple(range(kind.gpus)),):
        members["numa"] = kind.numa
    if kind.links is not None:
        members["links"] = rows(kind.links, 3)
    if kind.intra is not None:
        members["intra"] = _intra_json(kind.intra)
    return lines(members, 2)


def _intra_json(table: IntraTable) -> bytes:
    sizes: dict[int, list[bytes]] = {}
    for at, value in enumerate(table.values.tolist()):
        size = at.bit_count() if table.by_subset else at
        if size < 2:
            continue
        key = str(at)
        if table.by_subset:
            key = ",".join(str(i) for i in range(table.gpus) if at >> i & 1)
        # an integer of kB/s as GB/s comes back unchanged: doubles have 15 digits
        sizes.setdefault(size, []).append(b'"%s": %a' % (key.encode(), value / KILOBYTES))
    body = b",\n        ".join(b", ".join(sizes[size]) for size in sorted(sizes))
    return b"{\n        " + body + b"\n      }" if sizes else b"{}"
