"""Memory of a device that cannot hold all states: slots, filled ahead of the blocks."""

from __future__ import annotations

from functools import cache
from itertools import dropwhile
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from optsched.arraypipe.memory.budget import Limits, Room, reserved
from optsched.arraypipe.memory.copies import Carrier, Transfers
from optsched.arraypipe.memory.cuda_engine import CudaEngine, link_speed
from optsched.arraypipe.memory.engines import IN, OUT, PCIE_4, CopyEngine, HostLink
from optsched.arraypipe.memory.residency import ResidencyPlan
from optsched.arraypipe.memory.slots import MovingState, flat_bytes, layout_of
from optsched.arraypipe.memory.stage_bytes import beside_states
from optsched.arraypipe.memory.types import (
    BUFFERS,
    MOMENTS,
    POOLS,
    WEIGHTS,
    State,
    Visit,
    cycle_of,
    visits_of,
)
from optsched.arraypipe.plan.segments import device_stream
from optsched.arraypipe.plan.types import Copied
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.worker import Memory
from optsched.errors import InputError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe.memory.budget import MessageBytes
    from optsched.arraypipe.memory.stage_bytes import MakeCriterion
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Instance
    from optsched.arraypipe.runtime.state import JobRun, JobStage
    from optsched.arraypipe.runtime.types import Pause


_PAGE_LOCKED: Final = 64 * 2**20  # bytes to measure a link with: little to page-lock


class Slotted(Carrier):
    """States of one device that take turns in slots; the rest of them waits in host memory.

    Nothing that a job computes depends on it: what is moved are bytes. Sizes of the slots and how
    to replace are those of `plan`, made for the first of the segments. A job's later visits may be
    missing from those that are announced, and it may go on after it seemed over.
    """

    def __init__(
        self,
        runs: Sequence[JobRun],
        segments: Sequence[Segment],
        number: int,
        plan: ResidencyPlan,
        device: torch.device,
    ) -> None:
        super().__init__(plan.states)
        self.runs, self.segments, self.number, self.device = runs, segments, number, device
        self.begun = 0  # segments whose visits have been announced
        most = plan.capacity
        # by pool and slot: flat bytes of its pieces
        self.slots = [
            [
                dict(zip(pool, flat_bytes([most[p] for p in pool], device, False), strict=True))
                for _ in range(rule.slots)
            ]
            for pool, rule in zip(POOLS, plan.rules, strict=True)
        ]
        self.engine = CopyEngine()
        if on_gpu(device):
            self.engine = engine = CudaEngine(device)
            for flats in (*self.slots[0], *self.slots[1]):
                engine.adopt(flats.values())
        self.index: dict[tuple[int, int], int] = {}  # of a state, by (job, stage)
        self.moving: list[MovingState] = []
        for state in plan.states:
            self.state_of(state.job, state.stage)
        horizon = 2 * len(plan.visits) + 1
        self.transfers = Transfers(plan.rules, horizon, self.engine, self, plan.chunk)
        self.open: Visit | None = None
        self.version = 0  # of the weights when they were entered

    def enter(self, job: int, stage: int, kind: str, now: Instance | None) -> JobStage:
        """Have a state in a slot, for blocks launched from now on.

        An update after the B of the same block is a visit of its own.
        """
        self.leave()
        operation, iteration = (-1, -1) if now is None else (now.operation, now.iteration)
        state = self.state_of(job, stage)
        # whether there is a graph is known of announced visits only; of others it is assumed
        graph = {"F": 1, "B": -1}.get(kind, 0)
        if now is not None and len(self.segments) > self.begun:
            self.begun = len(self.segments)
            self.transfers.renew(self._ahead(now))
        visit = Visit(state, kind, graph, operation=operation, iteration=iteration)
        self.open, moves = self.transfers.enter(visit)
        moving, slot = self.moving[state], moves[0].slot.index
        if kind == "B" and moving.graph_slot not in (-1, slot) and _graphs(moving.stage):
            raise InternalError(
                f"the state of job {moving.title}, stage {stage} has left its slot between "
                f"forward and backward"
            )
        flats = self.slots[0][slot]
        moving.bind(slot, [flats[piece] for piece in POOLS[0]])
        self.version = flats[WEIGHTS]._version
        if kind == "U":
            slot = moves[1].slot.index
            moving.bind_optimizer(slot, self.slots[1][slot][MOMENTS])
        return moving.stage

    def close(self) -> None:
        """Bring every state back into host memory, and point its job there."""
        self.leave()
        self.transfers.flush()
        for moving in self.moving:
            moving.park()
            moving.bind_optimizer(-1)

    def state_of(self, job: int, stage: int) -> int:
        """Index of a state; a new one is moved into a store."""
        pair = (job, stage)
        if pair not in self.index:
            run = self.runs[job]
            self.index[pair] = len(self.moving)
            self.moving.append(MovingState(run.stages[stage], run.title, on_gpu(self.device)))
        return self.index[pair]

    def _ahead(self, now: Instance) -> Iterator[Visit]:
        """The visits to come in the newest segment, from a block on.

        Blocks of jobs that have ended are passed over: they are not run, or send tombstones.
        """
        segment = self.segments[-1]
        for instance in dropwhile(now.__ne__, device_stream(segment, self.number, now.cycle)):
            block = segment.plan.blocks[instance.operation]
            job = segment.seats[block.job]
            if instance.iteration < self.runs[job].end:
                state, recompute = self.state_of(job, block.stage), self.runs[job].job.recompute
                yield from visits_of(segment.plan, block, state, recompute, instance.iteration)

    def leave(self) -> None:
        """The block has been launched; start the copies that had to wait for it."""
        visit, self.open = self.open, None
        if visit is None:
            return
        moving = self.moving[visit.state]
        if visit.kind == "U":
            moving.absorb()
        elif self.slots[0][moving.slot][WEIGHTS]._version != self.version:
            raise InputError(
                f"job {moving.title}: stage {moving.stage.index} changes its weights in place "
                f"outside of the update; run without a memory limit"
            )
        if visit.kind in ("F", "R") and _graphs(moving.stage):
            moving.graph_slot = moving.slot
        self.transfers.leave()

    def mover(
        self, direction: str, slot: int, state: int, piece: int, start: int, stop: int
    ) -> Callable[[], None]:
        """The copy of a range of bytes between a state's store and a slot."""
        moving = self.moving[state]
        here = self.slots[int(piece == MOMENTS)][slot][piece][start:stop]
        there = moving.bytes[piece][start:stop]
        pairs = [(here, there) if direction == IN else (there, here)]
        if direction == OUT and piece == BUFFERS and stop == moving.size(piece):
            pairs += moving.replaced()

        def move() -> None:
            for target, source in pairs:
                # by way of a temporary the host would read it before the copy is there
                target.copy_(source, non_blocking=target.stride() == source.stride())
                if source.is_cuda and source is not here:  # the streams have adopted the slots
                    source.record_stream(torch.cuda.current_stream(source.device))

        return move

    def size(self, state: int, piece: int) -> int:
        """Bytes to copy of a piece."""
        return self.moving[state].size(piece)

    def leaves(self, pool: int, slot: int, state: int) -> None:
        """A state is out of a slot."""
        moving = self.moving[state]
        if pool == 0 and moving.slot == slot:
            moving.park()
        if pool == 1 and moving.moments_slot == slot:
            moving.bind_optimizer(-1)


class Share(NamedTuple):
    """The part of a process that has one of the devices."""

    device: int
    bytes: MessageBytes  # receive windows and outboxes of so many jobs of the plan
    taken: int = 0  # bytes of its GPU that communicators have taken


class PerDevice(Memory):
    """Memories of all devices of a process; parameters as of `memory_of`."""

    moves = True

    def __init__(
        self,
        runs: Sequence[JobRun],
        segments: Sequence[Segment],
        limit: int,
        criterion: MakeCriterion,
        share: Share | None = None,
    ) -> None:
        self.runs, self.segments, self.resident = runs, segments, Memory(runs)
        self.slotted: dict[int, Slotted] = {}  # by device; the states of others are resident
        self.home: dict[tuple[int, int], Slotted | None] = {}  # by (job, stage)
        first, beside = segments[0], beside_states(runs, segments[0], criterion)

        @cache
        def sizes(job: int, stage: int) -> Sequence[int]:
            return layout_of(runs[job].stages[stage], runs[job].title).bytes

        known = {(first.seats[seat], stage): row for (seat, stage), row in beside.items()}
        rooms: list[Room | None] = [None] * len(first.plan.sequences)
        self.limits = self.resident.limits = Limits(runs, rooms, sizes, known)
        here = range(len(rooms)) if share is None else (share.device,)
        cycles = {
            d: cycle_of(first.plan, d, lambda k: runs[first.seats[k]].job.recompute) for d in here
        }
        pairs = {d: [(first.seats[k], stage) for k, stage in cycles[d][0]] for d in here}
        places = [
            runs[pairs[d][0][0]].stages[pairs[d][0][1]].device if pairs[d] else torch.device("cpu")
            for d in here
        ]
        links = {place: _link_of(place, places.count(place)) for place in set(places)}
        self.plans: list[ResidencyPlan] = []
        for d, place in zip(here, places, strict=True):
            room = Room(limit, reserved(place, places, share.taken if share else 0))
            left = room.for_states(first.plan, d, beside, share and share.bytes)
            states = [State(*pair, sizes(*pair)) for pair in pairs[d]]
            name = first.plan.devices[d]
            plan = ResidencyPlan.compile(states, cycles[d][1], left, links[place], device=name)
            self.plans.append(plan)
            rooms[d] = room._replace(slots=plan.slots, slot=plan.capacity, taken=plan.taken)
        # all devices have been checked: nothing has been moved before
        for d, place, plan in zip(here, places, self.plans, strict=True):
            if plan.rules:
                self.slotted[d] = Slotted(runs, segments, d, plan, place)
            self.home.update(dict.fromkeys(pairs[d], self.slotted.get(d)))

    def enter(self, job: int, stage: int, kind: str, now: Instance | None) -> JobStage:
        """Ask the memory of the state's device."""
        pair = (job, stage)
        if pair not in self.home:  # it has come in with the newest segment
            segment = self.segments[-1]
            blocks = (b for b in segment.plan.blocks if segment.seats[b.job] == job)
            self.home[pair] = self.slotted.get(next(b.device for b in blocks if b.stage == stage))
        return (self.home[pair] or self.resident).enter(job, stage, kind, now)

    def leave(self, job: int, stage: int, kind: str) -> None:
        """Tell the memory of the state's device."""
        if home := self.home[job, stage]:
            home.leave()

    @property
    def exposed_ns(self) -> int:
        """Time that blocks of all devices have waited for copies."""
        return int(sum(memory.engine.exposed_ns for memory in self.slotted.values()))

    def pauses(self) -> list[Pause]:
        """Events around what blocks have waited for on GPUs since the last call."""
        found: list[Pause] = []
        for memory in self.slotted.values():
            found += memory.engine.pauses
            memory.engine.pauses.clear()
        return found

    @property
    def copies(self) -> list[Copied]:
        """All copies so far, device by device; on a GPU those that are known to be over."""
        found = []
        for d, memory in self.slotted.items():
            pairs = list(memory.index)
            found += [
                Copied(d, c.direction, *pairs[c.state], c.start_ns, c.end_ns, c.size)
                for c in memory.engine.copies
            ]
        return found

    def forget(self, before_ns: int) -> None:
        """Forget the times of copies that ended before a time."""
        for memory in self.slotted.values():
            copies = memory.engine.copies
            copies[:] = [c for c in copies if c.end_ns >= before_ns]

    def close(self) -> None:
        """Bring all states back to their jobs."""
        for memory in self.slotted.values():
            memory.close()


def memory_of(
    runs: Sequence[JobRun],
    segments: Sequence[Segment],
    limit: int | None,
    criterion: MakeCriterion,
    share: Share | None = None,
) -> Memory:
    """The memory of a run: everything resident if it fits, else slots.

    `limit` are the bytes of every device; `criterion` is the loss of a micro-batch, for what it
    keeps; `share` says which device this process has, if others have the rest. `InputError`: it
    does not fit, not even in slots; nothing has been moved.
    """
    if limit is None:
        return Memory(runs)
    if segments[0].plan.split:
        raise InputError("memory: expected a schedule without W blocks (split backward)")
    memory = PerDevice(runs, segments, limit, criterion, share)
    return memory if memory.slotted else memory.resident


def _link_of(device: torch.device, shared: int) -> HostLink:
    """The part of a GPU's link that each of so many devices on it has, both ways at once."""
    if device.type != "cuda":
        return PCIE_4
    host = torch.device("cpu")
    (inward, there_ns), (outward, back_ns) = (
        link_speed(*pair, _PAGE_LOCKED) for pair in ((host, device), (device, host))
    )
    torch.cuda.empty_cache()  # the streams of the blocks cannot use what this one has left
    return HostLink(inward / shared, outward / shared, max(there_ns, back_ns))


def _graphs(stage: JobStage) -> bool:
    """Whether a graph that points at the weights waits for its backward."""
    return any(kept.roots is not None for kept in stage.kept.values())
