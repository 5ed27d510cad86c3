"""The account of a device's bytes: states, gradients, activations, messages, reserve."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.analysis.occupancy import held_bytes, jobs_that_fit
from optsched.arraypipe.memory.accesses import PIECES, cycle_of, most_pinned
from optsched.arraypipe.memory.residency import Residency
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch

    from optsched.arraypipe.memory.accesses import State
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Block
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.model.schedule import IntArray


CUDA_CONTEXT: Final = 536 * 2**20
"""Bytes that a process takes on a GPU before any tensor, kernels of the libraries included."""

CUDA_STREAM: Final = 64 * 2**20
"""Bytes that cuBLAS takes for a stream: a workspace for the forward's thread and autograd's."""

_FRAGMENTS: Final = 20  # one part in so many of a GPU is lost between tensors


class StageBytes(NamedTuple):
    """Bytes that a job takes on a stage in addition to its state."""

    gradients: int = 0  # of its weights, from the first B of an iteration to the update
    tied: int = 0  # gradients of copies of tied weights, during a B
    masters: int = 0  # gradients of float32 masters, during the update
    saved: int = 0  # kept of one micro-batch for its backward, where the schedule has no bytes
    inputs: int = 0  # the part of it that recomputation begins with
    recompute: bool = False  # whether only that is kept


Extra: TypeAlias = "Mapping[tuple[int, int], StageBytes]"
"""Bytes in addition to the states, by job and stage."""

MessageBytes: TypeAlias = "Callable[[Collection[int]], tuple[int, int]]"
"""Bytes of receive windows and of outboxes, for these jobs of the plan."""


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
        """A line for each, and the sum."""
        names = (
            "gradients, at their peak", "activations from F to B, at their peak",
            "workspace of the largest block", "receive windows", "outboxes",
            "frozen tensors that jobs share", "reserve", "sum",
        )  # fmt: skip
        rows = zip(names, (*self, self.total), strict=True)
        return "\n".join(f"{name:38} {size:>16,}" for name, size in rows)


def budget(
    plan: ExecutionPlan, device: int, extra: Extra, jobs: Collection[int] | None = None
) -> Bytes:
    """Gradients, activations and workspace of the blocks of a device, of some jobs or of all.

    ``acquire``, ``free`` and ``workspace`` of the schedule are taken as bytes; if nothing is
    acquired and freed, `extra` has what is kept.
    """
    schedule = plan.schedule
    row = [i for i in plan.sequences[device] if jobs is None or plan.blocks[i].job in jobs]
    blocks = [plan.blocks[i] for i in row]
    known = [extra.get((b.job, b.stage), StageBytes()) for b in blocks]
    ends = ["W" if (b.job, b.stage) in plan.split else "B" for b in blocks]
    rows = [*zip(blocks, known, ends, strict=True)]
    made, dropped, passing = _columns(_gradients(plan, *each) for each in rows)
    gradients = held_bytes(schedule, row, (made, dropped)) + passing
    workspace = schedule.workspace[row]
    if has_bytes(plan):
        held = held_bytes(schedule, row)
    else:
        taken, given, passing = _columns(_kept(plan, *each) for each in rows)
        held, workspace = held_bytes(schedule, row, (taken, given)), np.maximum(workspace, passing)
    peaks = (int(column.max(initial=0)) for column in (gradients, held, workspace))
    return Bytes(*peaks)


def _columns(rows: Iterable[tuple[int, int, int]]) -> IntArray:
    return np.array([*rows], np.int64).reshape(-1, 3).T


def has_bytes(plan: ExecutionPlan) -> bool:
    """Whether the schedule has the bytes that are kept from F to B."""
    return bool(plan.schedule.acquire.any() or plan.schedule.free.any())


def _kept(plan: ExecutionPlan, block: Block, here: StageBytes, end: str) -> tuple[int, int, int]:
    """Bytes that a block takes, gives back and needs meanwhile, from measured ones.

    The backward ends with a block of kind `end`: B, or W where it is split.
    """
    by_block = (block.job, block.stage) in plan.recomputed
    less = by_block or here.recompute
    if block.kind == "F":  # the graph is made even if it is thrown away
        return (here.inputs, 0, here.saved) if less else (here.saved, 0, 0)
    recomputes = "R" if by_block else "B" if less else ""
    if block.kind == recomputes == end:
        return 0, here.inputs, here.saved
    if block.kind == recomputes:
        return max(0, here.saved - here.inputs), max(0, here.inputs - here.saved), 0
    return (0, here.saved, 0) if block.kind == end else (0, 0, 0)


def _gradients(
    plan: ExecutionPlan, block: Block, here: StageBytes, end: str
) -> tuple[int, int, int]:
    """Bytes of gradients that a block makes, drops and needs meanwhile.

    The first backward of an iteration makes them, the update (within the last one without a block)
    drops them. Those of tied copies and of masters live in one block only.
    """
    backward = block.kind == end
    updates = plan.updates[block.operation]
    passing = max(here.tied * backward, here.masters * updates)
    made = backward and not block.microbatch
    return here.gradients * made, here.gradients * updates, passing


def reserved(device: torch.device, parts: int) -> int:
    """Bytes for no tensor of a job, of one of so many parts of a GPU; 0 on a CPU."""
    return 0 if device.type != "cuda" else (CUDA_CONTEXT + CUDA_STREAM) // parts


def check_limit(limit: object) -> None:
    """Refuse what is no limit of a device."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InputError(f"memory: expected bytes per device, an integer >= 1, got {limit!r}")


class DeviceBytes(NamedTuple):
    """Memory of one device, and what was decided for the first plan."""

    limit: int  # bytes
    cuda: int = 0  # of them for the context and the like (`reserved`); 0 on a CPU
    shared: int = 0  # of frozen tensors that jobs share
    decided: Residency = Residency()

    def needs(
        self,
        plan: ExecutionPlan,
        device: int,
        extra: Extra,
        messages: MessageBytes | None,
        jobs: Collection[int],
    ) -> Bytes:
        """All but the states, for some jobs of a plan."""
        windows, outboxes = (0, 0) if messages is None else messages(jobs)
        reserve = self.cuda + self.limit // _FRAGMENTS if self.cuda else 0
        return budget(plan, device, extra, jobs)._replace(
            windows=windows, outboxes=outboxes, shared=self.shared, reserve=reserve
        )

    def for_states(
        self, plan: ExecutionPlan, device: int, extra: Extra, messages: MessageBytes | None
    ) -> int:
        """Bytes that are left for states; `InputError` if there are none."""

        def total(n: int) -> int:
            return self.needs(plan, device, extra, messages, range(n)).total

        whole = self.needs(plan, device, extra, messages, range(plan.n_jobs))
        left = self.limit - whole.total
        if left > 0 or not plan.sequences[device]:
            return left
        fit = jobs_that_fit(plan.n_jobs, lambda n: total(n) < self.limit)
        raise InputError(
            f"memory: {plan.devices[device]} needs {whole.total} bytes in addition to the states "
            f"and has {self.limit}; {fit} of {plan.n_jobs} jobs would fit\n{whole.table()}"
        )


@dataclass(eq=False)
class Limits:
    """Bytes of a run, to check another plan or another job against.

    Between two segments every device finishes the iterations of the old one first, so that what
    their plans hold does not add up.
    """

    runs: Sequence[JobRun]  # may grow
    devices: dict[int, DeviceBytes]
    known: dict[tuple[int, int], StageBytes]  # of the jobs of the first plan, by job and stage
    states: dict[tuple[int, int], State | str] = field(default_factory=dict)  # or why there is none
    like: dict[int, int] = field(default_factory=dict)  # the one that a later job is counted as

    def share(self, gather: Callable[[Limits], list[Limits]]) -> None:
        """Have what all ranks know of their devices and stages (collective)."""
        for other in gather(replace(self, runs=())):
            self.devices |= other.devices
            self.known |= other.known
            self.states |= other.states

    def state(self, job: int, stage: int) -> State:
        """Bytes of a state; `InputError` if it cannot be laid out."""
        found = self.states[job, stage]
        if isinstance(found, str):
            raise InputError(found)
        return found

    def refusal(
        self,
        segment: Segment,
        live: Sequence[int],
        like: Mapping[int, int],
        messages: Callable[[Segment, int], MessageBytes] | None,
    ) -> str:
        """What a device has too little of, as a sentence; ``""`` if there is enough.

        Counted are the `live` jobs of the plan that would be run, which may be new. `like` has for
        each new one the job that it replaces: it is counted as that one, except for its states and
        its recomputation. `messages` gives the receive windows and outboxes of a device.
        """
        for job, other in like.items():
            self.like[job] = self.like.get(other, other)
        as_known = replace(segment, slots=tuple(self.like.get(job, job) for job in segment.slots))
        extra = {
            (place, stage): row._replace(recompute=self._recomputes(segment, place))
            for place, job in enumerate(as_known.slots)
            for stage in range(segment.plan.n_stages)
            if (row := self.known.get((job, stage)))
        }
        for number, device in self.devices.items():
            held = None if messages is None else messages(as_known, number)
            needed = device.needs(segment.plan, number, extra, held, live).total
            try:
                if sentence := self._short(segment, live, number, device, needed):
                    return sentence
            except InputError as error:  # a state that cannot be laid out
                return str(error)
        return ""

    def _short(
        self, segment: Segment, live: Sequence[int], number: int, device: DeviceBytes, needed: int
    ) -> str:
        """What a device has too little of, if it needs so many bytes in addition to the states."""
        name, slots = segment.plan.devices[number], device.decided.slots[0]
        pairs, accesses = cycle_of(segment.plan, number, partial(self._recomputes, segment))
        states = {k: self.state(segment.slots[j], s) for k, (j, s) in enumerate(pairs) if j in live}
        if not slots:
            needed += sum(state.total for state in states.values())
        else:
            needed += device.decided.taken + sum(state.resident for state in states.values())
            for state in states.values():
                for piece, size, most in zip(
                    PIECES, state.bytes, device.decided.sizes, strict=True
                ):
                    if size > most:
                        return (
                            f"memory: the {piece} of job {self.runs[state.job].title}, stage "
                            f"{state.stage} take {size} bytes, a slot has {most}"
                        )
            need = most_pinned([access for access in accesses if access.state in states])[0]
            if need > slots:
                return (
                    f"memory: {need} states could not leave their slots on {name}, which has "
                    f"{slots}; use recompute=True"
                )
        if needed <= device.limit:
            return ""
        return f"memory: {name} would need {needed} bytes and has {device.limit}"

    def _recomputes(self, segment: Segment, place: int) -> bool:
        return self.runs[segment.slots[place]].job.recompute
