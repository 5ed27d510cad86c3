"""Exceptions that optsched raises on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class OptschedError(Exception):
    """Base of all errors that optsched raises on purpose.

    Examples
    --------
    >>> issubclass(optsched.Infeasible, optsched.OptschedError)
    True
    """


class InputError(OptschedError, ValueError):
    """A document, a file or an argument is wrong; the message names the place and the value.

    Examples
    --------
    >>> optsched.JobShop([[(0, -3)]])
    Traceback (most recent call last):
    optsched.errors.InputError: jobs[0][0]: duration: expected an integer in 0..2^53, got -3
    """


class Infeasible(OptschedError):
    """A correct request cannot be satisfied, such as one for more GPUs than are free.

    Examples
    --------
    >>> from optsched.bandwidth import BottleneckBandwidth, ClusterState, synthetic
    >>> cluster = synthetic.cluster("nvswitch", 1)
    >>> optsched.GpuPlacement(ClusterState.idle(cluster), BottleneckBandwidth(cluster), 9)
    Traceback (most recent call last):
    optsched.errors.Infeasible: gpus: requested 9, free 8 on 1 host
    """


class CyclicOrder(InputError):
    """The given orders contradict the arcs, or the arcs each other.

    ``cycle`` has the operations on one cycle; each must precede the next, the last the first.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> try:
    ...     optsched.Schedule.from_orders(shop, [[3, 0], [1, 2]])
    ... except optsched.CyclicOrder as error:
    ...     print(error.cycle)
    (0, 1, 2, 3)
    """

    def __init__(self, message: str, cycle: Sequence[int]) -> None:
        super().__init__(message)
        self.cycle = tuple(int(i) for i in cycle)


class UnsupportedProblem(OptschedError):
    """The chosen solver cannot solve this problem; the message names those that can.

    Examples
    --------
    >>> array = optsched.JobArray([[1]], [[1]], objective="period")
    >>> optsched.solve(array, "branch_and_bound")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    optsched.errors.UnsupportedProblem: branch_and_bound does not solve this problem: ...
    """


class MissingExtra(OptschedError, ImportError):
    """An optional dependency is not installed; the message gives the command.

    Examples
    --------
    >>> print(optsched.MissingExtra("training", "torch"))
    training needs the extra torch: pip install ".[torch]" in a checkout of optsched
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f'{what} needs the extra {extra}: pip install ".[{extra}]" in a checkout of optsched'
        )
        self.extra = extra


class InternalError(OptschedError):
    """A solver returned a wrong result: a bug, never an error of the caller.

    Examples
    --------
    >>> monitor = optsched.Monitor(optsched.Limits(time_limit=1))
    >>> monitor.incumbent(optsched.Csr.of([[0]]), 10)
    True
    >>> monitor.bound(11, "my solver")
    Traceback (most recent call last):
    optsched.errors.InternalError: my solver proved the bound 11, but a schedule of 10 exists
    """
