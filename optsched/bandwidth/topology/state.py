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
from optsched.bandwidth.topology.names import id_ranges
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
    unknown
        Names of machines of which only the numbers of free, held and down GPUs are known: local
        ids there are placeholders, and `written` gives a number instead.

    Raises
    ------
    InputError
        A GPU in two of them, or in none; a wrong number, name or demand.
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
            if not job.name:
                raise InputError("jobs: expected a name of every job, got ''")
            if job.name in names:
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

    def written(self, gpus: Iterable[int]) -> str:
        """GPUs by machine: local ids (see `Cluster.parse`), or their number where ids are unknown.

        ``"n01:0-3 n02:x2"``: two of n02, whichever.
        """
        if not self.unknown:
            return self.cluster.written(gpus)
        return " ".join(
            f"{name}:x{len(ids)}" if name in self.unknown else f"{name}:{id_ranges(ids)}"
            for name, ids in self.cluster.by_machine(sorted(gpus)).items()
        )

    def gpu_name(self, gpu: int) -> str:
        """``machine/local id`` of a GPU, the machine alone where ids are unknown."""
        name = self.cluster.gpu_name(gpu)
        machine = name.partition("/")[0]
        return machine if machine in self.unknown else name

    # what kernels read

    @cached_property
    def masks(self) -> IntArray:
        """Free GPUs a host: bit i is local GPU i; of hosts beyond 16 GPUs only their number."""
        return _frozen(_by_host(self.cluster, self.free))

    @cached_property
    def room(self) -> IntArray:
        """Number of free GPUs a host."""
        return _frozen(self.cluster.counts(self.free))

    @cached_property
    def held(self) -> IntArray:
        """GPUs that job j has on host h, shape (jobs, hosts)."""
        held = np.zeros((len(self.jobs), self.cluster.n_hosts), np.int64)
        for j, job in enumerate(self.jobs):
            for h, count in host_counts(self.cluster, job.gpus)[0].items():
                held[j, h] = count
        return _frozen(held)

    # changes

    def job(self, name: str) -> Job:
        """The running job of a name; `InputError` if there is none."""
        return self.jobs[self._position(name)]

    def jobs_on(self, gpus: Iterable[int] | str) -> tuple[str, ...]:
        """Names of the jobs that hold any of these GPUs (numbers, or ``"n02"``)."""
        found = set(self._ids(gpus))
        return tuple(job.name for job in self.jobs if not found.isdisjoint(job.gpus))

    def take(self, gpus: Iterable[int] | str, name: str, demand: int | None = None) -> ClusterState:
        """The state after a job started on free GPUs.

        Raises
        ------
        InputError
            A GPU is not free, the name is taken, or no network joins the GPUs.
        """
        taken = self._joined(self.free_ids(gpus))
        if any(job.name == name for job in self.jobs):
            raise InputError(f"jobs: there is a job {name!r:.60} already")
        if not taken or not isinstance(name, str) or not name:
            raise InputError(f"take: expected GPUs and a name, got {name!r:.60}")
        label("take: name", name)
        if demand is not None:
            integer("demand", demand, 0, MOST - 1)
        return self._changed(len(self.jobs), 0, (Job(name, taken, demand),), taken=taken)

    def give(self, name: str) -> ClusterState:
        """The state after a job ended; `InputError` if there is none of that name."""
        j = self._position(name)
        return self._changed(j, 1, freed=self.jobs[j].gpus)

    def resize(self, name: str, gpus: Iterable[int] | str) -> ClusterState:
        """The state after a job grew onto free GPUs, or gave some of its own back.

        Parameters
        ----------
        name
            Of the job; what it demands stays.
        gpus
            All that it holds afterwards: those it has and more, or some of those it has.

        Raises
        ------
        InputError
            Neither of both, no GPU at all, or one that is not free.
        """
        wanted, held = set(self._ids(gpus)), set(self.job(name).gpus)
        if not wanted or not (wanted <= held or wanted >= held):
            raise InputError(
                f"resize: {name!r:.60} grows or shrinks; expected its GPUs and more, or some of "
                f"them, got {self.cluster.written(wanted) or 'none'} (see move)"
            )
        return self._holding(name, wanted)

    def move(self, name: str, gpus: Iterable[int] | str) -> ClusterState:
        """The state after a job went to as many GPUs, each free or its own.

        Raises
        ------
        InputError
            Another number of GPUs, or one that is neither free nor its own.
        """
        wanted, job = set(self._ids(gpus)), self.job(name)
        if len(wanted) != len(job.gpus):
            raise InputError(
                f"move: {name!r:.60} has {len(job.gpus)} GPUs, got {len(wanted)} (see resize)"
            )
        return self._holding(name, wanted)

    def fail(self, gpus: Iterable[int] | str) -> ClusterState:
        """The state after GPUs failed: they are down (see `jobs_on` for the jobs that are hit).

        A job keeps its other GPUs until `give`; one that has none left ends. GPUs that are down
        already stay so.
        """
        gone, state = set(self._ids(gpus)), self
        for name in self.jobs_on(gone):
            job, j = state.job(name), state._position(name)
            held = tuple(gpu for gpu in job.gpus if gpu not in gone)
            left = (Job(name, held, job.demand),) if held else ()
            state = state._changed(j, 1, left, down=(*state.down, *gone.intersection(job.gpus)))
        free = tuple(gone.intersection(state.free))
        return state._changed(taken=free, down=(*state.down, *free)) if free else state

    def repair(self, gpus: Iterable[int] | str) -> ClusterState:
        """The state after GPUs came back: of these those that are down are free."""
        back = tuple(set(self._ids(gpus)).intersection(self.down))
        left = tuple(g for g in self.down if g not in back)
        return self._changed(freed=back, down=left) if back else self

    def pooled(self) -> ClusterState:
        """All running jobs taken for one, as the published evaluation does."""
        gpus = tuple(sorted(gpu for job in self.jobs for gpu in job.gpus))
        return self.with_jobs([Job("pooled", gpus)]) if gpus else self

    def with_jobs(self, jobs: Iterable[Job]) -> ClusterState:
        """The same free GPUs with other jobs (nothing is checked)."""
        return self._changed(0, len(self.jobs), tuple(jobs))

    def without(self, gpus: Iterable[int]) -> ClusterState:
        """Of the free GPUs these are left out, as if they were nowhere (nothing is checked)."""
        barred = tuple(set(self.free).intersection(gpus))
        return self._changed(taken=barred) if barred else self

    def free_ids(self, gpus: Iterable[int] | str) -> tuple[int, ...]:
        """Free GPUs by number, ascending; `InputError` if one is not free."""
        found, free = self._ids(gpus), set(self.free)
        if not free.issuperset(found):
            busy = next(gpu for gpu in found if gpu not in free)
            raise InputError(f"GPU {self.cluster.gpu_name(busy)} is not free")
        return found

    def _joined(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """The GPUs, if a network joins them all: a job that ran before may lie otherwise."""
        cluster, found = self.cluster, tuple(gpus)
        if len(cluster.fabrics) > 1:
            used = {cluster.hosts[cluster.host_of[gpu]].domains[0] for gpu in found}
            if len(used) > 1:
                raise InputError(f"{cluster.levels[0]}s {', '.join(sorted(used))} are not joined")
        return found

    def _ids(self, gpus: Iterable[int] | str) -> tuple[int, ...]:
        """GPUs by number, ascending; words are read as by `Cluster.parse`."""
        if isinstance(gpus, str):
            return self.cluster.parse(gpus)
        try:
            found = tuple(sorted(gpus))
            plain = {*map(type, found)} <= _INT and len(set(found)) == len(found)
        except TypeError:
            raise InputError(f"gpus: expected GPU numbers, got {gpus!r:.60}") from None
        if plain and (not found or (found[0] >= 0 and found[-1] < self.cluster.n_gpus)):
            return found
        return self.cluster.gpus(found)  # refuses what is no GPU, or is given twice

    def _position(self, name: str) -> int:
        for j, job in enumerate(self.jobs):
            if job.name == name:
                return j
        known = ", ".join(job.name for job in self.jobs[:8]) or "none"
        raise InputError(f"jobs: there is no job {name!r:.60}; running: {known}")

    def _holding(self, name: str, wanted: set[int]) -> ClusterState:
        """A job holds these GPUs, and those that it had are free otherwise."""
        j = self._position(name)
        job = self.jobs[j]
        held = set(job.gpus)
        taken, freed = self.free_ids(wanted - held), tuple(held - wanted)
        new = Job(name, self._joined(sorted(wanted)) if taken else (*sorted(wanted),), job.demand)
        return self._changed(j, 1, (new,), freed=freed, taken=taken)

    def _changed(
        self,
        at: int = 0,
        gone: int = 0,
        new: tuple[Job, ...] = (),
        *,
        freed: tuple[int, ...] = (),
        taken: tuple[int, ...] = (),
        down: tuple[int, ...] | None = None,
    ) -> ClusterState:
        """Without the checks: from job `at` on so many are gone, and others there instead.

        GPUs become free, or are free no longer; arrays that are there are changed, not made anew.
        """
        free, jobs = self.free, (*self.jobs[:at], *new, *self.jobs[at + gone :])
        if taken:
            no_longer = set(taken)
            free = tuple([gpu for gpu in free if gpu not in no_longer])
        if freed:
            free = tuple(sorted((*free, *freed)))
        state = object.__new__(ClusterState)
        below = self.down if down is None else tuple(sorted(down))
        state.__dict__.update(
            cluster=self.cluster, free=free, jobs=jobs, down=below, unknown=self.unknown
        )
        known = self.__dict__
        counts: dict[int, int] = {}  # of the GPUs that are taken
        if "masks" in known:
            masks = known["masks"].copy()
            if freed:
                for h, mask in host_counts(self.cluster, freed)[1].items():
                    masks[h] += mask
            if taken:
                counts, bits = host_counts(self.cluster, taken)
                for h, mask in bits.items():
                    masks[h] -= mask
            state.__dict__["masks"] = _frozen(masks)
        if "held" in known and len(new) < 2:
            held = np.zeros((len(jobs), self.cluster.n_hosts), np.int64)
            held[:at] = known["held"][:at]
            if at + gone < len(self.jobs):
                held[at + len(new) :] = known["held"][at + gone :]
            for job in new:
                known_already = counts and job.gpus is taken
                own = counts if known_already else host_counts(self.cluster, job.gpus)[0]
                for h, count in own.items():
                    held[at, h] = count
            state.__dict__["held"] = _frozen(held)
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
        nodes: str,
        jobs: str | None = None,
        files: tuple[str, str] = ("scontrol show node", "squeue"),
    ) -> ClusterState:
        """Read the state from what Slurm prints.

        Parameters
        ----------
        cluster
            Hosts (or machines of hosts) are nodes; others in the files are passed over.
        nodes
            Output of ``scontrol show node -d``, with or without ``-o``.
        jobs
            Output of ``squeue --json``. Without it the GPUs in use on a node are one job
            ``slurm:NODE``, so that jobs on several hosts are not seen.
        files
            Names of the two for messages.

        Raises
        ------
        InputError
            With file, node or job, field and value.
        """
        from optsched.bandwidth.topology.slurm_state import from_slurm

        return from_slurm(cluster, nodes, jobs, *files)

    @classmethod
    def from_kubernetes(
        cls,
        cluster: Cluster,
        nodes: str,
        pods: str | None = None,
        files: tuple[str, str] = ("nodes", "pods"),
    ) -> ClusterState:
        """Read the state from what kubectl prints: numbers of GPUs, whose ids are unknown.

        Parameters
        ----------
        cluster
            Hosts (or machines of hosts) are nodes; others in the files are passed over.
        nodes, pods
            Output of ``kubectl get nodes,pods -A -o json``, as one list or as two.
        files
            Names of the two for messages.

        Raises
        ------
        InputError
            With file, node or pod, field and value.
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
