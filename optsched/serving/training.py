"""Images, training of a SlimResNet for all width tuples, their accuracies, its files."""

from __future__ import annotations

import io
from contextlib import ExitStack, suppress
from itertools import product
from math import ceil, cos, pi
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate
from torch.optim.lr_scheduler import LambdaLR

from optsched.errors import InputError, MissingExtra
from optsched.io.files import read_bytes, write_atomic
from optsched.io.values import integer, number, one_of
from optsched.serving.network import SlimResNet

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

FORMAT: Final = "optsched.slim-resnet/1"

_ARGUMENTS = ("classes", "channels", "blocks", "in_channels", "group_channels", "widths")
_AT_ONCE = 512  # images per forward pass: bounds the memory
_DRAWN = 2  # random tuples a step
_SMALL = 500  # MMAC of a batch below which one thread is faster
_TRAINED_ON = 1300  # digits; the remaining 497 are the test split
_PIXELS = 3 * 32 * 32
_SPLITS = ("train", "test")
_MEAN = (0.5071, 0.4866, 0.4409)  # of CIFAR-100's training images, by colour
_SD = (0.2673, 0.2564, 0.2762)


class Images(NamedTuple):
    """Normalised images, float32 of shape (n, channels, side, side), and classes, int64."""

    x: Tensor
    y: Tensor


class Epoch(NamedTuple):
    """Mean losses of an epoch, counted from 1: full tuple on labels, others by distillation."""

    epoch: int
    epochs: int
    loss: float
    distilled: float


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
    """Train in place, on the device of the net; Ctrl-C ends the training early.

    Each step sums the gradients of four tuples of widths: the full one on the labels, then the
    narrowest and two random tuples on the softmax of the full one (sandwich rule and in-place
    distillation, Yu & Huang 2019, with a width per segment). SGD with Nesterov momentum; the rate
    rises in the first epoch and falls as a cosine to 0.

    Parameters
    ----------
    net, images, epochs
        The net, the data, and the number of passes over them.
    seed
        Of batches and tuples; with the same number of threads it gives the same weights.
    batch, lr
        Images a step and the highest learning rate.
    on_progress
        Called after every epoch.
    """
    _check_images(net, images)
    epochs, batch = integer("epochs", epochs, 1, 2**31), integer("batch", batch, 1, 2**31)
    draw = torch.Generator(device="cpu").manual_seed(integer("seed", seed, 0, 2**31 - 1))
    lr, steps = number("lr", lr, what="a rate"), ceil(len(images.y) / batch)
    optimizer = torch.optim.SGD(
        net.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / steps) * (1 + cos(pi * i / steps / epochs)) / 2
    )
    history: list[Epoch] = []
    work = batch * sum(rows[-1][-1] for rows in net.mmac(images.x.shape[-1]))
    with ExitStack() as stack, suppress(KeyboardInterrupt):  # weights are valid between steps
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if work < _SMALL:
            torch.set_num_threads(1)
        while len(history) < epochs:
            losses = torch.zeros(2)
            for rows in torch.randperm(len(images.y), generator=draw).split(batch):
                optimizer.zero_grad()
                losses += len(rows) * _add_gradients(net, images, rows, draw)
                optimizer.step()
                schedule.step()
            if not losses.isfinite().all():
                raise InputError("lr, images.x: the loss is not finite; lower the rate")
            history.append(Epoch(len(history) + 1, epochs, *(losses / len(images.y)).tolist()))
            if on_progress is not None:
                on_progress(history[-1])
    optimizer.zero_grad()
    return history


def _add_gradients(net: SlimResNet, images: Images, rows: Tensor, draw: torch.Generator) -> Tensor:
    """Compute both losses of `Epoch` on a batch; adds the gradients of all tuples."""
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


def measure_accuracy(net: SlimResNet, images: Images) -> dict[str, float]:
    """Return the accuracy of each tuple of widths in percent, ``{"0,1,2,3": 74.5, ...}``.

    Common prefixes of tuples are run once: a third of the work of 256 passes for four segments.
    """
    _check_images(net, images)
    weight, widths = next(net.parameters()), range(len(net.widths))

    def right(x: Tensor, y: Tensor, k: int, before: int) -> list[int]:
        """Correct images of every tuple that continues the prefix, in order."""
        if k == len(net.segments):
            return [int((x.argmax(1) == y).sum())]
        after = ((net.segment(k, x, width, before), width) for width in widths)
        return [n for found, width in after for n in right(found, y, k + 1, width)]

    total = np.zeros(len(widths) ** len(net.segments), np.int64)
    with torch.inference_mode():
        for x, y in zip(images.x.split(_AT_ONCE), images.y.split(_AT_ONCE), strict=True):
            total += right(x.to(weight), y.to(weight.device), 0, 0)
    keys = (",".join(map(str, one)) for one in product(widths, repeat=len(net.segments)))
    return dict(zip(keys, (100 * total / len(images.y)).tolist(), strict=True))


def _check_images(net: SlimResNet, images: Images) -> None:
    shape = tuple(images.x.shape)
    if len(shape) != 4 or shape[1] != net.in_channels or not all(shape):
        raise InputError(f"images.x: expected (n, {net.in_channels}, side, side), got {shape}")
    if images.y.shape != shape[:1]:
        raise InputError(f"images.y: expected {shape[0]} classes, got {tuple(images.y.shape)}")
    least, most = int(images.y.min()), int(images.y.max())
    if least < 0 or most >= net.classes:
        raise InputError(f"images.y: expected classes in 0..{net.classes - 1}, got {least}..{most}")


def save_network(net: SlimResNet, path: str | os.PathLike[str]) -> None:
    """Write arguments and weights, atomically."""
    arguments, stream = {name: getattr(net, name) for name in _ARGUMENTS}, io.BytesIO()
    torch.save({"format": FORMAT, "arguments": arguments, "weights": net.state_dict()}, stream)
    write_atomic(path, stream.getvalue())


def load_network(path: str | os.PathLike[str]) -> SlimResNet:
    """Read a file of `save_network`, onto the CPU; no code in the file is run."""
    stream = io.BytesIO(read_bytes(path))
    try:
        found = torch.load(stream, weights_only=True, map_location="cpu")
        if found["format"] != FORMAT:
            raise InputError(f"format: expected {FORMAT}, got {found['format']!r:.60}")
        with torch.device("meta"):  # shapes are compared before memory is taken
            net = SlimResNet(**found["arguments"])
        net.load_state_dict(found["weights"], assign=True)
        if not all(w.dtype == torch.float32 and w.isfinite().all() for w in net.parameters()):
            raise InputError("weights: expected finite numbers of 32 bits")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # torch and pickle raise nearly anything
        raise InputError(f"{path}: is not a network ({type(error).__name__})") from None
    return net


def digits(split: str = "train", side: int = 16) -> Images:
    """Return the digits of scikit-learn (real images, grey, 8x8), resized to `side` pixels.

    The split is fixed: 1300 images of ``"train"`` and 497 of ``"test"``.
    """
    integer("side", side, 1, 4096)
    test = one_of("split", split, _SPLITS) == "test"
    part = slice(_TRAINED_ON, None) if test else slice(_TRAINED_ON)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("digits", "serving") from None
    data = load_digits()
    # raw numbers of a bit generator are the same in every release of NumPy
    order = np.argsort(np.random.PCG64(0).random_raw(len(data.target)))
    x = torch.tensor(data.images[order], dtype=torch.float32, device="cpu")[:, None]
    x = _resized(x, side)
    x = (x - x[:_TRAINED_ON].mean()) / x[:_TRAINED_ON].std()
    y = torch.tensor(data.target[order], dtype=torch.int64, device="cpu")
    return Images(x[part].contiguous(), y[part].contiguous())


def cifar100(folder: str | os.PathLike[str], split: str = "train", side: int = 32) -> Images:
    """Read CIFAR-100 (Krizhevsky 2009), binary version, resized to `side` pixels.

    Nothing is downloaded: the `folder` holds ``train.bin`` and ``test.bin``.
    """
    path = Path(folder) / f"{one_of('split', split, _SPLITS)}.bin"
    side = integer("side", side, 1, 4096)
    if not path.exists():
        raise InputError(f"{folder}: has no {path.name}; unpack cifar-100-binary.tar.gz there")
    content = np.frombuffer(read_bytes(path), np.uint8)
    if not len(content) or len(content) % (2 + _PIXELS):
        raise InputError(
            f"{path}: has {len(content)} bytes, expected a multiple of {2 + _PIXELS} (two "
            f"labels and {_PIXELS} bytes an image)"
        )
    rows = content.reshape(-1, 2 + _PIXELS)  # coarse label, fine label, pixels
    labels = rows[:, 1]
    for i in np.flatnonzero(labels > 99)[:1]:
        raise InputError(f"{path}: image {i}: expected a label in 0..99, got {labels[i]}")
    x = torch.from_numpy(rows[:, 2:].reshape(-1, 3, 32, 32).astype(np.float32))
    x.div_(255).sub_(torch.tensor(_MEAN)[:, None, None]).div_(torch.tensor(_SD)[:, None, None])
    return Images(_resized(x, side), torch.from_numpy(labels.astype(np.int64)))


def _resized(x: Tensor, side: int) -> Tensor:
    if x.shape[-1] == side:
        return x
    smaller = side < x.shape[-1]
    return interpolate(x, (side, side), mode="bilinear", align_corners=False, antialias=smaller)
