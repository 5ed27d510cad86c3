"""Which domains hosts are in: Slurm's ``topology.conf``, or a CSV of labels; and whole clusters.

The CSV has the header ``host,level...``: what labels of Kubernetes nodes become.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.cluster import MOST_HOSTS, Cluster, Host
from optsched.bandwidth.host_lists import expand
from optsched.errors import InputError
from optsched.formats import nvidia_topo
from optsched.formats.csv_rows import check_header, csv_rows
from optsched.io.files import read_text
from optsched.io.strict_json import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

_PAIR = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|[^\s\"]+)")
_KINDS: Final = {
    "SwitchName": ("switches", "nodes", "linkspeed"), "BlockName": ("nodes",), "BlockSizes": (),
}  # fmt: skip
"""What a line of Slurm's is about, with the keys that may stand beside it."""

TIERS: Final = ("leaf", "spine", "core")
"""Names of the levels of switches, from the hosts upwards; above them ``tier4``, ``tier5``, ..."""


@dataclass(frozen=True)
class Domains:
    """Names of levels, widest first, and for every host its domain on each of them."""

    levels: tuple[str, ...]
    of: Mapping[str, tuple[str, ...]]


@dataclass
class _Entry:
    """A line of Slurm's: a switch or a block."""

    line: int
    nodes: list[str]
    children: list[str]
    parent: str | None = None


def cluster_from_files(
    topo: Mapping[str, str | os.PathLike[str]],
    hosts: Mapping[str, str],
    slurm: str | os.PathLike[str] | None = None,
    labels: str | os.PathLike[str] | None = None,
    nics: int | None = None,
    nic_rate: float = 50.0,
    pod: str | None = None,
    name: str = "",
) -> Cluster:
    """A cluster from the files that its tools write; see `Cluster.from_files`."""
    if slurm is not None and labels is not None:
        raise InputError("slurm, labels: give one of them")
    if not hosts:
        raise InputError("hosts: expected host lists with types, such as {'n[01-04]': 'h100'}")
    types = tuple(
        nvidia_topo.read(path, kind, nics=nics, nic_rate=nic_rate) for kind, path in topo.items()
    )
    kind_of: dict[str, str] = {}
    for listed, kind in hosts.items():
        place = f"hosts[{listed!r:.60}]"
        if kind not in topo:
            known = shortened(list(topo)) or "none"
            raise InputError(f"{place}: there is no type {kind!r:.60}; known: {known}")
        for host in expand(listed, place):
            if host in kind_of:
                raise InputError(f"{place}: host {host!r:.60} is given twice")
            kind_of[host] = kind
        if len(kind_of) > MOST_HOSTS:
            raise InputError(f"hosts: more than {MOST_HOSTS} hosts")
    levels: tuple[str, ...] = ()
    of: Mapping[str, tuple[str, ...]] = {}
    source = slurm if slurm is not None else labels
    if source is not None:
        read = from_slurm if slurm is not None else from_labels
        found = read(read_text(source), str(source))
        levels, of = found.levels, found.of
        lost = [host for host in kind_of if host not in of]
        if lost:
            raise InputError(
                f"{os.fspath(source)}: does not say where {len(lost)} of the hosts are, "
                f"the first: {', '.join(lost[:4])}"
            )
    return Cluster(
        tuple(Host(host, kind, of.get(host, ())) for host, kind in kind_of.items()),
        types,
        levels,
        pod,
        name,
    )


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
    levels: tuple[str, ...] | None = None
    of: dict[str, tuple[str, ...]] = {}
    above: dict[tuple[int, str], tuple[str, ...]] = {}
    for place, cells in csv_rows(text, name):
        if not any(cells):
            continue
        if levels is None:
            if cells[0] != "host" or len(cells) < 2 or "" in cells:
                got = ",".join(cells)
                raise InputError(f"{place}: expected a header host,LEVEL,..., got {got!r:.60}")
            check_header(cells, (), (), place)
            levels = tuple(cells[1:])
            continue
        if len(cells) != len(levels) + 1 or "" in cells:
            raise InputError(
                f"{place}: expected a host and a label for each of {', '.join(levels)}, "
                f"got {','.join(cells)!r:.60}"
            )
        way = tuple(cells[1:])
        for k, domain in enumerate(way):
            other = above.setdefault((k, domain), way[:k])
            if other != way[:k]:
                raise InputError(
                    f"{place}: {levels[k]} {domain!r:.60} lies in {'/'.join(other)!r:.60} and in "
                    f"{'/'.join(way[:k])!r:.60}: give it two names"
                )
        for host in expand(cells[0], f"{place}: host"):
            if host in of:
                raise InputError(f"{place}: host {host!r:.60} is there twice")
            of[host] = way
    if levels is None or not of:
        raise InputError(f"{name}: expected a header host,LEVEL,... and a line for every host")
    return Domains(levels, of)


def from_slurm(text: str, name: str = "topology.conf") -> Domains:
    """Domains from the text of a ``topology.conf``, of the tree or of the block plugin.

    A tree of switches has the levels ``leaf``, ``spine``, ``core``, ``tier4``, ... counted from
    the hosts; a branch with fewer switches repeats its lowest one. Blocks have the level
    ``block``, and ``blockN`` above it for every larger size N of ``BlockSizes``.

    Raises
    ------
    InputError
        With ``file:line``: an unknown key, a host below two switches or in two blocks, a switch
        with two parents, without hosts or unknown, a loop, block sizes that do not double.
    """
    found: dict[str, dict[str, _Entry]] = {kind: {} for kind in _KINDS}
    switches, blocks, sizes = found.values()
    multiples: list[int] = []
    for line, words in _lines(text):
        place = f"{name}:{line}"
        kind, pairs = _pairs(words, place)
        if (blocks or sizes) if kind == "SwitchName" else switches:
            raise InputError(f"{place}: a file has switches or blocks, not both")
        key = "" if kind == "BlockSizes" else pairs[kind.lower()]
        title = f"{kind}={key}" if key else kind
        if key in found[kind]:
            raise InputError(f"{place}: {title} is in line {found[kind][key].line} already")
        nodes, below = (
            expand(pairs[listed], place) if listed in pairs else []
            for listed in ("nodes", "switches")
        )
        if kind == "BlockSizes":
            multiples = _sizes(pairs["blocksizes"], place)
        elif kind == "BlockName" and not nodes:
            raise InputError(f"{place}: {title} has no Nodes")
        elif kind == "SwitchName" and bool(nodes) == bool(below):
            raise InputError(f"{place}: a switch has either Switches or Nodes")
        found[kind][key] = _Entry(line, nodes, below)
    if not switches and not blocks:
        raise InputError(f"{name}: there are neither switches nor blocks in it")
    home: dict[str, str] = {}
    for key, entry in (switches or blocks).items():
        for node in entry.nodes:
            if node in home:
                between = f"{'below' if switches else 'in'} {home[node]} and {key}"
                raise InputError(f"{name}:{entry.line}: host {node} is {between}")
            home[node] = key
    levels, ways = _tree(switches, name) if switches else _blocks(list(blocks), multiples)
    return Domains(levels, {node: ways[key] for node, key in home.items()})


def _lines(text: str) -> list[tuple[int, str]]:
    """Number and content of every line that says something, continued lines joined."""
    found: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].rstrip()
        if not pending:
            start = number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        if (pending + line).strip():
            found.append((start, (pending + line).strip()))
        pending = ""
    if pending.strip():
        found.append((start, pending.strip()))
    return found


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
    switches: dict[str, _Entry], name: str
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Levels, and the way down to every switch."""
    for key, switch in switches.items():
        for child in switch.children:
            place = f"{name}:{switch.line}"
            if child not in switches:
                raise InputError(f"{place}: Switches: there is no SwitchName={child}")
            if switches[child].parent is not None:
                raise InputError(
                    f"{place}: switch {child} is below {switches[child].parent} and {key}"
                )
            switches[child].parent = key
    ways = {key: _way(key, switches, name) for key in switches}
    depth = max(map(len, ways.values()))
    levels = [TIERS[k] if k < len(TIERS) else f"tier{k + 1}" for k in reversed(range(depth))]
    return tuple(levels), {key: way + way[-1:] * (depth - len(way)) for key, way in ways.items()}


def _way(key: str, switches: dict[str, _Entry], name: str) -> tuple[str, ...]:
    """The switches from the top down to this one."""
    way = [key]
    while (parent := switches[way[-1]].parent) is not None:
        if parent in way:
            loop = " below ".join([*way[way.index(parent) :][:4], parent])
            raise InputError(f"{name}:{switches[key].line}: a loop of switches: {loop}")
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
