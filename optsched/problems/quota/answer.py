"""Answers to quota plans: GPUs of every job by node, and which GPUs those are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.model.schedule import Csr

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray


class Node(NamedTuple):
    """One machine: GPUs that the plan may use (with those its jobs hold now), and their type."""

    gpus: int
    type: str = ""
    name: str = ""


@dataclass(frozen=True, eq=False)
class Quotas:
    """GPUs of every job, by node (or by type, without nodes): what solvers find.

    Job j has the rows ``ptr[j]`` to ``ptr[j + 1] - 1``: nodes, ascending, and GPUs there (>= 1).
    """

    ptr: IntArray
    node: IntArray
    count: IntArray

    @classmethod
    def of(cls, jobs: int, job: IntArray, node: IntArray, count: IntArray) -> Quotas:
        """Make quotas of rows in any order."""
        order = np.lexsort((node, job))
        ptr = np.zeros(jobs + 1, np.int64)
        np.cumsum(np.bincount(job, minlength=jobs), out=ptr[1:])
        return cls(ptr, node[order], count[order])

    @property
    def rows(self) -> IntArray:
        """The job of every row."""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))

    @property
    def gpus(self) -> IntArray:
        """GPUs of every job."""
        found: IntArray = np.zeros(len(self.ptr) - 1, np.int64)
        np.add.at(found, self.rows, self.count)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Quotas):
            return NotImplemented
        pairs = ((getattr(self, key), getattr(other, key)) for key in ("ptr", "node", "count"))
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]


def kept_rows(quotas: Quotas, held: Quotas) -> tuple[IntArray, IntArray, IntArray]:
    """Return rows of both with the same job and node, and the number of GPUs that stay."""
    width = 1 + max(int(quotas.node.max(initial=0)), int(held.node.max(initial=0)))
    before, now = held.rows * width + held.node, quotas.rows * width + quotas.node
    _, i, k = np.intersect1d(before, now, assume_unique=True, return_indices=True)
    return i, k, np.minimum(held.count[i], quotas.count[k])


def kept_gpus(quotas: Quotas, held: Quotas) -> IntArray:
    """Return the GPUs of every job that stay: per node the smaller of held and new GPUs."""
    kept: IntArray = np.zeros(len(held.ptr) - 1, np.int64)
    i, _, stay = kept_rows(quotas, held)
    np.add.at(kept, held.rows[i], stay)
    return kept


def gpu_numbers(first: IntArray, n_gpus: int, quotas: Quotas, held: Quotas | None) -> Csr:
    """Return the numbers of every job's GPUs: the lowest of those it holds, then the lowest free.

    `first` is the first GPU of every node, `n_gpus` the GPUs of all nodes.
    """
    count = quotas.count.copy()
    is_free = np.ones(n_gpus, np.bool_)
    ids, job = np.zeros(0, np.int64), np.zeros(0, np.int64)
    if held is not None and len(held.node):
        i, k, stay = kept_rows(quotas, held)
        ids = runs(_begins(held.node, held.count, first)[i], stay)
        job = np.repeat(held.rows[i], stay)
        is_free[ids] = False
        count[k] -= stay
    free = np.flatnonzero(is_free)
    begin = _begins(quotas.node, count, np.searchsorted(free, first))
    ids = np.concatenate([ids, free[runs(begin, count)]])
    job = np.concatenate([job, np.repeat(quotas.rows, count)])
    indptr = np.zeros(len(quotas.ptr), np.int64)
    np.cumsum(quotas.gpus, out=indptr[1:])
    return Csr(indptr, ids[np.lexsort((ids, job))])


def _begins(node: IntArray, count: IntArray, first: IntArray) -> IntArray:
    """First GPU of every row if the rows of a node follow each other from the node's first GPU."""
    order = np.argsort(node, kind="stable")
    before = np.cumsum(count[order]) - count[order]
    opens = np.searchsorted(node[order], node[order])
    begin = np.zeros(len(node), np.int64)
    begin[order] = first[node[order]] + before - before[opens]
    return begin


def runs(begin: IntArray, count: IntArray) -> IntArray:
    """Concatenate ``begin[i], begin[i] + 1, ...``, ``count[i]`` numbers of each."""
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(begin, count) + within
