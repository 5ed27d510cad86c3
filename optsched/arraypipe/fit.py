"""`ArrayTrainer.fit`: validate, measure and solve, compare with training alone, train."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch

from optsched.arraypipe.callbacks import Progress
from optsched.arraypipe.checkpoint.states import digest
from optsched.arraypipe.evaluation import measure_of
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.model.lazy import return_memory
from optsched.arraypipe.options import RunConfig
from optsched.arraypipe.plan.plan import ExecutionPlan, compile_plan
from optsched.arraypipe.repeats import cause
from optsched.arraypipe.report import predict
from optsched.arraypipe.rescheduling import check_problem, fits_slot
from optsched.arraypipe.runtime.environment import device_of, global_state_kept
from optsched.arraypipe.runtime.stages import fresh_model, waits_for_all
from optsched.arraypipe.runtime.worker import unbound
from optsched.arraypipe.shallow import shallow
from optsched.arraypipe.train_alone import NotIdentical
from optsched.arraypipe.training_run import folder_of, train
from optsched.errors import InputError, InternalError
from optsched.io.text import NANOSECONDS, duration
from optsched.model.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.options import Request
    from optsched.arraypipe.profile import Profile
    from optsched.arraypipe.trainer import ArrayTrainer
    from optsched.arraypipe.training_run import RunResult
    from optsched.problems.jobarray.problem import JobArray

Made = TypeVar("Made")
_GOOD: Final = 0.02  # gap to the bound with which the solver stops
_SHARE: Final = 0.01  # of the estimated time of training that the solver may use
_LEAST_S: Final = 1.0  # time limit of the solver
_MOST_S: Final = 30.0
_PATIENCE_S: Final = 1800.0  # time limit of the measurements, for ranks that wait


def fit(trainer: ArrayTrainer, given: ExecutionPlan | None, request: Request) -> RunResult:
    """Train the jobs of a trainer by a given plan, or by one that is solved for."""
    say = partial(_say, request.is_first and request.config.verbose)
    if not request.config.on_ranks:
        found, problem = _prepared(trainer, given, request, say)
    else:
        import torch.distributed as dist

        from optsched.arraypipe.distributed.group import agree

        if request.config.check:
            _check_same_data(trainer)
        count = dist.get_world_size() // request.config.replicas
        profile = None if given is not None else _measured(trainer, count, say)
        prepare = partial(_prepared, trainer, given, request, say, count, profile)
        found, problem = agree(prepare, _PATIENCE_S, of_first=True)
    plan = given or checked_plan(trainer, cast("Schedule", found))
    if given is not None:
        predicted = predict(plan)
        say(_predicted(predicted.period_ns, predicted.bound_ns))
    if request.config.verbose and request.is_first:
        progress = Progress(predict(plan).period_ns)
        request = replace(request, callbacks=(progress, *request.callbacks))
    gc.collect()  # what measuring and checking have used
    return_memory()
    return train(trainer, plan, request, problem)


def on_all_ranks(make: Callable[[], Made], config: RunConfig) -> Made:
    """Return what it makes; all ranks raise if it raises on one of them."""
    if not isinstance(config, RunConfig) or not config.on_ranks:
        return make()
    from optsched.arraypipe.distributed.group import agree

    return agree(make, config.timeout)


def _say(enabled: bool, line: str) -> None:
    if enabled:
        print(line, file=sys.stderr, flush=True)


def validated(
    trainer: ArrayTrainer, schedule: Schedule | ExecutionPlan | None, request: Request
) -> ExecutionPlan | None:
    """Refuse arguments that do not fit; return the plan of a given schedule."""
    config = request.config
    if config.replicas > 1 and not config.on_ranks:
        raise InputError(f"replicas: needs ranks, start with torchrun; got {config.replicas}")
    if request.evaluate is not None:
        measure_of(request.evaluate, trainer.loss, trainer.weight)
    if schedule is None:
        if not isinstance(config.replan, bool):
            raise InputError("replan: expected True or False without a schedule")
        return None
    plan = checked_plan(trainer, schedule)
    if config.on_ranks:
        from optsched.arraypipe.distributed.ranks import check_size

        check_size(len(plan.devices), config.replicas)
    if config.replan is True:
        raise InputError("replan: expected the JobArray that the schedule was made for")
    if config.replan is not False:
        check_problem(config.replan, plan)
    return plan


def checked_plan(trainer: ArrayTrainer, schedule: Schedule | ExecutionPlan) -> ExecutionPlan:
    """Compile a schedule; refuse one that is not of the jobs of a trainer."""
    jobs, titles = trainer.jobs, trainer.titles
    if isinstance(schedule, ExecutionPlan):
        plan = schedule
    elif isinstance(schedule, Schedule):
        n_jobs = int(schedule.job.max()) + 1 if schedule.n_operations else 0
        together = [j for j, job in enumerate(jobs[:n_jobs]) if waits_for_all(job)]
        plan = compile_plan(schedule, together=together)
    else:
        raise InputError(
            f"schedule: expected a Schedule or a plan, got {schedule!r}; read a file by "
            f"Schedule.read(path)"
        )
    n_slots, n_stages = plan.n_jobs, trainer.n_stages
    if n_slots > len(jobs):
        raise InputError(f"the schedule has {n_slots} jobs, the trainer {len(jobs)}")
    if plan.n_stages != n_stages:
        raise InputError(f"the schedule has {plan.n_stages} stages, the model {n_stages}")
    for j, (job, count) in enumerate(zip(jobs, plan.microbatches, strict=False)):
        if count != job.microbatches:
            raise InputError(
                f"job {j}: the schedule has {count} micro-batches, the job {job.microbatches}"
            )
        if waits_for_all(job) and j not in plan.together:
            raise InputError(
                f"job {titles[j]} clips its gradients or adapts its learning rate to the loss: "
                f"compile the plan with together=[{j}], or by trainer.plan()"
            )
    for job, title in zip(jobs[n_slots:], titles[n_slots:], strict=True):
        if not any(fits_slot(job, plan, slot) for slot in range(n_slots)):
            raise InputError(
                f"the schedule has {n_slots} jobs; job {title} waits for a slot with "
                f"{job.microbatches} micro-batches, and there is none"
            )
    return plan


def _check_same_data(trainer: ArrayTrainer) -> None:
    """Refuse ranks whose data differ: every stage that needs a batch draws it (collective)."""
    from optsched.arraypipe.distributed.group import meeting

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
                    f"({found}, not {expected}); every rank has to make the same data, so seed "
                    f"what is random"
                )


def _prepared(
    trainer: ArrayTrainer,
    plan: ExecutionPlan | None,
    request: Request,
    say: Callable[[str], object],
    devices: int | None = None,
    profile: Profile | None = None,
) -> tuple[Schedule | None, JobArray | None]:
    """Validate what needs the disk and models; solve without a plan; compare with training alone.

    Returns the schedule, None with a plan, and the problem for re-planning.
    """
    config = request.config
    _check_folder(trainer, request)
    if config.check and request.evaluate is not None:
        _try_evaluation(trainer, request)
    schedule, problem = None, None if isinstance(config.replan, bool) else config.replan
    if plan is None:
        n_stages = trainer.n_stages
        schedule, solved = _solved(trainer, devices or n_stages, request.steps, say, profile)
        problem = solved if config.replan else None
    if config.check:
        _check_exact(trainer, len(trainer.jobs) if plan is None else plan.n_jobs, request, say)
    return schedule, problem


def _check_folder(trainer: ArrayTrainer, request: Request) -> None:
    """Refuse checkpoints of another run, or beyond the last iteration."""
    folder = folder_of(trainer, request)
    if folder is not None and folder.folder.exists() and not folder.folder.is_dir():
        raise InputError(f"checkpoint: {folder.folder} is a file; choose a folder")
    for title in trainer.titles if folder is not None else ():
        assert folder is not None
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
            float(measure(trainer.jobs[0], model, host))
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"evaluate: {type(error).__name__}: {error}") from error


def _measured(trainer: ArrayTrainer, ranks: int, say: Callable[[str], object]) -> Profile:
    """Measure every stage on its rank (collective); small models in less than a second."""
    from optsched.arraypipe.distributed.group import meeting
    from optsched.arraypipe.measure import measure

    n_stages = trainer.n_stages
    _check_devices(ranks, n_stages)
    say(f"measuring {n_stages} stages of {len(trainer.jobs)} jobs, each on its rank")
    with meeting(_PATIENCE_S) as group, global_state_kept():
        local = [stage for stage in range(n_stages) if stage * ranks // n_stages == group.rank]
        device = device_of(trainer.config.device)
        return measure(trainer, device, local=local, group=group)


def _check_devices(devices: int, n_stages: int) -> None:
    if not 1 <= devices <= n_stages:
        raise InputError(
            f"devices: the model has {n_stages} stages, which cannot fill {devices} devices"
        )


def _solved(
    trainer: ArrayTrainer,
    devices: int,
    steps: int,
    say: Callable[[str], object],
    profile: Profile | None = None,
) -> tuple[Schedule, JobArray]:
    """Measure the jobs; solve for a rolling schedule on so many devices; return its problem too."""
    from optsched.solving.solve import solve
    from optsched.solving.stop import Gap

    n_stages = trainer.n_stages
    _check_devices(devices, n_stages)
    if profile is None:
        say(f"measuring {n_stages} stages of {len(trainer.jobs)} jobs")
        profile = trainer.profile()
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
    trainer: ArrayTrainer, n_slots: int, request: Request, say: Callable[[str], object]
) -> None:
    """Refuse layers and data with which an array does not reach the bits of training alone.

    On ranks, and where memory does not suffice, those of a model with one block per stage.
    """
    steps, config = min(request.config.check, request.steps), request.config
    if config.on_ranks:
        config = replace(config, backend="inline", memory=None)
    small = shallow(trainer)
    candidates = [small or trainer] if request.config.on_ranks else [trainer, small or trainer]
    for checked in candidates:
        note = " of a model with one block per stage" if checked is small else ""
        jobs = trainer.jobs[:n_slots]
        if checked is small:  # which has other names than the weights in a file
            jobs = tuple(replace(job, init=None) for job in jobs)
        checked = checked.with_jobs(jobs, config)
        try:
            found = checked.check_exact(steps)
        except (JobFailed, torch.OutOfMemoryError) as error:
            failure = str(unbound(error))
            if not _lacks_memory(error):
                break
            continue
        if found:
            raise NotIdentical(
                f"an array does not reach the bits of training alone in {steps} iterations, and "
                f"RunConfig(check=0) would train it all the same; {len(found)} differences, the "
                f"first: {found[0]}; {_cause(checked, steps)}"
            )
        say(f"checked: the bits of training alone, over {steps} iterations{note}")
        return
    say(f"not checked against training alone: {failure}".splitlines()[0])


def _lacks_memory(error: Exception) -> bool:
    cause = error.__cause__ or error
    return isinstance(cause, torch.OutOfMemoryError) or "can't allocate memory" in str(cause)


def _cause(trainer: ArrayTrainer, steps: int) -> str:
    """Return what of the jobs gives other values when called again, as a sentence."""
    device = device_of(trainer.config.device)
    for title, job in zip(trainer.titles, trainer.jobs, strict=True):
        try:
            found = cause(trainer, job, steps, device)
        except Exception as error:  # it has run before, so that it has a hidden state
            found = f"called again it raises {type(error).__name__}: {error}"
        if found:
            return f"job {title}: {found}"
    return "data, model, forward and loss repeat their values: look at the optimizer"
