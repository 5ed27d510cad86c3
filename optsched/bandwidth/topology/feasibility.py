"""Why no choice of GPUs can exist, where counting free GPUs shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.bandwidth.topology.intra import MOST_BY_SUBSET

if TYPE_CHECKING:
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.policy import Policy
    from optsched.bandwidth.topology.state import ClusterState


def impossible(state: ClusterState, policy: Policy, k: int) -> str:
    """The reason in one sentence, if counting free GPUs shows it; else ``""``."""
    cluster = state.cluster
    usable = policy.usable(state)
    free = {h: int(n) for h, n in enumerate(usable.room.tolist()) if n}
    total = sum(free.values())
    if total < k:
        return f"exclude, apart: requested {k} GPUs, {total} are free on the hosts that are left"
    free = {h: min(n, policy.max_per_host or n) for h, n in free.items()}
    if sum(free.values()) < k:
        return (
            f"max_per_host: requested {k} GPUs, {total} are free, of which hosts may give "
            f"{sum(free.values())}"
        )
    included = [cluster.host_index(name) for name in policy.include or ()]
    for h in included:
        if h not in free:
            return f"include: host {cluster.hosts[h].name!r} has no free GPU"
    if policy.min_hosts > min(k, len(free)):
        return f"min_hosts: {policy.min_hosts} hosts for {k} GPUs, and {len(free)} have a free one"
    if policy.balance == "exact":
        numbers = [
            m for m in range(policy.min_hosts, min(k, policy.max_hosts or k) + 1)
            if k % m == 0 and sum(n >= k // m for n in free.values()) >= m
        ]  # fmt: skip
        if not numbers:
            most = policy.max_hosts or "more"
            return (
                f"balance: no number of hosts in {policy.min_hosts}..{most} gives {k} GPUs in "
                "equal parts on hosts with so many free GPUs"
            )
    if policy.max_hosts is not None:
        most = sum(sorted(free.values(), reverse=True)[: policy.max_hosts])
        if most < k:
            return (
                f"max_hosts: requested {k} GPUs, {policy.max_hosts} hosts have {most} free at most"
            )
    if (level := policy.level(cluster)) is not None:
        reason = _no_domain(cluster, level, free, k, set(included))
        rules = [*["required"] * (policy.required is not None), *["include"] * bool(included)]
        by = " by max_per_host" * bool(policy.max_per_host)
        if reason:
            return f"{', '.join(rules) or 'gpus'}: {reason}{by}"
    if cluster.rails and max(free.values()) < k and not _on_rails(usable, k):
        return f"rails: no hosts have the same local ids free that give {k} GPUs"
    return ""


def _on_rails(state: ClusterState, k: int) -> bool:
    """Whether some set of local ids is free on so many hosts that they have k GPUs."""
    masks = state.masks[state.cluster.sizes <= MOST_BY_SUBSET]
    size = int(state.cluster.sizes[state.cluster.sizes <= MOST_BY_SUBSET].max(initial=0))
    return any(
        k % (c := mask.bit_count()) == 0 and ((masks & mask) == mask).sum() >= k // c
        for mask in range(1, 1 << size)
    )


def _no_domain(
    cluster: Cluster, level: int, free: dict[int, int], k: int, included: set[int]
) -> str:
    """Why no domain of a level has k free GPUs and the included hosts; "" if one has."""
    name, joined = (*cluster.levels, "host")[level], ""
    if level == 0 and len(cluster.fabrics) > 1:
        joined = f" (of {len(cluster.fabrics)}, which no level above joins)"
    domains = cluster.domains(level)
    usable = [key for key, hosts in domains.items() if included <= set(hosts)]
    if not usable:
        return f"the included hosts are not in one {name}{joined}"
    sums = {key: sum(free.get(h, 0) for h in domains[key]) for key in usable}
    best = max(sums, key=lambda key: sums[key])
    if sums[best] >= k:
        return ""
    return (
        f"requested {k} GPUs in one {name}{joined}, the {name} with most free GPUs is {best!r} "
        f"with {sums[best]}"
    )
