"""What a router in Python sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.serving.core import EMPTY, FREE, UNIT, UNLOADING
from optsched.serving.world import expected_delays

if TYPE_CHECKING:
    from optsched.problems.routing import Routing
    from optsched.schedule import IntArray
    from optsched.serving.world import World


class View:
    """The state of servers and queues at a decision; read-only, and valid until it is made.

    Times are in ms; servers, segments and widths count from 0.
    """

    def __init__(self, problem: Routing, world: World) -> None:
        self.problem = problem
        self._world = world
        self.feasible = world.feasible
        """Whether a server can ever run (segment, width), [server][segment][width]."""

    @property
    def now(self) -> float:
        """The time of the decision."""
        return float(self._world.trace[0]["now"]) / 1e6

    @property
    def segment(self) -> int:
        """Which segment the head block is to run."""
        return int(self._world.trace[0]["segment"])

    @property
    def head(self) -> IntArray:
        """The requests of the head's queue, oldest first, at most `max_batch`."""
        fifo = self._world.fifo[self._world.trace[0]["queue"]]
        found, r = [], int(fifo["head"])
        for _ in range(min(int(fifo["images"]), self.problem.max_batch)):
            found.append(r)
            r = int(self._world.request[r]["next"])
        return np.array(found, np.int64)

    @property
    def input_widths(self) -> IntArray:
        """Of the requests in `head`, the width of the segment before; 0 for segment 0."""
        found: IntArray = self._world.request["width"][self.head]
        return found

    @property
    def prefix(self) -> tuple[int, ...]:
        """The widths that the head request has run so far."""
        index, n = int(self._world.request["tuple"][self.head[0]]), self.problem.n_widths
        return tuple(index // n**j % n for j in range(self.segment - 1, -1, -1))

    @property
    def ages(self) -> Any:
        """Time since the arrival of the requests in `head`."""
        return self.now - self.problem.arrival[self.head] / 1e6

    @property
    def waiting(self) -> IntArray:
        """Requests at the router per segment."""
        fifo = self._world.fifo["images"]
        found: IntArray = fifo.reshape(self.problem.n_segments, -1).sum(axis=1)
        return found

    @property
    def queued(self) -> Any:
        """Work that waits, per server."""
        return self._world.core.server["queued"] / 1e6

    @property
    def running(self) -> Any:
        """Work of the batches that run, per server, from their start on."""
        return self._world.core.server["active"] / 1e6

    @property
    def free_instances(self) -> IntArray:
        """Instances that could start at once, [server][segment][width]."""
        slot = self._world.core.instance
        return self._count(slot["state"] == FREE)

    @property
    def resident_instances(self) -> IntArray:
        """Instances that are there or come, [server][segment][width]."""
        slot = self._world.core.instance
        return self._count((slot["state"] != EMPTY) & (slot["state"] != UNLOADING))

    def _count(self, wanted: Any) -> IntArray:
        found = np.zeros(self.feasible.shape, np.int64)
        s, i = np.nonzero(wanted)
        slot = self._world.core.instance[s, i]
        np.add.at(found, (s, slot["segment"], slot["width"]), 1)
        return found

    @property
    def free_vram_mb(self) -> Any:
        """MB per server."""
        server = self._world.core.server
        return (server["vram"] - server["used"]) / 1000

    @property
    def utilisation(self) -> Any:
        """U per server."""
        server = self._world.core.server
        shared = (server["saturation"] <= 0) & (server["running"] > 0)
        return np.where(shared, 1.0, server["load"] / UNIT)

    @property
    def watts(self) -> Any:
        """Power per server."""
        return self._world.core.server["watts"].copy()

    def expected_delay(self, width: int, group: int) -> Any:
        """When each server would be done with so many of the head, in ms; inf: never."""
        found = np.zeros(len(self.problem.servers))
        expected_delays(self._world, width, group, found)
        return found / 1e6
