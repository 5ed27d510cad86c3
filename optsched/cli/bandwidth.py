"""``optsched gpus bandwidth``: import measurements, fit a model, plan measurements, check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from optsched.bandwidth import BottleneckBandwidth, Cluster, MeasurementTable, plan_measurements
from optsched.bandwidth.models.patterns import rows_of
from optsched.cli.options import AsJson, OptionalOutput, Output, argument, only, option, quantity
from optsched.cli.output import wrote
from optsched.errors import InputError
from optsched.formats.nccl_tests import read_host_map
from optsched.io.files import check_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


ClusterFile = Annotated[Path, option("optsched.cluster/1.", "--cluster")]
ModelFile = Annotated[Path, option("optsched.bandwidth/1.", "--model")]
Tables = Annotated[
    list[Path] | None, option("CSV of `bandwidth import`; may be repeated.", "--measurements")
]
Op = Annotated[str, option("Collective, if the logs do not name it.")]
Payload = Annotated[str | None, option("Bytes of the rows to take, such as 16M or 2G.")]


def import_(
    logs: Annotated[list[Path], argument("Logs of nccl-tests.")],
    output: Output,
    op: Op = "all_reduce",
    payload: Payload = None,
    host_map: Annotated[Path | None, option("Hosts of pods: a line POD HOST each.")] = None,
) -> None:
    """Read logs of nccl-tests and write a CSV of measurements.

    Example: optsched gpus bandwidth import logs/*.log --payload 1G -o m.csv
    """
    check_outputs([output], [*logs, host_map])
    hosts = None if host_map is None else read_host_map(host_map)
    table = MeasurementTable.from_nccl_logs(logs, op, _bytes(payload), hosts)
    wrote(output, table.write, f": {len(table)} measurements of {table.op}, {table.payload} bytes")


def fit(
    cluster: ClusterFile,
    output: Output,
    measurements: Tables = None,
    mixed: Annotated[bool, option("Several collectives or payloads.", "--mixed")] = False,
) -> None:
    """Fit a model, or make that of links and cards; print the factor of every level.

    Example: optsched gpus bandwidth fit --cluster c.json --measurements m.csv -o b.json
    """
    only({"mixed": mixed or None}, bool(measurements), "with --measurements")
    check_outputs([output], [cluster, *(measurements or ())])
    model = BottleneckBandwidth(Cluster.read(cluster))
    if measurements:
        model = model.fit(_joined(measurements, mixed))
    wrote(output, model.write, f": {_facts(model)}")
    print("".join(_levels(model)), end="")


def plan(
    output: OptionalOutput = None,
    cluster: Annotated[Path | None, option("optsched.cluster/1.")] = None,
    model: Annotated[Path | None, option("Model so far: optsched.bandwidth/1.")] = None,
    budget: Annotated[int, option("Most runs across hosts.")] = 50,
    logs: Annotated[str, option("Folder for the logs of the runs.")] = "logs",
) -> None:
    """Write a shell script of the most useful runs of nccl-tests [default: print it].

    Example: optsched gpus bandwidth plan --model b.json --budget 20 -o measure.sh
    """
    check_outputs([output], [cluster, model])
    if (cluster is None) == (model is None):
        raise InputError("cluster, model: expected one of them")
    if model is not None:
        known = BottleneckBandwidth.read(model)
    elif cluster is not None:
        known = BottleneckBandwidth(Cluster.read(cluster))
    found = plan_measurements(known, budget)
    if output is None:
        print(found.script(logs), end="")
    else:
        across = len(found.patterns)
        counts = f": {len(found.runs) - across} runs within hosts, {across} across"
        wrote(output, found.script(logs), counts)


def check(model: ModelFile, measurements: Tables = None, as_json: AsJson = False) -> None:
    """Print the size of a model, and the deviations of measurements from its predictions.

    Example: optsched gpus bandwidth check --model b.json --measurements m.csv
    """
    known = BottleneckBandwidth.read(model)
    found = [*deviations(known, _joined(measurements, False))] if measurements else []
    if as_json:
        print(json.dumps({"model": str(model), "facts": _facts(known), "deviations": found}))
    else:
        print(f"{model}: {_facts(known)}", *found, sep="\n")


def deviations(model: BottleneckBandwidth, table: MeasurementTable) -> Iterator[str]:
    """Describe deviations of runs across hosts from predictions: all, and new patterns."""
    if len(model.table):
        model.table.joined(table)  # refuses another collective or payload
    known = BottleneckBandwidth(model.cluster, table).observations.known
    if not known:
        raise InputError("measurements: hold no run across hosts that shows the network")
    patterns, true = rows_of(known), np.maximum(list(known.values()), 1)
    value, low, high = (model.network(patterns, end) for end in ("value", "low", "high"))
    new, inside = ~model.is_measured(patterns), (low <= true) & (true <= high)
    error = np.abs(value / true - 1)
    for what, part in (("all", new | True), ("not measured before", new)):
        if part.any():
            yield (
                f"{what}: {int(part.sum())} patterns, off by {error[part].mean():.2%} in the mean, "
                f"{error[part].max():.0%} at most, {inside[part].mean():.0%} within their intervals"
            )


def _levels(model: BottleneckBandwidth) -> Iterator[str]:
    for level, runs, factor, low, high in model.level_fits:
        if factor is None:
            yield f"{level}: no factor fitted, {runs} runs across it of known GPUs, 3 are needed\n"
        else:
            yield f"{level}: factor {factor:.3g}, fitted to {runs} runs ({low:.2f} to {high:.2f})\n"
    for level, factor in model.given.factors.items():
        yield f"{level}: factor {factor:.3g}, given\n"


def _facts(model: BottleneckBandwidth) -> str:
    cluster, table = model.cluster, model.table
    patterns = {row.pattern for row in table}
    payload = "" if table.payload is None else f", {table.payload} bytes"
    guessed = model.predicted_types
    by_links = f"; within {', '.join(guessed)} by links only" if guessed else ""
    return (
        f"{cluster.n_hosts} hosts, {cluster.n_gpus} GPUs; {len(table)} measurements of "
        f"{len(patterns)} patterns ({table.op}{payload}{', mixed' * table.mixed}){by_links}"
    )


def _joined(paths: Sequence[Path], mixed: bool) -> MeasurementTable:
    table = MeasurementTable.read(paths[0])
    for path in paths[1:]:
        table = table.joined(MeasurementTable.read(path), mixed=mixed)
    return table


def _bytes(text: str | None) -> int | None:
    """Parse ``16M``; K, M, G are powers of 1024, as in nccl-tests."""
    if text is None:
        return None
    found = quantity(text.upper(), {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30})
    if found is None or not found.is_integer() or not 0 < found <= 2**53:
        raise InputError(f"payload: expected bytes such as 16M or 2G, got {text!r:.60}")
    return int(found)
