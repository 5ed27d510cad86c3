"""Clairvoyant routing of few requests on a plan's instances: annealing, CP-SAT, and a bound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from optsched.problems.routing import Routing
from optsched.problems.routing.log import Log
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._cores import confined
from optsched_solvers._cpsat import Call
from optsched_solvers._loading import load
from optsched_solvers.routing.window import Batch, Window
from optsched_solvers.routing.windows_bound import one_segment_bound
from optsched_solvers.routing.windows_search import EVERY, Annealing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.model.schedule import Problem
    from optsched.problems.routing.plan import Plan
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MOST: Final = 30_000
"""Requests times tuples."""

PROVED: Final = 3_000
"""Requests times tuples up to which CP-SAT follows; above, it finds and proves nothing."""

STEPS: Final = 2_000
"""Of annealing per request, before CP-SAT."""

BOUNDING: Final = 0.35
"""Share of the time that the bound of single segments gets."""

STEP: Final = 100
"""Iterations that a step of annealing counts."""

_Best = tuple[int, list["Batch"]]


def supports(problem: Problem) -> Support:
    """Few requests, on servers whose batches neither slow each other nor wait for anything else."""
    if not isinstance(problem, Routing):
        return Support(False, "it routes requests (optsched.Routing)")
    for one in problem.servers:
        if one.contention is not None:
            return Support(
                False, f"batches slow each other down on server {one.id!r} (contention), which "
                "its model does not know"
            )  # fmt: skip
    for wrong, what in (
        (problem.link is not None, "moving activations takes time (link)"),
        (problem.router > 0, "decisions take time (router_ms)"),
        (problem.ms_per_joule > 0, "energy has a price (ms_per_joule)"),
    ):
        if wrong:
            return Support(False, f"{what}, which its model does not know")
    size = problem.n_requests * len(problem.tuples)
    if size > MOST:
        return Support(
            False, f"it takes up to {MOST} requests times tuples of widths, here are {size}"
        )
    return Support(True)


def solve(
    problem: Routing, plan: Plan, hints: Iterable[Log], limits: Limits, monitor: Monitor
) -> Result:
    """Improve the best of some histories, and bound what any with this plan can reach.

    The bound is one on histories in which the plan's instances are resident all the time, whatever
    else is loaded where a server has room for it; it is not told if a warm start is no such one.
    Options and threads are those of `CpSat`; a step of annealing counts `STEP` iterations.
    """
    window = Window(problem, plan)
    best: _Best | None = None
    claims = True
    if monitor.solution is not None:
        warm = Log.of_rows(problem, monitor.solution)
        claims = window.keeps(warm)
        hints = [warm, *hints]
    for log in hints:
        monitor.incumbent(log.rows(), log.cost, "online")
        batches = window.batches(log)
        if batches is not None and (best is None or log.cost < best[0]):
            best = log.cost, batches
        if monitor.should_stop():
            break
    if monitor.objective is None or monitor.should_stop():
        return Result("unknown")
    if claims:
        end = monitor.elapsed + BOUNDING * monitor.remaining
        monitor.bound(
            one_segment_bound(
                problem, window.hosts, monitor.objective,
                lambda: monitor.should_stop() or monitor.elapsed > end,
                2 if limits.iterations is None else 1,
            ), "one segment",
        )  # fmt: skip
    if best is not None and problem.n_requests and not monitor.should_stop():
        best = _anneal(window, best, monitor, limits)
        small = _is_small(problem) and not monitor.should_stop()
        if small and load(monitor, "ortools.sat.python.cp_model"):
            _Run(window, best, claims and window.is_full, limits, monitor).run()
    return Result("unknown")


def _is_small(problem: Routing) -> bool:
    return problem.n_requests * len(problem.tuples) <= PROVED


def _anneal(window: Window, best: _Best, monitor: Monitor, limits: Limits) -> _Best:
    """Better batches: all the time for many requests, a few steps where a proof may follow."""
    annealing = Annealing(window, best[1], limits.seed)
    most: float = STEPS * window.problem.n_requests if _is_small(window.problem) else math.inf
    if limits.iterations is not None:
        most = min(most, limits.iterations / STEP)
    began, left = monitor.elapsed, monitor.remaining

    def progress(step: int) -> float:
        if step:
            monitor.advance(EVERY * STEP)
        if monitor.should_stop():
            return 1.0
        return max(step / most, (monitor.elapsed - began) / left)

    def improved() -> None:
        nonlocal best
        log = window.log(annealing.batches())
        if log.cost < best[0]:
            best = log.cost, window.batches(log) or []
            monitor.incumbent(log.rows(), log.cost, "annealing")

    annealing.run(progress, improved)
    return best


class _Run(Call):
    """One call of CP-SAT."""

    def __init__(self, window: Window, best: _Best, claims: bool, limits: Limits, monitor: Monitor):
        from optsched_solvers.routing.windows_model import Model

        self.window, self.claims = window, claims
        self.built = Model(window, best[1], best[0], (monitor.lower_bound or 0) * claims)
        super().__init__(self.built.model, limits, monitor)
        self.solver.best_bound_callback = self._bound

    def _search(self) -> None:
        with confined(self.cores):
            if self._solved():
                self._bound(self.solver.best_objective_bound)

    def _solution(self, value: Callable[[Any], int]) -> None:
        log = self.window.log(self.built.batches(value))
        self.monitor.incumbent(log.rows(), log.cost, "cpsat")

    def _bound(self, bound: float) -> None:
        try:
            if self.claims and abs(bound) <= 2**53:
                self.monitor.bound(math.ceil(bound - 1e-3), "cpsat")
        except BaseException as error:
            self._fail(error)
