"""NVLink cliques: machines (trays) with GPUs that NVLink joins are one host."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.topology.cluster import Host, HostType
from optsched.bandwidth.topology.links import SELF, nvlinks
from optsched.bandwidth.topology.products import product_of
from optsched.errors import InputError
from optsched.io.strict_json import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LEVELS: Final = ("block", "clique")
"""Lowest levels with domains that are cliques if the product joins GPUs across machines."""


def joined(
    hosts: Sequence[Host],
    types: Mapping[str, HostType],
    levels: Sequence[str],
    labels: Mapping[str, str],
) -> tuple[list[Host], list[HostType]]:
    """Replace the machines of every clique by one host that has them as trays.

    `labels`: cliques of machines (``nvidia.com/gpu.clique``). Without them domains of a lowest
    level ``block`` or ``clique`` are cliques, if the product has NVLink across machines.
    """
    members: dict[str, list[Host]] = {}
    for host in hosts:
        if clique := labels.get(host.name) or _block(host, types[host.type], levels):
            members.setdefault(clique, []).append(host)
    made: dict[str, Host] = {}
    kinds = dict(types)
    for clique, parts in members.items():
        if len(parts) > 1 and _alike(clique, parts, types, levels, bool(labels)):
            kind = _rack(types[parts[0].type], len(parts))
            kinds[kind.name] = kind
            whole = Host(clique, kind.name, parts[0].domains, tuple(part.name for part in parts))
            made |= dict.fromkeys(whole.machines, whole)
    found = list(dict.fromkeys(made.get(host.name, host) for host in hosts))
    used = {host.type for host in found}
    replaced = {host.type for host in hosts} - used
    return found, [kind for name, kind in kinds.items() if name not in replaced]


def _block(host: Host, kind: HostType, levels: Sequence[str]) -> str:
    product = product_of(kind.name)
    if product is None or not product.rack or not levels or levels[-1] not in _LEVELS:
        return ""
    return host.domains[-1]


def _alike(
    clique: str,
    parts: Sequence[Host],
    types: Mapping[str, HostType],
    levels: Sequence[str],
    labelled: bool,
) -> bool:
    """Check that machines can be one host; False, with a warning, if their hardware differs."""
    for level, names in zip(
        levels, zip(*(part.domains for part in parts), strict=True), strict=True
    ):
        if len(set(names)) > 1:
            raise InputError(
                f"clique {clique!r:.80}: NVLink joins machines of several {level}s "
                f"({shortened(sorted(set(names)))}): leave the level {level} out (--level, levels)"
            )
    kinds = sorted({part.type for part in parts})
    gpus = sum(types[part.type].gpus for part in parts)
    product = product_of(kinds[0])
    most = product.rack if product is not None and not labelled else 256
    reason = ""
    if len(kinds) > 1:
        reason = f"its machines differ ({shortened(kinds)})"
    elif gpus > most:
        reason = f"it has {gpus} GPUs, more than the {most} that NVLink joins"
    if reason:
        warnings.warn(
            f"clique {clique:.80}: {reason}: NVLink between its machines is not counted",
            stacklevel=4,
        )
    return not reason


def _rack(tray: HostType, machines: int) -> HostType:
    """The type of a clique of so many trays; links between trays are those within a tray."""
    n = tray.gpus
    within = {link for row in tray.links or () for link in row} - {SELF}
    link = within.pop() if len(within) == 1 else ""
    links = None
    if nvlinks(link):
        links = tuple(
            tuple(SELF if i == k else link for k in range(n * machines))
            for i in range(n * machines)
        )
    return replace(
        tray, name=f"{tray.name}-nvl{n * machines}", gpus=n * machines, links=links, tray=n,
        numa=tuple(tuple(n * t + i for i in g) for t in range(machines) for g in tray.numa),
        nics=tray.nics * machines, intra=None,
    )  # fmt: skip
