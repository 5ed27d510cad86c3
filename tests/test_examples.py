"""Examples that the documentation runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Run an example in an empty folder; returns its variables and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run_(name: str, *words: str) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr("sys.argv", [str(EXAMPLES / name), *words])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__"), capsys.readouterr().out

    return run_


def test_choose_gpus(run: Any) -> None:
    """Twelve free GPUs, on two hosts of one rack."""
    found, out = run("choose_gpus.py")
    assert len(found["gpus"]) == 12 and {*found["gpus"]} <= {*found["state"].free}
    assert "rack: 1 of 2" in out and "32 of 64 GPUs free" in found["figure"].get_suptitle()


def test_compare_policies(run: Any) -> None:
    """Every job ends under every policy, the shortest first on average the soonest."""
    found, out = run("compare_policies.py")
    means = {name: run.metrics.jct_mean for name, run in found["runs"].items()}
    assert min(means, key=means.__getitem__) == "srtf" and out.count("mean JCT") == len(means)
    assert all(run.metrics.unfinished == 0 for run in found["runs"].values())


def test_determined_walks(run: Any) -> None:
    """Code and documents part at the sixth step."""
    _, out = run("determined_walks.py")
    code, docs = out.split("variant docs")
    assert "6. a 4-GPU" in code and "running {'notebook': 1, 'four': 4}" in code
    assert "running {'notebook': 1, 'four': 4}" not in docs


def test_main_job(run: Any, tmp_path: Path) -> None:
    """Writes schedule, picture, page and trace; the other orders are longer."""
    _, out = run("main_job.py", "--time-limit", "1", "--out", "made")
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        "plan.schedule.json", "plan.png", "plan.html", "plan.trace.json"
    }  # fmt: skip
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+)x +│", out)]
    assert len(ratios) == 6 and ratios[0] == 1


@pytest.mark.torch
def test_hf_finetune(run: Any) -> None:
    """Three jobs learn; the second run finds them done."""
    found, _ = run("hf_finetune.py", "here")
    losses = found["result"].losses
    assert [len(row) for row in losses] == [20] * 3
    assert all(row[-1] < row[0] for row in losses)
    found, _ = run("hf_finetune.py", "here")
    assert not any(found["result"].losses)


@pytest.mark.torch
def test_lora_siblings(run: Any) -> None:
    """Four adapters on one base; the best is loaded as PEFT does."""
    _, out = run("lora_siblings.py", "--steps", "3", "--out", "made")
    assert len(re.findall(r"^lr\S+ +loss \d\.\d{4}$", out, re.MULTILINE)) == 4
    assert re.search(r"\d+ of \d+ numbers trained$", out.rstrip())


@pytest.mark.torch
def test_sweep_gpt(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job has the bits of training it alone."""
    monkeypatch.syspath_prepend(EXAMPLES)
    _, out = run("sweep_gpt.py", "--check", "--steps", "3", "--out", "made")
    assert "bit-identical to training every job alone" in out and out.count("<- best") == 1
