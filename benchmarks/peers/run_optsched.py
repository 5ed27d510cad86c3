"""Any solver of ours, by its registered name."""

from __future__ import annotations

import time
from typing import Any

from protocol import Clock, answer, request, versions

MANY = 2**36
"""Iterations; an engine that ends before so many does not use them."""


def problem_of(asked: dict[str, Any]) -> Any:
    """The problem of a request: a file, or the chains of a job shop."""
    if asked["path"]:
        from optsched.formats.read_problem import read_problem

        return read_problem(asked["path"])
    from optsched import JobShop

    return JobShop(asked["jobs"], name=asked["instance"])


def main() -> None:
    """Solve, answer."""
    asked, clock = request()
    import optsched

    problem = problem_of(asked)
    if asked["iterations"] is not None:
        answer(**rate(problem, asked, clock))
        return
    startup = clock.now()
    result = optsched.solve(
        problem, asked["solver"], time_limit=max(0.0, asked["seconds"] - startup),
        workers=asked["workers"], seed=asked["seed"], options=asked["options"],
    )  # fmt: skip
    start = None if result.schedule is None else result.schedule.start
    answer(
        status=result.status,
        bound=result.lower_bound,
        starts=None if start is None else start.tolist(),
        trace=[
            (round(startup + step.elapsed, 4), step.objective, step.lower_bound)
            for step in result.history
        ],
        startup=startup,
        ended=clock.now(),
        versions=versions("optsched", "numba", "numpy", "ortools"),
    )


def rate(problem: Any, asked: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Steps of an engine and their CPU seconds, start-up left out by a first, short run.

    Counted by the engine if it reports its steps; otherwise by the iterations asked for, as long as
    no proof ends it earlier. They are doubled until a run takes `seconds` of CPU time.
    """
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import solver

    engine = solver(asked["solver"])

    def run(iterations: int) -> tuple[float, int]:
        limits = Limits(None, iterations, None, 1, asked["seed"], asked["options"])
        monitor = Monitor(limits)  # without a bound: an optimal schedule does not end a search
        begin = time.process_time()
        engine.solve(problem, limits, monitor)
        used = time.process_time() - begin
        return used, monitor.iteration or (0 if monitor.proved else iterations)

    iterations, used, steps = asked["iterations"], 0.0, 0
    run(iterations)  # imports, compilation
    least = run(1)[0]  # rules, whatever comes before the first step
    while iterations <= MANY:
        now, counted = run(iterations)
        if counted <= steps:
            break  # ended by a proof
        used, steps = now - least, counted
        if now >= asked["seconds"]:
            break
        iterations *= 2
    return {
        "iterations": steps, "cpu": used, "ended": clock.now(),
        "versions": versions("optsched", "numba", "numpy"),
    }  # fmt: skip


if __name__ == "__main__":
    main()
