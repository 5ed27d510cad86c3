"""The exact choice for callers in a loop: everything prepared, microseconds an answer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bandwidth.ask import choose, gpus_of, jobs_of, request_of
from optsched.bandwidth.cluster import Cluster
from optsched.bandwidth.contention import Contention, check_traffic, demand_of, needs_bandwidth
from optsched.bandwidth.feasibility import impossible
from optsched.bandwidth.intra import MOST_BY_SUBSET
from optsched.bandwidth.model import BandwidthModel
from optsched.bandwidth.policy import Policy, check_rules, share_of
from optsched.bandwidth.state import ClusterState
from optsched.errors import Infeasible, InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.bandwidth.contention import Traffic
    from optsched.model.schedule import IntArray


class Dispatcher:
    """Chooses as `GpuPlacement` with the solver `counts` does, without the ceremony.

    It may be called from several threads.

    Parameters
    ----------
    cluster
        Hosts and GPUs.
    model
        Bandwidths, with tables.
    policy, contention, traffic, seed, tolerance
        As in `GpuPlacement`; the same for all requests.

    Raises
    ------
    InputError
        The model is of another cluster, or has no tables.
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
        tables = model.tables()
        if tables is None:
            raise InputError(
                "model: has no tables for this cluster: use optsched.solve(GpuPlacement(...))"
            )
        from optsched.bandwidth import counts  # noqa: F401 (compile now, not at the first request)

        self.cluster, self.model = cluster, model
        self.policy, self.contention = policy or Policy(), contention or Contention()
        self.policy.check(cluster)
        check_traffic(traffic)
        self.traffic, self.seed = traffic, seed
        self._tables, self._words = tables, tables.words
        every = np.ones(cluster.n_hosts, np.int64)
        template = request_of(
            cluster, every, 1, Policy(), self.contention, ties=True, tolerance=tolerance
        )
        assert template is not None
        self._template = template
        self._tolerance = tolerance
        self._small = bool((cluster.sizes <= MOST_BY_SUBSET).all()) and self.policy.is_free
        self._ids = [
            self._subsets(h) if cluster.sizes[h] <= _LISTED else None
            for h in range(cluster.n_hosts)
        ]
        self._known: tuple[ClusterState, IntArray] | None = None
        self._alone: dict[tuple[int, ...], int] = {}

    def choose(self, state: ClusterState, k: int) -> tuple[tuple[int, ...], int]:
        """The GPUs, ascending, and their bandwidth in kB/s beside the running jobs.

        Parameters
        ----------
        state
            Of this cluster.
        k
            How many.

        Raises
        ------
        InputError
            k is no number, or not in 1..free; `Infeasible` if the policy allows nothing.
        """
        gpus, bandwidth, _ = self.answer(state, k)
        return gpus, bandwidth

    def answer(self, state: ClusterState, k: int) -> tuple[tuple[int, ...], int, int]:
        """The same with the bandwidth that the GPUs would have alone, behind."""
        from optsched.bandwidth import counts as kernel

        if not isinstance(state, ClusterState):
            raise InputError(f"state: expected a ClusterState, got {state!r:.60}")
        if state.cluster is not self.cluster and state.cluster.sha256 != self.cluster.sha256:
            raise InputError("state: is of another cluster than the dispatcher")
        if type(k) is not int or not 1 <= k <= len(state.free):
            k = integer("gpus", k, 1, 2**31)
            if k > len(state.free):
                raise Infeasible(f"gpus: asks {k}, free {len(state.free)}")
        if not self._small:
            return self._with_policy(state, k)
        jobs = self._jobs(state)
        n_hosts = self.cluster.n_hosts
        request = self._template.copy()
        request[kernel.K] = k
        request[kernel.N_JOBS] = len(jobs) // (n_hosts + 1)
        out = np.empty(kernel.CHOSEN + n_hosts, np.int64)
        if not choose(self._words, request, state.masks, jobs, out):
            raise self._infeasible(state, k)
        answer = out.tolist()
        gpus: tuple[int, ...] = ()
        for ids, part, host in zip(self._ids, answer[kernel.CHOSEN :], range(n_hosts), strict=True):
            if part:
                gpus += gpus_of(state, [(host, part)]) if ids is None else ids[part]
        return gpus, answer[kernel.VALUE], answer[kernel.STANDALONE]

    def _jobs(self, state: ClusterState) -> IntArray:
        """The state's jobs as the kernel reads them, computed once a state."""
        known = self._known
        if known is not None and known[0] is state:
            return known[1]
        jobs = self._tenants(state)
        self._known = (state, jobs)
        return jobs

    def _tenants(self, state: ClusterState) -> IntArray:
        tenants = state.pooled() if self.contention.pooled else state
        return jobs_of(tenants.held, self._demands(tenants), self.contention)

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
        for job in state.jobs:
            if job.gpus not in alone and needs_bandwidth(job, self.traffic):
                alone[job.gpus] = self.model.of(job.gpus)
        unit = self.contention.unit
        return [demand_of(job, alone, self.traffic, self.seed, unit) for job in state.jobs]

    def _with_policy(self, state: ClusterState, k: int) -> tuple[tuple[int, ...], int, int]:
        from optsched.bandwidth.ask import ask

        tenants = state.pooled() if self.contention.pooled else state
        found = ask(
            self._tables, state.masks, tenants.held, self._demands(tenants), k, self.policy,
            self.contention,
            ties=True, tolerance=self._tolerance,
        )  # fmt: skip
        if found is None:
            raise self._infeasible(state, k)
        return gpus_of(state, found.parts), found.value, found.standalone

    def _subsets(self, host: int) -> list[tuple[int, ...]]:
        """Global numbers of every mask of a host."""
        first, size = int(self.cluster.first[host]), int(self.cluster.sizes[host])
        return [tuple(first + i for i in range(size) if mask >> i & 1) for mask in range(1 << size)]


_REMEMBERED = 100_000
"""Bandwidths of running jobs that are kept; then all are forgotten."""

_LISTED = 10
"""GPUs a host up to which the ids of every mask are listed beforehand."""
