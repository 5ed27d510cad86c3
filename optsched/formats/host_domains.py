"""Which domains hosts are in: a CSV of labels, or the nodes of Kubernetes.

The CSV has the header ``host,level...``. The nodes are what ``kubectl get nodes -o json`` prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.bandwidth.topology.host_lists import expand
from optsched.errors import InputError
from optsched.io.csv_rows import csv_records
from optsched.io.strict_json import decode, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_COUNT = re.compile(r"[0-9]{1,4}")
_GPUS: Final = {
    "nvidia.com/gpu": ("nvidia.com/gpu.product",),
    "amd.com/gpu": ("amd.com/gpu.product-name", "beta.amd.com/gpu.product-name"),
}
"""Resources, and labels of the product: of GPU feature discovery, and of AMD's node labeller."""


class _Metadata(msgspec.Struct):
    name: str
    labels: dict[str, str] = {}


class _Status(msgspec.Struct):
    capacity: dict[str, str] = {}


class _Node(msgspec.Struct):
    metadata: _Metadata
    status: _Status


class _Nodes(msgspec.Struct):
    items: list[_Node]


@dataclass(frozen=True)
class Domains:
    """Names of levels, widest first, and for every host its domain on each of them.

    Where the source knows them, `kinds` has the type and the number of GPUs of every host.
    """

    levels: tuple[str, ...]
    of: Mapping[str, tuple[str, ...]]
    kinds: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def from_labels(text: str, name: str = "labels") -> Domains:
    """Domains from a CSV whose header is ``host`` and the levels, widest first.

    Parameters
    ----------
    text
        One line a host, or a list of hosts such as ``n[01-04]``.
    name
        File name for messages.

    Raises
    ------
    InputError
        With ``file:line``: another header, cells missing or empty, a host twice, or a domain that
        lies in two domains of the level above.
    """
    if not re.match("host,.", text.lstrip().replace('"', "")):
        got = text.strip().partition("\n")[0].strip()
        raise InputError(f"{name}:1: expected a header host,LEVEL,..., got {got!r:.60}")
    levels: tuple[str, ...] = ()
    of: dict[str, tuple[str, ...]] = {}
    above: dict[tuple[int, str], tuple[str, ...]] = {}
    for place, cells in csv_records(text, name, (), ("host",)):
        levels, way = tuple(cells)[1:], tuple(cells.values())[1:]
        if "" in cells.values() or "" in levels:
            raise InputError(
                f"{place}: expected a host and a label for each of {', '.join(levels)}"
            )
        for k, domain in enumerate(way):
            other = above.setdefault((k, domain), way[:k])
            if other != way[:k]:
                raise InputError(
                    f"{place}: {levels[k]} {domain!r:.60} lies in {'/'.join(other)!r:.60} and in "
                    f"{'/'.join(way[:k])!r:.60}: give it two names"
                )
        for host in expand(cells["host"], f"{place}: host"):
            if host in of:
                raise InputError(f"{place}: host {host!r:.60} is there twice")
            of[host] = way
    if not of:
        raise InputError(f"{name}: expected a line for every host below the header")
    return Domains(levels, of)


def from_nodes(tree: Any, name: str, levels: Sequence[str] = ()) -> Domains:
    """Domains and types from the nodes of Kubernetes; nodes without GPUs are passed over.

    Parameters
    ----------
    tree
        The JSON of ``kubectl get nodes -o json``. GPUs are the capacity of ``nvidia.com/gpu`` or
        ``amd.com/gpu``; the type is named by the product's label and that number.
    name
        File name for messages.
    levels
        Labels whose values are domains, widest first: ``topology.kubernetes.io/zone`` is the level
        ``zone``, ``rack=example.com/r`` the level ``rack``.

    Raises
    ------
    InputError
        With the place in the file: no list of nodes, no GPUs, a label that a node has not.
    """
    known: dict[str, str] = {}
    for text in levels:
        level, _, label = text.rpartition("=")
        level = level or label.rpartition("/")[2]
        if not level or not label or level in known:
            raise InputError(f"levels: expected LABEL or LEVEL=LABEL, each once, got {text!r:.80}")
        known[level] = label
    items = tree["items"] if isinstance(tree, dict) and "items" in tree else [tree]
    of: dict[str, tuple[str, ...]] = {}
    kinds: dict[str, tuple[str, int]] = {}
    for i, node in enumerate(decode({"items": items}, _Nodes, name).items):
        host, labels = node.metadata.name, node.metadata.labels
        place = f"{name}: items[{i}] (node {host:.60})"
        for resource, products in _GPUS.items():
            count = node.status.capacity.get(resource, "0")
            if not _COUNT.fullmatch(count):
                raise InputError(f"{place}: {resource}: expected a number, got {count!r:.40}")
            if int(count):
                product = next((labels[key] for key in products if key in labels), "gpu")
                kinds[host] = f"{product}-x{int(count)}", int(count)
        if host not in kinds:
            continue
        if host in of:
            raise InputError(f"{place}: is there twice")
        lost = [label for label in known.values() if label not in labels]
        if lost:
            there = shortened(sorted(labels), 8) or "none"
            raise InputError(f"{place}: has no label {lost[0]!r:.80}; labels: {there}")
        of[host] = tuple(labels[label] for label in known.values())
    if not of:
        raise InputError(f"{name}: no node has {' or '.join(_GPUS)} in its capacity")
    return Domains(tuple(known), of, kinds)
