"""Is the executor right and quick on a GPU? One GPU with logical stages is enough.

    python -m benchmarks.executor.gpu_check [--part exact,memory,speed,ranks] [--cpu] [--json FILE]

Prints a row as soon as it is known and exits with 1 if a criterion fails. ``exact``: arrays against
training alone, bit by bit, with deterministic kernels and random sleeps, and with waits removed.
``memory``: peak memory, bandwidth of copies, copies hidden behind blocks. ``speed``: switches, gaps
between blocks, the predicted period. ``ranks``: two processes, where there are two GPUs.
``--cpu`` runs the same checks at small sizes on the CPU, where criteria about GPUs are not judged.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch

from benchmarks.executor.gpu_parts import PARTS, Row, Sizes, kernels
from benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LIMIT = 180.0
"""Seconds after which a check that hangs ends the script, with the stacks of all threads."""
_FIELDS = (
    "driver_version", "pcie.link.gen.current", "pcie.link.width.current", "power.limit",
    "clocks.max.sm", "mig.mode.current",
)  # fmt: skip


class Table:
    """All rows so far; the file is replaced after each, so that it is whole at any time."""

    def __init__(self, path: Path | None, head: dict[str, str]) -> None:
        self.path, self.head, self.rows = path, head, list[dict[str, Any]]()
        self.since = time.perf_counter()
        self.write()

    def add(self, part: str, row: Row) -> None:
        """Print a row and keep it."""
        took, self.since = time.perf_counter() - self.since, time.perf_counter()
        self.rows.append({"part": part, **row._asdict(), "seconds": round(took, 2)})
        mark = {True: "ok  ", False: "FAIL", None: "    "}[row.holds]
        criterion = f"   [{row.criterion}]" if row.criterion else ""
        print(f"{mark} {row.name:44} {row.value}{criterion}", flush=True)
        self.write()

    def end(self) -> int:
        """The number of criteria that have failed."""
        holds = [row["holds"] for row in self.rows]
        print(f"{holds.count(True)} criteria hold, {holds.count(False)} fail", flush=True)
        return holds.count(False)

    def write(self) -> None:
        """Replace the file."""
        if self.path is not None:
            new = self.path.with_name(f".{self.path.name}.tmp")
            new.write_text(json.dumps({"head": self.head, "rows": self.rows}, indent=1), "utf-8")
            new.replace(self.path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; 1 if one fails; `SystemExit` 2 if nothing can be run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )  # fmt: skip
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", metavar="FILE", type=Path)
    given = parser.parse_args(arguments)
    parts = list(dict.fromkeys(given.part.split(",")))
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--part: expected some of {', '.join(PARTS)}, got {', '.join(unknown)!r}")
    if not given.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU here that torch can use; --cpu checks the script itself")
    sizes = Sizes(torch.device("cuda:0"), torch.cuda.device_count())
    if given.cpu:
        torch.set_num_threads(1)
        sizes = Sizes(torch.device("cpu"), 1, tiny=True)
    try:
        table = Table(given.json, about(not given.cpu))
    except OSError as error:
        parser.error(f"--json: {error}")
    for name, value in table.head.items():
        print(f"# {name}: {value or '-'}", flush=True)
    run(table, parts, sizes)
    return int(table.end() > 0)


def run(table: Table, parts: Sequence[str], sizes: Sizes) -> None:
    """All checks of the parts, until the device is unusable."""
    try:
        for part in parts:
            for name, rows in PARTS[part](sizes):
                faulthandler.dump_traceback_later(LIMIT, exit=True, file=2)
                kernels(part in ("exact", "ranks"))
                if not checked(table, part, name, rows):
                    text = "the device cannot be used any more; later checks were not run"
                    table.add(part, Row("all others", text, "are run", False))
                    return
    finally:
        faulthandler.cancel_dump_traceback_later()


def checked(table: Table, part: str, name: str, rows: Callable[[], Iterable[Row]]) -> bool:
    """Run a check, in which an error is a failed row; False if none can be run after it."""
    usable = True
    try:
        for row in rows():
            table.add(part, row)
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=2)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        table.add(part, Row(name, text, "no error", False))
        try:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
        except RuntimeError:
            usable = False
    gc.collect()
    if usable and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return usable


def about(cuda: bool) -> dict[str, str]:
    """Date, machine, versions; what cannot be found out is empty."""
    here = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": machine("torch", "numpy").removeprefix("# "),
        "commit": _output([*here, "--exclude=*", "--abbrev=12"]),
        "CUDA": torch.version.cuda or "",
        "cuDNN": str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
    }
    if cuda:
        gpu = torch.cuda.get_device_properties(0)
        size = f"{gpu.multi_processor_count} SMs, {gpu.total_memory / 2**30:.1f} GiB"
        query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
        values = _output([*query, f"--id=GPU-{gpu.uuid}"]).split(",")
        found["GPU"] = f"{torch.cuda.device_count()} x {gpu.name}, {size}"
        found |= {k: v.strip() for k, v in zip(_FIELDS, values, strict=False)}
    return found


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
