"""How the learned surrogate is trained, and trained on when new measurements come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import smooth_l1_loss

from optsched.bandwidth.models.surrogate_network import (
    SurrogateNetwork,
    tensor,
    undisturbed,
)
from optsched.bandwidth.models.surrogate_tokens import patterns_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from optsched.bandwidth.models.surrogate_tokens import Samples, Scaling

    Weights = Mapping[str, npt.NDArray[np.float32]]

BATCH: Final = 16
RATE: Final = 1e-3
PATIENCE: Final = 80
"""Epochs without a better validation loss after which training ends."""
TUNING: Final = 60
"""Epochs of an update."""
TUNING_RATE: Final = 3e-4
PENALTY: Final = 2.0
"""Weight of the elastic penalty; Kirkpatrick et al. 2017, eq. 3."""


class Epoch(NamedTuple):
    """Progress of a training."""

    epoch: int
    """From 1."""
    epochs: int
    """At most."""
    training: float
    """Mean loss over the batches."""
    validation: float
    """Loss on the patterns kept for validation; NaN without such patterns."""


class Examples(NamedTuple):
    """Samples as tensors, each with the samples along its last axis."""

    hosts: Tensor
    total: Tensor
    absent: Tensor
    target: Tensor
    censored: Tensor

    @classmethod
    def of(cls, samples: Samples, scaling: Scaling) -> Examples:
        """Scaled samples."""
        hosts, total = scaling.read(samples.tokens)
        absent = np.where(samples.tokens.T > 0, 0, -np.inf).astype(np.float32)
        target = scaling.written(samples.values)
        parts = (hosts, total, absent, target, samples.censored)
        return cls(*(tensor(part) for part in parts))

    def take(self, rows: Tensor) -> Examples:
        """Some of them."""
        return Examples(*(part[..., rows] for part in self))

    def __add__(self, other: Examples) -> Examples:  # type: ignore[override]
        return Examples(*(torch.cat(pair, -1) for pair in zip(self, other, strict=True)))


def train(
    samples: Samples,
    scaling: Scaling,
    seed: int,
    epochs: int,
    validation: float = 0.0,
    threads: int = 1,
    on_progress: Callable[[Epoch], None] | None = None,
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights of a network trained from scratch.

    Parameters
    ----------
    samples
        At least one.
    scaling
        Of inputs and outputs.
    seed
        Of initial weights, split and batches.
    epochs
        At most.
    validation
        Share of the patterns that are kept from training, to choose the best epoch by.
    threads
        Of torch.
    on_progress
        Called after every epoch.
    """
    with undisturbed(threads), torch.enable_grad():
        network = SurrogateNetwork(seed)
        draw = np.random.default_rng((seed, 1))
        examples = Examples.of(samples, scaling)
        kept = validation_rows(samples, validation, draw)
        fit_network(network, examples, kept, draw, epochs, on_progress)
        return weights_of(network)


def validation_rows(
    samples: Samples, share: float, draw: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Which samples are kept for validation: whole patterns, so that none is also trained on."""
    number = patterns_of(samples)
    n = int(number.max(initial=-1)) + 1
    return np.isin(number, draw.permutation(n)[: min(round(share * n), n - 1)])


def fit_network(
    network: nn.Module,
    examples: Examples,
    kept: npt.NDArray[np.bool_],
    draw: np.random.Generator,
    epochs: int,
    on_progress: Callable[[Epoch], None] | None = None,
) -> int:
    """Train in place; the network ends with the weights of its best epoch.

    Returns
    -------
    int
        The best epoch: of the lowest validation loss, or the last one if nothing is kept for it.
    """
    rows, held = np.flatnonzero(~kept), examples.take(tensor(np.flatnonzero(kept)))
    optimizer, schedule = _optimizer(network, RATE, epochs)
    dropout = _generator(draw)
    best, best_epoch, lowest = weights_of(network), 0, np.inf
    for epoch in range(1, epochs + 1):
        training = one_epoch(network, examples, draw.permutation(rows), optimizer, dropout)
        schedule.step()
        validation = validation_loss(network, held) if kept.any() else float("nan")
        if not validation >= lowest:  # NaN: no validation, the newest is the best
            # copies: the optimizer goes on writing into the network's own tensors
            best, best_epoch, lowest = weights_of(network), epoch, validation
        if on_progress is not None:
            on_progress(Epoch(epoch, epochs, training, validation))
        if epoch - best_epoch >= PATIENCE:
            break
    set_weights(network, best)
    return best_epoch


def one_epoch(
    network: nn.Module,
    examples: Examples,
    rows: npt.NDArray[np.int64],
    optimizer: torch.optim.Optimizer,
    dropout: torch.Generator,
) -> float:
    """One pass over the rows in this order, in batches of equal size; mean loss."""
    losses = []
    for batch in np.array_split(rows, max(1, round(len(rows) / BATCH))):
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(network, examples.take(tensor(batch)), dropout)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return float(np.mean(losses))


def validation_loss(network: nn.Module, held: Examples) -> float:
    """Loss without learning."""
    with torch.no_grad():
        return float(_loss(network, held))


def tune(
    weights: Weights,
    scaling: Scaling,
    old: Samples,
    new: Samples,
    seed: int,
    threads: int = 1,
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights after some epochs on new samples, held where the old ones need them.

    Every epoch replays as many old samples as there are new ones, drawn anew. The elastic penalty
    is PENALTY / 2 times the squared distance to the old weights, each weighted by the diagonal of
    the Fisher information of the old samples.
    """
    with undisturbed(threads), torch.enable_grad():
        network = network_of(weights)
        anchor = {name: p.detach().clone() for name, p in network.named_parameters()}
        width = max(old.tokens.shape[1], new.tokens.shape[1])
        before, after = (Examples.of(s.widened(width), scaling) for s in (old, new))
        stiffness = fisher(network, before)
        optimizer, schedule = _optimizer(network, TUNING_RATE, TUNING)
        draw = np.random.default_rng((seed, 2))
        dropout = _generator(draw)
        n, share = len(new.values), min(len(old.values), max(BATCH, len(new.values)))
        for _ in range(TUNING):
            replayed = draw.choice(len(old.values), share, replace=False)
            examples = after + before.take(tensor(replayed))
            rows = draw.permutation(n + share)
            for batch in np.array_split(rows, max(1, round(len(rows) / BATCH))):
                optimizer.zero_grad(set_to_none=True)
                loss = _loss(network, examples.take(tensor(batch)), dropout)
                for name, p in network.named_parameters():
                    loss = loss + PENALTY / 2 * (stiffness[name] * (p - anchor[name]) ** 2).sum()
                loss.backward()
                optimizer.step()
            schedule.step()
        return weights_of(network)


def fisher(network: SurrogateNetwork, examples: Examples) -> dict[str, Tensor]:
    """Diagonal of the Fisher information of outputs with unit variance: mean squared gradient."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def output(values: dict[str, Tensor], hosts: Tensor, total: Tensor, absent: Tensor) -> Tensor:
        inputs = (hosts.unsqueeze(-1), total.unsqueeze(-1), absent.unsqueeze(-1))
        found: Tensor = functional_call(network, values, inputs)
        return found.sum()

    each = vmap(grad(output), in_dims=(None, -1, -1, -1))
    gradients = each(parameters, examples.hosts, examples.total, examples.absent)
    return {name: (value**2).mean(0) for name, value in gradients.items()}


def weights_of(network: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Copies of all weights."""
    return {name: p.detach().numpy().copy() for name, p in network.named_parameters()}


def network_of(weights: Weights) -> SurrogateNetwork:
    """A network with these weights."""
    network = SurrogateNetwork()
    set_weights(network, weights)
    return network


def set_weights(network: nn.Module, weights: Weights) -> None:
    """Copy weights into a network."""
    network.load_state_dict({name: tensor(value) for name, value in weights.items()})


def _generator(draw: np.random.Generator) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(int(draw.integers(2**62)))


def _loss(network: nn.Module, batch: Examples, dropout: torch.Generator | None = None) -> Tensor:
    """Smooth L1 between scaled logarithms; being above a censored value is no error."""
    over = network(batch.hosts, batch.total, batch.absent, dropout) - batch.target
    over = torch.where(batch.censored & (over > 0), 0.0, over)
    return smooth_l1_loss(over, torch.zeros_like(over))


def _optimizer(
    network: nn.Module, rate: float, epochs: int
) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.CosineAnnealingLR]:
    optimizer = torch.optim.Adam(network.parameters(), lr=rate, fused=True)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
