"""Measures what the blocks of a job array take and keep: trainer's jobs in, `Profile` out."""

from __future__ import annotations

import platform
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from optsched.arraypipe.memory.stage_bytes import (
    boundary_bytes,
    gradients_bytes,
    parameters_bytes,
    saved_bytes,
    state_bytes,
)
from optsched.arraypipe.model.checks import check_sibling, shapes_of
from optsched.arraypipe.profile.document import (
    NOISY,
    BlockEntry,
    BoundaryEntry,
    DeviceEntry,
    Profile,
    ProfiledJob,
    SavedEntry,
    StageEntry,
)
from optsched.arraypipe.profile.links import measure_links
from optsched.arraypipe.profile.overhead import block_overhead
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.stages import fresh_model, fresh_stages
from optsched.arraypipe.runtime.types import tensors_of
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optsched.arraypipe.job import Job, JobStage, Tensors
    from optsched.arraypipe.model.checks import Shapes
    from optsched.arraypipe.trainer import ArrayTrainer


T = TypeVar("T")


@dataclass(eq=False)
class Case:
    """One block that is timed: what it is, and its times in nanoseconds."""

    kind: str
    stage: int
    times: list[int] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)  # of the host, on a GPU

    @property
    def noisy(self) -> bool:
        """Whether its median is doubtful."""
        return iqr(self.times) > NOISY * median(self.times)


class Clock:
    """Times calls: on a GPU between two events of its stream, else on the host."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = on_gpu(device)
        self.pending: list[tuple[Case, Any, Any]] = []

    def timed(self, case: Case, call: Callable[..., T], *given: Any) -> T:
        """Call a function and note what it took."""
        began = perf_counter_ns()
        if self.gpu:
            start, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            start.record()
            made = call(*given)
            end.record()
            case.launches.append(perf_counter_ns() - began)
            self.pending.append((case, start, end))
            return made
        made = call(*given)
        case.times.append(perf_counter_ns() - began)
        return made

    def settle(self) -> None:
        """Wait for the device and read the events."""
        if self.pending:
            torch.cuda.synchronize()
        for case, start, end in self.pending:
            case.times.append(round(1e6 * start.elapsed_time(end)))
        self.pending.clear()


@dataclass(eq=False)
class Chain:
    """All stages at one micro-batch size and precision, on real data."""

    stages: list[JobStage]
    batch: int
    dtype: str
    x: Tensors
    end: blocks.Criterion
    accumulates: bool  # whether a job with several micro-batches has this size
    boundaries: list[BoundaryEntry] = field(default_factory=list)
    saved: list[SavedEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cases = {(k, s.index): Case(k, s.index) for k in "FRB" for s in self.stages}

    def run(self, clock: Clock) -> None:
        """Forward, recompute and backward of all stages once."""
        xs = [self.x]
        for stage in self.stages:
            case = self.cases["F", stage.index]
            xs.append(
                clock.timed(case, blocks.forward, stage, 0, xs[-1], 1, self._end(stage), False)
            )
        self._recompute(clock, xs)
        gradients: Any = None
        for stage in reversed(self.stages):
            self._prepare(stage)
            case = self.cases["B", stage.index]
            gradients = clock.timed(case, blocks.backward, stage, 0, gradients)

    def weigh(self) -> None:
        """Bytes of boundaries and of what is kept; nothing is timed."""
        x, outputs = self.x, []
        for stage in self.stages:
            kept, inputs, output = saved_bytes(stage, x, self._end(stage))
            outputs.append(boundary_bytes(() if stage.last else output))
            self.saved.append(
                SavedEntry(
                    stage=stage.index, batch=self.batch, dtype=self.dtype,  # type: ignore[arg-type]
                    bytes=kept, input_bytes=inputs,
                )
            )  # fmt: skip
            x = output
        gradients: Any = None
        for stage in reversed(self.stages):
            back = 0 if gradients is None else boundary_bytes(gradients)
            self.boundaries.append(
                BoundaryEntry(
                    stage=stage.index, batch=self.batch, dtype=self.dtype,  # type: ignore[arg-type]
                    bytes=outputs[stage.index], gradient_bytes=back,
                )
            )  # fmt: skip
            gradients = blocks.backward(stage, 0, gradients)
        self.boundaries.reverse()

    def _recompute(self, clock: Clock, xs: Sequence[Tensors]) -> None:
        """Time the recompute of every stage; its backward then uses that graph, an equal one."""
        for stage, x in zip(self.stages, xs, strict=False):
            blocks.forward(stage, 0, x, 1, self._end(stage), True)
            clock.timed(self.cases["R", stage.index], blocks.recompute, stage, 0)

    def _end(self, stage: JobStage) -> blocks.Criterion | None:
        return self.end if stage.last else None

    def _prepare(self, stage: JobStage) -> None:
        """Let the backward find gradients to add to, or none, as in training."""
        for _, parameter in stage.parameters:
            if not self.accumulates:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@dataclass(eq=False)
class Updater:
    """The update of every stage by one optimizer."""

    stages: list[JobStage]
    job: int
    dtype: str
    clip_norm: float | None

    def __post_init__(self) -> None:
        self.cases = {("U", s.index): Case("U", s.index) for s in self.stages}
        self.norm = torch.ones((), device=self.stages[0].device)

    def run(self, clock: Clock) -> None:
        """One step of every stage."""
        for stage in self.stages:
            for _, parameter in stage.parameters:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 1e-3)
            case = self.cases["U", stage.index]
            clock.timed(case, blocks.update, stage, self.clip_norm, self.norm, 1.0)


def iqr(times: Sequence[int]) -> float:
    """Interquartile range."""
    low, _, high = quantiles(times, n=4, method="inclusive")
    return high - low


WARM_UPS: Final = 3
LEAST_REPEATS: Final = 10
MOST_REPEATS: Final = 50
PATIENCE: Final = 10.0
"""Seconds after which cases that scatter are left as they are."""


_TOLD: Final = 5  # cases that a warning names
_COST_FREE: Final = (
    "params", "param_names", "lr", "initial_lr", "betas", "eps", "decoupled_weight_decay",
)  # fmt: skip


def measure(
    trainer: ArrayTrainer,
    devices: Sequence[torch.device],
    *,
    sizes: Sequence[int] | None = None,
    repeats: int = LEAST_REPEATS,
) -> Profile:
    """Measure forward, backward, recompute and update of every stage, and the bytes they keep.

    Parameters
    ----------
    trainer
        Its model, stages, jobs, loss and data; neither they nor its models change.
    devices
        Blocks are measured on the first; the link is the one between the first two.
    sizes
        Micro-batch sizes to measure, with data of jobs of that batch size; by default the largest
        micro-batch of every job. Others are predicted.
    repeats
        Of every case, after three to warm up; at least 10. While the IQR of a case is above a
        quarter of its median there are more, up to 50 and for up to 10 seconds.

    Raises
    ------
    InputError
        An argument is wrong, or the data do not follow the batch size.
    """
    _check(sizes, repeats)
    bench = _Bench(trainer, devices[0])
    with torch.cuda.device(devices[0]) if on_gpu(devices[0]) else nullcontext():
        bench.set_up(None if sizes is None else sorted(set(sizes)))
        for chain in bench.chains:
            chain.weigh()
        bench.repeat(repeats)
    profile = Profile(
        device=_device(devices[0], len(trainer.stages)),
        stages=bench.stage_entries(),
        jobs=bench.job_entries(),
        blocks=tuple(bench.block_entries()),
        boundaries=tuple(entry for chain in bench.chains for entry in chain.boundaries),
        saved=tuple(entry for chain in bench.chains for entry in chain.saved),
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


@dataclass(eq=False)
class _Bench:
    """Everything that is measured, set up once and repeated."""

    trainer: ArrayTrainer
    device: torch.device
    chains: list[Chain] = field(default_factory=list)
    updaters: dict[tuple[str, str], Updater] = field(default_factory=dict)  # precision, optimizer
    optimizers: list[str] = field(default_factory=list)  # of every job
    metrics: list[bool] = field(default_factory=list)  # whether its scheduler looks at the loss
    shapes: Shapes = field(default_factory=dict)  # of the first job's model
    rounds: int = 0

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)

    def set_up(self, sizes: Sequence[int] | None) -> None:
        """Build one model per precision and optimizer, and the batches."""
        models: dict[str, list[JobStage]] = {}
        for j, job in enumerate(self.trainer.jobs):
            stages = self._split(j)
            self.metrics.append(any(stage.needs_metric for stage in stages))
            for stage in stages:  # one with a fixed number of steps would run out of them
                stage.scheduler = None
            label = _optimizer_label(stages) + (" clipped" if job.clip_norm is not None else "")
            self.optimizers.append(label)
            models.setdefault(job.precision, stages)
            if (job.precision, label) not in self.updaters:
                updater = Updater(stages, j, job.precision, job.clip_norm)
                self.updaters[job.precision, label] = updater
        for precision, stages in models.items():
            self._add_chains(precision, stages, sizes)

    def repeat(self, repeats: int) -> None:
        """Warm up, repeat all cases in turn, and go on with those that scatter."""
        everything: list[Chain | Updater] = [*self.chains, *self.updaters.values()]
        for _ in range(WARM_UPS):
            self._round(everything)
        for case in _cases(everything):
            case.times.clear()
            case.launches.clear()
        for _ in range(repeats):
            self._round(everything)
        began = perf_counter()
        for _ in range(repeats, MOST_REPEATS):
            noisy = [part for part in everything if any(c.noisy for c in part.cases.values())]
            if not noisy or perf_counter() - began > PATIENCE:
                return
            self._round(noisy)

    def stage_entries(self) -> tuple[StageEntry, ...]:
        """Bytes of every stage; those of the largest precision where jobs differ."""
        rows = [updater.stages for updater in self.updaters.values()]
        names = _stage_names(rows[0])
        return tuple(
            StageEntry(
                name=names[s],
                parameters_bytes=max(parameters_bytes(row[s]) for row in rows),
                gradients_bytes=max(gradients_bytes(row[s]) for row in rows),
                state={
                    title: state_bytes(self.updaters[job.precision, label].stages[s])
                    for title, job, label in self._jobs()
                },
            )
            for s in range(len(rows[0]))
        )

    def job_entries(self) -> tuple[ProfiledJob, ...]:
        """Settings of the jobs that their times depend on."""
        return tuple(
            ProfiledJob(
                name=title,
                batch_size=job.batch_size,
                microbatches=job.microbatches,
                recompute=job.recompute,
                precision=job.precision,  # type: ignore[arg-type]
                optimizer=label,
                update="global" if job.clip_norm is not None or metric else "fused",
            )
            for (title, job, label), metric in zip(self._jobs(), self.metrics, strict=True)
        )

    def block_entries(self) -> Iterable[BlockEntry]:
        """Medians and spread of all cases."""
        for chain in self.chains:
            for case in chain.cases.values():
                yield _entry(case, chain.batch, -1, chain.dtype)
        for updater in self.updaters.values():
            for case in updater.cases.values():
                yield _entry(case, 0, updater.job, updater.dtype)

    def _round(self, parts: Sequence[Chain | Updater]) -> None:
        # another one begins every time: what runs after an update finds cold caches
        first = self.rounds % len(parts)
        self.rounds += 1
        for part in (*parts[first:], *parts[:first]):
            part.run(self.clock)
        self.clock.settle()

    def _jobs(self) -> Iterator[tuple[str, Job, str]]:
        """Title, job and optimizer."""
        return zip(self.trainer.titles, self.trainer.jobs, self.optimizers, strict=True)

    def _split(self, j: int) -> list[JobStage]:
        trainer, job, title = self.trainer, self.trainer.jobs[j], self.trainer.titles[j]
        model = fresh_model(trainer.build_model, job)
        shapes = shapes_of(model)
        self.shapes = shapes if j == 0 else self.shapes
        check_sibling(shapes, title, self.shapes, trainer.titles[0])
        where = [self.device] * len(trainer.stages)
        return fresh_stages(model, trainer.stages, job, j, title, where)

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
            shape = tuple(t.shape for t in tensors_of(x, "data: the input"))
            if sizes is not None and shapes.setdefault(shape, size) != size:
                raise InputError(
                    f"sizes: data gives inputs of one shape for batch sizes {shapes[shape]} and "
                    f"{size}; it must follow job.batch_size"
                )
            end = blocks.Criterion(trainer.loss, feed.target(0, self.device), feed.shares[0])
            self._rehearse(stages, x, end)
            row = tensors_of(x, "data: the input")
            self.chains.append(Chain(stages, size, precision, row, end, size in accumulating))

    def _rehearse(self, stages: Sequence[JobStage], x: Any, end: blocks.Criterion) -> None:
        needs: Sequence[bool] = (False,) * len(tensors_of(x, "data: the input"))
        for stage in stages:
            x = blocks.rehearse(stage, x, needs, end if stage.last else None)
            needs = tuple(t.requires_grad for t in (x if isinstance(x, tuple) else (x,)))


def _stage_names(stages: Sequence[JobStage]) -> list[str]:
    """Where every stage begins; its number where that does not tell them apart."""
    names = [stage.prefixes[0].rstrip(".") if stage.prefixes else "" for stage in stages]
    if "" in names or len(set(names)) < len(names):
        return [f"stage{stage.index}" for stage in stages]
    return names


def _check(sizes: Sequence[int] | None, repeats: int) -> None:
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < LEAST_REPEATS:
        raise InputError(f"repeats: expected an integer >= {LEAST_REPEATS}, got {repeats!r}")
    if sizes is None:
        return
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__len__") or not len(sizes):
        raise InputError(f"sizes: expected a list of micro-batch sizes, got {sizes!r:.60}")
    for k, size in enumerate(sizes):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_INTEGER:
            raise InputError(f"sizes[{k}]: expected an integer >= 1, got {size!r}")


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


def _entry(case: Case, batch: int, job: int, dtype: str) -> BlockEntry:
    return BlockEntry(
        kind=case.kind,  # type: ignore[arg-type]
        stage=case.stage,
        batch=batch,
        job=job,
        dtype=dtype,  # type: ignore[arg-type]
        n=len(case.times),
        median_ns=max(1, round(median(case.times))),
        iqr_ns=round(iqr(case.times)),
        minimum_ns=min(case.times),
        launch_ns=round(median(case.launches or [0])),
    )


def _cases(parts: Iterable[Chain | Updater]) -> Iterable[Case]:
    return (case for part in parts for case in part.cases.values())


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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (named[0] if named else platform.processor() or platform.machine() or "CPU")[:200]
