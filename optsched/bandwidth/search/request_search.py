"""The search for one request on a large cluster: bounds, rounds over cells, variations, ties."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.bandwidth.search import cells as kernels
from optsched.bandwidth.search.groups import MOST_EVERY, Domain
from optsched.bandwidth.topology.levels import WHOLE
from optsched.bandwidth.topology.rates import MOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from optsched.bandwidth.search.request import Judge
    from optsched.bandwidth.topology.policy import Policy
    from optsched.model.schedule import IntArray

    Bools = npt.NDArray[np.bool_]

FEW_CELLS: Final = 16
"""Cells that are visited before the bounds of all are computed, if there is a deadline."""

ROUNDS: Final = 16
"""Visits of all cells, with other weights of the jobs."""

CHUNK: Final = 64
"""Cells visited in one call; with a deadline so many times so many hosts at most."""

MOST_PROPOSALS: Final = 400
"""Count vectors of a domain that are judged where the network is not the line rate."""


class Choice(NamedTuple):
    """Counts by host of the request, and what they get."""

    value: int
    alone: int
    counts: IntArray
    domain: Domain


class RequestSearch:
    """The search for one request; `best` and `upper` are its result.

    `deadline` is a reading of `time.monotonic`; with `keeps` all choices stay in `seen`.
    """

    def __init__(self, judge: Judge, policy: Policy, deadline: float | None, keeps: bool) -> None:
        self.judge, self.q, self.policy, self.keeps = judge, judge.q, policy, keeps
        self.deadline = np.inf if deadline is None else deadline
        self.best: Choice | None = None
        self.upper, self.is_complete = -1, False
        self.seen: dict[bytes, Choice] = {}
        self.parts: list[Domain] = []

    @property
    def value(self) -> int:
        """Bandwidth of the best choice so far, -1 without one."""
        return -1 if self.best is None else self.best.value

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline < np.inf and time.monotonic() > self.deadline

    def search(self, domains: list[Domain]) -> None:
        """Look for the best choice in some domains, and for a bound on all in them."""
        within = self._on_one_host()
        for domain in domains:
            h = np.lexsort((self.q.rank, -(here := np.where(domain.inside, within, -1))))[0]
            if here[h] >= 0:
                self._offer(self.q.k * (np.arange(len(within)) == h)[None], domain)
        self.parts = [part for domain in domains for part in domain.parts]
        uppers = [self._alone(part) for part in self.parts]
        self.upper = max([self.value, *uppers])
        if self.best is not None and self.deadline < np.inf:
            begin = time.monotonic()
            self.pack(domains)
            self.deadline -= 2 * (time.monotonic() - begin)
        if (self.value < self.upper or self.keeps) and not self._every(domains):
            if not self.judge.tables.is_line_rate:
                self._propose()
            elif len(self.q.demand):
                some = [one for one in zip(self.parts, uppers, strict=True) if one[1] > self.value]
                clean = np.diff(self.q.of_host) == 0
                bounds = [self._alone(one._replace(inside=one.inside & clean)) for one, _ in some]
                self.upper = min(self.upper, max([self.value, *bounds, self._meet(some)]))
        self.upper = max(self.upper, self.value)
        if self.best is not None:
            self.pack(domains)

    def bound(self, domains: list[Domain]) -> int:
        """A bound on all choices in some domains."""
        return max((self._alone(part) for domain in domains for part in domain.parts), default=-1)

    def vary(self, n: int) -> None:
        """Offer the n best choices of every part with a host in place of one of theirs."""
        within, start = self._on_one_host(), list(self.seen.values())
        if self.best is not None and not self.is_complete:
            rows = self.q.k * np.eye(len(within), dtype=np.int64)[within >= 0]
            self._offer(rows[:, :], self.best.domain)
            for part in self.parts:
                some = [one for one in start if not one.counts[~part.inside].any()]
                for one in sorted(some, key=lambda one: -one.value)[:n]:
                    if n == 1 or not self.is_late:
                        self._offer(np.array([*swapped(part, one.counts)]), part)

    def _offer(self, rows: IntArray, domain: Domain, found: IntArray | None = None) -> IntArray:
        """Keep the best of count vectors that the policy allows; their bandwidths."""
        found = self.judge.values(rows) if found is None and len(rows) else found
        if found is None:
            return np.zeros((0, 2), np.int64)
        for i in np.argsort(-found[:, 0], kind="stable").tolist():
            value, alone = found[i].tolist()
            if value < 0 or (value <= self.value and not self.keeps):
                break
            most = domain.q.max_hosts  # fewer than the policy's where hosts are preferred
            if np.count_nonzero(rows[i]) <= most and self._is_allowed(rows[i]):
                one = Choice(value, alone, rows[i].copy(), domain)
                self.best = one if value > self.value else self.best
                if not self.keeps:
                    break
                self.seen.setdefault(rows[i].tobytes(), one)
        return found

    def _is_allowed(self, counts: IntArray) -> bool:
        if self.policy.is_free or (counts < self.q.least).any():
            return not (counts < self.q.least).any()
        at = np.flatnonzero(counts)
        used = dict(zip(self.judge.hosts[at].tolist(), counts[at].tolist(), strict=True))
        return not self.policy.broken_by(self.judge.state.cluster, used)

    def _on_one_host(self) -> IntArray:
        """Bandwidth of all GPUs on one host, by host; -1: not possible."""
        q, others = self.q, self.q.least.sum() - self.q.least
        if q.k >= len(q.rates) or q.min_hosts > 1:
            return np.full(len(q.free), -1)
        return np.where((others == 0) & (q.least <= q.k), q.rows[:, q.k], -1)

    def _alone(self, part: Domain) -> int:
        """Offer the best choice without regard for jobs; a bound on what is above the best."""
        (q, level, inside), made = part, np.zeros((1, len(self.q.free)), np.int64)
        if not (sure := self.judge.tables.is_line_rate):
            q = q._replace(rates=np.full(len(q.rates), np.inf))  # what hosts allow
        factor = max(1, int(q.factor[level]))

        def before(value: int) -> int:
            return -(-value * WHOLE // factor)

        low = before(self.value + 1) - 1
        v = kernels.alone(q, level, inside, low, MOST - 1, False, made[0])
        if made.any():
            low = max(low, min(v, before(int(self._offer(made, part)[0, 1]))))
        elif self.best is None and kernels.alone(q, level, inside, -1, 0, False, made[0]) == 0:
            self._offer(made, part)
        while low < v and (self.best is None or (sure and not self.is_late)):  # counts have gaps
            middle = (low + v + 1) // 2
            if kernels.alone(q, level, inside, middle - 1, middle, True, made[0]) < middle:
                v = middle - 1
            else:
                self._offer(made, part)
                low = middle
        return max(self.value, int(v * factor // WHOLE))

    def _every(self, domains: list[Domain]) -> bool:
        """Offer all choices, if these are few; whether that is so."""
        rows = [one.every() for one in domains] if self.best is None or not self.is_late else [None]
        some = [one for one in rows if one is not None]
        if len(some) < len(rows) or sum(map(len, some)) > MOST_EVERY:
            return False
        for one, domain in zip(some, domains, strict=True):
            self._offer(one, domain)
        self.upper, self.is_complete = self.value, True
        return True

    def _meet(self, parts: list[tuple[Domain, int]]) -> int:
        """Visit cells in rounds; a bound on choices that meet a job."""
        q, rng, upper = self.q, np.random.default_rng(0), self.value
        todo: list[tuple[Domain, kernels.Part, npt.NDArray[np.void]]] = []
        for domain, bound in parts:
            if self.is_late:
                upper = max(upper, bound)
                continue
            cells = domain.cells(part := domain.part(), bound, self.value)
            if self.deadline < np.inf:  # bounds of all cells may take longer than there is time
                few = cells[:: max(1, len(cells) // FEW_CELLS)].copy()
                self._explore(domain, part, few, np.asarray(q.demand, np.float64))
            self._explore(domain, part, cells, np.zeros(len(q.demand)), MOST)  # bounds alone
            upper = max(upper, int(cells["bound"].max(initial=0)))
            todo.append((domain, part, cells[np.argsort(-cells["bound"], kind="stable")]))
        for turn in range(ROUNDS):
            noise = rng.normal(0, 0.5 * (turn > 0), len(q.demand))
            used = (rng.random(len(q.free)) < (0.9 if turn % 2 else 1.0)) | (q.least > 0)
            for domain, part, cells in todo:
                some = part._replace(good=np.where(used[:, None], part.good, -1))
                self._explore(domain, some, cells, np.asarray(q.demand * np.exp(noise), np.float64))
            if self.is_late or self.value >= upper:
                break
        return upper

    def _explore(
        self, domain: Domain, part: kernels.Part, cells: npt.NDArray[np.void],
        weight: npt.NDArray[np.float64], above: int = -1,
    ) -> None:  # fmt: skip
        """Visit cells by falling bound until none is above the best, or the deadline passes."""
        n = len(domain.inside)
        size = CHUNK if self.deadline == np.inf else max(1, CHUNK * 16 // n)
        made, found = np.zeros((size, n), np.int64), np.zeros((size, 2), np.int64)
        for i in range(0, len(cells), size):
            best = max(above, self.value)
            if cells["bound"][i] <= self.value or self.is_late:
                return
            end = min(len(cells), i + size)
            m = kernels.explore(domain.q, part, cells, i, end, weight, best, made, found)
            self._offer(made[:m], domain, found[:m])

    def _propose(self) -> None:
        """Offer what is good at the line rate to the model, then changes of the best."""
        for part in self.parts:
            rows: Iterable[IntArray] = islice(starting_points(part), MOST_PROPOSALS)
            before = -2
            while before < self.value < self.upper and not (self.is_late and self.best):
                pool, before = np.array([*rows]).reshape(-1, len(part.inside)), self.value
                judged = self._offer(pool, part)
                best = pool[np.argsort(-judged[:, 0], kind="stable")[:4]]
                rows = (row for counts in best for row in swapped(part, counts))

    def pack(self, domains: list[Domain]) -> None:
        """Replace the best by a choice of the same value that is first in the order of ties."""
        best, q, within = self.best, self.q, self._on_one_host()
        assert best is not None
        used, fits = best.counts > 0, within >= best.value
        fits &= np.any([inside for *_, inside in domains], axis=0)
        if fits.any():
            h = np.lexsort((q.rank, ~fits))[0]
            self._exchange(q.k * (np.arange(len(used)) == h)[None])
            return
        rate, dirty = q.rates[best.counts[used]].min(), np.diff(q.of_host) > 0
        met = np.isin(np.arange(len(q.demand)), q.edge_job[used[q.edge_host]])
        missing = np.bincount(q.edge_host, ~met[q.edge_job], len(used))
        for q, top, inside in domains:
            if met.any() or not self.judge.tables.is_line_rate:  # a lower rate may cost
                q = q._replace(rows=np.where(q.rates >= rate, q.rows, -1))
            options = [(inside, q)]
            if dirty.any():  # the hosts of the jobs that it meets, and those without jobs
                least = np.maximum(q.least, used & dirty)
                options.append((inside & (missing == 0), q._replace(least=least)))
            for level in range(top + 1):
                x = -(-best.alone * WHOLE // max(1, int(q.factor[level])))
                most = np.where(q.rows >= x, np.arange(len(q.rates)), 0).max(axis=1)
                if any([  # all are tried
                    self._repack(Domain(one, level, hosts & (q.domain[level] == d)), most, x)
                    for hosts, one in options
                    for d in np.flatnonzero(np.bincount(q.domain[level], most * hosts) >= q.k)
                ]):  # fmt: skip
                    break

    def _repack(self, domain: Domain, most: IntArray, x: int) -> bool:
        """Take the fewest domains below a level; whether the value is still the best."""
        q, level, hosts = domain
        if (q.least[~hosts] > 0).any():
            return False
        for of in q.domain[:level][::-1]:  # the largest domains, last the smallest that suffices
            sums, forced = np.bincount(of, most * hosts), np.bincount(of, q.least * hosts) > 0
            order = np.lexsort((-sums, ~forced))
            n = max(int((np.cumsum(sums[order]) < q.k).sum()), int(forced.sum()) - 1)
            fits = [d for d in order[n:] if sums[order[:n]].sum() + sums[d] >= q.k]
            last = fits[:1] if forced.sum() > n else fits[-1:]
            hosts = hosts & np.isin(of, [*order[:n], *last])
        rows = np.zeros((1, len(q.free)), np.int64)
        kernels.alone(q, level, hosts, x - 1, x, False, rows[0])
        return bool(rows.any()) and self._exchange(rows)

    def _exchange(self, rows: IntArray) -> bool:
        """Take a choice of the same value that is first in the order of ties; whether it is.

        A higher value is not taken here: more time must never lead to less.
        """
        assert self.best is not None
        ((value, alone),) = self.judge.values(rows).tolist()
        if value != self.value or not self._is_allowed(rows[0]):
            return False
        if self.key(rows[0]) < self.key(self.best.counts):
            self.best = Choice(value, alone, rows[0].copy(), self.best.domain)
        return True

    def key(self, counts: IntArray) -> tuple[int, ...]:
        """Order of ties: domains from the top level down, hosts, whole hosts, free GPUs, ids."""
        used = np.flatnonzero(counts)
        whole, free = np.divmod(self.q.rank[used], len(self.q.rates))
        domains = (len(np.unique(of[used])) for of in self.q.domain[::-1])
        return *domains, len(used), int(whole.sum()), int(free.sum()), *used.tolist()


def swapped(part: Domain, counts: IntArray) -> Iterator[IntArray]:
    """By unused host the counts with a host's GPUs moved to it; by used host, with one moved.

    They are moved from the host with fewest of them, and from the one with most demand.
    """
    q, used = part.q, np.flatnonzero(counts)
    price = np.bincount(q.edge_host, q.demand[q.edge_job], len(counts))
    sources = {int(used[counts[used].argmin()]), int(used[price[used].argmax()])}
    for h in np.flatnonzero(part.inside & (counts < q.free)).tolist():
        for source in sources - {h}:
            row = counts.copy()
            row[h] += 1 if counts[h] else min(q.free[h], counts[source])
            row[source] -= row[h] - counts[h]
            yield row


def starting_points(part: Domain) -> Iterator[IntArray]:
    """Choices that are good where the network is the line rate, with few and with many hosts."""
    q, level, inside = part
    row, number = np.zeros(len(inside), np.int64), np.arange(len(q.rates))
    for hosts in (inside & (np.diff(q.of_host) == 0), inside):
        for most in number[1:]:
            for least in {0, max(0, int(most) - 1), int(most)}:  # any counts up to `most`, or even
                rows = np.where((number <= most) & (number >= least) | (number == 0), q.rows, -1)
                free = np.where(rows >= 0, number, 0).max(axis=1)
                some = q._replace(rows=rows, free=np.minimum(q.free, free))
                kernels.alone(some, level, hosts, -1, MOST - 1, False, row)
                if row.any():
                    yield row.copy()
    bounds = part.part()
    cells = part.cells(bounds, MOST, -1)
    cells["known"] = 1  # the bound is that of the line rate: all are visited
    made, found = np.zeros((len(cells), len(inside)), np.int64), np.zeros((len(cells), 2), np.int64)
    weight = np.asarray(q.demand, np.float64)
    n = kernels.explore(q, bounds, cells, 0, len(cells), weight, -1, made, found)
    yield from made[np.argsort(-found[:n, 0], kind="stable")]
