"""``optsched topology``: a cluster from the files of its tools, shown, checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the cluster here.")],
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
    from optsched.io.files import check_not_input, check_writable

    files = _pairs("topo", topo, "TYPE=FILE")
    lists = _pairs("hosts", hosts, "HOSTS=TYPE")
    check_writable(output)
    for given in (*files.values(), slurm, labels):
        if given is not None:
            check_not_input(output, given)
    cluster = Cluster.from_files(
        files, lists, slurm=slurm, labels=labels, nics=nics, nic_rate=nic_rate, pod=pod, name=name
    )
    cluster.write(output)
    print(f"wrote {output}: {cluster.n_hosts} hosts, {cluster.n_gpus} GPUs")


@app.command()
def show(file: ClusterFile) -> None:
    """Types of hosts with their links, domains, and hosts."""
    from rich.console import Console

    from optsched.bandwidth.cluster import Cluster
    from optsched.cli.topology_tables import render

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


def _pairs(option: str, given: Sequence[str], form: str) -> dict[str, str]:
    """``["a=b"]`` as a mapping, no key twice."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            raise InputError(f"{option}: expected {form}, got {text!r:.60}")
        if key in found:
            raise InputError(f"{option}: {key!r:.60} is given twice")
        found[key] = value
    return found
