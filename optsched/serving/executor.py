"""Serve real requests: the router and cores of the simulator, real time, a real network."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.io.strict_json import shortened, without_collector
from optsched.io.values import frozen
from optsched.serving.core import (
    BUSY,
    DONE,
    LOAD,
    LOADED,
    LOADING,
    NEVER,
    RUN,
    TICK,
    UNIT,
    UNLOAD,
    UNLOADED,
)
from optsched.serving.log import Log
from optsched.serving.plan import SLOTS
from optsched.serving.routers import InfeasibleRoute, MarginalCost, View
from optsched.serving.scenario import Scenario
from optsched.serving.server_process import Servers, parse_devices
from optsched.serving.simulator import (
    Run,
    doubled,
    infeasible,
    new_world,
    query,
    shed_rows,
    totals,
)
from optsched.serving.world import (
    ARRIVE,
    ENDED,
    INFEASIBLE,
    REQUEUE,
    ROUTE,
    UNDECIDED,
    feed,
)

try:
    import torch
except ImportError:
    raise MissingExtra("the executor", "serving") from None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from optsched.serving.core import Settings
    from optsched.serving.network import SlimResNet
    from optsched.serving.plan import Plan
    from optsched.serving.routers import AnyRouter
    from optsched.serving.server_process import Task
    from optsched.serving.tables import FloatArray

_POLL: Final = 0.1  # longest wait in seconds, between calls of on_progress
_WAKE_UP: Final = 3e-4  # seconds before an arrival that are not slept: waking up takes as long


Command = tuple[int, int, int, int]
"""Kind, server, slot, until; see `core.COMMAND`."""

_PENDING: Final = -1  # end of a batch that is running


class Controller:
    """Passes events of an external clock to the kernels of the simulator.

    `given` are plan, settings and seed, see `simulate`.
    """

    def __init__(self, scenario: Scenario, router: Any = None, *given: Any) -> None:
        self.scenario, self.router = scenario, MarginalCost() if router is None else router
        self.waiting = False  # whether requests wait at the router: `ROUTE` is possible
        self._row: dict[tuple[int, int], int] = {}  # (server, slot) -> row of the running batch
        world = new_world(scenario, self.router, *given, log=True)
        self._use(world._replace(transfer=frozen(0 * world.transfer)))  # links take real time
        feed.prepare()  # type: ignore[attr-defined]

    def _use(self, world: Any) -> None:
        self.world, self.view = world, View(self.scenario, world)

    def feed(self, event: int, s: int, which: int, now: int) -> list[Command]:
        """Process one event (see `world.feed`) and return the commands of the core."""
        if self.world.trace["instances"][0] + SLOTS > len(self.world.instance_row):
            self._use(self.world._replace(instance_row=doubled(self.world.instance_row)))
        world, core = self.world, self.world.core
        if event == DONE:
            world.batch_row["end"][self._row.pop((s, which))] = now
        elif event in (LOADED, UNLOADED):  # replaces the time predicted by the model
            column = "ready" if event == LOADED else "unload"
            world.instance_row[column][core.instance["row"][s, which]] = now
        status = feed(world, event, s, which, now)
        if status == UNDECIDED:
            query(self.scenario, self.router, self.view, world)
            status = feed(world, ROUTE, 0, 0, now)
        if status == INFEASIBLE:
            raise InfeasibleRoute(infeasible(self.scenario, world))
        self.waiting = status == ENDED
        commands: list[Command] = core.command[: core.state[0]["commands"]].tolist()
        slots = [(s, slot) for kind, s, slot, _ in commands if kind == RUN]
        first = int(world.trace[0]["batches"]) - len(slots)
        self._row |= {at: first + j for j, at in enumerate(slots)}
        world.batch_row["end"][first : first + len(slots)] = _PENDING
        return commands

    def batch(self, s: int, slot: int) -> tuple[Any, Any]:
        """Return the batch that an instance runs, as a row of the log, and its requests."""
        row = self.world.batch_row[self._row[s, slot]]
        return row, self.world.request_row["request"][row["first"] :][: row["images"]].copy()

    def shed(self) -> list[int]:
        """Return the requests that were shed since the last call."""
        found, r = [], int(self.world.trace["shed"][0])
        while r >= 0:
            found.append(r)
            r = int(self.world.request["next"][r])
        self.world.trace["shed"] = -1
        return found

    def lose(self, s: int, now: int) -> list[tuple[int, int]]:
        """Remove a dead server; return its requests and the segments that they need."""
        world, core = self.world, self.world.core
        busy = core.instance[s][core.instance[s]["state"] == BUSY]
        found = []
        for b in [*core.queue["head"][s].tolist(), *busy["first"].tolist()]:
            while b >= 0:
                block, r = core.block[b], int(core.block[b]["first"])
                for _ in range(block["images"]):
                    found.append((r, int(block["segment"])))
                    r = int(world.request[r]["next"])
                following, block["next"] = int(block["next"]), core.state["free_block"][0]
                core.state["free_block"], b = b, following
        self._row = {at: row for at, row in self._row.items() if at[0] != s}
        rows = world.instance_row[: world.trace["instances"][0]]
        resident = (rows["server"] == s) & (rows["unload"] < 0)
        rows["unload"][resident] = now
        rows["ready"][resident] = np.minimum(rows["ready"][resident], now)
        load = min(int(core.server["load"][s]), UNIT)
        world.trace["load"] -= load
        world.trace["squares"] -= load * load
        core.server[s], core.instance[s], core.queue[s] = 0, 0, -1
        core.server["wake"][s] = NEVER
        alive = np.arange(len(core.server)) != s
        able = frozen(world.feasible & alive[:, None, None])
        capacity = {key: doubled(getattr(world, key)) for key in ("batch_row", "request_row")}
        self._use(world._replace(feasible=able, **capacity))
        return sorted(found)

    def log(self, end: int | None, provenance: dict[str, Any]) -> tuple[Log, int]:
        """Return the log, without unfinished batches, and the objective; `end`: of a cut run."""
        trace, world = self.world.trace[0], self.world
        batches = world.batch_row[: trace["batches"]]
        kept = batches["end"] != _PENDING
        entries = world.request_row[: trace["entries"]][np.repeat(kept, batches["images"])]
        batches = batches[kept]
        batches["first"] = np.cumsum(batches["images"]) - batches["images"]
        instances = world.instance_row[: trace["instances"]]
        summary, cost = totals(self.scenario, world, end, energy=False)
        log = Log(
            self.scenario, batches, entries, instances, shed_rows(world), summary, end, provenance,
            True,
        )  # fmt: skip
        return log, cost


@dataclass(frozen=True, eq=False)
class LiveRun(Run):
    """Run of real requests; times are measured from the start of the trace.

    `outputs` are class scores by request, NaN for requests that were not completed. The accuracy of
    `summary` is that of the scenario's table for the widths of every request; `accuracy` measures
    it on the outputs.
    """

    outputs: Tensor

    def accuracy(self, labels: Tensor) -> float | None:
        """Return the percentage of completed requests whose highest score is at their label.

        Parameters
        ----------
        labels
            Class of every request's image, integers of shape (requests,).
        """
        given = torch.as_tensor(labels)
        if given.shape != self.outputs.shape[:1] or given.is_floating_point():
            raise InputError(
                f"labels: expected {len(self.outputs)} integers, one a request, got {given.dtype} "
                f"of shape {tuple(given.shape)}"
            )
        done = ~self.outputs.isnan().any(1)
        right = self.outputs[done].argmax(1) == given[done]
        return 100 * right.double().mean().item() if done.any() else None


class RequestsLost(OptschedError):
    """Servers died with requests that could not be served; the run so far is in ``.run``."""

    def __init__(self, message: str, run: LiveRun) -> None:
        super().__init__(message)
        self.run = run


class Executor:
    """Serves the requests of a scenario with a network, in real time.

    Parameters
    ----------
    net, scenario
        A network, and a scenario with its measured costs (`Costs.scenario`). Decisions and links
        take their real time, not that of the scenario.
    router, plan, settings, seed
        See `simulate`.
    devices
        Device of every server, see `Servers`; None: the CPU cores, divided evenly.
    """

    def __init__(
        self,
        net: SlimResNet,
        scenario: Scenario,
        router: AnyRouter | None = None,
        plan: Plan | None = None,
        settings: Settings | None = None,
        devices: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(scenario, Scenario):
            raise InputError(f"scenario: expected a Scenario, got {scenario!r:.60}")
        same = len(net.channels) == scenario.n_segments
        if not same or not np.array_equal(scenario.widths, net.widths):
            raise InputError(
                f"net: {len(net.channels)} segments of widths {net.widths}, the scenario has "
                f"{scenario.n_segments} of {scenario.widths}"
            )
        self.net, self.scenario = net, scenario
        self.devices = ["cpu"] * len(scenario.servers) if devices is None else devices
        if len(parse_devices(self.devices)) != len(scenario.servers):
            raise InputError(f"devices: {len(self.devices)} for {len(scenario.servers)} servers")
        self._given = scenario, router, plan, settings, seed
        Controller(*self._given)  # validates router and plan

    def run(
        self, images: Tensor, on_progress: Callable[[int, int], object] | None = None
    ) -> LiveRun:
        """Serve one image per request, each at its arrival time.

        The first Ctrl-C stops the arrivals and completes the requests that have arrived; a second
        one ends the run. Requests of a server that dies are queued once more.

        Parameters
        ----------
        images
            Shape (requests, channels, side, side).
        on_progress
            Called about ten times a second with the numbers of completed and of all requests.

        Raises
        ------
        RequestsLost
            Requests lost their server twice, or no server is left.
        ServerFailed
            A server did not start, or an instance failed.
        """
        given = torch.as_tensor(images)
        n, side = self.scenario.n_requests, given.shape[-1] if given.ndim else 0
        if given.shape != (n, self.net.in_channels, side, side) or not given.is_floating_point():
            raise InputError(
                f"images: expected floats of shape ({n}, {self.net.in_channels}, side, side), one "
                f"image a request, got {given.dtype} of shape {tuple(given.shape)}"
            )
        for k, rows in enumerate(self.net.mmac(max(side, 1))):
            if not np.allclose(self.scenario.mmac[k], rows, rtol=1e-6):
                raise InputError(
                    f"net: segment {k} takes {rows[-1][-1]:g} MMAC at side {side}, in the scenario "
                    f"{self.scenario.mmac[k, -1, -1]:g}: that is of another net or image size"
                )
        with Servers(self.net, self.devices, side, n) as servers:
            # NumPy only: torch's threads would spin on the cores of the servers
            pixels = given.detach().to("cpu", torch.float32).flatten(1).numpy()
            return _Replay(servers, pixels, *self._given).run(on_progress)


class _Replay(Controller):
    """One run: replays the arrivals and sends the commands of the cores to the servers."""

    def __init__(self, servers: Servers, images: FloatArray, *given: Any) -> None:
        super().__init__(*given)
        self.servers, self.images, self.memory = servers, images, servers.memory.numpy()
        self.outputs = np.full((len(images), servers.net.classes), np.nan, np.float32)
        self.free = list(range(servers.rows))  # rows of the shared memory
        self.place = np.zeros(len(images), np.int64)  # row of every request
        self.last = len(images)  # arrivals stop after this many requests
        self.died: list[int | str] = []
        self.again: set[int] = set()  # requests that were queued once more
        self.origin = 0

    def run(self, on_progress: Callable[[int, int], object] | None) -> LiveRun:
        """Serve until all arrived requests are completed."""
        trace, reported = self.world.trace[0], 0
        slots = np.argwhere(self.world.core.instance["state"]).tolist()
        self.servers.run([(s, i, self._loading(s, i)) for s, i in slots])  # the plan's
        with without_collector(), _on_interrupt(self._stop):
            self.origin = time.perf_counter_ns()
            while trace["completed"] < self.last:
                self._step()
                if on_progress is not None and self._now() > reported + _POLL * 1e9:
                    reported = self._now()
                    on_progress(int(trace["completed"]), len(self.images))
        return self._result()

    def _stop(self) -> None:
        self.last = int(self.world.trace[0]["arrived"])

    def _now(self) -> int:
        return time.perf_counter_ns() - self.origin

    def _step(self) -> None:
        """Wait for the next event, then process all that are due."""
        arrival, wake = self.scenario.arrival, self.world.core.server["wake"]
        r, due = int(self.world.trace[0]["arrived"]), int(wake.min())
        if r < self.last and self.free:
            due = min(due, int(arrival[r]))
        wait = (due - self._now()) / 1e9 - _WAKE_UP
        for s, slot in self.servers.receive(min(max(0, wait), _POLL)):
            if slot < 0:
                self._lose(s)
            else:
                self._ended(s, slot)
        while r < self.last and self.free and arrival[r] <= self._now():
            self.place[r] = row = self.free.pop()
            self.memory[0, row, : self.images.shape[1]] = self.images[r]
            self._process(ARRIVE, 0, r)
            r += 1
        for s in np.flatnonzero(wake <= self._now()).tolist():
            self._process(TICK, s, 0)
        while self.waiting:
            self._process(ROUTE, 0, 0)

    def _process(self, event: int, s: int, which: int) -> None:
        """Pass an event to the controller, and its commands to the servers."""
        commands = self.feed(event, s, which, self._now())
        self.free += self.place[self.shed()].tolist()
        for kind, to, slot, _ in commands:
            if kind == RUN:
                row, requests = self.batch(to, slot)
                rows, inputs = self.place[requests], self.world.request["width"][requests]
                parts = [(i, rows[inputs == i].tolist()) for i in sorted({*inputs.tolist()})]
                task = ("run", int(row["segment"]), int(row["width"]), parts)
                self.servers.send(to, slot, task)
            elif kind == LOAD:
                self.servers.send(to, slot, self._loading(to, slot))
            elif kind == UNLOAD:
                self.servers.send(to, slot, ("unload",))

    def _loading(self, s: int, slot: int) -> Task:
        instance = self.world.core.instance[s, slot]
        return ("load", int(instance["segment"]), int(instance["width"]))

    def _ended(self, s: int, slot: int) -> None:
        """Process the end of a task; copy the scores of completed requests."""
        state = int(self.world.core.instance[s, slot]["state"])
        if state == BUSY:
            row, requests = self.batch(s, slot)
            if row["segment"] == self.scenario.n_segments - 1:
                rows = self.place[requests]
                scores = self.memory[self.scenario.n_segments % 2, :, : self.outputs.shape[1]]
                self.outputs[requests] = scores[rows]
                self.free += rows.tolist()
        self._process({BUSY: DONE, LOADING: LOADED}.get(state, UNLOADED), s, slot)

    def _lose(self, s: int) -> None:
        """Queue the requests of a dead server once more."""
        found = self.lose(s, self._now())
        self.died.append(self.scenario.servers[s].id)
        if not self.servers.alive:
            self.died = [server.id for server in self.scenario.servers]
            self._fail("no server is left")
        if lost := [repr(self.scenario.ids[r]) for r, _ in found if r in self.again]:
            self._fail(f"requests lost their server twice: {shortened(lost)}")
        for r, segment in found:
            self.again.add(r)
            self._process(REQUEUE, segment, r)

    def _result(self) -> LiveRun:
        request = self.world.request
        cut = self._now() if ((request["finish"] < 0) & (request["shed"] < 0)).any() else None
        log, cost = self.log(cut, {"died": self.died} if self.died else {})
        outputs = torch.from_numpy(self.outputs)
        return LiveRun(
            self.scenario, log, log.summary, cost, request["finish"], request["tuple"], outputs
        )

    def _fail(self, reason: str) -> None:
        """Raise `RequestsLost` with the names of the requests."""
        request = self.world.request
        open_ = np.flatnonzero((request["finish"] < 0) & (request["shed"] < 0)).tolist()
        ids = [repr(self.scenario.ids[r]) for r in open_]
        raise RequestsLost(
            f"servers died ({', '.join(map(repr, self.died))}), {reason}; requests that are not "
            f"done: {shortened(ids, 10)}", self._result(),
        )  # fmt: skip


@contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C and restore the handler for the second."""

    def once(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, once) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
