"""A cluster from the files of its tools: topology matrices, host lists, switches or labels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from optsched.bandwidth.cluster import MOST_HOSTS, Cluster, Host
from optsched.bandwidth.host_lists import expand
from optsched.errors import InputError
from optsched.formats import domain_labels, nvidia_topo, slurm_topology
from optsched.io.strict_json import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        found = (slurm_topology if slurm is not None else domain_labels).read(source)
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
