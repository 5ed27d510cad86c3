"""Serve real requests: the router and cores of the simulator, real time, a real network."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.io.strict_json import shortened, without_collector
from optsched.io.values import frozen
from optsched.serving import core, simulator, world
from optsched.serving.log import Log
from optsched.serving.routers import InfeasibleRoute, MarginalCost, View
from optsched.serving.scenario import Scenario
from optsched.serving.simulator import Run, doubled, infeasible, new_world
from optsched.serving.tables import NEVER, SLOTS

try:
    import torch
except ImportError:
    raise MissingExtra("the executor", "serving") from None

from optsched.serving.network import work_of
from optsched.serving.server_process import Servers, parse_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from optsched.serving.network import Segmented
    from optsched.serving.plan import Plan
    from optsched.serving.routers import AnyRouter
    from optsched.serving.scenario import Settings
    from optsched.serving.server_process import Task

_POLL: Final = 0.1  # longest wait in seconds, between calls of on_progress
_GAIN: Final = 1 / 4096  # share of its deadline by which a wasted request delays all others
_WASTE: Final = 0.1  # requests answered late or shed after a segment, for one answered in time
_WAKE_UP: Final = 3e-4  # seconds before an arrival that are not slept: waking up takes as long

Command = tuple[int, int, int, int]
"""Kind, server, slot, until; see `core.COMMAND`."""

_PENDING: Final = -1  # end of a batch that is running


class RequestsLost(OptschedError):
    """Servers died with requests, or the network failed on them; of a replay, ``.run`` is the run.

    Examples
    --------
    >>> optsched.serving.RequestsLost("server 0 died").run is None  # of a live server
    True
    """

    run: LiveRun | None = None


class DeadlineMissed(OptschedError):
    """A request was shed: by its expected end it could not be answered in time.

    Examples
    --------
    >>> try:
    ...     answer = server.submit(image, deadline=5).result()  # doctest: +SKIP
    ... except optsched.serving.DeadlineMissed:
    ...     answer = None
    """


class Batch(NamedTuple):
    """A batch that is running: row in the log, segment, width and its requests."""

    row: int
    segment: int
    width: int
    requests: Any


class Controller:
    """Passes events of an external clock to the kernels of the simulator.

    `given` are router, plan, settings and seed, see `simulate`. Without `keep`, rows of the log are
    used again.
    """

    def __init__(self, scenario: Scenario, router: Any = None, *given: Any, keep: bool = True):
        self.scenario, self.router = scenario, MarginalCost() if router is None else router
        self.keep = keep
        self.waiting = False  # whether requests wait at the router: `ROUTE` is possible
        self.batches: dict[tuple[int, int], Batch] = {}
        """Running batches by server and slot."""
        self.busy = np.zeros(len(scenario.servers), np.int64)  # ns of batches
        found = new_world(scenario, self.router, *given, log=True)
        self._use(found._replace(transfer=frozen(0 * found.transfer)))  # links take real time
        world.feed.prepare()  # type: ignore[attr-defined]

    def _use(self, state: world.World) -> None:
        self.world, self.view = state, View(self.scenario, state)

    def feed(self, event: int, s: int, which: int, now: int) -> list[Command]:
        """Process one event (see `world.feed`) and return the commands of the core."""
        self._reserve()
        state, trace = self.world, self.world.trace[0]
        if event == core.DONE:
            batch = self.batches.pop((s, which))
            row = state.batch_row[batch.row]
            row["end"] = now
            self.busy[s] += now - row["start"]
            self._adapt(s, now - int(state.core.instance["until"][s, which]))
            if batch.segment == self.scenario.n_segments - 1:
                self._admit(batch.requests, (state.deadline[batch.requests] < now) - _WASTE)
        elif event in (core.LOADED, core.UNLOADED):  # replaces the time predicted by the model
            column = "ready" if event == core.LOADED else "unload"
            state.instance_row[column][state.core.instance["row"][s, which]] = now
        status = world.feed(state, event, s, which, now)
        while status == world.UNDECIDED:
            simulator.query(self.scenario, self.router, self.view, state)
            status = world.feed(state, world.ROUTE, 0, 0, now)
        if status == world.INFEASIBLE:
            raise InfeasibleRoute(infeasible(self.scenario, state))
        self.waiting = status == world.ENDED
        commands: list[Command] = state.core.command[: state.core.state[0]["commands"]].tolist()
        slots = [(to, slot) for kind, to, slot, _ in commands if kind == core.RUN]
        first = int(trace["batches"]) - len(slots)
        for row, at in enumerate(slots, first):
            one = state.batch_row[row]
            requests = state.request_row["request"][one["first"] :][: one["images"]].copy()
            self.batches[at] = Batch(row, int(one["segment"]), int(one["width"]), requests)
            one["end"] = _PENDING
        return commands

    def _adapt(self, s: int, late: int) -> None:
        """Correct the launch time that decisions use by the delay of a batch; at most 4 times."""
        least, launch = int(self.scenario.launch[s]), self.world.core.server["launch"]
        launch[s] = min(max(least, int(launch[s]) + min(max(late, -least), least) // 8), 4 * least)

    def _admit(self, requests: Any, wrong: Any) -> bool:
        """Correct the time of later segments by wasted work; True if no batch has a deadline."""
        trace, due, least = self.world.trace[0], self.world.deadline, self.scenario.router
        slack = np.where(due[requests] < NEVER, due[requests] - self.world.arrival[requests], 0)
        more = trace["router"] - least + (_GAIN * trace["sheds"] * slack * wrong).sum()
        idle = all(due[one.requests].min() == NEVER for one in self.batches.values())
        trace["router"] = least + max(0, more * 7 // 8 if idle else more)
        return idle

    def arrive(self, r: int, now: int) -> None:
        """Process the arrival of a request: it has no commands."""
        world.feed(self.world, world.ARRIVE, 0, r, now)
        self.waiting = True

    def _reserve(self) -> None:
        """Make space for the rows of one event."""
        state, trace = self.world, self.world.trace[0]
        if trace["instances"] + SLOTS > len(state.instance_row):
            if self.keep:
                self._use(state._replace(instance_row=doubled(state.instance_row)))
            else:
                trace["instances"] = 0
        if not self.keep:
            full = trace["batches"] + SLOTS > len(state.batch_row)
            if full or trace["entries"] + len(state.request) > len(state.request_row):
                trace["batches"] = trace["entries"] = 0

    def shed(self) -> list[int]:
        """Return the requests that were shed since the last call."""
        found, r = [], int(self.world.trace["shed"][0])
        while r >= 0:
            found.append(r)
            r = int(self.world.request["next"][r])
        self.world.trace["shed"] = -1
        if found:  # without batches, values that are too high would never fall
            idle = self._admit(found, self.world.request["server"][found] >= 0)
            share, launch = max(len(found), 512 * idle), self.world.core.server["launch"]
            launch -= (launch - self.scenario.launch) * min(share, 4096) // 4096
        return found

    def lose(self, s: int, now: int) -> list[tuple[int, int]]:
        """Remove a dead server; return its requests and the segments that they need."""
        state = self.world
        blocks, instances = state.core.block, state.core.instance[s]
        busy = instances[instances["state"] == core.BUSY]
        found = []
        for b in [*state.core.queue["head"][s].tolist(), *busy["first"].tolist()]:
            while b >= 0:
                block, r = blocks[b], int(blocks[b]["first"])
                for _ in range(block["images"]):
                    found.append((r, int(block["segment"])))
                    r = int(state.request[r]["next"])
                following, block["next"] = int(block["next"]), state.core.state["free_block"][0]
                state.core.state["free_block"], b = b, following
        self.batches = {at: one for at, one in self.batches.items() if at[0] != s}
        rows = state.instance_row[: state.trace["instances"][0]]
        resident = (rows["server"] == s) & (rows["unload"] < 0)
        rows["unload"][resident] = now
        rows["ready"][resident] = np.minimum(rows["ready"][resident], now)
        server = state.core.server
        load = min(int(server["load"][s]), core.UNIT)
        state.trace["load"] -= load
        state.trace["squares"] -= load * load
        server[s], state.core.instance[s], state.core.queue[s] = 0, 0, -1
        server["wake"][s] = NEVER
        able = frozen(state.feasible & (np.arange(len(server)) != s)[:, None, None])
        capacity = {key: doubled(getattr(state, key)) for key in ("batch_row", "request_row")}
        self._use(state._replace(feasible=able, **(capacity if self.keep else {})))
        return sorted(found)

    def log(self, end: int | None, provenance: dict[str, Any]) -> tuple[Log, int]:
        """Return the log, without unfinished batches, and the objective; `end`: of a cut run."""
        trace, state = self.world.trace[0], self.world
        batches = state.batch_row[: trace["batches"]]
        kept = batches["end"] != _PENDING
        entries = state.request_row[: trace["entries"]][np.repeat(kept, batches["images"])]
        batches = batches[kept]
        batches["first"] = np.cumsum(batches["images"]) - batches["images"]
        summary, cost = simulator.totals(self.scenario, state, end, energy=False)
        log = Log(
            self.scenario, batches, entries, state.instance_row[: trace["instances"]],
            simulator.shed_rows(state), summary, end, provenance, True,
        )  # fmt: skip
        return log, cost


@dataclass(frozen=True, eq=False, repr=False)
class LiveRun(Run):
    """Run of real requests; times are measured from the start of the trace.

    `outputs` are class scores by request, NaN for requests that were not completed. The accuracy of
    `summary` is that of the scenario's table for the widths of every request; `accuracy` measures
    it on the outputs.
    """

    outputs: Tensor

    def accuracy(self, labels: Tensor) -> float | None:
        """Return the percentage of completed requests with the highest score at their label."""
        given = torch.as_tensor(labels)
        if given.shape != self.outputs.shape[:1] or given.is_floating_point():
            raise InputError(
                f"labels: expected {len(self.outputs)} integers, one a request, got {given.dtype} "
                f"of shape {tuple(given.shape)}"
            )
        done = ~self.outputs.isnan().any(1)
        right = self.outputs[done].argmax(1) == given[done]
        return 100 * right.double().mean().item() if done.any() else None


class Executor:
    """Serves requests with a network, in real time: of a scenario, or submitted by threads.

    Parameters
    ----------
    net, scenario
        A network (see `Segmented`), and a scenario with its measured costs (`Costs.scenario`).
        Decisions and links take their real time, not that of the scenario.
    router, plan, settings, seed
        See `simulate`.
    devices
        Device of every server, see `Servers`; None: the CPU cores, divided evenly.

    Examples
    --------
    >>> from optsched import serving
    >>> net = serving.SlimResNet(100, channels=(32, 32, 32, 32))
    >>> executor = serving.Executor(net, serving.reference(rate=50, seconds=0.1))
    >>> executor.devices
    ['cpu', 'cpu', 'cpu']
    """

    def __init__(
        self,
        net: Segmented,
        scenario: Scenario,
        router: AnyRouter | None = None,
        plan: Plan | None = None,
        settings: Settings | None = None,
        devices: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(scenario, Scenario):
            raise InputError(f"scenario: expected a Scenario, got {scenario!r:.60}")
        if not hasattr(net, "segments") or not hasattr(net, "widths"):
            raise InputError(
                f"net: expected a module with segments and widths, got {type(net).__name__}"
            )
        same = len(net.segments) == scenario.n_segments
        if not same or not np.array_equal(scenario.widths, net.widths):
            raise InputError(
                f"net: {len(net.segments)} segments of widths {net.widths}, the scenario has "
                f"{scenario.n_segments} of {scenario.widths}"
            )
        self.net, self.scenario = net, scenario
        self.devices = ["cpu"] * len(scenario.servers) if devices is None else devices
        if len(parse_devices(self.devices)) != len(scenario.servers):
            raise InputError(f"devices: {len(self.devices)} for {len(scenario.servers)} servers")
        self.given = router, plan, settings, seed
        Controller(scenario, *self.given)  # validates router and plan

    def servers(self, shape: Sequence[int], rows: int) -> Servers:
        """Prepare the servers for images of this shape."""
        for k, one in enumerate(work_of(self.net, shape)):
            if not np.allclose(self.scenario.mmac[k], one, rtol=1e-6):
                raise InputError(
                    f"net: segment {k} takes {one[-1][-1]:g} MMAC for images of shape "
                    f"{tuple(shape)}, in the scenario {self.scenario.mmac[k, -1, -1]:g}: that is "
                    "of another net or image size"
                )
        return Servers(self.net, self.devices, shape, rows)

    def run(
        self, images: Tensor, on_progress: Callable[[int, int], object] | None = None
    ) -> LiveRun:
        """Serve one image per request, each at its arrival time.

        The first Ctrl-C stops the arrivals and completes the requests that have arrived; a second
        one ends the run. Requests of a server that dies are queued once more.

        Parameters
        ----------
        images
            Shape (requests, ...).
        on_progress
            Called about ten times a second with the numbers of completed and of all requests.

        Raises
        ------
        RequestsLost
            Requests lost their server twice, or no server is left.
        ServerFailed
            A server did not start.
        """
        given, n = torch.as_tensor(images), self.scenario.n_requests
        if given.ndim < 2 or len(given) != n or not given.is_floating_point():
            raise InputError(
                f"images: expected floats of shape ({n}, ...), one image a request, got "
                f"{given.dtype} of shape {tuple(given.shape)}"
            )
        with self.servers(given.shape[1:], n) as servers:
            # NumPy only: torch's threads would spin on the cores of the servers
            pixels = given.detach().to("cpu", torch.float32).flatten(1).numpy()
            return _Replay(servers, pixels, self.scenario, *self.given).run(on_progress)


class Loop(Controller):
    """Passes commands of the cores to the servers, and the ends of tasks to the controller."""

    next_arrival = NEVER  # time at which `accept` is to be called

    def __init__(self, servers: Servers, *given: Any, keep: bool) -> None:
        super().__init__(*given, keep=keep)
        self.servers, self.memory = servers, servers.memory.numpy()
        self.free = list(range(servers.rows))  # rows of the shared memory
        self.place = np.arange(self.scenario.n_requests)  # row of every request
        self.again: set[int] = set()  # requests that were queued once more
        self.outputs = servers.shapes[-1][-1]
        slots = np.argwhere(self.world.core.instance["state"]).tolist()
        servers.run([(s, i, self._loading(s, i)) for s, i in slots])  # the plan's
        self.origin = time.perf_counter_ns()

    @property
    def died(self) -> list[int | str]:
        """Return the servers that have died."""
        alive = self.servers.alive
        return [one.id for s, one in enumerate(self.scenario.servers) if s not in alive]

    def now(self) -> int:
        """Return the time since the start, ns."""
        return time.perf_counter_ns() - self.origin

    def accept(self) -> None:
        """Process the requests that have arrived."""
        raise NotImplementedError

    def answer(self, requests: Any, outputs: Any) -> None:
        """Deliver outputs, by request; their rows are free."""
        raise NotImplementedError

    def refuse(self, requests: list[int], error: OptschedError) -> None:
        """Deliver the error of requests."""

    def step(self) -> None:
        """Wait for the next event, then process all that are due."""
        wake = self.world.core.server["wake"]
        wait = (min(int(wake.min()), self.next_arrival) - self.now()) / 1e9 - _WAKE_UP
        for s, slot in self.servers.receive(min(max(0, wait), _POLL)):
            if slot < 0:
                self._lose(s)
            else:
                self._end(s, slot)
        self.accept()
        for s in np.flatnonzero(wake <= self.now()).tolist():
            self.process(core.TICK, s, 0)
        while self.waiting:
            self.process(world.ROUTE, 0, 0)

    def process(self, event: int, s: int, which: int) -> None:
        """Pass an event to the controller, and its commands to the servers."""
        commands = self.feed(event, s, which, self.now())
        if dropped := self.shed():
            self._vacate(dropped)
            self.refuse(dropped, DeadlineMissed("the request could not be answered in time"))
        for kind, to, slot, _ in commands:
            if kind == core.RUN:
                batch = self.batches[to, slot]
                rows = self.place[batch.requests]
                inputs = self.world.request["width"][batch.requests]
                parts = [(i, rows[inputs == i].tolist()) for i in sorted({*inputs.tolist()})]
                self.servers.send(to, slot, ("run", batch.segment, batch.width, parts))
            elif kind == core.LOAD:
                self.servers.send(to, slot, self._loading(to, slot))
            elif kind == core.UNLOAD:
                self.servers.send(to, slot, ("unload",))

    def _loading(self, s: int, slot: int) -> Task:
        instance = self.world.core.instance[s, slot]
        return ("load", int(instance["segment"]), int(instance["width"]))

    def _end(self, s: int, slot: int) -> None:
        """Process the end of a task; deliver the outputs of completed requests."""
        state = int(self.world.core.instance[s, slot]["state"])
        event = {core.BUSY: core.DONE, core.LOADING: core.LOADED}.get(state, core.UNLOADED)
        batch = self.batches[s, slot] if state == core.BUSY else None
        self.process(event, s, slot)
        if batch is not None and batch.segment == self.scenario.n_segments - 1:
            rows, n = self.place[batch.requests], int(np.prod(self.outputs))
            outputs = self.memory[self.scenario.n_segments % 2, :, :n][rows]
            errors = [self.servers.failed.get(row) for row in rows.tolist()]
            self._vacate(batch.requests.tolist())
            for r, text in zip(batch.requests.tolist(), errors, strict=True):
                if text is not None:
                    self.refuse([r], RequestsLost(f"the network failed: {text}"))
            right = np.array([text is None for text in errors])
            self.answer(batch.requests[right], outputs[right])

    def _vacate(self, requests: list[int]) -> None:
        """Make the rows of requests free."""
        self.again.difference_update(requests)
        self.free += (rows := self.place[requests].tolist())
        for row in rows:
            self.servers.failed.pop(row, None)

    def _lose(self, s: int) -> None:
        """Queue the requests of a dead server once more."""
        found = self.lose(s, self.now())
        if not self.servers.alive:
            raise RequestsLost(self.deaths("no server is left"))
        lost = [r for r, _ in found if r in self.again]
        self.world.trace["completed"] += len(lost)
        self._vacate(lost)
        self.refuse(lost, RequestsLost(self.deaths("the request lost its server twice")))
        for r, segment in found:
            if r not in lost:
                self.again.add(r)
                self.process(world.REQUEUE, segment, r)

    def deaths(self, reason: str) -> str:
        """Return a message for `RequestsLost`."""
        errors = "".join(f"; server {s}: {text}" for s, text in self.servers.errors.items())
        return f"servers died ({', '.join(map(repr, self.died))}), {reason}{errors}"


class _Replay(Loop):
    """One run of the requests of a scenario."""

    def __init__(self, servers: Servers, images: Any, *given: Any) -> None:
        super().__init__(servers, *given, keep=True)
        self.images = images
        self.scores = np.full((len(images), int(np.prod(self.outputs))), np.nan, np.float32)
        self.last = len(images)  # arrivals stop after this many requests
        self.error: RequestsLost | None = None

    def run(self, on_progress: Callable[[int, int], object] | None) -> LiveRun:
        """Serve until all arrived requests are completed."""
        trace, reported = self.world.trace[0], 0
        with without_collector(), _on_interrupt(self._stop):
            self.origin = time.perf_counter_ns()
            while trace["completed"] < self.last:
                try:
                    self.step()
                except RequestsLost as error:
                    self.error = error
                    break
                if on_progress is not None and self.now() > reported + _POLL * 1e9:
                    reported = self.now()
                    on_progress(int(trace["completed"]), len(self.images))
        request = self.world.request
        open_ = np.flatnonzero((request["finish"] < 0) & (request["shed"] < 0)).tolist()
        cut = self.now() if open_ else None
        log, cost = self.log(cut, {"died": self.died} if self.died else {})
        outputs = torch.from_numpy(self.scores).unflatten(1, self.outputs)
        run = LiveRun(
            self.scenario, log, log.summary, cost, request["finish"], request["tuple"], outputs
        )
        if self.error is None:
            return run
        open_ = np.flatnonzero(np.isnan(self.scores).all(1) & (request["shed"] < 0)).tolist()
        names = shortened([repr(self.scenario.ids[r]) for r in open_], 10)
        lost = RequestsLost(f"{self.error}; requests that are not done: {names}")
        lost.run = run
        raise lost

    def _stop(self) -> None:
        self.last = int(self.world.trace[0]["arrived"])

    @property
    def next_arrival(self) -> int:  # type: ignore[override]
        """Arrival of the next request, if there is a row for it."""
        r = int(self.world.trace[0]["arrived"])
        return int(self.scenario.arrival[r]) if r < self.last and self.free else NEVER

    def accept(self) -> None:
        """Process the requests that have arrived."""
        while self.next_arrival <= self.now():
            r = int(self.world.trace[0]["arrived"])
            self.place[r] = row = self.free.pop()
            self.memory[0, row, : self.images.shape[1]] = self.images[r]
            self.arrive(r, self.now())

    def answer(self, requests: Any, outputs: Any) -> None:
        """Store outputs."""
        self.scores[requests] = outputs

    def refuse(self, requests: list[int], error: OptschedError) -> None:
        """Report the loss of requests at the end."""
        if requests and isinstance(error, RequestsLost):
            self.error = error


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
