"""The trials of a sweep: where they come from, how they are judged, what is kept of them."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from optuna import TrialPruned
from optuna.trial import Trial, TrialState

from optsched.arraypipe.job import Job
from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from optuna.study import Study
    from optuna.trial import BaseTrial


_FORMAT: Final = "optsched.sweep/1"
LAST: Final = 10
"""Losses whose mean is the value of a job, unless the caller says otherwise."""

Suggest: TypeAlias = "Callable[[BaseTrial], Job]"
Value: TypeAlias = "Callable[[Job, Sequence[float]], float]"


@dataclass(frozen=True)
class TrialFiles:
    """``<folder>/trial<number>.sweep.json``: the losses of a trial, at least up to its checkpoint.

    The loss of an iteration is known before its update, hence written before its checkpoint. The
    first file says that the trial was begun here; others may be at work on the study.
    """

    folder: Path  # that of the checkpoints
    study: str  # name of the study
    every: int | None  # iterations between checkpoints; None: only at the end of a job

    @property
    def count(self) -> int:
        """Trials that were begun."""
        return len(list(self.folder.glob("trial*.sweep.json")))

    def path(self, number: int) -> Path:
        """Of the file of a trial."""
        return self.folder / f"trial{number}.sweep.json"

    def due(self, done: int, steps: int) -> bool:
        """Whether a checkpoint is written after so many iterations."""
        return done == steps or (self.every is not None and done % self.every == 0)

    def write(self, number: int, losses: Sequence[float]) -> None:
        """Keep the losses of a trial."""
        row = {"format": _FORMAT, "study": self.study, "trial": number, "losses": list(losses)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"checkpoint: {self.folder} cannot be made ({error})") from error
        write_atomic(self.path(number), json.dumps(row) + "\n")

    def read(self, number: int) -> list[float]:
        """The losses of a trial; `InputError` if the file is damaged, or of another study."""
        path = self.path(number)
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


@dataclass(eq=False)
class Entry:
    """A trial and its job."""

    trial: Trial
    job: Job
    losses: list[float] = field(default_factory=list)  # of all iterations, before a resume too
    reported: set[int] = field(default_factory=set)  # iterations
    told: bool = False  # the study knows how it has ended


@dataclass(eq=False)
class Trials:
    """Speaks with the study; knows nothing of devices and schedules."""

    study: Study  # of one objective
    suggest: Suggest  # makes the job of a trial
    steps: int  # iterations of a job that is not pruned
    rungs: Sequence[int]  # iterations after which the pruner is asked
    value: Value  # of a job and its losses so far; reported at rungs and told at the end
    files: TrialFiles | None  # where losses are kept for a resume
    entries: dict[Job, Entry] = field(default_factory=dict)  # as they were begun

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
        found = []
        for frozen in self.study.get_trials(states=(TrialState.RUNNING,)):
            if not self.files.path(frozen.number).exists():
                continue
            trial = Trial(self.study, frozen._trial_id)
            last = max(frozen.intermediate_values, default=0)
            if 0 < last < self.steps and trial.should_prune():
                self.study.tell(trial, state=TrialState.PRUNED)
                continue
            job = made(self.suggest, trial, trial.number)
            losses = self.files.read(trial.number)
            found.append(self._enter(Entry(trial, job, losses, {*frozen.intermediate_values})))
        return found

    def hear(self, job: Job, iteration: int, loss: float) -> None:
        """Take the loss of an iteration; at a rung report, and stop the job if it is pruned."""
        entry, done = self.entries[job], iteration + 1
        if len(entry.losses) < iteration:
            raise InputError(
                f"checkpoint: trial {entry.trial.number} goes on from iteration {iteration}, but "
                f"only {len(entry.losses)} losses are in {self.files and self.files.folder}"
            )
        del entry.losses[iteration:]  # those behind the checkpoint that it goes on from
        entry.losses.append(loss)
        if self.files is not None and self.files.due(done, self.steps):
            self.files.write(entry.trial.number, entry.losses)
        if done not in self.rungs:
            return
        if done not in entry.reported:  # a resumed job passes some rungs a second time
            entry.trial.report(self._value(entry), done)
            entry.reported.add(done)
        if done < self.steps and entry.trial.should_prune():
            job.stop()
            self._tell(entry, TrialState.PRUNED)

    def settle(self, job: Job) -> None:
        """Tell the study of a job that has ended, as far as it is known how.

        On a GPU the last loss is read late; a job that lacks it is settled by `close`.
        """
        entry = self.entries[job]
        if entry.told:
            return
        if job.status == "failed":
            self._fail(entry, str(job.error or "failed on another device"))
        elif len(entry.losses) == self.steps or job.life.stopping:
            value = self._value(entry)
            if math.isnan(value):
                self._fail(entry, "its value is not a number")
            else:
                self._tell(entry, TrialState.COMPLETE, value)

    def close(self, reason: str) -> None:
        """After the run: settle what is left.

        Jobs that were interrupted fail for this reason; with files their trials stay unfinished
        instead, for a resume.
        """
        for entry in self.entries.values():
            self.settle(entry.job)
            if not entry.told and self.files is not None:
                self.files.write(entry.trial.number, entry.losses)
            elif not entry.told:
                self._fail(entry, reason)

    def abandon(self, reason: str) -> None:
        """After an exception: as `close`, but nothing is computed any more.

        The study's storage may be what has failed: what it raises does not hide the exception.
        """
        for entry in self.entries.values():
            if not entry.told and self.files is None:
                with suppress(Exception):
                    self._fail(entry, reason)

    def _enter(self, entry: Entry) -> Entry:
        self.entries[entry.job] = entry
        if self.files is not None:
            self.files.write(entry.trial.number, entry.losses)
        return entry

    def _value(self, entry: Entry) -> float:
        found = self.value(entry.job, tuple(entry.losses))
        try:
            return float(found)
        except (TypeError, ValueError):
            number = entry.trial.number
            raise InputError(
                f"value: expected a number for trial {number}, got {found!r:.60}"
            ) from None

    def _fail(self, entry: Entry, reason: str) -> None:
        entry.trial.set_user_attr("failure", reason)
        self._tell(entry, TrialState.FAIL)

    def _tell(self, entry: Entry, state: TrialState, value: float | None = None) -> None:
        self.study.tell(entry.trial, value, state=state)
        entry.told = True


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

    With `resume` those come first that a former run has left.
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

    def next(self) -> Offer | None:
        """See `Supply`."""
        entry = self.waiting.pop(0) if self.waiting else None
        while entry is None and self.left > 0 and time.monotonic() < self.until:
            self.left -= 1
            entry = self.trials.ask()
        if entry is None:
            return None
        return Offer(entry.job, entry.trial.number, entry.trial.params)

    instead = next
