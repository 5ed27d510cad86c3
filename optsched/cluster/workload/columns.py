"""Columns of a workload: their types, ranges and defaults in one table, and all their checks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.cluster.workload.job import (
    CONTROL,
    MOST_AMOUNT,
    MOST_RATE,
    MOST_SPEED,
    MOST_WORK,
    line,
)
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import MAX_NAME, boolean, format_value, integer, label, number, one_of
from optsched.model.schedule import TIME_UNITS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray


class Column(NamedTuple):
    """Type and range of a column with one value per job, and the value of one left out."""

    type: type
    least: float = -math.inf
    most: float = math.inf
    default: Any = None
    """Of all jobs, or a function of the columns before it."""
    above: bool = False
    """Whether `least` itself is excluded."""


COLUMNS: Final = {
    "submit": Column(int, 0, MAX_INTEGER, 0),
    "work": Column(int, 1, MOST_WORK),
    "estimate": Column(int, 1, MOST_WORK, lambda found: found["work"]),
    "passes": Column(int, 1, MAX_INTEGER, 1),
    "pass_work": Column(int, 1, MOST_WORK, lambda found: -(-found["work"] // found["passes"])),
    "priority": Column(int, 1, 99, 50),
    "weight": Column(float, 0, math.inf, 1.0, above=True),
    "group": Column(int, 0, MAX_INTEGER, 0),
    "preemptible": Column(bool, default=True),
    "restart_cost": Column(int, -1, MAX_INTEGER, -1),
    "template": Column(int, -1, MAX_INTEGER, -1),
    "cpus_per_gpu": Column(float, 0, MOST_AMOUNT, 0.0),
    "memory_per_gpu_gb": Column(float, 0, MOST_AMOUNT, 0.0),
    "target": Column(float, default=math.nan),
    "initial": Column(float, default=math.nan),
    "source": Column(str, default=""),
}

_ARRAYS: Final[dict[type, tuple[str, Any, str]]] = {
    int: ("iu", np.int64, "integers"), float: ("iuf", np.float64, "numbers"),
    bool: ("b", np.bool_, "truth values"), str: ("U", np.str_, "texts"),
}  # fmt: skip
"""Kinds of NumPy arrays taken, the type they become, and its name in messages."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read-only columns of the right types and ranges; `InputError` names job and column."""
    names = tuple(given["names"])
    n = len(names)
    if n == 0:
        raise InputError("jobs: empty; a workload has at least one job")
    label("name", given["name"])
    one_of("time_unit", given["time_unit"], TIME_UNITS)
    _check_names(names)
    found: dict[str, Any] = {"names": names}
    for key, rule in COLUMNS.items():
        values = given[key]
        if values is None:
            values = rule.default(found) if callable(rule.default) else np.full(n, rule.default)
        found[key] = column(key, values, names)
    refuse_first(
        found["passes"] > found["work"], names,
        lambda i: f"passes: {found['passes'][i]} passes of less than one unit of work",
    )  # fmt: skip
    for text in set(found["source"].tolist()):
        line("source", text)
    for key in ("size_ptr", "size", "rate", "observed_ptr", "observed"):
        missing = np.zeros(n + 1 if key == "observed_ptr" else 0, np.int64)
        values = missing if given[key] is None else given[key]
        found[key] = _flat(key, values, float if key == "observed" else int)
    _check_rows(found, n)
    found["types"] = tuple(line("types", kind, empty=False) for kind in given["types"])
    found["speeds"] = _speeds(given["speeds"], found["types"], names)
    for key, values in (("group", "groups"), ("template", "templates")):
        found[values] = tuple(given[values])
        if found[key].max() >= (known := len(found[values])):
            raise InputError(f"{key}: {found[key].max()} but there are {known} of them")
    _check_times(found, names)
    for g, group in enumerate(found["groups"]):
        line(f"groups[{g}].name", group.name)
        number(f"groups[{g}].weight", group.weight)
        for key, least, most in (("max_slots", 0, MAX_INTEGER), ("priority", 1, 99),
                                 ("max_concurrent", 1, MAX_INTEGER)):  # fmt: skip
            if getattr(group, key) is not None:
                integer(f"groups[{g}].{key}", getattr(group, key), least, most)
    for k, template in enumerate(found["templates"]):
        line(f"templates[{k}]", template)
    return found


def refuse_first(bad: npt.NDArray[np.bool_], names: Sequence[str], what: Any) -> None:
    """Refuse the first job with its flag set; `what` describes it by its number."""
    if bad.any():
        i = int(np.argmax(bad))
        raise InputError(f"job {format_value(names[i])}: {what(i)}")


def _check_names(names: tuple[Any, ...]) -> None:
    """Refuse names that are empty, long or repeated, a million of them in one search."""
    try:
        text = "".join(names)
        valid = "" not in names and not CONTROL.search(text) and max(map(len, names)) <= MAX_NAME
        text.encode()
    except (TypeError, UnicodeEncodeError):
        valid = False
    if not valid:
        for i, name in enumerate(names):
            line(f"jobs[{i}].name", name, empty=False)
    if len(set(names)) < len(names):
        first: dict[str, int] = {}
        twice = next(i for i, name in enumerate(names) if first.setdefault(name, i) != i)
        raise InputError(f"jobs[{twice}].name: {format_value(names[twice])} appears twice")


def column(key: str, given: Any, names: Sequence[str]) -> npt.NDArray[Any]:
    """One value per job, read-only; the value of a job is refused with its name."""
    rule = COLUMNS[key]

    def value(i: int, one: Any) -> Any:
        place = f"job {format_value(names[i])}: {key}"
        if rule.type is bool:
            return boolean(place, one)
        if rule.type is int:
            return integer(place, one, int(rule.least), int(rule.most))
        return number(place, one, rule.least, rule.most, above=rule.above)

    if isinstance(given, (list, tuple)) and len(given) == len(names) and rule.type is not str:
        exact = {int, float} if rule.type is float else {rule.type}
        if not set(map(type, given)) <= exact:
            given = [value(i, one) for i, one in enumerate(given)]
    try:
        array = _flat(key, given, rule.type)
    except InputError:
        if isinstance(given, list) and rule.type is not str:  # an integer of more than 64 bits
            for i, one in enumerate(given):
                value(i, one)
        raise
    if len(array) != len(names):
        raise InputError(f"{key}: expected {len(names)} values, one per job, got {len(array)}")
    if rule.least > -math.inf:
        bad = array <= rule.least if rule.above else array < rule.least
        bad |= ~(array <= rule.most) | (np.isinf(array) if rule.type is float else False)
        for i in np.flatnonzero(bad)[:1].tolist():
            value(i, array[i])
    return array


def _flat(key: str, given: Any, kind: type) -> npt.NDArray[Any]:
    """A read-only, contiguous array of one dimension; a writable array is copied."""
    kinds, dtype, what = _ARRAYS[kind]
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError):
        raise InputError(f"{key}: expected a flat array of {what}") from None
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.dtype.kind not in kinds or array.ndim != 1:
        raise InputError(f"{key}: expected a flat array of {what}, got {array.dtype} values")
    array = array.astype(dtype, copy=False)
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.flags.writeable = False
    return array


def _speeds(given: Any, types: tuple[str, ...], names: Sequence[str]) -> npt.NDArray[np.float64]:
    """Speeds of jobs by types."""
    speeds = np.array(() if given is None else given, np.float64).reshape(-1, max(1, len(types)))
    if speeds.shape[0] != len(names) * bool(types) or len(set(types)) < len(types):
        raise InputError(f"speeds: expected {len(names)} rows for {len(types)} distinct types")
    for i, t in np.argwhere(~((speeds >= 0) & (speeds <= MOST_SPEED)))[:1].tolist():
        place = f"job {format_value(names[i])}: speeds[{format_value(types[t])}]"
        number(place, float(speeds[i, t]), 0.0, MOST_SPEED)
    speeds.flags.writeable = False
    return speeds.reshape(len(names), len(types))


def _check_rows(found: dict[str, Any], n: int) -> None:
    """Refuse rows in CSR form that are not aligned, or sizes that do not ascend."""
    for key, values in (("size_ptr", "size"), ("observed_ptr", "observed")):
        ptr, count = found[key], len(found[values])
        if len(ptr) != n + 1 or ptr[0] != 0 or ptr[-1] != count or (np.diff(ptr) < 0).any():
            raise InputError(f"{key}: expected {n + 1} ascending numbers from 0 to {count}")
    size, rate, ptr = found["size"], found["rate"], found["size_ptr"]
    count = np.diff(ptr)
    if len(rate) != len(size) or (rate < 1).any() or (rate > MOST_RATE).any():
        raise InputError("rate: expected one for every size, each 1..2^53")
    rising = np.diff(size, prepend=-1) > 0
    rising[ptr[:-1][count > 0]] = True
    zero = (size == 0) & (np.repeat(count, count) > 1)
    if (count == 0).any() or not rising.all() or (size < 0).any() or zero.any():
        raise InputError("size: expected ascending sizes in every row, 0 only alone")


def _check_times(found: dict[str, Any], names: tuple[str, ...]) -> None:
    """Refuse an order that is not by submit time, and amounts that could overflow in a kernel."""
    submit, size_ptr = found["submit"], found["size_ptr"]
    if (np.diff(submit) < 0).any():
        raise InputError("submit: not ascending; a workload is sorted by submit time")
    slowest = np.minimum.reduceat(found["rate"], size_ptr[:-1])
    speeds = found["speeds"]
    if speeds.size:
        least = np.where(speeds > 0, speeds, 1.0).min(1, initial=1.0)
        slowest = np.maximum(slowest * least, 1).astype(np.int64)
    longest = -(-found["work"] // slowest)
    refuse_first(
        submit > MAX_INTEGER - longest, names,
        lambda i: f"takes {longest[i]} units of time after {submit[i]} and would end beyond 2^53",
    )  # fmt: skip
    total = float(longest.sum(dtype=np.float64)) + float(submit[-1])
    if total > MAX_INTEGER:
        raise InputError(
            f"jobs: take {total:.3g} units of time one after the other, more than 2^53; "
            "use a coarser time_unit"
        )
    widest = found["size"][size_ptr[1:] - 1]
    if float((widest * longest.astype(np.float64)).sum()) > MOST_WORK:
        raise InputError("jobs: their GPUs times their times add up to more than 2^62")


# rows in CSR form


def csr(rows: Sequence[Sequence[Any]], dtype: Any) -> tuple[IntArray, npt.NDArray[Any]]:
    """Where each row begins, and the rows one after the other."""
    ptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=ptr[1:])
    return ptr, np.array([value for row in rows for value in row], dtype)


def picked(
    ptr: IntArray, values: npt.NDArray[Any], rows: IntArray
) -> tuple[IntArray, npt.NDArray[Any]]:
    """These rows of a table, maybe several times."""
    length = np.diff(ptr)[rows]
    begins = np.concatenate(([0], np.cumsum(length))).astype(np.int64)
    inside = np.arange(int(begins[-1])) - np.repeat(begins[:-1], length)
    return begins, values[np.repeat(ptr[rows], length) + inside]
