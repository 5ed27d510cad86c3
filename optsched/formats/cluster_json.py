"""The document ``optsched.cluster/1``: types of hosts, hosts, and the domains they are in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from optsched.bandwidth.cluster import MOST_PER_HOST, Cluster, Host, HostType
from optsched.bandwidth.intra import IntraTable
from optsched.bandwidth.rates import KILOBYTES
from optsched.errors import InputError
from optsched.io.files import read_text
from optsched.io.strict_json import check_format, decode, format_json, parse, without_collector

if TYPE_CHECKING:
    import os

FORMAT = "optsched.cluster/1"

Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_PER_HOST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1024)]


class _Type(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    name: str
    gpus: Size
    nics: Count = 1
    nic_rate: float = 50.0
    tray: Count = 0
    numa: list[list[Count]] = []
    links: list[list[str]] | None = None
    intra: dict[str, Any] | None = None


class _Host(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    name: str
    type: str
    domains: list[str] = []


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    levels: list[str] = []
    pod: str | None = None
    types: Annotated[list[_Type], msgspec.Meta(min_length=1)]
    hosts: Annotated[list[_Host], msgspec.Meta(min_length=1)]


def read(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster from a file; see `from_tree`."""
    name = str(path)
    with without_collector():
        return from_tree(parse(read_text(path), name), name)


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
    try:
        return Cluster(
            tuple(Host(host.name, host.type, tuple(host.domains)) for host in found.hosts),
            tuple(_type(given) for given in found.types),
            tuple(found.levels),
            found.pod,
            found.name,
        )
    except InputError as error:
        error.args = (f"{name}: {error.args[0]}",)
        raise


def to_json(cluster: Cluster) -> bytes:
    """The document ``optsched.cluster/1``: one host a line, fields at their default left out."""
    encode = msgspec.json.encode
    members = [("format", encode(FORMAT)), ("name", encode(cluster.name))]
    if cluster.levels:
        members.append(("levels", encode(cluster.levels)))
    if cluster.pod is not None:
        members.append(("pod", encode(cluster.pod)))
    members.append(("types", _listed([_type_json(kind) for kind in cluster.types])))
    hosts = [encode(_Host(host.name, host.type, list(host.domains))) for host in cluster.hosts]
    members.append(("hosts", _listed(hosts)))
    body = b",\n".join(b'  "%s": %s' % (key.encode(), value) for key, value in members)
    return b"{\n" + body + b"\n}\n"


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
    encode = msgspec.json.encode
    members = [("name", encode(kind.name)), ("gpus", encode(kind.gpus))]
    members += [("nics", encode(kind.nics)), ("nic_rate", encode(float(kind.nic_rate)))]
    if kind.tray:
        members.append(("tray", encode(kind.tray)))
    if kind.numa != (tuple(range(kind.gpus)),):
        members.append(("numa", encode(kind.numa)))
    if kind.links is not None:
        rows = b",\n        ".join(encode(row) for row in kind.links)
        members.append(("links", b"[\n        " + rows + b"\n      ]"))
    if kind.intra is not None:
        members.append(("intra", _intra_json(kind.intra)))
    body = b",\n".join(b'      "%s": %s' % (key.encode(), value) for key, value in members)
    return b"{\n" + body + b"\n    }"


def _intra_json(table: IntraTable) -> bytes:
    lines: dict[int, list[bytes]] = {}
    for at, value in enumerate(table.values.tolist()):
        size = at.bit_count() if table.by_subset else at
        if size < 2:
            continue
        key = str(at)
        if table.by_subset:
            key = ",".join(str(i) for i in range(table.gpus) if at >> i & 1)
        # an integer of kB/s as GB/s comes back unchanged: doubles have 15 digits
        lines.setdefault(size, []).append(b'"%s": %a' % (key.encode(), value / KILOBYTES))
    body = b",\n        ".join(b", ".join(lines[size]) for size in sorted(lines))
    return b"{\n        " + body + b"\n      }" if lines else b"{}"


def _listed(parts: list[bytes]) -> bytes:
    return b"[\n    " + b",\n    ".join(parts) + b"\n  ]"


__all__ = ["FORMAT", "from_tree", "read", "to_json"]
