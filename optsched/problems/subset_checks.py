"""What is wrong with a choice of GPUs, or with a request that nobody can fulfil."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.cluster import Cluster
    from optsched.problems.subset import Request, SubsetChoice


def faults(problem: SubsetChoice, chosen: Sequence[Sequence[int]]) -> list[str]:
    """What is wrong with a choice, a sentence each: row r holds the GPUs of request r."""
    cluster, state = problem.cluster, problem.state
    found: list[str] = []
    if len(chosen) != len(problem.requests):
        return [f"expected GPUs for {len(problem.requests)} requests, got {len(chosen)}"]
    owner: dict[int, str] = {}
    free = set(state.free)
    for request, gpus in zip(problem.requests, chosen, strict=True):
        who = f"request {request.name!r}"
        if len(gpus) != request.gpus:
            found.append(f"{who} gets {len(gpus)} GPUs, it asks {request.gpus}")
        counts: dict[int, int] = {}
        for gpu in gpus:
            if not 0 <= gpu < cluster.n_gpus:
                found.append(f"{who} gets GPU {gpu}, the cluster has 0..{cluster.n_gpus - 1}")
                continue
            if gpu not in free:
                found.append(f"{who} gets GPU {cluster.gpu_name(gpu)}, which is not free")
            if gpu in owner:
                found.append(f"GPU {cluster.gpu_name(gpu)} goes to {owner[gpu]} and to {who}")
            owner[gpu] = who
            host = int(cluster.host_of[gpu])
            counts[host] = counts.get(host, 0) + 1
        broken = request.policy.broken_by(cluster, counts)
        if broken:
            found.append(f"{who} breaks its policy: {broken}")
    return found


def infeasibility(problem: SubsetChoice) -> str:
    """Why no choice exists, in one sentence, if counting shows it; else ``""``."""
    for request in problem.requests:
        reason = _impossible(problem, request)
        if reason:
            return reason if len(problem.requests) == 1 else f"{request.name}: {reason}"
    return ""


def _impossible(problem: SubsetChoice, request: Request) -> str:
    cluster, policy, k = problem.cluster, request.policy, request.gpus
    barred = {cluster.host_index(name) for name in policy.exclude or ()}
    room = {h: int(n) for h, n in enumerate(problem.state.room.tolist()) if n and h not in barred}
    total = sum(room.values())
    if total < k:
        return f"exclude: asks {k} GPUs, {total} are free on the hosts that are left"
    included = [cluster.host_index(name) for name in policy.include or ()]
    for h in included:
        if h not in room:
            return f"include: host {cluster.hosts[h].name!r} has no free GPU"
    if len(included) > k:
        return f"include: {len(included)} hosts for {k} GPUs"
    if policy.min_hosts > min(k, len(room)):
        return f"min_hosts: {policy.min_hosts} hosts for {k} GPUs, and {len(room)} have a free one"
    if policy.slice_size is not None and k % policy.slice_size:
        return f"slice_size: {k} GPUs are no whole slices of {policy.slice_size}"
    if policy.max_hosts is not None:
        most = sum(sorted(room.values(), reverse=True)[: policy.max_hosts])
        if most < k:
            return f"max_hosts: asks {k} GPUs, {policy.max_hosts} hosts have {most} free at most"
    if policy.required is not None:
        return _no_domain(cluster, policy.required, room, k, set(included))
    return ""


def _no_domain(
    cluster: Cluster, level: str, room: dict[int, int], k: int, included: set[int]
) -> str:
    domains = cluster.domains(cluster.level(level))
    free = {name: sum(room.get(h, 0) for h in hosts) for name, hosts in domains.items()}
    best = max(free, key=lambda name: free[name])
    if free[best] < k:
        return (
            f"required: asks {k} GPUs in one {level}, the {level} with most free GPUs is {best!r} "
            f"with {free[best]}"
        )
    if included and not any(included <= set(hosts) for hosts in domains.values()):
        return f"required, include: the included hosts are not in one {level}"
    return ""
