"""How the blocks of a device use its memory: states of (job, stage) pairs, and accesses to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.types import Block


PIECES: Final = ("weights", "moments")
"""Parts of a state with slots of their own kind. *Moments* are all that only the update needs:
optimizer state, and float32 masters; few slots for them are enough."""


class State(NamedTuple):
    """What one job trains on one stage, in bytes.

    Buffers and copies of tied weights are *resident*: they stay on the device, in no slot.
    """

    job: int
    stage: int
    bytes: tuple[int, int]  # per piece
    resident: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes) + self.resident


class Access(NamedTuple):
    """A block, or the update within a last backward, as the memory of its device sees it."""

    state: int  # index of the state
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
    plan: ExecutionPlan, device: int, recompute: Callable[[int], bool]
) -> tuple[list[tuple[int, int]], list[Access]]:
    """The (job, stage) pairs of a device, and its accesses in one cycle; `recompute` by job."""
    blocks = [plan.blocks[i] for i in plan.sequences[device]]
    pairs = sorted({(b.job, b.stage) for b in blocks})
    index = {pair: k for k, pair in enumerate(pairs)}
    rows = [accesses_of(plan, b, index[b.job, b.stage], recompute(b.job)) for b in blocks]
    return pairs, [access for row in rows for access in row]


def most_pinned(accesses: Sequence[Access]) -> tuple[int, int]:
    """The most states that cannot leave their slots at one time, and at which access."""
    graphs: dict[int, int] = {}
    most, at = 0, 0
    for turn in range(2):
        for i, access in enumerate(accesses):
            pinned = {s for s, count in graphs.items() if count > 0} | {access.state}
            if turn and len(pinned) > most:
                most, at = len(pinned), i
            graphs[access.state] = access.graphs_after(graphs.get(access.state, 0))
    return most, at
