"""CP-SAT decides quotas, types and nodes jointly, then breaks ties; incumbents as they come."""

from __future__ import annotations

import math
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.problems.quota.answer import Quotas
from optsched.problems.quota.problem import QuotaPlan
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._cores import confined
from optsched_solvers._cpsat import STOP, Call
from optsched_solvers._loading import load
from optsched_solvers.quota.plans import (
    NOT_LOADED,
    first_answer,
    greedy,
    offer,
    place,
    supported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MOST: Final = 50_000
"""Allowed sizes of all jobs."""

MOST_PAIRS: Final = 20_000
"""Of jobs and nodes that are decided jointly."""

START: Final = (1.5e-5, 1e-4)
"""Seconds to make and simplify a model, per allowed size and per pair of job and node."""

_TIES: Final = 1.0  # seconds that ties get at least, else twice what the objective took
_HOLD: Final = 0.3  # seconds that an answer is kept back, in case it is optimal: ties come then


def supports(problem: Problem) -> Support:
    """Every plan up to some size; localities need jobs times nodes within bounds."""
    said = supported(problem, MOST)
    if not said:
        return said
    assert isinstance(problem, QuotaPlan)
    pairs = len(problem.jobs) * len(problem.nodes)
    if pairs > MOST_PAIRS and any(job.locality != "any" for job in problem.jobs):
        return Support(
            False, f"it places up to {MOST_PAIRS} pairs of job and node, this plan has {pairs}"
        )
    return said


def solve(plan: Any, limits: Limits, monitor: Monitor) -> Result:
    """Search until proof or limit; options, threads and iterations are those of `CpSat`.

    With nodes, a second search among the optima minimises nodes spanned, then GPUs moved, then
    free GPUs on partly used nodes, for twice the time that the optimum took (at least a second).
    """
    from optsched_solvers._cpsat import checked_options

    checked_options(limits)
    if not load(monitor, "ortools.sat.python.cp_model"):
        first_answer(plan, monitor)
        return Result("unknown", reason=NOT_LOADED)
    if monitor.should_stop():
        first_answer(plan, monitor)
        return Result("unknown")
    strict = any(job.locality != "any" for job in plan.jobs)
    pairs = len(plan.jobs) * len(plan.nodes)
    joint = bool(plan.nodes) and (strict or pairs <= MOST_PAIRS)
    pairs = pairs if joint else 0
    if monitor.remaining < START[0] * plan.n_options + START[1] * pairs:
        if monitor.objective is None and (found := greedy(plan)) is not None:
            offer(plan, monitor, *found, "greedy_quota")
        return Result("unknown")
    run = _Run(plan, Model(plan, joint), limits, monitor)
    run.run()
    if run.infeasible:
        return Result("infeasible", reason="CP-SAT proved that no placement keeps all rules")
    return Result("unknown")


class Model:
    """Variables of one plan.

    Parameters
    ----------
    plan
        Feasible by counting.
    joint
        Whether nodes are decided too (`y`): needed for localities and for exact ties.
    """

    def __init__(self, plan: QuotaPlan, joint: bool) -> None:
        from ortools.sat.python import cp_model

        self.plan, self.joint = plan, joint
        self.model = model = cp_model.CpModel()
        table = plan.table
        self.pick = [model.new_bool_var("") for _ in range(len(table.size))]
        self.y: dict[tuple[int, int], Any] = {}
        self.z: dict[tuple[int, int], Any] = {}
        ptr = table.ptr.tolist()
        self.size, self.kind = table.size.tolist(), table.kind.tolist()
        self.rows = [range(ptr[j], ptr[j + 1]) for j in range(len(plan.jobs))]
        cost = table.cost.tolist()
        for row in self.rows:
            model.add_exactly_one([self.pick[o] for o in row])
        for k, budget in enumerate(plan.budgets):
            some = [o for o in range(len(self.size)) if self.kind[o] == k and self.size[o]]
            used = sum(self.size[o] * self.pick[o] for o in some)
            if some and plan.hands_out_all:
                model.add(used == plan.total)
            elif some:
                model.add(used <= budget)
        if plan.highest:
            low, high = min(cost, default=0), max(cost, default=0)
            self.goal: Any = model.new_int_var(low, high, "level")
            for row in self.rows:
                model.add(sum(cost[o] * self.pick[o] for o in row) <= self.goal)
        else:
            self.goal = sum(cost[o] * self.pick[o] for o in range(len(cost)) if cost[o])
        if joint:
            self._nodes()
        bound = plan.lower_bound()
        if not isinstance(self.goal, int):
            model.add(self.goal >= bound)
            model.minimize(self.goal)

    def _nodes(self) -> None:
        """GPUs of every node for every job, and the localities."""
        model, plan = self.model, self.plan
        kind, gpus, _ = (part.tolist() for part in plan.pools)
        for j, row in enumerate(self.rows):
            for k in range(len(plan.kinds)):
                some = [o for o in row if self.kind[o] == k and self.size[o]]
                nodes = [n for n in range(len(gpus)) if kind[n] == k and gpus[n]]
                most = max((self.size[o] for o in some), default=0)
                if not most:
                    continue
                for n in nodes:
                    self.y[j, n] = model.new_int_var(0, min(gpus[n], most), "")
                    self.z[j, n] = model.new_bool_var("")
                    model.add(self.y[j, n] <= gpus[n] * self.z[j, n])
                    model.add(self.y[j, n] >= self.z[j, n])
                wanted = sum(self.size[o] * self.pick[o] for o in some)
                model.add(sum(self.y[j, n] for n in nodes) == wanted)
                self._locality(j, some, nodes, gpus)
        for n, room in enumerate(gpus):
            here = [self.y[j, n] for j in range(len(plan.jobs)) if (j, n) in self.y]
            if here:
                model.add(sum(here) <= room)

    def _locality(self, j: int, some: list[int], nodes: list[int], gpus: list[int]) -> None:
        model, rule = self.model, self.plan.jobs[j].locality
        largest = max((gpus[n] for n in nodes), default=0)
        if rule == "single":
            fits = [self.pick[o] for o in some if self.size[o] <= largest]
            if fits:
                spread = len(nodes) * (1 - sum(fits))
                model.add(sum(self.z[j, n] for n in nodes) <= 1 + spread)
        elif rule == "whole":
            parts = []
            for n in nodes:
                part, whole = model.new_bool_var(""), model.new_bool_var("")
                model.add(self.y[j, n] >= gpus[n] * whole)
                model.add(self.z[j, n] <= part + whole)
                parts.append(part)
            model.add_at_most_one(parts)

    def break_ties(self, value: int) -> None:
        """Keep the objective, and minimise nodes spanned, then moves, then GPUs left in parts."""
        model, plan = self.model, self.plan
        model.clear_objective()
        if not isinstance(self.goal, int):
            model.add(self.goal <= value)
        scale = plan.n_gpus + 1
        spanned = sum(self.z.values())
        model.minimize((spanned * scale + self._moved()) * scale + self._fragments())

    def _moved(self) -> Any:
        plan, model = self.plan, self.model
        held_now = plan.held
        ptr, node, count = (part.tolist() for part in (held_now.ptr, held_now.node, held_now.count))
        moved: Any = 0
        for j, row in enumerate(self.rows):
            some = range(ptr[j], ptr[j + 1])
            held = sum(count[i] for i in some)
            if not held:
                continue
            least = sum(min(held, self.size[o]) * self.pick[o] for o in row)
            moved += least
            for i in some:
                if (j, node[i]) in self.y:
                    kept = model.new_int_var(0, count[i], "")
                    model.add(kept <= self.y[j, node[i]])
                    moved -= kept
        return moved

    def _fragments(self) -> Any:
        model = self.model
        _, gpus, _ = (part.tolist() for part in self.plan.pools)
        total: Any = 0
        for n, room in enumerate(gpus):
            jobs = [j for j in range(len(self.rows)) if (j, n) in self.y]
            if not jobs or room < 2:
                continue
            busy, left = model.new_bool_var(""), model.new_int_var(0, room - 1, "")
            model.add_max_equality(busy, [self.z[j, n] for j in jobs])
            model.add(left >= room * busy - sum(self.y[j, n] for j in jobs))
            total += left
        return total

    def hint(self, quotas: Quotas) -> None:
        """Begin the search at an answer."""
        sizes, kinds = (part.tolist() for part in self.plan.sizes(quotas))
        for j, row in enumerate(self.rows):
            for o in row:
                here = self.size[o] == sizes[j] and (not sizes[j] or self.kind[o] == kinds[j])
                self.model.add_hint(self.pick[o], here)
        columns = (part.tolist() for part in (quotas.rows, quotas.node, quotas.count))
        on = {(j, n): c for j, n, c in zip(*columns, strict=True)}
        for at, variable in self.y.items():
            self.model.add_hint(variable, on.get(at, 0))

    def quotas(self, value: Callable[[Any], int]) -> tuple[IntArray, IntArray]:
        """Sizes and types of a solution."""
        sizes, kinds = np.zeros(len(self.rows), np.int64), np.zeros(len(self.rows), np.int64)
        for j, row in enumerate(self.rows):
            o = next(o for o in row if value(self.pick[o]))
            sizes[j], kinds[j] = self.size[o], self.kind[o]
        return sizes, kinds

    def placement(self, value: Callable[[Any], int]) -> Quotas:
        """GPUs by node of a solution."""
        found = [(j, n, value(variable)) for (j, n), variable in self.y.items()]
        used = np.array([row for row in found if row[2]], np.int64).reshape(-1, 3)
        return Quotas.of(len(self.rows), *used.T)


class _Run(Call):
    """One call of CP-SAT for the objective, then perhaps one that breaks ties."""

    def __init__(self, plan: QuotaPlan, built: Model, limits: Limits, monitor: Monitor) -> None:
        self.plan, self.built = plan, built
        self.held: tuple[Quotas, int, float] | None = None
        self.breaking = False
        self.lock = threading.Lock()
        if monitor.solution is not None:
            built.hint(monitor.solution)
        else:
            self._begin(limits, monitor)
        super().__init__(built.model, limits, monitor)

    def _begin(self, limits: Limits, monitor: Monitor) -> None:
        """Start at the greedy answer; it is held back like others, in case ties can be broken."""
        found = greedy(self.plan)
        rows, failed = (None, 0) if found is None else place(self.plan, *found)
        if found is None or rows is None or failed >= 0:
            return
        worth, target = self.plan.worth(*found), limits.target
        self.built.hint(rows)
        if self.built.joint and (target is None or worth > target):
            self.held = (rows, worth, monitor.elapsed)
        else:
            monitor.incumbent(rows, worth, "greedy_quota")

    def run(self) -> None:
        super().run()
        self._tell(0.0)

    def _look(self) -> None:
        if not self.breaking:
            self._tell(_HOLD)

    def _search(self) -> None:
        with confined(self.cores):
            self.solver.best_bound_callback = self._bound
            if not self._solved():
                return
            held = self.held
            told = held is not None and self.monitor.objective == held[1]
            if self.built.joint and held is not None and not told and self.monitor.remaining > STOP:
                self._break_ties(held[0], held[1])
            elif self.held is not None:
                self.monitor.bound(self.held[1], "cpsat")
            else:  # somebody else's answer cannot be beaten
                self._bound(self.solver.best_objective_bound)

    def _break_ties(self, rows: Quotas, value: int) -> None:
        self.breaking = True
        self.monitor.bound(value, "cpsat")
        self.built.model.clear_hints()
        self.built.hint(rows)
        self.built.break_ties(value)
        taken = self.solver.wall_time
        self.solver = self._solver()
        if self.limits.iterations is None:  # with a limit of steps, answers never depend on time
            given = self.solver.parameters
            given.max_time_in_seconds = min(
                given.max_time_in_seconds, max(_TIES, 2 * taken), self.monitor.remaining
            )
        self.solver.solve(self.built.model, self._callback())

    def _solution(self, value: Callable[[Any], int]) -> None:
        plan, built = self.plan, self.built
        sizes, kinds = built.quotas(value)
        if built.joint:
            rows = built.placement(value)
        else:
            rows, _ = place(plan, sizes, kinds)
        worth = plan.worth(sizes, kinds)
        target = self.limits.target
        if not self.built.joint or (target is not None and worth <= target):
            self.monitor.incumbent(rows, worth, "cpsat")
            return
        with self.lock:
            self.held = (rows, worth, self.monitor.elapsed)

    def _tell(self, patience: float) -> None:
        """Report what is kept back, if that is long enough ago."""
        with self.lock:
            held = self.held
            if held is None or self.monitor.elapsed - held[2] < patience:
                return
        self.monitor.incumbent(held[0], held[1], "cpsat")

    def _bound(self, bound: float) -> None:
        try:
            if abs(bound) <= 2**53:
                self.monitor.bound(math.ceil(bound - 1e-3), "cpsat")
        except BaseException as error:
            self._fail(error)


class CpSat:
    """CP-SAT on quotas, types and nodes; one iteration is 10^-6 deterministic seconds."""

    name = "cpsat"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType(
        {"parameters": "mapping of further CP-SAT parameters"}
    )

    supports = staticmethod(supports)
    solve = staticmethod(solve)
