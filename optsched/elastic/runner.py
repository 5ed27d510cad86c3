"""Train elastic jobs under a policy, and simulate the same jobs for comparison."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import signal
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from optsched.cluster.results.run import Run
from optsched.cluster.simulate import chosen_policy, policy_options
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.world.log import Log
from optsched.elastic.door import OpenPool
from optsched.elastic.job import TrainingJob, modules_of, pickled
from optsched.elastic.live import ENDED, FAILED, LiveJob, PassTimes
from optsched.elastic.scheduler import Scheduler, Stay
from optsched.elastic.workers import Processes
from optsched.errors import InputError, MissingExtra
from optsched.io.files import write_atomic
from optsched.io.strict_json import decode, placed, read_json
from optsched.io.values import format_value, integer, one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from os import PathLike

    from optsched.cluster.world.policy import Policy

STATE: Final = "run.json"


class Status(NamedTuple):
    """Report the jobs at a time, in seconds since the start; argument of `on_progress`.

    Examples
    --------
    >>> optsched.elastic.Status(time=1.5, jobs=[]).time
    1.5
    """

    time: float
    jobs: list[LiveJob]


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a run that is resumed, beside the checkpoints."""

    jobs: dict[str, tuple[int, int, int]]  # first start, end and preemptions
    clock: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    stays: list[Stay] = []
    times: dict[str, dict[int, list[int]]] = {}
    starts: list[int] = []
    format: Literal["optsched.elastic-run/1"] = "optsched.elastic-run/1"


@dataclass(frozen=True, eq=False, repr=False)
class LiveRun(Run):
    """Hold the result of `run`, a `Run` with metrics, history and plots; times in ms.

    Examples
    --------
    >>> from optsched import elastic
    >>> result = elastic.run(elastic.read_jobs("jobs.toml"), 2)  # doctest: +SKIP
    >>> result.quotas, result.failed  # doctest: +SKIP
    ({'small': [1, 1, 2]}, {})
    """

    live: tuple[LiveJob, ...]
    times: PassTimes
    complete: bool  # False: interrupted

    @property
    def records(self) -> dict[str, list[dict[str, Any]]]:
        """Records of the passes by job, see `training.Member.train`."""
        return {job.spec.name: job.log for job in self.live}

    @property
    def quotas(self) -> dict[str, list[int]]:
        """Workers of every pass, by job."""
        return {name: [len(r["samples"]) for r in log] for name, log in self.records.items()}

    @property
    def failed(self) -> dict[str, str]:
        """Reasons by failed job."""
        return {job.spec.name: job.reason for job in self.live if job.phase == FAILED}


def run(
    jobs: Iterable[TrainingJob],
    slots: int | OpenPool,
    policy: Policy | str = "time_to_target",
    *,
    preempt: Literal["pass", "anytime"] = "pass",
    devices: Sequence[str] | None = None,
    folder: str | PathLike[str] | None = None,
    resume: bool = False,
    on_progress: Callable[[Status], object] | None = None,
) -> LiveRun:
    """Train jobs on a shared pool of workers; a policy decides at the end of every pass.

    Jobs continue from their checkpoint if their workers change. A worker that dies costs
    the open pass of its job; a job whose code raises fails alone. At SIGTERM or Ctrl-C, and if
    `on_progress` raises KeyboardInterrupt, jobs stop after their present step; with a `folder` they
    write a checkpoint first, and a second signal ends the run without it.

    Parameters
    ----------
    slots, devices
        Number of workers: processes of one thread each, or GPUs, or an `OpenPool` that workers of
        other hosts join; and the device of each of this host (default: the GPUs if there are so
        many, otherwise the CPU).
    policy
        A policy of `optsched.cluster` or its name. It sees estimates (`TrainingJob`), then measured
        times; as curve of a job the uncertainty (26) after every pass, or, if it has an attribute
        ``signal = "metric"``, 1 - metric.
    preempt
        When a policy may take all workers from a preemptible job: at the ends of its passes, or at
        any time: then it stops after its step and later continues from there.
    folder
        For the checkpoints, ``<job>/checkpoint.pt``, and the state of the run; None: nothing is
        kept. `resume` continues the run in it, and its clock; jobs that had failed are tried again.
    on_progress
        Called with the state of all jobs after every change.

    Raises
    ------
    InputError
        A wrong argument, a job that cannot run, a folder with another run in it; `PolicyError` and
        `Stalled` as in `optsched.cluster.simulate`; `MissingExtra` without torch.

    Examples
    --------
    >>> from optsched.elastic import Call, TrainingJob, run
    >>> job = TrainingJob(name="a", model=Call("mlp"), data=Call("digits"), optimizer=Call("adam"))
    >>> run([job], slots=1, policy="fifo").quotas  # doctest: +SKIP
    {'a': [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("elastic training", "torch")
    opened = slots if isinstance(slots, OpenPool) else None
    slots = integer("slots", slots if opened is None else opened.slots, 1, 4096)
    remote = 0 if opened is None else integer("remote", opened.remote, 1, slots)
    one_of("preempt", preempt, ("pass", "anytime"))
    places, made = devices_of(devices, slots - remote) + [""] * remote, _jobs(jobs, slots)
    chosen = chosen_policy(policy)
    if folder is None and (resume or remote):
        what = "resume: name the folder" if resume else "remote: name a folder that all hosts see,"
        raise InputError(f"{what} of the run")
    with ExitStack() as stack:
        if (kept := folder) is None:
            kept = stack.enter_context(tempfile.TemporaryDirectory(prefix="optsched-"))
        place = Path(kept).absolute() if remote else Path(kept)
        _lock(place, resume, stack)
        saved = _prepared(place, made, slots, resume)
        modules = {module for job in made for module in modules_of(job.spec)}
        pool = Processes(places, modules, saved.clock, opened, str(place))
        stack.callback(pool.close)

        def report(scheduler: Scheduler) -> None:
            if folder is not None:
                _save(place, scheduler)
            if on_progress is not None:
                jobs = [dataclasses.replace(job, log=[*job.log]) for job in scheduler.jobs]
                on_progress(Status(scheduler.now / 1e3, jobs))

        scheduler = Scheduler(
            made, pool, chosen, str(place), PassTimes(saved.times, saved.starts), saved.stays,
            report, preempt == "anytime",
        )  # fmt: skip
        scheduler.now = saved.clock
        report(scheduler)  # before workers are started, which takes seconds
        stack.enter_context(_interrupts(pool))
        if not (complete := _trained(scheduler, pool)):
            scheduler.stop(keep=folder is not None)
        with suppress(KeyboardInterrupt):
            report(scheduler)
        return _result(scheduler, complete)


def _trained(scheduler: Scheduler, pool: Processes) -> bool:
    """Start the workers and train all jobs; return False after an interrupt."""
    with suppress(KeyboardInterrupt):
        if any(job.phase != ENDED for job in scheduler.jobs):
            pool.start()
            pool.begin()
        return scheduler.run()
    return False


@contextmanager
def _interrupts(pool: Processes) -> Iterator[None]:
    """Interrupt the pool at SIGINT and SIGTERM; a second signal raises KeyboardInterrupt."""

    def handle(number: int, frame: object) -> None:
        if pool.interrupted:
            raise KeyboardInterrupt
        pool.interrupt()

    before = dict[int, Any]()
    with suppress(ValueError):  # not in the main thread, which alone handles signals
        before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def devices_of(devices: Sequence[str] | None, slots: int) -> list[str]:
    """The device of every slot."""
    gpus = 0
    if Path("/dev/nvidiactl").exists():  # else torch need not be imported
        import torch

        gpus = torch.cuda.device_count()
    if devices is None:
        return [f"cuda:{k}" for k in range(slots)] if gpus >= slots else ["cpu"] * slots
    if not isinstance(devices, (list, tuple)) or len(devices) != slots:
        raise InputError(f"devices: expected {slots}, one a slot, got {format_value(devices)}")
    known = ["cpu", *(f"cuda:{k}" for k in range(gpus))]
    for device in {*devices} - {*known}:
        raise InputError(f"devices: expected {' or '.join(known)}, got {format_value(device)}")
    return list(devices)


def _jobs(jobs: Iterable[TrainingJob], slots: int) -> list[LiveJob]:
    """Check the jobs; return them by submit time, with the sizes up to the number of workers."""
    if isinstance(jobs, (str, bytes)) or not hasattr(jobs, "__iter__"):
        raise InputError(f"jobs: expected a list of TrainingJob, got {format_value(jobs)}")
    specs = list(jobs)
    for i, spec in enumerate(specs):
        if not isinstance(spec, TrainingJob):
            raise InputError(f"jobs[{i}]: expected a TrainingJob, got {format_value(spec)}")
        name = format_value(spec.name)
        if spec.name in {STATE, *(other.name for other in specs[:i])}:
            raise InputError(f"jobs[{i}].name: {name} is there twice, or reserved")
        if (least := spec.sizes[0]) > slots:
            raise InputError(f"job {name}: needs {least} workers, there are {slots}")
    if not specs:
        raise InputError("jobs: empty; name at least one")
    for i, spec in enumerate(specs := sorted(specs, key=lambda spec: spec.submit)):
        specs[i] = dataclasses.replace(spec, sizes=tuple(g for g in spec.sizes if g <= slots))
    return [LiveJob(s, i, pickled(s), round(s.submit * 1e3)) for i, s in enumerate(specs)]


def _prepared(place: Path, jobs: Sequence[LiveJob], slots: int, resume: bool) -> _Saved:
    """Make the folders; with `resume` set the jobs to their state in them."""
    state, names = place / STATE, [job.spec.name for job in jobs]
    files = [place / name / "checkpoint.pt" for name in names]
    if resume:
        with placed("is no state of a run: "):
            saved = read_json(state, lambda tree, name: decode(tree, _Saved, name))
        if (found := [*saved.jobs]) != names:
            got, expected = format_value(found), format_value(names)
            raise InputError(f"{state}: is of jobs {got}, expected {expected}")
        free = {*range(slots)}
        if any(s.job >= len(jobs) or not {*s.slots} <= free or not s.slots for s in saved.stays):
            raise InputError(f"slots: the run in {place} had more, or jobs that there are not")
    elif any(file.exists() for file in (state, *files)):
        raise InputError(f"folder: {place} has a run in it; resume it, or name another")
    for file in files:
        try:
            file.parent.mkdir(exist_ok=True)
        except OSError as error:  # FileExistsError: it is a file
            raise InputError(f"folder: {file.parent} cannot be used ({error.strerror})") from None
    if not resume:
        return _Saved({})
    for job, file in zip(jobs, files, strict=True):
        job.first_start, job.finished, job.preemptions = saved.jobs[job.spec.name]
        if file.exists():
            from optsched.elastic.checkpoint import read_checkpoint

            made = read_checkpoint(file, job.spec.name)
            job.log, job.part = made["log"], (made["position"] or {"part": 0.0})["part"]
        if job.done:
            job.phase = ENDED
            job.finished = saved.clock if job.finished < 0 else job.finished
        else:  # also one that had failed, or gets more passes than before
            job.finished = -1
        mine = [stay for stay in saved.stays if stay.job == job.number]
        job.starts = len(mine)
        job.attained = sum(len(stay.slots) * (stay.end - stay.start) for stay in mine)
    return saved


def _lock(place: Path, resume: bool, stack: ExitStack) -> None:
    """Lock the folder against another run."""
    try:
        if not resume:
            place.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((place / ".lock").open("w"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "a run goes on in it" if isinstance(error, BlockingIOError) else error.strerror
        raise InputError(f"folder: {place} cannot be used ({why})") from None


def _save(place: Path, scheduler: Scheduler) -> None:
    """Write the state of the run, open stays as if they ended now."""
    jobs = {j.spec.name: (j.first_start, j.finished, j.preemptions) for j in scheduler.jobs}
    times = scheduler.times
    saved = _Saved(jobs, scheduler.now, scheduler.all_stays(), times.known, times.starts)
    write_atomic(place / STATE, msgspec.json.encode(saved))


def _result(scheduler: Scheduler, complete: bool) -> LiveRun:
    jobs, work = scheduler.jobs, scheduler.workload()
    stays = sorted(scheduler.stays, key=lambda stay: (stay.start, stay.job))
    table = [(*stay[:4], len(stay.slots)) for stay in stays]
    job, start, end, restart, gpus = np.array(table, np.int64).reshape(-1, 5).T.copy()
    done = np.array([stay.passes for stay in stays]) * work.pass_work[job]
    log = Log(
        job, start, end, restart, gpus, half=np.zeros_like(job),
        work=np.rint(done).astype(np.int64),
        node_ptr=np.arange(len(stays) + 1), node=np.zeros_like(job), count=gpus.copy(),
        finished=np.array([job.finished for job in jobs], np.int64),
        preemptions=np.array([job.preemptions for job in jobs], np.int64),
    )  # fmt: skip
    return LiveRun(
        work, Nodes(1, gpus=scheduler.slots), scheduler.settings(), scheduler.policy.name,
        policy_options(scheduler.policy), log, tuple(jobs), scheduler.times, complete,
    )  # fmt: skip
