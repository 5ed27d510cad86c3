"""The ArrayPipe study: its accounts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optsched import pipelines

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.executor import study_baselines  # noqa: E402
from benchmarks.executor.study_cases import Case  # noqa: E402

SMALL = Case("bert_large", stages=4, jobs=8)


@pytest.mark.parametrize("name", [*study_baselines.SINGLE, "zb_h2"])
def test_parts_add_up(name: str) -> None:
    """Forward, backward, overhead and bubble are the time of all devices."""
    run = study_baselines.one_after_another(SMALL, name)
    assert run is not None
    assert sum(run.parts.values()) == SMALL.stages * run.time
    assert min(run.parts.values()) >= 0 and run.parts["switch"] == 0


def test_a_wrong_schedule_ends_the_study() -> None:
    """Nothing is accounted that the verifier refuses."""
    job = SMALL.single(8)
    schedule = pipelines.vanilla(job)
    assert schedule.start is not None
    early = schedule.with_orders(schedule.sequences, schedule.start // 2, None, {})
    with pytest.raises(SystemExit, match="wrong schedule"):
        study_baselines.run_of(job, early)
