"""Steps per CPU second of the engines, and times of the kernels they are made of."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from benchmarks.shop.instances import generated, instance
from benchmarks.shop.measure import request, spawn
from optsched import JobShop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.shop.engines import Engine
    from benchmarks.shop.instances import Instance
    from optsched.model.schedule import Problem

FIRST = 1000
"""Iterations of the first counted run; doubled until it takes long enough."""


def rates(engines: Sequence[Engine], instances: Sequence[Instance], seconds: float) -> None:
    """Print iterations per CPU second (moves, nodes, individuals: see each engine)."""
    for engine in engines:
        for given in instances:
            asked = request(engine, given, seconds, 0, FIRST)
            run = spawn(engine, asked, 100 * seconds + 120)
            if run.answer is None:
                print(f"{engine.label:30} {given.name:8} {run.error}", flush=True)
                continue
            count, cpu = run.answer["iterations"], run.answer["cpu"]
            rate = f"{count / cpu:12,.0f}/s" if cpu > 0.05 * seconds else "ended by itself"
            print(
                f"{engine.label:30} {given.name:8} {rate}  ({count:,} in {cpu:.2f} CPU s)",
                flush=True,
            )


def kernels() -> None:
    """Print CPU times of graph, rule, evaluation and bounds, warm, in process."""
    shop = instance("ta71", None)
    assert shop.jobs is not None
    _kernels("ta71", "mwkr", [JobShop(shop.jobs) for _ in range(22)])
    for model, jobs, stages in (("gpt2_xl", 30, 8), ("bert_large", 1000, 4),
                                ("bert_large", 1000, 8), ("gpt2_xl", 64, 24)):  # fmt: skip
        array = generated(model, jobs, stages)
        _kernels(array.name, "valley", [array.replace(name=f"copy {k}") for k in range(22)])


def _kernels(name: str, rule: str, copies: Sequence[Problem]) -> None:
    """Of equal problems, because a problem keeps its graph and bounds."""
    from optsched.kernels import longest_path
    from optsched_solvers.shop.rules import Dispatcher, Variant

    graph = copies[0].graph()
    found = Dispatcher(graph, 0).sequences(Variant(rule))
    assert found is not None
    sequences = found[0]
    for copy in copies[:11]:
        copy.graph()
    built, fresh = iter(copies[:11]), iter(copies[11:])
    calls: dict[str, Callable[[], object]] = {
        "graph": lambda: next(fresh).graph(),
        "rule": lambda: Dispatcher(graph, 0).sequences(Variant(rule)),
        "evaluation": lambda: longest_path.evaluate(graph, sequences),
        "bounds": lambda: next(built).lower_bound(),
    }
    times = [f"{what} {milliseconds(call, 10):8.3f} ms" for what, call in calls.items()]
    print(f"{name:24} {'   '.join(times)}", flush=True)


def milliseconds(call: Callable[[], object], repeat: int) -> float:
    """Median CPU time of a call in this thread, after one to warm up."""
    call()
    times = []
    for _ in range(repeat):
        begin = time.thread_time()
        call()
        times.append(1e3 * (time.thread_time() - begin))
    return statistics.median(times)
