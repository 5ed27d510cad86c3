"""Made-up clusters with made-up bandwidths, by seed: for tests, examples and benchmarks.

The shapes are those of real hosts and measured networks, the numbers are not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

import numpy as np

from optsched.bandwidth.models.fallback import best_rings, best_within
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable
from optsched.bandwidth.models.patterns import automaton, n_patterns
from optsched.bandwidth.models.prior import line_rate
from optsched.bandwidth.topology.cluster import MOST_HOSTS, Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.rates import KILOBYTES, MOST
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.model.schedule import IntArray

MOST_PATTERNS: Final = 20_000
"""A cluster with more has no complete synthetic table."""

WIGGLE: Final = 0.2
"""Largest relative deviation of a pattern from the line rate."""
WHOLE_HOST_DROP: Final = 0.7
"""Factor of patterns that hold one of the largest hosts entirely, beside others."""


# NVIDIA DGX-1 with V100, six NVLinks a GPU: the pairs with two links, and those with one
_TWO_LINKS: Final = frozenset({(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)})
_ONE_LINK: Final = frozenset({(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)})


class _Kind(NamedTuple):
    """What a type of host is made of."""

    link: Callable[[int, int], str]
    """Link of GPU i to GPU k > i."""
    nics: int
    nic_rate: float
    speed: float
    """Bandwidth of a ring over what its weakest link is taken for where nothing is measured."""
    noise: float
    """Largest relative deviation of a subset."""


def _mesh(i: int, k: int) -> str:
    return "NV2" if (i, k) in _TWO_LINKS else "NV1" if (i, k) in _ONE_LINK else "SYS"


def _nested(pair: str, four: str) -> Callable[[int, int], str]:
    return lambda i, k: pair if i // 2 == k // 2 else four if i // 4 == k // 4 else "SYS"


_KINDS: Final = {
    "nvswitch": _Kind(lambda i, k: "NV18", 8, 50.0, 1.3, 0.02),
    "cube_mesh": _Kind(_mesh, 4, 12.5, 1.1, 0.1),
    "nvlink_pairs": _Kind(_nested("NV4", "PXB"), 2, 25.0, 1.2, 0.1),
    "pcie": _Kind(_nested("PIX", "PHB"), 2, 12.5, 0.9, 0.15),
}
KINDS: Final = (*_KINDS, "nvl72")
"""Types of hosts: eight GPUs each, but for the rack ``nvl72`` of 18 trays with four."""


def host_type(kind: str, seed: int = 0) -> HostType:
    """A type of host with bandwidths of all its subsets (of the rack: by number of GPUs).

    A subset's bandwidth is that of its best ring, which its weakest link limits, times noise drawn
    by `seed`. The name is the `kind`, one of `KINDS`.
    """
    if kind not in KINDS:
        raise InputError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r:.60}")
    rng = np.random.default_rng([integer("seed", seed), crc32(kind.encode())])
    if kind == "nvl72":
        counts = np.arange(73)
        rates = 880.0 - 1.5 * counts + rng.uniform(-8, 8, 73)
        intra = IntraTable(72, np.rint(rates * KILOBYTES).astype(np.int64))
        return HostType(kind, 72, nics=72, nic_rate=50.0, intra=intra, tray=4)
    link, nics, nic_rate, speed, noise = _KINDS[kind]
    links = tuple(
        tuple("X" if i == k else link(min(i, k), max(i, k)) for k in range(8)) for i in range(8)
    )
    bare = HostType(kind, 8, links, ((0, 1, 2, 3), (4, 5, 6, 7)), nics, nic_rate)
    rings = best_rings(bare)
    factor = speed * (1 + rng.uniform(-noise, noise, len(rings)))
    return replace(bare, intra=IntraTable(8, np.rint(rings * factor).astype(np.int64)))


def cluster(
    kinds: str | Sequence[str],
    hosts: int,
    seed: int = 0,
    *,
    levels: Mapping[str, int] | None = None,
    name: str = "",
) -> Cluster:
    """A cluster of synthetic hosts ``n01``, ``n02``, ...

    Parameters
    ----------
    kinds
        Of `KINDS`; host h has the kind h modulo their number. Hosts of one kind are alike.
    levels
        Hosts of a domain by level, the lowest first, each a multiple of the one before, such as
        ``{"leaf": 4, "spine": 16}``; the last domain may have fewer.
    """
    integer("hosts", hosts, 1, MOST_HOSTS)
    order = [kinds] if isinstance(kinds, str) else list(kinds)
    if not order:
        raise InputError(f"kinds: expected one or more of {', '.join(KINDS)}")
    size, sizes = 1, dict(levels or {})
    for level, more in sizes.items():
        if integer(f"levels[{level}]", more, size, MOST_HOSTS) % size:
            raise InputError(f"levels[{level}]: expected a multiple of {size}, got {more}")
        size = more
    widest = list(reversed(sizes.items()))
    digits = {level: max(2, len(str(-(-hosts // n)))) for level, n in widest}
    width = max(2, len(str(hosts)))
    made = tuple(
        Host(
            f"n{h + 1:0{width}d}",
            order[h % len(order)],
            tuple(f"{level}{h // n + 1:0{digits[level]}d}" for level, n in widest),
        )
        for h in range(hosts)
    )
    types = tuple(host_type(kind, seed) for kind in dict.fromkeys(order[:hosts]))
    return Cluster(made, types, tuple(level for level, _ in widest), name)


def network(cluster: Cluster, seed: int = 0) -> MeasurementTable:
    """A table with every pattern of a cluster, not monotone, as measured networks are not.

    Across hosts it is the `line_rate` times a factor of the pattern in 0.8..1.2, drawn by `seed`;
    patterns that hold a whole host of the largest size drop to 0.7 of that; and one balanced
    pattern on three hosts is made better than every pattern of as many GPUs on two, so that of
    these the compact choice is wrong. On one host it is the best bandwidth within.
    """
    most = int(cluster.sizes.max())
    n = n_patterns(cluster.n_hosts, most)
    if n > MOST_PATTERNS:
        raise InputError(
            f"cluster: has {n} patterns, a synthetic table holds {MOST_PATTERNS}: take fewer hosts"
        )
    patterns = automaton(cluster.n_hosts, most).patterns
    sizes = -np.sort(-cluster.sizes)
    total = patterns.sum(axis=1)
    patterns = patterns[(patterns <= sizes).all(axis=1) & (total >= 2)]
    rng = np.random.default_rng([integer("seed", seed), len(patterns)])
    factor = 1 + rng.uniform(-WIGGLE, WIGGLE, len(patterns))
    factor[(patterns == most).any(axis=1)] *= WHOLE_HOST_DROP
    hosts = (patterns > 0).sum(axis=1)
    across = np.where(hosts > 1, line_rate(cluster, patterns) * factor, 0.0)
    values = np.rint(np.minimum(across, MOST - 1)).astype(np.int64)
    _spoil_locality(patterns, hosts, values)
    values[hosts == 1] = best_within(cluster, ())[patterns[hosts == 1, 0]]
    rows = tuple(
        Measurement(tuple(c for c in row if c), value)
        for row, value in zip(patterns.tolist(), values.tolist(), strict=True)
    )
    return MeasurementTable(rows, "all_reduce", 2 << 30)


def _spoil_locality(patterns: IntArray, hosts: IntArray, values: IntArray) -> None:
    """Make one balanced pattern on three hosts better than all patterns of its size on two."""
    wide, most = patterns.shape[1], int(patterns.max())
    if wide < 3 or most < 3:
        return
    whole, more = divmod(most, 3)
    counts = [whole + 1] * more + [whole] * (3 - more) + [0] * (wide - 3)
    at = np.flatnonzero((patterns == np.array(counts)).all(axis=1))
    on_two = (patterns.sum(axis=1) == most) & (hosts == 2)
    if len(at) and on_two.any():
        better = int(values[on_two].max() * 1.1) + 1
        values[at[0]] = min(max(int(values[at[0]]), better), MOST - 1)


def tenants(cluster: Cluster, seed: int = 0, share_free: float = 0.5) -> ClusterState:
    """A state with tenants of 1 to 16 GPUs, each on the hosts with most free GPUs, by `seed`.

    About a share of `share_free` of the GPUs stays free.
    """
    random = np.random.default_rng([seed, 3])
    state = ClusterState.idle(cluster)
    least = max(1, round(share_free * cluster.n_gpus))
    while len(state.free) > least:
        size = min(int(random.choice([1, 2, 4, 8, 16])), len(state.free) - least)
        hosts = random.permutation(cluster.n_hosts)
        order = hosts[np.argsort(-state.room[hosts], kind="stable")].tolist()
        free: dict[int, list[int]] = {}
        for gpu in state.free:
            free.setdefault(int(cluster.host_of[gpu]), []).append(gpu)
        chosen = [gpu for h in order for gpu in free.get(h, [])][:size]
        state = state.take(chosen, f"job{len(state.jobs)}")
    return state
