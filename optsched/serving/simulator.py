"""Simulate a router on a scenario in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from optsched.errors import InputError, InternalError
from optsched.io.values import integer
from optsched.serving import routers, world
from optsched.serving.core import new_core, pin
from optsched.serving.log import BATCH, ENTRY, INSTANCE, SHED, Log, Summary, percentile
from optsched.serving.rules import EXTERNAL, Compiled, rule_of
from optsched.serving.scenario import Scenario, Settings
from optsched.serving.tables import NEVER, NS_PER_MS, POINTS, SLOTS, milliseconds
from optsched.serving.world import World, advance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optsched.model.schedule import IntArray, Schedule
    from optsched.serving.plan import Plan


@dataclass(frozen=True, eq=False)
class Run:
    """Result of a simulation: summary, objective and, if kept, the log.

    Examples
    --------
    >>> from optsched import serving
    >>> run = serving.simulate(serving.reference(rate=500, seconds=0.1))
    >>> run.summary.completed == len(run.finish)
    True
    """

    scenario: Scenario
    log: Log | None
    summary: Summary
    cost: int
    """The objective in ns, see `Scenario`."""
    finish: IntArray
    """Completion time of every request, ns; -1: not completed."""
    tuples: IntArray
    """Index in ``scenario.tuples`` of the widths that every completed request was run at."""

    @cached_property
    def schedule(self) -> Schedule:
        """The log as a schedule."""
        if self.log is None:
            raise InputError("log: was not kept; simulate(..., log=True) keeps it")
        return self.log.schedule()

    _repr_html_ = Log._repr_html_

    def __repr__(self) -> str:
        done = f"{self.summary.completed} requests completed"
        return f"<{type(self).__name__} of {self.scenario.name!r:.60}: {done}>"


def simulate(
    scenario: Scenario,
    router: routers.AnyRouter | None = None,
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
    router
        Rules, a learned policy, or any object with a method ``route(view) -> Decision``; None:
        `MarginalCost()`.
    plan
        Instances that are resident from the beginning; None: all are loaded on demand.
    seed
        Of the router's random numbers, a stream separate from that of the arrivals.
    horizon_ms
        End of the simulation; None: when all requests are completed.
    log
        Whether to keep the log; without it a simulation takes about two thirds of the time.

    Returns
    -------
    Run
        The same bits for the same arguments.

    Raises
    ------
    InfeasibleRoute
        The router sent a block where it can never run, or returned no decision.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> plan = serving.plan_instances(scenario)
    >>> run = serving.simulate(scenario, serving.MarginalCost(), plan=plan)
    >>> run.summary.completed
    43
    """
    if not isinstance(scenario, Scenario):
        raise InputError(f"scenario: expected a Scenario, got {scenario!r:.60}")
    chosen = routers.MarginalCost() if router is None else router
    state = new_world(scenario, chosen, plan, settings, seed, log=log)
    if horizon_ms is not None:
        state.trace["horizon"] = round(milliseconds("horizon_ms", horizon_ms) * NS_PER_MS)
    view = routers.View(scenario, state)
    while (status := advance(state)) > world.DRAINED:
        if status == world.UNDECIDED:
            query(scenario, chosen, view, state)
        elif status == world.FULL:
            state = state._replace(instance_row=doubled(state.instance_row))
            view = routers.View(scenario, state)
        elif status == world.ENDED:
            break
        elif status == world.INFEASIBLE:
            raise routers.InfeasibleRoute(infeasible(scenario, state))
        else:
            raise InternalError("the simulation has stopped before all requests are completed")
    trace, history = state.trace[0], None
    horizon = None if horizon_ms is None else int(trace["now"])
    summary, cost = totals(scenario, state, horizon)
    if log:
        ours = isinstance(chosen, routers.Router | routers.MarginalCost)
        provenance = {
            "seed": seed,
            "router": repr(chosen) if ours else type(chosen).__name__,
            "plan": "cold" if plan is None else [list(row) for row in plan.instances],
            "settings": vars(settings or Settings()),
        }
        history = Log(
            scenario, state.batch_row[: trace["batches"]], state.request_row[: trace["entries"]],
            state.instance_row[: trace["instances"]], shed_rows(state), summary, horizon,
            provenance,
        )  # fmt: skip
    return Run(scenario, history, summary, cost, state.request["finish"], state.request["tuple"])


def new_world(
    scenario: Scenario,
    router: Any,
    plan: Plan | None = None,
    settings: Settings | None = None,
    seed: int = 0,
    *,
    log: bool = False,
) -> World:
    """Create the initial state of a simulation; see `simulate`."""
    seed = integer("seed", seed, 0, 2**31 - 1)
    if not isinstance(settings, Settings | None):
        raise InputError(f"settings: expected Settings, got {settings!r:.60}")
    if hasattr(router, "compiled") and not isinstance(router, type):
        rule = router.compiled(scenario, seed)
    elif callable(getattr(router, "route", None)) and not isinstance(router, type):
        rule = Compiled(rule_of(EXTERNAL))
    else:
        raise InputError(f"router: expected a Router or route(view), got {router!r:.60}")
    n, k, settings = scenario.n_requests, scenario.n_segments, settings or Settings()
    core = new_core(scenario, n + 1, settings)
    trace = np.zeros(1, world.TRACE)
    trace["router"], trace["router_at"], trace["horizon"] = scenario.router, NEVER, NEVER - 1
    trace["decision"], trace["logs"], trace["shed"], trace["shed_at"] = -1, log, -1, -NEVER
    trace["alone"] = (scenario.cost[..., 0, 0] + scenario.launch[:, None]).min(axis=0).sum()
    trace["deadlines"], trace["sheds"] = scenario.deadline_ms is not None, settings.shed
    request = np.zeros(n, world.REQUEST)
    request["finish"] = request["shed"] = -1
    instance_row = np.zeros(1024 if log else 0, INSTANCE)  # grows
    if plan is not None:
        if not hasattr(plan, "check"):
            raise InputError(f"plan: expected a Plan, got {plan!r:.60}")
        plan.check(scenario)
        for row in plan.instances:
            number = pin(core, *row)
            if log:
                instance_row[trace["instances"][0]] = (row[0], number, *row[1:], 0, 0, -1)
                trace["instances"] += 1
    heap = np.zeros(3 * len(core.server) * SLOTS + n + 16, world.EVENT)
    batch_row, request_row = (np.zeros(n * k if log else 0, kind) for kind in (BATCH, ENTRY))
    return World(
        core, trace, request, scenario.arrival, scenario.deadline, np.zeros(k, world.FIFO), heap,
        scenario.transfer, world.feasible(scenario, plan), rule.rule, rule.ladder, rule.weights,
        batch_row, request_row, instance_row,
    )  # fmt: skip


def query(scenario: Scenario, router: Any, view: routers.View, state: World) -> None:
    """Call a Python router and write its decision into the simulation."""
    decision = router.route(view)
    trace = state.trace[0]
    place = f"decision {int(trace['decisions'])} of {type(router).__name__}.route"
    ends = {
        "server": (0, len(scenario.servers) - 1), "width": (0, scenario.n_widths - 1),
        "group": (1, scenario.max_batch),
    }  # fmt: skip
    if not all(hasattr(decision, name) for name in ends):
        raise routers.InfeasibleRoute(
            f"{place}: expected a Decision(server, width, group), got {decision!r:.60}"
        )
    for name, limits in ends.items():
        try:
            trace[name] = integer(f"{place}: {name}", getattr(decision, name), *limits)
        except InputError as error:
            raise routers.InfeasibleRoute(str(error)) from None


def infeasible(scenario: Scenario, state: World) -> str:
    """Error message for a decision that can never be carried out."""
    trace = state.trace[0]
    s, k, w = (int(trace[key]) for key in ("server", "segment", "width"))
    return (
        f"decision {int(trace['decisions'])}: server {scenario.servers[s].id!r} can never run "
        f"segment {k} at width {w} ({scenario.widths[w]:g}): its pinned instances leave no room"
    )


def doubled(rows: Any) -> Any:
    """Return the rows with twice the capacity."""
    return np.concatenate([rows, np.zeros(len(rows), rows.dtype)])


def totals(
    scenario: Scenario, state: World, horizon: int | None, *, energy: bool = True
) -> tuple[Summary, int]:
    """Summary and objective from the counters of the kernels; `energy`: whether it is known."""
    trace, finish, shed = state.trace[0], state.request["finish"], state.request["shed"]
    end = max(int(finish.max(initial=0)), int(shed.max(initial=0))) if horizon is None else horizon
    done, dropped = finish >= 0, shed >= 0
    latency, wasted = (finish - scenario.arrival)[done], (shed - scenario.arrival)[dropped]
    points = scenario.points[state.request["tuple"][done]]
    due = (scenario.deadline < NEVER) & (done | dropped | (scenario.deadline <= end))
    late = int((finish > scenario.deadline).sum())
    kept = int((due & done).sum()) - late
    joules = float(state.core.server["energy"].sum())
    mean = float(trace["variance"]) / max(end, 1)
    spread = max(0.0, float(trace["variance_squared"]) / max(end, 1) - mean**2) ** 0.5
    ascending = np.sort(latency) / NS_PER_MS
    n, of, seconds = len(latency), scenario.n_requests, end / 1e9
    idle = sum(one.idle_w for one in scenario.servers) * seconds
    summary = Summary(
        completed=n,
        mean_ms=float(ascending.mean()) if n else None,
        sd_ms=float(ascending.std()) if n else None,
        p50_ms=percentile(ascending, 50),
        p99_ms=percentile(ascending, 99),
        accuracy=float(points.mean()) / POINTS if n else None,
        energy_j=joules if energy else None,
        dynamic_energy_j=joules - idle if energy else None,
        gpu_variance=mean,
        gpu_variance_sd=spread,
        throughput_per_s=n / seconds if seconds else None,
        completion=n / of if of else None,
        decisions=int(trace["decisions"]),
        shed=len(wasted),
        late=late,
        attainment=100 * kept / int(due.sum()) if due.any() else None,
    )
    lost = (n + len(wasted)) * int(scenario.points.max(initial=0)) - int(points.sum())
    cost = int(latency.sum()) + int(wasted.sum())
    cost += round(lost * scenario.ms_per_point * NS_PER_MS / POINTS)
    return summary, cost + round(joules * scenario.ms_per_joule * NS_PER_MS)


def shed_rows(state: World) -> Any:
    """Return the requests that were shed as rows of the log, by time."""
    found = np.flatnonzero(state.request["shed"] >= 0)
    rows = np.empty(len(found), SHED)
    rows["request"], rows["at"] = found, state.request["shed"][found]
    return rows[np.argsort(rows["at"], kind="stable")]


# comparisons

MEASURES = ("accuracy", "mean_ms", "p99_ms", "joules_per_image", "cost_ms", "throughput_per_s",
        "attainment")  # fmt: skip
"""Measures of a `Point`; those in `_MAXIMISED` are maximised, all others minimised."""

_MAXIMISED = ("accuracy", "throughput_per_s", "attainment")


class Point(msgspec.Struct, frozen=True):
    """Measures of a router on a load: means over seeds, half widths of 95 % intervals.

    Latencies in ms, energy in J, cost in ms a request; `attainment` only if there are deadlines.
    Energy per image is that of all seeds divided by the images of all seeds.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> point = serving.compare(scenario, {"auto": serving.MarginalCost()}, seeds=[0])[0]
    >>> point.router, point.seeds, point.saturated
    ('auto', 1, False)
    """

    load: str
    router: str
    seeds: int
    mean: dict[str, float]
    interval: dict[str, float]
    saturated: bool
    """Whether in any seed requests are completed long after the last arrival: then latencies
    measure the length of the trace, not the router."""


def compare(
    scenario: Scenario | Callable[[int], Scenario],
    routers: Mapping[str, Any],
    *,
    seeds: Iterable[int] = range(16),
    plan: Plan | None = None,
    settings: Settings | None = None,
    load: str = "",
    on_point: Callable[[Point], object] | None = None,
) -> list[Point]:
    """Simulate every router on the same traces, and return a point for each.

    Parameters
    ----------
    scenario
        A scenario, or a function from a seed to a scenario, for arrivals that differ.
    routers
        By name, as for `simulate`.
    seeds
        Of arrivals and routers.
    plan, settings
        As for `simulate`.
    load
        Name of the load, for tables.
    on_point
        Called with every point.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> narrow = serving.Router(serving.Static((0, 0, 0, 0)))
    >>> routers = {"narrow": narrow, "auto": serving.MarginalCost()}
    >>> [round(one.mean["accuracy"]) for one in serving.compare(scenario, routers, seeds=range(2))]
    [70, 76]
    """
    if not (numbers := list(seeds)) or not routers:
        raise InputError("seeds, routers: expected at least one of each")
    traces = [scenario if isinstance(scenario, Scenario) else scenario(i) for i in numbers]
    if not all(trace.n_requests for trace in traces):
        raise InputError("scenario: a trace without requests has nothing to compare")
    found = []
    for name, router in routers.items():
        runs = [
            simulate(trace, router, plan=plan, settings=settings, seed=seed, log=False)
            for trace, seed in zip(traces, numbers, strict=True)
        ]
        found.append(_point(name, load or traces[0].name, runs))
        if on_point is not None:
            on_point(found[-1])
    return found


def front_of(points: Sequence[Point], x: str = "accuracy", y: str = "p99_ms") -> list[Point]:
    """Return the points that no other dominates in both measures, without saturated points.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> routers = {str(w): serving.Router(serving.Static((w,) * 4)) for w in range(4)}
    >>> points = serving.compare(scenario, routers, seeds=[0])
    >>> [point.router for point in serving.front_of(points)]
    ['0', '1', '2', '3']
    """
    for key in (x, y):
        if not all(key in point.mean for point in points):
            raise InputError(f"{key}: the points do not have it; their scenarios have no deadlines")
    able = [point for point in points if not point.saturated]
    values = [[-p.mean[key] if key in _MAXIMISED else p.mean[key] for key in (x, y)] for p in able]
    return [
        point
        for point, (a, b) in zip(able, values, strict=True)
        if not any(c <= a and d <= b and (c, d) != (a, b) for c, d in values)
    ]


def _point(router: str, load: str, runs: Sequence[Run]) -> Point:
    from scipy.special import stdtrit  # quantile of Student's t

    rows = np.array([_measures(run) for run in runs])
    mean = rows.mean(axis=0)
    images = sum(run.summary.completed for run in runs)
    mean[3] = sum(run.summary.energy_j or 0.0 for run in runs) / max(images, 1)
    spread = rows.std(axis=0, ddof=1) if len(runs) > 1 else 0 * mean
    half = spread * stdtrit(max(len(runs) - 1, 1), 0.975) / len(runs) ** 0.5
    keys = MEASURES[: int(np.isfinite(mean).sum())]  # NaN: no attainment
    found, interval = (dict(zip(keys, row.tolist(), strict=False)) for row in (mean, half))
    return Point(load, router, len(runs), found, interval, any(map(_saturated, runs)))


def _measures(run: Run) -> list[float]:
    """Values of `MEASURES`; the attainment is NaN if there are no deadlines."""
    summary, n = run.summary, max(run.summary.completed, 1)
    return [
        summary.accuracy or 0.0, summary.mean_ms or 0.0, summary.p99_ms or 0.0,
        (summary.energy_j or 0.0) / n, run.cost / 1e6 / n, summary.throughput_per_s or 0.0,
        math.nan if summary.attainment is None else summary.attainment,
    ]  # fmt: skip


def _saturated(run: Run) -> bool:
    """Whether none is completed, or the last 50 ms and 5 % of the trace after the last arrival."""
    last = int(run.scenario.arrival[-1])
    missing = int((run.finish < 0).sum()) > run.summary.shed
    return (
        missing or not run.summary.completed or int(run.finish.max()) - last > max(0.05 * last, 5e7)
    )
