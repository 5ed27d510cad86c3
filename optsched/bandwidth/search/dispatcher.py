"""Choices of GPUs for callers in a loop: everything prepared, a deadline, a proven bound."""

from __future__ import annotations

import time
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.models.contention import check_traffic, demand_of, needs_bandwidth, share
from optsched.bandwidth.models.model import BandwidthModel, CountModel
from optsched.bandwidth.search.by_counts import (
    STEPS_A_SECOND,
    Answer,
    CountSearch,
    jobs_of,
    order_of,
)
from optsched.bandwidth.search.gang import choose_gang
from optsched.bandwidth.search.large import LargeSearch
from optsched.bandwidth.search.what_if import WhatIf, regret, victims
from optsched.bandwidth.topology.cluster import Cluster
from optsched.bandwidth.topology.feasibility import impossible
from optsched.bandwidth.topology.policy import ANY, Bounds, Policy, check_policy
from optsched.bandwidth.topology.rates import MOST
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import Infeasible, InputError
from optsched.io.values import integer, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from optsched.bandwidth.models.contention import Traffic
    from optsched.model.schedule import IntArray

PACKING: Final = 0.2
"""Default weight of packing in scores: an idle host loses up to a fifth."""


class Dispatcher:
    """Choices of GPUs next to running jobs, in microseconds to milliseconds, with a bound.

    On up to some 100 GPUs (where the model has tables) it answers as `GpuPlacement` with the solver
    `counts` does, ties broken; on larger clusters, by `LargeSearch`. It may be called from several
    threads.

    Parameters
    ----------
    cluster
        Hosts and GPUs.
    model
        Bandwidths: with tables, or a `CountModel`.
    policy, traffic, seed
        As in `GpuPlacement`; the same for all requests.

    Raises
    ------
    InputError
        The model is of another cluster, or is none that can be searched by counts.

    Examples
    --------
    >>> from optsched.bandwidth import BottleneckBandwidth, ClusterState, Dispatcher, synthetic
    >>> cluster = synthetic.cluster("nvswitch", 2)
    >>> state = ClusterState.idle(cluster).take("n01:0-3", "a")
    >>> fast = Dispatcher(cluster, BottleneckBandwidth(cluster))
    >>> cluster.written(fast.choose(state, 8)[0])
    'n02:0-7'
    >>> [*fast.scores(state, 4)]
    ['n01', 'n02']
    """

    def __init__(
        self,
        cluster: Cluster,
        model: BandwidthModel,
        *,
        policy: Policy | None = None,
        traffic: Traffic = "given",
        seed: int = 0,
    ) -> None:
        if not isinstance(cluster, Cluster) or not isinstance(model, BandwidthModel):
            what = f"{type(cluster).__name__} and {type(model).__name__}"
            raise InputError(f"cluster, model: expected a Cluster and a BandwidthModel, got {what}")
        if cluster is not model.cluster and cluster.sha256 != model.cluster.sha256:
            raise InputError("cluster, model: are of different clusters (use model.cluster)")
        self.cluster, self.model, self.policy = cluster, model, check_policy(policy, cluster)
        check_traffic(traffic)
        self.traffic, self.seed = traffic, integer("seed", seed, 0, 2**31 - 1)
        self._tables = tables = model.tables()
        self._large = LargeSearch(model) if isinstance(model, CountModel) else None
        if tables is None and self._large is None:
            raise InputError(
                "model: has no tables for this cluster: use optsched.solve(GpuPlacement(...))"
            )
        self._known: tuple[ClusterState, IntArray] | None = None
        self._alone: dict[tuple[int, ...], int] = {}
        self._is_warm = False
        if tables is None:
            return
        self._search = CountSearch(tables, self.policy, ties=True)
        self._quick = CountSearch(tables, self.policy)

    def choose(
        self, state: ClusterState, k: int, deadline: float | None = None
    ) -> tuple[tuple[int, ...], int]:
        """Choose GPUs; return them, ascending, and their bandwidth next to the jobs in kB/s.

        Parameters
        ----------
        state
            Of this cluster.
        k
            Number of GPUs.
        deadline
            Seconds until the answer: then the best found, and `answer` has its bound. Without one
            the search is bounded by its work, some seconds at most. Neither counts the first call
            on a machine, which compiles.

        Raises
        ------
        InputError
            k is not an integer of at least 1.
        Infeasible
            More GPUs than are free, or the policy allows nothing.
        """
        return self.answer(state, k, deadline)[:2]

    def answer(self, state: ClusterState, k: int, deadline: float | None = None) -> Answer:
        """Choose GPUs; return also their bandwidth without other jobs and the proven bound."""
        k, until = self._checked(state, k, deadline)
        found = self._with_assumptions(self._first(state, k, until)[0])
        self._alone[found.gpus] = found.standalone  # a job may start on them
        return found

    def best(
        self, state: ClusterState, k: int, n: int, deadline: float | None = None
    ) -> list[Answer]:
        """Return the n best choices that differ in numbers of GPUs on hosts, the best first.

        As good as `answer`: exact where that is. Behind a choice the counts that are left are
        searched in parts: fewer GPUs on its first host, else as many there and fewer on the second,
        and so on (Lawler 1972); without tables all are compared where they are few. `n` is 1 to
        1,000; there may be fewer.
        """
        k, until = self._checked(state, k, deadline)
        integer("n", n, 1, 1000)
        every = Bounds.free(self.cluster.n_hosts)
        if self._tables is None and not self.cluster.rails:
            return self._best_of_large(state, k, n, until)
        one, domains = self._first(state, k, _part(until, 2), every)
        heap = [(domains, -one.value, order_of(state, one.gpus), one.gpus, one, every)]
        found: dict[bytes, tuple[int, Answer]] = {}
        while heap and len(found) < n and (until is None or time.monotonic() < until or not found):
            domains, *_, one, bounds = heappop(heap)
            counts = self.cluster.counts(one.gpus)
            found.setdefault(counts.tobytes(), (domains, one))
            used = np.flatnonzero(counts).tolist()
            least = bounds.least.copy()
            for i, h in enumerate(used if len(found) < n else ()):
                if until is not None and time.monotonic() > until:
                    break
                most = bounds.most.copy()
                most[h] = counts[h] - 1
                part = _part(until, (n - len(found)) * len(used) - i)
                child = Bounds(least.copy(), most)
                if (other := self._find(state, k, part, child)) is not None:
                    one, domains = other
                    order = order_of(state, one.gpus)
                    heappush(heap, (domains, -one.value, order, one.gpus, one, child))
                least[h] = counts[h]
        ranked = sorted(found.values(), key=lambda one: (one[0], -one[1].value))
        return [self._with_assumptions(one) for _, one in ranked]

    def gang(
        self, state: ClusterState, requests: Mapping[str, int], deadline: float | None = None
    ) -> dict[str, Answer]:
        """Choose GPUs for several requests that start together, by name; see `choose_gang`."""
        self._check(state)
        return choose_gang(self, state, requests, deadline)

    def explain(self, state: ClusterState, k: int, deadline: float | None = None) -> str:
        """Explain a choice, one fact a line: limits, levels, the rule that decided."""
        from optsched.bandwidth.placement.explain import explained
        from optsched.bandwidth.placement.problem import DispatchChoice, GpuPlacement

        found = self.answer(state, k, deadline)
        problem = GpuPlacement(
            state, self.model, k, policy=self.policy, traffic=self.traffic, seed=self.seed
        )
        return explained(DispatchChoice(problem, found.gpus, problem.share(found.gpus)))

    def _with_assumptions(self, found: Answer) -> Answer:
        """The answer with what the model assumes."""
        return found._replace(assumed=self.model.assumed) if self.model.assumed else found

    def scores(
        self, state: ClusterState, k: int, deadline: float | None = None, packing: float = PACKING
    ) -> dict[str, int]:
        """Score machines, 0 to 100, for a scheduler that filters and scores hosts.

        ``100 * b * (1 - packing * (1 - p))``, rounded down: b is the bandwidth of the best choice
        with at least one GPU of the host, as a share of the best of all; p is the share of its GPUs
        that are in use if the request takes what it can of the host. So of hosts with equal
        bandwidth those in use come first, and whole hosts are kept for requests that fill them.
        Hosts that no allowed choice uses are left out. Exact where `answer` is and there is time,
        else by choices that were found; 0 if none was. `packing` is 0 to 1.
        """
        k, until = self._checked(state, k, deadline)
        weight = number("packing", packing, most=1.0, what="a share")
        if self._tables is None and not self.cluster.rails:
            shares = self._shares_of_large(state, k, until)
        else:
            shares = self._shares_of_hosts(state, k, until)
        found: dict[str, int] = {}
        for h, part in shares.items():
            size, free = int(self.cluster.sizes[h]), int(state.room[h])
            idle = (free - min(k, free)) / size
            score = int(100 * part * (1 - weight * idle) + 1e-9)
            found |= dict.fromkeys(state.free_machines(h), score)
        return found

    def _shares_of_hosts(
        self, state: ClusterState, k: int, until: float | None
    ) -> dict[int, float]:
        """Of every host the best bandwidth with it, as a share of the best of all."""
        here, host_of, least = self.policy.usable(state), self.cluster.host_of, (-ANY, 0)
        roles = {h: self._role(here, h) for h in np.flatnonzero(here.masks).tolist()}
        value: dict[object, tuple[int, int]] = {}  # of a role: minus domains, then bandwidth

        def keep(found: tuple[Answer, int]) -> tuple[int, int]:
            one = -found[1], found[0].value
            for role in {roles[h] for h in host_of[list(found[0].gpus)].tolist()}:
                value[role] = max(one, value.get(role, least))
            return one

        best = keep(self._first(state, k, _part(until, 2)))
        searched: set[object] = set()
        for h, role in roles.items():
            if value.get(role) == best or role in searched:
                continue
            searched.add(role)
            if until is not None and time.monotonic() > until:
                value.setdefault(role, least)
                continue
            left = _part(until, len(set(roles.values()) - searched) + 1)
            bounds = Bounds.free(self.cluster.n_hosts, h)
            if (found := self._find(state, k, left, bounds, ties=False)) is not None:
                keep(found)
        most = {True: 1.0, False: 0.99}  # on more preferred domains it is not a best choice
        part = {
            role: 1.0 if one == best else min(most[one[0] == best[0]], one[1] / max(1, best[1]))
            for role, one in value.items()
        }
        return {h: part[role] for h, role in roles.items() if role in part}

    def _best_of_large(
        self, state: ClusterState, k: int, n: int, until: float | None
    ) -> list[Answer]:
        """The best choices that the search beyond tables finds."""
        assert self._large is not None
        found: dict[bytes, Answer] = {}
        for tier in self.policy.tiers(state, k):
            for one in self._large.best(state, k, n, self.demands(state), self.policy, until, tier):
                found.setdefault(self.cluster.counts(one.gpus).tobytes(), one)
            if len(found) >= n or (found and until is not None and time.monotonic() > until):
                break
        some = [*found.values()][:n] or [self._first(state, k, until)[0]]
        return [self._with_assumptions(one) for one in some]

    def _shares_of_large(
        self, state: ClusterState, k: int, until: float | None
    ) -> dict[int, float]:
        """The same by what the search beyond tables finds."""
        assert self._large is not None
        value: dict[int, tuple[int, int]] = {}  # minus domains, then bandwidth
        able = np.flatnonzero(self.policy.usable(state).room).tolist()
        for tier in self.policy.tiers(state, k):
            if tier and value and tier.domains > 1 - max(value.values())[0]:
                tier = tier._replace(domains=ANY)  # one more lets nearly every host be used
            found = self._large.by_host(state, k, self.demands(state), self.policy, until, tier)
            domains = ANY if tier is None else tier.domains
            value = {h: (-domains, one) for h, one in found.items()} | value
            if tier and value and until is not None and time.monotonic() > until:
                value = dict.fromkeys(able, (-ANY, 0)) | value
            if len(value) == len(able) or domains == ANY:
                break
        best = max(value.values()) if value else (0, self._first(state, k, until)[0].value)
        return {
            h: 1.0 if one == best else min(0.99, one[1] / max(1, best[1]))
            for h, one in value.items()
        }

    def what_if(
        self, state: ClusterState, gpus: Iterable[int] | str, deadline: float | None = None
    ) -> WhatIf:
        """Compare given free GPUs with the best choice; list what running jobs would lose.

        Parameters
        ----------
        state
            Of this cluster.
        gpus
            By number, or in words such as ``"n01:0-3 n02"``.
        deadline
            Seconds to look for a better choice.
        """
        self._check(state)
        if not (chosen := state.free_ids(gpus)):
            raise InputError("gpus: expected free GPUs, got none")
        demands = self.demands(state)
        try:
            best = self.answer(state, len(chosen), deadline).value
        except Infeasible:
            best = None
        got = share(self.model, state, chosen, demands)
        return WhatIf(
            chosen,
            got,
            victims(self.model, state, demands, chosen),
            best,
            regret(self.model, state, chosen, self.policy, self.traffic, self.seed),
            self.model.assumed,
            self.policy.fault(state, chosen),
        )

    def _checked(
        self, state: ClusterState, k: int, deadline: float | None
    ) -> tuple[int, float | None]:
        """The number, and the reading of the clock by which to answer."""
        self._check(state)
        if type(k) is not int or not 1 <= k <= len(state.free):
            k = integer("gpus", k, 1, 2**31)
            if k > len(state.free):
                raise Infeasible(f"gpus: requested {k}, free {len(state.free)}")
        if deadline is None:
            return k, None
        seconds = number("deadline", deadline, above=True, what="seconds")
        if self._tables is not None and not self._is_warm:  # the kernel may have to be compiled
            self._search.choose(state, self._jobs(state), k, 1)
            self._is_warm = True
        return k, time.monotonic() + min(seconds, _MOST_SECONDS)

    def _check(self, state: ClusterState) -> None:
        if not isinstance(state, ClusterState):
            raise InputError(f"state: expected a ClusterState, got {state!r:.60}")
        if state.cluster is not self.cluster and state.cluster.sha256 != self.cluster.sha256:
            raise InputError(
                "state: is not of the dispatcher's cluster (model.cluster has fitted factors)"
            )

    def _first(
        self, state: ClusterState, k: int, until: float | None, bounds: Bounds | None = None
    ) -> tuple[Answer, int]:
        """The best choice, or why there is none."""
        found = self._find(state, k, until, bounds)
        if found is None:
            raise Infeasible(
                impossible(state, self.policy, k)
                or f"gpus: no choice of {k} GPUs obeys the policy and has a known bandwidth"
                + ("" if self._tables is not None else ", of those that were tried")
            )
        return found

    def _find(
        self,
        state: ClusterState,
        k: int,
        until: float | None,
        bounds: Bounds | None = None,
        *,
        ties: bool = True,
    ) -> tuple[Answer, int] | None:
        """The best choice by tables, or beyond them; and its limit on preferred domains."""
        here = self.policy.usable(state)
        for tier in self.policy.tiers(state, k, bounds):
            found, is_proved = None, False
            if self._tables is not None:
                jobs, nodes = self._jobs(state), None
                if until is not None:
                    nodes = self._nodes(until, len(jobs) // (self.cluster.n_hosts + 1))
                search = self._search if ties else self._quick
                found, is_proved = search.choose(here, jobs, k, nodes, None, tier)
            if not is_proved:
                found = self._beyond(here, k, found, until, tier)
            if found is not None:
                return found, ANY if tier is None else tier.domains
        return None

    def _role(self, state: ClusterState, h: int) -> tuple[object, ...]:
        """What distinguishes a host from others."""
        host = self.cluster.hosts[h]
        return (
            host.type, int(state.masks[h]), state.held[:, h].tobytes(), host.domains,
            host.name in (self.policy.include or ()),
        )  # fmt: skip

    def _nodes(self, until: float, n_jobs: int) -> int:
        """Steps of the kernel that fit in half of the time that is left."""
        left = max(0.0, until - time.monotonic()) / 2
        return 1000 + int(left * STEPS_A_SECOND / (1 + n_jobs / _JOBS_A_STEP))

    def _beyond(
        self,
        here: ClusterState,
        k: int,
        found: Answer | None,
        until: float | None,
        bounds: Bounds | None,
    ) -> Answer | None:
        """The better of what is found and of a search that goes on to the deadline."""
        other = None
        if self._large is not None:
            other = self._large.choose(here, k, self.demands(here), self.policy, until, bounds)
        if found is None or (other is not None and other.value > found.value):
            return other
        return found._replace(upper_bound=MOST if other is None else other.upper_bound)

    def _jobs(self, state: ClusterState) -> IntArray:
        """The state's jobs as the kernel reads them, computed once a state."""
        known = self._known
        if known is not None and known[0] is state:
            return known[1]
        jobs = jobs_of(state, self.demands(state))
        self._known = (state, jobs)
        return jobs

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"policy": self.policy, "traffic": self.traffic, "seed": self.seed}
        return partial(Dispatcher, **options), (self.cluster, self.model)  # type: ignore[arg-type]

    def demands(self, state: ClusterState) -> list[int]:
        """Return demands of the running jobs; what a job reaches alone is computed once."""
        if len(self._alone) > _REMEMBERED:
            self._alone = {}
        alone = self._alone
        sets = [job.gpus for job in state.jobs
                if job.gpus not in alone and needs_bandwidth(job, self.traffic)]  # fmt: skip
        if sets and self._tables is not None:
            for gpus in sets:
                reached = self._tables.value(gpus)
                alone[gpus] = self.model.of(gpus) if reached < 0 else reached  # refuses
        elif sets:
            alone.update(zip(sets, self.model.of_sets(sets), strict=True))
        return [demand_of(job, alone, self.traffic, self.seed) for job in state.jobs]


def _part(until: float | None, n: int) -> float | None:
    """The time by which one of n more searches is to end."""
    if until is None:
        return None
    now = time.monotonic()
    return now + max(0.0, until - now) / max(1, n)


_MOST_SECONDS: Final = 1e6
"""A later deadline is none that counts of steps could hold."""

_JOBS_A_STEP: Final = 4
"""So many jobs take as long in a step as everything else."""

_REMEMBERED: Final = 100_000
"""Bandwidths of running jobs that are kept; then all are forgotten."""
