"""States in slots on gloo processes: exact, refused on all ranks alike, and told in the report."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_arraypipe_process import ask

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)

SCRIPT = Path(__file__).with_name("process_memory_cases.py")
EXACT = {"answer": [], "moving": True}
NOT_ADOPTED = "the solver's plan is not adopted: the new plan has the stages of job job1 on"
# what is asked for, and what is found: numbers and truths, or parts of sentences
QUICK: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "exact": ((2, "tight", "exact", 0, 2), EXACT),
    "replanned": ((2, "tight_replanned", 0, 3), EXACT),
    "gpus": ((2, "tight", "streamed", "exact", 0, 2), EXACT),
    # the same sentence everywhere, with the device; no folder is made, and nobody hangs
    "too small": (
        (2, "too_small"),
        {"said": "memory: ", "device": True, "alike": True, "others": True,
         "unlike": "memory: differs between ranks"},
    ),
    # shards of states in slots are whole: 4 ranks go on where 2 were killed
    "killed": ((2, "tight", "killed"), {"answer": "rank 1 is lost", "moving": True}),
    "resumed": ((4, "tight", "resumed"), EXACT),
    # one that takes a free slot and does not fit says so; the others keep their bits
    "too large": (
        (2, "too_large"),
        {"status": ["done", "done", "failed", "done"], "differences": [],
         "error": "memory: the moments of job job2, stage"},
    ),
}  # fmt: skip
SLOW: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "four": ((4, "tight", "exact", 100, 102), EXACT),
    # waits for copies of all ranks, with which the parts of a device's time add up to the whole
    "reported": (
        (2, "reported"), {"moving": True, "exposed": True, "whole": True, "differences": []},
    ),
    # one without recompute, refused by the first rank
    "refilled": (
        (2, "refilled"),
        {"slots": True, "status": ["done"] * 3 + ["failed"] + ["done"] * 2, "differences": [],
         "error": "could not leave their slots on gpu0, which has 1"},
    ),
    # states cannot move to another rank: the log says so, and the run goes on
    "moved": ((2, "moved"), {"said": NOT_ADOPTED, "differences": []}),
    # stops with tombstones, failures, slots that change hands, Ctrl-C, batches that grow
    **{case: ((2, "tight", case), EXACT)
       for case in ("stopped", "failed", "queued", "interrupted", "longer")},
    **{f"{ranks} ranks": ((ranks, "tight", "exact", 2000, 2050), EXACT) for ranks in (2, 4)},
    **{f"{ranks} ranks, replanned": ((ranks, "tight_replanned", 2000, 2010), EXACT)
       for ranks in (2, 4)},
    # every rank remembers another number of blocks: the trace begins where all remember them
    **{f"{ranks} ranks, {swaps}, {most} blocks": (
           (ranks, "remembered", swaps, most),
           {"differences": [], "violations": [], "alike": True, "left out": most == 24})
       for ranks, swaps, most in (
           (2, False, 24), (2, True, 24), (4, False, 24), (4, True, 24), (2, True, 10**6))},
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    """All that the quick tests look at, or the slow ones: torch is loaded once."""

    @cache
    def found(slow: bool) -> dict[str, Any]:
        cases = SLOW if slow else QUICK
        groups, folder = [group for group, _ in cases.values()], tmp_path_factory.mktemp("groups")
        return dict(zip(cases, ask(folder, groups, 3000 if slow else 300, SCRIPT), strict=True))

    return found


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_little_memory(answers: Callable[[bool], dict[str, Any]], case: str) -> None:
    """Random plans, plans that change, GPUs, lives of jobs: no bit differs, states do move."""
    found = answers(case in SLOW)[case]
    for key, wanted in (QUICK | SLOW)[case][1].items():
        if isinstance(wanted, str):
            assert wanted in found[key], key
        else:
            assert (bool(found[key]) if wanted is True else found[key]) == wanted, key
