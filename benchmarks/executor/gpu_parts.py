"""The checks of `gpu_check`: bits, waits, memory, times, ranks.

Kernels of small models take microseconds: a stream is done before the next block is launched, and
a missing wait would not show. So most runs of the part ``exact`` have random sleeps on the GPU.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

import torch
import torch.utils.deterministic
from torch import Tensor, nn
from torch.nn import functional

import optsched
from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Callback, Job, RunConfig, random_schedule
from optsched.arraypipe.memory.budget import reserved
from optsched.arraypipe.memory.cuda_engine import CudaEngine
from optsched.arraypipe.memory.state import flat_bytes
from optsched.arraypipe.memory.transfers import IN, OUT, CopyEngine
from optsched.arraypipe.runtime import blocks, environment
from optsched.arraypipe.runtime.stages import waits_for_all
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optsched.arraypipe import RunResult

STAGES, STEPS, CLASSES = 4, 3, 10
_CYCLES: Final = 1.8e6  # of a GPU in a millisecond, more or less


class Row(NamedTuple):
    """One line of the table."""

    name: str
    value: str
    criterion: str = ""
    holds: bool | None = None  # None: not judged


Check = tuple[str, "Callable[[], Iterable[Row]]"]
"""A name, and what gives rows."""


@dataclass(frozen=True)
class Sizes:
    """Where everything runs, and whether only the checks themselves are tested."""

    device: torch.device
    gpus: int = 1
    tiny: bool = False

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return environment.on_gpu(self.device)

    def row(self, name: str, value: str, criterion: str, holds: bool) -> Row:
        """A criterion that means something on GPUs only."""
        return Row(name, value, criterion, holds if self.cuda else None)


def kernels(exact: bool) -> None:
    """Choose kernels that give the same bits twice, or leave the choice to torch."""
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = exact
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


# models, jobs, orders


def images(sizes: Sizes) -> nn.Module:
    """Convolutions, both kinds of normalisation, dropout and layers that work in place."""
    c, side = (4, 6) if sizes.tiny else (32, 16)
    return nn.Sequential(
        nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.GELU(), nn.Flatten(),
        nn.Linear(c * side**2, 4 * c), nn.LayerNorm(4 * c), nn.ReLU(inplace=True), nn.Dropout(0.5),
        nn.Linear(4 * c, 4 * c), nn.Linear(4 * c, CLASSES),
    )  # fmt: skip


def pictures(sizes: Sizes, job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches by (seed, iteration) alone."""
    side = 6 if sizes.tiny else 16
    for iteration in range(start, 10**6):
        draw = torch.Generator().manual_seed(1000 * job.seed + iteration)
        x = torch.randn(job.batch_size, 3, side, side, generator=draw)
        yield x, torch.randint(0, CLASSES, (job.batch_size,), generator=draw)


def trainer(sizes: Sizes, jobs: Sequence[Job], **how: Any) -> ArrayTrainer:
    """Of images; a logical device per stage."""
    return _array(partial(images, sizes), partial(pictures, sizes), jobs, sizes,
                  loss=functional.cross_entropy, stages=[4, 8, 12], **how)  # fmt: skip


def stack(sizes: Sizes, jobs: Sequence[Job], **how: Any) -> ArrayTrainer:
    """Of two linear layers a stage; the same batch for ever, so that data cost nothing."""
    width = 32 if sizes.tiny else 1984  # states a little smaller than a power of two in MiB
    made: dict[int, Tensor] = {}

    def build() -> nn.Module:
        pairs = ((nn.Linear(width, width), nn.ReLU()) for _ in range(2 * STAGES))
        return nn.Sequential(*(layer for pair in pairs for layer in pair))

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        if job.seed not in made:
            made[job.seed] = torch.randn(job.batch_size, width).to(sizes.device)
        while True:
            yield made[job.seed], made[job.seed]

    return _array(build, data, jobs, sizes, loss=functional.mse_loss, stages=[4, 8, 12], **how)


def _array(build: Any, data: Any, jobs: Sequence[Job], sizes: Sizes, **how: Any) -> ArrayTrainer:
    config = RunConfig(
        backend=how.pop("backend", "inline"), memory=how.pop("memory", None),
        device=sizes.device, on_error="raise", check=0, verbose=False, timeout=60,
    )  # fmt: skip
    return ArrayTrainer(build, data, **how).with_jobs(jobs, config)


class Stops(Callback):
    """Stops the first job when its first loss is known."""

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Stop it."""
        if job.seed == 0:
            job.stop()


def run(array: ArrayTrainer, schedule: Any, steps: int, **how: Any) -> RunResult:
    """Train by a schedule; `how` are arguments of `fit` and fields of `RunConfig`."""
    fields = {key: how.pop(key) for key in ("on_error", "every") if key in how}
    config = replace(array.config, **fields)
    return array.fit(array.jobs, steps, schedule=schedule, config=config, **how).gather()


def order(jobs: Sequence[Job], seed: int, place: Sequence[int] | None = None) -> Any:
    """A random order; in every second one recomputes have blocks of their own."""
    together = [j for j, job in enumerate(jobs) if waits_for_all(job)]
    blocks_of = [j for j, job in enumerate(jobs) if job.recompute and seed % 2 == 0]
    return random_schedule(
        [job.microbatches for job in jobs], STAGES, place=place, update=together,
        together=together, recompute=blocks_of, seed=seed,
    )  # fmt: skip


def adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW as torch has it by default on the device."""
    return torch.optim.AdamW(named, lr=1e-3, weight_decay=0.01)


def sgd(named: Any) -> torch.optim.Optimizer:
    """Momentum SGD."""
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


JOBS = [Job(0, 8, adamw, microbatches=2), Job(1, 11, sgd), Job(2, 8, sgd, microbatches=2)]
CASES: dict[str, dict[str, Any]] = {
    "dropout, BatchNorm": {},
    "recompute": {"recompute": True},
    "clipping": {"clip_norm": 0.1},
    "bf16": {"precision": "bf16"},
    "amp-fp16": {"precision": "amp-fp16"},
}


# bits and waits


def exactness(sizes: Sizes) -> list[Check]:
    """Everything; the cases in several orders, with sleeps in all but the first."""
    checks: list[Check] = [(name, partial(equal, sizes, name)) for name in CASES]
    checks += [(c.__name__, partial(c, sizes)) for c in (slots, stopped, resumed, crowded)]
    return [*checks, ("no wait for states", partial(mutant, sizes))]


def found_in(
    sizes: Sizes, jobs: Sequence[Job], seeds: Sequence[int], memory: int | None = None, **how: Any
) -> list[str]:
    """Train in random orders; every tensor that differs from training alone."""
    found, sleeps = [], how.pop("sleeps", None)
    array = trainer(sizes, jobs, memory=memory)
    for seed in seeds:
        with sleeping(sizes, sleeps or seed):
            result = run(array, order(jobs, seed), STEPS, **how)
        found += [f"order {seed}: {line}" for line in differing(array, result)]
    return found


def differing(array: ArrayTrainer, result: RunResult, first: int = 0) -> list[str]:
    """Differences of all jobs that have not failed; none may be without a loss."""
    found = []
    for j, got in enumerate(result.trained):
        if array.jobs[j].status != "failed":
            alone = array.train_alone(j, first + len(got.losses))
            alone = replace(alone, losses=alone.losses[first:])
            lines = differences(got, alone) or ([] if got.losses else ["no iteration was run"])
            found += [f"job {j}: {line}" for line in lines]
    return found


def exact_row(name: str, found: list[str], note: str = "") -> Row:
    """A row that fails with the first difference."""
    value = f"equal{note}" if not found else f"{len(found)} differ; {found[0]}"
    return Row(f"exact: {name}", value, "equal to training alone", not found)


def equal(sizes: Sizes, name: str) -> Iterator[Row]:
    """A case in random orders."""
    jobs = [replace(job, **CASES[name]) for job in JOBS]
    yield exact_row(name, found_in(sizes, jobs, range(2 if sizes.tiny else 5)))


@contextmanager
def sleeping(sizes: Sizes, seed: int) -> Iterator[None]:
    """Sleep before blocks and copies of states; with seed 0 nowhere."""
    draw, engine_copy = random.Random(seed), CudaEngine.copy

    def late(function: Callable[..., Any], most_ms: float) -> Callable[..., Any]:
        def slept(*given: Any) -> Any:
            torch.cuda._sleep(int(draw.random() * most_ms * _CYCLES))  # type: ignore[no-untyped-call]
            return function(*given)

        return slept

    def copy(self: Any, direction: str, size: int, action: Any, *rest: Any) -> Any:
        return engine_copy(self, direction, size, late(action, 1.0), *rest)

    with ExitStack() as patches:
        if sizes.cuda and seed:
            patches.enter_context(patch.object(CudaEngine, "copy", copy))
            for name in ("forward", "recompute", "backward", "update"):
                function = late(getattr(blocks, name), 3.0)
                patches.enter_context(patch.object(blocks, name, function))
        yield


def few_slots(sizes: Sizes) -> tuple[list[Job], int]:
    """Jobs whose states do not all fit in so many bytes a device, found by trying."""
    jobs = [Job(j, 8, adamw, precision="bf16", recompute=True) for j in range(3)]
    low, high = 0, 2**34
    while high - low > max(1000, low // 50):  # the least that is not refused
        memory = (low + high) // 2
        try:
            run(trainer(sizes, jobs, memory=memory), order(jobs, 3), 1)
            high = memory
        except InputError:
            low = memory
    return jobs, high


def slots(sizes: Sizes) -> Iterator[Row]:
    """With the least memory and a little more."""
    jobs, least = few_slots(sizes)
    for factor in (1.0, 1.1):
        with copied() as moved:
            found = found_in(sizes, jobs, [3], int(factor * least))
        row = exact_row(f"slots, {factor:.1f} of the least memory", found)
        yield row._replace(value=f"{row.value}, {sum(moved) / 2**20:.2f} MiB copied")


@contextmanager
def copied() -> Iterator[list[int]]:
    """Bytes of all copies of states in the meantime."""
    found: list[int] = []
    with ExitStack() as patches:
        for engine in (CudaEngine, CopyEngine):

            def copy(self: Any, way: str, size: int, *rest: Any, of: Any = engine.copy) -> Any:
                found.append(size)
                return of(self, way, size, *rest)

            patches.enter_context(patch.object(engine, "copy", copy))
        yield found


def stopped(sizes: Sizes) -> Iterator[Row]:
    """One job stops early, on a GPU one iteration later; the others do not notice."""
    jobs = [replace(job) for job in JOBS]
    array = trainer(sizes, jobs)

    with sleeping(sizes, 1):
        result = run(array, order(jobs, 7), 5, callbacks=[Stops()])
    found = differing(array, result)
    if len(result.trained[0].losses) != (2 if sizes.cuda else 1):
        found.append(f"the stopped job did {len(result.trained[0].losses)} iterations")
    yield exact_row("early stop", found)


def resumed(sizes: Sizes) -> Iterator[Row]:
    """Two iterations with checkpoints, and two more from them."""
    jobs = [*JOBS[:2], replace(JOBS[2], precision="bf16")]
    with TemporaryDirectory() as folder, sleeping(sizes, 1):
        how: dict[str, Any] = {"checkpoint": folder, "every": 1}
        run(trainer(sizes, jobs), order(jobs, 1), 2, **how)
        array = trainer(sizes, jobs)
        result = run(array, order(jobs, 2), 4, resume=True, **how)
    yield exact_row("checkpoints, resumed", differing(array, result, 2))


def crowded(sizes: Sizes) -> Iterator[Row]:
    """A job asks for more memory than there is in its second iteration; the others go on."""
    jobs, many = [*(replace(job) for job in JOBS), Job(9, 8, sgd)], 2**36

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for iteration, (x, target) in enumerate(pictures(sizes, job, start), start):
            if job.seed == 9 and iteration == 1:
                yield x[:1].expand(many, -1, -1, -1), target[:1].expand(many)
            else:
                yield x, target

    array = trainer(sizes, jobs)
    array.data = data
    found = differing(array, run(array, order(jobs, 5), STEPS, on_error="continue"))
    if jobs[3].status != "failed":
        found.append(f"the greedy job is {jobs[3].status}")
    yield exact_row("out of memory", found, f"; {jobs[3].error!s:.70}")


def mutant(sizes: Sizes) -> Iterator[Row]:
    """The sleeps must show that blocks do not wait for copies of their states."""
    jobs, least = few_slots(sizes)
    seed, found = 0, list[str]()
    with patch.object(CudaEngine, "wait", lambda self, events: None):
        while not found and seed < (4 if sizes.tiny else 9):
            seed += 1
            try:
                found = found_in(sizes, jobs, [3], least, sleeps=seed)
            except Exception as error:  # by a loss that is no number
                found = [f"{type(error).__name__}: {error}"]
    value = f"with seed {seed}: {found[0]:.70}" if found else f"equal with {seed} seeds"
    yield sizes.row("exact: no wait for states", value, "is found", bool(found))


# memory and times


def memory(sizes: Sizes) -> list[Check]:
    """All rows about memory."""
    return [("copies of the engine", partial(bandwidth, sizes)), ("slots", partial(hidden, sizes))]


def bandwidth(sizes: Sizes) -> Iterator[Row]:
    """Bytes a second of the engine, in chunks, against one plain copy of page-locked memory."""
    size, cpu = 2**20 if sizes.tiny else 2**30, torch.device("cpu")
    (host,), (device,) = (
        flat_bytes([size], cpu, sizes.cuda),
        flat_bytes([size], sizes.device, False),
    )
    engine = CudaEngine(sizes.device) if sizes.cuda else CopyEngine()

    def timed(parts: list[tuple[Tensor, Tensor]], way: str) -> float:
        began = time.perf_counter()
        for target, source in parts:
            action = partial(target.copy_, source, non_blocking=True)
            engine.copy(way, source.numel(), action, ()) if way else action()
        wait(sizes)
        return time.perf_counter() - began

    for way, target, source in ((IN, device, host), (OUT, host, device)):
        chunks = list(zip(target.chunk(6), source.chunk(6), strict=True))
        plain, cut = (
            statistics.median(timed(parts, name) for _ in range(5))
            for parts, name in (([(target, source)], ""), (chunks, way))
        )
        value = f"{size / cut / 1e9:.1f} GB/s, plain {size / plain / 1e9:.1f}"
        row = (f"copies of the engine, {way}", value, ">= 90 % of a plain copy", cut <= plain / 0.9)
        yield sizes.row(*row)


def hidden(sizes: Sizes) -> Iterator[Row]:
    """States in slots against the same jobs resident, and the peak against the budget."""
    jobs = [Job(j, 16 if sizes.tiny else 8192, adamw, recompute=True) for j in range(6)]
    schedule, resident = random_schedule([1] * 6, STAGES, seed=4), stack(sizes, jobs)
    times = {"resident": _seconds(resident, schedule)}
    low, high = 0, 2**37  # the least memory in which it runs
    while high - low > max(2000, low // 20):
        middle = (low + high) // 2
        try:
            run(stack(sizes, jobs, memory=middle), schedule, 1)
            high = middle
        except InputError:
            low = middle
    if sizes.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(sizes.device)
    with copied() as moved:
        times["slots"] = _seconds(stack(sizes, jobs, memory=2 * high), schedule)
    if sizes.cuda:
        kept, allowed = torch.cuda.max_memory_reserved(sizes.device), STAGES * 2 * high
        kept += STAGES * reserved(sizes.device, STAGES)
        value = f"{kept / 2**30:.2f} of {allowed / 2**30:.2f} GiB"
        yield Row("peak memory", value, "<= budget", kept <= allowed)
    ratio = times["slots"] / times["resident"]
    value = f"{ratio:.2f}x with {sum(moved) / 2**30:.2f} GiB copied"
    yield sizes.row("slots against resident", value, "<= 1.1x", ratio <= 1.1 and bool(moved))


def speed(sizes: Sizes) -> list[Check]:
    """All rows about time."""
    return [("switch", partial(switches, sizes)), ("period", partial(period, sizes))]


def switches(sizes: Sizes) -> Iterator[Row]:
    """Host time of a block that does nothing."""
    tiny, answer = replace(sizes, tiny=True), (torch.zeros((), device=sizes.device),)
    array = stack(tiny, [Job(j, 2, adamw) for j in range(4)])
    schedule, steps = random_schedule([1] * 4, STAGES), 40

    class Nothing:
        roots, branches = answer, None

    def forward(stage: Any, microbatch: int, *_: object) -> tuple[Tensor, ...]:
        stage.kept[microbatch] = Nothing
        return answer

    stubs: dict[str, Any] = {"backward": lambda *_: answer, "update": lambda *_: None}
    with patch.multiple(blocks, forward=forward, **stubs):
        run(array, schedule, 2)
        began = time.perf_counter()
        run(array, schedule, steps)
        spent = time.perf_counter() - began
    each = spent / (schedule.n_operations * steps) * 1e6
    yield sizes.row(
        "block that does nothing, host time", f"{each:.1f} us", "<= 100 us", each <= 100
    )


def period(sizes: Sizes) -> Iterator[Row]:
    """The period of a profiled problem, solved, against the measured one, and the gaps in it."""
    array = stack(sizes, [Job(j, 16 if sizes.tiny else 8192, adamw) for j in range(4)])
    problem = array.problem(array.profile(), place=[0] * STAGES)
    schedule = optsched.solve(problem, time_limit=2).schedule
    assert schedule is not None
    result = run(array, schedule, 8)
    trace, report = result.trace, result.report
    assert trace.start is not None and report.measured_ns and report.predicted_ns
    gaps = trace.start[1:] - (trace.start + trace.duration)[:-1]
    gap = float(statistics.median(gaps.tolist())) / 1e3
    yield sizes.row("gap on the device between blocks", f"{gap:.1f} us", "<= 20 us", gap <= 20)
    error = report.measured_ns / report.predicted_ns - 1
    value = f"measured {report.measured_ns / 1e6:.2f} ms, {100 * error:+.1f} %"
    yield sizes.row("period", value, "within 10 % of the prediction", abs(error) <= 0.1)


def _seconds(array: ArrayTrainer, schedule: Any) -> float:
    """From the start of the first block to the end of the last, on the device's clock."""
    return run(array, schedule, 8).report.wall_ns / 1e9


def wait(sizes: Sizes) -> None:
    """Until the device has nothing left to do."""
    if sizes.cuda:
        torch.cuda.synchronize(sizes.device)


# ranks


def ranks(sizes: Sizes) -> list[Check]:
    """Two processes, each with a GPU; on CPUs over gloo."""
    enough = sizes.gpus > 1 or not sizes.cuda
    return [("ranks", partial(started, sizes))] if enough else []


def started(sizes: Sizes) -> Iterator[Row]:
    """Train on two ranks in a process group of `torchrun`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", __spec__.name, "cuda" if sizes.cuda else "cpu"], timeout=150,
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("row\t")]
    for _, name, found in rows:
        yield exact_row(f"2 ranks, {name}", [found] if found else [])
    if done.returncode or not rows:
        last = next((x for x in done.stderr.splitlines() if "Error: " in x), "no output")
        yield Row("2 ranks", f"{done.returncode}: {last:.200}", "ends with 0", False)


def on_rank(kind: str) -> None:
    """What every rank runs; rank 0 prints rows."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    sizes = Sizes(torch.device(kind, int(os.environ["LOCAL_RANK"])), 2, tiny=kind == "cpu")
    kernels(True)
    for name in ("recompute", "clipping"):
        jobs = [replace(job, **CASES[name]) for job in JOBS]
        array, found = trainer(sizes, jobs, backend="process"), []
        with sleeping(sizes, 1):
            result = run(array, order(jobs, 1, [0, 1, 0, 1]), STEPS)
        if rank == 0:
            found = differing(array, result)
            print("row", name, found[0] if found else "", sep="\t", flush=True)
    torch.distributed.destroy_process_group()


PARTS: dict[str, Callable[[Sizes], list[Check]]] = {
    "exact": exactness, "memory": memory, "speed": speed, "ranks": ranks
}  # fmt: skip

if __name__ == "__main__":
    on_rank(sys.argv[1])
