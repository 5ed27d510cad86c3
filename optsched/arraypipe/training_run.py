"""One run of a job array by a plan: builds the jobs, has a backend train them, makes the result."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from optsched.arraypipe.checkpoint.folder import CheckpointFolder
from optsched.arraypipe.checkpoint.states import digest, settings_of
from optsched.arraypipe.events import Events
from optsched.arraypipe.job import Job, JobFailed
from optsched.arraypipe.memory.manager import memory_of, note_bytes
from optsched.arraypipe.model.build import Builder
from optsched.arraypipe.model.lazy import collect
from optsched.arraypipe.model.split import (
    check_apart,
    check_sibling,
    note_shared,
    restore_ties,
    shapes_of,
    states_by_name,
)
from optsched.arraypipe.plan.segments import FIRST_CYCLES, RunPlan, moved
from optsched.arraypipe.report import RunLog
from optsched.arraypipe.rescheduling import Rescheduling
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.environment import (
    deterministic,
    device_of,
    global_state_kept,
    gpu_settings,
    on_first_interrupt,
    on_gpu,
)
from optsched.arraypipe.runtime.inline import FirstForward, InlineBackend, pass_over, rehearse
from optsched.arraypipe.runtime.stages import drop, fresh_stages, take_off
from optsched.arraypipe.runtime.state import JobRun, JobStage
from optsched.arraypipe.runtime.worker import Memory, Worker, reason, unbound
from optsched.arraypipe.train_alone import Trained
from optsched.arraypipe.trainer import RunResult
from optsched.errors import InputError
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import nn

    from optsched.arraypipe.distributed.backend import ProcessBackend
    from optsched.arraypipe.distributed.ranks import Ranks
    from optsched.arraypipe.distributed.replicas import Replicas
    from optsched.arraypipe.model.split import Owners
    from optsched.arraypipe.options import Request
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Change
    from optsched.arraypipe.plan.types import Record
    from optsched.arraypipe.trainer import ArrayTrainer
    from optsched.problems.jobarray.problem import JobArray

Made = TypeVar("Made")


def train(
    trainer: ArrayTrainer, plan: ExecutionPlan, request: Request, problem: JobArray | None = None
) -> RunResult:
    """Train the jobs of a trainer by a plan, inline or as one rank; the trainer does not change.

    Parameters
    ----------
    problem
        What the plan was made for: better orders are solved for when jobs have ended.
    """
    config, ranks = trainer.config, None
    with global_state_kept():  # the links of a rank choose its GPU
        try:
            if config.on_ranks:
                from optsched.arraypipe.distributed.ranks import Ranks

                ranks = Ranks(plan, config.timeout, config.device, config.replicas)
                ranks.agree(_shared_settings(trainer, plan, request))
            device = device_of(config.device) if ranks is None else ranks.device
            deterministic(device)
            if on_gpu(device):
                torch.cuda.set_device(device)
            return ArrayRun(trainer, plan, request, device, ranks).train(problem)
        finally:
            if ranks is not None:
                ranks.leave()


def folder_of(trainer: ArrayTrainer, request: Request) -> CheckpointFolder | None:
    """Return where checkpoints are written and read, None without ``checkpoint=``."""
    if request.checkpoint is None:
        return None
    config = trainer.config
    folder = CheckpointFolder(Path(request.checkpoint), trainer.cuts, config.every, config.keep)
    folder.whole = config.replicas == 1
    return folder


def _shared_settings(
    trainer: ArrayTrainer, plan: ExecutionPlan, request: Request
) -> dict[str, object]:
    """Return settings and data that all ranks of a run must have in common."""
    config = trainer.config
    of_jobs = ("seed", "batch_size", "microbatches", "precision", "clip_norm", "recompute")
    rows = [[getattr(job, key) for key in of_jobs] for job in trainer.jobs]
    found = {
        "optsched": __version__,
        "schedule": plan.schedule.sha256,
        "steps": request.steps,
        "memory": config.bytes,
        "cuts": trainer.cuts,
        "jobs": list(zip(trainer.titles, rows, strict=True)),
        "checkpoint": "not given" if request.checkpoint is None else "given",
        "resume": request.resume,
        **{key: getattr(config, key) for key in ("on_error", "every", "keep", "replicas")},
    }
    for job, title in zip(trainer.jobs if config.check else (), trainer.titles, strict=False):
        found[f"first batch of job {title}"] = digest(next(iter(trainer.data(job, 0)), None))
    return found


class JobBuilder:
    """Makes the runs of jobs, one after the other; `folder` has the checkpoints to continue from.

    With replicas each gets a part of the data.
    """

    def __init__(
        self,
        trainer: ArrayTrainer,
        steps: int,
        device: torch.device,
        folder: CheckpointFolder | None,
        replicas: Replicas | None,
    ) -> None:
        self.trainer, self.steps, self.device, self.folder = trainer, steps, device, folder
        self.replicas = replicas
        self.data = trainer.data if replicas is None else replicas.part_of(trainer.data)
        self.first: tuple[dict[str, str], str] | None = None  # shapes and title of the first job
        self.owners: Owners = {}
        self.precisions = {job.precision for job in trainer.jobs}
        self.models = Builder(trainer.build_model, share=len(self.precisions) == 1)

    def make(
        self, job: Job, index: int, title: str, at: int, local: Collection[int], away: bool
    ) -> JobRun:
        """Make job number `index`, ready to continue from iteration `at`."""
        folder = self.folder
        job.life.begin(title)
        self.precisions.add(job.precision)
        if len(local) < self.trainer.n_stages:
            with self.models.parts(job) as model:
                stages = self._stages(model, job, index, title, away)
                for stage in stages:
                    if stage.index not in local:
                        drop(stage)
        else:
            model = self.models.whole(job)
            stages = self._stages(model, job, index, title, away)
        run = JobRun(job, index, title, model, stages, 0, self.steps, None)
        refused = "" if folder is None else folder.begin(run, at)
        if at > self.steps:
            raise InputError(
                f"steps: job {title} has already done {at} iterations, got {self.steps}"
            )
        run.begin_at(at)
        if at < self.steps:
            data = self.data if folder is None else folder.watched(run, self.data)
            run.feed = Feed(data, job, title, at)
            if refused:
                run.fail(0, at, refused)
        return run

    def _stages(
        self, model: nn.Module, job: Job, index: int, title: str, away: bool
    ) -> list[JobStage]:
        """Return the stages of a model, which must be like those of the other jobs."""
        trainer, shapes = self.trainer, shapes_of(model)
        self.first = self.first or (shapes, title)
        check_sibling(shapes, title, *self.first)
        alike = len(self.precisions) == 1
        why = "" if alike else "which jobs of several precisions cannot share"
        check_apart(model, title, self.owners, why)
        if self.replicas is not None:
            self.replicas.check(model, title)
        devices = [self.device] * trainer.n_stages
        away = away and on_gpu(self.device)
        stages = fresh_stages(model, trainer.cut, job, index, title, devices, away, trainer.loss)
        self.models.share_copies(stages)
        return stages


class ArrayRun:
    """Trains jobs once by a plan, inline (`ranks` None) or on ranks; `runs` grows as jobs join."""

    def __init__(
        self,
        trainer: ArrayTrainer,
        plan: ExecutionPlan,
        request: Request,
        device: torch.device,
        ranks: Ranks | None,
    ) -> None:
        self.trainer, self.plan, self.request, self.ranks = trainer, plan, request, ranks
        folder = folder_of(trainer, request)
        replicas = None if ranks is None else ranks.replicas
        self.builder = JobBuilder(trainer, request.steps, device, folder, replicas)
        # where this process saves: of replicas the first does
        self.saved = folder if replicas is None or not replicas.index else None
        self.events = Events(trainer, request, self.saved, ranks)
        self.runs: list[JobRun] = []

    def train(self, problem: JobArray | None) -> RunResult:
        """Run to the end, or to the end of all iterations after Ctrl-C; only once."""
        events, begun = self.events, False
        try:
            self._build()
            self._connect(problem)
            if self.builder.folder is not None:
                self._prepare(self.builder.folder)
            events.start(self.runs)
            begun = True
            records = self._run_blocks()
            result = self._result(records)
            events.end_jobs(self.runs)
        except BaseException:
            for run in self.runs if begun else ():
                run.conclude(max(run.begin, run.start + run.updates // max(1, run.local)))
            for job in self.trainer.jobs:
                if not begun and job.status == "running":
                    job.life.status = "ready"
            raise
        finally:
            events.finish()
        return result

    def _build(self) -> None:
        """Build all jobs and run their first forward; nothing is trained."""
        collect()  # what measuring and checking have left
        trainer, ranks, config = self.trainer, self.ranks, self.trainer.config
        begun = self._same(partial(self._latest, trainer.titles), of_first=True)
        n = self.plan.n_jobs
        away = config.memory is not None or ranks is not None

        def build() -> list[JobRun]:
            rows = zip(trainer.jobs, trainer.titles, begun, strict=True)
            return [
                self.builder.make(job, j, title, at, self._local(j), away or j >= n)
                for j, (job, title, at) in enumerate(rows)
            ]

        self.runs += self._same(build)
        if ranks is not None:
            ranks.agree({
                f"job {run.title}: {key}": value
                for run in self.runs if not run.start  # others have them from a checkpoint
                for key, value in settings_of(run).items()
            })  # fmt: skip
        events = self.events
        self.worker = Worker(
            self.runs, Memory(self.runs), trainer.loss, events.on_update, events.on_loss,
            trainer.weight, config.bytes is not None,
        )  # fmt: skip
        self._same(partial(self._first_forward, self.runs))
        collect()
        if self.builder.folder is not None and config.is_first:
            _warn_of_forgotten(self.runs[0])
        if ranks is not None:
            ranks.share_failures(self.runs)
        errors = [run.job.error for run in self.runs]
        found = [error for error in errors if error is not None]
        if found and (config.strict or None not in errors):
            raise found[0]

    def _connect(self, problem: JobArray | None) -> None:
        """Make what changes slots and orders, the memory, and the backend."""
        config, ranks, runs, worker = self.trainer.config, self.ranks, self.runs, self.worker
        run_plan = self.run_plan = RunPlan(self.plan, runs, self.trainer.routes, FIRST_CYCLES)
        planner = self.planner = Rescheduling(
            runs, self.plan, self._join, self._refill if self.events.refills else None,
            self._refusal, config.strict, problem,
        )  # fmt: skip
        if on_gpu(self.builder.device):  # streams of blocks cannot use what this one has cached
            torch.cuda.empty_cache()
        share = None if ranks is None else ranks.share(run_plan.now)
        worker.memory = self._same(lambda: memory_of(runs, run_plan.segments, config.bytes, share))
        self.engine: InlineBackend | ProcessBackend
        if ranks is not None:
            self.engine = ranks.connect(run_plan, runs, worker, planner, config.strict)
        else:
            self.engine = InlineBackend(
                run_plan, runs, worker, planner, config.strict, self.builder.device
            )

    def _prepare(self, folder: CheckpointFolder) -> None:
        if self.ranks is not None:
            folder.stages_of, folder.is_first = self.ranks.saved_by, self.ranks.is_first
        # no rank writes before the first one has removed leftovers
        self._same(lambda: folder.prepare(self.trainer.titles, self.request.resume))

    def _run_blocks(self) -> list[Record]:
        ranks, folder = self.ranks, self.builder.folder
        try:
            with on_first_interrupt(self.engine.interrupt):
                records = self.engine.run()
                with nullcontext() if ranks is None else ranks.explained():
                    for run in self.runs if self.saved is not None else ():
                        self.saved.finish(run)  # type: ignore[union-attr]
        finally:
            self.planner.close()
            if folder is not None:
                folder.close()
        if ranks is not None:
            with ranks.explained():
                records = ranks.collect(records)
            for run in self.runs:  # a last loss that was read late is in no message
                self.worker.report_loss(run)
        for run in self.runs:
            run.conclude(run.begin)
            for stage in run.stages if on_gpu(self.builder.device) and ranks is None else ():
                take_off(stage)
            restore_ties(run.model, run.stages)
            run.model.cpu()
        return records

    def _same(self, make: Callable[[], Made], of_first: bool = False) -> Made:
        """Return what it makes, or the first rank; all ranks end if it raises on one of them."""
        return make() if self.ranks is None else self.ranks.same(make, of_first)

    def _latest(self, titles: Sequence[str]) -> list[int]:
        """Return the iterations of the checkpoints to continue from."""
        folder = self.builder.folder if self.request.resume else None
        return [0 if folder is None else folder.latest(title) for title in titles]

    def _refill(self, ended: Job) -> Job | None:
        """Return another job for a slot; the checkpoint of the ended one is complete before."""
        index = next(run.index for run in self.runs if run.job is ended)
        if self.builder.folder is not None:
            self.builder.folder.settle(index)
        self.engine.unload(index)
        return self.events.next_job(ended, [run.job for run in self.runs])

    def _join(self, job: Job) -> JobRun | None:
        """Add a job between two segments, on all ranks alike."""
        index, begun, folder = len(self.runs), 0, self.builder.folder
        title = job.name or f"job{index}"
        if title in [run.title for run in self.runs]:
            raise InputError(f"jobs[{index}].name: {title!r} is also the name of another job")
        try:
            begun = self._same(lambda: self._latest([title])[0], of_first=True)
            make = partial(self.builder.make, job, index, title, begun, self._local(index), True)
            run = self._same(make)
            if folder is not None and folder.is_first:
                folder.prepare([title], self.request.resume)
        except Exception as error:
            if self.trainer.config.strict:
                raise
            failed = JobFailed(title, index, 0, begun, reason(error))
            job.life.status, job.life.error = "failed", failed
            return None
        try:
            self._same(partial(self._first_forward, [run]))
        except InputError as error:
            run.fail(0, run.start, reason(error)).__cause__ = unbound(error)
        if self.ranks is not None:
            self.ranks.share_failures([run])
        if on_gpu(self.builder.device):  # as in `_connect`
            torch.cuda.empty_cache()
        self.runs.append(run)
        if (limits := self.worker.memory.limits) is not None:
            note_bytes(limits, [run])
            if self.ranks is not None:
                limits.share(self.ranks.all)
        return run

    def _local(self, index: int) -> list[int]:
        """Return the stages of a job that this process trains."""
        if self.ranks is None:
            return [*range(self.plan.n_stages)]
        placement, rank = self.ranks.placement(index), self.ranks.links.rank
        return [stage for stage, device in enumerate(placement) if device == rank]

    def _first_forward(self, runs: Sequence[JobRun]) -> None:
        """Run one forward of every job, without effects; a job has failed if it raises."""
        note_shared(list(dict.fromkeys([*self.runs, *runs])))
        refused: InputError | None = None
        for run in runs:
            chain = self._chain(run)
            try:
                if refused is None and run.job.error is None:
                    rehearse(run, self.worker, chain)
                elif run.feed is not None:  # else its state cannot be kept
                    pass_over(run, chain)
            except JobFailed as error:
                unbound(error)
            except InputError as error:
                refused = error
        if refused is not None:
            raise refused

    def _chain(self, run: JobRun) -> FirstForward:
        if self.ranks is None:
            return FirstForward()
        from optsched.arraypipe.distributed.ranks import Chain

        return Chain(self.ranks, run)

    def _refusal(self, change: Change) -> str:
        """Return why the devices cannot make a change; ``""`` if they can."""
        ranks, memory, segment = self.ranks, self.worker.memory, self.run_plan.segment(change)
        live = [slot for slot, job in enumerate(segment.slots) if not self.runs[job].over]
        if ranks is not None or memory.moves:
            titles = [run.title for run in self.runs]
            placement = None if ranks is None else ranks.placement
            if sentence := moved(self.run_plan.now, segment, live, titles, placement):
                return sentence
        if memory.limits is None:
            return ""
        return str(memory.limits.refusal(segment, live))

    def _result(self, records: list[Record]) -> RunResult:
        ranks, run_plan, left_out = self.ranks, self.run_plan, self.engine.past.left_out
        uncertainty_ns = 0 if ranks is None else ranks.clock_error_ns
        provenance: dict[str, Any] = {
            "executor": "inline" if ranks is None else "process",
            "jobs": [run.title for run in self.runs],
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "optsched": __version__,
            "plan_sha256": self.plan.schedule.sha256,
            **gpu_settings(self.builder.device),
        }
        if ranks is not None:
            provenance["clock_error_ns"] = uncertainty_ns
        if left_out:
            provenance["blocks_left_out"] = left_out
        log = RunLog(
            run_plan.name, tuple(run_plan.segments), records, provenance, tuple(self.engine.copies),
            parallel=ranks is not None or on_gpu(self.builder.device),
            uncertainty_ns=uncertainty_ns, left_out=left_out,
        )  # fmt: skip
        jobs, losses = zip(*[(run.job, tuple(run.losses)) for run in self.runs], strict=True)
        if ranks is None:
            whole = tuple((run.model, _trained(run)) for run in self.runs)
            return RunResult(jobs, losses, log, whole)
        local = tuple((run, ranks.saved_by(run)) for run in self.runs)
        return RunResult(jobs, losses, log, None, local)


def _warn_of_forgotten(run: JobRun) -> None:
    """Warn of attributes that the forward changes and that no checkpoint keeps."""
    names = {module: name for name, module in run.model.named_modules()}
    rows = [row for stage in run.stages for row in stage.forgotten]
    if rows:
        found = [f"{key!r} of {type(part).__name__} {names.get(part, '')!r}" for part, key in rows]
        text = "no checkpoint keeps it, so a resumed run begins anew; use a buffer if it is read"
        warnings.warn(f"checkpoint: the forward changes {', '.join(found)}: {text}", stacklevel=2)


def _trained(run: JobRun) -> Trained:
    """Return references to everything that training has changed of a job."""
    parameters = {name: p.detach() for name, p in run.named_parameters()}
    states = states_by_name(run.stages)
    moments = {name: states[name]["state"] if name in states else {} for name in parameters}
    return Trained(parameters, run.named_buffers(), moments, tuple(run.losses))
