"""What is wrong with a choice of GPUs, or with a request that nobody can fulfil."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.bandwidth.feasibility import impossible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.gpus.problem import SubsetChoice


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
        reason = impossible(problem.state, request.policy, request.gpus)
        if reason:
            return reason if len(problem.requests) == 1 else f"{request.name}: {reason}"
    return ""
