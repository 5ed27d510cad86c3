"""Small random serving scenarios of every kind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from optsched.problems.routing import Contention, Link, Routing, Server


def random_routing(seed: int, **fields: Any) -> Routing:
    """A scenario of at most 4 servers, 4 segments, 4 widths and 60 requests.

    With and without links, contention, loads, measured costs, a router's time, room for more than
    one instance; requests arrive together, one by one, or not at all.

    Parameters
    ----------
    seed
        Of everything.
    fields
        Fields of `Routing` to have instead.
    """
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
    return Routing(**{**given, **fields})


def _server(dice: random.Random, name: str, number: int, vram: Any, n: int) -> Server:
    """The first one can hold every instance, though perhaps only one at a time."""
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
    )


def _costs(dice: random.Random, n: int, scale: float, *, measured: bool) -> list[list[float]]:
    """By input width and width; what was measured need not grow with either."""
    return [
        [scale * (dice.random() if measured else (1 + i + w) * dice.uniform(0.2, 0.4))
         for w in range(n)] for i in range(n)
    ]  # fmt: skip


def _table(dice: random.Random, shape: tuple[int, ...], low: float, high: float) -> Any:
    if not shape:
        return dice.uniform(low, high)
    return [_table(dice, shape[1:], low, high) for _ in range(shape[0])]


def _arrivals(dice: random.Random) -> list[float]:
    """Bursts at one moment and single requests, ms; sometimes nobody."""
    now, found = 0.0, []
    for _ in range(dice.choice((0, 1, 3, 10, 20))):
        found += [round(now, 6)] * dice.choice((1, 1, 2, 5))
        now += dice.choice((0.0, 0.05, 1.0, 5.0)) * dice.expovariate(1)
    return found[:60]
