"""Routers: a width rule, a server rule and a group size, or a class in Python."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.errors import InputError
from optsched.io.files import read_bytes, unpack_arrays, write_atomic
from optsched.io.strict_json import placed
from optsched.io.values import boolean, frozen, integer, number, one_of
from optsched.serving import rules
from optsched.serving.core import EMPTY, FREE, UNLOADING
from optsched.serving.rules import Compiled
from optsched.serving.tables import NEVER, NS_PER_MS, POINTS, non_negative
from optsched.serving.world import expected_delays

if TYPE_CHECKING:
    import os

    from optsched.model.schedule import IntArray
    from optsched.serving.scenario import Scenario
    from optsched.serving.world import World

POLICY_FORMAT: Final = "optsched.policy/1"
_SIZES: Final = ("servers", "segments", "widths")
_MAX_BYTES: Final = 2**26


class InfeasibleRoute(InputError):
    """A router sent a block where it can never run; the message names the decision.

    Examples
    --------
    >>> from optsched import serving
    >>> class Wrong:
    ...     def route(self, view):
    ...         return serving.Decision(server=9, width=0, group=1)
    >>> try:
    ...     serving.simulate(serving.reference(rate=50, seconds=0.1), Wrong())
    ... except serving.InfeasibleRoute as error:
    ...     print(error)
    decision 0 of Wrong.route: server: expected an integer in 0..2, got 9
    """


class Decision(NamedTuple):
    """Server, width and maximum number of requests of the next block.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.Decision(server=0, width=3, group=8)
    Decision(server=0, width=3, group=8)
    """

    server: int
    width: int
    group: int


AnyRouter: TypeAlias = Any
"""`Router`, `MarginalCost`, `Policy`, or any object with ``route(view) -> Decision``."""


@dataclass(frozen=True)
class Random:
    """A random server.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.Router(serving.RandomWidth(), serving.Random(), group=0)  # the paper's baseline
    Router(width=RandomWidth(), server=Random(), group=0)
    """

    code: ClassVar[int] = rules.RANDOM


@dataclass(frozen=True)
class RoundRobin:
    """One server after the other.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.Router(server=serving.RoundRobin()).server
    RoundRobin()
    """

    code: ClassVar[int] = rules.ROUND_ROBIN


@dataclass(frozen=True)
class JSED:
    """Shortest expected delay: queued work, half of the running work, the block, loads, links.

    Examples
    --------
    >>> from optsched import serving
    >>> serving.Router(server=serving.JSED()) == serving.Router()  # the default
    True
    """

    code: ClassVar[int] = rules.JSED


@dataclass(frozen=True)
class PowerOfTwo:
    """The shorter expected delay of two random servers (Ray Serve's rule, by time).

    Examples
    --------
    >>> from optsched import serving
    >>> serving.Router(server=serving.PowerOfTwo()).server
    PowerOfTwo()
    """

    code: ClassVar[int] = rules.POWER_OF_TWO


@dataclass(frozen=True)
class Static:
    """Always the same tuple of width indices.

    Examples
    --------
    >>> from optsched import serving
    >>> narrow = serving.Router(serving.Static((0, 0, 0, 0)))
    >>> serving.simulate(serving.reference(rate=500, seconds=0.1), narrow).summary.accuracy
    70.3
    """

    widths: tuple[int, ...]
    code: ClassVar[int] = rules.STATIC


@dataclass(frozen=True)
class RandomWidth:
    """A random width.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> 70 < serving.simulate(scenario, serving.Router(serving.RandomWidth())).summary.accuracy < 76
    True
    """

    code: ClassVar[int] = rules.RANDOM_WIDTH


@dataclass(frozen=True)
class Backlog:
    """The widest Pareto tuple with which all waiting work would be completed in `target_ms`.

    In the spirit of SuperServe's SlackFit. Waiting work is 1.6 times the queued work, plus the
    requests at the router and 32 more.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> slow, fast = (serving.Router(serving.Backlog(ms)) for ms in (20, 2))
    >>> [round(serving.simulate(scenario, one).summary.accuracy) for one in (slow, fast)]
    [76, 74]
    """

    target_ms: float = 6.0
    code: ClassVar[int] = rules.BACKLOG

    def __post_init__(self) -> None:
        non_negative("target_ms", self.target_ms)


ServerRule: TypeAlias = Random | RoundRobin | JSED | PowerOfTwo
WidthRule: TypeAlias = Static | RandomWidth | Backlog


@dataclass(frozen=True)
class Router:
    """A router of built-in rules.

    Parameters
    ----------
    width, server
        The rules.
    group
        Maximum number of requests in a block; 0: random of 1, 2, 4, ... 32, the paper's baseline.

    Examples
    --------
    >>> from optsched import serving
    >>> router = serving.Router(serving.Static((0, 2, 3, 3)), serving.PowerOfTwo(), group=16)
    >>> serving.simulate(serving.reference(rate=500, seconds=0.1), router).summary.completion
    1.0
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

    def compiled(self, scenario: Scenario, seed: int) -> Compiled:
        """Return the arrays of the kernels."""
        if self.group > scenario.max_batch:
            raise InputError(f"group: {self.group} is above max_batch, {scenario.max_batch}")
        speed = sum(1 / max(one.ms_per_mmac, 1e-12) for one in scenario.servers)
        rule = rules.rule_of(
            self.server.code, seed, width=self.width.code, group=self.group,
            rate=speed / NS_PER_MS, target=getattr(self.width, "target_ms", 0.0) * NS_PER_MS,
        )  # fmt: skip
        indices = pareto_tuples(scenario)
        if isinstance(self.width, Static):
            k, n = scenario.n_segments, scenario.n_widths
            if len(self.width.widths) != k:
                raise InputError(f"widths: expected {k} indices, got {self.width.widths!r:.60}")
            chosen = [integer("widths", w, 0, n - 1) for w in self.width.widths]
            indices = np.array([np.ravel_multi_index(chosen, (n,) * k)])
        return Compiled(rule, frozen(scenario.tuples[indices]), scenario.tuple_mmac[indices])


@dataclass(frozen=True)
class MarginalCost:
    """Width and server of the least cost for all requests, of the block and others.

    For every server and width, the cost is the sum of: the time until the block's batch would end,
    with the present instances, queues and load; the accuracy that the width loses if all later
    segments are the best; and `price` times the block's work for every request in the system.
    Accuracy and energy are priced as in the objective.

    Parameters
    ----------
    price
        Cost in ns of one ns of work, for every request in the system; 0: the block alone.
    group
        Maximum number of requests in a block.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> plan = serving.plan_instances(scenario)
    >>> round(serving.simulate(scenario, serving.MarginalCost(), plan=plan).summary.accuracy, 1)
    76.4
    """

    price: float = 0.04
    group: int = 10

    def __post_init__(self) -> None:
        non_negative("price", self.price)
        integer("group", self.group, 1, 4096)

    def compiled(self, scenario: Scenario, seed: int) -> Compiled:
        """Return the arrays of the kernels."""
        rule = rules.rule_of(
            rules.MARGINAL, seed, price=self.price, group=min(self.group, scenario.max_batch),
            rate=scenario.ms_per_joule * NS_PER_MS,
        )  # fmt: skip
        table = scenario.points.reshape((scenario.n_widths,) * scenario.n_segments)
        best = [table.ravel()]
        for _ in range(scenario.n_segments):  # the best completion of every prefix
            table = table.max(axis=-1)
            best.insert(0, table.ravel())
        value = np.concatenate(best) * (scenario.ms_per_point * NS_PER_MS / POINTS)
        return Compiled(rule, weights=value)


@dataclass(frozen=True, eq=False)
class Policy:
    """Router that chooses server, width and group by a network: two layers of 64 tanh units.

    If the chosen server can never run the segment, the next one is taken; if it can never run the
    width, the widest one below.

    Parameters
    ----------
    weights
        W1, b1, W2, b2 of the layers and W3, b3 of all heads, [input][unit], concatenated.
    servers, segments, widths
        Sizes of the scenario that it was trained for.
    state
        ``"paper"`` (2 + 3N features) or ``"extended"`` (15 + 8N for four segments).
    epsilon
        Share of the uniform distribution in the choice of the server.
    sampled
        Draw decisions, with the simulation's seed; False: take the most likely.

    Examples
    --------
    >>> import numpy as np
    >>> from optsched import serving
    >>> policy = serving.Policy(np.zeros(7565), servers=3, segments=4, widths=4)  # untrained
    >>> serving.simulate(serving.reference(rate=50, seconds=0.1), policy).summary.accuracy
    70.3
    """

    weights: Any
    servers: int
    segments: int
    widths: int
    state: str = "extended"
    epsilon: float = 0.05
    sampled: bool = False

    def __post_init__(self) -> None:
        shape = [integer(key, getattr(self, key), 1, 4096) for key in _SIZES]
        one_of("state", self.state, ("paper", "extended"))
        number("epsilon", self.epsilon, most=1.0)
        object.__setattr__(self, "sampled", boolean("sampled", self.sampled))
        _, count, _ = rules.sizes(self.state, *shape)
        found = np.asarray(self.weights)
        if found.shape != (count,) or found.dtype.kind != "f" or not (abs(found) < 1e6).all():
            raise InputError(
                f"weights: expected {count} numbers below a million for {shape} servers, segments "
                f"and widths, got {found.dtype} {found.shape}"
            )
        object.__setattr__(self, "weights", frozen(found.astype(np.float64)))

    def compiled(self, scenario: Scenario, seed: int) -> Compiled:
        """Return the arrays of the kernels; a scenario of other sizes is refused."""
        shape = (len(scenario.servers), scenario.n_segments, scenario.n_widths)
        for key, size in zip(_SIZES, shape, strict=True):
            if getattr(self, key) != size:
                raise InputError(
                    f"policy: was trained for {getattr(self, key)} {key}, the scenario has {size}"
                )
        inputs, _, buffers = rules.sizes(self.state, *shape)
        rule = rules.rule_of(
            rules.POLICY, seed, inputs=inputs, sampled=self.sampled, epsilon=self.epsilon
        )
        return Compiled(rule, weights=np.append(self.weights, np.zeros(buffers)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an ``.npz``, atomically."""
        stream = io.BytesIO()
        np.savez(stream, format=np.array(POLICY_FORMAT), **vars(self))
        write_atomic(path, stream.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a file of `save`; errors name the field that is missing or wrong."""
        found: dict[str, Any] = unpack_arrays(read_bytes(path), str(path), _MAX_BYTES)
        weights, form = found.pop("weights", None), found.pop("format", "nothing")
        with placed(f"{path}: "):
            if str(form) != POLICY_FORMAT:
                raise InputError(f"format: expected {POLICY_FORMAT!r}, got {form!r:.60}")
            for key in cls.__dataclass_fields__.keys() ^ found.keys() ^ {"weights"}:
                raise InputError(f"{key}: {'unknown' if key in found else 'missing'}")
            for key in (key for key, value in found.items() if value.shape):
                raise InputError(f"{key}: expected one value, got {found[key]!r:.60}")
            return cls(weights, **{key: value.item() for key, value in found.items()})


def pareto_tuples(scenario: Scenario) -> IntArray:
    """Return the indices of tuples that are not dominated in MACs and accuracy, narrowest first.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> scenario.tuples[serving.pareto_tuples(scenario)][:2].tolist()
    [[0, 0, 0, 0], [0, 0, 0, 1]]
    """
    order = np.lexsort((-scenario.points, scenario.tuple_mmac))
    best = np.maximum.accumulate(scenario.points[order])
    new = np.concatenate([[True], best[1:] > best[:-1]])
    found: IntArray = order[new]
    return found


class View:
    """Read-only state of servers and queues at a decision, valid until the router returns.

    Times are in ms; servers, segments and widths count from 0.

    Examples
    --------
    >>> from optsched import serving
    >>> class Fastest:
    ...     def route(self, view):
    ...         delay = view.expected_delay(width=0, group=4)
    ...         return serving.Decision(int(delay.argmin()), width=0, group=4)
    >>> serving.simulate(serving.reference(rate=500, seconds=0.1), Fastest()).summary.accuracy
    70.3
    """

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.scenario = scenario
        self._world = world
        self.feasible = world.feasible
        """Whether a server can ever run (segment, width), [server][segment][width]."""

    @property
    def now(self) -> float:
        """Time of the decision."""
        return float(self._world.trace[0]["now"]) / NS_PER_MS

    @property
    def segment(self) -> int:
        """Segment of the block."""
        return int(self._world.trace[0]["segment"])

    @property
    def head(self) -> IntArray:
        """Indices of the requests in the block's queue, oldest first, at most `max_batch`."""
        fifo = self._world.fifo[self.segment]
        found, r = [], int(fifo["head"])
        for _ in range(min(int(fifo["images"]), self.scenario.max_batch)):
            found.append(r)
            r = int(self._world.request[r]["next"])
        return np.array(found, np.int64)

    @property
    def deadline(self) -> Any:
        """Times at which the requests of `head` are due; inf without a deadline."""
        due = self._world.deadline[self.head]
        return np.where(due < NEVER, due / NS_PER_MS, np.inf)

    @property
    def prefix(self) -> tuple[int, ...]:
        """Widths that the oldest request has run so far."""
        r = self._world.fifo[self.segment]["head"]
        shape = (self.scenario.n_widths,) * self.segment
        return tuple(map(int, np.unravel_index(self._world.request["tuple"][r], shape)))

    @property
    def waiting(self) -> IntArray:
        """Requests at the router per segment."""
        found: IntArray = self._world.fifo["images"].copy()
        return found

    @property
    def queued(self) -> Any:
        """Work of the waiting batches, per server."""
        return self._world.core.server["queued"] / NS_PER_MS

    @property
    def running(self) -> Any:
        """Work of the running batches, from their start on, per server."""
        return self._world.core.server["active"] / NS_PER_MS

    @property
    def free_instances(self) -> IntArray:
        """Instances that could start at once, [server][segment][width]."""
        return self._count(self._world.core.instance["state"] == FREE)

    @property
    def resident_instances(self) -> IntArray:
        """Instances that are resident or loading, [server][segment][width]."""
        state = self._world.core.instance["state"]
        return self._count((state != EMPTY) & (state != UNLOADING))

    def _count(self, selected: Any) -> IntArray:
        found = np.zeros(self.feasible.shape, np.int64)
        s, i = np.nonzero(selected)
        slot = self._world.core.instance[s, i]
        np.add.at(found, (s, slot["segment"], slot["width"]), 1)
        return found

    @property
    def free_vram_mb(self) -> Any:
        """MB per server."""
        server = self._world.core.server
        return (server["vram"] - server["used"]) / 1000

    @property
    def watts(self) -> Any:
        """Power per server."""
        return self._world.core.server["watts"].copy()

    def expected_delay(self, width: int, group: int) -> Any:
        """Return the ms until each server would have completed such a block; inf: never."""
        integer("width", width, 0, self.scenario.n_widths - 1)
        integer("group", group, 1, self.scenario.max_batch)
        found = np.zeros(len(self.scenario.servers))
        expected_delays(self._world, width, group, found)
        return found / NS_PER_MS


# routers by name

GROUP: Final = "optsched.routers"
"""Entry points of this group are routers of other packages: name -> class."""

FORMS: Final = (
    "marginal, policy:FILE.npz, WIDTH/SERVER/GROUP such as backlog:6ms/jsed/8, static:0,2,3,3/"
    "jsed/8 or random/random/0, module:Class, or the name of an installed router"
)
_SERVERS: Final[dict[str, type[ServerRule]]] = {
    "random": Random, "round_robin": RoundRobin, "jsed": JSED, "power_of_two": PowerOfTwo
}  # fmt: skip


def router_of(spec: str) -> AnyRouter:
    """Return the router of a text, one of `FORMS`."""
    if spec == "marginal":
        return MarginalCost()
    if spec.startswith("policy:"):
        return Policy.load(spec.removeprefix("policy:"))
    return _rules(spec) if "/" in spec else _loaded(spec)


def _rules(spec: str) -> Router:
    """A router of ``WIDTH/SERVER/GROUP``."""
    try:
        width, server, group = [*spec.split("/"), "8"][:3]
        width, _, value = width.partition(":")
        rule: WidthRule
        if width == "static":
            rule = Static(tuple(int(w) for w in value.split(",")))
        elif width == "backlog":
            rule = Backlog(float(value.removesuffix("ms") or 6))
        else:
            rule = {"random": RandomWidth}[f"{width}{value}"]()
        return Router(rule, _SERVERS[server](), int(group))
    except InputError:
        raise
    except (KeyError, ValueError):
        raise InputError(f"router: expected {FORMS}, got {spec!r:.60}") from None


def _loaded(spec: str) -> AnyRouter:
    """An instance of ``module:Class``, also of the current folder, or of an entry point."""
    from importlib.metadata import EntryPoint, entry_points  # 20 ms

    found = [EntryPoint("router", spec, GROUP)] if ":" in spec else []
    found += [] if found else [one for one in entry_points(group=GROUP) if one.name == spec]
    if not found:
        raise InputError(f"router: expected {FORMS}, got {spec!r:.60}")
    path = list(sys.path)
    sys.path.insert(0, "")
    try:
        made = found[0].load()()
    except Exception as error:  # code of the user
        message = f"{type(error).__name__}: {error}"
        raise InputError(f"router: {spec!r:.60} cannot be loaded: {message}") from error
    finally:
        sys.path[:] = path
    if not hasattr(made, "route") and not hasattr(made, "compiled"):
        raise InputError(f"router: {spec!r:.60} has no method route(view)")
    return made
