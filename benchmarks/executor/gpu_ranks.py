"""Two processes that train an array together, on one GPU or on two, against the jobs alone.

``python -m benchmarks.executor.gpu_ranks FOLDER WAY RANK`` is one of them. `WAY` is ``gloo``
(CPUs), ``staged`` (one GPU, messages staged through the host's memory, because NCCL refuses two
ranks on one GPU), or ``NCCL`` (a GPU each).
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.executor import gpu_exact
from benchmarks.executor.gpu_cases import STAGES, Check, Row, Sizes, kernels, small
from benchmarks.executor.staged_group import StagedLinks
from optsched import InputError
from optsched.arraypipe.distributed import ranks as run_of_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LIMIT = 120.0
"""Seconds for the whole of one way; a rank that is still there then is killed."""
_RANKS = 2
_PLACE = [0, 1, 0, 1]


def ranks(sizes: Sizes) -> list[Check]:
    """Over the groups that this host has GPUs for."""
    ways = ["staged"] + ["NCCL"] * (sizes.gpus > 1) if sizes.cuda else ["gloo"]
    return [(f"ranks, {way}", partial(started, way)) for way in ways]


def started(way: str) -> Iterator[Row]:
    """The rows of rank 0 as they come; another one if a rank fails, or does not end in time."""
    with TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        (folder / "rows").touch()
        processes = []
        for rank in range(_RANKS):
            log = stack.enter_context((folder / f"log{rank}").open("w"))
            processes.append(
                subprocess.Popen(
                    command(folder, way, rank), stdout=log, stderr=log,
                    env={**os.environ, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(_RANKS)},
                    cwd=Path(__file__).parents[2],
                )
            )  # fmt: skip
            stack.callback(_end, processes[-1])
        rows = stack.enter_context((folder / "rows").open())
        until = time.monotonic() + LIMIT
        codes: list[int | None] = [None] * _RANKS
        while None in codes and time.monotonic() < until:
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
            if any(codes):  # the other has seconds to say what it sees
                until = min(until, time.monotonic() + 10)
            for line in iter(rows.readline, ""):
                yield Row(*json.loads(line))
        for rank, code in enumerate(codes):
            if code != 0:
                said = (folder / f"log{rank}").read_text().strip().split("\n")
                print(f"rank {rank}:", *said[-40:], sep="\n", file=sys.stderr)
                how = "did not end in time" if code is None else f"ended with {code}"
                yield Row(f"{way}: rank {rank}", f"{how}; {said[-1]:.300}", "ends with 0", False)


def command(folder: Path, way: str, rank: int) -> list[str]:
    """What starts a rank."""
    return [sys.executable, "-m", __name__, str(folder), way, str(rank)]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def links(timeout: float, devices: object) -> StagedLinks:
    """As `optsched.arraypipe.distributed.ranks.links` makes them, for two ranks on one GPU."""
    return StagedLinks(timeout, torch.device("cuda", 0))


def main(arguments: Sequence[str]) -> None:
    """One rank; rank 0 writes the rows."""
    folder, way, rank = Path(arguments[0]), arguments[1], int(arguments[2])
    faulthandler.dump_traceback_later(LIMIT - 10, exit=True)
    sizes = Sizes(torch.device("cuda", 0))
    if way == "gloo":
        torch.set_num_threads(1)
        sizes = small(torch.device("cpu"))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    slots = gpu_exact.slotted(sizes)
    # of tiny states less is left beside the messages
    room = int(sizes.of(2.75, 5) * gpu_exact.state_bytes(sizes, slots))
    chosen = [case for case in gpu_exact.cases(sizes) if case.name in gpu_exact.SOME]
    taken = [0]  # by communicators and kernels, as the runs before have measured it
    made = links if way == "staged" else run_of_ranks.links

    def watched(*given: Any) -> Any:
        found = made(*given)
        taken.append(found.taken)
        return found

    devices = None if way == "NCCL" else [sizes.device] * STAGES
    with ExitStack() as stack, (folder / "rows").open("a") as rows:
        kernels(True)
        stack.enter_context(patch.object(run_of_ranks, "links", watched))
        for case in (*chosen, slots):
            if case is slots:
                case = slots._replace(how={"memory": gpu_exact.limit(room + max(taken), sizes, 1)})
            here = case._replace(how={**case.how, "devices": devices})
            row = _row(sizes, here, f"{_RANKS} ranks over {way}, {case.name}")
            if rank == 0:
                rows.write(json.dumps(row) + "\n")
                rows.flush()
    dist.destroy_process_group()


def _row(sizes: Sizes, case: gpu_exact.Case, name: str) -> Row:
    run: dict[str, Any] = {"place": _PLACE, "backend": "process", "timeout": 30.0}
    try:
        with gpu_exact.copied() as moved:
            found = gpu_exact.found_in(sizes, case, range(sizes.of(3, 2)), **run)
    except InputError as error:  # on all ranks alike
        return Row(name, str(error).splitlines()[0], "is trained", False)
    note = f", {moved['in'] / 2**20:.1f} MiB copied in" if moved["in"] else ""
    return gpu_exact.equal(name, found, note)


if __name__ == "__main__":
    code = 1
    try:
        main(sys.argv[1:])
        code = 0
    except Exception:
        traceback.print_exc()
    finally:  # threads of gloo can hold up an interpreter that ends
        sys.stderr.flush()
        os._exit(code)
