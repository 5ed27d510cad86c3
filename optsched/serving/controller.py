"""The router and the cores of the simulator, driven by an external clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.serving.core import (
    BUSY,
    DONE,
    LOADED,
    NEVER,
    RUN,
    UNIT,
    UNLOADED,
)
from optsched.serving.fields import frozen
from optsched.serving.log import Log
from optsched.serving.plan import SLOTS
from optsched.serving.routers import InfeasibleRoute, MarginalCost, View
from optsched.serving.simulator import doubled, infeasible, new_world, query, totals
from optsched.serving.world import ENDED, INFEASIBLE, ROUTE, UNDECIDED, advance, feed

if TYPE_CHECKING:
    from optsched.serving.log import Summary
    from optsched.serving.scenario import Scenario

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
        self._use(new_world(scenario, self.router, *given, log=True))
        advance.prepare()  # type: ignore[attr-defined]

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
        summary: Summary
        summary, cost = totals(self.scenario, world, end, energy=False)
        log = Log(self.scenario, batches, entries, instances, summary, end, provenance, True)
        return log, cost
