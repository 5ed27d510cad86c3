"""Models with a forward of their own, to be cut by tracing, and data for them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.arraypipe import Job


class Block(nn.Module):
    """Pre-norm transformer block; looks at its shape and mode, which tracing could not follow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attention and MLP."""
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        drop = 0.1 if self.training else 0.0
        if t > 1:
            v = functional.scaled_dot_product_attention(q, k, v, mask[:t, :t], drop)
        x = x + self.out(v.transpose(1, 2).reshape(n, t, width))
        return x + functional.dropout(self.mlp(self.norm2(x)), 0.1, self.training)


class Gpt(nn.Module):
    """Embedding, positions, blocks, tied head, a mask as buffer, an argument nobody gives."""

    def __init__(self, width: int = 8, vocabulary: int = 11, head: str = "tied") -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.pos = nn.Parameter(torch.randn(16, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        if head != "functional":
            self.head = nn.Linear(width, vocabulary, bias=False)
        if head == "tied":
            self.head.weight = self.embed.weight
        mask = torch.tril(torch.ones(16, 16, dtype=torch.bool))
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, one row a token."""
        n, t = tokens.shape
        assert t <= 16, f"{t} tokens"
        assert tokens.dim() == 2
        place = self.pos[torch.arange(t, device=tokens.device)]
        x = functional.dropout(self.embed(tokens) + place, 0.1, self.training)
        for block in self.blocks:
            x = block(x, self.mask)
        x = self.norm(x)
        x = self.head(x) if hasattr(self, "head") else x @ self.embed.weight.t()
        if targets is not None:
            return functional.cross_entropy(x, targets)
        return x.view(n * t, -1)


class ReadsHead(Gpt):
    """Its first stage reads a weight of the module that its last stage calls."""

    def __init__(self) -> None:
        super().__init__(head="own")

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, one row a token."""
        x = functional.embedding(tokens, self.head.weight)
        return self.head(self.blocks[1](x, self.mask)).flatten(0, 1)


class Residual(nn.Module):
    """Convolutions with batch normalisation, skips, and one ReLU in place at many places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.relu(self.stem(x))
        x = self.relu(self.bn1(self.conv1(x)) + x)
        x = self.relu(self.bn2(self.conv2(x)) + x)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Long skips, one of them used four times, and sizes taken from tensors of other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 1)
        self.up2, self.up1 = nn.Conv2d(8, 3, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        a = self.down1(x).relu_()
        b = self.down2(functional.max_pool2d(a, 2)).relu()
        y = self.middle(functional.max_pool2d(b, 2))
        y = functional.interpolate(y, size=b.shape[2:])
        y = self.up2(torch.cat([y, b], 1)) * a.mean()
        y = functional.interpolate(y, size=x.shape[-2:])
        return self.up1(torch.cat([y, a], 1)).mean((2, 3)) + 0.1 * a.flatten(2).mean(2)


class Mixed(nn.Module):
    """Two inputs, integers and booleans across cuts, a counter, constants, noise, in-place ops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.kinds = nn.Embedding(5, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.slope, self.scale = torch.arange(6.0), 0.5

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Class scores."""
        x, kind = inputs
        large = (kind > 2).unsqueeze(1)
        self.steps.add_(1)
        offset = self.slope / 10  # fixed by the trace, and changed in place in every forward
        offset.add_(x.mean())
        x = self.first(x * self.scale) + offset
        y, _ = self.lstm(x.unsqueeze(1))
        x = self.second(y[:, 0])
        x += self.kinds(kind)
        start = torch.zeros(6)
        start += 0.5
        x = x.mul_(1.5) + 0.01 * torch.randn(x.shape[0], 1) + start
        return self.third(x) + large


class Same(nn.Module):
    """Layers that return their input itself; names that a stage could have for its own things."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.index, self.whole, self.plan = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.drop, self.modes = nn.Dropout(p), nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Uses one tensor by two names in all stages."""
        x = self.index(x) * self.modes
        y = self.drop(x).contiguous()
        z = self.whole(x)
        return self.plan(z * y + x * y.sin() + self.frozen(y) * x)


def batches(make: Callable[[int, torch.Generator], Any]) -> Any:
    """A data function from one that makes a batch of this size."""

    def data(job: Job, start: int) -> Iterator[Any]:
        for iteration in range(start, 10**6):
            yield make(job.batch_size, torch.Generator().manual_seed(99 * job.seed + iteration))

    return data


def _labels(n: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 3, (n,), generator=draw)


@batches
def tokens(n: int, draw: torch.Generator) -> Any:
    """Tokens and what follows them."""
    return tuple(torch.randint(0, 11, (n, 5), generator=draw) for _ in range(2))


@batches
def images(n: int, draw: torch.Generator) -> Any:
    """Images with a class."""
    return torch.randn(n, 2, 8, 8, generator=draw), _labels(n, draw)


@batches
def pairs(n: int, draw: torch.Generator) -> Any:
    """Numbers and a kind, with a class."""
    x = torch.randn(n, 6, generator=draw)
    return (x, torch.randint(0, 5, (n,), generator=draw)), _labels(n, draw)


@batches
def rows(n: int, draw: torch.Generator) -> Any:
    """Rows of four numbers, with a class."""
    return torch.randn(n, 4, generator=draw), _labels(n, draw)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of rows."""
    return functional.cross_entropy(output, target.flatten())


@dataclass
class Output(OrderedDict[str, Any]):
    """As transformers has them: values by name, by key and by number; None is left out."""

    logits: Any
    hidden: tuple[Any, ...] | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        for name in ("logits", "hidden", "note"):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        make, _, *rest = super().__reduce__()
        return make, (self.logits, self.hidden, self.note), *rest


class Registered(Output):
    """One that torch takes apart itself."""


torch.utils._pytree.register_pytree_node(  # as transformers does
    Registered,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: Registered(**dict(zip(names, values, strict=True))),
)


class Attributes(dict[str, Any]):
    """A plain subclass of dict."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Row(NamedTuple):
    """A named tuple."""

    logits: Any
    hidden: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    """A class with no dictionary, and a field that its `__init__` does not take."""

    logits: Any
    hidden: tuple[Any, ...]
    size: int = field(init=False, default=2)


def output(kind: type, logits: Any, hidden: Any) -> Any:
    """An output of a class, with another one in it."""
    inner = (hidden, Attributes(logits=logits))
    return kind(logits=logits, hidden=inner)


class Named(nn.Module):
    """Returns an object of a class, and gives one to its last part too."""

    def __init__(self, kind: type = Output) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), Reads()
        self.drop, self.kind = nn.Dropout(0.2), kind

    def forward(self, x: Tensor) -> Any:
        """Class scores and what came before."""
        x = self.drop(self.first(x)).tanh()
        y = self.second(x)
        return output(self.kind, self.head(output(self.kind, y, x)), x)


class Reads(nn.Module):
    """Takes an output by its names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, given: Any) -> Tensor:
        """Class scores."""
        return self.linear(given.logits + given.hidden[1].logits)


def named_loss(output: Any, target: Tensor) -> Tensor:
    """Looks at attributes."""
    return loss(output.logits, target) + 0.01 * output.hidden[0].square().mean()
