"""``optsched gpus choose``: choose GPUs for one request."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import typer

import optsched
from optsched.bandwidth import BottleneckBandwidth, Cluster
from optsched.bandwidth.models.model_document import read_model
from optsched.bandwidth.placement.document import policy_from_tree
from optsched.bandwidth.placement.explain import to_json
from optsched.bandwidth.topology import documents
from optsched.cli.options import AsJson, OptionalOutput, option, parse_options
from optsched.cli.output import wrote
from optsched.errors import InputError
from optsched.io.files import check_outputs

if TYPE_CHECKING:
    from optsched.bandwidth import BandwidthModel, Policy

_POLICY = "KEY=VALUE such as required=rack, balance=even, max_hosts=2, exclude=n1,n2; repeat."


def choose(
    state: Annotated[Path, option("Free GPUs and jobs: optsched.state/1.", show_default=False)],
    gpus: Annotated[int, option("Number of GPUs.", show_default=False)],
    cluster: Annotated[Path | None, option("optsched.cluster/1: links and NICs.")] = None,
    model: Annotated[Path | None, option("Learned bandwidths: optsched.bandwidth/1.")] = None,
    policy: Annotated[list[str] | None, option(_POLICY)] = None,
    traffic: Annotated[str, option("Demands of jobs: given, idle, moderate, heavy.")] = "given",
    solver: Annotated[str, option("See `optsched show`.")] = "auto",
    explain: Annotated[bool, option("Explain what limits the bandwidth.", "--explain")] = False,
    as_json: AsJson = False,
    hostfile: Annotated[bool, option("Print a hostfile in rank order.", "--hostfile")] = False,
    output: OptionalOutput = None,
) -> None:
    """Choose the free GPUs with the highest bandwidth next to the running jobs.

    Example: optsched gpus choose --cluster c.json --state s.json --gpus 8 --explain
    """
    check_outputs([output], [state, cluster, model])
    known = read_bandwidths(cluster, model)
    running = documents.read_state(state, known.cluster)
    rules = {"policy": _policy(policy), "traffic": traffic}
    if as_json + explain + hostfile > 1:
        raise InputError("json, explain, hostfile: each prints the answer in its own way; give one")
    problem = optsched.GpuPlacement(running, known, gpus, **rules)  # type: ignore[arg-type]
    result = optsched.solve(problem, solver)
    if result.schedule is None:
        if result.interrupted:
            raise KeyboardInterrupt
        print(f"{result.status}: {result.reason or 'nothing found'}", file=sys.stderr)
        raise typer.Exit(1)
    choice = problem.choice(result.schedule)
    if as_json:
        print(to_json(choice, result).decode(), end="")
    elif hostfile:
        print(choice.hostfile(), end="")
    else:
        print(choice.explain() if explain else problem.state.written(choice.gpus))
    wrote(output, result.schedule.write, quiet=as_json or hostfile)


def read_bandwidths(cluster: Path | None, model: Path | None) -> BandwidthModel:
    """Read a model, or make that of links and cards of a cluster; print what it assumes."""
    given = None if cluster is None else Cluster.read(cluster)
    found: BandwidthModel
    if model is not None:
        found = read_model(model, given)
    elif given is not None:
        found = BottleneckBandwidth(given)
    else:
        raise InputError("cluster, model: give --cluster, --model or both")
    for line in found.assumed:
        print(f"warning: {line}", file=sys.stderr)
    return found


def _policy(given: list[str] | None) -> Policy:
    """Parse the rules; lists are separated by spaces, or by commas if they name no GPU ids."""
    tree = parse_options(given)
    for key in ("include", "exclude", "apart"):
        if isinstance(text := tree.get(key), str):
            tree[key] = text.split(None if ":" in text or " " in text else ",")
    return policy_from_tree(tree, "policy")
