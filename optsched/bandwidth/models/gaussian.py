"""Regression by a Gaussian process with a length scale for every input; NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

Floats: TypeAlias = npt.NDArray[np.float64]

LENGTH: Final = (0.0, 1.0)
"""Mean and deviation of the log of a length scale before anything is seen; inputs are about 1."""
SIGNAL: Final = (float(np.log(0.2)), 0.7)
"""Of the log of the deviation of the process: the prior is off by some 20 %."""
NOISE: Final = (float(np.log(0.02)), 0.7)
"""Of the log of the deviation of a measurement: runs of one set of GPUs differ by some 2 %."""
_JITTER: Final = 1e-10
_BLOCK: Final = 4096  # rows of a prediction at a time: some 10 MB
_STEPS: Final = 40
_LEARNT_FROM: Final = 300  # points that choose the scales; more make a fit slower than a second


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """Values minus a prior mean: a linear trend plus a process with Matern-1/2 covariance.

    Matern 1/2 lets neighbours differ abruptly, as counts of GPUs do (8 is not like 7); smoother
    ones are surer of themselves than they are right.

    Parameters
    ----------
    inputs
        Shape (n, d), distinct rows.
    trend
        Regressors of the trend, shape (n, q), each times the deviation of its coefficient; the
        coefficients are 0 on average.
    values
        What is left after the prior mean, shape (n,).
    scales
        Logs of the d length scales, of the signal and of the noise.
    """

    inputs: Floats
    trend: Floats
    values: Floats
    scales: Floats

    @classmethod
    def fit(cls, inputs: Floats, trend: Floats, values: Floats) -> GaussianProcess:
        """With the scales of highest posterior density (marginal likelihood times their prior)."""
        d = inputs.shape[1]
        start = np.array([LENGTH[0]] * d + [SIGNAL[0], NOISE[0]])
        some = _spread(len(values))
        evidence = _Evidence(inputs[some], trend[some], values[some])
        return cls(inputs, trend, values, _minimum(evidence, start) if len(values) else start)

    @cached_property
    def log_evidence(self) -> float:
        """Log of the posterior density of the scales: higher explains the values better."""
        some = _spread(len(self.values))
        evidence = _Evidence(self.inputs[some], self.trend[some], self.values[some])
        return -evidence(self.scales)[0]

    @cached_property
    def noise(self) -> float:
        """Deviation of a measurement."""
        return float(np.exp(self.scales[-1]))

    @cached_property
    def inflation(self) -> float:
        """Factor on deviations that lets 95 % of the points lie where the others expect them.

        Scales that explain few points well are overconfident; each point left out is the test.
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
            alone = self._signal + (trend[part] ** 2).sum(axis=1)
            variance[part] = alone - (explained**2).sum(axis=0)
        deviation = np.sqrt(np.maximum(variance, 0.0) + self.noise**2)
        return mean, deviation * self.inflation

    def draw(self, inputs: Floats, trend: Floats, rng: np.random.Generator) -> Floats:
        """One joint sample of new measurements, without the prior mean, shape (n,)."""
        across = self._covariance(inputs, trend, self.inputs, self.trend)
        explained = np.linalg.solve(self._factor, across.T)
        joint = self._covariance(inputs, trend, inputs, trend) - explained.T @ explained
        joint[np.diag_indices_from(joint)] += self.noise**2 + _JITTER
        spread = np.linalg.cholesky(joint) @ rng.standard_normal(len(inputs))
        return np.asarray(across @ self._weights + spread * self.inflation)

    @cached_property
    def _signal(self) -> float:
        return float(np.exp(2 * self.scales[-2]))

    @cached_property
    def _factor(self) -> Floats:
        joint = self._covariance(self.inputs, self.trend, self.inputs, self.trend)
        joint[np.diag_indices_from(joint)] += self.noise**2 + _JITTER
        return np.asarray(np.linalg.cholesky(joint), np.float64)

    @cached_property
    def _weights(self) -> Floats:
        half = np.linalg.solve(self._factor, self.values)
        return np.asarray(np.linalg.solve(self._factor.T, half))

    def _covariance(self, a: Floats, along_a: Floats, b: Floats, along_b: Floats) -> Floats:
        stretch = np.exp(-self.scales[:-2])
        p, q = a * stretch, b * stretch
        square = np.zeros((len(p), len(q)))
        for i in range(p.shape[1]):
            square += np.subtract.outer(p[:, i], q[:, i]) ** 2
        joint = self._signal * np.exp(-np.sqrt(square))
        for i in range(along_a.shape[1]):
            joint += np.multiply.outer(along_a[:, i], along_b[:, i])
        return np.asarray(joint)


class _Evidence:
    """Minus the log posterior density of the scales, and its gradient."""

    def __init__(self, inputs: Floats, trend: Floats, values: Floats) -> None:
        n, d = inputs.shape
        apart = [np.subtract.outer(column, column) ** 2 for column in inputs.T]
        self.square = np.array(apart).reshape(d, n * n)
        self.along = trend @ trend.T
        self.values = values
        self.centre = np.array([LENGTH[0]] * d + [SIGNAL[0], NOISE[0]])
        self.width = np.array([LENGTH[1]] * d + [SIGNAL[1], NOISE[1]])

    def __call__(self, scales: Floats) -> tuple[float, Floats]:
        y, n = self.values, len(self.values)
        weight = np.exp(-2 * scales[:-2])
        signal, noise = np.exp(2 * scales[-2]), np.exp(2 * scales[-1])
        distance = np.sqrt((weight @ self.square).reshape(n, n))
        close = np.exp(-distance)
        joint = signal * close + self.along
        joint[np.diag_indices(n)] += noise + _JITTER
        off = (scales - self.centre) / self.width
        try:
            factor = np.linalg.cholesky(joint)
        except np.linalg.LinAlgError:
            return np.inf, np.zeros(len(scales))
        inverse = np.linalg.inv(joint)
        weights = inverse @ y
        density = 0.5 * y @ weights + np.log(np.diag(factor)).sum() + 0.5 * n * np.log(2 * np.pi)
        slope = 0.5 * (inverse - np.outer(weights, weights))  # by every entry of the covariance
        gradient = np.empty(len(scales))
        pull = slope * close / np.where(distance > 0, distance, np.inf)
        gradient[:-2] = signal * weight * (self.square @ pull.reshape(-1))
        gradient[-2] = 2 * signal * (slope * close).sum()
        gradient[-1] = 2 * noise * np.trace(slope)
        return float(density + 0.5 * off @ off), gradient + off / self.width


def _minimum(function: Callable[[Floats], tuple[float, Floats]], start: Floats) -> Floats:
    """A local minimum by BFGS with halved steps (Nocedal & Wright, Numerical Optimization, 6.1)."""
    x, identity = start, np.eye(len(start))
    value, gradient = function(x)
    inverse = 0.1 * identity
    for _ in range(_STEPS):
        step = -inverse @ gradient
        step *= min(1.0, 1.5 / max(1e-12, float(np.abs(step).max())))
        fall = float(gradient @ step)
        if fall > -1e-6:
            break
        for _ in range(12):
            below, slope = function(x + step)
            if below <= value + 1e-4 * fall:
                break
            step, fall = step / 2, fall / 2
        else:
            break
        bend, gain = slope - gradient, value - below
        x, value, gradient = x + step, below, slope
        if gain < 1e-3:
            break
        curve = float(step @ bend)
        if curve > 1e-10:
            turn = identity - np.outer(step, bend) / curve
            inverse = turn @ inverse @ turn.T + np.outer(step, step) / curve
    return x


def _spread(n: int) -> npt.NDArray[np.int64]:
    """At most so many of n points, evenly spread over their order."""
    if n <= _LEARNT_FROM:
        return np.arange(n)
    return np.linspace(0, n - 1, _LEARNT_FROM).round().astype(np.int64)
