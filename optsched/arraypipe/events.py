"""Events of a run: losses, updates and ends of jobs, for callbacks, checkpoints and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from optsched.arraypipe.callbacks import Callback, FitInfo
from optsched.arraypipe.evaluation import evaluation_of
from optsched.arraypipe.job import Job
from optsched.arraypipe.runtime.blocks import trained_now
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from optsched.arraypipe.checkpoint.folder import CheckpointFolder
    from optsched.arraypipe.distributed.ranks import Ranks
    from optsched.arraypipe.options import Request, Trainer
    from optsched.arraypipe.runtime.state import JobRun


class Events:
    """Calls the callbacks of a request; copies stages for checkpoints and evaluation."""

    def __init__(
        self,
        trainer: Trainer,
        request: Request,
        folder: CheckpointFolder | None,
        ranks: Ranks | None,
    ) -> None:
        self.request, self.folder, self.ranks = request, folder, ranks
        self.callbacks = request.callbacks
        self.refills = any(type(c).next_job is not Callback.next_job for c in self.callbacks)
        self.evaluation = evaluation_of(trainer, request, self._on_evaluate)
        self.started: list[Callback] = []
        self.titles: dict[Job, str] = {}
        self.starts: dict[str, int] = {}  # iterations of the checkpoints before the run
        self.evaluated: dict[str, int] = {}  # on ranks: newest checkpoint that was evaluated
        self.ended: set[Job] = set()

    def start(self, runs: Sequence[JobRun]) -> None:
        """Call `on_start`."""
        self.titles = {run.job: run.title for run in runs}
        self.starts = {run.title: run.start for run in runs}
        self.evaluated = dict(self.starts)
        info = FitInfo(
            self._title, self.request.steps, self.evaluation is not None, self._start,
            self.request.resume, self.request.is_first,
        )  # fmt: skip
        for callback in self.callbacks:
            self.started.append(callback)
            callback.on_start(info)

    def finish(self) -> None:
        """Call `on_finish` of all callbacks that were started."""
        for callback in self.started:
            callback.on_finish()

    def on_update(self, run: JobRun, stage: int, iteration: int) -> None:
        """Copy a stage whose update is done, if a checkpoint or an evaluation needs it."""
        if self.folder is not None:
            self.folder.note(run, stage, iteration)
        if self.evaluation is None or self.ranks is not None:
            return
        value = self.evaluation.note(run, stage, iteration)
        if value is not None and self.folder is not None:
            self.folder.mark_best(run, iteration + 1, value, self.request.config.mode == "max")

    def on_loss(self, run: JobRun, iteration: int, loss: float) -> None:
        """Call `on_step`; on ranks, refuse changes of stages that another rank trains."""
        ranks = self.ranks
        if not self.callbacks or not (ranks is None or ranks.reports(run)):
            return
        here = range(len(run.stages)) if ranks is None else ranks.stages_of(run)
        remote = [stage for stage in run.stages if stage.index not in here]
        before = [trained_now(stage) for stage in remote]
        for callback in self.callbacks:
            callback.on_step(run.job, iteration, loss)
        for stage, trained in zip(remote, before, strict=True):
            if trained_now(stage) != trained:
                raise InputError(
                    f"on_step: changes requires_grad of job {run.title}, stage {stage.index}, "
                    f"which another rank trains; let the forward of the model change it"
                )
        self._evaluate_newest(run.job)

    def next_job(self, ended: Job, jobs: Sequence[Job]) -> Job | None:
        """Return the first job that a callback gives for the slot of an ended one."""
        self.on_end(ended)
        for callback in self.callbacks:
            following = callback.next_job(ended)
            if following is None:
                continue
            if not isinstance(following, Job) or following in jobs:
                raise InputError(f"next_job: expected a new Job or None, got {following!r:.60}")
            self.titles[following] = following.name or f"job{len(jobs)}"
            return following
        return None

    def on_end(self, job: Job) -> None:
        """Call `on_end`, once for every job."""
        if job not in self.ended:
            self.ended.add(job)
            for callback in self.callbacks:
                callback.on_end(job)

    def end_jobs(self, runs: Sequence[JobRun]) -> None:
        """After the run: evaluate what is left, and call `on_end` of the remaining jobs."""
        for run in runs:
            self._evaluate_newest(run.job)
            self.on_end(run.job)

    def _title(self, job: Job) -> str:
        return self.titles[job]

    def _start(self, title: str) -> int:
        if title not in self.starts:
            resumed = self.folder if self.request.resume else None
            self.starts[title] = 0 if resumed is None else resumed.latest(title)
        return self.starts[title]

    def _on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        for callback in self.callbacks:
            callback.on_evaluate(job, iteration, value, model)

    def _evaluate_newest(self, job: Job) -> None:
        """On the first rank: evaluate the newest checkpoint of a job on the host, once."""
        if self.ranks is None or not self.request.is_first:
            return
        if self.evaluation is None or self.folder is None:
            return
        title = self.titles[job]
        done = self.folder.newest(title)
        if done > self.evaluated.get(title, 0):
            self.evaluated[title] = done
            states, buffers = self.folder.read(title, done)
            self.evaluation.evaluate(job, done - 1, states, buffers, torch.device("cpu"))
