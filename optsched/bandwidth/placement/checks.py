"""Requests for GPUs, and what is wrong with them or with what they get."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optsched.bandwidth.topology.policy import Policy
from optsched.errors import Infeasible, InputError
from optsched.io.values import integer, label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.topology.state import ClusterState


class Request(NamedTuple):
    """One of several requests that are decided together."""

    name: str
    gpus: int
    policy: Policy = Policy()


def check_requests(state: ClusterState, requests: Sequence[Request]) -> None:
    """Refuse requests that are none, that share a name, or that ask for too much."""
    for r, request in enumerate(requests):
        if not isinstance(request, Request):
            raise InputError(f"requests[{r}]: expected a Request, got {request!r:.60}")
    names = [request.name for request in requests]
    running = {job.name for job in state.jobs}
    total = 0
    for r, request in enumerate(requests):
        place = "gpus" if len(requests) == 1 else f"requests[{r}].gpus"
        label("request", request.name)
        if not request.name or names.count(request.name) > 1:
            raise InputError(f"requests: expected distinct names, got {request.name!r:.60} again")
        if len(requests) > 1 and request.name in running:
            raise InputError(f"requests[{r}].name: a job {request.name!r:.60} runs already")
        k = integer(place, request.gpus, 1, 2**31)
        total += k
        if total > len(state.free):
            hosts = int((state.room > 0).sum())
            raise Infeasible(
                f"{place}: requested {total}, free {len(state.free)} on {hosts} "
                f"host{'s' * (hosts != 1)}"
            )
        if not isinstance(request.policy, Policy):
            raise InputError(f"policy: expected a Policy, got {request.policy!r:.60}")
        request.policy.check(state.cluster)


def faults_of(
    state: ClusterState, requests: Sequence[Request], chosen: Sequence[Sequence[int]]
) -> list[str]:
    """What is wrong with GPUs for these requests, a sentence each."""
    cluster, free = state.cluster, set(state.free)
    if len(chosen) != len(requests):
        return [f"expected GPUs for {len(requests)} requests, got {len(chosen)}"]
    found: list[str] = []
    owner: dict[int, str] = {}
    for request, gpus in zip(requests, chosen, strict=True):
        who = f"request {request.name!r}"
        if len(gpus) != request.gpus:
            found.append(f"{who} gets {len(gpus)} GPUs, it requests {request.gpus}")
        known: list[int] = []
        for gpu in gpus:
            if not 0 <= gpu < cluster.n_gpus:
                found.append(f"{who} gets GPU {gpu}, the cluster has 0..{cluster.n_gpus - 1}")
                continue
            if gpu not in free:
                found.append(f"{who} gets GPU {cluster.gpu_name(gpu)}, which is not free")
            if gpu in owner:
                found.append(f"GPU {cluster.gpu_name(gpu)} goes to {owner[gpu]} and to {who}")
            owner[gpu] = who
            known.append(gpu)
        broken = request.policy.fault(state, known)
        if broken:
            found.append(f"{who} breaks its policy: {broken}")
    return found
