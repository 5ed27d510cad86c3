"""The life of jobs: stops, interrupts, failures; what they leave, and that others go on."""

from __future__ import annotations

import os
import signal
import time
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_lives import PARTS, STEPS, jobs_of, same, saved_is_exact
from arraypipe_models import build_model, data, exact, loss, sgd, trainer
from arraypipe_plans import random_rolling
from depth import few_examples, half, seeds
from hypothesis import given
from hypothesis import strategies as st
from runs import run
from torch import nn

from optsched import InputError, JobArray
from optsched.arraypipe import Job, JobFailed, random_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


# stops


@few_examples
@given(
    seed=st.integers(0, 10**6),
    stops=st.dictionaries(st.integers(0, 2), st.integers(0, STEPS - 1)),
    caller=st.none() | st.integers(0, 2),
    every=st.none() | st.integers(1, 3),
    update=st.sets(st.integers(0, 2)),
)
def test_stopped_jobs_end_and_are_saved(
    tmp_path_factory: pytest.TempPathFactory, seed: int, stops: dict[int, int], caller: int | None,
    every: int | None, update: set[int],
) -> None:  # fmt: skip
    """With the iteration whose loss is known, or that a sibling's stop finds it in; exactly."""
    jobs, folder = jobs_of(), tmp_path_factory.mktemp("stop")

    def on_step(job: Job, t: int, value: float) -> None:
        assert job.status == "running"
        for j, when in stops.items():
            if job is jobs[j if caller is None else caller] and t == when:
                jobs[j].stop()

    result = run(trainer(jobs), 
        random_schedule(PARTS, 3, seed=seed, update=update), STEPS,
        checkpoint=folder, checkpoint_every=every, on_step=on_step,
    )  # fmt: skip
    for j, job in enumerate(jobs):
        n = len(result.losses[j])
        assert n == STEPS or j in stops
        if caller in (None, j) and j in stops:
            assert n == stops[j] + 1
        assert job.status == ("done" if n == STEPS else "stopped")
        assert job.error is None
        assert n == 0 or saved_is_exact(folder, j) == n
        assert same(result.trained[j], j, n)


def test_an_interrupt_ends_and_saves_all_jobs(tmp_path: Path) -> None:
    """Ctrl-C: every job ends the iteration that it is in; the result and the files have it."""
    jobs, folder, handler = jobs_of(), tmp_path, signal.getsignal(signal.SIGINT)

    def on_step(job: Job, t: int, value: float) -> None:
        if (job.seed, t) == (1, 1):
            os.kill(os.getpid(), signal.SIGINT)

    schedule = random_schedule(PARTS, 3, seed=1, update=[0])
    result = run(trainer(jobs), schedule, 50, checkpoint=folder, on_step=on_step)
    assert signal.getsignal(signal.SIGINT) is handler
    done = [len(row) for row in result.losses]
    assert max(done) < 6
    for j, job in enumerate(jobs):
        assert job.status == "stopped"
        assert same(result.trained[j], j, done[j])
        assert done[j] == 0 or saved_is_exact(folder, j) == done[j]
    second = run(trainer(jobs_of()), schedule, 7, checkpoint=folder, resume=True)
    for j in range(3):
        assert same(second.trained[j], j, 7, start=done[j])


def test_a_second_interrupt_ends_the_program(tmp_path: Path) -> None:
    """As usual, at once; complete checkpoints are there."""

    def on_step(job: Job, t: int, value: float) -> None:
        if t == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.1)  # at once it could be an echo of the first
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(
            trainer(jobs_of()),
            random_schedule(PARTS, 3),
            50,
            checkpoint=tmp_path,
            checkpoint_every=1,
            on_step=on_step,
        )
    assert max(saved_is_exact(tmp_path, j) for j in range(3)) >= 2


# failures

WHERE = ("F", "R", "B", "U", "scheduler", "data", "end", "loss", "nan", "inf", "memory")


class Trap(nn.Module):
    """Raises in the forward, the recompute or the backward of an iteration."""

    def __init__(self, where: str, when: int, parts: int) -> None:
        super().__init__()
        self.where, self.when, self.parts, self.calls = where, when, parts, 0

    def forward(self, x: Any) -> Any:
        """The input as it is."""
        t, again = divmod(self.calls, 2) if self.where == "R" else (self.calls // self.parts, 0)
        self.calls += 1
        if t == self.when:
            if (self.where == "R" and again) or self.where == "F":
                trapped()
            if self.where == "memory":
                torch.empty(2**60)
            if self.where == "B":
                x = x.clone()
                x.register_hook(trapped)
        return x * 1


def trapped(*given: Any) -> Any:
    """What raises wherever it is called."""
    raise RuntimeError("trapped")


def breaking(named: Any, when: int) -> Any:
    """Plain SGD with a step that raises in an iteration."""
    optimizer = torch.optim.SGD(named, lr=0.1)
    steps = chain([optimizer.step] * when, repeat(trapped))
    optimizer.step = lambda: next(steps)()  # type: ignore[assignment,method-assign]
    return optimizer


def trapped_model(where: str = "", when: int = 0, parts: int = 1) -> nn.Sequential:
    """The tiny model with a trap in its second stage."""
    layers = list(build_model())
    return nn.Sequential(*layers[:5], Trap(where, when, parts), *layers[5:])


def trapped_data(where: str, when: int) -> Callable[[Job, int], Iterator[Any]]:
    """The batches of the tiny model; job 1 gets a broken one."""

    def batches(job: Job, start: int) -> Iterator[Any]:
        for t, (x, y) in enumerate(data(job, start), start):
            if job.seed == 1 and t == when:
                if where == "data":
                    trapped()
                if where == "end":
                    return
                x = x.fill_(float(where)) if where in ("nan", "inf") else x
                y = y - 100 * (where == "loss")
            yield x, y

    return batches


def trapped_trainer(where: str, when: int) -> Any:
    """A trainer of three jobs, of which the second will fail."""
    change: dict[str, Any] = {"microbatches": 1 if where == "R" else PARTS[1], "optimizer": sgd}
    if where in ("F", "R", "B", "memory"):
        change["model"] = {"where": where, "when": when, "parts": change["microbatches"]}
    if where == "U":
        change["optimizer"] = lambda named: breaking(named, when)
    if where == "scheduler":
        change["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: 0.9**t if t <= when else trapped()
        )
    jobs = jobs_of()
    jobs[1] = Job(1, 9, recompute=where == "R", **change)
    return trainer(
        jobs, build_model=trapped_model, stages=[4, 7], data=trapped_data(where, when),
        loss=lambda output, target: trapped() if (target < 0).any() else loss(output, target),
    )  # fmt: skip


def order_of(where: str, seed: int) -> Any:
    """A schedule for it; recompute and update as blocks of their own or not."""
    parts = [1, 1 if where == "R" else PARTS[1], 1]
    return random_schedule(
        parts, 3, seed=seed, recompute=[1] if where == "R" and seed % 2 else [],
        update=[1] if seed % 3 else [0],
    )  # fmt: skip


@pytest.mark.parametrize("where", half(WHERE))
def test_a_failure_stays_with_its_job(tmp_path: Path, where: str) -> None:
    """Whatever raises: the job has failed and says why, the others have the bits of alone."""
    array = trapped_trainer(where, 2)
    result = run(array, order_of(where, 1), STEPS, checkpoint=tmp_path, checkpoint_every=1)
    bad = array.jobs[1]
    assert [job.status for job in array.jobs] == ["done", "failed", "done"]
    assert isinstance(bad.error, JobFailed)
    assert (bad.error.job, bad.error.iteration) == (1, 2)
    reason = {"nan": "loss is nan", "inf": "loss is", "memory": "RuntimeError", "end": "no batch"}
    assert reason.get(where, "trapped") in str(bad.error)
    assert array.jobs[0].error is None
    assert all(p.grad is None for p in result.models[1].parameters())
    assert exact(array, result)
    left = {path.name for path in (tmp_path / "job1").iterdir()}
    assert left == {"1", "2"}  # complete iterations


def ending(ends: dict[int, int]) -> Callable[[Job, int], Iterator[Any]]:
    """Data of which some jobs, by their seed, have so many batches and no more."""

    def batches(job: Job, start: int) -> Iterator[Any]:
        yield from islice(data(job, start), max(0, ends.get(job.seed, STEPS) - start))

    return batches


def test_data_that_end_at_a_checkpoint_stay_with_their_job(tmp_path: Path) -> None:
    """Where it goes on: as without a break it fails, named, and alone."""
    schedule, short = random_schedule(PARTS, 3, seed=1), STEPS - 1
    batches = ending({1: short})
    run(trainer(jobs_of(), data=batches), schedule, short, checkpoint=tmp_path)
    sentence = f"iteration {short}: data: job job1 has no batch for iteration {short}"
    given: dict[str, Any] = {"checkpoint": tmp_path, "resume": True}
    with pytest.raises(JobFailed, match=sentence):
        run(trainer(jobs_of(), data=batches), schedule, STEPS, on_error="raise", **given)
    jobs = jobs_of()
    result = run(trainer(jobs, data=batches), schedule, STEPS, **given)
    assert [job.status for job in jobs] == ["done", "failed", "done"]
    assert sentence in str(jobs[1].error)
    assert [len(row) for row in result.losses] == [1, 0, 1]
    assert all(same(result.trained[j], j, STEPS, short) for j in (0, 2))


def test_a_job_without_a_first_batch_is_refused_before_the_run_and_fails_alone_in_it() -> None:
    """Its first iteration is named; who joins does not end the others."""
    jobs = jobs_of()
    with pytest.raises(InputError, match="data: job job1 has no batch for iteration 0"):
        run(trainer(jobs, data=ending({1: 0})), random_schedule(PARTS, 3, seed=1), 2)
    late = jobs_of(4)[3]
    result = run(trainer(jobs, data=ending({3: 0})), 
        random_schedule(PARTS, 3, seed=1), 2,
        refill=lambda job: late if late.status == "ready" and job is jobs[0] else None,
    )  # fmt: skip
    assert [job.status for job in (*jobs, late)] == ["done"] * 3 + ["failed"]
    assert "iteration 0: data: job job3 has no batch for iteration 0" in str(late.error)
    for j in range(3):
        assert same(result.trained[j], j, 2)


@pytest.mark.parametrize("where", ["U", "data"])
def test_a_failure_can_end_the_run(where: str) -> None:
    """``on_error="raise"``: the error comes out, with what caused it; the others are stopped."""
    array = trapped_trainer(where, 2)
    with pytest.raises(JobFailed, match=r"job job1, stage \d, iteration 2: ") as caught:
        run(array, order_of(where, 1), STEPS, on_error="raise")
    assert caught.value is array.jobs[1].error
    assert caught.value.__cause__ is not None
    assert array.jobs[1].status == "failed"
    assert {array.jobs[j].status for j in (0, 2)} <= {"stopped", "done"}


@seeds(1, 6)
def test_a_failure_leaves_the_updates_before_it_to_later_stages(seed: int) -> None:
    """Rolling and clipped: stage 0 raises while others still owe the update before."""
    rows = [[3, 5, 4]] * 3
    array = JobArray(rows, rows, update=rows, update_mode="global", objective="period")
    jobs = [Job(j, 8, sgd, clip_norm=0.2) for j in range(3)]
    built = trainer(jobs, data=trapped_data("data", 2))
    result = run(built, random_rolling(array, seed=seed), STEPS)
    assert [job.status for job in jobs] == ["done", "failed", "done"]
    assert "trapped" in str(jobs[1].error)
    assert exact(built, result)


def test_no_job_runs_after_a_run_that_raised(tmp_path: Path) -> None:
    """Those not done are stopped, none has failed, and they can be resumed to the bits of alone."""
    jobs, order = jobs_of(), random_schedule(PARTS, 3, seed=1)
    array = trainer(jobs)

    def on_step(job: Job, t: int, value: float) -> None:
        if job is jobs[0] and t == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(array, order, 3, on_step=on_step, checkpoint=tmp_path, checkpoint_every=1)
    assert {job.status for job in jobs} <= {"stopped", "done"} and jobs[0].status == "stopped"
    assert [job.error for job in jobs] == [None] * 3
    result = run(array, order, 3, checkpoint=tmp_path, resume=True)
    assert [job.status for job in jobs] == ["done"] * 3
    for j in range(3):
        weights = array.train_alone(j, 3).parameters
        assert all(torch.equal(result.trained[j].parameters[n], w) for n, w in weights.items())


def test_jobs_of_a_refused_run_are_ready(tmp_path: Path) -> None:
    """Nothing has been trained, whatever refused it."""
    jobs = jobs_of()
    array = trainer(jobs)
    run(array, random_schedule(PARTS, 3), 2, checkpoint=tmp_path)
    with pytest.raises(InputError, match="already has checkpoints"):
        run(array, random_schedule(PARTS, 3), 2, checkpoint=tmp_path)
    assert [job.status for job in jobs] == ["ready"] * 3
