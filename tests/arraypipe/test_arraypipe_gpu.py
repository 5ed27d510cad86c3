"""The checks of `benchmarks/gpu_check.py`: here at small sizes, and as tests where a GPU is."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from optsched.arraypipe import gpu_clock  # noqa: E402
from optsched.arraypipe.exchange import own_norms, total_norm  # noqa: E402
from optsched.arraypipe.job import Job, Norms  # noqa: E402
from optsched.arraypipe.job_run import JobRun  # noqa: E402
from optsched.arraypipe.late import Late  # noqa: E402
from optsched.arraypipe.profiling import links as profile_links  # noqa: E402
from optsched.arraypipe.split import split  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module; flags of torch are put back."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    kept = (
        torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.deterministic,
        matmul.allow_tf32, cudnn.allow_tf32, torch.get_num_threads(),
    )  # fmt: skip
    from benchmarks.executor import gpu_check

    yield gpu_check
    torch.use_deterministic_algorithms(kept[0])
    cudnn.benchmark, cudnn.deterministic = kept[1:3]
    matmul.allow_tf32, cudnn.allow_tf32 = kept[3:5]
    torch.set_num_threads(kept[5])
    for name in [name for name in sys.modules if name.startswith("benchmarks.executor.gpu_")]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_script_itself(check: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a CPU: every row is there, and nothing that does not depend on a GPU fails."""
    assert check.main(["--cpu", "--json", str(tmp_path / "rows.json")]) == 0
    told = capsys.readouterr().out
    for words in ("micro-batches", "clipping", "bf16", "early stop", "out of memory", "period",
                  "1F1B", "copies of the engine, out", "hidden"):  # fmt: skip
        assert words in told
    assert told.count("slots, ") >= 2
    assert (tmp_path / "rows.json").stat().st_size > 0


def test_a_difference_fails(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script would have noticed one wrong bit."""
    from benchmarks.executor import gpu_exact

    original = gpu_exact.alone

    def wrong(*given: Any) -> Any:
        reference = original(*given)
        first = next(iter(reference.parameters.values()))
        first.view(-1)[0] += 1
        return reference

    monkeypatch.setattr(gpu_exact, "alone", wrong)
    assert check.main(["--cpu", "--part", "exact"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, and runs nothing."""
    assert check.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_norms_as_torch_has_them() -> None:
    """Absent gradients leave no trace, whichever parameter of whichever stage they belong to."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    job = Job(0, 2, lambda named: torch.optim.SGD(named, lr=0.1), clip_norm=1.0)
    for absent in ((), (0,), (2, 3), tuple(range(8))):
        stages = split(model, (("0", "1"), ("2", "3")), job, 0, "a")
        run = JobRun(job, 0, "a", model, stages, 0, 1, None)
        rows = list(model.parameters())
        for k, p in enumerate(rows):
            p.grad = None if k in absent else torch.randn_like(p)
        norms = Norms()
        for stage in reversed(stages):
            norms = own_norms(stage, norms)
        wanted = torch.nn.utils.get_total_norm([p.grad for p in rows if p.grad is not None])
        assert torch.equal(total_norm(run, norms), wanted)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("part", ["exact", "speed", "memory"])
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
    monkeypatch.setattr(gpu_clock, "_FRESH", 0)
    clock = gpu_clock.GpuClock(torch.device("cuda:0"))
    x = torch.ones(1024, 1024, device="cuda")
    events = []
    for _ in range(6):
        x = x @ x / 1024
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    events[-1].synchronize()
    # those of another stream may be read late: before the origin
    times = {k: clock.time(events[k]) for k in (0, 2, 1, 5, 3, 4)}
    assert times[0] > 0
    assert [times[k] for k in range(6)] == sorted(times.values())


@pytest.mark.gpu
@needs_gpu
def test_links_of_a_gpu() -> None:
    """Within a GPU is quicker than from the host."""
    links = profile_links.measure_links([torch.device("cuda:0")])
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
    monkeypatch.setattr(gpu_clock.time, "perf_counter_ns", lambda: round(now * 1e9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(gpu_clock, "timer", lambda: At(0.0))
    clock = gpu_clock.GpuClock(torch.device("cpu"))
    times = gpu_clock.BlockTimes(clock)
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
