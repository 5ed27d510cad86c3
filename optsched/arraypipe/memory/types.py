"""What the blocks of a device ask of its memory: states of (job, stage) pairs and their pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.types import Block


PIECES: Final = ("weights", "borrowed", "buffers", "moments")
"""Parts of a state that are copied by themselves; *borrowed* are copies of tied weights, *moments*
are all that only the update needs (optimizer state, and master weights in mixed precision)."""

WEIGHTS, BORROWED, BUFFERS, MOMENTS = range(4)
ALL: Final = (WEIGHTS, BORROWED, BUFFERS, MOMENTS)

POOLS: Final = ((WEIGHTS, BORROWED, BUFFERS), (MOMENTS,))
"""Pieces that share a slot. Moments have slots of their own: only updates need them, so that few
do, and what they leave is room for many more weights."""

NEEDS: Final = {
    "F": (WEIGHTS, BORROWED, BUFFERS),
    "R": (WEIGHTS, BORROWED),
    "B": (WEIGHTS, BORROWED),
    "U": ALL,  # buffers too: after it the state is complete, and a checkpoint may read it
}
CHANGES: Final[Mapping[str, tuple[int, ...]]] = {
    "F": (BORROWED, BUFFERS),
    "R": (),
    "B": (),
    "U": (WEIGHTS, MOMENTS),
}


class State(NamedTuple):
    """Everything that one job trains on one stage; `bytes` per piece."""

    job: int
    stage: int
    bytes: Sequence[int]

    @property
    def total(self) -> int:
        """Bytes of all pieces."""
        return sum(self.bytes)


class Visit(NamedTuple):
    """A block, or the update inside a last B, as the memory of its device sees it."""

    state: int  # index of the state that it works on
    kind: str  # F, R, B or U; says which pieces are needed and which are changed
    graph: int = 0  # 1: leaves an autograd graph that points at the weights, -1: uses one up
    first: bool = False  # the state can have no graph before it: first F of an iteration
    duration_ns: float = 0  # predicted
    gap_ns: float = 0  # idle time of the device before it
    operation: int = -1  # which block of the run it is
    iteration: int = -1

    @property
    def key(self) -> tuple[int, int, int, str]:
        """What tells it from all others of its segment."""
        return self.state, self.operation, self.iteration, self.kind


def visits_of(
    plan: ExecutionPlan,
    block: Block,
    state: int,
    recompute: bool,
    iteration: int = -1,
    duration_ns: float = 0,
    gap_ns: float = 0,
) -> tuple[Visit, ...]:
    """The visits of a block to a state: one, or two where a last B holds the update.

    With `recompute` the job keeps inputs only.
    """
    graph, maker, i = 0, "F", block.operation
    if (block.job, block.stage) in plan.recomputed:
        maker = "R"
    if maker == "R" or not recompute:
        graph = {maker: 1, "B": -1}.get(block.kind, 0)
    first = block.kind == "F" and not block.microbatch
    visit = Visit(state, block.kind, graph, first, duration_ns, gap_ns, i, iteration)
    if block.kind == "B" and plan.updates[block.operation]:
        return visit, Visit(state, "U", operation=i, iteration=iteration)
    return (visit,)


def cycle_of(
    plan: ExecutionPlan, device: int, recompute: Callable[[int], bool]
) -> tuple[list[tuple[int, int]], list[Visit]]:
    """The (job, stage) pairs of a device, and its visits over one cycle of the steady state.

    Durations and gaps are those of the schedule; `recompute` by job.
    """
    blocks = [plan.blocks[i] for i in plan.sequences[device]]
    pairs = sorted({(b.job, b.stage) for b in blocks})
    index = {pair: k for k, pair in enumerate(pairs)}
    if not blocks:
        return pairs, []
    unit = plan.unit_ns
    start_ns, duration_ns = (
        (unit * getattr(plan.schedule, key)).tolist() for key in ("start", "duration")
    )
    visits: list[Visit] = []
    # the sequence repeats every cycle, so that what is idle at its end is idle before its start
    last = blocks[-1].operation
    end_ns = start_ns[last] + duration_ns[last] - unit * plan.cycle_time
    for block in blocks:
        i = block.operation
        state, gap_ns = index[block.job, block.stage], max(0, start_ns[i] - end_ns)
        visits += visits_of(plan, block, state, recompute(block.job), -1, duration_ns[i], gap_ns)
        end_ns = start_ns[i] + duration_ns[i]
    return pairs, visits


def most_pinned(visits: Sequence[Visit]) -> tuple[int, int]:
    """Most states that cannot leave their slots at one time; at which visit."""
    open_graphs: dict[int, int] = {}
    most, at = 0, 0
    for lap in range(2):
        for i, visit in enumerate(visits):
            pinned = {s for s, count in open_graphs.items() if count > 0} | {visit.state}
            if lap and len(pinned) > most:
                most, at = len(pinned), i
            before = 0 if visit.first else open_graphs.get(visit.state, 0)
            open_graphs[visit.state] = max(0, before + visit.graph)
    return most, at
