"""Patterns: the numbers of GPUs that a job has on its hosts, sorted; and an automaton over them."""

from __future__ import annotations

import re
from functools import cache
from math import comb
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.model.schedule import IntArray

MOST_STATES: Final = 400_000
"""Patterns in an automaton; a cluster with more has no tables by pattern."""

_PATTERN = re.compile(r"[1-9]\d{0,3}(\+[1-9]\d{0,3})*")


class Automaton(NamedTuple):
    """Reads counts host by host, in any order; its state is their pattern, 0 the empty one."""

    step: IntArray
    """``step[state, count]``, shape (states, most a host + 1); -1: more hosts than there are."""
    patterns: IntArray
    """Counts of every state, falling, with zeros behind: shape (states, hosts)."""

    def states(self, rows: IntArray) -> IntArray:
        """States of rows of counts."""
        found = np.zeros(len(rows), np.int64)
        for column in rows.T:
            found = self.step[found, column]
        return found


def n_patterns(hosts: int, most: int) -> int:
    """Number of patterns of at most so many hosts with at most so many GPUs each."""
    return comb(hosts + most, most)


@cache
def automaton(hosts: int, most: int) -> Automaton:
    """The automaton for clusters of so many hosts with at most so many GPUs each."""
    if n_patterns(hosts, most) > MOST_STATES:
        raise InputError(f"{hosts} hosts of {most} GPUs have more than {MOST_STATES} patterns")
    used = np.zeros((1, most), np.int64)  # how often each count 1..most occurs
    for count in range(most):
        free = hosts - used.sum(axis=1)
        rows = np.repeat(np.arange(len(used)), free + 1)
        times = np.arange(len(rows)) - np.repeat(np.cumsum(free + 1) - free - 1, free + 1)
        used = used[rows]
        used[:, count] = times
    weight = np.array([(hosts + 1) ** count for count in range(most)], dtype=object)
    if (hosts + 1) ** most < 2**62:
        weight = weight.astype(np.int64)
    key = used.dot(weight)
    order = np.argsort(key, kind="stable")
    used, key = used[order], key[order]
    step = np.full((len(key), most + 1), -1, np.int64)
    step[:, 0] = np.arange(len(key))
    full = used.sum(axis=1) == hosts
    for count in range(1, most + 1):
        step[~full, count] = np.searchsorted(key, key[~full] + weight[count - 1])
    patterns = np.zeros((len(key), hosts), np.int64)
    falling = np.cumsum(used[:, ::-1], axis=1)  # hosts with at least most, most - 1, ... GPUs
    for k in range(most):
        patterns[np.arange(hosts) < falling[:, k : k + 1]] += 1
    step.flags.writeable = patterns.flags.writeable = False
    return Automaton(step, patterns)


def parse_pattern(text: str, place: str = "pattern") -> tuple[int, ...]:
    """``"5+3"`` as (5, 3), falling."""
    if not isinstance(text, str) or not _PATTERN.fullmatch(text):
        raise InputError(f"{place}: expected counts such as 5+3, got {text!r:.60}")
    return tuple(sorted((int(part) for part in text.split("+")), reverse=True))


def written_pattern(counts: IntArray | tuple[int, ...]) -> str:
    """``"5+3"``; zeros are left out."""
    return "+".join(str(int(c)) for c in sorted(counts, reverse=True) if c)


def rows_of(patterns: Iterable[tuple[int, ...]]) -> IntArray:
    """Patterns as rows with zeros behind, at least two columns."""
    given = [*patterns]
    rows = np.zeros((len(given), max(map(len, given), default=2)), np.int64)
    for row, pattern in zip(rows, given, strict=True):
        row[: len(pattern)] = pattern
    return rows
