"""What advice is computed from: times, bytes, room, links, and jobs on groups of devices."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, fields, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.arraypipe.profile.document import NOISY
from optsched.pipelines.partition import balanced
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.profile.document import Link, Profile, ProfiledJob
    from optsched.model.schedule import IntArray


class Assignment(NamedTuple):
    """Jobs on machines; `bound` is a lower bound of the best `makespan`."""

    machine: tuple[int, ...]
    makespan: int
    bound: int

    def jobs_on(self, machine: int) -> list[int]:
        """Jobs of one machine, ascending."""
        return [j for j, m in enumerate(self.machine) if m == machine]


def longest_first(times: Sequence[int], machines: int) -> Assignment:
    """P||Cmax by LPT: the longest job first, always on the machine that is free first.

    At most 4/3 - 1/(3 machines) of the best (Graham 1969). The bound is the largest of the longest
    job, the mean load, and the two jobs that must share a machine when there are more than one a
    machine.

    Parameters
    ----------
    times
        Of every job, >= 0.
    machines
        At least 1.
    """
    load = [(0, m) for m in range(machines)]
    machine = [0] * len(times)
    order = sorted(range(len(times)), key=lambda j: (-times[j], j))
    for j in order:
        busy, m = heapq.heappop(load)
        machine[j] = m
        heapq.heappush(load, (busy + times[j], m))
    bound = max(*times, 0, -(-sum(times) // machines))
    if len(times) > machines:
        bound = max(bound, times[order[machines - 1]] + times[order[machines]])
    return Assignment(tuple(machine), max(load)[0], bound)


def moved(times: Sequence[int], machines: int) -> int:
    """The best makespan if jobs may move between machines on the way (McNaughton 1959).

    At most ``machines - 1`` of them do, each once.
    """
    return max(*times, 0, -(-sum(times) // machines))


def groupings(devices: int, most: int) -> list[tuple[int, int]]:
    """Pairs (groups, devices a group) worth trying: 1, 2, 4, ... groups of at most `most` devices.

    Only groups of two devices or more; of equal widths the one with the most groups.
    """
    found: dict[int, int] = {}
    groups = 1
    while devices // groups >= 2 and most >= 2:
        width = min(devices // groups, most)
        found[width] = devices // width
        groups *= 2
    return [(groups, width) for width, groups in found.items()]


_NO_SUMS: Final = ("spread", "predicted", "overhead", "workspace", "output", "gradient")
WINDOW: Final = 2
"""Messages that a device may have received ahead, of every incoming channel."""


class Asked(NamedTuple):
    """A job that advice is asked for.

    `state` is its model state on every stage in bytes, `iterations` how many make a round.
    """

    job: ProfiledJob
    state: tuple[int, ...]
    iterations: int

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for jobs of equal costs."""
        job = self.job
        return (job.batch_size, job.microbatches, job.recompute, job.update, *self.kind)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for jobs of equal costs at equal micro-batches."""
        return self.job.precision, self.job.optimizer, self.state

    def size(self, microbatches: int, devices: int = 1) -> int:
        """Samples of its largest micro-batch, if every device takes a part of the batch."""
        part = ceil(self.job.batch_size / devices)
        return ceil(part / microbatches)


@dataclass(frozen=True, eq=False)
class Costs:
    """Nanoseconds and bytes of one micro-batch of a job on every stage; arrays of shape (S,).

    `kept` and `checkpoint` are held from F to B, without and with recomputation; `workspace` is
    what a recomputing block needs besides. `output` leaves a stage, `gradient` comes back for it.
    `state` (parameters, optimizer, buffers), `gradients` and `weights` do not depend on the
    micro-batch. `overhead` is what the executor adds to a block, once stages are `merged` to
    blocks. `spread` is the relative error of the times: the IQR over the median, or that of
    predicting sizes if this one was `predicted`.
    """

    forward: IntArray
    backward: IntArray
    recompute: IntArray
    update: IntArray
    kept: IntArray
    checkpoint: IntArray
    workspace: IntArray
    output: IntArray
    gradient: IntArray
    state: IntArray
    gradients: IntArray
    weights: IntArray
    spread: float
    predicted: bool
    overhead: int = 0

    def merged(self, cuts: Sequence[int]) -> Costs:
        """The costs of blocks when stages ``cuts[v] .. cuts[v + 1] - 1`` are one."""
        first, last = np.array(cuts[:-1]), np.array(cuts[1:]) - 1
        changes: dict[str, Any] = {
            key.name: np.add.reduceat(getattr(self, key.name), first)
            for key in fields(self)
            if key.name not in _NO_SUMS
        }
        changes["workspace"] = np.maximum.reduceat(self.workspace, first)
        changes |= {"output": self.output[last], "gradient": self.gradient[last], "overhead": 0}
        changes["forward"] += self.overhead
        changes["backward"] += self.overhead
        return replace(self, **changes)

    def passes(self, recompute: bool) -> IntArray:
        """Forward and backward time of a micro-batch on every stage."""
        both: IntArray = self.forward + self.backward
        return both + self.recompute if recompute else both

    def one_device(self, microbatches: int, recompute: bool) -> int:
        """Nanoseconds of an iteration when one device has the whole model."""
        return microbatches * int(self.passes(recompute).sum()) + int(self.update.sum())

    def one_device_bytes(self, recompute: bool) -> int:
        """Bytes of one job on one device, with the activations of one micro-batch."""
        held = int(self.state.sum() + self.gradients.sum())
        if not recompute:
            return held + int(self.kept.sum())
        return held + int(self.checkpoint.sum()) + int(self.workspace.max())


@dataclass(frozen=True, eq=False)
class Situation:
    """Jobs, devices and costs; `room` is what a device has for us in bytes, None = not known."""

    profile: Profile
    jobs: tuple[Asked, ...]
    devices: int
    memory: int
    room: int | None
    link: Link
    host: Link
    _known: dict[tuple[object, ...], Costs] = field(default_factory=dict)

    @property
    def n_stages(self) -> int:
        """Stages of the profile."""
        return self.profile.n_stages

    def costs(self, job: Asked, size: int) -> Costs:
        """Costs of a job at a micro-batch size."""
        key = (*job.kind, size)
        if key not in self._known:
            self._known[key] = _costs(self.profile, job, size)
        return self._known[key]

    def own(self, job: Asked) -> Costs:
        """Costs at the job's own micro-batches."""
        return self.costs(job, job.size(job.job.microbatches))

    def cuts(self, width: int) -> list[int]:
        """Cuts of the profile's stages into `width` of them, balanced for the jobs as they are."""
        total = np.zeros(self.n_stages, np.int64)
        for one in self.jobs:
            costs, job = self.own(one), one.job
            once = job.microbatches * costs.passes(job.recompute) + costs.update
            total += one.iterations * once
        return balanced(total.tolist(), width)

    def work(self, job: Asked) -> int:
        """Nanoseconds of a round of a job as it is, all stages together."""
        own = self.own(job).one_device(job.job.microbatches, job.job.recompute)
        return job.iterations * own

    def fits(self, needed: int) -> bool | None:
        """Whether a device has so many bytes; None if nobody knows."""
        return None if self.room is None else needed <= self.room


class Seat(NamedTuple):
    """A job in a pipeline: its costs on the pipeline's stages, and how it is cut into blocks."""

    asked: Asked
    costs: Costs
    microbatches: int
    recompute: bool


def rolling_array(
    situation: Situation, seats: Sequence[Seat], *, halves: bool = False, **options: Any
) -> JobArray:
    """The rolling job array of some jobs; `halves` splits the backward pass in two equal parts.

    Gradients leave a stage when its whole block is done, as in the executor.
    """
    link = situation.link
    fields: dict[str, Any] = {
        key: np.array([getattr(seat.costs, key) for seat in seats])
        for key in ("forward", "backward", "recompute", "update", "checkpoint", "state")
    }
    fields["activation"] = np.array([seat.costs.kept for seat in seats])
    fields["recompute_workspace"] = np.array([seat.costs.workspace for seat in seats])
    if halves:
        fields["weight"] = fields["backward"] // 2
        fields["backward"] -= fields["weight"]
        fields["weight_memory"] = fields["activation"]
    for key, what in (("lag_forward", "output"), ("lag_backward", "gradient")):
        rows = [getattr(seat.costs, what)[:-1].tolist() for seat in seats]
        fields[key] = np.array(
            [[ceil(link.time_ns(size)) for size in row] for row in rows], np.int64
        ).reshape(len(seats), -1)
    together = any(seat.asked.job.update == "global" for seat in seats)
    return JobArray(**fields | {
        "micro_batches": [seat.microbatches for seat in seats],
        "multiplicity": [seat.asked.iterations for seat in seats],
        "recompute_mode": [seat.recompute for seat in seats],
        "update_mode": "global" if together else "fused",
        "update_blocks_gradient": True,
        "objective": "period",
        "time_unit": "ns",
        **options,
    })  # fmt: skip


def ladder(job: ProfiledJob, multiple: int = 1, most: int = 1 << 20) -> list[int]:
    """Numbers of micro-batches worth trying, ascending: the job's own, 1, 2, 3, 4, 6, 8, 12, ...

    And those times `multiple`. Of several with equal micro-batches the least is enough, but for
    pipelines that want a multiple.
    """
    steps = {m for k in range(job.batch_size.bit_length()) for m in (1 << k, 3 << k)}
    tried = {m for step in steps for m in (step, step * multiple)}
    found: dict[tuple[int, bool], int] = {}
    for m in sorted(m for m in tried if m <= min(job.batch_size, most)):
        found.setdefault((-(-job.batch_size // m), m % multiple == 0), m)
    return sorted({*found.values(), job.microbatches})


def window(costs: Sequence[Costs]) -> IntArray:
    """Bytes of every device for messages received ahead, from both neighbours; shape (S,)."""
    sent = np.max([one.output for one in costs], axis=0)[:-1]
    back = np.max([one.gradient for one in costs], axis=0)[:-1]
    total: IntArray = WINDOW * (np.append(0, sent) + np.append(back, 0))
    return total


def _costs(profile: Profile, asked: Asked, size: int) -> Costs:
    """Times and bytes as the profile has or predicts them."""
    stages, job = range(profile.n_stages), asked.job
    timed = {kind: [profile.duration_of(kind, s, size, job) for s in stages] for kind in "FBRU"}
    times = {kind: np.array([t.median_ns for t in row], np.int64) for kind, row in timed.items()}
    held = {
        what: np.array([profile.bytes_of(what, s, size, job.precision) for s in stages], np.int64)
        for what in ("saved", "input", "output", "gradient")
    }
    predicted = any(timed["F"][s].predicted for s in stages)
    spread = _spread(profile, size, job.precision)
    return Costs(
        forward=times["F"], backward=times["B"], recompute=times["R"], update=times["U"],
        kept=held["saved"], checkpoint=held["input"],
        workspace=np.maximum(held["saved"] - held["input"], 0),
        output=held["output"], gradient=held["gradient"],
        state=np.array(asked.state, np.int64),
        gradients=np.array([stage.gradients_bytes for stage in profile.stages], np.int64),
        weights=np.array([stage.parameters_bytes for stage in profile.stages], np.int64),
        spread=max(spread, _doubt(profile)) if predicted else spread, predicted=predicted,
        overhead=profile.device.block_overhead_ns,
    )  # fmt: skip


def _spread(profile: Profile, size: int, precision: str) -> float:
    """IQR of all forward and backward blocks over their medians, at the nearest measured size."""
    nearest = min(profile.sizes(precision), key=lambda known: (abs(known - size), known))
    there = [
        block
        for block in profile.blocks
        if block.kind in "FB" and (block.batch, block.dtype) == (nearest, precision)
    ]
    return sum(block.iqr_ns for block in there) / sum(block.median_ns for block in there)


def _doubt(profile: Profile) -> float:
    """Relative error of predicted times, as far as the measured ones can tell."""
    return NOISY if profile.fit_error is None else profile.fit_error
