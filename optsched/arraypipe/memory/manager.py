"""Memory of a device that cannot hold all states: slots, filled ahead of the blocks."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from optsched.arraypipe.memory.budget import Limits, Room, check_limit, reserved, room_for_states
from optsched.arraypipe.memory.copies import Replacement, Transfers
from optsched.arraypipe.memory.cuda_engine import CudaEngine
from optsched.arraypipe.memory.engines import IN, OUT, HostEngine
from optsched.arraypipe.memory.residency import PCIE_4, UNITS, HostLink, ResidencyPlan
from optsched.arraypipe.memory.slots import Tenant, flat_bytes, layout_of
from optsched.arraypipe.memory.stage_bytes import beside_states
from optsched.arraypipe.memory.types import (
    BUFFERS,
    MOMENTS,
    PIECES,
    POOLS,
    WEIGHTS,
    Reader,
    State,
    Visit,
    cycle_of,
)
from optsched.arraypipe.plan.segments import device_stream
from optsched.arraypipe.plan.types import Copied
from optsched.arraypipe.profile.links import measure_host
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.worker import Resident
from optsched.errors import InputError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from optsched.arraypipe.job import JobStage
    from optsched.arraypipe.memory.budget import MessageBytes, StageBytes
    from optsched.arraypipe.memory.engines import CopyEngine
    from optsched.arraypipe.memory.stage_bytes import MakeCriterion
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Instance
    from optsched.arraypipe.runtime.types import Pause


class Run(Protocol):
    """What the memory has to know of a job (`JobRun`)."""

    job: Any
    title: str
    stages: list[JobStage]
    end: int


class Slotted:
    """States of one device that take turns in slots; the rest of them waits in host memory.

    Nothing that a job computes depends on it: what is moved are bytes.

    Parameters
    ----------
    runs
        All jobs; may grow.
    plan
        Sizes of the slots and how to replace; made for the first segment.
    pairs
        (job, stage) of every state of the plan.
    future
        The visits to come; a job's later ones may be missing from it, and it may go on after it
        seemed over.
    device
        Where the slots are.
    engine
        Runs the copies; by default the one of the device.
    ahead
        Where the future comes from, if it may change on the way.
    """

    moves = True

    def __init__(
        self,
        runs: Sequence[Run],
        plan: ResidencyPlan,
        pairs: Sequence[tuple[int, int]],
        future: Iterator[Visit],
        device: torch.device,
        engine: CopyEngine | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self.runs, self.plan, self.device, self.ahead = runs, plan, device, ahead
        cuda = on_gpu(device)
        self.capacity = [max(s.bytes[piece] for s in plan.states) for piece in range(len(PIECES))]
        # by pool and slot: flat bytes of its pieces
        self.slots = [
            [self._flats(pool) for _ in range(rule.slots)]
            for pool, rule in zip(POOLS, plan.rules, strict=True)
        ]
        self.engine: CopyEngine = engine or (CudaEngine(device) if cuda else HostEngine())
        if isinstance(self.engine, CudaEngine):
            for flats in (*self.slots[0], *self.slots[1]):
                self.engine.adopt(flats.values())
        self.index: dict[tuple[int, int], int] = {}
        self.tenants: list[Tenant] = []
        for pair in pairs:
            self.state_of(*pair)
        horizon = 2 * len(plan.visits) + 1
        replacement = Replacement(future, plan.rules, horizon)
        self.transfers = Transfers(replacement, self.engine, self, plan.chunk)
        self.open: Visit | None = None
        self.version = 0  # of the weights when they were entered

    def enter(self, job: int, stage: int, kind: str, now: Instance | None) -> JobStage:
        """Have a state in a slot, for blocks launched from now on.

        An update after the B of the same block is a visit of its own.
        """
        if self.open is not None:
            self._leave()
        operation, iteration = (-1, -1) if now is None else (now.operation, now.iteration)
        state = self.state_of(job, stage)
        # whether there is a graph is known of announced visits only; of others it is assumed
        graph = {"F": 1, "B": -1}.get(kind, 0)
        if self.ahead is not None and now is not None and self.ahead.is_over:
            self.transfers.renew()
            self.ahead.begin(now)
        self.transfers.meet(Visit(state, kind, graph, operation=operation, iteration=iteration))
        decision = self.transfers.enter()
        assert decision is not None
        assert decision.visit.state == state
        self.open = decision.visit
        tenant, slot = self.tenants[state], decision.moves[0].slot
        if kind == "B" and tenant.graph_slot not in (-1, slot) and _graphs(tenant.stage):
            raise InternalError(
                f"the state of job {tenant.title}, stage {stage} has left its slot between "
                f"forward and backward"
            )
        flats = self.slots[0][slot]
        tenant.bind(slot, [flats[piece] for piece in POOLS[0]])
        self.version = flats[WEIGHTS]._version
        if kind == "U":
            shelf = decision.moves[1].slot
            tenant.bind_optimizer(shelf, self.slots[1][shelf][MOMENTS])
        return tenant.stage

    def leave(self, job: int, stage: int, kind: str) -> None:
        """The block has been launched; start the copies that had to wait for it."""
        if self.open is not None:
            self._leave()

    @property
    def exposed(self) -> int:
        """Nanoseconds that blocks have waited for copies; on a GPU those that are over."""
        return int(self.engine.exposed)

    def close(self) -> None:
        """Bring every state back into host memory, and point its job there."""
        if self.open is not None:
            self._leave()
        self.transfers.flush()
        for tenant in self.tenants:
            tenant.park()
            tenant.park_optimizer()

    def state_of(self, job: int, stage: int) -> int:
        """Index of a state; a new one is moved into a store."""
        pair = (job, stage)
        if pair not in self.index:
            run = self.runs[job]
            tenant = Tenant(run.stages[stage], run.title, on_gpu(self.device))
            for piece, (size, room) in enumerate(
                zip(tenant.layout.bytes, self.capacity, strict=True)
            ):
                if size > room:
                    raise InputError(
                        f"memory: the {PIECES[piece]} of job {run.title}, stage {stage} take "
                        f"{size} bytes, a slot has {room}"
                    )
            self.index[pair] = len(self.tenants)
            self.tenants.append(tenant)
        return self.index[pair]

    def _leave(self) -> None:
        visit, self.open = self.open, None
        assert visit is not None
        tenant = self.tenants[visit.state]
        if visit.kind == "U":
            tenant.absorb()
        elif self.slots[0][tenant.slot][WEIGHTS]._version != self.version:
            raise InputError(
                f"job {tenant.title}: stage {tenant.stage.index} changes its weights in place "
                f"outside of the update; run without a memory limit"
            )
        if visit.kind in ("F", "R") and _graphs(tenant.stage):
            tenant.graph_slot = tenant.slot
        self.transfers.leave()

    # what `Transfers` asks of a carrier

    def mover(
        self, direction: str, slot: int, state: int, piece: int, start: int, stop: int
    ) -> Callable[[], None]:
        """The copy of a range of bytes between a state's store and a slot."""
        tenant = self.tenants[state]
        here = self.slots[int(piece == MOMENTS)][slot][piece][start:stop]
        there = tenant.bytes[piece][start:stop]
        pairs = [(here, there) if direction == IN else (there, here)]
        if direction == OUT and piece == BUFFERS and stop == tenant.size(piece):
            pairs += tenant.replaced()

        def move() -> None:
            for target, source in pairs:
                # by way of a temporary the host would read it before the copy is there
                target.copy_(source, non_blocking=target.stride() == source.stride())
                if source.is_cuda and source is not here:  # the streams have adopted the slots
                    source.record_stream(torch.cuda.current_stream(source.device))

        return move

    def size(self, state: int, piece: int) -> int:
        """Bytes to copy of a piece."""
        return self.tenants[state].size(piece)

    def leaves(self, pool: int, slot: int, state: int) -> None:
        """A state is out of a slot."""
        tenant = self.tenants[state]
        if pool == 0 and tenant.slot == slot:
            tenant.park()
        if pool == 1 and tenant.shelf == slot:
            tenant.park_optimizer()

    def _flats(self, pool: Sequence[int]) -> dict[int, Tensor]:
        made = flat_bytes([self.capacity[piece] for piece in pool], self.device, False)
        return dict(zip(pool, made, strict=True))


class PerDevice:
    """Memories of all devices of a process.

    Parameters
    ----------
    runs
        All jobs; may grow.
    segments
        What is run, one after the other; may grow.
    limit
        Bytes of every device.
    link
        To the host, in bytes per second, for predictions; by default measured on GPUs.
    devices
        Where the slots are, by device of the plan; by default where the stages are.
    criterion
        The loss of a micro-batch, for what it keeps (`beside_states`).
    share
        The only device of this process, if others have the rest.
    """

    moves = True

    def __init__(
        self,
        runs: Sequence[Run],
        segments: Sequence[Segment],
        limit: int,
        link: HostLink | None = None,
        devices: Sequence[torch.device] = (),
        criterion: MakeCriterion | None = None,
        share: Share | None = None,
    ) -> None:
        self.runs, self.segments = runs, segments
        self.resident = Resident(runs)  # type: ignore[arg-type]
        self.plans: list[ResidencyPlan] = []
        self.home: dict[tuple[int, int], Slotted | None] = {}
        self.refused: dict[tuple[int, int], InputError] = {}  # too large for the slots
        segment = segments[0]
        beside = beside_states(runs, segment, criterion)
        prepared = []
        n = len(segment.plan.sequences)
        self.slotted: list[Slotted | None] = [None] * n  # by device; None: all are resident
        limits = _limits(runs, segment, beside, n)
        self.limits: Limits | None = limits
        self.resident.limits = limits
        here = range(n) if share is None else (share.device,)
        for d in here:
            pairs, visits = cycle_of(segment.plan, d, lambda seat: self._recomputes(segment, seat))
            pairs = [(segment.seats[seat], stage) for seat, stage in pairs]
            prepared.append((pairs, visits, devices[d] if devices else _device(runs, pairs)))
        places = [device for *_, device in prepared]
        links = {place: link or _link_of(place, places.count(place)) for place in set(places)}
        taken, messages = (0, None) if share is None else (share.taken, share.bytes)
        for d, (pairs, visits, device) in zip(here, prepared, strict=True):
            cuda = reserved(device, places, taken)
            plan = residency(
                runs, segment, d, pairs, visits, limit, links[device], cuda, beside, messages
            )
            self.plans.append(plan)
            limits.rooms[d] = _room(plan, limit, cuda)
        # all devices have been checked: nothing has been moved before
        for d, plan, (pairs, _, device) in zip(here, self.plans, prepared, strict=True):
            made = None
            if plan.rules:
                ahead = Ahead(self, d)
                made = Slotted(runs, plan, pairs, ahead, device, ahead=ahead)
            self.slotted[d] = made
            self.home.update(dict.fromkeys(pairs, made))

    def enter(self, job: int, stage: int, kind: str, now: Instance | None) -> JobStage:
        """Ask the memory of the state's device."""
        if (job, stage) in self.refused:
            raise self.refused[job, stage]
        return self._of(job, stage).enter(job, stage, kind, now)

    def leave(self, job: int, stage: int, kind: str) -> None:
        """Tell the memory of the state's device."""
        self._of(job, stage).leave(job, stage, kind)

    @property
    def exposed(self) -> int:
        """Nanoseconds that blocks of all devices have waited for copies."""
        return sum(memory.exposed for memory in self.slotted if memory is not None)

    def pauses(self) -> list[Pause]:
        """Events around what blocks have waited for on GPUs since the last call."""
        found: list[Pause] = []
        for memory in self.slotted:
            if memory is not None and memory.engine.pauses:
                found += memory.engine.pauses
                memory.engine.pauses.clear()
        return found

    @property
    def copies(self) -> list[Copied]:
        """All copies so far, device by device; on a GPU those that are known to be over."""
        found = []
        for d, memory in enumerate(self.slotted):
            if memory is not None:
                pairs = list(memory.index)
                found += [
                    Copied(d, c.direction, *pairs[c.state], c.start, c.end, c.size)
                    for c in memory.engine.copies
                ]
        return found

    def forget(self, before: int) -> None:
        """Forget the times of copies that ended before a time."""
        for memory in self.slotted:
            if memory is not None:
                copies = memory.engine.copies
                copies[:] = [c for c in copies if c.end >= before]

    def close(self) -> None:
        """Bring all states back to their jobs."""
        for memory in self.slotted:
            if memory is not None:
                memory.close()

    def state(self, device: int, job: int, stage: int) -> int:
        """Index of a state in the memory of a device; -1: it belongs to another, or to none.

        What does not fit into a slot is nothing to prepare for: its job fails when it is its turn.
        """
        made, pair = self.slotted[device], (job, stage)
        if made is None or self.home.setdefault(pair, made) is not made or pair in self.refused:
            return -1
        try:
            return made.state_of(job, stage)
        except InputError as error:
            self.refused[pair] = error
            return -1

    def runs_still(self, job: int, iteration: int) -> bool:
        """Whether a job has this iteration before it, as far as is known here."""
        return iteration < self.runs[job].end

    def recomputes(self, job: int) -> bool:
        """Whether a job keeps inputs only."""
        return bool(self.runs[job].job.recompute)

    def _recomputes(self, segment: Segment, seat: int) -> bool:
        return self.recomputes(segment.seats[seat])

    def _of(self, job: int, stage: int) -> Slotted | Resident:
        pair = (job, stage)
        if pair not in self.home:  # it has come in with the newest segment
            segment = self.segments[-1]
            blocks = (b for b in segment.plan.blocks if segment.seats[b.job] == job)
            self.home[pair] = self.slotted[next(b.device for b in blocks if b.stage == stage)]
        return self.home[pair] or self.resident


class Ahead:
    """The visits of a device to come in the newest segment.

    When another segment has been added it `is_over`, and has to `begin` again: the old one may have
    been cut short. Blocks of jobs that have ended are passed over: they are not run, or send
    tombstones.
    """

    def __init__(self, memory: PerDevice, device: int) -> None:
        self.memory, self.device = memory, device
        self.blocks: Iterator[Instance] = iter(())
        self._open(0)

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Visit:
        while not self.ready:
            now = next(self.blocks)
            block = self.reader.plan.blocks[now.operation]
            if self.memory.runs_still(self.reader.seats[block.job], now.iteration):
                self.ready.extend(self.reader.visits(block, now.iteration))
        return self.ready.popleft()

    @property
    def is_over(self) -> bool:
        """Whether another segment has begun."""
        return len(self.memory.segments) > self.count

    def begin(self, now: Instance) -> None:
        """Go on with this block of the newest segment."""
        self._open(now.cycle)
        self.blocks = dropwhile(now.__ne__, self.blocks)

    def _open(self, cycle: int) -> None:
        memory = self.memory
        segment, self.count = memory.segments[-1], len(memory.segments)
        self.reader = Reader(
            segment.plan, segment.seats, memory.recomputes, partial(memory.state, self.device)
        )
        self.blocks = device_stream(segment, self.device, cycle)
        self.ready: deque[Visit] = deque()


class Share(NamedTuple):
    """The part of a process that has one of the devices.

    Parameters
    ----------
    device
        Which one.
    bytes
        Receive windows and outboxes of so many jobs of the plan.
    taken
        Bytes of its GPU that communicators have taken.
    """

    device: int
    bytes: MessageBytes
    taken: int = 0


def memory_of(
    runs: Sequence[Run],
    segments: Sequence[Segment],
    limit: int | None,
    devices: Sequence[torch.device] = (),
    criterion: MakeCriterion | None = None,
    share: Share | None = None,
) -> Resident | PerDevice:
    """The memory of a run: everything resident if it fits, else slots.

    Parameters
    ----------
    runs, segments
        Jobs and what is run; both may grow.
    limit
        Bytes of every device for states, gradients, activations and reserve; None: all states fit.
    devices
        Where the slots are, by device of the plan; by default where the stages are.
    criterion
        The loss of a micro-batch, for what it keeps (`beside_states`).
    share
        The only device of this process, if others have the rest.

    Raises
    ------
    InputError
        It does not fit, not even in slots; nothing has been moved.
    """
    if limit is None:
        return Resident(runs)  # type: ignore[arg-type]
    check_limit(limit)
    memory = PerDevice(runs, segments, limit, devices=devices, criterion=criterion, share=share)
    return memory if any(memory.slotted) else memory.resident


def residency(
    runs: Sequence[Run],
    segment: Segment,
    device: int,
    pairs: Sequence[tuple[int, int]],
    visits: Sequence[Visit],
    limit: int,
    link: HostLink,
    cuda: int,
    beside: Mapping[tuple[int, int], StageBytes],
    messages: MessageBytes | None = None,
) -> ResidencyPlan:
    """The residency plan of a device for the real tensors of its jobs."""
    states = []
    for job, stage in pairs:
        sizes = layout_of(runs[job].stages[stage], runs[job].title).bytes
        states.append(State(job, stage, sizes))
    room = room_for_states(
        segment.plan, device, states, limit, cuda=cuda, beside=beside, messages=messages
    )
    unit = UNITS.get(segment.plan.schedule.time_unit, 1e-6)
    name = segment.plan.devices[device]
    return ResidencyPlan.compile(states, visits, room, link.scaled(unit), device=name)


def _limits(
    runs: Sequence[Run],
    segment: Segment,
    beside: Mapping[tuple[int, int], StageBytes],
    devices: int,
) -> Limits:
    """The bytes of all jobs of the first segment, while their stages are still here."""
    sizes = {
        (job, stage.index): sum(layout_of(stage, runs[job].title).bytes)
        for job in segment.seats
        for stage in runs[job].stages
    }
    by_job = {(segment.seats[seat], stage): row for (seat, stage), row in beside.items()}
    return Limits([None] * devices, sizes, by_job)


def _room(plan: ResidencyPlan, limit: int, cuda: int) -> Room:
    if not plan.rules:
        return Room(limit, cuda)
    taken = sum(rule.slots * size for rule, size in zip(plan.rules, plan.slot_bytes, strict=True))
    states, weights = plan.states, plan.rules[0]
    fixed = tuple((states[k].job, states[k].stage) for k in weights.fixed)
    return Room(limit, cuda, weights.slots, taken, fixed)


def _link_of(device: torch.device, shared: int) -> HostLink:
    """The part of a GPU's link that each of so many devices on it has, both ways at once."""
    if device.type != "cuda":
        return PCIE_4
    inward, outward = measure_host(device)
    torch.cuda.empty_cache()  # the streams of the blocks cannot use what this one has left
    latency = max(inward.latency_ns, outward.latency_ns) / 1e9
    return HostLink(inward.bandwidth / shared, outward.bandwidth / shared, latency)


def _device(runs: Sequence[Run], pairs: Sequence[tuple[int, int]]) -> torch.device:
    return runs[pairs[0][0]].stages[pairs[0][1]].device if pairs else torch.device("cpu")


def _graphs(stage: JobStage) -> bool:
    """Whether a graph that points at the weights waits for its backward."""
    return any(kept.roots is not None for kept in stage.kept.values())
