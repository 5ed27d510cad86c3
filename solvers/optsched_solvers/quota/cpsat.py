"""CP-SAT decides quotas, types and, where localities demand it, nodes jointly."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.problems.quota.answer import Quotas
from optsched.problems.quota.problem import QuotaPlan
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._cpsat import checked_options, solve_cp
from optsched_solvers._loading import load
from optsched_solvers.quota.plans import NOT_LOADED, first_answer, place, supported

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


def _is_joint(plan: QuotaPlan) -> bool:
    """Return whether nodes must be decided too: a locality may cost utility."""
    return any(job.locality != "any" for job in plan.jobs)


class CpSat:
    """CP-SAT on quotas, types and nodes; one iteration is 10^-6 deterministic seconds."""

    name = "cpsat"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType(
        {"parameters": "mapping of further CP-SAT parameters"}
    )

    def supports(self, problem: Problem) -> Support:
        """Every plan up to some size; localities need jobs times nodes within bounds."""
        support = supported(problem, MOST)
        if not support:
            return support
        assert isinstance(problem, QuotaPlan)
        pairs = len(problem.jobs) * len(problem.nodes)
        if pairs > MOST_PAIRS and _is_joint(problem):
            return Support(
                False, f"it places up to {MOST_PAIRS} pairs of job and node, this plan has {pairs}"
            )
        return support

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search until proof or limit, from the greedy answer."""
        assert isinstance(problem, QuotaPlan)
        plan = problem
        checked_options(limits)
        first_answer(plan, monitor)
        if not load(monitor, "ortools.sat.python.cp_model"):
            return Result("unknown", reason=NOT_LOADED)
        pairs = len(plan.jobs) * len(plan.nodes) * _is_joint(plan)
        if (
            monitor.should_stop()
            or monitor.remaining < START[0] * plan.n_options + START[1] * pairs
        ):
            return Result("unknown")
        model = Model(plan)
        if monitor.solution is not None:
            model.hint(monitor.solution)
        answer = solve_cp(
            model.model, limits, monitor, lambda value: _report(model, value, monitor)
        )
        if answer.status == "infeasible" and monitor.solution is None:
            return Result("infeasible", reason="CP-SAT proved that no placement keeps all rules")
        return Result("unknown")


class Model:
    """Variables of one plan, feasible by counting: an option of every job, and GPUs by node."""

    def __init__(self, plan: QuotaPlan) -> None:
        from ortools.sat.python import cp_model

        self.plan = plan
        self.model = model = cp_model.CpModel()
        table = plan.table
        self.pick = [model.new_bool_var("") for _ in range(len(table.size))]
        self.y: dict[tuple[int, int], Any] = {}
        ptr, cost = table.ptr.tolist(), table.cost.tolist()
        self.size, self.kind = table.size.tolist(), table.kind.tolist()
        self.rows = [range(ptr[j], ptr[j + 1]) for j in range(len(plan.jobs))]
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
            goal: Any = model.new_int_var(min(cost, default=0), max(cost, default=0), "level")
            for row in self.rows:
                model.add(sum(cost[o] * self.pick[o] for o in row) <= goal)
        else:
            goal = sum(cost[o] * self.pick[o] for o in range(len(cost)) if cost[o])
        if _is_joint(plan):
            self._add_nodes()
        if not isinstance(goal, int):
            model.add(goal >= plan.lower_bound())
            model.minimize(goal)

    def _add_nodes(self) -> None:
        """Add the GPUs of every job on every node, and the localities."""
        model, plan = self.model, self.plan
        kind, gpus, _ = (part.tolist() for part in plan.pools)
        for j, row in enumerate(self.rows):
            for k in range(len(plan.kinds)):
                some = [o for o in row if self.kind[o] == k and self.size[o]]
                nodes = [n for n in range(len(gpus)) if kind[n] == k and gpus[n]]
                if not some:
                    continue
                most = max(self.size[o] for o in some)
                for n in nodes:
                    self.y[j, n] = model.new_int_var(0, min(gpus[n], most), "")
                total = sum(self.size[o] * self.pick[o] for o in some)
                model.add(sum(self.y[j, n] for n in nodes) == total)
                self._add_locality(j, some, nodes, gpus)
        for n, free in enumerate(gpus):
            here = [self.y[j, n] for j in range(len(plan.jobs)) if (j, n) in self.y]
            if here:
                model.add(sum(here) <= free)

    def _add_locality(self, j: int, some: list[int], nodes: list[int], gpus: list[int]) -> None:
        """Restrict a job to one node where it fits one, or to whole nodes but one."""
        model, rule = self.model, self.plan.jobs[j].locality
        if rule == "any":
            return
        uses = {n: model.new_bool_var("") for n in nodes}
        for n in nodes:
            model.add(self.y[j, n] <= gpus[n] * uses[n])
            model.add(self.y[j, n] >= uses[n])
        if rule == "single":
            largest = max((gpus[n] for n in nodes), default=0)
            if fits := [self.pick[o] for o in some if self.size[o] <= largest]:
                model.add(sum(uses.values()) <= 1 + len(nodes) * (1 - sum(fits)))
            return
        parts = []
        for n in nodes:
            part, whole = model.new_bool_var(""), model.new_bool_var("")
            model.add(self.y[j, n] >= gpus[n] * whole)
            model.add(uses[n] <= part + whole)
            parts.append(part)
        model.add_at_most_one(parts)

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
        """Return sizes and types of a solution."""
        sizes, kinds = np.zeros((2, len(self.rows)), np.int64)
        for j, row in enumerate(self.rows):
            o = next(o for o in row if value(self.pick[o]))
            sizes[j], kinds[j] = self.size[o], self.kind[o]
        return sizes, kinds

    def placement(self, value: Callable[[Any], int]) -> Quotas:
        """Return GPUs by node of a solution."""
        found = [(j, n, value(variable)) for (j, n), variable in self.y.items()]
        used = np.array([row for row in found if row[2]], np.int64).reshape(-1, 3)
        return Quotas.of(len(self.rows), *used.T)


def _report(built: Model, value: Callable[[Any], int], monitor: Monitor) -> None:
    """Report a solution, placed by the heuristic, else as by CP-SAT."""
    sizes, kinds = built.quotas(value)
    rows, failed = place(built.plan, sizes, kinds)
    if failed >= 0:
        rows = built.placement(value)
    monitor.incumbent(rows, built.plan.worth(sizes, kinds), "cpsat")
