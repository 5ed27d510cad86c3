"""States that take turns in slots: the same bits, the right copies, and no silent mistake."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, build_model, loss, sgd, trainer  # noqa: E402
from depth import depth, few_examples, half  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from optsched import InputError, Rows, Schedule, verify  # noqa: E402
from optsched.arraypipe import Job, random_schedule  # noqa: E402
from optsched.arraypipe.life.changes import Rescheduling  # noqa: E402
from optsched.arraypipe.memory.budget import Bytes, budget  # noqa: E402
from optsched.arraypipe.memory.copies import Transfers  # noqa: E402
from optsched.arraypipe.memory.engines import CopyEngine  # noqa: E402
from optsched.arraypipe.memory.manager import PerDevice, Slotted  # noqa: E402
from optsched.arraypipe.memory.residency import slot_bytes  # noqa: E402
from optsched.arraypipe.memory.slots import layout_of  # noqa: E402
from optsched.arraypipe.memory.stage_bytes import beside_states  # noqa: E402
from optsched.arraypipe.memory.types import State  # noqa: E402
from optsched.arraypipe.plan.segments import Change  # noqa: E402
from optsched.arraypipe.runtime.stages import fresh_model, fresh_stages, waits_for_all  # noqa: E402
from optsched.arraypipe.train_alone import Trained, differences  # noqa: E402
from optsched.formats import perfetto  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.arraypipe.runtime.state import JobStage

pytestmark = pytest.mark.torch

STEPS = 3
MAKERS = {"adamw": adamw, "sgd": sgd}
Settings = tuple[int, int, str, int]  # seed, batch size, optimizer, micro-batches


def job(row: Settings, recompute: bool = True) -> Job:
    """The job with these settings."""
    seed, batch, optimizer, parts = row
    return Job(seed, batch, MAKERS[optimizer], microbatches=parts, recompute=recompute)


@cache
def alone(row: Settings, steps: int = STEPS) -> Trained:
    """The reference."""
    return trainer([job(row)]).train_alone(0, steps)


class Weighed(Exception):
    """Stops a run when the bytes of its devices are known."""


def weigh(jobs: list[Job], schedule: Any, queue: bool = False, **changes: Any) -> list[Bytes]:
    """What every device needs beside states in a run that has a memory limit."""
    found: list[Bytes] = []

    def memory_of(runs: Any, segments: Any, limit: int, criterion: Any) -> Any:
        plan = segments[0].plan
        beside = beside_states(runs, segments[0], criterion)
        found.extend(budget(plan, d, beside) for d in range(len(plan.sequences)))
        raise Weighed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optsched.arraypipe.training_run.memory_of", memory_of)
        with pytest.raises(Weighed):
            trainer(jobs, memory=1, **changes).run(schedule, 1, queue=queue)
    return found


def beside(jobs: list[Job], schedule: Any, queue: bool = False, **changes: Any) -> int:
    """Bytes beside states on the device that needs most."""
    return max(table.total for table in weigh(jobs, schedule, queue, **changes))


def room(jobs: list[Job], factor: float, build: Any = build_model, stages: Any = (4, 6)) -> int:
    """So many times the bytes of a slot for any of the states."""
    states = [
        State(j, stage.index, layout_of(stage, "").bytes)
        for j, one in enumerate(jobs)
        for stage in stages_of(one, build, stages)
    ]
    return int(factor * sum(slot_bytes(states)))


def slots_of(memory: Any) -> list[tuple[int, ...]]:
    """Slots per pool of every device that has any."""
    plans = memory.plans if isinstance(memory, PerDevice) else []
    return [tuple(rule.slots for rule in plan.rules) for plan in plans if plan.rules]


# the same bits


@st.composite
def arrays(draw: st.DrawFn) -> tuple[list[Settings], list[bool], dict[str, Any], float]:
    """Jobs with and without recompute, stages sharing devices, blocks of all kinds, any memory."""
    row = st.tuples(
        st.integers(0, 1),
        st.sampled_from([8, 11]),
        st.sampled_from(sorted(MAKERS)),
        st.sampled_from([1, 2, 4]),
    )
    rows = draw(st.lists(row, min_size=2, max_size=4))
    jobs = st.sets(st.sampled_from(range(len(rows))))
    keeps = draw(jobs) if draw(st.booleans()) else set()
    order = {
        "place": draw(st.sampled_from([[0, 1, 2], [0, 1, 0], [0, 0, 1], [0, 0, 0]])),
        "recompute": draw(jobs),
        "update": draw(jobs),
        "seed": draw(st.integers(0, 10**6)),
    }
    factor = draw(st.sampled_from([1.0, 1.3, 1.6, 2.0, 3.0]))
    return rows, [j not in keeps for j in range(len(rows))], order, factor


def check(drawn: tuple[list[Settings], list[bool], dict[str, Any], float]) -> None:
    """Train in little memory and compare with training alone; a refusal names the memory."""
    rows, recompute, order, factor = drawn
    jobs = [job(row, r) for row, r in zip(rows, recompute, strict=True)]
    schedule = random_schedule([row[3] for row in rows], 3, **order)
    array = trainer(jobs, memory=room(jobs, factor) + beside(jobs, schedule))
    try:
        result = array.run(schedule, STEPS, on_error="raise")
    except InputError as error:
        assert "memory:" in str(error)
        return
    for j, row in enumerate(rows):
        assert differences(result.trained[j], alone(row)) == []


@few_examples
@given(arrays())
def test_bit_identical_in_any_memory(drawn: Any) -> None:
    """SGD with momentum, AdamW, BatchNorm, dropout, micro-batches, recompute: no differing bit."""
    check(drawn)


FOUR: list[Settings] = [(0, 8, "adamw", 1), (1, 8, "adamw", 2), (0, 11, "sgd", 2), (1, 8, "sgd", 1)]


@pytest.mark.parametrize(
    ("factor", "most"), half([(1.0, 2), (1.3, 3), (1.7, 5), (2.0, 5), (3.0, 9), (5.0, 16)])
)
def test_from_one_slot_to_all(factor: float, most: int, made: list[Any]) -> None:
    """The less memory the fewer slots, and always the same bits."""
    order: dict[str, Any] = {"place": [0, 0, 0], "seed": 3}
    jobs = [job(row) for row in FOUR]
    schedule = random_schedule([row[3] for row in FOUR], 3, **order)
    limit = room(jobs, factor) + beside(jobs, schedule)
    result = trainer(jobs, memory=limit).run(schedule, STEPS)
    ((weights, moments),) = slots_of(made[-1])
    assert 2 <= weights + moments <= most
    for j, row in enumerate(FOUR):
        assert differences(result.trained[j], alone(row)) == []


@pytest.mark.parametrize("factor", [1.0, 2.0, 50.0])
def test_copies_are_in_the_trace(
    factor: float, made: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    schedule = random_schedule([row[3] for row in FOUR], 3, place=[0, 1, 0], seed=3)
    limit = room(jobs, factor) + beside(jobs, schedule)
    result = trainer(jobs, memory=limit).run(schedule, STEPS)
    trace, memory = result.trace, made[-1]
    assert verify(trace) == []
    blocks = STEPS * schedule.n_operations
    assert trace.n_operations == blocks + len(moved)
    assert bool(moved) == bool(slots_of(memory)) == (factor < 50)
    path = tmp_path / "run.schedule.json"
    trace.write(path)
    assert Schedule.read(path) == trace
    again = trainer(jobs).run(trace, STEPS)  # messages and copies are no blocks
    for j, row in enumerate(FOUR):
        assert differences(again.trained[j], alone(row)) == []
    assert result.replay.n_operations == blocks
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
    exposed = sum(one.engine.exposed for one in memory.slotted.values())
    assert trace.duration[blocks:].sum() == exposed >= result.report.exposed > 0
    pairs = {(int(trace.job[i]), int(trace.stage[i])) for i in range(blocks, trace.n_operations)}
    assert pairs <= {(j, s) for j in range(4) for s in range(3)}
    events = perfetto.trace(trace)["traceEvents"]
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert rows == names


OTHERS: dict[str, dict[str, Any]] = {
    "Adam amsgrad": {"optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)},
    "Adam fused": {"optimizer": lambda p: torch.optim.Adam(p, fused=True)},
    "AdamW foreach": {"optimizer": lambda p: torch.optim.AdamW(p, foreach=True)},
    "Adagrad": {"optimizer": lambda p: torch.optim.Adagrad(p)},
    "RMSprop": {"optimizer": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5)},
    "NAdam": {"optimizer": lambda p: torch.optim.NAdam(p)},
    "Rprop": {"optimizer": lambda p: torch.optim.Rprop(p)},
    "ASGD": {"optimizer": lambda p: torch.optim.ASGD(p)},
    "groups": {
        "optimizer": lambda p: torch.optim.SGD(
            [{"params": [q], "lr": 0.1 if name.endswith("bias") else 0.01} for name, q in p],
            momentum=0.9,
        )
    },
    "schedule": {
        "optimizer": adamw,
        "scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    },
    "clipping": {"optimizer": adamw, "clip_norm": 0.1},
    "metric": {
        "optimizer": adamw,
        "scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    },
    "fp64": {"optimizer": adamw, "precision": "fp64"},
    "bf16": {"optimizer": adamw, "precision": "bf16"},
}


def both(jobs: list[Job], made: list[Any], **changes: Any) -> None:
    """Train resident and in slots; everything must be equal, also with the job alone."""
    update = {j for j, one in enumerate(jobs) if waits_for_all(one)}
    order: dict[str, Any] = {"place": [0, 0, 0], "seed": 1}
    schedule = random_schedule(
        [one.microbatches for one in jobs], 3, together=update, update=update, **order
    )
    recomputes = all(one.recompute for one in jobs)
    limit = room(jobs, 1.5 if recomputes else 5.0, *changes.values())
    near = trainer(jobs, memory=limit + beside(jobs, schedule, **changes), **changes)
    got = near.run(schedule, STEPS, on_error="raise")
    assert slots_of(made[-1]), "all states were resident"
    for j in range(len(jobs)):
        assert differences(got.trained[j], near.train_alone(j, STEPS)) == []


@pytest.mark.parametrize("name", half(OTHERS))
def test_other_optimizers_and_precisions(name: str, made: list[Any]) -> None:
    """State of any shape and kind moves: step counters stay, masters go with the moments."""
    jobs = [Job(s, 8, microbatches=2, recompute=True, **OTHERS[name]) for s in range(3)]
    both(jobs, made)


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


MODELS: dict[str, tuple[Any, Any]] = {
    "replaced buffers": (lambda: nn.Sequential(Squash(), Squash(), nn.Linear(6, 4)), [1, 2]),
    "recurrent": (lambda: nn.Sequential(Steps(), Steps(), nn.Linear(6, 4)), [1, 2]),
    "channels last": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 1), nn.Flatten(),
            nn.Linear(24, 4),
        ).to(memory_format=torch.channels_last),
        [2, 4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", half(MODELS))
def test_other_models(name: str, recompute: bool, made: list[Any]) -> None:
    """Layers that replace buffers or keep lists of weights, and strides of their own."""
    build, stages = MODELS[name]
    jobs = [Job(s, 8, adamw, microbatches=2, recompute=recompute) for s in range(3)]
    both(jobs, made, build_model=build, stages=stages)


def test_tied_weights(made: list[Any]) -> None:
    """Borrowed weights are a piece of their own; what is lent is not overwritten on its way."""
    jobs = [Job(s, 8, adamw, microbatches=2, recompute=True) for s in range(3)]
    rows = [["first"], ["middle"], ["last"]]
    both(jobs, made, build_model=Chain, stages=rows)


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


def stages_of(one: Job, build: Any = build_model, cuts: Any = (4, 6)) -> list[JobStage]:
    """Fresh stages of a job."""
    model = fresh_model(build, one)
    names = trainer([one], build_model=build, stages=list(cuts)).stages
    return fresh_stages(model, names, one, 0, "job0")


# what happens to jobs


def test_stopped_and_failed_jobs_do_not_disturb(made: list[Any]) -> None:
    """One job stops, one fails in a layer; the others have their bits."""
    jobs = [job(row) for row in FOUR]

    def on_step(which: Job, iteration: int, value: float) -> None:
        if which is jobs[1] and iteration == 0:
            which.stop()

    def broken(output: Tensor, target: Tensor) -> Tensor:
        broken.calls += 1  # type: ignore[attr-defined]
        if len(target) == 6 and broken.calls > 12:  # type: ignore[attr-defined]
            raise RuntimeError("no more")
        return loss(output, target)

    broken.calls = 0  # type: ignore[attr-defined]
    schedule = random_schedule([row[3] for row in FOUR], 3, place=[0, 0, 0], seed=4)
    array = trainer(jobs, memory=room(jobs, 1.5) + beside(jobs, schedule), loss=broken)
    result = array.run(schedule, STEPS, on_step=on_step)
    assert slots_of(made[-1])
    assert [one.status for one in jobs] == ["done", "stopped", "failed", "done"]
    for j in (0, 3):
        assert differences(result.trained[j], alone(FOUR[j])) == []


def test_waiting_jobs_take_seats(made: list[Any]) -> None:
    """Jobs that come in later find slots, too."""
    rows = [*FOUR[:2], FOUR[0], FOUR[1]]
    jobs = [job(row) for row in rows]
    schedule = random_schedule([1, 2], 3, place=[0, 0, 0], seed=2)
    array = trainer(jobs, memory=room(jobs, 1.5) + beside(jobs, schedule, queue=True))
    result = array.run(schedule, STEPS, queue=True)
    assert slots_of(made[-1])
    for j, row in enumerate(rows):
        assert differences(result.trained[j], alone(row)) == []


# of three orders: blocks have other numbers in each, or the same in all; or each order begins with
# the job that the one before has announced last
MORE: dict[str, list[dict[str, Any]]] = {
    "other numbers": [{"update": [0, 2]}, {"update": [1]}, {}],
    "equal numbers": [{"update": [1]}] * 3,
    "other ends": [{"first": 1}, {"first": -1}, {"first": 1}],
}


def order_of(seed: int, first: int = 0, **options: Any) -> Schedule:
    """A random order of the four jobs, or one job after the other from the first or the last."""
    found = random_schedule([row[3] for row in FOUR], 3, place=[0, 0, 0], seed=seed, **options)
    assert found.sequences is not None and found.start is not None
    rows = [
        sorted(row, key=lambda i: first * int(found.job[i])) for row in found.sequences.to_lists()
    ]
    return found.with_orders(Rows.of(rows), found.start)


@pytest.mark.parametrize("more", half(MORE.values()), ids=list(MORE))
@pytest.mark.parametrize("keeps", [(), (1, 3)], ids=["recomputed", "kept"])
def test_orders_that_change_on_the_way(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, keeps: tuple[int, ...],
    more: list[dict[str, Any]],
) -> None:  # fmt: skip
    """What an older order has announced is forgotten, also where blocks have equal numbers."""
    met: list[int] = []  # by order: visits that were not the next ones announced
    renew, meet = Transfers.renew, Transfers._meet

    def renewed(transfers: Transfers, future: Any) -> None:
        if isinstance(transfers.carrier, Slotted):
            met.append(0)
        renew(transfers, future)

    def surprised(transfers: Transfers, visit: Any) -> None:
        if isinstance(transfers.carrier, Slotted):
            met[-1] += 1
        meet(transfers, visit)

    for seed in range(depth(1, 3)):
        draw = random.Random(seed)
        jobs = [job(row, recompute=j not in keeps) for j, row in enumerate(FOUR)]
        orders = [order_of(seed + k, **options) for k, options in enumerate(more)]
        most = max(beside(jobs, order) for order in orders)
        array = trainer(jobs, memory=room(jobs, 1.5 + 2 * bool(keeps)) + most)
        plans = [array.plan(order) for order in orders]
        waits = [draw.randrange(3) for _ in plans]

        def poll(_: Any, segment: Any, plans: Any = plans, waits: Any = waits) -> Any:
            if len(plans) > 1 and not waits[0]:
                waits.pop(0), plans.pop(0)
                return Change(plans[0], segment.seats)
            waits[0] -= 1
            return None

        met.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Rescheduling, "_seated", poll)
            patch.setattr(Transfers, "renew", renewed)
            patch.setattr(Transfers, "_meet", surprised)
            result = array.run(plans[0], 8, on_error="raise")
        assert slots_of(made[-1])
        assert len(plans) == 1 and len(met) == 3
        assert met[-1] == 1  # the first one of an order
        for j, row in enumerate(FOUR):
            assert differences(result.trained[j], alone(row, 8)) == []


def test_copies_are_those_of_the_plan(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the steady state the run copies the bytes per cycle that the residency plan says."""
    copied = {"in": 0, "out": 0}
    honest = Slotted.mover

    def mover(self: Slotted, direction: str, *rest: int) -> Any:
        move = honest(self, direction, *rest)

        def counted() -> None:
            copied[direction] += rest[-1] - rest[-2]
            move()

        return counted

    monkeypatch.setattr(Slotted, "mover", mover)
    rows = [(s, 8, "adamw", 1) for s in range(4)]
    schedule = random_schedule([1] * 4, 3, place=[0, 0, 0], seed=9)
    totals = []
    for steps in (20, 32):
        copied.update({"in": 0, "out": 0})
        jobs = [job(row) for row in rows]
        trainer(jobs, memory=room(jobs, 2.0) + beside(jobs, schedule)).run(schedule, steps)
        totals.append(dict(copied))
    (plan,) = [plan for plan in made[-1].plans if plan.rules]
    for direction, planned in (("in", plan.inward), ("out", plan.outward)):
        assert totals[1][direction] - totals[0][direction] == pytest.approx(12 * planned)
