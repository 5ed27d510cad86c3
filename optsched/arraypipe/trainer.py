"""`ArrayTrainer`: sibling jobs trained by a schedule, each to the bits it would reach alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from optsched.arraypipe.checkpoint.folder import CheckpointFolder
from optsched.arraypipe.job import PRECISIONS, Job
from optsched.arraypipe.life.changes import check_problem, fits_seat
from optsched.arraypipe.memory.budget import check_limit
from optsched.arraypipe.model.build import build
from optsched.arraypipe.model.calls import UNCUT
from optsched.arraypipe.model.compare import check_cut
from optsched.arraypipe.model.split import Stages, cut_of, split
from optsched.arraypipe.model.tied_weights import lent
from optsched.arraypipe.plan.orders import random_schedule
from optsched.arraypipe.plan.plan import ExecutionPlan, compile, routes
from optsched.arraypipe.profile.document import Profile
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.datasets import batches_of, check_resumable
from optsched.arraypipe.runtime.environment import (
    check_devices,
    deterministic,
    global_state_kept,
    own_first,
    resolve,
)
from optsched.arraypipe.runtime.losses import Criterion
from optsched.arraypipe.runtime.stages import waits_for_all
from optsched.arraypipe.train_alone import Trained, differences, train_alone
from optsched.arraypipe.training_run import ArrayRun, RunOptions, run_options
from optsched.errors import InputError
from optsched.io.values import as_python, boolean, bytes_of, integer, is_integer, one_of
from optsched.model.schedule import Schedule

if TYPE_CHECKING:
    from os import PathLike

    from torch.utils.data import DataLoader, Dataset

    from optsched.arraypipe.callbacks import Callback
    from optsched.arraypipe.distributed.ranks import Ranks
    from optsched.arraypipe.job import BuildModel, Data, Loss
    from optsched.arraypipe.plan.types import Routes
    from optsched.arraypipe.runtime.losses import Weight
    from optsched.arraypipe.training_run import RunResult
    from optsched.problems.jobarray.problem import JobArray


@dataclass(frozen=True)
class RunConfig:
    """How `ArrayTrainer.fit` runs.

    Parameters
    ----------
    backend
        ``"inline"``: all devices in this process; ``"process"``: one per rank of `torchrun`. None:
        ``"process"`` under `torchrun`.
    devices, memory, tied
        Instead of those of the trainer.
    window, timeout, on_error
        As for `ArrayTrainer.run`.
    replan
        Look for a better order when a job has ended and nobody takes its seat.
    every
        Iterations between two evaluations, and between two checkpoints. None: at the end only.
    keep, mode
        Newest checkpoints of a job that are not removed; nor is, inline, the one with the lowest
        (``"min"``) or highest (``"max"``) value of `evaluate`, which ``<job>/best`` names.
    check
        Iterations over which the jobs are compared with training alone first; 0: none.
    verbose
        Say what is done, and show progress.
    """

    backend: Literal["inline", "process"] | None = None
    devices: Sequence[str | torch.device] | None = None
    memory: int | str | None = None
    tied: Literal["exact", "sum"] | None = None
    window: int = 2
    timeout: float = 600.0
    on_error: Literal["continue", "raise"] = "continue"
    replan: bool = False
    every: int | None = None
    keep: int = 2
    mode: Literal["min", "max"] = "min"
    check: int = 2
    verbose: bool = True

    def __post_init__(self) -> None:
        check_devices(self.devices)
        if self.backend is not None:
            one_of("backend", self.backend, ("inline", "process"))
        if self.tied is not None:
            one_of("tied", self.tied, ("exact", "sum"))
        one_of("mode", self.mode, ("min", "max"))
        if self.every is not None:
            integer("every", self.every, 1, None)
        integer("keep", self.keep, 1, None)
        integer("check", self.check, 0, None)
        boolean("replan", self.replan)
        boolean("verbose", self.verbose)


class ArrayTrainer:
    """Trains a job array in the order of a schedule.

    ``ArrayTrainer(build_model, data, stages=..., loss=...)``, with ``jobs=...`` or with jobs for
    `fit`; or in the order of a schedule's parts, ``(build_model, jobs, stages, loss, data)``.

    Parameters
    ----------
    build_model
        ``build_model(**job.model)`` makes the unsplit model; called after
        ``torch.manual_seed(job.seed)``.
    data
        A dataset with indices: shuffled by the seed of every job, in batches of its size, epoch
        after epoch. A DataLoader: its dataset, collate function and workers, in its own order if
        it does not shuffle. An iterable dataset, in its own order (no checkpoints). Or
        ``data(job, start)``, an iterator of ``(input, target)`` pairs that begins with iteration
        `start` and depends on nothing else (not on the global random state).
    stages
        A number of stages; or names of the blocks at which stages 1, 2, ... begin, or their
        indices among the modules of an `nn.Sequential` or of the largest list of modules.
    loss
        ``loss(output, target)``, without parameters. Losses of micro-batches are weighted so that
        they add up to that of their batch: by the targets that count where some are ignored (with
        class weights), by 1 for ``reduction="sum"``, else by samples. Refused if they do not.
    jobs
        The siblings; job j of a schedule is ``jobs[j]``. None: `fit` or `with_jobs` gets them.
    devices
        The torch device of every device of a schedule, by position; entries may repeat. None: the
        GPUs of the host, one for all if there is but one, else the CPU.
    memory
        Bytes of every device (or ``"40GB"``) for states, gradients, activations and reserve, and
        with one process per device for messages; states that do not fit take turns in slots. None:
        all states fit.
    weight
        Weight of a micro-batch instead: a function of its target, or ``"sum"`` (1 for each, without
        a mean).
    tied
        How the gradient of a weight that several stages use comes to the earliest of them, which
        updates it. ``"exact"``: with every micro-batch, so that sums are rounded as in training
        alone. ``"sum"``: once an iteration, summed over the micro-batches, which is less to send
        and bit for bit the same for one micro-batch only.

    Raises
    ------
    InputError
        The stages do not fit the model, two jobs have one name, or `devices`, `memory` or `tied` is
        no such value. What `build_model` and `data` raise comes through as it is, here
        and at the beginning of a run.
    """

    jobs: tuple[Job, ...]

    def __init__(
        self,
        build_model: BuildModel,
        *parts: Any,
        jobs: Sequence[Job] | None = None,
        stages: Stages | None = None,
        loss: Loss | None = None,
        data: Data | Dataset[Any] | DataLoader[Any] | Sequence[Any] | None = None,
        devices: Sequence[str | torch.device] | None = None,
        memory: int | str | None = None,
        tied: Literal["exact", "sum"] = "exact",
        weight: Weight = None,
    ) -> None:
        if len(parts) == 1 and data is None:
            (data,) = parts
        elif parts:
            given = dict(zip(("jobs", "stages", "loss", "data"), parts, strict=False))
            jobs, stages = given.get("jobs", jobs), given.get("stages", stages)
            loss, data = given.get("loss", loss), given.get("data", data)
        if stages is None or data is None or len(parts) > 4:
            raise InputError(
                "expected ArrayTrainer(build_model, data, stages=..., loss=...), and jobs=... "
                "unless fit gets them"
            )
        if not callable(build_model):
            raise InputError(f"build_model: expected a function, got {build_model!r:.60}")
        if loss is not None and (not callable(loss) or isinstance(loss, type)):
            made = "; make one of the class" if isinstance(loss, type) else ""
            raise InputError(f"loss: expected a function, got {loss!r:.60}{made}")
        if isinstance(build_model, nn.Module):
            raise InputError("build_model: expected a function that makes a model, got a model")
        if tied not in ("exact", "sum"):
            raise InputError(f'tied: expected "exact" or "sum", got {tied!r:.60}')
        self.build_model, self.data = build_model, batches_of(data)
        self.loss: Any = loss  # None: that of the model's output
        if weight not in (None, "sum") and not callable(weight):
            raise InputError(f'weight: expected a function or "sum", got {weight!r:.60}')
        self.tied, self.devices, self.weight = tied, devices, weight
        self.memory = None if memory is None else _bytes(memory)
        check_devices(devices)
        self.last_profile: Profile | None = None  # measured here
        self.jobs = ()
        self.given_stages = stages
        self.cut = UNCUT
        self.ties: tuple[tuple[int, int], ...] = ()
        if jobs is not None:
            self._take(jobs)

    def _take(self, jobs: Sequence[Job]) -> None:
        """Have these jobs; the first ones say where the model is cut."""
        check_jobs(jobs)
        self.jobs = ()
        for job in jobs:
            self.take_in(job)
        if self.cut is not UNCUT:
            return
        with global_state_kept():
            first, stages = jobs[0], self.given_stages
            model = build(self.build_model, first)
            if first.precision != "fp32":  # as its inputs are
                model.to(PRECISIONS[first.precision])
            feed, title = Feed(self.data, first, self.titles[0], 0), self.titles[0]
            sample = cache(lambda: feed.peek(torch.device("cpu")))
            cut = cut_of(model, stages, lambda: sample()[0])
            if cut.calls.outputs:
                inputs, target = sample()
                check_cut(model, cut, inputs, Criterion(self.loss, target, 1.0), title)
            self.cut, self.ties = cut, tuple(sorted(lent(split(model, cut, first, title))))

    @property
    def titles(self) -> list[str]:
        """Names of the jobs: their own, or by position."""
        return [job.name or f"job{k}" for k, job in enumerate(self.jobs)]

    @property
    def cuts(self) -> tuple[str, ...]:
        """Names of the blocks at which stages 1, 2, ... begin."""
        return self.cut.names

    @property
    def n_stages(self) -> int:
        """Stages that the model is cut into."""
        return len(self.cuts) + 1

    def with_jobs(self, jobs: Sequence[Job]) -> ArrayTrainer:
        """A trainer of other jobs, with the model, stages, loss, data and devices of this one."""
        made = copy(self)
        made._take(jobs)
        return made

    def fit(
        self,
        jobs: Sequence[Job],
        steps: int,
        *,
        schedule: Schedule | ExecutionPlan | None = None,
        checkpoint: str | PathLike[str] | None = None,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        evaluate: Any = None,
        config: RunConfig | None = None,
    ) -> RunResult:
        """Measure, find an order, check exactness on two iterations, train, show progress, save.

        Afterwards `jobs` are these, and those that callbacks have given. Ctrl-C ends every job
        with its iteration; the result has what was trained. Under `torchrun` all ranks call it
        alike, one per device, and the first one measures, solves and shows.

        Parameters
        ----------
        jobs
            What to train.
        steps
            Iterations of every job, counted from its seed (not from the checkpoint).
        schedule
            To train by. If it has fewer jobs, the others wait and take the seats of those that
            have ended. None: one of all jobs, by measured times.
        checkpoint
            Folder; each job writes its last state there, and one after every `RunConfig.every`.
        resume
            Go on from the latest checkpoints in that folder, where there are any.
        callbacks
            Objects of `Callback`, told in this order.
        evaluate
            A function ``evaluate(model) -> float``; or a dataset or DataLoader of pairs, on which
            the mean of the loss is taken; or ``(dataset, metric)`` with another
            ``metric(output, target)``. Called with the merged model in evaluation mode, once
            before the training, after every `RunConfig.every` iterations and the last of `steps`;
            `Callback.on_evaluate` gets the value. On ranks the newest checkpoint is evaluated, so
            that some may be left out.
        config
            How it runs.

        Raises
        ------
        InputError
            An argument is wrong, or something does not fit; nothing has been trained then.
        NotIdentical
            The jobs do not reach the bits that they reach alone.
        JobFailed
            The first forward of all jobs raised; with ``on_error="raise"`` any block.
        """
        from optsched.arraypipe.fit import Fit

        config = RunConfig() if config is None else config
        if not isinstance(config, RunConfig):
            raise InputError(f"config: expected a RunConfig, got {config!r:.60}")
        made = self.with_jobs(jobs)
        made.devices = config.devices or made.devices
        made.memory = made.memory if config.memory is None else _bytes(config.memory)
        made.tied = config.tied or made.tied
        self.cut, self.ties = made.cut, made.ties
        try:
            return Fit(made, steps, schedule, checkpoint, resume, callbacks, evaluate, config).run()
        finally:
            self.jobs, self.last_profile = made.jobs, made.last_profile

    def profile(self, sizes: Sequence[int] | None = None, repeats: int = 10) -> Profile:
        """Measure the blocks of all stages, and the links (`profile.measure.measure`).

        Parameters
        ----------
        sizes
            Sizes of micro-batches; by default those of the jobs.
        repeats
            Times each block is measured at least; up to 50 while it scatters.
        """
        from optsched.arraypipe.profile.measure import measure

        check_jobs(self.jobs)
        with global_state_kept():
            devices = own_first(resolve(self.devices))
            self.last_profile = measure(self, devices, sizes=sizes, repeats=repeats)
        return self.last_profile

    def problem(self, profile: Profile | None = None, **options: Any) -> JobArray:
        """The scheduling problem of these jobs with measured times (`Profile.problem`).

        Parameters
        ----------
        profile
            By default one is measured now.
        options
            Those of `Profile.problem`: ``objective``, ``memory``, ``place``, ...
        """
        if profile is not None and not isinstance(profile, Profile):
            raise InputError(f"profile: expected a Profile, got {profile!r:.60}")
        return (profile or self.profile()).problem(self.jobs, **options)

    def plan(self, schedule: Schedule) -> ExecutionPlan:
        """Compile a schedule and make sure that it is one of these jobs."""
        plan = self._compile(schedule)
        self._check(plan, queue=False)
        return plan

    def run(self, schedule: Schedule | ExecutionPlan, steps: int, **options: Any) -> RunResult:
        """Train every job until it has done `steps` iterations.

        Parameters
        ----------
        schedule
            A schedule document of these jobs, or a plan compiled from one. Its order is binding;
            its starts are a prediction.
        steps
            Iterations of every job, counted from its seed (not from the checkpoint).
        options
            Those of `RunOptions`: ``checkpoint``, ``resume``, ``on_step``, ``backend``, ...

        Raises
        ------
        InputError
            The schedule does not fit, or an argument is wrong; nothing has been trained then.
        JobFailed
            The first forward of all jobs raised; with ``on_error="raise"`` any block.
        """
        steps = as_python(steps)
        backend = one_of("backend", options.get("backend", "inline"), ("inline", "process"))

        def checked() -> tuple[ExecutionPlan, CheckpointFolder | None, RunOptions]:
            integer("steps", steps, 1, None)
            given = run_options(options)
            plan = schedule if isinstance(schedule, ExecutionPlan) else self._compile(schedule)
            self._check(plan, given.queue)
            if backend == "process":
                check_size(len(plan.devices))
            if given.replan is not None:
                check_problem(given.replan, plan)
            return plan, self.folder(given), given

        if backend == "inline":
            plan, folder, given = checked()
        else:  # on all ranks or on none: the others would wait for one that has been refused
            from optsched.arraypipe.distributed.group import agree
            from optsched.arraypipe.distributed.ranks import Ranks, check_size

            patience = options.get("timeout")
            if not isinstance(patience, (int, float)) or not 0 < patience <= 1e6:
                patience = RunOptions.timeout  # what is wrong with it `checked` says
            plan, folder, given = agree(checked, patience)
        ranks: Ranks | None = None
        with global_state_kept():  # the links of a rank choose its GPU
            try:
                if backend == "process":
                    ranks = Ranks(plan, given.window, given.timeout, self.devices)
                    ranks.agree(self._settings(plan, steps, given))
                devices = resolve(self.devices, plan.devices) if ranks is None else ranks.devices
                deterministic(devices)
                return ArrayRun(self, plan, devices, ranks, folder, steps, given).train()
            finally:
                if ranks is not None:
                    ranks.leave()

    def train_alone(self, job: int, steps: int) -> Trained:
        """The reference for job number `job` (`optsched.testing.train_alone`), on the first device.

        Raises
        ------
        InputError
            There is no such job, or `steps` is no number of iterations.
        """
        if not is_integer(job) or not 0 <= job < len(self.jobs):
            raise InputError(
                f"job: expected 0..{len(self.jobs) - 1}, a number of the trainer's jobs, got "
                f"{job!r}"
            )
        integer("steps", steps, 0, None)
        device = resolve(self.devices, ("",))[0]
        return train_alone(
            self.build_model, self.jobs[job], self.cuts, self.loss, self.data, steps, device,
            self.weight,
        )  # fmt: skip

    def check_exact(self, steps: int = 3, *, seed: int = 0) -> list[str]:
        """Train the jobs as an array in a random order and each alone; every tensor that differs.

        An empty list means that all parameters, buffers, optimizer states and losses are equal bit
        by bit. It finds layers that no rule foresees, such as one that keeps its own counter. A
        trainer with ``tied="sum"`` is tried as it trains: what it lists then is what that costs.
        """
        check_jobs(self.jobs)
        together = [j for j, job in enumerate(self.jobs) if waits_for_all(job)]
        counts = [job.microbatches for job in self.jobs]
        schedule = random_schedule(
            counts, self.n_stages, update=together, together=together, seed=seed
        )
        result = self.run(schedule, steps, on_error="raise")
        return [
            f"job {title}: {sentence}"
            for j, title in enumerate(self.titles)
            for sentence in differences(result.trained[j], self.train_alone(j, steps))
        ]

    def folder(self, options: RunOptions) -> CheckpointFolder | None:
        """Where checkpoints of a run are written and read, if that is asked for."""
        if options.checkpoint is None:
            return None
        check_resumable(self.data)
        folder = Path(options.checkpoint)
        return CheckpointFolder(folder, self.cuts, options.checkpoint_every, options.keep)

    def routes(self, plan: ExecutionPlan) -> Routes:
        """The messages that a plan of these jobs sends."""
        return routes(plan, self.ties, plan.together)

    def take_in(self, job: Job) -> None:
        """Note one more job, under a title that no other has."""
        place = len(self.jobs)
        if not isinstance(job, Job):
            raise InputError(f"jobs[{place}]: expected a Job, got {job!r:.60}")
        title = job.name or f"job{place}"
        if title in self.titles:
            raise InputError(f"jobs[{place}].name: {title!r} is also the name of another job")
        self.jobs = (*self.jobs, job)

    def _compile(self, schedule: Schedule) -> ExecutionPlan:
        if not isinstance(schedule, Schedule):
            raise InputError(
                f"schedule: expected a Schedule or a plan, got {schedule!r}; a file is read by "
                f"Schedule.read(path)"
            )
        n_jobs = int(schedule.job.max()) + 1 if schedule.n_operations else 0
        together = [j for j, job in enumerate(self.jobs[:n_jobs]) if waits_for_all(job)]
        return compile(schedule, together=together)

    def _check(self, plan: ExecutionPlan, queue: bool) -> None:
        """The plan is one of these jobs, and those beyond its seats can take one."""
        check_jobs(self.jobs)
        n = plan.n_jobs if queue else len(self.jobs)
        seated = self.jobs[:n]
        if plan.n_jobs != len(seated):
            raise InputError(f"the schedule has {plan.n_jobs} jobs, the trainer {len(seated)}")
        if plan.n_stages != self.n_stages:
            raise InputError(f"the schedule has {plan.n_stages} stages, the model {self.n_stages}")
        for j, (job, planned) in enumerate(zip(seated, plan.microbatches, strict=True)):
            if planned != job.microbatches:
                raise InputError(
                    f"job {j}: the schedule has {planned} micro-batches, the job {job.microbatches}"
                )
            if waits_for_all(job) and j not in plan.together:
                raise InputError(
                    f"job {self.titles[j]} clips its gradients or adapts its learning rate to the "
                    f"loss: compile the plan with together=[{j}], or by trainer.plan()"
                )
        for job, title in zip(self.jobs[n:], self.titles[n:], strict=True):
            if not any(fits_seat(job, plan, seat) for seat in range(n)):
                raise InputError(
                    f"the schedule has {n} jobs; job {title} waits for a seat with "
                    f"{job.microbatches} micro-batches, and there is none"
                )

    def _settings(self, plan: ExecutionPlan, steps: int, options: RunOptions) -> dict[str, object]:
        """What all ranks of a run must have been given alike."""
        settings = ("queue", "on_error", "checkpoint_every", "keep", "resume")
        of_jobs = ("seed", "batch_size", "microbatches", "precision", "clip_norm", "recompute")
        rows = [[getattr(job, key) for key in of_jobs] for job in self.jobs]
        return {
            "schedule": plan.schedule.sha256,
            "steps": steps,
            "memory": self.memory,
            "cuts": self.cuts,
            "tied": self.tied,
            "jobs": list(zip(self.titles, rows, strict=True)),
            "checkpoint": "not given" if options.checkpoint is None else "given",
            **{key: getattr(options, key) for key in settings},
        }


def _bytes(memory: int | str) -> int:
    """A limit of memory in bytes."""
    found = bytes_of(memory) if isinstance(memory, str) else memory
    check_limit(found)
    return found


def check_jobs(jobs: Sequence[Job]) -> None:
    """Refuse what is no list of jobs, or an empty one."""
    if not isinstance(jobs, Sequence):
        raise InputError(f"jobs: expected a list, got {jobs!r:.60}")
    if not jobs:
        raise InputError("jobs: expected at least one")
