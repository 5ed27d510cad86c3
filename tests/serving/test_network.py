"""SlimResNet: slices, mixed widths in one batch, work and size."""

from __future__ import annotations

from itertools import product

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from optsched.errors import InputError  # noqa: E402
from optsched.serving.network import SlimResNet, pad  # noqa: E402
from optsched.serving.workload import network_mmac  # noqa: E402

pytestmark = pytest.mark.torch

CHANNELS = (16, 32, 64, 128)
IMAGES = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def small(seed: int = 0) -> SlimResNet:
    """The net for digits."""
    return SlimResNet(10, CHANNELS, blocks=1, in_channels=1, group_channels=4, seed=seed)


def inputs(k: int, n: int) -> list[torch.Tensor]:
    """Of segment k, a batch of n of every input width: integers, exact in sums of any order."""
    if k == 0:
        return [IMAGES[:n]]
    draw, side = torch.Generator().manual_seed(k), 16 // 2 ** (k - 1)
    shapes = [(n, CHANNELS[k - 1] * (w + 1) // 4, side, side) for w in range(4)]
    return [torch.randint(-9, 10, shape, generator=draw).float() for shape in shapes]


@torch.no_grad()
def test_work_is_what_runs() -> None:
    """`mmac` is the formula of the scenarios, and what a counter of operations sees."""
    channels, widths = (16, 48, 32), (0.25, 0.5, 1.0)
    net = SlimResNet(7, channels, 3, 3, 4, widths)
    table = net.mmac(14)  # then 7, then 4
    assert table == network_mmac(channels, widths, side=14, classes=7, blocks=3, in_channels=3)
    for k, i, w in product(range(3), range(3), range(3)):
        if k or not i:
            ci = int(channels[k - 1] * widths[i]) if k else 3
            x = torch.zeros(1, ci, *[(14, 14, 7)[k]] * 2)
            with FlopCounterMode(display=False) as counter:
                net.segment(k, x, w, i)
            assert table[k][i][w] * 2e6 == pytest.approx(counter.get_total_flops()), (k, i, w)


@torch.no_grad()
def test_padded_inputs_change_nothing() -> None:
    """With integers in float64 not a bit; in float32 kernels may sum in another order."""
    net, exact = small(), small().double()
    draw = torch.Generator().manual_seed(1)
    for weight in exact.parameters():
        weight.copy_(torch.randint(-3, 4, weight.shape, generator=draw))
    for k, width, mix in product((1, 2, 3), range(4), ((0, 1, 2, 3), (0, 1), (2, 0))):
        parts = inputs(k, 2)
        batch = pad([parts[i] for i in mix])
        alone = torch.cat([exact.segment(k, parts[i].double(), width, i) for i in mix])
        mixed = exact.segment(k, batch.double(), width, max(mix))
        # the last one takes means, which are no integers any more
        torch.testing.assert_close(mixed, alone, atol=1e-12 if k == 3 else 0.0, rtol=0)
        alone = torch.cat([net.segment(k, parts[i], width, i) for i in mix])
        mixed = net.segment(k, batch, width, max(mix))
        torch.testing.assert_close(mixed, alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_an_instance_runs_all_widths_up_to_its_own() -> None:
    """From inputs of any width; wider ones are refused; its weights are copies."""
    net = small()
    for k, held in product(range(4), range(4)):
        instance = net.sliced(k, held)
        for (i, x), width in product(enumerate(inputs(k, 1)), range(held + 1)):
            found = net.segment(k, x, width, i)
            torch.testing.assert_close(instance(x, width, i), found, atol=1e-5, rtol=0)
        if held < 3:
            with pytest.raises(InputError, match=rf"width: .* 0\.\.{held}, got {held + 1}"):
                instance(inputs(k, 1)[0], held + 1, 0)
        assert len(instance.state_dict()["blocks.0.second.scale"]) == CHANNELS[k] * (held + 1) // 4
        for part in instance.parameters():
            part.zero_()
    assert torch.equal(net(IMAGES, (3,) * 4), small()(IMAGES, (3,) * 4))


def test_a_narrow_pass_trains_only_its_slice() -> None:
    """Gradients of a tuple are zero outside of its channels, and reach every layer inside."""
    net, widths = small(), (1, 0, 2, 1)
    net(IMAGES, widths).square().sum().backward()
    used = [CHANNELS[k] * (width + 1) // 4 for k, width in enumerate(widths)]
    for name, part in net.named_parameters():
        if name != "segments.3.bias":
            axis = int(name == "segments.3.weight")  # the last layer has classes first
            k = int(name.split(".")[1])
            inside, outside = part.grad.split([used[k], part.shape[axis] - used[k]], axis)
            assert inside.abs().sum() > 0, name
            assert outside.abs().sum() == 0, name
    entry = net.get_parameter("segments.1.blocks.0.first.weight")
    assert entry.grad[:, used[0] :].abs().sum() == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"channels": (16, 36)},
            "segment 1 has 9 of 36 at width 0.25, no multiple of .* 4; choose",
        ),
        ({"channels": ()}, "channels: expected one number a segment"),
        ({"channels": (16, 0)}, "channels: .* got 0"),
        ({"widths": (0.5, 0.25)}, "widths: expected ascending shares"),
    ],
)
def test_impossible_nets_are_refused(given: dict[str, object], message: str) -> None:
    """The sentence names the field and the value."""
    fields = {"classes": 10, "channels": CHANNELS, "in_channels": 1, "group_channels": 4, **given}
    with pytest.raises(InputError, match=message):
        SlimResNet(**fields)


def test_inputs_that_do_not_fit_are_refused() -> None:
    """Wrong tuples, segments, widths, channels."""
    net = small()
    with pytest.raises(InputError, match="widths: expected 4 indices"):
        net(IMAGES, (0, 0))
    with pytest.raises(InputError, match=r"width: .* 0\.\.3, got 4"):
        net(IMAGES, (0, 0, 4, 0))
    with pytest.raises(InputError, match=r"segment: .* 0\.\.3, got -1"):
        net.segment(-1, IMAGES, 0)
    with pytest.raises(InputError, match=r"x: expected shape \(n, 16, side, side\), got \(3, 1,"):
        net.segment(1, IMAGES, 0, 3)
