"""Run the solves of a benchmark in parallel processes and verify every schedule."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from optsched.bench.rows import Row
from optsched.errors import InputError
from optsched.model import document
from optsched.model.verify import verify
from optsched.solving.limits import available_cores
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from optsched.bench.instances import Instance
    from optsched.kernels.compile import Entry

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


def run_all(tasks: Sequence[Task], jobs: int = 1) -> Generator[Row, None, None]:
    """Yield rows as solves finish, `jobs` processes at a time; closing it kills the others."""
    runner = _Runner()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(runner.run, task) for task in tasks]):
                if (row := done.result()) is not None:
                    yield row
        finally:
            runner.cancel()


def missing_kernels(tasks: Sequence[Task]) -> list[Entry]:
    """Return the kernels of these kinds of problems that are not compiled yet."""
    from optsched.kernels.background import all_entries

    kinds = {task.instance.problem.problem_kind for task in tasks}
    packages = dict.fromkeys(name for kind in kinds for name in KERNELS.get(kind, ()))
    return [one for one in all_entries([*packages])[0] if not one.stored]


class _Runner:
    """Starts a process per task; `cancel` kills all."""

    def __init__(self) -> None:
        self.cancelled = False
        self.running: set[subprocess.Popen[str]] = set()

    def cancel(self) -> None:
        self.cancelled = True
        for process in list(self.running):
            process.kill()

    def run(self, task: Task) -> Row | None:
        """Solve in a process and verify the answer; None if cancelled."""
        if self.cancelled:
            return None
        began = time.perf_counter()
        answer = self._answer(task)
        wall = time.perf_counter() - began
        if self.cancelled:
            return None
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

    def _answer(self, task: Task) -> dict[str, Any]:
        """Return the answer of a process, or an error; its stdin closes with this process."""
        most = None if task.time_limit is None else 2 * task.time_limit + GRACE
        if most is not None:
            most = min(most, threading.TIMEOUT_MAX)
        read, write = os.pipe()
        with tempfile.TemporaryFile("w+", errors="replace") as noise:
            process = subprocess.Popen(
                COMMAND,
                stdin=read, stdout=subprocess.PIPE, stderr=noise, text=True,
                start_new_session=os.name == "posix",  # Ctrl-C is for the parent alone
            )  # fmt: skip
            self.running.add(process)
            try:
                if self.cancelled:  # meanwhile
                    process.kill()
                os.write(write, (json.dumps(_wire(task)) + "\n").encode())
                return dict(json.loads(process.communicate(timeout=most)[0]))
            except subprocess.TimeoutExpired:
                limit = f"a limit of {task.time_limit:g} s"
                return {"error": f"did not stop {most:.0f} s after {limit}"}
            except ValueError:
                noise.seek(0)
                last = "".join(f": {line}" for line in noise.read().strip().splitlines()[-1:])
                return {"error": f"the process ended with code {process.returncode}{last}"}
            finally:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
                os.close(read)
                os.close(write)
                self.running.discard(process)


def _wire(task: Task) -> dict[str, Any]:
    return {
        "source": task.instance.source,
        "sha256": task.instance.problem.sha256,
        "solver": task.solver,
        "options": dict(task.options),
        "seed": task.seed,
        "workers": task.workers,
        "time_limit": task.time_limit,
        "iterations": task.iterations,
    }


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
