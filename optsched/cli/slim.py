"""``optsched slim``: scenarios, plans, routers and simulations of serving."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from optsched.cli import options
from optsched.cli.options import argument, option
from optsched.cli.output import check_picture, facts, wrote
from optsched.errors import InputError
from optsched.io.files import check_outputs, read_text
from optsched.io.strict_json import decode, indented, parse
from optsched.plots.picture import PICTURES
from optsched.serving.log_check import check as check_log
from optsched.serving.plan import plan_instances, plan_of
from optsched.serving.routers import FORMS, router_of
from optsched.serving.scenario import Scenario
from optsched.serving.workload import read_arrivals, reference

if TYPE_CHECKING:
    from optsched.serving.log import Summary
    from optsched.serving.simulator import Point

ScenarioFile = Annotated[Path, argument("optsched.routing/1.")]
RouterSpec = Annotated[str, option(f"{FORMS}.")]
PlanOption = Annotated[str, option("Resident instances: auto (the best plan), cold, or a file.")]
Rate = Annotated[float, option("Mean arrivals per second.")]
Burst = Annotated[float, option("Peak over mean; 1: Poisson.")]
Seconds = Annotated[float, option("Length of the trace.")]
Deadline = Annotated[float | None, option("Time after an arrival until an answer is due.")]
LogFile = Annotated[Path, argument("optsched.serving-log/1.")]

ROUTERS = ("random/random/0", "random/round_robin/0", "static:0,1,2,3/jsed/8", "backlog:6ms/jsed/8",
        "backlog:6ms/power_of_two/8", "marginal")  # fmt: skip


def make(
    output: options.Output,
    name: Annotated[str, option("cluster-3gpu or cluster-3gpu-wifi.")] = "cluster-3gpu",
    rate: Rate = 2500.0,
    burst: Burst = 1.0,
    seconds: Seconds = 8.0,
    seed: options.Seed = 0,
    arrivals: Annotated[
        Path | None, option("CSV of arrival_ms, instead of --rate, --burst, --seconds and --seed.")
    ] = None,
    deadline_ms: Deadline = None,
    accuracy: Annotated[Path | None, option("Of `slim train` [default: published].")] = None,
) -> None:
    """Make a scenario: a reference cluster and generated or recorded arrivals.

    Example: optsched slim make --rate 2500 --burst 3 -o s.json
    """
    check_outputs([output], [arrivals, accuracy])
    given: dict[str, Any] = {} if arrivals is None else {"arrival_ms": read_arrivals(arrivals)}
    given["deadline_ms"] = deadline_ms
    if accuracy is not None:
        given["accuracy"] = read_accuracy(accuracy)
    scenario = reference(
        name, rate=0 if arrivals else rate, burst=burst, seconds=seconds, seed=seed, **given
    )
    wrote(output, scenario.write, f": {scenario.n_requests} requests, {scenario.rate:.0f}/s")


def plan(
    file: ScenarioFile,
    output: options.OptionalOutput = None,
    headroom: Annotated[float, option("Times the trace's mean rate.")] = 3.0,
    as_json: options.AsJson = False,
) -> None:
    """Choose the resident instances of every server in 10 s; print whether they are proved optimal.

    Example: optsched slim plan s.json -o plan.json
    """
    check_outputs([output], [file])
    scenario = Scenario.read(file)
    plan = plan_instances(scenario, headroom=headroom)
    hosted: dict[str | int, list[str]] = {server.id: [] for server in scenario.servers}
    for s, k, w in plan.instances:
        hosted[scenario.servers[s].id].append(f"{k}@{scenario.widths[w]:g}")
    if as_json:
        found = {key: getattr(plan, key) for key in ("status", "accuracy", "rate")}
        print(json.dumps({**found, "instances": hosted}))
    else:
        print(*(f"{name}: {' '.join(row) or 'nothing'}" for name, row in hosted.items()), sep="\n")
        print(f"{plan.status}, accuracy {plan.accuracy:.2f} % at {plan.rate:.0f} requests/s")
    wrote(output, lambda path: plan.write(path, scenario), quiet=as_json)


def simulate(
    file: ScenarioFile,
    router: RouterSpec = "marginal",
    plan: PlanOption = "auto",
    seed: options.Seed = 0,
    log: Annotated[Path | None, option("Write the log here.")] = None,
    schedule: Annotated[Path | None, option("Write the schedule here.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Simulate a router on a scenario and print the summary.

    Example: optsched slim simulate s.json --router backlog:6ms/jsed/8 --log log.json
    """
    from optsched.serving.simulator import simulate

    check_outputs([log, schedule], [file, *_files(plan)])
    scenario = Scenario.read(file)
    _report_compiling()
    run = simulate(scenario, router_of(router), plan=plan_of(scenario, plan), seed=seed)
    wrote(log, run.log.to_json() if run.log is not None else b"", quiet=as_json)
    wrote(schedule, lambda path: run.schedule.write(path), quiet=as_json)
    show_summary(run.summary, as_json)


def check(file: ScenarioFile, log: LogFile, as_json: options.AsJson = False) -> None:
    """Check a log independently of the simulator; exit code 1 on violations.

    Example: optsched slim check s.json log.json
    """
    violations = check_log(Scenario.read(file), log)
    if as_json:
        print(json.dumps({"file": str(log), "violations": list(map(str, violations))}))
    else:
        print(*violations, sep="\n", end="\n" * bool(violations))
        print(f"{log}: {f'{len(violations)} violations' if violations else 'right'}")
    if violations:
        raise typer.Exit(1)


def bench(
    output: options.Output,
    loads: Annotated[
        str, option("RATE or RATExBURST, separated by commas.")
    ] = "2500x3,4500x2.5,2500,4500",
    routers: Annotated[list[str] | None, option("As of `slim simulate`; repeat.")] = None,
    seeds: Annotated[int, option("Traces a load.", min=1)] = 16,
    seconds: Seconds = 8.0,
    plan: PlanOption = "auto",
    deadline_ms: Deadline = None,
    plot: options.ReportFile = None,
) -> None:
    """Compare routers on the same traces, with 95 % intervals over seeds.

    Example: optsched slim bench --loads 2500x3,4500 --seeds 4 -o bench.json
    """
    from optsched.serving.simulator import compare

    policies = [spec.partition(":")[2] for spec in routers or () if spec.startswith("policy:")]
    check_picture(plot, (*PICTURES, ".html"))
    check_outputs([output, plot], [*map(Path, policies), *_files(plan)])
    chosen = {spec: router_of(spec) for spec in routers or ROUTERS}
    cases = [(name, *_load(name)) for name in options.split_names("loads", [loads])]
    plans = [
        plan_of(reference(rate=rate, seconds=seconds, seed=seeds - 1), plan) for _, rate, _ in cases
    ]
    _report_compiling()
    points: list[Point] = []
    for (name, rate, burst), resident in zip(cases, plans, strict=True):

        def make(seed: int, rate: float = rate, burst: float = burst) -> Scenario:
            return reference(
                rate=rate, burst=burst, seconds=seconds, seed=seed, deadline_ms=deadline_ms
            )

        print(f"{name}/s, {seeds} traces of {seconds:g} s\n{_HEADER}")
        points += compare(
            make, chosen, seeds=range(seeds), plan=resident, load=name, on_point=_print_point
        )
    document = {"format": "optsched.serving-bench/1", "points": points}
    wrote(output, indented(document))
    if plot is not None:
        from optsched.plots.front import pareto

        wrote(plot, lambda path: pareto(points, path))


def show_summary(summary: Summary, as_json: bool, simulated: Summary | None = None) -> None:
    """Print a summary: a value per line, or one JSON object, with that of a simulation."""
    values = asdict(summary)
    if as_json:
        values |= {} if simulated is None else {"simulated": asdict(simulated)}
        print(json.dumps(values))
    else:
        shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in values.items()}
        facts(((k, "-" if v is None else v) for k, v in shown.items()), 18)


_HEADER = (
    f"{'router':34}{'accuracy %':>11}{'mean ms':>10}{'P99 ms':>10}{'J/image':>9}{'in time %':>11}"
)


def _print_point(point: Point) -> None:
    mean = point.mean
    in_time = f"{mean['attainment']:11.2f}" if "attainment" in mean else f"{'-':>11}"
    print(
        f"{point.router:34}{mean['accuracy']:11.2f}{mean['mean_ms']:10.2f}{mean['p99_ms']:10.2f}"
        f"{mean['joules_per_image']:9.4f}{in_time}{'  saturated' if point.saturated else ''}",
        flush=True,
    )


def read_accuracy(path: Path) -> dict[str, float]:
    """Read the accuracy of every tuple, as `slim train` writes it."""
    return decode(parse(read_text(path), str(path)), dict[str, float], str(path))


def _files(plan: str) -> list[Path]:
    """The file of a plan, if it is one."""
    return [] if plan in ("auto", "cold") else [Path(plan)]


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


def _report_compiling() -> None:
    from optsched.kernels.plain_python import is_ready
    from optsched.serving.world import advance

    if not is_ready(advance):
        print("compiling the simulation, once on this machine: some 10 seconds", file=sys.stderr)
