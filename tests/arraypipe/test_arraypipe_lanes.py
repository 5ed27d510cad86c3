"""The GPU streams of the inline backend on a model of them: no access that events do not order."""

from __future__ import annotations

import weakref
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import runs
import torch
from arraypipe_models import adamw, sgd
from depth import seeds
from streams_cases import GPU, ONE, STEPS, TWO, jobs, run, slotted, trainer
from streams_model import Machine, Stream, streams
from torch import Tensor, nn

from optsched import verify
from optsched.arraypipe import Job, JobFailed, random_schedule, training_run
from optsched.arraypipe.memory import cuda_engine
from optsched.arraypipe.runtime import cuda_streams, data, inline, stages
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.arraypipe.runtime.state import JobStage


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Streams that check every access."""
    with streams(monkeypatch) as made:
        yield made


@seeds(1, 3)
def test_no_race_and_the_same_bits(machine: Machine, seed: int) -> None:
    """Whatever the order: all accesses are ordered, and the trace has the times of the streams."""
    array = trainer(jobs())
    result = run(array, seed)
    assert machine.races == []
    assert machine.kernels > 1000
    assert verify(result.trace) == []
    assert result.trace.start is not None
    ends = result.trace.start + result.trace.duration
    device = [row[0] for row in result.trace.op_resources.to_lists()]
    pairs = zip(device, result.trace.start, ends, strict=True)
    rows = sorted(pairs, key=lambda row: row[1])
    assert any(b < end and d != e for (d, _, end), (e, b, _) in pairwise(rows))  # they overlap
    for j in range(len(array.jobs)):
        assert differences(result.trained[j], array.train_alone(j, STEPS)) == []


def test_clipping(machine: Machine) -> None:
    """The norm goes from the first stage to all updates, and the host waits for none of it."""
    waits = []
    for clip in (None, 0.1):
        machine.waits = 0
        result = run(trainer([Job(0, 8, adamw, clip_norm=clip, microbatches=2), Job(1, 8, sgd)]))
        waits.append(machine.waits - result.replay.n_operations)  # each was waited for once
    assert machine.races == []
    assert waits[0] == waits[1]


def upload(machine: Machine) -> None:
    """Bring page-locked batches of several layouts to a device, and use them."""
    x, whole = (machine.lock_pages(torch.randn(4, n)) for n in (3, 6))
    machine.waits = 0
    with torch.cuda.stream(torch.cuda.Stream()):
        for value in (x, x.t(), whole[:, ::2], x[:1].expand(4, 3)):
            there = data.uploaded(value, GPU)
            assert there.stride() == value.to("meta").stride()
            there.add_(1)
    assert machine.waits == 0
    torch.cuda.synchronize()  # the host's allocator waits for copies by itself


def test_batches_come_beside_the_blocks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for nothing, blocks wait for the batch."""
    upload(machine)
    assert machine.races == []
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    upload(machine)
    assert machine.races


class Tied(nn.Module):
    """A layer that uses the weights of another one."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.weight = owner.weight

    def forward(self, x: Tensor) -> Tensor:
        """Transposed."""
        return x @ self.weight


def tied_model() -> nn.Sequential:
    """The first and the last stage share a matrix."""
    first = nn.Linear(6, 6)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), Tied(first), nn.Linear(6, 4))


def test_tied_weights(machine: Machine) -> None:
    """A weight is read late by the stage that borrows it, and not changed before."""
    run(trainer([Job(0, 8, adamw), Job(1, 8, sgd)], build_model=tied_model, stages=[2, 4]))
    assert machine.races == []


def test_jobs_that_take_seats_and_stop(machine: Machine) -> None:
    """States made on the host's stream while others train are there when their blocks begin."""
    supply = iter([Job(5, 8, adamw), Job(6, 8, sgd)])
    array = trainer([Job(0, 8, adamw), Job(1, 8, sgd), Job(2, 8, adamw)])
    schedule = random_schedule([1, 1], 3, seed=2)
    told = []

    def on_step(job: Job, iteration: int, value: float) -> None:
        told.append((job.seed, iteration))
        if job.seed == 0:
            job.stop()

    runs.run(
        array, schedule, STEPS, queue=True, refill=lambda job: next(supply, None), on_step=on_step
    )
    assert machine.races == []
    # read an iteration late: it was the next one that could still be stopped
    assert [t for s, t in told if s == 0] == [0, 1]
    assert {s for s, _ in told} == {0, 1, 2, 5, 6}


def test_waiting_jobs_take_no_place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is put on its devices when it gets a seat, and off them when another one has it."""
    where: dict[tuple[int, int], list[str]] = defaultdict(list)
    original = stages.move, stages.take_off

    def move(stage: JobStage, device: torch.device) -> None:
        where[stage.job, stage.index].append("on")
        original[0](stage, device)

    def take_off(stage: JobStage) -> None:
        where[stage.job, stage.index].append("off")
        original[1](stage)

    for module in (stages, inline, training_run):
        monkeypatch.setattr(module, "take_off", take_off)
    for module in (stages, inline):
        monkeypatch.setattr(module, "move", move)
    array = trainer([Job(0, 8, adamw), Job(1, 11, sgd), Job(2, 8, adamw, precision="bf16")])
    supply = iter([Job(7, 8, adamw)])
    there: list[int] = []  # jobs on the GPU when another one is asked for

    def refill(job: Job) -> Job | None:
        there.extend(j for j, s in where if s == 0 and where[j, s][-1] == "on")
        return next(supply, None)

    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    schedule = random_schedule([1, 1], 3, seed=1)
    result = runs.run(array, schedule, STEPS, queue=True, refill=refill)
    assert machine.races == []
    assert 1 not in there
    assert len(emptied) == 2  # before the blocks, and when the first forward of a new job is over
    for stage in range(3):
        # at the end all are brought to the host, wherever they are
        assert where[0, stage] == where[1, stage] == ["on", "off", "off"]
        # a rehearsal first
        assert where[2, stage] == where[3, stage] == ["on", "off", "on", "off", "off"]
    for j in range(4):
        assert differences(result.trained[j], array.train_alone(j, STEPS)) == []


def test_what_leaves_a_gpu_waits_for_its_own_lanes(machine: Machine) -> None:
    """Other lanes go on; one more stream a device serves all who leave."""
    three = cuda_streams.Lanes(ONE)
    for stream in three.streams:
        stream.launch()  # type: ignore[attr-defined]
    count = len(machine.streams)
    for lane in (1, 1, 2):
        with three.aside({lane}):
            heard = [s.index in machine.current.clock for s in three.streams]  # type: ignore[attr-defined]
            assert heard[lane]
            assert not heard[0]
    assert len(machine.streams) == count + 1


def test_checkpoints(machine: Machine, tmp_path: Any) -> None:
    """A stage is copied on its own stream, after its update."""
    run(trainer(jobs()), checkpoint=tmp_path, checkpoint_every=1)
    assert machine.races == []


def test_a_copy_has_the_strides_of_the_tensor() -> None:
    """And its alignment: kernels are chosen by both, and dropout draws by them."""
    whole = torch.arange(24.0 * 8 * 4).reshape(24, 8, 4)
    mean = torch.ones((), requires_grad=True)
    for t in (
        whole[:, 0], whole[:, 3:5], whole.chunk(2, dim=1)[1], whole.transpose(0, 2), whole[1, 2, 3],
        torch.ones(1).expand(24, 8), torch.ones(24, 1).expand(24, 8), mean.expand(0, 3),
        torch.arange(9.0).unfold(0, 3, 3), whole.to(torch.bfloat16)[:, 1:],
    ):  # fmt: skip
        found = cuda_streams._copied(t, GPU, None)
        assert torch.equal(found, t) and found.stride() == t.stride()
        at = found.storage_offset() * found.element_size()
        assert t.numel() == 0 or at % 64 == t.data_ptr() % 64  # where memory of a CPU begins
        assert t.numel() == 0 or found.data_ptr() != t.data_ptr()
    overlapping = torch.arange(9.0).unfold(0, 3, 1)
    assert torch.equal(cuda_streams._copied(overlapping, GPU, None), overlapping)


def test_several_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies between GPUs run on streams of their own, ordered with the blocks on either side."""
    array = trainer(jobs(), TWO)
    result = run(array)
    assert machine.races == []
    assert len(machine.streams) > 4
    assert verify(result.trace) == []
    for j in range(len(array.jobs)):
        assert differences(result.trained[j], array.train_alone(j, STEPS)) == []


def test_a_long_run_remembers_its_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of streams stay with their blocks when others are forgotten, also those in flight."""
    monkeypatch.setattr(inline, "MOST", 40)
    array = trainer(jobs(), TWO)
    result = run(array, steps=8)
    assert machine.races == []
    trace, blocks = result.trace, result.replay.n_operations
    assert verify(trace) == []
    assert trace.provenance["blocks_left_out"] == result.report.left_out > blocks >= 20
    assert trace.n_operations == blocks
    assert trace.duration[:blocks].min() > 0  # of the streams: every block has been read
    for j in range(len(array.jobs)):
        assert differences(result.trained[j], array.train_alone(j, 8)) == []


def test_slots(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block runs before its state is there, no slot is overwritten before its block is over."""
    result = slotted()
    assert machine.races == []
    # what blocks wait for is not their time: simulated kernels take 1 us, and blocks few of them
    report = result.report
    assert report.exposed_ns > 0
    assert sum(d.exposed_ns for d in report.devices) == report.exposed_ns
    assert verify(result.trace) == []


def without_waiting(posted: cuda_streams.Posted, lane: int, stream: Stream) -> Any:
    """A broken `lanes._taken`."""
    return posted.parcel


def test_a_missing_wait_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model would have reported a block that does not wait for its input."""
    monkeypatch.setattr(cuda_streams, "_taken", without_waiting)
    run(trainer(jobs()))
    assert any("reads what is still written" in race for race in machine.races)


def test_a_missing_beginning_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """... blocks that do not wait for the weights."""
    monkeypatch.setattr(cuda_streams.Lanes, "follow", lambda self: None)
    monkeypatch.setattr(cuda_streams, "GpuClock", lambda device: None)
    monkeypatch.setattr(cuda_streams.Lanes, "finish", lambda self, records: records)
    array = trainer([Job(2, 8, adamw, precision="bf16")])
    schedule = random_schedule([1], 3)
    runs.run(array, schedule, 1)
    assert any(race.endswith("by stream 0") for race in machine.races)


def test_memory_given_back_too_early_is_found(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... a tensor of another stream that is not recorded."""
    monkeypatch.setattr(Tensor, "record_stream", lambda t, stream: None)
    run(trainer(jobs()))
    assert any("gets back memory" in race for race in machine.races)


@pytest.mark.parametrize("broken", ["wait", "copy"])
def test_copies_out_of_turn_are_found(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """... blocks that do not wait for copies, copies that do not wait for blocks."""
    original = cuda_engine.CudaEngine.copy
    mutants: dict[str, Any] = {
        "wait": lambda self, events: None,
        "copy": lambda self, direction, size, action, after, state: original(
            self, direction, size, action, (), state
        ),
    }
    monkeypatch.setattr(cuda_engine.CudaEngine, broken, mutants[broken])
    slotted()
    assert machine.races


def test_the_host_does_not_wait_for_every_block(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are read late and data are waited for on the device."""
    array = trainer([Job(j, 8, sgd) for j in range(3)])
    schedule = random_schedule([1] * 3, 3, seed=3)
    monkeypatch.setattr(cuda_streams, "AHEAD", 10**6)
    runs.run(array, schedule, 2)
    few = machine.waits
    machine.waits = 0
    runs.run(array, schedule, 12)
    steps, jobs_of = 10, 3
    # of an iteration: its loss, long there, and read on the host; at the end the times of blocks
    blocks = 2 * jobs_of * 3
    assert machine.waits - few <= steps * (2 * jobs_of + blocks)


class Fragile(nn.Module):
    """Fails when it has been called often enough, with something large at hand."""

    held: weakref.ref[Tensor] | None = None

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def forward(self, x: Tensor) -> Tensor:
        """As it is."""
        self.left -= 1
        if self.left < 0:
            large = x.repeat(100, 1)
            Fragile.held = weakref.ref(large)
            raise RuntimeError("broken")
        return x


def test_a_failed_job_keeps_no_memory_and_harms_nobody(machine: Machine) -> None:
    """What its block had made is given back while the others go on; they end as without it."""

    def fragile(calls: int = 10**6) -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), Fragile(calls), nn.Linear(6, 4))

    given_back = []

    def on_step(job: Job, iteration: int, value: float) -> None:
        if array.jobs[0].status == "failed":
            given_back.append(Fragile.held is not None and Fragile.held() is None)

    broken = Job(0, 8, adamw, model={"calls": 2})
    array = trainer([broken, Job(1, 8, sgd)], build_model=fragile, stages=[1, 2])
    result = runs.run(array, random_schedule([1, 1], 3, seed=4), STEPS, on_step=on_step)
    assert machine.races == []
    assert given_back
    assert all(given_back)
    assert broken.error is not None
    assert "broken" in str(broken.error)
    assert differences(result.trained[1], array.train_alone(1, STEPS)) == []


def test_what_a_stage_has_goes_along() -> None:
    """Optimizer states made before a move are where the weights are; counters stay on the host."""
    job = Job(0, 8, lambda named: torch.optim.Adagrad(named, lr=0.1))
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    plain, empty = stages.fresh_stages(model, (("0", "1"), ("2",)), job, 0, "a")
    own = [p for _, p in plain.parameters]
    for stage in (plain, empty):
        stages.move(stage, torch.device("meta"))
        assert stage.device == torch.device("meta")  # also without any tensor
    assert plain.optimizer is not None
    for p in own:
        state = plain.optimizer.state[p]
        assert state["sum"].is_meta
        assert not state["step"].is_meta
    assert all(buffer.is_meta for buffer in plain.buffers())


def test_a_stage_that_is_away_visits_its_place() -> None:
    """For a rehearsal only; afterwards it is on the host again, with the same bits."""
    job = Job(0, 8, adamw)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    before = [p.detach().clone() for p in model.parameters()]
    (stage,) = stages.fresh_stages(model, (("0", "1"),), job, 0, "a", [GPU], away=True)
    assert stage.away
    with stages.in_place(stage):
        assert not stage.away
    stage.away = True
    stages.move(stage, GPU)
    assert not stage.away
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_profile_knows_what_launching_takes(machine: Machine) -> None:
    """Simulated kernels take no time: every block is bound by its launch, and the table says so."""
    profile = trainer(jobs()).profile()
    assert machine.races == []
    n = len([*profile.cases()])
    assert f"{n} of {n} blocks take no longer on the GPU" in str(profile)


def test_the_first_error_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is lost raises again when the run ends, and knows less of what happened."""

    def lost(*_: Any) -> None:
        raise RuntimeError("unspecified launch failure")

    def build(calls: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), Fragile(calls), nn.Linear(6, 4))

    array = trainer([Job(0, 8, adamw, model={"calls": 2})], build_model=build, stages=[1, 2])
    monkeypatch.setattr(cuda_streams.Lanes, "synchronize", lost)
    with pytest.raises(JobFailed, match="stage 1, iteration 2: RuntimeError: broken"):
        run(array)
