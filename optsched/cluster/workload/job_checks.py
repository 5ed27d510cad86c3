"""Numbers of jobs: what is refused, and how the message says so."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Final

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value, integer, label

MOST_WORK: Final = 2**62
"""Work of a job: one more unit of time at any speed still fits 64 bits."""

MOST_RATE: Final = 2**53
"""Work per unit of time: the speed of 9 * 10**9 GPUs."""

MOST_GPUS: Final = 2**24
"""GPUs of one job."""


WHOLE: Final = {
    "submit": (0, MAX_INTEGER), "work": (1, MOST_WORK), "passes": (1, MAX_INTEGER),
    "priority": (1, 99), "restart_cost": (-1, MAX_INTEGER),
}  # fmt: skip
"""Whole numbers of a job, with their ranges (a restart cost of -1: that of the simulation)."""

FACTORS: Final = ("weight",)
"""Its numbers above 0."""


AMOUNTS: Final = ("cpus_per_gpu", "memory_per_gpu_gb")
"""What it asks for beside every GPU; 0: nothing."""

MOST_AMOUNT: Final = 2.0**20
MOST_SPEED: Final = 1000.0
"""Speed on a type of GPU, relative to that of the other types' 1."""


def ascending(place: str, sizes: Any) -> tuple[int, ...]:
    """Allowed numbers of GPUs: not empty, distinct, ascending; 0 only alone."""
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__iter__"):
        raise InputError(
            f"{place}: expected numbers of GPUs such as (1, 2, 4), got {format_value(sizes)}"
        )
    found = tuple(integer(place, size, 0, MOST_GPUS) for size in sizes)
    if not found:
        raise InputError(f"{place}: empty; give at least one number of GPUs ((0,) for none)")
    if any(b <= a for a, b in pairwise(found)):
        raise InputError(
            f"{place}: expected ascending numbers of GPUs, got {format_value(list(found))}"
        )
    if found[0] == 0 and len(found) > 1:
        raise InputError(
            f"{place}: 0 stands alone, for a task without GPUs, got {format_value(list(found))}"
        )
    return found


CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that no name or free text of a job has: a line of a trace could not hold them."""


def line(place: str, value: Any, *, empty: bool = True) -> str:
    """A name without control characters; maybe not an empty one."""
    text = label(place, value)
    if not text and not empty:
        raise InputError(f"{place}: empty; give every job a name")
    if CONTROL.search(text):
        raise InputError(f"{place}: control characters (a line break, NUL) in {format_value(text)}")
    return text
