"""The simulator's router and cores under a clock outside: events in, commands out, all recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.problems.routing.log import Log
from optsched.serving.core import (
    BUSY,
    DONE,
    LOADED,
    NEVER,
    RUN,
    SLOTS,
    UNLOADED,
)
from optsched.serving.routers import Decision, InfeasibleRoute, Router
from optsched.serving.simulate import ask, infeasible, new_world, twice
from optsched.serving.view import View
from optsched.serving.world import ASKED, ENDED, INFEASIBLE, ROUTE, feed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.problems.routing import Routing
    from optsched.problems.routing.plan import Plan
    from optsched.serving.core import Settings
    from optsched.serving.routers import OwnRouter

LOST: Final = ROUTE + 1
"""An event for Python alone: a server has died."""

Command = tuple[int, int, int, int]
"""Kind, server, slot, and until when by the model; see `core.COMMAND`."""


class Event(NamedTuple):
    """What has happened when; of a decision the server, the width, the time and the group."""

    event: int
    server: int
    which: int
    now: int
    group: int = 0


class Batch(NamedTuple):
    """What an instance runs."""

    segment: int
    width: int
    requests: Any
    input_widths: Any


class Controller:
    """Routes and batches with the simulator's compiled functions, in time that somebody else tells.

    Parameters
    ----------
    problem, router, plan, settings, seed
        See `simulate`.
    """

    def __init__(
        self,
        problem: Routing,
        router: Router | OwnRouter | None = None,
        plan: Plan | None = None,
        settings: Settings | None = None,
        seed: int = 0,
    ) -> None:
        self.problem = problem
        self.router: Any = Router() if router is None else router
        self.events: list[Event] = []
        self.commands: list[Command] = []
        self.dropped: list[int] = []
        """Requests that no server left can run."""
        self.waiting = False
        """Whether requests wait at the router: `ROUTE` is possible."""
        self._lost: set[int] = set()
        self._row: dict[tuple[int, int], int] = {}  # of the batch that runs on a slot
        self._use(new_world(problem, self.router, plan, settings, seed, log=True))
        feed.prepare()  # type: ignore[attr-defined]

    def _use(self, world: Any) -> None:
        self.world = world
        self.view = View(self.problem, world)

    def feed(self, event: int, s: int, which: int, now: int) -> list[Command]:
        """Let one thing happen (`world.feed`), and return what the core commands."""
        world = self.world
        trace, core = world.trace[0], world.core
        if trace["instances"] + SLOTS > len(world.instance_row):
            self._use(world._replace(instance_row=twice(world.instance_row)))
            world = self.world
        self._note(event, s, which, now)
        status = feed(world, event, s, which, now)
        if status == ASKED:
            ask(self.problem, self.router, self.view, world)
            status = feed(world, ROUTE, 0, 0, now)
        if event == ROUTE:
            decision = (int(trace[key]) for key in ("server", "width", "group"))
            s, which, group = decision
            self.events.append(Event(event, s, which, now, group))
            if status == INFEASIBLE:
                self._drop()
                return []
        else:
            self.events.append(Event(event, s, which, now))
        self.waiting = status == ENDED
        given: list[Command] = core.command[: core.state[0]["commands"]].tolist()
        runs = [command for command in given if command[0] == RUN]
        for row, (_, of, i, _) in enumerate(runs, int(trace["batches"]) - len(runs)):
            self._row[of, i] = row
        self.commands += given
        return given

    def _note(self, event: int, s: int, which: int, now: int) -> None:
        """Write down when something has really ended."""
        if event == DONE:
            self.world.batch_row["end"][self._row.pop((s, which))] = now
        elif event in (LOADED, UNLOADED):
            column = "ready" if event == LOADED else "unload"
            self.world.instance_row[column][self.world.core.instance[s, which]["row"]] = now

    def batch(self, s: int, slot: int) -> Batch:
        """What an instance was told to run."""
        row = self.world.batch_row[self._row[s, slot]]
        first = row["first"]
        requests = self.world.request_row["request"][first : first + row["images"]]
        widths = self.world.request["width"][requests]
        return Batch(int(row["segment"]), int(row["width"]), requests, widths)

    def lose(self, s: int, now: int) -> list[tuple[int, int]]:
        """A server has died: nothing more goes there; its requests and the segments they need."""
        world, core = self.world, self.world.core
        self.events.append(Event(LOST, s, 0, now))
        found = []
        running = [int(slot["first"]) for slot in core.instance[s] if slot["state"] == BUSY]
        for b in [*core.queue["head"][s].tolist(), *running]:
            while b >= 0:
                block, r = core.block[b], int(core.block[b]["first"])
                for _ in range(block["images"]):
                    found.append((r, int(block["segment"])))
                    r = int(world.request[r]["next"])
                following = int(block["next"])
                block["next"], core.state[0]["free_block"] = core.state[0]["free_block"], b
                b = following
        for row in [self._row.pop((s, i)) for i in range(SLOTS) if (s, i) in self._row]:
            world.batch_row["end"][row] = -1
        there = world.instance_row[: world.trace[0]["instances"]]
        world.instance_row["unload"][
            np.flatnonzero((there["server"] == s) & (there["unload"] < 0))
        ] = now
        core.instance[s] = 0
        core.queue["head"][s], core.queue["work"][s] = -1, 0
        for field in (
            "waiting",
            "queued",
            "queued_mmac",
            "active",
            "running",
            "load",
            "used",
            "freeing",
        ):
            core.server[field][s] = 0
        core.server["wake"][s] = NEVER
        feasible = world.feasible.copy()
        feasible[s] = False
        self._lost.add(s)
        more = world._replace(
            feasible=feasible,
            batch_row=twice(world.batch_row),
            request_row=twice(world.request_row),
        )
        self._use(more)
        return sorted(found)

    def _drop(self) -> None:
        """Give up the head block, if no server left can ever run its segment."""
        trace = self.world.trace[0]
        if self.world.feasible[:, trace["segment"]].any() or not self._lost:
            s = int(trace["server"])
            dead = f"decision {int(trace['decisions'])}: server {self.problem.servers[s].id!r} died"
            raise InfeasibleRoute(dead if s in self._lost else infeasible(self.problem, self.world))
        fifo = self.world.fifo[trace["queue"]]
        for _ in range(int(fifo["images"])):
            self.dropped.append(int(fifo["head"]))
            fifo["head"] = self.world.request[fifo["head"]]["next"]
        fifo["images"] = 0
        self.waiting = bool(self.world.fifo["images"].any())

    def log(self, end: int | None = None, **provenance: Any) -> Log:
        """The history, without the batches that died; `end`: it was cut off then."""
        trace, world = self.world.trace[0], self.world
        batches = world.batch_row[: trace["batches"]]
        kept = batches["end"] >= 0
        entries = world.request_row[: trace["entries"]][np.repeat(kept, batches["images"])]
        batches = batches[kept]
        batches["first"] = np.cumsum(batches["images"]) - batches["images"]
        return Log(
            self.problem, batches, entries, world.instance_row[: trace["instances"]].copy(),
            int(trace["decisions"]), end, provenance, wall_clock=True,
        )  # fmt: skip


class _Recorded:
    """The decisions of a router in Python, once more."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._decisions = iter([row for row in events if row.event == ROUTE])

    def route(self, _view: View) -> Decision:
        row = next(self._decisions)
        return Decision(row.server, row.which, row.group)


def replay(
    problem: Routing,
    events: Iterable[Event],
    router: Router | OwnRouter | None = None,
    plan: Plan | None = None,
    settings: Settings | None = None,
    seed: int = 0,
) -> Controller:
    """Feed recorded events again: the controller's commands and log are the same, bit for bit.

    Built-in routers decide again; the decisions of a router in Python are taken from the events.
    """
    rows = [Event(*row) for row in events]
    outside = router is not None and not hasattr(router, "compiled")
    found = Controller(problem, _Recorded(rows) if outside else router, plan, settings, seed)
    for row in rows:
        if row.event == LOST:
            found.lose(row.server, row.now)
        elif row.event == ROUTE:
            found.feed(ROUTE, 0, 0, row.now)
        else:
            found.feed(row.event, row.server, row.which, row.now)
    return found
