"""``optsched workload``: the log of a scheduler becomes a trace."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import Annotated

import typer

from optsched.cli.options import Output  # noqa: TC001 (typer reads the annotations)
from optsched.formats.job_logs import import_trace
from optsched.io.files import check_outputs


def workload(
    log: Annotated[Path, typer.Argument(help="sacct -P, SWF, Helios, Philly, Alibaba, or a CSV.")],
    output: Output,
    from_: Annotated[
        str, typer.Option("--from", help="Name of the format [default: by the content].")
    ] = "auto",
    zero: Annotated[
        str, typer.Option(help="Jobs of 0 seconds: drop, or keep (as 1 second).")
    ] = "drop",
    shares: Annotated[
        str, typer.Option(help="Jobs with a part of a GPU: up (to whole GPUs), or drop.")
    ] = "up",
) -> None:
    """Write the log of a scheduler as a trace for `optsched simulate`."""
    check_outputs([output], [log])
    for note in import_trace(log, output, from_, zero=zero, shares=shares):
        print(note)
    print(f"wrote {output}")
