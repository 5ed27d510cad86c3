"""The whole door on two ranks of torchrun: memory of a rank, `fit` and a sweep."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from arraypipe_models import loss, model_alone
from test_arraypipe_fit import DATA, array, jobs_of

from optsched.arraypipe.events import measure_of

pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program leaves: torch is loaded once for all tests."""
    place: Path = tmp_path_factory.mktemp("torchrun")
    script = Path(__file__).with_name("torchrun_script.py")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *start, str(script), str(place)],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return place


def found(folder: Path) -> list[dict[str, Any]]:
    """What every rank has found."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_hold_only_their_stages_before_the_first_block(folder: Path) -> None:
    """Of 4 jobs on 2 ranks, also after the check: 10 % more at most."""
    rows = found(folder)
    assert max(row["grown"] for row in rows) <= 1.1 * rows[0]["stages"], rows


def test_fit(folder: Path) -> None:
    """Other data are refused; measured, solved, trained, checkpoints evaluated.

    The log has every loss, and the values of those checkpoints that were looked at.
    """
    for row in found(folder):
        assert row["refused"].startswith("first batch of job job0: differs between ranks")
    made = array().with_jobs(jobs_of())
    rows = list(csv.DictReader((folder / "fit" / "log.csv").read_text().splitlines()))
    for j, (parameters, buffers) in enumerate(torch.load(folder / "fit" / "end.pt")):
        alone = made.train_alone(j, 5)
        assert all(torch.equal(alone.parameters[k], v) for k, v in parameters.items())
        assert all(torch.equal(alone.buffers[k], v) for k, v in buffers.items())
        mine = [row for row in rows if row["job"] == f"job{j}"]
        assert {int(row["iteration"]) for row in mine if row["loss"]} == set(range(5))
        values = {int(row["iteration"]): row["value"] for row in mine if row["value"]}
        assert 4 in values
        best, value = (folder / "fit" / f"job{j}" / "best").read_text().split()
        assert values[int(best) - 1] == value and (folder / "fit" / f"job{j}" / best).is_dir()
        for iteration, value in values.items():
            model = model_alone(made.train_alone(j, iteration + 1))
            with torch.no_grad():
                expected = measure_of(DATA, loss)(made.jobs[j], model, torch.device("cpu"))
            assert float(value) == expected


def test_a_sweep(folder: Path) -> None:
    """Pruned, failed, refilled; interrupted and resumed."""
    answer = found(folder)[0]["sweep"]
    assert answer["differences"] == []
    assert answer["states"] == "PFCFPFCCC"
    assert "RUNNING" in answer["interrupted"] and len(answer["interrupted"]) < 5
    assert answer["resumed"] == ["COMPLETE"] * 5
