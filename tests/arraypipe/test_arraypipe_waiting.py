"""Jobs that leave their slots and jobs that take them; no bit changes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_models import adamw, build_model, exact, sgd, trainer
from arraypipe_plans import random_rolling
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st
from runs import run
from torch import nn

from optsched import JobArray, verify
from optsched.arraypipe import Job, random_schedule, training_run
from optsched.arraypipe.plan.plan import compile_plan
from optsched.arraypipe.runtime import inline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan

STEPS = 6
PARTS = [1, 2, 1, 2, 1]
CLIPPED = 3  # this job clips its gradients: its updates wait for all stages


class Tied(nn.Sequential):
    """Dropout and batch statistics; the last stage uses a weight of the first again."""

    def __init__(self) -> None:
        last = nn.Linear(6, 6)
        super().__init__(
            nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3),
            nn.Linear(6, 6), nn.BatchNorm1d(6), last, nn.Linear(6, 4),
        )  # fmt: skip
        last.weight = self[0].weight


MODELS: dict[str, tuple[Any, list[int]]] = {"plain": (build_model, [4, 6]), "tied": (Tied, [2, 5])}


def halving(optimizer: torch.optim.Optimizer) -> Any:
    """Half the learning rate after each iteration."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def jobs_of(n: int = 5) -> list[Job]:
    """Siblings that differ in all that they may differ in."""
    return [
        Job(j, 8 + j, (adamw, sgd)[j % 2], microbatches=PARTS[j], recompute=j == 2,
            clip_norm=0.5 if j == CLIPPED else None, scheduler=halving if j == 1 else None,
            precision="bf16" if j == 4 else "fp32")
        for j in range(n)
    ]  # fmt: skip


def array_of(jobs: Sequence[Job], model: str = "plain") -> Any:
    """A trainer of the model."""
    build, cuts = MODELS[model]
    return trainer(jobs, build_model=build, stages=cuts)


def any_plan(jobs: Sequence[int], seed: int) -> ExecutionPlan:
    """Some plan for these jobs: with offsets and multiplicities, or as a document without period.

    Updates wait for all stages where the job clips.
    """
    draw = random.Random(seed)
    parts = [PARTS[j] for j in jobs]
    together = [k for k, j in enumerate(jobs) if j == CLIPPED]
    if draw.random() < 0.5:
        recompute = [k for k in range(len(jobs)) if draw.random() < 0.3]
        return compile_plan(
            random_schedule(
                parts, 3, seed=seed, recompute=recompute, update=range(len(jobs)),
                together=together,
            ),
            together=together,
        )  # fmt: skip
    array = JobArray(
        [[draw.randint(1, 5) for _ in range(3)] for _ in jobs],
        [[draw.randint(1, 5) for _ in range(3)] for _ in jobs],
        update=1, update_mode="global" if together else draw.choice(["fused", "block"]),
        recompute=1, recompute_mode=tuple(j == 2 for j in jobs),
        recompute_as_block=draw.random() < 0.5, place=draw.choice([None, [0, 1, 0], [0, 0, 1]]),
        micro_batches=parts, objective="period",
        multiplicity=[draw.randint(1, 2) for _ in jobs],
    )  # fmt: skip
    return compile_plan(
        random_rolling(array, spread=draw.randint(0, 2), seed=seed), together=together
    )


@pytest.fixture(autouse=True)
def short_segments() -> Iterator[None]:
    """A change may come after every cycle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "FIRST_CYCLES", 1)
        patch.setattr(inline, "cycles_for", lambda segment, seconds: 1)
        yield


def run_and_compare(case: dict[str, Any]) -> None:
    """Run with stops and a job that takes a free slot; compare all with training alone."""
    jobs, model = jobs_of(), case["model"]
    late = [jobs.pop()] if case["refills"] else []
    running = list(range(len(jobs) - case["waiting"]))
    array = array_of(jobs, model)

    def on_step(job: Job, t: int, value: float) -> None:
        if case["stops"].get(job.seed) == t:
            job.stop()

    def refill(ended: Job) -> Job | None:
        return late.pop() if late and ended.microbatches == PARTS[4] else None

    result = run(
        array, any_plan(running, case["seed"]), STEPS, on_step=on_step, queue=True, refill=refill,
        on_error="raise",
    )  # fmt: skip
    assert verify(result.trace) == []
    for j, job in enumerate(array.jobs):
        n = case["stops"].get(j, STEPS - 1) + 1
        assert (job.status, len(result.losses[j])) == ("done" if n == STEPS else "stopped", n)
    assert exact(array, result)


def cases() -> st.SearchStrategy[dict[str, Any]]:
    """Everything that may happen in one run."""
    return st.fixed_dictionaries({
        "model": st.sampled_from(sorted(MODELS)),
        "seed": st.integers(0, 10**6),
        "stops": st.dictionaries(st.integers(0, 4), st.integers(0, STEPS - 1), max_size=3),
        "refills": st.booleans(),
        "waiting": st.integers(0, 1),
    }).filter(lambda case: not case["refills"] or not case["waiting"])  # fmt: skip


@few_examples
@given(cases())
def test_jobs_that_come_and_go_change_no_bit(case: dict[str, Any]) -> None:
    """Whoever takes whose slot at whatever moment, every job is as if it were alone."""
    run_and_compare(case)
