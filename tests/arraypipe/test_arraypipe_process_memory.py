"""States in slots on gloo processes: exact, refused on all ranks alike, and told in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_arraypipe_process import ask  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]

SCRIPT = Path(__file__).with_name("process_memory_cases.py")
LIVES = ("stopped", "failed", "queued", "interrupted", "longer")
SOME: dict[str, tuple[Any, ...]] = {
    "exact": (2, "tight", "exact", 0, 2),
    "four": (4, "tight", "exact", 100, 102),
    "replanned": (2, "tight_replanned", 0, 3),
    "gpus": (2, "tight", "streamed", "exact", 0, 2),
    "too small": (2, "too_small"),
    "too large": (2, "too_large"),
    "reported": (2, "reported"),
    "refilled": (2, "refilled"),
    "moved": (2, "moved"),
    "killed": (2, "tight", "killed"),
    "resumed": (4, "tight", "resumed"),
}


RARE = ("four", "too large", "reported", "refilled", "moved")
"""Cases of the long run."""


def asked(folder: Path, names: list[str]) -> dict[str, Any]:
    """All that some tests look at: torch is loaded once."""
    return dict(zip(names, ask(folder, [SOME[name] for name in names], 300, SCRIPT), strict=True))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quick cases."""
    return asked(tmp_path_factory.mktemp("groups"), [name for name in SOME if name not in RARE])


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The others."""
    return asked(tmp_path_factory.mktemp("rare"), [name for name in SOME if name in RARE])


@pytest.mark.parametrize("case", ["exact", "replanned", "gpus"])
def test_bit_identical_in_little_memory(answers: dict[str, Any], case: str) -> None:
    """Random plans on 2 ranks, plans that change on the way, simulated GPUs: no differing bit."""
    assert answers[case]["answer"] == []
    assert answers[case]["moving"]


@pytest.mark.slow
def test_bit_identical_on_four_ranks(rare: dict[str, Any]) -> None:
    """The same."""
    assert rare["four"]["answer"] == []
    assert rare["four"]["moving"]


def test_one_rank_without_room_is_refused_on_all(answers: dict[str, Any]) -> None:
    """The same sentence everywhere, with the device; no folder is made, and nobody hangs."""
    found = answers["too small"]
    sentences = {sentence for sentence, _, _ in found["said"]}
    assert len(sentences) == 1
    assert f"memory: {found['device']} has" in sentences.pop()
    assert [made for _, made, _ in found["said"]] == [False, False]
    assert found["said"][0][2], "the other rank should have had room"
    assert "memory: differs between ranks" in found["unlike"]


@pytest.mark.slow
def test_a_job_too_large_for_the_slots_fails_alone(rare: dict[str, Any]) -> None:
    """One that takes a free seat and does not fit says so; the others keep their bits."""
    found = rare["too large"]
    assert found["status"] == ["done", "done", "failed", "done"]
    assert "memory: the moments of job job2, stage" in found["error"]
    assert found["differences"] == []


@pytest.mark.slow
def test_waits_for_copies_are_in_the_report(rare: dict[str, Any]) -> None:
    """Those of all ranks; with them the parts of every device's time add up to the whole."""
    found = rare["reported"]
    assert found["moving"]
    assert all(exposed > 0 for exposed in found["exposed"])
    assert found["whole"] == [True, True]
    assert found["differences"] == []


@pytest.mark.slow
def test_a_job_that_needs_more_slots_on_the_first_rank(rare: dict[str, Any]) -> None:
    """`refill` gives one without recompute: it fails, four others have their bits in one slot."""
    found = rare["refilled"]
    assert found["slots"]
    assert found["status"] == ["done"] * 3 + ["failed"] + ["done"] * 2
    assert "could not leave their slots on gpu0, which has 1" in found["error"]
    assert found["differences"] == []


@pytest.mark.slow
def test_a_plan_with_stages_on_other_ranks_is_not_adopted(rare: dict[str, Any]) -> None:
    """States cannot move to another rank: the log says so, and the run goes on."""
    (said,) = rare["moved"]["said"]
    assert "the solver's plan is not adopted: the new plan has the stages of job job1 on" in said
    assert rare["moved"]["differences"] == []


def test_killed_and_resumed_in_little_memory(answers: dict[str, Any]) -> None:
    """Shards of states in slots are whole: 4 ranks go on where 2 were killed, bit by bit."""
    assert "rank 1 is lost" in answers["killed"]["answer"]
    assert answers["resumed"]["answer"]["differences"] == []
    assert answers["killed"]["moving"]
    assert answers["resumed"]["moving"]


@pytest.mark.slow
@pytest.mark.parametrize("case", LIVES)
def test_lives_of_jobs_in_little_memory(tmp_path: Path, case: str) -> None:
    """Stops with tombstones, failures, seats that change hands, Ctrl-C, batches that grow."""
    (found,) = ask(tmp_path, [(2, "tight", case)], 300, SCRIPT)
    answer = found["answer"]
    assert (answer["differences"] if isinstance(answer, dict) else answer) == []
    assert found["moving"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_plans_in_little_memory(tmp_path: Path, ranks: int) -> None:
    """50 random plans, and 10 runs whose plan changes."""
    groups = [(ranks, "tight", "exact", 2000, 2050), (ranks, "tight_replanned", 2000, 2010)]
    for found in ask(tmp_path, groups, 900, SCRIPT):
        assert found["answer"] == []
        assert found["moving"]
