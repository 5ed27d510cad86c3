"""What a compiled rule sees: the columns of a `ClusterView` that its code names, and no others."""

from __future__ import annotations

from collections import namedtuple
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import types

from optsched.cluster.world.layout import PRESENT
from optsched.cluster.world.pointers import WORLD, as_float, column
from optsched.kernels.compile import INT, READ, Dispatcher, helper

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOATS: Final = types.Array(types.float64, 1, "C", readonly=True)
FLAGS: Final = types.Array(types.boolean, 1, "C", readonly=True)
_KINDS: Final[dict[str, Any]] = {"time": INT, "weight": FLOATS, "observed": FLOATS} | dict.fromkeys(
    ("running", "at_pass_end", "preemptible", "draining"), FLAGS
)
"""Types of columns that are not integers."""

_VALUES: Final[dict[str, str]] = {
    name: f"given.{name}" for name in ("submit", "pass_work", "priority", "group", "template")
} | {
    "restart_cost": "given.cost", "weight": "as_float(given.weight)",
    "preemptible": "given.preemptible != 0",
    "running": f"w.present[{PRESENT.index('running')} * jobs + i] != 0",
    "at_pass_end": f"w.present[{PRESENT.index('at_pass_end')} * jobs + i] != 0",
}  # fmt: skip
"""Columns that are copied job by job."""

_COLUMNS: Final[dict[str, str]] = {
    "time": "w.state.time",
    "job": "column(w.active, 0, n)",
    **{name: f"column(w.present, {row} * jobs, n)" for row, name in enumerate(PRESENT)},
    **{name: name for name in _VALUES},
    "size_ptr": "sized[0]", "size": "sized[1]", "rate": "sized[2]",
    "observed_ptr": "seen[0]", "observed": "seen[1]",
    "free": "of_nodes(w, 0)", "capacity": "of_nodes(w, 1)", "zero_free": "of_nodes(w, 2)",
    "node_type": "of_nodes(w, 3)", "draining": "draining(w)",
    "finished": "column(w.finished, 0, jobs)",
    "held_ptr": "holds[0]", "held_node": "holds[1]", "held_count": "holds[2]",
}  # fmt: skip
"""How a compiled rule's columns are made."""

_TABLES: Final = {"sized": "sizes(w)", "seen": "observed(w)", "holds": "held(w)"}
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
        inside = [getattr(value, x, None) for x in names] if isinstance(value, ModuleType) else ()
        for found in (value, *(x for x in inside if isinstance(x, Dispatcher))):
            yield from _names(found, seen)


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names + code.co_freevars
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code_names(value)


def viewer_of(columns: tuple[str, ...]) -> Any:
    """A helper ``see(w)`` that returns a named tuple of these columns, arrays read-only."""
    view = namedtuple("View", columns)  # type: ignore[misc]  # noqa: PYI024
    kinds = [_KINDS.get(name, READ) for name in columns]
    known: dict[str, Any] = {
        "view": view, "column": column, "as_float": as_float, "of_nodes": _of_nodes,
        "sizes": _sizes, "observed": _observed, "held": _held, "draining": _draining,
        "integers": _integers, "floats": _floats, "flags": _flags,
    }  # fmt: skip
    values = ", ".join(_COLUMNS[name] for name in columns)
    lines = ["n, jobs = w.state.active, len(w.job)"]
    lines += [f"{name} = {made}" for name, made in _TABLES.items() if f"{name}[" in values]
    copied = [name for name in columns if name in _VALUES]
    makers: dict[Any, str] = {FLOATS: "floats", FLAGS: "flags"}
    lines += [f"{name} = {makers.get(_KINDS.get(name), 'integers')}(n)" for name in copied]
    if copied:
        lines += ["for i in range(n):", "    given = w.given[w.active[i]]"]
        lines += [f"    {name}[i] = {_VALUES[name]}" for name in copied]
    body = "".join(f"    {line}\n" for line in lines)
    exec(
        f"def pack({', '.join(columns)}):\n    return view({', '.join(columns)})\n"
        f"def see(w):\n{body}    return pack({values})\n", known,
    )  # fmt: skip
    # machine code of several rules is loaded into one process, where names have to be distinct
    for name in ("pack", "see"):
        known[name].__module__, known[name].__qualname__ = __name__, "_".join((name, *columns))
    kind: Any = types.BaseTuple.from_types(tuple(kinds), view)
    known["pack"] = helper(kind, *kinds)(known["pack"])
    return helper(kind, WORLD)(known["see"])


@helper()
def _integers(n):  # type: ignore[no-untyped-def]
    return np.empty(n, np.int64)


@helper()
def _floats(n):  # type: ignore[no-untyped-def]
    return np.empty(n, np.float64)


@helper()
def _flags(n):  # type: ignore[no-untyped-def]
    return np.empty(n, np.bool_)


@helper()
def _of_nodes(w, which):  # type: ignore[no-untyped-def]
    """Of every node that takes work, else 0: free GPUs, all GPUs or free zero-slot units.

    Or (3) the type of GPU of every node; empty if all are alike.
    """
    out = _integers(len(w.supply) if which == 3 else len(w.node))
    for n in range(len(out)):
        node = w.node[n]
        if which == 3:
            out[n] = w.supply[n].block - 1
        elif which == 2:
            out[n] = node.free_units * node.takes
        else:
            out[n] = (node.free if which == 0 else node.capacity) * node.takes
    return out


@helper()
def _sizes(w):  # type: ignore[no-untyped-def]
    """Sizes and rates of the active jobs, in CSR form; empty rows for zero-slot tasks."""
    n, total = w.state.active, 0
    ptr = _integers(n + 1)
    ptr[0] = 0
    for i in range(n):
        given = w.given[w.active[i]]
        if w.size[given.first_size] > 0:
            total += given.end_size - given.first_size
        ptr[i + 1] = total
    size, rate = _integers(total), _integers(total)
    for i in range(n):
        first = w.given[w.active[i]].first_size - ptr[i]
        for k in range(ptr[i], ptr[i + 1]):
            size[k], rate[k] = w.size[first + k], w.rate[first + k]
    return ptr, size, rate


@helper()
def _observed(w):  # type: ignore[no-untyped-def]
    """Uncertainty after every completed pass of the active jobs, in CSR form."""
    n, total = w.state.active, 0
    ptr = _integers(n + 1)
    ptr[0] = 0
    for i in range(n):
        given = w.given[w.active[i]]
        total += min(given.end_seen - given.first_seen, w.job[w.active[i]].passes)
        ptr[i + 1] = total
    values = _floats(total)
    for i in range(n):
        first = w.given[w.active[i]].first_seen - ptr[i]
        for k in range(ptr[i], ptr[i + 1]):
            values[k] = as_float(w.observed[first + k])  # type: ignore[call-arg]
    return ptr, values


@helper()
def _held(w):  # type: ignore[no-untyped-def]
    """Nodes and GPUs of the active jobs, in CSR form."""
    n, total = w.state.active, 0
    ptr, node, count = _integers(n + 1), _integers(len(w.named)), _integers(len(w.named))
    ptr[0] = 0
    for i in range(n):
        job = w.job[w.active[i]]
        if w.assigned[i] < 0:
            node[total], count[total] = job.unit, 0
            total += 1
        elif w.assigned[i] > 0:
            for k in range(w.log[job.row].first, w.log[job.row].end_node):
                node[total], count[total] = w.log_node[k].node, w.log_node[k].gpus
                total += 1
        ptr[i + 1] = total
    return ptr, node[:total], count[:total]


@helper()
def _draining(w):  # type: ignore[no-untyped-def]
    """Whether the active jobs hold GPUs of a node that takes no work."""
    out = _flags(w.state.active)
    for i in range(len(out)):
        out[i] = False
        if w.assigned[i] > 0:
            stay = w.log[w.job[w.active[i]].row]
            for k in range(stay.first, stay.end_node):
                out[i] = out[i] or w.node[w.log_node[k].node].takes == 0
    return out
