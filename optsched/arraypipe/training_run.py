"""One run of a job array by a plan: builds the jobs, has a backend train them, makes the result."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakMethod, proxy

import torch

from optsched.arraypipe.checkpoint.folder import CheckpointFolder
from optsched.arraypipe.checkpoint.states import settings_of
from optsched.arraypipe.events import Events
from optsched.arraypipe.job import Job, JobFailed
from optsched.arraypipe.job_builder import JobBuilder, warn_of_forgotten
from optsched.arraypipe.memory.manager import memory_of, note_bytes
from optsched.arraypipe.model.checks import note_shared
from optsched.arraypipe.model.lazy import collect
from optsched.arraypipe.model.optimizers import states_by_name
from optsched.arraypipe.model.tied_weights import restore_ties
from optsched.arraypipe.plan.segments import FIRST_CYCLES, RunPlan, moved, places
from optsched.arraypipe.report import RunLog, compare, measured
from optsched.arraypipe.rescheduling import Rescheduling
from optsched.arraypipe.runtime.data import check_resumable
from optsched.arraypipe.runtime.environment import (
    deterministic,
    device_of,
    global_state_kept,
    gpu_settings,
    on_first_interrupt,
    on_gpu,
)
from optsched.arraypipe.runtime.first_forward import FirstForward, pass_over, rehearse
from optsched.arraypipe.runtime.inline import InlineBackend
from optsched.arraypipe.runtime.stages import take_off
from optsched.arraypipe.runtime.state import JobRun
from optsched.arraypipe.runtime.worker import Memory, Worker, reason, unbound
from optsched.arraypipe.train_alone import Trained
from optsched.errors import InputError
from optsched.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from optsched.arraypipe.distributed.backend import ProcessBackend
    from optsched.arraypipe.distributed.ranks import Ranks
    from optsched.arraypipe.distributed.results import LocalJob
    from optsched.arraypipe.options import Request, Trainer
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Change
    from optsched.arraypipe.plan.types import Record
    from optsched.arraypipe.report import Report
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray

Made = TypeVar("Made")
RECEIVED_AHEAD = 2
"""Messages of a channel whose receives are posted before they are needed."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """Result of a run.

    Parameters
    ----------
    jobs
        All jobs, those that joined later too; `Job.status` says how each has ended.
    losses
        Loss of every iteration of this run, per job; on ranks only the first one has all.
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


def train(
    trainer: Trainer, plan: ExecutionPlan, request: Request, problem: JobArray | None = None
) -> RunResult:
    """Train the jobs of a trainer by a plan, inline or as one rank; the trainer does not change.

    Parameters
    ----------
    problem
        What the plan was made for: better orders are solved for when jobs have ended.
    """
    config, ranks = request.config, None
    with global_state_kept():  # the links of a rank choose its GPU
        try:
            if config.on_ranks:
                from optsched.arraypipe.distributed.ranks import Ranks

                devices = None if config.device is None else [config.device]
                ranks = Ranks(plan, RECEIVED_AHEAD, config.timeout, devices, config.replicas)
                ranks.agree(_shared_settings(trainer, plan, request))
            device = device_of(config.device) if ranks is None else ranks.devices[0]
            deterministic([device])
            return ArrayRun(trainer, plan, request, device, ranks, problem).train()
        finally:
            if ranks is not None:
                ranks.leave()


def folder_of(trainer: Trainer, request: Request) -> CheckpointFolder | None:
    """Return where checkpoints are written and read, None without ``checkpoint=``."""
    if request.checkpoint is None:
        return None
    check_resumable(trainer.data)
    config = request.config
    return CheckpointFolder(Path(request.checkpoint), trainer.cuts, config.every, config.keep)


def _shared_settings(trainer: Trainer, plan: ExecutionPlan, request: Request) -> dict[str, object]:
    """Settings that all ranks of a run must have in common."""
    of_jobs = ("seed", "batch_size", "microbatches", "precision", "clip_norm", "recompute")
    rows = [[getattr(job, key) for key in of_jobs] for job in trainer.jobs]
    return {
        "schedule": plan.schedule.sha256,
        "steps": request.steps,
        "memory": request.config.bytes,
        "cuts": trainer.cuts,
        "jobs": list(zip(trainer.titles, rows, strict=True)),
        "checkpoint": "not given" if request.checkpoint is None else "given",
        "resume": request.resume,
        **{key: getattr(request.config, key) for key in ("on_error", "every", "keep", "replicas")},
    }


class ArrayRun:
    """Trains jobs once by a plan, inline (`ranks` None) or on ranks; `runs` grows as jobs join."""

    def __init__(
        self,
        trainer: Trainer,
        plan: ExecutionPlan,
        request: Request,
        device: torch.device,
        ranks: Ranks | None,
        problem: JobArray | None,
    ) -> None:
        self.trainer, self.plan, self.request = trainer, plan, request
        self.device, self.ranks = device, ranks
        if on_gpu(device):
            torch.cuda.set_device(device)
        folder = folder_of(trainer, request)
        replicas = None if ranks is None else ranks.replicas
        self.saves = replicas is None or not replicas.index
        saved = folder if self.saves else None
        self.events = Events(trainer, request, saved, ranks and proxy(ranks))
        self.builder = JobBuilder(trainer, request, device, folder, replicas)
        self.runs: list[JobRun] = []
        try:
            self._build()
            self._connect(problem)
        except BaseException:
            _give_up(trainer.jobs, ())
            raise

    def _build(self) -> None:
        """Build all jobs and run their first forward; nothing is trained."""
        collect()  # what measuring and checking have left
        trainer, ranks = self.trainer, self.ranks
        begun = self._same(partial(self._latest, trainer.titles), of_first=True)
        n = self.plan.n_jobs
        away = self.request.config.memory is not None or ranks is not None

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
            trainer.weight, self.request.config.bytes is not None,
        )  # fmt: skip
        self._same(partial(self._first_forward, *self.runs))
        collect()
        if self.builder.folder is not None and self.request.is_first:
            warn_of_forgotten(self.runs[0])
        if ranks is not None:
            ranks.share_failures(self.runs)
        errors = [run.job.error for run in self.runs]
        found = [error for error in errors if error is not None]
        if found and (self.request.config.strict or None not in errors):
            raise found[0]

    def _connect(self, problem: JobArray | None) -> None:
        """Make what changes slots and orders, the memory, and the backend."""
        strict = self.request.config.strict
        self.run_plan = RunPlan(self.plan, self.runs, self.trainer.routes, FIRST_CYCLES)
        self.planner = Rescheduling(
            self.runs, self.plan, _weakly(self._join),
            _weakly(self._refill) if self.events.refills else None,
            _weakly(self._refusal), strict, problem,
        )  # fmt: skip
        if on_gpu(self.device):  # the streams of the blocks cannot use what this one has cached
            torch.cuda.empty_cache()
        ranks, run_plan, runs, worker = self.ranks, self.run_plan, self.runs, self.worker
        share = None if ranks is None else ranks.share(run_plan.now)
        limit = self.request.config.bytes
        worker.memory = self._same(lambda: memory_of(runs, run_plan.segments, limit, share))
        self.engine: InlineBackend | ProcessBackend
        if ranks is not None:
            self.engine = ranks.connect(run_plan, runs, worker, self.planner, strict)
        else:
            self.engine = InlineBackend(run_plan, runs, worker, self.planner, strict, self.device)

    def train(self) -> RunResult:
        """Run to the end, or to the end of all iterations after Ctrl-C; only once."""
        events, folder, trained = self.events, self.builder.folder, list[JobRun]()
        try:
            if folder is not None:
                self._prepare(folder)
            events.start(self.runs)
            trained = self.runs
            result = self._result(self._run_blocks(folder))
            events.end_jobs(self.runs)
        except BaseException:
            _give_up(self.trainer.jobs, trained)
            raise
        finally:
            events.finish()
        return result

    def _prepare(self, folder: CheckpointFolder) -> None:
        if self.ranks is not None:
            folder.stages_of, folder.is_first = self.ranks.saved_by, self.ranks.is_first
        # no rank writes before the first one has removed leftovers
        self._same(lambda: folder.prepare(self.trainer.titles, self.request.resume))

    def _run_blocks(self, folder: CheckpointFolder | None) -> list[Record]:
        ranks = self.ranks
        try:
            with on_first_interrupt(self.engine.interrupt):
                records = self.engine.run()
                with nullcontext() if ranks is None else ranks.concluding():
                    if folder is not None and self.saves:
                        for run in self.runs:
                            folder.finish(run)
        finally:
            self.planner.close()
            if folder is not None:
                folder.close()
        if ranks is not None:
            with ranks.concluding():
                records = ranks.collect(records)
            for run in self.runs:  # a last loss that was read late is in no message
                self.worker.report_loss(run)
        for run in self.runs:
            run.conclude(run.begin)
            for stage in run.stages if on_gpu(self.device) and ranks is None else ():
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
        """Return another job for a slot; the checkpoint of the ended one is complete before.

        Its memory on a GPU is freed, as the next one needs it for its first forward.
        """
        index = next(run.index for run in self.runs if run.job is ended)
        if self.builder.folder is not None:
            self.builder.folder.settle(index)
        self.engine.unload(index)
        return self.events.next_job(ended, [run.job for run in self.runs])

    def _join(self, job: Job) -> JobRun | None:
        """Add a job between two segments, on all ranks alike.

        Returns None if it cannot be made: then the job has the error; a strict run raises it.
        """
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
            if self.request.config.strict:
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
        if on_gpu(self.device):  # the stream of the blocks cannot use what this one has cached
            torch.cuda.empty_cache()
        self.runs.append(run)
        if (limits := self.worker.memory.limits) is not None:
            note_bytes(limits, [run])
            if self.ranks is not None:
                limits.share(self.ranks.all)
        return run

    def _local(self, index: int) -> list[int]:
        """Return the stages of a job that this process trains."""
        devices = places(self.plan, min(index, self.plan.n_jobs - 1))
        rank = None if self.ranks is None else self.ranks.links.rank
        return [stage for stage, device in enumerate(devices) if rank in (None, device)]

    def _first_forward(self, *runs: JobRun) -> None:
        """Run one forward of every job, without effects; a job whose forward raises has failed.

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
            return FirstForward()
        return self.ranks.chain(run, places(self.plan, min(run.index, self.plan.n_jobs - 1)))

    def _refusal(self, change: Change) -> str:
        """Return why the devices cannot make a change; ``""`` if they can."""
        ranks, memory, segment = self.ranks, self.worker.memory, self.run_plan.segment(change)
        live = [slot for slot, job in enumerate(segment.slots) if not self.runs[job].over]
        if ranks is not None or memory.moves:
            titles = [run.title for run in self.runs]
            if sentence := moved(self.run_plan.now, segment, live, titles):
                return sentence
        if memory.limits is None:
            return ""
        return str(memory.limits.refusal(segment, live))

    def _result(self, records: list[Record]) -> RunResult:
        ranks, run_plan, past = self.ranks, self.run_plan, self.engine.past
        provenance: dict[str, Any] = {
            "executor": "inline" if ranks is None else "process",
            "jobs": [run.title for run in self.runs],
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "optsched": __version__,
            "plan_sha256": self.plan.schedule.sha256,
            **gpu_settings([self.device]),
        }
        if ranks is not None:
            provenance["clock_error_ns"] = ranks.clock_error_ns
        if past.left_out:
            provenance["blocks_left_out"] = past.left_out
        log = RunLog(
            run_plan.name, tuple(run_plan.segments), records, provenance, tuple(self.engine.copies),
            parallel=ranks is not None or on_gpu(self.device),
            uncertainty_ns=0 if ranks is None else ranks.clock_error_ns, left_out=past.left_out,
        )  # fmt: skip
        jobs, losses = zip(*[(run.job, tuple(run.losses)) for run in self.runs], strict=True)
        if ranks is None:
            whole = tuple((run.model, _trained(run)) for run in self.runs)
            return RunResult(jobs, losses, log, whole)
        from optsched.arraypipe.distributed.results import LocalJob

        homes = ranks.backend.homes  # a job that never had a slot is where it was built
        local = tuple(
            LocalJob(
                run,
                ranks.saved_by(run) if run.index in homes or not self.saves
                else self._local(run.index),
            )
            for run in self.runs
        )  # fmt: skip
        return RunResult(jobs, losses, log, None, local)


def _weakly(method: Callable[..., Made]) -> Callable[..., Made]:
    """Call a method of a run without a reference cycle, which would delay freeing its models."""
    reference: Any = WeakMethod(method)
    return lambda *arguments: reference()(*arguments)


def _give_up(jobs: Sequence[Job], runs: Sequence[JobRun]) -> None:
    """Set the status after an exception: stopped if training had begun (`runs`), else ready."""
    for run in runs:
        run.conclude(max(run.begin, run.start + run.updates // max(1, run.local)))
    for job in jobs:
        if not runs and job.life.status == "running":
            job.life.status = "ready"


def _trained(run: JobRun) -> Trained:
    """References to everything that training has changed of a job."""
    parameters = {name: p.detach() for name, p in run.named_parameters()}
    states = states_by_name(run.stages)
    moments = {name: states[name]["state"] if name in states else {} for name in parameters}
    return Trained(parameters, run.named_buffers(), moments, tuple(run.losses))
