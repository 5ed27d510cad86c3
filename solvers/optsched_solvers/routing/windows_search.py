"""Simulated annealing of the batches of a clairvoyant routing."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Final

from optsched_solvers.routing.window import Batch
from optsched_solvers.routing.windows_bound import lost_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched_solvers.routing.window import Window

    Row = tuple[int, int, tuple[int, ...]]  # pool, width, requests

HEAT: Final = (1e-2, 5e-4)
"""First and last temperature, as shares of the mean cost of a request."""

EVERY: Final = 64
"""Steps between two looks at the clock."""

_NEAR: Final = 5  # batches of about the same time that requests may move to


class Annealing:
    """Moves, splits and merges batches, and changes their widths and pools.

    Within a segment batches start in the order in which all their requests are there.
    """

    def __init__(self, window: Window, batches: list[Batch], seed: int) -> None:
        problem = window.problem
        self.problem, self.window, self.dice = problem, window, random.Random(seed)
        k, n = problem.n_segments, problem.n_requests
        pools = window.pools
        self.pools = [[g for g, pool in enumerate(pools) if pool[0] == i] for i in range(k)]
        self.launch = [int(problem.launch[s]) for _, _, s in pools]
        self.work = [problem.cost[s, i].tolist() for i, _, s in pools]
        self.lost = lost_ns(problem).tolist()
        self.arrived = int(problem.arrival.sum())
        self.rows: list[list[Row]] = [
            [(b.pool, b.width, b.requests) for b in batches if b.segment == i] for i in range(k)
        ]
        self.there = [problem.arrival.tolist(), *([] for _ in range(k))]
        self.width: list[list[int]] = [[0] * n, *([] for _ in range(k))]
        self.cost = self._timed(0)
        self.best = self.cost, list(self.rows)

    def run(self, progress: Callable[[int], float], improved: Callable[[], None]) -> None:
        """Cool down while `progress`, asked by steps, goes from 0 to 1; tell of better batches."""
        hot, cold = (share * self.cost / self.problem.n_requests for share in HEAT)
        step, told, heat = 0, self.best[0], hot
        while True:
            if step % EVERY == 0:
                if self.best[0] < told:
                    told = self.best[0]
                    improved()
                done = progress(step)
                if done >= 1:
                    return
                heat = hot * (cold / hot) ** done
            step += 1
            self._step(heat)

    def batches(self) -> list[Batch]:
        """The best so far, told by when their requests are there."""
        kept, self.rows = self.rows, list(self.best[1])
        self._timed(0)
        found = [
            Batch(k, pool, w, max(self.there[k][r] for r in requests), tuple(sorted(requests)))
            for k, rows in enumerate(self.rows)
            for pool, w, requests in rows
        ]
        self.rows = kept
        self.cost = self._timed(0)
        return found

    def _step(self, heat: float) -> None:
        k = self.dice.randrange(len(self.rows))
        new = self._moved(k)
        if new is None:
            return
        kept = self.rows[k], self.there[:], self.width[:]
        self.rows[k] = new
        cost = self._timed(k)
        worse = cost - self.cost
        if worse > 0 and self.dice.random() >= math.exp(-worse / heat):
            self.rows[k], self.there, self.width = kept
            return
        self.cost = cost
        if cost < self.best[0]:
            self.best = cost, list(self.rows)

    def _moved(self, k: int) -> list[Row] | None:
        """The batches of a segment after a random move; None: it is none."""
        dice, new = self.dice, list(self.rows[k])
        i = dice.randrange(len(new))
        pool, w, requests = new[i]
        kind = dice.random()
        if kind < 0.55:  # a request, or all, to another batch
            moved = requests if kind < 0.2 else (dice.choice(requests),)
            end = self.there[k + 1]
            apart = [abs(end[row[2][0]] - end[moved[0]]) for row in new]
            near = sorted((j for j in range(len(new)) if j != i), key=apart.__getitem__)[:_NEAR]
            if not near:
                return None
            j = dice.choice(near)
            new[j] = (*new[j][:2], new[j][2] + moved)
            if len(new[j][2]) > self.problem.max_batch:
                return None
            rest = tuple(r for r in requests if r not in moved)
            if rest:
                new[i] = pool, w, rest
            else:
                del new[i]
            return new
        if kind < 0.7:  # the later ones alone
            if len(requests) < 2:
                return None
            there = sorted(requests, key=self.there[k].__getitem__)
            cut = dice.randrange(1, len(there))
            new[i] = pool, w, tuple(there[:cut])
            pool, requests = dice.choice(self.pools[k]), tuple(there[cut:])
            new.append((pool, w, requests))
        elif kind < 0.85:
            w = dice.randrange(self.problem.n_widths)
            new[i] = pool, w, requests
        else:
            pool = dice.choice(self.pools[k])
            new[i] = pool, w, requests
        return new if w <= self.window.pools[pool][1] else None

    def _timed(self, first: int) -> int:
        """Times from a segment on; what it all costs."""
        n, widths = self.problem.n_requests, self.problem.n_widths
        index = [0] * n
        for k, rows in enumerate(self.rows):
            if k < first:
                index = [i * widths + w for i, w in zip(index, self.width[k + 1], strict=True)]
                continue
            there, before = self.there[k], self.width[k]
            end, width = [0] * n, [0] * n
            free = {g: [0] * self.window.counts[g] for g in self.pools[k]}
            order: list[Any] = [(max([there[r] for r in row[2]]), row) for row in rows]
            order.sort(key=lambda one: one[0])
            for start, (pool, w, requests) in order:
                mine = free[pool]
                soonest = min(mine)
                work = self.work[pool][max([before[r] for r in requests])][w]
                done = max(start, soonest) + math.ceil(self.launch[pool] + len(requests) * work)
                mine[mine.index(soonest)] = done
                for r in requests:
                    end[r], width[r] = done, w
            self.there[k + 1], self.width[k + 1] = end, width
            index = [i * widths + w for i, w in zip(index, width, strict=True)]
        total: int = sum(self.there[-1]) - self.arrived + sum([self.lost[i] for i in index])
        return total
