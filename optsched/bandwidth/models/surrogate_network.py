"""The network of the learned surrogate: hosts are tokens, and nothing tells their order."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

WIDTH: Final = 32
HEADS: Final = 8
LAYERS: Final = 6
INNER: Final = 64
"""Width between the two matrices of a feed-forward block."""
DROPOUT: Final = 0.05
"""Share of the inner values that a training step leaves out."""
FEATURES: Final = 3
"""Of a host: bandwidth within it, number of GPUs, whether it is only one."""

_EACH: Final = WIDTH // HEADS


class SurrogateNetwork(nn.Module):
    """Encoder over the used hosts, attention pooling, and a head that also sees the total.

    Tensors run from feature to host to sample, so that all work is on long rows: twice as fast as
    the usual order for this many tiny samples. There is no positional encoding.

    Parameters
    ----------
    seed
        Of the initial weights; torch's own generator is not touched.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator(device="cpu").manual_seed(seed)
        self.embedding = Linear(FEATURES, WIDTH, draw)
        self.layers = nn.ModuleList(EncoderLayer(draw) for _ in range(LAYERS))
        self.score = Linear(WIDTH, 1, draw)
        self.head = nn.ModuleList(
            Linear(a, b, draw) for a, b in ((WIDTH + 1, WIDTH), (WIDTH, WIDTH), (WIDTH, 1))
        )

    def forward(
        self,
        hosts: Tensor,
        total: Tensor,
        absent: Tensor | None = None,
        draw: torch.Generator | None = None,
    ) -> Tensor:
        """Scaled logarithm of the bandwidth, shape (samples,).

        Parameters
        ----------
        hosts
            Scaled features, shape (FEATURES, hosts, samples).
        total
            Scaled total number of GPUs, shape (samples,).
        absent
            0 where a host is used and -inf where it is not, shape (hosts, samples); None if all
            are. It enters every attention and the pooling.
        draw
            For dropout; None, as in all predictions, is none.
        """
        _, m, n = hosts.shape
        x = self.embedding(hosts.reshape(FEATURES, m * n))
        for layer in self.layers:
            x = layer(x, m, n, absent, draw)
        x = norm(x).view(WIDTH, m, n)
        score = self.score(x.view(WIDTH, m * n)).view(m, n)
        if absent is not None:
            score = score + absent
        pooled = (score.softmax(0) * x).sum(1)
        y = torch.cat([pooled, total.view(1, n)])
        first, second, last = self.head
        y = dropped(second(dropped(first(y).relu_(), draw)).relu_(), draw)
        return last(y).view(n)  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Self-attention over hosts and a feed-forward block, each behind a norm (pre-norm).

    Offsets are only where they are needed, before the cut at 0: memory is what takes the time.
    """

    def __init__(self, draw: torch.Generator) -> None:
        super().__init__()
        self.query_key_value = nn.Parameter(_drawn(3 * WIDTH, WIDTH, draw))
        self.mix = nn.Parameter(_drawn(WIDTH, WIDTH, draw))
        self.widen = Linear(WIDTH, INNER, draw)
        self.narrow = nn.Parameter(_drawn(WIDTH, INNER, draw))

    def forward(
        self, x: Tensor, m: int, n: int, absent: Tensor | None, draw: torch.Generator | None
    ) -> Tensor:
        """One layer; `x` has shape (WIDTH, m * n)."""
        together = torch.mm(self.query_key_value, norm(x))
        query, key, value = together.view(3, HEADS, _EACH, m, n).unbind(0)
        seen = attention(query, key, value, absent).reshape(WIDTH, m * n)
        x = torch.addmm(x, self.mix, dropped(seen, draw))
        return torch.addmm(x, self.narrow, dropped(self.widen(norm(x)).relu_(), draw))


class Linear(nn.Module):
    """A matrix and an offset for columns, drawn as torch's own layer draws them."""

    def __init__(self, inputs: int, outputs: int, draw: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(_drawn(outputs, inputs, draw))
        bound = 1 / math.sqrt(inputs)
        self.bias = nn.Parameter(_drawn(outputs, 1, draw) * bound)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (inputs, columns) to (outputs, columns)."""
        return torch.mm(self.weight, x).add_(self.bias)  # addmm would copy the bias first


def norm(x: Tensor) -> Tensor:
    """Every column with root mean square 1; weights are left to the matrix behind it."""
    scale = (x * x).sum(0, keepdim=True).mul_(1 / WIDTH).add_(1e-5).rsqrt_()
    return x * scale


def dropped(x: Tensor, draw: torch.Generator | None) -> Tensor:
    """Some values left out and the others enlarged; torch's own takes its global generator."""
    if draw is None:
        return x
    kept = torch.rand(x.shape, generator=draw, dtype=torch.float32, device="cpu") >= DROPOUT
    return x * kept * (1 / (1 - DROPOUT))


def attention(query: Tensor, key: Tensor, value: Tensor, absent: Tensor | None) -> Tensor:
    """Dot products of every host with every used host, all of shape (heads, each, m, n).

    Their scale is left to the weights of the queries.
    Hosts and features of a head are few and samples many: sums of products along the samples beat
    thousands of matrix products of size 4.
    """
    each, m = query.shape[1], query.shape[2]
    score = query[:, 0].unsqueeze(2) * key[:, 0].unsqueeze(1)  # (heads, m asking, m asked, n)
    for i in range(1, each):
        score = torch.addcmul(score, query[:, i].unsqueeze(2), key[:, i].unsqueeze(1))
    if absent is not None:
        score = score + absent
    share = score.softmax(2).unsqueeze(1)
    seen = share[:, :, :, 0] * value[:, :, 0:1]
    for i in range(1, m):
        seen = torch.addcmul(seen, share[:, :, :, i], value[:, :, i : i + 1])
    return seen


def forward(network: nn.Module, hosts: Floats, total: Floats) -> Floats:
    """Outputs for sets that use all these hosts, without learning."""
    with undisturbed(), torch.inference_mode():
        inputs = (torch.from_numpy(np.ascontiguousarray(part)) for part in (hosts, total))
        found: Floats = network(*inputs).numpy()
        return found


@contextmanager
def undisturbed(threads: int = 1) -> Iterator[None]:
    """Work on so many threads, whatever the caller has set; afterwards it is as it was.

    One thread is the fastest for matrices this small, and its sums are the same on every machine
    with these libraries.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(before)


def tensor(array: npt.NDArray[np.generic]) -> Tensor:
    """A copy as a tensor on the CPU, whatever the caller's default device is."""
    return torch.tensor(array, device="cpu")


def _drawn(outputs: int, inputs: int, draw: torch.Generator) -> Tensor:
    empty = torch.empty((outputs, inputs), dtype=torch.float32, device="cpu")
    bound = 1 / math.sqrt(inputs)
    return empty.uniform_(-bound, bound, generator=draw)
