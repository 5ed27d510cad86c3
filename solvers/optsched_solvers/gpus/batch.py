"""Several requests at once: disjoint GPUs, every request a tenant to the others, jointly optimal.

Requests take count vectors by falling bandwidth alone, depth first. For given vectors the joint
limits are fixed; but a slower subset may serve all of them better, since it asks for less. So where
the bandwidth within a host depends on more than counts, all combinations of disjoint subsets that
differ in bandwidths are followed, host by host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from optsched.bandwidth.ask import ask, gpus_of, trays_first
from optsched.bandwidth.intra import MOST_BY_SUBSET
from optsched.bandwidth.model import UnmeasuredPattern
from optsched.bandwidth.rates import MOST, NO_LIMIT
from optsched.bandwidth.state import Job
from optsched.bandwidth.tables import BEST, BY_MASK, GPUS, INTRA, RECORD, RECORDS
from optsched.model.schedule import Rows
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.gpus.vectors import CountVectors

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray
    from optsched.problems.gpus.problem import SubsetChoice
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MOST_REQUESTS: Final = 5
MOST_VECTORS: Final = 200_000
"""Count vectors of a request."""

MOST_ASSIGNMENTS: Final = 1 << 20
"""Ways to divide the free GPUs of a host whose subsets differ."""

NODES: Final = 20_000
"""Nodes between two looks at the limits: some milliseconds."""

FIRST: Final = 1_000


def supports(problem: SubsetChoice) -> Support:
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
        number = CountVectors(problem, request).count()
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


def solve(problem: SubsetChoice, limits: Limits, monitor: Monitor) -> Result:
    """One after the other first, then jointly; one iteration is one node, of 1 + many requests."""
    if not load(monitor, "optsched.bandwidth.counts"):
        return Result("unknown")
    chosen = one_after_the_other(problem)
    if chosen is not None:
        monitor.incumbent(Rows.of(chosen), -problem.worth(chosen), "one after the other")
    if monitor.should_stop() or not load(monitor, "gpus.batch_search"):
        return Result("unknown")
    search = BatchSearch(problem)
    if monitor.objective is not None:
        search.know(-monitor.objective)
    left = 2**62 if limits.iterations is None else limits.iterations
    nodes, upper = FIRST, -1
    while not search.finished:
        nodes = min(nodes, left)
        if nodes <= 0 or monitor.should_stop():
            return Result("unknown")
        search.run(nodes)
        monitor.advance(nodes)
        left -= nodes
        nodes = NODES
        found = search.gpus()
        if found is not None:
            monitor.incumbent(Rows.of(found), -search.value, "branch_and_bound")
        if search.upper >= 0 and search.upper != upper:
            upper = search.upper
            monitor.bound(-upper, "branch_and_bound")
    if monitor.solution is None and not search.lost:
        names = ", ".join(request.name for request in problem.requests)
        return Result(
            "infeasible", reason=f"no disjoint sets of free GPUs obey the policies of {names:.200}"
        )
    return Result("unknown")


def one_after_the_other(problem: SubsetChoice) -> list[tuple[int, ...]] | None:
    """Requests in their order, each the best for itself beside the earlier ones; None if one fails.

    What the later ones cost the earlier ones is not looked at.
    """
    assert problem.tables is not None
    state, wanted = problem.state, problem.demands
    chosen: list[tuple[int, ...]] = []
    try:
        for request in problem.requests:
            found = ask(
                problem.tables, state.masks, state.held, wanted, request.gpus, request.policy,
                problem.contention,
            )  # fmt: skip
            if found is None:
                return None
            gpus = gpus_of(state, found.parts)
            chosen.append(gpus)
            free = tuple(gpu for gpu in state.free if gpu not in gpus)
            state = state._changed(free, (*state.jobs, Job(f"request {request.name}", gpus)))
            wanted = (*wanted, problem.judged_by.of(gpus))
        problem.worth(chosen)
    except UnmeasuredPattern:  # beside those that came later
        return None
    return chosen


class BatchSearch:
    """The joint search; at any time `value` and `upper` enclose the optimum.

    Parameters
    ----------
    problem
        With several requests, see `supports`.
    """

    def __init__(self, problem: SubsetChoice) -> None:
        from optsched_solvers.gpus import batch_search as kernel

        assert problem.tables is not None
        self.problem, self._kernel = problem, cast("Any", kernel)
        self._words = problem.tables.words
        cluster, rule = problem.cluster, problem.contention
        self.order = sorted(
            range(len(problem.requests)), key=lambda r: (-problem.requests[r].gpus, r)
        )
        many, n, wide = len(self.order), cluster.n_hosts, int(cluster.sizes.max()) + 1
        self._tables()
        parts = [self._vectors(r) for r in self.order]
        ends = np.cumsum([0, *(len(vectors) for vectors, _ in parts)])
        self._vector = np.concatenate([vectors for vectors, _ in parts])
        info = np.concatenate([info for _, info in parts])
        max_min = problem.objective == "max_min"
        alone = problem.best_alone if max_min else (0,) * many
        self._rule = np.array(
            [
                many, n, wide, rule.sides == "two", rule.cross_only, rule.skip_idle, rule.unit,
                max_min, kernel.MOST_STATES, kernel.MOST_EFFORT,
            ],
            np.int64,
        )  # fmt: skip
        rows = np.zeros((many, kernel.REQUEST), np.int64)
        rows[:, 0], rows[:, 1] = ends[:-1], ends[1:]
        rows[:, 2] = [alone[r] for r in self.order]
        self.finished = bool((rows[:, 0] == rows[:, 1]).any())
        self._request = rows.reshape(-1)
        ahead = NO_LIMIT if max_min else 0
        for i in range(many - 1, -1, -1):
            if not self.finished:
                most = int(info[ends[i], kernel.ALONE])
                part = self._kernel.judged(self._rule, self._request, i, most)
                ahead = min(ahead, part) if max_min else ahead + part
            rows[i, 3] = ahead
        self._info = np.ascontiguousarray(info.reshape(-1))
        self._vector = np.ascontiguousarray(self._vector.reshape(-1))
        size = 1 + 2 * n + 2 * many
        self._work = np.zeros((many + 1) * size, np.int64)
        self._states = np.zeros((n * kernel.MOST_STATES + 1) * (many + 2), np.int64)
        self._out = np.zeros(kernel.CHOSEN + many + n, np.int64)
        self._out[kernel.BEST] = self._out[kernel.LEVEL] = self._out[kernel.LOST_UPPER] = -1
        self._out[kernel.UPPER] = NO_LIMIT
        self._known = -1

    def know(self, value: int) -> None:
        """Look only for choices worth more."""
        self._out[self._kernel.BEST] = self._known = value

    def run(self, nodes: int) -> None:
        """Look at so many more nodes, or all that are left."""
        if not self.finished:
            done = self._kernel.search(
                self._words, self._rule, self._request, self._vector, self._info,
                self._host, self._inside, self._own, self._starts, self._rows, self._states,
                self._work, self._out, nodes,
            )  # fmt: skip
            self.finished = bool(done)

    @property
    def value(self) -> int:
        """Objective of the best choice found or known, -1 if there is none."""
        return int(self._out[self._kernel.BEST])

    @property
    def upper(self) -> int:
        """No choice has more."""
        kernel, out = self._kernel, self._out
        upper = self.value if self.finished else int(out[kernel.UPPER])
        return max(upper, int(out[kernel.LOST_UPPER])) if self.lost else upper

    @property
    def lost(self) -> bool:
        """Whether something was left out, so that the end of the search proves less."""
        return bool(self._out[self._kernel.LOST])

    @property
    def leaves(self) -> int:
        """Combinations of count vectors looked at."""
        return int(self._out[self._kernel.LEAVES])

    def gpus(self) -> list[tuple[int, ...]] | None:
        """The best choice found by this search, by request; None if there is none."""
        if self.value <= self._known:
            return None
        kernel, cluster, state = self._kernel, self.problem.cluster, self.problem.state
        many, n = len(self.order), cluster.n_hosts
        chosen = self._out[kernel.CHOSEN : kernel.CHOSEN + many]
        counts = self._vector.reshape(-1, n)[chosen]
        found: list[list[int]] = [[] for _ in range(many)]
        for h in range(n):
            first, size = int(cluster.first[h]), int(cluster.sizes[h])
            row = int(self._out[kernel.CHOSEN + many + h])
            left = [g - first for g in state.free if first <= g < first + size]
            for i, r in enumerate(self.order):
                if row >= 0:
                    mask = int(self._masks[row, i])
                    ids = [a for a in range(size) if mask >> a & 1]
                else:
                    ids = trays_first(left, int(counts[i, h]), cluster.type(h).tray)
                    left = [a for a in left if a not in ids]
                found[r] += [first + a for a in ids]
        return [tuple(gpus) for gpus in found]

    def _vectors(self, r: int) -> tuple[IntArray, IntArray]:
        """Count vectors of a request on all hosts, by falling value alone, and what they are."""
        kernel = self._kernel
        judge = CountVectors(self.problem, self.problem.requests[r])
        level = judge.levels()[0]
        n = self.problem.cluster.n_hosts
        every, infos = [np.zeros((0, n), np.int64)], [np.zeros((0, kernel.INFO), np.int64)]
        for block in judge.blocks():
            allowed = block[judge.excess(block, level) == 0]
            shares = judge.shares(allowed)
            kept = shares.value >= 0
            counts = np.zeros((len(allowed), n), np.int64)
            counts[:, judge.hosts] = allowed
            info = np.zeros((len(allowed), kernel.INFO), np.int64)
            info[:, kernel.ALONE], info[:, kernel.HIGH] = shares.value, shares.raw
            low = np.take_along_axis(self._worst, counts.T, axis=1).min(axis=0)
            info[:, kernel.LOW] = np.minimum(judge.network(counts), low)
            info[:, kernel.CAPACITY], info[:, kernel.DEMAND] = shares.capacity, shares.demand
            info[:, kernel.ACROSS] = (counts > 0).sum(axis=1)
            every.append(counts[kept])
            infos.append(info[kept])
        vectors, infos_all = np.concatenate(every), np.concatenate(infos)
        order = np.argsort(-infos_all[:, kernel.ALONE], kind="stable")
        return vectors[order], infos_all[order]

    def _tables(self) -> None:
        """What the kernel knows of hosts: joint bandwidths, and disjoint subsets that differ."""
        problem, kernel = self.problem, self._kernel
        cluster, words = problem.cluster, self._words
        n, wide, many = cluster.n_hosts, int(cluster.sizes.max()) + 1, len(self.order)
        judge = CountVectors(problem, problem.requests[0])
        inside, own, worst = (np.full((n, wide), NO_LIMIT, np.int64) for _ in range(3))
        hosts = np.zeros((n, kernel.HOST), np.int64)
        starts, rows, masks = [], [], []
        known: dict[tuple[int, int], int] = {}
        begin = total = 0
        for h in range(n):
            row = judge._joint[h]
            inside[h, : len(row)] = row
            free = int(problem.state.masks[h])
            best, least = _range(problem, h)
            own[h, : len(best)], worst[h, : len(least)] = best, least
            alike = _alike(problem, h)
            hosts[h, :3] = problem.state.room[h], self._like(h), alike
            key = (cluster.type_of[h], free)
            if alike or key in known:
                hosts[h, 3] = known.get(key, 0)
                continue
            record = words[words[RECORDS] + h * RECORD :][:RECORD]
            size = 1 << int(record[GPUS])
            places = np.array([i for i in range(MOST_BY_SUBSET) if free >> i & 1], np.int64)
            codes = np.empty((many + 1) ** len(places), np.int64)
            values = np.empty(len(codes) * many, np.int64)
            intra = np.ascontiguousarray(words[int(record[INTRA]) :][:size])
            kernel.assignments(places, intra, many, wide, size, codes, values)
            table = values.reshape(-1, many)
            levels, ranks = np.unique(table, return_inverse=True)
            number = codes.copy()
            for i in range(many):
                number = number * len(levels) + ranks.reshape(table.shape)[:, i]
            _, kept = np.unique(number, return_index=True)  # one of each, ordered by code
            known[key] = hosts[h, 3] = begin
            where = np.searchsorted(codes[kept], np.arange(wide**many + 1))
            starts.append(where + total)
            rows.append(table[kept])
            masks.append(_masks(kept, places, many))
            begin += len(where)
            total += len(kept)
        self._inside, self._own = inside.reshape(-1), own.reshape(-1)
        self._worst, self._host = worst, hosts.reshape(-1)
        nothing = np.zeros((0, many), np.int64)
        self._starts = np.concatenate([np.zeros(0, np.int64), *starts]).astype(np.int64)
        self._rows = np.ascontiguousarray(np.concatenate([nothing, *rows]).reshape(-1))
        self._masks = np.concatenate([nothing, *masks])

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
            role += [name in (policy.include or ()), name in (policy.exclude or ())]
            for level in (policy.required, policy.slice_level):
                if level is not None:
                    at = cluster.level(level)
                    role.append(name if at == len(cluster.levels) else cluster.hosts[h].domains)
        return tuple(role)


def _is_unlimited(problem: SubsetChoice) -> bool:
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


def _ways(problem: SubsetChoice, h: int) -> int:
    ways: int = (len(problem.requests) + 1) ** int(problem.state.room[h])
    return ways


def _alike(problem: SubsetChoice, h: int) -> bool:
    """Whether all free subsets of a size have the same bandwidth."""
    best, least = _range(problem, h)
    return bool((best == least).all())


def _range(problem: SubsetChoice, h: int) -> tuple[IntArray, IntArray]:
    """Highest and lowest bandwidth within a host by number of free GPUs; no limit where too few."""
    from optsched.bandwidth.subset_search import sizes, submasks

    words = problem.tables.words  # type: ignore[union-attr]
    record = words[words[RECORDS] + h * RECORD :][:RECORD]
    n, free = int(record[GPUS]), int(problem.state.masks[h])
    best = words[int(record[BEST]) + free * (n + 1) :][: n + 1].copy()
    best[best < 0] = NO_LIMIT
    least = best.copy()
    if record[BY_MASK]:
        masks = submasks(free)
        np.minimum.at(least, sizes(MOST_BY_SUBSET)[masks], words[int(record[INTRA]) + masks])
    return best, least


def _masks(ways: IntArray, places: IntArray, many: int) -> IntArray:
    """Masks of the requests for numbers of assignments, shape (n, requests)."""
    found = np.zeros((len(ways), many), np.int64)
    rest = ways.copy()
    for place in places.tolist():
        owner = rest % (many + 1) - 1
        rest //= many + 1
        for r in range(many):
            found[owner == r, r] |= 1 << place
    return found
