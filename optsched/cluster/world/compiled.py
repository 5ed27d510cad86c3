"""A policy made of one function: compiled by numba, it runs whole simulations without Python."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numba
import numpy as np

from optsched.cluster.world.advance import attained_now
from optsched.cluster.world.apply import apply
from optsched.cluster.world.build import frozen, grown, log_of, stalled, too_late, world
from optsched.cluster.world.columns import turn
from optsched.cluster.world.enact import failed, refused
from optsched.cluster.world.errors import PolicyError
from optsched.cluster.world.layout import ASK, LEGAL, NO_ROOM, STALLED, TOO_LATE
from optsched.cluster.world.policy import Decision
from optsched.cluster.world.progress import MOST_VAIN, Progress
from optsched.errors import InputError
from optsched.io.values import boolean, format_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView
    from optsched.cluster.world.settings import Settings

_LONGEST: Final = 200
"""Characters of what numba says."""
_WRONG_LENGTH: Final = -100
PAUSE: Final = -101
"""Answers of a loop, beside those of `turn`; `PAUSE` after `MOST_VAIN` decisions."""


class CompiledView(NamedTuple):
    """The columns of a `ClusterView` that a compiled policy sees, under the same names."""

    time: Any
    job: Any
    gpus: Any
    done: Any
    remaining: Any
    running: Any
    at_pass_end: Any
    submit: Any
    attained: Any
    passes: Any
    size_ptr: Any
    size: Any
    rate: Any
    priority: Any
    weight: Any
    group: Any
    preemptible: Any
    free: Any
    capacity: Any


class _Given(NamedTuple):
    """What never changes of the jobs of a workload, beside what the world knows."""

    priority: Any
    weight: Any
    group: Any
    preemptible: Any


class compiled:
    """Decorator: a function of a view that returns GPUs a job becomes a policy, compiled by numba.

    The function sees the columns of `CompiledView` and returns one integer for every active job, as
    `Decision.quota`. It is plain Python that numba takes (loops are fast), and pure. Tasks without
    GPUs and contention make the simulator ask it in Python, with a `ClusterView`.

    Parameters
    ----------
    function
        The rule; its name is the policy's, `_` for spaces.
    clairvoyant
        Whether `remaining` is the true one.

    Raises
    ------
    InputError
        It is no function; and, when it first runs, numba cannot compile it.
    """

    options: tuple[str, ...] = ()

    def __new__(cls, function: Any = None, /, *, clairvoyant: bool = False) -> Any:
        """The policy; without a function, the decorator with this option."""
        if function is None:
            return lambda given: cls(given, clairvoyant=clairvoyant)
        return super().__new__(cls)

    def __init__(self, function: Callable[[Any], Any], /, *, clairvoyant: bool = False) -> None:
        if not callable(function) or not hasattr(function, "__code__"):
            raise InputError(f"compiled: expected a function, got {format_value(function)}")
        self.function, self.name = function, function.__name__
        self.__module__ = function.__module__
        self.clairvoyant = boolean("clairvoyant", clairvoyant)
        self._loop: Any = None
        self._compiled: Any = None

    def decide(self, view: ClusterView) -> Decision:
        """The same function, run by Python; tasks without GPUs run as there are units."""
        quota = np.asarray(self.function(view))
        none = np.diff(view.size_ptr) == 0
        return Decision(np.where(none, -1, quota), best_effort=bool(none.any()))

    def __reduce__(self) -> str:
        return self.function.__qualname__  # by name, as a function

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation; None where the function is to be asked by Python."""
        if settings.contention is not None or settings.timing != "event":
            return None
        if bool((workload.size == 0).any()):
            return None
        given = _Given(*(frozen(getattr(workload, name)[:]) for name in _Given._fields))
        if self._loop is None:
            self._compiled = numba.njit(self.function)
            self._loop = _loop_of(self._compiled)

        def loop(w: World) -> Any:
            try:
                status = self._loop(w, given, int(self.clairvoyant))
            except numba.core.errors.NumbaError as error:
                raise InputError(
                    f"policy {self.name}: numba cannot compile it: {_reason(error)}"
                ) from error
            except Exception as error:
                raise failed(w, self.name, error) from error
            kind = getattr(self._compiled.nopython_signatures[0].return_type, "dtype", None)
            if not isinstance(kind, numba.types.Integer):
                raise PolicyError(
                    f"policy {format_value(self.name)}: quota: expected a row of integers, "
                    f"got one of {kind}"
                )
            if status == _WRONG_LENGTH:
                raise PolicyError(
                    f"policy {format_value(self.name)} at time {w.state['time'][0]}: quota: "
                    f"expected {w.state['active'][0]} numbers, one per active job"
                )
            return status

        return run(loop, world(workload, nodes, settings), workload, self.name)


def _reason(error: Exception) -> str:
    """What numba says of the function, and where, without the types of all columns."""
    text = re.sub(r"(CompiledView)\((?:[^()]|\([^()]*\))*\)", r"\1", str(error))
    lines = [line.strip() for line in text.splitlines()]
    about = [line for line in lines if line and not line.startswith("Failed in")]
    place = next((f" ({line.rstrip(':')})" for line in about if line.startswith("File ")), "")
    return f"{about[0][:_LONGEST]}{place}"


def run(loop: Callable[[World], Any], w: World, workload: Workload, name: str) -> Log:
    """Call a compiled loop until all jobs have ended.

    Raises
    ------
    PolicyError, Stalled, InputError
        As the generic engine does.
    """
    progress, asked, status = Progress(), 0, NO_ROOM
    while status in (NO_ROOM, PAUSE):
        if status == PAUSE:
            asked += MOST_VAIN
            progress.check(w, asked, name)
        status = loop(w)
        if status == NO_ROOM:
            w = grown(w)
    if status < 0:
        raise refused(w, workload, name, -status)
    if status == STALLED:
        raise stalled(w, workload, name)
    if status == TOO_LATE:
        raise too_late(w, workload, name)
    return log_of(w)


def _loop_of(decide: Any) -> Any:
    """The compiled simulation of a compiled function."""
    see = numba.njit(_see)

    def loop(w, given, clairvoyant):  # type: ignore[no-untyped-def]
        for _ in range(MOST_VAIN):
            status = turn(w, 0, clairvoyant)
            if status != ASK:
                return status
            n = w.state[0].active
            quota = decide(see(w, given))
            if len(quota) != n:
                return _WRONG_LENGTH
            w.quota[:n] = quota
            w.state[0].best_effort = 0
            rule = apply(w)
            if rule != LEGAL:
                return -rule
        return PAUSE

    return numba.njit(loop)


def _see(w, given):  # type: ignore[no-untyped-def]
    """The view of the present instant."""
    n = w.state[0].active
    job = w.active[:n].copy()
    present = w.present
    submit, attained, passes = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    ptr = np.zeros(n + 1, np.int64)
    for i in range(n):
        j = job[i]
        submit[i], attained[i] = w.given[j].submit, attained_now(w, j)
        passes[i] = w.job[j].passes
        ptr[i + 1] = ptr[i] + w.given[j].end_size - w.given[j].first_size
    size, rate = np.empty(ptr[n], np.int64), np.empty(ptr[n], np.int64)
    for i in range(n):
        first = w.given[job[i]].first_size
        for k in range(ptr[i + 1] - ptr[i]):
            size[ptr[i] + k], rate[ptr[i] + k] = w.size[first + k], w.rate[first + k]
    takes = w.node[:].takes
    return CompiledView(
        w.state[0].time, job, present[1, :n].copy(), present[2, :n].copy(), present[3, :n].copy(),
        present[4, :n] != 0, present[5, :n] != 0, submit, attained, passes, ptr, size, rate,
        given.priority[job], given.weight[job], given.group[job], given.preemptible[job],
        w.node[:].free * takes, w.node[:].capacity * takes,
    )  # fmt: skip
