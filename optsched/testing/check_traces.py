"""Checks of what a solver leaves behind: nothing."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import optsched
from optsched.testing.check_common import living_threads, supported
from optsched.testing.problems import small_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.solving.solver import Solver

BRIEFLY = 0.3
"""Seconds; what leaves a trace does so soon."""


def check_leaves_no_trace(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The problem is a value; random state, process settings and threads are the caller's."""
    for problem in supported(engine, small_problems()):
        content, alive, settings = problem.sha256, living_threads(), _settings()
        with _peculiar_random_state() as changed:
            optsched.solve(problem, engine, time_limit=min(time_limit, BRIEFLY))
            generators = changed()
        assert problem.sha256 == content, f"{problem.name}: the problem changed"
        assert not generators, f"{problem.name}: global state of {generators} changed"
        now = _settings()
        other = [key for key, value in settings.items() if now[key] != value]
        assert not other, f"{problem.name}: {' and '.join(other)} changed"
        assert living_threads() <= alive, f"{problem.name}: threads left behind"


def check_silent(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Nothing on stdout or stderr, from Python or compiled code; warnings are allowed."""
    for problem in supported(engine, small_problems()):
        printed: list[str] = []
        with warnings.catch_warnings(), _output(printed):
            warnings.simplefilter("ignore")
            optsched.solve(problem, engine, time_limit=min(time_limit, BRIEFLY))
        assert not printed, f"{problem.name}: printed {printed[0][:60]!r}"


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
