"""Slow twin of `optsched.plan.clear`: every set of changes by cost, every placement by search."""

from __future__ import annotations

import random
from itertools import groupby, product
from typing import TYPE_CHECKING

from optsched.bandwidth import Cluster, ClusterState, Host, HostType
from optsched.bandwidth import Job as StateJob
from optsched.plan import ClusterSnapshot, PlanJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Fast = Callable[[PlanJob, dict[int, int]], bool]


def domains(cluster: Cluster, level: str | None) -> list[list[int]]:
    """Hosts of every domain of a level, those of different types apart."""
    groups = cluster.domains(cluster.level(level)).values() if level else cluster.fabrics
    kinds = set(cluster.type_of)
    found = [[h for h in hosts if cluster.type_of[h] == kind] for hosts in groups for kind in kinds]
    return [hosts for hosts in found if hosts]


def distributions(
    free: dict[int, int], hosts: list[int], pods: int, size: int
) -> Iterator[dict[int, int]]:
    """Every distribution of pods of one size to hosts."""
    if pods == 0:
        yield {}
    elif hosts:
        h, rest = hosts[0], hosts[1:]
        for here in range(min(pods, free[h] // size) + 1):
            for others in distributions(free, rest, pods - here, size):
                yield {h: here * size, **others} if here else others


def fits(snapshot: ClusterSnapshot, free: dict[int, int], jobs: list[PlanJob], fast: Fast) -> bool:
    """Whether all jobs find GPUs together."""
    if not jobs:
        return True
    job, *others = jobs
    kind = job.type
    whole = job.level == "host"
    for hosts in domains(snapshot.cluster, job.level):
        if kind not in (None, snapshot.cluster.hosts[hosts[0]].type):
            continue
        size = job.gpus if whole else job.pod
        for place in distributions(free, hosts, job.gpus // size, size):
            left = {h: n - place.get(h, 0) for h, n in free.items()}
            if fast(job, place) and fits(snapshot, left, others, fast):
                return True
    return False


def plans(
    snapshot: ClusterSnapshot, request: PlanJob, fast: Fast, cheapest: bool = True
) -> list[tuple[int, frozenset[str]]]:
    """Costs and changes of all plans that work; or those that are cheaper than all before."""
    cluster, choices = snapshot.cluster, []
    for job, held in snapshot.running:
        options: list[tuple[str, int]] = [("stay", 0)]
        if job.evict is not None and job.priority >= request.priority:
            options.append(("evict", job.evict))
        kinds = {cluster.hosts[cluster.host_of[g]].type for g in held.gpus}
        if job.move is not None and len(kinds) == 1:
            options.append(("move", job.move))
        choices.append([(name, cost, job, held, kinds) for name, cost in options])
    best: int | None = None
    found = []
    for chosen in product(*choices):
        cost = sum(one[1] for one in chosen)
        if cheapest and best is not None and cost >= best:
            continue
        free = {h: int(n) for h, n in enumerate(snapshot.state.room)}
        moved, used = [], request.gpus
        for name, _, job, held, kinds in chosen:
            used += job.gpus * (name != "evict" and job.group == request.group)
            if name != "stay":
                for gpu in held.gpus:
                    free[int(cluster.host_of[gpu])] += 1
            if name == "move":
                fixed = {key: getattr(job, key) for key in PlanJob.__struct_fields__}
                moved.append(PlanJob(**{**fixed, "type": next(iter(kinds))}))
        within = used <= snapshot.quotas.get(request.group, used)
        if within and fits(snapshot, free, [request, *moved], fast):
            best = cost
            names = [f"{one[0]} {one[2].name}" for one in chosen if one[0] != "stay"]
            found.append((cost, frozenset(names)))
    return found


def cheapest(snapshot: ClusterSnapshot, request: PlanJob, fast: Fast) -> int | None:
    """The least cost of evictions and moves, or None."""
    return min((cost for cost, _ in plans(snapshot, request, fast)), default=None)


def starts(snapshot: ClusterSnapshot, fast: Fast) -> list[list[PlanJob]]:
    """Requests that start by priority: most GPUs of each, then most and earliest requests."""
    free = {h: int(n) for h, n in enumerate(snapshot.state.room)}
    left = {g: max(0, n - snapshot.used(g)) for g, n in snapshot.quotas.items()}
    chosen: list[PlanJob] = []
    found = []
    for _, same in groupby(snapshot.waiting, key=lambda job: job.priority):
        able = [job for job in same if fits(snapshot, free, [job], fast)]
        best, value = [], (0, 0)
        for picks in product((False, True), repeat=len(able)):
            some = [job for job, pick in zip(able, picks, strict=True) if pick]
            ranks = sum(len(able) - k for k, pick in enumerate(picks) if pick)
            worth = sum(job.gpus for job in some), ranks
            together = sorted([*chosen, *some], key=lambda job: -job.gpus)
            used = {g: sum(job.gpus for job in together if job.group == g) for g in left}
            if (
                worth > value
                and sum(job.gpus for job in together) <= sum(free.values())
                and all(used[g] <= left[g] for g in left)
                and fits(snapshot, free, together, fast)
            ):
                best, value = some, worth
        chosen += best
        found.append(best)
    return found


def reason(snapshot: ClusterSnapshot, job: PlanJob, fast: Fast) -> str:
    """The first constraint without which a request that does not start could start alone."""
    cluster, down = snapshot.cluster, set(snapshot.state.down)
    free = {h: int(n) for h, n in enumerate(snapshot.state.room)}
    empty = {h: 0 for h in free}
    for gpu in set(range(cluster.n_gpus)) - down:
        empty[int(cluster.host_of[gpu])] += 1
    quota = snapshot.quotas.get(job.group, 10**9)

    def alone(room: dict[int, int], fast: Fast, **relaxed: object) -> bool:
        fields = {key: getattr(job, key) for key in PlanJob.__struct_fields__} | relaxed
        return fits(snapshot, room, [PlanJob(**fields)], fast)  # type: ignore[arg-type]

    if job.gpus > quota or not alone(empty, fast):
        return "never"
    if snapshot.used(job.group) + job.gpus > quota:
        return "quota"
    wide = {"level": None, "pod": 1 if job.level == "host" else job.pod}
    if not alone(free, lambda *_: True, **wide):
        return "space"
    if not alone(free, lambda *_: True):
        return "level"
    return "order" if alone(free, fast) else "bandwidth"


def random_snapshot(seed: int, floors: bool = False) -> tuple[ClusterSnapshot, PlanJob]:
    """A tiny cluster with up to five jobs, and a request."""
    rng = random.Random(seed)
    n = rng.randint(2, 5)
    types = [HostType("x", rng.choice((2, 4))), HostType("y", 2)][: rng.randint(1, 2)]
    hosts = tuple(
        Host(f"n{h}", rng.choice(types).name, (f"s{h // 4}", f"l{h // 2}")) for h in range(n)
    )
    used = {host.type for host in hosts}
    factors = {"leaf": 0.8, "spine": 0.5, "cluster": 0.3} if floors else {"cluster": 1.0}
    cluster = Cluster(
        hosts, tuple(t for t in types if t.name in used), ("spine", "leaf"), factors=factors
    )
    free, jobs, held = list(range(cluster.n_gpus)), [], []
    rng.shuffle(free)
    if rng.random() < 0.6:  # less scattered
        free.sort(key=lambda gpu: gpu + rng.randint(0, 4))
    down = [free.pop() for _ in range(rng.random() < 0.2)]
    for j in range(rng.randint(1, 5)):
        size = rng.choice((1, 1, 2, 2, 3, 4))
        if size > len(free):
            break
        ids = sorted(free.pop() for _ in range(size))
        jobs.append(PlanJob(
            name=f"j{j}", gpus=size, pod=rng.choice([p for p in (1, 2, 3) if size % p == 0]),
            level=rng.choice((None, None, "spine", "leaf", "host")), priority=rng.choice((1, 2)),
            group=rng.choice("ab"),
            evict=rng.choice((None, rng.randint(0, 30), rng.randint(0, 30))),
            move=rng.choice((None, *(rng.randint(0, 9) for _ in range(4)))),
            bandwidth=rng.choice((None, 20.0, 45.0)) if floors and size > 1 else None,
        ))  # fmt: skip
        held.append(StateJob(f"j{j}", tuple(ids)))
    size = min(cluster.n_gpus, len(free) + rng.randint(0, 3)) or 1
    request = PlanJob(
        name="gang", gpus=size, pod=rng.choice([p for p in (1, 2, 4) if size % p == 0]),
        level=rng.choice((None, "spine", "leaf", "host")), priority=rng.choice((1, 2)),
        type=rng.choice((None, None, *used)), group=rng.choice("ab"),
        bandwidth=rng.choice((20.0, 45.0, 90.0)) if floors and size > 1 else None,
    )  # fmt: skip
    quotas = {"a": rng.randint(1, cluster.n_gpus)} if rng.random() < 0.3 else {}
    state = ClusterState(cluster, tuple(free), tuple(held), tuple(down))
    return ClusterSnapshot(state, (*jobs, request), quotas), request
