"""Choices of k GPUs on clusters too large for tables: a proof where there is one, else a search.

On a flat cluster the value alone depends on the pattern and the hosts. Where the network is the
line rate of the cards, only the number of hosts and the slowest of them matter, so that the best
value is the highest threshold that some hosts can keep with exactly k GPUs; otherwise the patterns
of k are listed, if they are few. Beside tenants branch and bound goes over the jobs that a
choice meets: their hosts are barred, or what they leave it at most is a bound. Spreads as even as
free counts allow, over the fewest hosts and over more, are tried in any case, and then improved by
moving single GPUs and swapping hosts.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.search.ground import MOST_EVERY, Ground
from optsched.bandwidth.search.host_limits import HostLimits
from optsched.bandwidth.topology.policy import Bounds, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optsched.bandwidth.models.model import CountModel
    from optsched.bandwidth.search.ask import Answer
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray


class LargeSearch:
    """Chooses on clusters of any size, what depends on the model alone is kept."""

    def __init__(self, model: CountModel) -> None:
        self.model = model
        self.limits: dict[tuple[str | None, str | None], HostLimits] = {}

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

        Parameters
        ----------
        state, k
            Free GPUs, and how many are asked, at most all of them.
        demands
            kB/s of every job of the state.
        policy
            As in `ask`; rules other than on domains, types and hosts are only kept to.
        deadline
            Reading of `time.monotonic` by which to answer; some milliseconds are always taken.
        bounds
            On the counts of hosts, beside the policy's own.
        """
        rules = policy or Policy()
        state = rules.usable(state)
        if k > len(state.free):
            return None
        return self._best(state, k, demands, rules, deadline, bounds)

    def _best(
        self,
        state: ClusterState,
        k: int,
        demands: Sequence[int],
        rules: Policy,
        deadline: float | None,
        bounds: Bounds | None = None,
    ) -> Answer | None:
        for level in levels_of(state.cluster, rules):
            best: Answer | None = None
            upper = 0
            single = level == len(state.cluster.levels)
            rest = k, demands, rules, bounds
            for ground in self._grounds(state, level, *rest, together=single):
                found, bound = ground.best_on_one_host() if single else ground.best(deadline)
                upper = max(upper, bound)
                if found is not None and (best is None or found.value > best.value):
                    best = found
            if best is not None:
                return best._replace(upper_bound=max(upper, best.value))
        return None

    def on_hosts(self, state: ClusterState, k: int, policy: Policy) -> dict[int, int]:
        """What all k GPUs get on each allowed host by itself, where no job interferes.

        Parameters
        ----------
        state, k, policy
            As in `choose`; see `is_alone`.
        """
        state, level = policy.usable(state).with_jobs(()), len(state.cluster.levels)
        (ground,) = self._grounds(state, level, k, (), policy, together=True)
        return ground.by_host(ground.on_one_host())

    def swapped(
        self,
        state: ClusterState,
        gpus: Sequence[int],
        demands: Sequence[int],
        policy: Policy,
    ) -> dict[int, int]:
        """What a choice gets with GPUs of another host for some of its own, by that host.

        Parameters
        ----------
        state, demands, policy
            As in `choose`.
        gpus
            The choice.
        """
        counts, rest = state.cluster.counts(gpus), (len(gpus), demands, policy)
        for level in levels_of(state.cluster, policy):
            for ground in self._grounds(state, level, *rest):
                if counts[ground.hosts[: ground.n]].sum() == len(gpus):
                    return ground.by_host(ground.swapped(counts[ground.hosts]))
        return {}

    def ranked(
        self,
        state: ClusterState,
        k: int,
        demands: Sequence[int],
        policy: Policy,
    ) -> list[tuple[int, IntArray, Callable[[], Answer | None]]] | None:
        """Of all allowed choices value, hosts used and answer, best first; None: too many.

        Parameters
        ----------
        state, k, demands, policy
            As in `choose`.
        """
        levels, state = levels_of(state.cluster, policy), policy.usable(state)
        if len(levels) > 1:
            return None  # a better level goes before a better value
        found: list[tuple[int, IntArray, Callable[[], Answer | None]]] = []
        for ground in self._grounds(state, levels[0], k, demands, policy):
            some = ground.ranked()
            if some is None or len(found) + len(some) > MOST_EVERY:
                return None
            for value, own, counts in some:
                used = ground.hosts[np.flatnonzero(counts)]
                found.append((value, used, partial(ground.answer_with, value, own, counts)))
        return sorted(found, key=lambda one: -one[0])

    def _grounds(
        self,
        state: ClusterState,
        level: int | None,
        k: int,
        demands: Sequence[int],
        rules: Policy,
        bounds: Bounds | None = None,
        *,
        together: bool = False,
    ) -> Iterator[Ground]:
        """The request on every part of the cluster that the rules allow, or on all `together`."""
        key, bounds = (rules.within, rules.whole), rules.bounds(state.cluster, bounds)
        if key not in self.limits:
            self.limits[key] = HostLimits(self.model, rules)
        parts = grounds(state, level, k, bounds, same_type=rules.same_type)
        for hosts in [list(chain.from_iterable(parts))] if together else parts:
            yield Ground(self.limits[key], state, hosts, k, demands, rules, bounds)


def grounds(
    state: ClusterState, level: int | None, k: int, bounds: Bounds, *, same_type: bool = False
) -> Iterator[list[int]]:
    """Hosts with free GPUs, those of every domain (and type) by themselves, if they reach k."""
    cluster, room = state.cluster, np.minimum(state.room, bounds.most).tolist()
    kinds: Sequence[int] = cluster.type_of if same_type else [0] * cluster.n_hosts
    must = set(np.flatnonzero(bounds.least).tolist())
    every: Iterable[Sequence[int]] = [range(cluster.n_hosts)]
    for hosts in every if level is None else cluster.domains(level).values():
        for kind in sorted({kinds[h] for h in hosts}):
            usable = [h for h in hosts if room[h] and kinds[h] == kind]
            if sum(room[h] for h in usable) >= k and must <= set(usable):
                yield usable


def levels_of(cluster: Cluster, policy: Policy) -> list[int | None]:
    """Levels to try in turn: what is preferred and those above, then what is needed, or any."""
    least = policy.level(cluster)
    if policy.preferred is None:
        return [least]
    wish = cluster.level(policy.preferred)
    tried: list[int | None] = list(range(wish, -1 if least is None else least, -1))
    return [*tried, least]
