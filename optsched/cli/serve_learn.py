"""``optsched slim-train``, ``serve-train``: networks and learned routers (extra ``serving``)."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated, Any

import typer


def slim_train(
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the network here (.pt).")],
    data: Annotated[str, typer.Option(help="digits (small, ships) or cifar100.")] = "digits",
    path: Annotated[
        Path | None, typer.Option(help="Folder of CIFAR-100's files; nothing is downloaded.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the images.", min=1)] = 12,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    accuracy: Annotated[
        Path | None, typer.Option(help="Write the accuracy of every tuple here (JSON).")
    ] = None,
) -> None:
    """Train a slimmable network over random tuples of widths, and measure every tuple."""
    import msgspec

    from optsched.errors import InputError
    from optsched.io.files import check_outputs, write_atomic

    check_outputs([output, accuracy], [])
    if data not in ("digits", "cifar100"):
        raise InputError(f"data: expected digits or cifar100, got {data!r:.60}")
    if data == "cifar100" and path is None:
        raise InputError("path: where are CIFAR-100's files? give --path FOLDER")
    if data == "digits" and path is not None:
        raise InputError("path: goes with --data cifar100; the digits ship with scikit-learn")
    from optsched.serving.network import SlimResNet
    from optsched.serving.training import (
        cifar100,
        digits,
        measure_accuracy,
        save_network,
        train_slim,
    )

    if data == "digits":
        train, test = digits(), digits("test")
        net = SlimResNet(
            10, channels=(16, 32, 64, 128), blocks=1, in_channels=1, group_channels=4, seed=seed
        )
    else:
        train, test = (cifar100(path or ".", split) for split in ("train", "test"))
        net = SlimResNet(100, seed=seed)
    train_slim(
        net,
        train,
        epochs=epochs,
        seed=seed,
        on_progress=lambda one: print(
            f"epoch {one.epoch} of {one.epochs}: loss {one.loss:.4f}, others {one.distilled:.4f}",
            flush=True,
        ),
    )
    table = measure_accuracy(net, test)
    save_network(net, output)
    for w, width in enumerate(net.widths):
        uniform = ",".join([str(w)] * len(net.segments))
        print(f"width {width:g} throughout: {table[uniform]:.2f} %")
    print(f"{len(table)} tuples, mean {sum(table.values()) / len(table):.2f} %; wrote {output}")
    if accuracy is not None:
        write_atomic(accuracy, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def serve_train(
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the policy here (.npz).")],
    scenario: Annotated[
        Path | None, typer.Argument(help="Scenario [default: the reference, 2500/s in bursts].")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(help="flow: the objective itself; paper, paper-relaxed: Slim Scheduler's."),
    ] = "flow",
    decisions: Annotated[int, typer.Option(help="To learn from.", min=1)] = 3_000_000,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    plan: Annotated[str, typer.Option(help="auto, cold, or a file.")] = "auto",
    curve: Annotated[Path | None, typer.Option(help="Write the curve here (JSON lines).")] = None,
) -> None:
    """Train a router by PPO; Ctrl-C keeps the best policy so far."""
    import msgspec

    from optsched.cli.serve import plan_of
    from optsched.io.files import check_outputs, write_atomic
    from optsched.problems.routing import Routing
    from optsched.problems.routing.workload import reference

    check_outputs([output, curve], [scenario])

    def make(trace: int) -> Routing:
        return reference(rate=2500, burst=3, seed=1000 + trace)

    problem: Any = make if scenario is None else Routing.read(scenario)
    from optsched.serving.ppo import train_router

    policy, rows = train_router(
        problem, mode, decisions=decisions, seed=seed, checkpoint=output,
        plan=plan_of(make(0) if scenario is None else problem, plan),
        progress=lambda row: print(_line(row), flush=True),
    )  # fmt: skip
    policy.save(output)
    print(f"wrote {output}; optsched serve-sim --router policy:{output}")
    if curve is not None:
        write_atomic(curve, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _line(row: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.4g}" for key, value in row.items())


COMMANDS = (slim_train, serve_train)
