"""``optsched slim train``, ``train-router``, ``profile``, ``run`` (extras serving, ppo)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from optsched.cli import slim
from optsched.cli.options import AsJson, Output, Seed, argument, option
from optsched.cli.output import lines_of, wrote
from optsched.cli.progress import Bar
from optsched.errors import InputError
from optsched.io.files import check_outputs, write_atomic
from optsched.io.strict_json import indented
from optsched.serving.plan import plan_of
from optsched.serving.routers import router_of
from optsched.serving.scenario import Scenario
from optsched.serving.tables import accuracy_table, milliseconds
from optsched.serving.workload import arrivals, reference

if TYPE_CHECKING:
    from optsched.serving.executor import Executor
    from optsched.serving.log import Summary

Network = Annotated[Path, option("What `optsched slim train` wrote.")]
Folder = Annotated[
    Path | None, option("Folder of CIFAR-100's files [default: scikit-learn's digits].")
]
Side = Annotated[
    int | None,
    option("Pixels of an image's side [default: 32, of one channel 16].", min=1, max=4096),
]


def train(
    output: Output,
    path: Folder = None,
    side: Side = None,
    epochs: Annotated[int, option("Passes over the images.", min=1)] = 12,
    seed: Seed = 0,
    accuracy: Annotated[Path | None, option("Accuracy of every tuple (JSON).")] = None,
) -> None:
    """Train a slimmable network over random tuples of widths, and measure every tuple.

    Example: optsched slim train --epochs 12 -o net.pt --accuracy accuracy.json
    """
    check_outputs([output, accuracy])
    from optsched.serving import network
    from optsched.serving.network import SlimResNet

    train, test = (_images(path, split, side) for split in ("train", "test"))
    if path is None:
        net = SlimResNet(
            10, channels=(16, 32, 64, 128), blocks=1, in_channels=1, group_channels=4, seed=seed
        )
    else:
        net = SlimResNet(100, seed=seed)

    def report(one: Any) -> None:
        print(f"epoch {one.epoch} of {one.epochs}: loss {one.loss:.4f}, others {one.distilled:.4f}",
              flush=True)  # fmt: skip

    network.train_slim(net, train, epochs=epochs, seed=seed, on_progress=report)
    table = network.measure_accuracy(net, test)
    for w, width in enumerate(net.widths):
        uniform = ",".join([str(w)] * len(net.segments))
        print(f"width {width:g} throughout: {table[uniform]:.2f} %")
    print(f"{len(table)} tuples, mean {sum(table.values()) / len(table):.2f} %")
    wrote(output, lambda path: network.save_network(net, path))
    wrote(accuracy, indented(table))


def train_router(
    output: Output,
    file: Annotated[Path | None, argument("Scenario [default: 2500/s in bursts].")] = None,
    mode: Annotated[str, option("flow (the objective itself), paper or paper-relaxed.")] = "flow",
    decisions: Annotated[int, option("To learn from.", min=1)] = 3_000_000,
    seed: Seed = 0,
    plan: slim.PlanOption = "auto",
    curve: Annotated[Path | None, option("Write the curve here (JSON lines).")] = None,
) -> None:
    """Train a router by PPO; Ctrl-C keeps the best policy so far.

    Example: optsched slim train-router s.json --decisions 600000 -o policy.npz
    """
    check_outputs([output, curve], [file])

    def make(trace: int) -> Scenario:
        return reference(rate=2500, burst=3, seed=1000 + trace)

    def report(row: dict[str, float]) -> None:
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)

    scenario: Any = make if file is None else Scenario.read(file)
    from optsched.serving.ppo import train_router

    policy, rows = train_router(
        scenario, mode, decisions=decisions, seed=seed, progress=report,
        plan=plan_of(make(0) if file is None else scenario, plan),
    )  # fmt: skip
    wrote(output, policy.save, f"; optsched slim simulate --router policy:{output}")
    wrote(curve, lines_of(rows))


def profile(
    network: Network,
    output: Output,
    accuracy: Annotated[Path, option("What `slim train --accuracy` wrote.")],
    devices: Annotated[str, option("Of the servers, such as cpu,cpu or cuda:0.")] = "cpu,cpu",
    side: Side = None,
    rate: slim.Rate = 60.0,
    burst: slim.Burst = 1.0,
    seconds: slim.Seconds = 20.0,
    seed: Seed = 0,
    deadline_ms: slim.Deadline = None,
) -> None:
    """Measure a network on this machine's devices, and make a scenario of it.

    Example: optsched slim profile --network net.pt --accuracy accuracy.json -o local.json
    """
    check_outputs([output], [network, accuracy])
    table = slim.read_accuracy(accuracy)
    from optsched.serving.network import load_network
    from optsched.serving.profiler import profile

    net = load_network(network)
    # validate arguments before minutes of measuring
    accuracy_table(table, len(net.widths), len(net.channels))
    trace: dict[str, Any] = {"rate": rate, "burst": burst, "seconds": seconds, "seed": seed}
    arrivals(**trace)
    if deadline_ms is not None:
        milliseconds("deadline_ms", deadline_ms)
    with Bar() as bar:
        pixels = side or (16 if net.in_channels == 1 else 32)
        given: Any = {"side": pixels, "accuracy": table, "seed": seed}
        costs = profile(net, devices.split(","), **given, on_progress=bar.task("measuring"))
    scenario = costs.scenario(table, deadline_ms=deadline_ms, **trace)
    for one in costs.servers:
        print(f"{one.id}: launch {one.launch_ms:.3f} ms, load {one.load_ms:.1f} ms, "
              f"{one.parallel} batches at a time")  # fmt: skip
    print(f"router {costs.router_ms:.3f} ms, mean latency of a trial predicted {costs.error:+.1%}")
    wrote(output, scenario.write, f": {scenario.n_requests} requests")


def run(
    file: slim.ScenarioFile,
    network: Network,
    router: slim.RouterSpec = "marginal",
    plan: slim.PlanOption = "auto",
    seed: Seed = 0,
    compare: Annotated[bool, option("Simulate it too.", "--compare")] = False,
    log: Annotated[Path | None, option("Write the log here.")] = None,
    devices: Annotated[
        str | None, option("Of the servers, such as cpu,cpu or cuda:0 [default: cpu for each].")
    ] = None,
    path: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Serve test images for real, in a process per server, at the scenario's times.

    Images have the side at which the scenario was profiled. The accuracy is that of the network's
    outputs on these images.

    Example: optsched slim run local.json --network net.pt --compare
    """
    check_outputs([log], [file, network])
    executor, (channels, side, _) = executor_of(network, file, router, plan, devices, seed)
    from msgspec.structs import replace

    from optsched.serving.executor import RequestsLost
    from optsched.serving.simulator import simulate

    scenario, run = executor.scenario, None
    test = _images(path, "test", side)
    if test.x.shape[1] != channels:
        raise InputError(
            f"network: takes images of {channels} channels, these have {test.x.shape[1]}; "
            "--path FOLDER serves CIFAR-100 (3 channels), without it the digits (1)"
        )
    order = [r % len(test.y) for r in range(scenario.n_requests)]
    images, labels = test.x[order], test.y[order]
    chosen, resident, *_ = executor.given
    simulated = simulate(scenario, chosen, plan=resident, seed=seed) if compare else None
    try:
        with Bar() as bar:
            run = executor.run(images, bar.task("requests"))
    except RequestsLost as lost:
        run = lost.run
        raise
    finally:
        if run is not None and log is not None and run.log is not None:
            write_atomic(log, run.log.to_json())
    measured = replace(run.summary, accuracy=run.accuracy(labels))
    if simulated is None or as_json:
        slim.show_summary(measured, as_json, None if simulated is None else simulated.summary)
    else:
        _print_errors(simulated.summary, measured)


def executor_of(
    network: Path, file: Path, router: str, plan: str = "auto", devices: str | None = None,
    seed: int = 0,
) -> tuple[Executor, tuple[int, int, int]]:  # fmt: skip
    """Read a network and its scenario; return the executor, and the shape of images."""
    from optsched.serving.executor import Executor
    from optsched.serving.network import load_network

    scenario, net = Scenario.read(file), load_network(network)
    # the first segment keeps the side of the image: its work grows with the square
    side = max(1, round(math.sqrt(scenario.mmac[0].max() / np.max(net.mmac(1)[0]))))
    found = Executor(
        net, scenario, router_of(router), plan_of(scenario, plan), seed=seed,
        devices=None if devices is None else devices.split(","),
    )  # fmt: skip
    return found, (net.in_channels, side, side)


def _print_errors(simulated: Summary, measured: Summary) -> None:
    """Print simulated and measured values, and the relative errors of the simulation."""
    print(f"{'':18}{'simulated':>12}{'measured':>12}{'error':>9}")
    for name in ("mean_ms", "p50_ms", "p99_ms", "accuracy", "attainment"):
        values = getattr(simulated, name), getattr(measured, name)
        predicted, real = (math.nan if value is None else float(value) for value in values)
        error = predicted / real - 1 if real else math.nan
        print(f"{name:18}{predicted:12.4g}{real:12.4g}{error:9.1%}")


def _images(path: Path | None, split: str, side: int | None) -> Any:
    """Images and classes of a folder of CIFAR-100's files, without one the digits."""
    from optsched.serving.network import cifar100, digits

    return digits(split, side or 16) if path is None else cifar100(path, split, side or 32)
