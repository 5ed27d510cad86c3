"""What the blocks of a device ask of its memory: states of (job, stage) pairs and their pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

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
    duration: float = 0  # predicted
    gap: float = 0  # idle time of the device before it
    operation: int = -1  # which block of the run it is
    iteration: int = -1

    @property
    def key(self) -> tuple[int, int, int, str]:
        """What tells it from all others of its segment."""
        return self.state, self.operation, self.iteration, self.kind


def ends_with_update(plan: ExecutionPlan, block: Block) -> bool:
    """Whether it is a last B that holds the update, because there is no U."""
    last = block.kind == "B" and block.microbatch == plan.microbatches[block.job] - 1
    return last and block.job not in plan.updated


@dataclass
class Reader:
    """Turns blocks of a plan into visits."""

    plan: ExecutionPlan
    seats: Sequence[int]  # job of the run of every job of the plan
    recompute: Callable[[int], bool]  # whether a job of the run keeps inputs only
    state: Callable[[int, int], int]  # index of the state of a job on a stage; -1: not one of ours

    def visits(
        self, block: Block, iteration: int = -1, duration: float = 0, gap: float = 0
    ) -> tuple[Visit, ...]:
        """The visits of one block: one, or two where a last B holds the update; none elsewhere."""
        job, i = self.seats[block.job], block.operation
        state = self.state(job, block.stage)
        if state < 0:
            return ()
        graph = 0
        if (block.job, block.stage) in self.plan.recomputed:
            graph = {"R": 1, "B": -1}.get(block.kind, 0)
        elif not self.recompute(job):
            graph = {"F": 1, "B": -1}.get(block.kind, 0)
        first = block.kind == "F" and not block.microbatch
        visit = Visit(state, block.kind, graph, first, duration, gap, i, iteration)
        if ends_with_update(self.plan, block):
            return visit, Visit(state, "U", operation=i, iteration=iteration)
        return (visit,)


def cycle_of(
    plan: ExecutionPlan, device: int, recompute: Callable[[int], bool]
) -> tuple[list[tuple[int, int]], list[Visit]]:
    """The (job, stage) pairs of a device, and its visits over one cycle of the steady state.

    Durations and gaps are those of the schedule, in its time unit; `recompute` by job.
    """
    blocks = [plan.blocks[i] for i in plan.sequences[device]]
    pairs = sorted({(b.job, b.stage) for b in blocks})
    index = {pair: k for k, pair in enumerate(pairs)}
    if not blocks:
        return pairs, []
    seats = range(plan.n_jobs)
    reader = Reader(plan, seats, recompute, lambda job, stage: index[job, stage])
    start, duration = (getattr(plan.schedule, key).tolist() for key in ("start", "duration"))
    visits: list[Visit] = []
    # the sequence repeats every cycle, so that what is idle at its end is idle before its start
    end = start[blocks[-1].operation] + duration[blocks[-1].operation] - plan.cycle_time
    for block in blocks:
        i = block.operation
        visits += reader.visits(block, -1, duration[i], max(0, start[i] - end))
        end = start[i] + duration[i]
    return pairs, visits


def most_pinned(visits: Sequence[Visit], fixed: Collection[int] = ()) -> tuple[int, int]:
    """Most states, fixed ones apart, that cannot leave their slots at one time; at which visit."""
    open_graphs: dict[int, int] = {}
    most, at = 0, 0
    for lap in range(2):
        for i, visit in enumerate(visits):
            pinned = {s for s, count in open_graphs.items() if count > 0} | {visit.state}
            pinned.difference_update(fixed)
            if lap and len(pinned) > most:
                most, at = len(pinned), i
            before = 0 if visit.first else open_graphs.get(visit.state, 0)
            open_graphs[visit.state] = max(0, before + visit.graph)
    return most, at


def next_uses(states: Sequence[int]) -> list[int]:
    """How many steps later the state of a step comes again, round and round."""
    n = len(states)
    found, last = [0] * n, dict[int, int]()
    for i in range(2 * n - 1, -1, -1):
        state = states[i % n]
        if i < n:
            found[i] = last[state] - i
        last[state] = i
    return found
