"""Hosts among which a policy lets a choice lie, their network domains, and what counts bring."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.bandwidth.search.by_counts import fewest
from optsched.bandwidth.search.cells import CELL, Part
from optsched.bandwidth.topology.levels import WHOLE
from optsched.bandwidth.topology.policy import ANY
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from optsched.bandwidth.search.request import Request
    from optsched.bandwidth.topology.levels import Levels
    from optsched.bandwidth.topology.policy import Policy
    from optsched.model.schedule import IntArray

    Bools = npt.NDArray[np.bool_]

MOST_THRESHOLDS: Final = 24
"""On the bandwidth of S, and on that of joint allocations."""

MOST_GROUPS: Final = 64
"""Sets of domains of a preferred level up to which all are tried."""

FEW_GROUPS: Final = 16
"""Those of more sets that are tried at every level above it, the first in each of two orders."""

MOST_RANKED: Final = 2_000
"""Sets that are ordered for it."""

MOST_EVERY: Final = 2_000
"""Count vectors up to which all are listed."""


class Domain(NamedTuple):
    """Hosts in one domain of the network, or of which a policy demands it."""

    q: Request  # with the counts that the rule on balance allows
    level: int  # -1: only single hosts
    inside: Bools

    @property
    def parts(self) -> list[Domain]:
        """Domains in which the network limits less than above them, with k free GPUs or more."""
        q, level = self.q, self.level
        better = (q.factor[:-1] != q.factor[1:]) | (q.cap[:-1] != q.cap[1:])
        return [
            Domain(q, i, self.inside & (q.domain[i] == d))
            for i in ([*np.flatnonzero(better[:level]).tolist(), level] if level >= 0 else ())
            for d in np.flatnonzero(np.bincount(q.domain[i], q.free * self.inside) >= q.k).tolist()
        ]

    def part(self) -> Part:
        """What counts bring at most."""
        q, level, last = self.q, self.level, len(self.q.rates) - 1
        hosts = max(2, fewest(q.free * self.inside, q.k), q.min_hosts)
        kind, at, of = q.kind[q.edge_host], q.edge_host, q.edge_job

        def most(factor: Any, cap: Any, within: Any, rates: Any, gpus: float = 1.0) -> IntArray:
            limit = np.rint(np.minimum(rates, cap) * gpus * (hosts / (hosts - 1)))
            limit = np.minimum(np.minimum(limit, within), MOST - 1)
            return np.asarray(limit.astype(np.int64) * factor // WHOLE)

        here = q.factor[level], q.cap[level]
        good = most(*here, q.rows, q.rates, (q.k - 1) / q.k)
        good[(q.rows < 0) | ~self.inside[:, None]] = -1
        joint = (single := most(*here, q.joint, q.rates))[q.kind]
        both = np.minimum(np.arange(last + 1) + q.held[:, None], last)
        joint[at] = MOST
        np.minimum.at(joint, at, most(*here, q.joint[kind[:, None], both], q.rates[both]))
        same = q.job_domain[level:] == q.domain[level:, self.inside.argmax(), None]
        up = level + same.argmax(axis=0)  # lowest level of the joint allocations, by job
        factor, cap = q.factor[up], q.cap[up]
        thin = most(factor[of], cap[of], q.joint[kind, q.held], q.rates[q.held])
        return Part(good, joint, single, thin)

    def cells(self, part: Part, bound: int, value: int) -> npt.NDArray[np.void]:
        """Pairs of thresholds that may have more than `value`, by falling bound."""
        others = np.concatenate([part.joint[self.inside].ravel(), part.thin_at])
        xs, ys = _thresholds(part.good), _thresholds(others)
        cells = np.zeros(len(xs) * len(ys), CELL)
        cells["x"], cells["x_high"] = np.repeat(xs, len(ys), axis=0).T
        cells["y"], cells["y_high"] = np.tile(ys, (len(xs), 1)).T
        high = cells["x_high"] = np.minimum(cells["x_high"], bound)
        shared = high * (cells["y_high"] / (high + self.q.demand.min(initial=NO_LIMIT)))
        cells["bound"] = np.minimum(high, shared.astype(np.int64) + 1)
        cells = cells[cells["bound"] > value]
        return cells[np.argsort(-cells["bound"], kind="stable")]

    def every(self) -> IntArray | None:
        """All count vectors; None: too many."""
        q, free = self.q, self.q.free * self.inside
        spare, left = free - q.least, q.k - int(q.least.sum())
        able = int((spare > 0).sum())
        if comb(able, max(0, min(left, int(spare.sum()) - left, able // 2))) > MOST_EVERY:
            return None  # so many hosts may have one GPU more, or not
        behind, rows = np.append(np.cumsum(free[::-1])[::-1], 0), np.zeros((1, 0), np.int64)
        for h in range(len(free)):
            counts = np.flatnonzero(q.rows[h, : free[h] + 1] >= 0)
            counts = counts[counts >= q.least[h]]
            total = rows.sum(axis=1)[:, None] + counts
            some, count = np.nonzero((total <= q.k) & (total + behind[h + 1] >= q.k))
            if len(some) > MOST_EVERY:
                return None
            rows = np.column_stack([rows[some], counts[count]])
        return rows


def _thresholds(values: IntArray) -> IntArray:
    """Groups of near values, the highest first: lowest and highest of each, shape (n, 2)."""
    given, ratio = np.unique(values[(values > 0) & (values < MOST)]).tolist(), 1.005
    found = [[0, 0]] * (MOST_THRESHOLDS + 1)
    while len(found) > MOST_THRESHOLDS:
        found, ratio = [], ratio * ratio
        for value in given:
            if not found or value > ratio * found[-1][0]:
                found.append([value, value])
            found[-1][1] = value
    return np.array(found[::-1], np.int64).reshape(-1, 2)


def domains_of(q: Request, levels: Levels, policy: Policy) -> list[Domain]:
    """Domains to which `required`, `same_type` and `balance` of a policy limit a request."""
    numbers = {"host": -1} | {name: i for i, name in enumerate(levels.names)}
    top = numbers[policy.required or "cluster"]
    kinds = np.unique(q.kind).tolist() if policy.same_type else [-1]
    found = []
    for one in _balanced(q, policy):
        for some in [q.kind == kind if kind >= 0 else q.kind >= 0 for kind in kinds]:
            free = np.bincount(q.domain[top], one.free * some)
            for d in np.flatnonzero(free >= q.k if top >= 0 else free > 0):
                inside = some & (q.domain[top] == d)
                if not (q.least[~inside] > 0).any():
                    found.append(Domain(one, top, inside))
    return found


def preferred_domains(
    all_domains: list[Domain], levels: Levels, policy: Policy, most: int
) -> tuple[list[Domain], bool]:
    """Parts of domains with so many domains of the preferred level; whether these are all."""
    if policy.preferred is None or most == ANY:
        return all_domains, True
    if policy.preferred == "host":
        limited = [one.q._replace(max_hosts=min(most, one.q.max_hosts)) for one in all_domains]
        return [one._replace(q=q) for one, q in zip(all_domains, limited, strict=True)], True
    level = levels.names.index(policy.preferred)
    found = [_grouped(one, level, most) for one in all_domains]
    return [part for some, _ in found for part in some], all(is_all for _, is_all in found)


def _grouped(domain: Domain, level: int, n: int) -> tuple[list[Domain], bool]:
    """Parts of n domains of a level; of many those near each other with most room, or no jobs."""
    (q, top, inside), sets, is_all = domain, dict[tuple[int, ...], None](), True
    clean, least = np.diff(q.of_host) == 0, q.least > 0
    for upper in range(level + 1, top + 1):
        names = np.unique(q.domain[upper, inside])
        for d in names:
            room = q.free * (inside & (q.domain[upper] == d))
            free, good, hosts, forced = np.array(
                [np.bincount(q.domain[level], of) for of in (room, room * clean, room > 0, least)]
            )
            order = np.lexsort((-free, forced == 0))[: np.count_nonzero(free)]
            size, total = min(n, len(order)), len(order)
            is_all = comb(total, size) <= MOST_GROUPS
            while comb(total, size) > MOST_RANKED:
                total -= 1
            rows = order[np.array([*combinations(range(total), size)], np.int64)]
            enough = hosts[rows].sum(axis=1) >= q.min_hosts
            enough &= (free[rows].sum(axis=1) >= q.k) & (forced[rows].sum(axis=1) == least.sum())
            rows = np.sort(rows[enough])
            most = MOST_GROUPS if is_all else max(1, FEW_GROUPS // len(names))
            sums = free[rows].sum(axis=1), good[rows].sum(axis=1).clip(max=q.k)
            for rank in (np.lexsort((-sums[0], -sums[1])), np.argsort(-sums[0], kind="stable")):
                sets |= dict.fromkeys(map(tuple, rows[rank[:most]].tolist()))
    found = []
    for one in sets:
        some = inside & np.isin(q.domain[level], one)
        same = [len(np.unique(of[some])) == 1 for of in q.domain[: top + 1]]
        found.append(Domain(q, same.index(True), some))
    return found, is_all


def _balanced(q: Request, policy: Policy) -> Iterator[Request]:
    """The request with every set of counts that the rule on balance allows."""
    step, number = policy.most_difference, np.arange(len(q.rates))
    if step > 1:
        yield q
        return
    for c in range(1, min(q.k, len(q.rates) - 1) + 1):
        hosts = max(q.min_hosts, -(-q.k // (c + step)))
        rows = np.where((number == 0) | (number == c) | (number == c + step), q.rows, -1)
        free = np.where(rows >= 0, number, 0).max(axis=1, initial=0)
        if hosts <= min(q.max_hosts, q.k // c) and (step or q.k % c == 0) and free.sum() >= q.k:
            yield q._replace(rows=rows, free=free)
