"""What a cluster is doing: free GPUs, running jobs, GPUs that are down."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bandwidth.topology.cluster import Cluster
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.names import id_ranges
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError
from optsched.io.values import frozen, integer, label

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from optsched.model.schedule import IntArray


@dataclass(frozen=True)
class Job:
    """A running job: its GPUs by global number, and the bandwidth in kB/s of its demand.

    ``demand=None`` means as much as it can get: what its GPUs reach alone.

    Examples
    --------
    >>> from optsched.bandwidth import Job
    >>> Job("a", (0, 1, 8), demand=50_000_000).gpus
    (0, 1, 8)
    """

    name: str
    gpus: tuple[int, ...]
    demand: int | None = None


@dataclass(frozen=True, eq=False)
class ClusterState:
    """Every GPU is free, held by one job, or down.

    Parameters
    ----------
    cluster
        Whose GPUs they are.
    free, down
        Global numbers.
    jobs
        The running jobs, names distinct.
    unknown
        Names of machines of which only the numbers of free, held and down GPUs are known: local
        ids there are placeholders, and `written` gives a number instead.

    Raises
    ------
    InputError
        A GPU in two of them, or in none; a wrong number, name or demand.

    Examples
    --------
    >>> from optsched.bandwidth import ClusterState, synthetic
    >>> state = ClusterState.idle(synthetic.cluster("nvswitch", 2)).take("n01:0-3", "a").fail("n02")
    >>> state.written(state.free)
    'n01:4-7'
    >>> len(state.give("a").repair("n02:0").free)
    9
    """

    cluster: Cluster
    free: tuple[int, ...]
    jobs: tuple[Job, ...] = ()
    down: tuple[int, ...] = ()
    unknown: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        cluster = self.cluster
        if not isinstance(cluster, Cluster):
            raise InputError(f"cluster: expected a Cluster, got {cluster!r:.60}")
        if not isinstance(self.jobs, (list, tuple)) or not all(
            isinstance(job, Job) for job in self.jobs
        ):
            raise InputError(f"jobs: expected a list of Jobs, got {self.jobs!r:.60}")
        object.__setattr__(self, "free", cluster.gpus(self.free, "free"))
        object.__setattr__(self, "down", cluster.gpus(self.down, "down"))
        if isinstance(self.unknown, str):
            raise InputError(f"unknown: expected names of machines, got {self.unknown!r:.60}")
        object.__setattr__(self, "unknown", frozenset(self.unknown))
        for name in sorted(self.unknown):
            cluster.machine(name, "unknown")
        groups = [("free", self.free), ("down", self.down)]
        jobs, names = [], set[str]()
        for job in self.jobs:
            place = f"jobs[{job.name!r:.60}]"
            if not label("job", job.name) or job.name in names:
                raise InputError(f"jobs: expected distinct names, got {job.name!r:.60}")
            names.add(job.name)
            if job.demand is not None:
                integer(f"{place}.demand", job.demand, 0, MOST - 1)
            jobs.append(replace(job, gpus=cluster.gpus(job.gpus, place)))
            if not job.gpus:
                raise InputError(f"{place}: holds no GPU")
            groups.append((f"job {job.name!r:.60}", jobs[-1].gpus))
        object.__setattr__(self, "jobs", tuple(jobs))
        owner: dict[int, str] = {}
        for name, gpus in groups:
            for gpu in owner.keys() & set(gpus):
                both = f"{owner[gpu]} and {name}"
                raise InputError(f"GPU {cluster.gpu_name(gpu)} is in two places: {both}")
            owner |= dict.fromkeys(gpus, name)
        if len(owner) < cluster.n_gpus:
            lost = [gpu for gpu in range(cluster.n_gpus) if gpu not in owner]
            raise InputError(
                f"{len(lost)} GPUs are neither free, nor held by a job, nor down: "
                f"{cluster.written(lost[:4])}{' ...' * (len(lost) > 4)}"
            )

    @classmethod
    def parse(
        cls,
        cluster: Cluster,
        free: str = "",
        jobs: Mapping[str, str] = MappingProxyType({}),
        down: str = "",
        demands: Mapping[str, int] = MappingProxyType({}),
    ) -> ClusterState:
        """Make a state from texts such as ``"n01:0-5 n02"``; demands are in kB/s."""
        for key, given in (("jobs", jobs), ("demands", demands)):
            if not isinstance(given, Mapping):
                raise InputError(f"{key}: expected a mapping by job, got {given!r:.60}")
        for name in demands:
            if name not in jobs:
                raise InputError(f"demands: there is no job {name!r:.60}")
        running = tuple(
            Job(name, cluster.parse(text, f"jobs[{name!r:.60}]"), demands.get(name))
            for name, text in jobs.items()
        )
        return cls(cluster, cluster.parse(free, "free"), running, cluster.parse(down, "down"))

    @classmethod
    def idle(cls, cluster: Cluster) -> ClusterState:
        """Make the state with all GPUs free."""
        return cls(cluster, tuple(range(cluster.n_gpus)))

    @classmethod
    def with_free(cls, cluster: Cluster, free: Iterable[int]) -> ClusterState:
        """Make a state with these GPUs free and all others down."""
        up = set(cluster.gpus(free, "free"))
        return cls(cluster, tuple(up), down=tuple(set(range(cluster.n_gpus)) - up))

    def written(self, gpus: Iterable[int]) -> str:
        """Format GPUs by machine: local ids, or their number where ids are unknown.

        ``"n01:0-3 n02:x2"``: two of n02, whichever. All of a machine have known ids.
        """
        parts = []
        for name, ids in self.cluster.by_machine(sorted(gpus)).items():
            some = name in self.unknown and len(ids) < len(self.cluster.machine(name))
            parts.append(f"{name}:x{len(ids)}" if some else f"{name}:{id_ranges(ids)}")
        return " ".join(parts)

    def gpu_name(self, gpu: int) -> str:
        """Return ``machine/local id`` of a GPU, the machine alone where ids are unknown."""
        name = self.cluster.gpu_name(gpu)
        machine = name.partition("/")[0]
        return machine if machine in self.unknown else name

    def free_machines(self, host: int) -> tuple[str, ...]:
        """Return names of the machines of a host that have free GPUs."""
        names = self.cluster.machines_of(host)
        if len(names) > 1:
            first, end = (
                bisect_left(self.free, int(n)) for n in self.cluster.first[host : host + 2]
            )
            names = tuple(self.cluster.by_machine(self.free[first:end]))
        return names

    # what kernels read

    @cached_property
    def masks(self) -> IntArray:
        """Return free GPUs by host: bit i is local GPU i; above 16 GPUs only their number."""
        return frozen(_by_host(self.cluster, self.free))

    @cached_property
    def room(self) -> IntArray:
        """Count free GPUs by host."""
        return frozen(self.cluster.counts(self.free))

    @cached_property
    def held(self) -> IntArray:
        """Count GPUs of job j on host h, shape (jobs, hosts)."""
        held = np.zeros((len(self.jobs), self.cluster.n_hosts), np.int64)
        for j, job in enumerate(self.jobs):
            for h, count in host_counts(self.cluster, job.gpus)[0].items():
                held[j, h] = count
        return frozen(held)

    # changes

    def job(self, name: str) -> Job:
        """Return the running job of a name; `InputError` if there is none."""
        return self.jobs[self._position(name)]

    def jobs_on(self, gpus: Iterable[int] | str) -> tuple[str, ...]:
        """Return names of the jobs that hold any of these GPUs (numbers, or ``"n02"``)."""
        found = set(self._ids(gpus))
        return tuple(job.name for job in self.jobs if not found.isdisjoint(job.gpus))

    def take(self, gpus: Iterable[int] | str, name: str, demand: int | None = None) -> ClusterState:
        """Start a job on free GPUs."""
        taken = self._joined(self.free_ids(gpus))
        if any(job.name == name for job in self.jobs):
            raise InputError(f"job: there is a job {name!r:.60} already")
        if not taken or not isinstance(name, str) or not name:
            raise InputError(f"take: expected GPUs and a name, got {name!r:.60}")
        label("take: name", name)
        if demand is not None:
            integer("demand", demand, 0, MOST - 1)
        return self._changed(len(self.jobs), 0, (Job(name, taken, demand),), taken=taken)

    def give(self, name: str) -> ClusterState:
        """End a job; `InputError` if there is none of that name."""
        j = self._position(name)
        return self._changed(j, 1, freed=self.jobs[j].gpus)

    def resize(self, name: str, gpus: Iterable[int] | str) -> ClusterState:
        """Let a job keep some of its GPUs, or its GPUs and free GPUs; its demand stays."""
        after, held = set(self._ids(gpus)), set(self.job(name).gpus)
        if not after or not (after <= held or after >= held):
            raise InputError(
                f"gpus: expected those of {name!r:.60} and more, or some of them, "
                f"got {self.cluster.written(after) or 'none'} (see move)"
            )
        return self._holding(name, after)

    def move(self, name: str, gpus: Iterable[int] | str) -> ClusterState:
        """Move a job to as many GPUs, each free or held by it before."""
        after, job = set(self._ids(gpus)), self.job(name)
        if len(after) != len(job.gpus):
            held = len(job.gpus)
            raise InputError(
                f"gpus: expected {held} to move {name!r:.60}, got {len(after)} (see resize)"
            )
        return self._holding(name, after)

    def fail(self, gpus: Iterable[int] | str) -> ClusterState:
        """Put GPUs down; `jobs_on` names the jobs that this hits.

        A job keeps its other GPUs until `give`; one that has none left ends.
        """
        failed, state = set(self._ids(gpus)), self
        for name in self.jobs_on(failed):
            job, j = state.job(name), state._position(name)
            held = tuple(gpu for gpu in job.gpus if gpu not in failed)
            left = (Job(name, held, job.demand),) if held else ()
            state = state._changed(j, 1, left, down=(*state.down, *failed.intersection(job.gpus)))
        free = tuple(failed.intersection(state.free))
        return state._changed(taken=free, down=(*state.down, *free)) if free else state

    def repair(self, gpus: Iterable[int] | str) -> ClusterState:
        """Free those of the GPUs that are down."""
        back = tuple(set(self._ids(gpus)).intersection(self.down))
        left = tuple(g for g in self.down if g not in back)
        return self._changed(freed=back, down=left) if back else self

    def with_jobs(self, jobs: Iterable[Job]) -> ClusterState:
        """Replace the jobs and keep the free GPUs (nothing is checked)."""
        return self._changed(0, len(self.jobs), tuple(jobs))

    def without(self, gpus: Iterable[int]) -> ClusterState:
        """Remove free GPUs (nothing is checked)."""
        barred = tuple(set(self.free).intersection(gpus))
        return self._changed(taken=barred) if barred else self

    def free_ids(self, gpus: Iterable[int] | str) -> tuple[int, ...]:
        """Return free GPUs by number, ascending; `InputError` if one is not free."""
        found, free = self._ids(gpus), set(self.free)
        if not free.issuperset(found):
            busy = next(gpu for gpu in found if gpu not in free)
            raise InputError(f"gpus: GPU {self.cluster.gpu_name(busy)} is not free")
        return found

    def _joined(self, gpus: tuple[int, ...]) -> tuple[int, ...]:
        """Refuse GPUs that no network joins."""
        cluster = self.cluster
        if len(cluster.fabrics) > 1:
            used = {cluster.hosts[cluster.host_of[gpu]].domains[0] for gpu in gpus}
            if len(used) > 1:
                names = ", ".join(sorted(used))
                raise InputError(f"gpus: {cluster.levels[0]}s {names} are not joined")
        return gpus

    def _ids(self, gpus: Iterable[int] | str) -> tuple[int, ...]:
        """GPUs by number, ascending; a text is read by `Cluster.parse`."""
        if isinstance(gpus, str):
            return self.cluster.parse(gpus)
        try:
            found = tuple(sorted(gpus))
            simple = {*map(type, found)} <= _INT and len(set(found)) == len(found)
        except TypeError:
            raise InputError(f"gpus: expected GPU numbers, got {gpus!r:.60}") from None
        if simple and (not found or (found[0] >= 0 and found[-1] < self.cluster.n_gpus)):
            return found
        return self.cluster.gpus(found)  # refuses wrong numbers and GPUs given twice

    def _position(self, name: str) -> int:
        for j, job in enumerate(self.jobs):
            if job.name == name:
                return j
        known = ", ".join(job.name for job in self.jobs[:8]) or "none"
        raise InputError(f"job: there is no job {name!r:.60}; running: {known}")

    def _holding(self, name: str, after: set[int]) -> ClusterState:
        """Let a job hold these GPUs instead of those it has."""
        j, job = self._position(name), self.job(name)
        taken, freed = self.free_ids(after.difference(job.gpus)), tuple({*job.gpus} - after)
        gpus = tuple(sorted(after))
        new = Job(name, self._joined(gpus) if taken else gpus, job.demand)
        return self._changed(j, 1, (new,), freed=freed, taken=taken)

    def _changed(
        self,
        at: int = 0,
        n: int = 0,
        new: tuple[Job, ...] = (),
        *,
        freed: tuple[int, ...] = (),
        taken: tuple[int, ...] = (),
        down: tuple[int, ...] | None = None,
    ) -> ClusterState:
        """Replace n jobs from `at` on, free and take GPUs; nothing is checked.

        Cached arrays are updated.
        """
        free, jobs = self.free, (*self.jobs[:at], *new, *self.jobs[at + n :])
        if taken:
            used = set(taken)
            free = tuple([gpu for gpu in free if gpu not in used])
        if freed:
            free = tuple(sorted((*free, *freed)))
        below = self.down if down is None else tuple(sorted(down))
        state, cluster, cached = object.__new__(ClusterState), self.cluster, self.__dict__
        state.__dict__.update(
            cluster=cluster, free=free, jobs=jobs, down=below, unknown=self.unknown
        )
        if "masks" in cached:
            masks = cached["masks"].copy()
            for sign, gpus in ((1, freed), (-1, taken)):
                for h, mask in host_counts(cluster, gpus)[1].items():
                    masks[h] += sign * mask
            state.__dict__["masks"] = frozen(masks)
        if "held" in cached and len(new) < 2:
            held = np.zeros((len(jobs), cluster.n_hosts), np.int64)
            held[:at] = cached["held"][:at]
            held[at + len(new) :] = cached["held"][at + n :]
            for job in new:
                for h, count in host_counts(cluster, job.gpus)[0].items():
                    held[at, h] = count
            state.__dict__["held"] = frozen(held)
        return state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterState):
            return NotImplemented
        mine = self.free, self.jobs, self.down, self.unknown
        theirs = other.free, other.jobs, other.down, other.unknown
        return mine == theirs and self.cluster == other.cluster

    def __hash__(self) -> int:
        return hash((self.free, self.jobs, self.down))

    def __repr__(self) -> str:
        return (
            f"<ClusterState: {len(self.free)} of {self.cluster.n_gpus} GPUs free, "
            f"{len(self.jobs)} jobs>"
        )

    def _repr_html_(self) -> str:
        from optsched.plots.notebook import state_view

        return state_view(self)

    # files

    @classmethod
    def read(cls, path: str | os.PathLike[str], cluster: Cluster) -> ClusterState:
        """Read a document ``optsched.state/1``; `InputError` names path, rule and value."""
        from optsched.bandwidth.topology.documents import read_state

        return read_state(path, cluster)

    @classmethod
    def from_slurm(
        cls,
        cluster: Cluster,
        nodes_text: str,
        jobs_json: Any = None,
        files: tuple[str, str] = ("scontrol show node", "squeue"),
    ) -> ClusterState:
        """Read the state from what Slurm prints; nodes outside the cluster are passed over.

        Parameters
        ----------
        cluster
            Hosts, or machines of hosts, are the nodes.
        nodes_text, jobs_json
            Output of ``scontrol show node -d`` (also with ``-o``), and of ``squeue --json``, as
            text or parsed; without it the GPUs in use on a node are one job ``slurm:NODE``.
        files
            Names of the two for messages.
        """
        from optsched.bandwidth.topology.slurm_state import from_slurm

        return from_slurm(cluster, nodes_text, jobs_json, *files)

    @classmethod
    def from_kubernetes(
        cls,
        cluster: Cluster,
        nodes: Any,
        pods: Any = None,
        files: tuple[str, str] = ("nodes", "pods"),
    ) -> ClusterState:
        """Read the state, without local ids, from ``kubectl get nodes,pods -A -o json``.

        One list or two, as text or parsed; else as `from_slurm`.
        """
        from optsched.bandwidth.topology.kubernetes import from_kubernetes

        return from_kubernetes(cluster, nodes, pods, *files)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a document ``optsched.state/1``, all of it or nothing."""
        from optsched.bandwidth.topology.documents import state_json
        from optsched.io.files import write_atomic

        write_atomic(path, state_json(self))


_INT = {int}

_FEW = 256
"""GPUs that are counted faster one by one than by NumPy."""


def host_counts(cluster: Cluster, gpus: tuple[int, ...]) -> tuple[dict[int, int], dict[int, int]]:
    """Host to number of these GPUs, and to their mask (or number, beyond 16 GPUs a host)."""
    counts: dict[int, int] = {}
    bits: dict[int, int] = {}
    host_of, first, small = cluster.places
    for gpu in gpus:
        h = host_of[gpu]
        counts[h] = counts.get(h, 0) + 1
        bits[h] = bits.get(h, 0) + (1 << (gpu - first[h]) if small[h] else 1)
    return counts, bits


def _by_host(cluster: Cluster, gpus: tuple[int, ...]) -> IntArray:
    if len(gpus) <= _FEW:
        host_of, first, by_mask = cluster.places
        bits = [0] * cluster.n_hosts
        for gpu in gpus:
            h = host_of[gpu]
            bits[h] += 1 << gpu - first[h] if by_mask[h] else 1
        return np.array(bits, np.int64)
    of = np.zeros(cluster.n_hosts, np.int64)
    ids = np.array(gpus, np.int64)
    hosts = cluster.host_of[ids]
    small = cluster.sizes[hosts] <= MOST_BY_SUBSET
    np.add.at(of, hosts[small], 1 << (ids - cluster.first[hosts])[small])
    np.add.at(of, hosts[~small], 1)
    return of
