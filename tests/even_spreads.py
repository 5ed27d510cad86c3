"""What anybody can do by hand: spread k over the hosts with most room, few of them and more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.bandwidth.topology.state import ClusterState


def nearest_sets(state: ClusterState, k: int) -> Iterator[tuple[int, ...]]:
    """Sets of GPUs on the fewest hosts, and on up to 8 more, as even as free GPUs allow."""
    cluster = state.cluster
    order = np.argsort(-state.room, kind="stable").tolist()
    free: dict[int, list[int]] = {}
    for gpu in state.free:
        free.setdefault(int(cluster.host_of[gpu]), []).append(gpu)
    first = next(m for m in range(1, k + 1) if sum(state.room[order[:m]]) >= k)
    for m in range(first, min(first + 8, len(free), k) + 1):
        some = order[:m]
        counts = dict.fromkeys(some, 0)
        for _ in range(k):
            h = min((h for h in some if counts[h] < len(free[h])), key=lambda h: counts[h])
            counts[h] += 1
        yield tuple(sorted(gpu for h in some for gpu in free[h][: counts[h]]))
