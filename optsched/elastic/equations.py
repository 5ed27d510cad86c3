"""The equations of the Entropy scheduler, as they should be and as they are printed.

Source: Sun & Huh, Entropy, Appl. Sci. 2026, 16, 3725; numbers in parentheses are its equations.
Every function is pure. `as_printed=True` keeps the paper's formula where it is ambiguous or wrong;
the tests assert what goes wrong. Values out of range or number are an `InputError`.

A job runs on R workers (ranks); H_r in [0, 1] is the mean normalised entropy of rank r's
predictions, Q_r in [0, 1] its margin uncertainty. U is a job's uncertainty.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer, number

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]
    IntArray = npt.NDArray[np.int64]

WEIGHTS: Final = (0.5, 1.5)
"""Default bounds of a worker's weight, as a multiple of the mean."""
BETA: Final = 0.3
"""Default part of the last weights in the new ones (21): that of the paper's Table 3."""
RATES: Final = (1e-5, 1e-2)
"""Default bounds of the learning rate."""


def pass_samples(gpus: int, density: float) -> int:
    """Samples of a pass of a job that has so many GPUs (12): N = g rho, rounded.

    It links the levels: the macro quota g is shared by the micro level as N samples (23), (24).
    `density` rho is the number of samples of a pass for every GPU. With a fixed number of passes
    a smaller quota then means less training, not less time for the same.
    """
    found = round(integer("gpus", gpus, 1, 2**20) * number("density", density, above=True))
    if not gpus <= found <= 2**30:
        raise InputError(f"density: {gpus} GPUs share {found} samples, expected {gpus}..2^30")
    return found


def relative_uncertainty(values: Any, *, as_printed: bool = False) -> FloatArray:
    """Uncertainty of every worker relative to the others (18): H or Q over its mean.

    Shape (workers,), values in [0, 1]; all 1 if all are 0. Printed: over the sum, so that values
    are near 1/R, and the bounds [0.5, 1.5] of (20) turn almost all of them into 0.5.
    """
    h = unit_values("H", values)
    share = h / h.sum() if h.any() else np.full(len(h), 1.0 / len(h))
    return share if as_printed else share * len(h)


def combined(relative_h: Any, relative_q: Any, alpha: float = 1.0) -> FloatArray:
    """Entropy and margin in one number a worker, alpha * H + (1 - alpha) * Q (19)."""
    part = number("alpha", alpha, 0.0, 1.0)
    h = vector("H", relative_h)
    q = vector("Q", relative_q, size=len(h))
    return part * h + (1.0 - part) * q


def smoothed_weights(
    previous: Any, u: Any, beta: float = BETA, bounds: tuple[float, float] = WEIGHTS, *,
    as_printed: bool = False,
) -> FloatArray:  # fmt: skip
    """Weights of the workers after one pass, which add up to 1 (20)-(22).

    `previous` are the last ones, 1/R each to begin with, and have the part `beta` < 1 in the new
    ones; `u`, >= 0, is what (19) gives; shapes (workers,). `bounds` are multiples of the mean.

    Printed: beta * w + (1 - beta) * clip(u), divided by its sum. That mixes weights of size 1/R
    with numbers of at least 0.5, and the division leaves the bounds. Here both have mean 1, and the
    projection onto bounds and sum is clip(mu * w, least, most).
    """
    keep = number("beta", beta, 0.0, 1.0)
    if keep == 1.0:
        raise InputError("beta: expected a number in [0, 1), got 1 (weights would never change)")
    low, high = pair("weight bounds", bounds, 1.0)
    last = unit_sum("previous", previous)
    workers = len(last)
    now = (1.0 - keep) * np.clip(vector("u", u, 0.0, size=workers), low, high)
    if as_printed:
        mixed = keep * last + now
        return np.asarray(mixed / mixed.sum())
    from optsched_solvers.quota import continuous_shares

    return continuous_shares(keep * last * workers + now, workers, low, high) / workers


def sample_counts(weights: Any, samples: int, *, as_printed: bool = False) -> IntArray:
    """Samples of every worker in a pass (23), (24), in proportion to weights that add up to 1.

    They add up to `samples`: shares rounded down, the rest to the largest fractions, ties by rank.
    Printed: rounded shares, whose leftovers may be negative. Shapes (workers,).
    """
    w, total = unit_sum("weights", weights), integer("samples", samples, 0, 2**30)
    if as_printed:
        return np.rint(w * total).astype(np.int64)
    from optsched_solvers.quota import proportional

    return proportional(w, total, 0, total)[0]


def batch_sizes(
    weights: Any, budget: int, bounds: tuple[int, int] = (8, 64), *, as_printed: bool = False
) -> IntArray:
    """Batch size of every worker (25), adding up to the budget B, the global batch of (7).

    Budget times weight within the bounds, rounded as in `sample_counts`; a budget that so many
    workers cannot share is an `InputError`. Printed: clip(round(8 + 56 w)), which ignores the
    budget: four equal workers get 22 each, 88 in all, whatever B is.
    """
    w = unit_sum("weights", weights)
    pair("batch bounds", bounds)
    least, most = (integer("batch bounds", bound, 1, 2**30) for bound in bounds)
    if as_printed:
        return np.clip(np.rint(least + (most - least) * w), least, most).astype(np.int64)
    total = integer("budget", budget, 1, 2**30)
    if not len(w) * least <= total <= len(w) * most:
        raise InputError(
            f"budget: {len(w)} workers with batches of {least}..{most} share a global batch of "
            f"{len(w) * least}..{len(w) * most}, not {total}"
        )
    from optsched_solvers.quota import proportional

    return proportional(w, total, least, most)[0]


def step_time(batches: Any) -> float:
    """Time of a step relative to equal batches on equal devices: R * max b / B, at least 1.

    All workers wait for the one with the largest batch, so skewed batches lengthen service.
    """
    b = vector("batches", batches, 0.0)
    if not b.any():
        raise InputError("batches: expected numbers >= 0, not all 0")
    return float(len(b) * b.max() / b.sum())


def uncertainty(
    weights: Any, H: Any, Q: Any = None, alpha: float = 1.0, *, as_printed: bool = False
) -> float:
    """Uncertainty of a job, in [0, 1] (26): sum w_r u_r, shapes (workers,).

    u is alpha * H + (1 - alpha) * Q (19); `Q` is needed if alpha < 1. Printed: of the *relative*
    H and Q (18), H / sum H and Q / sum Q. With equal values that is 1/R, for .1 and .9 alike, and
    jobs with unequal numbers of workers cannot be compared.
    """
    h = unit_values("H", H)
    if Q is None and number("alpha", alpha, 0.0, 1.0) < 1:
        raise InputError("Q: margin uncertainties are needed because alpha < 1")
    q = h if Q is None else unit_values("Q", Q)
    if as_printed:
        h, q = (relative_uncertainty(values, as_printed=True) for values in (h, q))
    return float(vector("weights", weights, size=len(h)) @ combined(h, q, alpha))


def learning_rate(
    rate: float, U: float, U_0: float, gamma: float = 0.5,
    bounds: tuple[float, float] = RATES, as_printed: bool = False,
) -> float:  # fmt: skip
    """Learning rate of a job of uncertainty U that began with U_0 (27).

    Here clip(rate * (U / U_0)**-gamma) of the *first* rate: the text asks to reduce the rate when U
    rises, so it grows while training converges (3.2 times at U / U_0 = .1); a negative gamma makes
    it decay. Printed: rate * (U / U_0)**gamma of the *last* rate in every epoch, which compounds
    and has the opposite sign. A U or U_0 of 0 leaves the rate as it is.
    """
    eta, now, start = (number(n, x) for n, x in (("rate", rate), ("U", U), ("U_0", U_0)))
    least, most = pair("rate bounds", bounds)
    power = number("gamma", gamma, -math.inf)
    ratio = now / start if now > 0 and start > 0 else 1.0
    exponent = math.log(ratio) * (power if as_printed else -power)
    return min(max(eta * math.exp(min(exponent, 700.0)), least), most)


def vector(
    name: str, given: Any, least: float = -math.inf, most: float = math.inf, size: int | None = None
) -> FloatArray:
    """Finite numbers within bounds, one a worker or job."""
    try:
        array = np.asarray(given)
        plain = array.astype(np.float64) if array.dtype.kind in "iuf" or not array.size else None
    except (TypeError, ValueError, OverflowError):
        plain = None
    if plain is None or plain.ndim != 1 or not np.isfinite(plain).all():
        raise InputError(f"{name}: expected a vector of finite numbers, got {given!r:.60}")
    if size not in (None, len(plain)):
        raise InputError(f"{name}: expected {size} values, got {len(plain)}")
    for i in np.flatnonzero((plain < least) | (plain > most))[:1]:
        raise InputError(f"{name}: expected {least:g}..{most:g}, value {i} is {plain[i]}")
    return plain


def unit_values(name: str, given: Any) -> FloatArray:
    """Numbers in [0, 1], at least one."""
    values = vector(name, given, 0.0, 1.0)
    if not len(values):
        raise InputError(f"{name}: expected one value a worker, got none")
    return values


def unit_sum(name: str, given: Any) -> FloatArray:
    """Numbers >= 0 that add up to 1."""
    values = vector(name, given, 0.0)
    if abs(float(values.sum()) - 1.0) > 1e-9:
        raise InputError(f"{name}: expected numbers that add up to 1, got {float(values.sum()):g}")
    return values


def pair(name: str, bounds: Any, middle: float | None = None) -> tuple[float, float]:
    """Two numbers, 0 < least <= middle <= most."""
    low, high = vector(name, bounds, size=2).tolist()
    if not 0 < low <= (low if middle is None else middle) <= high:
        between = "" if middle is None else f" {middle:g} <="
        raise InputError(f"{name}: expected 0 < least <={between} most, got {bounds!r:.60}")
    return low, high
