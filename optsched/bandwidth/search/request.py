"""A request for k GPUs of a large cluster as arrays, and the exact bandwidth of count vectors."""

# numba compiles the kernels: they are typed by signatures
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from optsched.bandwidth.models.contention import interferes, shares
from optsched.bandwidth.models.prior import host_rates
from optsched.bandwidth.models.tables import best_by_count, within_limits
from optsched.bandwidth.search.by_counts import Bools, gpus_of
from optsched.bandwidth.search.counts import line, shared
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.levels import WHOLE
from optsched.bandwidth.topology.policy import ANY
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.kernels.compile import INT, INTS, entry, helper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.models.model import CountModel
    from optsched.bandwidth.topology.policy import Bounds, Policy
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray

    Floats = npt.NDArray[np.float64]

TABLE: Final = types.Array(types.int64, 2, "C")
FLOATS: Final = types.Array(types.float64, 1, "C")


class Request(NamedTuple):
    """Hosts with free GPUs or jobs, numbered from 0, and the jobs that may interfere.

    An edge is a job that holds GPUs on such a host; `edges` lists edges by host, from `of_host` on.
    Levels are the lowest first.
    """

    k: int
    min_hosts: int
    max_hosts: int
    free: IntArray  # by host: most GPUs of a choice, and fewest
    least: IntArray
    rank: IntArray  # by host: free GPUs, and the width of `rows` more if it is whole
    kind: IntArray
    rows: IntArray  # [host, count]: best bandwidth within; -1: not possible
    domain: IntArray  # [level, host]
    joint: IntArray  # [kind, count]: bandwidth within hosts of joint allocations
    rates: Floats  # [count]: kB/s brought to the network
    factor: IntArray  # [level]
    cap: Floats  # [level]: uplinks as a rate
    demand: IntArray  # by job
    size: IntArray
    job_domain: IntArray  # [level, job]; -1: several domains
    edge_job: IntArray  # by edge, sorted by job
    edge_host: IntArray
    held: IntArray
    of_job: IntArray
    of_host: IntArray
    edges: IntArray


REQUEST: Final[Any] = types.NamedTuple(
    [
        INT, INT, INT, INTS, INTS, INTS, INTS, TABLE, TABLE, TABLE, FLOATS, INTS, FLOATS,
        INTS, INTS, TABLE, INTS, INTS, INTS, INTS, INTS, INTS,
    ], Request,
)  # fmt: skip


class HostTables:
    """Bandwidths within hosts, and network rates."""

    def __init__(self, model: CountModel) -> None:
        self.model, self.kinds = model, np.array(model.cluster.type_of)
        rates = model.line_rates()
        self.is_line_rate = rates is not None
        self.rates = host_rates(model.cluster) if rates is None else rates
        self.joint = np.full((len(model.cluster.types), len(self.rates)), -1)
        self.by_mask: dict[int, IntArray] = {}  # of more than 16 GPUs: by count
        self.best: dict[int, IntArray] = {}
        self.known: dict[tuple[int, int, int, int], int] = {}
        for t in np.unique(self.kinds).tolist():
            n = model.cluster.types[t].gpus
            masks, width = n <= MOST_BY_SUBSET, len(self.rates)
            values, _ = within_limits(n, model.intra_of(t), masks)
            first = (1 << np.arange(n + 1)) - 1 if masks else np.arange(n + 1)
            self.joint[t, : n + 1] = values[first]
            best = best_by_count(values, n, masks).reshape(-1, n + 1)
            self.by_mask[t] = values
            self.best[t] = np.pad(best, ((0, 0), (0, width - n - 1)), constant_values=-1)

    def rows(self, state: ClusterState, hosts: IntArray) -> IntArray:
        """Best bandwidth within hosts by number of free GPUs taken; -1: not possible."""
        rows = np.empty((len(hosts), len(self.rates)), np.int64)
        for kind in np.unique(self.kinds[hosts]):
            at = self.kinds[hosts] == kind
            rows[at] = self.best[kind][state.masks[hosts[at]]]
        return rows

    def lowest(self, kind: int, free: int, count: int, value: int) -> int:
        """Mask of the lowest ids among free GPUs of a type that have a bandwidth."""
        key = kind, free, count, value
        if key not in self.known:
            bits = [1 << i for i in range(free.bit_length()) if free >> i & 1]
            masks = map(sum, combinations(bits, count))
            self.known[key] = next(mask for mask in masks if self.by_mask[kind][mask] >= value)
        return self.known[key]


class Judge(NamedTuple):
    """Bandwidths of count vectors: by the kernel at line rate, else by the model in batches."""

    tables: HostTables
    state: ClusterState
    demands: Sequence[int]
    hosts: IntArray  # of the cluster, by host of the request
    q: Request

    def values(self, rows: IntArray) -> IntArray:
        """Bandwidth next to the jobs, and alone, shape (n, 2); -1: not possible, or unmeasured."""
        found = np.empty((len(rows), 2), np.int64)
        if self.tables.is_line_rate:
            judged(self.q, np.ascontiguousarray(rows), found)
            return found
        found[:] = -1
        number = np.arange(len(self.hosts))
        some = np.flatnonzero((self.q.rows[number, rows] >= 0).all(axis=1))
        selection = np.zeros((len(some), self.state.cluster.n_gpus), np.bool_)
        for h, of in zip(number, rows[some].T, strict=True):
            for count in np.unique(of[of > 0]).tolist():
                gpus = self.gpus(h, count, int(self.q.rows[h, count]))
                selection[np.ix_(of == count, gpus)] = True
        got = shares(self.tables.model, self.state, selection, self.demands)
        found[some] = np.column_stack([got.value, got.standalone])
        return found

    def gpus(self, h: int | np.integer[Any], count: int, value: int) -> list[int]:
        """Lowest ids of so many free GPUs of a host that have a bandwidth; of 17 or more: any."""
        host, state = int(self.hosts[h]), self.state
        if state.cluster.sizes[host] > MOST_BY_SUBSET:
            return [*gpus_of(state, [(host, count)])]
        mask = self.tables.lowest(int(self.q.kind[h]), int(state.masks[host]), count, value)
        return [*gpus_of(state, [(host, mask)])]


def request_of(
    tables: HostTables, state: ClusterState, k: int, demands: Sequence[int], policy: Policy,
    bounds: Bounds, whole: Bools | None = None,
) -> Judge:  # fmt: skip
    """The request as arrays, and what judges its count vectors."""
    levels, width = state.cluster.network_levels, len(tables.rates)
    demand, number = np.array(demands, np.int64), np.arange(width)
    jobs = np.flatnonzero(interferes(state) & (demand > 0))
    held = state.held[jobs]
    hosts = np.flatnonzero((state.room > 0) | held.any(axis=0))
    rows = tables.rows(state, hosts)
    rows[number > np.minimum(bounds.most[hosts], k)[:, None]] = -1
    joint = tables.joint.copy()
    joint[:, :2] = NO_LIMIT
    job, host = map(np.ascontiguousarray, np.nonzero(held[:, hosts]))
    edges, domain = np.argsort(host, kind="stable"), levels.domain[:, hosts]
    low = high = domain[:, :0]
    if len(jobs):
        begin = np.searchsorted(job, np.arange(len(jobs)))
        low = np.minimum.reduceat(domain[:, host], begin, axis=1)
        high = np.maximum.reduceat(domain[:, host], begin, axis=1)
    free = state.room[hosts]
    full = (state.room == state.cluster.sizes if whole is None else whole)[hosts]
    return Judge(tables, state, demands, hosts, Request(
        k, policy.min_hosts, min(k, policy.max_hosts or ANY),
        np.where(rows >= 0, number, 0).max(axis=1, initial=0), bounds.least[hosts],
        free + width * full, tables.kinds[hosts], rows,
        np.ascontiguousarray(domain), joint, tables.rates, levels.factor.copy(),
        levels.uplink.astype(np.float64), demand[jobs], held.sum(axis=1),
        np.where(low == high, low, -1), job, host, held[job, hosts[host]],
        np.searchsorted(job, np.arange(len(jobs) + 1)),
        np.searchsorted(host[edges], np.arange(len(hosts) + 1)), edges,
    ))  # fmt: skip


@helper()
def worth(q, counts):  # type: ignore[no-untyped-def]
    """Bandwidth of counts next to the jobs, and alone; -1: not possible."""
    width, levels = len(q.rates), len(q.factor)
    used = np.zeros(len(q.joint) * width, np.int64)  # hosts of S by kind and count
    met = np.zeros(len(q.demand), np.bool_)
    hosts, first, level, rate, within = 0, 0, 0, np.inf, NO_LIMIT
    for h in np.flatnonzero(counts):
        c = counts[h]
        first = first if hosts else h
        hosts, within, rate = hosts + 1, min(within, q.rows[h, c]), min(rate, q.rates[c])
        used[q.kind[h] * width + c] += 1
        while level < levels and q.domain[level, h] != q.domain[level, first]:
            level += 1
        for i in range(q.of_host[h], q.of_host[h + 1]):
            met[q.edge_job[q.edges[i]]] = True
    if within < 0 or level == levels or hosts == 0:
        return -1, -1
    if hosts < 2:
        alone = within if q.k > 1 else 0
        return alone, alone
    alone = min(within, line(min(rate, q.cap[level]), q.k, hosts)) * q.factor[level] // WHOLE
    capacity, total = NO_LIMIT, alone
    for j in np.flatnonzero(met):
        m, rate, within, up = hosts, np.inf, NO_LIMIT, level
        total += q.demand[j]
        while q.job_domain[up, j] != q.domain[up, first]:
            up += 1
        for e in range(q.of_job[j], q.of_job[j + 1]):
            h = q.edge_host[e]
            c, both = counts[h], counts[h] + q.held[e]
            rate, within = min(rate, q.rates[both]), min(within, q.joint[q.kind[h], both])
            m += c == 0
            used[q.kind[h] * width + c] -= c > 0
        for x in np.flatnonzero(used):  # hosts of S alone
            rate, within = (
                min(rate, q.rates[x % width]),
                min(within, q.joint[x // width, x % width]),
            )
        for e in range(q.of_job[j], q.of_job[j + 1]):
            c = counts[q.edge_host[e]]
            used[q.kind[q.edge_host[e]] * width + c] += c > 0
        limit = min(within, line(min(rate, q.cap[up]), q.k + q.size[j], m))
        capacity = min(capacity, limit * q.factor[up] // WHOLE)
    return shared(alone, capacity, total), alone


@entry(INT, REQUEST, TABLE, TABLE)
def judged(q, rows, found):  # type: ignore[no-untyped-def]
    """Fill in for count vectors the bandwidth next to the jobs, and alone; -1: not possible."""
    for i in range(len(rows)):
        found[i, 0], found[i, 1] = worth(q, rows[i])
    return len(rows)
