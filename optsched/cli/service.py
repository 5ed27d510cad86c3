"""``optsched serve`` and ``stream``: queries over HTTP, or as lines of JSON."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated

import typer

from optsched.cli.options import OptionalOutput, argument, only, option
from optsched.errors import InputError, MissingExtra
from optsched.io.files import check_outputs, read_bytes


def serve(
    host: Annotated[str, option("Address; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, option("0: any free port.")] = 8765,
    token_file: Annotated[
        Path | None, option("File with the token [default: the variable OPTSCHED_TOKEN].")
    ] = None,
    workers: Annotated[int | None, option("Processes [default: the cores].")] = None,
    timeout: Annotated[float, option("Seconds for one request.")] = 60.0,
    max_body: Annotated[int, option("Bytes of a body.")] = 16 << 20,
    in_flight: Annotated[int, option("Requests that are answered or queued at once.")] = 256,
    queue: Annotated[int, option("Long requests that may queue.")] = 64,
    state: Annotated[Path | None, option("Folder of live clusters [default: none].")] = None,
    slim: Annotated[Path | None, option("Network that POST /infer runs; with --scenario.")] = None,
    scenario: Annotated[Path | None, option("Of --slim: what `slim profile` wrote.")] = None,
    router: Annotated[str | None, option("Of --slim: see `slim run` [default: marginal].")] = None,
    devices: Annotated[
        str | None, option("Of --slim: such as cpu,cpu or cuda:0 [default: cpu for each server].")
    ] = None,
) -> None:
    """Answer queries over HTTP until SIGTERM; the page /docs has all endpoints.

    Example: optsched serve --port 8765
    """
    only({"router": router, "devices": devices}, slim is not None, "with --slim")
    try:
        from optsched.service.app import serve as serve_http
        from optsched.service.live import Live
    except ImportError as error:
        if isinstance(error, MissingExtra) or (error.name or "").startswith("optsched"):
            raise
        raise MissingExtra("optsched serve", "service") from None
    from optsched.service.settings import Settings, read_token

    given = {} if workers is None else {"workers": workers}
    settings = Settings(
        host=host, port=port, token=read_token(token_file), timeout=timeout, max_body=max_body,
        in_flight=in_flight, queue=queue, **given,
    )  # fmt: skip
    with ExitStack() as stack:
        more = []
        if slim is not None and scenario is not None:
            from optsched.cli.slim_live import executor_of
            from optsched.service.infer import infer_route
            from optsched.serving.live import LiveServer

            executor, shape = executor_of(slim, scenario, router or "marginal", devices=devices)
            rows = min(in_flight, 4096)
            more.append(infer_route(stack.enter_context(LiveServer(executor, shape, rows))))
        elif slim is not None or scenario is not None:
            raise InputError("slim, scenario: give both, or neither")
        code = serve_http(settings, None if state is None else Live(state), more)
    if code:
        raise typer.Exit(code)


def stream(
    file: Annotated[Path | None, argument("Requests, a line each [default: stdin].")] = None,
    cluster: Annotated[Path | None, option("Of --state: optsched.cluster/1.")] = None,
    model: Annotated[Path | None, option("Of --state: optsched.bandwidth/1.")] = None,
    state: Annotated[Path | None, option("For requests that name none: optsched.state/1.")] = None,
    snapshot: Annotated[Path | None, option("Instead of --state: optsched.snapshot/1.")] = None,
    output: OptionalOutput = None,
) -> None:
    """Answer every line, in order; a refused one gets an error, and the stream goes on.

    A line is {"id": 1, "do": "choose", "gpus": 8}; {"do": "help"} lists all values of "do". -o
    writes the state after all requests if none was refused; else the exit code is 1.

    Example: optsched stream requests.jsonl --cluster c.json --state s.json
    """
    check_outputs([output], [file, cluster, model, state, snapshot])
    from optsched.bandwidth import ClusterState
    from optsched.cli.choose import read_bandwidths
    from optsched.plan import ClusterSnapshot
    from optsched.service.known import Known
    from optsched.service.stream import Session

    session = Session()
    if snapshot is not None:
        if any((cluster, model, state)):
            raise InputError("snapshot: has cluster and state; give it alone")
        session.clusters[""] = Known(ClusterSnapshot.read(snapshot))
    elif state is not None:
        bandwidths = read_bandwidths(cluster, model)
        running = ClusterState.read(state, bandwidths.cluster)
        session.clusters[""] = Known(ClusterSnapshot(running), bandwidths)
    elif any((cluster, model, output)):
        raise InputError("state: missing; --cluster, --model and -o go with a state")
    given = None if file is None or str(file) == "-" else read_bytes(file).split(b"\n")
    for line in sys.stdin.buffer if given is None else given:
        if line.strip():
            sys.stdout.buffer.write(session.answer(line))
            sys.stdout.buffer.flush()
    if session.refused:
        raise typer.Exit(1)
    if output is not None:
        status = session.clusters[""].status
        (status.state if snapshot is None else status.snapshot()).write(output)
