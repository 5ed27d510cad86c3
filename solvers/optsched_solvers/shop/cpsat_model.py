"""A disjunctive graph as a CP-SAT model: exact for lags, setups, memory, gangs, zero durations."""

from __future__ import annotations

import heapq
from itertools import combinations, pairwise, permutations
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from ortools.sat.python import cp_model

from optsched.errors import CyclicOrder
from optsched.model import bounds, memory_bounds
from optsched.model.graph import evaluate
from optsched.model.objectives import job_ends, last_operations, per_job
from optsched.model.schedule import Csr, IntArray, Schedule
from optsched_solvers.shop.proof.symmetry import identical_jobs

if TYPE_CHECKING:
    from collections.abc import Callable

NO_OVERLAP: Final = "no overlap"
LONGER: Final = "longer intervals"
PAIRS: Final = "pairs"
CIRCUIT: Final = "circuit"


class Model:
    """Start variables, one disjunction per resource, memory, and the objective to be minimised.

    Parameters
    ----------
    graph
        One-shot disjunctive graph.
    lower_bound
        A proved lower bound of the objective.
    incumbent
        Orders of the best known schedule: bounds the horizon of the makespan, and becomes a
        complete hint.
    symmetry
        Break the symmetry of identical jobs, where that is valid.
    """

    def __init__(
        self, graph: Schedule, lower_bound: int, incumbent: Csr | None, symmetry: bool = True
    ) -> None:
        self.graph = graph
        self.model = cp_model.CpModel()
        self.paths = evaluate(graph)
        self.reach: dict[int, dict[int, int]] = {}
        self.hint: dict[Any, int] = {}
        self.known: IntArray | None = None
        self.arcs_of: dict[int, dict[tuple[int, int], Any]] = {}  # circuit resources
        self.sooner: dict[tuple[int, int], int] = {}  # see _setups_fit_intervals
        self.groups = identical_jobs(graph) if symmetry else []
        self.holdings = memory_bounds.holdings(graph)
        if incumbent is not None:
            self.known = self._relabelled(evaluate(graph, incumbent).head)
        if self.known is not None and graph.goal is None:
            self.horizon = int((self.known + graph.duration).max(initial=0))
        else:
            self.horizon = bounds.horizon(graph)
        self._starts()
        self._precedences()
        self.users = graph.users.to_lists()
        modes = self._modes()
        self.rank = self._ranks() if CIRCUIT in modes else []
        for r, mode in enumerate(modes):
            self._resource(r, mode)
        self._symmetry()
        self._objective(lower_bound)
        self._complete_hint()

    def sequences(self, value: Callable[[Any], int]) -> Csr:
        """Orders of a solution, given by the values of variables: by start time, or by the circuit.

        Raises `CyclicOrder` where operations of zero duration at one instant cannot be ordered.
        """
        place = {i: k for k, i in enumerate(orders_at(self.graph, [*map(value, self.start)]))}
        return Csr.of(
            self._walk(r, value) if r in self.arcs_of else sorted(on, key=place.__getitem__)
            for r, on in enumerate(self.graph.users.to_lists())
        )

    # variables and arcs

    def _starts(self) -> None:
        graph, model = self.graph, self.model
        self.duration = graph.duration.tolist()
        latest = np.minimum(self.horizon - self.paths.tail, graph.deadline - graph.duration)
        self.start = []
        for i, (head, last) in enumerate(
            zip(self.paths.head.tolist(), latest.tolist(), strict=True)
        ):
            self.start.append(model.new_int_var(head, max(head, last), f"S{i}"))
            if last < head:
                model.add_bool_or([])  # no start is in time: infeasible
        self.interval = [
            model.new_fixed_size_interval_var(start, p, f"I{i}")
            for i, (start, p) in enumerate(zip(self.start, self.duration, strict=True))
        ]

    def _precedences(self) -> None:
        graph = self.graph
        for i, j, lag in zip(
            graph.arcs.tail.tolist(), graph.arcs.head.tolist(), graph.arcs.lag.tolist(), strict=True
        ):
            self.model.add(self.start[j] >= self.start[i] + self.duration[i] + lag)
        if not (graph.arcs.lag < 0).any():
            return
        # on one resource an arc path fixes the order, even where its lags would let both overlap
        for r in range(graph.n_resources):
            for i in graph.users[r].tolist():
                for k, far in self._paths(i).items():
                    if k != i and far < self.duration[i] and r in graph.op_resources[k]:
                        self.model.add(self.start[k] >= self.start[i] + self.duration[i])

    def _paths(self, i: int) -> dict[int, int]:
        if i not in self.reach:
            self.reach[i] = memory_bounds.paths_from(self.graph, i)
        return self.reach[i]

    # resources

    def _modes(self) -> list[str]:
        """How the order on each resource is modelled."""
        modes = [self._mode(r, on) for r, on in enumerate(self.users)]
        if CIRCUIT in modes:  # ties of zero durations must then be ordered everywhere alike
            for r, on in enumerate(self.users):
                if any(self.duration[i] == 0 for i in on):
                    modes[r] = CIRCUIT
        return modes

    def _mode(self, r: int, on: list[int]) -> str:
        graph = self.graph
        zero = [i for i in on if self.duration[i] == 0]
        demand = graph.acquire + graph.workspace + graph.free
        if graph.memory[r] and any(demand[i] for i in zero):
            return CIRCUIT
        if not memory_bounds.frees_in_order(graph, r, self.holdings, self.reach):
            return CIRCUIT
        if not graph.has_setups or not any(graph.setup(i, k) for i, k in permutations(on, 2)):
            return NO_OVERLAP
        if zero or not _triangular(graph, on):
            return CIRCUIT
        return LONGER if self._setups_fit_intervals(r, on) else PAIRS

    def _resource(self, r: int, mode: str) -> None:
        on = self.users[r]
        if mode == CIRCUIT:
            self._circuit(r, on)
            return
        longer = mode == LONGER
        self.model.add_no_overlap([self._longer(r, i) if longer else self.interval[i] for i in on])
        if mode == PAIRS:
            self._pairs(on)
        if self.graph.memory[r]:
            self._memory(r, on)

    def _setups_fit_intervals(self, r: int, on: list[int]) -> bool:
        """Whether intervals that contain the setup behind them are exact (see `_longer`).

        An operation of the same family that may follow must do so only after the setup time has
        passed anyway; one at most may follow sooner.
        """
        graph = self.graph
        if any(graph.setup_in[i] for i in on):
            return False
        for i in on:
            soon = []
            for k in on:
                if k == i or graph.family[k] != graph.family[i]:
                    continue
                if k in self._paths(i):
                    if self._paths(i)[k] - self.duration[i] < graph.setup_out[i]:
                        soon.append(k)
                elif i not in self._paths(k):
                    return False
            if len(soon) > 1:
                return False
            if soon:
                self.sooner[r, i] = soon[0]
        return True

    def _longer(self, r: int, i: int) -> Any:
        """Interval of i and its setup; a Boolean is true if the sooner follower is next.

        If so, the interval lasts until that operation starts.
        """
        model, start = self.model, self.start[i]
        size = self.duration[i] + int(self.graph.setup_out[i])
        if (r, i) not in self.sooner:
            return model.new_fixed_size_interval_var(start, size, f"L{i}")
        soon = self.sooner[r, i]
        directly = model.new_bool_var(f"D{r},{i}")
        end = model.new_int_var(0, self.horizon + size, f"E{i}")
        length = model.new_int_var(0, self.horizon + size, f"N{i}")
        model.add(end == self.start[soon]).only_enforce_if(directly)
        model.add(length == size).only_enforce_if(~directly)
        if self.known is not None:
            row = self.users[r]
            direct = not any(self.known[i] < self.known[k] < self.known[soon] for k in row)
            last = int(self.known[soon] if direct else self.known[i] + size)
            self.hint[directly] = int(direct)
            self.hint[end], self.hint[length] = last, last - int(self.known[i])
        return model.new_interval_var(start, length, end, f"L{i}")

    def _pairs(self, on: list[int]) -> None:
        """One literal per pair of families apart; valid because setups are triangular."""
        graph, model = self.graph, self.model
        for i, k in combinations(on, 2):
            if graph.family[i] == graph.family[k]:
                continue
            to, back = graph.setup(i, k), graph.setup(k, i)
            if not to and not back:
                continue
            forth = model.new_bool_var(f"P{i},{k}")
            model.add(self.start[k] >= self.start[i] + self.duration[i] + to).only_enforce_if(forth)
            model.add(self.start[i] >= self.start[k] + self.duration[k] + back).only_enforce_if(
                ~forth
            )
            if self.known is not None:
                self.hint[forth] = int(self.known[i] < self.known[k])

    def _circuit(self, r: int, on: list[int]) -> None:
        """Immediate successors as a circuit: exact for any setups, zero durations and memory."""
        graph, model = self.graph, self.model
        n, capacity = len(on), int(graph.memory[r])
        model.add_no_overlap([self.interval[i] for i in on])
        # bytes can be freed only if they are held, with or without a limit
        most = capacity or int((graph.acquire + graph.workspace)[on].sum())
        level = [model.new_int_var(0, most, f"M{i}") for i in on] if most else []
        arcs: list[tuple[int, int, Any]] = []
        follows: dict[tuple[int, int], Any] = {}
        for a, i in enumerate(on):
            arcs.append((n, a, model.new_bool_var(f"first{i}")))
            arcs.append((a, n, model.new_bool_var(f"last{i}")))
            change = int(graph.acquire[i] - graph.free[i])
            if level:
                need = int(graph.acquire[i] + graph.workspace[i])
                model.add(level[a] + need <= most)
                model.add(level[a] == 0).only_enforce_if(arcs[-2][2])
                model.add(level[a] + change >= 0)
            for b, k in enumerate(on):
                if a == b or i in self._paths(k):
                    continue
                literal = model.new_bool_var(f"N{i},{k}")
                arcs.append((a, b, literal))
                follows[i, k] = literal
                gap = self.duration[i] + graph.setup(i, k)
                model.add(self.start[k] >= self.start[i] + gap).only_enforce_if(literal)
                if gap == 0:
                    model.add(self.rank[k] > self.rank[i]).only_enforce_if(literal)
                if level:
                    model.add(level[b] == level[a] + change).only_enforce_if(literal)
        if n:
            model.add_circuit(arcs)
        self.arcs_of[r] = follows

    def _ranks(self) -> list[Any]:
        """Places in one order of everything, for steps that take no time: no cycle among them."""
        graph, n = self.graph, self.graph.n_operations
        rank = [self.model.new_int_var(0, n, f"R{i}") for i in range(n)]
        instant = graph.duration[graph.arcs.tail] + graph.arcs.lag == 0
        for i, k in zip(graph.arcs.tail[instant], graph.arcs.head[instant], strict=True):
            self.model.add(rank[k] > rank[i])
        return rank

    def _walk(self, r: int, value: Callable[[Any], int]) -> list[int]:
        on = self.graph.users[r].tolist()
        after = {i: k for (i, k), literal in self.arcs_of[r].items() if value(literal)}
        first = set(on) - set(after.values())
        row = [first.pop()] if on else []
        while row and row[-1] in after:
            row.append(after[row[-1]])
        return row

    def _memory(self, r: int, on: list[int]) -> None:
        """Held bytes as intervals from the start of the holder to the end of the freer."""
        graph, model = self.graph, self.model
        intervals, demands = [], []
        for holding in self.holdings:
            if holding.resource != r:
                continue
            i, k = holding.first, holding.last
            if i == k:
                intervals.append(self.interval[i])
            else:
                last = self.horizon if k < 0 else self.start[k] + self.duration[k]
                size = model.new_int_var(0, self.horizon, f"H{i},{k}")
                intervals.append(model.new_interval_var(self.start[i], size, last, f"K{i},{k}"))
                if self.known is not None:
                    end = self.horizon if k < 0 else int(self.known[k]) + self.duration[k]
                    self.hint[size] = end - int(self.known[i])
            demands.append(holding.size)
        for i in on:
            if graph.workspace[i]:
                intervals.append(self.interval[i])
                demands.append(int(graph.workspace[i]))
        if intervals:
            model.add_cumulative(intervals, demands, int(graph.memory[r]))

    # objective, symmetry and hints

    def _objective(self, lower_bound: int) -> None:
        """The latest end of all jobs, or the weighted ends of single jobs."""
        graph, model = self.graph, self.model
        known = None if self.known is None else self.known + graph.duration
        if graph.goal is None:
            latest = model.new_int_var(min(lower_bound, self.horizon), self.horizon, "C")
            for i in np.flatnonzero(self.paths.tail == graph.duration).tolist():
                model.add(latest >= self.start[i] + self.duration[i])
            model.minimize(latest)
            if known is not None:
                self.hint[latest] = self.horizon
            return
        ends: dict[int, Any] = {}
        for i in last_operations(graph).tolist():
            j = int(graph.job[i])
            if j not in ends:
                ends[j] = model.new_int_var(0, self.horizon, f"C{j}")
            model.add(ends[j] >= self.start[i] + self.duration[i])
        if known is not None:
            completed = job_ends(graph, known)
            self.hint.update({end: int(completed[j]) for j, end in ends.items()})
        weight = per_job(graph)
        total = sum(weight[j] * end for j, end in ends.items())
        model.add(total >= lower_bound)
        model.minimize(total)

    def _symmetry(self) -> None:
        """Identical jobs in the order of their labels.

        Without setups every position may be sorted (swapping equal blocks changes nothing); with
        setups the identity of neighbours counts, so only one operation per job is ordered.
        """
        for group in self.groups:
            positions = 1 if self.graph.has_setups else len(group[0])
            for earlier, later in pairwise(group):
                for i, k in list(zip(earlier, later, strict=True))[:positions]:
                    self.model.add(self.start[i] <= self.start[k])

    def _relabelled(self, start: IntArray) -> IntArray:
        """Start times with identical jobs renamed so that they obey `_symmetry`."""
        start = start.copy()
        for group in self.groups:
            rows = np.array(group)
            if self.graph.has_setups:  # whole jobs change places, by their first operation
                start[rows] = start[rows[np.argsort(start[rows[:, 0]], kind="stable")]]
            else:
                start[rows] = np.sort(start[rows], axis=0)
        return start

    def _complete_hint(self) -> None:
        if self.known is None:
            return
        for variable, value in zip(self.start, self.known.tolist(), strict=True):
            self.model.add_hint(variable, value)
        for variable, value in self.hint.items():
            self.model.add_hint(variable, value)


def orders_at(graph: Schedule, starts: list[int]) -> list[int]:
    """All operations in an order that fits the start times, the arcs, and every resource.

    At one instant predecessors come first, and on a shared resource zero durations before others;
    `CyclicOrder` if that is impossible.
    """
    n, duration = graph.n_operations, graph.duration.tolist()
    after: list[list[int]] = [[] for _ in range(n)]
    waiting = [0] * n
    edges = [
        (i, k) for i, k in zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True)
    ]
    for on in graph.users.to_lists():
        at: dict[int, list[int]] = {}
        for i in on:
            at.setdefault(starts[i], []).append(i)
        for tied in at.values():
            if len(tied) > 1:
                edges += [(z, i) for z in tied for i in tied if not duration[z] and duration[i]]
    for i, k in edges:
        after[i].append(k)
        waiting[k] += 1
    heap = [(starts[i], i) for i in range(n) if not waiting[i]]
    heapq.heapify(heap)
    order = []
    while heap:
        order.append(heapq.heappop(heap)[1])
        for k in after[order[-1]]:
            waiting[k] -= 1
            if not waiting[k]:
                heapq.heappush(heap, (starts[k], k))
    if len(order) < n:
        stuck = [i for i in range(n) if waiting[i]]
        raise CyclicOrder("operations of zero duration at one instant cannot be ordered", stuck)
    return order


def _triangular(graph: Schedule, on: list[int]) -> bool:
    """Whether s(a, c) <= s(a, b) + p_b + s(b, c) for all of these operations.

    Only triples with two equal families can fail, so per family the largest out (in) setup is
    compared with the smallest duration + out (in) setup.
    """
    rows = np.array(on)
    for family in np.unique(graph.family[rows]):
        members = rows[graph.family[rows] == family]
        for setup in (graph.setup_out[members], graph.setup_in[members]):
            if len(members) > 1 and setup.max() > (graph.duration[members] + setup).min():
                return False
    return True
