"""Linear models of routing: the placement plan, and the fluid optimum of a plan."""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.values import number
from optsched.serving.fields import NS_PER_MS, POINTS
from optsched.serving.plan import SLOTS, Plan

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    from optsched.serving.scenario import Scenario

MOST_TUPLES: Final = 4096

BATCH: Final = 8
"""Mean batch that the models assume."""

BUSY: Final = 0.8
"""Share of the time that instances may be busy at the planned rate."""

WAITING: Final = (1.5, 0.8, 0.4, 0.25)
"""Mean wait at 0, 1, 2, ... instances of a segment on a server, in service times (rough)."""


class TooLate(InputError):
    """No plan was found in time."""


class _Times(NamedTuple):
    """Of a batch of `BATCH` images, [server][segment][input width][width]."""

    busy: npt.NDArray[np.float64]
    """ns of an instance per image."""
    load: npt.NDArray[np.float64]
    """ns of U = 1 per image."""
    whole: npt.NDArray[np.float64]
    """ns from start to end."""


def plan_instances(
    scenario: Scenario,
    *,
    rate: float | None = None,
    headroom: float = 3.0,
    time_limit: float = 10.0,
) -> Plan:
    """Choose which instances are resident where, by a mixed-integer model.

    Integers are the instances per server, segment and width; the rest is fluid: shares of tuples,
    and the server of every step (segment, input width, width). Instances are busy at most `BUSY`
    of the time at the planned rate, batches of a width run on instances at least as wide, a
    server's load stays below its knee, memory and slots suffice. Minimised is what a request
    costs: batch times, lost accuracy, and a rough wait that falls with the instances of a segment
    on a server. How much each width counts there comes from the model without integers.

    Parameters
    ----------
    scenario
        Servers and network; of the trace only the mean rate is looked at.
    rate
        Requests per second; None: the trace's mean.
    headroom
        Planned is for so many times the rate, so that bursts are served.
    time_limit
        Seconds.

    Returns
    -------
    Plan
        With its status and bound by the model. If not even the narrowest tuple fits the rate, a
        plan for a lower one, its `rate`, found by halving.

    Raises
    ------
    InputError
        Servers cannot hold an instance of every segment.
    TooLate
        No plan was found in time.
    """
    number("headroom", headroom, above=True)
    given = scenario.rate if rate is None else number("rate", rate, what="requests per second")
    end = time.monotonic() + time_limit
    busy = _times(scenario).busy
    least = busy.min(axis=(0, 2, 3)).sum()  # ns of an image, at best
    target = min(max(given, 1e-3) * headroom, 1e9 * SLOTS * len(busy) * BUSY / max(least, 1e-3))
    for step in range(60):
        fluid = _solve(scenario, target, None, end - time.monotonic())
        if step == 0 and fluid is None:  # perhaps no rate fits
            if _solve(scenario, target / 2**60, None, end - time.monotonic()) is None:
                break
        elif fluid is not None:
            weight = _weights(scenario, fluid.shares)
            found = _solve(scenario, target, None, end - time.monotonic(), weight)
            if found is not None:
                return found
        target /= 2
    raise InputError("servers: together they cannot hold an instance of every segment")


def plan_of(
    scenario: Scenario, given: str | os.PathLike[str], time_limit: float = 10.0
) -> Plan | None:
    """Return the best plan for ``"auto"``, None for ``"cold"``, else the plan in a file."""
    if str(given) == "auto":
        return plan_instances(scenario, time_limit=time_limit)
    return None if str(given) == "cold" else Plan.read(given, scenario)


def fluid_shares(
    scenario: Scenario, plan: Plan | None, *, rate: float | None = None
) -> npt.NDArray[np.float64]:
    """The best shares of all tuples at a rate, by the fluid model.

    Parameters
    ----------
    scenario
        Servers and network.
    plan
        Instances; None: those that the model would choose itself.
    rate
        Requests per second; None: the trace's mean. A rate that is too high is lowered until it
        fits.

    Returns
    -------
    array
        A share a tuple, in the order of `Scenario.tuples`.
    """
    target = max(scenario.rate if rate is None else rate, 1e-3)
    for _ in range(40):
        found = _solve(scenario, target, plan, 10.0)
        if found is not None:
            rows = scenario.tuples.tolist()
            shares = np.array([found.shares.get(tuple(row), 0.0) for row in rows])
            return shares / float(shares.sum())
        target *= 0.8
    raise InputError("plan: it serves no request")


def _times(scenario: Scenario) -> _Times:
    work = BATCH * scenario.mmac[None]
    cost = BATCH * scenario.cost
    busy, load = np.empty_like(scenario.cost), np.zeros_like(scenario.cost)
    for s, server in enumerate(scenario.servers):
        slowed = 1.0
        if server.contention is not None:
            knee = min(server.contention.knee, 1.0)
            slowed += server.contention.below * knee / 2
        busy[s] = (scenario.launch[s] + cost[s] * slowed) / BATCH
        if server.sat_mmac is not None:
            x = work[0] / server.sat_mmac
            load[s] = busy[s] * (x / (1 + x) + 0.02)
    return _Times(busy, load, busy * BATCH)


def _solve(
    scenario: Scenario, rate: float, plan: Plan | None, seconds: float, weight: Any = None
) -> Plan | None:
    """The best plan at a rate, or with a plan the best shares; None if the rate is too high.

    Without `weight`, of how often every width is run, instances are fractions.
    """
    from ortools.linear_solver import pywraplp

    solver: Any = pywraplp.Solver.CreateSolver("GLOP" if weight is None else "SCIP")
    servers, (segments, widths) = len(scenario.servers), scenario.vram.shape
    if len(scenario.tuples) > MOST_TUPLES:
        raise InputError(
            f"widths: the planner's model takes {MOST_TUPLES} tuples, here are "
            f"{len(scenario.tuples)}; give a plan of your own, or start cold"
        )
    times, per_ns = _times(scenario), rate / 1e9
    share = [solver.NumVar(0, 1, "") for _ in scenario.tuples]
    solver.Add(solver.Sum(share) == 1)
    inputs = [range(widths) if k else range(1) for k in range(segments)]
    flow = {
        (s, k, i, w): solver.NumVar(0, 1, "")
        for s, k in product(range(servers), range(segments))
        for i in inputs[k]
        for w in range(widths)
    }
    for k in range(segments):
        for i, w in product(inputs[k], range(widths)):
            own = np.flatnonzero((scenario.inputs[:, k] == i) & (scenario.tuples[:, k] == w))
            moved = solver.Sum([flow[s, k, i, w] for s in range(servers)])
            solver.Add(moved == solver.Sum([share[j] for j in own]))
    count: Any = np.zeros((servers, segments, widths), np.int64)
    if plan is None:
        count = np.empty((servers, segments, widths), object)
        for at in np.ndindex(count.shape):
            count[at] = (solver.NumVar if weight is None else solver.IntVar)(0, SLOTS, "")
    else:
        np.add.at(count, tuple(np.array(plan.instances, np.int64).reshape(-1, 3).T), 1)
    cost = []
    for s, server in enumerate(scenario.servers):
        if plan is None:
            solver.Add(solver.Sum(list(count[s].ravel())) <= SLOTS)
            held = [
                int(v) * n for v, n in zip(scenario.vram.ravel(), count[s].ravel(), strict=True)
            ]
            solver.Add(solver.Sum(held) <= round(server.vram_mb * 1000))
        load = []
        for k in range(segments):
            steps = [(i, w) for i in inputs[k] for w in range(widths)]
            busy = {at: per_ns * times.busy[s, k][at] for at in steps}
            for least in range(widths):  # nested pools: who needs at least this width
                needed = [busy[at] * flow[(s, k, *at)] for at in steps if at[1] >= least]
                there = (
                    solver.Sum(list(count[s, k, least:]))
                    if plan is None
                    else int(count[s, k, least:].sum())
                )
                solver.Add(solver.Sum(needed) <= BUSY * there)
                if weight is not None:  # also at a rate within the tolerance of integers
                    any_of = [flow[(s, k, *at)] for at in steps if at[1] >= least]
                    solver.Add(solver.Sum(any_of) <= there)
            load += [per_ns * times.load[s, k][at] * flow[(s, k, *at)] for at in steps]
            cost += [times.whole[s, k][at] * flow[(s, k, *at)] for at in steps]
            if weight is not None:
                cost += _waiting(scenario, solver, times.whole[s, k], weight, count, s, k)
        knee = 1.0 if server.contention is None else server.contention.knee
        solver.Add(solver.Sum(load) <= knee)
    cost += [value * one for value, one in zip(scenario.lost.tolist(), share, strict=True)]
    solver.Minimize(solver.Sum(cost))
    solver.SetTimeLimit(max(1, round(seconds * 1000)))
    status = solver.Solve()
    if status not in (solver.OPTIMAL, solver.FEASIBLE):
        if status == solver.NOT_SOLVED or seconds <= 0:
            raise TooLate("time_limit: no plan was found in time; give more")
        return None
    found = np.array([one.solution_value() for one in share])
    rows = () if plan is None else plan.instances
    if weight is not None:
        chosen = ((at, round(count[at].solution_value())) for at in np.ndindex(count.shape))
        rows = tuple(at for at, n in chosen for _ in range(n))
    tuples = map(tuple, scenario.tuples.tolist())
    objective = solver.Objective()
    return Plan(
        rows,
        "optimal" if status == solver.OPTIMAL else "feasible",
        objective.Value() / NS_PER_MS,
        None if weight is None else objective.BestBound() / NS_PER_MS,
        float(found @ scenario.points) / POINTS,
        rate,
        {row: float(one) for row, one in zip(tuples, found, strict=True) if one > 1e-9},
    )


def _waiting(
    scenario: Scenario, solver: Any, service: Any, weight: Any, count: Any, s: int, k: int
) -> list[Any]:
    """What requests wait less, the more instances of segment k can run them, on server s."""
    speed = 1 / np.maximum(scenario.cost.mean(axis=(1, 2, 3)) + scenario.launch, 1)
    found = []
    for v in np.flatnonzero(weight[k]):
        steps = [solver.NumVar(0, 1, "") for _ in WAITING[1:]]
        solver.Add(solver.Sum(steps) <= solver.Sum(list(count[s, k, v:])))
        worth = float(service[:, v].mean() * speed[s] / speed.sum() * weight[k, v])
        found.append(WAITING[0] * worth)
        for before, after, step in zip(WAITING[:-1], WAITING[1:], steps, strict=True):
            found.append(-(before - after) * worth * step)
    return found


def _weights(scenario: Scenario, shares: dict[tuple[int, ...], float]) -> Any:
    """How often every width is run, [segment][width]: half at the planned rate, half when quiet."""
    found = np.zeros(scenario.vram.shape)
    quiet = tuple(scenario.tuples[_best_alone(scenario)].tolist())
    for row, share in [*shares.items(), (quiet, 1.0)]:
        found[np.arange(len(row)), row] += share / 2
    return found


def _best_alone(scenario: Scenario) -> int:
    """The tuple that costs a lone request least, lost accuracy included."""
    segments = np.arange(scenario.n_segments)
    alone = scenario.cost[:, segments, scenario.inputs, scenario.tuples].sum(axis=2).min(axis=0)
    return int((alone + scenario.lost).argmin())
