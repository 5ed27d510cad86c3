"""``optsched serve-...``: scenarios, plans, routers and simulations of serving."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.options import OptionalOutput, Output, Seed, argument, option, words
from optsched.cli.output import facts, indented, lines_of, wrote
from optsched.errors import InputError
from optsched.io.files import check_outputs, write_atomic
from optsched.problems.routing import Routing
from optsched.problems.routing.document import log_document, log_of
from optsched.problems.routing.log_check import check_log
from optsched.problems.routing.log_explain import explain
from optsched.problems.routing.workload import read_arrivals, reference

if TYPE_CHECKING:
    from optsched.bench.routers import Point
    from optsched.problems.routing.plan import Plan

Scenario = Annotated[Path, argument("optsched.routing/1 or slim-scenario/1.")]
RouterSpec = Annotated[
    str,
    option(
        "marginal, or WIDTH/SERVER/GROUP such as backlog:6ms/jsed/8, static:0,2,3,3/jsed/8, "
        "fluid/jsed/8, random/random/0; or policy:FILE.npz."
    ),
]
PlanOption = Annotated[str, option("Who is resident where: auto (the best), cold, or a file.")]
Rate = Annotated[float, option("Mean arrivals per second.")]
Burst = Annotated[float, option("Peak over mean; 1: Poisson.")]
Seconds = Annotated[float, option("Length of the trace.")]
LogFile = Annotated[Path, argument("optsched.serving-log/1.")]

SERVERS = {"random": "Random", "round_robin": "RoundRobin", "jsed": "JSED",
           "power_of_two": "PowerOfTwo"}  # fmt: skip
ROUTERS = ("random/random/0", "random/round_robin/0", "static:0,1,2,3/jsed/8", "backlog:6ms/jsed/8",
        "backlog:6ms/power_of_two/8", "marginal")  # fmt: skip


def serve_make(
    output: Output,
    name: Annotated[str, option("cluster-3gpu or cluster-3gpu-wifi.")] = "cluster-3gpu",
    rate: Rate = 2500.0,
    burst: Burst = 1.0,
    seconds: Seconds = 8.0,
    seed: Seed = 0,
    arrivals: Annotated[Path | None, option("Recorded arrivals: a CSV, arrival_ms.")] = None,
) -> None:
    """Make a scenario: a reference cluster and generated or recorded arrivals."""
    check_outputs([output], [arrivals])
    given = {} if arrivals is None else {"arrival_ms": read_arrivals(arrivals)}
    problem = reference(
        name, rate=0 if given else rate, burst=burst, seconds=seconds, seed=seed, **given
    )
    wrote(output, problem.write, f": {problem.n_requests} requests, {problem.rate:.0f}/s")


def serve_plan(
    scenario: Scenario,
    output: OptionalOutput = None,
    headroom: Annotated[float, option("Times the trace's mean rate.")] = 3.0,
) -> None:
    """Choose which instances are resident where, to proven optimality."""
    from optsched_solvers.routing.plan import best_plan

    check_outputs([output], [scenario])
    problem = Routing.read(scenario)
    plan = best_plan(problem, headroom=headroom)
    for s, server in enumerate(problem.servers):
        own = [f"{k}@{problem.widths[w]:g}" for at, k, w in plan.instances if at == s]
        print(f"{server.id}: {' '.join(own) or 'nothing'}")
    print(f"{plan.status}, accuracy {plan.accuracy:.2f} % at {plan.rate:.0f} requests/s")
    wrote(output, lambda path: plan.write(path, problem))


def serve_sim(
    scenario: Scenario,
    router: RouterSpec = "marginal",
    plan: PlanOption = "auto",
    seed: Seed = 0,
    log: Annotated[Path | None, option("Write the log here.")] = None,
    schedule: Annotated[Path | None, option("Write the schedule here.")] = None,
    telemetry: Annotated[Path | None, option("Write JSON lines here.")] = None,
) -> None:
    """Simulate a router on a scenario and print what it comes to."""
    from optsched.serving.simulator import simulate

    given = Path(plan) if plan not in ("auto", "cold") else None
    check_outputs([log, schedule, telemetry], [scenario, given])
    problem = Routing.read(scenario)
    _tell_compiling()
    found = simulate(problem, router_of(router), plan=plan_of(problem, plan), seed=seed)
    wrote(log, lambda path: write_atomic(path, found.log.to_json()))  # type: ignore[union-attr]
    wrote(schedule, lambda path: found.schedule.write(path))
    wrote(telemetry, lambda path: write_atomic(path, lines_of(found.telemetry)))
    facts(summary_rows(found.summary), 18)  # last: who reads may stop in the middle


def serve_check(scenario: Scenario, log: LogFile) -> None:
    """Check a log independently of the simulator; exit code 1 on violations."""
    faults = check_log(Routing.read(scenario), log)
    for fault in faults:
        print(fault)
    print(f"{log}: {f'{len(faults)} violations' if faults else 'right'}")
    if faults:
        raise typer.Exit(1)


def serve_bench(
    output: Annotated[Path, option("Write all points here.", "-o", "--out")],
    loads: Annotated[
        str, option("RATE or RATExBURST, separated by commas.")
    ] = "2500x3,4500x2.5,2500,4500",
    routers: Annotated[list[str] | None, option("As of serve-sim; repeat.")] = None,
    seeds: Annotated[int, option("Traces a load.", min=1)] = 16,
    seconds: Seconds = 8.0,
    plan: PlanOption = "auto",
) -> None:
    """Compare routers on the same traces, with 95 % intervals over seeds."""
    from optsched.bench.routers import pareto

    files = [spec.partition(":")[2] for spec in routers or () if spec.startswith("policy:")]
    files += [plan] if plan not in ("auto", "cold") else []
    check_outputs([output], [Path(file) for file in files])
    chosen = {spec: router_of(spec) for spec in routers or ROUTERS}
    cases = [(name, *_load(name)) for name in words("loads", [loads])]
    plans = [
        plan_of(reference(rate=rate, seconds=seconds, seed=seeds - 1), plan) for _, rate, _ in cases
    ]
    _tell_compiling()
    points: list[Point] = []
    for (name, rate, burst), there in zip(cases, plans, strict=True):

        def make(seed: int, rate: float = rate, burst: float = burst) -> Routing:
            return reference(rate=rate, burst=burst, seconds=seconds, seed=seed)

        print(f"{name}/s, {seeds} traces of {seconds:g} s\n{_HEADER}")
        points += pareto(
            make, chosen, seeds=range(seeds), plan=there, load=name, on_point=_print_point
        )
    document = {"format": "optsched.serving-bench/1", "points": points}
    wrote(output, indented(document), f"; optsched plot {output} --pareto accuracy,p99_ms draws it")


def serve_explain(
    scenario: Scenario,
    log: LogFile,
    batch: Annotated[int, option("Row in the log, from 0.")],
) -> None:
    """Say why a batch began when it did, with these requests, on that instance."""
    print(explain(log_of(Routing.read(scenario), log_document(log)), batch))


def router_of(spec: str) -> Any:
    """The router that a text means: ``marginal``, ``policy:FILE`` or ``WIDTH/SERVER/GROUP``."""
    from optsched.serving import routers

    if spec.startswith("policy:"):
        from optsched.serving.policy import Policy

        return Policy.load(spec.removeprefix("policy:"))
    if spec == "marginal":
        return routers.MarginalCost()
    width, _, rest = spec.partition("/")
    server, _, group = rest.partition("/")
    width, _, given = width.partition(":")
    rule: routers.WidthRule
    try:
        if width == "static":
            rule = routers.Static(tuple(int(w) for w in given.split(",")))
        elif width == "backlog":
            rule = routers.Backlog(float(given.removesuffix("ms") or 6))
        else:
            rule = {"random:": routers.RandomWidth, "fluid:": routers.Fluid}[f"{width}:{given}"]()
        return routers.Router(rule, getattr(routers, SERVERS[server])(), int(group or 8))
    except (KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"router: expected marginal, policy:FILE, or WIDTH/SERVER/GROUP with a width rule of "
            f"random, fluid, static, backlog, a server rule of {', '.join(SERVERS)} and a number "
            f"of requests, got {spec!r:.60}"
        ) from None


def plan_of(problem: Routing, given: str) -> Plan | None:
    """The plan that a text means: ``auto``, ``cold`` or a file."""
    from optsched_solvers.routing.routers import plan_of

    return plan_of(problem, None if given == "auto" else given)


def summary_rows(summary: Any) -> list[tuple[str, str]]:
    """A summary as people read it."""
    return [
        (key, "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value))
        for key, value in ((key, getattr(summary, key)) for key in summary.__struct_fields__)
    ]


_HEADER = f"{'router':34}{'accuracy %':>11}{'mean ms':>10}{'P99 ms':>10}{'J/image':>9}"


def _print_point(point: Point) -> None:
    mean = point.mean
    print(
        f"{point.router:34}{mean['accuracy']:11.2f}{mean['mean_ms']:10.2f}{mean['p99_ms']:10.2f}"
        f"{mean['joules_per_image']:9.4f}{'  saturated' if point.saturated else ''}",
        flush=True,
    )


def _load(text: str) -> tuple[float, float]:
    rate, x, burst = text.partition("x")
    try:
        found = float(rate), float(burst if x else 1)
    except ValueError:
        found = 0.0, 0.0
    if not (0 < found[0] < math.inf and 1 <= found[1] < math.inf):
        raise InputError(
            f"loads: expected RATE or RATExBURST, a rate > 0 and a burst >= 1, got {text!r:.60}"
        )
    return found


def _tell_compiling() -> None:
    from optsched.kernels.plain_python import is_ready
    from optsched.serving.world import advance

    if not is_ready(advance):
        print("compiling the simulation, once on this machine: some 10 seconds", file=sys.stderr)
