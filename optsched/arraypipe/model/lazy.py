"""Run code that makes large tensors without keeping them: recorded, and recomputed on demand."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import UntypedStorage

LARGE: Final = 1 << 16
"""Bytes of a storage from which on it is recorded."""
_DEPTH: Final = 64  # steps after which a storage stays in memory: recomputing it would be slow
_FREED: Final = 1 << 25  # bytes
_EMPTY: Final = frozenset(
    {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}
)
_FILLS: Final = frozenset(
    {
        "zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_",
        "cauchy_", "geometric_",
    }
)  # fmt: skip
# results that do not depend on the content of the inputs
_LIKE: Final = _EMPTY | {
    "zeros_like", "ones_like", "full_like", "randn_like", "rand_like", "new_zeros", "new_ones",
    "new_full",
}  # fmt: skip
# operations that neither fail nor change the shape of a result by the content of the inputs
_BLIND: Final = (
    _FILLS
    | _LIKE
    | {"clone", "_to_copy", "mul_", "add_", "sub_", "div_", "clamp_", "erfinv_", "neg_"}
    | {"mul", "add", "sub", "div"}
)
_RAW: Final = frozenset(
    {
        "numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage",
        "__deepcopy__", "__reduce_ex__", "__reduce__", "__dlpack__", "share_memory_",
        "is_shared",
    }
)  # fmt: skip


class _Place(NamedTuple):
    """Where a tensor lies in a recorded storage."""

    step: _Step | None  # its last step; None: of the storage that is being recomputed
    n_bytes: int  # -1 with no step
    geometry: tuple[Any, ...]  # dtype, offset, size, strides


@dataclass(frozen=True, eq=False)
class _Step:
    """One operation that changed a storage; steps form a chain back to its creation."""

    before: _Step | None
    func: Any
    args: Any
    kwargs: Any
    output: int | None  # position of the result that is the new content; None: works in place
    random: Tensor | None  # state of the generator before the operation
    depth: int


@dataclass(eq=False)
class _Recorded:
    """A storage without memory, and how to recompute its content."""

    storage: UntypedStorage  # held, so that no other storage gets its address
    n_bytes: int
    step: _Step | None = None


class Recorder(TorchDispatchMode):
    """Record the operations on large CPU tensors instead of keeping their content.

    Within ``with recorder:`` a tensor of `LARGE` bytes or more that an operation makes keeps its
    type, shape, strides, device and sharing of memory, but its storage is emptied after every
    operation. Random operations run once as they come, so the generators advance exactly as
    without recording, and again from the noted state of their generator when the content is
    needed: when it is read (``item()``, conditions, linear algebra) or by `restore`.

    Storages that were made outside (files, NumPy) are left alone, and so is what is computed from
    large ones of them. `records` limits what is recorded: ``"derived"``, only results that have a
    recorded input; ``"none"``, no more results, so that a forward keeps its activations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: Literal["all", "derived", "none"] = "all"
        self.table: dict[int, _Recorded] = {}
        self.freed = 0  # bytes since memory was returned to the system
        self.guard = _Guard(self)

    def __enter__(self) -> Self:
        self.guard.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.guard.__exit__(*error)  # type: ignore[no-untyped-call]

    def recorded(self, tensor: Tensor) -> bool:
        """Whether a tensor has no content at the moment."""
        return self._find(tensor) is not None

    def restore(self, tensors: Iterable[Tensor]) -> None:
        """Recompute the storages of tensors, for good."""
        for tensor in tensors:
            if (entry := self._find(tensor)) is not None:
                del self.table[entry.storage._cdata]
                _recompute(entry.storage, entry.n_bytes, entry.step)

    def finish(self) -> None:
        """Recompute all storages that are still in use, and forget the others."""
        while self.table:
            _, entry = self.table.popitem()
            # more than the storage of the entry refers to it
            if torch._C._storage_Use_Count(entry.storage._cdata) > 1:
                _recompute(entry.storage, entry.n_bytes, entry.step)
        return_memory()

    def value(self, tensor: Tensor) -> Tensor:
        """A tensor with the content; the given one stays as it is."""
        if (entry := self._find(tensor)) is None:
            return tensor.detach()
        return _at(_recomputed(entry.n_bytes, entry.step), _geometry(tensor))

    def assign(self, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        """Give a tensor another content, which is read when it is needed."""

        def copy(target: Tensor) -> None:
            target.copy_(read())

        entry = self._find(tensor)
        if entry is None:
            with _disable_current_modes(), torch.no_grad():
                copy(tensor)
            return
        before = None if _covers(tensor, entry) else entry.step
        depth = 1 + (0 if before is None else before.depth)
        place = _Place(None, -1, _geometry(tensor))
        entry.step = _Step(before, copy, (place,), {}, None, None, depth)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        entries = {id(e): e for t in tensors if (e := self._find(t)) is not None}
        foreign = any(self._find(t) is None and _is_large(t) for t in tensors)
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if entries and (name in ("resize_", "set_") or (foreign and writes)):
            self.restore(tensors)
            entries = {}
        random = _generator_state(func, kwargs)
        steps = self._written(func, args, kwargs, random) if writes and entries else []
        takes = not foreign and not writes
        takes &= self.records == "all" or (self.records == "derived" and bool(entries))
        result = self._execute(func, args, kwargs, name, list(entries.values()), takes)
        self.freed += sum(entry.n_bytes for entry in entries.values())
        for entry, step in steps:
            entry.step = step
        if any(step.depth > _DEPTH for _, step in steps):
            self.restore(tensors)
        if takes:
            self._take(func, args, kwargs, name, random, result, tensors)
        if self.freed > _FREED:
            self.freed = 0
            return_memory()
        return result

    def _execute(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        name: str,
        entries: list[_Recorded],
        takes: bool,
    ) -> Any:
        """Run an operation; its recorded inputs have their content if its results need that.

        `takes`: large results will be recorded, so that their content does not matter now.
        """
        if not entries:
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return _within(entries, False, func, args, kwargs)
        if func._schema.is_mutable:
            targets = _written_tensors(func, args, kwargs)
            blind = name in _BLIND and all(self._find(t) is not None for t in targets)
            return _within(entries, not blind, func, args, kwargs)
        views = any(result.alias_info is not None for result in func._schema.returns)
        if views or name in _LIKE or (takes and name in _BLIND):
            result = _within(entries, False, func, args, kwargs)
            if views or name in _LIKE or all(map(_is_whole, tree_leaves(result))):
                return result  # else it is small and stays, so the content must be right
        return _within(entries, True, func, args, kwargs)

    def _written(
        self, func: Any, args: Any, kwargs: Any, random: Tensor | None
    ) -> list[tuple[_Recorded, _Step]]:
        """The step that an operation adds to every recorded storage that it writes to."""
        found = []
        targets = _written_tensors(func, args, kwargs)
        name = func._overloadpacket.__name__
        for key in {t.untyped_storage()._cdata for t in targets if self._find(t) is not None}:
            entry = self.table[key]
            target = next(t for t in targets if t.untyped_storage()._cdata == key)
            others = [
                t
                for t in tree_leaves((args, kwargs))
                if isinstance(t, Tensor) and t is not target and self._find(t) is entry
            ]
            whole = name in _FILLS and not others and _covers(target, entry)
            before = None if whole else entry.step
            depth = 1 + (0 if before is None else before.depth)
            kept_args, kept_kwargs = self._kept((args, kwargs), entry)
            step = _Step(before, func, kept_args, kept_kwargs, None, random, depth)
            found.append((entry, step))
        return found

    def _take(
        self, func: Any, args: Any, kwargs: Any, name: str, random: Tensor | None, result: Any,
        tensors: list[Tensor],
    ) -> None:  # fmt: skip
        """Record the large results of an operation and empty them."""
        outputs = tree_leaves(result)
        large = [(k, t) for k, t in enumerate(outputs) if isinstance(t, Tensor) and _is_whole(t)]
        if not large:
            return
        inputs = {t.untyped_storage()._cdata for t in tensors if _is_dense(t)}
        for k, tensor in large:
            storage = tensor.untyped_storage()
            if storage._cdata in inputs or storage._cdata in self.table:
                continue
            entry = _Recorded(storage, storage.nbytes())
            if name not in _EMPTY:
                kept_args, kept_kwargs = self._kept((args, kwargs), None)
                named = {argument.name for argument in func._schema.arguments}
                defaults = {"dtype": tensor.dtype, "device": tensor.device}
                for key, value in defaults.items():  # the defaults may be others later
                    if not tensors and key in named and kept_kwargs.get(key) is None:
                        kept_kwargs[key] = value
                entry.step = _Step(None, func, kept_args, kept_kwargs, k, random, 1)
            self.table[storage._cdata] = entry
        for _, tensor in large:
            if (recorded := self._find(tensor)) is not None:
                recorded.storage.resize_(0)
                self.freed += recorded.n_bytes

    def _kept(self, tree: Any, target: _Recorded | None) -> Any:
        """Arguments with places for recorded tensors and copies of the others."""

        def keep(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            entry = self._find(value)
            if entry is None:
                return value.detach().clone()
            if entry is target:
                return _Place(None, -1, _geometry(value))
            return _Place(entry.step, entry.n_bytes, _geometry(value))

        return tree_map(keep, tree)

    def _find(self, tensor: Tensor) -> _Recorded | None:
        if not _is_dense(tensor):
            return None
        return self.table.get(tensor.untyped_storage()._cdata)


def _within(
    entries: list[_Recorded], content: bool, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run an operation while recorded storages have memory, and their content if needed."""
    try:
        for entry in entries:
            if content:
                _recompute(entry.storage, entry.n_bytes, entry.step)
            else:
                entry.storage.resize_(entry.n_bytes)
        return func(*args, **kwargs)
    finally:
        for entry in entries:
            entry.storage.resize_(0)


class _Guard(TorchFunctionMode):
    """Give tensors their content before Python code gets at their memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _RAW:
            with torch._C.DisableTorchFunction():
                self.recorder.restore(t for t in args if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def collect() -> None:
    """Free the tensors of objects that refer to each other, and return their memory."""
    gc.collect()
    return_memory()


def return_memory() -> None:
    """Return freed memory to the system: malloc keeps some of it below small living pieces."""
    with suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _is_dense(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (
        (kind is Tensor or kind is nn.Parameter or kind is nn.Buffer)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
    )


def _is_large(tensor: Tensor) -> bool:
    return _is_dense(tensor) and tensor.numel() * tensor.element_size() >= LARGE


def _is_whole(tensor: Tensor) -> bool:
    """Whether the storage of a result is to be recorded."""
    if not _is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() >= LARGE and storage.resizable()


def _covers(tensor: Tensor, entry: _Recorded) -> bool:
    """Whether a tensor is all of a recorded storage."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == entry.n_bytes


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.dtype,
        tensor.storage_offset(),
        tuple(tensor.size()),
        tuple(tensor.stride()),
    )


def _at(storage: UntypedStorage, geometry: tuple[Any, ...]) -> Tensor:
    dtype, offset, size, stride = geometry
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


def _generator_state(func: Any, kwargs: Any) -> Tensor | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator")
    return (torch.default_generator if generator is None else generator).get_state()


def _recompute(storage: UntypedStorage, n_bytes: int, step: _Step | None) -> None:
    """Give a storage the content after a step."""
    storage.resize_(n_bytes)
    chain = []
    while step is not None:
        chain.append(step)
        step = step.before
    with _disable_current_modes(), torch.no_grad():
        for step in reversed(chain):
            _replay(storage, step)


def _recomputed(n_bytes: int, step: _Step | None) -> UntypedStorage:
    storage = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    _recompute(storage, n_bytes, step)
    return storage


def _replay(storage: UntypedStorage, step: _Step) -> None:
    """Run the operation of a step again, with the random numbers that it had."""

    def made(value: Any) -> Any:
        if not isinstance(value, _Place):
            return value.clone() if isinstance(value, Tensor) else value
        found = storage if value.n_bytes < 0 else _recomputed(value.n_bytes, value.step)
        return _at(found, value.geometry)

    args, kwargs = tree_map(made, (step.args, step.kwargs), is_leaf=_is_place)
    before = None
    if step.random is not None:
        if kwargs.get("generator") is not None:
            kwargs["generator"] = torch.Generator()
            kwargs["generator"].set_state(step.random)
        else:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(step.random)
    try:
        result = step.func(*args, **kwargs)
    finally:
        if before is not None:
            torch.default_generator.set_state(before)
    if step.output is not None:
        storage.copy_(tree_leaves(result)[step.output].untyped_storage())


def _is_place(value: Any) -> bool:
    return isinstance(value, _Place)
