"""Watch CP-SAT inside any package that calls it: trace, budget, threads, seed."""

from __future__ import annotations

import math
from typing import Any

from protocol import Clock, Trace


class Watched:
    """Replaces `CpSolver.solve`: the search is CP-SAT's own, only looked at.

    After the call `bound` and `status` hold what CP-SAT proved, which not every peer returns. The
    budget runs from the start of the process; `parameters` are set on every solver.
    """

    def __init__(self, clock: Clock, seconds: float, parameters: dict[str, Any]) -> None:
        from ortools.sat.python import cp_model

        self.clock, self.seconds, self.parameters = clock, seconds, parameters
        self.trace = Trace(clock)
        self.startup = 0.0
        self.bound: int | None = None
        self.status = "unknown"
        original = cp_model.CpSolver.solve
        watched = self

        class OnSolution(cp_model.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                watched.trace.add(objective=round(self.objective_value))

        def solve(solver: Any, model: Any, solution_callback: Any = None) -> Any:
            if solution_callback is not None:
                raise RuntimeError("the peer has a callback of its own")
            return watched.run(original, solver, model, OnSolution())

        setattr(cp_model.CpSolver, "solve", solve)  # noqa: B010

    def run(self, original: Any, solver: Any, model: Any, callback: Any) -> Any:
        """One search within what is left of the budget."""
        for key, value in self.parameters.items():
            setattr(solver.parameters, key, value)
        solver.best_bound_callback = lambda bound: self.trace.add(bound=math.ceil(bound - 1e-6))
        self.startup = self.clock.now()
        solver.parameters.max_time_in_seconds = max(0.01, self.seconds - self.startup)
        status = original(solver, model, callback)
        self.status = solver.status_name(status).lower()
        if self.status in ("optimal", "feasible"):
            self.bound = math.ceil(solver.best_objective_bound - 1e-6)
            self.trace.add(bound=self.bound)
        elif self.status != "infeasible":
            self.status = "unknown"
        return status

    def proof(self) -> dict[str, Any]:
        """Fields of the answer that CP-SAT knows."""
        return {
            "status": self.status,
            "bound": self.bound,
            "trace": self.trace.steps,
            "startup": self.startup,
            "ended": self.clock.now(),
        }
