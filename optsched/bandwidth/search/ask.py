"""The front of the exact kernel: a request as arrays, and the answer as Python values."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.bandwidth.models.contention import Contention
from optsched.bandwidth.models.tables import BY_MASK, RECORD, RECORDS
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.policy import ANY, Policy
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.kernels.plain_python import is_ready, run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.models.tables import CountTables
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.policy import Bounds
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray

MOST_LEAVES: Final = 2_000_000
"""Count vectors that a search evaluates; above, the answer is not said to be exact."""

MOST_NODES: Final = 50_000_000
"""Steps of the kernel without a deadline: seconds."""

FEW_LEAVES: Final = 400
"""The same in plain Python, in half a second, where there may be more to look at."""

_FEW_VECTORS: Final = 10_000
"""Count vectors of a question that plain Python searches to its end: 4 hosts of 8 GPUs have 6561,
of which it evaluates 200 at most."""

_FEW: Final = 8
"""Hosts, and free GPUs of one, of a question for plain Python."""

MILLION: Final = 1_000_000

UNPROVED: Final = 1 << 63
"""Upper bound of an answer that was not searched to its end."""


class Answer(NamedTuple):
    """GPUs by global number, what they get, what they had alone, and what none exceeds (kB/s)."""

    gpus: tuple[int, ...]
    value: int
    standalone: int
    upper_bound: int
    visited: int = 0
    """Count vectors evaluated."""
    compared: bool = True
    """Whether all of the best were compared for what they leave."""
    assumed: tuple[str, ...] = ()
    """What the model assumes of links, a sentence each; then `value` is no more than that."""

    @property
    def exact(self) -> bool:
        """Whether nothing better exists, by the model."""
        return self.value >= self.upper_bound


def ask(
    tables: CountTables,
    state: ClusterState,
    demands: Sequence[int],
    k: int,
    policy: Policy | None = None,
    contention: Contention | None = None,
    *,
    ties: bool = False,
    tolerance: float = 0.0,
    leaves: int = MOST_LEAVES,
    nodes: int = MOST_NODES,
) -> Answer | None:
    """The best k free GPUs under contention and a policy, exactly; None if there are none.

    Parameters
    ----------
    tables, policy, contention, ties, tolerance
        As in `CountSearch`.
    state
        Free GPUs and running jobs.
    demands
        kB/s of every job.
    k
        How many.
    leaves
        Most count vectors to evaluate in each of the two passes.
    nodes
        Most steps of the search, some tens of nanoseconds each.
    """
    search = CountSearch(tables, policy, contention, ties=ties, tolerance=tolerance)
    here = search.policy.usable(state)
    jobs = search.jobs(state, demands)
    out, level = search.choose(here.masks, jobs, k, nodes, leaves)
    if level < 0:
        return None
    return answer_of(here, out)


def answer_of(here: ClusterState, out: list[int]) -> Answer:
    """What the kernel's numbers mean on the state with the free GPUs that may be used."""
    best, value, alone, visited, complete, *parts = out
    gpus = gpus_of(here, enumerate(parts))
    return Answer(gpus, value, alone, best if complete else UNPROVED, visited, complete == 2)


class CountSearch:
    """The exact search by counts, with everything prepared that does not depend on the state.

    Parameters
    ----------
    tables
        Bandwidths of the cluster.
    policy, contention
        By default everything is allowed, and jobs share as in `Contention`. Joint allocations are
        filled with the first or best GPUs; exact ones are not functions of counts.
    ties
        Whether the choice among equals matters; see `GpuPlacement`.
    tolerance
        Share of the best value that may be lost for a better rest; to the millionth.
    """

    def __init__(
        self,
        tables: CountTables,
        policy: Policy | None = None,
        contention: Contention | None = None,
        *,
        ties: bool = False,
        tolerance: float = 0.0,
    ) -> None:
        from optsched.bandwidth.search import counts

        self._kernel = counts
        self.cluster, self.policy = tables.cluster, policy or Policy()
        self.contention = contention or Contention()
        self.words = tables.ruled(self.policy).words
        self._order, self._added = domains_in_order(self.cluster)
        self._in_order = bool((np.diff(self._order) > 0).all())
        self.requests = [
            self._request(level, ties, tolerance) for level in levels_of(self.cluster, self.policy)
        ]

    def jobs(self, state: ClusterState, demands: Sequence[int]) -> IntArray:
        """The jobs that can interfere, as the kernel reads them."""
        return jobs_of(state.held, demands, self.contention)

    def choose(
        self,
        masks: IntArray,
        jobs: IntArray,
        k: int,
        nodes: int | None = None,
        leaves: int | None = None,
        bounds: Bounds | None = None,
    ) -> tuple[list[int], int]:
        """What the kernel answers, and the position of its level; -1: no choice, -2: none found.

        Parameters
        ----------
        masks
            `ClusterState.masks` of what `Policy.usable` leaves.
        jobs
            See `jobs`.
        k, nodes, leaves
            As in `ask`.
        bounds
            On the counts of hosts, beside the policy's own; then nothing is lost for the rest.
        """
        kernel, n, proved = self._kernel, self.cluster.n_hosts, True
        for level, template in enumerate(self.requests):
            request = template.copy()
            request[kernel.K], request[kernel.N_JOBS] = k, len(jobs) // (n + 1)
            if nodes is not None:
                request[kernel.NODES] = nodes
            if leaves is not None:
                request[kernel.LEAVES] = leaves
            if bounds is not None:
                lists = request[kernel.LISTS :].reshape(6, n)
                np.maximum(lists[1], bounds.least[self._order], out=lists[1])
                np.minimum(lists[4], bounds.most[self._order], out=lists[4])
                request[kernel.TOLERANCE] = 0
            out = np.empty(kernel.CHOSEN + n, np.int64)
            if choose(self.words, request, masks, jobs, out):
                if not self._in_order:
                    out[kernel.CHOSEN + self._order] = out[kernel.CHOSEN :].copy()
                return out.tolist(), level
            proved = proved and bool(out[kernel.COMPLETE])
        return [], -1 if proved else -2

    def _request(self, required: int | None, ties: bool, tolerance: float) -> IntArray:
        """The kernel's request at one level, the number of GPUs and the jobs aside."""
        kernel, cluster = self._kernel, self.cluster
        policy, contention = self.policy, self.contention
        order = self._order
        request = np.zeros(kernel.LISTS + 6 * cluster.n_hosts, np.int64)
        request[kernel.N_USED] = cluster.n_hosts
        request[kernel.BALANCE] = policy.most_difference
        request[kernel.MIN_HOSTS] = policy.min_hosts
        request[kernel.MAX_HOSTS] = ANY if policy.max_hosts is None else policy.max_hosts
        request[kernel.SAME_TYPE] = policy.same_type
        request[kernel.TOLERANCE] = round(tolerance * MILLION)
        request[kernel.FILL_BEST] = contention.fill == "best"
        request[kernel.TWO_SIDED] = contention.sides == "two"
        request[kernel.CROSS_ONLY] = contention.cross_only
        request[kernel.UNIT] = contention.unit
        request[kernel.TIES] = ties
        request[kernel.LEAVES], request[kernel.NODES] = NO_LIMIT, MOST_NODES
        request[kernel.SPREAD] = cluster.n_hosts + 1
        lists = request[kernel.LISTS :].reshape(6, cluster.n_hosts)
        lists[0], lists[5] = order, self._added
        lists[1], lists[4] = (part[order] for part in policy.bounds(cluster))
        if policy.slice_size is not None and policy.slice_level is not None:
            request[kernel.SLICE] = policy.slice_size
            lists[2] = domain_numbers(cluster, cluster.level(policy.slice_level))[order]
        if required is not None:
            lists[3] = domain_numbers(cluster, required)[order]
        return request


def choose(
    words: IntArray, request: IntArray, masks: IntArray, jobs: IntArray, out: IntArray
) -> int:
    """`counts.choose`; while that is not compiled its source as plain Python, if that is quick."""
    from optsched.bandwidth.search import counts as kernel

    if is_ready(kernel.choose):
        return int(kernel.choose(words, request, masks, jobs, out))
    used = request[kernel.LISTS : kernel.LISTS + request[kernel.N_USED]]
    by_mask = words[words[RECORDS] + used * RECORD + BY_MASK].tolist()
    free = zip(masks[used].tolist(), by_mask, strict=True)
    room = [part.bit_count() if is_mask else part for part, is_mask in free]
    leaves = min(leaves_in_python(room, int(request[kernel.K])), int(request[kernel.LEAVES]))
    if leaves:
        shorter = request.copy()
        shorter[kernel.LEAVES] = leaves
        found = run(kernel.choose, words, shorter, masks, jobs, out)
        if out[kernel.COMPLETE] == 2 or leaves == request[kernel.LEAVES]:
            return int(found)
    return int(kernel.choose(words, request, masks, jobs, out))


def leaves_in_python(room: Iterable[int], k: int) -> int:
    """Count vectors that plain Python may evaluate in half a second; 0: leave it to the kernel.

    `room` is the free GPUs of the hosts that may be used, `k` how many are wanted.
    """
    some = [int(n) for n in room if n]
    if max(some, default=0) > _FEW:
        return 0
    if prod(min(n, k) + 1 for n in some) <= _FEW_VECTORS:
        return MOST_LEAVES
    return FEW_LEAVES if len(some) <= _FEW else 0


def gpus_of(state: ClusterState, parts: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Global numbers of the GPUs of hosts with their masks (or numbers).

    Where a host has more than 16 GPUs, only their number is chosen: whole trays come first, then
    lowest ids.
    """
    of, first, by_mask = state.cluster.places
    found: list[int] = []
    for host, part in parts:
        if part and by_mask[host]:
            found += _ids(first[host], part)
        elif part:
            free = [gpu - first[host] for gpu in state.free if of[gpu] == host]
            tray = state.cluster.type(host).tray
            found += [first[host] + i for i in trays_first(free, part, tray)]
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _ids(first: int, mask: int) -> tuple[int, ...]:
    """GPUs of a mask, whose bit 0 is the GPU `first`."""
    return tuple(first + i for i in range(MOST_BY_SUBSET) if mask >> i & 1)


def trays_first(free: list[int], count: int, tray: int) -> list[int]:
    """So many of a host's free local ids: whole free trays first, then the fullest broken ones."""
    if not tray:
        return sorted(free)[:count]
    trays: dict[int, list[int]] = {}
    for i in sorted(free):
        trays.setdefault(i // tray, []).append(i)
    chosen: list[int] = []
    whole = [ids for ids in trays.values() if len(ids) == tray]
    while whole and count - len(chosen) >= tray:
        chosen += whole.pop(0)
    broken = sorted(
        (ids for ids in trays.values() if ids[0] not in chosen), key=lambda ids: (len(ids), ids)
    )
    for ids in broken:  # what remains is less than a tray: break those first that are broken
        chosen += ids[: count - len(chosen)]
    return sorted(chosen)


def jobs_of(held: IntArray, demands: Sequence[int], contention: Contention) -> IntArray:
    """The jobs that can interfere, as the kernel reads them: demand, then GPUs by host."""
    jobs: list[int] = []
    for demand, row in zip(demands, held.tolist(), strict=True):
        if (demand > 0 or not contention.skip_idle) and len(row) - row.count(0) >= 2:
            jobs += [demand, *row]
    return np.array(jobs, np.int64)


def domain_numbers(cluster: Cluster, level: int) -> IntArray:
    """Number of the domain of every host at a level."""
    number = np.zeros(cluster.n_hosts, np.int64)
    for d, hosts in enumerate(cluster.domains(level).values()):
        number[list(hosts)] = d
    return number


def domains_in_order(cluster: Cluster) -> tuple[IntArray, IntArray]:
    """Hosts domain by domain, and what a choice's spread grows by from one to the next.

    Of equal choices the one counts that uses the fewest domains, from the top level down, then the
    fewest hosts, then the fewest that are whole: in digits to the base hosts + 1, from behind.
    """
    n = cluster.n_hosts
    numbers = [domain_numbers(cluster, level) for level in range(len(cluster.levels))]
    numbers = [of for of in numbers if 0 < of.max() < n - 1]  # else all alike, or as many as hosts
    order = np.lexsort([np.arange(n), *numbers[::-1]])
    base = n + 1
    numbers = numbers[: max(0, int(61 / np.log2(base)) - 2)]  # what 64 bits hold
    added = np.zeros(n, np.int64)
    for place, of in enumerate(reversed(numbers), 2):
        added += np.diff(of[order], prepend=-1).astype(bool) * base**place
    return order, added


def levels_of(cluster: Cluster, policy: Policy) -> list[int | None]:
    """Levels to try in turn: what is preferred and those above, then what is needed, or any."""
    least = policy.level(cluster)
    if policy.preferred is None:
        return [least]
    wish = cluster.level(policy.preferred)
    tried: list[int | None] = list(range(wish, -1 if least is None else least, -1))
    return [*tried, least]
