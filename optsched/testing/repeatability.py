"""`check_reproducible`: equal seeds give equal results, also in a fresh process.

As a program it solves the small problems by a pickled solver from stdin, see `_in_fresh_process`.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from optsched.testing.common import counted, supported
from optsched.testing.problems import small_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

ITERATIONS = 2000
"""Maximal iterations of the reproducibility check; solvers define what an iteration is."""

REPEATED = 0.3
"""Seconds of a run after which the reproducibility check raises the iterations no further."""

SHARED = "in two threads at once (the solver object must not hold the state of a search)"
"""When results differ: message for runs that disturb each other."""

NOT_SENT = 77
"""Exit code of a fresh process that cannot unpickle the solver."""


def check_reproducible(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """One after the other, at the same time in two threads, and in another process."""
    taken = supported(engine, small_problems())
    steps = [_steps(engine, problem) for problem in taken]
    first = []
    for problem, n in zip(taken, steps, strict=True):
        first.append(_run(engine, problem, n))
        _compare(problem.name, first[-1], _run(engine, problem, n), "with one seed")
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(_run, engine, problem, n) for _ in range(2)]:
                _compare(problem.name, first[-1], future.result(), SHARED)
    others = _in_fresh_process(engine, steps)
    for problem, one, other in zip(taken, first, others or first, strict=True):
        _compare(problem.name, one, other, "in this process and a fresh one")


def _run(engine: Solver, problem: Any, iterations: int) -> list[Any]:
    return fingerprint(counted(problem, engine, iterations, seed=7))


def fingerprint(result: Result) -> list[Any]:
    """Return objective, bound, content hash, orders and starts: what one seed has to repeat."""
    found = result.schedule
    if found is None:
        return [result.objective, result.lower_bound]
    orders = None if found.sequences is None else found.sequences.to_lists()
    starts = None if found.start is None else found.start + found.offset * (found.period or 0)
    return [
        result.objective, result.lower_bound, found.sha256, orders,
        None if starts is None else starts.tolist(),
    ]  # fmt: skip


def _compare(name: str, first: list[Any], other: list[Any], when: str) -> None:
    assert other[0] == first[0], f"{name}: objectives {first[0]} and {other[0]} {when}"
    assert other[1] == first[1], f"{name}: bounds {first[1]} and {other[1]} {when}"
    assert other == first, f"{name}: schedules differ {when}"


def _steps(engine: Solver, problem: Any) -> int:
    """Return the iterations to repeat: `ITERATIONS`, or as many as take `REPEATED` seconds."""
    steps = 1
    while steps < ITERATIONS:
        begin = time.perf_counter()
        _run(engine, problem, steps)
        if time.perf_counter() - begin > REPEATED:
            break
        steps = min(2 * steps, ITERATIONS)
    return steps


def _in_fresh_process(engine: Solver, steps: Sequence[int]) -> list[list[Any]] | None:
    """Return the fingerprints in a process with other string hashes; None if pickling fails.

    `steps` are the iterations for every small problem that the solver supports.
    """
    try:
        content = pickle.dumps(engine)
    except Exception:  # an object that holds threads, or a local class
        return None
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "optsched.testing.repeatability", *map(str, steps)],
        input=content, capture_output=True, env=environment, check=False,
    )  # fmt: skip
    if ran.returncode == NOT_SENT:
        return None
    last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
    assert ran.returncode == 0, f"fails in a fresh process: {last}"
    found: list[list[Any]] = json.loads(ran.stdout)
    return found


def _main() -> None:
    """Print the fingerprints of a pickled solver from stdin as JSON."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the solver must not mix with the JSON
    try:
        engine = pickle.load(sys.stdin.buffer)
    except (AttributeError, ImportError):
        sys.exit(NOT_SENT)
    taken = zip(supported(engine, small_problems()), map(int, sys.argv[1:]), strict=True)
    json.dump([_run(engine, problem, steps) for problem, steps in taken], results)
    results.close()


if __name__ == "__main__":
    _main()
