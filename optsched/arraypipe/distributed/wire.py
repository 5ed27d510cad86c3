"""Tensors as one buffer of bytes: packed to be sent, viewed without a copy where they arrive."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from optsched.arraypipe.distributed.protocol import SIZE, ProtocolError
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Sequence


ALIGNMENT: Final = 256  # cuBLASLt looks at up to so many bytes
_OF_HOST: Final = 64  # where torch's memory begins on a CPU
_CPU: Final = torch.device("cpu")
_DTYPES: Final = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODE: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NONE: Final = 255
_COUNT: Final = struct.Struct("<II")  # bytes of the table, tensors
_ENTRY: Final = struct.Struct("<BBHIq")  # dtype, dimensions, requires_grad, 0, place in the buffer


class Layout(NamedTuple):
    """Where one tensor lies in a buffer; `strides` are those that it had where it was made.

    `packed` are its strides without the gaps of a slice; they differ from `strides` only then.
    `trained` is whether the tensor needs a gradient.
    """

    dtype: torch.dtype
    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    packed: tuple[int, ...]
    trained: bool

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor in the buffer."""
        whole = buffer.view(self.dtype)
        return whole.as_strided(self.shape, self.packed, self.place // self.dtype.itemsize)

    def restore(self, buffer: Tensor) -> Tensor:
        """The tensor with the strides that it had: a view, or a copy if it had gaps."""
        found = self.view(buffer)
        if self.packed != self.strides and _span(self.shape, self.strides) >= _span(
            self.shape, self.packed
        ):  # else its elements overlapped, as those of `unfold` do
            found = _spread(found, self.strides, self.place % ALIGNMENT, buffer.device)
        return found.requires_grad_(self.trained)


class Outbox:
    """The buffer of one kind of message of one job, made anew only when the shapes change.

    `head` has room for the header, and the table; it is the buffer itself, which has the tensors
    behind them. If the two go `apart`, only the tensors are in `buffer`, at the same places.

    Kernels may choose their order of summation by strides and alignment, so both are kept: a
    dimension that was expanded stays expanded, a transposed matrix stays transposed.
    """

    def __init__(self, device: torch.device = _CPU, apart: bool = False) -> None:
        self.device, self.apart = device, apart
        self._signature: list[object] | None = None
        self._views: list[tuple[Tensor, tuple[int, ...]] | None] = []
        self.buffer = self.head = torch.empty(0, dtype=torch.uint8)
        self.words = memoryview(b"")  # the bytes of `head`

    def pack(self, tensors: Sequence[Tensor | None], absent: Sequence[int] = ()) -> int:
        """Copy the tensors behind the place of the header; bytes of this payload.

        `absent` is as in `Parcel`; it is written behind the table.
        """
        signature: list[object] = [None if t is None else _signature(t) for t in tensors]
        signature.append(absent)
        if signature != self._signature:
            self._lay_out(tensors, absent)
            self._signature = signature
        for place, tensor in zip(self._views, tensors, strict=True):
            if place is None or tensor is None:
                continue
            (view, expanded), tensor = place, tensor.detach()
            if expanded:
                _once(view, expanded).copy_(_once(tensor, expanded))
            else:
                view.copy_(tensor)
        return self.buffer.numel() - SIZE

    def _lay_out(self, tensors: Sequence[Tensor | None], absent: Sequence[int]) -> None:
        rows = layouts(tensors, len(absent))
        table = b"".join(map(_entry, rows)) + struct.pack(f"<{len(absent)}I", *absent)
        end = max((_end(row) for row in rows if row is not None), default=0)
        length = max(end, SIZE + _COUNT.size + len(table))
        self.buffer = torch.empty(_rounded(length), dtype=torch.uint8, device=self.device)
        start = _COUNT.pack(len(table), len(rows)) + table
        self.head = self.buffer
        if self.apart:
            self.head = torch.empty(SIZE + len(start), dtype=torch.uint8)
        self.head[SIZE : SIZE + len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        self.words = words(self.head)
        self._views = [
            row and (row.view(self.buffer), _expanded(row.shape, row.strides)) for row in rows
        ]


class Inbox:
    """Reads messages; knows the tables that it has seen."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[tuple[Layout | None, ...], tuple[int, ...], int]] = {}

    def unpack(
        self, raw: memoryview, buffer: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
        """Views of the tensors in a buffer that has arrived, and what is absent.

        The views keep the buffer alive; `raw` are the bytes of the header and of the table.
        """
        size, count = _COUNT.unpack_from(raw, SIZE)
        start = SIZE + _COUNT.size
        if size > len(raw) - start:
            raise ProtocolError(f"a message of {len(raw)} bytes has a table of {size} bytes")
        table = bytes(raw[start : start + size])
        known = self._known.get(table)
        if known is None:
            rows, absent = _read(table, count)
            end = max((_end(row) for row in rows if row is not None), default=0)
            known = self._known[table] = rows, absent, end
        rows, absent, end = known
        if end > buffer.numel():
            raise ProtocolError(f"a tensor lies beyond the {buffer.numel()} bytes of its message")
        return tuple([None if row is None else row.restore(buffer) for row in rows]), absent


def copied(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on another device with the strides and the alignment that it has here.

    `Tensor.to` closes the gaps of a slice and expands what was expanded.
    """
    trained, t = t.requires_grad, t.detach()
    if t.layout != torch.strided or (t.is_contiguous() and not _shift(t)):
        return t.to(device, non_blocking=True, copy=True).requires_grad_(trained)
    strides = t.stride()
    overlaps = _span(t.shape, strides) < _span(t.shape, _packed(t.shape, strides))
    if overlaps or t.numel() == 0:
        return t.to(device, non_blocking=True).requires_grad_(trained)
    shift = t.data_ptr() % ALIGNMENT
    made = _spread(t, strides, shift - shift % t.dtype.itemsize, device)
    return made.requires_grad_(trained)


def words(head: Tensor) -> memoryview:
    """The bytes of a tensor of bytes on the CPU."""
    return memoryview(head.numpy())  # type: ignore[arg-type]


def _signature(t: Tensor) -> tuple[object, ...]:
    if t.layout != torch.strided or t.dtype not in _CODE or t.is_conj() or t.is_neg():
        raise OptschedError(
            f"a {t.dtype} tensor with layout {t.layout} cannot be sent to another process"
        )
    return t.dtype, t.shape, t.stride(), _shift(t), t.requires_grad


def _shift(t: Tensor) -> int:
    """How far it lies behind where memory of its device may begin; it differs with slices only."""
    return t.data_ptr() % (ALIGNMENT if t.is_cuda else _OF_HOST)


def layouts(tensors: Sequence[Tensor | None], absent: int = 0) -> list[Layout | None]:
    """Places for the tensors in one buffer, each as far from where memory may begin as before."""
    table = sum(_ENTRY.size + (0 if t is None else 16 * t.dim()) for t in tensors) + 4 * absent
    place = SIZE + _COUNT.size + table
    rows: list[Layout | None] = []
    for t in tensors:
        if t is None:
            rows.append(None)
            continue
        shift = _shift(t)
        begin = _rounded(place) + shift - shift % t.dtype.itemsize
        packed = _packed(t.shape, t.stride())
        row = Layout(t.dtype, begin, tuple(t.shape), t.stride(), packed, t.requires_grad)
        rows.append(row)
        place = _end(row)
    return rows


def capacity(tensors: Sequence[Tensor | None]) -> int:
    """Bytes of the longest message, header included, with tensors of these shapes and dtypes."""
    total = SIZE + _COUNT.size
    for t in tensors:
        total += _ENTRY.size + 2 * ALIGNMENT
        if t is not None:
            total += 16 * t.dim() + t.numel() * t.dtype.itemsize
    return _rounded(total)


def _packed(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of the same order of dimensions without gaps; expanded dimensions stay so."""
    if 0 in shape:
        return tuple(strides)
    order = sorted(
        (k for k, n in enumerate(shape) if n > 1 and strides[k]), key=lambda k: strides[k]
    )
    found = list(strides)
    step = 1
    for k in order:
        found[k] = step
        step *= shape[k]
    return tuple(found)


def _end(row: Layout) -> int:
    """First byte behind the tensor."""
    if 0 in row.shape:
        return row.place
    return row.place + _span(row.shape, row.packed) * row.dtype.itemsize


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _expanded(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(k for k, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1 > s)


def _spread(t: Tensor, strides: Sequence[int], shift: int, device: torch.device) -> Tensor:
    """A copy with these strides, so many bytes behind a multiple of the alignment."""
    size = _rounded(shift + _span(t.shape, strides) * t.dtype.itemsize)
    wide = torch.empty(size, dtype=torch.uint8, device=device).view(t.dtype)
    wide = wide.as_strided(t.shape, strides, shift // t.dtype.itemsize)
    once = _expanded(t.shape, strides)
    _once(wide, once).copy_(_once(t, once), non_blocking=True)
    return wide


def _once(t: Tensor, expanded: Sequence[int]) -> Tensor:
    """The tensor without the repetitions of its expanded dimensions."""
    for k in expanded:
        t = t.narrow(k, 0, 1)
    return t


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _entry(row: Layout | None) -> bytes:
    if row is None:
        return _ENTRY.pack(_NONE, 0, 0, 0, 0)
    numbers = (*row.shape, *row.strides)
    start = _ENTRY.pack(_CODE[row.dtype], len(row.shape), row.trained, 0, row.place)
    return start + struct.pack(f"<{len(numbers)}q", *numbers)


def _read(table: bytes, count: int) -> tuple[tuple[Layout | None, ...], tuple[int, ...]]:
    rows: list[Layout | None] = []
    place = 0
    try:
        for _ in range(count):
            code, dims, trained, _, begin = _ENTRY.unpack_from(table, place)
            place += _ENTRY.size
            if code == _NONE:
                rows.append(None)
                continue
            numbers = struct.unpack_from(f"<{2 * dims}q", table, place)
            place += 16 * dims
            shape, strides = numbers[:dims], numbers[dims:]
            if min(numbers, default=0) < 0 or begin % _DTYPES[code].itemsize:
                raise ValueError
            packed = _packed(shape, strides)
            rows.append(Layout(_DTYPES[code], begin, shape, strides, packed, bool(trained)))
        absent = struct.unpack(f"<{(len(table) - place) // 4}I", table[place:])
    except (struct.error, IndexError, ValueError):
        raise ProtocolError("the table of tensors in a message is damaged") from None
    return tuple(rows), absent
