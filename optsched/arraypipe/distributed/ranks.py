"""One run on all ranks: their links, what they agree on, and what comes together on the first."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from optsched.arraypipe.distributed.backend import ProcessBackend
from optsched.arraypipe.distributed.group import Group
from optsched.arraypipe.distributed.mailbox import Capacity
from optsched.arraypipe.distributed.transport import CreditedLinks, GlooLinks, PeerLost, hearing
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.memory.budget import CUDA_CONTEXT
from optsched.arraypipe.memory.manager import Share
from optsched.arraypipe.plan.segments import Walk
from optsched.arraypipe.plan.types import MESSAGES, Copied, Record
from optsched.arraypipe.runtime.environment import SETTINGS
from optsched.arraypipe.runtime.inline import since
from optsched.arraypipe.runtime.worker import reason
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optsched.arraypipe.distributed.transport import Lane
    from optsched.arraypipe.memory.budget import MessageBytes
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Course, Planner, Segment
    from optsched.arraypipe.plan.types import Routes
    from optsched.arraypipe.runtime.inline import Moment, Past
    from optsched.arraypipe.runtime.state import JobRun, JobStage
    from optsched.arraypipe.runtime.worker import Worker

Timed = TypeVar("Timed", Record, Copied)
Remembered: TypeAlias = "tuple[Past, list[Copied]]"
_ROUNDS = 5


class Ranks:
    """The ranks of one run, as many as `check_size` wants; rank d is device d. Collective.

    `devices` are CPUs, if those are meant although there are GPUs.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        routes: Routes,
        window: int = 2,
        timeout: float = 600.0,
        devices: Sequence[str | torch.device] | None = None,
    ) -> None:
        self.capacity = Capacity(window)
        self.links = links(routes, timeout, devices)
        self.group = Group(self.links.group, timeout)
        self.all, self.same = self.group.all, self.group.agree
        self.devices = (self.links.device,) * len(plan.devices)
        self.is_first = self.links.rank == 0
        self.clock_error_ns = 0  # largest error of a rank's clock

    def agree(self, what: Mapping[str, object]) -> None:
        """Refuse, on all ranks, to run if they were given different things."""
        rows = self.all(what)
        for rank, row in enumerate(rows):
            for key in {**rows[0], **row}:
                first, here = rows[0].get(key), row.get(key)
                if first != here:
                    raise InputError(
                        f"{key}: differs between ranks, {first!r} on rank 0 and {here!r} on "
                        f"rank {rank}; all ranks must run the same"
                    )

    def leave(self) -> None:
        """Leave the links as things are: peers that wait for this rank hear of it at once."""
        self.group.group = None  # who holds it keeps its connections open
        self.links.leave()

    def share(self, segment: Segment) -> Share:
        """What the memory of this rank is for."""
        return Share(self.links.rank, self.held(segment, self.links.rank), self.links.taken)

    def held(self, segment: Segment, device: int) -> MessageBytes:
        """Receive windows and outboxes of a rank."""
        return partial(self.capacity.held, segment, device)

    def unserved(self, segment: Segment) -> str:
        """Why the channels cannot carry a plan, as a sentence; ``""`` if they can."""
        missing = self.links.missing(lanes(segment.routes))
        if not missing:
            return ""
        source, target, kind = missing[0]
        return (
            f"the new plan has messages of {MESSAGES[kind]} from rank {source} to rank {target}, "
            "for which the first plan had no channel"
        )

    def connect(
        self,
        course: Course,
        runs: Sequence[JobRun],
        worker: Worker,
        planner: Planner,
        strict: bool,
    ) -> ProcessBackend:
        """Agree on the sizes of the messages of all jobs that will run, compare clocks."""
        limits = worker.memory.limits
        if limits is not None:  # how the others have divided their memory
            limits.devices = self.all(limits.devices[self.links.rank])
        sizes = self.capacity.rows([run.index for run in runs if run.begin < run.end])
        for rank, row in enumerate(rows := self.all(sizes)):
            if row != rows[0]:
                raise InputError(
                    f"data: rank {rank} sees other shapes in the first batches than rank 0; all "
                    f"ranks must build the same models and read the same data"
                )
        self.before = read_clocks(self.links)
        self.backend = ProcessBackend(
            course, runs, worker, planner, strict, self.links, self.group, self.capacity
        )
        return self.backend

    def share_failures(self, runs: Sequence[JobRun]) -> None:
        """A job whose first forward has failed on one rank has failed on all (collective).

        All have the sentence of the first of these ranks, which is named if others had no error.
        """
        errors = {run.index: (error.stage, str(error)) for run in runs if (error := run.job.error)}
        rows = self.all(errors)
        for run in runs:
            failed = [(rank, *row[run.index]) for rank, row in enumerate(rows) if run.index in row]
            if not failed:
                continue
            rank, stage, sentence = failed[0]
            error = run.job.error or run.fail(stage, run.start, "")
            error.args = (f"{sentence} (rank {rank})" if len(failed) < len(rows) else sentence,)

    def stages_of(self, run: JobRun) -> list[int]:
        """Stages of a job that are trained on this rank."""
        home = self.backend.homes.get(run.index, ())
        return [stage for stage, device in enumerate(home) if device == self.links.rank]

    def tells(self, run: JobRun) -> bool:
        """Whether this rank calls back with the losses of a job.

        Rank 0 does if it has a stage of the job, else the rank of the last stage.
        """
        home = self.backend.homes[run.index]
        return self.links.rank == (0 if 0 in home else home[-1])

    @contextmanager
    def concluding(self) -> Iterator[None]:
        """After the last block: what is raised on one rank the others hear, and end with it."""
        try:
            yield
        except PeerLost as error:
            raise PeerLost(self.group.why(str(error))) from error
        except Exception as error:
            self.group.abort(reason(error))
            raise

    def collect(self, records: list[Record]) -> list[Record]:
        """Everything that was trained, and all records in a topological order, on rank 0.

        Its backend gets the copies of all ranks, and what is remembered beside the records. Other
        ranks keep their own. Of a long run all that is from the cycle on from which every rank
        remembers it.
        """
        after, backend = read_clocks(self.links), self.backend
        everybody = gather(backend)
        self.links.close()
        if not everybody:
            return records
        self.clock_error_ns = max(r.error_ns for r in (*self.before, *after))
        cut = max(past.cut for past, _ in everybody)
        backend.course.forget(cut[0])
        rows: list[list[Record]] = []
        copies: list[Copied] = []
        waited_ns: dict[tuple[int, ...], int] = {}
        for (past, copied), *readings in zip(everybody, self.before, after, strict=True):
            rows.append(on_first_clock(since(cut, past.records), *readings))
            copies += on_first_clock(copied, *readings)
            waited_ns |= dict(zip((row[:3] for row in past.rows), past.exposed_ns, strict=False))
        ordered = in_topological_order(backend.course, rows, cut)
        left_out = sum(past.left_out + len(past.rows) for past, _ in everybody) - len(ordered)
        early_ns = min((r.start_ns for r in ordered), default=0)
        backend.copies = [c for c in copies if not left_out or c.end_ns >= early_ns]
        backend.past.left_out = left_out
        backend.past.exposed_ns = [waited_ns.get(r[:3], 0) for r in ordered] if waited_ns else []
        return ordered


def links(
    routes: Routes, timeout: float, devices: Sequence[str | torch.device] | None
) -> GlooLinks:
    """Links between CPUs; or between GPUs if every process has one for itself (collective)."""
    device = own_gpu(devices)
    if device is None:
        return GlooLinks(timeout)
    if missing := [f"{key}={value}" for key, value in SETTINGS.items() if key not in os.environ]:
        warnings.warn(
            f"streams of this rank may wait for each other: set {' '.join(missing)} before CUDA "
            "starts", stacklevel=2,
        )  # fmt: skip
    torch.cuda.set_device(device)
    made = CreditedLinks(timeout, lanes(routes), device)
    torch.cuda.empty_cache()  # or what this process keeps for itself would count as taken
    free, total = torch.cuda.mem_get_info(device)
    made.taken = max(0, total - free - CUDA_CONTEXT)  # kernels that are loaded already, too
    return made


def check_size(n_devices: int) -> None:
    """Refuse a schedule that has not one device for every process."""
    if dist.get_world_size() != n_devices:
        raise InputError(
            f"backend: the schedule has {n_devices} devices, there are {dist.get_world_size()} "
            f"processes; start one per device (torchrun --nproc-per-node {n_devices} ...)"
        )


def own_gpu(devices: Sequence[str | torch.device] | None) -> torch.device | None:
    """The GPU of this process, by name or by LOCAL_RANK; None: CPUs. All ranks decide alike."""
    rank = dist.get_rank()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = None if devices is None else torch.device(devices[rank % len(devices)])
    index = None
    if named is None or named.type == "cuda":
        index = None if named is None else named.index
        if index is None:  # a launcher may show every process its own alone
            index = 0 if there == 1 else int(os.environ.get("LOCAL_RANK", rank % local))
    found = index is not None and index < there
    uuid = str(torch.cuda.get_device_properties(index).uuid) if found else ""
    group = dist.new_group(backend="gloo")
    rows = Group(group).all((there, uuid, named and named.type))
    dist.destroy_process_group(group)
    uuids = [uuid for _, uuid, _ in rows]
    if all(uuids) and len(set(uuids)) == len(rows):
        assert index is not None
        return torch.device("cuda", index)
    kinds = [kind for _, _, kind in rows]
    if "cuda" in kinds:
        found_there = [
            f"rank {r} sees {n} and takes {f'GPU {u}' if u else 'none'}"
            for r, (n, u, _) in enumerate(rows)
        ]
        raise InputError(
            f"devices: every process needs a GPU of its own; {'; '.join(found_there)} "
            f"(devices=None uses the CPU then)"
        )
    if there and "cpu" not in kinds:
        warnings.warn(
            f"trains on CPUs: this host has {there} GPUs and {local} processes; start one per GPU",
            stacklevel=2,
        )
    return None


def lanes(routes: Routes) -> list[Lane]:
    """The channels of a plan as the links number them."""
    return [(c.source, c.target, MESSAGES.index(c.kind)) for c in routes.channels]


class Reading(NamedTuple):
    """Rank 0 showed ``at_ns + offset_ns`` at `at_ns` on a rank's clock, within `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def read_clocks(links: GlooLinks) -> list[Reading]:
    """Compare all clocks with that of rank 0; empty on other ranks (collective).

    The reply that came back soonest bounds the error by half of its time (Cristian 1989).
    """
    found = [Reading(time.perf_counter_ns(), 0, 0)]
    for rank in range(1, links.size):
        if links.rank in (0, rank):
            rows = [_compare(rank, links) for _ in range(_ROUNDS)]
            found.append(min(rows, key=lambda r: r.error_ns))
    return [] if links.rank else found


def _compare(rank: int, links: GlooLinks) -> Reading:
    """Rank 0 asks another one for the time, which answers."""
    word, peer = torch.zeros(1, dtype=torch.int64), 0 if links.rank else rank
    asked_ns = time.perf_counter_ns()
    with hearing():
        if not links.rank:
            dist.send(word, peer, links.group)
        dist.recv(word, peer, links.group)
        back_ns, there_ns = time.perf_counter_ns(), int(word)
        if links.rank:
            word[0] = back_ns
            dist.send(word, peer, links.group)
    return Reading(there_ns, (asked_ns + back_ns) // 2 - there_ns, (back_ns - asked_ns + 1) // 2)


def on_first_clock(rows: Sequence[Timed], before: Reading, after: Reading) -> list[Timed]:
    """Records or copies of a rank in the time of rank 0; the offset drifts evenly between readings.

    An offset within its error is none: processes of one machine share a clock.
    """
    if max(abs(r.offset_ns) - r.error_ns for r in (before, after)) <= 0:
        return list(rows)
    span_ns, drift_ns = max(1, after.at_ns - before.at_ns), after.offset_ns - before.offset_ns

    def moved(t_ns: int) -> int:
        return t_ns + before.offset_ns + drift_ns * (t_ns - before.at_ns) // span_ns

    return [row._replace(start_ns=moved(row.start_ns), end_ns=moved(row.end_ns)) for row in rows]


def gather(backend: ProcessBackend) -> list[Remembered]:
    """Bring all stages of all jobs to rank 0, and what each rank remembers (collective).

    The result is empty on the others.
    """
    links, runs, homes = backend.links, backend.runs, backend.homes
    own = backend.past, [*backend.copies]
    everybody = [own]
    for rank in range(1, links.size):
        if links.rank not in (0, rank):
            continue
        for job, home in sorted(homes.items()):
            for stage in [s for s, device in enumerate(home) if device == rank]:
                part = runs[job].stages[stage]
                if links.rank:
                    _give(_state(part), links)
                else:
                    _install(part, _take(rank, links))
        if links.rank:
            _give(([_life(runs[job]) for job in homes], own), links)
        else:
            lives, remembered = _take(rank, links)
            everybody.append(remembered)
            for row in lives:
                _hear_of(runs, *row)
    return [] if links.rank else everybody


def in_topological_order(
    course: Course, records: Sequence[Sequence[Record]], cut: Moment = (0, 0)
) -> list[Record]:
    """Records of all devices in an order in which every block comes after all it has waited for.

    Those from a segment and cycle on.
    """
    first, cycle = cut
    at = {(r.segment, r.operation, r.cycle): r for row in records for r in row}
    return [
        at[number, now.operation, now.cycle]
        for number in range(first, len(course.segments))
        for now in Walk(course.segments[number], cycle if number == first else 0)
    ]


def _state(stage: JobStage) -> dict[str, Any]:
    optimizer: Any = stage.optimizer
    groups = [] if optimizer is None else optimizer.param_groups
    found = {
        "parameters": [p.detach() for _, p in stage.parameters],
        "masters": [p.detach() for _, p in stage.masters or ()],
        "buffers": list(stage.buffers()),
        "optimizer": [optimizer.state.get(p) for group in groups for p in group["params"]],
        "groups": [{k: v for k, v in g.items() if not k.startswith("param")} for g in groups],
        "scheduler": None if stage.scheduler is None else stage.scheduler.state_dict(),
    }
    return tree_map_only(torch.Tensor, _compact, found)  # type: ignore[no-any-return]


def _compact(t: torch.Tensor) -> torch.Tensor:
    """On the host, and by itself: a view would be sent with all of its storage."""
    t = t.cpu()
    return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t


def _install(stage: JobStage, state: dict[str, Any]) -> None:
    for key, row in (("parameters", stage.parameters), ("masters", stage.masters or [])):
        for (_, own), value in zip(row, state[key], strict=True):
            own.data = value
    stage.set_buffers(state["buffers"])
    if stage.optimizer is not None:
        groups = stage.optimizer.param_groups
        trained = [p for group in groups for p in group["params"]]
        for parameter, moments in zip(trained, state["optimizer"], strict=True):
            if moments is not None:
                stage.optimizer.state[parameter] = moments
        for group, values in zip(groups, state["groups"], strict=True):
            group.update(values)
    if stage.scheduler is not None:
        stage.scheduler.load_state_dict(state["scheduler"])


def _life(run: JobRun) -> tuple[Any, ...]:
    """What this rank knows of a job on it."""
    life, error = run.job.life, run.job.life.error
    failure = None if error is None else (error.stage, error.iteration, str(error))
    return run.index, life.status, run.end, failure, list(run.losses)


def _hear_of(
    runs: Sequence[JobRun], job: int, status: Any, end: int, failure: Any, losses: list[float]
) -> None:
    run, life = runs[job], runs[job].job.life
    if losses:
        run.losses[:] = losses
    if status in ("failed", "stopped") and life.status != "failed":
        life.status, run.end = status, min(run.end, end)
    if failure is not None and life.error is None:
        stage, iteration, sentence = failure
        life.error = JobFailed(run.title, job, stage, iteration, "")
        life.error.args = (sentence,)


def _give(value: Any, links: GlooLinks) -> None:
    with hearing():
        dist.send_object_list([value], dst=0, group=links.group)


def _take(rank: int, links: GlooLinks) -> Any:
    row: list[Any] = [None]
    with hearing():
        dist.recv_object_list(row, src=rank, group=links.group)
    return row[0]
