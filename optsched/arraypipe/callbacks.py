"""Callbacks of `ArrayTrainer.fit`: the base class, a log of losses and values, progress."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.text import duration

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from torch import nn

    from optsched.arraypipe.job import Job


@dataclass(frozen=True, eq=False)
class FitInfo:
    """Argument of `Callback.on_start`.

    Parameters
    ----------
    name
        Name of a job, also of one that joins later.
    steps
        Iterations of every job.
    evaluates
        Whether there will be values.
    start
        Iteration that a job of this name continues from.
    resumes
        Whether jobs continue from their checkpoints.
    is_first
        False on ranks above 0.
    """

    name: Callable[[Job], str]
    steps: int
    evaluates: bool
    start: Callable[[str], int]
    resumes: bool
    is_first: bool


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

    def on_start(self, fit: FitInfo) -> None:
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


_COLUMNS: Final = ("job", "iteration", "loss", "value")


class CsvLog(Callback):
    """Write losses and values as rows of a file, ``.csv`` or ``.jsonl``.

    A run that resumes keeps the rows before its checkpoints; another one begins the file anew.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.stream: TextIO | None = None
        if self.path.suffix not in (".csv", ".jsonl"):
            raise InputError(f"CsvLog: expected a .csv or .jsonl file, got {str(path)!r:.60}")

    def on_start(self, fit: FitInfo) -> None:
        """Write the head, and the rows before the checkpoints that the jobs continue from."""
        self.fit = fit
        lines = [] if self.path.suffix == ".jsonl" else [",".join(_COLUMNS)]
        try:
            if fit.resumes and self.path.exists():
                text = self.path.read_text(encoding="utf-8").splitlines()
                lines += [line for line in text if self._is_kept(line)]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if fit.is_first:
                write_atomic(self.path, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            raise InputError(f"CsvLog: {self.path} cannot be written ({error.strerror})") from None

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Write a loss."""
        self._write(job, iteration, "loss", loss)

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Write a value."""
        self._write(job, iteration, "value", value)

    def on_finish(self) -> None:
        """Close the file."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _write(self, job: Job, iteration: int, kind: str, value: float) -> None:
        row = {"job": self.fit.name(job), "iteration": iteration, kind: value}
        line = json.dumps(row)
        if self.path.suffix == ".csv":
            line = ",".join(str(row.get(column, "")) for column in _COLUMNS)
        if self.stream is None:  # the first rank has written the head by now
            self.stream = self.path.open("a", buffering=1, encoding="utf-8")
        self.stream.write(f"{line}\n")

    def _is_kept(self, line: str) -> bool:
        """Whether a row is whole and before the checkpoint of its job."""
        try:
            if self.path.suffix == ".jsonl":
                row = json.loads(line)
            else:
                row = dict(zip(_COLUMNS, line.split(","), strict=True))
            return bool(int(row["iteration"]) < self.fit.start(row["job"]))
        except (KeyError, TypeError, ValueError):
            return False


FIRST_AFTER_S: Final = 1.0
EVERY_S: Final = 5.0
_RECENT: Final = 33  # iterations that the time of an iteration is taken from


class Progress(Callback):
    """Print iterations and losses of the running jobs every few seconds.

    Parameters
    ----------
    predicted_ns
        Predicted time of a cycle.
    """

    def __init__(self, predicted_ns: float) -> None:
        self.predicted_ns, self.enabled = predicted_ns, True
        self.latest: dict[Job, tuple[int, float]] = {}  # since the last print
        self.ends: dict[Job, deque[float]] = {}

    def on_start(self, fit: FitInfo) -> None:
        """Start the clock."""
        self.fit, self.began_s = fit, time.monotonic()
        self.next_s = self.began_s + FIRST_AFTER_S

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Note a loss; print if it is time to."""
        now_s = time.monotonic()
        self.latest[job] = iteration, loss
        self.ends.setdefault(job, deque(maxlen=_RECENT)).append(now_s)
        if self.enabled and now_s >= self.next_s:
            self.next_s = now_s + EVERY_S
            try:
                print(self._lines(now_s), file=sys.stderr, flush=True)
            except OSError:  # a closed terminal is no reason to end the run
                self.enabled = False
            self.latest.clear()

    def _lines(self, now_s: float) -> str:
        rows = [
            f"{self.fit.name(job)}  iteration {iteration + 1} of {self.fit.steps}  loss {loss:.4f}"
            for job, (iteration, loss) in self.latest.items()
        ]
        seconds = [(s[-1] - s[0]) / (len(s) - 1) for s in self.ends.values() if len(s) > 1]
        measured = duration(max(seconds) * 1e9) if seconds else "-"
        rows.append(f"a cycle: {measured}, predicted {duration(self.predicted_ns)}")
        return "\n".join(f"{now_s - self.began_s:7.1f} s  {row}" for row in rows)
