"""`check_router`: what every router has to satisfy, on small random scenarios of every kind."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.problems.routing import Contention, Link, Routing, Server
from optsched.problems.routing.document import content
from optsched.problems.routing.log_check import check_log
from optsched.serving.core import Settings
from optsched.serving.simulator import Run, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.serving.routers import Decision, OwnRouter, Router, View


def check_router(
    router: OwnRouter | Router | Callable[[], OwnRouter | Router], seeds: Iterable[int] = range(20)
) -> None:
    """Serve small random scenarios under a router, and check what all routers promise.

    Every decision is legal: an integer server, width and group, where `View.feasible` allows it and
    with at most ``view.problem.max_batch`` requests. All requests are done; the history passes
    `check_log`; neither the view nor the scenario is changed; and a second simulation, under a
    router that has not been used, returns the same bits: random numbers come from a generator of
    the router's own, with a fixed seed.

    Parameters
    ----------
    router
        A router, of which every simulation gets a deep copy, as it is now; or a class or function
        without arguments that makes one, for routers that cannot be copied.
    seeds
        Of the scenarios, see `random_routing`.

    Raises
    ------
    AssertionError
        Names the router, the scenario, and what is wrong.
    """
    made = isinstance(router, type) or not (hasattr(router, "route") or hasattr(router, "compiled"))
    assert not made or callable(router), f"router: {router!r:.60} has no method `route`"
    seeds = list(seeds)
    assert seeds, "no seeds: nothing would be checked"
    for seed in seeds:
        one, other = (router() if made else copy.deepcopy(router) for _ in range(2))  # type: ignore[operator]
        built_in = hasattr(one, "compiled")
        problem = random_routing(seed, **({"max_batch": 4096} if built_in else {}))
        place = f"{type(one).__name__}, {problem.name}"
        before = content(problem)
        run = _simulated(place, problem, one, seed)
        done, n = run.summary.completed, problem.n_requests
        assert done == n, f"{place}: {done} of {n} requests are done"
        violations = check_log(problem, _log(run))
        assert not violations, f"{place}: {violations[0]}"
        again = _simulated(place, problem, other, seed)
        assert _log(run).to_json() == _log(again).to_json(), (
            f"{place}: two simulations differ: route() draws numbers without a fixed seed, or "
            "remembers something outside of the router"
        )
        assert content(problem) == before, f"{place}: route() changes the scenario"


def _simulated(place: str, problem: Routing, router: Any, seed: int) -> Run:
    """A run, with the router's own mistakes told as such."""
    watched = router if hasattr(router, "compiled") else _Watched(router, place)
    try:
        return simulate(problem, watched, settings=Settings(strict=seed % 2 == 1), seed=seed)
    except InputError as error:
        said = str(error).replace(_Watched.__name__, type(router).__name__)
        raise AssertionError(f"{place}: {said}") from error
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise AssertionError(f"{place}: route() changes the view ({error})") from error


class _Watched:
    """A router whose view must stay as it is."""

    def __init__(self, router: OwnRouter, place: str) -> None:
        self._router, self._place = router, place

    def route(self, view: View) -> Decision:
        """Ask the router."""
        before = _bits(view._world)
        decision = self._router.route(view)
        assert _bits(view._world) == before, f"{self._place}: route() changes the simulation"
        return decision


def _bits(world: Any) -> list[bytes]:
    """All of a simulation but the open decision."""
    rows = [*world.core, *world._replace(core=None, trace=None)]
    return [row.tobytes() for row in rows if isinstance(row, np.ndarray)]


def _log(run: Run) -> Any:
    assert run.log is not None
    return run.log


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
