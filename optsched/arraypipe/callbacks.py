"""What `ArrayTrainer.fit` calls while it trains, and ready-made ones."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO

from optsched.arraypipe.checkpoint.files import check_writable, load, replace_file
from optsched.arraypipe.checkpoint.plain import kept
from optsched.errors import InputError, OptschedError
from optsched.io.files import write_atomic
from optsched.io.values import integer, number, one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    from torch import nn

    from optsched.arraypipe.job import Job


@dataclass(frozen=True, eq=False)
class FitInfo:
    """What a callback is told at the start."""

    name: Callable[[Job], str]
    """Name of a job, also of one that joins later."""
    steps: int
    evaluates: bool
    """Whether there will be values."""
    start: Callable[[str], int]
    """Iterations that the checkpoint has that a job of this name goes on from."""
    resumes: bool
    """Whether jobs go on from their checkpoints."""
    is_first: bool
    """False on ranks above 0."""


class Callback:
    """Base of callbacks: all methods do nothing. What one raises ends the run."""

    def on_start(self, fit: FitInfo) -> None:
        """Before the first iteration."""

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """The loss of an iteration is known; after ``job.stop()`` it is the job's last."""

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """A job has been evaluated after this iteration, on a copy that may be kept."""

    def on_end(self, job: Job) -> Job | None:
        """A job has ended and none waits: a job that is returned takes its seat.

        Told at the end of the run if that has not been the case before. On several ranks it is
        called on all of them and has to return the same.
        """
        return None

    def on_finish(self) -> None:
        """The run is over, also if it has raised."""


class Listener(Callback):
    """Base of the ready-made ones: losses and values come by one way."""

    fit: FitInfo

    def on_start(self, fit: FitInfo) -> None:
        """Keep what is told."""
        self.fit = fit

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Hear a loss."""
        self.hear(job, iteration, "loss", loss)

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Hear a value."""
        self.hear(job, iteration, "value", value)

    def hear(self, job: Job, iteration: int, kind: str, value: float) -> None:
        """A new ``"loss"`` or ``"value"``."""

    def judges(self, kind: str) -> bool:
        """Whether it is what jobs are judged by: values, or losses if nothing is evaluated."""
        return kind == ("value" if self.fit.evaluates else "loss")


def _sign(mode: str) -> int:
    return 1 if one_of("mode", mode, ("min", "max")) == "min" else -1


class EarlyStopping(Listener):
    """Stops a job when its value (without `evaluate`: its loss) has not become better for long.

    Parameters
    ----------
    patience
        Values without a better one after which the job ends.
    mode
        ``"min"`` or ``"max"``: which values are better.
    min_delta
        By how much at least.
    """

    def __init__(
        self, patience: int, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        self.patience, self.sign = integer("patience", patience, 1, None), _sign(mode)
        self.min_delta = number("min_delta", min_delta)
        self.best: dict[Job, tuple[float, int]] = {}  # value, values since

    def on_start(self, fit: FitInfo) -> None:
        """Nothing has been counted."""
        super().on_start(fit)
        self.best.clear()

    def hear(self, job: Job, iteration: int, kind: str, value: float) -> None:
        """Count, and stop the job."""
        if self.judges(kind):
            best, since = self.best.get(job, (math.inf, 0))
            better = self.sign * value < best - self.min_delta
            self.best[job] = (self.sign * value, 0) if better else (best, since + 1)
            if self.best[job][1] >= self.patience:
                job.stop()


class OptunaPruning(Listener):
    """Reports values (without `evaluate`: losses) to Optuna's trials and stops what is pruned.

    The caller tells the study; `pruned` has the names of the jobs.

    Parameters
    ----------
    trials
        By name of the job.
    """

    def __init__(self, trials: Mapping[str, Any]) -> None:
        self.trials, self.pruned = trials, set[str]()

    def hear(self, job: Job, iteration: int, kind: str, value: float) -> None:
        """Report and ask."""
        name = self.fit.name(job)
        if self.judges(kind) and name in self.trials and name not in self.pruned:
            self.trials[name].report(value, iteration)
            if self.trials[name].should_prune():
                self.pruned.add(name)
                job.stop()


class BestCheckpoint(Listener):
    """Keeps the merged state dict of the best value of every job.

    ``<folder>/<job>.best.pt`` has ``iteration``, ``value`` and ``model``; it is replaced as a
    whole, and `torch.load` reads it with ``weights_only=True``.

    Parameters
    ----------
    folder
        Made if it is not there.
    mode
        ``"min"`` or ``"max"``: which values are better.
    """

    def __init__(self, folder: str | PathLike[str], mode: Literal["min", "max"] = "min") -> None:
        self.folder, self.sign = Path(folder), _sign(mode)
        self.best: dict[str, float] = {}

    def on_start(self, fit: FitInfo) -> None:
        """Look at the folder; jobs that are resumed have a best value already."""
        super().on_start(fit)
        self.best.clear()
        if not fit.evaluates:
            raise InputError("BestCheckpoint: expected fit to have evaluate=...")
        check_writable(self.folder)

    def path(self, name: str) -> Path:
        """The file of a job."""
        return self.folder / f"{name}.best.pt"

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Write the model if it is the best so far."""
        name = self.fit.name(job)
        if name not in self.best:  # one that is resumed has a best value already
            there = self.fit.resumes and self.path(name).exists()
            self.best[name] = self._value(self.path(name)) if there else self.sign * math.inf
        if self.sign * value < self.sign * self.best[name]:
            self.best[name] = value
            content = {"iteration": iteration, "value": value, "model": model.state_dict()}
            place = f"BestCheckpoint of job {name}"
            replace_file(self.path(name), kept(content, place, lambda tensor: tensor))

    def _value(self, path: Path) -> float:
        saved = load(path)
        if not isinstance(saved, dict) or not isinstance(saved.get("value"), float):
            raise InputError(f"{path}: is no file of BestCheckpoint; choose another folder")
        return float(saved["value"])


_COLUMNS: Final = ("job", "iteration", "loss", "value")


class RunLog(Listener):
    """Losses and values as rows of a file, ``.csv`` or ``.jsonl``; begun anew unless resumed."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.stream: TextIO | None = None
        if self.path.suffix not in (".csv", ".jsonl"):
            raise InputError(f"RunLog: expected a .csv or .jsonl file, got {str(path)!r:.60}")

    def on_start(self, fit: FitInfo) -> None:
        """Keep the rows before the checkpoints that the jobs go on from."""
        super().on_start(fit)
        lines = [] if self.path.suffix == ".jsonl" else [",".join(_COLUMNS)]
        try:
            if fit.resumes and self.path.exists():
                text = self.path.read_text(encoding="utf-8").splitlines()
                lines += [line for line in text if self._is_kept(line)]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if fit.is_first:
                write_atomic(self.path, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            raise InputError(f"RunLog: {self.path} cannot be written ({error.strerror})") from None

    def hear(self, job: Job, iteration: int, kind: str, value: float) -> None:
        """Write a row."""
        row = {"job": self.fit.name(job), "iteration": iteration, kind: value}
        line = json.dumps(row)
        if self.path.suffix == ".csv":
            line = ",".join(str(row.get(column, "")) for column in _COLUMNS)
        if self.stream is None:  # the first rank has begun the file by now
            self.stream = self.path.open("a", buffering=1, encoding="utf-8")
        self.stream.write(f"{line}\n")

    def on_finish(self) -> None:
        """Close the file."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _is_kept(self, line: str) -> bool:
        """Not what a killed run has left after its checkpoint, or half written."""
        try:
            if self.path.suffix == ".jsonl":
                row = json.loads(line)
            else:
                row = dict(zip(_COLUMNS, line.split(","), strict=True))
            return bool(int(row["iteration"]) < self.fit.start(row["job"]))
        except (KeyError, TypeError, ValueError):
            return False


class TensorBoard(Listener):
    """Losses and values as scalars ``loss/<job>`` and ``value/<job>``; needs ``tensorboard``."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise OptschedError(
                "TensorBoard needs the package tensorboard: pip install tensorboard"
            ) from None
        self.writer: Any = SummaryWriter(str(folder))

    def hear(self, job: Job, iteration: int, kind: str, value: float) -> None:
        """Add a scalar."""
        self.writer.add_scalar(f"{kind}/{self.fit.name(job)}", value, iteration)

    def on_finish(self) -> None:
        """Write what is left."""
        self.writer.flush()
