"""What ``optsched simulate`` prints and writes; every file wholly or not at all."""

from __future__ import annotations

import csv
import io
import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from optsched.errors import InputError, InternalError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from optsched.cluster.run import Run


class Outputs(NamedTuple):
    """Files that were asked for."""

    history: Path | None
    metrics: Path | None
    csv: Path | None
    plot: Path | None
    policies: tuple[str, ...]
    inputs: dict[str, Any]

    def check(self, *inputs: str | Path | None) -> None:
        """Refuse paths, such as those of inputs, before any work is spent on them."""
        from optsched.io.files import check_not_input, check_writable

        if self.plot is not None:
            from optsched.plots.simulation import check_suffix

            check_suffix(self.plot)
            if find_spec("matplotlib") is None:  # importing it takes a second in which nothing runs
                raise MissingExtra("plots", "plot")
        paths = [self.metrics, self.csv, self.plot, *self._histories().values()]
        there = [path for path in paths if path is not None]
        for path in there:
            check_writable(path)
            for given in inputs:
                if given is not None:
                    check_not_input(path, given)
        if len(set(there)) < len(there):
            twice = next(path for k, path in enumerate(there) if path in there[:k])
            raise InputError(f"{twice}: two outputs of one name")

    def show(self, runs: Mapping[str, Run], *, as_json: bool, quiet: bool) -> None:
        """The table, or one JSON object."""
        if as_json:
            from optsched.formats.metrics_json import to_json

            print(json.dumps(json.loads(to_json(runs, per_job=False, inputs=self.inputs))))
        elif not quiet:
            _print_table(runs)

    def write(self, runs: Mapping[str, Run], *, quiet: bool) -> None:
        """All files, one after the other."""
        written = []
        for name, path in self._histories().items():
            if name in runs:
                _write_history(runs[name], path)
                written.append(path)
        if self.metrics is not None:
            from optsched.formats.metrics_json import write

            write(runs, self.metrics, inputs=self.inputs)
            written.append(self.metrics)
        if self.csv is not None:
            from optsched.io.files import write_atomic

            write_atomic(self.csv, table_csv(runs))
            written.append(self.csv)
        if self.plot is not None:
            drawn = {name: run for name, run in runs.items() if run.metrics.ended.any()}
            if drawn:
                from optsched.plots.simulation import simulation_report

                simulation_report(drawn, self.plot)
                written.append(self.plot)
        if not quiet:
            for path in written:
                print(f"wrote {path}")

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
    from rich.console import Console
    from rich.table import Table

    from optsched.plots.look import plain
    from optsched.plots.simulation import table

    some = next(iter(runs.values()))
    header, rows = table(runs)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    name = plain(some.workload.name, 60)
    console.print(
        f"{name}: {len(some.workload):,} jobs, {some.nodes.total:,} GPUs in "
        f"{len(some.nodes.gpus):,} nodes"
    )
    shown, left_out = _fitting(header, rows, console.width)
    found = Table()
    for k in shown:
        found.add_column(header[k], justify="right" if k else "left", no_wrap=True)
    for row in rows:
        found.add_row(*(row[k] for k in shown))
    console.print(found)
    if left_out:
        console.print(f"no room for: {', '.join(left_out)} (--csv has them)")


_FIRST_TO_GO = (10, 4, 9, 13, 11, 3, 6, 8, 12, 5, 7, 2)
"""Columns of the table by number, the least wanted first."""


def _fitting(header: list[str], rows: list[list[str]], width: int) -> tuple[list[int], list[str]]:
    """Columns that a terminal of this width has room for, and the names of the others."""
    wide = [max(map(len, column)) + 3 for column in zip(header, *rows, strict=True)]
    shown = list(range(len(header)))
    left_out = []
    for k in _FIRST_TO_GO:
        if sum(wide[i] for i in shown) + 1 <= width:
            break
        shown.remove(k)
        left_out.append(header[k])
    return shown, left_out


def table_csv(runs: Mapping[str, Run]) -> str:
    """One row per policy, one column per metric, exact; times in the workload's unit."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    rows = {name: run.metrics.summary() for name, run in runs.items()}
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    writer.writerow(["policy", "time_unit", *keys])
    for name, row in rows.items():
        unit = runs[name].workload.time_unit
        writer.writerow([name, unit, *(row.get(key, "") for key in keys)])
    return text.getvalue()
