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
from optsched.problems.routing import Routing
from optsched.serving.controller import LOST, Controller, Event
from optsched.serving.core import BUSY, DONE, LOAD, LOADED, LOADING, RUN, TICK, UNLOAD, UNLOADED
from optsched.serving.routers import InfeasibleRoute
from optsched.serving.server_process import Servers, parse_devices
from optsched.serving.simulator import Run, simulate
from optsched.serving.world import ARRIVE, REQUEUE, ROUTE
from optsched.strict_json import shortened, without_collector

try:
    import torch
except ImportError:
    raise MissingExtra("the executor", "serving") from None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from optsched.problems.routing.plan import Plan
    from optsched.serving.controller import Command
    from optsched.serving.core import Settings
    from optsched.serving.network import SlimResNet
    from optsched.serving.routers import OwnRouter, Router
    from optsched.serving.server_process import Task

_BREATH: Final = 0.1
"""Seconds after which progress is told and an interrupt is seen at the latest."""


@dataclass(frozen=True, eq=False)
class LiveRun(Run):
    """A history of real requests; times are measured from the start of the trace."""

    outputs: Tensor
    """Class scores by request; NaN where there are none."""
    events: list[Event]
    """What the router and the cores were told; `replay` feeds it again."""
    commands: list[Command]
    """What the cores commanded."""


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
        Servers with measured costs (`scenario`), and arrivals. Decisions and links take the time
        that they take, not the scenario's.
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
        if not np.array_equal(problem.widths, net.widths):
            raise InputError(f"net: widths {net.widths}, the scenario has {problem.widths}")
        if len(net.channels) != problem.n_segments:
            raise InputError(
                f"net: {len(net.channels)} segments, the scenario has {problem.n_segments}"
            )
        self.net, self.problem = net, problem
        self.devices = ["cpu"] * len(problem.servers) if devices is None else devices
        if len(parse_devices(self.devices)) != len(problem.servers):
            raise InputError(f"devices: {len(self.devices)} for {len(problem.servers)} servers")
        self.controller = lambda: Controller(problem, router, plan, settings, seed)
        self.controller()  # what is wrong with router or plan is said now

    def run(
        self, images: Tensor, on_progress: Callable[[int, int], object] | None = None
    ) -> LiveRun:
        """Serve one image a request, each when it arrives.

        The first Ctrl-C stops the arrivals, and what has arrived is served; a second one ends all.
        Requests on a server that dies are queued once more.

        Parameters
        ----------
        images
            Shape (requests, channels, side, side).
        on_progress
            Called about ten times a second with the requests that are done and all.

        Raises
        ------
        RequestsLost
            Servers have died, a request has lost its server twice, or none is left for it.
        ServerFailed
            A server did not start, or an instance did not run; the message has the reason.
        InputError
            The images do not fit.
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
            return _Session(self, servers, given.detach().to("cpu", torch.float32)).run(on_progress)


class _Session:
    """One run: the trace is replayed, and what the cores command is done."""

    def __init__(self, executor: Executor, servers: Servers, images: Tensor) -> None:
        self.problem, self.controller = executor.problem, executor.controller()
        # no torch in the loop: its threads would wait in a spin on the servers' cores
        self.servers, self.images = servers, images.flatten(1).numpy()
        self.memory = servers.memory.numpy()
        self.outputs = np.full((len(images), executor.net.classes), np.nan, np.float32)
        self.rows = list(range(servers.rows))  # of the shared memory, free
        self.row = np.zeros(len(images), np.int64)  # of every request
        self.open = True  # for arrivals
        self.again: set[int] = set()  # requests that were queued once more
        self.origin = self.spent = 0

    def run(self, on_progress: Callable[[int, int], object] | None) -> LiveRun:
        """Until all that were let in are done."""
        trace, told, lost = self.controller.world.trace[0], 0.0, ""
        slots = np.argwhere(self.controller.world.core.instance["state"]).tolist()
        self.servers.run([[(s, i, self._loading(s, i))] for s, i in slots])  # the plan's
        with without_collector(), _on_interrupt(self._stop):
            self.origin = time.perf_counter_ns()
            try:
                while trace["completed"] < (len(self.images) if self.open else trace["arrived"]):
                    self._go_on()
                    if on_progress is not None and self._now() / 1e9 > told + _BREATH:
                        told = self._now() / 1e9
                        on_progress(int(trace["completed"]), len(self.images))
            except (_Lost, InfeasibleRoute) as error:
                if not self._dead():
                    raise
                lost = str(error)
        return self._result(lost)

    def _stop(self) -> None:
        self.open = False

    def _now(self) -> int:
        return time.perf_counter_ns() - self.origin

    def _go_on(self) -> None:
        """Wait for what happens next, and deal with all that is due."""
        arrival, wake = self.problem.arrival, self.controller.world.core.server["wake"]
        r, due = int(self.controller.world.trace[0]["arrived"]), int(wake.min())
        if self._lets_in(r):
            due = min(due, int(arrival[r]))
        for s, slot in self.servers.receive(min(max(0, due - self._now()) / 1e9, _BREATH)):
            if slot < 0:
                self._lose(s)
            else:
                self._answered(s, slot)
        while self._lets_in(r) and arrival[r] <= self._now():
            self.row[r] = row = self.rows.pop()
            self.memory[0, row, : self.images.shape[1]] = self.images[r]
            self._feed(ARRIVE, 0, 0)
            r += 1
        for s in np.flatnonzero(wake <= self._now()).tolist():
            self._feed(TICK, s, 0)
        while self.controller.waiting:
            self._feed(ROUTE, 0, 0)

    def _lets_in(self, r: int) -> bool:
        return self.open and r < len(self.images) and bool(self.rows)

    def _feed(self, event: int, s: int, which: int) -> None:
        """Tell the controller, and let the servers do what it commands."""
        begun = time.perf_counter_ns()
        commands = self.controller.feed(event, s, which, begun - self.origin)
        self.spent += time.perf_counter_ns() - begun
        for kind, to, slot, _ in commands:
            if kind == RUN:
                segment, width, requests, inputs = self.controller.batch(to, slot)
                rows, wide = self.row[requests], sorted({*inputs.tolist()})
                parts = [(i, rows[inputs == i].tolist()) for i in wide]
                self.servers.send(to, slot, ("run", segment, width, parts))
            elif kind == LOAD:
                self.servers.send(to, slot, self._loading(to, slot))
            elif kind == UNLOAD:
                self.servers.send(to, slot, ("unload",))

    def _loading(self, s: int, slot: int) -> Task:
        instance = self.controller.world.core.instance[s, slot]
        return ("load", int(instance["segment"]), int(instance["width"]))

    def _answered(self, s: int, slot: int) -> None:
        """A batch, a load or an unload has ended."""
        state = int(self.controller.world.core.instance[s, slot]["state"])
        if state == BUSY:
            segment, _, requests, _ = self.controller.batch(s, slot)
            if segment == self.problem.n_segments - 1:
                rows = self.row[requests]
                scores = self.memory[self.problem.n_segments % 2, :, : self.outputs.shape[1]]
                self.outputs[requests] = scores[rows]
                self.rows += rows.tolist()
        self._feed({BUSY: DONE, LOADING: LOADED}.get(state, UNLOADED), s, slot)

    def _lose(self, s: int) -> None:
        """A server has died: its requests get one more chance."""
        found = self.controller.lose(s, self._now())
        if not self.servers.alive:
            raise _Lost("no server is left")
        if twice := [self.problem.ids[r] for r, _ in found if r in self.again]:
            raise _Lost(f"requests lost their server twice: {shortened([*map(repr, twice)])}")
        for r, segment in found:
            self.again.add(r)
            self._feed(REQUEUE, segment, r)

    def _dead(self) -> list[int | str]:
        return [
            self.problem.servers[s].id for event, s, *_ in self.controller.events if event == LOST
        ]

    def _result(self, lost: str) -> LiveRun:
        controller, dead = self.controller, self._dead()
        told: dict[str, Any] = {"core_us": self.spent / 1e3 / max(1, len(controller.events))}
        if dead:
            told["died"] = dead
        finish = controller.world.request["finish"]
        log = controller.log(self._now() if (finish < 0).any() else None, told)
        run = LiveRun(
            self.problem, log, log.summary, log.cost, log.finish, torch.from_numpy(self.outputs),
            controller.events, controller.commands,
        )  # fmt: skip
        if lost:
            ids = [repr(self.problem.ids[r]) for r in np.flatnonzero(finish < 0)]
            raise RequestsLost(
                f"servers died ({', '.join(map(repr, dead))}), {lost}; requests that are not done: "
                f"{shortened(ids, 10)}; the history of the others is in .run", run,
            )  # fmt: skip
        return run


class _Lost(Exception):
    """Requests cannot be saved."""


@contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C; the second is what it was before."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
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


class Comparison(NamedTuple):
    """The same requests simulated and served."""

    simulated: Run
    measured: LiveRun

    def rows(self) -> list[tuple[str, float, float, float]]:
        """Name, simulated, measured, and how far the simulation is off, relatively."""
        found = []
        for name in ("mean_ms", "p99_ms", "accuracy", "batch"):
            a, b = (
                float(np.mean(run.log.batches["images"])) if name == "batch" and run.log
                else getattr(run.summary, name) or math.nan
                for run in self
            )  # fmt: skip
            found.append((name, a, b, a / b - 1))
        return found


def compare(
    net: SlimResNet,
    problem: Routing,
    router: Router | OwnRouter | None,
    plan: Plan | None,
    images: Tensor,
    devices: Sequence[str] | None = None,
    seed: int = 0,
) -> Comparison:
    """Simulate a scenario and serve it; arguments as of `Executor`."""
    live = Executor(net, problem, router, plan, None, devices, seed).run(images)
    return Comparison(simulate(problem, router, plan=plan, seed=seed), live)
