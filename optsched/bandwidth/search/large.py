"""Choices of k GPUs on clusters too large for tables: one search with a clock and a bound.

Alone, the best choice is exact by domains of the network. Beside jobs, cells of thresholds are
bounded and visited in rounds: a good choice meets jobs of little demand and takes all hosts on
which they are thin. Among choices of equal bandwidth the one with the fewest domains counts, from
the top level down; then the fewest hosts, the fewest whole hosts, and the best fit.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.search.by_counts import Answer, Bools, best_of
from optsched.bandwidth.search.groups import domains_of, preferred_domains
from optsched.bandwidth.search.rails import on_rails
from optsched.bandwidth.search.request import HostTables, request_of
from optsched.bandwidth.search.request_search import Choice, RequestSearch
from optsched.bandwidth.topology.policy import ANY, Bounds, Policy
from optsched.bandwidth.topology.rates import MOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.models.model import CountModel
    from optsched.bandwidth.topology.state import ClusterState


class LargeSearch:
    """Chooses on clusters of any size; what depends on the model alone is kept."""

    def __init__(self, model: CountModel) -> None:
        self.model, self._tables = model, HostTables(model)

    def choose(
        self,
        state: ClusterState,
        k: int,
        demands: Sequence[int] = (),
        policy: Policy | None = None,
        deadline: float | None = None,
        bounds: Bounds | None = None,
    ) -> Answer | None:
        """The best choice found; None if none obeys the policy or all patterns are unmeasured.

        `demands` are kB/s by job; `deadline` is a reading of `time.monotonic`: a first choice is
        always made. `bounds` come in addition to the policy's, see `Policy.tiers`.
        """
        rules = policy or Policy()
        if not state.cluster.rails:
            search = self._search(state, k, demands, rules, deadline, bounds)
            if search is None or search.best is None:
                return None
            return _answer(search, search.best)
        answers, whole = list[Answer](), state.room == state.cluster.sizes
        within = [self.model.intra_of(t) for t in range(len(state.cluster.types))]
        for here, rule in on_rails(rules.usable(state), k, rules, within):
            search = self._search(here, k, demands, rule, deadline, bounds, whole)
            if search is not None and search.best is not None:
                answers.append(_answer(search, search.best))
            if answers and deadline is not None and time.monotonic() > deadline:
                answers[0] = answers[0]._replace(upper_bound=MOST - 1)  # others are not bounded
                break
        return best_of(state, answers)

    def best(
        self,
        state: ClusterState,
        k: int,
        n: int,
        demands: Sequence[int] = (),
        policy: Policy | None = None,
        deadline: float | None = None,
        bounds: Bounds | None = None,
    ) -> list[Answer]:
        """The n best choices found that differ in their counts, the best first."""
        search = self._search(state, k, demands, policy or Policy(), deadline, bounds, keeps=True)
        if search is None or search.best is None:
            return []
        search.vary(n)
        search.seen.pop(search.best.counts.tobytes(), None)
        least = sorted(-one.value for one in search.seen.values())[: n - 1]
        some = [one for one in search.seen.values() if -one.value <= max(least, default=-MOST)]
        some.sort(key=lambda one: (-one.value, search.key(one.counts)))
        found = [_answer(search, one) for one in [search.best, *some[: n - 1]]]
        return sorted(found, key=lambda one: -one.value)

    def by_host(
        self,
        state: ClusterState,
        k: int,
        demands: Sequence[int] = (),
        policy: Policy | None = None,
        deadline: float | None = None,
        bounds: Bounds | None = None,
    ) -> dict[int, int]:
        """Of every host the bandwidth of the best choice found with a GPU of it.

        A host that no choice uses is left out; one that time left open has a bandwidth of 0.
        """
        search = self._search(state, k, demands, policy or Policy(), deadline, bounds, keeps=True)
        if search is None or search.best is None:
            return {}
        search.vary(1)
        found = np.full(state.cluster.n_hosts, -1)
        for one in search.seen.values():
            at = search.judge.hosts[np.flatnonzero(one.counts)]
            found[at] = np.maximum(found[at], one.value)
        parts = [] if search.is_complete else search.parts
        able = np.any([search.q.free < 0, *(part.inside for part in parts)], axis=0)
        for h in search.judge.hosts[able & (search.q.free > 0)].tolist():
            if found[h] >= 0:
                continue
            if search.is_late:
                found[h] = 0
                continue
            some = Bounds.free(state.cluster.n_hosts, h)
            some = some._replace(domains=ANY if bounds is None else bounds.domains)
            if (other := self.choose(state, k, demands, policy, deadline, some)) is not None:
                at = np.unique(state.cluster.host_of[list(other.gpus)])
                found[at] = np.maximum(found[at], other.value)
        return {h: int(found[h]) for h in np.flatnonzero(found >= 0).tolist()}

    def _search(
        self,
        state: ClusterState,
        k: int,
        demands: Sequence[int],
        policy: Policy,
        deadline: float | None,
        bounds: Bounds | None,
        whole: Bools | None = None,
        *,
        keeps: bool = False,
    ) -> RequestSearch | None:
        """The finished search; None if no choice can exist."""
        state = policy.usable(state)
        if k > len(state.free):
            return None
        limits = policy.bounds(state.cluster, bounds)
        judge = request_of(self._tables, state, k, demands, policy, limits, whole)
        least = judge.q.least
        if least.sum() < limits.least.sum() or least.sum() > k or (least > judge.q.free).any():
            return None
        search = RequestSearch(judge, policy, deadline, keeps)
        levels = state.cluster.network_levels
        domains = domains_of(judge.q, levels, policy)
        some, is_all = preferred_domains(domains, levels, policy, limits.domains)
        search.search(some)
        if not is_all:  # a bound on other sets of domains of the preferred level
            search.upper = RequestSearch(judge, policy, deadline, keeps=False).bound(domains)
        return search


def _answer(search: RequestSearch, choice: Choice) -> Answer:
    """A choice by the lowest ids of hosts that keep its bandwidth."""
    judge, used = search.judge, np.flatnonzero(choice.counts)
    within = int(judge.q.rows[used, choice.counts[used]].min())
    gpus = (judge.gpus(h, int(choice.counts[h]), within) for h in used)
    # a model may predict several patterns together otherwise than one
    ((value, alone),) = judge.values(choice.counts[None]).tolist()
    return Answer(tuple(chain(*gpus)), value, alone, max(search.upper, value))
