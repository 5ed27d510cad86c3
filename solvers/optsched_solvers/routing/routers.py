"""Routers as solvers: a problem of routing is simulated once, with the plan of `best_plan`."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from optsched.errors import InputError
from optsched.problems.routing import Routing
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.problems.routing.plan import Plan
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

NOT_LOADED = "the limit came before compiled code was loaded (see `optsched warmup`)"
MOST_SECONDS: Final = 10.0
PLANNING: Final = 0.75
"""Share of the time left that the plan may take."""
_PLAN = "a Plan, a file optsched.routing-plan/1, or 'cold' (default: the best plan)"


class _Routed:
    """A router, simulated once; of the bound only what every request takes alone is known."""

    name: ClassVar[str]
    kinds: ClassVar = ("routing",)
    options: Mapping[str, str] = MappingProxyType({"plan": _PLAN})

    def supports(self, problem: Problem) -> Support:
        """Any scenario."""
        if isinstance(problem, Routing):
            return Support(True)
        return Support(False, "it routes requests (optsched.Routing)")

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Simulate, cold if no plan is found in time; the seed is the router's."""
        from optsched.serving.simulator import simulate
        from optsched_solvers.routing.plan import TooLate

        assert isinstance(problem, Routing)
        if not load(monitor, "optsched.serving.world:advance"):
            return Result("unknown", reason=NOT_LOADED)
        seconds = min(PLANNING * monitor.remaining, MOST_SECONDS)
        try:
            plan = plan_of(problem, limits.options.get("plan"), seconds)
        except TooLate:
            plan = None
        run = simulate(problem, self.router(problem, plan, limits), plan=plan, seed=limits.seed)
        monitor.advance(1)
        assert run.log is not None
        monitor.incumbent(run.log, run.cost, self.name)
        return Result("unknown")

    def router(self, problem: Routing, plan: Plan | None, limits: Limits) -> Any:
        """What decides."""
        raise NotImplementedError


def plan_of(problem: Routing, given: Any, time_limit: float = MOST_SECONDS) -> Plan | None:
    """The plan that an option means, by default the best found in the seconds; None: cold.

    Raises
    ------
    InputError
        It is none, or does not fit the servers.
    """
    from optsched.problems.routing.plan import Plan

    if given is None:
        from optsched_solvers.routing.plan import best_plan

        return best_plan(problem, time_limit=time_limit)
    if given == "cold":
        return None
    plan = Plan.read(given, problem) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(plan, Plan):
        raise InputError(f"options: plan: expected {_PLAN}, got {given!r:.60}")
    plan.check(problem)
    return plan


def _rules(name: str, width: str, server: str, group: int, text: str) -> type[_Routed]:
    """A solver of built-in rules."""

    def router(_self: Any, problem: Routing, plan: Plan | None, _limits: Limits) -> Any:
        from optsched.serving import routers

        if width == "Static":
            rule = routers.Static(best_tuple(problem, plan))
        else:
            rule = getattr(routers, width)()
        return routers.Router(rule, getattr(routers, server)(), min(group, problem.max_batch))

    return type(name, (_Routed,), {"name": text, "router": router, "__doc__": f"`{text}`."})


def best_tuple(problem: Routing, plan: Plan | None) -> tuple[int, ...]:
    """The tuple that most requests get in the fluid optimum."""
    from optsched_solvers.routing.plan import fluid_shares

    row = problem.tuples[int(fluid_shares(problem, plan).argmax())]
    return tuple(int(w) for w in row)


Random = _rules("Random", "RandomWidth", "Random", 0, "random")
RoundRobin = _rules("RoundRobin", "RandomWidth", "RoundRobin", 0, "round_robin")
Static = _rules("Static", "Static", "JSED", 8, "static")
Jsed = _rules("Jsed", "RandomWidth", "JSED", 8, "jsed")
PowerOfTwo = _rules("PowerOfTwo", "Static", "PowerOfTwo", 8, "power_of_two")
Backlog = _rules("Backlog", "Backlog", "JSED", 8, "backlog")
Fluid = _rules("Fluid", "Fluid", "JSED", 8, "fluid")


class Marginal(_Routed):
    """Width and server of the least marginal cost."""

    name = "marginal"

    def router(self, problem: Routing, plan: Plan | None, limits: Limits) -> Any:
        """`optsched.serving.MarginalCost`."""
        from optsched.serving.routers import MarginalCost

        return MarginalCost(group=min(10, problem.max_batch))


class Ppo(_Routed):
    """A policy that `optsched serve-train` has learnt."""

    name = "ppo"
    options = MappingProxyType({"plan": _PLAN, "policy": "file of a policy (.npz); needed"})

    def router(self, problem: Routing, plan: Plan | None, limits: Limits) -> Any:
        """The policy."""
        from optsched.serving.policy import Policy

        path = limits.options.get("policy")
        if path is None:
            raise InputError("options: ppo needs policy, a file that `optsched serve-train` wrote")
        return Policy.load(path)


class Auto(Marginal):
    """The best built-in router."""

    name = "auto"
