"""Train by a given schedule: the one door of the tests to the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.arraypipe import ArrayTrainer, ExecutionPlan, RunResult
    from optsched.model.schedule import Schedule


def run(
    trainer: ArrayTrainer, schedule: Schedule | ExecutionPlan, steps: int, **options: Any
) -> RunResult:
    """Train the jobs of a trainer by a schedule, without measuring, checking or printing.

    Parameters
    ----------
    options
        ``checkpoint``, ``checkpoint_every``, ``keep``, ``resume``, ``on_step(job, iteration,
        loss)``, ``on_error``, ``queue``, ``refill(ended job)``, ``replan`` (a job array),
        ``backend``, ``window``, ``timeout``.
    """
    return trainer.run(schedule, steps, **options).gather()
