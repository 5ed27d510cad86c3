"""The message protocol: no live plan hangs, in any interleaving, with any window, through swaps."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from channel_model import Hang, Model, Shape, packed, random_shape, segment_of
from depth import depth
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError, OptschedError
from optsched.arraypipe.distributed import protocol
from optsched.arraypipe.distributed import protocol as header
from optsched.arraypipe.distributed.protocol import (
    FAILED,
    SIZE,
    STOP,
    TOMBSTONE,
    DevicePort,
    Header,
    ProtocolError,
    Receiver,
    Sender,
    Slot,
)
from optsched.arraypipe.plan.segments import Segment, channel_stream, device_stream
from optsched.arraypipe.plan.types import MESSAGES
from optsched.errors import InternalError

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.executor.channels import blocking, receiver_order, sender_order, share_that_hangs

TIED = Shape(
    n_stages=3,
    n_devices=2,
    microbatches=(1,),
    places=((0, 1, 1),),
    recomputed=(False,),
    updated=(False,),
    together=(),
    ties=((0, 1), (0, 2)),  # both users on one device: its owner takes two messages at once
)


def run_plan(seed: int) -> int:
    """One random plan with narrow, wide and mixed windows; blocks that were run."""
    draw = random.Random(seed)
    shape = random_shape(draw)
    segment = segment_of(shape, draw, [draw.randrange(3) for _ in shape.microbatches], 2)
    for window in (1, 2, draw.randint(3, 16), (1, 2, 5, 16)):
        model = Model([segment], window, draw)
        model.run()
        for device in model.devices:
            assert [i for _, i in device.ran] == list(device_stream(segment, device.index))
    return sum(len(device.ran) for device in model.devices)


def run_swap(seed: int) -> bool:
    """One run that is told of a new plan on its way; whether it was."""
    draw = random.Random(seed)
    shape = random_shape(draw, everywhere=True)
    first = segment_of(shape, draw, [0] * len(shape.microbatches), 8)
    second = segment_of(shape, draw, first.count, 2)
    model = Model([first, second], draw.choice([1, 2, 6, (1, 2, 5, 16)]), draw, announce=0.3)
    model.run()
    ran = Counter(
        (n, s.plan.blocks[i.operation][1:5], i.iteration)
        for device in model.devices
        for n, i in device.ran
        for s in [device.segments[n]]
    )
    wanted = Counter(
        (block, t)
        for block in {b[1:5] for b in first.plan.blocks}
        for t in range(first.count[block[1]] + second.count[block[1]])
    )
    assert Counter((block, t) for _, block, t in ran) == wanted
    borders = {(tuple(d.segments[1].first), tuple(d.segments[1].count)) for d in model.devices}
    assert len(borders) == 1  # all devices change at the same iterations
    return model.announced_in >= 0


def test_random_plans_never_hang() -> None:
    """Windows 1, 2, offsets, copies, ties, clipping, skipped iterations; each list in its order."""
    assert sum(run_plan(seed) for seed in range(depth(100, 300))) > 1000


@pytest.mark.slow
def test_ten_thousand_random_plans_never_hang() -> None:
    """The same on 10,000 plans."""
    assert sum(run_plan(seed) for seed in range(1000, 11000)) > 200_000


def test_all_devices_change_plans_at_the_same_iteration() -> None:
    """News of a swap reaches every device before it has posted too much; no iteration is lost."""
    assert sum(run_swap(seed) for seed in range(depth(40, 100))) > 5


@pytest.mark.slow
def test_many_swaps() -> None:
    """The same on 1,000 runs."""
    assert sum(run_swap(seed) for seed in range(100, 1100)) > 300


# the model notices broken protocols


def test_noticed_sender_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages sent when they are made, not when the receiver wants them, hang or are mixed up."""

    def take(self: Sender) -> list[object]:
        ready, self._ready = self._ready, set()
        rest = [self._messages._next, *self._messages._rest]
        self._messages._next = None
        self._messages._rest = iter([t for t in rest if t and t[::2] not in ready])
        return sorted(t for t in rest if t and t[::2] in ready)

    monkeypatch.setattr(Sender, "take", take)
    noticed = 0
    for seed in range(60):
        try:
            run_plan(seed)
        except (ProtocolError, Hang, AssertionError, InternalError):
            noticed += 1
        if noticed > 5:
            return
    raise AssertionError("not noticed")


def test_noticed_too_early_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receives posted more cycles ahead than a swap counts on are left behind by it."""
    counted_on = protocol.AHEAD
    monkeypatch.setattr(protocol, "AHEAD", 5)
    monkeypatch.setattr(
        "channel_model.first_cycle",
        lambda segment, cycle: protocol.first_cycle(segment, cycle) - 5 + counted_on,
    )
    with pytest.raises(AssertionError):
        for seed in range(100):
            run_swap(seed)


def test_noticed_too_early_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that leaves no time for its news to arrive is noticed."""
    monkeypatch.setattr("channel_model.first_cycle", lambda segment, cycle: cycle + 1)
    with pytest.raises((AssertionError, InternalError, ProtocolError)):
        for seed in range(60):
            run_swap(seed)


# sender and receiver


def small(ties: bool = False) -> Segment:
    """A segment of a few iterations on two devices or more."""
    draw = random.Random(4)
    shape = TIED if ties else random_shape(draw, everywhere=True)
    segment = segment_of(shape, draw, [0] * len(shape.microbatches), 3)
    segment.count[:] = [3] * len(segment.count)
    return segment


@given(st.randoms(use_true_random=False))
def test_a_sender_takes_the_longest_ready_prefix(draw: random.Random) -> None:
    """Whatever the order in which messages are finished, they leave in the receiver's order."""
    segment = small()
    for channel in range(len(segment.routes.channels)):
        order = list(channel_stream(segment, channel))
        left = draw.sample(order, len(order))
        sender, sent = Sender(segment, channel), []
        while left:
            transfer = left.pop()
            sender.finished(transfer.message, transfer.iteration)
            sent += sender.take()
            ready = [t not in left for t in order]
            assert sent == order[: ready.index(False) if False in ready else len(order)]
        assert sender.waiting == 0


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_a_receiver_posts_a_window_of_blocks(window: int) -> None:
    """In the order of consumption, none twice; when half of a window is free all of it is filled.

    Never for a cycle beyond the next one.
    """
    segment = small()
    for channel in range(len(segment.routes.channels)):
        order = list(channel_stream(segment, channel))
        receiver, posted = Receiver(segment, channel, window), []
        for k, transfer in enumerate(order):
            outstanding = len(posted) - k
            posted += receiver.to_post(transfer.cycle)
            assert receiver.to_post(transfer.cycle) == []
            ahead = [t for t in order if t.cycle <= transfer.cycle + 1]
            filled = outstanding <= window // 2
            assert posted == ahead[: k + (window if filled else outstanding)]
            receiver.consumed(transfer)
        assert receiver.to_post(10**6) == []


def test_what_one_block_takes_is_posted_together() -> None:
    """Two gradients of a tied weight go to one block: window 1 must hold both, or it would wait."""
    segment = small(ties=True)
    channel = next(k for k, c in enumerate(segment.routes.channels) if c.kind == "tied")
    receiver = Receiver(segment, channel, 1)
    first = receiver.to_post(0)
    assert len(first) == 2
    receiver.consumed(first[0])
    assert receiver.to_post(1) == []  # the block is not over yet
    receiver.consumed(first[1])
    assert len(receiver.to_post(1)) == 2
    Model([segment], 1, random.Random(0)).run()


def test_consumption_out_of_order_is_refused() -> None:
    """A driver that consumes another message than the one that is due has a bug."""
    segment = small()
    order = list(channel_stream(segment, 0))
    receiver = Receiver(segment, 0, 2)
    with pytest.raises(InternalError, match="nothing was due"):
        receiver.consumed(order[0])
    receiver.to_post(0)
    with pytest.raises(InternalError, match="was consumed while"):
        receiver.consumed(order[1])


def test_a_port_is_closed_when_all_is_done() -> None:
    """A device may leave a segment only with nothing posted and nothing unsent."""
    segment = small()
    port = DevicePort(segment, segment.routes.channels[0].target)
    port.close()
    port.post(0)
    with pytest.raises(InternalError, match="is posted at the end"):
        port.close()


@pytest.mark.parametrize("window", [0, -1])
def test_windows_below_one(window: int) -> None:
    """Refused by name."""
    with pytest.raises(InputError, match=f"window: expected an integer >= 1, got {window}"):
        Receiver(small(), 0, window)


def test_a_swap_is_announced_only_if_all_will_hear_of_it() -> None:
    """Near the end, or without a job that is on every device, nobody could tell them."""
    draw = random.Random(1)
    segment = segment_of(TIED, draw, [0], 5)
    segment.count[:] = [5 * segment.plan.copies[0]]
    assert [protocol.is_heard(segment, c) for c in range(5)] == [True, True, True, True, False]
    alone = segment_of(TIED._replace(places=((0, 0, 0),)), draw, [0], 5)
    alone.count[:] = [5]
    assert not protocol.is_heard(alone, 0)


# the header


def slots() -> st.SearchStrategy[Slot]:
    """Any slot."""
    small, large = st.integers(0, 2**15), st.integers(0, 2**62)
    return st.builds(Slot, small, st.sampled_from(MESSAGES), small, large, small, small, small)


@given(
    slots(),
    st.integers(0, 7),
    st.floats(),
    st.integers(0, 2**50),
    st.integers(-1, 9),
    st.integers(),
)
def test_headers_survive_packing(
    slot: Slot, flags: int, loss: float, payload: int, number: int, cycle: int
) -> None:
    """64 bytes, and back what was put in, NaN and infinities included."""
    cycle %= 2**40
    given_header = Header(slot, flags, loss, payload, number, cycle)
    data = packed(given_header)
    assert len(data) == SIZE
    back = header.unpack(data)
    assert back.loss == loss or (math.isnan(back.loss) and math.isnan(loss))
    assert back._replace(loss=0.0) == given_header._replace(loss=0.0)


@given(st.binary(max_size=80))
def test_hostile_bytes_are_no_header(data: bytes) -> None:
    """Anything else is refused in a sentence."""
    with pytest.raises(ProtocolError, match=r"expected|damaged"):
        header.unpack(data)


def test_damaged_headers_are_refused() -> None:
    """Wrong release, unknown kinds and flags."""
    data = bytearray(packed(Header(Slot(0, "gradient", 1, 2, 3, 4, 5), STOP | FAILED)))
    for place, value in ((4, 9), (5, len(MESSAGES)), (6, 16)):
        damaged = bytearray(data)
        damaged[place] = value
        with pytest.raises(ProtocolError):
            header.unpack(damaged)


def test_a_mismatch_names_both() -> None:
    """Expected and received are in the message, and so is the sender; it is an OptschedError."""
    expected = Slot(0, "gradient", 1, 7, 3, 2, 0)
    header.check(expected, Header(expected, payload=10), SIZE + 10, "gpu3")
    header.check(expected, Header(expected, TOMBSTONE), SIZE, "gpu3")
    with pytest.raises(OptschedError) as error:
        header.check(expected, Header(expected._replace(iteration=8), payload=1), SIZE + 1, "gpu3")
    assert all(word in str(error.value) for word in ("gpu3", "iteration 7", "iteration 8"))
    for wrong, length in ((Header(expected), SIZE), (Header(expected, payload=10), SIZE + 9)):
        with pytest.raises(ProtocolError, match="bytes of payload"):
            header.check(expected, wrong, length, "gpu3")


# the comparison of the documentation


def test_only_receivers_order_never_hangs() -> None:
    """The other orders of messages hang on schedules that are feasible."""
    assert share_that_hangs(4, 2, 40, blocking) > 0.9
    assert share_that_hangs(8, 8, 20, sender_order(2)) > 0.8
    assert share_that_hangs(4, 2, 20, sender_order(4)) == 0.0  # a window of all jobs is enough
    for window in (1, 2):
        assert share_that_hangs(8, 8, 20, receiver_order(window)) == 0.0


def test_the_state_machine_needs_no_torch() -> None:
    """Protocol, headers and swaps are planned without it."""
    code = (
        "import sys; from optsched.arraypipe.distributed import protocol; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
