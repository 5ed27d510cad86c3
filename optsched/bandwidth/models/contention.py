"""What other tenants leave of a bandwidth: jobs on shared hosts divide a joint capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from optsched.bandwidth.models.model import UnmeasuredPattern
from optsched.bandwidth.models.patterns import written_pattern
from optsched.bandwidth.topology.rates import NO_LIMIT, UNMEASURED
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optsched.bandwidth.models.model import BandwidthModel, Selection
    from optsched.bandwidth.topology.state import ClusterState, Job
    from optsched.model.schedule import IntArray

Traffic: TypeAlias = Literal["given", "idle", "moderate", "heavy"]

TRAFFIC: Final = ("given", "idle", "moderate", "heavy")


class Share(NamedTuple):
    """What a choice gets, and why; kB/s.

    Examples
    --------
    >>> from optsched.bandwidth import BottleneckBandwidth, ClusterState, Dispatcher, synthetic
    >>> cluster = synthetic.cluster("nvswitch", 2)
    >>> state = ClusterState.idle(cluster).take("n01:0-3 n02:0-3", "a")
    >>> fast = Dispatcher(cluster, BottleneckBandwidth(cluster))
    >>> share = fast.what_if(state, "n01:4-6 n02:4-6").share
    >>> share.jobs, share.value < share.standalone
    (('a',), True)
    """

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
    model: BandwidthModel, state: ClusterState, traffic: Traffic = "given", seed: int = 0
) -> tuple[int, ...]:
    """Demand of every running job in kB/s; what it is by default follows from B(S_j) of its GPUs.

    `traffic`: ``"given"``: of the jobs, None is B(S_j); ``"idle"``: none; ``"moderate"``: a share
    of B(S_j), 25 to 75 %, by `seed` and name of the job; ``"heavy"``: B(S_j).
    """
    check_traffic(traffic)
    unknown = [job.gpus for job in state.jobs if needs_bandwidth(job, traffic)]
    alone = dict(zip(unknown, model.of_sets(unknown), strict=True))
    return tuple(demand_of(job, alone, traffic, seed) for job in state.jobs)


def check_traffic(traffic: str) -> None:
    """Raise an `InputError` for an unknown profile."""
    if traffic not in TRAFFIC:
        raise InputError(f"traffic: expected one of {', '.join(TRAFFIC)}, got {traffic!r:.60}")


def needs_bandwidth(job: Job, traffic: Traffic) -> bool:
    """Whether a job's demand follows from what its GPUs reach alone."""
    return traffic in ("moderate", "heavy") or (traffic == "given" and job.demand is None)


def demand_of(job: Job, alone: Mapping[tuple[int, ...], int], traffic: Traffic, seed: int) -> int:
    """Demand of one job; `alone` holds B(S) by GPUs, where `needs_bandwidth`."""
    if traffic == "idle":
        return 0
    if not needs_bandwidth(job, traffic):
        return job.demand or 0
    most = alone[job.gpus]
    return most * _share(seed, job.name) // _SHARES if traffic == "moderate" else most


_SHARES: Final = 1 << 20


def _share(seed: int, name: str) -> int:
    """A share of `_SHARES` between a quarter and three quarters, the same in every process."""
    numbers = np.frombuffer(
        name.encode().ljust(8 * (len(name.encode()) // 8 + 1), b"\0"), np.uint32
    )
    random = np.random.default_rng([seed, *numbers.tolist()])
    return int(random.integers(_SHARES // 4, 3 * _SHARES // 4 + 1))


class Shares(NamedTuple):
    """Shares of several choices, one a row; kB/s, -1 where a bandwidth is not measured."""

    value: IntArray
    standalone: IntArray
    capacity: IntArray
    """Joint bandwidth with every job, shape (n, jobs); `NO_LIMIT` where it does not interfere."""
    demand: IntArray
    """Sum of the demands of the jobs that interfere."""


def shares(
    model: BandwidthModel, state: ClusterState, selection: Selection, demand: Sequence[int]
) -> Shares:
    """Bandwidths of several choices beside the running jobs (BandPilot, 3.3, made exact).

    A job j interferes if it has GPUs on a host of S, both are on two hosts or more, its hosts are
    joined, and its demand d_j is above 0. With each such job S forms a joint allocation: on every
    host of either as many GPUs as both have, counted as the first local ids. The least bandwidth C
    of these is divided in proportion to demands, S demanding B(S): it gets B(S) if all fit in C,
    else the floor of ``B(S) * C / sum of demands``. `selection`: booleans of shape (n, GPUs);
    whether they are free is not checked. `demand`: kB/s of every job.
    """
    rows, cluster = model.checked(selection), model.cluster
    counts = np.add.reduceat(rows, cluster.first[:-1], axis=1, dtype=np.int64)
    held, demands_of = state.held, np.array(demand, np.int64).reshape(-1)
    meets = (counts > 0) @ (held > 0).T.astype(np.int64) > 0
    meets &= interferes(state) & (demands_of > 0) & ((counts > 0).sum(axis=1) >= 2)[:, None]
    i, j = np.nonzero(meets)
    local = np.arange(cluster.n_gpus) - cluster.first[cluster.host_of]
    joint = local < (counts[i] + held[j])[:, cluster.host_of]
    values = model.known_values(np.concatenate([rows, joint]))
    alone, capacity = values[: len(rows)], np.full(meets.shape, NO_LIMIT)
    capacity[i, j] = values[len(rows) :]
    least = capacity.min(axis=1, initial=NO_LIMIT)
    others = meets @ demands_of
    value, total = alone.copy(), alone + others
    tight = (alone >= 0) & (least >= 0) & (total > least)
    value[tight] = alone[tight] * least[tight] // total[tight]
    value[(alone < 0) | (least < 0)] = UNMEASURED
    return Shares(value, alone, capacity, others)


def interferes(state: ClusterState) -> npt.NDArray[np.bool_]:
    """Which jobs are on two hosts or more that the network joins, shape (jobs,)."""
    several = np.asarray((state.held > 0).sum(axis=1) >= 2)
    levels = state.cluster.network_levels
    if levels.domain[-1].any():
        several &= levels.lowest(state.held) < len(levels.names)
    return several


def share(
    model: BandwidthModel, state: ClusterState, chosen: Iterable[int], demand: Sequence[int]
) -> Share:
    """Bandwidth of one choice beside the running jobs, or `UnmeasuredPattern`; see `shares`."""
    row = np.zeros((1, model.cluster.n_gpus), np.bool_)
    row[0, list(chosen)] = True
    found = shares(model, state, row, demand)
    value, alone = int(found.value[0]), int(found.standalone[0])
    if value < 0:
        raise unmeasured(model, state, row, found.capacity[0])
    capacity = found.capacity[0].tolist()
    names = tuple(job.name for job, c in zip(state.jobs, capacity, strict=True) if c < NO_LIMIT)
    if not names:
        return Share(value, alone)
    least = capacity.index(min(capacity))
    demands_met = int(found.demand[0])
    return Share(value, alone, capacity[least], demands_met, state.jobs[least].name, names)


def unmeasured(
    model: BandwidthModel, state: ClusterState, row: Selection, capacity: IntArray
) -> UnmeasuredPattern:
    """Error that names the pattern of a choice, or of a joint allocation, that is not measured."""
    counts = np.add.reduceat(row[0], model.cluster.first[:-1], dtype=np.int64)
    lost = np.flatnonzero(capacity < 0)
    if len(lost) and int(model.known_values(row)[0]) >= 0:
        counts = counts + state.held[lost[0]]
    what = model.op if model.payload is None else f"{model.op}, {model.payload} bytes"
    return UnmeasuredPattern(written_pattern(counts), what)
