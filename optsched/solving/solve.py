"""`optsched.solve`: run a solver under limits and verify its schedule."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError, InternalError, UnsupportedProblem
from optsched.model.objectives import MAKESPAN, PERIOD, TOTAL, as_makespan
from optsched.model.schedule import Objective, Schedule
from optsched.solving.incumbent import PROBLEM
from optsched.solving.limits import Limits, default_workers
from optsched.solving.monitor import Monitor
from optsched.solving.progress import LOGGER
from optsched.solving.result import Result
from optsched.solving.solver import Solver, runs_inline, solvers, support, support_by_name
from optsched.solving.solver import solver as find_solver

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import Problem
    from optsched.solving.progress import Criterion, Progress


_TIMES = (MAKESPAN, TOTAL, PERIOD)
_POLL = 0.01  # seconds between two polls while an engine runs
_FINISH = 8e-6  # seconds per operation to evaluate and verify the final schedule


def solve(
    problem: Problem,
    solver: str | Solver = "auto",
    *,
    time_limit: float | None = None,
    iterations: int | None = None,
    target: int | None = None,
    stop: Criterion | None = None,
    workers: int | None = None,
    seed: int = 0,
    warm_start: Schedule | None = None,
    on_progress: Callable[[Progress], object] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Result:
    """Find a good schedule, and a lower bound that shows how good.

    Parameters
    ----------
    problem
        A `JobShop`, a `JobArray`, or any unscheduled `Schedule` (a bare graph).
    solver
        Name of an installed solver for this kind of problem (`optsched.solvers(kind)`), or a solver
        object.
    time_limit, iterations, target, workers, seed
        See `Limits`; without any limit 10 seconds. Ctrl-C returns the best schedule so far.
    stop
        Further stopping criterion: one of `optsched.stop`, such as ``stop.Gap(0.01)``, or a
        function of a `Progress`. It counts as a limit.
    warm_start
        A complete schedule of the same problem; the result is never worse.
    on_progress
        Called with every new incumbent and bound, in the thread that called `solve`; a true return
        value stops the search. An exception in it propagates when all threads have ended, with the
        best schedule so far in ``.result``.
    options
        Named options of the solver.

    Returns
    -------
    Result
        With a schedule that the independent verifier accepts, if one was found. If it refutes a
        bound that an engine proved, ``contradiction`` describes it, and a warning is logged.

    Raises
    ------
    InputError
        A limit, a criterion, an option or the warm start is wrong.
    UnsupportedProblem
        The solver does not support this problem; the message names those that do.
    InternalError
        A solver has a bug: its schedule breaks a rule.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> result = optsched.solve(shop, time_limit=5)
    >>> result.status, result.objective, result.schedule.start.tolist()
    ('optimal', 6, [0, 4, 0, 4])
    """
    started = time.perf_counter()
    if not callable(getattr(problem, "graph", None)):
        raise InputError(f"problem: expected a JobShop, a JobArray or a graph, got {problem!r:.60}")
    engine = _engine(solver, problem)
    if on_progress is not None and not callable(on_progress):
        raise InputError(f"on_progress: expected a function, got {on_progress!r:.60}")
    limits = Limits(
        time_limit, iterations, target, default_workers() if workers is None else workers, seed,
        _known_options(engine, {} if options is None else options), stop,
    )  # fmt: skip
    searched, shift = as_makespan(problem)
    limits = _with_shifted_target(problem, limits, shift)
    monitor = Monitor(limits, on_progress, started, _FINISH * problem.n_operations, shift)
    start = None if warm_start is None else _warm_start(problem, warm_start)
    found = Result("unknown")
    _restore_interrupts()
    try:
        found = _run(engine, searched, limits, monitor, start, problem.infeasibility())
        monitor.poll(last=True)
    except KeyboardInterrupt:
        monitor.stop()
    except Exception as error:
        if monitor.callback_failed:  # the caller's own error: the search is not lost with it
            error.result = _finish(problem, engine, monitor, found)  # type: ignore[attr-defined]
        if monitor.callback_failed or not monitor.contradiction:
            raise
    try:
        return _finish(problem, engine, monitor, found)
    except KeyboardInterrupt:  # Ctrl-C during verification: keep the schedule
        monitor.stop()
        return _finish(problem, engine, monitor, found)


def _engine(solver: str | Solver, problem: Problem) -> Solver:
    """The solver of a name, or the given one; refused if it does not support the problem."""
    kind = problem.problem_kind
    engine = find_solver(solver, kind) if isinstance(solver, str) else solver
    if isinstance(engine, type) or not callable(getattr(engine, "solve", None)):
        raise InputError(f"solver: expected a name or a solver object, got {solver!r:.60}")
    supported = support(engine, problem)
    if supported:
        return engine
    able = [name for name in solvers(kind) if support_by_name(name, problem)]
    others = f"; these do: {', '.join(able)}" if able else "; no installed solver does"
    reason = supported.reason or "refused"
    raise UnsupportedProblem(f"{engine.name} does not solve this problem: {reason}{others}")


def _with_shifted_target(problem: Problem, limits: Limits, shift: int) -> Limits:
    """Check the target and convert it to the makespan that the engine minimizes."""
    if limits.target is None:
        return limits
    if problem.objective_name in _TIMES and limits.target < 0:
        raise InputError(f"target: expected an integer in 0..2^53, got {limits.target}")
    return replace(limits, target=limits.target + shift) if shift else limits


def _run(
    engine: Solver, problem: Problem, limits: Limits, monitor: Monitor, start: Any, reason: str
) -> Result:
    """Take the warm start, then search, unless a reason for infeasibility is known."""
    if start is not None:
        monitor.incumbent(start, problem.evaluate(problem.scheduled(start)), "warm start")
    if reason:
        return Result("infeasible", reason=reason, solver=PROBLEM)
    monitor.bound(problem.lower_bound(), PROBLEM)
    found = Result("unknown")
    if not monitor.should_stop() or monitor.objective is None:
        found = _search(engine, problem, limits, monitor)
        _take(problem, engine, monitor, found)
    return found


def _search(engine: Solver, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
    """Run the engine in a second thread and poll the monitor in this one; quick engines inline.

    So Ctrl-C arrives in this thread, never inside compiled code or half an import, and callbacks
    run in the thread that called `solve`, whatever the engine does.
    """
    if runs_inline(engine, problem):
        return engine.solve(problem, limits, monitor) or Result("unknown")
    results: list[Result | None] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(engine.solve(problem, limits, monitor))
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    done = threading.Event()  # not `join`: CPython 3.11 loses a thread if interrupted there
    thread = threading.Thread(target=work, name=f"optsched {engine.name}", daemon=True)
    thread.start()
    try:
        while not done.wait(_POLL):
            monitor.poll()
    except BaseException:
        monitor.stop()
        done.wait()
        raise
    finally:
        thread.join()
    if failures:
        raise failures[0]
    return results[0] or Result("unknown")


def _restore_interrupts() -> None:
    """Install Python's SIGINT handler again: CP-SAT removes it when used with its own."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _take(problem: Problem, engine: Solver, monitor: Monitor, found: Result) -> None:
    """Report what an engine returned without reporting it."""
    if not isinstance(found, Result):
        raise InternalError(f"{engine.name} returned a {type(found).__name__}, not a Result")
    if found.schedule is not None and found.schedule.sequences is not None:
        try:
            answer = problem.answer(found.schedule)
        except InputError as error:
            raise InternalError(f"{engine.name} returned a wrong schedule: {error}") from error
        value = problem.evaluate(_scheduled(problem, engine, answer))
        monitor.incumbent(answer, value, engine.name)
    if found.lower_bound is not None:
        monitor.bound(found.lower_bound, engine.name)


def _finish(problem: Problem, engine: Solver, monitor: Monitor, found: Result) -> Result:
    """Verify the schedule of the incumbent, and derive the status from what is proved."""
    now = monitor.progress()  # in the values of the problem
    if found.status == "infeasible" and monitor.solution is not None:
        monitor.contradicted(
            f"{found.solver or engine.name} proved that there is no schedule ({found.reason}), but "
            f"one of {now.objective} exists"
        )
    shared = {
        "lower_bound": monitor.progress().lower_bound,
        "history": tuple(monitor.history),
        "solver": engine.name,
        "interrupted": monitor.interrupted,
        "missing": tuple(sorted(monitor.missing)),
        "contradiction": monitor.contradiction,
    }
    if monitor.solution is None:
        status = "infeasible" if found.status == "infeasible" else "unknown"
        if status == "infeasible":
            shared["lower_bound"] = None
        return Result(status, reason=found.reason, seconds=monitor.elapsed, **shared)  # type: ignore[arg-type]
    from optsched.model.verify import verify

    schedule = _scheduled(problem, engine, monitor.solution)
    value = problem.evaluate(schedule)
    status = "optimal" if monitor.proved and value == now.objective else "feasible"
    schedule = schedule.with_orders(
        schedule.sequences,  # type: ignore[arg-type]
        schedule.start,  # type: ignore[arg-type]
        Objective(problem.objective_name, value, shared["lower_bound"], status),  # type: ignore[arg-type]
        {**schedule.provenance, **_provenance(problem, engine, monitor)},
    )
    violations = verify(schedule)
    if violations or value != now.objective:
        what = violations[0].message if violations else f"its objective is {value}"
        raise InternalError(
            f"{engine.name} returned a wrong schedule of objective {now.objective}: {what}"
        )
    if monitor.contradiction:
        logging.getLogger(LOGGER).warning(
            "%s: the schedule is correct, bounds of engines are discarded; please report this "
            "instance (sha-256 %s)", monitor.contradiction, problem.sha256,
        )  # fmt: skip
    return Result(status, schedule, value, seconds=monitor.elapsed, **shared)  # type: ignore[arg-type]


def _scheduled(problem: Problem, engine: Solver, answer: Any) -> Schedule:
    """The schedule of an engine's answer; `InternalError` if it is impossible."""
    try:
        return problem.scheduled(answer)
    except (InputError, AttributeError, TypeError) as error:
        what = f"{engine.name} returned impossible orders, a {type(answer).__name__}"
        raise InternalError(f"{what}: {error}") from error


def _provenance(problem: Problem, engine: Solver, monitor: Monitor) -> dict[str, Any]:
    from optsched.version import __version__

    limits = monitor.limits
    given = {
        "iterations": limits.iterations,
        "options": {key: _recorded(value) for key, value in limits.options.items()} or None,
        "interrupted": monitor.interrupted or None,
        "jobs": list(problem.job_names) or None,
    }
    return {
        "solver": engine.name,
        "seed": limits.seed,
        "optsched": __version__,
        "instance_sha256": problem.sha256,
        **{key: value for key, value in given.items() if value is not None},
    }


def _recorded(value: Any) -> Any:
    """An option as provenance holds it: objects (a plan) by their type, paths as text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kept = value is None or isinstance(value, (bool, int, float, str, list, dict))
    return value if kept else type(value).__name__


def _known_options(engine: Solver, options: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(options, Mapping):
        raise InputError(f"options: expected a mapping, got {options!r:.60}")
    known = getattr(engine, "options", {})
    for key in options:
        if key not in known:
            names = ", ".join(sorted(known)) or "none"
            raise InputError(f"options: {engine.name} has no option {key!r:.60}; it has: {names}")
    return options


def _warm_start(problem: Problem, start: Schedule) -> Any:
    if not isinstance(start, Schedule):
        raise InputError(f"warm_start: expected a Schedule, got {start!r:.60}")
    try:
        return problem.answer(start)
    except InputError as error:
        raise InputError(f"warm_start: {error}") from None
