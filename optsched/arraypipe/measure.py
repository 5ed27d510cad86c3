"""Measure the blocks of a trainer's jobs, one stage at a time on its device, and their bytes."""

from __future__ import annotations

import platform
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from optsched.arraypipe.memory.state import (
    boundary_bytes,
    gradients_bytes,
    saved_bytes,
    state_bytes,
)
from optsched.arraypipe.model.build import Builder
from optsched.arraypipe.profile import (
    BlockEntry,
    DeviceEntry,
    Link,
    Profile,
    ProfiledJob,
    StageEntry,
    UpdateEntry,
)
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.losses import Criterion
from optsched.arraypipe.runtime.stages import drop, fresh_stages, in_place, waits_for_all
from optsched.errors import InputError
from optsched.io.values import integer
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor

    from optsched.arraypipe.distributed.group import Group
    from optsched.arraypipe.job import Job
    from optsched.arraypipe.runtime.state import JobStage
    from optsched.arraypipe.trainer import ArrayTrainer

    Calls = Iterator[tuple[str, Callable[[], object]]]

REPEATS: Final = 20
LEAST_REPEATS: Final = 3  # of long blocks
LONG_NS: Final = 500_000_000  # time after which these are enough
WARM_UPS: Final = 2
LINK_BYTES: Final = 1 << 20
COST_FREE: Final = ("params", "param_names", "lr", "initial_lr", "betas", "eps",
                    "decoupled_weight_decay")  # fmt: skip


class StageRow(NamedTuple):
    """Measurements of one stage; a rank sends them to the others."""

    entry: StageEntry
    blocks: list[BlockEntry]
    updates: list[UpdateEntry]
    outputs: dict[tuple[int, str], list[Tensor]]  # on the meta device, by size and precision


def measure(
    trainer: ArrayTrainer,
    device: torch.device,
    *,
    sizes: Sequence[int] | None = None,
    split_backward: bool = False,
    local: Collection[int] | None = None,
    group: Group | None = None,
) -> Profile:
    """Measure every stage alone on its device; neither the trainer nor its models change.

    Parameters
    ----------
    sizes
        Micro-batch sizes; by default those of the jobs.
    split_backward
        Measure blocks I and W, too.
    local, group
        On ranks: the stages of this rank, and the group of all, which get the whole profile. What
        one rank raises is raised on all.
    """
    if sizes is not None:
        if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__len__") or not len(sizes):
            raise InputError(f"sizes: expected a list of micro-batch sizes, got {sizes!r:.60}")
        sizes = [integer(f"sizes[{k}]", size, 1) for k, size in enumerate(sizes)]
    bench = _Bench(trainer, device, split_backward, local)

    def everywhere(make: Callable[[], Any]) -> list[Any]:
        return [make()] if group is None else group.all(group.agree(make))

    everywhere(partial(bench.prepare, sizes))
    rows: list[StageRow] = []
    for s in range(trainer.n_stages):
        rows += [row for row in everywhere(partial(bench.stage, s)) if row is not None]
        bench.inputs = rows[-1].outputs
    return Profile(
        device=_device_entry(device),
        stages=tuple(row.entry for row in rows),
        jobs=tuple(bench.jobs),
        blocks=tuple(entry for row in rows for entry in row.blocks),
        updates=tuple(entry for row in rows for entry in row.updates),
        link=None if group is None or group.size == 1 else _measured_link(group),
    )


class _Bench:
    """Measures the local stages on a device, one after the other.

    Jobs with optimizers of equal cost are measured once, by the first of them. A stage gets random
    inputs of the form that the stage before it has made.
    """

    def __init__(
        self,
        trainer: ArrayTrainer,
        device: torch.device,
        split: bool,
        local: Collection[int] | None,
    ) -> None:
        self.trainer, self.device, self.split = trainer, device, split
        self.local = range(trainer.n_stages) if local is None else local
        self.jobs = [*map(_profiled, trainer.jobs, trainer.titles)]
        self.keys = [(job.optimizer, job.precision) for job in self.jobs]
        self.stages: dict[tuple[str, str], list[JobStage]] = {}  # by optimizer and precision
        self.feeds: dict[tuple[int, str], Feed] = {}  # by micro-batch size and precision
        self.inputs: dict[tuple[int, str], list[Tensor]] = {}
        self.shared: set[str] = set()  # names of frozen parameters that jobs have in common

    def prepare(self, sizes: Sequence[int] | None) -> None:
        """Build the local stages on the host, and draw a batch of every size and precision."""
        trainer, builder = self.trainer, Builder(self.trainer.build_model)
        where = [self.device] * trainer.n_stages
        for key, job, title in zip(self.keys, trainer.jobs, trainer.titles, strict=True):
            if key not in self.stages:
                with builder.parts(job) as model:
                    self.stages[key] = fresh_stages(
                        model, trainer.cut, job, 0, title, where, True, trainer.loss
                    )
                    for stage in self.stages[key]:
                        if stage.index not in self.local:
                            drop(stage)
            for size in [-(-job.batch_size // job.microbatches)] if sizes is None else sizes:
                if (size, job.precision) not in self.feeds:
                    one = job if sizes is None else replace(job, batch_size=size, microbatches=1)
                    feed = self.feeds[size, job.precision] = Feed(trainer.data, one, title, 0)
                    feed.draw(0)
        first = self.stages[self.keys[0]]
        frozen = {n: p for stage in first for n, p in stage.parameters if not p.requires_grad}
        if frozen and len(trainer.jobs) > 1:
            with builder.sketch(trainer.jobs[1]) as model:
                self.shared = {n for n, p in model.named_parameters() if frozen.get(n) is p}

    def stage(self, index: int) -> StageRow | None:
        """Measure all cases of a stage; None if it is not local."""
        if index not in self.local:
            return None
        name = ["stage0", *self.trainer.cuts][index]
        entries: list[BlockEntry] = []
        updates: list[UpdateEntry] = []
        outputs: dict[tuple[int, str], list[Tensor]] = {}
        gradients, states = 0, dict[tuple[str, str], int]()
        try:
            for key in dict.fromkeys(self.keys):
                stage, job = self.stages[key][index], self.trainer.jobs[self.keys.index(key)]
                with in_place(stage):
                    for case in sorted(self.feeds.keys() - outputs.keys()):
                        if case[1] == job.precision:
                            entry, outputs[case] = self.block(stage, *case)
                            entries.append(entry)
                    updates.append(self.update(stage, job, key[0]))
                    gradients = max(gradients, gradients_bytes(stage))
                    states[key] = state_bytes(stage)
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"profile: stage {index} ({name}): does not fit into the memory of the device; use "
                "more stages, smaller micro-batches, or a lower precision "
                f"({str(error).splitlines()[0]:.200})"
            ) from error
        shared = sum(p.nbytes for n, p in stage.parameters if n in self.shared)
        state = tuple(states[key] - shared for key in self.keys)
        of_stage = StageEntry(
            name=name, gradients_bytes=gradients, shared_bytes=shared, state=state
        )
        return StageRow(of_stage, entries, updates, outputs)

    def block(self, stage: JobStage, size: int, precision: Any) -> tuple[BlockEntry, list[Tensor]]:
        """Return times and bytes of a micro-batch size, and the form of the output."""
        batch, target = self.feeds[size, precision].microbatch(0, self.device)
        end = Criterion(stage.loss, target, 1.0) if stage.last else None
        x = tuple(_random(t, self.device) for t in self.inputs.get((size, precision), ()))
        blocks.rehearse(stage, x if len(x) > 1 else x[0] if x else None, batch, end)
        saved, kept, output = saved_bytes(stage, x, batch.copied(), end)
        gradients = None if stage.last else [torch.ones_like(t) for t in output]
        blocks.backward(stage, 0, gradients)

        def once() -> Calls:
            given = [tuple(blocks.leaf(t.clone()) for t in x) for _ in range(2)]
            batches = [batch.copied() for _ in range(2)]
            first = (given[0], batches[0], 1, end, False)
            yield "forward", partial(blocks.forward, stage, 0, *first)
            if self.split:
                yield "input_gradient", partial(blocks.backward, stage, 0, gradients, split=True)
                yield "weight", partial(blocks.backward_weights, stage, 0)
            stage.kept.clear()
            blocks.forward(stage, 0, given[1], batches[1], 1, end, True)
            yield "recompute", partial(blocks.recompute, stage, 0)
            yield "backward", partial(blocks.backward, stage, 0, gradients)

        crossing = () if stage.last else output
        entry = BlockEntry(
            stage=stage.index, batch=size, dtype=precision, **_medians(self.device, once),
            saved_bytes=saved, input_bytes=kept, output_bytes=boundary_bytes(crossing),
            gradient_bytes=boundary_bytes(t for t in crossing if t.requires_grad),
        )  # fmt: skip
        forms = [
            torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for t in crossing
        ]
        return entry, forms

    def update(self, stage: JobStage, job: Job, label: str) -> UpdateEntry:
        """Return time of the update of a stage; learning-rate schedulers take no step."""
        stage.scheduler, stage.flags = None, blocks.trained_now(stage)
        norm = torch.ones((), device=self.device)

        def once() -> Calls:
            for _, parameter in stage.parameters:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 1e-3)
            yield "time", partial(blocks.update, stage, job.clip_norm, norm, 1.0)

        precision: Any = job.precision
        times = _medians(self.device, once)
        return UpdateEntry(stage=stage.index, optimizer=label, dtype=precision, **times)


def _random(form: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of this form with random values, or zeros of integers."""
    made = torch.zeros_like(form, device=device, requires_grad=False)
    return made.normal_().requires_grad_(form.requires_grad) if made.is_floating_point() else made


def _medians(device: torch.device, once: Callable[[], Calls]) -> dict[str, int]:
    """Return median nanoseconds of calls by name; on a GPU between two events of its stream."""
    gpu = on_gpu(device)

    def mark() -> Any:
        if not gpu:
            return perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    rows: dict[str, list[tuple[Any, Any]]] = {}
    began_ns = perf_counter_ns()
    for n in range(-WARM_UPS, REPEATS):
        if n == 0:
            rows, began_ns = {}, perf_counter_ns()
        if n >= LEAST_REPEATS and perf_counter_ns() - began_ns > LONG_NS:
            break
        for name, call in once():
            began = mark()
            call()
            rows.setdefault(name, []).append((began, mark()))
        if gpu:
            torch.cuda.synchronize(device)
    times = {
        name: [1e6 * began.elapsed_time(end) if gpu else end - began for began, end in row]
        for name, row in rows.items()
    }
    return {name: max(1, round(median(row))) for name, row in times.items()}


def _profiled(job: Job, title: str) -> ProfiledJob:
    precision: Any = job.precision
    return ProfiledJob(
        name=title, batch_size=job.batch_size, microbatches=job.microbatches,
        recompute=job.recompute, precision=precision, optimizer=_label(job, title),
        update="global" if waits_for_all(job) else "fused",
    )  # fmt: skip


def _label(job: Job, title: str) -> str:
    """Return class of a job's optimizer and the settings that change the cost of a step."""
    try:
        optimizer = job.optimizer([("probe", torch.nn.Parameter(torch.zeros(1)))])
    except Exception:  # of a user's function, for a parameter that is not of its model
        return f"optimizer of {title}"
    settings = {
        key
        for group in optimizer.param_groups
        for key, value in group.items()
        if key in optimizer.defaults and key not in COST_FREE and bool(value)
    }
    clipped = " clipped" * (job.clip_norm is not None)
    return f"{type(optimizer).__name__}({', '.join(sorted(settings))})" + clipped


def _measured_link(group: Group) -> Link:
    """Return bandwidth and latency of messages of gloo between the first two ranks."""
    times_ns = []
    for size in (1, LINK_BYTES):
        data, row = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(REPEATS):
            began_ns = perf_counter_ns()
            for source in (0, 1):
                if group.rank == source:
                    dist.send(data, 1 - source, group.group)
                elif group.rank == 1 - source:
                    dist.recv(data, source, group.group)
            row.append((perf_counter_ns() - began_ns) // 2)
        times_ns.append(min(row))
    latency_ns, whole_ns = group.from_first(times_ns)
    bandwidth = LINK_BYTES * 10**9 // max(1, whole_ns - latency_ns)
    return Link(bandwidth=max(1, bandwidth), latency_ns=latency_ns)


def _device_entry(device: torch.device) -> DeviceEntry:
    """Name, memory and versions of a device."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return DeviceEntry(
        name=properties.name if properties else platform.processor() or platform.machine() or "CPU",
        kind="cuda" if cuda else "cpu",
        memory_bytes=properties.total_memory if properties else 0,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        optsched=__version__,
    )
