"""Callbacks of `ArrayTrainer.fit`: the base class, a log of losses and values, progress."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from optsched.io.text import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from optsched.arraypipe.job import Job


class Callback:
    """Base class; all methods do nothing. An exception in one ends the run.

    Examples
    --------
    >>> from optsched.arraypipe import Callback
    >>> class StopAtNan(Callback):
    ...     def on_step(self, job, iteration, loss):
    ...         if loss != loss:
    ...             job.stop()
    """

    def on_start(self, jobs: Sequence[Job], steps: int, resumes: bool) -> None:
        """Called before the first iteration."""

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Called when the loss of an iteration is known; after ``job.stop()`` it is the last.

        On ranks it is called on rank 0 if that has a stage of the job, else on the rank of the last
        stage.
        """

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Called after an evaluation, with the copy of the model that was evaluated."""

    def on_end(self, job: Job) -> None:
        """Called once when a job has ended, at the latest at the end of the run."""

    def next_job(self, ended: Job) -> Job | None:
        """Return a job for the slot of one that has ended; called if no other job is queued.

        On ranks it is called on the first one, and, if that got a job, with the same ended job on
        the others, where it has to return the same.
        """
        return None

    def on_finish(self) -> None:
        """Called at the end of the run, also after an exception."""


class CsvLog(Callback):
    """Append losses and values to a CSV file, in rows ``job,iteration,loss,value``.

    A run that resumes repeats rows after its checkpoints: the last one counts. Another run begins
    the file anew.

    Examples
    --------
    >>> import tempfile
    >>> from torch.optim import SGD
    >>> from optsched.arraypipe import CsvLog, Job
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = CsvLog(f"{folder}/run.csv")
    ...     log.on_start([], steps=1, resumes=False)
    ...     log.on_step(Job(0, 8, SGD, "a"), 0, 0.5)
    ...     print(log.path.read_text().split())
    ['job,iteration,loss,value', 'a,0,0.5,']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def on_start(self, jobs: Sequence[Job], steps: int, resumes: bool) -> None:
        """Write the head."""
        if is_first_rank() and not (resumes and self.path.exists()):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("job,iteration,loss,value\n", encoding="utf-8")

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Write a loss."""
        self._write(f"{job.title},{iteration},{loss!r},\n")

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Write a value."""
        self._write(f"{job.title},{iteration},,{value!r}\n")

    def _write(self, row: str) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(row)


FIRST_AFTER_S: Final = 1.0
EVERY_S: Final = 5.0


class Progress(Callback):
    """Print iterations and losses of the running jobs every few seconds."""

    def __init__(self, predicted_ns: float) -> None:
        self.predicted_ns = predicted_ns
        self.latest: dict[Job, tuple[int, float]] = {}  # since the last print
        self.ends: dict[Job, tuple[float, int]] = {}  # time and iteration of the last print

    def on_start(self, jobs: Sequence[Job], steps: int, resumes: bool) -> None:
        """Start the clock."""
        self.steps, self.began_s = steps, time.monotonic()
        self.next_s = self.began_s + FIRST_AFTER_S

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Note a loss; print if it is time to."""
        now_s = time.monotonic()
        self.latest[job] = iteration, loss
        self.ends.setdefault(job, (now_s, iteration))
        if now_s >= self.next_s:
            self.next_s = now_s + EVERY_S
            with suppress(OSError):  # a closed terminal is no reason to end the run
                print(self._lines(now_s), file=sys.stderr, flush=True)
            self.latest.clear()

    def _lines(self, now_s: float) -> str:
        rows, seconds = [], 0.0
        for job, (iteration, loss) in self.latest.items():
            rows.append(f"{job.title}  iteration {iteration + 1} of {self.steps}  loss {loss:.4f}")
            before_s, before = self.ends[job]
            if iteration > before:
                seconds = max(seconds, (now_s - before_s) / (iteration - before))
            self.ends[job] = now_s, iteration
        measured = duration(seconds * 1e9) if seconds else "-"
        rows.append(f"a cycle: {measured}, predicted {duration(self.predicted_ns)}")
        return "\n".join(f"{now_s - self.began_s:7.1f} s  {row}" for row in rows)


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or the only one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
