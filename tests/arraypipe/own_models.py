"""Models with a forward of their own, to be cut at their blocks, and data for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.arraypipe import Job

WIDTH, WORDS = 8, 11


@dataclass(frozen=True)
class Kind:
    """What a model has beside its blocks, and how it calls them."""

    depth: int = 3
    pair: bool = False  # hidden states are a tuple, half of which needs no gradient
    named: bool = False  # blocks get their arguments by name
    transposed: bool = False  # hidden states are not contiguous
    output: str = "tensor"  # of a block: tensor, tuple, dict
    prologue: bool = False  # random numbers and normalisation before the first block
    direct: bool = False  # parameters and buffers of the model itself
    tied: bool = False
    nested: bool = False  # blocks below two modules that are not called
    shared_dropout: bool = False
    guarded: bool = False  # calls within try, autocast and another context
    in_place: bool = False  # blocks change what they get
    checkpoint: bool = False


class Block(nn.Module):
    """Mixes tokens and features; looks at shapes, modes and an argument beside the states."""

    def __init__(self, kind: Kind, number: int) -> None:
        super().__init__()
        self.kind, self.number = kind, number
        # a checkpoint updates statistics again, whenever the backward comes
        norm: Any = nn.LayerNorm if kind.checkpoint else nn.BatchNorm1d
        self.norm, self.mix = norm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, states: Any, mask: Tensor, scale: float = 1.0) -> Any:
        """The same form as `states`, in a container."""
        x, other = states if self.kind.pair else (states, None)
        if self.kind.in_place and not self.kind.checkpoint:
            x = x.mul_(1.0 + 0.1 * self.number)
        if self.kind.transposed:
            x, mask = x.transpose(0, 1), mask.T
        y = self.norm(x.flatten(0, 1)).view(x.shape) * mask.unsqueeze(-1)
        x = x + self.drop(torch.tanh(self.mix(y))) * scale
        if self.kind.transposed:
            x = x.transpose(0, 1)
        found = (x, x.detach() + other) if self.kind.pair else x
        if self.kind.output == "dict":
            return {"states": found, "number": self.number}
        return (found, None) if self.kind.output == "tuple" else found


class Holder(nn.Module):
    """A module that is not called itself."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks


class Model(nn.Module):
    """Embedding, blocks, head; what else there is says `Kind`."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(WORDS, WIDTH)
        blocks = nn.ModuleList(Block(kind, k) for k in range(kind.depth))
        if kind.nested:
            self.inner = Holder(nn.ModuleList())
            self.inner.blocks = blocks
        else:
            self.blocks = blocks
        if kind.prologue:
            self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
            self.state = nn.BatchNorm1d(WIDTH, affine=False)
        if kind.direct:
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.shift = nn.Parameter(torch.zeros(WORDS))
            self.register_buffer("ramp", torch.linspace(0.5, 1.0, WIDTH), persistent=False)
        if kind.shared_dropout:
            self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if kind.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of all tokens."""
        x = self.embed(tokens)
        mask = torch.ones_like(tokens) if mask is None else mask
        if self.kind.prologue:
            x = self.first(x)
            x = x + self.state(x.flatten(0, 1)).view(x.shape)
        if self.kind.direct:
            x = x * self.scale + self.ramp
        if self.kind.shared_dropout:
            x = self.drop(x)
        states = (x, torch.zeros_like(x)) if self.kind.pair else x
        for block in self.inner.blocks if self.kind.nested else self.blocks:
            states = self._call(block, states, mask.to(x.dtype))
            if self.kind.output == "dict":
                states = states["states"]
            elif self.kind.output == "tuple":
                states = states[0]
        x = states[0] * states[1].sigmoid() if self.kind.pair else states
        if self.kind.shared_dropout:
            x = self.drop(x)
        x = self.head(x)
        if self.kind.direct:
            x = x + self.shift
        return x.flatten(0, 1)

    def _call(self, block: nn.Module, states: Any, mask: Tensor) -> Any:
        if self.kind.checkpoint:
            call = torch.utils.checkpoint.checkpoint
            return call(block, states, mask, use_reentrant=False)
        given: dict[str, Any] = {"mask": mask, "states": states} if self.kind.named else {}
        if not self.kind.guarded:
            return block(**given) if given else block(states, mask, scale=0.5)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=False), torch.enable_grad():
                return block(**given) if given else block(states, mask)
        except Exception:
            return None
        finally:
            assert torch.is_grad_enabled()


def tokens(job: Job, start: int) -> Iterator[Any]:
    """Token rows of several lengths, and what follows them."""
    for iteration in range(start, 10**6):
        draw = torch.Generator().manual_seed(99 * job.seed + iteration)
        shape = (job.batch_size, 4 + iteration % 2)
        yield tuple(torch.randint(0, WORDS, shape, generator=draw) for _ in range(2))


def rows(job: Job, start: int) -> Iterator[Any]:
    """Rows of numbers, with a class."""
    for iteration in range(start, 10**6):
        draw = torch.Generator().manual_seed(99 * job.seed + iteration)
        yield (
            torch.randn(job.batch_size, WIDTH, generator=draw),
            torch.randint(0, 3, (job.batch_size,), generator=draw),
        )


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of rows."""
    return functional.cross_entropy(output, target.flatten())
