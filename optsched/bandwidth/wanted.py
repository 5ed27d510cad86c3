"""Which unmeasured patterns decide simulated requests: what a measurement would be worth."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.bandwidth.ask import ask
from optsched.bandwidth.contention import demands
from optsched.bandwidth.intra import MOST_BY_SUBSET
from optsched.bandwidth.model import CountModel, Which, alone
from optsched.bandwidth.patterns import automaton
from optsched.bandwidth.scenarios import packed, uniform
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.bottleneck import BottleneckBandwidth
    from optsched.bandwidth.cluster import Cluster
    from optsched.bandwidth.state import ClusterState
    from optsched.schedule import IntArray

Pattern = tuple[int, ...]

LEAVES: Final = 20_000
"""Count vectors that one simulated request may look at."""


class Scenario(NamedTuple):
    """A request for `gpus` GPUs in a state; running jobs ask for all they can get, or nothing."""

    state: ClusterState
    gpus: int
    heavy: bool = True


def simulated(cluster: Cluster, n: int, seed: int = 0) -> tuple[Scenario, ...]:
    """Requests as a dispatcher may see them, about n, for all numbers of GPUs.

    A third each of `scenarios.uniform` with one job and with tenants, and of `scenarios.packed`;
    half of them come while the jobs are idle.
    """
    rng = np.random.default_rng((seed, 7))
    total = cluster.n_gpus
    if total < 2:
        return ()
    gpus = rng.integers(2, max(3, total), -(-n // 3)).tolist()
    seeds = rng.integers(2**31, size=3).tolist()
    asked = [
        uniform(cluster, busy="pooled", repeats=1, seed=seeds[0], wanted=gpus),
        uniform(cluster, busy="tenants", repeats=1, seed=seeds[1], wanted=gpus),
        packed(cluster, repeats=1, seed=seeds[2], wanted=gpus),
    ]
    found = []
    for i, states in enumerate(zip(*asked, strict=True)):
        found += [Scenario(state, k, heavy=i % 2 == 0) for state, k in states]
    return tuple(found)


def patterns_that_may_bind(model: BottleneckBandwidth) -> list[Pattern]:
    """Unmeasured patterns across hosts whose limit can be below what the hosts allow.

    Raises
    ------
    InputError
        The cluster has too many patterns for a table.
    """
    rows = every_pattern(model.cluster)
    low = model.network(rows, "low")
    open_ones = ~model.is_measured(rows) & (low <= model.ceiling(rows))
    return [tuple(c for c in row if c) for row in rows[open_ones].tolist()]


def wanted(
    model: BottleneckBandwidth,
    scenarios: Sequence[Scenario],
    candidates: Iterable[Pattern],
    draws: int,
    seed: int = 0,
) -> dict[Pattern, float]:
    """How often the best choices need a candidate, times how much it is in doubt.

    Needed are the patterns of the choice, of every joint allocation with a job that interferes,
    and of that job itself. Half of the requests are solved by what is expected, since those
    answers will be given; half by tables drawn from what may be (Thompson sampling), so that
    patterns that are underrated come up too.
    """
    cluster = model.cluster
    rows = automaton(cluster.n_hosts, int(cluster.sizes.max())).patterns
    times: Counter[Pattern] = Counter()
    among = set(candidates)
    for d in range(draws):
        limits = model.draw(rows, seed * 1_000 + d) if d % 2 else model.network(rows)
        drawn = _Drawn(model, limits, rows)
        for scenario in scenarios[d::draws]:
            times.update(among.intersection(_needed(drawn, scenario)))
    doubts = doubt(model, list(times))
    return {pattern: times[pattern] * doubts[pattern] for pattern in times}


def doubt(model: BottleneckBandwidth, patterns: Sequence[Pattern]) -> dict[Pattern, float]:
    """Log of the ratio of the ends of what B may be, up to what hosts allow; at least 0.01."""
    if not patterns:
        return {}
    width = max(map(len, patterns))
    rows = np.array([[*pattern, *[0] * (width - len(pattern))] for pattern in patterns])
    high = np.minimum(model.network(rows, "high"), model.ceiling(rows))
    ratio = np.log(np.maximum(high, 1.0) / np.maximum(model.network(rows, "low"), 1))
    return dict(zip(patterns, np.maximum(ratio, 0.01).tolist(), strict=True))


def every_pattern(cluster: Cluster) -> IntArray:
    """All patterns across hosts that the cluster has room for, as rows.

    Raises
    ------
    InputError
        There are too many for a table.
    """
    try:
        rows = automaton(cluster.n_hosts, int(cluster.sizes.max())).patterns
    except InputError as error:
        raise InputError(
            f"plan: {error.args[0]}: plan for a part of the cluster, such as one pod"
        ) from None
    rows = rows[~alone(rows)]
    room = -np.sort(-cluster.sizes)
    return np.asarray(rows[(rows <= room).all(axis=1)])


def _needed(drawn: _Drawn, scenario: Scenario) -> set[Pattern]:
    state = scenario.state
    wants = demands(drawn, state, "heavy" if scenario.heavy else "idle")
    tables = drawn.tables()
    assert tables is not None
    choice = ask(tables, state.masks, state.held, wants, scenario.gpus, leaves=LEAVES)
    if choice is None:
        return set()
    counts = np.zeros(state.cluster.n_hosts, np.int64)
    for host, part in choice.parts:
        counts[host] = part.bit_count() if _by_mask(state, host) else part
    found = {_pattern(counts)}
    across = (counts > 0).sum() >= 2
    for j, held in enumerate(state.held):
        shares = bool(((held > 0) & (counts > 0)).any())
        if across and shares and (held > 0).sum() >= 2 and wants[j] > 0:
            found |= {_pattern(counts + held), _pattern(held)}
    return found


def _by_mask(state: ClusterState, host: int) -> bool:
    return int(state.cluster.sizes[host]) <= MOST_BY_SUBSET


def _pattern(counts: IntArray) -> Pattern:
    return tuple(sorted((c for c in counts.tolist() if c), reverse=True))


class _Drawn(CountModel):
    """A model with another table of the network."""

    def __init__(self, model: BottleneckBandwidth, network: IntArray, rows: IntArray) -> None:
        self.cluster, self.model, self.drawn, self.rows = model.cluster, model, network, rows

    def network(self, patterns: IntArray, which: Which = "value") -> IntArray:
        if patterns is self.rows:
            return self.drawn
        step = automaton(self.cluster.n_hosts, int(self.cluster.sizes.max())).step
        state = np.zeros(len(patterns), np.int64)
        for column in patterns.T:
            state = step[state, column]
        return self.drawn[state]

    def intra_of(self, kind: int, which: Which = "value") -> IntArray | None:
        return self.model.intra_of(kind, which)


__all__ = [
    "Scenario", "doubt", "every_pattern", "patterns_that_may_bind",
    "simulated",
    "wanted",
]  # fmt: skip
