"""Exact choice of k GPUs where joint allocations are those of the real GPUs.

For fixed counts a choice's value never falls when the bandwidth within a host rises, neither that
of its own GPUs nor that of its GPUs together with a job's. So of the subsets of a host with equally
many GPUs only those matter that no other beats in all of these (Pareto): they are the candidates
of a depth-first search over hosts, with the most that any completion may have as its bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from optsched.bandwidth.ask import MOST_LEAVES, Choice, domain_numbers, levels_of
from optsched.bandwidth.contention import Contention
from optsched.bandwidth.intra import MOST_BY_SUBSET
from optsched.bandwidth.policy import ANY, Policy
from optsched.bandwidth.rates import NO_LIMIT
from optsched.bandwidth.tables import BEST, BY_MASK, GPUS, INTRA, LEFT, RECORD, RECORDS, WHOLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.cluster import Cluster
    from optsched.bandwidth.state import ClusterState
    from optsched.bandwidth.tables import CountTables
    from optsched.model.schedule import IntArray

_NODES: Final = 50_000
"""Nodes between two looks at the number of leaves."""


def ask_exact(
    tables: CountTables,
    state: ClusterState,
    demands: Sequence[int],
    k: int,
    policy: Policy | None = None,
    contention: Contention | None = None,
    leaves: int = MOST_LEAVES,
) -> Choice | None:
    """The best k free GPUs when jobs share with the GPUs they really have; None if there are none.

    Any other `fill` works too. Of several best choices the first one met is answered; on each of
    its hosts no subset with lower ids has the same bandwidths.

    Parameters
    ----------
    tables
        Bandwidths of the cluster.
    state
        Free GPUs and running jobs.
    demands
        kB/s of every job.
    k
        How many.
    policy, contention
        By default everything is allowed, and jobs share as in ``Contention(fill="exact")``.
    leaves
        About how many choices of candidates to evaluate at each level of the policy; if more are
        needed, the answer is the best found and not `Choice.exact`.
    """
    rule = contention or Contention(fill="exact")
    for level in levels_of(tables.cluster, policy or Policy()):
        search = SubsetSearch(tables, state, demands, k, policy or Policy(), rule, level)
        while not search.finished and search.leaves < leaves:
            search.run(min(_NODES, max(1, leaves - search.leaves)))
        if search.value >= 0:
            return search.choice()
        if not search.finished:
            return None
    return None


class SubsetSearch:
    """A depth-first branch and bound over hosts by falling number of free GPUs.

    It goes on where it stopped; at any time `value` and `upper` enclose the optimum.

    Parameters
    ----------
    tables, state, demands, k, policy, contention
        As in `ask_exact`.
    required
        Position of the level in one domain of which the choice must lie.
    """

    def __init__(
        self,
        tables: CountTables,
        state: ClusterState,
        demands: Sequence[int],
        k: int,
        policy: Policy,
        contention: Contention,
        required: int | None = None,
    ) -> None:
        from optsched.bandwidth import subset_search as kernel

        self.tables, self.state, self.k = tables, state, k
        self._kernel = cast("Any", kernel)
        cluster = tables.cluster
        barred = {cluster.host_index(name) for name in policy.exclude or ()}
        must = {cluster.host_index(name) for name in policy.include or ()}
        room = state.room.tolist()
        usable = [h for h in range(cluster.n_hosts) if room[h] and h not in barred]
        self.hosts = sorted(usable, key=lambda h: (-room[h], h))
        """Hosts in the order of the search."""
        self.finished = not must <= set(usable) or sum(room[h] for h in usable) < k
        """Whether nothing is left to search."""
        across = [
            j
            for j, held in enumerate(state.held)
            if int((held > 0).sum()) >= 2 and (demands[j] > 0 or not contention.skip_idle)
        ]
        self._held = _masks_of(cluster, state, across)
        self.masks: list[int] = []
        """Mask (or number of GPUs) of every candidate."""
        rows, places = [], []
        for u, h in enumerate(self.hosts):
            found, masks = self._candidates(h, contention.fill)
            places.append([
                len(self.masks), len(self.masks) + len(masks), int(h in must),
                cluster.type_of[h], 0, 0, sum(room[w] for w in self.hosts[u:]),
            ])  # fmt: skip
            self.masks += masks
            rows.append(found)
        of = np.array(places, np.int64).reshape(-1, kernel.HOST)
        if policy.slice_level is not None:
            of[:, 4] = domain_numbers(cluster, cluster.level(policy.slice_level))[self.hosts]
        if required is not None:
            of[:, 5] = domain_numbers(cluster, required)[self.hosts]
        self._rule = np.array(
            [
                k, len(self.hosts), len(across), policy.most_difference, policy.min_hosts,
                ANY if policy.max_hosts is None else policy.max_hosts, policy.same_type,
                contention.sides == "two", contention.cross_only, contention.unit,
                policy.slice_size or 0,
            ],
            np.int64,
        )  # fmt: skip
        self._of = of.reshape(-1)
        self._candidate = np.concatenate([np.zeros(0, np.int64), *(r.reshape(-1) for r in rows)])
        self._jobs = self._begin([demands[j] for j in across], contention)
        used, most = len(self.hosts), max((row[1] - row[0] for row in places), default=0)
        self._work = np.zeros((used + 1) * kernel.level_size(len(across)), np.int64)
        self._order = np.zeros(max(1, 2 * used * most), np.int64)
        self._out = np.zeros(kernel.CHOSEN + used, np.int64)
        self._out[kernel.VALUE] = -1
        self._out[kernel.UPPER] = NO_LIMIT
        self._out[kernel.LEVEL] = -1

    def run(self, nodes: int) -> None:
        """Look at so many more nodes, or all that are left."""
        if not self.finished:
            self.finished = bool(
                self._kernel.search(
                    self.tables.words, self._rule, self._of, self._candidate, self._jobs,
                    self._work, self._order, self._out, nodes,
                )
            )  # fmt: skip

    @property
    def value(self) -> int:
        """Bandwidth of the best choice found, -1 if none is."""
        return int(self._out[self._kernel.VALUE])

    @property
    def upper(self) -> int:
        """No choice has more."""
        return self.value if self.finished else int(self._out[self._kernel.UPPER])

    @property
    def leaves(self) -> int:
        """Choices of candidates evaluated."""
        return int(self._out[self._kernel.LEAVES])

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Hosts of the best choice, with masks (or numbers) of GPUs."""
        chosen = self._out[self._kernel.CHOSEN :].tolist()
        pairs = ((h, self.masks[c]) for h, c in zip(self.hosts, chosen, strict=True))
        return tuple(sorted((h, part) for h, part in pairs if part))

    def choice(self) -> Choice:
        """The best choice found, as `optsched.bandwidth.ask.ask` has it."""
        kernel, out, words = self._kernel, self._out, self.tables.words
        whole = left = 0
        parts = dict(self.parts)
        for h in self.hosts:
            record = words[words[RECORDS] + h * RECORD :][:RECORD]
            rest = int(self.state.masks[h]) - parts.get(h, 0)
            whole += int(words[record[WHOLE] + rest])
            left += int(words[record[LEFT] + rest])
        capacity = int(out[kernel.CAPACITY]) if out[kernel.SHARED] else None
        return Choice(
            self.value, self.value, int(out[kernel.STANDALONE]), capacity, int(out[kernel.DEMAND]),
            self.parts, whole, left, self.leaves, self.finished,
        )  # fmt: skip

    def _candidates(self, h: int, fill: str) -> tuple[IntArray, list[int]]:
        """Of a host count, own and joint bandwidths of every candidate, and its masks."""
        kernel, words = self._kernel, self.tables.words
        record = words[words[RECORDS] + h * RECORD :][:RECORD]
        free, n = int(self.state.masks[h]), int(record[GPUS])
        held = [job[h] for job in self._held]
        if not record[BY_MASK]:
            counts = np.arange(min(free, self.k) + 1)
            sums = [int(record[INTRA]) + counts + theirs for theirs in held]
            rows = [counts, words[int(record[INTRA]) + counts], *(words[at] for at in sums)]
            return np.column_stack(rows).astype(np.int64), counts.tolist()
        size = kernel.sizes(MOST_BY_SUBSET)
        masks = kernel.submasks(free)
        masks = masks[size[masks] <= self.k]
        rows = [size[masks], words[int(record[INTRA]) + masks]]
        for theirs in held:
            both = size[masks] + size[theirs]
            if fill == "exact":
                at = int(record[INTRA]) + (masks | theirs)
            elif fill == "best":
                at = int(record[BEST]) + ((1 << n) - 1) * (n + 1) + both
            else:
                at = int(record[INTRA]) + (1 << both) - 1
            rows.append(words[at])
        table = np.column_stack(rows).astype(np.int64)
        # by count, then best first, and of equals the lowest ids (the highest reversed mask)
        reversed_ids = -sum((masks >> i & 1) << (MOST_BY_SUBSET - i) for i in range(n))
        order = np.lexsort([reversed_ids, *(-column for column in table.T[:0:-1]), table[:, 0]])
        table = np.ascontiguousarray(table[order])
        kept = np.flatnonzero(kernel.pareto(table.reshape(-1), table.shape[1]))
        return table[kept], masks[order][kept].tolist()

    def _begin(self, demands: list[int], contention: Contention) -> IntArray:
        """By job: demand, what it has on hosts that cannot be used, GPUs on those that can."""
        words, machine = self.tables.words, self.tables.automaton
        rows = []
        for demand, job in zip(demands, self._held, strict=True):
            state, limit = 0, NO_LIMIT
            sizes = []
            for h in range(self.tables.cluster.n_hosts):
                record = words[words[RECORDS] + h * RECORD :][:RECORD]
                n = int(record[GPUS])
                count = job[h].bit_count() if record[BY_MASK] else job[h]
                sizes.append(count)
                if not count or h in self.hosts:
                    continue
                state = int(machine.step[state, count])
                at = int(record[INTRA]) + job[h]
                if record[BY_MASK] and contention.fill == "best":
                    at = int(record[BEST]) + ((1 << n) - 1) * (n + 1) + count
                elif record[BY_MASK] and contention.fill == "first":
                    at = int(record[INTRA]) + (1 << count) - 1
                limit = min(limit, int(words[at]))
            own = (0, NO_LIMIT) if contention.sides == "two" else (state, limit)
            rows.append([demand, *own, state, limit, *(sizes[h] for h in self.hosts)])
        return np.array(rows, np.int64).reshape(-1)


def _masks_of(cluster: Cluster, state: ClusterState, jobs: list[int]) -> list[list[int]]:
    """By job and host the mask of its GPUs, or their number where a host has over 16."""
    found = []
    for j in jobs:
        row = [0] * cluster.n_hosts
        for gpu in state.jobs[j].gpus:
            h = int(cluster.host_of[gpu])
            small = cluster.sizes[h] <= MOST_BY_SUBSET
            row[h] += 1 << (gpu - int(cluster.first[h])) if small else 1
        found.append(row)
    return found


__all__ = ["SubsetSearch", "ask_exact"]
