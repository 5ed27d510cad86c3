"""`time_to_target`: the shortest expected remaining time first, learned from uncertainty curves.

A job's uncertainty *level* says little about which job should run; its *curve* says when the job
will be done (cf. the loss-curve fits of Peng et al., *Optimus*, EuroSys 2018, which allocate by
them one job at a time). Five steps: (1) for every job a posterior of log T, the passes to its
target, from the user's estimate (lognormal) and the observed curve; (2) jobs of one template are
pooled; (3) order by weight over remaining work R = pass work * max(1/2, T - passes done), one
smallest gang each; (4) GPUs that would idle go round, or to the largest saving of weighted time;
(5) a running job is displaced only if the gain exceeds both restart costs. Jobs without a target
have a known number of passes: there T is the work of a pass, certain after the first.

Of step (4) there are two readings. Going to the largest saving serves the *longest* jobs: it
shortens the makespan, and costs mean completion time once the queue is empty (cf. Berg et al.,
*heSRPT*, 2020: the shorter job deserves more). So by default they go round, shortest first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from optsched.cluster.policies.elastic import SURPLUS
from optsched.cluster.policies.elastic_rule import (
    BY_GAIN,
    floats,
    gangs,
    in_order,
    placed,
    share,
    sizing,
    total,
)
from optsched.cluster.policies.posterior import find_ended, learn, memory, pooled, prior, work_left
from optsched.cluster.world.compiled import Choice, RulePolicy
from optsched.io.values import boolean, number, one_of
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings


class TimeToTarget(RulePolicy):
    """Shortest expected remaining time first, with pooled estimates.

    Parameters
    ----------
    sigma
        Standard deviation of log T given the user's estimate alone, > 0.
    pool
        False: the estimate and curve of the job alone.
    surplus
        ``"round"``: GPUs that would idle go round in order; ``"marginal"``: one by one to the
        largest w (R/f(g) - R/f(g+1)).
    """

    name = "time_to_target"
    options: ClassVar[tuple[str, ...]] = ("sigma", "pool", "surplus")
    clairvoyant: bool = False
    signal: ClassVar[str] = "metric"
    """Curve of real jobs: distance of the metric from its target, see `optsched.elastic.run`."""

    def __init__(self, *, sigma: float = 0.5, pool: bool = True, surplus: str = "round") -> None:
        self.sigma = number("options.sigma", sigma, 0.0, 10.0, above=True)
        self.pool = boolean("options.pool", pool)
        self.surplus = one_of("options.surplus", surplus, [*SURPLUS])

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """When sizes may change, what is known of the jobs, and the options."""
        known = prior(workload, self.pool)
        return (
            sizing(workload, nodes, settings, False), settings.checkpoint == "pass", known,
            memory(len(workload), len(known.member_ptr) - 1, self.sigma), self.sigma,
            SURPLUS[self.surplus],
        )  # fmt: skip

    @staticmethod
    def rule(view, sizing, loses_pass, prior, memory, sigma, surplus):  # type: ignore[no-untyped-def]
        """GPUs and order now."""
        find_ended(view, prior, memory)
        learn(view, prior, memory, sigma)
        n = len(view.gpus)
        left, key, cost = floats(n), floats(n), floats(n)
        pooled(view, prior, memory, left)
        work_left(view, prior, left)
        for i in range(n):
            key[i] = left[i] / view.weight[i]
            cost[i] = start_cost(view, loses_pass, i)
        jobs = gangs(view, sizing, in_order(view, key), left, view.weight, cost, cost, view.rate)
        share(jobs, total(view.free), BY_GAIN, surplus)
        return Choice(jobs.quota, jobs.some[: placed(jobs)], 0)


@helper(counted=False)
def start_cost(view, loses_pass, i):  # type: ignore[no-untyped-def]
    """Time without progress at the next start, and what a preemption would throw away."""
    cost = view.restart_cost[i] if view.starts[i] > 0 else 0
    if loses_pass and view.gpus[i] > 0:
        open_work = view.done[i] - view.passes[i] * view.pass_work[i]
        cost += open_work // view.rate[view.size_ptr[i]]
    return max(cost, 0)
