"""Is the executor right and quick on a GPU? One GPU with logical stages is enough.

    python -m benchmarks.executor.gpu_check [--part memory,exact,speed,ranks] [--cpu] [--json FILE]

Prints a row as soon as it is known and exits with 1 if a criterion fails. ``memory``: peak memory,
bandwidth of the copy engine, copies hidden behind blocks. ``exact``: arrays against training alone,
bit by bit, with deterministic kernels and random sleeps. ``speed``: switches, the predicted period,
what an array gains. ``ranks``: two processes on one GPU, and over NCCL where there are two.
``--cpu`` runs the same checks at small sizes on the CPU, where criteria about GPUs are not judged.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# read when CUDA starts: fixed workspaces (several streams), and queues for as many streams
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from torch.distributed import is_nccl_available

from benchmarks.executor.gpu_cases import Row, Sizes, kernels, small
from benchmarks.executor.gpu_exact import exactness
from benchmarks.executor.gpu_memory import memory
from benchmarks.executor.gpu_ranks import ranks
from benchmarks.executor.gpu_speed import speed
from benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchmarks.executor.gpu_cases import Check

PARTS = {"memory": memory, "exact": exactness, "speed": speed, "ranks": ranks}
LIMIT = 180.0
"""Seconds after which a check that hangs ends the script, with the stacks of all threads."""
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
_FIELDS = (
    "driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
    "power.limit", "clocks.max.sm", "mig.mode.current", "ecc.mode.current",
)  # fmt: skip
_NOW = ("clocks.sm", "power.draw", "temperature.gpu", "pcie.link.gen.current")


class Table:
    """All rows so far; the file is replaced after each, so that it is whole at any time."""

    def __init__(self, path: Path | None, head: dict[str, str]) -> None:
        self.path, self.head, self.running = path, head, ""
        self.rows: list[dict[str, Any]] = []
        self.warnings: dict[str, str] = {}  # and the check that gave them first
        self.since = time.perf_counter()
        self.write()

    def begin(self, part: str, check: str) -> None:
        """Note what is running: if the script ends here, it was this."""
        self.running, self.since = f"{part}: {check}", time.perf_counter()
        self.write()

    def add(self, part: str, row: Row) -> None:
        """Print a row and keep it."""
        took, self.since = time.perf_counter() - self.since, time.perf_counter()
        self.rows.append({"part": part, **row._asdict(), "seconds": round(took, 2)})
        mark = {True: "ok  ", False: "FAIL", None: "    "}[row.holds]
        wanted = f"   [{row.wanted}]" if row.wanted else ""
        print(f"{mark} {row.name:50} {row.value}{wanted}", flush=True)
        self.write()

    def end(self) -> int:
        """How many criteria have failed."""
        for text, check in self.warnings.items():
            print(f"warning ({check}): {text}", file=sys.stderr)
        holds = [row["holds"] for row in self.rows]
        print(f"{holds.count(True)} criteria hold, {holds.count(False)} fail", flush=True)
        self.write()
        return holds.count(False)

    def write(self) -> None:
        """Replace the file."""
        if self.path is None:
            return
        said = {key: vars(self)[key] for key in ("head", "rows", "running", "warnings")}
        new = self.path.with_name(f".{self.path.name}.tmp")
        try:
            new.write_text(json.dumps(said, indent=1), encoding="utf-8")
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; 1 if one fails, 130 after Ctrl-C; `SystemExit` 2 if nothing can be run."""
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
        parser.error("there is no GPU that torch can use; --cpu checks the script itself")
    sizes = Sizes(torch.device("cuda:0"), torch.cuda.device_count())
    if given.cpu:
        torch.set_num_threads(1)
        sizes = small(torch.device("cpu"))
    if given.json is not None and given.json.exists() and not given.json.is_file():
        parser.error(f"--json: {given.json} is no file")
    try:
        table = Table(given.json, about(not given.cpu))
    except (OSError, ValueError) as error:
        parser.error(f"--json: {error}")
    for name, value in table.head.items():
        print(f"# {name}: {value or '-'}", flush=True)
    # a run of the product would take the first Ctrl-C as a wish to end its iterations
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        run(table, parts, sizes)
    except KeyboardInterrupt:
        table.end()
        return 130
    finally:
        signal.signal(signal.SIGINT, before)
    return int(table.end() > 0)


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def run(table: Table, parts: Sequence[str], sizes: Sizes) -> None:
    """All checks of the parts, until the device is unusable."""
    clocks: list[Check] = [("clock", clock)] if sizes.cuda else []
    try:
        for k, part in enumerate(parts):
            for name, rows in (*clocks[: k == 0], *PARTS[part](sizes), *clocks):
                table.begin(part, name)
                faulthandler.dump_traceback_later(LIMIT, exit=True, file=2)
                kernels(part in ("exact", "ranks"))
                if not checked(table, part, name, rows):
                    sentence = "the device can do nothing more; the checks behind this were not run"
                    table.add(part, Row("all others", sentence, "are run", False))
                    return
        table.running = ""
    finally:  # or whoever has called this would be ended later
        faulthandler.cancel_dump_traceback_later()


def checked(table: Table, part: str, name: str, rows: Callable[[], Iterable[Row]]) -> bool:
    """Run a check; False if none can be run behind it."""
    usable = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for row in rows():
                table.add(part, row)
                faulthandler.dump_traceback_later(LIMIT, exit=True, file=2)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            table.add(part, Row(name, said, "no error", False))
            usable = works()
    for sentence in (str(message.message) for message in told):
        table.warnings.setdefault(sentence, table.running)
        if "AccumulateGrad node's stream" in sentence:  # said once in a process
            table.add(part, Row(name, sentence.partition(". ")[0], "no such warning", False))
    gc.collect()
    if usable and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return usable


def works() -> bool:
    """Whether the GPU, if one is used, still computes: after some errors it does not any more."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def about(cuda: bool) -> dict[str, str]:
    """Date, machine, versions and flags; what cannot be found out is empty."""
    here = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": machine("torch", "numpy").removeprefix("# "),
        "commit": _said([*here, "--exclude=*", "--abbrev=12"]),
        "CUDA": torch.version.cuda or "",
        "cuDNN": str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
        "flags": "deterministic kernels in exact and ranks, TF32 off unless a row says so",
        **{name: os.environ.get(name, "") for name in _VARIABLES},
    }
    if cuda:
        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "GPU": f"{torch.cuda.device_count()} x {gpu.name}, {gpu.multi_processor_count} SMs, "
            f"{gpu.total_memory / 2**30:.1f} GiB",
            "NCCL": str(torch.cuda.nccl.version()) if is_nccl_available() else "",  # type: ignore[no-untyped-call]
            **nvidia_smi(_FIELDS),
        }  # fmt: skip
    return found


def clock() -> Iterator[Row]:
    """What `nvidia-smi` says while the GPU multiplies matrices."""
    x = torch.randn(8192, 8192, device="cuda:0")
    for _ in range(50):  # a second
        torch.mm(x, x)
    yield Row("SM clock, power, temperature, PCIe generation", ", ".join(nvidia_smi(_NOW).values()))
    torch.cuda.synchronize()


def nvidia_smi(fields: Sequence[str]) -> dict[str, str]:
    """What the driver says about the first GPU; nothing if it cannot be asked."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    for gpu in (f"GPU-{torch.cuda.get_device_properties(0).uuid}", "0"):
        said = [value.strip() for value in _said([*asked, f"--id={gpu}"]).split(",")]
        if len(said) == len(fields):
            return dict(zip(fields, said, strict=True))
    return {}


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
