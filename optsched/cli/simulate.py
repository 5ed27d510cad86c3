"""``optsched simulate``: a trace under one policy or several, side by side."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated

import typer


def simulate(
    trace: Annotated[
        str,
        typer.Argument(help="Trace (CSV), or a generated workload: synthetic:2000, entropy:50."),
    ],
    policy: Annotated[
        list[str], typer.Option(help="Name, or names separated by commas; may be repeated.")
    ],
    nodes: Annotated[
        str | None, typer.Option(help="Cluster: 16x8 (16 nodes of 8 GPUs), or 8,8,4.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Instead of --nodes: so many GPUs in nodes of 8.")
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="More policies, as in --policy.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE of the policies, POLICY.KEY=VALUE of one; may be repeated."),
    ] = None,
    estimate_error: Annotated[
        float, typer.Option(help="Sigma of lognormal errors in believed work.")
    ] = 0.0,
    micro_factor: Annotated[
        float, typer.Option(help="Work of every job times this: a measured gain inside jobs.")
    ] = 1.0,
    restart: Annotated[
        int, typer.Option(help="Time without progress after a preemption or a resize.")
    ] = 0,
    resize: Annotated[str, typer.Option(help="When sizes change: pass or anytime.")] = "pass",
    checkpoint: Annotated[
        str, typer.Option(help="A preemption loses nothing (immediate) or the open pass (pass).")
    ] = "immediate",
    timing: Annotated[
        str, typer.Option(help="event, or lucid: the tick rules of Lucid's simulator.")
    ] = "event",
    round_time: Annotated[
        int, typer.Option("--round", help="Ask the policies also every so many units of time.")
    ] = 0,
    change: Annotated[
        list[str] | None,
        typer.Option(help="TIME:KIND:NODE, KIND add, drain or remove; may be repeated."),
    ] = None,
    packing: Annotated[
        Path | None,
        typer.Option(help="For lucid: speeds of pairs (type_a,type_b,speed_a,speed_b)."),
    ] = None,
    packing_types: Annotated[
        Path | None, typer.Option(help="Beside it: type,memory,share_score.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of errors, curves and generated workloads.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Read only so many rows.")] = None,
    largest: Annotated[
        int | None, typer.Option(help="Leave out jobs that ask for more GPUs.")
    ] = None,
    sort: Annotated[
        bool, typer.Option("--sort", help="Sort rows by submit time, then id.")
    ] = False,
    ignore_columns: Annotated[
        bool, typer.Option("--ignore-columns", help="Skip unknown columns.")
    ] = False,
    time_unit: Annotated[str, typer.Option(help="s, ms, us or ns.")] = "s",
    priority_as: Annotated[
        str, typer.Option(help="The column priority: priority, weight or ignored.")
    ] = "priority",
    type_as: Annotated[
        str, typer.Option(help="The column type: source (nothing), group or template.")
    ] = "source",
    amdahl: Annotated[
        float | None, typer.Option(help="Speed-up g/(1+c(g-1)) with this c [default: linear].")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Make jobs elastic: numbers of GPUs such as 1,2,4,8.")
    ] = None,
    passes: Annotated[
        int | None, typer.Option(help="Data passes of every job of a trace [default: 1].")
    ] = None,
    load: Annotated[float | None, typer.Option(help="Load of a generated workload.")] = None,
    rigid: Annotated[bool, typer.Option("--rigid", help="entropy:N with gangs of two.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="History as a *.schedule.json; of several policies one file each.",
        ),
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="All metrics: optsched.metrics/1.")] = None,
    csv: Annotated[Path | None, typer.Option(help="The table, with exact numbers.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Report: .html, .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Replay a trace on a cluster; Ctrl-C keeps what is there.

    One row per policy; times are means over jobs. `docs/simulator.md` defines every number.
    """
    from optsched.cli import simulate_input as given
    from optsched.cli.simulate_output import Outputs
    from optsched.cli.simulate_run import run_all

    table = given.packing(packing, packing_types)
    policies = given.policies(policy, compare or [], option or [], table)
    inputs = given.inputs(trace, estimate_error, packing, packing_types)
    outputs = Outputs(out, metrics, csv, plot, tuple(policies), inputs)
    outputs.check(trace, packing, packing_types)
    cluster = given.cluster(nodes, gpus)
    workload = given.workload(
        trace, cluster, seed=seed, limit=limit, largest=largest, sort=sort,
        ignore_columns=ignore_columns, time_unit=time_unit, priority_as=priority_as,
        type_as=type_as, amdahl=amdahl, sizes=sizes, passes=passes, load=load, rigid=rigid,
        estimate_error=estimate_error, micro_factor=micro_factor,
    )  # fmt: skip
    settings = {
        "restart_cost": restart, "resize": resize, "checkpoint": checkpoint, "timing": timing,
        "round": round_time, "changes": given.changes(change or []), "seed": seed,
    }  # fmt: skip
    runs, complete = run_all(workload, policies, cluster, settings, table, quiet=quiet)
    if runs:
        outputs.show(runs, as_json=as_json, quiet=quiet)
        outputs.write(runs, quiet=quiet or as_json)
    if not complete:
        raise typer.Exit(130)
