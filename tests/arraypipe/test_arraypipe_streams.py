"""Trainings on a simulated GPU: every access is ordered by streams and events, no bit differs."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

import arraypipe_models
import pytest
import runs
import torch
from arraypipe_models import adamw, sgd
from depth import depth
from streams_cases import GPU, STEPS, jobs, run, slotted, trainer, without
from streams_model import streams
from test_arraypipe_process import ask

from optsched import verify
from optsched.arraypipe import Job, JobFailed, random_schedule
from optsched.arraypipe.checkpoint import folder
from optsched.arraypipe.checkpoint.weights import read_weights
from optsched.arraypipe.memory import cuda_engine
from optsched.arraypipe.runtime import inline
from optsched.arraypipe.runtime.cuda_streams import Late, uploaded
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from pathlib import Path


@cache
def alone(recompute: bool) -> Any:
    """Every job trained without streams."""
    rows = [dataclasses.replace(job, recompute=recompute or job.recompute) for job in jobs()]
    array = arraypipe_models.trainer(rows)
    return [array.train_alone(j, STEPS) for j in range(len(rows))]


def train(case: str, place: Path, seed: int, delays: int | None) -> list[str]:
    """Races and differing tensors of a training on a simulated GPU."""
    expected = alone(case == "slots")
    with pytest.MonkeyPatch.context() as patch, streams(patch, delays) as machine:
        if case == "slots":
            result = slotted(seed)
        elif case == "queue":  # the third job trains when the first two have ended
            schedule = random_schedule([2, 1], 3, recompute=[1], seed=seed)
            result = runs.run(trainer(jobs()), schedule, STEPS, queue=True, on_error="raise")
        else:
            how: Any = {"checkpoint": place, "checkpoint_every": 1} if case == "checkpoints" else {}
            result = run(trainer(jobs()), seed, **how)
    found = [*machine.races, *map(str, verify(result.trace))]
    if case == "slots" and not result.report.exposed_ns > 0:
        found.append("no block has waited for a copy")
    for j, model in enumerate(expected):
        found += [f"job {j}: {row}" for row in differences(result.trained[j], model)]
        if case == "checkpoints":
            kept = read_weights(place / f"job{j}" / str(STEPS))
            rows = {**model.parameters, **model.buffers}.items()
            found += [f"job {j}: kept {k}" for k, t in rows if not torch.equal(kept[k], t)]
    return found


@pytest.mark.parametrize("case", ["inline", "slots", "queue", "checkpoints"])
def test_delays_change_no_bit(case: str, tmp_path: Path) -> None:
    """Whatever stream or copy is late; without delays the clocks of the streams decide."""
    for seed in range(depth(3, 40)):
        delays = seed or None
        assert train(case, tmp_path / str(seed), seed, delays) == [], f"seed {seed}"


MUTANTS = [
    ("slots", cuda_engine.CudaEngine, "wait", "stream.wait_event("),
    ("slots", cuda_engine.CudaEngine, "copy", "stream.wait_event("),
    ("slots", cuda_engine.CudaEngine, "finish", "torch.cuda.synchronize("),
    ("checkpoints", folder._Noted, "wait", "self.copied.synchronize()", "pass"),
]
"""What removes one wait of the product."""

ON_RANKS = (
    "optsched.arraypipe.distributed.messages", "pack",
    "torch.cuda.current_stream(device).synchronize()", "pass",
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda row: f"{row[2]}-{row[3]}")
def test_a_missing_wait_is_found(
    mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a wrong bit or by the clocks of the streams."""
    case, owner, name, *change = mutant
    alone(case == "slots")
    monkeypatch.setattr(owner, name, without(owner, name, *change))
    for delays in range(4):
        try:
            found = train(case, tmp_path / str(delays), 1, delays)
        except (JobFailed, AssertionError):  # by a loss that is no number; times not known yet
            return
        if found:
            return
    pytest.fail("nothing was found")


@pytest.mark.slow
def test_a_missing_wait_on_ranks_is_found(tmp_path: Path) -> None:
    """... and by the messages between ranks."""
    assert all(ask(tmp_path, [(2, "streamed_without", *ON_RANKS)], 300))


def test_an_upload_keeps_strides_and_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several layouts, page-locked or not."""
    with streams(monkeypatch) as machine:
        x, whole = (torch.randn(4, n) for n in (3, 6))
        locked = machine.lock_pages(torch.randn(4, 3))
        machine.waits = 0
        for value in (x, x.t(), whole[:, ::2], x[:1].expand(4, 3), locked):
            found = uploaded(value, GPU)
            assert found.stride() == value.to("meta").stride()
            found.add_(1)
        assert machine.waits == 0
        torch.cuda.synchronize()  # as torch's page-locked memory does before it is used again
        assert machine.races == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_late_number(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """It is read when its copy is over; without that wait it would be none."""
    if not waits:
        change = "self.copied.synchronize()", "pass"
        monkeypatch.setattr(Late, "item", without(Late, "item", *change))
    found = []
    for delays in range(1, 9):
        with streams(monkeypatch, delays):
            found.append(Late(torch.ones(3).to(GPU).sum()).item())
    assert (found == [3.0] * 8) == waits


def test_losses_are_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits once for every block and every loss; a stop holds for the next iteration."""
    monkeypatch.setattr(inline, "AHEAD", 10**6)
    known: list[int] = []

    def on_step(job: Job, iteration: int, value: float) -> None:
        known.append(iteration)
        job.stop()

    with streams(monkeypatch) as machine:
        array = trainer([Job(0, 8, adamw), Job(1, 8, sgd), Job(2, 8, sgd, clip_norm=0.1)])
        waits = []
        for steps in (2, 12):
            machine.waits = 0
            run(array, steps=steps)
            waits.append(machine.waits)
        # a block's end is waited for once, a loss has its copy and a number on the host
        assert waits[1] - waits[0] <= 10 * (3 * 6 + 3 + 2 * 3)
        run(trainer([Job(0, 8, adamw)]), steps=6, on_step=on_step)
        assert machine.races == []
    assert known == [0, 1]


def test_a_long_run_remembers_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times stay with their blocks when others are forgotten, also those not read yet."""
    monkeypatch.setattr(inline, "MOST", 40)
    with streams(monkeypatch) as machine:
        result = run(trainer(jobs()), steps=8)
        assert machine.races == []
    trace, blocks = result.trace, len(result.log.records)
    assert verify(trace) == []
    assert trace.provenance["blocks_left_out"] == result.report.left_out > blocks >= 20
    assert trace.n_operations == blocks
    assert trace.duration[:blocks].min() > 0  # of the stream: every block has been read
