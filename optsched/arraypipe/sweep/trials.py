"""The trials of a sweep: where they come from, how they are judged, what is kept of them."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from optuna import TrialPruned
from optuna.trial import Trial, TrialState

from optsched.arraypipe.job import Job
from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from optuna.study import Study
    from optuna.trial import BaseTrial, FrozenTrial


_FORMAT = "optsched.sweep/1"
_PATTERN = "trial{}.sweep.json"


class TrialFiles:
    """``<folder>/trial<number>.sweep.json``: the losses of a trial, at least up to its checkpoint.

    The loss of an iteration is known before its update, hence written before its checkpoint.

    Parameters
    ----------
    folder
        That of the checkpoints.
    study
        Name of the study.
    every
        Iterations between checkpoints; None: only at the end of a job.
    """

    def __init__(self, folder: str | os.PathLike[str], study: str, every: int | None) -> None:
        self.folder, self.study, self.every = Path(folder), study, every

    @property
    def count(self) -> int:
        """Trials that were begun."""
        return len(list(self.folder.glob(_PATTERN.format("*"))))

    def has(self, trial: FrozenTrial) -> bool:
        """Whether the trial was begun with this folder; others may be at work on the study."""
        return self._path(trial.number).exists()

    def due(self, done: int, steps: int) -> bool:
        """Whether a checkpoint is written after so many iterations."""
        return done == steps or (self.every is not None and done % self.every == 0)

    def write(self, number: int, losses: Sequence[float]) -> None:
        """Keep the losses of a trial; the first call says that it was begun."""
        row = {"format": _FORMAT, "study": self.study, "trial": number, "losses": list(losses)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"checkpoint: {self.folder} cannot be made ({error})") from error
        write_atomic(self._path(number), json.dumps(row) + "\n")

    def read(self, number: int) -> list[float]:
        """The losses of a trial.

        Raises
        ------
        InputError
            The file is damaged, or of another study.
        """
        path = self._path(number)
        try:
            row: Any = json.loads(read_text(path))
            losses = [float(x) for x in row["losses"]]
            study, kind = row["study"], row["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: is no file of a sweep ({error})") from None
        if kind != _FORMAT:
            raise InputError(f"{path}: format: expected {_FORMAT!r}, got {kind!r:.60}")
        if study != self.study:
            raise InputError(f"{path}: belongs to the study {study!r}, not to {self.study!r}")
        return losses

    def _path(self, number: int) -> Path:
        return self.folder / _PATTERN.format(number)


Suggest: TypeAlias = "Callable[[BaseTrial], Job]"
Value: TypeAlias = "Callable[[Job, Sequence[float]], float]"

LAST: Final = 10
"""Losses whose mean is the value of a job, unless the caller says otherwise."""


@dataclass(eq=False)
class Entry:
    """A trial, its job, and the losses of all its iterations, those before a resume included."""

    trial: Trial
    job: Job
    losses: list[float] = field(default_factory=list)
    reported: set[int] = field(default_factory=set)  # iterations
    told: TrialState | None = None


class Trials:
    """Speaks with the study; knows nothing of devices and schedules.

    Parameters
    ----------
    study
        Of one objective.
    suggest
        Makes the job of a trial.
    steps
        Iterations of a job that is not pruned.
    rungs
        Iterations after which the pruner is asked.
    value
        Of a job and its losses so far; what is reported at rungs and told at the end.
    files
        Where losses are kept for a resume.
    """

    def __init__(
        self,
        study: Study,
        suggest: Suggest,
        steps: int,
        rungs: Sequence[int],
        value: Value,
        files: TrialFiles | None,
    ) -> None:
        self.study, self.suggest, self.value = study, suggest, value
        self.steps, self.rungs, self.files = steps, frozenset(rungs), files
        self.entries: list[Entry] = []
        self._of: dict[Job, Entry] = {}

    def ask(self) -> Entry | None:
        """Ask for one more trial; None if `suggest` refuses it (raises `optuna.TrialPruned`)."""
        trial = self.study.ask()
        try:
            job = made(self.suggest, trial, trial.number)
        except TrialPruned:
            self.study.tell(trial, state=TrialState.PRUNED)
            return None
        except BaseException:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        return self._enter(Entry(trial, job))

    def adopt(self) -> list[Entry]:
        """The trials of these files that a former run has left unfinished.

        A trial whose prune was not written down any more is pruned now.
        """
        assert self.files is not None
        left = [t for t in self.study.get_trials(states=(TrialState.RUNNING,)) if self.files.has(t)]
        found = []
        for frozen in left:
            trial = Trial(self.study, frozen._trial_id)
            last = max(frozen.intermediate_values, default=0)
            if 0 < last < self.steps and trial.should_prune():
                self.study.tell(trial, state=TrialState.PRUNED)
                continue
            entry = Entry(trial, made(self.suggest, trial, trial.number))
            entry.losses = self.files.read(trial.number)
            entry.reported.update(frozen.intermediate_values)
            found.append(self._enter(entry))
        return found

    def hear(self, job: Job, iteration: int, loss: float) -> None:
        """Take the loss of an iteration; at a rung report, and stop the job if it is pruned."""
        entry = self._of[job]
        if len(entry.losses) < iteration:
            raise InputError(
                f"checkpoint: trial {entry.trial.number} goes on from iteration {iteration}, but "
                f"only {len(entry.losses)} losses are in {self.files and self.files.folder}"
            )
        del entry.losses[iteration:]  # those behind the checkpoint that it goes on from
        entry.losses.append(loss)
        done = iteration + 1
        if self.files is not None and self.files.due(done, self.steps):
            self.files.write(entry.trial.number, entry.losses)
        if done in self.rungs:
            self._report(entry, done)

    def settle(self, job: Job) -> None:
        """Tell the study of a job that has ended, as far as it is known how.

        On a GPU the last loss is read late; a job that lacks it is settled by `close`.
        """
        entry = self._of[job]
        if entry.told is not None:
            return
        if job.error is not None:
            self.fail(entry, str(job.error))
        elif job.status == "failed":
            self.fail(entry, "failed on another device")
        elif len(entry.losses) == self.steps or job.life.stopping:
            self._complete(entry)

    def fail(self, entry: Entry, reason: str) -> None:
        """Tell that a trial has no value; the attribute `failure` says why."""
        entry.trial.set_user_attr("failure", reason)
        self._tell(entry, TrialState.FAIL)

    def close(self, reason: str) -> None:
        """After the run: settle what is left.

        Jobs that were interrupted fail for this reason; with files their trials stay unfinished
        instead, for a resume.
        """
        for entry in self.entries:
            self.settle(entry.job)
            if entry.told is None and self.files is not None:
                self.files.write(entry.trial.number, entry.losses)
            elif entry.told is None:
                self.fail(entry, reason)

    def abandon(self, reason: str) -> None:
        """After an exception: as `close`, but nothing is computed any more.

        The study's storage may be what has failed: what it raises does not hide the exception.
        """
        for entry in self.entries:
            if entry.told is None and self.files is None:
                with suppress(Exception):
                    self.fail(entry, reason)

    def _enter(self, entry: Entry) -> Entry:
        self.entries.append(entry)
        self._of[entry.job] = entry
        if self.files is not None:
            self.files.write(entry.trial.number, entry.losses)
        return entry

    def _report(self, entry: Entry, done: int) -> None:
        if done not in entry.reported:  # a resumed job passes some rungs a second time
            entry.trial.report(self._value(entry), done)
            entry.reported.add(done)
        if done < self.steps and entry.trial.should_prune():
            entry.job.stop()
            self._tell(entry, TrialState.PRUNED)

    def _complete(self, entry: Entry) -> None:
        value = self._value(entry)
        if math.isnan(value):
            self.fail(entry, "its value is not a number")
        else:
            self._tell(entry, TrialState.COMPLETE, value)

    def _value(self, entry: Entry) -> float:
        found = self.value(entry.job, tuple(entry.losses))
        try:
            return float(found)
        except (TypeError, ValueError):
            number = entry.trial.number
            raise InputError(
                f"value: expected a number for trial {number}, got {found!r:.60}"
            ) from None

    def _tell(self, entry: Entry, state: TrialState, value: float | None = None) -> None:
        self.study.tell(entry.trial, value, state=state)
        entry.told = state


def made(suggest: Suggest, trial: BaseTrial, number: int) -> Job:
    """The job of a trial, named after it if it has no name."""
    job: Any = suggest(trial)
    if not isinstance(job, Job):
        raise InputError(f"suggest: expected a Job for trial {number}, got {job!r:.60}")
    return job if job.name else replace(job, name=f"trial{number}")


def mean_of_last(job: Job, losses: Sequence[float]) -> float:
    """Mean of the last ten losses, or of all if there are fewer."""
    last = losses[-LAST:]
    return math.fsum(last) / len(last) if last else math.nan


class Offer(NamedTuple):
    """A job for a seat: the number of its trial and the parameters that make it."""

    job: Job
    number: int
    params: dict[str, Any]


class Supply(Protocol):
    """Gives jobs until there are no more."""

    def first(self, width: int) -> list[Offer]:
        """Jobs for so many seats, fewer if there are no more."""

    def instead(self) -> Offer | None:
        """One for a first job that cannot run."""

    def next(self) -> Offer | None:
        """One for a seat that has become free during the run."""


class Asked:
    """Jobs of trials that the study is asked for.

    Parameters
    ----------
    trials
        To ask.
    n_trials, timeout
        When to ask no more; None: never.
    resume
        Begin with what a former run has left.
    """

    def __init__(
        self, trials: Trials, n_trials: int | None, timeout: float | None, resume: bool
    ) -> None:
        self.trials = trials
        self.until = math.inf if timeout is None else time.monotonic() + timeout
        self.left: float = math.inf if n_trials is None else n_trials
        self.waiting: list[Entry] = []
        if resume:
            assert trials.files is not None
            self.left -= trials.files.count
            self.waiting = trials.adopt()

    def first(self, width: int) -> list[Offer]:
        """See `Supply`."""
        found: list[Offer] = []
        while len(found) < width and (offer := self.next()) is not None:
            found.append(offer)
        return found

    def instead(self) -> Offer | None:
        """See `Supply`."""
        return self.next()

    def next(self) -> Offer | None:
        """See `Supply`."""
        if self.waiting:
            return _offer(self.waiting.pop(0))
        while self.left > 0 and time.monotonic() < self.until:
            self.left -= 1
            entry = self.trials.ask()
            if entry is not None:
                return _offer(entry)
        return None


def _offer(entry: Entry) -> Offer:
    return Offer(entry.job, entry.trial.number, entry.trial.params)
