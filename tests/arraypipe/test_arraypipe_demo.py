"""The demo: small language models trained by a schedule and compared with training alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from optsched import InputError, Schedule, verify  # noqa: E402
from optsched.arraypipe import demo, random_schedule, run_demo  # noqa: E402
from optsched.train_alone import NotIdentical  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch


def test_demo_solves_trains_and_compares(tmp_path: Path) -> None:
    """The whole way: measure, solve, train, compare, write the trace."""
    threads, lines = torch.get_num_threads(), []
    result = run_demo(tmp_path / "out", steps=6, time_limit=0.5, say=lines.append)
    assert result.solved is not None
    assert result.solved.objective == result.schedule.makespan
    trace = Schedule.read(tmp_path / "out" / "measured.schedule.json")
    assert verify(trace) == []
    assert trace.n_operations == 6 * (3 * 8 + 16)
    replay = Schedule.read(tmp_path / "out" / "replay.schedule.json")
    assert verify(replay) == []
    assert replay.makespan == result.result.report.replayed < trace.makespan
    assert str(result).count("bit-identical") == 4
    assert len(lines) == 3
    assert torch.get_num_threads() == threads


def test_demo_learns_by_any_schedule_that_fits() -> None:
    """A schedule of one's own is run; every loss falls."""
    result = run_demo(steps=20, schedule=random_schedule([1, 1, 1, 2], 4, seed=3))
    assert result.solved is None
    for losses in result.result.losses:
        assert losses[-1] < 0.8 * losses[0]


def test_demo_refuses_what_does_not_fit(tmp_path: Path) -> None:
    """Another array's schedule, a bad number of steps and an unusable folder: one sentence."""
    (tmp_path / "file").write_text("")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("2 jobs, the trainer 4", {"schedule": random_schedule([1, 1], 4)}),
        ("3 stages, the model 4", {"schedule": random_schedule([1, 1, 1, 2], 3)}),
        ("job 3: the schedule has 1", {"schedule": random_schedule([1, 1, 1, 1], 4)}),
        ("steps", {"steps": 0}),
        ("cannot be made", {"out": tmp_path / "file"}),
    ]
    for sentence, arguments in cases:
        with pytest.raises(InputError, match=sentence):
            run_demo(**arguments)


def test_demo_fails_when_a_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is real: other random numbers are noticed."""
    from optsched.arraypipe import blocks

    monkeypatch.setattr(
        blocks, "seed_generator", lambda key: torch.default_generator.manual_seed(0)
    )
    with pytest.raises(NotIdentical, match="differences from training alone"):
        run_demo(steps=2, schedule=random_schedule([1, 1, 1, 2], 4))
    assert demo.SIBLINGS[1].recompute
