"""Process of one solve of a benchmark: a task on stdin, an answer on stdout."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.bench.run import Task


def main() -> None:
    """Read the task, solve, answer; exit when the parent exits."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of solvers must not mix with the answer
    task = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        answer = _solve(task)
    except Exception as error:  # a bug of a solver, or a broken installation
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump({**answer, "cpu_seconds": _cpu_seconds()}, answers)
    answers.close()
    os._exit(0)  # threads of solvers are not joined


def _solve(task: Task) -> dict[str, Any]:
    import optsched
    from optsched.model import document

    problem = task.instance.problem
    result = optsched.solve(
        problem, task.solver, time_limit=task.time_limit, workers=task.workers,
        iterations=task.iterations, seed=task.seed, options=task.options,
    )  # fmt: skip
    if result.contradiction:
        raise optsched.InternalError(result.contradiction)
    found = result.schedule
    if found is not None:
        problem.answer(found)  # refuses an invalid answer
    return {
        "status": result.status,
        "objective": result.objective,
        "lower_bound": result.lower_bound,
        "time_to_best": result.time_to_best,
        "time_to_proof": result.time_to_proof,
        "seconds": result.seconds,
        "history": [(round(e.elapsed, 5), e.objective, e.lower_bound) for e in result.history],
        "schedule": None if found is None else document.write(found).decode(),
        "versions": _versions(),
    }


def _versions() -> str:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = [f"Python {platform.python_version()}"]
    for name in ("optsched", "numpy", "numba", "ortools", "deap"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _cpu_seconds() -> float:
    """CPU time of this process since it began, and of its children."""
    seconds = time.process_time()
    try:
        import resource
    except ImportError:  # not a Unix
        return seconds
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds + used.ru_utime + used.ru_stime


def _leave_with_parent() -> None:
    while os.read(0, 4096):  # ends when the parent does
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
