"""Output of commands: consoles, facts, files."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from optsched.errors import InternalError, MissingExtra
from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from rich.console import Console

    from optsched.cluster.results.run import Run


def console() -> Console:
    """Return a console for stdout; names appear as they are, never as markup."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 200
    return Console(width=width, highlight=False, markup=False, emoji=False)


def facts(rows: Iterable[tuple[str, object]], width: int = 12) -> None:
    """Print one fact per line, its name first; skip values that are None."""
    for key, value in rows:
        if value is not None:
            print(f"{key:{width}}{one_line(str(value), 1000)}".rstrip())


def wrote(
    path: Path | None, write: Callable[[Path], object] | bytes | str, what: str = "", *,
    quiet: bool = False,
) -> None:  # fmt: skip
    """Write a file, whole or not at all, and print its name; nothing without a path."""
    from optsched.io.files import write_atomic

    if path is None:
        return
    if callable(write):
        write(path)
    else:
        write_atomic(path, write)
    if not quiet:
        print(f"wrote {path}{what}")


def check_picture(path: Path | None, suffixes: tuple[str, ...] | None = None) -> None:
    """Refuse a picture with another suffix, or without matplotlib, before any work is done."""
    if path is None:
        return
    from optsched.plots.picture import check_suffix

    check_suffix(path, suffixes)
    if find_spec("matplotlib") is None:  # an import would take a second
        raise MissingExtra("plots", "plot")


def stdin_or_file(file: Path) -> tuple[str, str]:
    """Return name and text of a file, or of stdin for ``-``."""
    from optsched.io.files import decode_text, read_text

    if str(file) == "-":
        return "stdin", decode_text(sys.stdin.buffer.read(), "stdin")
    return str(file), read_text(file)


def lines_of(values: Iterable[object]) -> bytes:
    """Return JSON lines."""
    import msgspec

    return b"".join(msgspec.json.encode(value) + b"\n" for value in values)


class RunOutputs(NamedTuple):
    """Requested files of simulated or real runs."""

    history: Path | None
    metrics: Path | None
    plot: Path | None
    policies: tuple[str, ...]
    inputs: dict[str, Any]

    def check(self, *inputs: str | Path | None) -> None:
        """Refuse invalid paths, and paths of inputs, before any work is done."""
        from optsched.io.files import check_outputs
        from optsched.plots.picture import PICTURES

        check_picture(self.plot, (*PICTURES, ".html"))
        check_outputs([self.metrics, self.plot, *self._histories().values()], inputs)

    def show(self, runs: Mapping[str, Run], *, as_json: bool, quiet: bool) -> None:
        """Print the table, or one JSON object."""
        if as_json:
            from optsched.cluster.results.document import to_json

            print(json.dumps(json.loads(to_json(runs, per_job=False, inputs=self.inputs))))
        elif not quiet:
            from optsched.cli.tables import display, table
            from optsched.plots.simulation import table as comparison

            some = next(iter(runs.values()))
            title = (
                f"{one_line(some.workload.name, 60)}: {len(some.workload):,} jobs, "
                f"{some.nodes.total:,} GPUs in {len(some.nodes.gpus):,} nodes"
            )
            display(title, table(*comparison(runs)))

    def write(self, runs: Mapping[str, Run], *, quiet: bool) -> list[Path]:
        """Write all files and return their names; no picture if no job has ended."""
        from optsched.cluster.results import document
        from optsched.model.verify import verify
        from optsched.plots.simulation import simulation_report

        written = []
        for name, path in self._histories().items():
            if name in runs:
                history = runs[name].history
                if faults := verify(history):
                    raise InternalError(f"{name}: the history breaks a rule: {faults[0].message}")
                history.write(path)
                written.append(path)
        if self.metrics is not None:
            document.write(runs, self.metrics, inputs=self.inputs)
            written.append(self.metrics)
        ended = {name: run for name, run in runs.items() if run.metrics.ended.any()}
        if self.plot is not None and ended:
            simulation_report(ended, self.plot)
            written.append(self.plot)
        for path in () if quiet else written:
            print(f"wrote {path}")
        return written

    def _histories(self) -> dict[str, Path]:
        """Return the file of every policy: ``run.fifo.schedule.json`` if there are several."""
        path = self.history
        if path is None:
            return {}
        if len(self.policies) == 1:
            return {self.policies[0]: path}
        ending = next((e for e in (".schedule.json", ".json") if path.name.endswith(e)), "")
        stem = path.name[: len(path.name) - len(ending)]
        labels = {name: re.sub(r"[^\w.=-]", "-", name) for name in self.policies}
        return {name: path.with_name(f"{stem}.{label}{ending}") for name, label in labels.items()}
