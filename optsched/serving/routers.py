"""Routers: a width rule, a server rule and a group size, or a method of your own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from optsched.errors import InputError, OptschedError
from optsched.limits import whole_number
from optsched.problems.routing.checks import frozen, non_negative
from optsched.problems.routing.problem import POINTS
from optsched.serving import rules
from optsched.serving.rules import Compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.routing import Routing
    from optsched.problems.routing.plan import Plan
    from optsched.schedule import IntArray
    from optsched.serving.view import View


class InfeasibleRoute(OptschedError):
    """A router sent a block where it can never run; the message names the decision."""


class Decision(NamedTuple):
    """Where the head block goes, at which width, and how many requests of it at most."""

    server: int
    width: int
    group: int


@runtime_checkable
class OwnRouter(Protocol):
    """A router in Python."""

    def route(self, view: View) -> Decision:
        """Decide about the head of the router's queue."""
        ...


class CompiledRouter(Protocol):
    """A router whose rules the simulation's kernels know."""

    def compiled(self, problem: Routing, plan: Plan | None, seed: int, /) -> Compiled:
        """What they read."""
        ...


@dataclass(frozen=True)
class Random:
    """Any server."""

    code: ClassVar[int] = rules.RANDOM


@dataclass(frozen=True)
class RoundRobin:
    """One server after the other."""

    code: ClassVar[int] = rules.ROUND_ROBIN


@dataclass(frozen=True)
class JSED:
    """Join the shortest expected delay: queued work, half of what runs, the block, loads, links."""

    code: ClassVar[int] = rules.JSED


@dataclass(frozen=True)
class PowerOfTwo:
    """The shorter expected delay of two random servers (Ray Serve's rule, by time)."""

    code: ClassVar[int] = rules.POWER_OF_TWO


@dataclass(frozen=True)
class Static:
    """Always the same tuple of width indices."""

    widths: tuple[int, ...]
    code: ClassVar[int] = rules.STATIC


@dataclass(frozen=True)
class RandomWidth:
    """Any width."""

    code: ClassVar[int] = rules.RANDOM_WIDTH


@dataclass(frozen=True)
class Backlog:
    """The widest Pareto tuple with which all that waits would be worked off in time.

    In the spirit of SuperServe's SlackFit; the rule is ours.

    Parameters
    ----------
    target_ms
        Time for 1.6 times the queued work, the requests at the router and 32 more.
    """

    target_ms: float = 6.0
    code: ClassVar[int] = rules.BACKLOG

    def __post_init__(self) -> None:
        non_negative("target_ms", self.target_ms)


@dataclass(frozen=True)
class Fluid:
    """A tuple for every request at its arrival, in the shares of the plan's fluid optimum.

    Parameters
    ----------
    headroom
        Of which rate: so many times the trace's mean, as for the plan.
    """

    headroom: float = 3.0
    code: ClassVar[int] = rules.FLUID

    def __post_init__(self) -> None:
        non_negative("headroom", self.headroom)


ServerRule: TypeAlias = Random | RoundRobin | JSED | PowerOfTwo
WidthRule: TypeAlias = Static | RandomWidth | Backlog | Fluid


@dataclass(frozen=True)
class Router:
    """A router of the built-in rules.

    Parameters
    ----------
    width, server
        The rules.
    group
        Requests of a block at most; 0: random of 1, 2, 4, ... 32, as the paper's baseline.
    """

    width: WidthRule = field(default_factory=Backlog)
    server: ServerRule = field(default_factory=JSED)
    group: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.width, WidthRule):
            raise InputError(f"width: expected a width rule, got {self.width!r:.60}")
        if not isinstance(self.server, ServerRule):
            raise InputError(f"server: expected a server rule, got {self.server!r:.60}")
        whole_number("group", self.group, 0, 4096)

    def compiled(self, problem: Routing, plan: Plan | None, seed: int) -> Compiled:
        """What the simulation's kernels read."""
        if self.group > problem.max_batch:
            raise InputError(f"group: {self.group} is above max_batch, {problem.max_batch}")
        rule = np.zeros(1, rules.RULE)
        rule["server"], rule["width"], rule["group"] = self.server.code, self.width.code, self.group
        rule["random"] = rules.first_random(seed)
        rule["rate"] = sum(1 / max(one.ms_per_mmac, 1e-12) for one in problem.servers) / 1e6
        share = np.zeros((0, 2))
        if isinstance(self.width, Static):
            ladder = np.array([_tuple(problem, self.width.widths)])
        elif isinstance(self.width, Fluid):
            ladder, share = _shares(problem, plan, self.width.headroom)
        else:
            ladder = problem.tuples[pareto_tuples(problem)]
            rule["target"] = getattr(self.width, "target_ms", 0.0) * 1e6
        digits = problem.n_widths ** np.arange(problem.n_segments)[::-1]
        return Compiled(rule, frozen(ladder), frozen(problem.tuple_mmac[ladder @ digits]), share)


@dataclass(frozen=True)
class MarginalCost:
    """Width and server together: what costs all requests least, this block's and the others'.

    The rule is ours. Every server and width is judged by when the block's batch would end, with
    the instances, queues and load that are there, by the accuracy that the width loses if all
    later segments are the best, and by the block's work for every request in the system. Accuracy
    and energy count as in the objective.

    Parameters
    ----------
    price
        ns that a ns of work costs every request in the system; 0 looks at the block alone.
    group
        Requests of a block at most.
    """

    price: float = 0.04
    group: int = 10

    def __post_init__(self) -> None:
        non_negative("price", self.price)
        whole_number("group", self.group, 1, 4096)

    def compiled(self, problem: Routing, _plan: Plan | None, _seed: int) -> Compiled:
        """What the simulation's kernels read."""
        rule = np.zeros(1, rules.RULE)
        rule["server"], rule["price"] = rules.MARGINAL, self.price
        rule["group"] = min(self.group, problem.max_batch)
        rule["rate"] = problem.ms_per_joule * 1e6
        table = problem.accuracy.reshape((problem.n_widths,) * problem.n_segments)
        best = [table.ravel()]
        for _ in range(problem.n_segments):  # the best completion of every prefix
            table = table.max(axis=-1)
            best.insert(0, table.ravel())
        worth = np.concatenate(best) * (problem.ms_per_point * 1e6 / POINTS)
        return Compiled.of(rule, weights=worth)


def pareto_tuples(problem: Routing) -> IntArray:
    """Indices of the tuples that no other one beats in MACs and accuracy, narrowest first."""
    order = np.lexsort((-problem.accuracy, problem.tuple_mmac))
    best = np.maximum.accumulate(problem.accuracy[order])
    new = np.concatenate([[True], best[1:] > best[:-1]])
    found: IntArray = order[new]
    return found


def _tuple(problem: Routing, widths: Sequence[int]) -> list[int]:
    if len(widths) != problem.n_segments:
        raise InputError(f"widths: expected {problem.n_segments} indices, got {widths!r:.60}")
    return [whole_number("widths", w, 0, problem.n_widths - 1) for w in widths]


def _shares(problem: Routing, plan: Plan | None, headroom: float) -> tuple[IntArray, Any]:
    from optsched_solvers.routing_models import fluid_shares

    found = fluid_shares(problem, plan, rate=problem.rate * headroom)
    rows = np.flatnonzero(found > 1e-9)
    return problem.tuples[rows], np.stack(
        [found[rows] / found[rows].sum(), 0 * found[rows]], axis=1
    )
