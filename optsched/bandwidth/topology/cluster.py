"""What a cluster is made of: types of hosts, hosts, and the tree of domains above them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.topology.intra import MOST_BY_SUBSET, IntraTable
from optsched.bandwidth.topology.levels import WHOLE, Levels
from optsched.bandwidth.topology.links import check_links
from optsched.bandwidth.topology.names import expand, id_ranges, local_ids
from optsched.bandwidth.topology.products import product_links
from optsched.bandwidth.topology.rates import KILOBYTES, MOST, kilobytes
from optsched.errors import InputError
from optsched.io.strict_json import shortened
from optsched.io.values import boolean, integer, label, number
from optsched.model.schedule import Resource

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from optsched.model.schedule import IntArray

MOST_PER_HOST: Final = 256
MOST_HOSTS: Final = 100_000

_PARTS: Final = {"rack", "row", "block", "subblock", "pod", "chassis", "tray", "layer"}
"""Parts of names of levels with domains side by side in one fabric."""

_PART = re.compile(r"(?P<host>[^\s:]+?)(?::(?P<ids>[\d,\-*]+))?")


@dataclass(frozen=True)
class HostType:
    """Hosts of one kind; a host is one island of NVLink or PCIe.

    Parameters
    ----------
    name
        Label; without `links` the name of a product gives them (see `products`).
    gpus
        GPUs a host, 1 to 256 (a rack of 72 GPUs joined by NVLink is one host).
    links
        ``links[i][k]`` joins GPUs i and k, as `nvidia-smi topo -m` writes it (``X``, ``NV4``,
        ``PIX``, ...); None: unknown.
    numa
        Groups of local GPU ids near one CPU; by default one group.
    nics, nic_rate
        Network cards a host, and GB/s of each in one direction; None: unknown, then 50 are assumed,
        but never so many that choices of several hosts are faster than those of one.
    intra
        Measured bandwidths of subsets of one host.
    tray
        GPUs a tray: where subsets of a size are alike, whole trays are taken first; 0 = none.

    Raises
    ------
    InputError
        A field of a wrong type or size.

    Examples
    --------
    >>> from optsched.bandwidth import HostType
    >>> HostType("NVIDIA-H100-80GB-HBM3", 8, nics=8, nic_rate=50.0).links[0][:2]
    ('X', 'NV18')
    """

    name: str
    gpus: int
    links: tuple[tuple[str, ...], ...] | None = None
    numa: tuple[tuple[int, ...], ...] = ()
    nics: int = 1
    nic_rate: float | None = None
    intra: IntraTable | None = None
    tray: int = 0

    def __post_init__(self) -> None:
        label("type.name", self.name)
        place = f"types[{self.name}]"
        if not self.name:
            raise InputError("type.name: expected a name, got ''")
        n = integer(f"{place}.gpus", self.gpus, 1, MOST_PER_HOST)
        integer(f"{place}.nics", self.nics, 0, 1024)
        integer(f"{place}.tray", self.tray, 0, n)
        if self.tray and n % self.tray:
            raise InputError(f"{place}.tray: {n} GPUs are no whole trays of {self.tray}")
        if self.nic_rate is not None:
            kilobytes(f"{place}.nic_rate", self.nic_rate)
        links = product_links(self.name, n) if self.links is None else self.links
        if links is not None:
            object.__setattr__(self, "links", check_links(f"{place}.links", links, n))
        try:
            groups = tuple(tuple(int(i) for i in group) for group in self.numa)
        except (TypeError, ValueError):
            raise InputError(
                f"{place}.numa: expected lists of local ids, got {self.numa!r:.60}"
            ) from None
        groups = groups or (tuple(range(n)),)
        if sorted(i for group in groups for i in group) != list(range(n)):
            raise InputError(f"{place}.numa: expected every GPU 0..{n - 1} in one group")
        object.__setattr__(self, "numa", groups)
        if self.intra is not None and not isinstance(self.intra, IntraTable):
            raise InputError(f"{place}.intra: expected an IntraTable, got {self.intra!r:.60}")
        if self.intra is not None and self.intra.gpus != n:
            raise InputError(f"{place}.intra: is for {self.intra.gpus} GPUs, the host has {n}")

    @property
    def nic_kilobytes(self) -> int:
        """Return the rate of one network card in kB/s; 50 GB/s if it is unknown."""
        return kilobytes("nic_rate", 50.0 if self.nic_rate is None else self.nic_rate)


@dataclass(frozen=True)
class Host:
    """GPUs joined by NVLink or PCIe: a machine, or the machines of one NVLink clique.

    Parameters
    ----------
    name
        Label.
    type
        Name of its type.
    domains
        Names of its domains, one a level.
    machines
        Names of the trays of a clique (GB200 NVL72), each with `HostType.tray` of the GPUs, in
        order. Bandwidths are those of one host; schedulers address the machines. Empty: the host
        is one machine of its name.

    Examples
    --------
    >>> from optsched.bandwidth import Host
    >>> Host("n01", "h100", ("block1", "rack3")).domains
    ('block1', 'rack3')
    """

    name: str
    type: str
    domains: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Cluster:
    """Hosts with their GPUs, numbered through: host by host, then by local id.

    Parameters
    ----------
    hosts
        In the order that numbers the GPUs.
    types
        The types that the hosts name.
    levels
        Names of the levels above the hosts, widest first, such as ``("block", "rack")``. Names of
        domains are unique within the domain above. For hosts without a common domain see `fabrics`.
    name
        Label.
    factors
        Level to the share of bandwidth that is left to sets of GPUs of which it is the lowest level
        that holds them, above 0 and at most 1; ``"cluster"``: of several domains of the top level.
        1 where nothing is given, and never more than at a level below.
    uplinks
        Level to the capacity of the uplinks of one of its domains in one direction, GB/s.
    rails
        Whether GPUs of one local id are joined by a rail of switches, so that a choice has the same
        local ids on every host.

    Raises
    ------
    InputError
        Two hosts or machines of one name, an unknown type, other domains than levels, more than
        100,000 hosts, machines that are not the trays of the type, or a factor or uplink of no
        level or out of range.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, Host, HostType
    >>> hosts = (Host("n01", "h100", ("rack1",)), Host("n02", "h100", ("rack2",)))
    >>> cluster = Cluster(hosts, (HostType("h100", 8, nic_rate=50.0),), ("rack",))
    >>> cluster.parse("n01:6,7 n02:0")
    (6, 7, 8)
    >>> cluster.written([6, 7, 8])
    'n01:6,7 n02:0'
    """

    hosts: tuple[Host, ...]
    types: tuple[HostType, ...]
    levels: tuple[str, ...] = ()
    name: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)
    uplinks: Mapping[str, float] = field(default_factory=dict)
    rails: bool = False
    _machines: dict[str, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)
    _by_name: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for key, kind in (("hosts", Host), ("types", HostType), ("levels", str)):
            given = getattr(self, key)
            if not isinstance(given, (list, tuple)) or not all(isinstance(g, kind) for g in given):
                raise InputError(f"{key}: expected a list of {kind.__name__}, got {given!r:.60}")
            object.__setattr__(self, key, tuple(given))
        label("name", self.name)
        if not 1 <= len(self.hosts) <= MOST_HOSTS:
            raise InputError(f"hosts: expected 1..{MOST_HOSTS} hosts, got {len(self.hosts)}")
        names = [kind.name for kind in self.types]
        if len(set(names)) < len(names):
            raise InputError(f"types: two are called {_twice(names)!r}")
        if len(set(self.levels)) < len(self.levels) or "host" in self.levels:
            raise InputError("levels: expected distinct names other than 'host'")
        for level, factor in self._by_level("factors", (*self.levels, "cluster")).items():
            number(f"factors[{level}]", factor, above=True, most=1.0, what="a share")
        lower = 1.0
        for level in (*self.levels[::-1], "cluster"):
            factor = self.factors.get(level, lower)
            if factor > lower:
                raise InputError(
                    f"factors[{level}]: expected {lower:g} at most, as at a level below, got "
                    f"{factor:g}"
                )
            lower = factor
        for level, rate in self._by_level("uplinks", self.levels).items():
            number(f"uplinks[{level}]", rate, above=True, what="GB/s")
        boolean("rails", self.rails)
        for i, host in enumerate(self.hosts):
            self._add_name(f"hosts[{i}].name", host.name)
            self._by_name[host.name] = i
            if host.type not in names:
                raise InputError(
                    f"hosts[{i}].type: there is no type {host.type!r:.60}; "
                    f"known: {shortened(names) or 'none'}"
                )
            if len(host.domains) != len(self.levels):
                raise InputError(
                    f"hosts[{i}].domains: expected one name for each of the {len(self.levels)} "
                    f"levels, got {len(host.domains)}"
                )
            if host.machines:
                self._add_machines(i, self.types[names.index(host.type)])

    def _add_name(self, place: str, name: str) -> None:
        """Check the name of a host or machine."""
        label(place, name)
        if not name or re.search(r"[\s:/,\[\]]", name):
            raise InputError(
                f"{place}: expected a name without spaces, commas, colons, slashes and brackets, "
                f"got {name!r:.60}"
            )
        if name in self._by_name or name in self._machines:
            raise InputError(f"{place}: there are two hosts {name!r}")

    def _add_machines(self, host: int, kind: HostType) -> None:
        names = self.hosts[host].machines
        if not kind.tray or len(names) * kind.tray != kind.gpus:
            raise InputError(
                f"hosts[{host}].machines: {len(names)} machines, but type {kind.name!r:.60} has "
                f"{kind.gpus} GPUs in trays of {kind.tray or 'unknown size'}"
            )
        for tray, name in enumerate(names):
            self._add_name(f"hosts[{host}].machines[{tray}]", name)
            self._machines[name] = host, tray

    def _by_level(self, key: str, known: tuple[str, ...]) -> dict[str, float]:
        """Copy factors or uplinks, checked for unknown levels."""
        given = getattr(self, key)
        if not isinstance(given, Mapping):
            raise InputError(f"{key}: expected a mapping by level, got {given!r:.60}")
        if unknown := [level for level in given if level not in known]:
            levels = ", ".join(known) or "no level"
            raise InputError(f"{key}: expected one of {levels}, got {unknown[0]!r:.60}")
        object.__setattr__(self, key, dict(given))
        return dict(given)

    # sizes and views

    @property
    def n_hosts(self) -> int:
        """Count hosts."""
        return len(self.hosts)

    @cached_property
    def n_gpus(self) -> int:
        """Count GPUs."""
        return int(self.first[-1])

    @cached_property
    def type_of(self) -> tuple[int, ...]:
        """Return for every host the position of its type in `types`."""
        at = {kind.name: t for t, kind in enumerate(self.types)}
        return tuple(at[host.type] for host in self.hosts)

    @cached_property
    def sizes(self) -> IntArray:
        """Return the number of GPUs of every host."""
        sizes = np.array([self.types[t].gpus for t in self.type_of], np.int64)
        sizes.flags.writeable = False
        return sizes

    @cached_property
    def first(self) -> IntArray:
        """Return the first GPU of every host: h has ``first[h] .. first[h + 1] - 1``."""
        first = np.zeros(self.n_hosts + 1, np.int64)
        np.cumsum(self.sizes, out=first[1:])
        first.flags.writeable = False
        return first

    @cached_property
    def host_of(self) -> IntArray:
        """Return the host of every GPU."""
        of = np.repeat(np.arange(self.n_hosts), self.sizes)
        of.flags.writeable = False
        return of

    @cached_property
    def places(self) -> tuple[list[int], list[int], list[bool]]:
        """Return lists: host of every GPU, first GPU of every host, at most 16 GPUs or not."""
        small = (self.sizes <= MOST_BY_SUBSET).tolist()
        return self.host_of.tolist(), self.first.tolist(), small

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """Return the GPUs as resources of schedules, ``host/local id``."""
        return tuple(Resource(self.gpu_name(gpu)) for gpu in range(self.n_gpus))

    def type(self, host: int) -> HostType:
        """Return the type of a host."""
        return self.types[self.type_of[host]]

    def level(self, name: str) -> int:
        """Return the position of a level; ``host`` is below all others."""
        known = (*self.levels, "host")
        if name not in known:
            raise InputError(f"level: expected one of {', '.join(known)}, got {name!r:.60}")
        return known.index(name)

    def domains(self, level: int) -> dict[str, tuple[int, ...]]:
        """Return hosts by domain, in order of the first host; `level` is from `Cluster.level`.

        A name that occurs in several parents follows those above it: ``b1/rack-1``.
        """
        if level == len(self.levels):
            return {host.name: (h,) for h, host in enumerate(self.hosts)}
        found: dict[tuple[str, ...], list[int]] = {}
        for h, host in enumerate(self.hosts):
            found.setdefault(host.domains[: level + 1], []).append(h)
        names = Counter(path[-1] for path in found)
        short = {path: path[-1] if names[path[-1]] == 1 else "/".join(path) for path in found}
        return {short[path]: tuple(hosts) for path, hosts in found.items()}

    def machine_rows(self) -> dict[str, list[str]]:
        """Return names of machines by domain of the lowest level; without levels one row."""
        at = len(self.levels) - 1
        rows = self.domains(at) if self.levels else {"": tuple(range(self.n_hosts))}
        return {
            domain: [name for h in hosts for name in self.machines_of(h)]
            for domain, hosts in rows.items()
        }

    def type_by_machine(self) -> dict[str, str]:
        """Return the type of the host of every machine by name."""
        return {
            name: host.type for i, host in enumerate(self.hosts) for name in self.machines_of(i)
        }

    def machines_of(self, host: int) -> tuple[str, ...]:
        """Return the names of the machines of a host."""
        return self.hosts[host].machines or (self.hosts[host].name,)

    @cached_property
    def fabrics(self) -> tuple[tuple[int, ...], ...]:
        """Return groups of hosts that a network joins: those of each domain of the top level.

        All hosts are one fabric without levels, if a factor is given for the whole cluster, or if
        the top level's name is that of a part of a fabric (rack, row, block, pod, ...): then the
        network goes on above it.
        """
        top = self.levels[0] if self.levels else None
        inside = top is None or "cluster" in self.factors
        inside = inside or bool(_PARTS & {*re.split("[^a-z]+", str(top).lower())})
        return (tuple(range(self.n_hosts)),) if inside else tuple(self.domains(0).values())

    @cached_property
    def network_levels(self) -> Levels:
        """Return domains, factors and uplinks as arrays, the lowest level first."""
        domain = np.zeros((len(self.levels) + 1, self.n_hosts), np.int64)
        groups = [self.domains(i).values() for i in range(len(self.levels) - 1, -1, -1)]
        for row, hosts_of in zip(domain, [*groups, self.fabrics], strict=True):
            for d, hosts in enumerate(hosts_of):
                row[list(hosts)] = d
        names = (*reversed(self.levels), "cluster")
        factor = [round(self.factors.get(name, 1.0) * WHOLE) for name in names]
        rate = [MOST, *(round(self.uplinks.get(n, MOST) * KILOBYTES) for n in names[:-1])]
        return Levels(
            names, domain, np.minimum.accumulate(np.array(factor, np.int64)),
            np.minimum.accumulate(np.minimum(rate, MOST)),
        )  # fmt: skip

    @cached_property
    def sha256(self) -> str:
        """Return a hash of all that matters for bandwidths and policies, 64 hexadecimal digits."""
        limits = sorted(self.factors.items()), sorted(self.uplinks.items()), self.rails
        text = repr((self.hosts, self.levels, limits, [
            (t.name, t.gpus, t.links, t.numa, t.nics, t.nic_rate and t.nic_kilobytes, t.tray,
             None if t.intra is None else t.intra.values.tolist()) for t in self.types
        ]))  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cluster):
            return NotImplemented
        return self is other or (self.sha256 == other.sha256 and self.name == other.name)

    def __hash__(self) -> int:
        return int(self.sha256[:15], 16)

    def __repr__(self) -> str:
        return f"<Cluster {self.name!r}: {self.n_hosts} hosts, {self.n_gpus} GPUs>"

    # names of GPUs

    def host_index(self, name: str, place: str = "host") -> int:
        """Return the position of a host."""
        found = self._by_name.get(name)
        if found is None and name in self._machines:
            host = self.hosts[self._machines[name][0]].name
            raise InputError(f"{place}: {name!r:.60} is a machine of the host {host!r:.60}")
        if found is None:
            some = shortened([host.name for host in self.hosts])
            raise InputError(f"{place}: there is no host {name!r:.60}; hosts: {some}")
        return found

    def gpu_name(self, gpu: int) -> str:
        """Return ``machine/local id`` of a GPU."""
        ((name, (local,)),) = self.by_machine((int(gpu),)).items()
        return f"{name}/{local}"

    def by_machine(self, gpus: Iterable[int]) -> dict[str, list[int]]:
        """Return local ids of GPUs by machine, in the given order."""
        found: dict[str, list[int]] = {}
        host_of, first, _ = self.places
        for gpu in gpus:
            h = host_of[gpu]
            name, local = self.hosts[h].name, gpu - first[h]
            if machines := self.hosts[h].machines:
                tray, local = divmod(local, self.type(h).tray)
                name = machines[tray]
            found.setdefault(name, []).append(local)
        return found

    def machine(self, name: str, place: str = "host") -> range:
        """Return global numbers of the GPUs of a machine or host; `InputError` if unknown."""
        if name not in self._machines:
            h = self.host_index(name, place)
            return range(int(self.first[h]), int(self.first[h + 1]))
        h, tray = self._machines[name]
        first, size = int(self.first[h]), self.type(h).tray
        return range(first + tray * size, first + (tray + 1) * size)

    def counts(self, gpus: Iterable[int]) -> IntArray:
        """Count GPUs by host, shape (hosts,)."""
        hosts = self.host_of[np.array([*gpus], np.int64)]
        return np.bincount(hosts, minlength=self.n_hosts).astype(np.int64)

    def parse(self, text: str, place: str = "gpus") -> tuple[int, ...]:
        """Parse GPUs such as ``"n01:0-5 n02:6,7 n03"`` to global numbers, ascending.

        Parameters
        ----------
        text
            Parts separated by white space; a host or machine alone, or with ``:*``, means all its
            GPUs. Names may hold brackets: ``n[01-04]:0-3``.
        place
            Field for messages.
        """
        found: list[int] = []
        if not isinstance(text, str):
            raise InputError(f"{place}: expected text such as 'n01:0-5 n02', got {text!r:.60}")
        for part in text.split():
            match = _PART.fullmatch(part)
            if match is None:
                raise InputError(f"{place}: expected HOST:IDS, got {part!r:.60}")
            for name in expand(match["host"], place):
                gpus, ids = self.machine(name, place), match["ids"]
                if ids not in (None, "*"):
                    found += [gpus[i] for i in local_ids(ids, len(gpus), part, place)]
                else:
                    found += gpus
        return self.gpus(found, place)

    def gpus(self, given: Iterable[int], place: str = "gpus") -> tuple[int, ...]:
        """Check global numbers and return them ascending."""
        try:
            found = sorted(integer(place, i, 0, self.n_gpus - 1) for i in given)
        except TypeError:
            raise InputError(f"{place}: expected GPU numbers, got {given!r:.60}") from None
        for a, b in pairwise(found):
            if a == b:
                raise InputError(f"{place}: GPU {self.gpu_name(a)} is given twice")
        return tuple(found)

    def written(self, gpus: Iterable[int]) -> str:
        """Format GPUs by machine, the inverse of `parse`: ``"n01:0-5 n02:6,7"``."""
        return " ".join(
            f"{name}:{id_ranges(ids)}" for name, ids in self.by_machine(sorted(gpus)).items()
        )

    # files

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a document ``optsched.cluster/1``; `InputError` names path, rule and value."""
        from optsched.bandwidth.topology.documents import read_cluster

        return read_cluster(path)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a document ``optsched.cluster/1``, all of it or nothing."""
        from optsched.bandwidth.topology.documents import cluster_json
        from optsched.io.files import write_atomic

        write_atomic(path, cluster_json(self))

    @classmethod
    def from_files(
        cls,
        topo: Mapping[str, str | os.PathLike[str]],
        hosts: Mapping[str, str],
        *,
        domains: str | os.PathLike[str] | None = None,
        levels: Sequence[str] = (),
        nics: int | Sequence[str] | None = None,
        nic_rate: float | None = None,
    ) -> Cluster:
        """Read a cluster from the files that its tools write.

        Parameters
        ----------
        topo
            Host type to the output of `nvidia-smi topo -m`, or of `rocm-smi --showtopo`.
        hosts
            Host list with brackets, such as ``n[01-04]``, to the name of its type; may be empty
            for Kubernetes, where nodes have types.
        domains, levels
            Slurm's ``topology.conf`` or ``topology.yaml``, a CSV ``host,level...``, or the JSON of
            ``kubectl get nodes`` with the labels that are levels, widest first.
        nics, nic_rate
            As in `optsched.formats.nvidia_topo.from_text`.
        """
        from optsched.formats.topology import cluster_from_files

        return cluster_from_files(topo, hosts, domains, levels, nics, nic_rate)

    def limited(
        self, factors: Mapping[str, float], uplinks: Mapping[str, str | float], *, rails: bool
    ) -> Cluster:
        """Copy the cluster with limits of its levels; an uplink is GB/s or a ratio ``"2:1"``."""
        from optsched.bandwidth.topology.domain_trees import uplink_rates

        rates = uplink_rates(self, uplinks)
        return replace(self, factors=dict(factors), uplinks=rates, rails=rails)

    @classmethod
    def uniform(
        cls, kind: HostType, hosts: int | Sequence[str], *, name: str = "", prefix: str = "n"
    ) -> Cluster:
        """Make a cluster of hosts of one type, by number or names, without levels."""
        if not isinstance(kind, HostType):
            raise InputError(f"kind: expected a HostType, got {kind!r:.60}")
        if not isinstance(hosts, (list, tuple)):
            hosts = integer("hosts", hosts, 1, MOST_HOSTS)
            width = max(2, len(str(hosts)))
            hosts = [f"{prefix}{i:0{width}d}" for i in range(1, hosts + 1)]
        return cls(tuple(Host(host, kind.name) for host in hosts), (kind,), name=name)


def _twice(names: list[str]) -> str:
    return next(name for i, name in enumerate(names) if name in names[:i])
