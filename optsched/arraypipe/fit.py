"""`ArrayTrainer.fit`: measures, orders, checks, trains, shows and saves."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from optsched.arraypipe.callbacks import Callback, FitInfo
from optsched.arraypipe.checkpoint.states import digest
from optsched.arraypipe.evaluation import Evaluation, measure_of
from optsched.arraypipe.job import Job, JobFailed
from optsched.arraypipe.plan.plan import ExecutionPlan
from optsched.arraypipe.repeats import cause
from optsched.arraypipe.report.explain import predict
from optsched.arraypipe.runtime.environment import (
    global_state_kept,
    is_follower,
    own_first,
    resolve,
)
from optsched.arraypipe.runtime.losses import NotMean
from optsched.arraypipe.runtime.stages import fresh_model
from optsched.arraypipe.train_alone import NotIdentical
from optsched.arraypipe.training_run import RunOptions
from optsched.errors import InputError, InternalError
from optsched.io.text import NANOSECONDS, duration
from optsched.io.values import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from torch import nn

    from optsched.arraypipe.trainer import ArrayTrainer, RunConfig
    from optsched.arraypipe.training_run import RunResult
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray

_GOOD: Final = 0.02  # above the bound: no reason to look for a better order
_SHARE: Final = 0.01  # of the training that is spent to look for an order
_LEAST_S: Final = 1.0  # to look for one; rules need a tenth of it, compiled or not
_MOST_S: Final = 30.0
_PATIENCE_S: Final = 1800.0  # that ranks wait for the measurements of the first one


@dataclass(eq=False)
class Fit:
    """One call of `ArrayTrainer.fit`: the trainer has the jobs, and devices and memory of `config`.

    The other fields are the arguments of the call.
    """

    trainer: ArrayTrainer
    steps: int
    schedule: Schedule | ExecutionPlan | None
    checkpoint: str | PathLike[str] | None
    resume: bool
    callbacks: Sequence[Callback]
    evaluate: Any
    config: RunConfig

    def __post_init__(self) -> None:
        config = self.config
        torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        self.on_ranks = torchrun if config.backend is None else config.backend == "process"
        if not isinstance(self.callbacks, (list, tuple)):
            raise InputError(f"callbacks: expected a list, got {self.callbacks!r:.60}")
        for k, callback in enumerate(self.callbacks):
            if not isinstance(callback, Callback):
                raise InputError(f"callbacks[{k}]: expected a Callback, got {callback!r:.60}")
        self.is_first = not self.on_ranks or not is_follower()
        self.every = None if self.checkpoint is None else config.every
        self.steps = integer("steps", self.steps, 1, None)
        self.folder = self.trainer.folder(
            RunOptions(self.checkpoint, self.every, config.keep, self.resume)
        )
        self.ended: set[Job] = set()
        self.problem: JobArray | None = None  # what the schedule was made for
        self.evaluation: Evaluation | None = None
        self.starts: dict[str, int] = {}  # by title, as checkpoints were before the run
        self.evaluated: dict[str, int] = {}  # newest checkpoint of every job that has been

    def run(self) -> RunResult:
        """All of it."""
        from optsched.arraypipe.cli.output import RunProgress

        trainer, config = self.trainer, self.config
        self.evaluation = self._evaluation()
        plan = self._plan()
        queue = plan.n_jobs < len(trainer.jobs)
        refills = any(type(c).on_end is not Callback.on_end for c in self.callbacks)
        info = FitInfo(
            lambda job: trainer.titles[trainer.jobs.index(job)], self.steps,
            self.evaluate is not None, self._start, self.folder is not None and self.resume,
            self.is_first,
        )  # fmt: skip
        self.progress = RunProgress.of(
            trainer, plan, self.steps, not self.on_ranks, self.is_first and config.verbose
        )
        self.evaluated = {title: self._start(title) for title in trainer.titles}
        try:
            for callback in self.callbacks:
                callback.on_start(info)
            with self.progress:
                result = trainer.run(
                    plan, self.steps, checkpoint=self.checkpoint, checkpoint_every=self.every,
                    keep=config.keep, resume=self.resume, on_step=self._on_step,
                    on_error=config.on_error, queue=queue, refill=self._on_end if refills else None,
                    replan=self.problem if config.replan else None,
                    backend="process" if self.on_ranks else "inline",
                    window=config.window, timeout=config.timeout,
                    evaluation=None if self.on_ranks else self.evaluation,
                )  # fmt: skip
            for job in trainer.jobs:
                if self.is_first:
                    self._evaluate_latest(job)
                if job not in self.ended:
                    self._on_end(job)
        finally:
            for callback in self.callbacks:
                callback.on_finish()
        return result

    def _evaluation(self) -> Evaluation | None:
        if self.evaluate is None:
            return None
        if self.on_ranks and self.checkpoint is None:
            raise InputError(
                "evaluate: a rank has only its stages of the model, so that checkpoints are "
                "evaluated; expected checkpoint=..."
            )
        trainer, every = self.trainer, self.config.every
        return Evaluation(
            trainer.build_model, measure_of(self.evaluate, trainer.loss),
            lambda done: every is not None and done % every == 0, self._on_evaluate,
            highest=self.config.mode == "max", on_host=trainer.memory is not None,
        )  # fmt: skip

    def _evaluate_latest(self, job: Job) -> None:
        """On ranks: evaluate the newest checkpoint of a job, on the host, if that is not done."""
        if not self.on_ranks or self.evaluation is None or self.folder is None:
            return
        title = self.trainer.titles[self.trainer.jobs.index(job)]
        done = self.folder.latest(title)
        if done > self.evaluated.get(title, 0):
            self.evaluated[title] = done
            states, buffers = self.folder.read(title, done)
            self.evaluation.evaluate(job, done - 1, states, buffers, torch.device("cpu"))

    def _plan(self) -> ExecutionPlan:
        """The plan to train by, on all ranks, when it has been checked."""
        trainer, given = self.trainer, self.schedule
        plan = (
            given if given is None or isinstance(given, ExecutionPlan) else trainer._compile(given)
        )
        if plan is not None:
            trainer._check(plan, queue=plan.n_jobs < len(trainer.jobs))
            if self.config.replan:
                raise InputError("replan: expected no schedule, so that its problem is known")
        if not self.on_ranks:
            # a schedule has one device a stage, if there are so many or it is one for all
            found, count = resolve(trainer.devices), trainer.n_stages
            if trainer.devices is not None or len(found) > 1:
                count = min(count, len(found))
            schedule, self.problem = self._prepare(plan, count)
        else:
            import torch.distributed as dist

            from optsched.arraypipe.distributed.group import agree

            self._check_same_data()
            prepare = partial(self._prepare, plan, dist.get_world_size())
            schedule, self.problem = agree(prepare, _PATIENCE_S, of_first=True)
        plan = plan or trainer._compile(cast("Schedule", schedule))
        if given is not None:
            predicted = predict(plan)
            self._say(_predicted(predicted.period_ns, predicted.bound_ns))
        return plan

    def _check_same_data(self) -> None:
        """Refuse ranks whose data differ: inputs are taken on one, targets on another."""
        from optsched.arraypipe.distributed.group import meeting

        trainer = self.trainer

        def first_batches() -> list[Any]:
            with global_state_kept():
                return [digest(next(iter(trainer.data(job, 0)))) for job in trainer.jobs]

        with meeting() as group:
            rows = group.all(group.agree(first_batches))
        for rank, row in enumerate(rows):
            for title, expected, found in zip(trainer.titles, rows[0], row, strict=True):
                if expected != found:
                    raise InputError(
                        f"data: rank {rank} has another first batch of job {title} than rank 0 "
                        f"({found}, not {expected}); every rank has to make the same data, so "
                        f"seed what is random"
                    )

    def _try_evaluation(self) -> None:
        """Refuse at once what would raise after the training."""
        trainer, evaluation = self.trainer, self.evaluation
        if evaluation is None:
            return
        with global_state_kept(), torch.no_grad():
            model = fresh_model(trainer.build_model, trainer.jobs[0]).eval()
            try:
                float(evaluation.measure(trainer.jobs[0], model, torch.device("cpu")))
            except InputError:
                raise
            except Exception as error:
                raise InputError(f"evaluate: {type(error).__name__}: {error}") from error

    def _prepare(
        self, plan: ExecutionPlan | None, devices: int
    ) -> tuple[Schedule | None, JobArray | None]:
        for title in self.trainer.titles:
            if self.folder is not None and not self.resume:
                self.folder.check_unused(title)
            if (done := self._start(title)) > self.steps:
                raise InputError(
                    f"steps: job {title} has already done {done} iterations, got {self.steps}"
                )
        if self.config.check:
            self._try_evaluation()
        schedule = problem = None
        if plan is None:
            schedule, problem = _solved(self.trainer, devices, None, self._say, self.steps)
        if self.config.check:
            self._check_exact(len(self.trainer.jobs) if plan is None else plan.n_jobs)
        return schedule, problem

    def _check_exact(self, seats: int) -> None:
        """Refuse layers and data with which a job does not reach the bits that it reaches alone."""
        trainer, steps = self.trainer, min(self.config.check, self.steps)
        if trainer.tied == "sum":
            self._say('not checked: tied="sum" gives up the last bits')
            return
        checked, there = trainer.with_jobs(trainer.jobs[:seats]), resolve(trainer.devices)
        if self.on_ranks:  # all stages are here for once
            there, checked.memory = own_first(there)[:1], None
        checked.devices = (there * trainer.n_stages)[: trainer.n_stages]
        try:
            found = checked.check_exact(steps)
        except (JobFailed, torch.OutOfMemoryError) as error:
            if isinstance(error.__cause__, NotMean):
                raise error.__cause__ from None
            self._say(f"not checked against training alone: {error}".splitlines()[0])
            return
        if found:
            raise NotIdentical(
                f"an array does not reach the bits of training alone in {steps} iterations, and "
                f"RunConfig(check=0) would train it all the same; {len(found)} differences, the "
                f"first: {found[0]}; {self._cause(checked, there[0])}"
            )
        self._say(f"checked: the bits of training alone, over {steps} iterations")

    def _cause(self, trainer: ArrayTrainer, device: torch.device) -> str:
        """What of the jobs gives other values when it is called again, in words."""
        for title, job in zip(trainer.titles, trainer.jobs, strict=True):
            try:
                found = cause(trainer, job, min(self.config.check, self.steps), device)
            except Exception as error:  # it was run before, so that something keeps state
                found = f"called again it raises {type(error).__name__}: {error}"
            if found:
                return f"job {title}: {found}"
        return "data, build_model, forward and loss repeat their values: look at the optimizer"

    def _start(self, title: str) -> int:
        """Iterations that a job has done before."""
        if title not in self.starts:
            resumed = self.folder if self.resume else None
            self.starts[title] = 0 if resumed is None else resumed.latest(title)
        return self.starts[title]

    def _on_step(self, job: Job, iteration: int, loss: float) -> None:
        self.progress(job, iteration, loss)
        for callback in self.callbacks:
            callback.on_step(job, iteration, loss)
        self._evaluate_latest(job)

    def _on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        for callback in self.callbacks:
            callback.on_evaluate(job, iteration, value, model)

    def _on_end(self, job: Job) -> Job | None:
        """All callbacks are told; the first job that one gives is taken."""
        self.ended.add(job)
        given = [callback.on_end(job) for callback in self.callbacks]
        following = next((other for other in given if other is not None), None)
        if following is not None:
            if not isinstance(following, Job) or following in self.trainer.jobs:
                raise InputError(f"on_end: expected a new Job or None, got {following!r:.60}")
            self.progress.add(following, following.name or f"job{len(self.trainer.jobs)}")
        return following

    def _say(self, line: str) -> None:
        if self.is_first and self.config.verbose:
            print(line, file=sys.stderr, flush=True)


def schedule_for(
    trainer: ArrayTrainer,
    devices: int | None = None,
    *,
    time_limit: float = 5.0,
    say: Callable[[str], object] = lambda line: None,
) -> Schedule:
    """A rolling schedule of a trainer's jobs by measured times, solved for `time_limit` seconds.

    Of several processes (`torchrun`) all call it alike; the first one measures and solves, and the
    others get its schedule. By default there is one device per process, or one per stage;
    `InputError` if there are more than stages. `say` is called with lines of progress.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return _solved(trainer, devices or trainer.n_stages, time_limit, say)[0]
    import torch.distributed as dist

    from optsched.arraypipe.distributed.group import agree, join

    join()
    count = devices or dist.get_world_size()
    solve = partial(_solved, trainer, count, time_limit, say)
    return agree(solve, _PATIENCE_S + time_limit, of_first=True)[0]


def _solved(
    trainer: ArrayTrainer,
    devices: int,
    time_limit: float | None,
    say: Callable[[str], object],
    steps: int = 1,
) -> tuple[Schedule, JobArray]:
    """A good order of the trainer's jobs by times that are measured now, and its problem.

    Without a limit a hundredth of the training is spent on it, at least a second.
    """
    from optsched.solving.solve import solve
    from optsched.solving.stop import Gap

    n_stages = trainer.n_stages
    if not 1 <= devices <= n_stages:
        raise InputError(
            f"devices: the model has {n_stages} stages, which cannot fill {devices} devices"
        )
    say(f"measuring {n_stages} stages of {len(trainer.jobs)} jobs")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        profile = trainer.profile()
    if warned:
        say("times scatter, the schedule may be off; results do not depend on it")
    place = [stage * devices // n_stages for stage in range(n_stages)]
    kind = "gpu" if profile.device.kind == "cuda" else "cpu"
    names = tuple(f"{kind}{d}" for d in range(devices))
    problem = trainer.problem(profile, place=place, devices=names)
    unit_ns = NANOSECONDS[problem.time_unit]
    if time_limit is None:
        training_s = problem.lower_bound() * unit_ns / 1e9 * steps
        time_limit = min(_MOST_S, max(_LEAST_S, _SHARE * training_s))
    say(f"solving for the order of {problem.n_jobs} jobs, up to {time_limit:.3g} s")
    result = solve(problem, time_limit=time_limit, stop=Gap(_GOOD))
    if result.schedule is None:
        raise InternalError("the solver found no schedule")
    bound = result.lower_bound or problem.lower_bound()
    say(_predicted(problem.evaluate(result.schedule) * unit_ns, bound * unit_ns))
    return result.schedule, problem


def _predicted(period_ns: float, bound_ns: float) -> str:
    above = f"{period_ns / max(1, bound_ns) - 1:.1%} above the bound of {duration(bound_ns)}"
    return f"predicted: {duration(period_ns)} a cycle, {above}"
