"""`entropy`: the macro scheduler of *Entropy* (Sun & Huh, Appl. Sci. 2026, 16, 3725), (28)-(31).

Score S = lam U + (1 - lam) ReLU(dU) with U the uncertainty after the last pass (a job that never
ran: `initial`) and dU its fall in that pass, 0 while fewer than two are known; per pass, so that
preemptions and quota changes do not matter. Jobs are admitted one minimum gang each by falling
score, and GPUs that are left are apportioned to the scores (31). What the paper leaves open is
resolved thus: g_min for everybody may not fit, so admission goes first; "round, clip, correct" is
bounded apportionment by divisors, which never takes a GPU from a job because another was freed.

``score="as_printed"`` orders by S; never-run jobs all have the same S, so that without preemption
it is elastic FIFO, and with preemption lam U favours the job that was trained least: processor
sharing, the opposite of shortest-first. ``score="resolved"`` is S / estimated remaining GPU time.
The curve of a simulated job is its U of (26), whose own flaws are in `optsched.elastic.equations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.policies.room import choice_of, flag, in_order, number

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings

_NEVER: Final = 0
_BY_ORDER: Final = 1
_APPORTION: Final = 2


class Entropy:
    """By uncertainty and its fall.

    Parameters
    ----------
    score
        ``"as_printed"``: S; ``"resolved"``: S per estimated remaining GPU time.
    lam
        The paper's lambda, 0..1; it is never given there.
    preemptive
        Whether running jobs compete with pending ones at every event.
    initial
        U of a job that never ran, 0..1.
    rank_normalise
        Ranks instead of U and dU, which are of different magnitude.
    """

    name: ClassVar[str] = "entropy"
    options: ClassVar[tuple[str, ...]] = ("score", "lam", "preemptive", "initial", "rank_normalise")
    clairvoyant: bool = False

    def __init__(
        self,
        *,
        score: str = "as_printed",
        lam: float = 0.5,
        preemptive: bool = False,
        initial: float = 1.0,
        rank_normalise: bool = False,
    ) -> None:
        self.score = choice_of("score", score, ("as_printed", "resolved"))
        self.lam = number("lam", lam, 0.0, 1.0)
        self.preemptive = flag("preemptive", preemptive)
        self.initial = number("initial", initial, 0.0, 1.0)
        self.rank_normalise = flag("rank_normalise", rank_normalise)

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        score = self.scores(view)
        return in_order(view, -score, _BY_ORDER if self.preemptive else _NEVER, _APPORTION, score)

    def scores(self, view: ClusterView) -> npt.NDArray[np.float64]:
        """Score of every active job, >= 0."""
        seen = np.diff(view.observed_ptr)
        level = np.full(len(view.job), self.initial)
        fall = np.zeros(len(view.job))
        last = view.observed_ptr[1:] - 1
        level[seen > 0] = view.observed[last[seen > 0]]
        two = last[seen > 1]
        fall[seen > 1] = np.maximum(view.observed[two - 1] - view.observed[two], 0.0)
        found = score(level, fall, self.lam, self.rank_normalise)
        return found / view.remaining if self.score == "resolved" else found

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code; None with ranks."""
        if self.rank_normalise:
            return None
        from optsched.cluster.policies.elastic_loops import SCORE, Rule, simulate_by_rule
        from optsched.cluster.world.build import frozen

        rule = Rule(
            SCORE, int(self.score == "resolved"), 0, _BY_ORDER if self.preemptive else _NEVER,
            _APPORTION, self.lam, self.initial, frozen(workload.observed_ptr[:]),
            frozen(workload.observed[:]),
        )  # fmt: skip
        return simulate_by_rule(workload, nodes, settings, rule, self.name)


def score(
    U: FloatArray, fall: FloatArray, lam: float = 0.5, rank_normalise: bool = False
) -> FloatArray:
    """Score of every job, lam * U + (1 - lam) * max(0, fall of U) (29); the largest goes first.

    `rank_normalise` replaces both parts by their ranks in [0, 1], equal values sharing the mean
    rank: U is about .3 to 1 and its fall .01 to .1, so without it lam weighs unequal things.
    """
    gain = np.maximum(fall, 0.0)
    if rank_normalise:
        U, gain = _ranks(U), _ranks(gain)
    return lam * U + (1.0 - lam) * gain


def _ranks(values: FloatArray) -> FloatArray:
    """Mean ranks in [0, 1]; 0 for a single job."""
    if len(values) < 2:
        return np.zeros(len(values))
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    first = np.cumsum(count) - count
    return np.asarray((first + (count - 1) / 2)[place] / (len(values) - 1))
