"""A policy made of one rule: run by Python at every decision, or compiled for whole simulations.

A rule is a function ``rule(view, *arguments)`` of the columns of a `ClusterView`. It returns GPUs
for every active job, or a `Choice`. A bare function becomes a policy by the decorator `compiled`;
a class with options derives from `RulePolicy`, see ``docs/clusters/write-a-policy.md``.
"""

from __future__ import annotations

import hashlib
import re
import traceback
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numba
import numpy as np
from numba import types
from numba.core.errors import NumbaError, TypingError
from numba.extending import intrinsic, overload

from optsched.cluster.world.apply import turn
from optsched.cluster.world.build import world
from optsched.cluster.world.enact import check_end, failed
from optsched.cluster.world.engine import MOST_VAIN, Progress, simulate_generic
from optsched.cluster.world.layout import DECIDE, LOG_FULL, PRESENT
from optsched.cluster.world.log import Log, grown, log_of
from optsched.cluster.world.pointers import at
from optsched.cluster.world.policy import Decision, PolicyError
from optsched.cluster.world.rule_view import columns_of, viewer_of
from optsched.errors import InputError
from optsched.io.values import boolean, format_value
from optsched.kernels.compile import INT, content_of, entry, helper

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.policy import ClusterView
    from optsched.cluster.world.settings import Settings

_LONGEST: Final = 200
"""Characters of an error message of numba."""
_PAUSE: Final = -100
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


class Choice(NamedTuple):
    """Return more than GPUs from a rule: an order, the next decision, shared GPUs.

    Compiled code has no defaults: give all values before the last one, ``()`` for no order.

    Examples
    --------
    >>> optsched.cluster.Choice([4, 0], (), 600).wake_at
    600
    """

    quota: Any
    """GPUs of every active job; 0: it does not run. Zero-slot tasks run whatever it says."""
    order: Any = ()
    """Positions in the order in which they are placed, others behind them; empty: by position."""
    wake_at: Any = 0
    """Decide again then at the latest; 0: at the next event."""
    share: Any = ()
    """Position of the job with which every job shares GPUs, -1: none; empty: no job does."""


class RulePolicy:
    """Make a policy of one rule and its arguments; see the module for one with arguments.

    `rule` is compiled by numba, from the columns that its code names: plain Python without objects,
    pure. What it calls with the view is a `helper`, which Python runs as it is; on numbers and
    arrays `numba.njit` does, too. Machine code is kept on disk by content.

    Examples
    --------
    >>> from optsched.cluster import Job, Nodes, RulePolicy, simulate
    >>> class Smallest(RulePolicy):
    ...     name = "smallest"
    ...
    ...     @staticmethod
    ...     def rule(view):
    ...         return view.size[view.size_ptr[:-1]]
    >>> jobs = [Job(name="a", sizes=(2, 4), work=4 * 10**8)]
    >>> simulate(jobs, Smallest(), Nodes(1), engine="generic").jct.tolist()
    [200]
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
            none = jobs.size[jobs.size_ptr[:-1]] == 0
            given = self.arguments(jobs, nodes, view.settings)
            known = jobs, view.settings, given, none if none.any() else None
            self.__dict__["_known"] = known
        answer = self.rule(view, *known[2])
        choice = answer if isinstance(answer, Choice) else Choice(answer)
        quota = np.asarray(choice.quota)
        if known[3] is not None:
            quota = np.where(known[3][view.job], -1, quota)
        if len(choice.share) not in (0, len(view.job)):
            raise _wrong(self.name, view.time, _SHARE, len(view.job))
        order = np.asarray(choice.order) if len(choice.order) else None
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
        columns, loop = _loop(self.rule, numba.typeof(arguments))
        w = world(workload, nodes, settings, getattr(self, "table", None))
        w.state["clairvoyant"] = int(self.clairvoyant)
        turn(w.address, sum(1 << k for k, name in enumerate(PRESENT) if name in columns))
        zero = int(bool((workload.size == 0).any()))
        progress, decisions, status = Progress(), 0, LOG_FULL
        while status in (LOG_FULL, _PAUSE):
            try:
                status = loop(_address(), w.address, zero, arguments)
            except (Exception, SystemExit) as error:
                raise self._broke(w, error) from error
            if status == LOG_FULL:
                w = grown(w)
            elif status == _PAUSE:
                decisions += MOST_VAIN
                progress.check(w, decisions, self.name)
            elif status in _WRONG:
                now, n = int(w.state["time"][0]), int(w.state["active"][0])
                raise _wrong(self.name, now, status, n)
        check_end(w, workload, self.name, status)
        return log_of(w)

    def _broke(self, w: World, error: BaseException) -> InputError:
        """The exception for a rule that raises, or that numba cannot compile."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, AssertionError) and "numba" in place.filename:
            about = "give Choice all values before the last one that you give, () for no order"
            return InputError(f"policy {self.name}: numba cannot compile it: {about}")
        if not isinstance(error, NumbaError):
            return failed(w, self.name, error)
        text = re.sub(r"\x1b\[\d*m", "", str(error))  # colors
        text = re.sub(r"View\((?:[^()]|\([^()]*\))*\)", "View", text)
        if found := re.search(r"(quota|order|wake_at|share): expected[^\n]*", text):
            return PolicyError(f"policy {format_value(self.name)}: {found[0]}")
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("Failed in")]
        at = next((f" ({line.rstrip(':')})" for line in lines if line.startswith("File ")), "")
        return InputError(f"policy {self.name}: numba cannot compile it: {lines[0][:_LONGEST]}{at}")

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_known"}


class compiled(RulePolicy):
    """Make a policy of a function of the view, compiled by numba; a decorator.

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

    Examples
    --------
    >>> from optsched.cluster import Job, Nodes, compiled, simulate
    >>> @compiled
    ... def smallest(view):
    ...     return view.size[view.size_ptr[:-1]]
    >>> jobs = [Job(name="a", sizes=(2, 4), work=4 * 10**8)]
    >>> simulate(jobs, smallest, Nodes(1), engine="generic").jct.tolist()
    [200]
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


def _wrong(policy: str, time: int, which: int, active: int) -> PolicyError:
    text = _WRONG[which].format(active)
    return PolicyError(f"policy {format_value(policy)} at time {time}: {text}")


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


def _write(w: Any, answer: Any, zero: Any) -> Any:
    """Write the answer of a rule into the world: the next `turn` applies it (compiled only)."""
    raise NotImplementedError


@overload(_write)
def _write_of(w, answer, zero):  # type: ignore[no-untyped-def]
    # numba does not fill in defaults of named tuples: a short one has what was given
    parts = answer.types if getattr(answer, "instance_class", None) is Choice else (answer,)
    lines, known = [], dict(zip(Choice._fields, _WRITERS, strict=True), __name__=__name__)
    for k, (name, part) in enumerate(zip(Choice._fields, parts, strict=False)):
        if name != "quota" and part == types.Tuple(()):
            continue
        if name == "wake_at":
            if not isinstance(part, types.Integer):
                raise TypingError(f"{name}: expected a time as an integer, or 0, got {part}")
        elif getattr(part, "ndim", 0) != 1 or not isinstance(part.dtype, types.Integer):
            kind = getattr(part, "dtype", None) or part
            raise TypingError(f"{name}: expected a row of integers, got one of {kind}")
        value = "answer" if part is answer else f"answer[{k}]"
        lines.append(f"    wrong = wrong or {name}(w, {value}{', zero' * (name == 'quota')})\n")
    exec(f"def write(w, answer, zero):\n    wrong = 0\n{''.join(lines)}    return wrong", known)
    return known["write"]


@helper()
def _write_quota(w, quota, zero):  # type: ignore[no-untyped-def]
    s, n = w.state, w.state.active
    s.decided, s.ordered, s.sharing = 1, 0, 0
    if len(quota) != n:
        return _LENGTH
    for i in range(n):
        w.quota[i] = quota[i]
        if zero == 1 and w.size[w.given[w.active[i]].first_size] == 0:
            w.quota[i] = -1
    return 0


@helper()
def _write_order(w, order):  # type: ignore[no-untyped-def]
    if len(order) > w.state.active:
        return _ORDER
    w.state.ordered = len(order)
    for k in range(len(order)):
        w.order[k] = order[k]
    return 0


@helper()
def _write_wake(w, time):  # type: ignore[no-untyped-def]
    if time != 0:
        w.state.wake = time
    return _WAKE if time != 0 and time <= w.state.time else 0


@helper()
def _write_share(w, share):  # type: ignore[no-untyped-def]
    if len(share) > 0 and len(share) != w.state.active:
        return _SHARE
    w.state.sharing = 1 if len(share) > 0 else 0
    for i in range(len(share)):
        w.share[i] = share[i]
    return 0


_WRITERS: Final = (_write_quota, _write_order, _write_wake, _write_share)


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
            wrong = _write(w, decide(see(w), *arguments), zero)
            if wrong != 0:
                return wrong
        return _PAUSE

    loop.__module__, loop.__name__ = rule.__module__, rule.__qualname__
    # a rule of the same name in another script, or with other arguments, is another file on disk
    made_of = f"{Path(rule.__code__.co_filename).name} {arguments}"
    loop.__qualname__ = f"{loop.__name__}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"
    return columns, entry(INT, INT, INT, INT, arguments)(loop)
