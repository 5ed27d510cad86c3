"""Memory of a device that cannot hold all states: slots, filled ahead of the blocks."""

from __future__ import annotations

from itertools import dropwhile
from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe.memory.budget import (
    PIECES,
    Access,
    DeviceBytes,
    Limits,
    Residency,
    accesses_of,
    cycle_of,
    reserved,
)
from optsched.arraypipe.memory.cuda_engine import CudaEngine
from optsched.arraypipe.memory.state import BoundState, bytes_of_stage, flat_bytes
from optsched.arraypipe.memory.transfers import IN, CopyEngine, Transfers
from optsched.arraypipe.plan.segments import device_stream
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.worker import Memory
from optsched.errors import InputError, InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Copied, Instance
    from optsched.arraypipe.runtime.cuda_streams import Pause
    from optsched.arraypipe.runtime.state import JobRun, JobStage


class DeviceSlots(Transfers):
    """The states of one device of the plan, which share its slots.

    Nothing that a job computes depends on it. Numbers and sizes of the slots are those that were
    decided for the first of the segments, which has so many accesses in a cycle.
    """

    def __init__(
        self,
        runs: Sequence[JobRun],
        segments: Sequence[Segment],
        number: int,
        decided: Residency,
        accesses: int,
        engine: CopyEngine,
        place: torch.device,
    ) -> None:
        super().__init__(*decided, 2 * accesses + 1, engine)
        self.runs, self.segments, self.number, self.place = runs, segments, number, place
        self.flats = [  # by piece and slot
            flat_bytes([size] * n, place, False) for n, size in zip(*decided, strict=True)
        ]
        if isinstance(engine, CudaEngine):
            engine.adopt([flat for flats in self.flats for flat in flats])
        self.index: dict[tuple[int, int], int] = {}  # of a state, by (job, stage)
        self.states: list[BoundState] = []
        self.announced = 0  # segments with announced accesses
        self.open: Access | None = None
        self.version = 0  # of the weights when the open access began

    def enter(self, job: int, stage: int, kind: str, now: Instance) -> JobStage:
        """Copy a state into a slot, for blocks launched from now on.

        An update after the backward of the same block is an access of its own.
        """
        self.leave()
        index = self._index(job, stage)
        if len(self.segments) > self.announced:
            self.announced = len(self.segments)
            self._free()
            self.announce(self._ahead(now))
        # an access that was not announced is assumed to leave or use a graph
        graph = {"F": 1, "B": -1}.get(kind, 0)
        self.open = Access(index, kind, graph, False, now.operation, now.iteration)
        state = self.states[index]
        for piece, slot in enumerate(self.take(self.open)):
            if state.slots[piece] != slot:
                state.point(piece, slot, self.flats[piece][slot])
        if kind in "BW" and state.graph_slot not in (-1, state.slots[0]) and state.has_graphs():
            raise InternalError(
                f"the state of job {state.title}, stage {stage} has left its slot between "
                f"forward and backward"
            )
        self.version = state.version()
        return state.stage

    def leave(self) -> None:
        """Start the copies that had to wait for the block, which has been launched."""
        access, self.open = self.open, None
        if access is None:
            return
        state = self.states[access.state]
        if access.kind == "U":
            state.absorb()
        elif state.version() != self.version:
            raise InputError(
                f"job {state.title}: stage {state.stage.index} changes its weights in place "
                f"outside of the update; run without a memory limit"
            )
        if state.has_graphs():
            state.graph_slot = state.slots[0]
        self.release()

    def close(self) -> None:
        """Bring every state back into host memory, and point its job there."""
        self.leave()
        self.flush()
        for index in range(len(self.states)):
            for piece in range(len(PIECES)):
                self.leaves(index, piece)
        self._free(True)

    def move(
        self, direction: str, piece: int, slot: int, state: int, start: int, stop: int
    ) -> None:
        """Copy a range of bytes between a state's store and a slot."""
        store = self.states[state].store[piece][start:stop]
        here = self.flats[piece][slot][start:stop]
        target, source = (here, store) if direction == IN else (store, here)
        target.copy_(source, non_blocking=True)

    def size(self, state: int, piece: int) -> int:
        """Return bytes to copy of a piece."""
        return self.states[state].size(piece)

    def label(self, state: int) -> tuple[int, int, int]:
        """Return device, job and stage of a state."""
        stage = self.states[state].stage
        return self.number, stage.job, stage.index

    def leaves(self, state: int, piece: int) -> None:
        """Point a piece of a state to its store."""
        found = self.states[state]
        if found.slots[piece] >= 0:
            found.point(piece, -1, found.store[piece])

    def _index(self, job: int, stage: int) -> int:
        """Return index of a state; a new one is moved into a store."""
        if (job, stage) not in self.index:
            run = self.runs[job]
            self.index[job, stage] = len(self.states)
            self.states.append(BoundState(run.stages[stage], run.title, on_gpu(self.place)))
            layout = self.states[-1].layout
            for t in (*layout.resident, *layout.shared):
                t.data = t.data.to(self.place)
        return self.index[job, stage]

    def _free(self, all_jobs: bool = False) -> None:
        """Put buffers and copies of tied weights of ended jobs, or of all, on the host."""
        for state in self.states:
            if all_jobs or self.runs[state.stage.job].over:
                for t in state.layout.resident:
                    t.data = t.data.cpu()

    def _ahead(self, now: Instance) -> Iterator[Access]:
        """The accesses to come in the newest segment, from a block on, of jobs that go on."""
        segment = self.segments[-1]
        plan = segment.plan
        for instance in dropwhile(now.__ne__, device_stream(segment, self.number, now.cycle)):
            block = plan.blocks[instance.operation]
            run = self.runs[segment.slots[block.job]]
            if instance.iteration < run.end:
                index = self._index(run.index, block.stage)
                yield from accesses_of(plan, block, index, run.job.recompute, instance.iteration)


class SlotMemory(Memory):
    """Memory of a process that cannot hold all states; `slotted` are its devices with slots."""

    moves = True

    def __init__(
        self,
        runs: Sequence[JobRun],
        segments: Sequence[Segment],
        engine: CopyEngine,
        slotted: dict[int, DeviceSlots],
    ) -> None:
        super().__init__(runs)
        self.segments, self.engine, self.slotted = segments, engine, slotted
        self.owner: dict[tuple[int, int], DeviceSlots | None] = {}  # by (job, stage)

    def enter(self, job: int, stage: int, kind: str, now: Instance) -> JobStage:
        """Copy a state to where its blocks run."""
        if (job, stage) not in self.owner:
            device = self.segments[-1].plan.blocks[now.operation].device
            self.owner[job, stage] = self.slotted.get(device)
        owner = self.owner[job, stage]
        if owner is None:
            return super().enter(job, stage, kind, now)
        return owner.enter(job, stage, kind, now)

    def leave(self, job: int, stage: int, kind: str) -> None:
        """The block is over."""
        if owner := self.owner.get((job, stage)):
            owner.leave()

    @property
    def exposed_ns(self) -> int:
        """Time that blocks have waited for copies."""
        return int(self.engine.exposed_ns)

    def pauses(self) -> list[Pause]:
        """Events around what blocks have waited for on a GPU since the last call."""
        found, self.engine.pauses = self.engine.pauses, []
        return found

    @property
    def copies(self) -> Sequence[Copied]:
        """All copies so far; on a GPU those that are known to be over."""
        return self.engine.copies

    def forget(self, before_ns: int) -> None:
        """Forget the times of copies that ended before a time."""
        copies = self.engine.copies
        copies[:] = [c for c in copies if c.end_ns >= before_ns]

    def close(self) -> None:
        """Bring all states back to their jobs."""
        for memory in self.slotted.values():
            memory.close()


class Share(NamedTuple):
    """The part of a process that has one of the devices, and bytes of its messages."""

    device: int
    windows: int  # posted receives
    outboxes: int


def memory_of(
    runs: Sequence[JobRun],
    segments: Sequence[Segment],
    limit: int | None,
    share: Share | None = None,
) -> Memory:
    """Return the memory of a run: everything resident if it fits, else slots.

    `limit` are the bytes of every device; `share` says which device this process has, in a run on
    ranks. `InputError`: it does not fit, not even in slots; nothing has been moved.
    """
    memory = Memory(runs)
    if limit is None:
        return memory
    first, memory.limits = segments[0], Limits()
    plan, limits = first.plan, memory.limits
    note_bytes(limits, runs)
    known = limits.of(first)
    devices = range(len(plan.sequences)) if share is None else (share.device,)
    here = next(b for b in plan.blocks if b.device in devices)
    place = runs[first.slots[here.job]].stages[here.stage].device
    reserve = reserved(place, len(devices))
    for d in devices:
        shared = {
            t.data_ptr(): t.nbytes
            for slot, stage in cycle_of(plan, d, known)[0]
            for t in runs[first.slots[slot]].stages[stage].shared_tensors()
        }
        device = DeviceBytes(plan.devices[d], limit, reserve, sum(shared.values()))
        if share is not None:
            device = device._replace(windows=share.windows, outboxes=share.outboxes)
        limits.devices[d] = device.first(plan, d, known)
    # all devices have been checked: nothing has been moved before
    slotted = {d: found for d in devices if (found := limits.devices[d].decided) != Residency()}
    if not slotted:
        return memory
    engine = CudaEngine(place) if on_gpu(place) else CopyEngine()
    made = SlotMemory(runs, segments, engine, {
        d: DeviceSlots(
            runs, segments, d, decided, len(cycle_of(plan, d, known)[1]), engine, place
        )
        for d, decided in slotted.items()
    })  # fmt: skip
    made.limits = limits
    return made


def note_bytes(limits: Limits, runs: Iterable[JobRun]) -> None:
    """Note what jobs take on the stages that this process trains."""
    for run in runs:
        for stage in run.stages:
            if stage.local:
                limits.known[run.index, stage.index] = bytes_of_stage(run, stage)
