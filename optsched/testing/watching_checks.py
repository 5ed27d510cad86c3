"""Checks of what a user sees and does while a solver works: events, criteria, Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from optsched.solving import stop
from optsched.solving.solve import solve
from optsched.testing.common import consistent, each, living_threads, quicker_of_two
from optsched.testing.problems import small_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.solving.progress import Progress
    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

LONG = 10.0
"""Seconds that a run may take which something else should end."""

SOON = 5.0
"""Seconds after which such a run must be over, in the better of two tries."""

LATE = 0.5
"""Seconds by which an incumbent may reach the callback after it was reported."""


@each(small_problems)
def check_monitor(engine: Solver, problem: Any, time_limit: float) -> None:
    """Events in order; a callback that returns true stops; one that raises is heard."""
    events: list[Progress] = []
    result = solve(problem, engine, time_limit=time_limit, on_progress=events.append)
    _falls_and_rises(result.history)
    _falls_and_rises(events)
    told = any(event.event == "incumbent" for event in events)
    assert told or result.schedule is None, (
        "the callback was never called, although an incumbent existed"
    )
    _history(result)
    _callback_stops(problem, engine)
    _callback_raises(problem, engine)


@each(small_problems)
def check_progress(engine: Solver, problem: Any, time_limit: float) -> None:
    """Incumbents come while the engine works, not all at the end of the run."""
    for _ in range(2):  # the machine may be busy
        arrived: list[tuple[float, float]] = []
        begin = time.perf_counter()

        def note(p: Progress, at: Any = arrived, begin: float = begin) -> None:
            if p.event == "incumbent":
                at.append((time.perf_counter() - begin, p.elapsed))

        result = solve(problem, engine, time_limit=time_limit, on_progress=note)
        late = max((told - found for told, found in arrived), default=0.0)
        first = min((found for _, found in arrived), default=0.0)
        in_time = first <= max(0.5 * time_limit, 0.9 * result.seconds)
        if late <= LATE and in_time:
            break
    assert late <= LATE, f"an incumbent was told {late:.2f} s late"
    assert in_time, f"the first incumbent came after {first:.2f} of {result.seconds:.2f} s"


@each(small_problems, every=2)
def check_stopping(engine: Solver, problem: Any, time_limit: float) -> None:
    """Criteria of `optsched.stop`, and a function of the user, end a run."""
    home = threading.get_ident()
    asked: set[int] = set()

    def mine(progress: Progress) -> bool:
        asked.add(threading.get_ident())
        return progress.objective is not None

    criteria: dict[str, Any] = {
        "FirstFeasible": stop.FirstFeasible(),
        "Gap": stop.Gap(10.0),
        "NoImprovement(seconds)": stop.NoImprovement(seconds=0.1),
        # steps must be reported: `monitor.advance`
        "NoImprovement(iterations)": stop.NoImprovement(1),
        "AnyOf": stop.AnyOf(stop.Time(2 * LONG), stop.FirstFeasible()),
        "a function": mine,
    }
    for name, criterion in criteria.items():
        spent, result = quicker_of_two(problem, engine, SOON, stop=criterion, time_limit=LONG)
        hint = " (report steps by monitor.advance)" if "iterations" in name else ""
        assert spent <= SOON, f"{spent:.2f} s, {name} should have stopped it{hint}"
        assert not result.interrupted, f"{name} counted as an interruption"
    assert asked <= {home}, "a function was asked from another thread"


@each(small_problems, every=2)
def check_interrupt(engine: Solver, problem: Any, time_limit: float) -> None:
    """Ctrl-C returns the best so far, soon, and leaves no thread behind.

    Passed over where the interpreter would not turn the signal into `KeyboardInterrupt`.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        return
    pressed: list[Progress] = []

    def press(progress: Progress) -> None:
        if progress.objective is not None or progress.elapsed > 1:
            pressed.append(progress)
            signal.raise_signal(signal.SIGINT)

    before = living_threads()
    spent, result = quicker_of_two(problem, engine, SOON, time_limit=LONG, on_progress=press)
    assert spent <= SOON, f"{spent:.2f} s until Ctrl-C was obeyed"
    assert result.interrupted or not pressed, "Ctrl-C was swallowed"
    if any(event.objective is not None for event in result.history):
        assert result.schedule is not None, "Ctrl-C lost the best schedule"
    assert living_threads() <= before, "Ctrl-C left threads behind"


def _history(result: Result) -> None:
    """The history ends with what is returned, and its measures are in range."""
    if result.history:
        last = result.history[-1]
        assert last.objective == result.objective, f"history ends with {last.objective}"
        assert last.lower_bound == result.lower_bound, "history ends with another bound"
        assert last.elapsed <= result.seconds, "history ends after the run"
    if result.schedule is None:
        return
    integral = result.primal_integral()
    assert 0 <= integral <= 1, f"primal integral {integral}"
    found = result.time_to_best
    assert found is not None and found <= result.seconds, f"time to best {found}"
    proved = result.time_to_proof
    assert (proved is None) == (result.status != "optimal"), f"time to proof {proved}"


def _callback_stops(problem: Any, engine: Solver) -> None:
    threads: set[int] = set()

    def halt(progress: Progress) -> bool:
        threads.add(threading.get_ident())
        return True

    begin = time.perf_counter()
    result = solve(problem, engine, time_limit=LONG, on_progress=halt)
    consistent(problem, result)
    spent = time.perf_counter() - begin
    assert spent < SOON, "a callback could not stop it"
    assert threads <= {threading.get_ident()}, "called from another thread"


def _callback_raises(problem: Any, engine: Solver) -> None:
    class Heard(Exception):
        pass

    def fail(progress: Progress) -> None:
        raise Heard

    before = living_threads()
    try:
        solve(problem, engine, time_limit=LONG, on_progress=fail)
    except Heard as error:
        left = living_threads() - before
        assert left <= 0, "an exception of the callback left threads behind"
        assert hasattr(error, "result"), "the best so far was lost"
        return
    raise AssertionError("an exception of the callback was swallowed")


def _falls_and_rises(events: Sequence[Progress]) -> None:
    best, bound, at, steps = None, None, 0.0, 0
    for event in events:
        assert event.elapsed >= at, "time runs backwards"
        assert event.iteration >= steps, "iterations run backwards"
        at, steps = event.elapsed, event.iteration
        if event.objective is not None:
            assert best is None or event.objective <= best, "incumbent rose"
            best = event.objective
        if event.lower_bound is not None:
            assert bound is None or event.lower_bound >= bound, "bound fell"
            bound = event.lower_bound
        assert best is None or bound is None or bound <= best, "bound > incumbent"
