"""Regression by a Gaussian process with fixed scales; NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

LENGTH: Final = 2.7
"""Distance of inputs (of about 1) at which the correlation falls to 1/e."""
SIGNAL: Final = 0.2
"""Deviation of the process: the prior is off by some 20 %."""
NOISE: Final = 0.015
"""Deviation of a measurement: runs of one set of GPUs differ by one or two per cent."""
QUANTILE: Final = 1.96
"""Deviations from the mean to an end of a 95 % interval."""
_JITTER: Final = 1e-10
_BLOCK: Final = 4096  # rows of a prediction at a time: some 10 MB


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """Values minus a prior mean: a linear trend plus a process with Matern-1/2 covariance.

    Matern 1/2 lets neighbours differ abruptly, as counts of GPUs do (8 is not like 7); smoother
    kernels are surer than right. Scales learnt by marginal likelihood predict and choose no
    better (docs/results/gpus.md).
    """

    inputs: Floats  # shape (n, d), distinct rows
    trend: Floats  # regressors, shape (n, q), each times the deviation of its coefficient
    values: Floats  # what is left after the prior mean, shape (n,)

    @cached_property
    def inflation(self) -> float:
        """Factor on deviations with which 95 % of left-out points lie in the others' intervals."""
        if not len(self.values):
            return 1.0
        inverse = np.linalg.inv(self._factor @ self._factor.T)
        doubt = 1 / np.sqrt(np.diag(inverse))
        sparse = doubt >= np.median(doubt)  # as unmeasured ones are
        error = np.sort((np.abs(self._weights) * doubt)[sparse])
        at = min(len(error) - 1, int(0.95 * (len(error) + 1)))
        return max(1.0, float(error[at]) / QUANTILE)

    def predict(self, inputs: Floats, trend: Floats) -> tuple[Floats, Floats]:
        """Mean and deviation of new measurements, without the prior mean; both of shape (n,)."""
        mean, variance = np.empty(len(inputs)), np.empty(len(inputs))
        for at in range(0, len(inputs), _BLOCK):
            part = slice(at, at + _BLOCK)
            across = _covariance(inputs[part], trend[part], self.inputs, self.trend)
            mean[part] = (across * self._weights).sum(axis=1)  # a row never depends on its block
            explained = self._inverse @ across.T
            before = SIGNAL**2 + (trend[part] ** 2).sum(axis=1)
            variance[part] = before - (explained**2).sum(axis=0)
        deviation = np.sqrt(np.maximum(variance, 0.0) + NOISE**2)
        return mean, deviation * self.inflation

    def informative(self, inputs: Floats, trend: Floats, weight: Floats, count: int) -> list[int]:
        """Rows to measure: each narrows the intervals of all rows most, after those before it.

        No result changes how wide intervals become (Cohn, 1996). `weight`: of variances.
        """
        explained = self._inverse @ _covariance(self.inputs, self.trend, inputs, trend)
        joint = _covariance(inputs, trend, inputs, trend) - explained.T @ explained
        found: list[int] = []
        for _ in range(min(count, len(inputs))):
            variance = np.diag(joint) + NOISE**2
            gain = weight @ joint**2 / variance
            gain[found] = -1.0
            best = int(np.argmax(gain))
            found.append(best)
            joint -= np.outer(joint[best], joint[best]) / variance[best]
        return found

    @cached_property
    def _factor(self) -> Floats:
        joint = _covariance(self.inputs, self.trend, self.inputs, self.trend)
        joint[np.diag_indices_from(joint)] += NOISE**2 + _JITTER
        return np.asarray(np.linalg.cholesky(joint), np.float64)

    @cached_property
    def _inverse(self) -> Floats:
        return np.asarray(np.linalg.inv(self._factor))

    @cached_property
    def _weights(self) -> Floats:
        half = np.linalg.solve(self._factor, self.values)
        return np.asarray(np.linalg.solve(self._factor.T, half))


def _covariance(a: Floats, along_a: Floats, b: Floats, along_b: Floats) -> Floats:
    p, q = a / LENGTH, b / LENGTH
    square = np.zeros((len(p), len(q)))
    for i in range(p.shape[1]):
        square += np.subtract.outer(p[:, i], q[:, i]) ** 2
    joint = SIGNAL**2 * np.exp(-np.sqrt(square))
    for i in range(along_a.shape[1]):
        joint += np.multiply.outer(along_a[:, i], along_b[:, i])
    return np.asarray(joint)
