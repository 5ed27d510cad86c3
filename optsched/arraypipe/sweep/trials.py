"""The trials of a sweep: asked of the study, judged, told to it, kept in files."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from optuna import TrialPruned
from optuna.samplers import BruteForceSampler, GridSampler
from optuna.trial import FixedTrial, Trial, TrialState

from optsched.arraypipe.job import Job
from optsched.arraypipe.runtime.environment import global_state_kept
from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from threading import Event

    from optuna.study import Study
    from optuna.trial import BaseTrial, FrozenTrial
    from torch import nn

    from optsched.arraypipe.distributed.group import Group
    from optsched.arraypipe.evaluation import Measure


_FORMAT: Final = "optsched.sweep/1"

Suggest: TypeAlias = "Callable[[BaseTrial], Job]"
TrialCallback: TypeAlias = "Callable[[Study, FrozenTrial], object]"
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

    trial: Any  # of Optuna; on ranks above 0 a `FixedTrial`
    job: Job
    losses: list[float] = field(default_factory=list)  # of all iterations, before a resume too
    values: dict[int, float] = field(default_factory=dict)  # of `evaluate`, by iterations done
    reported: set[int] = field(default_factory=set)  # iterations
    told: bool = False  # the study knows how it has ended


@dataclass(eq=False)
class Trials:
    """Speaks with the study; knows nothing of devices and schedules.

    On several ranks the first one does; the others, which have no `study`, make the same jobs of
    the same parameters.
    """

    study: Study | None  # of one objective
    suggest: Suggest  # makes the job of a trial
    steps: int  # iterations of a job that is not pruned
    rungs: Sequence[int]  # iterations after which the pruner is asked
    value: Value  # of a job and its losses so far; reported at rungs and told at the end
    left: float  # trials to begin yet
    until_s: float  # when no trial is begun any more, on the monotonic clock
    stopped: Event  # set by `study.stop()`: no trial is begun any more
    files: TrialFiles | None = None  # where losses are kept for a resume
    group: Group | None = None  # of the ranks
    measure: Measure | None = None  # of a job and its model, instead of `value`
    callbacks: Sequence[TrialCallback] = ()  # called after every trial that has ended
    entries: dict[Job, Entry] = field(default_factory=dict)  # as they were begun; the first rank's

    def __post_init__(self) -> None:
        self.left -= 0 if self.files is None else self.files.count
        self.waiting = self._adopted()  # begin before others

    def take(self, most: int) -> list[Entry]:
        """So many trials, fewer if there are no more; all ranks call it alike."""
        if self.group is None:
            return self._asked(most)
        from optsched.arraypipe.distributed.group import agree

        own: list[Entry] = []

        def rows() -> list[tuple[int, dict[str, Any]]]:
            own.extend(self._asked(most))
            return [(entry.trial.number, entry.trial.params) for entry in own]

        asked = agree(rows, of_first=True)
        return agree(lambda: own or [self._made(*row) for row in asked])

    def next(self) -> Entry | None:
        """One for a seat that has become free; the other ranks ask only when the first had one."""
        if self.study is None:
            assert self.group is not None
            return self._made(*self.group.receive())
        entry = next(iter(self._asked(1)), None)
        if entry is not None and self.group is not None:
            self.group.broadcast((entry.trial.number, entry.trial.params))
        return entry

    def _asked(self, most: int) -> list[Entry]:
        """Those that a former run has left, then new ones, unless `suggest` refuses them."""
        found, self.waiting = self.waiting[:most], self.waiting[most:]
        study = self.study
        while study and len(found) < most and self.left > 0 and time.monotonic() < self.until_s:
            if self._ended(study):
                break
            self.left -= 1
            trial = study.ask()
            try:
                job = made(self.suggest, trial, trial.number)
            except TrialPruned:
                self._tell(trial, TrialState.PRUNED)
            except BaseException:
                study.tell(trial, state=TrialState.FAIL)
                raise
            else:
                found.append(self._enter(Entry(trial, job)))
        return found

    def _ended(self, study: Study) -> bool:
        """Whether `study.stop()` was called, or an exhaustive sampler has begun all its points.

        Optuna checks the latter when a trial ends; with several slots some points would be trained
        twice until then.
        """
        sampler = study.sampler
        if self.stopped.is_set() or not isinstance(sampler, (GridSampler, BruteForceSampler)):
            return self.stopped.is_set()
        trials = study.get_trials(deepcopy=False)
        if isinstance(sampler, GridSampler):
            own = {entry.trial.number for entry in self.entries.values()}
            begun = {t.system_attrs.get("grid_id") for t in trials if t.number in own}
            return begun.issuperset(sampler._get_unvisited_grid_ids(study))
        if last := next((t for t in reversed(trials) if t.params), None):
            sampler.after_trial(study, last, last.state, last.values)
        return self.stopped.is_set()

    def _made(self, number: int, params: dict[str, Any]) -> Entry:
        trial = FixedTrial(params, number)
        return Entry(trial, made(self.suggest, trial, number))

    def _adopted(self) -> list[Entry]:
        """The trials of these files that a former run has left unfinished.

        A trial whose prune was not written down any more is pruned now.
        """
        found: list[Entry] = []
        if self.files is None or self.study is None:
            return found
        for frozen in self.study.get_trials(states=(TrialState.RUNNING,)):
            if not self.files.path(frozen.number).exists():
                continue
            trial = Trial(self.study, frozen._trial_id)
            last = max(frozen.intermediate_values, default=0)
            if 0 < last < self.steps and trial.should_prune():
                self._tell(trial, TrialState.PRUNED)
                continue
            entry = Entry(trial, made(self.suggest, trial, trial.number))
            entry.losses = self.files.read(trial.number)
            entry.reported |= frozen.intermediate_values.keys()
            found.append(self._enter(entry))
        return found

    def on_loss(self, job: Job, iteration: int, loss: float) -> None:
        """Take the loss of an iteration, by which the job is judged if nothing is evaluated."""
        entry, done = self.entries[job], iteration + 1
        if len(entry.losses) < iteration:
            raise InputError(
                f"checkpoint: trial {entry.trial.number} goes on from iteration {iteration}, but "
                f"only {len(entry.losses)} losses are in {self.files and self.files.folder}"
            )
        del entry.losses[iteration:]  # those behind the checkpoint that it goes on from
        entry.losses.append(loss)
        every = self.files and self.files.every
        if self.files is not None and (done == self.steps or (every and done % every == 0)):
            self.files.write(entry.trial.number, entry.losses)
        if self.measure is None and done in self.rungs:
            self._judge(entry, done)

    def on_value(self, job: Job, iteration: int, value: float) -> None:
        """Take the value of the model after an iteration."""
        entry, done = self.entries[job], iteration + 1
        entry.values[done] = value
        if done in self.rungs and not entry.told:
            self._judge(entry, done)

    def _judge(self, entry: Entry, done: int) -> None:
        """Report at a rung, and stop the job if it is pruned."""
        if done not in entry.reported:  # a resumed job passes some rungs a second time
            entry.trial.report(self._value(entry, done), done)
            entry.reported.add(done)
        if done < self.steps and entry.trial.should_prune():
            entry.job.stop()
            self._finish(entry, TrialState.PRUNED)

    def settle(self, job: Job, model: nn.Module | None = None) -> None:
        """Tell the study of a job that has ended, as far as it is known how.

        On a GPU the last loss is read late, and a job that was stopped has not been evaluated: then
        it is settled by `close`, with its `model`.
        """
        entry = self.entries.get(job)
        if entry is None or entry.told:
            return
        done = len(entry.losses)
        if job.status == "failed":
            self._fail(entry, str(job.error or "failed on another device"))
        elif done == self.steps or job.life.stopping:
            if self.measure is not None and done not in entry.values:
                if model is None:
                    return
                with global_state_kept(), torch.no_grad():
                    copy = deepcopy(model).eval()  # a tensor of the result may not change
                    entry.values[done] = float(self.measure(job, copy, torch.device("cpu")))
            value = self._value(entry, done)
            if math.isnan(value):
                self._fail(entry, "its value is not a number")
            else:
                self._finish(entry, TrialState.COMPLETE, value)

    def close(self, models: Mapping[Job, nn.Module]) -> None:
        """After the run: settle what is left.

        Jobs that were interrupted fail; with files their trials stay unfinished instead, for a
        resume.
        """
        for entry in self.entries.values():
            self.settle(entry.job, models.get(entry.job))
            if not entry.told and self.files is not None:
                self.files.write(entry.trial.number, entry.losses)
            elif not entry.told:
                self._fail(entry, "interrupted")

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

    def _value(self, entry: Entry, done: int) -> float:
        if self.measure is not None:
            return entry.values[done]
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
        self._finish(entry, TrialState.FAIL)

    def _finish(self, entry: Entry, state: TrialState, value: float | None = None) -> None:
        entry.told = True
        self._tell(entry.trial, state, value)

    def _tell(self, trial: Trial, state: TrialState, value: float | None = None) -> None:
        assert self.study is not None
        self.study.tell(trial, value, state=state)
        for callback in self.callbacks:
            callback(self.study, deepcopy(self.study.get_trials(deepcopy=False)[trial.number]))


def made(suggest: Suggest, trial: BaseTrial, number: int) -> Job:
    """The job of a trial, named after it if it has no name."""
    job: Any = suggest(trial)
    if not isinstance(job, Job):
        raise InputError(f"suggest: expected a Job for trial {number}, got {job!r:.60}")
    return job if job.name else replace(job, name=f"trial{number}")


def mean_of_last(job: Job, losses: Sequence[float]) -> float:
    """Mean of the last ten losses, or of all if there are fewer."""
    last = losses[-10:]
    return math.fsum(last) / len(last) if last else math.nan
