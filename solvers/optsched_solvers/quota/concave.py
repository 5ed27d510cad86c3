"""Largest sum of concave utilities: by a heap of marginals, or by the price of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from optsched.errors import InputError
from optsched_solvers.quota.certificate import Certificate
from optsched_solvers.quota.inputs import gpus, tables
from optsched_solvers.quota.marginals import by_heap, by_price, dual_bound, survey

if TYPE_CHECKING:
    from optsched_solvers.quota.inputs import IntArray

    Search = Literal["auto", "heap", "threshold"]

_FEW = 1000
"""With at most so many GPUs above the minima, or one a job, the heap is faster than the search."""


@overload
def concave_sum(
    ptr: Any, value: Any, minimum: Any, budget: int, *, method: Search = ...,
    certificate: Literal[False] = ...,
) -> IntArray: ...  # fmt: skip
@overload
def concave_sum(
    ptr: Any, value: Any, minimum: Any, budget: int, *, method: Search = ...,
    certificate: Literal[True],
) -> tuple[IntArray, Certificate]: ...  # fmt: skip
def concave_sum(
    ptr: Any, value: Any, minimum: Any, budget: int, *, method: Search = "auto",
    certificate: bool = False,
) -> IntArray | tuple[IntArray, Certificate]:  # fmt: skip
    """Whole GPUs that maximise the sum of concave utilities; every job gets at least its minimum.

    A GPU goes where it adds most (Fox 1966), ties by id, as long as it adds something: GPUs that
    add nothing stay unused.

    Parameters
    ----------
    ptr
        Offsets of the rows, shape (jobs + 1,), from 0 to the number of values.
    value
        Row j holds the integer utility of job j at minimum[j], minimum[j] + 1, ... GPUs, with
        increments that never grow.
    minimum
        Whole GPUs, shape (jobs,), or one number for all.
    budget
        GPUs to share, at most 2**30.
    method
        ``"heap"``: O(G log n), for few GPUs; ``"threshold"``: search of the price at which the
        wanted GPUs meet the budget (Galil & Megiddo 1979; Frederickson & Johnson 1982), sampled
        pivots, binary search in every row; ``"auto"`` chooses by GPUs a job. All give equal quotas.
    certificate
        Return a proof as well: the Lagrangian dual bound at its `price`, over all entries and
        without use of concavity, equals the sum.

    Returns
    -------
    IntArray, shape (jobs,), or a pair of it and a `Certificate`

    Raises
    ------
    InputError
        A value is of the wrong type or shape, a row is empty or not concave, the minima exceed the
        budget, or sums of utilities could overflow.
    """
    if method not in ("auto", "heap", "threshold"):
        raise InputError(f"method: expected auto, heap or threshold, got {method!r:.60}")
    budget = gpus(budget)
    rows, values, lo = tables(ptr, value, minimum, budget)
    facts = np.zeros(3, np.int64)
    survey(rows, values, facts)
    n, spare = len(lo), min(budget - int(lo.sum()), len(values) - len(lo))
    largest = max(int(facts[1]), -int(facts[2]))
    if largest * (n + 1) >= 2**61 or largest * (max(spare, len(values)) + 1) >= 2**61:
        raise InputError(
            f"value: utilities up to {largest} of {n} jobs and {spare} GPUs could overflow 63 "
            "bits; divide them all by a common factor"
        )
    if facts[0]:
        raise InputError(_not_concave(rows, values, lo))
    taken = np.zeros(n, np.int64)
    heap = method == "heap" or (method == "auto" and spare <= max(n, _FEW))
    (by_heap if heap else by_price)(rows, values, spare, taken)
    if not certificate:
        return lo + taken
    proof = np.zeros(3, np.int64)
    holds = dual_bound(rows, values, spare, taken, proof)
    price = float(proof[2])
    return lo + taken, Certificate(
        "sum of utilities", int(proof[0]), int(proof[1]), price, bool(holds), "dual bound"
    )


def _not_concave(rows: IntArray, values: IntArray, lo: IntArray) -> str:
    """Names the first increment that grows."""
    for j in range(len(lo)):
        row = values[rows[j] : rows[j + 1]]
        for k in np.flatnonzero(np.diff(row, 2) > 0)[:1]:
            g = int(lo[j] + k)
            return (
                f"job {j}: utilities {row[k]}, {row[k + 1]}, {row[k + 2]} at {g}, {g + 1}, {g + 2} "
                "GPUs are not concave; use `choice`"
            )
    raise AssertionError("every row is concave")
