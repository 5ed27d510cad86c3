"""What a set of GPUs would get, what it would cost running jobs, and what is not known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.bandwidth.models.contention import Share, demands, share
from optsched.bandwidth.models.model import Interval
from optsched.bandwidth.search.by_counts import best_by_counts
from optsched.bandwidth.topology.state import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.models.contention import Traffic
    from optsched.bandwidth.models.model import BandwidthModel
    from optsched.bandwidth.topology.policy import Policy
    from optsched.bandwidth.topology.state import ClusterState


class WhatIf(NamedTuple):
    """If a job started on these GPUs; bandwidths in kB/s."""

    gpus: tuple[int, ...]
    share: Share
    """What they get beside the running jobs, what they had alone, and who interferes."""
    victims: dict[str, int]
    """What running jobs lose, for those that lose anything."""
    best: int | None
    """Value of the dispatcher's own choice of so many GPUs; None if the policy allows none."""
    regret: int | None
    """What may be lost at most by not knowing better; 0 if all is measured, None if unknown."""
    assumed: tuple[str, ...]
    """What the model assumes of links; see `BandwidthModel`."""
    fault: str
    """The rule of the policy that they break; ``""`` if they obey it."""


def victims(
    model: BandwidthModel, state: ClusterState, demands_of: Sequence[int], gpus: tuple[int, ...]
) -> dict[str, int]:
    """What running jobs lose to a new one, for those that lose anything."""
    newcomer, alone = Job("the new job", gpus), model.of(gpus)
    found = {}
    used = (state.cluster.counts(gpus) > 0).astype(np.int64)
    for j in np.flatnonzero(state.held @ used if used.sum() > 1 else []).tolist():
        job = state.jobs[j]
        others = state.jobs[:j] + state.jobs[j + 1 :]
        theirs = [*demands_of[:j], *demands_of[j + 1 :]]
        before = _as_tenant(model, state.with_jobs(others), job, [*theirs, demands_of[j]])
        beside = state.with_jobs((*others, newcomer))
        after = _as_tenant(model, beside, job, [*theirs, alone, demands_of[j]])
        if after < before:
            found[job.name] = before - after
    return found


def _as_tenant(
    model: BandwidthModel, around: ClusterState, job: Job, demands_of: Sequence[int]
) -> int:
    """What a running job gets beside others, of its demand (the last), or of B of its GPUs."""
    one = share(model, around, job.gpus, demands_of[:-1])
    reached = min(demands_of[-1], one.standalone)
    if one.capacity is None or reached + one.demand <= one.capacity:
        return reached
    return reached * one.capacity // (reached + one.demand)


def regret(
    model: BandwidthModel,
    state: ClusterState,
    gpus: tuple[int, ...],
    policy: Policy,
    traffic: Traffic,
    seed: int,
) -> int | None:
    """What a choice may lose at most by not knowing better, in kB/s; None if that is unknown.

    The best choice by the upper ends of the model's intervals, less what this one has at least.
    """
    high, low = Interval(model, "high"), Interval(model, "low")
    tables = None if model.assumed else high.tables()
    if tables is None:
        return None
    least = demands(low, state, traffic, seed)
    best = best_by_counts(tables, state, least, len(gpus), policy)
    if best is None or not best.exact:
        return None
    sure = share(low, state, gpus, demands(high, state, traffic, seed))
    return max(0, best.value - sure.value)
