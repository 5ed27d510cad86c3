"""Job traces as CSV: ``job_id, submit_time_s, num_gpus, duration_s, priority, type``."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

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
    from collections.abc import Mapping, Sequence

    from optsched.cluster.nodes import Nodes
    from optsched.cluster.speedup import Speedup
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

_MOST_SIZES: Final = 2**22  # of all rows
_TRUTH: Final = {"": True, "true": True, "1": True, "false": False, "0": False}


class Profile(NamedTuple):
    """What a trace does not say about the jobs of one `type`.

    `work` is 1-GPU time until completion, in the workload's unit, for rows without a duration
    (None: there must be one); `sizes` the allowed numbers of GPUs (None: the row's alone).
    """

    work: int | None = None
    speedup: Speedup = Linear()
    sizes: tuple[int, ...] | None = None


def read_trace(
    path: str | os.PathLike[str],
    nodes: Nodes | None = None,
    sort: bool = False,
    ignore_columns: bool = False,
    limit: int | None = None,
    *,
    time_unit: str = "s",
    speedup: Speedup | None = None,
    sizes: Sequence[int] | None = None,
    passes: int = 1,
    profiles: Mapping[str, Profile] | None = None,
    priority_as: Literal["priority", "weight", "ignored"] = "priority",
    type_as: Literal["source", "group", "template"] = "source",
    largest: int | None = None,
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
    limit
        Read only so many rows.
    time_unit
        Unit of the workload; the file's times are seconds, and whole ones in this unit.
    speedup
        Of every job; linear by default.
    sizes
        Every job may take its own size or any of these; rigid by default. Sizes in the file go
        first, then those of `profiles`.
    passes
        Data passes of every job: elastic jobs change size between them (``resize="pass"``). The
        column goes first.
    profiles
        Work, speed-up and sizes by `type`; they go before `speedup` and `sizes`.
    priority_as
        What the column `priority` is: 1 (first) to 99, a weight > 0, or nothing.
    type_as
        What the column `type` is besides free text: the group or the template of the job.
    largest
        Leave out jobs of more GPUs (after `limit`).
    where
        Keep rows whose column has this text (before `limit`); the column may be an unknown one.

    Raises
    ------
    InputError
        The message names the row (the header is row 1) and the field.
    """
    from optsched.cluster.workload import Workload

    table = TraceTable(path, ignore_columns, dict(where or {}), limit)
    one_of("time_unit", time_unit, TIME_UNITS)
    one_of("priority_as", priority_as, ("priority", "weight", "ignored"))
    one_of("type_as", type_as, ("source", "group", "template"))
    if not ignore_columns:
        _check_one_workload(table)
    gpus = table.gpus()
    if largest is not None:
        integer("largest", largest, 1)
        table.keep(gpus <= largest, f"no job has at most {largest} GPUs")
        gpus = gpus[gpus <= largest]
    if nodes is not None and (i := first(gpus > nodes.total)) is not None:
        table.refuse(
            i, "num_gpus",
            f"asks for {gpus[i]} GPUs, but the cluster has {nodes.total} (largest={nodes.total} "
            "leaves such jobs out)",
        )  # fmt: skip
    submit = table.times("submit_time_s", time_unit, 0)
    if not sort and (i := first(np.diff(submit) < 0)) is not None:
        table.refuse(
            i + 1, "submit_time_s",
            f"{submit[i + 1]} comes after {submit[i]}: not sorted (sort=True, --sort)",
        )  # fmt: skip
    names = table.names()
    integer("passes", passes, 1)
    order: Any = slice(None)
    if sort:
        order = sorted(range(len(names)), key=lambda i: (submit[i], names[i]))
    columns = _columns(table, gpus, time_unit, speedup or Linear(), sizes, profiles or {})
    columns["submit"] = submit
    columns |= _labels(table, priority_as, type_as, passes)
    _check_ends(table, columns, time_unit)
    per_job = {key: value[order] for key, value in columns.items() if isinstance(value, np.ndarray)}
    allowed, speedups = columns["sizes"], columns["speedups"]
    if sort:
        names = [names[i] for i in order]
        allowed = [allowed[i] for i in order] if isinstance(allowed, list) else allowed
        speedups = [speedups[i] for i in order] if isinstance(speedups, list) else speedups
    return Workload(
        names=tuple(names),
        name=file_label(Path(path).name),
        time_unit=time_unit,
        **_assembled(per_job, gpus[order], allowed, speedups),
    )


def _columns(
    table: TraceTable,
    gpus: IntArray,
    time_unit: str,
    speedup: Speedup,
    sizes: Sequence[int] | None,
    profiles: Mapping[str, Profile],
) -> dict[str, Any]:
    """Work of every job, and its sizes and speed-up (one for all where they are the same)."""
    wanted = None if sizes is None else ascending("sizes", sizes)
    known = _profiles(profiles)
    types = table.columns.get("type", ())
    rows = {t: known[t] for t in set(types) if t in known}
    speedups: Any = speedup
    allowed: Any = None
    own = _own_sizes(table, gpus)
    if rows or wanted is not None or own is not None:
        none = Profile(None, speedup, wanted)
        each = [rows.get(t, none) for t in types] or [none] * len(gpus)
        speedups = [profile.speedup for profile in each]
        allowed = [
            (g,) if p.sizes is None or g == 0 else tuple(sorted({*p.sizes, g} - {0}))
            for g, p in zip(gpus.tolist(), each, strict=True)
        ]
        if own is not None:
            allowed = [a if o is None else o for a, o in zip(allowed, own, strict=True)]
    rate = _own_rates(gpus, speedups)
    return {
        "work": _work(table, rate, time_unit, rows),
        "rate_own": rate,
        "sizes": allowed,
        "speedups": speedups,
    }


def _profiles(profiles: Mapping[str, Profile]) -> dict[str, Profile]:
    known = {}
    for key, profile in profiles.items():
        if not isinstance(profile, Profile):
            raise InputError(
                f"profiles[{format_value(key)}]: expected a Profile, got {format_value(profile)}"
            )
        if profile.work is not None:
            integer(f"profiles[{format_value(key)}].work", profile.work, 1, MAX_INTEGER)
        if profile.sizes is not None:
            ascending(f"profiles[{format_value(key)}].sizes", profile.sizes)
        known[key] = profile
    return known


def _own_rates(gpus: IntArray, speedups: Any) -> IntArray:
    """Speed of every job at its own size."""
    if isinstance(speedups, list):
        pairs = list(zip(speedups, gpus.tolist(), strict=True))
    else:
        if type(speedups) is Linear:
            return np.maximum(gpus, 1) * WORK
        pairs = [(speedups, g) for g in gpus.tolist()]
    found = {pair: rates(pair[0], (pair[1],))[0] for pair in set(pairs)}
    return np.array([found[pair] for pair in pairs], np.int64)


def _work(
    table: TraceTable, rate: IntArray, time_unit: str, profiles: Mapping[str, Profile]
) -> IntArray:
    """Duration times speed at the own size; where there is no duration, that of the profile."""
    n = len(rate)
    column = table.columns.get("duration_s", ("",) * n)
    absent = [i for i, text in enumerate(column) if not text] if "" in column else []
    given = np.zeros(n, np.int64)
    if absent:
        types = table.columns.get("type", ("",) * n)
        for i in absent:
            profile = profiles.get(types[i])
            if profile is None or profile.work is None:
                table.refuse(
                    i, "duration_s",
                    "missing, and there is no profile with the work of type "
                    f"{format_json(types[i])} "
                    "(profiles=)",
                )  # fmt: skip
            given[i] = profile.work * WORK if profile.work <= MOST_WORK // WORK else -1
            if given[i] < 0:
                table.refuse(i, "duration_s", "the profile's work is above 2^62 / 10^6")
        filled = list(column)
        for i in absent:
            filled[i] = "1"
        table.columns["duration_s"] = filled
    duration = table.times("duration_s", time_unit, 1)
    if (late := first(duration > MOST_WORK // rate)) is not None:
        what = f"{duration[late]} {time_unit} on these GPUs is more work than 2^62"
        table.refuse(late, "duration_s", what)
    work = duration * rate
    work[absent] = given[absent]
    return work


def _labels(table: TraceTable, priority_as: str, type_as: str, passes: int) -> dict[str, Any]:
    """Columns of priority, weight, type, group, template and passes."""
    n = len(table.row)
    if type_as in table.columns:
        raise InputError(f"type_as: {table.path} has a column {type_as}; leave type_as='source'")
    priority, weight = np.full(n, 50, np.int64), np.ones(n)
    column = table.columns.get("priority", ()) if priority_as != "ignored" else ()
    if any(column):
        for i, text in enumerate(column):
            if not text:
                continue
            value = table.number(i, "priority", text, "a number")
            if priority_as == "weight":
                if not 0 < value < 10**9:
                    table.refuse(i, "priority", f"expected a weight > 0, got {text}")
                weight[i] = float(value)
                continue
            if value != value.to_integral_value() or not 1 <= value <= 99:
                table.refuse(
                    i, "priority", f"expected 1..99, got {text} (priority_as='weight' reads shares)"
                )
            priority[i] = int(value)
    types = table.texts("type") if "type" in table.columns else ("",) * n
    more = _extras(table, passes)
    if "weight" in more and priority_as == "weight":
        raise InputError(f"priority_as: {table.path} has a column weight; read priority otherwise")
    found = {"priority": priority, "weight": weight, "source": np.array(types, np.str_)} | more
    if type_as != "source":
        found[f"{type_as}_words"] = found["source"]
    return found


def _check_ends(table: TraceTable, columns: dict[str, Any], time_unit: str) -> None:
    """Jobs that would end beyond 2^53 at their own size, and passes that are too short."""
    submit, work, passes = columns["submit"], columns["work"], columns["passes"]
    duration = -(-work // columns["rate_own"])
    if (i := first(duration > MAX_INTEGER - submit)) is not None:
        table.refuse(i, "duration_s", f"ends beyond 2^53 {time_unit}")
    if (i := first(passes > work)) is not None:
        table.refuse(i, "passes", f"{passes[i]} passes of less than one unit of work")


def _assembled(
    per_job: dict[str, Any], gpus: IntArray, allowed: Any, speedups: Any
) -> dict[str, Any]:
    """All columns of a workload."""
    from optsched.cluster.workload import Group
    from optsched.cluster.workload_columns import grouped, sized

    n = len(gpus)
    ones = np.ones(n, np.int64)
    which: Any
    if allowed is None:
        ptr = np.arange(n + 1)
        which = ((speedups,), np.zeros(n, np.int64), ptr, gpus, per_job["rate_own"])
    else:
        which = sized(allowed, speedups)
    groups: tuple[Group, ...] = (Group(""),)
    group, template, templates = ones * 0, -ones, ()
    if "group_words" in per_job:
        words = per_job["group_words"].tolist()
        found = list(dict.fromkeys(words))
        groups, group = grouped(found, ()), _numbers(words, found)
    if "template_words" in per_job:
        words = per_job["template_words"].tolist()
        found = sorted(set(words) - {""})
        templates, template = tuple(found), _numbers(words, found)
    work, passes = per_job["work"], per_job["passes"]
    return {
        "submit": per_job["submit"], "work": work, "believed": work, "nominal": work,
        "passes": passes, "pass_work": -(-work // passes),
        "speedups": which[0], "speedup": which[1], "size_ptr": which[2], "size": which[3],
        "rate": which[4],
        "priority": per_job["priority"], "weight": per_job["weight"], "source": per_job["source"],
        "group": group, "groups": groups, "template": template, "templates": templates,
        "preemptible": per_job["preemptible"], "restart_cost": -ones,
        "observed_ptr": np.zeros(n + 1, np.int64), "observed": np.zeros(0),
        "target": np.full(n, np.nan), "initial": np.full(n, np.nan),
        "estimate": np.ones(n), "micro_factor": np.ones(n), "completion": ones * 0,
    }  # fmt: skip


def _numbers(words: list[str], found: list[str]) -> IntArray:
    place = {word: k for k, word in enumerate(found)}
    return np.array([place.get(word, -1) for word in words], np.int64)


# optional columns: sizes, shares, groups, passes


def _check_one_workload(table: TraceTable) -> None:
    """Rows of one workload only: the others would be replayed on top of it."""
    found = list(dict.fromkeys(table.columns.get("workload", ())))
    if len(found) > 1:
        raise InputError(
            f"{table.path}: workload: {len(found)} of them in one file ({format_json(found[0])}, "
            f"{format_json(found[1])}, ...); where={{'workload': {found[0]!r:.60}}} chooses one, "
            "ignore_columns=True, --ignore-columns reads all as one"
        )


def _own_sizes(table: TraceTable, gpus: IntArray) -> list[tuple[int, ...] | None] | None:
    """Sizes that rows name themselves, None for the others; None if no row does."""
    none = ("",) * len(gpus)
    columns: Any = [table.columns.get(key, none) for key in ("sizes", "min_gpus", "max_gpus")]
    if not any(map(any, columns)):
        return None
    known: dict[Any, tuple[int, ...] | None] = {}
    found, total = [], 0
    for i, key in enumerate(zip(*columns, gpus.tolist(), strict=True)):
        if key not in known:
            listed, low, high, g = key
            known[key] = _sizes(table, i, listed, low, high, g, _MOST_SIZES - total)
        sizes = known[key]
        total += 1 if sizes is None else len(sizes)
        if total > _MOST_SIZES:
            table.refuse(i, "sizes", f"more than {_MOST_SIZES:,} sizes in all rows up to here")
        found.append(sizes)
    return found


def _sizes(
    table: TraceTable, i: int, sizes: str, least: str, most: str, g: int, room: int
) -> tuple[int, ...] | None:
    """Sizes of one row; `g` is one of them."""
    if sizes and (least or most):
        table.refuse(i, "sizes", "given beside min_gpus or max_gpus; give one of the two")
    if sizes:
        numbers = tuple(
            table.whole(i, "sizes", text, 0, MOST_GPUS, f"sizes such as 1{SEPARATOR}2{SEPARATOR}4")
            for text in sizes.split(SEPARATOR)
        )
        if any(b <= a for a, b in pairwise(numbers)):
            table.refuse(
                i, "sizes", f"expected ascending distinct sizes, got {format_value(sizes)}"
            )
        if numbers[0] == 0 and len(numbers) > 1:
            table.refuse(i, "sizes", "0 stands alone, for a task without GPUs")
        if g not in numbers:
            table.refuse(i, "num_gpus", f"{g} is not among the sizes {format_value(sizes)}")
        return numbers
    if not least and not most:
        return None
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


def _extras(table: TraceTable, passes: int) -> dict[str, Any]:
    """Weight, whether preemptible, passes, and words of group and template, by row."""
    n = len(table.row)
    weight, preemptible = np.ones(n), np.ones(n, np.bool_)
    each = np.full(n, passes, np.int64)
    columns = table.columns
    for i, text in enumerate(columns.get("weight", ())):
        if text:
            weight[i] = float(table.number(i, "weight", text, "a weight > 0"))
            if not 0 < weight[i] < math.inf:
                table.refuse(i, "weight", f"expected a finite weight > 0, got {text:.40}")
    for i, text in enumerate(columns.get("preemptible", ())):
        if text not in _TRUTH:
            table.refuse(i, "preemptible", f"expected true, false, 1 or 0, got {format_json(text)}")
        preemptible[i] = _TRUTH[text]
    for i, text in enumerate(columns.get("passes", ())):
        if text:
            each[i] = table.whole(i, "passes", text, 1, MAX_INTEGER, "a number of passes")
    found: dict[str, Any] = {"preemptible": preemptible, "passes": each}
    if any(columns.get("weight", ())):
        found["weight"] = weight
    for key in ("group", "template"):
        if key in columns:
            found[f"{key}_words"] = np.array(table.texts(key), np.str_)
    return found


__all__ = ["COLUMNS", "EXTRAS", "Profile", "read_trace", "write_trace"]
