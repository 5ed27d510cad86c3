"""Messages as bytes: a header, a table of the tensors, and the tensors in one buffer."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from optsched.arraypipe.distributed.wire import ALIGNMENT, shift_of
from optsched.arraypipe.plan.types import FAILED, STOP, TOMBSTONE
from optsched.arraypipe.runtime.cuda_streams import staging
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.errors import InternalError, OptschedError

if TYPE_CHECKING:
    from collections.abc import Sequence


SIZE: Final = 64
"""Bytes of a header."""

LONG: Final = 8
"""Flag of a header whose message follows by itself: it is longer than the posted buffer."""

_MAGIC: Final = b"OSAP"
_VERSION: Final = 3
_FLAGS: Final = STOP | FAILED | TOMBSTONE | LONG
# magic, version, flags | segment, message, job | iteration | loss | table, payload
_LAYOUT: Final = struct.Struct("<4sBB2xiiiqdqq")
_CPU: Final = torch.device("cpu")
_HEADROOM: Final = 1024  # bytes of a table that may become longer than the first one


class ProtocolError(InternalError):
    """A message is not the one that comes next on its channel."""


class Label(NamedTuple):
    """Which message it is, as sender and receiver both know it."""

    segment: int
    message: int  # its index in the routes of the plan
    job: int
    iteration: int


class Header(NamedTuple):
    """What is known of a message before its tensors are looked at."""

    label: Label
    flags: int = 0  # as in `plan.types`, and `LONG`
    loss: float = math.nan  # of the iteration
    table: int = 0  # bytes of the table behind the header
    payload: int = 0  # bytes of the tensors

    def pack_into(self, buffer: memoryview) -> None:
        """Write the header into the first `SIZE` bytes."""
        fields = (*self.label, self.loss, self.table, self.payload)
        _LAYOUT.pack_into(buffer, 0, _MAGIC, _VERSION, self.flags, *fields)

    @property
    def length(self) -> int:
        """Bytes of the message if the tensors are behind the table."""
        return _begin(self.table) + self.payload


def unpack(data: bytes | memoryview) -> Header:
    """The header in the first `SIZE` bytes; `ProtocolError` if there is none."""
    if len(data) < SIZE:
        raise ProtocolError(f"expected a header of {SIZE} bytes, received {len(data)} bytes")
    magic, version, flags, *label, loss, table, payload = _LAYOUT.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(
            f"expected a message that begins with {_MAGIC!r}, version {_VERSION}, received "
            f"{magic!r}, version {version}; do all ranks run the same release?"
        )
    if flags & ~_FLAGS or table < 0 or payload < 0:
        raise ProtocolError(
            f"received a damaged header: flags {flags}, table of {table}, payload of {payload} "
            f"bytes"
        )
    return Header(Label(*label), flags, loss, table, payload)


class _Row(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool  # whether the tensor needs a gradient
    place: int  # in the payload

    def view(self, payload: Tensor) -> Tensor:
        end = self.place + math.prod(self.shape) * self.dtype.itemsize
        return payload[self.place : end].view(self.dtype).view(self.shape)


class Outbox:
    """The buffer of one message of a plan, made again only when the shapes change.

    It is on the host, whatever the `device` of the tensors.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self.device = device
        self._signature: object = None
        self._views: list[Tensor | None] = []
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.raw = memoryview(b"")  # its bytes
        self.table = self.payload = 0

    def pack(self, tensors: Sequence[Tensor | None], absent: Sequence[int] = ()) -> None:
        """Copy the tensors, which are complete then; `absent` goes into the table."""
        signature = [t if t is None else _form(t) for t in tensors]
        if (signature, absent) != self._signature:
            self._lay_out(tensors, absent)
            self._signature = signature, absent
        for view, t in zip(self._views, tensors, strict=True):
            if view is not None and t is not None:
                view.copy_(t.detach(), non_blocking=True)
        if on_gpu(self.device):
            torch.cuda.current_stream(self.device).synchronize()

    def _lay_out(self, tensors: Sequence[Tensor | None], absent: Sequence[int]) -> None:
        table, rows, self.payload = _table(tensors, absent)
        self.table = len(table)
        begin = _begin(self.table)
        self.buffer = staging(begin + self.payload, self.device)
        self.raw = host_bytes(self.buffer)
        self.raw[SIZE : SIZE + self.table] = table
        self._views = [row and row.view(self.buffer[begin:]) for row in rows]


class Inbox:
    """Reads messages; remembers the tables that have occurred."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[list[_Row | None], tuple[int, ...], int]] = {}

    def unpack(
        self, header: Header, buffer: Tensor, device: torch.device = _CPU
    ) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
        """Views of the tensors of a message that has arrived, and what is absent.

        On the CPU the views keep `buffer` alive; to a GPU all bytes are copied at once.
        """
        raw = host_bytes(buffer)
        if header.table > len(raw) - SIZE:
            raise ProtocolError(f"a message of {len(raw)} bytes has a table of {header.table}")
        table = bytes(raw[SIZE : SIZE + header.table])
        known = self._known.get(table)
        if known is None:
            known = self._known[table] = _read(table)
        rows, absent, length = known
        payload = buffer[_begin(header.table) :]
        if length > payload.numel():
            raise ProtocolError(f"a tensor lies beyond the {payload.numel()} bytes of its message")
        payload = payload[:length].to(device, non_blocking=True)
        found = [row and row.view(payload).requires_grad_(row.trained) for row in rows]
        return tuple(found), absent


def capacity(tensors: Sequence[Tensor | None]) -> int:
    """Bytes to be ready for, of a message with tensors of these shapes and dtypes."""
    table, _, payload = _table(tensors, ())
    return _begin(len(table) + _HEADROOM) + payload + ALIGNMENT * len(tensors)


def host_bytes(head: Tensor) -> memoryview:
    """The bytes of a tensor of bytes on the CPU."""
    return memoryview(head.numpy())  # type: ignore[arg-type]


def _form(t: Tensor) -> tuple[object, ...]:
    if t.layout != torch.strided or t.is_quantized:
        raise OptschedError(
            f"a {t.dtype} tensor with layout {t.layout} cannot be sent to another process"
        )
    return t.dtype, t.shape, t.requires_grad, shift_of(t)


def _table(
    tensors: Sequence[Tensor | None], absent: Sequence[int]
) -> tuple[bytes, list[_Row | None], int]:
    """The table in JSON, places of the tensors, and bytes of all of them."""
    rows: list[_Row | None] = []
    place = 0
    for t in tensors:
        if t is None:
            rows.append(None)
            continue
        place = _rounded(place) + shift_of(t)
        rows.append(_Row(t.dtype, tuple(t.shape), t.requires_grad, place))
        place += t.numel() * t.dtype.itemsize
    listed = [row and [str(row.dtype)[6:], row.shape, row.trained, row.place] for row in rows]
    return json.dumps([listed, list(absent)]).encode(), rows, _rounded(place)


def _read(table: bytes) -> tuple[list[_Row | None], tuple[int, ...], int]:
    rows: list[_Row | None] = []
    end = 0
    try:
        listed, absent = json.loads(table)
        for entry in listed:
            if entry is None:
                rows.append(None)
                continue
            name, shape, trained, place = entry
            dtype: Any = getattr(torch, name)
            sizes = [int(n) for n in (*shape, place)]
            if not isinstance(dtype, torch.dtype) or min(sizes) < 0 or place % dtype.itemsize:
                raise ValueError(name)
            rows.append(_Row(dtype, tuple(sizes[:-1]), bool(trained), sizes[-1]))
            end = max(end, sizes[-1] + math.prod(sizes[:-1]) * dtype.itemsize)
        return rows, tuple(map(int, absent)), end
    except (ValueError, TypeError, AttributeError):
        raise ProtocolError("the table of tensors in a message is damaged") from None


def _begin(table: int) -> int:
    """Where the tensors begin behind a table of so many bytes."""
    return _rounded(SIZE + table)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
