"""Channels: no plan hangs at any speed, messages are not mixed up, damaged ones are refused."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from channel_model import Hang, Model, random_shape, segment_of
from depth import depth
from hypothesis import given
from hypothesis import strategies as st

from optsched import InternalError, OptschedError
from optsched.arraypipe import compile_plan, random_schedule
from optsched.arraypipe.distributed.channels import Capacity, ReceiveOrder
from optsched.arraypipe.distributed.messages import (
    SIZE,
    Header,
    Inbox,
    Label,
    Outbox,
    ProtocolError,
    capacity,
    unpack,
)
from optsched.arraypipe.plan.plan import routes
from optsched.arraypipe.plan.segments import Segment, channel_stream, device_stream
from optsched.arraypipe.plan.types import FAILED, STOP, Transfer


def run_plan(seed: int) -> int:
    """Run a random plan twice at random speeds; blocks that have run."""
    draw = random.Random(seed)
    shape = random_shape(draw)
    segment = segment_of(shape, draw, [draw.randrange(4) for _ in shape.microbatches], 4)
    blocks = 0
    for _ in range(2):
        windows = [draw.choice([1, 2, 5, 16]) for _ in segment.routes.channels]
        model = Model(segment, windows, draw)
        model.run()
        for device, ran in enumerate(model.ran):
            assert ran == list(device_stream(segment, device))
            blocks += len(ran)
    return blocks


def test_random_plans_never_hang() -> None:
    """Offsets, copies, tied weights, clipping, skipped iterations; each list in its order."""
    assert sum(run_plan(seed) for seed in range(depth(100, 300))) > 1000


@pytest.mark.slow
def test_ten_thousand_random_plans_never_hang() -> None:
    """The same on 10,000 plans."""
    assert sum(run_plan(seed) for seed in range(1000, 11000)) > 200_000


def test_noticed_receives_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With never more than a window of receives some plans hang, and the model notices it."""
    until = ReceiveOrder.until

    def limited(self: ReceiveOrder, transfer: Transfer) -> list[Transfer]:
        return until(self, transfer) if len(self.posted) < self._window else []

    monkeypatch.setattr(ReceiveOrder, "until", limited)
    with pytest.raises(Hang):
        for seed in range(300):
            run_plan(seed)


def small() -> Segment:
    """A segment of a few iterations on two devices or more."""
    draw = random.Random(4)
    shape = random_shape(draw, everywhere=True)
    return segment_of(shape, draw, [0] * len(shape.microbatches), 3)


def test_receives_in_the_order_of_the_source() -> None:
    """Up to the message that is waited for, then a window ahead; none twice."""
    segment = small()
    for channel in range(len(segment.routes.channels)):
        wanted = list(channel_stream(segment, channel))
        order = ReceiveOrder(segment, channel, 3)
        posted = order.ahead()
        for transfer in wanted:
            posted += order.until(transfer)
            order.posted.discard(transfer)
            posted += order.ahead()
        assert posted == wanted
        with pytest.raises(InternalError, match="not among the messages"):
            order.until(Transfer(-1, 0))


@pytest.mark.parametrize(
    ("size", "window", "expected"),
    [(1000, 2, 16), (1000, 20, 20), (1 << 16, 2, 4), (1 << 20, 3, 3)],
)
def test_more_small_messages_are_posted_at_once(size: int, window: int, expected: int) -> None:
    """Together up to 256 KiB and 16 messages, never fewer than the window."""
    plan = compile_plan(random_schedule([1, 1], 2))
    segment = Segment(plan, routes(plan), (0, 1), [0, 0], [3, 3])
    found = Capacity(window)
    found._boundary = {(job, stage): size for job in range(2) for stage in range(2)}
    assert found.windows(segment, enlarge=True) == [expected, expected]
    assert found.windows(segment, enlarge=False) == [window, window]
    received, sent = found.held(segment, 0, range(2))
    assert size <= received <= (window + 2) * size
    assert sent == 2 * size


# messages as bytes


def packed(header: Header) -> bytes:
    """The bytes of a header."""
    data = bytearray(SIZE)
    header.pack_into(memoryview(data))
    return bytes(data)


@given(
    st.builds(Label, *(st.integers(0, 2**31 - 1) for _ in range(3)), st.integers(0, 2**62)),
    st.integers(0, 15), st.floats(), st.integers(0, 2**30), st.integers(0, 2**50),
)  # fmt: skip
def test_headers_survive_packing(
    label: Label, flags: int, loss: float, table: int, payload: int
) -> None:
    """64 bytes, and back what was put in, NaN and infinities included."""
    made = Header(label, flags, loss, table, payload)
    back = unpack(packed(made))
    assert back.loss == loss or (math.isnan(back.loss) and math.isnan(loss))
    assert back._replace(loss=0.0) == made._replace(loss=0.0)


@given(st.binary(max_size=80))
def test_hostile_bytes_are_no_header(data: bytes) -> None:
    """Anything else is refused in a sentence."""
    with pytest.raises(ProtocolError, match=r"expected|damaged"):
        unpack(data)


def test_damaged_headers_are_refused() -> None:
    """Another release, unknown flags."""
    data = bytearray(packed(Header(Label(0, 1, 2, 3), STOP | FAILED)))
    for place, value in ((4, 9), (5, 16)):
        damaged = bytearray(data)
        damaged[place] = value
        with pytest.raises(ProtocolError):
            unpack(bytes(damaged))


DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool,
    torch.complex64, torch.uint8,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """A tensor of any dtype that may be empty, transposed, or a slice; or None."""
    if draw(st.integers(0, 9)) == 0:
        return None
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    t = torch.randn([n + 1 for n in shape]).mul(9).to(dtype)
    for dim, n in enumerate(shape):
        t = t.narrow(dim, draw(st.integers(0, 1)), n)
    t = t.permute(draw(st.permutations(range(t.dim()))))
    return t.requires_grad_(draw(st.booleans())) if t.is_floating_point() else t


@given(st.lists(tensors(), max_size=4), st.integers(0, 3), st.lists(st.integers(0, 999)))
def test_tensors_survive_the_wire(row: list[Any], more: int, absent: list[int]) -> None:
    """Values, shapes, dtypes, `requires_grad`; contiguous, aligned, nothing copied."""
    outbox, inbox = Outbox(), Inbox()
    for _ in range(2):  # the second time the table is known
        outbox.pack(row, tuple(absent))
        header = Header(Label(0, 0, 0, 0), 0, 0.0, outbox.table, outbox.payload)
        assert header.length == outbox.buffer.numel() <= capacity(row) + 8 * len(absent)
        buffer = torch.cat([outbox.buffer, outbox.buffer.new_zeros(256 * more)])
        found, places = inbox.unpack(header, buffer)
        assert list(places) == absent
        for t, u in zip(row, found, strict=True):
            assert (t is None) == (u is None)
            if t is None:
                continue
            assert (t.dtype, t.shape, t.requires_grad) == (u.dtype, u.shape, u.requires_grad)
            assert torch.equal(t, u)
            assert u.is_contiguous()
            assert u.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert not t.numel() or u.data_ptr() % 64 == t.data_ptr() % 64


@given(st.binary(min_size=8, max_size=120))
def test_hostile_tables_are_refused(data: bytes) -> None:
    """Garbage behind the header is refused in a sentence, or describes tensors inside the bytes."""
    buffer = torch.zeros(SIZE + 512, dtype=torch.uint8)
    buffer[SIZE : SIZE + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    header = Header(Label(0, 0, 0, 0), 0, 0.0, len(data), 256)
    try:
        found, _ = Inbox().unpack(header, buffer)
    except ProtocolError:
        return
    assert all(t is None or t.numel() <= buffer.numel() for t in found)


def test_what_cannot_be_sent() -> None:
    """Sparse tensors have no strides."""
    with pytest.raises(OptschedError, match="cannot be sent"):
        Outbox().pack([torch.eye(3).to_sparse()])
