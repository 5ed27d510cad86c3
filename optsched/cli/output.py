"""What commands print and write: consoles, tables, facts, files."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from optsched.errors import InternalError, MissingExtra
from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from rich.console import Console

    from optsched.cluster.results.run import Run


def console(*, errors: bool = False, quiet: bool = False) -> Console:
    """Where tables and progress go; names appear as they are, never as markup."""
    from rich.console import Console

    stream = sys.stderr if errors else sys.stdout
    return Console(
        stderr=errors, quiet=quiet, width=None if errors or stream.isatty() else 200,
        highlight=False, markup=False, emoji=False,
    )  # fmt: skip


def facts(rows: Iterable[tuple[str, object]], width: int = 12) -> None:
    """One fact a line, its name first; none of what is None."""
    for key, value in rows:
        if value is not None:
            print(f"{key:{width}}{one_line(str(value), 1000)}".rstrip())


def wrote(path: Path | None, write: Callable[[Path], object] | bytes | str, what: str = "") -> None:
    """Write a file that was asked for, and say so; it is there as a whole or not at all."""
    from optsched.io.files import write_atomic

    if path is None:
        return
    if callable(write):
        write(path)
    else:
        write_atomic(path, write)
    print(f"wrote {path}{what}")


def answer_lines(lines: BinaryIO, answers: BinaryIO, answer: Callable[[int, bytes], bytes]) -> None:
    """Answer every line that is not blank; an answer is flushed before the next line is read."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            answers.write(answer(number, line.rstrip(b"\r\n")))
            answers.flush()


def stdin_or_file(file: Path) -> tuple[str, str]:
    """Name and text of a file, or of stdin for ``-``."""
    from optsched.io.files import decode_text, read_text

    if str(file) == "-":
        return "stdin", decode_text(sys.stdin.buffer.read(), "stdin")
    return str(file), read_text(file)


def indented(value: object) -> bytes:
    """A document that people may read."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def lines_of(values: Iterable[object]) -> bytes:
    """One JSON value a line."""
    import msgspec

    return b"".join(msgspec.json.encode(value) + b"\n" for value in values)


class RunOutputs(NamedTuple):
    """Files of simulated or real runs that were asked for."""

    history: Path | None
    metrics: Path | None
    plot: Path | None
    policies: tuple[str, ...]
    inputs: dict[str, Any]

    def check(self, *inputs: str | Path | None) -> None:
        """Refuse paths, such as those of inputs, before any work is spent on them."""
        from optsched.io.files import check_outputs

        if self.plot is not None:
            from optsched.plots.simulation import check_suffix

            check_suffix(self.plot)
            if find_spec("matplotlib") is None:  # importing it takes a second in which nothing runs
                raise MissingExtra("plots", "plot")
        check_outputs([self.metrics, self.plot, *self._histories().values()], inputs)

    def show(self, runs: Mapping[str, Run], *, as_json: bool, quiet: bool) -> None:
        """The table, or one JSON object."""
        if as_json:
            from optsched.cluster.results.document import to_json

            print(json.dumps(json.loads(to_json(runs, per_job=False, inputs=self.inputs))))
        elif not quiet:
            _print_table(runs)

    def write(self, runs: Mapping[str, Run], *, quiet: bool) -> list[Path]:
        """All files, one after the other; those that were written."""
        from optsched.cluster.results import document

        written = []
        for name, path in self._histories().items():
            if name in runs:
                _write_history(runs[name], path)
                written.append(path)
        if self.metrics is not None:
            document.write(runs, self.metrics, inputs=self.inputs)
            written.append(self.metrics)
        drawn = {name: run for name, run in runs.items() if run.metrics.ended.any()}
        if self.plot is not None and drawn:
            from optsched.plots.simulation import simulation_report

            simulation_report(drawn, self.plot)
            written.append(self.plot)
        if not quiet:
            for path in written:
                print(f"wrote {path}")
        return written

    def _histories(self) -> dict[str, Path]:
        """File of every policy's history: ``run.fifo.schedule.json`` if there are several."""
        path = self.history
        if path is None:
            return {}
        if len(self.policies) == 1:
            return {self.policies[0]: path}
        ending = next((e for e in (".schedule.json", ".json") if path.name.endswith(e)), "")
        stem = path.name[: len(path.name) - len(ending)]
        return {name: path.with_name(f"{stem}.{name}{ending}") for name in self.policies}


def _write_history(run: Run, path: Path) -> None:
    from optsched.model.verify import verify

    violations = verify(run.history)
    if violations:
        raise InternalError(f"{run.policy}: the history breaks a rule: {violations[0].message}")
    run.history.write(path)


def _print_table(runs: Mapping[str, Run]) -> None:
    from optsched.cli.tables import display, table
    from optsched.plots.simulation import table as comparison

    some = next(iter(runs.values()))
    title = (
        f"{one_line(some.workload.name, 60)}: {len(some.workload):,} jobs, "
        f"{some.nodes.total:,} GPUs in {len(some.nodes.gpus):,} nodes"
    )
    display(title, table(*comparison(runs)))
