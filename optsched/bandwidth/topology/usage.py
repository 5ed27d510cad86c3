"""GPUs in use as a resource manager lists them, node by node, put together to a state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.bandwidth.topology.cluster import Cluster

DOWN = ""
"""Owner of GPUs that are down."""


class Usage:
    """Owners of the GPUs of every node (a host, or a machine of one)."""

    def __init__(self, cluster: Cluster, file: str) -> None:
        self.cluster, self.file = cluster, file
        hosts = map(cluster.machines_of, range(cluster.n_hosts))
        self.names = dict.fromkeys(name for names in hosts for name in names)
        self.owner: dict[str, list[str | None]] = {}
        self.numbers: dict[str, dict[str, int]] = {}
        self.closed: set[str] = set()
        self.unknown: set[str] = set()

    def add(self, node: str, place: str) -> int:
        """Add a node; return its number of GPUs. `InputError` if it is listed twice."""
        if node in self.owner:
            raise InputError(f"{place}: is there twice")
        self.owner[node] = [None] * len(self.cluster.machine(node))
        self.numbers[node] = {}
        return len(self.owner[node])

    def hold(self, node: str, job: str, ids: Iterable[int], number: int = 0) -> None:
        """Give GPUs with these local ids, and a number of others, to a job (or to `DOWN`)."""
        owner = self.owner[node]
        for i in ids:
            if owner[i] not in (None, job):
                of = f"jobs {owner[i]} and {job}"
                raise InputError(f"{self.file}: node {node:.60}: GPU {i} is held by {of}")
            owner[i] = job
        if number:
            self.numbers[node][job] = self.numbers[node].get(job, 0) + number

    def held(self, node: str) -> int:
        """Number of GPUs of a node that are not free."""
        known = sum(one is not None for one in self.owner[node])
        return known + sum(self.numbers[node].values())

    def state(self) -> ClusterState:
        """Place numbers on the lowest ids that are left, and make the state."""
        if lost := [name for name in self.names if name not in self.owner]:
            raise InputError(
                f"{self.file}: has not {len(lost)} of the cluster's {len(self.names)} nodes, the "
                f"first: {', '.join(lost[:4])}"
            )
        found: dict[str | None, list[int]] = {None: [], DOWN: []}
        unknown = set(self.unknown)
        for node in self.names:
            owner, numbers = self.owner[node], self.numbers[node]
            left = [i for i, one in enumerate(owner) if one is None]
            lost_gpus = numbers.pop(DOWN, 0)
            if sum(numbers.values()) > len(left):
                raise InputError(
                    f"{self.file}: node {node:.60}: jobs hold more than its {len(owner)} GPUs"
                )
            places = iter(left)
            for job, number in numbers.items():
                for _ in range(number):
                    owner[next(places)] = job
            free = [*places]  # a job may hold what is down
            for i in free if node in self.closed else free[max(0, len(free) - lost_gpus) :]:
                owner[i] = DOWN
            if any(numbers.values()) and len({owner[i] for i in left}) > 1:
                unknown.add(node)
            for gpu, one in zip(self.cluster.machine(node), owner, strict=True):
                found.setdefault(one, []).append(gpu)
        free_gpus, down = found.pop(None), found.pop(DOWN)
        jobs = tuple(Job(str(name), tuple(gpus)) for name, gpus in found.items())
        return ClusterState(self.cluster, tuple(free_gpus), jobs, tuple(down), frozenset(unknown))
