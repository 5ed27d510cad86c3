"""Scenarios, plans and routers that the tests of serving share."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.serving import world
from optsched.serving.core import Core
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
from optsched.serving.scenario import Contention, Link, Scenario, Server, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.serving.log import Log
    from optsched.serving.routers import View


GONE = object()


class Resident(NamedTuple):
    """A plan: rows (server, segment, width)."""

    instances: Sequence[tuple[int, int, int]]

    def check(self, scenario: Scenario) -> None:
        """It fits."""


def plain(arrival_ms: Any = (0.0,), *, k: int = 1, n: int = 1, **given: Any) -> Scenario:
    """One server, an image takes 1 ms a segment, no launches; other fields and servers' fields."""
    server = {"vram_mb": 100.0, "launch_ms": 0.0, "ms_per_mmac": 1.0, "idle_w": 10, "peak_w": 100}
    own = {key: given.pop(key) for key in list(given) if key in Server.__struct_fields__}
    fields: dict[str, Any] = {
        "widths": [(w + 1) / n for w in range(n)], "mmac": np.ones((k, n, n)),
        "vram_mb": given.pop("instance_mb", np.ones((k, n))), "accuracy": np.full((n,) * k, 50.0),
        "servers": [Server(**{"id": "a", **server, **own})], "arrival_ms": arrival_ms,
    }  # fmt: skip
    return Scenario(**{**fields, **given})


def resident(scenario: Scenario, seed: int) -> Resident:
    """A random plan that leaves a place for every segment; it may be empty."""
    dice = random.Random(f"plan {seed}")
    rows: list[tuple[int, int, int]] = []
    for s, server in enumerate(scenario.servers):
        room = round(server.vram_mb * 1000)
        for _ in range(dice.randint(0, 6)):
            k, w = dice.randrange(scenario.n_segments), dice.randrange(scenario.n_widths)
            if scenario.vram[k, w] <= room:
                room -= int(scenario.vram[k, w])
                rows.append((s, k, w))
    while not world.feasible(scenario, Resident(rows)).any(axis=(0, 2)).all():
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
        return Decision(s, w, self._dice.randint(1, view.scenario.max_batch))


class Says:
    """A router that is a function."""

    def __init__(self, answer: Callable[[View], Any]) -> None:
        self.route = answer


def routers(scenario: Scenario, seed: int) -> list[Any]:
    """Every pair of rules with some group, and one in Python."""
    dice = random.Random(f"routers {seed}")
    widest = Static((scenario.n_widths - 1,) * scenario.n_segments)
    found: list[Any] = [Anything(seed)]
    for server in (Random(), RoundRobin(), JSED(), PowerOfTwo()):
        group = min(scenario.max_batch, dice.choice((0, 1, 3)))
        found += [Router(width, server, group) for width in (widest, RandomWidth(), Backlog())]
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


def children() -> set[int]:
    """Processes that this thread has started."""
    return {*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())}


def arrays(state: world.World) -> list[Any]:
    """All that a simulation consists of."""
    return [*state.core, *state[1:]]


def for_python(state: world.World) -> world.World:
    """The same memory, such that the source of kernels can read it."""
    found = [row.view(np.recarray) if row.dtype.names else row for row in arrays(state)]
    n = len(Core._fields)
    return world.World(Core(*found[:n]), *found[n:])


def random_scenario(seed: int, **fields: Any) -> Scenario:
    """At most 4 servers, 4 segments, 4 widths and 60 requests, every optional field or none."""
    dice = random.Random(f"routing {seed}")
    k, n = dice.randint(1, 4), dice.randint(1, 4)
    vram = np.cumsum(np.array(_table(dice, (k, n), 10, 200)), axis=1).round(3)
    work = dice.choice((0.0, 1.0, 1.0, 1.0))
    given: dict[str, Any] = {
        "widths": sorted(dice.sample((0.1, 0.25, 0.5, 0.75, 1.0), n)),
        "mmac": [_costs(dice, n, work, measured=False) for _ in range(k)],
        "vram_mb": vram,
        "max_batch": dice.choice((1, 2, 3, 8, 64)),
        "accuracy": _table(dice, (n**k,), 0, 100),
        "servers": [_server(dice, f"s{s}", s, vram, n) for s in range(dice.randint(1, 4))],
        "arrival_ms": _arrivals(dice),
        "router_ms": dice.choice((None, 0.0, 0.15, 1.0)),
        "link": dice.choice((None, Link(dice.choice((0.0, 0.7)), 3.3, _table(dice, (k, n), 0, 1)))),
        "ms_per_point": dice.choice((0.0, 4.0)),
        "ms_per_joule": dice.choice((0.0, 1.5)),
        "name": f"routing {seed}",
    }
    return Scenario(**{**given, **fields})


def _server(dice: random.Random, name: str, number: int, vram: Any, n: int) -> Server:
    """The first server can hold every instance, perhaps only one at a time."""
    biggest = float(vram.max())
    share = dice.choice((1.0, 1.0, 2.0, 6.0)) if number == 0 else dice.choice((0.1, 0.7, 3.0))
    saturation = dice.choice((None, 2.0, 20.0))
    rule = Contention(dice.choice((0.3, 0.92)), 0.5, dice.choice((0.0, 3.0)))
    return Server(
        name,
        vram_mb=round(biggest * share, 3),
        launch_ms=dice.choice((0.0, 0.3, 1.2)),
        ms_per_mmac=dice.choice((0.0, 0.2, 1.0)),
        idle_w=dice.choice((0.0, 50.0)),
        peak_w=dice.choice((50.0, 260.0)),
        load_ms=dice.choice((None, 0.0, 3.0, 20.0)),
        sat_mmac=saturation,
        contention=dice.choice((None, rule)) if saturation else None,
        cost_ms=dice.choice((None, None, [_costs(dice, n, 1, measured=True) for _ in vram])),
        parallel=dice.choice((None, None, 1, 2)),
    )


def _costs(dice: random.Random, n: int, scale: float, *, measured: bool) -> list[list[float]]:
    """By input width and width; measured costs need not grow with either."""
    return [
        [scale * (dice.random() if measured else (1 + i + w) * dice.uniform(0.2, 0.4))
         for w in range(n)] for i in range(n)
    ]  # fmt: skip


def _table(dice: random.Random, shape: tuple[int, ...], low: float, high: float) -> Any:
    if not shape:
        return dice.uniform(low, high)
    return [_table(dice, shape[1:], low, high) for _ in range(shape[0])]


def _arrivals(dice: random.Random) -> list[float]:
    """Bursts and single requests, ms; sometimes none."""
    now, found = 0.0, []
    for _ in range(dice.choice((0, 1, 3, 10, 20))):
        found += [round(now, 6)] * dice.choice((1, 1, 2, 5))
        now += dice.choice((0.0, 0.05, 1.0, 5.0)) * dice.expovariate(1)
    return found[:60]
