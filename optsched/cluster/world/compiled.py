"""A policy made of one rule: run by Python at every decision, or compiled for whole simulations.

A rule is a function ``rule(view, *arguments)`` of the columns of a `ClusterView`. It returns GPUs
for every active job, or a `Choice`. A bare function becomes a policy by the decorator `compiled`;
a class with options derives from `RulePolicy`::

    class Shortest(RulePolicy):
        name, options = "shortest", ("most",)

        def __init__(self, *, most: int = 8) -> None:
            self.most = most

        def arguments(self, workload, nodes, settings):
            return (self.most, workload.size[workload.size_ptr[:-1]])   # numbers, arrays

        @staticmethod
        def rule(view, most, smallest):
            quota, free = view.gpus.copy(), view.free.sum()
            for i in np.argsort(view.remaining, kind="mergesort"):
                size = smallest[view.job[i]]
                if not view.running[i] and size <= min(free, most):
                    quota[i], free = size, free - size
            return quota
"""

from __future__ import annotations

import re
import traceback
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numba
import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload

from optsched.cluster.world.apply import turn
from optsched.cluster.world.build import grown, log_of, stalled, too_late, world
from optsched.cluster.world.enact import failed, refused
from optsched.cluster.world.engine import simulate_generic
from optsched.cluster.world.errors import PolicyError
from optsched.cluster.world.layout import DECIDE, LOG_FULL, PRESENT, STALLED, TOO_LATE
from optsched.cluster.world.pointers import at
from optsched.cluster.world.policy import Decision
from optsched.cluster.world.progress import MOST_VAIN, Progress
from optsched.cluster.world.rule_view import columns_of, viewer_of
from optsched.errors import InputError
from optsched.io.values import boolean, format_value
from optsched.kernels.compile import INT, content_of, entry, helper

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView
    from optsched.cluster.world.settings import Settings

_LONGEST: Final = 200
"""Characters of an error message of numba."""
PAUSE: Final = -100
"""After `MOST_VAIN` decisions: see whether the policy makes progress, and call again."""
_LENGTH: Final = -101
_ORDER: Final = -102
_WAKE: Final = -103
_SHARE: Final = -104
_WRONG: Final = {
    _LENGTH: "quota: expected {} numbers, one per active job",
    _ORDER: "order: expected at most {} positions",
    _SHARE: "share: expected {} positions or none",
    _WAKE: "wake_at: expected a time after now, or 0",
}


_LEFT_OUT: Final = "give Choice all values before the last one that you give, () for no order"


class Choice(NamedTuple):
    """What a rule returns that says more than GPUs of every active job.

    Compiled code has no defaults: give all values before the last one, ``()`` for no order.
    """

    quota: Any
    """GPUs of every active job; 0: it does not run. Zero-slot tasks run whatever it says."""
    order: Any = ()
    """Positions in the order in which they are placed, others behind them; empty: by position."""
    wake_at: Any = 0
    """Decide again then at the latest; 0: at the next event."""
    share: Any = ()
    """Position of the job whose GPUs every job shares, -1: none; empty: no job does."""


class RulePolicy:
    """A policy made of one rule and its arguments; see the module for an example.

    `rule` is compiled by numba, from the columns that its code names: plain Python without objects,
    pure. What it calls with the view is a `helper`, which Python runs as it is; on numbers and
    arrays `numba.njit` does, too. Machine code is kept on disk by content.
    """

    name: str
    clairvoyant: bool = False
    """Whether `remaining` is the true one."""
    options: ClassVar[tuple[str, ...]] = ()
    types_in_python: ClassVar[bool] = False
    """On GPUs of several types `decide` does more than the rule: simulate by that."""
    rule: Callable[..., Any]

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """Numbers and arrays that the rule takes after the view, computed once for a simulation."""
        return ()

    def notes(self, workload: Workload, nodes: Nodes) -> tuple[str, ...]:
        """Sentences for `Run.notes`: whether the rule ignores types of GPUs."""
        if len(set(nodes.types)) < 2 or self.types_in_python:
            return ()
        if "node_type" in columns_of(self.rule):
            return ()
        return (
            f"{self.name} ignores GPU types: a job starts on the type that is fastest for it "
            "among those with enough free GPUs",
        )

    def decide(self, view: ClusterView) -> Decision:
        """Run the rule in Python."""
        known = self.__dict__.get("_known")
        if known is None or known[0] is not view.workload or known[1] is not view.settings:
            jobs = view.workload
            nodes: Any = view.nodes
            given = self.arguments(jobs, nodes, view.settings)
            none = jobs.size[jobs.size_ptr[:-1]] == 0
            known = view.workload, view.settings, given, none if none.any() else None
            self.__dict__["_known"] = known
        answer = self.rule(view, *known[2])
        choice = answer if isinstance(answer, Choice) else Choice(answer)
        quota = np.asarray(choice.quota)
        if known[3] is not None:
            quota = np.where(known[3][view.job], -1, quota)
        order = np.asarray(choice.order) if len(choice.order) else None
        if len(choice.share) not in (0, len(view.job)):
            message = _WRONG[_SHARE].format(len(view.job))
            raise PolicyError(f"policy {format_value(self.name)} at time {view.time}: {message}")
        share = {i: int(k) for i, k in enumerate(choice.share) if k >= 0}
        return Decision(quota, order=order, wake_at=choice.wake_at or None, share=share)

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log:
        """Run the whole simulation in compiled code."""
        if self.types_in_python and len(set(nodes.types)) > 1:
            return simulate_generic(workload, self, nodes, settings).log
        arguments = tuple(
            np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
            for value in self.arguments(workload, nodes, settings)
        )
        kinds = types.BaseTuple.from_types(tuple(map(numba.typeof, arguments)))
        columns, loop = _loop(self.rule, kinds)
        mask = sum(1 << k for k, name in enumerate(PRESENT) if name in columns)
        zero = int(bool((workload.size == 0).any()))

        def simulate(w: World) -> Any:
            if w.state["time"] < 0 or w.state["columns"] == 0:
                w.state["clairvoyant"] = int(self.clairvoyant)
                turn(w.address, mask)
            try:
                status = loop(_address(), w.address, zero, arguments)
            except numba.core.errors.NumbaError as error:
                raise _not_compiled(self.name, error) from error
            except Exception as error:
                if _leaves_out(error):
                    message = f"policy {self.name}: numba cannot compile it: {_LEFT_OUT}"
                    raise InputError(message) from error
                raise failed(w, self.name, error) from error
            if status in _WRONG:
                text = _WRONG[status].format(w.state["active"][0])
                at = f"policy {format_value(self.name)} at time {w.state['time'][0]}"
                raise PolicyError(f"{at}: {text}")
            return status

        start = world(workload, nodes, settings, getattr(self, "table", None))
        return run(simulate, start, workload, self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_known"}


class compiled(RulePolicy):
    """Decorator: a function of a view becomes a policy, compiled by numba.

    Parameters
    ----------
    function
        The rule; its name is the policy's.
    clairvoyant
        Whether `remaining` is the true one.

    Raises
    ------
    InputError
        It is no function; and, when it first runs, numba cannot compile it.
    """

    def __new__(cls, function: Any = None, /, *, clairvoyant: bool = False) -> Any:
        """The policy; without a function, the decorator with this option."""
        if function is None:
            return lambda given: cls(given, clairvoyant=clairvoyant)
        return super().__new__(cls)

    def __init__(self, function: Callable[[Any], Any], /, *, clairvoyant: bool = False) -> None:
        if not callable(function) or not hasattr(function, "__code__"):
            raise InputError(f"compiled: expected a function, got {format_value(function)}")
        self.rule, self.name = function, function.__name__
        self.__module__ = function.__module__
        self.clairvoyant = boolean("clairvoyant", clairvoyant)

    def __reduce__(self) -> str:
        return self.rule.__qualname__  # by name, as a function


def run(loop: Callable[[World], Any], w: World, workload: Workload, name: str) -> Log:
    """Call a compiled loop until all jobs have ended.

    Raises
    ------
    PolicyError, Stalled, InputError
        As the generic engine does.
    """
    progress, decisions, status = Progress(), 0, LOG_FULL
    while status in (LOG_FULL, PAUSE):
        if status == PAUSE:
            decisions += MOST_VAIN
            progress.check(w, decisions, name)
        status = loop(w)
        if status == LOG_FULL:
            w = grown(w)
    if status < 0:
        raise refused(w, workload, name, -status)
    if status == STALLED:
        raise stalled(w, workload, name)
    if status == TOO_LATE:
        raise too_late(w, workload, name)
    return log_of(w)


def _not_compiled(name: str, error: Exception) -> InputError:
    """The exception for a rule that numba cannot compile: reason and place, without types."""
    text = re.sub(r"View\((?:[^()]|\([^()]*\))*\)", "View", str(error))
    if found := re.search(r"(quota|order|wake_at|share): expected[^\n]*", text):
        return PolicyError(f"policy {format_value(name)}: {found[0]}")
    lines = [line.strip() for line in text.splitlines()]
    about = [line for line in lines if line and not line.startswith("Failed in")]
    place = next((f" ({line.rstrip(':')})" for line in about if line.startswith("File ")), "")
    return InputError(f"policy {name}: numba cannot compile it: {about[0][:_LONGEST]}{place}")


def _leaves_out(error: Exception) -> bool:
    """Whether numba met a `Choice` that leaves out a value before one that it gives."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, AssertionError) and "numba" in place.filename


@cache
def _address() -> int:
    """Address of the machine code of `turn`, so that no loop compiles it again."""
    kernel: Any = turn
    kernel.prepare()
    made = kernel.overloads[tuple(kernel.declared.args)]
    address: int = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
    return address


@intrinsic
def _call(_typing, turn, world):  # type: ignore[no-untyped-def]
    """Call `turn` by its address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        convention: Any = context.call_conv
        kind = convention.get_function_type(INT, [INT, INT])
        pointer = builder.inttoptr(arguments[0], kind.as_pointer())
        values = [arguments[1], context.get_constant(INT, 0)]
        return convention.call_function(builder, pointer, INT, [INT, INT], values)[1]

    return INT(INT, INT), generate


def _choice(answer: Any) -> Any:
    """The answer of a rule as a `Choice`; compiled code takes the overload below."""
    raise NotImplementedError


@overload(_choice)
def _choice_of(answer):  # type: ignore[no-untyped-def]
    # numba does not fill in defaults of named tuples: a short one has what was given
    parts = answer.types if getattr(answer, "instance_class", None) is Choice else ()
    values = ["answer[0]" if parts else "answer"]
    _check_row("quota", parts[0] if parts else answer)
    for k, name in enumerate(Choice._fields[1:], 1):
        if len(parts) <= k or parts[k] == types.Tuple(()):
            values.append("0" if name == "wake_at" else "empty(0, int64)")
            continue
        if name != "wake_at":
            _check_row(name, parts[k])
        elif not isinstance(parts[k], types.Integer):
            raise TypingError(f"{name}: expected a time as an integer, or 0, got {parts[k]}")
        values.append(f"answer[{k}]")
    known = {"Choice": Choice, "empty": np.empty, "int64": np.int64}
    exec(f"def choice(answer):\n    return Choice({', '.join(values)})", known)
    return known["choice"]


def _check_row(name: str, row: Any) -> None:
    """Refuse what is no array of integers: a list, a tuple or floats would be read wrongly."""
    kind = getattr(row, "dtype", None)
    if not isinstance(row, types.Array) or row.ndim != 1 or not isinstance(kind, types.Integer):
        raise TypingError(f"{name}: expected a row of integers, got one of {kind or row}")


@helper()
def _write(w, choice, zero):  # type: ignore[no-untyped-def]
    """Write a choice into the world: the next `turn` applies it."""
    s, n = w.state, w.state.active
    if len(choice.quota) != n:
        return _LENGTH
    if len(choice.order) > n:
        return _ORDER
    if len(choice.share) > 0 and len(choice.share) != n:
        return _SHARE
    s.sharing = 1 if len(choice.share) > 0 else 0
    for i in range(len(choice.share)):
        w.share[i] = choice.share[i]
    for i in range(n):
        w.quota[i] = choice.quota[i]
        if zero == 1 and w.size[w.given[w.active[i]].first_size] == 0:
            w.quota[i] = -1
    for k in range(len(choice.order)):
        w.order[k] = choice.order[k]
    if choice.wake_at != 0:
        if choice.wake_at <= s.time:
            return _WAKE
        s.wake = choice.wake_at
    s.decided, s.ordered = 1, len(choice.order)
    return DECIDE


def _named_by_content(rule: Any) -> Any:
    """A copy of a rule: machine code from disk of two rules of one name must not be mixed up."""
    copy = FunctionType(rule.__code__, rule.__globals__, closure=rule.__closure__)
    copy.__module__ = rule.__module__
    copy.__qualname__ = f"{rule.__qualname__}_{content_of(helper()(rule))}"
    return copy


@cache
def _loop(rule: Any, arguments: Any) -> tuple[tuple[str, ...], Any]:
    """Columns of a rule, and the compiled simulation under it."""
    columns = columns_of(rule)
    see, decide = viewer_of(columns), helper()(_named_by_content(rule))

    def loop(turn, world, zero, arguments):  # type: ignore[no-untyped-def]
        w = at(world)
        for _ in range(MOST_VAIN):
            status = _call(turn, world)  # type: ignore[call-arg,var-annotated]
            if status != DECIDE:
                return status
            wrong = _write(w, _choice(decide(see(w), *arguments)), zero)
            if wrong != DECIDE:
                return wrong
        return PAUSE

    loop.__module__, loop.__name__ = rule.__module__, rule.__qualname__
    return columns, entry(INT, INT, INT, INT, arguments)(loop)
