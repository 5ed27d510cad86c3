"""`allocation`: GPUs shared out among the jobs that run, by an objective, at every event.

Jobs are admitted by arrival with their smallest size, and no job is preempted: of jobs that still
wait these rules see only the smallest size. What is left after that goes by the objective:

``max_min``
    Weighted max-min fairness of g/w, or of f(g)/w: the worst-off job is as well off as possible,
    then the next; the homogeneous case of Narayanan et al., *Heterogeneity-Aware Cluster Scheduling
    Policies* (Gavel), OSDI 2020, in whole GPUs and without time slices.
``proportional``
    Shares by weight, or by remaining work: bounded apportionment by the divisors of Webster (which
    never takes a GPU from a job because there are more), eq. (31) of Sun & Huh, *Entropy* (Appl.
    Sci. 2026, 16, 3725), made exact; Balinski & Young, *Fair Representation*.
``makespan``
    Smallest max R/f(g) over the jobs that run, then the next largest (Gavel, as above).
``finish_time_fairness``
    Smallest max rho = (elapsed + R/f(g)) / T_iso, the *objective* of Mahajan et al., *Themis*, NSDI
    2020 (their auction between applications is not reproduced). T_iso = work / f(s) * max(1, n s/G)
    with n jobs active now and s the largest allowed size of at most G/n GPUs, else the smallest.
``goodput``
    Power mean of speed-ups: Qiao et al., *Pollux*, OSDI 2021, eq. 14-16: speedup(g) = goodput(g) /
    goodput(fair share), fitness (mean of speedup^p)^(1/p). A job's goodputs are given as the
    `Table` of its speeds. Pollux searches by a genetic algorithm; here it is a multiple choice,
    solved exactly. Its restart penalty is left out.

On several types of GPUs a job gets the type where it is fastest of those with enough GPUs, and the
objective holds among the jobs of one type, by their speeds on it (Gavel moves jobs between types in
rounds, which is not done here). The largest value of ``max_min``, ``makespan`` and
``finish_time_fairness`` is the best possible for any allowed sizes; all values in lexicographic
order are if every number of GPUs is allowed and every GPU makes a job faster.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from optsched.cluster.policies.elastic_rule import (
    APPORTION,
    FREE,
    IDLE,
    NEVER,
    WORST,
    fixed_sizes,
    floats,
    gangs,
    integers,
    positions,
    share,
    sizing,
    total,
)
from optsched.cluster.policies.gpu_types import assigned, decision, types_of
from optsched.cluster.world.compiled import RulePolicy
from optsched.errors import InputError
from optsched.io.values import boolean, format_value, number, one_of
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings

_MAX_MIN, _PROPORTIONAL, _MAKESPAN, _FAIRNESS = range(4)
OBJECTIVES: Final = ("max_min", "proportional", "makespan", "finish_time_fairness", "goodput")
_ONLY_FOR: Final = {"of": "max_min", "score": "proportional", "p": "goodput"}
PARTS: Final = 10**6
"""Worths of speed-ups are compared in millionths."""
_MOST_WORTH: Final = 2.0**40
_NONE: Final = -(2**62)


class Pool(NamedTuple):
    """GPUs of one type, and the jobs among which they are shared."""

    order: Any
    """Positions of the jobs."""
    rate: Any
    """Speed at each of ``view.size``."""
    free: Any
    gpus: Any
    """GPUs without a job, and all."""


class Allocation(RulePolicy):
    """Exact allocation to the jobs that run.

    Parameters
    ----------
    objective
        ``"max_min"``, ``"proportional"``, ``"makespan"``, ``"finish_time_fairness"`` or
        ``"goodput"``; see the module.
    of
        Of ``max_min``: levels of ``"gpus"`` (g/w, default) or of ``"speed"`` (f(g)/w).
    score
        Of ``proportional``: ``"weight"`` (default) or ``"remaining"`` (long jobs get more).
    p
        Of ``goodput``: exponent -10..1; 1 maximizes the sum, 0 the product, lower ones are fairer
        (default -1).
    clairvoyant
        True remaining work instead of the estimate.
    """

    name = "allocation"
    types_in_python: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("objective", "of", "score", "p", "clairvoyant")

    def __init__(
        self,
        *,
        objective: str = "max_min",
        of: str | None = None,
        score: str | None = None,
        p: float | None = None,
        clairvoyant: bool = False,
    ) -> None:
        self.objective = one_of("options.objective", objective, OBJECTIVES)
        for key, value in (("of", of), ("score", score), ("p", p)):
            if value is not None and objective != _ONLY_FOR[key]:
                raise InputError(
                    f"options.{key}: {format_value(value)} is an option of objective="
                    f"{_ONLY_FOR[key]}, not of {objective}; leave it out"
                )
        of, score = "gpus" if of is None else of, "weight" if score is None else score
        self.of = one_of("options.of", of, ("gpus", "speed"))
        self.score = one_of("options.score", score, ("weight", "remaining"))
        self.p = number("options.p", -1.0 if p is None else p, -10.0, 1.0)
        self.clairvoyant = boolean("options.clairvoyant", clairvoyant)
        self.rule = share_goodput if objective == "goodput" else share_levels  # compiles faster

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """When sizes may change, and the options as numbers."""
        known = sizing(workload, nodes, settings, self.clairvoyant)
        if self.objective == "goodput":
            return known, self.p
        options = self.of == "speed", self.score == "remaining"
        return known, OBJECTIVES.index(self.objective), *options

    def decide(self, view: ClusterView) -> Decision:
        """GPUs now, on clusters of several types with their nodes."""
        types = types_of(view)
        if types is None:
            return super().decide(view)
        known = self.arguments(view.workload, view.nodes, view.settings)  # type: ignore[arg-type]
        kind, quota = assigned(view, types, fixed_sizes(view, known[0])), np.zeros_like(view.gpus)
        for k, rate in enumerate(types.rate.reshape(len(types.gpus), -1)):
            pool = Pool(np.flatnonzero(kind == k), rate, types.free[k], types.gpus[k])
            shares = goodput_shares if self.objective == "goodput" else level_shares
            quota[pool.order] = shares(view, pool, *known)[pool.order]
        return decision(view, types, quota, kind)


def share_levels(view, sizing, objective, of_speed, of_work):  # type: ignore[no-untyped-def]
    """GPUs now, by all objectives but goodput."""
    return level_shares(view, all_jobs(view), sizing, objective, of_speed, of_work)


def share_goodput(view, sizing, p):  # type: ignore[no-untyped-def]
    """GPUs now, by goodput."""
    return goodput_shares(view, all_jobs(view), sizing, p)


@helper()
def all_jobs(view):  # type: ignore[no-untyped-def]
    """All GPUs for all jobs."""
    return Pool(positions(len(view.job)), view.rate, total(view.free), total(view.capacity))


@helper()
def level_shares(view, pool, sizing, objective, of_speed, of_work):  # type: ignore[no-untyped-def]
    """GPUs of the jobs of a pool; see the module."""
    n = len(view.gpus)
    work, scale, elapsed = floats(n), floats(n), floats(n)
    by_weight = objective == _MAX_MIN or (objective == _PROPORTIONAL and not of_work)
    for at in range(len(pool.order)):
        i = pool.order[at]
        scale[i], work[i] = 1.0, view.remaining[i]
        if by_weight:  # the lowest level g/w is the largest w/g
            work[i] = view.weight[i]
        if objective == _FAIRNESS:
            elapsed[i] = view.time - view.submit[i]
            scale[i] = 1.0 / isolated_time(view, pool, i)
    pace = view.size if objective == _MAX_MIN and not of_speed else pool.rate
    jobs = gangs(view, sizing, pool.order, work, scale, elapsed, elapsed, pace)
    share(jobs, pool.free, NEVER, APPORTION if objective == _PROPORTIONAL else WORST)
    return jobs.quota


@helper(counted=False)
def fair_option(view, pool, i):  # type: ignore[no-untyped-def]
    """Index of the largest size of job i of at most G/n GPUs, else of its smallest."""
    at = view.size_ptr[i]
    while at + 1 < view.size_ptr[i + 1] and view.size[at + 1] * len(pool.order) <= pool.gpus:
        at += 1
    return at


@helper(counted=False)
def isolated_time(view, pool, i):  # type: ignore[no-untyped-def]
    """T_iso of an active job, by its estimated work (done and left); of one without sizes 1."""
    if view.size_ptr[i] == view.size_ptr[i + 1]:
        return 1.0
    at = fair_option(view, pool, i)
    crowd = max(1.0, len(pool.order) * view.size[at] / max(pool.gpus, 1))
    return (view.done[i] + view.remaining[i]) / pool.rate[at] * crowd


@helper()
def goodput_shares(view, pool, sizing, p):  # type: ignore[no-untyped-def]
    """GPUs of the jobs of a pool with the greatest sum of worths."""
    none = floats(len(view.gpus))
    jobs = gangs(view, sizing, pool.order, none, none, none, none, pool.rate)
    spare, count = share(jobs, pool.free, NEVER, IDLE), 0
    if spare > 0:
        for i in pool.order:
            if jobs.quota[i] > 0 and jobs.fixed[i] == FREE:
                jobs.some[count] = i
                count += 1
        ptr, more, value = worths(view, pool, jobs.some[:count], spare, p)
        chosen = best_options(ptr, more, value, spare)
        for row in range(count):
            jobs.quota[jobs.some[row]] += more[chosen[row]]
    return jobs.quota


@helper()
def worths(view, pool, movable, spare, p):  # type: ignore[no-untyped-def]
    """Options of jobs above their smallest sizes: offsets, more GPUs, worth in millionths.

    Worth, to be maximized in sum: speedup^p, its logarithm for p = 0, or its negative for p < 0.
    """
    ptr, more, value, at = (
        integers(len(movable) + 1),
        integers(len(view.size)),
        integers(len(view.size)),
        0,
    )
    for row in range(len(movable)):
        i = movable[row]
        first, fair = view.size_ptr[i], pool.rate[fair_option(view, pool, i)]
        for k in range(first, view.size_ptr[i + 1]):
            if view.size[k] - view.size[first] <= spare:
                speedup = pool.rate[k] / fair
                worth = math.log(speedup) if p == 0.0 else min(speedup**p, _MOST_WORTH)
                more[at] = view.size[k] - view.size[first]
                value[at] = int(np.rint(PARTS * (worth if p >= 0.0 else -worth)))
                at += 1
        ptr[row + 1] = at
    return ptr, more, value


@helper()
def best_options(ptr, size, value, budget):  # type: ignore[no-untyped-def]
    """Positions of one option of every row with the greatest sum of values within a budget."""
    rows, most = len(ptr) - 1, 0
    for row in range(rows):
        most += size[ptr[row + 1] - 1]
    width, chosen = min(budget, most) + 1, integers(rows)
    _programme(ptr, size, value, integers(2 * width), integers(rows * width), chosen)
    return chosen


@helper(counted=False)
def _programme(ptr, size, value, best, taken, chosen):  # type: ignore[no-untyped-def]
    """Dynamic programming over the budget: the greatest value of the rows so far by their size.

    ``best`` holds two rows, the last and the present one (`_NONE`: they do not fit); of equal
    options the first is taken.
    """
    width, rows = len(best) // 2, len(chosen)
    for row in range(rows):
        now, last = width * (row % 2), width * (1 - row % 2)
        for b in range(width):
            best[now + b] = _NONE
        for k in range(ptr[row], ptr[row + 1]):
            for b in range(size[k], width):
                before = best[last + b - size[k]]
                if before > _NONE and before + value[k] > best[now + b]:
                    best[now + b], taken[row * width + b] = before + value[k], k
    left = width - 1
    for row in range(rows - 1, -1, -1):
        chosen[row] = taken[row * width + left]
        left -= size[chosen[row]]
    return left
