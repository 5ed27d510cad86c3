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

On several types of GPUs a job gets the type where it is fastest of those with room, and the
objective holds among the jobs of one type, by their speeds on it (Gavel moves jobs between types in
rounds, which is not done here). The largest value of ``max_min``, ``makespan`` and
``finish_time_fairness`` is the best possible for any allowed sizes; all values in lexicographic
order are if every number of GPUs is allowed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from optsched.cluster.policies.elastic import by_pass
from optsched.cluster.policies.elastic_rule import (
    APPORTION,
    FREE,
    IDLE,
    NEVER,
    WORST,
    Jobs,
    fixed_sizes,
    last_passes,
    share,
)
from optsched.cluster.world.compiled import RulePolicy
from optsched.errors import InputError
from optsched.io.values import boolean, format_value, number, one_of
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings

_MAX_MIN, _PROPORTIONAL, _MAKESPAN, _FAIRNESS, _GOODPUT = range(5)
OBJECTIVES: Final = ("max_min", "proportional", "makespan", "finish_time_fairness", "goodput")
_ONLY_FOR: Final = {"of": "max_min", "score": "proportional", "p": "goodput"}
PARTS: Final = 10**6
"""Worths of speed-ups are compared in millionths."""
_MOST_WORTH: Final = 2.0**40
_NONE: Final = -(2**62)


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

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """What the rule needs beside the view."""
        return (
            last_passes(workload, self.clairvoyant), by_pass(settings),
            OBJECTIVES.index(self.objective), self.of == "speed", self.score == "remaining", self.p,
        )  # fmt: skip

    def decide(self, view: ClusterView) -> Decision:
        """GPUs now, on clusters of several types with their nodes."""
        from optsched.cluster.policies import gpu_types

        if not gpu_types.several(view):
            return super().decide(view)
        known = self.arguments(view.workload, view.nodes, view.settings)  # type: ignore[arg-type]
        fixed = fixed_sizes(view, known[0], known[1])
        return gpu_types.allocate(view, fixed, lambda part: self.rule(part, *known))

    @staticmethod
    def rule(view, last_pass, by_pass, objective, of_speed, of_work, p):  # type: ignore[no-untyped-def]
        """GPUs now."""
        n = len(view.job)
        work, weight, elapsed = view.remaining.astype(np.float64), np.ones(n), np.zeros(n)
        pace, surplus = view.rate, WORST
        if objective == _MAX_MIN:  # the lowest level g/w is the largest w/g
            work = view.weight.astype(np.float64)
            if not of_speed:
                pace = view.size
        elif objective == _PROPORTIONAL:
            surplus = APPORTION
            if not of_work:
                work = view.weight.astype(np.float64)
        elif objective == _FAIRNESS:
            elapsed = (view.time - view.submit).astype(np.float64)
            weight = 1.0 / isolated_times(view)
        elif objective == _GOODPUT:
            surplus = IDLE
        fixed = fixed_sizes(view, last_pass, by_pass)
        jobs = Jobs(np.arange(n), fixed, work, weight, elapsed, np.zeros(n), pace)
        quota, spare = share(view, jobs, NEVER, surplus)
        if objective == _GOODPUT and spare > 0:
            movable = np.flatnonzero((quota > 0) & (fixed == FREE))
            ptr, size, value = worths(view, movable, spare, p)
            quota[movable] += best_options(ptr, size, value, spare)
        return quota


@helper()
def fair_option(view, i):  # type: ignore[no-untyped-def]
    """Index of the largest size of job i of at most G/n GPUs, else of its smallest."""
    at = view.size_ptr[i]
    while (
        at + 1 < view.size_ptr[i + 1] and view.size[at + 1] * len(view.job) <= view.capacity.sum()
    ):
        at += 1
    return at


@helper()
def isolated_times(view):  # type: ignore[no-untyped-def]
    """T_iso of every active job, by its estimated work (done and left)."""
    gpus = max(view.capacity.sum(), 1)
    times = np.ones(len(view.job))
    for i in range(len(times)):
        if view.size_ptr[i] < view.size_ptr[i + 1]:
            at = fair_option(view, i)
            crowd = max(1.0, len(times) * view.size[at] / gpus)
            times[i] = (view.done[i] + view.remaining[i]) / view.rate[at] * crowd
    return times


@helper()
def worths(view, movable, spare, p):  # type: ignore[no-untyped-def]
    """Options of jobs above their smallest sizes: offsets, more GPUs, worth in millionths.

    Worth, to be maximized in sum: speedup^p, its logarithm for p = 0, or its negative for p < 0.
    """
    most = view.size_ptr[movable + 1].sum() - view.size_ptr[movable].sum()
    ptr, at = np.zeros(len(movable) + 1, np.int64), 0
    more, value = np.empty(most, np.int64), np.empty(most, np.int64)
    for row in range(len(movable)):
        i = movable[row]
        first, fair = view.size_ptr[i], view.rate[fair_option(view, i)]
        for k in range(first, view.size_ptr[i + 1]):
            if view.size[k] - view.size[first] <= spare:
                speedup = view.rate[k] / fair
                worth = math.log(speedup) if p == 0.0 else min(speedup**p, _MOST_WORTH)
                more[at] = view.size[k] - view.size[first]
                value[at] = int(np.rint(PARTS * (worth if p >= 0.0 else -worth)))
                at += 1
        ptr[row + 1] = at
    return ptr, more[:at], value[:at]


@helper()
def best_options(ptr, size, value, budget):  # type: ignore[no-untyped-def]
    """Sizes of one option of every row with the greatest sum of values within a budget.

    Dynamic programming over the budget: ``best[b]`` is the greatest value of the rows so far with
    sizes of at most b (`_NONE`: they do not fit); of equal options the first.
    """
    rows = len(ptr) - 1
    best = np.zeros(budget + 1, np.int64)
    taken = np.empty((rows, budget + 1), np.int64)
    for row in range(rows):
        old, chosen = best.copy(), taken[row]
        best[:] = _NONE
        for k in range(ptr[row], ptr[row + 1]):
            for b in range(size[k], budget + 1):
                if old[b - size[k]] > _NONE and old[b - size[k]] + value[k] > best[b]:
                    best[b], chosen[b] = old[b - size[k]] + value[k], k
    out, left = np.zeros(rows, np.int64), budget
    for row in range(rows - 1, -1, -1):
        out[row] = size[taken[row, left]]
        left -= out[row]
    return out
