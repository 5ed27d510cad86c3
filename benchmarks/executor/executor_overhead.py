"""What the executor itself costs: switches, bookkeeping, plans, early stops, traces.

    python -m benchmarks.executor.executor_overhead [--part switch,plain,plan,trace] [--repeat 7]

``switch``: tiny stages in the order of a schedule by the inline backend, and the very same blocks
called one after the other without any of it; and the backend with blocks that do nothing.
``plain``: blocks of at least 5 ms against a training loop of plain PyTorch on the unsplit models.
``plan``: compiling, routing, an early stop of 30 jobs x 16 stages. ``trace``: documents of 100,000
records. One thread, and CPU time of it, so that others on the machine count less; what is compared
runs by turns. Medians, in brackets the best and the worst.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from optsched.arraypipe import ArrayTrainer, Job, blocks, compile, random_schedule
from optsched.arraypipe.course import Course, Record
from optsched.arraypipe.inline import InlineBackend
from optsched.arraypipe.planning.messages import routes
from optsched.arraypipe.planning.repair import without
from optsched.arraypipe.planning.segments import Segment, Walk
from optsched.arraypipe.reporting.report import compare
from optsched.arraypipe.reporting.virtual_clock import replayed
from optsched.arraypipe.stages import fresh_model, fresh_stages
from optsched.arraypipe.trace import measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe.job import JobStage
    from optsched.arraypipe.plan import ExecutionPlan

loss = nn.functional.mse_loss


def main() -> None:
    """Print one line per measurement."""
    parts = {"switch": switch, "plain": plain, "plan": plan, "trace": trace}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default=",".join(parts))
    parser.add_argument("--repeat", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("torch", "numpy"))
    for part in given.part.split(","):
        parts[part](given.repeat)


def chain(width: int, depth: int) -> nn.Sequential:
    """A stack of equal linear layers."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def constant_batches(width: int) -> Callable[[Job, int], Iterator[tuple[Tensor, Tensor]]]:
    """The same batch for ever: data costs nothing here."""

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(job.seed)
        x = torch.randn(job.batch_size, width, generator=draw)
        while True:
            yield x, x

    return data


def array_of(n_jobs: int, n_stages: int, width: int, batch: int) -> ArrayTrainer:
    """One linear layer a stage, plain SGD."""
    jobs = [Job(j, batch, lambda p: torch.optim.SGD(p, lr=1e-6)) for j in range(n_jobs)]
    return ArrayTrainer(
        lambda: chain(width, n_stages), jobs, list(range(1, n_stages)), loss,
        constant_batches(width),
    )  # fmt: skip


# switches


def switch(repeat: int) -> None:
    """Nanoseconds a block of tiny stages, with the backend around it and without."""
    n_jobs, n_stages, steps = 8, 4, 20
    array = array_of(n_jobs, n_stages, 8, 4)
    schedule = random_schedule([1] * n_jobs, n_stages, seed=0)
    execution_plan = array.plan(schedule)
    n_blocks = execution_plan.schedule.n_operations * steps
    run = lambda: inline(array, execution_plan, steps) / n_blocks  # noqa: E731
    direct(array, execution_plan, 2)
    run()
    whole, bare, empty = [], [], []
    for _ in range(3 * repeat):  # many short runs: the machine changes its mind less within a pair
        whole.append(run())
        bare.append(direct(array, execution_plan, steps) / n_blocks)
        with blocks_that_do_nothing():
            empty.append(run())
    print(f"a resident block of {n_jobs} jobs x {n_stages} stages, tiny, {n_blocks} blocks a run:")
    show("by the inline backend", whole, 1e3, "us")
    show("called directly", bare, 1e3, "us")
    show("difference: a switch", [a - b for a, b in zip(whole, bare, strict=True)], 1e3, "us")
    print(f"  {'difference of the best':45} {(min(whole) - min(bare)) / 1e3:9.3f} us")
    show("the backend with blocks that do nothing", empty, 1e3, "us")


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


def direct(array: ArrayTrainer, execution_plan: ExecutionPlan, steps: int) -> int:
    """The blocks of a run in their order, with nothing looked up or passed on; nanoseconds."""
    rows, batches, calls = [], [], []
    for j, job in enumerate(array.jobs):
        model = fresh_model(array.build_model, job)
        rows.append(fresh_stages(model, array.stages, job, j, array.titles[j]))
        batches.append(next(iter(array.data(job, 0))))
        x: Any = batches[j][0]
        for stage in rows[j]:
            end = blocks.Criterion(loss, batches[j][1], 1.0) if stage.last else None
            x = blocks.rehearse(stage, x, (stage.index > 0,), end)
    for i, _, iteration in execution_plan.unroll([steps] * execution_plan.n_jobs):
        block = execution_plan.blocks[i]
        calls.append((block.kind, block.job, rows[block.job][block.stage], iteration))
    held: list[Any] = [None] * len(rows)
    began = time.thread_time_ns()
    for kind, j, stage, iteration in calls:
        if kind == "F":
            held[j] = _forward(array.jobs[j], stage, held[j], batches[j], iteration)
        else:
            held[j] = blocks.backward(stage, 0, held[j])
            blocks.update(stage, None, None, 0.0)
    return time.thread_time_ns() - began


def _forward(
    job: Job, stage: JobStage, x: Any, batch: tuple[Tensor, Tensor], iteration: int
) -> Any:
    key = job.key(iteration, 0, stage.index)
    end = blocks.Criterion(loss, batch[1], 1.0) if stage.last else None
    if stage.index == 0:
        x = (batch[0],)
    output = blocks.forward(stage, 0, x, key, end, False)
    if stage.last:
        output[0].item()  # the loss is looked at
        return None
    return output


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


# blocks of a realistic size


def plain(repeat: int) -> None:
    """Inline against a plain training loop, blocks of 5 ms and more."""
    n_jobs, n_stages, steps, width, batch = 2, 2, 4, 1024, 256
    array = array_of(n_jobs, n_stages, width, batch)
    execution_plan = array.plan(random_schedule([1] * n_jobs, n_stages, seed=1))
    train_plainly(array, steps)
    shortest = array.run(execution_plan, steps).trace.duration.min() / 1e6
    array_times, alone = [], []
    for k in range(2 * repeat):
        for what in (0, 1) if k % 2 else (1, 0):
            if what:
                array_times.append(inline(array, execution_plan, steps))
            else:
                alone.append(train_plainly(array, steps))
    print(f"{n_jobs} jobs x {n_stages} stages, blocks of at least {shortest:.1f} ms")
    show("by the inline backend", array_times, 1e6, "ms")
    show("plain training loops", alone, 1e6, "ms")
    ratios = [a / b - 1 for a, b in zip(array_times, alone, strict=True)]
    show("overhead", ratios, 0.01, "%")


def train_plainly(array: ArrayTrainer, steps: int) -> int:
    """Nanoseconds of training the unsplit models one after the other."""
    total = 0
    for job in array.jobs:
        torch.manual_seed(job.seed)
        model = array.build_model()
        optimizer = job.optimizer(list(model.named_parameters()))
        batches = array.data(job, 0)
        began = time.thread_time_ns()
        for _ in range(steps):
            x, target = next(batches)
            value = loss(model(x), target)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            value.item()
        total += time.thread_time_ns() - began
    return total


# plans


def plan(repeat: int) -> None:
    """Milliseconds of what is done before a run, and of an early stop."""
    n_jobs, n_stages = 30, 16
    schedule = random_schedule([1] * n_jobs, n_stages, seed=0)
    compiled = compile(schedule)
    seats = tuple(range(n_jobs))

    def walk() -> Walk:
        counts = [1000] * n_jobs
        made = Walk(Segment(compiled, routes(compiled), seats, [0] * n_jobs, counts))
        for _ in range(3000):
            next(made)
        return made

    stops = []
    for _ in range(repeat):
        made = walk()
        for seat in range(0, n_jobs, 3):
            began = time.thread_time_ns()
            made.shorten(seat, made.begun[seat])
            stops.append(time.thread_time_ns() - began)
    blocks_a_walk, made = 20_000, walk()
    print(f"{n_jobs} jobs x {n_stages} stages, {schedule.n_operations} blocks:")
    show("compile, all checks", timed(lambda: compile(schedule), repeat), 1e6, "ms")
    barrier = random_schedule([1] * n_jobs, n_stages, update=range(n_jobs), seed=0)
    show("compile, with updates and a barrier",
         timed(lambda: compile(barrier, barrier=True), repeat), 1e6, "ms")  # fmt: skip
    show("routes", timed(lambda: routes(compiled), repeat), 1e6, "ms")
    show("early stop (Walk.shorten)", stops, 1e6, "ms")
    show("document without a job (without)",
         timed(lambda: without(schedule, [0]), repeat), 1e6, "ms")  # fmt: skip
    steps = timed(lambda: [next(made) for _ in range(blocks_a_walk)], repeat)
    show("one step of the walk", [t / blocks_a_walk for t in steps], 1e3, "us")


# traces


class Seated:
    """A job of a run that was never trained."""

    begin, over = 0, False

    def __init__(self, end: int) -> None:
        self.end = end


def trace(repeat: int) -> None:
    """Seconds of the documents and the report of a long run."""
    n_jobs, n_stages, steps = 30, 16, 105
    course = Course(
        compile(random_schedule([1] * n_jobs, n_stages, seed=0)),
        [Seated(steps) for _ in range(n_jobs)],
        routes,
    )
    draw, clock, records = random.Random(0), 0, []
    for now in Walk(course.now):
        start = clock + draw.randint(0, 50)
        clock = start + draw.randint(1, 900)
        records.append(Record(0, *now, start, clock))
    print(f"{len(records)} records:")
    show("measured", timed(lambda: measured(course, records, {}), repeat), 1e9, "s")
    show("replayed", timed(lambda: replayed(course, records, {}), repeat), 1e9, "s")
    show("report", timed(lambda: compare(course, records), repeat), 1e9, "s")


def timed(call: Callable[[], object], repeat: int) -> list[float]:
    """Nanoseconds of every call, after one to warm up."""
    call()
    found = []
    for _ in range(repeat):
        began = time.thread_time_ns()
        call()
        found.append(float(time.thread_time_ns() - began))
    return found


def show(name: str, values: Sequence[float], size: float, unit: str) -> None:
    """Median, best and spread."""
    scaled = sorted(value / size for value in values)
    median = statistics.median(scaled)
    print(f"  {name:45} {median:9.3f} {unit}  [{scaled[0]:.3f} .. {scaled[-1]:.3f}]", flush=True)


if __name__ == "__main__":
    main()
