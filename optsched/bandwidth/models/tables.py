"""Bandwidths by counts as arrays: what the kernels read in place of a model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.bandwidth.models.patterns import automaton
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET, subset_sizes
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT
from optsched.bandwidth.topology.state import host_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.models.patterns import Automaton
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

MOST_BOUNDS: Final = 4_000_000
"""Bounds by state and GPUs left; above, they are kept by hosts and least part."""

SIZE: Final = np.dtype([(name, np.int64) for name in ("hosts", "width", "columns", "stride")])
"""`width`: most GPUs a host + 1. `columns`: length of a row of bounds; 1: of every state a place,
and `stride` times GPUs left behind it is the most that patterns of that size, with no fewer hosts
and no larger least part, allow."""

HOST: Final = np.dtype([
    (name, np.int64) for name in ("gpus", "by_mask", "kind", "within", "best", "whole", "left",
                                  "joint")
])  # fmt: skip
"""A host: `by_mask` is 0 if its free GPUs are only counted. The others say where in the values its
numbers begin: bandwidths within it by mask (or count), the best by free mask and count, both
weights of leftovers by mask, and joint allocations by count."""


class TableArrays(NamedTuple):
    """A model's numbers as kernels read them."""

    step: IntArray
    """State of the automaton after ``state * width + count``."""
    network: IntArray
    bound: IntArray
    host: np.ndarray[Any, np.dtype[np.void]]
    values: IntArray
    size: np.ndarray[Any, np.dtype[np.void]]
    factor: IntArray
    """By level in millionths; 0 behind the last: hosts that are not joined."""
    uplink: IntArray


WHOLE_HOST: Final = 1 << 50
"""Weight of a host left entirely free: above every sum of pairs."""


@dataclass(frozen=True)
class CountTables:
    """B(S) = min(network[pattern of S], intra of every host) as integers, kB/s.

    `network` by state of the automaton; `intra` by type of host, None where nothing limits.
    """

    cluster: Cluster
    network: IntArray
    intra: tuple[IntArray | None, ...]
    arrays: TableArrays

    @cached_property
    def automaton(self) -> Automaton:
        """Reads the counts of hosts."""
        return automaton(self.cluster.n_hosts, int(self.cluster.sizes.max()))

    @classmethod
    def of(
        cls, cluster: Cluster, network: IntArray, intra: Sequence[IntArray | None]
    ) -> CountTables:
        """Pack a model's numbers; `network` by state, `intra` by type as in `IntraTable.values`."""
        machine = automaton(cluster.n_hosts, int(cluster.sizes.max()))
        width = machine.step.shape[1]
        single = _single(machine, network)
        bound = _bounds(machine, network)
        columns = bound.shape[1] if bound.ndim == 2 else 1
        parts: list[IntArray] = []
        records, offset = [], 0
        for t, kind in enumerate(cluster.types):
            n = kind.gpus
            by_mask = n <= MOST_BY_SUBSET
            limits, known = within_limits(n, intra[t], by_mask, single)
            best, worth = best_by_count(limits, n, by_mask), best_by_count(known, n, by_mask)
            whole, left = _weights(known, worth, n, by_mask)
            joint = limits[(1 << np.arange(n + 1)) - 1] if by_mask else limits
            record = [n, int(by_mask), t]
            for part in (limits, best, whole, left, joint):
                record.append(offset)
                parts.append(part)
                offset += len(part)
            records.append(tuple(record))
        levels = cluster.network_levels
        arrays = TableArrays(
            machine.step.reshape(-1), network, bound.reshape(-1),
            np.array([records[t] for t in cluster.type_of], HOST),
            np.concatenate(parts).astype(np.int64),
            np.array([(cluster.n_hosts, width, columns, (cluster.n_hosts + 1) * width)], SIZE),
            np.append(levels.factor, 0), np.append(levels.uplink, MOST),
        )  # fmt: skip
        for array in arrays:
            array.flags.writeable = False
        return cls(cluster, network, tuple(intra), arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        return CountTables.of, (self.cluster, self.network, self.intra)

    @property
    def sha256(self) -> str:
        """Hash of all numbers, 64 hexadecimal digits."""
        return hashlib.sha256(b"".join(array.tobytes() for array in self.arrays)).hexdigest()

    def value(self, gpus: tuple[int, ...]) -> int:
        """Return B(S) of one set by global numbers, -1 if it is not measured.

        A fifth of the time of the model's `of_sets`: a scheduler evaluates one new job at a time.
        """
        step, values, width = self.arrays.step, self.arrays.values, self._width
        state, least = 0, NO_LIMIT
        counts, parts = host_counts(self.cluster, gpus)
        for host, count in counts.items():
            state = int(step[state * width + count])
            least = min(least, int(values[self._within[host] + parts[host]]))
        found = min(int(self.network[state]), least)
        levels = self.cluster.network_levels
        if found > 0 and len(counts) > 1 and levels.matter:
            row = np.zeros((1, self.cluster.n_hosts), np.int64)
            row[0, list(counts)] = list(counts.values())
            value, n, hosts = (np.array([number]) for number in (found, len(gpus), len(counts)))
            found = int(levels.limited(value, n, hosts, levels.lowest(row))[0])
        return found

    @cached_property
    def _width(self) -> int:
        return int(self.arrays.size["width"][0])

    @cached_property
    def _within(self) -> list[int]:
        return list(map(int, self.arrays.host["within"]))

    def best_within(self, host: int, free: int) -> IntArray:
        """Best bandwidths by count of a host's free GPUs (mask, or number), -1 if too few."""
        n = int(self.arrays.host["gpus"][host])
        return self.arrays.values[int(self.arrays.host["best"][host]) + free * (n + 1) :][: n + 1]

    def best(self, host: int, free: int, count: int) -> int:
        """The best bandwidth of `count` free GPUs of a host, by the network too; -1 if too few."""
        row = self.best_within(host, free)
        if count >= len(row):
            return -1
        return min(int(row[count]), int(self.network[self.automaton.step[0, count]]))

    def best_subset(self, host: int, free: int, count: int) -> int:
        """The best `count` of a host's free GPUs, both as masks; of equals the lowest ids."""
        best, chosen = -1, 0
        sub = free
        while sub:
            if sub.bit_count() == count:
                value = int(self.arrays.values[self._within[host] + sub])
                lower = (sub ^ chosen) & -(sub ^ chosen) & sub
                if value > best or (value == best and lower):
                    best, chosen = value, sub
            sub = (sub - 1) & free
        return chosen


def _single(machine: Automaton, network: IntArray) -> IntArray:
    """Limit of c GPUs of one host by the network's table; 0 where it has none."""
    values = np.zeros(machine.step.shape[1], np.int64)
    for c in range(2, len(values)):
        value = int(network[machine.step[0, c]])
        values[c] = value if 0 < value < NO_LIMIT else 0
    return values


def _bounds(machine: Automaton, network: IntArray) -> IntArray:
    """Highest limit of all patterns that complete a state by so many GPUs; -1 if there is none."""
    states, hosts = machine.patterns.shape
    most = machine.step.shape[1] - 1
    columns = hosts * most + 1
    if states * columns > MOST_BOUNDS:
        return _coarse_bounds(machine, network)
    bound = np.full((states, columns), -1, np.int64)
    bound[:, 0] = network
    used = (machine.patterns > 0).sum(axis=1)
    for h in range(hosts - 1, -1, -1):
        rows = np.flatnonzero(used == h)
        for c in range(1, most + 1):
            after = bound[machine.step[rows, c], : columns - c]
            bound[rows, c:] = np.maximum(bound[rows, c:], after)
    return bound


def _coarse_bounds(machine: Automaton, network: IntArray) -> IntArray:
    """By state its place behind the states; there by size, hosts and least part the most, or -1."""
    states, hosts = machine.patterns.shape
    width = machine.step.shape[1]
    most = np.full((hosts * (width - 1) + 1, hosts + 1, width), -1, np.int64)
    sizes, used = machine.patterns.sum(axis=1), (machine.patterns > 0).sum(axis=1)
    least = np.where(machine.patterns > 0, machine.patterns, width - 1).min(axis=1)
    np.maximum.at(most, (sizes, used, least), network)
    most = np.maximum.accumulate(most[:, ::-1], axis=1)[:, ::-1]  # no fewer hosts
    most = np.maximum.accumulate(most, axis=2)  # no larger least part
    places = states + np.ravel_multi_index((sizes, used, least), most.shape)
    return np.concatenate([places, most.reshape(-1)])


def within_limits(
    n: int, given: IntArray | None, by_mask: bool, single: IntArray | None = None
) -> tuple[IntArray, IntArray]:
    """Intra limits, and what is known of them for judging leftovers; by mask or by count."""
    sizes = subset_sizes(n) if by_mask else np.arange(n + 1)
    if given is None:
        limits = np.full(len(sizes), NO_LIMIT, np.int64)
        known = sizes if single is None else single[sizes].copy()
    else:
        limits = given[sizes] if len(given) == n + 1 else given.copy()
        known = limits.copy()
    limits[sizes <= 1] = NO_LIMIT
    known[sizes <= 1] = 0
    return limits, known


def best_by_count(limits: IntArray, n: int, by_mask: bool) -> IntArray:
    """Best value of a subset by (free, count), flat; -1 where there are too few."""
    if not by_mask:
        table = np.full((n + 1, n + 1), -1, np.int64)
        for free in range(n + 1):
            table[free, : free + 1] = limits[: free + 1]
        return table.reshape(-1)
    sizes = subset_sizes(n)
    table = np.full((1 << n, n + 1), -1, np.int64)
    table[np.arange(1 << n), sizes] = limits
    for i in range(n):  # the best of a mask is that of the mask itself, or of it without one GPU
        view = table.reshape(1 << (n - 1 - i), 2, 1 << i, n + 1)
        np.maximum(view[:, 1], view[:, 0], out=view[:, 1])
    return table.reshape(-1)


def _weights(known: IntArray, best: IntArray, n: int, by_mask: bool) -> tuple[IntArray, IntArray]:
    """How much what is left of a host is worth, in two integers; see subset choice, ties."""
    sums = np.maximum(best.reshape(-1, n + 1), 0).sum(axis=1)
    if not by_mask:
        pairs = np.arange(n + 1) // 2 * (known[2] if n >= 2 else 0)
        pairs[n] += WHOLE_HOST
        return pairs, sums
    pair = np.zeros((n, n), np.int64)
    for i in range(n):
        for k in range(i):
            pair[i, k] = known[1 << i | 1 << k]
    matching = np.zeros(1 << n, np.int64)
    for i in range(n):  # masks with highest GPU i: it stays single, or has a partner below
        low = np.arange(1 << i)
        value = matching[low].copy()
        for k in range(i):
            has = low[low >> k & 1 == 1]
            value[has] = np.maximum(value[has], matching[has ^ (1 << k)] + pair[i, k])
        matching[1 << i : 2 << i] = value
    matching[-1] += WHOLE_HOST
    return matching, sums
