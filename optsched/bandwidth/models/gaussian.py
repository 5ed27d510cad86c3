"""Regression by a Gaussian process whose scales are given; NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

LENGTH: Final = 2.7
"""Over which inputs of about 1 make a difference."""
SIGNAL: Final = 0.2
"""Deviation of the process: the prior is off by some 20 %."""
NOISE: Final = 0.015
"""Deviation of a measurement: runs of one set of GPUs differ by one or two per cent."""
_JITTER: Final = 1e-10
_BLOCK: Final = 4096  # rows of a prediction at a time: some 10 MB


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """Values minus a prior mean: a linear trend plus a process with Matern-1/2 covariance.

    Matern 1/2 lets neighbours differ abruptly, as counts of GPUs do (8 is not like 7); smoother
    ones are surer of themselves than they are right. Scales learnt by marginal likelihood, as
    we had, predict and choose no better (docs/subset-benchmarks.md).

    Parameters
    ----------
    inputs
        Shape (n, d), distinct rows.
    trend
        Regressors of the trend, shape (n, q), each times the deviation of its coefficient; the
        coefficients are 0 on average.
    values
        What is left after the prior mean, shape (n,).
    """

    inputs: Floats
    trend: Floats
    values: Floats

    @cached_property
    def inflation(self) -> float:
        """Factor on deviations that lets 95 % of the points lie where the others expect them.

        Each point left out is the test.
        """
        if not len(self.values):
            return 1.0
        inverse = np.linalg.inv(self._factor @ self._factor.T)
        doubt = 1 / np.sqrt(np.diag(inverse))
        lonely = doubt >= np.median(doubt)  # as those are that were not measured
        error = np.sort((np.abs(self._weights) * doubt)[lonely])
        return max(1.0, float(error[min(len(error) - 1, int(0.95 * (len(error) + 1)))]) / 1.96)

    def predict(self, inputs: Floats, trend: Floats) -> tuple[Floats, Floats]:
        """Mean and deviation of new measurements, without the prior mean; both of shape (n,)."""
        mean, variance = np.empty(len(inputs)), np.empty(len(inputs))
        for at in range(0, len(inputs), _BLOCK):
            part = slice(at, at + _BLOCK)
            across = self._covariance(inputs[part], trend[part], self.inputs, self.trend)
            mean[part] = (across * self._weights).sum(axis=1)  # a row never depends on its block
            explained = np.linalg.solve(self._factor, across.T)
            alone = SIGNAL**2 + (trend[part] ** 2).sum(axis=1)
            variance[part] = alone - (explained**2).sum(axis=0)
        deviation = np.sqrt(np.maximum(variance, 0.0) + NOISE**2)
        return mean, deviation * self.inflation

    def draw(self, inputs: Floats, trend: Floats, rng: np.random.Generator) -> Floats:
        """One joint sample of new measurements, without the prior mean, shape (n,)."""
        across = self._covariance(inputs, trend, self.inputs, self.trend)
        explained = np.linalg.solve(self._factor, across.T)
        joint = self._covariance(inputs, trend, inputs, trend) - explained.T @ explained
        joint[np.diag_indices_from(joint)] += NOISE**2 + _JITTER
        spread = np.linalg.cholesky(joint) @ rng.standard_normal(len(inputs))
        return np.asarray(across @ self._weights + spread)

    @cached_property
    def _factor(self) -> Floats:
        joint = self._covariance(self.inputs, self.trend, self.inputs, self.trend)
        joint[np.diag_indices_from(joint)] += NOISE**2 + _JITTER
        return np.asarray(np.linalg.cholesky(joint), np.float64)

    @cached_property
    def _weights(self) -> Floats:
        half = np.linalg.solve(self._factor, self.values)
        return np.asarray(np.linalg.solve(self._factor.T, half))

    def _covariance(self, a: Floats, along_a: Floats, b: Floats, along_b: Floats) -> Floats:
        p, q = a / LENGTH, b / LENGTH
        square = np.zeros((len(p), len(q)))
        for i in range(p.shape[1]):
            square += np.subtract.outer(p[:, i], q[:, i]) ** 2
        joint = SIGNAL**2 * np.exp(-np.sqrt(square))
        for i in range(along_a.shape[1]):
            joint += np.multiply.outer(along_a[:, i], along_b[:, i])
        return np.asarray(joint)
