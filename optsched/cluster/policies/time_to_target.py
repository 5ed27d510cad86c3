"""`time_to_target`: the shortest expected remaining time first, learnt from uncertainty curves.

Ours. A job's uncertainty *level* says little about who should run; its *curve* says when the job
will be done (cf. the loss-curve fits of Peng et al., *Optimus*, EuroSys 2018, which allocate by
them one job at a time). Five steps: (1) for every job a posterior of log T, the passes to its
target, from the user's estimate (lognormal) and the observed curve; (2) jobs of one template are
pooled; (3) order by weight over remaining work R = pass work * max(1/2, T - passes done), one
minimum gang each; (4) GPUs that would idle go round, or to the largest saving of weighted time;
(5) a running job is displaced only if the gain exceeds both restart costs. Jobs without a target
know their number of passes: there T is the work of a pass, certain after the first.

Of step (4) there are two readings. Going to the largest saving serves the *longest* jobs: it
shortens the makespan, and costs mean completion time once the queue is empty (cf. Berg et al.,
*heSRPT*, 2020: the shorter job deserves more). So by default they go round, shortest first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.policies.room import choice_of, flag, in_order, number, smallest

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

    FloatArray = npt.NDArray[np.float64]

_BY_GAIN: Final = 2
_SURPLUS: Final = {"round": 0, "marginal": 1}


class TimeToTarget:
    """Shortest expected remaining time first, with pooled beliefs.

    Parameters
    ----------
    sigma
        Standard deviation of log T given the user's estimate alone, > 0.
    pool
        False: every job is believed by its own estimate and curve only.
    surplus
        ``"round"``: GPUs that would idle go round in order; ``"marginal"``: one by one to the
        largest w (R/f(g) - R/f(g+1)).
    """

    name: ClassVar[str] = "time_to_target"
    options: ClassVar[tuple[str, ...]] = ("sigma", "pool", "surplus")
    clairvoyant: bool = False
    signal: ClassVar[str] = "metric"
    """Of real jobs: the curve of what they are to reach, see `optsched.elastic.run`."""

    def __init__(self, *, sigma: float = 0.5, pool: bool = True, surplus: str = "round") -> None:
        self.sigma = number("sigma", sigma, 0.0, 10.0, above=True)
        self.pool = flag("pool", pool)
        self.surplus = choice_of("surplus", surplus, ("round", "marginal"))

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        left = self.remaining(view)
        surplus, costs = _SURPLUS[self.surplus], next_start_costs(view)
        return in_order(view, left / view.weight, _BY_GAIN, surplus, left, costs)

    def remaining(self, view: ClusterView) -> FloatArray:
        """Believed remaining work of every active job (step 3)."""
        from optsched.cluster.policies.posterior import (
            LEAST_VARIANCE,
            beliefs,
            join,
            learn,
            pool,
            work_left,
        )

        b, sure = beliefs(view.workload, self.sigma, self.pool, rows=1), ended(view)
        b.job["mean"][sure] = b.job["pooled"][sure] = b.job["certain"][sure]
        b.job["variance"][sure], b.job["known"][sure] = LEAST_VARIANCE, 1
        passes, jobs = view.passes.tolist(), view.job.tolist()
        for i in np.flatnonzero(view.passes > 0).tolist():
            learn(b, jobs[i], passes[i], 0, self.sigma)
            b.job["row"][jobs[i]], b.spare[0] = -1, 1  # the next curve goes to the same row
        seen = sure if self.pool else np.zeros(0, bool)
        for j in np.union1d(view.job, np.flatnonzero(seen)).tolist():
            join(b, j)
        for k in np.flatnonzero(b.pool["members"]).tolist():
            pool(b, k)
        rows = zip(jobs, passes, view.done.tolist(), strict=True)
        return np.array([work_left(b, *row) for row in rows], np.float64)

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.time_to_target_loop import to_target

        surplus = _SURPLUS[self.surplus]
        return to_target(workload, nodes, settings, self.sigma, self.pool, surplus, self.name)


def ended(view: ClusterView) -> npt.NDArray[np.bool_]:
    """Jobs that have arrived and are not active, unless hidden behind those their group shows."""
    jobs = view.workload
    gone = jobs.submit <= view.time
    gone[view.job] = False
    for number_of, group in enumerate(jobs.groups):
        if group.max_concurrent is not None:
            shown = view.job[view.group == number_of]
            if len(shown) >= group.max_concurrent:
                behind = int(shown[-1]) if len(shown) else -1
                gone &= ~((jobs.group == number_of) & (np.arange(len(jobs)) > behind))
    return gone


def next_start_costs(view: ClusterView) -> IntArray:
    """Time without progress at the next start, and what a preemption would throw away."""
    cost = np.where(view.starts > 0, view.restart_cost, 0)
    if view.settings.checkpoint == "pass":
        slow = np.ones(len(view.job), np.int64)
        slots = smallest(view) > 0
        slow[slots] = view.rate[view.size_ptr[:-1][slots]]
        cost = cost + np.where(view.running, (view.done - view.passes * view.pass_work) // slow, 0)
    return np.maximum(cost, 0).astype(np.int64)
