"""`ArrayTrainer`: sibling jobs trained by a schedule, each to the bits it would reach alone."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optsched.arraypipe.checkpoint import CheckpointFolder
from optsched.arraypipe.feed import Feed
from optsched.arraypipe.inline import InlineBackend, JobRun
from optsched.arraypipe.optimizers import states_by_name
from optsched.arraypipe.orders import random_schedule
from optsched.arraypipe.plan import ExecutionPlan, compile
from optsched.arraypipe.split import Names, Stages, build, split, stage_names
from optsched.arraypipe.trace import Report, compare, measured, replayed
from optsched.errors import InputError
from optsched.train_alone import Trained, differences, train_alone
from optsched.version import __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from optsched.arraypipe.job import BuildModel, Data, Job, Loss
    from optsched.schedule import Schedule


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run made.

    Parameters
    ----------
    models
        The trained unsplit model of every job.
    trained
        Per job all parameters, buffers and optimizer states under unsplit names, and the losses.
    trace
        The run as it was, a schedule document (serial, in nanoseconds).
    replay
        The same blocks on a virtual clock, as parallel devices would have run them.
    report
        Predicted against measured.
    """

    models: tuple[nn.Module, ...]
    trained: tuple[Trained, ...]
    trace: Schedule
    replay: Schedule
    report: Report

    @property
    def losses(self) -> tuple[tuple[float, ...], ...]:
        """Loss of every iteration that was run, per job."""
        return tuple(t.losses for t in self.trained)


class ArrayTrainer:
    """Trains a job array in the order of a schedule.

    Parameters
    ----------
    build_model
        ``build_model(**job.model)`` makes the unsplit model; called after
        ``torch.manual_seed(job.seed)``.
    jobs
        The siblings; job j of a schedule is ``jobs[j]``.
    stages
        A number of stages or the cut indices (for an `nn.Sequential`), or the names of the modules
        of every stage, which are then called one after the other.
    loss
        ``loss(output, target)``, a mean over the samples; micro-batches are weighted by their
        share of the batch.
    data
        ``data(job, start)`` gives an iterator of ``(input, target)`` pairs that begins with
        iteration `start` and depends on nothing else (not on the global random state).

    Raises
    ------
    InputError
        The stages do not fit the model, or two jobs have one name.
    """

    def __init__(
        self, build_model: BuildModel, jobs: Sequence[Job], stages: Stages, loss: Loss, data: Data
    ) -> None:
        self.build_model, self.jobs, self.loss, self.data = build_model, tuple(jobs), loss, data
        if not self.jobs:
            raise InputError("jobs: expected at least one")
        self.titles = [job.name or f"job{j}" for j, job in enumerate(self.jobs)]
        for j, title in enumerate(self.titles):
            if title in self.titles[:j]:
                raise InputError(f"jobs[{j}].name: {title!r} is also the name of another job")
        with _global_state_kept():
            model = build(build_model, self.jobs[0])
            feed = Feed(data, self.jobs[0], self.titles[0], 0)
            sample = feed.peek() if isinstance(stages, int) else None
            self.stages: Names = stage_names(model, stages, sample)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Name of the first module of every stage."""
        return tuple(row[0] for row in self.stages)

    def plan(self, schedule: Schedule, *, barrier: bool = False) -> ExecutionPlan:
        """Compile a schedule and make sure that it is one of these jobs.

        With `barrier` all jobs wait for each other after every iteration (`compile`).
        """
        plan = compile(schedule, barrier=barrier)
        plan.check_fits([job.microbatches for job in self.jobs], len(self.stages))
        return plan

    def run(
        self,
        schedule: Schedule | ExecutionPlan,
        steps: int,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
        on_step: Callable[[Job, int, float], object] | None = None,
    ) -> RunResult:
        """Train every job until it has done `steps` iterations.

        Parameters
        ----------
        schedule
            A schedule document of these jobs, or a plan compiled from one, such as
            ``trainer.plan(schedule, barrier=True)``; a document is compiled without the barrier.
            Its order is binding; its starts are a prediction.
        steps
            Iterations of every job, counted from its seed (not from the checkpoint).
        checkpoint
            Folder for checkpoints; each job writes its last state there.
        checkpoint_every
            Also write after every so many iterations of the job.
        resume
            Go on from the latest checkpoints in that folder, where there are any. Job settings
            that change the bits, the optimizers' included, must be those of the checkpoints.
        on_step
            Called with ``(job, iteration, loss)`` after every iteration of a job.

        Raises
        ------
        InputError
            The schedule does not fit, or an argument is wrong; nothing has been trained then.
        JobFailed
            A block raised or a loss is not finite; complete checkpoints stay.
        """
        plan = schedule if isinstance(schedule, ExecutionPlan) else self.plan(schedule)
        plan.check_fits([job.microbatches for job in self.jobs], len(self.stages))
        folder = self._folder(steps, checkpoint, checkpoint_every, resume)

        def on_update(run: JobRun, stage: int, iteration: int) -> None:
            if folder is not None:
                folder.note(run, stage, iteration)

        def on_iteration(run: JobRun, iteration: int, loss: float) -> None:
            if on_step is not None:
                on_step(run.job, iteration, loss)

        with _global_state_kept():
            runs = [self._start(j, folder, resume, steps) for j in range(len(self.jobs))]
            backend = InlineBackend(plan, runs, self.loss, on_update, on_iteration)
            backend.rehearse()
            if folder is not None:
                folder.prepare(self.titles, resume)
            records = backend.run([max(0, steps - run.start) for run in runs])
        provenance = self._provenance(plan)
        return RunResult(
            models=tuple(run.model for run in runs),
            trained=tuple(_trained(run) for run in runs),
            trace=measured(plan, records, provenance),
            replay=replayed(plan, records, provenance),
            report=compare(plan, records),
        )

    def train_alone(self, job: int, steps: int) -> Trained:
        """The reference for one job (`optsched.testing.train_alone`)."""
        return train_alone(self.build_model, self.jobs[job], self.cuts, self.loss, self.data, steps)

    def check_exact(self, steps: int = 3, *, seed: int = 0) -> list[str]:
        """Train the jobs as an array in a random order and each alone; every tensor that differs.

        An empty list means that all parameters, buffers, optimizer states and losses are equal bit
        by bit. It finds layers that no rule foresees, such as one that keeps its own counter.
        """
        schedule = random_schedule(
            [job.microbatches for job in self.jobs], len(self.stages), seed=seed
        )
        result = self.run(schedule, steps)
        return [
            f"job {title}: {sentence}"
            for j, title in enumerate(self.titles)
            for sentence in differences(result.trained[j], self.train_alone(j, steps))
        ]

    def _folder(
        self,
        steps: int,
        checkpoint: str | os.PathLike[str] | None,
        every: int | None,
        resume: bool,
    ) -> CheckpointFolder | None:
        for key, value in (("steps", steps), ("checkpoint_every", every)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{key}: expected an integer >= 1, got {value!r}")
        if checkpoint is None:
            if every is not None or resume:
                raise InputError("checkpoint: expected a folder to write to or resume from")
            return None
        return CheckpointFolder(checkpoint, self.stages, every, steps)

    def _start(
        self, index: int, folder: CheckpointFolder | None, resume: bool, steps: int
    ) -> JobRun:
        job, title = self.jobs[index], self.titles[index]
        model = build(self.build_model, job)
        stages = split(model, self.stages, job, index, title)
        run = JobRun(job, index, title, model, stages, 0, None)
        if folder is not None:
            run.start = folder.begin(run, resume)
            if run.start > steps:
                raise InputError(
                    f"steps: job {title} has already done {run.start} iterations, got {steps}"
                )
        if run.start < steps:
            run.feed = Feed(self.data, job, title, run.start)
        return run

    def _provenance(self, plan: ExecutionPlan) -> dict[str, Any]:
        return {
            "executor": "inline",
            "barrier": plan.barrier,
            "jobs": self.titles,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "optsched": __version__,
            "plan_sha256": plan.schedule.sha256,
        }


def _trained(run: JobRun) -> Trained:
    states = states_by_name(
        [stage.optimizer for stage in run.stages], [stage.parameters for stage in run.stages]
    )
    return Trained(
        parameters={name: p.detach() for name, p in run.model.named_parameters()},
        buffers=dict(run.model.named_buffers()),
        optimizer={
            name: states[name]["state"] if name in states else {}
            for name, _ in run.model.named_parameters()
        },
        losses=tuple(run.losses),
    )


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """Gradients on; afterwards random states, default type and modes are what they were."""
    generator, python, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    dtype = torch.get_default_dtype()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_rng_state(generator)
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_default_dtype(dtype)
