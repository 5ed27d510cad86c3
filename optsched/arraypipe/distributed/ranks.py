"""One run on all ranks: their links, what they agree on, and what comes together on the first."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from optsched.arraypipe.distributed.backend import ProcessBackend
from optsched.arraypipe.distributed.channels import Capacity, Chain
from optsched.arraypipe.distributed.group import Group
from optsched.arraypipe.distributed.replicas import Replicas
from optsched.arraypipe.distributed.transport import (
    CHAIN,
    Links,
    PeerLost,
    collective,
)
from optsched.arraypipe.memory.manager import Share
from optsched.arraypipe.plan.segments import Walk
from optsched.arraypipe.plan.types import Copied, Record
from optsched.arraypipe.runtime.inline import since
from optsched.arraypipe.runtime.worker import reason
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import RunPlan, Segment
    from optsched.arraypipe.rescheduling import Rescheduling
    from optsched.arraypipe.runtime.inline import Moment
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.arraypipe.runtime.worker import Worker

Timed = TypeVar("Timed", Record, Copied)
_ROUNDS = 5


class Remembered(NamedTuple):
    """What a rank has of the end of a run."""

    cut: Moment
    left_out: int
    records: list[Record]
    copies: list[Copied]


class Ranks:
    """The ranks of one run, as many as `check_size` wants. Collective.

    Rank ``k * n + d`` is device d of n of replica k. `devices` are CPUs, if those are meant
    although there are GPUs.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        window: int = 2,
        timeout: float = 600.0,
        devices: Sequence[str | torch.device] | None = None,
        replicas: int = 1,
    ) -> None:
        self.capacity = Capacity(window)
        self.links = links(timeout, devices, replicas)
        world = self.links.group
        self.replicas: Replicas | None = None
        if replicas > 1:
            patience = self.links.timeout
            world = dist.new_group(backend="gloo", timeout=patience)
            kind = "gloo" if self.links.device.type == "cpu" else "nccl"
            columns = zip(*self.links.members, strict=True)
            same = [dist.new_group([*row], patience, kind) for row in columns]
            self.replicas = Replicas(self.links.replica, replicas, same[self.links.rank])
        self.group = Group(world, timeout)
        self.all, self.same = self.group.all, self.group.agree
        self.devices = (self.links.device,) * len(plan.devices)
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
            dist.destroy_process_group(self.replicas.group)
            dist.destroy_process_group(self.group.group)
        self.group.group = None  # a reference would keep its connections open
        self.links.leave()

    def share(self, segment: Segment) -> Share:
        """What the memory of this rank is for."""
        rank, slots = self.links.rank, range(segment.plan.n_jobs)
        return Share(rank, *self.capacity.held(segment, rank, slots))

    def chain(self, run: JobRun, homes: Sequence[int]) -> Chain:
        """The first forward of a job; every rank runs its own stages."""
        local = [stage for stage, home in enumerate(homes) if home == self.links.rank]
        self.capacity.note_weights(run, local)
        return Chain(self.links, self.capacity, run, homes)

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

    def saved_by(self, run: JobRun) -> list[int]:
        """Stages of a job whose states this rank writes: those of the first replica."""
        return self.stages_of(run) if self.links.replica == 0 else []

    def stages_of(self, run: JobRun) -> list[int]:
        """Stages of a job that are trained on this rank."""
        home = self.backend.homes.get(run.index, ())
        return [stage for stage, device in enumerate(home) if device == self.links.rank]

    def reports(self, run: JobRun) -> bool:
        """Whether this rank calls back with the losses of a job.

        Rank 0 does if it has a stage of the job, else the rank of the last stage.
        """
        home = self.backend.homes[run.index]
        return self.links.replica == 0 and self.links.rank == (0 if 0 in home else home[-1])

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
        """Losses of all jobs and all records in a topological order, on rank 0.

        Its backend gets the copies of all ranks, and what is remembered beside the records. Other
        ranks keep their own. Of a long run all that is from the cycle on from which every rank
        remembers it.
        """
        after, backend = read_clocks(self.links), self.backend
        self._share_losses()
        everybody = self._gathered(
            Remembered(backend.past.cut, backend.past.left_out, records, [*backend.copies])
        )
        self.links.leave()
        if not everybody:
            return records
        pairs = zip(self.before, after, strict=True)
        self.clock_error_ns = max(abs(b.offset_ns - a.offset_ns) + a.error_ns for b, a in pairs)
        cut = max(one.cut for one in everybody)
        backend.run_plan.forget(cut[0])
        rows: list[list[Record]] = []
        copies: list[Copied] = []
        for one, reading in zip(everybody, after, strict=True):
            rows.append(on_first_clock(since(cut, one.records), reading))
            copies += on_first_clock(one.copies, reading)
        ordered = in_topological_order(backend.run_plan, rows, cut)
        left_out = sum(one.left_out + len(one.records) for one in everybody) - len(ordered)
        early_ns = min((r.start_ns for r in ordered), default=0)
        backend.copies = [c for c in copies if not left_out or c.end_ns >= early_ns]
        backend.past.left_out = left_out
        return ordered

    def _share_losses(self) -> None:
        """Give all ranks the losses of all jobs, which are made on last stages.

        Of replicas their mean, as the gradients are that of theirs.
        """
        runs = self.backend.runs
        rows = self.all({r.index: r.losses for r in runs if len(r.stages) - 1 in self.stages_of(r)})
        for run in runs:
            found = [row[run.index] for row in rows if run.index in row]
            columns = zip(*found, strict=True)
            run.losses[:] = [sum(x / len(found) for x in column) for column in columns]

    def _gathered(self, local: Remembered) -> list[Remembered]:
        """What all ranks of the replica remember, on its first one; empty on the others."""
        rows: list[Any] = [None] * self.links.size
        with collective():
            first = self.links.members[self.links.replica][0]
            dist.gather_object(local, None if self.links.rank else rows, first, self.links.group)
        return [] if self.links.rank else rows


def links(timeout: float, devices: Sequence[str | torch.device] | None, replicas: int = 1) -> Links:
    """Links between CPUs; or between GPUs if every process has one for itself (collective)."""
    device = own_gpu(devices)
    if device is not None:
        torch.cuda.set_device(device)
    return Links(timeout, device or torch.device("cpu"), replicas)


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


class Reading(NamedTuple):
    """Rank 0 showed ``at_ns + offset_ns`` at `at_ns` on a rank's clock, within `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def read_clocks(links: Links) -> list[Reading]:
    """Compare all clocks with that of rank 0; empty on other ranks (collective).

    The reply that came back soonest bounds the error by half of its time (Cristian 1989).
    """
    found = [Reading(time.perf_counter_ns(), 0, 0)]
    for rank in range(1, links.size):
        if links.rank in (0, rank):
            rows = [_compare(rank, links) for _ in range(_ROUNDS)]
            found.append(min(rows, key=lambda r: r.error_ns))
    return [] if links.rank else found


def _compare(rank: int, links: Links) -> Reading:
    """Rank 0 asks another one for the time, which answers."""
    word, peer = torch.zeros(1, dtype=torch.int64), 0 if links.rank else rank
    asked_ns = time.perf_counter_ns()
    with collective():
        if not links.rank:
            links.group.send([word], peer, CHAIN).wait()
        links.group.recv([word], peer, CHAIN).wait()
        back_ns, there_ns = time.perf_counter_ns(), int(word)
        if links.rank:
            word[0] = back_ns
            links.group.send([word], peer, CHAIN).wait()
    return Reading(there_ns, (asked_ns + back_ns) // 2 - there_ns, (back_ns - asked_ns + 1) // 2)


def on_first_clock(rows: Sequence[Timed], reading: Reading) -> list[Timed]:
    """Records or copies of a rank in the time of rank 0.

    An offset within its error is none: processes of one machine share a clock.
    """
    shift = reading.offset_ns
    if abs(shift) <= reading.error_ns:
        return list(rows)
    return [r._replace(start_ns=r.start_ns + shift, end_ns=r.end_ns + shift) for r in rows]


def in_topological_order(
    run_plan: RunPlan, records: Sequence[Sequence[Record]], cut: Moment = (0, 0)
) -> list[Record]:
    """Records of all devices in an order in which every block comes after all it has waited for.

    Those from a segment and cycle on.
    """
    first, cycle = cut
    at = {(r.segment, r.operation, r.cycle): r for row in records for r in row}
    return [
        at[key]
        for number in range(first, len(run_plan.segments))
        for now in Walk(run_plan.segments[number], cycle if number == first else 0)
        if (key := (number, now.operation, now.cycle)) in at  # others sent tombstones
    ]
