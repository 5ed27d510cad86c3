"""`ArraySweep`: the trials of an Optuna study train side by side in a job array."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from optsched.arraypipe.job import Job, JobFailed
from optsched.arraypipe.life.changes import fits_seat
from optsched.arraypipe.plan.orders import without
from optsched.arraypipe.plan.plan import compile
from optsched.arraypipe.plan.segments import places
from optsched.arraypipe.runtime.environment import is_follower
from optsched.arraypipe.runtime.stages import waits_for_all
from optsched.errors import InputError, MissingExtra
from optsched.io.values import integer, number, one_of
from optsched.model.schedule import Schedule
from optsched.solving.solve import solve

try:
    from optuna.samplers import BruteForceSampler, GridSampler
    from optuna.study import Study, StudyDirection
    from optuna.trial import TrialState
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "optuna":
        raise
    raise MissingExtra("ArraySweep", "sweep") from None

from optsched.arraypipe.sweep.trials import TrialFiles, Trials, mean_of_last

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from os import PathLike

    from optuna.trial import FrozenTrial
    from torch import nn

    from optsched.arraypipe.evaluation import Evaluation
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.sweep.trials import Entry, Suggest, TrialCallback, Value
    from optsched.arraypipe.train_alone import Trained
    from optsched.arraypipe.trainer import ArrayTrainer
    from optsched.arraypipe.training_run import RunResult

Made = TypeVar("Made")
_SWEEPS: Final = count()  # of this process; all ranks make theirs in the same order


class TrialResult(NamedTuple):
    """One trial of a sweep.

    Parameters
    ----------
    trial
        What the study has of it: number, parameters, state, value.
    job
        Its job; `Job.status` and `Job.error` say how it ended.
    losses
        Of all its iterations.
    model
        The unsplit model as it was when the job ended; None if it has not run in this process.
    trained
        Parameters, buffers and optimizer states under unsplit names, and the losses of this run.
    """

    trial: FrozenTrial
    job: Job
    losses: tuple[float, ...]
    model: nn.Module | None
    trained: Trained | None


@dataclass(frozen=True, eq=False)
class SweepResult:
    """What a sweep made.

    Parameters
    ----------
    trials
        Those of this call, in the order in which they were begun.
    best
        The best that was trained to its end; None if there is none.
    run
        Trace and report of the run; None if no job was left to run.
    """

    trials: tuple[TrialResult, ...]
    best: TrialResult | None
    run: RunResult | None


class ArraySweep:
    """Trains the trials of a study in a job array; a seat that becomes free asks for another.

    Parameters
    ----------
    trainer
        Whose model, stages, loss and data are used; jobs that it has are not trained. Or a function
        that makes the trainer of the first jobs.
    study
        An Optuna study of one objective, with any sampler and pruner.
    suggest
        ``suggest(trial) -> Job`` for every trial. A job without a name is called ``trial<number>``.
        Raising `optuna.TrialPruned` refuses a combination. All jobs need as many micro-batches;
        batch sizes may differ.
    width
        Number of seats: jobs that train at the same time.
    steps
        Iterations of a job that is not pruned.
    rungs
        Numbers of iterations after which a job's value is reported and the pruner is asked; one
        that is pruned does not begin another iteration (on a GPU it does one more). In any order.
    schedule
        For `width` jobs; job j of it is seat j. By default a rolling one for equal block times.
    value
        ``value(job, losses) -> float`` of the losses so far: reported at rungs, told at the end.
        By default the mean of the last ten losses.
    evaluate
        Instead of `value`: what `ArrayTrainer.fit` takes as `evaluate`, called with the merged
        model at rungs and at the end. In one process only.
    callbacks
        As for `Study.optimize`: called with ``(study, trial)`` after every trial that has ended,
        on the first rank.

    Raises
    ------
    InputError
        An argument is wrong, or the study has several objectives.
    """

    def __init__(
        self,
        trainer: ArrayTrainer | Callable[[Sequence[Job]], ArrayTrainer],
        study: Study | None,
        suggest: Suggest,
        width: int,
        steps: int,
        rungs: Sequence[int] = (),
        *,
        schedule: Schedule | None = None,
        value: Value | None = None,
        evaluate: Any = None,
        callbacks: Sequence[TrialCallback] = (),
    ) -> None:
        make_trainer = getattr(trainer, "with_jobs", trainer)
        if not callable(make_trainer):
            raise InputError(
                f"trainer: expected an ArrayTrainer, or a function that makes one of jobs, got "
                f"{trainer!r:.60}"
            )
        for key, function in (("suggest", suggest), ("value", value or mean_of_last)):
            if not callable(function):
                raise InputError(f"{key}: expected a function, got {function!r:.60}")
        if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
            raise InputError(f"callbacks: expected a list of functions, got {callbacks!r:.60}")
        self.callbacks = tuple(callbacks)
        for k, callback in enumerate(self.callbacks):
            if not callable(callback):
                raise InputError(f"callbacks[{k}]: expected a function, got {callback!r:.60}")
        if evaluate is not None and value is not None:
            raise InputError("value: expected none beside evaluate, which is what trials are told")
        if not isinstance(study, Study) and not (study is None and is_follower()):
            raise InputError(f"study: expected an optuna.Study, got {study!r:.60}")
        if study is not None and len(study.directions) > 1:
            raise InputError(
                f"study: has {len(study.directions)} objectives, and pruning knows only one; make "
                f"a study with one direction, or fold them into one in value()"
            )
        if isinstance(rungs, (str, bytes)) or not isinstance(rungs, Iterable):
            raise InputError(f"rungs: expected a list of iterations, got {rungs!r:.60}")
        self.make_trainer, self.study, self.suggest = make_trainer, study, suggest
        self.width, self.steps = integer("width", width, 1, None), integer("steps", steps, 1, None)
        self.rungs = tuple(integer("rungs", rung, 1, steps) for rung in rungs)
        for rung in self.rungs:
            if self.rungs.count(rung) > 1:
                raise InputError(f"rungs: expected each once, got {rung} twice")
        if schedule is not None:
            if not isinstance(schedule, Schedule):
                raise InputError(f"schedule: expected a Schedule, got {schedule!r}")
            if (n_jobs := int(schedule.job.max(initial=-1)) + 1) != width:
                raise InputError(
                    f"schedule: has {n_jobs} jobs, expected as many as the width, {width}"
                )
        self.schedule, self.value, self.evaluate = schedule, value or mean_of_last, evaluate

    def run(
        self,
        n_trials: int | None = None,
        timeout: float | None = None,
        *,
        checkpoint: str | PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int = 2,
        resume: bool = False,
        on_step: Callable[[Job, int, float], object] | None = None,
        backend: Literal["inline", "process"] = "inline",
    ) -> SweepResult:
        """Train until enough trials have been begun and all of them have ended.

        Every trial is told as soon as it is known how it ended: its value, ``PRUNED``, or ``FAIL``
        (its loss is not finite or a block raised; the trial's attribute ``failure`` says why).
        The others go on. After `study.stop()`, called by the sampler, a callback or any function of
        the sweep, no trial is begun any more.

        Parameters
        ----------
        n_trials
            Trials to begin; those in a folder that is resumed count. Not needed with a sampler
            that comes to an end (`GridSampler`, `BruteForceSampler`), or with callbacks.
        timeout
            Seconds after which no trial is begun any more.
        checkpoint, checkpoint_every, keep
            As for `ArrayTrainer.run`. Interrupted trials stay unfinished in the study then.
        resume
            Go on with the unfinished trials of that folder; finished ones are not repeated. Needs
            the study's storage on disk.
        on_step
            Called with ``(job, iteration, loss)``; ``job.stop()`` ends the trial with the value
            that it has.
        backend
            As for `ArrayTrainer.run`. With ``"process"`` all ranks make the sweep and run it. The
            first one asks and tells the study and has the trials in its result; the others (their
            `study` may be None) make the same jobs by
            ``suggest(optuna.trial.FixedTrial(params, number))``.

        Raises
        ------
        InputError
            An argument is wrong, or `suggest` or `value` gave something that cannot be used.
        """
        if n_trials is not None:
            integer("n_trials", n_trials, 1, None)
        if timeout is not None:
            number("timeout", timeout, above=True, what="seconds")
        one_of("backend", backend, ("inline", "process"))
        if self.evaluate is not None and backend == "process":
            raise InputError(
                'evaluate: expected backend="inline"; a rank has only its stages of a model'
            )
        options = {
            "checkpoint": checkpoint, "checkpoint_every": checkpoint_every, "keep": keep,
            "resume": resume, "backend": backend,
        }  # fmt: skip
        with _stoppable(self.study) as stopped:
            begin = partial(self._trials, n_trials, timeout, stopped, options)
            trials = _on_all_ranks(begin, backend)
            if backend == "process":
                from optsched.arraypipe.distributed.group import Group

                trials.group = Group(name=f"sweep{next(_SWEEPS)}")
            try:
                run = self._train(trials, on_step, options)
                run = run and run.gather()
                models = () if run is None else zip(run.jobs, run.models, strict=False)
                trials.close(dict(models))
            except BaseException as error:
                trials.abandon(f"{type(error).__name__}: {error}")
                raise
        return self._result(trials, run)

    def _trials(
        self,
        n_trials: int | None,
        timeout: float | None,
        stopped: Event,
        options: dict[str, Any],
    ) -> Trials:
        follows = options["backend"] == "process" and is_follower()
        study, files = None if follows else self.study, None
        ends = study is None or isinstance(study.sampler, (GridSampler, BruteForceSampler))
        if n_trials is None and timeout is None and not (ends or self.callbacks):
            raise InputError("n_trials: expected a number of trials, or a timeout in seconds")
        folder, every = options["checkpoint"], options["checkpoint_every"]
        if folder is None and (every is not None or options["resume"]):
            raise InputError("checkpoint: expected a folder to write to or resume from")
        if folder is not None and study is not None:
            files = TrialFiles(Path(folder), study.study_name, every)
            if not options["resume"] and files.count:
                raise InputError(
                    f"checkpoint: a sweep has been written to {files.folder}; choose another "
                    f"folder, or resume=True to go on with it"
                )
        left: float = math.inf if n_trials is None else n_trials
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        return Trials(
            study, self.suggest, self.steps, self.rungs, self.value, left, until_s, stopped, files,
            callbacks=self.callbacks,
        )  # fmt: skip

    def _train(
        self,
        trials: Trials,
        on_step: Callable[[Job, int, float], object] | None,
        options: dict[str, Any],
    ) -> RunResult | None:
        def on_loss(job: Job, iteration: int, loss: float) -> None:
            trials.on_loss(job, iteration, loss)
            if on_step is not None:
                on_step(job, iteration, loss)

        jobs = [entry.job for entry in trials.take(self.width)]
        while jobs:
            make = partial(self._made, jobs, options["backend"])
            trainer, plan = _on_all_ranks(make, options["backend"])
            seats = {job: seat for seat, job in enumerate(jobs)}

            def refill(
                ended: Job, plan: ExecutionPlan = plan, seats: dict[Job, int] = seats
            ) -> Job | None:
                trials.settle(ended)
                if (newest := next(reversed(seats))).error is not None:  # it could not be made
                    trials.settle(newest)
                entry = trials.next()
                if entry is None:
                    return None
                _check_fits(entry, plan, seats[ended])
                seats[entry.job] = seats[ended]
                return entry.job

            try:
                return trainer.run(
                    plan, self.steps, on_step=on_loss, refill=refill,
                    evaluation=self._evaluation(trials, trainer), **options,
                )  # fmt: skip
            except JobFailed as error:
                # only a first forward of the first jobs raises: nothing has been trained
                trials.settle(jobs.pop(error.job))
                jobs += [entry.job for entry in trials.take(1)]
        return None

    def _evaluation(self, trials: Trials, trainer: ArrayTrainer) -> Evaluation | None:
        if self.evaluate is None:
            return None
        from optsched.arraypipe.evaluation import Evaluation, measure_of

        trials.measure = measure_of(self.evaluate, trainer.loss)
        return Evaluation(
            trainer.build_model, trials.measure, lambda done: done in self.rungs,
            lambda job, iteration, value, model: trials.on_value(job, iteration, value),
            on_host=trainer.memory is not None,
        )  # fmt: skip

    def _made(self, jobs: Sequence[Job], backend: str) -> tuple[ArrayTrainer, ExecutionPlan]:
        """A trainer of the first jobs, which may be fewer than seats, and the plan for it."""
        from optsched.arraypipe.trainer import ArrayTrainer

        trainer, schedule = self.make_trainer(jobs), self.schedule
        if not isinstance(trainer, ArrayTrainer):
            raise InputError(f"trainer: expected to get an ArrayTrainer, got {trainer!r:.60}")
        if schedule is None:
            schedule = _even_schedule(trainer.jobs, trainer.n_stages)
        elif len(jobs) < self.width:
            schedule = without(schedule, range(len(jobs), self.width))
        if any(waits_for_all(job) for job in trainer.jobs):
            # whoever takes the seat later may clip its gradients too
            plan = compile(schedule, together=set(schedule.job[schedule.kind == "U"].tolist()))
        else:
            plan = trainer.plan(schedule)
        for seat in range(plan.n_jobs) if backend == "process" else ():
            if 0 not in places(plan, seat):  # losses come to the first rank with the gradients
                raise InputError(
                    f"schedule: the first device has no stage of job {seat}; the first rank "
                    f"reports the losses of all trials, so it needs a stage of each"
                )
        return trainer, plan

    def _result(self, trials: Trials, run: RunResult | None) -> SweepResult:
        study, rows = trials.study, []
        if study is None:
            return SweepResult((), None, run)
        frozen = study.get_trials(deepcopy=False)
        place = {} if run is None else {job: k for k, job in enumerate(run.jobs)}
        for entry in trials.entries.values():
            k = place.get(entry.job)
            made = (None, None) if run is None or k is None else (run.models[k], run.trained[k])
            row = TrialResult(frozen[entry.trial.number], entry.job, tuple(entry.losses), *made)
            rows.append(row)
        done = [row for row in rows if row.trial.state == TrialState.COMPLETE]
        sign = -1 if study.direction == StudyDirection.MAXIMIZE else 1
        best = min(done, key=lambda row: sign * (row.trial.value or 0.0), default=None)
        return SweepResult(tuple(rows), best, run)


def _even_schedule(jobs: Sequence[Job], n_stages: int) -> Schedule:
    """A rolling schedule for stages and jobs that take equally long, one device per stage.

    Trials come and go, so the times of the first ones say little about the later ones. Updates are
    blocks of their own if one of these jobs clips its gradients.
    """
    from optsched.problems.jobarray.problem import JobArray

    waits = any(waits_for_all(job) for job in jobs)
    problem = JobArray(
        [[2] * n_stages] * len(jobs),
        [[4] * n_stages] * len(jobs),
        update=int(waits),
        update_mode="global" if waits else "fused",
        update_blocks_gradient=True,
        micro_batches=[job.microbatches for job in jobs],
        objective="period",
        name=f"sweep of width {len(jobs)}",
    )
    found = solve(problem, "dispatch").schedule
    assert found is not None
    return found


def _check_fits(entry: Entry, plan: ExecutionPlan, seat: int) -> None:
    job, wanted = entry.job, plan.microbatches[seat]
    if fits_seat(job, plan, seat):
        return
    if job.microbatches != wanted:
        raise InputError(
            f"suggest: trial {entry.trial.number} has {job.microbatches} micro-batches, and the "
            f"seat that is free has {wanted}; all jobs of a sweep must have equally many"
        )
    raise InputError(
        f"suggest: trial {entry.trial.number} clips its gradients or adapts its learning rate to "
        f"the loss, and the seat that is free has no update blocks that wait for all stages; let "
        f"the first {plan.n_jobs} trials do so too, or give a schedule of a JobArray with "
        f'update_mode="global" and clip by a large norm instead of not at all'
    )


@contextmanager
def _stoppable(study: Study | None) -> Iterator[Event]:
    """Let `study.stop()` set an event inside; Optuna refuses it outside of `Study.optimize`."""
    stopped = Event()
    if study is None:
        yield stopped
        return
    study.stop = stopped.set  # type: ignore[method-assign]
    try:
        yield stopped
    finally:
        del study.stop


def _on_all_ranks(make: Callable[[], Made], backend: str) -> Made:
    if backend == "inline":
        return make()
    from optsched.arraypipe.distributed.group import agree

    return agree(make)
