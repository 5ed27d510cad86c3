"""Whether every job of an array on the device equals the job alone, bit by bit."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.executor.gpu_cases import Row, Sizes, adamw, image_array, image_batches, images, sgd
from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Job, random_schedule
from optsched.arraypipe.split import build, split
from optsched.arraypipe.states.budget import reserved
from optsched.arraypipe.states.cuda_engine import CudaEngine
from optsched.arraypipe.states.engines import HostEngine
from optsched.arraypipe.states.slots import layout_of
from optsched.arraypipe.train_alone import Trained, differences

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STEPS = 3


def exactness(sizes: Sizes) -> list[Row]:
    """All cases; random orders of all of them."""
    rows = []
    for name, jobs in cases().items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = [d for seed in range(sizes.orders) for d in trained(sizes, jobs, seed)]
        if any("AccumulateGrad" in str(w.message) for w in told):
            found.append("autograd accumulates on another stream than it computes on")
        rows.append(_row(name, found))
    return [*rows, stopped(sizes), *slots(sizes), isolated(sizes)]


def cases() -> dict[str, list[Job]]:
    """Jobs by what is special about them."""
    plain = [Job(0, 8, adamw), Job(1, 11, sgd), Job(2, 8, sgd)]
    fused = lambda named: torch.optim.Adam(named, lr=1e-3, fused=True)  # noqa: E731
    early = lambda named: torch.optim.Adagrad(named, lr=1e-2)  # noqa: E731
    looped = lambda named: torch.optim.AdamW(named, lr=1e-3, foreach=False)  # noqa: E731

    def all_of(**changes: Any) -> list[Job]:
        return [dataclasses.replace(job, **changes) for job in plain]

    return {
        "dropout, BatchNorm": plain,
        "micro-batches": all_of(microbatches=4),
        "recompute": all_of(microbatches=2, recompute=True),
        "clipping": all_of(microbatches=2, clip_norm=0.1),
        "bf16": all_of(precision="bf16"),
        "fused, foreach off, state made early": [
            Job(j, 8, make) for j, make in enumerate((fused, looped, early))
        ],
    }


def trained(sizes: Sizes, jobs: Sequence[Job], seed: int, **how: Any) -> list[str]:
    """Train in a random order; every tensor that differs from training alone."""
    array = image_array(sizes, jobs, how.pop("memory", None))
    result = array.run(order(jobs, seed), STEPS, **{"on_error": "raise", **how})
    return [d for j in range(len(jobs)) for d in compared(result.trained[j], alone(array, j))]


def order(jobs: Sequence[Job], seed: int) -> Any:
    """A random order; jobs that clip have updates of their own, those that recompute have R."""
    together = [j for j, job in enumerate(jobs) if job.clip_norm is not None]
    return random_schedule(
        [job.microbatches for job in jobs], 4, update=together, together=together,
        recompute=[j for j, job in enumerate(jobs) if job.recompute], seed=seed,
    )  # fmt: skip


def alone(array: ArrayTrainer, j: int, steps: int = STEPS) -> Trained:
    """The reference on the same device."""
    return array.train_alone(j, steps)


def compared(got: Trained, reference: Trained) -> list[str]:
    """Differences; a run that trained nothing would have none, so losses must be there."""
    return differences(got, reference) or ([] if got.losses else ["no iteration was run"])


def stopped(sizes: Sizes) -> Row:
    """One job stops early, on its own iteration; the others do not notice."""
    jobs = cases()["micro-batches"]
    array = image_array(sizes, jobs)

    def on_step(job: Job, iteration: int, value: float) -> None:
        if job is jobs[0]:
            job.stop()

    result = array.run(order(jobs, 7), 5, on_step=on_step, on_error="raise")
    found = [
        d
        for j in range(len(jobs))
        for d in compared(result.trained[j], alone(array, j, len(result.trained[j].losses)))
    ]
    done = len(result.trained[0].losses)
    if done != (2 if sizes.cuda else 1):
        found.append(f"the stopped job did {done} iterations")
    return _row("early stop", found)


def slots(sizes: Sizes) -> list[Row]:
    """States in one slot, in two, ... until all fit."""
    jobs = [dataclasses.replace(job, optimizer=adamw, recompute=True) for job in cases()["bf16"]]
    model = build(lambda: images(sizes), jobs[0])
    array = image_array(sizes, jobs)
    stages = split(model, array.stages, jobs[0], 0, "job0")
    # bf16 weights, their float32 masters and moments: at most what the layout of fp32 is, twice
    largest = 2 * max(sum(layout_of(stage, "job0").bytes) for stage in stages)
    rows, seen = [], set()
    for share in (0.6, 0.8, 1.1, 1.6, 2.2, 3.5):
        memory = limit(int(share * largest), sizes)
        try:
            with copied() as moved:
                found = trained(sizes, jobs, 3, memory=memory)
        except InputError:  # not even one slot fits
            continue
        if moved["in"] not in seen:
            seen.add(moved["in"])
            rows.append(_row(f"slots, {moved['in'] / 2**20:.1f} MiB copied in", found))
    if len(rows) < 2 or 0 not in seen:
        rows.append(Row("slots", f"{len(rows)} sizes tried", "from one slot to all", False))
    return rows


def limit(room: int, sizes: Sizes) -> int:
    """Bytes of a logical device with so many for states: on a GPU something is reserved."""
    gpu = torch.device("cuda", 0)
    reserve = reserved(gpu, [gpu] * sizes.stages)
    return int((room + reserve) * 20 / 19) + 20 if sizes.cuda else room


@contextmanager
def copied() -> Iterator[Counter[str]]:
    """Bytes that engines copy in the meantime, by direction."""
    moved: Counter[str] = Counter({"in": 0, "out": 0})
    kept = [(engine, engine.copy) for engine in (CudaEngine, HostEngine)]

    def counted(original: Any) -> Any:
        def copy(self: Any, direction: str, size: int, *rest: Any) -> Any:
            moved[direction] += size
            return original(self, direction, size, *rest)

        return copy

    try:
        for engine, original in kept:
            engine.copy = counted(original)  # type: ignore[method-assign]
        yield moved
    finally:
        for engine, original in kept:
            engine.copy = original  # type: ignore[method-assign]


def isolated(sizes: Sizes) -> Row:
    """One job asks for more memory than there is in its second iteration; the others go on."""
    jobs = [*cases()["dropout, BatchNorm"], Job(9, 8, sgd, name="greedy")]
    honest = image_batches(sizes)

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for iteration, (x, target) in enumerate(honest(job, start), start):
            if job.name == "greedy" and iteration == 1:
                yield x[:1].expand(2**36, -1, -1, -1), target
            else:
                yield x, target

    array = image_array(sizes, jobs)
    array.data = data
    result = array.run(order(jobs, 5), STEPS)
    found = [d for j in range(3) for d in compared(result.trained[j], alone(array, j))]
    greedy = jobs[3]
    if greedy.status != "failed" or greedy.error is None:
        found.append(f"the greedy job is {greedy.status}")
    elif sizes.cuda and "OutOfMemory" not in str(greedy.error):
        found.append(f"the greedy job failed otherwise: {greedy.error}")
    return _row("out of memory in one job", found)


def _row(name: str, found: list[str]) -> Row:
    value = "equal" if not found else f"{len(found)} differ; {found[0]}"
    return Row(f"exact: {name}", value, "equal to training alone", not found)
