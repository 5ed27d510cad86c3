"""Trainings on a simulated GPU, with all states on it or with states in slots."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

import arraypipe_models
import runs
import torch
from arraypipe_models import adamw, sgd

from optsched.arraypipe import ArrayTrainer, Job, random_schedule
from optsched.arraypipe.memory import cuda_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 3
GPU = torch.device("cpu", 0)  # as `streams_model` has it


def jobs() -> list[Job]:
    """Micro-batches, recomputation and two optimizers."""
    return [
        Job(0, 8, adamw, microbatches=2),
        Job(1, 11, sgd, recompute=True),
        Job(2, 8, adamw, precision="bf16"),
    ]


def trainer(jobs: Sequence[Job], device: Any = GPU, **changes: Any) -> ArrayTrainer:
    """Of the tiny model, on a simulated GPU."""
    return arraypipe_models.trainer(jobs, device=device, **changes)


def run(array: ArrayTrainer, seed: int = 1, steps: int = STEPS, **how: Any) -> Any:
    """Train in a random order that all jobs' settings allow."""
    clipping = [j for j, job in enumerate(array.jobs) if job.clip_norm is not None]
    schedule = random_schedule(
        [job.microbatches for job in array.jobs], array.n_stages,
        update=clipping, together=clipping, seed=seed,
    )  # fmt: skip
    return runs.run(array, schedule, steps, on_error="raise", **how)


def slotted(seed: int = 1) -> Any:
    """Train with states that take turns in slots."""
    # a small part of all states, so that slots are few
    array = trainer([dataclasses.replace(job, recompute=True) for job in jobs()], memory=16_000)
    moved: list[str] = []
    original = cuda_engine.CudaEngine.copy

    def copy(self: Any, direction: str, *rest: Any) -> Any:
        moved.append(direction)
        return original(self, direction, *rest)

    cuda_engine.CudaEngine.copy = copy  # type: ignore[method-assign]
    try:
        result = run(array, seed)
    finally:
        cuda_engine.CudaEngine.copy = original  # type: ignore[method-assign]
    assert {"in", "out"} <= set(moved)
    return result


def without(owner: Any, name: str, line: str, instead: str = "id(") -> Any:
    """A function of the product in which something is missing: a wait."""
    function = getattr(owner, name)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(line) == 1
    text = text.replace(line, instead).replace("super()", f"super({owner.__name__}, self)")
    made: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{text}", function.__globals__, made)
    return made[name]
