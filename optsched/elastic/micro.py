"""The micro level: shares of the workers in the next pass, by the uncertainty of the last one.

Source: Sun & Huh, Entropy, Appl. Sci. 2026, 16, 3725; numbers in parentheses are its equations.
A job runs on R workers (ranks); H_r in [0, 1] is the mean normalised entropy of rank r's
predictions, Q_r in [0, 1] its margin uncertainty. U is a job's uncertainty.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer, number

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]
    IntArray = npt.NDArray[np.int64]


class MicroStep(NamedTuple):
    """Hold the plan of the next pass; arrays by worker.

    Examples
    --------
    >>> from optsched.elastic import MicroController
    >>> MicroController(budget=64, batch_bounds=(2, 64)).step([0.5, 0.5]).batches.tolist()
    [32, 32]
    """

    samples: IntArray
    batches: IntArray
    rate_factor: float  # on the *initial* learning rate
    weights: FloatArray  # adding up to 1
    uncertainty: float  # U of the pass that was measured, in [0, 1]
    step_time: float  # of a step relative to equal batches, R * max b / B, at least 1


class MicroController:
    """Plan the passes of one job by (12) and (18)-(27) of Sun & Huh 2026, a `step` a pass.

    Samples and batches are in proportion to the same weights, so all workers need the same number
    of steps, up to rounding and as long as no batch is at a bound. The paper gives no `alpha` and
    no `gamma`. `docs/clusters/uncertainty.md` lists where printed formulas contradict the text.
    A parameter out of range is an `InputError`.

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
        Share of the entropy; that of the margin is 1 - alpha (19).
    beta
        Share of the last weights in the next (21); the default is of Table 3.
    gamma
        Exponent of the learning rate (27).
    rate, rate_bounds
        Initial learning rate, and its bounds.

    Examples
    --------
    >>> from optsched.elastic import MicroController
    >>> controller = MicroController(budget=64, batch_bounds=(2, 64), samples=1000)
    >>> controller.step([0.9, 0.3]).samples.tolist()
    [675, 325]
    """

    def __init__(
        self, budget: int = 64, batch_bounds: tuple[int, int] = (8, 64), *,
        samples: int | None = None, density: float | None = None,
        weight_bounds: tuple[float, float] = (0.5, 1.5),
        alpha: float = 1.0, beta: float = 0.3, gamma: float = 0.5, rate: float = 1e-3,
        rate_bounds: tuple[float, float] = (1e-5, 1e-2),
    ) -> None:  # fmt: skip
        self.budget = integer("budget", budget, 1, 2**30)
        self.samples = integer("samples", budget if samples is None else samples, 1, 2**30)
        self.density = None if density is None else number("density", density, above=True)
        self.alpha, self.beta = number("alpha", alpha, 0.0, 1.0), number("beta", beta, 0.0, 1.0)
        if self.beta == 1.0:
            raise InputError("beta: expected a number in [0, 1), got 1: weights would not change")
        least, most = _pair("batch bounds", batch_bounds)
        self.batch_bounds = tuple(integer("batch bounds", x, 1, 2**30) for x in (least, most))
        self.weight_bounds = _pair("weight bounds", weight_bounds, 1.0)
        self.rate = number("rate", rate, above=True)
        self.rate_bounds = _pair("rate bounds", rate_bounds)
        self.gamma = number("gamma", gamma, -math.inf)
        self._weights: FloatArray = np.zeros(0)
        self._first: float | None = None

    def step(self, H: Any, Q: Any = None, workers: int | None = None) -> MicroStep:
        """Plan the next pass from the measurements of the last one.

        `H` and `Q` are the mean normalised entropy and margin uncertainty of every worker, in
        [0, 1], shapes (workers,); `Q` is needed if alpha < 1. The next pass has as many workers, or
        `workers`: then weights start anew, equal, and the learning rate continues. Other values, or
        a budget that so many workers cannot share, are an `InputError`.
        """
        from optsched_solvers.quota import proportional

        h = _unit_values("H", H)
        size = len(h) if workers is None else integer("workers", workers, 1, 2**20)
        used = self._weights if len(self._weights) == len(h) else np.full(len(h), 1.0 / len(h))
        now = uncertainty(used, h, Q, self.alpha)  # also checks Q
        q = h if Q is None else _unit_values("Q", Q)
        one, two = (x / x.sum() * len(x) if x.any() else np.ones(len(x)) for x in (h, q))  # (18)
        u = self.alpha * one + (1.0 - self.alpha) * two  # (19)
        weights = np.full(size, 1.0 / size)
        if size == len(h):
            low, high = self.weight_bounds
            mixed = self.beta * used * size + (1.0 - self.beta) * np.clip(u, low, high)  # (21)
            weights = _clipped(mixed, low, high) / size  # (22)
        batches = self._batches(weights)
        total = self.samples if self.density is None else pass_samples(size, self.density)
        first = now if self._first is None else self._first
        samples = proportional(weights, total, 0, total)[0]  # (23), (24)
        # the state changes only after everything has succeeded
        self._weights, self._first = weights, first
        return MicroStep(
            samples, batches, self._rate(now, first) / self.rate, weights, now,
            float(size * batches.max() / batches.sum()),
        )  # fmt: skip

    def _batches(self, weights: FloatArray) -> IntArray:
        """Batch size of every worker (25), adding up to the budget."""
        from optsched_solvers.quota import proportional

        (least, most), workers = self.batch_bounds, len(weights)
        if not workers * least <= self.budget <= workers * most:
            raise InputError(
                f"budget: {workers} workers with batches of {least}..{most} share a global batch "
                f"of {workers * least}..{workers * most}, not {self.budget}"
            )
        return proportional(weights, self.budget, least, most)[0]

    def _rate(self, now: float, first: float) -> float:
        """Learning rate at an uncertainty (27); a U or U_0 of 0 leaves it as it is."""
        ratio = now / first if now > 0 and first > 0 else 1.0
        rate = self.rate * math.exp(min(math.log(ratio) * -self.gamma, 700.0))
        return float(min(max(rate, self.rate_bounds[0]), self.rate_bounds[1]))


def pass_samples(gpus: int, density: float) -> int:
    """Samples of a pass of a job with a quota of `gpus` (12): N = g rho, rounded.

    With a fixed number of passes a smaller quota then means less training, not less time.
    """
    found = round(integer("gpus", gpus, 1, 2**20) * number("density", density, above=True))
    if not gpus <= found <= 2**30:
        raise InputError(f"density: {gpus} GPUs share {found} samples, expected {gpus}..2^30")
    return found


def uncertainty(weights: FloatArray, H: Any, Q: Any = None, alpha: float = 1.0) -> float:
    """Uncertainty of a job, in [0, 1] (26): weighted sum of alpha * H + (1 - alpha) * Q (19)."""
    h = _unit_values("H", H)
    if Q is None and alpha < 1:
        raise InputError("Q: margin uncertainties are needed because alpha < 1")
    q = h if Q is None else _unit_values("Q", Q)
    if len(q) != len(h):
        raise InputError(f"Q: expected {len(h)} values, got {len(q)}")
    return float(weights @ (alpha * h + (1.0 - alpha) * q))


def _unit_values(name: str, given: Any) -> FloatArray:
    """Check numbers in [0, 1], at least one."""
    try:
        values = np.asarray(given, np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.zeros(0)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise InputError(f"{name}: expected a vector of finite numbers, got {given!r:.60}")
    for i in np.flatnonzero((values < 0) | (values > 1))[:1]:
        raise InputError(f"{name}: expected 0..1, value {i} is {values[i]}")
    return values


def _pair(name: str, bounds: Any, middle: float | None = None) -> tuple[Any, Any]:
    """Check two numbers, 0 < least <= middle <= most."""
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise InputError(f"{name}: expected (least, most), got {bounds!r:.60}")
    low, high = (number(name, bound, above=True) for bound in bounds)
    if not low <= (low if middle is None else middle) <= high:
        between = "" if middle is None else f" {middle:g} <="
        raise InputError(f"{name}: expected 0 < least <={between} most, got {bounds!r:.60}")
    return bounds[0], bounds[1]


def _clipped(scores: FloatArray, low: float, high: float) -> FloatArray:
    """Shares clip(mu * score, low, high) with the mu at which their mean is 1."""
    scores = np.maximum(scores / scores.max(), 1e-300)  # what others cannot take goes to zeros
    fixed = np.full(len(scores), np.nan)
    while (free := np.isnan(fixed)).any():  # every round fixes a share
        q = (len(scores) - fixed[~free].sum()) * (scores / scores[free].sum())
        over, under = free & (q > high), free & (q < low)
        if not (over.any() or under.any()):
            return np.where(free, q, fixed)
        if (q - high)[over].sum() >= (low - q)[under].sum():
            fixed[over] = high
        else:
            fixed[under] = low
    return fixed
