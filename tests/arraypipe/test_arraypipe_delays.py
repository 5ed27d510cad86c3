"""Kernels and copies that come late do not change a bit, unless a wait is missing."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

import arraypipe_models
import pytest
import runs
import torch
from depth import depth
from streams_cases import ONE, STEPS, TWO, jobs, run, slotted, trainer, without
from streams_model import streams
from test_arraypipe_process import ask

from optsched.arraypipe import JobFailed, random_schedule
from optsched.arraypipe.checkpoint import folder
from optsched.arraypipe.memory import cuda_engine
from optsched.arraypipe.runtime import cuda_streams, data
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from pathlib import Path


CREDITS = "optsched.arraypipe.distributed.transport"


@cache
def alone(recompute: bool) -> Any:
    """Every job trained without streams."""
    rows = [dataclasses.replace(job, recompute=recompute or job.recompute) for job in jobs()]
    array = arraypipe_models.trainer(rows)
    return [array.train_alone(j, STEPS) for j in range(len(rows))]


def train(way: str, place: Path, seed: int, delays: int | None) -> list[str]:
    """What is wrong with a training on simulated GPUs: races, and tensors that differ."""
    wanted = alone(way == "slots")
    with pytest.MonkeyPatch.context() as patch, streams(patch, delays) as machine:
        if way == "slots":
            result = slotted(seed)
        elif way == "seats":  # the third job trains when the first two have ended
            schedule = random_schedule([2, 1], 3, recompute=[1], seed=seed)
            result = runs.run(trainer(jobs()), schedule, STEPS, queue=True, on_error="raise")
        else:
            how: Any = {"checkpoint": place, "checkpoint_every": 1} if way == "checkpoints" else {}
            result = run(trainer(jobs(), TWO if way == "links" else ONE), seed, **how)
    found = [*machine.races]
    for j, model in enumerate(wanted):
        found += [f"job {j}: {row}" for row in differences(result.trained[j], model)]
        if way == "checkpoints":
            kept = torch.load(place / f"job{j}" / str(STEPS) / "model.pt")
            rows = {**model.parameters, **model.buffers}.items()
            found += [f"job {j}: kept {k}" for k, t in rows if not torch.equal(kept[k], t)]
    return found


@pytest.mark.parametrize("way", ["lanes", "links", "slots", "seats", "checkpoints"])
def test_delays_change_no_bit(way: str, tmp_path: Path) -> None:
    """Whatever stream, copy or link is late."""
    for seed in range(depth(4, 40)):
        assert train(way, tmp_path / str(seed), seed, seed) == [], f"seed {seed}"


MUTANTS = [
    ("lanes", cuda_streams, "_taken", "stream.wait_event("),
    ("lanes", cuda_streams, "_taken", "tensor.record_stream("),
    ("lanes", cuda_streams.Late, "item", "self.there.synchronize()", "pass"),
    ("lanes", data, "uploaded", "now.wait_event("),
    ("lanes", data, "uploaded", "there.record_stream("),
    ("links", cuda_streams.Lanes, "_pushed", "outward.wait_event("),
    ("links", cuda_streams.Lanes, "_pushed", "_NOWHERE, arrived)", "_NOWHERE, ready)"),
    ("links", cuda_streams, "_copied", "tensor.record_stream("),
    ("slots", cuda_engine.CudaEngine, "wait", "stream.wait_event("),
    ("slots", cuda_engine.CudaEngine, "copy", "stream.wait_event("),
    ("slots", cuda_engine.CudaEngine, "finish", "torch.cuda.synchronize("),
    ("checkpoints", folder._Noted, "wait", "self.there.synchronize()", "pass"),
]
"""What removes one wait of the product, or what tells the allocator of a use."""

ON_RANKS = [
    (f"{CREDITS}.CreditedLinks", "receive", "stream.wait_event("),
    (f"{CREDITS}.CreditedLinks", "receive", "buffer.record_stream("),
    (f"{CREDITS}.CreditedLinks", "_deliver", "item.made.synchronize()", "pass"),
    (f"{CREDITS}.CreditedLinks", "_collect", ", 0).wait()", ", 0)"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda row: f"{row[2]}-{row[3]}")
def test_a_missing_wait_is_found(
    mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a wrong bit or by the clocks of the streams."""
    way, owner, name, *change = mutant
    alone(way == "slots")
    monkeypatch.setattr(owner, name, without(owner, name, *change))
    for delays in range(4):
        try:
            found = train(way, tmp_path / str(delays), 1, delays)
        except (JobFailed, AssertionError):  # by a loss that is no number; times not there yet
            return
        if found:
            return
    pytest.fail("nothing was found")


@pytest.mark.slow
def test_a_missing_wait_on_ranks_is_found(tmp_path: Path) -> None:
    """... and by the links of the process backend."""
    groups = [(2, "streamed_without", *row) for row in ON_RANKS]
    assert all(ask(tmp_path, groups, 300))
