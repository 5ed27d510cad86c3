"""Is the executor right and quick on a GPU? One GPU with logical stages is enough.

    python -m benchmarks.executor.gpu_check [--part exact,speed,memory] [--cpu] [--json FILE]

Prints a table and exits with 1 if a criterion fails. ``exact``: arrays against training alone, bit
by bit, with deterministic kernels. ``speed``: switches, the predicted period, and what an array
gains over sequential training and over one pipelined job at a time. ``memory``: bandwidth of the
copy engine against a plain copy, hidden copies, peak memory. ``--cpu`` runs the same checks at
small sizes on the CPU, where criteria of speed are not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING

# read when CUDA starts: fixed workspaces (several streams), and queues for as many streams
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

from benchmarks.executor.gpu_cases import Row, Sizes, small
from benchmarks.executor.gpu_exact import exactness
from benchmarks.executor.gpu_memory import memory
from benchmarks.executor.gpu_speed import speed
from benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = {"exact": exactness, "speed": speed, "memory": memory}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; 1 if one of them fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(arguments)
    unknown = [part for part in given.part.split(",") if part not in PARTS]
    if unknown:
        parser.error(f"--part: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if not given.cpu and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --cpu checks the script itself", file=sys.stderr)
        return 2
    sizes = small(torch.device("cpu")) if given.cpu else Sizes(torch.device("cuda:0"))
    where = "CPU" if given.cpu else torch.cuda.get_device_name(0)
    print(f"{machine('torch', 'numpy')}, {where}, CUDA {torch.version.cuda}", flush=True)
    if given.cpu:
        torch.set_num_threads(1)
    found = []
    for part in given.part.split(","):
        exact_kernels(part == "exact")
        began = time.perf_counter()
        for row in PARTS[part](sizes):
            found.append({"part": part, **row._asdict()})
            print(line(row), flush=True)
        print(f"     ({part}: {time.perf_counter() - began:.0f} s)", flush=True)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as stream:
            json.dump({"device": where, "torch": str(torch.__version__), "rows": found}, stream)
    good, failed = (sum(row["holds"] is wanted for row in found) for wanted in (True, False))
    print(f"{good} criteria hold, {failed} fail")
    return int(failed > 0)


def exact_kernels(on: bool) -> None:
    """Kernels that give the same bits twice; for times those that torch chooses itself."""
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = on
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def line(row: Row) -> str:
    """A row of the table."""
    mark = {True: "ok  ", False: "FAIL", None: "    "}[row.holds]
    wanted = f"   [{row.wanted}]" if row.wanted else ""
    return f"{mark} {row.name:44} {row.value}{wanted}"


if __name__ == "__main__":
    sys.exit(main())
