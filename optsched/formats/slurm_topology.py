"""Slurm's ``topology.conf`` and ``topology.yaml``: the switches or blocks that hosts are in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.bandwidth.topology.host_lists import expand
from optsched.errors import InputError, MissingExtra
from optsched.formats.host_domains import Domains
from optsched.io.files import read_text
from optsched.io.strict_json import decode, placed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PAIR = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|[^\s\"]+)")
_INCLUDE = re.compile(r"include\s+\"?([^\"]+?)\"?", re.IGNORECASE)
_YAML = re.compile(r"^\s*-\s*topology\s*:", re.MULTILINE)
_KINDS: Final = {
    "SwitchName": ("switches", "nodes", "linkspeed"), "BlockName": ("nodes",), "BlockSizes": (),
}  # fmt: skip
"""What a line of Slurm's is about, with the keys that may stand beside it."""

_Line = tuple[str, str, dict[str, str]]
"""A line of Slurm's: its place, what it is about, and the value of every key in it."""

_MOST_INCLUDED: Final = 20  # files in each other, as in Slurm's own reader

TIERS: Final = ("leaf", "spine", "core")
"""Names of the levels of switches, from the hosts upwards; above them ``tier4``, ``tier5``, ..."""


class _Switch(msgspec.Struct, forbid_unknown_fields=True):
    switch: str
    children: str | None = None
    nodes: str | None = None


class _Tree(msgspec.Struct, forbid_unknown_fields=True):
    switches: list[_Switch]


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    block: str
    nodes: str


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


@dataclass
class _Entry:
    """A switch or a block."""

    place: str
    nodes: list[str]
    children: list[str]
    parent: str | None = None


def from_slurm(text: str, name: str = "topology.conf", hosts: Sequence[str] = ()) -> Domains:
    """Domains from a ``topology.conf``, or a ``topology.yaml``, of the tree or the block plugin.

    A tree of switches has the levels ``leaf``, ``spine``, ``core``, ``tier4``, ... counted from
    the hosts; a branch with fewer switches repeats its lowest one. Blocks have the level
    ``block``, and ``blockN`` above it for every larger size N of ``BlockSizes``.

    Parameters
    ----------
    text
        Of the file. ``Include FILE`` is read from the folder of the file that says it. Of a
        ``topology.yaml`` the topology with ``cluster_default: true`` counts, or the only one.
    name
        Name of the file.
    hosts
        Those of ``Nodes=ALL``: all that no other line names. ``Switches=ALL`` are all other
        switches that no other line names.

    Raises
    ------
    InputError
        With ``file:line``: an unknown key, a host below two switches or in two blocks, a switch
        with two parents, or unknown, a loop, block sizes that do not double.
    """
    found: dict[str, dict[str, _Entry]] = {kind: {} for kind in _KINDS}
    switches, blocks, sizes = found.values()
    multiples: list[int] = []
    everything: list[tuple[str, str]] = []
    for place, kind, pairs in _yaml(text, name) if _YAML.search(text) else _conf(text, name):
        if (blocks or sizes) if kind == "SwitchName" else switches:
            raise InputError(f"{place}: a file has switches or blocks, not both")
        key = "" if kind == "BlockSizes" else pairs[kind.lower()]
        title = f"{kind}={key}" if key else kind
        if key in found[kind]:
            raise InputError(f"{place}: {title} is at {found[kind][key].place} already")
        rest = [part for part in ("nodes", "switches") if pairs.get(part, "").upper() == "ALL"]
        nodes, below = (
            expand(pairs[part], place) if part in pairs and part not in rest else []
            for part in ("nodes", "switches")
        )
        if kind == "BlockSizes":
            multiples = _sizes(pairs["blocksizes"], place)
        elif kind == "BlockName" and "nodes" not in pairs:
            raise InputError(f"{place}: {title} has no Nodes")
        elif {"nodes", "switches"} <= pairs.keys():
            raise InputError(f"{place}: a switch has either Switches or Nodes")
        found[kind][key] = _Entry(place, nodes, below)
        everything += [(key, listed) for listed in rest]
    entries = switches or blocks
    if not entries:
        raise InputError(f"{name}: there are neither switches nor blocks in it")
    _name_all(entries, everything, hosts)
    home: dict[str, str] = {}
    for key, entry in entries.items():
        for node in entry.nodes:
            if node in home:
                between = f"{'below' if switches else 'in'} {home[node]} and {key}"
                raise InputError(f"{entry.place}: host {node} is {between}")
            home[node] = key
    levels, ways = (
        _tree(switches, set(home.values())) if switches else _blocks(list(blocks), multiples)
    )
    return Domains(levels, {node: ways[key] for node, key in home.items()})


def _name_all(
    entries: dict[str, _Entry], everything: list[tuple[str, str]], hosts: Sequence[str]
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
    for number, words in _lines(text):
        place = f"{name}:{number}"
        if (included := _INCLUDE.fullmatch(words)) is None:
            yield place, *_pairs(words, place)
            continue
        if depth == _MOST_INCLUDED:
            raise InputError(f"{place}: Include: {depth} files in each other (a loop?)")
        path = Path(name).parent / included[1]
        with placed(f"{place}: Include: "):
            inner = read_text(path)
        yield from _conf(inner, str(path), depth + 1)


def _yaml(text: str, name: str) -> Iterator[_Line]:
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
    chosen = [one for one in topologies if one.cluster_default][:1] or topologies
    if len(chosen) != 1:
        raise InputError(
            f"{name}: has {len(chosen)} topologies: mark one with cluster_default: true"
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
            own = {"blockname": one.block, "nodes": one.nodes}
            yield f"{place}.block.blocks[{i}]", "BlockName", own
        if block.block_sizes:
            sizes = ",".join(map(str, block.block_sizes))
            yield f"{place}.block.block_sizes", "BlockSizes", {"blocksizes": sizes}
    else:
        raise InputError(f"{place}: has neither tree nor block: no levels, leave the file out")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and content of every line that says something, continued lines joined."""
    pending, start = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line, start = pending + raw.partition("#")[0].rstrip(), start or number
        if line.endswith("\\"):
            pending = line[:-1] + " "
            continue
        if line.strip():
            yield start, line.strip()
        pending, start = "", 0


def _pairs(line: str, place: str) -> tuple[str, dict[str, str]]:
    """What the line is about, and the value of every key in it, in lower case."""
    rest = _PAIR.sub("", line).strip()
    if rest:
        raise InputError(f"{place}: expected KEY=VALUE, got {rest!r:.60}")
    known = {key for kind, beside in _KINDS.items() for key in (kind.lower(), *beside)}
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


def _tree(
    switches: dict[str, _Entry], used: set[str]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Levels, and the way down to every switch that has hosts."""
    for key, switch in switches.items():
        for child in switch.children:
            if child not in switches:
                raise InputError(f"{switch.place}: Switches: there is no SwitchName={child}")
            if switches[child].parent is not None:
                above = f"below {switches[child].parent} and {key}"
                raise InputError(f"{switch.place}: switch {child} is {above}")
            switches[child].parent = key
    ways = {key: _way(key, switches) for key in switches}  # of all: a loop is found
    ways = {key: way for key, way in ways.items() if key in used}
    depth = max(map(len, ways.values()), default=0)
    levels = [TIERS[k] if k < len(TIERS) else f"tier{k + 1}" for k in reversed(range(depth))]
    return tuple(levels), {key: way + way[-1:] * (depth - len(way)) for key, way in ways.items()}


def _way(key: str, switches: dict[str, _Entry]) -> tuple[str, ...]:
    """The switches from the top down to this one."""
    way = [key]
    while (parent := switches[way[-1]].parent) is not None:
        if parent in way:
            loop = " below ".join([*way[way.index(parent) :][:4], parent])
            raise InputError(f"{switches[key].place}: a loop of switches: {loop}")
        way.append(parent)
    return tuple(reversed(way))


def _blocks(
    names: list[str], sizes: list[int]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Levels, and the larger blocks around every block: neighbours in the file are joined."""
    larger = sizes[:0:-1]
    ways: dict[str, tuple[str, ...]] = {}
    for i, key in enumerate(names):
        joined = []
        for size in larger:
            ratio = size // sizes[0]
            first = i - i % ratio
            last = min(first + ratio, len(names)) - 1
            joined.append(names[first] if first == last else f"{names[first]}..{names[last]}")
        ways[key] = (*joined, key)
    return (*(f"block{size}" for size in larger), "block"), ways
