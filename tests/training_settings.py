"""Spellings of numbers, and every scheduler and optimizer of torch with numbers of NumPy in it."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

if TYPE_CHECKING:
    from collections.abc import Callable

FLOATS: dict[str, Callable[[float], Any]] = {
    "float": float, "half": np.float16, "single": np.float32, "double": np.float64,
    "long": np.longdouble, "array": np.array, "single array": lambda x: np.array(x, "f4"),
    "element": lambda x: np.logspace(-3, -2, 4)[2] + 0 * x,
    "element of singles": lambda x: np.linspace(x, 1, 3, dtype="f4")[0],
    "mean": lambda x: np.mean([x, x]), "product": lambda x: np.float32(x) * np.float64(1),
    "fraction": lambda x: Fraction(x).limit_denominator(1000), "decimal": lambda x: Decimal(str(x)),
    "tensor": lambda x: torch.tensor(x),
    "double tensor": lambda x: torch.tensor(x, dtype=torch.float64),
}  # fmt: skip
INTEGERS: dict[str, Callable[[int], Any]] = {
    **{kind.__name__: kind for kind in (
        int, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
        np.intc, np.longlong)},
    "element": lambda n: np.arange(n + 1)[n], "array": np.array, "sum": lambda n: np.sum([n]),
    "largest": lambda n: np.max(np.arange(n + 1, dtype="u2")),
    "count": lambda n: np.ones(n).sum(dtype=int),
    "tensor": torch.tensor, "short tensor": lambda n: torch.tensor(n, dtype=torch.int16),
}  # fmt: skip


class Half:
    """A factor that counts, in numbers of NumPy."""

    def __init__(self) -> None:
        self.value = np.float32(1)

    def __call__(self, epoch: int) -> Any:
        """Smaller by a factor that float32 rounds, in a number of NumPy."""
        self.value = self.value * np.float32(0.9)
        return self.value * 0.3


class Numbers(schedulers.LRScheduler):
    """Its state has numbers of NumPy, alone, in a list and in a dictionary."""

    def __init__(self, optimizer: Any) -> None:
        self.factor, self.rows = np.float32(1), {"a": [np.float32(1)], "b": (np.int64(3),)}
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        """Rounded to float32 as long as all numbers are NumPy's."""
        self.factor = self.factor * 0.9
        self.rows["a"][0] = self.rows["a"][0] * np.float32(0.7)
        return [r * self.factor * self.rows["a"][0] for r in self.base_lrs]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda e: 0.5 * (1 + np.cos(np.pi * e / 20))),
    "LambdaLR of float32": lambda o: schedulers.LambdaLR(o, lambda e: np.float32(0.9) ** e),
    "LambdaLR of an object": lambda o: schedulers.LambdaLR(o, Half()),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda e: np.float32(0.9)),
    "StepLR": lambda o: schedulers.StepLR(o, np.int64(2), np.float32(0.3)),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, np.array([1, 3]), np.float64(0.3)),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, np.float32(0.3), np.int64(3)),
    "LinearLR": lambda o: schedulers.LinearLR(o, np.float64(0.3), total_iters=3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, np.float32(0.9)),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, np.int64(9), np.float64(2)),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5, np.float64(1e-3)),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, np.float32(0.1), 2, cycle_momentum=False),
    "CyclicLR of a function": lambda o: schedulers.CyclicLR(
        o, 0.01, 0.1, 2, scale_fn=lambda x: np.float64(0.5), cycle_momentum=False),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, np.float64(0.1), 99),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(
        o, factor=np.float64(0.5), patience=0, threshold=np.float32(0.5)),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, np.float32(0.1), total_iters=3),
            schedulers.StepLR(o, 1, np.float32(0.7))], [np.int64(3)]),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, total_iters=3), Numbers(o)], o),
    "Numbers": Numbers, "SWALR": lambda o: SWALR(o, np.float32(0.1), 3),
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adafactor": {}, "Adadelta": {}, "Adagrad": {"initial_accumulator_value": np.float32(0.1)},
    "Adam": {"amsgrad": np.True_}, "Adamax": {"betas": np.array([0.9, 0.99])},
    "AdamW": {"betas": (np.float64(0.9), np.float64(0.99))}, "ASGD": {"t0": np.float64(2)},
    "Muon": {"momentum": np.float32(0.5)}, "NAdam": {"momentum_decay": np.float32(0.004)},
    "RAdam": {}, "RMSprop": {"momentum": np.float32(0.5), "centered": np.bool_(1)},
    "Rprop": {"etas": (np.float64(0.5), np.float32(1.2))}, "SGD": {"momentum": np.float32(0.5)},
}  # fmt: skip
