"""`sia`: one configuration or none for every job, by the rounded objective of Sia.

Jayaram Subramanya et al., *Sia*, SOSP 2023: minimize the sum of A over the chosen configurations
plus 1.1 for every job left out, A = round((goodput * r / smallest goodput of the job)^p, 2),
p = -0.5. r discounts a change: 1 for the present configuration, for a job without GPUs and for one
younger than its restart cost, else max(age - restarts * cost, 0) / (age + cost). Sizes are 1, 2, 4,
.., one node, then whole nodes. The rounding to two decimals is part of the objective as published.
Solved exactly as a multiple choice; of equal sums the one with the fewest changes, or jobs could
swap for ever. On several types of GPUs a configuration is a size on a type; types are chosen for
one after the other, each exactly, until nothing improves (Sia solves an integer program). Jobs
compete anew at every event: Sia itself decides in rounds (``round=60``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from optsched.cluster.policies.allocation import best_options
from optsched.cluster.policies.elastic_rule import (
    FREE,
    PINNED,
    by_key,
    fixed_sizes,
    sizing,
    total,
)
from optsched.cluster.policies.gpu_types import decision, one_type, types_of
from optsched.cluster.world.compiled import RulePolicy
from optsched.io.values import number
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings

LEFT_OUT: Final = 110
"""Cost of a job without GPUs, in hundredths."""
_MOST: Final = 10.0**8
_NOT: Final = 2**62
"""Cost of a configuration that is not allowed."""
_TURNS: Final = 20
"""So often each type is chosen for anew; the sum of costs falls with every change."""


class Sia(RulePolicy):
    """Choice of configurations.

    Parameters
    ----------
    p
        Exponent, -10 up to below 0.
    """

    name = "sia"
    types_in_python: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("p",)
    clairvoyant: bool = False

    def __init__(self, *, p: float = -0.5) -> None:
        self.p = number("options.p", p, -10.0, -1e-6)

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """When sizes may change, and the exponent."""
        return sizing(workload, nodes, settings, False), self.p

    def decide(self, view: ClusterView) -> Decision:
        """GPUs now, on clusters of several types with their nodes."""
        types = types_of(view)
        if types is None:
            return super().decide(view)
        known, p = self.arguments(view.workload, view.nodes, view.settings)  # type: ignore[arg-type]
        fixed = fixed_sizes(view, known)
        return decision(view, types, *choose(view, types, loose_jobs(view, fixed), fixed, p))

    @staticmethod
    def rule(view, sizing, p):  # type: ignore[no-untyped-def]
        """GPUs now."""
        fixed = fixed_sizes(view, sizing)
        loose, sizes = loose_jobs(view, fixed), 0
        for i in range(len(fixed)):
            sizes += view.size_ptr[i] < view.size_ptr[i + 1]
        if len(view.size) == sizes:
            return most_jobs(view, loose)
        return choose(view, one_type(view), loose, fixed, p)[0]


@helper()
def loose_jobs(view, fixed):  # type: ignore[no-untyped-def]
    """Positions of the jobs that are chosen for."""
    loose, count = np.empty(len(fixed), np.int64), 0
    for i in range(len(fixed)):
        if view.size_ptr[i] < view.size_ptr[i + 1] and fixed[i] != PINNED:
            loose[count] = i
            count += 1
    return loose[:count]


@helper()
def choose(view, types, loose, fixed, p):  # type: ignore[no-untyped-def]
    """GPUs and types of least cost: one type after the other, exactly, until nothing improves."""
    sizes, out = len(view.size), LEFT_OUT * (len(loose) + 1)
    cost = costs(view, types, loose, fixed, p)
    quota, kind, budget = view.gpus.copy(), types.held.copy(), types.free.copy()
    now = np.full(len(loose), out - 1)
    for row in range(len(loose)):
        i = loose[row]
        if kind[i] >= 0:
            budget[kind[i]] += quota[i]
            for k in range(view.size_ptr[i], view.size_ptr[i + 1]):
                if view.size[k] == quota[i]:
                    now[row] = cost[kind[i] * sizes + k]
    for _ in range(_TURNS if len(budget) > 1 else 1):
        before = total(now)
        for t in range(len(budget)):
            first = t * sizes
            ptr, size, value = options_on(
                view, types.held, loose, t, kind, now, cost[first : first + sizes]
            )
            chosen = best_options(ptr, size, value, budget[t])
            for row in range(len(loose)):
                i, at = loose[row], chosen[row]
                if size[at] > 0 or kind[i] == t:
                    quota[i], now[row] = size[at], -value[at]
                    kind[i] = t if size[at] > 0 else -1
        if total(now) == before:
            break
    return quota, kind


@helper()
def options_on(view, held, loose, t, kind, now, cost):  # type: ignore[no-untyped-def]
    """Offsets, GPUs and values of the options of all jobs on type t, or without GPUs of it."""
    ptr, at = np.zeros(len(loose) + 1, np.int64), 0
    size = np.empty(len(cost) + len(loose), np.int64)
    value = np.empty(len(size), np.int64)
    for row in range(len(loose)):
        i = loose[row]
        stays = held[i] >= 0 and not view.preemptible[i]
        if not stays or held[i] != t:
            elsewhere = kind[i] >= 0 and kind[i] != t
            without = LEFT_OUT * (len(loose) + 1) - (held[i] < 0)
            size[at], value[at] = 0, -(now[row] if elsewhere else without)
            at += 1
        for k in range(view.size_ptr[i], view.size_ptr[i + 1]):
            if cost[k] < _NOT and (not stays or held[i] == t):
                size[at], value[at] = view.size[k], -cost[k]
                at += 1
        ptr[row + 1] = at
    return ptr, size, value


@helper()
def costs(view, types, loose, fixed, p):  # type: ignore[no-untyped-def]
    """Costs of all configurations, in hundredths with a trace for changes; `_NOT`: not allowed."""
    sizes, cost = len(view.size), np.full(len(types.rate), _NOT)
    for i in loose:
        first, end, now, common = view.size_ptr[i], view.size_ptr[i + 1], -1, 0
        for t in range(len(types.gpus)):
            for k in range(first, end):
                if types.held[i] == t and view.gpus[i] == view.size[k]:
                    now = t * sizes + k
                if types.rate[t * sizes + k] > 0:
                    common += is_common(view.size[k], types.node[t], types.gpus[t])
        slowest = 0
        for t in range(len(types.gpus)):
            for k in range(first, end):
                c = t * sizes + k
                usual = common == 0 or is_common(view.size[k], types.node[t], types.gpus[t])
                if types.rate[c] > 0 and (usual or c == now):
                    slowest = types.rate[c] if slowest == 0 else min(slowest, types.rate[c])
                    cost[c] = 0
        change = discount(view, i)
        for t in range(len(types.gpus)):
            for c in range(t * sizes + first, t * sizes + end):
                if cost[c] == 0:
                    cost[c], r = _NOT, 1.0 if c == now else change
                    if r > 0.0 and (c == now or fixed[i] == FREE):
                        relative = min((types.rate[c] * r / slowest) ** p, _MOST)
                        cost[c] = int(np.rint(100.0 * relative)) * (len(loose) + 1) - (c == now)
    return cost


@helper()
def is_common(gpus, node, total):  # type: ignore[no-untyped-def]
    """Whether a size is a power of two within a node, or whole nodes that are there."""
    return gpus <= total and ((gpus & (gpus - 1) == 0 and gpus <= node) or gpus % node == 0)


@helper()
def discount(view, i):  # type: ignore[no-untyped-def]
    """Factor r on the speed of job i for a change of its configuration."""
    age, cost = view.time - view.submit[i], view.restart_cost[i]
    if view.gpus[i] == 0 or age < cost or age + cost == 0:
        return 1.0
    return max(age - max(view.starts[i] - 1, 0) * cost, 0) / (age + cost)


@helper()
def most_jobs(view, loose):  # type: ignore[no-untyped-def]
    """The choice where every job has one size: all are worth the same, so as many run as fit.

    Of all such choices the one with the fewest changes; of jobs of one size those that came first.
    """
    n, quota, size = len(loose), view.gpus.copy(), np.zeros(len(view.gpus), np.int64)
    left, used, most, running, waiting = total(view.free), 0, 0, 0, 0
    for i in loose:
        size[i] = view.size[view.size_ptr[i]]
        left += quota[i] if view.preemptible[i] else 0
    order, run, wait = by_key(loose, size), np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    for i in order:  # sums of the smallest sizes, of running and of pending jobs
        if quota[i] == 0 or view.preemptible[i]:
            used += size[i]
            most += used <= left
            if quota[i] > 0:
                run[running + 1] = run[running] + size[i]
                running += 1
            else:
                wait[waiting + 1] = wait[waiting] + size[i]
                waiting += 1
    kept = min(running, most)
    while run[kept] + wait[most - kept] > left:
        kept -= 1
    added = most - kept
    for i in order:
        if quota[i] == 0:
            quota[i] = size[i] if added > 0 else 0
            added -= 1
        elif view.preemptible[i]:
            quota[i] = quota[i] if kept > 0 else 0
            kept -= 1
    return quota
