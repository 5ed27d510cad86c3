"""Routers: a width rule, a server rule and a group size, or a method of your own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.serving import rules
from optsched.serving.core import EMPTY, FREE, UNIT, UNLOADING
from optsched.serving.fields import POINTS, frozen, non_negative
from optsched.serving.rules import Compiled
from optsched.serving.world import expected_delays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray
    from optsched.serving.plan import Plan
    from optsched.serving.scenario import Scenario
    from optsched.serving.world import World


class InfeasibleRoute(InputError):
    """A router sent a block where it can never run; the message names the decision."""


class Decision(NamedTuple):
    """Where the head block goes, at which width, and how many requests of it at most."""

    server: int
    width: int
    group: int


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
        integer("group", self.group, 0, 4096)

    def compiled(self, scenario: Scenario, plan: Plan | None, seed: int) -> Compiled:
        """What the simulation's kernels read."""
        if self.group > scenario.max_batch:
            raise InputError(f"group: {self.group} is above max_batch, {scenario.max_batch}")
        rule = np.zeros(1, rules.RULE)
        rule["server"], rule["width"], rule["group"] = self.server.code, self.width.code, self.group
        rule["random"] = rules.first_random(seed)
        rule["rate"] = sum(1 / max(one.ms_per_mmac, 1e-12) for one in scenario.servers) / 1e6
        share = np.zeros((0, 2))
        if isinstance(self.width, Static):
            ladder = np.array([_tuple(scenario, self.width.widths)])
        elif isinstance(self.width, Fluid):
            ladder, share = _shares(scenario, plan, self.width.headroom)
        else:
            ladder = scenario.tuples[pareto_tuples(scenario)]
            rule["target"] = getattr(self.width, "target_ms", 0.0) * 1e6
        digits = scenario.n_widths ** np.arange(scenario.n_segments)[::-1]
        return Compiled(rule, frozen(ladder), frozen(scenario.tuple_mmac[ladder @ digits]), share)


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
        integer("group", self.group, 1, 4096)

    def compiled(self, scenario: Scenario, _plan: Plan | None, _seed: int) -> Compiled:
        """What the simulation's kernels read."""
        rule = np.zeros(1, rules.RULE)
        rule["server"], rule["price"] = rules.MARGINAL, self.price
        rule["group"] = min(self.group, scenario.max_batch)
        rule["rate"] = scenario.ms_per_joule * 1e6
        table = scenario.points.reshape((scenario.n_widths,) * scenario.n_segments)
        best = [table.ravel()]
        for _ in range(scenario.n_segments):  # the best completion of every prefix
            table = table.max(axis=-1)
            best.insert(0, table.ravel())
        worth = np.concatenate(best) * (scenario.ms_per_point * 1e6 / POINTS)
        return Compiled.of(rule, weights=worth)


def pareto_tuples(scenario: Scenario) -> IntArray:
    """Indices of the tuples that no other one beats in MACs and accuracy, narrowest first."""
    order = np.lexsort((-scenario.points, scenario.tuple_mmac))
    best = np.maximum.accumulate(scenario.points[order])
    new = np.concatenate([[True], best[1:] > best[:-1]])
    found: IntArray = order[new]
    return found


def _tuple(scenario: Scenario, widths: Sequence[int]) -> list[int]:
    if len(widths) != scenario.n_segments:
        raise InputError(f"widths: expected {scenario.n_segments} indices, got {widths!r:.60}")
    return [integer("widths", w, 0, scenario.n_widths - 1) for w in widths]


def _shares(scenario: Scenario, plan: Plan | None, headroom: float) -> tuple[IntArray, Any]:
    from optsched.serving.planner import fluid_shares

    found = fluid_shares(scenario, plan, rate=scenario.rate * headroom)
    rows = np.flatnonzero(found > 1e-9)
    share = found[rows] / found[rows].sum()
    return scenario.tuples[rows], np.stack([share, 0 * share], axis=1)


def is_builtin(router: Any) -> bool:
    """Return whether the router consists of compiled rules."""
    return isinstance(router, Router | MarginalCost)


AnyRouter: TypeAlias = Any
"""`Router`, `MarginalCost`, `Policy`, or any object with ``route(view) -> Decision``."""


class View:
    """The state of servers and queues at a decision; read-only, and valid until it is made.

    Times are in ms; servers, segments and widths count from 0.
    """

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.scenario = scenario
        self._world = world
        self.feasible = world.feasible
        """Whether a server can ever run (segment, width), [server][segment][width]."""

    @property
    def now(self) -> float:
        """The time of the decision."""
        return float(self._world.trace[0]["now"]) / 1e6

    @property
    def segment(self) -> int:
        """Which segment the head block is to run."""
        return int(self._world.trace[0]["segment"])

    @property
    def head(self) -> IntArray:
        """The requests of the head's queue, oldest first, at most `max_batch`."""
        fifo = self._world.fifo[self._world.trace[0]["queue"]]
        found, r = [], int(fifo["head"])
        for _ in range(min(int(fifo["images"]), self.scenario.max_batch)):
            found.append(r)
            r = int(self._world.request[r]["next"])
        return np.array(found, np.int64)

    @property
    def input_widths(self) -> IntArray:
        """Of the requests in `head`, the width of the segment before; 0 for segment 0."""
        found: IntArray = self._world.request["width"][self.head]
        return found

    @property
    def prefix(self) -> tuple[int, ...]:
        """The widths that the head request has run so far."""
        index, n = int(self._world.request["tuple"][self.head[0]]), self.scenario.n_widths
        return tuple(index // n**j % n for j in range(self.segment - 1, -1, -1))

    @property
    def ages(self) -> Any:
        """Time since the arrival of the requests in `head`."""
        return self.now - self.scenario.arrival[self.head] / 1e6

    @property
    def waiting(self) -> IntArray:
        """Requests at the router per segment."""
        fifo = self._world.fifo["images"]
        found: IntArray = fifo.reshape(self.scenario.n_segments, -1).sum(axis=1)
        return found

    @property
    def queued(self) -> Any:
        """Work that waits, per server."""
        return self._world.core.server["queued"] / 1e6

    @property
    def running(self) -> Any:
        """Work of the batches that run, per server, from their start on."""
        return self._world.core.server["active"] / 1e6

    @property
    def free_instances(self) -> IntArray:
        """Instances that could start at once, [server][segment][width]."""
        slot = self._world.core.instance
        return self._count(slot["state"] == FREE)

    @property
    def resident_instances(self) -> IntArray:
        """Instances that are there or come, [server][segment][width]."""
        slot = self._world.core.instance
        return self._count((slot["state"] != EMPTY) & (slot["state"] != UNLOADING))

    def _count(self, wanted: Any) -> IntArray:
        found = np.zeros(self.feasible.shape, np.int64)
        s, i = np.nonzero(wanted)
        slot = self._world.core.instance[s, i]
        np.add.at(found, (s, slot["segment"], slot["width"]), 1)
        return found

    @property
    def free_vram_mb(self) -> Any:
        """MB per server."""
        server = self._world.core.server
        return (server["vram"] - server["used"]) / 1000

    @property
    def utilisation(self) -> Any:
        """U per server."""
        server = self._world.core.server
        shared = (server["saturation"] <= 0) & (server["running"] > 0)
        return np.where(shared, 1.0, server["load"] / UNIT)

    @property
    def watts(self) -> Any:
        """Power per server."""
        return self._world.core.server["watts"].copy()

    def expected_delay(self, width: int, group: int) -> Any:
        """When each server would be done with so many of the head, in ms; inf: never."""
        integer("width", width, 0, self.scenario.n_widths - 1)
        integer("group", group, 1, self.scenario.max_batch)
        found = np.zeros(len(self.scenario.servers))
        expected_delays(self._world, width, group, found)
        return found / 1e6


# routers by name

GROUP: Final = "optsched.routers"
"""Entry points of this group are routers of other packages: name -> class."""

FORMS: Final = (
    "marginal, policy:FILE.npz, WIDTH/SERVER/GROUP such as backlog:6ms/jsed/8, static:0,2,3,3/"
    "jsed/8, fluid/jsed/8 or random/random/0, module:Class, or the name of an installed router"
)
_SERVERS: Final = {
    "random": Random, "round_robin": RoundRobin, "jsed": JSED, "power_of_two": PowerOfTwo
}  # fmt: skip


def router_of(spec: str) -> Any:
    """Return the router of a text, one of `FORMS`.

    Raises
    ------
    InputError
        There is no such router, or it cannot be made.
    """
    if spec == "marginal":
        return MarginalCost()
    if spec.startswith("policy:"):
        from optsched.serving.policy import Policy

        return Policy.load(spec.removeprefix("policy:"))
    if "/" in spec:
        return _rules(spec)
    made = _loaded(spec)
    if not hasattr(made, "route") and not hasattr(made, "compiled"):
        raise InputError(f"router: {spec!r:.60} has no method route(view)")
    return made


def _rules(spec: str) -> Router:
    """A router of ``WIDTH/SERVER/GROUP``."""
    width, _, tail = spec.partition("/")
    server, _, group = tail.partition("/")
    width, _, value = width.partition(":")
    rule: WidthRule
    try:
        if width == "static":
            rule = Static(tuple(int(w) for w in value.split(",")))
        elif width == "backlog":
            rule = Backlog(float(value.removesuffix("ms") or 6))
        else:
            rule = {"random:": RandomWidth, "fluid:": Fluid}[f"{width}:{value}"]()
        return Router(rule, _SERVERS[server](), int(group or 8))
    except InputError:
        raise
    except (KeyError, ValueError):
        raise InputError(f"router: expected {FORMS}, got {spec!r:.60}") from None


def _loaded(spec: str) -> Any:
    """An instance of ``module:Class``, or of the class of an entry point."""
    from importlib.metadata import EntryPoint, entry_points

    point = EntryPoint("router", spec, GROUP) if ":" in spec else None
    for one in () if point else entry_points(group=GROUP):
        point = one if one.name == spec else point
    if point is None:
        raise InputError(f"router: expected {FORMS}, got {spec!r:.60}")
    try:
        return point.load()()
    except Exception as error:  # code of the user
        raise InputError(f"router: {spec!r:.60} cannot be loaded: {error}") from error
