"""What advice is computed from: jobs, devices, links, and costs at any micro-batch."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.arraypipe.profile.costs import Costs, array_fields, costs_of
from optsched.arraypipe.profile.document import NOISY
from optsched.arraypipe.profile.problem import RESERVE
from optsched.pipelines.partition import balanced
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.profile.document import Link, Profile, ProfiledJob
    from optsched.model.schedule import IntArray


_WINDOW: Final = 2  # messages that a device may have received ahead, of every incoming channel


class Asked(NamedTuple):
    """A job that advice is asked for, without its name: equal for jobs of equal costs."""

    job: ProfiledJob
    state: tuple[int, ...]  # bytes on every stage: parameters, optimizer, buffers
    iterations: int  # in a round

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


class Cut(NamedTuple):
    """How a job runs: its costs on some stages, and how it is cut into blocks."""

    asked: Asked
    costs: Costs
    microbatches: int
    recompute: bool


@dataclass(frozen=True, eq=False)
class Situation:
    """Jobs, devices and costs."""

    profile: Profile
    names: tuple[str, ...]  # of the jobs
    jobs: tuple[Asked, ...]
    devices: int
    memory: int  # bytes of a device, 0 = not known
    link: Link  # between devices
    _known: dict[tuple[object, ...], Costs] = field(default_factory=dict)

    @property
    def room(self) -> float:
        """Bytes of a device that jobs may take; without end if nobody knows."""
        return int(self.memory * (1 - RESERVE)) if self.memory else inf

    @property
    def n_stages(self) -> int:
        """Stages of the profile."""
        return self.profile.n_stages

    def costs(self, asked: Asked, size: int) -> Costs:
        """Costs of a job at a micro-batch size."""
        key = (asked.job, asked.state, size)
        if key not in self._known:
            self._known[key] = costs_of(self.profile, asked.job, asked.state, size)
        return self._known[key]

    def own(self, asked: Asked) -> Cut:
        """A job as it is set."""
        job = asked.job
        return Cut(asked, self.costs(asked, job.batch), job.microbatches, job.recompute)

    def merged(self, one: Cut, cuts: Sequence[int]) -> Cut:
        """A job on fewer stages."""
        overhead_ns = self.profile.device.block_overhead_ns
        return one._replace(costs=one.costs.merged(cuts, overhead_ns))

    def cuts(self, width: int) -> list[int]:
        """Cuts of the profile's stages into `width` of them, balanced for the jobs as they are."""
        return balanced(load_ns([self.own(one) for one in self.jobs]).tolist(), width)

    def spread(self, asked: Asked, size: int) -> float:
        """Relative error of the times: IQR over median, or that of predicted ones.

        The IQR is that of all forward and backward blocks at the nearest measured size.
        """
        profile, precision = self.profile, asked.job.precision
        nearest = min(profile.sizes(precision), key=lambda known: (abs(known - size), known))
        there = [
            times
            for block in profile.blocks
            if (block.batch, block.dtype) == (nearest, precision)
            for times in (block.forward, block.backward)
        ]
        spread = sum(t.iqr_ns for t in there) / sum(t.median_ns for t in there)
        if nearest == size:
            return spread
        return max(spread, NOISY if profile.fit_error is None else profile.fit_error)


def load_ns(jobs: Sequence[Cut]) -> IntArray:
    """Time of a round on every stage."""
    work = [
        one.asked.iterations
        * (one.microbatches * one.costs.passes_ns(one.recompute) + one.costs.update_ns)
        for one in jobs
    ]
    total: IntArray = np.sum(work, axis=0)
    return total


def rolling_array(situation: Situation, jobs: Sequence[Cut], **options: Any) -> JobArray:
    """The rolling job array of some jobs.

    Gradients leave a stage when its whole block is done, as in the executor.
    """
    together = any(one.asked.job.update == "global" for one in jobs)
    return JobArray(**array_fields([one.costs for one in jobs], situation.link) | {
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
    total: IntArray = _WINDOW * (np.append(0, sent) + np.append(back, 0))
    return total


def longest_first(times: Sequence[int], machines: int) -> list[list[int]]:
    """P||Cmax by LPT: jobs of every machine, the longest first on the machine that is free first.

    At most 4/3 - 1/(3 machines) of the best makespan (Graham 1969).
    """
    free = [(0, m) for m in range(machines)]
    rows: list[list[int]] = [[] for _ in range(machines)]
    for j in sorted(range(len(times)), key=lambda j: (-times[j], j)):
        busy, m = free[0]
        rows[m].append(j)
        heapq.heapreplace(free, (busy + times[j], m))
    return rows


def groupings(devices: int, most: int) -> list[tuple[int, int]]:
    """Pairs (groups, devices a group) worth trying: 1, 2, 4, ... groups of at most `most` devices.

    Only groups of two devices or more.
    """
    widths = {min(devices >> k, most) for k in range(devices.bit_length())}
    return [(devices // width, width) for width in sorted(widths, reverse=True) if width > 1]
