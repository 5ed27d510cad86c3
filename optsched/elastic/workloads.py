"""Small workloads: three kinds of models on the digits of scikit-learn."""

from __future__ import annotations

from functools import partial

import numpy as np

from optsched.errors import MissingExtra

try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import TensorDataset
except ImportError:
    raise MissingExtra("the digits", "serving") from None


def digits(
    classes: int = 10, repeat: int = 1, noise: float = 0.0
) -> tuple[TensorDataset, TensorDataset]:
    """Return the 8x8 digits below `classes` (2 to 10): training, and every fifth for validation.

    Training data are repeated, from the second time on with normal noise of this standard
    deviation.
    """
    x, y = load_digits(n_class=classes, return_X_y=True)
    x, y = (x / 16.0).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)
    held = np.arange(len(x)) % 5 == 4
    random = np.random.default_rng(classes)
    copies = [x[~held]] + [
        x[~held] + noise * random.standard_normal(x[~held].shape, np.float32)
        for _ in range(repeat - 1)
    ]
    rows = (np.concatenate(copies), np.tile(y[~held], repeat)), (x[held], y[held])
    train, validation = (TensorDataset(*map(torch.from_numpy, pair)) for pair in rows)
    return train, validation


def logistic(classes: int = 10) -> nn.Module:
    """Logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def mlp(classes: int = 10, width: int = 64, dropout: float = 0.0) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes),
    )  # fmt: skip


def cnn(classes: int = 10, width: int = 16, norm: bool = False) -> nn.Module:
    """Two convolutions and a linear layer, with batch normalisation or without."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, width), (width, 2 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1)]
        layers += [nn.BatchNorm2d(outputs)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * width, classes))


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = torch.optim.Adam
