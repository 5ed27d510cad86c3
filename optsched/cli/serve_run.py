"""``optsched serve-profile``, ``serve-run``: real requests on this machine (extra ``serving``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optsched.cli.serve import PlanOption, RouterSpec, Scenario, Seed  # noqa: TC001 (typer)

Network = Annotated[Path, typer.Option(help="What `optsched slim-train` wrote.")]


def serve_profile(
    network: Network,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the scenario here.")],
    accuracy: Annotated[Path, typer.Option(help="What slim-train --accuracy wrote.")],
    devices: Annotated[str, typer.Option(help="Such as cpu,cpu or cuda:0,cuda:1.")] = "cpu,cpu",
    rate: Annotated[float, typer.Option(help="Arrivals per second of the scenario.")] = 60.0,
    burst: Annotated[float, typer.Option(help="Peak over mean; 1: Poisson.")] = 1.0,
    seconds: Annotated[float, typer.Option(help="Length of its trace.")] = 20.0,
    seed: Seed = 0,
    side: Annotated[int, typer.Option(help="Pixels of an image's side.")] = 16,
    costs: Annotated[
        Path | None, typer.Option(help="Write all measured times and the fit here.")
    ] = None,
) -> None:
    """Measure a network on this machine's devices, and make a scenario of it."""
    from optsched.files import check_outputs, read_text
    from optsched.strict_json import decode, parse

    check_outputs([output, costs], [network, accuracy])
    table = decode(parse(read_text(accuracy), str(accuracy)), dict[str, float], str(accuracy))
    from optsched.serving.profiler import profile, scenario
    from optsched.serving.training import load_network

    net = load_network(network)
    found = profile(net, devices.split(","), side=side, seed=seed)
    if costs is not None:
        found.write(costs)
    problem = scenario(found, table, rate=rate, burst=burst, seconds=seconds, seed=seed)
    problem.write(output)
    for one in found.devices:
        error = "-" if one.error is None else f"{one.error:.1%}"
        print(
            f"{one.device}: launch {one.launch_ms:.3f} ms, load {one.load_ms:.1f} ms, off {error}"
        )
    print(f"wrote {output}: {problem.n_requests} requests")


def serve_run(
    scenario: Scenario,
    network: Network,
    router: RouterSpec = "marginal",
    plan: PlanOption = "auto",
    seed: Seed = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Put the simulation beside it.")
    ] = False,
    log: Annotated[Path | None, typer.Option(help="Write the log here.")] = None,
) -> None:
    """Serve the scikit-learn digits for real, in a process per server, at the scenario's times."""
    from optsched.cli.serve import plan_of, router_of, summary_rows
    from optsched.files import check_outputs, write_atomic
    from optsched.problems.routing import Routing

    check_outputs([log], [scenario, network])
    problem = Routing.read(scenario)
    from optsched.serving.data import digits
    from optsched.serving.executor import Executor
    from optsched.serving.executor import compare as side_by_side
    from optsched.serving.training import load_network

    net, there = load_network(network), digits("test").x
    images = there[[r % len(there) for r in range(problem.n_requests)]]
    chosen, resident = router_of(router), plan_of(problem, plan)
    if compare:
        found = side_by_side(net, problem, chosen, resident, images)
        print(f"{'':18}{'simulated':>12}{'measured':>12}{'off':>9}")
        for name, said, real, off in found.rows():
            print(f"{name:18}{said:12.4g}{real:12.4g}{off:9.1%}")
        run = found.measured
    else:
        run = Executor(net, problem, chosen, resident, seed=seed).run(images)
        for key, value in summary_rows(run.summary):
            print(f"{key:18}{value}")
    if log is not None and run.log is not None:
        write_atomic(log, run.log.to_json())


COMMANDS = (serve_profile, serve_run)
