"""``optsched topology``: a cluster from the files of its tools, shown as tables, checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optsched.cli.options import Output, pairs

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from optsched.bandwidth.cluster import Cluster, HostType

_MOST_ROWS = 40  # of hosts, and of domains a level
_MOST_MATRIX = 16  # GPUs of a matrix that fits the screen

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Describe a cluster: import what its tools write, show it, check it.",
)

ClusterFile = Annotated[
    Path, typer.Argument(help="A cluster, optsched.cluster/1.", show_default=False)
]


@app.command("import")
def import_(
    topo: Annotated[
        list[str],
        typer.Option(help="TYPE=FILE, output of `nvidia-smi topo -m` on a host of that type."),
    ],
    hosts: Annotated[
        list[str], typer.Option(help="HOSTS=TYPE, such as 'n[01-04]=h100'; may be repeated.")
    ],
    output: Output,
    slurm: Annotated[Path | None, typer.Option(help="Slurm's topology.conf.")] = None,
    labels: Annotated[Path | None, typer.Option(help="CSV host,LEVEL,... of domains.")] = None,
    nics: Annotated[
        int | None, typer.Option(help="Network cards a host [default: as the matrix lists].")
    ] = None,
    nic_rate: Annotated[float, typer.Option(help="GB/s of a network card.")] = 50.0,
    pod: Annotated[str | None, typer.Option(help="Level whose domains are pods.")] = None,
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = "",
) -> None:
    """Write a cluster from topology matrices, host lists, and switches or labels."""
    from optsched.bandwidth.cluster import Cluster
    from optsched.cli.output import wrote
    from optsched.io.files import check_outputs

    files, lists = pairs("topo", topo, "TYPE=FILE"), pairs("hosts", hosts, "HOSTS=TYPE")
    check_outputs([output], [*files.values(), slurm, labels])
    cluster = Cluster.from_files(
        files, lists, slurm=slurm, labels=labels, nics=nics, nic_rate=nic_rate, pod=pod, name=name
    )
    wrote(output, cluster.write, f": {cluster.n_hosts} hosts, {cluster.n_gpus} GPUs")


@app.command()
def show(file: ClusterFile) -> None:
    """Types of hosts with their links, domains, and hosts."""
    from rich.console import Console

    from optsched.bandwidth.cluster import Cluster

    Console().print(render(Cluster.read(file)))


@app.command()
def check(
    file: ClusterFile,
    state: Annotated[
        Path | None, typer.Option(help="A state of this cluster too, optsched.state/1.")
    ] = None,
) -> None:
    """Check a cluster, and a state of it; say what could be missing for good answers."""
    from optsched.bandwidth.cluster import Cluster
    from optsched.bandwidth.state import ClusterState

    cluster = Cluster.read(file)
    found = None if state is None else ClusterState.read(state, cluster)
    print(f"{file}: in order, {cluster.n_hosts} hosts, {cluster.n_gpus} GPUs")
    used = set(cluster.type_of)
    for t, kind in enumerate(cluster.types):
        if t not in used:
            print(f"note: types[{kind.name}]: no host is of this type")
            continue
        if kind.intra is None:
            print(f"note: types[{kind.name}]: no bandwidths within the host: they are guessed")
        if kind.links is None and kind.intra is None:
            print(f"note: types[{kind.name}]: no links: all GPUs are taken for alike")
        if kind.nics == 0 and cluster.n_hosts > 1:
            print(f"note: types[{kind.name}]: no network cards: nothing goes across hosts")
    if found is not None:
        busy = sum(len(job.gpus) for job in found.jobs)
        print(
            f"{state}: in order, {len(found.free)} GPUs free, {busy} held by {len(found.jobs)} "
            f"jobs, {len(found.down)} down"
        )


def render(cluster: Cluster) -> Group:
    """What ``optsched topology show`` prints; names appear as they are, never as markup."""
    from rich.console import Group
    from rich.text import Text

    from optsched.io.text import plain

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
    from optsched.cli.output import table as made

    heads = ("type", "hosts", "GPUs", "network", "NUMA", "links", "within a host")
    table = made(*heads, left=(0, 3, 4, 5, 6))
    hosts = {t: cluster.type_of.count(t) for t in set(cluster.type_of)}
    for t, kind in enumerate(cluster.types):
        network = f"{kind.nics} x {kind.nic_rate:g} GB/s"
        sizes = "+".join(str(len(group)) for group in kind.numa)
        row = [str(hosts.get(t, 0)), str(kind.gpus), network, sizes, _summary(kind), _within(kind)]
        table.add_row(_text(kind.name), *row)
    return table


def _summary(kind: HostType) -> str:
    """``28 NV18``, or ``4 NV4, 8 PXB, 16 SYS``: pairs by their way."""
    from collections import Counter

    from optsched.bandwidth.links import weight

    if kind.links is None:
        return "unknown"
    pairs = Counter(kind.links[i][k] for i in range(kind.gpus) for k in range(i))
    if not pairs:
        return "-"
    return ", ".join(
        f"{n} {link}" for link, n in sorted(pairs.items(), key=lambda p: -weight(p[0]))
    )


def _within(kind: HostType) -> str:
    from optsched.bandwidth.rates import shown

    if kind.intra is None:
        return "not measured"
    if kind.gpus < 2:
        return "-"
    best = kind.intra.by_count
    by = "subset" if kind.intra.by_subset else "count"
    return f"by {by}, pair {shown(int(best[2]))}, all {shown(int(best[-1]))}"


def _links(kind: HostType) -> Table:
    from rich.text import Text

    from optsched.bandwidth.links import PCIE, nvlinks
    from optsched.cli.output import table as made

    assert kind.links is not None
    table = made("", *(str(i) for i in range(kind.gpus)), left=range(kind.gpus + 1))
    for i, row in enumerate(kind.links):
        cells = []
        for link in row:
            near = nvlinks(link) > 0
            style = "green" if near else "red" if link == PCIE[0] else "dim" if link == "X" else ""
            cells.append(Text(link, style))
        table.add_row(str(i), *cells)
    return table


def _domains(cluster: Cluster) -> Table:
    from optsched.cli.output import table as made

    table = made("level", "domain", "hosts", "GPUs", left=(0, 1))
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
    from itertools import groupby

    from optsched.cli.output import table as made

    table = made("hosts", "number", "type", *cluster.levels, left={*range(9)} - {1})
    groups = groupby(cluster.hosts, key=lambda host: (host.type, host.domains))
    for row, ((kind, domains), members) in enumerate(groups):
        names = [host.name for host in members]
        if row == _MOST_ROWS:
            table.add_row("...")
            break
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        table.add_row(_text(span), str(len(names)), _text(kind), *map(_text, domains))
    return table


def _text(name: str) -> Text:
    from rich.text import Text

    from optsched.io.text import plain

    return Text(plain(name))
