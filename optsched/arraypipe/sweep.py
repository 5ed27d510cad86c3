"""`ArraySweep`: the trials of an Optuna study train side by side in the slots of a job array."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from optsched.arraypipe.callbacks import Callback, is_first_rank
from optsched.arraypipe.job import Job, JobFailed
from optsched.arraypipe.options import RunConfig
from optsched.arraypipe.plan.plan import without
from optsched.arraypipe.runtime.stages import waits_for_all
from optsched.errors import InputError, MissingExtra
from optsched.io.values import integer, number
from optsched.problems.jobarray.problem import JobArray
from optsched.solving.solve import solve

try:
    import optuna
    from optuna.trial import FixedTrial, Trial, TrialState
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "optuna":
        raise
    raise MissingExtra("ArraySweep", "sweep") from None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from os import PathLike

    from optuna.study import Study
    from optuna.trial import BaseTrial, FrozenTrial
    from torch import nn

    from optsched.arraypipe.distributed.group import Group
    from optsched.arraypipe.train_alone import Trained
    from optsched.arraypipe.trainer import ArrayTrainer, RunResult
    from optsched.model.schedule import Schedule

Suggest: TypeAlias = "Callable[[BaseTrial], Job]"
_SWEEPS: Final = count()  # of this process; all ranks make theirs in the same order
_LAST: Final = 10  # losses; their mean is the value of a job
_FOLDER: Final = "optsched:checkpoint"  # attributes of trials
_LOSSES: Final = "optsched:losses"


class TrialResult(NamedTuple):
    """Trial of a sweep, its job, and what was trained (None if it has not run in this process)."""

    trial: FrozenTrial
    job: Job
    losses: tuple[float, ...]
    model: nn.Module | None
    trained: Trained | None


@dataclass(frozen=True, eq=False)
class SweepResult:
    """Result of a sweep.

    Parameters
    ----------
    trials
        Those of this call, in the order in which they were begun.
    best
        The best that was trained to its end; None if there is none.
    run
        Trace and report of the run; None if no job could be trained.

    Examples
    --------
    >>> from optsched.arraypipe import SweepResult
    >>> SweepResult(trials=(), best=None, run=None).best is None  # none was trained to its end
    True
    """

    trials: tuple[TrialResult, ...]
    best: TrialResult | None
    run: RunResult | None

    def __repr__(self) -> str:
        best = "none" if self.best is None else f"trial {self.best.trial.number}"
        return f"<SweepResult: {len(self.trials)} trials, best: {best}>"


class ArraySweep:
    """Train the trials of a study in a job array; a free slot gets the next trial.

    A trial is judged by the value of `evaluate`, else by the mean of the last ten losses: reported
    every `RunConfig.every` iterations, when the pruner may end it, and at its end. A trial with
    a loss that is not finite or a forward that raises becomes ``FAIL`` (its attribute ``failure``
    has the reason), and the others go on.

    Parameters
    ----------
    trainer
        Model, data, stages and loss of all trials.
    study
        An Optuna study with one objective, and with any sampler and pruner. None on ranks above 0.
    suggest
        ``suggest(trial) -> Job``. A job without a name is called ``trial<number>``. Raising
        `optuna.TrialPruned` refuses a combination. All jobs need as many micro-batches.
    width
        Number of jobs that train at the same time.
    steps
        Iterations of a job that is not pruned.

    Examples
    --------
    >>> import optuna, torch
    >>> from torch import nn
    >>> from optsched.arraypipe import ArraySweep, ArrayTrainer, Job, RunConfig
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> trainer = ArrayTrainer(model, [(torch.ones(2), torch.zeros(2))] * 8, loss=nn.MSELoss())
    >>> def suggest(trial):
    ...     lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    ...     return Job(0, 8, lambda named: torch.optim.SGD(named, lr=lr))
    >>> sweep = ArraySweep(trainer, optuna.create_study(), suggest, width=2, steps=2)
    >>> result = sweep.run(n_trials=3, config=RunConfig(check=0, verbose=False))
    >>> [trial.job.status for trial in result.trials]
    ['done', 'done', 'done']
    """

    def __init__(
        self, trainer: ArrayTrainer, study: Study | None, suggest: Suggest, width: int, steps: int
    ) -> None:
        if not callable(suggest):
            raise InputError(f"suggest: expected a function, got {suggest!r:.60}")
        if not isinstance(study, optuna.Study) and (study is not None or is_first_rank()):
            raise InputError(f"study: expected an optuna.Study, got {study!r:.60}")
        if study is not None and len(study.directions) > 1:
            raise InputError(f"study: expected one objective, got {len(study.directions)}")
        self.trainer, self.study, self.suggest = trainer, study, suggest
        self.width, self.steps = integer("width", width, 1, None), integer("steps", steps, 1, None)

    def run(
        self,
        n_trials: int | None = None,
        timeout: float | None = None,
        *,
        schedule: Schedule | None = None,
        evaluate: Any = None,
        checkpoint: str | PathLike[str] | None = None,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        config: RunConfig | None = None,
    ) -> SweepResult:
        """Train until enough trials were begun and all of them have ended.

        After `study.stop()`, called by the sampler, a callback or `suggest`, no trial is begun.

        Parameters
        ----------
        n_trials
            Trials to begin; those of a checkpoint folder that is resumed count.
        timeout
            Seconds after which no trial is begun.
        schedule
            For `width` jobs.
        checkpoint, resume
            As for `ArrayTrainer.fit`. Trials that are interrupted stay unfinished in the study, and
            `resume` continues them; this needs the study's storage on disk.
        evaluate, callbacks, config
            As for `ArrayTrainer.fit`; `evaluate` with all devices in one process only. On ranks all
            of them run the sweep; those above 0 make the same jobs from the same parameters.
        """
        config = config or RunConfig()
        if n_trials is None and timeout is None:
            raise InputError("n_trials: expected a number of trials, or a timeout in seconds")
        if n_trials is not None:
            integer("n_trials", n_trials, 1, None)
        if timeout is not None:
            number("timeout", timeout, above=True, what="seconds")
        if evaluate is not None and config.on_ranks:
            raise InputError("evaluate: expected None on ranks, which have no whole model")
        with _stoppable(self.study) as stopped:
            trials = _Trials(
                self.study, self.suggest, self.steps, config.every, evaluate is not None, stopped,
                left=n_trials or math.inf, until_s=time.monotonic() + (timeout or math.inf),
            )  # fmt: skip
            if checkpoint is not None:
                trials.adopt(str(Path(checkpoint).resolve()), resume)
            options = {
                "checkpoint": checkpoint, "resume": resume, "evaluate": evaluate, "config": config,
                "callbacks": [trials, *callbacks],
            }  # fmt: skip
            try:
                run = self._train(trials, schedule, options)
                run = run and run.gather()
                trials.close()
            except BaseException as error:
                with suppress(Exception):  # the storage may be what has failed
                    trials.close(f"{type(error).__name__}: {error}")
                raise
        return self._result(trials, run)

    def _train(
        self, trials: _Trials, schedule: Schedule | None, options: dict[str, Any]
    ) -> RunResult | None:
        """Train as many first trials as there are slots, and what follows them."""
        if options["config"].on_ranks:
            from optsched.arraypipe.distributed.group import Group, join

            join()
            trials.group = Group(name=f"sweep{next(_SWEEPS)}")
        while jobs := trials.take(self.width):
            if schedule is None:
                order = _even_schedule(jobs, self.trainer.with_jobs(jobs).n_stages)
            else:
                order = without(schedule, range(len(jobs), self.width))
            try:
                return self.trainer.fit(jobs, self.steps, schedule=order, **options)
            except JobFailed:  # the first forward of all jobs: nothing was trained
                trials.close("")
        return None

    def _result(self, trials: _Trials, run: RunResult | None) -> SweepResult:
        if self.study is None:
            return SweepResult((), None, run)
        frozen, rows = self.study.get_trials(deepcopy=False), []
        place = {} if run is None else {job: k for k, job in enumerate(run.jobs)}
        for job, entry in trials.entries.items():
            k = place.get(job)
            made = (None, None) if run is None or k is None else (run.models[k], run.trained[k])
            losses = tuple(entry.losses)
            rows.append(TrialResult(frozen[entry.trial.number], job, losses, *made))
        done = [row for row in rows if row.trial.state == TrialState.COMPLETE]
        sign = -1 if self.study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
        best = min(done, key=lambda row: sign * (row.trial.value or 0.0), default=None)
        return SweepResult(tuple(rows), best, run)


@dataclass(eq=False)
class _Entry:
    """A trial of the study, and what is known of its job."""

    trial: Any
    losses: list[float] = field(default_factory=list)
    value: float = math.nan  # the newest of `evaluate`
    reported: set[int] = field(default_factory=set)  # iterations
    closed: bool = False  # the study has its state


@dataclass(eq=False)
class _Trials(Callback):
    """Takes trials from the study, reports their values and how they end."""

    study: Study | None
    suggest: Suggest
    steps: int
    every: int | None  # iterations between two reports
    evaluates: bool
    stopped: Event  # no trial is begun any more
    left: float  # trials to begin
    until_s: float  # no trial is begun later, on the monotonic clock
    group: Group | None = None  # of the ranks
    folder: str = ""  # checkpoints
    entries: dict[Job, _Entry] = field(default_factory=dict)
    waiting: list[Job] = field(default_factory=list)  # unfinished trials of a former run

    def adopt(self, folder: str, resume: bool) -> None:
        """Take the unfinished trials of a checkpoint folder; prune those that should have been."""
        self.folder = folder
        for frozen in [] if self.study is None else self.study.get_trials():
            if frozen.user_attrs.get(_FOLDER) != folder:
                continue
            if not resume:
                raise InputError(
                    f"checkpoint: a sweep has been written to {folder}; choose another folder, or "
                    f"resume=True to continue it"
                )
            self.left -= 1
            if frozen.state != TrialState.RUNNING:
                continue
            assert self.study is not None
            entry = _Entry(Trial(self.study, frozen._trial_id))
            entry.reported |= frozen.intermediate_values.keys()
            if 0 < max(entry.reported, default=0) < self.steps and entry.trial.should_prune():
                self._tell(entry, TrialState.PRUNED)
                continue
            first, losses = frozen.user_attrs.get(_LOSSES, (0, []))
            entry.losses = [math.nan] * first + losses
            self.waiting.append(self._enter(entry))

    def take(self, most: int) -> list[Job]:
        """Return the jobs of up to so many trials; all ranks call it alike."""
        if self.group is None:
            return self._ask(most)
        from optsched.arraypipe.distributed.group import agree

        local: list[Job] = []

        def rows() -> list[tuple[int, dict[str, Any]]]:
            local.extend(self._ask(most))
            trials = [self.entries[job].trial for job in local]
            return [(trial.number, trial.params) for trial in trials]

        asked = agree(rows, of_first=True)
        return agree(lambda: local or [self._job(FixedTrial(p, n)) for n, p in asked])

    def next_job(self, ended: Job) -> Job | None:
        """Return the job of another trial; other ranks call it only if the first had one."""
        if self.study is None:
            assert self.group is not None
            number, params = self.group.receive()
            return self._job(FixedTrial(params, number))
        job = next(iter(self._ask(1)), None)
        if job is not None and self.group is not None:
            trial = self.entries[job].trial
            self.group.broadcast((trial.number, trial.params))
        return job

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Note a loss; report the mean of the last losses."""
        if (entry := self.entries.get(job)) is None:  # on another rank
            return
        done = iteration + 1
        del entry.losses[iteration:]  # those after the checkpoint that it continues from
        entry.losses.append(loss)
        due = self.every is not None and done % self.every == 0
        if self.folder and (due or done == self.steps):  # before the checkpoint of the iteration
            first = max(0, done - _LAST - 2 * (self.every or 0))
            entry.trial.set_user_attr(_LOSSES, (first, entry.losses[first:]))
        if due and not self.evaluates:
            self._report(job, entry, done)

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Report a value."""
        entry, done = self.entries[job], iteration + 1
        entry.value = value
        if self.every is not None and done % self.every == 0 and not entry.closed:
            self._report(job, entry, done)

    def on_end(self, job: Job) -> None:
        """Write to the study how a trial has ended."""
        entry = self.entries.get(job)
        if entry is None or entry.closed:
            return
        if job.status == "failed":
            self._tell(entry, TrialState.FAIL, reason=str(job.error or "failed on another rank"))
        elif job.status == "done" or job.life.stopping:
            if math.isnan(value := self._value(entry)):
                self._tell(entry, TrialState.FAIL, reason="its value is not a number")
            else:
                self._tell(entry, TrialState.COMPLETE, value)

    def close(self, reason: str = "interrupted") -> None:
        """After the run: trials that were interrupted fail, or wait for a resume."""
        for job, entry in self.entries.items():
            self.on_end(job)
            if not entry.closed and not self.folder:
                self._tell(entry, TrialState.FAIL, reason=reason)

    def _ask(self, most: int) -> list[Job]:
        """Return jobs of trials that a former run has left, then of new trials."""
        found, self.waiting = self.waiting[:most], self.waiting[most:]
        while self.study and len(found) < most and self.left > 0 and not self.stopped.is_set():
            if time.monotonic() >= self.until_s:
                break
            self.left -= 1
            entry = _Entry(self.study.ask())
            try:
                found.append(self._enter(entry))
            except optuna.TrialPruned:
                self._tell(entry, TrialState.PRUNED)
            except BaseException:
                self._tell(entry, TrialState.FAIL)
                raise
        return found

    def _enter(self, entry: _Entry) -> Job:
        job = self._job(entry.trial)
        self.entries[job] = entry
        if self.folder:
            entry.trial.set_user_attr(_FOLDER, self.folder)
        return job

    def _job(self, trial: Any) -> Job:
        job: Any = self.suggest(trial)
        if not isinstance(job, Job):
            raise InputError(f"suggest: expected a Job for trial {trial.number}, got {job!r:.60}")
        return job if job.name else replace(job, name=f"trial{trial.number}")

    def _value(self, entry: _Entry) -> float:
        last = entry.losses[-_LAST:]
        return entry.value if self.evaluates or not last else math.fsum(last) / len(last)

    def _report(self, job: Job, entry: _Entry, done: int) -> None:
        """Report the value, and stop the job if the trial is pruned."""
        if done not in entry.reported:  # a resumed job passes some iterations a second time
            entry.trial.report(self._value(entry), done)
            entry.reported.add(done)
        if done < self.steps and entry.trial.should_prune():
            job.stop()
            self._tell(entry, TrialState.PRUNED)

    def _tell(
        self, entry: _Entry, state: TrialState, value: float | None = None, reason: str = ""
    ) -> None:
        assert self.study is not None
        entry.closed = True
        if reason:
            entry.trial.set_user_attr("failure", reason)
        self.study.tell(entry.trial, value, state=state)


def _even_schedule(jobs: Sequence[Job], n_stages: int) -> Schedule:
    """Return a rolling schedule for stages and jobs that take equally long, one device per stage.

    Trials come and go, and the first may fail, so that nothing is measured. Updates are blocks
    of their own if one of these jobs clips its gradients.
    """
    waits = any(waits_for_all(job) for job in jobs)
    problem = JobArray(
        [[2] * n_stages] * len(jobs), [[4] * n_stages] * len(jobs), update=int(waits),
        update_mode="global" if waits else "fused", update_blocks_gradient=True,
        micro_batches=[job.microbatches for job in jobs], objective="period",
    )  # fmt: skip
    found = solve(problem, "dispatch").schedule
    assert found is not None
    return found


@contextmanager
def _stoppable(study: Study | None) -> Iterator[Event]:
    """Let `study.stop()` set an event; Optuna refuses it outside of `Study.optimize`."""
    stopped = Event()
    if study is None:
        yield stopped
        return
    study.stop = stopped.set  # type: ignore[method-assign]
    try:
        yield stopped
    finally:
        del study.stop
