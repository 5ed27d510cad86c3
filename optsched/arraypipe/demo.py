"""Four small language models trained as a job array on the CPU, and compared with each alone."""

from __future__ import annotations

import argparse
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from optsched.arraypipe.advice.advise import advise
from optsched.arraypipe.cli.output import made_folder
from optsched.arraypipe.fit import schedule_for
from optsched.arraypipe.job import Job
from optsched.arraypipe.report.gantt_text import gantt_text
from optsched.arraypipe.train_alone import NotIdentical, differences
from optsched.arraypipe.trainer import ArrayTrainer
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.arraypipe.profile.document import Profile
    from optsched.arraypipe.training_run import RunResult
    from optsched.model.schedule import Schedule

WIDTH: Final = 64
CONTEXT: Final = 48
N_BLOCKS: Final = 6
CUTS: Final = (2, 4, 6)  # (embedding, block 0), (1, 2), (3, 4), (5, head)


class Embedding(nn.Module):
    """Bytes and positions to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, text: Tensor) -> Tensor:
        """Shape (batch, context) to (batch, context, width)."""
        vectors: Tensor = self.dropout(self.token(text) + self.position)
        return vectors


class TransformerBlock(nn.Module):
    """Causal self-attention and a two-layer network, both with dropout and a residual path."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, context, width) to the same."""
        batch, length, _ = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(x.shape)))
        return torch.add(y, self.dropout(self.mlp(self.norm2(y))))


def build_model() -> nn.Sequential:
    """A byte-level language model of `N_BLOCKS` transformer blocks."""
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    return nn.Sequential(Embedding(), *(TransformerBlock() for _ in range(N_BLOCKS)), head)


def next_byte_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batches(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of the corpus, drawn by (job seed, iteration) alone."""
    corpus = _corpus()
    for iteration in range(start, 2**31):
        draw = torch.Generator().manual_seed(job.key(iteration, -1, -1))
        at = torch.randint(len(corpus) - CONTEXT - 1, (job.batch_size,), generator=draw)
        windows = torch.stack([corpus[i : i + CONTEXT + 1] for i in at.tolist()])
        yield windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class DemoJob:
    """Settings of one sibling."""

    batch_size: int
    optimizer: str
    lr: float
    microbatches: int = 1
    recompute: bool = False

    def job(self, seed: int) -> Job:
        """The job with these settings."""
        makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "AdamW": lambda named: torch.optim.AdamW(named, lr=self.lr),
            "SGD": lambda named: torch.optim.SGD(named, lr=self.lr, momentum=0.9),
        }
        return Job(
            seed=seed,
            batch_size=self.batch_size,
            optimizer=makers[self.optimizer],
            microbatches=self.microbatches,
            recompute=self.recompute,
        )


SIBLINGS: Final = (
    DemoJob(4, "AdamW", 2e-3),
    DemoJob(8, "AdamW", 3e-3, recompute=True),
    DemoJob(8, "SGD", 1e-1),
    DemoJob(16, "AdamW", 1e-3, microbatches=2),
)


@dataclass(frozen=True, eq=False)
class DemoResult:
    """Outcome of the demo; `str` gives the table.

    `profile` is None if the caller brought the schedule; `seconds` are those of the run as an
    array and of the jobs one after the other alone.
    """

    jobs: tuple[DemoJob, ...]
    steps: int
    schedule: Schedule
    profile: Profile | None
    result: RunResult
    seconds: tuple[float, float]

    @property
    def story(self) -> str:
        """Everything the demo has to tell: chart, report, advice, and the table of jobs."""
        chapters = {
            "the run, as parallel devices would have done it": self._chart(),
            "where the time went": str(self.result.report),
        }
        if self.profile is not None:
            chapters["how else these jobs could be trained"] = str(advise(self.profile))
        chapters["the jobs"] = str(self)
        return "\n\n".join(f"== {title}\n{text}" for title, text in chapters.items())

    def _chart(self) -> str:
        """Two cycles from the middle of the replay, or all of a short one."""
        replay, period = self.result.replay, self.result.report.period
        begin, end = 0, max(1, replay.makespan)
        if period is not None and period.replayed is not None and period.cycles > 4:
            begin = end // 2
            end = begin + max(1, round(2 * period.replayed))
        return gantt_text(replay, begin, end)

    def __str__(self) -> str:
        lines = ["job  batch  parts  optimizer  lr      steps  first loss  last loss  weights"]
        for j, (job, losses) in enumerate(zip(self.jobs, self.result.losses, strict=True)):
            name = job.optimizer + ("*" if job.recompute else "")
            lines.append(
                f"{j:<3}  {job.batch_size:<5}  {job.microbatches:<5}  {name:<9}  {job.lr:<6g}  "
                f"{self.steps:<5}  {losses[0]:<10.4f}  {losses[-1]:<9.4f}  bit-identical"
            )
        lines.append("(* recomputes its activations; every job compared with training it alone)")
        return "\n".join(lines)


def demo_trainer() -> ArrayTrainer:
    """The four siblings in four stages."""
    jobs = [sibling.job(seed) for seed, sibling in enumerate(SIBLINGS)]
    return ArrayTrainer(build_model, batches, jobs=jobs, stages=CUTS, loss=next_byte_loss)


def run_demo(
    out: Path | None = None,
    steps: int = 60,
    *,
    schedule: Schedule | None = None,
    time_limit: float = 2.0,
    say: Callable[[str], object] = lambda line: None,
) -> DemoResult:
    """Measure, solve, train by the schedule, train alone, compare.

    Parameters
    ----------
    out
        Folder for ``demo.schedule.json``, the plan; ``measured.schedule.json``, the serial run as a
        schedule document; ``replay.schedule.json``, the same blocks as parallel devices would have
        run them, also as a page ``replay.html`` and for Perfetto as ``replay.trace.json``; and
        ``demo.profile.json``.
    steps
        Iterations of every job.
    schedule
        A schedule of your own for these jobs (4 jobs, 4 stages, micro-batches 1, 1, 1, 2) instead
        of measuring and solving.
    time_limit
        Seconds for the solver.
    say
        Called with a line of progress.

    Raises
    ------
    InputError
        The schedule does not fit these jobs, or `out` cannot be written.
    NotIdentical
        A tensor differs from training alone by a bit.
    KeyboardInterrupt
        Ctrl-C; the jobs have ended their iteration.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps: expected an integer >= 1, got {steps!r}")
    with made_folder(None if out is None else Path(out)), _one_thread():
        return _demo(out, steps, schedule, time_limit, say)


def _demo(
    out: Path | None,
    steps: int,
    schedule: Schedule | None,
    time_limit: float,
    say: Callable[[str], object],
) -> DemoResult:
    trainer = demo_trainer()
    if schedule is None:
        schedule = schedule_for(trainer, time_limit=time_limit, say=say)
    plan = trainer.plan(schedule)
    say(f"training {len(trainer.jobs)} jobs by the schedule")
    began = time.perf_counter()
    result = trainer.run(plan, steps)
    if any(job.status == "stopped" for job in trainer.jobs):  # by Ctrl-C: nothing to compare
        raise KeyboardInterrupt
    middle = time.perf_counter()
    say("training every job alone")
    found = [
        f"job {j}: {sentence}"
        for j in range(len(trainer.jobs))
        for sentence in differences(result.trained[j], trainer.train_alone(j, steps))
    ]
    seconds = (middle - began, time.perf_counter() - middle)
    if found:
        raise NotIdentical(f"{len(found)} differences from training alone; the first: {found[0]}")
    demo = DemoResult(SIBLINGS, steps, schedule, trainer.last_profile, result, seconds)
    if out is not None:
        _write(demo, Path(out))
    return demo


def _write(demo: DemoResult, out: Path) -> None:
    from optsched.formats import perfetto
    from optsched.plots.html import write as write_page

    demo.schedule.write(out / "demo.schedule.json")
    demo.result.trace.write(out / "measured.schedule.json")
    demo.result.replay.write(out / "replay.schedule.json")
    write_page(demo.result.replay, out / "replay.html")
    perfetto.write(demo.result.replay, out / "replay.trace.json")
    if demo.profile is not None:
        demo.profile.write(out / "demo.profile.json")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Blocks this small gain nothing from a second thread, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def _corpus() -> Tensor:
    """Sums such as ``17+25=42`` as bytes, in a fixed order."""
    lines = [f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100)]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor(list("".join(lines[i] for i in order).encode()), dtype=torch.int64)


def main() -> None:
    """``python -m optsched.arraypipe.demo [--out DIR] [--steps N]``."""
    words = argparse.ArgumentParser(prog="python -m optsched.arraypipe.demo")
    words.add_argument("--out", type=Path, help="folder for the schedule documents")
    words.add_argument("--steps", type=int, default=60, help="iterations of every job")
    given = words.parse_args()
    try:
        print(run_demo(given.out, given.steps, say=print).story)
    except InputError as error:
        words.error(str(error))


if __name__ == "__main__":
    main()
