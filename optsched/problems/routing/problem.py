"""Routing: which server, width and batch every request of a slimmable network gets."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from optsched.errors import InputError
from optsched.io.values import integer, label
from optsched.model.schedule import Arcs, Csr, Problem, Schedule
from optsched.problems.routing.checks import (
    MOST_TUPLES,
    accuracy_table,
    frozen,
    identifiers,
    milliseconds,
    non_negative,
    table,
    times,
)  # fmt: skip

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from optsched.model.schedule import IntArray

FloatArray = npt.NDArray[np.float64]

NS_PER_MS = 10**6
_NUMBERS = (
    "vram_mb", "launch_ms", "ms_per_mmac", "idle_w", "peak_w", "load_ms", "sat_mmac"
)  # fmt: skip
POINTS = 10_000
"""Parts of a percentage point in which accuracies are counted."""


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How batches that run together on a server slow each other down.

    With U the sum of their loads, a batch takes 1 + below * min(U, knee) + above * max(0, U - knee)
    times as long.
    """

    knee: float
    below: float
    above: float


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What moving activations between servers takes: latency + size * ms_per_mb."""

    latency_ms: float
    ms_per_mb: float
    activation_mb: list[list[float]]
    """Per segment and width, what one image's output holds."""


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One GPU, or what stands for one.

    Parameters
    ----------
    id
        Name in documents.
    vram_mb
        Memory for instances, to the thousandth.
    launch_ms
        What every batch takes besides its work.
    ms_per_mmac
        Time of a million multiply-accumulates.
    idle_w, peak_w
        Power at no and at full load.
    load_ms
        Time to make an instance ready; None: none.
    sat_mmac
        Work of a batch that alone half fills the server; None: batches do not slow each other.
    contention
        Needs `sat_mmac`.
    cost_ms
        Measured time per image, [segment][input width][width], instead of MMACs * `ms_per_mmac`.
    """

    id: int | str
    vram_mb: float
    launch_ms: float
    ms_per_mmac: float
    idle_w: float
    peak_w: float
    load_ms: float | None = None
    sat_mmac: float | None = None
    contention: Contention | None = None
    cost_ms: Any = None


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Routing(Problem):
    """Requests for a network in K segments, each runnable at W widths, on unequal servers.

    Minimised is the sum over requests of latency + `ms_per_point` * (best accuracy - accuracy),
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
    max_batch
        Images that a batch may hold.
    accuracy
        Percent by tuple of widths: ``{"0,1,2,3": 74.5, ...}``, or an array with K axes.
    servers
        See `Server`.
    arrival_ms
        When each request arrives; times are rounded up to whole ns.
    ids
        Names of the requests; their numbers if None.
    accuracy_prior
        Fills an incomplete table: ``"additive"`` or ``"nearest"`` (`optsched.serving.additive`).
    router_ms
        What a decision takes: the router makes one after the other. None: none.
    link
        None: servers share everything.
    ms_per_point, ms_per_joule
        Prices of accuracy and energy.
    name
        Label.

    Raises
    ------
    InputError
        A field is wrong; the message names its path and the value.
    """

    widths: tuple[float, ...]
    mmac: FloatArray
    vram: IntArray
    """Per segment and width, in kB."""
    max_batch: int
    accuracy: IntArray
    """Of every tuple, the last segment's width counting fastest; in 1/`POINTS` of a percent."""
    servers: tuple[Server, ...]
    arrival: IntArray
    """In ns, ascending."""
    ids: tuple[int | str, ...]
    router_ms: float | None
    link: Link | None
    ms_per_point: float
    ms_per_joule: float
    name: str

    problem_kind: ClassVar[str] = "routing"
    objective_name: ClassVar[str] = "cost"

    def __init__(
        self,
        widths: Sequence[float],
        mmac: Any,
        vram_mb: Any,
        accuracy: Mapping[str, float] | npt.ArrayLike,
        servers: Sequence[Server],
        arrival_ms: npt.ArrayLike,
        *,
        max_batch: int = 64,
        ids: Sequence[int | str] | None = None,
        accuracy_prior: str | None = None,
        router_ms: float | None = None,
        link: Link | None = None,
        ms_per_point: float = 4.0,
        ms_per_joule: float = 0.0,
        name: str = "",
    ) -> None:
        columns = table("widths", widths, 1)
        n = len(columns)
        if not n or (np.diff(columns) <= 0).any() or columns[0] <= 0 or columns[-1] > 1:
            raise InputError(f"widths: expected ascending numbers in (0, 1], got {widths!r:.60}")
        work = _work("mmac", mmac, n)
        k = len(work)
        if n**k > MOST_TUPLES or k > 32:
            raise InputError(f"mmac: {n} widths to the power of {k} segments: too many")
        memory = table("vram_mb", vram_mb, 2)
        if memory.shape != (k, n):
            raise InputError(f"vram_mb: expected {k} rows of {n} numbers, got {memory.shape}")
        for i in np.flatnonzero((np.diff(memory, axis=1) < 0).any(axis=1))[:1]:
            raise InputError(f"vram_mb[{i}]: a wider instance takes less, got {memory[i].tolist()}")
        arrivals = times("arrival_ms", arrival_ms)
        order = np.argsort(arrivals, kind="stable")
        names = identifiers("requests", range(len(arrivals)) if ids is None else ids)
        if len(names) != len(arrivals):
            raise InputError(f"ids: {len(names)} names of {len(arrivals)} requests")
        if not servers:
            raise InputError("servers: expected at least one")
        given = tuple(_server(s, one, (k, n)) for s, one in enumerate(servers))
        identifiers("servers", [one.id for one in given])
        kilobytes = np.ceil(memory * 1000 - 1e-6).astype(np.int64)
        values: dict[str, Any] = {
            "widths": tuple(columns.tolist()), "mmac": work, "vram": frozen(kilobytes),
            "max_batch": integer("max_batch", max_batch, 1, 4096),
            "accuracy": accuracy_table(accuracy, columns, k, accuracy_prior), "servers": given,
            "arrival": frozen(arrivals[order]), "ids": tuple(names[i] for i in order),
            "router_ms": None if router_ms is None else milliseconds("router_ms", router_ms),
            "link": None if link is None else _link(link, (k, n)),
            "ms_per_point": non_negative("ms_per_point", ms_per_point),
            "ms_per_joule": non_negative("ms_per_joule", ms_per_joule),
            "name": label("name", name),
        }  # fmt: skip
        self.__dict__.update(values)
        for i, j in product(range(k), range(n)):
            if all(self.vram[i, j] > round(one.vram_mb * 1000) for one in given):
                raise InputError(
                    f"vram_mb[{i}][{j}]: an instance of segment {i + 1} at width {columns[j]:g} "
                    f"takes {memory[i, j]:g} MB, more than any server has"
                )
        for s, one in enumerate(given):
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
    def n_operations(self) -> int:
        """Segments to run, over all requests."""
        return self.n_requests * self.n_segments

    @property
    def rate(self) -> float:
        """Requests per second, from 0 to the last arrival."""
        last = int(self.arrival[-1]) if self.n_requests else 0
        return self.n_requests * 1e9 / last if last else 0.0

    # what kernels read

    @cached_property
    def cost(self) -> FloatArray:
        """An image's ns, [server][segment][input width][width]."""
        rows = [
            self.mmac * (one.ms_per_mmac * NS_PER_MS)
            if one.cost_ms is None
            else _work("cost_ms", one.cost_ms, self.n_widths) * NS_PER_MS
            for one in self.servers
        ]
        return frozen(np.array(rows))

    @cached_property
    def launch(self) -> IntArray:
        """What every batch takes besides, ns per server."""
        return frozen(times("launch_ms", [one.launch_ms for one in self.servers]))

    @cached_property
    def router(self) -> int:
        """A decision's ns."""
        return 0 if self.router_ms is None else int(times("router_ms", [self.router_ms])[0])

    @cached_property
    def transfer(self) -> IntArray:
        """An image's ns from one server to another after a segment, [segment][width]."""
        k, n = self.n_segments, self.n_widths
        if self.link is None:
            return frozen(np.zeros((k - 1, n), np.int64))
        size = np.asarray(self.link.activation_mb, np.float64)[: k - 1]
        moved = self.link.latency_ms + size * self.link.ms_per_mb
        return frozen(np.ceil(moved * NS_PER_MS - 1e-3).astype(np.int64))

    @cached_property
    def tuples(self) -> IntArray:
        """All tuples of widths, [tuple][segment], in the order of `accuracy`."""
        rows = list(product(range(self.n_widths), repeat=self.n_segments))
        return frozen(np.array(rows, np.int64).reshape(-1, self.n_segments))

    @cached_property
    def inputs(self) -> IntArray:
        """Of all tuples the width of every segment's input, [tuple][segment]; 0 of segment 0."""
        return frozen(np.insert(self.tuples[:, :-1], 0, 0, axis=1))

    @cached_property
    def tuple_mmac(self) -> FloatArray:
        """MMACs of an image by tuple."""
        segments = np.arange(self.n_segments)
        work: FloatArray = self.mmac[segments, self.inputs, self.tuples].sum(axis=1)
        return frozen(work)

    @cached_property
    def padded_cost(self) -> FloatArray:
        """As `cost`, of inputs that may be padded to a width that costs less."""
        least: FloatArray = np.minimum.accumulate(self.cost[:, :, ::-1], axis=2)[:, :, ::-1]
        return frozen(least)

    @cached_property
    def lost(self) -> FloatArray:
        """What the accuracy that a tuple loses counts, ns."""
        lost = self.accuracy.max() - self.accuracy
        return frozen(lost * (self.ms_per_point * NS_PER_MS / POINTS))

    # judging

    def price(self, latency: IntArray, accuracy: IntArray, joules: float) -> int:
        """The objective.

        Parameters
        ----------
        latency
            Of the requests that are done, ns.
        accuracy
            Of them, in 1/`POINTS` of a percent.
        joules
            Energy.
        """
        lost = len(accuracy) * int(self.accuracy.max(initial=0)) - int(accuracy.sum())
        points = round(lost * self.ms_per_point * NS_PER_MS / POINTS)
        return int(latency.sum()) + points + round(joules * self.ms_per_joule * NS_PER_MS)

    @cached_property
    def alone(self) -> tuple[int, int]:
        """Least latency of a request, and least latency + lost accuracy, ns.

        Inputs may be padded to a width that costs less; the router may have begun its decision
        before the request arrived, so that its time does not count.
        """
        best = np.zeros((len(self.servers), len(self.tuples)))
        for i in range(self.n_segments):
            before = self.inputs[:, i]
            step = self.launch[:, None] + self.padded_cost[:, i, before, self.tuples[:, i]]
            if i:
                moved = best.min(axis=0) + self.transfer[i - 1, before]
                best = np.minimum(best, moved)
            best = best + np.ceil(step)
        latency = best.min(axis=0)
        return int(latency.min()), math.floor((latency + self.lost).min())

    def lower_bound(self) -> int:
        """Every request alone on its best path and tuple; the servers idle until the last is done.

        A time rounded up alone is never above the time of the batch it is part of.
        """
        if not self.n_requests:
            return 0
        least, priced = self.alone
        watts = sum(one.idle_w for one in self.servers)
        seconds = (int(self.arrival[-1]) + least) / 1e9
        idle = math.floor(watts * seconds * self.ms_per_joule * NS_PER_MS)
        return self.n_requests * priced + idle

    def infeasibility(self) -> str:
        """Every request can be served: what no server could hold was refused."""
        return ""

    def describe(self, objective: int) -> str:
        """``7.95 ms a request``: latency, and what lost accuracy and energy count."""
        return f"{objective / NS_PER_MS / max(1, self.n_requests):.4g} ms a request"

    # schedules

    def graph(self) -> Schedule:
        """Every request as a chain of K operations, shortest durations, no server chosen."""
        return self._graph

    @cached_property
    def _graph(self) -> Schedule:
        k, n = self.n_segments, self.n_requests
        shortest = self.launch[:, None] + np.ceil(self.cost.min(axis=(2, 3))).astype(np.int64)
        first = np.arange(n)[:, None] * k + np.arange(k - 1)[None, :]
        release = np.zeros((n, k), np.int64)
        release[:, 0] = self.arrival
        return Schedule(
            name=self.name, time_unit="ns", resources=(),
            op_resources=Csr(np.zeros(n * k + 1, np.int64), ()),
            duration=np.tile(shortest.min(axis=0), n), job=np.repeat(np.arange(n), k),
            stage=np.tile(np.arange(k), n), release=release.ravel(),
            arcs=Arcs.of((i, i + 1) for i in first.ravel().tolist()),
        )  # fmt: skip

    def scheduled(self, answer: Any) -> Schedule:
        """The schedule of a history (`Log`)."""
        made: Schedule = answer.schedule()
        return made

    def answer(self, schedule: Schedule) -> Any:
        """The history that a schedule tells, a `Log`."""
        from optsched.problems.routing.log import Log

        return Log.of_schedule(self, schedule)

    def evaluate(self, schedule: Schedule) -> int:
        """The objective of a history, from its schedule alone."""
        cost: int = self.answer(schedule).cost
        return cost

    def check_same_graph(self, schedule: Schedule) -> None:
        """Refuse what is no history of these requests with an `InputError`."""
        self.answer(schedule)

    # documents

    @cached_property
    def sha256(self) -> str:
        """Hash of all but the name."""
        from optsched.problems.routing.document import content

        return hashlib.sha256(content(self)).hexdigest()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Routing:
        """Read ``optsched.routing/1`` or the interchange form ``slim-scenario/1``."""
        from optsched.problems.routing.document import read

        return read(path)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write ``optsched.routing/1``."""
        from optsched.io.files import write_atomic
        from optsched.problems.routing.document import to_json

        write_atomic(path, to_json(self))

    def replace(self, **fields: Any) -> Routing:
        """The same with other fields, named as in the constructor."""
        kept: dict[str, Any] = {
            "widths": self.widths, "mmac": self.mmac, "vram_mb": self.vram / 1000,
            "accuracy": self.accuracy / POINTS, "servers": self.servers, "ids": self.ids,
            "arrival_ms": self.arrival / NS_PER_MS,
        }  # fmt: skip
        for key in ("max_batch", "router_ms", "link", "ms_per_point", "ms_per_joule", "name"):
            kept[key] = getattr(self, key)
        if "arrival_ms" in fields:
            kept["ids"] = None
        return Routing(**{**kept, **fields})

    def __repr__(self) -> str:
        return (
            f"Routing({self.name!r}, {self.n_requests} requests, {len(self.servers)} servers, "
            f"{self.n_segments} segments, widths {self.widths})"
        )


def _work(place: str, given: Any, n: int) -> FloatArray:
    """[segment][input width][width] of finite numbers >= 0; segment 0 ignores its input width."""
    if not isinstance(given, (list, tuple, np.ndarray)) or not len(given):
        raise InputError(f"{place}: expected a table [segment][input width][width]")
    rows = []
    for k, part in enumerate(given):
        found = table(f"{place}[{k}]", part, 2)
        wanted = (n, n) if k or found.shape == (n, n) else (1, n)
        if found.shape != wanted:
            raise InputError(f"{place}[{k}]: expected shape {wanted}, got {found.shape}")
        rows.append(np.repeat(found[:1], n, axis=0) if k == 0 else found)
    return frozen(np.array(rows))


def _server(s: int, given: Any, shape: tuple[int, int]) -> Server:
    place = f"servers[{s}]"
    if not isinstance(given, Server):
        raise InputError(f"{place}: expected a Server, got {given!r:.60}")
    found: dict[str, Any] = {"id": given.id}
    for key in _NUMBERS:
        value = getattr(given, key)
        if value is not None or key not in ("load_ms", "sat_mmac"):
            check = milliseconds if key in ("launch_ms", "load_ms") else non_negative
            found[key] = check(f"{place}.{key}", value)
    if found["peak_w"] < found["idle_w"]:
        raise InputError(f"{place}.peak_w: {given.peak_w} is below idle_w, {given.idle_w}")
    if found.get("sat_mmac", 1.0) < 1e-9:
        raise InputError(f"{place}.sat_mmac: expected a number > 0, got {given.sat_mmac}")
    if given.contention is not None:
        if given.sat_mmac is None:
            raise InputError(f"{place}.contention: needs sat_mmac")
        if not isinstance(given.contention, Contention):
            raise InputError(f"{place}.contention: expected a Contention")
        rule = msgspec.structs.asdict(given.contention).items()
        found["contention"] = Contention(
            **{key: non_negative(f"{place}.contention.{key}", value) for key, value in rule}
        )
    if given.cost_ms is not None:
        if (k := len(_work(f"{place}.cost_ms", given.cost_ms, shape[1]))) != shape[0]:
            raise InputError(f"{place}.cost_ms: expected {shape[0]} segments, got {k}")
        found["cost_ms"] = [np.asarray(part, np.float64).tolist() for part in given.cost_ms]
    return Server(**found)


def _link(given: Any, shape: tuple[int, int]) -> Link:
    if not isinstance(given, Link):
        raise InputError(f"link: expected a Link, got {given!r:.60}")
    latency = milliseconds("link.latency_ms", given.latency_ms)
    per_mb = non_negative("link.ms_per_mb", given.ms_per_mb)
    sizes = table("link.activation_mb", given.activation_mb, 2)
    if sizes.shape != shape:
        raise InputError(f"link.activation_mb: expected shape {shape}, got {sizes.shape}")
    milliseconds("link: the longest transfer", latency + per_mb * sizes.max())
    return Link(latency, per_mb, sizes.tolist())
