"""Whether every job of an array on the device equals the job alone, bit by bit.

Kernels of small models take microseconds: a stream is done before the next block is launched, and
a missing wait would not show. So most runs have random sleeps on the GPU.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.executor.gpu_cases import (
    STAGES,
    Check,
    Model,
    Row,
    Sizes,
    adamw,
    images,
    kernels,
    language,
    order,
    sgd,
    sliced,
    trainer,
)
from benchmarks.executor.staged_group import StagedGroup
from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Job
from optsched.arraypipe.memory.budget import reserved
from optsched.arraypipe.memory.cuda_engine import CudaEngine
from optsched.arraypipe.memory.engines import CopyEngine
from optsched.arraypipe.memory.slots import layout_of
from optsched.arraypipe.runtime import blocks, cuda_streams
from optsched.arraypipe.runtime import data as feed
from optsched.arraypipe.runtime.stages import fresh_model, fresh_stages
from optsched.arraypipe.train_alone import Trained, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

STEPS = 3
_CYCLES = 1.8e6  # of a GPU in a millisecond, more or less
_BLOCK, _COPY = 3.0, 1.0  # most milliseconds of a sleep; a state is copied in several parts
_GAPS = "boundary with gaps, expanded gradient"
SOME = ("recompute", "clipping", _GAPS, "GPT, bf16")
"""Cases that are also trained on several GPUs and on ranks."""
PLAIN = [Job(0, 8, adamw), Job(1, 11, sgd), Job(2, 8, sgd)]


class Case(NamedTuple):
    """Jobs by what is special about them; `flags` as for `kernels`, `how` as for the trainer."""

    name: str
    model: Model
    jobs: list[Job]
    flags: Mapping[str, bool] = MappingProxyType({})
    how: Mapping[str, Any] = MappingProxyType({})


def exactness(sizes: Sizes) -> list[Check]:
    """Everything; `cases` in several orders, with sleeps in all but the first."""
    rows = [*cases(sizes), *on_all_gpus(sizes)]
    checks: list[Check] = [(case.name, partial(trained, sizes, case)) for case in rows]
    little = slotted(sizes)
    checks.append((little.name, partial(slots, sizes, little, 9)))
    for case in cases(sizes):
        if case.name.startswith("GPT") and case.jobs[0].recompute:
            named = case._replace(name=f"{case.name}, slots")
            checks.append((named.name, partial(slots, sizes, named, 1)))
    for check in (stopped, resumed, queued, isolated, crowded, by_default):
        checks.append((check.__name__, partial(check, sizes)))
    return checks + [(f"no wait for {name}", partial(mutant, sizes, name)) for name in MUTANTS]


def cases(sizes: Sizes) -> list[Case]:
    """What is trained in random orders."""
    fused = lambda named: torch.optim.Adam(named, lr=1e-3, fused=True)  # noqa: E731
    early = lambda named: torch.optim.Adagrad(named, lr=1e-2)  # noqa: E731
    looped = lambda named: torch.optim.AdamW(named, lr=1e-3, foreach=False)  # noqa: E731
    three = [Job(j, 8, make) for j, make in enumerate((fused, looped, early))]
    halves, model, gpt = _all(PLAIN, microbatches=2), images(sizes), language(sizes)
    found = [
        Case("dropout, BatchNorm", model, PLAIN),
        Case("micro-batches", model, _all(PLAIN, microbatches=4)),
        Case("recompute", model, _all(halves, recompute=True)),
        Case("clipping", model, _all(halves, clip_norm=0.1)),
        Case("bf16", model, _all(PLAIN, precision="bf16")),
        Case("ReduceLROnPlateau", model, _all(PLAIN, scheduler=_plateau)),
        Case("fused, foreach off, state made early", model, three),
        Case("new memory filled", model, halves, {"filled": True}),
        Case(_GAPS, sliced(sizes), halves),
    ]
    for place in ("page-locked", "on the GPU"):
        found.append(Case(f"batches {place}", images(sizes, place), halves))
    for name in ("fp32", "TF32", "bf16"):
        two = [Job(0, 8, adamw, microbatches=2), Job(1, 8, adamw, clip_norm=0.5)]
        jobs, flags = _all(two, precision=name.replace("TF", "fp")), {"tf32": name == "TF32"}
        found.append(Case(f"GPT, {name}", gpt, jobs, flags))
        found.append(Case(f"GPT, {name}, recompute", gpt, _all(jobs, recompute=True), flags))
    return found


def on_all_gpus(sizes: Sizes) -> list[Case]:
    """Some of them with stages on several GPUs, if there are."""
    gpus = [torch.device(sizes.device.type, s % sizes.gpus) for s in range(STAGES)]
    return [
        case._replace(name=f"{case.name}, {sizes.gpus} GPUs", how={"devices": gpus})
        for case in cases(sizes)
        if sizes.gpus > 1 and case.name in SOME
    ]


def slotted(sizes: Sizes) -> Case:
    """Jobs for little memory."""
    jobs = [Job(j, 8, adamw, precision="bf16", recompute=True) for j in range(3)]
    return Case("slots", images(sizes), jobs)


def trained(sizes: Sizes, case: Case) -> Iterator[Row]:
    """A case in random orders."""
    kernels(True, **case.flags)
    orders = sizes.of(3 if case.name.startswith("GPT") else 5, 2)
    yield equal(case.name, found_in(sizes, case, range(orders)))


def found_in(sizes: Sizes, case: Case, seeds: Sequence[int], **run: Any) -> list[str]:
    """Train in random orders; every tensor that differs from training alone.

    On ranks other than the first there is nothing to compare.
    """
    found, wanted = [], list[Trained]()
    place = run.pop("place", None)
    for seed in seeds:
        array = trainer(sizes, case.model, case.jobs, **case.how)
        with sleeping(sizes, seed):
            schedule = order(case.jobs, seed, place)
            result = array.run(schedule, STEPS, on_error="raise", **run)
        if result.trained:
            wanted = wanted or alone(array, [STEPS] * len(case.jobs))
            found += [f"order {seed}: {line}" for line in differing(result.trained, wanted)]
    return found


def alone(array: ArrayTrainer, steps: Sequence[int]) -> list[Trained]:
    """The references on the same device."""
    return [array.train_alone(j, n) for j, n in enumerate(steps)]


def differing(got: Sequence[Trained], wanted: Sequence[Trained]) -> list[str]:
    """Differences; a run that trained nothing would have none, so losses must be there."""
    return [
        f"job {j}: {line}"
        for j, (a, b) in enumerate(zip(got, wanted, strict=True))
        for line in differences(a, b) or ([] if a.losses else ["no iteration was run"])
    ]


def equal(name: str, found: list[str], note: str = "") -> Row:
    """A row that fails with the first difference."""
    value = f"equal{note}" if not found else f"{len(found)} differ; {found[0]}"
    return Row(f"exact: {name}", value, "equal to training alone", not found)


@contextmanager
def sleeping(sizes: Sizes, seed: int) -> Iterator[None]:
    """Sleep before blocks, batches, copies of states and messages; with seed 0 nowhere."""
    draw = random.Random(seed)

    def late(function: Callable[..., Any], most: float, stream: Any = None) -> Callable[..., Any]:
        def slept(*given: Any) -> Any:
            with torch.cuda.stream(None if stream is None else stream(*given)):
                torch.cuda._sleep(int(draw.random() * most * _CYCLES))  # type: ignore[no-untyped-call]
            return function(*given)

        return slept

    def copy(self: Any, direction: str, size: int, action: Any, *rest: Any) -> Any:
        return engine_copy(self, direction, size, late(action, _COPY), *rest)

    engine_copy, uploading = CudaEngine.copy, lambda _, device: feed._upload_stream(device)
    parts = [
        *((blocks, name, None) for name in ("forward", "recompute", "backward", "update")),
        (feed, "uploaded", uploading),
        (cuda_streams, "_copied", lambda tensor, device, stream: stream),
        (StagedGroup, "_copy", lambda self, *_: self.stream),
    ]
    with ExitStack() as stack:
        if sizes.cuda and seed:
            stack.enter_context(patch.object(CudaEngine, "copy", copy))
            for owner, name, stream in parts:
                function = late(getattr(owner, name), _BLOCK, stream)
                stack.enter_context(patch.object(owner, name, function))
        yield


def _all(jobs: Sequence[Job], **changes: Any) -> list[Job]:
    return [replace(job, **changes) for job in jobs]


def _plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.1
    )


def slots(sizes: Sizes, case: Case, most: int) -> Iterator[Row]:
    """More and more memory until all states are resident; at most so many rows."""
    kernels(True, **case.flags)
    largest, seen = state_bytes(sizes, case), list[int]()
    for quarters in range(5, 24):
        memory = limit(quarters * largest // 4, sizes)
        try:
            with copied() as moved:
                found = found_in(sizes, case._replace(how={"memory": memory}), [3])
        except InputError:  # not even one slot fits
            continue
        if moved["in"] and moved["in"] not in seen:
            seen.append(moved["in"])
            yield equal(f"{case.name}, {moved['in'] / 2**20:.2f} MiB copied in", found)
        if len(seen) == most or not moved["in"]:
            break
    if not seen:
        yield Row(f"exact: {case.name}", "with no memory states take turns", "some do", False)


def state_bytes(sizes: Sizes, case: Case) -> int:
    """Bytes of the largest stage of the first job: weights, masters, buffers and moments."""
    job, array = case.jobs[0], trainer(sizes, case.model, case.jobs[:1])
    stages = fresh_stages(fresh_model(array.build_model, job), array.cut, job, 0, "job0")
    return max(sum(layout_of(stage, "job0").bytes) for stage in stages)


def limit(room: int, sizes: Sizes, logical: int = STAGES) -> int:
    """Bytes of one of so many logical devices with `room` for states: a GPU reserves something."""
    return int((room + reserved(sizes.device, [sizes.device] * logical)) * 20 / 19) + 20


@contextmanager
def copied() -> Iterator[Counter[str]]:
    """Bytes that engines copy in the meantime, by direction."""
    moved: Counter[str] = Counter({"in": 0, "out": 0})

    def counted(engine: Any) -> Any:
        original = engine.copy

        def copy(self: Any, direction: str, size: int, *rest: Any) -> Any:
            moved[direction] += size
            return original(self, direction, size, *rest)

        return patch.object(engine, "copy", copy)

    with counted(CudaEngine), counted(CopyEngine):
        yield moved


def stopped(sizes: Sizes) -> Iterator[Row]:
    """One job stops early, on its own iteration; the others do not notice."""
    case = cases(sizes)[1]
    array = trainer(sizes, case.model, case.jobs)

    def on_step(job: Job, iteration: int, value: float) -> None:
        if job is case.jobs[0]:
            job.stop()

    with sleeping(sizes, 1):
        got = array.run(order(case.jobs, 7), 5, on_step=on_step, on_error="raise").trained
    found = differing(got, alone(array, [len(t.losses) for t in got]))
    if len(got[0].losses) != (2 if sizes.cuda else 1):
        found.append(f"the stopped job did {len(got[0].losses)} iterations")
    yield equal("early stop", found)


def resumed(sizes: Sizes) -> Iterator[Row]:
    """Two iterations with checkpoints, and two more from them."""
    jobs = [*_all(PLAIN[:2], microbatches=2), replace(PLAIN[2], precision="bf16")]
    array = trainer(sizes, images(sizes), jobs)
    with TemporaryDirectory() as folder, sleeping(sizes, 1):
        how: dict[str, Any] = {"checkpoint": folder, "checkpoint_every": 1, "on_error": "raise"}
        array.run(order(jobs, 1), 2, **how)
        got = array.run(order(jobs, 2), 4, resume=True, **how).trained
    wanted = [replace(t, losses=t.losses[2:]) for t in alone(array, [4] * len(jobs))]
    yield equal("checkpoints, resumed", differing(got, wanted))


def queued(sizes: Sizes) -> Iterator[Row]:
    """Six jobs on two seats: two begin, two wait, two come later."""
    jobs = [Job(j, 8, adamw if j % 2 else sgd) for j in range(6)]
    array, supply = trainer(sizes, images(sizes), jobs[:4]), iter(jobs[4:])
    how: dict[str, Any] = {"queue": True, "refill": lambda job: next(supply, None)}
    with sleeping(sizes, 1):
        result = array.run(order(jobs[:2], 1), STEPS, on_error="raise", **how)
    yield equal("queue, refill", differing(result.trained, alone(array, [STEPS] * len(jobs))))


def isolated(sizes: Sizes) -> Iterator[Row]:
    """One job asks for more memory than there is in its second iteration; the others go on."""
    yield _greedy(sizes, "a batch beyond all memory", 2**36, images(sizes).loss)


def crowded(sizes: Sizes) -> Iterator[Row]:
    """The GPU is full when the backward of a job of many samples asks for more."""
    many, spare = 2**15 if sizes.cuda else 64, list[Tensor]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if len(output) == many and not spare:
            if not sizes.cuda:
                raise torch.OutOfMemoryError("as on a full GPU")
            torch.cuda.synchronize(sizes.device)
            torch.cuda.empty_cache()
            left = torch.cuda.mem_get_info(sizes.device)[0] - 768 * 2**20  # for the other jobs
            spare.append(torch.empty(left, dtype=torch.uint8, device=sizes.device))
        return images(sizes).loss(output, target)

    row = _greedy(sizes, "a full GPU", many, loss)
    if spare and torch.cuda.memory_allocated(sizes.device) - spare[0].numel() > 2**31:
        row = row._replace(value=f"{row.value}; its memory was not given back", holds=False)
    yield row


def _greedy(sizes: Sizes, name: str, many: int, loss: Any) -> Row:
    """The last of four jobs has so many samples in its second iteration, and fails alone."""
    jobs = [*_all(PLAIN), Job(9, 8, sgd, name="greedy")]
    model = images(sizes, "on the GPU")  # with no part of them in memory of the host

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for iteration, (x, target) in enumerate(model.data(job, start), start):
            if job.name == "greedy" and iteration == 1:
                yield x[:1].expand(many, -1, -1, -1), target[:1].expand(many)
            else:
                yield x, target

    array = trainer(sizes, model._replace(data=data, loss=loss), jobs)
    got = array.run(order(jobs, 5), STEPS).trained
    found = differing(got[:3], alone(array, [STEPS] * 3))
    error = str(jobs[3].error)
    if jobs[3].status != "failed" or (sizes.cuda and "OutOfMemory" not in error):
        found.append(f"the greedy job is {jobs[3].status}: {error}")
    return equal(f"out of memory, {name}", found, f"; {error:.70}")


def by_default(sizes: Sizes) -> Iterator[Row]:
    """How many cases are equal with the kernels that torch chooses by default."""
    kernels(False)
    rows = cases(sizes)
    different = [case.name for case in rows if found_in(sizes, case, [1])]
    value = f"{len(rows) - len(different)} of {len(rows)} cases equal"
    yield Row("exact: default flags, not judged", "; not: ".join([value, *different]))


def taken_at_once(posted: cuda_streams.Posted, lane: int, stream: torch.cuda.Stream) -> Any:
    """`lanes._taken` without its wait: a block does not wait for what other stages have sent."""
    for tensor in posted.parcel.tensors:
        if posted.lane != lane and tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)
    return posted.parcel


def states_at_once(self: CudaEngine, events: Any) -> None:
    """`CudaEngine.wait` without its wait: a block does not wait for copies of its state."""


MUTANTS: dict[str, Any] = {
    "inputs": (cuda_streams, "_taken", taken_at_once),
    "states": (CudaEngine, "wait", states_at_once),
}  # fmt: skip


def mutant(sizes: Sizes, name: str) -> Iterator[Row]:
    """The sleeps must show that a wait is missing; without streams, on a CPU, nothing is."""
    case = cases(sizes)[1]
    if name == "states":
        case = slotted(sizes)
        case = case._replace(how={"memory": limit(2 * state_bytes(sizes, case), sizes)})
    seed, found = 0, list[str]()
    with patch.object(*MUTANTS[name]):
        while not found and seed < sizes.of(9, 4):
            seed += 1
            try:
                found = found_in(sizes, case, [seed])
            except InputError:
                raise
            except Exception as error:  # by a loss that is no number
                found = [f"{type(error).__name__}: {error}"]
    value = f"with seed {seed}: {found[0]:.70}" if found else f"equal with {seed} seeds"
    yield sizes.row(f"exact: no wait for {name}", value, "is found", bool(found))
