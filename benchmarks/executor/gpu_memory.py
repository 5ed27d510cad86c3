"""Copies beside the blocks: their bandwidth, how much of them is hidden, and peak memory."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.executor.gpu_cases import STAGES, Check, Row, Sizes, adamw, stack, trainer
from benchmarks.executor.gpu_exact import Case, copied, limit, state_bytes
from benchmarks.executor.gpu_speed import medians, seconds, wait
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.memory.budget import reserved
from optsched.arraypipe.memory.cuda_engine import CudaEngine
from optsched.arraypipe.memory.engines import IN, OUT, CopyEngine
from optsched.arraypipe.memory.slots import flat_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe import ArrayTrainer
    from optsched.model.schedule import Schedule

_CHUNKS = 6
_CPU = torch.device("cpu")


def memory(sizes: Sizes) -> list[Check]:
    """All rows about memory; first the peak, as kernels of other checks take memory too."""
    rates: dict[str, float] = {}
    return [
        ("peak memory", partial(peak, sizes)),
        ("copies of the engine", partial(bandwidth, sizes, rates)),
        ("copies hidden", partial(hidden, sizes, rates, True)),
        ("copies hidden, with graphs", partial(hidden, sizes, rates, False)),
    ]


def taking_turns(sizes: Sizes, recompute: bool) -> tuple[ArrayTrainer, Schedule]:
    """An array of which half of the states fit; one of its jobs, or none, keeps its graphs."""
    jobs = [
        Job(j, sizes.batch, adamw, recompute=recompute or j > 0, name=f"job{j}") for j in range(6)
    ]
    model = stack(sizes)
    boundary, weights = 4 * sizes.batch * sizes.width, 8 * sizes.width * (sizes.width + 1)
    # inputs from F to B; inside a B the outputs of all layers and gradients; a graph
    held = (len(jobs) + 4 + 2 * (not recompute)) * boundary + weights
    room = len(jobs) * state_bytes(sizes, Case("", model, jobs)) // 2
    schedule = random_schedule([1] * len(jobs), STAGES, seed=4)
    return trainer(sizes, model, jobs, memory=limit(room + held, sizes)), schedule


def peak(sizes: Sizes) -> Iterator[Row]:
    """The budget against what the GPU has given away, where states are most of it."""
    array, schedule = taking_turns(replace(sizes, batch=sizes.batch // 16), True)
    device, before = sizes.device, [_taken(sizes) for _ in range(2)][1]
    seconds(array, schedule)
    assert array.memory is not None
    given_away, kept, allocated = _taken(sizes)
    allowed, allocated = STAGES * array.memory, allocated - before[2]
    reserve = STAGES * (reserved(device, [device] * STAGES) + array.memory // 20)
    share = allocated / (allowed - reserve)
    yield sizes.row(
        "peak memory",
        f"{_gib(given_away)} given away ({_gib(before[0])} before), {_gib(kept)} kept by the "
        f"allocator, {_gib(allocated)} allocated: {100 * share:.0f} % of the budget without its "
        f"reserve; budget {_gib(allowed)}",
        "given away <= budget, allocated >= 85 % of it without reserve",
        given_away <= allowed and share >= 0.85,
    )


def _taken(sizes: Sizes) -> tuple[int, int, int]:
    """Bytes that the GPU has given away, and peaks of the allocator since this was last asked."""
    if not sizes.cuda:
        return 0, 0, 0
    device = sizes.device
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    most = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return total - free, *most


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def bandwidth(sizes: Sizes, rates: dict[str, float]) -> Iterator[Row]:
    """Bytes a second of the engine, in chunks, against one plain copy of page-locked memory."""
    size = sizes.of(2**30, 2**20)
    (host,) = flat_bytes([size], _CPU, sizes.cuda)
    (there,) = flat_bytes([size], sizes.device, False)
    engine: CudaEngine | CopyEngine = CudaEngine(sizes.device) if sizes.cuda else CopyEngine()
    if isinstance(engine, CudaEngine):
        engine.adopt([there])
    for direction in (IN, OUT):
        source, target = (host, there) if direction == IN else (there, host)
        parts = list(zip(target.chunk(_CHUNKS), source.chunk(_CHUNKS), strict=True))
        times = medians({
            "plain": partial(_timed, sizes, [partial(_copy, target, source)]),
            "engine": partial(_timed, sizes, [
                partial(engine.copy, direction, s.numel(), partial(_copy, t, s), ())
                for t, s in parts
            ]),
        }, 5)  # fmt: skip
        rate, plain = (size / times[name] for name in ("engine", "plain"))
        rates[direction] = rate
        yield sizes.row(
            f"copies of the engine, {direction}",
            f"{rate / 1e9:.1f} GB/s, plain {plain / 1e9:.1f}, {100 * rate / plain:.0f} %",
            ">= 90 % of plain", rate >= 0.9 * plain,
        )  # fmt: skip


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _timed(sizes: Sizes, calls: Sequence[Callable[[], Any]]) -> float:
    wait(sizes)
    began = time.perf_counter()
    for call in calls:
        call()
    wait(sizes)
    return time.perf_counter() - began


def hidden(sizes: Sizes, rates: dict[str, float], recompute: bool) -> Iterator[Row]:
    """A run with slots against the same with all states resident, where blocks take longer."""
    (array, schedule), repeats = taking_turns(sizes, recompute), sizes.of(2, 1)
    resident = trainer(sizes, stack(sizes), array.jobs)
    with copied() as moved:
        times = medians({
            "slots": partial(seconds, array, schedule),
            "resident": partial(seconds, resident, schedule),
        }, repeats)  # fmt: skip
    kind = "recompute" if recompute else "a job with graphs"
    each = {way: size / (repeats + 1) for way, size in moved.items()}
    taken = {way: size / rates[way] for way, size in each.items()}
    yield Row(
        f"states that take turns, {kind}",
        f"{each[IN] / 2**20:.1f} MiB in, {each[OUT] / 2**20:.1f} MiB out, run of "
        f"{times['slots']:.2f} s, resident {times['resident']:.2f} s",
        "some are copied", min(each.values()) > 0,
    )  # fmt: skip
    ratio, whole = times["slots"] / times["resident"], max(1e-9, sum(taken.values()))
    share = 1 - max(0.0, times["slots"] - times["resident"]) / whole
    rows = (
        (f"slots against resident, {kind}", f"{ratio:.2f}x", "<= 1.1x", ratio <= 1.1),
        (f"copies hidden, {kind}", f"{100 * share:.0f} % of {1e3 * whole:.1f} ms", ">= 95 %",
         share >= 0.95),
    )  # fmt: skip
    for row in rows:
        judged = sizes.row(*row)
        if times["resident"] < max(taken.values()):
            judged = judged._replace(wanted="blocks that take longer than copies", holds=None)
        yield judged
