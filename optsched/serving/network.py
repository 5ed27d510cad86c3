"""SlimResNet: an image classifier in segments, each runnable at several widths."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from optsched.errors import InputError, MissingExtra
from optsched.io.values import integer, number
from optsched.serving.accuracy import WIDTHS
from optsched.serving.workload import network_mmac

try:
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import conv2d, group_norm, linear
except ImportError:
    raise MissingExtra("a slimmable network", "serving") from None

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_SIZE = 2**16  # of channels, classes and sides


class SlimResNet(nn.Module):
    """Residual network whose narrow widths are slices of one set of weights.

    A 3x3 convolution (the stem), segments of basic blocks (He et al. 2016), the mean over all
    positions and a linear layer. A width w uses the first w * channels of every layer (slimmable
    networks, Yu et al. 2018). The groups of the norms (Wu & He 2018) have the same number of
    channels at every width, so that a slice is normalised as in the wide net.

    Parameters
    ----------
    classes
        Outputs.
    channels
        Of every segment at width 1. The first keeps the side of the image, the others halve it.
    blocks
        Basic blocks of two 3x3 convolutions a segment.
    in_channels
        Of an image.
    group_channels
        Channels per group of the norms; divides those of every segment and width.
    widths
        Shares of the channels, ascending.
    seed
        Of the initial weights; the global generator of torch is not used.
    """

    def __init__(
        self,
        classes: int,
        channels: Sequence[int] = (64, 128, 256, 512),
        blocks: int = 2,
        in_channels: int = 3,
        group_channels: int = 8,
        widths: Sequence[float] = WIDTHS,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.classes = integer("classes", classes, 1, _MAX_SIZE)
        self.blocks = integer("blocks", blocks, 1, 64)
        self.in_channels = integer("in_channels", in_channels, 1, _MAX_SIZE)
        self.group_channels = integer("group_channels", group_channels, 1, _MAX_SIZE)
        self.channels = tuple(integer("channels", c, 1, _MAX_SIZE) for c in channels)
        if not self.channels:
            raise InputError("channels: expected one number a segment, got none")
        self.widths = tuple(number("widths", w, what="a share") for w in widths)
        if not self.widths or any(a >= b for a, b in pairwise((0.0, *self.widths, 1.0 + 1e-9))):
            raise InputError(f"widths: expected ascending shares in (0, 1], got {self.widths}")
        segments = range(len(self.channels))
        self.segments = nn.ModuleList(Segment(self, k, len(self.widths)) for k in segments)
        draw = torch.Generator(device="cpu").manual_seed(integer("seed", seed, 0, 2**31 - 1))
        for weight in self.parameters():
            if weight.ndim > 1 and not weight.is_meta:  # norms are initialised as 1 and 0
                nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=draw)
        with torch.no_grad():  # small initial logits
            self.get_parameter(f"segments.{segments[-1]}.weight").mul_(0.1)

    def forward(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return logits, shape (n, classes), for a tuple of width indices, one a segment."""
        if len(widths) != len(self.channels):
            raise InputError(f"widths: expected {len(self.channels)} indices, got {widths!r:.60}")
        before = 0
        for k, width in enumerate(widths):
            x, before = self.segment(k, x, width, before), width
        return x

    def segment(self, k: int, x: Tensor, width: int, input_width: int = 0) -> Tensor:
        """Run one segment; see `Segment.forward`."""
        integer("segment", k, 0, len(self.channels) - 1)
        return self.segments[k](x, width, input_width)  # type: ignore[no-any-return]

    def sliced(self, k: int, width: int) -> Segment:
        """Return a copy of segment k for widths up to this one: the content of an instance."""
        integer("segment", k, 0, len(self.channels) - 1)
        integer("width", width, 0, len(self.widths) - 1)
        whole = self.segments[k].state_dict()
        with torch.device("meta"):  # the weights are replaced
            found = Segment(self, k, width + 1)
        corners = {
            name: whole[name][tuple(slice(n) for n in part.shape)].clone()
            for name, part in found.state_dict().items()
        }
        found.load_state_dict(corners, assign=True)
        return found

    def mmac(self, side: int = 32) -> list[list[list[float]]]:
        """Return millions of multiply-accumulates an image, [segment][input width][width]."""
        return network_mmac(
            self.channels, self.widths, side=integer("side", side, 1, _MAX_SIZE),
            classes=self.classes, blocks=self.blocks, in_channels=self.in_channels,
        )  # fmt: skip

    def channels_of(self, k: int) -> list[int]:
        """Return the channels of segment k by width."""
        found = [self.channels[k] * width for width in self.widths]
        for width, count in zip(self.widths, found, strict=True):
            whole = math.isclose(count, round(count)) and round(count) > 0
            if not whole or round(count) % self.group_channels:
                raise InputError(
                    f"channels: segment {k} has {count:g} of {self.channels[k]} at width "
                    f"{width:g}, no multiple of group_channels {self.group_channels}; choose other "
                    "channels, widths or group_channels"
                )
        return [round(count) for count in found]


class Segment(nn.Module):
    """Segment k of a net at the first `held` widths: the content of an instance.

    An input enters through convolutions only, never through an identity shortcut (the first segment
    begins with the stem, the others with a projection), so zero channels added by `pad` change
    nothing.
    """

    def __init__(self, net: SlimResNet, k: int, held: int) -> None:
        super().__init__()
        self.inputs = net.channels_of(k - 1) if k else [net.in_channels]
        self.outputs = net.channels_of(k)[:held]
        last, group = k == len(net.channels) - 1, net.group_channels
        ci, co = self.inputs[-1], self.outputs[-1]
        self.stem = None if k else Convolution(ci, co, 3, group)
        first = Block(ci, co, group, 2) if k else Block(co, co, group)
        more = [Block(co, co, group) for _ in range(net.blocks - 1)]
        self.blocks = nn.ModuleList([first, *more])
        self.weight = nn.Parameter(torch.empty(net.classes, co)) if last else None
        self.bias = nn.Parameter(torch.zeros(net.classes)) if last else None

    def forward(self, x: Tensor, width: int, input_width: int = 0) -> Tensor:
        """Return activations, or logits of the last segment, at the width of an index.

        `x` has shape (n, channels, side, side); its channels are those of `input_width` (0 for
        images).
        """
        co = self.outputs[integer("width", width, 0, len(self.outputs) - 1)]
        ci = self.inputs[integer("input_width", input_width, 0, len(self.inputs) - 1)]
        if x.ndim != 4 or x.shape[1] != ci:
            raise InputError(f"x: expected shape (n, {ci}, side, side), got {tuple(x.shape)}")
        if self.stem is not None:
            x = self.stem(x, co).relu()
        for block in self.blocks:
            x = block(x, co)
        return x if self.weight is None else linear(x.mean((2, 3)), self.weight[:, :co], self.bias)


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a projection if there is a stride."""

    def __init__(self, ci: int, co: int, group: int, stride: int = 1) -> None:
        super().__init__()
        self.first = Convolution(ci, co, 3, group, stride)
        self.second = Convolution(co, co, 3, group)
        self.shortcut = Convolution(ci, co, 1, group, stride) if stride > 1 else None

    def forward(self, x: Tensor, co: int) -> Tensor:
        """Run the block with `co` output channels."""
        around = x if self.shortcut is None else self.shortcut(x, co)
        return (self.second(self.first(x, co).relu(), co) + around).relu()  # type: ignore[no-any-return]


class Convolution(nn.Module):
    """A square kernel and a norm; runs with the first input and output channels."""

    def __init__(self, ci: int, co: int, size: int, group: int, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(co, ci, size, size))
        self.scale, self.offset = nn.Parameter(torch.ones(co)), nn.Parameter(torch.zeros(co))
        self.stride, self.group = stride, group

    def forward(self, x: Tensor, co: int) -> Tensor:
        """Shape (n, ci, side, side) to (n, co, side / stride, side / stride)."""
        weight = self.weight[:co, : x.shape[1]]
        x = conv2d(x, weight, stride=self.stride, padding=weight.shape[-1] // 2)
        return group_norm(x, co // self.group, self.scale[:co], self.offset[:co])


def pad(batches: Sequence[Tensor]) -> Tensor:
    """Concatenate batches of different widths, padding channels with zeros."""
    widest = max(part.shape[1] for part in batches)
    more = nn.functional.pad
    return torch.cat([more(part, (0, 0, 0, 0, 0, widest - part.shape[1])) for part in batches])
