"""Bandwidths by counts as arrays: what the kernels read in place of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.patterns import automaton
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET, subset_sizes
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.bandwidth.topology.state import host_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.models.patterns import Automaton
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.policy import Policy
    from optsched.model.schedule import IntArray

# one array of integers holds everything: a kernel's call costs a microsecond for every few arrays
HOSTS: Final = 0
WIDTH: Final = 1
"""Most GPUs a host + 1: length of a row of `STEP`."""
STEP: Final = 2
"""Where ``step[state, count]`` begins."""
NETWORK: Final = 3
"""Where the limits of the network by state begin."""
RECORDS: Final = 4
"""Where the records of the hosts begin, `RECORD` numbers each."""
BOUND: Final = 5
"""Where ``bound[state, GPUs left]`` begins: the most that any completion's pattern allows."""
COLUMNS: Final = 6
"""Length of a row of `BOUND`; 1: of every state a place, and `STRIDE` times GPUs left behind it is
the most that patterns of that size, with no fewer hosts and no larger least part, allow."""
STRIDE: Final = 7
HEADER: Final = 8

MOST_BOUNDS: Final = 4_000_000
"""Numbers in `BOUND` by state and GPUs left; above, they are kept by hosts and least part."""

GPUS: Final = 0
BY_MASK: Final = 1
"""1 if the free GPUs of a host are a mask, 0 if they are only counted."""
INTRA: Final = 2
"""Where intra bandwidths by mask (or count) begin."""
BEST: Final = 3
"""Where the best intra bandwidths begin: by free mask (or count), then by count."""
WHOLE: Final = 4
"""Where the weights of what is left begin: whole host and NVLink pairs; by mask (or count)."""
LEFT: Final = 5
"""Where the second weights begin: the sum of best bandwidths of every count that is left."""
KIND: Final = 6
JOINT: Final = 7
"""Where the bandwidths of joint allocations begin, by count: of the first, and of the best GPUs."""
RECORD: Final = 8

WHOLE_HOST: Final = 1 << 50
"""Weight of a host left entirely free: above every sum of pairs."""


@dataclass(frozen=True)
class CountTables:
    """B(S) = min(network[pattern of S], intra of every host) as integers, kB/s.

    Parameters
    ----------
    cluster
        Whose hosts they are.
    network
        Limit by state of the automaton.
    intra
        By type of host: values by subset or by count; None where nothing within a host limits.
    words
        All of it in one array; the names of the places are those of this module.
    """

    cluster: Cluster
    network: IntArray
    intra: tuple[IntArray | None, ...]
    words: IntArray

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
        single = _single(machine, network)
        bound = _bounds(machine, network)
        columns = bound.shape[1] if bound.ndim == 2 else 1
        parts = [machine.step.reshape(-1), network, bound.reshape(-1)]
        offset = HEADER + sum(len(part) for part in parts)
        records = []
        for t, kind in enumerate(cluster.types):
            n = kind.gpus
            by_mask = n <= MOST_BY_SUBSET
            limits, known = _limits(n, intra[t], by_mask, single)
            best, worth = _best(limits, n, by_mask), _best(known, n, by_mask)
            whole, left = _weights(known, worth, n, by_mask)
            record = [n, int(by_mask)]
            joint = np.tile(limits, 2)
            if by_mask:
                joint = np.append(limits[(1 << np.arange(n + 1)) - 1], best[-n - 1 :])
            for part in (limits, best, whole, left, joint):
                record.append(offset)
                parts.append(part)
                offset += len(part)
            records.append([*record[:-1], t, record[-1]])
        parts.append(np.array([records[t] for t in cluster.type_of], np.int64).reshape(-1))
        begin = HEADER + len(parts[0])
        header = np.array(
            [
                cluster.n_hosts, machine.step.shape[1], HEADER, begin, offset,
                begin + len(network), columns, (cluster.n_hosts + 1) * machine.step.shape[1],
            ]
        )  # fmt: skip
        words = np.concatenate([header, *parts]).astype(np.int64)
        words.flags.writeable = False
        return cls(cluster, network, tuple(intra), words)

    def ruled(self, policy: Policy) -> CountTables:
        """The same for choices that obey the rules on parts of hosts: others have -1."""
        key = policy.within, policy.whole
        if key == (None, None):
            return self
        if key not in self._ruled:
            words = self.words.copy()
            records = words[words[RECORDS] :][: len(self.cluster.hosts) * RECORD]
            for record in np.unique(records.reshape(-1, RECORD), axis=0).tolist():
                n, at, best = record[GPUS], record[INTRA], record[BEST]
                allowed = policy.allowed(self.cluster.types[record[KIND]])
                assert allowed is not None
                limits = np.where(allowed, words[at : at + (1 << n)], -1)
                words[at : at + (1 << n)] = limits
                words[best : best + ((n + 1) << n)] = _best(limits, n, by_mask=True)
            words.flags.writeable = False
            self._ruled[key] = replace(self, words=words)
        return self._ruled[key]

    @cached_property
    def _ruled(self) -> dict[tuple[str | None, str | None], CountTables]:
        return {}

    def value(self, gpus: tuple[int, ...]) -> int:
        """B(S) of one set by global numbers, as the model has it; -1 if it is not measured."""
        words, state, least = self.words, 0, NO_LIMIT
        step, width, records, network = words[[STEP, WIDTH, RECORDS, NETWORK]].tolist()
        counts, parts = host_counts(self.cluster, gpus)
        for host, count in counts.items():
            state = int(words[step + state * width + count])
            least = min(least, int(words[words[records + host * RECORD + INTRA] + parts[host]]))
        return min(int(words[network + state]), least)

    def best(self, host: int, free: int, count: int) -> int:
        """The best bandwidth of `count` of a host's free GPUs (mask, or number), -1 if too few.

        The network's limit on a single host counts too.
        """
        record = self.words[self.words[RECORDS] + host * RECORD :][:RECORD]
        n = int(record[GPUS])
        if count > n:
            return -1
        intra = int(self.words[record[BEST] + free * (n + 1) + count])
        return min(intra, int(self.network[self.automaton.step[0, count]]))

    def best_subset(self, host: int, free: int, count: int) -> int:
        """The best `count` of a host's free GPUs, both as masks; of equals the lowest ids."""
        record = self.words[self.words[RECORDS] + host * RECORD :][:RECORD]
        n = int(record[GPUS])
        best, chosen = -1, 0
        sub = free
        while sub:
            if sub.bit_count() == count:
                value = int(self.words[record[INTRA] + sub])
                lower = (sub ^ chosen) & -(sub ^ chosen) & sub
                if value > best or (value == best and lower):
                    best, chosen = value, sub
            sub = (sub - 1) & free
        assert n <= MOST_BY_SUBSET
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


def _limits(
    n: int, given: IntArray | None, by_mask: bool, single: IntArray
) -> tuple[IntArray, IntArray]:
    """Intra limits, and what is known of them for judging leftovers; by mask or by count."""
    sizes = subset_sizes(n) if by_mask else np.arange(n + 1)
    if given is None:
        limits = np.full(len(sizes), NO_LIMIT, np.int64)
        known = single[sizes]
    else:
        limits = given[sizes] if len(given) == n + 1 else given.copy()
        known = limits.copy()
    limits[sizes <= 1] = NO_LIMIT
    known[sizes <= 1] = 0
    return limits, known


def _best(limits: IntArray, n: int, by_mask: bool) -> IntArray:
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
    for i in range(n):  # masks whose highest GPU is i: it stays single, or has a partner below
        low = np.arange(1 << i)
        value = matching[low].copy()
        for k in range(i):
            has = low[low >> k & 1 == 1]
            value[has] = np.maximum(value[has], matching[has ^ (1 << k)] + pair[i, k])
        matching[1 << i : 2 << i] = value
    matching[-1] += WHOLE_HOST
    return matching, sums
