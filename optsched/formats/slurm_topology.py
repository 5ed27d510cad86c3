"""Slurm's ``topology.conf`` and ``topology.yaml``: switches or blocks of hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from optsched.bandwidth.topology.domain_trees import Domains, Entry, block_levels, switch_levels
from optsched.bandwidth.topology.names import expand
from optsched.errors import InputError, MissingExtra
from optsched.formats.registry import looks_like
from optsched.io.files import read_text
from optsched.io.strict_json import decode, placed, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PAIR = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|[^\s\"]+)")
_INCLUDE = re.compile(r"include\s+\"?([^\"]+?)\"?", re.IGNORECASE)
_MOST_INCLUDED: Final = 20  # nested files, as in Slurm's own reader
_KEYS: Final = {
    "SwitchName": ("switches", "nodes", "linkspeed"), "BlockName": ("nodes",), "BlockSizes": (),
}  # fmt: skip
"""Kinds of lines, by their first key, and the other keys of each."""


class _Row(NamedTuple):
    """A line of a ``topology.conf``, or its counterpart in a ``topology.yaml``."""

    place: str
    kind: str
    value: str
    """Name of the switch or block, or the sizes of blocks."""
    nodes: str = ""
    switches: str = ""


class _Switch(msgspec.Struct, forbid_unknown_fields=True):
    switch: str
    children: str = ""
    nodes: str = ""


class _Tree(msgspec.Struct, forbid_unknown_fields=True):
    switches: list[_Switch]


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    block: str
    nodes: str = ""


class _Blocks(msgspec.Struct, forbid_unknown_fields=True):
    blocks: list[_Block]
    block_sizes: list[int] = []


class _Topology(msgspec.Struct, forbid_unknown_fields=True):
    """A topology of a ``topology.yaml``; the last three plugins have no levels."""

    topology: str
    cluster_default: bool = False
    tree: _Tree | None = None
    block: _Blocks | None = None
    flat: Any = None
    ring: Any = None
    torus3d: Any = None


def from_slurm(
    text: str, name: str = "topology.conf", topology: str | None = None, hosts: Sequence[str] = ()
) -> Domains:
    """Read domains of the tree or the block plugin.

    A tree of switches has the levels ``leaf``, ``spine``, ``core``, ``tier4``, ... counted from
    the hosts; a branch with fewer switches repeats its lowest one. Blocks have the level
    ``block``, and ``blockN`` above it for every larger size N of ``BlockSizes``; a block without
    nodes has its place among them. Of a ``topology.yaml`` the topology of this name counts, else
    that with ``cluster_default: true``, else the only one.

    ``Nodes=ALL`` means those of `hosts` that no other line names, ``Switches=ALL`` all other
    switches that no other line names. ``Include FILE`` is relative to the file with the line.
    """
    found: dict[str, dict[str, Entry]] = {kind: {} for kind in _KEYS}
    switches, blocks, sizes = found.values()
    multiples: list[int] = []
    for row in _yaml(text, name, topology) if is_yaml(text) else _conf(text, name):
        if (blocks or sizes) if row.kind == "SwitchName" else switches:
            raise InputError(f"{row.place}: a file has switches or blocks, not both")
        key = "" if row.kind == "BlockSizes" else row.value
        if key in found[row.kind]:
            title = f"{row.kind}={key}" if key else row.kind
            raise InputError(f"{row.place}: {title} is at {found[row.kind][key].place} already")
        if row.nodes and row.switches:
            raise InputError(f"{row.place}: a switch has either Switches or Nodes")
        if row.kind == "BlockSizes":
            multiples = _sizes(row.value, row.place)
        nodes, children = (
            expand(part, row.place) if part.strip() else [] for part in (row.nodes, row.switches)
        )
        found[row.kind][key] = Entry(row.place, nodes, children)
    entries = switches or blocks
    if not entries:
        raise InputError(f"{name}: has neither switches nor blocks{looks_like(text)}")
    _replace_all(entries, hosts)
    entry_of: dict[str, str] = {}
    for key, entry in entries.items():
        for node in entry.nodes:
            if node in entry_of:
                between = f"{'below' if switches else 'in'} {entry_of[node]} and {key}"
                raise InputError(f"{entry.place}: host {node} is {between}")
            entry_of[node] = key
    levels, paths = (
        switch_levels(switches, set(entry_of.values()))
        if switches
        else block_levels(list(blocks), multiples)
    )
    return Domains(levels, {node: paths[key] for node, key in entry_of.items()})


def is_yaml(text: str) -> bool:
    """Whether the text is a ``topology.yaml``."""
    return re.search(r"^[\s\-{]*[\"']?topology[\"']?\s*:", text, re.MULTILINE) is not None


def _replace_all(entries: dict[str, Entry], hosts: Sequence[str]) -> None:
    """Replace ``ALL`` by the hosts or switches that no other line names."""
    nodes = {node for entry in entries.values() for node in entry.nodes}
    children = {child for entry in entries.values() for child in entry.children}
    for key, entry in entries.items():
        if [node.upper() for node in entry.nodes] == ["ALL"]:
            if not hosts:
                raise InputError(f"{entry.place}: Nodes=ALL: name the hosts (hosts=, --hosts)")
            entry.nodes = [host for host in hosts if host not in nodes]
        if [child.upper() for child in entry.children] == ["ALL"]:
            entry.children = [other for other in entries if other not in {key, *children}]


def _conf(text: str, name: str, depth: int = 0) -> Iterator[_Row]:
    """Yield the rows of a ``topology.conf`` and of included files; continued lines are joined."""
    pending, start = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line, start = pending + raw.partition("#")[0].rstrip(), start or number
        if line.endswith("\\"):
            pending = line[:-1]  # Slurm joins lines without a blank: a,\ and b are a,b
            continue
        place = f"{name}:{start}"
        if included := _INCLUDE.fullmatch(line.strip()):
            if depth == _MOST_INCLUDED:
                raise InputError(f"{place}: Include: {depth} files in each other (a loop?)")
            path = Path(name).parent / included[1]
            with placed(f"{place}: Include: "):
                inner = read_text(path)
            yield from _conf(inner, str(path), depth + 1)
        elif line.strip():
            try:
                yield _row(line.strip(), place)
            except InputError as error:
                raise InputError(f"{error}{looks_like(text)}") from None
        pending, start = "", 0


def _row(line: str, place: str) -> _Row:
    if left := _PAIR.sub("", line).strip():
        raise InputError(f"{place}: expected KEY=VALUE, got {left!r:.60}")
    pairs: dict[str, str] = {}
    for key, value in _PAIR.findall(line):
        if key.lower() in pairs:
            raise InputError(f"{place}: {key} is given twice")
        pairs[key.lower()] = value.strip('"')
    kind = next((kind for kind in _KEYS if kind.lower() in pairs), None)
    if kind is None:
        raise InputError(f"{place}: expected SwitchName, BlockName or BlockSizes")
    for key in pairs:
        if key not in (kind.lower(), *_KEYS[kind]):
            raise InputError(f"{place}: unknown key {key!r:.60} of {kind}")
    nodes, switches = pairs.get("nodes", ""), pairs.get("switches", "")
    return _Row(place, kind, pairs[kind.lower()], nodes, switches)


def _yaml(text: str, name: str, topology: str | None) -> Iterator[_Row]:
    """Yield the rows of a topology of a ``topology.yaml``."""
    try:
        import yaml
    except ImportError:
        raise MissingExtra("topology.yaml", "yaml") from None
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or "cannot be read"
        line = f":{mark.line + 1}" if mark else ""
        raise InputError(f"{name}{line}: not valid YAML: {what!s:.80}") from None
    topologies = decode(tree, list[_Topology], name)
    names = shortened([one.topology for one in topologies]) or "none"
    if topology is not None:
        chosen = [one for one in topologies if one.topology == topology]
    else:
        chosen = [one for one in topologies if one.cluster_default] or topologies
    if len(chosen) != 1:
        what = f"{len(chosen)} topologies" + f" {topology!r:.60}" * (topology is not None)
        raise InputError(
            f"{name}: has {what}: mark one with cluster_default: true, or name it behind the "
            f"file as {name}:NAME: {names}"
        )
    place, found = f"{name}: [{topologies.index(chosen[0])}]", chosen[0]
    if found.tree is not None:
        for i, switch in enumerate(found.tree.switches):
            at = f"{place}.tree.switches[{i}]"
            yield _Row(at, "SwitchName", switch.switch, switch.nodes, switch.children)
    elif found.block is not None:
        for i, block in enumerate(found.block.blocks):
            yield _Row(f"{place}.block.blocks[{i}]", "BlockName", block.block, block.nodes)
        if sizes := found.block.block_sizes:
            yield _Row(f"{place}.block.block_sizes", "BlockSizes", ",".join(map(str, sizes)))
    else:
        raise InputError(
            f"{place}: has neither tree nor block: no levels, leave the file out, or name another "
            f"topology: {names}"
        )


def _sizes(text: str, place: str) -> list[int]:
    sizes = [int(part) if part.isdecimal() and len(part) < 7 else 0 for part in text.split(",")]
    doubled = {sizes[0] << k for k in range(20)}
    if 0 in sizes or not doubled.issuperset(sizes) or sizes != sorted(set(sizes)):
        raise InputError(
            f"{place}: BlockSizes: expected rising sizes, each the first times a power of two, "
            f"got {text!r:.60}"
        )
    return sizes
