"""SlimResNet, an image classifier in segments of several widths: training, files, images."""

from __future__ import annotations

import io
import math
import pickle
from contextlib import ExitStack, suppress
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.errors import InputError, MissingExtra
from optsched.io.files import read_bytes, write_atomic
from optsched.io.values import integer, number, one_of
from optsched.serving.tables import WIDTHS
from optsched.serving.workload import network_mmac

try:
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import conv2d, cross_entropy, group_norm, interpolate, linear
    from torch.optim.lr_scheduler import LambdaLR
except ImportError:
    raise MissingExtra("a slimmable network", "serving") from None

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

_MAX_SIZE = 2**16  # of channels, classes and sides


class SlimResNet(nn.Module):
    """Residual network; its narrow widths are slices of one set of weights.

    A 3x3 convolution (the stem), segments of basic blocks (He et al. 2016), the mean over all
    positions and a linear layer. A width w uses the first w * channels of every layer (slimmable
    networks, Yu et al. 2018). The groups of the norms (Wu & He 2018) have the same number of
    channels at every width, so that a slice is normalised as in the wide net.

    Parameters
    ----------
    classes
        Outputs.
    channels
        Of every segment at width 1. The first keeps the side of the image, the others halve it.
    blocks
        Basic blocks of two 3x3 convolutions a segment.
    in_channels
        Of an image.
    group_channels
        Channels per group of the norms; divides those of every segment and width.
    widths
        Shares of the channels, ascending.
    seed
        Of the initial weights; the global generator of torch is not used.

    Examples
    --------
    >>> import torch
    >>> net = optsched.serving.SlimResNet(classes=10, channels=(16, 32), widths=(0.5, 1.0))
    >>> net(torch.zeros(2, 3, 8, 8), widths=(0, 1)).shape
    torch.Size([2, 10])
    """

    zero_padded = True

    def __init__(
        self,
        classes: int,
        channels: Sequence[int] = (64, 128, 256, 512),
        blocks: int = 2,
        in_channels: int = 3,
        group_channels: int = 8,
        widths: Sequence[float] = WIDTHS,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.classes = integer("classes", classes, 1, _MAX_SIZE)
        self.blocks = integer("blocks", blocks, 1, 64)
        self.in_channels = integer("in_channels", in_channels, 1, _MAX_SIZE)
        self.group_channels = integer("group_channels", group_channels, 1, _MAX_SIZE)
        self.channels = tuple(integer("channels", c, 1, _MAX_SIZE) for c in channels)
        if not self.channels:
            raise InputError("channels: expected one number a segment, got none")
        self.widths = tuple(number("widths", w, what="a share") for w in widths)
        if not self.widths or any(a >= b for a, b in pairwise((0.0, *self.widths, 1.0 + 1e-9))):
            raise InputError(f"widths: expected ascending shares in (0, 1], got {self.widths}")
        segments = range(len(self.channels))
        self.segments = nn.ModuleList(Segment(self, k, len(self.widths)) for k in segments)
        draw = torch.Generator(device="cpu").manual_seed(integer("seed", seed, 0, 2**31 - 1))
        for weight in self.parameters():
            if weight.ndim > 1 and not weight.is_meta:  # norms are initialised as 1 and 0
                nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=draw)
        with torch.no_grad():  # small initial logits
            self.get_parameter(f"segments.{segments[-1]}.weight").mul_(0.1)

    def forward(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return logits, shape (n, classes), for a tuple of width indices, one a segment."""
        if len(widths) != len(self.channels):
            raise InputError(f"widths: expected {len(self.channels)} indices, got {widths!r:.60}")
        before = 0
        for k, width in enumerate(widths):
            x, before = self.segment(k, x, width, before), width
        return x

    def segment(self, k: int, x: Tensor, width: int, input_width: int = 0) -> Tensor:
        """Run one segment; see `Segment.forward`."""
        integer("segment", k, 0, len(self.channels) - 1)
        return self.segments[k](x, width, input_width)  # type: ignore[no-any-return]

    def sliced(self, k: int, width: int) -> Segment:
        """Return a copy of segment k for widths up to this one: the content of an instance."""
        integer("segment", k, 0, len(self.channels) - 1)
        integer("width", width, 0, len(self.widths) - 1)
        whole = self.segments[k].state_dict()
        with torch.device("meta"):  # the weights are replaced
            found = Segment(self, k, width + 1)
        corners = {
            name: whole[name][tuple(slice(n) for n in part.shape)].clone()
            for name, part in found.state_dict().items()
        }
        found.load_state_dict(corners, assign=True)
        return found

    def mmac(self, side: int = 32) -> list[list[list[float]]]:
        """Return millions of multiply-accumulates an image, [segment][input width][width]."""
        return network_mmac(
            self.channels, self.widths, side=integer("side", side, 1, _MAX_SIZE),
            classes=self.classes, blocks=self.blocks, in_channels=self.in_channels,
        )  # fmt: skip

    def channels_of(self, k: int) -> list[int]:
        """Return the channels of segment k by width."""
        found = [self.channels[k] * width for width in self.widths]
        for width, count in zip(self.widths, found, strict=True):
            whole = math.isclose(count, round(count)) and round(count) > 0
            if not whole or round(count) % self.group_channels:
                text = f"{count:g} of {self.channels[k]} at width {width:g}"
                raise InputError(
                    f"channels: segment {k} has {text}, no multiple of group_channels "
                    f"{self.group_channels}; choose other channels, widths or group_channels"
                )
        return [round(count) for count in found]


Shapes: TypeAlias = list[list[tuple[int, ...]]]
"""Shapes of one image's activations: [segment][input width], and of the outputs."""


Segmented: TypeAlias = Any
"""A network in segments with widths: any ``nn.Module`` with the attributes `segments` and `widths`.

A segment is called with an input, the index of its width, and that of the input's width. With
``sliced(k, width)``, an instance holds what that returns instead of a whole segment; with
``zero_padded = True``, zeros in place of missing channels (dimension 1) change nothing, so that
inputs of different widths are run at once.
"""


def shapes_of(net: Segmented, shape: Sequence[int]) -> Shapes:
    """Return the shapes of activations for images of a shape, by one image at every width."""
    if not isinstance(shape, (tuple, list)) or not shape:
        raise InputError(f"shape: expected sizes such as (3, 32, 32), got {shape!r:.60}")
    image = tuple(integer("shape", n, 1, _MAX_SIZE) for n in shape)
    found: Shapes = [[image], *([] for _ in net.segments)]
    weight = _weight(net)
    with torch.no_grad():
        for w in range(len(net.widths)):
            x = weight.new_zeros(1, *image)
            for k, segment in enumerate(net.segments):
                try:
                    x = segment(x, w, w if k else 0)
                except Exception as error:  # code of the user
                    raise InputError(
                        f"net: segment {k} at width {w} fails on an input of shape "
                        f"{tuple(x.shape)}: {type(error).__name__}: {error}"
                    ) from error
                found[k + 1].append(tuple(x.shape[1:]))
    if len({*found[-1]}) > 1:
        raise InputError(f"net: the shape of outputs depends on the width: {found[-1]}")
    return found


def _weight(net: Segmented) -> Tensor:
    """Return a weight: its device and type are those of inputs."""
    weight: Tensor = next(net.parameters(), torch.zeros(1))
    return weight


def work_of(net: Segmented, shape: Sequence[int]) -> list[list[list[float]]]:
    """Count millions of multiply-accumulates an image, [segment][input width][width]."""
    shapes = shapes_of(net, shape)
    if isinstance(net, SlimResNet) and shape[-1] == shape[-2]:
        return net.mmac(shape[-1])
    from torch.utils.flop_counter import FlopCounterMode

    weight = _weight(net)
    found = [np.zeros((len(row), len(net.widths))) for row in shapes[:-1]]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for k, row in enumerate(found):
            for i, w in np.ndindex(row.shape):
                before = counter.get_total_flops()
                net.segments[k](weight.new_zeros(1, *shapes[k][i]), w, i)
                row[i, w] = (counter.get_total_flops() - before) / 2e6
    return [row.tolist() for row in found]


class Segment(nn.Module):
    """Segment k of a net at the first `held` widths: the content of an instance.

    An input enters through convolutions only, never through an identity shortcut (the first segment
    begins with the stem, the others with a projection), so zero channels added by `pad` change
    nothing.
    """

    def __init__(self, net: SlimResNet, k: int, held: int) -> None:
        super().__init__()
        self.inputs = net.channels_of(k - 1) if k else [net.in_channels]
        self.outputs = net.channels_of(k)[:held]
        last, group = k == len(net.channels) - 1, net.group_channels
        ci, co = self.inputs[-1], self.outputs[-1]
        self.stem = None if k else Convolution(ci, co, 3, group)
        first = Block(ci, co, group, 2) if k else Block(co, co, group)
        more = [Block(co, co, group) for _ in range(net.blocks - 1)]
        self.blocks = nn.ModuleList([first, *more])
        self.weight = nn.Parameter(torch.empty(net.classes, co)) if last else None
        self.bias = nn.Parameter(torch.zeros(net.classes)) if last else None

    def forward(self, x: Tensor, width: int, input_width: int = 0) -> Tensor:
        """Return activations, or logits of the last segment; `input_width` is 0 for images."""
        co = self.outputs[integer("width", width, 0, len(self.outputs) - 1)]
        ci = self.inputs[integer("input_width", input_width, 0, len(self.inputs) - 1)]
        if x.ndim != 4 or x.shape[1] != ci:
            raise InputError(f"x: expected shape (n, {ci}, side, side), got {tuple(x.shape)}")
        if self.stem is not None:
            x = self.stem(x, co).relu()
        for block in self.blocks:
            x = block(x, co)
        return x if self.weight is None else linear(x.mean((2, 3)), self.weight[:, :co], self.bias)


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a projection if there is a stride."""

    def __init__(self, ci: int, co: int, group: int, stride: int = 1) -> None:
        super().__init__()
        self.first = Convolution(ci, co, 3, group, stride)
        self.second = Convolution(co, co, 3, group)
        self.shortcut = Convolution(ci, co, 1, group, stride) if stride > 1 else None

    def forward(self, x: Tensor, co: int) -> Tensor:
        """Run the block with `co` output channels."""
        around = x if self.shortcut is None else self.shortcut(x, co)
        return (self.second(self.first(x, co).relu(), co) + around).relu()  # type: ignore[no-any-return]


class Convolution(nn.Module):
    """A square kernel and a norm; runs with the first input and output channels."""

    def __init__(self, ci: int, co: int, size: int, group: int, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(co, ci, size, size))
        self.scale, self.offset = nn.Parameter(torch.ones(co)), nn.Parameter(torch.zeros(co))
        self.stride, self.group = stride, group

    def forward(self, x: Tensor, co: int) -> Tensor:
        """Shape (n, ci, side, side) to (n, co, side / stride, side / stride)."""
        weight = self.weight[:co, : x.shape[1]]
        x = conv2d(x, weight, stride=self.stride, padding=weight.shape[-1] // 2)
        return group_norm(x, co // self.group, self.scale[:co], self.offset[:co])


def pad(batches: Sequence[Tensor]) -> Tensor:
    """Concatenate batches of different widths, padding channels with zeros."""
    widest = max(part.shape[1] for part in batches)
    more = nn.functional.pad
    return torch.cat([more(part, (0, 0, 0, 0, 0, widest - part.shape[1])) for part in batches])


# training

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

    Examples
    --------
    >>> from optsched import serving
    >>> net = serving.SlimResNet(10, (16,), blocks=1, in_channels=1, widths=(0.5, 1))
    >>> [row.epoch for row in serving.train_slim(net, serving.digits(side=2), epochs=1, batch=1300)]
    [1]
    """
    _check_images(net, images)
    epochs, batch = integer("epochs", epochs, 1, 2**31), integer("batch", batch, 1, 2**31)
    draw = torch.Generator(device="cpu").manual_seed(integer("seed", seed, 0, 2**31 - 1))
    lr, steps = number("lr", lr, what="a rate"), math.ceil(len(images.y) / batch)
    optimizer = torch.optim.SGD(
        net.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = LambdaLR(
        optimizer,
        lambda i: min(1, (i + 1) / steps) * (1 + math.cos(math.pi * i / steps / epochs)) / 2,
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

    Examples
    --------
    >>> from optsched import serving
    >>> net = serving.SlimResNet(10, (16,), blocks=1, in_channels=1, widths=(0.5, 1))
    >>> sorted(serving.measure_accuracy(net, serving.digits("test", side=2)))
    ['0', '1']
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
    """Write arguments and weights, atomically.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from optsched import serving
    >>> with TemporaryDirectory() as folder:
    ...     serving.save_network(serving.SlimResNet(10, (32,)), Path(folder, "net.pt"))
    ...     serving.load_network(Path(folder, "net.pt")).channels
    (32,)
    """
    arguments, stream = {name: getattr(net, name) for name in _ARGUMENTS}, io.BytesIO()
    torch.save({"format": FORMAT, "arguments": arguments, "weights": net.state_dict()}, stream)
    write_atomic(path, stream.getvalue())


def load_network(path: str | os.PathLike[str]) -> SlimResNet:
    """Read a file of `save_network`, onto the CPU; no code in the file is run.

    Examples
    --------
    >>> from optsched import serving
    >>> try:
    ...     serving.load_network("net.pt")
    ... except optsched.InputError as error:
    ...     print(error)
    net.pt: no such file
    """
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

    Examples
    --------
    >>> images = optsched.serving.digits("test", side=8)
    >>> images.x.shape, images.y.max()
    (torch.Size([497, 1, 8, 8]), tensor(9))
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
    x = _resized(torch.tensor(data.images[order], dtype=torch.float32, device="cpu")[:, None], side)
    x = (x - x[:_TRAINED_ON].mean()) / x[:_TRAINED_ON].std()
    y = torch.tensor(data.target[order], dtype=torch.int64, device="cpu")
    return Images(x[part].contiguous(), y[part].contiguous())


def cifar100(folder: str | os.PathLike[str], split: str = "train", side: int = 32) -> Images:
    """Read CIFAR-100 (Krizhevsky 2009), resized to `side` pixels.

    Nothing is downloaded: the `folder` holds ``train.bin`` and ``test.bin`` of the binary version,
    or ``train`` and ``test`` of the Python version, of which no code is run.

    Examples
    --------
    >>> images = optsched.serving.cifar100("cifar-100-binary", "test")  # doctest: +SKIP
    """
    pickled = Path(folder) / one_of("split", split, _SPLITS)
    path, side = pickled.with_name(f"{split}.bin"), integer("side", side, 1, 4096)
    if not path.exists() and not pickled.exists():
        raise InputError(f"{folder}: has no {path.name}; unpack cifar-100-binary.tar.gz there")
    path = path if path.exists() else pickled
    content = read_bytes(path)
    if path is pickled:
        content = _records(path, content)
    if not content or len(content) % (2 + _PIXELS):
        image = f"{2 + _PIXELS} (two labels and {_PIXELS} bytes an image)"
        raise InputError(f"{path}: has {len(content)} bytes, expected a multiple of {image}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, 2 + _PIXELS)  # coarse, fine label, pixels
    labels = rows[:, 1]
    for i in np.flatnonzero(labels > 99)[:1]:
        raise InputError(f"{path}: image {i}: expected a label in 0..99, got {labels[i]}")
    x = normalised(rows[:, 2:].reshape(-1, 3, 32, 32))
    return Images(_resized(x, side), torch.from_numpy(labels.astype(np.int64)))


class _Arrays(pickle.Unpickler):
    """Reads arrays, lists and dicts alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse what is not of an array."""
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _records(path: Path, content: bytes) -> bytes:
    """Return the records of the binary version from a file of the Python version."""
    try:
        found = _Arrays(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = found[b"data"], np.array(found[b"fine_labels"], np.uint8)
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXELS):
            raise ValueError(f"data of shape {pixels.shape}")
        return np.column_stack([labels, labels, pixels]).tobytes()
    except Exception as error:  # pickle raises nearly anything
        raise InputError(f"{path}: is no file of CIFAR-100 ({type(error).__name__})") from None


def normalised(colours: Any) -> Tensor:
    """Return colours 0 to 255, shape (..., 3, side, side), normalised as those of CIFAR-100."""
    mean, sd = (torch.tensor(one)[:, None, None] for one in (_MEAN, _SD))
    return torch.from_numpy(colours.astype(np.float32)).div_(255).sub_(mean).div_(sd)


def _resized(x: Tensor, side: int) -> Tensor:
    if x.shape[-1] == side:
        return x
    smaller = side < x.shape[-1]
    return interpolate(x, (side, side), mode="bilinear", align_corners=False, antialias=smaller)
