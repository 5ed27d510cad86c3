"""A request for k GPUs on some hosts of a large cluster: values, bounds, candidates."""

from __future__ import annotations

import time
from functools import cached_property
from heapq import heappop, heappush
from itertools import count as count_up
from itertools import islice
from math import comb
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.models.contention import interferes
from optsched.bandwidth.search.ask import Answer, domain_numbers, gpus_of
from optsched.bandwidth.search.thresholds import best_by_line_rate, bound_within, even, fill, line
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.rates import NO_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from optsched.bandwidth.search.host_limits import HostLimits
    from optsched.bandwidth.topology.policy import Bounds, Policy
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

FEW_PATTERNS: Final = 20_000
"""Patterns that are listed although a deadline is near."""

_FIRST_CHUNK: Final = 4
_CHUNK: Final = 64
"""Count vectors judged between two looks at the clock: at first, and twice as many each time."""

MOST_JUDGED: Final = 20_000
"""Count vectors that are judged where no deadline is given."""

MOST_EVERY: Final = 5_000
"""Count vectors up to which all are judged."""

_MOST_NODES: Final = 2_000
"""Of branch and bound over jobs, opened and looked at."""

_SEEDS: Final = 32
"""Hosts from which sets of hosts with common jobs are grown."""

_MORE: Final = 4
"""Further hosts that such a set is tried with."""

_SOURCES: Final = 24
"""Hosts, those with the most demand, from which the local search takes GPUs."""

_TARGETS: Final = 48
"""Hosts, those with the least demand, to which it moves them."""


class Ground:
    """A request on some hosts: columns are these, and behind them others that jobs hold."""

    def __init__(
        self,
        search: HostLimits,
        state: ClusterState,
        hosts: list[int],
        k: int,
        demands: Sequence[int],
        policy: Policy,
        bounds: Bounds,
    ) -> None:
        self.search, self.state, self.k, self.policy = search, state, k, policy
        self.jobs = [j for j, may in enumerate(interferes(state)) if may and demands[j] > 0]
        self.judged = 0
        self.demands = np.array([demands[j] for j in self.jobs], np.int64)
        theirs = np.flatnonzero(state.held[self.jobs].any(axis=0)) if self.jobs else ()
        there = set(hosts)
        self.hosts = np.array([*hosts, *(h for h in theirs if h not in there)], np.int64)
        self.n = len(hosts)
        self.held = state.held[self.jobs][:, self.hosts]
        self.on = [np.flatnonzero(held) for held in self.held]
        self.room: IntArray = np.zeros(len(self.hosts), np.int64)
        self.least, most = bounds.least[hosts], np.minimum(bounds.most[hosts], k)
        self.room[: self.n] = np.minimum(state.room[hosts], most)
        self.rows = search.rows(state, np.array(hosts, np.int64), k)
        """Best bandwidth within a host by number of its free GPUs taken; -1: not possible."""
        self.rows[np.arange(self.rows.shape[1]) > most[:, None]] = -1
        if policy.slice_size is not None and policy.slice_level == "host":
            self.rows[:, np.arange(self.rows.shape[1]) % policy.slice_size > 0] = -1
        self.shared: Bools = np.asarray((self.held[:, : self.n] > 0).any(axis=0))
        self.price: IntArray = self.demands @ (self.held[:, : self.n] > 0) + self.shared
        """Demand of the jobs on a host, 0 where there are none."""

    # judging count vectors

    def values(self, counts: IntArray) -> tuple[IntArray, IntArray]:
        """What rows of counts get, and what they had alone; -1 where a pattern is unmeasured."""
        within = np.full(counts.shape, NO_LIMIT)
        within[:, : self.n] = self.rows[np.arange(self.n), counts[:, : self.n]]
        own = self.worth(counts, within)
        own[within.min(axis=1) < 0] = -1  # a rule on parts of hosts forbids it
        capacity, demand = np.full(len(counts), NO_LIMIT), np.zeros(len(counts), np.int64)
        across = (counts > 0).sum(axis=1) >= 2
        sure = own >= 0
        quick = self.search.rates is not None
        least = _Least(self._limits, counts) if quick else None
        for j, on in enumerate(self.on):
            at = np.flatnonzero(across & (counts[:, on] > 0).any(axis=1))
            if not len(at):
                continue
            held = self.held[j]
            if least is not None:
                rate, within, m = least.beside(at, on, held[on])
                joint = np.minimum(line(rate, counts[at].sum(axis=1) + held.sum(), m), within)
            else:
                joint = self._joint(counts[at] + held)
            sure[at] &= joint >= 0
            capacity[at] = np.minimum(capacity[at], joint)
            demand[at] += self.demands[j]
        total = own + demand
        tight = sure & (total > capacity) & (total > 0)
        value = own.copy()
        value[tight] = own[tight] * capacity[tight] // total[tight]
        value[~sure] = -1
        return value, own

    @cached_property
    def _limits(self) -> Floats:
        """Of joint allocations by host and number of GPUs: rate to the network, limit within."""
        rates = self.search.rates
        assert rates is not None
        limits = np.full((2, *self._joint_rows.shape), np.inf)
        limits[0, :, 1:], limits[1, :, 1:] = rates[1:], self._joint_rows[:, 1:]
        return limits

    def _joint(self, counts: IntArray) -> IntArray:
        return self.worth(counts, self._joint_rows[np.arange(len(self.hosts)), counts])

    def worth(self, counts: IntArray, within: IntArray) -> IntArray:
        """B(S) by counts of hosts and what these allow; -1 where a pattern is unmeasured."""
        limit = self._network(counts)
        return np.where(limit < 0, -1, np.minimum(limit, within.min(axis=1)))

    @cached_property
    def _joint_rows(self) -> IntArray:
        """Bandwidth within a host of joint allocations, by number of GPUs."""
        return self.search.joint_rows(self.hosts, "first")

    def _network(self, counts: IntArray) -> IntArray:
        rates = self.search.rates
        if rates is None:
            falling = -np.sort(-counts.astype(np.int16), axis=1, kind="stable")
            falling = falling[:, : max(1, int((falling > 0).sum(axis=1).max(initial=0)))]
            rows, at = np.unique(falling, axis=0, return_inverse=True)
            known: IntArray = self.search.flat[0].model.network(rows.astype(np.int64))
            return known[at.reshape(-1)]
        used = counts > 0
        m, n = used.sum(axis=1), counts.sum(axis=1)
        least = np.where(used, rates[counts], np.inf).min(axis=1)
        limit: IntArray = np.full(len(counts), NO_LIMIT)
        limit[n < 2] = 0
        several = m >= 2
        limit[several] = line(least[several], n[several], m[several])
        return limit

    # the best

    def best(self, deadline: float | None) -> tuple[Answer | None, int]:
        """The best choice found, and a bound on all."""
        self.deadline = deadline
        self.top: IntArray | None = None
        self.best_value = self.best_own = -1
        if self.k == 1:
            self._judge(np.eye(self.n, dtype=np.int64)[np.lexsort((self.room[: self.n],))])
            return self._answer(0)
        counts, upper = self.alone(np.ones(self.n, np.bool_))
        self._judge([] if counts is None else [counts])
        if self.best_value < upper and (every := self._every()) is not None:
            if self._judge(every):
                return self._answer(self.best_value)
        elif self.best_value < upper and self.shared.any():
            upper = self._branch(upper, counts)
        if self.best_value < upper:
            self._judge(self._spreads())
        if self.top is None:
            self._judge(self._filled())
        if self.best_value < upper and self.shared.any() and self._in_time():
            self._judge(self._grown())
        while self.best_value < upper and self.top is not None and self._in_time():
            before = self.best_value
            self._judge(self._neighbours(self.top))
            if self.best_value == before:
                break
        return self._answer(upper)

    def on_one_host(self) -> IntArray:
        """What all k GPUs get on each host by itself, where no job interferes; -1: not allowed."""
        if not self.n:
            return np.zeros(0, np.int64)
        here, kinds = self.rows[:, self.k], self.search.of[:, self.hosts[: self.n]]
        _, at, back = np.unique(
            np.vstack([here, kinds]), axis=1, return_index=True, return_inverse=True
        )
        counts = np.zeros((len(at), len(self.hosts)), np.int64)
        counts[np.arange(len(at)), at] = self.k
        value, _ = self.values(counts)
        value[[not self._is_allowed(row[: self.n]) for row in counts]] = -1
        return np.asarray(value[back.reshape(-1)])

    def by_host(self, value: IntArray) -> dict[int, int]:
        """Values of its hosts by their numbers, without those that are not possible."""
        return {h: v for h, v in zip(self.hosts.tolist(), value.tolist(), strict=False) if v >= 0}

    def best_on_one_host(self) -> tuple[Answer | None, int]:
        """The best choice of all k on one host, where no job interferes, and its value."""
        value = self.on_one_host()
        if (best := int(value.max(initial=-1))) < 0:
            return None, best
        return self.answer_with(best, best, self.k * (np.arange(self.n) == value.argmax())), best

    def ranked(self) -> list[tuple[int, int, IntArray]] | None:
        """Value, bandwidth alone and counts of all allowed choices, best first; None: too many."""
        rows = self._every()
        if rows is None:
            return None
        counts = np.zeros((len(rows), len(self.hosts)), np.int64)
        counts[:, : self.n] = rows
        value, own = self.values(counts)
        return [
            (int(value[i]), int(own[i]), rows[i])
            for i in np.argsort(-value, kind="stable").tolist()
            if value[i] >= 0 and self._is_allowed(rows[i])
        ]

    def swapped(self, counts: IntArray) -> IntArray:
        """By host what the best with it gets of counts, and of those of parts, with GPUs moved.

        They go to the host from that with fewest of them, or from that with most demand. -1: none.
        """
        moved, to = [], []
        for base, part in [(counts, self.room > 0), *self._parts()]:
            used, others = np.flatnonzero(base), np.flatnonzero((base == 0) & part)
            for source in {int(base[used].argmin()), int(self.price[used].argmax())}:
                rows = np.repeat(base[None], len(others) + 1, axis=0)  # the base itself is the last
                number = np.minimum(self.room[others], base[used[source]])
                rows[np.arange(len(others)), others] = number
                rows[:-1, used[source]] -= number
                moved.append(rows)
                to += [*others[:, None], used]
        value, every = np.full(self.n, -1), np.concatenate(moved)
        for begin in range(0, len(every), _CHUNK):
            rows = every[begin : begin + _CHUNK]
            for row, reached, at in zip(rows, self.values(rows)[0], to[begin:], strict=False):
                if reached > value[at].min() and self._is_allowed(row[: self.n]):
                    value[at] = np.maximum(value[at], reached)
        return value

    def _parts(self) -> Iterable[tuple[IntArray, Bools]]:
        """Best counts of parts of the cluster, and their hosts."""
        return ()

    def answer_with(self, value: int, own: int, counts: IntArray) -> Answer | None:
        """Counts and what they get as an answer, than which nothing of these counts is better."""
        self.top, self.best_value, self.best_own = counts, value, own
        return self._answer(value)[0]

    def _in_time(self) -> bool:
        if self.deadline is None:
            return self.judged < MOST_JUDGED
        return time.monotonic() < self.deadline

    def _answer(self, upper: int) -> tuple[Answer | None, int]:
        if self.top is None:
            return None, upper
        gpus = gpus_of(self.state, self._masks(self.top, self.best_own))
        return Answer(gpus, self.best_value, self.best_own, upper), upper

    def _judge(self, rows: Iterable[IntArray]) -> bool:
        """Keep the best of count vectors, one that is allowed at least; whether all were judged."""
        rest, size = iter(rows), _FIRST_CHUNK * (1 if self.policy.is_free else 8)
        while chunk := list(islice(rest, size)):
            size = min(2 * size, _CHUNK)
            counts = np.zeros((len(chunk), len(self.hosts)), np.int64)
            counts[:, : self.n] = chunk
            value, own = self.values(counts)
            self.judged += len(chunk)
            for i in np.argsort(-value, kind="stable").tolist():
                if value[i] <= self.best_value:
                    break
                if self._is_allowed(chunk[i]):
                    self.top, self.best_value, self.best_own = chunk[i], int(value[i]), int(own[i])
                    break
            if not self._in_time() and (self.top is not None or self.judged >= MOST_JUDGED):
                return next(rest, None) is None
        return True

    def _is_allowed(self, counts: IntArray) -> bool:
        if (counts[: self.n] < self.least).any():
            return False
        if self.policy.is_free:
            return True
        at = np.flatnonzero(counts)
        used = dict(zip(self.hosts[at].tolist(), counts[at].tolist(), strict=True))
        return not self.policy.broken_by(self.state.cluster, used)

    def _masks(self, counts: IntArray, own: int) -> list[tuple[int, int]]:
        """On every host the lowest ids that keep the bandwidth."""
        parts = []
        for i in np.flatnonzero(counts).tolist():
            h, count = int(self.hosts[i]), int(counts[i])
            if self.state.cluster.sizes[h] > MOST_BY_SUBSET:
                parts.append((h, count))
                continue
            free = int(self.state.masks[h])
            parts.append((h, self.search.lowest(h, free, count, self._least(i, count, own))))
        return sorted(parts)

    def _least(self, _host: int, _count: int, own: int) -> int:
        """What a subset must have within its host."""
        return own

    # bounds

    def alone(self, some: Bools) -> tuple[IntArray | None, int]:
        """The best counts on some hosts without regard to tenants, and a bound; -1: none is."""
        at = np.flatnonzero(some)
        if self.room[at].sum() < self.k:
            return None, -1
        rows, search = self.rows[at], self.search
        if search.rates is not None:
            found, upper = best_by_line_rate(rows, search.rates, self.k, self.price[at])
        else:
            most = None if self.deadline is None else FEW_PATTERNS
            upper = bound_within(rows, self.k)
            listed = search.flat[0].best_counts(rows, self.k, self.price[at], most)
            found, upper = (None, upper) if listed is None else listed
        if found is None:
            return None, upper
        counts = np.zeros(self.n, np.int64)
        counts[at] = found
        return counts, upper

    @cached_property
    def _caps(self) -> IntArray:
        """By job, what no joint allocation with it can have."""
        widths = np.arange(self._joint_rows.shape[1])
        size = self.k + self.held.sum(axis=1)
        caps = np.full(len(self.jobs), NO_LIMIT)
        rates = self.search.rates
        for j, held in enumerate(self.held):
            on = np.flatnonzero(held)
            may = (widths >= held[on, None]) & (widths <= (held + self.room)[on, None])
            caps[j] = np.where(may, self._joint_rows[on], -1).max(axis=1).min()
            if rates is not None:
                least = np.where(may, rates, -1.0).max(axis=1).min()
                caps[j] = min(caps[j], int(line(least, size[j], len(on))))
        return caps

    def _branch(self, upper: int, root: IntArray | None) -> int:
        """Branch and bound over the jobs that a choice interferes with; the bound that is left.

        A node bars hosts of some jobs, and takes others for met: with demand D and joint capacity
        C of these it has at most d C / (d + D), d the best without regard to tenants on its hosts.
        The best counts of a node are judged; a job that they meet and that is not taken for met is
        the next to be barred, or met.
        """
        there = self.held[:, : self.n] > 0
        single = -1
        if self.k < self.rows.shape[1]:
            here = self.rows[:, self.k]
            single = int(here.max(initial=-1))
            self._judge([self.k * (np.arange(self.n) == here.argmax())] if single >= 0 else [])

        def bound(alone: int, met: frozenset[int]) -> int:
            jobs = list(met)
            cap, total = int(self._caps[jobs].min(initial=NO_LIMIT)), alone
            total += int(self.demands[jobs].sum())
            return max(single, alone if total <= cap else alone * max(cap, 0) // total)

        def keep(alone: int, barred: frozenset[int], met: frozenset[int], counts: Any) -> None:
            if alone >= 0 and (most := bound(alone, met)) > self.best_value:
                heappush(queue, (-most, next(number), alone, barred, met, counts))

        queue: list[tuple[int, int, int, frozenset[int], frozenset[int], IntArray | None]] = []
        left, number = self.best_value, count_up()
        keep(upper, frozenset(), frozenset(), root)
        while queue and -queue[0][0] > max(self.best_value, left):
            if not self._in_time() or next(number) > _MOST_NODES:
                left = -queue[0][0]
                break
            top, _, alone, barred, met, counts = heappop(queue)
            used = np.zeros(self.n, np.bool_) if counts is None else counts > 0
            open_jobs = set(np.flatnonzero(there[:, used].any(axis=1)).tolist()) - met
            if not open_jobs:
                left = max(left, -top)
                continue
            j = max(open_jobs, key=lambda j: (self.demands[j], -self._caps[j], -j))
            keep(alone, barred, met | {j}, counts)
            barred |= {j}
            counts, alone = self.alone(np.asarray(~there[list(barred)].any(axis=0)))
            self._judge([] if counts is None else [counts])
            keep(alone, barred, met, counts)
        return min(upper, max(left, self.best_value))

    # candidates

    def _every(self) -> IntArray | None:
        """All counts with sum k, where they are few."""
        room = self.room[: self.n]
        spare, left = room - self.least, self.k - int(self.least.sum())
        able = int((spare > 0).sum())
        if comb(able, max(0, min(left, int(spare.sum()) - left, able // 2))) > MOST_EVERY:
            return None  # so many hosts may have one GPU more, or not
        behind = np.append(np.cumsum(room[::-1])[::-1], 0)
        rows = np.zeros((1, 0), np.int64)
        for h in range(self.n):
            counts = np.arange(self.least[h], room[h] + 1)
            total = rows.sum(axis=1)[:, None] + counts
            some, count = np.nonzero((total <= self.k) & (total + behind[h + 1] >= self.k))
            if len(some) > MOST_EVERY:
                return None
            rows = np.column_stack([rows[some], counts[count]])
        return rows

    def _spreads(self) -> Iterator[IntArray]:
        """Even counts on the hosts with most room, or with fewest demands, few of them and more."""
        room = self.room[: self.n]
        ways = ((-room,), (-room, self.price), (-room, self.shared))
        orders = [np.lexsort((*keys, self.least < 1)) for keys in ways if keys[-1].any()]
        first = int(np.searchsorted(np.cumsum(room[orders[0]]), self.k)) + 1
        for m in _numbers(first, min(self.n, self.k)):
            for order in orders:
                if room[order[:m]].sum() >= self.k:
                    counts = np.zeros(self.n, np.int64)
                    counts[order[:m]] = even(room[order[:m]], self.k)
                    yield counts

    def _filled(self) -> list[IntArray]:
        """Counts that keep the rules on hosts and slices, on the hosts with most room."""
        room, size, level = self.room[: self.n], self.policy.slice_size, self.policy.slice_level
        allowed = self.rows >= 0
        allowed[np.arange(allowed.shape[1]) < self.least[:, None]] = False
        cluster, domain = self.state.cluster, np.zeros(self.n, np.int64)
        if level not in (None, "host"):
            domain = domain_numbers(cluster, cluster.level(level))[self.hosts[: self.n]]
        groups = [np.flatnonzero(domain == d) for d in set(domain.tolist())]
        groups.sort(key=lambda group: int(room[group].sum()))
        rising = [group[np.argsort(room[group], kind="stable")].tolist() for group in groups]
        counts = fill(allowed, self.k, rising, 1 if level in (None, "host") else size or 1)
        return [] if counts is None else [counts]

    def _grown(self) -> Iterator[IntArray]:
        """From every host (the cheapest first) on, hosts whose jobs add least demand to a GPU."""
        room = self.room[: self.n]
        there = self.held[:, : self.n] > 0
        for seed in np.lexsort((-room, self.price))[:_SEEDS].tolist():
            if not self._in_time():
                return
            out = np.zeros(self.n, np.bool_)
            wanted = self.demands + 1  # of jobs that are not met yet
            total, more, h = 0, 0, seed
            order: list[int] = []
            while True:
                order.append(h)
                out[h] = True
                total += int(room[h])
                if total >= self.k:
                    counts = np.zeros(self.n, np.int64)
                    counts[order] = even(room[order], self.k)
                    yield counts
                    more += 1
                if more > _MORE or len(order) == min(self.n, self.k):
                    break
                wanted = np.where(there[:, h], 0, wanted)
                h = int(np.where(out, np.inf, (wanted @ there + 1) / room).argmin())

    def _neighbours(self, counts: IntArray) -> Iterator[IntArray]:
        """One GPU moved, or two hosts swapped; of hosts that are alike one is tried."""
        alike: dict[tuple[int, ...], int] = {}
        tenants, slices = (self.held[:, : self.n] > 0).T, self.policy.slice_size or 1
        for h in range(self.n):
            key = (int(counts[h]), *self.rows[h].tolist(), *np.flatnonzero(tenants[h]).tolist())
            alike.setdefault(key, h)
        some = sorted(alike.values(), key=lambda h: int(self.price[h]))
        sources = [h for h in reversed(some) if counts[h]][:_SOURCES]
        targets = [h for h in some if counts[h] < self.room[h]][:_TARGETS]
        for a in sources:
            for b in targets:
                moves = {1, slices, int(counts[a] - counts[b])} if a != b else set()
                for n in moves:
                    if 0 < n <= counts[a] and counts[b] + n <= self.room[b]:
                        row = counts.copy()
                        row[a] -= n
                        row[b] += n
                        yield row


class _Least:
    """The least rates and limits of count vectors, to be asked again with some GPUs more."""

    def __init__(self, limits: Floats, counts: IntArray) -> None:
        self.limits, self.counts = limits, counts
        self.every = limits[:, np.arange(counts.shape[1]), counts]
        self.where = self.every.argmin(axis=2)
        self.least = self.every.min(axis=2)
        self.used = (counts > 0).sum(axis=1)

    def beside(
        self, at: IntArray, on: IntArray, held: IntArray
    ) -> tuple[Floats, IntArray, IntArray]:
        """Of rows `at` with `held` more GPUs on the hosts `on`: rate, limit within, hosts."""
        least = self.least[:, at]
        for which in range(2):  # where the least is on such a host, look at the others
            again = np.flatnonzero(np.isin(self.where[which, at], on))
            if len(again):
                rest = self.every[which, at[again]]
                rest[:, on] = np.inf
                least[which, again] = rest.min(axis=1)
        theirs = self.counts[at[:, None], on]
        both = self.limits[:, on, theirs + held].min(axis=2)
        rate, within = np.minimum(least, both)
        hosts = self.used[at] + (theirs == 0).sum(axis=1)
        return rate, np.minimum(within, NO_LIMIT).astype(np.int64), hosts


def _numbers(first: int, last: int) -> list[int]:
    """All numbers of a short range; of a long one the first, then fewer and fewer."""
    near = range(first, min(first + 48, last + 1))
    far = np.geomspace(first + 48, last, 24).astype(int).tolist() if last >= first + 48 else []
    return [*near, *dict.fromkeys(far)]
