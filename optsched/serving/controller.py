"""The simulator's router and cores under a clock outside: events in, commands out, all recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.problems.routing.checks import frozen
from optsched.problems.routing.log import Log
from optsched.problems.routing.plan import SLOTS
from optsched.serving.core import BUSY, DONE, LOADED, NEVER, RUN, UNLOADED
from optsched.serving.routers import InfeasibleRoute, Router, View
from optsched.serving.simulator import ask, infeasible, new_world, twice
from optsched.serving.world import ASKED, ENDED, INFEASIBLE, ROUTE, feed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.problems.routing import Routing
    from optsched.problems.routing.plan import Plan
    from optsched.serving.core import Settings
    from optsched.serving.routers import OwnRouter

LOST: Final = ROUTE + 1
"""Besides the events of `world.feed`: a server has died."""

Command = tuple[int, int, int, int]
"""Kind, server, slot, and until when by the model; see `core.COMMAND`."""


class Event(NamedTuple):
    """What `world.feed` was told."""

    event: int
    server: int
    which: int
    now: int


class Controller:
    """Routes and batches with the simulator's compiled functions, in time that somebody else tells.

    Arguments are those of `simulate`.
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
        self.waiting = False
        """Whether requests wait at the router: `ROUTE` is possible."""
        self._row: dict[tuple[int, int], int] = {}  # of the batch that a slot runs
        self._use(new_world(problem, self.router, plan, settings, seed, log=True))
        feed.prepare()  # type: ignore[attr-defined]

    def _use(self, world: Any) -> None:
        self.world, self.view = world, View(self.problem, world)

    def feed(self, event: int, s: int, which: int, now: int) -> list[Command]:
        """Let one thing happen, and return what the core commands."""
        if self.world.trace["instances"][0] + SLOTS > len(self.world.instance_row):
            self._use(self.world._replace(instance_row=twice(self.world.instance_row)))
        world = self.world
        trace, core = world.trace[0], world.core
        if event == DONE:
            world.batch_row["end"][self._row.pop((s, which))] = now
        elif event in (LOADED, UNLOADED):  # the model's time is replaced
            column = "ready" if event == LOADED else "unload"
            world.instance_row[column][core.instance["row"][s, which]] = now
        status = feed(world, event, s, which, now)
        if status == ASKED:
            ask(self.problem, self.router, self.view, world)
            status = feed(world, ROUTE, 0, 0, now)
        self.events.append(Event(event, s, which, now))
        if status == INFEASIBLE:
            raise InfeasibleRoute(infeasible(self.problem, world))
        self.waiting = status == ENDED
        given: list[Command] = core.command[: core.state[0]["commands"]].tolist()
        self.commands += given
        runs = [command[1:3] for command in given if command[0] == RUN]
        first = int(trace["batches"]) - len(runs)
        self._row |= {at: first + j for j, at in enumerate(runs)}
        world.batch_row["end"][first : first + len(runs)] = -1  # until it is done
        return given

    def batch(self, s: int, slot: int) -> tuple[int, int, Any, Any]:
        """What an instance runs: segment, width, requests, and their input widths."""
        row = self.world.batch_row[self._row[s, slot]]
        entries = self.world.request_row[row["first"] : row["first"] + row["images"]]
        requests = entries["request"].copy()
        widths = self.world.request["width"][requests]
        return int(row["segment"]), int(row["width"]), requests, widths

    def lose(self, s: int, now: int) -> list[tuple[int, int]]:
        """A server has died: nothing more goes there; its requests, and the segments they need."""
        world, core = self.world, self.world.core
        self.events.append(Event(LOST, s, 0, now))
        busy = core.instance[s][core.instance[s]["state"] == BUSY]
        found = []
        for b in [*core.queue["head"][s].tolist(), *busy["first"].tolist()]:
            while b >= 0:
                block, r = core.block[b], int(core.block[b]["first"])
                for _ in range(block["images"]):
                    found.append((r, int(block["segment"])))
                    r = int(world.request[r]["next"])
                following = int(block["next"])
                block["next"], core.state["free_block"] = core.state["free_block"][0], b
                b = following
        self._row = {at: row for at, row in self._row.items() if at[0] != s}
        there = world.instance_row[: world.trace["instances"][0]]
        gone = (there["server"] == s) & (there["unload"] < 0)
        there["unload"][gone] = now
        there["ready"][gone] = np.minimum(there["ready"][gone], now)
        core.server[s], core.instance[s], core.queue[s] = 0, 0, -1
        core.server["wake"][s] = NEVER
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
        instances = world.instance_row[: trace["instances"]]
        decisions = int(trace["decisions"])
        return Log(self.problem, batches, entries, instances, decisions, end, provenance, True)


def replay(
    problem: Routing,
    events: Iterable[Event],
    router: Router | OwnRouter | None = None,
    plan: Plan | None = None,
    settings: Settings | None = None,
    seed: int = 0,
) -> Controller:
    """Feed recorded events again: commands and log are the same, bit for bit.

    The router decides again: one in Python must decide the same.
    """
    found = Controller(problem, router, plan, settings, seed)
    for event, s, which, now in events:
        if event == LOST:
            found.lose(s, now)
        else:
            found.feed(event, s, which, now)
    return found
