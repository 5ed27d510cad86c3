"""What a cluster is doing: free GPUs, running jobs, GPUs that are down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.topology.cluster import Cluster
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError
from optsched.io.values import integer, label

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from optsched.model.schedule import IntArray


@dataclass(frozen=True)
class Job:
    """A running job: its GPUs by global number, and the bandwidth in kB/s that it asks for.

    ``demand=None`` means as much as it can get: what its GPUs reach alone.
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

    Raises
    ------
    InputError
        A GPU in two of them, or in none; a wrong number, name or demand.
    """

    cluster: Cluster
    free: tuple[int, ...]
    jobs: tuple[Job, ...] = ()
    down: tuple[int, ...] = ()

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
        jobs = tuple(
            replace(job, gpus=cluster.gpus(job.gpus, f"jobs[{job.name!r:.60}]"))
            for job in self.jobs
        )
        object.__setattr__(self, "jobs", jobs)
        owner: dict[int, str] = {}
        groups = [("free", self.free), ("down", self.down)]
        names = set()
        for job in jobs:
            label("job", job.name)
            if not job.name or job.name in names:
                raise InputError(f"jobs: expected distinct names, got {job.name!r:.60} again")
            names.add(job.name)
            if job.demand is not None:
                integer(f"jobs[{job.name!r:.60}].demand", job.demand, 0, MOST - 1)
            if not job.gpus:
                raise InputError(f"jobs[{job.name!r:.60}]: holds no GPU")
            groups.append((f"job {job.name!r:.60}", job.gpus))
        for who, gpus in groups:
            for gpu in gpus:
                if gpu in owner:
                    raise InputError(
                        f"GPU {cluster.gpu_name(gpu)} is in two places: {owner[gpu]} and {who}"
                    )
                owner[gpu] = who
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
        """A state in words; see `Cluster.parse` for those of GPUs, such as ``"n01:0-5 n02"``.

        Parameters
        ----------
        cluster
            Whose GPUs they are.
        free, down, jobs
            GPUs, and GPUs of every job.
        demands
            kB/s by job, for those where it is known.
        """
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
        """Everything free."""
        return cls(cluster, tuple(range(cluster.n_gpus)))

    @classmethod
    def with_free(cls, cluster: Cluster, free: Iterable[int]) -> ClusterState:
        """These GPUs free, all others down: a state without traffic."""
        there = set(cluster.gpus(free, "free"))
        return cls(
            cluster, tuple(there), down=tuple(g for g in range(cluster.n_gpus) if g not in there)
        )

    # what kernels read

    @cached_property
    def masks(self) -> IntArray:
        """Free GPUs a host: bit i is local GPU i; of hosts beyond 16 GPUs only their number."""
        return _frozen(_by_host(self.cluster, self.free))

    @cached_property
    def room(self) -> IntArray:
        """Number of free GPUs a host."""
        return _frozen(_counts(self.cluster, self.free))

    @cached_property
    def held(self) -> IntArray:
        """GPUs that job j has on host h, shape (jobs, hosts)."""
        held = np.zeros((len(self.jobs), self.cluster.n_hosts), np.int64)
        for j, job in enumerate(self.jobs):
            for h, count in host_counts(self.cluster, job.gpus)[0].items():
                held[j, h] = count
        return _frozen(held)

    # changes

    def take(self, gpus: Iterable[int], name: str, demand: int | None = None) -> ClusterState:
        """The state after a job started on free GPUs.

        Raises
        ------
        InputError
            A GPU is not free, or the name is taken.
        """
        free = set(self.free)
        try:
            taken = tuple(gpus)
        except TypeError:
            raise InputError(f"gpus: expected GPU numbers, got {gpus!r:.60}") from None
        if len(set(taken)) < len(taken) or not free.issuperset(taken):
            for gpu in self.cluster.gpus(taken):  # refuses what is no GPU, or is given twice
                if gpu not in free:
                    raise InputError(f"GPU {self.cluster.gpu_name(gpu)} is not free")
        if any(job.name == name for job in self.jobs):
            raise InputError(f"jobs: there is a job {name!r:.60} already")
        if not taken or not isinstance(name, str) or not name:
            raise InputError(f"take: expected GPUs and a name, got {name!r:.60}")
        label("take: name", name)
        if demand is not None:
            integer("demand", demand, 0, MOST - 1)
        free.difference_update(taken)
        job = Job(name, tuple(sorted(int(gpu) for gpu in taken)), demand)
        return self._changed(tuple(sorted(free)), (*self.jobs, job), job.gpus, -1)

    def give(self, name: str) -> ClusterState:
        """The state after a job ended; `InputError` if there is none of that name."""
        for j, job in enumerate(self.jobs):
            if job.name == name:
                free = tuple(sorted((*self.free, *job.gpus)))
                return self._changed(free, self.jobs[:j] + self.jobs[j + 1 :], job.gpus, 1, j)
        known = ", ".join(job.name for job in self.jobs[:8]) or "none"
        raise InputError(f"jobs: there is no job {name!r:.60}; running: {known}")

    def pooled(self) -> ClusterState:
        """All running jobs taken for one, as the published evaluation does."""
        if not self.jobs:
            return self
        gpus = tuple(sorted(gpu for job in self.jobs for gpu in job.gpus))
        return self._changed(self.free, (Job("pooled", gpus),))

    def beside(self, others: Iterable[Job]) -> ClusterState:
        """The same free GPUs with further jobs on others, whoever had them (unchecked)."""
        return self._changed(self.free, (*self.jobs, *others))

    def with_jobs(self, jobs: Iterable[Job]) -> ClusterState:
        """The same free GPUs with other jobs (nothing is checked)."""
        return self._changed(self.free, tuple(jobs))

    def _changed(
        self,
        free: tuple[int, ...],
        jobs: tuple[Job, ...],
        moved: tuple[int, ...] = (),
        sign: int = 0,
        gone: int | None = None,
    ) -> ClusterState:
        """Without the checks: what is free and what is held add up as before.

        Arrays that are there are changed rather than made anew, if `moved` GPUs became free
        (``sign=1``, of job `gone`) or taken (-1, by the last job).
        """
        state = object.__new__(ClusterState)
        state.__dict__.update(cluster=self.cluster, free=free, jobs=jobs, down=self.down)
        known = self.__dict__
        if sign and "masks" in known and "held" in known:
            counts, bits = host_counts(self.cluster, moved)
            masks = known["masks"].copy()
            held = np.zeros((len(jobs), self.cluster.n_hosts), np.int64)
            for h, mask in bits.items():
                masks[h] += sign * mask
            if gone is None:
                held[:-1] = known["held"]
                for h, count in counts.items():
                    held[-1, h] = count
            else:
                held[:gone], held[gone:] = known["held"][:gone], known["held"][gone + 1 :]
            state.__dict__.update(masks=_frozen(masks), held=_frozen(held))
        return state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterState):
            return NotImplemented
        return (self.free, self.jobs, self.down) == (other.free, other.jobs, other.down) and (
            self.cluster == other.cluster
        )

    def __hash__(self) -> int:
        return hash((self.free, self.jobs, self.down))

    def __repr__(self) -> str:
        return (
            f"<ClusterState: {len(self.free)} of {self.cluster.n_gpus} GPUs free, "
            f"{len(self.jobs)} jobs>"
        )

    # files

    @classmethod
    def read(cls, path: str | os.PathLike[str], cluster: Cluster) -> ClusterState:
        """Read a document ``optsched.state/1``; `InputError` names path, rule and value."""
        from optsched.bandwidth.topology.state_document import read

        return read(path, cluster)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a document ``optsched.state/1``, all of it or nothing."""
        from optsched.bandwidth.topology.state_document import to_json
        from optsched.io.files import write_atomic

        write_atomic(path, to_json(self))


_FEW = 256
"""GPUs that are counted faster one by one than by NumPy."""


def _frozen(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array


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


def _counts(cluster: Cluster, gpus: tuple[int, ...]) -> IntArray:
    hosts = cluster.host_of[np.array(gpus, np.int64)]
    return np.bincount(hosts, minlength=cluster.n_hosts).astype(np.int64)


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
