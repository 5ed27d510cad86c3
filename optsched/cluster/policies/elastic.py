"""Elastic jobs in an order, one minimum gang each; GPUs that would idle go round or to gains.

`ElasticFifo`, `ElasticSjf` and `ElasticSrtf` look at no learning signal: the controls that learned
rules are shown beside. Idle GPUs go round, one step up for each in order. What they gain over their
rigid namesakes is the gain of elasticity (and of ordering), not of uncertainty. The walk of
`ElasticSrtf` over all GPUs is that of Gu et al., *Tiresias*, NSDI 2019 (its SRTF baseline), with
elastic gangs. `Optimus` and `Afs` give one step after the other to the largest gain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.policies.room import flag, in_order, smallest

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings

_NEVER: Final = 0
_BY_ORDER: Final = 1
_ROUND: Final = 0
_MARGINAL: Final = 1
_PAIRWISE: Final = 3


class ElasticFifo:
    """By arrival, without preemption; a job whose gang does not fit is passed by the next."""

    name: ClassVar[str] = "elastic_fifo"
    options: ClassVar[tuple[str, ...]] = ()
    clairvoyant: bool = False

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        key = np.arange(len(view.job))
        return in_order(view, key, _NEVER, _ROUND, view.remaining.astype(np.float64))

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.elastic_loops import GIVEN_KEY, Rule, simulate_by_rule

        rule = Rule(GIVEN_KEY, 0, 0, _NEVER, _ROUND)
        key = np.arange(len(workload))
        return simulate_by_rule(workload, nodes, settings, rule, self.name, key)


class ElasticSjf:
    """By total work (1-GPU time) as estimated, without preemption.

    Parameters
    ----------
    clairvoyant
        True work instead of the estimate.
    """

    name: ClassVar[str] = "elastic_sjf"
    options: ClassVar[tuple[str, ...]] = ("clairvoyant",)

    def __init__(self, *, clairvoyant: bool = False) -> None:
        self.clairvoyant: bool = flag("clairvoyant", clairvoyant)

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        column = view.workload.work if self.clairvoyant else view.workload.estimate
        key = column[view.job].astype(np.float64)
        return in_order(view, key, _NEVER, _ROUND, view.remaining.astype(np.float64))

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.elastic_loops import GIVEN_KEY, Rule, simulate_by_rule

        rule = Rule(GIVEN_KEY, 0, int(self.clairvoyant), _NEVER, _ROUND)
        key = workload.work if self.clairvoyant else workload.estimate
        return simulate_by_rule(workload, nodes, settings, rule, self.name, key)


class ElasticSrtf:
    """By remaining work (1-GPU time), with preemption at any event; ties: who runs goes on.

    Parameters
    ----------
    clairvoyant
        True remaining work (default), or the estimate.
    """

    name: ClassVar[str] = "elastic_srtf"
    options: ClassVar[tuple[str, ...]] = ("clairvoyant",)

    def __init__(self, *, clairvoyant: bool = True) -> None:
        self.clairvoyant: bool = flag("clairvoyant", clairvoyant)

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        remaining = view.remaining.astype(np.float64)
        return in_order(view, remaining, _BY_ORDER, _ROUND, remaining)

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.elastic_loops import REMAINING, Rule, simulate_by_rule

        rule = Rule(REMAINING, 1, int(self.clairvoyant), _BY_ORDER, _ROUND)
        return simulate_by_rule(workload, nodes, settings, rule, self.name)


class Optimus:
    """GPU by GPU to the job whose remaining time falls most.

    Peng et al., *Optimus*, EuroSys 2018, section 4.1 (all workers; parameter servers do not exist
    here): every job gets its smallest size by arrival, then the next step goes to the largest
    R/f(g) - R/f(g+1), per GPU where steps are larger. R is the estimate; none is preempted, and
    weights do not count.
    """

    name: ClassVar[str] = "optimus"
    options: ClassVar[tuple[str, ...]] = ()
    clairvoyant: bool = False

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        n = len(view.job)
        left = view.remaining.astype(np.float64)
        return in_order(view, np.arange(n), _NEVER, _MARGINAL, left, weight=np.ones(n))

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.elastic_loops import GIVEN_KEY, Rule, simulate_by_rule

        rule, n = Rule(GIVEN_KEY, 1, 0, _NEVER, _MARGINAL), len(workload)
        return simulate_by_rule(
            workload, nodes, settings, rule, self.name, np.arange(n), np.ones(n)
        )


class Afs:
    """Apathetic future share: each GPU to the winner of comparisons of two jobs.

    AFS-L of Hwang et al., *Elastic Resource Sharing for Distributed Deep Learning*, NSDI 2021: of
    two jobs, with a the one that ends earlier at its present size, b is preferred if and only if
    (f_b(g+1) - f_b(g)) / f_b(g+1) > (f_a(g+1) - f_a(g)) / f_a(g), each at its own g. A job without
    GPUs wins by ending earlier, so all smallest sizes come first, by estimated remaining time;
    where g+1 is not allowed, the next size stands for it. None is preempted.
    """

    name: ClassVar[str] = "afs"
    options: ClassVar[tuple[str, ...]] = ()
    clairvoyant: bool = False

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        left = view.remaining.astype(np.float64)
        slow = np.ones(len(view.job))
        slots = smallest(view) > 0
        slow[slots] = view.rate[view.size_ptr[:-1][slots]]
        return in_order(view, left / slow, _NEVER, _PAIRWISE, left)

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.elastic_loops import TIME, Rule, simulate_by_rule

        rule = Rule(TIME, 1, 0, _NEVER, _PAIRWISE)
        return simulate_by_rule(workload, nodes, settings, rule, self.name)
