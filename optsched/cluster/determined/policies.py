"""`fair_share` and `priority`: Determined's schedulers, at every event of a simulation.

Source: determined-ai/determined, ``master/internal/rm/agentrm/fair_share.go`` and ``priority.go``
(``code``), and its documentation (``docs``); see `fair_share` and `priority` of
`optsched.cluster.determined`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from optsched.cluster.determined.decisions import FAIR_SHARE, PRIORITY, VARIANTS
from optsched.cluster.determined.simulated import Cluster, decision
from optsched.cluster.determined.state import FITS
from optsched.cluster.policies.gangs import checked_gang
from optsched.io.values import boolean, one_of

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings


class Scheduler:
    """What both share.

    Jobs are gangs of one size; a job without a group is one of its own. What is released is given
    out one unit of time later, for the scheduler answers before it is free; after every start and
    release it is asked again one unit later, as Determined looks again.

    Parameters
    ----------
    variant
        ``"code"``: as Determined's master decides, ``"docs"``: as its documentation says.
    fit
        ``"best"``: fullest nodes first; ``"worst"``: emptiest first.
    heterogeneous
        Whether a gang may be spread over idle nodes of different sizes.
    gang
        Elastic jobs run on their largest allowed size up to this; None: their largest.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ("variant", "fit", "heterogeneous", "gang")
    clairvoyant: bool = False
    steps: ClassVar[int]
    preemption: bool = False

    def __init__(
        self, *, variant: str = "code", fit: str = "best", heterogeneous: bool = False,
        gang: int | None = None,
    ) -> None:  # fmt: skip
        self.variant = one_of("variant", variant, VARIANTS)
        self.fit = one_of("fit", fit, FITS)
        self.heterogeneous = boolean("heterogeneous", heterogeneous)
        self.gang = checked_gang(gang)
        self._cluster = Cluster(
            fit == "best", heterogeneous, self.gang, by_level=self.steps == PRIORITY,
            preemption=self.preemption, backfill=variant == "code",
        )  # fmt: skip

    def decide(self, view: ClusterView) -> Decision:
        """Starts and releases now."""
        return decision(view, self._cluster.columns(view), self.steps, self.variant)

    def notes(self, workload: Workload, nodes: Nodes) -> list[str]:
        """Jobs that Determined itself would let wait for ever."""
        return self._cluster.notes(workload, list(nodes.gpus))

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code; None for fair share as documented."""
        if self.steps == FAIR_SHARE and self.variant == "docs":
            return None
        return self._cluster.log(workload, nodes, settings, self.steps, self.name)


class FairShare(Scheduler):
    """Slots are divided among groups; who holds more releases, who holds less starts.

    ``docs`` divides in proportion to demand times weight. Parameters: see `Scheduler`.
    """

    name: ClassVar[str] = "fair_share"
    steps: ClassVar[int] = FAIR_SHARE
    honours_max_slots: ClassVar[bool] = True


class Priority(Scheduler):
    """Better levels first; running jobs of worse levels are released for those that do not fit.

    A group's priority goes before the job's. ``code`` backfills preemptible jobs of worse levels.

    Parameters
    ----------
    preemption
        Whether tasks are released (and, in ``code``, backfilled); off by default, as in Determined.
    **others
        See `Scheduler`.
    """

    name: ClassVar[str] = "priority"
    options: ClassVar[tuple[str, ...]] = ("preemption", *Scheduler.options)
    steps: ClassVar[int] = PRIORITY

    def __init__(self, *, preemption: bool = False, **others: Any) -> None:
        self.preemption = boolean("preemption", preemption)
        super().__init__(**others)
