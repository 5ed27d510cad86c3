"""Plans that change while they run: jobs leave or take slots, better orders; no bit changes."""

from __future__ import annotations

import logging
import random
import time
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

from optsched import InputError, JobArray, JobShop, verify
from optsched.arraypipe import Job, random_schedule, rescheduling, training_run
from optsched.arraypipe.plan.plan import compile_plan, without
from optsched.arraypipe.plan.segments import Change
from optsched.arraypipe.rescheduling import Rescheduling
from optsched.arraypipe.runtime import inline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment


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


class Forced(Rescheduling):
    """Changes over to any plan after given segments, and puts all jobs into other slots."""

    moments: dict[int, int]  # segment -> seed
    polls = 0
    swaps: list[Change]

    def _improved(self, segment: Segment) -> Change | None:
        """Jobs that have ended lose their slots sometimes."""
        found = super()._improved(segment)
        type(self).polls += 1
        seed = self.moments.get(self.polls)
        jobs = [job for job in segment.slots if not (seed and seed % 2 and self.runs[job].over)]
        if found is not None or seed is None or not jobs:
            return found
        random.Random(seed).shuffle(jobs)
        plan = any_plan(jobs, seed)
        self.rows[plan] = (0,) * len(jobs)
        self.swaps.append(Change(plan, tuple(jobs)))
        return self.swaps[-1]


def swap_and_compare(case: dict[str, Any]) -> int:
    """Run with forced swaps, stops, a job that takes a free slot; compare all; number of swaps."""
    jobs, model = jobs_of(), case["model"]
    late = [jobs.pop()] if case["refills"] else []
    running = list(range(len(jobs) - case["waiting"]))
    swaps: list[Change] = []
    planner = type("Planner", (Forced,), {"moments": case["moments"], "polls": 0, "swaps": swaps})
    array = array_of(jobs, model)

    def on_step(job: Job, t: int, value: float) -> None:
        if case["stops"].get(job.seed) == t:
            job.stop()

    def refill(ended: Job) -> Job | None:
        return late.pop() if late and ended.microbatches == PARTS[4] else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "Rescheduling", planner)
        result = run(array, 
            any_plan(running, case["seed"]), STEPS, on_step=on_step, queue=True, refill=refill,
            on_error="raise",
        )  # fmt: skip
    assert verify(result.trace) == []
    for j, job in enumerate(array.jobs):
        n = case["stops"].get(j, STEPS - 1) + 1
        assert (job.status, len(result.losses[j])) == ("done" if n == STEPS else "stopped", n)
    assert exact(array, result)
    return len(swaps)


def cases() -> st.SearchStrategy[dict[str, Any]]:
    """Everything that may happen in one run."""
    return st.fixed_dictionaries({
        "model": st.sampled_from(sorted(MODELS)),
        "seed": st.integers(0, 10**6),
        "moments": st.dictionaries(st.integers(1, 12), st.integers(0, 10**6), max_size=4),
        "stops": st.dictionaries(st.integers(0, 4), st.integers(0, STEPS - 1), max_size=3),
        "refills": st.booleans(),
        "waiting": st.integers(0, 1),
    }).filter(lambda case: not case["refills"] or not case["waiting"])  # fmt: skip


@few_examples
@given(cases())
def test_swaps_change_no_bit(case: dict[str, Any]) -> None:
    """Whatever plans follow each other at whatever moments, every job is as if it were alone."""
    swap_and_compare(case)


def test_forced_swaps_take_place() -> None:
    """What the properties above look at does happen."""
    case = {"model": "tied", "seed": 1, "stops": {1: 2}, "refills": True, "waiting": 0}
    assert swap_and_compare({**case, "moments": dict.fromkeys(range(1, 9, 2), 4)}) >= 3


# what is solved, and when its answer is taken

FORWARD = [[3, 4, 2], [5, 2, 4], [2, 6, 3], [4, 3, 3]]
BACKWARD = [[6, 4, 5], [5, 7, 3], [2, 9, 6], [5, 5, 5]]
PROBLEM = JobArray(FORWARD, BACKWARD, objective="period")


def drawn(problem: JobArray, seeds: int) -> list[Any]:
    """Some schedules of it, the best first."""
    rows = [random_rolling(problem, spread=0, seed=seed) for seed in range(seeds)]
    return sorted(rows, key=lambda schedule: schedule.period)


SLOW = drawn(PROBLEM, 20)[-1]


def better(problem: JobArray, start: Any) -> Any:
    """Something quicker."""
    return drawn(problem, 40)[0]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Change]:
    """The changes that runs make from now on."""
    changes: list[Change] = []
    decide, carry_out = Rescheduling.decide, Rescheduling.carry_out
    last: list[Segment] = []

    def noted(planner: Rescheduling, segment: Segment, *rest: Any) -> Any:
        last.append(segment)
        return decide(planner, segment, *rest)

    def carried_out(planner: Rescheduling, decision: Any) -> Any:
        change = carry_out(planner, decision)
        if change not in (None, (last[-1].plan, last[-1].slots)):
            changes.append(change)
        return change

    monkeypatch.setattr(Rescheduling, "decide", noted)
    monkeypatch.setattr(Rescheduling, "carry_out", carried_out)
    return changes


def replanned(
    monkeypatch: pytest.MonkeyPatch, answers: Any, steps: int = 30, **given: Any
) -> tuple[Any, list[Any], list[Change], Any]:
    """A run in which the first job stops early; what the solver was asked, the changes made."""
    asked: list[Any] = []
    ended: list[bool] = []

    class Solver:
        """Answers at once, with what it is told to answer."""

        answer: Any = None

        def submit(self, problem: Any, start: Any, time_limit: float) -> None:
            asked.append((problem, start))
            assert problem.evaluate(start) == start.period  # a schedule of this very problem
            self.answer = answers(problem, start)
            ended.append(False)

        def poll(self) -> Any:
            answer, self.answer = self.answer, None
            return answer

        def cancel(self) -> None:
            self.answer = None
            ended.append(True)

    changes = watched(monkeypatch)
    monkeypatch.setattr(rescheduling, "Replanner", Solver)
    array = trainer([Job(j, 8, (adamw, sgd)[j % 2]) for j in range(4)])
    result = run(array, 
        SLOW, steps, replan=PROBLEM,
        on_step=lambda job, t, x: job.seed == 0 and t == 2 and job.stop(), **given,
    )  # fmt: skip
    assert verify(result.trace) == [] and ended[-1]
    assert exact(array, result)
    return array, asked, changes, result


def test_the_rest_is_solved_anew_and_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a job has ended: its problem without it, from the repaired order; if that pays."""
    array, asked, changes, result = replanned(monkeypatch, better)
    ((problem, start),) = asked  # at the end nobody is left to plan for
    assert problem.names == PROBLEM.without(0).names
    assert start.period <= SLOW.period
    assert [change.slots for change in changes][:1] == [(1, 2, 3)]
    assert changes[0].plan.schedule.period < start.period
    assert [len(row) for row in result.losses] == [3, 30, 30, 30]
    assert [job.status for job in array.jobs] == ["stopped", "done", "done", "done"]


@pytest.mark.parametrize(
    ("answer", "steps", "sentences"),
    [
        (lambda problem, start: start, 12, []),  # no better period
        (better, 4, []),  # too few cycles left to gain what changing over costs
        (lambda *given: "no time", 12, ["re-planning failed, the present plan stays: no time"]),
        (better, 12, ["the solver's plan is not adopted: too large"]),
    ],
)
def test_a_plan_that_does_not_pay_or_cannot_be_run_is_not_adopted(
    answer: Any, steps: int, sentences: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Whether the solver fails or its plan needs too much is mentioned once; the run goes on."""

    def refuse(schedule: Any, **given: Any) -> Any:
        raise InputError("too large")

    def answers(problem: Any, start: Any) -> Any:
        if steps == 12:
            monkeypatch.setattr(rescheduling, "compile_plan", refuse)
        return answer(problem, start)

    with caplog.at_level(logging.WARNING, "optsched"):
        _, asked, changes, _ = replanned(monkeypatch, answers, steps)
    assert changes == []
    assert len(asked) == 1
    assert [record.getMessage() for record in caplog.records] == sentences


# the solver's thread

HARD = JobShop.read("ta41")
"""Open since 1993: a solver works until it is stopped."""


def test_the_solver_answers_once() -> None:
    """With a verified schedule of the newest problem, no worse than its start; or why not."""
    smaller, start = PROBLEM.without(1), without(SLOW, [1])
    replanner = rescheduling.Replanner()

    def answer() -> Any:
        until = time.monotonic() + 300
        while (found := replanner.poll()) is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert replanner.poll() is None
        return found

    try:
        assert replanner.poll() is None
        replanner.submit(HARD, HARD.scheduled(HARD.graph().users), 3000)
        replanner.submit(smaller, start, 0.3)  # instead
        found = answer()
        assert verify(found) == []
        assert smaller.evaluate(found) <= start.period == smaller.evaluate(start)
        replanner.submit(smaller, SLOW, 5)  # a start of another problem
        assert answer().startswith("InputError: ")
    finally:
        replanner.cancel()
