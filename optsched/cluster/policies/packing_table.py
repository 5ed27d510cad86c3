"""Measured speeds of pairs of jobs that share their GPUs (as Lucid's packing needs them)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.world.jobs import PARTS
from optsched.errors import InputError
from optsched.io.csv_rows import csv_records
from optsched.io.files import read_text
from optsched.io.values import format_value, number

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from optsched.cluster.workload.workload import Workload
    from optsched.model.schedule import IntArray

PAIR_COLUMNS: Final = ("type_a", "type_b", "speed_a", "speed_b")
MOST_SPEED: Final = 2.0
"""Relative to running alone; above 1 it is an error of measurement."""
TYPE_COLUMNS: Final = ("type", "memory", "share_score")


class PackingTable:
    """Hold the speeds of pairs of job types on shared GPUs; for the policy `lucid`.

    The type of a job is its `source` (a trace's column ``type``), or its template if that is empty.

    Parameters
    ----------
    speeds
        ``(type_a, type_b) -> (speed_a, speed_b)`` relative to running alone, in (0, 2]: measured
        tables have values above 1. A pair holds both ways round; of two jobs of one type the first
        speed is that of the job that joined.
    memory
        Share of a GPU's memory, or GiB, by type: whatever unit a policy's limit has.
    share_score
        0 (leaves a GPU idle) to 2 (fills it) by type.

    Raises
    ------
    InputError
        A speed outside (0, 2], a negative number, or a pair given twice with different speeds.

    Examples
    --------
    >>> pairs = optsched.cluster.PackingTable({("cnn", "bert"): (0.9, 0.8)})
    >>> pairs.pair("bert", "cnn")
    (0.8, 0.9)
    """

    def __init__(
        self,
        speeds: Mapping[tuple[str, str], tuple[float, float]],
        memory: Mapping[str, float] | None = None,
        share_score: Mapping[str, float] | None = None,
    ) -> None:
        self.speeds: dict[tuple[str, str], tuple[float, float]] = {}
        for (a, b), (of_a, of_b) in speeds.items():
            place = f"speeds of {format_value(a)} with {format_value(b)}"
            pair = (_speed(place, of_a), _speed(place, of_b))
            if self.speeds.get((a, b), pair) != pair:
                raise InputError(f"{place}: given twice, with different speeds")
            self.speeds[b, a] = pair[::-1]
            self.speeds[a, b] = pair
        self.memory = {
            t: number(f"memory of {format_value(t)}", m) for t, m in (memory or {}).items()
        }
        self.share_score = {
            t: number(f"share_score of {format_value(t)}", s)
            for t, s in (share_score or {}).items()
        }
        for kind, score in self.share_score.items():
            if score > 2:
                raise InputError(f"share_score of {format_value(kind)}: expected 0..2, got {score}")

    def __repr__(self) -> str:
        return f"<PackingTable of {len(self.speeds)} ordered pairs, {len(self.memory)} types>"

    @classmethod
    def read(
        cls, pairs: str | os.PathLike[str], types: str | os.PathLike[str] | None = None
    ) -> PackingTable:
        """Read CSV files with the columns `PAIR_COLUMNS` and `TYPE_COLUMNS`."""
        speeds: dict[tuple[str, str], tuple[float, float]] = {}
        for place, row in csv_records(read_text(pairs), str(pairs), PAIR_COLUMNS, PAIR_COLUMNS):
            key = row["type_a"], row["type_b"]
            found = tuple(_speed(f"{place}: {c}", row[c]) for c in ("speed_a", "speed_b"))
            if key in speeds:
                raise InputError(
                    f"{place}: the pair {format_value(key[0])}, {format_value(key[1])} is there "
                    "twice"
                )
            speeds[key] = (found[0], found[1])
        memory: dict[str, float] = {}
        score: dict[str, float] = {}
        text = ",".join(TYPE_COLUMNS) if types is None else read_text(types)
        for place, row in csv_records(text, str(types), TYPE_COLUMNS, TYPE_COLUMNS):
            if row["type"] in memory:
                raise InputError(f"{place}: the type {format_value(row['type'])} is there twice")
            memory[row["type"]] = number(f"{place}: memory", _number(row["memory"]))
            score[row["type"]] = number(f"{place}: share_score", _number(row["share_score"]))
        return cls(speeds, memory, score)

    def pair(self, a: str, b: str) -> tuple[float, float] | None:
        """Speeds of a job of type a beside one of type b; None if that was not measured."""
        return self.speeds.get((a, b))

    def kinds(self, workload: Workload) -> tuple[IntArray, IntArray]:
        """Kind of every job, and speeds of all pairs of kinds in millionths, shape (kinds^2, 2).

        Row (kind that joins) * kinds + (kind there): speed of the first and of the second; 0: the
        pair was not measured.
        """
        names = types_of(workload)
        known = {name: i for i, name in enumerate(dict.fromkeys(names))}
        speeds = np.zeros((len(known), len(known), 2), np.int64)
        for joining, i in known.items():
            for host, k in known.items():
                pair = self.pair(joining, host)
                if pair is not None:
                    speeds[i, k] = np.maximum(np.rint(np.array(pair) * PARTS), 1)
        return np.array([known[name] for name in names]), speeds.reshape(-1, 2)

    def packable(self, workload: Workload, memory_limit: float) -> tuple[IntArray, Any]:
        """Kind of every job, and whether a job of a kind may join one of a kind (a matrix).

        Only measured pairs, with memory below the limit and share scores of at most 2 in sum.
        """
        kind, speeds = self.kinds(workload)
        names = list(dict.fromkeys(types_of(workload)))
        fits = (speeds[:, 0] > 0).reshape(len(names), -1)
        memory = np.array([self.memory.get(name, np.inf) for name in names])
        score = np.array([self.share_score.get(name, np.inf) for name in names])
        fits &= memory[None, :] < memory_limit - memory[:, None]
        fits &= score[:, None] + score[None, :] <= 2
        return kind, fits


def types_of(workload: Workload) -> list[str]:
    """What packing tables call jobs: their `source`, else their template, else an empty text."""
    texts, rows = (*workload.templates, ""), zip(workload.source, workload.template, strict=True)
    return [str(source) or texts[template] for source, template in rows]


def _speed(place: str, value: Any) -> float:
    found = number(place, _number(value), above=True)
    if found > MOST_SPEED:
        raise InputError(f"{place}: expected a speed in (0, 2], got {format_value(value)}")
    return found


def _number(text: Any) -> Any:
    """A text as a number, if it is one."""
    if not isinstance(text, str):
        return text
    try:
        return float(text)
    except ValueError:
        return text
