"""Training of a SlimResNet, accuracies of its tuples, its files, and the images it is fed."""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from torch.nn.functional import cross_entropy  # noqa: E402

from optsched.errors import InputError, MissingExtra  # noqa: E402
from optsched.serving import network, profiler  # noqa: E402
from optsched.serving.network import Images, SlimResNet, cifar100, digits  # noqa: E402
from optsched.serving.tables import WIDTHS  # noqa: E402

if TYPE_CHECKING:
    from program import Cli

pytestmark = pytest.mark.torch


def tiny(channels: tuple[int, ...] = (8, 16), seed: int = 0) -> SlimResNet:
    """Two widths."""
    return SlimResNet(10, channels, 1, 1, 4, (0.5, 1.0), seed)


def some(images: Images, count: int) -> Images:
    """The first ones, at 8x8 to be quick."""
    return Images(images.x[:count, :, ::2, ::2].contiguous(), images.y[:count])


def weights(net: SlimResNet) -> torch.Tensor:
    """All in one vector."""
    return torch.cat([part.detach().flatten() for part in net.parameters()])


def test_digits_are_split_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """1300 and 497 different images; without scikit-learn a sentence says what to install."""
    train, test = digits(), digits("test")
    assert (train.x.shape, test.x.shape) == ((1300, 1, 16, 16), (497, 1, 16, 16))
    assert (train.x.dtype, train.y.dtype) == (torch.float32, torch.int64)
    assert float(train.x.mean()) == pytest.approx(0, abs=1e-4)
    assert float(train.x.std()) == pytest.approx(1, abs=1e-4)
    assert train.y[:6].tolist() == [0, 6, 3, 8, 1, 8]
    assert len({part.numpy().tobytes() for part in (*train.x, *test.x)}) == 1797
    assert int(torch.bincount(test.y, minlength=10).min()) > 30  # all classes are in both parts
    with pytest.raises(InputError, match="split: expected one of train, test, got"):
        digits("all")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match=r'digits .* pip install "\.\[serving\]"'):
        digits()


def test_a_short_training_teaches_every_tuple() -> None:
    """Two epochs: narrow, mixed and full tuples are far above the 10 % of chance."""
    net, images, seen = tiny((16, 32, 64)), some(digits(), 650), []
    history = network.train_slim(net, images, epochs=2, lr=0.05, on_progress=seen.append)
    assert history == seen
    assert [(row.epoch, row.epochs) for row in history] == [(1, 2), (2, 2)]
    assert history[1].loss < 0.5 * history[0].loss
    table = network.measure_accuracy(net, some(digits("test"), 497))
    assert min(table.values()) > 40, table


def test_a_step_trains_on_four_tuples() -> None:
    """One step equals one by hand: the full tuple on labels, three on its answers."""
    images, net, by_hand = some(digits(), 16), tiny(), tiny()
    network.train_slim(net, images, epochs=1, batch=16, lr=0.1, seed=3)
    draw = torch.Generator().manual_seed(3)
    rows = torch.randperm(16, generator=draw)
    drawn = torch.randint(2, (2, 2), generator=draw).tolist()
    logits = by_hand(images.x[rows], (1, 1))
    loss = cross_entropy(logits, images.y[rows])
    for widths in ((0, 0), *drawn):
        other = by_hand(images.x[rows], widths).log_softmax(1)
        loss = loss - (logits.detach().softmax(1) * other).sum(1).mean()
    loss.backward()
    with torch.no_grad():
        for part in by_hand.parameters():  # the first step of Nesterov momentum
            part -= 0.1 * 1.9 * (part.grad + 5e-4 * part)
    torch.testing.assert_close(weights(net), weights(by_hand), atol=1e-6, rtol=1e-5)


def test_accuracy_of_every_tuple_is_that_of_a_direct_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every prefix run once."""
    images, net, calls = some(digits("test"), 497), tiny((8, 8, 16)), []
    direct = {}
    for widths in product(range(2), repeat=3):
        right = net(images.x, widths).argmax(1) == images.y
        direct[",".join(map(str, widths))] = 100 * int(right.sum()) / 497
    run = SlimResNet.segment
    monkeypatch.setattr(SlimResNet, "segment", lambda *given: calls.append(given[1]) or run(*given))
    assert network.measure_accuracy(net, images) == pytest.approx(direct)
    assert [calls.count(k) for k in range(3)] == [2, 4, 8]


def test_images_that_do_not_fit_are_refused() -> None:
    """By training and by measuring."""
    good = some(digits(), 8)
    for wrong, message in (
        (Images(good.x.expand(-1, 3, -1, -1), good.y), r"images.x: expected \(n, 1, side"),
        (Images(good.x, good.y[:7]), "images.y: expected 8 classes"),
        (Images(good.x, good.y + 5), r"images.y: expected classes in 0\.\.9, got"),
        (Images(good.x[:0], good.y[:0]), "images.x: expected"),
    ):
        for use in (network.train_slim, network.measure_accuracy):
            with pytest.raises(InputError, match=message):
                use(tiny(), wrong)


class Hostile:
    """A plain unpickler that reads one makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"mkdir {self.path}",)


def test_saved_and_loaded(tmp_path: Path) -> None:
    """The same net; other formats, other shapes and pickles with code in them are refused."""
    net, path = tiny(seed=5), tmp_path / "net.pt"
    network.save_network(net, path)
    again = network.load_network(path)
    assert torch.equal(weights(again), weights(net))
    assert again.widths == net.widths
    assert network.train_slim(again, some(digits(), 32), epochs=1)
    content = torch.load(path, weights_only=True)
    wide = {**content["arguments"], "channels": (8, 24)}
    for message, tree in {
        "format: expected": {**content, "format": "optsched.slim-resnet/2"},
        "channels: segment 1": {**content, "arguments": {**wide, "channels": (8, 18)}},
        "is not a network": {**content, "arguments": wide},
    }.items():
        torch.save(tree, path)
        with pytest.raises(InputError, match=rf"net\.pt: {message}"):
            network.load_network(path)
    path.write_bytes(pickle.dumps(Hostile(tmp_path / "harm"), protocol=2))
    with pytest.raises(InputError, match="is not a network"):
        network.load_network(path)
    assert not (tmp_path / "harm").exists()


def test_cifar(tmp_path: Path) -> None:
    """Labels, shapes and a normalised pixel; broken files are refused with their size or label."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3072), np.uint8)
    records = np.concatenate([np.array([[3, 41], [1, 99]], np.uint8), pixels], 1)
    path = tmp_path / "test.bin"
    path.write_bytes(records.tobytes())
    found = cifar100(tmp_path, "test")
    assert found.y.tolist() == [41, 99]
    assert (found.x.shape, found.x.dtype) == ((2, 3, 32, 32), torch.float32)
    green = (pixels[1, 1024 + 33] / 255 - 0.4866) / 0.2564  # second row, second column
    assert float(found.x[1, 1, 1, 1]) == pytest.approx(green, abs=1e-5)
    with pytest.raises(InputError, match=r"has no train\.bin; unpack"):
        cifar100(tmp_path)
    pickled = {b"data": pixels, b"fine_labels": [41, 99], b"filenames": [b"a", b"b"]}
    for given, message in (
        (pickled, ""),
        ({**pickled, b"data": pixels[:1]}, "ValueError"),
        ({**pickled, b"fine_labels": [1, 256]}, "OverflowError"),
        (Hostile(tmp_path / "harm"), "UnpicklingError"),
        ([], "TypeError"),
    ):
        (tmp_path / "train").write_bytes(pickle.dumps(given, protocol=4))
        if message:
            with pytest.raises(InputError, match=rf"train: is no file of CIFAR-100 .{message}"):
                cifar100(tmp_path)
        else:
            again = cifar100(tmp_path)
            assert torch.equal(again.x, found.x) and torch.equal(again.y, found.y)
    assert not (tmp_path / "harm").exists()
    for content, message in (
        (b"\0" * 3073, "has 3073 bytes, expected a multiple of 3074"),
        (b"", "has 0 bytes"),
        (b"\0" * 3074 + b"\0\x64" + b"\0" * 3072, "image 1: expected .* got 100"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"test\.bin: {message}"):
            cifar100(tmp_path, "test")


def test_cifar_through_all_commands(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, profile, run and make, by files; the accuracy is that on the held-out images."""
    monkeypatch.setattr(
        profiler, "profile", functools.partial(profiler.profile, batches=(1, 2), repeats=1)
    )
    monkeypatch.setattr(profiler, "_TRIAL", 100)
    small: Any = ((8, 16, 16, 16), 1, 3, 2, WIDTHS, 0)
    monkeypatch.setattr(SlimResNet.__init__, "__defaults__", small)
    draw = np.random.default_rng(0)
    for name, n in (("train", 32), ("test", 20)):
        rows = draw.integers(0, 100, (n, 3074), np.uint8)
        rows[:, 1] = np.arange(n) % 2
        rows[:, 2:] += (60 * rows[:, 1:2]).astype(np.uint8)
        Path(f"{name}.bin").write_bytes(rows.tobytes())
    for words in (
        "train --path . --side 8 --epochs 1 -o n.pt --accuracy a.json",
        "profile --network n.pt --accuracy a.json -o s.json --side 8 --devices cpu --rate 20 "
        "--seconds 1",
        "run s.json --network n.pt --path . --log l.json",
        "make --accuracy a.json --rate 100 --seconds 1 -o m.json",
    ):
        ran = cli("slim", *words.split())
        assert ran.code == 0, ran.err
    table, net = json.loads(Path("a.json").read_text()), network.load_network("n.pt")
    test = cifar100(".", "test", 8)
    assert len(table) == 256 and net.in_channels == 3
    for widths in ((3, 3, 3, 3), (0, 1, 2, 3)):
        with torch.inference_mode():
            right = (net(test.x, widths).argmax(1) == test.y).double().mean()
        assert table[",".join(map(str, widths))] == pytest.approx(100 * float(right))
    for name in ("s.json", "m.json"):
        assert json.loads(Path(name).read_text())["accuracy"] == pytest.approx(table, abs=1e-3)
    ran = cli("slim", "run", "s.json", "--network", "n.pt")
    assert ran.code == 2 and "--path FOLDER serves CIFAR-100" in ran.err
