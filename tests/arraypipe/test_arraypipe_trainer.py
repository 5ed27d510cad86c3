"""The trainer around the blocks: cutting, refusals, failures, reports, what it leaves behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, build_model, data, loss, sgd, trainer  # noqa: E402
from torch import nn  # noqa: E402

from optsched import InputError, verify  # noqa: E402
from optsched.arraypipe import Job, JobFailed, random_schedule  # noqa: E402
from optsched.arraypipe.runtime.environment import global_state_kept  # noqa: E402

pytestmark = pytest.mark.torch

JOBS = [Job(0, 8, adamw), Job(1, 8, sgd, recompute=True, microbatches=2)]
SCHEDULE = random_schedule([1, 2], 3, seed=2)


def test_losses_and_progress() -> None:
    """Every iteration of every job is reported once, in order, with the loss of the result."""
    seen: list[tuple[int, int, float]] = []
    array = trainer(JOBS)
    result = array.run(SCHEDULE, 4, on_step=lambda job, t, x: seen.append((job.seed, t, x)))
    for seed in (0, 1):
        steps = [(t, x) for s, t, x in seen if s == seed]
        assert steps == list(enumerate(result.losses[seed]))
    assert len(seen) == 8


def test_trace_replay_and_report() -> None:
    """The trace has every executed block once; the replay is the same work in parallel."""
    result = trainer(JOBS).run(SCHEDULE, 3)
    trace, replay = result.trace, result.replay
    assert trace.n_operations == 3 * SCHEDULE.n_operations
    assert verify(trace) == []
    assert verify(replay) == []
    start, end = np.asarray(trace.start), trace.end
    assert (start[1:] >= end[:-1]).all()  # serial
    assert (trace.duration == replay.duration).all()
    assert replay.makespan <= trace.makespan
    report = result.report
    assert report.replayed == replay.makespan
    assert report.wall == trace.makespan
    assert report.host == trace.makespan - int(trace.duration.sum())
    assert report.predicted == _prediction(SCHEDULE, 3)
    assert sum(d.compute for d in report.devices) == int(trace.duration.sum())
    assert "virtual clock" in str(report)


def _prediction(schedule: Any, steps: int) -> int:
    """Makespan of the repeated schedule in nanoseconds, by plain relaxation."""
    from optsched.arraypipe import compile
    from optsched.arraypipe.plan.plan import routes
    from optsched.arraypipe.plan.segments import Segment, Walk

    plan = compile(schedule)
    free = [0] * len(plan.devices)
    ends: dict[tuple[int, int], int] = {}
    seats, begins = tuple(range(plan.n_jobs)), [0] * plan.n_jobs
    for i, cycle, _ in Walk(Segment(plan, routes(plan), seats, begins, [steps] * plan.n_jobs)):
        device = plan.blocks[i].device
        waits = [ends.get((a.tail, cycle - a.tokens), 0) for a in plan.waits[i]]
        free[device] = ends[i, cycle] = max(free[device], *waits) + int(schedule.duration[i])
    return max(free) * 1000


def test_global_state_is_what_it_was() -> None:
    """Random states, gradient mode, default type and threads are the same after a run."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)  # noqa: NPY002
    generator, python = torch.get_rng_state(), random.getstate()
    legacy = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    threads = torch.get_num_threads()

    def greedy(job: Job, start: int) -> Any:
        for x, y in data(job, start):
            torch.set_default_dtype(torch.float64)
            random.random()
            yield x.float(), y

    with torch.no_grad():
        result = trainer(JOBS, data=greedy).run(SCHEDULE, 2)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        trainer(JOBS).run(SCHEDULE, 1)
    assert result.losses[0][0] != result.losses[0][1]  # it did train
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == legacy  # type: ignore[index]  # noqa: NPY002
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("begun", [True, False])
def test_the_gpu_of_the_process_is_what_it_was(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that chooses one, as ranks do, gives it back, but makes no context on another one."""
    state = {"begun": begun, "gpu": 2 if begun else 0}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state["begun"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state["gpu"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: state.update(begun=True, gpu=gpu))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    with global_state_kept():
        torch.cuda.set_device(3)
    assert state["gpu"] == (2 if begun else 3)


def test_a_number_of_stages_is_balanced() -> None:
    """A number gives that many stages that cover the model; the same ones each time."""
    first, second = trainer(JOBS, stages=3), trainer(JOBS, stages=3)
    assert len(first.stages) == 3
    assert [name for row in first.stages for name in row] == [str(i) for i in range(9)]
    assert first.stages == second.stages


class Tied(nn.Module):
    """Input and output share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.loose = nn.Parameter(torch.zeros(1))


def shared() -> nn.Sequential:
    """One module at two places."""
    act, one = nn.ReLU(), nn.Linear(6, 6)
    return nn.Sequential(one, act, one, act)


BAD_STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "too many": ({"stages": 10}, "expected 1..9"),
    "none": ({"stages": 0}, "expected 1..9"),
    "descending": ({"stages": [6, 4]}, "ascending cut indices"),
    "beyond": ({"stages": [9]}, "ascending cut indices"),
    "text": ({"stages": "abc"}, "expected a number"),
    "names": ({"stages": [["0"], ["nine"]]}, "no module 'nine'"),
    "twice": ({"stages": [["0"], ["0"]]}, "named twice"),
    "no sequence": ({"build_model": Tied, "stages": 2}, "forward of Tied .* cannot be traced"),
    "no module": ({"build_model": lambda: 3}, "expected an nn.Module"),
    "shared": ({"build_model": shared, "stages": [2]}, "occurs twice"),
}


@pytest.mark.parametrize("case", BAD_STAGES)
def test_stages_refused_when_made(case: str) -> None:
    """Cuts that do not fit the model are refused with a sentence."""
    changes, sentence = BAD_STAGES[case]
    with pytest.raises(InputError, match=sentence):
        trainer(JOBS, **changes)


def endless(pair: Any) -> Any:
    """A data function that always gives the same."""
    return lambda job, start: iter([pair] * 5)


X, Y = torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64)


def closure_optimizer(named: Any) -> Any:
    """L-BFGS over the parameters."""
    return torch.optim.LBFGS([p for _, p in named])


class Normed(torch.optim.SGD):
    """Scales all gradients by their common norm: looks across tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        rows = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.sqrt(sum((p.grad**2).sum() for p in rows))  # type: ignore[misc,arg-type]
        for p in rows:
            p.grad = p.grad / norm
        super().step()


class Plain(torch.optim.SGD):
    """A class that is not known, but works on each tensor alone."""


def with_optimizer(make: Any) -> dict[str, Any]:
    """Two jobs, the second with this optimizer."""
    return {"jobs": [JOBS[0], Job(1, 8, make, microbatches=2)]}


BAD_RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "one job": ({"jobs": JOBS[:1]}, "the schedule has 2 jobs, the trainer 1"),
    "other stages": ({"stages": [4]}, "3 stages, the model 2"),
    "other parts": ({"jobs": [JOBS[0], JOBS[0]]}, "job 1: the schedule has 2 micro-batches"),
    "uncovered": ({"stages": [["0"], ["1", "2", "3"], ["4", "5"]]}, "belongs to no stage"),
    "LBFGS": (with_optimizer(closure_optimizer), "job job1: optimizer LBFGS looks across tensors"),
    "norm": (with_optimizer(lambda p: Normed(p, lr=0.1)), "Normed looks across tensors"),
    "no optimizer": (with_optimizer(lambda p: 3), "no Optimizer|cannot be made"),
    "no data": ({"data": lambda job, start: 3}, "expected an iterator"),
    "no pair": ({"data": endless(X)}, "expected a pair"),
    "no tensor": ({"data": endless(([1], Y))}, "the input is a list"),
    "no scalar": ({"loss": lambda out, y: out}, "one element"),
    "boundary": ({"build_model": lambda: nn.Sequential(Dictionary(), nn.ReLU(), nn.Linear(6, 4)),
                  "stages": [1, 2]}, "output of stage 0 is a dict"),
}  # fmt: skip


class Dictionary(nn.Module):
    """Returns what cannot be sent."""

    def forward(self, x: Any) -> Any:
        """A dictionary."""
        return {"x": x}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_run_refused(case: str, tmp_path: Any) -> None:
    """What cannot be run exactly is refused with a sentence, and no file is left."""
    changes, sentence = BAD_RUNS[case]
    changes = dict(changes)
    with pytest.raises(InputError, match=sentence):
        array = trainer(changes.pop("jobs", JOBS), **changes)
        array.run(SCHEDULE, 2, checkpoint=tmp_path / "ckpt")
    assert not list(tmp_path.rglob("*.pt"))


def test_small_batch_refused() -> None:
    """A batch with fewer samples than micro-batches names job, iteration and sizes."""
    array = trainer([Job(0, 8, sgd, microbatches=4)], data=endless((X[:3], Y[:3])))
    with pytest.raises(InputError, match="job0, iteration 0: 3 samples cannot be cut into 4"):
        array.run(random_schedule([4], 3), 2)
    array = trainer([Job(0, 8, sgd, microbatches=4)], data=endless((X, Y[:3])))
    with pytest.raises(InputError, match="differ in their first dimension"):
        array.run(random_schedule([4], 3), 2)


def test_data_that_ends_fails_the_job_alone() -> None:
    """An iterator without a further batch ends its job; the other one goes on to its end."""
    array = trainer(JOBS, data=lambda job, start: iter([(X, Y)] * (9 if job.seed else 1)))
    result = array.run(SCHEDULE, 2)
    assert [job.status for job in array.jobs] == ["failed", "done"]
    assert "job0 has no batch for iteration 1" in str(array.jobs[0].error)
    assert [len(row) for row in result.losses] == [1, 2]


def test_unknown_per_tensor_optimizer_is_tried_and_taken() -> None:
    """A class of one's own passes the trial if it treats tensors one by one."""
    array = trainer([Job(0, 8, lambda p: Plain(p, lr=0.1))])
    assert array.check_exact(2) == []


def test_jobs_refused_when_made() -> None:
    """Settings of a job are checked; two jobs cannot have one name."""
    for changes, sentence in (
        ({"seed": -1}, "seed"), ({"seed": 2**63}, "seed"), ({"batch_size": 0}, "batch_size"),
        ({"microbatches": 9}, "microbatches: expected an integer in 1..8, got 9"),
        ({"recompute": "no"}, "recompute: expected True or False, got .no"),
        ({"model": 5}, "model: expected arguments by name, got 5"),
        ({"init": 5}, "init: expected the path of a state dict, got 5"),
        ({"name": 5}, "name: expected letters"),
        ({"microbatches": True}, "microbatches"), ({"name": "../up"}, "name"),
        ({"optimizer": 3}, "optimizer"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            Job(**{"seed": 0, "batch_size": 8, "optimizer": sgd, **changes})
    with pytest.raises(InputError, match="'job1' is also the name"):
        trainer([Job(0, 8, sgd, name="job1"), Job(1, 8, sgd)])
    with pytest.raises(InputError, match="at least one"):
        trainer([])


def test_arguments_refused() -> None:
    """Steps and checkpoint arguments are checked."""
    array = trainer(JOBS)
    for steps in (0, -1, True, 2.5):
        with pytest.raises(InputError, match="steps"):
            array.run(SCHEDULE, steps)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected a folder"):
        array.run(SCHEDULE, 1, resume=True)


class Explodes(nn.Module):
    """Raises in its n-th forward or backward."""

    def __init__(self, when: int, backward: bool) -> None:
        super().__init__()
        self.calls, self.when, self.backward = 0, when, backward

    def forward(self, x: Any) -> Any:
        """The input as it is."""
        self.calls += 1
        if self.calls == self.when:
            if not self.backward:
                raise RuntimeError("out of luck")
            x.register_hook(self.raise_it)
        return x * 1

    def raise_it(self, gradient: Any) -> None:
        """Hook of the backward."""
        raise RuntimeError("out of luck")


@pytest.mark.parametrize("backward", [False, True])
def test_a_block_that_raises_is_named(backward: bool) -> None:
    """The error has job, stage, iteration and the cause; global state is restored."""
    array = trainer(
        [Job(0, 8, sgd, model={"when": 99}), Job(1, 8, sgd, name="bad", model={"when": 3})],
        build_model=lambda when: nn.Sequential(
            nn.Linear(6, 6), Explodes(when, backward), nn.Linear(6, 4)
        ),
        stages=[1, 2],
    )
    before = torch.get_rng_state()
    with pytest.raises(JobFailed, match=r"job bad, stage 1, iteration 2: .*out of luck") as caught:
        array.run(random_schedule([1, 1], 3), 5, on_error="raise")
    assert (caught.value.job, caught.value.stage, caught.value.iteration) == (1, 1, 2)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_is_not_finite_is_named() -> None:
    """A learning rate that diverges stops the run."""
    wild = Job(1, 8, lambda p: torch.optim.SGD(p, lr=1e30), name="wild", microbatches=2)
    with pytest.raises(JobFailed, match=r"job wild, stage 2, iteration \d+: the loss is"):
        trainer([JOBS[0], wild]).run(SCHEDULE, 20, on_error="raise")


def test_reference_is_plain_training() -> None:
    """Without random layers the reference equals a loop that knows nothing of keys."""

    def plain() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))

    job = Job(4, 8, adamw)
    alone = trainer([job], build_model=plain, stages=[1, 2]).train_alone(0, 3)
    torch.manual_seed(4)
    model = plain()
    optimizer = adamw(list(model.named_parameters()))
    batches = data(job, 0)
    for _ in range(3):
        x, y = next(batches)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(alone.parameters[name], parameter)
    assert build_model() is not build_model()
