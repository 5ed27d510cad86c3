"""States that take turns in slots: the same bits, the right copies, and no silent mistake."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_models import adamw, build_model, exact, loss, sgd, trainer
from depth import depth, few_examples, half
from hypothesis import given
from hypothesis import strategies as st
from runs import run
from torch import Tensor, nn

from optsched import InputError, Rows, Schedule, verify
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.memory.accesses import State
from optsched.arraypipe.memory.budget import Bytes, budget
from optsched.arraypipe.memory.manager import SlotMemory
from optsched.arraypipe.memory.residency import slot_bytes
from optsched.arraypipe.memory.stage_bytes import boundary_bytes, extra_bytes
from optsched.arraypipe.memory.state import layout_of
from optsched.arraypipe.memory.transfers import CopyEngine
from optsched.arraypipe.plan.segments import Change
from optsched.arraypipe.rescheduling import Rescheduling
from optsched.arraypipe.runtime.stages import fresh_model, fresh_stages, waits_for_all

if TYPE_CHECKING:
    from optsched.arraypipe.runtime.state import JobStage


STEPS = 3
MAKERS = {"adamw": adamw, "sgd": sgd}
Settings = tuple[int, int, str, int]  # seed, batch size, optimizer, micro-batches


def job(row: Settings, recompute: bool = True) -> Job:
    """The job with these settings."""
    seed, batch, optimizer, parts = row
    return Job(seed, batch, MAKERS[optimizer], microbatches=parts, recompute=recompute)


class Weighed(Exception):
    """Stops a run when the bytes of its devices are known."""


def weigh(jobs: list[Job], schedule: Any, queue: bool = False, **changes: Any) -> list[Bytes]:
    """What every device needs beside states in a run that has a memory limit."""
    found: list[Bytes] = []

    def memory_of(runs: Any, segments: Any, limit: int, share: Any) -> Any:
        plan = segments[0].plan
        beside = extra_bytes(runs, segments[0])
        found.extend(budget(plan, d, beside) for d in range(len(plan.sequences)))
        raise Weighed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optsched.arraypipe.training_run.memory_of", memory_of)
        with pytest.raises(Weighed):
            run(trainer(jobs, memory=1, **changes), schedule, 1, queue=queue)
    return found


def beside(jobs: list[Job], schedule: Any, queue: bool = False, **changes: Any) -> int:
    """Bytes beside states on the device that needs most."""
    return max(table.total for table in weigh(jobs, schedule, queue, **changes))


def room(jobs: list[Job], factor: float, build: Any = build_model, stages: Any = (4, 6)) -> int:
    """So many times the bytes of a slot for any of the states."""
    states = []
    for j, one in enumerate(jobs):
        for stage in stages_of(one, build, stages):
            found = layout_of(stage, "")
            states.append(State(j, stage.index, found.bytes, boundary_bytes(found.resident)))
    return int(factor * sum(slot_bytes(states))) + sum(state.resident for state in states)


def slots_of(memory: Any) -> list[tuple[int, ...]]:
    """Slots per piece of every device that has any."""
    if not isinstance(memory, SlotMemory):
        return []
    return [tuple(map(len, one.slots)) for one in memory.slotted.values()]


# the same bits

FOUR: list[Settings] = [(0, 8, "adamw", 1), (1, 8, "adamw", 2), (0, 11, "sgd", 2), (1, 8, "sgd", 1)]


def order_of(seed: int, first: int = 0, place: Any = (0, 0, 0), **options: Any) -> Schedule:
    """A random order of `FOUR`, or one job after the other from the first or the last."""
    found = random_schedule([row[3] for row in FOUR], 3, place=place, seed=seed, **options)
    assert found.sequences is not None and found.start is not None
    rows = [sorted(r, key=lambda i: first * int(found.job[i])) for r in found.sequences.to_lists()]
    return found.with_orders(Rows.of(rows), found.start)


def little(jobs: list[Job], schedule: Schedule, factor: float, **changes: Any) -> Any:
    """A trainer with so many times the bytes of a slot for any of the states."""
    build, stages = changes.get("build_model", build_model), changes.get("stages", (4, 6))
    slots = room(jobs, factor, build, stages)
    return trainer(jobs, memory=slots + beside(jobs, schedule, **changes), **changes)


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
    array = little(jobs, schedule, draw(st.sampled_from([1.0, 1.3, 1.6, 2.0, 3.0])))
    try:
        result = run(array, schedule, STEPS, on_error="raise")
    except InputError as error:
        assert "memory:" in str(error)
        return
    assert exact(array, result)


@pytest.mark.parametrize("factor", [1.0, 2.0, 50.0])
def test_copies_are_in_the_trace(
    factor: float, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operation for every copy that was made, with its bytes; none where all is resident."""
    moved: list[tuple[str, int]] = []
    original = CopyEngine.copy

    def copy(self: CopyEngine, direction: str, size: int, action: Any, *rest: Any) -> None:
        def counted() -> None:
            moved.append((direction, size))
            action()

        original(self, direction, size, counted, *rest)

    monkeypatch.setattr(CopyEngine, "copy", copy)
    jobs = [job(row) for row in FOUR]
    schedule = order_of(3, place=[0, 1, 0])
    result = run(little(jobs, schedule, factor), schedule, STEPS)
    trace, memory = result.trace, made[-1]
    assert verify(trace) == []
    blocks = STEPS * schedule.n_operations
    assert trace.n_operations == blocks + len(moved)
    assert bool(moved) == bool(slots_of(memory)) == (factor < 50)
    again = run(trainer(jobs), trace, STEPS)  # messages and copies are no blocks
    assert exact(trainer(jobs), again)
    assert len(result.log.records) == blocks
    if not moved:
        assert "copied_bytes" not in trace.provenance
        return
    copies = trace.kind[blocks:]
    for way in ("in", "out"):
        sizes = [size for direction, size in moved if direction == way]
        assert (copies == f"copy {way}").sum() == len(sizes)
        assert trace.provenance["copied_bytes"][way] == sum(sizes)
    names = [resource.name for resource in trace.resources]
    assert set(names[:2]) == {"device0", "device1"}
    assert set(names[2:]) <= {f"{d} {w} host" for d in names[:2] for w in ("from", "to")}
    assert trace.duration[blocks:].min() > 0
    # what was measured beside the blocks is what they have waited for, and what was flushed
    exposed = memory.engine.exposed_ns
    assert trace.duration[blocks:].sum() == exposed >= result.report.exposed_ns > 0


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
    """A recurrent layer, which keeps lists of its own weights."""

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


schedulers = torch.optim.lr_scheduler
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Adam amsgrad": ({"optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)}, {}),
    "Adam fused": ({"optimizer": lambda p: torch.optim.Adam(p, fused=True)}, {}),
    "AdamW foreach": ({"optimizer": lambda p: torch.optim.AdamW(p, foreach=True)}, {}),
    "Adagrad": ({"optimizer": lambda p: torch.optim.Adagrad(p)}, {}),
    "RMSprop": (
        {"optimizer": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5)}, {},
    ),
    "NAdam": ({"optimizer": lambda p: torch.optim.NAdam(p)}, {}),
    "Rprop": ({"optimizer": lambda p: torch.optim.Rprop(p)}, {}),
    "ASGD": ({"optimizer": lambda p: torch.optim.ASGD(p)}, {}),
    "groups": ({"optimizer": in_groups}, {}),
    "schedule": ({"scheduler": lambda o: schedulers.ExponentialLR(o, 0.5)}, {}),
    "clipping": ({"clip_norm": 0.1}, {}),
    "metric": ({"scheduler": lambda o: schedulers.ReduceLROnPlateau(o, patience=0)}, {}),
    "fp64": ({"precision": "fp64"}, {}),
    "bf16": ({"precision": "bf16"}, {}),
    "replaced buffers": (
        {}, {"build_model": lambda: nn.Sequential(Squash(), Squash(), nn.Linear(6, 4)),
             "stages": [1, 2]},
    ),
    "recurrent": (
        {}, {"build_model": lambda: nn.Sequential(Steps(), Steps(), nn.Linear(6, 4)),
             "stages": [1, 2]},
    ),
    "channels last": (
        {}, {"build_model": lambda: nn.Sequential(
                nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 1), nn.Flatten(),
                nn.Linear(24, 4),
             ).to(memory_format=torch.channels_last), "stages": [2, 4]},
    ),
    "tied": ({}, {"build_model": Chain, "stages": ["middle", "last"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", half([*KINDS, *(f"{name}, kept" for name in [*KINDS][-4:-1])]))
def test_states_of_any_kind(name: str, made: list[Any]) -> None:
    """Step counters stay, masters go with the moments; buffers, lists of weights, strides, ties."""
    settings, changes = KINDS[name.removesuffix(", kept")]
    keeps = name.endswith(", kept")
    row = {"optimizer": adamw, "microbatches": 2, "recompute": not keeps, **settings}
    jobs = [Job(s, 8, **row) for s in range(3)]
    update = range(3) if waits_for_all(jobs[0]) else ()
    schedule = random_schedule([2] * 3, 3, together=update, update=update, place=[0, 0, 0], seed=1)
    array = little(jobs, schedule, 5.0 if keeps else 1.5, **changes)
    got = run(array, schedule, STEPS, on_error="raise")
    assert slots_of(made[-1]), "all states were resident"
    assert exact(array, got)


def stages_of(one: Job, build: Any = build_model, cuts: Any = (4, 6)) -> list[JobStage]:
    """Fresh stages of a job."""
    model = fresh_model(build, one)
    cut = trainer([one], build_model=build, stages=list(cuts)).cut
    return fresh_stages(model, cut, one, 0, "job0")


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


@pytest.mark.parametrize("small", [1.0, 8.0])
def test_a_frozen_base_is_there_once(small: float, made: list[Any]) -> None:
    """Eight adapters take the bytes of one base and of eight small states, or of a few in slots."""
    model = nn.Sequential(nn.Linear(6, 64), *(Adapter() for _ in range(4)), nn.Linear(64, 4))
    for p in (*model[0].parameters(), *model[-1].parameters()):
        p.requires_grad_(False)
    jobs = [Job(s, 8, adamw, recompute=True) for s in range(8)]
    schedule = random_schedule([1] * 8, 2, place=[0, 0], seed=1)
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    state = 3 * sum(p.nbytes for p in model.parameters() if p.requires_grad)  # and two moments
    table = weigh(jobs, schedule, build_model=model, stages=["3"])[0]
    limit = base + int(small * state) + table.total + 9000  # alignment
    assert base > 5 * state
    array = trainer(jobs, build_model=model, stages=["3"], memory=limit)
    result = run(array, schedule, STEPS, on_error="raise")
    memory = made[-1]
    assert bool(slots_of(memory)) == (small < 8)
    assert memory.limits.devices[0].shared == base
    assert exact(array, result)


# what happens to jobs


def test_stopped_and_failed_jobs_do_not_disturb(made: list[Any]) -> None:
    """One job stops, one fails in a layer; the others have their bits."""
    jobs = [job(row) for row in FOUR]

    def on_step(which: Job, iteration: int, value: float) -> None:
        if which is jobs[1] and iteration == 0:
            which.stop()
        if which is jobs[2] and iteration == 0:
            breaks.append(iteration)

    breaks: list[int] = []

    def broken(output: Tensor, target: Tensor) -> Tensor:
        if breaks and len(target) == 6:
            raise RuntimeError("no more")
        return loss(output, target)

    schedule = order_of(4)
    array = little(jobs, schedule, 1.5)
    array.loss = broken
    result = run(array, schedule, STEPS, on_step=on_step)
    assert slots_of(made[-1])
    assert [one.status for one in jobs] == ["done", "stopped", "failed", "done"]
    array.loss = loss
    assert exact(array, result)


# of three orders: blocks have other numbers in each, or the same in all; or each order begins with
# the job that the one before has announced last
MORE: dict[str, list[dict[str, Any]]] = {
    "other numbers": [{"update": [0, 2]}, {"update": [1]}, {}],
    "equal numbers": [{"update": [1]}] * 3,
    "other ends": [{"first": 1}, {"first": -1}, {"first": 1}],
}


@pytest.mark.parametrize("more", half(MORE.values()), ids=list(MORE))
@pytest.mark.parametrize("keeps", [(), (1, 3)], ids=["recomputed", "kept"])
def test_orders_that_change_on_the_way(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, keeps: tuple[int, ...],
    more: list[dict[str, Any]],
) -> None:  # fmt: skip
    """What an older order has announced is forgotten, also where blocks have equal numbers."""
    for seed in range(depth(1, 3)):
        draw = random.Random(seed)
        jobs = [job(row, recompute=j not in keeps) for j, row in enumerate(FOUR)]
        orders = [order_of(seed + k, **options) for k, options in enumerate(more)]
        most = max(beside(jobs, order) for order in orders)
        array = trainer(jobs, memory=room(jobs, 1.5 + 2 * bool(keeps)) + most)
        plans = [array.plan(order) for order in orders]
        waits = [draw.randrange(3) for _ in plans]

        def improved(_: Any, segment: Any, plans: Any = plans, waits: Any = waits) -> Any:
            if len(plans) > 1 and not waits[0]:
                waits.pop(0), plans.pop(0)
                return Change(plans[0], segment.slots)
            waits[0] -= 1
            return None

        monkeypatch.setattr(Rescheduling, "_improved", improved)
        monkeypatch.setattr("optsched.arraypipe.training_run.FIRST_CYCLES", 1)
        monkeypatch.setattr("optsched.arraypipe.runtime.inline.cycles_for", lambda *given: 1)
        result = run(array, plans[0], 8, on_error="raise")
        assert slots_of(made[-1]) and len(plans) == 1
        assert exact(array, result)
