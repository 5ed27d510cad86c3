"""One call of `ArrayTrainer.run`: makes the jobs, has a backend train them, draws up the result."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch

from optsched.arraypipe.checkpoint.states import settings_of
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.life.changes import Rescheduling
from optsched.arraypipe.memory.manager import memory_of
from optsched.arraypipe.model.build import Builder
from optsched.arraypipe.model.checks import check_apart, check_sibling, note_shared, shapes_of
from optsched.arraypipe.model.optimizers import states_by_name
from optsched.arraypipe.model.tied_weights import restore_ties
from optsched.arraypipe.plan.segments import FIRST_CYCLES, Course, moved, places
from optsched.arraypipe.report.executed import RunLog
from optsched.arraypipe.report.report import compare
from optsched.arraypipe.report.trace import measured
from optsched.arraypipe.runtime.blocks import trained_now
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.environment import (
    gpu_settings,
    on_first_interrupt,
    on_gpu,
)
from optsched.arraypipe.runtime.first_forward import FirstForward, Whole, pass_over, rehearse
from optsched.arraypipe.runtime.inline import InlineBackend
from optsched.arraypipe.runtime.stages import drop, fresh_stages, take_off
from optsched.arraypipe.runtime.state import JobRun, JobStage
from optsched.arraypipe.runtime.worker import Memory, Worker, reason, unbound
from optsched.arraypipe.train_alone import Trained
from optsched.errors import InputError
from optsched.io.values import boolean, did_you_mean, format_value, integer, number, one_of
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from optsched.arraypipe.checkpoint.folder import CheckpointFolder
    from optsched.arraypipe.distributed.backend import ProcessBackend
    from optsched.arraypipe.distributed.ranks import Ranks
    from optsched.arraypipe.distributed.results import LocalJob
    from optsched.arraypipe.evaluation import Evaluation
    from optsched.arraypipe.job import BuildModel, Data, Job, Loss
    from optsched.arraypipe.model.calls import Cut
    from optsched.arraypipe.model.checks import Owners, Shapes
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Change
    from optsched.arraypipe.plan.types import Record, Routes
    from optsched.arraypipe.report.report import Report
    from optsched.arraypipe.runtime.losses import Weight
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run made.

    Parameters
    ----------
    jobs
        All that were trained, those that came later too; `Job.status` says how each has ended.
    losses
        Loss of every iteration that was run, per job; on ranks only the first one has all.
    log
        Records of the blocks; `trace` and `report` are made of it on first use.
    whole
        Model and states of every job; None on ranks, where each has its stages.
    local
        On ranks: the jobs and stages of this one.
    """

    jobs: tuple[Job, ...]
    losses: tuple[tuple[float, ...], ...]
    log: RunLog
    whole: tuple[tuple[nn.Module, Trained], ...] | None = None
    local: tuple[LocalJob, ...] = ()

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The trained unsplit model of every job."""
        return tuple(model for model, _ in self._whole("models"))

    @property
    def trained(self) -> tuple[Trained, ...]:
        """Per job all parameters, buffers and optimizer states by unsplit names, and the losses."""
        return tuple(trained for _, trained in self._whole("trained"))

    def gather(self) -> RunResult:
        """Bring the models of a run on ranks to rank 0; all ranks call it (elsewhere no effect).

        Rank 0 holds all jobs whole then; the other ranks get a result without models.
        """
        if self.whole is not None:
            return self
        from optsched.arraypipe.distributed.results import gather

        return replace(self, whole=tuple(gather(self.local)), local=())

    def _whole(self, name: str) -> tuple[tuple[nn.Module, Trained], ...]:
        if self.whole is None:
            raise InputError(
                f"{name}: every rank has its own stages; call result.gather() on all ranks, or "
                f"load the checkpoints"
            )
        return self.whole

    @cached_property
    def trace(self) -> Schedule:
        """The run as it was, a schedule document in nanoseconds."""
        return measured(self.log)

    @cached_property
    def report(self) -> Report:
        """Predicted against measured."""
        return compare(self.log)


Made = TypeVar("Made")


@dataclass(frozen=True)
class RunOptions:
    """Options of `ArrayTrainer.run`.

    Parameters
    ----------
    checkpoint
        Folder for checkpoints; each job writes its last state there.
    checkpoint_every
        Also write after every so many iterations of the job.
    keep
        Newest checkpoints of a job that stay; when one is whole on the disk, those before them are
        removed.
    resume
        Go on from the latest checkpoints in that folder, where there are any; from the one before,
        with a warning, if that is damaged. Job settings that change the bits, the optimizers'
        included, must be those of the checkpoints, and so must the data.
    on_step
        Called with ``(job, iteration, loss)`` when the loss of an iteration is known; after
        ``job.stop()`` this iteration is the job's last (on a GPU the next one).
    on_error
        ``"continue"``: a job that raises or whose loss is not finite ends, `Job.error` says why,
        and the others go on; ``"raise"``: so does the run.
    queue
        Let the schedule have fewer jobs than the trainer: the others wait, and take the seats of
        those that have ended.
    refill
        Called with every job that has ended when none is waiting; a job that it returns takes the
        seat. In a run on several ranks it is called on the first one, and, if it returned a job
        there, with the same ended job on all others, where it has to return the same.
    replan
        The job array that the schedule was made for: when a job has ended and nobody takes its
        seat, a solver in another process looks for a better order of the rest, to which the run
        changes over if that pays.
    backend
        ``"inline"``: all devices in this process; ``"process"``: every device is a rank of a
        `torch.distributed` process group, all ranks call `run` alike, and rank 0 gets the result
        (the others one without models and losses, with a trace and a report of their own blocks).
        `on_step` is called on rank 0, or, if it has no stage of the job, on the rank of the last
        stage.
    window, timeout
        Of the process backend: blocks whose messages are received ahead, and seconds after which a
        message counts as lost.
    evaluation
        As `fit` makes it.
    """

    checkpoint: str | PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    resume: bool = False
    on_step: Callable[[Job, int, float], object] | None = None
    on_error: Literal["continue", "raise"] = "continue"
    queue: bool = False
    refill: Callable[[Job], Job | None] | None = None
    replan: JobArray | None = None
    backend: Literal["inline", "process"] = "inline"
    window: int = 2
    timeout: float = 600.0
    evaluation: Evaluation | None = None

    def __post_init__(self) -> None:
        for key in ("on_step", "refill"):
            if (given := getattr(self, key)) is not None and not callable(given):
                raise InputError(f"{key}: expected a function, got {format_value(given)}")
        boolean("resume", self.resume)
        boolean("queue", self.queue)
        integer("window", self.window, 1, None)
        number("timeout", self.timeout, 0.0, 1e6, above=True, what="seconds")
        one_of("on_error", self.on_error, ("continue", "raise"))
        integer("keep", self.keep, 1, None)
        if self.checkpoint_every is not None:
            integer("checkpoint_every", self.checkpoint_every, 1, None)
        if self.checkpoint is None:
            if self.checkpoint_every is not None or self.resume:
                raise InputError("checkpoint: expected a folder to write to or resume from")
        elif not isinstance(self.checkpoint, (str, PathLike)) or not str(self.checkpoint):
            raise InputError(f"checkpoint: expected a folder, got {format_value(self.checkpoint)}")


def _settings(run: JobRun) -> dict[str, str]:
    """What a fresh job is made with, which ranks compare, in words."""
    return {f"job {run.title}: {key}": value for key, value in settings_of(run).items()}


def _warn_of_forgotten(run: JobRun) -> None:
    """Warn of attributes that the forward goes on with and that no checkpoint keeps."""
    names = {module: name for name, module in run.model.named_modules()}
    rows = [row for stage in run.stages for row in stage.forgotten]
    if rows:
        found = [f"{key!r} of {type(part).__name__} {names.get(part, '')!r}" for part, key in rows]
        text = "no checkpoint keeps it, so a resumed run begins anew; use a buffer if it is read"
        warnings.warn(f"checkpoint: the forward changes {', '.join(found)}: {text}", stacklevel=2)


def run_options(given: Mapping[str, Any]) -> RunOptions:
    """The options of these names; refuses others."""
    known = [option.name for option in fields(RunOptions)]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InputError(f"run: has no option {name!r:.60} (it has {', '.join(known)}){hint}")
    return RunOptions(**given)


class Trainer(Protocol):
    """What a run takes from an `ArrayTrainer`, and the jobs that it adds to it."""

    build_model: BuildModel
    cut: Cut
    loss: Loss
    weight: Weight
    data: Data
    memory: int | None
    jobs: tuple[Job, ...]

    @property
    def titles(self) -> list[str]:
        """Names of the jobs."""

    def routes(self, plan: ExecutionPlan) -> Routes:
        """The messages of a plan."""

    def take_in(self, job: Job) -> None:
        """Note one more job."""


class ArrayRun:
    """Trains the jobs of a trainer once by a plan, inline (`ranks` None) or on ranks.

    The trainer may get more jobs while the run goes on; `devices` has the torch device of every
    device of the plan.
    """

    def __init__(
        self,
        trainer: Trainer,
        plan: ExecutionPlan,
        devices: Sequence[torch.device],
        ranks: Ranks | None,
        folder: CheckpointFolder | None,
        steps: int,
        options: RunOptions,
    ) -> None:
        self.trainer, self.plan, self.devices = trainer, plan, devices
        self.ranks, self.folder, self.steps, self.options = ranks, folder, steps, options
        self.strict = options.on_error == "raise"
        self.gpu = on_gpu(devices[0])
        if self.gpu:
            torch.cuda.set_device(devices[0])
        self.shapes: Shapes = {}  # of the first job
        self.owners: Owners = {}
        alike = len({job.precision for job in trainer.jobs}) == 1
        self.builder = Builder(trainer.build_model, share=alike and trainer.memory is None)
        self.trains = False
        try:
            self._begin()
        except BaseException:
            self._give_up()
            raise

    def _begin(self) -> None:
        """Make all that is needed; nothing is trained."""
        trainer, plan, options, ranks = self.trainer, self.plan, self.options, self.ranks
        # iterations from which jobs go on, as the first rank says
        self._begun = self._same(partial(self._latest, trainer.titles), of_first=True)
        self.runs: list[JobRun] = self._same(self._made)
        if ranks is not None:
            ranks.agree({key: value for run in self.runs for key, value in _settings(run).items()})
        self.worker = Worker(
            self.runs, Memory(self.runs), trainer.loss, self._on_update, self._on_loss,
            trainer.weight,
        )  # fmt: skip
        self._same(partial(self._first_forward, *self.runs))
        if self.folder is not None and (ranks is None or ranks.is_first):
            _warn_of_forgotten(self.runs[0])
        if ranks is not None:
            ranks.share_failures(self.runs)
        errors = [run.job.error for run in self.runs]
        found = [error for error in errors if error is not None]
        if found and (self.strict or None not in errors):  # or no job has anything to give
            raise found[0]
        self.course = Course(plan, self.runs, trainer.routes, FIRST_CYCLES)
        refill = options.refill and self._refill
        self.planner = Rescheduling(
            self.runs, plan, self._join, refill, self._refusal, self.strict, options.replan
        )
        self.engine = self._engine()

    def train(self) -> RunResult:
        """Run to the end, or to the end of all iterations after Ctrl-C; only once."""
        try:
            return self._train()
        except BaseException:
            self._give_up()
            raise
        finally:  # parts that call back would keep models and states alive until they are collected
            self.__dict__.clear()

    def _train(self) -> RunResult:
        folder, ranks = self.folder, self.ranks
        if folder is not None:
            if ranks is not None:
                folder.stages_of, folder.is_first = ranks.stages_of, ranks.is_first
            # nobody writes before the first has tidied up
            self._same(lambda: folder.prepare(self.trainer.titles, self.options.resume))
        self.trains = True
        try:
            with on_first_interrupt(self.engine.interrupt):
                records = self.engine.run()
                with nullcontext() if ranks is None else ranks.concluding():
                    if folder is not None:
                        for run in self.runs:
                            folder.finish(run)
        finally:
            self.planner.close()
            if folder is not None:
                folder.close()
        if ranks is not None:
            with ranks.concluding():
                records = ranks.collect(records)
            for run in self.runs:  # no message has told a last loss that was read late
                self.worker.report_loss(run)
        for run in self.runs:
            run.conclude(run.begin)
            for stage in run.stages if self.gpu and ranks is None else ():
                take_off(stage)
            restore_ties(run.model, run.stages)
            run.model.cpu()
        return self._result(records)

    def _same(self, make: Callable[[], Made], of_first: bool = False) -> Made:
        """What it makes, or the first rank; all ranks end with what one of them raises."""
        return make() if self.ranks is None else self.ranks.same(make, of_first)

    def _refill(self, ended: Job) -> Job | None:
        """Another job for a seat; the one that leaves it has its checkpoint before that is told.

        And no room on a GPU any more, because the next one needs it for its first forward.
        """
        index = self.trainer.jobs.index(ended)
        if self.folder is not None:
            self.folder.settle(index)
        self.engine.unseat(index)
        assert self.options.refill is not None
        return self.options.refill(ended)

    def _made(self) -> list[JobRun]:
        """The jobs of the trainer; what has no place on a GPU yet is made on the host.

        These are states that take turns in slots, jobs that wait, and on ranks all stages.
        """
        n, away = self.plan.n_jobs, bool(self.trainer.memory) or self.ranks is not None
        rows = enumerate(self._begun)
        return [self._make(j, at, away=j >= n or away) for j, at in rows]

    def _give_up(self) -> None:
        """The run raises: no job runs any more, and none is ready if it has been trained."""
        if self.trains:
            for run in self.runs:
                run.conclude(max(run.begin, run.start + run.updates // max(1, run.local)))
            return
        for job in self.trainer.jobs:
            if job.life.status == "running":
                job.life.status = "ready"

    def _latest(self, titles: Sequence[str]) -> list[int]:
        """Iterations that the checkpoints have, which the first process alone looks up."""
        folder = self.folder if self.options.resume else None
        return [0 if folder is None else folder.latest(title) for title in titles]

    def _make(self, index: int, at: int, away: bool) -> JobRun:
        """A job, ready to go on from iteration `at`."""
        trainer, steps = self.trainer, self.steps
        job, title = trainer.jobs[index], trainer.titles[index]
        job.life.begin()
        away = away and self.gpu
        local = self._local(index)
        if at == 0 and len(local) < self.plan.n_stages:
            with self.builder.parts(job) as model:
                stages = self._stages(model, index, away)
                for stage in stages:
                    if stage.index not in local:
                        drop(stage)
        else:
            model = self.builder.whole(job)
            stages = self._stages(model, index, away)
        run = JobRun(job, index, title, model, stages, 0, steps, None)
        data, refused = trainer.data, ""
        if self.folder is not None:
            refused = self.folder.begin(run, at)
            data = self.folder.watched(run, data)
        if at > steps:
            raise InputError(f"steps: job {title} has already done {at} iterations, got {steps}")
        run.begin_at(at)
        if at < steps:
            run.feed = Feed(data, job, title, at)
            if refused:
                run.fail(0, at, refused)
        for stage in stages:  # only now: a checkpoint is read whole
            if at and stage.index not in local:
                drop(stage)
        return run

    def _local(self, index: int) -> list[int]:
        """Stages of a job that this process trains."""
        homes = places(self.plan, min(index, self.plan.n_jobs - 1))
        rank = None if self.ranks is None else self.ranks.links.rank
        return [stage for stage, home in enumerate(homes) if rank in (None, home)]

    def _stages(self, model: nn.Module, index: int, away: bool) -> list[JobStage]:
        """The stages of a model that is like those of the other jobs."""
        trainer, title = self.trainer, self.trainer.titles[index]
        shapes = shapes_of(model)
        self.shapes = shapes if index == 0 else self.shapes
        check_sibling(shapes, title, self.shapes, trainer.titles[0])
        why_not = "which jobs of several precisions cannot share"
        if len({other.precision for other in trainer.jobs}) == 1:
            why_not = "which cannot take turns in slots" if trainer.memory is not None else ""
        check_apart(model, title, self.owners, why_not)
        devices = [self.devices[0]] * self.plan.n_stages
        job = trainer.jobs[index]
        return fresh_stages(model, trainer.cut, job, index, title, devices, away, trainer.loss)

    def _join(self, job: Job) -> JobRun | None:
        """Take in a job between two segments, on all ranks alike.

        None if it cannot be made, and the job has the error; a run that is strict raises it.
        """
        trainer, index = self.trainer, len(self.trainer.jobs)
        trainer.take_in(job)
        begun = 0
        try:
            begun = self._same(lambda: self._latest(trainer.titles[-1:])[0], of_first=True)
            run = self._same(lambda: self._make(index, begun, away=True))
            if self.folder is not None and self.folder.is_first:
                self.folder.prepare([run.title], self.options.resume)
        except Exception as error:
            title, trainer.jobs = trainer.titles[index], trainer.jobs[:-1]
            if self.strict:
                raise
            failed = JobFailed(title, index, 0, begun, reason(error))
            job.life.status, job.life.error = "failed", failed
            return None
        try:
            self._same(partial(self._first_forward, run))
        except InputError as error:
            run.fail(0, run.start, reason(error)).__cause__ = unbound(error)
        if self.ranks is not None:
            self.ranks.share_failures([run])
        if self.gpu:  # the stream of the blocks cannot use what this one has left
            torch.cuda.empty_cache()
        self.runs.append(run)
        return run

    def _first_forward(self, *runs: JobRun) -> None:
        """Change nothing of the jobs; one whose first forward raises has the error.

        On ranks all jobs pass through the chain, also after one that is refused.
        """
        note_shared(list(dict.fromkeys([*self.runs, *runs])))
        refused: InputError | None = None
        chains = [self._chain(run) for run in runs]
        for run, chain in zip(runs, chains, strict=True):
            try:
                if refused is None and run.job.error is None:
                    rehearse(run, self.worker, chain)
                elif run.feed is not None:  # else its state cannot be kept
                    pass_over(run, chain)
            except JobFailed as error:
                unbound(error)
            except InputError as error:
                refused = error
        for chain in chains:
            chain.close()
        if refused is not None:
            raise refused

    def _chain(self, run: JobRun) -> FirstForward:
        if self.ranks is None:
            return Whole()
        homes = places(self.plan, min(run.index, self.plan.n_jobs - 1))
        return self.ranks.chain(run, homes)

    def _engine(self) -> InlineBackend | ProcessBackend:
        if self.gpu:  # the streams of the blocks cannot use what this one has left
            torch.cuda.empty_cache()
        ranks, course, runs, worker = self.ranks, self.course, self.runs, self.worker
        share = None if ranks is None else ranks.share(course.now)
        worker.memory = self._same(
            lambda: memory_of(runs, course.segments, self.trainer.memory, worker.criterion, share)
        )
        if ranks is not None:
            return ranks.connect(course, runs, worker, self.planner, self.strict)
        device = self.devices[0]
        return InlineBackend(course, runs, worker, self.planner, self.strict, device)

    def _refusal(self, change: Change, like: Mapping[int, int]) -> str:
        """Why the devices cannot make a change, as a sentence; ``""`` if they can."""
        ranks, memory, segment = self.ranks, self.worker.memory, self.course.segment(change)
        live = [seat for seat, job in enumerate(segment.seats) if not self.runs[job].over]
        if ranks is not None or memory.moves:
            titles = [run.title for run in self.runs]
            if sentence := moved(self.course.now, segment, live, titles):
                return sentence
        if memory.limits is None:
            return ""
        held = None if ranks is None else ranks.held
        return str(memory.limits.refusal(segment, live, like, held))

    def _on_update(self, run: JobRun, stage: int, iteration: int) -> None:
        if self.folder is not None:
            self.folder.note(run, stage, iteration)
        if self.options.evaluation is not None:
            value = self.options.evaluation.note(run, stage, iteration)
            if value is not None and self.folder is not None:
                highest = self.options.evaluation.highest
                self.folder.mark_best(run, iteration + 1, value, highest)

    def _on_loss(self, run: JobRun, iteration: int, loss: float) -> None:
        told, ranks = self.options.on_step, self.ranks
        if told is None or not (ranks is None or ranks.reports(run)):
            return
        here = range(len(run.stages)) if ranks is None else ranks.stages_of(run)
        away = [stage for stage in run.stages if stage.index not in here]
        before = [trained_now(stage) for stage in away]
        told(run.job, iteration, loss)
        for stage, trained in zip(away, before, strict=True):
            if trained_now(stage) != trained:
                raise InputError(
                    f"on_step: changes requires_grad of job {run.title}, stage {stage.index}, "
                    f"which another rank trains; let the forward of the model change it"
                )

    def _result(self, records: list[Record]) -> RunResult:
        ranks, course, trainer, past = self.ranks, self.course, self.trainer, self.engine.past
        provenance: dict[str, Any] = {
            "executor": "inline" if ranks is None else "process",
            "jobs": trainer.titles,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "optsched": __version__,
            "plan_sha256": self.plan.schedule.sha256,
            **gpu_settings(self.devices),
        }
        if ranks is not None:
            provenance["clock_error_ns"] = ranks.clock_error_ns
        if past.left_out:
            provenance["blocks_left_out"] = past.left_out
        log = RunLog(
            course.name, tuple(course.segments), records, provenance, tuple(self.engine.copies),
            exposed_ns=past.exposed_ns or None, parallel=ranks is not None or self.gpu,
            uncertainty_ns=0 if ranks is None else ranks.clock_error_ns, left_out=past.left_out,
        )  # fmt: skip
        jobs, losses = zip(*[(run.job, tuple(run.losses)) for run in self.runs], strict=True)
        if ranks is None:
            whole = tuple((run.model, _trained(run)) for run in self.runs)
            return RunResult(jobs, losses, log, whole)
        from optsched.arraypipe.distributed.results import LocalJob

        local = tuple(LocalJob(run, ranks.stages_of(run)) for run in self.runs)
        return RunResult(jobs, losses, log, None, local)


def _trained(run: JobRun) -> Trained:
    """All that training has changed of a job (references)."""
    parameters = {name: p.detach() for name, p in run.named_parameters()}
    states = states_by_name(run.stages)
    moments = {name: states[name]["state"] if name in states else {} for name in parameters}
    return Trained(parameters, run.named_buffers(), moments, tuple(run.losses))
