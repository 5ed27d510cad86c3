"""What other tenants leave of a bandwidth: jobs on shared hosts divide a joint capacity."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.rates import KILOBYTES
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optsched.bandwidth.models.model import BandwidthModel
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.state import ClusterState, Job

Traffic: TypeAlias = Literal["given", "idle", "moderate", "heavy"]

TRAFFIC: Final = ("given", "idle", "moderate", "heavy")
FILLS: Final = ("first", "best", "exact")
SIDES: Final = ("one", "two")


@dataclass(frozen=True)
class Contention:
    """How a choice S and running jobs S_j with demands d_j share (BandPilot, 3.3, made exact).

    Jobs interfere that have GPUs on a host of S, when both are on two hosts or more and d_j > 0.
    With each, S forms a joint allocation: on every host of either so many GPUs as both have there.
    The least bandwidth C of these allocations is shared in proportion to demands, S asking for
    B(S): it gets B(S) if all demands fit in C, else the floor of ``B(S) * C / sum``.

    Parameters
    ----------
    fill
        Which GPUs a joint allocation has on a host: ``"first"`` local ids, the ``"best"`` subset
        of that size, or ``"exact"``, those of S and S_j.
    sides
        ``"two"``: C_j is the least of S with the GPUs of S_j on hosts of S, and the reverse.
    cross_only, skip_idle
        False: S on a single host, or jobs without demand, interfere too.
    whole
        Every bandwidth is cut to whole GB/s.
    pooled
        All running jobs are taken for one.

    Raises
    ------
    InputError
        An unknown `fill` or `sides`.
    """

    fill: Literal["first", "best", "exact"] = "first"
    sides: Literal["one", "two"] = "one"
    cross_only: bool = True
    skip_idle: bool = True
    whole: bool = False
    pooled: bool = False

    def __post_init__(self) -> None:
        if self.fill not in FILLS:
            raise InputError(f"fill: expected one of {', '.join(FILLS)}, got {self.fill!r:.60}")
        if self.sides not in SIDES:
            raise InputError(f"sides: expected one of {', '.join(SIDES)}, got {self.sides!r:.60}")
        for key in ("cross_only", "skip_idle", "whole", "pooled"):
            if not isinstance(getattr(self, key), bool):
                given = getattr(self, key)
                raise InputError(f"{key}: expected true or false, got {given!r:.60}")

    @classmethod
    def as_printed(cls) -> Contention:
        """The formulas of the paper to the letter: idle jobs and choices on one host interfere."""
        return cls(cross_only=False, skip_idle=False)

    @classmethod
    def published(cls) -> Contention:
        """What the released code computes: two-sided, whole GB/s, one pooled job."""
        return cls(sides="two", whole=True, pooled=True)

    @property
    def unit(self) -> int:
        """Bandwidths are cut to multiples of this many kB/s."""
        return KILOBYTES if self.whole else 1


class Share(NamedTuple):
    """What a choice gets, and why; kB/s."""

    value: int
    """B(S, traffic)."""
    standalone: int
    """B(S)."""
    capacity: int | None = None
    """C, the least joint bandwidth; None if no job interferes."""
    demand: int = 0
    """Sum of the demands of the jobs that interfere."""
    job: str = ""
    """The job of the least joint bandwidth."""
    jobs: tuple[str, ...] = ()
    """All that interfere."""


def demands(
    model: BandwidthModel,
    state: ClusterState,
    traffic: Traffic = "given",
    seed: int = 0,
    unit: int = 1,
) -> tuple[int, ...]:
    """Demand of every running job in kB/s.

    Parameters
    ----------
    model
        Gives B(S_j).
    state
        The jobs, and for ``"given"`` their demands; None there means B(S_j).
    traffic
        ``"idle"``: none; ``"moderate"``: a share of B(S_j) drawn from 25 to 75 % by seed and name
        of the job; ``"heavy"``: B(S_j).
    seed
        Of ``"moderate"``.
    unit
        B(S_j) is cut to a multiple of this; see `Contention.unit`.

    Raises
    ------
    InputError
        An unknown profile.
    """
    check_traffic(traffic)
    unknown = [job for job in state.jobs if needs_bandwidth(job, traffic)]
    alone: dict[tuple[int, ...], int] = {}
    if unknown:
        rows = np.zeros((len(unknown), model.cluster.n_gpus), np.bool_)
        for j, job in enumerate(unknown):
            rows[j, list(job.gpus)] = True
        found = model.predict(rows).tolist()
        alone = {job.gpus: b for job, b in zip(unknown, found, strict=True)}
    return tuple(demand_of(job, alone, traffic, seed, unit) for job in state.jobs)


def check_traffic(traffic: str) -> None:
    """Raise an `InputError` for an unknown profile."""
    if traffic not in TRAFFIC:
        raise InputError(f"traffic: expected one of {', '.join(TRAFFIC)}, got {traffic!r:.60}")


def needs_bandwidth(job: Job, traffic: Traffic) -> bool:
    """Whether a job's demand follows from what its GPUs reach alone."""
    return traffic in ("moderate", "heavy") or (traffic == "given" and job.demand is None)


def demand_of(
    job: Job, alone: Mapping[tuple[int, ...], int], traffic: Traffic, seed: int, unit: int = 1
) -> int:
    """Demand of one job; `alone` holds B(S) by GPUs, where `needs_bandwidth`."""
    if traffic == "idle":
        return 0
    if not needs_bandwidth(job, traffic):
        return job.demand or 0
    most = alone[job.gpus] - alone[job.gpus] % unit
    return most * _share(seed, job.name) // _SHARES if traffic == "moderate" else most


_SHARES: Final = 1 << 20


def _share(seed: int, name: str) -> int:
    """A share of `_SHARES` between a quarter and three quarters, the same in every process."""
    words = np.frombuffer(name.encode().ljust(8 * (len(name.encode()) // 8 + 1), b"\0"), np.uint32)
    random = np.random.default_rng([seed, *words.tolist()])
    return int(random.integers(_SHARES // 4, 3 * _SHARES // 4 + 1))


def share(
    model: BandwidthModel,
    state: ClusterState,
    chosen: Iterable[int],
    demand: Sequence[int],
    contention: Contention | None = None,
) -> Share:
    """What a choice gets beside the running jobs: the definition, for any model.

    Parameters
    ----------
    model
        Bandwidths.
    state
        The running jobs; that the chosen GPUs are free is not asked here.
    chosen
        Global GPU numbers of S.
    demand
        kB/s of every job of the state (after pooling, if `contention.pooled`).
    contention
        How they share; by default `Contention()`.

    Raises
    ------
    UnmeasuredPattern
        The model does not know a set that this takes.
    """
    rule = contention or Contention()
    cluster, s = model.cluster, sorted(chosen)
    hosts = _locals(cluster, s)
    sets = [s]
    jobs = []
    for j, job in enumerate(state.jobs):
        theirs = _locals(cluster, job.gpus)
        crossing = len(hosts) >= 2 or not rule.cross_only
        wants = demand[j] > 0 or not rule.skip_idle
        if not crossing or not wants or len(theirs) < 2 or not hosts.keys() & theirs.keys():
            continue
        jobs.append(j)
        around = [set(hosts) | set(theirs)]
        if rule.sides == "two":
            around = [set(hosts), set(theirs)]
        for where in around:
            joint: list[int] = []
            for h in sorted(where):
                both = sorted(hosts.get(h, []) + theirs.get(h, []))
                joint += _filled(model, h, both, rule.fill)
            sets.append(joint)
    rows = np.zeros((len(sets), cluster.n_gpus), np.bool_)
    for i, gpus in enumerate(sets):
        rows[i, gpus] = True
    values = [value - value % rule.unit for value in model.predict(rows).tolist()]
    d = values[0]
    if not jobs:
        return Share(d, d)
    sides = 2 if rule.sides == "two" else 1
    joint_values = [min(values[1 + i * sides : 1 + (i + 1) * sides]) for i in range(len(jobs))]
    least = int(np.argmin(joint_values))
    capacity, others = joint_values[least], sum(demand[j] for j in jobs)
    names = tuple(state.jobs[j].name for j in jobs)
    value = d if d + others <= capacity else d * capacity // (d + others)
    return Share(value, d, capacity, others, names[least], names)


def _locals(cluster: Cluster, gpus: Iterable[int]) -> dict[int, list[int]]:
    """Host to global numbers of its GPUs."""
    found: dict[int, list[int]] = {}
    for gpu in gpus:
        found.setdefault(int(cluster.host_of[gpu]), []).append(gpu)
    return found


def _filled(model: BandwidthModel, host: int, both: list[int], fill: str) -> list[int]:
    """GPUs that a joint allocation is taken to have on a host, as many as `both`."""
    if fill == "exact":
        return both
    first, size = int(model.cluster.first[host]), int(model.cluster.sizes[host])
    if fill == "first" or size > MOST_BY_SUBSET or not 2 <= len(both) < size:
        return list(range(first, first + len(both)))
    tables = model.tables()
    if tables is not None:
        mask = tables.best_subset(host, (1 << size) - 1, len(both))
        return [first + i for i in range(size) if mask >> i & 1]
    subsets = list(combinations(range(first, first + size), len(both)))
    rows = np.zeros((len(subsets), model.cluster.n_gpus), np.bool_)
    rows[np.arange(len(subsets))[:, None], np.array(subsets)] = True
    return list(subsets[int(np.argmax(model.predict(rows)))])
