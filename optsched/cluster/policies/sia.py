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

from optsched.cluster.policies import gpu_types
from optsched.cluster.policies.allocation import best_options
from optsched.cluster.policies.elastic import by_pass
from optsched.cluster.policies.elastic_rule import FREE, PINNED, fixed_sizes, last_passes
from optsched.cluster.world.compiled import RulePolicy
from optsched.io.values import number
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

LEFT_OUT: Final = 110
"""Cost of a job without GPUs, in hundredths."""
_MOST: Final = 10.0**8


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
        """What the rule needs beside the view."""
        return last_passes(workload, False), by_pass(settings), self.p

    def decide(self, view: ClusterView) -> Decision:
        """GPUs now, on clusters of several types with their nodes."""
        if not gpu_types.several(view):
            return super().decide(view)
        fixed = fixed_sizes(view, last_passes(view.workload, False), by_pass(view.settings))
        jobs = np.flatnonzero((np.diff(view.size_ptr) > 0) & (fixed != PINNED))
        tables = costs_by_type(view, fixed, jobs, self.p)
        return gpu_types.choose(view, jobs, tables, LEFT_OUT * (len(jobs) + 1))

    @staticmethod
    def rule(view, last_pass, by_pass, p):  # type: ignore[no-untyped-def]
        """GPUs now."""
        fixed = fixed_sizes(view, last_pass, by_pass)
        quota = view.gpus.copy()
        loose = np.flatnonzero((view.size_ptr[1:] > view.size_ptr[:-1]) & (fixed != PINNED))
        budget = view.free.sum() + view.gpus[loose].sum()
        if len(view.size) == np.sum(view.size_ptr[1:] > view.size_ptr[:-1]):
            return most_jobs(view, quota, loose)
        ptr, size, value = costs(view, fixed, loose, p)
        budget = min(budget, np.sum(size[ptr[1:] - 1]))
        quota[loose] = best_options(ptr, size, -value, budget)
        return quota


@helper()
def costs(view, fixed, loose, p):  # type: ignore[no-untyped-def]
    """Configurations of the jobs: offsets, GPUs, costs in hundredths with a trace for changes."""
    node, total = max(view.capacity.max(), 1), view.capacity.sum()
    ptr, at = np.zeros(len(loose) + 1, np.int64), 0
    size = np.empty(len(view.size) + len(loose), np.int64)
    cost = np.empty(len(size), np.int64)
    for row in range(len(loose)):
        i = loose[row]
        held, first, end = view.gpus[i], view.size_ptr[i], view.size_ptr[i + 1]
        if held == 0 or view.preemptible[i]:
            size[at], cost[at] = 0, LEFT_OUT
            at += 1
        common = 0
        for k in range(first, end):
            common += is_common(view.size[k], node, total)
        slowest = 0
        for k in range(first, end):
            if common == 0 or view.size[k] == held or is_common(view.size[k], node, total):
                slowest = view.rate[k] if slowest == 0 else min(slowest, view.rate[k])
        change = discount(view, i)
        for k in range(first, end):
            g = view.size[k]
            r = 1.0 if g == held else change
            if r <= 0.0 or (g != held and fixed[i] != FREE):
                continue
            if common == 0 or g == held or is_common(g, node, total):
                relative = min((view.rate[k] * r / slowest) ** p, _MOST)
                size[at], cost[at] = g, int(np.rint(100.0 * relative))
                at += 1
        ptr[row + 1] = at
        for k in range(ptr[row], at):
            cost[k] = cost[k] * (len(loose) + 1) - (size[k] == held)
    return ptr, size[:at], cost[:at]


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
def most_jobs(view, quota, loose):  # type: ignore[no-untyped-def]
    """The choice where every job has one size: all are worth the same, so as many run as fit.

    Of all such choices the one with the fewest changes; of jobs of one size those that came first.
    """
    size = np.zeros(len(quota), np.int64)
    size[view.size_ptr[1:] > view.size_ptr[:-1]] = view.size
    run = loose[(view.gpus[loose] > 0) & view.preemptible[loose]]
    wait = loose[view.gpus[loose] == 0]
    run = run[np.argsort(size[run], kind="mergesort")]
    wait = wait[np.argsort(size[wait], kind="mergesort")]
    left = view.free.sum() + view.gpus[run].sum()
    most = np.searchsorted(np.cumsum(np.sort(size[np.concatenate((run, wait))])), left, "right")
    kept = min(len(run), most)
    while size[run[:kept]].sum() + size[wait[: most - kept]].sum() > left:
        kept -= 1
    quota[run[kept:]] = 0
    quota[wait[: most - kept]] = size[wait[: most - kept]]
    return quota


def costs_by_type(
    view: ClusterView, fixed: IntArray, jobs: IntArray, p: float
) -> list[list[dict[int, int]]]:
    """Costs of configurations by type and job, as in `costs`: GPUs -> cost."""
    kinds, held = int(view.node_type.max()) + 1, gpu_types.held_types(view)
    views = [gpu_types.on_type(view, jobs, t) for t in range(kinds)]
    found: list[list[dict[int, int]]] = [[] for _ in range(kinds)]
    for row, i in enumerate(jobs.tolist()):
        rates = [
            dict(zip(v.size[at].tolist(), v.rate[at].tolist(), strict=True))
            for v in views
            for at in (slice(v.size_ptr[row], v.size_ptr[row + 1]),)
        ]
        now = (int(held[i]), int(view.gpus[i]))
        every = [(t, g) for t, speeds in enumerate(rates) for g in speeds]
        nodes = [v.capacity for v in views]
        common = [
            (t, g)
            for t, g in every
            if is_common(g, max(int(nodes[t].max()), 1), int(nodes[t].sum()))
        ]
        every = [one for one in every if one in common or one == now] if common else every
        slowest, change = min(rates[t][g] for t, g in every), discount(view, i)
        for t in range(kinds):
            options = {}
            for g in (g for kind, g in every if kind == t):
                r = 1.0 if (t, g) == now else change
                if r > 0.0 and ((t, g) == now or fixed[i] == FREE):
                    relative = min((rates[t][g] * r / slowest) ** p, _MOST)
                    cost = int(np.rint(100.0 * relative))
                    options[g] = cost * (len(jobs) + 1) - ((t, g) == now)
            found[t].append(options)
    return found
