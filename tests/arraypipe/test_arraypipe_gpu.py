"""The checks of `benchmarks/executor/gpu_check.py`.

Here they run at small sizes, on the CPU and on simulated GPUs, and as tests where a GPU is.
"""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import runs
import torch
from streams_model import Machine, streams

from optsched.arraypipe.job import Job
from optsched.arraypipe.memory import slots
from optsched.arraypipe.profile import measure
from optsched.arraypipe.runtime import cuda_streams
from optsched.arraypipe.runtime.blocks import norms_from, total_norm
from optsched.arraypipe.runtime.cuda_streams import Late, page_locked_like
from optsched.arraypipe.runtime.stages import fresh_stages
from optsched.arraypipe.runtime.state import JobRun
from optsched.arraypipe.runtime.types import Norms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
GPU = torch.device("cpu", 0)  # as `streams_model` has it


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module; flags of torch are put back."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    matmul, cudnn, new = torch.backends.cuda.matmul, torch.backends.cudnn, torch.utils.deterministic
    kept = (
        torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.deterministic,
        matmul.allow_tf32, cudnn.allow_tf32, new.fill_uninitialized_memory, torch.get_num_threads(),
    )  # fmt: skip
    from benchmarks.executor import gpu_check

    yield gpu_check
    torch.use_deterministic_algorithms(kept[0])
    cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32, cudnn.allow_tf32 = kept[1:5]
    new.fill_uninitialized_memory = kept[5]
    torch.set_num_threads(kept[6])
    for name in [name for name in sys.modules if name.startswith("benchmarks.executor.gpu_")]:
        del sys.modules[name]


def give(check: Any, monkeypatch: pytest.MonkeyPatch, *rows: Any) -> None:
    """Let the part ``exact`` consist of these checks: names, and what they are."""
    monkeypatch.setitem(check.PARTS, "exact", lambda sizes: rows)


@pytest.mark.slow
def test_the_script_itself(check: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a CPU: every row is there, and nothing that does not depend on a GPU fails."""
    file = tmp_path / "rows.json"
    assert check.main(["--cpu", "--json", str(file)]) == 0, capsys.readouterr().out
    told = json.loads(file.read_text())
    assert {"date", "host", "commit", "CUDA", "flags"} <= told["head"].keys()
    assert told["running"] == ""
    names = {(row["part"], row["name"].partition(", ")[0]) for row in told["rows"]}
    exact = (
        "dropout", "micro-batches", "recompute", "clipping", "bf16", "ReduceLROnPlateau", "fused",
        "new memory filled", "boundary with gaps", "batches page-locked", "batches on the GPU",
        "GPT", "slots", "early stop", "checkpoints", "queue", "out of memory", "default flags",
        "no wait for inputs", "no wait for states",
    )  # fmt: skip
    assert names == {("exact", f"exact: {name}") for name in exact} | {
        ("ranks", "exact: 2 ranks over gloo"),
        *(("memory", name) for name in (
            "peak memory", "copies of the engine", "states that take turns",
            "slots against resident", "copies hidden",
        )),
        *(("speed", name) for name in (
            "switch of a resident job", "gap on the device between blocks",
            "period", "array", "one after the other", "1F1B one at a time", "clipping",
            "array against one after the other", "array against 1F1B one at a time",
            "batches of the host",
        )),
    }  # fmt: skip
    full = [row["name"] for row in told["rows"]]
    for bits in ("fp32", "TF32", "bf16"):
        rows = {f"exact: GPT, {bits}", f"exact: GPT, {bits}, recompute"}
        assert rows < {name for name in full if name in rows or "slots" in name}
        assert sum(name.startswith(f"exact: GPT, {bits}, recompute, slots") for name in full) == 1
    assert sum(name.startswith("exact: out of memory") for name in full) == 2
    assert sum(name.startswith("exact: slots") for name in full) >= 2
    assert sum(name.startswith("exact: 2 ranks") for name in full) == 5


def test_a_difference_fails(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script would have noticed one wrong bit."""
    from benchmarks.executor import gpu_exact

    original = gpu_exact.alone

    def wrong(*given: Any) -> Any:
        references = original(*given)
        first = next(iter(references[0].parameters.values()))
        first.view(-1)[0] += 1
        return references

    first = gpu_exact.exactness(check.small(torch.device("cpu")))[0]
    give(check, monkeypatch, first)
    assert check.main(["--cpu", "--part", "exact"]) == 0
    monkeypatch.setattr(gpu_exact, "alone", wrong)
    assert check.main(["--cpu", "--part", "exact"]) == 1


def test_a_check_that_raises_fails_alone(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its rows so far count, its sentence is a row, the next check runs."""
    file = tmp_path / "rows.json"

    def bad() -> Iterator[Any]:
        yield check.Row("before", "1")
        raise ValueError("went wrong\nin detail")

    give(check, monkeypatch, ("bad", bad), ("good", lambda: [check.Row("behind", "2")]))
    assert check.main(["--cpu", "--part", "exact", "--json", str(file)]) == 1
    told = [
        (row["name"], row["value"], row["holds"]) for row in json.loads(file.read_text())["rows"]
    ]
    assert told == [
        ("before", "1", None), ("bad", "ValueError: went wrong", False), ("behind", "2", None),
    ]  # fmt: skip


def test_nothing_runs_on_a_broken_device(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sticky error every other check would fail as well."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    ran: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    give(check, monkeypatch, ("broken", broken), ("never", partial(ran.append, 1)))
    assert check.main(["--cpu", "--part", "exact"]) == 1
    assert not ran


def test_warnings_are_kept(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each once, with the check that gave it; one of them is an error."""
    from warnings import warn

    def warns() -> Sequence[Any]:
        for _ in range(2):
            warn("slow", stacklevel=1)
        warn("The AccumulateGrad node's stream does not match. This may", stacklevel=1)
        return []

    file = tmp_path / "rows.json"
    give(check, monkeypatch, ("first", warns), ("second", warns))
    assert check.main(["--cpu", "--part", "exact", "--json", str(file)]) == 1
    told = json.loads(file.read_text())
    assert told["warnings"]["slow"] == "exact: first"
    assert told["rows"][0]["value"] == "The AccumulateGrad node's stream does not match"


def test_ctrl_c_keeps_the_rows(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends the script at once, not the iterations of a run; the file is whole at any time."""
    from benchmarks.executor import gpu_exact

    file, seen = tmp_path / "rows.json", []

    def long() -> Iterator[Any]:
        yield check.Row("before", "1")
        seen.append(json.loads(file.read_text()))
        case = gpu_exact.cases(check.small(torch.device("cpu")))[0]
        array = gpu_exact.trainer(check.small(torch.device("cpu")), case.model, case.jobs)
        stop = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
        runs.run(array, gpu_exact.order(case.jobs, 0), 3, on_step=stop)
        yield check.Row("behind", "2")

    give(check, monkeypatch, ("long", long))
    before = signal.getsignal(signal.SIGINT)
    assert check.main(["--cpu", "--part", "exact", "--json", str(file)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    told = json.loads(file.read_text())
    assert told == seen[0]
    assert [row["name"] for row in told["rows"]] == ["before"]
    assert told["running"] == "exact: long"
    assert list(tmp_path.iterdir()) == [file]
    assert "0 criteria hold, 0 fail" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cpu", "--part", "exact,fast"], "--part: expected some of memory, exact, speed, ranks"),
        (["--cpu", "--part", ""], "--part: expected some of"),
        (["--cpu", "--json", "/no/such/folder/x"], "--json: "),
        (["--quick"], "unrecognized arguments: --quick"),
        ([], "there is no GPU that torch can use"),
    ],
)
def test_bad_arguments(
    check: Any,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence, and nothing is run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        check.main(words)
    told = capsys.readouterr()
    assert sentence in told.err
    assert told.err.count("\n") == 1
    assert not told.out


def test_what_the_driver_says(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field by field; nothing if it cannot be asked."""
    gpu = SimpleNamespace(uuid="1-2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for said, found in (("1980 MHz, 16", {"a": "1980 MHz", "b": "16"}), ("", {}), ("odd", {})):
        monkeypatch.setattr(check, "_said", lambda command, said=said: said)
        assert check.nvidia_smi(["a", "b"]) == found
    monkeypatch.undo()
    assert check._said(["no-such-program"]) == check._said([sys.executable, "-c", "1 / 0"]) == ""


@pytest.mark.parametrize(
    ("code", "value"),
    [("raise SystemExit('gone')", "ended with 1; gone"), ("input()", "did not end in time; ")],
)
def test_a_rank_that_fails(
    check: Any, monkeypatch: pytest.MonkeyPatch, code: str, value: str
) -> None:
    """A row within seconds, never a script that hangs."""
    from benchmarks.executor import gpu_ranks

    wait = "import time; time.sleep(60)"
    codes = [code.replace("input()", wait), wait]
    monkeypatch.setattr(gpu_ranks, "LIMIT", 2.0)
    monkeypatch.setattr(
        gpu_ranks, "command", lambda folder, way, rank: [sys.executable, "-c", codes[rank]]
    )
    first, second = gpu_ranks.started("gloo")
    assert (first.name, first.value, first.holds) == ("gloo: rank 0", value, False)
    assert second.value == "did not end in time; "


def simulated(
    check: Any, monkeypatch: pytest.MonkeyPatch, parts: Sequence[str], delays: int
) -> tuple[Machine, list[dict[str, Any]], set[int]]:
    """Rows of parts on two simulated GPUs; the streams that were made to sleep."""
    from benchmarks.executor import gpu_memory

    slept: set[int] = set()
    with streams(monkeypatch, delays) as machine:
        monkeypatch.setattr(
            torch.cuda, "_sleep", lambda cycles: slept.add(machine.current.index), raising=False
        )
        for name in ("max_memory_reserved", "max_memory_allocated", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
        monkeypatch.setattr(gpu_memory, "flat_bytes", slots.flat_bytes)
        monkeypatch.setattr(check, "clock", list)
        table = check.Table(None, {})
        check.run(table, parts, check.small(GPU, 2))
    return machine, table.rows, slept


QUICK = ("micro-batches", "clipping, 2 GPUs", "slots", "no wait for inputs", "no wait for states")


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_on_simulated_gpus(check: Any, monkeypatch: pytest.MonkeyPatch, every: bool) -> None:
    """What only runs on GPUs is run: all bits are equal, and mutants are found."""
    from benchmarks.executor.gpu_exact import exactness

    full = {"isolated", "crowded"}  # of real memory

    def some(sizes: Any) -> list[Any]:
        chosen = [row for row in exactness(sizes) if every or row[0] in QUICK]
        return [row for row in chosen if row[0] not in full]

    monkeypatch.setitem(check.PARTS, "exact", some)
    machine, rows, slept = simulated(check, monkeypatch, ["exact"], 1)
    wrong = [row for row in rows if row["holds"] is not True]
    assert [row["name"] for row in wrong] == ["exact: default flags, not judged"] * every
    assert len(rows) >= len(QUICK)
    assert len(slept) > 12  # lanes, uploads, copies of states, links
    assert machine.races  # of mutants


@pytest.mark.slow
def test_times_and_memory_of_simulated_gpus(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No check raises and no wait is missing; times mean nothing here."""
    machine, rows, _ = simulated(check, monkeypatch, ["memory", "speed"], 1)
    assert machine.races == []
    assert len(rows) > 15
    assert not [row for row in rows if row["wanted"] == "no error"]


def test_norms_as_torch_has_them() -> None:
    """Absent gradients leave no trace, whichever parameter of whichever stage they belong to."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    job = Job(0, 2, lambda named: torch.optim.SGD(named, lr=0.1), clip_norm=1.0)
    for absent in ((), (0,), (2, 3), tuple(range(8))):
        stages = fresh_stages(model, (("0", "1"), ("2", "3")), job, 0, "a")
        run = JobRun(job, 0, "a", model, stages, 0, 1, None)
        rows = list(model.parameters())
        for k, p in enumerate(rows):
            p.grad = None if k in absent else torch.randn_like(p)
        norms = Norms()
        for stage in reversed(stages):
            norms = norms_from(stage, norms)
        wanted = torch.nn.utils.get_total_norm([p.grad for p in rows if p.grad is not None])
        assert torch.equal(total_norm(run, norms), wanted)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("part", ["memory", "exact", "speed", "ranks"])
def test_on_a_gpu(check: Any, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All criteria hold."""
    failed = check.main(["--part", part])
    assert not failed, capsys.readouterr().out


@pytest.mark.gpu
@needs_gpu
def test_a_late_number() -> None:
    """Is read on any stream, once it is there."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(4096, 4096, device="cuda")
        for _ in range(50):
            x = x @ x / 4096
        number = Late(x.mean())
    assert number.item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.gpu
@needs_gpu
def test_the_clock_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are in order, also when the origin has moved on."""
    monkeypatch.setattr(cuda_streams, "_FRESH_NS", 0)
    clock = cuda_streams.GpuClock(torch.device("cuda:0"))
    x = torch.ones(1024, 1024, device="cuda")
    events = []
    for _ in range(6):
        x = x @ x / 1024
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    events[-1].synchronize()
    # those of another stream may be read late: before the origin
    times = {k: clock.time_ns(events[k]) for k in (0, 2, 1, 5, 3, 4)}
    assert times[0] > 0
    assert [times[k] for k in range(6)] == sorted(times.values())


@pytest.mark.gpu
@needs_gpu
def test_links_of_a_gpu() -> None:
    """Within a GPU is quicker than from the host."""
    links = measure.measure_links([torch.device("cuda:0")])
    assert links.activation.bandwidth > links.host.bandwidth > 10**9


class At:
    """An event at a time of the GPU's own timer, in milliseconds; over as soon as it is asked."""

    def __init__(self, at: float, over: bool = False) -> None:
        self.at, self.over = at, over

    def record(self, stream: Any = None) -> None:
        """Nothing to do."""

    def query(self) -> bool:
        """Whether the host would not have to wait."""
        return self.over

    def synchronize(self) -> None:
        """Wait."""
        self.over = True

    def elapsed_time(self, end: At) -> float:
        """As a GPU has it."""
        return end.at - self.at


def test_the_clock_follows_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's timer that gains 100 us a second is put right once a minute; no block overlaps."""
    now = 0.0  # seconds
    monkeypatch.setattr(cuda_streams.time, "perf_counter_ns", lambda: round(now * 1e9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(cuda_streams, "timer", lambda: At(0.0))
    clock = cuda_streams.GpuClock(torch.device("cpu"))
    times = cuda_streams.BlockTimes(clock)
    found = []
    for second in range(1, 600):
        times.add(second, At((second - 1) * 1000.1), At(second * 1000.1), ())
        now = second
        landed = times.land()
        assert landed is not None
        found.append(landed)
    for (_, _, end, _), (second, start, _, _) in pairwise(found):
        assert start >= end
        assert abs(end - (second - 1) * 10**9) < 7_000_000  # a minute of drift
    begin = 600 * 1000.1
    times.add(600, At(begin), At(begin + 10), [(At(begin + 1), At(begin + 4))])
    _, start, end, waited = times.land()  # type: ignore[misc]
    assert (waited, end - start) == (3_000_000, 7_000_000)
    times.add(0, At(0), At(1), ())
    times.keep({1: 0})
    assert len(times) == 1
    assert times.land() is None


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job fails for want of it, as for want of memory on the GPU; the GPU is as it was."""

    def refuse(said: str) -> Any:
        def empty_like(*_: Any, **__: Any) -> Any:
            raise torch.AcceleratorError(said)

        return empty_like

    monkeypatch.setattr(torch, "empty_like", refuse("CUDA error: out of memory"))
    with pytest.raises(torch.OutOfMemoryError, match="cannot page-lock 12 bytes"):
        page_locked_like(torch.ones(3))
    monkeypatch.setattr(torch, "empty_like", refuse("CUDA error: unspecified launch failure"))
    with pytest.raises(torch.AcceleratorError, match="unspecified"):
        page_locked_like(torch.ones(3))
