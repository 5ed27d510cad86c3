"""The micro level: who computes how much of the next pass, decided from the workers' entropies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.elastic import equations as eq
from optsched.io.values import integer, number

if TYPE_CHECKING:
    from optsched.elastic.equations import FloatArray, IntArray


class MicroStep(NamedTuple):
    """What the next pass of a job looks like; arrays by worker."""

    samples: IntArray
    batches: IntArray
    rate_factor: float  # on the *initial* learning rate
    weights: FloatArray  # adding up to 1
    uncertainty: float  # U of the pass that was measured, in [0, 1]
    improvement: float  # fall of U since the pass before; 0 if it had other workers
    step_time: float  # of a step relative to equal batches, at least 1


class MicroController:
    """Equations (12) and (18)-(28) of Sun & Huh 2026 for one job, one `step` after every pass.

    Samples and batches are in proportion to the same weights, so all workers need the same number
    of steps, up to rounding and as long as no batch is at a bound. The paper gives no `alpha` and
    no `gamma`. U (26) is taken with the weights by which the pass was shared; printed, Algorithm 1
    renews them first (lines 11 and 12). A parameter out of range is an `InputError`.

    Parameters
    ----------
    budget
        Global batch size, kept by every split.
    batch_bounds
        Least and most samples in a worker's batch; batch normalisation needs at least 2.
    samples
        Samples of a pass; None stands for one global batch.
    density
        Samples of a pass for every worker: a pass of g workers has N = g * density (12), instead of
        `samples`.
    weight_bounds
        Least and most weight of a worker as a multiple of the mean.
    alpha
        Part of the entropy, the rest is the margin (19).
    beta
        Part of the last weights in the new ones (21).
    gamma
        Exponent of the learning rate (27).
    rate, rate_bounds
        Initial learning rate, and what it is kept within.
    as_printed
        Use the paper's formulas throughout: samples and batches then need not add up.
    """

    def __init__(
        self, budget: int = 64, batch_bounds: tuple[int, int] = (8, 64), *,
        samples: int | None = None, density: float | None = None,
        weight_bounds: tuple[float, float] = eq.WEIGHTS,
        alpha: float = 1.0, beta: float = eq.BETA, gamma: float = 0.5, rate: float = 1e-3,
        rate_bounds: tuple[float, float] = eq.RATES, as_printed: bool = False,
    ) -> None:  # fmt: skip
        self.budget = integer("budget", budget, 1, 2**30)
        self.samples = integer("samples", budget if samples is None else samples, 1, 2**30)
        self.density = None if density is None else number("density", density, above=True)
        self.as_printed = bool(as_printed)
        one = np.ones(1)
        eq.combined(one, one, alpha)
        eq.smoothed_weights(one, one, beta, weight_bounds, as_printed=True)
        eq.batch_sizes(one, self.budget, batch_bounds, as_printed=True)
        eq.learning_rate(rate, 1.0, 1.0, gamma, rate_bounds)
        self.alpha, self.beta, self.gamma = float(alpha), float(beta), float(gamma)
        self.batch_bounds, self.weight_bounds = batch_bounds, weight_bounds
        self.rate, self.rate_bounds = number("rate", rate, above=True), rate_bounds
        self._weights: FloatArray = np.zeros(0)
        self._first: float | None = None
        self._last: float | None = None
        self._rate = self.rate

    def step(self, H: Any, Q: Any = None, workers: int | None = None) -> MicroStep:
        """Plan the next pass from what the last one measured.

        `H` and `Q` are the mean normalised entropy and margin uncertainty of every worker, in
        [0, 1], shapes (workers,); `Q` is needed if alpha < 1. The next pass has as many workers, or
        `workers`: then weights start anew, equal, and the learning rate goes on. Other values, or
        a budget that so many workers cannot share, are an `InputError`.
        """
        h = eq.unit_values("H", H)
        size = len(h) if workers is None else integer("workers", workers, 1, 2**20)
        known = len(self._weights) == len(h)
        used = self._weights if known else np.full(len(h), 1.0 / len(h))
        printed = self.as_printed
        measured = eq.uncertainty(used, h, Q, self.alpha)  # also checks Q
        q = h if Q is None else Q
        relative_h, relative_q = (eq.relative_uncertainty(x, as_printed=printed) for x in (h, q))
        u = eq.combined(relative_h, relative_q, self.alpha)
        weights = eq.smoothed_weights(used, u, self.beta, self.weight_bounds, as_printed=printed)
        uncertainty = float(weights @ u) if printed else measured
        improvement = self._last - uncertainty if known and self._last is not None else 0.0  # (28)
        first = uncertainty if self._first is None else self._first
        if size != len(h):
            weights = np.full(size, 1.0 / size)
        batches = eq.batch_sizes(weights, self.budget, self.batch_bounds, as_printed=printed)
        total = self.samples if self.density is None else eq.pass_samples(size, self.density)
        samples = eq.sample_counts(weights, total, as_printed=printed)
        base = self._rate if printed else self.rate
        rate = eq.learning_rate(base, uncertainty, first, self.gamma, self.rate_bounds, printed)
        # nothing is remembered before everything has succeeded
        self._weights, self._first, self._rate = weights, first, rate
        self._last = uncertainty if size == len(h) else None
        return MicroStep(
            samples, batches, rate / self.rate, weights, uncertainty, improvement,
            eq.step_time(batches),
        )  # fmt: skip
