"""Which unmeasured patterns decide simulated requests: what a measurement would be worth."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from optsched.bandwidth.measure.scenarios import packed, uniform
from optsched.bandwidth.models.contention import demands, share
from optsched.bandwidth.models.model import CountModel, Which, alone
from optsched.bandwidth.models.patterns import automaton
from optsched.bandwidth.search.ask import Answer, ask
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray

Pattern = tuple[int, ...]

LEAVES: Final = 20_000
"""Count vectors that one simulated request may look at."""

SMALL: Final = 0.01
"""Weight of doubt beside loss."""


class Scenario(NamedTuple):
    """A request for `gpus` GPUs in a state; running jobs ask for all they can get, or nothing."""

    state: ClusterState
    gpus: int
    heavy: bool = True

    @property
    def traffic(self) -> Literal["heavy", "idle"]:
        """Name of the demands."""
        return "heavy" if self.heavy else "idle"


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


def values_of(
    model: BottleneckBandwidth,
    scenarios: Sequence[Scenario],
    candidates: Iterable[Pattern],
    draws: int,
    seed: int = 0,
) -> dict[Pattern, float]:
    """What simulated requests may lose because a candidate is not measured.

    Every request is answered by what is expected, as it will be, and by a table drawn from what may
    be (Thompson sampling). If that table were true, the first answer would lose something against
    the second: this share of bandwidth is what it may be worth to measure the patterns that either
    needs. Those are the pattern of the choice, of every joint allocation with a job that
    interferes, and of that job itself. Patterns that answers need without a loss count a little,
    by how much they are in doubt.
    """
    cluster = model.cluster
    rows = automaton(cluster.n_hosts, int(cluster.sizes.max())).patterns
    worth: defaultdict[Pattern, float] = defaultdict(float)
    times: Counter[Pattern] = Counter()
    among = set(candidates)
    expected = _Drawn(model, model.network(rows), rows)
    for d in range(draws):
        drawn = _Drawn(model, model.draw(rows, seed * 1_000 + d), rows)
        for scenario in scenarios[d::draws]:
            first, second = _answer(expected, scenario), _answer(drawn, scenario)
            if first is None or second is None:
                continue
            needed = among.intersection(_needed(scenario, first) | _needed(scenario, second))
            if not needed:
                continue
            times.update(needed)
            loss = _loss(drawn, scenario, first, second)
            for pattern in needed:
                worth[pattern] += loss
    doubts = doubt(model, list(times))
    return {p: worth[p] + SMALL * times[p] * doubts[p] for p in times}


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
    """All patterns across hosts for which a fabric has room, as rows.

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
    fits = np.zeros(len(rows), np.bool_)
    for hosts in map(list, cluster.fabrics):
        room = np.pad(-np.sort(-cluster.sizes[hosts]), (0, cluster.n_hosts - len(hosts)))
        fits |= (rows <= room).all(axis=1)
    return np.asarray(rows[fits])


def _answer(drawn: _Drawn, scenario: Scenario) -> Answer | None:
    """The best choice if these were the bandwidths."""
    state = scenario.state
    tables = drawn.tables()
    assert tables is not None
    return ask(tables, state, demands(drawn, state, scenario.traffic), scenario.gpus, leaves=LEAVES)


def _loss(drawn: _Drawn, scenario: Scenario, first: Answer, second: Answer) -> float:
    """Share of the second choice's bandwidth that the first has less, if these are bandwidths."""
    if first.gpus == second.gpus or not second.value:
        return 0.0
    state = scenario.state
    got = share(drawn, state, first.gpus, demands(drawn, state, scenario.traffic))
    return 1 - got.value / second.value


def _needed(scenario: Scenario, choice: Answer) -> set[Pattern]:
    """Patterns that decide what a choice gets."""
    state = scenario.state
    counts = state.cluster.counts(choice.gpus)
    found = {_pattern(counts)}
    across = (counts > 0).sum() >= 2
    for held in state.held:
        shares = bool(((held > 0) & (counts > 0)).any())
        if scenario.heavy and across and shares and (held > 0).sum() >= 2:
            found |= {_pattern(counts + held), _pattern(held)}
    return found


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
