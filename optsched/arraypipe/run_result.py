"""What a run made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optsched.arraypipe.optimizers import states_by_name
from optsched.arraypipe.train_alone import Trained

if TYPE_CHECKING:
    from torch import nn

    from optsched.arraypipe.job_run import JobRun
    from optsched.arraypipe.reporting.report import Report
    from optsched.model.schedule import Schedule


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run made; with one process per device, `models` and `trained` are rank 0's alone.

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
        """Loss of every iteration that was run, per job; empty on ranks above 0."""
        return tuple(t.losses for t in self.trained)


def trained(run: JobRun) -> Trained:
    """All that training has changed of a job (references)."""
    states = states_by_name(
        [stage.optimizer for stage in run.stages], [stage.trained for stage in run.stages]
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
