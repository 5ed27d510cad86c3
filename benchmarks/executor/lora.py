"""Time and memory of n LoRA adapters: one after the other, as an array, and in processes.

python benchmarks/executor/lora.py --adapters 8

Every mode runs in fresh processes with one thread each. `alone` trains the adapters one after the
other in a loop of PyTorch; `array` trains them as siblings in two stages in one process; `ranks`
in two processes with a stage each; `copies` is one process per adapter, two at a time. `merged`
is one forward of the base for the batches of all adapters, whose matrices are stacked (written
here, since PEFT takes `adapter_names` only in evaluation mode): losses equal those of `alone` to
rounding, as sums of float32 are in another order.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from lora_siblings import adapted, rows, save_base

from optsched.arraypipe import ArrayTrainer, Callback, Job, RunConfig

BATCH, LENGTH = 4, 16


class Clock(Callback):
    """Times of the ends of iterations."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Note it."""
        self.ends.append(time.perf_counter())


def adam(named: Any) -> torch.optim.Optimizer:
    """AdamW of the adapter."""
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-3)


def alone(base: Path, adapters: int, steps: int) -> float:
    """Seconds per iteration of an adapter."""
    data, spent = rows(Path(__file__).read_text(), LENGTH), []
    for k in range(adapters):
        torch.manual_seed(k)
        model = adapted(base)
        optimizer = adam(model.named_parameters())
        for t in range(steps):
            start = time.perf_counter()
            piece = [data[(t * BATCH + i) % len(data)] for i in range(BATCH)]
            batch = {key: torch.stack([row[key] for row in piece]) for key in piece[0]}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            spent.append(time.perf_counter() - start)
    return sorted(spent)[len(spent) // 2]


def merged(base: Path, adapters: int, steps: int) -> float:
    """The same with the adapters' matrices stacked; no dropout, one AdamW for all."""
    data, spent = rows(Path(__file__).read_text(), LENGTH), []
    stacks: list[torch.nn.Parameter] = []
    model: Any = None
    for k in range(adapters):
        torch.manual_seed(k)
        model = adapted(base)
        trained = [p for _, p in model.named_parameters() if p.requires_grad]
        if not stacks:
            stacks = [torch.nn.Parameter(p.new_empty(adapters, *p.shape)) for p in trained]
        for stack, p in zip(stacks, trained, strict=True):
            stack.data[k] = p.data
    pairs = zip(stacks[::2], stacks[1::2], strict=True)  # A and B of every layer, in order
    base_model = model.unload()
    layers = [
        part for name, part in base_model.named_modules() if name.endswith(("q_proj", "v_proj"))
    ]
    for layer, (down, up) in zip(layers, pairs, strict=True):

        def add(_: Any, given: Any, out: Any, down: Any = down, up: Any = up) -> Any:
            hidden = given[0].view(adapters, -1, given[0].shape[-1])
            change = hidden @ down.transpose(1, 2) @ up.transpose(1, 2)
            return out + change.view(out.shape)

        layer.register_forward_hook(add)
    optimizer = torch.optim.AdamW(stacks, lr=1e-3)
    for t in range(steps):
        start = time.perf_counter()
        piece = [data[(t * BATCH + i) % len(data)]["input_ids"] for i in range(BATCH)]
        tokens = torch.stack(piece).repeat(adapters, 1)
        logits = base_model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) * adapters
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        spent.append(time.perf_counter() - start)
    return sorted(spent)[len(spent) // 2] / adapters


def array(base: Path, adapters: int, steps: int) -> float:
    """The same of siblings; the first iterations are not counted."""
    jobs, clock = [Job(k, BATCH, adam) for k in range(adapters)], Clock()
    trainer = ArrayTrainer(lambda: adapted(base), rows(Path(__file__).read_text(), LENGTH), 2)
    config = RunConfig(verbose=False, check=0)
    trainer.fit(jobs, steps, callbacks=[clock], config=config)
    counted = clock.ends[adapters:]
    return (counted[-1] - counted[0]) / (len(counted) - 1) if counted else 0.0


def child(mode: str, base: Path, adapters: int, steps: int) -> None:
    """Print what one process has measured."""
    torch.set_num_threads(1)
    modes = {"alone": alone, "merged": merged}
    seconds = modes.get(mode, array)(base, adapters, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("measured", json.dumps([os.environ.get("RANK", "0"), seconds, peak]))


def run(mode: str, base: Path, adapters: int, steps: int) -> tuple[float, float]:
    """Seconds per iteration of an adapter, and MiB of all processes at their peaks."""
    command = [sys.executable]
    if mode == "ranks":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    how = "alone" if mode == "copies" else mode
    command += [__file__, "--child", how, "--base", str(base), "--steps", str(steps)]
    command += ["--adapters", str(1 if mode == "copies" else adapters)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    n = 2 if mode == "copies" else 1
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(n)
    ]
    found = []
    for process in started:
        text, _ = process.communicate()
        found += [json.loads(line[9:]) for line in text.splitlines() if line[:8] == "measured"]
    seconds = max(row[1] for row in found)
    return seconds / n, sum(row[2] for row in found)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--child")
    parser.add_argument("--base", type=Path)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.base, given.adapters, given.steps)
        return
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "peft"))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {versions}")
    with tempfile.TemporaryDirectory() as folder:
        base = save_base(Path(folder), given.width, given.depth)
        size = (base / "model.safetensors").stat().st_size / 2**20
        form = f"batches of {BATCH} x {LENGTH}"
        print(f"base {size:.0f} MiB, {given.adapters} adapters of rank 8, {form}")
        print("mode    adapters  ms an iteration  MiB of all processes")
        for mode in ("alone", "array", "ranks", "merged", "copies"):
            for n in (1, given.adapters) if mode in ("alone", "array") else (given.adapters,):
                seconds, peak = run(mode, base, n, given.steps)
                print(f"{mode:8s}{n:8d}{1e3 * seconds:17.1f}{peak:22.0f}", flush=True)


if __name__ == "__main__":
    main()
