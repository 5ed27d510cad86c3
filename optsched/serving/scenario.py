"""Scenario: servers, a network of segments and widths, and requests with arrival times."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.strict_json import decode_document, lines, placed, read_json, rows
from optsched.io.values import boolean, frozen, integer, label
from optsched.serving.tables import (
    NEVER,
    NS_PER_MS,
    POINTS,
    SLOTS,
    Contention,
    FloatArray,
    Link,
    Server,
    accuracy_table,
    checked_link,
    checked_server,
    identifiers,
    milliseconds,
    non_negative,
    table,
    times,
    tuple_keys,
    work_table,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray

MAX_TUPLES = 65_536


@dataclass(frozen=True)
class Settings:
    """Settings of the greedy core.

    Parameters
    ----------
    cap
        Maximum number of instances for one (segment, width) on a server.
    util_block
        A busy server with a higher U loads no instances.
    idle_ms
        Idle time after which an instance is unloaded.
    starve_ms
        Younger blocks may pass a blocked one until it has waited this long.
    strict
        Younger blocks never pass a blocked one.
    shed
        Requests are dropped at a decision if their expected end is after their deadline.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> serving.simulate(scenario, settings=serving.Settings(strict=True)).summary.completed
    43
    """

    cap: int = 4
    util_block: float = 0.92
    idle_ms: float = 500.0
    starve_ms: float = 20.0
    strict: bool = False
    shed: bool = True

    def __post_init__(self) -> None:
        integer("cap", self.cap, 1, SLOTS)
        for key in ("strict", "shed"):
            object.__setattr__(self, key, boolean(key, getattr(self, key)))
        non_negative("util_block", self.util_block)
        milliseconds("idle_ms", self.idle_ms)
        milliseconds("starve_ms", self.starve_ms)


@dataclass(frozen=True, eq=False, repr=False)
class Scenario:
    """Requests for a network in K segments, each runnable at W widths, on unequal servers.

    The objective is the sum over requests of latency + `ms_per_point` * (best accuracy - accuracy),
    plus `ms_per_joule` * energy, in ns. Segments, widths and servers count from 0.

    Parameters
    ----------
    widths
        Ascending, in (0, 1].
    mmac
        Millions of multiply-accumulates of an image, [segment][input width][width]; segment 0 has
        one row.
    vram_mb
        Memory of an instance, [segment][width]; a wider one takes no less.
    accuracy
        Percent by tuple of widths: ``{"0,1,2,3": 74.5, ...}``, or an array with K axes (see
        `optsched.serving.additive`).
    servers
        See `Server`.
    arrival_ms
        When each request arrives; times are rounded up to whole ns.
    deadline_ms
        Time after its arrival until which a request is to be answered, one for all or one each; inf
        or None: no deadline.
    max_batch
        Maximum number of images in a batch.
    ids
        Names of the requests; their numbers if empty.
    router_ms
        Duration of a decision; the router makes one at a time. None: none.
    link
        None: moving activations between servers takes no time.
    ms_per_point, ms_per_joule
        Prices of accuracy and energy.
    name
        Label.

    Examples
    --------
    >>> from optsched import serving
    >>> server = serving.Server("gpu", 100, launch_ms=1, ms_per_mmac=0.1, idle_w=20, peak_w=200)
    >>> scenario = serving.Scenario(
    ...     [0.5, 1], [[[5, 20]], [[5, 10], [10, 20]]], [[10, 20]] * 2, [70, 72, 71, 75], [server],
    ...     arrival_ms=[0, 1, 5], deadline_ms=20,
    ... )
    >>> serving.simulate(scenario).summary.attainment
    100.0
    """

    widths: Sequence[float]
    mmac: Any
    vram_mb: Any
    accuracy: Any
    servers: Sequence[Server]
    arrival_ms: Any
    deadline_ms: Any = None
    max_batch: int = 64
    ids: Sequence[int | str] = ()
    router_ms: float | None = None
    link: Link | None = None
    ms_per_point: float = 4.0
    ms_per_joule: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        network = _network(self.widths, self.mmac, self.vram_mb)
        n, k = len(network["widths"]), len(network["mmac"])
        arrival = times("arrival_ms", self.arrival_ms)
        order = np.argsort(arrival, kind="stable")
        given = self.ids is not None and len(self.ids)
        names = identifiers("requests", self.ids if given else range(len(arrival)))
        if len(names) != len(arrival):
            raise InputError(f"ids: {len(names)} names of {len(arrival)} requests")
        if not self.servers:
            raise InputError("servers: expected at least one")
        servers = tuple(checked_server(s, one, (k, n)) for s, one in enumerate(self.servers))
        identifiers("servers", [one.id for one in servers])
        self.__dict__.update(
            network,
            max_batch=integer("max_batch", self.max_batch, 1, 4096),
            accuracy=accuracy_table(self.accuracy, n, k),
            servers=servers,
            arrival_ms=frozen(arrival[order] / NS_PER_MS),
            deadline_ms=_deadlines(self.deadline_ms, order),
            ids=tuple(names[i] for i in order),
            router_ms=None if self.router_ms is None else milliseconds("router_ms", self.router_ms),
            link=None if self.link is None else checked_link(self.link, (k, n)),
            ms_per_point=non_negative("ms_per_point", self.ms_per_point),
            ms_per_joule=non_negative("ms_per_joule", self.ms_per_joule),
            name=label("name", self.name),
        )
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Refuse instances larger than every server and batches of a duration that overflows."""
        for i, j in np.ndindex(self.vram.shape):
            if all(self.vram[i, j] > round(one.vram_mb * 1000) for one in self.servers):
                raise InputError(
                    f"vram_mb[{i}][{j}]: an instance of segment {i + 1} at width "
                    f"{self.widths[j]:g} takes {self.vram_mb[i, j]:g} MB, more than any server has"
                )
        for s, one in enumerate(self.servers):
            rule = one.contention or Contention(0, 0, 0)
            slowdown = 1 + rule.below * rule.knee + rule.above * 13  # 12 instances at U 1.02
            most = one.launch_ms + self.cost[s].max() / NS_PER_MS * self.max_batch * slowdown
            milliseconds(f"servers[{s}]: the longest batch", most)

    # sizes

    @property
    def n_segments(self) -> int:
        """K."""
        return len(self.mmac)

    @property
    def n_widths(self) -> int:
        """W."""
        return len(self.widths)

    @property
    def n_requests(self) -> int:
        """Requests of the trace."""
        return len(self.arrival)

    @property
    def rate(self) -> float:
        """Requests per second, from 0 to the last arrival."""
        last = int(self.arrival[-1]) if self.n_requests else 0
        return self.n_requests * 1e9 / last if last else 0.0

    # arrays of the kernels

    @cached_property
    def arrival(self) -> IntArray:
        """In ns, ascending."""
        return times("arrival_ms", self.arrival_ms)

    @cached_property
    def deadline(self) -> IntArray:
        """Times at which answers are due, ns; `NEVER` without a deadline."""
        if self.deadline_ms is None:
            return frozen(np.full(self.n_requests, NEVER))
        some = np.isfinite(self.deadline_ms)
        due = times("deadline_ms", np.where(some, self.deadline_ms, 0.0))
        return frozen(np.where(some, self.arrival + due, NEVER))

    @cached_property
    def vram(self) -> IntArray:
        """Memory of an instance in kB, [segment][width]."""
        return frozen(np.rint(self.vram_mb * 1000).astype(np.int64))

    @cached_property
    def points(self) -> IntArray:
        """Accuracy of every tuple in 1/`POINTS` of a percent, in the order of `tuples`."""
        return frozen(np.rint(self.accuracy * POINTS).astype(np.int64))

    @cached_property
    def cost(self) -> FloatArray:
        """Work of an image in ns, [server][segment][input width][width]."""
        found = np.array([self.mmac * (one.ms_per_mmac * NS_PER_MS) for one in self.servers])
        for s, one in enumerate(self.servers):
            if one.cost_ms is not None:
                found[s] = work_table("cost_ms", one.cost_ms, self.n_widths) * NS_PER_MS
        return frozen(found)

    @cached_property
    def launch(self) -> IntArray:
        """Constant part of the duration of a batch, ns per server."""
        return frozen(times("launch_ms", [one.launch_ms for one in self.servers]))

    @cached_property
    def router(self) -> int:
        """Duration of a decision, ns."""
        return int(times("router_ms", [self.router_ms or 0.0])[0])

    @cached_property
    def transfer(self) -> IntArray:
        """Time of an image from server to server after a segment, ns, [segment][width]."""
        if self.link is None:
            return frozen(np.zeros_like(self.vram[:-1]))
        size = np.array(self.link.activation_mb)[:-1]
        moved = self.link.latency_ms + size * self.link.ms_per_mb
        return frozen(np.ceil(moved * NS_PER_MS - 1e-3).astype(np.int64))

    @cached_property
    def tuples(self) -> IntArray:
        """All tuples of widths, [tuple][segment], the last segment's width counting fastest."""
        shape = (self.n_widths,) * self.n_segments
        return frozen(np.ascontiguousarray(np.indices(shape).reshape(self.n_segments, -1).T))

    @cached_property
    def inputs(self) -> IntArray:
        """Width of the input of every segment, [tuple][segment]; 0 for segment 0."""
        return frozen(np.insert(self.tuples[:, :-1], 0, 0, axis=1))

    @cached_property
    def tuple_mmac(self) -> FloatArray:
        """MMACs of an image by tuple."""
        segments = np.arange(self.n_segments)
        return frozen(self.mmac[segments, self.inputs, self.tuples].sum(axis=1))

    @cached_property
    def lost(self) -> FloatArray:
        """Price of the accuracy that every tuple loses, ns."""
        price = self.ms_per_point * NS_PER_MS / POINTS
        return frozen((self.points.max() - self.points) * price)

    # documents

    @cached_property
    def sha256(self) -> str:
        """Hash of all fields but the name."""
        whole = [_fields(self), self.arrival.tolist(), self.ids]
        whole += [] if self.deadline_ms is None else [self.deadline.tolist()]
        return hashlib.sha256(msgspec.json.encode(whole, order="deterministic")).hexdigest()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Scenario:
        """Read ``optsched.routing/1``; errors name the path in the document."""
        return read_json(path, from_tree)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write ``optsched.routing/1``."""
        write_atomic(path, to_json(self))

    def replace(self, **fields: Any) -> Scenario:
        """Return a copy with other fields, named as in the constructor."""
        if "arrival_ms" in fields:
            fields = {"ids": (), "deadline_ms": self.deadline_ms, **fields}
            if fields["deadline_ms"] is self.deadline_ms is not None:
                if len({*self.deadline_ms.tolist()}) > 1:
                    raise InputError("deadline_ms: give those of the new arrivals, they differ")
                fields["deadline_ms"] = next(iter(self.deadline_ms.tolist()), None)
        return dataclasses.replace(self, **fields)

    def __reduce__(self) -> tuple[Any, ...]:  # arrays of a copy are read-only too
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return partial(Scenario, **given), ()

    def __repr__(self) -> str:
        return (
            f"Scenario({self.name!r}, {self.n_requests} requests, {len(self.servers)} servers, "
            f"{self.n_segments} segments, widths {self.widths})"
        )


def _network(widths: Any, mmac: Any, vram_mb: Any) -> dict[str, Any]:
    """Widths, work and memory, checked."""
    columns = table("widths", widths, 1)
    n = len(columns)
    if not n or (np.diff(columns) <= 0).any() or columns[0] <= 0 or columns[-1] > 1:
        raise InputError(f"widths: expected ascending numbers in (0, 1], got {widths!r:.60}")
    work = work_table("mmac", mmac, n)
    k = len(work)
    if n**k > MAX_TUPLES or k > 32:
        raise InputError(f"mmac: {n} widths to the power of {k} segments: too many")
    memory = table("vram_mb", vram_mb, 2)
    if memory.shape != (k, n):
        raise InputError(f"vram_mb: expected {k} rows of {n} numbers, got {memory.shape}")
    for i in np.flatnonzero((np.diff(memory, axis=1) < 0).any(axis=1))[:1]:
        raise InputError(f"vram_mb[{i}]: a wider instance takes less, got {memory[i].tolist()}")
    memory = np.ceil(memory * 1000 - 1e-6) / 1000  # whole kB
    return {"widths": tuple(columns.tolist()), "mmac": work, "vram_mb": frozen(memory)}


def _deadlines(given: Any, order: IntArray) -> FloatArray | None:
    """Return relative deadlines in the order of arrivals; None if there are none."""
    if given is None or (isinstance(given, (int, float)) and not isinstance(given, bool)):
        given = [given] * len(order)
    if isinstance(given, (list, tuple)):
        given = [math.inf if one is None else one for one in given]
    some = np.asarray(given)
    if some.dtype.kind not in "iuf" or some.shape != order.shape:
        raise InputError(
            f"deadline_ms: expected a number, or {len(order)}, one a request, got {given!r:.60}"
        )
    if (some == np.inf).all():
        return None
    times("deadline_ms", np.where(some == np.inf, 0, some))
    return frozen(some[order].astype(np.float64))


# documents

FORMAT: Final = "optsched.routing/1"


class _Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    id: int | str
    arrival_ms: float
    deadline_ms: float | None = None


class _Scenario(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    name: str = ""
    widths: list[float]
    mmac: list[list[list[float]]]
    vram_mb: list[list[float]]
    max_batch: int
    accuracy: dict[str, float]
    router_ms: float | None = None
    link: Link | None = None
    ms_per_point: float = 4.0
    ms_per_joule: float = 0.0
    servers: list[Server]
    requests: list[_Request]


def from_tree(tree: Any, name: str) -> Scenario:
    """Read a scenario from parsed JSON; its fields are those of `Scenario` and its parts."""
    found = msgspec.structs.asdict(decode_document(tree, _Scenario, FORMAT, name))
    del found["format"]
    requests: list[_Request] = found.pop("requests")
    with placed(f"{name}: "):
        return Scenario(
            ids=[one.id for one in requests],
            arrival_ms=[one.arrival_ms for one in requests],
            deadline_ms=[one.deadline_ms for one in requests],
            **found,
        )


def to_json(scenario: Scenario) -> bytes:
    """Return the document ``optsched.routing/1``, one line per server and request."""
    members: dict[str, Any] = {"format": FORMAT}
    if scenario.name:
        members["name"] = scenario.name
    members |= _fields(scenario)
    members["servers"] = rows(scenario.servers)
    due = [None] * scenario.n_requests
    if scenario.deadline_ms is not None:
        due = [None if one == math.inf else one for one in scenario.deadline_ms.tolist()]
    members["requests"] = rows(map(_Request, scenario.ids, scenario.arrival_ms.tolist(), due))
    return lines(members)


def _fields(scenario: Scenario) -> dict[str, Any]:
    """Fields of the document without name and requests; those that are None are omitted."""
    found = {key: getattr(scenario, key) for key in _Scenario.__struct_fields__[2:-1]}
    keys = tuple_keys(scenario.n_widths, scenario.n_segments)
    mmac = scenario.mmac.tolist()
    found |= {
        "mmac": [mmac[0][:1], *mmac[1:]], "vram_mb": scenario.vram_mb.tolist(),
        "accuracy": dict(zip(keys, scenario.accuracy.tolist(), strict=True)),
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}
