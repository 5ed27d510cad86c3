"""Every job of an array reaches the bits it would reach alone, whatever the order of blocks."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import runs
import torch
from arraypipe_models import adamw, build_model, data, loss, sgd, trainer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from optsched import verify
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.train_alone import Trained, differences, train_alone

STEPS = 3
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
    return train_alone(build_model, reference, ("4", "6"), loss, data, STEPS)


def all_differences(rows: list[Settings], **order: Any) -> list[str]:
    """Train the jobs in a random order and compare each with training alone."""
    array = trainer([job(row) for row in rows])
    result = runs.run(
        array, random_schedule([row[3] for row in rows], 3, **order), STEPS, on_error="raise"
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


@given(arrays())
def test_bit_identical_in_any_feasible_order(drawn: tuple[list[Settings], dict[str, Any]]) -> None:
    """Parameters, buffers, optimizer states and losses are equal; traces verify."""
    rows, order = drawn
    assert all_differences(rows, **order) == []


PAIR: list[Settings] = [(0, 11, "adamw", 2, False), (1, 8, "sgd", 2, True)]


def test_a_trace_is_itself_a_schedule_to_run() -> None:
    """Running the trace of a run gives the same bits again."""
    array = trainer([job(row) for row in PAIR])
    first = runs.run(array, random_schedule([2, 2], 3, seed=6), STEPS)
    again = runs.run(array, first.trace, STEPS)
    for a, b in zip(first.trained, again.trained, strict=True):
        assert differences(a, b) == []


def test_micro_batches_are_cast_when_they_are_cut() -> None:
    """Each begins where an allocation begins, as alone: kernels may look at the alignment."""

    def rows(_: Job, start: int) -> Any:
        yield torch.ones(8, 3), torch.ones(8)

    feed = Feed(rows, Job(0, 8, adamw, microbatches=2, precision="bf16"), "a", 0)
    feed.draw(0)
    for m in range(2):
        (x,) = feed.microbatch(m, torch.device("cpu"))[0].arguments
        assert (x.dtype, x.storage_offset(), len(x)) == (torch.bfloat16, 0, 4)


# every rule, broken on purpose, must be noticed


def test_noticed_wrong_random_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1: one key for all blocks gives other dropout masks."""
    monkeypatch.setattr(
        blocks, "seed_generator", lambda key, device: torch.default_generator.manual_seed(0)
    )
    assert all_differences(PAIR)


def test_noticed_no_key_in_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1: a recompute that draws new masks has other gradients."""
    honest = blocks._run

    def run(stage: Any, kept: Any, survive: bool) -> Any:
        again = stage.kept.get(0) is kept or kept in stage.kept.values()
        return honest(stage, dataclasses.replace(kept, key=kept.key ^ again), survive)

    monkeypatch.setattr(blocks, "_run", run)
    assert all_differences([PAIR[0]]) == []  # this job does not recompute
    assert all_differences([PAIR[1]])


def test_noticed_statistics_updated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 2: a recompute on the real buffers updates batch statistics once too often."""
    from contextlib import nullcontext

    monkeypatch.setattr(blocks, "buffers_at", lambda holders, values: nullcontext())
    assert any("running_mean" in d for d in all_differences([PAIR[1]]))


class Doubled(nn.Module):
    """Twice its input, in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Not the same when it is done again."""
        return x.mul_(2)


def test_noticed_missing_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 9: without copies a stage that works in place recomputes from a destroyed input."""
    monkeypatch.setattr(blocks, "copy_of", lambda t, device: t)
    assert all_differences([PAIR[0]]) == []  # this job does not recompute
    array = trainer(
        [job(PAIR[1])],
        build_model=lambda: nn.Sequential(nn.Linear(6, 6), Doubled(), nn.Linear(6, 4)),
        stages=[1],
    )
    assert array.check_exact(STEPS)


def test_keys_tell_all_blocks_apart() -> None:
    """Rule 1: 32-bit keys of neighbouring blocks of neighbouring jobs do not collide."""
    jobs = [Job(seed, 4, adamw) for seed in (0, 1, 2, 2**32, 2**62)]
    keys = {j.key(t, m, s) for j in jobs for t in range(20) for m in range(4) for s in range(4)}
    assert len(keys) == 5 * 20 * 4 * 4
    assert max(keys) < 2**32


# models and optimizers of other shapes


class Skip(nn.Module):
    """Sends two tensors on, one of them an integer without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A tensor or such a pair to such a pair."""
        value, count = x if isinstance(x, tuple) else (x, torch.zeros(len(x), 1, dtype=torch.int64))
        return value + torch.tanh(self.inner(value)), count + 1


class Last(nn.Module):
    """Uses both tensors of the pair; a counter buffer decides the scale of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """A pair to class scores."""
        self.calls = self.calls + 1
        scores: Tensor = self.head(x[0] * x[1]) / self.calls
        return scores


class Norm(nn.Module):
    """A stage without parameters, between the others."""

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A pair to a pair, transposed on the way."""
        return (x[0].t() / (1 + x[0].t().norm())).t(), x[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_pairs_without_gradient_and_buffers_that_count(recompute: bool) -> None:
    """Boundaries may be tuples with integers; a recompute sees the buffers that F saw."""
    jobs = [Job(s, 6, adamw, microbatches=2, recompute=recompute) for s in range(2)]
    array = trainer(
        jobs, build_model=lambda: nn.Sequential(Skip(), Norm(), Skip(), Last()), stages=[1, 2, 3]
    )
    for seed in range(5):
        assert array.check_exact(STEPS, seed=seed) == []


class Branches(nn.Module):
    """No `nn.Sequential`: the forward names its parts."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)
        self.first.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.last(self.middle(self.first(x)))
        return scores


@pytest.mark.parametrize("frozen", [False, True])
def test_stages_by_name_and_frozen_stages(frozen: bool) -> None:
    """Modules may be named; a stage that needs no gradient gets none and stays as it is."""
    array = trainer(
        [Job(s, 4, sgd, model={"frozen": frozen}) for s in range(2)],
        build_model=Branches,
        stages=["middle"],
    )
    assert array.cuts == ("middle",)
    assert array.check_exact(STEPS) == []


PER_TENSOR: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "groups": lambda p: torch.optim.SGD(
        [{"params": [q], "lr": 0.1 if name.endswith("bias") else 0.01} for name, q in p]
    ),
}


@pytest.mark.parametrize("name", PER_TENSOR)
def test_optimizers_per_stage_equal_one_over_all(name: str) -> None:
    """Rule 4: any optimizer that treats tensors one by one."""
    array = trainer([Job(0, 4, PER_TENSOR[name]), Job(1, 4, PER_TENSOR[name], recompute=True)])
    assert array.check_exact(STEPS) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: Any) -> None:
    """Double and half precision are exact too."""

    def batches(j: Job, start: int) -> Any:
        return ((x.to(dtype), y) for x, y in data(j, start))

    array = trainer(
        [Job(0, 4, adamw, recompute=True), Job(1, 7, sgd, microbatches=2)],
        build_model=lambda: build_model().to(dtype),
        data=batches,
    )
    assert array.check_exact(STEPS) == []


def test_check_exact_finds_a_layer_with_its_own_counter() -> None:
    """A Python counter in a layer runs twice under recompute: no rule knows, the check does."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x / self.calls

    array = trainer(
        [Job(0, 4, sgd, recompute=True)],
        build_model=lambda: nn.Sequential(nn.Linear(6, 6), Counter(), nn.Linear(6, 4)),
        stages=[1, 2],
    )
    assert any("job0: parameter" in d for d in array.check_exact(STEPS))
