"""States that take turns in slots: the same bits, the right copies, no silent mistake."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_models import adamw, build_model, data, exact, loss, sgd, trainer
from arraypipe_plans import in_turn, random_rolling
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st
from memory_limits import little, moving
from runs import run
from torch import Tensor, nn

from optsched import Csr, InputError, JobArray, Schedule, verify
from optsched.arraypipe import Job, random_schedule, rescheduling
from optsched.arraypipe.memory.transfers import CopyEngine
from optsched.arraypipe.plan.segments import Change
from optsched.arraypipe.rescheduling import Replanner, Rescheduling

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 3
MAKERS = {"adamw": adamw, "sgd": sgd}
Settings = tuple[int, int, str, int]  # seed, batch size, optimizer, micro-batches
FOUR: list[Settings] = [(0, 8, "adamw", 1), (1, 8, "adamw", 2), (0, 11, "sgd", 2), (1, 8, "sgd", 1)]


def job(row: Settings, recompute: bool = True) -> Job:
    """The job with these settings."""
    seed, batch, optimizer, parts = row
    return Job(seed, batch, MAKERS[optimizer], microbatches=parts, recompute=recompute)


def order_of(seed: int, first: int = 0, place: Any = (0, 0, 0), **options: Any) -> Schedule:
    """A random order of `FOUR`, or one job after the other from the first or the last."""
    found = random_schedule([row[3] for row in FOUR], 3, place=place, seed=seed, **options)
    assert found.sequences is not None and found.start is not None
    rows = [sorted(r, key=lambda i: first * int(found.job[i])) for r in found.sequences.to_lists()]
    return found.with_orders(Csr.of(rows), found.start)


# the same bits


@few_examples
@given(st.data())
def test_bit_identical_in_any_memory(data: st.DataObject) -> None:
    """SGD, AdamW, BatchNorm, dropout, recompute or not, in any memory; a refusal names it."""
    draw = data.draw
    row = st.tuples(
        st.integers(0, 1), st.sampled_from([8, 11]), st.sampled_from(sorted(MAKERS)),
        st.sampled_from([1, 2, 4]),
    )  # fmt: skip
    rows = draw(st.lists(row, min_size=2, max_size=4))
    some = st.sets(st.sampled_from(range(len(rows))))
    keeps = draw(some) if draw(st.booleans()) else set()
    places = [[0, 1, 2], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    jobs = [job(row, j not in keeps) for j, row in enumerate(rows)]
    schedule = random_schedule(
        [row[3] for row in rows], 3, place=draw(st.sampled_from(places)), recompute=draw(some),
        update=draw(some), seed=draw(st.integers(0, 10**6)),
    )  # fmt: skip
    array = trainer(jobs, memory=1)
    factor = draw(st.sampled_from([1.0, 1.3, 1.6, 2.0, 3.0]))
    try:
        with little(lambda: factor):
            result = run(array, schedule, STEPS, on_error="raise")
    except InputError as error:
        assert "memory:" in str(error)
        return
    assert exact(array, result)


class Squash(nn.Module):
    """A layer that replaces its buffer instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("calls", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled by how often it was called."""
        self.calls = self.calls + 1
        y: Tensor = torch.tanh(self.inner(x)) / self.calls.sum()
        return y


class Steps(nn.Module):
    """A recurrent layer, which keeps lists of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 6, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The last output."""
        y: Tensor = self.cell(x.unsqueeze(1))[0][:, -1]
        return y


class Chain(nn.Module):
    """Three layers one after the other, the last with the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.last(self.middle(self.first(x)))
        return scores


def in_groups(named: Any) -> torch.optim.Optimizer:
    """A group for every parameter."""
    rows = [{"params": [q], "lr": 0.1 if name.endswith("bias") else 0.01} for name, q in named]
    return torch.optim.SGD(rows, momentum=0.9)


schedulers, optim = torch.optim.lr_scheduler, torch.optim
SETTINGS: dict[str, list[dict[str, Any]]] = {  # of the jobs of an array
    "optimizers": [
        {"optimizer": lambda p: optim.Adam(p, fused=True)},
        {"optimizer": lambda p: optim.RMSprop(p, centered=True, momentum=0.5)},
        {"optimizer": lambda p: optim.NAdam(p)},
        {"optimizer": lambda p: optim.Rprop(p)},
        {"optimizer": in_groups},
    ],
    "settings": [
        {"clip_norm": 0.1},
        {"scheduler": lambda o: schedulers.ReduceLROnPlateau(o, patience=0)},
        {"precision": "bf16"},
    ],
}
MODELS: dict[str, dict[str, Any]] = {
    "replaced buffers": {
        "build_model": lambda: nn.Sequential(Squash(), Squash(), nn.Linear(6, 4)), "stages": [1, 2],
    },
    "recurrent": {
        "build_model": lambda: nn.Sequential(Steps(), Steps(), nn.Linear(6, 4)), "stages": [1, 2],
    },
    "channels last": {
        "build_model": lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 1), nn.Flatten(),
            nn.Linear(24, 4),
        ).to(memory_format=torch.channels_last), "stages": [2, 4],
    },
    "tied": {"build_model": Chain, "stages": ["middle", "last"]},
}  # fmt: skip


@pytest.mark.parametrize("keeps", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", [*SETTINGS, *MODELS, "split backward"])
def test_states_of_any_kind(name: str, keeps: bool) -> None:
    """Step counters stay, masters go with the moments; buffers, lists of weights, strides, ties.

    Where the backward is split, W blocks end what F has begun.
    """
    rows = SETTINGS.get(name, [{}] * 3)
    jobs = [
        Job(s, 8, **{"optimizer": adamw, "microbatches": 2, "recompute": not keeps, **row})
        for s, row in enumerate(rows)
    ]
    n = len(jobs)
    if name == "split backward":
        problem = JobArray(
            [[2] * 3] * n, [[2] * 3] * n, weight=[[1] * 3] * n, place=[0] * 3, micro_batches=2,
            update=1, update_mode="block", objective="period",
        )  # fmt: skip
        schedule = random_rolling(problem, seed=1)
    else:
        update = range(n if name == "settings" else 0)
        schedule = random_schedule(
            [2] * n, 3, together=update, update=update, place=[0, 0, 0], seed=1
        )
    array = trainer(jobs, memory=1, **MODELS.get(name, {}))
    with little(lambda: 1.5, grow=True) as made:
        result = run(array, schedule, STEPS, on_error="raise")
    assert moving(made), "all states were resident"
    assert exact(array, result)
    if name == "split backward":
        assert "W" in result.trace.kind.tolist()


class Adapter(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of both."""
        y: Tensor = torch.tanh(self.base(x) + self.up(self.down(x)))
        return y


@pytest.mark.parametrize("factor", [1.0, 50.0])
def test_a_frozen_base_is_there_once(factor: float) -> None:
    """Eight adapters take the bytes of one base and of eight small states, or of a few in slots."""
    model = nn.Sequential(nn.Linear(6, 64), *(Adapter() for _ in range(4)), nn.Linear(64, 4))
    for p in (*model[0].parameters(), *model[-1].parameters()):
        p.requires_grad_(False)
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    jobs = [Job(s, 8, adamw, recompute=True) for s in range(8)]
    array = trainer(jobs, build_model=model, stages=["3"], memory=1)
    slot = 3 * sum(p.nbytes for p in model.parameters() if p.requires_grad)  # and two moments
    with little(lambda: factor + base / slot * 2, grow=True) as made:
        result = run(array, random_schedule([1] * 8, 2, place=[0, 0], seed=1), STEPS)
    device = made[-1].limits.devices[0]
    assert device.shared == base > 5 * slot
    assert bool(moving(made)) == (factor < 50) and exact(array, result)


@pytest.mark.parametrize("factor", [1.0, 50.0])
def test_copies_are_in_the_trace(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation for every copy that was made, with its bytes; none where all is resident."""
    moved: list[tuple[str, int]] = []
    original = CopyEngine.copy

    def copy(self: CopyEngine, direction: str, size: int, *rest: Any) -> None:
        moved.append((direction, size))
        original(self, direction, size, *rest)

    monkeypatch.setattr(CopyEngine, "copy", copy)
    jobs = [job(row) for row in FOUR]
    schedule = order_of(3, place=[0, 1, 0])
    with little(lambda: factor) as made:
        result = run(trainer(jobs, memory=1), schedule, STEPS)
    trace, blocks = result.trace, STEPS * schedule.n_operations
    assert verify(trace) == []
    assert trace.n_operations == blocks + len(moved)
    assert bool(moved) == bool(moving(made)) == (factor < 50)
    if not moved:
        assert "copied_bytes" not in trace.provenance
        return
    for way in ("in", "out"):
        sizes = [size for direction, size in moved if direction == way]
        assert (trace.kind[blocks:] == f"copy {way}").sum() == len(sizes)
        assert trace.provenance["copied_bytes"][way] == sum(sizes)
    # what was measured beside the blocks is what they have waited for, and what was flushed
    exposed = made[-1].engine.exposed_ns
    assert trace.duration[blocks:].sum() == exposed >= result.report.exposed_ns > 0


# what happens to jobs and plans


def test_stopped_and_failed_jobs_do_not_disturb() -> None:
    """One job stops, one fails in a layer, one in its first forward; the last has its bits."""
    jobs, breaks = [job(row) for row in FOUR], list[int]()

    def on_step(which: Job, iteration: int, value: float) -> None:
        if which is jobs[1] and iteration == 0:
            which.stop()
        if which is jobs[2] and iteration == 0:
            breaks.append(iteration)

    def broken(output: Tensor, target: Tensor) -> Tensor:
        if breaks and len(target) == 6:
            raise RuntimeError("no more")
        return loss(output, target)

    def batches(of: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x, target in data(of, start):
            yield x, target + 100 * (of is jobs[3])

    array = trainer(jobs, memory=1, data=batches)
    array.loss = broken
    with little(lambda: 1.5) as made:
        result = run(array, order_of(4), STEPS, on_step=on_step)
    assert moving(made)
    assert [one.status for one in jobs] == ["done", "stopped", "failed", "failed"]
    array.loss = loss
    assert exact(array, result)


@pytest.fixture
def one_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one cycle."""
    monkeypatch.setattr("optsched.arraypipe.training_run.FIRST_CYCLES", 1)
    monkeypatch.setattr("optsched.arraypipe.runtime.inline.cycles_for", lambda *given: 1)


# of three orders: blocks have other numbers in each, or the same in all; or each order begins with
# the job that the one before has announced last
MORE: dict[str, list[dict[str, Any]]] = {
    "other numbers": [{"update": [0, 2]}, {"update": [1]}, {}],
    "equal numbers": [{"update": [1]}] * 3,
    "other ends": [{"first": 1}, {"first": -1}, {"first": 1}],
}


@pytest.mark.usefixtures("one_cycle")
@pytest.mark.parametrize(
    ("name", "keeps"), [("other numbers", (1, 3)), ("equal numbers", ()), ("other ends", ())]
)
def test_orders_that_change_on_the_way(
    monkeypatch: pytest.MonkeyPatch, name: str, keeps: tuple[int, ...]
) -> None:
    """What an older order has announced is forgotten, also where blocks have equal numbers."""
    jobs = [job(row, recompute=j not in keeps) for j, row in enumerate(FOUR)]
    array = trainer(jobs, memory=1)
    plans = [array.plan(order_of(k, **options)) for k, options in enumerate(MORE[name])]
    waits = [1, 2, 1]

    def improved(_: Any, segment: Any) -> Any:
        waits[0] -= 1
        if len(plans) > 1 and waits[0] < 0:
            waits.pop(0), plans.pop(0)
            return Change(plans[0], segment.slots)
        return None

    monkeypatch.setattr(Rescheduling, "_improved", improved)
    with little(lambda: 1.5 + 2 * bool(keeps)) as made:
        result = run(array, plans[0], 8, on_error="raise")
    assert moving(made) and len(plans) == 1
    assert exact(array, result)


@pytest.mark.usefixtures("one_cycle")
@pytest.mark.parametrize(
    ("breadth", "place", "sentence"),
    [
        (False, None, ""),
        (True, None, "memory: gpu0 has"),
        (False, [1, 0, 2], "the new plan has the stages of job job1 on"),
    ],
    ids=["adopted", "large", "elsewhere"],
)
def test_a_plan_that_needs_more_memory_or_other_devices_is_not_adopted(
    breadth: bool, place: Any, sentence: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The log says why, and the run goes on with the plan that it has; else it changes over."""
    jobs = [job((s, 8, "sgd", 1), recompute=False) for s in range(4)]
    problem = JobArray([[3, 4, 2]] * 4, [[6, 7, 5]] * 4, objective="period")
    changed: list[Any] = []

    class Solver(Replanner):
        def submit(self, problem: Any, start: Any, time_limit: float) -> None:
            n = problem.n_jobs
            other = JobArray([[3, 4, 2]] * n, [[6, 7, 5]] * n, place=place, objective="period")
            self._answer.append(in_turn(other, breadth))

    honest = Rescheduling._improved

    def improved(planner: Any, segment: Any) -> Any:
        change = honest(planner, segment)
        changed.extend([] if change is None else [change])
        return change

    monkeypatch.setattr(rescheduling, "Replanner", Solver)
    monkeypatch.setattr(Rescheduling, "_gain", lambda *given: 1)
    monkeypatch.setattr(Rescheduling, "_improved", improved)
    array = trainer(jobs, memory=1)
    with caplog.at_level(logging.WARNING, "optsched"), little(lambda: 1.0) as made:
        result = run(
            array, in_turn(problem, False), 8, replan=problem, on_error="raise",
            on_step=lambda job, t, x: job.seed == 0 and t == 1 and job.stop(),
        )  # fmt: skip
    assert moving(made) and bool(changed) == (not sentence)
    assert sentence in caplog.text
    assert [len(row) for row in result.losses] == [2, 8, 8, 8] and exact(array, result)


# mistakes and refusals


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


@pytest.mark.parametrize(
    ("build", "memory", "sentence"),
    [
        (lambda: nn.Sequential(Renorm(), nn.Linear(6, 4)), 9000, "stage 0 changes its weights in "),
        (overlapping, 9000, "two parameters share memory"),
        (build_model, 600, r"0 of 4 jobs would fit\ngradients, at their peak"),
        (build_model, -1, "memory: expected an integer"),
    ],
)
def test_refusals(build: Any, memory: int, sentence: str) -> None:
    """What cannot be moved, or has no room, is refused with a sentence."""
    jobs = [Job(s, 8, adamw, recompute=True) for s in range(4)]
    with pytest.raises(InputError, match=sentence):
        array = trainer(jobs, build_model=build, stages=[1], memory=memory)
        run(array, random_schedule([1] * 4, 2, place=[0, 0]), 2, on_error="raise")
