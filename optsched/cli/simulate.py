"""``optsched cluster simulate``: replay a trace under one policy or several."""

from __future__ import annotations

import json
import re
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any, Final

from optsched.cli import options, progress, say
from optsched.cli.options import argument, option, options_of
from optsched.cli.output import RunOutputs
from optsched.cli.progress import Bar
from optsched.cli.tables import display, table
from optsched.cluster import policies as registry
from optsched.cluster.expected import expected_starts
from optsched.cluster.policies.packing_table import PackingTable
from optsched.cluster.simulate import Case
from optsched.cluster.workload.nodes import NodeChange, NodeFailures, Nodes
from optsched.cluster.workload.synthetic import entropy_workload, synthetic
from optsched.cluster.workload.trace import read_trace
from optsched.cluster.world.start import read_start
from optsched.errors import InputError, OptschedError
from optsched.io.values import file_label
from optsched.solving.fan_out import Engine, fan_out

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.cluster.expected import ExpectedStart
    from optsched.cluster.results.run import Run
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import Policy
    from optsched.cluster.world.start import Start

_MOST_NAMED: Final = 5
"""Waiting jobs that are named after Ctrl-C."""

MOST_JOBS: Final = 10**7
"""Jobs of a generated workload."""

_GENERATED: Final = re.compile(r"(synthetic|entropy):(\d+)(?::(\d*\.?\d+(?:e[+-]?\d+)?))?", re.A)


def simulate(
    trace: Annotated[str, argument("Trace (CSV), synthetic:JOBS:LOAD or entropy:JOBS.")],
    policy: Annotated[
        list[str], option("Names or NAME:KEY=VALUE,..., separated by commas; repeat.")
    ],
    nodes: Annotated[
        str, option("16x8 (16 nodes of 8 GPUs), 8,8,4, or 4x8:A100,2x4:V100:CPUS:GB.")
    ],
    option: Annotated[
        list[str] | None, option("KEY=VALUE, or POLICY.KEY=VALUE of one; repeat.")
    ] = None,
    estimate_error: Annotated[float, option("Sigma of lognormal errors of estimates.")] = 0.0,
    restart: Annotated[int, option("Time lost by a preemption or a resize.")] = 0,
    resize: Annotated[str, option("When sizes change: pass or anytime.")] = "pass",
    checkpoint: Annotated[
        str, option("Work lost by a preemption: immediate (none) or pass (that of the open pass).")
    ] = "immediate",
    round_time: Annotated[int, option("Also decide at this interval.", "--round")] = 0,
    change: Annotated[list[str] | None, option("TIME:KIND:NODE, KIND add, drain, remove.")] = None,
    failures: Annotated[str | None, option("MTBF:REPAIR, mean times of a node, by --seed.")] = None,
    packing: Annotated[str | None, option("PAIRS.csv,TYPES.csv for lucid.")] = None,
    running: Annotated[Path | None, option("Stays of a running cluster (CSV), at --now.")] = None,
    now: Annotated[int | None, option("When a simulation with --running begins.")] = None,
    expected: Annotated[int | None, option("Draws of durations for expected starts.")] = None,
    spread: Annotated[float | None, option("Sigma of draws over estimates [default: 0.5].")] = None,
    seed: Annotated[int, option("Of errors, curves, draws and generated workloads.")] = 0,
    seeds: Annotated[int, option("Runs of each policy, from --seed on.", min=1, max=10**4)] = 1,
    jobs: options.Jobs = None,
    engine: options.EngineName = "loky",
    out: options.History = None,
    metrics: options.Metrics = None,
    plot: options.ReportFile = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Replay a trace on a cluster and compare policies; Ctrl-C keeps the results so far.

    One row per policy, means over jobs. `docs/clusters/simulator-events.md` defines every number.

    Example: optsched cluster simulate synthetic:1000:0.9 --policy fifo,srtf --nodes 8x8
    """
    names = registry.variants(policy)
    tables = [] if packing is None else packing.split(",")
    chosen = policies(names, option, tables)
    inputs = {"trace": file_label(trace), "estimate_error": estimate_error,
              "packing": [file_label(path) for path in tables] or None}  # fmt: skip
    options.only({"spread": spread}, expected is not None, "with --expected")
    if expected is not None and (out or metrics or plot or seeds > 1):
        raise InputError("expected: prints starts only; leave out -o, --metrics, --plot, --seeds")
    site, parallel = Nodes.parse(nodes), Engine(engine, jobs)
    settings: dict[str, Any] = {
        "restart_cost": restart, "resize": resize, "checkpoint": checkpoint, "round": round_time,
        "start": _start(running, now, expected, site),
    }  # fmt: skip
    cases = {}
    for each in range(seed, seed + seeds):
        work = _workload(trace, site, each)
        if estimate_error:
            work = work.with_estimate_error(estimate_error, each)
        given = settings | {"changes": changes(change or [], failures, each), "seed": each}
        for name, one in chosen.items():
            label = name if seeds == 1 else f"{name} seed {each}"
            cases[label] = Case(work, one, site, {**given})
    outputs = RunOutputs(out, metrics, plot, tuple(cases), inputs)
    outputs.check(trace, running, *tables)
    if expected is not None:
        found = {
            label: expected_starts(
                *case[:3], case.settings.pop("start"), sigma=0.5 if spread is None else spread,
                samples=expected, parallel=parallel, **case.settings,
            )
            for label, case in cases.items()
        }  # fmt: skip
        _print_expected(found, as_json)
        return
    runs, failure = _run_all(cases, parallel, quiet=quiet)
    if runs:
        outputs.show(runs, as_json=as_json, quiet=quiet)
        outputs.write(runs, quiet=quiet or as_json)
    if failure is not None:
        raise failure


def policies(
    names: Sequence[str], options: Sequence[str] | None, packing: Sequence[str] = ()
) -> dict[str, Policy]:
    """Return policies by name, with their options."""
    given = options_of(names, options, "policies")
    if packing:
        packs = [name for name in names if name.partition(":")[0] == "lucid"]
        if not packs:
            raise InputError("packing: only the policy lucid packs jobs, and it is not named")
        if len(packing) != 2:
            raise InputError("packing: expected PAIRS.csv,TYPES.csv, two files")
        table = PackingTable.read(*packing)
        for name in packs:
            given[name]["table"] = table
    return {name: registry.get(name, **given[name]) for name in names}


def changes(
    texts: Sequence[str], failures: str | None = None, seed: int = 0
) -> tuple[NodeChange, ...] | NodeFailures:
    """Parse changes ``TIME:KIND:NODE``, NODE from 0, or failures ``MTBF:REPAIR``."""
    if failures is not None:
        if texts:
            raise InputError("failures: random failures of nodes and --change exclude each other")
        parts = re.fullmatch(r"([0-9]{1,16}):([0-9]{1,16})", failures)
        if not parts:
            raise InputError(
                f"failures: expected MTBF:REPAIR such as 604800:3600, got {failures!r:.60}"
            )
        return NodeFailures(int(parts[1]), int(parts[2]), seed)
    found = []
    for text in texts:
        parts = re.fullmatch(r"([0-9]{1,16}):(add|drain|remove):([0-9]{1,9})", text)
        if not parts:
            raise InputError(
                f"change: expected TIME:KIND:NODE such as 3600:remove:2, got {text!r:.60}"
            )
        found.append(NodeChange(int(parts[1]), int(parts[3]), parts[2]))  # type: ignore[arg-type]
    return tuple(found)


def _start(
    running: Path | None, now: int | None, expected: int | None, nodes: Nodes
) -> Start | None:
    """Read the running cluster, if there is one."""
    if running is not None and now is not None:
        return read_start(running, nodes, now)
    if running is not None:
        raise InputError("running: give --now too, the time at which the simulation begins")
    if expected is not None:
        raise InputError("expected: needs a running cluster, give --running and --now too")
    if now is not None:
        raise InputError("now: only with --running, the stays of a running cluster")
    return None


def _print_expected(found: Mapping[str, Mapping[str, ExpectedStart]], as_json: bool) -> None:
    """Print the expected starts of every policy as a table, or all as one JSON object."""
    if as_json:
        document = {
            policy: {name: {"times": one.times, "why": one.reason and one.reason.why,
                            "text": one.reason and one.reason.text}
                     for name, one in starts.items()}
            for policy, starts in found.items()
        }  # fmt: skip
        print(json.dumps({"expected": document}))
        return
    heads = ("job", "10 %", "50 %", "90 %", "reason")
    for policy, starts in found.items():
        cells = [
            [name, *(f"{t:,}" for t in one.times), one.reason.text if one.reason else "starts now"]
            for name, one in starts.items()
        ]
        title = f"{policy}: expected starts of {len(starts)} waiting jobs"
        display(title, table(heads, cells, (0, 4)))


def _workload(trace: str, nodes: Nodes, seed: int) -> Workload:
    """Read a trace, or generate one for this cluster."""
    found = _GENERATED.fullmatch(trace)
    if found is None and trace.startswith(("synthetic:", "entropy:")):
        raise InputError(f"trace: expected synthetic:JOBS or synthetic:JOBS:LOAD, got {trace:.60}")
    if found is None:
        return read_trace(trace, nodes)
    kind, digits, text = found.groups()
    if len(digits.lstrip("0")) > 8 or int(digits) > MOST_JOBS:
        raise InputError(f"trace: {trace:.60}: too many jobs, expected at most {MOST_JOBS:,}")
    load = None if text is None else float(text)
    if kind == "entropy":
        return entropy_workload(int(digits), gpus=nodes.total, load=load, seed=seed)
    return synthetic(int(digits), 0.9 if load is None else load, seed, gpus=nodes.total)


def _run_all(
    cases: dict[str, Case], engine: Engine, *, quiet: bool
) -> tuple[dict[str, Run], BaseException | None]:
    """Return runs by label, in order, and why others are missing (Exit: Ctrl-C)."""
    runs: dict[str, Run] = {}
    failure: BaseException | None = None
    with Bar(quiet=quiet) as bar:
        if here := engine.name == "loky" and engine.jobs in (None, 1):
            for label, case in cases.items():
                counter = bar.task(label, len(case.workload))
                case.settings["on_progress"] = lambda _, ended, __, show=counter: show(ended)
        update = bar.task("simulate", len(cases))
        try:
            for index, value, error in fan_out(Case.run, cases.values(), engine):
                label = [*cases][index]
                if error is not None:
                    failure = failure or type(error)(f"{label}: {error}")
                    continue
                runs[label], taken = value
                if not here:
                    update(len(runs))
                if not _reported(bar, label, runs[label], taken):
                    return runs, SystemExit(130)
        except KeyboardInterrupt:
            bar.stop()
            say(f"interrupted: {len(runs)} of {len(cases)} simulations are done")
            failure = SystemExit(130)
        except OptschedError as error:  # of the engine
            failure = error
    return {label: runs[label] for label in cases if label in runs}, failure


def _reported(bar: Bar, label: str, run: Run, taken: float) -> bool:
    """Print notes of a simulation; return whether it is complete."""
    for note in run.notes:
        bar.print(f"{label}: {note}")
    jobs, ended = len(run.workload), int((run.log.finished >= 0).sum())
    if taken >= progress.FIRST_AFTER and not bar.live:
        some = "" if ended == jobs else f"{ended:,} of "
        bar.print(f"{label}: {some}{jobs:,} jobs in {taken:.1f} s")
    if ended < jobs:
        bar.stop()
        say(f"interrupted: {ended:,} of {jobs:,} jobs ended in {label}")
        for job, reason in [*run.waiting().items()][:_MOST_NAMED]:
            bar.print(f"{job} pending: {reason.text}")
    return ended == jobs
