"""Images, training of all width tuples of a SlimResNet at once, their accuracies, its files."""

from __future__ import annotations

import io
import pickle
from contextlib import ExitStack, suppress
from itertools import product
from math import ceil, cos, pi
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate
from torch.optim.lr_scheduler import LambdaLR

from optsched.errors import InputError, MissingExtra
from optsched.io.files import read_bytes, write_atomic
from optsched.io.values import integer, number
from optsched.serving.network import SlimResNet

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

FORMAT: Final = "optsched.slim-resnet/1"

_ARGUMENTS = ("classes", "channels", "blocks", "in_channels", "group_channels", "widths")
_AT_ONCE = 512  # images of a measurement: bounds its memory
_DRAWN = 2  # random tuples a step
_SMALL = 500  # MMAC of a batch below which threads wait for each other longer than they work
_TRAINED_ON = 1300  # digits; the other 497 are for testing
_PIXELS = 3 * 32 * 32
_MEAN = (0.5071, 0.4866, 0.4409)  # of CIFAR-100's training images, by colour
_SD = (0.2673, 0.2564, 0.2762)


class Images(NamedTuple):
    """Normalised images, float32 of shape (n, channels, side, side), and classes, int64."""

    x: Tensor
    y: Tensor


class Epoch(NamedTuple):
    """Mean cross-entropies: of the full tuple on labels, of the others on the full one's answers.

    `epoch` counts from 1.
    """

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
        Called after every epoch; all whole ones are returned.
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
                raise InputError("lr, images.x: the loss is no number any more; lower the rate")
            history.append(Epoch(len(history) + 1, epochs, *(losses / len(images.y)).tolist()))
            if on_progress is not None:
                on_progress(history[-1])
    optimizer.zero_grad()
    return history


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


def measure_accuracy(net: SlimResNet, images: Images) -> dict[str, float]:
    """Percent of images that each tuple of widths classifies rightly: the table of a `Scenario`.

    Its keys are such as ``"0,1,2,3"``. What tuples that begin alike have in common is run once: all
    256 of four segments take a third of the work of 256 passes.
    """
    _check_images(net, images)
    weight, widths = next(net.parameters()), range(len(net.widths))

    def right(x: Tensor, y: Tensor, k: int, before: int) -> list[int]:
        """Of every tuple that begins with what was run, in their order."""
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
        if not all(w.dtype == torch.float32 and w.isfinite().all() for w in net.parameters()):
            raise InputError("weights: expected finite numbers of 32 bits")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # torch and pickle raise nearly anything
        raise InputError(f"{path}: is no network ({type(error).__name__})") from None
    return net


def digits(split: str = "train", side: int = 16) -> Images:
    """Handwritten digits of scikit-learn (real images, grey, 8x8), resized to `side` pixels.

    ``"train"`` are 1300 images and ``"test"`` 497, always the same ones.
    """
    integer("side", side, 1, 4096)
    part = slice(_TRAINED_ON, None) if _is_test(split) else slice(_TRAINED_ON)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("digits", "serving") from None
    data = load_digits()
    # raw numbers of a bit generator are the same in every release of NumPy; permutations may not be
    order = np.argsort(np.random.PCG64(0).random_raw(len(data.target)))
    x = torch.tensor(data.images[order], dtype=torch.float32, device="cpu")[:, None]
    x = _resized(x, side)
    x = (x - x[:_TRAINED_ON].mean()) / x[:_TRAINED_ON].std()
    y = torch.tensor(data.target[order], dtype=torch.int64, device="cpu")
    return Images(x[part].contiguous(), y[part].contiguous())


def cifar100(folder: str | os.PathLike[str], split: str = "train", side: int = 32) -> Images:
    """CIFAR-100 (Krizhevsky 2009) from its unpacked archive, resized to `side` pixels.

    Nothing is downloaded: the `folder` holds ``train.bin`` and ``test.bin`` (binary version), or
    ``train`` and ``test`` (Python version, read without running anything in it).
    """
    name, side = "test" if _is_test(split) else "train", integer("side", side, 1, 4096)
    path = Path(folder) / f"{name}.bin"
    if path.exists():
        content = np.frombuffer(read_bytes(path), np.uint8)
        if not len(content) or len(content) % (2 + _PIXELS):
            raise InputError(
                f"{path}: has {len(content)} bytes, expected a multiple of {2 + _PIXELS} (two "
                f"labels and {_PIXELS} bytes an image)"
            )
        rows = content.reshape(-1, 2 + _PIXELS)  # coarse label, fine label, pixels
        pixels, labels = rows[:, 2:], rows[:, 1]
    elif (path := Path(folder) / name).exists():
        try:
            found = _Unpickler(io.BytesIO(read_bytes(path)), encoding="bytes").load()
            pixels, labels = np.asarray(found[b"data"]), np.asarray(found[b"fine_labels"])
        except Exception as error:  # broken pickles raise nearly anything
            reason = str(error) or type(error).__name__
            raise InputError(f"{path}: is not CIFAR-100's Python version ({reason:.80})") from None
    else:
        raise InputError(
            f"{folder}: has neither {name}.bin nor {name}; unpack cifar-100-binary.tar.gz or "
            "cifar-100-python.tar.gz and give the folder that holds them"
        )
    right = pixels.dtype == np.uint8 and pixels.size and pixels.shape == (len(pixels), _PIXELS)
    if not right or labels.dtype.kind not in "iu" or labels.shape != pixels.shape[:1]:
        raise InputError(
            f"{path}: expected data, uint8 of shape (n, {_PIXELS}), and n integers as fine_labels, "
            f"got {pixels.dtype} {pixels.shape} and {labels.dtype} {labels.shape}"
        )
    for i in np.flatnonzero((labels < 0) | (labels > 99))[:1]:
        raise InputError(f"{path}: image {i}: expected a label in 0..99, got {labels[i]}")
    x = torch.from_numpy(pixels.reshape(-1, 3, 32, 32).astype(np.float32))
    x.div_(255).sub_(torch.tensor(_MEAN)[:, None, None]).div_(torch.tensor(_SD)[:, None, None])
    return Images(_resized(x, side), torch.from_numpy(labels.astype(np.int64)))


def _resized(x: Tensor, side: int) -> Tensor:
    if x.shape[-1] == side:
        return x
    smaller = side < x.shape[-1]
    return interpolate(x, (side, side), mode="bilinear", align_corners=False, antialias=smaller)


class _Unpickler(pickle.Unpickler):
    """Rebuilds lists, dictionaries, numbers, texts and NumPy arrays; knows no other global."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is never loaded")


def _is_test(split: str) -> bool:
    if split not in ("train", "test"):
        raise InputError(f"split: expected train or test, got {split!r:.60}")
    return split == "test"
