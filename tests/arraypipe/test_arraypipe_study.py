"""The ArrayPipe study: its cases, its accounts, its tables, and the commands."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from optsched import pipelines

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.executor import study_baselines, study_cases, study_tables  # noqa: E402
from benchmarks.executor.study_cases import Case  # noqa: E402

SMALL = Case("bert_large", stages=4, jobs=8)


# cases


def test_one_job_needs_one_buffer_of_its_state() -> None:
    """The array keeps two on every device; a single job the other half free."""
    case = Case("gpt2_xl", memory="16GB")
    for chunks in ((), pipelines.zigzag(8, 2)):
        array, job = case.array([32, 32], chunks=chunks), case.single(32, chunks=chunks)
        state = np.bincount(job.devices_of(0), weights=job.state[0])
        assert (job.memory == 16 * 2**30 - state).all()
        assert (array.memory == 16 * 2**30 - 2 * state).all()


def test_every_assumption_changes_something() -> None:
    """No row of the table of assumptions repeats the base."""
    base = Case("vgg19")
    plain = [base.array([128, 256]), base.single(256, micro_batches=2)]
    for name in study_cases.ASSUMPTIONS:
        case = replace(base, assumption=name)
        changed = [case.array([128, 256]), case.single(256, micro_batches=2)]
        same = [a.sha256 == b.sha256 for a, b in zip(plain, changed, strict=True)]
        by_rule = name in ("base", "one block", "m = S", "never", "always")
        assert all(same) == by_rule, name


# accounts


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


# tables


def study_of(times: dict[str, int]) -> study_tables.Study:
    """A study of one model."""
    parts = dict.fromkeys(study_baselines.PARTS, 1)
    rows = [
        {"case": asdict(Case("vgg19")), "method": name,
         "run": asdict(study_baselines.Run(time, parts, "", 50))}
        for name, time in times.items()
    ]  # fmt: skip
    document = {"machine": "# 2 cores", "seconds": 4.0, "seed": 1, "rows": rows}
    return study_tables.Study.of(json.loads(json.dumps(document)))


def test_time_saved() -> None:
    """1 - time / time of the best of the others; a lost comparison is named."""
    study = study_of({"gpipe": 200, "zb_h1": 100, "barrier": 110, "rolling": 50})
    case = Case("")
    assert study.saved(case, "vgg19", "barrier", ("gpipe",)) == pytest.approx(0.45)
    assert study.saved(case, "vgg19", "rolling", ("gpipe", "zb_h1", "vanilla")) == 0.5
    assert study.saved(case, "vgg19", "rolling", ("vanilla",)) is None
    lost = study_tables.terms(study)
    assert "| array, barrier | 1 | 1 | vgg19 (ZB-H1, by 10.0%) |" in lost
    assert "| array, rolling | 1 | 0 | - |" in lost and "| array as published | 0 | 0 |" in lost


def test_tables_are_written_between_their_comments() -> None:
    """Nothing else of a page changes; a page without a table's place is refused."""
    page = "# T\n<!-- a -->\nold\n<!-- end -->\ntext\n<!-- b -->\n<!-- end -->\n"
    once = study_tables.written_into(page, {"a": "| 1 |", "b": r"\1"})
    assert once == ("# T\n<!-- a -->\n| 1 |\n<!-- end -->\ntext\n<!-- b -->\n\\1\n<!-- end -->\n")
    assert study_tables.written_into(once, {"a": "| 1 |"}) == once
    with pytest.raises(SystemExit, match="no place for a table between <!-- c -->"):
        study_tables.written_into(page, {"c": ""})
    whole = (ROOT / "docs" / "arraypipe-study.md").read_text()  # it has a place for every table
    study_tables.written_into(whole, study_tables.tables(study_of({"gpipe": 2, "rolling": 100})))
