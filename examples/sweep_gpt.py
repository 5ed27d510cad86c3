"""A sweep over learning rates of a small GPT, as one job array.

python examples/sweep_gpt.py --check
torchrun --nproc-per-node 4 examples/sweep_gpt.py
optsched arraypipe run examples/sweep_gpt.py:make_trainer --steps 20

Every learning rate is a job of its own. The model is cut into stages, the blocks of all jobs are
measured and ordered by a solver, and every job ends with exactly the bits of training it alone.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optsched.arraypipe import ArrayTrainer, Job
from optsched.arraypipe.fit import schedule_for
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe import RunResult

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
STAGES = 4

# the model


@dataclass(frozen=True)
class Size:
    """Of the model; one number per argument of the command line."""

    width: int = 64
    depth: int = 6
    heads: int = 4
    context: int = 48
    tied: bool = True


class Embedding(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(256, size.width)
        self.position = nn.Embedding(size.context, size.width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Shape (batch, length) to (batch, length, width)."""
        at = torch.arange(text.shape[1], device=text.device)
        vectors: Tensor = self.token(text) + self.position(at)
        return vectors


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each behind a norm, beside a residual path."""

    def __init__(self, size: Size, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, length, width) to the same."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return torch.add(x, self.dropout(self.down(F.gelu(self.up(self.norm2(x))))))

    def attention(self, x: Tensor) -> Tensor:
        """Every position looks at itself and those before it."""
        batch, length, width = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Head(nn.Module):
    """Vectors to scores of the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.scores = nn.Linear(size.width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, length, width) to (batch, length, 256)."""
        y: Tensor = self.scores(self.norm(x))
        return y


def build_gpt(size: Size) -> nn.Sequential:
    """The whole model; `ArrayTrainer` cuts it, also if head and embedding share a weight."""
    embedding, head = Embedding(size), Head(size)
    if size.tied:
        head.scores.weight = embedding.token.weight
    return nn.Sequential(embedding, *(Block(size) for _ in range(size.depth)), head)


def next_byte_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


# the data


@cache
def corpus(file: str | None) -> Tensor:
    """Bytes of a file, or of sums in words such as ``nine plus thirty-two is forty-one.``."""
    text = Path(file).read_bytes() if file is not None else "".join(sums()).encode()
    return torch.tensor(list(text), dtype=torch.int64)


def sums() -> list[str]:
    """All sums of two numbers below fifty, shuffled."""
    small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    small += " fifteen sixteen seventeen eighteen nineteen"
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    words = small.split()
    words += [f"{ten}-{words[k]}".removesuffix("-zero") for ten in tens for k in range(10)]
    lines = [
        f"{words[a]} plus {words[b]} is {words[a + b]}.\n" for a in range(50) for b in range(50)
    ]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))
    return [lines[i] for i in order.tolist()]


def batches_of(text: Tensor, context: int) -> Callable[[Job, int], Iterator[tuple[Tensor, Tensor]]]:
    """What the trainer calls: windows that depend on the job's seed and the iteration alone."""

    def batches(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        iteration = start
        while True:
            draw = torch.Generator().manual_seed(job.key(iteration, -1, -1))
            at = torch.randint(len(text) - context - 1, (job.batch_size,), generator=draw)
            windows = torch.stack([text[i : i + context + 1] for i in at.tolist()])
            yield windows[:, :-1], windows[:, 1:]
            iteration += 1

    return batches


# the sweep


def make_trainer(
    rates: Sequence[float] = LEARNING_RATES,
    size: Size = Size(),
    *,
    stages: int = STAGES,
    batch_size: int = 8,
    text: str | None = None,
) -> ArrayTrainer:
    """One job per learning rate; all begin with the same weights and see the same batches."""
    jobs = [
        Job(
            seed=0,
            batch_size=batch_size,
            optimizer=lambda named, lr=lr: torch.optim.AdamW(named, lr=lr),
            name=f"lr{lr:g}",
            model={"size": size},
        )
        for lr in rates
    ]
    data = batches_of(corpus(text), size.context)
    return ArrayTrainer(build_gpt, data, jobs=jobs, stages=stages, loss=next_byte_loss)


def main() -> None:
    """Schedule, train, compare."""
    given = arguments()
    torch.set_num_threads(1)  # one process, one core: blocks this small gain nothing from more
    size = Size(given.width, given.depth, given.heads, given.context, not given.untied)
    trainer = make_trainer(
        given.lr, size, stages=given.stages, batch_size=given.batch_size, text=given.text
    )
    # torchrun says how many processes there are; the first one measures and solves for all
    distributed = "RANK" in os.environ
    first = os.environ.get("RANK", "0") == "0"
    say = print if first else (lambda line: None)
    schedule = schedule_for(trainer, time_limit=given.time_limit, say=say)
    say(f"training {len(trainer.jobs)} jobs for {given.steps} iterations")
    result = trainer.run(schedule, given.steps, backend="process" if distributed else "inline")
    if not first:
        return
    print(table(trainer, result))
    print(result.report)
    if given.check:
        check(trainer, result)
    given.out.mkdir(parents=True, exist_ok=True)
    schedule.write(given.out / "plan.schedule.json")
    result.trace.write(given.out / "trace.schedule.json")
    result.replay.write(given.out / "replay.schedule.json")
    print(f"wrote plan, trace and replay in {given.out}/; see: optsched show FILE")


def table(trainer: ArrayTrainer, result: RunResult) -> str:
    """Losses of all jobs, the best one marked; the last is the mean of ten iterations."""
    last = [sum(row[-10:]) / len(row[-10:]) if row else math.nan for row in result.losses]
    width = max(len(title) for title in trainer.titles)
    lines = ["", f"{'job':{width}}  status   first loss  last loss"]
    for j, (job, title) in enumerate(zip(trainer.jobs, trainer.titles, strict=True)):
        best = "  <- best" if last[j] == min(last) else ""
        first = result.losses[j][0] if result.losses[j] else math.nan
        lines.append(f"{title:{width}}  {job.status:7}  {first:10.4f}  {last[j]:9.4f}{best}")
    return "\n".join([*lines, ""])


def check(trainer: ArrayTrainer, result: RunResult) -> None:
    """Train every job alone, by plain PyTorch, and compare everything bit by bit.

    For as many iterations as it did: Ctrl-C may have ended it early.
    """
    for j, title in enumerate(trainer.titles):
        found = differences(result.trained[j], trainer.train_alone(j, len(result.losses[j])))
        if found:
            raise SystemExit(f"job {title} differs from training it alone: {found[0]}")
    print("bit-identical to training every job alone: parameters, optimizer states, losses")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lr", type=float, nargs="+", default=list(LEARNING_RATES))
    parser.add_argument("--steps", type=int, default=40, help="iterations of every job")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--stages", type=int, default=STAGES)
    for name in ("width", "depth", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size, name))
    parser.add_argument("--untied", action="store_true", help="a head with weights of its own")
    parser.add_argument("--text", help="file to learn from [default: sums in words]")
    parser.add_argument("--time-limit", type=float, default=3.0, help="of the solver, seconds")
    parser.add_argument("--check", action="store_true", help="compare with training alone")
    parser.add_argument("--out", type=Path, default=Path("out/sweep_gpt"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
