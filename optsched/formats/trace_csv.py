"""Job traces as CSV: ``job_id, submit_time_s, num_gpus, duration_s, priority, type``."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.cluster.job import WORK, rates
from optsched.cluster.job_checks import MOST_GPUS, MOST_WORK, ascending
from optsched.cluster.speedup import Linear
from optsched.errors import InputError
from optsched.formats.trace_table import (
    COLUMNS,
    EXTRAS,
    SEPARATOR,
    TraceTable,
    first,
    write_trace,
)
from optsched.io.strict_json import MAX_INTEGER, format_json
from optsched.io.values import file_label, format_value, integer, one_of
from optsched.model.schedule import TIME_UNITS

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from optsched.cluster.nodes import Nodes
    from optsched.cluster.speedup import Speedup
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

_MOST_SIZES: Final = 2**22  # of all rows
_TRUTH: Final = {"true": True, "1": True, "false": False, "0": False}


class Profile(NamedTuple):
    """What a trace does not say about the jobs of one `type`.

    `work` is 1-GPU time until completion, in the workload's unit, for rows without a duration
    (None: there must be one); `sizes` numbers of GPUs allowed beside the row's own (None: that
    one alone); `passes` data passes: elastic jobs change size between them (``resize="pass"``).
    """

    work: int | None = None
    speedup: Speedup = Linear()
    sizes: tuple[int, ...] | None = None
    passes: int = 1


def read_trace(
    path: str | os.PathLike[str],
    nodes: Nodes | None = None,
    sort: bool = False,
    ignore_columns: bool = False,
    *,
    time_unit: str = "s",
    profiles: Mapping[str, Profile] | None = None,
    rename: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
) -> Workload:
    """Read a trace strictly; a job ends after exactly its duration at its own size.

    Beside the six columns a file may have any of ``sizes`` (numbers of GPUs such as ``1|2|4``) or
    ``min_gpus`` and ``max_gpus`` (all from one to the other; an absent one is ``num_gpus``),
    ``weight``, ``group``, ``preemptible`` (true or false, 1 or 0), ``passes`` and ``template``;
    an empty cell is the default. Nothing is kept of ``batch_size`` and ``workload``, but a file
    with rows of several workloads is refused unless columns are ignored.

    Parameters
    ----------
    path
        The file: UTF-8, a header, one job a row.
    nodes
        The cluster; a job with more GPUs is an error.
    sort
        Sort by submit time, ties by id; otherwise rows must be sorted by submit time.
    ignore_columns
        Skip columns that are not known instead of refusing them, and read several workloads as
        one.
    time_unit
        Unit of the workload; the file's times are seconds, and whole ones in this unit.
    profiles
        Work, speed-up, sizes and passes by `type`, those of all others under ``"*"``. Sizes and
        passes in the file go first.
    rename
        Columns of the file that have another meaning, such as ``{"priority": "weight"}``
        (priorities are shares) or ``{"type": "group"}``; ``""`` skips the column.
    where
        Keep rows whose column has this text; the column may be an unknown one.

    Raises
    ------
    InputError
        The message names the row (the header is row 1) and the field.
    """
    from optsched.cluster.workload import Group, Workload
    from optsched.cluster.workload_columns import grouped, sized

    one_of("time_unit", time_unit, TIME_UNITS)
    known = _checked(profiles or {})
    table = TraceTable(path, ignore_columns, dict(where or {}), dict(rename or {}))
    if not ignore_columns:
        _check_one_workload(table)
    gpus = table.gpus()
    if nodes is not None and (i := first(gpus > nodes.total)) is not None:
        table.refuse(
            i, "num_gpus", f"asks for {gpus[i]} GPUs, but the cluster has {nodes.total} (read it "
            "without nodes and take those that fit: workload.take)",
        )  # fmt: skip
    names, submit = table.names(), table.times("submit_time_s", time_unit, 0)
    if sort:
        order = sorted(range(len(names)), key=lambda i: (submit[i], names[i]))
        table.reorder(order)
        names, submit, gpus = [names[i] for i in order], submit[order], gpus[order]
    elif (i := first(np.diff(submit) < 0)) is not None:
        table.refuse(
            i + 1, "submit_time_s",
            f"{submit[i + 1]} comes after {submit[i]}: not sorted (sort=True, --sort)",
        )  # fmt: skip
    source = table.texts("type")
    each = [known.get(key, known["*"]) for key in source]
    speedups, speedup, size_ptr, size, rate = sized(
        _sizes(table, gpus, each), [profile.speedup for profile in each]
    )
    work = _work(table, gpus, submit, each, time_unit)
    passes = _passes(table, each, work)
    groups: tuple[Group, ...] = (Group(""),)
    if "group" in table.columns:
        groups = grouped(table.texts("group"), ())
    templates = tuple(sorted(set(table.texts("template")) - {""}))
    n = len(names)
    ones = np.ones(n, np.int64)
    return Workload(
        names=tuple(names), name=file_label(Path(path).name), time_unit=time_unit,
        submit=submit, work=work, believed=work, nominal=work,
        passes=passes, pass_work=-(-work // passes),
        speedups=speedups, speedup=speedup, size_ptr=size_ptr, size=size, rate=rate,
        priority=np.array(table.cells("priority", _priority, 50), np.int64),
        weight=np.array(table.cells("weight", _weight, 1.0)),
        preemptible=np.array(table.cells("preemptible", _preemptible, True), np.bool_),
        source=np.array(source, np.str_),
        group=_places(table.texts("group"), [group.name for group in groups]), groups=groups,
        template=_places(table.texts("template"), templates), templates=templates,
        restart_cost=-ones, observed_ptr=np.zeros(n + 1, np.int64), observed=np.zeros(0),
        target=np.full(n, np.nan), initial=np.full(n, np.nan), estimate=np.ones(n),
        micro_factor=np.ones(n), completion=ones * 0,
    )  # fmt: skip


def _checked(profiles: Mapping[str, Profile]) -> dict[str, Profile]:
    """The profiles, and one for all other types."""
    for key, profile in profiles.items():
        place = f"profiles[{format_value(key)}]"
        if not isinstance(profile, Profile):
            raise InputError(f"{place}: expected a Profile, got {format_value(profile)}")
        if profile.work is not None:
            integer(f"{place}.work", profile.work, 1, MOST_WORK // WORK)
        if profile.sizes is not None:
            ascending(f"{place}.sizes", profile.sizes)
        integer(f"{place}.passes", profile.passes, 1)
    return {"*": Profile(), **profiles}


def _check_one_workload(table: TraceTable) -> None:
    """Rows of one workload only: the others would be replayed on top of it."""
    found = list(dict.fromkeys(table.column("workload")))
    if len(found) > 1:
        raise InputError(
            f"{table.path}: workload: {len(found)} of them in one file ({format_json(found[0])}, "
            f"{format_json(found[1])}, ...); where={{'workload': {found[0]!r:.60}}} chooses one, "
            "ignore_columns=True, --ignore-columns reads all as one"
        )


def _work(
    table: TraceTable, gpus: IntArray, submit: IntArray, each: list[Profile], time_unit: str
) -> IntArray:
    """Duration times speed at the own size; where there is no duration, that of the profile."""
    own = zip(each, gpus.tolist(), strict=True)
    rate = np.array([rates(profile.speedup, (g,))[0] for profile, g in own], np.int64)
    column = table.column("duration_s")
    absent = [i for i, text in enumerate(column) if not text]
    for row in absent:
        if each[row].work is None:
            what = "missing, and there is no profile with the work of type"
            kind = format_json(table.column("type")[row])
            table.refuse(row, "duration_s", f"{what} {kind} (profiles=)")
    if absent:
        table.columns["duration_s"] = [text or "1" for text in column]
    duration = table.times("duration_s", time_unit, 1)
    if (i := first(duration > MOST_WORK // rate)) is not None:
        what = f"{duration[i]} {time_unit} on these GPUs is more work than 2^62"
        table.refuse(i, "duration_s", what)
    work = duration * rate
    for row in absent:
        work[row] = (each[row].work or 0) * WORK
    if (i := first(-(-work // rate) > MAX_INTEGER - submit)) is not None:
        table.refuse(i, "duration_s", f"ends beyond 2^53 {time_unit}")
    return work


def _passes(table: TraceTable, each: list[Profile], work: IntArray) -> IntArray:
    given = table.cells("passes", _whole_passes, 0)
    found = np.array([p or profile.passes for p, profile in zip(given, each, strict=True)])
    if (i := first(found > work)) is not None:
        table.refuse(i, "passes", f"{found[i]} passes of less than one unit of work")
    return found


def _places(words: Any, found: Any) -> IntArray:
    """The place of every word among those found; -1 if it is not there."""
    place = {word: k for k, word in enumerate(found)}
    return np.array([place.get(word, -1) for word in words], np.int64)


# one cell


def _whole_passes(table: TraceTable, i: int, text: str) -> int:
    return table.whole(i, "passes", text, 1, MAX_INTEGER, "a number of passes")


def _priority(table: TraceTable, i: int, text: str) -> int:
    value = table.number(i, "priority", text, "a number")
    if value != value.to_integral_value() or not 1 <= value <= 99:
        hint = "rename={'priority': 'weight'} reads shares"
        table.refuse(i, "priority", f"expected 1..99, got {text} ({hint})")
    return int(value)


def _weight(table: TraceTable, i: int, text: str) -> float:
    weight = float(table.number(i, "weight", text, "a weight > 0"))
    if not 0 < weight < math.inf:
        table.refuse(i, "weight", f"expected a finite weight > 0, got {text:.40}")
    return weight


def _preemptible(table: TraceTable, i: int, text: str) -> bool:
    if text not in _TRUTH:
        table.refuse(i, "preemptible", f"expected true, false, 1 or 0, got {format_json(text)}")
    return _TRUTH[text]


def _sizes(table: TraceTable, gpus: IntArray, each: list[Profile]) -> list[tuple[int, ...]]:
    """The sizes of every row: those that it names, else those of its profile and its own."""
    known: dict[Any, tuple[int, ...]] = {}
    found, total = [], 0
    columns: Any = [table.column(key) for key in ("sizes", "min_gpus", "max_gpus")]
    others = [profile.sizes for profile in each]
    for i, key in enumerate(zip(*columns, gpus.tolist(), others, strict=True)):
        if key not in known:
            listed, low, high, g, more = key
            if listed:
                known[key] = _listed(table, i, listed, low or high, g)
            elif low or high:
                known[key] = _between(table, i, low, high, g, _MOST_SIZES - total)
            else:
                known[key] = (g,) if more is None or g == 0 else (*sorted({*more, g} - {0}),)
        total += len(known[key]) if any(key[:3]) else 1
        if total > _MOST_SIZES:
            table.refuse(i, "sizes", f"more than {_MOST_SIZES:,} sizes in all rows up to here")
        found.append(known[key])
    return found


def _listed(table: TraceTable, i: int, sizes: str, bounds: str, g: int) -> tuple[int, ...]:
    """Sizes such as ``1|2|4``; `g` is one of them."""
    if bounds:
        table.refuse(i, "sizes", "given beside min_gpus or max_gpus; give one of the two")
    what = f"sizes such as 1{SEPARATOR}2{SEPARATOR}4"
    numbers = tuple(
        table.whole(i, "sizes", text, 0, MOST_GPUS, what) for text in sizes.split(SEPARATOR)
    )
    if any(b <= a for a, b in pairwise(numbers)):
        table.refuse(i, "sizes", f"expected ascending distinct sizes, got {format_value(sizes)}")
    if numbers[0] == 0 and len(numbers) > 1:
        table.refuse(i, "sizes", "0 stands alone, for a task without GPUs")
    if g not in numbers:
        table.refuse(i, "num_gpus", f"{g} is not among the sizes {format_value(sizes)}")
    return numbers


def _between(
    table: TraceTable, i: int, least: str, most: str, g: int, room: int
) -> tuple[int, ...]:
    """All sizes from one to the other; `g` is one of them."""
    if g == 0:
        table.refuse(i, "min_gpus" if least else "max_gpus", "given for a task without GPUs")
    low = table.whole(i, "min_gpus", least, 1, MOST_GPUS, "a number of GPUs") if least else g
    high = table.whole(i, "max_gpus", most, 1, MOST_GPUS, "a number of GPUs") if most else g
    if low > high and least and most:
        table.refuse(i, "min_gpus", f"{low} is above max_gpus {high}")
    if not low <= g <= high:
        table.refuse(i, "num_gpus", f"{g} is not in {low}..{high} (min_gpus, max_gpus)")
    if high - low >= room:
        table.refuse(i, "max_gpus", f"more than {_MOST_SIZES:,} sizes in all rows up to here")
    return tuple(range(low, high + 1))


__all__ = ["COLUMNS", "EXTRAS", "Profile", "read_trace", "write_trace"]
