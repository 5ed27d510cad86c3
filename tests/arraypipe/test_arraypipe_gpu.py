"""The checks of `benchmarks/executor/gpu_check.py`: small on the CPU, whole where a GPU is."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.executor import gpu_check, gpu_parts
from optsched.arraypipe.runtime import cuda_streams

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


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("part", gpu_parts.PARTS)
def test_on_a_gpu(check: Any, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All criteria hold."""
    failed = check.main(["--part", part])
    assert not failed, capsys.readouterr().out


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
