"""Steps per CPU second of the engines, and times of the kernels they are made of."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from benchmarks.shop.measure import request, spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.shop.engines import Engine
    from benchmarks.shop.named_instances import Instance

FIRST = 1000
"""Iterations of the first counted run; doubled until it takes long enough."""


def rates(engines: Sequence[Engine], instances: Sequence[Instance], seconds: float) -> None:
    """Print iterations per CPU second (moves, nodes, individuals: see each engine)."""
    for engine in engines:
        for instance in instances:
            asked = request(engine, instance, seconds, "wall", 0, FIRST)
            run = spawn(engine, asked, 100 * seconds + 120)
            if run.answer is None:
                print(f"{engine.label:30} {instance.name:8} {run.error}", flush=True)
                continue
            count, cpu = run.answer["iterations"], run.answer["cpu"]
            rate = f"{count / cpu:12,.0f}/s" if cpu > 0.05 * seconds else "ended by itself"
            print(
                f"{engine.label:30} {instance.name:8} {rate}  ({count:,} in {cpu:.2f} CPU s)",
                flush=True,
            )


def kernels(instance: Instance) -> None:
    """Print CPU times of graph, rule, evaluation and bound of one instance, warm, in process."""
    from optsched import JobShop
    from optsched.kernels import longest_path
    from optsched_solvers.shop import dispatch

    assert instance.jobs is not None
    graph = JobShop(instance.jobs).graph()
    schedule = dispatch.run(graph, "mwkr")
    assert schedule is not None
    sequences = schedule.sequences

    def whole() -> object:
        found = dispatch.run(graph, "mwkr")
        return found and longest_path.evaluate(graph, found.sequences)

    shops = iter([JobShop(instance.jobs) for _ in range(11)])  # a shop keeps its graph
    graphs = iter([JobShop(instance.jobs).graph() for _ in range(11)])
    calls: list[tuple[str, Callable[[], object]]] = [
        ("graph arrays", lambda: next(shops).graph()),
        ("one rule", lambda: dispatch.run(graph, "mwkr")),
        ("evaluation", lambda: longest_path.evaluate(graph, sequences)),
        ("rule + evaluation", whole),
        ("lower bound", lambda: next(graphs).lower_bound()),
    ]
    for name, call in calls:
        print(f"{name:30} {instance.name:8} {milliseconds(call, 10):10.3f} ms", flush=True)


def peer_speed(engine: Engine, instance: Instance) -> None:
    """Print the same of job_shop_lib, in its own environment."""
    asked = request(engine._replace(solver="speed"), instance, 0.0, "wall", 0)
    run = spawn(engine, asked, 120)
    for name, value in (run.answer or {}).get("rows", [[run.error, float("nan")]]):
        print(f"{engine.label + ', ' + name:30} {instance.name:8} {value:10.3f} ms")


def milliseconds(call: Callable[[], object], repeat: int) -> float:
    """Median CPU time of a call in this thread, after one to warm up."""
    call()
    times = []
    for _ in range(repeat):
        begin = time.thread_time()
        call()
        times.append(1e3 * (time.thread_time() - begin))
    return statistics.median(times)
