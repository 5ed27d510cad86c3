"""What `ArrayTrainer.fit` calls while it trains, and ready-made ones."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from optsched.arraypipe.checkpoint.files import check_writable, load, replace_file
from optsched.errors import InputError, OptschedError

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
    starts: Mapping[str, int]
    """Iterations that the checkpoints of the jobs have."""
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


class Watcher(Callback):
    """Base of those that look at the values, or at the losses of a fit that does not evaluate."""

    fit: FitInfo

    def on_start(self, fit: FitInfo) -> None:
        """Keep what is told."""
        self.fit = fit

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Watch the loss if there are no values."""
        if not self.fit.evaluates:
            self.watch(job, iteration, loss)

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Watch the value."""
        self.watch(job, iteration, value)

    def watch(self, job: Job, iteration: int, value: float) -> None:
        """A new value."""


def _sign(mode: str) -> int:
    if mode not in ("min", "max"):
        raise InputError(f'mode: expected "min" or "max", got {mode!r:.60}')
    return 1 if mode == "min" else -1


class EarlyStopping(Watcher):
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
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise InputError(f"patience: expected an integer >= 1, got {patience!r:.60}")
        self.patience, self.sign, self.min_delta = patience, _sign(mode), min_delta
        self.best: dict[str, tuple[float, int]] = {}  # by job: value, values since

    def watch(self, job: Job, iteration: int, value: float) -> None:
        """Count, and stop the job."""
        name = self.fit.name(job)
        best, since = self.best.get(name, (math.inf, 0))
        better = self.sign * value < best - self.min_delta
        self.best[name] = (self.sign * value, 0) if better else (best, since + 1)
        if self.best[name][1] >= self.patience:
            job.stop()


class OptunaPruning(Watcher):
    """Reports values (without `evaluate`: losses) to Optuna's trials and stops what is pruned.

    Telling the study is left to the caller; `pruned` has the names of the jobs.

    Parameters
    ----------
    trials
        By name of the job.
    """

    def __init__(self, trials: Mapping[str, Any]) -> None:
        self.trials, self.pruned = trials, set[str]()

    def watch(self, job: Job, iteration: int, value: float) -> None:
        """Report and ask."""
        name = self.fit.name(job)
        trial = self.trials.get(name)
        if trial is None or name in self.pruned:
            return
        trial.report(value, iteration)
        if trial.should_prune():
            self.pruned.add(name)
            job.stop()


class BestCheckpoint(Watcher):
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
        if not fit.evaluates:
            raise InputError("BestCheckpoint: expected fit to have evaluate=...")
        check_writable(self.folder)
        for name in [name for name, start in fit.starts.items() if start]:
            if (path := self.path(name)).exists():
                self.best[name] = float(load(path)["value"])

    def path(self, name: str) -> Path:
        """The file of a job."""
        return self.folder / f"{name}.best.pt"

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Write the model if it is the best so far."""
        name = self.fit.name(job)
        known = self.best.get(name)
        if known is None or self.sign * value < self.sign * known:
            self.best[name] = value
            content = {"iteration": iteration, "value": value, "model": model.state_dict()}
            replace_file(self.path(name), content)


_COLUMNS: Final = ("job", "iteration", "loss", "value")


@dataclass(eq=False)
class RunLog(Callback):
    """Losses and values as rows of a file, ``.csv`` or ``.jsonl``; begun anew unless resumed."""

    path: str | PathLike[str]
    fit: FitInfo | None = field(default=None, init=False)
    stream: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.lines = Path(self.path).suffix == ".jsonl"
        if Path(self.path).suffix not in (".csv", ".jsonl"):
            raise InputError(f"RunLog: expected a .csv or .jsonl file, got {self.path!r:.60}")

    def on_start(self, fit: FitInfo) -> None:
        """Keep the rows before the checkpoints that the jobs go on from."""
        self.fit, path, kept = fit, Path(self.path), []
        try:
            if fit.is_first:
                if any(fit.starts.values()) and path.exists():
                    kept = [row for row in self._rows(path) if self._is_kept(row)]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("" if self.lines else ",".join(_COLUMNS) + "\n", encoding="utf-8")
            self.stream = path.open("a", buffering=1, encoding="utf-8", newline="")
        except OSError as error:
            raise InputError(f"RunLog: {path} cannot be written ({error.strerror})") from None
        for row in kept:
            self._write(row)

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """A row with the loss."""
        assert self.fit is not None
        self._write({"job": self.fit.name(job), "iteration": iteration, "loss": loss})

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """A row with the value."""
        assert self.fit is not None
        self._write({"job": self.fit.name(job), "iteration": iteration, "value": value})

    def on_finish(self) -> None:
        """Close the file."""
        if self.stream is not None:
            self.stream.close()

    def _write(self, row: dict[str, Any]) -> None:
        if self.lines:
            self.stream.write(json.dumps(row) + "\n")
        else:
            csv.DictWriter(self.stream, _COLUMNS, lineterminator="\n").writerow(row)

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        with path.open(encoding="utf-8", newline="") as stream:
            try:
                if not self.lines:
                    return list(csv.DictReader(stream))
                whole = [line for line in stream if line.endswith("\n")]  # a kill may cut one
                return [json.loads(line) for line in whole]
            except ValueError as error:
                raise InputError(f"RunLog: {path} is no log of a run ({error})") from None

    def _is_kept(self, row: dict[str, Any]) -> bool:
        assert self.fit is not None
        try:
            return int(row["iteration"]) < self.fit.starts.get(row["job"], 0)
        except (KeyError, TypeError, ValueError):
            return False


class TensorBoard(Callback):
    """Losses and values as scalars ``loss/<job>`` and ``value/<job>``; needs ``tensorboard``."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise OptschedError(
                "TensorBoard needs the package tensorboard: pip install tensorboard"
            ) from None
        self.writer: Any = SummaryWriter(str(folder))
        self.fit: FitInfo | None = None

    def on_start(self, fit: FitInfo) -> None:
        """Keep what is told."""
        self.fit = fit

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Add the loss."""
        assert self.fit is not None
        self.writer.add_scalar(f"loss/{self.fit.name(job)}", loss, iteration)

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Add the value."""
        assert self.fit is not None
        self.writer.add_scalar(f"value/{self.fit.name(job)}", value, iteration)

    def on_finish(self) -> None:
        """Write what is left."""
        self.writer.flush()
