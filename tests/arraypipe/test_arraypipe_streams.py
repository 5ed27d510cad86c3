"""Trainings on a simulated GPU: every access is ordered by streams and events, no bit differs."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import arraypipe_models
import pytest
import runs
import torch
from arraypipe_models import adamw, sgd
from depth import depth
from streams_model import GPU, streams

from optsched import verify
from optsched.arraypipe import Job, JobFailed, random_schedule
from optsched.arraypipe.checkpoint.weights import read_weights
from optsched.arraypipe.memory import cuda_engine
from optsched.arraypipe.runtime import inline
from optsched.arraypipe.runtime.cuda_streams import Late, uploaded
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 3
JOBS = [
    Job(0, 8, adamw, microbatches=2),
    Job(1, 11, sgd, recompute=True),
    Job(2, 8, adamw, precision="bf16"),
]


@cache
def alone(recompute: bool) -> Any:
    """Every job trained without streams."""
    array = arraypipe_models.trainer(jobs(recompute))
    return [array.train_alone(j, STEPS) for j in range(len(JOBS))]


def jobs(recompute: bool = False) -> list[Job]:
    """Micro-batches, recomputation and two optimizers."""
    return [dataclasses.replace(job, recompute=recompute or job.recompute) for job in JOBS]


def run(jobs: list[Job], seed: int = 1, steps: int = STEPS, **how: Any) -> Any:
    """Train on the GPU in a random order that all jobs' settings allow."""
    memory = how.pop("memory", None)
    array = arraypipe_models.trainer(jobs, device=GPU, memory=memory)
    clipping = [j for j, job in enumerate(jobs) if job.clip_norm is not None]
    parts = [job.microbatches for job in jobs]
    slots = how.pop("slots", len(parts))
    schedule = random_schedule(
        parts[:slots], array.n_stages, update=clipping, together=clipping, seed=seed
    )
    return runs.run(array, schedule, steps, on_error="raise", **how)


def train(case: str, place: Path, seed: int) -> tuple[list[str], int]:
    """Races and differing tensors of a training on a simulated GPU; how long blocks waited."""
    expected, how = alone(case == "slots"), dict[str, Any]()
    if case == "slots":
        how["memory"] = 16_000  # a small part of all states, so that slots are few
    if case == "queue":  # the third job trains when the first two have ended
        how["slots"] = 2
    if case == "checkpoints":
        how |= {"checkpoint": place, "checkpoint_every": 1}
    with pytest.MonkeyPatch.context() as patch, streams(patch) as machine:
        result = run(jobs(case == "slots"), seed, **how)
    found = [*machine.races, *map(str, verify(result.trace))]
    if case == "slots" and not result.log.copies:
        found.append("nothing was copied")
    if result.report.exposed_ns != machine.stood:
        found.append(f"blocks waited {machine.stood} ns, not {result.report.exposed_ns}")
    for j, model in enumerate(expected):
        found += [f"job {j}: {row}" for row in differences(result.trained[j], model)]
        if case == "checkpoints":
            kept = read_weights(place / f"job{j}" / str(STEPS))
            rows = {**model.parameters, **model.buffers}.items()
            found += [f"job {j}: kept {k}" for k, t in rows if not torch.equal(kept[k], t)]
    return found, machine.stood


@pytest.mark.parametrize("case", ["inline", "slots", "queue", "checkpoints"])
def test_no_access_races_another(case: str, tmp_path: Path) -> None:
    """Whatever stream or copy may be late.

    Blocks wait for copies in most orders; in that of seed 5 all copies are over when their blocks
    come.
    """
    waited = {}
    for seed in sorted({*range(depth(2, 40)), *([5] if case == "slots" else [])}):
        found, waited[seed] = train(case, tmp_path / str(seed), seed)
        assert found == [], f"seed {seed}"
    assert case != "slots" or (waited[0] > 0 and waited[5] == 0)


def without(owner: Any, name: str, line: str, instead: str = "pass") -> Any:
    """A function of the product in which something is missing: a wait."""
    function = getattr(owner, name)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(line) == 1
    text = text.replace(line, instead)
    made: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{text}", function.__globals__, made)
    return made[name]


MUTANTS = [
    ("slots", cuda_engine.CudaEngine, "wait",
     "torch.cuda.current_stream(self.device).wait_event(event)"),
    ("slots", cuda_engine.CudaEngine, "copy", "stream.wait_event(", "id("),
]  # fmt: skip
"""What removes one wait of the product."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda row: f"{row[2]}-{row[3]}")
def test_a_missing_wait_is_found(
    mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clocks of the streams."""
    case, owner, name, *change = mutant
    alone(case == "slots")
    monkeypatch.setattr(owner, name, without(owner, name, *change))
    with suppress(JobFailed):  # a loss that is not known yet
        assert train(case, tmp_path, 1)[0]


def test_uploads_and_late_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several layouts, page-locked or not, do not block; a number waits for its copy."""
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
        total = torch.ones(3).to(GPU).sum()
        assert Late(total).item() == 3.0
        assert machine.races == []
        monkeypatch.setattr(Late, "item", without(Late, "item", "self.copied.synchronize()"))
        Late(total).item()
        assert machine.races


def test_losses_are_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits once for every block and every loss; a stop holds for the next iteration."""
    monkeypatch.setattr(inline, "AHEAD", 10**6)
    known: list[int] = []

    def on_step(job: Job, iteration: int, value: float) -> None:
        known.append(iteration)
        job.stop()

    with streams(monkeypatch) as machine:
        waits = []
        for steps in (2, 12):
            machine.waits = 0
            rows = [Job(0, 8, adamw), Job(1, 8, sgd), Job(2, 8, sgd, clip_norm=0.1)]
            run(rows, steps=steps)
            waits.append(machine.waits)
        # a block's end is waited for once, a loss has its copy and a number on the host
        assert waits[1] - waits[0] <= 10 * (3 * 6 + 3 + 2 * 3)
        run([Job(0, 8, adamw)], steps=6, on_step=on_step)
        assert machine.races == []
    assert known == [0, 1]
