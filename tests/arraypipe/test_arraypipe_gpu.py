"""The checks of `benchmarks/executor/gpu_check.py`, and parts of the executor for a GPU.

Here they run at small sizes, on the CPU and on a simulated GPU, and as tests where a GPU is.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from streams_model import GPU, streams

from benchmarks.executor import gpu_check, gpu_parts
from optsched.arraypipe.memory import state
from optsched.arraypipe.runtime import cuda_streams
from optsched.arraypipe.runtime.cuda_streams import Late, page_locked_like

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture
def check() -> Iterator[Any]:
    """The script; flags of torch are put back."""
    matmul, cudnn, new = torch.backends.cuda.matmul, torch.backends.cudnn, torch.utils.deterministic
    kept = (
        torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.deterministic,
        matmul.allow_tf32, cudnn.allow_tf32, new.fill_uninitialized_memory, torch.get_num_threads(),
    )  # fmt: skip
    yield gpu_check
    torch.use_deterministic_algorithms(kept[0])
    cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32, cudnn.allow_tf32 = kept[1:5]
    new.fill_uninitialized_memory = kept[5]
    torch.set_num_threads(kept[6])


@pytest.mark.slow
def test_the_script_itself(check: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a CPU nothing fails that does not depend on a GPU."""
    file = tmp_path / "rows.json"
    assert check.main(["--cpu", "--json", str(file)]) == 0, capsys.readouterr().out
    found = json.loads(file.read_text())
    assert {"date", "host", "commit", "CUDA"} <= found["head"].keys()
    assert {row["part"] for row in found["rows"]} == set(gpu_parts.PARTS)
    assert len(found["rows"]) >= 18


def test_a_difference_fails(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script would have noticed one wrong bit."""
    sizes = gpu_parts.Sizes(torch.device("cpu"), 1, tiny=True)
    first = gpu_parts.exactness(sizes)[0]
    monkeypatch.setitem(check.PARTS, "exact", lambda sizes: [first])
    assert check.main(["--cpu", "--part", "exact"]) == 0
    honest = gpu_parts.differences
    monkeypatch.setattr(gpu_parts, "differences", lambda a, b: [*honest(a, b), "a bit"])
    assert check.main(["--cpu", "--part", "exact"]) == 1


def test_a_check_that_raises_fails_alone(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its rows so far count, its sentence is a row, the next check runs."""
    file = tmp_path / "rows.json"

    def bad() -> Iterator[Any]:
        yield gpu_parts.Row("before", "1")
        raise ValueError("went wrong\nin detail")

    good = [gpu_parts.Row("after", "2", "is 2", True)]
    monkeypatch.setitem(check.PARTS, "exact", lambda sizes: [("bad", bad), ("good", lambda: good)])
    assert check.main(["--cpu", "--part", "exact", "--json", str(file)]) == 1
    rows = [(row["name"], row["value"]) for row in json.loads(file.read_text())["rows"]]
    assert rows == [("before", "1"), ("bad", "ValueError: went wrong"), ("after", "2")]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is no GPU here that torch can use; --cpu checks the script itself"),
        (["--part", "exact,speeed"], "--part: expected some of exact"),
        (["--cpu", "--json", "/nowhere/x.json"], "--json: "),
    ],
)
def test_bad_arguments(
    check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], sentence: str,
) -> None:  # fmt: skip
    """One sentence, and nothing is run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        check.main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_on_a_simulated_gpu(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only runs on GPUs is run: all bits are equal, no access races another."""
    slept: set[int] = set()
    with streams(monkeypatch) as machine:
        monkeypatch.setattr(
            torch.cuda, "_sleep", lambda cycles: slept.add(machine.current.index), raising=False
        )
        monkeypatch.setattr(gpu_parts, "flat_bytes", state.flat_bytes)
        sizes = gpu_parts.Sizes(GPU, 1, tiny=True)
        chosen = [row for row in gpu_parts.exactness(sizes) if row[0] == "slots"]
        monkeypatch.setitem(check.PARTS, "exact", lambda sizes: chosen)
        table = check.Table(None, {})
        check.run(table, ["exact"], sizes)
    assert [row["holds"] for row in table.rows] == [True] * 2, table.rows
    assert len(slept) > 2  # blocks, copies in, copies out
    assert machine.races == []


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("part", gpu_parts.PARTS)
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
    times = {k: clock.times_ns(*events[k : k + 2]) for k in (0, 2, 1, 4, 3)}
    assert times[0][0] > 0
    assert all(times[k][1] <= times[k + 1][1] for k in range(4))


class At:
    """An event at a time of the GPU's own timer, in milliseconds; over as soon as it is asked."""

    def __init__(self, at: float, over: bool = False) -> None:
        self.at, self.over = at, over

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
    """A GPU's timer that gains 100 us a second is put right every second; no block overlaps."""
    now = 0.0  # seconds
    monkeypatch.setattr(cuda_streams.time, "perf_counter_ns", lambda: round(now * 1e9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_streams, "recorded", lambda: At(0.0))
    times = cuda_streams.BlockTimes(torch.device("cpu"))
    found = []
    for second in range(1, 600):
        found.append([second] * 8)
        times.add(found[-1], At((second - 1) * 1000.1), At(second * 1000.1), ())
        now = second
        times.read()
    for (*_, end, _, _), (second, *_, start, _, _, _) in pairwise(found):
        assert start >= end
        assert abs(end - (second - 1) * 10**9) < 300_000  # of two seconds
    begin, now = 600 * 1000.1, 600.07
    row = [0] * 8
    times.add(row, At(begin), At(begin + 10), [(At(begin + 1), At(begin + 4))])
    times.read()
    assert (row[7], row[5] - row[4]) == (3_000_000, 7_000_000)


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
