"""`ArrayTrainer`: sibling jobs trained by a schedule, each to the bits of training alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from optsched.arraypipe.job import Job
from optsched.arraypipe.model.build import Builder, model_function
from optsched.arraypipe.model.calls import UNCUT
from optsched.arraypipe.model.compare import check_cut
from optsched.arraypipe.model.split import Stages, cut_of, split
from optsched.arraypipe.model.tied_weights import tied_pairs
from optsched.arraypipe.options import Request, RunConfig
from optsched.arraypipe.plan.orders import random_schedule
from optsched.arraypipe.plan.plan import routes
from optsched.arraypipe.profile import Profile
from optsched.arraypipe.runtime.data import Feed, batches_of
from optsched.arraypipe.runtime.environment import device_of, global_state_kept
from optsched.arraypipe.runtime.losses import Criterion
from optsched.arraypipe.runtime.stages import loss_copy, waits_for_all
from optsched.arraypipe.shallow import fits, shallow
from optsched.arraypipe.train_alone import Trained, differences, train_alone
from optsched.errors import InputError
from optsched.io.values import integer, is_integer

if TYPE_CHECKING:
    from os import PathLike

    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from optsched.arraypipe.callbacks import Callback
    from optsched.arraypipe.job import BuildModel, Data, Loss
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.types import Routes
    from optsched.arraypipe.runtime.losses import Weight
    from optsched.arraypipe.training_run import RunResult
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


class ArrayTrainer:
    """Trains a job array in the order of a schedule.

    Parameters
    ----------
    model
        A function or class that makes the unsplit model, called with ``**job.model`` after
        ``torch.manual_seed(job.seed)``; a pair ``(class, config)``; or an `nn.Module`, of which
        every job gets a copy (frozen parameters are shared).
    data
        A dataset with indices: shuffled by the seed of every job, in batches of its size, epoch
        after epoch. A DataLoader: its dataset, collate function and workers, in its order if it
        does not shuffle. An iterable dataset, in its order (no checkpoints). Or
        ``data(job, start)``, an iterator of batches that begins with iteration `start` and depends
        on nothing else (not on the global random state).
    stages
        A number of stages; or names of the blocks at which stages 1, 2, ... begin, or their
        indices among the modules of an `nn.Sequential` or of the largest list of modules.
    loss
        ``loss(output, target)``; None: ``output.loss`` of the model. Losses of micro-batches are
        weighted so that they add up to that of their batch: by the targets that count where some
        are ignored, by 1 for ``reduction="sum"``, else by samples. Refused if they do not.
    weight
        Weight of a micro-batch instead: a function of its target, or ``"sum"`` (1 for each, without
        a mean).

    Raises
    ------
    InputError
        An argument is wrong. Errors of `model` and `data` are not caught, here and in `fit`.

    Examples
    --------
    >>> from torch import nn
    >>> from optsched.arraypipe import ArrayTrainer
    >>> layers = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> trainer = ArrayTrainer(layers, [], stages=2, loss=nn.CrossEntropyLoss())
    """

    def __init__(
        self,
        model: BuildModel | tuple[Any, Any] | nn.Module,
        data: Data | Dataset[Any] | DataLoader[Any] | Sequence[Any],
        stages: Stages = 2,
        loss: Loss | None = None,
        *,
        weight: Weight = None,
    ) -> None:
        if loss is not None and (not callable(loss) or isinstance(loss, type)):
            hint = "; make one of the class" if isinstance(loss, type) else ""
            raise InputError(f"loss: expected a function, got {loss!r:.60}{hint}")
        if weight not in (None, "sum") and not callable(weight):
            raise InputError(f'weight: expected a function or "sum", got {weight!r:.60}')
        self.build_model, self.data = model_function(model), batches_of(data)
        self.loss: Any = loss  # None: that of the model's output
        self.weight = weight
        self.given_stages = stages
        self.jobs: tuple[Job, ...] = ()
        self.config = RunConfig()
        self.cut = UNCUT
        self.compared: frozenset[str] = frozenset()  # arguments of models
        self.ties: tuple[tuple[int, int], ...] = ()
        self.last_profile: Profile | None = None

    @property
    def titles(self) -> list[str]:
        """Names of the jobs; ``job0``, ... by position without a name."""
        return titles_of(self.jobs)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Names of the blocks at which stages 1, 2, ... begin."""
        return self.cut.names

    @property
    def n_stages(self) -> int:
        """Number of stages that the model is cut into."""
        return len(self.cuts) + 1

    def with_jobs(self, jobs: Sequence[Job], config: RunConfig | None = None) -> ArrayTrainer:
        """Return a trainer of these jobs with the model, data, stages and loss of this one.

        Its `profile`, `problem`, `plan`, `train_alone` and `check_exact` are about these jobs. The
        first job determines where the model is cut; a model with other arguments is compared with
        its stages, too.
        """
        if config is not None and not isinstance(config, RunConfig):
            raise InputError(f"config: expected a RunConfig, got {config!r:.60}")
        made = copy(self)
        made.jobs, made.config = checked_jobs(jobs), config or self.config
        for job, title in zip(made.jobs, made.titles, strict=True):
            made._cut(job, title)
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
        """Measure, find an order, compare with training alone, train, save.

        Afterwards `jobs` are these and those that callbacks returned. After Ctrl-C every job ends
        with its iteration, and the result has what was trained. Under `torchrun` all ranks call it
        with the same arguments, one per device.

        Parameters
        ----------
        jobs
            Training runs.
        steps
            Iterations of every job, counted from its seed (not from the checkpoint).
        schedule
            Order to train in. If it has fewer jobs, the other jobs wait for the slots of jobs that
            have ended. None: a schedule of all jobs is solved from measured times.
        checkpoint
            Folder; each job writes its last state there, and one after every `RunConfig.every`.
        resume
            Continue from the newest checkpoints in that folder, where there are any.
        callbacks
            Called in this order.
        evaluate
            ``evaluate(model) -> float``; or a dataset or DataLoader, over which the loss is
            averaged; or ``(dataset, metric)`` with ``metric(output, target)``. Called with a copy
            of the model in evaluation mode, once before the training, then after every
            `RunConfig.every` iterations and the last one; `Callback.on_evaluate` gets the value.
            On ranks the newest checkpoint is evaluated, so that some may be skipped.
        config
            Settings.

        Raises
        ------
        InputError
            An argument is wrong, or something does not fit; nothing has been trained.
        NotIdentical
            The jobs differ from training alone.
        JobFailed
            The first forward of all jobs raised; with ``on_error="raise"`` any block.
        """
        from optsched.arraypipe.fit import fit, on_all_ranks, validated

        def prepared() -> tuple[ArrayTrainer, Request, ExecutionPlan | None]:
            made = self.with_jobs(jobs, config)
            request = Request(
                integer("steps", steps, 1, None), checkpoint, resume, callbacks, evaluate,
                made.config,
            )  # fmt: skip
            for job in made.jobs:
                job.life.begin()
            return made, request, validated(made, schedule, request)

        made, request, plan = on_all_ranks(prepared, config or self.config)
        result = fit(made, plan, request)
        self.jobs, self.cut, self.ties = result.jobs, made.cut, made.ties
        self.compared = made.compared
        self.last_profile = made.last_profile
        return result

    def profile(
        self,
        sizes: Sequence[int] | None = None,
        *,
        split_backward: bool = False,
    ) -> Profile:
        """Measure the blocks of all stages on the device of this process.

        Parameters
        ----------
        sizes
            Sizes of micro-batches; by default those of the jobs.
        split_backward
            Measure gradients of inputs (I) and of weights (W), too.
        """
        from optsched.arraypipe.measure import measure

        checked_jobs(self.jobs)
        with global_state_kept():
            device = device_of(self.config.device)
            self.last_profile = measure(self, device, sizes=sizes, split_backward=split_backward)
        return self.last_profile

    def problem(self, profile: Profile | None = None, **options: Any) -> JobArray:
        """Return the scheduling problem of these jobs with measured times (`Profile.problem`).

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
        """Compile a schedule and check that it is one of these jobs."""
        from optsched.arraypipe.fit import checked_plan

        return checked_plan(self, schedule)

    def routes(self, plan: ExecutionPlan) -> Routes:
        """Return the messages of a plan of these jobs."""
        return routes(plan, self.ties, plan.together)

    def train_alone(self, job: int, steps: int) -> Trained:
        """Train job number `job` without a schedule: the reference (`optsched.testing`)."""
        if not is_integer(job) or not 0 <= job < len(self.jobs):
            raise InputError(f"job: expected 0..{len(self.jobs) - 1}, got {job!r}")
        integer("steps", steps, 0, None)
        device = device_of(self.config.device)
        return train_alone(
            self.build_model, self.jobs[job], self.cuts, self.loss, self.data, steps, device,
            self.weight,
        )  # fmt: skip

    def check_exact(self, steps: int = 3, *, seed: int = 0) -> list[str]:
        """Train the jobs in a random order and each alone; return every tensor that differs.

        An empty list: all parameters, buffers, optimizer states and losses are equal bit by bit.
        This finds layers that no rule foresees, such as one with a counter of its calls.
        """
        from optsched.arraypipe.fit import checked_plan
        from optsched.arraypipe.training_run import train

        checked_jobs(self.jobs)
        together = [j for j, job in enumerate(self.jobs) if waits_for_all(job)]
        counts = [job.microbatches for job in self.jobs]
        schedule = random_schedule(
            counts, self.n_stages, update=together, together=together, seed=seed
        )
        config = RunConfig("inline", self.config.device, self.config.memory, on_error="raise")
        request = Request(integer("steps", steps, 1, None), None, False, (), None, config)
        result = train(self, checked_plan(self, schedule), request)
        return [
            f"job {title}: {sentence}"
            for j, title in enumerate(self.titles)
            for sentence in differences(result.trained[j], self.train_alone(j, steps))
        ]

    def _cut(self, job: Job, title: str) -> None:
        """Cut the model of a job, unless it is known where, and compare it with its stages."""
        known = self.cut
        if known is not UNCUT and (not known.calls.outputs or repr(job.model) in self.compared):
            return
        with global_state_kept():
            feed = Feed(self.data, job, title, 0)
            sample = cache(lambda: feed.peek(torch.device("cpu")))
            with Builder(self.build_model).sketch(job) as model:
                if known is UNCUT:
                    self.cut = cut_of(model, self.given_stages, lambda: sample()[0])
                if self.cut.calls.outputs and not self._compared_shallow(job, fits(model)):
                    inputs, target = sample()
                    end = Criterion(loss_copy(self.loss, job), target, 1.0)
                    check_cut(model, self.cut, inputs, end, title)
                self.compared |= {repr(job.model)}
                if known is UNCUT:
                    self.ties = tuple(sorted(tied_pairs(split(model, self.cut, job, title))))

    def _compared_shallow(self, job: Job, whole_fits: bool) -> bool:
        """Compare a model of one block per stage where the whole should not be, or cannot be."""
        small = None if whole_fits and not self.config.on_ranks else shallow(self)
        if small is None:
            return False
        try:
            small.with_jobs([replace(job, init=None)])
        except InputError:
            if not whole_fits:
                raise
            return False  # the whole model decides: not every model can do with fewer blocks
        return True


def titles_of(jobs: Sequence[Job]) -> list[str]:
    """Names of jobs; ``job0``, ... by position without a name."""
    return [job.name or f"job{k}" for k, job in enumerate(jobs)]


def checked_jobs(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Refuse an empty list, one with something else than jobs, and names that occur twice."""
    if not isinstance(jobs, Sequence):
        raise InputError(f"jobs: expected a list, got {jobs!r:.60}")
    if not jobs:
        raise InputError("jobs: expected at least one")
    for k, job in enumerate(jobs):
        if not isinstance(job, Job):
            raise InputError(f"jobs[{k}]: expected a Job, got {job!r:.60}")
    titles = titles_of(jobs)
    for k, title in enumerate(titles):
        if title in titles[:k]:
            raise InputError(f"jobs[{k}].name: {title!r} is also the name of another job")
    return tuple(jobs)
