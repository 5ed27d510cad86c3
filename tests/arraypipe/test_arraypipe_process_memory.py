"""States in slots on gloo processes: exact, refused on all ranks alike, and in the report."""

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
# what is asked for, and what is found: numbers and truths, or parts of sentences
QUICK: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "exact": ((2, "tight", "exact", 0, 2), EXACT),
    "replanned": ((2, "tight_replanned", 0, 2), EXACT),
    # the same sentence everywhere, with the device; no folder is made, and no rank waits
    "too small": (
        (2, "too_small"),
        {"said": "memory: ", "device": True, "alike": True, "others": True,
         "unlike": "memory: differs between ranks"},
    ),
    # shards of states in slots are whole: 4 ranks go on where 2 were killed
    "killed": ((2, "tight", "killed"), {"answer": "rank 1 is lost", "moving": True}),
    "resumed": ((4, "tight", "resumed"), EXACT),
    # a waiting job that does not fit says so; the others keep their bits
    "too large": (
        (2, "too_large"),
        {"status": ["done", "done", "failed", "done"], "differences": [], "exposed": True,
         "whole": True, "error": "memory: the moments of job job2, stage"},
    ),
    # one without recompute, refused by the first rank
    "refilled": (
        (2, "refilled"),
        {"slots": True, "status": ["done"] * 3 + ["failed"] + ["done"] * 2, "differences": [],
         "error": "states are between a forward and its backward on gpu0"},
    ),
}  # fmt: skip
SLOW: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    # stops with tombstones, failures, slots that change hands, Ctrl-C, batches that grow, GPUs
    **{case: ((2, "tight", case), EXACT)
       for case in ("stopped", "failed", "queued", "interrupted", "longer")},
    "gpus": ((2, "tight", "streamed", "exact", 0, 2), EXACT),
    "4 ranks": ((4, "tight", "exact", 2000, 2020), EXACT),
    "4 ranks, replanned": ((4, "tight_replanned", 2000, 2010), EXACT),
    # every rank remembers another number of blocks: the trace begins where all remember them
    **{f"{ranks} ranks, {most} blocks": (
           (ranks, "remembered", True, most),
           {"differences": [], "violations": [], "alike": True, "left out": most == 24})
       for ranks, most in ((4, 24), (2, 10**6))},
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    """All that the quick tests look at, or the slow ones: torch is loaded once."""

    @cache
    def found(slow: bool) -> dict[str, Any]:
        cases, folder = SLOW if slow else QUICK, tmp_path_factory.mktemp("groups")
        groups = {case: group for case, (group, _) in cases.items()}
        # those that leave the process group whole share one
        rows = {c: g for c, g in groups.items() if g[0] == 2 and c != "killed" and not slow}
        several = (2, "several", {name: given for _, name, *given in rows.values()})
        alone = {case: group for case, group in groups.items() if case not in rows}
        first, *others = ask(folder, [several, *alone.values()], 3000 if slow else 600, SCRIPT)
        together = {case: first[group[1]] for case, group in rows.items()}
        return together | dict(zip(alone, others, strict=True))

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
