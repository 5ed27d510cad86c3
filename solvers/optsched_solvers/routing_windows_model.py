"""The CP-SAT model of routing on a plan's instances: a batch is led by its first request."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched_solvers.routing_windows_bound import alone_path, lost_ns, steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched_solvers.routing_windows import Batch, Window

_PARTS: Final = 1000  # of a ns, in which work is counted


class Model:
    """Batches of requests in `free` are open; others keep width, pool and whom they run with.

    Only answers that cost at most `upper` are in it; `batches` is one of them, and the hint.
    """

    def __init__(
        self, window: Window, batches: list[Batch], upper: int, lower: int, free: range
    ) -> None:
        from ortools.sat.python import cp_model

        self.model: Any = cp_model.CpModel()
        self.window, self.problem, self.free = window, window.problem, free
        problem = self.problem
        self.n, self.segments, self.widths = problem.n_requests, problem.n_segments, problem.n_widths
        self.head, self.tail, lone = alone_path(problem, window.hosts)
        self.slack = upper - (self.n - 1) * lone
        self.now = {(r, one.segment): one for one in batches for r in one.requests}
        self.hints: list[tuple[Any, int]] = []
        self.width: dict[tuple[int, int], list[Any]] = {}
        self.finish: dict[tuple[int, int], Any] = {}
        self.joins: dict[tuple[int, int, int], Any] = {}
        self.start: dict[tuple[int, int], Any] = {}
        self.pool: dict[tuple[int, int], dict[int, Any]] = {}
        self.batch_width: dict[tuple[int, int], list[Any]] = {}
        self.intervals: list[list[Any]] = [[] for _ in window.pools]
        lost = [self._request(r) for r in range(self.n)]
        for k in range(self.segments):
            for r in range(self.n):
                self._lead(r, k)
            for r in range(self.n):
                self._join(r, k)
        for rows, count in zip(self.intervals, window.counts, strict=True):
            if count == 1:
                self.model.add_no_overlap(rows)
            else:
                self.model.add_cumulative(rows, [1] * len(rows), count)
        last = self.segments - 1
        total = sum(self.finish[r, last] for r in range(self.n)) + sum(lost)
        arrived = int(problem.arrival.sum())
        self.model.add_linear_constraint(total, lower + arrived, upper + arrived)
        self.model.minimize(total - arrived)
        for variable, value in self.hints:
            self.model.add_hint(variable, value)

    def batches(self, value: Callable[[Any], int]) -> list[Batch]:
        """The batches of a solution."""
        from optsched_solvers.routing_windows import Batch

        found = []
        for (p, k), pools in self.pool.items():
            members = [q for q in range(p, self.n) if value(self.joins.get((q, p, k), 0))]
            if not members:
                continue
            pool = next(g for g, one in pools.items() if value(one))
            width = next(w for w, one in enumerate(self.batch_width[p, k]) if value(one))
            found.append(Batch(k, pool, width, value(self.start[p, k]), tuple(members)))
        return found

    def _bool(self, hint: bool) -> Any:
        found = self.model.new_bool_var("")
        self.hints.append((found, int(hint)))
        return found

    def _int(self, low: int, high: int, hint: int) -> Any:
        found = self.model.new_int_var(low, max(low, high), "")
        self.hints.append((found, min(max(low, high), max(low, hint))))
        return found

    def _request(self, r: int) -> Any:
        """Widths and finishing times of a request; what its tuple's accuracy costs."""
        problem, model = self.problem, self.model
        now = [self.now[r, k].width for k in range(self.segments)]
        arrived = int(problem.arrival[r])
        for k in range(self.segments):
            self.width[r, k] = [
                self._bool(w == now[k]) if r in self.free else int(w == now[k])
                for w in range(self.widths)
            ]
            after = int(self.tail[k + 1]) if k + 1 < self.segments else 0
            self.finish[r, k] = self._int(
                arrived + int(self.head[k] + self.tail[k] - after), arrived + self.slack - after,
                self._end(self.now[r, k]),
            )  # fmt: skip
        lost = lost_ns(problem).tolist()
        if r not in self.free:
            here = int(np.flatnonzero((problem.tuples == now).all(axis=1))[0])
            return lost[here]
        rows = problem.tuples.tolist()
        chosen = [self._bool(row == now) for row in rows]
        model.add_exactly_one(chosen)
        for k, w in product(range(self.segments), range(self.widths)):
            own = [one for one, row in zip(chosen, rows, strict=True) if row[k] == w]
            model.add(sum(own) == self.width[r, k][w])
        took = steps(problem, self.window.hosts).sum(axis=1).tolist()
        for one, time in zip(chosen, took, strict=True):
            if time + min(lost) > self.slack:
                model.add(one == 0)
        last = self.finish[r, self.segments - 1]
        model.add(
            last >= arrived + sum(min(t, self.slack) * one for t, one in zip(took, chosen, strict=True))
        )
        return sum(value * one for value, one in zip(lost, chosen, strict=True))

    def _end(self, batch: Batch) -> int:
        before = 0
        if batch.segment:
            before = max(self.now[r, batch.segment - 1].width for r in batch.requests)
        took = self.window.duration(batch.pool, before, batch.width, len(batch.requests))
        return batch.start + took

    def _lead(self, p: int, k: int) -> None:
        """The batch that request p leads, if it does."""
        model, problem, window = self.model, self.problem, self.window
        now = self.now[p, k]
        leads = now.requests[0] == p
        joins = [
            q for q in range(p, min(self.n, self.n))
            if p in self.free or q in self.free or q in now.requests
        ]  # fmt: skip
        arrived = int(problem.arrival[p])
        soonest, latest = arrived + int(self.head[k]), arrived + self.slack - int(self.tail[k])
        for q in joins:
            if int(problem.arrival[q]) + int(self.head[k]) <= latest:
                self.joins[q, p, k] = self._bool(leads and q in now.requests)
        lead = self.joins[p, p, k]
        start = self.start[p, k] = self._int(soonest, latest, now.start if leads else soonest)
        width = self.batch_width[p, k] = [
            self._bool(w == now.width) if p in self.free else int(w == now.width)
            for w in range(self.widths)
        ]
        if p in self.free:
            model.add_exactly_one(width)
        before = [self._bool(False) for _ in range(self.widths if k else 1)]
        widest = max(self.now[r, k - 1].width for r in now.requests) if k and leads else 0
        self.hints[-len(before) :] = [
            (one, int(i == widest)) for i, one in enumerate(before)
        ]
        model.add_exactly_one(before)
        here = [g for g, (k2, _, _) in enumerate(window.pools) if k2 == k]
        if p not in self.free:
            here = [now.pool]
        pools = self.pool[p, k] = {g: self._bool(leads and g == now.pool) for g in here}
        model.add(sum(pools.values()) == lead)
        images = sum(one for q in joins if (one := self.joins.get((q, p, k))) is not None)
        if len(joins) > problem.max_batch:
            model.add(images <= problem.max_batch)
        took = self._end(now) - now.start if leads else 0
        length = self._int(0, latest - soonest + int(self.tail[k]), took)
        end = self._int(soonest, latest + int(self.tail[k]), now.start + took if leads else soonest)
        model.add(start + length == end)
        model.add(start == soonest).only_enforce_if(~lead)
        model.add(length == 0).only_enforce_if(~lead)
        kinds = {window.pools[g][2] for g in here}
        for s in kinds:
            on = [one for g, one in pools.items() if window.pools[g][2] == s]
            if len(kinds) > 1:
                is_on = self._bool(leads and window.pools[now.pool][2] == s)
                model.add(sum(on) == is_on)
            else:
                is_on = lead
            launch = int(problem.launch[s]) * _PARTS
            for i, w in product(range(len(before)), range(self.widths)):
                if isinstance(width[w], int) and not width[w]:
                    continue
                cost = int(np.floor(problem.cost[s, k, i, w] * _PARTS))
                given = [is_on, before[i], *([] if isinstance(width[w], int) else [width[w]])]
                model.add(_PARTS * length >= launch + cost * images).only_enforce_if(given)
        for g, one in pools.items():
            for w in range(window.pools[g][1] + 1, self.widths):
                if not isinstance(width[w], int):
                    model.add_implication(one, ~width[w])
            self.intervals[g].append(model.new_optional_interval_var(start, length, end, one, ""))
        self._of = getattr(self, "_of", {})
        self._of[p, k] = (lead, before, end)

    def _join(self, q: int, k: int) -> None:
        """Request q runs in one batch, at its width, after its last one."""
        model = self.model
        there = {p: one for p in range(q + 1) if (one := self.joins.get((q, p, k))) is not None}
        model.add_exactly_one(there.values())
        for p, one in there.items():
            lead, before, end = self._of[p, k]
            if p != q:
                model.add_implication(one, lead)
            model.add(self.finish[q, k] == end).only_enforce_if(one)
            if k:
                model.add(self.start[p, k] >= self.finish[q, k - 1]).only_enforce_if(one)
            elif p != q:
                model.add(self.start[p, k] >= int(self.problem.arrival[q])).only_enforce_if(one)
            for w in range(self.widths):
                mine, its = self.width[q, k][w], self.batch_width[p, k][w]
                if isinstance(mine, int) and isinstance(its, int):
                    if mine != its:
                        model.add(one == 0)
                        break
                else:
                    model.add(mine == its).only_enforce_if(one)
                if k:
                    given = self.width[q, k - 1][w]
                    if isinstance(given, int) and not given:
                        continue
                    clause = [one] if isinstance(given, int) else [one, given]
                    for i in range(w):
                        model.add_bool_or([~before[i], *(~x for x in clause)])
