"""A better plan from a solver in a process of its own, while training goes on."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optsched.model.schedule import Problem, Schedule


_CHILD = "from optsched.arraypipe.life.replanner import _serve; _serve()"
_NICE = 10  # the solver gets what the training leaves over


def gain(old_period: int, new_period: int, cycles_left: int, drain: int) -> int:
    """Time that a new plan saves over the remaining cycles; adopt it iff this is positive.

    `drain` is lost while the pipeline runs empty of the old plan and fills with the new one.
    """
    return (old_period - new_period) * cycles_left - drain


class Replanner:
    """Solves one problem at a time in another process; a context manager.

    The process is a fresh interpreter with low priority: it shares no threads with the training,
    does not run the training script a second time (as the spawn method of `multiprocessing` does
    to scripts without a guard), is killed when the training ends in whatever way, and costs the
    training neither an exception nor a wait if it fails.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._request = 0  # number of the request whose answer is awaited
        self._closed = self._busy = False
        self._answer: Schedule | None = None
        self._failure = ""
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._at_exit = weakref.finalize(self, _kill, self._running)

    def submit(self, problem: Problem, start: Schedule | None, time_limit: float) -> None:
        """Begin to solve a problem, instead of the one before if that is not done.

        The answer is never worse than the orders of `start`, a schedule of the same blocks. The
        process needs a second or two more than the limit to begin. All that goes wrong is a
        `failure`.
        """
        self.cancel()
        with self._lock:
            self._busy = not self._closed
            request = self._request
        if not self._closed:
            work = (problem, start, time_limit)
            threading.Thread(target=self._await, args=(request, work), daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a problem is being solved."""
        return self._busy

    def poll(self) -> Schedule | None:
        """The schedule that was found, once; None if there is none (yet). Never waits."""
        with self._lock:
            answer, self._answer = self._answer, None
        return answer

    def failure(self) -> str:
        """What went wrong with the last problem, once, as a sentence; ``""`` if nothing did."""
        with self._lock:
            said, self._failure = self._failure, ""
        return said

    def cancel(self) -> None:
        """Forget the problem that is being solved, and an answer that nobody has fetched."""
        with self._lock:
            self._request += 1
            self._busy, self._answer, self._failure = False, None, ""
            _kill(self._running)

    def close(self) -> None:
        """End the process, if there is one; afterwards nothing can be submitted."""
        self._closed = True
        self.cancel()

    def _await(self, request: int, work: tuple[Problem, Schedule | None, float]) -> None:
        """Have a process do the work and keep its answer (in a thread of its own)."""
        schedule, reason = None, ""
        try:
            schedule, reason = self._ask(request, pickle.dumps(work))
        except Exception as error:  # whatever it is, the training must not see it
            reason = f"{type(error).__name__}: {error}"
        with self._lock:
            self._running.pop(request, None)
            if request == self._request:
                self._busy, self._answer = False, schedule
                if schedule is None:
                    self._failure = f"re-planning failed, the present plan stays: {reason}"

    def _ask(self, request: int, message: bytes) -> tuple[Schedule | None, str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the training alone
        )
        with self._lock:
            self._running[request] = process
            if request != self._request:
                process.kill()
        output, errors = process.communicate(message)
        if process.returncode == 0:
            answer: tuple[Schedule | None, str] = pickle.loads(output)  # of our own process
            return answer
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        ended = f"the solver's process ended with exit code {process.returncode}"
        return None, f"{ended}: {last}" if last else ended


def _kill(running: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in list(running.values()):
        process.kill()


def _serve() -> None:
    """The other process: one request from standard input, one answer to standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a solver prints is no answer
    if hasattr(os, "nice"):
        os.nice(_NICE)
    problem, start, time_limit = pickle.load(sys.stdin.buffer)
    from optsched.arraypipe.plan.edits import for_problem
    from optsched.solving.solve import solve

    parent = int(sys.argv[1])  # not asked here: it may be gone already
    schedule, reason = None, ""
    try:
        if start is not None and not getattr(problem, "chooses", False):
            start = for_problem(problem, start)
        result = solve(
            problem, time_limit=time_limit, workers=1, warm_start=start,
            stop=lambda _: os.getppid() != parent,
        )  # fmt: skip
        schedule = result.schedule
        reason = result.reason or f"no schedule was found in {time_limit:g} s ({result.status})"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    with answers:
        pickle.dump((schedule, reason), answers)
