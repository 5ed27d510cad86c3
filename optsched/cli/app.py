"""The tree of commands; the module of a command is imported when it is used."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperGroup

from optsched.cli.options import option
from optsched.errors import InputError

_USAGE_ERROR: Final[type[Any]] = typer.BadParameter.__mro__[1]


class Entry(NamedTuple):
    """Module and help line of a command; the function has the last word of its name."""

    module: str
    text: str


COMMANDS: Final = {
    "solve": Entry("solve", "Solve an instance; Ctrl-C keeps the best schedule so far."),
    "verify": Entry("solve", "Check schedules independently of every solver."),
    "show": Entry("show", "Describe or draw a schedule; bounds and solvers of an instance."),
    "convert": Entry("convert", "Write a problem, or a schedule, in another format."),
    "generate jobarray": Entry("generate", "Sibling jobs of a real model."),
    "generate taillard": Entry("generate", "A job shop by Taillard's generator."),
    "generate cluster": Entry("generate", "A GPU cluster, its state and measurements."),
    "generate quota": Entry("generate", "A quota plan of jobs that scale by Amdahl's law."),
    "generate pipeline": Entry("pipeline", "Hand-made pipeline schedules, compared or written."),
    "bench": Entry("bench", "Compare solvers on many instances."),
    "arraypipe profile": Entry("arraypipe", "Measure times and memory of a script's jobs."),
    "arraypipe advise": Entry("arraypipe", "Compare a job per GPU, 1F1B and the job array."),
    "arraypipe problem": Entry("arraypipe", "Write the instance of profiled jobs."),
    "arraypipe plan": Entry("arraypipe", "Check that a schedule can be run without deadlock."),
    "arraypipe run": Entry("arraypipe", "Train a script's jobs by a schedule."),
    "arraypipe report": Entry("arraypipe", "Losses, devices and times of a run."),
    "arraypipe demo": Entry("arraypipe", "Train four sibling jobs; compare with each alone."),
    "gpus choose": Entry("choose", "Choose the free GPUs with the highest bandwidth."),
    "gpus topology import": Entry("topology", "Write a cluster from files of its tools."),
    "gpus topology show": Entry("topology", "Hosts, links, domains, what is missing; a map."),
    "gpus topology state": Entry("topology", "Write the state of a running cluster."),
    "gpus bandwidth import": Entry("bandwidth", "Write measurements from logs of nccl-tests."),
    "gpus bandwidth fit": Entry("bandwidth", "Fit a model of bandwidths."),
    "gpus bandwidth plan": Entry("bandwidth", "Write a script of the most useful measurements."),
    "gpus bandwidth check": Entry("bandwidth", "Compare a model with measurements."),
    "cluster simulate": Entry("simulate", "Replay a trace under one policy or several."),
    "cluster decide": Entry("decide", "Decide as Determined's schedulers or Kubernetes do."),
    "cluster workload": Entry("convert", "Convert the log of a scheduler to a trace."),
    "cluster manifest": Entry("decide", "Write Kubernetes jobs of a quota plan or decision."),
    "cluster elastic": Entry("elastic", "Train jobs on a shared pool of workers."),
    "plan": Entry("plan", "What starts on a live cluster, when the others do, what to move."),
    "serve": Entry("service", "Answer queries over HTTP."),
    "stream": Entry("service", "Answer queries as lines of JSON."),
    "slim make": Entry("slim", "Make a scenario of serving."),
    "slim plan": Entry("slim", "Choose the resident instances of every server."),
    "slim simulate": Entry("slim", "Simulate a router on a scenario."),
    "slim check": Entry("slim", "Check a log independently of the simulator."),
    "slim bench": Entry("slim", "Compare routers on the same traces."),
    "slim train": Entry("slim_live", "Train a slimmable network."),
    "slim train-router": Entry("slim_live", "Train a router by PPO."),
    "slim profile": Entry("slim_live", "Measure a network, and make a scenario of it."),
    "slim run": Entry("slim_live", "Serve for real, in a process per server."),
    "warmup": Entry("warmup", "Compile all kernels, so that no solve has to."),
}

GROUPS: Final = {
    "generate": "Make instances of every kind of problem.",
    "arraypipe": "Train sibling jobs by a schedule: profile, solve, run, report.",
    "gpus": "Choose GPUs by topology and bandwidth.",
    "gpus topology": "Describe a cluster and its state: import, show, state.",
    "gpus bandwidth": "Bandwidths of sets of GPUs: import, fit, plan, check.",
    "cluster": "Simulate, decide and run as the scheduler of a cluster.",
    "slim": "Serve a slimmable network: scenarios, plans, routers, servers.",
}

SECTIONS: Final = {
    "Problems and schedules": ("solve", "verify", "show", "convert", "generate", "bench"),
    "Training": ("arraypipe",),
    "Clusters": ("gpus", "cluster", "plan", "serve", "stream"),
    "Serving networks": ("slim",),
    "This machine": ("warmup",),
}
"""Headings of the help, with their commands."""

RENAMED: Final = {
    "bound": "show FILE", "solvers": "show", "plot": "show FILE -o PICTURE",
    "trace": "show FILE -o FILE.perfetto.json", "pipeline": "generate pipeline",
    "topology": "gpus topology", "bandwidth": "gpus bandwidth", "dispatch": "gpus choose",
    "workload": "cluster workload", "simulate": "cluster simulate", "decide": "cluster decide",
    "manifest": "cluster manifest", "elastic": "cluster elastic", "version": "--version",
    "serve-make": "slim make", "serve-plan": "slim plan", "serve-sim": "slim simulate",
    "serve-check": "slim check", "serve-bench": "slim bench", "serve-train": "slim train-router",
    "serve-profile": "slim profile", "serve-run": "slim run", "slim-train": "slim train",
}  # fmt: skip
"""Former names, and those that replace them."""


class Commands(TyperGroup):
    """A group that finds its commands in the table; listing them imports none."""

    def __init__(self, prefix: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.prefix = prefix
        self.texts = {  # in the order of the table
            name: GROUPS.get(f"{prefix}{name}") or COMMANDS[f"{prefix}{name}"].text
            for path in COMMANDS
            if path.startswith(prefix)
            for name in [path.removeprefix(prefix).split()[0]]
        }
        self.commands = dict.fromkeys(self.texts)  # type: ignore[assignment]  # names of suggestions

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names."""
        return list(self.texts)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or group of commands, of a name."""
        if cmd_name in self.texts:
            return command(f"{self.prefix}{cmd_name}")
        if cmd_name in RENAMED and not self.prefix and not ctx.resilient_parsing:
            raise InputError(f"{cmd_name}: now `optsched {RENAMED[cmd_name]}`")
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one line per command, those of the top level by section."""
        parts = {"Commands": tuple(self.texts)} if self.prefix else SECTIONS
        width = max(map(len, self.texts))
        for title, names in parts.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", self.texts[name]) for name in names])


@cache
def command(path: str) -> Any:
    """Return the command, or the group of commands, at a path such as ``gpus choose``."""
    *_, name = path.split()
    if path in GROUPS:
        return Commands(f"{path} ", name=name, help=GROUPS[path], no_args_is_help=True,
                        rich_markup_mode=None)  # fmt: skip
    module = import_module(f"optsched.cli.{COMMANDS[path].module}")
    function = name.replace("-", "_") + "_" * iskeyword(name)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(getattr(module, function))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _print_version(value: bool) -> None:
    if value:
        from optsched.version import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def optsched(
    version: Annotated[
        bool, option("Print the version.", "--version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Decide what runs where and in which order on a GPU cluster, and run it."""


def run() -> int:
    """Run the command of `sys.argv` and return its exit code; bad usage is an `InputError`."""
    try:
        if (code := app(prog_name="optsched", standalone_mode=False) or 0) == 130:
            raise KeyboardInterrupt  # which typer has caught
        return code
    except _USAGE_ERROR as error:
        path = error.ctx.command_path if error.ctx else "optsched"
        text = error.format_message()
        if "\n" in text:  # the help of a group without a command
            print(text, file=sys.stderr)
            return 2
        found: list[Any] = getattr(error.__cause__, "errors", list)()  # of pydantic, with the value
        got = f", got {found[0]['input']!r:.60}" if found else ""
        raise InputError(f"{text.rstrip('.')}{got} (see `{path} --help`)") from None
