"""CP-SAT on the cycle of a rolling array: one period after the other is found or refuted."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import CyclicOrder
from optsched.kernels.cycle_ratio import cycle_time
from optsched.model.memory_bounds import holdings
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._cpsat import Search, checked_options, solve_cp
from optsched_solvers._loading import load
from optsched_solvers._portfolio import chosen_cores
from optsched_solvers.periodic.construct import Folder, first_orders
from optsched_solvers.shop.proof.symmetry import identical_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import IntArray, Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

FIRST_EFFORT: Final = 0.5
"""CP-SAT's deterministic seconds for each period of the first round; each round doubles them."""

GRAIN: Final = 1024
"""Bisection ends at this part of the bound; the last step of a round is the best period less 1."""

TWO_SEARCHES: Final = """
subsolvers: "plain" subsolvers: "strong"
subsolver_params { name: "plain" linearization_level: 0 }
subsolver_params {
  name: "strong" linearization_level: 0
  use_strong_propagation_in_disjunctive: true use_dynamic_precedence_in_disjunctive: true
}
"""
"""CP-SAT's parameters on two cores: a plain search and one with strong propagation."""

START: Final = (3e-4, 3e-6)
"""Seconds to make and simplify a model, per operation and per pair of them on a resource."""

_UNKNOWN: Final = 1 << 60


class CpSat:
    """Bisection on the period with CP-SAT; iterations as for job shops, model building included."""

    name = "cpsat"
    kinds = ("periodic",)
    options: Mapping[str, str] = MappingProxyType(
        {
            "symmetry": "break the symmetry of identical jobs (default true)",
            "parameters": "mapping of further CP-SAT parameters",
        }
    )

    def supports(self, problem: Problem) -> Support:
        """Every rolling array."""
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search until a proof or a limit, from the monitor's or from constructed orders.

        A refuted period raises the bound, because a feasible schedule stays feasible for every
        longer period.
        """
        symmetry = checked_options(limits)
        graph = problem.graph()
        first_orders(problem, limits, monitor)
        modules = ("ortools.sat.python.cp_model", "periodic.orders")
        if monitor.should_stop() or not load(monitor, *modules):
            return Result("unknown")
        if monitor.remaining >= start_seconds(graph):
            _Run(graph, symmetry, limits, monitor).run()
        return Result("unknown")


def start_seconds(graph: Schedule) -> float:
    """Estimate the seconds before the first search begins and can be stopped."""
    users = np.diff(graph.users.indptr)
    return START[0] * graph.n_operations + START[1] * float((users * users).sum())


class _Run:
    """Rounds of bisection between the proved bound and the best period."""

    def __init__(self, graph: Schedule, symmetry: bool, limits: Limits, monitor: Monitor) -> None:
        self.graph, self.symmetry, self.folder = graph, symmetry, Folder(graph)
        self.start, self.spent, self.effort = start_seconds(graph), 0.0, FIRST_EFFORT
        self.limits, self.monitor = limits, monitor
        self.found = False

    def run(self) -> None:
        """Bisect, with more effort in every round, until a limit."""
        while not self._ended():
            self._round()
            self.effort *= 2

    def _ended(self) -> bool:
        most = self.limits.iterations
        used_up = most is not None and self.spent * 1e6 >= most
        return used_up or self.monitor.should_stop()

    def _round(self) -> None:
        """Bisect once; a period that remains open counts as infeasible in this round only."""
        best, least = self._between()
        trial, refuted = least, least - 1
        # invariant: every period up to `refuted` was refuted, or open in this round
        while not self._ended():
            if self._try(trial) == "open":
                refuted = max(refuted, trial)
            best, least = self._between()
            refuted = max(refuted, least - 1)
            if refuted >= best - 1:
                return
            apart = best - refuted > max(2, best // GRAIN)
            trial = (refuted + best) // 2 if apart else best - 1

    def _between(self) -> tuple[int, int]:
        objective, _ = self.monitor.best
        assert objective is not None
        return objective, max(1, self.monitor.lower_bound or 1)

    def _try(self, period: int) -> str:
        """Search for a schedule of this period: "found", "refuted" or "open"."""
        built = CycleModel(self.graph, period, self.symmetry)
        self.spent += self.start  # CP-SAT counts next to nothing for simplifying a model
        status = "infeasible"
        if not built.refuted:
            self._hint(built)
            self.found = False
            status, seconds = solve_cp(
                built.model, self.limits, self.monitor, lambda value: self._report(built, value),
                lambda bound: None, searches=[self._search()],
            )  # fmt: skip
            self.spent += seconds
        if status == "infeasible":
            self.monitor.bound(period + 1, "cpsat")
            return "refuted"
        return "found" if self.found else "open"

    def _hint(self, built: CycleModel) -> None:
        _, answer = self.monitor.best
        if answer is None:
            return
        try:
            found = cycle_time(self.graph, answer.sequences, answer.offset)
        except CyclicOrder:
            return
        built.hint(found.start + (answer.offset - found.late) * found.period, found.period)

    def _report(self, built: CycleModel, value: Callable[[Any], int]) -> None:
        made = self.folder.fold(built.starts(value), built.period)
        if made is not None and made.period <= built.period:
            self.found = True
            self.monitor.incumbent(made.orders, made.period, "cpsat")

    def _search(self) -> Search:
        limits, cores = self.limits, chosen_cores(self.limits.workers)
        effort = self.effort
        if limits.iterations is not None:
            effort = min(effort, max(1e-6, limits.iterations * 1e-6 - self.spent))
        # linear relaxations of periods are weak and slow
        parameters = {"linearization_level": 0, "max_deterministic_time": effort}
        # see `shop.cpsat`: with zero durations strong propagation proved wrong bounds
        alone = limits.iterations is not None or len(cores) < 2
        if alone or (self.graph.duration == 0).any():
            return Search(parameters, 1, cores)
        return Search(parameters, 2, cores, TWO_SEARCHES)


class CycleModel:
    """Absolute starts of one instance of every operation, at a fixed period T.

    `start` is offset * T + the start within the cycle. Its range follows from the arcs: each job's
    first operation starts within the first cycle (moving a job by whole cycles changes nothing),
    and from there every arc, with the cycles that it spans, bounds all others.

    Every resource has its own window of length T, which begins at an operation of one job. Seen
    in that window (`seen`: the start moved by whole cycles) operations do not overlap, and the
    window's end does not cut any: one interval per operation suffices.

    An infeasible model refutes T. A feasible one gives orders of period T, except where blocks of
    no time share a moment: their order at that moment is not modelled. Setups are triangular;
    `symmetry` orders identical jobs, by one operation each.
    """

    def __init__(self, graph: Schedule, period: int, symmetry: bool = True) -> None:
        from ortools.sat.python import cp_model

        self.graph, self.period, self.model = graph, period, cp_model.CpModel()
        self.groups = identical_jobs(graph) if symmetry else []
        self.anchors = _first_operations(graph)
        self.leader = self._leader()
        self.start: list[Any] = []
        self.seen: dict[int, Any] = {}
        window = windows(graph, period, list(self.anchors.values()), self.anchors[self.leader, 0])
        self.refuted = window is None or bool((graph.duration > period).any())
        if window is None or self.refuted:
            return
        self.least, self.most = window
        self._starts()
        for r in range(graph.n_resources):
            if len(graph.users[r]):
                self._resource(r, graph.users[r].tolist())

    def starts(self, value: Callable[[Any], int]) -> IntArray:
        """Return the absolute starts of a solution."""
        return np.array([value(start) for start in self.start], np.int64)

    def hint(self, start: IntArray, period: int) -> None:
        """Begin the search near the starts of another schedule, which may have a longer period."""
        start = start - start[self.anchors[self.leader, 0]]
        for (job, copy), anchor in self.anchors.items():
            if copy == 0:
                start[self.graph.job == job] -= start[anchor] // period * period
        for group in self.groups:
            rows = np.array(group)
            start[rows] = start[rows[np.argsort(start[rows[:, 0]], kind="stable")]]
        near = np.clip((start * (self.period / period)).astype(np.int64), self.least, self.most)
        for variable, at in zip(self.start, near.tolist(), strict=True):
            self.model.add_hint(variable, at)

    def _leader(self) -> int:
        """The job with most work: time begins at its first operation; first of its group."""
        job = int(np.argmax(np.bincount(self.graph.job, weights=self.graph.duration)))
        for group in self.groups:
            jobs = [int(self.graph.job[rows[0]]) for rows in group]
            if job in jobs:
                return jobs[0]
        return job

    def _starts(self) -> None:
        graph, model = self.graph, self.model
        windows = zip(self.least.tolist(), self.most.tolist(), strict=True)
        self.start = [model.new_int_var(*window, f"S{i}") for i, window in enumerate(windows)]
        for i, k, lag, distance in zip(*(c.tolist() for c in graph.arcs), strict=True):
            gap = int(graph.duration[i]) + lag
            model.add(self.start[k] + distance * self.period >= self.start[i] + gap)
        for group in self.groups:
            for earlier, later in pairwise(group):
                model.add(self.start[earlier[0]] <= self.start[later[0]])

    def _resource(self, r: int, on: list[int]) -> None:
        """No overlap within the window of resource r, which begins with `cut`."""
        graph, model, duration = self.graph, self.model, self.graph.duration.tolist()
        cut = next((i for i in on if graph.job[i] == self.leader), on[0])
        begin = self.seen[cut] = self.start[cut]
        for i in on:
            if i != cut:
                self.seen[i] = self._seen(i, cut)
                model.add(self.seen[i] >= begin + duration[cut] + graph.setup(cut, i))
                model.add(begin + self.period >= self.seen[i] + duration[i] + graph.setup(i, cut))
        busy = [self._interval(i) for i in on]
        model.add_no_overlap(busy)
        for i, k in combinations([i for i in on if i != cut], 2):
            to, back = graph.setup(i, k), graph.setup(k, i)
            if to or back:  # one literal per pair suffices because setups are triangular
                ahead = model.new_bool_var(f"P{i},{k}")
                gap = self.seen[k] - self.seen[i]
                model.add(gap >= duration[i] + to).only_enforce_if(ahead)
                model.add(-gap >= duration[k] + back).only_enforce_if(~ahead)
        if graph.memory[r]:
            workspaces = zip(busy, graph.workspace[on].tolist(), strict=True)
            self._memory(r, [pair for pair in workspaces if pair[1]])

    def _seen(self, i: int, cut: int) -> Any:
        """The start of i in the window that begins with `cut`."""
        model, period = self.model, self.period
        least, most = int(self.least[cut]), int(self.most[cut])
        # a block of no time may be seen at the very end of the window
        low = -((most - int(self.least[i])) // period) - 1
        cycles = model.new_int_var(low, (int(self.most[i]) - least) // period, f"K{i}")
        seen = model.new_int_var(least, most + period, f"T{i}")
        model.add(seen == self.start[i] - period * cycles)
        return seen

    def _interval(self, i: int) -> Any:
        duration = int(self.graph.duration[i])
        return self.model.new_fixed_size_interval_var(self.seen[i], duration, f"I{i}")

    def _memory(self, r: int, workspaces: list[tuple[Any, int]]) -> None:
        """Limit the held bytes, from the start of their first operation to the end of their last.

        Nothing is held for longer than a period, because the next iteration takes the same bytes
        only afterwards. So a window of length T has at most two instances of each holding.
        """
        graph, model, period = self.graph, self.model, self.period
        intervals, sizes = [one for one, _ in workspaces], [size for _, size in workspaces]
        least, most = int(self.least.min()), int(self.most.max())
        for held in holdings(graph):
            if held.resource != r or held.last < 0:
                continue
            i, k = held.first, held.last
            length = model.new_int_var(0, period, f"H{i},{k}")
            model.add(length == self.start[k] + int(graph.duration[k]) - self.start[i])
            end = model.new_int_var(least, most + 2 * period, f"E{i},{k}")
            for back in (0, period):
                intervals.append(
                    model.new_interval_var(self.seen[i] - back, length, end - back, f"M{i},{k}")
                )
                sizes.append(held.size)
        if intervals:
            unit = gcd(*sizes)  # smaller numbers, same model
            limit = int(graph.memory[r]) // unit
            model.add_cumulative(intervals, [size // unit for size in sizes], limit)


def windows(
    graph: Schedule, period: int, anchors: list[int], zero: int
) -> tuple[IntArray, IntArray] | None:
    """Earliest and latest absolute starts if all anchors start in [0, period), and one at 0.

    None if the arcs alone refute that. Operations that no anchor depends on (ends of jobs) get two
    periods.
    """
    tail, head, lag, distance = graph.arcs
    weight = graph.duration[tail] + lag - distance * period
    least = np.full(graph.n_operations, -_UNKNOWN)
    most = np.full(graph.n_operations, _UNKNOWN)
    least[anchors] = 0
    most[anchors], most[zero] = period - 1, 0
    for _ in range(graph.n_operations + 1):
        known, due = least[tail] > -_UNKNOWN, most[head] < _UNKNOWN
        after, before = least.copy(), most.copy()
        np.maximum.at(after, head[known], least[tail[known]] + weight[known])
        np.minimum.at(before, tail[due], most[head[due]] - weight[due])
        if (after == least).all() and (before == most).all():
            free = most == _UNKNOWN
            most[free] = least[free] + 2 * period
            return least, most
        least, most = after, before
        if (least > most).any():
            break
    return None  # also where a cycle of arcs is longer than its periods


def _first_operations(graph: Schedule) -> dict[tuple[int, int], int]:
    """The first operation of every copy of every job.

    Copies of a job may be renumbered in a circle, so copy 0 may be the first to start in a cycle:
    then the first operations of all of them start in it.
    """
    first: dict[tuple[int, int], int] = {}
    for i, key in enumerate(zip(graph.job.tolist(), graph.iteration.tolist(), strict=True)):
        first.setdefault(key, i)
    return first
