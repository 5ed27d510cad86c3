"""The exact choice for callers in a loop: everything prepared, microseconds an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.ask import gpus_of, jobs_of, request_of
from optsched.bandwidth.contention import Contention, check_traffic, demand_of, needs_bandwidth
from optsched.bandwidth.intra import MOST_BY_SUBSET
from optsched.bandwidth.policy import Policy
from optsched.bandwidth.rates import integral
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.bandwidth.cluster import Cluster
    from optsched.bandwidth.contention import Traffic
    from optsched.bandwidth.model import BandwidthModel
    from optsched.bandwidth.state import ClusterState
    from optsched.schedule import IntArray


class Infeasible(InputError):
    """No choice of so many free GPUs obeys the policy."""


class Dispatcher:
    """Chooses as `SubsetChoice` with the solver `counts` does, without the ceremony.

    It may be called from several threads.

    Parameters
    ----------
    cluster
        Hosts and GPUs.
    model
        Bandwidths, with tables.
    policy, contention, traffic, seed, tolerance
        As in `SubsetChoice`; the same for all requests.

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
        if cluster is not model.cluster and cluster.sha256 != model.cluster.sha256:
            raise InputError("cluster, model: are of different clusters")
        tables = model.tables()
        if tables is None:
            raise InputError(
                "model: has no tables for this cluster: use optsched.solve(SubsetChoice(...))"
            )
        from optsched.bandwidth import counts as kernel

        self.cluster, self.model = cluster, model
        self.policy, self.contention = policy or Policy(), contention or Contention()
        self.policy.check(cluster)
        check_traffic(traffic)
        self.traffic, self.seed = traffic, seed
        self._tables, self._words, self._kernel = tables, tables.words, kernel
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
        if type(k) is not int or not 1 <= k <= len(state.free):
            integral("k", k, 1, 2**31)
            raise InputError(f"k: asks {k}, free {len(state.free)}")
        if not self._small:
            return self._with_policy(state, k)
        kernel = self._kernel
        jobs = self._jobs(state)
        n_hosts = self.cluster.n_hosts
        request = self._template.copy()
        request[kernel.K] = k
        request[kernel.N_JOBS] = len(jobs) // (n_hosts + 1)
        out = np.empty(kernel.CHOSEN + n_hosts, np.int64)
        if not kernel.choose(self._words, request, state.masks, jobs, out):
            raise Infeasible(f"no choice of {k} GPUs has a measured bandwidth")
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
        jobs = jobs_of(state.held, self._demands(state), self.contention)
        self._known = (state, jobs)
        return jobs

    def _demands(self, state: ClusterState) -> list[int]:
        """As `demands`; what running jobs reach alone is computed once a job."""
        if len(self._alone) > _REMEMBERED:
            self._alone = {}
        alone = self._alone
        for job in state.jobs:
            if job.gpus not in alone and needs_bandwidth(job, self.traffic):
                alone[job.gpus] = self.model.of(job.gpus)
        return [demand_of(job, alone, self.traffic, self.seed) for job in state.jobs]

    def _with_policy(self, state: ClusterState, k: int) -> tuple[tuple[int, ...], int, int]:
        from optsched.bandwidth.ask import ask

        found = ask(
            self._tables, state.masks, state.held,
            self._demands(state), k, self.policy, self.contention,
            ties=True, tolerance=self._tolerance,
        )  # fmt: skip
        if found is None:
            raise Infeasible(f"no choice of {k} GPUs obeys the policy and has a known bandwidth")
        return gpus_of(state, found.parts), found.value, found.standalone

    def _subsets(self, host: int) -> list[tuple[int, ...]]:
        """Global numbers of every mask of a host."""
        first, size = int(self.cluster.first[host]), int(self.cluster.sizes[host])
        return [tuple(first + i for i in range(size) if mask >> i & 1) for mask in range(1 << size)]


_REMEMBERED = 100_000
"""Bandwidths of running jobs that are kept; then all are forgotten."""

_LISTED = 10
"""GPUs a host up to which the ids of every mask are listed beforehand."""
