"""Integer model of evictions and moves: numbers of GPUs by host, as interchangeable slots.

A moved job is stopped and restarted elsewhere: it gets as many GPUs of the same type, pod by pod,
within its level, and may get some of its former GPUs back. Jobs of one shape (pods, level, type)
are interchangeable, so the model counts jobs of a shape by domain and pods of a size by host.
Domains of all levels are nested, so that slots suffice in every domain exactly if they can be
assigned to the jobs (Hall's theorem for laminar families).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from optsched.plan.counts import WHOLE
from optsched_solvers.moves.gpu_ids import Chosen
from optsched_solvers.moves.integer_program import Row, minimize

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.plan.counts import Counts
    from optsched_solvers.moves.gpu_ids import Cut


class Shape(NamedTuple):
    """What distinguishes jobs for a move; `job` is that of a job with a least bandwidth, or -1."""

    size: int
    pods: int
    level: int
    kinds: tuple[int, ...]
    job: int = -1


class MoveModel:
    """Rows and costs of a model in which some running jobs may be evicted or moved; others stay."""

    def __init__(self, counts: Counts, evict: Iterable[int], move: Iterable[int]) -> None:
        self.counts = counts
        self.upper: list[int] = []
        self.cost: list[int] = []
        self.rows: list[Row] = []
        self.evicted = {
            j: self.variable(1, counts.cost(counts.jobs[j].evict)) for j in sorted(evict)
        }
        self.moved = {j: self.variable(1, counts.cost(counts.jobs[j].move)) for j in sorted(move)}
        self.leaves: dict[int, list[tuple[int, int]]] = {}
        self._on: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for j in sorted(self.evicted.keys() | self.moved.keys()):
            self.leaves[j] = [(part[j], 1) for part in (self.evicted, self.moved) if j in part]
            if len(self.leaves[j]) == 2:
                self.row(self.leaves[j], most=1)
            for h, count in counts.at[j]:
                self._on[h].append((j, count))
        self.most_free = [
            free + sum(count for _, count in self._on[h]) for h, free in enumerate(counts.free)
        ]
        self.gang: dict[int, tuple[int, int]] = {}  # host -> variable, GPUs of one unit
        self.bins: dict[int, list[int]] = {}  # first host -> hosts that count as one
        self.slots: dict[tuple[int, int, int], int] = {}  # (job or -1, size, bin) -> variable
        self.jobs_in: dict[tuple[Shape, int], int] = {}  # (shape, cell) -> variable

    def _shape(self, j: int) -> Shape:
        """Return the shape of a running job on hosts of one type."""
        job, kinds = self.counts.jobs[j], self.counts.kinds[j]
        key = j if job.bandwidth is not None else -1
        if job.level == "host":
            return Shape(job.gpus, 1, WHOLE, kinds, key)
        return Shape(job.pod, job.gpus // job.pod, self.counts.level(job), kinds, key)

    def variable(self, upper: int, cost: int = 0) -> int:
        """Add an integer variable from 0 to `upper`."""
        self.upper.append(int(upper))
        self.cost.append(cost)
        return len(self.upper) - 1

    def row(
        self, terms: Iterable[tuple[int, int]], least: float = -math.inf, most: float = math.inf
    ) -> None:
        """Add a linear constraint; terms of one variable are added up."""
        total: dict[int, int] = defaultdict(int)
        for v, a in terms:
            total[v] += a
        self.rows.append(Row([*total], [*total.values()], least, most))

    def add_gang(self, units: int, size: int, cells: Sequence[int], cell: int) -> None:
        """Place `units` pods of `size` GPUs on the hosts of one cell."""
        for h, c in enumerate(cells):
            if c == cell and self.most_free[h] >= size:
                self.gang[h] = self.variable(min(units, self.most_free[h] // size)), size
        self.row([(v, 1) for v, _ in self.gang.values()], units, units)
        # GPUs are conserved: what the gang takes beyond the free GPUs is evicted; lifts the bound
        freed = [(v, self.counts.jobs[j].gpus) for j, v in self.evicted.items()]
        self.row(freed, least=units * size - sum(self.counts.free))

    def add_moved(self) -> None:
        """Give every moved job slots for its pods within a domain of its level."""
        counts = self.counts
        by_shape: dict[Shape, list[int]] = defaultdict(list)
        for j in self.moved:
            by_shape[self._shape(j)].append(j)
        levels = sorted({s.level for s in by_shape} | {WHOLE})
        self._make_bins({(s.size, s.job) for s in by_shape}, levels)
        type_of = counts.snapshot.cluster.type_of
        need: dict[tuple[int, int, int, int], list[tuple[int, int]]] = defaultdict(list)
        for shape, jobs in by_shape.items():
            bins = [h for h in self.bins if type_of[h] in shape.kinds]
            for h in bins:
                key = shape.job, shape.size, h
                most = sum(self.most_free[k] // shape.size for k in self.bins[h])
                if key not in self.slots and most:
                    self.slots[key] = self.variable(most)
            cells = counts.cells(shape.level)
            first = {cells[h]: h for h in reversed(bins)}
            for c, h in first.items():
                v = self.jobs_in[shape, c] = self.variable(len(jobs))
                for level in levels:
                    if level <= shape.level:
                        key_ = shape.job, shape.size, level, counts.cells(level)[h]
                        need[key_].append((v, shape.pods))
            terms = [(self.jobs_in[shape, c], 1) for c in first]
            self.row(terms + [(self.moved[j], -1) for j in jobs], 0, 0)
        by_slot: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for (job, size, h), v in self.slots.items():
            by_slot[job, size].append((h, v))
        for (job, size, level, cell), terms in need.items():
            cells = counts.cells(level)
            inside = [(v, 1) for h, v in by_slot[job, size] if cells[h] == cell]
            self.row(inside + [(v, -n) for v, n in terms], least=0)
            if job >= 0:  # slots of one job: no more than its pods, so that cuts see its hosts
                self.row(inside + [(v, -n) for v, n in terms], most=0)

    def _make_bins(self, slots: set[tuple[int, int]], levels: Sequence[int]) -> None:
        """Count hosts of one domain as one where no job changes and the gang cannot be.

        If every size of slots divides the next, the largest slots first fill hosts to their
        limits: slots fit exactly if those of each size and above fit by numbers.
        """
        sizes = sorted({size for size, _ in slots})
        divide = all(b % a == 0 for a, b in pairwise(sizes))
        alone = not divide or any(job >= 0 for _, job in slots)  # cuts name single hosts
        first: dict[tuple[int, ...], int] = {}
        for h, free in enumerate(self.most_free):
            if alone or self._on[h] or h in self.gang:
                self.bins[h] = [h]
            elif sizes and free >= sizes[0]:
                key = tuple(self.counts.cells(level)[h] for level in levels)
                self.bins.setdefault(first.setdefault(key, h), []).append(h)

    def add_hosts(self) -> None:
        """Limit every host to its GPUs."""
        used: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (_, size, h), v in self.slots.items():
            used[h].append((v, size))
        for h, (v, size) in self.gang.items():
            used[h].append((v, size))
        for h, terms in used.items():
            if h not in self.bins or len(self.bins[h]) == 1:
                leaving = [(v, -count) for j, count in self._on[h] for v, _ in self.leaves[j]]
                self.row(terms + leaving, most=self.counts.free[h])
                continue
            for size in {size for _, size in terms}:
                larger = [(v, other // size) for v, other in terms if other >= size]
                self.row(larger, most=sum(self.counts.free[k] // size for k in self.bins[h]))

    def add_cut(self, cut: Cut) -> None:
        """Exclude one distribution: at equal totals, another one has less on one of its hosts."""
        if cut.job < 0:
            parts = {h: self.gang[h] for h, _ in cut.hosts if h in self.gang}
        else:
            shape = self._shape(cut.job)
            keys = {h: (cut.job, shape.size, h) for h, _ in cut.hosts}
            parts = {h: (self.slots[k], shape.size) for h, k in keys.items() if k in self.slots}
        if len(parts) < len(cut.hosts) or (cut.job >= 0 and cut.job not in self.moved):
            return  # these hosts, or this job, are fixed otherwise
        fewer = []
        for h, gpus in cut.hosts:
            v, size = parts[h]
            less, most = self.variable(1), self.upper[v]
            self.row([(v, 1), (less, most - gpus // size + 1)], most=most)
            fewer.append((less, 1))
        chosen = [] if cut.job < 0 else [(self.moved[cut.job], -1)]
        self.row(fewer + chosen, least=1 if cut.job < 0 else 0)

    def add_forbidden(self, evict: Iterable[int], move: Iterable[int]) -> None:
        """Exclude all plans that contain these evictions and moves."""
        evict, move = list(evict), list(move)
        if all(j in self.evicted for j in evict) and all(j in self.moved for j in move):
            terms = [(self.evicted[j], 1) for j in evict] + [(self.moved[j], 1) for j in move]
            self.row(terms, most=len(terms) - 1)

    def add_limit(self, most: float) -> None:
        """Exclude all plans above a cost."""
        if most < math.inf:
            self.row([(v, a) for v, a in enumerate(self.cost) if a], most=most)

    def solve(self, seconds: float) -> tuple[list[int] | None, float]:
        """Return the best values found, or None, and a lower bound of the cost."""
        return minimize(self.upper, self.cost, self.rows, seconds)

    def chosen(self, values: Sequence[int]) -> Chosen:
        """Assign slots to jobs: those of a domain go first to jobs of its level, lowest first."""
        left = Counter({key: values[v] for key, v in self.slots.items()})
        jobs: dict[Shape, list[int]] = defaultdict(list)
        for j, v in self.moved.items():
            if values[v]:
                jobs[self._shape(j)].append(j)
        taken: list[tuple[int, int, int, int]] = []  # (size, pods, job, bin)
        for (shape, cell), v in sorted(self.jobs_in.items(), key=lambda one: -one[0][0].level):
            cells = self.counts.cells(shape.level)
            for _ in range(values[v]):
                j, needed = jobs[shape].pop(), shape.pods
                for h in self.bins:
                    key = shape.job, shape.size, h
                    if cells[h] == cell and (pods := min(needed, left[key])) > 0:
                        left[key] -= pods
                        needed -= pods
                        taken.append((shape.size, pods, j, h))
        place = {h: values[v] * size for h, (v, size) in self.gang.items() if values[v]}
        evict = [j for j, v in self.evicted.items() if values[v]]
        return Chosen(evict, self._spread(taken), place)

    def _spread(self, taken: list[tuple[int, int, int, int]]) -> dict[int, dict[int, int]]:
        """Assign the hosts of bins, the largest slots first, few hosts to each job."""
        free = list(self.counts.free)
        move: dict[int, dict[int, int]] = defaultdict(Counter)
        for size, total, j, b in sorted(taken, reverse=True):
            pods, alone = total, len(self.bins[b]) == 1
            while pods:
                fitting = [h for h in self.bins[b] if free[h] // size >= pods]
                h = b if alone else min(fitting, key=free.__getitem__, default=-1)
                if h < 0:
                    h = max(self.bins[b], key=free.__getitem__)
                here = pods if alone else min(pods, free[h] // size)
                move[j][h] += here * size
                free[h] -= here * size
                pods -= here
        return move
