"""``optsched serve``: the HTTP service."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated

import typer

from optsched.cli.options import option
from optsched.errors import MissingExtra


def serve(
    host: Annotated[str, option("Address; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, option("0: any free port.")] = 8765,
    token_file: Annotated[
        Path | None, option("File with the token [default: the variable OPTSCHED_TOKEN].")
    ] = None,
    workers: Annotated[int | None, option("Processes [default: the cores].")] = None,
    timeout: Annotated[float, option("Seconds for one request.")] = 60.0,
    max_body: Annotated[int, option("Bytes of a body.")] = 16 << 20,
    in_flight: Annotated[int, option("Requests that are answered at once.")] = 256,
    queue: Annotated[int, option("Long requests that may queue.")] = 64,
    state: Annotated[Path | None, option("Folder of live clusters [default: none].")] = None,
) -> None:
    """Answer queries over HTTP until SIGTERM; the page /docs has all endpoints.

    Example: optsched serve --port 8765
    """
    try:
        from optsched.service.app import serve as serve_http
        from optsched.service.clusters import routers
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
    if code := serve_http(settings, routers(state)):
        raise typer.Exit(code)
