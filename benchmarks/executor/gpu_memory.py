"""Copies beside the blocks: their bandwidth, how much of them is hidden, and peak memory."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.executor.gpu_cases import Row, Sizes, adamw, judged, stack_array
from benchmarks.executor.gpu_exact import copied, limit
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.memory import PerDevice
from optsched.arraypipe.stages import fresh_model, fresh_stages
from optsched.arraypipe.states.budget import reserved
from optsched.arraypipe.states.cuda_engine import CudaEngine
from optsched.arraypipe.states.engines import IN, OUT, HostEngine
from optsched.arraypipe.states.slots import flat_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.job import JobStage
    from optsched.model.schedule import Schedule

_CHUNKS = 16
_CPU = torch.device("cpu")


def memory(sizes: Sizes) -> list[Row]:
    """All rows about memory."""
    rates = bandwidth(sizes)
    return [*rates[1], *overlap(sizes, rates[0]), *peak(sizes)]


def bandwidth(sizes: Sizes) -> tuple[dict[str, float], list[Row]]:
    """Bytes a second of the engine, in chunks, against one plain copy of pinned memory."""
    (host,) = flat_bytes([sizes.copied], _CPU, sizes.cuda)
    (there,) = flat_bytes([sizes.copied], sizes.device, False)
    engine: CudaEngine | HostEngine = CudaEngine(sizes.device) if sizes.cuda else HostEngine()
    if isinstance(engine, CudaEngine):
        engine.adopt([there])
    rates, rows = {}, []
    for direction in (IN, OUT):
        source, target = (host, there) if direction == IN else (there, host)
        plain = [lambda s=source, t=target: t.copy_(s, non_blocking=True)]
        chunked = [
            lambda d=direction, s=s, t=t: engine.copy(d, s.numel(), lambda: _copy(t, s), ())
            for s, t in zip(source.chunk(_CHUNKS), target.chunk(_CHUNKS), strict=True)
        ]
        times: dict[str, list[float]] = {"plain": [], "engine": []}
        for _ in range(2 + sizes.repeats):
            times["plain"].append(_timed(sizes, plain))
            times["engine"].append(_timed(sizes, chunked))
        plain_rate, rate = (
            sizes.copied / statistics.median(times[k][2:]) for k in ("plain", "engine")
        )
        rates[direction] = rate
        rows.append(
            Row(
                f"copies of the engine, {direction}",
                f"{rate / 1e9:.1f} GB/s, plain {plain_rate / 1e9:.1f}, "
                f"{100 * rate / plain_rate:.0f} %",
                ">= 90 % of plain",
                judged(sizes, rate >= 0.9 * plain_rate),
            )
        )
    return rates, rows


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _timed(sizes: Sizes, calls: Sequence[Callable[[], Any]]) -> float:
    if sizes.cuda:
        torch.cuda.synchronize(sizes.device)
    began = time.perf_counter()
    for call in calls:
        call()
    if sizes.cuda:
        torch.cuda.synchronize(sizes.device)
    return time.perf_counter() - began


def overlap(sizes: Sizes, rates: dict[str, float]) -> list[Row]:
    """How much of the copies blocks wait for, where blocks take longer than copies."""
    with copied() as moved:
        taken_turns = _take_turns(sizes)
    taken = moved[IN] / rates[IN] + moved[OUT] / rates[OUT]
    hidden = 1 - min(1.0, taken_turns.exposed / taken) if taken else 1.0
    return [
        Row(
            "states that take turns",
            f"{moved[IN] / 2**20:.1f} MiB in, {moved[OUT] / 2**20:.1f} MiB out, "
            f"run of {taken_turns.seconds:.2f} s",
            "some are copied",
            moved[IN] > 0 and moved[OUT] > 0,
        ),
        Row(
            "copies hidden behind blocks",
            f"{100 * hidden:.0f} % of {1e3 * taken:.1f} ms",
            ">= 80 %",
            judged(sizes, hidden >= 0.8),
        ),
    ]


def peak(sizes: Sizes) -> list[Row]:
    """The allocator's peak against the budget, where states are most of it."""
    if not sizes.cuda:
        return []
    found = _take_turns(dataclasses.replace(sizes, batch=sizes.batch // 16))
    allowed = sizes.stages * found.limit
    gpu = torch.device("cuda", 0)
    reserve = sizes.stages * (reserved(gpu, [gpu] * sizes.stages) + found.limit // 20)
    share = found.peak / (allowed - reserve)
    return [
        Row(
            "peak memory",
            f"{found.peak / 2**30:.2f} GiB, {100 * share:.0f} % of the budget without its "
            f"reserve; budget {allowed / 2**30:.2f} GiB",
            "<= budget, >= 85 % of it without reserve",
            found.peak <= allowed and share >= 0.85,
        )
    ]


class TurnsTaken(NamedTuple):
    """A run in which half of the states fit; bytes of one logical device, and seconds."""

    limit: int
    peak: int  # of the whole GPU
    seconds: float
    exposed: float


def _take_turns(sizes: Sizes) -> TurnsTaken:
    jobs = [
        Job(j, sizes.batch, adamw, recompute=True, name=f"job{j}") for j in range(sizes.jobs + 2)
    ]
    array = stack_array(sizes, jobs)
    state = max(_state_bytes(stage) for stage in _stages(sizes, jobs[0]))
    schedule, held = _with_bytes(sizes, jobs)
    array.memory = limit(len(jobs) * state // 2 + held, sizes)
    made: list[PerDevice] = []
    original = PerDevice.__init__

    def init(self: PerDevice, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        made.append(self)

    before = 0
    if sizes.cuda:
        torch.cuda.synchronize(sizes.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(sizes.device)
        torch.cuda.reset_peak_memory_stats(sizes.device)
    PerDevice.__init__ = init  # type: ignore[method-assign]
    try:
        result = array.run(schedule, sizes.steps, on_error="raise")
    finally:
        PerDevice.__init__ = original  # type: ignore[method-assign]
    top = torch.cuda.max_memory_allocated(sizes.device) - before if sizes.cuda else 0
    # logical devices on one GPU share its link: their waits add up
    exposed = sum(memory.exposed for memory in made) / 1e9
    return TurnsTaken(array.memory, top, result.report.wall / 1e9, exposed)


def _stages(sizes: Sizes, job: Job) -> list[JobStage]:
    array = stack_array(sizes, [job])
    return fresh_stages(fresh_model(array.build_model, job), array.stages, job, 0, "job0")


def _state_bytes(stage: JobStage) -> int:
    """Weights and two moments."""
    return 3 * sum(p.numel() * p.element_size() for _, p in stage.parameters)


def _with_bytes(sizes: Sizes, jobs: list[Job]) -> tuple[Schedule, int]:
    """A rolling order with what blocks hold: inputs from F to B, everything inside a B.

    Returns the schedule and the bytes of a device beside its states.
    """
    boundary = 4 * sizes.batch * sizes.width
    gradients = 4 * sizes.layers * (sizes.width + 1) * sizes.width
    # inside B: outputs of all layers, twice (before and after ReLU), and gradients of two of them
    inside = (2 * sizes.layers + 2) * boundary + gradients
    schedule = random_schedule([1] * len(jobs), sizes.stages, seed=4)
    forward, backward = schedule.kind == "F", schedule.kind == "B"
    schedule = dataclasses.replace(
        schedule,
        acquire=forward * 2 * boundary,
        free=backward * 2 * boundary,
        workspace=backward * inside,
    )
    held = len(jobs) * 2 * boundary + inside
    return schedule, held
