"""What advice is computed from: jobs, devices, links, and times and bytes at any micro-batch."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, fields, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.arraypipe.profile.document import NOISY
from optsched.arraypipe.profile.problem import RESERVE
from optsched.pipelines.partition import balanced
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.profile.document import Link, Profile, ProfiledJob
    from optsched.model.schedule import IntArray


_NO_SUMS: Final = ("spread", "predicted", "overhead", "workspace", "output", "gradient")
WINDOW: Final = 2
"""Messages that a device may have received ahead, of every incoming channel."""


class Asked(NamedTuple):
    """A job that advice is asked for."""

    job: ProfiledJob
    state: tuple[int, ...]  # bytes on every stage: parameters, optimizer, buffers
    iterations: int  # in a round

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
        return ceil(ceil(self.job.batch_size / devices) / microbatches)

    @property
    def microbatches(self) -> list[int]:
        """Numbers of micro-batches worth trying: the job's own, 1, 2, 3, 4, 6, 8, 12, ...

        Of several with equal micro-batches the least is enough.
        """
        batch = self.job.batch_size
        steps = {m for k in range(batch.bit_length()) for m in (1 << k, 3 << k) if m <= batch}
        found = {-(-batch // m): m for m in sorted(steps, reverse=True)}
        return sorted({*found.values(), self.job.microbatches})


@dataclass(frozen=True, eq=False)
class Costs:
    """Nanoseconds and bytes of one micro-batch of a job on every stage; arrays of shape (S,)."""

    forward: IntArray
    backward: IntArray
    recompute: IntArray
    update: IntArray
    kept: IntArray  # from F to B
    checkpoint: IntArray  # from F to B with recomputation
    workspace: IntArray  # of a recomputing block besides
    output: IntArray  # leaves the stage
    gradient: IntArray  # comes back for the output
    state: IntArray
    gradients: IntArray
    weights: IntArray
    spread: float  # relative error of the times: IQR over median, or that of predicted ones
    predicted: bool  # this micro-batch size was not measured
    overhead: int = 0  # nanoseconds that the executor adds to a block

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

    def activations(self, recompute: bool) -> int:
        """Bytes of one micro-batch through the whole model on one device."""
        if recompute:
            return int(self.checkpoint.sum()) + int(self.workspace.max())
        return int(self.kept.sum())

    def one_device_bytes(self, recompute: bool) -> int:
        """Bytes of one job on one device."""
        return int((self.state + self.gradients).sum()) + self.activations(recompute)


@dataclass(frozen=True, eq=False)
class Situation:
    """Jobs, devices and costs."""

    profile: Profile
    jobs: tuple[Asked, ...]
    devices: int
    memory: int  # bytes of a device, 0 = not known
    link: Link  # between devices
    _known: dict[tuple[object, ...], Costs] = field(default_factory=dict)

    @property
    def room(self) -> int | None:
        """Bytes of a device that jobs may take; None if nobody knows."""
        return int(self.memory * (1 - RESERVE)) if self.memory else None

    @property
    def n_stages(self) -> int:
        """Stages of the profile."""
        return self.profile.n_stages

    def costs(self, asked: Asked, size: int) -> Costs:
        """Costs of a job at a micro-batch size."""
        key = (*asked.kind, size)
        if key not in self._known:
            self._known[key] = _costs(self.profile, asked, size)
        return self._known[key]

    def own(self, asked: Asked) -> Costs:
        """Costs at the job's own micro-batches."""
        return self.costs(asked, asked.size(asked.job.microbatches))

    def cuts(self, width: int) -> list[int]:
        """Cuts of the profile's stages into `width` of them, balanced for the jobs as they are."""
        total = np.zeros(self.n_stages, np.int64)
        for one in self.jobs:
            costs, job = self.own(one), one.job
            once = job.microbatches * costs.passes(job.recompute) + costs.update
            total += one.iterations * once
        return balanced(total.tolist(), width)

    def work(self, asked: Asked) -> int:
        """Nanoseconds of a round of a job as it is, all stages together."""
        job = asked.job
        return asked.iterations * self.own(asked).one_device(job.microbatches, job.recompute)

    def fits(self, needed: int) -> bool | None:
        """Whether a device has so many bytes; None if nobody knows."""
        return None if self.room is None else needed <= self.room


class Cut(NamedTuple):
    """A job in a pipeline: its costs on the pipeline's stages, and how it is cut into blocks."""

    asked: Asked
    costs: Costs
    microbatches: int
    recompute: bool


def rolling_array(situation: Situation, jobs: Sequence[Cut], **options: Any) -> JobArray:
    """The rolling job array of some jobs.

    Gradients leave a stage when its whole block is done, as in the executor.
    """
    values: dict[str, Any] = {
        key: np.array([getattr(one.costs, key) for one in jobs])
        for key in ("forward", "backward", "recompute", "update", "checkpoint", "state")
    }
    for key, what in (("lag_forward", "output"), ("lag_backward", "gradient")):
        rows = [getattr(one.costs, what)[:-1].tolist() for one in jobs]
        values[key] = np.array(
            [[ceil(situation.link.time_ns(size)) for size in row] for row in rows], np.int64
        ).reshape(len(jobs), -1)
    together = any(one.asked.job.update == "global" for one in jobs)
    return JobArray(**values | {
        "activation": np.array([one.costs.kept for one in jobs]),
        "recompute_workspace": np.array([one.costs.workspace for one in jobs]),
        "micro_batches": [one.microbatches for one in jobs],
        "multiplicity": [one.asked.iterations for one in jobs],
        "recompute_mode": [one.recompute for one in jobs],
        "update_mode": "global" if together else "fused",
        "update_blocks_gradient": True,
        "objective": "period",
        "time_unit": "ns",
        **options,
    })  # fmt: skip


def window(costs: Sequence[Costs]) -> IntArray:
    """Bytes of every device for messages received ahead, from both neighbours; shape (S,)."""
    sent = np.max([one.output for one in costs], axis=0)[:-1]
    back = np.max([one.gradient for one in costs], axis=0)[:-1]
    total: IntArray = WINDOW * (np.append(0, sent) + np.append(back, 0))
    return total


def longest_first(times: Sequence[int], machines: int) -> list[list[int]]:
    """P||Cmax by LPT: jobs of every machine, the longest first on the machine that is free first.

    At most 4/3 - 1/(3 machines) of the best makespan (Graham 1969).
    """
    load = [(0, m) for m in range(machines)]
    rows: list[list[int]] = [[] for _ in range(machines)]
    for j in sorted(range(len(times)), key=lambda j: (-times[j], j)):
        busy, m = load[0]
        rows[m].append(j)
        heapq.heapreplace(load, (busy + times[j], m))
    return rows


def groupings(devices: int, most: int) -> list[tuple[int, int]]:
    """Pairs (groups, devices a group) worth trying: 1, 2, 4, ... groups of at most `most` devices.

    Only groups of two devices or more.
    """
    widths = {min(devices >> k, most) for k in range(devices.bit_length())}
    return [(devices // width, width) for width in sorted(widths, reverse=True) if width > 1]


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
    if predicted:
        known = NOISY if profile.fit_error is None else profile.fit_error
        spread = max(spread, known)
    return Costs(
        forward=times["F"], backward=times["B"], recompute=times["R"], update=times["U"],
        kept=held["saved"], checkpoint=held["input"],
        workspace=np.maximum(held["saved"] - held["input"], 0),
        output=held["output"], gradient=held["gradient"],
        state=np.array(asked.state, np.int64),
        gradients=np.array([stage.gradients_bytes for stage in profile.stages], np.int64),
        weights=np.array([stage.parameters_bytes for stage in profile.stages], np.int64),
        spread=spread, predicted=predicted,
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
