"""Checks of the raw arguments of `JobShop`; refusals name index, value and legal range."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value, integer, is_integer, labels, listed
from optsched.model.schedule import NO_DEADLINE, IntArray

MAX_MACHINES: Final = 100_000
"""More machines than any shop has: a typing error would otherwise fill the memory with names."""


def chains_of(jobs: Any, n_machines: int | None) -> tuple[list[int], list[int], list[int]]:
    """Flatten jobs into (first operation of every job and the end, machines, durations)."""
    first, machine, duration = [0], [], []
    for j, row in enumerate(listed("jobs", jobs, "a list of jobs")):
        for i, pair in enumerate(listed(f"jobs[{j}]", row, "a list of pairs (machine, duration)")):
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
    """Check the names of the machines: distinct, at least one."""
    names = labels("machines", given)
    if not 1 <= len(names) <= MAX_MACHINES:
        raise InputError(f"machines: expected 1..{MAX_MACHINES} names, got {len(names)}")
    return names


def releases(given: Any, n_jobs: int) -> IntArray:
    """Check releases, one a job; None means 0."""
    if given is None:
        return np.zeros(n_jobs, np.int64)
    values = listed("release", given, "a list", n_jobs)
    return np.array([integer(f"release[{j}]", v) for j, v in enumerate(values)], np.int64)


def deadlines(given: Any, n_jobs: int) -> IntArray:
    """Check deadlines, one a job; None (for a job, or altogether) means none."""
    values = [None] * n_jobs if given is None else listed("deadline", given, "a list", n_jobs)
    checked = [
        NO_DEADLINE
        if v is None or (is_integer(v) and v == NO_DEADLINE)
        else integer(f"deadline[{j}]", v)
        for j, v in enumerate(values)
    ]
    return np.array(checked, np.int64)


def check_total(duration: IntArray, release: IntArray) -> int:
    """Refuse times that could overflow, so that no kernel needs a check; returns their sum."""
    total: int = sum(duration.tolist()) + int(release.max(initial=0))
    if total > MAX_INTEGER:
        raise InputError(f"jobs: durations and the latest release add up to {total}, above 2^53")
    return total


def _machine(value: Any, n_machines: int | None, place: str) -> int:
    last = (MAX_MACHINES if n_machines is None else n_machines) - 1
    try:
        return integer(f"{place}machine", value, 0, last)
    except InputError as error:
        if is_integer(value) and value == n_machines:
            error.args = (f"{error.args[0]} (machines are 0-based here)",)
        raise
