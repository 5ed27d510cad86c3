"""The account of a device's bytes, and whether its states stay there or take turns in slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.analysis.occupancy import held_bytes, jobs_that_fit
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    import torch

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Block


PIECES: Final = ("weights", "moments")
"""Parts of a state with slots of their own kind. *Moments* are all that only the update needs:
optimizer state, and float32 masters; few slots for them are enough."""

CUDA_CONTEXT: Final = 536 * 2**20
"""Bytes that a process takes on a GPU before any tensor, kernels of the libraries included."""

CUDA_STREAM: Final = 64 * 2**20
"""Bytes that cuBLAS takes for a stream: a workspace for the forward's thread and autograd's."""

_FRAGMENTS: Final = 20  # one part in so many of a GPU is lost between tensors


class StageBytes(NamedTuple):
    """Bytes that a job takes on a stage: its state, and what it needs in addition."""

    weights: int = 0
    moments: int = 0
    resident: int = 0  # buffers and copies of tied weights, which are in no slot
    gradients: int = 0  # of its weights, from the first B of an iteration to the update
    tied: int = 0  # gradients of copies of tied weights, during a B
    masters: int = 0  # gradients of float32 masters, during the update
    saved: int = 0  # kept of one micro-batch for its backward, where the schedule has no bytes
    inputs: int = 0  # the part of it that recomputation begins with
    recompute: bool = False  # whether only that is kept
    title: str = ""  # of the job
    problem: str = ""  # why the state cannot be in a slot

    @property
    def state(self) -> int:
        """Bytes of the state."""
        return self.weights + self.moments + self.resident


Known: TypeAlias = "Mapping[tuple[int, int], StageBytes]"
"""By slot of a plan and stage."""


class Access(NamedTuple):
    """A block, or the update within a last backward, as the memory of its device sees it."""

    state: int  # index of the state of a (job, stage)
    kind: str  # F, R, B, W or U; only U changes the state and needs its moments
    graph: int = 0  # 1: leaves an autograd graph that refers to the weights, -1: uses one up
    first: bool = False  # first F of an iteration: the state has no graph
    operation: int = -1
    iteration: int = -1

    @property
    def pieces(self) -> tuple[int, ...]:
        """Pieces that it needs."""
        return (0, 1) if self.kind == "U" else (0,)

    @property
    def key(self) -> tuple[int, int, int, str]:
        """Identifies it within its segment."""
        return self.state, self.operation, self.iteration, self.kind

    def graphs_after(self, before: int) -> int:
        """Open graphs of the state after it."""
        return max(0, (0 if self.first else before) + self.graph)


def accesses_of(
    plan: ExecutionPlan, block: Block, state: int, recompute: bool, iteration: int = -1
) -> tuple[Access, ...]:
    """The accesses of a block to a state: one, or two where a last backward holds the update.

    With `recompute` the job keeps inputs only. Where the backward is split, W uses up the graph.
    """
    graph, i, pair = 0, block.operation, (block.job, block.stage)
    split, maker = pair in plan.split, "R" if pair in plan.recomputed else "F"
    if recompute and maker == "F":
        maker = "B"
    if split or maker != "B":
        graph = {maker: 1, "W" if split else "B": -1}.get(block.kind, 0)
    first = block.kind == "F" and not block.microbatch
    found = Access(state, block.kind, graph, first, i, iteration)
    if block.kind in "BW" and plan.updates[i]:
        return found, Access(state, "U", operation=i, iteration=iteration)
    return (found,)


def cycle_of(
    plan: ExecutionPlan, device: int, known: Known, jobs: Collection[int] | None = None
) -> tuple[list[tuple[int, int]], list[Access]]:
    """The (job, stage) pairs of a device, and its accesses in one cycle, of some jobs or of all."""
    blocks = [plan.blocks[i] for i in plan.sequences[device]]
    blocks = [b for b in blocks if jobs is None or b.job in jobs]
    pairs = sorted({(b.job, b.stage) for b in blocks})
    index = {pair: k for k, pair in enumerate(pairs)}
    return pairs, [
        access
        for b in blocks
        for access in accesses_of(plan, b, index[b.job, b.stage], _of(known, b).recompute)
    ]


def most_pinned(accesses: Sequence[Access]) -> tuple[int, int]:
    """Return the most states that cannot leave their slots at one time, and at which access."""
    graphs: dict[int, int] = {}
    most, at = 0, 0
    for turn in range(2):
        for i, access in enumerate(accesses):
            pinned = {s for s, count in graphs.items() if count > 0} | {access.state}
            if turn and len(pinned) > most:
                most, at = len(pinned), i
            graphs[access.state] = access.graphs_after(graphs.get(access.state, 0))
    return most, at


# what a device needs in addition to states


class Bytes(NamedTuple):
    """Bytes of a device in addition to its states, by purpose."""

    gradients: int = 0  # at their peak over a steady cycle
    activations: int = 0  # from F to B, at their peak
    workspace: int = 0  # of the largest block
    windows: int = 0  # of posted receives
    outboxes: int = 0  # messages not yet sent
    shared: int = 0  # frozen tensors that jobs share
    reserve: int = 0  # for no tensor of a job: context, streams and fragments of a GPU

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(self)

    def table(self) -> str:
        """Return a line for each, and the sum."""
        names = (
            "gradients, at their peak", "activations from F to B, at their peak",
            "workspace of the largest block", "receive windows", "outboxes",
            "frozen tensors that jobs share", "reserve", "sum",
        )  # fmt: skip
        rows = zip(names, (*self, self.total), strict=True)
        return "\n".join(f"{name:38} {size:>16,}" for name, size in rows)


def budget(
    plan: ExecutionPlan, device: int, known: Known, jobs: Collection[int] | None = None
) -> Bytes:
    """Gradients, activations and workspace of the blocks of a device, of some jobs or of all.

    ``acquire``, ``free`` and ``workspace`` of the schedule are taken as bytes; if nothing is
    acquired and freed, `known` has what is kept.
    """
    schedule = plan.schedule
    row = [i for i in plan.sequences[device] if jobs is None or plan.blocks[i].job in jobs]
    blocks = [plan.blocks[i] for i in row]

    def columns(change: Callable[[ExecutionPlan, Block, StageBytes], tuple[int, int, int]]) -> Any:
        rows = [change(plan, block, _of(known, block)) for block in blocks]
        return np.array(rows, np.int64).reshape(-1, 3).T

    made, dropped, passing = columns(_gradients)
    gradients = held_bytes(schedule, row, (made, dropped)) + passing
    workspace = schedule.workspace[row]
    if schedule.acquire.any() or schedule.free.any():
        held = held_bytes(schedule, row)
    else:
        taken, given, passing = columns(_kept)
        held, workspace = held_bytes(schedule, row, (taken, given)), np.maximum(workspace, passing)
    return Bytes(*(int(column.max(initial=0)) for column in (gradients, held, workspace)))


def _of(known: Known, block: Block) -> StageBytes:
    return known.get((block.job, block.stage), StageBytes())


def _ends(plan: ExecutionPlan, block: Block) -> bool:
    """Return whether a backward ends with a block: with B, or with W where it is split."""
    return block.kind == ("W" if (block.job, block.stage) in plan.split else "B")


def _kept(plan: ExecutionPlan, block: Block, here: StageBytes) -> tuple[int, int, int]:
    """Return bytes that a block takes, gives back and needs meanwhile, from measured bytes."""
    by_block = (block.job, block.stage) in plan.recomputed
    less = by_block or here.recompute
    if block.kind == "F":  # the graph is made even if it is thrown away
        return (here.inputs, 0, here.saved) if less else (here.saved, 0, 0)
    if block.kind == ("R" if by_block else "B" if less else ""):
        if _ends(plan, block):
            return 0, here.inputs, here.saved
        return max(0, here.saved - here.inputs), max(0, here.inputs - here.saved), 0
    return (0, here.saved, 0) if _ends(plan, block) else (0, 0, 0)


def _gradients(plan: ExecutionPlan, block: Block, here: StageBytes) -> tuple[int, int, int]:
    """Return bytes of gradients that a block makes, drops and needs meanwhile.

    The first backward of an iteration makes them, the update (within the last one without a block)
    drops them. Those of tied copies and of masters live in one block only.
    """
    backward, updates = _ends(plan, block), plan.updates[block.operation]
    passing = max(here.tied * backward, here.masters * updates)
    made = backward and not block.microbatch
    return here.gradients * made, here.gradients * updates, passing


def reserved(device: torch.device, parts: int) -> int:
    """Return bytes for no tensor of a job, of one of so many parts of a GPU; 0 on a CPU."""
    return 0 if device.type != "cuda" else (CUDA_CONTEXT + CUDA_STREAM) // parts


# residence or slots


class Residency(NamedTuple):
    """Where the states of one device are; slots and their bytes per piece."""

    slots: tuple[int, int] = (0, 0)  # none: all states are resident
    sizes: tuple[int, int] = (0, 0)  # the most of any state


class DeviceBytes(NamedTuple):
    """Memory of one device, and what was decided for the first plan."""

    name: str
    limit: int  # bytes
    cuda: int = 0  # of them for the context and the like (`reserved`); 0 on a CPU
    shared: int = 0  # of frozen tensors that jobs share
    windows: int = 0  # of the messages of the first plan
    outboxes: int = 0
    decided: Residency | None = None

    def needs(self, plan: ExecutionPlan, device: int, known: Known, jobs: Collection[int]) -> Bytes:
        """Return all but the states, for some jobs of a plan."""
        return budget(plan, device, known, jobs)._replace(
            windows=self.windows, outboxes=self.outboxes, shared=self.shared,
            reserve=self.cuda + self.limit // _FRAGMENTS if self.cuda else 0,
        )  # fmt: skip

    def first(self, plan: ExecutionPlan, device: int, known: Known) -> DeviceBytes:
        """Decide for the first plan; `InputError`: it does not fit, not even in slots."""
        n = plan.n_jobs
        found = self.fit(plan, device, known, range(n))
        if isinstance(found, Residency):
            return self._replace(decided=found)
        fit = jobs_that_fit(
            n, lambda k: isinstance(self.fit(plan, device, known, range(k)), Residency)
        )
        table = self.needs(plan, device, known, range(n)).table()
        raise InputError(f"{found}; {fit} of {n} jobs would fit\n{table}")

    def fit(
        self, plan: ExecutionPlan, device: int, known: Known, jobs: Collection[int]
    ) -> Residency | str:
        """Return where the states of some jobs of a plan are, or what there is too little of.

        What was decided before stays. Else moments get one slot if weights have no room for more:
        they are copied once an iteration anyway, and weights up to three times.
        """
        needed, name = self.needs(plan, device, known, jobs).total, self.name
        left, (pairs, accesses) = self.limit - needed, cycle_of(plan, device, known, jobs)
        if left <= 0 and pairs:
            return (
                f"memory: {name} needs {needed} bytes in addition to the states and has "
                f"{self.limit}"
            )
        states = [known.get(pair, StageBytes()) for pair in pairs]
        if problems := [state.problem for state in states if state.problem]:
            return problems[0]
        taken = sum(state.state for state in states)
        if self.decided not in (None, Residency()):
            return self._in_slots(pairs, states, accesses, left)
        if taken <= left:
            return Residency()
        if self.decided is None:
            return self._in_slots(pairs, states, accesses, left)
        return f"memory: {name} has {left} bytes for states, which take {taken}"

    def _in_slots(
        self,
        pairs: Sequence[tuple[int, int]],
        states: Sequence[StageBytes],
        accesses: Sequence[Access],
        left: int,
    ) -> Residency | str:
        name, rows = self.name, [(state.weights, state.moments) for state in states]
        sizes = (max(w for w, _ in rows), max(m for _, m in rows))
        slots, sizes = self.decided or Residency((1, 1), sizes)
        for state, row, (_, stage) in zip(states, rows, pairs, strict=True):
            for piece, size, most in zip(PIECES, row, sizes, strict=True):
                if size > most:
                    return (
                        f"memory: the {piece} of job {state.title}, stage {stage} take {size} "
                        f"bytes, a slot has {most}"
                    )
        left -= sum(state.resident for state in states)
        taken = slots[0] * sizes[0] + slots[1] * sizes[1]
        if taken > left:
            (_, stage), largest = max(zip(pairs, states, strict=True), key=lambda x: x[1].state)
            return (
                f"memory: {name} has {left} bytes for states, slots take {taken} (the largest "
                f"state: job {largest.title}, stage {stage})"
            )
        if self.decided is None:
            slots = most_slots(len(states), sizes, left)
        need, at = most_pinned(accesses)
        if need > slots[0]:
            state, (_, stage) = states[accesses[at].state], pairs[accesses[at].state]
            return (
                f"memory: at {accesses[at].kind} of job {state.title}, stage {stage}, {need} "
                f"states are between a forward and its backward on {name}, which has {slots[0]} "
                f"slots; use recompute=True"
            )
        return Residency(slots, sizes)


def most_slots(states: int, sizes: tuple[int, int], left: int) -> tuple[int, int]:
    """Return slots of so many bytes each: one for moments, and the others for weights first."""
    weights, moments = sizes
    most = min(states, (left - moments) // weights) if weights else states
    return most, min(states, (left - most * weights) // moments) if moments else 1


@dataclass(eq=False)
class Limits:
    """Bytes of a run, to check another plan or another job against.

    Between two segments every device finishes the iterations of the old one first, so that what
    their plans hold does not add up.
    """

    devices: dict[int, DeviceBytes] = field(default_factory=dict)
    known: dict[tuple[int, int], StageBytes] = field(default_factory=dict)  # by job and stage

    def share(self, gather: Callable[[Any], list[Any]]) -> None:
        """Exchange what ranks have measured of their devices and stages (collective)."""
        for devices, known in gather((self.devices, self.known)):
            self.devices |= devices
            self.known |= known

    def of(self, segment: Segment) -> dict[tuple[int, int], StageBytes]:
        """Return what is known of the jobs in the slots of a segment."""
        return {
            (slot, stage): row
            for slot, job in enumerate(segment.slots)
            for stage in range(segment.plan.n_stages)
            if (row := self.known.get((job, stage)))
        }

    def refusal(self, segment: Segment, live: Sequence[int]) -> str:
        """What a device has too little of for the `live` jobs of a plan; ``""`` if nothing."""
        known = self.of(segment)
        for number, device in self.devices.items():
            found = device.fit(segment.plan, number, known, live)
            if isinstance(found, str):
                return found
        return ""
