"""`ArrayTrainer.fit`: measure and solve, compare with training alone, train."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar, cast

import numpy as np
import torch

from optsched.arraypipe.callbacks import Progress
from optsched.arraypipe.checkpoint.states import digest
from optsched.arraypipe.events import measure_of
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.report import predict
from optsched.arraypipe.runtime.environment import device_of, global_state_kept
from optsched.arraypipe.runtime.stages import fresh_model
from optsched.arraypipe.runtime.worker import unbound
from optsched.arraypipe.shallow import shallow
from optsched.arraypipe.train_alone import NotIdentical
from optsched.arraypipe.training_run import folder_of, train
from optsched.errors import InputError, InternalError, OptschedError
from optsched.io.text import NANOSECONDS, duration
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.options import Request, RunConfig
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.profile import Profile
    from optsched.arraypipe.trainer import ArrayTrainer, RunResult
    from optsched.model.schedule import Schedule

Made = TypeVar("Made")
_GOOD: Final = 0.02  # gap to the bound with which the solver stops
_SHARE: Final = 0.01  # of the estimated time of training that the solver may use
_LEAST_S: Final = 1.0  # time limit of the solver
_MOST_S: Final = 30.0
_PATIENCE_S: Final = 1800.0  # time limit of the measurements, for ranks that wait


def fit(trainer: ArrayTrainer, request: Request, given: ExecutionPlan | None) -> RunResult:
    """Train the jobs of a trainer by a given plan, or by one that is solved for."""
    config = trainer.config

    def say(line: str) -> None:
        if config.verbose and config.is_first:
            print(line, file=sys.stderr, flush=True)

    profile = None if given is not None else _measured(trainer, say)

    def prepared() -> tuple[Schedule | None, JobArray | None]:
        _check_folder(trainer, request)
        if config.check and request.evaluate is not None:
            _try_evaluation(trainer, request)
        schedule, problem = None, None if isinstance(config.replan, bool) else config.replan
        n_slots = len(trainer.jobs) if given is None else given.n_jobs
        if profile is not None:
            schedule, solved = _solved(trainer, profile, request.steps, say)
            problem = solved if config.replan else None
        if config.check:
            _check_exact(trainer, n_slots, min(config.check, request.steps), say)
        return schedule, problem

    schedule, problem = on_all_ranks(prepared, config, of_first=True)
    plan = trainer.plan(cast("Schedule", schedule)) if given is None else given
    predicted = predict(plan)
    if given is not None:
        say(_predicted(predicted.period_ns, predicted.bound_ns))
    expected_ns = float(predicted.period_ns)
    if not config.on_ranks and len(predicted.load_ns) > 1:
        expected_ns = float(sum(predicted.load_ns))
        say(f"one process runs all stages in turn: {duration(expected_ns)} a cycle")
    if config.verbose and config.is_first:
        callbacks = (Progress(expected_ns), *request.callbacks)
        request = replace(request, callbacks=callbacks)
    return train(trainer, plan, request, problem)


def on_all_ranks(make: Callable[[], Made], config: RunConfig, of_first: bool = False) -> Made:
    """Return what it makes, or the first rank; all ranks raise if it raises on one of them."""
    if not getattr(config, "on_ranks", False):
        return make()
    from optsched.arraypipe.distributed.group import agree

    return agree(make, _PATIENCE_S if of_first else config.timeout, of_first)


def check(trainer: ArrayTrainer, request: Request, plan: ExecutionPlan | None) -> None:
    """Refuse arguments that do not fit each other."""
    config = trainer.config
    if config.replicas > 1 and not config.on_ranks:
        raise InputError(f"replicas: needs ranks, start with torchrun; got {config.replicas}")
    if request.evaluate is not None:
        measure_of(request.evaluate, trainer.loss, trainer.weight)
        if config.on_ranks and request.checkpoint is None:
            raise InputError(
                "evaluate: a rank has only its stages of the model, so that checkpoints are "
                "evaluated; expected checkpoint=..."
            )
    if plan is None:
        if not isinstance(config.replan, bool):
            raise InputError("replan: expected True or False without a schedule")
        return
    if config.on_ranks:
        from optsched.arraypipe.distributed.ranks import check_size

        check_size(len(plan.devices), config.replicas)
    if config.replan is False:
        return
    if not isinstance(config.replan, JobArray):
        raise InputError(
            f"replan: expected the JobArray that the schedule was made for, got "
            f"{config.replan!r:.60}"
        )
    try:
        config.replan.answer(plan.schedule)
    except OptschedError as error:
        raise InputError(f"replan: the schedule is not one of this JobArray ({error})") from error


def _check_folder(trainer: ArrayTrainer, request: Request) -> None:
    """Refuse checkpoints of another run, or beyond the last iteration."""
    folder = folder_of(trainer, request)
    if folder is None:
        return
    if folder.folder.exists() and not folder.folder.is_dir():
        raise InputError(f"checkpoint: {folder.folder} is a file; choose a folder")
    for title in trainer.titles:
        if not request.resume:
            folder.check_unused(title)
        elif (done := folder.latest(title)) > request.steps:
            raise InputError(
                f"steps: job {title} has already done {done} iterations, got {request.steps}"
            )


def _try_evaluation(trainer: ArrayTrainer, request: Request) -> None:
    """Refuse before the training what would raise after it."""
    measure, host = measure_of(request.evaluate, trainer.loss, trainer.weight), torch.device("cpu")
    with global_state_kept(), torch.no_grad():
        model = fresh_model(trainer.build_model, trainer.jobs[0]).eval()
        try:
            measure(trainer.jobs[0], model, host)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"evaluate: {type(error).__name__}: {error}") from error


def _measured(trainer: ArrayTrainer, say: Callable[[str], object]) -> Profile:
    """Measure all stages; on ranks each on its rank (collective)."""
    n_stages, n_jobs, config = trainer.n_stages, len(trainer.jobs), trainer.config
    if not config.on_ranks:
        say(f"measuring {n_stages} stages of {n_jobs} jobs")
        return trainer.profile()
    from optsched.arraypipe.distributed.group import meeting
    from optsched.arraypipe.measure import measure

    say(f"measuring {n_stages} stages of {n_jobs} jobs, each on its rank")
    with meeting(_PATIENCE_S) as group, global_state_kept():
        ranks = group.size // config.replicas
        if not 1 <= ranks <= n_stages:
            raise InputError(
                f"devices: the model has {n_stages} stages, which cannot fill {ranks} devices"
            )
        local = [stage for stage in range(n_stages) if stage * ranks // n_stages == group.rank]
        return measure(trainer, device_of(config.device), local=local, group=group)


def _solved(
    trainer: ArrayTrainer, profile: Profile, steps: int, say: Callable[[str], object]
) -> tuple[Schedule, JobArray]:
    """Solve for a rolling schedule of the measured jobs; return its problem too."""
    import torch.distributed as dist

    from optsched.solving.solve import solve
    from optsched.solving.stop import Gap

    n_stages = devices = trainer.n_stages
    if trainer.config.on_ranks:
        devices = dist.get_world_size() // trainer.config.replicas
    place = [stage * devices // n_stages for stage in range(n_stages)]
    kind = "gpu" if profile.device.kind == "cuda" else "cpu"
    names = tuple(f"{kind}{d}" for d in range(devices))
    problem = trainer.problem(profile, place=place, devices=names)
    unit_ns = NANOSECONDS[problem.time_unit]
    training_s = problem.lower_bound() * unit_ns / 1e9 * steps
    limit_s = min(_MOST_S, max(_LEAST_S, _SHARE * training_s))
    say(f"solving for the order of {problem.n_jobs} jobs, up to {limit_s:.3g} s")
    result = solve(problem, time_limit=limit_s, stop=Gap(_GOOD))
    if result.schedule is None:
        raise InternalError("the solver found no schedule")
    bound = result.lower_bound or problem.lower_bound()
    say(_predicted(problem.evaluate(result.schedule) * unit_ns, bound * unit_ns))
    return result.schedule, problem


def _predicted(period_ns: float, bound_ns: float) -> str:
    above = f"{period_ns / max(1, bound_ns) - 1:.1%} above the bound of {duration(bound_ns)}"
    return f"predicted: {duration(period_ns)} a cycle, {above}"


def _check_exact(
    trainer: ArrayTrainer, n_slots: int, steps: int, say: Callable[[str], object]
) -> None:
    """Refuse layers and data with which an array does not reach the bits of training alone."""
    config = trainer.config
    if config.on_ranks:
        config = replace(config, backend="inline", memory=None)
    small, failure = shallow(trainer), ""
    candidates = [small or trainer] if trainer.config.on_ranks else [trainer, small or trainer]
    for checked in candidates:
        jobs, note = trainer.jobs[:n_slots], ""
        if checked is small:  # which has other names than the weights in a file
            jobs = tuple(replace(job, init=None) for job in jobs)
            note = " of a model with one block per stage"
        checked = checked.with_jobs(jobs, config)
        try:
            found = checked.check_exact(steps)
        except (JobFailed, torch.OutOfMemoryError) as error:
            failure, cause = str(unbound(error)), error.__cause__ or error
            if isinstance(cause, torch.OutOfMemoryError) or "allocate memory" in str(cause):
                continue
            break
        if found:
            raise NotIdentical(
                f"an array does not reach the bits of training alone in {steps} iterations, and "
                f"RunConfig(check=0) would train it all the same; {len(found)} differences, the "
                f"first: {found[0]}; {_cause(checked)}"
            )
        say(f"checked: the bits of training alone, over {steps} iterations{note}")
        return
    say(f"not checked against training alone: {failure}".splitlines()[0])


def _cause(trainer: ArrayTrainer) -> str:
    """Return where to look when training alone gives other bits: first at data."""
    with global_state_kept():
        for job, title in zip(trainer.jobs, trainer.titles, strict=True):
            batches = []
            for seed in range(2):
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)  # noqa: NPY002
                batches.append(digest(next(iter(trainer.data(job, 0)), None)))
            if batches[0] != batches[1]:
                return (
                    f"the data of job {title} are others when they are read again: they may depend "
                    f"on the job and `start` alone, not on global random numbers or a generator "
                    f"that goes on"
                )
    return (
        "look for what build_model, a layer, the loss or the optimizer keeps from call to call (a "
        "counter, a generator), or draws from `random` or numpy, and for an optimizer that looks "
        "across tensors (a common norm), of which each stage has one for its own"
    )
