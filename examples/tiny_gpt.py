"""
A small language model of bytes
===============================

Its loss and its data: plain PyTorch for ``sweep_gpt.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Size:
    """Of the model; `tied`: the head has the weight of the embedding."""

    width: int = 64
    depth: int = 6
    heads: int = 4
    context: int = 48
    tied: bool = True


class Embedding(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(256, size.width)
        self.position = nn.Embedding(size.context, size.width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Shape (batch, length) to (batch, length, width)."""
        at = torch.arange(text.shape[1], device=text.device)
        vectors: Tensor = self.token(text) + self.position(at)
        return vectors


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each behind a norm, beside a residual path."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, length, width) to the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = x + self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        return torch.add(y, self.mlp(self.norm2(y)))


def build_gpt(size: Size) -> nn.Sequential:
    """The whole model; `ArrayTrainer` cuts it, also if head and embedding share a weight."""
    embedding = Embedding(size)
    head = nn.Sequential(nn.LayerNorm(size.width), nn.Linear(size.width, 256, bias=False))
    if size.tied:
        head[1].weight = embedding.token.weight
    return nn.Sequential(embedding, *(Block(size) for _ in range(size.depth)), head)


def next_byte_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


@cache
def corpus(file: str | None = None) -> Tensor:
    """Bytes of a file, or of all sums of two numbers below a hundred, shuffled: ``17+25=42``."""
    if file is not None:
        return torch.tensor(list(Path(file).read_bytes()), dtype=torch.int64)
    lines = [f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100)]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))
    return torch.tensor(list("".join(lines[i] for i in order.tolist()).encode()))


def windows(text: Tensor, context: int) -> TensorDataset:
    """Every stretch of a text, and the bytes that follow in it."""
    stretches = text.unfold(0, context + 1, 1)
    return TensorDataset(stretches[:, :-1], stretches[:, 1:])
