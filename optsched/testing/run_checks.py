"""Checks of how a solver runs: reproducible, within its limits, from a warm start."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import optsched
from optsched.errors import InputError, OptschedError
from optsched.testing.check_common import consistent, quicker_of_two, supported
from optsched.testing.problems import small_problems, tiny_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import Schedule
    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

ITERATIONS = 2000
"""Most iterations of the reproducibility check; solvers define what an iteration is."""

REPEATED = 0.3
"""Seconds of a run after which the reproducibility check asks for no more iterations."""

OVERRUN = 0.5
"""Seconds by which a warm solver may exceed its time limit, in the better of two tries."""

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
            results.append(optsched.solve(problem, engine, iterations=steps[-1], seed=7))

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
    """What must repeat: objective, bound, orders and starts."""
    found = result.schedule
    if found is None or found.sequences is None or found.start is None:
        return [result.objective, result.lower_bound, None, None]
    return [
        result.objective, result.lower_bound, found.sequences.to_lists(),
        (found.start + found.offset * (found.period or 0)).tolist(),
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
        optsched.solve(problem, engine, iterations=steps, seed=7)
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
        [sys.executable, "-m", "optsched.testing.fresh_process", *map(str, steps)],
        input=content, capture_output=True, env=environment, check=False,
    )  # fmt: skip
    if ran.returncode == NOT_SENT:
        return None
    last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
    assert ran.returncode == 0, f"fails in a fresh process: {last}"
    found: list[list[Any]] = json.loads(ran.stdout)
    return found


def check_limits(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Nothing runs on behind its limit; every outcome is legal."""
    for problem in supported(engine, small_problems()):
        optsched.solve(problem, engine, time_limit=0.2)  # compile and import outside the clock
        for limit in (0, 0.05, min(time_limit, 1.0)):
            spent, best = quicker_of_two(problem, engine, limit + OVERRUN, time_limit=limit)
            assert spent <= limit + OVERRUN, f"{problem.name}: {spent:.2f} s with limit {limit} s"
        for iterations in (0, 1):
            consistent(problem, optsched.solve(problem, engine, iterations=iterations))
        if best.objective is not None:
            easy = optsched.solve(
                problem, engine, target=best.objective, time_limit=20 * time_limit,
                warm_start=best.schedule,
            )  # fmt: skip
            assert easy.objective == best.objective, f"{problem.name}: a met target was not kept"
            _stops_at_target(problem, engine, best, time_limit)


def _stops_at_target(problem: Any, engine: Solver, before: Result, time_limit: float) -> None:
    """A target twice as large as the first incumbent is met as soon as that one was."""
    first = next(event.objective for event in before.history if event.objective is not None)
    target, soon = 2 * first, time_limit + 2 * OVERRUN
    spent, result = quicker_of_two(
        problem, engine, soon, target=target, time_limit=2 * soon, seed=0
    )
    assert result.objective is not None, f"{problem.name}: nothing found with target {target}"
    assert spent <= soon, (
        f"{problem.name}: {spent:.2f} s with target {target}, met easily: target ignored"
    )


def check_hostile_limits(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Each refused with an `InputError` that names the field."""
    problem = supported(engine, tiny_problems())[0]
    hostile: list[dict[str, Any]] = [
        {"time_limit": -1}, {"time_limit": float("nan")}, {"time_limit": "1"},
        {"time_limit": True}, {"iterations": -1}, {"iterations": 1.5}, {"target": -1},
        {"stop": 10}, {"stop": "gap"}, {"workers": 0}, {"workers": -2}, {"workers": 1.5},
        {"seed": -1}, {"seed": 2**64}, {"seed": "0"}, {"options": {"no such option": 1}},
        {"options": 3},
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
    for problem in supported(engine, small_problems()):
        first = optsched.solve(problem, engine, time_limit=time_limit / 2)
        if first.schedule is None:
            continue
        for limit in ({"iterations": 0}, {"time_limit": 0}, {"time_limit": 0.1}):
            again = optsched.solve(problem, engine, warm_start=first.schedule, **limit)
            consistent(problem, again)
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


def _rejected(problem: Any, engine: Solver, start: Schedule) -> None:
    try:
        optsched.solve(problem, engine, time_limit=0.1, warm_start=start)
    except OptschedError:
        return
    raise AssertionError(f"{problem.name}: accepted a wrong warm start")
