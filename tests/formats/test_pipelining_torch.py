"""The pipelining CSV and torch itself: its loader, its own schedules, its runtime on gloo.

The loader is private (`_PipelineScheduleRuntime._load_csv`), so its signature is pinned here.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelining_orders import as_text, cells_in, random_job, random_schedule

import optsched
from optsched import JobArray, Schedule, verify
from optsched.errors import CyclicOrder, InputError
from optsched.formats import pipelining_csv
from optsched.pipelines import one_f_one_b

if TYPE_CHECKING:
    from random import Random

torch = pytest.importorskip("torch")
pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")

pytestmark = pytest.mark.torch

WORKER = Path(__file__).parent / "pipelining_worker.py"
PATIENCE = 240  # seconds for a launch; it takes about ten
RUNTIME = pipelining._PipelineScheduleRuntime


def test_the_private_loader_is_the_one_we_write_for() -> None:
    """Names, parameters and defaults of torch's private functions, and its form of a cell."""
    loader = inspect.signature(RUNTIME._load_csv).parameters
    assert list(loader) == ["self", "filename", "format"]
    assert loader["format"].default == "compute_only"
    assert "filename" in inspect.signature(pipelining.PipelineScheduleMulti._load_csv).parameters
    for cell in ("2F0", "1B3", "0I12", "10W1", "(0F4;7B0)OVERLAP_F_B"):
        assert str(pipelining._Action.from_str(cell)) == cell
    assert pipelining._Action.from_str("") is None


# torch's loader


def stages(n_stages: int, n_ranks: int, mine: list[int]) -> list[Any]:
    """Stand-ins for the stages of rank 0: no process group is needed to build a schedule."""
    return [
        SimpleNamespace(
            stage_index=v, num_stages=n_stages, group_size=n_ranks, group_rank=0,
            submod=torch.nn.Identity(), is_first=v == 0, is_last=v == n_stages - 1,
        )
        for v in mine
    ]  # fmt: skip


def loaded(path: Path, job: JobArray) -> Any:
    """The file in torch's runtime class."""
    mine = [v for v, device in enumerate(job.place) if device == 0]
    runtime = RUNTIME(stages(job.n_stages, job.n_devices, mine), int(job.micro_batches[0]))
    runtime._load_csv(str(path))
    return runtime


def same_cells(path: Path, runtime: Any) -> bool:
    """Whether torch holds the rows of the file."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    held = [["" if a is None else str(a) for a in row] for row in runtime.pipeline_order.values()]
    return rows == held


@given(st.randoms(use_true_random=False), st.booleans())
def test_torch_loads_whatever_we_write(
    tmp_path_factory: pytest.TempPathFactory, rng: Random, compact: bool
) -> None:
    """Random places and orders, split or not: torch finds sends and receives for it."""
    job = random_job(rng)
    path = tmp_path_factory.getbasetemp() / "order.csv"
    pipelining_csv.write(random_schedule(rng, job), path, compact=compact)
    runtime = loaded(path, job)
    assert same_cells(path, runtime)
    assert [runtime.stage_index_to_group_rank[v] for v in range(job.n_stages)] == [*job.place]


@given(st.randoms(use_true_random=False))
def test_torch_and_we_refuse_the_same_orders(
    tmp_path_factory: pytest.TempPathFactory, rng: Random
) -> None:
    """Two neighbouring blocks swapped once or twice: a deadlock for both, or for neither."""
    job = random_job(rng).replace(
        microbatch_order="free", update=0, update_mode="none", recompute_mode="never"
    )
    text = pipelining_csv.to_csv(random_schedule(rng, job), compact=True)
    rows = [line.split(",") for line in text.splitlines()]
    for _ in range(rng.randint(1, 3)):
        row = rng.choice(rows)
        a = rng.randrange(len(row) - 1)
        row[a], row[a + 1] = row[a + 1], row[a]
    path = tmp_path_factory.getbasetemp() / "swapped.csv"
    path.write_text(as_text(rows))
    try:
        pipelining_csv.read(path, job)
        ours = True
    except CyclicOrder:
        ours = False
    try:
        loaded(path, job)
        theirs = True
    except (AssertionError, IndexError):  # its table of the error may itself go wrong
        theirs = False
    assert ours == theirs, path.read_text()


@pytest.mark.parametrize("kind", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_messages_of_torch_are_read(tmp_path: Path, kind: str) -> None:
    """The file that torch makes of its schedule, with SEND, RECV and sharding."""
    path = tmp_path / "order.csv"
    schedule = getattr(pipelining, kind)(stages(8, 4, [0] * 2), 8)
    place = [schedule.stage_index_to_group_rank[v] for v in range(8)]
    schedule._dump_csv(str(path), format="compute_comms")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    job = JobArray([[1] * 8], [[1] * 8], weight=1 if "Zero" in kind else None, micro_batches=8,
                   place=place)  # fmt: skip
    read = pipelining_csv.from_text(as_text(rows), "torch.csv", job)
    assert verify(read) == []


# torch's own schedules


def single_stage_rows(kind: str, ranks: int, micro_batches: int) -> list[list[Any]]:
    """Compute blocks of a class that dumps no CSV, as torch's actions."""
    stub = SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches)
    order = getattr(pipelining, kind)._get_pipeline_order(stub)
    return [[a for a in order[rank] if a is None or a.is_compute_op] for rank in range(ranks)]


def written(rows: list[list[Any]]) -> str:
    """A CSV of torch's actions."""
    return as_text([["" if a is None else str(a) for a in row] for row in rows])


def dumped(kind: str, ranks: int, chunks: int, micro_batches: int, path: Path) -> list[int]:
    """Let torch write a schedule's compute-only CSV; gives the rank of every stage."""
    mine = stages(ranks * chunks, ranks, [0] * chunks)
    schedule = getattr(pipelining, kind)(mine, micro_batches)
    schedule._dump_csv(str(path), format="compute_only")
    return [schedule.stage_index_to_group_rank[v] for v in range(ranks * chunks)]


def reads_and_writes_back(path: Path, job: JobArray) -> None:
    """Correct, and the same cells in every row."""
    schedule = pipelining_csv.read(path, job)
    assert verify(schedule) == []
    before = [[c for c in line.split(",") if c] for line in path.read_text().splitlines()]
    compact = pipelining_csv.to_csv(schedule, compact=True)
    assert [line.split(",") for line in compact.splitlines()] == before


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 3), (4, 4), (4, 9), (8, 32)])
def test_torch_single_stage_schedules(tmp_path: Path, ranks: int, micro_batches: int) -> None:
    """1F1B and GPipe in torch's words are ours, cell by cell."""
    path = tmp_path / "order.csv"
    job = JobArray([[1] * ranks], [[2] * ranks], micro_batches=micro_batches)
    path.write_text(written(single_stage_rows("ScheduleGPipe", ranks, micro_batches)))
    reads_and_writes_back(path, job)
    rows = single_stage_rows("Schedule1F1B", ranks, micro_batches)
    if str(rows[-1][ranks - 1]) != f"{ranks - 1}F0":  # torch 2.13 numbers the last rank's F from 1
        path.write_text(written(rows))
        with pytest.raises(InputError, match=f"{ranks - 1}F{micro_batches}: there is no micro-ba"):
            pipelining_csv.read(path, job)
        rows[-1] = [
            a._replace(microbatch_index=a.microbatch_index - 1) if a and "F" in str(a) else a
            for a in rows[-1]
        ]
    path.write_text(written(rows))
    reads_and_writes_back(path, job)
    assert pipelining_csv.read(path, job).sequences == one_f_one_b(job).sequences


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks", "micro_batches"),
    [
        ("ScheduleInterleaved1F1B", 4, 2, 8),
        ("ScheduleLoopedBFS", 3, 2, 5),
        ("ScheduleInterleavedZeroBubble", 4, 2, 8),
        ("ScheduleZBVZeroBubble", 4, 2, 8),
    ],
)
def test_torch_multi_stage_schedules(
    tmp_path: Path, kind: str, ranks: int, chunks: int, micro_batches: int
) -> None:
    """Files that torch dumps, with its idle cells and its line ends."""
    path = tmp_path / "order.csv"
    place = dumped(kind, ranks, chunks, micro_batches, path)
    job = JobArray(
        [[1] * len(place)], [[1] * len(place)], weight=1 if "Zero" in kind else None,
        micro_batches=micro_batches, place=place,
        microbatch_order="free" if "BFS" in kind else "fixed",  # it runs B in reverse
    )  # fmt: skip
    reads_and_writes_back(path, job)


def test_dual_pipe_v_has_overlapped_and_whole_backwards(tmp_path: Path) -> None:
    """Read with I and W for every B, F before the B that it overlaps."""
    path = tmp_path / "order.csv"
    place = dumped("ScheduleDualPipeV", 2, 2, 6, path)
    text = path.read_text()
    assert "OVERLAP_F_B" in text
    job = JobArray([[1] * 4], [[1] * 4], weight=1, micro_batches=6, place=place)
    schedule = pipelining_csv.read(path, job)
    assert verify(schedule) == []
    cells = pipelining_csv.to_csv(schedule).replace("\n", ",").split(",")
    assert len([c for c in cells if c]) == 3 * 4 * 6
    assert all(f"{v}{kind}{m}" in cells for v in range(4) for m in range(6) for kind in "FIW")


# torch's runtime


def solved(job: JobArray) -> Schedule:
    """What our solvers find in so many iterations."""
    found = optsched.solve(job, "tabu", iterations=200, time_limit=60).schedule
    assert found is not None and verify(found) == []
    return found


def launched(ranks: int, cases: list[dict[str, Any]], folder: Path) -> list[str]:
    """Lines of `pipelining_worker.py` under torchrun; a hang is killed and told."""
    request = folder / "request.json"
    request.write_text(json.dumps(cases))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), str(WORKER), str(request),
    ]  # fmt: skip
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        try:
            code: int | str = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = f"nothing within {PATIENCE} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        said = output.read()
    assert code == 0, f"torchrun ended with {code}:\n{said[-8000:]}"
    return [line for line in said.splitlines() if line.endswith(": equal")]


class Request:
    """Files in a folder, and the classes of torch that are to run them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases: list[dict[str, Any]] = []

    def add(self, schedule: Schedule, job: JobArray, *classes: str, compact: bool = False) -> None:
        """Ask for a schedule in these classes."""
        path = self.folder / f"order{len(self.cases)}.csv"
        pipelining_csv.write(schedule, path, compact=compact)
        self.cases.append({
            "csv": path.name, "place": [*job.place], "micro_batches": int(job.micro_batches[0]),
            "classes": classes, "format": "",
        })  # fmt: skip

    def all_equal(self, ranks: int) -> None:
        """Run them; every file in every class must be as exact as plain training."""
        wanted = [f"{c['csv']} {name}: equal" for c in self.cases for name in c["classes"]]
        assert launched(ranks, self.cases, self.folder) == wanted


@pytest.mark.slow
def test_gradients_on_two_processes(tmp_path: Path) -> None:
    """1F1B, found orders of unequal stages, chunks, split backwards: as plain training."""
    request = Request(tmp_path)
    job = JobArray([[1, 1]], [[2, 2]], micro_batches=5)
    request.add(one_f_one_b(job), job, "runtime", "multi")
    job = JobArray([[5, 2]], [[4, 9]], micro_batches=6, activation=1, memory=[3, 2])
    request.add(solved(job), job, "runtime", "multi")
    wrapped = JobArray([[5, 1, 2, 3]], [[4, 7, 1, 3]], micro_batches=6, place=[0, 1, 0, 1])
    request.add(solved(wrapped), wrapped, "runtime", "multi")
    split = wrapped.replace(weight=[[1, 3, 2, 4]])
    request.add(solved(split), split, "runtime", "multi")
    folded = split.replace(place=[0, 1, 1, 0])  # neighbours on one rank: the runtime only
    request.add(solved(folded), folded, "runtime")
    uneven = split.replace(place=[0, 0, 0, 1], microbatch_order="free")
    request.add(scrambled(uneven), uneven, "runtime")
    request.all_equal(2)


@pytest.mark.slow
def test_gradients_on_four_processes(tmp_path: Path) -> None:
    """The same on four, where a compact file is right in the runtime class only; torch's ZBV."""
    request = Request(tmp_path)
    job = JobArray([[1] * 4], [[2] * 4], micro_batches=7)
    request.add(one_f_one_b(job), job, "runtime", "multi")
    request.add(one_f_one_b(job), job, "runtime", compact=True)
    unequal = JobArray([[9, 2, 4, 3]], [[5, 8, 6, 2]], weight=[[4, 4, 1, 9]], micro_batches=8)
    request.add(solved(unequal), unequal, "runtime", "multi")
    free = JobArray([[1] * 8], [[2] * 8], micro_batches=4, place=[0, 1, 2, 3] * 2,
                    microbatch_order="free")  # fmt: skip
    request.add(scrambled(free), free, "runtime", "multi")
    place = dumped("ScheduleZBVZeroBubble", 4, 2, 8, tmp_path / "zbv.csv")
    zbv = JobArray([[1] * 8], [[1] * 8], weight=1, micro_batches=8, place=place)
    request.add(pipelining_csv.read(tmp_path / "zbv.csv", zbv), zbv, "runtime")
    request.all_equal(4)


def scrambled(job: JobArray) -> Schedule:
    """A random feasible order, in which micro-batches overtake each other."""
    from random import Random

    schedule = random_schedule(Random(3), job)
    rows = cells_in(pipelining_csv.to_csv(schedule))
    assert any(
        [m for kind, v, m in row if (kind, v) == ("F", 0)] != [*range(int(job.micro_batches[0]))]
        for row in rows[:1]
    )
    return schedule
