"""The front of the exact kernel: a request as arrays, and the answer as Python values."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.bandwidth.models.contention import interferes
from optsched.bandwidth.search.rails import on_rails
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.policy import ANY, Policy
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.kernels.plain_python import is_ready, run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.models.tables import CountTables, TableArrays
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.policy import Bounds
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray

MOST_LEAVES: Final = 2_000_000
"""Count vectors that a search evaluates; above, the answer is not said to be exact."""

MOST_NODES: Final = 50_000_000
"""Steps of the kernel without a deadline: seconds."""

STEPS_A_SECOND: Final = 5_000_000
"""Steps that a slow core does, without many jobs."""

FEW_LEAVES: Final = 400
"""The same in plain Python, in half a second, where there may be more to look at."""

_FEW_VECTORS: Final = 10_000
"""Count vectors of a question that plain Python searches to its end: 4 hosts of 8 GPUs have 6561,
of which it evaluates 200 at most."""

_FEW: Final = 8
"""Hosts, and free GPUs of one, of a question for plain Python."""

Records: TypeAlias = np.ndarray[Any, np.dtype[np.void]]
Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

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
    assumed: tuple[str, ...] = ()
    """What the model assumes of links, a sentence each; then `value` is no more than that."""

    @property
    def exact(self) -> bool:
        """Whether nothing better exists, by the model."""
        return self.value >= self.upper_bound


def best_by_counts(
    tables: CountTables,
    state: ClusterState,
    demands: Sequence[int],
    k: int,
    policy: Policy | None = None,
    *,
    ties: bool = False,
    leaves: int = MOST_LEAVES,
    nodes: int = MOST_NODES,
) -> Answer | None:
    """The best k free GPUs under contention and a policy, exactly; None if there are none.

    `demands`: kB/s of every job; `leaves`: most count vectors evaluated in each of the two passes;
    `nodes`: most steps, some tens of nanoseconds each.
    """
    rules, jobs = policy or Policy(), jobs_of(state, demands)
    search, here = CountSearch(tables, rules, ties=ties), rules.usable(state)
    for bounds in rules.tiers(state, k):
        found, complete = search.choose(here, jobs, k, nodes, leaves, bounds)
        if found is not None or not complete:
            return found
    return None


class _Space(NamedTuple):
    """Work space of the kernel, kept from one call to the next."""

    request: Records
    nodes: Records
    tenants: Records
    answer: Records
    chosen: IntArray


class CountSearch:
    """The exact search by counts, with everything prepared that does not depend on the state."""

    def __init__(
        self, tables: CountTables, policy: Policy | None = None, *, ties: bool = False
    ) -> None:
        from optsched.bandwidth.search import counts

        self._kernel = counts
        self.cluster, self.policy = tables.cluster, policy or Policy()
        self.arrays = tables.arrays
        self._tables, self._ties, self._single_rail = tables, ties, False
        self._of_rails: dict[tuple[int, int | None], CountSearch] = {}
        self.places = self._ordered_hosts()
        self._rules = self._fixed_fields(ties)
        self._order: list[int] = self.places["host"].tolist()
        self._spaces: list[_Space] = []  # unused: several threads may search

    def choose(
        self,
        here: ClusterState,
        jobs: IntArray,
        k: int,
        nodes: int | None = None,
        leaves: int | None = None,
        bounds: Bounds | None = None,
        *,
        whole: Bools | None = None,
    ) -> tuple[Answer | None, bool]:
        """The best choice, and whether the search was complete.

        `here` is what `Policy.usable` leaves, `whole` the hosts that were whole before rails left
        some of their GPUs; `bounds` come in addition to the policy's, see `Policy.tiers`.
        """
        if here.cluster.rails and not self._single_rail:
            return self._choose_on_rails(here, jobs, k, nodes, leaves, bounds)
        places, n_jobs = self.places, len(jobs) // (self.cluster.n_hosts + 1)
        space = self._spaces.pop() if self._spaces else self._space(n_jobs)
        if len(space.tenants) < (len(places) + 1) * n_jobs:
            space = self._space(n_jobs)
        if bounds is not None:
            places, order = places.copy(), places["host"]
            np.maximum(places["least"], bounds.least[order], out=places["least"])
            np.minimum(places["most"], bounds.most[order], out=places["most"])
        if whole is not None:
            places = places.copy()
            places["whole"] = whole[places["host"]]
        domains = ANY if bounds is None else bounds.domains
        steps = MOST_NODES if nodes is None else nodes
        most = NO_LIMIT if leaves is None else leaves
        space.request[0] = (k, n_jobs, steps, most, domains, *self._rules)
        found = self._answer(space, places, here, jobs)
        self._spaces.append(space)
        return found

    def _choose_on_rails(
        self, here: ClusterState, jobs: IntArray, k: int, *limits: Any
    ) -> tuple[Answer | None, bool]:
        """The best choice of all `on_rails`."""
        found, complete, whole = list[Answer](), True, here.room == here.cluster.sizes
        for state, policy in on_rails(here, k, self.policy, self._tables.intra):
            key = policy.min_hosts, policy.max_hosts
            if key not in self._of_rails:
                search = CountSearch(self._tables, policy, ties=self._ties)
                search._single_rail = True
                self._of_rails[key] = search
            one, proved = self._of_rails[key].choose(state, jobs, k, *limits, whole=whole)
            found += [] if one is None else [one]
            complete &= proved
        return best_of(here, found), complete

    def _answer(
        self, space: _Space, places: Records, here: ClusterState, jobs: IntArray
    ) -> tuple[Answer | None, bool]:
        """The kernel's answer, and whether its search was complete."""
        request, *work = space
        if not choose(self.arrays, request, places, here.masks, jobs, *work):
            return None, bool(space.answer["complete"][0])
        value, alone, visited, complete = space.answer.item()
        chosen = space.chosen.tolist()
        gpus = gpus_of(here, sorted(zip(self._order, chosen, strict=True)))
        upper = value if complete else UNPROVED
        return Answer(gpus, value, alone, upper, visited), bool(complete)

    def _space(self, n_jobs: int) -> _Space:
        """Work space of one call of the kernel, for up to so many jobs."""
        kernel, n = self._kernel, len(self.places)
        tenants = np.zeros((n + 1) * n_jobs, kernel.TENANT)
        answer, chosen = np.zeros(1, kernel.ANSWER), np.zeros(n, np.int64)
        request, nodes = np.zeros(1, kernel.REQUEST), np.zeros(n + 1, kernel.NODE)
        return _Space(request, nodes, tenants, answer, chosen)

    def _ordered_hosts(self) -> Records:
        """The hosts domain by domain, as the kernel's places; see `domains_in_order`."""
        cluster, policy = self.cluster, self.policy
        order, added = domains_in_order(cluster)
        places = np.zeros(cluster.n_hosts, self._kernel.PLACE)
        places["host"], places["gap"] = order, added
        bounds = policy.bounds(cluster)
        places["least"], places["most"] = bounds.least[order], bounds.most[order]
        domain = cluster.network_levels.domain[:, order]
        places["level"][1:] = (domain[:, 1:] != domain[:, :-1]).sum(axis=0)
        return places

    def _fixed_fields(self, ties: bool) -> tuple[int, ...]:
        """The fields of the kernel's request that are the same for all requests."""
        cluster, policy, levels = self.cluster, self.policy, len(self.cluster.levels)
        top = levels if policy.required is None else levels - 1 - cluster.level(policy.required)
        preferred = -1
        if policy.preferred is not None:
            preferred = levels - 1 - cluster.level(policy.preferred)
        most_hosts = ANY if policy.max_hosts is None else policy.max_hosts
        return (
            policy.most_difference, policy.min_hosts, most_hosts, int(policy.same_type),
            int(ties), top, preferred, cluster.n_hosts + 1,
        )  # fmt: skip


def choose(tables: TableArrays, request: Any, places: Any, masks: IntArray, *others: Any) -> int:
    """`counts.choose`; while that is not compiled its source as plain Python, if that is quick."""
    from optsched.bandwidth.search import counts as kernel

    arguments = places, masks, *others
    if is_ready(kernel.choose):
        return int(kernel.choose(tables, request, *arguments))
    by_mask = tables.host["by_mask"].tolist()
    free = [
        part.bit_count() if is_mask else part
        for part, is_mask in zip(masks.tolist(), by_mask, strict=True)
    ]
    most = int(request["leaves"][0])
    leaves = min(leaves_in_python(free, int(request["k"][0])), most)
    if leaves:
        shorter = request.copy()
        shorter["leaves"] = leaves
        found = run(kernel.choose, tables, shorter, *arguments)
        answer = others[3]
        if answer["complete"][0] == 2 or leaves == most:
            return int(found)
    return int(kernel.choose(tables, request, *arguments))


def leaves_in_python(free: Iterable[int], k: int) -> int:
    """Count vectors that plain Python evaluates in half a second; 0: leave it to the kernel."""
    some = [int(n) for n in free if n]
    if max(some, default=0) > _FEW:
        return 0
    if prod(min(n, k) + 1 for n in some) <= _FEW_VECTORS:
        return MOST_LEAVES
    return FEW_LEAVES if len(some) <= _FEW else 0


def gpus_of(state: ClusterState, parts: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Global numbers of the GPUs of hosts with their masks (or numbers).

    Of more than 16 GPUs a host any will do: whole trays come first, then lowest ids.
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
    """GPUs of a mask; bit 0 is the GPU `first`."""
    return tuple(first + i for i in range(MOST_BY_SUBSET) if mask >> i & 1)


def trays_first(free: list[int], count: int, tray: int) -> list[int]:
    """So many of a host's free local ids: whole free trays first, then the fullest broken trays."""
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


def jobs_of(state: ClusterState, demands: Sequence[int]) -> IntArray:
    """The jobs that can interfere, as the kernel reads them: demand, then GPUs by host."""
    jobs: list[int] = []
    joined = len(state.cluster.fabrics) == 1
    may = [True] * len(demands) if joined else interferes(state).tolist()
    for demand, row, able in zip(demands, state.held.tolist(), may, strict=True):
        if demand > 0 and able and len(row) - row.count(0) >= 2:
            jobs += [demand, *row]
    return np.array(jobs, np.int64)


def order_of(state: ClusterState, gpus: Iterable[int]) -> tuple[int, ...]:
    """Domains used at every level from the top down, hosts, and hosts that were whole.

    Of choices of equal bandwidth the one with the least order wins; see `rules_of` for its parts.
    """
    cluster = state.cluster
    used = np.flatnonzero(cluster.counts(gpus))
    domains = cluster.network_levels.domain[:-1][::-1]
    whole = state.room[used] == cluster.sizes[used]
    return (*(len(np.unique(of[used])) for of in domains), len(used), int(whole.sum()))


def best_of(state: ClusterState, answers: list[Answer]) -> Answer | None:
    """The answer with the highest bandwidth, of equals by `order_of`, with the bound of all."""
    if not answers:
        return None
    best = min(answers, key=lambda one: (-one.value, *order_of(state, one.gpus), *one.gpus))
    return best._replace(upper_bound=max(one.upper_bound for one in answers))


def fewest(free: IntArray, k: int) -> int:
    """Least number of hosts whose free GPUs reach k; the number of hosts + 1 if all do not."""
    return int(np.searchsorted(np.cumsum(-np.sort(-free)), k)) + 1


def rules_of(cluster: Cluster) -> tuple[str, ...]:
    """Names of the parts of `order_of`."""
    domains = (f"fewest domains of {name}" for name in cluster.levels)
    return *domains, "fewest hosts", "fewest whole hosts"


def domain_numbers(cluster: Cluster, level: int) -> IntArray:
    """Number of the domain of every host at a level."""
    if level == len(cluster.levels):
        return np.arange(cluster.n_hosts)
    row: IntArray = cluster.network_levels.domain[len(cluster.levels) - 1 - level]
    return row


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
