"""The tree of commands; the module of a command is imported when it is used."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperGroup

from optsched.cli.options import group


class Entry(NamedTuple):
    """Module and help line of a command."""

    module: str
    text: str


COMMANDS: Final = {
    "solve": Entry("solve", "Solve an instance; Ctrl-C keeps the best schedule so far."),
    "bound": Entry("solve", "Print lower bounds by name, and the best."),
    "solvers": Entry("solve", "List the installed solvers, or those that take an instance."),
    "verify": Entry("schedules", "Check schedules independently of every solver."),
    "show": Entry("show", "Objective, bound, load and critical path of a schedule."),
    "plot": Entry("schedules", "Draw a Gantt chart, or the Pareto front of routers."),
    "trace": Entry("schedules", "Write a trace for ui.perfetto.dev."),
    "convert": Entry("convert", "Write a problem, or a schedule, in another format."),
    "generate": Entry("generate", "Make instances: job arrays, job shops, clusters, quotas."),
    "bench": Entry("bench", "Compare solvers on many instances."),
    "pipeline": Entry("pipeline", "Compare hand-made pipeline schedules, or write one."),
    "arraypipe": Entry("arraypipe", "Train sibling jobs by a schedule."),
    "topology": Entry("topology", "Describe a cluster: import, show, check."),
    "bandwidth": Entry("bandwidth", "Bandwidths of GPU sets: import, fit, plan, check."),
    "dispatch": Entry("dispatch", "Choose the free GPUs with the highest bandwidth."),
    "plan": Entry("plan", "What starts on a live cluster, when the others do, what to move."),
    "workload": Entry("convert", "Convert the log of a scheduler to a trace."),
    "simulate": Entry("simulate", "Replay a trace on a cluster under one policy or several."),
    "decide": Entry("decide", "Decide as Determined's schedulers or Kubernetes do."),
    "manifest": Entry("decide", "Write Kubernetes jobs of a quota plan or a decision."),
    "elastic": Entry("elastic", "Train jobs on a shared pool of workers."),
    "serve": Entry("service", "Answer queries over HTTP."),
    "serve-make": Entry("serve", "Make a scenario of serving."),
    "serve-plan": Entry("serve", "Choose which instances are resident where."),
    "serve-sim": Entry("serve", "Simulate a router on a scenario."),
    "serve-check": Entry("serve", "Check a log independently of the simulator."),
    "serve-bench": Entry("serve", "Compare routers on the same traces."),
    "serve-train": Entry("serve_live", "Train a router by PPO."),
    "serve-profile": Entry("serve_live", "Measure a network, and make a scenario of it."),
    "serve-run": Entry("serve_live", "Serve for real, in a process per server."),
    "slim-train": Entry("serve_live", "Train a slimmable network."),
    "warmup": Entry("warmup", "Compile all kernels, so that no solve has to."),
    "version": Entry("warmup", "Print the version."),
}


class Commands(TyperGroup):
    """Finds commands by name; listing them imports none."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or group of commands, of a name."""
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one line per command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.text) for name, entry in COMMANDS.items()])


@cache
def _command(name: str) -> Any:
    module = import_module(f"optsched.cli.{COMMANDS[name].module}")
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    single = group()
    single.command(name)(getattr(module, name.replace("-", "_")))
    return typer.main.get_command(single)


app = group(cls=Commands)


@app.callback()
def optsched() -> None:
    """Decide what runs where and in which order on a GPU cluster, and run it."""
