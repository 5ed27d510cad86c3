"""Elastic jobs without any learning signal: the controls that learned rules are shown beside.

One minimum gang each in order; GPUs that would idle go round, one step up for each in order, until
none is left. What these three gain over their rigid namesakes is the gain of elasticity (and of
ordering), not of uncertainty: section 7 of the project's design. The walk of `ElasticSrtf` over
all GPUs is that of Gu et al., *Tiresias*, NSDI 2019 (its SRTF baseline), with elastic gangs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.policies.room import flag, in_order

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.policy import ClusterView, Decision
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload

_NEVER: Final = 0
_BY_ORDER: Final = 1
_ROUND: Final = 0


class ElasticFifo:
    """By arrival, without preemption; a job whose gang does not fit is passed by the next."""

    name: ClassVar[str] = "elastic_fifo"
    options: ClassVar[tuple[str, ...]] = ()
    clairvoyant: bool = False

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        key = np.arange(len(view.job))
        return in_order(view, key, _NEVER, _ROUND, view.remaining.astype(np.float64))

    def twin(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.elastic_twin import FIFO, ordered

        return ordered(workload, nodes, settings, FIFO, self.name)


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
        column = view.workload.work if self.clairvoyant else view.workload.believed
        key = column[view.job].astype(np.float64)
        return in_order(view, key, _NEVER, _ROUND, view.remaining.astype(np.float64))

    def twin(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.elastic_twin import SJF, SJF_TRUE, ordered

        return ordered(workload, nodes, settings, SJF_TRUE if self.clairvoyant else SJF, self.name)


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

    def twin(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.elastic_twin import SRTF, SRTF_TRUE, ordered

        return ordered(
            workload, nodes, settings, SRTF_TRUE if self.clairvoyant else SRTF, self.name
        )
