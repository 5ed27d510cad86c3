"""Domains of hosts from a CSV of labels, or from the nodes of Kubernetes.

The CSV has the header ``host,level...``. The nodes are what ``kubectl get nodes -o json`` prints.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.bandwidth.topology.domain_trees import Domains
from optsched.bandwidth.topology.kubernetes import RESOURCES, Item, check_whole, gpus_of
from optsched.bandwidth.topology.names import expand
from optsched.errors import InputError
from optsched.formats.registry import looks_like
from optsched.io.csv_rows import csv_records
from optsched.io.strict_json import decode, shortened
from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_NAMED: Final = 8  # nodes of a warning
_NO_CLIQUE = re.compile(r"|0[0-]*(\.0)?")  # none, or that of GPUs without a fabric


class _Nodes(msgspec.Struct):
    items: list[Item]


def from_labels(text: str, name: str = "labels") -> Domains:
    """Read domains from a CSV with the header ``host`` and the levels, widest first.

    A line is for one host, or a list of hosts such as ``n[01-04]``; `name` is the file in messages.
    """
    if not re.match("host,.", text.lstrip().replace('"', "")):
        got = text.strip().partition("\n")[0].strip()
        raise InputError(
            f"{name}:1: expected a header host,LEVEL,..., got {got!r:.60}{looks_like(text)}"
        )
    levels: tuple[str, ...] = ()
    of: dict[str, tuple[str, ...]] = {}
    for place, cells in csv_records(text, name, (), ("host",)):
        levels, path = tuple(cells)[1:], tuple(cells.values())[1:]
        if "" in cells.values() or "" in levels:
            raise InputError(
                f"{place}: expected a host and a label for each of {', '.join(levels)}"
            )
        for host in expand(cells["host"], f"{place}: host"):
            if host in of:
                raise InputError(f"{place}: host {host!r:.60} is there twice")
            of[host] = path
    if not of:
        raise InputError(f"{name}: expected a line for every host below the header")
    return Domains(levels, of)


def from_nodes(tree: Any, name: str, levels: Sequence[str] = ()) -> Domains:
    """Read domains and types from the JSON of ``kubectl get nodes``; skip nodes without GPUs.

    Nodes that take no work (cordoned, not ready, with a taint, with GPUs that are not allocatable)
    and those with parts of GPUs (MIG) are left out with a warning. GPUs that are shared by time
    slicing or MPS count once. The type is named by the product's label and the number of GPUs.
    `levels` are labels with domains as values, widest first: ``topology.kubernetes.io/zone`` is the
    level ``zone``, ``rack=example.com/r`` the level ``rack``.
    """
    known: dict[str, str] = {}
    for text in levels:
        level, _, label = text.rpartition("=")
        level = level or label.rpartition("/")[2]
        if not level or not label or level in known:
            raise InputError(f"levels: expected LABEL or LEVEL=LABEL, each once, got {text!r:.80}")
        known[level] = label
    if isinstance(tree, dict):
        check_whole(tree, name)
    items = tree["items"] if isinstance(tree, dict) and "items" in tree else [tree]
    of: dict[str, tuple[str, ...]] = {}
    kinds: dict[str, tuple[str, int]] = {}
    left_out: dict[str, str] = {}
    cliques: dict[str, str] = {}
    for i, node in enumerate(decode({"items": items}, _Nodes, name).items):
        host, labels = node.metadata.name, node.metadata.labels
        place = f"{name}: items[{i}] (node {host:.60})"
        if node.kind != "Node":
            raise InputError(
                f"{name}: items[{i}]: expected a Node, got a {one_line(node.kind, 40)}"
            )
        if (gpus := gpus_of(node, place)) is None:
            continue
        if host in of or host in left_out:
            raise InputError(f"{place}: is there twice")
        if gpus.reason:
            left_out[host] = gpus.reason
            continue
        kinds[host] = f"{gpus.product}-x{gpus.number}", gpus.number
        if lost := [label for label in known.values() if not labels.get(label)]:
            what = "an empty" if lost[0] in labels else "no"
            present = shortened(sorted(labels), 8) or "none"
            raise InputError(f"{place}: has {what} label {lost[0]!r:.80}; labels: {present}")
        of[host] = tuple(labels[label] for label in known.values())
        if not _NO_CLIQUE.fullmatch(clique := labels.get("nvidia.com/gpu.clique", "")):
            cliques[host] = clique
    reasons = [f"{host} {why}" for host, why in left_out.items()]
    if len(reasons) > _MOST_NAMED:
        reasons[_MOST_NAMED:] = [f"and {len(reasons) - _MOST_NAMED} more"]
    why = "; ".join(reasons)
    if not of and not left_out:
        raise InputError(f"{name}: no node has {' or '.join(RESOURCES)} in its capacity")
    if not of:
        raise InputError(f"{name}: no node takes work on whole GPUs: {why}")
    if left_out:
        share = f"{len(left_out)} of {len(of) + len(left_out)} nodes with GPUs"
        warnings.warn(f"{name}: {share} are left out: {why}", stacklevel=3)
    return Domains(tuple(known), of, kinds, cliques)
