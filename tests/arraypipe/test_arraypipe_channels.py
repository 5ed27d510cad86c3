"""Messages between devices: no plan hangs at any speed, what is packed arrives, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch
from arraypipe_plans import random_array, random_rolling
from depth import depth
from hypothesis import given
from hypothesis import strategies as st

from optsched.arraypipe import compile_plan
from optsched.arraypipe.distributed.messages import (
    Label,
    incoming,
    message_bytes,
    pack,
    unpack,
)
from optsched.arraypipe.plan.plan import routes
from optsched.arraypipe.plan.segments import Segment, device_stream
from optsched.arraypipe.runtime.state import Payload

CPU = torch.device("cpu")


def random_segment(draw: random.Random) -> Segment:
    """A few iterations of a random plan, with tied weights and jobs that update together."""
    array = random_array(draw, draw.randint(1, 4), "period")
    plan = compile_plan(random_rolling(array, seed=draw.randrange(10**6)))
    stages = range(plan.n_stages)
    ties = [tuple(sorted(draw.sample(stages, 2)))] if len(stages) > 1 and not plan.split else []
    together = [j for j in plan.updated if array.update_mode == "global" and draw.random() < 0.5]
    first = [draw.randrange(4) for _ in plan.microbatches]
    count = [draw.randint(0, 4 * copies) for copies in plan.copies]
    slots = tuple(range(plan.n_jobs))
    return Segment(plan, routes(plan, ties, together), slots, first, count)


def test_random_plans_never_hang() -> None:
    """A device waits for one message after the other, in its order; sends do not wait.

    Some devices are very slow. Messages with a tag are sent in the order in which they are awaited.
    """
    ran = 0
    for seed in range(depth(100, 2000)):
        draw = random.Random(seed)
        segment = random_segment(draw)
        channel_of = segment.routes.channel_of
        devices = range(len(segment.plan.sequences))
        streams = [list(device_stream(segment, d)) for d in devices]
        left = [row[::-1] for row in streams]
        taken, sent = (Counter[tuple[int, int]]() for _ in range(2))
        speed = [draw.choice([1.0, 1.0, 0.1, 0.001]) for _ in devices]
        ready = list(devices)
        while ready := [
            d for d in devices
            if left[d] and all(sent[row] for row in incoming(segment, iter(left[d][-1:])))
        ]:  # fmt: skip
            (device,) = draw.choices(ready, [speed[d] for d in ready])
            now = left[device].pop()
            taken.update(incoming(segment, iter([now])))
            of = segment.routes.outputs[now.operation]
            sent.update((k, now.iteration) for k in of if channel_of[k] >= 0)
            ran += 1
        assert not any(left), f"seed {seed}: {[row[-1] for row in left if row]}"
        assert sent == taken and set(sent.values()) <= {1}
        order = [row for d in devices for row in incoming(segment, iter(streams[d]))]
        for k in range(len(segment.routes.messages)):
            its = [iteration for message, iteration in order if message == k]
            assert its == sorted(its)
    assert ran > 1000


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


@given(
    st.lists(tensors(), max_size=4), st.integers(0, 3), st.lists(st.integers(0, 999)),
    st.floats(allow_nan=False),
)  # fmt: skip
def test_what_is_packed_arrives(row: list[Any], flags: int, absent: list[int], loss: float) -> None:
    """Values, shapes, dtypes, `requires_grad`; contiguous, aligned, nothing copied."""
    label = Label(1, 2, 3)
    buffer = pack(label, Payload(tuple(row), flags, loss, tuple(absent)), CPU)
    assert buffer.numel() <= message_bytes([t for t in row if t is not None]) + 8 * len(absent)
    buffer = torch.cat([buffer, buffer.new_zeros(256)])
    name, longer, payload = unpack(buffer, CPU)
    assert (name, longer, *payload[1:]) == (label, 0, flags, loss, tuple(absent))
    for t, u in zip(row, payload.tensors, strict=True):
        assert (t is None) == (u is None)
        if t is None:
            continue
        assert (t.dtype, t.shape, t.requires_grad) == (u.dtype, u.shape, u.requires_grad)
        assert torch.equal(t, u)
        assert u.is_contiguous()
        assert u.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert not t.numel() or u.data_ptr() % 64 == t.data_ptr() % 64
