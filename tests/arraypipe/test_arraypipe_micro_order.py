"""Micro-batches in any order (``exact=False``): right up to rounding, the same bits every time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, build_model, data, sgd, trainer  # noqa: E402
from depth import few_examples, seeds  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_arraypipe_settings import NAMES, Language, plateau, token_loss, tokens  # noqa: E402

from optsched import InputError, JobArray, solve, verify  # noqa: E402
from optsched.arraypipe import ArrayTrainer, Job, compile, random_schedule  # noqa: E402
from optsched.arraypipe.plan.edits import with_job, without  # noqa: E402
from optsched.arraypipe.plan.orders import random_rolling  # noqa: E402
from optsched.arraypipe.train_alone import differences  # noqa: E402
from optsched.pipelines import gpipe  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from optsched import Schedule
    from optsched.arraypipe.train_alone import Trained
    from optsched.arraypipe.training_run import RunResult

pytestmark = pytest.mark.torch

STEPS = 3


def free(counts: Sequence[int], **changes: Any) -> JobArray:
    """A job array of three stages whose micro-batches may come in any order."""
    shape = (len(counts), 3)
    given_: dict[str, Any] = {"micro_batches": list(counts), "microbatch_order": "free", **changes}
    return JobArray([[2] * shape[1]] * shape[0], [[4] * shape[1]] * shape[0], **given_)


def backwards(counts: Sequence[int]) -> Schedule:
    """One iteration of every job by GPipe, backward from the last micro-batch to the first."""
    return gpipe(free(counts), reverse=True)


def far(got: Trained, alone: Trained, tolerance: float = 1e-9) -> list[str]:
    """Parameters, moments and losses that differ by more than double precision rounds."""
    rows = [(n, got.parameters[n], p) for n, p in alone.parameters.items()]
    for name, state in alone.optimizer.items():
        rows += [(f"{name} {k}", got.optimizer[name][k], v) for k, v in state.items()]
    rows += [("losses", torch.tensor(got.losses), torch.tensor(alone.losses))]
    return [
        name
        for name, a, b in rows
        if torch.is_tensor(b) and not torch.allclose(a.double(), b.double(), 1e-6, tolerance)
    ]


def bits(one: RunResult, other: RunResult) -> list[str]:
    """What two runs differ in."""
    pairs = zip(one.trained, other.trained, strict=True)
    return [line for a, b in pairs for line in differences(a, b)]


JOBS = (
    Job(0, 11, adamw, microbatches=4, precision="fp64"),
    Job(1, 8, sgd, microbatches=2, precision="fp64", recompute=True),
    Job(2, 8, sgd, microbatches=3, precision="fp64", clip_norm=0.05),
    Job(3, 8, adamw, microbatches=3, precision="fp64", scheduler=plateau),
)


@few_examples
@given(
    picks=st.lists(st.sampled_from(range(4)), min_size=1, max_size=3, unique=True),
    place=st.sampled_from([[0, 1, 2], [0, 1, 0], [0, 0, 0]]),
    apart=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_training_is_right_in_any_order(
    picks: list[int], place: list[int], apart: bool, seed: int
) -> None:
    """Dropout, recompute, clipping and plateaus are those of training alone, up to rounding."""
    jobs = [JOBS[k] for k in picks]
    array, everyone = trainer(jobs, exact=False), range(len(jobs))
    schedule = random_schedule(
        [job.microbatches for job in jobs], 3, place=place, recompute=everyone if apart else (),
        update=everyone, together=everyone, exact=False, seed=seed,
    )  # fmt: skip
    first = array.run(schedule, STEPS, on_error="raise")
    assert verify(first.trace) == verify(first.replay) == []
    for j in everyone:
        assert far(first.trained[j], array.train_alone(j, STEPS)) == []
    again = array.run(first.trace, STEPS, on_error="raise")  # its own order, once more
    assert bits(first, again) == []


def test_an_order_of_its_own_changes_bits() -> None:
    """In single precision a reversed backward is not training alone, and `check_exact` says so."""
    jobs = [Job(0, 11, adamw, microbatches=4)]
    array = trainer(jobs, exact=False)
    result = array.run(backwards([4]), STEPS)
    assert differences(result.trained[0], array.train_alone(0, STEPS)) != []
    assert any(array.check_exact(2, seed=seed) for seed in range(3))
    assert trainer(jobs).check_exact(2) == []


def test_ascending_orders_are_exact_all_the_same() -> None:
    """``exact=False`` permits other orders; it changes nothing about one that ascends."""
    array = trainer([Job(0, 11, adamw, microbatches=4), Job(1, 8, sgd)], exact=False)
    result = array.run(random_schedule([4, 1], 3, seed=3), STEPS)
    for j in range(2):
        assert differences(result.trained[j], array.train_alone(j, STEPS)) == []


def test_statistics_are_those_of_the_order_that_ran() -> None:
    """The first layer's running mean follows the executed forwards, bit by bit."""
    job = Job(0, 9, sgd, microbatches=3)
    for seed in range(4):
        schedule = random_schedule([3], 3, exact=False, seed=seed)
        result = trainer([job], exact=False).run(schedule, 1)
        assert schedule.sequences is not None
        order = [
            int(schedule.microbatch[i])
            for i in schedule.sequences.to_lists()[0]
            if schedule.kind[i] == "F"
        ]
        torch.manual_seed(job.seed)
        head = build_model()[:2]
        parts = next(data(job, 0))[0].tensor_split(3)
        for m in order:
            head(parts[m])
        assert torch.equal(result.models[0][1].running_mean, head[1].running_mean)


def test_refused_unless_asked_for() -> None:
    """The sentence names the blocks and the way out; plans of the other kind are refused too."""
    schedule = backwards([2])
    with pytest.raises(InputError, match=r"micro-batch 1.* comes before .*say exact=False"):
        compile(schedule)
    array = trainer([Job(0, 8, sgd, microbatches=2)])
    with pytest.raises(InputError, match="exact=False"):
        array.run(schedule, 1)
    with pytest.raises(InputError, match="compiled with exact=False"):
        array.run(compile(schedule, exact=False), 1)
    for value in (None, 1, "yes"):
        with pytest.raises(InputError, match="exact: expected True or False"):
            trainer(array.jobs, exact=value)
        with pytest.raises(InputError, match="exact: expected True or False"):
            compile(schedule, exact=value)  # type: ignore[arg-type]


def test_a_barrier_excludes_offsets() -> None:
    """One sentence with the block and the way out; without offsets a barrier is as good as any."""
    array = free([2, 2], objective="period")
    said = 0
    for seed in range(4):
        schedule = random_rolling(array, spread=0, seed=seed)
        try:
            compile(schedule, barrier=True, exact=False)
        except InputError as error:
            assert str(error).startswith("barrier: jobs that wait for each other")
            assert "with offset" in str(error) and "leave the barrier out" in str(error)
            said += 1
        assert not compile(schedule, exact=False).barrier
    assert said
    assert compile(backwards([2, 2]), barrier=True, exact=False).barrier


def test_updates_wait_for_the_backward_that_runs_last() -> None:
    """The plan's arcs, with a barrier and clipping too, are those of the executed order."""
    plan = compile(backwards([3, 2]), exact=False, barrier=True)
    at = {(b.kind, b.job, b.stage, b.microbatch): b.operation for b in plan.blocks}
    arcs = {(a.tail, a.head, a.tokens) for a in plan.arcs}
    for s in range(3):
        assert (at["B", 0, s, 0], at["F", 0, s, 0], 1) in arcs
        assert (at["B", 0, s, 2], at["B", 0, s, 1], 0) in arcs
    assert (at["B", 1, 0, 0], at["F", 0, 0, 0], 1) in arcs
    assert plan.micro_order.last_backward[0, 1, 0] == at["B", 0, 1, 0]
    plain = random_schedule([3], 2, update=[0], together=[0], exact=False, seed=8)
    together = compile(plain, together=[0], exact=False)
    last = together.micro_order.last_backward
    updates = {b.stage: b.operation for b in together.blocks if b.kind == "U"}
    arcs = {(a.tail, a.head, a.tokens) for a in together.arcs}
    assert {(last[0, 0, 0], updates[0], 0), (last[0, 0, 0], updates[1], 0)} <= arcs


@few_examples
@given(seed=st.integers(0, 10**6), counts=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_rolling_plans_with_offsets(seed: int, counts: list[int]) -> None:
    """Periodic orders whose micro-batches cross each other, and what is left of them."""
    schedule = random_rolling(free(counts, objective="period"), seed=seed)
    jobs = [Job(j, 6, sgd, microbatches=m, precision="fp64") for j, m in enumerate(counts)]
    array = trainer(jobs, exact=False)
    result = array.run(schedule, STEPS, on_error="raise")
    assert verify(result.trace) == []
    for j in range(len(jobs)):
        assert far(result.trained[j], array.train_alone(j, STEPS)) == []
    if len(jobs) > 1:
        left = compile(without(schedule, [0]), exact=False)
        assert left.microbatches == array.plan(schedule).microbatches[1:]
    more = with_job(schedule, 0)
    assert more is not None
    assert compile(more, exact=False).n_jobs == len(jobs) + 1


def test_a_solver_may_choose_the_order() -> None:
    """A job array with free micro-batches, solved, runs with ``exact=False``."""
    problem = free([3, 2], objective="period")
    schedule = solve(problem, "dispatch").schedule
    assert schedule is not None
    jobs = [Job(0, 9, sgd, microbatches=3, precision="fp64"), Job(1, 8, adamw, microbatches=2)]
    array = trainer(jobs, exact=False)
    result = array.run(schedule, STEPS, replan=problem, on_error="raise")
    assert far(result.trained[0], array.train_alone(0, STEPS)) == []


@seeds(2, 4)
def test_a_job_stops_with_whole_iterations(seed: int) -> None:
    """A stop holds from an iteration on, whichever micro-batch begins it; others go on."""
    jobs = [
        Job(0, 9, sgd, microbatches=3, precision="fp64"),
        Job(1, 8, sgd, microbatches=2, precision="fp64"),
    ]
    array = trainer(jobs, exact=False)
    schedule = random_schedule([3, 2], 3, exact=False, seed=seed)
    result = array.run(
        schedule, 5, on_step=lambda job, step, _: job.stop() if (job.seed, step) == (0, 1) else None
    )
    assert [len(t.losses) for t in result.trained] == [2, 5]
    assert far(result.trained[0], array.train_alone(0, 2)) == []
    assert far(result.trained[1], array.train_alone(1, 5)) == []


def test_checkpoints_of_another_order(tmp_path: Path) -> None:
    """Interrupted and resumed is the same, bit by bit, as straight through."""
    jobs = [Job(0, 9, adamw, microbatches=3), Job(1, 8, sgd, microbatches=2, recompute=True)]
    schedule = random_schedule([3, 2], 3, exact=False, seed=9)
    straight = trainer(jobs, exact=False).run(schedule, 4)
    trainer(jobs, exact=False).run(schedule, 2, checkpoint=tmp_path)
    resumed = trainer(jobs, exact=False).run(schedule, 4, checkpoint=tmp_path, resume=True)
    pairs = zip(resumed.trained, straight.trained, strict=True)
    found = [
        line
        for a, b in pairs
        for line in differences(a, dataclasses.replace(b, losses=b.losses[2:]))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("recompute", "seed", "memory"), [(True, 0, 19_000), (True, 1, 19_000), (False, 2, 34_000)]
)
def test_slots_change_no_bit(recompute: bool, seed: int, memory: int) -> None:
    """States that take turns in little memory give the bits of resident ones."""
    jobs = [
        Job(j, 6, adamw, microbatches=m, recompute=recompute, model={"third": True})
        for j, m in enumerate([3, 2, 1])
    ]
    given_: dict[str, Any] = {"exact": False, "tied": "sum"}
    schedule = random_schedule([3, 2, 1], 4, place=[0, 0, 0, 0], exact=False, seed=seed)
    rows = []
    for limit in (None, memory):
        array = ArrayTrainer(
            Language, tokens, jobs=jobs, stages=NAMES, loss=token_loss, memory=limit, **given_
        )
        rows.append(array.run(schedule, STEPS, on_error="raise"))
    assert bits(*rows) == []
    assert rows[1].report.exposed > 0  # states have moved


class Flat(torch.optim.Optimizer):
    """Gradient descent that divides by the mean of all gradients, as nothing per tensor may."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = sum(p.grad.abs().sum() for p in own) / sum(p.numel() for p in own)
        for p in own:
            p.sub_(0.1 * p.grad / size)


class Rounded(torch.optim.SGD):
    """Gradient descent whose last bits depend on how many tensors there are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 + len(group["params"]) * 2 * torch.finfo(p.dtype).eps)


def test_optimizers_may_round_but_not_look_across_tensors() -> None:
    """``exact=False`` waives the last bits of an unknown optimizer, not its meaning."""
    rounded = Job(0, 8, lambda named: Rounded(named, lr=0.1), microbatches=2)
    with pytest.raises(InputError, match="looks across tensors"):
        trainer([rounded])
    trainer([rounded], exact=False).run(backwards([2]), 1, on_error="raise")
    for make in (Flat, lambda named: torch.optim.LBFGS([p for _, p in named])):
        with pytest.raises(InputError, match="looks across tensors"):
            trainer([Job(0, 8, make)], exact=False)


def test_the_criterion_of_far_can_fail() -> None:
    """A wrong number of micro-batches (other dropout masks) is seen by the comparison."""
    one, other = (
        trainer([Job(0, 8, sgd, microbatches=m, precision="fp64")]).train_alone(0, 1)
        for m in (1, 2)
    )
    assert far(one, other) != []
