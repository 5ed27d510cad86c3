"""CP-SAT decides quotas, types and nodes jointly, then breaks ties; incumbents as they come."""

from __future__ import annotations

import math
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError
from optsched.problems.quota.problem import QuotaPlan
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._cores import confined
from optsched_solvers._cpsat import STOP, Call
from optsched_solvers._loading import load
from optsched_solvers.quota.cpsat_model import Model
from optsched_solvers.quota.first import first_answer
from optsched_solvers.quota.ground import NOT_LOADED, offer, place, ready, supported
from optsched_solvers.quota.marginal import greedy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import Problem, Rows
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
    free GPUs on partly used nodes, for twice the time that the optimum took (at least a second);
    the option ``ties`` turns it off.
    """
    from optsched_solvers._cpsat import checked_options

    checked_options(limits)
    ties = limits.options.get("ties", True)
    if not isinstance(ties, bool):
        raise InputError(f"options.ties: expected true or false, got {ties!r:.60}")
    if not load(monitor, "ortools.sat.python.cp_model") or not ready(plan, monitor):
        first_answer(plan, monitor)
        return Result("unknown", reason=NOT_LOADED)
    if monitor.should_stop():
        first_answer(plan, monitor)
        return Result("unknown")
    strict = any(job.locality != "any" for job in plan.jobs)
    small = len(plan.jobs) * len(plan.nodes) <= MOST_PAIRS
    joint = bool(plan.nodes) and (strict or (ties and small))
    pairs = len(plan.jobs) * len(plan.nodes) if joint else 0
    if monitor.remaining < START[0] * plan.n_options + START[1] * pairs:
        if monitor.objective is None and (found := greedy(plan)) is not None:
            offer(plan, monitor, *found, "greedy_quota")
        return Result("unknown")
    run = _Run(plan, Model(plan, joint), joint and ties, limits, monitor)
    run.run()
    if run.infeasible:
        return Result("infeasible", reason="CP-SAT proved that no placement keeps all rules")
    return Result("unknown")


class _Run(Call):
    """One call of CP-SAT for the objective, then perhaps one that breaks ties."""

    def __init__(
        self, plan: QuotaPlan, built: Model, ties: bool, limits: Limits, monitor: Monitor
    ) -> None:
        self.plan, self.built, self.ties = plan, built, ties
        self.held: tuple[Rows, int, float] | None = None
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
        if self.ties and (target is None or worth > target):
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
            if self.ties and held is not None and not told and self.monitor.remaining > STOP:
                self._break_ties(held[0], held[1])
            elif self.held is not None:
                self.monitor.bound(self.held[1], "cpsat")
            else:  # somebody else's answer cannot be beaten
                self._bound(self.solver.best_objective_bound)

    def _break_ties(self, rows: Rows, value: int) -> None:
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
            rows = plan.numbered(*built.placement(value))
        else:
            rows, _ = place(plan, sizes, kinds)
        worth = plan.worth(sizes, kinds)
        target = self.limits.target
        if not self.ties or (target is not None and worth <= target):
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
        {
            "parameters": "mapping of further CP-SAT parameters",
            "ties": "plans with nodes: break ties exactly (default true)",
        }
    )

    supports = staticmethod(supports)
    solve = staticmethod(solve)
