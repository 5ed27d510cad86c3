"""Levels above hosts from switches and blocks, and what their uplinks carry."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.io.values import number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth.topology.cluster import Cluster

TIERS: Final = ("leaf", "spine", "core")
"""Names of the levels of switches, from the hosts upwards; above them ``tier4``, ``tier5``, ..."""


@dataclass(frozen=True)
class Domains:
    """Levels, widest first, and the domains of every host; types, GPUs and cliques if known."""

    levels: tuple[str, ...]
    of: Mapping[str, tuple[str, ...]]
    kinds: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    cliques: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Entry:
    """A switch or a block, with the place in its file."""

    place: str
    nodes: list[str]
    children: list[str]
    parent: str | None = None


def switch_levels(
    switches: dict[str, Entry], used: set[str]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Levels, and the path down to every switch that has hosts."""
    for key, switch in switches.items():
        for child in switch.children:
            if child not in switches:
                raise InputError(f"{switch.place}: Switches: there is no SwitchName={child}")
            if switches[child].parent is not None:
                above = f"below {switches[child].parent} and {key}"
                raise InputError(f"{switch.place}: switch {child} is {above}")
            switches[child].parent = key
    paths = {key: _path(key, switches) for key in switches}  # of all: a loop is found
    paths = {key: path for key, path in paths.items() if key in used}
    depth = max(map(len, paths.values()), default=0)
    levels = [TIERS[k] if k < len(TIERS) else f"tier{k + 1}" for k in reversed(range(depth))]
    full = {key: path + path[-1:] * (depth - len(path)) for key, path in paths.items()}
    return tuple(levels), full


def _path(key: str, switches: dict[str, Entry]) -> tuple[str, ...]:
    """The switches from the top down to this one."""
    path = [key]
    while (parent := switches[path[-1]].parent) is not None:
        if parent in path:
            loop = " below ".join([*path[path.index(parent) :][:4], parent])
            raise InputError(f"{switches[key].place}: a loop of switches: {loop}")
        path.append(parent)
    return tuple(reversed(path))


def block_levels(
    names: list[str], sizes: list[int]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Levels, and the larger blocks around every block: neighbours in the file are joined."""
    larger = sizes[:0:-1]
    paths: dict[str, tuple[str, ...]] = {}
    for i, key in enumerate(names):
        joined = []
        for size in larger:
            ratio = size // sizes[0]
            first = i - i % ratio
            last = min(first + ratio, len(names)) - 1
            joined.append(names[first] if first == last else f"{names[first]}..{names[last]}")
        paths[key] = (*joined, key)
    return (*(f"block{size}" for size in larger), "block"), paths


def uplink_rates(cluster: Cluster, given: Mapping[str, str | float]) -> dict[str, float]:
    """Convert uplinks by level to GB/s of one domain in one direction.

    At ``"2:1"`` the cards bring twice the capacity; where domains of a level differ, the least
    counts.
    """
    found: dict[str, float] = {}
    kinds = [cluster.type(h) for h in range(cluster.n_hosts)]
    for name, value in given.items():
        place = f"uplinks[{name}]"
        if name not in cluster.levels:
            known = ", ".join(cluster.levels) or "none (no domains)"
            raise InputError(f"{place}: expected one of the levels {known}")
        over, colon, one = str(value).partition(":")
        if isinstance(value, str):
            if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", over) or (colon and one != "1"):
                raise InputError(f"{place}: expected 2:1, or GB/s such as 400, got {value!r:.60}")
            value = float(over)
        found[name] = value
        if not colon:
            continue
        unknown = sorted({kind.name for kind in kinds if kind.nics and kind.nic_rate is None})
        if unknown:
            raise InputError(
                f"{place}: {over}:1 of what network cards bring, at an unknown rate for host "
                f"type {unknown[0]}: give it (--nic-rate, nic_rate), or the uplinks in GB/s"
            )
        ratio = number(place, value, least=1.0, what="an oversubscription (o:1)")
        bring = [kind.nics * (kind.nic_rate or 0.0) for kind in kinds]
        domains = cluster.domains(cluster.level(name)).values()
        found[name] = min(sum(bring[h] for h in hosts) for hosts in domains) / ratio
    return found
