"""The types of a `World` in kernels: pointers to integers.

Arrays of numba in their place took half of the time of compiling. A world points to `World.table`,
an array of it to its pair there, a row to its first integer.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any, Final

from llvmlite.ir import ArrayType, DoubleType, IntType
from numba import types
from numba.core.cgutils import pointer_add
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.imputils import lower_builtin, lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_getattr,
    infer_global,
)
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from optsched.cluster.world.layout import ARRAYS
from optsched.kernels.compile import INT, READ


class _World(types.Opaque):
    """A `World` in kernels."""


class _Array(types.Opaque):
    """An array of a world: ``w.job[j]`` is a row, ``w.size[k]`` an integer."""


class _Row(types.Opaque):
    """A row of records: ``row.gpus`` is an integer, read or written."""


WORLD: Final = _World(f"World{hashlib.sha256(repr(ARRAYS).encode()).hexdigest()[:16]}")
_NAMES: Final = tuple(ARRAYS)
_ARRAY: Final = {name: _Array(name) for name in _NAMES}
_ROW: Final = {name: _Row(f"{name} row") for name, columns in ARRAYS.items() if columns}
_COLUMNS: Final = {_ROW[name].name: columns for name, columns in ARRAYS.items() if columns}
_WORD: Final = IntType(64)
for _kind in (_World, _Array, _Row):
    register_default(_kind)(models.OpaqueModel)


def _at(_typing, address):  # type: ignore[no-untyped-def]
    """The world with its table at this address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(WORLD))

    return WORLD(INT), generate


at: Final[Any] = intrinsic(_at)


@intrinsic
def column(_typing, array, first, length):  # type: ignore[no-untyped-def]
    """So many integers of a world's array of bare integers, from the first on, as an array."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        made = make_array(READ)(context, builder)
        start = builder.gep(_base(builder, arguments[0], 1), [arguments[1]])
        data = builder.bitcast(start, made.data.type)
        eight = _WORD(8)
        populate_array(made, data=data, shape=[arguments[2]], strides=[eight], itemsize=eight,
                       meminfo=None)  # fmt: skip
        return made._getvalue()

    return READ(array, INT, INT), generate


@intrinsic
def as_float(_typing, integer):  # type: ignore[no-untyped-def]
    """The float with the bits of this integer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], DoubleType())

    return types.float64(INT), generate


@infer_getattr
class _OfWorld(AttributeTemplate):
    key = _World

    def generic_resolve(self, _world: Any, name: str) -> Any:  # type: ignore[override]
        return _ROW[name] if name == "state" else _ARRAY.get(name)


@infer_getattr
class _OfRow(AttributeTemplate):
    key = _Row

    def generic_resolve(self, row: Any, name: str) -> Any:  # type: ignore[override]
        return INT if name in _COLUMNS[row.name] else None


class _OfArray(AbstractTemplate):
    """Types of ``array[k]``, ``array[k] = value`` and ``len(array)``."""

    metadata = {"target": "cpu"}  # noqa: RUF012 (before the many templates of numba)

    def generic(self, given: Any, _keywords: Any) -> Any:
        if not isinstance(given[0], _Array):
            return None
        name, integers = given[0].name, (given[0], *[INT] * (len(given) - 1))
        if len(given) == 3:
            return None if ARRAYS[name] else types.void(*integers)
        return (_ROW[name] if ARRAYS[name] and len(given) == 2 else INT)(*integers)


for _function in (operator.getitem, operator.setitem, len):
    infer_global(_function)(type(_function.__name__, (_OfArray,), {}))


def _load(builder: Any, pointer: Any, constant: bool) -> Any:
    """Load an integer; a constant one need not be loaded again after a write."""
    found = builder.load(builder.bitcast(pointer, _WORD.as_pointer()))
    if constant:
        found.set_metadata("invariant.load", builder.module.add_metadata([]))
    return found


def _base(builder: Any, array: Any, width: int) -> Any:
    """Pointer to the first row of an array."""
    row = _WORD if width == 1 else ArrayType(_WORD, width)
    return builder.inttoptr(_load(builder, array, True), row.as_pointer())


def _column(builder: Any, row: Any, kind: Any, name: str) -> Any:
    integers = builder.bitcast(row, _WORD.as_pointer())
    return builder.gep(integers, [_WORD(_COLUMNS[kind.name].index(name))], inbounds=True)


@lower_getattr_generic(_World)  # type: ignore[untyped-decorator]
def _read_array(context: Any, builder: Any, _kind: Any, world: Any, name: str) -> Any:
    place = pointer_add(builder, world, 16 * _NAMES.index(name), world.type)
    if name == "state":
        return builder.bitcast(_base(builder, place, 1), world.type)
    return place


@lower_builtin(operator.getitem, _Array, types.int64)  # type: ignore[untyped-decorator]
def _read_row(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    width = len(ARRAYS[signature.args[0].name])
    base = _base(builder, arguments[0], max(1, width))
    row = builder.gep(base, [arguments[1]], inbounds=True)
    return builder.bitcast(row, arguments[0].type) if width else builder.load(row)


@lower_builtin(operator.setitem, _Array, types.int64, types.int64)  # type: ignore[untyped-decorator]
def _write_integer(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    base = _base(builder, arguments[0], 1)
    builder.store(arguments[2], builder.gep(base, [arguments[1]], inbounds=True))
    return context.get_dummy_value()


@lower_builtin(len, _Array)  # type: ignore[untyped-decorator]
def _read_length(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    return _load(builder, pointer_add(builder, arguments[0], 8), True)


@lower_getattr_generic(_Row)  # type: ignore[untyped-decorator]
def _read_column(context: Any, builder: Any, kind: Any, row: Any, name: str) -> Any:
    return builder.load(_column(builder, row, kind, name))


@lower_setattr_generic(_Row)  # type: ignore[untyped-decorator]
def _write_column(context: Any, builder: Any, signature: Any, arguments: Any, name: str) -> None:
    builder.store(arguments[1], _column(builder, arguments[0], signature.args[0], name))
