"""`run`: really train elastic jobs under a policy, and put a simulation beside it."""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from optsched.cluster.results.run import Run
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.world.log import Log
from optsched.cluster.world.policy import ClusterView, Decision
from optsched.elastic import live
from optsched.elastic.job import TrainingJob, modules_of, pickled
from optsched.elastic.live import ENDED, FAILED, PENDING, RUNNING, LiveJob, PassTimes
from optsched.elastic.scheduler import Scheduler, Stay, signal_of
from optsched.elastic.workers import Processes
from optsched.errors import InputError, MissingExtra
from optsched.io.files import write_atomic
from optsched.io.strict_json import decode, placed, read_json
from optsched.io.values import format_value, integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optsched.cluster.world.policy import Policy

STATE: Final = "run.json"


class Status(NamedTuple):
    """What `on_progress` is told: seconds since the start, and the jobs as they are then."""

    time: float
    jobs: list[LiveJob]


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a later process needs to go on, beside the checkpoints."""

    jobs: dict[str, tuple[int, int, int]]  # first start, end and preemptions
    clock: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    stays: list[Stay] = []
    times: dict[str, dict[int, list[int]]] = {}
    starts: list[int] = []
    format: Literal["optsched.elastic-run/1"] = "optsched.elastic-run/1"


@dataclass(frozen=True, eq=False)
class LiveRun(Run):
    """What came of real training; times in ms. A `Run`, so metrics, history and plots are there."""

    live: tuple[LiveJob, ...]
    rule: Policy
    times: PassTimes
    complete: bool  # False: interrupted
    overhead: float  # share of the wall time in which the scheduler was at work

    @property
    def records(self) -> dict[str, list[dict[str, Any]]]:
        """By job what every pass has brought, see `training.Member.train`."""
        return {job.spec.name: job.log for job in self.live}

    @property
    def quotas(self) -> dict[str, list[int]]:
        """Workers of every pass, by job: what `Replay` takes."""
        return {name: [len(r["samples"]) for r in log] for name, log in self.records.items()}

    @property
    def failed(self) -> dict[str, str]:
        """Jobs that failed, and why."""
        return {job.spec.name: job.reason for job in self.live if job.phase == FAILED}

    def simulated(self, policy: Policy | str | None = None) -> Run:
        """The jobs that ended, simulated under this or another policy, with their passes.

        Passes and starts cost the mean of all that were measured, passes by template and size. The
        simulator charges starts from the second one on; the first is put into the work, at the
        speed that the job began with. The policy is told what it would know of real jobs: believed
        times, then those measured here one by one, and that nobody can be preempted within a pass.
        """
        from optsched.cluster.simulate import chosen_policy, simulate

        chosen = self.rule if policy is None else chosen_policy(policy)
        ended = [job for job in self.live if job.phase == ENDED]
        if not ended:
            raise InputError("simulated: no job has ended")
        work = live.workload(self.live, self.times, signal_of(chosen))
        work = work.take([job.number for job in ended])
        cost = self.settings.restart_cost
        first = [int(self.log.gpus[self.log.job == job.number][0]) for job in ended]
        speed = [int(work.rates_of(i)[work.sizes_of(i) == g][0]) for i, g in enumerate(first)]
        extra = cost * np.array(speed, np.int64)
        work = work.changed(work=work.work + extra, estimate=work.estimate + extra)
        settings: Any = {"restart_cost": cost, "checkpoint": "pass", "engine": "generic"}
        return simulate(work, AsLive(chosen, ended, self.times), self.nodes, **settings)


class AsLive:
    """A policy in a simulation of real jobs, told what it would know of them."""

    options: tuple[str, ...] = ()
    clairvoyant = False

    def __init__(self, policy: Policy, real: Sequence[LiveJob], measured: PassTimes) -> None:
        self.policy, self.name, self.real = policy, policy.name, real
        self.measured, self.times = measured, PassTimes()
        self.jobs = [
            LiveJob(job.spec, i, submit=job.submit, samples=job.samples)
            for i, job in enumerate(real)
        ]

    def decide(self, view: ClusterView) -> Decision:
        """Its decision."""
        at = {j: i for i, j in enumerate(view.job.tolist())}
        for job, real in zip(self.jobs, self.real, strict=True):
            i = at.get(job.number)
            passes = real.passes if i is None else int(view.passes[i])
            if job.slots and passes > job.passes:
                self.times.add_next(job.spec, len(job.slots), self.measured)
            if i is None:
                if job.active:
                    job.phase, job.slots, job.log = ENDED, (), real.log
                continue
            job.log, job.slots = real.log[:passes], tuple(range(int(view.gpus[i])))
            job.phase = RUNNING if job.slots else PENDING
            job.at_end = bool(job.slots) and bool(view.at_pass_end[i])
            job.first_start, job.entered = int(view.first_start[i]), int(view.entered[i])
            job.attained, job.stay = int(view.attained[i]), view.time
            job.starts = int(view.starts[i])
            if job.slots:
                within = int(view.done[i] - view.passes[i] * view.pass_work[i])
                job.began = view.time - within // live.rate_of(view.workload, job)
        work = live.workload(self.jobs, self.times, signal_of(self.policy))
        slots = int(view.capacity.sum())
        return self.policy.decide(live.view(self.jobs, work, view.settings, slots, view.time))


class Replay:
    """A policy that gives every pass the workers that it had before; jobs have to be preemptible.

    `quotas` are `LiveRun.quotas`: workers by pass, by name of the job; the last one counts for
    later passes.
    """

    name = "replay"
    clairvoyant = False

    def __init__(self, quotas: Mapping[str, Sequence[int]]) -> None:
        if not isinstance(quotas, Mapping):
            raise InputError(f"quotas: expected workers by pass by job, got {format_value(quotas)}")
        rows = {name: np.ravel(sizes) for name, sizes in quotas.items()}
        self.quotas = {j: [integer(f"quotas: {j}", g, 1) for g in row] for j, row in rows.items()}

    def decide(self, view: ClusterView) -> Decision:
        """The recorded sizes, first come first served, as far as there are workers."""
        left = int(view.capacity.sum() - view.gpus[~view.at_pass_end].sum())
        quota = view.gpus.copy()
        for i in np.flatnonzero(view.at_pass_end).tolist():
            name = view.workload.names[view.job[i]]
            if name not in self.quotas:
                raise InputError(f"quotas: there are none of job {format_value(name)}")
            row = self.quotas[name]
            wanted = row[min(int(view.passes[i]), len(row) - 1)] if row else 0
            quota[i] = wanted if wanted <= left else 0
            left -= int(quota[i])
        return Decision(quota)


def run(
    jobs: Iterable[TrainingJob],
    slots: int,
    policy: Policy | str = "time_to_target",
    *,
    devices: Sequence[str] | None = None,
    folder: str | PathLike[str] | None = None,
    resume: bool = False,
    on_progress: Callable[[Status], object] | None = None,
) -> LiveRun:
    """Train jobs on a shared pool of workers; a policy decides at the end of every pass.

    Jobs whose number of workers changes go on from their checkpoint. A worker that dies costs the
    open pass of its job; a job whose own code raises fails, and the others go on. Ctrl-C returns
    what has happened until then.

    Parameters
    ----------
    slots
        Workers: processes of one thread each, or GPUs.
    policy
        A policy of `optsched.cluster` or its name. It sees estimates (`TrainingJob`), then measured
        times; as curve of a job the uncertainty (26) after every pass, or, if it has an attribute
        ``signal = "metric"``, 1 - metric. Within a pass no job is preemptible.
    devices
        Of every slot; None: the GPUs if there are so many, else the CPU.
    folder
        For the checkpoints, ``<job>/checkpoint.pt``, and what is needed to resume; None: nothing is
        kept. `resume` goes on with the run in it, whose clock goes on too; jobs that had failed
        are tried again.
    on_progress
        Told the state of all jobs after every change.

    Raises
    ------
    InputError
        A wrong argument, a job that cannot run, a folder with another run in it; `PolicyError` and
        `Stalled` as in `optsched.cluster.simulate`; `MissingExtra` without torch.
    """
    from optsched.cluster.simulate import chosen_policy

    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("elastic training", "torch")
    slots = integer("slots", slots, 1, 4096)
    places, known, chosen = _devices(devices, slots), _jobs(jobs, slots), chosen_policy(policy)
    if folder is not None and (not isinstance(folder, (str, PathLike)) or not str(folder)):
        raise InputError(f"folder: expected a name, got {format_value(folder)}")
    if resume and folder is None:
        raise InputError("resume: name the folder of the run")
    with ExitStack() as stack:
        if (kept := folder) is None:
            kept = stack.enter_context(tempfile.TemporaryDirectory(prefix="optsched-"))
        place = Path(kept)
        _lock(place, resume, stack)
        saved = _prepared(place, known, slots, resume)
        modules = {module for job in known for module in modules_of(job.spec)}
        pool = Processes(places, modules, saved.clock)
        stack.callback(pool.close)

        def tell(scheduler: Scheduler) -> None:
            if folder is not None:
                _save(place, scheduler)
            if on_progress is not None:
                jobs = [dataclasses.replace(job, log=[*job.log]) for job in scheduler.jobs]
                on_progress(Status(scheduler.now / 1e3, jobs))

        given = (PassTimes(saved.times, saved.starts), saved.stays, tell)
        scheduler = Scheduler(known, pool, slots, chosen, str(place), *given)
        scheduler.now = saved.clock
        tell(scheduler)  # before workers are started, which takes seconds
        complete = False
        with suppress(KeyboardInterrupt):
            pool.start()
            scheduler.rehearse()
            pool.begin()
            complete = scheduler.run()
        tell(scheduler)
        return _result(scheduler, complete, saved.clock)


def _devices(devices: Sequence[str] | None, slots: int) -> list[str]:
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
    for k, device in enumerate(devices):
        if device not in known:
            raise InputError(
                f"devices[{k}]: expected {' or '.join(known)}, got {format_value(device)}"
            )
    return list(devices)


def _jobs(jobs: Iterable[TrainingJob], slots: int) -> list[LiveJob]:
    """The jobs by submit time, with the sizes that there are workers for."""
    if isinstance(jobs, (str, bytes)) or not hasattr(jobs, "__iter__"):
        raise InputError(f"jobs: expected a list of TrainingJob, got {format_value(jobs)}")
    specs = list(jobs)
    for i, spec in enumerate(specs):
        if not isinstance(spec, TrainingJob):
            raise InputError(f"jobs[{i}]: expected a TrainingJob, got {format_value(spec)}")
        if spec.name in {STATE, *(other.name for other in specs[:i])}:
            raise InputError(
                f"jobs[{i}].name: {format_value(spec.name)} is there twice, or a file of ours"
            )
        if (least := spec.sizes[0]) > slots:
            raise InputError(
                f"job {format_value(spec.name)}: needs {least} workers, there are {slots}"
            )
    if not specs:
        raise InputError("jobs: empty; name at least one")
    for i, spec in enumerate(specs := sorted(specs, key=lambda spec: spec.submit)):
        specs[i] = dataclasses.replace(spec, sizes=tuple(g for g in spec.sizes if g <= slots))
    return [LiveJob(s, i, pickled(s), round(s.submit * 1e3)) for i, s in enumerate(specs)]


def _prepared(place: Path, jobs: Sequence[LiveJob], slots: int, resume: bool) -> _Saved:
    """The folders; with `resume` the jobs as they were when the run in it ended."""
    state, names = place / STATE, [job.spec.name for job in jobs]
    files = [place / name / "checkpoint.pt" for name in names]
    if resume:
        with placed("is no state of a run: "):
            saved = read_json(state, lambda tree, name: decode(tree, _Saved, name))
        if [*saved.jobs] != names:
            raise InputError(
                f"{state}: is of jobs {format_value([*saved.jobs])}, expected {format_value(names)}"
            )
        known, workers = range(len(jobs)), set(range(slots))
        if any(s.job not in known or not {*s.slots} <= workers or not s.slots for s in saved.stays):
            raise InputError(f"slots: the run in {place} had more, or jobs that there are not")
    elif any(file.exists() for file in (state, *files)):
        raise InputError(f"folder: {place} has a run in it; resume it, or name another")
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder: {place} cannot be written ({error.strerror})") from None
    if not resume:
        return _Saved({})
    for job, file in zip(jobs, files, strict=True):
        job.first_start, job.finished, job.preemptions = saved.jobs[job.spec.name]
        if file.exists():
            from optsched.elastic.training import read_checkpoint

            job.log = read_checkpoint(file, job.spec.name)["log"]
        if job.done:
            job.phase = ENDED
            job.finished = saved.clock if job.finished < 0 else job.finished  # not noted yet
        else:  # also one that had failed, or that is to make more passes than before
            job.finished = -1
        mine = [stay for stay in saved.stays if stay.job == job.number]
        job.starts = len(mine)
        job.attained = sum(len(stay.slots) * (stay.end - stay.start) for stay in mine)
    return saved


def _lock(place: Path, resume: bool, stack: ExitStack) -> None:
    """One run at a time in a folder, where the platform can tell."""
    with suppress(ImportError):
        import fcntl

        try:
            if not resume:
                place.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((place / ".lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = "a run goes on in it" if isinstance(error, BlockingIOError) else error.strerror
            raise InputError(f"folder: {place} cannot be used ({why})") from None


def _save(place: Path, scheduler: Scheduler) -> None:
    """Note the state of the run, open stays as if they ended now."""
    jobs = {
        job.spec.name: (job.first_start, job.finished, job.preemptions) for job in scheduler.jobs
    }
    times = scheduler.times
    saved = _Saved(jobs, scheduler.now, scheduler.all_stays(), times.known, times.starts)
    write_atomic(place / STATE, msgspec.json.encode(saved))


def _result(scheduler: Scheduler, complete: bool, origin: int) -> LiveRun:
    jobs, work = scheduler.jobs, scheduler.workload()
    stays = sorted(scheduler.stays, key=lambda stay: (stay.start, stay.job))
    table = [(*stay[:4], len(stay.slots), stay.passes) for stay in stays]
    job, start, end, restart, gpus, passes = np.array(table, np.int64).reshape(-1, 6).T.copy()
    log = Log(
        job, start, end, restart, gpus, half=np.zeros_like(job), work=passes * work.pass_work[job],
        node_ptr=np.arange(len(stays) + 1), node=np.zeros_like(job), count=gpus.copy(),
        finished=np.array([job.finished for job in jobs], np.int64),
        preemptions=np.array([job.preemptions for job in jobs], np.int64),
    )  # fmt: skip
    from optsched.cluster.simulate import policy_options

    policy, wall = scheduler.policy, max(scheduler.now - origin, 1) / 1e3
    return LiveRun(
        work, Nodes(1, gpus=scheduler.slots), scheduler.settings(), policy.name,
        policy_options(policy), log, tuple(jobs), policy, scheduler.times, complete,
        scheduler.busy / wall,
    )  # fmt: skip
