"""Lower bounds of pipelines from the order of rows on one machine: overtaking is never free.

Rows (micro-batches, jobs) visit the same machines in the same order (`common_routes`). In what
follows row k has operations k(0), k(1), ..., d is a duration, l(v) the lag from position v to the
next, p <= q are two positions on one machine. *Ahead at v* means earlier in the order of the
machine of position v.

**Heads that grow with the rows ahead.** Let a <= p and let A be the rows ahead of k at p. Then

    start k(p) >= min head(a) + sum over a <= v < p of (d_k(v) + l_k(v) - loss_k(v)) + sum_A w_j

for every w_j <= min(d_j(a), u_j(a), ..., u_j(p - 1)), where u(v) is d(v) for all rows or d(v + 1)
for all rows. *Proof.* A row j of A is ahead of k at a already, or passes k at a cut v: behind k at
v, ahead at v + 1. Those of the first sort run one after another before k(a). Those that pass at v
start at v after the end of k(v), run there one after another, and the last of them then needs at
least c = min over j /= k of (l_j(v) + d_j(v + 1)) until it ends at v + 1, which is before k(v + 1)
starts. So the gap between k(v) and k(v + 1) is at least c + sum d_j(v), and at least l_k(v): with
loss_k(v) = max(0, l_k(v) - c), at least l_k(v) - loss_k(v) + sum d_j(v), with an empty sum too.
Counting d_j(v + 1) instead is the same with c = min (d_j(v) + l_j(v)), as all of them run at v + 1
inside the gap and the first cannot start there sooner. The gaps of k are disjoint, and every row
of A falls into one of the sums. In a proportionate flow shop this is the theorem that no order
beats (sum of all times) + (stages - 1) x (longest); see Pinedo, Scheduling, 6.1. Tails are the
same thing backwards in time, with the rows behind.

**One machine with such heads and tails.** Bounds on the start of k(p) and k(q) and on the time
behind them, each with the sum over the rows ahead or behind, make a one-machine problem; dropping
all else is a relaxation. Among identical rows only numbers count, so dynamic programming over
multisets solves it exactly for a given deadline (earliest end per state; an earlier end is never
worse). A deadline that no order meets proves deadline + 1.

*Pairs*: states count how many copies of a kind have passed with k(p) and with k(q). The bytes
held from p to q are known in every state, so a memory cap is checked too.

*Single*: rows in the order at q only. Let j come before i, or j = i. From the start of j(p) to the
end of i(q) the machine runs all q-operations of rows j..i. A row l before j, or in (j, i], has its
p-operation ahead of j(p), where it counts w_l in the head, or else inside that time, where it
counts d_l(p). So with w_l <= d_l(p)

    end i(q) >= base_j + sum_{l before j} w_l + d_j(p) + d_j(q) + sum_{l in (j, i]} (w_l + d_l(q)),

the recursion that adds to the end so far w_l + d_l(q), or begins anew at a head. Every family in
[j, i) is left and every one in (j, i] entered at least once: the least setups count where every row
is a family of its own. A head of i(q) that grows with the rows ahead at q, d_i(q) and a tail of
i(q) must fit below the deadline too; nothing may be added behind such a head. A fixed head of j(p)
has w = 0, so it begins nothing. Backwards in time the same holds with rows in the order at p.

Setups, memory, deadlines, further operations and arcs only restrict the schedules; where they are
not mentioned above they are left out, which keeps a lower bound a lower bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched_solvers.shop.proof.common_routes import Routes, common_routes, held_bytes
from optsched_solvers.shop.proof.order_states import BETWEEN, BYTES, COLUMNS, FIRST, LAST, OUT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.model.schedule import IntArray, Schedule

SINGLE_STATES: Final = 1 << 21
PAIR_STATES: Final = 1 << 22
"""States of one relaxation; above, kinds are merged."""
FAMILIES: Final = 12
"""Heads (or tails) of one operation that are kept, the strongest."""


class Family(NamedTuple):
    """Bounds ``base[k] + sum of weight over the rows ahead`` (or behind); shapes (rows,)."""

    base: IntArray
    weight: IntArray


class Relaxation(NamedTuple):
    """One machine, rows by kind, heads and tails that grow; see the text above."""

    name: str
    machine: int
    pairs: bool
    merged: bool
    """Whether kinds had to be merged."""
    copies: IntArray
    """Rows of each kind."""
    table: IntArray
    """Shape (kinds, COLUMNS), see `order_states`."""
    groups: tuple[tuple[Family, ...], ...]
    """Heads and tails of the first operation, heads and tails of the last."""
    capacity: int

    @property
    def states(self) -> int:
        """Number of states."""
        return number_of_states(self.copies.tolist(), self.pairs)


def relaxations(
    graph: Schedule,
    single_states: int = SINGLE_STATES,
    pair_states: int = PAIR_STATES,
) -> Iterator[Relaxation]:
    """All relaxations of a one-shot graph, from cheap to expensive, busy machines first.

    None without a common route. The limits are most states of either sort; pairs that would need
    kinds merged come last.
    """
    routes = common_routes(graph)
    if routes is None:
        return
    backwards = routes.reversed()
    heads, tails = growing(routes), growing(backwards)
    last = len(routes.machine) - 1
    chosen = _places(routes)
    for p, q in chosen:
        forth = (routes, heads[p], tails[last - q], heads[q])
        back = (backwards, tails[last - q], heads[p], tails[last - p])
        yield from _singles(*forth, (p, q), single_states, "")
        yield from _singles(*back, (last - q, last - p), single_states, " backwards")
    for p, q in chosen:
        if p < q and pair_states:
            groups = (heads[p], tails[last - p], heads[q], tails[last - q])
            yield _pairs(graph, routes, (p, q), groups, pair_states)


# relaxations of one machine


def _places(routes: Routes) -> list[tuple[int, int]]:
    """First and last position on every machine, the busiest first."""
    found = []
    for r in np.unique(routes.machine).tolist():
        on = np.flatnonzero(routes.machine == r)
        p, q = int(on[0]), int(on[-1])
        load = int(routes.duration[:, p].sum()) + (int(routes.duration[:, q].sum()) if q > p else 0)
        least = int(routes.head[:, p].min() + routes.after[:, q].min())
        found.append((-load - least, p, q))
    return [(p, q) for _, p, q in sorted(found)]


def _singles(
    routes: Routes,
    heads: list[Family],
    tails: list[Family],
    round_trip: list[Family],
    place: tuple[int, int],
    most: int,
    suffix: str,
) -> Iterator[Relaxation]:
    """Rows in the order at q: with full blocks, and with one more head but shorter blocks."""
    p, q = place
    first, last = routes.duration[:, p], routes.duration[:, q]
    capped = [Family(f.base, np.minimum(f.weight, first)) for f in heads]
    whole = [f for f in capped if (f.weight == first).all()]
    variants = [("whole", whole, np.zeros_like(first))]
    short = next((f for f in capped if f.weight.any() and (f.weight < first).any()), None)
    if short is not None:  # a new beginning may only be followed by blocks that count its weights
        variants.append(("short", [*whole, short], first - short.weight))
    for name, chosen, missing in variants:
        table = np.zeros((len(first), COLUMNS), np.int64)
        table[:, FIRST], table[:, LAST] = first + (last if q > p else 0), last
        table[:, BETWEEN] = np.minimum(routes.setup_in[:, p], routes.setup_in[:, q]) - missing
        table[:, OUT] = np.minimum(routes.setup_out[:, p], routes.setup_out[:, q])
        groups = (chosen, tails, round_trip, tails)
        r = int(routes.machine[p])
        yield _by_kind(f"{name} machine {r}{suffix}", r, False, table, groups, 0, most)


def _pairs(
    graph: Schedule,
    routes: Routes,
    place: tuple[int, int],
    groups: tuple[list[Family], ...],
    most: int,
) -> Relaxation:
    """Both orders, at p and at q, with memory."""
    p, q = place
    table = np.zeros((len(routes.operation), COLUMNS), np.int64)
    table[:, FIRST], table[:, LAST] = routes.duration[:, p], routes.duration[:, q]
    table[:, BYTES] = held_bytes(graph, routes, p, q)
    r = int(routes.machine[p])
    return _by_kind(f"pairs machine {r}", r, True, table, groups, int(graph.memory[r]), most)


def growing(routes: Routes) -> list[list[Family]]:
    """Heads of every position that grow with the rows ahead, and the fixed one.

    One family per position at which it begins, carried from cut to cut, without dominated families.
    Of reversed routes these are the tails, counted from the end of the operation.
    """
    duration, lag = routes.duration, routes.lag
    begun: list[Family] = []
    found = []
    for p in range(len(routes.machine)):
        if p:
            v = p - 1
            lost_by_first = _loss(lag[:, v], lag[:, v] + duration[:, p])
            lost_by_second = _loss(lag[:, v], lag[:, v] + duration[:, v])
            step = duration[:, v] + lag[:, v]
            for a, (base, weight) in enumerate(begun):
                by_first = np.minimum(weight, duration[:, v])
                by_second = np.minimum(weight, duration[:, p])
                if by_first.sum() - lost_by_first.mean() >= by_second.sum() - lost_by_second.mean():
                    begun[a] = Family(base + step - lost_by_first, by_first)
                else:
                    begun[a] = Family(base + step - lost_by_second, by_second)
        begun.append(Family(np.full(len(duration), routes.head[:, p].min()), duration[:, p]))
        fixed = Family(routes.head[:, p], np.zeros_like(routes.head[:, p]))
        found.append(_strongest([fixed, *begun]))
    return found


def _loss(lag: IntArray, passing: IntArray) -> IntArray:
    """How far each lag exceeds the least that any *other* row needs for passing."""
    least, second = np.sort(passing)[:2]
    other = np.full(len(lag), least)
    other[np.argmin(passing)] = second
    lost: IntArray = np.maximum(0, lag - other)
    return lost


def _strongest(families: list[Family]) -> list[Family]:
    """Without those that another is nowhere below; at most FAMILIES."""
    kept: list[Family] = []
    ranked = sorted(families, key=lambda f: -int((f.base + f.weight.sum() // 2).sum()))
    for f in ranked:
        if not any((g.base >= f.base).all() and (g.weight >= f.weight).all() for g in kept):
            kept.append(f)
    return kept[:FAMILIES]


# rows by kind


def _by_kind(
    name: str,
    machine: int,
    pairs: bool,
    table: IntArray,
    groups: tuple[list[Family], ...],
    capacity: int,
    most: int,
) -> Relaxation:
    """Equal rows become one kind; kinds are merged, by their least values, if there are too many.

    Every value is monotone: a smaller one never makes a deadline harder to meet.
    """
    columns = [table, *(np.stack([f.base, f.weight], 1) for group in groups for f in group)]
    values = np.concatenate(columns, axis=1)
    all_kinds, all_copies = np.unique(values, axis=0, return_counts=True)
    kinds, copies = _merged(all_kinds, all_copies, pairs, most)
    column = iter(range(COLUMNS, kinds.shape[1], 2))
    made = tuple(
        tuple(Family(kinds[:, c], kinds[:, c + 1]) for _, c in zip(group, column, strict=False))
        for group in groups
    )
    merged = len(kinds) < len(all_kinds)
    return Relaxation(name, machine, pairs, merged, copies, kinds[:, :COLUMNS], made, capacity)


def _merged(kinds: IntArray, copies: IntArray, pairs: bool, most: int) -> tuple[IntArray, IntArray]:
    """Merge neighbours in the order of block times until the states are few enough."""
    order = np.lexsort((kinds[:, FIRST], kinds[:, FIRST] + kinds[:, LAST]))
    rows, sizes = list(kinds[order]), copies[order].tolist()
    while len(rows) > 1 and number_of_states(sizes, pairs) > most:
        loss = [
            _time(rows[i + 1]) * sizes[i + 1] + _time(rows[i]) * sizes[i]
            - _time(np.minimum(rows[i], rows[i + 1])) * (sizes[i] + sizes[i + 1])
            for i in range(len(rows) - 1)
        ]  # fmt: skip
        i = int(np.argmin(loss))
        rows[i : i + 2] = [np.minimum(rows[i], rows[i + 1])]
        sizes[i : i + 2] = [sizes[i] + sizes[i + 1]]
    return np.array(rows), np.array(sizes, np.int64)


def _time(row: IntArray) -> int:
    return int(row[FIRST] + row[LAST])


def number_of_states(copies: list[int], pairs: bool) -> int:
    """Number of multisets of rows; with `pairs`, of rows counted twice."""
    states = 1
    for c in copies:
        states *= (c + 1) * (c + 2) // 2 if pairs else c + 1
    return states
