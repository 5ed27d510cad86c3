"""Clipping, schedulers, precisions, tied weights, skips: each to the bits of training alone."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import runs
import torch
from arraypipe_models import adamw, build_model, data, loss, sgd, trainer
from depth import few_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import array_trainer, run
from torch import nn

from optsched import InputError, verify
from optsched.arraypipe import ArrayTrainer, Job, random_schedule
from optsched.arraypipe.job import PRECISIONS
from optsched.arraypipe.runtime import environment
from optsched.arraypipe.runtime.state import LossScale
from optsched.arraypipe.train_alone import Trained, differences, train_alone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


STEPS = 4


def found(array: ArrayTrainer, seed: int, **order: Any) -> list[str]:
    """Train in a random order with update blocks, compare each job with training alone."""
    counts = [job.microbatches for job in array.jobs]
    everyone = range(len(counts))
    schedule = random_schedule(
        counts, array.n_stages, seed=seed, update=everyone, together=everyone, **order
    )
    result = run(array, schedule, STEPS, on_error="raise")
    return [
        line
        for j in everyone
        for line in differences(result.trained[j], array.train_alone(j, STEPS))
    ]


def step_down(optimizer: torch.optim.Optimizer) -> Any:
    """Halve the learning rate after every second iteration."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    """Halve the learning rate whenever the loss has not improved by a tenth."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.1
    )


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "clipped to little": [{"clip_norm": 1e-3, "microbatches": 3}, {"clip_norm": 1e-3}],
    "clipped": [{"clip_norm": 0.3}, {"clip_norm": 0.3, "recompute": True}],
    "step": [{"scheduler": step_down}, {"scheduler": step_down, "microbatches": 2}],
    "plateau": [{"scheduler": plateau}, {"scheduler": plateau, "microbatches": 2}],
    **{
        precision: [
            {"precision": precision, "clip_norm": 0.1},
            {"precision": precision, "microbatches": 2, "recompute": True},
        ]
        for precision in ("fp64", "bf16", "amp-bf16", "amp-fp16")
    },
}
"""Of two jobs; a third one has none."""


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_jobs(name: str) -> None:
    """Each as alone, and each changes what is trained."""
    rows = SETTINGS[name]
    array = trainer([Job(k, 8, (adamw, sgd)[k % 2], **row) for k, row in enumerate([*rows, {}])])
    assert found(array, 1) == []
    alone = array.train_alone(0, STEPS)
    assert alone.losses != trainer([Job(0, 8, adamw)]).train_alone(0, STEPS).losses
    dtype = PRECISIONS[rows[0].get("precision", "fp32")]
    assert {t.dtype for t in alone.parameters.values()} == {dtype}


def test_scaled_jobs_leave_out_steps(tmp_path: Path) -> None:
    """Gradients that overflow at first halve the scale, which a checkpoint keeps."""
    jobs = [Job(j, 8, adamw, precision="amp-fp16", clip_norm=0.3 * j or None) for j in range(2)]
    array = trainer(jobs, loss=lambda y, t: 20 * loss(y, t))
    schedule = random_schedule([1] * 2, 3, update=[0, 1], together=[0, 1], seed=2)
    run(array, schedule, 1, checkpoint=tmp_path)
    result = run(array, schedule, 6, checkpoint=tmp_path, resume=True)
    for j, got in enumerate(result.trained):
        alone = array.train_alone(j, 6)
        assert got.losses == alone.losses[1:]
        assert differences(replace(got, losses=alone.losses), alone) == []
        assert all(0 < state["step"] < 6 for state in alone.optimizer.values())


@given(st.lists(st.booleans(), max_size=30))
def test_the_scale_is_that_of_torch(found: list[bool]) -> None:
    """After any row of steps with and without infinities."""
    theirs, ours = torch.amp.GradScaler("cpu", growth_interval=3), LossScale()
    for infinite in found:
        weight = nn.Parameter(torch.zeros(1))
        theirs.scale(weight.sum()).backward()
        if infinite:
            weight.grad = torch.tensor([float("inf")])
        theirs.step(torch.optim.SGD([weight], lr=0.1))
        theirs.update()
        with patch("optsched.arraypipe.runtime.state._INTERVAL", 3):
            ours.update(not infinite)
        assert ours.scale == theirs.get_scale()


@pytest.mark.parametrize("job", [Job(0, 8, sgd, clip_norm=1.0), Job(0, 8, sgd, scheduler=plateau)])
def test_updates_together_need_blocks_of_their_own(job: Job) -> None:
    """Fused updates cannot wait for all stages: refused before anything is trained."""
    with pytest.raises(InputError, match=r'update_mode="global"'):
        run(trainer([job]), random_schedule([1], 3), 1)


# tied weights


class Language(nn.Module):
    """Embedding and head share one weight, which a middle stage may use too."""

    def __init__(self, uses: int = 1, third: bool = False) -> None:
        super().__init__()
        self.embed, self.uses = nn.Embedding(11, 8), uses
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))
        back = nn.Sequential(nn.Linear(8, 11, bias=False), nn.Tanh(), nn.Linear(11, 8))
        self.third, self.head = back if third else nn.Tanh(), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        if third:
            back[0].weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        """Logits of tokens, each of which is looked up once or twice."""
        y = self.embed(x)
        for k in range(1, self.uses):
            y = y + self.embed((x + k) % 11)
        return self.head(self.third(self.middle(y)))


def tokens(job: Job, start: int) -> Iterator[tuple[Any, Any]]:
    """Random tokens and their successors."""
    for iteration in range(start, 10**6):
        draw = torch.Generator().manual_seed(job.seed * 1000 + iteration)
        x = torch.randint(0, 11, (job.batch_size, 5), generator=draw)
        yield x, (x * 3 + 1) % 11


def token_loss(output: Any, target: Any) -> Any:
    """Mean cross entropy."""
    return loss(output.flatten(0, 1), target.flatten())


@few_examples
@given(
    uses=st.sampled_from([1, 2]),
    third=st.booleans(),
    seed=st.integers(0, 10**6),
    microbatches=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3),
    clip=st.sampled_from([None, 0.1]),
    precision=st.sampled_from(["fp32", "fp64", "bf16"]),
    place=st.sampled_from([[0, 1, 2, 3], [0, 1, 1, 0], [0, 0, 0, 0]]),
    recompute=st.booleans(),
)
def test_tied_weights(
    uses: int, third: bool, seed: int, microbatches: list[int], clip: float | None,
    precision: str, place: list[int], recompute: bool,
) -> None:  # fmt: skip
    """All uses of a micro-batch are added first, in the order in which autograd adds them alone."""
    jobs = [
        Job(
            j, 6, adamw if j % 2 else sgd, microbatches=m, clip_norm=clip, precision=precision,
            recompute=recompute, model={"uses": uses, "third": third},
        )
        for j, m in enumerate(microbatches)
    ]  # fmt: skip
    array = array_trainer(
        Language, tokens, jobs=jobs, stages=["middle", "third", "head"], loss=token_loss
    )
    assert found(array, seed, place=place) == []


def test_the_device_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of LOCAL_RANK unless another one, or the CPU, is given."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert environment.device_of(None) == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert environment.device_of(None) == environment.device_of("cuda") == torch.device("cuda:1")
    assert environment.device_of("cuda:0") == torch.device("cuda:0")
    assert environment.device_of("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="device: cuda:7 does not exist; this host has 2 GPUs"):
        environment.device_of("cuda:7")


# any feasible order


STEPS_EXACT = 3
MAKERS = {"adamw": adamw, "sgd": sgd}
Settings = tuple[int, int, str, int, bool]  # seed, batch size, optimizer, micro-batches, recompute


def job(row: Settings) -> Job:
    """The job with these settings."""
    seed, batch, optimizer, parts, recompute = row
    return Job(seed, batch, MAKERS[optimizer], microbatches=parts, recompute=recompute)


@cache
def alone(row: Settings) -> Trained:
    """The reference; it does not depend on `recompute`."""
    reference = dataclasses.replace(job(row), recompute=False)
    return train_alone(build_model, reference, ("4", "6"), loss, data, STEPS_EXACT)


def all_differences(rows: list[Settings], **order: Any) -> list[str]:
    """Train the jobs in a random order and compare each with training alone."""
    array = trainer([job(row) for row in rows])
    result = runs.run(
        array, random_schedule([row[3] for row in rows], 3, **order), STEPS_EXACT, on_error="raise"
    )
    assert verify(result.trace) == []
    return [d for j, row in enumerate(rows) for d in differences(result.trained[j], alone(row))]


def rows_of_settings() -> st.SearchStrategy[list[Settings]]:
    """One to three jobs; the few values make the references cheap to keep."""
    row = st.tuples(
        st.integers(0, 2),
        st.sampled_from([8, 11]),
        st.sampled_from(sorted(MAKERS)),
        st.sampled_from([1, 2, 4]),
        st.booleans(),
    )
    return st.lists(row, min_size=1, max_size=3)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[list[Settings], dict[str, Any]]:
    """Jobs, stages sharing devices, and blocks of their own for recompute and update."""
    rows = draw(rows_of_settings())
    jobs = st.sampled_from(range(len(rows)))
    order = {
        "place": draw(st.sampled_from([[0, 1, 2], [0, 1, 0], [0, 0, 1], [0, 0, 0]])),
        "recompute": draw(st.sets(jobs)),
        "update": draw(st.sets(jobs)),
        "seed": draw(st.integers(0, 10**6)),
    }
    return rows, order


@settings(max_examples=settings().max_examples // 2)
@given(arrays())
def test_bit_identical_in_any_feasible_order(drawn: tuple[list[Settings], dict[str, Any]]) -> None:
    """Parameters, buffers, optimizer states and losses are equal; traces verify."""
    rows, order = drawn
    assert all_differences(rows, **order) == []


def test_keys_tell_all_blocks_apart() -> None:
    """Rule 1: 32-bit keys of neighbouring blocks of neighbouring jobs do not collide."""
    jobs = [Job(seed, 4, adamw) for seed in (0, 1, 2, 2**32, 2**62)]
    keys = {j.key(t, m, s) for j in jobs for t in range(20) for m in range(4) for s in range(4)}
    assert len(keys) == 5 * 20 * 4 * 4
    assert max(keys) < 2**32
