"""Several requests at once: disjoint GPUs, every request a tenant to the others, jointly optimal.

Requests take count vectors one after the other, depth first; all vectors of the next request are
judged at once. For given vectors the joint limits are fixed; but a slower subset may serve all of
them better, since it asks for less. So where the bandwidth within a host depends on more than
counts, all combinations of disjoint subsets that differ in bandwidths are followed, host by host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.bandwidth.models.tables import BEST, BY_MASK, GPUS, INTRA, RECORD, RECORDS
from optsched.bandwidth.placement.problem import RATIO, GpuSets
from optsched.bandwidth.search.ask import trays_first
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET, subset_sizes
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.gpus.one_by_one import OneByOne
from optsched_solvers.gpus.vectors import CountVectors, divided

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from optsched.bandwidth.placement.problem import GpuPlacement
    from optsched.model.schedule import IntArray
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

    BoolArray = npt.NDArray[np.bool_]

MOST_REQUESTS: Final = 5
MOST_VECTORS: Final = 200_000
"""Count vectors of a request."""

MOST_ASSIGNMENTS: Final = 1 << 20
"""Ways to divide the free GPUs of a host whose subsets differ."""

MOST_STATES: Final = 20_000
"""Combinations of bandwidths that one matrix of counts may give rise to."""

MOST_EFFORT: Final = 10_000_000
"""Pairs of such a combination and a host's subsets that are tried for one matrix of counts."""

_CHUNK: Final = 1 << 18  # of them at once


def supports(problem: GpuPlacement) -> Support:
    """Up to five requests on a cluster of moderate size, joint allocations by counts."""
    many = len(problem.requests)
    if many > MOST_REQUESTS:
        return Support(False, f"it takes up to {MOST_REQUESTS} requests together, not {many}")
    if problem.contention.fill == "exact":
        return Support(False, "joint allocations with their exact GPUs are not functions of counts")
    for request in problem.requests:
        if request.policy.preferred is not None:
            return Support(
                False,
                "of several requests a preferred level would depend on their order; use required",
            )
        vectors = CountVectors(problem, request)
        if _cuts_hosts(problem, vectors):
            return Support(False, "of several requests it takes no rule on GPUs or parts of a host")
        number = vectors.count()
        if number > MOST_VECTORS:
            return Support(
                False,
                f"request {request.name!r:.60} has {number} count vectors, {MOST_VECTORS} are as "
                "many as it takes",
            )
    if _is_unlimited(problem):
        return Support(False, "nothing limits some bandwidths, so they cannot be added up")
    for h in range(problem.cluster.n_hosts):
        if _ways(problem, h) > MOST_ASSIGNMENTS and not _alike(problem, h):
            return Support(
                False,
                f"host {problem.cluster.hosts[h].name!r:.60} has too many free GPUs to divide them "
                f"among {many} requests in every way",
            )
    return Support(True)


def solve(problem: GpuPlacement, limits: Limits, monitor: Monitor) -> Result:
    """One by one first, then jointly; one iteration judges the vectors of one request."""
    if not load(monitor, "optsched.bandwidth.search.counts"):
        return Result("unknown")
    OneByOne().solve(problem, limits, monitor)
    if monitor.should_stop():
        return Result("unknown")
    search = BatchSearch(problem, -1 if monitor.objective is None else -monitor.objective)
    left = 2**62 if limits.iterations is None else limits.iterations
    value, upper, steps = search.value, -1, search.steps()
    while left > 0 and not monitor.should_stop():
        finished = next(steps, None) is None
        left -= 1
        monitor.advance(1)
        if search.value > value:
            value = search.value
            monitor.incumbent(GpuSets.of(search.gpus()), -value, "branch_and_bound")
        if 0 <= search.upper < NO_LIMIT and search.upper != upper:
            upper = search.upper
            monitor.bound(-upper, "branch_and_bound")
        if finished:
            if monitor.solution is not None or search.lost >= 0:
                break
            names = ", ".join(request.name for request in problem.requests)
            reason = f"no disjoint sets of free GPUs obey the policies of {names:.200}"
            return Result("infeasible", reason=reason)
    return Result("unknown")


@dataclass(frozen=True)
class _Vectors:
    """The count vectors of a request by falling bandwidth alone, and what is known of each."""

    counts: IntArray
    """By vector and host."""
    alone: IntArray
    """Bandwidth beside the running jobs only."""
    high: IntArray
    low: IntArray
    """Of all subsets with these counts the highest and the lowest standalone bandwidth."""
    capacity: IntArray
    demand: IntArray
    """What running jobs leave, and ask."""
    across: BoolArray
    """Whether it has several hosts."""


class _Node(NamedTuple):
    """The first requests have their vectors."""

    chosen: tuple[int, ...]
    load: IntArray
    """GPUs taken, by host."""
    same: BoolArray
    """Hosts whose counts are so far those of the host before that is alike."""
    capacity: IntArray
    demand: IntArray
    """What others leave to each of them, and ask."""


class BatchSearch:
    """The joint search; at any time `value` and `upper` enclose the optimum.

    Parameters
    ----------
    problem
        With several requests, see `supports`.
    known
        Value of a choice that is there already: only better ones are looked for.
    """

    def __init__(self, problem: GpuPlacement, known: int = -1) -> None:
        self.problem, self.value = problem, known
        self.upper = NO_LIMIT
        self.lost = -1
        """What those are worth at most that were left out, as there were too many."""
        self.order = sorted(
            range(len(problem.requests)), key=lambda r: (-problem.requests[r].gpus, r)
        )
        self._judge = CountVectors(problem, problem.requests[0])
        self._ranges = [_range(problem, h) for h in range(problem.cluster.n_hosts)]
        self._vectors = [self._listed(r) for r in self.order]
        self._max_min = problem.objective == "max_min"
        self._alone = [problem.best_alone[r] if self._max_min else 0 for r in self.order]
        self._divided: dict[tuple[int, int], tuple[IntArray, IntArray, IntArray]] = {}
        self._best: tuple[tuple[int, ...], list[tuple[int, ...] | None]] | None = None

    def steps(self) -> Iterator[bool]:
        """Search; yields now and then."""
        if all(len(one.alone) for one in self._vectors):
            n = self.problem.cluster.n_hosts
            like = np.array([self._like(h) for h in range(n)], np.int64)
            nothing = np.zeros(0, np.int64)
            root = _Node((), np.zeros(n, np.int64), like >= 0, nothing, nothing)
            for _ in self._branch(root, like):
                yield True
        self.upper = max(self.value, self.lost)

    def gpus(self) -> list[tuple[int, ...]]:
        """The best choice found by this search, by request."""
        assert self._best is not None
        chosen, masks = self._best
        cluster, state = self.problem.cluster, self.problem.state
        found: list[list[int]] = [[] for _ in self.order]
        for h in range(cluster.n_hosts):
            first, size = int(cluster.first[h]), int(cluster.sizes[h])
            left = [g - first for g in state.free if first <= g < first + size]
            for i, r in enumerate(self.order):
                own = masks[h]
                if own is None:
                    count = int(self._vectors[i].counts[chosen[i], h])
                    ids = trays_first(left, count, cluster.type(h).tray)
                    left = [a for a in left if a not in ids]
                else:
                    ids = [a for a in range(size) if own[i] >> a & 1]
                found[r] += [first + a for a in ids]
        return [tuple(gpus) for gpus in found]

    # the tree

    def _branch(self, node: _Node, like: IntArray) -> Iterator[bool]:
        """Everything below a node, the most promising vectors first."""
        r = len(node.chosen)
        rows, bound, capacity, demand = self._children(node, like)
        yield True
        earlier = zip(self._vectors, node.chosen, strict=False)
        sure = all(one.high[v] == one.low[v] for one, v in earlier)
        for i in np.argsort(-bound, kind="stable").tolist():
            if not r:
                self.upper = max(int(bound[i]), self.value, self.lost)
            if bound[i] <= self.value:
                break
            v = int(rows[i])
            mine = self._vectors[r]
            chosen = (*node.chosen, v)
            if r + 1 < len(self.order):
                counts = mine.counts[v]
                same = node.same & (counts == counts[like])
                child = _Node(chosen, node.load + counts, same, capacity[i], demand[i])
                yield from self._branch(child, like)
            elif sure and mine.high[v] == mine.low[v]:
                self.value = int(bound[i])
                self._best = chosen, [None] * len(node.load)
            else:
                yield from self._subsets(chosen, int(bound[i]))

    def _children(
        self, node: _Node, like: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Vectors of the next request that may be worth more; bounds, capacities and demands."""
        r, unit = len(node.chosen), self.problem.contention.unit
        mine, earlier = self._vectors[r], list(zip(self._vectors, node.chosen, strict=False))
        own = [int(one.high[v]) for one, v in earlier]
        rest = [int(one.alone[0]) for one in self._vectors[r + 1 :]]
        cut = np.array([d - d % unit for d in own], np.int64)
        values = [*divided(cut, node.capacity, cut + node.demand)[:, None]]
        ahead = self._worth([*values, mine.alone, *(np.array([most]) for most in rest)])
        rows = np.flatnonzero(ahead > self.value)
        counts = mine.counts[rows]
        twins = np.flatnonzero(node.same)  # hosts that are alike get falling counts
        fits = (node.load + counts <= self.problem.state.room).all(axis=1)
        fits &= (counts[:, twins] <= counts[:, like[twins]]).all(axis=1)
        rows, counts = rows[fits], counts[fits]
        capacity = np.tile(np.append(node.capacity, 0), (len(rows), 1))
        demand = np.tile(np.append(node.demand, 0), (len(rows), 1))
        capacity[:, r], demand[:, r] = mine.capacity[rows], mine.demand[rows]
        known = np.full(len(rows), True)
        for q, (theirs, v) in enumerate(earlier):
            held, low = theirs.counts[v], int(theirs.low[v])
            meets = ((counts > 0) & (held > 0)).any(axis=1)
            ours = meets & self._tenant(mine.across[rows], theirs.across[v], low)
            others = meets & self._tenant(theirs.across[v], mine.across[rows], mine.low[rows])
            joint = self._joint(counts, held)
            known &= ~(ours | others) | (joint >= 0)
            for at, is_tenant, asked in ((r, ours, low), (q, others, mine.low[rows])):
                limit = np.minimum(capacity[:, at], joint)
                capacity[:, at] = np.where(is_tenant, limit, capacity[:, at])
                demand[:, at] += np.where(is_tenant, asked, 0)
        values = []
        for q, high in enumerate([*(np.array([d]) for d in own), mine.high[rows]]):
            own_cut = np.broadcast_to(high - high % unit, len(rows))
            values.append(divided(own_cut, capacity[:, q], own_cut + demand[:, q]))
        bound = self._worth([*values, *(np.array([most]) for most in rest)])
        kept = known & (bound > self.value)
        return rows[kept], bound[kept], capacity[kept], demand[kept]

    def _worth(self, values: list[IntArray]) -> IntArray:
        """The objective of bandwidths by request."""
        if not self._max_min:
            return np.asarray(sum(values), np.int64)
        total = np.full(1, NO_LIMIT, np.int64)
        for value, best in zip(values, self._alone, strict=True):
            part = value * RATIO // best if best else np.full_like(value, RATIO)
            total = np.minimum(total, part)
        return total

    def _tenant(self, mine: BoolArray, theirs: BoolArray, demand: IntArray | int) -> BoolArray:
        """Whether one vector is a tenant to another that it meets and that asks so much."""
        rule = self.problem.contention
        asks = (np.asarray(demand) > 0) | (not rule.skip_idle)
        return np.asarray(theirs & asks & (mine | (not rule.cross_only)), np.bool_)

    def _joint(self, counts: IntArray, held: IntArray) -> IntArray:
        """Bandwidth of joint allocations; below 0 if a pattern is not measured."""
        joint = self._judge.joint(counts, held)
        return joint - joint % self.problem.contention.unit

    # subsets for fixed vectors

    def _subsets(self, chosen: tuple[int, ...], most: int) -> Iterator[bool]:
        """Best disjoint subsets for fixed vectors, worth `most` at most: all reachable tuples."""
        own = list(zip(self._vectors, chosen, strict=True))
        joint = [[self._pair(a, b) if a is not b else None for b in own] for a in own]
        top = np.array([[one.high[v] for one, v in own]])
        lowest = np.array([one.low[v] for one, v in own])
        states, effort = top, 0
        trail: list[tuple[IntArray, IntArray, IntArray | None]] = []
        for h in range(self.problem.cluster.n_hosts):
            limits, masks = self._rows(h, [int(one.counts[v, h]) for one, v in own])
            bound = self._exactly(own, joint, np.minimum(top, limits), lowest)
            rows = np.flatnonzero(bound > self.value)
            effort += len(limits) + len(states) * len(rows)
            if effort > MOST_EFFORT:
                self.lost = max(self.lost, most)
                return
            pieces = []
            step = max(1, _CHUNK // max(1, len(rows)))
            for first in range(0, len(states), step):
                some = states[first : first + step]
                reached = np.minimum(some[:, None], limits[rows]).reshape(-1, len(own))
                bound = self._exactly(own, joint, reached, lowest)
                kept = np.flatnonzero(bound > self.value)
                pieces.append((reached[kept], bound[kept], kept + first * len(rows)))
                yield True
            reached, bound, at = (np.concatenate(list(part)) for part in zip(*pieces, strict=True))
            _, new = np.unique(reached, axis=0, return_index=True)
            new = new[np.argsort(-bound[new], kind="stable")]
            if len(new) > MOST_STATES:
                self.lost = max(self.lost, int(bound[new[MOST_STATES]]))
                new = new[:MOST_STATES]
            states = reached[new]
            if not len(states):
                return
            trail.append((at[new] // len(rows), rows[at[new] % len(rows)], masks))
        value = self._exactly(own, joint, states, None)
        s = int(np.argmax(value))
        if value[s] > self.value:
            self.value, by_host = int(value[s]), []
            for before, row, masks in reversed(trail):
                by_host.append(None if masks is None else tuple(masks[row[s]].tolist()))
                s = int(before[s])
            self._best = chosen, by_host[::-1]

    def _pair(self, a: tuple[_Vectors, int], b: tuple[_Vectors, int]) -> int | None:
        """Bandwidth of the joint allocations of two vectors; None if they do not meet."""
        ours, theirs = a[0].counts[a[1]], b[0].counts[b[1]]
        if not ((ours > 0) & (theirs > 0)).any():
            return None
        return int(self._joint(ours[None], theirs)[0])

    def _exactly(
        self,
        own: list[tuple[_Vectors, int]],
        joint: list[list[int | None]],
        d: IntArray,
        lowest: IntArray | None,
    ) -> IntArray:
        """Objective of vectors with standalone bandwidths d; with `lowest` a bound for less."""
        unit, known, values = self.problem.contention.unit, np.full(len(d), True), []
        for r, (mine, v) in enumerate(own):
            capacity = np.full(len(d), mine.capacity[v])
            demand = np.full(len(d), mine.demand[v])
            for q, (theirs, u) in enumerate(own):
                limit = joint[r][q]
                if limit is None:
                    continue
                wanted = d[:, q] if lowest is None else np.full(len(d), lowest[q])
                tenant = self._tenant(mine.across[v], theirs.across[u], wanted)
                known &= ~tenant | (limit >= 0)
                capacity = np.where(tenant, np.minimum(capacity, limit), capacity)
                demand += np.where(tenant, wanted, 0)
            cut = d[:, r] - d[:, r] % unit
            values.append(divided(cut, capacity, cut + demand))
        return np.where(known, self._worth(values), -1)

    def _rows(self, h: int, counts: list[int]) -> tuple[IntArray, IntArray | None]:
        """Bandwidths within a host by request, of all disjoint subsets that differ in them.

        With their masks; or one row without any, where all subsets of a size are alike.
        """
        problem = self.problem
        best, least = self._ranges[h]
        if not any(counts) or (best == least).all():
            return np.array([[best[c] if c else NO_LIMIT for c in counts]]), None
        key = problem.cluster.type_of[h], int(problem.state.masks[h])
        if key not in self._divided:
            self._divided[key] = self._divide(h, key[1])
        sizes, limits, masks = self._divided[key]
        rows = np.flatnonzero((sizes == counts).all(axis=1))
        return limits[rows], masks[rows]

    def _divide(self, h: int, free: int) -> tuple[IntArray, IntArray, IntArray]:
        """All ways to give free GPUs to requests: sizes, bandwidths and masks, one of each kind."""
        words = self.problem.tables.words  # type: ignore[union-attr]
        record = words[words[RECORDS] + h * RECORD :][:RECORD]
        many = len(self.order)
        masks = np.zeros((1, many), np.int64)
        for place in range(MOST_BY_SUBSET):
            if free >> place & 1:
                given = np.vstack([np.zeros(many, np.int64), np.eye(many, dtype=np.int64) << place])
                masks = (masks + given[:, None]).reshape(-1, many)
        sizes = np.bitwise_count(masks).astype(np.int64)
        limits = words[int(record[INTRA]) + masks]
        limits[masks == 0] = NO_LIMIT
        levels, ranks = np.unique(limits, return_inverse=True)
        kind = np.zeros(len(masks), np.int64)
        for r in range(many):
            kind = kind * (MOST_BY_SUBSET + 1) + sizes[:, r]
        _, kind = np.unique(kind, return_inverse=True)
        for column in ranks.reshape(limits.shape).T:
            kind = kind * len(levels) + column
        _, kept = np.unique(kind, return_index=True)
        return sizes[kept], limits[kept], masks[kept]

    # vectors

    def _listed(self, r: int) -> _Vectors:
        """Count vectors of a request on all hosts, by falling value alone, and what they are."""
        judge = CountVectors(self.problem, self.problem.requests[r])
        level, n = judge.levels()[0], self.problem.cluster.n_hosts
        worst = np.full((n, int(self.problem.cluster.sizes.max()) + 1), NO_LIMIT, np.int64)
        for h, (_, least) in enumerate(self._ranges):
            worst[h, : len(least)] = least
        parts = [[np.zeros((0, n), np.int64)] + [np.zeros(0, np.int64)] * 5]
        for block in judge.blocks():
            allowed = block[judge.excess(block, level) == 0]
            shares = judge.shares(allowed)
            counts = np.zeros((len(allowed), n), np.int64)
            counts[:, judge.hosts] = allowed
            low = np.take_along_axis(worst, counts.T, axis=1).min(axis=0)
            low = np.minimum(judge.network(counts), low)
            kept = shares.value >= 0
            known = (counts, shares.value, shares.raw, low, shares.capacity, shares.demand)
            parts.append([column[kept] for column in known])
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.argsort(-columns[1], kind="stable")
        counts, alone, high, low, capacity, demand = (column[order] for column in columns)
        across = (counts > 0).sum(axis=1) >= 2
        return _Vectors(counts, alone, high, low, capacity, demand, across)

    def _like(self, h: int) -> int:
        """The host before this one with which it could change places, or -1."""
        mine = self._role(h)
        return next((other for other in range(h - 1, -1, -1) if self._role(other) == mine), -1)

    def _role(self, h: int) -> tuple[object, ...]:
        """What distinguishes a host from others."""
        problem, cluster = self.problem, self.problem.cluster
        role: list[object] = [
            cluster.type_of[h], int(problem.state.masks[h]),
            tuple(problem.state.held[:, h].tolist()),
        ]  # fmt: skip
        name = cluster.hosts[h].name
        for request in problem.requests:
            policy = request.policy
            role += [name in (policy.include or ()), int(policy.usable(problem.state).masks[h])]
            slices = None if policy.slice_level is None else cluster.level(policy.slice_level)
            for level in (policy.level(cluster), slices):
                if level is not None:
                    role.append(name if level == len(cluster.levels) else cluster.hosts[h].domains)
        return tuple(role)


def _cuts_hosts(problem: GpuPlacement, vectors: CountVectors) -> bool:
    """Whether a request may have some of the free GPUs of a host, and not others."""
    policy, free = vectors.request.policy, problem.state.masks[vectors.hosts]
    some = (vectors.state.masks[vectors.hosts] != free).any()
    return bool(some) or policy.within is not None or policy.whole is not None


def _is_unlimited(problem: GpuPlacement) -> bool:
    """Whether a choice may have no limit at all, or one out of range."""
    tables, state = problem.tables, problem.state
    assert tables is not None
    patterns = tables.automaton.patterns
    singles = (patterns <= 1).all(axis=1) & (patterns.sum(axis=1) > 1)
    if (tables.network[singles] >= MOST).any():
        return True
    return any(
        tables.best(h, int(state.masks[h]), count) >= MOST
        for h in range(problem.cluster.n_hosts)
        for count in range(2, int(state.room[h]) + 1)
    )


def _ways(problem: GpuPlacement, h: int) -> int:
    ways: int = (len(problem.requests) + 1) ** int(problem.state.room[h])
    return ways


def _alike(problem: GpuPlacement, h: int) -> bool:
    """Whether all free subsets of a size have the same bandwidth."""
    best, least = _range(problem, h)
    return bool((best == least).all())


def _range(problem: GpuPlacement, h: int) -> tuple[IntArray, IntArray]:
    """Highest and lowest bandwidth within a host by number of free GPUs; no limit where too few."""
    words = problem.tables.words  # type: ignore[union-attr]
    record = words[words[RECORDS] + h * RECORD :][:RECORD]
    n, free = int(record[GPUS]), int(problem.state.masks[h])
    best = words[int(record[BEST]) + free * (n + 1) :][: n + 1].copy()
    best[best < 0] = NO_LIMIT
    least = best.copy()
    if record[BY_MASK]:
        every = np.arange(1 << n)
        masks = every[(every & ~free) == 0]
        np.minimum.at(least, subset_sizes(n)[masks], words[int(record[INTRA]) + masks])
    return best, least
