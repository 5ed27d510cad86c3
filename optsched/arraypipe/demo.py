"""Four small language models trained as a job array on the CPU, and compared with each alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch.optim import SGD, AdamW

from optsched.arraypipe.advice import advise
from optsched.arraypipe.cli.output import check_folder
from optsched.arraypipe.fit import schedule_for
from optsched.arraypipe.job import Job
from optsched.arraypipe.tiny_gpt import Size, build_gpt, corpus, next_byte_loss, windows
from optsched.arraypipe.train_alone import NotIdentical, differences
from optsched.arraypipe.trainer import ArrayTrainer
from optsched.io.text import aligned
from optsched.io.values import integer

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.profile.document import Profile
    from optsched.arraypipe.training_run import RunResult
    from optsched.model.schedule import Schedule

SIZE: Final = Size(tied=False)
CUTS: Final = (2, 4, 6)  # (embedding, block 0), (1, 2), (3, 4), (5, head)


def demo_jobs() -> list[Job]:
    """The four siblings: other seeds, batches, optimizers, micro-batches, with recomputation."""
    return [
        Job(0, 4, partial(AdamW, lr=2e-3), name="adamw-2e-3"),
        Job(1, 8, partial(AdamW, lr=3e-3), name="adamw-3e-3", recompute=True),
        Job(2, 8, partial(SGD, lr=0.1, momentum=0.9), name="sgd-0.1"),
        Job(3, 16, partial(AdamW, lr=1e-3), name="adamw-1e-3", microbatches=2),
    ]


@dataclass(frozen=True, eq=False)
class DemoResult:
    """Outcome of the demo; `str` gives the table of jobs, `story` everything."""

    jobs: tuple[Job, ...]
    schedule: Schedule
    profile: Profile | None  # None if the caller brought the schedule
    result: RunResult

    @property
    def story(self) -> str:
        """Chart, report, advice, and the table of jobs."""
        from optsched.plots.gantt_chart import gantt_text

        trace, period_ns = self.result.trace, self.result.report.measured_ns
        begin, end = 0, max(1, trace.makespan)
        if period_ns is not None and end > 4 * period_ns:
            begin = end // 2  # two cycles from the middle
            end = begin + max(1, round(2 * period_ns))
        chapters = {
            "the run": gantt_text(trace, begin, end),
            "where the time went": str(self.result.report),
        }
        if self.profile is not None:
            chapters["how else these jobs could be trained"] = str(advise(self.profile))
        chapters["the jobs"] = str(self)
        return "\n\n".join(f"== {title}\n{text}" for title, text in chapters.items())

    def __str__(self) -> str:
        rows = [["job", "batch", "micro-batches", "first loss", "last loss", "weights"]]
        for job, losses in zip(self.jobs, self.result.losses, strict=True):
            sizes = [f"{job.name}{'*' * job.recompute}", str(job.batch_size), str(job.microbatches)]
            rows.append([*sizes, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", "bit-identical"])
        note = "(* recomputes its activations; every job compared with training it alone)"
        return "\n".join([*aligned(rows), note])

    def write(self, out: Path) -> None:
        """Write the plan, and the run as a document, as a page and for Perfetto."""
        from optsched.formats import perfetto
        from optsched.plots.html import write as write_page

        trace = self.result.trace
        out.mkdir(parents=True, exist_ok=True)
        self.schedule.write(out / "demo.schedule.json")
        trace.write(out / "measured.schedule.json")
        write_page(trace, out / "measured.html")
        perfetto.write(trace, out / "measured.trace.json")
        if self.profile is not None:
            self.profile.write(out / "demo.profile.json")


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
        Folder for what `DemoResult.write` writes.
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
    integer("steps", steps, 1)
    check_folder(None if out is None else Path(out))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # blocks this small gain nothing from a second one
    try:
        jobs, data = demo_jobs(), windows(corpus(), SIZE.context)
        build = partial(build_gpt, SIZE)
        trainer = ArrayTrainer(build, data, jobs=jobs, stages=CUTS, loss=next_byte_loss)
        if schedule is None:
            schedule = schedule_for(trainer, time_limit=time_limit, say=say)
        plan = trainer.plan(schedule)
        say(f"training {len(jobs)} jobs by the schedule")
        result = trainer.run(plan, steps)
        if any(job.status == "stopped" for job in trainer.jobs):  # by Ctrl-C
            raise KeyboardInterrupt
        say("training every job alone")
        for j, job in enumerate(jobs):
            if found := differences(result.trained[j], trainer.train_alone(j, steps)):
                raise NotIdentical(f"{job.name} differs from training alone: {found[0]}")
        demo = DemoResult(tuple(jobs), schedule, trainer.last_profile, result)
        if out is not None:
            demo.write(Path(out))
    finally:
        torch.set_num_threads(threads)
    return demo
