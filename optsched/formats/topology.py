"""A cluster from files of its tools: matrices of links, and switches of hosts."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from optsched.bandwidth.topology.cliques import joined
from optsched.bandwidth.topology.cluster import MOST_HOSTS, Cluster, Host, HostType
from optsched.bandwidth.topology.domain_trees import Domains
from optsched.bandwidth.topology.names import expand
from optsched.errors import InputError
from optsched.formats import nvidia_topo
from optsched.formats.host_domains import from_labels, from_nodes
from optsched.formats.registry import looks_like
from optsched.formats.slurm_topology import from_slurm, is_yaml
from optsched.io.files import read_text
from optsched.io.strict_json import parse, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def cluster_from_files(
    topo: Mapping[str, str | os.PathLike[str]],
    hosts: Mapping[str, str],
    domains: str | os.PathLike[str] | None,
    levels: Sequence[str],
    nics: int | Sequence[str] | None,
    nic_rate: float | None,
) -> Cluster:
    """Implement `Cluster.from_files`."""
    types = {
        kind: nvidia_topo.from_text(read_text(path), kind, str(path), nics, nic_rate)
        for kind, path in topo.items()
    }
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
    found = Domains((), {}) if domains is None else read_domains(domains, levels, list(kind_of))
    if levels and not found.kinds:
        raise InputError("levels: name labels of Kubernetes nodes; other files name their own")
    if not kind_of:
        if not found.kinds:
            raise InputError("hosts: expected host lists with types, such as {'n[01-04]': 'h100'}")
        kind_of = {host: kind for host, (kind, _) in found.kinds.items()}
        sizes = dict(found.kinds.values())
        for kind in topo:
            if types[kind].gpus != sizes.get(kind):
                known = shortened([f"{k} of {n} GPUs" for k, n in sizes.items()])
                size = types[kind].gpus
                raise InputError(f"topo: {kind!r:.60} has {size} GPUs; types of the nodes: {known}")
        if nics is None and sizes.keys() - topo.keys():
            text = f"{domains}: names no network card: 1 a host is taken (nics=, --nics)"
            warnings.warn(text, stacklevel=3)
        cards = nics if isinstance(nics, int) else 1
        bare = {k: HostType(k, n, nics=cards, nic_rate=nic_rate) for k, n in sizes.items()}
        types = bare | types
    if domains is not None and (lost := [host for host in kind_of if host not in found.of]):
        some = f"{len(lost)} of the hosts are, the first: {', '.join(lost[:4])}"
        raise InputError(f"{os.fspath(domains)}: does not say where {some}")
    placed = [Host(host, kind, found.of.get(host, ())) for host, kind in kind_of.items()]
    parts, kinds = joined(placed, types, found.levels, found.cliques)
    return Cluster(tuple(parts), tuple(kinds), found.levels)


def read_domains(
    path: str | os.PathLike[str], levels: Sequence[str] = (), hosts: Sequence[str] = ()
) -> Domains:
    """Read domains from a file of Slurm, Kubernetes or labels, recognized by its content.

    It is a ``topology.conf``, ``topology.yaml`` (``topology.yaml:NAME`` for one of several), JSON
    of ``kubectl get nodes``, or a CSV ``host,level...``. For `levels` see `from_nodes`, for `hosts`
    `from_slurm`.
    """
    file, topology = os.fspath(path), None
    if not os.path.exists(file) and ":" in file:
        file, _, topology = file.rpartition(":")
    text = read_text(file)
    if topology is not None and not is_yaml(text):
        read_text(path)  # is no file
    if text.lstrip()[:1] in ("{", "["):
        tree = parse(text, file)
        if not isinstance(tree, dict) or not tree.keys() & {"items", "metadata"}:
            raise InputError(f"{file}: expected JSON of `kubectl get nodes`{looks_like(text)}")
        return from_nodes(tree, file, levels)
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if "," in first and "=" not in first:
        return from_labels(text, file)
    return from_slurm(text, file, topology, hosts)
