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
from runs import run
from typer.testing import CliRunner

from optsched import InputError, Schedule, verify
from optsched.arraypipe import random_schedule
from optsched.arraypipe.distributed.ranks import on_first_clock
from optsched.arraypipe.plan.types import Copied
from optsched.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)

SCRIPT = Path(__file__).with_name("process_cases.py")
SOME: dict[int, dict[str, list[Any]]] = {
    2: {"exact": [0, 3], "replanned": [0, 1], "stopped": [], "failed": [], "queued": [],
        "interrupted": [], "longer": [], "refused": [], "first_forwards": [], "unlike": [],
        "nothing_left": [], "caught": [], "one_rank_cannot": [], "concluded": [], "used_up": [],
        "carried": [], "own_stages": [], "with_losses": [], "streamed": ["exact", 122, 124],
        "transformers_models": [["llama tied"]], "sleeps": [], "absent": []},
    4: {"exact": [100, 101], "replicated": [], "replicas_end": []},
}  # fmt: skip


def ask(folder: Path, groups: Sequence[Any], seconds: float, script: Path = SCRIPT) -> list[Any]:
    """Run groups of processes one after the other; what their ranks 0 say."""
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(groups)],
        capture_output=True, text=True, timeout=seconds, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{k}.json").read_text()) for k in range(len(groups))]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """All that the quick tests look at, by ranks and case: torch is loaded once."""
    folder = tmp_path_factory.mktemp("groups")
    groups = [[ranks, "several", cases] for ranks, cases in SOME.items()]
    *several, killed, resumed = ask(folder, [*groups, [2, "killed"], [4, "resumed"]], 900)
    rows: dict[Any, Any] = {"folder": folder, "killed": killed, "resumed": resumed}
    for ranks, answer in zip(SOME, several, strict=True):
        rows |= {(ranks, case): row for case, row in answer.items()}
    return rows


@pytest.mark.parametrize("ranks", [2, 4])
def test_bit_identical_to_training_alone(answers: dict[Any, Any], ranks: int) -> None:
    """Random plans, windows 1 and 2: parameters, buffers, moments and losses; traces verify."""
    assert answers[ranks, "exact"] == []


def test_trained_losses_and_split_backwards(answers: dict[Any, Any]) -> None:
    """Weights of the loss live on the last rank; W blocks of zero-bubble orders."""
    assert answers[2, "with_losses"] == []


@pytest.mark.parametrize("case", ["replanned", "streamed", "transformers_models", "longer"])
def test_bits(answers: dict[Any, Any], case: str) -> None:
    """Plans that change between segments, GPUs, models of transformers, batches that grow."""
    assert answers[2, case] == []


def test_replicas_have_the_bits_of_ddp(answers: dict[Any, Any]) -> None:
    """Two stages on two ranks each: accumulation, clipping, plateaus, and a resume between."""
    assert answers[4, "replicated"] == []


def test_replicas_stop_and_fail_together(answers: dict[Any, Any]) -> None:
    """A stop holds from the next segment; the failure of one rank ends the run on all."""
    found = answers[4, "replicas_end"]
    assert found["status"] == ["stopped", "done"] and 3 <= found["steps"][0] < found["steps"][1]
    assert found["steps"][1] == 9
    for words in found["failed"]:
        assert "job job1, stage 1, iteration 2: IndexError" in words


CANNOT = {
    "optimizer": "InputError: rank 1: job job1: the optimizer cannot be made",
    "exit": "PeerLost: rank 1: SystemExit: no such luck",
    "data": "PeerLost: rank 1: OSError: no such file here",
    "batch": "JobFailed: job job0, stage 0, iteration 0: OSError: no such batch here (rank 1)",
    "schedule": "InputError: rank 1: backend: the schedule has 4 devices, there are 2 processes",
}


@pytest.mark.parametrize("what", list(CANNOT))
def test_one_rank_that_cannot_begin_is_named(answers: dict[Any, Any], what: str) -> None:
    """All ranks end soon, with a sentence of the rank and its error, and can run again."""
    found = answers[2, "one_rank_cannot"]
    (first, soon), (second, _) = found[what]
    assert soon
    assert first.startswith(CANNOT[what]), first
    assert CANNOT[what].rpartition("rank 1: ")[2].removesuffix(" (rank 1)") in second, second
    assert found["differences"] == []


@pytest.mark.parametrize("what", ["checkpoint", "worker"])
def test_an_error_after_the_last_block_is_said_on_all_ranks(
    answers: dict[Any, Any], what: str
) -> None:
    """With the rank and its sentence, not with what gloo says of a lost connection."""
    found = answers[2, "concluded"]
    other, own = found[what]
    assert own.endswith("Error: no space left")
    assert other == f"PeerLost: rank 1: {own}"
    assert found["differences"] == []


def test_a_rank_that_never_comes(answers: dict[Any, Any]) -> None:
    """What a script raises before it calls us cannot be told: the timeout is said in a sentence."""
    said = answers[2, "absent"]
    assert "not all of the 2 ranks have come to this run within 0.5 s" in said


def test_early_stop(answers: dict[Any, Any]) -> None:
    """A job ends with the iteration that was decided on; nothing else is run."""
    found = answers[2, "stopped"]
    assert found["differences"] == []
    assert found["status"] == ["stopped"] * 3
    assert found["known"]  # every loss once, in one process
    whole = 3 * 8 + 5 * 16 + 10 * 8
    assert found["blocks"] == whole  # of 12,800


def test_trace_and_waits_of_ranks(answers: dict[Any, Any]) -> None:
    """Blocks alone, in an order that the clocks allow; waits at receives are in the report."""
    found = answers[2, "carried"]
    trace = Schedule.read(answers["folder"] / "carried-0.schedule.json")
    assert verify(trace) == []
    assert trace.start is not None
    end, apart = trace.start + trace.duration, trace.provenance["clock_uncertainty_ns"]
    assert (trace.start[trace.arcs.head] >= end[trace.arcs.tail] - apart).all()
    assert found["devices"] == 2
    # another rank knows its own blocks only
    own = Schedule.read(answers["folder"] / "carried-1.schedule.json")
    assert 0 < own.n_operations < trace.n_operations
    assert set(own.kind.tolist()) == {"F", "B", "U"}


def test_pages_and_perfetto_show_traces(answers: dict[Any, Any], tmp_path: Path) -> None:
    """The trace of a run on two ranks is verified, shown, drawn, and run again."""
    path = answers["folder"] / "carried-0.schedule.json"
    trace = Schedule.read(path)
    out = tmp_path / "run.trace.json"
    for command in (
        ["verify", str(path)], ["show", str(path)], ["trace", str(path), "-o", str(out)],
        ["plot", str(path), "--html", str(tmp_path / "run.html")],
    ):  # fmt: skip
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    events = json.loads(out.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values()) == [resource.name for resource in trace.resources]
    drawn = [e for e in events if e["tid"] in rows and e["ph"] == "X" and e["cat"] != "setup"]
    assert len(drawn) == trace.n_operations


def test_a_job_that_fails_leaves_the_others_alone(answers: dict[Any, Any]) -> None:
    """A NaN and an exception end their jobs, rank 0 knows why, the third is bit-identical."""
    found = answers[2, "failed"]
    assert found["differences"] == []
    assert found["status"] == ["failed", "failed", "done"]
    assert "job job0, stage 3, iteration 2: the loss is nan" in found["errors"][0]
    assert "iteration 3: IndexError" in found["errors"][1]


def test_a_first_forward_that_fails_on_one_rank_ends_its_job_alone(answers: dict[Any, Any]) -> None:
    """Whether the job is in the plan or joins: all ranks know it as failed, others are exact."""
    said = answers[2, "first_forwards"]
    status = ["done", "done", "failed", "failed", "done"]
    assert said == {"differences": [], "status": status}


def test_a_job_whose_data_end_at_its_checkpoint_fails_alone(answers: dict[Any, Any]) -> None:
    """The error has its iteration, the other job goes on from its own checkpoint."""
    sentence = "job job1, stage 0, iteration 2: data: job job1 has no batch for iteration 2"
    said = {"differences": [], "status": ["done", "failed"], "error": sentence}
    assert answers[2, "used_up"] == said


def test_jobs_of_other_shapes_are_refused_alike(answers: dict[Any, Any]) -> None:
    """The same sentence on all ranks."""
    sentences = answers[2, "unlike"]
    assert "job j1: '0.weight'" in sentences[0] and len(set(sentences)) == 1


def test_a_rank_has_its_own_stages_only(answers: dict[Any, Any]) -> None:
    """Bytes of tensors on a rank, when the first block begins, of all that all jobs have."""
    used, own, whole = answers[2, "own_stages"]
    assert own <= used <= 1.1 * own < 0.6 * whole


def test_nothing_is_left_of_a_run(answers: dict[Any, Any]) -> None:
    """No model waits for the collector of cycles, and no process group stays, refused or not."""
    assert answers[2, "nothing_left"] == [0, 0]


def test_an_error_on_one_rank_reaches_all_at_once(answers: dict[Any, Any]) -> None:
    """Not after the timeout; and the same process group serves another run, which is exact."""
    said = answers[2, "caught"]
    assert said["said"].startswith("rank 1: job job1, stage 3, iteration 2")
    assert said["at_once"] and said["differences"] == []


def test_waiting_jobs_take_free_seats(answers: dict[Any, Any]) -> None:
    """Seven jobs on two slots, decided by rank 0, known to all."""
    found = answers[2, "queued"]
    assert found["differences"] == []
    assert found["status"] == ["done", "stopped", "done", "done", "done", "done", "done"]


def test_interrupt(answers: dict[Any, Any]) -> None:
    """After Ctrl-C all jobs end with a whole iteration, and the run returns what they have."""
    found = answers[2, "interrupted"]
    assert found["differences"] == []
    assert all(6 <= n < 50 for n in found["steps"])


def test_refused_before_anything_is_trained(answers: dict[Any, Any]) -> None:
    """Ranks and devices differ, settings out of range, checkpoints on one rank only."""
    found = answers[2, "refused"]
    words = ["has 4 devices, there are 2 processes", "timeout"]
    words.append("checkpoint: differs between ranks")
    words.append(
        "job job0: optimizer setting 'lr' of '0.bias': differs between ranks, '0.1' on rank 0 and"
    )
    missing = [row for row in zip(words, found, strict=True) if row[0] not in row[1]]
    assert not missing


def test_without_a_process_group() -> None:
    """The sentence says how to start one."""
    from process_cases import Row, trainer

    with pytest.raises(InputError, match="torchrun"):
        run(trainer([Row(0)]), random_schedule([1], 4), 1, backend="process")


def test_a_rank_that_sleeps(answers: dict[Any, Any]) -> None:
    """The error has the peer, the block and the message that is missing; others repeat it."""
    first, second = answers[2, "sleeps"]
    for part in ("Stalled: no message from rank 1", "in cycle 2 before", "which waits for the"):
        assert part in first
    assert second.startswith("PeerLost: rank 0: no message from rank 1")


def test_killed_and_resumed(answers: dict[Any, Any]) -> None:
    """Rank 1 of 2 is killed; 4 ranks go on from the last whole checkpoints, bit by bit."""
    for part in ("rank 1 is lost", "in cycle 4 before"):
        assert part in answers["killed"]
    assert answers["resumed"]["differences"] == []
    assert [2 <= n <= 5 for n in answers["resumed"]["steps"]] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hundred_plans(tmp_path: Path, ranks: int) -> None:
    """50 random plans on 2 and on 4 processes, windows 1 and 2; changes of plans."""
    cases = {"exact": [1000, 1050], "replanned": [1000, 1005]}
    wanted = {name: [] for name in cases}
    assert ask(tmp_path, [(ranks, "several", cases)], 1800) == [wanted]


def test_times_are_those_of_the_first_rank() -> None:
    """Both ends are moved, nothing else; an offset within its error is none."""
    rows = [Copied(1, "out", 0, 0, -900, -800, 8)]
    assert on_first_clock(rows, 1000, 10) == [Copied(1, "out", 0, 0, 100, 200, 8)]
    assert on_first_clock(rows, 10, 10) == rows
