"""One run on all ranks: their links, what they agree on, and what comes together on the first."""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from optsched.arraypipe.distributed.backend import ProcessBackend, share_lives
from optsched.arraypipe.distributed.group import Group, collective, meeting
from optsched.arraypipe.distributed.messages import Capacity, Links
from optsched.arraypipe.distributed.replicas import Replicas
from optsched.arraypipe.memory.manager import Share
from optsched.arraypipe.model.split import states_by_name
from optsched.arraypipe.plan.segments import places
from optsched.arraypipe.plan.types import Copied, Record
from optsched.arraypipe.runtime.environment import device_of
from optsched.arraypipe.runtime.inline import FirstForward, since
from optsched.arraypipe.train_alone import Trained
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import RunPlan, Segment
    from optsched.arraypipe.rescheduling import Rescheduling
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.arraypipe.runtime.worker import Worker

Timed = TypeVar("Timed", Record, Copied)
_ROUNDS = 5


class Ranks:
    """The ranks of one run, as many as `check_size` wants. Collective.

    Rank ``k * n + d`` is device d of n of replica k. `device` is that of this process, or None.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        timeout: float = 600.0,
        device: str | torch.device | None = None,
        replicas: int = 1,
    ) -> None:
        self.plan, self.capacity = plan, Capacity()
        self.device = gpu_or_cpu(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.links = Links(timeout, self.device, replicas)
        world = self.links.group
        self.replicas: Replicas | None = None
        if replicas > 1:
            patience = self.links.timeout
            world = dist.new_group(backend="gloo", timeout=patience)
            kind = "gloo" if self.device.type == "cpu" else "nccl"
            columns = zip(*self.links.members, strict=True)
            same = [dist.new_group([*row], patience, kind) for row in columns]
            self.replicas = Replicas(self.links.replica, replicas, same[self.links.rank])
        self.group = Group(world, timeout)
        self.all, self.same, self.explained = self.group.all, self.group.agree, self.group.explained
        self.share_failures = partial(share_lives, self.group)
        self.is_first = self.group.rank == 0
        self.clock_error_ns = 0  # largest error of a rank's clock, its drift included

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
        """Leave the links as things are: peers that wait for this rank get an error at once."""
        if self.replicas is not None:
            self.replicas.leave()
            dist.destroy_process_group(self.group.group)
        self.group.group = None  # a reference would keep its connections open
        self.links.leave()

    def placement(self, job: int) -> tuple[int, ...]:
        """Device of every stage of a job; a waiting job is built for the last slot of the plan."""
        return places(self.plan, min(job, self.plan.n_jobs - 1))

    def stages_of(self, run: JobRun) -> list[int]:
        """Return stages of a job that are trained on this rank."""
        return [stage.index for stage in run.stages if stage.local]

    def saved_by(self, run: JobRun) -> list[int]:
        """Return stages of a job that this rank writes: those of the first replica."""
        return self.stages_of(run) if self.links.replica == 0 else []

    def reports(self, run: JobRun) -> bool:
        """Return whether this rank calls back with the losses of a job.

        Rank 0 does if it has a stage of the job, else the rank of the last stage.
        """
        devices = self.placement(run.index)
        return self.links.replica == 0 and self.links.rank == (0 if 0 in devices else devices[-1])

    def share(self, segment: Segment) -> Share:
        """Return what the memory of this rank is for."""
        return Share(self.links.rank, *self.capacity.held(segment, self.links.rank))

    def connect(
        self,
        run_plan: RunPlan,
        runs: Sequence[JobRun],
        worker: Worker,
        planner: Rescheduling,
        strict: bool,
    ) -> ProcessBackend:
        """Exchange the limits of memory, compare clocks."""
        limits = worker.memory.limits
        if limits is not None:  # how the others have divided their memory
            limits.share(self.all)
        self.before = read_clocks(self.links)
        worker.replicas = self.replicas
        self.backend = ProcessBackend(
            run_plan, runs, worker, planner, strict or self.replicas is not None, self.links,
            self.group, self.capacity,
        )  # fmt: skip
        return self.backend

    def collect(self, records: list[Record]) -> list[Record]:
        """Return losses of all jobs, and all records in the order of their starts, on rank 0.

        Its backend gets the copies of all ranks, and what is remembered beside the records. Other
        ranks keep their own. Of a long run all that is from the cycle on from which every rank
        remembers it.
        """
        after, backend = read_clocks(self.links), self.backend
        self._share_losses()
        past, rows = backend.past, list[Any]([None] * self.links.size)
        local = (past.cut, past.left_out, records, [*backend.copies])
        with collective():
            first = self.links.members[self.links.replica][0]
            dist.gather_object(local, None if self.links.rank else rows, first, self.links.group)
        self.links.leave()
        if self.links.rank:
            return records
        cuts, left_out, *_ = zip(*rows, strict=True)
        found: list[Record] = []
        copies: list[Copied] = []
        for (_, _, blocks, moves), begun, ended in zip(rows, self.before, after, strict=True):
            found += on_first_clock(since(max(cuts), blocks), *ended)
            copies += on_first_clock(moves, *ended)
            self.clock_error_ns = max(self.clock_error_ns, abs(begun[0] - ended[0]) + ended[1])
        found.sort(key=lambda r: (r.segment, r.start_ns))
        past.left_out = sum(left_out) + sum(len(row[2]) for row in rows) - len(found)
        early_ns = min((r.start_ns for r in found), default=0)
        backend.copies = [c for c in copies if not past.left_out or c.end_ns >= early_ns]
        return found

    def _share_losses(self) -> None:
        """Give all ranks the losses of all jobs, which are made on last stages.

        Of replicas their mean, as the gradients are that of theirs.
        """
        runs = self.backend.runs
        rows = self.all({run.index: run.losses for run in runs if run.stages[-1].local})
        for run in runs:
            found = [row[run.index] for row in rows if run.index in row]
            columns = zip(*found, strict=True)
            run.losses[:] = [sum(x / len(found) for x in column) for column in columns]


class Chain(FirstForward):
    """The first forward of a job on ranks: each runs its stages on what the one before sends.

    All ranks call it for the same jobs in the same order, so that every send is awaited next.
    """

    def __init__(self, ranks: Ranks, run: JobRun) -> None:
        self.links, self.capacity, self.run = ranks.links, ranks.capacity, run
        self.ranks = [self.links.members[self.links.replica][d] for d in ranks.placement(run.index)]

    def is_local(self, stage: int) -> bool:
        """Return whether a stage is trained here."""
        return self.run.stages[stage].local

    def receive(self, stage: int) -> Any:
        """Return the output of a stage of another rank, on the host; None if that has failed."""
        row = [None]
        with collective():
            dist.recv_object_list(row, self.ranks[stage], self.links.group)
        if row[0] is not None:
            self.capacity.note(self.run, stage, row[0])
        return row[0]

    def send(self, stage: int, output: Any) -> None:
        """Send the output of a local stage to the next one; None if there is none."""
        if stage + 1 == len(self.ranks) or self.is_local(stage + 1):
            return
        if output is not None:
            self.capacity.note(self.run, stage, output)
        row = [tree_map_only(Tensor, lambda t: _compact(t).requires_grad_(t.requires_grad), output)]
        with collective():
            dist.send_object_list(row, self.ranks[stage + 1], self.links.group)


def check_size(n_devices: int, replicas: int = 1) -> None:
    """Refuse a schedule that has not one device for every process of a replica."""
    needed = n_devices * replicas
    if dist.get_world_size() != needed:
        more = f" and {replicas} replicas" if replicas > 1 else ""
        raise InputError(
            f"backend: the schedule has {n_devices} devices{more}, there are "
            f"{dist.get_world_size()} processes; start one per device "
            f"(torchrun --nproc-per-node {needed} ...)"
        )


def gpu_or_cpu(given: str | torch.device | None) -> torch.device:
    """The GPU that this process alone has, or the CPU; all ranks decide alike (collective)."""
    device = device_of(given)
    name = "CPU"
    if device.type == "cuda":
        name = f"GPU {torch.cuda.get_device_properties(device).uuid}"
    with meeting() as group:
        rows = group.all((name, given is not None))
    names = [row[0] for row in rows]
    if set(names) == {"CPU"} or ("CPU" not in names and len(set(names)) == len(names)):
        return device
    if any(row[1] for row in rows):
        raise InputError(
            f"device: every process needs a GPU of its own, the ranks have {', '.join(names)} "
            f'(device="cpu" uses the CPU)'
        )
    warnings.warn(
        f"trains on CPUs: the ranks have {', '.join(names)}; start one per GPU", stacklevel=2
    )
    return torch.device("cpu")


def read_clocks(links: Links) -> list[tuple[int, int]]:
    """By how much the clock of rank 0 is ahead of each, and the error; only rank 0 can use it.

    Every rank looks at its clock between a broadcast of rank 0 and a gathering; the quickest of a
    few rounds bounds the error by half of its time (Cristian 1989).
    """
    rounds = []
    first = links.members[links.replica][0]
    for _ in range(_ROUNDS):
        now = torch.zeros(1, dtype=torch.int64)
        times = [torch.zeros_like(now) for _ in range(links.size)]
        began_ns = time.perf_counter_ns()
        with collective():
            dist.broadcast(now, first, links.group)
            now[0] = time.perf_counter_ns()
            dist.all_gather(times, now, links.group)
        rounds.append((time.perf_counter_ns() - began_ns, began_ns, times))
    took_ns, began_ns, times = min(rounds)
    middle_ns, error_ns = began_ns + took_ns // 2, (took_ns + 1) // 2
    return [(middle_ns - int(t), error_ns) for t in times]


def on_first_clock(rows: Sequence[Timed], shift: int, error: int) -> list[Timed]:
    """Return records or copies of a rank in the time of rank 0.

    An offset within its error is none: processes of one machine share a clock.
    """
    if abs(shift) <= error:
        return list(rows)
    return [r._replace(start_ns=r.start_ns + shift, end_ns=r.end_ns + shift) for r in rows]


def gather(local: Sequence[tuple[JobRun, Sequence[int]]]) -> list[tuple[nn.Module, Trained]]:
    """Bring the stages of all jobs, of which a rank has some, to rank 0 (collective).

    Empty on the other ranks.
    """
    with meeting() as group:
        parts = group.agree(lambda: [_part(*row) for row in local])
        rows: list[Any] = [None] * group.size
        with collective():
            dist.gather_object(parts, None if group.rank else rows, 0, group.group)
    if group.rank:
        return []
    return [_merged(run, [parts[k] for parts in rows]) for k, (run, _) in enumerate(local)]


def _part(run: JobRun, stages: Sequence[int]) -> Sequence[dict[str, Any]]:
    """Parameters, buffers and moments of some stages under the names of the unsplit model."""
    chosen = [run.stages[stage] for stage in stages]
    held = {id(module._buffers[name]) for stage in chosen for module, name in stage.holders}
    buffers = {name: b for name, b in run.named_buffers().items() if id(b) in held}
    parameters = {name: p for stage in chosen for name, p in stage.parameters}
    states = states_by_name(chosen)
    moments = {name: states[name]["state"] if name in states else {} for name in parameters}
    return tuple(tree_map_only(Tensor, _compact, (parameters, buffers, moments)))


def _merged(run: JobRun, parts: Sequence[Any]) -> tuple[nn.Module, Trained]:
    """Return the unsplit model of a job with all its tensors."""
    parameters, buffers, moments = (
        {name: value for part in parts for name, value in part[k].items()} for k in range(3)
    )
    made: dict[int, nn.Parameter] = {}
    modules = dict(run.model.named_modules())
    for name, p in list(run.model.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        if id(p) not in made:
            made[id(p)] = nn.Parameter(parameters[name], p.requires_grad)
        modules[owner]._parameters[attribute] = made[id(p)]
    for name, _ in list(run.model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        modules[owner]._buffers[attribute] = buffers.get(name)
    names = [name for name, _ in run.named_parameters()]
    trained = Trained(
        {name: parameters[name] for name in names},
        {name: buffers.get(name, b) for name, b in run.named_buffers().items()},
        {name: moments.get(name, {}) for name in names},
        tuple(run.losses),
    )
    return run.model, trained


def _compact(t: Tensor) -> Tensor:
    """On the host, and by itself: a view would be sent with all of its storage."""
    t = t.detach().cpu()
    return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t
