"""The tree of commands; each reads, calls the library, and prints or writes."""

from __future__ import annotations

import typer

from optsched.cli import (
    arraypipe,
    bandwidth,
    generate,
    schedules,
    serve,
    serve_live,
    solve,
    topology,
)
from optsched.cli.bench import bench
from optsched.cli.convert import convert
from optsched.cli.decide import decide
from optsched.cli.dispatch import dispatch
from optsched.cli.elastic import elastic
from optsched.cli.manifest import manifest
from optsched.cli.pipeline import pipeline
from optsched.cli.show import show
from optsched.cli.simulate import simulate
from optsched.cli.warmup import warmup

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Decide what runs where and in which order on a GPU cluster, and run it.",
)
for group in (arraypipe, bandwidth, generate, topology):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])


def version() -> None:
    """Print the version."""
    from optsched.version import __version__

    print(__version__)


for command in (
    solve.solve, solve.bound, solve.solvers, schedules.verify, show, schedules.plot,
    schedules.trace, version,
    bench, convert, decide, dispatch, elastic, manifest, pipeline, simulate, warmup,
    *serve.COMMANDS, *serve_live.COMMANDS,
):  # fmt: skip
    app.command()(command)
