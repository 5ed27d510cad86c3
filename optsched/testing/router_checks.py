"""`check_router`: what every router has to satisfy, whoever wrote it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.problems.routing.document import content
from optsched.problems.routing.log_check import check_log
from optsched.serving.core import Settings
from optsched.serving.simulator import Run, simulate
from optsched.testing.routing_problems import random_routing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.problems.routing import Routing
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
        Of the scenarios, see `optsched.testing.routing_problems.random_routing`.

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
