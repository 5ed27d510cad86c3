"""Slurm's ``topology.conf`` and ``topology.yaml``: the switches or blocks that hosts are in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.bandwidth.topology.domain_trees import (
    Domains,
    Entry,
    block_levels,
    switch_levels,
)
from optsched.bandwidth.topology.names import expand
from optsched.errors import InputError, MissingExtra
from optsched.formats.foreign import looks_like
from optsched.io.files import read_text
from optsched.io.strict_json import decode, placed, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PAIR = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|[^\s\"]+)")
_INCLUDE = re.compile(r"include\s+\"?([^\"]+?)\"?", re.IGNORECASE)
_KINDS: Final = {
    "SwitchName": ("switches", "nodes", "linkspeed"), "BlockName": ("nodes",), "BlockSizes": (),
}  # fmt: skip
"""What a line of Slurm's is about, with the keys that may stand beside it."""

_Line = tuple[str, str, dict[str, str]]
"""A line of Slurm's: its place, what it is about, and the value of every key in it."""

_MOST_INCLUDED: Final = 20  # files in each other, as in Slurm's own reader


class _Switch(msgspec.Struct, forbid_unknown_fields=True):
    switch: str
    children: str | None = None
    nodes: str | None = None


class _Tree(msgspec.Struct, forbid_unknown_fields=True):
    switches: list[_Switch]


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    block: str
    nodes: str | None = None


class _Blocks(msgspec.Struct, forbid_unknown_fields=True):
    blocks: list[_Block]
    block_sizes: list[int] = []


class _Topology(msgspec.Struct, forbid_unknown_fields=True):
    """One of ``topology.yaml``; the last three plugins know no levels."""

    topology: str
    cluster_default: bool = False
    tree: _Tree | None = None
    block: _Blocks | None = None
    flat: Any = None
    ring: Any = None
    torus3d: Any = None


def from_slurm(
    text: str, name: str = "topology.conf", hosts: Sequence[str] = (), topology: str | None = None
) -> Domains:
    """Domains from a ``topology.conf``, or a ``topology.yaml``, of the tree or the block plugin.

    A tree of switches has the levels ``leaf``, ``spine``, ``core``, ``tier4``, ... counted from
    the hosts; a branch with fewer switches repeats its lowest one. Blocks have the level
    ``block``, and ``blockN`` above it for every larger size N of ``BlockSizes``; a block without
    nodes has its place among them.

    Parameters
    ----------
    text
        Of the file. ``Include FILE`` is read from the folder of the file that says it. Of a
        ``topology.yaml`` the named topology counts, else that with ``cluster_default: true``, else
        the only one.
    name
        Name of the file.
    hosts
        Those of ``Nodes=ALL``: all that no other line names. ``Switches=ALL`` are all other
        switches that no other line names.
    topology
        Name of a topology of a ``topology.yaml``.

    Raises
    ------
    InputError
        With ``file:line``: an unknown key, a host below two switches or in two blocks, a switch
        with two parents, or unknown, a loop, block sizes that do not double, several topologies.
    """
    found: dict[str, dict[str, Entry]] = {kind: {} for kind in _KINDS}
    switches, blocks, sizes = found.values()
    multiples: list[int] = []
    everything: list[tuple[str, str]] = []
    lines = _yaml(text, name, topology) if is_yaml(text) else _conf(text, name)
    for place, kind, pairs in lines:
        if (blocks or sizes) if kind == "SwitchName" else switches:
            raise InputError(f"{place}: a file has switches or blocks, not both")
        key = "" if kind == "BlockSizes" else pairs[kind.lower()]
        title = f"{kind}={key}" if key else kind
        if key in found[kind]:
            raise InputError(f"{place}: {title} is at {found[kind][key].place} already")
        every = [part for part in ("nodes", "switches") if pairs.get(part, "").upper() == "ALL"]
        nodes, below = (
            expand(pairs[part], place) if pairs.get(part, "").strip() and part not in every else []
            for part in ("nodes", "switches")
        )
        if kind == "BlockSizes":
            multiples = _sizes(pairs["blocksizes"], place)
        elif {"nodes", "switches"} <= pairs.keys():
            raise InputError(f"{place}: a switch has either Switches or Nodes")
        found[kind][key] = Entry(place, nodes, below)
        everything += [(key, listed) for listed in every]
    entries = switches or blocks
    if not entries:
        raise InputError(f"{name}: there are neither switches nor blocks in it{looks_like(text)}")
    _name_all(entries, everything, hosts)
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


def _name_all(
    entries: dict[str, Entry], everything: list[tuple[str, str]], hosts: Sequence[str]
) -> None:
    """Put names where ``ALL`` stood."""
    nodes = {node for entry in entries.values() for node in entry.nodes}
    children = {child for entry in entries.values() for child in entry.children}
    for key, listed in everything:
        entry = entries[key]
        if listed == "switches":
            entry.children = [one for one in entries if one != key and one not in children]
        elif not hosts:
            raise InputError(f"{entry.place}: Nodes=ALL: name the hosts (hosts=, --hosts)")
        else:
            entry.nodes = [host for host in hosts if host not in nodes]


def _conf(text: str, name: str, depth: int = 0) -> Iterator[_Line]:
    """Lines of a ``topology.conf``, and of the files that it includes."""
    for number, line in _lines(text):
        place = f"{name}:{number}"
        if (included := _INCLUDE.fullmatch(line)) is None:
            try:
                yield place, *_pairs(line, place)
            except InputError as error:
                raise InputError(f"{error}{looks_like(text)}") from None
            continue
        if depth == _MOST_INCLUDED:
            raise InputError(f"{place}: Include: {depth} files in each other (a loop?)")
        path = Path(name).parent / included[1]
        with placed(f"{place}: Include: "):
            inner = read_text(path)
        yield from _conf(inner, str(path), depth + 1)


def _yaml(text: str, name: str, topology: str | None) -> Iterator[_Line]:
    """Lines of a ``topology.yaml``, as ``topology.conf`` would have them."""
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
    place = f"{name}: [{topologies.index(chosen[0])}]"
    if (tree := chosen[0].tree) is not None:
        for i, switch in enumerate(tree.switches):
            pairs = {"switchname": switch.switch}
            pairs |= {"switches": switch.children} if switch.children is not None else {}
            pairs |= {"nodes": switch.nodes} if switch.nodes is not None else {}
            yield f"{place}.tree.switches[{i}]", "SwitchName", pairs
    elif (block := chosen[0].block) is not None:
        for i, one in enumerate(block.blocks):
            fields = {"blockname": one.block, "nodes": one.nodes or ""}
            yield f"{place}.block.blocks[{i}]", "BlockName", fields
        if block.block_sizes:
            sizes = ",".join(map(str, block.block_sizes))
            yield f"{place}.block.block_sizes", "BlockSizes", {"blocksizes": sizes}
    else:
        raise InputError(
            f"{place}: has neither tree nor block: no levels, leave the file out, or name another "
            f"topology: {names}"
        )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and content of every line that says something, continued lines joined."""
    pending, start = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line, start = pending + raw.partition("#")[0].rstrip(), start or number
        if line.endswith("\\"):
            pending = line[:-1]  # Slurm joins lines as they are: a,\ and b are a,b
            continue
        if line.strip():
            yield start, line.strip()
        pending, start = "", 0


def _pairs(line: str, place: str) -> tuple[str, dict[str, str]]:
    """What the line is about, and the value of every key in it, in lower case."""
    left = _PAIR.sub("", line).strip()
    if left:
        raise InputError(f"{place}: expected KEY=VALUE, got {left!r:.60}")
    known = {key for kind, keys in _KINDS.items() for key in (kind.lower(), *keys)}
    pairs: dict[str, str] = {}
    for key, value in _PAIR.findall(line):
        if key.lower() not in known:
            raise InputError(f"{place}: unknown key {key!r:.60}")
        if key.lower() in pairs:
            raise InputError(f"{place}: {key} is there twice")
        pairs[key.lower()] = value.strip('"')
    kind = next((kind for kind in _KINDS if kind.lower() in pairs), None)
    if kind is None:
        raise InputError(f"{place}: expected SwitchName, BlockName or BlockSizes")
    for key in pairs:
        if key not in (kind.lower(), *_KINDS[kind]):
            raise InputError(f"{place}: {key} does not belong beside {kind}")
    return kind, pairs


def _sizes(text: str, place: str) -> list[int]:
    sizes = [int(part) if part.isdecimal() and len(part) < 7 else 0 for part in text.split(",")]
    doubled = {sizes[0] << k for k in range(20)}
    if 0 in sizes or not doubled.issuperset(sizes) or sizes != sorted(set(sizes)):
        raise InputError(
            f"{place}: BlockSizes: expected rising sizes, each the first times a power of two, "
            f"got {text!r:.60}"
        )
    return sizes
