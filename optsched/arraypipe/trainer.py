"""`ArrayTrainer`: sibling jobs trained by a schedule, each to the bits of training alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from optsched.arraypipe.job import Job
from optsched.arraypipe.model.build import Builder, model_function
from optsched.arraypipe.model.calls import UNCUT
from optsched.arraypipe.model.cuts import Stages, check_cut, cut_of
from optsched.arraypipe.model.split import split, tied_pairs
from optsched.arraypipe.options import Request, RunConfig
from optsched.arraypipe.plan.plan import ExecutionPlan, compile_plan, random_schedule, routes
from optsched.arraypipe.profile import Profile
from optsched.arraypipe.report import RunLog, compare, measured
from optsched.arraypipe.rescheduling import misfit
from optsched.arraypipe.runtime.data import Feed, batches_of
from optsched.arraypipe.runtime.environment import device_of, global_state_kept
from optsched.arraypipe.runtime.losses import Criterion
from optsched.arraypipe.runtime.stages import loss_copy, waits_for_all
from optsched.arraypipe.shallow import fits, shallow
from optsched.arraypipe.train_alone import Trained, differences, train_alone
from optsched.errors import InputError
from optsched.io.values import integer, is_integer
from optsched.model.schedule import Schedule

if TYPE_CHECKING:
    from os import PathLike

    import pandas
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from optsched.arraypipe.callbacks import Callback
    from optsched.arraypipe.job import BuildModel, Data, Loss
    from optsched.arraypipe.plan.types import Routes
    from optsched.arraypipe.report import Report
    from optsched.arraypipe.runtime.losses import Weight
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.problems.jobarray.problem import JobArray


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

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from optsched.arraypipe import ArrayTrainer, Job, RunConfig, random_schedule
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> trainer = ArrayTrainer(model, [(torch.ones(2), torch.zeros(2))] * 8, loss=nn.MSELoss())
    >>> job, quiet = Job(0, 8, torch.optim.SGD), RunConfig(check=0, verbose=False)
    >>> result = trainer.fit([job], 3, schedule=random_schedule([1], 2), config=quiet)
    >>> [len(losses) for losses in result.losses], result.trace.n_operations
    ([3], 12)
    """

    jobs: tuple[Job, ...]
    losses: tuple[tuple[float, ...], ...]
    log: RunLog
    whole: tuple[tuple[nn.Module, Trained], ...] | None = None
    local: tuple[tuple[JobRun, Sequence[int]], ...] = ()

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
        from optsched.arraypipe.distributed.ranks import gather

        return replace(self, whole=tuple(gather(self.local)), local=())

    def _whole(self, name: str) -> tuple[tuple[nn.Module, Trained], ...]:
        if self.whole is None:
            raise InputError(
                f"{name}: every rank has only its stages; call result.gather() on all ranks, or "
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

    def to_pandas(self) -> pandas.DataFrame:
        """Make a data frame of the losses: columns ``job``, ``iteration`` and ``loss``."""
        from optsched.plots.notebook import frame

        rows = [(j, i, x) for j, row in enumerate(self.losses) for i, x in enumerate(row)]
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
        return frame(dict(zip(("job", "iteration", "loss"), columns, strict=True)))

    def _repr_html_(self) -> str:
        from optsched.plots.notebook import training_view

        return training_view(self)

    def __repr__(self) -> str:
        done = sum(map(len, self.losses))
        return f"<RunResult of {len(self.jobs)} jobs: {done} iterations, {self.log!r}>"


class ArrayTrainer:
    """Train a job array in the order of a schedule.

    Parameters
    ----------
    model
        A function or class that makes the unsplit model, called with ``**job.model`` after
        ``torch.manual_seed(job.seed)``; a pair ``(class, config)``; or an `nn.Module`, of which
        every job gets a copy (frozen parameters are shared).
    data
        A dataset with indices: shuffled by the seed of every job, in batches of its size, epoch
        after epoch. A DataLoader: its dataset, collate function and workers, in its order if it
        does not shuffle. Or ``data(job, start)``, an iterator of batches that begins with iteration
        `start` and depends on nothing else (not on the global random state).
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
    >>> import torch
    >>> from torch import nn
    >>> from optsched.arraypipe import ArrayTrainer, Job
    >>> layers = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> rows = [(torch.ones(4), torch.ones(2))] * 16
    >>> trainer = ArrayTrainer(layers, rows, stages=2, loss=nn.MSELoss())
    >>> trainer = trainer.with_jobs([Job(0, 8, torch.optim.SGD), Job(1, 8, torch.optim.Adam)])
    >>> trainer.titles, trainer.cuts, trainer.check_exact(steps=2)
    (['job0', 'job1'], ('1',), [])
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

    def __repr__(self) -> str:
        return f"<ArrayTrainer: {len(self.jobs)} jobs, stages {self.given_stages!r:.60}>"

    @property
    def titles(self) -> list[str]:
        """Names of the jobs; ``job0``, ... by position without a name."""
        return [job.name or f"job{k}" for k, job in enumerate(self.jobs)]

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
        _check_jobs(jobs)
        made = copy(self)
        made.jobs, made.config = tuple(jobs), config or self.config
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
        from optsched.arraypipe.fit import check, fit, on_all_ranks

        def prepared() -> tuple[ArrayTrainer, Request, ExecutionPlan | None]:
            made = self.with_jobs(jobs, config)
            for job, title in zip(made.jobs, made.titles, strict=True):
                job.life.begin(title)
            request = Request(steps, checkpoint, resume, callbacks, evaluate)
            plan = None if schedule is None else made.plan(schedule)
            check(made, request, plan)
            return made, request, plan

        made, request, plan = on_all_ranks(prepared, config or self.config)
        result = fit(made, request, plan)
        self.jobs, self.cut, self.ties = result.jobs, made.cut, made.ties
        self.compared = made.compared
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

        _check_jobs(self.jobs)
        with global_state_kept():
            device = device_of(self.config.device)
            return measure(self, device, sizes=sizes, split_backward=split_backward)

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

    def plan(self, schedule: Schedule | ExecutionPlan) -> ExecutionPlan:
        """Compile a schedule and check that it is one of these jobs.

        Jobs beyond its slots wait for one that fits them.
        """
        plan: Any = schedule
        if isinstance(plan, Schedule):
            n_jobs = int(plan.job.max()) + 1 if plan.n_operations else 0
            together = [j for j, job in enumerate(self.jobs[:n_jobs]) if waits_for_all(job)]
            plan = compile_plan(plan, together=together)
        if not isinstance(plan, ExecutionPlan):
            raise InputError(
                f"schedule: expected a Schedule or a plan, got {schedule!r}; read a file by "
                f"Schedule.read(path)"
            )
        if plan.n_jobs > len(self.jobs):
            raise InputError(f"the schedule has {plan.n_jobs} jobs, the trainer {len(self.jobs)}")
        if plan.n_stages != self.n_stages:
            raise InputError(f"the schedule has {plan.n_stages} stages, the model {self.n_stages}")
        for j, job in enumerate(self.jobs):
            slots = [j] if j < plan.n_jobs else range(plan.n_jobs)
            found = [misfit(job, plan, slot) for slot in slots]
            if all(found):
                waits = "" if j < plan.n_jobs else "no slot fits it: "
                raise InputError(f"job {self.titles[j]}: {waits}{found[0]}")
        return plan

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
        from optsched.arraypipe.training_run import train

        _check_jobs(self.jobs)
        counts = [job.microbatches for job in self.jobs]
        together = [j for j, job in enumerate(self.jobs) if waits_for_all(job)]
        schedule = random_schedule(
            counts, self.n_stages, update=together, together=together, seed=seed
        )
        inline = copy(self)
        inline.config = RunConfig(
            "inline", self.config.device, self.config.memory, on_error="raise", check=0
        )
        result = train(inline, inline.plan(schedule), Request(steps))
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


def _check_jobs(jobs: Sequence[Job]) -> None:
    """Refuse an empty list, one with something else than jobs, and names that occur twice."""
    if not isinstance(jobs, Sequence):
        raise InputError(f"jobs: expected a list, got {jobs!r:.60}")
    if not jobs:
        raise InputError("jobs: expected at least one")
    titles: set[str] = set()
    for k, job in enumerate(jobs):
        if not isinstance(job, Job):
            raise InputError(f"jobs[{k}]: expected a Job, got {job!r:.60}")
        title = job.name or f"job{k}"
        if title in titles:
            raise InputError(f"jobs[{k}].name: {title!r} is also the name of another job")
        titles.add(title)
