"""Checks of the raw arguments of `JobShop`; refusals name index, value and legal range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value, integer, is_integer, label
from optsched.model.schedule import NO_DEADLINE, IntArray

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_MACHINES: Final = 100_000
"""More machines than any shop has: a typing error would otherwise fill the memory with names."""


def chains_of(jobs: Any, n_machines: int | None) -> tuple[list[int], list[int], list[int]]:
    """Flatten jobs into (first operation of every job and the end, machines, durations)."""
    first, machine, duration = [0], [], []
    for j, row in enumerate(_listed(jobs, "jobs", "a list of jobs")):
        for i, pair in enumerate(_listed(row, f"jobs[{j}]", "a list of pairs (machine, duration)")):
            if not isinstance(pair, (tuple, list, np.ndarray)) or len(pair) != 2:
                raise InputError(
                    f"jobs[{j}][{i}]: expected a pair (machine, duration), got {format_value(pair)}"
                )
            where = f"jobs[{j}][{i}]: "
            machine.append(_machine(pair[0], n_machines, where))
            duration.append(integer(f"{where}duration", pair[1]))
        if len(machine) == first[-1]:
            raise InputError(f"jobs[{j}]: a job needs at least one operation")
        first.append(len(machine))
    if len(first) == 1:
        raise InputError("jobs: a job shop needs at least one job")
    return first, machine, duration


def machine_names(given: Any) -> tuple[str, ...]:
    """The names of the machines: strings, distinct, at least one."""
    names = tuple(_listed(given, "machines", "a list of names"))
    if not 1 <= len(names) <= MAX_MACHINES:
        raise InputError(f"machines: expected 1..{MAX_MACHINES} names, got {len(names)}")
    seen: dict[str, int] = {}
    for k, name in enumerate(names):
        if label(f"machines[{k}]", name) in seen:
            raise InputError(
                f"machines[{k}]: {format_value(name)} is also the name of machine {seen[name]}"
            )
        seen[name] = k
    return names


def window(key: str, given: Any, n_jobs: int, default: int) -> IntArray:
    """Releases or deadlines, one a job; None for a deadline means none."""
    if given is None:
        return np.full(n_jobs, default, np.int64)
    values = list(_listed(given, key, "a list with one value a job"))
    if len(values) != n_jobs:
        raise InputError(f"{key}: expected {n_jobs} values, one a job, got {len(values)}")
    if default == NO_DEADLINE:
        values = [NO_DEADLINE if v is None else v for v in values]
    checked = [
        default
        if default == NO_DEADLINE and not isinstance(v, bool) and v == NO_DEADLINE
        else integer(f"{key}[{j}]", v)
        for j, v in enumerate(values)
    ]
    return np.array(checked, np.int64)


def matrix(key: str, given: Any) -> IntArray:
    """A matrix of integers; ragged rows and other dtypes are refused."""
    try:
        array = np.asarray(given)
    except ValueError:
        raise InputError(_ragged(key, given)) from None
    if array.ndim != 2 or array.size == 0:
        raise InputError(f"{key}: expected a matrix (jobs x steps), got shape {array.shape}")
    if array.dtype.kind not in "iu":
        flat = array.ravel().tolist()
        at = next((i for i, v in enumerate(flat) if not is_integer(v)), 0)
        j, i = divmod(at, array.shape[1])
        raise InputError(
            f"{key}[{j}][{i}]: expected an array of integers, got {array.dtype} values "
            f"({format_value(flat[at])} here)"
        )
    return array


def check_total(duration: IntArray, release: IntArray) -> None:
    """Refuse times that could overflow: then no kernel has to look for it."""
    total = sum(duration.tolist()) + int(release.max(initial=0))
    if total > MAX_INTEGER:
        raise InputError(f"jobs: durations and the latest release add up to {total}, above 2^53")


def _machine(value: Any, n_machines: int | None, place: str) -> int:
    last = (MAX_MACHINES if n_machines is None else n_machines) - 1
    try:
        return integer(f"{place}machine", value, 0, last)
    except InputError as error:
        if is_integer(value) and value == n_machines:
            error.args = (f"{error.args[0]} (machines are 0-based here)",)
        raise


def _listed(given: Any, place: str, what: str) -> Iterable[Any]:
    if isinstance(given, (str, bytes, dict, set, frozenset)) or not hasattr(given, "__iter__"):
        raise InputError(f"{place}: expected {what}, got {format_value(given)}")
    if isinstance(given, np.ndarray) and given.ndim == 0:
        raise InputError(f"{place}: expected {what}, got a single number")
    rows: Iterable[Any] = given
    return rows


def _ragged(key: str, given: Any) -> str:
    """The first row whose length differs from that of row 0."""
    lengths = [len(row) if hasattr(row, "__len__") else -1 for row in given]
    for j, length in enumerate(lengths):
        if length != lengths[0]:
            return f"{key}[{j}]: expected {lengths[0]} values as in {key}[0], got {length}"
    return f"{key}: expected a matrix (jobs x steps) of integers"
