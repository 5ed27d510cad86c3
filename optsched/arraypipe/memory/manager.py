"""Memory of a device that cannot hold all states: slots, filled ahead of the blocks."""

from __future__ import annotations

from itertools import dropwhile
from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe.memory.accesses import (
    PIECES,
    Access,
    State,
    accesses_of,
    cycle_of,
)
from optsched.arraypipe.memory.budget import DeviceBytes, Limits, reserved
from optsched.arraypipe.memory.cuda_engine import CudaEngine
from optsched.arraypipe.memory.residency import Residency, residency
from optsched.arraypipe.memory.stage_bytes import boundary_bytes, extra_bytes
from optsched.arraypipe.memory.state import BoundState, flat_bytes, layout_of
from optsched.arraypipe.memory.transfers import IN, CopyEngine, Transfers
from optsched.arraypipe.plan.segments import device_stream
from optsched.arraypipe.plan.types import Copied
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.worker import Memory
from optsched.errors import InputError, InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from optsched.arraypipe.memory.budget import MessageBytes
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Instance
    from optsched.arraypipe.runtime.state import JobRun, JobStage
    from optsched.arraypipe.runtime.types import Pause


class DeviceSlots:
    """The states of one device of the plan, which share its slots; the `Carrier` of their bytes.

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
        self.runs, self.segments, self.number, self.place = runs, segments, number, place
        # by piece and slot
        self.slots = [
            flat_bytes([size] * n, place, False)
            for n, size in zip(decided.slots, decided.sizes, strict=True)
        ]
        if isinstance(engine, CudaEngine):
            engine.adopt([flat for flats in self.slots for flat in flats])
        self.index: dict[tuple[int, int], int] = {}  # of a state, by (job, stage)
        self.states: list[BoundState] = []
        self.transfers = Transfers(decided.slots, decided.sizes, 2 * accesses + 1, engine, self)
        self.announced = 0  # segments whose accesses have been announced
        self.open: Access | None = None
        self.version = 0  # of the weights when the open access began

    def state_of(self, job: int, stage: int) -> int:
        """Index of a state; a new one is moved into a store."""
        if (job, stage) not in self.index:
            found = self.runs[job].stages[stage]
            self.index[job, stage] = len(self.states)
            self.states.append(BoundState(found, self.runs[job].title, on_gpu(self.place)))
            layout = self.states[-1].layout
            for t in (*layout.resident, *layout.shared):
                t.data = t.data.to(self.place)
        return self.index[job, stage]

    def enter(self, job: int, stage: int, kind: str, now: Instance | None) -> JobStage:
        """Have a state in a slot, for blocks launched from now on.

        An update after the backward of the same block is an access of its own.
        """
        self.leave()
        index = self.state_of(job, stage)
        if now is not None and len(self.segments) > self.announced:
            self.announced = len(self.segments)
            self._free()
            self.transfers.announce(self._ahead(now))
        # an access that was not announced is assumed to leave or use a graph
        graph = {"F": 1, "B": -1}.get(kind, 0)
        at = () if now is None else (False, now.operation, now.iteration)
        self.open, state = Access(index, kind, graph, *at), self.states[index]
        for piece, slot in enumerate(self.transfers.enter(self.open)):
            if state.slots[piece] != slot:
                state.point(piece, slot, self.slots[piece][slot])
        if kind in "BW" and state.graph_slot not in (-1, state.slots[0]) and _graphs(state.stage):
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
        if _graphs(state.stage):
            state.graph_slot = state.slots[0]
        self.transfers.leave()

    def close(self) -> None:
        """Bring every state back into host memory, and point its job there."""
        self.leave()
        self.transfers.flush()
        for index in range(len(self.states)):
            for piece in range(len(PIECES)):
                self.leaves(index, piece)
        self._free(True)

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
                yield from accesses_of(
                    plan, block, self.state_of(run.index, block.stage), run.job.recompute,
                    instance.iteration,
                )  # fmt: skip

    def move(
        self, direction: str, piece: int, slot: int, state: int, start: int, stop: int
    ) -> None:
        """Copy a range of bytes between a state's store and a slot."""
        store = self.states[state].store[piece][start:stop]
        here = self.slots[piece][slot][start:stop]
        target, source = (here, store) if direction == IN else (store, here)
        target.copy_(source, non_blocking=True)

    def size(self, state: int, piece: int) -> int:
        """Bytes to copy of a piece."""
        return self.states[state].size(piece)

    def label(self, state: int) -> tuple[int, int, int]:
        """Device, job and stage of a state."""
        stage = self.states[state].stage
        return self.number, stage.job, stage.index

    def leaves(self, state: int, piece: int) -> None:
        """Point a piece of a state to its store."""
        found = self.states[state]
        if found.slots[piece] >= 0:
            found.point(piece, -1, found.store[piece])


class Share(NamedTuple):
    """The part of a process that has one of the devices."""

    device: int
    bytes: MessageBytes  # receive windows and outboxes of some jobs of the plan


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

    def enter(self, job: int, stage: int, kind: str, now: Instance | None) -> JobStage:
        """Have a state where its blocks run."""
        if (job, stage) not in self.owner:
            now_on = self.segments[-1]
            blocks = (b for b in now_on.plan.blocks if now_on.slots[b.job] == job)
            device = next(b.device for b in blocks if b.stage == stage)
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
    def copies(self) -> list[Copied]:
        """All copies so far; on a GPU those that are known to be over."""
        rows = ((c.label, c) for c in self.engine.copies)
        return [
            Copied(device, c.direction, job, stage, c.start_ns, c.end_ns, c.size)
            for (device, job, stage), c in rows
        ]

    def forget(self, before_ns: int) -> None:
        """Forget the times of copies that ended before a time."""
        copies = self.engine.copies
        copies[:] = [c for c in copies if c.end_ns >= before_ns]

    def close(self) -> None:
        """Bring all states back to their jobs."""
        for memory in self.slotted.values():
            memory.close()


def memory_of(
    runs: Sequence[JobRun],
    segments: Sequence[Segment],
    limit: int | None,
    share: Share | None = None,
) -> Memory:
    """The memory of a run: everything resident if it fits, else slots.

    `limit` are the bytes of every device; `share` says which device this process has, in a run on
    ranks. `InputError`: it does not fit, not even in slots; nothing has been moved.
    """
    if limit is None:
        return Memory(runs)
    first, extra = segments[0], extra_bytes(runs, segments[0])

    known = {
        (job, stage): row
        for (slot, stage), row in extra.items()
        if runs[job := first.slots[slot]].stages[stage].local
    }
    limits = Limits(runs, {}, known)
    note_states(limits, runs)
    devices = range(len(first.plan.sequences)) if share is None else (share.device,)
    here = next(b for b in first.plan.blocks if b.device in devices)
    place = runs[first.slots[here.job]].stages[here.stage].device
    reserve = reserved(place, len(devices))
    decided, lengths = {}, {}
    for d in devices:
        pairs, accesses = cycle_of(first.plan, d, lambda k: runs[first.slots[k]].job.recompute)
        states = [limits.state(first.slots[k], stage) for k, stage in pairs]
        shared = {
            t.data_ptr(): t.nbytes
            for s in states for t in runs[s.job].stages[s.stage].shared_tensors()
        }  # fmt: skip
        device = DeviceBytes(limit, reserve, sum(shared.values()))
        left = device.for_states(first.plan, d, extra, share and share.bytes)
        decided[d] = residency(states, accesses, left, first.plan.devices[d])
        lengths[d], limits.devices[d] = len(accesses), device._replace(decided=decided[d])
    memory = Memory(runs)  # all devices have been checked: nothing has been moved before
    if any(found.slots[0] for found in decided.values()):
        engine = CudaEngine(place) if on_gpu(place) else CopyEngine()
        memory = SlotMemory(runs, segments, engine, {
            d: DeviceSlots(runs, segments, d, found, lengths[d], engine, place)
            for d, found in decided.items() if found.slots[0]
        })  # fmt: skip
    memory.limits = limits
    return memory


def note_states(limits: Limits, runs: Iterable[JobRun]) -> None:
    """Note the bytes of the states of jobs that this process trains."""
    for run in runs:
        for stage in run.stages:
            if stage.local:
                at = run.index, stage.index
                try:
                    layout = layout_of(stage, run.title)
                    resident = boundary_bytes(layout.resident)
                    limits.states[at] = State(*at, layout.bytes, resident)
                except InputError as error:
                    limits.states[at] = str(error)


def _graphs(stage: JobStage) -> bool:
    """Whether a graph that refers to the weights waits for its backward."""
    return any(kept.roots is not None or kept.branches for kept in stage.kept.values())
