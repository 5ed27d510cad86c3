"""``optsched gpus topology``: import and show a cluster and its state."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from optsched.bandwidth.models.fallback import assumptions
from optsched.bandwidth.topology.cluster import Cluster
from optsched.bandwidth.topology.links import PCIE, nvlinks, weight
from optsched.bandwidth.topology.rates import rate_text
from optsched.bandwidth.topology.state import ClusterState
from optsched.cli.options import AsJson, OptionalOutput, Output, argument, option, pairs, quantity
from optsched.cli.output import console, stdin_or_file, wrote
from optsched.cli.tables import display, table
from optsched.errors import InputError
from optsched.io.files import check_outputs
from optsched.io.strict_json import shortened
from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Group, RenderableType
    from rich.table import Table

    from optsched.bandwidth.topology.cluster import HostType

_MOST_ROWS = 40  # of hosts, and of domains a level
_MOST_MATRIX = 16  # GPUs of a matrix that fits the screen

ClusterFile = Annotated[Path, argument("A cluster, optsched.cluster/1.")]
StateFile = Annotated[Path | None, option("Its state: optsched.state/1.")]


def import_(
    output: Output,
    topo: Annotated[
        list[str] | None, option("TYPE=FILE of `nvidia-smi topo -m` or `rocm-smi`.")
    ] = None,
    hosts: Annotated[
        list[str] | None, option("'n[01-04]=h100' [default: nodes of Kubernetes in --domains].")
    ] = None,
    domains: Annotated[
        Path | None,
        option("Slurm's topology.conf or .yaml[:NAME], `kubectl get nodes -o json`, or a CSV."),
    ] = None,
    level: Annotated[list[str] | None, option("[LEVEL=]LABEL of Kubernetes, widest first.")] = None,
    nics: Annotated[
        str | None, option("Network cards: number, or names [default: near GPUs].")
    ] = None,
    nic_rate: Annotated[float | None, option("GB/s of a network card [default: unknown].")] = None,
    name: Annotated[str, option("Name of the cluster.")] = "",
    factor: Annotated[
        list[str] | None, option("LEVEL=SHARE of bandwidth across its parts.")
    ] = None,
    uplink: Annotated[
        list[str] | None, option("LEVEL=2:1, or LEVEL=GB/s of uplinks, one direction.")
    ] = None,
    rails: Annotated[
        bool, option("Same local ids on every host (rail switches).", "--rails")
    ] = False,
) -> None:
    """Write a cluster from topology matrices, host lists, and switches, nodes or labels.

    Example: optsched gpus topology import --topo h100=topo.txt --hosts 'n[01-04]=h100' -o c.json
    """
    files, lists = pairs("topo", topo or (), "TYPE=FILE"), pairs("hosts", hosts or (), "HOSTS=TYPE")
    check_outputs([output], [*files.values(), domains])
    shares: dict[str, Any] = pairs("factor", factor or (), "LEVEL=SHARE")
    shares = {level: quantity(text, {"": 1}) or text for level, text in shares.items()}
    cards = None if nics is None else int(nics) if re.fullmatch("[0-9]{1,4}", nics) else nics
    cluster = Cluster.from_files(
        files, lists, domains=domains, levels=level or (), nic_rate=nic_rate,
        nics=cards.split(",") if isinstance(cards, str) else cards,
    )  # fmt: skip
    uplinks = pairs("uplink", uplink or (), "LEVEL=2:1 or LEVEL=GB/s")
    cluster = replace(cluster, name=name).limited(shares, uplinks, rails=rails)
    wrote(output, cluster.write, f": {_sizes(cluster)}")
    for line in assumptions(cluster):
        print(f"warning: {line}", file=sys.stderr)


def show(
    file: ClusterFile,
    state: StateFile = None,
    gpus: Annotated[str | None, option("Mark these on the map, such as 'n01:0-3 n02'.")] = None,
    output: OptionalOutput = None,
    as_json: AsJson = False,
) -> None:
    """Print types of hosts, links, domains and hosts, notes, and a map (-o: .png, .svg, .pdf).

    Notes are what is missing, and what answers assume instead.

    Example: optsched gpus topology show c.json --state s.json
    """
    cluster = Cluster.read(file)
    found = None if state is None else ClusterState.read(state, cluster)
    marked, now = set(cluster.parse(gpus or "")), found or ClusterState.idle(cluster)
    if output is not None:
        from optsched.plots.cluster_map import gpu_map

        check_outputs([output], [file, state])
        gpu_map(now, output, marked)
        if not as_json:
            print(f"wrote {output}")
            return
    notes = [*_type_notes(cluster), *assumptions(cluster), *_level_notes(cluster)]
    if found is not None or marked:
        notes += _placeholders(now)
    if as_json:
        types = Counter(cluster.types[t].name for t in cluster.type_of)
        facts = {"hosts": cluster.n_hosts, "gpus": cluster.n_gpus, "types": types, "notes": notes}
        counts = {"free": len(now.free), "jobs": len(now.jobs), "down": len(now.down)}
        print(json.dumps({**facts, "levels": cluster.levels, "state": found and counts}))
        return
    display(render(cluster))
    if found is not None or marked:
        display("", *_map(now, marked))
    for note in notes:
        print(f"note: {note}")


def state(
    output: Output,
    cluster: Annotated[Path, option("Its hosts: optsched.cluster/1.", show_default=False)],
    slurm: Annotated[Path | None, option("`scontrol show node -d`; - reads stdin.")] = None,
    jobs: Annotated[Path | None, option("`squeue --json`: which job has which GPUs.")] = None,
    kubernetes: Annotated[list[Path] | None, option("`kubectl get nodes,pods -A -o json`.")] = None,
) -> None:
    """Write the state of a running cluster: free GPUs, jobs, and GPUs that are down.

    Example: optsched gpus topology state --cluster c.json --slurm nodes.txt -o s.json
    """
    lists = kubernetes or []
    if bool(lists) == (slurm is not None) or len(lists) > 2 or (jobs and not slurm):
        raise InputError("slurm, kubernetes: give --slurm [--jobs], or --kubernetes once or twice")
    given = [path for path in (slurm, jobs, *lists) if path is not None]
    check_outputs([output], [cluster, *(path for path in given if str(path) != "-")])
    known = Cluster.read(cluster)
    read = [*map(stdin_or_file, given), ("", None)]
    make = ClusterState.from_kubernetes if lists else ClusterState.from_slurm
    found = make(known, read[0][1] or "", read[1][1], (read[0][0], read[1][0]))
    wrote(output, found.write, f": {_counts(found)}")
    for line in _placeholders(found):
        print(f"warning: {line}", file=sys.stderr)


def _type_notes(cluster: Cluster) -> Iterator[str]:
    used = set(cluster.type_of)
    for t, kind in enumerate(cluster.types):
        place = f"types[{kind.name}]"
        if t not in used:
            yield f"{place}: no host is of this type"
            continue
        if kind.intra is None and kind.links is not None:
            yield f"{place}: no bandwidths within the host: estimated by links"
        if kind.nics == 0 and cluster.n_hosts > 1:
            yield f"{place}: no network cards: nothing goes across hosts"


def _level_notes(cluster: Cluster) -> Iterator[str]:
    if len(cluster.fabrics) > 1:
        sizes = ", ".join(f"{int(cluster.sizes[[*hosts]].sum())}" for hosts in cluster.fabrics[:8])
        yield (
            f"{cluster.levels[0]}: no level above joins the {len(cluster.fabrics)} domains: "
            f"no choice spans them; they have {sizes}{', ...' * (len(cluster.fabrics) > 8)} GPUs"
        )
    if cluster.rails:
        yield "rails: a choice has the same local ids on every host"
    for level, share in cluster.factors.items():
        yield f"{level}: factor {share:g} of the bandwidth where no lower level joins a set"
    for level, rate in cluster.uplinks.items():
        cards = {kind.nics * kind.nic_rate for kind in cluster.types if kind.nic_rate}
        limits = "limit" if rate < max(cards, default=0.0) else "do not limit"
        yield (
            f"{level}: uplinks of {rate:g} GB/s a domain {limits} a single job with ranks in "
            "order (its ring crosses them once); jobs that share uplinks are not modelled"
        )
    if not cluster.levels and cluster.n_hosts > 2:
        yield "no levels: all hosts are taken for equally near (--domains, --level)"
    for k, level in enumerate(cluster.levels):
        lost = [host.name for host in cluster.hosts if not host.domains[k]]
        if lost:
            yield f"{len(lost)} hosts have no {level}: {shortened(lost)}"


def _counts(state: ClusterState) -> str:
    held = sum(len(job.gpus) for job in state.jobs)
    numbers = f", ids unknown on {len(state.unknown)} machines" * bool(state.unknown)
    return (
        f"{len(state.free)} GPUs free, {held} held by {len(state.jobs)} jobs, "
        f"{len(state.down)} down{numbers}"
    )


def _placeholders(state: ClusterState) -> Iterator[str]:
    """Describe types of hosts on which unknown ids make bandwidths uncertain."""
    cluster = state.cluster
    for t in range(len(cluster.types) if state.unknown else 0):
        links = {link for row in cluster.types[t].links or () for link in row}
        hosts = [cluster.machines_of(h) for h, of in enumerate(cluster.type_of) if of == t]
        if len(links) > 2 and any(map(state.unknown.intersection, hosts)):
            what = f"types[{cluster.types[t].name}]: pairs of GPUs differ, and ids are unknown"
            yield f"{what}: bandwidths are those of the lowest ids"


def _map(state: ClusterState, marked: set[int]) -> Iterator[str]:
    """Draw one character per GPU; a line has machines of one domain, named by the first."""
    cluster = state.cluster
    sign = {gpu: "#" for job in state.jobs for gpu in job.gpus}
    sign |= dict.fromkeys(state.free, ".") | dict.fromkeys(state.down, "x")
    sign |= dict.fromkeys(marked, "@")
    yield f"{_counts(state)}: . free  # held  x down{'  @ marked' * bool(marked)}"
    rows = cluster.machine_rows()
    left = [max(map(len, names)) for names in (rows, [n for row in rows.values() for n in row])]
    width = (console().width - sum(left) - 3) // (1 + int(cluster.sizes.max()))
    for domain, names in rows.items():
        title, step = one_line(domain), max(1, min(width, 16))
        for at in range(0, len(names), step):
            part = names[at : at + step]
            cells = ("".join(sign[gpu] for gpu in cluster.machine(name)) for name in part)
            yield f"{title:{left[0]}}  {one_line(part[0]):{left[1]}} {' '.join(cells)}".lstrip()
            title = ""


def render(cluster: Cluster) -> Group:
    """Return the tables of ``optsched gpus topology show``; names are data, never markup."""
    from rich.console import Group

    title = Text(one_line(cluster.name) or "cluster", style="bold")
    title.append(f"\n{_sizes(cluster)}{', rails' * cluster.rails}", "dim")
    parts: list[RenderableType] = [title, "", _types(cluster)]
    for kind in cluster.types:
        if kind.links is not None and kind.gpus <= _MOST_MATRIX:
            parts += ["", Text(one_line(f"links of {kind.name}")), _links(kind)]
    if cluster.levels:
        parts += ["", _domains(cluster)]
    return Group(*parts, "", _hosts(cluster))


def _sizes(cluster: Cluster) -> str:
    """Format ``2 hosts of 36 machines, 144 GPUs``."""
    machines = sum(max(1, len(host.machines)) for host in cluster.hosts)
    of = f" of {machines} machines" * (machines > cluster.n_hosts)
    return f"{cluster.n_hosts} hosts{of}, {cluster.n_gpus} GPUs"


def _types(cluster: Cluster) -> Table:
    heads = ("type", "hosts", "GPUs", "network", "NUMA", "links", "within a host")
    hosts = Counter(cluster.type_of)
    rows = []
    for t, kind in enumerate(cluster.types):
        rate = "unknown" if kind.nic_rate is None else f"{kind.nic_rate:g} GB/s"
        numa = "+".join(str(len(group)) for group in kind.numa)
        rows.append((kind.name, str(hosts[t]), str(kind.gpus), f"{kind.nics} x {rate}", numa,
                     _pairs(kind), _within(kind)))  # fmt: skip
    return table(heads, rows, left=(0, 3, 4, 5, 6))


def _pairs(kind: HostType) -> str:
    """Count pairs of GPUs by link: ``28 NV18``, or ``4 NV4, 8 PXB, 16 SYS``."""
    if kind.links is None:
        return "unknown"
    pairs = Counter(kind.links[i][k] for i in range(kind.gpus) for k in range(i))
    parts = sorted(pairs.items(), key=lambda pair: -weight(pair[0]))
    return ", ".join(f"{n} {link}" for link, n in parts) or "-"


def _within(kind: HostType) -> str:
    if kind.intra is None:
        return "not measured"
    if kind.gpus < 2:
        return "-"
    best = kind.intra.by_count
    by = "subset" if kind.intra.by_subset else "count"
    return f"by {by}, pair {rate_text(int(best[2]))}, all {rate_text(int(best[-1]))}"


def _links(kind: HostType) -> Table:
    assert kind.links is not None
    heads = ["", *(str(i) for i in range(kind.gpus))]
    rows: list[list[str | Text]] = [[str(i), *map(_link, row)] for i, row in enumerate(kind.links)]
    return table(heads, rows, left=range(len(heads)))


def _link(link: str) -> Text:
    near = nvlinks(link) > 0
    return Text(link, "green" if near else "red" if link == PCIE[0] else "dim" * (link == "X"))


def _domains(cluster: Cluster) -> Table:
    rows: list[tuple[str, ...]] = []
    for level, name in enumerate(cluster.levels):
        label, uplink = name, cluster.uplinks.get(name)
        factor = f"{cluster.factors.get(name, 1.0):g}"
        limits = (factor, "" if uplink is None else f"{uplink:g} GB/s")
        domains = cluster.domains(level)
        for domain, hosts in [*domains.items()][:_MOST_ROWS]:
            gpus = sum(int(cluster.sizes[h]) for h in hosts)
            rows.append((label, domain, str(len(hosts)), str(gpus), *limits))
            label, limits = "", ("", "")
        if len(domains) > _MOST_ROWS:
            rows.append(("", f"and {len(domains) - _MOST_ROWS} more", *[""] * 4))
    share = cluster.factors.get("cluster", 1.0)
    if share < 1.0:
        rows.append(("cluster", "", str(cluster.n_hosts), str(cluster.n_gpus), f"{share:g}", ""))
    return table(("level", "domain", "hosts", "GPUs", "factor", "uplinks"), rows, left=(0, 1))


def _hosts(cluster: Cluster) -> Table:
    """Return a table with a row per run of hosts of one type and place."""
    heads = ("hosts", "number", "type", *cluster.levels)
    rows = []
    alike = groupby(cluster.hosts, lambda h: (h.type, h.domains, h.name * bool(h.machines)))
    for (kind, domains, clique), members in alike:
        names = [name for host in members for name in host.machines or (host.name,)]
        span = f"{clique}: " * bool(clique)
        span += names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        rows.append((span, str(len(names)), kind, *domains))
    if len(rows) > _MOST_ROWS:
        rows = [*rows[:_MOST_ROWS], ("...", *[""] * (len(heads) - 1))]
    return table(heads, rows, left={*range(len(heads))} - {1})
