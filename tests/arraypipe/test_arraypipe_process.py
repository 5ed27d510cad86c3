"""The process backend on gloo processes: exact, never hanging, clear when peers go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)

SCRIPT = Path(__file__).with_name("process_memory_cases.py")
EXACT = {"answer": [], "moving": True}
LOST = "PeerLost: rank 1: OSError: no space left"
CASES: dict[str, tuple[int, str, list[Any], Any]] = {
    # random plans, windows of 1 to 4: parameters, buffers, moments, losses; traces verify
    "plans": (2, "exact", [0, 3], []),
    "plans on 4 ranks": (4, "exact", [100, 101], []),
    "plans that change": (2, "replanned", [0, 1], []),
    "simulated GPUs": (2, "streamed", ["exact", 122, 123], []),
    "transformers": (2, "transformers_models", [["llama tied"]], []),
    "losses and W blocks": (2, "with_losses", [], []),
    "batches that grow": (2, "longer", [], []),
    # little memory: states move, no bit differs
    "slots": (2, "tight", ["exact", 0, 2], EXACT),
    "slots, plans that change": (2, "tight_replanned", [0, 1], EXACT),
    "too small": (2, "too_small", [], {
        "said": "memory: ", "device": True, "alike": True, "others": True,
        "unlike": "memory: differs between ranks"}),
    "a job too large": (2, "too_large", [], {
        "status": ["done", "done", "failed", "done"], "differences": [], "exposed": True,
        "whole": True, "error": "memory: the moments of job job2, stage"}),
    "a job without recompute": (2, "refilled", [], {
        "slots": True, "status": ["done"] * 3 + ["failed"] + ["done"] * 2, "differences": [],
        "error": "states are between a forward and its backward on gpu0"}),
    # lives of jobs
    "stopped": (2, "stopped", [], {
        "differences": [], "status": ["stopped"] * 3, "known": True,
        "blocks": 3 * 8 + 5 * 16 + 10 * 8}),  # of 12,800
    "first forwards": (2, "first_forwards", [], {
        "differences": [], "status": ["done", "done", "failed", "failed", "done"]}),
    "trace": (2, "carried", [], {
        "violations": [], "in order": True, "devices": 2, "others know their blocks": True}),
    "nothing left": (2, "nothing_left", [], [0, 0]),
    # ranks that differ or fail
    "refused": (2, "refused", [], {
        "optimizer": ["InputError: rank 1: job job1: the optimizer cannot be made",
                      "job job1: the optimizer cannot be made"],
        "exit": ["PeerLost: rank 1: SystemExit: no such luck", "SystemExit: no such luck"],
        "batch": ["JobFailed: job job0, stage 0, iteration 0: OSError: no such batch here (rank 1)",
                  "OSError: no such batch here"],
        "schedule": ["InputError: rank 1: backend: the schedule has 4 devices, there are 2 proc",
                     "backend: the schedule has 4 devices, there are 2 processes"],
        "folder": ["checkpoint: differs between ranks"] * 2,
        "setting": ["job job0: optimizer setting 'lr' of '0.bias': differs between ranks, '0.1' on"
                    " rank 0 and"] * 2,
        "checkpoint": [LOST, "Error: no space left"], "end": [LOST, "Error: no space left"]}),
    "caught": (2, "caught", [], {
        "said": "rank 1: job job1, stage 3, iteration 2", "at_once": True, "differences": []}),
    "a rank that sleeps": (2, "sleeps", [], [
        "in cycle 2 before", "PeerLost: rank 0: no message from rank 1"]),
    # two stages on two ranks each, against DistributedDataParallel
    "replicas": (4, "replicated", [], []),
    "replicas end": (4, "replicas_end", [], {
        "status": ["stopped", "done"], "early": True,
        "failed": ["job job1, stage 1, iteration 2: IndexError"] * 4}),
}  # fmt: skip
"""Ranks, case, arguments, and what is found: values, truths, or parts of sentences."""


def ask(folder: Path, groups: Sequence[Any], seconds: float, script: Path = SCRIPT) -> list[Any]:
    """Run groups of processes one after the other; what their ranks 0 say."""
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(groups)],
        capture_output=True, text=True, timeout=seconds, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{k}.json").read_text()) for k in range(len(groups))]


def misfits(found: Any, wanted: Any, at: str = "") -> list[str]:
    """Where an answer is another one than it should be."""
    if isinstance(wanted, dict):
        return [row for key, value in wanted.items() for row in misfits(found[key], value, key)]
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        return [row for pair in zip(found, wanted, strict=True) for row in misfits(*pair, at)]
    fits = bool(found) if wanted is True else found == wanted
    if isinstance(wanted, str):
        fits = wanted in found
    return [] if fits else [f"{at}: {found!r}, not {wanted!r}"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """All that the quick tests look at: torch is loaded once, groups of ranks are few."""
    groups: list[Any] = [[ranks, "several", {}] for ranks in (2, 4)]
    for name, (ranks, case, given, _) in CASES.items():
        groups[ranks // 4][2][name] = [case, *given]
    lives = [[2, "tight", "killed"], [4, "resumed"]]
    two, four, *lives = ask(tmp_path_factory.mktemp("groups"), [*groups, *lives], 900)
    return {**two, **four, "lives": lives}


@pytest.mark.parametrize("name", CASES)
def test_on_ranks(answers: dict[Any, Any], name: str) -> None:
    """Exact, or refused with a sentence on all ranks."""
    assert misfits(answers[name], CASES[name][3]) == []


def test_killed_and_resumed(answers: dict[Any, Any]) -> None:
    """Rank 1 of 2 is killed, its states in slots; 4 ranks go on from the last whole checkpoints."""
    killed, resumed = answers["lives"]
    for part in ("rank 1 is lost", "in cycle 4 before"):
        assert part in killed["answer"]
    assert killed["moving"] and resumed["differences"] == []
    assert [2 <= n <= 5 for n in resumed["steps"]] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hundred_plans(tmp_path: Path, ranks: int) -> None:
    """Random plans, changes of plans, little memory."""
    cases = {
        "exact": ["exact", 1000, 1050], "replanned": ["replanned", 1000, 1005],
        "slots": ["tight", "exact", 2000, 2020], "changes": ["tight_replanned", 2000, 2010],
    }  # fmt: skip
    if ranks == 2:
        cases |= {case: ["tight", case] for case in ("stopped", "longer")}
        cases["GPUs"] = ["tight", "streamed", "exact", 0, 2]
    (found,) = ask(tmp_path, [(ranks, "several", cases)], 3000)
    wanted = {name: [] if name in ("exact", "replanned") else EXACT for name in cases}
    assert misfits(found, wanted) == []
