"""What a compiled rule sees: the columns of a `ClusterView` that its code names, and no others."""

from __future__ import annotations

from collections import namedtuple
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.world.columns import PRESENT
from optsched.cluster.world.layout import WORLD
from optsched.kernels.compile import INT, READ, Dispatcher, helper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings

FLOATS: Final = types.Array(types.float64, 1, "C", readonly=True)
FLAGS: Final = types.Array(types.boolean, 1, "C", readonly=True)


class Given(NamedTuple):
    """Columns of a workload, by number of the job."""

    submit: Any
    pass_work: Any
    priority: Any
    weight: Any
    group: Any
    template: Any
    preemptible: Any
    restart_cost: Any
    size_ptr: Any
    size: Any
    rate: Any
    observed_ptr: Any
    observed: Any


_BITS: Final = ("running", "at_pass_end")
_KINDS: Final = {"weight": FLOATS, "observed": FLOATS, "preemptible": FLAGS}
GIVEN: Final[Any] = types.NamedTuple([_KINDS.get(name, READ) for name in Given._fields], Given)


def given(workload: Workload, settings: Settings) -> Given:
    """Columns of a workload as kernels take them."""
    made = {name: np.ascontiguousarray(getattr(workload, name)[:]) for name in Given._fields}
    cost = workload.restart_cost
    made["restart_cost"] = np.where(cost < 0, settings.restart_cost, cost)
    for column in made.values():
        column.setflags(write=False)
    return Given(**made)


_COLUMNS: Final[dict[str, str]] = {
    "time": "w.state[0].time",
    "job": "w.active[:w.state[0].active]",
    **{
        name: f"w.present[{row}, :w.state[0].active]" + " != 0" * (name in _BITS)
        for row, name in enumerate(PRESENT)
    },
    **{
        name: f"of_jobs(w, given.{name})"
        for name in Given._fields
        if name not in ("size_ptr", "size", "rate", "observed_ptr", "observed")
    },
    "size_ptr": "sized[0]",
    "size": "sized[1]",
    "rate": "sized[2]",
    "observed_ptr": "seen[0]",
    "observed": "seen[1]",
    "free": "of_nodes(w, 0)",
    "capacity": "of_nodes(w, 1)",
    "zero_free": "of_nodes(w, 2)",
    "node_type": "node_type(w)",
    "draining": "draining(w)",
    "held_ptr": "holds[0]",
    "held_node": "holds[1]",
    "held_count": "holds[2]",
}  # fmt: skip
"""How a compiled rule's columns are made."""

_TABLES: Final = {
    "sized": "sizes(w, given)", "seen": "observed(w, given)", "holds": "held(w)",
}  # fmt: skip
"""Tables of several columns, each made once."""


def columns_of(rule: Any) -> tuple[str, ...]:
    """The columns that a function and the functions that it calls name, in a fixed order."""
    found = set(_names(rule, set()))
    return tuple(name for name in _COLUMNS if name in found)


def _names(function: Any, seen: set[Any]) -> Iterator[str]:
    """Names in the code of a function and of all functions that it can call."""
    function = getattr(function, "py_func", function)
    if not isinstance(function, FunctionType) or function in seen:
        return
    seen.add(function)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    known = dict(zip(function.__code__.co_freevars, cells, strict=True))
    names = set(_code_names(function.__code__))
    yield from names
    for name in names:
        value = known.get(name, function.__globals__.get(name))
        if isinstance(value, ModuleType):
            inside = (getattr(value, other, None) for other in names)
            for one in inside:
                if isinstance(one, Dispatcher):
                    yield from _names(one, seen)
        else:
            yield from _names(value, seen)


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names + code.co_freevars
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code_names(value)


def viewer_of(columns: tuple[str, ...]) -> Any:
    """A helper ``see(w, given)`` that returns a named tuple of these columns, arrays read-only."""
    view = namedtuple("View", columns)  # type: ignore[misc]  # noqa: PYI024
    kinds: list[Any] = [_KINDS.get(name, READ) for name in columns]
    for k, name in enumerate(columns):
        if name == "time":
            kinds[k] = INT
        elif name in (*_BITS, "draining"):
            kinds[k] = FLAGS
    known: dict[str, Any] = {
        "view": view, "of_jobs": _of_jobs, "of_nodes": _of_nodes, "sizes": _sizes,
        "observed": _observed, "held": _held, "node_type": _node_type, "draining": draining_now,
    }  # fmt: skip
    values = ", ".join(_COLUMNS[name] for name in columns)
    tables = [
        f"    {name} = {source}\n" for name, source in _TABLES.items() if f"{name}[" in values
    ]
    source = (
        f"def pack({', '.join(columns)}):\n    return view({', '.join(columns)})\n"
        f"def see(w, given):\n{''.join(tables)}    return pack({values})\n"
    )
    exec(source, known)
    # machine code of several rules is loaded into one process, where names have to be distinct
    for name in ("pack", "see"):
        known[name].__module__, known[name].__qualname__ = __name__, "_".join((name, *columns))
    kind: Any = types.BaseTuple.from_types(tuple(kinds), view)
    known["pack"] = helper(kind, *kinds)(known["pack"])
    return helper(kind, WORLD, GIVEN)(known["see"])


@helper()
def _of_jobs(w, values):  # type: ignore[no-untyped-def]
    """Values of the active jobs."""
    out = np.empty(w.state[0].active, values.dtype)
    for i in range(len(out)):
        out[i] = values[w.active[i]]
    return out


@helper()
def _of_nodes(w, which):  # type: ignore[no-untyped-def]
    """Free GPUs, all GPUs or free zero-slot units of every node that takes work, else 0."""
    out = np.zeros(len(w.node), np.int64)
    for n in range(len(out)):
        node = w.node[n]
        if node.takes == 1:
            out[n] = node.free
            if which == 1:
                out[n] = node.capacity
            elif which == 2:
                out[n] = node.free_units
    return out


@helper()
def _sizes(w, given):  # type: ignore[no-untyped-def]
    """Sizes and rates of the active jobs, in CSR form; empty rows for zero-slot tasks."""
    n = w.state[0].active
    ptr = np.zeros(n + 1, np.int64)
    for i in range(n):
        j = w.active[i]
        first = given.size_ptr[j]
        ptr[i + 1] = ptr[i]
        if given.size[first] > 0:
            ptr[i + 1] += given.size_ptr[j + 1] - first
    size, rate = np.empty(ptr[n], np.int64), np.empty(ptr[n], np.int64)
    for i in range(n):
        first = given.size_ptr[w.active[i]] - ptr[i]
        for k in range(ptr[i], ptr[i + 1]):
            size[k], rate[k] = given.size[first + k], given.rate[first + k]
    return ptr, size, rate


@helper()
def _observed(w, given):  # type: ignore[no-untyped-def]
    """Uncertainty after every completed pass of the active jobs, in CSR form."""
    n = w.state[0].active
    ptr = np.zeros(n + 1, np.int64)
    for i in range(n):
        j = w.active[i]
        known = given.observed_ptr[j + 1] - given.observed_ptr[j]
        ptr[i + 1] = ptr[i] + min(known, w.job[j].passes)
    values = np.empty(ptr[n], np.float64)
    for i in range(n):
        first = given.observed_ptr[w.active[i]] - ptr[i]
        for k in range(ptr[i], ptr[i + 1]):
            values[k] = given.observed[first + k]
    return ptr, values


@helper()
def _held(w):  # type: ignore[no-untyped-def]
    """Nodes and GPUs of the active jobs, in CSR form."""
    n, total = w.state[0].active, 0
    ptr = np.zeros(n + 1, np.int64)
    node, count = np.empty(len(w.named), np.int64), np.empty(len(w.named), np.int64)
    for i in range(n):
        if w.assigned[i] < 0:
            node[total], count[total] = w.job[w.active[i]].unit, 0
            total += 1
        elif w.assigned[i] > 0:
            row = w.job[w.active[i]].row
            for k in range(w.log[row].first, w.log[row].end_node):
                node[total], count[total] = w.log_node[k, 0], w.log_node[k, 1]
                total += 1
        ptr[i + 1] = total
    return ptr, node[:total], count[:total]


@helper()
def draining_now(w):  # type: ignore[no-untyped-def]
    """Whether the active jobs hold GPUs of a node that takes no work; empty if no job does."""
    closed = 0
    for n in range(w.node.shape[0]):
        closed += 1 - w.node[n].takes
    out = np.zeros(w.state[0].active if closed > 0 else 0, np.bool_)
    for i in range(len(out)):
        if w.assigned[i] > 0:
            row = w.job[w.active[i]].row
            for k in range(w.log[row].first, w.log[row].end_node):
                out[i] = out[i] or w.node[w.log_node[k, 0]].takes == 0
    return out


@helper()
def _node_type(w):  # type: ignore[no-untyped-def]
    """Type of GPU of every node; empty if all are alike."""
    out = np.empty(w.supply.shape[0], np.int64)
    for i in range(len(out)):
        out[i] = w.supply[i, 0] - 1
    return out
