"""A cluster as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

from optsched.bandwidth.links import PCIE, nvlinks, weight
from optsched.bandwidth.rates import shown
from optsched.plots.look import plain

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from optsched.bandwidth.cluster import Cluster, HostType

_MOST_ROWS = 40  # of hosts, and of domains a level
_MOST_MATRIX = 16  # GPUs of a matrix that fits the screen


def render(cluster: Cluster) -> Group:
    """What ``optsched topology show`` prints; names appear as they are, never as markup."""
    from rich.console import Group
    from rich.text import Text

    title = Text(plain(cluster.name) or "cluster", style="bold")
    title.append(f"\n{cluster.n_hosts} hosts, {cluster.n_gpus} GPUs", "dim")
    parts: list[RenderableType] = [title, "", _types(cluster)]
    for kind in cluster.types:
        if kind.links is not None and kind.gpus <= _MOST_MATRIX:
            parts += ["", _text(f"links of {kind.name}"), _links(kind)]
    if cluster.levels:
        parts += ["", _domains(cluster)]
    return Group(*parts, "", _hosts(cluster))


def _types(cluster: Cluster) -> Table:
    table = _table("type", "hosts", "GPUs", "network", "NUMA", "links", "within a host")
    hosts = Counter(cluster.type_of)
    for t, kind in enumerate(cluster.types):
        network = f"{kind.nics} x {kind.nic_rate:g} GB/s"
        sizes = "+".join(str(len(group)) for group in kind.numa)
        row = [str(hosts[t]), str(kind.gpus), network, sizes, _summary(kind), _within(kind)]
        table.add_row(_text(kind.name), *row)
    return table


def _summary(kind: HostType) -> str:
    """``28 NV18``, or ``4 NV4, 8 PXB, 16 SYS``: pairs by their way."""
    if kind.links is None:
        return "unknown"
    pairs = Counter(kind.links[i][k] for i in range(kind.gpus) for k in range(i))
    if not pairs:
        return "-"
    return ", ".join(
        f"{n} {link}" for link, n in sorted(pairs.items(), key=lambda p: -weight(p[0]))
    )


def _within(kind: HostType) -> str:
    if kind.intra is None:
        return "not measured"
    if kind.gpus < 2:
        return "-"
    best = kind.intra.by_count
    by = "subset" if kind.intra.by_subset else "count"
    return f"by {by}, pair {shown(int(best[2]))}, all {shown(int(best[-1]))}"


def _links(kind: HostType) -> Table:
    from rich.text import Text

    assert kind.links is not None
    table = _table("", *(str(i) for i in range(kind.gpus)))
    for i, row in enumerate(kind.links):
        cells = []
        for link in row:
            near = nvlinks(link) > 0
            style = "green" if near else "red" if link == PCIE[0] else "dim" if link == "X" else ""
            cells.append(Text(link, style))
        table.add_row(str(i), *cells)
    return table


def _domains(cluster: Cluster) -> Table:
    table = _table("level", "domain", "hosts", "GPUs")
    for level, name in enumerate(cluster.levels):
        label = f"{name} (pod)" if name == cluster.pod else name
        domains = cluster.domains(level)
        for d, (domain, hosts) in enumerate(domains.items()):
            if d == _MOST_ROWS:
                table.add_row("", f"and {len(domains) - d} more", "", "")
                break
            gpus = sum(int(cluster.sizes[h]) for h in hosts)
            first = _text(label if d == 0 else "")
            table.add_row(first, _text(domain), str(len(hosts)), str(gpus))
    return table


def _hosts(cluster: Cluster) -> Table:
    """Neighbouring hosts of one type and place share a row."""
    table = _table("hosts", "number", "type", *cluster.levels)
    groups = groupby(cluster.hosts, key=lambda host: (host.type, host.domains))
    for row, ((kind, domains), members) in enumerate(groups):
        names = [host.name for host in members]
        if row == _MOST_ROWS:
            table.add_row("...")
            break
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        table.add_row(_text(span), str(len(names)), _text(kind), *map(_text, domains))
    return table


def _table(*heads: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        right = head in ("hosts", "GPUs", "number") and head != heads[0]
        table.add_column(_text(head), justify="right" if right else "left")
    return table


def _text(name: str) -> Text:
    from rich.text import Text

    return Text(plain(name))
