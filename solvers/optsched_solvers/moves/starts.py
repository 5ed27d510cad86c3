"""Which requests can start together on the free GPUs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from optsched_solvers.moves.gpu_ids import GpuIds
from optsched_solvers.moves.model import MoveModel
from optsched_solvers.moves.search import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.bandwidth import BandwidthModel
    from optsched.plan.counts import Counts
    from optsched_solvers.moves.gpu_ids import Cut
    from optsched_solvers.moves.search import Found


def most_started(
    counts: Counts, model: BandwidthModel | None, worth: Sequence[int], limits: Mapping[str, int],
    least: tuple[int, int], seconds: float,
) -> Found:  # fmt: skip
    """Find the requests of most worth that can start together.

    `limits` is the most GPUs of the requests of a group; `least` the number of the first requests
    that all start, and the least number of GPUs of the others. The requests that start are those
    moved in the result; its cost and bound are minus the worth.
    """
    fixed, total = least

    def build(excluded: Sequence[Cut]) -> MoveModel:
        problem = MoveModel(counts, (), range(len(counts.jobs)))
        terms = [(problem.moved[j], job.gpus) for j, job in enumerate(counts.jobs)]
        for v, value in zip(problem.moved.values(), worth, strict=True):
            problem.cost[v] = -value
        problem.row([(v, 1) for v, _ in terms[:fixed]], least=fixed)
        problem.row(terms[fixed:], least=total)
        for group, gpus in limits.items():
            same = [terms[j] for j, job in enumerate(counts.jobs) if job.group == group]
            problem.row(same, most=max(0, gpus))
        problem.add_moved()
        problem.add_hosts()
        for cut in excluded:
            problem.add_cut(cut)
        return problem

    return run(build, GpuIds(counts, model), None, [], time.monotonic() + seconds)
