"""Labelled images to train and measure with: scikit-learn's digits, and CIFAR-100 from a folder."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from optsched.errors import InputError, MissingExtra
from optsched.files import read_bytes

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

CIFAR_CLASSES: Final = 100
_PIXELS: Final = 3 * 32 * 32
_RECORD: Final = 2 + _PIXELS  # coarse label, fine label, pixels
_MEAN: Final = (0.5071, 0.4866, 0.4409)  # of the training images, by colour
_SD: Final = (0.2673, 0.2564, 0.2762)
_TRAINED_ON: Final = 1300
"""Digits; the other 497 are for testing."""


class Images(NamedTuple):
    """Images and their classes."""

    x: Tensor
    """float32, shape (n, channels, side, side); normalised."""
    y: Tensor
    """int64, shape (n,)."""


def digits(split: str = "train") -> Images:
    """Handwritten digits of scikit-learn (1797 real images, grey, 8x8) at 16x16.

    Parameters
    ----------
    split
        ``"train"`` (1300 images) or ``"test"`` (497), always the same ones.

    Raises
    ------
    MissingExtra
        scikit-learn is not installed.
    """
    test = _is_test(split)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("digits", "serving") from None
    data = load_digits()
    # raw numbers of a bit generator are the same in every release of NumPy; permutations may not be
    order = torch.from_numpy(np.argsort(np.random.PCG64(0).random_raw(len(data.target))))
    x = torch.tensor(data.images[order.numpy()], dtype=torch.float32, device="cpu")[:, None]
    x = interpolate(x, size=(16, 16), mode="bilinear", align_corners=False)
    seen = x[:_TRAINED_ON]
    x = (x - seen.mean()) / seen.std()
    y = torch.tensor(data.target, dtype=torch.int64, device="cpu")[order]
    part = slice(_TRAINED_ON, None) if test else slice(_TRAINED_ON)
    return Images(x[part].contiguous(), y[part].contiguous())


def cifar100(folder: str | os.PathLike[str], split: str = "train") -> Images:
    """CIFAR-100 (Krizhevsky 2009) from its unpacked archive; nothing is downloaded.

    Parameters
    ----------
    folder
        Holds ``train.bin`` and ``test.bin`` (binary version), or ``train`` and ``test`` (Python
        version, read without running anything in it).
    split
        ``"train"`` or ``"test"``.

    Raises
    ------
    InputError
        No such file, or its content is not of that form; the message names file and sizes.
    """
    name = "test" if _is_test(split) else "train"
    binary, python = Path(folder) / f"{name}.bin", Path(folder) / name
    if binary.exists():
        pixels, labels = _read_binary(binary)
    elif python.exists():
        pixels, labels = _read_pickle(python)
    else:
        raise InputError(
            f"{folder}: has neither {name}.bin nor {name}; unpack cifar-100-binary.tar.gz or "
            "cifar-100-python.tar.gz and give the folder that holds them"
        )
    x = torch.from_numpy(pixels.reshape(-1, 3, 32, 32).astype(np.float32))
    x.div_(255).sub_(torch.tensor(_MEAN)[:, None, None]).div_(torch.tensor(_SD)[:, None, None])
    return Images(x, torch.from_numpy(labels.astype(np.int64)))


def _read_binary(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    content = np.frombuffer(read_bytes(path), np.uint8)
    if not len(content) or len(content) % _RECORD:
        raise InputError(
            f"{path}: has {len(content)} bytes, expected a multiple of {_RECORD} (two labels and "
            f"{_PIXELS} bytes an image)"
        )
    rows = content.reshape(-1, _RECORD)
    _check_labels(path, rows[:, 1])
    return rows[:, 2:], rows[:, 1]


def _read_pickle(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    try:
        found = _Unpickler(io.BytesIO(read_bytes(path)), encoding="bytes").load()
    except InputError:
        raise
    except Exception as error:  # broken pickles raise nearly anything
        raise InputError(
            f"{path}: is not CIFAR-100's Python version ({str(error) or type(error).__name__:.80})"
        ) from None
    keys = (b"data", b"fine_labels")
    if not isinstance(found, dict) or any(key not in found for key in keys):
        raise InputError(f"{path}: expected a dictionary with data and fine_labels")
    data, given = (found[key] for key in keys)
    if (
        not isinstance(data, np.ndarray)
        or data.dtype != np.uint8
        or data.ndim != 2
        or data.shape[1] != _PIXELS
        or not len(data)
    ):
        shape = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else f"{data!r:.60}"
        raise InputError(f"{path}: data: expected uint8 of shape (n, {_PIXELS}), got {shape}")
    if not isinstance(given, list) or len(given) != len(data):
        count = len(given) if isinstance(given, list) else f"{given!r:.60}"
        raise InputError(f"{path}: fine_labels: expected {len(data)} labels, got {count}")
    if not all(type(label) is int and abs(label) < 2**31 for label in given):
        raise InputError(f"{path}: fine_labels: expected integers")
    labels = np.array(given, np.int64)
    _check_labels(path, labels)
    return data, labels


class _Unpickler(pickle.Unpickler):
    """Rebuilds lists, dictionaries, numbers, texts and NumPy arrays; knows no other global."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is never loaded")


def _check_labels(path: Path, labels: npt.NDArray[Any]) -> None:
    for i in np.flatnonzero((labels < 0) | (labels >= CIFAR_CLASSES))[:1]:
        raise InputError(
            f"{path}: image {i}: expected a label in 0..{CIFAR_CLASSES - 1}, got {labels[i]}"
        )


def _is_test(split: str) -> bool:
    if split not in ("train", "test"):
        raise InputError(f"split: expected train or test, got {split!r:.60}")
    return split == "test"
