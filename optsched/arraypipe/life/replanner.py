"""A better plan from a solver in a thread, while training goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.model.schedule import Problem, Schedule


class Replanner:
    """Solves one problem at a time in a daemon thread; an error becomes a sentence."""

    def __init__(self) -> None:
        self._answer: list[Schedule | str] = []  # of the problem submitted last
        self._stop = threading.Event()

    def submit(self, problem: Problem, start: Schedule, time_limit: float) -> None:
        """Begin to solve a problem, instead of the one before if that is not done.

        The answer is never worse than the orders of `start`, a schedule of the same blocks.
        """
        self.cancel()
        given = (self._answer, self._stop, problem, start, time_limit)
        threading.Thread(target=_solve, args=given, name="re-planning", daemon=True).start()

    def poll(self) -> Schedule | str | None:
        """Return once the schedule that was found, or why there is none; never wait."""
        return self._answer.pop() if self._answer else None

    def cancel(self) -> None:
        """Stop the solver and forget its answer."""
        self._stop.set()
        self._answer, self._stop = [], threading.Event()


def _solve(
    answer: list[Any], stop: threading.Event, problem: Any, start: Schedule, time_limit: float
) -> None:
    try:
        from optsched.solving.solution import PeriodicOrders
        from optsched.solving.solve import solve

        if not getattr(problem, "chooses", False):  # its arcs may be listed in another order
            orders = start.sequences
            assert orders is not None
            start = problem.scheduled(
                orders if start.period is None else PeriodicOrders(orders, start.offset)
            )
        result = solve(
            problem, time_limit=time_limit, workers=1, warm_start=start,
            stop=lambda _: stop.is_set(),
        )  # fmt: skip
        nothing = f"no schedule was found in {time_limit:g} s ({result.status})"
        answer.append(result.schedule or result.reason or nothing)
    except Exception as error:  # the training goes on without a better plan
        answer.append(f"{type(error).__name__}: {error}")
