"""Which runs of nccl-tests to make next: those that narrow the intervals of a model most."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.measure.plan_script import PAYLOAD, Plan
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.fallback import best_within
from optsched.bandwidth.models.model import alone
from optsched.bandwidth.models.observations import BINDING, LEAST_RUNS
from optsched.bandwidth.models.patterns import automaton, n_patterns
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET, subset_sizes
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.bandwidth.measure.plan_script import Run
    from optsched.bandwidth.models.gaussian import Floats
    from optsched.bandwidth.topology.cluster import HostType
    from optsched.model.schedule import IntArray

CANDIDATES: Final = 2_000
"""Patterns that are compared; of a large cluster those on few hosts."""


def plan_measurements(model: BottleneckBandwidth, budget: int) -> Plan:
    """Plan the runs that narrow the 95 % intervals of a model most; no run is made.

    Each run across hosts is chosen after those before it. In two of three every pattern weighs as
    much as sets of GPUs of its size have it, in the third patterns on the fewest hosts weigh, as
    far as hosts allow their interval. Added to the budget are one run for every class of alike
    subsets of a host that has neither table nor run, and three across every level whose factor is
    neither given nor fitted.

    Parameters
    ----------
    model
        The model so far; its cluster is measured.
    budget
        Most runs across hosts.

    Raises
    ------
    InputError
        A budget out of range, or no model that learns.
    """
    integer("budget", budget, 0, CANDIDATES)
    if not isinstance(model, BottleneckBandwidth):
        raise InputError(
            f"model: expected one that learns (BottleneckBandwidth), got {type(model).__name__}"
        )
    cluster, runs, placed = model.cluster, _within(model), _Placement(model)
    rows, weights = _candidates(model)
    rows = rows[model.informative(rows, weights, budget)]
    found = [tuple(c for c in row if c) for row in rows.tolist()]
    runs += [placed.run(pattern) for pattern in found]
    names, most = cluster.network_levels.names, int(cluster.sizes.max())
    known = [*sorted(model.observations.known), *found, *((c, c) for c in range(most, 0, -1))]
    for level, name in enumerate(names[: None if len(cluster.fabrics) == 1 else -1]):
        if level and budget and name not in cluster.factors:
            across = (placed.run(pattern, level) for pattern in known)
            runs += islice(filter(None, across), LEAST_RUNS)
    return Plan(cluster, tuple(runs), model.op, model.payload or PAYLOAD)


def subset_classes(kind: HostType) -> tuple[IntArray, ...]:
    """Subsets of two GPUs or more, as masks, whose GPUs have the same links within the subset.

    A screen: measured values within a class spread by one or two per cent on some hosts and by a
    third on others. Where no links are known, or a host has more than 16 GPUs, the lowest ids of
    every size are a class. Classes by size, then by lowest mask.
    """
    n = kind.gpus
    if kind.links is None or n > MOST_BY_SUBSET:
        return tuple(np.array([(1 << size) - 1], object) for size in range(2, n + 1))
    _, color = np.unique(kind.links, return_inverse=True)
    bits = np.arange(1 << n)[:, None] >> np.arange(n) & 1
    links = np.where(bits, bits @ (n + 1) ** color.reshape(n, n), -1)  # by GPU, coded by number
    links.sort(axis=1)
    _, of = np.unique(links, axis=0, return_inverse=True)
    order = np.argsort(of, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(of[order])) + 1)
    found = [group for group in groups if int(group[0]).bit_count() > 1]
    return tuple(sorted(found, key=lambda group: (int(group[0]).bit_count(), int(group[0]))))


def _candidates(model: BottleneckBandwidth) -> tuple[IntArray, Floats]:
    """Unmeasured patterns that a network may limit and a fabric holds, and their weights."""
    cluster, most = model.cluster, int(model.cluster.sizes.max())
    hosts = cluster.n_hosts
    while hosts > 2 and n_patterns(hosts, most) > CANDIDATES:
        hosts -= 1
    rows = automaton(hosts, most).patterns
    fits = np.zeros(len(rows), np.bool_)
    for fabric in cluster.fabrics:
        sizes = -np.sort(-cluster.sizes[[*fabric]])[:hosts]
        fits |= (rows <= np.pad(sizes, (0, hosts - len(sizes)))).all(axis=1)
    rows = rows[fits & ~alone(rows)]
    low, high = model.network(rows, "low"), model.network(rows, "high")
    ceiling = np.where(rows >= 2, best_within(cluster, model.table)[rows], MOST).min(axis=1)
    useful = ~model.is_measured(rows) & (low > 0) & (low < BINDING * ceiling)
    rows, low, high, ceiling = rows[useful], low[useful], high[useful], ceiling[useful]
    log = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, max(most, hosts) + 1)))])
    ways = (log[most] - log[rows] - log[most - rows]).sum(axis=1)  # logs of factorials
    for count in range(most + 1):
        ways -= log[(rows == count).sum(axis=1)]
    total, used = rows.sum(axis=1), (rows > 0).sum(axis=1)
    common = np.exp(ways - ways.max(initial=0.0))
    common /= np.bincount(total, common)[total]
    compact = (used == np.maximum(2, -(-total // most))).astype(np.float64)
    compact /= np.maximum(np.bincount(total, compact), 1)[total]
    compact *= np.minimum(1.0, np.log(ceiling / low) / np.log(np.maximum(high, low + 1) / low))
    return rows, np.array([common, common, compact])


def _within(model: BottleneckBandwidth) -> list[Run]:
    """A run of the lowest subset of every class in which nothing is measured."""
    cluster = model.cluster
    found: list[Run] = []
    for t in sorted(set(cluster.type_of)):
        kind, host = cluster.types[t], cluster.hosts[cluster.type_of.index(t)].name
        low, high = model.intra_of(t, "low"), model.intra_of(t, "high")
        for masks in subset_classes(kind):
            ids = tuple(g for g in range(kind.gpus) if int(masks[0]) >> g & 1)
            keys = masks if len(low) > kind.gpus + 1 else [len(ids)]
            if (low[keys] < high[keys]).all():
                found.append(((host, ids),))
    return found


class _Placement:
    """Hosts and local ids on which to run patterns."""

    def __init__(self, model: BottleneckBandwidth) -> None:
        self.cluster = model.cluster
        self.best: list[list[tuple[int, tuple[int, ...]]]] = []
        """By type of host and count the bandwidth and the local ids of the best subset."""
        for t, kind in enumerate(model.cluster.types):
            values, n = model.intra_of(t), kind.gpus
            by_count = [(int(values[c]), tuple(range(c))) for c in range(n + 1)]
            if len(values) > n + 1:
                sizes = subset_sizes(n)
                masks = [int(np.argmax(np.where(sizes == c, values, -1))) for c in range(n + 1)]
                by_count = [
                    (int(values[mask]), tuple(g for g in range(n) if mask >> g & 1))
                    for mask in masks
                ]
            self.best.append(by_count)

    def run(self, pattern: tuple[int, ...], level: int = 0) -> Run:
        """A run in one domain of the lowest level possible, or from level 1 on across the level.

        Larger counts come first and take the host with the fastest subset of the size: what a host
        holds back says nothing about the network. Empty if no domain has enough GPUs.
        """
        cluster, domain = self.cluster, self.cluster.network_levels.domain
        for number in (level,) if level else range(len(domain)):
            for d in range(int(domain[number].max()) + 1):
                hosts = np.flatnonzero(domain[number] == d).tolist()
                part = domain[max(level - 1, 0), hosts].tolist()
                turn = {h: part[:i].count(part[i]) * bool(level) for i, h in enumerate(hosts)}
                run: list[int] = []
                for count in pattern:
                    able = [h for h in hosts if cluster.sizes[h] >= count and h not in run]
                    rank = {h: (turn[h], -self.best[cluster.type_of[h]][count][0]) for h in able}
                    run += [min(able, key=rank.__getitem__)] if able else []
                across = not level or len({*domain[level - 1, run].tolist()}) > 1
                if len(run) == len(pattern) and across:
                    return tuple(
                        (cluster.hosts[h].name, self.best[cluster.type_of[h]][count][1])
                        for h, count in zip(run, pattern, strict=True)
                    )
        return ()
