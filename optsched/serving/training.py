"""Training of all width tuples of a SlimResNet at once, and their accuracies."""

from __future__ import annotations

import io
from contextlib import suppress
from itertools import product
from math import ceil, cos, pi
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from optsched.errors import InputError
from optsched.files import read_bytes, write_atomic
from optsched.limits import number, whole_number
from optsched.serving.network import SlimResNet

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from optsched.serving.data import Images

FORMAT = "optsched.slim-resnet/1"

_ARGUMENTS = ("classes", "channels", "blocks", "in_channels", "group_channels", "widths")
_AT_ONCE = 512  # images of a measurement: bounds its memory
_DRAWN = 2  # random tuples a step


class Epoch(NamedTuple):
    """Progress of a training: mean cross-entropies of an epoch."""

    epoch: int
    """From 1."""
    epochs: int
    """Asked for."""
    loss: float
    """Of the full tuple on the labels."""
    distilled: float
    """Of the other tuples on the full one's answers."""


def train_slim(
    net: SlimResNet,
    images: Images,
    *,
    epochs: int = 12,
    seed: int = 0,
    batch: int = 16,
    lr: float = 0.02,
    on_progress: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """Train in place, on the device the net is on; Ctrl-C ends it early and keeps the net.

    Each step sums the gradients of four tuples of widths: the full one on the labels, then the
    narrowest and two random ones on the full one's softmax (sandwich rule and in-place
    distillation, Yu & Huang 2019, with tuples where they draw one width for the whole net). SGD
    with Nesterov momentum; the rate rises in the first epoch and falls as a cosine to 0.

    Parameters
    ----------
    net, images, epochs
        The net, and how often it sees the images.
    seed
        Of batches and tuples; the same on as many threads gives the same weights.
    batch, lr
        Images a step and the highest learning rate.
    on_progress
        Called after every epoch.

    Returns
    -------
    list of Epoch
        Of every whole epoch: fewer than `epochs` after Ctrl-C.
    """
    _check_images(net, images)
    epochs, batch = whole_number("epochs", epochs, 1, 2**31), whole_number("batch", batch, 1, 2**31)
    draw = torch.Generator(device="cpu").manual_seed(whole_number("seed", seed, 0, 2**31 - 1))
    lr, steps = number("lr", "a rate", lr), ceil(len(images.y) / batch)
    optimizer = torch.optim.SGD(
        net.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / steps) * (1 + cos(pi * i / steps / epochs)) / 2
    )
    history: list[Epoch] = []
    with suppress(KeyboardInterrupt):  # a weight is from before or after a step: a valid net
        while len(history) < epochs:
            losses = torch.zeros(2)
            for rows in torch.randperm(len(images.y), generator=draw).split(batch):
                optimizer.zero_grad()
                losses += len(rows) * _add_gradients(net, images, rows, draw)
                optimizer.step()
                schedule.step()
            history.append(Epoch(len(history) + 1, epochs, *(losses / len(images.y)).tolist()))
            if on_progress is not None:
                on_progress(history[-1])
    optimizer.zero_grad()
    return history


def measure_accuracy(
    net: SlimResNet, images: Images, tuples: Iterable[Sequence[int]] | None = None
) -> dict[str, float]:
    """Percent of images that each tuple of widths classifies rightly: the table of a `Routing`.

    Its keys are such as ``"0,1,2,3"``. What tuples that begin alike have in common is run once: all
    256 of four segments take a third of the work of 256 passes.

    Parameters
    ----------
    net, images
        Neither is changed.
    tuples
        Of width indices, one a segment; None: all of them.
    """
    _check_images(net, images)
    every = product(range(len(net.widths)), repeat=len(net.segments))
    right = {net.check_tuple(one): 0 for one in (every if tuples is None else tuples)}
    prefixes = {one[:k] for one in right for k in range(1, len(one) + 1)}
    weight = next(net.parameters())

    def walk(x: Tensor, y: Tensor, prefix: tuple[int, ...]) -> None:
        if prefix in right:
            right[prefix] += int((x.argmax(1) == y).sum())
        for width in range(len(net.widths)):
            if (*prefix, width) in prefixes:
                found = net.segment(len(prefix), x, width, prefix[-1] if prefix else 0)
                walk(found, y, (*prefix, width))

    with torch.inference_mode():
        for x, y in zip(images.x.split(_AT_ONCE), images.y.split(_AT_ONCE), strict=True):
            walk(x.to(weight), y.to(weight.device), ())
    return {",".join(map(str, one)): 100 * n / len(images.y) for one, n in right.items()}


def save_network(net: SlimResNet, path: str | os.PathLike[str]) -> None:
    """Write arguments and weights: the whole file, or none."""
    arguments, stream = {name: getattr(net, name) for name in _ARGUMENTS}, io.BytesIO()
    torch.save({"format": FORMAT, "arguments": arguments, "weights": net.state_dict()}, stream)
    write_atomic(path, stream.getvalue())


def load_network(path: str | os.PathLike[str]) -> SlimResNet:
    """Read what `save_network` has written, onto the CPU; nothing in the file is ever run."""
    stream = io.BytesIO(read_bytes(path))
    try:
        found = torch.load(stream, weights_only=True, map_location="cpu")
        if found["format"] != FORMAT:
            raise InputError(f"format: expected {FORMAT}, got {found['format']!r:.60}")
        with torch.device("meta"):  # shapes are compared before memory is taken
            net = SlimResNet(**found["arguments"])
        net.load_state_dict(found["weights"], assign=True)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # torch and pickle raise nearly anything
        raise InputError(f"{path}: is no network ({type(error).__name__})") from None
    return net


def _add_gradients(net: SlimResNet, images: Images, rows: Tensor, draw: torch.Generator) -> Tensor:
    """Both losses of `Epoch` on a batch; their gradients, summed over tuples, are in the net."""
    weight, segments = next(net.parameters()), len(net.segments)
    x, y = images.x[rows].to(weight), images.y[rows].to(weight.device)
    logits = net(x, (len(net.widths) - 1,) * segments)
    loss = cross_entropy(logits, y)
    loss.backward()
    answers = logits.detach().softmax(1)
    drawn = torch.randint(len(net.widths), (_DRAWN, segments), generator=draw).tolist()
    distilled = 0.0
    for widths in ((0,) * segments, *drawn):
        other = cross_entropy(net(x, widths), answers)
        other.backward()
        distilled += other.item() / (1 + _DRAWN)
    return torch.tensor([loss.item(), distilled])


def _check_images(net: SlimResNet, images: Images) -> None:
    shape = tuple(images.x.shape)
    if len(shape) != 4 or shape[1] != net.in_channels or not all(shape):
        raise InputError(f"images.x: expected (n, {net.in_channels}, side, side), got {shape}")
    if images.y.shape != shape[:1]:
        raise InputError(f"images.y: expected {shape[0]} classes, got {tuple(images.y.shape)}")
    least, most = int(images.y.min()), int(images.y.max())
    if least < 0 or most >= net.classes:
        raise InputError(f"images.y: expected classes in 0..{net.classes - 1}, got {least}..{most}")
