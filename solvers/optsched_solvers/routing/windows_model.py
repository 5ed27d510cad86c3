"""The CP-SAT model of routing on a plan's instances: a batch is led by its first request."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched_solvers.routing.window import Batch
from optsched_solvers.routing.windows_bound import lost_ns, steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched_solvers.routing.window import Window

_PARTS: Final = 1000  # of a ns, in which work is counted


class _Led(NamedTuple):
    """Variables of the batch that a request leads, if it does: then `joins` has it."""

    segment: int
    start: Any
    end: Any
    width: list[Any]
    before: list[Any]
    """Which input is the widest."""
    pools: dict[int, Any]
    joins: dict[int, Any]


class Model:
    """Exact; the batches given are the hint, and nothing dearer than they (`upper`) is in it."""

    def __init__(self, window: Window, batches: list[Batch], upper: int, lower: int) -> None:
        from ortools.sat.python import cp_model

        self.model: Any = cp_model.CpModel()
        self.window, self.problem = window, window.problem
        problem = self.problem
        n, k = problem.n_requests, problem.n_segments
        least = steps(problem, window.hosts)
        self.took, self.lost = least.sum(axis=1), lost_ns(problem)
        self.before = np.concatenate([[0], np.cumsum(least.min(axis=0))]).tolist()
        self.latest = problem.arrival + upper - (n - 1) * int((self.took + self.lost).min())
        self.now = {(r, one.segment): one for one in batches for r in one.requests}
        self.intervals: list[list[Any]] = [[] for _ in window.pools]
        self.width: dict[tuple[int, int], list[Any]] = {}
        self.finish: dict[tuple[int, int], Any] = {}
        lost = [self._request(r) for r in range(n)]
        self.led = []
        for i in range(k):
            here = [self._batch(p, i) for p in range(n)]
            for r in range(n):
                self._join(r, i, here)
            if i and (np.diff(problem.cost[:, i], axis=1) < 0).any():
                self._attain(i, here)
            self.led += here
        for rows, count in zip(self.intervals, window.counts, strict=True):
            if count == 1:
                self.model.add_no_overlap(rows)
            else:
                self.model.add_cumulative(rows, [1] * len(rows), count)
        total = sum(self.finish[r, k - 1] for r in range(n)) + sum(lost)
        arrived = int(problem.arrival.sum())
        self.model.add_linear_constraint(total, lower + arrived, upper + arrived)
        self.model.minimize(total - arrived)

    def batches(self, value: Callable[[Any], int]) -> list[Batch]:
        """The batches of a solution."""
        found = []
        for one in self.led:
            members = tuple(q for q, joins in one.joins.items() if value(joins))
            if members:
                pool = next(g for g, chosen in one.pools.items() if value(chosen))
                width = next(w for w, chosen in enumerate(one.width) if value(chosen))
                found.append(Batch(one.segment, pool, width, value(one.start), members))
        return found

    def _bool(self, hint: bool) -> Any:
        found = self.model.new_bool_var("")
        self.model.add_hint(found, int(hint))
        return found

    def _int(self, low: int, high: int, hint: int) -> Any:
        found = self.model.new_int_var(low, max(low, high), "")
        self.model.add_hint(found, min(max(low, high), max(low, hint)))
        return found

    def _one_of(self, size: int, hint: int) -> list[Any]:
        found = [self._bool(i == hint) for i in range(size)]
        self.model.add_exactly_one(found)
        return found

    def _after(self, k: int) -> int:
        """Least time from segment k on."""
        found: int = self.before[-1] - self.before[k]
        return found

    def _widest(self, batch: Batch) -> int:
        """The widest input of a batch of the hint."""
        k = batch.segment
        return max(self.now[r, k - 1].width for r in batch.requests) if k else 0

    def _end(self, batch: Batch) -> int:
        images, wide = len(batch.requests), self._widest(batch)
        return batch.start + self.window.duration(batch.pool, wide, batch.width, images)

    def _request(self, r: int) -> Any:
        """Widths and finishing times of a request; what its tuple's accuracy costs."""
        problem, model = self.problem, self.model
        arrived, latest = int(problem.arrival[r]), int(self.latest[r])
        rows = problem.tuples.tolist()
        now = [self.now[r, k].width for k in range(problem.n_segments)]
        chosen = self._one_of(len(rows), rows.index(now))
        for k in range(problem.n_segments):
            widths = self.width[r, k] = self._one_of(problem.n_widths, now[k])
            self.finish[r, k] = self._int(
                arrived + self.before[k + 1], latest - self._after(k + 1), self._end(self.now[r, k])
            )
            for w, width in enumerate(widths):
                own = [one for one, row in zip(chosen, rows, strict=True) if row[k] == w]
                model.add(sum(own) == width)
        least = []
        for one, took in zip(chosen, self.took.tolist(), strict=True):
            if arrived + took > latest:
                model.add(one == 0)
            else:
                least.append(took * one)
        model.add(self.finish[r, problem.n_segments - 1] >= arrived + sum(least))
        return sum(value * one for value, one in zip(self.lost.tolist(), chosen, strict=True))

    def _batch(self, p: int, k: int) -> _Led:
        """The batch that request p leads, if it does; later ones may join."""
        problem, model, pools, now = self.problem, self.model, self.window.pools, self.now[p, k]
        soonest = int(problem.arrival[p]) + self.before[k]
        latest = int(self.latest[p]) - self._after(k)
        leads = now.requests[0] == p
        joins = {
            q: self._bool(leads and q in now.requests)
            for q in range(p, problem.n_requests)
            if int(problem.arrival[q]) + self.before[k] <= latest or q == p
        }
        lead, end = joins[p], self._end(now) if leads else soonest
        start = self._int(soonest, latest, now.start if leads else soonest)
        stop = self._int(soonest, int(self.latest[p]) - self._after(k + 1), end)
        took = self._int(0, 2**40, end - now.start if leads else 0)
        led = _Led(
            k, start, stop, self._one_of(problem.n_widths, now.width),
            self._one_of(problem.n_widths if k else 1, self._widest(now) if leads else 0),
            {
                g: self._bool(leads and g == now.pool)
                for g, (k2, _, _) in enumerate(pools) if k2 == k
            },
            joins,
        )  # fmt: skip
        model.add(sum(led.pools.values()) == lead)
        model.add(took == 0).only_enforce_if(~lead)
        model.add(stop == start).only_enforce_if(~lead)
        for q in joins:
            model.add_implication(joins[q], lead)
        images = sum(joins.values())
        if len(joins) > problem.max_batch:
            model.add(images <= problem.max_batch)
        for g, on in led.pools.items():
            _, widest, s = pools[g]
            launch = int(problem.launch[s]) * _PARTS
            self.intervals[g].append(model.new_optional_interval_var(start, took, stop, on, ""))
            for w, width in enumerate(led.width):
                if w > widest:
                    model.add_implication(on, ~width)
                    continue
                for i, before in enumerate(led.before):
                    work = int(np.floor(problem.cost[s, k, i, w] * _PARTS)) * images
                    model.add(_PARTS * took >= launch + work).only_enforce_if(on, before, width)
        return led

    def _attain(self, k: int, here: list[_Led]) -> None:
        """Some request has the widest input: where a wider one costs less, it is not made up."""
        model = self.model
        for led in here:
            for i, before in enumerate(led.before):
                found = [~before, ~next(iter(led.joins.values()))]
                for q, join in led.joins.items():
                    found.append(model.new_bool_var(""))
                    model.add_implication(found[-1], join)
                    model.add_implication(found[-1], self.width[q, k - 1][i])
                model.add_bool_or(found)

    def _join(self, q: int, k: int, here: list[_Led]) -> None:
        """A request runs in one batch, at its width, after its last one."""
        model = self.model
        there = [one for one in here if q in one.joins]
        model.add_exactly_one(one.joins[q] for one in there)
        ready = self.finish[q, k - 1] if k else int(self.problem.arrival[q])
        for led in there:
            join = led.joins[q]
            model.add(self.finish[q, k] == led.end).only_enforce_if(join)
            model.add(led.start >= ready).only_enforce_if(join)
            for w, width in enumerate(self.width[q, k]):
                model.add(width == led.width[w]).only_enforce_if(join)
            for i, w in product(range(len(led.before)), range(self.problem.n_widths)):
                if k and i < w:
                    model.add_bool_or(~join, ~self.width[q, k - 1][w], ~led.before[i])
