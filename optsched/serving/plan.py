"""Placement plans: the resident instances of every server, chosen by a mixed-integer model."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.strict_json import decode_document, indented, placed, read_json
from optsched.io.values import integer, number, one_of
from optsched.serving.tables import NS_PER_MS, POINTS, SLOTS, tuple_keys

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from optsched.serving.scenario import Scenario
    from optsched.serving.tables import FloatArray

FORMAT: Final = "optsched.routing-plan/1"
MAX_TUPLES: Final = 4096

BATCH: Final = 8
"""Mean batch size of the model."""

BUSY: Final = 0.8
"""Maximum utilisation of instances at the planned rate."""

WAITING: Final = (1.5, 0.8, 0.4, 0.25)
"""Mean wait with 0, 1, 2, ... instances of a segment on a server, in service times (rough)."""


class _Instances(msgspec.Struct, forbid_unknown_fields=True):
    server: int | str
    segment: int
    width: int
    count: int = 1


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    status: str = "feasible"
    objective_ms: float | None = None
    lower_bound_ms: float | None = None
    accuracy: float | None = None
    rate: float | None = None
    shares: dict[str, float] = {}
    instances: list[_Instances]


@dataclass(frozen=True)
class Plan:
    """Instances that are resident from the beginning and are never unloaded.

    Parameters
    ----------
    instances
        Rows (server, segment, width), counted from 0, in order.
    status
        ``"optimal"`` if proved in the planner's model, else ``"feasible"``.
    objective_ms, lower_bound_ms
        Objective of the planner's model, ms a request, and its bound.
    accuracy
        Percent, at the planned rate.
    rate
        Requests per second that the plan serves.
    shares
        Share of the requests at that rate, by tuple of widths, ``"0,2,3,3"``.

    Examples
    --------
    >>> from optsched import serving
    >>> plan = serving.Plan.of([(server, segment, 3) for server in (0, 1) for segment in range(4)])
    >>> serving.simulate(serving.reference(rate=500, seconds=0.1), plan=plan).summary.completion
    1.0
    """

    instances: tuple[tuple[int, int, int], ...]
    status: str = "feasible"
    objective_ms: float | None = None
    lower_bound_ms: float | None = None
    accuracy: float | None = None
    rate: float | None = None
    shares: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Plan {self.status}: {len(self.instances)} resident instances>"

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Plan:
        """Return a plan of rows (server, segment, width)."""
        found = []
        for i, row in enumerate(rows):
            if len(row) != 3:
                raise InputError(
                    f"instances[{i}]: expected (server, segment, width), got {row!r:.60}"
                )
            s, k, w = (integer(f"instances[{i}]", value, 0, 2**20) for value in row)
            found.append((s, k, w))
        return cls(tuple(sorted(found)))

    def check(self, scenario: Scenario) -> None:
        """Refuse a plan that does not fit the servers: unknown rows, memory, slots."""
        limits = (len(scenario.servers), scenario.n_segments, scenario.n_widths)
        for row in self.instances:
            for name, value, limit in zip(("server", "segment", "width"), row, limits, strict=True):
                integer(f"plan: {name}", value, 0, limit - 1)
        for s, server in enumerate(scenario.servers):
            resident = [row[1:] for row in self.instances if row[0] == s]
            used = sum(int(scenario.vram[row]) for row in resident) / 1000
            if used > server.vram_mb + 5e-4:
                raise InputError(
                    f"plan: server {server.id!r} has {server.vram_mb:g} MB, its instances take "
                    f"{used:g} MB"
                )
            if len(resident) > SLOTS:
                found = f"{len(resident)} instances, at most {SLOTS} run"
                raise InputError(f"plan: server {server.id!r} gets {found}")

    @classmethod
    def read(cls, path: str | os.PathLike[str], scenario: Scenario) -> Plan:
        """Read ``optsched.routing-plan/1``, a plan for the servers of this scenario."""
        return read_json(path, cls.from_tree, scenario)

    @classmethod
    def from_tree(cls, tree: Any, name: str, scenario: Scenario) -> Plan:
        """Read a plan from parsed JSON; see `read`."""
        found = msgspec.structs.asdict(decode_document(tree, _Document, FORMAT, name))
        del found["format"]
        index = {server.id: s for s, server in enumerate(scenario.servers)}
        rows = []
        with placed(f"{name}: "):
            one_of("status", found["status"], ("optimal", "feasible"))
            for i, row in enumerate(found.pop("instances")):
                if row.server not in index:
                    raise InputError(f"instances[{i}].server: there is no {row.server!r:.60}")
                count = integer(f"instances[{i}].count", row.count, 0, SLOTS)
                rows += [(index[row.server], row.segment, row.width)] * count
            plan = cls(tuple(sorted(rows)), **found)
            plan.check(scenario)
        return plan

    def write(self, path: str | os.PathLike[str], scenario: Scenario) -> None:
        """Write ``optsched.routing-plan/1``, for the servers of this scenario."""
        rows = [
            _Instances(scenario.servers[s].id, k, w, count)
            for (s, k, w), count in sorted(Counter(self.instances).items())
        ]
        others = {key: value for key, value in vars(self).items() if key != "instances"}
        found = _Document(format=FORMAT, instances=rows, **others)
        write_atomic(path, indented(found))


# model


def plan_of(scenario: Scenario, given: str | os.PathLike[str]) -> Plan | None:
    """Return the best plan for ``"auto"``, None for ``"cold"``, else the plan in a file."""
    if str(given) == "auto":
        return plan_instances(scenario)
    return None if str(given) == "cold" else Plan.read(given, scenario)


def plan_instances(
    scenario: Scenario,
    *,
    rate: float | None = None,
    headroom: float = 3.0,
    time_limit: float = 10.0,
) -> Plan:
    """Choose the resident instances of every server by a mixed-integer model.

    Integers are the instances per server, segment and width; the other variables are shares: of
    tuples, and of servers for every step (segment, input width, width). Utilisation of instances is
    at most `BUSY` at the planned rate, batches of a width run on instances at least as wide, the
    load of a server stays below its knee, memory and slots suffice. The objective is the cost of a
    request: batch times, lost accuracy, and a rough wait that decreases with the instances of a
    segment on a server, weighted by the shares of the model without integers.

    Parameters
    ----------
    scenario
        Servers and network; of the trace only the mean rate is used.
    rate
        Requests per second; None: the mean of the trace.
    headroom
        The planned rate is this multiple of `rate`, for bursts.
    time_limit
        Seconds.

    Returns
    -------
    Plan
        With its status and bound in the model. If the narrowest tuple does not serve the rate, a
        plan for a lower one, found by halving.

    Raises
    ------
    InputError
        Servers cannot hold an instance of every segment, or no plan was found in time.

    Examples
    --------
    >>> from optsched import serving
    >>> plan = serving.plan_instances(serving.reference(rate=2500, seconds=0.1))
    >>> plan.status, len(plan.instances)
    ('optimal', 20)
    """
    number("headroom", headroom, above=True)
    mean = scenario.rate if rate is None else number("rate", rate, what="requests per second")
    if len(scenario.tuples) > MAX_TUPLES:
        raise InputError(
            f"widths: the planner's model takes {MAX_TUPLES} tuples, here are "
            f"{len(scenario.tuples)}; give another plan, or start cold"
        )
    end = time.monotonic() + time_limit
    busy, _ = _times(scenario)
    least = busy.min(axis=(0, 2, 3)).sum()  # ns of an image, at best
    target = min(max(mean, 1e-3) * headroom, 1e9 * SLOTS * len(busy) * BUSY / max(least, 1e-3))
    for step in range(60):
        relaxed = _solve(scenario, target, end - time.monotonic())
        if relaxed is not None:
            found = _solve(scenario, target, end - time.monotonic(), _weights(scenario, relaxed))
            if found is not None:
                return found
        elif step == 0 and _solve(scenario, target / 2**60, end - time.monotonic()) is None:
            break
        target /= 2
    raise InputError("servers: together they cannot hold an instance of every segment")


def _times(scenario: Scenario) -> tuple[FloatArray, FloatArray]:
    """Mean ns of an instance and of U = 1 for an image, [server][segment][input width][width]."""
    busy, load = np.empty_like(scenario.cost), np.zeros_like(scenario.cost)
    for s, server in enumerate(scenario.servers):
        slowed = 1.0
        if server.contention is not None:
            slowed += server.contention.below * min(server.contention.knee, 1.0) / 2
        busy[s] = scenario.launch[s] / BATCH + scenario.cost[s] * slowed
        if server.sat_mmac is not None:
            x = BATCH * scenario.mmac / server.sat_mmac
            load[s] = busy[s] * (x / (1 + x) + 0.02)
    return busy, load


def _solve(scenario: Scenario, rate: float, seconds: float, weight: Any = None) -> Plan | None:
    """Return the best plan, None if the rate is too high; fractional without `_weights`."""
    from ortools.linear_solver import pywraplp

    solver: Any = pywraplp.Solver.CreateSolver("GLOP" if weight is None else "SCIP")
    share = [solver.NumVar(0, 1, "") for _ in scenario.tuples]
    count = np.empty((len(scenario.servers), *scenario.vram.shape), object)
    for at in np.ndindex(count.shape):
        count[at] = (solver.NumVar if weight is None else solver.IntVar)(0, SLOTS, "")
    flow, times = _flow(scenario, solver, share), _times(scenario)
    cost = [value * one for value, one in zip(scenario.lost.tolist(), share, strict=True)]
    for s in range(len(scenario.servers)):
        cost += _server_costs(scenario, times, solver, rate, count[s], flow, s)
        if weight is not None:
            cost += _waiting(scenario, times, solver, weight, count[s], flow, s)
    solver.Minimize(solver.Sum(cost))
    solver.SetTimeLimit(max(1, round(seconds * 1000)))
    status = solver.Solve()
    if status not in (solver.OPTIMAL, solver.FEASIBLE):
        if status == solver.NOT_SOLVED or seconds <= 0:
            raise InputError("time_limit: no plan was found in time; give more, or --plan cold")
        return None
    chosen = [] if weight is None else [*np.ndindex(count.shape)]
    values = np.array([one.solution_value() for one in share])
    keys = tuple_keys(scenario.n_widths, scenario.n_segments)
    objective = solver.Objective()
    return Plan(
        tuple(at for at in chosen for _ in range(round(count[at].solution_value()))),
        "optimal" if status == solver.OPTIMAL else "feasible",
        objective.Value() / NS_PER_MS,
        None if weight is None else objective.BestBound() / NS_PER_MS,
        float(values @ scenario.points) / POINTS,
        rate,
        {key: one for key, one in zip(keys, values.tolist(), strict=True) if one > 1e-9},
    )


def _flow(scenario: Scenario, solver: Any, share: list[Any]) -> dict[tuple[int, ...], Any]:
    """Share of the requests by (server, segment, input width, width); sums equal the tuples'."""
    servers, (segments, widths) = range(len(scenario.servers)), scenario.vram.shape
    steps = [at for at in np.ndindex(segments, widths, widths) if at[0] or not at[1]]
    flow = {(s, *at): solver.NumVar(0, 1, "") for s in servers for at in steps}
    solver.Add(solver.Sum(share) == 1)
    for k, i, w in steps:
        same = np.flatnonzero((scenario.inputs[:, k] == i) & (scenario.tuples[:, k] == w))
        moved = solver.Sum([flow[s, k, i, w] for s in servers])
        solver.Add(moved == solver.Sum([share[j] for j in same]))
    return flow


def _server_costs(
    scenario: Scenario, times: Any, solver: Any, rate: float, count: Any, flow: Any, s: int
) -> list[Any]:
    """Costs of the batches of server s; adds its memory, slots, utilisation and load."""
    per_ns, server = rate / 1e9, scenario.servers[s]
    solver.Add(solver.Sum(list(count.ravel())) <= SLOTS)
    held = [int(v) * n for v, n in zip(scenario.vram.ravel(), count.ravel(), strict=True)]
    solver.Add(solver.Sum(held) <= round(server.vram_mb * 1000))
    load, cost = [], []
    if server.parallel is not None:
        busy = [per_ns * times[0][at] * one for at, one in flow.items() if at[0] == s]
        solver.Add(solver.Sum(busy) <= BUSY * server.parallel)
    for k, row in enumerate(count):
        steps = [at for at in flow if at[:2] == (s, k)]
        for least in range(len(row)):  # nested pools: batches that need at least this width
            busy = [per_ns * times[0][at] * flow[at] for at in steps if at[3] >= least]
            solver.Add(solver.Sum(busy) <= BUSY * solver.Sum(list(row[least:])))
        load += [per_ns * times[1][at] * flow[at] for at in steps]
        cost += [times[0][at] * BATCH * flow[at] for at in steps]
    solver.Add(solver.Sum(load) <= (1.0 if server.contention is None else server.contention.knee))
    return cost


def _waiting(
    scenario: Scenario, times: Any, solver: Any, weight: Any, count: Any, flow: Any, s: int
) -> list[Any]:
    """Rough costs of waiting on server s, which decrease with the instances of a segment."""
    service = times[0][s] * BATCH
    speed = 1 / np.maximum(scenario.cost.mean(axis=(1, 2, 3)) + scenario.launch, 1)
    found = []
    for k, row in enumerate(count):
        for v in range(len(row)):  # also at a rate within the tolerance of integers
            pool = [flow[at] for at in flow if at[:2] == (s, k) and at[3] >= v]
            solver.Add(solver.Sum(pool) <= solver.Sum(list(row[v:])))
        for v in np.flatnonzero(weight[k]).tolist():
            steps = [solver.NumVar(0, 1, "") for _ in WAITING[1:]]
            solver.Add(solver.Sum(steps) <= solver.Sum(list(row[v:])))
            price = float(service[k, :, v].mean() * speed[s] / speed.sum() * weight[k, v])
            found.append(WAITING[0] * price)
            for before, after, step in zip(WAITING[:-1], WAITING[1:], steps, strict=True):
                found.append(-(before - after) * price * step)
    return found


def _weights(scenario: Scenario, relaxed: Plan) -> FloatArray:
    """Frequency of [segment][width]: half at the planned rate, half by the cheapest tuple."""
    segments = np.arange(scenario.n_segments)
    alone = scenario.cost[:, segments, scenario.inputs, scenario.tuples].sum(axis=2).min(axis=0)
    best = scenario.tuples[int((alone + scenario.lost).argmin())]
    found = np.zeros(scenario.vram.shape)
    found[segments, best] = 0.5
    for key, share in relaxed.shares.items():
        found[segments, [int(w) for w in key.split(",")]] += share / 2
    return found
