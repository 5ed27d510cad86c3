"""What switching costs, what an array gains, and whether the prediction is right."""

from __future__ import annotations

import dataclasses
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import optsched
from benchmarks.executor.gpu_cases import (
    Row,
    Sizes,
    adamw,
    judged,
    stack,
    stack_array,
    stack_batches,
)
from optsched.arraypipe import Job, blocks, random_schedule
from optsched.arraypipe.inline import InlineBackend
from optsched.pipelines import one_f_one_b, uniform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.arraypipe import ArrayTrainer
    from optsched.arraypipe.course import Record
    from optsched.arraypipe.job import JobStage
    from optsched.arraypipe.plan import ExecutionPlan


def speed(sizes: Sizes) -> list[Row]:
    """All rows about time."""
    return [*switches(sizes), *predicted(sizes), *throughput(sizes)]


def siblings(sizes: Sizes, microbatches: int = 1) -> list[Job]:
    """Equal jobs."""
    return [
        Job(j, sizes.batch, adamw, microbatches=microbatches, name=f"job{j}")
        for j in range(sizes.jobs)
    ]


def switches(sizes: Sizes) -> list[Row]:
    """Host time of a block that does nothing; gap on the device between blocks of two jobs."""
    tiny = dataclasses.replace(sizes, width=32, batch=2)
    array = stack_array(tiny, siblings(tiny))
    plan = array.plan(random_schedule([1] * sizes.jobs, sizes.stages, seed=0))
    steps = 5 * sizes.steps
    blocks = plan.schedule.n_operations * steps
    with blocks_that_do_nothing():
        inline(array, plan, 2)
        host = [inline(array, plan, steps) / blocks for _ in range(sizes.repeats)]
    per_block = statistics.median(host) / 1e3
    rows = [Row("switch of a resident job, host time", f"{per_block:.1f} us",
                "<= 60 us", judged(sizes, per_block <= 60))]  # fmt: skip
    # all stages on one device: nothing is ever waited for, so gaps are those between kernels
    array = stack_array(sizes, siblings(sizes))
    schedule = random_schedule([1] * sizes.jobs, sizes.stages, place=[0] * sizes.stages, seed=1)
    trace = array.run(schedule, sizes.steps).trace
    assert trace.start is not None
    ends = (trace.start + trace.duration)[:-1]
    gap = float(statistics.median((trace.start[1:] - ends).tolist())) / 1e3
    rows.append(Row("gap on the device between two blocks", f"{gap:.1f} us", "<= 20 us",
                    judged(sizes, gap <= 20)))  # fmt: skip
    return rows


def predicted(sizes: Sizes) -> list[Row]:
    """The period of a profiled problem, solved, against the measured one; one stream."""
    array = stack_array(sizes, siblings(sizes))
    array.devices = [sizes.device]
    problem = array.problem(array.profile(), place=[0] * sizes.stages)
    schedule = optsched.solve(problem, time_limit=2).schedule
    assert schedule is not None
    steps = max(8, sizes.steps)
    period = array.run(schedule, steps).report.period
    if period is None or period.predicted is None or period.measured is None:
        return [Row("period", "none was measured", "a period", False)]
    error = period.measured / period.predicted - 1
    return [
        Row(
            "period, all stages on one stream",
            f"predicted {period.predicted / 1e6:.2f} ms, measured {period.measured / 1e6:.2f} ms, "
            f"{100 * error:+.1f} %",
            "within 10 %",
            judged(sizes, abs(error) <= 0.1),
        )
    ]


def throughput(sizes: Sizes) -> list[Row]:
    """Iterations a second of all jobs: array, one after the other, one pipelined at a time."""
    micro = 4
    array = stack_array(sizes, siblings(sizes))
    rolling = random_schedule([1] * sizes.jobs, sizes.stages, seed=2)
    piped = [stack_array(sizes, [job]) for job in siblings(sizes, micro)]
    order = one_f_one_b(uniform("one_f_one_b", stages=sizes.stages, micro_batches=micro))
    ways: dict[str, Callable[[int], float]] = {
        "array, a stream per stage": lambda steps: _seconds(array, rolling, steps),
        "jobs one after the other, unsplit": lambda steps: sum(
            _plainly(sizes, job, steps) for job in siblings(sizes)
        ),
        f"one job at a time, 1F1B, {micro} micro-batches": lambda steps: sum(
            _seconds(one, order, steps) for one in piped
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(2)
    for _ in range(sizes.repeats):
        for name, way in ways.items():
            found[name].append(way(sizes.steps) / sizes.steps)
    best = {name: statistics.median(times) for name, times in found.items()}
    first, second, third = ways
    rows = [Row(name, f"{1e3 * value:.2f} ms a round of all jobs") for name, value in best.items()]
    over, under = best[second] / best[first], best[third] / best[first]
    rows.append(Row("array against one after the other", f"{over:.2f}x", ">= 0.9x",
                    judged(sizes, over >= 0.9)))  # fmt: skip
    rows.append(Row("array against 1F1B one at a time", f"{under:.2f}x", ">= 1.0x",
                    judged(sizes, under >= 1.0)))  # fmt: skip
    return rows


def _seconds(array: ArrayTrainer, schedule: Any, steps: int) -> float:
    """From the start of the first block to the end of the last, on the device's clock."""
    return array.run(schedule, steps, on_error="raise").report.wall / 1e9


def _plainly(sizes: Sizes, job: Job, steps: int) -> float:
    """Seconds of a plain loop; its losses are read at the end."""
    torch.manual_seed(job.seed)
    model = stack(sizes).to(sizes.device)
    optimizer = job.optimizer(list(model.named_parameters()))
    batches, losses = stack_batches(sizes)(job, 0), []
    _wait(sizes)
    began = time.perf_counter()
    for _ in range(steps):
        x, target = next(batches)
        value = nn.functional.mse_loss(model(x), target)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    _wait(sizes)
    seconds = time.perf_counter() - began
    assert all(loss.isfinite() for loss in losses)
    return seconds


def _wait(sizes: Sizes) -> None:
    if sizes.cuda:
        torch.cuda.synchronize(sizes.device)


def inline(array: ArrayTrainer, execution_plan: ExecutionPlan, steps: int) -> int:
    """Nanoseconds of the backend's loop, from the first block to the last."""
    spent = []
    original = InlineBackend.run

    def run(self: InlineBackend) -> list[Record]:
        began = time.thread_time_ns()
        records = original(self)
        spent.append(time.thread_time_ns() - began)
        return records

    InlineBackend.run = run  # type: ignore[method-assign]
    try:
        array.run(execution_plan, steps)
    finally:
        InlineBackend.run = original  # type: ignore[method-assign]
    return spent[0]


@contextmanager
def blocks_that_do_nothing() -> Iterator[None]:
    """Forward, backward and update are replaced by what returns at once."""
    answer = (torch.zeros(()),)

    class Nothing:
        roots = answer

    def forward(stage: JobStage, microbatch: int, *_: object) -> tuple[Tensor, ...]:
        stage.kept[microbatch] = Nothing  # type: ignore[assignment]
        return answer

    names = ("forward", "backward", "update")
    kept = [getattr(blocks, name) for name in names]
    stubs = (forward, lambda *_: answer, lambda *_: None)
    try:
        for name, stub in zip(names, stubs, strict=True):
            setattr(blocks, name, stub)
        yield
    finally:
        for name, function in zip(names, kept, strict=True):
            setattr(blocks, name, function)
