"""What a measured process is asked and what it answers; standard library only.

The harness starts ``python run_X.py REQUEST ANSWER``, both JSON files. Every clock begins when the
harness starts the process, so interpreter, imports and model building count for everybody.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


class Clock:
    """Seconds of budget used so far: since the harness started the process."""

    def __init__(self, spawned: float) -> None:
        self.spawned = spawned

    def now(self) -> float:
        """Seconds used."""
        return time.time() - self.spawned


class Trace:
    """Incumbents and bounds with their times, from any thread."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[tuple[float, int | None, int | None]] = []
        self.objective: int | None = None
        self.bound: int | None = None
        self._lock = threading.Lock()

    def add(self, objective: int | None = None, bound: int | None = None) -> None:
        """Note what is new: a lower objective, a higher bound."""
        with self._lock:
            better = objective is not None and (
                self.objective is None or objective < self.objective
            )
            higher = bound is not None and (self.bound is None or bound > self.bound)
            if better:
                self.objective = objective
            if higher:
                self.bound = bound
            if better or higher:
                self.steps.append((round(self.clock.now(), 4), self.objective, self.bound))


def request() -> tuple[dict[str, Any], Clock]:
    """The request on the command line, this process confined to its cores, and its clock."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    if asked["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, asked["cores"])
    return asked, Clock(asked["spawned"])


def answer(**fields: Any) -> None:
    """Write the answer: status, objective, bound, starts, trace, startup, ended, versions."""
    Path(sys.argv[2]).write_text(json.dumps(fields))


def versions(*packages: str) -> str:
    """Versions of the packages of this environment."""
    python = ".".join(map(str, sys.version_info[:3]))
    return " ".join([f"python-{python}", *(f"{name}-{version(name)}" for name in packages)])
