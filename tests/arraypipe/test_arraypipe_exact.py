"""Every job of an array reaches the bits it would reach alone, whatever the order of blocks."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

import runs
import torch
from arraypipe_models import adamw, build_model, data, loss, sgd, trainer
from hypothesis import given, settings
from hypothesis import strategies as st

from optsched import verify
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.train_alone import Trained, differences, train_alone

if TYPE_CHECKING:
    import pytest

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


@settings(max_examples=settings().max_examples // 2)
@given(arrays())
def test_bit_identical_in_any_feasible_order(drawn: tuple[list[Settings], dict[str, Any]]) -> None:
    """Parameters, buffers, optimizer states and losses are equal; traces verify."""
    rows, order = drawn
    assert all_differences(rows, **order) == []


PAIR: list[Settings] = [(0, 11, "adamw", 2, False), (1, 8, "sgd", 2, True)]


# every rule, broken on purpose, must be noticed


def test_noticed_wrong_random_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1: one key for all blocks gives other dropout masks."""
    monkeypatch.setattr(
        blocks, "seed_generator", lambda key, device: torch.default_generator.manual_seed(0)
    )
    assert all_differences(PAIR)


def test_noticed_statistics_updated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 2: a recompute on the real buffers updates batch statistics once too often."""
    from contextlib import nullcontext

    monkeypatch.setattr(blocks, "buffers_at", lambda holders, values: nullcontext())
    assert any("running_mean" in d for d in all_differences([PAIR[1]]))


def test_keys_tell_all_blocks_apart() -> None:
    """Rule 1: 32-bit keys of neighbouring blocks of neighbouring jobs do not collide."""
    jobs = [Job(seed, 4, adamw) for seed in (0, 1, 2, 2**32, 2**62)]
    keys = {j.key(t, m, s) for j in jobs for t in range(20) for m in range(4) for s in range(4)}
    assert len(keys) == 5 * 20 * 4 * 4
    assert max(keys) < 2**32


# models and optimizers of other shapes
