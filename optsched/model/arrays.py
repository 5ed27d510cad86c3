"""Parts of a `Schedule`: resources, objective, arcs and ragged rows."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from optsched.errors import InputError
from optsched.io.values import int_array, is_integer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

IntArray: TypeAlias = npt.NDArray[np.int64]


class Resource(NamedTuple):
    """A unary machine; ``memory`` in bytes, 0 means unlimited.

    Examples
    --------
    >>> optsched.Resource("gpu0", 80 * 2**30)
    Resource(name='gpu0', memory=85899345920)
    """

    name: str
    memory: int = 0


class Objective(NamedTuple):
    """Claimed value of a schedule, with the lower bound and status that its solver proved.

    Examples
    --------
    >>> optsched.Objective("makespan", 930, 915, "feasible").lower_bound
    915
    """

    name: str
    value: int | None = None
    lower_bound: int | None = None
    status: str = "unknown"


class Goal(NamedTuple):
    """An objective of one iteration, with weights and due dates of jobs; () = all 1, all 0.

    `optsched.model.objectives` defines the objectives.

    Examples
    --------
    >>> optsched.JobShop([[(0, 2)], [(0, 3)]], objective="maximum_lateness", due=[9, 4]).goal
    Goal(objective='maximum_lateness', job_weight=(), due=(9, 4))
    """

    objective: str = "makespan"
    job_weight: tuple[int, ...] = ()
    due: tuple[int, ...] = ()


class Arcs(NamedTuple):
    """Conjunctive arcs: ``start[head] >= start[tail] + duration[tail] + lag - tokens * period``.

    Tokens are ``distance + offset[head] - offset[tail]``, 0 in a one-shot schedule.

    Examples
    --------
    >>> optsched.Arcs.of([(0, 1), (1, 2, 5)]).lag.tolist()
    [0, 5]
    """

    tail: IntArray
    head: IntArray
    lag: IntArray
    distance: IntArray

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Arcs:
        """Arcs from rows ``(tail, head[, lag[, distance]])``."""
        try:
            given = list(rows)
            full = [(*row, *(0,) * (4 - len(row))) for row in given]
        except TypeError:
            raise InputError("arcs: expected rows (tail, head[, lag[, distance]])") from None
        for a, row in enumerate(given):
            if not 2 <= len(row) <= 4:
                raise InputError(f"arcs[{a}]: expected 2 to 4 integers, got {len(row)}")
        try:
            table = np.array(full) if full else np.zeros((0, 4), np.int64)
        except ValueError:
            raise InputError("arcs: expected integers") from None
        if table.shape != (len(full), 4):
            raise InputError("arcs: expected rows (tail, head[, lag[, distance]])")
        return cls(*(int_array("arcs", table[:, c]) for c in range(4)))


class Csr:
    """Ragged integer rows in compressed form (CSR): row r is ``ids[indptr[r]:indptr[r+1]]``.

    Used for the resources of every operation and for the order of operations on every resource.

    Examples
    --------
    >>> rows = optsched.Csr.of([[4, 0], [], [1]])
    >>> rows.indptr.tolist(), rows.ids.tolist(), rows[0].tolist()
    ([0, 2, 2, 3], [4, 0, 1], [4, 0])
    """

    __slots__ = ("ids", "indptr")

    def __init__(self, indptr: npt.ArrayLike, ids: npt.ArrayLike) -> None:
        self.indptr = int_array("indptr", indptr)
        self.ids = int_array("ids", ids)
        steps = np.diff(self.indptr)
        if len(self.indptr) == 0 or self.indptr[0] != 0 or (steps < 0).any():
            raise InputError("indptr: expected an ascending array that starts with 0")
        if self.indptr[-1] != len(self.ids):
            raise InputError(
                f"indptr: ends with {self.indptr[-1]}, but there are {len(self.ids)} ids"
            )

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> Csr:
        """Compress a list of rows."""
        try:
            lists = [[*row] for row in rows]
        except TypeError:
            raise InputError("rows: expected a list of lists of integers") from None
        ids = [i for row in lists for i in row]
        if not set(map(type, ids)) <= {int}:  # NumPy would take floats and booleans
            for i in ids:
                if not is_integer(i):
                    raise InputError(f"expected an integer, got {i!r:.60}")
        return cls(np.cumsum([0, *map(len, lists)]), ids)

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, row: int) -> IntArray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.ids[self.indptr[row] : self.indptr[row + 1]]

    def to_lists(self) -> list[list[int]]:
        """Return the rows as lists of Python integers."""
        ids, bounds = self.ids.tolist(), self.indptr.tolist()
        return [ids[a:b] for a, b in pairwise(bounds)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Csr):
            return NotImplemented
        return np.array_equal(self.indptr, other.indptr) and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Csr({self.to_lists()!r})" if len(self.ids) <= 64 else f"<Csr of {len(self)} rows>"


class Adjacency(NamedTuple):
    """Arcs by one end (CSR): the other end, and start-to-start weights ``duration[tail] + lag``."""

    indptr: IntArray
    other: IntArray
    weight: IntArray


def grouped(key: IntArray, n: int) -> tuple[IntArray, IntArray]:
    """Offsets and stable order that group entries by key 0..n-1 (CSR)."""
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(key, minlength=n), out=indptr[1:])
    return indptr, np.argsort(key, kind="stable")
