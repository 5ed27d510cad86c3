"""The process backend on gloo processes: exact, never hanging, clear when peers go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from branching_models import KINDS
from hypothesis import given
from hypothesis import strategies as st
from runs import run
from torch.optim.lr_scheduler import LambdaLR
from typer.testing import CliRunner

from optsched import InputError, OptschedError, Schedule, verify
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.distributed import backend as process
from optsched.arraypipe.distributed import wire
from optsched.arraypipe.distributed.mailbox import Capacity
from optsched.arraypipe.distributed.protocol import SIZE, ProtocolError
from optsched.arraypipe.distributed.ranks import Reading, on_first_clock
from optsched.arraypipe.distributed.wire import ALIGNMENT, Inbox, Outbox, capacity, layouts, words
from optsched.arraypipe.plan.plan import compile, routes
from optsched.arraypipe.plan.segments import Segment
from optsched.arraypipe.plan.types import Copied
from optsched.arraypipe.runtime.stages import fresh_stages
from optsched.arraypipe.runtime.state import JobRun
from optsched.arraypipe.training_run import ArrayRun, _settings
from optsched.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)

SCRIPT = Path(__file__).with_name("process_cases.py")
TROUBLES: dict[str, list[str]] = {
    "dies": ["PeerLost", "rank 1 is lost", "device 0: in cycle 2 before", "device 1: no word"],
    "sleeps": ["Stalled", "no message from rank 1", "waits for the", "device 1: in cycle 2"],
    "lies": ["ProtocolError", "from device1: expected", "iteration 2", "iteration 9"],
}
SOME: tuple[Any, ...] = (
    (2, "several", {"exact": [0, 2], "replanned": [0, 2], "stopped": [], "failed": [],
                    "queued": [], "interrupted": [], "longer": [], "refused": [], "uneven": [],
                    "first_forwards": [], "unlike": [], "nothing_left": [], "caught": [],
                    "one_rank_cannot": [], "concluded": [], "used_up": [],
                    "late": [], "devices": [], "carried": [], "outputs": [],
                    "branching": [["depth"], 0, 20], "unfrozen_later": [],
                    "streamed": ["exact", 20, 22], "summed": [0, 2]}),
    (4, "several", {"exact": [100, 102], "replanned": [100, 102], "stopped": [],
                    "streamed": ["replanned", 120, 122], "summed": [100, 102]}),
    *((2, "ends_badly", how) for how in TROUBLES),
    (2, "absent"),
    (2, "killed"),
    (4, "resumed"),
)  # fmt: skip


def ask(folder: Path, groups: Sequence[Any], seconds: float, script: Path = SCRIPT) -> list[Any]:
    """Run groups of processes one after the other; what their ranks 0 say."""
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(groups)],
        capture_output=True, text=True, timeout=seconds, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{k}.json").read_text()) for k in range(len(groups))]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """All that the quick tests look at, by ranks and case: torch is loaded once."""
    folder = tmp_path_factory.mktemp("groups")
    found = ask(folder, SOME, 900)
    rows: dict[Any, Any] = {"folder": folder}
    for (ranks, name, *rest), answer in zip(SOME, found, strict=True):
        if name == "several":
            rows |= {(ranks, case): row for case, row in answer.items()}
        else:
            rows[rest[0] if rest else name] = answer
    return rows


def test_gradients_decided_in_every_batch(answers: dict[Any, Any]) -> None:
    """Stochastic depth across ranks: no bit differs; a callback reaches the stages of its rank."""
    assert answers[2, "branching"] == []
    assert "job job0, stage 0, which another rank trains" in answers[2, "unfrozen_later"]


def test_outputs_keep_their_type(answers: dict[Any, Any]) -> None:
    """The last rank's loss gets what the model returns, not a plain dict."""
    assert answers[2, "outputs"] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_bit_identical_to_training_alone(answers: dict[Any, Any], ranks: int) -> None:
    """Random plans, windows 1 and 2: parameters, buffers, moments and losses; traces verify."""
    assert answers[ranks, "exact"] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_summed_gradients_have_the_bits_of_inline(answers: dict[Any, Any], ranks: int) -> None:
    """``tied="sum"``, clipping, plateaus and stops: both backends agree."""
    assert answers[ranks, "summed"] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_links_of_gpus(answers: dict[Any, Any], ranks: int) -> None:
    """Credits, headers and tensors apart, a thread and a stream per channel end, late kernels."""
    assert answers[ranks, "streamed"] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_plans_change_on_the_way(answers: dict[Any, Any], ranks: int) -> None:
    """Announced in headers, at the same iteration everywhere, without a differing bit."""
    assert answers[ranks, "replanned"] == []


def test_states_of_ended_jobs_leave_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are on this rank, of jobs that lost their seat; on a CPU and in slots none."""
    off: list[str] = []
    monkeypatch.setattr(process, "take_off", lambda stage: off.append(stage.name))
    runs = [
        SimpleNamespace(
            stages=[SimpleNamespace(name=f"{j}{s}", away=False) for s in "ab"], over=j != 2
        )
        for j in range(10)
    ]
    for kind, moves in (("cpu", False), ("cuda", True), ("cuda", False)):
        backend: Any = process.ProcessBackend.__new__(process.ProcessBackend)
        backend.links = SimpleNamespace(device=torch.device(kind))
        backend.worker = SimpleNamespace(memory=SimpleNamespace(moves=moves))
        backend.runs, backend.device, backend.homes = runs, 1, dict.fromkeys(range(4), (0, 1))
        assert off == []
        for job in (0, 2, 9):
            backend.unseat(job)
    assert off == ["0b"]


def test_a_gpu_gets_the_stages_of_its_own_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are built on the host; of them a rank brings in its stages, unless slots do."""
    made: Any = SimpleNamespace(
        plan=SimpleNamespace(n_jobs=2), trainer=SimpleNamespace(memory=None), ranks=object(),
        _begun=[0, 0], _make=lambda j, at, seat, away: away,
    )  # fmt: skip
    assert ArrayRun._made(made) == [True, True]
    moved: list[Any] = []
    monkeypatch.setattr(process, "places", lambda plan, seat: (0, 1, 0))
    monkeypatch.setattr(process, "drop", lambda stage: moved.append(("dropped", stage.index)))
    monkeypatch.setattr(process, "move", lambda stage, to: moved.append((to, stage.index)))
    for moves, here in (
        (False, [("gpu", 0), ("dropped", 1), ("gpu", 2)]),
        (True, [("dropped", 1)]),
    ):
        stages = [SimpleNamespace(index=s, away=True, device="gpu") for s in range(3)]
        backend: Any = process.ProcessBackend.__new__(process.ProcessBackend)
        backend.worker = SimpleNamespace(memory=SimpleNamespace(moves=moves))
        backend.runs, backend.device, backend.homes = [SimpleNamespace(stages=stages)], 0, {}
        backend._seat(SimpleNamespace(seats=(0,), plan=None))
        assert moved == here
        moved.clear()


CANNOT = {
    "optimizer": "InputError: rank 1: job job1: the optimizer cannot be made",
    "build_model": "PeerLost: rank 1: RuntimeError: no such weights here",
    "exit": "PeerLost: rank 1: SystemExit: no such luck",
    "data": "PeerLost: rank 1: OSError: no such file here",
    "batch": "JobFailed: job job0, stage 0, iteration 0: OSError: no such batch here (rank 1)",
    "jobs": "InputError: rank 1: the schedule has 2 jobs, the trainer 1",
    "window": "InputError: rank 1: window: ",
    "timeout": "InputError: rank 1: timeout: ",
    "schedule": "InputError: rank 1: backend: the schedule has 4 devices, there are 2 processes",
}


@pytest.mark.parametrize("what", list(CANNOT))
def test_one_rank_that_cannot_begin_is_named(answers: dict[Any, Any], what: str) -> None:
    """All ranks end soon, with a sentence of the rank and its error, and can run again."""
    found = answers[2, "one_rank_cannot"]
    (first, soon), (second, _) = found[what]
    assert soon
    assert first.startswith(CANNOT[what]), first
    assert CANNOT[what].rpartition("rank 1: ")[2] in second, second
    assert found["differences"] == []


def test_the_first_rank_cannot_measure(answers: dict[Any, Any]) -> None:
    """The others do not wait for its schedule."""
    (first, _), (second, soon) = answers[2, "one_rank_cannot"]["measured"]
    assert soon
    assert first == "OSError: no such clock here"
    assert second == "PeerLost: rank 0: OSError: no such clock here"


@pytest.mark.parametrize("what", ["checkpoint", "worker", "state", "taking", "records", "pickle"])
def test_an_error_after_the_last_block_is_said_on_all_ranks(
    answers: dict[Any, Any], what: str
) -> None:
    """With the rank and its sentence, not with what gloo says of a lost connection."""
    found = answers[2, "concluded"]
    failing = what != "taking"
    own, other = found[what][failing], found[what][not failing]
    assert own.endswith("Error: no space left") or "AttributeError: Can't pickle" in own
    assert other == f"PeerLost: rank {int(failing)}: {own}"
    assert found["differences"] == []


def test_a_rank_that_never_comes(answers: dict[Any, Any]) -> None:
    """What a script raises before it calls us cannot be told: the timeout is said in a sentence."""
    said = answers["absent"]
    assert "not all of the 2 ranks have come to this run within 0.5 s" in said


@pytest.mark.parametrize("ranks", [2, 4])
def test_early_stop(answers: dict[Any, Any], ranks: int) -> None:
    """A job ends with the iteration that was decided on; tombstones last until the next swap."""
    found = answers[ranks, "stopped"]
    assert found["differences"] == []
    assert found["status"] == ["stopped"] * 3
    assert found["told"]  # every loss once, in one process
    whole = 3 * 8 + 5 * 16 + 10 * 8
    assert whole <= found["blocks"] < whole + 400  # of 12,800


def test_trace_and_waits_of_ranks(answers: dict[Any, Any]) -> None:
    """Blocks alone, in an order that the clocks allow; waits at receives are in the report."""
    found = answers[2, "carried"]
    trace = Schedule.read(answers["folder"] / "carried-0.schedule.json")
    assert verify(trace) == []
    assert trace.start is not None
    end, apart = trace.start + trace.duration, trace.provenance["clock_uncertainty_ns"]
    assert (trace.start[trace.arcs.head] >= end[trace.arcs.tail] - apart).all()
    assert min(found["waited"]) > 0
    # another rank knows its own blocks only
    own = Schedule.read(answers["folder"] / "carried-1.schedule.json")
    assert 0 < own.n_operations < trace.n_operations
    assert set(own.kind.tolist()) == {"F", "B", "U"}


def test_pages_and_perfetto_show_traces(answers: dict[Any, Any], tmp_path: Path) -> None:
    """The trace of a run on two ranks is verified, shown, drawn, and run again."""
    path = answers["folder"] / "carried-0.schedule.json"
    trace = Schedule.read(path)
    out = tmp_path / "run.trace.json"
    for command in (
        ["verify", str(path)], ["show", str(path)], ["trace", str(path), "-o", str(out)],
        ["plot", str(path), "--html", str(tmp_path / "run.html")],
    ):  # fmt: skip
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    events = json.loads(out.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values()) == [resource.name for resource in trace.resources]
    drawn = [e for e in events if e["tid"] in rows and e["ph"] == "X" and e["cat"] != "setup"]
    assert len(drawn) == trace.n_operations
    assert compile(trace).devices == ("device0", "device1")


def test_a_job_that_fails_leaves_the_others_alone(answers: dict[Any, Any]) -> None:
    """A NaN and an exception end their jobs, rank 0 knows why, the third is bit-identical."""
    found = answers[2, "failed"]
    assert found["differences"] == []
    assert found["status"] == ["failed", "failed", "done"]
    assert "job job0, stage 3, iteration 2: the loss is nan" in found["errors"][0]
    assert "iteration 3: IndexError" in found["errors"][1]


def test_a_first_forward_that_fails_on_one_rank_ends_its_job_alone(answers: dict[Any, Any]) -> None:
    """Whether the job is in the plan or joins: all ranks know it as failed, others are exact."""
    said = answers[2, "first_forwards"]
    status = ["done", "failed", "failed", "failed", "done"]
    assert said == {"differences": [], "status": status}


def test_a_job_whose_data_end_at_its_checkpoint_fails_alone(answers: dict[Any, Any]) -> None:
    """The error has its iteration, the other job goes on from its own checkpoint."""
    sentence = "job job1, stage 0, iteration 2: data: job job1 has no batch for iteration 2"
    said = {"differences": [], "status": ["done", "failed"], "error": sentence}
    assert answers[2, "used_up"] == said


def test_jobs_of_other_shapes_are_refused_alike(answers: dict[Any, Any]) -> None:
    """The same sentence on all ranks; a job that joins with other shapes fails alone."""
    said = answers[2, "unlike"]
    assert "job j1: '0.weight'" in said["said"][0] and len(set(said["said"])) == 1
    assert said["titles"] == ["j0", "j1", "j3"] and said["differences"] == []


def test_losses_read_late_are_told_with_their_iteration(answers: dict[Any, Any]) -> None:
    """As GPUs read them: each once, the last one too; a stop takes effect one iteration later."""
    assert answers[2, "late"] == {"differences": [], "told": True}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_gpus_that_are_not_there_are_refused(answers: dict[Any, Any]) -> None:
    """The CPU does not take their place unasked."""
    (sentence,) = answers[2, "devices"]
    assert sentence.startswith("devices: every process needs a GPU of its own; rank 0 sees 0")


def test_nothing_is_left_of_a_run(answers: dict[Any, Any]) -> None:
    """No model waits for the collector of cycles, and no process group stays, refused or not."""
    assert answers[2, "nothing_left"] == [0, 0]


def test_an_error_on_one_rank_reaches_all_at_once(answers: dict[Any, Any]) -> None:
    """Not after the timeout; and the same process group serves another run, which is exact."""
    said = answers[2, "caught"]
    assert said["said"].startswith("device 1: JobFailed: job job1, stage 3, iteration 2")
    assert said["at_once"] and said["differences"] == []


def test_waiting_jobs_take_free_seats(answers: dict[Any, Any]) -> None:
    """Seven jobs on two seats, decided by rank 0, known to all."""
    found = answers[2, "queued"]
    assert found["differences"] == []
    assert found["status"] == ["done", "stopped", "done", "done", "done", "done", "done"]


def test_interrupt(answers: dict[Any, Any]) -> None:
    """After Ctrl-C all jobs end with a whole iteration, and the run returns what they have."""
    found = answers[2, "interrupted"]
    assert found["differences"] == []
    assert all(6 <= n < 50 for n in found["steps"])


def test_messages_longer_than_expected(answers: dict[Any, Any]) -> None:
    """Batches that grow: the rest of a message comes as one of its own."""
    assert answers[2, "longer"] == []


def test_a_rank_without_work_waits_as_long_as_others_get_on(answers: dict[Any, Any]) -> None:
    """Jobs that leave a device idle for longer than the timeout end as alone."""
    assert answers[2, "uneven"] == []


def test_refused_before_anything_is_trained(answers: dict[Any, Any]) -> None:
    """Ranks and devices differ, settings out of range, checkpoints on one rank only."""
    found = answers[2, "refused"]
    words = ["has 4 devices, there are 2 processes", "window", "timeout"]
    words += ["checkpoint: differs between ranks", "did you mean checkpoint_every?"]
    words.append("job job0: optimizer lr of 0.weight: differs between ranks, '0.1' on rank 0 and")
    missing = [row for row in zip(words, found, strict=True) if row[0] not in row[1]]
    assert not missing


def test_what_ranks_compare_is_the_same_in_every_process() -> None:
    """Objects in settings are not compared by where they lie; each group is told once."""

    class Halves:
        def __init__(self) -> None:
            self.inner = object()

        def __call__(self, epoch: int) -> float:
            return 0.5**epoch

    def described() -> dict[str, str]:
        job = Job(0, 8, torch.optim.SGD, scheduler=lambda o: LambdaLR(o, Halves()))
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        devices = [torch.device("cpu")] * 2
        stages = fresh_stages(model, (("0",), ("1",)), job, 0, "job0", devices)
        return _settings(JobRun(job, 0, "job0", model, stages, 0, 1, None))

    one, other = described(), described()
    assert one == other and not any(" at 0x" in text for text in one.values())
    assert sum("optimizer lr" in key for key in one) == 1


def test_without_a_process_group() -> None:
    """The sentence says how to start one."""
    from process_cases import Row, trainer

    with pytest.raises(InputError, match="torchrun"):
        run(trainer([Row(0)]), random_schedule([1], 4), 1, backend="process")


@pytest.mark.parametrize("how", list(TROUBLES))
def test_peers_that_go_wrong(answers: dict[Any, Any], how: str) -> None:
    """The error names the peer, where every device is, and the message that is missing."""
    assert [word for word in TROUBLES[how] if word not in answers[how]] == [], answers[how]


def test_killed_and_resumed(answers: dict[Any, Any]) -> None:
    """Rank 1 of 2 is killed; 4 ranks go on from the last whole checkpoints, bit by bit."""
    assert "rank 1 is lost" in answers["killed"]
    assert answers["resumed"]["differences"] == []
    assert [2 <= n <= 5 for n in answers["resumed"]["steps"]] == [True, True]


@pytest.mark.slow
def test_all_kinds_of_branches(tmp_path: Path) -> None:
    """Experts, changes in place, unfrozen layers, pairs, tied weights over 20 seeds and 2 ranks."""
    kinds = [kind for kind in KINDS if kind != "depth"]
    assert ask(tmp_path, [(2, "branching", kinds, 0, 20)], 900) == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_hundred_plans(tmp_path: Path, ranks: int) -> None:
    """100 random plans on 2 and on 4 processes, windows 1 and 2; swaps; the links of GPUs."""
    cases = {"exact": [1000, 1100], "replanned": [1000, 1010], "streamed": ["exact", 1100, 1125]}
    wanted = {name: [] for name in cases}
    assert ask(tmp_path, [(ranks, "several", cases)], 1800) == [wanted]


# tensors on the wire


@st.composite
def odd_tensors(draw: st.DrawFn) -> Any:
    """A tensor that may be sliced, transposed, expanded, empty, or of any dtype; or None."""
    if draw(st.integers(0, 9)) == 0:
        return None
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    ))  # fmt: skip
    t = torch.randn([n + 1 for n in shape]).mul(9).to(dtype)
    for dim in range(len(shape)):
        how = draw(st.sampled_from(["whole", "slice", "second", "expand"]))
        if how == "slice":
            t = t.narrow(dim, draw(st.integers(0, 1)), t.shape[dim] - 1)
        elif how == "second":
            t = t[(slice(None),) * dim + (slice(None, None, 2),)]
        elif how == "expand":
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
            t = t.expand([3 if k == dim and n == 1 else n for k, n in enumerate(t.shape)])
    return t.permute(draw(st.permutations(range(t.dim()))))


def test_alignment_is_that_of_the_device() -> None:
    """A GPU allocates at multiples of 256 bytes, a host at multiples of 64."""
    place = 3 * 256 + 192
    for is_cuda, shift in ((True, 192), (False, 0)):
        tensor: Any = SimpleNamespace(data_ptr=lambda: place, is_cuda=is_cuda)
        assert wire._shift(tensor) == shift


@given(st.lists(odd_tensors(), max_size=4), st.integers(0, 3), st.lists(st.integers(0, 999)))
def test_tensors_survive_the_wire(tensors: list[Any], more: int, absent: list[int]) -> None:
    """Values, shapes, strides, dtypes and the place within 64 bytes; a longer buffer does."""
    outbox, inbox = Outbox(), Inbox()
    for _ in range(2):  # the second time the layout is known
        payload = outbox.pack(tensors, absent)
        size = outbox.buffer.numel()
        assert size == SIZE + payload <= capacity(tensors) + ALIGNMENT + 4 * len(absent)
        rows = layouts(tensors, len(absent))
        for row, t in zip(rows, tensors, strict=True):  # behind where a host or a GPU allocates
            assert row is None or row.place % 256 == t.data_ptr() % 64
        buffer = torch.full((size + more * ALIGNMENT,), 77, dtype=torch.uint8)
        buffer[:size] = outbox.buffer
        found, places = inbox.unpack(words(buffer), buffer)
        assert list(places) == absent
        assert len(found) == len(tensors)
        for t, u in zip(tensors, found, strict=True):
            if t is None:
                assert u is None
                continue
            assert t.dtype == u.dtype
            assert t.shape == u.shape
            assert torch.equal(t, u)
            assert t.stride() == u.stride()
            if t.numel():
                assert t.data_ptr() % 64 == u.data_ptr() % 64  # as CPUs allocate


def test_nothing_is_copied_on_receipt() -> None:
    """Dense tensors are views of the buffer that was posted."""
    outbox, inbox = Outbox(), Inbox()
    outbox.pack([torch.randn(3, 5), torch.randn(4, 2).t()])
    buffer = outbox.buffer.clone()
    for t in inbox.unpack(words(buffer), buffer)[0]:
        assert t.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@given(st.binary(min_size=8, max_size=120))
def test_hostile_tables_are_refused(data: bytes) -> None:
    """Garbage behind the header is refused in a sentence, or describes tensors inside the bytes."""
    size = -(-(SIZE + len(data)) // ALIGNMENT) * ALIGNMENT
    buffer = torch.zeros(size, dtype=torch.uint8)
    buffer[SIZE : SIZE + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        found, _ = Inbox().unpack(words(buffer), buffer)
    except ProtocolError:
        return
    assert all(t is None or t.numel() <= size for t in found)


def test_what_cannot_be_sent() -> None:
    """Sparse tensors have no strides."""
    with pytest.raises(OptschedError, match="cannot be sent"):
        Outbox().pack([torch.eye(3).to_sparse()])


# clocks


@given(st.integers(-(10**12), 10**12), st.integers(-1000, 1000), st.integers(0, 10**9))
def test_times_are_those_of_the_first_rank(offset: int, drift: int, t: int) -> None:
    """Offsets drift evenly between the readings; one within its error is none."""
    from optsched.arraypipe.plan.types import Record

    record = Record(0, 1, 2, 3, t, t + 5)
    before, after = Reading(0, offset, 10), Reading(10**9, offset + drift, 10)
    (found,) = on_first_clock([record], before, after)
    if abs(offset) <= 10 and abs(offset + drift) <= 10:
        assert found == record
    else:
        assert abs(found.start_ns - (t + offset + drift * t / 10**9)) <= 1
        assert found.end_ns >= found.start_ns


def test_copies_on_the_clock_of_the_first_rank() -> None:
    """Both ends are moved, nothing else."""
    rows, reading = [Copied(1, "out", 0, 0, -900, -800, 8)], Reading(0, 1000, 10)
    assert on_first_clock(rows, reading, reading) == [Copied(1, "out", 0, 0, 100, 200, 8)]


@pytest.mark.parametrize(
    ("size", "window", "expected"),
    [(1000, 2, 16), (1000, 20, 20), (1 << 16, 2, 4), (1 << 17, 2, 2), (1 << 20, 3, 3)],
)
def test_more_small_messages_are_posted_at_once(size: int, window: int, expected: int) -> None:
    """Together up to 256 KiB and 16 blocks, never fewer than the window; of own channels only."""
    plan = compile(random_schedule([1, 1], 2))
    segment = Segment(plan, routes(plan), (0, 1), [0, 0], [3, 3])
    found = Capacity(window)
    found.take([[[job, stage, size] for job in range(2) for stage in range(2)], []])
    found._known = {0, 1}  # as after a first forward
    for device in range(2):
        own = [channel.target == device for channel in segment.routes.channels]
        assert any(own)
        windows = found.windows(segment, device)
        assert windows == [expected if mine else window for mine in own]
    assert found.held(segment, 0, range(2)) == (window * size, 2 * size)
