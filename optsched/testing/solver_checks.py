"""The conformance suite: what every backend, ours or a third party's, must keep.

A bug found in one backend is added here as a check, so that all gain (the idea of
MathOptInterface's shared tests and of scikit-learn's ``check_estimator``).
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import optsched
from optsched.errors import InputError, OptschedError, UnsupportedProblem
from optsched.graph import evaluate, scheduled
from optsched.limits import Limits
from optsched.monitor import Monitor
from optsched.registry import Solver
from optsched.registry import solver as find_solver
from optsched.testing.brute_force import best_makespan
from optsched.testing.problems import infeasible_problems, small_problems, tiny_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.monitor import Progress
    from optsched.problem import Problem
    from optsched.result import Result
    from optsched.schedule import Schedule

ITERATIONS = 2000
"""Limit of the reproducibility check; solvers define what an iteration is."""

OVERRUN = 0.5
"""Seconds by which a warm solver may exceed its time limit, in the better of two tries."""


def check_solver(
    solver: str | Solver,
    problems: Sequence[Problem] | None = None,
    time_limit: float = 1.0,
) -> None:
    """Run every check; one error that lists all failures.

    Parameters
    ----------
    solver
        A solver object, or the name of an installed one.
    problems
        Further problems for the checks that need no known optimum.
    time_limit
        Seconds for each solve.

    Raises
    ------
    AssertionError
        With one line per failure: check, problem, what went wrong.
    """
    engine = find_solver(solver) if isinstance(solver, str) else solver
    failures: list[str] = []
    for check in CHECKS:
        try:
            check(engine, problems or (), time_limit)
        except AssertionError as error:
            failures.append(f"{check.__name__}: {error}")
        except Exception as error:
            failures.append(f"{check.__name__}: raised {type(error).__name__}: {error}")
    if failures:
        name = getattr(engine, "name", engine)
        raise AssertionError(f"{name} fails {len(failures)} checks:\n  " + "\n  ".join(failures))


class SolverTests:
    """Pytest class: subclass it, set `solver`, and every check becomes a test."""

    solver: Any = None
    problems: Sequence[Any] = ()
    time_limit: float = 1.0

    def _run(self, check: Callable[..., None]) -> None:
        engine = find_solver(self.solver) if isinstance(self.solver, str) else self.solver
        check(engine, self.problems, self.time_limit)

    def test_interface(self) -> None:
        """Name, options, pure `supports`, reasons for refusals."""
        self._run(check_interface)

    def test_feasible_and_bounded(self) -> None:
        """Bound <= optimum <= objective, schedules verified, statuses true."""
        self._run(check_feasible_and_bounded)

    def test_status(self) -> None:
        """What the solver itself returns claims no more than was proved."""
        self._run(check_status)

    def test_infeasible(self) -> None:
        """Infeasible problems are never solved, and never called feasible."""
        self._run(check_infeasible)

    def test_reproducible(self) -> None:
        """Same instance, seed and iterations give the same schedule."""
        self._run(check_reproducible)

    def test_limits(self) -> None:
        """Limits of zero, a second, a target: obeyed, with a legal status."""
        self._run(check_limits)

    def test_hostile_limits(self) -> None:
        """Limits and options out of range are refused by name."""
        self._run(check_hostile_limits)

    def test_warm_start(self) -> None:
        """A warm start is never lost; a foreign or broken one is rejected."""
        self._run(check_warm_start)

    def test_monitor(self) -> None:
        """Incumbents fall, bounds rise, callbacks may stop or raise."""
        self._run(check_monitor)

    def test_leaves_no_trace(self) -> None:
        """Problem, random state and threads are as before."""
        self._run(check_leaves_no_trace)

    def test_silent(self) -> None:
        """Nothing is printed."""
        self._run(check_silent)


def check_interface(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """`name`, `options`, a pure `supports`, and a reason for every refusal."""
    assert isinstance(engine.name, str) and engine.name, "name: expected a non-empty string"
    options = getattr(engine, "options", {})
    assert hasattr(options, "keys"), "options: expected a mapping of names to help"
    period = optsched.JobArray([[1]], [[1]], objective="period")
    for problem in [*tiny_problems(), *problems, period]:
        first, second = engine.supports(problem), engine.supports(problem)
        assert bool(first) == bool(second), f"{problem.name}: supports() changes its mind"
        if first:
            continue
        assert getattr(first, "reason", "?"), f"{problem.name}: refused without a reason"
        try:
            optsched.solve(problem, engine, time_limit=0)
        except UnsupportedProblem:
            continue
        raise AssertionError(f"{problem.name}: refused by supports(), but solve() takes it")


def check_feasible_and_bounded(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """On tiny problems brute force knows the optimum; elsewhere the verifier and bounds must do."""
    found_any = False
    for problem in _supported(engine, tiny_problems()):
        result = optsched.solve(problem, engine, time_limit=time_limit)
        _consistent(problem, result)
        found_any = found_any or result.schedule is not None
        optimum = best_makespan(problem.graph())
        assert optimum is not None
        bound = result.lower_bound
        assert bound is None or bound <= optimum, f"{problem.name}: bound {bound} > {optimum}"
        if result.objective is not None:
            assert result.objective >= optimum, (
                f"{problem.name}: objective {result.objective} below the optimum {optimum}"
            )
        assert result.status != "infeasible", f"{problem.name}: called infeasible, it is not"
    assert found_any, "found nothing on any tiny problem"
    for problem in _supported(engine, [*small_problems(), *problems]):
        _consistent(problem, optsched.solve(problem, engine, time_limit=time_limit))


def check_status(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The engine's own status, which `optsched.solve` would put right, claims only what is so."""
    cases = [(problem, time_limit) for problem in tiny_problems()]
    cases += [(problem, limit) for problem in small_problems() for limit in (0, time_limit)]
    for problem, limit in [case for case in cases if engine.supports(case[0])]:
        limits = Limits(time_limit=limit)
        monitor = Monitor(limits)
        monitor.bound(problem.lower_bound(), "bounds")
        returned = engine.solve(problem, limits, monitor)
        if returned is None:  # all is reported already: legal
            continue
        if returned.schedule is not None and returned.schedule.sequences is not None:
            orders = returned.schedule.sequences
            monitor.incumbent(orders, scheduled(problem.graph(), orders).makespan)
        if returned.lower_bound is not None:
            monitor.bound(returned.lower_bound)
        known = f"objective {monitor.objective}, lower bound {monitor.lower_bound}"
        lies = {
            "optimal": not monitor.proved,
            "feasible": monitor.objective is None,
            "infeasible": True,
        }
        assert not lies.get(returned.status), (
            f"{problem.name}: returned status {returned.status} with {known}"
        )


def check_infeasible(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Status ``infeasible`` with a reason, or at least ``unknown``."""
    for problem in _supported(engine, infeasible_problems()):
        result = optsched.solve(problem, engine, time_limit=time_limit)
        assert result.schedule is None, f"{problem.name}: solved the unsolvable"
        assert result.status in ("infeasible", "unknown"), f"{problem.name}: {result.status}"
        if result.status == "infeasible":
            assert result.reason, f"{problem.name}: infeasible without a reason"


def check_reproducible(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Twice in a row, and two at once in threads: the same bits."""
    for problem in _supported(engine, small_problems()):
        results: list[Result] = []

        def run(problem: Any = problem, results: list[Result] = results) -> None:
            results.append(optsched.solve(problem, engine, iterations=ITERATIONS, seed=7))

        run()
        run()
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4, f"{problem.name}: a run in a thread failed"
        first = results[0]
        for other in results[1:]:
            assert other.objective == first.objective, (
                f"{problem.name}: objectives {first.objective} and {other.objective} with one seed"
            )
            assert other.lower_bound == first.lower_bound, f"{problem.name}: bounds differ"
            assert other.schedule == first.schedule, f"{problem.name}: schedules differ"


def check_limits(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Nothing runs on behind its limit; every outcome is legal."""
    for problem in _supported(engine, small_problems()):
        optsched.solve(problem, engine, time_limit=0.2)  # compile and import outside the clock
        for limit in (0, 0.05, min(time_limit, 1.0)):
            spent, _ = _quicker_of_two(problem, engine, limit + OVERRUN, time_limit=limit)
            assert spent <= limit + OVERRUN, f"{problem.name}: {spent:.2f} s with limit {limit} s"
        for iterations in (0, 1):
            _consistent(problem, optsched.solve(problem, engine, iterations=iterations))
        best = optsched.solve(problem, engine, time_limit=time_limit)
        if best.objective is not None:
            easy = optsched.solve(
                problem, engine, target=best.objective, time_limit=20 * time_limit,
                warm_start=best.schedule,
            )  # fmt: skip
            assert easy.objective == best.objective, f"{problem.name}: a met target was not kept"
            _stops_at_target(problem, engine, best, time_limit)


def check_hostile_limits(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Each refused with an `InputError` that names the field."""
    problem = _supported(engine, tiny_problems())[0]
    hostile: list[dict[str, Any]] = [
        {"time_limit": -1}, {"time_limit": float("nan")}, {"time_limit": "1"},
        {"time_limit": True}, {"iterations": -1}, {"iterations": 1.5}, {"target": -1},
        {"workers": 0}, {"workers": -2}, {"workers": 1.5}, {"seed": -1}, {"seed": 2**64},
        {"seed": "0"}, {"options": {"no such option": 1}}, {"options": 3},
    ]  # fmt: skip
    for given in hostile:
        field = next(iter(given))
        try:
            optsched.solve(problem, engine, **{"time_limit": 0.1, **given})
        except InputError as error:
            assert field in str(error), f"{given}: the message does not name {field}: {error}"
            continue
        raise AssertionError(f"{given}: accepted")


def check_warm_start(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Used and never lost; another instance's and a broken one are rejected."""
    for problem in _supported(engine, small_problems()):
        first = optsched.solve(problem, engine, time_limit=time_limit)
        if first.schedule is None:
            continue
        for limit in ({"iterations": 0}, {"time_limit": 0}, {"time_limit": 0.1}):
            again = optsched.solve(problem, engine, warm_start=first.schedule, **limit)
            _consistent(problem, again)
            assert again.objective is not None and again.objective <= first.objective, (  # type: ignore[operator]
                f"{problem.name}: {first.objective} given, {again.objective} returned"
            )
        other = optsched.JobShop([[(0, 1)]]).graph()
        _rejected(problem, engine, other)
        broken = first.schedule.with_orders(
            first.schedule.sequences,  # type: ignore[arg-type]
            first.schedule.start * 0,  # type: ignore[operator]
        )
        _rejected(problem, engine, broken)


def check_monitor(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Events in order; a callback that returns true stops; one that raises is heard."""
    for problem in _supported(engine, small_problems()):
        seen: list[Progress] = []
        result = optsched.solve(problem, engine, time_limit=time_limit, on_progress=seen.append)
        _falls_and_rises(problem, result.history)
        _falls_and_rises(problem, seen)
        told = any(event.event == "incumbent" for event in seen)
        assert told or result.schedule is None, (
            f"{problem.name}: the callback was never called, although an incumbent existed"
        )
        home = threading.get_ident()
        threads: list[int] = []

        def stop(progress: Progress, threads: list[int] = threads) -> bool:
            threads.append(threading.get_ident())
            return True

        begin = time.perf_counter()
        optsched.solve(problem, engine, time_limit=10, on_progress=stop)
        assert time.perf_counter() - begin < 5, f"{problem.name}: a callback could not stop it"
        assert set(threads) <= {home}, f"{problem.name}: called from another thread"

        class Heard(Exception):
            pass

        def fail(progress: Progress, heard: type[Exception] = Heard) -> None:
            raise heard

        try:
            optsched.solve(problem, engine, time_limit=10, on_progress=fail)
        except Heard:
            continue
        raise AssertionError(f"{problem.name}: an exception of the callback was swallowed")


def check_leaves_no_trace(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The problem is a value; random state and threads are the caller's."""
    for problem in _supported(engine, small_problems()):
        content, alive = problem.sha256, threading.active_count()
        with _peculiar_random_state() as changed:
            optsched.solve(problem, engine, time_limit=min(time_limit, 0.5))
            generators = changed()
        assert problem.sha256 == content, f"{problem.name}: the problem changed"
        assert not generators, f"{problem.name}: global state of {generators} changed"
        assert threading.active_count() <= alive, f"{problem.name}: threads left behind"


def check_silent(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Nothing on stdout or stderr, from Python or compiled code; warnings are allowed."""
    for problem in _supported(engine, small_problems()):
        printed: list[str] = []
        with warnings.catch_warnings(), _output(printed):
            warnings.simplefilter("ignore")
            optsched.solve(problem, engine, time_limit=min(time_limit, 0.5))
        assert not printed, f"{problem.name}: printed {printed[0][:60]!r}"


CHECKS: tuple[Callable[[Solver, Sequence[Any], float], None], ...] = (
    check_interface, check_feasible_and_bounded, check_status, check_infeasible,
    check_reproducible, check_limits, check_hostile_limits, check_warm_start, check_monitor,
    check_leaves_no_trace, check_silent,
)  # fmt: skip


def _supported(engine: Solver, problems: Sequence[Any]) -> list[Any]:
    taken = [problem for problem in problems if engine.supports(problem)]
    assert taken, "takes none of the problems of this check"
    return taken


def _consistent(problem: Any, result: Result) -> None:
    """Verified, semi-active, worth what it says, and honest about what is proved."""
    name = problem.name
    if result.schedule is None:
        assert result.objective is None, f"{name}: an objective without a schedule"
        assert result.status in ("infeasible", "unknown"), f"{name}: {result.status}, no schedule"
        return
    violations = optsched.verify(result.schedule)
    assert not violations, f"{name}: {violations[0].message}"
    assert problem.evaluate(result.schedule) == result.objective, f"{name}: objective is wrong"
    heads = evaluate(problem.graph(), result.schedule.sequences).head
    assert (heads == result.schedule.start).all(), f"{name}: starts are not semi-active"
    bound = result.lower_bound
    assert bound is None or bound <= result.objective, f"{name}: bound above the objective"  # type: ignore[operator]
    expected = "optimal" if bound == result.objective else "feasible"
    assert result.status == expected, f"{name}: status {result.status}, should be {expected}"


def _quicker_of_two(
    problem: Any, engine: Solver, most: float, **limits: Any
) -> tuple[float, Result]:
    """Seconds and result; a second try only after more than `most`: the machine may be busy."""
    tries: list[tuple[float, Result]] = []
    while not tries or (len(tries) < 2 and tries[0][0] > most):
        begin = time.perf_counter()
        result = optsched.solve(problem, engine, **limits)
        tries.append((time.perf_counter() - begin, result))
        _consistent(problem, result)
    return min(tries, key=lambda one: one[0])


def _stops_at_target(problem: Any, engine: Solver, before: Result, time_limit: float) -> None:
    """A target twice as large as the first incumbent is met as soon as that one was."""
    first = next(event.objective for event in before.history if event.objective is not None)
    target, soon = 2 * first, time_limit + 1
    spent, result = _quicker_of_two(
        problem, engine, soon, target=target, time_limit=2 * soon, seed=0
    )
    assert result.objective is not None, f"{problem.name}: nothing found with target {target}"
    assert spent <= soon, (
        f"{problem.name}: {spent:.2f} s with target {target}, met easily: target ignored"
    )


@contextmanager
def _peculiar_random_state() -> Iterator[Callable[[], str]]:
    """Global generators in states no seed of a solver leads to; yields what names the changed."""
    import random

    import numpy as np

    def states() -> dict[str, object]:
        _, key, *rest = np.random.get_state()  # noqa: NPY002
        return {"random": random.getstate(), "numpy.random": (np.asarray(key).tolist(), rest)}

    saved, saved_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        random.setstate(random.Random("peculiar").getstate())
        np.random.set_state(np.random.RandomState([7, 40, 1961]).get_state())  # noqa: NPY002
        before = states()
        yield lambda: " and ".join(k for k, state in states().items() if state != before[k])
    finally:
        random.setstate(saved)
        np.random.set_state(saved_numpy)  # noqa: NPY002


@contextmanager
def _output(printed: list[str]) -> Iterator[None]:
    """Append what is written meanwhile to `printed`: file descriptors 1 and 2 and Python's."""
    python = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with tempfile.TemporaryFile() as file:
        saved = [os.dup(1), os.dup(2)]
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            with redirect_stdout(python), redirect_stderr(python):
                yield
        finally:
            for number, copy in enumerate(saved, 1):
                os.dup2(copy, number)
                os.close(copy)
        file.seek(0)
        text = python.getvalue() + file.read().decode(errors="replace")
    if text:
        printed.append(text)


def _falls_and_rises(problem: Any, events: Sequence[Progress]) -> None:
    best, bound, at = None, None, 0.0
    for event in events:
        assert event.elapsed >= at, f"{problem.name}: time runs backwards"
        at = event.elapsed
        if event.objective is not None:
            assert best is None or event.objective <= best, f"{problem.name}: incumbent rose"
            best = event.objective
        if event.lower_bound is not None:
            assert bound is None or event.lower_bound >= bound, f"{problem.name}: bound fell"
            bound = event.lower_bound
        assert best is None or bound is None or bound <= best, f"{problem.name}: bound > incumbent"


def _rejected(problem: Any, engine: Solver, start: Schedule) -> None:
    try:
        optsched.solve(problem, engine, time_limit=0.1, warm_start=start)
    except OptschedError:
        return
    raise AssertionError(f"{problem.name}: accepted a wrong warm start")
