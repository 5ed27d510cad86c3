"""Columns that a trace may have beside the usual ones: sizes, shares, groups, passes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.job_checks import MOST_GPUS
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, format_json
from optsched.io.values import format_value

if TYPE_CHECKING:
    from optsched.formats.trace_table import TraceTable
    from optsched.model.schedule import IntArray

SEPARATOR: Final = "|"
"""Between the numbers of a cell of ``sizes``."""

_MOST_SIZES: Final = 2**22  # of all rows
_TRUTH: Final = {"": True, "true": True, "1": True, "false": False, "0": False}


def check_one_workload(table: TraceTable) -> None:
    """Rows of one workload only: the others would be replayed on top of it."""
    found = list(dict.fromkeys(table.columns.get("workload", ())))
    if len(found) > 1:
        raise InputError(
            f"{table.path}: workload: {len(found)} of them in one file ({format_json(found[0])}, "
            f"{format_json(found[1])}, ...); where={{'workload': {found[0]!r:.60}}} chooses one, "
            "ignore_columns=True, --ignore-columns reads all as one"
        )


def own_sizes(table: TraceTable, gpus: IntArray) -> list[tuple[int, ...] | None] | None:
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


def extras(table: TraceTable, passes: int) -> dict[str, Any]:
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
