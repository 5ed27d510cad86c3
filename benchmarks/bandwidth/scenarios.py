"""Made-up days of a cluster, by seed: which GPUs are free when a request comes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import InputError
from optsched.io.values import integer
from optsched_solvers.gpus.proximity import proximity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.bandwidth.topology.cluster import Cluster

Scenario: TypeAlias = tuple[ClusterState, int]
"""A state, and the number of GPUs that is asked in it."""

SIZES: Final = (1, 2, 4, 8, 16)
"""GPUs of a job; those that do not fit are left out."""


def uniform(
    cluster: Cluster,
    *,
    busy: Literal["pooled", "tenants"] = "pooled",
    repeats: int = 50,
    seed: int = 0,
    wanted: Sequence[int] | None = None,
) -> Iterator[Scenario]:
    """Any GPUs are free, as likely as any others: far more scattered than clusters are.

    For every k of 2..N-1 there are `repeats` states in which k..N GPUs are free (BandPilot, 5.1).

    Parameters
    ----------
    cluster
        Of N GPUs.
    busy
        The others belong to one job (``"pooled"``), or to ``"tenants"`` of `SIZES` GPUs, one after
        the other placed by `proximity`.
    repeats
        States for every k.
    seed
        Same seed, same states.
    wanted
        Other k than 2..N-1.

    Raises
    ------
    InputError
        An unknown `busy`, or a k that the cluster has not.
    """
    if busy not in ("pooled", "tenants"):
        raise InputError(f"busy: expected pooled or tenants, got {busy!r:.60}")
    sizes, rng = _checked(cluster, wanted, repeats, seed), random.Random(f"uniform {seed}")
    return _uniform(cluster, sizes, repeats, rng, busy)


def packed(
    cluster: Cluster, *, repeats: int = 50, seed: int = 0, wanted: Sequence[int] | None = None
) -> Iterator[Scenario]:
    """Jobs fill whole hosts, and at most a part of one more: what well-run clusters look like.

    Parameters are those of `uniform`. Jobs have 1..16 GPUs, each number as likely; what is left
    of a job after whole hosts goes to the fullest host on which it fits.
    """
    sizes, rng = _checked(cluster, wanted, repeats, seed), random.Random(f"packed {seed}")
    return _packed(cluster, sizes, repeats, rng)


def _uniform(
    cluster: Cluster, sizes: Sequence[int], repeats: int, rng: random.Random, busy: str
) -> Iterator[Scenario]:
    gpus = range(cluster.n_gpus)
    for k in sizes:
        for _ in range(repeats):
            free = rng.sample(gpus, rng.randint(k, cluster.n_gpus))
            others = sorted(set(gpus) - set(free))
            jobs = [Job("pooled", tuple(others))] if others else []
            if busy == "tenants":
                jobs = _tenants(cluster, others, rng)
            yield ClusterState(cluster, tuple(free), tuple(jobs)), k


def _tenants(cluster: Cluster, busy: list[int], rng: random.Random) -> list[Job]:
    """Jobs of random sizes on these GPUs, each placed by proximity among those still without."""
    jobs: list[Job] = []
    while busy:
        size = rng.choice([size for size in SIZES if size <= len(busy)])
        gpus = proximity(cluster, busy, size)
        jobs.append(Job(f"job{len(jobs)}", gpus))
        taken = set(gpus)
        busy = [gpu for gpu in busy if gpu not in taken]
    return jobs


def _packed(
    cluster: Cluster, sizes: Sequence[int], repeats: int, rng: random.Random
) -> Iterator[Scenario]:
    for k in sizes:
        for _ in range(repeats):
            free = {
                h: list(range(int(cluster.first[h]), int(cluster.first[h + 1])))
                for h in range(cluster.n_hosts)
            }
            busy = cluster.n_gpus - rng.randint(k, cluster.n_gpus)
            order = rng.sample(range(cluster.n_hosts), cluster.n_hosts)
            jobs: list[Job] = []
            while busy:
                size = rng.randint(1, min(busy, max(SIZES)))
                gpus = _packed_job(cluster, free, order, size)
                jobs.append(Job(f"job{len(jobs)}", tuple(gpus)))
                busy -= len(gpus)
            left = tuple(gpu for gpus in free.values() for gpu in gpus)
            yield ClusterState(cluster, left, tuple(jobs)), k


def _packed_job(
    cluster: Cluster, free: dict[int, list[int]], order: list[int], size: int
) -> list[int]:
    """Take whole hosts, then a part of one; fewer GPUs than asked if no host has the part."""
    chosen: list[int] = []
    for h in order:
        if len(free[h]) == int(cluster.sizes[h]) <= size - len(chosen):
            chosen += free[h]
            free[h] = []
    part = size - len(chosen)
    if part:
        room = [h for h in order if len(free[h]) >= part]
        if room:
            host = min(room, key=lambda h: len(free[h]))
        elif chosen:
            return chosen
        else:
            host = max(order, key=lambda h: len(free[h]))
        chosen += free[host][:part]
        free[host] = free[host][part:]
    return chosen


def _checked(
    cluster: Cluster, wanted: Sequence[int] | None, repeats: Any, seed: Any
) -> Sequence[int]:
    integer("repeats", repeats, 0, 10**9)
    integer("seed", seed)
    if wanted is None:
        return range(2, cluster.n_gpus)
    return [integer("wanted", k, 1, cluster.n_gpus) for k in wanted]
