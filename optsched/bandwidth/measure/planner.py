"""What to measure, and in which order, so that choices of GPUs become right soonest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.measure.value_of_information import (
    Pattern,
    Scenario,
    doubt,
    patterns_that_may_bind,
    simulated,
    values_of,
)
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
    from optsched.bandwidth.models.measurements import MeasurementTable
    from optsched.bandwidth.topology.cluster import Cluster, HostType

ROUNDS: Final = 12
"""Rounds that a budget is spent in."""

DRAWS: Final = 8
"""Tables a round, every other one drawn."""

SCENARIOS: Final = 1_000
"""Requests simulated a round, unless others are given."""

BEHIND: Final = 1e6

SUBSETS: Final = 2
"""Of every class of a host's subsets that are measured."""

Subset = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Plan:
    """Runs of a collective to make; see `script`.

    Parameters
    ----------
    cluster
        Whose hosts they use.
    subsets
        Host name and local ids: runs within hosts, first.
    rounds
        Patterns across hosts, most wanted first; a round was planned as if those before it had
        been measured and were as predicted.
    op, payload
        Collective, and bytes.
    """

    cluster: Cluster
    subsets: tuple[Subset, ...]
    rounds: tuple[tuple[Pattern, ...], ...]
    op: str = "all_reduce"
    payload: int | None = None

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """Patterns across hosts in order."""
        return tuple(pattern for part in self.rounds for pattern in part)

    def placement(self, pattern: Pattern) -> tuple[Subset, ...]:
        """Hosts and local ids on which to run a pattern.

        Larger counts come first and take the host whose best subset of that size is fastest: what
        a host holds back says nothing about the network.

        Raises
        ------
        InputError
            The cluster has no room for the pattern.
        """
        from optsched.bandwidth.measure.plan_script import placement

        return placement(self.cluster, pattern)

    def script(self, logs: str = "logs") -> str:
        """A shell script that makes the runs, one after another; see `plan_script.script`."""
        from optsched.bandwidth.measure.plan_script import script

        return script(self, logs)

    def __repr__(self) -> str:
        return f"<Plan: {len(self.subsets)} runs within hosts, {len(self.patterns)} across>"


def plan_measurements(
    cluster: Cluster,
    model: BottleneckBandwidth,
    budget: int,
    scenarios: Iterable[Scenario | tuple[ClusterState, int]] | None = None,
    seed: int = 0,
) -> Plan:
    """Plan runs without making any.

    Parameters
    ----------
    cluster
        What to measure.
    model
        What is known so far.
    budget
        Most runs across hosts; fewer where no more can make a difference. Runs within hosts come on
        top: for every type without a table two subsets of each class with the same links within.
    scenarios
        States with numbers of GPUs asked for, such as yesterday's requests; simulated by default.
    seed
        Same seed, same plan.

    Raises
    ------
    InputError
        The model is of another cluster, or the cluster has too many patterns.
    """
    integer("seed", seed, 0, 2**31 - 1)
    rounds: list[tuple[Pattern, ...]] = []

    def believe(model: BottleneckBandwidth, found: tuple[Pattern, ...]) -> BottleneckBandwidth:
        rounds.append(found)
        return model.believing(found)

    _in_rounds(cluster, model, believe, budget, scenarios, seed)
    return Plan(cluster, _subsets(cluster, seed), tuple(rounds), model.op, model.payload)


def learn(
    cluster: Cluster,
    model: BottleneckBandwidth,
    measure: Callable[[tuple[Pattern, ...]], MeasurementTable],
    budget: int,
    scenarios: Iterable[Scenario | tuple[ClusterState, int]] | None = None,
    seed: int = 0,
) -> BottleneckBandwidth:
    """Measure what is worth most, learn from it, and again: the plan with feedback.

    Parameters
    ----------
    cluster, model, scenarios, seed
        As in `plan_measurements`.
    measure
        Makes the runs and gives their measurements.
    budget
        Most patterns to measure, over all rounds.
    """
    return _in_rounds(
        cluster, model, lambda known, found: known.update(measure(found)), budget, scenarios, seed
    )


def _in_rounds(
    cluster: Cluster,
    model: BottleneckBandwidth,
    after: Callable[[BottleneckBandwidth, tuple[Pattern, ...]], BottleneckBandwidth],
    budget: int,
    scenarios: Iterable[Scenario | tuple[ClusterState, int]] | None,
    seed: int,
) -> BottleneckBandwidth:
    """Spend a budget in rounds, the next one planned with the model `after` the last one."""
    integer("budget", budget, 0, 10**6)
    _check(cluster, model)
    given = None if scenarios is None else _scenarios(scenarios)
    left = budget
    for i in range(ROUNDS):
        found = plan_next(cluster, model, -(-left // (ROUNDS - i)), given, seed * ROUNDS + i)
        if not found:
            break
        left -= len(found)
        model = after(model, found)
    return model


def plan_next(
    cluster: Cluster,
    model: BottleneckBandwidth,
    count: int,
    scenarios: Sequence[Scenario] | None = None,
    seed: int = 0,
) -> tuple[Pattern, ...]:
    """The patterns to measure next, most wanted first: one round.

    Parameters
    ----------
    cluster, model, scenarios, seed
        As in `plan_measurements`.
    count
        Most patterns.
    """
    _check(cluster, model)
    if count <= 0 or cluster.n_hosts < 2:
        return ()
    candidates = patterns_that_may_bind(model)
    if not candidates:
        return ()
    asked = simulated(cluster, SCENARIOS, seed) if scenarios is None else scenarios
    worth = values_of(model, asked, candidates, DRAWS, seed)
    if len(worth) < count:  # nothing asks for these so far, so they come after all that are asked
        spare = doubt(model, [pattern for pattern in candidates if pattern not in worth])
        worth |= {pattern: value / BEHIND for pattern, value in spare.items()}
    return tuple(sorted(worth, key=lambda pattern: (-worth[pattern], pattern))[:count])


def _subsets(cluster: Cluster, seed: int) -> tuple[Subset, ...]:
    """Some of every class of the types that have no table, on two hosts where there are two."""
    rng = np.random.default_rng((seed, 3))
    found: list[Subset] = []
    for t in sorted(set(cluster.type_of)):
        kind = cluster.types[t]
        if kind.intra is not None:
            continue
        hosts = [h for h in range(cluster.n_hosts) if cluster.type_of[h] == t]
        for alike in subset_classes(kind):
            some = sorted(rng.permutation(len(alike))[:SUBSETS].tolist())
            masks = [alike[i] for i in some]
            if len(masks) < SUBSETS and len(hosts) >= SUBSETS:
                masks *= SUBSETS  # a single member: the same on another host
            for i, mask in enumerate(masks):
                name = cluster.hosts[hosts[i % len(hosts)]].name
                found.append((name, tuple(g for g in range(kind.gpus) if mask >> g & 1)))
    return tuple(found)


def subset_classes(kind: HostType) -> tuple[tuple[int, ...], ...]:
    """Subsets of two GPUs or more, as masks, whose GPUs have the same links within the subset.

    A screen, not the truth: measured values within a class spread by one or two per cent on some
    hosts and by a third on others. Where no links are known, or a host has more than 16 GPUs, the
    lowest ids of every size stand for it. Classes by size of their subsets, then by lowest mask;
    masks ascending.
    """
    n = kind.gpus
    if kind.links is None or n > MOST_BY_SUBSET:
        return tuple(((1 << size) - 1,) for size in range(2, n + 1))
    _, colour = np.unique(kind.links, return_inverse=True)
    bits = np.arange(1 << n)[:, None] >> np.arange(n) & 1
    links = np.where(bits, bits @ (n + 1) ** colour.reshape(n, n), -1)  # by GPU, coded by number
    links.sort(axis=1)
    _, of = np.unique(links, axis=0, return_inverse=True)
    classes: dict[int, list[int]] = {}
    for mask, number in enumerate(of.reshape(-1).tolist()):
        if mask.bit_count() >= 2:
            classes.setdefault(number, []).append(mask)
    ranked = sorted(classes.values(), key=lambda alike: (alike[0].bit_count(), alike[0]))
    return tuple(map(tuple, ranked))


def _scenarios(given: Iterable[Scenario | tuple[ClusterState, int]]) -> tuple[Scenario, ...]:
    found: list[Scenario] = []
    for item in given:
        try:
            scenario = item if isinstance(item, Scenario) else Scenario(*item)
            good = isinstance(scenario.state, ClusterState) and scenario.gpus >= 1
        except TypeError:
            good = False
        if not good:
            raise InputError(
                f"scenarios[{len(found)}]: expected a state and a number of GPUs, got {item!r:.60}"
            )
        found.append(scenario)
    if not found:
        raise InputError("scenarios: expected at least one; leave them out to have some simulated")
    return tuple(found)


def _check(cluster: Cluster, model: BottleneckBandwidth) -> None:
    if not hasattr(model, "draw"):
        raise InputError(
            f"model: expected one that learns (BottleneckBandwidth), got {type(model).__name__}"
        )
    if model.cluster != cluster:
        raise InputError(f"model: is of {model.cluster!r}, not of {cluster!r}")


__all__ = ["Plan", "Scenario", "learn", "plan_measurements", "plan_next"]
