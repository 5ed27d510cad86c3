"""Split backward: gradients of inputs and of weights in blocks of their own, with the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from arraypipe_models import adamw, sgd, trainer
from arraypipe_plans import random_rolling
from runs import array_trainer, run
from torch import Tensor, nn
from torch.nn import functional as F

from optsched import InputError, JobArray, pipelines
from optsched.arraypipe import Job
from optsched.arraypipe.plan.plan import compile_plan
from optsched.arraypipe.runtime.blocks import backward_input
from optsched.arraypipe.train_alone import differences


class Layers(nn.Module):
    """Layers of many kinds; weights used twice, beside the inputs, and in a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.place = nn.Parameter(torch.randn(8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rows, self.across = nn.GRU(8, 8, batch_first=True), nn.Conv1d(5, 5, 3, padding=1)
        self.batches = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two outputs, of which the second does not depend on the input."""
        x = self.first(torch.relu(self.first(self.norm(x + self.place))))
        x = self.last(x + self.attention(x, x, x)[0]) * self.place
        return self.rows(self.across(self.batches(x)))[0], 2 * self.place


@pytest.mark.parametrize(
    ("frozen", "lowered", "inputs"),
    [(False, False, True), (True, True, True), (True, False, False)],
)
def test_gradients_have_the_bits_of_the_whole_backward(
    frozen: bool, lowered: bool, inputs: bool
) -> None:
    """All of them; those of weights only in the second half."""
    torch.manual_seed(0)
    model = Layers()
    model.last.requires_grad_(not frozen)
    x, ends = torch.randn(3, 5, 8, requires_grad=inputs), [torch.randn(3, 5, 8), torch.randn(8)]
    rows: list[list[Any]] = []
    for split in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            outputs = model(x)
        if split:
            branches = backward_input(outputs, ends, [x])
            assert all(p.grad is None for p in model.parameters())
            assert (x.grad is not None) == inputs
            for branch in branches:
                branch.run()
        else:
            torch.autograd.backward(outputs, ends)
        rows.append([t.grad for t in (x, *model.parameters())])
        model.zero_grad()
        x.grad = None
    for whole, halves in zip(*rows, strict=True):
        assert (whole is None) == (halves is None)
        assert whole is None or torch.equal(whole, halves)


def array(jobs: list[Job], **options: Any) -> JobArray:
    """Three stages with split backward."""
    n = len(jobs)
    return JobArray(
        [[2] * 3] * n, [[2] * 3] * n, weight=[[1] * 3] * n, place=[0, 1, 2],
        micro_batches=[job.microbatches for job in jobs], **options,
    )  # fmt: skip


@pytest.mark.parametrize(("order", "update_mode"), [("zb_h1", "fused"), ("zb_h2", "block")])
def test_zero_bubble_orders(order: str, update_mode: str) -> None:
    """Schedules of `optsched.pipelines`, with and without recomputation."""
    jobs = [
        Job(0, 9, adamw, microbatches=4),
        Job(1, 8, sgd, microbatches=3, recompute=True, precision="amp-bf16"),
    ]
    made = trainer(jobs)
    schedule = getattr(pipelines, order)(array(jobs, update_mode=update_mode))
    result = run(made, schedule, 3, on_error="raise")
    for j in range(2):
        assert differences(result.trained[j], made.train_alone(j, 3)) == []
    assert {"I", "W"} <= set(result.trace.kind.tolist())


@pytest.mark.parametrize("seed", range(2))
def test_random_orders(seed: int) -> None:
    """Weights late, offsets, recompute blocks."""
    draw = random.Random(seed)
    jobs = [Job(j, 8, (sgd, adamw)[j % 2], microbatches=draw.randint(1, 3)) for j in range(3)]
    problem = array(
        jobs, update_mode=draw.choice(["fused", "block"]), objective="period", update=1,
        recompute=[[1] * 3] * 3, recompute_as_block=True,
        recompute_mode=[draw.random() < 0.5 for _ in jobs],
    )  # fmt: skip
    made = trainer(jobs)
    result = run(made, random_rolling(problem, seed=seed), 3, on_error="raise")
    for j in range(3):
        assert differences(result.trained[j], made.train_alone(j, 3)) == []


def test_what_cannot_be_split() -> None:
    """Clipping, whose updates wait for the W blocks of all stages."""
    jobs = [Job(0, 8, sgd, microbatches=2, clip_norm=1.0)]
    for update_mode in ("block", "global"):
        with pytest.raises(InputError, match="together: job 0 has W blocks"):
            compile_plan(pipelines.zb_h1(array(jobs, update_mode=update_mode)), together=[0])


def test_tied_weights_cannot_be_split() -> None:
    """Their gradients come with B."""

    def build() -> nn.Sequential:
        layers = [nn.Linear(6, 6) for _ in range(3)]
        layers[2].weight = layers[0].weight
        return nn.Sequential(*layers)

    jobs, x = [Job(0, 8, sgd, microbatches=2)], torch.ones(8, 6)
    made = array_trainer(
        build, lambda job, start: iter([(x, x)] * 9), jobs=jobs, stages=[1, 2], loss=F.mse_loss
    )
    with pytest.raises(InputError, match=r"W blocks .* a weight that several stages use"):
        run(made, pipelines.zb_h1(array(jobs)), 1)
