"""``optsched serve-profile``, ``serve-run``: real requests on this machine (extra ``serving``)."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from optsched.cli.serve import PlanOption, RouterSpec, Scenario, Seed  # noqa: TC001 (typer)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
) -> None:
    """Measure a network on this machine's devices, and make a scenario of it."""
    from optsched.io.files import check_outputs, read_text
    from optsched.io.strict_json import decode, parse

    check_outputs([output], [network, accuracy])
    table = decode(parse(read_text(accuracy), str(accuracy)), dict[str, float], str(accuracy))
    import numpy as np

    from optsched.problems.routing.checks import accuracy_table
    from optsched.problems.routing.workload import arrivals
    from optsched.serving.profiler import profile, scenario
    from optsched.serving.training import load_network

    net = load_network(network)
    # what can be wrong is said before minutes of measuring
    accuracy_table(table, np.array(net.widths), len(net.channels), None)
    arrivals(rate, burst=burst, seconds=seconds, seed=seed)
    with _progress("rounds of measuring") as tell:
        costs = profile(net, devices.split(","), side=side, seed=seed, on_progress=tell)
    problem = scenario(costs, table, rate=rate, burst=burst, seconds=seconds, seed=seed)
    problem.write(output)
    for one in costs.devices:
        error = "-" if one.error is None else f"{one.error:.1%}"
        server = one.server
        print(
            f"{server.id}: launch {server.launch_ms:.3f} ms, load {server.load_ms:.1f} ms, off "
            f"{error}"
        )
    print(f"router {costs.router_ms:.3f} ms; wrote {output}: {problem.n_requests} requests")


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
    devices: Annotated[
        str | None, typer.Option(help="As serve-profile's [default: CPU cores].")
    ] = None,
) -> None:
    """Serve the scikit-learn digits for real, in a process per server, at the scenario's times."""
    from optsched.cli.serve import plan_of, router_of, summary_rows
    from optsched.io.files import check_outputs, write_atomic
    from optsched.problems.routing import Routing

    check_outputs([log], [scenario, network])
    problem = Routing.read(scenario)
    from optsched.serving.executor import Executor, RequestsLost
    from optsched.serving.executor import compare as side_by_side
    from optsched.serving.training import digits, load_network

    net, there = load_network(network), digits("test").x
    images = there[[r % len(there) for r in range(problem.n_requests)]]
    executor = Executor(
        net, problem, router_of(router), plan_of(problem, plan), seed=seed,
        devices=None if devices is None else devices.split(","),
    )  # fmt: skip
    try:
        with _progress("requests") as tell:
            if compare:
                found = side_by_side(executor, images, tell)
                run = found.measured
            else:
                run = executor.run(images, tell)
    except RequestsLost as lost:
        if log is not None and lost.run.log is not None:
            write_atomic(log, lost.run.log.to_json())
        raise
    if log is not None and run.log is not None:
        write_atomic(log, run.log.to_json())
    if compare:
        print(f"{'':18}{'simulated':>12}{'measured':>12}{'off':>9}")
        for name, said, real, off in found.rows():
            print(f"{name:18}{said:12.4g}{real:12.4g}{off:9.1%}")
    else:
        for key, value in summary_rows(run.summary):
            print(f"{key:18}{value}")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """After a second a bar on a terminal, elsewhere a line every five; both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from optsched.solving.progress import EVERY, FIRST_AFTER

    console = Console(stderr=True, highlight=False, markup=False)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, due = bar.add_task("", total=None), monotonic() + FIRST_AFTER

    def tell(done: int, of: int) -> None:
        nonlocal due
        bar.update(task, completed=done, total=of)
        if monotonic() >= due:
            due = monotonic() + EVERY
            bar.start()
            if not console.is_terminal:
                console.print(f"{done:,} of {of:,} {what}")

    try:
        yield tell
    finally:
        bar.stop()


COMMANDS = (serve_profile, serve_run)
