"""The account of a device's bytes: states, gradients, activations, messages, reserve."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.analysis.occupancy import held_bytes, jobs_that_fit
from optsched.arraypipe.memory.types import PIECES, cycle_of, most_pinned
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Block
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.model.schedule import IntArray


CUDA_CONTEXT: Final = 536 * 2**20
"""Bytes that a process takes on a GPU before any tensor, kernels of the libraries included."""

CUDA_STREAM: Final = 64 * 2**20
"""Bytes that cuBLAS takes per stream: a workspace for the forward's thread and autograd's."""

_FRAGMENTS: Final = 20  # one part in so many of a GPU is lost between tensors


class StageBytes(NamedTuple):
    """Bytes that a job takes on a stage beside its state."""

    gradients: int = 0  # of its own weights, from the first B of an iteration to the update
    borrowed: int = 0  # gradients of copies of tied weights, during a B
    masters: int = 0  # gradients of float32 masters, during the update
    saved: int = 0  # kept of one micro-batch for its backward, where the schedule has no bytes
    inputs: int = 0  # the part of it that recomputation begins with
    recompute: bool = False  # whether only that is kept


Beside: TypeAlias = "Mapping[tuple[int, int], StageBytes]"
"""Bytes beside the states, by job and stage."""

MessageBytes: TypeAlias = "Callable[[Collection[int]], tuple[int, int]]"
"""Bytes of receive windows and of outboxes, if only these jobs of the plan are counted."""


class Bytes(NamedTuple):
    """Bytes of a device beside its states, by what they are for."""

    gradients: int = 0  # at their peak over a steady cycle
    activations: int = 0  # from F to B, at their peak
    workspace: int = 0  # of the largest block
    windows: int = 0  # of posted receives
    outboxes: int = 0  # messages not yet sent
    reserve: int = 0  # for no tensor of a job: context, streams and fragments of a GPU

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(self)

    def table(self) -> str:
        """A line for each, and the sum."""
        names = (
            "gradients, at their peak", "activations from F to B, at their peak",
            "workspace of the largest block", "receive windows", "outboxes", "reserve", "sum",
        )  # fmt: skip
        rows = zip(names, (*self, self.total), strict=True)
        return "\n".join(f"{name:38} {size:>16,}" for name, size in rows)


def standing(states: IntArray, gradients: IntArray, in_turn: bool) -> IntArray:
    """Bytes of every device that do not come and go; by job and device. In turn: one gradient."""
    held: IntArray = gradients.max(axis=0, initial=0) if in_turn else gradients.sum(axis=0)
    total: IntArray = states.sum(axis=0) + held
    return total


def budget(
    plan: ExecutionPlan, device: int, beside: Beside, jobs: Collection[int] | None = None
) -> Bytes:
    """Gradients, activations and workspace of the blocks of a device, of some jobs or of all.

    ``acquire``, ``free`` and ``workspace`` of the schedule are taken as bytes; if nothing is
    acquired and freed, `beside` says what is kept.
    """
    schedule = plan.schedule
    row = [i for i in plan.sequences[device] if jobs is None or plan.blocks[i].job in jobs]
    blocks = [plan.blocks[i] for i in row]
    known = [beside.get((b.job, b.stage), StageBytes()) for b in blocks]
    pairs = [*zip(blocks, known, strict=True)]
    made, dropped, passing = _columns(_gradients(plan, b, here) for b, here in pairs)
    gradients = held_bytes(schedule, row, (made, dropped)) + passing
    workspace = schedule.workspace[row]
    if has_bytes(plan):
        held = held_bytes(schedule, row)
    else:
        taken, given, passing = _columns(_kept(plan, b, here) for b, here in pairs)
        held, workspace = held_bytes(schedule, row, (taken, given)), np.maximum(workspace, passing)
    peaks = (int(column.max(initial=0)) for column in (gradients, held, workspace))
    return Bytes(*peaks)


def _columns(rows: Iterable[tuple[int, int, int]]) -> IntArray:
    return np.array([*rows], np.int64).reshape(-1, 3).T


def has_bytes(plan: ExecutionPlan) -> bool:
    """Whether the schedule says what is kept from F to B."""
    return bool(plan.schedule.acquire.any() or plan.schedule.free.any())


def _kept(plan: ExecutionPlan, block: Block, here: StageBytes) -> tuple[int, int, int]:
    """Bytes that a block takes, gives back and needs meanwhile, from measured ones."""
    apart = (block.job, block.stage) in plan.recomputed
    less = apart or here.recompute
    if block.kind == "F":  # the graph is made even if it is thrown away
        return (here.inputs, 0, here.saved) if less else (here.saved, 0, 0)
    if block.kind == "R":
        return max(0, here.saved - here.inputs), max(0, here.inputs - here.saved), 0
    if block.kind == "B":
        return (0, here.saved, 0) if apart or not less else (0, here.inputs, here.saved)
    return 0, 0, 0


def _gradients(plan: ExecutionPlan, block: Block, here: StageBytes) -> tuple[int, int, int]:
    """Bytes of gradients that a block makes, drops and needs meanwhile.

    The first B of an iteration makes them, the update (the last B without a block of its own) drops
    them. Those of tied copies and of masters live in one block only.
    """
    backward = block.kind == "B"
    updates = plan.updates[block.operation]
    passing = max(here.borrowed * backward, here.masters * updates)
    made = backward and not block.microbatch
    return here.gradients * made, here.gradients * updates, passing


def reserved(device: torch.device, devices: Sequence[torch.device], taken: int = 0) -> int:
    """Bytes of a device's part of its GPU that are for no tensor of a job; 0 on a CPU.

    The `devices` of the plan in this process that are one GPU share its context, and what
    communicators and loaded kernels have `taken` beyond that.
    """
    if device.type != "cuda":
        return 0
    return (CUDA_CONTEXT + taken) // devices.count(device) + CUDA_STREAM


def check_limit(limit: object) -> None:
    """Refuse a limit of a device that is none."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InputError(f"memory: expected bytes per device, an integer >= 1, got {limit!r}")


class Room(NamedTuple):
    """Memory of one device, and how it was divided for the first plan."""

    limit: int  # bytes
    cuda: int = 0  # of them for the context and the like (`reserved`); 0 on a CPU
    slots: int = 0  # for weights; 0: all states are resident
    slot: tuple[int, ...] = ()  # most bytes of every piece (`PIECES`) in a slot
    taken: int = 0  # bytes of all slots

    def needs(
        self,
        plan: ExecutionPlan,
        device: int,
        beside: Beside,
        messages: MessageBytes | None,
        jobs: Collection[int],
    ) -> Bytes:
        """All but the states, for some jobs of a plan."""
        windows, outboxes = (0, 0) if messages is None else messages(jobs)
        reserve = self.cuda + self.limit // _FRAGMENTS if self.cuda else 0
        found = budget(plan, device, beside, jobs)
        return found._replace(windows=windows, outboxes=outboxes, reserve=reserve)

    def for_states(
        self, plan: ExecutionPlan, device: int, beside: Beside, messages: MessageBytes | None
    ) -> int:
        """Bytes that are left for states, or a sentence why that is nothing."""

        def of(n: int) -> Bytes:
            return self.needs(plan, device, beside, messages, range(n))

        whole = of(plan.n_jobs)
        left = self.limit - whole.total
        if left > 0 or not plan.sequences[device]:
            return left
        fit = jobs_that_fit(plan.n_jobs, lambda n: of(n).total < self.limit)
        raise InputError(
            f"memory: {plan.devices[device]} needs {whole.total} bytes beside the states and has "
            f"{self.limit}; {fit} of {plan.n_jobs} jobs would fit\n{whole.table()}"
        )


@dataclass(eq=False)
class Limits:
    """Bytes of a run: is there enough for another plan, or for another job.

    At the seam of two segments every device finishes the iterations of the old one first, so that
    what their plans hold does not add up.
    """

    runs: Sequence[JobRun]  # may grow
    rooms: list[Room | None]  # by device; None: that of another rank, until it has been told
    sizes: Callable[[int, int], Sequence[int]]  # job, stage -> of the pieces of its state
    known: Beside  # of the jobs of the first plan
    like: dict[int, int] = field(default_factory=dict)  # the one that a later job is counted as

    def refusal(
        self,
        segment: Segment,
        live: Sequence[int],
        like: Mapping[int, int],
        messages: Callable[[Segment, int], MessageBytes] | None,
    ) -> str:
        """What a device has too little of, as a sentence; ``""`` if there is enough.

        Counted are the `live` seats of what would be run, which may have new jobs. `like` has for
        each of them the one whose place it takes: it is counted as that one, apart from its states
        and its recomputation. `messages` gives the receive windows and outboxes of a device.
        """
        for job, other in like.items():
            self.like[job] = self.like.get(other, other)
        as_known = replace(segment, seats=tuple(self.like.get(job, job) for job in segment.seats))
        beside = {
            (seat, stage): row._replace(recompute=self._recomputes(segment, seat))
            for seat, job in enumerate(as_known.seats)
            for stage in range(segment.plan.n_stages)
            if (row := self.known.get((job, stage)))
        }
        for device, room in enumerate(self.rooms):
            if room is None:
                continue
            held = None if messages is None else messages(as_known, device)
            needed = room.needs(segment.plan, device, beside, held, live).total
            try:
                if sentence := self._short(segment, live, device, room, needed):
                    return sentence
            except InputError as error:  # a state that cannot be laid out
                return str(error)
        return ""

    def _short(
        self, segment: Segment, live: Sequence[int], device: int, room: Room, beside: int
    ) -> str:
        """What a device has too little of, if it needs so many bytes beside the states."""
        plan, name = segment.plan, segment.plan.devices[device]
        pairs, visits = cycle_of(plan, device, partial(self._recomputes, segment))
        here = {k: (segment.seats[seat], s) for k, (seat, s) in enumerate(pairs) if seat in live}
        sizes = {pair: self.sizes(*pair) for pair in here.values()}
        needed = beside + room.taken
        if not room.slots:
            needed += sum(map(sum, sizes.values()))
        else:
            for (job, stage), row in sizes.items():
                for piece, size, most in zip(PIECES, row, room.slot, strict=True):
                    if size > most:
                        return (
                            f"memory: the {piece} of job {self.runs[job].title}, stage {stage} "
                            f"take {size} bytes, a slot has {most}"
                        )
            need = most_pinned([v for v in visits if v.state in here])[0]
            if need > room.slots:
                return (
                    f"memory: {need} states could not leave their slots on {name}, which has "
                    f"{room.slots}; use recompute=True"
                )
        if needed <= room.limit:
            return ""
        return f"memory: {name} would need {needed} bytes and has {room.limit}"

    def _recomputes(self, segment: Segment, seat: int) -> bool:
        return self.runs[segment.seats[seat]].job.recompute
