"""Columns of a workload: types, ranges, order, and that nothing can overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from optsched.cluster.workload.job_checks import (
    AMOUNTS,
    CONTROL,
    FACTORS,
    MOST_AMOUNT,
    MOST_RATE,
    MOST_SPEED,
    MOST_WORK,
    WHOLE,
    line,
)  # fmt: skip
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import MAX_NAME, format_value, integer, label, number, one_of
from optsched.model.schedule import TIME_UNITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.cluster.workload.workload import Group, Workload
    from optsched.model.schedule import IntArray

_T = TypeVar("_T", bound=np.generic)

_DERIVED = {
    "estimate": (1, MOST_WORK), "pass_work": (1, MOST_WORK),
    "group": (0, MAX_INTEGER), "template": (-1, MAX_INTEGER), "speedup": (0, MAX_INTEGER),
}  # fmt: skip


def checked(w: Workload) -> dict[str, Any]:
    """Read-only columns of the right types and ranges; `InputError` names job and column."""
    names = tuple(w.names)
    n = len(names)
    if n == 0:
        raise InputError("jobs: empty; a workload has at least one job")
    label("name", w.name)
    one_of("time_unit", w.time_unit, TIME_UNITS)
    _check_names(names)
    if len(set(names)) < n:
        first: dict[str, int] = {}
        twice = next(i for i, name in enumerate(names) if first.setdefault(name, i) != i)
        raise InputError(f"jobs[{twice}].name: {format_value(names[twice])} is there twice")
    columns: dict[str, Any] = {"names": names}
    for key, (least, most) in (WHOLE | _DERIVED).items():
        columns[key] = ints(key, getattr(w, key), n, names, least, most)
    for key in ("size_ptr", "size", "rate", "observed_ptr"):
        columns[key] = ints(key, getattr(w, key))
    for key in ("weight", "target", "initial"):
        columns[key] = floats(key, getattr(w, key), n)
    columns["observed"] = floats("observed", w.observed)
    for key in FACTORS:
        bad = ~((columns[key] > 0) & np.isfinite(columns[key]))
        if bad.any():
            i = int(np.argmax(bad))
            raise InputError(
                f"job {format_value(names[i])}: {key}: expected a finite number > 0, got "
                f"{columns[key][i]}"
            )
    for key in AMOUNTS:
        column = getattr(w, key)
        columns[key] = floats(key, column if np.size(column) else np.zeros(n), n)
        _check_amounts(key, columns[key], names, MOST_AMOUNT)
    columns["types"] = tuple(line("types", kind, empty=False) for kind in w.types)
    speeds = np.array(w.speeds, np.float64).reshape(-1, max(1, len(w.types)))
    if speeds.shape[0] != n * bool(w.types) or len(set(w.types)) < len(w.types):
        raise InputError(f"speeds: expected {n} rows for {len(w.types)} distinct types")
    for kind, column in zip(columns["types"], speeds.T, strict=False):
        _check_amounts(f"speeds[{format_value(kind)}]", column, names, MOST_SPEED)
    speeds.flags.writeable = False
    columns["speeds"] = speeds.reshape(n, len(w.types))
    columns["preemptible"] = _frozen(np.asarray(w.preemptible, np.bool_), "preemptible", n)
    columns["source"] = _frozen(np.asarray(w.source, np.str_), "source", n)
    if CONTROL.search("".join(columns["source"].tolist())):
        for name, text in zip(names, columns["source"].tolist(), strict=True):
            line(f"job {format_value(name)}: source", text)
    _check_rows(columns, n)
    _check_order(columns, w)
    _check_times(columns, names)
    columns["groups"], columns["templates"] = tuple(w.groups), tuple(w.templates)
    for g, group in enumerate(w.groups):
        _check_group(f"groups[{g}]", group)
    for k, template in enumerate(w.templates):
        line(f"templates[{k}]", template)
    return columns


def _check_amounts(key: str, column: Any, names: tuple[str, ...], most: float) -> None:
    bad = ~((column >= 0) & (column <= most))
    if bad.any():
        i = int(np.argmax(bad))
        raise InputError(
            f"job {format_value(names[i])}: {key}: expected a number in 0..{most:g}, got "
            f"{column[i]}"
        )


def _check_names(names: tuple[Any, ...]) -> None:
    """All at once: there may be a million."""
    try:
        text = "".join(names)
        plain = "" not in names and not CONTROL.search(text)
        text.encode()
    except (TypeError, UnicodeEncodeError):
        plain = False
    if not plain or max(map(len, names)) > MAX_NAME:
        for i, name in enumerate(names):
            line(f"jobs[{i}].name", name, empty=False)


def _check_rows(columns: dict[str, Any], n: int) -> None:
    for key, values in (("size_ptr", "size"), ("observed_ptr", "observed")):
        ptr = columns[key]
        if len(ptr) != n + 1 or ptr[0] != 0 or (np.diff(ptr) < 0).any():
            raise InputError(f"{key}: expected {n + 1} ascending numbers from 0")
        if ptr[-1] != len(columns[values]):
            raise InputError(f"{key}: ends with {ptr[-1]}, there are {len(columns[values])} values")
    if len(columns["rate"]) != len(columns["size"]):
        raise InputError("rate: expected one for every size")
    if (np.diff(columns["size_ptr"]) == 0).any():
        raise InputError("size: empty row; every job has a size ((0,) for a task without GPUs)")
    size, rate, first = columns["size"], columns["rate"], columns["size_ptr"][:-1]
    rising = np.diff(size) > 0
    rising[first[1:] - 1] = True
    alone = np.repeat(np.diff(columns["size_ptr"]) == 1, np.diff(columns["size_ptr"]))
    if not rising.all() or (size < 0).any() or ((size == 0) & ~alone).any():
        raise InputError("size: expected ascending sizes in every row, 0 only alone")
    if (rate < 1).any() or (rate > MOST_RATE).any():
        raise InputError("rate: expected 1..2^53")


def _check_order(columns: dict[str, Any], w: Workload) -> None:
    if (np.diff(columns["submit"]) < 0).any():
        raise InputError("submit: not ascending; a workload is sorted by submit time")
    for key, values in (("group", w.groups), ("template", w.templates), ("speedup", w.speedups)):
        if columns[key].max() >= len(values):
            raise InputError(f"{key}: {columns[key].max()} but there are {len(values)} of them")


def _check_times(columns: dict[str, Any], names: tuple[str, ...]) -> None:
    """Refuse what could overflow: then no kernel has to look for it."""
    slowest = np.minimum.reduceat(columns["rate"], columns["size_ptr"][:-1])
    speeds = columns["speeds"]
    if speeds.size:
        least = np.where(speeds > 0, speeds, 1.0).min(1, initial=1.0)
        slowest = np.maximum(slowest * least, 1).astype(np.int64)
    longest = -(-columns["work"] // slowest)
    late = columns["submit"] > MAX_INTEGER - longest
    if late.any():
        i = int(np.argmax(late))
        raise InputError(
            f"job {format_value(names[i])}: takes {longest[i]} units of time after "
            f"{columns['submit'][i]} "
            "and would end beyond 2^53"
        )
    total = float(longest.sum(dtype=np.float64)) + float(columns["submit"][-1])
    if total > MAX_INTEGER:
        raise InputError(
            f"jobs: take {total:.3g} units of time one after the other, more than 2^53; "
            "use a coarser time_unit"
        )
    widest = columns["size"][columns["size_ptr"][1:] - 1]
    if float((widest * longest.astype(np.float64)).sum()) > MOST_WORK:
        raise InputError("jobs: their GPUs times their times add up to more than 2^62")


def _check_group(place: str, group: Group) -> None:
    line(f"{place}.name", group.name)
    number(f"{place}.weight", group.weight)
    if group.max_slots is not None:
        integer(f"{place}.max_slots", group.max_slots)
    if group.max_concurrent is not None:
        integer(f"{place}.max_concurrent", group.max_concurrent, 1)
    if group.priority is not None:
        integer(f"{place}.priority", group.priority, 1, 99)


def ints(
    key: str,
    given: Any,
    n: int | None = None,
    names: Sequence[str] = (),
    least: int | None = None,
    most: int = MAX_INTEGER,
) -> IntArray:
    """A read-only column of integers in a range; messages name the job."""
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError):
        raise InputError(f"{key}: expected a flat array of integers") from None
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InputError(f"{key}: expected a flat array of integers, got {array.dtype} values")
    numbers: IntArray = _frozen(array.astype(np.int64, copy=False), key, n)
    if least is not None:
        bad = (numbers < least) | (numbers > most)
        if bad.any():
            i = int(np.argmax(bad))
            limit = {MAX_INTEGER: "2^53", MOST_WORK: "2^62"}.get(most, str(most))
            raise InputError(
                f"job {format_value(names[i])}: {key}: expected {least}..{limit}, got {numbers[i]}"
            )
    return numbers


def floats(key: str, given: Any, n: int | None = None) -> npt.NDArray[np.float64]:
    """A read-only column of floats."""
    try:
        array = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{key}: expected a flat array of numbers") from None
    if array.ndim != 1:
        raise InputError(f"{key}: expected a flat array, got shape {array.shape}")
    return _frozen(array, key, n)


def _frozen(array: npt.NDArray[_T], key: str, n: int | None = None) -> npt.NDArray[_T]:
    """Read-only and contiguous; a writable array is copied."""
    if array.ndim != 1 or (n is not None and len(array) != n):
        raise InputError(f"{key}: expected {n} values, one per job, got shape {array.shape}")
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.flags.writeable = False
    return array
