"""Scenarios, plans and routers that the tests of serving share."""

from __future__ import annotations

import copy
import json
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.problems.routing import Routing, Server
from optsched.problems.routing.checks import frozen
from optsched.serving import rules, world
from optsched.serving.core import Core, Settings
from optsched.serving.routers import (
    JSED,
    Backlog,
    Decision,
    PowerOfTwo,
    Random,
    RandomWidth,
    RoundRobin,
    Router,
    Static,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.problems.routing.log import Log
    from optsched.serving.routers import View
    from optsched.serving.rules import Compiled


GONE = object()


class Resident(NamedTuple):
    """A plan: rows (server, segment, width)."""

    instances: Sequence[tuple[int, int, int]]

    def check(self, problem: Routing) -> None:
        """It fits."""


def plain(arrival_ms: Any = (0.0,), *, k: int = 1, n: int = 1, **given: Any) -> Routing:
    """One server, an image takes 1 ms a segment, no launches; other fields and servers' fields."""
    server = {"vram_mb": 100.0, "launch_ms": 0.0, "ms_per_mmac": 1.0, "idle_w": 10, "peak_w": 100}
    own = {key: given.pop(key) for key in list(given) if key in Server.__struct_fields__}
    fields: dict[str, Any] = {
        "widths": [(w + 1) / n for w in range(n)], "mmac": np.ones((k, n, n)),
        "vram_mb": given.pop("instance_mb", np.ones((k, n))), "accuracy": np.full((n,) * k, 50.0),
        "servers": [Server(**{"id": "a", **server, **own})], "arrival_ms": arrival_ms,
    }  # fmt: skip
    return Routing(**{**fields, **given})


def resident(problem: Routing, seed: int) -> Resident:
    """A random plan that leaves a place for every segment; it may be empty."""
    dice = random.Random(f"plan {seed}")
    rows: list[tuple[int, int, int]] = []
    for s, server in enumerate(problem.servers):
        room = round(server.vram_mb * 1000)
        for _ in range(dice.randint(0, 6)):
            k, w = dice.randrange(problem.n_segments), dice.randrange(problem.n_widths)
            if problem.vram[k, w] <= room:
                room -= int(problem.vram[k, w])
                rows.append((s, k, w))
    while not world.feasible(problem, Resident(rows)).any(axis=(0, 2)).all():
        rows.pop()
    return Resident(rows)


def knobs(seed: int, *, strict: bool) -> Settings:
    """Random knobs of the core."""
    dice = random.Random(f"settings {seed}")
    return Settings(
        cap=dice.choice((1, 4)), util_block=dice.choice((0.3, 0.92)), strict=strict,
        idle_ms=dice.choice((0.0, 2.0, 500.0)), starve_ms=dice.choice((0.0, 1.0, 20.0)),
    )  # fmt: skip


class Anything:
    """A router in Python that knows no better."""

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)

    def route(self, view: View) -> Decision:
        """Any server and width that can be, any group."""
        s, w = self._dice.choice(np.argwhere(view.feasible[:, view.segment]).tolist())
        return Decision(s, w, self._dice.randint(1, view.problem.max_batch))


class Says:
    """A router that is a function."""

    def __init__(self, answer: Callable[[View], Any]) -> None:
        self.route = answer


class Planned:
    """Tuples given to requests at their arrival, half of them this way, half of them that way."""

    def __init__(self, server: Any, group: int) -> None:
        self._server, self._group = server, group

    def compiled(self, problem: Routing, plan: Any, seed: int) -> Compiled:
        """As the fluid rule does."""
        base = Router(RandomWidth(), self._server, self._group).compiled(problem, plan, seed)
        base.rule["width"] = rules.FLUID
        ladder = problem.tuples[[0, len(problem.tuples) // 2]]
        return base._replace(ladder=frozen(ladder), share=np.array([[0.5, 0.0], [0.5, 0.0]]))


def routers(problem: Routing, seed: int) -> list[Any]:
    """Every pair of rules with some group, and one in Python."""
    dice = random.Random(f"routers {seed}")
    widest = Static((problem.n_widths - 1,) * problem.n_segments)
    found: list[Any] = [Anything(seed)]
    for server in (Random(), RoundRobin(), JSED(), PowerOfTwo()):
        group = min(problem.max_batch, dice.choice((0, 1, 3)))
        found += [Router(width, server, group) for width in (widest, RandomWidth(), Backlog())]
        found.append(Planned(server, group))
    return found


def document(log: Log | None) -> Any:
    """The log as parsed JSON."""
    assert log is not None
    return json.loads(log.to_json())


def mutated(tree: Any, edits: dict[str, Any]) -> Any:
    """A document with other values at these paths; `GONE` removes one, ``+`` appends it."""
    found = copy.deepcopy(tree)
    for path, value in edits.items():
        *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        node = found
        for key in way:
            node = node[key]
        if last == "+":
            node.append(value)
        elif value is GONE:
            del node[last]
        else:
            node[last] = value
    return found


def arrays(state: world.World) -> list[Any]:
    """All that a simulation consists of."""
    return [*state.core, *state[1:]]


def for_python(state: world.World) -> world.World:
    """The same memory, such that the source of kernels can read it."""
    found = [row.view(np.recarray) if row.dtype.names else row for row in arrays(state)]
    n = len(Core._fields)
    return world.World(Core(*found[:n]), *found[n:])
