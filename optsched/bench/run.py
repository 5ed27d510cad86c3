"""Run the solves of a benchmark in parallel processes and verify every schedule."""

from __future__ import annotations

import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from optsched.bench.rows import Row
from optsched.errors import InputError
from optsched.model import document
from optsched.model.verify import verify
from optsched.solving.fan_out import fan_out
from optsched.solving.limits import available_cores
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from optsched.bench.instances import Instance
    from optsched.kernels.compile import Entry
    from optsched.solving.fan_out import Engine

COMMAND = [sys.executable, "-m", "optsched.bench.one"]

KERNELS = {
    "jobshop": ("optsched.kernels", "optsched_solvers.shop"),
    "jobarray": ("optsched.kernels", "optsched_solvers.shop"),
    "periodic": ("optsched.kernels", "optsched_solvers.periodic"),
    "quota": ("optsched_solvers.quota",),
    "gpus": ("optsched.bandwidth",),
}
"""Modules whose kernels are compiled before the first solve, by kind of problem."""

GRACE = 60.0
"""Seconds after its limit at which a process is killed."""


@dataclass(frozen=True)
class Task:
    """One solve."""

    instance: Instance
    solver: str
    options: Mapping[str, Any]
    seed: int
    workers: int
    time_limit: float | None
    iterations: int | None = None

    @property
    def row(self) -> Row:
        """The row of this solve before it starts."""
        problem = self.instance.problem
        return Row(
            instance=self.instance.name, family=self.instance.family, size=self.instance.size,
            operations=problem.n_operations, sha256=problem.sha256, solver=self.solver,
            options=json.dumps(dict(self.options), sort_keys=True), seed=self.seed,
            workers=self.workers, time_limit=self.time_limit, iterations=self.iterations,
            version=__version__, status="error", objective=None, lower_bound=None,
            time_to_best=None, time_to_proof=None, seconds=None, wall_seconds=0.0,
            cpu_seconds=None, history="[]", error="", machine=_MACHINE, versions="", finished="",
        )  # fmt: skip


def run_all(tasks: Sequence[Task], engine: Engine | None = None) -> Generator[Row, None, None]:
    """Yield rows as solves finish; closing it ends those that run on this machine."""
    with closing(fan_out(_run, tasks, engine)) as outcomes:
        for index, row, error in outcomes:
            yield row or tasks[index].row._replace(error=str(error)[:500])


def missing_kernels(tasks: Sequence[Task]) -> list[Entry]:
    """Return the kernels of these kinds of problems that are not compiled yet."""
    from optsched.kernels.background import all_entries

    kinds = {task.instance.problem.problem_kind for task in tasks}
    packages = dict.fromkeys(name for kind in kinds for name in KERNELS.get(kind, ()))
    return [one for one in all_entries([*packages])[0] if not one.stored]


def _run(task: Task) -> Row:
    """Solve in a process and verify the answer."""
    began = time.perf_counter()
    answer = _answer(task)
    wall = time.perf_counter() - began
    error = answer.get("error") or _objection(task, answer)
    keys = ("time_to_best", "time_to_proof", "seconds", "cpu_seconds")
    kept: dict[str, Any] = {
        key: None if answer.get(key) is None else round(answer[key], 5) for key in keys
    }
    if not error:
        kept |= {key: answer[key] for key in ("status", "objective", "lower_bound")}
        kept["history"] = json.dumps(answer["history"], separators=(",", ":"))
    return task.row._replace(
        **kept,
        wall_seconds=round(wall, 5),
        error=" ".join(error.split())[:500],
        versions=answer.get("versions", ""),
        finished=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _answer(task: Task) -> dict[str, Any]:
    """Return the answer of a process, or an error; its stdin closes with this process."""
    most = None if task.time_limit is None else 2 * task.time_limit + GRACE
    if most is not None:
        most = min(most, threading.TIMEOUT_MAX)
    with tempfile.TemporaryFile() as noise:
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=noise,
            start_new_session=os.name == "posix",  # Ctrl-C is for the parent alone
        )  # fmt: skip
        given, process.stdin = process.stdin, None  # `communicate` would close it
        assert given is not None
        try:
            with suppress(BrokenPipeError):  # it has ended; its code says more
                given.write(pickle.dumps(task))
                given.flush()
            return dict(json.loads(process.communicate(timeout=most)[0]))
        except subprocess.TimeoutExpired:
            limit = f"a limit of {task.time_limit:g} s"
            return {"error": f"did not stop {most:.0f} s after {limit}"}
        except ValueError:
            noise.seek(0)
            lines = noise.read().decode(errors="replace").strip().splitlines()
            last = "".join(f": {line}" for line in lines[-1:])
            return {"error": f"the process ended with code {process.returncode}{last}"}
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            with suppress(BrokenPipeError):
                given.close()


def _objection(task: Task, answer: dict[str, Any]) -> str:
    """Return the fault of an answer, found by the verifier; ``""`` if there is none."""
    value, bound = answer["objective"], answer["lower_bound"]
    if answer["schedule"] is None:
        return "" if value is None else "an objective without a schedule"
    problem = task.instance.problem
    try:
        schedule = document.read(answer["schedule"], "the answer")
        faults = [fault.message for fault in verify(schedule)] + problem.check(schedule)
    except InputError as error:
        faults = [str(error)]
    if faults:
        return f"the schedule is wrong: {faults[0]}"
    worth = problem.evaluate(schedule)
    if worth != value:
        return f"the schedule is worth {worth}, not {value}"
    if bound is not None and bound > value:
        return f"the bound {bound} is above the objective {value}"
    if (answer["status"] == "optimal") != (bound == value):
        return f"status {answer['status']} with objective {value} and bound {bound}"
    return ""


_MACHINE = (
    f"{available_cores()} cores, {platform.processor() or platform.machine()}, {platform.system()}"
)
