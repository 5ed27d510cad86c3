"""One solve in a process of its own: wall and CPU time of all of it, the schedule re-checked."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.machine import machine
from benchmarks.shop import plain
from benchmarks.shop.engines import PEERS, Engine
from optsched.bench.run import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.shop.instances import Instance
    from optsched.bench.rows import Results, Row

SLACK = 0.1
"""Seconds of CPU time that start and end of a process may differ by."""

GRACE = 60.0
"""Seconds after which a process that ignores its limit is killed, besides ten times the limit."""


class Run(NamedTuple):
    """What a process cost and said; `answer` is None if it failed, then `error` says how."""

    wall: float
    cpu: float
    idle: float
    """Seconds during which cores had nothing to do, of all cores."""
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
            begin, free = time.perf_counter(), idle()
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
        wall, free = time.perf_counter() - begin, idle() - free
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        if process.returncode or not answer.exists():
            last = errors.read_text().strip().splitlines()[-1:] or ["no message"]
            return Run(wall, cpu, free, None, f"exit code {process.returncode}: {last[0]}")
        return Run(wall, cpu, free, json.loads(answer.read_text()), "")


def idle() -> float:
    """Return seconds that all cores together have been idle; 0 where the system does not say."""
    try:
        _, _, _, _, free, waiting, _ = Path("/proc/stat").read_text().split(maxsplit=6)
    except OSError:
        return 0.0
    return (int(free) + int(waiting)) / os.sysconf("SC_CLK_TCK")


def request(
    engine: Engine, instance: Instance, seconds: float, seed: int, iterations: int | None = None
) -> dict[str, Any]:
    """What a process is asked."""
    raw = engine.script == "run_cpsat.py"
    return {
        "instance": instance.name, "path": None if instance.jobs else instance.of.source,
        "jobs": instance.jobs, "graph": instance.graph if raw else None, "solver": engine.solver,
        "options": engine.options, "seconds": seconds, "workers": engine.workers, "seed": seed,
        "iterations": iterations, "cores": cores(engine.workers),
    }  # fmt: skip


def empty(engine: Engine, instance: Instance, seconds: float, seed: int) -> Row:
    """The row of a solve before it began."""
    return Task(instance.of, engine.label, {}, seed, engine.workers, seconds).row


def solve(engine: Engine, instance: Instance, seconds: float, seed: int) -> Row:
    """Measure one solve."""
    run = spawn(engine, request(engine, instance, seconds, seed), 10 * seconds + GRACE)
    said = run.answer or {}
    row = empty(engine, instance, seconds, seed)._replace(
        wall_seconds=round(run.wall, 3), cpu_seconds=round(run.cpu, 3),
        versions=said.get("versions", ""),
        finished=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )  # fmt: skip
    if run.answer is None:
        return row._replace(error=run.error)
    objective, bound, status = None, said["bound"], said["status"]
    if said["starts"] is not None:
        try:
            objective = plain.makespan(instance.graph, said["starts"])
        except plain.WrongSchedule as error:
            return row._replace(error=f"wrong schedule: {error}")
    if status == "optimal" and objective != bound:
        return row._replace(error=f"says optimal with objective {objective} and bound {bound}")
    ended = status in ("optimal", "infeasible") or said["ended"] < 0.9 * seconds
    starved = "" if ended else out_of_time(run, seconds, said["startup"], engine.workers)
    if starved:
        return row._replace(error=starved)
    found = [at for at, value, _ in said["trace"] if value == objective and value is not None]
    return row._replace(
        status=status, objective=objective, lower_bound=bound, seconds=round(said["ended"], 3),
        time_to_best=min(found, default=None), history=json.dumps(said["trace"]),
        time_to_proof=round(said["ended"], 3) if status == "optimal" else None,
    )  # fmt: skip


def out_of_time(run: Run, seconds: float, startup: float, workers: int) -> str:
    """Why a solve that used its limit does not count: one core to start, then all, within 10 %.

    Cores that it left idle count as its own: its presolve may have one thread.
    """
    start = min(startup, seconds)
    expected = start + (seconds - start) * workers
    most = 1.1 * seconds * workers + SLACK
    if 0.9 * expected - SLACK <= run.cpu + run.idle and run.cpu <= most:
        return ""
    return f"got {run.cpu:.1f} CPU seconds, expected {expected:.1f}: the machine was busy"


def solve_all(
    results: Results,
    engines: Sequence[Engine],
    instances: Sequence[Instance],
    seconds: float,
    seeds: range,
) -> None:
    """Measure everything that `results` does not hold yet; one line and one row a solve."""
    wanted = [
        (engine, instance, seed)
        for seed in seeds
        for instance in instances
        for engine in engines
        if empty(engine, instance, seconds, seed).key not in results.done
    ]
    print(machine("numba", "ortools"))
    print(f"# {len(wanted)} solves to do, at most {len(wanted) * seconds / 60:.1f} minutes")
    for count, (engine, instance, seed) in enumerate(wanted, 1):
        row = solve(engine, instance, seconds, seed)
        results.append(row)
        value, bound = ("-" if v is None else str(v) for v in (row.objective, row.lower_bound))
        print(
            f"{count:5}/{len(wanted)}  {row.instance:24} {row.solver:24} seed {seed}  "
            f"{value:>9} >= {bound:>9}  {row.status:9} wall {row.wall_seconds:7.2f}  "
            f"cpu {row.cpu_seconds or 0:7.2f}  {row.error}",
            flush=True,
        )


def cores(workers: int) -> list[int]:
    """The cores that a process with so many workers may use; none named if that is all."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mine = sorted(os.sched_getaffinity(0))
    return mine[:workers] if workers < len(mine) else []
