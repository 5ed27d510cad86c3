"""What the memory of a device is for: states, gradients, activations, messages, reserve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch

    from optsched.arraypipe.memory.types import State
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.types import Block


CUDA_CONTEXT: Final = 536 * 2**20
"""Bytes that a process takes on a GPU before any tensor, kernels of the libraries included."""

CUDA_STREAM: Final = 64 * 2**20
"""Bytes that cuBLAS takes per stream: a workspace for the forward's thread and autograd's."""

_FRAGMENTS: Final = 20  # one part in so many of a GPU is lost between tensors


class StageBytes(NamedTuple):
    """Bytes that a job takes on a stage beside its state.

    Parameters
    ----------
    gradients
        Of its own weights, from the first B of an iteration to the update.
    borrowed
        Gradients of copies of tied weights, during a B.
    masters
        Gradients of float32 masters, during the update.
    saved
        Kept of one micro-batch for its backward, where the schedule has no bytes.
    inputs
        The part of it that recomputation begins with.
    recompute
        Whether only that is kept.
    """

    gradients: int = 0
    borrowed: int = 0
    masters: int = 0
    saved: int = 0
    inputs: int = 0
    recompute: bool = False


MessageBytes: TypeAlias = "Callable[[Collection[int]], tuple[int, int]]"
"""Bytes of receive windows and of outboxes, if only these jobs of the plan are counted."""

_NOTHING: Final = StageBytes()


@dataclass(frozen=True)
class Budget:
    """Bytes of one device by what they are for; `limit` 0 = as many as wanted.

    `counted` is False if nobody has said how large activations are.
    """

    device: str
    limit: int
    states: int
    gradients: int
    activations: int
    workspace: int
    windows: int
    outboxes: int
    reserve: int
    counted: bool = True

    @property
    def rows(self) -> tuple[tuple[str, int], ...]:
        """The table: name and bytes."""
        kept = "activations from F to B, at their peak"
        if not self.counted:
            kept = "activations: the schedule has no bytes, not counted"
        return (
            ("states", self.states),
            ("gradients, at their peak", self.gradients),
            (kept, self.activations),
            ("workspace of the largest block", self.workspace),
            ("receive windows", self.windows),
            ("outboxes", self.outboxes),
            ("reserve", self.reserve),
        )

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return sum(size for _, size in self.rows)

    @property
    def fits(self) -> bool:
        """Whether they are within the limit."""
        return not self.limit or self.total <= self.limit

    @property
    def room(self) -> int | None:
        """Bytes that are left for states; None without a limit."""
        return self.limit - (self.total - self.states) if self.limit else None

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        lines = [f"{name:{width}} {size:>16,}" for name, size in (*self.rows, ("sum", self.total))]
        if self.limit:
            lines.append(f"{'limit':{width}} {self.limit:>16,}")
        return "\n".join([f"{self.device}, bytes", *lines])


def reserved(device: torch.device, devices: Sequence[torch.device], taken: int = 0) -> int:
    """Bytes of a device's part of its GPU that are for no tensor of a job; 0 on a CPU.

    Parameters
    ----------
    devices
        Of all devices of the plan in this process: those on one GPU share its context.
    taken
        Beyond the context, by communicators and loaded kernels, as measured.
    """
    if device.type != "cuda":
        return 0
    return (CUDA_CONTEXT + taken) // devices.count(device) + CUDA_STREAM


def check_limit(limit: object) -> None:
    """Refuse a limit of a device that is none."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InputError(f"memory: expected bytes per device, an integer >= 1, got {limit!r}")


def budget(
    plan: ExecutionPlan,
    device: int,
    states: Sequence[State],
    limit: int = 0,
    *,
    windows: int = 0,
    outboxes: int = 0,
    cuda: int = 0,
    jobs: Collection[int] | None = None,
    beside: Mapping[tuple[int, int], StageBytes] | None = None,
) -> Budget:
    """Bytes that one device needs when all its states are resident.

    Parameters
    ----------
    plan
        ``acquire``, ``free`` and ``workspace`` of its schedule are taken as bytes; if nothing is
        acquired and freed, `beside` says what is kept.
    device
        Its index.
    states
        Of the device.
    limit
        Bytes that it has; 0 = as many as wanted.
    windows, outboxes
        Bytes of posted receives and of messages not yet sent.
    cuda
        Bytes to reserve on a GPU beside those for fragments (`reserved`); 0 on a CPU.
    jobs
        Count only these; None: all.
    beside
        Bytes by job and stage of the plan; None: no gradients, activations as in the schedule.
    """
    chosen = range(plan.n_jobs) if jobs is None else jobs
    sizes = beside or {}
    activations, workspace = peak_held(plan, device, chosen, sizes)
    return Budget(
        plan.devices[device], limit, sum(s.total for s in states if s.job in chosen),
        peak_gradients(plan, device, chosen, sizes),
        activations, workspace, windows, outboxes,
        cuda + limit // _FRAGMENTS if cuda else 0,
        has_bytes(plan) or any(row.saved for row in sizes.values()),
    )  # fmt: skip


def room_for_states(
    plan: ExecutionPlan,
    device: int,
    states: Sequence[State],
    limit: int,
    *,
    cuda: int = 0,
    beside: Mapping[tuple[int, int], StageBytes] | None = None,
    messages: MessageBytes | None = None,
) -> int:
    """Bytes of a device that are left for states, or a sentence why that is nothing."""

    def of(jobs: Collection[int]) -> Budget:
        windows, outboxes = (0, 0) if messages is None else messages(jobs)
        return budget(
            plan, device, states, limit, windows=windows, outboxes=outboxes, cuda=cuda, jobs=jobs,
            beside=beside,
        )  # fmt: skip

    whole = of(range(plan.n_jobs))
    room = whole.room or 0
    if room > 0 or not states:
        return room
    fit = next((n for n in range(plan.n_jobs - 1, 0, -1) if (of(range(n)).room or 0) > 0), 0)
    most, at = most_at_once(plan, device, beside)
    block = f", most at {plan.blocks[at]}: {most} at once" if most else ""
    raise InputError(
        f"memory: {whole.device} needs {whole.total - whole.states} bytes beside the states and "
        f"has {limit}{block}; {fit} of {plan.n_jobs} jobs would fit\n{whole}"
    )


def has_bytes(plan: ExecutionPlan) -> bool:
    """Whether the schedule says what is kept from F to B."""
    return bool(plan.schedule.acquire.any() or plan.schedule.free.any())


def peak_held(
    plan: ExecutionPlan,
    device: int,
    jobs: Collection[int],
    beside: Mapping[tuple[int, int], StageBytes] | None = None,
) -> tuple[int, int]:
    """Most bytes held from F to B over a steady cycle, and the largest workspace."""
    row = [i for i in plan.sequences[device] if plan.blocks[i].job in jobs]
    workspace = _workspace(plan, row, beside or {})
    return max(_held(plan, row, beside or {})), max(workspace, default=0)


def peak_gradients(
    plan: ExecutionPlan,
    device: int,
    jobs: Collection[int],
    beside: Mapping[tuple[int, int], StageBytes],
) -> int:
    """Most bytes of gradients at one time over a steady cycle."""
    return max(
        _gradients(plan, [i for i in plan.sequences[device] if plan.blocks[i].job in jobs], beside)
    )


def most_at_once(
    plan: ExecutionPlan,
    device: int,
    beside: Mapping[tuple[int, int], StageBytes] | None = None,
) -> tuple[int, int]:
    """Most bytes of activations, gradients and workspace at one block, and its operation.

    The budget is the sum of their peaks, which need not be at the same block.
    """
    row = plan.sequences[device]
    if not row:
        return 0, -1
    sizes = beside or {}
    parts = (_held(plan, row, sizes)[1:], _gradients(plan, row, sizes)[1:])
    sums = [sum(at) for at in zip(*parts, _workspace(plan, row, sizes), strict=True)]
    most = max(sums)
    return most, row[sums.index(most)]


def _held(
    plan: ExecutionPlan, row: Sequence[int], beside: Mapping[tuple[int, int], StageBytes]
) -> list[int]:
    """Bytes held from F to B before the blocks of a device, and during each (`_levels`)."""
    if has_bytes(plan):
        taken, given = plan.schedule.acquire[list(row)], plan.schedule.free[list(row)]
        return _levels(plan, row, taken.tolist(), given.tolist())
    kept = [_kept(plan, plan.blocks[i], beside) for i in row]
    return _levels(plan, row, [k[0] for k in kept], [k[1] for k in kept])


def _workspace(
    plan: ExecutionPlan, row: Sequence[int], beside: Mapping[tuple[int, int], StageBytes]
) -> list[int]:
    """Bytes that each of these blocks needs while it runs."""
    told: list[int] = plan.schedule.workspace[list(row)].tolist()
    if has_bytes(plan):
        return told
    return [max(t, _kept(plan, plan.blocks[i], beside)[2]) for i, t in zip(row, told, strict=True)]


def _gradients(
    plan: ExecutionPlan, row: Sequence[int], beside: Mapping[tuple[int, int], StageBytes]
) -> list[int]:
    """Bytes of gradients before the blocks of a device, and during each (`_levels`).

    The first B of an iteration makes them, the update (the last B without a block of its own)
    drops them. Those of tied copies and of masters live in one block only.
    """
    taken, given, passing = [], [], []
    for i in row:
        b = plan.blocks[i]
        here = beside.get((b.job, b.stage), _NOTHING)
        first = b.kind == "B" and not b.microbatch
        last = i in plan.last_backwards
        updates = b.kind == "U" or (last and b.job not in plan.updated)
        taken.append(here.gradients if first else 0)
        given.append(here.gradients if updates else 0)
        borrowed, masters = here.borrowed * (b.kind == "B"), here.masters * updates
        passing.append(max(borrowed, masters))
    return _levels(plan, row, taken, given, passing)


def _levels(
    plan: ExecutionPlan,
    row: Sequence[int],
    taken: Sequence[int],
    given: Sequence[int],
    passing: Sequence[int] = (),
) -> list[int]:
    """The level before the first operation, and the highest during each.

    Operations take bytes at their start and give some back at their end. One with an offset is so
    many iterations behind: at the start of a cycle it has that many still to give back. `passing`
    is there during the operation only.
    """
    offsets = [plan.blocks[i].offset for i in row]
    level = sum(o * (g - t) for o, g, t in zip(offsets, given, taken, strict=True))
    found = [level]
    for t, g, p in zip(taken, given, passing or [0] * len(row), strict=True):
        found.append(level + t + p)
        level += t - g
    return found


def _kept(
    plan: ExecutionPlan, block: Block, beside: Mapping[tuple[int, int], StageBytes]
) -> tuple[int, int, int]:
    """Bytes that a block takes, gives back and needs meanwhile, from measured ones."""
    pair = (block.job, block.stage)
    here, apart = beside.get(pair, _NOTHING), pair in plan.recomputed
    less = apart or here.recompute
    if block.kind == "F":  # the graph is made even if it is thrown away
        return (here.inputs, 0, here.saved) if less else (here.saved, 0, 0)
    if block.kind == "R":
        return max(0, here.saved - here.inputs), max(0, here.inputs - here.saved), 0
    if block.kind == "B":
        return (0, here.saved, 0) if apart or not less else (0, here.inputs, here.saved)
    return 0, 0, 0


class Room(NamedTuple):
    """Memory of one device as it was divided for the first plan.

    Parameters
    ----------
    limit
        Bytes of the device.
    cuda
        Bytes of them for the context and the like (`budget.reserved`); 0 on a CPU.
    slots
        For weights; 0: all states are resident.
    taken
        Bytes of all slots.
    fixed
        (job, stage) of the states that keep their slots.
    """

    limit: int
    cuda: int
    slots: int = 0
    taken: int = 0
    fixed: tuple[tuple[int, int], ...] = ()


@dataclass(eq=False)
class Limits:
    """What is known of bytes in a run with limited memory.

    Parameters
    ----------
    rooms
        By device; None: that of another rank, until it has been told.
    sizes
        Bytes of a state, by (job, stage).
    beside
        Bytes of a job of the first plan beside its states, by (job, stage).
    like
        For a job that has come in later the one that it is counted as.
    """

    rooms: list[Room | None]
    sizes: dict[tuple[int, int], int]
    beside: Mapping[tuple[int, int], StageBytes]
    like: dict[int, int] = field(default_factory=dict)

    def take_in(self, job: int, sizes: Iterable[int], other: int) -> None:
        """Count a job as another one, apart from its states and its recomputation."""
        for stage, size in enumerate(sizes):
            self.sizes.setdefault((job, stage), size)
        self.like[job] = self.like.get(other, other)
