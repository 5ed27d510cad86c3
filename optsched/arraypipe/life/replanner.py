"""A better plan from a solver in a process of its own, while training goes on."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.model.schedule import Problem, Schedule


_CHILD = "from optsched.arraypipe.life.replanner import _serve; _serve()"
_NICE = 10  # the solver gets what the training leaves over


class Replanner:
    """Solves one problem at a time in another process.

    The process is a fresh interpreter with low priority: it shares no threads with the training,
    does not run the training script a second time (as the spawn method of `multiprocessing` does
    to scripts without a guard), is killed when the training ends in whatever way, and costs the
    training neither an exception nor a wait if it fails.
    """

    def __init__(self) -> None:
        self._request: dict[str, Any] = {}  # gets the answer to what was submitted last
        self._running: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _kill, self._running)

    def submit(self, problem: Problem, start: Schedule, time_limit: float) -> None:
        """Begin to solve a problem, instead of the one before if that is not done.

        The answer is never worse than the orders of `start`, a schedule of the same blocks. The
        process needs a second or two more than the limit to begin.
        """
        self.cancel()
        given = (self._request, (problem, start, time_limit))
        threading.Thread(target=self._solve, args=given, daemon=True).start()

    def poll(self) -> Schedule | str | None:
        """Once: the schedule that was found, or why there is none. Never waits."""
        answer: Schedule | str | None = self._request.pop("answer", None)
        return answer

    def cancel(self) -> None:
        """Forget the problem that is being solved, and an answer that nobody has fetched."""
        self._request = {}
        _kill(self._running)

    def _solve(self, request: dict[str, Any], work: tuple[Problem, Schedule, float]) -> None:
        """Have a process do the work (in a thread of its own)."""
        try:
            request["answer"] = self._answer(request, pickle.dumps(work))
        except Exception as error:  # whatever it is, the training must not see it
            request["answer"] = f"{type(error).__name__}: {error}"

    def _answer(self, request: dict[str, Any], message: bytes) -> Schedule | str:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the training alone
        )
        self._running.append(process)
        if request is not self._request:  # cancelled in the meantime
            process.kill()
        output, errors = process.communicate(message)
        self._running.remove(process)
        if process.returncode == 0:
            answer: Schedule | str = pickle.loads(output)  # of our own process
            return answer
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the solver's process ended with exit code {process.returncode}: {last}"


def _kill(running: list[subprocess.Popen[bytes]]) -> None:
    for process in [*running]:
        process.kill()


def _serve() -> None:
    """The other process: one request from standard input, one answer to standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a solver prints is no answer
    if hasattr(os, "nice"):
        os.nice(_NICE)
    problem, start, time_limit = pickle.load(sys.stdin.buffer)
    from optsched.solving.solution import PeriodicOrders
    from optsched.solving.solve import solve

    parent = int(sys.argv[1])  # not asked here: it may be gone already
    try:
        if not getattr(problem, "chooses", False):  # its arcs may be listed in another order
            orders = start.sequences
            start = problem.scheduled(
                orders if start.period is None else PeriodicOrders(orders, start.offset)
            )
        result = solve(
            problem, time_limit=time_limit, workers=1, warm_start=start,
            stop=lambda _: os.getppid() != parent,
        )  # fmt: skip
        nothing = f"no schedule was found in {time_limit:g} s ({result.status})"
        answer = result.schedule or result.reason or nothing
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    with answers:
        pickle.dump(answer, answers)
