"""Build large tensors without keeping them: initialisation is recorded, and repeated on demand."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import UntypedStorage

LARGE: Final = 1 << 16
"""Bytes of a storage from which on it is recorded."""
_STEPS: Final = 64  # after which a storage keeps its memory: repeating them would be slow
_FREED: Final = 1 << 25  # bytes after which memory is returned to the system
_FILLS: Final = frozenset({"zero_", "fill_", "copy_", "normal_", "uniform_"})
_IN_PLACE: Final = _FILLS | {"mul_", "add_", "sub_", "div_", "clamp_", "erfinv_", "neg_"}
_COPIES: Final = frozenset({"clone", "_to_copy"})
_BY_SHAPE: Final = frozenset(
    {"empty_like", "new_empty", "new_empty_strided", "zeros_like", "new_zeros", "new_ones"}
)
_RAW: Final = frozenset(
    {
        "numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage",
        "__deepcopy__", "__reduce_ex__", "__reduce__", "__dlpack__", "share_memory_",
        "is_shared",
    }
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a tensor lies in a recorded storage; no steps: in the one that is recomputed."""

    n_bytes: int
    steps: tuple[_Step, ...] | None
    geometry: tuple[Any, ...]  # dtype, offset, size, strides

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor with its content."""
        if self.steps is not None:
            storage = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
            _recompute(storage, self.n_bytes, self.steps)
        dtype, *rest = self.geometry
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *rest)


@dataclass(frozen=True, eq=False)
class _Step:
    """One operation on a storage: it makes the content, or changes it in place."""

    func: Any
    args: Any  # with places of recorded tensors
    kwargs: dict[str, Any]
    makes: bool
    random: Tensor | None = None  # state of the generator before the operation

    def run(self, storage: UntypedStorage) -> None:
        """Repeat the operation, with the random numbers that it had."""

        def given(value: Any) -> Any:
            return value.tensor(storage) if isinstance(value, _Place) else value

        args, kwargs = tree_map(given, (self.args, self.kwargs))
        if self.random is None:
            result = self.func(*args, **kwargs)
        else:
            generator = kwargs.get("generator") or torch.default_generator
            before = generator.get_state()
            generator.set_state(self.random)
            result = self.func(*args, **kwargs)
            generator.set_state(before)
        if self.makes:
            storage.copy_(result.untyped_storage())


@dataclass(eq=False)
class _Recorded:
    """A storage without memory, and how to recompute its content."""

    storage: UntypedStorage  # held, so that no other storage gets its address
    n_bytes: int
    steps: tuple[_Step, ...]


class Recorder(TorchDispatchMode):
    """Record how large CPU tensors are initialised instead of keeping their content.

    Within ``with recorder:`` a tensor of `LARGE` bytes or more that is made from no other tensor
    keeps its type, shape, strides, device and sharing of memory, but its storage is emptied after
    every operation. Its creation is recorded, its copies, and what initialisation does in place
    (`_IN_PLACE`, also through views). Random operations run once as they come, so the generators
    advance exactly as without recording, and again from the noted state when the content is needed:
    while an operation reads it, or by `restore`. Any other operation that writes to it gives it its
    memory for good.

    `records` limits what is recorded: ``"copies"``, only copies of recorded tensors; ``"none"``,
    no more tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: Literal["all", "copies", "none"] = "all"
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
        """Return whether a tensor has no content at the moment."""
        return self._find(tensor) is not None

    def restore(self, tensors: Iterable[Tensor]) -> None:
        """Recompute the storages of tensors, for good."""
        for tensor in tensors:
            if (entry := self._find(tensor)) is not None:
                del self.table[entry.storage._cdata]
                _recompute(entry.storage, entry.n_bytes, entry.steps)

    def finish(self) -> None:
        """Recompute all storages that are still in use, and forget the others."""
        while self.table:
            _, entry = self.table.popitem()
            # more than the storage of the entry refers to it
            if torch._C._storage_Use_Count(entry.storage._cdata) > 1:
                _recompute(entry.storage, entry.n_bytes, entry.steps)
        return_memory()

    def value(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the content; the given one stays as it is."""
        if (entry := self._find(tensor)) is None:
            return tensor.detach()
        return _Place(entry.n_bytes, entry.steps, _geometry(tensor)).tensor(entry.storage)

    def assign(self, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        """Give a tensor another content, which is read when it is needed."""

        def copy(target: Tensor) -> None:
            target.copy_(read())

        entry = self._find(tensor)
        if entry is None:
            with _disable_current_modes(), torch.no_grad():
                copy(tensor)
            return
        step = _Step(copy, (_Place(0, None, _geometry(tensor)),), {}, False)
        entry.steps = (step,) if _covers(tensor, entry) else (*entry.steps, step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, tags = func._overloadpacket.__name__, func.tags
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        entries = [*{id(e): e for t in tensors if (e := self._find(t)) is not None}.values()]
        if not entries and (tensors or self.records != "all"):
            return func(*args, **kwargs)
        by_geometry = torch.Tag.inplace_view in tags and name not in ("set_", "resize_")
        if not func._schema.is_mutable:
            views = any(result.alias_info is not None for result in func._schema.returns)
            by_geometry = views or name in _BY_SHAPE
        if entries and by_geometry:
            return self._within(entries, False, func, args, kwargs)
        random = None
        if torch.Tag.nondeterministic_seeded in tags:
            random = (kwargs.get("generator") or torch.default_generator).get_state()
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, random, tensors, entries)
        if not tensors or (name in _COPIES and self.records != "none"):
            result = self._within(entries, False, func, args, kwargs)
            if self._take(func, args, kwargs, random, result) or not entries:
                return result
        return self._within(entries, True, func, args, kwargs)

    def _write(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        random: Tensor | None,
        tensors: Sequence[Tensor],
        entries: list[_Recorded],
    ) -> Any:
        """Run an operation in place, and record it if it is of the kind that initialises."""
        name = func._overloadpacket.__name__
        target = self._find(args[0]) if args and isinstance(args[0], Tensor) else None
        outside = any(self._find(t) is None and t.nbytes >= LARGE for t in tensors)
        if target is None and name in _IN_PLACE:
            return self._within(entries, True, func, args, kwargs)
        if target is None or outside or name not in _IN_PLACE or len(target.steps) > _STEPS:
            self.restore(tensors)
            return func(*args, **kwargs)
        kept, options = self._kept((args, kwargs), target)
        step = _Step(func, kept, options, False, random)
        others = [t for t in tensors[1:] if self._find(t) is target]
        fills = name in _FILLS and not others and _covers(args[0], target)
        result = self._within(entries, False, func, args, kwargs)
        target.steps = (step,) if fills else (*target.steps, step)
        return result

    def _take(
        self, func: Any, args: Any, kwargs: dict[str, Any], random: Tensor | None, result: Any
    ) -> bool:
        """Record a large result, a factory's or a copy, and empty it."""
        if not _is_dense(result) or result.is_conj() or result.is_neg():
            return False
        storage = result.untyped_storage()
        if storage.nbytes() < LARGE or not storage.resizable():
            return False
        kept, options = self._kept((args, kwargs), None)
        named = {argument.name for argument in func._schema.arguments}
        for key, value in (("dtype", result.dtype), ("device", result.device)):
            if key in named and options.get(key) is None:  # the defaults may be others later
                options[key] = value
        step = _Step(func, kept, options, True, random)
        empty = func._overloadpacket.__name__.startswith("empty")
        entry = _Recorded(storage, storage.nbytes(), () if empty else (step,))
        self.table[storage._cdata] = entry
        self._empty([entry])
        return True

    def _within(
        self, entries: list[_Recorded], content: bool, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation while recorded storages have memory, and their content if needed."""
        try:
            for entry in entries:
                if content:
                    _recompute(entry.storage, entry.n_bytes, entry.steps)
                else:
                    entry.storage.resize_(entry.n_bytes)
            return func(*args, **kwargs)
        finally:
            self._empty(entries)

    def _empty(self, entries: list[_Recorded]) -> None:
        for entry in entries:
            entry.storage.resize_(0)
            self.freed += entry.n_bytes
        if self.freed > _FREED:
            self.freed = 0
            return_memory()

    def _kept(self, tree: Any, target: _Recorded | None) -> Any:
        """Return arguments with places for recorded tensors and copies of the others."""

        def keep(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            entry = self._find(value)
            if entry is None:
                return value.detach().clone()
            return _Place(entry.n_bytes, None if entry is target else entry.steps, _geometry(value))

        return tree_map(keep, tree)

    def _find(self, tensor: Tensor) -> _Recorded | None:
        with torch._C.DisableTorchFunction():  # the guard would restore it
            return self.table.get(tensor.untyped_storage()._cdata) if _is_dense(tensor) else None


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


def _is_dense(tensor: Any) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
    )


def _covers(tensor: Tensor, entry: _Recorded) -> bool:
    """Return whether a tensor is all of a recorded storage."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == entry.n_bytes


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    return tensor.dtype, tensor.storage_offset(), size, stride


def _recompute(storage: UntypedStorage, n_bytes: int, steps: Sequence[_Step]) -> None:
    """Give a storage the content after these steps."""
    storage.resize_(n_bytes)
    with _disable_current_modes(), torch.no_grad():
        for step in steps:
            step.run(storage)
