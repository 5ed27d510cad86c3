"""Checks of how a solver runs: reproducible, within its limits, leaving nothing behind.

As a program: solve the small problems by a pickled solver from stdin, see `_in_fresh_process`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError, OptschedError
from optsched.problems.jobshop.problem import JobShop
from optsched.solving.solve import solve
from optsched.testing.common import (
    by_graph,
    consistent,
    each,
    living_threads,
    quicker_of_two,
    supported,
)
from optsched.testing.problems import small_problems, tiny_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.model.schedule import Schedule
    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

ITERATIONS = 2000
"""Most iterations of the reproducibility check; solvers define what an iteration is."""

REPEATED = 0.3
"""Seconds of a run after which the reproducibility check asks for no more iterations."""

OVERRUN = 0.5
"""Seconds by which a warm solver may exceed its time limit, in the better of two tries."""

BRIEFLY = 0.3
"""Seconds; what leaves a trace does so soon."""

NOT_SENT = 77
"""Exit code of a fresh process that cannot make the solver from what it was sent."""


def check_reproducible(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Twice in a row, twice at once beside a busy thread, and in another process: the same bits."""
    first: list[list[Any]] = []
    steps: list[int] = []
    for problem in supported(engine, small_problems()):
        results: list[Result] = []

        steps.append(_steps(engine, problem))

        def run(problem: Any = problem, results: list[Result] = results) -> None:
            results.append(solve(problem, engine, iterations=steps[-1], seed=7))

        run()
        run()
        threads = [threading.Thread(target=run) for _ in range(2)]
        idle = threading.Event()
        busy = threading.Thread(target=_spin, args=(idle,), daemon=True)
        for thread in (busy, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        idle.set()
        busy.join()
        assert len(results) == 4, f"{problem.name}: a run in a thread failed"
        for other in results[1:]:
            _same(problem.name, fingerprint(results[0]), fingerprint(other), "with one seed")
        first.append(fingerprint(results[0]))
    there = _in_fresh_process(engine, steps)
    if there is not None:
        names = [problem.name for problem in supported(engine, small_problems())]
        for name, here, elsewhere in zip(names, first, there, strict=True):
            _same(name, here, elsewhere, "in this process and a fresh one")


def fingerprint(result: Result) -> list[Any]:
    """What must repeat: objective, bound, the graph (which GPUs), orders and starts."""
    found = result.schedule
    if found is None:
        return [result.objective, result.lower_bound]
    orders = None if found.sequences is None else found.sequences.to_lists()
    starts = None if found.start is None else found.start + found.offset * (found.period or 0)
    return [
        result.objective, result.lower_bound, found.sha256, orders,
        None if starts is None else starts.tolist(),
    ]  # fmt: skip


def _same(name: str, first: list[Any], other: list[Any], when: str) -> None:
    assert other[0] == first[0], f"{name}: objectives {first[0]} and {other[0]} {when}"
    assert other[1] == first[1], f"{name}: bounds {first[1]} and {other[1]} {when}"
    assert other == first, f"{name}: schedules differ {when}"


def _steps(engine: Solver, problem: Any) -> int:
    """How many iterations are worth repeating: `ITERATIONS`, or as many as take a moment."""
    steps = 1
    while steps < ITERATIONS:
        begin = time.perf_counter()
        solve(problem, engine, iterations=steps, seed=7)
        if time.perf_counter() - begin > REPEATED:
            break
        steps = min(2 * steps, ITERATIONS)
    return steps


def _spin(idle: threading.Event) -> None:
    while not idle.is_set():
        sum(range(1000))


def _in_fresh_process(engine: Solver, steps: Sequence[int]) -> list[list[Any]] | None:
    """Fingerprints of a process with other hashes; None if the solver cannot be sent there.

    Every small problem that the solver takes gets its number of iterations.
    """
    try:
        content = pickle.dumps(engine)
    except Exception:  # objects that hold threads, or classes made on the fly
        return None
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "optsched.testing.run_checks", *map(str, steps)],
        input=content, capture_output=True, env=environment, check=False,
    )  # fmt: skip
    if ran.returncode == NOT_SENT:
        return None
    last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
    assert ran.returncode == 0, f"fails in a fresh process: {last}"
    found: list[list[Any]] = json.loads(ran.stdout)
    return found


@each(small_problems)
def check_limits(engine: Solver, problem: Any, time_limit: float) -> None:
    """Nothing runs on behind its limit; every outcome is legal."""
    solve(problem, engine, time_limit=0.2)  # compile and import outside the clock
    for limit in (0, 0.05, min(time_limit, 1.0)):
        spent, best = quicker_of_two(problem, engine, limit + OVERRUN, time_limit=limit)
        assert spent <= limit + OVERRUN, f"{spent:.2f} s with limit {limit} s"
    for iterations in (0, 1):
        consistent(problem, solve(problem, engine, iterations=iterations))
    if best.objective is not None:
        easy = solve(
            problem, engine, target=best.objective, time_limit=20 * time_limit,
            warm_start=best.schedule,
        )  # fmt: skip
        assert easy.objective == best.objective, "a met target was not kept"
        _stops_at_target(problem, engine, best, time_limit)


def _stops_at_target(problem: Any, engine: Solver, before: Result, time_limit: float) -> None:
    """A target far above the first incumbent is met as soon as that one was."""
    first = next(event.objective for event in before.history if event.objective is not None)
    target, soon = first + abs(first), time_limit + 2 * OVERRUN
    spent, result = quicker_of_two(
        problem, engine, soon, target=target, time_limit=2 * soon, seed=0
    )
    assert result.objective is not None, f"nothing found with target {target}"
    assert spent <= soon, f"{spent:.2f} s with target {target}, met easily: target ignored"


def check_hostile_limits(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Each refused with an `InputError` that names the field."""
    problem = supported(engine, tiny_problems())[0]
    hostile: list[dict[str, Any]] = [
        {"time_limit": -1}, {"time_limit": float("nan")}, {"time_limit": "1"},
        {"time_limit": True}, {"iterations": -1}, {"iterations": 1.5}, {"target": 1.5},
        {"stop": 10}, {"stop": "gap"}, {"workers": 0}, {"workers": -2}, {"workers": 1.5},
        {"seed": -1}, {"seed": 2**64}, {"seed": "0"}, {"options": {"no such option": 1}},
        {"options": 3},
    ]  # fmt: skip
    for given in hostile:
        field = next(iter(given))
        try:
            solve(problem, engine, **{"time_limit": 0.1, **given})
        except InputError as error:
            assert field in str(error), f"{given}: the message does not name {field}: {error}"
            continue
        raise AssertionError(f"{given}: accepted")


@each(small_problems)
def check_warm_start(engine: Solver, problem: Any, time_limit: float) -> None:
    """Used and never lost; another instance's and a broken one are rejected."""
    first = solve(problem, engine, time_limit=time_limit / 2)
    if first.schedule is None:
        return
    for limit in ({"iterations": 0}, {"time_limit": 0}, {"time_limit": 0.1}):
        again = solve(problem, engine, warm_start=first.schedule, **limit)
        consistent(problem, again)
        assert again.objective is not None and again.objective <= first.objective, (  # type: ignore[operator]
            f"{first.objective} given, {again.objective} returned"
        )
    other = JobShop([[(0, 1)]]).graph()
    _rejected(problem, engine, other)
    if by_graph(problem):
        found = first.schedule
        _rejected(problem, engine, found.with_orders(found.sequences, found.start * 0))  # type: ignore[arg-type,operator]


def _rejected(problem: Any, engine: Solver, start: Schedule) -> None:
    try:
        solve(problem, engine, time_limit=0.1, warm_start=start)
    except OptschedError:
        return
    raise AssertionError("accepted a wrong warm start")


@each(small_problems)
def check_leaves_no_trace(engine: Solver, problem: Any, time_limit: float) -> None:
    """The problem is a value; random state, process settings and threads are the caller's."""
    content, alive, settings = problem.sha256, living_threads(), _settings()
    with _peculiar_random_state() as changed:
        solve(problem, engine, time_limit=min(time_limit, BRIEFLY))
        generators = changed()
    assert problem.sha256 == content, "the problem changed"
    assert not generators, f"global state of {generators} changed"
    now = _settings()
    other = [key for key, value in settings.items() if now[key] != value]
    assert not other, f"{' and '.join(other)} changed"
    assert living_threads() <= alive, "threads left behind"


@each(small_problems)
def check_silent(engine: Solver, problem: Any, time_limit: float) -> None:
    """Nothing on stdout or stderr, from Python or compiled code; warnings are allowed."""
    printed: list[str] = []
    with warnings.catch_warnings(), _output(printed):
        warnings.simplefilter("ignore")
        solve(problem, engine, time_limit=min(time_limit, BRIEFLY))
    assert not printed, f"printed {printed[0][:60]!r}"


def _settings() -> dict[str, object]:
    """What belongs to the whole process."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "the cores of this thread": affinity(0) if affinity else None,
        "the recursion limit": sys.getrecursionlimit(),
    }


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


def _repeat() -> None:
    """Print as JSON what must repeat; `NOT_SENT` if the solver's class cannot be found here.

    The arguments are the iterations for every small problem that the solver takes.
    """
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whether solvers print is another check's question
    try:
        engine = pickle.load(sys.stdin.buffer)
    except (AttributeError, ImportError):
        sys.exit(NOT_SENT)
    taken = zip(supported(engine, small_problems()), map(int, sys.argv[1:]), strict=True)
    found = [
        fingerprint(solve(problem, engine, iterations=steps, seed=7)) for problem, steps in taken
    ]
    json.dump(found, results)
    results.close()


if __name__ == "__main__":
    _repeat()
