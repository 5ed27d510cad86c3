"""A slimmable perceptron: a network in segments that is none of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import linear

if TYPE_CHECKING:
    from torch import Tensor


class Layer(nn.Module):
    """A linear layer that runs with its first inputs and outputs."""

    def __init__(self, inputs: int, outputs: list[int]) -> None:
        super().__init__()
        self.full, self.outputs = nn.Linear(inputs, outputs[-1]), outputs

    def forward(self, x: Tensor, width: int, _input_width: int) -> Tensor:
        """Refuse negative numbers above a million, so that tests can make a batch fail."""
        if (x < -1e6).any():
            raise ValueError("poison")
        n = self.outputs[width]
        return linear(x, self.full.weight[:n, : x.shape[1]], self.full.bias[:n]).relu()


class Perceptron(nn.Module):
    """Three layers; `segments` and `widths` are all that a server needs."""

    widths = (0.5, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.segments = nn.ModuleList([Layer(6, [8, 16]), Layer(16, [8, 16]), Layer(16, [4, 4])])

    def forward(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Run all segments, at a width each."""
        before = 0
        for segment, width in zip(self.segments, widths, strict=True):
            x, before = segment(x, width, before), width
        return x
