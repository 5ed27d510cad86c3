"""What switching costs, what an array gains, and whether the prediction is right."""

from __future__ import annotations

import dataclasses
import statistics
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

import optsched
from benchmarks.executor.gpu_cases import STAGES, Check, Row, Sizes, adamw, stack, trainer
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.inline import InlineBackend
from optsched.pipelines import one_f_one_b, uniform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from optsched.arraypipe import ArrayTrainer
    from optsched.arraypipe.plan.types import Record
    from optsched.arraypipe.runtime.state import JobStage

JOBS, STEPS = 4, 8
_LEAST = 10**6  # nanoseconds that a block takes at least where the prediction is judged


def speed(sizes: Sizes) -> list[Check]:
    """All rows about time."""
    return [
        ("switch of a resident job", partial(switches, sizes)),
        ("period", partial(predicted, sizes)),
        ("throughput", partial(throughput, sizes)),
    ]


def siblings(sizes: Sizes, **changes: Any) -> list[Job]:
    """Equal jobs."""
    return [Job(j, sizes.batch, adamw, name=f"job{j}", **changes) for j in range(JOBS)]


def switches(sizes: Sizes) -> Iterator[Row]:
    """Host time of a block that does nothing but hand on a number."""
    tiny = dataclasses.replace(sizes, width=32, batch=2)
    array = trainer(tiny, stack(tiny), siblings(tiny))
    schedule = random_schedule([1] * JOBS, STAGES)
    steps = 5 * STEPS
    with blocks_that_do_nothing(sizes):
        inline(array, schedule, 2)
        spent = [inline(array, schedule, steps) for _ in range(sizes.of(3, 1))]
    each = statistics.median(spent) / (schedule.n_operations * steps) / 1e3
    name = "switch of a resident job, host time"
    yield sizes.row(name, f"{each:.1f} us", "<= 60 us", each <= 60)


def predicted(sizes: Sizes) -> Iterator[Row]:
    """The period of a profiled problem, solved, against the measured one, and the gaps in it.

    All stages are on one stream: there a block waits for nothing but its launch.
    """
    array = trainer(sizes, stack(sizes), siblings(sizes), devices=[sizes.device])
    problem = array.problem(array.profile(), place=[0] * STAGES)
    schedule = optsched.solve(problem, time_limit=2).schedule
    assert schedule is not None, "no schedule was found"
    result = array.run(schedule, STEPS, on_error="raise")
    trace, report, shortest = result.trace, result.report, int(schedule.duration.min())
    assert trace.start is not None
    gaps = trace.start[1:] - (trace.start + trace.duration)[:-1]
    gap = float(statistics.median(gaps.tolist())) / 1e3
    yield sizes.row("gap on the device between blocks", f"{gap:.1f} us", "<= 20 us", gap <= 20)
    found, known = (
        report.measured_ns,
        report.predicted_ns,
    )
    assert found and known, "no period was measured"
    row = sizes.row(
        "period, all stages on one stream",
        f"predicted {known / 1e6:.2f} ms, measured {found / 1e6:.2f} ms, "
        f"{100 * (found / known - 1):+.1f} %",
        "within 10 % where blocks take 1 ms", abs(found / known - 1) <= 0.1,
    )  # fmt: skip
    yield row if shortest >= _LEAST else row._replace(holds=None)


def throughput(sizes: Sizes) -> Iterator[Row]:
    """Time of a round of all jobs: an array, its variants, and the jobs without one."""
    jobs, everyone = [1] * JOBS, range(JOBS)
    rolling = random_schedule(jobs, STAGES, seed=2)
    updates = random_schedule(jobs, STAGES, update=everyone, together=everyone, seed=2)
    piped = one_f_one_b(uniform("one_f_one_b", stages=STAGES, micro_batches=4))
    here = stack(sizes)
    array = trainer(sizes, here, siblings(sizes))
    clipped = trainer(sizes, here, siblings(sizes, clip_norm=1.0))
    ones = [trainer(sizes, here, [job]) for job in siblings(sizes, microbatches=4)]
    ways: dict[str, Callable[[], float]] = {
        "array": partial(seconds, array, rolling),
        "one after the other": lambda: sum(plainly(sizes, job) for job in siblings(sizes)),
        "1F1B one at a time": lambda: sum(seconds(one, piped) for one in ones),
        "own updates": partial(seconds, array, updates),
        "clipping": partial(seconds, clipped, updates),
    }
    for place in ("pageable", "page-locked"):
        there = trainer(sizes, stack(sizes, place), siblings(sizes))
        ways[f"batches of the host, {place}"] = partial(seconds, there, rolling)
    times = medians(ways, sizes.of(2, 1))
    for name in [*ways][:3]:
        yield Row(name, f"{1e3 * times[name] / STEPS:.2f} ms a round of all jobs")
    for name in [*ways][1:3]:
        gain = times[name] / times["array"]
        yield sizes.row(f"array against {name}", f"{gain:.2f}x", ">= 1.0x", gain >= 1)
    for name in [*ways][4:]:
        ratio = times[name] / times["own updates" if name == "clipping" else "array"]
        yield sizes.row(f"{name}, time ratio", f"{ratio:.2f}x", "<= 1.1x", ratio <= 1.1)


def medians(ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Of several ways in turn, after one round to warm up."""
    for way in ways.values():
        way()
    rounds = [{name: way() for name, way in ways.items()} for _ in range(repeats)]
    return {name: statistics.median(row[name] for row in rounds) for name in ways}


def seconds(array: ArrayTrainer, schedule: Any) -> float:
    """From the start of the first block to the end of the last, on the device's clock."""
    return array.run(schedule, STEPS, on_error="raise").report.wall_ns / 1e9


def plainly(sizes: Sizes, job: Job) -> float:
    """Seconds of a plain loop; its losses are read at the end."""
    torch.manual_seed(job.seed)
    given = stack(sizes)
    model = given.build().to(sizes.device)
    optimizer = job.optimizer(list(model.named_parameters()))
    batches, losses = given.data(job, 0), []
    x, target = next(batches)
    wait(sizes)
    began = time.perf_counter()
    for _ in range(STEPS):
        value = given.loss(model(x), target)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    wait(sizes)
    spent = time.perf_counter() - began
    assert all(loss.isfinite() for loss in losses)
    return spent


def wait(sizes: Sizes) -> None:
    """Until the device has nothing left to do."""
    if sizes.cuda:
        torch.cuda.synchronize(sizes.device)


def inline(array: ArrayTrainer, schedule: Any, steps: int) -> int:
    """Nanoseconds of the backend's loop, from the first block to the last."""
    spent = []
    original = InlineBackend.run

    def run(self: InlineBackend) -> list[Record]:
        began = time.thread_time_ns()
        records = original(self)
        spent.append(time.thread_time_ns() - began)
        return records

    with patch.object(InlineBackend, "run", run):
        array.run(schedule, steps, on_error="raise")
    return spent[0]


@contextmanager
def blocks_that_do_nothing(sizes: Sizes) -> Iterator[None]:
    """Forward, backward and update are replaced by what returns a number of the device at once.

    Losses are still read late, and what goes to another stage is recorded there.
    """
    answer = (torch.zeros((), device=sizes.device),)

    class Nothing:
        roots = answer

    def forward(stage: JobStage, microbatch: int, *_: object) -> tuple[Tensor, ...]:
        stage.kept[microbatch] = Nothing  # type: ignore[assignment]
        return answer

    stubs: dict[str, Any] = {
        "forward": forward,
        "backward": lambda *_: answer,
        "update": lambda *_: None,
    }
    with patch.multiple(blocks, **stubs):
        yield
