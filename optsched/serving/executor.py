"""Serve real requests: the simulator's router and cores, real time, real networks."""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from optsched.errors import InputError, OptschedError
from optsched.problems.routing import Routing
from optsched.serving.controller import LOST, Controller, Event
from optsched.serving.core import BUSY, DONE, LOAD, LOADED, LOADING, RUN, TICK, UNLOAD, UNLOADED
from optsched.serving.network import SlimResNet
from optsched.serving.server_process import (
    Execute,
    Load,
    Servers,
    Unload,
    parse_devices,
    row_floats,
)
from optsched.serving.simulate import Run
from optsched.serving.world import ARRIVE, REQUEUE, ROUTE
from optsched.strict_json import shortened, without_collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from optsched.problems.routing.plan import Plan
    from optsched.serving.controller import Command
    from optsched.serving.core import Settings
    from optsched.serving.routers import OwnRouter, Router

_MEMORY: Final = 2**30
"""Bytes of shared memory for activations; requests beyond wait at the door."""

_BREATH: Final = 0.1
"""Seconds after which progress is told and an interrupt is seen at the latest."""


class Progress(NamedTuple):
    """How far a run is."""

    seconds: float
    arrived: int
    done: int
    processes: tuple[int, ...]
    """Ids of the servers' processes."""


@dataclass(frozen=True, eq=False)
class LiveRun(Run):
    """A history of real requests, times measured from the start of the trace."""

    outputs: Tensor
    """Class scores by request; NaN where there are none."""
    events: list[Event]
    """What the router and the cores were told; see `replay`."""
    commands: list[Command]
    """What the cores commanded."""
    core_us: float
    """Mean time that the router and the cores took for an event."""


class RequestsLost(OptschedError):
    """Servers have died, and requests with them; the history of the others is in ``.run``."""

    def __init__(self, message: str, run: LiveRun) -> None:
        super().__init__(message)
        self.run = run


class Executor:
    """Serves a scenario's requests with a network, in real time.

    Parameters
    ----------
    net
        Of the scenario's segments and widths.
    problem
        Servers with costs as measured (`scenario`), and arrivals; see `Routing`.
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
        if not isinstance(net, SlimResNet):
            raise InputError(f"net: expected a SlimResNet, got {net!r:.60}")
        if not isinstance(problem, Routing):
            raise InputError(f"problem: expected a Routing, got {problem!r:.60}")
        own = (len(net.channels), len(net.widths))
        wanted = (problem.n_segments, problem.n_widths)
        if own != wanted or not np.allclose(net.widths, problem.widths):
            raise InputError(
                f"net: has {own[0]} segments and widths {net.widths}, the scenario has {wanted[0]} "
                f"and {problem.widths}"
            )
        self.net, self.problem, self.plan = net, problem, plan
        self.devices = ["cpu"] * len(problem.servers) if devices is None else list(devices)
        if len(self.devices) != len(problem.servers):
            raise InputError(
                f"devices: {len(self.devices)} for {len(problem.servers)} servers; name one each"
            )
        parse_devices(self.devices)
        self._new = lambda: Controller(problem, router, plan, settings, seed)
        self._new()  # what is wrong with the router or the plan is said now

    def run(
        self, images: Tensor, on_progress: Callable[[Progress], object] | None = None
    ) -> LiveRun:
        """Serve one image a request, each when it arrives.

        The first Ctrl-C stops the arrivals, and what has arrived is served; a second one ends all.
        Requests on a server that dies are queued once more.

        Parameters
        ----------
        images
            Float, shape (requests, channels, side, side).
        on_progress
            Called about ten times a second.

        Raises
        ------
        RequestsLost
            Requests died with their servers, twice, or no server is left for them.
        ServerFailed
            A server did not start, or an instance did not run; the message has the reason.
        InputError
            The images do not fit.
        """
        given = self._checked(images)
        n, side = len(given), given.shape[-1]
        most = max(_MEMORY // (8 * row_floats(self.net, side)), self.problem.max_batch)
        with Servers(self.net, self.devices, side, max(1, min(n, most))) as servers:
            return _Session(self, self._new(), servers, given).run(on_progress)

    def _checked(self, images: Any) -> Tensor:
        n, c = self.problem.n_requests, self.net.in_channels
        found = torch.as_tensor(images)
        if found.ndim != 4 or found.shape[:2] != (n, c) or found.shape[2] != found.shape[3]:
            raise InputError(
                f"images: expected shape ({n}, {c}, side, side), one image a request, got "
                f"{tuple(found.shape)}"
            )
        if not found.is_floating_point():
            raise InputError(f"images: expected floats, got {found.dtype}")
        for k, rows in enumerate(self.net.mmac(max(1, found.shape[-1]))):
            if not np.allclose(self.problem.mmac[k], rows, rtol=1e-6):
                raise InputError(
                    f"net: segment {k} takes {rows[0][0]:g} MMAC an image of side "
                    f"{found.shape[-1]} at the narrowest width, in the scenario "
                    f"{self.problem.mmac[k][0, 0]:g}: it is of another network, or image size"
                )
        return found.detach().to("cpu", torch.float32).contiguous()


class _Session:
    """One run: the trace is replayed, what the cores command is done."""

    def __init__(
        self, executor: Executor, controller: Controller, servers: Servers, images: Tensor
    ) -> None:
        self.problem, self.controller, self.servers = executor.problem, controller, servers
        self.images, self.net, self.devices = images, executor.net, executor.devices
        self.outputs = torch.full((len(images), executor.net.classes), math.nan)
        self.rows = list(range(servers.rows))  # of the shared memory, free
        self.row = np.zeros(len(images), np.int64)  # of every request
        self.arrivals = len(images)  # that are let in
        self.again: set[int] = set()  # requests that were queued once more
        self.failed: set[int] = set()
        self.spent = self.origin = 0

    def run(self, on_progress: Callable[[Progress], object] | None) -> LiveRun:
        self._make_resident()
        trace = self.controller.world.trace[0]
        told = 0.0
        with without_collector(), _on_interrupt(self._stop):
            self.origin = time.perf_counter_ns()
            while trace["completed"] + len(self.failed) < self.arrivals:
                self._go_on()
                passed = self._now() / 1e9
                if on_progress is not None and passed >= told + _BREATH:
                    told = passed
                    pids = tuple(process.pid for process in self.servers.processes)
                    done = int(trace["completed"])
                    on_progress(Progress(passed, int(trace["arrived"]), done, pids))
        return self._result()

    def _make_resident(self) -> None:
        """Load the plan's instances before the clock starts."""
        slots = self.controller.world.core.instance
        waiting = 0
        for s, i in np.argwhere(slots["state"] != 0).tolist():
            segment, width = int(slots[s, i]["segment"]), int(slots[s, i]["width"])
            self.servers.send(s, i, Load(segment, width))
            waiting += 1
        while waiting:
            for s, slot in self.servers.receive():
                if slot < 0:
                    raise OptschedError(f"{self.servers.name(s)} died while it loaded the plan")
                waiting -= 1

    def _stop(self) -> None:
        self.arrivals = int(self.controller.world.trace[0]["arrived"])

    def _now(self) -> int:
        return time.perf_counter_ns() - self.origin

    def _go_on(self) -> None:
        """Wait for the next thing that happens, and deal with all that is due."""
        controller = self.controller
        trace, wake = controller.world.trace[0], controller.world.core.server["wake"]
        arrived = int(trace["arrived"])
        due = int(wake.min())
        if arrived < self.arrivals and self.rows:
            due = min(due, int(self.problem.arrival[arrived]))
        for s, slot in self.servers.receive(min(max(0, due - self._now()) / 1e9, _BREATH)):
            if slot < 0:
                self._lose(s)
            else:
                self._answered(s, slot)
        arrived = int(trace["arrived"])
        while (
            arrived < self.arrivals and self.rows and self.problem.arrival[arrived] <= self._now()
        ):
            self._admit(arrived)
            arrived += 1
        now = self._now()
        for s in np.flatnonzero(wake <= now).tolist():
            self._feed(TICK, s, 0)
        while controller.waiting:
            self._feed(ROUTE, 0, 0)

    def _feed(self, event: int, s: int, which: int) -> None:
        """Tell the controller, and let the servers do what it commands."""
        begun = time.perf_counter_ns()
        commands = self.controller.feed(event, s, which, begun - self.origin)
        self.spent += time.perf_counter_ns() - begun
        for kind, to, slot, _ in commands:
            if kind == RUN:
                batch = self.controller.batch(to, slot)
                rows = self.row[batch.requests]
                parts = [
                    (w, rows[batch.input_widths == w].tolist())
                    for w in np.unique(batch.input_widths).tolist()
                ]
                self.servers.send(to, slot, Execute(batch.width, parts))
            elif kind == LOAD:
                instance = self.controller.world.core.instance[to, slot]
                order = Load(int(instance["segment"]), int(instance["width"]))
                self.servers.send(to, slot, order)
            elif kind == UNLOAD:
                self.servers.send(to, slot, Unload())
        for r in self.controller.dropped[:]:
            self._fail(r)
        self.controller.dropped.clear()

    def _admit(self, r: int) -> None:
        """A request arrives."""
        self.row[r] = row = self.rows.pop()
        image = self.images[r].flatten()
        self.servers.memory[0, row, : len(image)] = image
        self._feed(ARRIVE, 0, 0)

    def _answered(self, s: int, slot: int) -> None:
        """A batch, a load or an unload has ended."""
        state = int(self.controller.world.core.instance[s, slot]["state"])
        if state != BUSY:
            self._feed(LOADED if state == LOADING else UNLOADED, s, slot)
            return
        batch = self.controller.batch(s, slot)
        if batch.segment == self.problem.n_segments - 1:
            rows = self.row[batch.requests]
            scores = self.servers.memory[self.problem.n_segments % 2, :, : self.net.classes]
            self.outputs[torch.from_numpy(batch.requests.copy())] = scores[torch.from_numpy(rows)]
            self.rows += rows.tolist()
        self._feed(DONE, s, slot)

    def _lose(self, s: int) -> None:
        """A server has died: each of its requests gets one more chance."""
        for r, segment in self.controller.lose(s, self._now()):
            if r in self.again:
                self._fail(r)
            else:
                self.again.add(r)
                self._feed(REQUEUE, segment, r)
        if not self.servers.alive:
            self._stop()

    def _fail(self, r: int) -> None:
        self.failed.add(r)
        self.rows.append(int(self.row[r]))

    def _result(self) -> LiveRun:
        controller, n = self.controller, self.problem.n_requests
        events = controller.events
        core_us = self.spent / 1e3 / max(1, len(events))
        done = int(controller.world.trace[0]["completed"])
        dead = [self.problem.servers[row.server].id for row in events if row.event == LOST]
        told: dict[str, Any] = {"core_us": core_us, "devices": self.devices}
        if dead:
            told["died"] = dead
        log = controller.log(None if done == n else self._now(), **told)
        run = LiveRun(
            self.problem, log, log.summary, log.cost, log.finish, self.outputs, events,
            controller.commands, core_us,
        )  # fmt: skip
        if not self.failed and self.servers.alive:
            return run
        ids = shortened([repr(self.problem.ids[r]) for r in sorted(self.failed)], 10)
        raise RequestsLost(
            f"servers that died: {', '.join(map(repr, dead))}; requests that could not be saved: "
            f"{ids or 'none'}; not let in: {n - self.arrivals}; the history of the others is in "
            ".run",
            run,
        )


@contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C; the second is Python's again."""
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield
        return

    def once(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
