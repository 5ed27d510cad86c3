"""Measures what the blocks of a job array take and keep: trainer's jobs in, `Profile` out."""

from __future__ import annotations

import platform
import re
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from optsched.arraypipe.distributed.mailbox import Capacity, Post
from optsched.arraypipe.distributed.transport import GlooLinks
from optsched.arraypipe.job import Job
from optsched.arraypipe.memory.cuda_engine import link_speed
from optsched.arraypipe.memory.stage_bytes import (
    boundary_bytes,
    gradients_bytes,
    parameters_bytes,
    saved_bytes,
    state_bytes,
)
from optsched.arraypipe.model.checks import check_sibling, shapes_of
from optsched.arraypipe.plan.plan import compile, routes
from optsched.arraypipe.plan.segments import Segment, Walk
from optsched.arraypipe.profile.document import (
    KINDS,
    BlockEntry,
    DeviceEntry,
    Link,
    Links,
    Profile,
    ProfiledJob,
    StageEntry,
    Times,
    UpdateEntry,
)
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.losses import Criterion
from optsched.arraypipe.runtime.stages import fresh_model, fresh_stages
from optsched.arraypipe.runtime.state import JobRun
from optsched.arraypipe.runtime.types import tensors_of
from optsched.arraypipe.runtime.worker import Memory, Worker
from optsched.arraypipe.trainer import ArrayTrainer
from optsched.errors import InputError
from optsched.io.values import integer
from optsched.pipelines import one_f_one_b
from optsched.problems.jobarray.problem import JobArray
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe.job import Tensors
    from optsched.arraypipe.model.checks import Shapes
    from optsched.arraypipe.runtime.state import JobStage


T = TypeVar("T")

WARM_UPS: Final = 3
LEAST_REPEATS: Final = 10
MOST_REPEATS: Final = 50
PATIENCE_S: Final = 10.0
"""Time after which cases that scatter are left as they are."""

_TOLD: Final = 5  # cases that a warning names
_COST_FREE: Final = (
    "params", "param_names", "lr", "initial_lr", "betas", "eps", "decoupled_weight_decay",
)  # fmt: skip
_CYCLES: Final = 48  # that show what a block costs; the first quarter warms up
_MOST_STAGES: Final = 4


def measure(
    trainer: ArrayTrainer,
    devices: Sequence[torch.device],
    *,
    sizes: Sequence[int] | None = None,
    repeats: int = LEAST_REPEATS,
) -> Profile:
    """Measure forward, backward, recompute and update of every stage, and the bytes they keep.

    Blocks are measured on the first device; the link is the one between the first two. Neither the
    trainer nor its models change.
    """
    _check(sizes, repeats)
    device = devices[0]
    with torch.cuda.device(device) if on_gpu(device) else nullcontext():
        bench = _Bench(trainer, device, None if sizes is None else sorted(set(sizes)))
        for chain in bench.chains:
            chain.weigh()
        _repeat([*bench.chains, *bench.updaters.values()], repeats)
    profile = Profile(
        device=_device(device, len(trainer.stages)),
        stages=bench.stage_entries(),
        jobs=tuple(bench.jobs),
        blocks=tuple(entry for chain in bench.chains for entry in chain.entries()),
        updates=tuple(entry for one in bench.updaters.values() for entry in one.entries()),
        links=measure_links(devices),
    )
    if noisy := profile.noisy():
        more = f" (and {len(noisy) - _TOLD} more)" if len(noisy) > _TOLD else ""
        warnings.warn(
            "times that scatter; is the machine busy with something else? "
            + "; ".join(noisy[:_TOLD])
            + more,
            stacklevel=3,
        )
    return profile


def _check(sizes: Sequence[int] | None, repeats: int) -> None:
    integer("repeats", repeats, LEAST_REPEATS)
    if sizes is None:
        return
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__len__") or not len(sizes):
        raise InputError(f"sizes: expected a list of micro-batch sizes, got {sizes!r:.60}")
    for k, size in enumerate(sizes):
        integer(f"sizes[{k}]", size, 1)


@dataclass(eq=False)
class Case:
    """One block that is timed."""

    times_ns: list[int] = field(default_factory=list)
    launches_ns: list[int] = field(default_factory=list)  # of the host, on a GPU
    pending: list[tuple[Any, Any]] = field(default_factory=list)  # events of its stream

    def timed(self, call: Callable[..., T], stage: JobStage, *given: Any) -> T:
        """Call a function and note what it took: on a GPU between two events of its stream."""
        began_ns = perf_counter_ns()
        if not on_gpu(stage.device):
            made = call(stage, *given)
            self.times_ns.append(perf_counter_ns() - began_ns)
            return made
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        made = call(stage, *given)
        end.record()
        self.launches_ns.append(perf_counter_ns() - began_ns)
        self.pending.append((start, end))
        return made

    def settle(self) -> None:
        """Wait for the events and read them."""
        for start, end in self.pending:
            end.synchronize()
            self.times_ns.append(round(1e6 * start.elapsed_time(end)))
        self.pending.clear()

    def spread(self) -> dict[str, int]:
        """The fields of `Times`."""
        low, _, high = quantiles(self.times_ns, n=4, method="inclusive")
        return {
            "n": len(self.times_ns),
            "median_ns": max(1, round(median(self.times_ns))),
            "iqr_ns": round(high - low),
            "minimum_ns": min(self.times_ns),
            "launch_ns": round(median(self.launches_ns or [0])),
        }

    @property
    def noisy(self) -> bool:
        """Whether its median is doubtful."""
        return Times(**self.spread()).noisy


@dataclass(eq=False)
class Chain:
    """All stages at one micro-batch size and precision, on real data."""

    stages: list[JobStage]
    batch: int
    dtype: str
    x: Tensors
    end: Criterion
    accumulates: bool  # whether a job with several micro-batches has this size
    bytes: list[dict[str, int]] = field(default_factory=list)  # of every stage

    def __post_init__(self) -> None:
        self.cases = {(kind, s.index): Case() for kind in "FBR" for s in self.stages}

    def run(self) -> None:
        """Forward, recompute and backward of all stages once."""
        xs: list[Any] = [tuple(t.clone() for t in self.x)]  # stages may change it
        for stage in self.stages:
            given = stage, 0, xs[-1], 1, self._end(stage), False
            xs.append(self.cases["F", stage.index].timed(blocks.forward, *given))
        for stage, x in zip(self.stages, xs, strict=False):
            blocks.forward(stage, 0, x, 1, self._end(stage), True)
            self.cases["R", stage.index].timed(blocks.recompute, stage, 0)
        gradients: Any = None  # of the recomputed graph, which is an equal one
        for stage in reversed(self.stages):
            for _, parameter in stage.parameters:  # to add to, or none, as in training
                if not self.accumulates:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            case = self.cases["B", stage.index]
            gradients = case.timed(blocks.backward, stage, 0, gradients)

    def weigh(self) -> None:
        """Bytes of boundaries and of what is kept; nothing is timed."""
        x = self.x
        for stage in self.stages:
            kept, inputs, x = saved_bytes(stage, x, self._end(stage))
            output = boundary_bytes(() if stage.last else x)
            self.bytes.append({"saved_bytes": kept, "input_bytes": inputs, "output_bytes": output})
        gradients: Any = None
        for stage in reversed(self.stages):
            self.bytes[stage.index]["gradient_bytes"] = boundary_bytes(gradients or ())
            gradients = blocks.backward(stage, 0, gradients)

    def entries(self) -> Iterator[BlockEntry]:
        """What was measured of every stage."""
        for s, known in enumerate(self.bytes):
            more: dict[str, Any] = {"stage": s, "batch": self.batch, "dtype": self.dtype, **known}
            for kind in "FBR":
                more[KINDS[kind]] = Times(**self.cases[kind, s].spread())
            yield BlockEntry(**more)

    def _end(self, stage: JobStage) -> Criterion | None:
        return self.end if stage.last else None


@dataclass(eq=False)
class Updater:
    """The update of every stage by one optimizer."""

    stages: list[JobStage]
    job: Job
    optimizer: str

    def __post_init__(self) -> None:
        self.cases = {("U", s.index): Case() for s in self.stages}
        self.norm = torch.ones((), device=self.stages[0].device)

    def run(self) -> None:
        """One step of every stage."""
        for stage in self.stages:
            for _, parameter in stage.parameters:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 1e-3)
            case = self.cases["U", stage.index]
            case.timed(blocks.update, stage, self.job.clip_norm, self.norm, 1.0)

    def entries(self) -> Iterator[UpdateEntry]:
        """What was measured of every stage."""
        dtype: Any = self.job.precision
        for (_, s), case in self.cases.items():
            yield UpdateEntry(stage=s, optimizer=self.optimizer, dtype=dtype, **case.spread())


def _repeat(parts: Sequence[Chain | Updater], repeats: int) -> None:
    """Warm up, repeat all in turn, and go on with those that scatter."""
    began_s = 0.0
    for n in range(-WARM_UPS, max(repeats, MOST_REPEATS)):
        if n == 0:
            for part in parts:
                part.cases.update((key, Case()) for key in part.cases)
        if n == repeats:
            began_s = perf_counter()
        if n >= repeats:
            parts = [part for part in parts if any(c.noisy for c in part.cases.values())]
            if not parts or perf_counter() - began_s > PATIENCE_S:
                return
        first = n % len(parts)  # another one every time: what runs after an update is slower
        for part in (*parts[first:], *parts[:first]):
            part.run()
        for part in parts:
            for case in part.cases.values():
                case.settle()


class _Bench:
    """Everything that is measured: a model per precision and optimizer, and batches."""

    def __init__(
        self, trainer: ArrayTrainer, device: torch.device, sizes: Sequence[int] | None
    ) -> None:
        self.trainer, self.device = trainer, device
        self.jobs: list[ProfiledJob] = []
        self.chains: list[Chain] = []
        self.updaters: dict[tuple[str, str], Updater] = {}  # by optimizer and precision
        models: dict[str, list[JobStage]] = {}
        first: Shapes = {}
        for j, (job, title) in enumerate(zip(trainer.jobs, trainer.titles, strict=True)):
            model = fresh_model(trainer.build_model, job)
            first = first or shapes_of(model)
            check_sibling(shapes_of(model), title, first, trainer.titles[0])
            where = [device] * len(trainer.stages)
            stages = fresh_stages(model, trainer.stages, job, j, title, where)
            together = job.clip_norm is not None or any(stage.needs_metric for stage in stages)
            for stage in stages:  # one with a fixed number of steps would run out of them
                stage.scheduler = None
            label = _optimizer_label(stages) + (" clipped" if job.clip_norm is not None else "")
            self.jobs.append(
                ProfiledJob(
                    name=title, batch_size=job.batch_size, microbatches=job.microbatches,
                    recompute=job.recompute, precision=job.precision,  # type: ignore[arg-type]
                    optimizer=label, update="global" if together else "fused",
                )
            )  # fmt: skip
            models.setdefault(job.precision, stages)
            self.updaters.setdefault((label, job.precision), Updater(stages, job, label))
        for precision, stages in models.items():
            self._add_chains(precision, stages, sizes)

    def stage_entries(self) -> tuple[StageEntry, ...]:
        """Bytes of every stage; those of the largest precision where jobs differ."""
        rows = [updater.stages for updater in self.updaters.values()]
        of_jobs = [self.updaters[job.optimizer, job.precision].stages for job in self.jobs]
        names = [name or f"stage{s}" for s, name in enumerate(self.trainer.cuts)]
        return tuple(
            StageEntry(
                name=name,
                parameters_bytes=max(parameters_bytes(row[s]) for row in rows),
                gradients_bytes=max(gradients_bytes(row[s]) for row in rows),
                state=tuple(state_bytes(stages[s]) for stages in of_jobs),
            )
            for s, name in enumerate(names)
        )

    def _add_chains(
        self, precision: str, stages: list[JobStage], sizes: Sequence[int] | None
    ) -> None:
        """A chain per size, each with the batch of the first job that has it."""
        trainer = self.trainer
        rows = zip(trainer.jobs, trainer.titles, strict=True)
        of = [(job, title) for job, title in rows if job.precision == precision]
        cases: dict[int, tuple[Job, str]] = {}
        accumulating = set()
        for job, title in of:
            size = -(-job.batch_size // job.microbatches)
            cases.setdefault(size, (job, title))
            accumulating |= {size} if job.microbatches > 1 else set()
        if sizes is not None:
            job, title = of[0]
            cases = {n: (replace(job, batch_size=n, microbatches=1), title) for n in sizes}
        shapes: dict[Any, int] = {}
        for size, (job, title) in sorted(cases.items()):
            feed = Feed(trainer.data, job, title, 0)
            feed.draw(0)
            x = feed.input(0, self.device)
            row = tensors_of(x, "data: the input")
            shape = tuple(t.shape for t in row)
            if sizes is not None and shapes.setdefault(shape, size) != size:
                raise InputError(
                    f"sizes: data gives inputs of one shape for batch sizes {shapes[shape]} and "
                    f"{size}; it must follow job.batch_size"
                )
            end = Criterion(trainer.loss, feed.target(0, self.device), 1.0)
            for stage in stages:
                x = blocks.rehearse(stage, x, end if stage.last else None)
            self.chains.append(Chain(stages, size, precision, row, end, size in accumulating))


def _optimizer_label(stages: Sequence[JobStage]) -> str:
    """Class of the optimizer and the settings that change what a step costs, not the numbers."""
    labels: Counter[str] = Counter()
    for stage in stages:
        if stage.optimizer is None:
            continue
        settings = {}
        for group in stage.optimizer.param_groups:
            for key, value in group.items():
                free = key in _COST_FREE or key not in stage.optimizer.defaults
                if free or value is None or value is False or value == 0:
                    continue
                whole = isinstance(value, int) and not isinstance(value, bool)
                settings[key] = f"{key}={value}" if whole or isinstance(value, str) else key
        inner = ", ".join(settings[key] for key in sorted(settings))
        labels[f"{type(stage.optimizer).__name__}({inner})"[:300]] += 1
    return " + ".join(labels)[:900]


def measure_links(devices: Sequence[torch.device]) -> Links:
    """Between two GPUs, or within the memory of one or of the CPU; and from the host."""
    first, second = devices[0], devices[min(1, len(devices) - 1)]
    found = {}
    for name, pair in {"activation": (first, second), "host": (torch.device("cpu"), first)}.items():
        bandwidth, latency_ns = link_speed(*pair)
        found[name] = Link(bandwidth=max(1, round(bandwidth)), latency_ns=round(latency_ns))
    return Links(**found)


def _device(device: torch.device, n_stages: int) -> DeviceEntry:
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return DeviceEntry(
        name=properties.name if properties is not None else _processor(),
        kind="cuda" if cuda else "cpu",
        memory_bytes=properties.total_memory if properties is not None else 0,
        threads=torch.get_num_threads(),
        block_overhead_ns=0 if cuda else block_overhead(n_stages),
        torch=str(torch.__version__),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        optsched=__version__,
    )


def _processor() -> str:
    """Name of the CPU, as far as the system tells."""
    known = Path("/proc/cpuinfo")
    text = known.read_text(encoding="utf-8", errors="replace") if known.exists() else ""
    named = re.search(r"(?m)^model name\s*: *(.+)$", text)
    return (named[1] if named else platform.processor() or platform.machine() or "CPU")[:200]


# what a block costs beside its computation


class _Loopback(GlooLinks):
    """Links of one rank to others that are in the same process."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.timeout, self.rank, self.size = timedelta(seconds=60), rank, size
        self.group = dist.ProcessGroupGloo(store, rank, size, self.timeout)


def block_overhead(n_stages: int) -> int:
    """CPU nanoseconds of the process backend for one block, its messages included.

    One job is trained by real workers, one a stage, that send over gloo to each other in this
    process; its stages are so small that nearly all is overhead, and what they take by themselves
    is subtracted. CPU time, because a device that has enough to do never waits for a message.
    """
    n = min(n_stages, _MOST_STAGES)
    job = Job(0, 1, partial(torch.optim.SGD, lr=0.1))
    trainer = ArrayTrainer(
        lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(n))),
        lambda job, start: iter(lambda: (torch.zeros(1, 1), torch.zeros(1, 1)), None),
        jobs=[job], stages=[*range(1, n)] or 1, loss=nn.functional.mse_loss,
    )  # fmt: skip
    bench = _Bench(trainer, torch.device("cpu"), None)
    parts: list[Chain | Updater] = [*bench.chains, *bench.updaters.values()]
    _repeat(parts, LEAST_REPEATS)
    cases = {key: case for part in parts for key, case in part.cases.items()}
    alone: float = sum(median(case.times_ns) for (kind, _), case in cases.items() if kind != "R")
    model, feed = fresh_model(trainer.build_model, job), Feed(trainer.data, job, "job", 0)
    run = JobRun(job, 0, "job", model, bench.chains[0].stages, 0, _CYCLES, feed)
    quiet: Any = lambda *_: None  # noqa: E731
    worker = Worker([run], Memory([run]), nn.functional.mse_loss, quiet, quiet)
    capacity = Capacity()
    capacity.measure(run, worker)
    plan = compile(one_f_one_b(JobArray([[1] * n], [[2] * n])))
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(n) as pool:  # each waits for the others
        links = [*pool.map(partial(_Loopback, store, size=n), range(n))]
    try:
        posts = [Post(one, capacity.of, quiet) for one in links]
        own = _cycle(Segment(plan, routes(plan), (0,), [0], [_CYCLES]), worker, posts)
    finally:
        for one in links:
            one.group = None
    return max(0, round((own - alone) / len(plan.blocks)))


def _cycle(segment: Segment, worker: Worker, posts: Sequence[Post]) -> float:
    """Median CPU time of a cycle as ranks run it, one after the other."""
    rows, channel_of = segment.routes, segment.routes.channel_of
    mail: dict[int, Any] = {}
    times = [thread_time_ns()]
    for post in posts:
        post.open(segment, 0, 2)
    for now in Walk(segment):
        post = posts[segment.plan.blocks[now.operation].device]
        post.post(now.cycle)
        received = {
            k: mail.pop(k) if channel_of[k] < 0 else post.receive(k, now.iteration)
            for k in rows.inputs[now.operation]
        }
        sent = worker.execute(segment, now, received)
        away = {k: sent.pop(k) for k in rows.outputs[now.operation] if channel_of[k] >= 0}
        mail.update(sent)
        post.ended(now, away)
        times.append(thread_time_ns())
    for post in posts:
        post.flush()
        post.port.close()
    spans = [later - one for one, later in pairwise(times[:: len(segment.plan.blocks)])]
    return median(spans[len(spans) // 4 :])
