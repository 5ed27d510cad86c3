"""Choices of GPUs for callers in a loop: everything prepared, a deadline, a proven bound."""

from __future__ import annotations

import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.models.contention import (
    Contention,
    check_traffic,
    demand_of,
    needs_bandwidth,
)
from optsched.bandwidth.models.model import BandwidthModel, CountModel
from optsched.bandwidth.models.pods import PodBandwidth
from optsched.bandwidth.search.ask import (
    MOST_NODES,
    Answer,
    ask,
    choose,
    gpus_of,
    jobs_of,
    request_of,
)
from optsched.bandwidth.search.large import LargeSearch
from optsched.bandwidth.topology.cluster import Cluster
from optsched.bandwidth.topology.feasibility import impossible
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.policy import Policy, check_rules, share_of
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import Infeasible, InputError
from optsched.io.values import integer, number

if TYPE_CHECKING:
    from optsched.bandwidth.models.contention import Traffic
    from optsched.model.schedule import IntArray


class Dispatcher:
    """Chooses GPUs beside running jobs, in microseconds to milliseconds, with a bound.

    On up to some 100 GPUs (where the model has tables) it answers as `GpuPlacement` with the solver
    `counts` does, ties broken; on larger clusters, flat or of pods, by `LargeSearch` or
    `choose_pods`. It may be called from several threads.

    Parameters
    ----------
    cluster
        Hosts and GPUs.
    model
        Bandwidths: with tables, a `CountModel`, or a `PodBandwidth`.
    policy, contention, traffic, seed, tolerance
        As in `GpuPlacement`; the same for all requests. Without tables there is no tolerance.

    Raises
    ------
    InputError
        The model is of another cluster, or is none that can be searched by counts.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: BandwidthModel,
        *,
        policy: Policy | None = None,
        contention: Contention | None = None,
        traffic: Traffic = "given",
        seed: int = 0,
        tolerance: float = 0.0,
    ) -> None:
        if not isinstance(cluster, Cluster) or not isinstance(model, BandwidthModel):
            what = f"{type(cluster).__name__} and {type(model).__name__}"
            raise InputError(f"cluster, model: expected a Cluster and a BandwidthModel, got {what}")
        if cluster is not model.cluster and cluster.sha256 != model.cluster.sha256:
            raise InputError("cluster, model: are of different clusters")
        check_rules(policy, contention)
        if contention is not None and contention.fill == "exact":
            raise InputError(
                "contention: joint allocations with their exact GPUs are not functions of counts; "
                "use optsched.solve(GpuPlacement(...))"
            )
        integer("seed", seed, 0, 2**31 - 1)
        share_of("tolerance", tolerance)
        self.cluster, self.model = cluster, model
        self.policy, self.contention = policy or Policy(), contention or Contention()
        self.policy.check(cluster)
        check_traffic(traffic)
        self.traffic, self.seed = traffic, seed
        self._tolerance = tolerance
        self._tables = tables = model.tables()
        known = isinstance(model, (CountModel, PodBandwidth))
        self._large = LargeSearch(model) if known else None  # type: ignore[arg-type]
        if tables is None and self._large is None:
            raise InputError(
                "model: has no tables for this cluster: use optsched.solve(GpuPlacement(...))"
            )
        self._small = bool((cluster.sizes <= MOST_BY_SUBSET).all()) and self.policy.is_free
        self._small = self._small and tables is not None
        self._known: tuple[ClusterState, IntArray] | None = None
        self._alone: dict[tuple[int, ...], int] = {}
        if tables is None:
            return
        from optsched.bandwidth.search import counts

        self._words = tables.words
        every = np.ones(cluster.n_hosts, np.int64)
        template = request_of(
            cluster, every, 1, Policy(), self.contention, ties=True, tolerance=tolerance
        )
        assert template is not None
        template[counts.LEAVES], template[counts.NODES] = NO_LIMIT, MOST_NODES
        self._template = template
        self._ids = [
            self._subsets(h) if cluster.sizes[h] <= _LISTED else None
            for h in range(cluster.n_hosts)
        ]

    def choose(
        self, state: ClusterState, k: int, deadline: float | None = None
    ) -> tuple[tuple[int, ...], int]:
        """The GPUs, ascending, and their bandwidth in kB/s beside the running jobs.

        Parameters
        ----------
        state
            Of this cluster.
        k
            How many.
        deadline
            Seconds until the answer: then the best found, whose bound `answer` tells. Without one
            the search is bounded by its work, some seconds at most. Neither counts the first call
            on a machine, which compiles.

        Raises
        ------
        InputError
            k is no number, or below 1.
        Infeasible
            More GPUs than are free, or the policy allows nothing.
        """
        return self.answer(state, k, deadline)[:2]

    def answer(self, state: ClusterState, k: int, deadline: float | None = None) -> Answer:
        """The same with the bandwidth that the GPUs would have alone, and the proven bound."""
        from optsched.bandwidth.search import counts as kernel

        if not isinstance(state, ClusterState):
            raise InputError(f"state: expected a ClusterState, got {state!r:.60}")
        if state.cluster is not self.cluster and state.cluster.sha256 != self.cluster.sha256:
            raise InputError("state: is of another cluster than the dispatcher")
        if type(k) is not int or not 1 <= k <= len(state.free):
            k = integer("gpus", k, 1, 2**31)
            if k > len(state.free):
                raise Infeasible(f"gpus: asks {k}, free {len(state.free)}")
        until = None
        if deadline is not None:
            until = time.monotonic() + number("deadline", deadline, above=True, what="seconds")
        if not self._small:
            return self._slowly(state, k, until)
        jobs = self._jobs(state)
        n_hosts = self.cluster.n_hosts
        request = self._template.copy()
        request[kernel.K] = k
        request[kernel.N_JOBS] = n_jobs = len(jobs) // (n_hosts + 1)
        if until is not None:
            request[kernel.NODES] = self._nodes(until, n_jobs)
        out = np.empty(kernel.CHOSEN + n_hosts, np.int64)
        if not choose(self._words, request, state.masks, jobs, out):
            if out[kernel.COMPLETE]:
                raise self._infeasible(state, k)
            return self._best_of(state, k, None, until)
        answer = out.tolist()
        gpus: tuple[int, ...] = ()
        for ids, part, host in zip(self._ids, answer[kernel.CHOSEN :], range(n_hosts), strict=True):
            if part:
                gpus += gpus_of(state, [(host, part)]) if ids is None else ids[part]
        found = Answer(
            gpus, answer[kernel.VALUE], answer[kernel.STANDALONE], answer[kernel.OPTIMUM]
        )
        return found if answer[kernel.COMPLETE] else self._best_of(state, k, found, until)

    def _nodes(self, until: float | None, n_jobs: int) -> int:
        """Steps of the kernel that fit in half of the time that is left."""
        if until is None:
            return MOST_NODES
        left = max(0.0, until - time.monotonic()) / 2
        return 1000 + int(left * self._speed / (1 + n_jobs / _JOBS_A_STEP))

    @cached_property
    def _speed(self) -> float:
        """Steps of the kernel a second without jobs, measured once where no choice is allowed."""
        from optsched.bandwidth.search import counts as kernel

        request, none = self._template.copy(), np.zeros(0, np.int64)
        request[kernel.K], request[kernel.NODES] = self.cluster.n_gpus // 2, 50_000
        request[kernel.MIN_HOSTS] = self.cluster.n_hosts + 1
        masks, out = ClusterState.idle(self.cluster).masks, np.empty(len(request), np.int64)
        kernel.choose(self._words, request, masks, none, out)  # compiles, perhaps
        begin = time.perf_counter()
        kernel.choose(self._words, request, masks, none, out)
        return 50_000 / (time.perf_counter() - begin)

    def _slowly(self, state: ClusterState, k: int, until: float | None) -> Answer:
        """Under a policy, with hosts of many GPUs, on pods, or without tables."""
        if self._tables is None:
            return self._best_of(state, k, None, until)
        tenants = self._tenants(state)
        found = ask(
            self._tables, state.masks, tenants.held, self._demands(tenants), k, self.policy,
            self.contention, ties=True, tolerance=self._tolerance, leaves=NO_LIMIT,
            nodes=self._nodes(until, len(tenants.jobs)),
        )  # fmt: skip
        if found is None:
            return self._best_of(state, k, None, until)
        answer = Answer(gpus_of(state, found.parts), found.value, found.standalone, found.optimum)
        return answer if found.exact else self._best_of(state, k, answer, until)

    def _best_of(
        self, state: ClusterState, k: int, found: Answer | None, until: float | None
    ) -> Answer:
        """The better of what is found and of a search that goes on to the deadline."""
        other = None
        if self._large is not None:
            tenants = self._tenants(state)
            other = self._large.choose(
                tenants, k, self._demands(tenants), self.policy, self.contention, until
            )
        if other is None and found is None:
            raise self._infeasible(state, k)
        if other is None or (found is not None and found.value >= other.value):
            assert found is not None
            return found._replace(upper_bound=MOST if other is None else other.upper_bound)
        return other

    def _jobs(self, state: ClusterState) -> IntArray:
        """The state's jobs as the kernel reads them, computed once a state."""
        known = self._known
        if known is not None and known[0] is state:
            return known[1]
        tenants = self._tenants(state)
        jobs = jobs_of(tenants.held, self._demands(tenants), self.contention)
        self._known = (state, jobs)
        return jobs

    def _tenants(self, state: ClusterState) -> ClusterState:
        return state.pooled() if self.contention.pooled else state

    def _infeasible(self, state: ClusterState, k: int) -> Infeasible:
        return Infeasible(
            impossible(state, self.policy, k)
            or f"no choice of {k} GPUs obeys the policy and has a known bandwidth"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        rest = {
            "policy": self.policy, "contention": self.contention, "traffic": self.traffic,
            "seed": self.seed, "tolerance": self._tolerance,
        }  # fmt: skip
        return partial(Dispatcher, **rest), (self.cluster, self.model)  # type: ignore[arg-type]

    def _demands(self, state: ClusterState) -> list[int]:
        """As `demands`; what running jobs reach alone is computed once a job."""
        if len(self._alone) > _REMEMBERED:
            self._alone = {}
        alone = self._alone
        new = [j for j in state.jobs if j.gpus not in alone and needs_bandwidth(j, self.traffic)]
        if self._tables is not None:
            for job in new:
                reached = self._tables.value(job.gpus)
                alone[job.gpus] = self.model.of(job.gpus) if reached < 0 else reached  # refuses
        elif new:
            rows = np.zeros((len(new), self.cluster.n_gpus), np.bool_)
            for row, job in zip(rows, new, strict=True):
                row[list(job.gpus)] = True
            found = self.model.predict(rows).tolist()
            alone.update(zip((job.gpus for job in new), found, strict=True))
        unit = self.contention.unit
        return [demand_of(job, alone, self.traffic, self.seed, unit) for job in state.jobs]

    def _subsets(self, host: int) -> list[tuple[int, ...]]:
        """Global numbers of every mask of a host."""
        first, size = int(self.cluster.first[host]), int(self.cluster.sizes[host])
        return [tuple(first + i for i in range(size) if mask >> i & 1) for mask in range(1 << size)]


_JOBS_A_STEP: Final = 4
"""So many jobs take as long in a step as everything else."""

_REMEMBERED: Final = 100_000
"""Bandwidths of running jobs that are kept; then all are forgotten."""

_LISTED: Final = 10
"""GPUs a host up to which the ids of every mask are listed beforehand."""
