"""Trainers with jobs, and training by a given schedule: the only way of the tests to run."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from optsched.arraypipe import ArrayTrainer, Callback, RunConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe import ExecutionPlan, Job, RunResult
    from optsched.model.schedule import Schedule

CONFIG = {field.name for field in fields(RunConfig)}


def array_trainer(
    model: Any, data: Any, *, jobs: Sequence[Job], stages: Any, loss: Any = None, **options: Any
) -> ArrayTrainer:
    """A trainer with jobs; `options` are ``weight`` and those of `RunConfig`."""
    config = RunConfig(**{key: options.pop(key) for key in CONFIG & options.keys()})
    return ArrayTrainer(model, data, stages, loss, **options).with_jobs(jobs, config)


class Hooks(Callback):
    """Calls functions."""

    def __init__(
        self,
        on_step: Callable[[Job, int, float], object] | None,
        refill: Callable[[Job], Job | None] | None,
    ) -> None:
        self.step, self.refill = on_step, refill

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Call ``on_step``."""
        if self.step is not None:
            self.step(job, iteration, loss)


class Refills(Hooks):
    """Also gives other jobs."""

    def next_job(self, ended: Job) -> Job | None:
        """Call ``refill``."""
        assert self.refill is not None
        return self.refill(ended)


def run(
    trainer: ArrayTrainer, schedule: Schedule | ExecutionPlan, steps: int, **options: Any
) -> RunResult:
    """Train the jobs of a trainer by a schedule, without measuring, checking or printing.

    Parameters
    ----------
    options
        ``checkpoint``, ``resume``, ``evaluate``, ``callbacks`` of `fit`; ``on_step(job, iteration,
        loss)``, ``refill(ended job)``; ``checkpoint_every`` (``every``) and fields of
        `RunConfig`. ``queue`` is accepted: more jobs than slots always wait.
    """
    options.pop("queue", None)
    on_step = options.pop("on_step", None)
    if "checkpoint_every" in options:
        options["every"] = options.pop("checkpoint_every")
    refill = options.pop("refill", None)
    hooks = [] if on_step is refill is None else [(Refills if refill else Hooks)(on_step, refill)]
    callbacks = [*hooks, *options.pop("callbacks", ())]
    given = {key: options.pop(key) for key in CONFIG & options.keys()}
    if given.get("replan") is None:
        given.pop("replan", None)
    given.setdefault("backend", "inline")
    config = replace(trainer.config, **{"check": 0, "verbose": False, **given})
    inside = {"RANK": "", "WORLD_SIZE": ""} if given["backend"] == "inline" else {}
    with mock.patch.dict(os.environ, {}):
        for name in inside:
            os.environ.pop(name, None)
        result = trainer.fit(
            trainer.jobs, steps, schedule=schedule, callbacks=callbacks, config=config, **options
        )
        return result.gather()
