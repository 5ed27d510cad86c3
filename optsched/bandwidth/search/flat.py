"""Exact choice of k GPUs on a flat idle cluster of many hosts: by the patterns of k.

The network's limit depends on the pattern only. So go through the partitions of k by falling limit
until it is not above the best value; in each, hosts take parts so that the worst bandwidth within
a host is as high as can be. Whether a threshold can be kept is Hall's condition over the distinct
parts: any of them, with their multiplicities, have at least as many hosts that accept one of them.
"""

# numba compiles the kernels: they are typed by signatures
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.search.counts import popcount
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT, UNMEASURED
from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    from optsched.bandwidth.models.model import CountModel
    from optsched.model.schedule import IntArray

MOST_PARTITIONS: Final = 400_000
"""Partitions of k up to which they are listed."""

MOST_PART: Final = 62
"""Largest part: sets of parts are bits of one integer."""

_BATCH: Final = 1 << 22
"""Numbers in one batch of patterns that a model is asked for."""


class FlatSearch:
    """Chooses by patterns; the patterns of every k are listed once.

    Parameters
    ----------
    model
        Any number of hosts.
    policy
        Its rules on parts of hosts are obeyed.
    """

    def __init__(self, model: CountModel, policy: Policy | None = None) -> None:
        self.model, self.policy = model, policy or Policy()
        self._tables: dict[tuple[int, bool], IntArray] = {}
        self._listed: dict[tuple[int, int], tuple[IntArray, IntArray]] = {}

    def best_counts(
        self, rows: IntArray, k: int, price: IntArray, most_patterns: int | None = None
    ) -> tuple[IntArray | None, int] | None:
        """Best counts of k >= 2 GPUs, and their value; None and -1 if no pattern is measured.

        Parameters
        ----------
        rows
            Best bandwidth within a host by number of GPUs taken, -1 where too few are free.
        k
            GPUs.
        price
            Cheap hosts are taken first.
        most_patterns
            Up to so many patterns are listed, if they are not yet; with more, or with parts above
            62, there is no answer (None).
        """
        limit = MOST_PARTITIONS if most_patterns is None else most_patterns
        for most in (rows.shape[1] - 1, max(1, *np.flatnonzero((rows >= 0).any(axis=0)))):
            listed = (k, most) in self._listed
            if most <= MOST_PART and (listed or count_partitions(k, most) <= limit):
                break
        else:
            return None
        parts, limits = self.partitions(k, most)
        rows = np.ascontiguousarray(rows[:, : most + 1])
        classes, sizes = np.unique(rows, axis=0, return_counts=True)
        found = np.zeros(2, np.int64)
        value = int(
            search_partitions(
                parts.reshape(-1), limits, most, classes.reshape(-1), sizes.astype(np.int64), found
            )
        )
        return None if value < 0 else _assigned(rows, parts[found[0]], value, price), value

    def partitions(self, k: int, most: int) -> tuple[IntArray, IntArray]:
        """Partitions of k by falling limit, measured ones only, and limits of the network.

        A row is how often every part 1..most occurs, shape (n, most).
        """
        if (k, most) not in self._listed:
            hosts = self.model.cluster.n_hosts
            parts = partitions(k, most, hosts)
            limits = self._limits(parts, k)
            order = np.argsort(-limits, kind="stable")
            order = order[limits[order] != UNMEASURED]
            self._listed[k, most] = np.ascontiguousarray(parts[order]), limits[order]
        return self._listed[k, most]

    def _limits(self, parts: IntArray, k: int) -> IntArray:
        """The network's limit of every row, asked in batches."""
        width = max(1, int(parts.sum(axis=1).max(initial=1)))
        falling = np.cumsum(parts[:, ::-1], axis=1)  # hosts with at least most, most - 1, ... GPUs
        found = [np.zeros(0, np.int64)]
        step = max(1, _BATCH // width)
        for begin in range(0, len(parts), step):
            rows = falling[begin : begin + step]
            patterns = np.zeros((len(rows), width), np.int64)
            for column in range(rows.shape[1]):
                patterns[np.arange(width) < rows[:, column : column + 1]] += 1
            found.append(self.model.network(patterns))
        return np.concatenate(found)

    def best_rows(self, kinds: IntArray, masks: IntArray, most: int) -> IntArray:
        """Best bandwidth within hosts by number of free GPUs taken, -1: too few are free.

        `kinds`: their types in the model's cluster; `masks`: their free GPUs.
        """
        pairs = np.stack([kinds, masks], axis=1)
        distinct, of = np.unique(pairs, axis=0, return_inverse=True)
        rows = np.full((len(distinct), most + 1), -1, np.int64)
        for kind in np.unique(kinds):
            n = self.model.cluster.types[kind].gpus
            its = np.flatnonzero(distinct[:, 0] == kind)
            free = np.ascontiguousarray(distinct[its, 1])
            part = np.full(len(its) * (most + 1), -1, np.int64)
            best_of_masks(self._table(int(kind)), n, int(n <= MOST_BY_SUBSET), free, most, part)
            rows[its] = part.reshape(len(its), most + 1)
        return np.asarray(rows[of.reshape(-1)])

    def _table(self, kind: int, ruled: bool = True) -> IntArray:
        """Bandwidths within a type by mask, or by count beyond 16 GPUs; 0 and 1 GPU: no limit.

        With the policy's rules -1 where they forbid a mask.
        """
        if (kind, ruled) not in self._tables:
            n = self.model.cluster.types[kind].gpus
            given = self.model.intra_of(kind)
            sizes = np.arange(n + 1)
            if n <= MOST_BY_SUBSET:
                sizes = np.array([mask.bit_count() for mask in range(1 << n)])
            limits = np.full(len(sizes), NO_LIMIT, np.int64)
            if given is not None:
                limits[:] = given[sizes] if len(given) == n + 1 else given
            limits[sizes <= 1] = NO_LIMIT
            allowed = self.policy.allowed(self.model.cluster.types[kind]) if ruled else None
            self._tables[kind, ruled] = limits if allowed is None else np.where(allowed, limits, -1)
        return self._tables[kind, ruled]

    def lowest(self, kind: int, free: int, count: int, value: int) -> int:
        """The lowest ids of a host's free GPUs, so many of them, with this bandwidth, as a mask."""
        table = self._table(kind)
        bits = [1 << i for i in range(free.bit_length()) if free >> i & 1]
        masks = map(sum, combinations(bits, count))
        return next(mask for mask in masks if table[mask] >= value)

    def joint_row(self, kind: int, fill: str) -> IntArray:
        """Bandwidth of joint allocations within a host, by number of GPUs."""
        table, n = self._table(kind, ruled=False), self.model.cluster.types[kind].gpus
        if n > MOST_BY_SUBSET:
            return table
        if fill == "first":
            return np.asarray(table[(1 << np.arange(n + 1)) - 1])
        best = np.zeros(n + 1, np.int64)
        np.maximum.at(best, [mask.bit_count() for mask in range(1 << n)], table)
        return best


def _assigned(rows: IntArray, parts: IntArray, value: int, price: IntArray) -> IntArray:
    """Counts by host: these parts, each where it has the value, on cheap hosts first."""
    counts = np.zeros(len(rows), np.int64)
    left = parts.copy()
    accepted = accepts(rows, value)
    waiting, numbers = np.unique(accepted, return_counts=True)
    number = numbers.astype(np.int64)
    for h in np.argsort(price, kind="stable").tolist():
        if not left.any():
            break
        number[np.searchsorted(waiting, accepted[h])] -= 1
        for part in np.flatnonzero(left).tolist():
            if accepted[h] >> part & 1:
                left[part] -= 1
                if keeps(left, waiting, number):
                    counts[h] = part + 1
                    break
                left[part] += 1
    return counts


def count_partitions(k: int, most: int) -> int:
    """Number of partitions of k into parts up to `most`."""
    ways = [1] + [0] * k
    for part in range(1, most + 1):
        for n in range(part, k + 1):
            ways[n] += ways[n - part]
    return ways[k]


def partitions(k: int, most: int, hosts: int) -> IntArray:
    """Partitions of k into at most `hosts` parts up to `most`: how often each part occurs.

    Raises
    ------
    InputError
        There are too many, or the parts are too large.
    """
    if most > MOST_PART:
        raise InputError(f"k: parts up to {most} are too large for this search, it has {MOST_PART}")
    number = count_partitions(k, most)
    if number > MOST_PARTITIONS:
        raise InputError(
            f"k: {k} GPUs on hosts of up to {most} have {number} patterns, more than "
            f"{MOST_PARTITIONS}; ask for fewer, or give the cluster pods"
        )
    used = np.zeros((1, most), np.int64)
    left = np.array([k], np.int64)
    for part in range(most, 0, -1):
        room = hosts - used.sum(axis=1)
        highest = np.minimum(left // part, room)
        lowest = highest if part == 1 else np.zeros_like(highest)
        keep = left <= room * part  # even if all hosts that are left take this part
        used, left, highest, lowest = used[keep], left[keep], highest[keep], lowest[keep]
        repeats = highest - lowest + 1
        rows = np.repeat(np.arange(len(used)), repeats)
        times = np.arange(len(rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        times += lowest[rows]
        used = used[rows]
        used[:, part - 1] = times
        left = left[rows] - times * part
    return np.ascontiguousarray(used[left == 0])


def accepts(rows: IntArray, value: int) -> IntArray:
    """By row the parts whose best bandwidth is `value` or more, bit c - 1 for part c."""
    bits = 1 << np.arange(rows.shape[1] - 1)
    return np.asarray((rows[:, 1:] >= value) @ bits, np.int64)


@entry(INT, READ, INT, INT, READ, INT, INTS)
def best_of_masks(table, n, by_mask, masks, most, rows):  # type: ignore[no-untyped-def]
    """Fill rows of most + 1 numbers: best bandwidth of every number of each mask's GPUs."""
    width = most + 1
    for i in range(len(masks)):
        free = masks[i]
        rows[i * width] = NO_LIMIT
        if by_mask == 0:
            for count in range(1, min(most, free) + 1):
                rows[i * width + count] = table[count]
            continue
        sub = free
        while sub > 0:
            count = popcount(sub)
            if count <= most:
                rows[i * width + count] = max(rows[i * width + count], table[sub])
            sub = (sub - 1) & free
    return n


@entry(INT, READ, READ, READ)
def keeps(parts, accepted, number):  # type: ignore[no-untyped-def]
    """Hall's condition: 1 if hosts can take all parts, each host at most one that it accepts.

    parts: how often every part occurs. accepted: sets of parts. number: hosts with such a set.
    """
    distinct = np.empty(len(parts), np.int64)
    n = 0
    for c in range(len(parts)):
        if parts[c] > 0:
            hosts = 0
            for g in range(len(accepted)):
                if accepted[g] >> c & 1:
                    hosts += number[g]
            if hosts < parts[c]:
                return 0
            distinct[n], n = c, n + 1
    for some in range(1, 1 << n):
        wanted, asked, hosts = 0, 0, 0
        for i in range(n):
            if some >> i & 1:
                wanted |= 1 << distinct[i]
                asked += parts[distinct[i]]
        for g in range(len(accepted)):
            if (accepted[g] & wanted) != 0:
                hosts += number[g]
                if hosts >= asked:
                    break
        if hosts < asked:
            return 0
    return 1


@helper(INT, READ, INT, INT, INTS)
def _accept(classes, width, value, accepted):  # type: ignore[no-untyped-def]
    """Fill in the sets of parts that classes of hosts accept with a threshold."""
    for i in range(len(accepted)):
        accepted[i] = 0
        for c in range(1, width):
            if classes[i * width + c] >= value:
                accepted[i] |= 1 << c - 1
    return 0


@helper(INT, INTS, READ, INTS, INTS)
def _grouped(accepted, sizes, sets, number):  # type: ignore[no-untyped-def]
    """Distinct sets and how many hosts have each; their number."""
    order = np.argsort(accepted)
    n = 0
    for i in range(len(order)):
        mask = accepted[order[i]]
        if n == 0 or sets[n - 1] != mask:
            sets[n], number[n], n = mask, 0, n + 1
        number[n - 1] += sizes[order[i]]
    return n


@entry(INT, READ, READ, INT, READ, READ, INTS)
def search_partitions(parts, limits, most, classes, sizes, found):  # type: ignore[no-untyped-def]
    """Best value of partitions in order of falling limits, -1 if there is none; found[0]: which.

    parts: rows of `most` numbers. classes: best bandwidth by number of GPUs, rows of most + 1, of
    sizes[i] hosts each.
    """
    n_classes, width = len(sizes), most + 1
    accepted, sets = np.empty(n_classes, np.int64), np.empty(n_classes, np.int64)
    number = np.empty(n_classes, np.int64)
    levels = np.unique(classes)
    best = -1
    _accept(classes, width, 0, accepted)
    n_sets = _grouped(accepted, sizes, sets, number)
    for i in range(len(limits)):
        limit = min(limits[i], MOST - 1)
        if limit <= best:
            break
        row = parts[i * most : (i + 1) * most]
        if keeps(row, sets[:n_sets], number[:n_sets]) == 0:
            continue
        low, high = int(np.searchsorted(levels, best + 1)), len(levels) - 1
        while low < high:  # the highest level of bandwidths within hosts that can be kept
            middle = (low + high + 1) // 2
            _accept(classes, width, levels[middle], accepted)
            n_sets = _grouped(accepted, sizes, sets, number)
            if levels[low] >= limit:
                break
            if keeps(row, sets[:n_sets], number[:n_sets]) == 1:
                low = middle
            else:
                high = middle - 1
        best, found[0] = min(limit, levels[low]), i
        _accept(classes, width, best + 1, accepted)
        n_sets = _grouped(accepted, sizes, sets, number)
    return best
