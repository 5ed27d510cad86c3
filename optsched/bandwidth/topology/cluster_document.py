"""The document ``optsched.cluster/1``: types of hosts, hosts, and the domains they are in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from optsched.bandwidth.topology.cluster import MOST_PER_HOST, Cluster, Host, HostType
from optsched.bandwidth.topology.foreign import read_document
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.rates import KILOBYTES
from optsched.errors import InputError
from optsched.io.strict_json import (
    check_format,
    decode,
    format_json,
    lines,
    placed,
    rows,
)

if TYPE_CHECKING:
    import os

FORMAT = "optsched.cluster/1"

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
    near: list[list[str]] = []
    intra: dict[str, Any] | None = None


class _Host(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    name: str
    type: str
    domains: list[str] = []


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    levels: list[str] = []
    factors: dict[str, float] = {}
    uplinks: dict[str, float] = {}
    types: Annotated[list[_Type], msgspec.Meta(min_length=1)]
    hosts: Annotated[list[_Host], msgspec.Meta(min_length=1)]


def read(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster from a file; see `from_tree`."""
    return read_document(path, from_tree)


def from_tree(tree: Any, name: str) -> Cluster:
    """Read a cluster from parsed JSON.

    Parameters
    ----------
    tree
        ``optsched.cluster/1``. Bandwidths are GB/s; `intra` maps subsets ("0,1"), or numbers of
        GPUs ("2"), to them.
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
        return Cluster(
            tuple(Host(host.name, host.type, tuple(host.domains)) for host in found.hosts),
            tuple(_type(given) for given in found.types),
            tuple(found.levels),
            found.name,
            found.factors,
            found.uplinks,
        )


def to_json(cluster: Cluster) -> bytes:
    """The document ``optsched.cluster/1``: one host a line, fields at their default left out."""
    members: dict[str, Any] = {"format": FORMAT, "name": cluster.name}
    if cluster.levels:
        members["levels"] = cluster.levels
    for key in ("factors", "uplinks"):
        if given := getattr(cluster, key):
            members[key] = given
    members["types"] = rows(map(_type_json, cluster.types))
    members["hosts"] = rows(_Host(h.name, h.type, list(h.domains)) for h in cluster.hosts)
    return lines(members)


def _type(given: _Type) -> HostType:
    intra = None
    if given.intra is not None:
        intra = _intra(given.intra, given.gpus, f"types[{given.name}].intra")
    return HostType(
        given.name,
        given.gpus,
        None if given.links is None else tuple(tuple(row) for row in given.links),
        tuple(tuple(group) for group in given.numa),
        given.nics,
        given.nic_rate,
        intra,
        given.tray,
        tuple(map(tuple, given.near)),
    )


def _intra(given: dict[str, Any], gpus: int, place: str) -> IntraTable:
    for key, rate in given.items():
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise InputError(f"{place}[{format_json(key)}]: expected GB/s, got {format_json(rate)}")
    if any("," in key for key in given):
        return IntraTable.from_subsets(gpus, given, place)
    counts: dict[int, float] = {}
    for key, rate in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 3 or str(int(key)) != key:
            raise InputError(
                f'{place}: expected subsets such as "0,1" or numbers of GPUs such as "2", '
                f"got {format_json(key)}"
            )
        counts[int(key)] = rate
    return IntraTable.from_counts(counts, gpus, place)


def _type_json(kind: HostType) -> bytes:
    """A type over several lines: a row of links, or the subsets of a size, on one each."""
    members: dict[str, Any] = {"name": kind.name, "gpus": kind.gpus, "nics": kind.nics}
    if kind.nic_rate is not None:
        members["nic_rate"] = float(kind.nic_rate)
    if kind.tray:
        members["tray"] = kind.tray
    if kind.numa != (tuple(range(kind.gpus)),):
        members["numa"] = kind.numa
    if kind.near:
        members["near"] = kind.near
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


__all__ = ["FORMAT", "from_tree", "read", "to_json"]
