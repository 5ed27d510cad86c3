"""The network of the learned surrogate and its training: hosts are tokens without an order."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, smooth_l1_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from optsched.bandwidth.models.surrogate_tokens import Samples, Scaling
    from optsched.model.schedule import IntArray

    Weights = Mapping[str, npt.NDArray[np.float32]]

WIDTH: Final = 32
HEADS: Final = 8
LAYERS: Final = 6
INNER: Final = 64
"""Width between the two matrices of a feed-forward block."""
DROPOUT: Final = 0.05
FEATURES: Final = 3
"""Of a host: bandwidth within it, number of GPUs, whether it is only one."""
BATCH: Final = 16
RATE: Final = 1e-3


class SurrogateNetwork(nn.Module):
    """Encoder over the used hosts, attention pooling, and a head that also sees the total."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.score = nn.Linear(WIDTH, 1)
        self.head = nn.Sequential(
            nn.Linear(WIDTH + 1, WIDTH), nn.ReLU(), nn.Dropout(DROPOUT),
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(WIDTH, 1),
        )  # fmt: skip

    def forward(self, hosts: Tensor, total: Tensor, present: Tensor) -> Tensor:
        """Scaled logarithm of the bandwidth, shape (samples,).

        `hosts` has shape (samples, hosts, FEATURES); those not `present`, shape (samples, hosts),
        enter no attention and not the pooling.
        """
        x = self.embedding(hosts)
        for layer in self.layers:
            x = layer(x, present)
        x = rms_norm(x, (WIDTH,))
        share = self.score(x).masked_fill(~present.unsqueeze(2), -torch.inf).softmax(1)
        pooled = (share * x).sum(1)
        found: Tensor = self.head(torch.cat([pooled, total.unsqueeze(1)], 1)).squeeze(1)
        return found


class EncoderLayer(nn.Module):
    """Self-attention over hosts and a feed-forward block, each behind a norm without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.widen = nn.Linear(WIDTH, INNER)
        self.narrow = nn.Linear(INNER, WIDTH, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """One layer; `x` has shape (samples, hosts, WIDTH)."""
        n, m, _ = x.shape
        together = self.query_key_value(rms_norm(x, (WIDTH,)))
        query, key, value = together.view(n, m, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, present[:, None, None], scale=1.0)
        x = x + self.mix(self.dropout(seen.transpose(1, 2).reshape(n, m, WIDTH)))
        inner = self.widen(rms_norm(x, (WIDTH,))).relu()
        found: Tensor = x + self.narrow(self.dropout(inner))
        return found


def train(
    samples: Samples, scaling: Scaling, seed: int, epochs: int
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights after training: smooth L1 of scaled logarithms, Adam with a cosine rate.

    Being above a censored value is no error.
    """
    with undisturbed(seed), torch.enable_grad():
        network = SurrogateNetwork()
        draw = np.random.default_rng((seed, 1))
        inputs = _inputs(scaling, samples.tokens)
        target, censored = map(torch.tensor, (scaling.written(samples.values), samples.censored))
        n = len(samples.values)
        optimizer = torch.optim.Adam(network.parameters(), lr=RATE, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        for _ in range(epochs):
            for batch in np.array_split(draw.permutation(n), max(1, round(n / BATCH))):
                rows = torch.tensor(batch)
                optimizer.zero_grad(set_to_none=True)
                over = network(*(part[rows] for part in inputs)) - target[rows]
                over = torch.where(censored[rows] & (over > 0), 0.0, over)
                smooth_l1_loss(over, torch.zeros_like(over)).backward()
                optimizer.step()
            schedule.step()
        return {name: p.detach().numpy().copy() for name, p in network.named_parameters()}


def network_of(weights: Weights) -> SurrogateNetwork:
    """A network with these weights; `RuntimeError` if they are those of no such network."""
    with undisturbed():
        network = SurrogateNetwork().eval()
        network.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
        return network


def outputs(
    network: nn.Module, scaling: Scaling, tokens: IntArray, together: int
) -> npt.NDArray[np.float32]:
    """Outputs of a network, shape (n,), in batches of `together` sets."""
    with undisturbed(), torch.inference_mode():
        batches = zip(*(part.split(together) for part in _inputs(scaling, tokens)), strict=True)
        found: npt.NDArray[np.float32] = torch.cat([network(*batch) for batch in batches]).numpy()
        return found


@contextmanager
def undisturbed(seed: int = 0) -> Iterator[None]:
    """On the CPU, seeded, on one thread (the fastest here); afterwards all is as it was."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=()),
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
        ):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def _inputs(scaling: Scaling, tokens: IntArray) -> tuple[Tensor, Tensor, Tensor]:
    hosts, total = scaling.read(tokens)
    return torch.tensor(hosts), torch.tensor(total), torch.tensor(tokens > 0)
