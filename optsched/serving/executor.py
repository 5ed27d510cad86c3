"""Serve real requests: the simulator's router and cores, real time, a real network."""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError, MissingExtra, OptschedError
from optsched.io.strict_json import shortened, without_collector
from optsched.problems.routing import Routing
from optsched.problems.routing.checks import frozen
from optsched.problems.routing.log import Log
from optsched.problems.routing.plan import SLOTS
from optsched.serving.core import BUSY, DONE, LOAD, LOADED, LOADING, RUN, TICK, UNLOAD, UNLOADED
from optsched.serving.routers import InfeasibleRoute, Router, View
from optsched.serving.server_process import Servers, parse_devices
from optsched.serving.simulator import Run, ask, infeasible, new_world, simulate, twice
from optsched.serving.world import ARRIVE, ASKED, ENDED, INFEASIBLE, REQUEUE, ROUTE, advance, feed

try:
    import torch
except ImportError:
    raise MissingExtra("the executor", "serving") from None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from optsched.problems.routing.plan import Plan
    from optsched.problems.routing.problem import FloatArray
    from optsched.serving.core import Settings
    from optsched.serving.network import SlimResNet
    from optsched.serving.routers import OwnRouter
    from optsched.serving.server_process import Task

LOST: Final = ROUTE + 1
"""Besides the events of `world.feed`: a server has died."""

_BREATH: Final = 0.1  # seconds after which progress is told and an interrupt seen at the latest
_AWAKE: Final = 3e-4  # seconds before an arrival that are not slept: waking up takes as long

Event = tuple[int, int, int, int]
"""Event, server, which, now, see `world.feed`; kind, server, slot, until, see `core.COMMAND`."""


class Controller:
    """The simulator's compiled functions in time that somebody else tells.

    `given` are plan, settings and seed, see `simulate`.
    """

    def __init__(self, problem: Routing, router: Any = None, *given: Any) -> None:
        self.problem, self.router = problem, Router() if router is None else router
        self.events: list[Event] = []
        self.commands: list[Event] = []
        self.waiting = False  # whether requests wait at the router: `ROUTE` is possible
        self._row: dict[tuple[int, int], int] = {}  # of the batch that a slot runs
        self._use(new_world(problem, self.router, *given, log=True))
        advance.prepare()  # type: ignore[attr-defined]

    def _use(self, world: Any) -> None:
        self.world, self.view = world, View(self.problem, world)

    def feed(self, event: int, s: int, which: int, now: int) -> list[Event]:
        """Let one thing happen, and return what the core commands."""
        if self.world.trace["instances"][0] + SLOTS > len(self.world.instance_row):
            self._use(self.world._replace(instance_row=twice(self.world.instance_row)))
        world, core = self.world, self.world.core
        if event == DONE:
            world.batch_row["end"][self._row.pop((s, which))] = now
        elif event in (LOADED, UNLOADED):  # the model's time is replaced
            column = "ready" if event == LOADED else "unload"
            world.instance_row[column][core.instance["row"][s, which]] = now
        status = feed(world, event, s, which, now)
        if status == ASKED:
            ask(self.problem, self.router, self.view, world)
            status = feed(world, ROUTE, 0, 0, now)
        self.events.append((event, s, which, now))
        if status == INFEASIBLE:
            raise InfeasibleRoute(infeasible(self.problem, world))
        self.waiting = status == ENDED
        given: list[Event] = core.command[: core.state[0]["commands"]].tolist()
        self.commands += given
        runs = [command[1:3] for command in given if command[0] == RUN]
        first = int(world.trace[0]["batches"]) - len(runs)
        self._row |= {at: first + j for j, at in enumerate(runs)}
        world.batch_row["end"][first : first + len(runs)] = -1  # until it is done
        return given

    def batch(self, s: int, slot: int) -> tuple[Any, Any]:
        """What an instance runs: a row of the log, and the requests."""
        row = self.world.batch_row[self._row[s, slot]]
        return row, self.world.request_row["request"][row["first"] :][: row["images"]].copy()

    def lose(self, s: int, now: int) -> list[tuple[int, int]]:
        """A server has died: nothing more goes there; its requests, and the segments they need."""
        world, core = self.world, self.world.core
        self.events.append((LOST, s, 0, now))
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
        there = world.instance_row[: world.trace["instances"][0]]
        gone = (there["server"] == s) & (there["unload"] < 0)
        there["unload"][gone] = now
        there["ready"][gone] = np.minimum(there["ready"][gone], now)
        core.server[s], core.instance[s], core.queue[s] = 0, 0, -1
        core.server["wake"][s] = 2**62  # never
        able = frozen(world.feasible & (np.arange(len(core.server)) != s)[:, None, None])
        rows = {key: twice(getattr(world, key)) for key in ("batch_row", "request_row")}
        self._use(world._replace(feasible=able, **rows))
        return sorted(found)

    def log(self, end: int | None, provenance: dict[str, Any]) -> Log:
        """The history, without batches that were not done; `end`: when it was cut off."""
        trace, world = self.world.trace[0], self.world
        batches = world.batch_row[: trace["batches"]]
        kept = batches["end"] >= 0
        entries = world.request_row[: trace["entries"]][np.repeat(kept, batches["images"])]
        batches = batches[kept]
        batches["first"] = np.cumsum(batches["images"]) - batches["images"]
        instances, decisions = world.instance_row[: trace["instances"]], int(trace["decisions"])
        return Log(self.problem, batches, entries, instances, decisions, end, provenance, True)


@dataclass(frozen=True, eq=False)
class LiveRun(Run):
    """A history of real requests; times are measured from the start of the trace.

    `outputs` are class scores by request, NaN where there are none; `accuracy` judges them. The
    accuracy of `summary` is what the scenario's table gives for the widths that were run. A
    `Controller` that is fed the `events` again gives the same `commands`, bit for bit.
    """

    outputs: Tensor
    events: list[Event]
    commands: list[Event]

    def accuracy(self, labels: Tensor) -> float | None:
        """Percent of the requests served whose highest output is their label; None without any.

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
    """Servers have died, and requests with them; the history of the others is in ``.run``."""

    def __init__(self, message: str, run: LiveRun) -> None:
        super().__init__(message)
        self.run = run


class Executor:
    """Serves a scenario's requests with a network, in real time.

    Parameters
    ----------
    net, problem
        Measured costs and arrivals (`scenario`), and the network of its segments and widths.
        Decisions and links take the time that they take, not the scenario's.
    router, plan, settings, seed
        See `simulate`.
    devices
        Where every server runs, see `Servers`; None: CPU cores, shared out evenly.
    """

    def __init__(
        self,
        net: SlimResNet,
        problem: Routing,
        router: Router | OwnRouter | None = None,
        plan: Plan | None = None,
        settings: Settings | None = None,
        devices: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(problem, Routing):
            raise InputError(f"problem: expected a Routing, got {problem!r:.60}")
        same = len(net.channels) == problem.n_segments
        if not same or not np.array_equal(problem.widths, net.widths):
            raise InputError(
                f"net: {len(net.channels)} segments of widths {net.widths}, the scenario has "
                f"{problem.n_segments} of {problem.widths}"
            )
        self.net, self.problem = net, problem
        self.devices = ["cpu"] * len(problem.servers) if devices is None else devices
        if len(parse_devices(self.devices)) != len(problem.servers):
            raise InputError(f"devices: {len(self.devices)} for {len(problem.servers)} servers")
        self.given = problem, router, plan, settings, seed
        Controller(*self.given)  # what is wrong with router or plan is said now

    def run(
        self, images: Tensor, on_progress: Callable[[int, int], object] | None = None
    ) -> LiveRun:
        """Serve one image a request, each when it arrives.

        The first Ctrl-C stops the arrivals, and what has arrived is served; a second one ends all.
        Requests on a server that dies are queued once more. `RequestsLost`: that was not enough;
        `ServerFailed`: a server did not start, or an instance did not run.

        Parameters
        ----------
        images
            Shape (requests, channels, side, side).
        on_progress
            Called about ten times a second with the requests that are done and all.
        """
        given = torch.as_tensor(images)
        n, side = self.problem.n_requests, given.shape[-1] if given.ndim else 0
        if given.shape != (n, self.net.in_channels, side, side) or not given.is_floating_point():
            raise InputError(
                f"images: expected floats of shape ({n}, {self.net.in_channels}, side, side), one "
                f"image a request, got {given.dtype} of shape {tuple(given.shape)}"
            )
        for k, rows in enumerate(self.net.mmac(max(side, 1))):
            if not np.allclose(self.problem.mmac[k], rows, rtol=1e-6):
                raise InputError(
                    f"net: segment {k} takes {rows[-1][-1]:g} MMAC at side {side}, in the scenario "
                    f"{self.problem.mmac[k, -1, -1]:g}: that is of another net or image size"
                )
        with Servers(self.net, self.devices, side, n) as servers:
            # no torch in the loop: its threads would wait in a spin on the servers' cores
            pixels = given.detach().to("cpu", torch.float32).flatten(1).numpy()
            return _Session(servers, pixels, *self.given).run(on_progress)


class _Session(Controller):
    """One run: the trace is replayed, and what the cores command is done."""

    def __init__(self, servers: Servers, images: FloatArray, *given: Any) -> None:
        super().__init__(*given)
        self.servers, self.images, self.memory = servers, images, servers.memory.numpy()
        self.outputs = np.full((len(images), servers.net.classes), np.nan, np.float32)
        self.free = list(range(servers.rows))  # rows of the shared memory
        self.place = np.zeros(len(images), np.int64)  # of every request
        self.last = len(images)  # requests that are let in
        self.died: list[int | str] = []
        self.again: set[int] = set()  # requests that were queued once more
        self.origin = self.spent = 0

    def run(self, on_progress: Callable[[int, int], object] | None) -> LiveRun:
        """Until all that were let in are done."""
        trace, told = self.world.trace[0], 0
        slots = np.argwhere(self.world.core.instance["state"]).tolist()
        self.servers.run([(s, i, self._loading(s, i)) for s, i in slots])  # the plan's
        with without_collector(), _on_interrupt(self._stop):
            self.origin = time.perf_counter_ns()
            while trace["completed"] < self.last:
                self._go_on()
                if on_progress is not None and self._now() > told + _BREATH * 1e9:
                    told = self._now()
                    on_progress(int(trace["completed"]), len(self.images))
        return self._result()

    def _stop(self) -> None:
        self.last = int(self.world.trace[0]["arrived"])

    def _now(self) -> int:
        return time.perf_counter_ns() - self.origin

    def _go_on(self) -> None:
        """Wait for what happens next, and deal with all that is due."""
        arrival, wake = self.problem.arrival, self.world.core.server["wake"]
        r, due = int(self.world.trace[0]["arrived"]), int(wake.min())
        if r < self.last and self.free:
            due = min(due, int(arrival[r]))
        wait = (due - self._now()) / 1e9 - _AWAKE
        for s, slot in self.servers.receive(min(max(0, wait), _BREATH)):
            if slot < 0:
                self._lose(s)
            else:
                self._answered(s, slot)
        while r < self.last and self.free and arrival[r] <= self._now():
            self.place[r] = row = self.free.pop()
            self.memory[0, row, : self.images.shape[1]] = self.images[r]
            self._tell(ARRIVE, 0, 0)
            r += 1
        for s in np.flatnonzero(wake <= self._now()).tolist():
            self._tell(TICK, s, 0)
        while self.waiting:
            self._tell(ROUTE, 0, 0)

    def _tell(self, event: int, s: int, which: int) -> None:
        """Let one thing happen, and the servers do what is commanded."""
        begun = self._now()
        commands = self.feed(event, s, which, begun)
        self.spent += self._now() - begun
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

    def _answered(self, s: int, slot: int) -> None:
        """A task has ended."""
        state = int(self.world.core.instance[s, slot]["state"])
        if state == BUSY:
            row, requests = self.batch(s, slot)
            if row["segment"] == self.problem.n_segments - 1:
                rows = self.place[requests]
                scores = self.memory[self.problem.n_segments % 2, :, : self.outputs.shape[1]]
                self.outputs[requests] = scores[rows]
                self.free += rows.tolist()
        self._tell({BUSY: DONE, LOADING: LOADED}.get(state, UNLOADED), s, slot)

    def _lose(self, s: int) -> None:
        """A server has died: its requests get one more chance."""
        found = self.lose(s, self._now())
        self.died.append(self.problem.servers[s].id)
        if not self.servers.alive:
            self.died = [server.id for server in self.problem.servers]  # some found out just now
            self._fail("no server is left")
        if lost := [repr(self.problem.ids[r]) for r, _ in found if r in self.again]:
            self._fail(f"requests lost their server twice: {shortened(lost)}")
        for r, segment in found:
            self.again.add(r)
            self._tell(REQUEUE, segment, r)

    def _result(self) -> LiveRun:
        told: dict[str, Any] = {"core_us": self.spent / 1e3 / max(1, len(self.events))}
        if self.died:
            told["died"] = self.died
        log = self.log(self._now() if (self.world.request["finish"] < 0).any() else None, told)
        return LiveRun(
            self.problem, log, log.summary, log.cost, log.finish, torch.from_numpy(self.outputs),
            self.events, self.commands,
        )  # fmt: skip

    def _fail(self, reason: str) -> None:
        """Say which requests are lost."""
        ids = [repr(self.problem.ids[r]) for r in np.flatnonzero(self.world.request["finish"] < 0)]
        raise RequestsLost(
            f"servers died ({', '.join(map(repr, self.died))}), {reason}; requests that are not "
            f"done: {shortened(ids, 10)}", self._result(),
        )  # fmt: skip


@contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C; the second is what it was before."""

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


class Comparison(NamedTuple):
    """The same requests simulated and served; `labels` are the classes of their images."""

    simulated: Run
    measured: LiveRun
    labels: Tensor | None = None

    def rows(self) -> list[tuple[str, float, float, float]]:
        """Name, simulated, measured, and the relative error of the simulation.

        The accuracy is simulated by the scenario's table and measured on outputs, so it has a row
        with labels only.
        """
        runs = self.simulated.summary, self.measured.summary
        names = ("mean_ms", "p50_ms", "p99_ms")
        found = {name: [getattr(run, name) for run in runs] for name in names}
        if self.labels is not None:
            found["accuracy"] = [runs[0].accuracy, self.measured.accuracy(self.labels)]
        rows = []
        for name, both in found.items():
            simulated, measured = (math.nan if x is None else float(x) for x in both)
            off = simulated / measured - 1 if measured else math.nan
            rows.append((name, simulated, measured, off))
        return rows


def compare(
    executor: Executor,
    images: Tensor,
    on_progress: Callable[[int, int], object] | None = None,
    labels: Tensor | None = None,
) -> Comparison:
    """Serve images as `Executor.run` does, and simulate the same; `labels` as in `Comparison`."""
    problem, router, plan, settings, seed = executor.given
    simulated = simulate(problem, router, plan=plan, settings=settings, seed=seed)
    return Comparison(simulated, executor.run(images, on_progress), labels)
