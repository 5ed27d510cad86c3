"""What machines do by the word of a resource manager, put together to a state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth.topology.cluster import Cluster


@dataclass
class MachineUse:
    """GPUs of one machine: of every job as local ids or as a number, and those that are down.

    Parameters
    ----------
    gpus
        Number of GPUs.
    place
        File and machine for messages.
    ids, numbers
        Job to its local ids, and to its number of GPUs whose ids are unknown.
    down
        Number of GPUs that are down, ids unknown.
    closed
        Whether the machine takes no work: all GPUs that no job holds are down.
    counted
        Whether all local ids of the machine are unknown, also to jobs that start later.
    """

    gpus: int
    place: str
    ids: dict[str, set[int]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    down: int = 0
    closed: bool = False
    counted: bool = False

    def hold(self, job: str, ids: set[int], number: int = 0) -> None:
        """Add GPUs of a job; `InputError` for ids that the machine has not, or that are held."""
        for other, held in self.ids.items():
            if other != job and held & ids:
                gpu = min(held & ids)
                raise InputError(f"{self.place}: GPU {gpu} is held by jobs {other} and {job}")
        if ids and max(ids) >= self.gpus:
            raise InputError(
                f"{self.place}: job {job} holds GPU {max(ids)} of {self.gpus} in the cluster"
            )
        if ids:
            self.ids[job] = self.ids.get(job, set()) | ids
        if number:
            self.numbers[job] = self.numbers.get(job, 0) + number

    @property
    def held(self) -> set[int]:
        """Local ids that jobs hold."""
        return set().union(*self.ids.values())

    def owners(self) -> tuple[list[str | None], bool]:
        """Job of every GPU, None of free ones, "" of those down; whether ids are placeholders."""
        owner: list[str | None] = [None] * self.gpus
        for job, ids in self.ids.items():
            for i in ids:
                owner[i] = job
        for job, number in self.numbers.items():
            free = [i for i, one in enumerate(owner) if one is None]
            if number > len(free):
                raise InputError(f"{self.place}: jobs hold more than its {self.gpus} GPUs")
            for i in free[:number]:
                owner[i] = job
        free = [i for i, one in enumerate(owner) if one is None]
        for i in free[max(0, len(free) - self.down) :]:  # a job may hold what has failed
            owner[i] = ""
        if self.closed:
            owner = ["" if one is None else one for one in owner]
        named = self.held
        several = len({one for i, one in enumerate(owner) if i not in named}) > 1
        return owner, self.counted or (several and any(self.numbers.values()))


def assembled(cluster: Cluster, uses: Mapping[str, MachineUse], file: str) -> ClusterState:
    """Make the state of the cluster.

    Parameters
    ----------
    cluster
        Whose machines they are.
    uses
        By name of the machine; all machines of the cluster.
    file
        Name for messages.

    Raises
    ------
    InputError
        A machine is missing.
    """
    free: list[int] = []
    down: list[int] = []
    jobs: dict[str, list[int]] = {}
    unknown: set[str] = set()
    names = [name for h in range(cluster.n_hosts) for name in cluster.machines_of(h)]
    if lost := [name for name in names if name not in uses]:
        raise InputError(
            f"{file}: says nothing of {len(lost)} of the cluster's {len(names)} machines, the "
            f"first: {', '.join(lost[:4])}"
        )
    for name in names:
        owner, placeholders = uses[name].owners()
        unknown |= {name} if placeholders else set()
        for gpu, job in zip(cluster.machine(name), owner, strict=True):
            (free if job is None else jobs.setdefault(job, []) if job else down).append(gpu)
    held = tuple(Job(name, tuple(gpus)) for name, gpus in jobs.items())
    return ClusterState(cluster, tuple(free), held, tuple(down), frozenset(unknown))
