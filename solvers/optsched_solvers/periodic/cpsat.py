"""CP-SAT on the cycle of a rolling array: one period after the other, found or refuted."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import CyclicOrder
from optsched.kernels.cycle_ratio import cycle_time
from optsched.model.memory_bounds import holdings, paths_from
from optsched.model.schedule import Arcs
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._cores import confined
from optsched_solvers._cpsat import STOP, Call, checked_options
from optsched_solvers._loading import load
from optsched_solvers.periodic.construct import Folder, first_orders
from optsched_solvers.shop.proof.symmetry import identical_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import IntArray, Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

_UNKNOWN: Final = 1 << 60


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


class CpSat:
    """CP-SAT on the cycle; iterations as for job shops, and the making of models counts."""

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
        """Search until proof or limit; options, threads and iterations are those of `CpSat`.

        Rounds of bisection between the proved bound and the best period. A period that is refuted
        raises the bound, for what is feasible stays so for every longer period; one that remains
        open counts as infeasible for this round only.
        """
        symmetry = checked_options(limits)
        graph = problem.graph()
        first_orders(problem, limits, monitor)
        modules = ("ortools.sat.python.cp_model", "periodic.orders")
        if monitor.should_stop() or not load(monitor, *modules):
            return Result("unknown")
        if monitor.remaining < start_seconds(graph):
            return Result("unknown")
        _Run(graph, symmetry, limits, monitor).run()
        return Result("unknown")


def start_seconds(graph: Schedule) -> float:
    """Seconds before the first search begins, and before it hears a call to stop."""
    users = np.diff(graph.users.indptr)
    return START[0] * graph.n_operations + START[1] * float((users * users).sum())


class _Run(Call):
    """One call: many searches, each for a period."""

    def __init__(self, graph: Schedule, symmetry: bool, limits: Limits, monitor: Monitor) -> None:
        self.graph, self.symmetry = graph, symmetry
        self.folder = Folder(graph)
        self.start = start_seconds(graph)
        self.apart = far_apart(graph)
        self.effort = FIRST_EFFORT
        self.spent = 0.0
        self.built: CycleModel | None = None
        self.found = False
        super().__init__(None, limits, monitor)

    def _search(self) -> None:
        with confined(self.cores):
            while not self._ended():
                self._round()
                self.effort *= 2

    def _ended(self) -> bool:
        most = self.limits.iterations
        used_up = most is not None and self.spent * 1e6 >= most
        return used_up or self.invalid or self.failure is not None or self.monitor.should_stop()

    def _round(self) -> None:
        """Bisect from the bound on; open periods count as infeasible, this time."""
        best, least = self._between()
        told = least - 1
        trial = least
        while not self._ended():
            if self._try(trial) == "open":
                told = max(told, trial)
            best, least = self._between()
            told = max(told, least - 1)
            if told >= best - 1:
                return
            if trial == best - 1 and told == trial:
                return
            apart = best - told > max(2, best // GRAIN)
            trial = (told + best) // 2 if apart else best - 1

    def _between(self) -> tuple[int, int]:
        objective, _ = self.monitor.best
        assert objective is not None
        return objective, max(1, self.monitor.lower_bound or 1)

    def _try(self, period: int) -> str:
        """Search for a schedule of this period: "found", "refuted" or "open"."""
        built = CycleModel(self.graph, period, self.symmetry, self.apart)
        if built.refuted:
            self.spent += self.start
            self.monitor.bound(period + 1, "cpsat")
            return "refuted"
        self._hint(built)
        self.built, self.model, self.found = built, built.model, False
        self.solver = self._solver()
        self._solved()
        # CP-SAT counts next to nothing, often 0, for making and simplifying a model
        self.spent += self.solver.response_proto.deterministic_time + self.start
        if self.infeasible:
            self.infeasible = False
            self.monitor.bound(period + 1, "cpsat")
            return "refuted"
        return "found" if self.found else "open"

    def _hint(self, built: CycleModel) -> None:
        period, answer = self.monitor.best
        if answer is None or period is None:
            return
        try:
            found = cycle_time(self.graph, answer.sequences, answer.offset)
        except CyclicOrder:
            return
        built.hint(found.start + (answer.offset - found.late) * found.period, found.period)

    def _solution(self, value: Callable[[Any], int]) -> None:
        assert self.built is not None
        starts = self.built.starts(value)
        cycle = self.built.grain * self.built.period
        made = self.folder.fold(starts, cycle)
        if made is not None and made.period <= self.built.period:
            self.found = True
            self.monitor.incumbent(made.orders, made.period, "cpsat")

    def _solver(self) -> Any:
        solver = super()._solver()
        given, limits = solver.parameters, self.limits
        instant = bool((self.graph.duration == 0).any())
        chosen = limits.options.get("parameters", {})
        alone = limits.iterations is not None or len(self.cores) < 2
        # see `shop.cpsat`: with zero durations strong propagation proved wrong bounds
        given.num_workers = 1 if alone or instant else 2
        if given.num_workers == 2:
            given.merge_text_format(TWO_SEARCHES)
        # linear relaxations of periods are weak, and slow single searches down many times
        if "linearization_level" not in chosen:
            given.linearization_level = 0
        if "max_deterministic_time" not in chosen:
            left = self.effort
            if limits.iterations is not None:
                left = min(left, max(1e-6, limits.iterations * 1e-6 - self.spent))
            given.max_deterministic_time = left
        if limits.time_limit is not None:
            given.max_time_in_seconds = max(0.0, self.monitor.remaining - STOP)
        return solver


class CycleModel:
    """Absolute starts of one instance of every operation, at a fixed period T; exact.

    `start` is offset * T + the start within the cycle. Its range is no guess but follows from the
    arcs: each job's first operation starts within the first cycle (moving a job by whole cycles
    changes nothing), and from there every arc, with the cycles that it spans, bounds all others.
    So offsets are 0 or 1 for what lies within a lap, and reach 2 for deferred W and U.

    Every resource has its own window of length T, which begins at an operation of one job. Seen
    in that window (`seen`: the start moved by whole cycles) operations must not overlap, and the
    window's end does not cut any: one interval per operation suffices.

    Blocks of no time share moments, so there every moment has `grain` places, and every operation
    a `rank` among them: what follows at the same moment has a higher one. So orders that wait for
    each other for ever are none, and no two operations of a resource are in the same place.

    Parameters
    ----------
    graph
        A cycle (`JobArray.graph`); at most one resource each, setups triangular.
    period
        The period in question.
    symmetry
        Order identical jobs, by one operation each.
    apart
        `far_apart` of the graph, if known.
    """

    def __init__(
        self,
        graph: Schedule,
        period: int,
        symmetry: bool = True,
        apart: frozenset[int] | None = None,
    ) -> None:
        from ortools.sat.python import cp_model

        self.graph, self.period = graph, period
        instant = (graph.duration == 0) & (graph.single_resource >= 0)
        self.apart = far_apart(graph) if apart is None else apart
        self.model = cp_model.CpModel()
        self.groups = identical_jobs(graph) if symmetry else []
        self.anchors = _first_operations(graph)
        self.leader = self._leader()
        self.start: list[Any] = []
        self.seen: dict[int, Any] = {}
        self.place: dict[int, Any] = {}
        self.followed = _followed_at_once(graph) if instant.any() else frozenset()
        self.grain = len(self.followed) + 1
        self.rank: list[Any] = []
        self.duration = graph.duration.tolist()
        window = windows(graph, period, list(self.anchors.values()), self.anchors[self.leader, 0])
        self.refuted = window is None
        if window is None:
            return
        self.least, self.most = window
        self._starts()
        for r in range(graph.n_resources):
            self._resource(r, graph.users[r].tolist())

    def starts(self, value: Callable[[Any], int]) -> IntArray:
        """Absolute starts of a solution, in places: `grain` to a unit of time."""
        start = np.array([value(start) for start in self.start], np.int64)
        return self.grain * start + np.array([value(rank) for rank in self.rank], np.int64)

    def hint(self, start: IntArray, period: int) -> None:
        """Begin the search near the starts of another schedule, whose period may be longer."""
        start = start - start[self.anchors[self.leader, 0]]
        for (job, copy), anchor in self.anchors.items():
            if copy == 0:
                start[self.graph.job == job] -= start[anchor] // period * period
        for group in self.groups:
            rows = np.array(group)
            start[rows] = start[rows[np.argsort(start[rows[:, 0]], kind="stable")]]
        scaled = start * (self.period / period)
        near = np.clip(scaled.astype(np.int64), self.least, self.most)
        for variable, at in zip(self.start, near.tolist(), strict=True):
            self.model.add_hint(variable, at)

    def _leader(self) -> int:
        """The job with most work: time begins at its first operation; first of its group."""
        work = np.bincount(self.graph.job, weights=self.graph.duration)
        job = int(np.argmax(work))
        for group in self.groups:
            jobs = [int(self.graph.job[rows[0]]) for rows in group]
            if job in jobs:
                return jobs[0]
        return job

    def _starts(self) -> None:
        graph, model, period = self.graph, self.model, self.period
        self.start = [
            model.new_int_var(low, high, f"S{i}")
            for i, (low, high) in enumerate(
                zip(self.least.tolist(), self.most.tolist(), strict=True)
            )
        ]
        last = self.grain - 1
        self.rank = [
            model.new_int_var(0, last - 1, f"R{i}") if i in self.followed else last
            for i in range(graph.n_operations)
        ]
        for i, k, lag, distance in zip(*(c.tolist() for c in graph.arcs), strict=True):
            gap, over = self.duration[i] + lag, distance * period
            model.add(self.start[k] + over >= self.start[i] + gap)
            if not gap and self.grain > 1:
                ahead = self.start[k] + over - self.start[i]
                model.add(self.grain * ahead + self.rank[k] > self.rank[i])
        for group in self.groups:
            for earlier, later in pairwise(group):
                model.add(self.start[earlier[0]] <= self.start[later[0]])

    def _resource(self, r: int, on: list[int]) -> None:
        if not on:
            return
        graph, model = self.graph, self.model
        cut = next((i for i in on if graph.job[i] == self.leader), on[0])
        if self.duration[cut] > self.period:
            self.refuted = True
            return
        for i in sorted(on, key=cut.__ne__):  # the first one first
            self._see(i, cut)
        model.add_no_overlap([self._busy(i) for i in on])
        if graph.has_setups:
            self._setups(on, cut)
        if graph.memory[r]:
            self._memory(r, on)

    def _see(self, i: int, cut: int) -> None:
        """The start of i in the window that begins with `cut`."""
        model, period, begin = self.model, self.period, self.start[cut]
        if i == cut:
            self.seen[i] = begin
        else:  # a block of no time may be seen at the very end of the window
            low = -((int(self.most[cut]) - int(self.least[i])) // period) - 1
            high = (int(self.most[i]) - int(self.least[cut])) // period
            laps = model.new_int_var(low, high, f"K{i}")
            most = int(self.most[cut]) + period
            self.seen[i] = model.new_int_var(int(self.least[cut]), most, f"T{i}")
            model.add(self.seen[i] == self.start[i] - period * laps)
        self.place[i] = self.grain * self.seen[i] + self.rank[i]
        if i in self.followed:  # intervals know one variable only
            low, high = int(self.least[cut]), int(self.most[cut]) + period
            place = model.new_int_var(self.grain * low, self.grain * (high + 1), f"S{i}")
            model.add(place == self.place[i])
            self.place[i] = place
        if i != cut:
            self._follow(cut, i, self.duration[cut] + self.graph.setup(cut, i))
            self._follow(i, cut, self.duration[i] + self.graph.setup(i, cut), period)

    def _follow(self, i: int, k: int, gap: int, over: int = 0) -> Any:
        """Operation k, so much later, starts a gap behind i; for none, at least behind it."""
        if gap or self.grain == 1:
            return self.model.add(self.seen[k] + over >= self.seen[i] + gap)
        return self.model.add(self.place[k] + self.grain * over > self.place[i])

    def _interval(self, i: int, before: int = 0, after: int = 0) -> Any:
        """When i is on its resource; so long before and after it may follow others at once."""
        grain, seen, rank, name = self.grain, self.seen[i], self.rank[i], f"I{i}"
        spent = self.duration[i] + after
        start, first = self.place[i], rank
        if before:
            start, first = grain * (seen - before) + grain - 1, grain - 1 - grain * before
        if not spent and not before:
            return self.model.new_fixed_size_interval_var(start, 1, name)
        size = (grain * spent if spent else rank + 1) - first
        if isinstance(size, int):
            return self.model.new_fixed_size_interval_var(start, size, name)
        end = grain * (seen + spent) if spent else self.place[i] + 1
        return self.model.new_interval_var(start, size, end, name)

    def _busy(self, i: int) -> Any:
        """When i keeps its resource busy; with its setups, if no neighbour can do without."""
        if i not in self.apart:
            return self._interval(i)
        return self._interval(i, int(self.graph.setup_in[i]), int(self.graph.setup_out[i]))

    def _setups(self, on: list[int], cut: int) -> None:
        """One literal per pair of families apart; valid because setups are triangular."""
        graph, model = self.graph, self.model
        for i, k in combinations([i for i in on if i != cut], 2):
            to, back = graph.setup(i, k), graph.setup(k, i)
            if (not to and not back) or (i in self.apart and k in self.apart):
                continue
            forth = model.new_bool_var(f"P{i},{k}")
            self._follow(i, k, self.duration[i] + to).only_enforce_if(forth)
            self._follow(k, i, self.duration[k] + back).only_enforce_if(~forth)

    def _memory(self, r: int, on: list[int]) -> None:
        """Held bytes, from the start of the holder to the end of who frees them.

        Nothing is held for longer than a period: the next iteration takes the same bytes only
        after that. So in a window of length T there are at most two instances of each holding.
        """
        graph, model, grain = self.graph, self.model, self.grain
        cycle = grain * self.period
        intervals, sizes = [], []
        for held in holdings(graph):
            if held.resource != r or held.last < 0:
                continue
            i, k = held.first, held.last
            length = model.new_int_var(0, cycle, f"H{i},{k}")
            behind = grain * self.duration[k] or self.rank[k] + 1
            held_for = grain * (self.start[k] - self.start[i]) + behind - self.rank[i]
            model.add(length == held_for)
            least, most = int(self.least.min()), int(self.most.max()) + 1
            end = model.new_int_var(grain * least, grain * most + 2 * cycle, f"E{i},{k}")
            for lap in (0, cycle):
                intervals.append(
                    model.new_interval_var(
                        self.place[i] - lap, length, end - lap, f"M{i},{k},{lap}"
                    )
                )
                sizes.append(held.size)
        for i in on:
            if graph.workspace[i]:
                intervals.append(self._interval(i))
                sizes.append(int(graph.workspace[i]))
        if intervals:
            unit = gcd(*sizes)  # smaller numbers, same model
            model.add_cumulative(
                intervals, [size // unit for size in sizes], int(graph.memory[r]) // unit
            )


def _followed_at_once(graph: Schedule) -> frozenset[int]:
    """Operations that another one may follow at the moment of their start."""
    instant = (graph.duration == 0) & (graph.single_resource >= 0)
    tail, _, lag, _ = graph.arcs
    at_once = tail[graph.duration[tail] + lag == 0]
    return frozenset([*np.flatnonzero(instant).tolist(), *at_once.tolist()])


def far_apart(graph: Schedule) -> frozenset[int]:
    """Operations whose setups fit between them and any other of their family, in any schedule.

    Looked for where a family has two operations on a resource, which the arcs make alternate.
    """
    if not graph.has_setups:
        return frozenset()
    inner = graph.arcs.distance == 0
    wraps = np.flatnonzero(graph.arcs.distance == 1)
    once = replace(graph, arcs=Arcs(*(column[inner] for column in graph.arcs)), period=None)
    ahead = [paths_from(once, i) for i in range(graph.n_operations)]
    across: dict[int, list[tuple[int, int, int]]] = {}
    for e in wraps.tolist():
        i, k = int(graph.arcs.tail[e]), int(graph.arcs.head[e])
        weight = int(graph.duration[i] + graph.arcs.lag[e])
        across.setdefault(int(graph.job[i]), []).append((i, k, weight))
    found: set[int] = set()
    for r in range(graph.n_resources):
        members: dict[int, list[int]] = {}
        for i in graph.users[r].tolist():
            members.setdefault(int(graph.family[i]), []).append(i)
        for pair in members.values():
            if len(pair) != 2 or pair[1] not in ahead[pair[0]]:
                continue
            i, k = pair
            there = ahead[i][k] - int(graph.duration[i])
            ways = [
                ahead[k][u] + weight + ahead[v][i]
                for u, v, weight in across.get(int(graph.job[i]), [])
                if u in ahead[k] and i in ahead[v]
            ]
            back = max(ways, default=-1) - int(graph.duration[k])
            out, into = graph.setup_out, graph.setup_in
            if out[i] <= there and into[i] <= back:
                found.add(i)
            if out[k] <= back and into[k] <= there:
                found.add(k)
    return frozenset(found)


def windows(
    graph: Schedule, period: int, anchors: list[int], zero: int
) -> tuple[IntArray, IntArray] | None:
    """Earliest and latest absolute starts if all anchors start in [0, period), and one at 0.

    None if the arcs alone refute that. What no anchor depends on (ends of jobs) gets room enough.
    """
    tail, head, lag, distance = graph.arcs
    weight = graph.duration[tail] + lag - distance * period
    least = np.full(graph.n_operations, -_UNKNOWN)
    least[anchors] = 0
    most = np.full(graph.n_operations, _UNKNOWN)
    most[anchors], most[zero] = period - 1, 0
    for _ in range(graph.n_operations + 1):
        known, due = least[tail] > -_UNKNOWN, most[head] < _UNKNOWN
        after, before = least.copy(), most.copy()
        np.maximum.at(after, head[known], least[tail[known]] + weight[known])
        np.minimum.at(before, tail[due], most[head[due]] - weight[due])
        if (after == least).all() and (before == most).all():
            break
        least, most = after, before
        if (least > most).any():
            return None
    else:
        return None  # a cycle of arcs is longer than its periods
    free = most == _UNKNOWN
    most[free] = least[free] + 2 * period
    return least, most


def _first_operations(graph: Schedule) -> dict[tuple[int, int], int]:
    """The first operation of every copy of every job.

    Copies of a job may be renumbered in a circle, so copy 0 may be the first to start in a cycle:
    then the first operations of all of them start in it.
    """
    first: dict[tuple[int, int], int] = {}
    for i, key in enumerate(zip(graph.job.tolist(), graph.iteration.tolist(), strict=True)):
        first.setdefault(key, i)
    return first
