"""Slots that are used wrongly are noticed; what has no room, also later, is refused or fails."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import runs
import torch
from arraypipe_models import adamw, data, exact, sgd, trainer
from arraypipe_plans import in_turn
from test_arraypipe_memory import beside, job, room, slots_of, stages_of, weigh
from torch import Tensor, nn

from optsched import InputError, InternalError, JobArray
from optsched.arraypipe import Job, random_schedule, rescheduling
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.memory import manager
from optsched.arraypipe.memory.accesses import State
from optsched.arraypipe.memory.budget import CUDA_CONTEXT, CUDA_STREAM, reserved
from optsched.arraypipe.memory.manager import DeviceSlots
from optsched.arraypipe.memory.residency import Residency, slot_bytes
from optsched.arraypipe.memory.state import layout_of
from optsched.arraypipe.memory.transfers import CopyEngine
from optsched.arraypipe.rescheduling import Replanner, Rescheduling
from optsched.arraypipe.runtime import worker
from optsched.arraypipe.runtime.types import Kept

# mistakes are loud


def in_slots(slots: int, jobs: int) -> DeviceSlots:
    """A memory for the first stages of some jobs, without a trainer."""
    runs = []
    for seed in range(jobs):
        run: Any = type("Run", (), {})()
        run.job, run.title = job((seed, 8, "sgd", 1), False), f"job{seed}"
        run.stages = stages_of(run.job)
        runs.append(run)
    sizes = layout_of(runs[0].stages[0], "").bytes
    decided, cpu = Residency((slots, slots), sizes), torch.device("cpu")
    return DeviceSlots(runs, (), 0, decided, jobs, CopyEngine(), cpu)


def test_a_state_that_left_between_forward_and_backward_is_noticed() -> None:
    """No gradient is made of weights that another state has overwritten."""
    x = torch.randn(8, 6)
    memory = in_slots(2, 3)
    stage = memory.enter(0, 0, "F", None)
    stage.kept[0] = Kept((x,), None, 0, None, (x,))  # type: ignore[arg-type]
    memory.leave()
    for other in (1, 2):
        for slot in memory.transfers.pools[0].slots:  # as if no graph had been announced
            slot.graphs = 0
        memory.enter(other, 0, "F", None)
        memory.leave()
    with pytest.raises(InternalError, match="left its slot between forward and backward"):
        memory.enter(0, 0, "B", None)


class Renorm(nn.Module):
    """Changes its weights in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """After clamping."""
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        y: Tensor = self.inner(x)
        return y


def overlapping() -> nn.Module:
    """Two parameters on the same memory."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 4))
    model[0][1].weight = nn.Parameter(model[0][0].weight.detach())
    return model


def two_layers() -> nn.Module:
    """As plain as can be."""
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))


REFUSED: dict[str, tuple[Any, int, bool, str]] = {  # model, bytes for states, recompute
    "weights in place": (
        lambda: nn.Sequential(Renorm(), nn.Linear(6, 4)), 4000, True,
        "stage 0 changes its weights in place outside of the update",
    ),
    "overlapping": (overlapping, 2500, True, "two parameters share memory"),
    "tiny": (two_layers, 100, True, "0 jobs would fit"),
    "nonsense": (two_layers, -1, True, "integer >= 1"),
    "pinned": (two_layers, 1100, False, "between a forward and its backward .* recompute=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, made: list[Any]) -> None:
    """What cannot be moved, or has no room, is refused with a sentence."""
    build, limit, recompute, sentence = REFUSED[name]
    jobs = [Job(s, 8, adamw, recompute=recompute) for s in range(4)]
    schedule = random_schedule([1] * 4, 2, place=[0, 0])
    rest = beside(jobs, schedule, build_model=build, stages=[1]) if limit > 0 else 0
    with pytest.raises(InputError, match=sentence):
        array = trainer(jobs, build_model=build, stages=[1], memory=limit + rest)
        runs.run(array, schedule, 2, on_error="raise")
    assert made == [] or name == "weights in place"


# changes that need more memory than there is


@pytest.mark.parametrize(
    ("breadth", "recompute", "sentence"),
    [
        (False, False, ""),
        (True, False, r"3 states could not leave their slots on gpu0, which has 1; use"),
        (True, True, r"gpu0 would need \d+ bytes and has \d+"),
    ],
)
def test_a_plan_that_needs_more_memory_is_not_adopted(
    breadth: bool, recompute: bool, sentence: str, made: list[Any],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The log says why, and the run goes on with the plan that it has; else it changes over."""
    jobs = [job((s, 8, "sgd", 1), recompute=recompute) for s in range(4)]
    problem = JobArray([[3, 4, 2]] * 4, [[6, 7, 5]] * 4, objective="period")
    start = in_turn(problem, False)
    changed: list[Any] = []

    class Solver(Replanner):
        def submit(self, problem: Any, start: Any, time_limit: float) -> None:
            self._answer.append(in_turn(problem, breadth))

    honest = Rescheduling._improved

    def improved(planner: Any, segment: Any) -> Any:
        change = honest(planner, segment)
        changed.extend([] if change is None else [change])
        return change

    monkeypatch.setattr(rescheduling, "Replanner", Solver)
    monkeypatch.setattr(Rescheduling, "_gain", lambda *given: 1)
    monkeypatch.setattr(Rescheduling, "_improved", improved)
    monkeypatch.setattr("optsched.arraypipe.training_run.FIRST_CYCLES", 1)
    monkeypatch.setattr("optsched.arraypipe.runtime.inline.cycles_for", lambda *given: 1)
    array = trainer(jobs, memory=room(jobs, 1.0) + beside(jobs, start))
    with caplog.at_level(logging.WARNING, "optsched"):
        result = runs.run(array, 
            start, 8, replan=problem, on_error="raise",
            on_step=lambda job, t, x: job.seed == 0 and t == 1 and job.stop(),
        )  # fmt: skip
    assert slots_of(made[-1])
    assert bool(changed) == (not sentence)
    assert re.search(sentence, caplog.text)
    assert [len(row) for row in result.losses] == [2, 8, 8, 8] and exact(array, result)


@pytest.mark.parametrize("way", ["queue", "refill", "strict"])
def test_a_job_that_needs_more_slots_fails_alone(way: str, made: list[Any]) -> None:
    """Without recompute, among jobs that recompute: its sentence says so, the others are exact."""
    jobs = [job((s, 8, "sgd", 1), recompute=True) for s in range(3)]
    late = [job((s, 8, "sgd", 1), recompute=s != 3) for s in (3, 4)]
    schedule = random_schedule([1] * 3, 3, place=[0, 0, 0], seed=1)
    array = trainer(jobs, memory=room(jobs, 1.0) + beside(jobs, schedule) + 2000)

    def on_step(one: Job, t: int, x: float) -> None:
        if (one.seed, t) == (0, 1):
            one.stop()

    if way in ("queue", "strict"):
        array.jobs = (*array.jobs, *late)
    rest = list(late)

    def refill(ended: Job) -> Job | None:
        return rest.pop(0) if rest else None

    given: dict[str, Any] = {"refill": refill} if way == "refill" else {}
    if way == "strict":
        with pytest.raises(JobFailed, match=r"could not leave their slots .* recompute=True"):
            runs.run(array, schedule, 4, queue=True, on_error="raise", on_step=on_step)
        return
    result = runs.run(array, schedule, 4, queue=way == "queue", on_step=on_step, **given)
    assert slots_of(made[-1])
    assert [one.status for one in array.jobs] == ["stopped", "done", "done", "failed", "done"]
    assert "could not leave their slots on device0" in str(array.jobs[3].error)
    assert [len(row) for row in result.losses] == [2, 4, 4, 0, 4] and exact(array, result)


# what counts against the bytes of a device beside the states


def test_gradients_and_activations_count_without_bytes_in_the_schedule() -> None:
    """A schedule that says nothing of bytes leaves less room for states, by both."""
    jobs = [Job(s, 64, adamw) for s in range(3)]
    schedule = random_schedule([1] * 3, 3, place=[0, 0, 0], seed=0)
    assert not schedule.acquire.any()
    (table,) = weigh(jobs, schedule)
    largest = max(sum(4 * p.numel() for _, p in s.parameters) for s in stages_of(jobs[0]))
    all_of_one = sum(4 * p.numel() for s in stages_of(jobs[0]) for _, p in s.parameters)
    assert largest <= table.gradients <= 3 * all_of_one
    (double,) = weigh([Job(s, 128, adamw) for s in range(3)], schedule)
    assert double.gradients == table.gradients
    assert 64 * (6 + 12 + 4) * 4 <= table.activations < double.activations
    (less,) = weigh([Job(s, 64, adamw, recompute=True) for s in range(3)], schedule)
    assert 0 < less.activations < table.activations
    assert less.workspace > table.workspace == 0
    limit = slot_bytes([State(0, s.index, layout_of(s, "").bytes) for s in stages_of(jobs[0])])
    with pytest.raises(InputError, match=r"0 of 3 jobs would fit\n(.*\n)*gradients, at the"):
        runs.run(trainer(jobs, memory=min(sum(limit), table.total)), schedule, 1)


def test_gradients_of_all_micro_batches_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment of a run do more bytes of gradients exist than the budget has."""
    jobs = [Job(s, 8, sgd, microbatches=4) for s in range(3)]
    seen: list[int] = []
    honest, weighed = worker.blocks.update, manager.memory_of

    def update(*given: Any) -> None:
        stages = [stage for run in all_jobs for stage in run.stages]
        gradients = [p.grad for stage in stages for _, p in stage.parameters]
        seen.append(sum(gradient.nbytes for gradient in gradients if gradient is not None))
        honest(*given)

    all_jobs: list[Any] = []

    def memory_of(given: Any, *rest: Any) -> Any:
        all_jobs[:] = given
        return weighed(given, *rest)

    for seed in range(4):
        schedule = random_schedule([4] * 3, 3, place=[0, 0, 0], seed=seed)
        (table,) = weigh(jobs, schedule)
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(worker.blocks, "update", update)
            patch.setattr("optsched.arraypipe.training_run.memory_of", memory_of)
            runs.run(trainer(jobs, memory=10**6), schedule, 3, on_error="raise")
        assert max(seen) == table.gradients > 0


def test_reserve_of_a_gpu() -> None:
    """Devices of the plan on one GPU share its context; a CPU needs none."""
    gpu = torch.device("cuda:0")
    assert 4 * reserved(gpu, 4) == CUDA_CONTEXT + CUDA_STREAM
    assert reserved(torch.device("cpu"), 2) == 0


def test_a_job_whose_first_forward_fails_is_not_weighed() -> None:
    """It ends alone, with little memory and with much; its slot counts like the largest."""

    def bad_data(job: Job, start: int) -> Any:
        for x, y in data(job, start):
            yield x, y + 100 * (job.seed == 1)

    schedule = random_schedule([1] * 3, 3, place=[0, 0, 0], seed=0)
    good, bad = (
        weigh([Job(s, 8, adamw, recompute=True) for s in range(3)], schedule, data=feed)[0]
        for feed in (data, bad_data)
    )
    assert good.total == bad.total
    jobs = [Job(s, 8, adamw, recompute=True) for s in range(3)]
    for limit in (10**6, good.total + room(jobs, 2)):
        jobs = [Job(s, 8, adamw, recompute=True) for s in range(3)]
        array = trainer(jobs, data=bad_data, memory=limit)
        result = runs.run(array, schedule, 3)
        assert [job.status for job in jobs] == ["done", "failed", "done"]
        assert exact(array, result)
