"""Runs of single jobs: model, stages, optimizers and batches, continued from a checkpoint."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from optsched.arraypipe.model.build import Builder
from optsched.arraypipe.model.checks import check_apart, check_sibling, shapes_of
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.stages import drop, fresh_stages
from optsched.arraypipe.runtime.state import JobRun, JobStage
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import nn

    from optsched.arraypipe.checkpoint.folder import CheckpointFolder
    from optsched.arraypipe.distributed.replicas import Replicas
    from optsched.arraypipe.job import Job
    from optsched.arraypipe.model.checks import Owners, Shapes
    from optsched.arraypipe.options import Request, Trainer


class JobBuilder:
    """Makes the runs of the jobs of a trainer, one after the other.

    `folder` has the checkpoints to continue from.
    """

    def __init__(
        self,
        trainer: Trainer,
        request: Request,
        device: torch.device,
        folder: CheckpointFolder | None,
        replicas: Replicas | None = None,
    ) -> None:
        self.trainer, self.device, self.folder = trainer, device, folder
        self.replicas = replicas
        self.data = trainer.data if replicas is None else replicas.part_of(trainer.data)
        self.steps = request.steps
        self.first: tuple[Shapes, str] | None = None  # shapes and title of the first job
        self.owners: Owners = {}
        alike = len({job.precision for job in trainer.jobs}) == 1
        self.models = Builder(trainer.build_model, share=alike)
        self.precisions: set[str] = set()

    def make(
        self, job: Job, index: int, title: str, at: int, local: Collection[int], away: bool = False
    ) -> JobRun:
        """Make job number `index`, ready to continue from iteration `at`.

        Parameters
        ----------
        local
            Stages that this process trains; the others have no tensors.
        away
            Leave the tensors on the host if the device is a GPU.
        """
        trainer, folder = self.trainer, self.folder
        job.life.begin()
        away = away and on_gpu(self.device)
        if len(local) < trainer.n_stages:
            with self.models.parts(job) as model:
                stages = self._stages(model, job, index, title, away)
                for stage in stages:
                    if stage.index not in local:
                        drop(stage)
        else:
            model = self.models.whole(job)
            stages = self._stages(model, job, index, title, away)
        run = JobRun(job, index, title, model, stages, 0, self.steps, None)
        refused = "" if folder is None else folder.begin(run, at)
        if at > self.steps:
            raise InputError(
                f"steps: job {title} has already done {at} iterations, got {self.steps}"
            )
        run.begin_at(at)
        if at < self.steps:
            data = self.data if folder is None else folder.watched(run, self.data)
            run.feed = Feed(data, job, title, at)
            if refused:
                run.fail(0, at, refused)
        return run

    def _stages(
        self, model: nn.Module, job: Job, index: int, title: str, away: bool
    ) -> list[JobStage]:
        """Return the stages of a model, which must be like those of the other jobs."""
        trainer, shapes = self.trainer, shapes_of(model)
        self.first = self.first or (shapes, title)
        self.precisions.add(job.precision)
        check_sibling(shapes, title, *self.first)
        check_apart(model, title, self.owners, self._unshared())
        if self.replicas is not None:
            self.replicas.check(model, title)
        devices = [self.device] * trainer.n_stages
        return fresh_stages(model, trainer.cut, job, index, title, devices, away, trainer.loss)

    def _unshared(self) -> str:
        """Why jobs cannot have trained tensors in common; empty if they can."""
        alike = len(self.precisions) == 1
        return "" if alike else "which jobs of several precisions cannot share"


def warn_of_forgotten(run: JobRun) -> None:
    """Warn of attributes that the forward changes and that no checkpoint keeps."""
    names = {module: name for name, module in run.model.named_modules()}
    rows = [row for stage in run.stages for row in stage.forgotten]
    if rows:
        found = [f"{key!r} of {type(part).__name__} {names.get(part, '')!r}" for part, key in rows]
        text = "no checkpoint keeps it, so a resumed run begins anew; use a buffer if it is read"
        warnings.warn(f"checkpoint: the forward changes {', '.join(found)}: {text}", stacklevel=2)
