"""One solve in a process of its own: wall and CPU time of all of it, the schedule re-checked."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.machine import hardware, machine
from benchmarks.shop import plain
from benchmarks.shop.engines import PEERS, Engine
from benchmarks.shop.rows import Row, append, read, trace_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.shop.named_instances import Instance

GRACE = 60.0
"""Seconds after which a process that ignores its limit is killed, besides ten times the limit."""


class Run(NamedTuple):
    """What a process cost and said; `answer` is None if it failed, then `error` says how."""

    wall: float
    cpu: float
    answer: dict[str, Any] | None
    error: str


def spawn(engine: Engine, asked: dict[str, Any], patience: float) -> Run:
    """Run an engine's script on a request; killed after `patience` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        errors = Path(folder) / "errors"
        command = [engine.python, str(PEERS / engine.script), str(request), str(answer)]
        with errors.open("w") as stream:
            request.write_text(json.dumps(asked | {"spawned": time.time()}))
            begin = time.perf_counter()
            process = subprocess.Popen(command, stdout=stream, stderr=stream)
            timer = threading.Timer(patience, process.kill)
            timer.start()
            try:
                _, status, usage = os.wait4(process.pid, 0)
            except BaseException:
                process.kill()
                process.wait()
                raise
            finally:
                timer.cancel()
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        if process.returncode or not answer.exists():
            last = errors.read_text().strip().splitlines()[-1:] or ["no message"]
            return Run(wall, cpu, None, f"exit code {process.returncode}: {last[0]}")
        return Run(wall, cpu, json.loads(answer.read_text()), "")


def request(
    engine: Engine, instance: Instance, seconds: float, clock: str, seed: int,
    iterations: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a process is asked."""
    raw = engine.script == "run_cpsat.py"
    return {
        "instance": instance.name, "path": instance.path, "jobs": instance.jobs,
        "graph": instance.graph if raw else None, "solver": engine.solver,
        "options": engine.options, "seconds": seconds, "workers": engine.workers, "seed": seed,
        "clock": clock, "iterations": iterations, "cores": cores(engine.workers),
    }  # fmt: skip


def solve(engine: Engine, instance: Instance, seconds: float, clock: str, seed: int) -> Row:
    """Measure one solve."""
    asked = request(engine, instance, seconds, clock, seed)
    run = spawn(engine, asked, 10 * seconds + GRACE)
    said = run.answer or {}
    starts = said.get("starts")
    objective, checked = None, run.error or "ok"
    if starts is not None:
        try:
            objective = plain.makespan(instance.graph, starts)
        except plain.WrongSchedule as error:
            checked = f"wrong schedule: {error}"
    bound, status = said.get("bound"), said.get("status", "failed")
    if checked == "ok" and status == "optimal" and objective != bound:
        checked = f"says optimal with objective {objective} and bound {bound}"
    return Row(
        instance.name, engine.label, engine.workers, seconds, clock, seed, objective, bound,
        status, round(run.wall, 3), round(run.cpu, 3), round(said.get("startup", 0.0), 3),
        round(said.get("ended", run.wall), 3), checked, trace_text(said.get("trace", [])),
        said.get("versions", ""), hardware(), said.get("note", ""),
    )  # fmt: skip


def solve_all(
    out: Path, engines: Sequence[Engine], instances: Sequence[Instance], seconds: float, clock: str,
    seeds: Iterable[int],
) -> list[Row]:  # fmt: skip
    """Measure everything that `out` does not hold yet; one line and one row a solve."""
    done = {row.key for row in read(out)}
    wanted = [
        (engine, instance, seed)
        for seed in seeds
        for instance in instances
        for engine in engines
        if (instance.name, engine.label, engine.workers, seconds, clock, seed) not in done
    ]
    print(machine("numba", "ortools"))
    print(f"# {len(wanted)} solves to do, at most {len(wanted) * seconds / 60:.1f} minutes")
    rows = []
    for count, (engine, instance, seed) in enumerate(wanted, 1):
        row = solve(engine, instance, seconds, clock, seed)
        append(out, row)
        rows.append(row)
        wrong = "" if row.checked == "ok" else f": {row.checked}"
        print(
            f"{count:5}/{len(wanted)}  {row.instance:24} {row.solver:24} seed {row.seed}  "
            f"{_shown(row.objective):>9} >= {_shown(row.bound):>9}  {row.status:9} "
            f"wall {row.wall:7.2f}  cpu {row.cpu:7.2f}{'' if row.valid else f'  INVALID{wrong}'}",
            flush=True,
        )
    return rows


def cores(workers: int) -> list[int]:
    """The cores that a process with so many workers may use; none named if that is all."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mine = sorted(os.sched_getaffinity(0))
    return mine[:workers] if workers < len(mine) else []


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)
