"""One rank of torch's pipelining runtime: trains by the CSV files of a request, under torchrun.

``torchrun --nproc-per-node N pipelining_worker.py request.json``. Every rank loads every file into
every class asked for, runs one step in float64, and compares losses and gradients of its stages
with plain training of the whole model. The first difference ends the process with a sentence.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime

WIDTH, ROWS = 6, 3
CLASSES = {"runtime": _PipelineScheduleRuntime, "multi": PipelineScheduleMulti}


def main() -> None:
    """Run every case of the request; rank 0 prints a line for each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    request = Path(sys.argv[1])
    for case in json.loads(request.read_text()):
        for name in case["classes"]:
            check(case, name, request.parent)
            if dist.get_rank() == 0:
                print(f"{case['csv']} {name}: equal", flush=True)
    dist.destroy_process_group()


def check(case: dict[str, Any], name: str, folder: Path) -> None:
    """Losses and gradients of one pipeline step against plain training."""
    n, place = case["micro_batches"], case["place"]
    stages = layers(len(place))
    x, y = batch(n)
    mine = [v for v, rank in enumerate(place) if rank == dist.get_rank()]
    like = torch.zeros(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    parts = [
        PipelineStage(stages[v], v, len(place), torch.device("cpu"), input_args=(like,),
                      output_args=(like,))
        for v in mine
    ]  # fmt: skip
    schedule = CLASSES[name](parts, n, loss_fn=torch.nn.functional.mse_loss)
    more = {"format": case["format"]} if case.get("format") else {}
    schedule._load_csv(str(folder / case["csv"]), **more)
    losses: list[torch.Tensor] = []
    target = {"target": y} if mine and mine[-1] == len(place) - 1 else {}
    schedule.step(*([x] if 0 in mine else []), losses=losses, **target)
    expected_losses, expected = plain(len(place), n)
    what = f"{case['csv']}, {name}, rank {dist.get_rank()}"
    if target:
        close(f"{what}: losses", torch.stack(losses).detach(), expected_losses)
    for v in mine:
        for key, parameter in stages[v].named_parameters():
            if parameter.grad is None:
                raise SystemExit(f"{what}: stage {v}: {key} has no gradient")
            close(f"{what}: stage {v}: gradient of {key}", parameter.grad, expected[v][key])


def plain(n_stages: int, n: int) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Loss of every micro-batch and gradients of every stage without a pipeline."""
    stages = layers(n_stages)
    x, y = batch(n)
    losses = []
    for part, target in zip(x.chunk(n), y.chunk(n), strict=True):
        loss = torch.nn.functional.mse_loss(torch.nn.Sequential(*stages)(part), target)
        (loss / n).backward()
        losses.append(loss.detach())
    grads = [{key: p.grad for key, p in stage.named_parameters()} for stage in stages]
    return torch.stack(losses), grads  # type: ignore[return-value]


def layers(n_stages: int) -> list[torch.nn.Module]:
    """The stages, the same weights on every rank."""
    torch.manual_seed(1)
    return [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()
        for _ in range(n_stages)
    ]


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of n micro-batches, the same on every rank."""
    torch.manual_seed(2)
    x, y = torch.randn(2, n * ROWS, WIDTH, dtype=torch.float64)
    return x, y


def close(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of sums: a relative 1e-12 of float64."""
    if not torch.allclose(got, expected, rtol=1e-12, atol=1e-15):
        raise SystemExit(f"{what}: differs by {(got - expected).abs().max()}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group
