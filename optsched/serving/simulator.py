"""Simulate a router on a scenario."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError, InternalError
from optsched.io.values import integer
from optsched.problems.routing import Routing
from optsched.problems.routing.checks import milliseconds
from optsched.problems.routing.log import BATCH, ENTRY, INSTANCE, Log, Summary, telemetry
from optsched.problems.routing.plan import SLOTS
from optsched.problems.routing.problem import NS_PER_MS
from optsched.serving import routers, world
from optsched.serving.core import NEVER, Settings, new_core, pin
from optsched.serving.rules import Compiled
from optsched.serving.world import World, advance

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule
    from optsched.problems.routing.plan import Plan
    from optsched.serving.policy import Policy

_ROWS = 1024  # instances that a log has room for before it grows


@dataclass(frozen=True, eq=False)
class Run:
    """A simulated history."""

    problem: Routing
    log: Log | None
    summary: Summary
    cost: int
    """The objective, see `Routing`."""
    finish: Any
    """When every request was done, ns; -1: never."""

    @cached_property
    def schedule(self) -> Schedule:
        """The history as a schedule."""
        return self._log.schedule()

    @cached_property
    def telemetry(self) -> list[dict[str, Any]]:
        """What an operator's dashboard shows, a row every 100 ms; see `serving.telemetry`."""
        return telemetry(self._log)

    @property
    def _log(self) -> Log:
        if self.log is None:
            raise InputError("log: was not kept; simulate(..., log=True) keeps it")
        return self.log


def simulate(
    problem: Routing,
    router: routers.Router | routers.MarginalCost | Policy | routers.OwnRouter | None = None,
    *,
    plan: Plan | None = None,
    settings: Settings | None = None,
    seed: int = 0,
    horizon_ms: float | None = None,
    log: bool = True,
) -> Run:
    """Serve the requests of a scenario in virtual time.

    Parameters
    ----------
    problem
        Servers, network and arrivals.
    router
        Rules, a learned policy, or any object with a method ``route(view) -> Decision``; None:
        `Router()`.
    plan
        Instances that are resident from the beginning; None: everything is loaded when needed.
    settings
        Of the greedy core on every server.
    seed
        Of the router's random numbers; those of the arrivals are others.
    horizon_ms
        Stop then; None: when every request is done.
    log
        Whether to keep the history; without it a simulation takes about two thirds of the time.

    Returns
    -------
    Run
        The same bits for the same arguments.

    Raises
    ------
    InfeasibleRoute
        The router sent a block where it can never run, or gave no decision.
    InputError
        An argument is wrong, or the plan does not fit the servers.
    """
    if not isinstance(problem, Routing):
        raise InputError(f"problem: expected a Routing, got {problem!r:.60}")
    chosen = routers.Router() if router is None else router
    state = new_world(problem, chosen, plan, settings, seed, log=log)
    if horizon_ms is not None:
        state.trace["horizon"] = round(milliseconds("horizon_ms", horizon_ms) * NS_PER_MS)
    view = routers.View(problem, state)
    while (status := advance(state)) > world.DRAINED:
        if status == world.ASKED:
            ask(problem, chosen, view, state)
        elif status == world.FULL:
            state = state._replace(instance_row=twice(state.instance_row))
            view = routers.View(problem, state)
        elif status == world.ENDED:
            break
        elif status == world.INFEASIBLE:
            raise routers.InfeasibleRoute(infeasible(problem, state))
        else:
            raise InternalError("the simulation has stopped before all requests are done")
    known = isinstance(chosen, routers.Router | routers.MarginalCost)
    told = {
        "seed": seed, "router": repr(chosen) if known else type(chosen).__name__,
        "plan": "cold" if plan is None else [list(row) for row in plan.instances],
        "settings": vars(settings or Settings()),
    }  # fmt: skip
    return _run(problem, state, told, cut=horizon_ms is not None)


def new_world(
    problem: Routing,
    router: Any,
    plan: Plan | None = None,
    settings: Settings | None = None,
    seed: int = 0,
    *,
    log: bool = False,
) -> World:
    """A simulation at its beginning; see `simulate`."""
    seed = integer("seed", seed, 0, 2**31 - 1)
    if not isinstance(settings, Settings | None):
        raise InputError(f"settings: expected Settings, got {settings!r:.60}")
    if hasattr(router, "compiled") and not isinstance(router, type):
        rule = router.compiled(problem, plan, seed)
    elif callable(getattr(router, "route", None)) and not isinstance(router, type):
        rule = Compiled.outside()
    else:
        raise InputError(f"router: expected a Router or route(view), got {router!r:.60}")
    n, k, servers = problem.n_requests, problem.n_segments, len(problem.servers)
    core = new_core(problem, n + 1, settings or Settings())
    if plan is not None:
        if not hasattr(plan, "check"):
            raise InputError(f"plan: expected a Plan, got {plan!r:.60}")
        plan.check(problem)
        for row in plan.instances:
            pin(core, *row)
    trace = np.zeros(1, world.TRACE)
    trace["router"], trace["router_at"], trace["horizon"] = problem.router, NEVER, NEVER - 1
    trace["asked"], trace["logs"] = -1, log
    request = np.zeros(n, world.REQUEST)
    request["finish"] = -1
    planned = problem.n_widths if len(rule.share) else 1
    instance_row = np.zeros(_ROWS if log else 0, INSTANCE)
    if log:
        for row in plan.instances if plan is not None else ():
            at = int(trace["instances"][0])
            own = int((instance_row["server"][:at] == row[0]).sum())
            instance_row[at] = (row[0], own, *row[1:], 0, 0, -1)
            trace["instances"] += 1
    return World(
        core, trace, request, problem.arrival,
        np.zeros(k * planned, world.FIFO),
        np.zeros(3 * servers * SLOTS + n + 16, world.EVENT),
        problem.transfer, world.feasible(problem, plan), rule.rule,
        rule.ladder, rule.ladder_mmac, rule.share, rule.weights,
        np.zeros(n * k if log else 0, BATCH), np.zeros(n * k if log else 0, ENTRY), instance_row,
    )  # fmt: skip


def ask(problem: Routing, router: Any, view: routers.View, state: World) -> None:
    """Write a router's decision into the simulation."""
    decision = router.route(view)
    trace = state.trace[0]
    limits = (len(problem.servers), problem.n_widths, problem.max_batch + 1)
    names = ("server", "width", "group")
    given = [getattr(decision, name, None) for name in names]
    if given == [None] * 3:
        raise routers.InfeasibleRoute(
            f"decision {int(trace['decisions'])} of {type(router).__name__}.route: expected a "
            f"Decision(server, width, group), got {decision!r:.60}"
        )
    for name, value, limit in zip(names, given, limits, strict=True):
        least = int(name == "group")
        if not isinstance(value, (int, np.integer)) or not least <= value < limit:
            raise routers.InfeasibleRoute(
                f"decision {int(trace['decisions'])} of {type(router).__name__}.route: {name}: "
                f"expected an integer in {least}..{limit - 1}, got {value!r:.60}"
            )
        trace[name] = value


def infeasible(problem: Routing, state: World) -> str:
    """Why the decision can never be carried out."""
    trace = state.trace[0]
    s, k, w = (int(trace[key]) for key in ("server", "segment", "width"))
    return (
        f"decision {int(trace['decisions'])}: server {problem.servers[s].id!r} can never run "
        f"segment {k} at width {w} ({problem.widths[w]:g}): its pinned instances leave no room"
    )


def twice(rows: Any) -> Any:
    """The rows, and room for as many more."""
    return np.concatenate([rows, np.zeros(len(rows), rows.dtype)])


def _run(problem: Routing, state: World, told: dict[str, Any], *, cut: bool) -> Run:
    trace = state.trace[0]
    end, decisions = int(trace["now"]), int(trace["decisions"])
    if trace["logs"]:
        history = Log(
            problem, state.batch_row[: trace["batches"]], state.request_row[: trace["entries"]],
            state.instance_row[: trace["instances"]], decisions, end if cut else None, told,
        )  # fmt: skip
        return Run(problem, history, history.summary, history.cost, history.finish)
    finish = state.request["finish"]
    latency = (finish - problem.arrival)[finish >= 0]
    accuracy = problem.accuracy[state.request["tuple"][finish >= 0]]
    energy = float(state.core.server["energy"].sum())
    mean = float(trace["variance"]) / max(end, 1)
    spread = max(0.0, float(trace["variance_squared"]) / max(end, 1) - mean**2) ** 0.5
    summary = Summary.of(problem, latency, accuracy, energy, (mean, spread), end, decisions)
    return Run(problem, None, summary, problem.price(latency, accuracy, energy), finish)
