"""Measure the blocks of a trainer's jobs, one stage at a time, and their bytes."""

from __future__ import annotations

import platform
import warnings
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from statistics import median, quantiles
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from optsched.arraypipe.memory.stage_bytes import (
    boundary_bytes,
    gradients_bytes,
    parameters_bytes,
    saved_bytes,
    state_bytes,
)
from optsched.arraypipe.model.build import Builder
from optsched.arraypipe.profile.document import (
    NOISY,
    BlockEntry,
    DeviceEntry,
    Link,
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

REPEATS: Final = 10
LEAST_REPEATS: Final = 3  # of long blocks
MOST_REPEATS: Final = 50  # of short blocks
WARM_UPS: Final = 2
LONG_NS: Final = 500_000_000  # time after which three repeats are enough
SHORT_NS: Final = 20_000_000  # time until which blocks are repeated more often
LINK_BYTES: Final = 1 << 20

_COST_FREE: Final = (
    "params", "param_names", "lr", "initial_lr", "betas", "eps", "decoupled_weight_decay",
)  # fmt: skip


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
    repeats: int = REPEATS,
    split_backward: bool = False,
    local: Collection[int] | None = None,
    group: Group | None = None,
) -> Profile:
    """Measure every stage alone on its device; neither the trainer nor its models change.

    Parameters
    ----------
    sizes
        Micro-batch sizes; by default those of the jobs.
    repeats
        Repeats of a block, fewer if it is long; more, up to 50, if it is short.
    split_backward
        Measure blocks I and W, too.
    local, group
        On ranks: the stages of this rank, and the group of all, which get the whole profile. What
        one rank raises is raised on all.
    """
    _check_arguments(sizes, repeats)
    bench = _Bench(trainer, device, repeats, split_backward, local)

    def everywhere(make: Callable[[], Any]) -> list[Any]:
        return [make()] if group is None else group.all(group.agree(make))

    everywhere(partial(bench.prepare, sizes))
    rows: list[StageRow] = []
    for s in range(trainer.n_stages):
        rows += [row for row in everywhere(partial(bench.stage, s)) if row is not None]
        bench.inputs = rows[-1].outputs
    profile = Profile(
        _device_entry(device),
        tuple(row.entry for row in rows),
        tuple(map(_profiled, trainer.jobs, trainer.titles, bench.labels)),
        tuple(entry for row in rows for entry in row.blocks),
        tuple(entry for row in rows for entry in row.updates),
        None if group is None else _measured_link(group),
    )
    if profile.spread > NOISY and group is None:
        warnings.warn(
            f"times scatter by up to {profile.spread:.0%} of the median; is the machine busy with "
            "something else?",
            stacklevel=3,
        )
    return profile


def _check_arguments(sizes: Sequence[int] | None, repeats: int) -> None:
    integer("repeats", repeats, LEAST_REPEATS)
    if sizes is None:
        return
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__len__") or not len(sizes):
        raise InputError(f"sizes: expected a list of micro-batch sizes, got {sizes!r:.60}")
    for k, size in enumerate(sizes):
        integer(f"sizes[{k}]", size, 1)


def _profiled(job: Job, title: str, label: str) -> ProfiledJob:
    precision: Any = job.precision
    return ProfiledJob(
        name=title, batch_size=job.batch_size, microbatches=job.microbatches,
        recompute=job.recompute, precision=precision, optimizer=label,
        update="global" if waits_for_all(job) else "fused",
    )  # fmt: skip


class _Bench:
    """Measures the local stages on a device, one after the other.

    Jobs with optimizers of equal cost are measured once, by the first of them. A stage gets random
    inputs of the form that the stage before it has made.
    """

    def __init__(
        self,
        trainer: ArrayTrainer,
        device: torch.device,
        repeats: int,
        split: bool,
        local: Collection[int] | None,
    ) -> None:
        self.trainer, self.device, self.repeats, self.split = trainer, device, repeats, split
        self.local = range(trainer.n_stages) if local is None else local
        self.labels = [*map(_label, trainer.jobs, trainer.titles)]
        self.stages: dict[tuple[str, str], list[JobStage]] = {}  # by optimizer and precision
        self.feeds: dict[tuple[int, str], Feed] = {}  # by micro-batch size and precision
        self.inputs: dict[tuple[int, str], list[Tensor]] = {}
        self.shared: set[str] = set()  # names of frozen parameters that jobs have in common

    def prepare(self, sizes: Sequence[int] | None) -> None:
        """Build the local stages on the host, and draw a batch of every size and precision."""
        trainer, builder = self.trainer, Builder(self.trainer.build_model)
        where = [self.device] * trainer.n_stages
        for job, title, label in zip(trainer.jobs, trainer.titles, self.labels, strict=True):
            if (label, job.precision) not in self.stages:
                with builder.parts(job) as model:
                    made = fresh_stages(
                        model, trainer.cut, job, 0, title, where, True, trainer.loss
                    )
                    for stage in made:
                        if stage.index not in self.local:
                            drop(stage)
                self.stages[label, job.precision] = made
            for size in [-(-job.batch_size // job.microbatches)] if sizes is None else sizes:
                if (size, job.precision) not in self.feeds:
                    one = job if sizes is None else replace(job, batch_size=size, microbatches=1)
                    feed = self.feeds[size, job.precision] = Feed(trainer.data, one, title, 0)
                    feed.draw(0)
        first = self.stages[self.labels[0], trainer.jobs[0].precision]
        frozen = {n: p for stage in first for n, p in stage.parameters if not p.requires_grad}
        if frozen and len(trainer.jobs) > 1:
            with builder.sketch(trainer.jobs[1]) as model:
                self.shared = {n for n, p in model.named_parameters() if frozen.get(n) is p}

    def stage(self, index: int) -> StageRow | None:
        """Measure all cases of a stage; None if it is not local."""
        if index not in self.local:
            return None
        name = ["stage0", *self.trainer.cuts][index]
        place = f"stage {index} ({name})"
        entries: list[BlockEntry] = []
        updates: dict[tuple[str, str], UpdateEntry] = {}
        outputs: dict[tuple[int, str], list[Tensor]] = {}
        sizes: dict[tuple[str, str], tuple[int, int, int]] = {}
        keys = [
            (label, j.precision) for label, j in zip(self.labels, self.trainer.jobs, strict=True)
        ]
        for key, job in dict(zip(reversed(keys), reversed(self.trainer.jobs), strict=True)).items():
            stage = self.stages[key][index]
            with _enough_memory(place), in_place(stage):
                for case in sorted(self.feeds.keys() - outputs.keys()):
                    if case[1] == job.precision:
                        with _enough_memory(f"{place}, micro-batch {case[0]}"):
                            entry, outputs[case] = self.block(stage, *case)
                        entries.append(entry)
                updates[key] = self.update(stage, job, key[0])
                sizes[key] = parameters_bytes(stage), gradients_bytes(stage), state_bytes(stage)
        shared = sum(p.nbytes for n, p in stage.parameters if n in self.shared)
        entry_of_stage = StageEntry(
            name=name,
            parameters_bytes=max(size[0] for size in sizes.values()),
            gradients_bytes=max(size[1] for size in sizes.values()),
            shared_bytes=shared,
            state=tuple(sizes[key][2] - shared for key in keys),
        )
        return StageRow(entry_of_stage, entries, [*updates.values()], outputs)

    def block(self, stage: JobStage, size: int, precision: Any) -> tuple[BlockEntry, list[Tensor]]:
        """Times and bytes of a micro-batch size, and the form of the output."""
        batch, target = self.feeds[size, precision].microbatch(0, self.device)
        end = Criterion(stage.loss, target, 1.0) if stage.last else None
        x = tuple(_random(t, self.device) for t in self.inputs.get((size, precision), ()))
        blocks.rehearse(stage, x if len(x) > 1 else x[0] if x else None, batch, end)
        saved, kept, output = saved_bytes(stage, x, batch.copied(), end)
        gradients = None if stage.last else [torch.ones_like(t) for t in output]
        blocks.backward(stage, 0, gradients)
        clock = _Clock(self.device)

        def once() -> None:
            given = [tuple(blocks.leaf(t.clone()) for t in x) for _ in range(2)]
            batches = [batch.copied() for _ in range(2)]
            clock.timed(
                "forward",
                lambda: blocks.forward(stage, 0, given[0], batches[0], 1, end, False),
            )
            if self.split:
                clock.timed(
                    "input_gradient", lambda: blocks.backward(stage, 0, gradients, split=True)
                )
                clock.timed("weight", lambda: blocks.backward_weights(stage, 0))
            stage.kept.clear()
            blocks.forward(stage, 0, given[1], batches[1], 1, end, True)
            clock.timed("recompute", lambda: blocks.recompute(stage, 0))
            clock.timed("backward", lambda: blocks.backward(stage, 0, gradients))

        times: dict[str, Any] = clock.repeated(once, self.repeats)
        crossing = () if stage.last else output
        entry = BlockEntry(
            stage=stage.index, batch=size, dtype=precision, **times,
            weight_bytes=saved if self.split else 0,  # at most
            saved_bytes=saved, input_bytes=kept, output_bytes=boundary_bytes(crossing),
            gradient_bytes=boundary_bytes(t for t in crossing if t.requires_grad),
        )  # fmt: skip
        forms = [
            torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for t in crossing
        ]
        return entry, forms

    def update(self, stage: JobStage, job: Job, label: str) -> UpdateEntry:
        """Times of the update of a stage; learning-rate schedulers take no step."""
        stage.scheduler, clock = None, _Clock(self.device)
        norm = torch.ones((), device=self.device)

        def once() -> None:
            for _, parameter in stage.parameters:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 1e-3)
            clock.timed("update", lambda: blocks.update(stage, job.clip_norm, norm, 1.0))

        times = msgspec.structs.asdict(clock.repeated(once, self.repeats)["update"])
        precision: Any = job.precision
        return UpdateEntry(stage=stage.index, optimizer=label, dtype=precision, **times)


def _random(form: Tensor, device: torch.device) -> Tensor:
    """A tensor of this form with random values, or zeros of integers."""
    made = torch.zeros_like(form, device=device, requires_grad=False)
    return made.normal_().requires_grad_(form.requires_grad) if made.is_floating_point() else made


class _Clock:
    """Times of blocks by their names; on a GPU between two events of its stream."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device if on_gpu(device) else None
        self.rows: dict[str, list[Any]] = {}

    def timed(self, name: str, call: Callable[[], object]) -> None:
        """Call a function and note its time."""
        row = self.rows.setdefault(name, [])
        if self.gpu is None:
            began_ns = perf_counter_ns()
            call()
            row.append(perf_counter_ns() - began_ns)
            return
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        call()
        end.record()
        row.append((start, end))

    def repeated(self, once: Callable[[], None], repeats: int) -> dict[str, Times]:
        """Warm up and repeat, for a bounded time."""
        for _ in range(WARM_UPS):
            once()
        self.rows.clear()
        began_ns = perf_counter_ns()
        for n in range(1, 1 + max(repeats, MOST_REPEATS)):
            once()
            if self.gpu is not None:
                torch.cuda.synchronize(self.gpu)
            spent_ns = perf_counter_ns() - began_ns
            if spent_ns > (SHORT_NS if n >= repeats else LONG_NS) and n >= LEAST_REPEATS:
                break
        return {name: self._times(row) for name, row in self.rows.items()}

    def _times(self, row: Sequence[Any]) -> Times:
        """Median and spread."""
        if self.gpu is not None:
            row = [round(1e6 * start.elapsed_time(end)) for start, end in row]
        low, _, high = quantiles(row, n=4, method="inclusive")
        return Times(
            n=len(row), median_ns=max(1, round(median(row))), iqr_ns=round(high - low),
            minimum_ns=min(row),
        )  # fmt: skip


@contextmanager
def _enough_memory(place: str) -> Iterator[None]:
    """Turn out-of-memory errors into a sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"profile: {place}: does not fit into the memory of the device; use more stages, "
            f"smaller micro-batches, or a lower precision ({str(error).splitlines()[0]:.200})"
        ) from error


def _label(job: Job, title: str) -> str:
    """Class of a job's optimizer and the settings that change the cost of a step."""
    try:
        optimizer = job.optimizer([("probe", torch.nn.Parameter(torch.zeros(1)))])
    except Exception:  # of a user's function, for a parameter that is not of its model
        return f"optimizer of {title}"
    settings = {}
    for group in optimizer.param_groups:
        for key, value in group.items():
            free = key in _COST_FREE or key not in optimizer.defaults
            if free or value is None or value is False or value == 0:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            settings[key] = f"{key}={value}" if whole or isinstance(value, str) else key
    inner = ", ".join(settings[key] for key in sorted(settings))
    clipped = " clipped" * (job.clip_norm is not None)
    return f"{type(optimizer).__name__}({inner})"[:300] + clipped


def _measured_link(group: Group) -> Link | None:
    """Bandwidth and latency of messages of gloo between the first two ranks."""
    if group.size == 1:
        return None
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
