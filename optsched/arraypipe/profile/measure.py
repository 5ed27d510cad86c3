"""Measure the blocks of a trainer's jobs, one stage at a time, and their bytes."""

from __future__ import annotations

import platform
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from optsched.arraypipe.memory.stage_bytes import (
    boundary_bytes,
    gradients_bytes,
    parameters_bytes,
    saved_bytes,
    state_bytes,
)
from optsched.arraypipe.model.build import Builder
from optsched.arraypipe.profile.document import (
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
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from optsched.arraypipe.distributed.group import Group
    from optsched.arraypipe.job import Job, Tensors
    from optsched.arraypipe.model.inputs import Inputs
    from optsched.arraypipe.runtime.state import JobStage
    from optsched.arraypipe.trainer import ArrayTrainer

REPEATS: Final = 10
LEAST_REPEATS: Final = 3  # of long blocks
MOST_REPEATS: Final = 50  # while times scatter
WARM_UPS: Final = 2
LONG_NS: Final = 500_000_000  # time after which a case has enough repeats
NOISY_NS: Final = 20_000_000  # time after which one that scatters is left as it is
LINK_BYTES: Final = 1 << 22

_COST_FREE: Final = (
    "params", "param_names", "lr", "initial_lr", "betas", "eps", "decoupled_weight_decay",
)  # fmt: skip


class StageRows(NamedTuple):
    """Measurements of one stage; a rank sends them to rank 0."""

    entry: StageEntry
    blocks: list[BlockEntry]
    updates: list[UpdateEntry]  # one per job; its optimizer is "" on a stage without parameters


def measure(
    trainer: ArrayTrainer,
    devices: Sequence[torch.device],
    *,
    sizes: Sequence[int] | None = None,
    repeats: int = REPEATS,
    split_backward: bool = False,
) -> Profile:
    """Measure every stage alone on the first device, and the link between the first two.

    Neither the trainer nor its models change.

    Parameters
    ----------
    sizes
        Micro-batch sizes; by default those of the jobs.
    repeats
        Repeats of a block, fewer if it is long; more, up to 50, while the times scatter.
    split_backward
        Measure blocks I and W, too.
    """
    check_arguments(sizes, repeats)
    rows = [*measured_stages(trainer, devices[0], sizes, repeats, split_backward)]
    profile = assembled(trainer, rows, device_entry(devices[0]), measured_link(devices))
    if noisy := profile.noisy():
        n = len([*profile.cases()])
        warnings.warn(
            f"{len(noisy)} of {n} times scatter; is the machine busy with something else? The "
            f"worst: {noisy[0]}",
            stacklevel=3,
        )
    return profile


def measure_on_ranks(
    trainer: ArrayTrainer, device: torch.device, local: Collection[int], group: Group
) -> Profile:
    """Measure the `local` stages of this rank; all ranks of the `group` get the whole profile.

    Every stage is local on one rank. What one rank raises is raised on all.
    """

    def exchange(make: Callable[[], Any]) -> Any:
        return next((one for one in group.all(group.agree(make)) if one is not None), None)

    rows = [*measured_stages(trainer, device, None, REPEATS, False, local, exchange)]
    found = {row.blocks[0].stage: row for part in group.all(rows) for row in part}
    in_order = [found[s] for s in range(trainer.n_stages)]
    return assembled(trainer, in_order, device_entry(device), measured_link([device]))


def check_arguments(sizes: Sequence[int] | None, repeats: int) -> None:
    """Refuse sizes and repeats that are no positive integers."""
    integer("repeats", repeats, LEAST_REPEATS)
    if sizes is None:
        return
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__len__") or not len(sizes):
        raise InputError(f"sizes: expected a list of micro-batch sizes, got {sizes!r:.60}")
    for k, size in enumerate(sizes):
        integer(f"sizes[{k}]", size, 1)


def assembled(
    trainer: ArrayTrainer, rows: Sequence[StageRows], device: DeviceEntry, link: Link
) -> Profile:
    """Make the profile of the rows of all stages."""
    jobs, updates = [], dict[tuple[int, str, str], UpdateEntry]()
    for j, (job, title) in enumerate(zip(trainer.jobs, trainer.titles, strict=True)):
        label = " + ".join(
            dict.fromkeys(u.optimizer for row in rows if (u := row.updates[j]).optimizer)
        )
        precision: Any = job.precision
        for s, row in enumerate(rows):
            updates[s, label, precision] = msgspec.structs.replace(row.updates[j], optimizer=label)
        jobs.append(
            ProfiledJob(
                name=title, batch_size=job.batch_size, microbatches=job.microbatches,
                recompute=job.recompute, precision=precision, optimizer=label,
                update="global" if waits_for_all(job) else "fused",
            )
        )  # fmt: skip
    return Profile(
        device, tuple(row.entry for row in rows), tuple(jobs),
        tuple(entry for row in rows for entry in row.blocks), tuple(updates.values()), link,
    )  # fmt: skip


# one stage


def measured_stages(
    trainer: ArrayTrainer,
    device: torch.device,
    sizes: Sequence[int] | None,
    repeats: int,
    split: bool = False,
    local: Collection[int] | None = None,
    exchange: Callable[[Callable[[], Any]], Any] = lambda make: make(),
) -> Iterator[StageRows]:
    """Measure the `local` stages (default: all) one after the other, each alone on the device.

    A stage gets random inputs of the form that the stage before it has sent. On ranks `exchange`
    calls a function on all of them and returns the one value that is not None.
    """
    held = range(trainer.n_stages) if local is None else local
    groups: dict[Any, _Group] = {}
    group_of: list[_Group] = []
    feeds: dict[tuple[int, str], Feed] = {}
    shared: set[str] = set()  # names of frozen parameters that jobs have in common
    builder = Builder(trainer.build_model)

    def prepare() -> None:
        for job, title in zip(trainer.jobs, trainer.titles, strict=True):
            key = (job.precision, job.clip_norm is None, _probed_label(job) or title)
            if key not in groups:
                groups[key] = _Group(job, _stages_of(trainer, builder, job, title, device, held))
            group_of.append(groups[key])
        shared.update(_shared(trainer, builder, group_of[0].stages))
        feeds.update(_feeds(trainer, sizes))

    exchange(prepare)
    forms: dict[tuple[int, str], list[_Form]] = {key: [] for key in feeds}
    for s, name in enumerate(["stage0", *trainer.cuts]):
        rows: list[StageRows] = []
        bench = _StageBench(s, name, device, repeats, split)

        def measure_stage(
            bench: _StageBench = bench,
            forms: Mapping[tuple[int, str], list[_Form]] = forms,
            rows: list[StageRows] = rows,
        ) -> Any:
            if bench.index not in held:
                return None
            made: dict[tuple[int, str], list[_Form]] = {}
            row = bench.rows(groups.values(), group_of, feeds, forms, made)
            rows.append(_with_shared(row, bench.index, group_of, shared))
            return made

        forms = exchange(measure_stage)
        yield from rows


def _shared(trainer: ArrayTrainer, builder: Builder, stages: Sequence[JobStage]) -> set[str]:
    """Names of frozen parameters of the first job that the second one has, too."""
    frozen = {n: p for stage in stages for n, p in stage.parameters if not p.requires_grad}
    if not frozen or len(trainer.jobs) < 2:
        return set()
    with builder.sketch(trainer.jobs[1]) as model:
        return {name for name, p in model.named_parameters() if frozen.get(name) is p}


def _with_shared(
    row: StageRows, index: int, group_of: Sequence[_Group], shared: Collection[str]
) -> StageRows:
    """The row in which shared parameters are no part of the state of a job."""
    parameters = group_of[0].stages[index].parameters
    count = sum(p.nbytes for name, p in parameters if name in shared)
    state = tuple(size - count for size in row.entry.state)
    entry = msgspec.structs.replace(row.entry, shared_bytes=count, state=state)
    return row._replace(entry=entry)


def _stages_of(
    trainer: ArrayTrainer,
    builder: Builder,
    job: Job,
    title: str,
    device: torch.device,
    local: Collection[int],
) -> list[JobStage]:
    """The stages of a job; those that are not local have no tensors, others are on the host."""
    with builder.parts(job) as model:
        where = [device] * trainer.n_stages
        stages = fresh_stages(model, trainer.cut, job, 0, title, where, True, trainer.loss)
        for stage in stages:
            if stage.index not in local:
                drop(stage)
    return stages


class _Form(NamedTuple):
    """Shape of a tensor at a boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def filled(self, device: torch.device) -> Tensor:
        """A tensor of this form with random values, or zeros of integers."""
        made = torch.zeros(self.shape, dtype=self.dtype, device=device)
        if made.is_floating_point():
            made.normal_().requires_grad_(self.needs_gradient)
        return made


class _Group(NamedTuple):
    """Jobs with optimizers of equal cost, by the first of them."""

    job: Job
    stages: list[JobStage]


def _feeds(trainer: ArrayTrainer, sizes: Sequence[int] | None) -> dict[tuple[int, str], Feed]:
    """A drawn batch for every micro-batch size and precision."""
    found: dict[tuple[int, str], Feed] = {}
    for job, title in zip(trainer.jobs, trainer.titles, strict=True):
        given = [-(-job.batch_size // job.microbatches)] if sizes is None else sizes
        for size in given:
            if (size, job.precision) not in found:
                one = replace(job, batch_size=size, microbatches=1) if sizes is not None else job
                feed = found[size, job.precision] = Feed(trainer.data, one, title, 0)
                feed.draw(0)
    return found


@dataclass(eq=False)
class _StageBench:
    """Measures the blocks of one stage on a device."""

    index: int
    name: str
    device: torch.device
    repeats: int
    split: bool = False

    def rows(
        self,
        groups: Iterable[_Group],
        group_of: Sequence[_Group],
        feeds: Mapping[tuple[int, str], Feed],
        forms: Mapping[tuple[int, str], list[_Form]],
        made: dict[tuple[int, str], list[_Form]],
    ) -> StageRows:
        """Measure all cases on the device; `made` gets the forms of the outputs."""
        found: list[BlockEntry] = []
        updates: dict[int, tuple[UpdateEntry, int]] = {}
        sizes: list[tuple[int, int]] = []
        place = f"stage {self.index} ({self.name})"
        for group in groups:
            stage = group.stages[self.index]
            with _enough_memory(place), in_place(stage):
                for key in sorted(feeds):
                    if key in made or key[1] != group.job.precision:
                        continue
                    with _enough_memory(f"{place}, micro-batch {key[0]}"):
                        x = tuple(form.filled(self.device) for form in forms[key])
                        block, made[key] = self.block(stage, key[0], feeds[key], x)
                    found.append(block)
                updates[id(group)] = self.update(group), state_bytes(stage)
                sizes.append((parameters_bytes(stage), gradients_bytes(stage)))
        entry = StageEntry(
            name=self.name,
            parameters_bytes=max(size for size, _ in sizes),
            gradients_bytes=max(size for _, size in sizes),
            state=tuple(updates[id(group)][1] for group in group_of),
        )
        return StageRows(entry, found, [updates[id(group)][0] for group in group_of])

    def block(
        self, stage: JobStage, size: int, feed: Feed, x: Tensors
    ) -> tuple[BlockEntry, list[_Form]]:
        """Times and bytes of a micro-batch size, and the form of the output."""
        precision: Any = feed.job.precision
        batch, target = feed.microbatch(0, self.device)
        end = Criterion(stage.loss, target, 1.0) if stage.last else None
        blocks.rehearse(stage, x if len(x) > 1 else x[0] if x else None, batch, end)
        saved, kept, output = saved_bytes(stage, x, batch.copied(), end)
        gradients = None if stage.last else [torch.ones_like(t) for t in output]
        blocks.backward(stage, 0, gradients)
        cases = self._timed(stage, x, batch, end, gradients)
        crossing = () if stage.last else output
        entry = BlockEntry(
            stage=self.index, batch=size, dtype=precision,
            forward=cases["F"].times(), backward=cases["B"].times(), recompute=cases["R"].times(),
            input_gradient=cases["I"].times() if self.split else None,
            weight=cases["W"].times() if self.split else None,
            weight_bytes=saved if self.split else 0,  # at most
            saved_bytes=saved, input_bytes=kept, output_bytes=boundary_bytes(crossing),
            gradient_bytes=boundary_bytes(t for t in crossing if t.requires_grad),
        )  # fmt: skip
        return entry, [_Form(tuple(t.shape), t.dtype, t.requires_grad) for t in crossing]

    def _timed(
        self, stage: JobStage, x: Tensors, batch: Inputs, end: Criterion | None, gradients: Any
    ) -> dict[str, _Case]:
        """Repeat forward, recompute and backward of one micro-batch."""
        cases = {kind: _Case(self.device) for kind in ("FIWRB" if self.split else "FRB")}
        kept = stage.kept

        def once() -> None:
            given = [tuple(blocks.leaf(t.clone()) for t in x) for _ in range(2)]
            batches = [batch.copied() for _ in range(2)]
            cases["F"].timed(lambda: blocks.forward(stage, 0, given[0], batches[0], 1, end, False))
            if self.split:
                cases["I"].timed(lambda: blocks.backward(stage, 0, gradients, split=True))
                cases["W"].timed(lambda: blocks.backward_weights(stage, 0))
            kept.clear()
            blocks.forward(stage, 0, given[1], batches[1], 1, end, True)
            cases["R"].timed(lambda: blocks.recompute(stage, 0))
            cases["B"].timed(lambda: blocks.backward(stage, 0, gradients))

        _repeat(once, [*cases.values()], self.repeats)
        return cases

    def update(self, group: _Group) -> UpdateEntry:
        """Times of the update of a group of jobs; learning-rate schedulers take no step."""
        stage, job, case = group.stages[self.index], group.job, _Case(self.device)
        stage.scheduler = None
        norm = torch.ones((), device=self.device)

        def once() -> None:
            for _, parameter in stage.parameters:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 1e-3)
            case.timed(lambda: blocks.update(stage, job.clip_norm, norm, 1.0))

        _repeat(once, [case], self.repeats)
        label = "" if stage.optimizer is None else optimizer_label(stage.optimizer)
        label += " clipped" * (job.clip_norm is not None and bool(label))
        precision: Any = job.precision
        return UpdateEntry(
            stage=self.index,
            optimizer=label,
            dtype=precision,
            **msgspec.structs.asdict(case.times()),
        )


# repeats


@dataclass(eq=False)
class _Case:
    """One block that is timed; on a GPU between two events of its stream."""

    device: torch.device
    times_ns: list[int] = field(default_factory=list)
    pending: list[tuple[Any, Any]] = field(default_factory=list)

    def timed(self, call: Callable[[], object]) -> None:
        """Call a function and note its time."""
        if not on_gpu(self.device):
            began_ns = perf_counter_ns()
            call()
            self.times_ns.append(perf_counter_ns() - began_ns)
            return
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        call()
        end.record()
        self.pending.append((start, end))

    def times(self) -> Times:
        """Median and spread; synchronizes with the events."""
        for start, end in self.pending:
            end.synchronize()
            self.times_ns.append(round(1e6 * start.elapsed_time(end)))
        self.pending.clear()
        low, _, high = quantiles(self.times_ns, n=4, method="inclusive")
        return Times(
            n=len(self.times_ns), median_ns=max(1, round(median(self.times_ns))),
            iqr_ns=round(high - low), minimum_ns=min(self.times_ns),
        )  # fmt: skip


def _repeat(once: Callable[[], None], cases: Sequence[_Case], repeats: int) -> None:
    """Warm up and repeat; again while times scatter, but only for a short while."""
    for _ in range(WARM_UPS):
        once()
    for case in cases:
        case.times()
        case.times_ns.clear()
    began_ns = perf_counter_ns()
    for n in range(1, MOST_REPEATS + 1):
        once()
        spent_ns = perf_counter_ns() - began_ns
        if n < LEAST_REPEATS or (n < repeats and spent_ns < LONG_NS):
            continue
        if spent_ns > NOISY_NS or not any(case.times().noisy for case in cases):
            return


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


# provenance


def optimizer_label(optimizer: torch.optim.Optimizer) -> str:
    """Class of an optimizer and the settings that change the cost of a step, without numbers."""
    settings = {}
    for group in optimizer.param_groups:
        for key, value in group.items():
            free = key in _COST_FREE or key not in optimizer.defaults
            if free or value is None or value is False or value == 0:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            settings[key] = f"{key}={value}" if whole or isinstance(value, str) else key
    inner = ", ".join(settings[key] for key in sorted(settings))
    return f"{type(optimizer).__name__}({inner})"[:300]


def _probed_label(job: Job) -> str:
    """Label of the job's optimizer for one small parameter; empty if it needs others."""
    try:
        return optimizer_label(job.optimizer([("probe", torch.nn.Parameter(torch.zeros(1)))]))
    except Exception:  # whatever a user's function raises for a parameter that is not its own
        return ""


def measured_link(devices: Sequence[torch.device]) -> Link:
    """Bandwidth and latency of copies between two GPUs, or within the memory of one device."""
    source, target = devices[0], devices[min(1, len(devices) - 1)]
    median_ns = {}
    for size in (1, LINK_BYTES):
        data = torch.ones(size, dtype=torch.uint8, device=source)
        case, copy = _Case(source), torch.empty_like(data, device=target)
        _repeat(lambda copy=copy, data=data, case=case: case.timed(  # type: ignore[misc]
            lambda: copy.copy_(data)), [case], REPEATS)  # fmt: skip
        median_ns[size] = case.times().median_ns
    moving_ns = max(1, median_ns[LINK_BYTES] - median_ns[1])
    return Link(bandwidth=max(1, round(LINK_BYTES * 1e9 / moving_ns)), latency_ns=median_ns[1])


def device_entry(device: torch.device) -> DeviceEntry:
    """Name, memory and versions of a device."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return DeviceEntry(
        name=properties.name if properties is not None else _processor(),
        kind="cuda" if cuda else "cpu",
        memory_bytes=properties.total_memory if properties is not None else 0,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        optsched=__version__,
    )


def _processor() -> str:
    """Name of the CPU, if the system has it."""
    known = Path("/proc/cpuinfo")
    text = known.read_text(encoding="utf-8", errors="replace") if known.exists() else ""
    named = re.search(r"(?m)^model name\s*: *(.+)$", text)
    return (named[1] if named else platform.processor() or platform.machine() or "CPU")[:200]
